"""The pool by itself, fed from memory: what it adds to a message, and the memory that it takes."""

from __future__ import annotations

import asyncio
import tracemalloc

import batchqueue_async as bq
from batchqueue_async import intake
from batchqueue_async.intake.config import IntakeConfig
from batchqueue_async.intake.consumer import Consumer
from batchqueue_async.intake.ports import Delivery, Epoch

from .measuring import Measured, Meter, Row, compare

BODY = b"x" * 100


class MemorySession:
    """A broker that has as many messages as are asked for, and takes every outcome."""

    hand_over = False

    def __init__(self, count: int, keys: int) -> None:
        self.left, self.keys = count, keys
        self.epoch = Epoch("memory")
        self.stopped = asyncio.Event()

    async def take(self, room):
        if not self.left:
            await self.stopped.wait()
            return []
        number = min(room.messages, self.left, 500)
        self.left -= number
        epoch, keys = self.epoch, self.keys
        found = []
        for at in range(number):
            delivery = Delivery.__new__(Delivery)
            delivery._body, delivery._key, delivery._headers = BODY, None, None
            delivery._id, delivery._source, delivery._published_at = "", "", None
            delivery.attempt, delivery.value, delivery.epoch = 1, None, epoch
            delivery.order, delivery.size, delivery.taken = (at % keys if keys else None), 100, 0.0
            found.append(delivery)
        return found

    async def settle(self, outcomes):
        pass

    async def forward(self, delivery, outcome):
        raise NotImplementedError

    async def flush(self):
        pass

    async def stop(self):
        self.stopped.set()

    async def end(self):
        self.epoch.end()
        self.stopped.set()

    def lag(self):
        return self.left


class MemoryLane:
    retries = "kept"
    counts_held = True

    def __init__(self, count: int, keys: int) -> None:
        self.count, self.keys = count, keys

    async def connect(self):
        return MemorySession(self.count, self.keys)


class MemoryConsumer(Consumer):
    lane_orders = True

    def __init__(self, count, handler, *, keys=0, **options):
        self.count, self.keys = count, keys
        super().__init__(handler, IntakeConfig(dead_letters=intake.DROP, **options), name="memory")

    def _lane(self, plan):
        return MemoryLane(self.count, self.keys)


async def consume(count: int, make) -> Measured:
    meter = Meter(count)
    consumer = make(meter)
    meter.begin()
    async with consumer:
        await meter.done.wait()
    return meter.measured()


async def single(count: int, keys: int = 0) -> Measured:
    def make(meter):
        async def handle(message):
            meter.add()

        order = {"ordered_by": intake.KEY} if keys else {}
        return MemoryConsumer(count, handle, keys=keys, workers=32, prefetch=1000, **order)

    return await consume(count, make)


POLICY = bq.BatchPolicy(max_records=100, linger=0.0)


async def batches(count: int) -> Measured:
    def make(meter):
        async def handle(batch):
            meter.add(len(batch))

        return MemoryConsumer(count, handle, workers=4, prefetch=1000, batch=POLICY)

    return await consume(count, make)


async def into_a_queue(count: int) -> Measured:
    meter = Meter(count)

    async def handle(batch):
        meter.add(len(batch))

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("bench", bq.QueueConfig(consumer=handle))
        meter.begin()
        async with MemoryConsumer(count, queue, workers=4, prefetch=1000, batch=POLICY):
            await meter.done.wait()
    return meter.measured()


async def memory() -> float:
    """Megabytes above the bodies of 200 workers and 1,000 messages held."""
    blocked = asyncio.Event()

    async def handle(message):
        await blocked.wait()

    consumer = MemoryConsumer(1000, handle, workers=200, prefetch=1000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    async with consumer:
        while consumer.stats().received < 1000 or consumer.stats().in_flight < 200:
            await asyncio.sleep(0.01)
        used = tracemalloc.get_traced_memory()[0] - before
        blocked.set()
    tracemalloc.stop()
    return used / 1e6


async def rows(turns: int, count: int) -> list[Row]:
    print(f"memory, 200 workers and 1,000 prefetched: {await memory():.2f} MB above the bodies; target <= 0.70")
    return await compare(
        {
            "pool: no-op handler": lambda: single(count),
            "pool: no-op handler, 1,000 keys": lambda: single(count, keys=1000),
            "pool: no-op batch handler, 100": lambda: batches(count),
            "pool: into a BatchQueue by 100": lambda: into_a_queue(count),
        },
        turns,
        {"pool: into a BatchQueue by 100": ("pool: no-op batch handler, 100", 0.8)},
    )
