"""What executors stage in a real PostgreSQL: published whatever its size, exactly, and nothing of it stays."""

from __future__ import annotations

import asyncio
import itertools
import time

import pyarrow as pa
import pytest

import batchqueue_async as bq
from batchqueue_async.sinks.base import Attempt, BatchKey, PrunableSink, SiftingSink
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.sinks.postgres.types import wider_type

pytestmark = pytest.mark.real_time
KEY = BatchKey("query", 3)
_names = itertools.count()


@pytest.fixture
def table(postgres):
    postgres.sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO PUBLIC")
    return f"s{next(_names)}"


async def stage(sink, name, rows, *, part=0, key=KEY, schema=None):
    attempt = Attempt(key, part, name)
    staged = sink.stage(attempt)
    await staged.open()
    if schema is not None:
        await staged.declare(schema)
    for start in range(0, len(rows), 20_000):
        await staged.send(rows[start : start + 20_000])
    await staged.close()
    return attempt


def staged_tables(postgres):
    return postgres.sql(
        "SELECT relname FROM pg_class WHERE starts_with(relname, 'batchqueue_staged') AND relkind = 'r'"
    )


def slow_rows(postgres, table, seconds):
    """A table each of whose rows takes so long to insert, by what PostgreSQL itself offers."""
    postgres.sql(
        f"DROP FUNCTION IF EXISTS slow; CREATE TABLE {table} (id bigint, name text);"
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN PERFORM pg_sleep({seconds}); RETURN NEW; END $$;"
        f"CREATE TRIGGER slow BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION slow()"
    )


async def test_s_14_a_publication_takes_as_long_as_its_rows_need(postgres, table):
    """All rows take many times the timeout of one call, and each step stays within it."""
    slow_rows(postgres, table, 0.001)
    rows = [{"id": number, "name": "x" * 1900} for number in range(1_200)]
    sink = PostgresSink(postgres.dsn, table, timeout=1.0)
    attempts = [await stage(PostgresSink(postgres.dsn, table), f"a{part}", rows, part=part) for part in range(2)]
    assert await sink.publish(KEY, attempts)
    assert postgres.sql(f"SELECT count(*), count(DISTINCT id) FROM {table}") == ["2400|1200"]
    assert staged_tables(postgres) == []


async def test_s_14_a_step_that_takes_too_long_still_ends_and_leaves_nothing(postgres, table):
    slow_rows(postgres, table, 5)
    sink = PostgresSink(postgres.dsn, table, timeout=0.5)
    attempt = await stage(PostgresSink(postgres.dsn, table), "a", [{"id": 1, "name": "x"}])
    with pytest.raises(bq.RetryableError, match="no answer in time"):
        await sink.publish(KEY, [attempt])
    assert postgres.sql(f"SELECT count(*) FROM {table}") == ["0"]
    postgres.sql(f"DROP TRIGGER slow ON {table}")
    assert await sink.publish(KEY, [attempt])  # what was staged is still there
    assert postgres.sql(f"SELECT id FROM {table}") == ["1"]


async def test_s_14_a_batch_of_very_many_parts_is_published(postgres, table):
    """The server's table of locks has room for some thousands in one transaction."""
    sink = PostgresSink(postgres.dsn, table)
    attempts = await asyncio.gather(*(stage(sink, "a", [{"id": part}], part=part) for part in range(40)))
    assert await sink.publish(KEY, attempts)
    assert postgres.sql(f"SELECT count(*) FROM {table}") == ["40"]
    assert staged_tables(postgres) == []


async def test_s_14_the_last_row_of_a_key_stays(postgres, table):
    sink = PostgresSink(postgres.dsn, table, upsert_on=["id"])
    rows = [{"id": number % 500, "v": number} for number in range(20_000)]
    first, second = await stage(sink, "a", rows[:15_000]), await stage(sink, "b", rows[15_000:], part=1)
    assert await sink.publish(KEY, [first, second])
    assert postgres.sql(f"SELECT min(v), max(v), count(*) FROM {table}") == ["19500|19999|500"]


