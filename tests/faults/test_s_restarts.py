"""What a program finds when it starts again: with other sinks, an old copy of its checkpoint, or in a forked child."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import closing
from types import SimpleNamespace

import msgspec
import pyarrow as pa
import pytest

import batchqueue_async as bq
from batchqueue_async.sinks.base import Attempt, BatchKey
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import DriverSink, process_bridge
from batchqueue_async.spark.executors.data_source import PartWritten, publish
from batchqueue_async.spark.executors.options import as_options
from batchqueue_async.spark.executors.part_writer import Part, Worker
from batchqueue_async.spark.rows import Converter

QUERY = "8f14"


class Frame:
    """A micro-batch as a sink sees it: the rows, and what Spark says of its query and of this start of it."""

    def __init__(self, values, run="run 1", query=QUERY):
        found = {"sql.streaming.queryId": query, "spark.jobGroup.id": run}
        self.sparkSession = SimpleNamespace(sparkContext=SimpleNamespace(getLocalProperty=found.get))
        self.columns = ["v"]
        self._values = values

    def toArrow(self):  # noqa: N802 - Spark's name
        return pa.table({"v": self._values})

    def mapInArrow(self, *_):  # noqa: N802 - Spark's name
        def rows():
            sink = pa.BufferOutputStream()
            table = self.toArrow()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            yield SimpleNamespace(packed=sink.getvalue().to_pybytes())

        return SimpleNamespace(toLocalIterator=rows)


def select(path, table="rows"):
    with closing(sqlite3.connect(path)) as database:
        return [value for (value,) in database.execute(f'SELECT v FROM "{table}" ORDER BY v')]


def lines(path):
    return [json.loads(line)["v"] for line in path.read_text().splitlines()] if path.exists() else []


# --- S-17


@pytest.mark.parametrize("after", [("b", "a"), ("new", "a", "b"), ("b",)], ids=["swapped", "one more", "one fewer"])
@pytest.mark.parametrize("kind", ["tables", "files", "one ledger", "one place for notes"])
def test_s_17_a_program_that_was_changed_writes_what_was_missing_and_nothing_twice(tmp_path, kind, after):
    """It died after the first of two sinks, and writes to others, or in another order, when it starts again."""

    topics, notes = defaultdict(list), set()

    class Topic:
        """As Kafka's: the notes of a source are those of all topics."""

        def __init__(self, name):
            self.name = name

        async def open(self): ...
        async def close(self): ...
        async def send(self, batch): ...

        async def begin(self, key):
            if key in notes:
                return None
            rows = []

            async def send(batch):
                rows.extend(each["v"] for each in batch)

            async def commit():
                notes.add(key)
                topics[self.name].extend(rows)

            async def rollback(): ...

            return SimpleNamespace(send=send, commit=commit, rollback=rollback)

    def sinks(names):
        for name in names:
            if kind == "tables":
                yield DriverSink("same name", sink=SqliteSink(tmp_path / "out.db", table=name))
            elif kind == "files":
                yield DriverSink("same name", sink=SqliteSink(tmp_path / f"{name}.db"))
            elif kind == "one place for notes":
                yield DriverSink(f"sink {name}", sink=Topic(name))
            else:
                target = JsonLinesSink(tmp_path / f"{name}.jsonl")
                yield DriverSink(f"sink {name}", sink=target, ledger=tmp_path / "ledger")

    def written(name):
        if kind == "one place for notes":
            return sorted(topics[name])
        if kind == "one ledger":
            return lines(tmp_path / f"{name}.jsonl")
        return select(tmp_path / ("out.db" if kind == "tables" else f"{name}.db"), name if kind == "tables" else "rows")

    first, _ = sinks(["a", "b"])
    with first:
        first(Frame([1, 2]), 0)
    for sink in sinks(after):
        with sink:
            sink(Frame([1, 2], run="run 2"), 0)
    assert {name: written(name) for name in {"a", *after}} == {name: [1, 2] for name in {"a", *after}}


def test_s_17_records_of_two_sinks_have_keys_of_their_own(tmp_path):
    """Two sinks into one destination that knows keys: rows of the same content are different records."""
    seen = []

    class Keyed:
        async def open(self): ...
        async def close(self): ...
        async def send(self, batch): ...
        async def send_keyed(self, batch, keys):
            seen.extend(keys)

    for name in ("one", "two"):
        with DriverSink(name, sink=Keyed()) as sink:
            sink(Frame([1, 2]), 0)
    assert len(set(seen)) == 4


