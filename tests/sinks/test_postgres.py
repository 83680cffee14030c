"""The PostgreSQL sink against a real server."""

from __future__ import annotations

import asyncio
import enum
import json
import pickle
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from itertools import count
from uuid import UUID

import asyncpg
import msgspec
import numpy as np
import pyarrow as pa
import pytest

import batchqueue_async as bq
from batchqueue_async.sinks._shared.secrets import Secret
from batchqueue_async.sinks._shared.tabular import Rows, tabular
from batchqueue_async.sinks.base import Attempt, BatchKey, KeyedSink, StagingSink, TransactionalSink
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.sinks.postgres import client as postgres_client
from batchqueue_async.sinks.postgres import ledger as postgres_ledger
from batchqueue_async.sinks.postgres import types as postgres_types

pytestmark = pytest.mark.real_time

KEY = BatchKey("query-1", 3)
_names = count()


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: float


class Person(msgspec.Struct):
    name: str
    born: date


@pytest.fixture
def table(postgres):
    postgres.sql("DROP SCHEMA public CASCADE; DROP SCHEMA IF EXISTS other CASCADE; CREATE SCHEMA public")
    postgres.sql("GRANT USAGE ON SCHEMA public TO PUBLIC")
    return f"t{next(_names)}"


@pytest.fixture
async def make(postgres, table):
    made = []

    def make(name=table, dsn=postgres.dsn, **options):
        made.append(PostgresSink(dsn, name, **options))
        return made[-1]

    yield make
    for sink in made:
        await sink.close()


@pytest.fixture
async def sink(make):
    sink = make()
    await sink.open()
    return sink


def keys(*numbers, source="q"):
    return [f"{source}/{number}" for number in numbers]


def ids(*numbers):
    return [{"id": number} for number in numbers]


# --- what becomes of values


async def test_a_table_is_made_from_the_first_records(postgres, sink, table):
    when = datetime(2024, 2, 29, 12, 30, tzinfo=UTC)
    record = {
        "a": 1,
        "b": True,
        "c": 1.5,
        "d": 'é"\\',
        "e": b"\x00\xff",
        "f": Decimal("1.10"),
        "g": when,
        "h": when.replace(tzinfo=None),
        "i": when.date(),
        "j": time(1, 2),
        "k": timedelta(days=1),
        "l": UUID(int=5),
        "m": {"deep": [1, None]},
        "n": None,
        "o": Colour.RED,
        "p": [Point(1, 2.0)],
        "q": 2**70,
        "r": np.int64(7),
    }
    assert (await sink.send([record])).rejected == {}
    types = postgres.sql(
        f"SELECT attname, atttypid::regtype FROM pg_attribute WHERE attrelid='{table}'::regclass AND attnum>0"
    )
    assert types == [
        "a|bigint",
        "b|boolean",
        "c|double precision",
        "d|text",
        "e|bytea",
        "f|numeric",
        "g|timestamp with time zone",
        "h|timestamp without time zone",
        "i|date",
        "j|time without time zone",
        "k|interval",
        "l|uuid",
        "m|jsonb",
        "n|text",
        "o|text",
        "p|jsonb",
        "q|numeric",
        "r|bigint",
    ]
    (row,) = map(
        json.loads, postgres.sql(f"SELECT to_json(x) FROM (SELECT *, \"m\"->'deep'->>0 AS deep FROM {table}) x")
    )
    assert (row["a"], row["d"], row["e"], row["f"], row["deep"]) == (1, 'é"\\', "\\x00ff", 1.10, "1")
    assert (row["g"], row["k"], row["o"], row["q"]) == ("2024-02-29T12:30:00+00:00", "1 day", "red", 2**70)
    assert (row["p"], row["n"], row["r"]) == ([{"x": 1, "y": 2.0}], None, 7)


