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


def forget_last_commit(checkpoint):
    """Leave a checkpoint as it was between the sink's commit of a batch and Spark's, when a driver died there.

    A batch that came after it, which the end of the query found under way, was not planned by then.
    """
    last = max(int(each.name) for each in (checkpoint / "commits").glob("[0-9]*"))
    for log, kept in (("commits", last - 1), ("offsets", last)):
        for each in (checkpoint / log).iterdir():  # 7, and .7.crc
            number = re.search(r"\d+", each.name)
            if number is not None and int(number[0]) > kept:
                each.unlink()