def test_s_17_a_run_is_known_where_spark_does_not_show_its_query(tmp_path):
    """A query that starts again in one process, with one sink, repeats its batch, and does not write it once more."""
    with DriverSink("again", sink=SqliteSink(tmp_path / "out.db")) as sink:
        for run in ("run 1", "run 2"):
            sink(Frame([1, 2], run), 0)
        assert (sink.stats().batches, sink.stats().skipped) == (1, 1)
    assert select(tmp_path / "out.db") == [1, 2]


# --- S-18


@pytest.mark.parametrize("certain", ["transaction", "ledger"])
def test_s_18_a_checkpoint_from_a_copy_is_refused(tmp_path, certain):
    """The batches that it repeats may hold other rows: here those that came in since the copy was made."""

    def sink():
        if certain == "transaction":
            return DriverSink("rows", sink=SqliteSink(tmp_path / "out.db"))
        return DriverSink("rows", sink=JsonLinesSink(tmp_path / "out.jsonl"), ledger=tmp_path / "ledger")

    with sink() as first:
        for number in range(3):
            first(Frame([number]), number)
    with sink() as again:
        with pytest.raises(bq.ConfigError, match=r"restored from a copy.*ledger reset TARGET --source 8f14"):
            again(Frame([1, 2, 3, 4], "run 2"), 1)
        again(Frame([2], "run 3"), 2)  # the last one is what Spark repeats
        assert again.stats().skipped == 1


@pytest.mark.parametrize("kind", ["jsonl", "sqlite"])
def test_s_18_executors_refuse_it_too_and_warn_of_what_they_skip(tmp_path, kind, logs):
    path = tmp_path / ("out" if kind == "jsonl" else "out.db")
    options = as_options({"sink": kind, "path": str(path)})

    async def stage(attempt):
        sink = JsonLinesSink(path) if kind == "jsonl" else SqliteSink(path)
        part = sink.stage(attempt)
        await part.open()
        await part.send([{"v": attempt.key.number}])
        await part.close()

    def commit(number):
        attempt = Attempt(BatchKey(QUERY, number), 0, "a")
        asyncio.run(stage(attempt))
        return publish(options, attempt.key, [PartWritten(Part(attempt, 1, 8, 0.0))])

    assert [commit(number) for number in (0, 1, 2)] == [True] * 3
    assert commit(2) is False
    skipped = [event for event in logs if event["event"] == "spark_batch_skipped"]
    assert [(event["log_level"], event["batch"], event["rows"]) for event in skipped] == [("warning", "8f14/2", 1)]
    with pytest.raises(bq.ConfigError, match="restored from a copy"):
        commit(1)


# --- S-19

FORKED = """
import asyncio, os, sys, threading
sys.path.insert(0, {here!r})
from test_s_restarts import Frame, SqliteSink, DriverSink, select

path = {path!r}
{body}
child = os.fork()
if child == 0:
    try:
        in_child()
        os._exit(7)
    finally:
        os._exit(1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
in_parent()
print(status, select(path), flush=True)
os._exit(0)
"""

BUSY = """
inside, go = threading.Event(), threading.Event()
class Slow(SqliteSink):
    async def open(self):
        if not inside.is_set():
            await asyncio.to_thread(self.wait)
        await super().open()
    def wait(self):
        inside.set()
        go.wait()
sink = DriverSink("rows", sink=Slow(path))
writing = threading.Thread(target=lambda: sink(Frame([1], query=None)))
writing.start()
inside.wait()
def in_child():
    sink(Frame([2], query=None))
def in_parent():
    go.set()
    writing.join()
"""

JOBS = """
sink = DriverSink("rows", sink=SqliteSink(path))
sink(Frame([0], query=None))
def in_child():
    sink(Frame([1], query=None))
def in_parent():
    sink(Frame([2], query=None))
"""