async def test_all_kinds_of_records_are_rows(postgres, make, table):
    sink = make(columns=["x", "y"])
    await sink.open()
    arrow = pa.RecordBatch.from_pydict({"x": [5, 6], "y": [5.5, 6.5]})
    result = await sink.send(
        [{"x": 1, "y": 1.5}, Point(2, 2.5), (3, 3.5), [4, 4.5], arrow, {"y": 7.5, "x": 7}, {"x": 8}]
    )
    assert result.rejected == {}
    assert postgres.sql(f"SELECT x, y FROM {table} ORDER BY x") == [
        *("1|1.5", "2|2.5", "3|3.5", "4|4.5", "5|5.5", "6|6.5", "7|7.5", "8|"),
    ]


async def test_values_without_names_and_structs(postgres, make):
    people, values = make("people"), make("values")
    await people.open()
    await values.open()
    await people.send([Person("Ada", date(1815, 12, 10))])
    await values.send(["text", "more"])
    assert postgres.sql("SELECT * FROM people") == ["Ada|1815-12-10"]
    assert postgres.sql('SELECT value FROM "values"') == ["text", "more"]


async def test_names_are_taken_as_they_are(postgres, make):
    sink = make('o"dd; name')
    await sink.open()
    await sink.send([{'a "b"': 1, "SELECT": 2}])
    assert postgres.sql('SELECT * FROM "o""dd; name"') == ["1|2"]


async def test_a_schema_may_be_named(postgres, make, table):
    postgres.sql("CREATE SCHEMA other")
    sink = make(schema="other")
    await sink.open()
    await sink.send(ids(1))
    await sink.send_keyed(ids(2), keys(2, source=table))
    assert (await sink.send_keyed(ids(2), keys(2, source=table))).skipped == 1
    assert postgres.sql(f"SELECT * FROM other.{table}") == ["1", "2"]


async def test_a_column_that_is_added_is_used_at_once(postgres, sink, table):
    await sink.send(ids(1))
    postgres.sql(f"ALTER TABLE {table} ADD COLUMN more text")
    assert (await sink.send([{"id": 2, "more": "x"}])).rejected == {}
    assert postgres.sql(f"SELECT * FROM {table}") == ["1|", "2|x"]


async def test_a_table_that_is_dropped_is_made_again(postgres, sink, table):
    await sink.send(ids(1))
    postgres.sql(f"DROP TABLE {table}")
    with pytest.raises(bq.RetryableError):
        await sink.send(ids(2))
    await sink.send(ids(3))
    assert postgres.sql(f"SELECT * FROM {table}") == ["3"]


# --- records that are refused


@pytest.fixture
async def strict(postgres, make, table):
    postgres.sql(f"CREATE TABLE {table} (id bigint PRIMARY KEY, n text NOT NULL CHECK (n <> 'bad'))")
    sink = make()
    await sink.open()
    return sink


