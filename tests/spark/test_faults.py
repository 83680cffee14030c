"""Faults that were found by using the Spark parts as data engineers do, each by its id; on a real local Spark."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import enum
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import functions

import batchqueue_async as bq
from batchqueue_async.export import RetryPolicy
from batchqueue_async.sinks.base import Attempt, BatchKey, SendResult
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.memory import MemorySink
from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import BatchQueueDataSource, DriverSink, process_bridge
from batchqueue_async.spark.executors.options import as_options, read_options
from batchqueue_async.spark.executors.part_writer import worker
from batchqueue_async.spark.listener import QueryListener
from batchqueue_async.spark.writes.ledger import ledger_at

FAST = RetryPolicy(initial=0.01, max_delay=0.05, max_age=300.0)


def select(path, query="SELECT v FROM rows ORDER BY v"):
    with closing(sqlite3.connect(path)) as database:
        return [row if len(row) > 1 else row[0] for row in database.execute(query)]


def files(spark, directory, count, rows, start=0):
    """A stream of so many files, one in each batch."""
    if not directory.exists():
        directory.mkdir(parents=True)
        for number in range(count):
            path = directory / f"{number:04d}.json"
            path.write_text("\n".join(f'{{"v": {start + number * rows + each}}}' for each in range(rows)))
            os.utime(path, (1e9 + number, 1e9 + number))
    return spark.readStream.schema("v long").option("maxFilesPerTrigger", 1).json(str(directory))


def run(frame, function, checkpoint, mode="append"):
    """Run a query over all that is there."""
    writer = frame.writeStream.outputMode(mode).foreachBatch(function)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination(600)
    return query


def into(found):
    async def handle(rows):
        found.extend(rows)

    return handle


class Destination:
    """A sink in whose place the tests put what they need."""

    async def open(self): ...
    async def close(self): ...
    async def send(self, batch): ...


# --- S-1


def test_s_1_two_calls_of_one_sink_in_a_batch_are_two_writes(spark, tmp_path):
    sink = DriverSink("halves", sink=SqliteSink(tmp_path / "out.db"))

    def both(frame, number):
        sink(frame.where("v % 2 = 0"), number)
        sink(frame.where("v % 2 = 1"), number)

    with sink:
        run(files(spark, tmp_path / "in", 2, 10), both, tmp_path / "checkpoint")
        assert (sink.stats().batches, sink.stats().skipped) == (4, 0)
    assert select(tmp_path / "out.db") == list(range(20))


def test_s_1_two_sinks_of_one_table_are_two_writes(spark, tmp_path):
    first, second = (DriverSink("same", sink=SqliteSink(tmp_path / "out.db")) for _ in range(2))

    def both(frame, number):
        first(frame.where("v % 2 = 0"), number)
        second(frame.where("v % 2 = 1"), number)

    with first, second:
        run(files(spark, tmp_path / "in", 2, 10), both, tmp_path / "checkpoint")
    assert select(tmp_path / "out.db") == list(range(20))


def test_s_1_each_write_of_a_batch_has_its_place_again_after_a_failure(spark, tmp_path):
    """The second write fails, the query with it, and its restart in the same process writes what was missing."""
    sink, failing = DriverSink("again", sink=SqliteSink(tmp_path / "out.db")), [True]

    def both(frame, number):
        sink(frame.where("v % 2 = 0"), number)
        if failing:
            failing.clear()
            raise LookupError("between the two")
        sink(frame.where("v % 2 = 1"), number)

    with sink:
        with pytest.raises(Exception, match="between the two"):
            run(files(spark, tmp_path / "in", 1, 10), both, tmp_path / "checkpoint")
        run(files(spark, tmp_path / "in", 1, 10), both, tmp_path / "checkpoint")
        assert (sink.stats().skipped, sink.stats().skipped_rows) == (1, 5)
    assert select(tmp_path / "out.db") == list(range(10))


def test_s_1_writes_at_once_are_named_or_refused(spark, tmp_path):
    import pyspark

    slow = threading.Barrier(2, timeout=300)

    class Slow(SqliteSink):
        async def begin(self, key):
            await asyncio.to_thread(slow.wait)
            return await super().begin(key)

    def two(*names):
        return [DriverSink(f"half {n}", sink=Slow(tmp_path / names[n])) for n in (0, 1)]

    refused = []

    def fan_out(sinks, named, frame, number):
        def write(place):
            options = {"part": f"half-{place}"} if named else {}
            try:
                sinks[place](frame.where(f"v % 2 = {place}"), number, **options)
            except bq.ConfigError as error:
                refused.append(str(error))
                slow.wait()

        threads = [pyspark.InheritableThread(target=write, args=(place,)) for place in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    stream = files(spark, tmp_path / "in", 1, 10)
    for names, named in ((("out.db", "out.db"), True), (("0.db", "1.db"), False), (("out.db", "out.db"), False)):
        sinks = two(*names)
        run(stream, partial(fan_out, sinks, named), tmp_path / f"{names[0]} {named}")
        for sink in sinks:
            sink.close()
        assert len(refused) == (names[0] == names[1] and not named)
    assert "part='a name'" in refused[0]
    assert select(tmp_path / "0.db") + select(tmp_path / "1.db") == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert len(select(tmp_path / "out.db")) == 15  # all of the first query, and one half of the last


# --- S-2


@pytest.mark.parametrize("certain", ["transaction", "ledger"])
def test_s_2_a_source_belongs_to_one_checkpoint(spark, tmp_path, certain):
    def sink(name):
        if certain == "transaction":
            return DriverSink(name, sink=SqliteSink(tmp_path / "out.db"), source="orders")
        return DriverSink(name, sink=JsonLinesSink(tmp_path / "o"), source="orders", ledger=tmp_path / "ledger")

    old, new = files(spark, tmp_path / "old", 4, 10), files(spark, tmp_path / "new", 3, 10, start=1000)
    with sink("first") as first:
        run(old, first, tmp_path / "checkpoint")
        assert first.stats().batches == 4
    with sink("other") as other, pytest.raises(Exception, match=r"another checkpoint.*source='orders-2'"):
        run(new, other, tmp_path / "another checkpoint")
    with sink("first") as first:  # its own one goes on
        files(spark, tmp_path / "more", 1, 10, start=40)
        (tmp_path / "more" / "0000.json").rename(tmp_path / "old" / "0009.json")
        run(old, first, tmp_path / "checkpoint")
        assert (first.stats().batches, first.stats().skipped) == (1, 0)


def test_s_2_what_looks_like_a_repetition_and_may_not_be_is_refused(spark, tmp_path):
    """Spark Connect does not name the query: there the number must be that of the last batch."""
    from types import SimpleNamespace

    def frame(number):
        return SimpleNamespace(
            sparkSession=SimpleNamespace(),
            mapInArrow=lambda *_: SimpleNamespace(toLocalIterator=lambda: iter([])),
            toArrow=lambda: pa.table({"v": [number]}),
        )

    def sink():
        made = DriverSink("connect", sink=SqliteSink(tmp_path / "out.db"), source="orders")
        made._collector.last_bytes = 1
        return made

    with sink() as first:
        for number in range(3):
            first(frame(number), number)
    with sink() as again, pytest.raises(bq.ConfigError, match=r"later ones are in.*source='orders-2'"):
        again(frame(1000), 0)
    assert select(tmp_path / "out.db") == [0, 1, 2]


def test_s_2_skipped_rows_are_a_warning_a_count_and_in_the_listener(spark, tmp_path, logs):
    from sessions import forget_last_commit

    listener = QueryListener()
    spark.streams.addListener(listener)
    try:
        stream = files(spark, tmp_path / "in", 2, 10)
        for _ in range(2):
            with DriverSink("again", sink=SqliteSink(tmp_path / "out.db")) as sink:
                query = run(stream, sink, tmp_path / "checkpoint")
                stats = sink.stats()
            forget_last_commit(tmp_path / "checkpoint")
        assert (stats.batches, stats.skipped, stats.skipped_rows) == (0, 1, 10)
        warned = [event for event in logs if event["event"] == "spark_batch_skipped"]
        assert [(event["log_level"], event["rows"]) for event in warned] == [("warning", 10)]
        deadline = time.monotonic() + 300
        while str(query.id) not in listener.stats() and time.monotonic() < deadline:
            time.sleep(0.05)
        found = listener.stats()[str(query.id)]
        assert (found.skipped, found.skipped_rows) == (1, 10)
    finally:
        spark.streams.removeListener(listener)


# --- S-3


class Deduplicating(Destination):
    """Drops records whose keys it knows, as NATS does; its connection breaks after two."""

    def __init__(self):
        self.have, self.seen, self.failing = [], set(), True

    async def send_keyed(self, batch, keys):
        for record, key in zip(batch, keys, strict=True):
            if key not in self.seen:
                self.seen.add(key)
                self.have.append(record["v"])
            if self.failing and len(self.have) == 2:
                self.failing = False
                raise bq.RetryableError("the connection broke after two rows")


@pytest.mark.parametrize("key", [None, ["v"]])
def test_s_3_a_repetition_in_another_order_neither_loses_nor_duplicates_rows(spark, tmp_path, key):
    destination, orders = Deduplicating(), ["v", "-v"]
    with DriverSink("keyed", sink=destination, key=key, retry=None) as sink:
        stream = files(spark, tmp_path / "in", 1, 3)

        def turned(frame, number):
            sink(frame.orderBy(functions.expr(orders.pop(0))), number)

        with pytest.raises(Exception, match="the connection broke"):
            run(stream, turned, tmp_path / "checkpoint")
        run(stream, turned, tmp_path / "checkpoint")
    assert sorted(destination.have) == [0, 1, 2]


def test_s_3_rows_of_the_same_content_are_all_delivered(spark):
    destination = Deduplicating()
    destination.failing = False
    with DriverSink("equal", sink=destination) as sink:
        sink(spark.range(5).selectExpr("7 AS v"))
    assert destination.have == [7] * 5


# --- S-4 to S-8


def test_s_4_rows_of_an_interrupted_job_do_not_come_into_the_next_one(spark, tmp_path):
    import signal

    inside = threading.Event()

    class Slow(SqliteSink):
        async def begin(self, key):
            transaction = await super().begin(key)
            send = transaction.send

            async def slowly(batch):
                inside.set()
                await asyncio.sleep(0.2)
                return await send(batch)

            transaction.send = slowly
            return transaction

    def interrupt():
        inside.wait(300)
        os.kill(os.getpid(), signal.SIGINT)

    with DriverSink("job", sink=Slow(tmp_path / "out.db"), rows_in_flight=8) as sink:
        frame = spark.range(0, 20, 1, 1).selectExpr("id AS v")
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt).start()
        try:
            with pytest.raises(KeyboardInterrupt):
                sink(frame)
        finally:
            signal.signal(signal.SIGINT, before)
        sink(frame)
        assert sink.stats().rows == 20
    assert select(tmp_path / "out.db") == list(range(20))


def test_s_5_sinks_of_one_name_that_start_at_once_keep_their_rows(spark):
    frames = [spark.createDataFrame([(n,)], "v int").cache() for n in range(4)]
    for _ in range(5):
        found = [[] for _ in frames]
        sinks = [DriverSink("rows", consumer=into(each)) for each in found]
        gate = threading.Barrier(len(frames))

        def first_batch(sink, frame, gate=gate):
            gate.wait()
            sink(frame)

        threads = [threading.Thread(target=first_batch, args=pair) for pair in zip(sinks, frames, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[{"v": n}] for n in range(4)]
        assert len({sink._queue.name for sink in sinks}) == 4
        for sink in sinks:
            sink.close()


@pytest.mark.parametrize("base", [dict, object])
def test_s_6_a_second_sink_for_the_same_rows_of_a_shared_queue_is_refused(spark, base):
    found = [], []
    frame = spark.range(1).selectExpr("id AS v")
    first = DriverSink("shared six", handlers={dict: into(found[0])})
    second = DriverSink("shared six", handlers={base: into(found[1])})
    with first:
        first(frame)
        with pytest.raises(bq.ConfigError, match=r"queue 'shared six'.*rows of type dict.*another name"):
            second(frame)
        first(frame)
    with second:  # the first one is closed
        second(frame)
    assert [len(each) for each in found] == [2, 1]


def test_s_7_sinks_of_one_ledger_file_keep_each_others_notes(spark, tmp_path):
    ledger = tmp_path / "ledger.json"
    found = {"a": [], "b": []}
    sinks = {name: DriverSink(name, consumer=into(found[name]), ledger=ledger) for name in found}

    def run_both():
        for name, sink in sinks.items():
            run(files(spark, tmp_path / name, 2, 3), sink, tmp_path / f"checkpoint {name}")

    run_both()
    assert sorted(name.rpartition("/")[2] for name in json.loads(ledger.read_text())["delivered"]) == ["to-a", "to-b"]
    assert ledger_at(ledger) is ledger_at(str(ledger))


def test_s_7_a_note_keeps_what_another_process_wrote(tmp_path):
    mine = ledger_at(tmp_path / "ledger")
    (tmp_path / "ledger").write_text('{"version": 1, "delivered": {"theirs": 4}}')
    mine.note(BatchKey("mine", 2))
    assert json.loads((tmp_path / "ledger").read_text())["delivered"] == {"theirs": 4, "mine": 2}
    assert mine.is_delivered(BatchKey("theirs", 4))


def test_s_8_a_program_that_ends_without_close_closes_its_sinks(tmp_path):
    program = """
