"""The quick starts with servers, against real ones; the others run with all pages."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from kafka_tools import create, read
from test_docs import ROOT

from batchqueue_async.sinks.otlp.request import SIGNALS

PAGES = ROOT / "docs" / "quick-starts"
PATIENCE = 90.0


def program(name, directory):
    """Every block of a page as one program, those that a page's own test leaves out as well."""
    text = (PAGES / name).read_text()
    blocks = [part.split("\n", 1)[1] for part in text.split("```python")[1:]]
    path = directory / "quick_start.py"
    path.write_text("\n".join(block.split("```", 1)[0] for block in blocks))
    return [sys.executable, "-W", "error", str(path)]


async def produce(server, topic, count):
    from aiokafka import AIOKafkaProducer

    async with AIOKafkaProducer(bootstrap_servers=server.address) as producer:
        for number in range(count):
            await producer.send(topic, f"m{number}".encode())


def test_kafka_to_postgresql(kafka, postgres, tmp_path):
    postgres.sql("DROP TABLE IF EXISTS events")
    asyncio.run(create(kafka, "quick-start"))
    asyncio.run(create(kafka, "quick-start.dead"))
    asyncio.run(produce(kafka, "quick-start", 200))
    environ = os.environ | {"BROKERS": kafka.address, "TOPIC": "quick-start", "DATABASE_URL": postgres.dsn}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(program("kafka-to-postgresql.md", tmp_path), cwd=tmp_path, env=environ, stderr=log)
    try:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if postgres.sql("SELECT count(*) FROM pg_tables WHERE tablename = 'events'") == ["1"]:
                found = postgres.sql("SELECT count(*), count(DISTINCT body) FROM events")
                if found == ["200|200"]:
                    break
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    assert found == ["200|200"]
    assert len(asyncio.run(read(kafka, "quick-start"))) == 200


def test_otlp(grpc_server, tmp_path):
    command = program("otlp.md", tmp_path)
    environ = os.environ | {"OTLP_ENDPOINT": grpc_server.url}
    grpc_server.stop()
    away = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert away.stdout == "delivered 0, on disk for the next run: 100\n"
    grpc_server.start()
    there = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ | {"DRAIN": "60"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert there.stdout == "delivered 200, on disk for the next run: 0\n"
    requests = [SIGNALS["traces"].request().FromString(call.content) for call in grpc_server.received()]
    spans = [span for request in requests for span in request.resource_spans[0].scope_spans[0].spans]
    assert len({span.span_id for span in spans}) == len(spans) == 200


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_the_index_and_the_landing_page_lead_to_each(page):
    if page.stem != "index":
        assert f"\n{page.stem}\n" in (PAGES / "index.md").read_text()
        assert f":link: quick-starts/{page.stem}\n" in (ROOT / "docs" / "index.md").read_text()
