"""A batch job into JSON lines, written by the executors: each a queue, and all of it visible at once or not at all.

    python examples/spark_batch_to_jsonl.py output

writes output/lines/<job>/<part>.jsonl. On a cluster the path is one that all machines share.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

from pyspark.sql import SparkSession

from batchqueue_async.spark import BatchQueueDataSource


def main(home: Path) -> None:
    """Write a thousand rows."""
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.dataSource.register(BatchQueueDataSource)
    frame = spark.range(0, 1000, 1, 4).selectExpr("id", "id * id AS square")
    (
        frame.write.format("batchqueue")
        .option("sink", "jsonl")
        .option("path", str((home / "lines").resolve()))
        .option("queue.max_batch", "500")
        .mode("append")
        .save()
    )
    spark.stop()
    parts = sorted((home / "lines").glob("[!.]*/*.jsonl"))
    lines = [line for part in parts for line in part.read_text().splitlines()]
    print(f"{len(lines)} lines in {len(parts)} files, for example {lines[0]}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "output"))