import sys
from types import SimpleNamespace
import pyarrow, asyncio
from batchqueue_async.spark import DriverSink
import batchqueue_async as bq

class Buffered:
    async def open(self): self.rows = []
    async def send(self, batch): self.rows += [each["v"] for each in batch]
    async def close(self):
        await asyncio.sleep(0.01)
        print("closed with", self.rows, flush=True)

frame = SimpleNamespace(sparkSession=SimpleNamespace(), toArrow=lambda: pyarrow.table({"v": [1, 2]}))
for sink in (DriverSink("open", sink=Buffered()), DriverSink("exporter", consumer=bq.Exporter(Buffered()))):
    sink._collector.last_bytes = 1
    sink(frame)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["closed with [1, 2]"] * 2, done.stderr


# --- S-15


def published(home):
    return sorted(line for file in home.glob("[!.]*/*.jsonl") for line in file.read_text().split())


def test_s_15_a_stream_that_was_aborted_may_stage_the_same_batch_again(tmp_path):
    options = {"sink": "jsonl", "path": str(tmp_path / "out")}
    from batchqueue_async.spark.executors import data_source

    writer = BatchQueueDataSource(options).streamWriter(None, False)
    for name in ("first", "second"):
        rows = iter([pa.RecordBatch.from_pydict({"v": [1]})])
        part = worker(writer.options).write(Attempt(BatchKey("query", 3), 0, name), rows)
        if name == "first":
            writer.abort([data_source.PartWritten(part)], 3)
    writer.commit([data_source.PartWritten(part)], 3)
    assert published(tmp_path / "out") == ['{"v":1}']


