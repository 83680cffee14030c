"""Pipelines from files or mappings, run on a real Spark: streams, stored views, restarts, backfills."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

import pytest
from pipeline_parts import LIMIT, rows, until, write_json
from pyspark.sql.streaming.listener import StreamingQueryListener

import batchqueue_async as bq
from batchqueue_async.errors import ConfigError
from batchqueue_async.spark import BatchQueueDataSource, SparkPipeline

START = datetime(2026, 1, 1, tzinfo=UTC)
NUMBERS = {"type": "rate-micro-batch", "rows_per_batch": 20, "start": START, "advance": 60, "time": "timestamp"}
FAST = {"attempts": 5, "initial": 0.01}


def pipeline(tmp_path, **parts):
    mapping = {"name": "tests", "directory": str(tmp_path), "restart": FAST, **parts}
    return SparkPipeline.from_mapping(mapping)


def sqlite(table):
    return {"type": "sqlite", "path": "out.db", "table": table}


# --- streams


def test_a_stream_is_stopped_and_goes_on_exactly(spark, tmp_path):
    made = pipeline(
        tmp_path, sources={"numbers": NUMBERS}, outputs={"all": {"view": "numbers", "to": sqlite("numbers")}}
    )
    for wanted in (60, 160):
        report = made.run(
            spark=spark, watch=until(lambda _, wanted=wanted: len(rows(tmp_path / "out.db", "numbers")) >= wanted)
        )
        assert (report.code, report.failed, report.stuck) == (0, {}, ())
    found = [value for _, value in rows(tmp_path / "out.db", "numbers", "value")]
    assert found == list(range(len(found)))
    (query,) = report.queries
    assert (query.name, query.state, query.restarts) == ("all", "stopped", 0)
    assert 0 < query.written <= query.rows + 20 * 2  # the last batch may be delivered and not reported
    assert query.batches > 0
    assert query.rate > 0
    assert query.batch_seconds > 0
    assert [each.query for each in report.samples] == ["all"] * len(report.samples)
    assert sum(each.rows for each in report.samples) == query.rows


def test_reports_that_spark_brings_late_are_counted(spark, tmp_path):
    """Another listener keeps Spark's thread for reports busy until the run has ended."""
    ended = threading.Event()

    class Slow(StreamingQueryListener):
        def onQueryStarted(self, event): ...  # noqa: N802 - Spark's name
        def onQueryTerminated(self, event): ...  # noqa: N802 - Spark's name
        def onQueryProgress(self, event):  # noqa: N802 - Spark's name
            ended.wait(LIMIT)

    slow = Slow()
    spark.streams.addListener(slow)
    try:
        write_json(tmp_path / "in", "file", [{"id": n} for n in range(30)])
        source = {"type": "files", "format": "json", "path": "in", "schema": "id LONG"}
        made = pipeline(tmp_path, sources={"events": source}, outputs={"all": {"view": "events", "to": sqlite("all_")}})
        report = made.run(spark=spark, once=True)
    finally:
        ended.set()
        spark.streams.removeListener(slow)
    (query,) = report.queries
    assert (query.rows, query.written, query.batches) == (30, 30, 1)
    assert [each.rows for each in report.samples if each.rows] == [30]


def test_each_stage_is_computed_once_and_once_ends_with_all_of_it(spark, tmp_path):
    """Files come in twice; both outputs, one of them to two sinks, read the stored view."""
    spark.conf.set("spark.test.computed", str(tmp_path / "computed"))
    made = pipeline(
        tmp_path,
        sources={"events": {"type": "files", "format": "json", "path": "in", "schema": "id LONG, kind STRING"}},
        views={
            "seen": {"function": "pipeline_parts:counted", "inputs": ["events"], "store": True},
            "odd": {"sql": "SELECT id FROM seen WHERE id % 2 = 1"},
        },
        outputs={
            "everything": {"view": "seen", "to": [sqlite("one"), {"type": "jsonl", "path": "two.jsonl"}]},
            "odd_ones": {"view": "odd", "to": sqlite("odd")},
            "odd_files": {"view": "odd", "to": {"type": "parquet", "path": "files"}},
        },
    )
    names = ["seen", "everything", "odd_ones", "odd_files"]
    for at, total in ((0, 30), (1, 60)):
        write_json(tmp_path / "in", f"file-{at}", [{"id": at * 30 + n, "kind": "x"} for n in range(30)])
        report = made.run(spark=spark, once=True)
        assert (report.code, report.failed) == (0, {})
        assert {each.name: each.state for each in report.queries} == dict.fromkeys(names, "done")
        assert [id_ for id_, _ in rows(tmp_path / "out.db", "one")] == list(range(total))
        assert len((tmp_path / "two.jsonl").read_text().splitlines()) == total
        assert [id_ for (id_,) in rows(tmp_path / "out.db", "odd")] == list(range(1, total, 2))
        files = spark.read.parquet(str(tmp_path / "files")).collect()
        assert sorted(id_ for (id_,) in files) == list(range(1, total, 2))
        assert len((tmp_path / "computed").read_text().splitlines()) == total
    assert list((tmp_path / "state" / "views" / "seen").glob("*.parquet"))


