"""Batches that many processes write into a table of PostgreSQL: each attempt into one of its own, published at once."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from batchqueue_async.sinks.postgres.types import listed, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.sinks.base import Attempt, BatchKey, SendResult, Sink
    from batchqueue_async.sinks.postgres.client import Connection
    from batchqueue_async.sinks.postgres.ledger import Ledger
    from batchqueue_async.sinks.postgres.table import Table

_STAGED = """
SELECT relname FROM pg_class
WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = coalesce($2::text, current_schema()))
AND relkind = 'r' AND starts_with(relname, $1)
"""


def _digest(size: int, *words: object) -> str:
    text = "\0".join(map(str, words))
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _prefix(schema: str | None, table: str, key: BatchKey) -> str:
    return f"batchqueue_staged_{_digest(8, schema, table, key.source, key.number)}_"


def staged_name(schema: str | None, table: str, attempt: Attempt) -> str:
    """The table of one attempt: a name that fits, whatever the names it is made from."""
    return _prefix(schema, table, attempt.key) + _digest(8, attempt.part, attempt.name)


class StagedRows:
    """A sink for one attempt's rows."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    async def open(self) -> None:
        """Get ready."""
        await self._sink.open()

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Write the records into the attempt's table."""
        return await self._sink.send(batch)

    async def close(self) -> None:
        """Disconnect; what was sent is staged."""
        await self._sink.close()


class Staging:
    """The staged tables of one target."""

    def __init__(self, table: Table, ledger: Ledger) -> None:
        self._table = table
        self._ledger = ledger

    async def publish(self, connection: Connection, key: BatchKey, attempts: Sequence[Attempt]) -> bool:
        """Copy the attempts' rows, note the batch, and drop all that was staged for it."""
        await self._ledger.open(connection)
        async with connection.transaction():
            fresh = not await self._ledger.is_delivered(connection, key)
            if fresh:
                await self._copy(connection, attempts)
                await self._ledger.note_delivered(connection, key)
            await self._drop(connection, key)
        return fresh

    async def discard(self, connection: Connection, key: BatchKey) -> None:
        """Drop all that was staged for the batch."""
        async with connection.transaction():
            await self._drop(connection, key)

    async def _copy(self, connection: Connection, attempts: Sequence[Attempt]) -> None:
        table = self._table
        parts = [table.beside(staged_name(table.schema, table.name, attempt)) for attempt in attempts]
        columns: dict[str, str] = {}
        for part in parts:
            for name, kind in (await part.find(connection)).items():
                columns.setdefault(name, kind)
        if columns and not await table.find(connection):
            await table.create(connection, columns)
        table.check(columns)
        for part in parts:
            if part.columns:  # a part without rows has no table
                await connection.execute(self._copying(part.quoted, list(part.columns)))

    def _copying(self, source: str, names: Sequence[str]) -> str:
        on = self._table.upsert_on
        distinct = f"DISTINCT ON ({listed(on)}) " if on else ""
        # The last record of a key wins; a part's rows lie in the order in which they came.
        order = f" ORDER BY {listed(on)}, ctid DESC" if on else ""
        selected = f"SELECT {distinct}{listed(names)} FROM {source}{order}"  # noqa: S608 - quoted
        return f"INSERT INTO {self._table.quoted} ({listed(names)}) {selected}{self._table.on_conflict(names)}"

    async def _drop(self, connection: Connection, key: BatchKey) -> None:
        schema = self._table.schema
        found: list[Any] = await connection.fetch(_STAGED, _prefix(schema, self._table.name, key), schema)
        prefix = "" if schema is None else f"{quoted(schema)}."
        for (name,) in found:
            await connection.execute(f"DROP TABLE {prefix}{quoted(name)}")
