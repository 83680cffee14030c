"""The command `make bench-spark-writes`: micro-batches and batch jobs, against what one writes by hand for the same.

2 million rows of long, string, double and int from Parquet files, in four micro-batches. What is timed is the
`foreachBatch` function alone, by turns ours and by hand, and the ratio is the median over the turns: both sides of a
turn saw the same load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import BatchQueueDataSource, DriverSink
from tests.servers import base as servers
from tests.servers import maven
from tests.servers.postgres import Postgres

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
BATCHES = 4
SCHEMA = "id LONG, name STRING, price DOUBLE, kind INT"
PARTITIONS = 200


class Row(msgspec.Struct):
    id: int
    name: str
    price: float
    kind: int


class Case(NamedTuple):
    """One row of the table: makes a side's function for a run, and what ours is to reach of the other."""

    name: str
    ours: Callable[[Path], Callable[[Any, int], None]]
    by_hand: Callable[[Path], Callable[[Any, int], None]]
    target: float


# --- by hand


def columns(batch: Any) -> list[list[Any]]:
    """The fastest way to plain values: by numpy, which has whole columns of numbers and texts."""
    return [column.to_numpy(zero_copy_only=False).tolist() for column in batch.columns]


def each_batch(convert: Callable[[Any], object]) -> Callable[[Path], Callable[[Any, int], None]]:
    def write(frame: Any, _: int) -> None:
        for batch in frame.toArrow().to_batches():
            convert(batch)

    return lambda _: write


def as_tuples(batch: Any) -> list[Any]:
    return list(zip(*columns(batch), strict=True))


def as_dicts(batch: Any) -> list[Any]:
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns(batch), strict=True)]


def as_structs(batch: Any) -> list[Any]:
    return list(map(Row, *columns(batch)))


