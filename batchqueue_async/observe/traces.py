"""Spans of batches by OpenTelemetry's API: each call of a handler, each send to a destination, each intake batch.

A batch comes from many, so its span is linked to theirs; a single message's span goes on with the trace of its sender.
Nothing that goes wrong in a sampler, processor or propagator reaches the call that it watches: it is logged once.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log, tracing
from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks.base import SendResult

try:
    from opentelemetry import context as contexts
    from opentelemetry import propagate
    from opentelemetry import trace as api
except ImportError as error:  # pragma: no cover - the tests have it
    raise ConfigError(
        "batchqueue_async.observe: trace() needs opentelemetry-api; run: pip install 'batchqueue-async[otel]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
    from contextvars import Token
    from types import TracebackType
    from typing import Self

MOST_LINKS = 128
"""Links of one span: as many as the SDK keeps by default."""

_COUNT = "messaging.batch.message_count"


def trace(tracer_provider: Any = None, *, skip: Collection[str] = ()) -> Traces:
    """Trace the batches of all queues, exporters and consumers that are set up from now on.

    Call it before they are made: what was made before is not traced, and costs what it did.

    Args:
        tracer_provider: an OpenTelemetry tracer provider; the process's own when None.
        skip: names of queues, exporters and consumers that are left out, such as those that carry spans themselves.

    Returns:
        The tracing, which `stop()` ends.

    Raises:
        ConfigError: the process is being traced already, or `skip` is a text.

    Example:
        >>> from opentelemetry.sdk.trace import TracerProvider
        >>> traces = trace(TracerProvider(), skip={"spans"})
        >>> traces.stop()
    """
    if isinstance(skip, str):
        raise ConfigError(f"observe.trace: skip={skip!r} is a text; give a set of names, such as {{{skip!r}}}")
    if tracing.active is not None:
        raise ConfigError("observe.trace: this process is being traced already; call stop() of what trace() returned")
    provider: Any = api.get_tracer_provider() if tracer_provider is None else tracer_provider
    traces = Traces(provider.get_tracer("batchqueue_async"), frozenset(skip))
    tracing.active = traces
    return traces


class Traces:
    """The tracing of one process; made by `trace`.

    Example:
        >>> from opentelemetry.sdk.trace import TracerProvider
        >>> traces = trace(TracerProvider())
        >>> traces.stop()
    """

    def __init__(self, tracer: Any, skip: frozenset[str]) -> None:
        self._tracer = tracer
        self._skip = skip
        self._stopped = False
        self._complained = False

    def stop(self) -> None:
        """Make no more spans; calls go on as they are. May be called twice."""
        self._stopped = True
        if tracing.active is self:
            tracing.active = None

    # -- what is traced ----------------------------------------------------------------------------------------------

    def handler(
        self, queue: str, handler: str, call: Callable[[list[Any]], Awaitable[Any]], /
    ) -> Callable[[list[Any]], Awaitable[Any]]:
        """A queue's handler, with a span for each batch."""
        if queue in self._skip:
            return call
        attributes = {"batchqueue.queue": queue, "batchqueue.handler": handler}

        async def traced(items: list[Any]) -> Any:
            with _Span(self, f"process {queue}", api.SpanKind.INTERNAL, {**attributes, _COUNT: len(items)}):
                return await call(items)

        return traced

    def message(self, consumer: str, call: Callable[[Any], Awaitable[Any]], /) -> Callable[[Any], Awaitable[Any]]:
        """A consumer's handler of single messages, with a span for each, in the trace of its sender."""
        if consumer in self._skip:
            return call

        async def traced(message: Any) -> Any:
            with self._received(consumer, (message,)) as span:
                return span.noted(await call(message))

        return traced

    def messages(
        self, consumer: str, call: Callable[[Sequence[Any]], Awaitable[Any]], /
    ) -> Callable[[Sequence[Any]], Awaitable[Any]]:
        """A consumer's handler of batches, with a span for each, linked to the spans of the senders."""
        if consumer in self._skip:
            return call

        async def traced(batch: Sequence[Any]) -> Any:
            with self._received(consumer, batch) as span:
                return span.noted(await call(batch))

        return traced

    def sends(
        self, exporter: str, sink: str, /
    ) -> Callable[[Callable[[], Awaitable[Any]], int, int], Awaitable[Any]] | None:
        """What makes an exporter's sends, with a span for each: of the call, its records and the attempt's number."""
        if exporter in self._skip:
            return None
        attributes = {"batchqueue.exporter": exporter, "batchqueue.sink": sink}

        async def traced(call: Callable[[], Awaitable[Any]], records: int, attempt: int) -> Any:
            own = {_COUNT: records, "batchqueue.attempt": attempt}
            with _Span(self, f"send {exporter}", api.SpanKind.CLIENT, {**attributes, **own}) as span:
                return span.noted(await call())

        return traced

    def headers(self) -> dict[str, str]:
        """The headers that carry the trace of the running task to a destination."""
        carried: dict[str, str] = {}
        try:
            propagate.inject(carried)
        except Exception as error:  # noqa: BLE001 - a propagator may be anybody's
            self.complain(error)
            return {}
        return carried

    # -- what the spans are made of ----------------------------------------------------------------------------------

    def _received(self, consumer: str, batch: Sequence[Any]) -> _Span:
        attributes: dict[str, Any] = {
            "batchqueue.consumer": consumer,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": batch[0].source,
            _COUNT: len(batch),
        }
        return _Span(self, f"process {batch[0].source}", api.SpanKind.CONSUMER, attributes, batch)

    def start(self, name: str, kind: Any, attributes: Mapping[str, Any], batch: Sequence[Any]) -> tuple[Any, Any]:
        """A span, and the context that it is current in; None for both where there is none.

        Never a child of what happens to be current: a drain task has the context of whoever made the queue.
        """
        if self._stopped:
            return None, None
        try:
            parent = contexts.Context()
            links: tuple[api.Link, ...] = ()
            if len(batch) == 1:
                parent = self._context_of(batch[0])
            elif batch:
                links = tuple(islice(self._links(batch), MOST_LINKS))
            span: Any = self._tracer.start_span(name, parent, kind, attributes, links)
            return span, api.set_span_in_context(span, parent)
        except Exception as error:  # noqa: BLE001 - samplers and processors may be anybody's
            self.complain(error)
            return None, None

    def _links(self, batch: Sequence[Any]) -> Iterator[api.Link]:
        """A link to each sender's span; messages of one span share it."""
        seen: set[tuple[int, int]] = set()
        for message in batch:
            sender = api.get_current_span(self._context_of(message)).get_span_context()
            identity = (sender.trace_id, sender.span_id)
            if sender.is_valid and identity not in seen:
                seen.add(identity)
                yield api.Link(sender)

    def _context_of(self, message: Any) -> contexts.Context:
        """The context that a message's headers carry; an empty one where they carry none that can be read."""
        empty = contexts.Context()
        headers: Mapping[str, str] = message.headers
        if not headers:
            return empty
        try:
            return propagate.extract(headers, empty)
        except Exception as error:  # noqa: BLE001 - the headers are a sender's, and the propagator may be anybody's
            self.complain(error)
            return empty

    def complain(self, error: Exception) -> None:
        """Log the first time that tracing itself fails."""
        if not self._complained:
            self._complained = True
            log.warning("trace_failed", **log.describe(error))