# --- S-10


def test_s_10_columns_of_one_name_are_refused(spark, tmp_path):
    twice = spark.range(2).selectExpr("id AS a", "id * 10 AS a", "id AS b")
    found = []
    for options in ({"consumer": into(found)}, {"sink": SqliteSink(tmp_path / "out.db")}):
        with DriverSink("twice", **options) as sink, pytest.raises(bq.ConfigError, match="2 columns of the name 'a'"):
            sink(twice)
    with DriverSink("tuples", consumer=into(found), rows="tuple") as sink:
        sink(twice)
    assert sorted(found) == [(0, 0, 0), (1, 10, 1)]
    with pytest.raises(bq.ConfigError, match="2 columns of the name 'a'"):
        BatchQueueDataSource({"sink": "jsonl", "path": "x"}).writer(twice.schema, False)


@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["stream", "collect"])
@pytest.mark.parametrize(("rows", "item"), [("dict", {}), ("tuple", ())])
def test_s_10_rows_without_columns_are_delivered(spark, rows, item, limit):
    found = []
    with DriverSink("none", consumer=into(found), rows=rows, collect_bytes=limit) as sink:
        sink(spark.range(0, 25_000, 1, 3).select())
        assert sink.stats().rows == 25_000
    assert found == [item] * 25_000


def test_s_10_a_table_without_columns_is_refused(spark, tmp_path):
    with (
        DriverSink("none", sink=SqliteSink(tmp_path / "x.db")) as sink,
        pytest.raises(bq.ConfigError, match="no columns"),
    ):
        sink(spark.range(3).select())
    with DriverSink("lines", sink=JsonLinesSink(tmp_path / "x.jsonl")) as sink:
        sink(spark.range(3).select())
    assert (tmp_path / "x.jsonl").read_text() == "{}\n" * 3


