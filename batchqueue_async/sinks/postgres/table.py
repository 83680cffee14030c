"""One table of PostgreSQL: its columns, and rows that come into it in bulk.

Rows come by COPY: straight into the table, or, where some may be there already, into a temporary table of the
connection, and from there by one INSERT ... ON CONFLICT. A batch with a bad record is halved until the record is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from batchqueue_async.errors import PermanentError, SinkError
from batchqueue_async.sinks.postgres.client import is_of_record, told
from batchqueue_async.sinks.postgres.types import column_type, listed, quoted, with_plain_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from batchqueue_async.sinks._shared.tabular import Rows
    from batchqueue_async.sinks.postgres.client import Connection

_COLUMNS = """
SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum
"""
_STAGE = "batchqueue_stage"


def _nothing() -> dict[int, SinkError]:
    return {}


@dataclass(slots=True)
class Written:
    """What became of rows: the records that are refused, and how many rows are new.

    Attributes:
        refused: the records, by their places, with the reason.
        new: the rows that were not there before.
        staged: whether the connection's temporary table was used in the same transaction before.
    """

    refused: dict[int, SinkError] = field(default_factory=_nothing)
    new: int = 0
    staged: bool = False


class Table:
    """A table and how rows come into it; has no connection of its own.

    Attributes:
        name: the table's name.
        schema: its schema; None is the first one of the connection's search path.
        upsert_on: the columns by which a row that is there is replaced.
        key_column: the column with each record's key; a row whose key is there is left alone.
        columns: the table's columns with their types; None as long as they are not known.
    """

    def __init__(self, name: str, schema: str | None, upsert_on: tuple[str, ...], key_column: str | None) -> None:
        self.name = name
        self.schema = schema
        self.upsert_on = upsert_on
        self.key_column = key_column
        self.columns: dict[str, str] | None = None
        self._stages: WeakKeyDictionary[Connection, tuple[tuple[str, str], ...]] = WeakKeyDictionary()
        self.quoted = quoted(name) if schema is None else f"{quoted(schema)}.{quoted(name)}"

    # -- the columns ---------------------------------------------------------------------------------------------

    async def find(self, connection: Connection) -> dict[str, str]:
        """Look at the table's columns; none where there is no table."""
        found = {name: kind for name, kind in await connection.fetch(_COLUMNS, self.quoted)}  # noqa: C416 - Records
        self.columns = found or None
        return found

    async def fit(self, connection: Connection, found: Sequence[Rows]) -> tuple[list[Rows], dict[int, SinkError]]:
        """See to it that there is a table; which rows fit its columns, and the records that don't."""
        if self.columns is None and not await self.find(connection) and found:
            await self.create(connection, _columns_for(found))
        if any(self._misfit(rows) for rows in found):
            await self.find(connection)  # a column may have been added meanwhile
        fitting: list[Rows] = []
        refused: dict[int, SinkError] = {}
        for rows in found:
            if reason := self._misfit(rows):
                refused |= dict.fromkeys(rows.places, PermanentError(reason))
            else:
                fitting.append(rows)
        if not self.direct:
            await self._make_stage(connection)
        return fitting, refused

    def _misfit(self, rows: Rows) -> str | None:
        for name in self.upsert_on:
            if name not in rows.names:
                return f"PostgreSQL sink: a record has no {name!r}, by which table {self.name!r} is upserted"
        return self._stranger(rows.names)

    def _stranger(self, names: Iterable[str]) -> str | None:
        known = self.columns or {}
        for name in names:
            if name not in known:
                return (
                    f"PostgreSQL sink: table {self.name!r} has no column {name!r}, only {list(known)}; add the column "
                    "with ALTER TABLE, or send records without it"
                )
        return None

    def check(self, names: Iterable[str]) -> None:
        """Refuse names that are no columns."""
        if reason := self._stranger(names):
            raise PermanentError(reason)

    def beside(self, name: str) -> Table:
        """Another table of the same schema."""
        return Table(name, self.schema, (), None)

    async def create(self, connection: Connection, columns: Mapping[str, str]) -> None:
        """Make the table, unless someone else just did."""
        described = [f"{quoted(name)} {kind}" for name, kind in columns.items() if name != self.key_column]
        if self.key_column is not None:
            described.append(f"{quoted(self.key_column)} text NOT NULL UNIQUE")
        if self.upsert_on:
            described.append(f"PRIMARY KEY ({listed(self.upsert_on)})")
        async with connection.transaction():
            # Two that make the same table at once would meet a unique index of the catalogue.
            await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", self.quoted)
            await connection.execute(f"CREATE TABLE IF NOT EXISTS {self.quoted} ({', '.join(described)})")
        await self.find(connection)

    # -- rows ----------------------------------------------------------------------------------------------------

    @property
    def direct(self) -> bool:
        """Whether one COPY is all that a write needs."""
        return not self.upsert_on and self.key_column is None

    async def write(self, connection: Connection, rows: Rows, written: Written) -> None:
        """Write the rows, and find those that cannot be written. Needs a transaction.

        Raises:
            SinkError: it cannot be written at all now.
        """
        if await self._try(connection, rows, written) is None:
            return
        await self._halve(connection, rows._replace(values=with_plain_values(rows.values)), written)

    async def _halve(self, connection: Connection, rows: Rows, written: Written) -> None:
        error = await self._try(connection, rows, written)
        if error is None:
            return
        if len(rows.values) == 1:
            written.refused[rows.places[0]] = error
            return
        middle = len(rows.values) // 2
        await self._halve(connection, rows.part(0, middle), written)
        await self._halve(connection, rows.part(middle, len(rows.values)), written)

    async def _try(self, connection: Connection, rows: Rows, written: Written) -> SinkError | None:
        """Write rows that are taken together or not at all; the error if it is about a record."""
        try:
            async with connection.transaction():  # inside another one: a savepoint
                written.new += await self.put(connection, rows, staged=written.staged)
        except Exception as error:
            # Whatever the client raises about a value: its types are told by `is_of_record`.
            if not is_of_record(error):
                raise
            sink_error = told(f"PostgreSQL sink, table {self.name!r}", error)
            return sink_error if isinstance(sink_error, SinkError) else PermanentError(str(sink_error))
        finally:
            written.staged = True
        return None

    async def put(self, connection: Connection, rows: Rows, *, staged: bool = False) -> int:
        """Write rows; how many are new. Needs a transaction where the table is not `direct`.

        `staged` says that the transaction has used the connection's temporary table before.
        """
        names, values = rows.names, rows.values
        if self.direct:
            await connection.copy_records_to_table(self.name, records=values, columns=names, schema_name=self.schema)
            return len(values)
        if staged:
            await connection.execute(f"DELETE FROM pg_temp.{_STAGE}")  # noqa: S608 - a constant
        if self.upsert_on:
            values = self._last_ones(names, values)
        await connection.copy_records_to_table(_STAGE, records=values, columns=names, schema_name="pg_temp")
        done = await connection.execute(self._insertion(names))
        return int(done.rpartition(" ")[2])

    def _last_ones(self, names: Sequence[str], values: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """One row for each key, the last one: PostgreSQL refuses to replace a row twice in one statement."""
        key_of = itemgetter(*map(names.index, self.upsert_on))
        return list({key_of(row): row for row in values}.values())

    def _insertion(self, names: Sequence[str]) -> str:
        columns = listed(names)
        # In one order, so that two connections which upsert the same rows don't wait for each other.
        order = f" ORDER BY {listed(self.upsert_on)}" if self.upsert_on else ""
        selected = f"SELECT {columns} FROM pg_temp.{_STAGE}{order}"  # noqa: S608 - quoted
        return f"INSERT INTO {self.quoted} ({columns}) {selected}{self.on_conflict(names)}"

    def on_conflict(self, names: Sequence[str]) -> str:
        """What an INSERT of these columns does with a row that is there."""
        if self.key_column in names:
            return f" ON CONFLICT ({listed([str(self.key_column)])}) DO NOTHING"
        if not self.upsert_on:
            return ""
        changed = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in names if name not in self.upsert_on)
        return f" ON CONFLICT ({listed(self.upsert_on)}) DO {f'UPDATE SET {changed}' if changed else 'NOTHING'}"

    async def _make_stage(self, connection: Connection) -> None:
        columns = tuple((self.columns or {}).items())
        if self._stages.get(connection) == columns:
            return
        # Its columns take what the table's do, without its constraints, which the INSERT checks.
        await connection.execute(f"DROP TABLE IF EXISTS pg_temp.{_STAGE}")
        await connection.execute(
            f"CREATE TEMP TABLE {_STAGE} ON COMMIT DELETE ROWS AS SELECT * FROM {self.quoted} WITH NO DATA"  # noqa: S608
        )
        self._stages[connection] = columns

    def forget(self, connection: Connection) -> None:
        """Look at everything again: a transaction in which it may have been made was undone."""
        self.columns = None
        self._stages.pop(connection, None)


def _columns_for(found: Sequence[Rows]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for rows in found:
        values = zip(*rows.values, strict=True)
        for name, column in zip(rows.names, values, strict=True):
            columns.setdefault(name, column_type(column))
    return columns
