"""A program to watch, run by the tests of the page: two pipelines, a destination that stops, a handler that blocks.

It does what it reads on its standard input, a word per line: `stop`, `go`, `poison`, `block SECONDS`, `end`. On its
standard output it says where its page is.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time

import batchqueue_async as bq
from batchqueue_async import observe


class Warehouse:
    """A destination that can be stopped."""

    concurrent = True

    def __init__(self) -> None:
        self.there = True
        self.poison = False

    async def open(self) -> None:
        pass

    async def send(self, batch) -> None:
        await asyncio.sleep(random.uniform(0.004, 0.03))
        if not self.there:
            raise bq.RetryableError("connection to warehouse:5432 refused")
        if self.poison:
            self.poison = False
            raise bq.PermanentError("invalid byte sequence for encoding")

    async def close(self) -> None:
        pass


async def produce(rows, clicks):
    while True:
        await rows.produce_many({"id": number, "text": "x" * 40} for number in range(random.randrange(120, 260)))
        await clicks.produce_many(range(random.randrange(20, 60)))
        await asyncio.sleep(0.05)


async def obey(warehouse):
    loop = asyncio.get_running_loop()
    while True:
        word, _, argument = (await loop.run_in_executor(None, sys.stdin.readline)).strip().partition(" ")
        if word in {"", "end"}:
            return
        if word == "block":
            time.sleep(float(argument))
        elif word == "poison":
            warehouse.poison = True
        else:
            warehouse.there = word == "go"


async def main(path):
    async def count(batch):
        await asyncio.sleep(0.01)

    warehouse = Warehouse()
    config = bq.ExportConfig(
        path=path,
        max_bytes="64MiB",
        overflow="block",
        workers=bq.WorkerPolicy.fixed(4),
        retry=bq.RetryPolicy(initial=0.2, max_delay=0.5, isolate=False),
        breaker=bq.BreakerPolicy(threshold=2, reset_timeout=0.5),
        drain_timeout=1.0,
    )
    async with bq.BatchQueueManager() as manager, bq.Exporter(warehouse, config, name="warehouse") as exporter:
        rows = manager.create(
            "rows",
            bq.QueueConfig(
                consumer=exporter,
                workers=bq.WorkerPolicy.fixed(4),
                partitions=bq.PartitionPolicy.fixed(16),
                selector=bq.round_robin(),
                buffer_size=200,
                max_batch=500,
                drain_timeout=0.5,
            ),
        )
        clicks = manager.create(
            "clicks",
            bq.QueueConfig(
                consumer=count,
                workers=bq.WorkerPolicy.fixed(2),
                partitions=bq.PartitionPolicy.fixed(4),
                selector=bq.round_robin(),
                drain_timeout=0.5,
            ),
        )
        for number in range(int(os.environ.get("MORE_QUEUES", "0"))):
            manager.create(
                f"quiet-{number}",
                bq.QueueConfig(consumer=count, partitions=bq.PartitionPolicy.fixed(16), selector=bq.round_robin()),
            )
        producing = asyncio.create_task(produce(rows, clicks))
        async with observe.serve("127.0.0.1:0", "unix:") as ops:
            print(ops.urls[0], flush=True)
            await obey(warehouse)
        producing.cancel()


if __name__ == "__main__":
    import logging

    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(directory))
