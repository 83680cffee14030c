"""The Spark that a pipeline runs on, as its file describes it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from batchqueue_async.spark.executors.data_source import BatchQueueDataSource
from batchqueue_async.spark.pipelines.targets import plain

if TYPE_CHECKING:
    from batchqueue_async.spark.pipelines.spec import PipelineSpec

_DEFAULTS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # A query that is stopped amid a batch matches its error against a regular expression that needs much stack.
    "spark.driver.extraJavaOptions": "-Xss16m",
}
# Loopback unless told otherwise: a local Spark serves nobody else.
_LOCAL = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",
}


def settings(spec: PipelineSpec) -> dict[str, str]:
    """Spark's settings for a pipeline; the file's own come last."""
    session = spec.session
    found = dict(_DEFAULTS)
    if session.master is not None and session.master.startswith("local"):
        found |= _LOCAL
    for name, values in (("packages", session.packages), ("", session.jars)):
        if values:
            found[f"spark.jars{'.' if name else ''}{name}"] = ",".join(values)
    if session.py_files:
        found["spark.submit.pyFiles"] = ",".join(session.py_files)
    found["spark.sql.streaming.stopTimeout"] = f"{round(spec.timeouts.stop * 1000)}"
    return found | plain(session.conf)


def start(spec: PipelineSpec) -> SparkSession:
    """Start Spark, or take the session that there is, with what of the settings can still be changed."""
    session = spec.session
    if session.master is not None and session.master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(spec.name)
    if session.master is not None:
        builder = builder.master(session.master)
    for name, value in settings(spec).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel(session.log_level.upper())
    if any(target.place == "executors" for output in spec.outputs.values() for target in output.targets):
        spark.dataSource.register(BatchQueueDataSource)
    return spark
