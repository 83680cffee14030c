"""Spans of batches: what is in them, what they are linked to, what goes with a request, and what may break."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from itertools import count

import pytest
from export_kit import Destination
from kafka_tools import create, read
from opentelemetry import context as contexts
from opentelemetry import propagate
from opentelemetry import trace as api
from opentelemetry.baggage import set_baggage
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

import batchqueue_async as bq
from batchqueue_async import observe
from batchqueue_async._support import tracing
from batchqueue_async.intake import DROP, KafkaConsumer
from batchqueue_async.observe.traces import MOST_LINKS
from batchqueue_async.sinks.amqp import AmqpSink
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.sinks.grpc import GrpcSink
from batchqueue_async.sinks.http import HttpSink
from batchqueue_async.sinks.kafka import KafkaSink
from batchqueue_async.sinks.kafka.messages import Encoder
from batchqueue_async.sinks.nats import NatsSink
from batchqueue_async.sinks.otlp import OtlpSink
from batchqueue_async.sinks.otlp.request import SIGNALS
from batchqueue_async.testing import FakeBroker

names = count()


@pytest.fixture
def started():
    """Starts a tracing that ends with the test."""
    made = []

    def start(*arguments, **options):
        made.append(observe.trace(*arguments, **options))
        return made[-1]

    yield start
    for traces in made:
        traces.stop()
    assert tracing.active is None


@pytest.fixture
def memory():
    return InMemorySpanExporter()


@pytest.fixture
def provider(memory):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return provider


@pytest.fixture
def spans(started, provider, memory):
    started(provider)
    return memory.get_finished_spans


def sender(number):
    return f"00-{number:032x}-{number:016x}-01"


def carried(span):
    """The header that goes with a request which is made in a span."""
    found = span.get_span_context()
    return f"00-{format_trace_id(found.trace_id)}-{format_span_id(found.span_id)}-{found.trace_flags:02x}"


async def handled(items, handler, **options):
    """What a queue makes of items, in batches of at most three; no context is left in it."""
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("rows", bq.QueueConfig(consumer=handler, max_batch=3, **options))
        await queue.produce_many(items)
        await queue.flush()
        return queue.stats()


async def consumed(broker, handler, **options):
    async with broker.consumer(handler, name="orders", **options) as consumer:
        await broker.drained()
    return consumer.stats()


# --- handlers


@pytest.mark.every_loop
async def test_a_span_for_each_call_of_a_handler(spans):
    current = []

    async def handle(batch):
        current.append(api.get_current_span().get_span_context().span_id)
        await asyncio.sleep(0.001)
        current.append(api.get_current_span().get_span_context().span_id)

    await handled(range(5), handle)
    found = spans()
    assert [span.name for span in found] == ["process rows"] * 2
    assert [span.attributes["messaging.batch.message_count"] for span in found] == [3, 2]
    assert {span.kind for span in found} == {SpanKind.INTERNAL}
    assert dict(found[0].attributes) == {
        "batchqueue.queue": "rows",
        "batchqueue.handler": "consumer",
        "messaging.batch.message_count": 3,
    }
    assert current == [span.context.span_id for span in found for _ in range(2)]
    assert {span.status.status_code for span in found} == {StatusCode.UNSET}
    assert contexts.get_current() == {}


async def test_a_handler_links_its_span_to_the_producers_that_its_items_carry(spans, provider):
    async def handle(batch):
        for sender in batch:
            api.get_current_span().add_link(sender)

    tracer = provider.get_tracer("producer")
    senders = []
    for name in ("one", "two"):
        with tracer.start_as_current_span(name):
            senders.append(api.get_current_span().get_span_context())
    await handled(senders, handle)
    (found,) = [span for span in spans() if span.name == "process rows"]
    assert [link.context for link in found.links] == senders


async def test_handlers_by_type_have_their_own(spans):
    async def handle(batch):
        pass

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("rows", bq.QueueConfig(fallback=handle))
        queue.add_handler(int, handle)
        await queue.produce_many([1, "a"])
        await queue.flush()
        queue.add_handler(int, handle, max_batch=1)
        await queue.produce_many([2, 3])
        await queue.flush()
    found = spans()
    assert sorted(span.attributes["batchqueue.handler"] for span in found) == ["fallback", "int", "int", "int"]
    assert {span.name for span in found} == {"process rows"}


async def test_a_batch_is_no_child_of_whoever_made_its_queue(spans, provider):
    async def handle(batch):
        pass

    with provider.get_tracer("test").start_as_current_span("request"):
        await handled([1], handle)
    batch, request = spans()
    assert (batch.parent, request.name) == (None, "request")
    assert batch.context.trace_id != request.context.trace_id


async def test_an_error_is_told_by_its_class_alone(spans):
    async def handle(batch):
        raise ValueError(f"secret {batch}")

    stats = await handled(["payload"], handle)
    (span,) = spans()
    assert stats.failed == 1
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert span.attributes["error.type"] == "ValueError"
    assert "payload" not in span.to_json()
    assert span.events == ()


async def test_a_call_that_is_cut_off_ends_its_span(spans):
    async def handle(batch):
        await asyncio.sleep(60.0)

    assert (await handled([1], handle, handler_timeout=0.5)).failed == 1
    (span,) = spans()
    assert span.attributes["error.type"] == "CancelledError"


async def test_an_abandoned_call_ends_its_span_and_leaves_no_context(spans):
    started = asyncio.Event()

    async def handle(batch):
        started.set()
        await asyncio.sleep(60.0)

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("rows", bq.QueueConfig(consumer=handle))
        await queue.produce(1)
        await started.wait()
        await queue.shutdown(timeout=0.1)
    (span,) = spans()
    assert span.attributes["error.type"] == "CancelledError"
    assert contexts.get_current() == {}


async def test_a_call_leaves_the_context_that_it_met(spans):
    async def call(batch):
        assert contexts.get_current() != before

    before = contexts.get_current()
    await tracing.active.handler("rows", "consumer", call)([1])
    assert contexts.get_current() is before or contexts.get_current() == before == {}
    assert len(spans()) == 1


async def test_a_coroutine_that_is_closed_elsewhere_ends_its_span_without_a_word(spans, caplog):
    async def call(batch):
        await asyncio.sleep(60.0)

    coroutine = tracing.active.handler("rows", "consumer", call)([1])

    async def begin():
        coroutine.send(None)

    await asyncio.create_task(begin())  # in a context of its own
    coroutine.close()
    (span,) = spans()
    assert span.attributes["error.type"] == "GeneratorExit"
    assert caplog.records == []


# --- exporters


async def test_a_span_for_each_send(spans, tmp_path):
    answers = [bq.RetryableError("down: payload"), None]
    destination = Destination(answer=lambda batch: answers.pop(0))
    async with bq.Exporter(destination, bq.ExportConfig(path=tmp_path / "e"), name="lake") as exporter:
        await exporter.consume([b"payload", b"b"])
        await exporter.flush()
    failed, done = spans()
    assert (failed.name, failed.kind, failed.parent) == ("send lake", SpanKind.CLIENT, None)
    assert dict(done.attributes) == {
        "batchqueue.exporter": "lake",
        "batchqueue.sink": "Destination",
        "batchqueue.attempt": 2,
        "messaging.batch.message_count": 2,
    }
    assert (failed.attributes["batchqueue.attempt"], failed.attributes["error.type"]) == (1, "RetryableError")
    assert (failed.status.status_code, done.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert "payload" not in failed.to_json()


class Hanging(Destination):
    """Takes for ever, the first time."""

    hangs = True

    async def send(self, batch):
        if self.hangs:
            self.hangs = False
            await asyncio.sleep(3600.0)


async def test_a_send_that_took_too_long_says_so(spans):
    async with bq.Exporter(Hanging(), bq.ExportConfig(send_timeout=5.0)) as exporter:
        await exporter.deliver([b"a"])
    assert [span.attributes.get("error.type") for span in spans()] == ["TimeoutError", None]


async def test_records_that_were_rejected_are_counted(spans):
    class Choosy(Destination):
        async def send(self, batch):
            return SendResult(
                rejected={at: bq.PermanentError(f"no {each}") for at, each in enumerate(batch) if each == b"spoilt"}
            )

    async with bq.Exporter(Choosy(), bq.ExportConfig()) as exporter:
        await exporter.consume([b"spoilt", b"good"])
        await exporter.flush()
        await exporter.consume([b"spoilt"])
        await exporter.flush()
    some, all_ = spans()
    assert (some.attributes["batchqueue.rejected"], some.status.status_code) == (1, StatusCode.UNSET)
    assert (all_.attributes["error.type"], all_.status.status_code) == ("PermanentError", StatusCode.ERROR)
    assert "spoilt" not in all_.to_json()


# --- consumers


@pytest.mark.parametrize("kind", ["amqp", "kafka", "nats", "redis"])
async def test_a_batch_is_linked_to_the_spans_of_its_senders(spans, kind):
    broker = FakeBroker(kind)
    for number in (1, 1, 2):
        broker.publish(b"x", headers={"traceparent": sender(number)})
    broker.publish(b"nobody's")
    broker.publish(b"broken", headers={"traceparent": "00-zz-zz-01"})

    async def handle(batch):
        await asyncio.sleep(0)

    await consumed(broker, handle, batch=bq.BatchPolicy(max_records=100, linger=1.0))
    (span,) = spans()
    assert [link.context.trace_id for link in span.links] == [1, 2]
    assert (span.name, span.kind, span.parent) == ("process fake", SpanKind.CONSUMER, None)
    assert dict(span.attributes) == {
        "batchqueue.consumer": "orders",
        "messaging.batch.message_count": 5,
        "messaging.destination.name": "fake",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
    }


async def test_a_single_message_goes_on_with_the_trace_of_its_sender(spans):
    broker = FakeBroker()
    broker.publish(b"x", headers={"traceparent": sender(7)})
    inside = []

    async def handle(message):
        inside.append(tracing.headers()["traceparent"])

    await consumed(broker, handle)
    (span,) = spans()
    assert (span.context.trace_id, span.parent.span_id, span.parent.is_remote) == (7, 7, True)
    assert inside == [carried(span)]
    assert span.links == ()


async def test_links_have_a_bound(started, memory):
    provider = TracerProvider(span_limits=SpanLimits(max_links=1_000), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    started(provider)
    broker = FakeBroker()
    for number in range(1, MOST_LINKS + 10):
        broker.publish(b"x", headers={"traceparent": sender(number)})

    async def handle(batch):
        pass

    await consumed(broker, handle, batch=bq.BatchPolicy(max_records=1000, linger=1.0), prefetch=1000)
    (span,) = memory.get_finished_spans()
    assert len(span.links) == MOST_LINKS


async def test_messages_that_a_handler_rejects_are_counted(spans):
    broker = FakeBroker()
    broker.publish(b"bad", b"good")

    async def handle(batch):
        bad = [at for at, each in enumerate(batch) if each.body == b"bad"]
        return SendResult(rejected={at: bq.PermanentError("no") for at in bad})

    stats = await consumed(broker, handle, batch=bq.BatchPolicy(max_records=2, linger=1.0))
    assert (stats.acked, stats.dead_lettered) == (1, 1)
    assert [span.attributes.get("batchqueue.rejected") for span in spans()] == [1]


async def test_a_message_whose_handler_fails_has_its_outcome_and_its_span(spans):
    broker = FakeBroker()
    broker.publish(b"x", headers={"traceparent": sender(3)})

    async def handle(message):
        raise bq.PermanentError("payload")

    assert (await consumed(broker, handle)).dead_lettered == 1
    (span,) = spans()
    assert (span.attributes["error.type"], span.parent.span_id) == ("PermanentError", 3)


# --- what goes with a request


async def in_span(provider, sink, batch):
    """Send in a span; what its header is."""
    await sink.open()
    try:
        with provider.get_tracer("test").start_as_current_span("outer") as span:
            await sink.send_keyed(batch, [str(at) for at in range(len(batch))])
    finally:
        await sink.close()
    return carried(span)


@pytest.mark.real_time(one_loop=True)
async def test_the_trace_goes_with_http_requests(spans, http_server):
    async with bq.Exporter(HttpSink(http_server.url), bq.ExportConfig(), name="web") as exporter:
        await exporter.deliver([{"a": 1}])
    (request,) = http_server.received()
    assert request.headers["traceparent"] == carried(spans()[0])


@pytest.mark.real_time(one_loop=True)
async def test_a_header_of_the_users_own_wins(spans, provider, http_server):
    sink = HttpSink(http_server.url, headers={"Traceparent": sender(5)})
    await in_span(provider, sink, [{"a": 1}])
    (request,) = http_server.received()
    assert request.headers["traceparent"] == sender(5)


@pytest.mark.real_time(one_loop=True)
async def test_the_trace_goes_with_grpc_calls(spans, provider, grpc_server):
    header = await in_span(provider, GrpcSink(grpc_server.url, method="/test.Store/Put", request=b",".join), [b"a"])
    (call,) = grpc_server.received()
    assert call.metadata["traceparent"] == header


@pytest.mark.real_time(one_loop=True)
async def test_the_trace_goes_through_kafka_to_a_consumer_of_its_own(started, provider, memory, kafka):
    """From a span of a program through an exporter, a topic and a consumer: the last is linked to the send."""
    started(provider)
    topic = f"traced{next(names)}"
    await create(kafka, topic)
    async with bq.Exporter(KafkaSink(kafka.address, topic), bq.ExportConfig(), name="out") as exporter:
        await exporter.deliver([b"1", b"2"])
    done = asyncio.Event()

    async def handle(batch):
        done.set()

    consumer = KafkaConsumer(
        kafka.address,
        topic,
        handle,
        group=topic,
        batch=bq.BatchPolicy(max_records=2, linger=30.0),
        dead_letters=DROP,
        name="in",
    )
    async with consumer, asyncio.timeout(60.0):
        await done.wait()
    sent, taken = memory.get_finished_spans()
    assert (sent.name, taken.name) == ("send out", f"process {topic}")
    assert [(link.context.trace_id, link.context.span_id) for link in taken.links] == [
        (sent.context.trace_id, sent.context.span_id)
    ]
    for message in await read(kafka, topic):
        headers = dict(message.headers)
        assert headers["traceparent"].decode() == carried(sent)
        assert "bq-key" in headers


@pytest.mark.real_time(one_loop=True)
async def test_the_trace_goes_with_nats_messages(spans, provider, nats_server):
    import nats

    url = f"nats://{nats_server.address}"
    client = await nats.connect(url)
    try:
        await client.jetstream().add_stream(name="traced", subjects=["traced"])
        header = await in_span(provider, NatsSink(url, subject="traced", headers={"kind": "row"}), [b"a"])
        stored = await client.jetstream().get_msg("traced", 1)
        assert stored.headers == {"traceparent": header, "kind": "row", "Nats-Msg-Id": "0"}
    finally:
        await client.jetstream().delete_stream("traced")
        await client.close()


@pytest.mark.real_time(one_loop=True)
async def test_the_trace_goes_with_rabbitmq_messages(spans, provider, rabbit_server):
    import aio_pika

    url = f"amqp://{rabbit_server.address}/"
    header = await in_span(provider, AmqpSink(url, queue="traced"), [b"a"])
    connection = await aio_pika.connect(url)
    async with connection:
        queue = await (await connection.channel()).declare_queue("traced", durable=True)
        message = await queue.get()
        await message.ack()
        await queue.delete()
    assert message.headers == {"traceparent": header}


class TestKafkaHeaders:
    """How a trace finds room among a message's headers."""

    def encoded(self, provider, batch, keys=None, *, room=1_000_000, headers=None, key="bq-key"):
        with provider.get_tracer("test").start_as_current_span("outer"):
            messages, refused = Encoder(None, None, headers, key, room).encode(batch, keys)
        assert refused == {}
        return [None if each is None else [name for name, _ in each] for each in messages.headers or [None]]

    def test_plain_records(self, spans, provider):
        assert self.encoded(provider, [b"a"]) == [["traceparent"]]
        assert self.encoded(provider, [b"a"], ["k"]) == [["bq-key", "traceparent"]]
        assert self.encoded(provider, ["text"], ["k"]) == [["bq-key", "traceparent"]]
        assert self.encoded(provider, ["text"], ["k"], key=None) == [["traceparent"]]

    def test_no_record_is_refused_for_its_trace(self, spans, provider):
        assert self.encoded(provider, [b"a" * 890], room=1_000) == [[]]
        assert self.encoded(provider, [b"a" * 700], room=1_000) == [["traceparent"]]

    def test_a_record_s_own_header_wins(self, spans, provider):
        own = self.encoded(provider, [{"a": 1}], headers=lambda row: [("traceparent", sender(1))])
        assert own == [["traceparent"]]

    def test_much_baggage_stays_at_home(self, spans, provider):
        token = contexts.attach(set_baggage("much", "x" * 2_000))
        try:
            assert self.encoded(provider, [b"a"]) == [None]
        finally:
            contexts.detach(token)


