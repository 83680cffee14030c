"""The rebalancing row: the documents' skew, with the balancer off and on side by side on one loop.

Both queues get the same types, mix and producers. Their handlers only sleep, in proportion to their batch, so that
neither takes anything from the other, and whatever else the machine does hits both. How uneven the static placement
is depends on where the types' hashes fall; so each run names its types anew, and "ideal" tells what a perfect balance
would gain over this run's static placement.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import batchqueue_async as bq

from .loops import LOOP_FACTORIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .model import Samples, Sizes

STATIC = "static: items per second"
BALANCED = "throughput_weighted: items per second"
STATIC_LOAD = "static: max/min worker load"
BALANCED_LOAD = "throughput_weighted: max/min worker load"
IDEAL = "ideal: items per second, were the load even"

WORKERS = 4
PRODUCERS = 16
BUFFER = 100
SKEW = (24,) * 20 + (8,) * 30 + (4,) * 20 + (1,) * 30


def measure_rebalance(sizes: Sizes, loop: str, run: int, subjects_only: bool) -> Samples:
    """Throughput and the workers' load over one window, after the balancer has had time to act."""
    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop]) as runner:
        return runner.run(_rebalance(sizes, run, with_static=not subjects_only))


class _Load:
    """What each worker has handled inside the window; a batch over its edge counts by the time inside it."""

    def __init__(self, seconds_per_item: float) -> None:
        self._seconds_per_item = seconds_per_item
        self._calls: list[tuple[asyncio.Task[Any] | None, float, float, int]] = []

    def handler(self) -> Callable[[Sequence[Any]], Any]:
        async def handle(batch: Sequence[Any]) -> None:
            # not the loop's time: uvloop's counts in whole milliseconds, and a small batch sleeps for less
            start = time.perf_counter()
            await asyncio.sleep(self._seconds_per_item * len(batch))
            self._calls.append((asyncio.current_task(), start, time.perf_counter(), len(batch)))

        return handle

    def by_worker(self, start: float, end: float) -> list[float]:
        loads: defaultdict[asyncio.Task[Any] | None, float] = defaultdict(float)
        for worker, begun, ended, count in self._calls:
            inside = min(ended, end) - max(begun, start)
            loads[worker] += count * max(inside, 0.0) / (ended - begun)
        if len(loads) != WORKERS:
            raise RuntimeError(f"handlers ran in {len(loads)} tasks: expected the {WORKERS} workers' own")
        return list(loads.values())


async def _rebalance(sizes: Sizes, run: int, *, with_static: bool) -> Samples:
    types = [type(f"Run{run}Metric{number}", (), {"__slots__": ()}) for number in range(len(SKEW))]
    mix = [kind() for kind, weight in zip(types, SKEW, strict=True) for _ in range(weight)]
    balancers = {"balanced": bq.throughput_weighted()} | ({"static": None} if with_static else {})
    loads = {name: _Load(sizes.rebalance_seconds_per_item) for name in balancers}
    gc.collect()
    async with bq.BatchQueueManager() as manager:
        producers: list[asyncio.Task[None]] = []
        for name, balancer in balancers.items():
            config: bq.QueueConfig[Any] = bq.QueueConfig(
                workers=bq.WorkerPolicy.fixed(WORKERS),
                partitions=bq.PartitionPolicy.adaptive(),
                buffer_size=BUFFER,
                balancer=balancer,
                balance_interval=sizes.rebalance_interval,
            )
            queue = manager.create(name, config)
            for kind in types:
                queue.add_handler(kind, loads[name].handler())
            producers += [asyncio.create_task(_produce(queue, mix, seed)) for seed in range(PRODUCERS)]
        await asyncio.sleep(sizes.rebalance_settle)
        start = time.perf_counter()
        await asyncio.sleep(sizes.rebalance_window)
        end = time.perf_counter()
        # what is in flight at the window's end is counted too, once its handler has returned
        await asyncio.sleep(BUFFER * sizes.rebalance_seconds_per_item * 2)
        for producer in producers:
            producer.cancel()
        await asyncio.wait(producers)
    return _samples({name: load.by_worker(start, end) for name, load in loads.items()}, end - start)


async def _produce(queue: bq.BatchQueue[Any], mix: list[Any], seed: int) -> None:
    shuffled = random.Random(seed).sample(mix, len(mix))
    while True:
        for item in shuffled:
            await queue.produce(item)


def _samples(workers: dict[str, list[float]], window: float) -> Samples:
    samples: Samples = {}
    for name, rate, ratio in (("static", STATIC, STATIC_LOAD), ("balanced", BALANCED, BALANCED_LOAD)):
        if name in workers:
            samples[rate] = [sum(workers[name]) / window]
            samples[ratio] = [max(workers[name]) / min(workers[name])]
    if "static" in workers:
        # the static queue is as fast as its busiest worker lets it be; an even load would keep all as busy
        samples[IDEAL] = [max(workers["static"]) * WORKERS / window]
    return samples
