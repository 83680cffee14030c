"""Aggregate metrics in two levels, as a monitoring backend does.

Level 1 takes every measurement, merges those of one metric, service and minute in memory, and sends what it merged to
level 2 when there is nothing else to do (`on_idle`) or when it holds enough. Level 2 merges the rows again, for level 1
may have sent a minute in parts, and stores them.

Both levels have one handler per metric type, and partitions that grow with the handlers. Metrics that the backend
computes itself are many and steady, so each counts as a whole partition. Metrics that agents report come in one burst a
minute, and twenty types can share a partition: their handlers have weight 0.05.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

import batchqueue_async as bq

SERVICES = ("cart", "checkout", "search")
COMPUTED = ("ServiceCpm", "ServiceResponseTime", "EndpointCpm", "EndpointResponseTime")
HELD_AT_MOST = 10_000
"""Level 1 sends when it holds so many rows of one metric, even if it never comes to rest."""


@dataclass(slots=True)
class Metric:
    """One measurement, or the sum of several."""

    service: str
    minute: int
    count: int
    total: int

    @property
    def key(self) -> tuple[str, int]:
        """What is merged into one row."""
        return self.service, self.minute


def metric_type(name: str) -> type[Metric]:
    """A class of its own for each metric: the queue brings items to handlers by their class."""
    return type(name, (Metric,), {"__slots__": (), "__module__": __name__})


@dataclass
class Merging:
    """Rows by service and minute."""

    rows: dict[tuple[str, int], Metric] = field(default_factory=dict)

    def merge(self, metrics: list[Metric]) -> None:
        """Add measurements to their rows."""
        for metric in metrics:
            row = self.rows.setdefault(metric.key, metric)
            if row is not metric:
                row.count += metric.count
                row.total += metric.total

    def take(self) -> list[Metric]:
        """All rows, which are then gone from here."""
        rows, self.rows = list(self.rows.values()), {}
        return rows


@dataclass
class Level1:
    """The level-1 handler of one metric."""

    level2: bq.BatchQueue[Metric]
    merging: Merging = field(default_factory=Merging)
    idle_flushes: int = 0
    flushed: asyncio.Event = field(default_factory=asyncio.Event)

    async def consume(self, batch: list[Metric]) -> None:
        """Merge the measurements; nothing goes on yet."""
        self.flushed.clear()
        self.merging.merge(batch)
        if len(self.merging.rows) >= HELD_AT_MOST:
            await self.flush()

    async def on_idle(self) -> None:
        """Nothing to merge: a good moment to send."""
        if self.merging.rows:
            self.idle_flushes += 1
            await self.flush()

    async def flush(self) -> None:
        """Send all rows to level 2, waiting for room there if need be."""
        await self.level2.produce_many(self.merging.take())
        self.flushed.set()


@dataclass
class Level2:
    """The level-2 handler of one metric; the dictionary stands for a database."""

    name: str
    stored: ClassVar[dict[tuple[str, str, int], Metric]] = {}

    async def consume(self, batch: list[Metric]) -> None:
        """Merge the rows with what is stored."""
        for metric in batch:
            row = self.stored.setdefault((self.name, *metric.key), metric)
            if row is not metric:
                row.count += metric.count
                row.total += metric.total


def measurements(types: list[type[Metric]], minute: int, each: int) -> list[Metric]:
    """What arrives in one minute: `each` measurements of every metric and service."""
    return [kind(service, minute, 1, number) for number in range(each) for kind in types for service in SERVICES]


async def run(meters: int, minutes: int, each: int, workers: int) -> None:
    """Feed the two levels for some minutes, shut them down in order, and print what was stored."""
    computed = [metric_type(name) for name in COMPUTED]
    reported = [metric_type(f"Meter{number}") for number in range(meters)]
    async with bq.BatchQueueManager() as manager:
        level1: bq.BatchQueue[Metric] = manager.create(
            "METRICS_L1",
            bq.QueueConfig(
                workers=bq.WorkerPolicy.fixed(workers),
                partitions=bq.PartitionPolicy.adaptive(),
                buffer_size=20_000,
                strategy=bq.BufferStrategy.IF_POSSIBLE,
                balancer=bq.throughput_weighted(),
            ),
        )
        level2: bq.BatchQueue[Metric] = manager.create(
            "METRICS_L2",
            bq.QueueConfig(
                workers=bq.WorkerPolicy.cpu_cores_with_base(1, 0.25),
                partitions=bq.PartitionPolicy.adaptive(),
                buffer_size=2_000,
            ),
        )
        handlers = []
        for kind in computed + reported:
            handlers.append(Level1(level2))
            level1.add_handler(kind, handlers[-1], weight=1.0 if kind in computed else 0.05)
            level2.add_handler(kind, Level2(kind.__name__))
        print(f"L1: {len(handlers)} metrics in {level1.partition_count} partitions")
        print(f"L2: {len(handlers)} metrics in {level2.partition_count} partitions")

        for minute in range(minutes):
            level1.produce_many_nowait(measurements(computed + reported, minute, each))
            await level1.flush()
        for handler in handlers:
            await handler.flushed.wait()

        # The order of the end: close level 1, send what its handlers still hold, then close level 2.
        report1 = await manager.shutdown("METRICS_L1")
        for handler in handlers:
            await handler.flush()
        report2 = await manager.shutdown("METRICS_L2")

    refused = level1.stats().refused
    print(f"L1 handled {report1.handled} measurements, refused {refused}; L2 handled {report2.handled} rows")
    print(f"every metric was sent when L1 had nothing to do: {all(handler.idle_flushes for handler in handlers)}")
    for name in (COMPUTED[0], (computed + reported)[-1].__name__):
        for service in SERVICES:
            row = Level2.stored[name, service, 0]
            print(f"{name} {service} minute 0: count={row.count} mean={row.total / row.count:.1f}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meters", type=int, default=80, help="how many metrics agents report (80)")
    parser.add_argument("--minutes", type=int, default=3, help="how many minutes to feed (3)")
    parser.add_argument("--each", type=int, default=20, help="measurements per metric, service and minute (20)")
    parser.add_argument("--workers", type=int, default=4, help="level 1's workers (4)")
    options = parser.parse_args()
    asyncio.run(run(options.meters, options.minutes, options.each, options.workers))


if __name__ == "__main__":
    main()
