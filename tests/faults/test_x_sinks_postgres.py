"""Faults of the PostgreSQL sink that must not come back, against a real server."""

# ruff: noqa: DTZ001 - times without a zone are what some columns hold

from __future__ import annotations

import asyncio
import math
import tracemalloc
from datetime import UTC, date, datetime, time
from decimal import Decimal
from itertools import count

import asyncpg
import pytest

import batchqueue_async as bq
from batchqueue_async.sinks.base import Attempt, BatchKey, needs_of
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.sinks.postgres import types as postgres_types
from batchqueue_async.sinks.postgres.ledger import multirange

pytestmark = pytest.mark.real_time
_names = count()


@pytest.fixture
def table(postgres):
    postgres.sql('DROP SCHEMA public CASCADE; DROP SCHEMA IF EXISTS "MyApp" CASCADE; CREATE SCHEMA public')
    postgres.sql("GRANT ALL ON SCHEMA public TO PUBLIC")
    return f"x{next(_names)}"


@pytest.fixture
async def make(postgres, table):
    made = []

    async def make(name=table, dsn=postgres.dsn, **options):
        made.append(PostgresSink(dsn, name, **options))
        await made[-1].open()
        return made[-1]

    yield make
    for sink in made:
        await sink.close()


WAYS = {
    "plain": {},
    "upsert": {"upsert_on": ["id"]},
    "key column": {"key_column": "k"},
}


async def put(sink, batch, start=0):
    return await sink.send_keyed(batch, [f"{sink.table}/{start + at}" for at in range(len(batch))])


# --- values


@pytest.mark.parametrize("options", WAYS.values(), ids=list(WAYS))
async def test_x_1_a_fraction_is_refused_by_a_column_of_whole_numbers(postgres, make, table, options):
    sink = await make(**options)
    await put(sink, [{"id": 1, "v": 0}])
    batch = [{"id": 2, "v": 0.75}, {"id": 3, "v": 5}, {"id": 4, "v": Decimal("7.9")}, {"id": 5, "v": 3.0}]
    result = await put(sink, batch, 1)
    assert list(result.rejected) == [0, 2]
    assert "column 'v' of type bigint would change a float with a fraction" in str(result.rejected[0])
    assert postgres.sql(f"SELECT id, v FROM {table} ORDER BY id") == ["1|0", "3|5", "5|3"]


async def test_x_1_a_fraction_in_a_transaction_is_refused(postgres, make, table):
    sink = await make()
    await sink.send([{"v": 0}])
    transaction = await sink.begin(BatchKey(table, 1))
    assert list((await transaction.send([{"v": 0.75}, {"v": 2}])).rejected) == [0]
    await transaction.commit()
    assert postgres.sql(f"SELECT v FROM {table}") == ["0", "2"]


