"""Batches that many processes write into a table of PostgreSQL: each attempt into one of its own, published at once.

A publication takes as long as its rows are many, so that no time limit is right for all of it. It is made of steps,
each within the sink's `timeout`: the rows of a part are copied by ranges of its blocks, as many at a time as take a
small part of that. All steps are one transaction. What was staged is dropped after it, table by table, because each
table that a transaction drops takes room in the server's table of locks until its end.

Where bad rows are to be left out, each range is copied behind a savepoint, and halved as long as the table refuses it,
down to the row. What is refused is tried again after all ranges, because a row may need one that comes later, and
handed over before the commit. Constraints that are `INITIALLY DEFERRED` are checked after all ranges; where one fails,
all is copied once more, with each range held to them.

A staged table says in its comment whose it is; a task that finds its batch over when it ends drops its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from batchqueue_async.errors import PermanentError
from batchqueue_async.sinks.base import PASSES, BatchKey, SinkNeeds, StagedPart
from batchqueue_async.sinks.postgres.table import CHECK_AT_ONCE, Table
from batchqueue_async.sinks.postgres.types import listed, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from batchqueue_async.errors import SinkError
    from batchqueue_async.sinks.base import Attempt, Refused, SendResult
    from batchqueue_async.sinks.postgres.client import Connection
    from batchqueue_async.sinks.postgres.ledger import Ledger
    from batchqueue_async.sinks.postgres.sink import PostgresSink

_STAGED = """
SELECT relname, pg_total_relation_size(c.oid), obj_description(c.oid) FROM pg_class c
WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = coalesce($2::text, current_schema()))
AND relkind = 'r' AND starts_with(relname, $1)
"""
_BLOCKS = "SELECT pg_relation_size(to_regclass($1)) / current_setting('block_size')::int"
_PREFIX = "batchqueue_staged_"
_FIRST = 16  # blocks of 8 KiB
_MOST_REFUSED = 10_000
"""With more rows that a table refuses, it is not the rows that are wrong."""
_TOGETHER = 500
"""The most rows that are tried again in one step."""
_SMALL, _LARGE = 1 / 16, 1 / 4
"""Which part of the timeout a step may take, below which the next one is larger, and above which it is smaller."""


_Place = tuple[int, int]
"""Of a row in its table: the block, and which row of the block."""


class _Held(NamedTuple):
    """A row that the target refused: of which staged table, where in it, and why."""

    part: Table
    place: _Place
    reason: str


def _digest(size: int, *words: object) -> str:
    text = "\0".join(map(str, words))
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _prefix(schema: str | None, table: str, key: BatchKey) -> str:
    return f"{_PREFIX}{_digest(8, schema, table, key.source, key.number)}_"


def staged_name(schema: str | None, table: str, attempt: Attempt) -> str:
    """The table of one attempt: a name that fits, whatever the names it is made from."""
    return _prefix(schema, table, attempt.key) + _digest(8, attempt.part, attempt.name)


class _About(msgspec.Struct):
    """What a staged table says of itself."""

    target: str
    source: str
    number: int
    part: int
    attempt: str
    at: float


class StagedRows:
    """A sink for one attempt's rows."""

    needs = SinkNeeds(concurrency=1, atomic=True)

    def __init__(self, sink: PostgresSink, ledger: Ledger, attempt: Attempt) -> None:
        self._sink = sink
        self._ledger = ledger
        self._attempt = attempt
        self._opened = False

    async def open(self) -> None:
        """Get ready."""
        await self._sink.open()
        self._opened = True

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Write the records into the attempt's table."""
        return await self._sink.send(batch)

    async def declare(self, schema: Any) -> None:
        """Make the attempt's table with these columns."""
        await self._sink.declare(schema)

    async def close(self) -> None:
        """Disconnect; what was sent is staged, unless the batch is over: then its table goes again."""
        try:
            if self._opened:
                self._opened = False
                async with self._sink.connection() as connection:
                    await self._describe(connection)
        finally:
            await self._sink.close()

    async def _describe(self, connection: Connection) -> None:
        name = quoted(self._sink.table)
        table = name if self._sink.schema is None else f"{quoted(self._sink.schema)}.{name}"
        if await connection.fetchval("SELECT to_regclass($1)", table) is None:
            return  # a part without rows
        if await self._ledger.is_over(connection, self._attempt.key):
            await connection.execute(f"DROP TABLE IF EXISTS {table}")
            return
        (source, number), part, attempt = self._attempt
        about = _About(self._ledger.target, source, number, part, attempt, time.time())
        text = msgspec.json.encode(about).decode().replace("'", "''")
        await connection.execute(f"COMMENT ON TABLE {table} IS '{text}'")


