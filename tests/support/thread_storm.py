"""Exceptions thrown into threads that produce, at random moments: `python thread_storm.py block "one partition"`.

A program of its own, since a tracer in the same process would be torn apart as well.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading

from bridge_tools import PATIENCE, Held, assert_adds_up, until

import batchqueue_async as bq

HITS = 400


class HitError(BaseException):
    """What one thread throws into another."""


def throw(thread: threading.Thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(HitError))


async def ignore(batch: list[object]) -> None:
    pass


class Storm:
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
            except HitError:
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
            throw(chance.choice(threads))
            between(number)
        self.stop = True
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _until_stopped(self, seed):
        while not self.stop:
            try:
                self.work(seed)
            except HitError:  # between two lines of the loop above
                continue


def main(overflow: str, shape: str) -> None:
    partitions = {"one partition": 1, "several": 3, "growing": 3}[shape]
    policy = bq.PartitionPolicy.adaptive(3) if shape == "growing" else bq.PartitionPolicy.fixed(partitions)
    handler = Held(held=False)
    with bq.SyncBridge() as bridge:
        config = bq.QueueConfig(partitions=policy, buffer_size=5, overflow=overflow, max_batch=4, fallback=handler)
        queue = bridge.get_or_create("storm", config)
        storm = Storm(queue)

        def between(number: int) -> None:
            if shape == "growing" and not number % 40:
                queue.add_handler(type(f"T{number}", (), {}), ignore, weight=0.3)
            if not number % 7:
                queue.flush(timeout=PATIENCE)

        storm.run(HITS, between)
        # Hit twice, on its way out of a `with` too, a thread leaves its frames, with what they hold, to the collector.
        gc.collect()
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
        assert set(used) <= {0, 5}, used
        assert any(used), used
        handler.open()


if __name__ == "__main__":
    sys.setswitchinterval(1e-5)
    threading.excepthook = lambda _: None  # a thread may be hit after the last line of its loop
    main(sys.argv[1], sys.argv[2])
    sys.stdout.write("every place is there\n")
    sys.stdout.flush()
    os._exit(0)
