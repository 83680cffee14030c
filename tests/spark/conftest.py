"""One local Spark for all tests that need one: starting it takes longer than most of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
# The workers import the sinks of these tests from here.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
sys.path.insert(0, str(Path(__file__).parent))


def builder(app="tests"):
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.appName(app)
        .master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        # little is compiled well in jobs this short; a stop amid a batch needs stack for Spark's regular expressions
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -Xss16m")
        .config("spark.executor.extraJavaOptions", "-XX:TieredStopAtLevel=1")
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


local = Local()


@pytest.fixture(scope="module")
def spark():
    return local.start()


@pytest.fixture(scope="module")
def spark_free():
    """No Spark runs in this process."""
    local.stop()


@pytest.fixture(scope="session", autouse=True)
def _end():
    yield
    local.stop()