class Staging:
    """The staged tables of one target; `step` holds what is done inside of it to the sink's timeout."""

    def __init__(
        self, table: Table, ledger: Ledger, step: Callable[[], AbstractAsyncContextManager[None]], timeout: float
    ) -> None:
        self._table = table
        self._ledger = ledger
        self._step = step
        self._timeout = timeout
        self._blocks = _FIRST

    async def publish(
        self,
        connection: Connection,
        key: BatchKey,
        attempts: Sequence[Attempt],
        bury: Callable[[Refused], None] | None,
    ) -> bool:
        """Copy the attempts' rows and note the batch in one transaction, and drop all that was staged for it."""
        async with self._step():
            await self._ledger.open(connection)
            block = connection.transaction()
            await block.start()
            fresh = not await self._ledger.is_delivered(connection, key)
        if fresh:
            refused: Refused | None = None if bury is None else []
            await self._copy(connection, attempts, refused)
            if bury is not None:
                await asyncio.to_thread(bury, refused or [])
        async with self._step():
            if fresh:
                await self._ledger.note_delivered(connection, key)
            await block.commit()
        await self.discard(connection, key)
        return fresh

    async def discard(self, connection: Connection, key: BatchKey) -> None:
        """Drop all that was staged for the batch."""
        schema = self._table.schema
        for name, _, _ in await self._found(connection, _prefix(schema, self._table.name, key)):
            await self._drop(connection, name)

    async def abandon(self, connection: Connection, key: BatchKey) -> None:
        """Drop all that was staged for a batch that is over, and let nobody publish it any more."""
        async with self._step():
            await self._ledger.open(connection)
            async with connection.transaction():
                if not await self._ledger.is_delivered(connection, key):
                    await self._ledger.note_delivered(connection, key)
        await self.discard(connection, key)

    async def parts(self, connection: Connection) -> list[StagedPart]:
        """What is staged for this target; tables that don't say whose they are are listed for every target."""
        found: list[StagedPart] = []
        for name, size, text in await self._found(connection, _PREFIX):
            about = _about(text)
            if about is None:
                found.append(StagedPart(BatchKey("", 0), 0, name, "staged", size, None))
            elif about.target == self._ledger.target:
                key = BatchKey(about.source, about.number)
                found.append(StagedPart(key, about.part, about.attempt, "staged", size, about.at))
        return found

    async def prune(self, connection: Connection, older_than: float) -> list[BatchKey]:
        """Drop what was staged more than so many seconds ago; tables that don't say when are left."""
        gone: list[BatchKey] = []
        for name, _, text in await self._found(connection, _PREFIX):
            about = _about(text)
            if about is None or about.target != self._ledger.target or time.time() - about.at <= older_than:
                continue
            await self._drop(connection, name)
            key = BatchKey(about.source, about.number)
            gone += [] if key in gone else [key]
        return gone

    async def _found(self, connection: Connection, prefix: str) -> list[Any]:
        async with self._step():
            return await connection.fetch(_STAGED, prefix, self._table.schema)

    async def _drop(self, connection: Connection, name: str) -> None:
        prefix = "" if self._table.schema is None else f"{quoted(self._table.schema)}."
        async with self._step():
            await connection.execute(f"DROP TABLE IF EXISTS {prefix}{quoted(name)}")

    # -- rows ----------------------------------------------------------------------------------------------------

    async def _copy(self, connection: Connection, attempts: Sequence[Attempt], refused: Refused | None) -> None:
        table = self._table
        parts = [table.beside(staged_name(table.schema, table.name, attempt)) for attempt in attempts]
        columns: dict[str, str] = {}
        for part in parts:
            async with self._step():
                found = await part.find(connection)
            for name, kind in found.items():
                if name not in columns or columns[name] == "":
                    columns[name] = "" if name in part.untyped else kind
        async with self._step():
            if table.upsert_on:
                # Each range is in the order of its keys, and many of them in none: of two that write the same rows one
                # would wait for the other in a circle.
                await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 1))", table.quoted)
            if columns and not await table.find(connection):
                await table.create(connection, columns)
            elif columns:
                await table.suit(connection, columns)
            if refused is None and (stranger := table.stranger(columns)) is not None:
                raise stranger
        parts = [part for part in parts if part.columns]  # one without rows may have no table
        if refused is None:
            await self._copy_parts(connection, parts, None)
            return
        held: list[_Held] = []
        if not await self._copy_whole(connection, parts, held):
            held.clear()
            async with self._step():
                await connection.execute(CHECK_AT_ONCE)
            await self._copy_parts(connection, parts, held)
        refused += [(await self._row(connection, each.part, each.place), each.reason) for each in held]

    async def _copy_parts(self, connection: Connection, parts: Sequence[Table], held: list[_Held] | None) -> None:
        for part in parts:
            await self._copy_part(connection, part, held)
        if held and not self._table.upsert_on:  # else an older row would replace a newer one
            await self._try_again(connection, held)

    async def _copy_whole(self, connection: Connection, parts: Sequence[Table], held: list[_Held]) -> bool:
        """Copy all parts, unless what is in then does not keep to constraints that are checked at the end."""
        save = connection.transaction()
        async with self._step():
            await save.start()
        await self._copy_parts(connection, parts, held)
        async with self._step():
            try:
                await connection.execute(CHECK_AT_ONCE)
            except Exception as error:
                if self._table.refusal(error) is None:
                    raise
                await save.rollback()
                return False
            await save.commit()
        return True

    def _changes(self, part: Table) -> list[tuple[str, PermanentError]]:
        """Which rows a column of another type would change, and why that is refused: PostgreSQL rounds in silence."""
        known = self._table.columns or {}
        found: list[tuple[str, PermanentError]] = []
        for name, kind in (part.columns or {}).items():
            wanted = known[name]
            if wanted == kind or name in part.untyped:
                continue
            column = quoted(name)
            reason = PermanentError(
                f"PostgreSQL sink, table {self._table.name!r}: column {name!r} of type {wanted} would change "
                f"values of type {kind}; widen the column by ALTER TABLE or schema='widen', or cast the values",
                error_type="refused",
            )
            found.append((f"{column}::{wanted}::{kind} IS DISTINCT FROM {column}", reason))
        return found

    async def _copy_part(self, connection: Connection, part: Table, held: list[_Held] | None) -> None:
        if held is None:
            for changed, reason in self._changes(part):
                async with self._step():
                    if await _has(connection, part, changed):
                        raise reason
        statement = self._copying(part)
        loop = asyncio.get_running_loop()
        async with self._step():
            end = int(await connection.fetchval(_BLOCKS, part.quoted))
        at = 0
        while at < end:
            started, size = loop.time(), min(self._blocks, end - at)
            if held is None:
                async with self._step():
                    await connection.execute(statement.format(rows=_between(((at, 0), (at + size, 0)))))
            else:
                await self._sift(connection, part, statement, ((at, 0), (at + size, 0)), held)
            at += size
            share = (loop.time() - started) / self._timeout
            if share < _SMALL and at < end:
                self._blocks = size * 2
            elif share > _LARGE:
                self._blocks = max(1, size // 2)

    def _copying(self, part: Table) -> str:
        """The statement that copies the rows of some blocks; of those with one key the last one stays."""
        names, on, known = list(part.columns or {}), self._table.upsert_on, self._table.columns or {}
        values = ", ".join(f"NULL::{known[name]}" if name in part.untyped else quoted(name) for name in names)
        first = f"DISTINCT ON ({listed(on)}) " if on else ""
        last = f" ORDER BY {listed(on)}, ctid DESC" if on else ""
        text = f"INSERT INTO {self._table.quoted} ({listed(names)}) SELECT {first}{values} FROM {part.quoted}"  # noqa: S608
        return f"{_escaped(text)} WHERE {{rows}}" + _escaped(f"{last}{self._table.on_conflict(names)}")

    # -- without bad rows ----------------------------------------------------------------------------------------

    async def _sift(
        self, connection: Connection, part: Table, statement: str, span: tuple[_Place, _Place], held: list[_Held]
    ) -> None:
        """Copy the rows from one place to before another, but for those that the table refuses."""
        error = await self._try(connection, part, statement, _between(span))
        if error is None:
            return
        first, end = span
        middle = ((first[0] + end[0]) // 2, 0)
        if end[0] - first[0] < 2:  # noqa: PLR2004 - within one block
            async with self._step():
                found = await connection.fetch(
                    f"SELECT ctid FROM {part.quoted} WHERE {_between(span)} ORDER BY ctid"  # noqa: S608 - quoted
                )
            if len(found) < 2:  # noqa: PLR2004 - nothing left to halve
                held += [_Held(part, each["ctid"], str(error)) for each in found]
                if len(held) > _MOST_REFUSED:
                    raise error
                return
            middle = found[len(found) // 2]["ctid"]
        await self._sift(connection, part, statement, (first, middle), held)
        await self._sift(connection, part, statement, (middle, end), held)

    async def _try_again(self, connection: Connection, held: list[_Held]) -> None:
        """Copy what was refused once more: what it needs may have come later. Until no more of it goes in."""
        for _ in range(PASSES):
            before = list(held)
            held.clear()
            for part, run in groupby(before, key=attrgetter("part")):
                held += await self._still_refused(connection, part, self._copying(part), list(run))
            if len(held) == len(before):
                return

    async def _still_refused(
        self, connection: Connection, part: Table, statement: str, rows: Sequence[_Held]
    ) -> list[_Held]:
        if len(rows) <= _TOGETHER:
            places = ", ".join(f"'{_tid(each.place)}'" for each in rows)
            error = await self._try(connection, part, statement, f"ctid = ANY (ARRAY[{places}]::tid[])")
            if error is None:
                return []
            if len(rows) == 1:
                return [rows[0]._replace(reason=str(error))]
        middle = len(rows) // 2
        halves = rows[:middle], rows[middle:]
        return [each for half in halves for each in await self._still_refused(connection, part, statement, half)]

    async def _try(self, connection: Connection, part: Table, statement: str, rows: str) -> SinkError | None:
        """Copy rows, all of them or none; why they are refused."""
        if (stranger := self._table.stranger(part.columns or ())) is not None:
            return stranger
        async with self._step():
            try:
                async with connection.transaction():  # inside another one: a savepoint
                    for changed, reason in self._changes(part):
                        if await _has(connection, part, f"{changed} AND {rows}"):
                            return reason
                    await connection.execute(statement.format(rows=rows))
            except Exception as error:
                refusal = self._table.refusal(error)
                if refusal is None:
                    raise
                return refusal
        return None

    async def _row(self, connection: Connection, part: Table, place: _Place) -> dict[str, Any]:
        async with self._step():
            found = await connection.fetch(
                f"SELECT {listed(part.columns or ())} FROM {part.quoted} WHERE ctid = '{_tid(place)}'::tid"  # noqa: S608 - quoted
            )
        return dict(found[0])


async def _has(connection: Connection, part: Table, condition: str) -> bool:
    return bool(await connection.fetchval(f"SELECT EXISTS (SELECT FROM {part.quoted} WHERE {condition})"))  # noqa: S608 - quoted


def _between(span: tuple[_Place, _Place]) -> str:
    return f"ctid >= '{_tid(span[0])}'::tid AND ctid < '{_tid(span[1])}'::tid"


def _tid(place: _Place) -> str:
    return f"({place[0]},{place[1]})"


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _about(text: str | None) -> _About | None:
    try:
        return msgspec.json.decode(text or "", type=_About)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None  # its task is under way, or was killed