# --- S-11, S-12


def test_s_11_an_estimate_that_is_far_too_low_is_not_believed(spark):
    wide = spark.range(0, 3_000, 1, 16).selectExpr("id AS v", "repeat('x', 100000) AS s")  # 300 MB, estimated at 100 KB
    seen = 0

    async def add_up(batches):
        nonlocal seen
        seen += sum(each.num_rows for each in batches)

    with DriverSink("wide", consumer=add_up, rows="batch", collect_bytes=64 << 20) as sink:
        sink(wide)
        assert (sink.stats().rows, sink.stats().path) == (3_000, "stream")
    assert seen == 3_000


def test_s_11_a_batch_that_one_job_can_not_collect_goes_the_other_way_at_once(spark, tmp_path):
    """Rows that came before the job failed are in a transaction, which is begun anew."""
    settings = spark.sparkContext._jsc.sc().conf()
    settings.set("spark.driver.maxResultSize", "2m")
    try:
        with DriverSink("grown", sink=SqliteSink(tmp_path / "out.db")) as sink:
            sink(spark.range(1).selectExpr("id AS v", "'x' AS s"))
            sink(spark.range(1, 400, 1, 8).selectExpr("id AS v", "repeat('x', 20000) AS s"))  # 1 MB a partition
            assert (sink.stats().path, sink.stats().batches, sink.stats().failed) == ("stream", 2, 0)
    finally:
        settings.set("spark.driver.maxResultSize", "1g")
    assert select(tmp_path / "out.db") == list(range(400))


def test_s_12_many_small_partitions_are_few_jobs_from_the_first_batch_on(spark):
    frame = spark.createDataFrame(spark.range(0, 1_000, 1, 200).rdd, "v long")  # its size is not known
    before = jobs(spark)
    found = []
    with DriverSink("first", consumer=into(found)) as sink:
        sink(frame)
        assert sink.stats().path == "stream"
    assert sorted(each["v"] for each in found) == list(range(1_000))
    assert jobs(spark) - before <= 5


def jobs(spark):
    """How many jobs the session has run."""
    return spark.sparkContext._jsc.sc().dagScheduler().nextJobId()


def test_s_12_a_stream_is_in_sparks_order_and_bounded(spark):
    from batchqueue_async.spark import collect

    frame = spark.range(0, 40_000, 1, 16).selectExpr("id AS v", "repeat('x', 100) AS s")
    found = [value for batch in collect.streamed(frame, 1 << 20) for value in batch["v"].to_pylist()]
    assert found == list(range(40_000))


# --- S-13


def test_s_13_a_destination_that_is_away_for_a_moment_does_not_end_the_query(spark, tmp_path):
    held = sqlite3.connect(tmp_path / "out.db", check_same_thread=False, isolation_level=None)
    held.execute("BEGIN IMMEDIATE")
    waiting = threading.Event()

    class Locked(SqliteSink):
        async def begin(self, key):
            try:
                return await super().begin(key)
            except bq.RetryableError:
                waiting.set()
                raise

    def release():
        waiting.wait(300)
        held.execute("ROLLBACK")
        held.close()

    with DriverSink("locked", sink=Locked(tmp_path / "out.db", busy_timeout=0.05), retry=FAST) as sink:
        held.execute("COMMIT")
        process_bridge.bridge().call(sink._route.open)
        held.execute("BEGIN IMMEDIATE")
        threading.Thread(target=release).start()
        run(files(spark, tmp_path / "in", 2, 10), sink, tmp_path / "checkpoint")
        assert sink.stats().retried >= 1
    assert select(tmp_path / "out.db") == list(range(20))


@pytest.mark.parametrize("when", ["send", "commit"])
def test_s_13_a_transaction_that_breaks_is_begun_anew(spark, tmp_path, when):
    failing = [2]

    class Breaking(SqliteSink):
        async def begin(self, key):
            transaction = await super().begin(key)
            real = getattr(transaction, when)

            async def breaking(*arguments):
                if failing[0]:
                    failing[0] -= 1
                    raise bq.RetryableError("the connection broke")
                return await real(*arguments)

            setattr(transaction, when, breaking)
            return transaction

    with DriverSink("broken", sink=Breaking(tmp_path / "out.db"), retry=FAST) as sink:
        sink(spark.range(10).selectExpr("id AS v"))
        assert (sink.stats().batches, sink.stats().retried, sink.stats().failed) == (1, 2, 0)
    assert select(tmp_path / "out.db") == list(range(10))


def test_s_13_the_limit_ends_it_with_the_destinations_own_error(spark):
    class Away(Destination):
        calls = 0

        async def send(self, batch):
            self.calls += 1
            raise bq.RetryableError("nobody there")

    away = Away()
    with (
        DriverSink("away", sink=away, retry=RetryPolicy(initial=0.01, max_delay=0.01, max_attempts=3)) as sink,
        pytest.raises(bq.DeliveryError, match="nobody there"),
    ):
        sink(spark.range(3))
    assert away.calls == 3


def test_s_13_the_stop_of_the_query_ends_the_waiting(spark, tmp_path):
    waiting = threading.Event()

    class Away(Destination):
        async def send(self, batch):
            waiting.set()
            raise bq.RetryableError("nobody there")

    sink = DriverSink("stopped", sink=Away(), retry=RetryPolicy(initial=2_000.0, max_delay=2_000.0, jitter=False))
    stream = files(spark, tmp_path / "in", 1, 3)
    query = stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c")).start()
    assert waiting.wait(300)
    stopping = threading.Thread(target=query.stop)
    stopping.start()
    stopping.join(300)
    assert not stopping.is_alive()
    assert sink.stats().batches == 0
    sink.close()