LETTERS = """
class Picky(SqliteSink):
    pass
def picky():
    return DriverSink("rows", consumer=handle, on_bad_row="dead_letter", dead_letters=SqliteSink(path + ".dead"))
import batchqueue_async as bq
async def handle(rows):
    if any(row["v"] < 0 for row in rows):
        raise bq.PermanentError("below zero")
sink = picky()
sink(Frame([-1], query=None))
def in_child():
    sink(Frame([-2], query=None))
def in_parent():
    sink(Frame([-3], query=None))
    global select
    wanted = __import__("sqlite3").connect(path + ".dead").execute("SELECT count(*) FROM rows").fetchone()[0]
    select = lambda path: [wanted]
"""


@pytest.mark.parametrize(
    ("body", "wanted"),
    [(BUSY, "7 [1, 2]"), (JOBS, "7 [0, 1, 2]"), (LETTERS, "7 [3]")],
    ids=["a thread writes", "jobs", "dead letters"],
)
@pytest.mark.timeout(300)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_s_19_a_forked_child_writes_with_the_sinks_of_its_parent(tmp_path, body, wanted):
    program = FORKED.format(here=os.path.dirname(__file__), path=str(tmp_path / "out.db"), body=body)  # noqa: PTH120
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)
    assert done.stdout.strip().splitlines()[-1:] == [wanted], done.stderr


def test_s_19_dead_letters_go_on_with_a_new_host(tmp_path):
    async def handle(rows):
        if any(row["v"] < 0 for row in rows):
            raise bq.PermanentError("below zero")

    letters = SqliteSink(tmp_path / "dead.db", table="dead")
    with DriverSink("rows", consumer=handle, on_bad_row="dead_letter", dead_letters=letters) as sink:
        sink(Frame([1, -1]), 0)
        process_bridge.bridge().close()
        sink(Frame([2, -2]), 1)
        assert sink.stats().dead_rows == 2
    with closing(sqlite3.connect(tmp_path / "dead.db")) as database:
        assert database.execute("SELECT count(*) FROM dead").fetchone() == (2,)


# --- S-20


def test_s_20_a_commit_that_fails_gives_no_row_to_the_dead_letters_twice(tmp_path):
    failing = threading.Event()
    failing.set()

    class Flaky(SqliteSink):
        async def begin(self, key):
            found = await super().begin(key)
            if found is not None:
                commit = found.commit

                async def flaky():
                    if failing.is_set():
                        failing.clear()
                        raise bq.RetryableError("the destination is away", retry_after=0)
                    await commit()

                found.commit = flaky
            return found

    class Table(Flaky):
        pass

    target = Table(tmp_path / "out.db", upsert_on=["v"])
    options = {"retry": bq.RetryPolicy(initial=0.01), "on_bad_row": "dead_letter"}
    with DriverSink("rows", sink=target, rows="dict", dead_letters=tmp_path / "dead.jsonl", **options) as sink:
        sink(Frame([1, None, None, 2]), 0)
        assert (sink.stats().dead_rows, sink.stats().retried, sink.stats().batches) == (2, 1, 1)
    assert select(tmp_path / "out.db") == [1, 2]
    assert len((tmp_path / "dead.jsonl").read_text().splitlines()) == 2


# --- S-21


def test_s_21_dead_letters_in_the_database_of_the_rows_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"on_bad_row": "dead_letter", "dead_letters": SqliteSink(tmp_path / "out.db", "dead")}
    with pytest.raises(bq.ConfigError, match=r"DriverSink 'rows': dead_letters=.*out.db' is the database of the rows"):
        DriverSink("rows", sink=SqliteSink("out.db"), **given)
    DriverSink("rows", sink=SqliteSink("other.db"), **given).close()


# --- S-25 to S-27: rows that a table refuses in the transaction of their batch


class Row(msgspec.Struct):
    v: int | None


def table_of(kind, postgres, tmp_path, name, columns):
    """A sink for a new table, and a function that reads it."""
    if kind == "postgres":
        postgres.sql(f"DROP TABLE IF EXISTS {name}; CREATE TABLE {name} ({columns})")
        return PostgresSink(postgres.dsn, name), lambda: sorted(map(int, postgres.sql(f"SELECT v FROM {name}")))
    with closing(sqlite3.connect(tmp_path / "out.db")) as database:
        database.execute(f"CREATE TABLE {name} ({columns})")
    return SqliteSink(tmp_path / "out.db", name), lambda: select(tmp_path / "out.db", name)