# --- types


async def test_s_14_a_number_that_a_column_would_round_is_refused(postgres, table):
    postgres.sql(f"CREATE TABLE {table} (id bigint, v integer)")
    sink = PostgresSink(postgres.dsn, table)
    bad = await stage(sink, "a", [{"id": 1, "v": 0.75}])
    with pytest.raises(bq.PermanentError, match=r"column 'v' of type integer would change values of type double"):
        await sink.publish(KEY, [bad])
    await sink.discard(KEY)
    good = await stage(sink, "b", [{"id": 2, "v": 3.0}, {"id": None, "v": None}])
    empty = await stage(sink, "c", [{"id": 4, "v": None}], part=1)  # a column without a value has any type
    assert await sink.publish(KEY, [good, empty])
    assert postgres.sql(f"SELECT id, v FROM {table} ORDER BY id") == ["2|3", "4|", "|"]


async def test_s_types_a_table_is_made_by_the_schema_without_any_row(postgres, table):
    schema = pa.schema(
        {
            "i8": pa.int8(), "i": pa.int32(), "l": pa.int64(), "f": pa.float32(), "d": pa.float64(), "b": pa.bool_(),
            "s": pa.string(), "x": pa.binary(), "n": pa.decimal128(38, 9), "day": pa.date32(),
            "at": pa.timestamp("us", "UTC"), "local": pa.timestamp("us"), "t": pa.time64("ns"),
            "long": pa.duration("us"),
            "a": pa.list_(pa.int32()), "m": pa.map_(pa.string(), pa.int32()), "st": pa.struct({"x": pa.int32()}),
            "nul": pa.null(),
        }.items()
    )  # fmt: skip
    sink = PostgresSink(postgres.dsn, table)
    assert await sink.publish(KEY, [await stage(sink, "a", [], schema=schema)])
    columns = f"SELECT column_name || ' ' || data_type FROM information_schema.columns WHERE table_name = '{table}'"
    types = ["smallint", "integer", "bigint", "real", "double precision", "boolean", "text", "bytea", "numeric", "date"]
    types += ["timestamp with time zone", "timestamp without time zone", "time without time zone", "interval"]
    types += ["jsonb"] * 3 + ["text"]
    assert postgres.sql(f"{columns} ORDER BY ordinal_position") == [
        f"{name} {kind}" for name, kind in zip(schema.names, types, strict=True)
    ]
    await sink.open()
    await sink.declare(schema)  # a second time, and nothing changes
    row = {"i": 1, "n": None, "nul": 7, "m": {"k": 1}}
    assert not (await sink.send([row])).rejected
    assert postgres.sql(f"SELECT i, nul, m FROM {table}") == ['1|7|{"k": 1}']
    await sink.close()


@pytest.mark.parametrize("mode", ["strict", "widen", "add"])
async def test_s_types_a_schema_that_drifts_does_as_the_sink_says(postgres, table, mode):
    postgres.sql(f"CREATE TABLE {table} (id integer, v integer); INSERT INTO {table} VALUES (1, 1)")
    sink = PostgresSink(postgres.dsn, table, schema=mode)
    wide = pa.schema({"id": pa.int64(), "v": pa.float64(), "extra": pa.string()}.items())
    attempt = await stage(sink, "a", [{"id": 2**40, "v": 0.5, "extra": "x"}], schema=wide)
    if mode != "add":
        with pytest.raises(bq.PermanentError, match="has no column 'extra'"):
            await sink.publish(KEY, [attempt])
        await sink.discard(KEY)
        attempt = await stage(sink, "b", [{"id": 2**40, "v": 0.5}], schema=pa.schema(list(wide)[:2]))
    if mode == "strict":
        with pytest.raises(bq.PermanentError, match=r"NumericValueOutOfRange|would change"):
            await sink.publish(KEY, [attempt])
        assert postgres.sql(f"SELECT id, v FROM {table}") == ["1|1"]
    else:
        assert await sink.publish(KEY, [attempt])
        assert postgres.sql(f"SELECT id, v FROM {table} ORDER BY id") == ["1|1", f"{2**40}|0.5"]


