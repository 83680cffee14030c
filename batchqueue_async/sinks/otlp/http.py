"""Spans, log records and metrics over OTLP/HTTP, as protobuf. Needs `[http]` and `[otlp]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, PermanentError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks.base import SendResult, SinkNeeds
from batchqueue_async.sinks.http.formats import Body
from batchqueue_async.sinks.http.sink import HttpSink
from batchqueue_async.sinks.otlp.request import SIGNALS, Grouping, Signal, SignalName
from batchqueue_async.sinks.otlp.sink import OtlpStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption
    from batchqueue_async.sinks.http.transport import HttpAnswer, OAuth2


@dataclass(frozen=True, kw_only=True)
class OtlpBody:
    """One export as the body of a request."""

    signal: Signal
    resource: Mapping[str, Any]
    scope: str
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/x-protobuf"})
    compressed: bool = False
    needs: SinkNeeds = field(default_factory=SinkNeeds)  # OTLP has no key for a request

    def encode(self, batch: Sequence[Any], keys: Sequence[str] | None) -> Body:  # noqa: ARG002
        """Write the batch; keys have no place in it."""
        request = Grouping(self.signal, self.resource, self.scope).build(batch)
        return Body(request.message.SerializeToString(), request.places, request.rejected)


class OtlpHttpSink(HttpSink):
    """Sends each batch in one export over HTTP; delivers at least once.

    Records, grouping and partial successes are those of `OtlpSink`; statuses, credentials, proxies and compression are
    those of `HttpSink`. Where the specification retries 429, 502, 503 and 504 alone, this sink retries all of 5xx: an
    error of the server says nothing of the records.

    Example:
        >>> OtlpHttpSink("http://localhost:4318", signal="logs")
        OtlpHttpSink('http://localhost:4318/v1/logs')
    """

    def __init__(
        self,
        endpoint: str,
        *,
        signal: SignalName = "traces",
        resource: Mapping[str, Any] | None = None,
        scope: str = "batchqueue_async",
        headers: Mapping[str, str | Secret] | None = None,
        token: str | Secret | None = None,
        oauth2: OAuth2 | None = None,
        compression: Literal["gzip", "zstd"] | None = None,
        timeout: float = 10.0,
        connect_timeout: float = 5.0,
        connections: int = 100,
        tls: TlsOption = None,
        proxy: str | Secret | None = None,
        retryable: Iterable[int] = (),
    ) -> None:
        """Say where to send, and what.

        Args:
            endpoint: `http://host:4318` or `https://...`, to which the signal's path is added; or the whole URL.
            signal: "traces", "metrics" or "logs".
            resource: the attributes of what the records come from, for those that don't say.
            scope: the name of the instrumentation scope, for those that don't say.
            headers: more header fields; a `Secret` shows nowhere.
            token: a bearer token: `env:NAME`, `file:/path` or the value; read for each request.
            oauth2: an `OAuth2` that gets bearer tokens, instead of a token.
            compression: "gzip" or "zstd" compresses the requests.
            timeout: seconds for each export.
            connect_timeout: seconds to get a connection.
            connections: how many there may be at once.
            tls: for `https`: a `Tls` with certificates; the system's certificates are trusted without.
            proxy: the URL of a proxy, or a reference to it.
            retryable: more statuses that may pass.
        """
        if signal not in SIGNALS:
            raise ConfigError(f"OTLP sink: signal={signal!r} is unknown; give one of {', '.join(SIGNALS)}")
        self.signal: SignalName = signal
        self._signal = SIGNALS[signal]
        self._requests = self._sent = self._rejected = 0
        path = f"/v1/{signal}"
        url = endpoint if urlsplit(endpoint).path.rstrip("/") else endpoint.rstrip("/") + path
        super().__init__(
            url,
            format=OtlpBody(signal=self._signal, resource=dict(resource or {}), scope=scope),
            headers=headers,
            token=token,
            oauth2=oauth2,
            compression=compression,
            timeout=timeout,
            connect_timeout=connect_timeout,
            connections=connections,
            tls=tls,
            proxy=proxy,
            retryable=retryable,
            idempotency_header=None,
            judge=self._partial,
        )

    def __repr__(self) -> str:
        return f"OtlpHttpSink({self.shown!r})"

    def stats(self) -> OtlpStats:
        """A snapshot of the counts."""
        return OtlpStats(requests=self._requests, sent=self._sent, rejected=self._rejected)

    async def open(self) -> None:
        """Get ready; the connection is made at the first batch."""
        self._signal.request()  # a missing extra shows here
        await super().open()

    def _partial(self, answer: HttpAnswer, count: int) -> SendResult | None:
        broken: type[Exception] = require("google.protobuf.message", "otlp").DecodeError
        try:
            found = self._signal.response().FromString(answer.body)
        except broken:
            raise PermanentError(f"{self.shown} answered with no export response; check the endpoint") from None
        self._requests += 1
        self._sent += count
        rejected: int = getattr(found.partial_success, self._signal.rejected)
        if rejected <= 0:
            return None
        self._rejected += rejected
        log.warning("otlp_records_rejected", signal=self.signal, rejected=rejected, sent=count)
        if rejected < count:
            return None
        none = PermanentError(f"the server at {self.shown} took no record of the request", error_type="refused")
        return SendResult(rejected=dict.fromkeys(range(count), none))
