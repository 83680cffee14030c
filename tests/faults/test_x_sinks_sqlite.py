"""Faults of the SQLite sink that must not come back."""

from __future__ import annotations

import asyncio
import math
import pickle
import sqlite3
from contextlib import asynccontextmanager, closing

import pytest

import batchqueue_async as bq
from batchqueue_async.sinks.base import BatchKey
from batchqueue_async.sinks.sqlite import SqliteSink

pytestmark = pytest.mark.real_time


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.db"


@asynccontextmanager
async def opened(path, **options):
    sink = pickle.loads(pickle.dumps(SqliteSink(path, **options)))
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


def sql(path, statement):
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        return database.execute(statement).fetchall()


CHANGED = {
    "INTEGER": ["007", "1.50", " 12", "1e3"],
    "REAL": [2**53 + 1, "1.0"],
    "TEXT": [5, 1.5, True],
    "NUMERIC": ["1.10"],
}
KEPT = {
    "INTEGER": [0.75, "abc", 2**63 - 1, b"7"],
    "REAL": [5, 2**60, "x", 0.1],
    "TEXT": ["007", b"x"],
    "": ["007", 5, 1.5, b"x", 2**53 + 1],
}


async def put(sink, batch, how):
    if how == "send":
        await sink.send(batch)
    elif how == "keyed":
        await sink.send_keyed([{"id": 9}], ["q/9"])
        await sink.send_keyed([{"id": 9}, *batch], ["q/9", *(f"q/{at}" for at in range(len(batch)))])
    else:
        transaction = await sink.begin(BatchKey("q", 1))
        try:
            await transaction.send(batch)
        finally:
            await transaction.rollback()


@pytest.mark.parametrize("kind", CHANGED)
@pytest.mark.parametrize("how", ["send", "keyed", "transaction"])
async def test_x_1_a_value_that_a_column_would_change_is_refused_by_record(path, kind, how):
    sql(path, f"CREATE TABLE rows (id INTEGER, v {kind})")
    batch = [{"id": 0, "v": None}, *({"id": 1, "v": value} for value in CHANGED[kind])]
    async with opened(path) as sink:
        with pytest.raises(bq.PermanentError, match=f"column 'v' of table 'rows' is {kind}") as caught:
            await put(sink, batch, how)
    first = 2 if how == "keyed" else 1
    assert caught.value.culprits == tuple(range(first, first + len(CHANGED[kind])))
    assert sql(path, "SELECT count(*) FROM rows") == [(how == "keyed",)]


@pytest.mark.parametrize("kind", KEPT)
async def test_x_1_values_that_a_column_keeps_come_back_as_they_are(path, kind):
    sql(path, f"CREATE TABLE rows (v {kind})")
    async with opened(path) as sink:
        await sink.send([{"v": value} for value in KEPT[kind]])
    assert [value for (value,) in sql(path, "SELECT v FROM rows")] == KEPT[kind]


@pytest.mark.parametrize("mode", ["widen", "add"])
async def test_x_1_a_column_is_widened_where_that_is_asked_for(path, mode):
    async with opened(path, schema=mode) as sink:
        await sink.send([{"a": 1, "v": 0.5}])
        await sink.send([{"a": 2, "v": 2**53 + 1}, {"a": 3, "v": "1.0"}])
    assert sql(path, "SELECT a, v FROM rows") == [(1, 0.5), (2, 2**53 + 1), (3, "1.0")]
    assert sql(path, "SELECT name, type FROM pragma_table_info('rows')") == [("a", "INTEGER"), ("v", "")]


async def test_x_1_a_table_with_more_than_plain_columns_is_left_as_it_is(path):
    sql(path, "CREATE TABLE rows (id INTEGER PRIMARY KEY, v REAL)")
    async with opened(path, schema="widen") as sink:
        with pytest.raises(bq.PermanentError) as caught:
            await sink.send([{"id": 1, "v": 0.5}, {"id": 2, "v": "1.0"}])
    assert caught.value.culprits == (1,)


async def test_x_1_a_column_is_added_where_that_is_asked_for(path):
    async with opened(path) as strict, opened(path, schema="add") as add:
        await strict.send([{"a": 1}])
        with pytest.raises(bq.PermanentError, match="no column 'b'") as caught:
            await strict.send([{"a": 2}, {"a": 2, "b": 1.5}])
        assert caught.value.culprits == (1,)
        await add.send([{"a": 3, "b": 1.5}, {"c": "x"}])
        await strict.send([{"a": 4, "b": 2.5}])
    assert sql(path, "SELECT * FROM rows") == [(1, None, None), (3, 1.5, None), (None, None, "x"), (4, 2.5, None)]


async def test_x_1_what_is_not_a_number_is_refused_and_not_stored_as_null(path):
    async with opened(path) as sink:
        await sink.send([{"v": 1.5}, {"v": math.inf}])
        for odd in (math.nan, {"k": math.nan}):
            with pytest.raises(bq.PermanentError) as caught:
                await sink.send([{"v": 2.5}, {"v": odd}])
            assert caught.value.culprits == (1,)
    assert sql(path, "SELECT v FROM rows") == [(1.5,), (math.inf,)]


def test_the_schema_mode_is_checked():
    with pytest.raises(bq.ConfigError, match="schema='wide'"):
        SqliteSink("x.db", schema="wide")


# -- who meets a file that another makes just now ------------------------------------------------------------


async def test_x_48_a_file_that_another_writes_is_opened_as_soon_as_it_is_free(path):
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("CREATE TABLE theirs (v)")
        other.execute("BEGIN IMMEDIATE")
        sink = SqliteSink(path)
        opening = asyncio.create_task(sink.open())
        done, _ = await asyncio.wait([opening], timeout=0.1)
        assert not done
        other.execute("COMMIT")
        await opening
        await sink.close()
    assert sql(path, "PRAGMA journal_mode") == [("wal",)]


async def test_x_48_it_waits_no_longer_than_the_busy_timeout(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE theirs (v)")
        other.execute("BEGIN IMMEDIATE")
        sink = SqliteSink(path, busy_timeout=0.02)
        with pytest.raises(bq.RetryableError, match="database is locked"):
            await sink.open()
        await sink.close()
