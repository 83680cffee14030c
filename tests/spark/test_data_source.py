"""`format("batchqueue")` on a real local Spark, and its parts in this process."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from sessions import forget_last_commit, run_batches

import batchqueue_async as bq
from batchqueue_async.sinks.base import Attempt, BatchKey
from batchqueue_async.spark import BatchQueueDataSource, requirements
from batchqueue_async.spark.executors import data_source
from batchqueue_async.spark.executors.options import as_options
from batchqueue_async.spark.executors.part_writer import Worker, worker

KEY = BatchKey("query", 0)


@pytest.fixture(scope="module")
def source(spark):
    spark.dataSource.register(BatchQueueDataSource)
    return spark


def numbers(spark, count, partitions=3):
    return spark.range(0, count, 1, partitions).selectExpr("id AS value", "concat('n', id) AS name")


def write(frame, **options):
    options = {name.replace("__", "."): str(text) for name, text in options.items()}
    frame.write.format("batchqueue").options(**options).mode("append").save()


def writing(spark, **options):
    return (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 40)
        .option("numPartitions", 2)
        .option("startTimestamp", 0)
        .load()
        .writeStream.format("batchqueue")
        .options(**{name: str(text) for name, text in options.items()})
    )


def stream(spark, **options):
    return writing(spark, **options).start()


def run_until(query, done):
    """Let a query run until `done()`; raises what the query fails with."""
    try:
        while not done() and not query.awaitTermination(0.05):
            pass
    finally:
        query.stop()
    if query.exception() is not None:
        raise query.exception()


def select(path):
    with closing(sqlite3.connect(path)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'rows'").fetchall():
            return []
        return [row[0] for row in database.execute("SELECT value FROM rows ORDER BY value")]


def count(path):
    return len(select(path)) if Path(path).exists() else 0


def lines(path):
    return sorted(
        json.loads(line)["value"] for file in Path(path).glob("[!.]*/*.jsonl") for line in file.read_text().splitlines()
    )


# --- batch jobs


def test_a_batch_job_into_json_lines(source, tmp_path):
    for _ in range(2):
        write(numbers(source, 1_000), sink="jsonl", path=tmp_path / "out")
    assert lines(tmp_path / "out") == sorted([*range(1_000)] * 2)
    assert not (tmp_path / "out" / ".staging").exists()


@pytest.mark.parametrize("rows", ["batch", "tuple", "dict"])
def test_a_batch_job_into_sqlite(source, tmp_path, rows):
    (tmp_path / "made.db").touch()
    with closing(sqlite3.connect(tmp_path / "out.db")) as database:
        database.execute("CREATE TABLE rows (value INTEGER, name TEXT)")
    frame = numbers(source, 30_000)
    if rows == "tuple":
        with pytest.raises(Exception, match="columns="):
            write(frame, sink="sqlite", path=tmp_path / "out.db", rows=rows)
        return
    write(frame, sink="sqlite", path=tmp_path / "out.db", rows=rows, queue__workers=2, rows_in_flight=9_000)
    assert select(tmp_path / "out.db") == list(range(30_000))
    assert not (tmp_path / "out.db.staging").exists()


def test_a_handler_on_the_executors(source, tmp_path):
    write(numbers(source, 100), sink="spark_sinks:into_a_file_per_worker", path=tmp_path)
    write(numbers(source, 100), sink="spark_sinks:into_a_file_per_worker", path=tmp_path)
    found = [int(line) for file in tmp_path.glob("*.txt") for line in file.read_text().split()]
    assert sorted(found) == sorted([*range(100)] * 2)


def test_a_sink_without_staging_gets_every_row(source, tmp_path):
    write(numbers(source, 100), sink="spark_sinks:plain_jsonl", path=tmp_path)
    found = [json.loads(line)["value"] for file in tmp_path.glob("*.jsonl") for line in file.read_text().split()]
    assert sorted(found) == list(range(100))


def test_a_handler_that_fails_fails_the_job_with_its_own_error(source):
    with pytest.raises(Exception, match="LookupError: the shelf is empty"):
        write(numbers(source, 10), sink="spark_sinks:failing_handler")


@pytest.mark.parametrize("sink", ["sqlite", "jsonl"])
def test_a_task_that_fails_leaves_nothing(source, tmp_path, sink):
    path = tmp_path / "out"
    bad = source.range(0, 1000, 1, 4).selectExpr("id AS value", "assert_true(id < 990, 'too large') AS x")
    with pytest.raises(Exception, match="too large"):
        write(bad, sink=sink, path=path)
    assert (lines(path) if sink == "jsonl" else count(path)) in (0, [])
    # Spark aborts while other tasks still run: what those stage is left behind, and never published.
    assert not [each for each in tmp_path.rglob("*") if each.is_file() and "staging" not in str(each)]
    write(numbers(source, 5), sink=sink, path=path)
    assert (lines(path) if sink == "jsonl" else select(path)) == [0, 1, 2, 3, 4]


def test_a_commit_that_fails_leaves_nothing(source, tmp_path):
    path = tmp_path / "out.db"
    with pytest.raises(Exception, match="the commit fails"):
        write(numbers(source, 50), sink="spark_sinks:failing_publish", path=path)
    assert count(path) == 0
    write(numbers(source, 50), sink="spark_sinks:failing_publish", path=path)
    assert select(path) == list(range(50))


# --- streaming


@pytest.mark.parametrize("sink", ["sqlite", "jsonl"])
def test_a_stream_goes_on_from_its_checkpoint(source, tmp_path, sink):
    path = tmp_path / ("out.db" if sink == "sqlite" else "out")
    written = lines if sink == "jsonl" else select
    for rows in (80, 160):
        query = stream(source, sink=sink, path=path, checkpointLocation=tmp_path / "checkpoint")
        run_until(query, lambda wanted=rows: path.exists() and len(written(path)) >= wanted)
    assert written(path) == list(range(len(written(path))))


def test_a_stream_whose_commit_failed_repeats_the_batch(source, tmp_path):
    path, options = tmp_path / "out.db", {"checkpointLocation": tmp_path / "checkpoint"}
    sink = "spark_sinks:failing_publish"
    with pytest.raises(Exception, match="the commit fails"):
        run_until(stream(source, sink=sink, path=path, **options), lambda: False)
    assert count(path) == 0
    run_until(stream(source, sink=sink, path=path, **options), lambda: count(path) >= 80)
    assert select(path) == list(range(count(path)))


def test_a_published_batch_is_not_published_again(source, tmp_path):
    path, checkpoint = tmp_path / "out.db", tmp_path / "checkpoint"
    run_batches(writing(source, sink="sqlite", path=path), checkpoint, 2)
    assert count(path) == 80
    forget_last_commit(checkpoint)
    run_batches(writing(source, sink="sqlite", path=path), checkpoint, 1)
    assert count(path) == 80
    query = stream(source, sink="sqlite", path=path, checkpointLocation=checkpoint)
    run_until(query, lambda: count(path) > 80)
    assert select(path) == list(range(count(path)))


def test_a_stream_stopped_amid_a_write_leaves_nothing_of_the_batch(source, tmp_path):
    path, flag, checkpoint = tmp_path / "out.db", tmp_path / "flag", tmp_path / "checkpoint"
    wait = Path(f"{flag}.wait")
    wait.touch()
    query = stream(source, sink="spark_sinks:slow", path=path, flag=flag, checkpointLocation=checkpoint)
    while not flag.exists():
        assert not query.awaitTermination(0.05), query.exception()
    stopping = threading.Thread(target=query.stop)
    stopping.start()
    stopping.join(300)
    assert not stopping.is_alive()
    assert count(path) == 0
    wait.unlink()
    query = stream(source, sink="spark_sinks:slow", path=path, flag=flag, checkpointLocation=checkpoint)
    run_until(query, lambda: count(path) >= 80)
    assert select(path) == list(range(count(path)))


# --- what is refused, where the write is planned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no option 'sink'"),
        ({"sink": "sqlite"}, "needs a path"),
        ({"sink": "oracle"}, "sink='oracle' is unknown"),
        ({"sink": "no_such:thing"}, "can't be imported"),
        ({"sink": "spark_sinks:nothing"}, "names no 'nothing'"),
        ({"sink": "spark_sinks:neither"}, "neither a sink nor a handler"),
        ({"sink": "spark_sinks:no_op_factory", "rows": "list"}, "rows='list'"),
        ({"sink": "spark_sinks:no_op_factory", "queue.size": "1"}, "queue.size.*unknown"),
        ({"sink": "spark_sinks:no_op_factory", "queue.max_batch": "many"}, "queue.max_batch='many' is not a number"),
        ({"sink": "spark_sinks:no_op_factory", "queue.max_batch": "0"}, "max_batch=0"),
        ({"sink": "spark_sinks:no_op_factory", "queue.workers": "0"}, "0"),
        ({"sink": "spark_sinks:no_op_factory", "rows_in_flight": "2"}, "rows_in_flight=2"),
    ],
)
def test_options_are_checked_where_the_write_is_planned(options, message):
    with pytest.raises(bq.ConfigError, match=message):
        BatchQueueDataSource(options).writer(None, False)


def test_overwriting_is_refused(source, tmp_path):
    frame = numbers(source, 1).write.format("batchqueue").option("sink", "jsonl").option("path", str(tmp_path))
    with pytest.raises(Exception, match="only appends"):
        frame.mode("overwrite").save()
    with pytest.raises(bq.ConfigError, match="only appends"):
        BatchQueueDataSource({"sink": "jsonl", "path": "x"}).streamWriter(None, True)


def test_an_older_spark_is_told_what_to_do(monkeypatch):
    monkeypatch.delattr(data_source.datasource, "DataSourceStreamArrowWriter")
    with pytest.raises(bq.ConfigError, match=r"PySpark 4\.1"):
        BatchQueueDataSource({"sink": "jsonl", "path": "x"}).streamWriter(None, False)
    with pytest.raises(bq.ConfigError, match=r"found 3\.5\.1"):
        requirements.check_version("3.5.1")


def test_a_missing_package_is_named_with_its_command():
    with pytest.raises(bq.ConfigError, match=r"needs no_such_package.*pip install 'batchqueue-async\[spark\]'"):
        requirements.need("no_such_package.part")


def test_a_package_that_misses_one_of_its_own_says_which(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import missing_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="missing_dependency"):
        requirements.need("broken_package")


# --- the parts, in this process


def record_batches(count):
    yield pa.RecordBatch.from_pydict({"value": list(range(count))})
    yield pa.RecordBatch.from_pydict({"value": [count]})


def test_a_worker_stages_and_the_driver_publishes(tmp_path):
    options = as_options({"Sink": "jsonl", "PATH": str(tmp_path / "out"), "rows_in_flight": "40"})
    part = worker(options).write(Attempt(KEY, 0, "a"), record_batches(100))
    assert (part.rows, part.attempt.name) == (101, "a")
    assert part.bytes > 0
    assert worker(options) is worker(options)
    assert lines(tmp_path / "out") == []
    assert data_source.publish(options, KEY, [data_source.PartWritten(part), None])
    assert not data_source.publish(options, KEY, [data_source.PartWritten(part)])
    assert lines(tmp_path / "out") == list(range(101))


def test_the_stream_writer_finds_the_query_in_its_messages(tmp_path):
    options = {"sink": "jsonl", "path": str(tmp_path / "out")}
    writer = BatchQueueDataSource(options).streamWriter(None, False)
    part = worker(writer.options).write(Attempt(BatchKey("query", 7), 0, "a"), record_batches(3))
    writer.abort([None], 7)
    writer.abort([data_source.PartWritten(part)], 7)
    assert not list((tmp_path / "out").rglob("*.jsonl"))
    writer.commit([None], 8)
    part = worker(writer.options).write(Attempt(BatchKey("query", 8), 0, "a"), record_batches(3))
    writer.commit([data_source.PartWritten(part)], 8)
    assert lines(tmp_path / "out") == [0, 1, 2, 3]


def test_the_batch_writer_commits_and_aborts(tmp_path):
    writer = BatchQueueDataSource({"sink": "jsonl", "path": str(tmp_path / "out")}).writer(None, False)
    part = worker(writer.options).write(Attempt(writer.key, 0, "a"), record_batches(3))
    writer.abort([data_source.PartWritten(part)])
    assert lines(tmp_path / "out") == []
    writer = BatchQueueDataSource({"sink": "jsonl", "path": str(tmp_path / "out")}).writer(None, False)
    part = worker(writer.options).write(Attempt(writer.key, 0, "b"), record_batches(3))
    writer.commit([data_source.PartWritten(part)])
    assert lines(tmp_path / "out") == [0, 1, 2, 3]


def test_a_write_outside_of_a_task_says_so(tmp_path):
    writer = BatchQueueDataSource({"sink": "jsonl", "path": str(tmp_path / "out")}).writer(None, False)
    with pytest.raises(RuntimeError, match="outside of a Spark task"):
        writer.write(record_batches(1))


def test_a_part_that_fails_is_rolled_back_and_the_worker_goes_on(tmp_path):
    options = as_options({"sink": "jsonl", "path": str(tmp_path / "out")})

    def broken():
        yield from record_batches(5)
        raise LookupError("Spark's iterator failed")

    with pytest.raises(LookupError):
        Worker(options).write(Attempt(KEY, 0, "a"), broken())
    failing = Worker(as_options({"sink": "spark_sinks:failing_handler"}))
    for _ in range(2):
        with pytest.raises(bq.DeliveryError, match=r"part 0.*LookupError: the shelf is empty"):
            failing.write(Attempt(KEY, 0, "a"), record_batches(3))
