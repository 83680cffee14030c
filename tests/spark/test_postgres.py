"""Into a real PostgreSQL, from the driver and from the executors: each batch exactly once."""

from __future__ import annotations

import pytest
from sessions import forget_last_commit, run_batches

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
        with DriverSink("postgres", sink=PostgresSink(postgres.dsn, "from_driver")) as sink:
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


def test_a_batch_job_that_fails_leaves_nothing(spark, postgres):
    spark.dataSource.register(BatchQueueDataSource)
    options = {"sink": "spark_sinks:postgres", "dsn": postgres.dsn, "table": "from_job"}
    bad = spark.range(0, 1000, 1, 4).selectExpr("id AS value", "assert_true(id < 990, 'too large') AS x")
    with pytest.raises(Exception, match="too large"):
        bad.write.format("batchqueue").options(**options).mode("append").save()
    with DriverSink("postgres", sink=PostgresSink(postgres.dsn, "from_job")) as sink:
        with pytest.raises(Exception, match="too large"):
            sink(bad)
        assert rows(postgres, "from_job") == []
        sink(spark.range(5).selectExpr("id AS value"))
    assert rows(postgres, "from_job") == [0, 1, 2, 3, 4]
