"""The rows where little happens: sparse traffic, idle queues, and what an idle queue weighs."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import batchqueue_async as bq

from .loops import LOOP_FACTORIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .model import Samples, Sizes

SPARSE = "batchqueue produce_nowait to handler"
SPARSE_REFERENCE = "asyncio.Queue put_nowait to get"
IDLE = "batchqueue, defaults"
IDLE_REFERENCE = "no queue at all"
IDLE_ON_IDLE = "batchqueue, handlers with on_idle (they poll)"
MEMORY = "batchqueue, 16 partitions, one worker"
MEMORY_FOUR = "batchqueue, 16 partitions, four workers"
MEMORY_REFERENCE = "16 x asyncio.Queue"
PARTITIONS = 16


def measure_sparse(sizes: Sizes, loop: str, _run: int, subjects_only: bool) -> Samples:
    """Seconds from produce to handler, an item at a time; asyncio.Queue takes its turn between two of them."""
    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop]) as runner:
        return runner.run(_sparse(sizes, with_reference=not subjects_only))


async def _sparse(sizes: Sizes, *, with_reference: bool) -> Samples:
    ours: list[float] = []
    reference: list[float] = []
    queue: asyncio.Queue[float] = asyncio.Queue()

    async def handle(batch: Sequence[float]) -> None:
        now = time.perf_counter()
        ours.extend(now - produced for produced in batch)

    async def consume() -> None:
        while True:
            produced = await queue.get()
            reference.append(time.perf_counter() - produced)

    consumer = asyncio.create_task(consume())
    gc.collect()
    async with bq.BatchQueueManager() as manager:
        subject = manager.create("sparse", bq.QueueConfig(consumer=handle))
        await asyncio.sleep(sizes.sparse_interval * 5)
        for _ in range(sizes.sparse_items):
            await asyncio.sleep(sizes.sparse_interval / 2)
            if with_reference:
                queue.put_nowait(time.perf_counter())
            await asyncio.sleep(sizes.sparse_interval / 2)
            subject.produce_nowait(time.perf_counter())
        await subject.flush(timeout=10.0)
    consumer.cancel()
    await asyncio.wait([consumer])
    if len(ours) != sizes.sparse_items:
        raise RuntimeError(f"of {sizes.sparse_items} items {len(ours)} reached the handler")
    return {SPARSE: ours} | ({SPARSE_REFERENCE: reference} if with_reference else {})


def measure_idle(sizes: Sizes, loop: str, _run: int, subjects_only: bool) -> Samples:
    """The share of one core that the process uses while nothing happens."""

    def share(queues: int, consumer: object) -> list[float]:
        with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop]) as runner:
            return [runner.run(_idle(sizes, queues, consumer))]

    samples = {IDLE: share(sizes.idle_queues, _ignore)}
    if not subjects_only:
        samples[IDLE_REFERENCE] = share(0, _ignore)
        samples[IDLE_ON_IDLE] = share(sizes.idle_queues, _WithOnIdle())
    return samples


async def _idle(sizes: Sizes, queues: int, consumer: Any) -> float:
    async with bq.BatchQueueManager() as manager:
        for number in range(queues):
            queue = manager.create(f"idle-{number}", bq.QueueConfig(consumer=consumer))
            queue.produce_nowait(number)  # idle after use, not only from birth
        gc.collect()
        await asyncio.sleep(sizes.idle_settle)
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.sleep(sizes.idle_window)
        return (time.process_time() - cpu) / (time.perf_counter() - wall)


def measure_memory(sizes: Sizes, loop: str, _run: int, subjects_only: bool) -> Samples:
    """Bytes that Python allocates for one more idle queue (what the C part of a loop allocates is not seen)."""
    samples: Samples = {}
    for case in (MEMORY,) if subjects_only else (MEMORY_REFERENCE, MEMORY, MEMORY_FOUR):
        with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop]) as runner:
            samples[case] = [runner.run(_memory(sizes, case))]
    return samples


async def _memory(sizes: Sizes, case: str) -> float:
    kept: list[object] = []
    async with bq.BatchQueueManager() as manager:

        def make(name: str) -> object:
            if case == MEMORY_REFERENCE:
                return [asyncio.Queue[Any](10_000) for _ in range(PARTITIONS)]
            workers = bq.WorkerPolicy.fixed(1 if case == MEMORY else 4)
            partitions = bq.PartitionPolicy.fixed(PARTITIONS)
            return manager.create(name, bq.QueueConfig(consumer=_ignore, workers=workers, partitions=partitions))

        tracemalloc.start()
        try:
            kept.append(make("warm-up"))
            before = await _allocated(sizes)
            kept.extend(make(f"memory-{number}") for number in range(sizes.memory_queues))
            return (await _allocated(sizes) - before) / sizes.memory_queues
        finally:
            tracemalloc.stop()


async def _allocated(sizes: Sizes) -> int:
    await asyncio.sleep(sizes.idle_settle / 2)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def _ignore(batch: Sequence[Any]) -> None:
    """Does nothing."""


class _WithOnIdle:
    async def consume(self, batch: Sequence[Any]) -> None:
        """Does nothing."""

    async def on_idle(self) -> None:
        """Does nothing, but wants to be called."""
