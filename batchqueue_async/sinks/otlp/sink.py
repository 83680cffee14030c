"""Spans, log records and metrics over OTLP/gRPC, to the OpenTelemetry Collector or any backend. Needs `[otlp]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, PermanentError, SinkError
from batchqueue_async.sinks.base import SendResult, SinkNeeds
from batchqueue_async.sinks.grpc.channel import GrpcChannel
from batchqueue_async.sinks.otlp.request import SIGNALS, Grouping, SignalName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpStats:
    """What an `OtlpSink` has sent.

    Attributes:
        requests: exports that were answered.
        sent: spans, log records or data points in them.
        rejected: those of them that the server counted as not taken, without saying which.
    """

    requests: int
    sent: int
    rejected: int


class PreparedExport(NamedTuple):
    """A batch that is grouped and serialized.

    Attributes:
        content: the request's bytes.
        places: which records of the batch are in it.
        rejected: the others, by their places, each with its reason.
        weight: how many records it holds, as the server counts.
    """

    content: bytes
    places: Sequence[int]
    rejected: Mapping[int, SinkError]
    weight: int


class OtlpSink:
    """Sends each batch in one export; delivers at least once.

    Records are `Span`, `LogRecord` or `Metric` messages of opentelemetry-proto, serialized ones, or plain mappings; see
    the guide. They are grouped by their resource and scope.

    A server that takes a part of a request says how many it rejected, not which, and must not be sent the request
    again: they are counted in `stats()` and logged; when it took none, all are rejected.

    Example:
        >>> OtlpSink("http://localhost:4317", signal="logs", resource={"service.name": "shop"})
        OtlpSink('localhost:4317', signal='logs')
    """

    concurrent = True
    needs = SinkNeeds()

    def __init__(
        self,
        endpoint: str,
        *,
        signal: SignalName = "traces",
        resource: Mapping[str, Any] | None = None,
        scope: str = "batchqueue_async",
        headers: Mapping[str, str | Secret] | None = None,
        token: str | Secret | None = None,
        compression: Literal["gzip"] | None = None,
        timeout: float = 10.0,
        tls: TlsOption = None,
        retryable: Iterable[str] = (),
    ) -> None:
        """Say where to send, and what.

        Args:
            endpoint: `http://host:4317` without TLS, `https://host:4317` or `host:4317` with it.
            signal: "traces", "metrics" or "logs".
            resource: the attributes of what the records come from, for those that don't say.
            scope: the name of the instrumentation scope, for those that don't say.
            headers: metadata of each call; a `Secret` shows nowhere.
            token: a bearer token: `env:NAME`, `file:/path` or the value; read for each call.
            compression: "gzip" compresses the requests.
            timeout: seconds for each export, a connection that has to be made included.
            tls: a `Tls` with certificates; the system's certificates are trusted without.
            retryable: more status codes that may pass, such as "INTERNAL".
        """
        if signal not in SIGNALS:
            raise ConfigError(f"OTLP sink: signal={signal!r} is unknown; give one of {', '.join(SIGNALS)}")
        self.signal: SignalName = signal
        self.resource = dict(resource or {})
        self.scope = scope
        self._signal = SIGNALS[signal]
        self._channel = GrpcChannel(
            endpoint,
            headers=headers,
            token=token,
            compression=compression,
            timeout=timeout,
            tls=tls,
            retryable=retryable,
        )
        self._requests = self._sent = self._rejected = 0

    def __repr__(self) -> str:
        return f"OtlpSink({self._channel.target!r}, signal={self.signal!r})"

    def stats(self) -> OtlpStats:
        """A snapshot of the counts."""
        return OtlpStats(requests=self._requests, sent=self._sent, rejected=self._rejected)

    async def open(self) -> None:
        """Get ready; the connection is made at the first batch."""
        self._signal.request()  # a missing extra shows here
        self._channel.open()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Send the batch in one export."""
        self._check_open()
        return await self.send_prepared(self.prepare(batch, ()))

    def prepare(self, batch: Sequence[Any], keys: Sequence[str]) -> PreparedExport:  # noqa: ARG002 - OTLP knows no keys
        """Group and serialize the batch; in a thread, where the exporter splits its pipeline."""
        request = Grouping(self._signal, self.resource, self.scope).build(batch)
        content = request.message.SerializeToString() if request.places else b""
        return PreparedExport(content, request.places, request.rejected, request.weight)

    async def send_prepared(self, prepared: PreparedExport) -> SendResult | None:
        """Send what `prepare` made, in one export."""
        self._check_open()
        request = prepared
        if not request.places:
            return SendResult(rejected=request.rejected) if request.rejected else None
        response = await self._channel.call(self._stub, request.content, f"export of {self.signal}", {})
        self._requests += 1
        self._sent += request.weight
        return self._judge(request, getattr(response.partial_success, self._signal.rejected))

    def _check_open(self) -> None:
        if not self._channel.is_open:
            raise RuntimeError(f"OTLP sink to {self._channel.target!r} is not open; call open() first")

    def _stub(self, channel: Any) -> Any:
        return channel.unary_unary(
            self._signal.method,
            request_serializer=None,  # it is in bytes by then
            response_deserializer=self._signal.response().FromString,
        )

    def _judge(self, request: PreparedExport, count: int) -> SendResult | None:
        rejected = dict(request.rejected)
        if count > 0:
            self._rejected += count
            log.warning("otlp_records_rejected", signal=self.signal, rejected=count, sent=request.weight)
            if count >= request.weight:
                none = PermanentError(f"the server at {self._channel.target} took no record of the request")
                rejected |= dict.fromkeys(request.places, none)
        return SendResult(rejected=rejected) if rejected else None
