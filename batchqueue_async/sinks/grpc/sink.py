"""Batches to any gRPC method that takes one message or a stream of them. Needs `[otlp]`, which brings gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from batchqueue_async.errors import ConfigError, PermanentError, SinkError
from batchqueue_async.sinks._shared.batch_key import batch_key
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks.base import SinkNeeds
from batchqueue_async.sinks.grpc.channel import GrpcChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption
    from batchqueue_async.sinks.base import SendResult


class GrpcSink:
    r"""Makes one call of each batch; delivers at least once.

    The method is that of a generated stub, or its full name with the functions that serialize. It is unary, or takes a
    stream of messages and answers with one. Each call carries `idempotency-key` metadata, the same whenever the same
    records are sent again. A stream carries `message-count` too: to a server, one that was cut off may look like one
    that has ended, and it must not take such a part for the whole.

    Example:
        >>> sink = GrpcSink(
        ...     "http://localhost:50051",
        ...     method="/shop.Orders/Store",
        ...     request=lambda batch: b"\n".join(batch),
        ...     serializer=bytes,
        ... )
        >>> sink
        GrpcSink('localhost:50051', method='/shop.Orders/Store')
    """

    concurrent = True
    needs = SinkNeeds(same_bytes=True)

    def __init__(
        self,
        target: str,
        *,
        method: str | Callable[[Any], Any],
        request: Callable[[Sequence[Any]], Any],
        serializer: Callable[[Any], bytes] | None = None,
        deserializer: Callable[[bytes], Any] | None = None,
        streaming: bool = False,
        judge: Callable[[Any, int], SendResult | None] | None = None,
        headers: Mapping[str, str | Secret] | None = None,
        token: str | Secret | None = None,
        compression: Literal["gzip"] | None = None,
        timeout: float = 10.0,
        tls: TlsOption = None,
        retryable: Iterable[str] = (),
    ) -> None:
        """Say what to call, and how a batch becomes a request.

        Args:
            target: `http://host:port` without TLS, `https://host:port` or `host:port` with it.
            method: `/package.Service/Method`, or a function that returns a stub's method for a channel:
                `lambda channel: OrdersStub(channel).Store`.
            request: makes the request of a batch; with `streaming` all of its messages, as an iterable. It may raise
                `PermanentError`.
            serializer: a message as bytes, where `method` is a name; None takes messages that are bytes.
            deserializer: the answer from bytes, likewise.
            streaming: whether the method takes a stream.
            judge: what an answer says of the records; returns None where all are in, and may raise a `SinkError`.
            headers: metadata of each call; a `Secret` shows nowhere.
            token: a bearer token: `env:NAME`, `file:/path` or the value; read for each call.
            compression: "gzip" compresses the requests.
            timeout: seconds for each call, a connection that has to be made included.
            tls: a `Tls` with certificates; the system's certificates are trusted without.
            retryable: more status codes that may pass, such as "INTERNAL".
        """
        if isinstance(method, str) and method.count("/") != 2:  # noqa: PLR2004 - the name's form
            raise ConfigError(f"gRPC sink: method={method!r} is no full name; give '/package.Service/Method'")
        if not isinstance(method, str) and (serializer is not None or deserializer is not None):
            raise ConfigError("gRPC sink: a stub brings its serializers; leave serializer and deserializer out")
        self._name = method if isinstance(method, str) else "of a stub"
        self._method = method
        self._request = request
        self._serializer = serializer
        self._deserializer = deserializer
        self._streaming = streaming
        self._judge = judge
        self._works = False
        self._channel = GrpcChannel(
            target, headers=headers, token=token, compression=compression, timeout=timeout, tls=tls, retryable=retryable
        )

    def __repr__(self) -> str:
        return f"GrpcSink({self._channel.target!r}, method={self._name!r})"

    async def open(self) -> None:
        """Get ready; the connection is made at the first batch."""
        require("grpc", "otlp")
        self._channel.open()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Make one call of the batch."""
        return await self._send(batch, {})

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult | None:
        """Make one call of the batch, with a key made of the records' keys."""
        return await self._send(batch, {"idempotency-key": batch_key(keys)})

    async def _send(self, batch: Sequence[Any], extra: dict[str, str]) -> SendResult | None:
        made = self._made(batch)
        if self._streaming:
            extra["message-count"] = str(len(made))
            made = iter(made)
        answer = await self._channel.call(self._stub, made, f"call {self._name}", extra)
        return None if self._judge is None else self._judge(answer, len(batch))

    def _made(self, batch: Sequence[Any]) -> Any:
        """The request; a record that `request` fails for is that record's fault once it has worked for another."""
        try:
            made = self._call_request(batch)
        except (SinkError, ConfigError):
            raise
        except Exception as error:
            bad = [place for place, record in enumerate(batch) if self._fails(record)]
            if not bad or not self._works:
                raise  # nobody knows whose fault it is: it is sent again
            raise PermanentError(
                f"gRPC sink, {self._name}: request raised {type(error).__name__} for {len(bad)} of {len(batch)} "
                "records",
                culprits=bad,
            ) from None
        self._works = True
        return made

    def _call_request(self, batch: Sequence[Any]) -> Any:
        made = self._request(batch)
        # All messages at once: an error of a generator would come amid the call, and look like one of the connection.
        return list(made) if self._streaming else made

    def _fails(self, record: Any) -> bool:
        try:
            self._call_request([record])
        except Exception:  # noqa: BLE001 - the user's function
            return True
        self._works = True
        return False

    def _stub(self, channel: Any) -> Any:
        if not isinstance(self._method, str):
            return self._method(channel)
        kind = channel.stream_unary if self._streaming else channel.unary_unary
        return kind(self._method, request_serializer=self._serializer, response_deserializer=self._deserializer)
