"""Shared schedulers: event loops in threads of their own, in real time."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
import uvloop
from queue_tools import check_report

import batchqueue_async as bq
from batchqueue_async.runtime import scheduler as scheduler_module
from batchqueue_async.testing import RecordingHandler

pytestmark = pytest.mark.real_time

TWO = bq.WorkerPolicy.fixed(2)


def shared(policy=TWO, name="IO_POOL", **options):
    return bq.QueueConfig(scheduler=bq.SharedScheduler(name, policy), **options)


async def on(queue, function):
    """Run a function on the loop of a queue."""

    async def call():
        return function()

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), queue.loop))


async def on_async(queue, coroutine):
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, queue.loop))


async def test_a_scheduler_is_made_at_first_reference_and_ended_only_by_shutdown_all(logs):
    async with bq.BatchQueueManager() as manager:
        assert manager.scheduler("IO_POOL") is None
        first = manager.create("a", shared(consumer=RecordingHandler()))
        second = manager.create("b", shared(consumer=RecordingHandler()))
        scheduler = manager.scheduler("IO_POOL")
        assert (scheduler.name, scheduler.policy, scheduler.limit, scheduler.running) == ("IO_POOL", TWO, 2, True)
        assert first.loop is second.loop is scheduler.loop
        assert scheduler.loop is not asyncio.get_running_loop()
        assert isinstance(scheduler.loop, uvloop.Loop)
        assert repr(scheduler) == "<Scheduler 'IO_POOL' running, 2 calls at once>"
        await manager.shutdown("a")
        await manager.shutdown("b")
        assert scheduler.running
        assert manager.create("c", shared(consumer=RecordingHandler())).loop is scheduler.loop
    assert not scheduler.running
    assert manager.scheduler("IO_POOL") is None
    assert repr(scheduler) == "<Scheduler 'IO_POOL' stopped, 2 calls at once>"
    with pytest.raises(bq.QueueClosedError, match="scheduler 'IO_POOL' was stopped; make a new manager"):
        scheduler.check()
    assert scheduler.stop()  # again: nothing to do
    events = [event for event in logs if event["event"] == "scheduler_created"]
    assert [(event["scheduler"], event["policy"], event["calls"]) for event in events] == [("IO_POOL", "fixed(2)", 2)]


async def test_the_first_policy_wins_with_a_warning(logs):
    async with bq.BatchQueueManager() as manager:
        manager.create("a", shared(TWO))
        manager.create("b", shared(TWO))
        assert not [event for event in logs if event["log_level"] == "warning"]
        manager.create("c", shared(bq.WorkerPolicy.fixed(7)))
        assert manager.scheduler("IO_POOL").limit == 2
        manager.create("d", shared(bq.WorkerPolicy.fixed(7), name="OTHER"))
        assert manager.scheduler("OTHER").limit == 7
    (event,) = [event for event in logs if event["log_level"] == "warning"]
    fields = {name: event[name] for name in ("event", "queue", "scheduler", "policy", "first")}
    assert fields == {
        "event": "scheduler_policy_ignored",
        "queue": "c",
        "scheduler": "IO_POOL",
        "policy": "fixed(7)",
        "first": "fixed(2)",
    }


class Gauge:
    """Handlers that count how many run at once, and go on when the test says so."""

    def __init__(self) -> None:
        self.active = self.most = 0
        self.entered = threading.Semaphore(0)
        self.go_on: asyncio.Semaphore | None = None

    async def consume(self, batch) -> None:
        if self.go_on is None:
            self.go_on = asyncio.Semaphore(0)
        self.active += 1
        self.most = max(self.most, self.active)
        self.entered.release()
        await self.go_on.acquire()
        self.active -= 1


async def test_the_policy_bounds_the_calls_of_all_queues_together():
    gauge = Gauge()
    async with bq.BatchQueueManager() as manager:
        queues = [manager.create(f"q{number}", shared(consumer=gauge)) for number in range(5)]
        for queue in queues:
            assert queue.worker_count == 1
            assert await on(queue, lambda queue=queue: queue.produce_nowait(1))
        for _ in range(2):
            assert await asyncio.to_thread(gauge.entered.acquire, timeout=30)
        assert await on(queues[0], lambda: gauge.active) == 2
        assert sum([await on(queue, lambda queue=queue: queue.stats().in_flight) for queue in queues]) == 5
        await on(queues[0], lambda: [gauge.go_on.release() for _ in queues])
        for queue in queues:
            await on_async(queue, queue.flush(timeout=30))
        assert gauge.most == 2


async def test_shutdown_all_drains_the_queues_of_schedulers_and_of_this_loop():
    here, there = RecordingHandler(), RecordingHandler()
    manager = bq.BatchQueueManager()
    local = manager.create("local", bq.QueueConfig(consumer=here))
    remote = manager.create("remote", shared(consumer=there))
    assert await local.produce(1)
    assert await on(remote, lambda: remote.produce_many_nowait(range(100))) == 100
    reports = await manager.shutdown_all(timeout=30)
    assert (reports["local"].handled, reports["remote"].handled) == (1, 100)
    assert there.handled == list(range(100))
    assert remote.stats().handled == 100


async def test_one_queue_of_a_scheduler_is_shut_down_from_another_loop():
    handler = RecordingHandler()
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("a", shared(consumer=handler))
        await on(queue, lambda: queue.produce_nowait(1))
        report = await manager.shutdown("a", timeout=30)
        assert (report.handled, handler.handled) == (1, [1])


async def test_a_call_from_the_creators_loop_raises():
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("a", shared())
        for call in (lambda: queue.produce_nowait(1), queue.stats, lambda: queue.add_handler(int, RecordingHandler())):
            with pytest.raises(bq.WrongLoopError, match="queue 'a'"):
                call()


async def test_shutdown_all_on_a_schedulers_own_loop_raises():
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("a", shared())
        with pytest.raises(bq.DeadlockError, match=r"scheduler 'IO_POOL': shutdown_all was called on its own loop"):
            await on_async(queue, manager.shutdown_all())
        with pytest.raises(bq.WrongLoopError, match=r"scheduler 'IO_POOL': stop was called on its own thread"):
            await on(queue, manager.scheduler("IO_POOL").stop)
        assert not queue.closed


async def test_a_scheduler_runs_coroutines_for_others():
    async with bq.BatchQueueManager() as manager:
        manager.create("a", shared())
        scheduler = manager.scheduler("IO_POOL")

        async def where(text: str) -> tuple[str, bool]:
            return text, scheduler.is_current

        assert await scheduler.run(where, "there") == ("there", True)
        assert await asyncio.to_thread(scheduler.submit(where, "there").result, 30) == ("there", True)
        assert not scheduler.is_current


async def test_a_stalled_loop_does_not_hold_up_the_end(logs):
    """A handler that blocks its loop's thread: after the deadline the queue is reported without its loop."""
    stalled, go_on = threading.Event(), threading.Event()

    async def block(batch: list[int]) -> None:
        stalled.set()
        assert go_on.wait(60)

    manager = bq.BatchQueueManager()
    queue = manager.create("a", shared(consumer=block, max_batch=2))
    scheduler = manager.scheduler("IO_POOL")
    queue.loop.call_soon_threadsafe(queue.produce_many_nowait, range(5))
    assert await asyncio.to_thread(stalled.wait, 60)
    reports = await manager.shutdown_all(timeout=0.02)
    assert reports["a"].undelivered == [0, 1, 2, 3, 4]
    check_report(reports["a"])
    event = next(event for event in logs if event["event"] == "loop_stalled")
    assert (event["queue"], event["log_level"]) == ("a", "error")
    go_on.set()
    assert await asyncio.to_thread(scheduler.stop, 60)


