"""Every network sink behind an exporter, against its real server: a flapping line, a slow one, poison.

And what only some servers have, under load: credentials that are rotated, tables that change, refusals for too much.
"""

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
import pytest
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
from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.testing import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchqueue_async.export.stats import ExporterStats

# On one kind of loop: what differs between loops is in the outages, which run on both.
pytestmark = [pytest.mark.real_time(one_loop=True), pytest.mark.timeout(3 * LIMIT)]

QUICK = {"timeout": 1.0, "connect_timeout": 0.5}
PATIENT = {"timeout": 15.0}
"""For what must not time out on a slow machine."""
EVERY = 20
"""Which of the records is poison, where some are."""
_names = itertools.count()


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


PLACES = [Http, Otlp, OtlpOverHttp, Grpc, Prometheus, Redis, Nats, Rabbit, Kafka, Postgres, ClickHouse, OpenSearch]


@pytest.fixture(params=PLACES, ids=lambda place: place.__name__.lower())
async def place(request):
    place = request.param(request.getfixturevalue(request.param.fixture), f"scenario{next(_names)}")
    async with place.ready():
        yield place


async def under_load(
    sink: Any,
    record: Callable[[int], Any],
    trouble: Callable[[bq.Exporter], Awaitable[None]],
    **changes: Any,
) -> tuple[int, ExporterStats, list[Any]]:
    """Send records all the time while `trouble` lasts; how many, the counts at the end, and the records given up."""
    numbers = itertools.count()
    over = asyncio.Event()
    dead: list[Any] = []

    async def produce() -> None:
        while not over.is_set():
            await exporter.consume([record(next(numbers)) for _ in range(10)])
            await asyncio.sleep(0.02)

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


# --- for each of them


async def test_a_line_that_flaps_costs_no_record(place):
    async with place.proxied() as proxy:

        async def flap(exporter):
            for fault in ("refuse", "reset", "half_open") * 3:
                await proxy.switch(fault)
                await asyncio.sleep(0.08)
                await proxy.switch("pass")
                await asyncio.sleep(0.12)
            await proxy.switch("refuse")  # whoever was lucky until now meets one fault
            await until(lambda: sum(exporter.stats().failures.values()) > 0)
            await proxy.switch("pass")

        count, stats, dead = await under_load(place.sink(proxy.address), place.record, flap)
    assert dead == []
    assert stats.retries > 0
    arrived(place, await place.numbers(), range(count))


async def test_a_slow_line_costs_no_record(place):
    async with place.proxied() as proxy:

        async def slow(exporter):
            await proxy.switch("delay", seconds=0.03)
            await asyncio.sleep(0.5)
            await proxy.switch("limit", rate=200_000.0)
            await asyncio.sleep(0.5)
            await proxy.switch("pass")

        count, _, dead = await under_load(place.sink(proxy.address), place.record, slow)
    assert dead == []
    arrived(place, await place.numbers(), range(count))


async def test_poison_costs_the_poisoned_records_alone(place):
    def record(number):
        return place.bad(number) if number % EVERY == 0 and number else place.record(number)

    async def wait(exporter):
        await until(lambda: exporter.stats().dead_lettered > 2)

    count, stats, dead = await under_load(place.sink(place.address, **PATIENT), record, wait)
    poisoned = [number for number in range(1, count) if number % EVERY == 0]
    assert stats.dead_lettered == len(dead) == len(poisoned)
    assert stats.breaker_opens == 0
    arrived(place, await place.numbers(), [number for number in range(count) if number not in poisoned])


# --- credentials that are rotated under load


def paused(exporter: bq.Exporter) -> Callable[[], bool]:
    return lambda: exporter.stats().pauses > 0


