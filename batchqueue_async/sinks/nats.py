"""A message a record to a NATS JetStream stream, each acknowledged. Needs `[nats]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from batchqueue_async.errors import AuthError, ConfigError, PermanentError, RetryableError, SinkError, TooLargeError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.messages import MessageSink
from batchqueue_async.sinks._shared.nats_client import NatsServers

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption

_SERVER_ERRORS = 500


class _Line(NamedTuple):
    client: Any
    stream: Any


class NatsSink(MessageSink[_Line]):
    """Publishes each record as a message, and returns when JetStream has stored all.

    Delivers at least once; with keys exactly once within the stream's `duplicate_window`, as each message carries its
    record's key as `Nats-Msg-Id`. What the stream had already is counted in `SendResult.skipped`.

    Example:
        >>> NatsSink("nats://shop:s3cret@localhost:4222", subject="rows.new")
        NatsSink('nats://shop:***@localhost:4222', subject='rows.new')
    """

    client = ("nats", "nats")

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        subject: str | Callable[[Any], str],
        stream: str | None = None,
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        token: str | Secret | None = None,
        credentials: str | os.PathLike[str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 10.0,
        connect_timeout: float = 5.0,
        tls: TlsOption = None,
        retryable: Iterable[int] = (),
    ) -> None:
        """Say where to publish, and how.

        Args:
            url: `nats://host:port`, or `tls://`; several for a cluster.
            subject: the subject, or a function that gives it for a record; a stream has to take it.
            stream: the stream that has to take it; None takes any.
            user: `env:NAME`, `file:/path` or the value.
            password: likewise.
            token: likewise.
            credentials: a file with a JWT and its seed.
            headers: those of each message.
            timeout: seconds for the acknowledgements of a batch.
            connect_timeout: seconds to connect.
            tls: True, a `Tls` or an SSL context; None is TLS where the URL or the server says so, verified.
            retryable: more of JetStream's error codes that may pass; those of a server error always may.
        """
        self._servers = NatsServers(
            "NATS sink",
            url,
            user=user,
            password=password,
            token=token,
            credentials=credentials,
            tls=tls,
            connect_timeout=connect_timeout,
        )
        self.urls = self._servers.urls
        if timeout <= 0 or connect_timeout <= 0:
            raise ConfigError(f"NATS sink: timeout={timeout}, connect_timeout={connect_timeout}; give seconds above 0")
        super().__init__()
        self.subject = subject
        self.stream = stream
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self._shown = self._servers.shown
        self._headers = dict(headers or {})
        self._retryable = frozenset(retryable)

    def __repr__(self) -> str:
        subject = self.subject if isinstance(self.subject, str) else "..."
        return f"NatsSink({self._shown!r}, subject={subject!r})"

    async def _publish(self, line: _Line, record: Any, body: bytes, key: str | None, traced: Mapping[str, str]) -> bool:
        subject = self.subject(record) if callable(self.subject) else self.subject
        headers = {**traced, **self._headers}
        if key is not None:
            headers["Nats-Msg-Id"] = key
        answer = await line.stream.publish(
            subject, body, timeout=self.timeout, stream=self.stream, headers=headers or None
        )
        return bool(answer.duplicate)

    def _is_broken(self, line: _Line) -> bool:
        return not line.client.is_connected

    async def _connect(self) -> _Line:
        client = await self._servers.connect()
        return _Line(client, client.jetstream(timeout=self.timeout))

    @staticmethod
    async def _disconnect(line: _Line) -> None:
        await line.client.close()

    def _error(self, error: Exception, line: _Line | None) -> SinkError:
        """What an error of the client means; a broken line is dropped."""
        known = require("nats.errors", "nats")
        stream = require("nats.js.errors", "nats")
        where = f"NATS at {self._shown}"
        if isinstance(error, ConfigError):
            raise error
        if isinstance(error, known.MaxPayloadError):
            return TooLargeError(f"{where} takes no message of that size")
        if isinstance(error, known.BadSubjectError | ValueError):
            return PermanentError(f"{where}: a record's subject or headers can't be used")
        if isinstance(error, known.NoRespondersError | stream.NoStreamResponseError):
            return RetryableError(f"{where}: no stream takes the subject, or it has no leader; make one that does")
        if isinstance(error, stream.APIError):
            answer: Any = error
            said = f"{where} answered with the error {answer.err_code}"
            status: int = answer.code or _SERVER_ERRORS
            if status >= _SERVER_ERRORS or answer.err_code in self._retryable:
                return RetryableError(said, error_type="server")
            return PermanentError(said, error_type="refused")
        self._drop(line)
        if isinstance(error, known.AuthorizationError) or "authorization" in str(error).lower():
            return AuthError(f"{where} refuses us; check user, password, token or credentials")
        late = isinstance(error, TimeoutError)
        what = "took too long" if late else f"the connection broke: {type(error).__name__}"
        return RetryableError(f"{where}: {what}", error_type="timeout" if late else "network")
