"""What sinks share whose destination takes a table of rows in one commit that carries a key of its own.

The key is a source and a number that only goes up: what has a number at or below the last one is in already. So a
repetition has no effect, as long as the batches of a source come one after the other, which `needs` says.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from batchqueue_async.errors import ConfigError, PermanentError, RetryableError
from batchqueue_async.sinks._shared.arrow import arrow_rows, unwritable
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.thread import SinkThread
from batchqueue_async.sinks.base import SendResult, SinkNeeds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.sinks.base import BatchKey

SchemaMode = Literal["strict", "add"]


class CommitSink(ABC):
    """Writes each batch in one commit; a subclass says what a commit is.

    Attributes:
        extra: what installs the library.
    """

    concurrent = False
    needs = SinkNeeds(ordering="order", concurrency=1, idempotent=True, atomic=True)
    extra: ClassVar[str]

    def __init__(self, *, columns: Sequence[str] | None, schema: SchemaMode) -> None:
        if schema not in {"strict", "add"}:
            raise ConfigError(f"{type(self).__name__}: schema={schema!r} is unknown; give 'strict' or 'add'")
        self.columns = None if columns is None else tuple(columns)
        self.schema: SchemaMode = schema
        self._thread: SinkThread | None = None
        self._turn: asyncio.Lock

    async def open(self) -> None:
        """Get ready; the table is looked at when the first batch comes."""
        self._check()
        self._turn = asyncio.Lock()
        self._thread = SinkThread(self.extra)

    async def close(self) -> None:
        """Let go of the table; a transaction that is under way is undone."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.close()

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Write the records in one commit; delivers at least once, as there is no key."""
        async with self._turn_of_open():
            result: SendResult | None = await self.run(self._write, batch, None)
        return result

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult | None:
        """Write the records that are not in yet, in one commit for each source of keys."""
        by_source: dict[str, list[tuple[int, int]]] = {}
        for place, key in enumerate(keys):
            source, _, number = key.rpartition("/")
            if not source or not number.isdecimal():
                raise PermanentError(f"{self!r}: the key {key!r} is not of the form 'source/number'")
            by_source.setdefault(source, []).append((int(number), place))
        rejected: dict[int, Any] = {}
        skipped = 0
        async with self._turn_of_open():
            for source, numbered in by_source.items():
                result = await self.run(self._write_numbered, batch, source, numbered)
                rejected |= result.rejected
                skipped += result.skipped
        return SendResult(rejected=rejected, skipped=skipped)

    async def begin(self, key: BatchKey) -> CommitTransaction | None:
        """Start a transaction for the batch, or return None: it is in already."""
        turn = self._turn_of_open()
        await turn.acquire()
        try:
            if await self.run(self._last, key.source) < key.number:
                return CommitTransaction(self, key, turn)
        except BaseException:
            turn.release()
            raise
        turn.release()
        return None

    def _turn_of_open(self) -> asyncio.Lock:
        if self._thread is None:
            raise RuntimeError(f"{self!r} is not open; call open() first")
        return self._turn

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._thread is None:
            raise RetryableError(f"{self!r}: the sink was closed")
        try:
            return await self._thread.run(function, *args)
        except Exception as error:
            # The libraries raise errors of many kinds: a subclass tells them apart.
            meant = self._error(error)
            if meant is error:
                meant = unwritable(error, self, self.extra) or error
            if meant is error:
                raise
            raise meant from error

    # -- in the thread -------------------------------------------------------------------------------------------

    def _write(self, batch: Sequence[Any], mark: tuple[str, int] | None) -> SendResult | None:
        found = arrow_rows(batch, self.columns, self._columns_now(batch), self.extra)
        if found.table is not None or mark is not None:
            self._append(found.table, mark)
        return SendResult(rejected=found.refused) if found.refused else None

    def _write_numbered(self, batch: Sequence[Any], source: str, numbered: list[tuple[int, int]]) -> SendResult:
        last = self._last(source)
        fresh = [(number, place) for number, place in numbered if number > last]
        skipped = len(numbered) - len(fresh)
        if not fresh:
            return SendResult(skipped=skipped)
        places = [place for _, place in fresh]
        result = self._write([batch[place] for place in places], (source, max(fresh)[0]))
        rejected = {} if result is None else {places[at]: error for at, error in result.rejected.items()}
        return SendResult(rejected=rejected, skipped=skipped)

    def _columns_now(self, batch: Sequence[Any]) -> Any:
        """The table's schema as Arrow's, with the columns that are to be added; None where there is no table."""
        known = self._schema()
        if known is None or self.schema == "strict":
            return known
        types = arrow_rows(batch, self.columns, None, self.extra).table
        new = [] if types is None else [field for field in types.schema if field.name not in known.names]
        for field in new:
            known = known.append(field)
        return known

    def rows_of(self, batch: Sequence[Any]) -> Any:
        """The records as Arrow rows of the table's columns."""
        return arrow_rows(batch, self.columns, self._columns_now(batch), self.extra)

    def commit_all(self, tables: Sequence[Any], key: BatchKey) -> None:
        """Write the tables of a batch in one commit, with its key."""
        joined = require("pyarrow", self.extra).concat_tables(tables) if tables else None
        self._append(joined, (key.source, key.number))

    @abstractmethod
    def _check(self) -> None:
        """Raise a ConfigError where the library is missing."""

    @abstractmethod
    def _schema(self) -> Any:
        """The table's schema as Arrow's; None where there is no table."""

    @abstractmethod
    def _last(self, source: str) -> int:
        """The number of the source's last commit; -1 where there is none."""

    @abstractmethod
    def _append(self, table: Any, mark: tuple[str, int] | None) -> None:
        """Append rows, which may be none, in one commit that notes the source and number."""

    @abstractmethod
    def _error(self, error: Exception) -> Exception:
        """What an error of the library means."""


class CommitTransaction:
    """One batch on its way into a table: what is sent is kept, and written at the commit."""

    def __init__(self, sink: CommitSink, key: BatchKey, turn: asyncio.Lock) -> None:
        self._sink = sink
        self._key = key
        self._turn = turn
        self._tables: list[Any] = []
        self._open = True

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Keep records for the commit."""
        found = await self._sink.run(self._sink.rows_of, batch)
        if found.table is not None:
            if self._tables and self._tables[0].schema != found.table.schema:
                raise PermanentError(f"{self._sink!r}: the records of one batch have different columns; declare them")
            self._tables.append(found.table)
        return SendResult(rejected=found.refused) if found.refused else None

    async def commit(self) -> None:
        """Write all of it in one commit, with the batch's key."""
        await self._sink.run(self._sink.commit_all, self._tables, self._key)
        self._finish()

    async def rollback(self) -> None:
        """Forget all of it; does nothing after a commit."""
        self._finish()

    def _finish(self) -> None:
        self._tables = []
        if self._open:
            self._open = False
            self._turn.release()
