"""`on_bad_row="dead_letter"` on the executors: each bad row once in the dead letters, and the others in."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pyarrow as pa
import pytest
from pipeline_parts import rows as rows_of
from pipeline_parts import until
from sessions import forget_last_commit, run_batches

import batchqueue_async as bq
from batchqueue_async.sinks.base import Attempt, BatchKey
from batchqueue_async.spark import BatchQueueDataSource, SparkPipeline, run_reports
from batchqueue_async.spark.executors import data_source
from batchqueue_async.spark.executors.options import as_options
from batchqueue_async.spark.executors.part_writer import Worker
from batchqueue_async.spark.listener import QueryListener

KEY = BatchKey("query", 0)
REASON = "CHECK constraint failed"


@pytest.fixture(scope="module")
def source(spark):
    spark.dataSource.register(BatchQueueDataSource)
    return spark


def choosy_table(path):
    """A table that refuses some rows, when they come into it."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE rows (value INTEGER CHECK (value % 7 <> 3), timestamp TEXT)")


def letters(path):
    found = [json.loads(line) for file in path.glob("[!.]*/*.jsonl") for line in file.read_text().splitlines()]
    return sorted(found, key=lambda each: str(each["row"]))


def bad(path):
    return {"on_bad_row": "dead_letter", "dead_letters": str(path)}


def write(frame, **options):
    frame.write.format("batchqueue").options(**{name: str(each) for name, each in options.items()}).mode(
        "append"
    ).save()


# --- batch jobs


def test_rows_that_a_table_refuses(source, tmp_path):
    path = tmp_path / "out.db"
    choosy_table(path)
    frame = source.range(0, 500, 1, 3).selectExpr("id AS value", "'t' AS timestamp")
    write(frame, sink="sqlite", path=path, **bad(tmp_path / "dead"))
    assert [value for value, _ in rows_of(path, "rows", "value")] == [n for n in range(500) if n % 7 != 3]
    found = letters(tmp_path / "dead")
    assert sorted(each["row"]["value"] for each in found) == [n for n in range(500) if n % 7 == 3]
    assert all(REASON in each["reason"] and each["sink"] == "sqlite" for each in found)
    assert len({each["batch"] for each in found}) == 1
    assert not list(tmp_path.rglob("*staging*"))
    with pytest.raises(Exception, match=REASON):
        write(frame, sink="sqlite", path=path)
    assert len(rows_of(path, "rows")) == 500 - len(found)


def test_rows_that_a_handler_refuses_and_rows_that_do_not_fit(source, tmp_path):
    frame = source.range(0, 100, 1, 2).selectExpr("id AS value", "concat('n', id) AS name")
    write(frame, sink="spark_sinks:choosy_handler", path=tmp_path, **bad(tmp_path / "dead"))
    taken = [int(line) for file in tmp_path.glob("*.txt") for line in file.read_text().split()]
    assert sorted(taken) == [n for n in range(100) if n % 7 != 3]
    assert sorted(each["row"]["value"] for each in letters(tmp_path / "dead")) == list(range(3, 100, 7))
    holes = frame.selectExpr("if(value % 10 = 0, null, value) AS value", "name")
    options = {"rows": "spark_sinks:Reading", "letters": tmp_path / "dead.db"}
    write(
        holes,
        sink="spark_sinks:types_into_a_file",
        path=tmp_path / "typed",
        on_bad_row="dead_letter",
        dead_letters="spark_sinks:dead_table",
        **options,
    )
    assert len((tmp_path / "typed").read_text().splitlines()) == 90
    found = rows_of(tmp_path / "dead.db", "dead")
    assert len(found) == 10
    assert all("Expected `int`, got `null`" in reason for _, _, reason, _ in found)


# --- streams


