"""The driver that the kill campaign kills: a counting stream into SQLite through `DriverSink`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"

from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import DriverSink

ROWS_PER_BATCH = 50


def main(home: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from conftest import builder

    spark = builder("killed").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    source = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", ROWS_PER_BATCH)
        .option("numPartitions", 2)
        .option("startTimestamp", 0)
        .load()
        .select("value")
    )
    # Few rows in flight, so that a batch is many sends of one transaction, and a kill finds it amid one.
    sink = DriverSink("killed", sink=SqliteSink(home / "out.db"), rows_in_flight=40)
    query = source.writeStream.foreachBatch(sink).option("checkpointLocation", str(home / "checkpoint")).start()
    (home / "started").touch()
    query.awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
