"""The example of the OTLP exporter, run as its reader would run it, against a real gRPC server."""

from __future__ import annotations

import subprocess
import sys

from example_runs import EXAMPLES, run

from batchqueue_async.sinks.otlp.request import SIGNALS


def test_otlp_exporter_delivers_what_an_outage_left(grpc_server, tmp_path):
    options = ["--endpoint", grpc_server.url, "--requests", "300", "--drain"]
    grpc_server.stop()
    command = [sys.executable, "-W", "error", str(EXAMPLES / "otlp_exporter.py"), *options, "0.5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 3, done.stderr  # as `batchqueue run` ends with records undelivered
    assert done.stdout == "delivered 0 spans, 300 stay on disk for the next run\n"
    assert "exporter_closed" in done.stderr  # a program that logs nothing is told of what was left
    assert "nobody listens at " in done.stderr
    grpc_server.start()
    lines = run("otlp_exporter.py", *options, "30", cwd=tmp_path)
    assert lines == [
        "300 spans of earlier runs are on disk",
        "delivered 600 spans, 0 stay on disk for the next run",
    ]
    requests = [SIGNALS["traces"].request().FromString(call.content) for call in grpc_server.received()]
    spans = [span for request in requests for span in request.resource_spans[0].scope_spans[0].spans]
    assert len({span.span_id for span in spans}) == len(spans) == 600
    orders = sorted(pair.value.int_value for span in spans for pair in span.attributes if pair.key == "order")
    assert orders == sorted([*range(300), *range(300)])


def test_help(tmp_path):
    assert run("otlp_exporter.py", "--help", cwd=tmp_path)[0].startswith("usage: otlp_exporter.py")
