"""The edge to asyncpg: its connections as far as a sink uses them, a few of them kept, and what its errors mean.

asyncpg is typed in parts; what is used of it is written down here, and nowhere else.
"""

# ruff: noqa: A002, D102 - the methods and their parameters are asyncpg's

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import WeakSet

import msgspec

from batchqueue_async.errors import AuthError, BatchQueueError, PermanentError, RetryableError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.records import check_numbers

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret


class TransactionBlock(Protocol):
    """What is used of `asyncpg.transaction.Transaction`; inside another one it is a savepoint."""

    async def start(self) -> None: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...
    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *details: object) -> None: ...


class Connection(Protocol):
    """What is used of `asyncpg.Connection`."""

    async def execute(self, query: str, *args: Any) -> str: ...
    async def fetch(self, query: str, *args: Any) -> list[Any]: ...
    async def fetchval(self, query: str, *args: Any) -> Any: ...
    async def copy_records_to_table(
        self,
        table_name: str,
        *,
        records: Iterable[Sequence[Any]],
        columns: Sequence[str],
        schema_name: str | None,
        where: str | None = ...,
    ) -> str: ...
    async def reload_schema_state(self) -> None: ...
    async def set_type_codec(self, typename: str, *, schema: str, encoder: Any, decoder: Any, format: str) -> None: ...
    def transaction(self) -> TransactionBlock: ...
    def get_server_version(self) -> Any: ...
    def is_closed(self) -> bool: ...
    def terminate(self) -> None: ...
    async def close(self, *, timeout: float | None = None) -> None: ...


Connect: TypeAlias = Callable[[], Awaitable[Connection]]

_GOODBYE = 1.0
_JSONB_VERSION = b"\x01"


def _json(value: Any) -> bytes:
    encoded = msgspec.json.encode(value)
    check_numbers(value, encoded)
    return encoded


def _jsonb(value: Any) -> bytes:
    return _JSONB_VERSION + _json(value)


def _from_json(value: bytes) -> Any:
    return msgspec.json.decode(value)


def _from_jsonb(value: bytes) -> Any:
    return msgspec.json.decode(value[1:])


async def connect(dsn: str, password: Secret | None, context: ssl.SSLContext | None, timeout: float) -> Connection:
    """Connect, with JSON columns that take any value which has a form in JSON."""
    asyncpg = require("asyncpg", "postgres")
    options: dict[str, Any] = {"server_settings": {"application_name": "batchqueue_async"}}
    if password is not None:
        options["password"] = password.reveal()
    if context is not None:
        options["ssl"] = context
    async with asyncio.timeout(timeout):
        connection: Connection = await asyncpg.connect(dsn, timeout=timeout, **options)
        try:
            # COPY takes the binary form alone.
            for name, encoder, decoder in (("json", _json, _from_json), ("jsonb", _jsonb, _from_jsonb)):
                await connection.set_type_codec(
                    name, schema="pg_catalog", encoder=encoder, decoder=decoder, format="binary"
                )
        except BaseException:
            connection.terminate()
            raise
    return connection


