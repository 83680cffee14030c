"""Several queues whose handlers wait for each other, in task orders by chance: every wait ends, and none for nothing.

Where handlers only wait for queues behind their own, nobody can wait in a circle, so no `DeadlockError` is right. Where
they wait for any queue, or share the slots of one scheduler, circles do arise: then each has to be found.
"""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

import batchqueue_async as bq
from batchqueue_async.queue.limiter import CallLimiter
from batchqueue_async.testing import VirtualTimeLoop

pytestmark = pytest.mark.untraced

PATIENCE = 10_000.0


class Left:
    def __init__(self, depth: int) -> None:
        self.depth = depth


class Right(Left):
    pass


class Web:
    """Queues, and handlers that put items into some of them."""

    def __init__(self, rng: random.Random, *, circles: bool, slots: int | None) -> None:
        self.rng, self.circles = rng, circles
        self.deadlocks = 0
        self.handled = 0
        limiter = CallLimiter(slots) if slots is not None else None
        self.queues = [self._make(number, limiter) for number in range(rng.randint(2, 3))]

    def _make(self, number: int, limiter: CallLimiter | None) -> bq.BatchQueue[Left]:
        rng = self.rng
        workers = 1 if limiter is not None else rng.randint(1, 3)
        config: bq.QueueConfig[Left] = bq.QueueConfig(
            workers=bq.WorkerPolicy.fixed(workers),
            partitions=bq.PartitionPolicy.fixed(rng.randint(workers, 4)),
            selector=rng.choice([bq.round_robin(), bq.type_hash()]),
            buffer_size=rng.randint(1, 3),
            max_batch=rng.randint(1, 3),
            linger=rng.choice([0.0, 0.0, 0.05]),
        )
        queue: bq.BatchQueue[Left] = bq.BatchQueue(f"q{number}", config, limiter=limiter)

        async def handle(batch: list[Left]) -> None:
            for item in batch:
                await self.work(number, item)

        if rng.random() < 0.5:
            queue.add_handler(Left, handle)  # one registration for both: its calls wait for each other, too
        else:

            async def handle_right(batch: list[Left]) -> None:
                await handle(batch)

            queue.add_handler(Left, handle)
            queue.add_handler(Right, handle_right)
        return queue

    async def work(self, number: int, item: Left) -> None:
        self.handled += 1
        rng = self.rng
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice([0, 0, 0.01]))
        first = 0 if self.circles else number + 1
        if item.depth <= 0 or first >= len(self.queues):
            return
        other = self.queues[rng.randrange(first, len(self.queues))]
        try:
            await self.put(other, item.depth - 1)
        except bq.DeadlockError:
            self.deadlocks += 1

    async def put(self, queue: bq.BatchQueue[Left], depth: int) -> None:
        rng = self.rng
        items = [rng.choice([Left, Right])(depth) for _ in range(rng.randint(1, 3))]
        way = rng.random()
        if way < 0.5:
            await queue.produce(items[0])
        elif way < 0.7:
            await queue.produce_many(items)
        elif way < 0.85:
            await queue.deliver(items)
        else:
            queue.produce_many_nowait(items)
            await queue.flush()

    async def run(self) -> None:
        async def source() -> None:
            for _ in range(self.rng.randint(5, 15)):
                await self.put(self.rng.choice(self.queues), 3)

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(source() for _ in range(4)))
            for queue in self.queues * 4:  # what a later queue's handlers put into an earlier one is flushed, too
                await queue.flush()
        reports = [await queue.shutdown() for queue in self.queues]
        assert all(report.complete for report in reports), reports
        assert sum(report.accepted for report in reports) == self.handled


def run_web(seed: int, *, circles: bool, slots: int | None) -> Web:
    rng = random.Random(seed)

    async def main() -> Web:
        web = Web(rng, circles=circles, slots=slots)
        await web.run()
        return web

    def factory() -> VirtualTimeLoop:
        return VirtualTimeLoop(seed=seed, stall_timeout=0.05, time_limit=10 * PATIENCE)

    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main())
    except BaseException as error:
        error.add_note(f"run_web({seed}, circles={circles}, slots={slots}) replays it")
        raise


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="batchqueue_async")


def test_no_deadlock_is_reported_where_nobody_can_wait_in_a_circle() -> None:
    for seed in range(100):
        assert run_web(seed, circles=False, slots=None).deadlocks == 0, seed


@pytest.mark.parametrize("slots", [None, 1, 2])
def test_every_circle_of_waits_is_opened(slots: int | None) -> None:
    found = sum(run_web(seed, circles=True, slots=slots).deadlocks for seed in range(100))
    assert found > 0, "no circle arose: the programs prove nothing"
