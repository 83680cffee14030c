"""An entry a record in a Redis stream, a pipeline a batch. Needs `[redis]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from batchqueue_async.errors import AuthError, ConfigError, PermanentError, RetryableError, SinkError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.payloads import payload, verdict
from batchqueue_async.sinks._shared.records import row
from batchqueue_async.sinks._shared.secrets import Secret, redacted, resolve
from batchqueue_async.sinks._shared.tls import Tls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.sinks._shared.tls import TlsOption
    from batchqueue_async.sinks.base import SendResult

# What Redis says while it can't take writes: it starts, is out of memory, its disk fails, it is a replica.
_LATER = ("LOADING", "OOM", "MISCONF", "READONLY", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS")


class RedisSink:
    """Adds each record to a stream with XADD, a batch in one pipeline; delivers at least once.

    Each entry has one field with the record (bytes, text, or JSON), or with `rows=True` the record's own fields; and
    the record's idempotency key in the field `bq-key`, by which a reader tells a repetition.

    Example:
        >>> RedisSink("redis://:s3cret@localhost:6379/0", stream="rows", maxlen=100_000)
        RedisSink('redis://:***@localhost:6379/0', stream='rows')
    """

    concurrent = True

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
        """
        scheme = urlsplit(url).scheme
        if scheme not in {"redis", "rediss", "unix"}:
            raise ConfigError(f"Redis sink: a URL of scheme {scheme!r} is none of ours; give redis:// or rediss://")
        if tls not in {None, False} and scheme != "rediss":
            raise ConfigError(f"Redis sink: {scheme}:// is without TLS, and tls=... is given; give rediss://")
        if tls not in {None, False, True} and not isinstance(tls, Tls):
            raise ConfigError("Redis sink: the client takes no SSL context; give tls=Tls(...)")
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
        self._shown = redacted(url)
        self._user = None if user is None else Secret(user)
        self._password = None if password is None else Secret(password)
        self._tls = tls
        self._client: Any = None

    def __repr__(self) -> str:
        stream = self.stream if isinstance(self.stream, str) else "..."
        return f"RedisSink({self._shown!r}, stream={stream!r})"

    async def open(self) -> None:
        """Get ready; connections are made when they are needed."""
        if self._client is not None:
            return
        retrying = require("redis.asyncio.retry", "redis").Retry
        options: dict[str, Any] = {
            "socket_timeout": self.timeout,
            "socket_connect_timeout": self.connect_timeout,
            "max_connections": self.connections,
            # The exporter repeats; the client would do so with the records of a batch that may be in.
            "retry": retrying(require("redis.backoff", "redis").NoBackoff(), 0),
        }
        if self._user is not None:
            options["username"] = resolve(self._user)
        if self._password is not None:
            options["password"] = resolve(self._password)
        if isinstance(self._tls, Tls):
            options |= _tls_options(self._tls)
        self._client = require("redis.asyncio", "redis").Redis.from_url(self.url, **options)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

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
        except (known.RedisError, OSError) as error:
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
        if isinstance(error, known.AuthenticationError | known.NoPermissionError | known.AuthorizationError):
            return AuthError(f"{where} refuses us; check user, password and permissions")
        if isinstance(error, known.TimeoutError | TimeoutError):
            return RetryableError(f"{where} took too long")
        if isinstance(error, known.ConnectionError | OSError):
            return RetryableError(f"{where}: the connection broke: {type(error).__name__}")
        code = text.partition(" ")[0]
        if isinstance(error, known.BusyLoadingError | known.ReadOnlyError | known.OutOfMemoryError) or code in _LATER:
            return RetryableError(f"{where} takes no writes now: {type(error).__name__}")
        return PermanentError(f"{where} refuses the entry: {type(error).__name__}")


def _tls_options(tls: Tls) -> dict[str, Any]:
    """The same, as the client has it."""
    return {
        "ssl_ca_certs": None if tls.ca is None else str(tls.ca),
        "ssl_certfile": None if tls.cert is None else str(tls.cert),
        "ssl_keyfile": None if tls.key is None else str(tls.key),
        "ssl_password": resolve(tls.key_password),
        "ssl_cert_reqs": "required" if tls.verify else "none",
        "ssl_check_hostname": tls.verify,
    }
