"""Write rows to PostgreSQL in batches, as a batching JDBC writer does, from tasks that each have one row at a time.

Each table has a handler: metrics replace the row of their service and minute, slow statements are added. The queue
makes batches of single rows; the sinks write a batch with one COPY, and each record once, even if the database restarts
in between. A row that a table refuses is printed, and the others of its batch are written.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from dataclasses import dataclass, replace
from functools import partial

from destination import status, watching

import batchqueue_async as bq
from batchqueue_async.sinks.postgres import PostgresSink

SERVICES = ("cart", "checkout", "search")


@dataclass(frozen=True, slots=True)
class Cpm:
    """Calls of a service in a minute, so far: the last value counts."""

    service: str
    minute: int
    calls: int


@dataclass(frozen=True, slots=True)
class SlowSql:
    """A statement that took long."""

    service: str
    statement: str
    milliseconds: int


async def produce(queue: bq.BatchQueue[Cpm | SlowSql], service: str, count: int) -> None:
    """What one service reports, row by row."""
    chance = random.Random(service)
    for number in range(count):
        await queue.produce(Cpm(service, number % 10, number))
        if number % 4 == 0:
            # Text with a NUL byte is what PostgreSQL has no place for.
            text = "SELECT \0" if number == 0 else f"SELECT {number}"
            await queue.produce(SlowSql(service, text, chance.randrange(100, 5_000)))


async def run(dsn: str, count: int, wait: float, manager: bq.BatchQueueManager) -> int:
    """Feed the queue from a task for each service, and print what arrived; the exit status."""
    config = bq.ExportConfig(
        batch=bq.BatchPolicy(max_records=1_000),
        retry=bq.RetryPolicy(initial=0.5),
        on_dead_letter=lambda records, reason: print(f"refused {len(records)}: {reason}"),
        drain_timeout=wait,
    )
    # Several batches are on their way at once: the values of one minute keep their order by their key.
    in_order = replace(config, ordering="key", key=lambda row: (row.service, row.minute))
    cpm = bq.Exporter(PostgresSink(dsn, "cpm", upsert_on=["service", "minute"]), in_order, name="cpm")
    slow = bq.Exporter(PostgresSink(dsn, "slow_sql"), config, name="slow_sql")
    async with watching(cpm, slow), cpm, slow:
        queue: bq.BatchQueue[Cpm | SlowSql] = manager.create("rows", bq.QueueConfig(linger=0.05))
        queue.add_handler(Cpm, cpm)
        queue.add_handler(SlowSql, slow)
        async with asyncio.TaskGroup() as tasks:
            for service in SERVICES:
                tasks.create_task(produce(queue, service, count))
        await queue.shutdown()
    for exporter in (cpm, slow):
        stats = exporter.stats()
        print(f"{exporter.name}: accepted {stats.accepted}, delivered {stats.delivered}")
    return status(cpm, slow)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsn", default="env:DATABASE_URL", help="the database (%(default)s)")
    parser.add_argument("--count", type=int, default=2_000, help="metrics of each service (%(default)s)")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds to wait for PostgreSQL (%(default)s)")
    arguments = parser.parse_args()
    logging.getLogger("batchqueue_async").setLevel(logging.ERROR)  # what is given up is printed here
    code = bq.run(partial(run, arguments.dsn, arguments.count, arguments.wait))
    sys.exit("interrupted" if code is None else code)


if __name__ == "__main__":
    main()