def write_with_letters(target, tmp_path, values, **options):
    """Write batches; the values of the dead letters, and the counts."""
    path = tmp_path / "dead.jsonl"
    with DriverSink("rows", sink=target, on_bad_row="dead_letter", dead_letters=path, **options) as sink:
        for number, batch in enumerate(values):
            sink(Frame(batch, query=f"of {tmp_path.name}"), number)
        letters = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["row"]["v"] for line in letters], sink.stats()


@pytest.mark.parametrize("rows", [Row, "dict", "batch"], ids=["structs", "dicts", "batches"])
@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_s_25_a_row_that_a_transaction_leaves_out_is_in_the_dead_letters(postgres, tmp_path, kind, rows):
    target, read = table_of(kind, postgres, tmp_path, "left_out", "v bigint CHECK (v % 10 <> 3)")
    letters, stats = write_with_letters(target, tmp_path, [range(40), [50, 53], [60]], rows=rows)
    assert sorted(letters) == [3, 13, 23, 33, 53]
    assert read() == [n for n in range(40) if n % 10 != 3] + [50, 60]
    assert (stats.dead_rows, stats.batches, stats.failed) == (5, 3, 0)


@pytest.mark.parametrize("rows", [Row, "batch"], ids=["structs", "batches"])
@pytest.mark.parametrize("in_flight", [1_000, 4], ids=["one send", "several sends"])
@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_s_26_rows_that_a_table_refuses_only_together_leave_the_first_one_in(postgres, tmp_path, kind, in_flight, rows):
    """Two rows of one key: each alone is fine. The batch was repeated without end."""
    target, read = table_of(kind, postgres, tmp_path, "twice", "v bigint PRIMARY KEY")
    letters, stats = write_with_letters(
        target, tmp_path, [[1, 2, 3, 4, 1, 5, 2], [5, 6]], rows=rows, rows_in_flight=in_flight
    )
    assert (sorted(letters), read()) == ([1, 2, 5], [1, 2, 3, 4, 5, 6])
    assert (stats.dead_rows, stats.batches) == (3, 2)


def test_s_26_a_transaction_that_can_not_say_which_of_its_rows_fails_the_batch(tmp_path):
    """One whose sends leave nothing to go on with, as of somebody's own sink."""

    class Plain:
        def __init__(self, transaction):
            self.send, self.commit, self.rollback = transaction.send, transaction.commit, transaction.rollback

    class Target(SqliteSink):
        async def begin(self, key):
            found = await super().begin(key)
            return None if found is None else Plain(found)

    with closing(sqlite3.connect(tmp_path / "out.db")) as database:
        database.execute("CREATE TABLE rows (v INTEGER PRIMARY KEY CHECK (v <> 7))")
    assert write_with_letters(Target(tmp_path / "out.db"), tmp_path, [[6, 7, 8]])[0] == [7]
    with pytest.raises(bq.DeliveryError, match="UNIQUE constraint failed"):
        write_with_letters(Target(tmp_path / "out.db"), tmp_path, [[1, 2, 1]])
    assert select(tmp_path / "out.db") == [6, 8]


@pytest.mark.parametrize(
    ("kind", "reason"), [("sqlite", "CHECK constraint failed"), ("postgres", "the sink rejected too many rows")]
)
def test_s_26_more_refused_rows_than_a_batch_may_have_fail_it(postgres, tmp_path, monkeypatch, kind, reason):
    monkeypatch.setattr("batchqueue_async.spark.bad_rows._MOST", 2)
    target, read = table_of(kind, postgres, tmp_path, "most", "v bigint CHECK (v > 5)")
    assert sorted(write_with_letters(target, tmp_path, [[1, 2, 6]])[0]) == [1, 2]
    with pytest.raises(bq.DeliveryError, match=reason):
        write_with_letters(target, tmp_path, [[7], [1, 2, 3, 8]], source="again")
    assert read() == [6, 7]


def test_s_26_a_constraint_that_ends_the_transaction_fails_the_batch(tmp_path):
    """Else the rows after it would be committed, in transactions of their own."""
    target, read = table_of("sqlite", None, tmp_path, "ends", "v INTEGER NOT NULL ON CONFLICT ROLLBACK")
    with pytest.raises(bq.DeliveryError, match="is ON CONFLICT ROLLBACK"):
        write_with_letters(target, tmp_path, [[1, None, 2]])
    assert read() == []