async def test_http_with_a_token_that_is_rotated(http_server, tmp_path):
    place, token = Http(http_server, "x"), tmp_path / "token"
    token.write_text("one")
    http_server.rules(token="one")

    async def rotate(exporter):
        http_server.rules(token="two")
        await until(paused(exporter))
        token.write_text("two")
        delivered = exporter.stats().delivered
        await until(lambda: exporter.stats().delivered > delivered)

    sink = place.sink(http_server.address, token=f"file:{token}", **PATIENT)
    count, stats, dead = await under_load(sink, place.record, rotate)
    assert (dead, stats.breaker_opens) == ([], 0)
    assert stats.failures["auth"] > 0
    arrived(place, await place.numbers(), range(count))


async def test_postgres_with_a_password_that_is_rotated(postgres, tmp_path):
    name, user, secret = f"scenario{next(_names)}", f"rotated{next(_names)}", tmp_path / "password"
    postgres.sql(f"CREATE TABLE {name} (id bigint); CREATE ROLE {user} LOGIN SUPERUSER PASSWORD 'one'")
    secret.write_text("one")
    place = Postgres(postgres, name)

    async def rotate(exporter):
        end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{user}'"
        await asyncio.to_thread(postgres.sql, f"ALTER ROLE {user} PASSWORD 'two'; {end}")
        await until(paused(exporter))
        secret.write_text("two")
        delivered = exporter.stats().delivered
        await until(lambda: exporter.stats().delivered > delivered)

    dsn = f"postgresql://{user}@127.0.0.1:{postgres.port}/tests"
    sink = PostgresSink(dsn, name, password=f"file:{secret}", **QUICK)
    try:
        count, stats, dead = await under_load(sink, place.record, rotate)
        assert dead == []
        assert stats.failures["auth"] > 0
        arrived(place, await place.numbers(), range(count))
    finally:
        postgres.sql(f"DROP TABLE {name}; DROP OWNED BY {user}; DROP ROLE {user}")


async def test_redis_with_a_password_that_is_rotated(redis_server, tmp_path):
    place, secret = Redis(redis_server, f"scenario{next(_names)}"), tmp_path / "password"
    user = place.name
    secret.write_text("one")
    async with place.ready():
        rights = {"enabled": True, "keys": ["*"], "commands": ["+xadd"]}
        await place.client.acl_setuser(user, passwords=["+one"], **rights)

        async def rotate(exporter):
            await place.client.acl_setuser(user, passwords=["+two", "-one"], **rights)
            await place.client.execute_command("CLIENT", "KILL", "USER", user)
            await until(paused(exporter))
            secret.write_text("two")
            delivered = exporter.stats().delivered
            await until(lambda: exporter.stats().delivered > delivered)

        sink = place.sink(redis_server.address, user=user, password=f"file:{secret}")
        count, stats, dead = await under_load(sink, place.record, rotate)
        await place.client.acl_deluser(user)
        assert dead == []
        assert stats.failures["auth"] > 0
        arrived(place, await place.numbers(), range(count))


# --- tables that change under load


async def test_a_postgres_column_that_becomes_text_and_one_that_comes_and_goes(postgres):
    place = Postgres(postgres, f"scenario{next(_names)}")
    async with place.ready():

        async def change(exporter):
            for statement in (
                "ADD COLUMN source text NOT NULL DEFAULT 'here'",
                "ALTER COLUMN id TYPE numeric",
                "DROP COLUMN source",
                "ALTER COLUMN id TYPE bigint",
            ):
                # Beside the loop: the statement waits for the lock of a transaction that only the loop can end.
                await asyncio.to_thread(postgres.sql, f"ALTER TABLE {place.name} {statement}")
                delivered = exporter.stats().delivered
                await until(lambda before=delivered: exporter.stats().delivered > before)

        count, _, dead = await under_load(place.sink(place.address, timeout=10.0), place.record, change)
        assert dead == []
        arrived(place, await place.numbers(), range(count))