BAD = {
    "constraint": {"id": 90, "n": "bad"},
    "null": {"id": 91, "n": None},
    "kind": {"id": "secret-value", "n": "x"},
    "nul byte": {"id": 92, "n": "secret\0value"},
    "too large": {"id": 2**80, "n": "x"},
    "no such column": {"id": 93, "n": "x", "what": 1},
    "nothing": {},
    "no names": (94, "x"),
    "object": {"id": 95, "n": object()},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
@pytest.mark.parametrize("how", ["send", "keyed", "transaction"])
async def test_a_bad_record_is_found_and_the_others_are_written(postgres, strict, table, bad, how):
    batch = [{"id": number, "n": "x"} for number in range(20)]
    batch[7] = bad
    if how == "send":
        result = await strict.send(batch)
    elif how == "keyed":
        result = await strict.send_keyed(batch, keys(*range(20), source=table))
    else:
        transaction = await strict.begin(BatchKey(table, 1))
        result = await transaction.send(batch)
        await transaction.commit()
    (error,) = [result.rejected.pop(7)]
    assert isinstance(error, bq.PermanentError)
    assert "secret" not in str(error)
    assert (result.rejected, result.skipped) == ({}, 0)
    assert postgres.sql(f"SELECT id FROM {table} ORDER BY id") == [str(number) for number in range(20) if number != 7]


async def test_many_bad_records_are_all_found(postgres, strict, table):
    batch = [{"id": number, "n": "bad" if number % 3 == 0 else "x"} for number in range(50)]
    result = await strict.send(batch)
    assert sorted(result.rejected) == list(range(0, 50, 3))
    assert "_n_check" in str(result.rejected[0])
    assert postgres.sql(f"SELECT count(*) FROM {table}") == [str(50 - 17)]


async def test_a_record_that_was_refused_is_not_noted(postgres, strict, table):
    batch = [{"id": 1, "n": "x"}, {"id": 2, "n": "bad"}]
    assert list((await strict.send_keyed(batch, keys(1, 2, source=table))).rejected) == [1]
    batch[1]["n"] = "mended"
    assert (await strict.send_keyed(batch, keys(1, 2, source=table))).skipped == 1
    assert postgres.sql(f"SELECT n FROM {table} ORDER BY id") == ["x", "mended"]


@pytest.mark.parametrize("how", ["send", "keyed", "transaction"])
async def test_a_record_of_many_rows_is_refused_whole(postgres, strict, table, how):
    arrow = pa.RecordBatch.from_pydict({"id": [1, 2, 3, 4], "n": ["x", "x", "bad", "x"]})
    batch = [{"id": 10, "n": "x"}, arrow, {"id": 11, "n": "x"}]
    if how == "send":
        result = await strict.send(batch)
    elif how == "keyed":
        result = await strict.send_keyed(batch, keys(1, 2, 3, source=table))
    else:
        transaction = await strict.begin(BatchKey(table, 1))
        result = await transaction.send(batch)
        await transaction.commit()
    assert (list(result.rejected), result.skipped) == ([1], 0)
    assert postgres.sql(f"SELECT id FROM {table} ORDER BY id") == ["10", "11"]


# --- replacing


async def test_rows_are_replaced_by_their_key(postgres, make, table):
    sink = make(upsert_on=["id"])
    await sink.open()
    await sink.send([{"id": 1, "n": "a"}, {"id": 1, "n": "b"}, {"id": 2, "n": "c"}])
    result = await sink.send([{"id": 2, "n": "d"}, {"n": "no id"}, {"id": 3}])
    assert list(result.rejected) == [1]
    assert "no 'id', by which" in str(result.rejected[1])
    assert postgres.sql(f"SELECT id, n FROM {table} ORDER BY id") == ["1|b", "2|d", "3|"]


async def test_a_key_of_several_columns_and_a_bad_record(postgres, make, table):
    postgres.sql(f"CREATE TABLE {table} (a int, b int, n int CHECK (n > 0), UNIQUE (a, b))")
    sink = make(upsert_on=["a", "b"])
    await sink.open()
    result = await sink.send(
        [{"a": 1, "b": 1, "n": 1}, {"a": 1, "b": 2, "n": -1}, {"a": 1, "b": 3, "n": 3}, {"a": 1, "b": 1, "n": 4}]
    )
    assert list(result.rejected) == [1]
    assert postgres.sql(f"SELECT * FROM {table} ORDER BY b") == ["1|1|4", "1|3|3"]


async def test_rows_that_are_all_key_are_left_alone(postgres, make, table):
    sink = make(upsert_on=["id"])
    await sink.open()
    for _ in range(2):
        await sink.send(ids(1, 2))
    assert postgres.sql(f"SELECT * FROM {table}") == ["1", "2"]


async def test_a_table_without_the_constraint_is_told(postgres, make, table):
    postgres.sql(f"CREATE TABLE {table} (id int)")
    sink = make(upsert_on=["id"])
    await sink.open()
    with pytest.raises(bq.PermanentError, match="needs a unique constraint"):
        await sink.send(ids(1))


async def test_upserts_of_the_same_rows_at_once(postgres, make, table):
    sink = make(upsert_on=["id"], connections=4)
    await sink.open()
    await sink.send([{"id": 0, "n": 0}])
    await asyncio.gather(
        *(sink.send([{"id": i, "n": n} for i in order]) for n, order in enumerate([range(50), range(49, -1, -1)] * 4))
    )
    assert postgres.sql(f"SELECT count(*), count(DISTINCT n) FROM {table}") == ["50|1"]


# --- each record once


async def test_a_record_is_in_once_whatever_is_repeated(postgres, sink, table):
    assert isinstance(sink, KeyedSink)
    assert (await sink.send_keyed(ids(*range(5)), keys(*range(5)))).skipped == 0
    assert (await sink.send_keyed(ids(*range(5)), keys(*range(5)))).skipped == 5
    assert (await sink.send_keyed(ids(3, 9, 4, 8, 8), keys(3, 9, 4, 8, 8))).skipped == 3
    other = await sink.send_keyed(ids(3, 9), ["a/b/3", "q/9"])
    assert other.skipped == 1
    assert postgres.sql(f"SELECT id FROM {table}") == ["0", "1", "2", "3", "4", "9", "8", "3"]


async def test_the_same_records_at_once_are_in_once(postgres, make, table):
    sinks = [make(connections=4) for _ in range(2)]
    for sink in sinks:
        await sink.open()
    batches = [list(range(start, start + 40)) for start in (0, 20, 0, 30, 60, 10, 20, 0)]
    results = await asyncio.gather(
        *(sinks[place % 2].send_keyed(ids(*numbers), keys(*numbers)) for place, numbers in enumerate(batches))
    )
    assert postgres.sql(f"SELECT count(*), count(DISTINCT id) FROM {table}") == ["100|100"]
    assert sum(result.skipped for result in results) == 8 * 40 - 100


async def test_one_row_notes_a_batch(postgres, sink, table):
    await sink.send_keyed(ids(*range(1000)), keys(*range(1000)))
    found = postgres.sql(
        f"SELECT numbers FROM batchqueue_keys k JOIN batchqueue_sources s ON s.id = k.source WHERE target = '{table}'"
    )
    assert found == ["{[0,1000)}"]


async def test_keys_in_a_column_of_the_table(postgres, make, table):
    sink = make(key_column="key")
    await sink.open()
    await sink.send_keyed(ids(1, 2), ["a", "b"])
    result = await sink.send_keyed([*ids(2, 3), {"id": "bad"}, pa.RecordBatch.from_pydict({"id": [5, 6]})], [*"bcde"])
    assert (result.skipped, list(result.rejected)) == (1, [2])
    assert (await sink.send_keyed([{"id": 7, "key": "own"}], ["x"])).skipped == 0
    assert postgres.sql(f"SELECT * FROM {table} ORDER BY id") == ["1|a", "2|b", "3|c", "5|e#0", "6|e#1", "7|own"]


async def test_a_key_column_without_keys_is_a_fault_of_the_configuration(postgres, make, table):
    sink = make(key_column="k")
    await sink.open()
    with pytest.raises(bq.ConfigError, match="no keys for the column 'k'"):
        await sink.send(ids(1))
    await sink.send([{"id": 1, "k": "own"}])
    assert postgres.sql(f"SELECT id, k FROM {table}") == ["1|own"]


async def test_keys_of_another_form_need_a_column(sink):
    for key in ("abc", "/1", "q/", "q/x", "q/-1", "q/1_0", "q/²"):
        with pytest.raises(bq.PermanentError, match="key_column"):
            await sink.send_keyed(ids(1, 2), ["q/1", key])


def test_keys_are_taken_apart():
    assert postgres_ledger.numbered([]) == ([], [])
    assert postgres_ledger.numbered(["a/b/1", "a/b/2"]) == (["a/b"], [("a/b", 1), ("a/b", 2)])
    assert postgres_ledger.numbered(["a/1", "b/1", "a/12"]) == (["a", "b"], [("a", 1), ("b", 1), ("a", 12)])
    assert postgres_ledger.multirange([]) == "{}"
    assert postgres_ledger.multirange([5, 1, 3, 2, 3]) == "{[1,4),[5,6)}"


# --- a batch in one transaction


async def test_a_batch_of_many_sends_takes_effect_at_once(postgres, sink, table):
    assert isinstance(sink, TransactionalSink)
    transaction = await sink.begin(KEY._replace(source=table))
    await transaction.send(ids(1))
    await transaction.send(ids(2))
    assert postgres.sql(f"SELECT to_regclass('{table}')") == [""]
    await transaction.commit()
    await transaction.rollback()
    assert postgres.sql(f"SELECT id FROM {table}") == ["1", "2"]
    for number in (3, 2):
        assert await sink.begin(BatchKey(table, number)) is None
    assert await sink.begin(BatchKey(table + "other", 3)) is not None


async def test_a_batch_that_is_rolled_back_leaves_nothing(postgres, make, table):
    sink = make(upsert_on=["id"])
    await sink.open()
    for _ in range(2):
        transaction = await sink.begin(BatchKey(table, 1))
        await transaction.send(ids(1))
        await transaction.send(ids(1, 2))
        await transaction.rollback()
        await transaction.rollback()
    assert postgres.sql(f"SELECT to_regclass('{table}')") == [""]
    transaction = await sink.begin(BatchKey(table, 1))
    await transaction.send(ids(3))
    await transaction.commit()
    assert postgres.sql(f"SELECT id FROM {table}") == ["3"]


async def test_a_second_begin_waits_for_the_first(sink, table):
    first = await sink.begin(BatchKey(table, 1))
    second = asyncio.create_task(sink.begin(BatchKey(table, 2)))
    await asyncio.sleep(0)
    assert not second.done()
    await first.rollback()
    transaction = await second
    await transaction.commit()
    assert await sink.begin(BatchKey(table, 1)) is None


async def test_two_processes_with_the_same_batch(postgres, make, table):
    one, other = make(), make()
    await one.open()
    await other.open()
    first = await one.begin(BatchKey(table, 1))
    second = asyncio.create_task(other.begin(BatchKey(table, 1)))
    await first.send(ids(1))
    await first.commit()
    assert await second is None


async def test_close_undoes_what_is_under_way(postgres, sink, table):
    transaction = await sink.begin(BatchKey(table, 1))
    await transaction.send(ids(1))
    await sink.close()
    with pytest.raises(bq.RetryableError):
        await transaction.commit()
    await transaction.rollback()
    await sink.open()
    assert postgres.sql(f"SELECT to_regclass('{table}')") == [""]
    again = await sink.begin(BatchKey(table, 1))
    await again.rollback()


async def test_a_begin_that_is_cancelled_gives_its_turn_back(sink, table):
    first = await sink.begin(BatchKey(table, 1))
    second = asyncio.create_task(sink.begin(BatchKey(table, 2)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    await first.rollback()
    async with asyncio.timeout(60):
        transaction = await sink.begin(BatchKey(table, 2))
    await transaction.rollback()


# --- many processes


async def stage(sink, part, name, numbers, key=KEY):
    attempt = Attempt(key, part, name)
    staged = pickle.loads(pickle.dumps(sink)).stage(attempt)
    await staged.open()
    if numbers:
        await staged.send(ids(*numbers))
    await staged.close()
    await staged.close()
    return attempt


@pytest.mark.parametrize("upsert_on", [(), ("id",)], ids=["insert", "upsert"])
async def test_published_attempts_are_visible_once_and_the_others_never(postgres, make, table, upsert_on):
    sink = make(upsert_on=upsert_on)
    assert isinstance(sink, StagingSink)
    attempts = [await stage(sink, 0, "a1", [1, 2]), await stage(sink, 1, "a2", [3]), await stage(sink, 2, "a3", [])]
    await stage(sink, 1, "killed", [99])
    assert postgres.sql(f"SELECT to_regclass('{table}')") == [""]
    assert await sink.publish(KEY, attempts)
    assert not await sink.publish(KEY, [await stage(sink, 0, "b", [1])])
    assert await sink.publish(KEY._replace(number=4), [])
    assert postgres.sql(f"SELECT id FROM {table} ORDER BY id") == ["1", "2", "3"]
    assert postgres.sql("SELECT relname FROM pg_class WHERE starts_with(relname, 'batchqueue_staged')") == []


async def test_a_discarded_batch_leaves_nothing(postgres, make, table):
    sink = make()
    await stage(sink, 0, "a", [1])
    other = await stage(sink, 0, "a", [2], KEY._replace(number=4))
    await sink.discard(KEY)
    assert await sink.publish(other.key, [other])
    assert postgres.sql(f"SELECT id FROM {table}") == ["2"]
    assert postgres.sql("SELECT relname FROM pg_class WHERE starts_with(relname, 'batchqueue_staged')") == []


async def test_a_publication_that_does_not_fit_changes_nothing(postgres, make, table):
    postgres.sql(f"CREATE TABLE {table} (id int CHECK (id < 10), other int)")
    sink = make()
    with pytest.raises(bq.PermanentError, match="CheckViolationError"):
        await sink.publish(KEY, [await stage(sink, 0, "a", [1]), await stage(sink, 1, "a", [11])])
    assert postgres.sql(f"SELECT * FROM {table}") == []
    await sink.discard(KEY)
    postgres.sql(f"ALTER TABLE {table} RENAME COLUMN id TO renamed")
    with pytest.raises(bq.PermanentError, match="no column 'id'"):
        await sink.publish(KEY, [await stage(sink, 0, "b", [1])])
    await sink.discard(KEY)


# --- what goes wrong outside


async def test_a_wrong_password_is_told_and_not_shown(postgres, make):
    sink = make(dsn=postgres.dsn_at(postgres.port, "wr0ng-pass"))
    await sink.open()
    with pytest.raises(bq.AuthError, match="InvalidPasswordError") as error:
        await sink.send(ids(1))
    assert "wr0ng" not in repr(sink) + str(error.value)
    assert postgres.password not in repr(make())


async def test_a_password_by_reference(postgres, make, table, monkeypatch, tmp_path):
    (tmp_path / "password").write_text(postgres.password + "\n")
    monkeypatch.setenv("TEST_DSN", postgres.dsn_at(postgres.port, "wrong"))
    sink = make(dsn="env:TEST_DSN", password=f"file:{tmp_path}/password")
    await sink.open()
    await sink.send(ids(1))
    assert repr(sink) == f"PostgresSink('env:TEST_DSN', table={table!r})"
    monkeypatch.delenv("TEST_DSN")
    other = make(dsn="env:TEST_DSN", password=Secret("x"))
    await other.open()
    with pytest.raises(bq.ConfigError, match="TEST_DSN"):
        await other.send(ids(1))


async def test_a_user_without_rights(postgres, make, table):
    postgres.sql(f"CREATE TABLE {table} (id int)")
    postgres.sql(f"CREATE USER {table}user PASSWORD 'x'")
    sink = make(dsn=f"postgresql://{table}user:x@127.0.0.1:{postgres.port}/tests")
    await sink.open()
    with pytest.raises(bq.AuthError, match="InsufficientPrivilege"):
        await sink.send(ids(1))


@pytest.mark.parametrize("path", ["@127.0.0.1:1/tests", "@127.0.0.1:{port}/nosuch"])
async def test_a_database_that_is_not_there_is_waited_for(postgres, make, path):
    sink = make(dsn=f"postgresql://tester:{postgres.password}{path.format(port=postgres.port)}")
    await sink.open()
    with pytest.raises(bq.RetryableError) as error:
        await sink.send(ids(1))
    assert postgres.password not in str(error.value)


async def test_tls_is_demanded_where_it_is_asked_for(make):
    sink = make(tls=True)
    await sink.open()
    with pytest.raises(bq.RetryableError, match="ConnectionError"):
        await sink.send(ids(1))


async def test_a_server_that_comes_back_is_found(postgres, make, table):
    sink = make(connections=2)
    await sink.open()
    await asyncio.gather(sink.send_keyed(ids(1), keys(1, source=table)), sink.send(ids(2)))
    postgres.kill()
    for _ in range(3):
        with pytest.raises(bq.RetryableError):
            await sink.send_keyed(ids(3), keys(3, source=table))
    postgres.start()
    await sink.send_keyed(ids(3), keys(3, source=table))
    await sink.send(ids(4))
    assert postgres.sql(f"SELECT id FROM {table} ORDER BY id") == ["1", "2", "3", "4"]


async def test_a_transaction_whose_server_dies_can_be_repeated(postgres, sink, table):
    transaction = await sink.begin(BatchKey(table, 1))
    await transaction.send(ids(1))
    postgres.kill()
    with pytest.raises(bq.RetryableError):
        await transaction.send(ids(2))
    with pytest.raises(bq.RetryableError):
        await transaction.commit()
    await transaction.rollback()
    postgres.start()
    transaction = await sink.begin(BatchKey(table, 1))
    await transaction.send(ids(1, 2))
    await transaction.commit()
    assert postgres.sql(f"SELECT id FROM {table}") == ["1", "2"]


@pytest.fixture
async def locked(postgres, sink, table):
    """The table, and a connection that keeps everyone else from writing to it."""
    await sink.send(ids(1))
    other = await asyncpg.connect(postgres.dsn)
    await other.execute(f"BEGIN; LOCK TABLE {table}")
    yield other
    await other.close()


async def no_one_waits(locked):
    """The server has seen that calls were cancelled, before their lock is free."""
    while await locked.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
        pass


async def test_a_send_ends_at_its_timeout_and_leaves_nothing(postgres, sink, table, locked):
    sink.timeout = 0.2
    for _ in range(6):  # more than there are connections
        with pytest.raises(bq.RetryableError, match="TimeoutError"):
            await sink.send_keyed(ids(2), keys(2))
    sink.timeout = 10.0
    await no_one_waits(locked)
    await locked.execute("ROLLBACK")
    await sink.send(ids(3))
    assert postgres.sql(f"SELECT id FROM {table}") == ["1", "3"]


async def test_a_send_that_is_cancelled_leaves_nothing(postgres, sink, table, locked):
    sends = [asyncio.create_task(sink.send_keyed(ids(n), keys(n))) for n in range(20, 28)]
    while not await locked.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
        pass
    for send in sends:
        send.cancel()
    done = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(each) for each in done] == [asyncio.CancelledError] * 8
    await no_one_waits(locked)
    await locked.execute("ROLLBACK")
    await sink.send(ids(3))
    assert postgres.sql(f"SELECT id FROM {table}") == ["1", "3"]


# --- options


def test_options_are_checked():
    for options, message in [
        ({"table": ""}, "empty"),
        ({"table": "batchqueue_keys"}, "reserved"),
        ({"upsert_on": ["a"], "key_column": "b"}, "give one of them"),
        ({"timeout": 0}, "timeout=0"),
        ({"connections": 0}, "connections=0"),
    ]:
        with pytest.raises(bq.ConfigError, match=message):
            PostgresSink("postgresql://x", **options)


async def test_a_sink_that_is_not_open_says_so(make):
    with pytest.raises(RuntimeError, match="call open"):
        await make().send(ids(1))


def test_a_pickled_sink_is_the_same():
    options = {"schema": "s", "columns": ("a",), "upsert_on": ("a",), "password": "p", "timeout": 3.0, "connections": 2}
    sink = pickle.loads(pickle.dumps(PostgresSink("postgresql://x:y@z", "t", **options)))
    for name in ("schema", "columns", "upsert_on", "timeout", "connections"):
        assert getattr(sink, name) == options[name]
    assert (sink.table, sink._password) == ("t", Secret("p"))


def test_types_of_columns():
    assert postgres_types.column_type([1, Decimal(1)]) == "numeric"
    assert postgres_types.column_type([1, "x"]) == "text"
    assert postgres_types.column_type([Point(1, 2.0), None]) == "jsonb"
    assert postgres_types.column_type([np.float64(1.5)]) == "double precision"


def test_alike_records_are_sorted_by_their_columns():
    rows, refused = tabular([{"a": 1}, {"b": 2}, {"a": 3}], None)
    assert rows == [Rows(("a",), [(1,), (3,)], [0, 2]), Rows(("b",), [(2,)], [1])]
    assert refused == {}
    assert tabular([], None) == ([], {})
    assert tabular([(1, 2), (3, 4)], ["a", "b"]) == ([Rows(("a", "b"), [(1, 2), (3, 4)], range(2))], {})


class RefusalError(Exception):
    """As much of one of asyncpg's errors as is looked at."""

    __module__ = "asyncpg.exceptions"

    def __init__(self, state, **names):
        super().__init__("secret value")
        self.sqlstate = state
        vars(self).update(names)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("08006", bq.RetryableError),
        ("40P01", bq.RetryableError),
        ("53100", bq.RetryableError),
        ("57P01", bq.RetryableError),
        ("XX000", bq.RetryableError),
        ("25006", bq.RetryableError),
        ("28P01", bq.AuthError),
        ("42501", bq.AuthError),
        ("23505", bq.PermanentError),
        ("42703", bq.PermanentError),
        ("0A000", bq.PermanentError),
        ("", bq.RetryableError),
    ],
)
def test_what_a_state_means(state, kind):
    error = RefusalError(state, constraint_name="rows_pkey")
    meant = postgres_client.translate_error("here", error)
    assert type(meant) is kind
    assert "secret" not in str(meant)
    assert "constraint 'rows_pkey'" in str(meant)
    assert postgres_client.is_of_record(error) == (state == "23505")


