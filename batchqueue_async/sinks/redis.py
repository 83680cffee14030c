"""An entry a record in a Redis stream, a pipeline a batch. Needs `[redis]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import (
    AuthError,
    BatchQueueError,
    ConfigError,
    PermanentError,
    RetryableError,
    SinkError,
)
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.payloads import payload, verdict
from batchqueue_async.sinks._shared.records import row
from batchqueue_async.sinks._shared.redis_client import RedisServer, end
from batchqueue_async.sinks.base import SinkNeeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption
    from batchqueue_async.sinks.base import SendResult

# What Redis says while it can't take writes: it starts, is out of memory, its disk fails, it is a replica, its cluster
# or its primary is not well. The client takes the word off and raises a class of its own for some, not for all.
_LATER = {
    *("LOADING", "OOM", "MISCONF", "READONLY", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS"),
    *("NOTREADY", "UNKILLABLE", "INPROG", "NOGOODSLAVE", "ISMASTERDOWN", "REPLICAOFNOONE"),
}
_LATER_CLASSES = {
    *("BusyLoadingError", "ReadOnlyError", "OutOfMemoryError", "TryAgainError", "ClusterDownError"),
    *("MasterDownError", "ClusterError", "MaxConnectionsError", "SlotNotCoveredError", "MasterNotFoundError"),
    *("SlaveNotFoundError",),
}
_LATER_TEXTS = ("max number of clients", "busy running a script")
_ELSEWHERE = {"MovedError", "AskError"}


class RedisSink:
    """Adds each record to a stream with XADD, a batch in one pipeline; delivers at least once.

    Each entry has one field with the record (bytes, text, or JSON), or with `rows=True` the record's own fields; and
    the record's idempotency key in the field `bq-key`, by which a reader tells a repetition.

    Example:
        >>> RedisSink("redis://:s3cret@localhost:6379/0", stream="rows", maxlen=100_000)
        RedisSink('redis://:***@localhost:6379/0', stream='rows')
    """

    concurrent = True
    needs = SinkNeeds()

    def __init__(
        self,
        url: str,
        *,
        stream: str | Callable[[Any], str],
        maxlen: int | None = None,
        approximate: bool = True,
        rows: bool = False,
        field: str = "data",
        key_field: str = "bq-key",
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        timeout: float = 10.0,
        connect_timeout: float = 5.0,
        connections: int = 100,
        tls: TlsOption = None,
        retryable: Iterable[str] = (),
    ) -> None:
        """Say where to write, and how.

        Args:
            url: `redis://host:port/db`, `rediss://` for TLS, or `unix:///path`.
            stream: the stream's name, or a function that gives it for a record.
            maxlen: how many entries a stream keeps; None keeps all.
            approximate: whether `maxlen` may be exceeded by some entries, which is much faster.
            rows: whether an entry has the record's own fields, each as text or JSON.
            field: the field with the record, unless `rows`.
            key_field: the field with the key.
            user: `env:NAME`, `file:/path` or the value; also in the URL.
            password: likewise.
            timeout: seconds for a batch.
            connect_timeout: seconds to connect.
            connections: how many there may be at once.
            tls: for `rediss`: a `Tls`; without, certificates are verified against the system's.
            retryable: more of Redis' error words that may pass, such as "WRONGTYPE".
        """
        self._server = RedisServer("Redis sink", url, user=user, password=password, tls=tls)
        if timeout <= 0 or connect_timeout <= 0 or connections < 1:
            raise ConfigError(
                f"Redis sink: timeout={timeout}, connect_timeout={connect_timeout}, connections={connections}; "
                "give numbers above 0"
            )
        if maxlen is not None and maxlen < 1:
            raise ConfigError(f"Redis sink: maxlen={maxlen} is below 1; give a number of entries, or None")
        self.url = url
        self.stream = stream
        self.maxlen = maxlen
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.connections = connections
        self._approximate = approximate
        self._rows = rows
        self._field = field
        self._key_field = key_field
        self._shown = self._server.shown
        self._retryable = {*_LATER, *(word.upper() for word in retryable)}
        self._client: Any = None

    def __repr__(self) -> str:
        stream = self.stream if isinstance(self.stream, str) else "..."
        return f"RedisSink({self._shown!r}, stream={stream!r})"

    async def open(self) -> None:
        """Get ready; connections are made when they are needed."""
        if self._client is not None:
            return
        self._client = self._server.client(
            socket_timeout=self.timeout,
            socket_connect_timeout=self.connect_timeout,
            max_connections=self.connections,
        )

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await end(client)

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Add the batch to the stream."""
        return await self._send(batch, None)

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult | None:
        """Add the batch to the stream, each entry with its record's key."""
        return await self._send(batch, keys)

    async def _send(self, batch: Sequence[Any], keys: Sequence[str] | None) -> SendResult | None:
        if self._client is None:
            raise RuntimeError(f"Redis sink {self._shown!r} is not open; call open() first")
        errors: dict[int, SinkError] = {}
        places: list[int] = []
        pipeline = self._client.pipeline(transaction=False)
        for place, record in enumerate(batch):
            try:
                entry = self._entry(record)
            except PermanentError as error:
                errors[place] = error
                continue
            if keys is not None:
                entry[self._key_field] = keys[place]
            stream = self.stream(record) if callable(self.stream) else self.stream
            pipeline.xadd(stream, entry, maxlen=self.maxlen, approximate=self._approximate)
            places.append(place)
        if places:
            for place, answer in zip(places, await self._execute(pipeline), strict=True):
                if isinstance(answer, Exception):
                    errors[place] = self._error(answer)
        return verdict(errors, len(batch))

    async def _execute(self, pipeline: Any) -> Sequence[Any]:
        known = require("redis.exceptions", "redis")
        try:
            answers: Sequence[Any] = await pipeline.execute(raise_on_error=False)
        except (known.RedisError, OSError, BatchQueueError) as error:
            raise self._error(error) from None
        except (RuntimeError, AttributeError) as error:
            # The one is what uvloop says of a transport that was reset, the other what asyncio does since Python 3.12.
            # The client takes it for a mistake of its own, and keeps the connection for the next who asks.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            raise RetryableError(f"Redis at {self._shown}: the connection broke: {type(error).__name__}") from None
        return answers

    def _entry(self, record: Any) -> dict[str, Any]:
        if not self._rows:
            return {self._field: payload(record)}
        found = {str(name): payload(value) for name, value in row(record).items() if value is not None}
        if not found:
            raise PermanentError("a record has no fields that are not None, and an entry needs one")
        return found

    def _error(self, error: Exception) -> SinkError:
        known = require("redis.exceptions", "redis")
        where = f"Redis at {self._shown}"
        text = str(error)
        if isinstance(error, BatchQueueError):  # a credential that can't be read
            raise error
        if isinstance(error, known.AuthenticationError | known.NoPermissionError | known.AuthorizationError):
            return AuthError(f"{where} refuses us; check user, password and permissions")
        if isinstance(error, known.TimeoutError | TimeoutError):
            return RetryableError(f"{where} took too long", error_type="timeout")
        names = {kind.__name__ for kind in type(error).__mro__}
        code = text.partition(" ")[0]
        if names & _LATER_CLASSES or code in self._retryable or any(words in text for words in _LATER_TEXTS):
            word = code if code.isupper() else type(error).__name__
            return RetryableError(f"{where} takes no writes now: {word}", error_type="server")
        if names & _ELSEWHERE or code in {"MOVED", "ASK"}:
            raise ConfigError(
                f"{where} is a node of a cluster that has not this stream; give the address of one that has"
            )
        if "unknown command" in text.lower():
            raise ConfigError(
                f"{where} has no XADD: it is a sentinel, or older than 5.0; give the address of a primary"
            )
        if isinstance(error, known.ConnectionError | OSError):
            kind = "refused" if "refused" in text.lower() else "network"
            return RetryableError(f"{where}: the connection broke: {type(error).__name__}", error_type=kind)
        return PermanentError(f"{where} refuses the entry: {type(error).__name__}", error_type="refused")
