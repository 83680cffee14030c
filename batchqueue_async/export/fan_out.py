"""Several destinations: each record to all of them, or to the first that it is meant for.

Each destination has an exporter of its own. One that is away fills its own send queue and holds up no other, unless its
`overflow` says that it blocks.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self, cast

from batchqueue_async.errors import ConfigError, DeliveryError, Failure, UnhandledTypeError
from batchqueue_async.export.exporter import Exporter

if TYPE_CHECKING:
    from collections.abc import Coroutine, Hashable, Iterable

    from batchqueue_async.export.stats import ExporterStats, ExportReport


class _Destinations(ABC):
    """Exporters that are opened, flushed and shut down together; their names tell them apart."""

    def __init__(self, exporters: Iterable[Exporter]) -> None:
        self._exporters: dict[str, Exporter] = {}
        for exporter in exporters:
            if not isinstance(exporter, Exporter):
                raise ConfigError(
                    f"{type(self).__name__}: {exporter!r} is not an Exporter; give one for each destination"
                )
            if self._exporters.setdefault(exporter.name, exporter) is not exporter:
                raise ConfigError(
                    f"{type(self).__name__}: two exporters are named {exporter.name!r}; give each a name of its own"
                )
        if not self._exporters:
            raise ConfigError(f"{type(self).__name__}: no exporter is given; give one for each destination")

    async def __aenter__(self) -> Self:
        """Open all of them, or none."""
        async with AsyncExitStack() as stack:
            for exporter in self._exporters.values():
                await stack.enter_async_context(exporter)
            stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    @property
    def exporters(self) -> Mapping[str, Exporter]:
        """The exporters, by name."""
        return dict(self._exporters)

    @abstractmethod
    def _shares(self, batch: Sequence[Any]) -> tuple[list[tuple[Exporter, Sequence[Any]]], list[Failure]]:
        """What of a batch goes to which exporter; and what goes nowhere, with the reason."""

    async def consume(self, batch: Sequence[Any]) -> None:
        """Hand a batch over; returns when every send queue that it goes to has confirmed its share.

        Raises:
            DeliveryError: some of them did not take theirs; its `failures` say which records, and why. The others have
                theirs all the same, so that a repetition of the whole batch repeats what they have.
        """
        await self._each(batch, lambda exporter, share: exporter.consume(share))

    async def deliver(self, batch: Sequence[Any]) -> None:
        """The same; returns when every sink took its share."""
        await self._each(batch, lambda exporter, share: exporter.deliver(share))

    async def _each(
        self, batch: Sequence[Any], call: Callable[[Exporter, Sequence[Any]], Coroutine[Any, Any, None]]
    ) -> None:
        shares, unrouted = self._shares(batch)
        answers = await asyncio.gather(*(call(*share) for share in shares), return_exceptions=True)
        failures = list(unrouted)
        names: list[str] = []
        for (exporter, share), answer in zip(shares, answers, strict=True):
            if answer is None:
                continue
            if not isinstance(answer, Exception):
                raise answer
            names.append(exporter.name)
            failures += answer.failures if isinstance(answer, DeliveryError) else [Failure(tuple(share), answer)]
        if failures:
            faults = [f"{', '.join(names)} did not take what is theirs"] if names else []
            if unrouted:
                lost = sum(len(failure.items) for failure in unrouted)
                faults.append(f"no route takes {lost} of {len(batch)} records; add a route, or otherwise=")
            raise DeliveryError(f"{type(self).__name__}: {'; '.join(faults)}", failures)

    async def flush(self, timeout: float | None = None) -> None:
        """Return when everything that was kept before the call has been settled, everywhere."""
        await asyncio.gather(*(exporter.flush(timeout) for exporter in self._exporters.values()))

    async def shutdown(self, timeout: float | None = None) -> dict[str, ExportReport]:
        """Shut all of them down at once; the deadline is for the whole call."""
        reports = await asyncio.gather(*(exporter.shutdown(timeout) for exporter in self._exporters.values()))
        return dict(zip(self._exporters, reports, strict=True))

    def stats(self) -> dict[str, ExporterStats]:
        """The counts of each."""
        return {name: exporter.stats() for name, exporter in self._exporters.items()}


class FanOut(_Destinations):
    """A consumer that gives each record to every exporter.

    Example:
        >>> import asyncio, batchqueue_async as bq
        >>> from batchqueue_async.sinks.memory import MemorySink
        >>> async def main() -> tuple[list[str], list[str]]:
        ...     lake, search = MemorySink(), MemorySink()
        ...     async with bq.FanOut(bq.Exporter(lake, name="lake"), bq.Exporter(search, name="search")) as both:
        ...         await both.consume(["a"])
        ...     return lake.records, search.records
        >>> asyncio.run(main())
        (['a'], ['a'])
    """

    def __init__(self, *exporters: Exporter) -> None:
        super().__init__(exporters)

    def _shares(self, batch: Sequence[Any]) -> tuple[list[tuple[Exporter, Sequence[Any]]], list[Failure]]:
        return [(exporter, batch) for exporter in self._exporters.values()], []


class Router(_Destinations):
    """A consumer that gives each record to the first exporter that it is meant for.

    Example:
        >>> import asyncio, batchqueue_async as bq
        >>> from batchqueue_async.sinks.memory import MemorySink
        >>> async def main() -> tuple[list[object], list[object]]:
        ...     eu, rest = MemorySink(), MemorySink()
        ...     router = bq.Router(
        ...         {"eu": bq.Exporter(eu, name="eu")}, by="region", otherwise=bq.Exporter(rest, name="rest")
        ...     )
        ...     async with router:
        ...         await router.consume([{"region": "eu", "id": 1}, {"region": "us", "id": 2}])
        ...     return [row["id"] for row in eu.records], [row["id"] for row in rest.records]
        >>> asyncio.run(main())
        ([1], [2])
    """

    def __init__(
        self,
        routes: Mapping[Any, Exporter] | Sequence[tuple[Callable[[Any], object], Exporter]],
        *,
        by: str | Callable[[Any], Hashable] | None = None,
        otherwise: Exporter | None = None,
    ) -> None:
        """Say which record goes where.

        Args:
            routes: by what `by` finds in a record; or functions of a record, in their order, the first that says yes.
            by: the name of a field (a mapping's key or an attribute), or a function of a record; with a mapping.
            otherwise: takes what no route does; without it such records are refused, and the others are taken.
        """
        exporters: list[Exporter] = []
        self._by: Callable[[Any], Hashable] | None = None
        self._table: dict[Any, Exporter] = {}
        self._matches: list[tuple[Callable[[Any], object], Exporter]] = []
        if isinstance(routes, Mapping):
            if by is None:
                raise ConfigError("Router: by is missing; give the name of a field or a function of a record")
            self._by = by if callable(by) else _field(by)
            self._table = _table(routes)
            exporters += self._table.values()
        else:
            if by is not None:
                raise ConfigError(f"Router: by={by!r} goes with a mapping of routes; leave it out")
            self._matches = list(routes)
            exporters += [exporter for _, exporter in self._matches]
        self._otherwise = otherwise
        if otherwise is not None:
            exporters.append(otherwise)
        super().__init__(dict.fromkeys(exporters))

    def _route(self, record: Any) -> Exporter | None:
        if self._by is not None:
            return self._table.get(self._by(record), self._otherwise)
        for matches, exporter in self._matches:
            if matches(record):
                return exporter
        return self._otherwise

    def _shares(self, batch: Sequence[Any]) -> tuple[list[tuple[Exporter, Sequence[Any]]], list[Failure]]:
        shares: dict[Exporter, list[Any]] = {}
        lost: list[Any] = []
        failures: list[Failure] = []
        for record in batch:
            try:
                exporter = self._route(record)
            except Exception as error:  # noqa: BLE001 - the user's function, or a value without a hash: of this record
                failures.append(Failure((record,), error))
                continue
            if exporter is None:
                lost.append(record)
            else:
                shares.setdefault(exporter, []).append(record)
        if lost:
            failures.append(Failure(tuple(lost), UnhandledTypeError("no route takes it, and there is no otherwise")))
        return list(shares.items()), failures


def _table(routes: Mapping[Any, Exporter]) -> dict[Any, Exporter]:
    return dict(routes)


def _field(name: str) -> Callable[[Any], Hashable]:
    def read(record: Any) -> Hashable:
        if isinstance(record, Mapping):
            return cast("Mapping[str, Any]", record).get(name)
        return getattr(record, name, None)

    return read
