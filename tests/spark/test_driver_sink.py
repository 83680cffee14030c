"""`DriverSink` on a real local Spark: batch jobs, streaming queries, failures and restarts."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import sqlite3
import threading
from contextlib import closing

import msgspec
import pyarrow as pa
import pytest
from sessions import forget_last_commit, run_batches
from spark_sinks import Keyed

import batchqueue_async as bq
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.memory import MemorySink
from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import DriverSink, collect, process_bridge
from batchqueue_async.spark.writes.streaming_query import current_run as query_run

ROWS_PER_BATCH = 40
BACKLOG = int(os.environ.get("BATCHQUEUE_SPARK_BACKLOG", "12"))


class Reading(msgspec.Struct):
    value: int
    name: str


@dataclasses.dataclass
class Point:
    value: int
    name: str = "none"


class Recorder:
    """A handler that runs on the bridge's loop, in real time."""

    def __init__(self):
        self.items = []
        self.sizes = []
        self.fail = None

    async def consume(self, batch):
        if self.fail is not None and self.fail(batch):
            raise LookupError("the shelf is empty")
        self.sizes.append(len(batch))
        self.items.extend(batch)


def select(path, query="SELECT value FROM rows ORDER BY value"):
    with closing(sqlite3.connect(path)) as database:
        return [row[0] for row in database.execute(query)]


def numbers(spark, count, partitions=3):
    return spark.range(0, count, 1, partitions).selectExpr("id AS value", "concat('n', id) AS name")


def stream(spark):
    return (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", ROWS_PER_BATCH)
        .option("numPartitions", 2)
        .option("startTimestamp", 0)
        .option("advanceMillisPerBatch", 1000)
        .load()
    )


def run(frame, sink, checkpoint, until):
    """Run a query until `until()`, or until it fails with the error that this raises."""
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint)).start()
    try:
        while not until() and not query.awaitTermination(0.05):
            pass
    finally:
        query.stop()
    if query.exception() is not None:
        raise query.exception()
    return query


# --- batch jobs


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ("dict", {"value": 7, "name": "n7"}),
        ("tuple", (7, "n7")),
        (Reading, Reading(7, "n7")),
        (Point, Point(7, "n7")),
    ],
)
def test_rows_come_as_asked(spark, rows, wanted):
    handler = Recorder()
    with DriverSink("as asked", consumer=handler, rows=rows) as sink:
        sink(numbers(spark, 50))
        assert sink.stats().rows == 50
    assert wanted in handler.items
    assert len(handler.items) == 50


def test_rows_come_as_whole_record_batches(spark):
    handler = Recorder()
    with DriverSink("whole", consumer=handler, rows="batch", rows_in_flight=40) as sink:
        sink(numbers(spark, 100))
    assert {type(each) for each in handler.items} == {pa.RecordBatch}
    assert max(each.num_rows for each in handler.items) <= 10
    assert sorted(value for each in handler.items for value in each["value"].to_pylist()) == list(range(100))


@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["stream", "collect"])
@pytest.mark.parametrize("ordered", [False, True])
def test_both_ways_to_the_driver_bring_every_row(spark, limit, ordered):
    collector = collect.Collector("test", limit)
    frame = numbers(spark, 25_000)
    found = [value for batch in collector.batches(frame, ordered=ordered) for value in batch["value"].to_pylist()]
    assert (found if ordered or limit == 0 else sorted(found)) == list(range(25_000))
    assert collector.path == ("collect" if limit else "stream")
    assert collector.last_bytes > 25_000 * 8


def test_the_size_of_the_last_batch_decides_where_spark_knows_none(spark):
    collector = collect.Collector("test", 1 << 20)
    unknown = spark.createDataFrame(numbers(spark, 10).rdd, "value long, name string")
    assert collect.estimated_bytes(unknown) is None
    assert len(list(collector.batches(unknown, ordered=False))) >= 1
    assert collector.path == "stream"
    list(collector.batches(unknown, ordered=False))
    assert collector.path == "collect"


def test_a_collect_without_the_private_parts_is_a_to_arrow(spark, monkeypatch):
    monkeypatch.setattr(collect, "_connector", lambda: None)
    found = [value for batch in collect.collected(numbers(spark, 30), ordered=False) for value in batch["value"]]
    assert len(found) == 30


