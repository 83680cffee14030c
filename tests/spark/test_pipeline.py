"""The demo's job: what its streams write, beside the same numbers added up in Python."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from contextlib import closing

import pytest
from pyspark.sql import functions as f

from batchqueue_async.spark import pipeline
from batchqueue_async.spark.pipeline import Load, MinuteStat, ServiceStat, SlowStatement

LOAD = Load(minutes=5, rows_per_batch=300, top=3)


def test_the_load_is_whole_minutes():
    assert (Load().rows, Load(minutes=5, rows_per_batch=10, seconds_per_batch=40).rows) == (400_000, 80)


@pytest.fixture(scope="module")
def calls(spark):
    """Every call, as (minute, service, endpoint, statement, latency, error)."""
    second = f.floor(f.col("id") / LOAD.rows_per_batch) * LOAD.seconds_per_batch
    numbers = spark.range(LOAD.rows).select(
        f.col("id").alias("value"), f.timestamp_seconds(f.lit(pipeline.START) + second).alias("timestamp")
    )
    found = pipeline.calls(numbers).withColumn("minute", f.unix_timestamp(f.date_trunc("minute", "timestamp")))
    return [
        tuple(row) for row in found.select("minute", "service", "endpoint", "statement", "latency", "error").collect()
    ]


def added_up(calls):
    """L1, L2 and TopN, the plain way."""
    minutes, fives, slow = defaultdict(list), defaultdict(list), defaultdict(list)
    for minute, service, endpoint, statement, latency, error in calls:
        minutes[minute, service, endpoint].append((latency, error))
        fives[minute - minute % 300, service].append((latency, error))
        if latency >= 2_000:
            slow[minute, statement].append(latency)

    def totals(found):
        latencies, errors = zip(*found, strict=True)
        return len(found), sum(errors), sum(latencies), max(latencies)

    top = []
    for minute in {minute for minute, _ in slow}:
        ranked = sorted(((max(found), text, len(found)) for (each, text), found in slow.items() if each == minute))
        slowest = enumerate(ranked[::-1][: LOAD.top], 1)
        top += [(minute, rank, text, latency, count) for rank, (latency, text, count) in slowest]
    return {
        MinuteStat: [(*key, *totals(found)) for key, found in minutes.items()],
        ServiceStat: [(*key, *totals(found)) for key, found in fives.items()],
        SlowStatement: top,
    }


def test_the_batch_job_says_what_the_tables_must_hold(spark, calls):
    assert len(calls) == LOAD.rows
    for kind, frame in pipeline.expected(spark, LOAD).items():
        found = Counter(tuple(row) for row in frame.select(*kind.__struct_fields__).collect())
        assert found == Counter(added_up(calls)[kind])
        assert found


def test_the_streams_write_it(spark, calls, tmp_path):
    wanted = added_up(calls)
    running = pipeline.start(spark, LOAD, tmp_path)

    def table(kind):
        try:
            with closing(sqlite3.connect(tmp_path / "results.db")) as database:
                columns = ", ".join(kind.__struct_fields__)
                return Counter(database.execute(f"SELECT {columns} FROM {pipeline.TABLES[kind]}").fetchall())
        except sqlite3.OperationalError:
            return Counter()

    try:
        while any(table(kind).total() < len(rows) for kind, rows in wanted.items()):
            running.check()
            next(iter(running.queries.values())).awaitTermination(0.1)
    finally:
        running.stop()
    assert {kind: table(kind) for kind in wanted} == {kind: Counter(rows) for kind, rows in wanted.items()}
    assert {sink._queue.name for sink in running.sinks.values()} == {pipeline.QUEUE}
