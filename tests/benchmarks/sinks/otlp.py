"""OTLP: 500 spans a batch, beside the OpenTelemetry SDK's BatchSpanProcessor with its OTLP exporter.

Each case begins with spans as the program has them (the SDK's `ReadableSpan`, our rows or messages; 8 attributes, an
event) and ends when a server in another process has answered for all. The server reads the requests and does nothing
with them; it is this module as a program.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

import batchqueue_async as bq
from batchqueue_async.sinks.otlp import OtlpSink
from batchqueue_async.sinks.otlp.request import SIGNALS
from batchqueue_async.sinks.otlp.values import message, messages

from .measuring import Comparison, Row, compare

if TYPE_CHECKING:
    from .measuring import Subject

BATCH = 500
TARGET = 3.0
SDK = "OpenTelemetry SDK, BatchSpanProcessor"
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


def spans_as_rows(count: int) -> list[dict[str, Any]]:
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


async def rows(turns: int, batches: int) -> list[Row]:
    """The table's rows."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.sinks.otlp"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    try:
        assert server.stdout is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        count = batches * BATCH
        plain, spans = spans_as_rows(count), readable(count)
        made = [message(messages("trace").Span, row) for row in plain]

        def subject(records: list[Any], *, exporter: bool) -> Subject:
            async def run(batches: int) -> float:
                count = batches * BATCH
                return count / await ours(address, records[:count], exporter=exporter)

            return run

        async def base(batches: int) -> float:
            count = batches * BATCH
            return count / await asyncio.to_thread(sdk, address, spans[:count])

        subjects: dict[str, Subject] = {
            SDK: base,
            "OtlpSink, messages": subject(made, exporter=False),
            "OtlpSink, rows": subject(plain, exporter=False),
            "Exporter, OtlpSink, messages": subject(made, exporter=True),
            "Exporter, OtlpSink, rows": subject(plain, exporter=True),
        }
        comparisons = [Comparison(name, SDK, TARGET) for name in subjects if name != SDK]
        return await compare(subjects, comparisons, turns=turns, batches=batches)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    serve()
