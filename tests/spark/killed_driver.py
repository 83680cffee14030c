"""The driver that the kill campaign kills: a counting stream into SQLite through `DriverSink`.

    python killed_driver.py HOME NAME

starts Spark, tells by the file HOME/NAME.ready that it did, and begins with its query when HOME/NAME.go is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"

from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import DriverSink

ROWS_PER_BATCH = 50


def main(home: Path, name: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from sessions import builder

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
    (home / f"{name}.ready").touch()
    while not (home / f"{name}.go").exists():
        time.sleep(0.01)
    # Few rows in flight, so that a batch is many sends of one transaction, and a kill finds it amid one.
    sink = DriverSink("killed", sink=SqliteSink(home / "out.db"), rows_in_flight=40)
    query = source.writeStream.foreachBatch(sink).option("checkpointLocation", str(home / "checkpoint")).start()
    (home / f"{name}.started").touch()
    query.awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
