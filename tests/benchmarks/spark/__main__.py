"""The command `make bench-spark`: 5 million rows of string, long, double and int, each case in turn, median of runs.

The frame is cached, so that each case moves the same rows out of the JVM's memory and computes nothing. Memory is the
driver's Python process above what it had before the case, in the first run; there, what is collected whole comes last,
for a process seldom gives memory back. In the runs that are timed, `toArrow()` and the sink come one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from batchqueue_async.spark import BatchQueueDataSource, DriverSink
from batchqueue_async.spark.rows import columns

from .bare import Bare

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
STATUS = Path("/proc/self/status")
IN_FLIGHT = 100_000
TARGETS = [
    ("DriverSink, record batches / toArrow()", "sink batches", "toArrow", 0.80),
    ("DriverSink, tuples / toLocalIterator", "sink tuples", "toLocalIterator", 4.0),
    ("data source, tuples / bare writer, tuples", "source tuples", "bare tuples", 0.85),
    ("data source, tuples / bare writer, batches", "source tuples", "bare batches", 0.85),
]


def peak_mib() -> float:
    """The most resident memory since `reset_peak`."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def reset_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mib()


async def no_op(batch: Any) -> None:
    pass


def cases(frame: Any) -> dict[str, Callable[[], object]]:
    def write(form: str, **options: str) -> Callable[[], object]:
        return lambda: frame.write.format(form).options(**options).mode("append").save()

    batches = DriverSink("bench batches", consumer=no_op, rows="batch", rows_in_flight=IN_FLIGHT)
    tuples = DriverSink("bench tuples", consumer=no_op, rows="tuple", rows_in_flight=IN_FLIGHT)
    streamed = DriverSink("bench streamed", consumer=no_op, rows="batch", rows_in_flight=IN_FLIGHT, collect_bytes=0)
    ours = {"sink": "tests.benchmarks.spark.bare:no_op", "rows": "tuple"}
    return {
        "sink batches": lambda: batches(frame),
        "sink batches, streamed": lambda: streamed(frame),
        "sink tuples": lambda: tuples(frame),
        "toLocalIterator": lambda: sum(1 for _ in frame.toLocalIterator()),
        "bare batches": write("bare"),
        "bare tuples": write("bare", tuples="yes"),
        "source tuples": write("batchqueue", **ours),
        "toArrow": frame.toArrow,
    }


def in_flight_mib(frame: Any) -> float:
    """What so many rows as may be in flight take, as Arrow data and as tuples."""
    table = frame.limit(1_000).toArrow()
    rows = list(zip(*columns(table.combine_chunks().to_batches()[0]), strict=True))
    size = table.nbytes + sum(sys.getsizeof(row) + sum(map(sys.getsizeof, row)) for row in rows)
    return IN_FLIGHT * size / len(rows) / 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.spark", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "bench-results")
    options = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYTHONPATH"] = str(ROOT)
    builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "3g")
    spark = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    for source in (Bare, BatchQueueDataSource):
        spark.dataSource.register(source)
    expressions = (
        "concat('name-', id % 1000) AS s",
        "id",
        "CAST(id AS double) * 0.5 AS d",
        "CAST(id % 100 AS int) AS i",
    )
    frame = spark.range(0, options.rows, 1, 4).selectExpr(*expressions).cache()
    frame.count()
    for case in cases(frame.limit(1_000)).values():  # what is imported and started counts nowhere
        case()
    bound = in_flight_mib(frame)
    found: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    made = cases(frame)
    for name, case in made.items():
        before = reset_peak()
        case()
        memory[name] = peak_mib() - before
    order = ["toArrow", *(name for name in made if name != "toArrow")]
    for run in range(options.runs):
        for name in order:
            if name == "toLocalIterator" and run:
                continue  # it takes long, and hardly varies
            started = time.perf_counter()
            made[name]()
            found.setdefault(name, []).append(options.rows / (time.perf_counter() - started))
    report(found, memory, bound, options)
    spark.stop()


def report(found: dict[str, list[float]], memory: dict[str, float], bound: float, options: argparse.Namespace) -> None:
    rates = {name: statistics.median(each) for name, each in found.items()}
    load = f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()}"
    print(f"\n{options.rows:,} rows, median of {options.runs} runs; {load}")
    for name, rate in rates.items():
        print(f"  {name:<24}{rate:>12,.0f} rows/s   memory above the start {memory[name]:>7.0f} MiB")
    print()
    for label, ours, theirs, target in TARGETS:
        ratio = rates[ours] / rates[theirs]
        print(f"  {label:<46}{ratio:>6.2f}   target {target:.2f}   {'met' if ratio >= target else 'MISSED'}")
    for name in ("sink batches", "sink batches, streamed", "sink tuples"):
        label = f"driver memory, {name}: {memory[name]:.0f} MiB"
        print(f"  {label:<52} at most {bound:.0f} MiB   {'met' if memory[name] <= bound else 'MISSED'}")
    options.output.mkdir(exist_ok=True)
    results = {"rows": options.rows, "load": os.getloadavg(), "rates": found, "memory_mib": memory, "bound_mib": bound}
    (options.output / "spark.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