@pytest.mark.parametrize("options", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("mode", ["widen", "add"])
async def test_x_1_a_column_is_widened_where_that_is_asked_for(postgres, make, table, options, mode):
    sink = await make(schema=mode, **options)
    await put(sink, [{"id": 1, "v": 2**60 + 1}])
    assert (await put(sink, [{"id": 2, "v": 0.1}, {"id": 3, "v": 2**80}], 1)).rejected == {}
    assert postgres.sql(f"SELECT v FROM {table} ORDER BY id") == [str(2**60 + 1), "0.1", str(2**80)]


async def test_x_1_a_column_is_added_where_that_is_asked_for_and_else_not(postgres, make, table):
    strict, add = await make(), await make(schema="add")
    await strict.send([{"a": 1}])
    assert list((await strict.send([{"a": 2, "b": 1.5}])).rejected) == [0]
    assert (await add.send([{"a": 3, "b": 1.5}, {"a": 4}])).rejected == {}
    assert (await strict.send([{"a": 5, "b": 2.5}])).rejected == {}
    assert postgres.sql(f"SELECT * FROM {table} ORDER BY a") == ["1|", "3|1.5", "4|", "5|2.5"]


CHANGED = {
    "bigint": [0.5, Decimal("1.5"), math.nan, "1", 2**64],
    "smallint": [40_000, 0.5],
    "double precision": [2**53 + 1, Decimal("0.1000000000000000000001"), "x"],
    "real": [0.123456789012, 2**25 + 1, 1e300],
    "numeric(6,2)": [0.755, Decimal("1.005"), 12_345.5, Decimal("inf")],
    "date": [datetime(2024, 1, 1, 5), datetime(2024, 1, 1, tzinfo=UTC)],
    "time": [datetime(2024, 1, 1, 5), time(5, tzinfo=UTC)],
    "timestamp": [datetime(2024, 1, 1, tzinfo=UTC)],
    "timestamp(3)": [datetime(2024, 1, 1, 0, 0, 0, 1)],
    "timestamptz": [datetime(2024, 1, 1), date(2024, 1, 1)],
    "varchar(3)": ["abc ", "abcd"],
    "boolean": [1],
    "bigint[]": [[1, 2.5]],
    "jsonb": [{"a": math.nan}, [math.inf]],
    "text": [1, b"x"],
}
KEPT = {
    "bigint": [(5.0, "5"), (True, "1"), (Decimal(7), "7")],
    "double precision": [(3, "3"), (Decimal("0.1"), "0.1"), (math.inf, "Infinity")],
    "real": [(0.1, "0.1"), (0.5, "0.5"), (7, "7")],
    "numeric": [(0.1, "0.1"), (2**70, str(2**70)), (Decimal("1.10"), "1.10")],
    "numeric(6,2)": [(0.75, "0.75"), (Decimal("1.500"), "1.50"), (1234, "1234.00")],
    "date": [(datetime(2024, 1, 1), "2024-01-01")],
    "timestamp": [(date(2024, 1, 1), "2024-01-01 00:00:00")],
    "bigint[]": [([1, None, 2.0], "{1,NULL,2}")],
    "jsonb": [({"a": None}, '{"a": null}')],
}


@pytest.mark.parametrize("kind", CHANGED)
async def test_x_1_no_column_changes_a_value(postgres, make, table, kind):
    postgres.sql(f"CREATE TABLE {table} (id int, v {kind})")
    sink = await make()
    batch = [{"id": at, "v": value} for at, value in enumerate(CHANGED[kind])]
    result = await sink.send([{"id": -1, "v": None}, *batch])
    assert sorted(result.rejected) == list(range(1, len(batch) + 1))
    assert {type(error) for error in result.rejected.values()} == {bq.PermanentError}
    assert postgres.sql(f"SELECT * FROM {table}") == ["-1|"]


@pytest.mark.parametrize("kind", KEPT)
async def test_x_1_values_that_a_column_holds_are_taken(postgres, make, table, kind):
    postgres.sql(f"CREATE TABLE {table} (id int, v {kind})")
    sink = await make()
    assert (await sink.send([{"id": at, "v": value} for at, (value, _) in enumerate(KEPT[kind])])).rejected == {}
    assert postgres.sql(f"SELECT v FROM {table} ORDER BY id") == [shown for _, shown in KEPT[kind]]


@pytest.mark.parametrize("options", WAYS.values(), ids=list(WAYS))
async def test_x_1_a_column_that_becomes_another_type_under_load_gets_the_right_values(postgres, make, table, options):
    sinks = [await make(connections=2, **options) for _ in range(2)]
    numbers = count()
    now = "bigint"
    for kind in ("bigint", "double precision", "numeric", "bigint", "text", "bigint", "numeric(20,3)"):
        for sink in sinks:  # each has connections that know the type of before
            some = [next(numbers) for _ in range(4)]
            results = await asyncio.gather(*(put(sink, [{"id": n, "v": n}], n) for n in some))
            if now != "text":
                assert [result.rejected for result in results] == [{}] * 4
        postgres.sql(f"ALTER TABLE {table} ALTER v TYPE {kind} USING v::{kind}")
        now = kind
    assert postgres.sql(f"SELECT id FROM {table} WHERE v::text::numeric <> id") == []
    assert len(postgres.sql(f"SELECT id FROM {table}")) >= 6 * 8 - 8


async def test_x_1_a_table_that_is_made_anew_with_other_types_gets_the_right_values(postgres, make, table):
    sink = await make()
    await sink.send([{"v": 5}])
    postgres.sql(f"DROP TABLE {table}; CREATE TABLE {table} (v numeric)")
    assert (await sink.send([{"v": 6}])).rejected == {}
    assert postgres.sql(f"SELECT v FROM {table}") == ["6"]


async def test_x_28_a_column_that_saw_only_none_takes_the_type_of_its_first_value(postgres, make, table):
    sink = await make()
    await sink.send([{"v": None}])
    assert (await sink.send([{"v": 1}, {"v": 2}])).rejected == {}
    assert list((await sink.send([{"v": 1.5}])).rejected) == [0]
    assert postgres.sql(f"SELECT v FROM {table} WHERE v > 1") == ["2"]


async def test_x_28_a_schema_with_capitals_is_published_and_discarded(postgres, make, table):
    postgres.sql('CREATE SCHEMA "MyApp"')
    for options in ({"schema": "MyApp"}, {"namespace": "MyApp", "schema": "widen"}):
        sink = await make(**options)
        key = BatchKey(str(options), 1)
        attempt = Attempt(key, 0, "a")
        staged = sink.stage(attempt)
        await staged.open()
        await staged.send([{"a": 2}])
        await staged.close()
        assert await sink.publish(key, [attempt])
        await sink.discard(key)
    assert postgres.sql(f'SELECT a FROM "MyApp".{table}') == ["2", "2"]
    with pytest.raises(bq.ConfigError, match="namespace='b'"):
        PostgresSink("postgresql://x", "t", schema="a", namespace="b")


# --- order


async def test_x_5_the_last_record_of_a_key_wins_whatever_its_columns(postgres, make, table):
    postgres.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v text, x int)")
    sink = await make(upsert_on=["id"])
    batch = [
        {"id": 1, "v": "first"},
        {"id": 1, "v": "second", "x": 2},
        {"id": 2, "x": 7},
        {"id": 1, "v": "third, the last"},
        {"id": 2, "v": "two"},
    ]
    assert (await put(sink, batch)).rejected == {}
    assert postgres.sql(f"SELECT * FROM {table} ORDER BY id") == ["1|third, the last|2", "2|two|7"]
    transaction = await sink.begin(BatchKey(table, 1))
    await transaction.send([{"id": 3, "v": "a", "x": 1}, {"id": 3, "v": "b"}, {"id": 3, "v": "c", "x": 2}])
    await transaction.commit()
    assert postgres.sql(f"SELECT * FROM {table} WHERE id = 3") == ["3|c|2"]