DEFERRED = """
    v bigint PRIMARY KEY, needs bigint GENERATED ALWAYS AS (v / 2) STORED
    REFERENCES {name} DEFERRABLE INITIALLY DEFERRED
"""


@pytest.mark.parametrize("rows", [Row, "batch"], ids=["structs", "batches"])
@pytest.mark.parametrize("in_flight", [1_000, 4], ids=["one send", "several sends"])
def test_s_27_a_row_that_its_commit_refuses_is_in_the_dead_letters(postgres, tmp_path, rows, in_flight):
    """Each row needs the one of half its number; one that comes later will do, as long as nothing else is refused."""
    target, read = table_of("postgres", postgres, tmp_path, "deferred", DEFERRED.format(name="deferred"))
    batches = [[5, 2, 4, 1, 0], [10, 11, 14, 20, 3]]
    letters, stats = write_with_letters(target, tmp_path, batches, rows=rows, rows_in_flight=in_flight)
    assert (sorted(letters), read()) == ([14], [0, 1, 2, 3, 4, 5, 10, 11, 20])
    assert (stats.dead_rows, stats.batches, stats.failed) == (1, 2, 0)


# --- S-28


NEEDING = {
    "at once": "v bigint PRIMARY KEY, needs bigint GENERATED ALWAYS AS (v / 2) STORED REFERENCES {name}",
    "deferred": DEFERRED,
}
NEEDING_IN_SQLITE = """
    CREATE TRIGGER needs BEFORE INSERT ON needing
    WHEN NEW.v > 0 AND NOT EXISTS (SELECT * FROM needing WHERE v = NEW.v / 2)
    BEGIN SELECT RAISE(ABORT, 'what it needs is not there'); END
"""


def table_of_needing(postgres, tmp_path, kind, **options):
    if kind != "sqlite":
        return table_of("postgres", postgres, tmp_path, "needing", NEEDING[kind].format(name="needing"))
    _, read = table_of("sqlite", postgres, tmp_path, "needing", "v INTEGER PRIMARY KEY")
    with closing(sqlite3.connect(tmp_path / "out.db")) as database:
        database.execute(NEEDING_IN_SQLITE)
    return SqliteSink(tmp_path / "out.db", "needing", **options), read


@pytest.mark.parametrize("rows", [Row, "dict", "batch"], ids=["structs", "dicts", "batches"])
@pytest.mark.parametrize("in_flight", [1_000, 4], ids=["one send", "several sends"])
@pytest.mark.parametrize("kind", ["at once", "deferred", "sqlite"])
def test_s_28_a_row_that_needs_one_which_comes_later_is_not_in_the_dead_letters(
    postgres, tmp_path, rows, in_flight, kind
):
    """Each needs the one of half its number; 14 and 15 need 7, which never comes, and 29 needs 14."""
    target, read = table_of_needing(postgres, tmp_path, kind)
    batches = [[29, 20, 14, 10, 5, 2, 15, 1, 0], [6, 3, 40, 40]]
    letters, stats = write_with_letters(target, tmp_path, batches, rows=rows, rows_in_flight=in_flight)
    assert (sorted(letters), read()) == ([14, 15, 29, 40], [0, 1, 2, 3, 5, 6, 10, 20, 40])
    assert (stats.dead_rows, stats.batches, stats.failed) == (4, 2, 0)


def test_s_28_rows_are_tried_again_as_often_as_it_may_help(tmp_path, monkeypatch):
    target, read = table_of_needing(None, tmp_path, "sqlite")
    chain = [2**power for power in range(12, -1, -1)]
    monkeypatch.setattr("batchqueue_async.spark.micro_batch.PASSES", 3)
    letters, _ = write_with_letters(target, tmp_path, [[*chain, 0]], rows_in_flight=4)
    assert sorted([*letters, *read()]) == [0, *reversed(chain)]
    assert read() == [0, 1, 2, 4]  # SQLite looks at one row after the other, and each pass lets one in


def test_s_28_rows_that_replace_others_keep_their_order(tmp_path):
    """An older row that is tried again would replace a newer one."""
    target, read = table_of_needing(None, tmp_path, "sqlite", upsert_on=["v"])
    letters, _ = write_with_letters(target, tmp_path, [[1, 0]], rows_in_flight=4)
    assert (letters, read()) == ([1], [0])


