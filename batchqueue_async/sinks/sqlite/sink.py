"""Rows in a SQLite table: a transaction for each batch, and each batch or record exactly once where it has a key."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import quote

from batchqueue_async.errors import ConfigError, PermanentError
from batchqueue_async.sinks._shared.declared import columns_of
from batchqueue_async.sinks._shared.records import row_key
from batchqueue_async.sinks._shared.staging import Staging
from batchqueue_async.sinks._shared.thread import SinkThread
from batchqueue_async.sinks.base import PASSES, BatchKey, Refused, SendResult, SinkNeeds
from batchqueue_async.sinks.sqlite.table import RESERVED, SchemaMode, Table, declared_type, quoted

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Sequence

    from batchqueue_async.sinks.base import Attempt, Delivered, StagedPart

_FETCH = 10_000
_MOST_REFUSED = 10_000
"""With more rows that a table refuses, it is not the rows that are wrong."""


class SqliteSink:
    """Inserts records into a table, which is made from the first ones.

    A record is a mapping, struct or dataclass of named values, or an Arrow record batch of many rows; tuples need
    `columns` or an existing table, and anything else goes into a column `value`. Times are stored as ISO 8601 text,
    containers as JSON. Each send is one durable transaction. With `begin` many sends are one, and the batch's key is
    noted in it; with `send_keyed` each record's key is. Both make a repetition have no effect.

    Example:
        >>> import tempfile
        >>> async def main(path: str) -> list[tuple[int, str]]:
        ...     sink = SqliteSink(path, table="people")
        ...     await sink.open()
        ...     await sink.send([{"id": 1, "name": "Ada"}])
        ...     await sink.close()
        ...     with closing(sqlite3.connect(path)) as database:
        ...         return database.execute("SELECT * FROM people").fetchall()
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     asyncio.run(main(f"{directory}/out.db"))
        [(1, 'Ada')]
    """

    concurrent = False  # a file has one writer
    replaces = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        table: str = "rows",
        *,
        columns: Sequence[str] | None = None,
        busy_timeout: float = 30.0,
        schema: SchemaMode = "strict",
        upsert_on: Sequence[str] = (),
    ) -> None:
        """Say which table of which file.

        Args:
            path: the file; made, for its owner only, if there is none.
            table: the table; made from the first records if there is none.
            columns: the names of the values in records that are tuples, and the order of a new table's first columns.
            busy_timeout: seconds to wait for other writers of the file.
            schema: what is done with values that a column would change, and with columns that the table has not:
                "strict" refuses their records, "widen" makes the column one that keeps any value, as long as the table
                has nothing but plain columns, "add" does that and adds columns.
            upsert_on: the columns of a unique constraint by which a row that is there is replaced; a new table gets it.
        """
        if not table or table in RESERVED:
            raise ConfigError(f"SQLite sink: table={table!r} is {'reserved' if table else 'empty'}; name another")
        if schema not in get_args(SchemaMode):
            raise ConfigError(
                f"SQLite sink: schema={schema!r} is unknown; give one of {', '.join(get_args(SchemaMode))}"
            )
        self.path = Path(path)
        self.table = table
        self.schema: SchemaMode = schema
        self.columns = columns
        self.busy_timeout = busy_timeout
        self.upsert_on = tuple(upsert_on)
        self.needs = SinkNeeds(
            ordering="key" if self.upsert_on else "any",
            key=row_key(self.upsert_on, columns) if self.upsert_on else None,
            concurrency=1,
            idempotent=True,
            atomic=True,
        )
        self._table = self._make_table(self.path)
        self._thread: SinkThread | None = None
        self._turn: asyncio.Lock

    def _make_table(self, path: Path) -> Table:
        return Table(path, self.table, self.columns, self.busy_timeout, self.schema, upsert_on=self.upsert_on)

    def __reduce__(self) -> tuple[Any, ...]:
        options: dict[str, Any] = {"columns": self.columns, "busy_timeout": self.busy_timeout, "schema": self.schema}
        options["upsert_on"] = self.upsert_on
        return partial(type(self), str(self.path), self.table, **options), ()

    async def open(self) -> None:
        """Connect, in a thread of the sink's own."""
        self._turn = asyncio.Lock()
        self._thread = SinkThread("sqlite")
        await self._thread.run(self._table.open)

    async def declare(self, schema: Any) -> None:
        """See to it that there is a table for the columns of an Arrow schema, with their types, before any record."""
        async with self._turn:
            await self._open_thread.run(self._declare, _declared(schema))

    async def send(self, batch: Sequence[Any]) -> None:
        """Insert the records in one transaction.

        Raises:
            RetryableError: the file is locked or the disk full; nothing of the batch is in.
            PermanentError: a record does not fit the table; nothing of the batch is in. Its `culprits` are the records,
                where the reason is a value or a column.
        """
        async with self._turn:
            await self._open_thread.run(self._send, batch)

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult:
        """Insert the records whose keys are not in yet, and the keys, in one transaction."""
        async with self._turn:
            return await self._open_thread.run(self._send_keyed, batch, keys)

    async def begin(self, key: BatchKey) -> SqliteTransaction | None:
        """Start a transaction for the batch, or return None: it is in already."""
        thread = self._open_thread
        await self._turn.acquire()
        try:
            if await thread.run(self._begin, key):
                return SqliteTransaction(self._table, thread, self._turn, key)
        except BaseException:
            # A cancelled begin may have begun: its thread undoes that before it does anything else.
            thread.start(self._table.rollback)
            self._turn.release()
            raise
        self._turn.release()
        return None

    async def close(self) -> None:
        """Disconnect; a transaction that is under way is undone."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                await thread.run(self._table.close)
            finally:
                await thread.close()

    @property
    def _open_thread(self) -> SinkThread:
        if self._thread is None:
            raise RuntimeError(f"SQLite sink {str(self.path)!r} is not open; call open() first")
        return self._thread

    # -- in the thread -------------------------------------------------------------------------------------------

    def _declare(self, columns: dict[str, str]) -> None:
        if self._table.lacks(columns):
            with self._table.transaction():
                self._table.declare(columns)

    def _send(self, batch: Sequence[Any]) -> None:
        with self._table.transaction():
            self._table.insert(batch)

    def _send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult:
        with self._table.transaction():
            fresh = self._table.take_keys(keys)
            places = [place for place, is_new in enumerate(fresh) if is_new]
            try:
                self._table.insert([batch[place] for place in places])
            except PermanentError as error:
                error.culprits = tuple(places[at] for at in error.culprits)
                raise
        return SendResult(skipped=fresh.count(False))

    def _begin(self, key: BatchKey) -> bool:
        self._table.begin()
        if not self._table.is_delivered(key):
            return True
        self._table.rollback()
        return False

    # -- what is in ----------------------------------------------------------------------------------------------

    async def delivered(self) -> list[Delivered]:
        """The notes of the batches that are in, by source."""
        async with self._turn:
            return await self._open_thread.run(self._table.delivered)

    async def forget(self, sources: Sequence[str]) -> int:
        """Take back the notes of sources, whose batches are delivered again if they come again; how many there were."""
        async with self._turn:
            return await self._open_thread.run(self._forget, sources)

    def _forget(self, sources: Sequence[str]) -> int:
        with self._table.transaction():
            return self._table.forget(sources)

    # -- many processes ------------------------------------------------------------------------------------------

    @property
    def _staging(self) -> Staging:
        return Staging(self.path.with_name(f"{self.path.name}.staging"), ".db")

    def stage(self, attempt: Attempt) -> StagedTable:
        """A sink for one attempt: a file of its own, beside the database."""
        table = Table(self._staging.file(attempt), self.table, self.columns, self.busy_timeout, self.schema)
        return StagedTable(table, self._staging, attempt)

    async def publish(self, key: BatchKey, attempts: Sequence[Attempt]) -> bool:
        """Copy the attempts' rows into the table, and note the batch, in one transaction."""
        return await self.publish_sifted(key, attempts, None)

    async def publish_sifted(
        self, key: BatchKey, attempts: Sequence[Attempt], bury: Callable[[Refused], None] | None
    ) -> bool:
        """Publish, without the rows that the table refuses: those are given to `bury` before all others are in.

        Args:
            key: the batch.
            attempts: those that count.
            bury: called in a thread with those and the reasons; None refuses the batch instead.
        """
        thread = SinkThread("sqlite")
        try:
            return await thread.run(self._publish, key, attempts, bury)
        finally:
            await thread.close()

    async def discard(self, key: BatchKey) -> None:
        """Remove what was staged for the batch, which may come again."""
        await asyncio.to_thread(self._staging.discard, key)

    async def abandon(self, key: BatchKey) -> None:
        """Remove what was staged for a batch that never comes again, and let tasks that still run do the same."""
        await asyncio.to_thread(self._staging.abandon, key)

    async def staged(self) -> list[StagedPart]:
        """What is staged, of all batches."""
        return await asyncio.to_thread(self._staging.parts)

    async def prune(self, older_than: float) -> list[BatchKey]:
        """Remove what was not changed for so many seconds."""
        return await asyncio.to_thread(self._staging.prune, older_than)

    def _publish(self, key: BatchKey, attempts: Sequence[Attempt], bury: Callable[[Refused], None] | None) -> bool:
        table = self._make_table(self.path)
        staged = [self._make_table(self._staging.path(attempt)) for attempt in attempts]
        try:
            table.open()
            with table.transaction():
                fresh = not table.is_delivered(key)
                if fresh:
                    refused: Refused | None = None if bury is None else []
                    _copy(staged, table, refused)
                    if bury is not None:
                        bury(refused or [])
                    table.note_delivered(key)
        finally:
            table.close()
        self._staging.finish(key)
        return fresh


