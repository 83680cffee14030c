"""OTLP: 500 spans a batch, beside the OpenTelemetry SDK's BatchSpanProcessor with its OTLP exporter.

Each case begins with spans as the program has them (the SDK's `ReadableSpan`, our rows or messages; 8 attributes, an
event) and ends when a server in another process has answered for all. The server reads the requests and does nothing
with them. `python -m tests.benchmarks.sinks.otlp` prints the figures alone.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

import batchqueue_async as bq
from batchqueue_async.sinks.otlp import OtlpSink
from batchqueue_async.sinks.otlp_request import SIGNALS
from batchqueue_async.sinks.otlp_values import message, messages

BATCH = 500
TARGET = 3.0
RESOURCE = {"service.name": "bench"}
ATTRIBUTES = {
    "http.request.method": "GET",
    "url.path": "/orders/17",
    "server.address": "shop.example",
    "server.port": 443,
    "http.response.status_code": 200,
    "retries": 0,
    "cached": False,
    "weight": 0.25,
}
START = 1_700_000_000_000_000_000


def serve() -> None:
    """The server: takes all and reads nothing; says where it is on its first line."""

    async def main() -> None:
        async def export(_request: bytes, _context: Any) -> bytes:
            return b""

        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        service = SIGNALS["traces"].method.split("/")[1]
        handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()

    asyncio.run(main())


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"GET /orders/{number % 50}",
            "trace_id": number.to_bytes(16, "big"),
            "span_id": (number + 1).to_bytes(8, "big"),
            "kind": 2,
            "start_time_unix_nano": START + number,
            "end_time_unix_nano": START + number + 1_000_000,
            "attributes": ATTRIBUTES,
            "events": [{"name": "cache", "time_unix_nano": START + number, "attributes": {"hit": True}}],
        }
        for number in range(1, count + 1)
    ]


def readable(count: int) -> list[ReadableSpan]:
    resource = Resource(RESOURCE)
    return [
        ReadableSpan(
            name=f"GET /orders/{number % 50}",
            context=SpanContext(number, number + 1, is_remote=False, trace_flags=TraceFlags(1)),
            resource=resource,
            attributes=ATTRIBUTES,
            events=(Event("cache", {"hit": True}, START + number),),
            kind=SpanKind.SERVER,
            start_time=START + number,
            end_time=START + number + 1_000_000,
        )
        for number in range(1, count + 1)
    ]


def sdk(address: str, spans: list[ReadableSpan]) -> float:
    exporter = OTLPSpanExporter(endpoint=address, insecure=True)
    # The queue holds all, as it drops what it has no room for; and nothing waits for the schedule.
    processor = BatchSpanProcessor(
        exporter, max_queue_size=len(spans) + 1, max_export_batch_size=BATCH, schedule_delay_millis=3_600_000
    )
    started = time.perf_counter()
    for span in spans:
        processor.on_end(span)
    assert processor.force_flush(120_000)
    took = time.perf_counter() - started
    processor.shutdown()
    return took


async def ours(address: str, records: list[Any], *, exporter: bool) -> float:
    sink = OtlpSink(f"http://{address}", resource=RESOURCE, scope="bench")
    batches = [records[place : place + BATCH] for place in range(0, len(records), BATCH)]
    if exporter:
        config = bq.ExportConfig(overflow="block", workers=bq.WorkerPolicy.fixed(4))
        async with bq.Exporter(sink, config) as feeding:
            started = time.perf_counter()
            for batch in batches:
                await feeding.consume(batch)
            await feeding.flush()
            return time.perf_counter() - started
    await sink.open()
    try:
        await sink.send(batches[0])  # connects
        coming = iter(batches)

        async def worker() -> None:
            for batch in coming:
                await sink.send(batch)

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(4)))
        return time.perf_counter() - started
    finally:
        await sink.close()


def measure(count: int = 20_000, runs: int = 5) -> dict[str, list[float]]:
    """Spans a second of each case, run by run."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.sinks.otlp", "--serve"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    try:
        assert server.stdout is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        plain, spans = rows(count), readable(count)
        made = [message(messages("trace").Span, row) for row in plain]
        cases = {
            "OpenTelemetry SDK": lambda: sdk(address, spans),
            "OtlpSink, rows": lambda: asyncio.run(ours(address, plain, exporter=False)),
            "OtlpSink, messages": lambda: asyncio.run(ours(address, made, exporter=False)),
            "Exporter, OtlpSink, rows": lambda: asyncio.run(ours(address, plain, exporter=True)),
            "Exporter, OtlpSink, messages": lambda: asyncio.run(ours(address, made, exporter=True)),
        }
        found: dict[str, list[float]] = {name: [] for name in cases}
        for run in range(runs + 1):  # the first one warms up
            for name, case in cases.items():
                rate = count / case()
                if run:
                    found[name].append(rate)
    finally:
        server.terminate()
        server.wait()
    return found


def main() -> None:
    """Print the medians and what they are of the SDK's."""
    found = measure()
    base = statistics.median(found["OpenTelemetry SDK"])
    for name, rates in found.items():
        median = statistics.median(rates)
        print(f"{name:30} {median:>10,.0f} spans/s  {median / base:5.2f} x the SDK")
    print(json.dumps(found))


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