def test_a_stream_through_a_failed_commit_and_a_repetition(source, tmp_path):
    """The first commit fails after the letters are in; a batch that is in comes once more; the listener knows."""
    path, checkpoint, dead = tmp_path / "out.db", tmp_path / "checkpoint", tmp_path / "dead"
    choosy_table(path)
    listener = QueryListener()
    source.streams.addListener(listener)
    stream = source.readStream.format("rate-micro-batch").option("rowsPerBatch", 40).option("numPartitions", 2)
    writer = stream.option("startTimestamp", 0).load().writeStream.format("batchqueue")
    writer = writer.options(sink="spark_sinks:failing_publish", path=str(path), **bad(dead))
    try:
        with pytest.raises(Exception, match="the commit fails"):
            run_batches(writer, checkpoint, 1)
        assert rows_of(path, "rows") == []
        run_batches(writer, checkpoint, 2)
        forget_last_commit(checkpoint)
        run_batches(writer, checkpoint, 1)
        (query,) = listener.stats().values()
        assert (query.dead_rows, query.skipped, query.skipped_rows) == (11, 1, 40)
    finally:
        source.streams.removeListener(listener)
    assert [value for value, _ in rows_of(path, "rows", "value")] == [n for n in range(80) if n % 7 != 3]
    assert sorted(each["row"]["value"] for each in letters(dead)) == list(range(3, 80, 7))


def test_a_pipeline_with_executors_has_dead_and_skipped_rows_in_its_progress(source, tmp_path):
    path = tmp_path / "out.db"
    choosy_table(path)
    numbers = {"type": "rate-micro-batch", "rows_per_batch": 20, "start": "1970-01-01T00:00:00Z"}
    to = {"type": "sqlite", "path": "out.db", "table": "rows", "in": "executors"}
    pipeline = SparkPipeline.from_mapping(
        {
            "name": "tests",
            "directory": str(tmp_path),
            "sources": {"numbers": numbers},
            "outputs": {"all": {"view": "numbers", "to": to, "dead_letters": "dead"}},
        }
    )
    report = pipeline.run(spark=source, watch=until(lambda _: len(rows_of(path, "rows")) >= 30))
    (query,) = report.queries
    taken = [value for value, _ in rows_of(path, "rows", "value")]
    assert (query.written, query.dead) == (len(taken), len(letters(tmp_path / "dead")))
    assert query.dead > 0


# --- in this process


def batches(*values):
    yield pa.RecordBatch.from_pydict({"value": pa.array(values, pa.int64()), "name": ["x"] * len(values)})


@pytest.mark.parametrize("sink", ["sqlite", "jsonl"])
def test_letters_of_attempts_that_do_not_count_are_not_published(tmp_path, sink):
    """What a task that was repeated, or overtaken by its copy, has staged; and an abort, after which it comes again."""
    given = {"sink": sink, "path": str(tmp_path / "out"), "rows": "spark_sinks:Reading", **bad(tmp_path / "dead")}
    options, worker = as_options(given), Worker(as_options(given))
    first = worker.write(Attempt(KEY, 0, "a"), batches(1, None, 2))
    data_source.discard(options, KEY)
    assert not list(tmp_path.rglob("*.jsonl"))
    worker.write(Attempt(KEY, 0, "b"), batches(1, None, 2))
    parts = [worker.write(Attempt(KEY, 0, "c"), batches(1, None, 2)), worker.write(Attempt(KEY, 1, "d"), batches(3))]
    assert [part.dead_rows for part in (first, *parts)] == [1, 1, 0]
    messages = [data_source.PartWritten(part) for part in parts]
    assert data_source.publish(options, KEY, messages)
    again = data_source.PartWritten(worker.write(Attempt(KEY, 0, "e"), batches(1, None, 2)))
    assert not data_source.publish(options, KEY, [again])
    assert [each["row"] for each in letters(tmp_path / "dead")] == [{"name": "x", "value": None}]
    assert not list(tmp_path.rglob("*staging*"))