class SqliteTransaction:
    """One batch on its way into a table."""

    def __init__(self, table: Table, thread: SinkThread, turn: asyncio.Lock, key: BatchKey) -> None:
        self._table = table
        self._thread = thread
        self._turn = turn
        self._key = key
        self._open = True

    async def declare(self, schema: Any) -> None:
        """See to it that there is a table for the columns of an Arrow schema; nobody sees it before the commit."""
        await self._thread.run(self._table.declare, _declared(schema))

    async def send(self, batch: Sequence[Any]) -> None:
        """Insert records; nobody sees them before the commit."""
        await self._thread.run(self._table.insert, batch)

    async def try_send(self, batch: Sequence[Any]) -> None:
        """Insert records; where the table refuses one, none of them is in, and the transaction goes on.

        Whatever has taken the place of `send` says what is refused.
        """
        save = self._table.savepoint()
        await self._thread.run(save.__enter__)
        try:
            await self.send(batch)
        except BaseException as error:  # a cancellation too: the savepoint must not stay open
            await self._thread.run(save.__exit__, type(error), error, error.__traceback__)
            raise
        await self._thread.run(save.__exit__, None, None, None)

    async def clear(self) -> None:
        """Remove all rows of the table; they are there for others until the commit."""
        await self._thread.run(self._table.clear)

    async def commit(self) -> None:
        """Note the batch and commit all of it."""
        await self._thread.run(self._commit)
        self._end()

    async def rollback(self) -> None:
        """Undo all of it."""
        if self._open:
            try:
                if not self._thread.closed:  # the close of the sink undid it
                    await self._thread.run(self._table.rollback)
            finally:
                self._end()

    def _commit(self) -> None:
        self._table.note_delivered(self._key)
        self._table.commit()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._turn.release()