@pytest.mark.parametrize("way", [collect.collected, lambda frame, ordered: collect.streamed(frame)])
def test_an_error_of_spark_reaches_the_caller_as_it_is(spark, way):
    frame = spark.range(10).selectExpr("assert_true(id < 5, 'too large') AS x")
    with pytest.raises(Exception, match="too large"):
        list(way(frame, ordered=False))


@pytest.mark.parametrize("way", [collect.collected, lambda frame, ordered: collect.streamed(frame)])
def test_a_reader_may_leave_early(spark, way):
    batches = way(numbers(spark, 50_000), ordered=False)
    assert next(batches).num_rows > 0
    batches.close()
    assert spark.range(5).count() == 5


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_rows_are_in_flight_than_allowed(spark, workers):
    """Rows that are made and not yet handled, and the record batch that they are made from."""
    made = handled = most = 0

    async def handle(batch):
        nonlocal handled
        await asyncio.sleep(0.001)
        handled += len(batch)

    config = bq.QueueConfig(workers=bq.WorkerPolicy.fixed(workers), partitions=bq.PartitionPolicy.fixed(workers))
    with DriverSink("bounded", config, consumer=handle, rows="tuple", rows_in_flight=400) as sink:
        convert = sink._convert

        def counted(batch):
            nonlocal made, most
            items = convert(batch)
            made += len(items)
            most = max(most, made - handled)
            return items

        sink._convert = counted
        sink(numbers(spark, 3_000))
    assert made == handled == 3_000
    assert most <= 300  # a quarter is for the record batch


def test_the_way_that_was_chosen_is_in_the_log(spark, logs):
    with DriverSink("told", consumer=Recorder(), collect_bytes=1 << 20) as sink:
        for rows in (10, 20, 1_000_000):
            sink(spark.range(rows))
    told = [event for event in logs if event["event"] == "spark_path_chosen"]
    assert [(event["path"], event["bytes"], event["log_level"]) for event in told] == [
        ("collect", 80, "info"),
        ("collect", 160, "debug"),
        ("stream", 8_000_000, "info"),
    ]
    assert {(event["sink"], event["limit"], event["known_from"]) for event in told} == {("told", 1 << 20, "spark")}


def test_a_failing_handler_fails_the_call_with_its_own_error(spark):
    handler = Recorder()
    handler.fail = lambda batch: any(each["value"] == 30 for each in batch)
    with DriverSink("failing", consumer=handler, rows_in_flight=40) as sink:
        with pytest.raises(bq.DeliveryError, match="LookupError: the shelf is empty") as caught:
            sink(numbers(spark, 1_000))
        assert isinstance(caught.value.__cause__, LookupError)
        handler.fail = None
        handler.items.clear()
        sink(numbers(spark, 10))
        assert len(handler.items) == 10
        assert (sink.stats().failed, sink.stats().batches, sink.stats().queue.used) == (1, 1, 0)


def test_a_handler_that_is_cut_off_fails_the_call(spark):
    async def handle(batch):
        await asyncio.sleep(30)

    with (
        DriverSink("slow", bq.QueueConfig(handler_timeout=0.01), consumer=handle) as sink,
        pytest.raises(bq.DeliveryError, match="handler_timeout"),
    ):
        sink(numbers(spark, 10))


def test_a_batch_job_into_a_transactional_sink_is_all_or_nothing(spark, tmp_path):
    with DriverSink("all", sink=SqliteSink(tmp_path / "out.db"), rows_in_flight=40) as sink:
        with pytest.raises(Exception, match="too large"):
            sink(spark.range(0, 1000, 1, 2).selectExpr("id AS value", "assert_true(id < 900, 'too large') AS x"))
        sink(numbers(spark, 5))
        sink(numbers(spark, 5))
    assert select(tmp_path / "out.db") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_records_that_the_sink_rejects_fail_the_batch(spark):
    class Choosy:
        async def open(self): ...
        async def close(self): ...
        async def send(self, batch):
            return SendResult(rejected={1: bq.PermanentError("no odd ones")})

    with DriverSink("choosy", sink=Choosy()) as sink, pytest.raises(bq.DeliveryError, match=r"rejected 1.*no odd ones"):
        sink(numbers(spark, 4))


