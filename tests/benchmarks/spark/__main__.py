"""The command `make bench-spark`: 5 million rows of string, long, double and int, each case in turn, median of runs.

The frame is cached, so that each case moves the same rows out of the JVM's memory and computes nothing.
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

from .bare import Bare

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
STATUS = Path("/proc/self/status")
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

    batches = DriverSink("bench batches", consumer=no_op, rows="batch")
    tuples = DriverSink("bench tuples", consumer=no_op, rows="tuple")
    streamed = DriverSink("bench streamed", consumer=no_op, rows="batch", collect_bytes=0)
    ours = {"sink": "tests.benchmarks.spark.bare:no_op", "rows": "tuple"}
    return {
        "toArrow": frame.toArrow,
        "sink batches": lambda: batches(frame),
        "sink batches, streamed": lambda: streamed(frame),
        "toLocalIterator": lambda: sum(1 for _ in frame.toLocalIterator()),
        "sink tuples": lambda: tuples(frame),
        "bare batches": write("bare"),
        "bare tuples": write("bare", tuples="yes"),
        "source tuples": write("batchqueue", **ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.spark", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--runs", type=int, default=3)
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
    found: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    made = cases(frame)
    for run in range(options.runs + 1):  # the first one warms up
        for name, case in made.items():
            if name == "toLocalIterator" and run > 1:
                continue  # minutes long, and its rate hardly varies
            before = reset_peak()
            started = time.perf_counter()
            case()
            seconds = time.perf_counter() - started
            if run:
                found.setdefault(name, []).append(options.rows / seconds)
                memory[name] = max(memory.get(name, 0.0), peak_mib() - before)
    report(found, memory, options)
    spark.stop()


def report(found: dict[str, list[float]], memory: dict[str, float], options: argparse.Namespace) -> None:
    rates = {name: statistics.median(each) for name, each in found.items()}
    load = f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()}"
    print(f"\n{options.rows:,} rows, median of {options.runs} runs; {load}")
    for name, rate in rates.items():
        print(f"  {name:<24}{rate:>12,.0f} rows/s   memory above the start {memory[name]:>7.0f} MiB")
    print()
    for label, ours, theirs, target in TARGETS:
        ratio = rates[ours] / rates[theirs]
        print(f"  {label:<46}{ratio:>6.2f}   target {target:.2f}   {'met' if ratio >= target else 'MISSED'}")
    options.output.mkdir(exist_ok=True)
    results = {"rows": options.rows, "load": os.getloadavg(), "rates": found, "memory_mib": memory}
    (options.output / "spark.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