def test_other_errors_are_told_or_go_on_as_they_are():
    assert type(postgres_client.translate_error("here", ConnectionResetError(104, "reset"))) is bq.RetryableError
    assert type(postgres_client.translate_error("here", TimeoutError())) is bq.RetryableError
    for error in (KeyError("a mistake"), bq.ConfigError("x"), bq.TooLargeError("y")):
        assert postgres_client.translate_error("here", error) is error


async def test_an_old_server_is_told_what_it_lacks():
    class Old:
        def get_server_version(self):
            return asyncpg.types.ServerVersion(13, 4, 0, "final", 0)

    with pytest.raises(bq.ConfigError, match=r"version 13.*key_column"):
        await postgres_ledger.Ledger("t", None).open(Old())


async def test_a_connection_that_was_closed_meanwhile_is_not_lent():
    closed, made = [], []

    class Connection:
        def __init__(self):
            made.append(self)
            self.closed = False

        def is_closed(self):
            return self.closed

        async def close(self, timeout):
            closed.append(self)
            self.closed = True

        def terminate(self):
            self.closed = True

    async def make():
        return Connection()

    pool = postgres_client.Connections(make, 1)
    async with pool.lend() as first:
        pass
    async with pool.lend() as again:
        assert again is first
    first.closed = True
    with pytest.raises(ValueError, match="inside"):
        async with pool.lend():
            raise ValueError("inside")
    async with pool.lend():
        await pool.close()
    assert len(made) == 3
    assert closed == made[1:]