async def test_x_5_the_last_staged_record_of_a_key_wins(postgres, make, table):
    sink = await make(upsert_on=["id"])
    attempt = Attempt(BatchKey(table, 1), 0, "a")
    staged = sink.stage(attempt)
    await staged.open()
    for n in range(20):
        await staged.send([{"id": number, "v": f"{n}"} for number in range(50)])
    await staged.close()
    assert await sink.publish(attempt.key, [attempt])
    assert postgres.sql(f"SELECT DISTINCT v FROM {table}") == ["19"]


async def test_x_5_an_upsert_needs_the_order_of_its_keys(make):
    needs = needs_of(await make(upsert_on=["id"]))
    assert (needs.ordering, needs.key({"id": 4, "v": 1}), needs.key({"v": 1})) == ("key", (4,), (None,))
    assert needs_of(await make()).ordering == "any"


# --- what the server says of rows


async def test_x_14_a_row_that_a_policy_refuses_is_its_records(postgres, make, table):
    postgres.sql(
        f"CREATE TABLE {table} (tenant text, k text UNIQUE); ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;"
        "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname='app1') THEN CREATE ROLE app1 LOGIN PASSWORD "
        f"'pw'; END IF; END $$; GRANT SELECT, INSERT ON {table} TO app1;"
        f"CREATE POLICY p ON {table} FOR ALL TO app1 USING (true) WITH CHECK (tenant = 'a')"
    )
    for start, options in enumerate(({}, {"key_column": "k"})):
        sink = await make(dsn=f"postgresql://app1:pw@127.0.0.1:{postgres.port}/tests", **options)
        batch = [{"tenant": "b" if at == 17 else "a"} for at in range(40)]
        result = await put(sink, batch, start * 100)
        assert list(result.rejected) == [17]
        assert "row-level security" in str(result.rejected[17])
    assert postgres.sql(f"SELECT tenant, count(*) FROM {table} GROUP BY 1") == ["a|78"]
    postgres.sql(f"REVOKE INSERT ON {table} FROM app1")
    with pytest.raises(bq.AuthError):
        await put(sink, batch, 1_000)