# --- off, left out, ended


async def test_without_tracing_nothing_is_wrapped_or_sent():
    async def handle(batch):
        pass

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("rows", bq.QueueConfig(consumer=handle))
        (entry,) = queue.intake and list(queue._dispatcher.all_entries())
        assert entry.consume is handle
    assert tracing.headers() == {}


def test_the_import_of_the_package_brings_no_opentelemetry():
    code = "import sys, batchqueue_async, batchqueue_async.observe; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


async def test_names_that_are_left_out_make_no_spans(started, provider, memory):
    started(provider, skip=("rows", "spans", "orders"))

    async def handle(batch):
        pass

    await handled([1], handle)
    async with bq.Exporter(Destination(), bq.ExportConfig(), name="spans") as exporter:
        await exporter.deliver([b"a"])
    for batch in (None, bq.BatchPolicy(max_records=2, linger=0.1)):
        broker = FakeBroker()
        broker.publish(b"x")
        await consumed(broker, handle, batch=batch)
    assert memory.get_finished_spans() == ()


async def test_after_the_end_calls_go_on_without_spans(started, provider, memory):
    traces = started(provider)
    seen = []

    async def handle(batch):
        seen.extend(batch)

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("rows", bq.QueueConfig(consumer=handle))
        traces.stop()
        traces.stop()
        await queue.produce(1)
        await queue.flush()
    assert (seen, memory.get_finished_spans()) == ([1], ())
    started(provider)


