"""The embedded sinks: what they keep, what they refuse, and what a repetition does."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import resource
import sqlite3
import stat
import threading
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import NamedTuple
from uuid import UUID

import msgspec
import pyarrow as pa
import pytest

import batchqueue_async as bq
from batchqueue_async.sinks._shared.records import line_blocks, lines
from batchqueue_async.sinks.base import Attempt, BatchKey, KeyedSink, Sink, StagingSink, TransactionalSink
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.memory import MemorySink
from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.sinks.sqlite.table import Table

KEY = BatchKey("query-1", 3)


class Point(msgspec.Struct):
    x: int
    y: float


@dataclasses.dataclass
class Person:
    name: str
    born: date


class Pair(NamedTuple):
    left: int
    right: int


class Colour(Enum):
    RED = "red"


def select(path, query="SELECT * FROM rows"):
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
async def database(tmp_path):
    sink = SqliteSink(tmp_path / "out.db")
    await sink.open()
    yield sink
    await sink.close()


@pytest.fixture(params=["memory", "sqlite"])
async def transactional(request, tmp_path):
    sink = MemorySink() if request.param == "memory" else SqliteSink(tmp_path / "out.db")
    await sink.open()
    yield sink
    await sink.close()


def kept(sink):
    if isinstance(sink, MemorySink):
        return [each["a"] for each in sink.records]
    if not select(sink.path, "SELECT 1 FROM sqlite_master WHERE name = 'rows'"):
        return []
    return [row[0] for row in select(sink.path, "SELECT a FROM rows ORDER BY rowid")]


# --- what each can do


@pytest.mark.parametrize(
    ("sink", "abilities"),
    [
        (MemorySink(), {KeyedSink, TransactionalSink}),
        (JsonLinesSink("x"), {StagingSink}),
        (SqliteSink("x"), {KeyedSink, TransactionalSink, StagingSink}),
    ],
)
def test_a_sink_tells_its_abilities_by_its_methods(sink, abilities):
    assert isinstance(sink, Sink)
    assert {
        ability for ability in (KeyedSink, TransactionalSink, StagingSink) if isinstance(sink, ability)
    } == abilities


@pytest.mark.parametrize("sink", [JsonLinesSink("x/y"), SqliteSink("x/y", "t")])
async def test_a_sink_that_is_not_open_says_so(sink):
    with pytest.raises((RuntimeError, AttributeError), match="open"):
        await sink._open_thread.run(int) if isinstance(sink, SqliteSink) else await sink.send([{}])
    await sink.close()


# --- transactions and keys


async def test_a_transaction_takes_effect_at_its_commit(transactional):
    transaction = await transactional.begin(KEY)
    await transaction.send([{"a": 1}])
    await transaction.send([{"a": 2}, {"a": 3}])
    assert kept(transactional) == []
    await transaction.commit()
    assert kept(transactional) == [1, 2, 3]
    await transaction.rollback()
    assert kept(transactional) == [1, 2, 3]


async def test_a_batch_that_is_in_is_not_begun_again(transactional):
    transaction = await transactional.begin(KEY)
    await transaction.send([{"a": 1}])
    await transaction.commit()
    assert await transactional.begin(KEY) is None
    assert await transactional.begin(BatchKey("query-1", 2)) is None
    following = await transactional.begin(BatchKey("query-1", 4))
    await following.rollback()
    other = await transactional.begin(BatchKey("query-2", 0))
    await other.rollback()


async def test_a_transaction_rolled_back_leaves_nothing_and_may_be_begun_again(transactional):
    transaction = await transactional.begin(KEY)
    await transaction.send([{"a": 1}])
    await transaction.rollback()
    assert kept(transactional) == []
    again = await transactional.begin(KEY)
    await again.send([{"a": 2}])
    await again.commit()
    assert kept(transactional) == [2]


async def test_a_second_transaction_waits_for_the_first(transactional):
    first = await transactional.begin(KEY)
    second = asyncio.create_task(transactional.begin(BatchKey("query-2", 1)))
    await asyncio.sleep(1)
    assert not second.done()
    await first.commit()
    await (await second).rollback()


async def test_a_cancelled_wait_for_a_transaction_leaves_the_sink_usable(transactional):
    first = await transactional.begin(KEY)
    second = asyncio.create_task(transactional.begin(BatchKey("query-2", 1)))
    await asyncio.sleep(1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await first.commit()
    await (await transactional.begin(BatchKey("query-3", 1))).rollback()


async def test_a_begin_cancelled_in_its_thread_leaves_no_transaction(database):
    release = threading.Event()
    database._thread.start(release.wait)
    beginning = asyncio.create_task(database.begin(KEY))
    for _ in range(5):
        await asyncio.sleep(0)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    release.set()
    await database.send([{"a": 1}])
    assert kept(database) == [1]


async def test_records_whose_keys_are_in_are_skipped(transactional):
    first = await transactional.send_keyed([{"a": 1}, {"a": 2}, {"a": 2}], ["k1", "k2", "k2"])
    second = await transactional.send_keyed([{"a": 2}, {"a": 3}], ["k2", "k3"])
    assert second.skipped == 1
    if isinstance(transactional, SqliteSink):  # the memory sink compares with what was in before the send
        assert first.skipped == 1
        assert kept(transactional) == [1, 2, 3]


async def test_a_memory_sink_needs_open_for_transactions():
    with pytest.raises(RuntimeError, match="open"):
        await MemorySink().begin(KEY)


# --- SQLite


async def test_the_table_is_made_from_the_first_rows(database):
    await database.send([{"i": 1, "f": 1.5, "s": "x", "b": b"y", "n": None}, {"i": 2, "f": 2.5, "s": None, "b": b""}])
    await database.send([{"i": 3, "n": "late"}])
    assert select(database.path) == [
        (1, 1.5, "x", b"y", None),
        (2, 2.5, None, b"", None),
        (3, None, None, None, "late"),
    ]
    described = dict(select(database.path, "SELECT name, type FROM pragma_table_info('rows')"))
    assert described == {"i": "INTEGER", "f": "REAL", "s": "TEXT", "b": "BLOB", "n": ""}


async def test_records_of_every_kind_become_rows(tmp_path):
    sink = SqliteSink(tmp_path / "out.db", columns=["x", "y"])
    await sink.open()
    await sink.send([(1, 2.0), [2, 3.0], Point(3, 4.0), {"x": 4, "y": 5.0}, pa.RecordBatch.from_pydict({"x": [5, 6]})])
    await sink.close()
    assert sorted(select(sink.path)) == [(1, 2.0), (2, 3.0), (3, 4.0), (4, 5.0), (5, None), (6, None)]


async def test_single_values_go_into_the_column_value(database):
    await database.send(["text", b"bytes", 7])
    assert select(database.path) == [("text",), (b"bytes",), (7,)]


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (datetime(2026, 1, 2, 3, 4, tzinfo=UTC), "2026-01-02T03:04:00+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (timedelta(seconds=1.5), 1.5),
        (Decimal("1.10"), "1.10"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Colour.RED, "red"),
        (True, 1),
        (bytearray(b"x"), b"x"),
        ([1, {"a": 2}], '[1,{"a":2}]'),
        (Point(1, 2.0), '{"x":1,"y":2.0}'),
        (type("Text", (str,), {})("t"), "t"),
    ],
)
async def test_values_that_sqlite_does_not_know_have_a_form(database, value, stored):
    await database.send([{"v": value}])
    assert select(database.path) == [(stored,)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([{"b": 1}], "no column 'b'"),
        ([(1, 2)], "2 values for the 1 columns"),
        ([{"a": object()}], "type object has no form"),
        ([{"a": 1 << 70}], "too large"),
    ],
)
async def test_a_record_that_does_not_fit_is_refused_and_its_batch_with_it(database, batch, message):
    await database.send([{"a": 0}])
    with pytest.raises(bq.PermanentError, match=message):
        await database.send([{"a": 1}, *batch])
    assert kept(database) == [0]
    await database.send([(2,)])
    assert kept(database) == [0, 2]


async def test_tuples_without_names_are_refused(database):
    with pytest.raises(bq.PermanentError, match="columns="):
        await database.send([(1, 2)])


async def test_a_table_made_in_a_batch_that_failed_is_gone(database):
    with pytest.raises(bq.PermanentError):
        await database.send([{"a": 1}, object])
    await database.send([{"b": 1}])
    assert select(database.path) == [(1,)]


async def test_a_locked_file_is_an_error_to_retry(tmp_path):
    sink = SqliteSink(tmp_path / "out.db", busy_timeout=0.01)
    await sink.open()
    await sink.send([{"a": 1}])
    with closing(sqlite3.connect(sink.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(bq.RetryableError, match="locked"):
            await sink.send([{"a": 2}])
        with pytest.raises(bq.RetryableError, match="locked"):
            await sink.begin(KEY)
    await sink.send([{"a": 3}])
    await sink.close()
    assert select(sink.path) == [(1,), (3,)]


async def test_the_database_is_for_its_owner(database):
    await database.send([{"a": 1}])
    assert {mode(path) for path in database.path.parent.iterdir()} == {0o600}


async def test_a_table_with_a_strange_name(tmp_path):
    sink = SqliteSink(tmp_path / "out.db", table='a"b; --')
    await sink.open()
    await sink.send([{'c"d': 1}])
    await sink.close()
    assert select(sink.path, 'SELECT "c""d" FROM "a""b; --"') == [(1,)]


@pytest.mark.parametrize("table", ["", "batchqueue_keys"])
def test_a_table_needs_a_name_of_its_own(table):
    with pytest.raises(bq.ConfigError, match="table="):
        SqliteSink("x", table)


async def test_a_path_that_is_a_directory_is_refused(tmp_path):
    with pytest.raises(bq.ConfigError, match="directory"):
        await SqliteSink(tmp_path).open()
    with pytest.raises(bq.ConfigError, match="directory"):
        await JsonLinesSink(tmp_path).open()


async def test_close_undoes_an_open_transaction(tmp_path):
    sink = SqliteSink(tmp_path / "out.db")
    await sink.open()
    await sink.send([{"a": 1}])
    transaction = await sink.begin(KEY)
    await transaction.send([{"a": 2}])
    await sink.close()
    await transaction.rollback()
    await sink.close()
    assert select(sink.path) == [(1,)]


async def test_each_table_of_a_file_has_its_own_ledger(tmp_path):
    sinks = [SqliteSink(tmp_path / "out.db", table=name) for name in ("one", "two")]
    for sink in sinks:
        await sink.open()
        transaction = await sink.begin(KEY)
        await transaction.send([{"a": 1}])
        await transaction.commit()
        await sink.close()
    assert select(tmp_path / "out.db", "SELECT * FROM one UNION ALL SELECT * FROM two") == [(1,), (1,)]


def test_a_sink_travels_by_pickle():
    sink = pickle.loads(pickle.dumps(SqliteSink("x.db", "t", columns=("a",), busy_timeout=1.0)))
    assert (str(sink.path), sink.table, sink.columns, sink.busy_timeout) == ("x.db", "t", ("a",), 1.0)


# --- staging


@pytest.fixture(params=["jsonl", "sqlite"])
def staging(request, tmp_path):
    return JsonLinesSink(tmp_path / "out") if request.param == "jsonl" else SqliteSink(tmp_path / "out.db")


async def stage(sink, part, name, values, key=KEY):
    attempt = Attempt(key, part, name)
    staged = sink.stage(attempt)
    await staged.open()
    for value in values:
        await staged.send([{"a": value}])
    await staged.close()
    return attempt


def published(sink):
    if isinstance(sink, SqliteSink):
        if not sink.path.exists() or not select(sink.path, "SELECT 1 FROM sqlite_master WHERE name = 'rows'"):
            return []
        return sorted(value for (value,) in select(sink.path))
    files = [path for path in sink.path.glob("*/*.jsonl") if not path.parent.name.startswith(".")]
    return sorted(json.loads(line)["a"] for path in files for line in path.read_text().splitlines())


def leftovers(sink):
    root = sink._staging.root
    return sorted(root.rglob("*.*")) if root.exists() else []


async def test_published_attempts_are_visible_once_and_the_others_never(staging):
    first = await stage(staging, 0, "a1", [1, 2])
    await stage(staging, 1, "killed", [99])
    second = await stage(staging, 1, "a2", [3])
    empty = await stage(staging, 2, "a3", [])
    assert published(staging) == []
    assert await staging.publish(KEY, [first, second, empty])
    assert published(staging) == [1, 2, 3]
    assert leftovers(staging) == []


async def test_a_batch_published_before_is_dropped(staging):
    assert await staging.publish(KEY, [await stage(staging, 0, "a1", [1])])
    assert not await staging.publish(KEY, [await stage(staging, 0, "b1", [1])])
    assert published(staging) == [1]
    assert leftovers(staging) == []


async def test_a_discarded_batch_leaves_nothing(staging):
    await stage(staging, 0, "a1", [1])
    other = await stage(staging, 0, "b1", [2], BatchKey("query-1", 4))
    await staging.discard(KEY)
    await staging.discard(BatchKey("never", 1))
    assert await staging.publish(other.key, [other])
    assert published(staging) == [2]
    assert leftovers(staging) == []


async def test_a_batch_without_rows_is_published(staging):
    assert await staging.publish(KEY, [])
    assert not await staging.publish(KEY, [await stage(staging, 0, "a1", [1])])
    assert published(staging) == []


async def test_a_publication_that_fails_can_be_repeated(staging):
    attempt = await stage(staging, 0, "a1", [1])
    missing = Attempt(KEY, 1, "missing")
    if isinstance(staging, SqliteSink):
        with pytest.raises(sqlite3.OperationalError):
            await staging.publish(KEY, [attempt, missing])
        assert published(staging) == []
    assert await staging.publish(KEY, [attempt])
    assert published(staging) == [1]


async def test_staged_files_are_for_their_owner_and_close_may_come_twice(staging):
    attempt = Attempt(KEY, 0, "../a")
    staged = staging.stage(attempt)
    await staged.open()
    await staged.send([{"a": 1}])
    await staged.close()
    await staged.close()
    path = staging._staging.path(attempt)
    assert path.parent == staging._staging.directory(KEY)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)


async def test_parts_with_different_columns_are_published_into_one_table(tmp_path):
    sink = SqliteSink(tmp_path / "out.db")
    attempts = [Attempt(KEY, part, "x") for part in range(2)]
    for attempt, row in zip(attempts, [{"a": None, "b": 1}, {"a": "x", "c": 2}], strict=True):
        staged = sink.stage(attempt)
        await staged.open()
        await staged.send([row])
        await staged.close()
    await sink.publish(KEY, attempts)
    assert select(sink.path, "SELECT a, b, c FROM rows") == [(None, 1, None), ("x", None, 2)]


async def test_a_part_that_does_not_fit_the_table_fails_the_publication(tmp_path):
    sink = SqliteSink(tmp_path / "out.db")
    await sink.open()
    await sink.send([{"b": 1}])
    await sink.close()
    with pytest.raises(bq.PermanentError, match="no column 'a'"):
        await sink.publish(KEY, [await stage(sink, 0, "x", [1])])
    assert select(sink.path) == [(1,)]


# --- JSON lines


async def test_each_record_is_a_line(tmp_path):
    sink = JsonLinesSink(tmp_path / "new" / "out.jsonl")
    await sink.open()
    await sink.send([{"a": 1}, Point(1, 2.0), b'{"raw":true}', "text"])
    await sink.send([pa.RecordBatch.from_pydict({"x": [1, 2]}), Person("Ada", date(1815, 12, 10)), Decimal("1.5")])
    await sink.close()
    assert sink.path.read_text().splitlines() == [
        '{"a":1}',
        '{"x":1,"y":2.0}',
        '{"raw":true}',
        '"text"',
        '{"x":1}',
        '{"x":2}',
        '{"name":"Ada","born":"1815-12-10"}',
        '"1.5"',
    ]
    assert (mode(sink.path), mode(sink.path.parent)) == (0o600, 0o700)


@pytest.mark.parametrize(("record", "message"), [(object(), "no form in JSON"), (b"a\nb", "line break")])
async def test_a_record_without_a_line_is_refused_and_its_batch_with_it(tmp_path, record, message):
    sink = JsonLinesSink(tmp_path / "out.jsonl")
    await sink.open()
    with pytest.raises(bq.PermanentError, match=message):
        await sink.send([{"a": 1}, record])
    await sink.close()
    assert sink.path.read_bytes() == b""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"a":1}\n{"a":', b'{"a":1}\n'),
        (b'{"a":1}\n', b'{"a":1}\n'),
        (b"half", b""),
        (b"\n" + b"x" * 200_000, b"\n"),
    ],
    ids=["half", "whole", "only half", "long"],
)
async def test_a_half_line_is_cut_off(tmp_path, before, after):
    path = tmp_path / "out.jsonl"
    path.write_bytes(before)
    sink = JsonLinesSink(path)
    await sink.open()
    await sink.send([{"a": 2}])
    await sink.close()
    assert path.read_bytes() == after + b'{"a":2}\n'


async def test_a_full_file_is_rotated(tmp_path):
    (tmp_path / "out.jsonl.old").touch()
    sink = JsonLinesSink(tmp_path / "out.jsonl", max_bytes=16)
    await sink.open()
    for value in range(5):
        await sink.send([{"a": value}])
    await sink.close()
    names = ["out.jsonl.1", "out.jsonl.2", "out.jsonl"]
    assert [(tmp_path / name).read_text().split() for name in names] == [
        ['{"a":0}', '{"a":1}'],
        ['{"a":2}', '{"a":3}'],
        ['{"a":4}'],
    ]


@pytest.mark.parametrize(("fsync", "synced"), [("batch", 2), ("close", 0), ("never", 0)])
async def test_fsync_as_asked(tmp_path, monkeypatch, fsync, synced):
    calls = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(file), real(file)))
    sink = JsonLinesSink(tmp_path / "out.jsonl", fsync=fsync)
    await sink.open()
    await sink.send([1])
    await sink.send([2])
    assert len(calls) == synced
    await sink.close()
    assert (len(calls) > synced) == (fsync != "never")


async def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    sink = JsonLinesSink(tmp_path / "out.jsonl")
    await sink.open()
    await sink.send([1])
    real, full = os.write, [True]

    def write(file, data):
        if full[0] and len(data) > 2:
            raise OSError(28, "No space left on device")
        return real(file, data[:2])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(bq.RetryableError, match="No space left"):
        await sink.send([1234567])
    full[0] = False
    await sink.send([89])
    await sink.close()
    assert sink.path.read_text() == "1\n89\n"


@pytest.mark.parametrize(("option", "value"), [("fsync", "often"), ("max_bytes", 0)])
def test_options_are_checked(option, value):
    with pytest.raises(bq.ConfigError, match=option):
        JsonLinesSink("x", **{option: value})


# --- the table alone


def test_a_table_may_be_made_beforehand(tmp_path):
    with closing(sqlite3.connect(tmp_path / "out.db")) as database:
        database.execute("CREATE TABLE rows (a INTEGER CHECK (a > 0))")
        database.commit()
    table = Table(tmp_path / "out.db", "rows", None, 1.0)
    table.open()
    with table.transaction():
        table.insert([{"a": 1}])
    with pytest.raises(bq.PermanentError, match="CHECK"), table.transaction():
        table.insert([{"a": 2}, {"a": -1}])
    table.close()
    assert select(tmp_path / "out.db") == [(1,)]


# --- upserts


async def test_rows_of_a_key_are_replaced_and_the_last_record_stays(tmp_path):
    sink = SqliteSink(tmp_path / "out.db", upsert_on=["id", "k"])
    await sink.open()
    await sink.send([{"id": 1, "k": "a", "v": 1}, {"id": 1, "k": "b", "v": 2}, {"id": 1, "k": "a", "v": 3}])
    await sink.send([{"id": 1, "k": "a", "v": 4}, {"id": 1, "k": "a"}, {"id": 2, "k": "a", "v": 5}])
    assert select(sink.path, "SELECT * FROM rows ORDER BY id, k") == [(1, "a", 4), (1, "b", 2), (2, "a", 5)]
    for bad in ({"id": 3, "v": 1}, {"id": None, "k": "a", "v": 1}):
        with pytest.raises(
            bq.PermanentError, match=r"a record has no '(k|id)', by which table 'rows' is upserted"
        ) as error:
            await sink.send([{"id": 4, "k": "x", "v": 1}, bad])
        assert list(error.value.culprits) == [1]
    await sink.close()
    assert sink.needs.ordering == "key"
    again = pickle.loads(pickle.dumps(sink))
    assert again.upsert_on == ("id", "k")


async def test_a_single_whole_number_as_key_is_not_sqlites_own_number_of_the_row(tmp_path):
    sink = SqliteSink(tmp_path / "out.db", upsert_on=["id"])
    await sink.open()
    with pytest.raises(bq.PermanentError, match="has no 'id'"):
        await sink.send([{"id": None, "v": 1}])
    await sink.send([{"id": 7, "v": 1}])
    await sink.send([{"id": 7, "v": 2}])
    await sink.close()
    assert select(sink.path) == [(7, 2)]


async def test_a_transaction_clears_the_table_for_itself(tmp_path):
    sink = SqliteSink(tmp_path / "out.db")
    await sink.open()
    await sink.send([{"v": 1}])
    for number, end in enumerate(("rollback", "commit")):
        transaction = await sink.begin(BatchKey("q", number))
        await transaction.clear()
        await transaction.send([{"v": 2}])
        assert select(sink.path) == [(1,)]
        await getattr(transaction, end)()
    assert select(sink.path) == [(2,)]
    await sink.close()


ODD_TABLES = {
    "plain": {"i": [1, -2], "t": ["ü\n", '"'], "f": [0.5, 1e300], "b": [True, False]},
    "nulls": {"i": [1, None], "t": [None, "x"], "f": [None, 0.0], "b": [None, True]},
    "large": {"f": [1.7e308, 1.7e308], "i": [2**62, -(2**63)]},
    "times": {"at": [datetime(2024, 2, 29, 1, tzinfo=UTC), None], "d": [date(2024, 2, 29)] * 2},
    "decimals": {"d": [Decimal("1.50"), Decimal("-0.01")], "y": [b"\x00\xff", b""]},
    "nested": {"s": [{"a": 1, "b": [1.5]}, {"a": None, "b": None}], "l": [[1, 2], []]},
    "names": {'a "b"': [1], "": [2], "f0": [3], "\n": [4]},
    "no rows": {"i": []},
}


@pytest.mark.parametrize("name", ODD_TABLES)
def test_tables_have_the_same_lines_by_column_as_by_row(name):
    table = pa.RecordBatch.from_pydict(ODD_TABLES[name])
    records = [{"a": None}, b'{"raw":1}', table, "text", {"b": 2.5}]
    assert b"".join(line_blocks(records)) == b"".join(line + b"\n" for line in lines(records))


@pytest.mark.parametrize(
    "values",
    [[1.0, float("nan")], [float("inf"), float("-inf")], [None, float("inf")], [[float("nan")]], [{"a": float("nan")}]],
)
def test_a_number_that_json_has_not_is_refused_by_column_too(values):
    table = pa.RecordBatch.from_pydict({"v": values})
    with pytest.raises(bq.PermanentError, match="no form in JSON"):
        line_blocks([table])
    with pytest.raises(bq.PermanentError, match="no form in JSON"):
        line_blocks([{"ok": None}, *table.to_pylist()])


def test_of_columns_of_one_name_the_last_one_is_in_the_lines():
    twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    assert b"".join(line_blocks([twice])) == b"".join(line + b"\n" for line in lines([twice])) == b'{"a":2}\n'


@pytest.mark.parametrize("columns", [1, 3, 400, 1_200])
def test_rows_of_any_number_and_width_come_into_sqlite(tmp_path, columns):
    """They go many in a statement, as far as its parameters reach; of one key the last one stays."""

    async def main():
        sink = SqliteSink(tmp_path / "out.db", upsert_on=["c0"])
        await sink.open()
        for count in (1, 49, 50, 51, 149):
            await sink.send(
                [{f"c{at}": number % 120 if at == 0 else number for at in range(columns)} for number in range(count)]
            )
        await sink.close()

    asyncio.run(main())
    last = f"c{columns - 1}"
    with closing(sqlite3.connect(tmp_path / "out.db")) as database:
        found = dict(database.execute(f"SELECT c0, {last} FROM rows").fetchall())
    wanted = {number % 120: number for number in range(149)}
    assert found == (dict(zip(wanted, wanted, strict=True)) if columns == 1 else wanted)


async def test_large_tables_are_written_one_by_one_and_left_out_together(tmp_path):
    """They are not copied into one; where the file can't grow for the second one, the first goes again."""
    table = pa.RecordBatch.from_pydict({"v": ["x" * 100] * 1_000})
    wanted = b"".join(line + b"\n" for line in lines([table]))
    assert line_blocks([table, table]) == [wanted, wanted]
    assert line_blocks([table, {"a": 1}, {"b": 2}]) == [wanted + b'{"a":1}\n{"b":2}\n']
    sink = JsonLinesSink(tmp_path / "out.jsonl")
    await sink.open()
    await sink.send([table, table])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7 * len(wanted) // 2, before[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(bq.RetryableError, match="the batch is not in"):
            await sink.send([table, table])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "out.jsonl").read_bytes() == wanted * 2
    await sink.send([{"a": 1}])
    await sink.close()
    assert (tmp_path / "out.jsonl").read_bytes() == wanted * 2 + b'{"a":1}\n'


def test_a_line_break_in_what_was_encoded_already_is_refused():
    good, bad = {"a": msgspec.Raw(b"[1,2]")}, {"a": msgspec.Raw(b"[1,\n2]")}
    for encode in (line_blocks, lines):
        with pytest.raises(bq.PermanentError, match="a line break"):
            encode([good, bad])
    assert line_blocks([good, {}]) == [b'{"a":[1,2]}\n{}\n']


async def test_of_a_batch_that_is_refused_nothing_is_staged(tmp_path):
    sink = SqliteSink(tmp_path / "rows.db", "rows")
    attempt = Attempt(KEY, 0, "a1")
    staged = sink.stage(attempt)
    await staged.open()
    await staged.send([{"id": 1}])
    # More than one statement's rows, and then one that SQLite has no place for.
    with pytest.raises(bq.PermanentError):
        await staged.send([*({"id": 100 + number} for number in range(120)), {"id": 2**70}])
    await staged.send([{"id": 2}])
    await staged.close()
    await sink.publish(KEY, [attempt])
    with closing(sqlite3.connect(tmp_path / "rows.db")) as connection:
        assert connection.execute("SELECT id FROM rows ORDER BY id").fetchall() == [(1,), (2,)]