@pytest.mark.parametrize(
    ("kind", "declared", "wide"),
    [
        ("integer", "integer", None),
        ("bigint", "smallint", None),
        ("smallint", "real", "real"),
        ("integer", "real", "double precision"),
        ("bigint", "double precision", "numeric"),
        ("double precision", "integer", None),
        ("double precision", "bigint", "numeric"),
        ("numeric", "double precision", None),
        ("numeric(10,2)", "numeric(10,2)", None),
        ("numeric(10,2)", "numeric(12,4)", "numeric(12,4)"),
        ("numeric(10,2)", "numeric(4,2)", None),
        ("numeric(10,2)", "integer", "numeric(12,2)"),
        ("integer", "numeric(4,2)", "numeric(12,2)"),
        ("character varying(5)", "text", "text"),
        ("timestamp without time zone", "timestamp", None),
        ("timestamp with time zone", "timestamp", None),
        ("jsonb", "text", None),
    ],
)
def test_s_types_the_type_that_holds_both(kind, declared, wide):
    assert wider_type(kind, declared) == wide


# --- what failed jobs leave


async def test_s_15_a_task_of_an_abandoned_job_drops_its_table_and_is_never_published(postgres, table):
    sink = PostgresSink(postgres.dsn, table)
    assert isinstance(sink, PrunableSink)
    failed = BatchKey("failed job", 0)
    await stage(sink, "early", [{"id": 1}], key=failed)
    late = sink.stage(Attempt(failed, 1, "late"))
    await late.open()
    await late.send([{"id": 2}])
    await sink.abandon(failed)  # the driver gives the job up while a task still writes
    assert staged_tables(postgres) == []
    await late.close()
    zombie = await stage(sink, "zombie", [{"id": 3}], key=failed)
    assert staged_tables(postgres) == []
    assert not await sink.publish(failed, [zombie])
    assert await sink.publish(KEY, [await stage(sink, "a", [{"id": 4}])])
    await stage(sink, "late", [{"id": 4}])  # and one of a batch that is in
    assert postgres.sql(f"SELECT id FROM {table}") == ["4"]
    assert staged_tables(postgres) == []


async def test_s_15_what_is_staged_says_whose_it_is_and_is_pruned(postgres, table):
    sink, other = PostgresSink(postgres.dsn, table), PostgresSink(postgres.dsn, f"{table}_other")
    odd = BatchKey("it's {odd}", 12)
    await stage(sink, "77-abc", [{"id": 1}], key=odd)
    await stage(other, "x", [{"id": 1}])
    postgres.sql("CREATE TABLE batchqueue_staged_unknown (id int)")
    (part, unknown) = sorted(await sink.staged(), key=lambda each: each.changed is None)
    assert (part.key, part.part, part.name, part.state) == (odd, 0, "77-abc", "staged")
    assert abs(part.changed - time.time()) < 60
    assert (unknown.key.source, unknown.name) == ("", "batchqueue_staged_unknown")
    assert await sink.prune(3600.0) == []
    assert await sink.prune(-60.0) == [odd]
    assert len(staged_tables(postgres)) == 2


# --- rows that the table refuses only when they come into it


async def sift(sink, attempts, key=KEY):
    """Publish; what was refused, and the reasons."""
    found = []
    assert await sink.publish_sifted(key, attempts, found.extend)
    return found


