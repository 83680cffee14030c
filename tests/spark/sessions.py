"""Sessions of a Spark for tests: on two cores, on the loopback interface, without its web pages."""

from __future__ import annotations

import re

from pyspark.sql import SparkSession


def builder(app="tests"):
    return (
        SparkSession.builder.appName(app)
        .master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        # a stop amid a batch needs stack for Spark's regular expressions
        .config("spark.driver.extraJavaOptions", "-Xss16m")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.task.maxFailures", "1")
    )


class Local:
    """The local Spark of this process; a process has one SparkContext at a time."""

    def __init__(self):
        self.session = None

    def start(self):
        if self.session is None:
            self.session = builder().getOrCreate()
            self.session.sparkContext.setLogLevel("OFF")
        return self.session

    def stop(self):
        if self.session is not None:
            self.session.stop()
            self.session = None


def run_batches(writer, checkpoint, count):
    """Let a query do so many micro-batches, each to Spark's own commit: a query that is stopped has one under way."""
    for _ in range(count):
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(once=True).start()
        assert query.awaitTermination(600)


def forget_last_commit(checkpoint):
    """Leave a checkpoint as it was between the sink's commit of a batch and Spark's, when a driver died there.

    The query must have come to rest after a commit. One that was stopped may have published another batch, which Spark
    plans after the commit of the one before: no crash leaves that without this.
    """
    planned, done = (
        max(int(each.name) for each in (checkpoint / log).glob("[0-9]*")) for log in ("offsets", "commits")
    )
    assert planned == done, f"batch {planned} was under way, and may be in or not; commits end at {done}"
    for each in (checkpoint / "commits").iterdir():  # 7, and .7.crc
        number = re.search(r"\d+", each.name)
        if number is not None and int(number[0]) == done:
            each.unlink()
