"""The OTLP and gRPC sinks against a real grpc.aio server: what arrives, and which error each status is."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from datetime import UTC, datetime

import msgspec
import pytest
from google.rpc import status_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from servers.grpc import GrpcServer

import batchqueue_async as bq
from batchqueue_async.sinks._shared.batch_key import batch_key
from batchqueue_async.sinks._shared.secrets import Secret
from batchqueue_async.sinks._shared.tls import Tls
from batchqueue_async.sinks.base import KeyedSink, Sink
from batchqueue_async.sinks.grpc import GrpcSink
from batchqueue_async.sinks.grpc.channel import endpoint
from batchqueue_async.sinks.grpc.status import error_for, retry_delay
from batchqueue_async.sinks.otlp import OtlpSink
from batchqueue_async.sinks.otlp.request import SIGNALS, Grouping
from batchqueue_async.testing import FaultProxy

LIMIT = 60.0


@contextlib.asynccontextmanager
async def opened(sink):
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


def build(signal, batch, resource=None, scope="s"):
    return Grouping(SIGNALS[signal], resource or {}, scope).build(batch)


def attributes(pairs):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


def spans_of(call):
    request = SIGNALS["traces"].request().FromString(call.content)
    return [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]


# --- pure parts


def test_spans_are_grouped_by_resource_and_scope():
    span = trace_pb2.Span(name="message")
    whole = trace_pb2.ResourceSpans(scope_spans=[trace_pb2.ScopeSpans(spans=[trace_pb2.Span(name="whole")] * 2)])
    batch = [
        span,
        span.SerializeToString(),
        whole,
        {"name": "row", "resource": {"service.name": "a"}, "scope": "x"},
        msgspec.json.encode({"name": "encoded", "resource": {"service.name": "a"}}),
    ]
    request = build("traces", batch, {"service.name": "own"}, "mine")
    found = [
        (attributes(group.resource.attributes), scope.scope.name, [span.name for span in scope.spans])
        for group in request.message.resource_spans
        for scope in group.scope_spans
    ]
    assert sorted(found, key=str) == sorted(
        [
            ({"service.name": "own"}, "mine", ["message", "message"]),
            ({}, "", ["whole", "whole"]),
            ({"service.name": "a"}, "x", ["row"]),
            ({"service.name": "a"}, "mine", ["encoded"]),
        ],
        key=str,
    )
    assert (request.weight, request.places) == (6, [0, 1, 2, 3, 4])


def test_a_row_becomes_a_span():
    row = {
        "name": "GET /",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": b"\x01" * 8,
        "parent_span_id": None,
        "kind": "server",
        "start": 1.5,
        "end": datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC),
        "status": {"code": "error", "message": "no"},
        "attributes": {
            "s": "x",
            "b": True,
            "i": 3,
            "f": 0.5,
            "y": b"z",
            "n": None,
            "l": [1],
            "big": 2**70,
            "m": {"k": 1},
        },
        "events": [{"name": "e", "timestamp": 1, "attributes": {"a": 1}}],
        "links": [trace_pb2.Span.Link(span_id=b"l"), {"trace_id": "00"}],
    }
    (span,) = build("traces", [row]).message.resource_spans[0].scope_spans[0].spans
    assert (span.trace_id.hex(), span.span_id, span.kind) == (row["trace_id"], b"\x01" * 8, 2)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1_500_000_000, 2_000_000_000)
    assert (span.status.code, span.status.message) == (2, "no")
    assert (span.events[0].time_unix_nano, attributes(span.events[0].attributes)) == (10**9, {"a": 1})
    assert [link.span_id for link in span.links] == [b"l", b""]
    kinds = {pair.key: pair.value.WhichOneof("value") for pair in span.attributes}
    assert kinds == {
        "s": "string_value",
        "b": "bool_value",
        "i": "int_value",
        "f": "double_value",
        "y": "bytes_value",
        "n": None,
        "l": "array_value",
        "big": "string_value",
        "m": "kvlist_value",
    }


@pytest.mark.parametrize(
    ("signal", "record", "message"),
    [
        ("traces", {"nam": "x"}, "field that a Span has not: nam"),
        ("traces", {"name": 3}, "of a type that it can't have in a Span"),
        ("traces", {"span_id": "xyz"}, "neither bytes nor hexadecimal"),
        ("traces", {"kind": "odd"}, "span_kind_odd is not known"),
        ("traces", {"attributes": [1]}, "attributes are of type list"),
        ("traces", {"events": "none"}, "events are of type str"),
        ("traces", {"start": "now"}, "time is of type str"),
        ("traces", {"start": float("nan")}, "which is none"),
        ("traces", {"resource": "shop"}, "resource is of type str"),
        ("traces", b"\xff\xff", "no serialized Span"),
        ("traces", logs_pb2.LogRecord(), "is a opentelemetry.proto.logs.v1.LogRecord"),
        ("metrics", {"name": "m"}, "value is of type NoneType"),
        ("metrics", {"name": "m", "value": 1, "kind": "odd"}, "kind is 'odd'"),
        ("metrics", {"name": "m", "value": 1, "kind": "sum", "temporality": "x"}, "none of 'cumulative'"),
    ],
)
def test_a_record_that_is_none_is_rejected_alone(signal, record, message):
    request = build(signal, [record, {"name": "good", "value": 1} if signal == "metrics" else {"name": "good"}])
    assert request.places == [1]
    with pytest.raises(bq.PermanentError, match=message):
        raise request.rejected[0]


def test_log_records():
    row = {"timestamp": 1, "severity_number": "warn", "body": {"a": 1}, "attributes": {"k": "v"}, "observed": 2}
    batch = [row, logs_pb2.LogRecord(severity_text="x")]
    request = build("logs", batch)
    records = request.message.resource_logs[0].scope_logs[0].log_records
    assert [record.severity_number for record in records] == [13, 0]
    assert records[0].body.kvlist_value.values[0].value.int_value == 1
    assert (records[0].time_unix_nano, records[0].observed_time_unix_nano) == (10**9, 2 * 10**9)


def test_points_of_one_metric_are_put_together():
    whole = metrics_pb2.Metric(
        name="h", histogram=metrics_pb2.Histogram(data_points=[metrics_pb2.HistogramDataPoint()] * 2)
    )
    batch = [
        {"name": "up", "value": 1, "attributes": {"job": "a"}, "timestamp": 1},
        {"name": "up", "value": 0.5, "attributes": {"job": "b"}},
        {"name": "calls", "unit": "1", "kind": "sum", "value": 3, "start": 1, "temporality": "delta"},
        whole,
        metrics_pb2.Metric(name="empty"),
    ]
    request = build("metrics", batch)
    metrics = {metric.name: metric for metric in request.message.resource_metrics[0].scope_metrics[0].metrics}
    assert [point.as_int or point.as_double for point in metrics["up"].gauge.data_points] == [1, 0.5]
    assert (metrics["calls"].sum.is_monotonic, metrics["calls"].sum.aggregation_temporality) == (True, 1)
    assert metrics["calls"].sum.data_points[0].start_time_unix_nano == 10**9
    assert (list(metrics), request.weight) == (["up", "calls", "h", "empty"], 5)


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        ("UNAVAILABLE", "", bq.RetryableError),
        ("DEADLINE_EXCEEDED", "", bq.RetryableError),
        ("CANCELLED", "", bq.RetryableError),
        ("RESOURCE_EXHAUSTED", "slow down", bq.ThrottledError),
        ("RESOURCE_EXHAUSTED", "Received message larger than max (5 vs. 4)", bq.TooLargeError),
        ("UNAUTHENTICATED", "", bq.AuthError),
        ("PERMISSION_DENIED", "", bq.AuthError),
        ("INVALID_ARGUMENT", "", bq.PermanentError),
        ("UNIMPLEMENTED", "", bq.PermanentError),
        ("INTERNAL", "", bq.PermanentError),
        ("UNKNOWN", "", bq.PermanentError),
    ],
)
def test_a_status_is_one_error(code, details, kind):
    error = error_for(code, "call", details=details, wait=3.0)
    assert type(error) is kind
    if isinstance(error, bq.RetryableError):
        assert error.retry_after == 3.0


def test_details_that_are_broken_or_say_nothing_are_passed_over():
    empty = status_pb2.Status(code=8).SerializeToString()
    for metadata in (None, [], [("grpc-status-details-bin", b"\xff")], [("grpc-status-details-bin", empty)]):
        assert retry_delay(metadata) is None


@pytest.mark.parametrize(
    ("address", "tls", "message"),
    [
        ("unix://x", None, "scheme 'unix'"),
        ("http://", None, "more or less than a host"),
        ("http://host/path", None, "more or less than a host"),
        ("http://u:s3cret@host:1", None, "more or less than a host"),
        ("http://host:1", True, "http:// is without TLS"),
        ("host:1", False, "turned off by http://"),
        ("host:1", Tls(verify=False), "always verifies"),
        ("host:1", Tls(cert="c", key_password="x"), "no encrypted key"),
    ],
)
def test_wrong_endpoints_are_named(address, tls, message):
    with pytest.raises(bq.ConfigError, match=message) as caught:
        endpoint(address, tls)
    assert "s3cret" not in str(caught.value)


def test_wrong_options_are_named():
    with pytest.raises(bq.ConfigError, match="signal='profiles'"):
        OtlpSink("http://h:1", signal="profiles")
    with pytest.raises(bq.ConfigError, match="compression='zip'"):
        OtlpSink("http://h:1", compression="zip")
    with pytest.raises(bq.ConfigError, match="timeout=0"):
        OtlpSink("http://h:1", timeout=0)
    with pytest.raises(bq.ConfigError, match="no full name"):
        GrpcSink("http://h:1", method="Store", request=bytes)
    with pytest.raises(bq.ConfigError, match="brings its serializers"):
        GrpcSink("http://h:1", method=lambda channel: channel, request=bytes, serializer=bytes)


async def test_it_shows_no_secret_and_is_pickled_before_it_is_open():
    sink = OtlpSink("http://h:1", token="s3cret", headers={"x-key": Secret("s3cret")})
    assert "s3cret" not in repr(sink)
    assert repr(pickle.loads(pickle.dumps(sink))) == repr(sink)
    assert isinstance(sink, Sink)
    assert sink.concurrent
    with pytest.raises(RuntimeError, match="not open"):
        await sink.send([{"name": "x"}])
    await sink.close()
    await sink.close()


async def test_x_38_a_record_that_request_fails_for_is_named_once_it_has_worked_for_another():
    sink = GrpcSink("http://127.0.0.1:1", method="/test.Store/Put", request=b"".join, timeout=0.5)
    async with opened(sink):
        with pytest.raises(TypeError):  # is it the function?
            await sink.send([None])
        with pytest.raises(bq.PermanentError, match="request raised TypeError for 2 of 4 records") as caught:
            await sink.send([b"a", None, b"b", None])
        assert caught.value.culprits == (1, 3)
        with pytest.raises(bq.PermanentError):
            await sink.send([None])
        with pytest.raises(bq.RetryableError):
            await sink.send([b"a", b"b"])


async def test_x_38_a_request_of_several_records_that_fails_as_a_whole_is_nobodys_fault():
    def request(batch):
        if len(batch) > 1:
            raise ValueError
        return batch[0]

    async with opened(GrpcSink("http://127.0.0.1:1", method="/test.Store/Put", request=request)) as sink:
        with pytest.raises(ValueError):
            await sink.send([b"a", b"b"])


async def test_files_of_tls_that_are_missing_are_named(tmp_path):
    with pytest.raises(bq.ConfigError, match=r"none.pem' cannot be read"):
        await OtlpSink("h:1", tls=Tls(ca=tmp_path / "none.pem")).open()


# --- a real server


@pytest.fixture
async def proxy(grpc_server):
    async with FaultProxy(grpc_server.address) as proxy:
        yield proxy


@pytest.mark.real_time
class TestOtlp:
    @pytest.mark.parametrize("compression", [None, "gzip"])
    async def test_spans_arrive_with_their_metadata(self, grpc_server, compression, monkeypatch):
        monkeypatch.setenv("A_KEY", "key-value")
        sink = OtlpSink(grpc_server.url, token="t0ken", headers={"X-Key": Secret("env:A_KEY")}, compression=compression)
        async with opened(sink):
            assert await sink.send([{"name": f"span {number}"} for number in range(500)]) is None
            assert await sink.send([]) is None
            assert list((await sink.send([{"no": "span"}])).rejected) == [0]
            assert (sink.stats().requests, sink.stats().sent, sink.stats().rejected) == (1, 500, 0)
        (call,) = grpc_server.received()
        assert [span.name for span in spans_of(call)] == [f"span {number}" for number in range(500)]
        assert (call.metadata["authorization"], call.metadata["x-key"]) == ("Bearer t0ken", "key-value")

    async def test_what_is_prepared_is_sent(self, grpc_server):
        sink = OtlpSink(grpc_server.url)
        assert isinstance(sink, bq.PreparingSink)
        prepared = sink.prepare([{"name": "a"}, {"no": "span"}, {"name": "b"}], [])
        async with opened(sink):
            assert list((await sink.send_prepared(prepared)).rejected) == [1]
        (call,) = grpc_server.received()
        assert [span.name for span in spans_of(call)] == ["a", "b"]
        assert sink.stats().sent == 2

    @pytest.mark.parametrize("signal", ["logs", "metrics"])
    async def test_the_other_signals(self, grpc_server, signal):
        async with opened(OtlpSink(grpc_server.url, signal=signal, resource={"service.name": "shop"})) as sink:
            await sink.send([{"body": "hello"}] if signal == "logs" else [{"name": "up", "value": 1}])
        (call,) = grpc_server.received()
        request = SIGNALS[signal].request().FromString(call.content)
        (group,) = request.resource_logs if signal == "logs" else request.resource_metrics
        assert attributes(group.resource.attributes) == {"service.name": "shop"}

    async def test_a_partial_success_is_counted_and_a_whole_failure_rejects(self, grpc_server, logs):
        grpc_server.script({"partial": 1}, {"partial": 2})
        async with opened(OtlpSink(grpc_server.url)) as sink:
            assert await sink.send([{"name": "a"}, {"name": "b"}]) is None
            assert sink.stats().rejected == 1
            assert sorted((await sink.send([{"name": "a"}, {"no": 1}, {"name": "b"}])).rejected) == [0, 1, 2]
        assert [event["event"] for event in logs] == ["otlp_records_rejected"] * 2

    async def test_statuses_are_errors_that_show_no_payload(self, grpc_server):
        grpc_server.script(
            {"code": "RESOURCE_EXHAUSTED", "retry": 2.5, "details": "s3cret"},
            {"code": "UNAVAILABLE", "details": "s3cret"},
            {"code": "PERMISSION_DENIED"},
            {"code": "INVALID_ARGUMENT", "details": "s3cret"},
        )
        errors = []
        async with opened(OtlpSink(grpc_server.url, token="s3cret")) as sink:
            for _ in range(4):
                with pytest.raises(bq.SinkError) as caught:
                    await sink.send([{"name": "s3cret"}])
                errors.append(caught.value)
            with pytest.raises(bq.TooLargeError):
                await sink.send([{"name": "x" * 5_000_000}])
            grpc_server.rules(token="other")
            with pytest.raises(bq.AuthError):
                await sink.send([{"name": "x"}])
        kinds = [bq.ThrottledError, bq.RetryableError, bq.AuthError, bq.PermanentError]
        assert [type(error) for error in errors] == kinds
        assert [getattr(error, "retry_after", None) for error in errors] == [2.5, None, None, None]
        assert [error for error in errors if "s3cret" in str(error)] == []

    async def test_broken_lines_are_worth_another_try(self, proxy, grpc_server):
        async with opened(OtlpSink(f"http://{proxy.address}", timeout=0.5)) as sink:
            await sink.send([{"name": "x"}])
            for fault in ("reset", "refuse", "half_open", "mute"):
                await proxy.switch(fault)
                with pytest.raises(bq.RetryableError):
                    await sink.send([{"name": fault}])
                await proxy.switch("pass")
                await again(sink, [{"name": f"after {fault}"}])
        names = {span.name for call in grpc_server.received() for span in spans_of(call)}
        assert {f"after {fault}" for fault in ("reset", "refuse", "half_open", "mute")} <= names

    async def test_a_connection_that_is_dead_without_knowing_it_is_replaced(self, proxy, grpc_server):
        async with opened(OtlpSink(f"http://{proxy.address}", timeout=0.3)) as sink:
            await sink.send([{"name": "a"}])
            await proxy.switch("half_open")
            with pytest.raises(bq.RetryableError, match="DEADLINE_EXCEEDED"):
                await sink.send([{"name": "b"}])
            accepted = proxy.counts().accepted
            with pytest.raises(bq.RetryableError):
                await sink.send([{"name": "c"}])
            assert proxy.counts().accepted > accepted

    async def test_a_cancelled_send_leaves_the_sink_usable(self, proxy):
        async with opened(OtlpSink(f"http://{proxy.address}")) as sink:
            await sink.send([{"name": "a"}])
            await proxy.switch("half_open")
            sending = asyncio.create_task(sink.send([{"name": "b"}]))
            await asyncio.sleep(0)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await proxy.switch("pass")
            await sink.send([{"name": "c"}])

    async def test_tls_is_verified(self, certificate_files):
        server = GrpcServer(certificate_files)
        server.start()
        try:
            async with opened(OtlpSink(server.address, timeout=2.0)) as sink:
                with pytest.raises(bq.RetryableError):
                    await sink.send([{"name": "a"}])
            for tls in (Tls(ca=certificate_files[0]), Tls(ca=certificate_files[0], server_name="localhost")):
                async with opened(OtlpSink(server.url, tls=tls)) as sink:
                    await sink.send([{"name": "a"}])
        finally:
            server.dispose()


@pytest.mark.real_time
@pytest.mark.timeout(600)  # the Collector is built when the first test asks for it
@pytest.mark.parametrize("signal", SIGNALS)
async def test_the_collector_takes_it_and_passes_it_on(collector, grpc_server, signal):
    records = {"traces": {"name": "x", "trace_id": b"t" * 16, "span_id": b"s" * 8}, "logs": {"body": "x"}}
    batch = [records.get(signal, {"name": "up", "value": 1, "timestamp": 5})] * 50
    async with opened(OtlpSink(f"http://{collector.address}", signal=signal, compression="gzip")) as sink:
        assert await sink.send(batch) is None
        assert sink.stats().sent == 50
        grpc_server.script({"code": "UNAVAILABLE"})
        with pytest.raises(bq.RetryableError):
            await sink.send(batch)
        grpc_server.script({"code": "INVALID_ARGUMENT"})
        with pytest.raises(bq.PermanentError):
            await sink.send(batch)
    (call,) = grpc_server.received()
    passed_on = SIGNALS[signal].request().FromString(call.content)
    assert build(signal, getattr(passed_on, SIGNALS[signal].resources)).weight == 50


async def again(sink, batch):
    """Send until it goes: a channel takes a moment to find that its connection is gone or back."""
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                return await sink.send(batch)
            except bq.RetryableError:
                await asyncio.sleep(0.05)


@pytest.mark.real_time
class TestGrpcSink:
    async def test_a_unary_method_by_its_name(self, grpc_server):
        sink = GrpcSink(grpc_server.url, method="/test.Store/Put", request=b",".join)
        assert isinstance(sink, KeyedSink)
        async with opened(sink):
            await sink.send_keyed([b"a", b"b"], ["q/1", "q/2"])
            await sink.send([b"c"])
        first, second = grpc_server.received()
        assert (first.content, first.metadata["idempotency-key"]) == (b"a,b", batch_key(["q/1", "q/2"]))
        assert (second.content, "idempotency-key" in second.metadata) == (b"c", False)

    async def test_a_stream_by_a_stub_with_a_judge(self, grpc_server):
        class StoreStub:
            def __init__(self, channel):
                self.PutAll = channel.stream_unary("/test.Store/PutAll")

        judged = []
        sink = GrpcSink(
            grpc_server.url,
            method=lambda channel: StoreStub(channel).PutAll,
            request=lambda batch: batch,
            streaming=True,
            judge=lambda answer, count: judged.append((answer, count)),
        )
        async with opened(sink):
            await sink.send([b"a", b"b", b"c"])
        (call,) = grpc_server.received()
        assert (call.content, judged) == (b"a|b|c", [(b"3", 3)])
        assert call.metadata["message-count"] == "3"

    async def test_errors_name_the_method(self, grpc_server):
        grpc_server.script({"code": "UNAVAILABLE"})
        async with opened(GrpcSink(grpc_server.url, method="/test.Store/Put", request=b"".join)) as sink:
            with pytest.raises(
                bq.RetryableError, match=r"call /test.Store/Put at 127.0.0.1:\d+ ended with UNAVAILABLE"
            ):
                await sink.send([b"a"])
        async with opened(GrpcSink(grpc_server.url, method="/test.Store/Gone", request=b"".join)) as sink:
            with pytest.raises(bq.PermanentError, match="UNIMPLEMENTED"):
                await sink.send([b"a"])

    async def test_a_closed_sink_says_so(self, grpc_server):
        sink = GrpcSink(grpc_server.url, method="/test.Store/Put", request=b"".join)
        with pytest.raises(RuntimeError, match="not open"):
            await sink.send([b"a"])