def sqlite_by_hand(home: Path) -> Callable[[Any, int], None]:
    database = sqlite3.connect(home / "by_hand.db", isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE rows (id INTEGER, name TEXT, price REAL, kind INTEGER)")
    database.execute("CREATE TABLE done (batch INTEGER)")

    def write(frame: Any, number: int) -> None:
        database.execute("BEGIN IMMEDIATE")
        for batch in frame.toArrow().to_batches():
            database.executemany("INSERT INTO rows VALUES (?, ?, ?, ?)", as_tuples(batch))
        database.execute("INSERT INTO done VALUES (?)", (number,))
        database.execute("COMMIT")

    return write


# --- ours


async def no_op(rows: Any) -> None:
    pass


def handed_over(rows: Any) -> Callable[[Path], Callable[[Any, int], None]]:
    return lambda _: DriverSink("bench", consumer=no_op, rows=rows)


def into_sqlite(**options: Any) -> Callable[[Path], Callable[[Any, int], None]]:
    names = ["id", "name", "price", "kind"] if options else None
    return lambda home: DriverSink("bench", sink=SqliteSink(home / "ours.db", columns=names), **options)


CASES = [
    Case("record batches, no-op / bare", handed_over("batch"), each_batch(lambda batch: None), 0.95),
    Case("into SQLite by default / by hand", into_sqlite(), sqlite_by_hand, 0.9),
    Case("tuples, no-op / by hand", handed_over("tuple"), each_batch(as_tuples), 0.9),
    Case("dicts, no-op / by hand", handed_over("dict"), each_batch(as_dicts), 0.9),
    Case("structs, no-op / by hand", handed_over(Row), each_batch(as_structs), 0.9),
    Case("tuples into SQLite / by hand", into_sqlite(rows="tuple"), sqlite_by_hand, 0.85),
]


# --- measuring


def seconds_of(stream: Any, function: Callable[[Any, int], None], home: Path) -> float:
    """Seconds in the function for all of its batches."""
    times: list[float] = []

    def timed(frame: Any, number: int) -> None:
        started = time.perf_counter()
        function(frame, number)
        times.append(time.perf_counter() - started)

    writer = stream.writeStream.foreachBatch(timed).option("checkpointLocation", str(home / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    if query.exception() is not None:
        raise query.exception()
    if isinstance(function, DriverSink):
        function.close()
    return sum(times)


def ratios(stream: Any, case: Case, runs: int) -> list[float]:
    found: list[float] = []
    for run in range(runs + 1):  # the first one warms up
        taken: dict[str, float] = {}
        sides = {"ours": case.ours, "by hand": case.by_hand}
        for side in sorted(sides, reverse=run % 2 == 0):
            with tempfile.TemporaryDirectory() as directory:
                taken[side] = seconds_of(stream, sides[side](Path(directory)), Path(directory))
        if run:
            found.append(taken["by hand"] / taken["ours"])
    return found


def first_batches(spark: SparkSession, runs: int) -> list[float]:
    """The first batch of an aggregate after a start: the seconds of ours, of a bare one's."""
    spark.conf.set("spark.sql.shuffle.partitions", str(PARTITIONS))
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 2000).option("numPartitions", 2)
    rows = source.option("startTimestamp", 0).load().withWatermark("timestamp", "1 second")
    counted = rows.groupBy(f.window("timestamp", "1 second"), (f.col("value") % 100).alias("k")).count()

    def seconds(function: Callable[[Any, int], None]) -> float:
        times: list[float] = []

        def timed(frame: Any, number: int) -> None:
            started = time.perf_counter()
            function(frame, number)
            times.append(time.perf_counter() - started)

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            writer = counted.writeStream.outputMode("update").foreachBatch(timed)
            query = writer.option("checkpointLocation", f"{home}/checkpoint").start()
            while not times and not query.awaitTermination(0.1):
                pass
            query.stop()
        return times[0]

    found: list[float] = []
    for run in range(runs + 1):
        bare = seconds(lambda frame, _: frame.toArrow())
        with DriverSink("first", consumer=no_op) as sink:
            ours = seconds(sink)
        if run:
            found.append(ours / bare)
    return found


def jobs(frame: Any, runs: int, write: dict[str, Callable[[Path], None]]) -> list[float]:
    found: list[float] = []
    for run in range(runs + 1):
        taken: dict[str, float] = {}
        for side in sorted(write, reverse=run % 2 == 0):
            with tempfile.TemporaryDirectory() as home:
                started = time.perf_counter()
                write[side](Path(home))
                taken[side] = time.perf_counter() - started
        if run:
            found.append(taken["Spark"] / taken["ours"])
    return found


def into_json_lines(frame: Any, runs: int) -> list[float]:
    def ours(home: Path) -> None:
        frame.write.format("batchqueue").options(sink="jsonl", path=str(home / "ours")).mode("append").save()

    return jobs(frame, runs, {"ours": ours, "Spark": lambda home: frame.write.json(str(home / "spark"))})


def by_rows_alone(spark: SparkSession, find: Callable[[], list[float]]) -> list[float]:
    """The same while Spark bounds the record batches for Python by their rows alone.

    By default it also measures the bytes of each batch after every row that comes into it: with a few columns, this
    takes the JVM as long as everything else that it does for the write.
    """
    setting = "spark.sql.execution.arrow.maxBytesPerBatch"
    before = spark.conf.get(setting, None)
    spark.conf.set(setting, str(2**31 - 1))
    try:
        return find()
    finally:
        if before is None:
            spark.conf.unset(setting)
        else:
            spark.conf.set(setting, before)


def postgres_sink(options: dict[str, str]) -> Any:
    """Made on the executors, by name."""
    from batchqueue_async.sinks.postgres import PostgresSink

    return PostgresSink(options["dsn"], options["table"])


def into_postgres(frame: Any, runs: int, server: Postgres) -> list[float]:
    factory = f"{__name__.replace('__main__', 'tests.benchmarks.spark.writes')}:postgres_sink"
    named = iter(range(1_000))

    def ours(_: Path) -> None:
        options = {"sink": factory, "rows": "batch", "dsn": server.dsn, "table": f"ours{next(named)}"}
        frame.write.format("batchqueue").options(**options).mode("append").save()

    def theirs(_: Path) -> None:
        url = f"jdbc:postgresql://{servers.HOST}:{server.port}/tests"
        login = {"user": "tester", "password": server.password, "driver": "org.postgresql.Driver"}
        options = {"url": url, "dbtable": f"spark{next(named)}", **login}
        frame.write.format("jdbc").options(**options).mode("append").save()

    return jobs(frame, runs, {"ours": ours, "Spark": theirs})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.spark.writes", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--batches", type=int, default=BATCHES, help="micro-batches of a stream, and files of a job")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="the cases whose names have this in them")
    parser.add_argument("--output", type=Path, default=ROOT / "bench-results")
    options = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYTHONPATH"] = str(ROOT)
    builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "2g")
    builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    jar = None
    with_postgres = options.only in "into PostgreSQL"
    if with_postgres:
        try:
            jar = next(maven.jars("org.postgresql", "postgresql", "42.7.5").glob("postgresql-*.jar"))
        except servers.UnavailableError as error:
            print(f"PostgreSQL: {error}")
    if jar is not None:
        builder = builder.config("spark.jars", str(jar))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(BatchQueueDataSource)
    home = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    rates: dict[str, list[float]] = {}
    targets: dict[str, float] = {}

    server = Postgres()

    def measure(name: str, target: float, find: Callable[[], list[float]], *, at_most: bool = False) -> None:
        if options.only not in name:
            return
        found = rates[name] = find()
        targets[name] = target
        middle = statistics.median(found)
        met = middle <= target if at_most else middle >= target
        spread = f"{min(found):.2f} to {max(found):.2f}"
        word = "at most" if at_most else "at least"
        text = f"  {name:<40}{middle:>6.2f}  ({spread})   {word} {target:.2f}   {'met' if met else 'MISSED'}"
        print(text, flush=True)

    try:
        expressions = ("id", "concat('name-', id % 1000) AS name", "id * 0.5D AS price", "cast(id % 7 AS int) AS kind")
        spark.range(0, options.rows, 1, options.batches).selectExpr(*expressions).write.parquet(str(home / "in"))
        stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(home / "in"))
        frame = spark.read.parquet(str(home / "in"))
        print(
            f"{options.rows:,} rows; median of {options.runs} turns; load {os.getloadavg()[0]:.1f} of {os.cpu_count()}"
        )
        for case in CASES:
            measure(case.name, case.target, lambda case=case: ratios(stream, case, options.runs))  # type: ignore[misc]
        measure("data source into JSON lines / Spark", 0.85, lambda: into_json_lines(frame, options.runs))
        unmeasured = "the same, batches by rows, JSON lines"
        measure(unmeasured, 0.85, lambda: by_rows_alone(spark, lambda: into_json_lines(frame, options.runs)))
        if jar is not None:
            server.start()
            measure("data source into PostgreSQL / JDBC", 1.0, lambda: into_postgres(frame, options.runs, server))
        name = f"first batch of {PARTITIONS} partitions / bare"
        measure(name, 1.3, lambda: first_batches(spark, options.runs), at_most=True)
    finally:
        spark.stop()
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
    options.output.mkdir(exist_ok=True)
    results = {"rows": options.rows, "load": os.getloadavg(), "ratios": rates, "targets": targets}
    (options.output / "spark-writes.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
