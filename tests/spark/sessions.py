"""Sessions of a Spark for tests: on two cores, on the loopback interface, without its web pages."""

from __future__ import annotations

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
