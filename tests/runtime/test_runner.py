"""`bq.run`: signals end a program by draining it, and whatever comes in between, each queue makes its report."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import pytest
from bridge_tools import PATIENCE, Held, until
from untraced import untraced

import batchqueue_async as bq

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")


@pytest.fixture(params=["uvloop", "asyncio"], autouse=True)
def loops(request, monkeypatch):
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)


@pytest.fixture
def own_handlers():
    """The program's own handlers of both signals."""

    def handle(number, frame):
        raise AssertionError("the runner's handler is not there")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


class Endless:
    """A handler that does not end, and says when it begins."""

    def __init__(self):
        self.began = []

    async def consume(self, batch):
        self.began.append(list(batch))
        await asyncio.Event().wait()


def test_the_programs_own_handlers_are_back_afterwards(own_handlers):
    async def main(manager):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    assert bq.run(main, manager=bq.BatchQueueManager()) is None
    assert signal.getsignal(signal.SIGINT) is own_handlers
    assert signal.getsignal(signal.SIGTERM) is own_handlers


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_drain_and_everything_is_accounted_for(first, second, own_handlers):
    handler, queues = Endless(), []

    async def main(manager):
        queues.append(manager.create("q", bq.QueueConfig(consumer=handler, max_batch=10)))
        assert await queues[0].produce_many(range(100)) == 100
        os.kill(os.getpid(), first)
        try:
            await asyncio.Event().wait()
        finally:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), second)

    assert bq.run(main, manager=bq.BatchQueueManager(), drain_timeout=PATIENCE) is None
    stats = queues[0].stats()
    assert (stats.accepted, stats.undelivered, stats.handled) == (100, 100, 0)
    assert handler.began == [list(range(10))]


@pytest.mark.parametrize("ours", ["default", "ignored", "own"])
def test_a_hangup_ends_a_program_that_says_nothing_else(ours):
    """It is drained; but where the program ignores the signal, as under `nohup`, or handles it, nothing is taken."""
    seen = []
    handler = {"default": signal.SIG_DFL, "ignored": signal.SIG_IGN, "own": lambda number, _: seen.append(number)}[ours]
    held = Held(held=False)

    async def main(manager):
        queue = manager.create("q", bq.QueueConfig(consumer=held, max_batch=10))
        await queue.produce_many(range(100))
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(60 if ours == "default" else 0.05)
        return "not ended"

    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert bq.run(main, manager=bq.BatchQueueManager()) == (None if ours == "default" else "not ended")
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert sorted(held.items) == list(range(100))
    assert seen == ([signal.SIGHUP] if ours == "own" else [])


@pytest.mark.parametrize("times", [1, 3])
def test_c_4_cancelling_all_tasks_in_the_drain_leaves_a_report_of_every_queue(times):
    handler, queues = Endless(), []
    manager = bq.BatchQueueManager()

    async def cancel_everything():
        for _ in range(times):
            await asyncio.sleep(0.02)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    async def main(manager):
        for name in "ab":
            queues.append(manager.create(name, bq.QueueConfig(consumer=handler, max_batch=10)))
            assert await queues[-1].produce_many(range(100)) == 100
        queues.append(asyncio.create_task(cancel_everything()))
        return "done"

    with pytest.raises(asyncio.CancelledError):
        bq.run(main, manager=manager, drain_timeout=PATIENCE)
    for queue in queues[:2]:
        assert queue.ended
        assert queue.stats().undelivered == 100
    assert manager.names() == []


def test_a_main_that_fails_or_returns_is_drained_in_order():
    handler = Held(held=False)
    manager = bq.BatchQueueManager()

    async def main(manager):
        rows = manager.create("rows", bq.QueueConfig(consumer=handler))

        async def parse(batch):
            await asyncio.sleep(0.01)
            await rows.produce_many(batch)

        lines = manager.create("lines", bq.QueueConfig(consumer=parse, feeds=("rows",)))
        await lines.produce_many(range(10))
        raise ValueError("main failed")

    with pytest.raises(ValueError, match="main failed"):
        bq.run(main, manager=manager)
    assert handler.items == list(range(10))


def test_a_signal_handler_may_produce_and_ask_for_queues_at_any_moment():
    """It interrupts the main thread wherever that is: in a bridge's call, in the making of a queue, under a lock."""
    handler = Held(held=False)
    accepted = []

    with bq.SyncBridge() as bridge:
        config = bq.QueueConfig(consumer=handler, buffer_size=100_000)
        queue = bridge.get_or_create("signals", config)

        def handle(number, frame):
            accepted.append(bridge.queue("signals").produce("signal", timeout=0))
            bq.default_manager().names()
            bridge.manager.names()

        with untraced():
            before = signal.signal(signal.SIGUSR1, handle)
            stop = threading.Event()
            main = threading.main_thread().ident

            def send():
                while not stop.wait(0.0005):
                    signal.pthread_kill(main, signal.SIGUSR1)

            sender = threading.Thread(target=send)
            sender.start()
            try:
                plain = 0
                for number in range(30):
                    other = bridge.get_or_create(f"other{number}", bq.QueueConfig(consumer=handler))
                    assert other.produce("plain")
                    plain += 1 + sum(queue.produce("plain") for _ in range(200))
                    bridge.manager.names()
                    other.shutdown(timeout=PATIENCE)
            finally:
                stop.set()
                sender.join()
                signal.signal(signal.SIGUSR1, before)
        queue.flush(timeout=PATIENCE)
        assert all(accepted)
        assert accepted
        until(lambda: len(handler.items) == plain + len(accepted))
