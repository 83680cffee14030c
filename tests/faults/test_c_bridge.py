"""List C of the fault register, as far as threads, loops, forks and the end of the program are concerned."""

from __future__ import annotations

import ctypes
import random
import sys
import threading

import pytest
from bridge_tools import PATIENCE, Caller, Held, assert_adds_up, until

import batchqueue_async as bq


async def ignore(batch):
    pass


# -- C-17: what grows with the square


@pytest.mark.parametrize("call", ["produce", "produce_many", "produce_async", "produce_many_async"])
def test_c_17_a_selector_is_asked_once_for_each_item_however_long_it_waits(call):
    asked = []

    def key(item):
        asked.append(item)
        return item

    config = bq.QueueConfig(
        consumer=ignore, partitions=bq.PartitionPolicy.fixed(4), buffer_size=10, max_batch=5, selector=bq.by_key(key)
    )
    items = list(range(600))
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("keys", config)
        if call == "produce":
            assert all(queue.produce(item) for item in items)
        elif call == "produce_many":
            assert queue.produce_many(items) == len(items)
        else:

            async def main():
                if call == "produce_async":
                    return all([await queue.produce_async(item) for item in items])
                return await queue.produce_many_async(items) == len(items)

            import asyncio

            assert asyncio.run(main())
    assert sorted(asked) == items


def test_c_17_many_items_of_one_type_wait_in_line_together():
    """One wake-up of the thread for the room that a batch made, not one for each item."""
    handler = Held(held=False)
    with bq.SyncBridge() as bridge:
        config = bq.QueueConfig(fallback=handler, partitions=bq.PartitionPolicy.fixed(4), buffer_size=50, max_batch=50)
        queue = bridge.get_or_create("types", config)
        assert queue.produce_many(list(range(5_000))) == 5_000
    assert handler.items == list(range(5_000))
    assert len(handler.batches) < 1_000


# -- C-18: exceptions thrown into threads


class _Hit(BaseException):
    """What one thread throws into another."""


def _throw(thread):
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Hit))


@pytest.fixture
def frantic_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class _Storm:
    """Threads that produce while exceptions are thrown into them."""

    def __init__(self, queue):
        self.queue = queue
        self.stop = False
        self.accepted = 0
        self._lock = threading.Lock()

    def work(self, seed):
        chance = random.Random(seed)
        while not self.stop:
            try:
                while not self.stop:
                    if chance.random() < 0.7:
                        self.count(self.queue.produce(chance.choice([1, "a"]), timeout=chance.choice([None, 0.001, 0])))
                    else:
                        self.count(self.queue.produce_many([1, "a", 2, "b", 3]))
            except _Hit:
                continue

    def count(self, accepted):
        with self._lock:
            self.accepted += accepted

    def run(self, hits, between):
        chance = random.Random(hits)
        threads = [threading.Thread(target=self._until_stopped, args=(seed,), daemon=True) for seed in range(4)]
        for thread in threads:
            thread.start()
        for number in range(hits):
            _throw(chance.choice(threads))
            between(number)
        self.stop = True
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _until_stopped(self, seed):
        while not self.stop:
            try:
                self.work(seed)
            except _Hit:  # between two lines of the loop above
                continue


@pytest.mark.parametrize("strategy", [bq.BufferStrategy.BLOCKING, bq.BufferStrategy.IF_POSSIBLE])
@pytest.mark.parametrize("shape", ["one partition", "several", "growing"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_c_18_an_exception_thrown_into_a_thread_costs_no_place(strategy, shape, frantic_switches):
    partitions = {"one partition": 1, "several": 3, "growing": 3}[shape]
    policy = bq.PartitionPolicy.adaptive(3) if shape == "growing" else bq.PartitionPolicy.fixed(partitions)
    handler = Held(held=False)
    with bq.SyncBridge() as bridge:
        config = bq.QueueConfig(partitions=policy, buffer_size=5, strategy=strategy, max_batch=4, fallback=handler)
        queue = bridge.get_or_create("storm", config)
        storm = _Storm(queue)

        def between(number):
            if shape == "growing" and not number % 40:
                queue.add_handler(type(f"T{number}", (), {}), ignore, weight=0.3)
            if not number % 7:
                queue.flush(timeout=PATIENCE)

        storm.run(400, between)
        queue.flush(timeout=PATIENCE)
        stats = queue.stats(timeout=PATIENCE)
        assert_adds_up(stats)
        assert stats.accepted == stats.handled >= storm.accepted
        assert queue._inbox.waiting() == 0
        handler.hold()
        assert queue.produce(0, timeout=PATIENCE)
        until(lambda: queue.stats(timeout=PATIENCE).in_flight == 1)
        for item in (1, "a"):
            while queue.produce(item, timeout=0):
                pass
        used = [partition.used for partition in queue.stats(timeout=PATIENCE).partitions]
        assert set(used) <= {0, 5}
        assert any(used)
        handler.open()


def test_c_18_a_waiter_that_never_left_the_line_holds_nobody_up():
    """Torn out of its wait, and out of what it does then, a thread leaves its place in line behind: it is skipped."""
    handler = Held()
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1))
        assert queue.produce("first")
        handler.wait_for_call()
        assert queue.produce("second")
        leave = queue._inbox.leave
        queue._inbox.leave = lambda waiter: None  # the thread is torn out of the `finally` too
        try:
            assert not queue.produce("torn", timeout=0.001)
        finally:
            queue._inbox.leave = leave
        waiting = Caller(queue.produce, "third")
        handler.open()
        assert waiting.outcome()
        queue.flush(timeout=PATIENCE)
    assert handler.items == ["first", "second", "third"]
