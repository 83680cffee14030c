"""One table of PostgreSQL: its columns, and rows that come into it in bulk.

Rows come by COPY: straight into the table, or, where some may be there already, into a temporary table of the
connection, and from there by one INSERT ... ON CONFLICT. A batch with a bad record is cut where the server says, or
halved until the record is found.

The client encodes rows for the types that the columns had when it last looked, in a form that says nothing about its
type: eight bytes of a bigint are a number of another kind to a column that has become numeric since. Each write
therefore ends with a look at the catalogue, in the same transaction, which fails where the columns are others now.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from batchqueue_async.errors import ConfigError, PermanentError, RetryableError, SinkError
from batchqueue_async.sinks._shared.declared import columns_of
from batchqueue_async.sinks._shared.tabular import Rows
from batchqueue_async.sinks.postgres.client import is_of_record, line_of, state_of, translate_error
from batchqueue_async.sinks.postgres.types import (
    MisfitError,
    column_type,
    declared_type,
    fit_of,
    listed,
    quoted,
    wider,
    wider_type,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from batchqueue_async.sinks.postgres.client import Connection

SchemaMode = Literal["strict", "widen", "add"]

_COLUMNS = """
SELECT a.attname, format_type(coalesce(nullif(t.typbasetype, 0), a.atttypid),
                              CASE WHEN t.typbasetype = 0 THEN a.atttypmod ELSE t.typtypmod END),
       col_description(a.attrelid, a.attnum) IS NOT DISTINCT FROM $2,
       a.attgenerated <> ''
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
_TABLE = """
SELECT o::oid::int8, o IS NOT NULL AND row_security_active(o), relkind = 'r' FROM to_regclass($1) o
LEFT JOIN pg_class ON oid = o
"""
# What an ALTER TABLE changes: where rows are stored in the table itself, its one row of the catalogue, as other types
# mean other files; else the rows of its columns.
_PLAIN_STATE = "SELECT xmin::text FROM pg_class WHERE oid = {}"
_PLAIN_GUARD = "SELECT 1 / count(*) FROM pg_class WHERE oid = {} AND xmin = '{}'"
_STATE = "SELECT sum(xmin::text::bigint) || '/' || count(*) FROM pg_attribute WHERE attrelid = {} AND attnum > 0"
_STAGE = "batchqueue_stage"
_UNTYPED = "batchqueue: no value was seen yet"
_UNIQUE = "23505"
CHECK_AT_ONCE = "SET CONSTRAINTS ALL IMMEDIATE"
"""Has a transaction check what is `INITIALLY DEFERRED`: all that it has done, and each statement from then on."""
_LEAST_CHUNK = 16


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


class _Found(NamedTuple):
    """What a table is now."""

    columns: dict[str, str]
    untyped: set[str]
    secured: bool
    guard: str


class _Stage(NamedTuple):
    """A connection's temporary table. Its name is never used again: the client keeps what it knows of a name."""

    name: str
    columns: tuple[tuple[str, str], ...]
    number: int


