"""On a standalone cluster, and with drivers and executors that are killed: rows in SQLite are exactly the source's."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from chispa import assert_df_equality
from cluster import Cluster, children

from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import BatchQueueDataSource, DriverSink

KILLS = int(os.environ.get("BATCHQUEUE_SPARK_KILLS", "20"))
HERE = Path(__file__).parent

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600 + 60 * KILLS)]


def select(path):
    if not path.exists():
        return []
    with closing(sqlite3.connect(path, timeout=30)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'rows'").fetchall():
            return []
        return [row[0] for row in database.execute("SELECT value FROM rows ORDER BY value")]


def wait_for(condition, process=None, timeout=120):
    deadline = time.monotonic() + timeout
    while not condition():
        assert process is None or process.poll() is None, "the driver ended by itself"
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.02)


def kill(process):
    for pid in [process.pid, *children(process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(30)


# --- the driver is killed


def test_a_driver_killed_at_random_points_leaves_exact_rows(tmp_path):
    """Each driver goes on from the checkpoint of those before; after each kill the rows are a gapless prefix."""
    chance = random.Random(20_26)
    path = tmp_path / "out.db"
    found = 0
    for _ in range(KILLS):
        (tmp_path / "started").unlink(missing_ok=True)
        with (tmp_path / "driver.log").open("wb") as log:
            driver = subprocess.Popen(
                [sys.executable, str(HERE / "killed_driver.py"), str(tmp_path)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_for((tmp_path / "started").exists, driver)
            if chance.random() < 0.7:  # in the most cases after it wrote something, so that the campaign gets on
                before = found
                wait_for(lambda: len(select(path)) > before, driver)  # noqa: B023
            time.sleep(chance.uniform(0.0, 0.6))  # the point of the kill is the chance: nothing waits for this
        finally:
            kill(driver)
        rows = select(path)
        assert rows == list(range(len(rows)))
        assert len(rows) >= found
        found = len(rows)
    assert found > 0


# --- a cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, spark_free):
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def session(cluster):
    from conftest import builder

    found = (
        builder("cluster")
        .master(cluster.url)
        .config("spark.executor.memory", "512m")
        .config("spark.task.maxFailures", "4")
        .config("spark.executor.cores", "1")
        .config("spark.cores.max", "2")
        .getOrCreate()
    )
    found.sparkContext.setLogLevel("OFF")
    found.dataSource.register(BatchQueueDataSource)
    wait_for(lambda: len(cluster.executors()) == 2)
    yield found
    found.stop()


def numbers(spark, count, partitions=4):
    return spark.range(0, count, 1, partitions).selectExpr("id AS value", "concat('n', id) AS name")


def written(spark, path):
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT value, name FROM rows").fetchall()
    return spark.createDataFrame(rows, "value long, name string")


def test_executors_write_through_their_queues(session, tmp_path):
    frame = numbers(session, 2_000)
    frame.write.format("batchqueue").options(sink="sqlite", path=str(tmp_path / "out.db")).mode("append").save()
    assert_df_equality(written(session, tmp_path / "out.db"), frame, ignore_row_order=True, ignore_nullable=True)


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["stream", "collect"])
def test_the_driver_takes_rows_from_the_executors(session, tmp_path, limit):
    frame = numbers(session, 2_000)
    with DriverSink("driver", sink=SqliteSink(tmp_path / "out.db"), collect_bytes=limit) as sink:
        sink(frame)
    assert_df_equality(written(session, tmp_path / "out.db"), frame, ignore_row_order=True, ignore_nullable=True)


def test_a_task_that_fails_once_is_repeated_and_written_once(session, tmp_path):
    marker = str(tmp_path / "failed")

    def fail_once(batches):
        from pathlib import Path

        for batch in batches:
            yield batch
            if not Path(marker).exists():
                Path(marker).touch()
                raise LookupError("the first attempt fails, after rows were staged")

    frame = numbers(session, 1_000)
    flaky = frame.mapInArrow(fail_once, frame.schema)
    flaky.write.format("batchqueue").options(sink="sqlite", path=str(tmp_path / "out.db")).mode("append").save()
    assert Path(marker).exists()
    assert_df_equality(written(session, tmp_path / "out.db"), frame, ignore_row_order=True, ignore_nullable=True)


def test_an_executor_killed_amid_a_write_leaves_exact_rows(session, cluster, tmp_path):
    path, flag = tmp_path / "out.db", tmp_path / "flag"
    wait = Path(f"{flag}.wait")
    wait.touch()
    frame = numbers(session, 1_000)
    options = {"sink": "spark_sinks:slow", "path": str(path), "flag": str(flag)}
    seen = []

    def kill_the_executor():
        try:
            wait_for(flag.exists)
            worker = int(flag.read_text())
            seen.append(select(path))
            os.kill(next(pid for pid in cluster.executors() if worker in children(pid)), signal.SIGKILL)
        finally:
            wait.unlink()

    # The write stays on this thread, whose session knows the data source.
    killing = threading.Thread(target=kill_the_executor)
    killing.start()
    frame.write.format("batchqueue").options(**options).mode("append").save()
    killing.join(120)
    assert seen == [[]]
    assert_df_equality(written(session, path), frame, ignore_row_order=True, ignore_nullable=True)


def test_a_stream_through_an_executor_kill_is_exact(session, cluster, tmp_path):
    path = tmp_path / "out.db"
    query = (
        session.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 100)
        .option("numPartitions", 2)
        .option("startTimestamp", 0)
        .load()
        .writeStream.format("batchqueue")
        .options(sink="sqlite", path=str(path), checkpointLocation=str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        wait_for(lambda: len(select(path)) >= 200 or not query.isActive)
        wait_for(lambda: len(cluster.executors()) > 0)
        os.kill(cluster.executors()[0], signal.SIGKILL)
        before = len(select(path))
        wait_for(lambda: len(select(path)) >= before + 300 or not query.isActive)
        assert query.exception() is None
    finally:
        query.stop()
    rows = select(path)
    assert rows == list(range(len(rows)))