class _Span:
    """One call's span, current while the call runs."""

    __slots__ = ("_context", "_records", "_span", "_start", "_token", "_traces")

    def __init__(
        self, traces: Traces, name: str, kind: Any, attributes: Mapping[str, Any], batch: Sequence[Any] = ()
    ) -> None:
        self._traces = traces
        self._start = (name, kind, attributes, batch)
        self._records: int = attributes[_COUNT]
        self._span: Any = None
        self._context: contexts.Context | None = None
        self._token: Token[contexts.Context] | None = None

    def __enter__(self) -> Self:
        self._span, self._context = self._traces.start(*self._start)
        if self._context is not None:
            self._token = contexts.attach(self._context)
        return self

    def noted(self, answer: Any) -> Any:
        """The same answer, once the span says what it rejects."""
        rejected = _rejected(answer)
        if rejected and self._span is not None:
            try:
                self._span.set_attribute("batchqueue.rejected", len(rejected))
                if len(rejected) >= self._records:
                    self._failed(next(iter(rejected.values())))
            except Exception as error:  # noqa: BLE001 - the span is the SDK's, and the answer may be anybody's
                self._traces.complain(error)
        return answer

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: TracebackType | None) -> None:
        # A coroutine that is closed by somebody else ends in another context, which has nothing of ours.
        if self._token is not None and contexts.get_current() is self._context:
            contexts.detach(self._token)
        if self._span is None:
            return
        try:
            if raised is not None:
                self._failed(raised)
            self._span.end()
        except Exception as error:  # noqa: BLE001 - a processor may be anybody's
            self._traces.complain(error)

    def _failed(self, error: object) -> None:
        """The class of an error alone: its text may quote a payload."""
        self._span.set_attribute("error.type", type(error).__qualname__)
        self._span.set_status(api.StatusCode.ERROR)


def _rejected(answer: object) -> Mapping[Any, Any]:
    found: object = answer.rejected if isinstance(answer, SendResult) else answer
    return found if isinstance(found, Mapping) else {}  # pyright: ignore[reportUnknownVariableType]