class Table:
    """A table and how rows come into it; has no connection of its own.

    Attributes:
        name: the table's name.
        schema: its schema; None is the first one of the connection's search path.
        upsert_on: the columns by which a row that is there is replaced.
        key_column: the column with each record's key; a row whose key is there is left alone.
        mode: what is done with values and columns that the table has no room for.
        columns: the table's columns with their types; None as long as they are not known.
    """

    def __init__(
        self,
        name: str,
        schema: str | None,
        upsert_on: tuple[str, ...],
        key_column: str | None,
        *,
        mode: SchemaMode = "strict",
        retryable: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self.schema = schema
        self.upsert_on = upsert_on
        self.key_column = key_column
        self.mode: SchemaMode = mode
        self.retryable = retryable
        self.columns: dict[str, str] | None = None
        self.quoted = quoted(name) if schema is None else f"{quoted(schema)}.{quoted(name)}"
        self._untyped: set[str] = set()
        self._secured = False
        self._guard = ""
        self._stages: WeakKeyDictionary[Connection, _Stage] = WeakKeyDictionary()
        self._states: WeakKeyDictionary[Connection, str] = WeakKeyDictionary()

    # -- the columns ---------------------------------------------------------------------------------------------

    async def find(self, connection: Connection) -> dict[str, str]:
        """Look at the table's columns; none where there is no table."""
        found = await self._look(connection)
        self.columns = found.columns or None
        if found.columns:
            self._untyped, self._secured, self._guard = found.untyped, found.secured, found.guard
        return found.columns

    async def _look(self, connection: Connection) -> _Found:
        # The state first: where the columns change in between, the guard is the one that fails.
        (oid, secured, plain), *_ = await connection.fetch(_TABLE, self.quoted)
        if oid is None:
            return _Found({}, set(), secured=False, guard="")
        state: str = await connection.fetchval((_PLAIN_STATE if plain else _STATE).format(oid))
        rows = await connection.fetch(_COLUMNS, self.quoted, _UNTYPED)
        guard = _PLAIN_GUARD.format(oid, state)
        if not plain:
            guard = f"SELECT 1 / count(*) FROM ({_STATE.format(oid)}) s(state) WHERE state = '{state}'"  # noqa: S608
        return _Found(
            {name: kind for name, kind, _, generated in rows if not generated},
            {name for name, _, untyped, _ in rows if untyped},
            secured=secured,
            guard=guard,
        )

    async def has_changed(self, connection: Connection) -> bool:
        """Whether the columns are not what they were; they are known anew then."""
        before = self._guard
        await self.find(connection)
        if before != self._guard:
            await connection.reload_schema_state()
            self._states[connection] = self._guard
            return True
        # Another connection may have found the change first.
        if self._states.get(connection, self._guard) != self._guard:
            await connection.reload_schema_state()
            self._states[connection] = self._guard
            return True
        return False

    async def fit(self, connection: Connection, found: Sequence[Rows]) -> tuple[list[Rows], dict[int, SinkError]]:
        """See to it that there is a table; which rows fit its columns, and the records that don't."""
        self._check_keys(found)
        if self.columns is None and not await self.find(connection) and found:
            await self.create(connection, _columns_for(found))
        if any(self._misfit(rows) for rows in found):
            await self.find(connection)  # a column may have been added meanwhile
            if self.mode == "add":
                await self._add(connection, found)
        fitting: list[Rows] = []
        refused: dict[int, SinkError] = {}
        for rows in found:
            if reason := self._misfit(rows):
                refused |= dict.fromkeys(rows.places, PermanentError(reason, error_type="refused"))
            else:
                fitting.append(rows)
        await self._suit(connection, fitting)
        strangers = len(refused)
        fitting = [left for rows in fitting if (left := self._valued(rows, refused)).values]
        if len(refused) > strangers and await self.has_changed(connection):
            return await self.fit(connection, found)  # refused by what the columns were
        if refused:  # a record of many rows is refused whole
            gone = set(refused)
            fitting = [left for rows in fitting if (left := rows.without(gone)).values]
        if self._states.setdefault(connection, self._guard) != self._guard:
            await connection.reload_schema_state()
            self._states[connection] = self._guard
        if not self.direct:
            await self._make_stage(connection)
        return fitting, refused

    def _check_keys(self, found: Sequence[Rows]) -> None:
        if self.key_column is not None and found and not any(self.key_column in rows.names for rows in found):
            raise ConfigError(
                f"PostgreSQL sink, table {self.name!r}: the records have no keys for the column {self.key_column!r}; "
                "send them by send_keyed, as an exporter does, or with a key of their own in that column"
            )

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
                    "with ALTER TABLE or have the sink do it by schema='add', or send records without it"
                )
        return None

    def stranger(self, names: Iterable[str]) -> PermanentError | None:
        """Why rows with these columns are refused, if one of them is no column of the table."""
        reason = self._stranger(names)
        return None if reason is None else PermanentError(reason, error_type="refused")

    def beside(self, name: str) -> Table:
        """Another table of the same schema."""
        return Table(name, self.schema, (), None)

    async def create(self, connection: Connection, columns: Mapping[str, str]) -> None:
        """Make the table, unless someone else just did; a column without a type is one whose values were all None."""
        described = [f"{quoted(name)} {kind or 'text'}" for name, kind in columns.items() if name != self.key_column]
        if self.key_column is not None:
            described.append(f"{quoted(self.key_column)} text NOT NULL UNIQUE")
        if self.upsert_on:
            described.append(f"PRIMARY KEY ({listed(self.upsert_on)})")
        async with connection.transaction():
            # Two that make the same table at once would meet a unique index of the catalogue.
            await self._lock(connection)
            await connection.execute(f"CREATE TABLE IF NOT EXISTS {self.quoted} ({', '.join(described)})")
            found = (await self._look(connection)).columns  # nobody else may use it before the commit
            for name, kind in columns.items():
                if not kind and name != self.key_column and found.get(name) == "text":
                    await self._comment(connection, name, f"'{_UNTYPED}'")
        await self.find(connection)

    async def _lock(self, connection: Connection) -> None:
        await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", self.quoted)

    async def _comment(self, connection: Connection, name: str, text: str) -> None:
        await connection.execute(f"COMMENT ON COLUMN {self.quoted}.{quoted(name)} IS {text}")

    # -- other columns -------------------------------------------------------------------------------------------

    async def _add(self, connection: Connection, found: Sequence[Rows]) -> None:
        """Add the columns that the rows have and the table has not."""
        await self._add_columns(connection, _columns_for(found))

    async def _add_columns(self, connection: Connection, columns: Mapping[str, str]) -> None:
        known = self.columns or {}
        missing = {name: kind for name, kind in columns.items() if name not in known}
        if missing:
            async with connection.transaction():
                await self._lock(connection)
                for name, kind in missing.items():
                    await connection.execute(
                        f"ALTER TABLE {self.quoted} ADD COLUMN IF NOT EXISTS {quoted(name)} {kind or 'text'}"
                    )
                    if not kind:
                        await self._comment(connection, name, f"'{_UNTYPED}'")
            await self.find(connection)

    async def declare(self, connection: Connection, schema: Any) -> None:
        """See to it that there is a table for the columns of an Arrow schema, as far as `mode` allows to change one.

        Raises:
            ConfigError: it has not the columns by which rows are upserted.
        """
        columns = {column.name: declared_type(column) for column in columns_of(schema)}
        missing = [name for name in self.upsert_on if name not in columns]
        if missing:
            raise ConfigError(
                f"PostgreSQL sink, table {self.name!r}: upsert_on={list(self.upsert_on)}, and the rows have no column "
                f"{missing[0]!r}, only {list(columns)}; correct upsert_on, or add the column to the rows"
            )
        if not await self.find(connection):
            await self.create(connection, columns)
        await self.suit(connection, columns)

    async def suit(self, connection: Connection, columns: Mapping[str, str]) -> None:
        """Add and widen columns for values of these types, where that is asked for; after a `find`."""
        if self.mode == "add":
            await self._add_columns(connection, columns)
        wanted: dict[str, str] = {}
        for name, kind in columns.items():
            known = (self.columns or {}).get(name)
            if not kind or known is None:
                continue
            if name in self._untyped:
                wanted[name] = kind
            elif self.mode != "strict" and (wide := wider_type(known, kind)):
                wanted[name] = wide
        if wanted:
            await self._alter(connection, wanted)

    @property
    def untyped(self) -> frozenset[str]:
        """The columns of which no value was seen yet."""
        return frozenset(self._untyped)

    async def _suit(self, connection: Connection, found: Sequence[Rows]) -> None:
        """Give columns the types that these values need, where that is asked for, or no value was seen before."""
        if self.mode == "strict" and not self._untyped:
            return
        wanted: dict[str, str] = {}
        for rows in found:
            for name, column in _columns_of(rows):
                kind = wanted.get(name, (self.columns or {})[name])
                if name in self._untyped:
                    if seen := _seen_type(column):
                        wanted[name] = seen
                elif self.mode != "strict" and (types := self._wider(kind, column)):
                    wanted[name] = types
        if wanted:
            await self._alter(connection, wanted)

    def _wider(self, kind: str, column: Sequence[Any]) -> str | None:
        fit = fit_of(kind)
        misfits = (
            [] if fit.plain is None else [value for value in column if value is not None and not _fits(fit, value)]
        )
        return wider(kind, misfits) if misfits else None

    async def _alter(self, connection: Connection, wanted: Mapping[str, str]) -> None:
        async with connection.transaction():
            await self._lock(connection)
            await connection.execute(f"LOCK TABLE {self.quoted} IN ACCESS EXCLUSIVE MODE")
            before = self.columns or {}
            now = (await self._look(connection)).columns
            for name, kind in wanted.items():
                if now.get(name) != before.get(name):
                    continue  # another writer has; what does not fit its type is told by record
                column = quoted(name)
                if name in self._untyped:
                    empty = f"SELECT NOT EXISTS (SELECT FROM {self.quoted} WHERE {column} IS NOT NULL)"  # noqa: S608
                    if kind != "text" and await connection.fetchval(empty):
                        await self._change(connection, name, kind)
                    await self._comment(connection, name, "NULL")
                else:
                    await self._change(connection, name, kind)
        await self.find(connection)

    async def _change(self, connection: Connection, name: str, kind: str) -> None:
        # By its text: PostgreSQL's own way from float8 to numeric keeps 15 digits.
        await connection.execute(
            f"ALTER TABLE {self.quoted} ALTER COLUMN {quoted(name)} TYPE {kind} USING {quoted(name)}::text::{kind}"
        )

    # -- values --------------------------------------------------------------------------------------------------

    def _valued(self, rows: Rows, refused: dict[int, SinkError]) -> Rows:
        """The rows with values as their columns take them; those that a column would change are refused."""
        kinds = self.columns or {}
        changed: dict[int, Sequence[Any]] = {}
        columns = rows.columns or list(zip(*rows.values, strict=False))  # of one length, as their names are
        for at, (name, column) in enumerate(zip(rows.names, columns, strict=True)):
            if not fit_of(kinds[name]).takes(column):
                changed[at] = self._taken(name, rows.places, column, refused)
        if not changed:
            return rows
        values = list(zip(*(changed.get(at, column) for at, column in enumerate(columns)), strict=True))
        return Rows(rows.names, values, rows.places)

    def _taken(
        self, name: str, places: Sequence[int], column: Sequence[Any], refused: dict[int, SinkError]
    ) -> list[Any]:
        kind = (self.columns or {})[name]
        take = fit_of(kind).take
        taken: list[Any] = []
        for place, value in zip(places, column, strict=True):
            try:
                taken.append(None if value is None else take(value))
            except MisfitError as error:
                taken.append(None)
                way = "" if self.mode != "strict" else ", or widen the column by ALTER TABLE or schema='widen'"
                refused[place] = PermanentError(
                    f"PostgreSQL sink, table {self.name!r}: column {name!r} of type {kind} would change {error}; send "
                    f"values that it holds{way}",
                    error_type="refused",
                )
        return taken

    # -- rows ----------------------------------------------------------------------------------------------------

    @property
    def direct(self) -> bool:
        """Whether one COPY is all that a write needs; PostgreSQL has none into a table with policies for rows."""
        return not self.upsert_on and self.key_column is None and not self._secured

    @property
    def may_copy(self) -> bool:
        """Whether a COPY may do, as long as no key of the rows is in the table."""
        return not self.upsert_on and not self._secured

    async def write(self, connection: Connection, rows: Rows, written: Written) -> None:
        """Write the rows, and find those that cannot be written. Needs a transaction.

        Raises:
            SinkError: it cannot be written at all now.
        """
        size = len(rows.values)
        while rows.values:
            part, rest = rows.part(0, size), rows.part(size, len(rows.values))
            error, line = await self._try(connection, part, written)
            if error is None:
                rows, size = rest, size * 4
            elif line is None or not 0 < line <= len(part.values):
                await self._halve(connection, part, written)
                rows = rest
            else:
                await self._cut(connection, part, line - 1, written)
                rows, size = rows.part(line, len(rows.values)), max(_LEAST_CHUNK, 2 * line)

    async def _cut(self, connection: Connection, rows: Rows, at: int, written: Written) -> None:
        """Write what comes before the row that the server named, and ask again for that one alone."""
        if at:
            await self._halve(connection, rows.part(0, at), written)
        await self._halve(connection, rows.part(at, at + 1), written)

    async def _halve(self, connection: Connection, rows: Rows, written: Written) -> None:
        error, _ = await self._try(connection, rows, written)
        if error is None:
            return
        if len(rows.values) == 1:
            written.refused[rows.places[0]] = error
            return
        middle = len(rows.values) // 2
        await self._halve(connection, rows.part(0, middle), written)
        await self._halve(connection, rows.part(middle, len(rows.values)), written)

    async def _try(self, connection: Connection, rows: Rows, written: Written) -> tuple[SinkError | None, int | None]:
        """Write rows that are taken together or not at all; the error if it is about a record, and its row."""
        try:
            async with connection.transaction():  # inside another one: a savepoint
                written.new += await self.put(connection, rows, staged=written.staged)
        except Exception as error:
            refusal = self.refusal(error)
            if refusal is None:
                raise
            return refusal, line_of(error) if self.direct else None
        finally:
            written.staged = True
        return None, None

    def refusal(self, error: Exception) -> SinkError | None:
        """Why the rows of a statement that failed are refused; None where the reason is not in the rows.

        Raises:
            RetryableError: it is in them, and was said to pass.
        """
        # Whatever the client raises about a value: its types are told by `is_of_record`.
        if not is_of_record(error):
            return None
        meant = translate_error(f"PostgreSQL sink, table {self.name!r}", error, self.retryable)
        if isinstance(meant, RetryableError):
            raise meant from None
        return meant if isinstance(meant, SinkError) else PermanentError(str(meant), error_type="refused")

    async def copy(self, connection: Connection, rows: Rows, after: Iterable[str] = ()) -> int:
        """Write rows by one COPY, and run these statements after it: one transaction, and one way to the server.

        The statements go as the rest of the text of the COPY, of which the client takes a condition as it is.
        """
        await connection.copy_records_to_table(
            self.name,
            records=rows.values,
            columns=rows.names,
            schema_name=self.schema,
            where="; ".join(("true", *after, self._guard)),
        )
        return len(rows.values)

    async def put(self, connection: Connection, rows: Rows, *, staged: bool = False) -> int:
        """Write rows; how many are new. Needs a transaction where the table is not `direct`.

        `staged` says that the transaction has used the connection's temporary table before.
        """
        if self.direct:
            return await self.copy(connection, rows)
        names, values, stage = rows.names, rows.values, self._stages[connection].name
        if staged:
            await connection.execute(f"DELETE FROM pg_temp.{stage}")  # noqa: S608 - a constant and a number
        if self.upsert_on:
            values = self._last_ones(names, values)
        await connection.copy_records_to_table(stage, records=values, columns=names, schema_name="pg_temp")
        done = await connection.execute(self._insertion(names, stage))
        return int(done.rpartition(" ")[2])

    def in_order(self, found: Sequence[Rows]) -> list[Rows]:
        """The rows in groups that may be written one after the other: the last record of a key is the one that stays.

        Rows are grouped by their columns, and a key may have rows of several groups: those are told apart by how many
        groups its rows were in before.
        """
        if not self.upsert_on or len(found) < 2:  # noqa: PLR2004 - one group is in order
            return list(found)
        entries: list[tuple[int, int, int]] = sorted(
            (place, group, at) for group, rows in enumerate(found) for at, place in enumerate(rows.places)
        )
        keys = [self._key_of(rows.names) for rows in found]
        last: dict[Any, tuple[int, int]] = {}  # by key: the group of its last row, and the layer that row is in
        layers: dict[tuple[int, int], list[int]] = {}
        for _, group, at in entries:
            key = _hashable(keys[group](found[group].values[at]))
            before, layer = last.get(key, (group, 0))
            layer += before != group
            last[key] = (group, layer)
            layers.setdefault((layer, group), []).append(at)
        return [found[group].some(some) for (_, group), some in sorted(layers.items())]

    def _key_of(self, names: Sequence[str]) -> itemgetter[Any]:
        return itemgetter(*map(names.index, self.upsert_on))

    def _last_ones(self, names: Sequence[str], values: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """One row for each key, the last one: PostgreSQL refuses to replace a row twice in one statement."""
        key_of = self._key_of(names)
        return list({_hashable(key_of(row)): row for row in values}.values())

    def _insertion(self, names: Sequence[str], stage: str) -> str:
        columns = listed(names)
        # In one order, so that two connections which upsert the same rows don't wait for each other.
        order = f" ORDER BY {listed(self.upsert_on)}" if self.upsert_on else ""
        selected = f"SELECT {columns} FROM pg_temp.{stage} WHERE ({self._guard}) = 1{order}"  # noqa: S608 - quoted
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
        old = self._stages.get(connection)
        if old is not None and old.columns == columns:
            return
        # Its columns take what the table's do, without its constraints, which the INSERT checks.
        number = 0 if old is None else old.number + 1
        name = f"{_STAGE}_{number}"
        if old is not None:
            await connection.execute(f"DROP TABLE IF EXISTS pg_temp.{old.name}")
        await connection.execute(
            f"CREATE TEMP TABLE {name} ON COMMIT DELETE ROWS AS SELECT * FROM {self.quoted} WITH NO DATA"  # noqa: S608
        )
        self._stages[connection] = _Stage(name, columns, number)

    async def clear(self, connection: Connection) -> None:
        """Remove all rows; readers see them until the commit. Needs a transaction."""
        if await self.find(connection):
            await connection.execute(f"DELETE FROM {self.quoted}")  # noqa: S608 - quoted

    def forget(self, connection: Connection) -> None:
        """Look at everything again: a transaction in which it may have been made was undone."""
        self.columns = None
        old = self._stages.get(connection)
        if old is not None:  # it may be there or not; its number is not used again
            self._stages[connection] = _Stage(old.name, (), old.number)


def is_of_key(error: BaseException, table: Table) -> bool:
    """Whether a COPY met a key that is there."""
    return table.key_column is not None and state_of(error) == _UNIQUE


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError:
        return repr(key)
    return key


def _fits(fit: Any, value: Any) -> bool:
    try:
        fit.take(value)
    except MisfitError:
        return False
    return True


def _columns_of(rows: Rows) -> Iterator[tuple[str, list[Any]]]:
    for at, name in enumerate(rows.names):
        yield name, list(map(itemgetter(at), rows.values))


def _seen_type(values: Iterable[Any]) -> str:
    """The type for these values; nothing where they are all None."""
    seen = [value for value in values if value is not None]
    return column_type(seen) if seen else ""


def _columns_for(found: Sequence[Rows]) -> dict[str, str]:
    columns: dict[str, list[Any]] = {}
    for rows in found:
        for name, column in _columns_of(rows):
            columns.setdefault(name, []).extend(column)
    return {name: _seen_type(column) for name, column in columns.items()}