async def test_x_4_the_row_that_the_server_names_costs_few_statements(postgres, make, table, monkeypatch):
    postgres.sql(f"CREATE TABLE {table} (id int PRIMARY KEY CHECK (id % 100 <> 7))")
    sink = await make()
    sent = []
    copy = asyncpg.Connection.copy_records_to_table

    async def counted(self, *args, records, **options):
        sent.append(len(records))
        return await copy(self, *args, records=records, **options)

    monkeypatch.setattr(asyncpg.Connection, "copy_records_to_table", counted)
    result = await put(sink, [{"id": at} for at in range(1_000)])
    assert list(result.rejected) == [7 + 100 * at for at in range(10)]
    assert len(sent) <= 4 * 10 + 4
    assert postgres.sql(f"SELECT count(*) FROM {table}") == ["990"]


# --- time, rights, states


async def test_x_19_the_wait_for_a_connection_of_the_sinks_own_is_no_time_of_the_servers(postgres, make, table):
    postgres.sql(
        f"CREATE TABLE {table} (a int); CREATE FUNCTION z() RETURNS trigger AS $$ BEGIN PERFORM pg_sleep(0.4); "
        f"RETURN NULL; END $$ LANGUAGE plpgsql; CREATE TRIGGER z AFTER INSERT ON {table} EXECUTE FUNCTION z()"
    )
    sink = await make(connections=1, timeout=1.0)
    await asyncio.gather(*(sink.send([{"a": at}]) for at in range(5)))
    assert postgres.sql(f"SELECT count(*) FROM {table}") == ["5"]
    assert needs_of(sink).concurrency == 1


async def test_x_28_states_that_may_pass_can_be_said(postgres, make, table):
    postgres.sql(
        f"CREATE TABLE {table} (a int); CREATE FUNCTION busy() RETURNS trigger AS $$ BEGIN RAISE 'later'; END $$ "
        f"LANGUAGE plpgsql; CREATE TRIGGER z BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION busy()"
    )
    assert list((await (await make()).send([{"a": 1}])).rejected) == [0]
    with pytest.raises(bq.RetryableError, match="P0001"):
        await (await make(retryable=["P0001"])).send([{"a": 1}])


def test_x_1_the_widest_of_what_was_seen():
    assert postgres_types.column_type([2**60 + 1, 0.5]) == "numeric"
    assert postgres_types.column_type([1, 0.5, Decimal("0.1")]) == "double precision"
    assert postgres_types.column_type([0.5, Decimal("0.12345678901234567890")]) == "numeric"
    assert postgres_types.wider("character varying(3)", ["abcd"]) == "text"
    assert postgres_types.wider("timestamp(3) without time zone", [datetime(2024, 1, 1, 0, 0, 0, 1)]) == "timestamp"
    assert postgres_types.wider("boolean", [1]) is None


