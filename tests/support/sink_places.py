"""Each network sink's destination as a scenario needs it: its sink, its records, what arrived; and load on it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import aio_pika
import nats
import redis.asyncio
from kafka_tools import create
from kafka_tools import read as read_topic
from nats.js.api import StreamConfig
from outage_kit import LIMIT, config, until

import batchqueue_async as bq
from batchqueue_async.sinks.amqp import AmqpSink
from batchqueue_async.sinks.clickhouse import ClickHouseSink
from batchqueue_async.sinks.grpc import GrpcSink
from batchqueue_async.sinks.http import HttpSink
from batchqueue_async.sinks.http.formats import JsonArray
from batchqueue_async.sinks.http.remote_write import RemoteWrite
from batchqueue_async.sinks.kafka import KafkaSink
from batchqueue_async.sinks.nats import NatsSink
from batchqueue_async.sinks.opensearch import OpenSearchSink
from batchqueue_async.sinks.otlp import OtlpHttpSink, OtlpSink
from batchqueue_async.sinks.otlp.request import SIGNALS
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.sinks.redis import RedisSink
from batchqueue_async.testing import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchqueue_async.export.stats import ExporterStats

QUICK = {"timeout": 1.0, "connect_timeout": 0.5}
PATIENT = {"timeout": 15.0}
"""For what must not time out on a slow machine."""
_names = itertools.count()


def new_name() -> str:
    """A name for a table, topic or queue that no other test has."""
    return f"scenario{next(_names)}"


class Place:
    """A destination: its sink, a record of a number, one that it refuses, and the numbers that arrived.

    Attributes:
        once: whether a repetition has no effect.
    """

    fixture = ""
    once = False

    def __init__(self, server: Any, name: str) -> None:
        self.server = server
        self.name = name

    @contextlib.asynccontextmanager
    async def ready(self):
        yield

    @contextlib.asynccontextmanager
    async def proxied(self):
        async with FaultProxy(self.server.address) as proxy:
            yield proxy

    @property
    def address(self) -> str:
        return self.server.address

    def record(self, number: int) -> Any:
        return {"id": number}

    def bad(self, number: int) -> Any:
        return {"id": number, "odd": object()}

    def sink(self, address: str, **options: Any) -> Any:
        raise NotImplementedError

    async def numbers(self) -> list[int]:
        raise NotImplementedError


class Http(Place):
    fixture = "http_server"

    def sink(self, address, **options):
        return HttpSink(f"http://{address}/", format=JsonArray(key_field="key"), **(QUICK | options))

    async def numbers(self):
        return [row["id"] for request in self.server.received() for row in json.loads(request.body)]


def spans(contents):
    found = map(SIGNALS["traces"].request().FromString, contents)
    return [
        int(span.name)
        for request in found
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


class Otlp(Place):
    fixture = "grpc_server"

    def record(self, number):
        return {"name": str(number)}

    def bad(self, number):
        return {"nonsense": number}

    def sink(self, address, **options):
        return OtlpSink(f"http://{address}", **({"timeout": 1.0} | options))

    async def numbers(self):
        return spans(call.content for call in self.server.received())


class OtlpOverHttp(Otlp):
    fixture = "http_server"

    @contextlib.asynccontextmanager
    async def ready(self):
        self.server.rules(status=200)
        yield

    def sink(self, address, **options):
        return OtlpHttpSink(f"http://{address}", signal="traces", **(QUICK | options))

    async def numbers(self):
        return spans(request.body for request in self.server.received())


class Grpc(Place):
    fixture = "grpc_server"

    def record(self, number):
        return b"%d" % number

    def bad(self, number):
        return None

    def sink(self, address, **options):
        return GrpcSink(
            f"http://{address}", method="/test.Store/Put", request=b"\n".join, **({"timeout": 1.0} | options)
        )

    async def numbers(self):
        return [int(line) for call in self.server.received() for line in call.content.split(b"\n")]


class Prometheus(Place):
    fixture = "prometheus"
    once = True

    def record(self, number):
        self.now = getattr(self, "now", int(time.time()))
        return {"name": self.name, "labels": {"n": number}, "value": number, "timestamp": self.now}

    def bad(self, number):
        return self.record(number) | {"value": "much"}

    def sink(self, address, **options):
        return HttpSink(f"http://{address}/api/v1/write", format=RemoteWrite(), **(QUICK | options))

    async def numbers(self):
        return [int(labels["n"]) for labels, values in self.server.samples(f"{self.name}[15m]") for _ in values]


class Redis(Place):
    fixture = "redis_server"

    @contextlib.asynccontextmanager
    async def ready(self):
        self.client = redis.asyncio.Redis(port=self.server.port)
        try:
            yield
        finally:
            await self.client.delete(self.name)
            await self.client.aclose()

    def sink(self, address, **options):
        return RedisSink(f"redis://{address}/0", stream=self.name, **(QUICK | options))

    async def numbers(self):
        return [json.loads(entry[b"data"])["id"] for _, entry in await self.client.xrange(self.name)]


class Nats(Place):
    fixture = "nats_server"
    once = True

    @contextlib.asynccontextmanager
    async def ready(self):
        client = await nats.connect(f"nats://{self.server.address}")
        self.stream = client.jetstream()
        await self.stream.add_stream(StreamConfig(name=self.name, subjects=[self.name]))
        try:
            yield
        finally:
            await self.stream.delete_stream(self.name)
            await client.close()

    def sink(self, address, **options):
        return NatsSink(f"nats://{address}", subject=self.name, **(QUICK | options))

    async def numbers(self):
        count = (await self.stream.stream_info(self.name)).state.messages
        found = [await self.stream.get_msg(self.name, number + 1) for number in range(count)]
        return [json.loads(message.data)["id"] for message in found]


class Rabbit(Place):
    fixture = "rabbit_server"

    @contextlib.asynccontextmanager
    async def ready(self):
        connection = await aio_pika.connect(f"amqp://{self.server.address}/")
        self.queue = await (await connection.channel()).declare_queue(self.name, durable=True)
        try:
            yield
        finally:
            await self.queue.delete(if_unused=False, if_empty=False)
            await connection.close()

    def sink(self, address, **options):
        return AmqpSink(f"amqp://{address}/", queue=self.name, **(QUICK | options))

    async def numbers(self):
        found = []
        while message := await self.queue.get(no_ack=True, fail=False):
            found.append(json.loads(message.body)["id"])
        return found


class Kafka(Place):
    fixture = "kafka"
    once = True  # as long as the process lives

    @contextlib.asynccontextmanager
    async def ready(self):
        await create(self.server, self.name, partitions=2)
        yield

    @contextlib.asynccontextmanager
    async def proxied(self):
        proxy = FaultProxy(self.server.proxied_address)
        proxy.port = self.server.proxy_port  # where the broker says that it is
        async with proxy:
            yield proxy

    def sink(self, address, **options):
        return KafkaSink(address, self.name, **(QUICK | options))

    async def numbers(self):
        return [json.loads(message.value)["id"] for message in await read_topic(self.server, self.name)]


class Postgres(Place):
    fixture = "postgres"
    once = True

    @contextlib.asynccontextmanager
    async def ready(self):
        self.server.sql(f"CREATE TABLE {self.name} (id bigint)")
        yield
        self.server.sql(f"DROP TABLE {self.name}")

    @contextlib.asynccontextmanager
    async def proxied(self):
        async with FaultProxy(self.address) as proxy:
            yield proxy

    @property
    def address(self):
        return f"127.0.0.1:{self.server.port}"

    def bad(self, number):
        return {"id": number + 0.5}

    def sink(self, address, **options):
        options = QUICK | options
        return PostgresSink(self.server.dsn_at(int(address.rpartition(":")[2])), self.name, **options)

    async def numbers(self):
        return list(map(int, self.server.sql(f"SELECT id FROM {self.name}")))


class ClickHouse(Place):
    fixture = "clickhouse"
    once = True

    @contextlib.asynccontextmanager
    async def ready(self):
        self.server.sql(
            f"CREATE TABLE {self.name} (id UInt64) ENGINE = MergeTree ORDER BY id "
            "SETTINGS non_replicated_deduplication_window = 10000"
        )
        yield

    def bad(self, number):
        return {"id": 2**64 + number}

    def sink(self, address, **options):
        return ClickHouseSink(f"http://{address}", self.name, **({"timeout": 2.0, "connect_timeout": 0.5} | options))

    async def numbers(self):
        return [int(row["id"]) for row in self.server.rows(self.name)]


class OpenSearch(Place):
    fixture = "opensearch"
    once = True

    @contextlib.asynccontextmanager
    async def ready(self):
        self.server.ask("PUT", f"/{self.name}", {"mappings": {"properties": {"id": {"type": "long"}}}})
        yield

    def bad(self, number):
        return {"id": f"{number} is no number"}

    def sink(self, address, **options):
        return OpenSearchSink(
            f"http://{address}", index=self.name, **({"timeout": 2.0, "connect_timeout": 0.5} | options)
        )

    async def numbers(self):
        return [document["id"] for document in self.server.documents(self.name).values()]


# --- load


async def under_load(
    sink: Any,
    record: Callable[[int], Any],
    trouble: Callable[[bq.Exporter], Awaitable[None]],
    *,
    pace: float = 0.02,
    **changes: Any,
) -> tuple[int, ExporterStats, list[Any]]:
    """Send records all the time while `trouble` lasts; how many, the counts at the end, and the records given up."""
    numbers = itertools.count()
    over = asyncio.Event()
    dead: list[Any] = []

    async def produce() -> None:
        while not over.is_set():
            await exporter.consume([record(next(numbers)) for _ in range(10)])
            await asyncio.sleep(pace)

    options = config(on_dead_letter=lambda records, _: dead.extend(records), **changes)
    async with bq.Exporter(sink, options) as exporter, asyncio.TaskGroup() as group:
        group.create_task(produce())
        await until(lambda: exporter.stats().delivered > 0)
        await trouble(exporter)
        over.set()
        await asyncio.sleep(0.1)
        await exporter.flush(timeout=LIMIT)
        stats = exporter.stats()
    assert (stats.accepted, stats.dropped_after, stats.records) == (stats.delivered + stats.dead_lettered, 0, 0)
    assert stats.dead_lettered == len(dead)
    return next(numbers), stats, dead


def arrived(place: Place, found: list[int], wanted: range | list[int]) -> None:
    times = Counter(found)
    assert sorted(times) == sorted(wanted)
    if place.once:
        assert {number: count for number, count in times.items() if count > 1} == {}


def paused(exporter: bq.Exporter) -> Callable[[], bool]:
    return lambda: exporter.stats().pauses > 0


async def delivered_more(exporter: bq.Exporter) -> None:
    """Wait until something arrives again."""
    before = exporter.stats().delivered
    await until(lambda: exporter.stats().delivered > before)