async def test_a_stuck_scheduler_is_said_to_be(logs):
    scheduler = bq.Scheduler("IO_POOL", TWO)
    go_on, stuck = threading.Event(), threading.Event()

    async def block() -> None:
        stuck.set()
        go_on.wait(60)

    future = scheduler.submit(block)
    assert await asyncio.to_thread(stuck.wait, 60)
    assert not scheduler.stop(timeout=0.01)
    assert [(event["event"], event["scheduler"]) for event in logs] == [("scheduler_stuck", "IO_POOL")]
    go_on.set()
    await asyncio.wrap_future(future)
    assert await asyncio.to_thread(scheduler.stop, 60)


async def test_a_scheduler_in_a_forked_child_says_so(monkeypatch):
    scheduler = bq.Scheduler("IO_POOL", TWO)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(bq.ForkedError, match=r"scheduler 'IO_POOL' was made before this process was forked"):
            scheduler.check()
    assert await asyncio.to_thread(scheduler.stop, 60)


async def test_names_and_queues_from_any_thread():
    async with bq.BatchQueueManager() as manager:
        made = await asyncio.gather(
            *(asyncio.to_thread(manager.get_or_create, "one", shared()) for _ in range(20)),
            *(asyncio.to_thread(manager.create, f"q{number}", shared()) for number in range(5)),
        )
        assert len(set(map(id, made))) == 6
        assert sorted(manager.names()) == ["one", *(f"q{number}" for number in range(5))]
        with pytest.raises(bq.WrongLoopError, match="queue 'x' is made outside a running event loop"):
            await asyncio.to_thread(manager.create, "x")


def test_without_uvloop_asyncios_own_loop_is_used(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "uvloop", None)
    loop = scheduler_module.new_event_loop()
    try:
        assert isinstance(loop, asyncio.SelectorEventLoop)
    finally:
        loop.close()