def test_letters_of_a_batch_before_the_last_one_are_not_published(tmp_path):
    """A query that goes on from an older checkpoint: its batch is refused, and leaves no letters."""
    given = {"sink": "jsonl", "path": str(tmp_path / "out"), "rows": "spark_sinks:Reading", **bad(tmp_path / "dead")}
    options, worker = as_options(given), Worker(as_options(given))
    for number, value in ((0, 1), (1, 2)):
        part = worker.write(Attempt(KEY._replace(number=number), 0, "a"), batches(value))
        assert data_source.publish(options, part.attempt.key, [data_source.PartWritten(part)])
    old = data_source.PartWritten(worker.write(Attempt(KEY, 0, "b"), batches(None, 3)))
    with pytest.raises(bq.ConfigError, match="later ones of the query are in"):
        data_source.publish(options, KEY, [old])
    assert letters(tmp_path / "dead") == []


def test_rows_that_a_staged_table_refuses_are_found_one_by_one(tmp_path):
    given = {"sink": "sqlite", "path": str(tmp_path / "out.db"), "rows": "dict", "non_finite": "keep"}
    options = as_options(given | bad(tmp_path / "dead"))
    numbers = pa.RecordBatch.from_pydict({"v": [1.0, float("nan"), 2.0], "n": [1, 2, 3]})
    part = Worker(options).write(Attempt(KEY, 0, "a"), iter([numbers]), numbers.schema)
    assert data_source.publish(options, KEY, [data_source.PartWritten(part)], numbers.schema)
    assert rows_of(tmp_path / "out.db", "rows") == [(1.0, 1), (2.0, 3)]
    assert [each["row"] for each in letters(tmp_path / "dead")] == [{"v": "nan", "n": 2}]


def test_s_28_rows_that_a_staged_table_refuses_are_tried_again_after_the_others(tmp_path):
    """Each needs the one of half its number; 14 needs 7, which never comes."""
    path = tmp_path / "out.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE rows (value INTEGER PRIMARY KEY, name TEXT)")
        database.execute(
            "CREATE TRIGGER needs BEFORE INSERT ON rows WHEN NEW.value > 0 AND NOT EXISTS "
            "(SELECT * FROM rows WHERE value = NEW.value / 2) BEGIN SELECT RAISE(ABORT, 'it is not there'); END"
        )
    options = as_options({"sink": "sqlite", "path": str(path), **bad(tmp_path / "dead")})
    worker = Worker(options)
    parts = [
        data_source.PartWritten(worker.write(Attempt(KEY, part, "a"), batches(*values)))
        for part, values in enumerate([(20, 10, 5, 2, 14), (1, 0, 0)])
    ]
    assert data_source.publish(options, KEY, parts)
    assert rows_of(path, "rows", "value") == [(0, "x"), (1, "x"), (2, "x"), (5, "x"), (10, "x"), (20, "x")]
    assert sorted(each["row"]["value"] for each in letters(tmp_path / "dead")) == [0, 14]


def test_s_23_a_row_that_only_the_repeated_publication_refuses_is_not_lost(tmp_path):
    """The letters of the first one are in, its commit failed, and others wrote a row with the same key."""
    path = tmp_path / "out.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE rows (value INTEGER UNIQUE, name TEXT)")
        database.execute("INSERT INTO rows VALUES (1, 'other')")
        database.commit()
    options = as_options({"sink": "spark_sinks:failing_publish", "path": str(path), **bad(tmp_path / "dead")})
    worker = Worker(options)
    part = data_source.PartWritten(worker.write(Attempt(KEY, 0, "a"), batches(1, 2, 3)))
    with pytest.raises(OSError, match="the commit fails"):
        data_source.publish(options, KEY, [part])
    assert [each["row"]["value"] for each in letters(tmp_path / "dead")] == [1]
    data_source.discard(options, KEY)
    with closing(sqlite3.connect(path)) as database:
        database.execute("INSERT INTO rows VALUES (2, 'other')")
        database.commit()
    part = data_source.PartWritten(worker.write(Attempt(KEY, 0, "b"), batches(1, 2, 3)))
    assert data_source.publish(options, KEY, [part])
    assert rows_of(path, "rows", "value") == [(1, "other"), (2, "other"), (3, "x")]
    assert {each["row"]["value"] for each in letters(tmp_path / "dead")} == {1, 2}


