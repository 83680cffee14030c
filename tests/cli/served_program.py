"""A program that serves its socket, run by the tests of the commands: a queue, an exporter, a destination that stops.

It does what it reads on its standard input, a word per line: `stop`, `go`, `end`. On its standard output it says that
it is up.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import batchqueue_async as bq
from batchqueue_async import observe


class Warehouse:
    """A destination that can be stopped."""

    def __init__(self) -> None:
        self.there = True

    async def open(self) -> None:
        pass

    async def send(self, batch) -> None:
        if not self.there:
            raise bq.RetryableError("connection to warehouse:5432 refused\x1b[31m")

    async def close(self) -> None:
        pass


async def produce(rows):
    while True:
        await rows.produce_many(range(50))
        await asyncio.sleep(0.05)


async def main(addresses):
    warehouse = Warehouse()
    config = bq.ExportConfig(
        breaker=bq.BreakerPolicy(threshold=1, reset_timeout=0.3),
        retry=bq.RetryPolicy(initial=0.1, max_delay=0.3),
        drain_timeout=0.5,
    )
    async with (
        bq.BatchQueueManager() as manager,
        bq.Exporter(warehouse, config, name="warehouse") as exporter,
        observe.serve(*addresses),
    ):
        rows = manager.create("rows", bq.QueueConfig(consumer=exporter, drain_timeout=0.5))
        producing = asyncio.create_task(produce(rows))
        print("up", flush=True)
        while (word := (await asyncio.to_thread(sys.stdin.readline)).strip()) not in {"", "end"}:
            warehouse.there = word == "go"
        producing.cancel()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asyncio.run(main(sys.argv[1:]))
