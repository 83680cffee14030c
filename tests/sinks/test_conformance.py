"""Every sink of ours keeps to every rule of `check_sink`, against its real destination."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from datetime import UTC, datetime

import aio_pika
import msgspec
import nats
import pytest
import redis.asyncio
from kafka_tools import create
from kafka_tools import read as read_topic
from nats.js.api import StreamConfig

from batchqueue_async.sinks.amqp import AmqpSink
from batchqueue_async.sinks.clickhouse import ClickHouseSink
from batchqueue_async.sinks.grpc import GrpcSink
from batchqueue_async.sinks.http import HttpSink
from batchqueue_async.sinks.http.remote_write import RemoteWrite
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.kafka import KafkaSink
from batchqueue_async.sinks.memory import MemorySink
from batchqueue_async.sinks.nats import NatsSink
from batchqueue_async.sinks.opensearch import OpenSearchSink
from batchqueue_async.sinks.otlp import OtlpHttpSink, OtlpSink
from batchqueue_async.sinks.otlp.request import SIGNALS
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.sinks.redis import RedisSink
from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.testing import check_sink

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(300)]

NOWHERE = "127.0.0.1:1"
_names = itertools.count()


@pytest.fixture
def name():
    return f"conforming{next(_names)}"


def odd(number):
    """A record that has no form anywhere."""
    return {"id": number, "odd": object()}


async def test_memory():
    sink = MemorySink()

    async def read():
        return sink.records

    await check_sink(lambda: sink, read=read)


# --- files


async def test_json_lines_in_a_file(tmp_path):
    path = tmp_path / "out.jsonl"

    async def read():
        return path.read_text().splitlines() if path.exists() else []

    def away():
        (tmp_path / "file").touch()
        return JsonLinesSink(tmp_path / "file" / "out.jsonl")

    rules = ("shape", "life", "sends", "records", "cancelling", "away")
    await check_sink(lambda: JsonLinesSink(path), read=read, bad=odd, away=away, rules=rules)


async def test_json_lines_in_a_directory(tmp_path):
    async def read():
        return [
            line
            for path in tmp_path.glob("out/*/*.jsonl")
            if not path.parent.name.startswith(".")
            for line in path.read_text().splitlines()
        ]

    await check_sink(lambda: JsonLinesSink(tmp_path / "out"), read=read, rules=["staging"])


async def test_sqlite(tmp_path):
    import sqlite3

    async def read():
        db = sqlite3.connect(tmp_path / "out.db")
        try:
            there = db.execute("select 1 from sqlite_master where name = 'rows'").fetchall()
            return db.execute("select id from rows").fetchall() if there else []
        finally:
            db.close()

    def away():
        (tmp_path / "file").touch()
        return SqliteSink(tmp_path / "file" / "out.db")

    await check_sink(lambda: SqliteSink(tmp_path / "out.db"), read=read, bad=odd, away=away)


async def test_parquet(tmp_path):
    pytest.importorskip("obstore")
    import pyarrow.parquet as pq

    from batchqueue_async.sinks.parquet import ParquetSink

    async def read():
        return [row for path in (tmp_path / "rows").glob("*.parquet") for row in pq.read_table(path).to_pylist()]

    def away():
        return ParquetSink(
            "s3://lake/rows",
            options={
                "endpoint": f"http://{NOWHERE}",
                "access_key_id": "key",
                "secret_access_key": "secret",
                "region": "us-east-1",
                "client_options": {"allow_http": True},
                "retry_config": {"max_retries": 0},
            },
        )

    await check_sink(
        lambda: ParquetSink(tmp_path / "rows", max_seconds=0.01), read=read, bad=odd, away=away, timeout=60
    )


@pytest.mark.filterwarnings("ignore")
async def test_delta(tmp_path):
    deltalake = pytest.importorskip("deltalake")
    from batchqueue_async.sinks.delta import DeltaSink

    uri = str(tmp_path / "table")

    async def read():
        there = deltalake.DeltaTable.is_deltatable(uri)
        return deltalake.DeltaTable(uri).to_pyarrow_table().to_pylist() if there else []

    await check_sink(lambda: DeltaSink(uri), read=read, bad=lambda number: {"id": "text", "n": number}, timeout=60)


@pytest.mark.filterwarnings("ignore")
async def test_iceberg(tmp_path):
    pytest.importorskip("pyiceberg")
    pytest.importorskip("sqlalchemy")
    from pyiceberg.catalog import load_catalog

    from batchqueue_async.sinks.iceberg import IcebergSink

    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}"}

    async def read():
        found = load_catalog("default", **catalog)
        there = found.table_exists("lake.rows")
        return found.load_table("lake.rows").scan().to_arrow().to_pylist() if there else []

    def bad(number):
        return {"id": "text", "n": number}

    await check_sink(lambda: IcebergSink("lake.rows", catalog=catalog), read=read, bad=bad, timeout=60)


# --- databases


@pytest.mark.parametrize("options", [{}, {"upsert_on": ("id",)}], ids=["ledger", "upsert"])
async def test_postgres(postgres, name, options):
    async def read():
        there = postgres.sql(f"SELECT to_regclass('{name}') IS NOT NULL") == ["t"]
        return postgres.sql(f"SELECT id FROM {name}") if there else []

    await check_sink(
        lambda: PostgresSink(postgres.dsn, name, **options),
        read=read,
        bad=lambda number: {"id": number + 0.5},
        away=lambda: PostgresSink(f"postgresql://tester:x@{NOWHERE}/tests", name, **options),
    )


async def test_postgres_with_keys_in_a_column(postgres, name):
    async def read():
        there = postgres.sql(f"SELECT to_regclass('{name}') IS NOT NULL") == ["t"]
        return postgres.sql(f"SELECT id FROM {name}") if there else []

    def make():
        return PostgresSink(postgres.dsn, name, key_column="key")

    # Sends without keys are for records that bring one.
    await check_sink(make, read=read, rules=["shape", "keys"])
    await check_sink(make, record=lambda number: {"id": number, "key": f"k{number}"}, read=read, bad=odd)


# --- HTTP


@pytest.mark.parametrize("options", [{}, {"format": "ndjson", "compression": "gzip"}, {"compression": "zstd"}], ids=str)
async def test_http(http_server, options):
    def content(request):
        how = options.get("compression")
        if how == "zstd":
            cramjam = pytest.importorskip("cramjam")
            return bytes(cramjam.zstd.decompress(request.body))
        return gzip.decompress(request.body) if how else request.body

    async def read():
        if options.get("format") == "ndjson":
            return [line for each in http_server.received() for line in content(each).splitlines()]
        return [record for each in http_server.received() for record in json.loads(content(each))]

    await check_sink(
        lambda: HttpSink(f"{http_server.url}/rows", **options),
        read=read,
        bad=odd,
        away=lambda: HttpSink(f"http://{NOWHERE}/rows", **options),
    )


async def test_loki(http_server):
    async def read():
        pushed = [json.loads(each.body)["streams"] for each in http_server.received()]
        return [value for streams in pushed for stream in streams for value in stream["values"]]

    await check_sink(
        lambda: HttpSink(f"{http_server.url}/loki/api/v1/push", format="loki"),
        record=lambda number: {"line": f"line {number}"},
        bad=lambda number: {"line": "?", "labels": number},
        read=read,
        away=lambda: HttpSink(f"http://{NOWHERE}/loki/api/v1/push", format="loki"),
    )


async def test_remote_write(prometheus, name):
    now = int(time.time())

    def record(number):
        return {"name": name, "labels": {"n": number}, "value": number, "timestamp": now}

    async def read():
        return [labels["n"] for labels, _ in prometheus.samples(f"{name}[5m]")]

    await check_sink(
        lambda: HttpSink(f"http://{prometheus.address}/api/v1/write", format=RemoteWrite()),
        record=record,
        bad=lambda number: record(number) | {"value": "much"},
        read=read,
        away=lambda: HttpSink(f"http://{NOWHERE}/api/v1/write", format=RemoteWrite()),
    )


async def test_clickhouse(clickhouse, name):
    clickhouse.sql(
        f"CREATE TABLE {name} (id UInt64) ENGINE = MergeTree ORDER BY id "
        "SETTINGS non_replicated_deduplication_window = 1000"
    )

    async def read():
        return clickhouse.rows(name, "id")

    await check_sink(
        lambda: ClickHouseSink(clickhouse.url, name),
        read=read,
        bad=lambda number: {"id": 2**64 + number},
        away=lambda: ClickHouseSink(f"http://{NOWHERE}", name),
    )


async def test_clickhouse_of_2018(clickhouse_server, name):
    clickhouse_server.sql(f"CREATE TABLE {name} (id UInt64) ENGINE = MergeTree ORDER BY id")

    async def read():
        return clickhouse_server.rows(name, "id")

    await check_sink(
        lambda: ClickHouseSink(clickhouse_server.url, name, compression="gzip"),
        read=read,
        bad=lambda number: {"id": 2**64 + number},
        away=lambda: ClickHouseSink(f"http://{NOWHERE}", name),
    )


@pytest.mark.parametrize("options", [{}, {"id": "id"}, {"operation": "create", "compression": "gzip"}], ids=str)
async def test_opensearch(opensearch, name, options):
    opensearch.ask("PUT", f"/{name}", {"mappings": {"properties": {"id": {"type": "long"}}}})

    async def read():
        return [document["id"] for document in opensearch.documents(name).values()]

    await check_sink(
        lambda: OpenSearchSink(opensearch.url, index=name, **options),
        read=read,
        bad=lambda number: {"id": f"{number} is no number"},
        away=lambda: OpenSearchSink(f"http://{NOWHERE}", index=name, **options),
        timeout=90,
    )


# --- OTLP and gRPC


def otlp_record(signal):
    def record(number):
        if signal == "metrics":
            return {"name": "up", "value": number, "timestamp": datetime.now(UTC)}
        return {"name": f"span {number}"} if signal == "traces" else {"body": f"line {number}"}

    return record


def otlp_records(signal, requests):
    found = []
    for content in requests:
        message = SIGNALS[signal].request().FromString(content)
        for resource in getattr(message, SIGNALS[signal].resources):
            for scope in getattr(resource, SIGNALS[signal].scopes):
                for record in getattr(scope, SIGNALS[signal].records):
                    found += record.gauge.data_points if signal == "metrics" else [record]
    return found


@pytest.mark.parametrize("signal", SIGNALS)
async def test_otlp(grpc_server, signal):
    async def read():
        return otlp_records(signal, [call.content for call in grpc_server.received()])

    await check_sink(
        lambda: OtlpSink(grpc_server.url, signal=signal),
        record=otlp_record(signal),
        bad=lambda number: {"nonsense": number},
        read=read,
        away=lambda: OtlpSink(f"http://{NOWHERE}", signal=signal, timeout=2.0),
    )


@pytest.mark.parametrize("signal", SIGNALS)
async def test_otlp_over_http(http_server, signal):
    http_server.rules(status=200)

    async def read():
        return otlp_records(signal, [gzip.decompress(each.body) for each in http_server.received()])

    await check_sink(
        lambda: OtlpHttpSink(http_server.url, signal=signal, compression="gzip"),
        record=otlp_record(signal),
        bad=lambda number: {"nonsense": number},
        read=read,
        away=lambda: OtlpHttpSink(f"http://{NOWHERE}", signal=signal),
    )


async def test_grpc(grpc_server):
    def make(url):
        return GrpcSink(url, method="/test.Store/Put", request=b"\n".join, timeout=2.0)

    async def read():
        return [line for call in grpc_server.received() for line in call.content.split(b"\n")]

    await check_sink(
        lambda: make(grpc_server.url),
        record=lambda number: b"%d" % number,
        read=read,
        away=lambda: make(f"http://{NOWHERE}"),
    )


# --- brokers


async def test_kafka(kafka, name):
    await create(kafka, name, partitions=2)

    async def read():
        return [message.value for message in await read_topic(kafka, name)]

    await check_sink(
        lambda: KafkaSink(kafka.address, name),
        read=read,
        bad=odd,
        away=lambda: KafkaSink(NOWHERE, name, timeout=2.0, connect_timeout=1.0),
        timeout=90,
    )


async def test_redis(redis_server, name):
    async def read():
        client = redis.asyncio.Redis(port=redis_server.port)
        try:
            return [entry[b"data"] for _, entry in await client.xrange(name)]
        finally:
            await client.aclose()

    await check_sink(
        lambda: RedisSink(f"redis://{redis_server.address}/0", stream=name),
        read=read,
        bad=odd,
        away=lambda: RedisSink(f"redis://{NOWHERE}/0", stream=name),
    )


async def test_nats(nats_server, name):
    client = await nats.connect(f"nats://{nats_server.address}")
    stream = client.jetstream()
    await stream.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"]))

    async def read():
        count = (await stream.stream_info(name)).state.messages
        return [(await stream.get_msg(name, number + 1)).data for number in range(count)]

    try:
        await check_sink(
            lambda: NatsSink(f"nats://{nats_server.address}", subject=f"{name}.rows"),
            read=read,
            bad=odd,
            away=lambda: NatsSink(f"nats://{NOWHERE}", subject=f"{name}.rows"),
        )
    finally:
        await client.close()


async def test_rabbitmq(rabbit_server, name):
    connection = await aio_pika.connect(f"amqp://{rabbit_server.address}/")
    channel = await connection.channel()
    queue = await channel.declare_queue(name, durable=True)
    found = []

    async def read():  # who reads takes it
        while message := await queue.get(no_ack=True, fail=False):
            found.append(msgspec.json.decode(message.body))
        return found

    try:
        await check_sink(
            lambda: AmqpSink(f"amqp://{rabbit_server.address}/", queue=name),
            read=read,
            bad=odd,
            away=lambda: AmqpSink(f"amqp://{NOWHERE}/", queue=name),
        )
    finally:
        await queue.delete(if_unused=False, if_empty=False)
        await connection.close()


def test_every_sink_is_checked():
    """A sink that is added to the package has a test here."""
    import ast
    from pathlib import Path

    import batchqueue_async.sinks as package

    classes = set()
    for path in Path(package.__file__).parent.rglob("*.py"):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.ClassDef) and each.name.endswith("Sink") and path.name != "base.py":
                classes.add(each.name)
    classes -= {"CommitSink", "MessageSink"}  # what some have in common
    text = Path(__file__).read_text()
    assert [name for name in sorted(classes) if f"{name}(" not in text] == []
