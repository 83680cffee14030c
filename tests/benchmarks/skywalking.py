"""The shape of SkyWalking's BatchQueueBenchmark: 32 producers, 8 drain tasks, 16 partitions, counting handlers.

There a scheduler takes each producer's thread away after a while; here each gives its turn up by itself, after `TURN`
items. Without that the producers of one loop would fill a partition to the brim before any drain task runs, and then
stand in line for it together, an item for each turn of the loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import batchqueue_async as bq

from .bursts import make_workload
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
TURN = 4_000


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
    types: int, count: int, produce: Callable[[bq.BatchQueue[Any], Sequence[Any], int], Coroutine[Any, Any, None]]
) -> float:
    items = make_workload(CHUNK * 2 * (types // CHUNK + 1), types, CHUNK, "Sky").items
    handled = 0

    async def handle(batch: Sequence[Any]) -> None:
        nonlocal handled
        handled += len(batch)

    config: bq.QueueConfig[Any] = bq.QueueConfig(
        workers=bq.WorkerPolicy.fixed(WORKERS), partitions=bq.PartitionPolicy.fixed(PARTITIONS), buffer_size=BUFFER
    )
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("skywalking", config)
        for kind in dict.fromkeys(map(type, items)):
            queue.add_handler(kind, handle)
        share = count // PRODUCERS // CHUNK * CHUNK or CHUNK
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(PRODUCERS):
                at = number * 61 % len(items)
                group.create_task(produce(queue, items[at:] + items[:at], share))
        await queue.flush()
        elapsed = time.perf_counter() - start
    if handled != share * PRODUCERS:
        raise RuntimeError(f"of {share * PRODUCERS} items {handled} were handled")
    return handled / elapsed


async def _by_item(queue: bq.BatchQueue[Any], items: Sequence[Any], share: int) -> None:
    produce = queue.produce
    left, at = share, 0
    while left:
        turn = items[at : at + min(left, TURN)]
        for item in turn:
            await produce(item)
        left -= len(turn)
        at = (at + len(turn)) % len(items)
        await asyncio.sleep(0)


async def _by_thousands(queue: bq.BatchQueue[Any], items: Sequence[Any], share: int) -> None:
    chunks = [list(items[at : at + CHUNK]) for at in range(0, len(items), CHUNK)]
    for number in range(share // CHUNK):
        await queue.produce_many(chunks[number % len(chunks)])
        if number % (TURN // CHUNK) == 0:
            await asyncio.sleep(0)
