"""A gRPC channel as sinks use it: quick to come back after an outage, and replaced when it may be dead."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchqueue_async._support import tracing
from batchqueue_async.errors import ConfigError, RetryableError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import Secret, header_value, resolve
from batchqueue_async.sinks._shared.tls import Tls
from batchqueue_async.sinks.grpc.status import error_for, retry_delay

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from batchqueue_async.sinks._shared.tls import TlsOption

# One channel, one connection: gRPC shares connections between the channels of a process, so that a new channel would
# get the dead connection of the old one. The retries and the backoff are the exporter's: gRPC's go up to two minutes.
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_send_message_length", -1),
]


def endpoint(address: str, tls: TlsOption) -> tuple[str, Tls | None]:
    """A target for gRPC, and its TLS: `http://` is plain, `https://` and no scheme are encrypted.

    Example:
        >>> endpoint("http://localhost:4317", None)
        ('localhost:4317', None)
        >>> endpoint("collector:4317", None)[1]
        Tls(ca=None, cert=None, key=None, key_password=None, verify=True, server_name=None)
    """
    scheme, separator, target = address.rpartition("://")
    target = target.rstrip("/")
    if separator and scheme not in {"http", "https"}:
        raise ConfigError(f"gRPC endpoint: scheme {scheme!r} is none of ours; give http://, https:// or host:port")
    if not target or "/" in target or "@" in target:
        raise ConfigError("gRPC endpoint: there is more or less than a host and port; give 'host:port'")
    if scheme == "http":
        if tls not in {None, False}:
            raise ConfigError("gRPC endpoint: http:// is without TLS, and tls=... is given; give https://")
        return target, None
    if tls is None or tls is True:
        return target, Tls()
    if not isinstance(tls, Tls):
        raise ConfigError(
            "gRPC endpoint: gRPC takes no SSL context, and TLS is turned off by http://; give tls=Tls(...)"
        )
    if not tls.verify:
        raise ConfigError("gRPC endpoint: gRPC always verifies; give Tls(ca=...) with the server's certificate")
    if tls.key_password is not None:
        raise ConfigError("gRPC endpoint: gRPC takes no encrypted key; give Tls(key=...) one without a password")
    return target, tls


class GrpcChannel:
    """A channel that is renewed when a call runs out of time, as its connection may be dead without knowing it.

    Keepalive would find that out as well, but servers answer pings more often than each five minutes with a GOAWAY.
    """

    def __init__(
        self,
        address: str,
        *,
        headers: Mapping[str, str | Secret] | None,
        token: str | Secret | None,
        compression: Literal["gzip"] | None,
        timeout: float,
        tls: TlsOption,
        retryable: Iterable[str] = (),
    ) -> None:
        if compression not in {None, "gzip"}:
            raise ConfigError(f"gRPC sink: compression={compression!r} is unknown; give 'gzip' or None")
        if timeout <= 0:
            raise ConfigError(f"gRPC sink: timeout={timeout} is not above 0; give seconds above it")
        self.target, self._tls = endpoint(address, tls)
        self.timeout = timeout
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        self._token = None if token is None else Secret(token)
        self._compression = compression
        self._channel: Any = None
        self.retryable = frozenset(code.upper() for code in retryable)
        self._calls: dict[Any, Any] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        """Whether there is a channel."""
        return self._channel is not None

    def open(self) -> None:
        """Make the channel; it connects at the first call."""
        if self._channel is None:
            self._renew()

    async def call(self, make: Callable[[Any], Any], request: Any, what: str, extra: Mapping[str, str]) -> Any:
        """Make a call; `make` gives the callable for a channel, and is asked once for each.

        Raises:
            SinkError: it failed; which kind, the status says.
        """
        if self._channel is None:
            raise RuntimeError(f"the gRPC sink to {self.target!r} is not open; call open() first")
        grpc = require("grpc", "otlp")
        channel = self._channel
        if make not in self._calls:
            self._calls[make] = make(channel)
        try:
            return await self._calls[make](request, timeout=self.timeout, metadata=self._metadata(extra))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and channel is self._channel:
                self._renew()
            wait = retry_delay(error.trailing_metadata())
            details: str = error.details() or ""
            what = f"{what} at {self.target}"
            raise error_for(error.code().name, what, details=details, wait=wait, retryable=self.retryable) from None
        except grpc.aio.UsageError:  # the channel was closed meanwhile
            raise RetryableError(f"{what} at {self.target}: the sink was closed") from None

    async def close(self) -> None:
        """Close the channel, and those that were replaced."""
        channel, self._channel = self._channel, None
        self._calls.clear()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        if channel is not None:
            await channel.close()

    def _renew(self) -> None:
        old = self._channel
        self._calls.clear()
        self._channel = self._make()
        if old is not None:
            # Calls that are under way on it end by themselves within the timeout.
            task = asyncio.get_running_loop().create_task(old.close(self.timeout), name="grpc-channel-closing")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _make(self) -> Any:
        grpc = require("grpc", "otlp")
        compression = grpc.Compression.Gzip if self._compression == "gzip" else grpc.Compression.NoCompression
        if self._tls is None:
            return grpc.aio.insecure_channel(self.target, options=_OPTIONS, compression=compression)
        options: list[tuple[str, Any]] = list(_OPTIONS)
        if self._tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        key = self._tls.key if self._tls.key is not None else self._tls.cert
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_file(self._tls.ca) or _system_certificates(),
            private_key=_file(key),
            certificate_chain=_file(self._tls.cert),
        )
        return grpc.aio.secure_channel(self.target, credentials, options=options, compression=compression)

    def _metadata(self, extra: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        headers = tracing.headers((*self._headers, *extra)) | {
            name: resolve(value) if isinstance(value, Secret) else value for name, value in self._headers.items()
        }
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token.reveal()}"
        return tuple((name, header_value(name, value)) for name, value in (headers | dict(extra)).items())


def _file(path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS: {str(path)!r} cannot be read: {error.strerror}") from None


def _system_certificates() -> bytes | None:
    """The certificates that this machine trusts; gRPC brings its own list, which knows nothing of a company's."""
    path = ssl.get_default_verify_paths().cafile
    return Path(path).read_bytes() if path and Path(path).is_file() else None
