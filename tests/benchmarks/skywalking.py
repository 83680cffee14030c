"""The shape of SkyWalking's BatchQueueBenchmark: 32 producers, 8 drain tasks, 16 partitions, counting handlers.

As there, a producer goes through the types in turn, each from a type of its own on, and a drain task takes whatever a
partition has. There a scheduler takes each producer's thread away after a while; here each gives its turn up by itself,
after `TURN` items. Without that the producers of one loop would fill a partition to the brim before any drain task
runs, and then stand in line for it together, an item for each turn of the loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import batchqueue_async as bq

from .loops import LOOP_FACTORIES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from .model import Samples, Sizes

PRODUCERS = 32
WORKERS = 8
PARTITIONS = 16
BUFFER = 50_000
TYPES = (500, 1_000, 2_000)
CHUNK = 1_000
TURN = 8_000


def case_name(types: int, way: str) -> str:
    """How the case is called in the table."""
    return f"batchqueue {types:,} types, {way}"


def measure_skywalking(sizes: Sizes, loop: str, _run: int, _subjects_only: bool) -> Samples:
    """Items a second of each case, one time each."""
    samples: Samples = {}
    for types in TYPES:
        for way, produce in (("by item", _by_item), ("by thousands", _by_thousands)):
            factory: Callable[[], asyncio.AbstractEventLoop] = LOOP_FACTORIES[loop]
            with asyncio.Runner(loop_factory=factory) as runner:
                samples[case_name(types, way)] = [runner.run(_measure(types, sizes.skywalking_items, produce))]
    return samples


async def _measure(
    types: int, count: int, produce: Callable[[bq.BatchQueue[Any], list[Any], int], Coroutine[Any, Any, None]]
) -> float:
    kinds = [type(f"Sky{number}", (), {"__slots__": ("value",)}) for number in range(types)]
    each = [kind() for kind in kinds]
    turns = max(1, count // PRODUCERS // TURN)
    handled = 0

    async def handle(batch: Sequence[Any]) -> None:
        nonlocal handled
        handled += len(batch)

    config: bq.QueueConfig[Any] = bq.QueueConfig(
        workers=bq.WorkerPolicy.fixed(WORKERS),
        partitions=bq.PartitionPolicy.fixed(PARTITIONS),
        buffer_size=BUFFER,
        max_batch=BUFFER,
    )
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("skywalking", config)
        for kind in kinds:
            queue.add_handler(kind, handle)
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(PRODUCERS):
                items = (each[number:] + each[:number]) * (TURN // types)
                group.create_task(produce(queue, items, turns))
        await queue.flush()
        elapsed = time.perf_counter() - start
    if handled != turns * TURN * PRODUCERS:
        raise RuntimeError(f"of {turns * TURN * PRODUCERS} items {handled} were handled")
    return handled / elapsed


async def _by_item(queue: bq.BatchQueue[Any], items: list[Any], turns: int) -> None:
    produce = queue.produce
    for _ in range(turns):
        for item in items:
            await produce(item)
        await asyncio.sleep(0)


async def _by_thousands(queue: bq.BatchQueue[Any], items: list[Any], turns: int) -> None:
    chunks = [items[at : at + CHUNK] for at in range(0, len(items), CHUNK)]
    for _ in range(turns):
        for chunk in chunks:
            await queue.produce_many(chunk)
        await asyncio.sleep(0)
