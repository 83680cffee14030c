"""The view of `spark_demo.yaml` that is a function: a pipeline's file names it as `spark_demo_views:slowest`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TOP = 5


def slowest(minutes: DataFrame) -> DataFrame:
    """The endpoints with the slowest calls of each minute, from L1."""
    found = f.collect_list(f.struct("latency_max", "service", "endpoint", "calls"))
    ranked = minutes.groupBy(f.window("minute", "1 minute").alias("span")).agg(
        f.slice(f.sort_array(found, asc=False), 1, TOP).alias("top")
    )
    placed = ranked.select("span", f.posexplode("top").alias("place", "found"))
    return placed.select(
        f.col("span.start").alias("minute"),
        (f.col("place") + 1).alias("rank"),
        "found.service",
        "found.endpoint",
        "found.latency_max",
        "found.calls",
    )
