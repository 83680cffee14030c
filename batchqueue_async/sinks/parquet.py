"""Rows in Parquet files, in a directory or an object store. Needs `[parquet]`."""

from __future__ import annotations

import asyncio
import io
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from batchqueue_async.errors import AuthError, BatchQueueError, ConfigError, RetryableError, SinkError
from batchqueue_async.sinks._shared.arrow import arrow_rows, unwritable
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.files import batch_name
from batchqueue_async.sinks._shared.secrets import redacted, resolve_option
from batchqueue_async.sinks.base import SendResult, SinkNeeds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks.base import BatchKey

_EXTRA = "parquet"


class _Gathering:
    """Rows of several sends that go into one file."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.tables: list[Any] = []
        self.bytes = 0
        self.done = done
        self.timer: asyncio.TimerHandle | None = None


class ParquetSink:
    """Writes records into Parquet files; delivers at least once, and a batch with a key exactly once.

    Sends that are under way together go into one file, which is written when it is large enough or when its first send
    has waited long enough; a send returns when its file is there. So files become large where many sends may be under
    way. A file has the types of its own records, or those of `schema`; a value that its column would change is refused
    by record. A file is there whole or not at all. With `begin` a batch is one file, named after the batch.

    Example:
        >>> ParquetSink("s3://lake/rows", options={"aws_secret_access_key": "env:SECRET"})
        ParquetSink('s3://lake/rows')
    """

    concurrent = True
    needs = SinkNeeds()

    def __init__(
        self,
        url: str | Path,
        *,
        columns: Sequence[str] | None = None,
        schema: Any = None,
        max_bytes: int = 64 * 1024 * 1024,
        max_seconds: float = 1.0,
        compression: str = "zstd",
        options: Mapping[str, str | Secret | Mapping[str, Any]] | None = None,
    ) -> None:
        """Say where the files go, and how large they become.

        Args:
            url: a directory, or a URL of an object store as obstore has it: `s3://bucket/prefix` and others.
            columns: the names of the values in records that are tuples.
            schema: a `pyarrow.Schema`; None takes the types that the records of a file have.
            max_bytes: a file with so many bytes of rows, before compression, is written.
            max_seconds: how long a send waits at most for others to share its file.
            compression: as Parquet has it: zstd, snappy, gzip, lz4 or none.
            options: what the store needs; a value may be `env:NAME` or `file:/path`.
        """
        for name, value in (("max_bytes", max_bytes), ("max_seconds", max_seconds)):
            if value <= 0:
                raise ConfigError(f"Parquet sink: {name}={value} is not above 0; give a number above it")
        self.url = str(url)
        self.columns = None if columns is None else tuple(columns)
        self.schema = schema
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds
        self.compression = compression
        self._options = dict(options or {})
        self._store: Any = None
        self._gathering: dict[Any, _Gathering] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._turn: asyncio.Lock

    def __repr__(self) -> str:
        return f"ParquetSink({redacted(self.url)!r})"

    async def open(self) -> None:
        """Get ready; makes the directory, where it is one."""
        self._turn = asyncio.Lock()
        require("pyarrow.parquet", _EXTRA)
        stores = require("obstore.store", _EXTRA)
        if "://" in self.url:
            options = {name: resolve_option(value) for name, value in self._options.items()}
            self._store = stores.from_url(self.url, **options)
        else:
            directory = await asyncio.to_thread(Path(self.url).absolute)
            self._store = stores.LocalStore(prefix=directory, mkdir=True)

    async def close(self) -> None:
        """Write what is gathered."""
        for key in list(self._gathering):
            self._finish(key)
        while self._writing:
            await asyncio.wait(self._writing)
        self._store = None

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Put the records into a file, and return when it is there."""
        self._open_store()
        found = await asyncio.to_thread(arrow_rows, batch, self.columns, self.schema, _EXTRA)
        if found.table is not None:
            await asyncio.shield(self._gather(found.table))
        return SendResult(rejected=found.refused) if found.refused else None

    def _gather(self, table: Any) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        key = table.schema.to_string()
        group = self._gathering.get(key)
        if group is None:
            group = self._gathering[key] = _Gathering(loop.create_future())
            group.timer = loop.call_later(self.max_seconds, self._finish, key)
        group.tables.append(table)
        group.bytes += table.nbytes
        if group.bytes >= self.max_bytes:
            self._finish(key)
        return group.done

    def _finish(self, key: Any) -> None:
        group = self._gathering.pop(key)
        if group.timer is not None:
            group.timer.cancel()
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid4().hex}.parquet"
        task = asyncio.get_running_loop().create_task(self._deliver(group, name), name="parquet-file")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _deliver(self, group: _Gathering, name: str) -> None:
        try:
            await self.put(name, group.tables)
        except Exception as error:  # noqa: BLE001 - it is that of all sends whose rows are in the file
            if not group.done.done():
                group.done.set_exception(error)
                group.done.exception()  # those who sent may have been cancelled
        else:
            if not group.done.done():
                group.done.set_result(None)

    async def put(self, name: str, tables: Sequence[Any]) -> None:
        """Write one file of these rows."""
        store = self._open_store()
        try:
            content = await asyncio.to_thread(self._encoded, tables)
        except Exception as error:
            # Arrow raises errors of many kinds, told apart in one place.
            meant = unwritable(error, self, _EXTRA)
            if meant is None:
                raise
            raise meant from error
        try:
            await require("obstore", _EXTRA).put_async(store, name, content)
        except Exception as error:
            # obstore raises errors of many kinds, told apart in one place.
            raise self._error(error) from error

    def _encoded(self, tables: Sequence[Any]) -> bytes:
        target = io.BytesIO()
        joined = require("pyarrow", _EXTRA).concat_tables(tables)
        require("pyarrow.parquet", _EXTRA).write_table(joined, target, compression=self.compression)
        return target.getvalue()

    async def begin(self, key: BatchKey) -> ParquetTransaction | None:
        """Start a file for the batch, or return None: it is there already."""
        name = f"{batch_name(key)}.parquet"
        self._open_store()
        async with AsyncExitStack() as stack:
            await self._turn.acquire()
            stack.callback(self._turn.release)
            if await self._is_there(name):
                return None
            return ParquetTransaction(self, name, stack.pop_all())

    async def _is_there(self, name: str) -> bool:
        client = require("obstore", _EXTRA)
        try:
            await client.head_async(self._open_store(), name)
        except (client.exceptions.NotFoundError, FileNotFoundError):
            return False
        except Exception as error:
            # As in `put`.
            raise self._error(error) from error
        return True

    def _open_store(self) -> Any:
        if self._store is None:
            raise RuntimeError(f"{self!r} is not open; call open() first")
        return self._store

    def _error(self, error: Exception) -> Exception:
        known = require("obstore.exceptions", _EXTRA)
        where = f"{self!r}: {type(error).__name__}"
        if isinstance(error, BatchQueueError):
            return error
        if isinstance(error, known.PermissionDeniedError | known.UnauthenticatedError | PermissionError):
            return AuthError(f"{where}; check the credentials and their rights")
        if isinstance(error, known.NotFoundError | FileNotFoundError):
            return ConfigError(f"{where}; make the bucket or directory")
        if isinstance(error, known.BaseError | OSError):
            return RetryableError(where, error_type="server")
        return error


class ParquetTransaction:
    """One batch on its way into a file of its own."""

    def __init__(self, sink: ParquetSink, name: str, turn: AsyncExitStack) -> None:
        self._sink = sink
        self._name = name
        self._turn = turn
        self._tables: list[Any] = []

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Keep records for the file."""
        sink = self._sink
        schema = self._tables[0].schema if self._tables else sink.schema
        found = await asyncio.to_thread(arrow_rows, batch, sink.columns, schema, _EXTRA)
        if found.table is not None:
            self._tables.append(found.table)
        refused: dict[int, SinkError] = found.refused
        return SendResult(rejected=refused) if refused else None

    async def commit(self) -> None:
        """Write the file; a batch without rows leaves one without columns, as the note that it is in."""
        tables, self._tables = self._tables, []
        await self._sink.put(self._name, tables or [require("pyarrow", _EXTRA).table({})])
        await self._turn.aclose()

    async def rollback(self) -> None:
        """Forget the records; does nothing after a commit."""
        self._tables = []
        await self._turn.aclose()
