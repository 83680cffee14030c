"""One batch on its way into a table of PostgreSQL: the short way when all is well, else the careful one."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from batchqueue_async.errors import RetryableError, SinkError
from batchqueue_async.sinks._shared.tabular import Rows, tabular
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.sinks.postgres.client import is_of_record, is_of_schema, state_of
from batchqueue_async.sinks.postgres.ledger import in_a_row, is_taken, numbered
from batchqueue_async.sinks.postgres.table import CHECK_AT_ONCE, Written, is_of_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager, AsyncExitStack

    from batchqueue_async.sinks.base import BatchKey
    from batchqueue_async.sinks.postgres.client import Connection, TransactionBlock
    from batchqueue_async.sinks.postgres.ledger import Ledger
    from batchqueue_async.sinks.postgres.table import Table

_TRIES = 10
_VIOLATION = "08P01"


class BatchWrite:
    """Writes one batch: rows of the same columns, those that fit, and in the end what became of each record."""

    def __init__(
        self, table: Table, ledger: Ledger, connection: Connection, batch: Sequence[Any], columns: Sequence[str] | None
    ) -> None:
        self._table = table
        self._ledger = ledger
        self._connection = connection
        self._batch = batch
        self._columns = columns
        self._rows: list[Rows] = []
        self._refused: dict[int, SinkError] = {}
        # By place, the records that are to be noted: as a range, until one of them is not to be.
        self._range: tuple[str, range] | None = None
        self._keys: dict[int, tuple[str, int]] = {}
        self._skipped = 0
        self._way: Literal["shortly", "staged", "carefully"] = "shortly"

    async def send(self) -> SendResult:
        """Write all records."""
        await self._sort()
        return await self._written()

    async def send_keyed(self, keys: Sequence[str]) -> SendResult:
        """Write the records whose keys are new."""
        if self._table.key_column is not None:
            return await self._send_with_key_column(keys, self._table.key_column)
        await self._ledger.open(self._connection)
        if (in_row := in_a_row(keys)) is not None:
            await self._ledger.learn(self._connection, in_row[:1])
            self._range = in_row
            await self._sort()
            return await self._written()
        found = numbered(keys)
        await self._ledger.learn(self._connection, found.sources)
        self._keys = dict(enumerate(found.keys))
        await self._sort()
        if len(set(found.keys)) < len(keys):
            self._skip_repeated(found.keys)
        return await self._written()

    def _skip_repeated(self, keys: Sequence[tuple[str, int]]) -> None:
        firsts: dict[tuple[str, int], int] = {}
        for place, key in enumerate(keys):
            firsts.setdefault(key, place)
        self._skip(set(range(len(keys))) - set(firsts.values()))

    async def _send_with_key_column(self, keys: Sequence[str], column: str) -> SendResult:
        self._sort_rows()
        self._rows = [_with_keys(rows, keys, column) for rows in self._rows]
        await self._fit()
        total = sum(len(rows.values) for rows in self._rows)
        written = await self._write()
        refused = sum(place in written.refused for rows in self._rows for place in rows.places)
        return SendResult(rejected=self._refused | written.refused, skipped=total - written.new - refused)

    # -- the batch -----------------------------------------------------------------------------------------------

    async def _sort(self) -> None:
        self._sort_rows()
        await self._fit()

    def _sort_rows(self) -> None:
        self._rows, refused = tabular(self._batch, self._columns)
        self._refuse(refused)

    async def _fit(self) -> None:
        self._rows, refused = await self._table.fit(self._connection, self._rows)
        self._refuse(refused)

    def _refuse(self, refused: Mapping[int, SinkError]) -> None:
        """These records are not written, and so not noted."""
        if refused:
            self._refused |= refused
            self._forget_keys(refused)

    def _each_key(self) -> dict[int, tuple[str, int]]:
        """The keys by their places, one by one."""
        if self._range is not None:
            source, numbers = self._range
            self._range = None
            self._keys = {place: (source, number) for place, number in enumerate(numbers)}
        return self._keys

    def _forget_keys(self, places: Iterable[int]) -> None:
        keys = self._each_key()
        for place in places:
            keys.pop(place, None)

    def _noting(self) -> list[str]:
        """The statements that note the records that are to be."""
        if self._range is not None:
            return self._ledger.taking_range(*self._range)
        return self._ledger.taking(self._keys.values())

    def _skip(self, places: set[int]) -> None:
        """Leave out records."""
        self._skipped += len(places - self._refused.keys())
        self._rows = [left for rows in self._rows if (left := rows.without(places)).values]
        self._forget_keys(places)

    async def _written(self) -> SendResult:
        written = await self._write()
        return SendResult(rejected=self._refused | written.refused, skipped=self._skipped)

    # -- the transaction -----------------------------------------------------------------------------------------

    async def _write(self) -> Written:
        for _ in range(_TRIES):
            if not self._rows:
                return Written()
            try:
                return await (self._carefully() if self._way == "carefully" else self._shortly())
            except _TornError as torn:
                self._refused |= torn.refused
                self._skip(set(torn.refused))
            except OSError:
                raise
            except Exception as error:
                # Whatever the client raises: what it is about is found out from it and from the table.
                if not await self._learn_from(error):
                    raise
        raise RetryableError(
            f"PostgreSQL sink, table {self._table.name!r}: {_TRIES} other writers took records of this batch meanwhile",
            error_type="conflict",
        )

    async def _learn_from(self, error: Exception) -> bool:
        """Whether there is something else to try after an error."""
        # A record that is in already may meet a constraint of the table before it meets the note of itself.
        if (is_taken(error) or is_of_record(error)) and await self._skip_seen():
            return True
        if is_taken(error):
            return True  # by a transaction that was undone meanwhile
        if await self._has_changed(error):
            await self._fit()
        elif is_of_key(error, self._table) and self._way == "shortly":
            self._way = "staged"
        elif self._way != "carefully" and is_of_record(error):
            self._way = "carefully"
        else:
            return False
        return True

    async def _skip_seen(self) -> bool:
        """Leave out the records that are in; whether there are any."""
        keys = self._each_key()
        if not keys or self._connection.is_closed():
            return False
        seen = await self._ledger.seen(self._connection, keys.values())
        self._skip({place for place, key in keys.items() if key in seen})
        return bool(seen)

    async def _has_changed(self, error: Exception) -> bool:
        """Whether an error comes of columns that are others now; asked where it may."""
        # A row that is encoded for other types may even look like a broken protocol.
        may = is_of_record(error) or is_of_schema(error) or state_of(error) == _VIOLATION
        if not may or self._connection.is_closed():
            return False
        return await self._table.has_changed(self._connection) and self._table.columns is not None

    async def _shortly(self) -> Written:
        """All of it, or an error."""
        written = Written()
        table = self._table
        if len(self._rows) == 1 and (table.direct or (table.may_copy and self._way == "shortly")):
            written.new = await table.copy(self._connection, self._rows[0], self._noting())
            return written
        async with self._connection.transaction():
            for rows in table.in_order(self._rows):
                written.new += await table.put(self._connection, rows, staged=written.staged)
                written.staged = True
            await self._ledger.run(self._connection, self._noting())
        return written

    async def _carefully(self) -> Written:
        """All of it but for the records that the table refuses."""
        written = Written()
        async with self._connection.transaction():
            for rows in self._table.in_order(self._rows):
                await self._table.write(self._connection, rows, written)
            torn = _torn(self._rows, written.refused)
            if torn:
                raise _TornError(torn)
            kept = [key for place, key in self._each_key().items() if place not in written.refused]
            await self._ledger.run(self._connection, self._ledger.taking(kept))
        return written


class PostgresTransaction:
    """One batch on its way into a table: many sends that take effect together."""

    def __init__(
        self,
        table: Table,
        ledger: Ledger,
        connection: Connection,
        block: TransactionBlock,
        key: BatchKey,
        *,
        columns: Sequence[str] | None,
        call: Callable[[], AbstractAsyncContextManager[None]],
        end: AsyncExitStack,
    ) -> None:
        self._table = table
        self._ledger = ledger
        self._connection = connection
        self._block = block
        self._key = key
        self._columns = columns
        self._call = call
        self._end = end
        self._open = True
        self._staged = False
        self._broken = False

    async def declare(self, schema: Any) -> None:
        """See to it that there is a table for the columns of an Arrow schema; nobody sees it before the commit."""
        async with self._whole():
            await self._table.declare(self._connection, schema)

    async def clear(self) -> None:
        """Remove all rows of the table; they are there for others until the commit."""
        async with self._whole():
            await self._table.clear(self._connection)

    async def send(self, batch: Sequence[Any]) -> SendResult:
        """Write records; nobody sees them before the commit."""
        async with self._whole():
            rows, refused = tabular(batch, self._columns)
            rows, misfits = await self._table.fit(self._connection, rows)
            written = Written(refused=refused | misfits, staged=self._staged)
            for each in self._table.in_order(rows):
                await self._write(each, written)
            self._staged = written.staged
        return SendResult(rejected=written.refused)

    async def check(self) -> None:
        """Check what PostgreSQL would check at the commit alone, and from now on at each `send`.

        Raises:
            PermanentError: rows that were sent don't keep to a constraint that is `INITIALLY DEFERRED`.
        """
        async with self._whole():
            await self._connection.execute(CHECK_AT_ONCE)

    async def _write(self, rows: Rows, written: Written) -> None:
        found = Written(staged=written.staged)
        save = self._connection.transaction()
        await save.start()
        await self._table.write(self._connection, rows, found)
        torn = _torn([rows], found.refused)
        if not torn:
            await save.commit()
        else:
            await save.rollback()
            found = Written(refused=torn, staged=True)
            await self._table.write(self._connection, rows.without(set(torn)), found)
        written.refused |= found.refused
        written.staged = found.staged

    @asynccontextmanager
    async def _whole(self) -> AsyncGenerator[None]:
        """A call after whose failure nothing else is done: PostgreSQL takes the COMMIT of a failed transaction well."""
        if self._broken:
            raise RetryableError(
                f"PostgreSQL sink, table {self._table.name!r}: the transaction has failed; roll back, and begin again"
            )
        try:
            async with self._call():
                yield
        except BaseException:
            self._broken = True
            raise

    async def commit(self) -> None:
        """Note the batch and commit all of it."""
        async with self._whole():
            await self._ledger.note_delivered(self._connection, self._key)
            await self._block.commit()
        await self._finish()

    async def rollback(self) -> None:
        """Undo all of it."""
        if self._open:
            try:
                async with self._call():
                    await self._block.rollback()
            except SinkError:
                self._connection.terminate()  # and the transaction with it
            except BaseException:
                self._connection.terminate()
                raise
            finally:
                self._table.forget(self._connection)
                self._ledger.forget()
                await self._finish()

    async def _finish(self) -> None:
        if self._open:
            self._open = False
            await asyncio.shield(self._end.aclose())


class _TornError(Exception):
    """Some records of many rows have a row that is refused: all of their rows are to be left out."""

    def __init__(self, refused: Mapping[int, SinkError]) -> None:
        super().__init__()
        self.refused = refused


def _torn(found: Sequence[Rows], refused: Mapping[int, SinkError]) -> dict[int, SinkError]:
    if not refused:
        return {}
    counts = Counter(place for rows in found for place in rows.places if place in refused)
    return dict(refused) if any(count > 1 for count in counts.values()) else {}


def _with_keys(rows: Rows, keys: Sequence[str], column: str) -> Rows:
    """The rows with their records' keys in a column; the rows of one record are told apart."""
    if column in rows.names:
        return rows
    counts: Counter[int] = Counter()
    values: list[tuple[Any, ...]] = []
    if len(set(rows.places)) == len(rows.places):
        values = [(*row, keys[place]) for row, place in zip(rows.values, rows.places, strict=True)]
    else:
        for row, place in zip(rows.values, rows.places, strict=True):
            values.append((*row, f"{keys[place]}#{counts[place]}"))
            counts[place] += 1
    return Rows((*rows.names, column), values, rows.places)
