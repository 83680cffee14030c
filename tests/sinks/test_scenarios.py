"""Every network sink behind an exporter, against its real server: a flapping line, a slow one, poison.

And what only some servers have, under load: credentials that are rotated, tables that change, refusals for too much.
"""

from __future__ import annotations

import asyncio

import pytest
from outage_kit import LIMIT, until
from sink_places import (
    PATIENT,
    QUICK,
    ClickHouse,
    Grpc,
    Http,
    Kafka,
    Nats,
    OpenSearch,
    Otlp,
    OtlpOverHttp,
    Postgres,
    Prometheus,
    Rabbit,
    Redis,
    arrived,
    new_name,
    paused,
    under_load,
)

from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.sinks.sqlite import SqliteSink

# On one kind of loop: what differs between loops is in the outages, which run on both.
pytestmark = [pytest.mark.real_time(one_loop=True), pytest.mark.timeout(3 * LIMIT)]

EVERY = 20
"""Which of the records is poison, where some are."""

PLACES = [Http, Otlp, OtlpOverHttp, Grpc, Prometheus, Redis, Nats, Rabbit, Kafka, Postgres, ClickHouse, OpenSearch]


@pytest.fixture(params=PLACES, ids=lambda place: place.__name__.lower())
async def place(request):
    place = request.param(request.getfixturevalue(request.param.fixture), new_name())
    async with place.ready():
        yield place


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
    name, user, secret = new_name(), f"user_{new_name()}", tmp_path / "password"
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
    place, secret = Redis(redis_server, new_name()), tmp_path / "password"
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
    place = Postgres(postgres, new_name())
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
    place = ClickHouse(clickhouse, new_name())
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
    place = OpenSearch(opensearch, new_name())
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
    place = Redis(redis_server, new_name())
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