def test_sinks_with_handlers_share_a_queue_and_others_do_not(spark):
    readings, points = Recorder(), Recorder()
    handlers = {Reading: readings, Point: points}
    first = DriverSink("shared", handlers=handlers, rows=Reading)
    second = DriverSink("shared", handlers=handlers, rows=Point)
    first(numbers(spark, 3))
    second(numbers(spark, 4))
    assert (len(readings.items), len(points.items)) == (3, 4)
    assert first._queue is second._queue or first._queue.name == second._queue.name == "shared"
    alone = [DriverSink("alone", consumer=Recorder()) for _ in range(2)]
    for sink in alone:
        sink(numbers(spark, 1))
    assert [sink._queue.name for sink in alone] == ["alone", "alone#2"]
    for sink in (first, second, *alone):
        sink.close()


# --- streaming


def test_a_stream_is_written_exactly_once_through_a_restart(spark, tmp_path):
    path = tmp_path / "out.db"
    for batches in (3, 2):  # the second query goes on where the first was stopped
        to_sqlite = SqliteSink(path, columns=["timestamp", "value"])
        with DriverSink("restart", sink=to_sqlite, rows="tuple") as sink:
            run(stream(spark), sink, tmp_path / "checkpoint", lambda n=batches, s=sink: s.stats().batches >= n)
    written = select(path)
    assert written == list(range(len(written)))
    assert len(written) >= 5 * ROWS_PER_BATCH


@pytest.mark.parametrize("group", [None, "the program's own"])
def test_the_run_of_a_query_is_known_from_batch_to_batch_and_not_beyond_its_end(spark, tmp_path, group):
    found = []

    def look(frame, _):
        if group is not None:
            frame.sparkSession.sparkContext.setJobGroup(group, "for all runs alike")
        found.append((query_run(frame), query_run(frame).is_stopped()))

    runs, before_the_end = [], []
    for batches in (2, 2):
        first, wanted = len(found), len(found) + batches
        runs.append(run(stream(spark), look, tmp_path / "checkpoint", lambda n=wanted: len(found) >= n))
        before_the_end += found[first:wanted]  # another batch may be under way while the query is stopped
    told = [(str(each.id), str(each.runId), "Append") for each in runs]
    assert list(dict.fromkeys((each.query, each.run, each.mode) for each, _ in found)) == told
    assert not any(stopped for _, stopped in before_the_end)
    assert all(each.is_stopped() for each, _ in found)
    if group is None:
        assert len({id(each) for each, _ in found}) == len(runs)  # the JVM is asked once for each


