"""Rows into an exporter: on disk, or delivered, when their Spark batch is done."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, LockedError
from batchqueue_async.export.exporter import Exporter
from batchqueue_async.sinks.base import Sink
from batchqueue_async.spark.route import HandlerRoute, Route, SinkRoute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.export.config import ExportConfig


class _Users:
    """How many routes lead to an exporter."""

    def __init__(self) -> None:
        self.count = 0
        self.turn = asyncio.Lock()


_users: WeakKeyDictionary[Exporter, _Users] = WeakKeyDictionary()


class ExporterRoute(Route):
    """Rows go to an exporter, which is opened for the first of its routes and shut down after the last.

    With a path a batch is done when all of it is on disk; else when it is delivered. Bad rows and repetitions are the
    exporter's own business.
    """

    def __init__(self, exporter: Exporter) -> None:
        super().__init__()
        self.exporter = exporter
        self._opened = False

    async def _open(self, *, again: bool) -> None:
        """Open the exporter on this loop, unless another route did."""
        if again:
            self._opened = False
            _users.pop(self.exporter, None)  # they were on the loop that is gone
        users = _users.setdefault(self.exporter, _Users())
        async with users.turn:
            if not users.count:
                await _enter(self.exporter)
            users.count += 1
        self._opened = True

    async def send(self, rows: Sequence[Any], keys: Sequence[str] | None) -> None:  # noqa: ARG002 - the exporter makes its own keys
        """Give rows to the exporter."""
        await self.exporter.consume(rows)

    async def settle(self) -> None:
        """Wait for the delivery, where there is no disk that holds the rows, for the drain timeout at most."""
        if self.exporter.config.path is None:
            await self.exporter.flush(self.exporter.config.drain_timeout)

    async def close(self) -> None:
        """Shut the exporter down, unless other routes lead to it."""
        await super().close()
        if not self._opened:
            return
        self._opened = False
        users = _users[self.exporter]
        async with users.turn:
            users.count -= 1
            if not users.count:
                await self.exporter.shutdown()


async def _enter(exporter: Exporter) -> None:
    if not exporter.closed:
        raise ConfigError(
            f"exporter {exporter.name!r} is open already, on another loop than the one of Spark's batches; "
            "give one that is not open"
        )
    if exporter.config.overflow.startswith("drop"):
        log.warning("spark_rows_may_drop", exporter=exporter.name, overflow=exporter.config.overflow)
    await exporter.__aenter__()


class WorkerExporterRoute(ExporterRoute):
    """The same in an executor's worker, of which there are many on a machine, and which end without a word.

    A durable send queue belongs to one process, so each worker takes the first directory under the path that is free,
    with what one that ended left in it. And because a worker may have no next task, a part waits a while for its
    delivery though it is on disk.
    """

    def __init__(self, sink: Sink, config: ExportConfig) -> None:
        super().__init__(Exporter(sink, config))
        self._path = config.path

    async def _open(self, *, again: bool) -> None:  # noqa: ARG002 - a directory that is free is as good
        """Open an exporter in a directory that no other worker has."""
        number, self._opened = 0, False
        while not self._opened:
            exporter = self.exporter
            if self._path is not None:
                exporter = Exporter(exporter.sink, replace(exporter.config, path=Path(self._path, f"{number:03d}")))
            try:
                await exporter.__aenter__()
            except LockedError:
                number += 1
            else:
                self.exporter, self._opened = exporter, True

    async def settle(self) -> None:
        """Wait for the delivery; rows that are on disk may miss it."""
        with nullcontext() if self._path is None else suppress(TimeoutError):
            await self.exporter.flush(self.exporter.config.drain_timeout)

    async def close(self) -> None:
        """Shut the exporter down."""
        if self._opened:
            self._opened = False
            self._home = None
            await self.exporter.shutdown()


def route_to(target: Any) -> Route:
    """The route to a handler, a sink or an exporter."""
    if isinstance(target, Exporter):
        return ExporterRoute(target)
    return SinkRoute(target) if isinstance(target, Sink) else HandlerRoute(target)
