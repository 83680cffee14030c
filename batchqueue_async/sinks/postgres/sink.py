"""Rows in a table of PostgreSQL, by COPY; replaced by their keys, or each exactly once, where that is asked for."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks._shared import tls as tls_options
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.records import row_key
from batchqueue_async.sinks._shared.secrets import Secret, redacted
from batchqueue_async.sinks.base import SinkNeeds
from batchqueue_async.sinks.postgres.client import Connections, connect, is_of_schema, translate_error
from batchqueue_async.sinks.postgres.ledger import RESERVED, Ledger
from batchqueue_async.sinks.postgres.staging import StagedRows, Staging, staged_name
from batchqueue_async.sinks.postgres.table import SchemaMode, Table
from batchqueue_async.sinks.postgres.writing import BatchWrite, PostgresTransaction

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from batchqueue_async.sinks._shared.tls import TlsOption
    from batchqueue_async.sinks.base import Attempt, BatchKey, Delivered, Refused, SendResult, StagedPart
    from batchqueue_async.sinks.postgres.client import Connection


class PostgresSink:
    """Writes records into a table, which is made from the first ones.

    A record is a mapping, struct or dataclass of named values, or an Arrow record batch of many rows; tuples need
    `columns`, and anything else goes into a column `value`. Containers go into columns of type jsonb. Each send is
    one transaction. A record that the table refuses is found and given back in `SendResult.rejected`, and the others
    are written.

    With `send_keyed`, which the exporter uses, each record is in once, whatever is repeated: its key is noted in the
    same transaction, in tables of the library's own, as ranges of numbers, which costs little; or, with `key_column`,
    in a column of the table itself. With `begin` a whole batch is in once, and with `stage` and `publish` one that
    many processes write.

    Example:
        >>> PostgresSink("postgresql://app:s3cret@db.example/app", table="spans", upsert_on=["id"])
        PostgresSink('postgresql://app:***@db.example/app', table='spans')
    """

    concurrent = True
    replaces = True

    def __init__(
        self,
        dsn: str,
        table: str = "rows",
        *,
        schema: SchemaMode | str | None = None,
        namespace: str | None = None,
        columns: Sequence[str] | None = None,
        upsert_on: Sequence[str] = (),
        key_column: str | None = None,
        password: str | Secret | None = None,
        tls: TlsOption = None,
        connections: int = 4,
        connect_timeout: float = 10.0,
        timeout: float = 10.0,
        retryable: Iterable[str] = (),
    ) -> None:
        """Say which table of which database.

        Args:
            dsn: the database, as libpq has it: `postgresql://user@host/database`; or a reference to that, `env:NAME`
                or `file:/path`.
            table: the table; made from the first records if there is none.
            schema: what is done with values that a column would change, and with columns that the table has not:
                "strict" refuses their records, "widen" gives the column a wider type, "add" widens and adds columns.
                Any other text names the table's schema, as `namespace` does.
            namespace: the schema that the table is in; None is the first one of the search path.
            columns: the names of the values in records that are tuples.
            upsert_on: the columns of a unique constraint by which a row that is there is replaced.
            key_column: a unique column of type text for each record's key.
            password: the password: `env:NAME`, `file:/path` or the value; None takes what the dsn has.
            tls: True, a `Tls` or an `ssl.SSLContext`; None as the dsn's `sslmode` says.
            connections: how many sends may be under way at once, each on a connection of its own.
            connect_timeout: seconds that a connection may take to be made.
            timeout: seconds that a call may take; the wait for a connection of the sink's own does not count.
            retryable: more SQLSTATEs that may pass, of two characters or five, such as "P0001" of one's own triggers.
        """
        require("asyncpg", "postgres")
        if not table or table in RESERVED:
            raise ConfigError(f"PostgreSQL sink: table={table!r} is {'reserved' if table else 'empty'}; name another")
        if upsert_on and key_column is not None:
            raise ConfigError(
                f"PostgreSQL sink: upsert_on={list(upsert_on)} replaces rows, and key_column={key_column!r} keeps "
                "them as they are; give one of them"
            )
        for name, value in (("connections", connections), ("connect_timeout", connect_timeout), ("timeout", timeout)):
            if value <= 0:
                raise ConfigError(f"PostgreSQL sink: {name}={value} is not above 0")
        if schema in get_args(SchemaMode):
            self.mode: SchemaMode = cast("SchemaMode", schema)
        elif namespace is not None and schema is not None:
            raise ConfigError(
                f"PostgreSQL sink: schema={schema!r} with namespace={namespace!r}; give schema one of "
                f"{', '.join(get_args(SchemaMode))}"
            )
        else:
            self.mode, namespace = "strict", namespace if schema is None else schema
        self.table = table
        self.schema = namespace
        self.columns = None if columns is None else tuple(columns)
        self.upsert_on = tuple(upsert_on)
        self.key_column = key_column
        self.connections = connections
        self.connect_timeout = connect_timeout
        self.timeout = timeout
        self.retryable = frozenset(retryable)
        self.needs = SinkNeeds(
            ordering="key" if self.upsert_on else "any",
            key=row_key(self.upsert_on, self.columns) if self.upsert_on else None,
            concurrency=connections,
            idempotent=True,
            atomic=True,
        )
        self._dsn = dsn
        self._password = None if password is None else Secret(password)
        self._tls: TlsOption = tls
        self._where = f"PostgreSQL sink, table {table!r}"
        self._table: Table
        self._ledger: Ledger
        self._turn: asyncio.Lock
        self._pool: Connections | None = None

    def __repr__(self) -> str:
        return f"PostgresSink({redacted(self._dsn)!r}, table={self.table!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._like(self.table), ()

    def _like(self, table: str) -> partial[PostgresSink]:
        return partial(
            type(self),
            self._dsn,
            table,
            schema=self.mode,
            namespace=self.schema,
            columns=self.columns,
            upsert_on=self.upsert_on,
            key_column=self.key_column,
            password=self._password,
            tls=self._tls,
            connections=self.connections,
            connect_timeout=self.connect_timeout,
            timeout=self.timeout,
            retryable=self.retryable,
        )

    async def open(self) -> None:
        """Get ready; the first send connects, so that a database which is down keeps no program from starting."""
        tls_options.context(self._tls)  # a file that can't be used shows here
        self._table = Table(
            self.table, self.schema, self.upsert_on, self.key_column, mode=self.mode, retryable=self.retryable
        )
        self._ledger = Ledger(self.table, self.schema)
        self._turn = asyncio.Lock()

        async def make() -> Connection:
            context = tls_options.context(self._tls)
            return await connect(Secret(self._dsn).reveal(), self._password, context, self.connect_timeout)

        self._pool = Connections(make, self.connections)

    async def close(self) -> None:
        """Disconnect; a transaction that is under way is undone."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def declare(self, schema: Any) -> None:
        """See to it that there is a table for the columns of an Arrow schema, with their types, before any record.

        A table that is there gets columns, or wider ones, as the sink's `schema` allows it.
        """
        async with self._call() as connection:
            await self._table.declare(connection, schema)

    async def send(self, batch: Sequence[Any]) -> SendResult:
        """Write the records in one transaction.

        Raises:
            RetryableError: the database is not there, has no room or gives no answer in time. Nothing of the batch is
                in, or all of it, when the answer alone was lost; `send_keyed` tells this apart when it is repeated.
            AuthError: it refuses the user, the password or what the user wants to do.
            PermanentError: the statement can never succeed; nothing of the batch is in.
        """
        async with self._call() as connection:
            return await BatchWrite(self._table, self._ledger, connection, batch, self.columns).send()

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult:
        """Write the records whose keys are not in yet, and the keys, in one transaction."""
        async with self._call() as connection:
            return await BatchWrite(self._table, self._ledger, connection, batch, self.columns).send_keyed(keys)

    @asynccontextmanager
    async def _call(self) -> AsyncGenerator[Connection]:
        """A connection for one call, whose errors are the sink's."""
        pool = self._open_pool
        # The wait for one of our own connections is no time of the server's.
        async with pool.turn, self._translated(), pool.lend() as connection:
            yield connection

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """A connection for one call of a part of this sink, whose errors are the sink's."""
        return self._call()

    @asynccontextmanager
    async def _translated(self) -> AsyncGenerator[None]:
        """In time, and with the sink's errors."""
        try:
            async with asyncio.timeout(self.timeout):
                yield
        except Exception as error:  # each is told as what it means; what was not foreseen goes on as it is
            if is_of_schema(error):
                self._table.columns = None
                self._ledger.forget()
            meant = translate_error(self._where, error, self.retryable)
            if meant is error:
                raise
            # PostgreSQL's own text may quote values, and a traceback would show it.
            raise meant from (error if isinstance(error, OSError) else None)

    @property
    def _open_pool(self) -> Connections:
        if self._pool is None:
            raise RuntimeError(f"{self!r} is not open; call open() first")
        return self._pool

    # -- a batch in one transaction ------------------------------------------------------------------------------

    async def begin(self, key: BatchKey) -> PostgresTransaction | None:
        """Start a transaction for the batch, or return None: it is in already."""
        pool = self._open_pool
        async with AsyncExitStack() as stack:
            await self._turn.acquire()
            stack.callback(self._turn.release)
            await stack.enter_async_context(pool.turn)
            async with self._translated():
                connection = await stack.enter_async_context(pool.lend())
                await self._ledger.open(connection)
                block = connection.transaction()
                await block.start()
                if await self._ledger.is_delivered(connection, key):
                    await block.rollback()
                    return None
            return PostgresTransaction(
                self._table,
                self._ledger,
                connection,
                block,
                key,
                columns=self.columns,
                call=self._translated,
                end=stack.pop_all(),
            )

    async def delivered(self) -> list[Delivered]:
        """The notes of the batches that are in, by source."""
        async with self._call() as connection:
            return await self._ledger.delivered(connection)

    async def forget(self, sources: Sequence[str]) -> int:
        """Take back the notes of sources, whose batches are delivered again if they come again; how many there were."""
        async with self._call() as connection:
            return await self._ledger.take_back(connection, sources)

    # -- many processes ------------------------------------------------------------------------------------------

    def stage(self, attempt: Attempt) -> StagedRows:
        """A sink for one attempt: a table of its own, beside the target."""
        sink = self._like(staged_name(self.schema, self.table, attempt))
        ledger = Ledger(self.table, self.schema)
        return StagedRows(sink(upsert_on=(), key_column=None, connections=1), ledger, attempt)

    async def publish(self, key: BatchKey, attempts: Sequence[Attempt]) -> bool:
        """Copy the attempts' rows into the table, and note the batch, in one transaction.

        `timeout` is for each of its steps: it may take as long as its rows need.
        """
        return await self.publish_sifted(key, attempts, None)

    async def publish_sifted(
        self, key: BatchKey, attempts: Sequence[Attempt], bury: Callable[[Refused], None] | None
    ) -> bool:
        """Publish, without the rows that the table refuses: those are given to `bury` before all others are in.

        Where a constraint that is checked at the end of the transaction alone refuses one, each part of the batch is
        held to those by itself. Rows that are refused are tried again after the others, which they may need, but not
        with `upsert_on`, where they would replace newer ones.

        Args:
            key: the batch.
            attempts: those that count.
            bury: called in a thread with those and the reasons; None refuses the batch instead.
        """
        async with self._staging() as (staging, connection):
            return await staging.publish(connection, key, attempts, bury)

    async def discard(self, key: BatchKey) -> None:
        """Drop what was staged for the batch, which may come again."""
        async with self._staging() as (staging, connection):
            await staging.discard(connection, key)

    async def abandon(self, key: BatchKey) -> None:
        """Drop what was staged for a batch that never comes again, and note it as if it were in, against zombies."""
        async with self._staging() as (staging, connection):
            await staging.abandon(connection, key)

    async def staged(self) -> list[StagedPart]:
        """What is staged, of all batches."""
        async with self._staging() as (staging, connection):
            return await staging.parts(connection)

    async def prune(self, older_than: float) -> list[BatchKey]:
        """Drop what was staged more than so many seconds ago."""
        async with self._staging() as (staging, connection):
            return await staging.prune(connection, older_than)

    @asynccontextmanager
    async def _staging(self) -> AsyncGenerator[tuple[Staging, Connection]]:
        """The staged tables, and a connection for many steps, each of which has the timeout of a call."""
        async with self._opened(), self._open_pool.turn, AsyncExitStack() as stack:
            async with self._translated():
                connection = await stack.enter_async_context(self._open_pool.lend())
            yield Staging(self._table, self._ledger, self._translated, self.timeout), connection

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[None]:
        """Open for one call, where the sink is not open: who publishes need not send."""
        was_open = self._pool is not None
        if not was_open:
            await self.open()
        try:
            yield
        finally:
            if not was_open:
                await self.close()