def test_wrong_arguments_are_told(started, provider):
    with pytest.raises(bq.ConfigError, match=r"skip='rows' is a text; give a set of names, such as \{'rows'\}"):
        observe.trace(provider, skip="rows")
    started(provider)
    with pytest.raises(bq.ConfigError, match="being traced already"):
        observe.trace(provider)


async def test_a_process_without_a_provider_makes_spans_for_nobody(started):
    started()

    async def handle(batch):
        pass

    assert (await handled([1], handle)).handled == 1


# --- what may break


class Raising(SpanProcessor):
    """Raises at the start of a span, or at its end."""

    def __init__(self, at):
        self.at = at

    def on_start(self, span, parent_context=None):
        if self.at == "start":
            raise RuntimeError("processor")

    def on_end(self, span):
        if self.at == "end":
            raise RuntimeError("processor")


class Broken(SpanExporter):
    """An exporter that raises."""

    def export(self, spans):
        raise OSError("no collector")


class Failing(SpanExporter):
    def export(self, spans):
        return SpanExportResult.FAILURE


class Refusing(Sampler):
    def should_sample(self, *arguments, **options):
        raise RuntimeError("sampler")

    def get_description(self):
        return "refusing"


def broken_provider(how):
    provider = TracerProvider(sampler={"sampler": Refusing(), "off": ALWAYS_OFF}.get(how), shutdown_on_exit=False)
    if how in {"start", "end"}:
        provider.add_span_processor(Raising(how))
    if how in {"exporter", "failure"}:
        provider.add_span_processor(SimpleSpanProcessor(Broken() if how == "exporter" else Failing()))
    return provider


