"""Let several quiet queues share one event loop in one thread, and a bound on their calls.

A program talks to two peers, a database and a message broker. Each has a queue of its own, so that a slow one holds up
nobody else. None of them is busy enough for a loop of its own: all four name the scheduler IO_POOL, which runs in a
thread beside the main loop and lets at most `--calls` handler calls run at once, over all its queues.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field

import batchqueue_async as bq

DESTINATIONS = ("peer-1", "peer-2", "database", "broker")


@dataclass
class Traffic:
    """How many calls run, and the most that ever ran at once."""

    running: int = 0
    peak: int = 0


@dataclass
class Destination:
    """Stands for a network client: each call takes a moment."""

    traffic: Traffic
    received: list[int] = field(default_factory=list)

    async def consume(self, batch: list[int]) -> None:
        """Send one batch."""
        self.traffic.running += 1
        self.traffic.peak = max(self.traffic.peak, self.traffic.running)
        await asyncio.sleep(0.002)
        self.received += batch
        self.traffic.running -= 1


async def run(calls: int, count: int) -> None:
    """Feed all queues from the main loop, shut everything down, and print who received what."""
    pool = bq.SharedScheduler("IO_POOL", bq.WorkerPolicy.fixed(calls))
    traffic = Traffic()
    destinations = {name: Destination(traffic) for name in DESTINATIONS}
    async with bq.BatchQueueManager() as manager:
        queues: list[bq.BatchQueue[int]] = [
            manager.create(name, bq.QueueConfig(scheduler=pool, consumer=destination, max_batch=50))
            for name, destination in destinations.items()
        ]
        scheduler = manager.scheduler("IO_POOL")
        assert scheduler is not None  # noqa: S101 - the queues above named it
        print(f"{len(queues)} queues on one thread, {scheduler.limit} calls at once")

        # The queues live on IO_POOL's loop; from this one they are reached through their bridges.
        feeding = [queue.bridge().produce_many_async(range(count)) for queue in queues]
        accepted = await asyncio.gather(*feeding)
        reports = await manager.shutdown_all()

    for name, taken in zip(DESTINATIONS, accepted, strict=True):
        in_order = destinations[name].received == list(range(count))
        print(f"{name}: accepted {taken}, handled {reports[name].handled}, in order: {in_order}")
    print(f"calls that ran at once: at most {traffic.peak}")
    print(f"the thread has ended: {not scheduler.running}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2, help="handler calls at once (2)")
    parser.add_argument("--count", type=int, default=1_000, help="items for each queue (1000)")
    options = parser.parse_args()
    asyncio.run(run(options.calls, options.count))


if __name__ == "__main__":
    main()
