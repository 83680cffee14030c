"""One table of a SQLite file, synchronously: its columns, its rows, and the note of what is in.

Beside the table the file holds two of the library's own, written in the same transactions:

    batchqueue_ledger(target, source, number)    the last batch of each source that is in the table `target`
    batchqueue_keys(target, key)                 the idempotency keys of the records that are in it
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import msgspec

from batchqueue_async.errors import ConfigError, PermanentError, RetryableError
from batchqueue_async.sinks._shared.files import make_directory, open_append
from batchqueue_async.sinks._shared.records import is_table, rows

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    from batchqueue_async.sinks.base import BatchKey

RESERVED = frozenset({"batchqueue_ledger", "batchqueue_keys"})
_TABLES = """
CREATE TABLE IF NOT EXISTS batchqueue_ledger (
  target TEXT, source TEXT, number INTEGER NOT NULL, PRIMARY KEY (target, source)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batchqueue_keys (target TEXT, key TEXT, PRIMARY KEY (target, key)) WITHOUT ROWID
"""
_LAST = "SELECT number FROM batchqueue_ledger WHERE target = ? AND source = ?"
_NOTE = "INSERT OR REPLACE INTO batchqueue_ledger VALUES (?, ?, ?)"
_SEEN = "SELECT key FROM batchqueue_keys WHERE target = ? AND key IN (SELECT value FROM json_each(?))"
_TAKE = "INSERT INTO batchqueue_keys VALUES (?, ?)"

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
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
_TYPES: dict[type, str] = {int: "INTEGER", bool: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}


class Table:
    """A connection and a table; belongs to the thread that opens it.

    Attributes:
        columns: the table's columns, in order; None before there is a table.
    """

    def __init__(self, path: Path, name: str, columns: Sequence[str] | None, busy_timeout: float) -> None:
        self.path = path
        self.name = name
        self.busy_timeout = busy_timeout
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
            connection.execute(f"PRAGMA journal_mode={journal}")
            connection.execute("PRAGMA synchronous=FULL")
            with self.transaction():
                for statement in _TABLES.split(";"):
                    connection.execute(statement)
                self.columns = self._existing()

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

    # -- rows ----------------------------------------------------------------------------------------------------

    def insert(self, batch: Sequence[Any]) -> None:
        """Insert records; makes the table for the first ones. Needs a transaction."""
        for tuples, columns in self._tuples(batch):
            self.insert_tuples(columns, tuples)

    def insert_tuples(self, columns: Sequence[str], tuples: Iterable[Sequence[Any]]) -> None:
        """Insert values of the given columns. Needs a transaction."""
        marks = ", ".join("?" * len(columns))
        statement = f"INSERT INTO {quoted(self.name)} ({_list(columns)}) VALUES ({marks})"  # noqa: S608 - quoted
        with self._errors():
            self.connection.executemany(statement, tuples)

    def create(self, columns: Mapping[str, str]) -> None:
        """Make the table, unless it exists. Needs a transaction."""
        if self.columns is None:
            described = ", ".join(f"{quoted(name)} {kind}".rstrip() for name, kind in columns.items())
            with self._errors():
                self.connection.execute(f"CREATE TABLE {quoted(self.name)} ({described})")
            self.columns = tuple(columns)
        unknown = [name for name in columns if name not in self.columns]
        if unknown:
            raise PermanentError(
                f"SQLite sink {str(self.path)!r}: table {self.name!r} has no column {unknown[0]!r}, only "
                f"{list(self.columns)}; add the column with ALTER TABLE, or send records without it"
            )

    def schema(self) -> dict[str, str]:
        """The columns of the table, with their types; empty where there is no table."""
        found = self.connection.execute("SELECT name, type FROM pragma_table_info(?)", (self.name,)).fetchall()
        return dict(found)

    def _existing(self) -> tuple[str, ...] | None:
        return tuple(self.schema()) or None

    def _tuples(self, batch: Sequence[Any]) -> Generator[tuple[Iterable[Sequence[Any]], Sequence[str]]]:
        plain: list[Any] = []
        for record in batch:
            if is_table(record):
                yield self._arrow(record)
            else:
                plain.append(record)
        if plain:
            found = list(rows(plain, self._wanted or self.columns))
            shapes = dict.fromkeys(map(tuple, found))
            for shape in shapes:
                alike = found if len(shapes) == 1 else [row for row in found if tuple(row) == shape]
                yield self._checked(shape, [list(map(itemgetter(name), alike)) for name in shape])

    def _arrow(self, record: Any) -> tuple[Iterable[Sequence[Any]], Sequence[str]]:
        return self._checked(record.schema.names, [column.to_pylist() for column in record.columns])

    def _checked(
        self, names: Sequence[str], values: Sequence[Sequence[Any]]
    ) -> tuple[Iterable[Sequence[Any]], Sequence[str]]:
        """The columns as rows of values that SQLite takes; sees to it that the table has the columns."""
        kinds = [set(map(type, column)) for column in values]
        plain = [
            column if kind <= _PLAIN else list(map(_plain, column)) for column, kind in zip(values, kinds, strict=True)
        ]
        if self.columns is None or any(name not in self.columns for name in names):
            wanted = dict.fromkeys(self._wanted or (), "")
            self.create(wanted | {name: _type(column) for name, column in zip(names, plain, strict=True)})
        return zip(*plain, strict=True), names

    # -- what is in ----------------------------------------------------------------------------------------------

    def is_delivered(self, key: BatchKey) -> bool:
        """Whether the batch, or a later one of its source, is in."""
        with self._errors():
            found = self.connection.execute(_LAST, (self.name, key.source)).fetchone()
        return found is not None and found[0] >= key.number

    def note_delivered(self, key: BatchKey) -> None:
        """Note that the batch is in. Needs a transaction."""
        with self._errors():
            self.connection.execute(_NOTE, (self.name, *key))

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
                raise RetryableError(f"{where}: {error}; the same batch may succeed later") from error
            raise PermanentError(f"{where}: {error}") from error


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


def _type(column: Sequence[Any]) -> str:
    """The declared type for a column of these values; none where they are all None or differ."""
    kinds = {_TYPES[kind] for kind in set(map(type, column)) if kind is not type(None)}
    return kinds.pop() if len(kinds) == 1 else ""


def _plain(value: Any) -> Any:
    """A value as one that SQLite takes: times as ISO 8601, decimals as text, containers and structs as JSON."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if isinstance(value, Enum):
        return _plain(value.value)
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(cast("bytes", value))
    try:
        return msgspec.json.encode(value).decode()
    except TypeError:
        raise PermanentError(f"a value of type {type(value).__qualname__} has no form in SQLite or JSON") from None
