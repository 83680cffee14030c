"""Remote write against a real Prometheus."""

from __future__ import annotations

import time

import pytest

import batchqueue_async as bq
from batchqueue_async.sinks.http import HttpSink
from batchqueue_async.sinks.http.remote_write import RemoteWrite


@pytest.mark.real_time
async def test_prometheus_has_what_was_written(prometheus, request):
    name = f"written_{request.node.callspec.id}"
    now = int(time.time())
    sink = HttpSink(f"http://{prometheus.address}/api/v1/write", format=RemoteWrite(labels={"zone": "z"}))
    await sink.open()
    try:
        records = [{"name": name, "labels": {"n": i % 2}, "value": i, "timestamp": now - 10 + i} for i in range(6)]
        assert await sink.send_keyed(records, [f"q/{i}" for i in range(6)]) is None
        with pytest.raises(bq.PermanentError, match="400"):
            await sink.send([records[0] | {"timestamp": now - 20}])  # out of order
    finally:
        await sink.close()
    found = {(labels["n"], labels["zone"]): samples for labels, samples in prometheus.samples(f"{name}[1m]")}
    assert found == {
        ("0", "z"): [(now - 10, 0.0), (now - 8, 2.0), (now - 6, 4.0)],
        ("1", "z"): [(now - 9, 1.0), (now - 7, 3.0), (now - 5, 5.0)],
    }
