"""Spans through a queue and a durable exporter to an OTLP endpoint, such as the OpenTelemetry Collector.

Requests are handled, each leaves a span, and spans leave in batches. What the endpoint can't take is kept in a
directory: stop the endpoint, run this, start it, run it again, and the spans of both runs arrive.

Needs: pip install 'batchqueue-async[otlp]'
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from functools import partial
from typing import Any

from destination import look_for, status, watching

import batchqueue_async as bq
from batchqueue_async.sinks.otlp import OtlpSink


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", default="http://localhost:4317", help="http://host:port, or https:// with TLS")
    parser.add_argument("--directory", default="otlp-queue", help="where spans wait that are not delivered")
    parser.add_argument("--requests", type=int, default=1_000, help="how many requests to handle")
    parser.add_argument("--drain", type=float, default=10.0, help="seconds to deliver what is left at the end")
    return parser.parse_args()


async def handle(spans: bq.BatchQueue[dict[str, Any]], number: int) -> None:
    """Handle a request, and leave a span of it."""
    started = time.time_ns()
    await asyncio.sleep(0)  # the work
    await spans.produce(
        {
            "name": "GET /orders",
            "kind": "server",
            "trace_id": secrets.token_bytes(16),
            "span_id": secrets.token_bytes(8),
            "start_time_unix_nano": started,
            "end_time_unix_nano": time.time_ns(),
            "attributes": {"http.response.status_code": 200, "order": number},
        }
    )


async def main(options: argparse.Namespace, manager: bq.BatchQueueManager) -> int:
    """Handle all requests, and deliver their spans; the exit status."""
    sink = OtlpSink(options.endpoint, signal="traces", resource={"service.name": "shop"}, timeout=5.0)
    config = bq.ExportConfig(
        path=options.directory,  # without it, the spans wait in memory
        overflow="drop_oldest",  # when the disk's share is full, the newest spans are worth more
        workers=bq.WorkerPolicy.fixed(4),
        drain_timeout=options.drain,
    )
    exporter = bq.Exporter(sink, config, name="otlp")
    await look_for(options.endpoint)
    async with watching(exporter), exporter:
        left = exporter.stats().recovered
        if left:
            print(f"{left} spans of earlier runs are on disk")
        # The handler returns when a batch is on disk: whatever happens to the endpoint, requests are not held up.
        spans = manager.create("spans", bq.QueueConfig(consumer=exporter, linger=0.1))
        await asyncio.gather(*(handle(spans, number) for number in range(options.requests)))
        await spans.shutdown()
    report = exporter.report
    if report is not None:
        print(f"delivered {report.delivered} spans, {report.on_disk} stay on disk for the next run")
    return status(exporter)


if __name__ == "__main__":
    code = bq.run(partial(main, arguments()))
    sys.exit("interrupted" if code is None else code)
