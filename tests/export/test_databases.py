"""Kafka and PostgreSQL behind an exporter: outages under load, servers that are killed, records that are poison."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from itertools import count

import pytest
from kafka_tools import create, read
from outage_kit import LIMIT, PATIENCE, arrived, config, drained, outage

import batchqueue_async as bq
from batchqueue_async.sinks.kafka import KafkaSink
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.testing import FaultProxy

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(6 * LIMIT)]

_names = count()


@pytest.fixture
def name():
    return f"exported{next(_names)}"


def identified(messages):
    return [(json.loads(message.value)["id"], dict(message.headers)["bq-key"]) for message in messages]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def grown(exporter, name):
    before = getattr(exporter.stats(), name)
    await until(lambda: getattr(exporter.stats(), name) > before)


def in_postgres(postgres, name):
    return list(map(int, postgres.sql(f"SELECT id FROM {name}")))


@pytest.fixture
async def kafka_proxy(kafka):
    proxy = FaultProxy(kafka.proxied_address)
    proxy.port = kafka.proxy_port  # where the broker says that it is
    async with proxy:
        yield proxy


class TestOutage:
    @pytest.mark.parametrize("path", [None, "queue"], ids=["memory", "durable"])
    async def test_kafka(self, kafka, kafka_proxy, name, path, tmp_path):
        sink = KafkaSink(kafka_proxy.address, name, timeout=PATIENCE, connect_timeout=PATIENCE)
        result = await outage(sink, kafka_proxy, path=path and tmp_path / path)
        result.check()
        found = identified(await read(kafka, name))
        # The process lived: what its sends gave up was never sent twice.
        assert arrived(result.count, [number for number, _ in found], found) == 0

    async def test_kafka_in_order(self, kafka, kafka_proxy, name):
        await create(kafka, name, 3)
        sink = KafkaSink(kafka_proxy.address, name, key="k", timeout=PATIENCE, connect_timeout=PATIENCE)
        order = {"ordering": "key", "key": lambda record: record["k"]}
        result = await outage(sink, kafka_proxy, lambda number: {"id": number, "k": f"k{number % 97}"}, **order)
        result.check()
        by_key = defaultdict(list)
        for message in await read(kafka, name):
            by_key[message.key].append(json.loads(message.value)["id"])
        assert {key: numbers == sorted(numbers) for key, numbers in by_key.items()} == dict.fromkeys(by_key, True)
        assert arrived(result.count, [number for numbers in by_key.values() for number in numbers]) == 0

    @pytest.mark.parametrize("options", [{}, {"key_column": "key"}], ids=["ranges", "column"])
    async def test_postgres_exactly_once(self, postgres, name, options):
        async with FaultProxy(f"127.0.0.1:{postgres.port}") as proxy:
            dsn = postgres.dsn_at(proxy.port)
            sink = PostgresSink(dsn, name, timeout=PATIENCE, connect_timeout=PATIENCE, **options)
            result = await outage(sink, proxy)
        result.check()
        assert arrived(result.count, in_postgres(postgres, name)) == 0


class TestServersAreKilled:
    async def under_load(self, sink, server, kills=2):
        """Send records all the time while the server is killed and comes back; how many were sent."""
        numbers = count()
        over = asyncio.Event()
        given_up = []

        async def produce():
            while not over.is_set():
                await exporter.consume([{"id": next(numbers)} for _ in range(10)])
                await asyncio.sleep(0.01)

        policy = config(on_dead_letter=lambda records, reason: given_up.append((len(records), reason)))
        async with bq.Exporter(sink, policy) as exporter, asyncio.TaskGroup() as group:
            group.create_task(produce())
            for _ in range(kills):
                await grown(exporter, "delivered")
                await asyncio.to_thread(server.kill)
                await grown(exporter, "retries")
                await asyncio.to_thread(server.start)
            over.set()
            await drained(exporter)
            stats = exporter.stats()
        assert given_up == []
        assert (stats.accepted, stats.dead_lettered, stats.dropped_after) == (stats.delivered, 0, 0)
        return next(numbers)

    async def test_kafka(self, kafka, name):
        sent = await self.under_load(KafkaSink(kafka.address, name, timeout=2.0, connect_timeout=5.0), kafka)
        found = identified(await read(kafka, name))
        arrived(sent, [number for number, _ in found], found)

    async def test_postgres(self, postgres, name):
        sent = await self.under_load(PostgresSink(postgres.dsn, name, timeout=5.0, connect_timeout=5.0), postgres)
        assert arrived(sent, in_postgres(postgres, name)) == 0


class TestPoison:
    @pytest.fixture
    def dead(self):
        return []

    def config(self, dead):
        return config(on_dead_letter=lambda records, reason: dead.append(([each["id"] for each in records], reason)))

    async def test_kafka(self, kafka, name, dead):
        await create(kafka, name, **{"max.message.bytes": "2000"})
        batch = [{"id": number, "text": "x" * (5_000 if number == 7 else 50)} for number in range(50)]
        async with bq.Exporter(KafkaSink(kafka.address, name), self.config(dead)) as exporter:
            await exporter.consume(batch)
            await exporter.flush(timeout=LIMIT)
            assert exporter.stats().breaker_opens == 0
        ((numbers, reason),) = dead
        assert numbers == [7]
        assert "MessageSizeTooLargeError" in reason
        arrived(50, [7, *(number for number, _ in identified(await read(kafka, name)))])

    async def test_postgres(self, postgres, name, dead):
        postgres.sql(f"CREATE TABLE {name} (id bigint CHECK (id <> 7))")
        async with bq.Exporter(PostgresSink(postgres.dsn, name), self.config(dead)) as exporter:
            await exporter.consume([{"id": number} for number in range(50)])
            await exporter.flush(timeout=LIMIT)
            assert exporter.stats().breaker_opens == 0
        ((numbers, reason),) = dead
        assert numbers == [7]
        assert "CheckViolationError" in reason
        assert arrived(50, [7, *in_postgres(postgres, name)]) == 0


class TestRefusedCredentials:
    async def test_ex_10_a_wrong_password_pauses_and_drops_nothing(self, postgres, kafka, name, tmp_path):
        password = tmp_path / "password"
        sinks = [
            (PostgresSink(postgres.dsn, name, password=f"file:{password}"), postgres.password),
            (KafkaSink(kafka.sasl_address, name, user="tester", password=f"file:{password}"), "right-password"),
        ]
        for sink, right in sinks:
            password.write_text("wrong")
            async with bq.Exporter(sink, config()) as exporter:
                await exporter.consume([{"id": 1}])
                await until(lambda: exporter.stats().paused)
                password.write_text(right)
                await exporter.flush(timeout=LIMIT)
                assert (exporter.stats().delivered, exporter.stats().dead_lettered) == (1, 0)
