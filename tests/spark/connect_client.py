"""A client of a Spark Connect server: what works there, and what says why it does not. Prints what it found as JSON.

python connect_client.py sc://127.0.0.1:15002 HOME
"""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from pyspark.sql import SparkSession

from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import BatchQueueDataSource, DriverSink

ROWS = 1_000


def select(path: Path) -> list[int]:
    if not path.exists():
        return []
    with closing(sqlite3.connect(path, timeout=30)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'rows'").fetchall():
            return []
        return [value for (value,) in database.execute("SELECT value FROM rows ORDER BY value")]


def started(writer):
    """Start a query, again where a busy machine takes longer than Spark's fixed ten seconds to start its worker."""
    for _ in range(20):
        try:
            return writer.start()
        except Exception as error:
            if "while waiting for the Python worker to connect back" not in str(error):
                raise
    raise TimeoutError("no Python worker of the query came up in 20 attempts")


class Client:
    def __init__(self, url: str, home: Path) -> None:
        self.spark = SparkSession.builder.remote(url).getOrCreate()
        self.home = home
        self.numbers = self.spark.range(0, ROWS, 1, 3).selectExpr("id AS value")
        source = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 40)
        self.stream = source.option("startTimestamp", 0).load().select("value")
        self.spark.dataSource.register(BatchQueueDataSource)

    def run(self, writer, name, rows):
        """Run a query until so many rows are in NAME.db, or until it fails."""
        path = self.home / f"{name}.db"
        query = started(writer.option("checkpointLocation", str(self.home / name)))
        error = ""
        try:
            while len(select(path)) < rows and not query.awaitTermination(0.2):
                pass
        except Exception as failed:
            error = str(failed)
        query.stop()
        return {"rows": select(path), "error": error}

    def driver_batch(self, name, **options):
        with DriverSink(name, sink=SqliteSink(self.home / f"{name}.db"), **options) as sink:
            sink(self.numbers)
            return {"rows": select(self.home / f"{name}.db"), "path": sink.stats().path}

    def source_batch(self):
        path = self.home / "source.db"
        self.numbers.write.format("batchqueue").options(sink="sqlite", path=str(path)).mode("append").save()
        return {"rows": select(path)}

    def source_stream(self):
        options = {"sink": "sqlite", "path": str(self.home / "streamed.db")}
        return self.run(self.stream.writeStream.format("batchqueue").options(**options), "streamed", 80)

    def driver_stream(self, name, rows, **options):
        sink = DriverSink(name, sink=SqliteSink(self.home / f"{name}.db"), **options)
        return self.run(self.stream.writeStream.foreachBatch(sink), name, rows)


def main(url: str, home: Path) -> None:
    client = Client(url, home)
    found = {
        "driver batch": client.driver_batch("driver"),
        "source batch": client.source_batch(),
        "source stream": client.source_stream(),
        "driver stream without a name": client.driver_stream("nameless", 1_000),
        "driver stream": client.driver_stream("named", 80, source="mine"),
        "driver stream again": client.driver_stream("named", 200, source="mine"),
    }
    client.spark.stop()
    print(json.dumps(found))  # noqa: T201 - its result


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
