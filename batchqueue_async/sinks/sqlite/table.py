"""One table of a SQLite file, synchronously: its columns, its rows, and the note of what is in.

Beside the table the file holds two of the library's own, written in the same transactions:

    batchqueue_ledger(target, source, number, noted_at)   the last batch of each source that is in the table `target`
    batchqueue_keys(target, key)                          the idempotency keys of the records that are in it

The source of a batch job never comes again; its note is kept for a month.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time as clock
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import UUID

import msgspec

from batchqueue_async.errors import ConfigError, PermanentError, RetryableError, SinkError
from batchqueue_async.sinks._shared.files import make_directory, open_append
from batchqueue_async.sinks._shared.records import check_numbers
from batchqueue_async.sinks._shared.tabular import Rows, tabular
from batchqueue_async.sinks.base import BatchKey, Delivered

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from batchqueue_async.sinks._shared.declared import Column

SchemaMode = Literal["strict", "widen", "add"]
RESERVED = frozenset({"batchqueue_ledger", "batchqueue_keys"})
_TABLES = """
CREATE TABLE IF NOT EXISTS batchqueue_ledger (
  target TEXT, source TEXT, number INTEGER NOT NULL, noted_at REAL, PRIMARY KEY (target, source)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batchqueue_keys (target TEXT, key TEXT, PRIMARY KEY (target, key)) WITHOUT ROWID
"""
_LAST = "SELECT number FROM batchqueue_ledger WHERE target = ? AND source = ?"
_NOTE = "INSERT OR REPLACE INTO batchqueue_ledger (target, source, number, noted_at) VALUES (?, ?, ?, ?)"
_NOTES = "SELECT source, number, noted_at FROM batchqueue_ledger WHERE target = ? ORDER BY source"
_FORGET = "DELETE FROM batchqueue_ledger WHERE target = ? AND source = ?"
_FORGET_JOBS = "DELETE FROM batchqueue_ledger WHERE target = ? AND source GLOB 'job-*' AND noted_at < ?"
_DATED = "SELECT 1 FROM pragma_table_info('batchqueue_ledger') WHERE name = 'noted_at'"
_AT_ONCE = 50
"""Rows of one INSERT."""

_PARAMETERS = 999
"""The most parameters of a statement that every SQLite takes."""

_JOBS = 30 * 24 * 3600.0
_SEEN = "SELECT key FROM batchqueue_keys WHERE target = ? AND key IN (SELECT value FROM json_each(?))"
_TAKE = "INSERT INTO batchqueue_keys VALUES (?, ?)"

_OBJECTS = "SELECT count(*) FROM sqlite_master WHERE tbl_name = ? AND type <> 'table'"

_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
    }
)
_PLAIN = frozenset({int, str, bytes, bool, type(None)})
_TYPES: dict[type, str] = {int: "INTEGER", bool: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}


class Table:
    """A connection and a table; belongs to the thread that opens it.

    Attributes:
        columns: the table's columns, in order; None before there is a table.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        columns: Sequence[str] | None,
        busy_timeout: float,
        mode: SchemaMode = "strict",
        *,
        upsert_on: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.name = name
        self.busy_timeout = busy_timeout
        self.mode: SchemaMode = mode
        self.upsert_on = upsert_on
        self.columns: tuple[str, ...] | None = None
        self._wanted = tuple(columns) if columns is not None else None
        self._connection: sqlite3.Connection | None = None

    # -- the file ------------------------------------------------------------------------------------------------

    def open(self, *, journal: str = "WAL") -> None:
        """Connect, and make the library's own tables."""
        make_directory(self.path.parent)
        _touch(self.path)
        with self._errors():
            connection = sqlite3.connect(self.path, timeout=self.busy_timeout, isolation_level=None)
            self._connection = connection
            self._set_journal(connection, journal)
            connection.execute("PRAGMA synchronous=FULL")
            with self.transaction():
                for statement in _TABLES.split(";"):
                    connection.execute(statement)
                if connection.execute(_DATED).fetchone() is None:  # of an earlier version
                    connection.execute("ALTER TABLE batchqueue_ledger ADD COLUMN noted_at REAL")
                self.columns = self._existing()

    def _set_journal(self, connection: sqlite3.Connection, journal: str) -> None:
        """Choose the journal, waiting for others up to the busy timeout.

        SQLite itself waits for nobody here: of two connections that meet a new file at the same moment one is refused.
        """
        end = clock.monotonic() + self.busy_timeout
        while True:
            try:
                connection.execute(f"PRAGMA journal_mode={journal}")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or clock.monotonic() >= end:
                    raise
                clock.sleep(0.01)
            else:
                return

    def close(self) -> None:
        """Disconnect; an open transaction is undone."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    @property
    def connection(self) -> sqlite3.Connection:
        """The open connection."""
        if self._connection is None:
            raise RuntimeError(f"SQLite sink {str(self.path)!r} is not open; call open() first")
        return self._connection

    # -- transactions --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a transaction that writes, waiting for other writers up to the busy timeout."""
        with self._errors():
            self.connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Make the transaction durable."""
        with self._errors():
            self.connection.execute("COMMIT")

    def rollback(self) -> None:
        """Undo the transaction, if there is one; the table may be gone again."""
        connection = self._connection
        if connection is not None and connection.in_transaction:
            connection.execute("ROLLBACK")
            self.columns = self._existing()

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Commit what is done inside, or undo it."""
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:
            with suppress(sqlite3.Error):  # the first error is the one to tell
                self.rollback()
            raise

    @contextmanager
    def savepoint(self) -> Generator[None]:
        """Undo what is done inside, and nothing else, if it fails. Needs a transaction."""
        with self._errors():
            self.connection.execute("SAVEPOINT batchqueue")
        try:
            yield
        except BaseException as error:  # a cancellation too: what is done inside is done whole
            if not self.connection.in_transaction:  # another savepoint would begin one, and commit it
                raise ConfigError(
                    f"SQLite sink {str(self.path)!r}: a constraint of table {self.name!r} is ON CONFLICT ROLLBACK, and "
                    "ended the transaction of the batch; make it one without, so that bad rows can be left out"
                ) from error
            with suppress(sqlite3.Error):  # the first error is the one to tell
                self.connection.execute("ROLLBACK TO batchqueue")
                self.connection.execute("RELEASE batchqueue")
            self.columns = self._existing()
            raise
        with self._errors():
            self.connection.execute("RELEASE batchqueue")

    # -- rows ----------------------------------------------------------------------------------------------------

    def insert(self, batch: Sequence[Any]) -> None:
        """Insert records; makes the table for the first ones. Needs a transaction.

        Raises:
            PermanentError: some records don't fit the table; its `culprits` are all of them, and nothing is in.
        """
        found, refused = tabular(batch, self._wanted or self.columns)
        for rows in found:
            self._prepare(rows)
        checked = [self._checked(rows, refused) for rows in found]
        if refused:
            first = min(refused)
            raise PermanentError(str(refused[first]), error_type="refused", culprits=sorted(refused))
        for rows in self._in_order(checked):
            self.insert_tuples(rows.names, rows.values)

    def _in_order(self, found: Sequence[Rows]) -> Iterator[Rows]:
        """The rows, so that the last record of a key is the one that stays, also where records differ in columns."""
        if not self.upsert_on or len(found) == 1:
            yield from found
            return
        entries: list[tuple[int, int, int]] = sorted(
            (place, group, at) for group, rows in enumerate(found) for at, place in enumerate(rows.places)
        )
        for _, run in groupby(entries, key=_group_of):
            same = list(run)
            rows = found[same[0][1]]
            yield Rows(rows.names, [rows.values[at] for _, _, at in same], [place for place, _, _ in same])

    def insert_checked(self, columns: Sequence[str], tuples: Sequence[Sequence[Any]]) -> None:
        """Insert values of the given columns, unless one of them would be changed. Needs a transaction.

        Raises:
            PermanentError: one would, or the table has not all of the columns.
        """
        refused: dict[int, SinkError] = {}
        rows = Rows(tuple(columns), tuples, range(len(tuples)))
        self._prepare(rows)
        rows = self._checked(rows, refused)
        if refused:
            raise PermanentError(str(refused[min(refused)]), error_type="refused")
        self.insert_tuples(rows.names, rows.values)

    def insert_sifted(
        self,
        insert: Callable[[Sequence[str], Sequence[Sequence[Any]]], None],
        columns: Sequence[str],
        tuples: Sequence[Sequence[Any]],
        most: int,
    ) -> list[tuple[dict[str, Any], str]]:
        """Insert values but for the rows that are refused, of at most so many; these, each with its reason.

        Raises:
            PermanentError: there are more.
        """
        try:
            with self.savepoint():
                insert(columns, tuples)
        except PermanentError as error:
            if most < 1:
                raise
            if len(tuples) == 1:
                return [(dict(zip(columns, tuples[0], strict=True)), str(error))]
            middle = len(tuples) // 2
            found = self.insert_sifted(insert, columns, tuples[:middle], most)
            return found + self.insert_sifted(insert, columns, tuples[middle:], most - len(found))
        return []

    def insert_tuples(self, columns: Sequence[str], tuples: Iterable[Sequence[Any]]) -> None:
        """Insert values of the given columns. Needs a transaction."""
        rows = list(tuples)
        # Many rows in a statement: each statement lets other threads run, and waits for its turn after that.
        at_once = max(1, min(_AT_ONCE, _PARAMETERS // len(columns)))
        whole = len(rows) - len(rows) % at_once
        flat, step = list(chain.from_iterable(rows[:whole])), at_once * len(columns)
        with self._errors():
            if flat:
                parts = (flat[start : start + step] for start in range(0, len(flat), step))
                self.connection.executemany(self._insertion(columns, at_once), parts)
            self.connection.executemany(self._insertion(columns, 1), rows[whole:])

    def _insertion(self, columns: Sequence[str], rows: int) -> str:
        """The statement that inserts so many rows."""
        marks = ", ".join([f"({', '.join('?' * len(columns))})"] * rows)
        statement = f"INSERT INTO {quoted(self.name)} ({_list(columns)}) VALUES {marks}"  # noqa: S608 - quoted
        if self.upsert_on:
            others = [quoted(each) for each in columns if each not in self.upsert_on]
            changes = ", ".join(f"{each} = excluded.{each}" for each in others)
            statement += f" ON CONFLICT ({_list(self.upsert_on)}) DO " + (
                f"UPDATE SET {changes}" if changes else "NOTHING"
            )
        return statement

    def clear(self) -> None:
        """Remove all rows. Needs a transaction."""
        if self.columns is not None:
            with self._errors():
                self.connection.execute(f"DELETE FROM {quoted(self.name)}")  # noqa: S608 - quoted

    def create(self, columns: Mapping[str, str]) -> None:
        """Make the table, unless it exists. Needs a transaction."""
        if self.columns is None:
            described = [
                f"{quoted(name)} {kind}".rstrip() + (" NOT NULL" if name in self.upsert_on else "")
                for name, kind in columns.items()
            ]
            if self.upsert_on:
                self._check_keys(columns)
                # Not a primary key: one of a single whole number would be SQLite's own number of the row.
                described.append(f"UNIQUE ({_list(self.upsert_on)})")
            with self._errors():
                self.connection.execute(f"CREATE TABLE {quoted(self.name)} ({', '.join(described)})")
            self.columns = tuple(columns)
        unknown = [name for name in columns if name not in self.columns]
        if unknown:
            raise self._no_column(unknown[0])

    def _check_keys(self, columns: Iterable[str]) -> None:
        names = list(columns)
        missing = [name for name in self.upsert_on if name not in names]
        if missing:
            raise ConfigError(
                f"SQLite sink {str(self.path)!r}, table {self.name!r}: upsert_on={list(self.upsert_on)}, and the rows "
                f"have no column {missing[0]!r}, only {names}; correct upsert_on, or add the column to the rows"
            )

    def declare(self, columns: Mapping[str, str]) -> None:
        """See to it that there is a table for columns of these types, as far as `mode` allows. Needs a transaction."""
        if self.lacks(columns):
            self.columns = self._existing()
        if self.lacks(columns):
            self.suit(columns)

    def lacks(self, columns: Iterable[str]) -> bool:
        """Whether there is something to declare; what `mode` does not allow is refused with its records."""
        return self.columns is None or (self.mode == "add" and any(name not in self.columns for name in columns))

    def suit(self, columns: Mapping[str, str]) -> None:
        """Make the table for these columns, or add those that it has not, where `mode` allows it. Needs a transaction.

        Raises:
            PermanentError: it has not all of them.
        """
        if self.columns is None or self.mode != "add":
            self.create(columns)
        for name in [name for name in columns if name not in (self.columns or ())]:
            self._add(name, columns[name])

    def schema(self) -> dict[str, str]:
        """The columns of the table, with their types; empty where there is no table."""
        found = self.connection.execute("SELECT name, type FROM pragma_table_info(?)", (self.name,)).fetchall()
        return dict(found)

    def _existing(self) -> tuple[str, ...] | None:
        return tuple(self.schema()) or None

    def _prepare(self, rows: Rows) -> None:
        """See to it that there is a table, and the columns that may be added."""
        if self.columns is not None and all(name in self.columns for name in rows.names):
            return
        self.columns = self._existing()  # a column may have been added meanwhile
        if self.columns is None:
            wanted = dict.fromkeys(self._wanted or (), "")
            self.create(wanted | {name: _type(column) for name, column in _columns_of(rows)})
        elif self.mode == "add":
            for name, column in _columns_of(rows):
                if name not in self.columns:
                    self._add(name, _type(column))

    def _add(self, name: str, kind: str) -> None:
        with self._errors():
            described = f"{quoted(name)} {kind}".rstrip()
            self.connection.execute(f"ALTER TABLE {quoted(self.name)} ADD COLUMN {described}")
        self.columns = self._existing()

    def _checked(self, rows: Rows, refused: dict[int, SinkError]) -> Rows:
        """The rows with values that SQLite takes, and keeps as they are; the others are refused."""
        unknown = [name for name in rows.names if name not in (self.columns or ())]
        if unknown:
            refused |= dict.fromkeys(rows.places, self._no_column(unknown[0]))
            return Rows(rows.names, [], [])
        absent = [name for name in self.upsert_on if name not in rows.names]
        if absent:
            refused |= dict.fromkeys(rows.places, self._no_key(absent[0]))
            return Rows(rows.names, [], [])
        kinds = self._affinities()
        columns: list[Sequence[Any]] = []
        changed = False
        for name, values in _columns_of(rows):
            if name in self.upsert_on and None in values:
                refused |= {
                    place: self._no_key(name) for place, value in zip(rows.places, values, strict=True) if value is None
                }
            column = values if _is_plain(values) else self._plain_values(rows, values, refused)
            if not _keeps(kinds.get(name, ""), column):
                kinds = self._suit(rows, name, column, kinds, refused)
            changed = changed or column is not values
            columns.append(column)
        return rows._replace(values=list(zip(*columns, strict=True)), columns=None) if changed else rows

    def _plain_values(self, rows: Rows, values: Sequence[Any], refused: dict[int, SinkError]) -> list[Any]:
        found: list[Any] = []
        for place, value in zip(rows.places, values, strict=True):
            try:
                found.append(_plain(value))
            except PermanentError as error:
                found.append(None)
                refused[place] = error
        return found

    def _suit(
        self, rows: Rows, name: str, column: Sequence[Any], kinds: dict[str, str], refused: dict[int, SinkError]
    ) -> dict[str, str]:
        """Give a column that would change values no type, where that is asked for; else refuse their records."""
        if self.mode != "strict" and self._widen(name):
            return self._affinities()
        for place, value in zip(rows.places, column, strict=True):
            if not _keeps(kinds[name], [value]):
                refused[place] = PermanentError(
                    f"SQLite sink {str(self.path)!r}: column {name!r} of table {self.name!r} is {kinds[name]}, which "
                    f"would change a value of type {type(value).__qualname__}; send values that it keeps, or have the "
                    "sink widen columns by schema='widen'",
                    error_type="refused",
                )
        return kinds

    def _widen(self, name: str) -> bool:
        """Make the table anew with a column that keeps any value; whether that can be done."""
        with self._errors():
            objects = self.connection.execute(_OBJECTS, (self.name,)).fetchone()[0]
            described = self.connection.execute(f"PRAGMA table_xinfo({quoted(self.name)})").fetchall()
            plain = all(not (not_null or default or key or hidden) for *_, not_null, default, key, hidden in described)
            if objects or not plain:
                return False  # what else belongs to the table is its owner's
            before = {column: kind for _, column, kind, *_ in described}
            new = f"batchqueue_widened_{self.name}"
            columns = ", ".join(
                f"{quoted(column)} {'' if column == name else kind}".rstrip() for column, kind in before.items()
            )
            for statement in (
                f"CREATE TABLE {quoted(new)} ({columns})",
                f"INSERT INTO {quoted(new)} SELECT * FROM {quoted(self.name)}",  # noqa: S608 - quoted
                f"DROP TABLE {quoted(self.name)}",
                f"ALTER TABLE {quoted(new)} RENAME TO {quoted(self.name)}",
            ):
                self.connection.execute(statement)
        return True

    def _affinities(self) -> dict[str, str]:
        return {name: kind.upper() for name, kind in self.schema().items()}

    def _no_key(self, name: str) -> PermanentError:
        return PermanentError(
            f"SQLite sink {str(self.path)!r}: a record has no {name!r}, by which table {self.name!r} is upserted",
            error_type="refused",
        )

    def _no_column(self, name: str) -> PermanentError:
        return PermanentError(
            f"SQLite sink {str(self.path)!r}: table {self.name!r} has no column {name!r}, only "
            f"{list(self.columns or ())}; add the column with ALTER TABLE or have the sink do it by schema='add', or "
            "send records without it",
            error_type="refused",
        )

    # -- what is in ----------------------------------------------------------------------------------------------

    def is_delivered(self, key: BatchKey) -> bool:
        """Whether the batch, or a later one of its source, is in."""
        with self._errors():
            found = self.connection.execute(_LAST, (self.name, key.source)).fetchone()
        return found is not None and found[0] >= key.number

    def note_delivered(self, key: BatchKey) -> None:
        """Note that the batch is in. Needs a transaction."""
        now = clock.time()
        with self._errors():
            self.connection.execute(_NOTE, (self.name, *key, now))
            self.connection.execute(_FORGET_JOBS, (self.name, now - _JOBS))

    def delivered(self) -> list[Delivered]:
        """The notes of batches."""
        with self._errors():
            found = self.connection.execute(_NOTES, (self.name,)).fetchall()
        return [Delivered(BatchKey(source, number), noted) for source, number, noted in found]

    def forget(self, sources: Iterable[str]) -> int:
        """Take back the notes of sources; how many there were. Needs a transaction."""
        with self._errors():
            return sum(self.connection.execute(_FORGET, (self.name, source)).rowcount for source in sources)

    def take_keys(self, keys: Sequence[str]) -> list[bool]:
        """Note the keys; which of them are new, each at its first place. Needs a transaction."""
        with self._errors():
            seen = {key for (key,) in self.connection.execute(_SEEN, (self.name, json.dumps(list(keys))))}
        fresh: list[bool] = []
        for key in keys:
            fresh.append(key not in seen)
            seen.add(key)
        new = [(self.name, key) for key, is_new in zip(keys, fresh, strict=True) if is_new]
        with self._errors():
            self.connection.executemany(_TAKE, new)
        return fresh

    @contextmanager
    def _errors(self) -> Generator[None]:
        """Tell SQLite's errors as the sink's: which may pass, and which never will. Their text quotes no value."""
        where = f"SQLite sink {str(self.path)!r}, table {self.name!r}"
        try:
            yield
        except (sqlite3.Error, OverflowError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
                raise RetryableError(
                    f"{where}: {error}; the same batch may succeed later", error_type="server"
                ) from error
            raise PermanentError(f"{where}: {error}") from error


def _group_of(entry: tuple[int, int, int]) -> int:
    return entry[1]


def _touch(path: Path) -> None:
    """Make the file, for its owner only, before SQLite would with the usual mode; its journals take the same."""
    try:
        os.close(open_append(path))
    except IsADirectoryError:
        raise ConfigError(f"SQLite sink: {str(path)!r} is a directory; name a file in it") from None


def quoted(name: str) -> str:
    """A name as SQL takes it."""
    return '"' + name.replace('"', '""') + '"'


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(quoted, names))


def _is_plain(values: Sequence[Any]) -> bool:
    """Whether SQLite takes all of the values as they are."""
    kinds = set(map(type, values))
    if kinds == {float}:
        return not math.isnan(sum(values))  # one that is not a number would have made the sum so
    return kinds <= _PLAIN


def _columns_of(rows: Rows) -> Iterator[tuple[str, Sequence[Any]]]:
    if rows.columns is not None:
        yield from zip(rows.names, rows.columns, strict=True)
        return
    for at, name in enumerate(rows.names):
        yield name, list(map(itemgetter(at), rows.values))


def _type(column: Sequence[Any]) -> str:
    """The declared type for a column of these values; none where they are all None or differ."""
    found: set[type] = {type(_shown(value)) for value in column}
    kinds = {_TYPES.get(kind, "TEXT") for kind in found if kind is not type(None)}
    return kinds.pop() if len(kinds) == 1 else ""


def declared_type(column: Column) -> str:
    """The declared type for a column: of what its values become here; none where they may be anything.

    Example:
        >>> from batchqueue_async.sinks._shared.declared import Column
        >>> [declared_type(Column("c", kind)) for kind in ("integer", "decimal", "instant", "any")]
        ['INTEGER', 'TEXT', 'TEXT', '']
    """
    return _DECLARED.get(column.kind, "TEXT")


_DECLARED = {
    "integer": "INTEGER",
    "boolean": "INTEGER",
    "float": "REAL",
    "interval": "REAL",
    "bytes": "BLOB",
    "any": "",
}


def _shown(value: Any) -> Any:
    try:
        return _plain(value)
    except PermanentError:
        return None


def _affinity(kind: str) -> str:
    """What SQLite makes of a declared type."""
    for words, found in _AFFINITIES:
        if any(word in kind for word in words):
            return found
    return "NUMERIC" if kind else "BLOB"


def _keeps(kind: str, values: Sequence[Any]) -> bool:
    """Whether a column of this type gives these values back as they are.

    SQLite turns text that looks like a number into one in a column of numbers, a number into text in one of text, and a
    large whole number into a float in one of floats.
    """
    affinity = _affinity(kind)
    types = set(map(type, values))
    if affinity == "BLOB" or types <= _KEPT[affinity]:
        return True
    return all(map(_KEEPING[affinity], values))


def _keeps_as_integer(value: Any) -> bool:
    return not isinstance(value, str) or not _is_number(value)


def _keeps_as_real(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= _EXACT or (abs(value) < _LARGEST and int(float(value)) == value)
    return _keeps_as_integer(value)


def _keeps_as_text(value: Any) -> bool:
    return not isinstance(value, int | float)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_EXACT = 2**53
_LARGEST = 2**63
_AFFINITIES = (
    (("INT",), "INTEGER"),
    (("CHAR", "CLOB", "TEXT"), "TEXT"),
    (("BLOB",), "BLOB"),
    (("REAL", "FLOA", "DOUB"), "REAL"),
)
_KEPT = {
    "INTEGER": frozenset({int, float, bytes, bool, type(None)}),
    "NUMERIC": frozenset({int, float, bytes, bool, type(None)}),
    "REAL": frozenset({float, bytes, type(None)}),
    "TEXT": frozenset({str, bytes, type(None)}),
}
_KEEPING: dict[str, Callable[[Any], bool]] = {
    "INTEGER": _keeps_as_integer,
    "NUMERIC": _keeps_as_integer,
    "REAL": _keeps_as_real,
    "TEXT": _keeps_as_text,
}


def _plain(value: Any) -> Any:
    """A value as one that SQLite takes: times as ISO 8601, decimals as text, containers and structs as JSON."""
    if type(value) in _PLAIN and value == value:  # noqa: PLR0124 - all but what is not a number
        return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, float) and value != value:  # noqa: PLR0124 - SQLite would store NULL
        raise PermanentError("a float is not a number, which SQLite has not", error_type="refused")
    if isinstance(value, Decimal | UUID):
        return str(value)
    if isinstance(value, Enum):
        return _plain(value.value)
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return _encoded(value)


def _encoded(value: Any) -> Any:
    """Bytes as they are, and what is left as JSON."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(cast("bytes", value))
    try:
        encoded = msgspec.json.encode(value)
        check_numbers(value, encoded)
        return encoded.decode()
    except (TypeError, ValueError):
        raise PermanentError(f"a value of type {type(value).__qualname__} has no form in SQLite or JSON") from None