# --- S-16


def test_s_16_built_in_sinks_get_record_batches_and_tuples_cost_no_more(spark, tmp_path, monkeypatch):
    seen = set()
    real = SqliteSink.begin

    async def begin(self, key):
        transaction = await real(self, key)
        send = transaction.send

        async def noted(batch):
            seen.update(type(each).__name__ for each in batch)
            return await send(batch)

        transaction.send = noted
        return transaction

    monkeypatch.setattr(SqliteSink, "begin", begin)
    for rows in (None, "dict", "tuple"):
        path = tmp_path / f"{rows}.db"
        target = SqliteSink(path, columns=["v", "n"] if rows == "tuple" else None)
        with DriverSink("fast", sink=target, rows=rows) as sink:
            sink(spark.range(3).selectExpr("id AS v", "concat('n', id) AS name"))
            assert sink.stats().rows == 3
        assert select(path, "SELECT * FROM rows ORDER BY v") == [(0, "n0"), (1, "n1"), (2, "n2")]
    assert seen == {"RecordBatch"}


# --- types


def take(frame, rows="dict", **options):
    found = []
    with DriverSink("types", consumer=into(found), rows=rows, **options) as sink:
        sink(frame)
    return found


@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["stream", "collect"])
def test_s_types_maps_are_dicts_and_instants_are_in_utc(spark, tmp_path, limit):
    frame = spark.sql(
        "SELECT map('k', 1) AS m, named_struct('in', map(1, 'x')) AS s, timestamp_seconds(0) AS t,"
        " timestamp_ntz'2026-01-02 03:04:05' AS n, interval '1 02:03:04' day to second AS d"
    )
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        (found,) = take(frame, collect_bytes=limit)
        with DriverSink("sqlite", sink=SqliteSink(tmp_path / "out.db")) as sink:
            sink(spark.sql("SELECT timestamp_seconds(0) AS v, map('k', 1) AS m"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert (found["m"], found["s"]) == ({"k": 1}, {"in": {1: "x"}})
    assert found["t"].isoformat() == "1970-01-01T00:00:00+00:00"
    assert (found["n"], found["d"]) == (
        dt.datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001 - it has none
        dt.timedelta(days=1, seconds=7384),
    )
    assert select(tmp_path / "out.db", "SELECT * FROM rows") == [("1970-01-01T00:00:00+00:00", '{"k":1}')]


class Color(enum.Enum):
    RED = "red"


class Pos(msgspec.Struct):
    x: int
    y: int


class Deep(msgspec.Struct):
    pos: Pos
    places: list[Pos]
    color: Color
    tags: set[int]
    price: decimal.Decimal
    ratio: float
    renamed: int = msgspec.field(name="Other")


def test_s_types_structs_are_typed_deeply(spark):
    pos = "named_struct('x', 1, 'y', 2)"
    frame = spark.sql(
        f"SELECT {pos} AS pos, array({pos}) AS places, 'red' AS color, array(1, 1) AS tags, 1.50 AS price, 1 AS ratio,"
        " 7 AS Other"
    )
    (found,) = take(frame, Deep)
    assert found == Deep(Pos(1, 2), [Pos(1, 2)], Color.RED, {1}, decimal.Decimal("1.50"), 1.0, 7)


class Value(msgspec.Struct):
    v: int


def test_s_types_a_null_in_any_row_of_a_field_without_one_is_refused(spark):
    frame = spark.sql("SELECT * FROM VALUES (1), (2), (null) AS t(v)").coalesce(1)
    with pytest.raises(bq.ConfigError, match=r"rows=Value.*column 'v': Expected `int`, got `null`.*dead_letter"):
        take(frame, Value)


@pytest.mark.parametrize(
    "expression",
    [
        "date'+10000-01-01'",
        "interval '1-2' year to month",
        "make_interval(1, 2, 3, 4, 5, 6, 7)",
        "array(date'+10000-01-01')",
        "named_struct('at', timestamp'+10000-01-01 00:00:00')",
        "map('k', array(date'+10000-01-01'))",
        "array(interval '1-2' year to month)",
        "named_struct('a', 1, 'a', 2)",
    ],
)
def test_s_types_a_value_that_python_can_not_hold_names_its_column(spark, tmp_path, expression):
    frame = spark.sql(f"SELECT {expression} AS c")
    with pytest.raises(bq.ConfigError, match=r"column 'c'.*(cast|rename)"):
        take(frame)
    with (
        DriverSink("table", sink=SqliteSink(tmp_path / "out.db")) as sink,
        pytest.raises(bq.ConfigError, match=r"column 'c'.*(cast|rename)"),
    ):
        sink(frame)


TYPES = {
    "i": ("1", "INTEGER"),
    "d": ("0.5D", "REAL"),
    "n": ("cast(1.50 AS decimal(38, 9))", "TEXT"),
    "b": ("true", "INTEGER"),
    "s": ("'x'", "TEXT"),
    "x": ("X'00'", "BLOB"),
    "at": ("timestamp_seconds(0)", "TEXT"),
    "gone": ("null", ""),
    "arr": ("array(1, null)", "TEXT"),
    "m": ("map('k', 1)", "TEXT"),
    "st": ("named_struct('a', named_struct('b', 1))", "TEXT"),
    "long": ("interval '1 02:03:04' day to second", "REAL"),
    "v": ("parse_json('[1, 2.5]')", "TEXT"),
}


@pytest.mark.parametrize("way", ["driver", "executors"])
def test_s_types_an_empty_table_is_made_and_typed_by_sparks_schema(spark, tmp_path, way):
    frame = spark.sql(f"SELECT {', '.join(f'{text} AS {name}' for name, (text, _) in TYPES.items())}")
    path = tmp_path / "out.db"
    for part in (frame.limit(0), frame):
        if way == "driver":
            with DriverSink("empty", sink=SqliteSink(path)) as sink:
                sink(part)
        else:
            spark.dataSource.register(BatchQueueDataSource)
            part.write.format("batchqueue").options(sink="sqlite", path=str(path)).mode("append").save()
        if part is not frame:
            assert select(path, "SELECT name, type FROM pragma_table_info('rows')") == [
                (name, kind) for name, (_, kind) in TYPES.items()
            ]
            assert select(path, "SELECT * FROM rows") == []
    assert select(path, "SELECT v, m, arr, n, long FROM rows") == [
        ("[1,2.5]", '{"k":1}', "[1,null]", "1.500000000", 93784.0)
    ]


def test_s_types_the_first_row_does_not_say_what_a_column_is(spark, tmp_path):
    """By its values, the column of the first batch would be one of whole numbers, or of nothing."""
    numbers = spark.sql("SELECT * FROM VALUES (1.0D, null), (2.5D, 'x') AS t(d, s)").coalesce(1)
    with DriverSink("first", sink=SqliteSink(tmp_path / "out.db", columns=["d", "s"]), rows="tuple") as sink:
        sink(numbers.where("d = 1"))
        sink(numbers.where("d > 1"))
    assert select(tmp_path / "out.db", "SELECT name, type FROM pragma_table_info('rows')") == [
        ("d", "REAL"),
        ("s", "TEXT"),
    ]
    assert select(tmp_path / "out.db", "SELECT d, s FROM rows ORDER BY d") == [(1.0, None), (2.5, "x")]


def test_s_types_variants_are_what_they_hold(spark, tmp_path):
    frame = spark.sql(
        "SELECT parse_json(t) AS v, array(parse_json(t)) AS a, map('k', parse_json(t)) AS m, named_struct('x',"
        """ parse_json(t)) AS s FROM VALUES ('{"a": [1, 2.5, null]}'), ('5'), ('"x"'), (null) AS x(t)"""
    ).coalesce(1)
    found = take(frame)
    values = [{"a": [1, decimal.Decimal("2.5"), None]}, 5, "x", None]
    assert [each["v"] for each in found] == values
    assert [(each["a"], each["m"], each["s"]) for each in found] == [([v], {"k": v}, {"x": v}) for v in values]
    with DriverSink("json", sink=SqliteSink(tmp_path / "out.db")) as sink:
        sink(frame.select("v"))
    assert select(tmp_path / "out.db", "SELECT v FROM rows") == ['{"a":[1,2.5,null]}', "5", '"x"', None]
    with DriverSink("lines", sink=JsonLinesSink(tmp_path / "out.jsonl")) as sink:
        sink(frame.select("v").limit(2))
    assert (tmp_path / "out.jsonl").read_text().splitlines() == ['{"v":{"a":[1,2.5,null]}}', '{"v":5}']


def test_s_types_numbers_that_are_not_finite_follow_the_rule_at_any_depth(spark, tmp_path, logs):
    odd = "double('nan')"
    frame = spark.sql(f"SELECT array(1.0D, {odd}) AS a, map('k', {odd}) AS m, named_struct('x', {odd}) AS s")
    with DriverSink("nulls", sink=SqliteSink(tmp_path / "out.db")) as sink:
        sink(frame)
    assert select(tmp_path / "out.db", "SELECT * FROM rows") == [("[1.0,null]", '{"k":null}', '{"x":null}')]
    assert [event["nulls"] for event in logs if event["event"] == "spark_values_not_finite"] == [3]
    with pytest.raises(bq.ConfigError, match=r"column 'a' has 1 values that are NaN"):
        take(frame, non_finite="fail")


@pytest.mark.parametrize("mode", ["strict", "add"])
def test_s_types_a_schema_that_drifts_does_as_the_sink_says(spark, tmp_path, mode):
    path = tmp_path / "out.db"
    with DriverSink("drift", sink=SqliteSink(path, schema=mode)) as sink:
        sink(spark.range(1).selectExpr("id AS v"))
        more = spark.range(1, 2).selectExpr("id AS v", "0.5D AS extra")
        if mode == "strict":
            with pytest.raises(bq.DeliveryError, match=r"no column 'extra'.*schema='add'"):
                sink(more)
        else:
            sink(more.limit(0))  # the column is there before its first row
            assert select(path, "SELECT name, type FROM pragma_table_info('rows')")[1] == ("extra", "REAL")
            sink(more)
    assert select(path) == ([0] if mode == "strict" else [0, 1])


def test_s_types_nan_and_infinity_follow_a_rule(spark, tmp_path, logs):
    frame = spark.sql("SELECT double('nan') AS a, double('inf') AS b, 0.5D AS c")
    kept = take(frame)[0]
    assert kept["a"] != kept["a"]
    assert kept["b"] == float("inf")
    for target in (SqliteSink(tmp_path / "out.db"), JsonLinesSink(tmp_path / "out.jsonl")):
        with DriverSink("nulls", sink=target) as sink:
            sink(frame)
    assert select(tmp_path / "out.db", "SELECT * FROM rows") == [(None, None, 0.5)]
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"a": None, "b": None, "c": 0.5}
    assert [event["nulls"] for event in logs if event["event"] == "spark_values_not_finite"] == [2, 2]
    with pytest.raises(bq.ConfigError, match=r"column 'a'.*NaN or infinite"):
        take(frame, non_finite="fail")


class Appending(MemorySink):
    """A sink that neither upserts nor replaces."""


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_s_types_results_that_change_are_not_appended(spark, tmp_path, mode):
    counted = files(spark, tmp_path / "in", 2, 10).groupBy("v").count()
    sink = Appending()
    with (
        DriverSink("modes", sink=sink) as refused,
        pytest.raises(Exception, match=f"output mode is {mode.title()}.*upsert_on"),
    ):
        run(counted, refused, tmp_path / "refused", mode)
    found = []
    with DriverSink("handler", consumer=into(found)) as handler:
        run(counted, handler, tmp_path / "handled", mode)
    with DriverSink("asked", sink=sink, append_any_mode=True) as asked:
        run(counted, asked, tmp_path / "asked", mode)
    assert len(sink.records) == len(found) > 0


def counts(spark, directory, batches=3, rows=10):
    """How often each of five numbers came, in a stream of so many files."""
    return files(spark, directory, batches, rows).groupBy((functions.col("v") % 5).alias("k")).count()


@pytest.mark.parametrize("where", ["sqlite", "postgres"])
def test_s_types_update_mode_upserts_and_complete_mode_replaces(spark, tmp_path, request, where):
    """After the run of each query, the table has what Spark's own batch job says; `k` that fell out is gone."""
    if where == "postgres":
        postgres = request.getfixturevalue("postgres")
        from batchqueue_async.sinks.postgres import PostgresSink

        postgres.sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")

        def sink(table, **options):
            return PostgresSink(postgres.dsn, table, **options)

        def rows(table):
            return [
                tuple(map(int, line.split("|"))) for line in postgres.sql(f"SELECT k, count FROM {table} ORDER BY k")
            ]
    else:

        def sink(table, **options):
            return SqliteSink(tmp_path / "out.db", table, **options)

        def rows(table):
            return select(tmp_path / "out.db", f"SELECT k, count FROM {table} ORDER BY k")

    every = [(k, 6) for k in range(5)]
    with DriverSink("update", sink=sink("updated", upsert_on=["k"])) as updated:
        run(counts(spark, tmp_path / "in"), updated, tmp_path / "update", "update")
        assert updated.stats().rows == 15
    assert rows("updated") == every
    with DriverSink("complete", sink=sink("completed")) as completed:
        run(counts(spark, tmp_path / "in"), completed, tmp_path / "complete", "complete")
    assert rows("completed") == every
    with DriverSink("none", sink=sink("fallen")) as fallen:  # none of them has less than five after the third file
        few = counts(spark, tmp_path / "in").where("count < 5")
        run(few, fallen, tmp_path / "fallen", "complete")
        assert fallen.stats().rows == 10
    assert rows("fallen") == []


def test_s_types_a_whole_result_has_one_write_into_a_table(spark, tmp_path):
    sink = DriverSink("twice", sink=SqliteSink(tmp_path / "out.db"))

    def both(frame, number):
        sink(frame.where("k < 3"), number)
        sink(frame.where("k > 2"), number)

    with sink, pytest.raises(Exception, match=r"output mode is Complete.*would remove what another one wrote"):
        run(counts(spark, tmp_path / "in", 1), both, tmp_path / "checkpoint", "complete")


def test_s_types_executors_upsert_by_option(spark, tmp_path):
    spark.dataSource.register(BatchQueueDataSource)
    options = {"sink": "sqlite", "path": str(tmp_path / "out.db"), "upsert_on": "v", "schema": "add"}
    for add in ("'old' AS s", "'new' AS s, 1 AS more"):
        frame = spark.range(0, 10, 1, 2).selectExpr("id % 5 AS v", add.split(", ")[0], *add.split(", ")[1:])
        frame.write.format("batchqueue").options(**options).mode("append").save()
    assert select(tmp_path / "out.db", "SELECT * FROM rows ORDER BY v") == [(v, "new", 1) for v in range(5)]
    changing = (
        counts(spark, tmp_path / "in", 1).writeStream.format("batchqueue").options(**options).outputMode("update")
    )
    query = changing.option("checkpointLocation", str(tmp_path / "c")).start()
    with pytest.raises(Exception, match="batchqueue does not support Update mode"):  # as Spark itself says it
        query.awaitTermination(600)


# --- bad rows


def test_s_bad_rows_go_to_the_dead_letters_and_the_batch_goes_on(spark, tmp_path):
    class Choosy(SqliteSink):
        async def begin(self, key):
            transaction = await super().begin(key)
            send = transaction.send

            async def checked(batch):
                for each in batch:
                    if any(value % 7 == 3 for value in each["v"].to_pylist()):
                        raise bq.PermanentError("no sevens and threes")
                return await send(batch)

            transaction.send = checked
            return transaction

    bad = tmp_path / "bad.jsonl"
    sink = DriverSink(
        "choosy", sink=Choosy(tmp_path / "out.db"), rows="batch", on_bad_row="dead_letter", dead_letters=bad
    )
    with sink:
        run(files(spark, tmp_path / "in", 2, 20), sink, tmp_path / "checkpoint")
        assert (sink.stats().batches, sink.stats().dead_rows, sink.stats().failed) == (2, 6, 0)
    assert select(tmp_path / "out.db") == [n for n in range(40) if n % 7 != 3]
    letters = [json.loads(line) for line in bad.read_text().splitlines()]
    assert sorted(each["row"]["v"] for each in letters) == [3, 10, 17, 24, 31, 38]
    assert {each["reason"] for each in letters} == {"no sevens and threes"}
    assert {each["sink"] for each in letters} == {"choosy"}


@pytest.mark.parametrize("kind", ["sink", "handler"])
def test_s_bad_rows_of_other_destinations(spark, kind):
    taken, letters = [], MemorySink()

    class Choosy(Destination):
        async def send(self, batch):
            if any(each["v"] == 5 for each in batch):
                raise bq.PermanentError("not five")
            taken.extend(each["v"] for each in batch)

    target = {"sink": Choosy()} if kind == "sink" else {"consumer": Choosy().send}
    with DriverSink("choosy", **target, on_bad_row="dead_letter", dead_letters=letters) as sink:
        sink(spark.range(0, 10, 1, 1).selectExpr("id AS v"))
        assert sink.stats().dead_rows == 1
    assert sorted(taken) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert [(each["row"], each["reason"]) for each in letters.records] == [({"v": 5}, "not five")]


def test_s_bad_rows_of_record_batches_that_a_sink_rejects_are_single_rows(spark):
    taken, letters = [], MemorySink()

    class Choosy(Destination):
        async def send(self, batch):
            rejected = {}
            for place, each in enumerate(batch):
                values = each["v"].to_pylist()
                if 5 in values:
                    rejected[place] = bq.PermanentError("not five")
                else:
                    taken.extend(values)
            return SendResult(rejected=rejected)

    options = {"on_bad_row": "dead_letter", "dead_letters": letters}
    with DriverSink("choosy", sink=Choosy(), rows="batch", **options) as sink:
        sink(spark.range(0, 10, 1, 1).selectExpr("id AS v"))
    assert sorted(taken) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert [each["row"] for each in letters.records] == [{"v": 5}]


def test_s_bad_rows_that_do_not_fit_their_type(spark):
    found, letters = [], MemorySink()
    options = {"on_bad_row": "dead_letter", "dead_letters": letters}
    with DriverSink("misfit", consumer=into(found), rows=Value, **options) as sink:
        sink(spark.sql("SELECT * FROM VALUES (1), (2), (null) AS t(v)"))
    assert sorted(each.v for each in found) == [1, 2]
    assert [each["row"] for each in letters.records] == [{"v": None}]
    assert "Expected `int`, got `null`" in letters.records[0]["reason"]


# --- options, secrets, hosts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sink": "jsonl", "path": "x", "tabel": "y"},
            "option 'tabel'.*did you mean 'table'|option 'tabel' is unknown",
        ),
        ({"sink": "sqlite", "path": "x", "tabel": "y"}, "did you mean 'table'"),
        ({"sink": "sqlite", "path": "x", "rows_in_fligth": "5"}, "did you mean 'rows_in_flight'"),
        ({"sink": "spark_sinks:no_op_factory", "rows_in_fligth": "5"}, "did you mean 'rows_in_flight'"),
        ({"sink": "sqlite", "path": "x", "export.max_recods": "5"}, "did you mean 'export.max_records'"),
    ],
)
def test_s_misspelled_options_are_refused_with_the_nearest_name(options, message):
    with pytest.raises(bq.ConfigError, match=message):
        BatchQueueDataSource(options).writer(None, False)


