"""What a Python worker of an executor does, in this process."""

from __future__ import annotations

import gc
import threading

import pyarrow as pa
import pytest
import spark_sinks

import batchqueue_async as bq
from batchqueue_async.sinks.base import Attempt, BatchKey
from batchqueue_async.sinks.memory import MemorySink
from batchqueue_async.spark import BatchQueueDataSource, feed
from batchqueue_async.spark.executors import data_source
from batchqueue_async.spark.executors.options import as_options
from batchqueue_async.spark.executors.part_writer import Worker

KEY = BatchKey("query", 0)


def attempt(number=0, part=0, name="a"):
    return Attempt(BatchKey("query", number), part, name)


def record_batches(count, each=10):
    for start in range(0, count, each):
        yield pa.RecordBatch.from_pydict({"value": list(range(start, min(start + each, count)))})


def test_rows_come_as_the_options_ask(tmp_path):
    for rows in ("dict", "tuple", "spark_sinks:Reading"):
        options = as_options({"sink": "spark_sinks:types_into_a_file", "path": str(tmp_path / "seen"), "rows": rows})
        Worker(options).write(attempt(), record_batches(1))
    assert (tmp_path / "seen").read_text().splitlines() == ["{'value': 0}", "(0,)", "Reading(value=0, name='')"]


def test_the_next_record_batch_is_waited_for_off_the_loop(monkeypatch):
    """The rows of the first one are handled while Spark still works on the second."""
    handled = threading.Event()

    async def handle(batch):
        handled.set()

    monkeypatch.setattr(spark_sinks, "no_op", handle)

    def slow():
        yield from record_batches(10)
        assert handled.wait(300), "the loop stood still"
        yield from record_batches(10)

    part = Worker(as_options({"sink": "spark_sinks:no_op_factory"})).write(attempt(), slow())
    assert part.rows == 20


def test_records_have_the_same_keys_again(monkeypatch):
    monkeypatch.setattr(spark_sinks.Keyed, "seen", {})
    worker = Worker(as_options({"sink": "spark_sinks:keyed", "queue.max_batch": "7"}))
    for name in ("a", "b"):  # a task that is repeated
        for part in (0, 1):
            worker.write(attempt(3, part, name), record_batches(25))
    sources = {key.rpartition("/")[0] for key in spark_sinks.Keyed.seen}
    assert sources == {"query/0/3", "query/1/3"}
    assert len(spark_sinks.Keyed.seen) == 50


@pytest.mark.parametrize("option", ["queue.workers", "queue.partitions"])
def test_keys_that_would_not_be_the_same_again_are_refused(option):
    options = {"sink": "spark_sinks:keyed", option: "2", "key": "position"}
    with pytest.raises(bq.ConfigError, match=r"out of order to Keyed.*one worker and one partition"):
        BatchQueueDataSource(options).writer(None, False)
    assert BatchQueueDataSource({**options, "key": "id"}).writer(None, False)
    options["sink"] = "jsonl"
    assert BatchQueueDataSource({**options, "path": "x"}).writer(None, False)


def test_garbage_is_collected_rarely_and_only_while_rows_are_fed():
    before = gc.get_threshold()
    try:
        for usual in (700, 2_000):
            gc.set_threshold(usual, 10, 10)
            with feed.rarer_collections():
                assert gc.get_threshold() == (100_000, 10, 10)
            assert gc.get_threshold() == (usual, 10, 10)
        for chosen in (0, 5_000):
            gc.set_threshold(chosen)
            with feed.rarer_collections():
                assert gc.get_threshold()[0] == chosen
    finally:
        gc.set_threshold(*before)


def test_the_counters_of_all_parts_are_told_at_the_commit(tmp_path, logs):
    options = as_options({"sink": "jsonl", "path": str(tmp_path / "out")})
    worker = Worker(options)
    written = [worker.write(attempt(5, part), record_batches(25)) for part in (0, 1)]
    assert data_source.publish(options, written[0].attempt.key, [data_source.PartWritten(part) for part in written])
    told = next(event for event in logs if event["event"] == "spark_batch_published")
    assert (told["batch"], told["fresh"], told["parts"], told["rows"]) == ("query/5", True, 2, 50)
    assert told["bytes"] == sum(part.bytes for part in written) > 0
    assert told["seconds"] >= 0


def test_a_transaction_goes_with_each_part_where_the_sink_has_no_staging(monkeypatch):
    sink = MemorySink()
    monkeypatch.setattr(spark_sinks, "keyed", lambda options: sink)
    worker = Worker(as_options({"sink": "spark_sinks:keyed"}))
    for name in ("a", "b"):
        for part in (0, 1):
            worker.write(attempt(4, part, name), record_batches(5))
    assert [record["value"] for record in sink.records] == [0, 1, 2, 3, 4] * 2
    assert sink.delivered == {"query/0": 4, "query/1": 4}
