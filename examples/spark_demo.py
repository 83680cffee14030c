"""The demo: `make demo`. A pipeline of Spark from a file, into SQLite, checked row by row with Spark's own batch job.

Run again after an interruption, of any kind, it goes on where it was, and ends with exactly the same rows.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from datetime import UTC, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

FILE = Path(__file__).with_suffix(".yaml")
MARKER = "done"
# For each table its view, and the column that says which rows are within the time covered.
TABLES = {"minute": ("minutes", "minute"), "service": ("services", "five"), "slow": ("slowest", "minute")}


class Demo:
    """The pipeline, what its tables must hold in the end, and how far they are."""

    def __init__(self, home: Path, minutes: int, rows_per_batch: int) -> None:
        from batchqueue_async.spark.pipelines.pipeline import SparkPipeline  # noqa: PLC0415 - after the check for Java

        overrides = {"directory": str(home), "sources.numbers.rows_per_batch": rows_per_batch}
        self.pipeline = SparkPipeline.from_file(FILE, overrides=overrides)
        self.database = home / "results.db"
        self.start: datetime = self.pipeline.spec.sources["numbers"].options["start"]
        self.end = self.start + timedelta(minutes=minutes)
        self.calls = minutes * rows_per_batch  # a micro-batch is a minute of event time
        self.wanted: dict[str, Counter[tuple[Any, ...]]] = {}

    def compute(self, spark: Any) -> None:
        """What the tables must hold: the file's own views, computed by one batch job over the time covered."""
        frames = self.pipeline.batch(spark, until=self.end)
        for table, (view, _) in TABLES.items():
            columns = [f"`{name}`" for name in frames[view].columns]
            rows = frames[view].select(*columns).collect()
            self.wanted[table] = Counter(tuple(map(_as_stored, row)) for row in rows)

    def written(self) -> dict[str, Counter[tuple[Any, ...]]]:
        """What the tables hold of the time covered; the stream goes on behind it."""
        if not self.database.exists():
            return {}
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as found:
            there = {name for (name,) in found.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            return {
                table: Counter(
                    found.execute(
                        f"SELECT * FROM {table} WHERE {column} < ?",  # noqa: S608 - names from TABLES
                        (_as_stored(self.end),),
                    )
                )
                for table, (_, column) in TABLES.items()
                if table in there
            }

    def is_full(self, _run: Any) -> bool:
        """Whether each table has as many rows as it must have."""
        written = self.written()
        return all(written.get(table, Counter()).total() >= rows.total() for table, rows in self.wanted.items())

    def footer(self, queries: Sequence[Any]) -> str:
        """A progress bar: how much of the event time has passed through the slowest query."""
        from batchqueue_async.spark.pipelines.display import bar  # noqa: PLC0415 - after the check for Java

        reached = [each.watermark or 0.0 for each in queries if each.name in TABLES and each.watermark is not None]
        share = (min(reached, default=0.0) - self.start.timestamp()) / (self.end - self.start).total_seconds()
        return f"event time {bar(share)}"


def _as_stored(value: Any) -> Any:
    """A value as the SQLite sink keeps it: times are texts in UTC."""
    if not hasattr(value, "isoformat"):
        return value
    return value.astimezone(UTC).isoformat()


def watching(demo: Demo, limit: float) -> tuple[Callable[[Any], bool], Callable[[], bool]]:
    """What the run is to call now and then, which ends it when the tables are full; and whether they were."""
    from batchqueue_async.spark.pipelines.display import Display  # noqa: PLC0415 - after the check for Java

    display = Display(sys.stdout, footer=demo.footer)
    began = looked = time.monotonic()
    full = False

    def watch(run: Any) -> bool:
        nonlocal looked, full
        display.watch(run)
        now = time.monotonic()
        if not full and now - looked > 1:
            looked = now
            full = demo.is_full(run)
        return full or now - began > limit

    return watch, lambda: full


def main() -> None:
    """Run the demo, or the rest of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("demo-output"), help="where everything goes")
    parser.add_argument("--minutes", type=int, default=10, help="event time to generate; a multiple of 5")
    parser.add_argument("--rows-per-batch", type=int, default=40_000)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which it gives up")
    options = parser.parse_args()
    home: Path = options.directory
    if (home / MARKER).exists():
        shutil.rmtree(home)
    going_on = home.exists()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    stop = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: stop.set())

    demo = Demo(home.resolve(), options.minutes, options.rows_per_batch)
    doing = "going on with" if going_on else "starting"
    print(f"{doing} {demo.calls:,} calls over {options.minutes} minutes, as {FILE.name} says")
    began = time.monotonic()
    spark = demo.pipeline.session()
    demo.compute(spark)
    watch, is_full = watching(demo, options.limit)
    report = demo.pipeline.run(spark=spark, stop=stop, watch=watch)
    spark.stop()
    conclude(demo, report, home, time.monotonic() - began, is_full=is_full(), stopped=stop.is_set())


def conclude(demo: Demo, report: Any, home: Path, seconds: float, *, is_full: bool, stopped: bool) -> None:
    """Draw the picture, check the tables, and end with a status that says how it went."""
    from batchqueue_async.spark.pipelines.picture import draw  # noqa: PLC0415 - after the check for Java

    picture = home / "pipeline.svg"
    picture.write_text(draw("what the pipeline did", report.samples), encoding="utf-8")
    if not is_full:
        for name, text in report.failed.items():
            print(f"{name}: given up: {text}")
        sys.exit(f"{'interrupted' if stopped else 'not done'}; run it again to go on from {home}")
    written = demo.written()
    print(f"\n{'table':<10}{'rows':>10}{'expected':>10}  same rows as Spark's own batch job")
    same = {table: written[table] == wanted for table, wanted in demo.wanted.items()}
    for table, wanted in demo.wanted.items():
        print(f"{table:<10}{written[table].total():>10,}{wanted.total():>10,}  {'yes' if same[table] else 'NO'}")
    print(f"picture: {picture}")
    print(f"database: {demo.database}; {demo.calls:,} calls in {seconds:.0f} s")
    if not all(same.values()):
        sys.exit("the tables differ from Spark's own batch job")
    (home / MARKER).touch()


if __name__ == "__main__":
    main()