@pytest.mark.timeout(1200 + 4 * BACKLOG)
def test_a_backlog_of_many_batches_is_written_exactly_once_through_restarts(spark, tmp_path):
    """A query was away while many batches came in; it is stopped amid them, and goes on."""
    path, source = tmp_path / "out.db", tmp_path / "in"
    source.mkdir()
    for number in range(BACKLOG):
        (source / f"{number:06d}.json").write_text(f'{{"value": {number}}}')
    frame = spark.readStream.schema("value long").option("maxFilesPerTrigger", 1).json(str(source))
    with DriverSink("backlog", sink=SqliteSink(path)) as sink:
        run(frame, sink, tmp_path / "checkpoint", lambda: sink.stats().batches >= BACKLOG // 4)
    with DriverSink("backlog", sink=SqliteSink(path)) as sink:
        writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(600 + 2 * BACKLOG)
        assert query.exception() is None
        assert sink.stats().batches <= BACKLOG - BACKLOG // 4
    assert select(path) == list(range(BACKLOG))
    assert select(path, "SELECT number FROM batchqueue_ledger") == [BACKLOG - 1]


def test_a_batch_is_skipped_when_its_repetition_was_delivered(spark, tmp_path):
    """The driver dies after the sink's commit and before Spark's: the last entry of its commit log is not there."""
    path, checkpoint = tmp_path / "out.db", tmp_path / "checkpoint"
    with DriverSink("again", sink=SqliteSink(path)) as sink:
        run_batches(stream(spark).writeStream.foreachBatch(sink), checkpoint, 2)
    forget_last_commit(checkpoint)
    with DriverSink("again", sink=SqliteSink(path)) as sink:
        run(stream(spark), sink, checkpoint, lambda: sink.stats().batches >= 1)
        assert sink.stats().skipped == 1
    written = select(path)
    assert written == list(range(len(written)))


@pytest.mark.parametrize("ledger", [False, True])
def test_elsewhere_a_ledger_skips_what_was_delivered_and_without_it_comes_twice(spark, tmp_path, ledger):
    path, checkpoint = tmp_path / "out.jsonl", tmp_path / "checkpoint"
    options = {"ledger": tmp_path / "ledger.json"} if ledger else {}
    with DriverSink("twice", sink=JsonLinesSink(path), **options) as sink:
        run_batches(stream(spark).writeStream.foreachBatch(sink), checkpoint, 2)
    forget_last_commit(checkpoint)
    with DriverSink("twice", sink=JsonLinesSink(path), **options) as sink:
        run(stream(spark), sink, checkpoint, lambda: sink.stats().batches + sink.stats().skipped >= 2)
        assert (sink.stats().skipped > 0) == ledger
    values = [msgspec.json.decode(line)["value"] for line in path.read_bytes().splitlines()]
    assert (len(values) == len(set(values))) == ledger
    assert set(values) == set(range(len(set(values))))


def test_a_keyed_sink_gets_the_same_keys_again(spark, tmp_path):
    class Keyed:
        def __init__(self):
            self.seen = {}
            self.fail = True

        async def open(self): ...
        async def close(self): ...
        async def send(self, batch):
            raise AssertionError

        async def send_keyed(self, batch, keys):
            for record, key in zip(batch, keys, strict=True):
                assert self.seen.setdefault(key, record) == record
            if self.fail:
                raise ConnectionError("away")

    keyed = Keyed()
    with DriverSink("keyed", sink=keyed, retry=None) as sink:
        with pytest.raises(Exception, match="ConnectionError: away"):
            run(stream(spark), sink, tmp_path / "checkpoint", lambda: False)
        keyed.fail = False
        query = run(stream(spark), sink, tmp_path / "checkpoint", lambda: sink.stats().batches >= 2)
    first = {key.rpartition("/")[0] for key in list(keyed.seen)[:ROWS_PER_BATCH]}
    assert first <= {f"{query.id}/to-keyed/{number}" for number in (0, 1)}
    assert len(keyed.seen) >= 2 * ROWS_PER_BATCH
    assert len({repr(record) for record in keyed.seen.values()}) == len(keyed.seen)  # no record came with two keys


def test_a_failing_handler_fails_the_query_with_its_own_error(spark, tmp_path):
    handler = Recorder()
    handler.fail = lambda batch: True
    with (
        DriverSink("failing stream", consumer=handler) as sink,
        pytest.raises(Exception, match="LookupError: the shelf is empty"),
    ):
        run(stream(spark), sink, tmp_path / "checkpoint", lambda: False)


def test_a_query_stopped_amid_a_write_leaves_the_batch_whole_or_out(spark, tmp_path):
    path, checkpoint = tmp_path / "out.db", tmp_path / "checkpoint"
    inside, go_on = threading.Event(), threading.Event()

    class Slow(SqliteSink):
        async def begin(self, key):
            transaction = await super().begin(key)
            inside.set()
            await asyncio.to_thread(go_on.wait, 300)
            return transaction

    sink = DriverSink("stopped", sink=Slow(path))
    query = stream(spark).writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint)).start()
    assert inside.wait(300)
    stopping = threading.Thread(target=query.stop)
    stopping.start()
    go_on.set()
    stopping.join(300)
    assert not stopping.is_alive()
    following = DriverSink("following", sink=SqliteSink(path))
    run(stream(spark), following, checkpoint, lambda: following.stats().batches >= 2)
    sink.close()
    following.close()
    written = select(path)
    assert written == list(range(len(written)))