def test_a_batch_for_several_targets_is_computed_once(spark, tmp_path):
    spark.conf.set("spark.test.computed", str(tmp_path / "computed"))
    write_json(tmp_path / "in", "file", [{"id": n} for n in range(30)])
    made = pipeline(
        tmp_path,
        sources={"events": {"type": "files", "format": "json", "path": "in", "schema": "id LONG"}},
        views={"seen": {"function": "pipeline_parts:counted", "inputs": ["events"]}},
        outputs={
            "both": {"view": "seen", "to": [sqlite("one"), {"type": "jsonl", "path": "two.jsonl"}, sqlite("three")]}
        },
    )
    assert made.run(spark=spark, once=True).code == 0
    assert len(rows(tmp_path / "out.db", "one")) == len(rows(tmp_path / "out.db", "three")) == 30
    assert len((tmp_path / "two.jsonl").read_text().splitlines()) == 30
    assert len((tmp_path / "computed").read_text().splitlines()) == 30


def test_levels_with_watermarks_are_what_a_batch_job_says(spark, tmp_path):
    """L1 by minute is stored, and L2 and the output of L1 read it; the file's views say the same in a batch job."""
    made = pipeline(
        tmp_path,
        sources={"numbers": NUMBERS},
        views={
            "calls": {
                "sql": "SELECT timestamp, pmod(value, 3) AS service, value FROM numbers",
                "watermark": {"column": "timestamp", "delay": "10 seconds"},
            },
            "minutes": {
                "sql": "SELECT window.start AS minute, service, count(*) AS calls, sum(value) AS total FROM calls "
                "GROUP BY window(timestamp, '1 minute'), service",
                "watermark": {"column": "minute", "delay": "0 seconds"},
                "store": {"partitions": 1},
            },
            "fives": {
                "sql": "SELECT window.start AS five, service, sum(calls) AS calls, sum(total) AS total FROM minutes "
                "GROUP BY window(minute, '5 minutes'), service"
            },
        },
        outputs={
            "minute": {"view": "minutes", "to": sqlite("minute")},
            "five": {"view": "fives", "to": sqlite("five")},
        },
    )

    def seen(run):
        """The rows of L2, and Spark's report of the batch that they came with, which follows its commit."""
        watermark = next(each for each in run.queries() if each.name == "five").watermark
        return len(rows(tmp_path / "out.db", "five")) >= 3 and watermark is not None and watermark > START.timestamp()

    report = made.run(spark=spark, watch=until(seen))
    assert report.code == 0
    frames = made.batch(spark, until=START.replace(minute=5))
    for view, table, column in (("minutes", "minute", "minute"), ("fives", "five", "five")):
        wanted = [(at.astimezone(UTC).isoformat(), *rest) for at, *rest in frames[view].collect()]
        found = [row for row in rows(tmp_path / "out.db", table) if row[0] < "2026-01-01T00:05"]
        assert sorted(found) == sorted(wanted), column
        assert found
    assert {each.name: each.late for each in report.queries} == {"minutes": 0, "minute": 0, "five": 0}
    assert next(each for each in report.queries if each.name == "five").watermark > START.timestamp()


def test_a_query_that_dies_is_started_again_from_its_checkpoint(spark, tmp_path, logs):
    (tmp_path / "failures").write_text("2")
    options = {"failures": str(tmp_path / "failures"), "kept": str(tmp_path / "kept")}
    target = {"type": "factory", "factory": "pipeline_parts:failing", "options": options}
    made = pipeline(tmp_path, sources={"numbers": NUMBERS}, outputs={"all": {"view": "numbers", "to": target}})

    def kept():
        path = tmp_path / "kept"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    report = made.run(spark=spark, watch=until(lambda _: len(kept()) >= 40))
    assert report.code == 0
    assert report.queries[0].restarts == 2
    assert sorted(kept()) == list(range(len(kept())))
    events = [each["event"] for each in logs if each["event"].startswith("spark_query_")]
    assert events.count("spark_query_died") == 2
    assert events.count("spark_query_restarted") == 2