async def test_a_sqlite_table_that_gets_a_column_and_is_made_anew(tmp_path):
    import sqlite3

    def ask(*statements):
        db = sqlite3.connect(tmp_path / "out.db", timeout=30.0)
        try:
            with db:
                return [db.execute(statement).fetchall() for statement in statements]
        finally:
            db.close()

    async def change(exporter):
        for statements in (
            ["ALTER TABLE rows ADD COLUMN source TEXT DEFAULT 'here'"],
            ["ALTER TABLE rows RENAME TO old", "CREATE TABLE rows (id NUMERIC)"],
        ):
            await asyncio.to_thread(ask, *statements)
            delivered = exporter.stats().delivered
            await until(lambda before=delivered: exporter.stats().delivered > before)

    count, _, dead = await under_load(SqliteSink(tmp_path / "out.db"), lambda number: {"id": number}, change)
    assert dead == []
    (found,) = ask("SELECT id FROM rows UNION ALL SELECT id FROM old")
    assert sorted(number for (number,) in found) == list(range(count))


async def test_a_clickhouse_column_that_becomes_wider_and_one_that_comes(clickhouse):
    place = ClickHouse(clickhouse, f"scenario{next(_names)}")
    clickhouse.sql(
        f"CREATE TABLE {place.name} (id UInt64, n UInt8 DEFAULT 0) ENGINE = MergeTree ORDER BY id "
        "SETTINGS non_replicated_deduplication_window = 10000"
    )

    async def change(exporter):
        for statement in ("MODIFY COLUMN n UInt32", "ADD COLUMN source String DEFAULT 'here'"):
            await asyncio.to_thread(clickhouse.sql, f"ALTER TABLE {place.name} {statement}")
            delivered = exporter.stats().delivered
            await until(lambda before=delivered: exporter.stats().delivered > before)

    count, _, dead = await under_load(
        place.sink(clickhouse.address), lambda number: {"id": number, "n": number % 200}, change
    )
    assert dead == []
    arrived(place, await place.numbers(), range(count))


async def test_an_opensearch_field_that_is_mapped_meanwhile(opensearch):
    place = OpenSearch(opensearch, f"scenario{next(_names)}")
    mapped: list[bool] = []
    async with place.ready():

        async def change(exporter):
            opensearch.ask("PUT", f"/{place.name}/_mapping", {"properties": {"later": {"type": "keyword"}}})
            mapped.append(True)
            delivered = exporter.stats().delivered
            await until(lambda: exporter.stats().delivered > delivered + 50)

        def record(number):
            return {"id": number, "later": str(number)} if mapped else {"id": number}

        count, _, dead = await under_load(place.sink(opensearch.address), record, change)
        assert dead == []
        arrived(place, await place.numbers(), range(count))


# --- destinations that ask for less, under load


@pytest.mark.parametrize("kind", [Http, OtlpOverHttp, Otlp], ids=lambda kind: kind.__name__.lower())
async def test_throttling_costs_no_record_and_opens_no_breaker(kind, request):
    server = request.getfixturevalue(kind.fixture)
    place = kind(server, "x")
    async with place.ready():

        async def throttle(exporter):
            refused = {"code": "RESOURCE_EXHAUSTED", "retry": 0.05} if kind is Otlp else {"status": 429}
            for _ in range(3):
                server.script(*[refused] * 3)
                before = exporter.stats().failures.get("throttled", 0)
                await until(lambda before=before: exporter.stats().failures.get("throttled", 0) > before)
                await asyncio.sleep(0.1)
            server.script()

        count, stats, dead = await under_load(place.sink(server.address, **PATIENT), place.record, throttle)
        assert (dead, stats.breaker_opens) == ([], 0)
        assert stats.learned_rate is not None
        arrived(place, await place.numbers(), range(count))


async def test_a_redis_that_is_full_is_waited_for(redis_server):
    place = Redis(redis_server, f"scenario{next(_names)}")
    async with place.ready():

        async def fill(exporter):
            await place.client.config_set("maxmemory", "1")
            await until(lambda: sum(exporter.stats().failures.values()) > 0)
            await place.client.config_set("maxmemory", "0")

        try:
            count, _, dead = await under_load(place.sink(redis_server.address), place.record, fill)
        finally:
            await place.client.config_set("maxmemory", "0")
        assert dead == []
        arrived(place, await place.numbers(), range(count))
