"""Service metrics and slow statements through Structured Streaming into one queue: the job of `make demo`.

Generated calls of services become three results, each exactly once in a table of its own:

| result | what | table |
|---|---|---|
| L1 | calls, errors and latency per minute, service and endpoint | `minute` |
| L2 | the same rolled up per five minutes and service | `service` |
| TopN | the slowest statements of each minute | `slow` |

The calls are a function of their number, so that a batch job over the same numbers says what the tables must hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from pyspark.sql import functions as f

from batchqueue_async.sinks.sqlite.sink import SqliteSink
from batchqueue_async.spark.driver_sink import DriverSink

if TYPE_CHECKING:
    import os

    from pyspark.sql import DataFrame, SparkSession

START = 1_767_225_600
"""2026-01-01, 00:00 UTC, in seconds since the epoch."""
QUEUE = "results"


class MinuteStat(msgspec.Struct, frozen=True):
    """L1: one service's endpoint in one minute."""

    minute: int
    service: str
    endpoint: str
    calls: int
    errors: int
    latency_sum: int
    latency_max: int


class ServiceStat(msgspec.Struct, frozen=True):
    """L2: one service in five minutes."""

    start: int
    service: str
    calls: int
    errors: int
    latency_sum: int
    latency_max: int


class SlowStatement(msgspec.Struct, frozen=True):
    """TopN: one of the slowest statements of a minute."""

    minute: int
    rank: int
    statement: str
    latency_max: int
    calls: int


TABLES: dict[type[msgspec.Struct], str] = {MinuteStat: "minute", ServiceStat: "service", SlowStatement: "slow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is generated.

    Attributes:
        minutes: event time covered; whole five minutes, so that every roll-up is complete.
        rows_per_batch: calls of one micro-batch.
        seconds_per_batch: event time that passes from one micro-batch to the next.
        top: how many statements of a minute.
    """

    minutes: int = 10
    rows_per_batch: int = 40_000
    seconds_per_batch: int = 60
    top: int = 5

    @property
    def end(self) -> int:
        """The first second that is not covered any more."""
        return START + self.minutes * 60

    @property
    def rows(self) -> int:
        """Calls in the time covered: those of a micro-batch all carry its time, from `START` on in steps."""
        batches = -(-self.minutes * 60 // self.seconds_per_batch)
        return batches * self.rows_per_batch


def calls(frame: DataFrame) -> DataFrame:
    """Each number as the call of a service's endpoint with a statement; `value` and `timestamp` in."""
    hashed = f.xxhash64("value")
    latency = f.pmod(hashed, f.lit(400)) + f.when(f.pmod(hashed, f.lit(97)) == 0, f.lit(2_000)).otherwise(f.lit(5))
    return frame.select(
        "timestamp",
        f.concat(f.lit("service-"), f.pmod(f.col("value"), f.lit(6))).alias("service"),
        f.concat(f.lit("/endpoint/"), f.pmod(f.shiftright("value", 3), f.lit(8))).alias("endpoint"),
        f.concat(f.lit("SELECT * FROM t"), f.pmod(f.shiftright(hashed, 7), f.lit(200))).alias("statement"),
        latency.cast("long").alias("latency"),
        (f.pmod(hashed, f.lit(211)) == 0).cast("long").alias("error"),
    )


def minute_stats(frame: DataFrame) -> DataFrame:
    """L1."""
    counted = _per_minute(frame)
    return counted.select(
        f.unix_timestamp(f.col("window.start")).alias("minute"),
        *("service", "endpoint", "calls", "errors", "latency_sum", "latency_max"),
    )


def _per_minute(frame: DataFrame) -> DataFrame:
    return frame.groupBy(f.window("timestamp", "1 minute"), "service", "endpoint").agg(
        f.count("*").alias("calls"),
        f.sum("error").alias("errors"),
        f.sum("latency").alias("latency_sum"),
        f.max("latency").alias("latency_max"),
    )


def service_stats(frame: DataFrame) -> DataFrame:
    """L2, from L1."""
    rolled = (
        _per_minute(frame)
        .groupBy(f.window(f.window_time("window"), "5 minutes").alias("five"), "service")
        .agg(
            f.sum("calls").alias("calls"),
            f.sum("errors").alias("errors"),
            f.sum("latency_sum").alias("latency_sum"),
            f.max("latency_max").alias("latency_max"),
        )
    )
    columns = ("service", "calls", "errors", "latency_sum", "latency_max")
    return rolled.select(f.unix_timestamp(f.col("five.start")).alias("start"), *columns)


def slow_statements(frame: DataFrame, top: int) -> DataFrame:
    """TopN: each statement's slowest call in a minute, then the slowest of those."""
    slow = frame.where(f.col("latency") >= f.lit(2_000))
    counted = slow.groupBy(f.window("timestamp", "1 minute"), "statement").agg(
        f.max("latency").alias("latency_max"), f.count("*").alias("calls")
    )
    ranked = counted.groupBy(f.window(f.window_time("window"), "1 minute").alias("minute")).agg(
        f.slice(f.sort_array(f.collect_list(f.struct("latency_max", "statement", "calls")), asc=False), 1, top).alias(
            "top"
        )
    )
    exploded = ranked.select("minute", f.posexplode("top").alias("place", "found"))
    return exploded.select(
        f.unix_timestamp(f.col("minute.start")).alias("minute"),
        (f.col("place") + 1).alias("rank"),
        f.col("found.statement").alias("statement"),
        f.col("found.latency_max").alias("latency_max"),
        f.col("found.calls").alias("calls"),
    )


def results(frame: DataFrame, load: Load) -> dict[type[msgspec.Struct], DataFrame]:
    """The three results of calls that are within the time covered."""
    covered = frame.where(f.col("timestamp") < f.timestamp_seconds(f.lit(load.end)))
    return {
        MinuteStat: minute_stats(covered),
        ServiceStat: service_stats(covered),
        SlowStatement: slow_statements(covered, load.top),
    }


def generated(spark: SparkSession, load: Load) -> DataFrame:
    """The endless stream of calls, with its watermark."""
    source = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", load.rows_per_batch)
        .option("numPartitions", 2)
        .option("startTimestamp", START * 1000)
        .option("advanceMillisPerBatch", load.seconds_per_batch * 1000)
        .load()
    )
    return calls(source).withWatermark("timestamp", "10 seconds")


