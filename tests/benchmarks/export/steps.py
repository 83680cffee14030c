"""The longest step of the event loop: between two of its turns, in seconds of this thread's CPU."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import batchqueue_async as bq
from batchqueue_async.export.delivery.failover import Failover
from batchqueue_async.export.delivery.leased_batch import LeasedBatch
from batchqueue_async.export.send_queue.memory import MemoryQueue
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.testing import run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence
    from typing import Any

DELAYED, SETTLED, FAILED_OVER = 40_000, 10_000, 100_000


class Longest:
    """What was measured; other processes on the machine have no part in it.

    Attributes:
        seconds: the longest step.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watch(self) -> Generator[None]:
        """Measure each callback of the loop of this thread."""
        usual, watching = asyncio.Handle._run, True

        def run(handle: asyncio.Handle) -> None:
            start = time.thread_time()
            usual(handle)
            if watching:
                self.seconds = max(self.seconds, time.thread_time() - start)

        # What was allocated before the measurement is not collected in it.
        gc.collect()
        gc.freeze()
        asyncio.Handle._run = run  # type: ignore[method-assign]
        try:
            yield
        finally:
            watching = False  # for the step that ends the scenario, and clears up after it
            asyncio.Handle._run = usual  # type: ignore[method-assign]
            gc.unfreeze()


def longest(scenario: Callable[[Longest], Coroutine[Any, Any, None]], rounds: int = 3) -> float:
    """Seconds of the longest step in a scenario, in virtual time, where no step is for waiting.

    The best of several rounds: what a busy machine does to the caches is no part of the step.
    """
    measured: list[float] = []
    for _ in range(rounds):
        found = Longest()
        run_virtual(scenario(found))
        measured.append(found.seconds)
    return min(measured)


async def delayed(found: Longest) -> None:
    """40,000 batches that failed, each by itself: new records make room, then all are due and are sent."""
    queue = MemoryQueue(max_records=DELAYED, max_bytes=None)
    await queue.put([b"x"] * DELAYED)
    for number in range(DELAYED):
        lease = await queue.lease(1, 1_000, 0)
        assert lease is not None
        await lease.nack(100.0 + number % 7)
        if number % 100 == 0:
            await asyncio.sleep(0)
    with found.watch():
        for _ in range(20):
            await asyncio.sleep(0)
            await queue.put([b"y"] * 500)
        await asyncio.sleep(200.0)
        while (lease := await queue.lease(500, 1 << 20, 0)) is not None:
            await asyncio.sleep(0)
            await lease.ack()
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # what comes after is a step of its own
    assert queue.records == 0


class _Partial:
    """Takes every second record the first time, and all after that."""

    concurrent = True

    def __init__(self) -> None:
        # Made before: what a sink takes to find its words is a step of the sink's.
        busy = {place: bq.RetryableError("busy") for place in range(0, SETTLED, 2)}
        self.answers: list[SendResult] = [SendResult(rejected=busy)]

    async def open(self) -> None:
        """Nothing to open."""

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Refuse a half, once."""
        return self.answers.pop() if self.answers else None

    async def close(self) -> None:
        """Nothing to close."""


async def settling(found: Longest) -> None:
    """One batch of 10,000 records, of which every second one is refused at first."""
    batch = bq.BatchPolicy(max_records=SETTLED, max_bytes=1 << 30, linger=0)
    config = bq.ExportConfig(batch=batch, retry=bq.RetryPolicy(initial=0.01, max_delay=0.05))
    async with bq.Exporter(_Partial(), config) as exporter:
        records = [b"%d" % number for number in range(SETTLED)]
        with found.watch():
            await exporter.consume(records)
            await exporter.flush()
            await asyncio.sleep(0)
        assert exporter.stats().delivered == SETTLED


async def failed_over(found: Longest) -> None:
    """100,000 batches in the failover queue, and 1,000 more: the oldest make room, and are taken out."""
    failover = Failover(bq.FailoverPolicy(max_entries=FAILED_OVER))
    queue = MemoryQueue(max_records=None, max_bytes=None)
    more = 1_000
    await queue.put([b"x"] * (FAILED_OVER + more))

    async def add() -> None:
        lease = await queue.lease(1, 1_000, 0)
        assert lease is not None
        batch = LeasedBatch([lease])
        failover.add(batch, [0])
        await batch.ack()

    for number in range(FAILED_OVER):
        await add()
        if number % 100 == 0:
            await asyncio.sleep(0)
    with found.watch():
        for _ in range(more):
            await asyncio.sleep(0)
            await add()
            entry = failover.take()
            assert entry is not None
            await entry.ack()
            failover.put_back()
        await asyncio.sleep(0)
    assert failover.records == FAILED_OVER - 1


class Limited:
    """A server that is well and takes 100 requests a second, saving up for one second."""

    concurrent = True
    RATE = 100.0

    def __init__(self) -> None:
        self.tokens = self.RATE
        self.then = 0.0
        self.taken = self.refused = 0

    async def open(self) -> None:
        """Nothing to open."""

    async def send(self, batch: Sequence[Any]) -> None:
        """Take a request, or refuse it."""
        await asyncio.sleep(0.01)
        now = asyncio.get_running_loop().time()
        self.tokens, self.then = min(self.RATE, self.tokens + (now - self.then) * self.RATE), now
        if self.tokens < 1:
            self.refused += 1
            raise bq.ThrottledError("429")
        self.tokens -= 1
        self.taken += 1

    async def close(self) -> None:
        """Nothing to close."""


def throttled(seconds: float = 120.0) -> tuple[float, float]:
    """Of 100 requests a second those that are used by 8 workers, and the share of sends that is refused.

    In virtual time, after the minute in which the rate is learned.
    """

    async def run() -> tuple[float, float]:
        sink = Limited()
        batch = bq.BatchPolicy(max_records=1, linger=0)
        config = bq.ExportConfig(workers=bq.WorkerPolicy.fixed(8), batch=batch, drain_timeout=0)
        async with bq.Exporter(sink, config) as exporter:
            await exporter.consume([b"x"] * int((seconds + 120) * sink.RATE))
            await asyncio.sleep(60.0)
            taken, refused = sink.taken, sink.refused
            await asyncio.sleep(seconds)
            taken, refused = sink.taken - taken, sink.refused - refused
        return taken / seconds, refused / (taken + refused)

    return run_virtual(run())
