"""The demo: `make demo`. A minute of Structured Streaming through one queue into SQLite, checked row by row.

Run again after an interruption, of whatever kind, it goes on where it was, and ends with exactly the same rows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchqueue_async.spark.pipeline import Load, Running

MARKER = "done"


def session() -> Any:
    """A local Spark on two cores, on the loopback interface only."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from pyspark.sql import SparkSession  # noqa: PLC0415 - after the check for Java

    options = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        # A query that is stopped amid a batch matches its error against a regular expression that needs much stack.
        "spark.driver.extraJavaOptions": "-Xss16m",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    }
    builder = SparkSession.builder.appName("batchqueue demo").master("local[2]")
    for name, value in options.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def table_rows(database: Path) -> dict[str, int]:
    """How many rows each table holds."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as found:
        names = [name for (name,) in found.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: found.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in names}  # noqa: S608


def check(spark: Any, load: Load, database: Path) -> dict[str, tuple[int, int, bool]]:
    """Compare each table with Spark's own batch job: rows there, rows expected, and whether all are equal."""
    from batchqueue_async.spark.pipeline import TABLES, expected  # noqa: PLC0415 - after the check for Java

    answers: dict[str, tuple[int, int, bool]] = {}
    with closing(sqlite3.connect(database)) as found:
        for kind, frame in expected(spark, load).items():
            columns = kind.__struct_fields__
            wanted = Counter(tuple(row) for row in frame.select(*columns).collect())
            written = Counter(found.execute(f"SELECT {', '.join(columns)} FROM {TABLES[kind]}").fetchall())  # noqa: S608
            answers[TABLES[kind]] = (written.total(), wanted.total(), written == wanted)
    return answers


def plot(database: Path, target: Path) -> None:
    """Latency and errors of each service, from the tables."""
    import matplotlib as mpl  # noqa: PLC0415 - only the demo needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    query = (
        "SELECT service, minute, sum(latency_sum) * 1.0 / sum(calls), sum(errors) FROM minute GROUP BY 1, 2 ORDER BY 2"
    )
    with closing(sqlite3.connect(database)) as found:
        rows = found.execute(query).fetchall()
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(9, 6))
    first = min(row[1] for row in rows)
    for service in sorted({row[0] for row in rows}):
        mine = [row for row in rows if row[0] == service]
        minutes = [(row[1] - first) / 60 for row in mine]
        above.plot(minutes, [row[2] for row in mine], marker="o", label=service)
        below.plot(minutes, [row[3] for row in mine], marker="o")
    above.set_ylabel("mean latency (ms)")
    below.set_ylabel("errors per minute")
    below.set_xlabel("minute")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle("Calls of services, from the table `minute`")
    figure.legend(loc="lower center", fontsize="small", ncols=6)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(target, dpi=100)


class Display:
    """One line that tells how far the pipeline is; on a terminal it stays in its place."""

    def __init__(self, running: Running, listener: Any) -> None:
        self.running = running
        self.listener = listener
        self.live = sys.stdout.isatty()
        self.began = self.told = time.monotonic()

    def line(self) -> str:
        """What there is to tell."""
        queries = list(self.listener.stats().values())
        sinks = [sink.stats() for sink in self.running.sinks.values()]
        depth = max((each.queue.used for each in sinks if each.queue is not None), default=0)
        rows_in = sum(each.rows for each in queries)
        lags = [each.lag.p50 for each in queries if each.lag.count]
        rate = sum(each.rows_per_second for each in queries if each.active)
        return (
            f"{time.monotonic() - self.began:5.1f} s  read {rows_in:>9,} rows by 3 queries ({rate:>9,.0f}/s)"
            f"  written {sum(each.rows for each in sinks):>6,} rows  queue depth {depth:>3}"
            f"  lag {max(lags, default=0.0):4.1f} s"
        )

    def show(self) -> None:
        """Show it, on something that is no terminal every five seconds."""
        if self.live:
            print(f"\r{self.line()}", end="", flush=True)
        elif time.monotonic() - self.told > 5:  # noqa: PLR2004
            self.told = time.monotonic()
            print(self.line(), flush=True)


def run(spark: Any, load: Load, home: Path, limit: float) -> bool:
    """Run the pipeline until its tables are full; False if it was interrupted."""
    from batchqueue_async.spark import pipeline  # noqa: PLC0415 - after the check for Java
    from batchqueue_async.spark.listener import QueryListener  # noqa: PLC0415

    wanted = {pipeline.TABLES[kind]: frame.count() for kind, frame in pipeline.expected(spark, load).items()}
    listener = QueryListener()
    spark.streams.addListener(listener)
    running = pipeline.start(spark, load, home)
    display = Display(running, listener)
    try:
        while True:
            running.check()
            display.show()
            written = table_rows(home / "results.db") if (home / "results.db").exists() else {}
            if all(written.get(table, 0) >= rows for table, rows in wanted.items()):
                return True
            if time.monotonic() - display.began > limit:
                sys.exit(f"\nthe tables are not full after {limit:.0f} s: {written} of {wanted}")
            time.sleep(0.3)
    except KeyboardInterrupt:
        return False
    finally:
        print(f"\r{display.line()}")
        running.stop()
        spark.streams.removeListener(listener)


def main() -> None:
    """Run the demo, or the rest of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("demo-output"), help="where everything goes")
    parser.add_argument("--minutes", type=int, default=10, help="event time to generate; a multiple of 5")
    parser.add_argument("--rows-per-batch", type=int, default=40_000)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which it gives up")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from batchqueue_async.spark.pipeline import Load  # noqa: PLC0415 - after the check for Java

    load = Load(minutes=options.minutes, rows_per_batch=options.rows_per_batch)
    home: Path = options.directory
    if (home / MARKER).exists():
        shutil.rmtree(home)
    going_on = home.exists()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    print(f"{'going on with' if going_on else 'starting'} {load.rows:,} calls of services over {load.minutes} minutes")
    began = time.monotonic()
    spark = session()
    if not run(spark, load, home, options.limit):
        sys.exit(f"interrupted; run it again to go on from {home}")
    answers = check(spark, load, home / "results.db")
    print(f"\n{'table':<10}{'rows':>10}{'expected':>10}  same rows as Spark's own batch job")
    for table, (written, wanted, same) in answers.items():
        print(f"{table:<10}{written:>10,}{wanted:>10,}  {'yes' if same else 'NO'}")
    if not options.no_plot:
        plot(home / "results.db", home / "plot.png")
        print(f"plot: {home / 'plot.png'}")
    print(f"database: {home / 'results.db'}; {load.rows:,} calls in {time.monotonic() - began:.0f} s")
    spark.stop()
    if not all(same for _, _, same in answers.values()):
        sys.exit("the tables differ from Spark's own counts")
    (home / MARKER).touch()


if __name__ == "__main__":
    main()
