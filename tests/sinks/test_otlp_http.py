"""OTLP over HTTP, against a server that keeps what it is sent."""

from __future__ import annotations

import gzip
import json

import pytest

import batchqueue_async as bq
from batchqueue_async.sinks.base import needs_of
from batchqueue_async.sinks.otlp import OtlpHttpSink
from batchqueue_async.sinks.otlp.request import SIGNALS

pytestmark = pytest.mark.real_time


async def send(sink, batch):
    await sink.open()
    try:
        return await sink.send_keyed(batch, [f"q/{at}" for at in range(len(batch))])
    finally:
        await sink.close()


@pytest.mark.parametrize("signal", SIGNALS)
async def test_a_batch_is_one_export(http_server, signal):
    record = {"name": "up", "value": 1} if signal == "metrics" else {"attributes": {"a": 1}}
    http_server.script({"status": 200, "keep": True})
    sink = OtlpHttpSink(
        http_server.url, signal=signal, compression="gzip", resource={"service.name": "shop"}, headers={"X-Scope": "t"}
    )
    result = await send(sink, [record, {"nonsense": object()}, record])
    assert list(result.rejected) == [1]
    (request,) = http_server.received()
    assert (request.path, request.headers["content-type"]) == (f"/v1/{signal}", "application/x-protobuf")
    assert (request.headers["x-scope"], "idempotency-key" in request.headers) == ("t", False)
    message = SIGNALS[signal].request().FromString(gzip.decompress(request.body))
    (resource,) = getattr(message, SIGNALS[signal].resources)
    assert resource.resource.attributes[0].value.string_value == "shop"
    assert sink.stats().sent == 2
    assert not needs_of(sink).same_bytes


async def test_what_an_answer_means(http_server):
    kinds = {429: bq.ThrottledError, 503: bq.RetryableError, 500: bq.RetryableError, 400: bq.PermanentError}
    for status, kind in kinds.items():
        http_server.script({"status": status})
        with pytest.raises(kind):
            await send(OtlpHttpSink(http_server.url), [{"name": "x"}])
    http_server.script({"status": 200, "body": json.dumps({})})
    with pytest.raises(bq.PermanentError, match="check the endpoint"):
        await send(OtlpHttpSink(f"{http_server.url}/elsewhere"), [{"name": "x"}])


async def test_a_partial_success_is_counted(http_server, logs):
    for count, rejected in ((1, []), (2, [0, 1])):
        answer = SIGNALS["logs"].response()()
        answer.partial_success.rejected_log_records = count
        http_server.script({"status": 200, "body": answer.SerializeToString().decode()})
        result = await send(sink := OtlpHttpSink(http_server.url, signal="logs"), [{"body": "a"}, {"body": "b"}])
        assert sorted(result.rejected if result else {}) == rejected
        assert sink.stats().rejected == count
    assert [event["event"] for event in logs] == ["otlp_records_rejected"] * 2


def test_options_are_checked():
    assert OtlpHttpSink("https://host/otlp/v1/traces").url == "https://host/otlp/v1/traces"
    with pytest.raises(bq.ConfigError, match="signal='spans'"):
        OtlpHttpSink("http://host", signal="spans")