class StagedTable:
    """A sink for one attempt's rows: all of them in one transaction, which its `close` commits."""

    needs = SinkNeeds(concurrency=1, atomic=True)

    def __init__(self, table: Table, staging: Staging, attempt: Attempt) -> None:
        self._table = table
        self._staging = staging
        self._attempt = attempt
        self._thread = SinkThread("sqlite")
        self._closed = False

    async def open(self) -> None:
        """Make the attempt's file."""
        await self._thread.run(self._open)

    def _open(self) -> None:
        # No reader comes before the close, so that a rollback journal and one transaction are the least work.
        self._table.open(journal="DELETE")
        self._table.begin()

    async def declare(self, schema: Any) -> None:
        """Make the attempt's table with these columns."""
        await self._thread.run(self._table.create, _declared(schema))

    async def send(self, batch: Sequence[Any]) -> None:
        """Insert the records; nothing of a batch that is refused."""
        await self._thread.run(self._send, batch)

    def _send(self, batch: Sequence[Any]) -> None:
        with self._table.savepoint():
            self._table.insert(batch)

    async def close(self) -> None:
        """Commit, and close the file, which goes again where its batch was abandoned meanwhile."""
        if not self._closed:
            self._closed = True
            try:
                await self._thread.run(self._close)
            finally:
                await self._thread.close()

    def _close(self) -> None:
        try:
            if self._table.is_open:
                self._table.commit()
        finally:
            self._table.close()
            self._staging.leave(self._attempt)


