"""The ways from a thread to a consumer on an event loop that the bench compares, each as one timed run."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import batchqueue_async as bq
from batchqueue_async.runtime.scheduler import new_event_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

BOUND = 10_000
BULK = 1_000
MIXED_THREADS = 32
KINDS: list[type] = [type(f"Kind{number}", (), {"__slots__": ()}) for number in range(100)]


async def _ignore(batch: Sequence[Any]) -> None:
    """The no-op handler."""


def _config() -> bq.QueueConfig[Any]:
    return bq.QueueConfig(consumer=_ignore, buffer_size=BOUND)


def in_loop(count: int) -> float:
    """Seconds per item for a producer on the queue's own loop: what the bridge is measured by."""

    async def main() -> float:
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("in loop", _config())
            produce = queue.produce
            start = time.perf_counter()
            for number in range(count):
                await produce(number)
            await queue.flush()
            return (time.perf_counter() - start) / count

    return _on_loop(main)


def _by_type() -> bq.QueueConfig[Any]:
    return bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(16), buffer_size=BOUND)


def _mixed_batch() -> list[Any]:
    kinds = KINDS * (BULK // len(KINDS))
    random.Random(20_240_229).shuffle(kinds)
    return [kind() for kind in kinds]


def in_loop_bulk(count: int, *, mixed: bool = False) -> float:
    """The same for `produce_many` by 1,000; of one type to a consumer, or of 100 types to a handler each."""

    async def main() -> float:
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("in loop", _by_type() if mixed else _config())
            for kind in KINDS if mixed else ():
                queue.add_handler(kind, _ignore)
            batch = _mixed_batch() if mixed else list(range(BULK))
            start = time.perf_counter()
            for _ in range(count // BULK):
                await queue.produce_many(batch)
            await queue.flush()
            return (time.perf_counter() - start) / count

    return _on_loop(main)


def bridge(count: int, threads: int = 1) -> float:
    """Seconds per item for `SyncQueue.produce`, from so many threads."""

    def work(queue: bq.SyncQueue[Any], share: int) -> None:
        produce = queue.produce
        for number in range(share):
            produce(number)

    return _through_bridge(count, threads, work)


def bridge_bulk(count: int, *, mixed: bool = False) -> float:
    """The same for `SyncQueue.produce_many` by 1,000: of one type from one thread, or of 100 types from 32."""

    def work(queue: bq.SyncQueue[Any], share: int) -> None:
        batch = _mixed_batch() if mixed else list(range(BULK))
        for _ in range(share // BULK):
            queue.produce_many(batch)

    if not mixed:
        return _through_bridge(count, 1, work)
    share = BULK * MIXED_THREADS
    return _through_bridge(max(1, count // share) * share, MIXED_THREADS, work, mixed=True)


def _through_bridge(
    count: int, threads: int, work: Callable[[bq.SyncQueue[Any], int], None], *, mixed: bool = False
) -> float:
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("bridge", _by_type() if mixed else _config())
        for kind in KINDS if mixed else ():
            queue.add_handler(kind, _ignore)
        workers = [threading.Thread(target=work, args=(queue, count // threads)) for _ in range(threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        queue.flush()
        elapsed = time.perf_counter() - start
        handled = queue.stats().handled
    if handled != count // threads * threads:
        raise RuntimeError(f"of {count} items {handled} were handled")
    return elapsed / count


def janus(count: int) -> float:
    """A janus queue: its sync end in a thread, its async end on the loop."""
    import janus as peer

    async def main() -> float:
        queue: Any = peer.Queue(maxsize=BOUND)
        get = queue.async_q.get

        async def drain() -> None:
            for _ in range(count):
                await get()

        elapsed = await _with_thread(drain, queue.sync_q.put, count)
        await queue.aclose()
        return elapsed

    return _on_loop(main)


def culsans(count: int) -> float:
    """A culsans queue, used likewise; its green ends are its fast ones."""
    import culsans as peer

    async def main() -> float:
        queue: Any = peer.Queue(maxsize=BOUND)
        get = queue.async_q.get

        async def drain() -> None:
            for _ in range(count):
                await get()

        elapsed = await _with_thread(drain, queue.sync_q.put, count)
        queue.shutdown()
        return elapsed

    return _on_loop(main)


async def _with_thread(
    drain: Callable[[], Coroutine[Any, Any, None]], put: Callable[[int], object], count: int
) -> float:
    def work() -> None:
        for number in range(count):
            put(number)

    thread = threading.Thread(target=work)
    start = time.perf_counter()
    thread.start()
    await drain()
    elapsed = time.perf_counter() - start
    thread.join()
    return elapsed / count


def latency(count: int) -> list[float]:
    """Seconds from `produce` in an idle thread to the handler, an item at a time."""
    seen: list[float] = []
    handled = threading.Semaphore(0)

    async def handle(batch: Sequence[float]) -> None:
        now = time.perf_counter()
        seen.extend(now - produced for produced in batch)
        handled.release()

    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("latency", bq.QueueConfig(consumer=handle))
        for _ in range(count):
            time.sleep(0.002)
            queue.produce(time.perf_counter())
            handled.acquire()
    return seen


def _on_loop(main: Callable[[], Coroutine[Any, Any, float]]) -> float:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main())