# --- S-29


ODD = pa.array([b"a", b"b\xff", None, b"\xc3\xa4"]).view(pa.string())
"""Texts as Spark has them: any bytes."""
IN_LIST = pa.ListArray.from_arrays(pa.array(range(5), pa.int32()), ODD)
IN_STRUCT = pa.StructArray.from_arrays([ODD], ["x"])
IN_MAP = pa.MapArray.from_arrays(
    pa.array([0, 1, 2, 2, 3], pa.int32()), pa.array([b"a", b"b\xff", b"\xc3\xa4"]).view(pa.string()), [1, 2, 3]
)

BESIDE_NAN = pa.StructArray.from_arrays([ODD, pa.array([float("nan"), 2.0, 3.0, 4.0])], ["x", "y"])


class Text(msgspec.Struct):
    v: str | None


@pytest.mark.parametrize("rows", [Text, "tuple", "dict", "batch"], ids=["structs", "tuples", "dicts", "batches"])
@pytest.mark.parametrize("kind", ["jsonl", "sqlite"])
def test_s_29_a_text_that_is_not_utf_8_is_a_bad_row(tmp_path, rows, kind):
    """No client takes such a text: its batch failed again and again, with an error that named no column."""
    path = tmp_path / "out"
    columns = {"columns": ["v"]} if kind == "sqlite" else {}
    target = {"jsonl": JsonLinesSink, "sqlite": SqliteSink}[kind](path, **columns)
    letters, stats = write_with_letters(target, tmp_path, [ODD], rows=rows)
    assert (letters, stats.dead_rows, stats.rows) == (["b\\xff"], 1, 4)
    found = select(path) if kind == "sqlite" else path.read_text().splitlines()
    assert len(found) == 3
    with (
        DriverSink("rows", sink=target, rows=rows) as sink,
        pytest.raises(bq.ConfigError, match=r"column 'v' .* UTF-8"),
    ):
        sink(Frame(ODD))


@pytest.mark.parametrize(
    ("values", "letter"),
    [
        (IN_LIST, ["b\\xff"]),
        (IN_STRUCT, {"x": "b\\xff"}),
        (IN_MAP, [["b\\xff", 2]]),
        (BESIDE_NAN, {"x": "b\\xff", "y": 2.0}),
    ],
    ids=["list", "struct", "map", "beside NaN"],
)
def test_s_29_at_any_depth(tmp_path, values, letter):
    letters, _ = write_with_letters(JsonLinesSink(tmp_path / "out.jsonl"), tmp_path, [values])
    assert letters == [letter]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_s_29_tuples_keep_both_columns_of_one_name(tmp_path):
    refused = []
    batch = pa.RecordBatch.from_arrays([ODD, pa.array([1, 2, 3, 4])], ["v", "v"])
    assert Converter("tuple")(batch, lambda *each: refused.append(each)) == [("a", 1), (None, 3), ("ä", 4)]
    assert refused == [({"v (0)": "b\\xff", "v (1)": 2}, "column 'v' has a text that is not UTF-8")]


def test_s_29_who_takes_record_batches_as_they_are_gets_every_text(tmp_path):
    found = []

    async def consume(batches):
        found.extend(batches)

    with DriverSink("rows", consumer=consume, rows="batch") as sink:
        sink(Frame(ODD))
    assert [each.column(0).cast(pa.binary()).to_pylist() for each in found] == [ODD.cast(pa.binary()).to_pylist()]


@pytest.mark.parametrize("rows", ["dict", "batch"])
def test_s_29_on_the_executors(tmp_path, rows):
    given = {"sink": "jsonl", "path": str(tmp_path / "out"), "rows": rows, "dead_letters": str(tmp_path / "dead")}
    options = as_options({**given, "on_bad_row": "dead_letter"})
    key = BatchKey("job", 0)
    part = Worker(options).write(Attempt(key, 0, "a"), iter([pa.RecordBatch.from_arrays([ODD], ["v"])]))
    assert (part.rows, part.dead_rows) == (4, 1)
    assert publish(options, key, [PartWritten(part)])
    counts = [len(file.read_text().splitlines()) for file in tmp_path.glob("*/[!.]*/*.jsonl")]
    assert sorted(counts) == [1, 3]