def failing_with_its_options(options):
    raise ConnectionError(f"cannot connect with {options['password']}")


def test_s_no_message_holds_a_secret(monkeypatch):
    import spark_sinks

    monkeypatch.setattr(spark_sinks, "failing_with_its_options", failing_with_its_options, raising=False)
    secret = "hunter2"
    for options in (
        {"sink": "x:y", "export.password": secret},
        {"sink": "sqlite", "path": "p", "password": secret},
        {"sink": "spark_sinks:failing_with_its_options", "password": secret},
    ):
        with pytest.raises(bq.ConfigError) as caught:
            read_options(as_options(options)).make()
        assert secret not in str(caught.value)
        assert caught.value.__cause__ is None


def test_s_a_closed_host_is_replaced(spark, tmp_path):
    frame = spark.range(3).selectExpr("id AS v")
    with DriverSink("host", sink=SqliteSink(tmp_path / "out.db")) as sink:
        sink(frame)
        process_bridge.bridge().close()
        sink(frame)
    with DriverSink("another", sink=SqliteSink(tmp_path / "out.db")) as sink:
        sink(frame)
    assert select(tmp_path / "out.db") == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_s_a_forked_host_is_renewed():
    """The parent's lock is held by a thread that is not in the child."""
    program = """
import os, threading
from batchqueue_async.spark import process_bridge
held, go = threading.Event(), threading.Event()
def hold():
    with process_bridge.host._lock:
        held.set()
        go.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    process_bridge.bridge()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.split() == ["7"], done.stderr


def test_s_an_executors_worker_keeps_few_queues(tmp_path):
    before = len(process_bridge.bridge().manager.names())
    for day in range(20):
        options = as_options({"sink": "jsonl", "path": str(tmp_path / f"day{day}")})
        worker(options).write(Attempt(BatchKey("q", 0), 0, "a"), iter([pa.RecordBatch.from_pydict({"v": [1]})]))
    assert len(process_bridge.bridge().manager.names()) - before <= 8


def test_s_batch_jobs_of_one_sink_have_one_row_in_the_ledger(spark, tmp_path):
    with DriverSink("jobs", sink=SqliteSink(tmp_path / "out.db")) as sink:
        for _ in range(5):
            sink(spark.range(1).selectExpr("id AS v"))
    assert select(tmp_path / "out.db", "SELECT count(*) FROM batchqueue_ledger") == [1]
    assert select(tmp_path / "out.db") == [0] * 5