async def test_s_22_a_publication_leaves_out_the_rows_that_the_table_refuses(postgres, table):
    """By a constraint, a key that is there, a value that its column would change, and one that it can't hold."""
    postgres.sql(f"CREATE TABLE {table} (id bigint PRIMARY KEY, v integer CHECK (v % 1000 <> 7), j jsonb)")
    postgres.sql(f"INSERT INTO {table} VALUES (4999, 0, NULL)")
    sink = PostgresSink(postgres.dsn, table)
    assert isinstance(sink, SiftingSink)
    rows = [{"id": n, "v": float(n), "j": {"n": [n]}} for n in range(5_000)]
    rows[11]["v"], rows[12]["v"] = 0.5, 1e12
    attempts = [
        await stage(sink, "a", rows),
        await stage(sink, "b", [{"id": 7_000, "v": 1}, {"id": 0, "v": 2}], part=1),
        await stage(sink, "none", [], part=2),
        await stage(sink, "stranger", [{"id": 8_000, "other": 1}], part=3),
    ]
    refused = await sift(sink, attempts)
    wanted = sorted([7, 1007, 2007, 3007, 4007, 11, 12, 4999, 0, 8000])
    assert sorted(row["id"] for row, _ in refused) == wanted
    reasons = {row["id"]: reason for row, reason in refused}
    assert "CheckViolationError" in reasons[7]
    assert "UniqueViolationError" in reasons[4999]
    assert "would change values" in reasons[11]
    assert "NumericValueOutOfRangeError" in reasons[12]
    assert "no column 'other'" in reasons[8000]
    assert next(row for row, _ in refused if row["id"] == 7) == {"id": 7, "v": 7.0, "j": {"n": [7]}}
    kept = set(range(5_000)) - {7, 1007, 2007, 3007, 4007, 11, 12} | {7_000}
    assert sorted(map(int, postgres.sql(f"SELECT id FROM {table}"))) == sorted(kept)
    assert postgres.sql(f"SELECT v, j FROM {table} WHERE id IN (0, 4999) ORDER BY id") == ['0|{"n": [0]}', "0|"]
    assert staged_tables(postgres) == []
    assert not await sink.publish_sifted(KEY, [await stage(sink, "again", [{"id": 9_000, "v": 7}])], pytest.fail)


async def test_s_22_the_last_row_of_a_key_that_the_table_takes_stays(postgres, table):
    postgres.sql(f"CREATE TABLE {table} (id bigint PRIMARY KEY, v integer CHECK (v <> 7))")
    sink = PostgresSink(postgres.dsn, table, upsert_on=["id"])
    rows = [{"id": n % 3, "v": n} for n in range(8)]  # the last row of key 1 is refused
    assert [row for row, _ in await sift(sink, [await stage(sink, "a", rows)])] == [{"id": 1, "v": 7}]
    assert postgres.sql(f"SELECT id, v FROM {table} ORDER BY id") == ["0|6", "1|4", "2|5"]


async def test_s_22_more_refused_rows_than_a_batch_may_have_fail_it(postgres, table, monkeypatch):
    monkeypatch.setattr("batchqueue_async.sinks.postgres.staging._MOST_REFUSED", 2)
    postgres.sql(f"CREATE TABLE {table} (id bigint CHECK (id > 2))")
    sink = PostgresSink(postgres.dsn, table)
    attempt = await stage(sink, "a", [{"id": n} for n in range(5)])
    with pytest.raises(bq.PermanentError, match="CheckViolationError"):
        await sink.publish_sifted(KEY, [attempt], pytest.fail)
    assert postgres.sql(f"SELECT * FROM {table}") == []
    monkeypatch.undo()
    assert len(await sift(sink, [attempt])) == 3  # what was staged is still there