async def test_x_1_a_partitioned_table_that_becomes_another_type_gets_the_right_values(postgres, make, table):
    postgres.sql(
        f"CREATE TABLE {table} (id int, v bigint) PARTITION BY RANGE (id);"
        f"CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES FROM (0) TO (100)"
    )
    sink = await make()
    await sink.send([{"id": 1, "v": 5}])
    for number, kind in enumerate(("double precision", "numeric", "bigint"), 2):
        postgres.sql(f"ALTER TABLE {table} ALTER v TYPE {kind}")
        assert (await sink.send([{"id": number, "v": 5}])).rejected == {}
    postgres.sql(f"ALTER TABLE {table} DROP v, ADD v numeric")
    assert (await sink.send([{"id": 9, "v": 5}])).rejected == {}
    assert postgres.sql(f"SELECT DISTINCT v FROM {table} WHERE v IS NOT NULL") == ["5"]


async def test_x_1_a_column_that_is_dropped_and_added_with_another_type_gets_the_right_values(postgres, make, table):
    sink = await make()
    await sink.send([{"v": 5, "w": 1}])
    postgres.sql(f"ALTER TABLE {table} DROP v, ADD v numeric")
    assert (await sink.send([{"v": 6, "w": 2}])).rejected == {}
    assert postgres.sql(f"SELECT v FROM {table} WHERE w = 2") == ["6"]


@pytest.mark.timeout(60)
async def test_x_36_a_batch_over_two_runs_of_a_queue_is_noted_by_its_numbers_alone(postgres, make, table):
    tracemalloc.start()
    try:
        sink = await make()
        far = 1 << 40
        keys = [f"q/{number}" for number in (1, 2, 3, far, far + 1, far + 3)]
        await sink.send_keyed([{"id": each} for each in range(6)], keys)
        result = await sink.send_keyed([{"id": each} for each in range(6)], keys)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert result.skipped == 6
    assert postgres.sql(f"SELECT id FROM {table} ORDER BY id") == [str(each) for each in range(6)]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], "{}"),
        ([5], "{[5,6)}"),
        ([7, 1, 2, 3], "{[1,4),[7,8)}"),
        ([1, 1, 3], "{[1,2),[3,4)}"),
        ([1, 2, 2, 3], "{[1,4)}"),
        ([0, 1 << 60], f"{{[0,1),[{1 << 60},{(1 << 60) + 1})}}"),
    ],
)
def test_x_36_numbers_as_ranges(numbers, text):
    assert multirange(numbers) == text


@pytest.mark.parametrize("numbers", [(1, 2, 3), (1, 3, 9)], ids=["in a row", "with gaps"])
async def test_x_1_a_record_that_columns_of_now_refuse_is_not_noted_as_written(postgres, make, table, numbers):
    """It is known to be refused only after the sink has looked at the columns anew, in the middle of the write."""
    postgres.sql(f"CREATE TABLE {table} (id bigint, v bigint)")
    sink = await make()
    await sink.send_keyed([{"id": 0, "v": 0}], ["q/0"])
    postgres.sql(f"ALTER TABLE {table} ALTER COLUMN v TYPE smallint")
    batch = [{"id": number, "v": 100_000 if number == 1 else 1} for number in numbers]
    keys = [f"q/{number}" for number in numbers]
    result = await sink.send_keyed(batch, keys)
    assert {place: type(error) for place, error in result.rejected.items()} == {0: bq.PermanentError}
    postgres.sql(f"ALTER TABLE {table} ALTER COLUMN v TYPE bigint")
    result = await sink.send_keyed(batch, keys)  # put back from the dead letters, with what is in already
    assert (result.rejected, result.skipped) == ({}, 2)
    assert postgres.sql(f"SELECT id FROM {table} ORDER BY id") == ["0", *map(str, numbers)]