class Connections:
    """At most so many connections, made when they are needed, and kept while they are sound."""

    def __init__(self, make: Connect, limit: int) -> None:
        self._make = make
        self._room = asyncio.Semaphore(limit)
        self._idle: list[Connection] = []
        self._lent: set[Connection] = set()
        self._ended: WeakSet[Connection] = WeakSet()
        self._ending: set[asyncio.Task[None]] = set()
        self.closed = False

    @property
    def turn(self) -> asyncio.Semaphore:
        """What to hold while a connection is lent; who waits for it, waits for other calls and not for the server."""
        return self._room

    @asynccontextmanager
    async def lend(self) -> AsyncGenerator[Connection]:
        """A connection for the time of the block; one whose block raises is ended, since its state is not known."""
        connection = await self._take()
        self._lent.add(connection)
        try:
            yield connection
        except BaseException:
            self.end(connection)
            raise
        finally:
            self._lent.discard(connection)
            if self.closed:
                self.end(connection)
            elif not (connection in self._ended or connection.is_closed()):
                self._idle.append(connection)

    def end(self, connection: Connection) -> None:
        """End a connection in the background, so that the server is told to stop what it does for it."""
        if connection not in self._ended and not connection.is_closed():
            self._ended.add(connection)
            task = asyncio.create_task(_end(connection))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all connections; what is under way on them is undone."""
        self.closed = True
        for connection in [*self._lent, *self._idle]:
            self.end(connection)
        self._idle.clear()
        while self._ending:
            await asyncio.wait(self._ending)

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await self._make()


async def _end(connection: Connection) -> None:
    with suppress(Exception):  # whatever a good-bye meets, the connection is gone
        await connection.close(timeout=_GOODBYE)
    connection.terminate()


# --- errors

# By the first two characters of the SQLSTATE, by all five (see PostgreSQL's appendix A), or by asyncpg's name for what
# has none of its own. A table that is gone is made again.
_PASSING = frozenset(
    {
        *("08", "40", "53", "57", "58", "XX", "25006", "55006", "55P03", "3D000", "42P01", "26000"),
        *("InvalidCachedStatementError", "OutdatedSchemaCacheError"),
    }
)
_REFUSED = {"28", "42501"}
_RECORD = {"21", "22", "23", "44", "54", "P0001"}
_KINDS = {"40": "conflict", "53": "server", "57": "server", "58": "server", "XX": "server", "08": "network"}
_HELP = {
    "42P10": "; the table needs a unique constraint on exactly these columns",
    "3D000": "; create the database",
    "25006": "; this server is a read-only standby",
    "0A000": "; what the table is does not allow the statement",
}
_POLICY = "ExecWithCheckOptions"
_LINE = re.compile(r"^COPY .*, \D*(\d+)", re.MULTILINE)


def state_of(error: BaseException) -> str:
    """The SQLSTATE of an error, or an empty text."""
    return str(getattr(error, "sqlstate", None) or "")


def is_of_policy(error: BaseException) -> bool:
    """Whether a row-level security policy refused a row: by the state alone it would be the user's rights."""
    return state_of(error) == "42501" and getattr(error, "server_source_function", None) == _POLICY


def is_of_record(error: Exception) -> bool:
    """Whether an error is about the values of some record, so that the others may be taken."""
    if isinstance(error, BatchQueueError | OSError):
        return False
    state = state_of(error)
    # Without a SQLSTATE it is asyncpg's, which had no binary form for a value.
    of_value = isinstance(error, TypeError | ValueError | OverflowError)
    return bool({state, state[:2]} & _RECORD) or of_value or is_of_policy(error)


def line_of(error: Exception) -> int | None:
    """Which row of a COPY an error is about, counted from 1, where the server says so."""
    found = _LINE.search(str(getattr(error, "context", None) or ""))
    return None if found is None else int(found[1])


def is_of_schema(error: Exception) -> bool:
    """Whether an error says that a table or column is not what it was."""
    return state_of(error)[:2] == "42"


def translate_error(where: str, error: Exception, retryable: frozenset[str] = frozenset()) -> Exception:
    """An error of asyncpg as the sink's. PostgreSQL's own text may quote values, so only its names are in it.

    `retryable` are more states that may pass, of two characters or five.
    """
    if isinstance(error, BatchQueueError):
        return error
    state = state_of(error)
    if isinstance(error, OSError):  # and so TimeoutError, and what TLS raises
        late = isinstance(error, TimeoutError)
        reason = "no answer in time" if late else error.strerror or "the connection broke"
        kind = "timeout" if late else "network"
        return RetryableError(f"{where}: {type(error).__name__}: {reason}", error_type=kind)
    if not type(error).__module__.startswith("asyncpg") and not is_of_record(error):
        return error  # not one that was foreseen: a mistake in a program shows as it is
    text = f"{where}: {_named(error, state)}"
    kinds = {state, state[:2], type(error).__name__}
    if kinds & retryable:
        return RetryableError(text, error_type="server")
    if is_of_policy(error):
        return PermanentError(f"{text}; a row-level security policy refuses the row", error_type="refused")
    if kinds & _REFUSED:
        return AuthError(f"{text}; check the user, the password and its rights")
    # Without a SQLSTATE and not about a value, asyncpg says that the connection is of no use any more.
    if kinds & _PASSING or not (state or is_of_record(error)):
        return RetryableError(text, error_type=_KINDS.get(state[:2], "server" if state else "network"))
    return PermanentError(text, error_type="refused")


def _named(error: Exception, state: str) -> str:
    names = [
        f"{kind} {value!r}"
        for kind in ("constraint", "column", "table")
        if (value := getattr(error, f"{kind}_name", None))
    ]
    shown = f"{type(error).__name__} ({state})" if state else type(error).__name__
    return f"{shown}{' at ' if names else ''}{', '.join(names)}{_HELP.get(state, '')}"
