"""A pipeline into Delta and Iceberg by Spark's own writers, run twice; prints what is there as JSON.

A program of its own, because the jars are for another version of Spark than PySpark's, named by `SPARK_HOME`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from batchqueue_async.spark import SparkPipeline

DELTA = "io.delta.sql.DeltaSparkSessionExtension"
ICEBERG = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"


def main(home: Path) -> None:
    conf = {
        "spark.sql.extensions": f"{DELTA},{ICEBERG}",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
        "spark.sql.catalog.lake.warehouse": str(home / "warehouse"),
        "spark.driver.memory": "768m",
        "spark.sql.shuffle.partitions": "1",
    }
    both = [{"type": "delta", "path": "both"}, {"type": "sqlite", "path": "out.db", "table": "both"}]
    pipeline = SparkPipeline.from_mapping(
        {
            "name": "lake",
            "directory": str(home),
            "spark": {"master": "local[2]", "conf": conf},
            "sources": {"events": {"type": "files", "format": "json", "path": "in", "schema": "id LONG, kind STRING"}},
            "outputs": {
                "iceberg": {"view": "events", "to": {"type": "iceberg", "table": "lake.db.events"}},
                "delta": {"view": "events", "to": {"type": "delta", "path": "delta"}},
                "both": {"view": "events", "to": both},
            },
        }
    )
    (home / "in").mkdir()
    spark = pipeline.session()
    for run in range(2):
        lines = [json.dumps({"id": run * 30 + n, "kind": "x"}) for n in range(30)]
        (home / "in" / f"{run}.json").write_text("\n".join(lines))
        report = pipeline.run(spark=spark, once=True)
        assert (report.code, report.failed) == (0, {}), report
    found = {name: spark.read.format("delta").load(str(home / name)) for name in ("delta", "both")}
    found["iceberg"] = spark.table("lake.db.events")
    sys.stdout.write(
        json.dumps({name: sorted(row.id for row in frame.select("id").collect()) for name, frame in found.items()})
    )
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
