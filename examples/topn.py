"""Keep the slowest statements of each kind: several item types, all on one worker.

Ranking is quick and seldom urgent, so that one drain task serves every kind: a queue with `fixed(1)` worker, a handler
per type, and a partition per handler. The producers are many and fast; a full partition makes them wait (`BLOCKING`),
so that nothing is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
from dataclasses import dataclass, field

import batchqueue_async as bq


@dataclass(frozen=True, slots=True, order=True)
class Slow:
    """Something that took its time."""

    milliseconds: int
    text: str


class SlowSql(Slow):
    """A statement of a relational database."""


class SlowCommand(Slow):
    """A command of a cache."""


class SlowRequest(Slow):
    """A call of another service."""


@dataclass
class TopN:
    """The handler of one kind: remembers the slowest, whatever comes."""

    size: int
    slowest: list[Slow] = field(default_factory=list)

    async def consume(self, batch: list[Slow]) -> None:
        """Rank the batch together with what was the slowest so far."""
        self.slowest = heapq.nlargest(self.size, [*self.slowest, *batch])


async def produce(queue: bq.BatchQueue[Slow], kind: type[Slow], seed: int, count: int) -> int:
    """One producer: how many of its items were accepted."""
    randomly = random.Random(f"{kind.__name__} {seed}")
    accepted = 0
    for number in range(count):
        accepted += await queue.produce(kind(randomly.randrange(1_000_000), f"{kind.__name__} {seed}.{number}"))
    return accepted


async def run(size: int, producers: int, count: int) -> None:
    """Let the producers of all kinds run side by side, and print the ranking of each kind."""
    kinds = (SlowSql, SlowCommand, SlowRequest)
    async with bq.BatchQueueManager() as manager:
        queue: bq.BatchQueue[Slow] = manager.create(
            "TOPN",
            bq.QueueConfig(
                workers=bq.WorkerPolicy.fixed(1),
                partitions=bq.PartitionPolicy.adaptive(),
                buffer_size=1_000,
                min_idle=0.010,
                max_idle=0.100,
            ),
        )
        rankings = {kind: TopN(size) for kind in kinds}
        for kind, ranking in rankings.items():
            queue.add_handler(kind, ranking)
        print(f"{queue.worker_count} worker, {queue.partition_count} partitions")
        feeding = [produce(queue, kind, seed, count) for kind in kinds for seed in range(producers)]
        accepted = sum(await asyncio.gather(*feeding))
        report = await queue.shutdown()
        print(f"accepted {accepted}, handled {report.handled}, left over {len(report.undelivered)}")
    for kind, ranking in rankings.items():
        print(f"{kind.__name__}:")
        for place, slow in enumerate(ranking.slowest, 1):
            print(f"  {place}. {slow.milliseconds} ms  {slow.text}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=3, help="how many of each kind to keep (3)")
    parser.add_argument("--producers", type=int, default=4, help="producers of each kind (4)")
    parser.add_argument("--count", type=int, default=2_500, help="items of each producer (2500)")
    options = parser.parse_args()
    asyncio.run(run(options.size, options.producers, options.count))


if __name__ == "__main__":
    main()
