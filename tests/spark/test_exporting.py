"""Spark's rows into exporters: durable, or delivered, when their batch is done."""

from __future__ import annotations

import asyncio
import json

import pyarrow as pa
import pytest
import spark_sinks

import batchqueue_async as bq
from batchqueue_async.sinks.base import Attempt, BatchKey
from batchqueue_async.sinks.memory import MemorySink
from batchqueue_async.spark import BatchQueueDataSource, DriverSink, process_bridge
from batchqueue_async.spark.executors import data_source
from batchqueue_async.spark.executors.options import as_options, read_options
from batchqueue_async.spark.executors.part_writer import Worker


class Away(MemorySink):
    """A destination that is not there."""

    async def send_keyed(self, batch, keys):
        raise bq.RetryableError("away")

    async def send(self, batch):
        raise bq.RetryableError("away")


class Slow(MemorySink):
    async def send_keyed(self, batch, keys):
        await asyncio.sleep(0.05)
        return await super().send_keyed(batch, keys)


def numbers(spark, count):
    return spark.range(0, count, 1, 3).selectExpr("id AS value")


def values(sink):
    return sorted(record["value"] for record in sink.records)


def on_disk(path, **options):
    return bq.ExportConfig(path=path, overflow="block", drain_timeout=0.0, **options)


# --- in the driver


def test_a_batch_returns_when_it_is_on_disk_and_is_delivered_after_a_restart(spark, tmp_path):
    away = bq.Exporter(Away(), on_disk(tmp_path / "queue"))
    with DriverSink("durable", consumer=away) as sink:
        sink(numbers(spark, 1_000))
        assert (sink.stats().rows, away.stats().delivered) == (1_000, 0)
    assert away.report.on_disk == 1_000
    there = MemorySink()
    exporter = bq.Exporter(there, bq.ExportConfig(path=tmp_path / "queue"))
    with DriverSink("durable", consumer=exporter) as sink:
        sink(numbers(spark, 5))
    assert values(there) == sorted([*range(1_000), *range(5)])


def test_without_a_disk_a_batch_returns_when_it_is_delivered(spark):
    there = Slow()
    with DriverSink("delivered", consumer=bq.Exporter(there)) as sink:
        sink(numbers(spark, 2_000))
        assert values(there) == list(range(2_000))


def test_without_a_disk_what_can_not_be_delivered_in_time_fails_the_batch(spark):
    exporter = bq.Exporter(Away(), bq.ExportConfig(drain_timeout=0.05))
    with DriverSink("in vain", consumer=exporter) as sink:
        with pytest.raises(TimeoutError, match="100 records left"):
            sink(numbers(spark, 100))
        assert (sink.stats().failed, sink.stats().batches) == (1, 0)
    assert len(exporter.report.undelivered) == 100


def test_sinks_of_one_queue_share_an_exporter(spark):
    there = MemorySink()
    exporter = bq.Exporter(there)
    handlers = {dict: exporter, tuple: exporter}
    first = DriverSink("shared exporter", handlers=handlers)
    second = DriverSink("shared exporter", handlers=handlers, rows="tuple")
    first(numbers(spark, 3))
    second(numbers(spark, 2))
    first.close()
    second(numbers(spark, 1))
    assert not exporter.closed
    second.close()
    assert exporter.closed
    assert len(there.records) == 6


def test_an_exporter_that_is_open_elsewhere_is_refused(spark):
    exporter = bq.Exporter(MemorySink())
    process_bridge.bridge().call(exporter.__aenter__)
    with DriverSink("open", consumer=exporter) as sink, pytest.raises(bq.ConfigError, match="is open already"):
        sink(numbers(spark, 1))
    process_bridge.bridge().call(exporter.shutdown)


def test_a_policy_that_may_drop_rows_is_told(spark, logs):
    for overflow in ("drop_oldest", "block"):
        exporter = bq.Exporter(MemorySink(), bq.ExportConfig(overflow=overflow), name=overflow)
        with DriverSink("told", consumer=exporter) as sink:
            sink(numbers(spark, 1))
    assert [event["exporter"] for event in logs if event["event"] == "spark_rows_may_drop"] == ["drop_oldest"]