async def test_s_22_refused_rows_that_can_not_be_kept_fail_the_batch(postgres, table):
    postgres.sql(f"CREATE TABLE {table} (id bigint CHECK (id > 2))")
    sink = PostgresSink(postgres.dsn, table)
    attempt = await stage(sink, "a", [{"id": n} for n in range(5)])

    def full(refused):
        raise OSError(f"no room for {len(refused)}")

    with pytest.raises(OSError, match="no room for 3"):
        await sink.publish_sifted(KEY, [attempt], full)
    assert postgres.sql(f"SELECT * FROM {table}") == []
    assert [row["id"] for row, _ in await sift(sink, [attempt])] == [0, 1, 2]
    assert sorted(postgres.sql(f"SELECT id FROM {table}")) == ["3", "4"]


async def test_s_27_a_publication_leaves_out_what_its_commit_would_refuse(postgres, table):
    """A row may need one that comes later; a batch in which one has none is held to that part by part."""
    postgres.sql(f"""
        CREATE TABLE {table} (id bigint PRIMARY KEY, needs bigint REFERENCES {table} DEFERRABLE INITIALLY DEFERRED)
    """)
    sink = PostgresSink(postgres.dsn, table)
    rows = [{"id": n, "needs": n + 1} for n in range(3_000)] + [{"id": 3_000, "needs": None}]
    attempts = [await stage(sink, "a", rows[:1_501]), await stage(sink, "a", rows[1_501:], part=1)]
    assert await sift(sink, attempts) == []
    key = BatchKey(KEY.source, KEY.number + 1)
    rows = [{"id": n, "needs": 9_999 if n == 5_000 else 3} for n in range(4_000, 6_000)]
    ((refused, reason),) = await sift(sink, [await stage(sink, "b", rows, key=key)], key=key)
    assert (refused["id"], "ForeignKeyViolationError" in reason) == (5_000, True)
    assert postgres.sql(f"SELECT count(*) FROM {table}") == ["5000"]
    third = BatchKey(KEY.source, KEY.number + 2)
    with pytest.raises(bq.PermanentError, match="ForeignKeyViolationError"):  # where no row may be left out
        await sink.publish(third, [await stage(sink, "c", [{"id": 7_000, "needs": 9_999}], key=third)])
    assert postgres.sql(f"SELECT count(*) FROM {table}") == ["5000"]


@pytest.mark.parametrize("deferrable", ["", "DEFERRABLE INITIALLY DEFERRED"])
async def test_s_28_a_publication_tries_again_the_rows_that_need_later_ones(postgres, table, deferrable):
    postgres.sql(f"CREATE TABLE {table} (id bigint PRIMARY KEY, needs bigint REFERENCES {table} {deferrable})")
    sink = PostgresSink(postgres.dsn, table)
    # Each row needs the next one, and so the first ones need that which is refused.
    rows = [{"id": n, "needs": 9_999 if n == 5 else n + 1} for n in range(40)]
    attempts = [await stage(sink, "a", rows[:20]), await stage(sink, "a", rows[20:], part=1)]
    attempts.append(await stage(sink, "a", [{"id": 40, "needs": None}, {"id": 40, "needs": None}], part=2))
    refused = await sift(sink, attempts)
    assert sorted(row["id"] for row, _ in refused) == [*range(6), 40]
    assert postgres.sql(f"SELECT min(id), max(id), count(*) FROM {table}") == ["6|40|35"]


async def test_s_28_a_publication_keeps_the_order_of_rows_that_replace_others(postgres, table):
    postgres.sql(f"CREATE TABLE {table} (id bigint PRIMARY KEY, v bigint, needs bigint REFERENCES {table})")
    sink = PostgresSink(postgres.dsn, table, upsert_on=["id"])
    rows = [[{"id": 1, "v": 1, "needs": 2}], [{"id": 2, "v": 2, "needs": None}], [{"id": 1, "v": 3, "needs": None}]]
    attempts = [await stage(sink, "a", each, part=part) for part, each in enumerate(rows)]
    assert [row["v"] for row, _ in await sift(sink, attempts)] == [1]
    assert postgres.sql(f"SELECT id, v FROM {table} ORDER BY id") == ["1|3", "2|2"]
