"""The driver that the kill campaign kills: counting streams into SQLite, each through a `DriverSink` of its own.

    python killed_driver.py HOME NAME [QUERY STEP COUNT]

starts Spark, tells by the file HOME/NAME.ready that it did, and begins with its queries when HOME/NAME.go is there.
Told a step, it kills itself, with its JVM, when one of the queries takes it for so many times; the other queries are
wherever they are then. Each query has a checkpoint and a file of rows in a folder of its own, HOME/QUERY.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"

from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark import DriverSink

ROWS_PER_BATCH = 50
QUERIES = 4
STEPS = ("committed", "begun", "sent", "committing", "sending", "all sent")
"""Where a batch is killed: the first is the last that it takes before Spark's own commit."""


class Kill(NamedTuple):
    """What a driver dies of: its query `query` takes `step` for the `count`th time."""

    query: int
    step: str
    count: int


def die():
    """Kill this process and its JVM in one call."""
    assert os.getpgrp() == os.getpid(), "its group has others in it"
    os.killpg(0, signal.SIGKILL)


class KilledSink(SqliteSink):
    """Counts the steps of its transactions, and dies of one."""

    def __init__(self, path, step=None, count=0):
        super().__init__(path)
        self.step, self.left = step, count

    async def begin(self, key):
        transaction = await super().begin(key)
        if transaction is None:
            return None
        if self.reach("begun"):
            die()
        return KilledTransaction(self, transaction)

    def reach(self, step):
        """Whether this is what the driver dies of."""
        if step != self.step:
            return False
        self.left -= 1
        return self.left == 0


class KilledTransaction:
    def __init__(self, sink, transaction):
        self.sink, self.transaction = sink, transaction
        self.declare, self.clear, self.rollback = transaction.declare, transaction.clear, transaction.rollback

    async def send(self, rows):
        await self.killed_amid("sending", self.transaction.send(rows))
        if self.sink.reach("sent"):
            die()

    async def commit(self):
        if self.sink.reach("all sent"):
            die()
        await self.killed_amid("committing", self.transaction.commit())
        if self.sink.reach("committed"):
            die()

    async def killed_amid(self, step, call):
        """Let a call be made; where the driver dies of the step, amid the call or shortly after, it gets no further."""
        dies = self.sink.reach(step)
        if dies:
            threading.Timer(random.uniform(0.0, 0.005), die).start()
        await call
        if dies:
            await asyncio.Event().wait()


def main(home: Path, name: str, killed: Kill | None) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from sessions import builder

    spark = builder("killed").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    source = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", ROWS_PER_BATCH)
        .option("numPartitions", 2)
        .option("startTimestamp", 0)
        .load()
        .select("value")
    )
    (home / f"{name}.ready").touch()
    while not (home / f"{name}.go").exists():
        time.sleep(0.01)
    for query in range(QUERIES):
        place = home / str(query)
        place.mkdir(exist_ok=True)
        step, count = killed[1:] if killed is not None and killed.query == query else (None, 0)
        # Few rows in flight, so that a batch is many sends of one transaction.
        sink = DriverSink(f"killed{query}", sink=KilledSink(place / "out.db", step, count), rows_in_flight=40)
        source.writeStream.foreachBatch(sink).option("checkpointLocation", str(place / "checkpoint")).start()
    (home / f"{name}.started").touch()
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    _, place, name, *rest = sys.argv
    main(Path(place), name, Kill(int(rest[0]), rest[1], int(rest[2])) if rest else None)