@pytest.mark.parametrize("how", ["start", "end", "exporter", "failure", "sampler", "off"])
async def test_nothing_is_lost_to_a_broken_tracing(started, logs, how):
    started(broken_provider(how))
    seen = []

    async def handle(batch):
        seen.extend(batch)

    stats = await handled(range(10), handle)
    assert (stats.handled, seen) == (10, list(range(10)))
    broker = FakeBroker()
    broker.publish(b"1", b"2", headers={"traceparent": sender(1)})

    async def handle_one(message):
        await handle([message.body])

    stats = await consumed(broker, handle_one)
    assert (stats.acked, seen[10:]) == (2, [b"1", b"2"])
    destination = Destination()
    async with bq.Exporter(destination, bq.ExportConfig()) as exporter:
        await exporter.deliver([b"a", b"b"])
    assert exporter.stats().delivered == 2
    assert contexts.get_current() == {}
    complaints = [entry for entry in logs if entry["event"] == "trace_failed"]
    assert len(complaints) == (how in {"start", "end", "sampler"})


async def test_a_broken_propagator_is_complained_of_once(spans, provider, logs, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("propagator")

    monkeypatch.setattr(propagate, "extract", broken)
    monkeypatch.setattr(propagate, "inject", broken)
    broker = FakeBroker()
    broker.publish(b"1", headers={"traceparent": sender(1)})
    inside = []

    async def handle(message):
        inside.append(tracing.headers())

    assert (await consumed(broker, handle)).acked == 1
    assert inside == [{}]
    assert [span.parent for span in spans()] == [None]
    assert len([entry for entry in logs if entry["event"] == "trace_failed"]) == 1


async def test_an_answer_that_cannot_be_counted_is_still_the_answer(spans, logs):
    class Odd(dict):
        def __len__(self):
            raise RuntimeError("no length")

        def __bool__(self):
            return True

    class Sink(Destination):
        async def send(self, batch):
            return SendResult(rejected=Odd())

    async with bq.Exporter(Sink(), bq.ExportConfig()) as exporter:
        await exporter.consume([b"a"])
    assert len(spans()) >= 1


FORKING = """
import asyncio, os, sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import batchqueue_async as bq
from batchqueue_async import observe

memory, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(BatchSpanProcessor(memory))
observe.trace(provider)

async def main(name):
    async def handle(batch):
        await asyncio.sleep(0)
    async with bq.BatchQueueManager() as manager:
        queue = manager.create(name, bq.QueueConfig(consumer=handle))
        await queue.produce(1)
        await queue.flush()

asyncio.run(main("parent"))
provider.force_flush()
pid = os.fork()
if pid == 0:
    memory.clear()
    asyncio.run(main("child"))
    provider.force_flush()
    names = [span.name for span in memory.get_finished_spans()]
    os._exit(0 if names == ["process child"] else 1)
_, status = os.waitpid(pid, 0)
asyncio.run(main("parent"))
provider.force_flush()
names = [span.name for span in memory.get_finished_spans()]
sys.exit(os.waitstatus_to_exitcode(status) or names != ["process parent"] * 2)
"""


def test_a_forked_child_traces_by_itself():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# --- a real collector


def as_record(span):
    """A span as the OTLP sink takes it."""
    return {
        "name": span.name,
        "trace_id": span.context.trace_id.to_bytes(16),
        "span_id": span.context.span_id.to_bytes(8),
        "links": [
            {"trace_id": link.context.trace_id.to_bytes(16), "span_id": link.context.span_id.to_bytes(8)}
            for link in span.links
        ],
        "start_time_unix_nano": span.start_time,
        "end_time_unix_nano": span.end_time,
        "attributes": dict(span.attributes),
        "status": {"code": "error"} if span.status.status_code is StatusCode.ERROR else {},
    }


@pytest.mark.real_time(one_loop=True)
@pytest.mark.timeout(600)  # the Collector is built when the first test asks for it
async def test_the_collector_takes_the_spans(started, provider, memory, collector, grpc_server):
    """The library's own exporter carries its own spans, and is left out of them."""
    started(provider, skip={"spans"})
    broker = FakeBroker()
    for number in (1, 2):
        broker.publish(b"x", headers={"traceparent": sender(number)})

    async def handle(batch):
        return SendResult(rejected=dict.fromkeys(range(2), bq.PermanentError("payload")))

    await consumed(broker, handle, batch=bq.BatchPolicy(max_records=2, linger=0.1))
    found = memory.get_finished_spans()
    sink = OtlpSink(f"http://{collector.address}", resource={"service.name": "orders"})
    async with bq.Exporter(sink, bq.ExportConfig(), name="spans") as exporter:
        await exporter.deliver([as_record(span) for span in found])
    (call,) = grpc_server.received()
    request = SIGNALS["traces"].request().FromString(call.content)
    (span,) = [each for group in request.resource_spans for scope in group.scope_spans for each in scope.spans]
    assert (span.name, span.status.code) == ("process fake", 2)
    assert [int.from_bytes(link.trace_id) for link in span.links] == [1, 2]
    assert b"payload" not in call.content
    assert memory.get_finished_spans() == found