def expected(spark: SparkSession, load: Load) -> dict[type[msgspec.Struct], DataFrame]:
    """What the tables must hold in the end, by a batch job over the same numbers."""
    batch = f.floor(f.col("id") / load.rows_per_batch)
    timestamp = f.timestamp_seconds(f.lit(START) + batch * load.seconds_per_batch)
    numbers = spark.range(0, load.rows, 1, 2).select(f.col("id").alias("value"), timestamp.alias("timestamp"))
    return results(calls(numbers), load)


@dataclass(frozen=True, slots=True)
class Running:
    """The queries of the pipeline and their sinks, by the type of their results."""

    queries: dict[type[msgspec.Struct], Any]
    sinks: dict[type[msgspec.Struct], DriverSink]

    def stop(self) -> None:
        """Stop the queries, then close the sinks; what was delivered is in the tables, the rest comes again."""
        for query in self.queries.values():
            query.stop()
        for sink in self.sinks.values():
            sink.close()

    def check(self) -> None:
        """Raise what a query failed with."""
        for query in self.queries.values():
            error = query.exception()
            if error is not None:
                raise error


def start(spark: SparkSession, load: Load, directory: str | os.PathLike[str]) -> Running:
    """Start the queries: three results, one queue, a handler for each type, one SQLite file."""
    home = Path(directory)
    to_sqlite = {
        kind: SqliteSink(home / "results.db", table, columns=kind.__struct_fields__, busy_timeout=120.0)
        for kind, table in TABLES.items()
    }
    running = Running({}, {})
    for kind, frame in results(generated(spark, load), load).items():
        handlers = cast("dict[type, Any]", to_sqlite)
        sink = running.sinks[kind] = DriverSink(QUEUE, handlers=handlers, rows=kind)
        running.queries[kind] = (
            frame.writeStream.queryName(TABLES[kind])
            .outputMode("append")
            .option("checkpointLocation", str(home / "checkpoints" / TABLES[kind]))
            .foreachBatch(sink)
            .start()
        )
    return running