# --- on the executors


def attempt(part=0):
    return Attempt(BatchKey("query", 0), part, "a")


def record_batches(count):
    yield pa.RecordBatch.from_pydict({"value": list(range(count))})


def worker(sink, monkeypatch, **options):
    monkeypatch.setattr(spark_sinks, "keyed", lambda given: sink)
    options = {name.replace("__", "."): str(text) for name, text in options.items()}
    return Worker(as_options({"sink": "spark_sinks:keyed", **options}))


def close(made):
    process_bridge.bridge().call(made._lasting.close)


def test_a_part_is_delivered_through_an_exporter(monkeypatch):
    there = Slow()
    made = worker(there, monkeypatch, export__batch__linger=0.01, queue__workers=2)
    assert made.write(attempt(), record_batches(1_000)).rows == 1_000
    assert values(there) == list(range(1_000))
    close(made)


def test_each_worker_has_a_directory_and_a_later_one_delivers_what_was_left(monkeypatch, tmp_path):
    options = {"export__path": tmp_path / "queue", "export__drain_timeout": 0.05}
    first = worker(Away(), monkeypatch, **options)
    second = worker(Away(), monkeypatch, **options)
    for each in (first, second):
        each.write(attempt(), record_batches(10))
    assert sorted(path.name for path in (tmp_path / "queue").iterdir()) == ["000", "001"]
    close(first)
    there = MemorySink()
    third = worker(there, monkeypatch, export__path=tmp_path / "queue")
    third.write(attempt(), record_batches(1))
    assert values(there) == [0, *range(10)]
    assert sorted(path.name for path in (tmp_path / "queue").iterdir()) == ["000", "001"]
    for each in (second, third):
        close(each)


def test_what_an_exporter_sends_is_not_staged(tmp_path):
    options = as_options({"sink": "jsonl", "path": str(tmp_path / "out.jsonl"), "export.batch.linger": "0"})
    assert read_options(options).rows == "dict"
    made = Worker(options)
    part = made.write(attempt(), record_batches(3))
    assert data_source.publish(options, part.attempt.key, [data_source.PartWritten(part)])
    data_source.discard(options, part.attempt.key)
    close(made)
    assert [json.loads(line)["value"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"export.size": "1"}, r"export\.size.*is unknown; there are export\.path"),
        ({"export.max_records": "many"}, r"export\.max_records='many' is not a number"),
        ({"export.overflow": "never"}, "overflow='never'"),
        ({"export.retry.initial": "-1"}, "initial"),
        ({"export.workers": "0"}, "0"),
        ({"export.workers": "2", "sink": "spark_sinks:no_op_factory"}, "made a handler"),
    ],
)
def test_export_options_are_checked_where_the_write_is_planned(options, message):
    with pytest.raises(bq.ConfigError, match=message):
        BatchQueueDataSource({"sink": "spark_sinks:plain_jsonl", "path": "x", **options}).writer(None, False)


def test_options_are_those_of_the_exporter():
    options = {
        "export.path": "/data/queue",
        "export.max_bytes": "1000",
        "export.retry.max_attempts": "7",
        "export.breaker.reset_timeout": "1.5",
        "export.batch.max_records": "9",
        "sink": "jsonl",
    }
    assert read_options(as_options(options)).export == bq.ExportConfig(
        path="/data/queue",
        max_bytes=1_000,
        overflow="block",
        retry=bq.RetryPolicy(max_attempts=7),
        breaker=bq.BreakerPolicy(reset_timeout=1.5),
        batch=bq.BatchPolicy(max_records=9),
    )


def test_executors_export_what_a_job_writes(spark, tmp_path):
    spark.dataSource.register(BatchQueueDataSource)
    (tmp_path / "out").mkdir()
    options = {"sink": "spark_sinks:plain_jsonl", "path": str(tmp_path / "out")}
    options["export.path"] = str(tmp_path / "queue")
    numbers(spark, 500).write.format("batchqueue").options(**options).mode("append").save()
    lines = [line for file in (tmp_path / "out").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert sorted(json.loads(line)["value"] for line in lines) == list(range(500))
    assert (tmp_path / "queue" / "000").is_dir()