def test_more_bad_rows_than_a_batch_may_have_fail_it(tmp_path, monkeypatch):
    monkeypatch.setattr("batchqueue_async.sinks.sqlite.sink._MOST_REFUSED", 2)
    choosy_table(tmp_path / "out.db")
    given = as_options({"sink": "sqlite", "path": str(tmp_path / "out.db"), **bad(tmp_path / "dead")})
    table = pa.RecordBatch.from_pydict({"value": [3, 10, 17, 4], "timestamp": ["t"] * 4})
    part = Worker(given).write(Attempt(KEY, 0, "a"), iter([table]), table.schema)
    with pytest.raises(bq.PermanentError, match=REASON):
        data_source.publish(given, KEY, [data_source.PartWritten(part)], table.schema)
    assert rows_of(tmp_path / "out.db", "rows") == letters(tmp_path / "dead") == []


def test_a_row_without_a_column_of_the_table_is_refused(tmp_path):
    choosy_table(tmp_path / "out.db")
    given = as_options({"sink": "sqlite", "path": str(tmp_path / "out.db"), **bad(tmp_path / "dead")})
    table = pa.RecordBatch.from_pydict({"value": [1, 2], "other": ["x", "y"]})
    part = Worker(given).write(Attempt(KEY, 0, "a"), iter([table]), table.schema)
    assert data_source.publish(given, KEY, [data_source.PartWritten(part)], table.schema)
    assert rows_of(tmp_path / "out.db", "rows") == []
    assert ["has no column 'other'" in each["reason"] for each in letters(tmp_path / "dead")] == [True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad_row": "skip"}, "on_bad_row='skip' is unknown"),
        ({"on_bad_row": "dead_letter"}, "does not go with dead_letters=None"),
        ({"dead_letters": "x"}, "on_bad_row='fail' does not go with"),
        (bad("out"), "is the path of the rows too"),
        (bad("spark_sinks:no_op_factory"), "made no sink with stage"),
        (bad("x") | {"sink": "spark_sinks:one_transaction"}, "no task can take its rows again"),
        (
            bad("spark_sinks:dead_table") | {"sink": "spark_sinks:failing_publish", "letters": "./out"},
            "is the database of the rows too",
        ),
    ],
)
def test_what_can_not_work_is_refused_where_the_write_is_planned(options, message):
    with pytest.raises(bq.ConfigError, match=message):
        BatchQueueDataSource({"sink": "jsonl", "path": "out", **options}).writer(None, False)


# --- reports of commits


def test_reports_add_up_and_the_old_ones_go(tmp_path, monkeypatch, logs):
    monkeypatch.setattr(run_reports.tempfile, "gettempdir", lambda: str(tmp_path))
    assert run_reports.report_of("a1") == run_reports.RunReport()
    run_reports.add_report("a1", run_reports.RunReport(batches=1, rows=5))
    run_reports.add_report("a1", run_reports.RunReport(skipped=1, skipped_rows=7))
    run_reports.add_report("b2", run_reports.RunReport(dead_rows=2))
    wanted = run_reports.RunReport(batches=1, rows=5, skipped=1, skipped_rows=7, dead_rows=2)
    assert run_reports.total_of(["a1", "b2", "c3"]) == wanted
    monkeypatch.setattr(run_reports, "_OLD", -1.0)
    run_reports.add_report("d4", run_reports.RunReport(rows=1))
    assert [path.name for path in run_reports.directory().iterdir()] == ["d4.json"]
    run_reports.add_report("../e5", run_reports.RunReport(rows=1))
    assert [event["event"] for event in logs] == ["spark_report_failed"]


def test_a_directory_of_others_is_not_used(tmp_path, monkeypatch, logs):
    monkeypatch.setattr(run_reports.tempfile, "gettempdir", lambda: str(tmp_path))
    run_reports.directory().mkdir(mode=0o755)
    run_reports.add_report("a1", run_reports.RunReport(rows=1))
    assert not list(run_reports.directory().iterdir())
    assert run_reports.report_of("a1") == run_reports.RunReport()
    assert [event["event"] for event in logs] == ["spark_report_failed"]