def _declared(schema: Any) -> dict[str, str]:
    return {column.name: declared_type(column) for column in columns_of(schema)}


def _copy(staged: Sequence[Table], table: Table, refused: Refused | None) -> None:
    """Copy the rows of the staged tables; a part without rows may have no table."""
    columns: dict[str, str] = {}
    for each in staged:
        with _reading(each) as (_, found):
            columns |= {name: kind for name, kind in found.items() if kind or name not in columns}
    if columns:
        with nullcontext() if refused is None or table.columns is None else suppress(PermanentError):
            table.suit(columns)
    known = table.schema()
    groups: list[_Group] = []
    for each in staged:
        with _reading(each) as (source, found):
            if not found:
                continue
            alike = all(known.get(name) == kind for name, kind in found.items())
            group = _Group(table.insert_tuples if alike else table.insert_checked, tuple(found), [])
            groups.append(group)
            rows = source.execute(f"SELECT * FROM {quoted(each.name)}")  # noqa: S608 - quoted
            while values := rows.fetchmany(_FETCH):
                if refused is None:
                    group.insert(group.columns, values)
                else:
                    most = _MOST_REFUSED - _refused_in(groups)
                    group.refused += table.insert_sifted(group.insert, group.columns, values, most)
    if refused is not None:
        if not table.upsert_on:  # else an older row would replace a newer one
            _try_again(table, groups)
        refused += [each for group in groups for each in group.refused]


@dataclass(slots=True)
class _Group:
    """The rows of one staged table: how they are inserted, and those that were refused."""

    insert: Callable[[Sequence[str], Sequence[Sequence[Any]]], None]
    columns: tuple[str, ...]
    refused: Refused


def _refused_in(groups: Sequence[_Group]) -> int:
    return sum(len(group.refused) for group in groups)


def _try_again(table: Table, groups: Sequence[_Group]) -> None:
    """Insert what was refused once more: what it needs may have come later. Until no more of it goes in."""
    for _ in range(PASSES):
        before = _refused_in(groups)
        for group in groups:
            again = [tuple(row.values()) for row, _ in group.refused]
            group.refused = table.insert_sifted(group.insert, group.columns, again, len(again)) if again else []
        if _refused_in(groups) == before:
            return


@contextmanager
def _reading(table: Table) -> Generator[tuple[sqlite3.Connection, dict[str, str]]]:
    """A staged file, and the columns of its table."""
    with closing(sqlite3.connect(f"file:{quote(str(table.path))}?mode=ro", uri=True)) as source:
        found = source.execute("SELECT name, type FROM pragma_table_info(?)", (table.name,)).fetchall()
        yield source, dict(found)
