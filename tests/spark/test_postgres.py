"""Into a real PostgreSQL, from the driver and from the executors: each batch exactly once."""

from __future__ import annotations

import json

import pytest
from sessions import forget_last_commit, run_batches

import batchqueue_async as bq
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.spark import BatchQueueDataSource, DriverSink


def stream(spark):
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 40).option("numPartitions", 2)
    return source.option("startTimestamp", 0).load().select("value")


def rows(postgres, table):
    if not postgres.sql(f"SELECT 1 FROM information_schema.tables WHERE table_name = '{table}'"):
        return []
    return sorted(int(value) for value in postgres.sql(f"SELECT value FROM {table}"))


def test_a_stream_through_the_driver_is_exact_through_a_crash(spark, postgres, tmp_path):
    for skipped in (0, 1):
        with DriverSink("postgres", sink=PostgresSink(postgres.dsn, "from_driver", timeout=120)) as sink:
            run_batches(stream(spark).writeStream.foreachBatch(sink), tmp_path / "checkpoint", 2)
            assert sink.stats().skipped == skipped
        forget_last_commit(tmp_path / "checkpoint")
    assert rows(postgres, "from_driver") == list(range(3 * 40))


def test_a_stream_through_the_executors_is_exact_through_a_crash(spark, postgres, tmp_path):
    spark.dataSource.register(BatchQueueDataSource)
    options = {"sink": "spark_sinks:postgres", "dsn": postgres.dsn, "table": "from_executors", "rows": "batch"}
    for _ in range(2):
        run_batches(stream(spark).writeStream.format("batchqueue").options(**options), tmp_path / "checkpoint", 2)
        forget_last_commit(tmp_path / "checkpoint")
    assert rows(postgres, "from_executors") == list(range(3 * 40))


def test_rows_that_the_table_refuses_go_to_the_dead_letters(spark, postgres, tmp_path):
    """Where a task stages them, a text that PostgreSQL has not; at the publication, by a constraint."""
    postgres.sql("CREATE TABLE choosy (value bigint CHECK (value % 7 <> 3), name text)")
    spark.dataSource.register(BatchQueueDataSource)
    options = {"sink": "spark_sinks:postgres", "dsn": postgres.dsn, "table": "choosy", "on_bad_row": "dead_letter"}
    options |= {"dead_letters": str(tmp_path / "dead"), "rows": "batch"}
    frame = spark.range(0, 500, 1, 3).selectExpr("id AS value", "if(id = 5, 'a\\0b', 'x') AS name")
    frame.write.format("batchqueue").options(**options).mode("append").save()
    refused = {5, *range(3, 500, 7)}
    assert rows(postgres, "choosy") == [n for n in range(500) if n not in refused]
    lines = [line for file in tmp_path.glob("dead/[!.]*/*.jsonl") for line in file.read_text().splitlines()]
    found = {each["row"]["value"]: each for each in map(json.loads, lines)}
    assert (sorted(found), len(lines)) == (sorted(refused), len(refused))
    assert found.pop(5)["row"]["name"] == "a\0b"
    assert all("CheckViolationError" in each["reason"] for each in found.values())


def test_s_24_dead_letters_in_a_table_that_refuses_one_fail_the_batch(spark, postgres):
    """JSON in PostgreSQL has no NUL either: the row would be in neither table."""
    spark.dataSource.register(BatchQueueDataSource)
    postgres.sql("CREATE TABLE with_letters (value bigint CHECK (value <> 7), name text)")
    frame = spark.range(0, 50, 1, 2).selectExpr("id AS value", "if(id = 5, 'a\\0b', 'x') AS name")
    options = {"sink": "spark_sinks:postgres", "dsn": postgres.dsn, "table": "with_letters", "rows": "batch"}
    options |= {"on_bad_row": "dead_letter", "dead_letters": "spark_sinks:dead_rows"}
    with pytest.raises(Exception, match="the sink for dead letters rejected 1 of them"):
        frame.write.format("batchqueue").options(**options).mode("append").save()
    assert rows(postgres, "with_letters") == []
    given = {"on_bad_row": "dead_letter", "dead_letters": PostgresSink(postgres.dsn, "driver_letters", timeout=120)}
    with (
        DriverSink("postgres", sink=PostgresSink(postgres.dsn, "with_letters", timeout=120), **given) as sink,
        pytest.raises(bq.PermanentError, match="the sink for dead letters rejected 1 of them"),
    ):
        sink(frame)
    assert rows(postgres, "with_letters") == []
    choosy = frame.selectExpr("value", "'x' AS name")
    choosy.write.format("batchqueue").options(**options).mode("append").save()
    assert rows(postgres, "with_letters") == [n for n in range(50) if n != 7]
    assert postgres.sql("SELECT row ->> 'value' FROM dead_rows") == ["7"]


def test_a_batch_job_that_fails_leaves_nothing(spark, postgres):
    spark.dataSource.register(BatchQueueDataSource)
    options = {"sink": "spark_sinks:postgres", "dsn": postgres.dsn, "table": "from_job"}
    bad = spark.range(0, 1000, 1, 4).selectExpr("id AS value", "assert_true(id < 990, 'too large') AS x")
    with pytest.raises(Exception, match="too large"):
        bad.write.format("batchqueue").options(**options).mode("append").save()
    with DriverSink("postgres", sink=PostgresSink(postgres.dsn, "from_job", timeout=120)) as sink:
        with pytest.raises(Exception, match="too large"):
            sink(bad)
        assert rows(postgres, "from_job") == []
        sink(spark.range(5).selectExpr("id AS value"))
    assert rows(postgres, "from_job") == [0, 1, 2, 3, 4]
