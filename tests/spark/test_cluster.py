"""On a standalone cluster, and with drivers and executors that are killed: rows in SQLite are exactly the source's."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from chispa import assert_df_equality
from cluster import Cluster, children, kill
from killed_driver import QUERIES, ROWS_PER_BATCH, STEPS, Kill

from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import BatchQueueDataSource, DriverSink

KILLS = int(os.environ.get("BATCHQUEUE_SPARK_KILLS", "10"))
HERE = Path(__file__).parent

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600 + 60 * KILLS)]


def select(path):
    if not path.exists():
        return []
    with closing(sqlite3.connect(path, timeout=30)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'rows'").fetchall():
            return []
        return [row[0] for row in database.execute("SELECT value FROM rows ORDER BY value")]


def wait_for(condition, timeout=600):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.02)


# --- the driver is killed


class Driver:
    """A driver in a process of its own, which can start Spark before it is its turn."""

    def __init__(self, home, name, killed=None):
        self.home, self.name, self.killed = home, name, killed
        with (home / f"{name}.log").open("wb") as log:
            command = [sys.executable, str(HERE / "killed_driver.py"), str(home), name, *map(str, killed or ())]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def go(self):
        self.wait_for("ready")
        (self.home / f"{self.name}.go").touch()

    def wait_for(self, what):
        wait_for(lambda: (self.home / f"{self.name}.{what}").exists() or self.process.poll() is not None)
        assert self.process.poll() in {None, -signal.SIGKILL}, (self.home / f"{self.name}.log").read_text()

    def end(self, after):
        """Wait until it has killed itself, or kill it some time after its start."""
        if self.killed is None:
            self.wait_for("started")
            time.sleep(after)  # the point of the kill is the chance: nothing waits for this
            kill(self.process)
        wait_for(lambda: self.process.poll() is not None)
        assert self.process.returncode == -signal.SIGKILL, (self.home / f"{self.name}.log").read_text()


def point_of(home):
    """How far the batch was that a kill found: which of the offsets, the sink's note and Spark's commit there are."""

    def last(log):
        return max((int(each.name) for each in (home / "checkpoint" / log).glob("[0-9]*")), default=-1)

    try:
        with closing(sqlite3.connect(home / "out.db")) as database:
            delivered = database.execute("SELECT coalesce(max(number), -1) FROM batchqueue_ledger").fetchone()[0]
    except sqlite3.OperationalError:
        delivered = -1
    planned, committed = last("offsets"), last("commits")
    assert committed <= delivered <= planned or planned == -1
    if delivered > committed:
        return BETWEEN_COMMITS
    return AMID if planned > committed else "between batches"


AMID, BETWEEN_COMMITS = "amid a batch", "between the sink's commit and Spark's"
LEFT_BY = {step: {AMID} for step in STEPS} | {
    "begun": {AMID, BETWEEN_COMMITS},  # a repeated batch begins one to ask whether the next batch is in
    "committing": {AMID, BETWEEN_COMMITS},
    "committed": {BETWEEN_COMMITS},
}
"""What a kill at a step leaves of the batch that took it."""


def kill_number(number, chance):
    """Each step in turn, of one of the queries, in one of its first batches; and a kill at any time after those."""
    steps = [*STEPS, None]
    step = steps[number % len(steps)]
    return None if step is None else Kill(chance.randrange(QUERIES), step, chance.randint(1, 4))


def test_a_driver_killed_at_each_step_leaves_exact_rows(tmp_path):
    """Each driver goes on from the checkpoints of those before; after each kill the rows are gapless prefixes."""
    chance = random.Random(20_26)
    homes = [tmp_path / str(query) for query in range(QUERIES)]
    found = [0] * QUERIES
    points = Counter()
    following = Driver(tmp_path, "first", kill_number(0, chance))
    try:
        for number in range(KILLS):
            driver = following
            driver.go()
            # Starts Spark while the other one writes.
            following = Driver(tmp_path, f"after{number}", kill_number(number + 1, chance))
            driver.end(after=chance.uniform(0.0, 3.0))
            seen = [point_of(home) for home in homes]
            points.update(seen)
            if driver.killed is not None:
                assert seen[driver.killed.query] in LEFT_BY[driver.killed.step]
            for query, home in enumerate(homes):
                rows = select(home / "out.db")
                assert rows == list(range(len(rows)))
                assert len(rows) % ROWS_PER_BATCH == 0, "a part of a batch is in"
                assert len(rows) >= found[query]
                found[query] = len(rows)
            # With `pytest -s`: how far a campaign is, also one that is cut off.
            step = "any time" if driver.killed is None else driver.killed.step
            print(f"{number + 1} of {KILLS} kills: {step}; rows {found}; {dict(points)}", flush=True)  # noqa: T201 - of a campaign
    finally:
        kill(driver.process)
        kill(following.process)
    assert sum(found) > 0


# --- a cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, spark_free):
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def session(cluster):
    from sessions import builder

    found = (
        builder("cluster")
        .master(cluster.url)
        .config("spark.executor.memory", "512m")
        .config("spark.task.maxFailures", "4")
        .config("spark.executor.cores", "1")
        .config("spark.cores.max", "2")
        .config("spark.speculation", "true")
        .config("spark.speculation.interval", "100ms")
        .config("spark.speculation.quantile", "0.75")  # of four tasks: when three are done
        .config("spark.speculation.multiplier", "1.1")
        .config("spark.speculation.minTaskRuntime", "500ms")
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


@pytest.mark.parametrize("sink", ["sqlite", "jsonl"])
def test_a_speculative_copy_and_the_task_that_it_overtook_are_written_once(session, tmp_path, sink):
    """The first attempt goes on when the copy has written all of its rows, so that both stage at about one time."""
    path, copied = tmp_path / ("out.db" if sink == "sqlite" else "out"), str(tmp_path / "copied")

    def slow_at_first(batches):
        import time
        from pathlib import Path

        from pyspark import TaskContext

        yield from batches
        context = TaskContext.get()
        if context.partitionId() == 3 and context.attemptNumber() > 0:
            Path(copied).touch()
        deadline = time.monotonic() + 600
        while context.partitionId() == 3 and not Path(copied).exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    frame = numbers(session, 2_000)
    options = {"sink": sink, "path": str(path)}
    if sink == "jsonl":  # here with rows that don't fit, two in each part
        frame = frame.selectExpr("if(value % 250 = 3, null, value) AS value", "name")
        options |= {"rows": "spark_sinks:Reading", "on_bad_row": "dead_letter", "dead_letters": str(tmp_path / "dead")}
    slow = frame.mapInArrow(slow_at_first, frame.schema)
    for _ in range(2):  # what a zombie of the first job left does not come into the second
        slow.write.format("batchqueue").options(**options).mode("append").save()
    assert Path(copied).exists(), "no task was copied"
    twice = frame.union(frame).where("value IS NOT NULL")
    if sink == "sqlite":
        found = written(session, path)
    else:
        found = session.read.schema("value long, name string").json([str(each) for each in path.glob("[!.]*/*.jsonl")])
        letters = [
            json.loads(line) for each in tmp_path.glob("dead/[!.]*/*.jsonl") for line in each.read_text().splitlines()
        ]
        assert sorted(each["row"]["name"] for each in letters) == sorted([f"n{n}" for n in range(3, 2_000, 250)] * 2)
    assert_df_equality(found, twice, ignore_row_order=True, ignore_nullable=True)


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


def stream(session, tmp_path, **options):
    """A counting stream through the executors into out.db."""
    return (
        session.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 100)
        .option("numPartitions", 2)
        .option("startTimestamp", 0)
        .load()
        .writeStream.format("batchqueue")
        .options(path=str(tmp_path / "out.db"), checkpointLocation=str(tmp_path / "checkpoint"), **options)
        .start()
    )


def reach(query, path, rows):
    """Wait until so many rows are in."""
    wait_for(lambda: len(select(path)) >= rows or not query.isActive)
    assert query.exception() is None


def test_a_stream_goes_on_through_a_killed_executor_a_failed_commit_and_a_stop(session, cluster, tmp_path):
    """Four queries, each from the checkpoint of the one before; the rows are always those of whole batches, gapless."""

    def rows():
        found = select(path)
        assert found == list(range(len(found)))
        assert len(found) % 100 == 0
        return len(found)

    path, flag = tmp_path / "out.db", tmp_path / "flag"
    query = stream(session, tmp_path, sink="sqlite")
    try:
        reach(query, path, 200)
        wait_for(lambda: len(cluster.executors()) > 0)
        os.kill(cluster.executors()[0], signal.SIGKILL)
        reach(query, path, rows() + 300)
    finally:
        query.stop()

    before = rows()
    query = stream(session, tmp_path, sink="spark_sinks:failing_publish")
    with pytest.raises(Exception, match="the commit fails"):
        query.awaitTermination(600)
    assert rows() >= before

    wait = Path(f"{flag}.wait")
    wait.touch()
    query = stream(session, tmp_path, sink="spark_sinks:slow", flag=str(flag))
    wait_for(lambda: flag.exists() or not query.isActive)
    query.stop()  # amid a write
    wait.unlink()
    assert query.exception() is None
    before = rows()

    query = stream(session, tmp_path, sink="sqlite")
    try:
        reach(query, path, before + 200)
    finally:
        query.stop()
    assert rows() >= before + 200