def test_state_goes_on_through_a_skipped_batch(spark, tmp_path):
    """A batch that is only skipped would leave its state store without a version, and the query without a way on."""
    path, checkpoint = tmp_path / "out.db", tmp_path / "checkpoint"
    counted = stream(spark).withWatermark("timestamp", "1 second").groupBy("timestamp").count()
    counted = counted.selectExpr("unix_millis(timestamp) AS value", "count")
    with DriverSink("state", sink=SqliteSink(path)) as sink:
        run_batches(counted.writeStream.foreachBatch(sink), checkpoint, 5)
        assert sink.stats().rows == 2
    forget_last_commit(checkpoint)
    with DriverSink("state", sink=SqliteSink(path)) as sink:
        run(counted, sink, checkpoint, lambda: sink.stats().rows >= 3)
        assert sink.stats().skipped == 1
    written = select(path)
    # the first row is at time 0, where the watermark begins, and counts as late
    assert written == list(range(1000, 1000 * len(written) + 1000, 1000))
    assert set(select(path, "SELECT count FROM rows")) == {ROWS_PER_BATCH}


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one"),
        ({"consumer": Recorder(), "sink": MemorySink()}, "exactly one"),
        ({"consumer": 7}, "async callable"),
        ({"sink": Recorder()}, "async open, send and close"),
        (
            {"sink": Keyed(), "key": "position", "config": bq.QueueConfig(workers=bq.WorkerPolicy.fixed(2))},
            "2 workers.*out of order",
        ),
        ({"sink": Keyed(), "key": "id"}, r"key='id' is not a list of columns.*key=\['id'\]"),
        ({"sink": MemorySink(), "on_bad_row": "skip"}, "on_bad_row='skip' is unknown"),
        ({"sink": MemorySink(), "on_bad_row": "dead_letter"}, "dead_letters='bad.jsonl'"),
        ({"sink": MemorySink(), "non_finite": "zero"}, "non_finite='zero' is unknown"),
        ({"sink": MemorySink(), "bytes_in_flight": 0}, "bytes_in_flight=0 is below 1"),
        ({"consumer": Recorder(), "rows": "list"}, "rows='list'"),
        ({"consumer": Recorder(), "rows": int}, "rows=<class 'int'>"),
        ({"consumer": Recorder(), "rows_in_flight": 3}, "rows_in_flight=3"),
        ({"handlers": {str: Recorder()}}, "none for the items"),
        ({"consumer": Recorder(), "config": bq.QueueConfig(consumer=Recorder())}, r"config\.consumer"),
        ({"consumer": Recorder(), "config": bq.QueueConfig(block_timeout=1.0)}, "block_timeout"),
        ({"consumer": Recorder(), "config": bq.QueueConfig(strategy=bq.BufferStrategy.DROP_OLDEST)}, "DROP_OLDEST"),
    ],
)
def test_options_are_checked_at_the_door(options, message):
    with pytest.raises(bq.ConfigError, match=message):
        DriverSink("checked", **options)


def test_a_struct_that_does_not_fit_is_refused_by_name(spark):
    with DriverSink("misfit", consumer=Recorder(), rows=Reading) as sink:
        with pytest.raises(bq.ConfigError, match=r"field 'name'.*only the columns"):
            sink(spark.range(3).selectExpr("id AS value"))
        with pytest.raises(bq.ConfigError, match="Expected `int`, got `str`"):
            sink(spark.range(3).selectExpr("'x' AS value", "'y' AS name"))


@pytest.mark.parametrize("rows", ["dict", "batch"])
def test_s_29_a_text_of_spark_that_is_not_utf_8_is_refused_by_name(spark, tmp_path, rows):
    frame = spark.sql("SELECT 1 AS id, cast(unhex('61ff62') AS string) AS name")
    with (
        DriverSink("odd", sink=JsonLinesSink(tmp_path / "out.jsonl"), rows=rows) as sink,
        pytest.raises(bq.ConfigError, match=r"column 'name' has a text that is not UTF-8.*cast\(name AS binary\)"),
    ):
        sink(frame)


def test_fields_with_defaults_may_be_missing(spark):
    handler = Recorder()
    with DriverSink("defaults", consumer=handler, rows=Point) as sink:
        sink(spark.range(2).selectExpr("id AS value"))
    assert sorted(handler.items, key=lambda each: each.value) == [Point(0), Point(1)]


def test_exactly_once_needs_a_name_of_the_query(spark, tmp_path):
    nameless = DriverSink("nameless", sink=SqliteSink(tmp_path / "out.db"))
    with nameless as sink, pytest.raises(bq.ConfigError, match="source="):
        sink(numbers(spark, 1), 0)
    with DriverSink("named", sink=SqliteSink(tmp_path / "out.db"), source="mine") as sink:
        sink(numbers(spark, 1), 0)
        sink(numbers(spark, 1), 0)
        assert (sink.stats().batches, sink.stats().skipped) == (1, 1)
    with DriverSink("at least once", consumer=Recorder()) as sink:
        sink(numbers(spark, 1), 0)
        assert sink.stats().batches == 1


def test_a_sink_travels_by_pickle_before_its_first_call(spark, tmp_path):
    sink = pickle.loads(pickle.dumps(DriverSink("pickled", sink=SqliteSink(tmp_path / "out.db"), rows=Reading)))
    with sink:
        sink(numbers(spark, 3))
    assert select(tmp_path / "out.db") == [0, 1, 2]
    assert repr(sink) == "<DriverSink 'pickled', rows='Reading'>"


def test_the_bridge_is_one_per_process():
    assert process_bridge.bridge() is process_bridge.bridge()