def test_a_query_that_always_dies_is_given_up(spark, tmp_path, logs):
    (tmp_path / "failures").write_text("99")
    options = {"failures": str(tmp_path / "failures"), "kept": str(tmp_path / "kept")}
    target = {"type": "factory", "factory": "pipeline_parts:failing", "options": options}
    made = pipeline(
        tmp_path,
        sources={"numbers": NUMBERS},
        outputs={"all": {"view": "numbers", "to": target}},
        restart={"attempts": 1, "initial": 0},
    )
    report = made.run(spark=spark)
    assert report.code == 3
    assert "the destination says no" in report.failed["all"]
    assert (tmp_path / "failures").read_text() == "97"
    assert (report.queries[0].state, report.queries[0].restarts) == ("failed", 1)
    assert [each["query"] for each in logs if each["event"] == "spark_query_given_up"] == ["all"]


def test_bad_rows_go_to_the_dead_letters_and_are_counted(spark, tmp_path):
    spark.sql("SELECT 1 AS id").write.mode("overwrite").json(str(tmp_path / "first"))
    made = pipeline(
        tmp_path,
        sources={"events": {"type": "files", "format": "json", "path": "in", "schema": "id LONG, name STRING"}},
        outputs={"all": {"view": "events", "to": sqlite("events"), "dead_letters": "bad.jsonl"}},
    )
    write_json(tmp_path / "in", "first", [{"id": 1, "name": "x"}])
    made.run(spark=spark, once=True)
    import sqlite3

    with sqlite3.connect(tmp_path / "out.db") as database:
        database.execute(
            "CREATE TRIGGER no BEFORE INSERT ON events WHEN NEW.id = 3 BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
    write_json(tmp_path / "in", "second", [{"id": n, "name": "x"} for n in (2, 3, 4)])
    report = made.run(spark=spark, once=True)
    assert report.code == 0
    assert report.queries[0].dead == 1
    assert [id_ for id_, _ in rows(tmp_path / "out.db", "events")] == [1, 2, 4]
    assert '"id":3' in (tmp_path / "bad.jsonl").read_text().replace(" ", "")


def test_a_stop_ends_a_run_and_a_wrong_view_begins_none(spark, tmp_path):
    parts = {"sources": {"numbers": NUMBERS}, "outputs": {"all": {"view": "v", "to": {"type": "noop"}}}}
    stop = threading.Event()
    stop.set()
    made = pipeline(tmp_path, **parts, views={"v": {"sql": "SELECT value FROM numbers"}})
    assert made.run(spark=spark, stop=stop).code == 0
    wrong = pipeline(tmp_path, **parts, views={"v": {"sql": "SELECT valu FROM numbers"}})
    with pytest.raises(Exception, match="valu"):
        wrong.run(spark=spark)
    wrong = pipeline(tmp_path, **parts, views={"v": {"function": "pipeline_parts:not_a_frame", "inputs": ["numbers"]}})
    with pytest.raises(ConfigError, match="view 'v': function=not_a_frame returned"):
        wrong.run(spark=spark)
    assert spark.streams.active == []


def test_waits_have_limits(spark, tmp_path):
    """A run with once that takes too long, and a stop that waits for a handler that does not return."""
    paths = {name: tmp_path / name for name in ("release", "begun")}
    target = {"type": "factory", "factory": "pipeline_parts:blocked", "options": {k: str(v) for k, v in paths.items()}}
    made = pipeline(
        tmp_path,
        sources={"numbers": NUMBERS},
        outputs={"all": {"view": "numbers", "to": target}},
        timeouts={"stop": 0.5, "once": 0.001},
    )
    try:
        report = made.run(spark=spark, watch=until(lambda _: paths["begun"].exists()))
        assert (report.code, report.stuck) == (3, ("all",))
        once = pipeline(
            tmp_path / "once",
            sources={"numbers": NUMBERS},
            timeouts={"once": 0.001},
            outputs={"all": {"view": "numbers", "to": {"type": "noop"}}},
        )
        report = once.run(spark=spark, once=True)
        assert (report.code, report.stuck) == (3, ("the run, which is not done after 0.001 s",))
    finally:
        paths["release"].touch()
    deadline = time.monotonic() + LIMIT
    while spark.streams.active:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_explain_shows_every_plan(spark, tmp_path):
    (tmp_path / "names").mkdir()
    made = pipeline(
        tmp_path,
        sources={
            "numbers": NUMBERS,
            "names": {"type": "files", "format": "json", "path": "names", "schema": "id LONG", "static": True},
        },
        views={
            "doubled": {"sql": "SELECT value * 2 AS twice FROM numbers", "store": True},
            "counts": {"sql": "SELECT count(*) AS n FROM doubled"},
        },
        outputs={
            "n": {"view": "counts", "mode": "complete", "to": {"type": "noop"}},
            "whole": {"view": "names", "to": {"type": "parquet", "path": "out"}},
        },
    )
    text = made.explain(spark)
    assert [line for line in text.splitlines() if line.startswith("-- ")] == [
        "-- view doubled, stored",
        "-- output n",
        "-- output whole",
    ]
    assert "Aggregate [count(1)" in text
    assert "value#" in text
    assert "== Physical Plan ==" in text.partition("-- output whole")[2]


# --- batch jobs


def test_a_backfill_that_is_run_again_ends_in_the_same_rows(spark, tmp_path):
    view = "SELECT date_trunc('DAY', timestamp) AS day, timestamp, value FROM numbers"
    made = pipeline(
        tmp_path,
        sources={"numbers": NUMBERS},
        views={"days": {"sql": view}},
        outputs={
            "rows": {"view": "days", "to": [sqlite("rows"), {"type": "jsonl", "path": "rows.jsonl"}]},
            "files": {"view": "days", "to": {"type": "parquet", "path": "files", "partition_by": ["day"]}},
        },
    )
    span = {"since": START.replace(minute=2), "until": START.replace(minute=4)}
    for _ in range(2):
        report = made.run(spark=spark, **span)
        assert (report.code, report.batch) == (0, ("rows", "files"))
        assert [value for *_, value in rows(tmp_path / "out.db", "rows", "value")] == list(range(40, 80))
        assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 40
        found = spark.read.parquet(str(tmp_path / "files")).select("value").collect()
        assert sorted(value for (value,) in found) == list(range(40, 80))
    made.run(spark=spark, since=START.replace(minute=4), until=START.replace(minute=5))
    assert [value for *_, value in rows(tmp_path / "out.db", "rows", "value")] == list(range(40, 100))
    with pytest.raises(
        ConfigError, match=r"overlap 2026-01-01T00:02:00.*ledger reset .* --source span/tests/rows/2026"
    ):
        made.run(spark=spark, since=START.replace(minute=3), until=START.replace(minute=6))
    assert len(rows(tmp_path / "out.db", "rows")) == 60
    targets = [sqlite("new"), {"type": "jsonl", "path": "rows.jsonl"}, sqlite("rows")]
    made = pipeline(
        tmp_path,
        sources={"numbers": NUMBERS},
        views={"days": {"sql": view}},
        outputs={"rows": {"view": "days", "to": targets}},
    )
    assert made.run(spark=spark, **span).code == 0  # one more target, and another order
    assert [value for *_, value in rows(tmp_path / "out.db", "new", "value")] == list(range(40, 80))
    assert [value for *_, value in rows(tmp_path / "out.db", "rows", "value")] == list(range(40, 100))
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 60


def test_a_batch_job_that_would_not_end_in_the_same_rows_is_refused(spark, tmp_path):
    parts = {"sources": {"numbers": NUMBERS}}
    span = {"since": START, "until": START.replace(minute=4)}

    def refused(to, parts=parts, **run):
        with pytest.raises(ConfigError) as raised:
            pipeline(tmp_path, **parts, outputs={"o": {"view": "numbers", "to": to}}).run(spark=spark, **(run or span))
        return str(raised.value)

    assert "add partition_by: [columns]" in refused({"type": "parquet", "path": "x"})
    assert "write in: driver" in refused({"type": "sqlite", "path": "x", "in": "executors"})
    assert "from is not before until" in refused({"type": "noop"}, since=START, until=START)
    assert "give one of them" in refused({"type": "noop"}, since=START, once=True)
    assert "has no last row; give --until" in refused({"type": "noop"}, since=START)
    assert "can't be read by a batch job" in refused({"type": "noop"}, parts={"sources": {"numbers": {"type": "rate"}}})
    no_time = {"sources": {"numbers": {**NUMBERS, "time": None}}}
    assert "add time: the column of the time" in refused({"type": "noop"}, parts=no_time)
    table = {"sources": {"numbers": {"type": "table", "table": "t", "static": True}}}
    assert "give --from and --until" in refused(sqlite("t"), parts=table, stop=None)


def test_a_whole_table_is_written_anew_by_each_run(spark, tmp_path):
    spark.range(5).createOrReplaceTempView("t")
    made = pipeline(
        tmp_path,
        sources={"source": {"type": "table", "table": "t", "static": True}},
        outputs={"all": {"view": "source", "to": {"type": "parquet", "path": "out"}}},
    )
    for rows_ in (5, 7):
        spark.range(rows_).createOrReplaceTempView("t")
        assert made.run(spark=spark).batch == ("all",)
        assert spark.read.parquet(str(tmp_path / "out")).count() == rows_


def test_a_batch_job_that_fails_is_tried_again_and_given_up(spark, tmp_path):
    (tmp_path / "failures").write_text("1")
    options = {"failures": str(tmp_path / "failures"), "kept": str(tmp_path / "kept")}
    target = {"type": "factory", "factory": "pipeline_parts:failing", "options": options}
    made = pipeline(
        tmp_path,
        sources={"numbers": NUMBERS},
        outputs={"all": {"view": "numbers", "to": target}},
        restart={"attempts": 1, "initial": 0},
    )
    span = {"since": START, "until": START.replace(minute=1)}
    assert made.run(spark=spark, **span).code == 0
    assert len((tmp_path / "kept").read_text().split()) == 20
    (tmp_path / "failures").write_text("9")
    report = made.run(spark=spark, **span)
    assert (report.code, report.batch) == (3, ())
    assert "the destination says no" in report.failed["all"]


def test_an_upsert_replaces_what_an_earlier_run_wrote(spark, postgres, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_DSN", postgres.dsn)
    postgres.sql("DROP TABLE IF EXISTS per_minute")
    postgres.sql("CREATE TABLE per_minute (minute timestamptz PRIMARY KEY, n bigint)")
    parts = {
        "views": {
            "per": {
                "sql": "SELECT window.start AS minute, count(*) AS n FROM numbers "
                "GROUP BY window(timestamp, '1 minute')"
            }
        },
        "outputs": {
            "per": {
                "view": "per",
                "mode": "update",
                "key": ["minute"],
                "to": {"type": "postgres", "dsn": "env:TEST_DSN", "table": "per_minute"},
            }
        },
    }
    for each in (20, 30):
        made = pipeline(tmp_path / str(each), sources={"numbers": {**NUMBERS, "rows_per_batch": each}}, **parts)
        assert made.run(spark=spark, since=START, until=START.replace(minute=3)).code == 0
        assert postgres.sql("SELECT n FROM per_minute ORDER BY minute") == [str(each)] * 3
    watch = until(lambda _: postgres.sql("SELECT count(*) FROM per_minute") > ["5"])
    assert made.run(spark=spark, watch=watch).code == 0
    assert set(postgres.sql("SELECT n FROM per_minute")) == {"30"}


def test_a_table_is_written_whole_while_the_streams_of_the_file_go_on(spark, tmp_path):
    spark.range(3).createOrReplaceTempView("t")
    made = pipeline(
        tmp_path,
        sources={"source": {"type": "table", "table": "t", "static": True}, "ticks": {"type": "rate"}},
        outputs={
            "whole": {"view": "source", "to": {"type": "parquet", "path": "out"}},
            "stream": {"view": "ticks", "to": {"type": "sqlite", "path": "out.db", "table": "ticks"}},
        },
    )
    report = made.run(spark=spark, watch=until(lambda _: len(rows(tmp_path / "out.db", "ticks")) > 0))
    assert (report.code, report.batch, [each.name for each in report.queries]) == (0, ("whole",), ["stream"])
    assert spark.read.parquet(str(tmp_path / "out")).count() == 3


def test_executors_write_and_a_run_is_registered_while_it_lasts(spark, tmp_path):
    made = pipeline(
        tmp_path,
        sources={"numbers": NUMBERS},
        outputs={
            "all": {"view": "numbers", "to": {"type": "sqlite", "path": "out.db", "table": "n", "in": "executors"}}
        },
    )
    spark.dataSource.register(BatchQueueDataSource)
    seen = []

    def enough(run):
        seen.extend(each.thing.peek() for each in bq.registered("pipeline") if each.thing is run)
        return len(rows(tmp_path / "out.db", "n")) >= 40

    assert made.run(spark=spark, watch=until(enough)).code == 0
    found = [value for _, value in rows(tmp_path / "out.db", "n", "value")]
    assert found == list(range(len(found)))
    assert {each.name for queries in seen for each in queries} == {"all"}
    assert bq.registered("pipeline") == []
