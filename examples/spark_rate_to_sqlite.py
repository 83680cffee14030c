"""A rate stream into SQLite, exactly once: kill it whenever you like, and start it again.

    python examples/spark_rate_to_sqlite.py output 200

writes at least 200 more rows into output/rows.db, and checks that none is missing or doubled.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

from pyspark.sql import SparkSession

from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import DriverSink


def values(database: Path) -> list[int]:
    """What is in the table, in order."""
    with closing(sqlite3.connect(database)) as found:
        return [value for (value,) in found.execute("SELECT value FROM rows ORDER BY value")]


def main(home: Path, rows: int) -> None:
    """Write so many rows more."""
    home.mkdir(parents=True, exist_ok=True)
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    stream = (
        spark.readStream.format("rate-micro-batch")  # each batch has the same rows whenever it is repeated
        .option("rowsPerBatch", 50)
        .option("startTimestamp", 0)
        .load()
    )
    # The batch's id is noted in the transaction of its rows: a batch that is repeated has no effect.
    sink = DriverSink("rows", sink=SqliteSink(home / "rows.db", table="rows"))
    query = stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(home / "checkpoint")).start()
    while sink.stats().rows < rows and not query.awaitTermination(0.2):
        pass
    query.stop()
    sink.close()
    spark.stop()
    found = values(home / "rows.db")
    print(f"{len(found)} rows; none missing or doubled: {found == list(range(len(found)))}")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0] if given else "output"), int(given[1]) if given[1:] else 200)
