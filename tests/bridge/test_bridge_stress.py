"""Threads that produce, give up, and are cut off at random: nothing is lost, nothing comes twice, and all adds up."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import sys
import threading
import time
from collections import Counter, defaultdict

import pytest
from bridge_tools import PATIENCE, Caller, assert_adds_up

import batchqueue_async as bq

THREADS = 8


@pytest.fixture(params=[None, 1e-6], ids=["usual switches", "frantic switches"])
def switching(request):
    before = sys.getswitchinterval()
    if request.param is not None:
        sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(before)


CASES = {
    "one partition": {"buffer_size": 64, "max_batch": 50},
    "tiny": {"buffer_size": 1, "max_batch": 1},
    "in turns": {"buffer_size": 16, "partitions": bq.PartitionPolicy.fixed(3), "workers": bq.WorkerPolicy.fixed(2)},
    "by key": {
        "buffer_size": 16,
        "partitions": bq.PartitionPolicy.fixed(4),
        "selector": bq.by_key(lambda item: item[0]),
    },
    "if possible": {"buffer_size": 32, "strategy": bq.BufferStrategy.IF_POSSIBLE},
    "drop newest": {"buffer_size": 32, "strategy": bq.BufferStrategy.DROP_NEWEST},
    "drop oldest": {"buffer_size": 32, "strategy": bq.BufferStrategy.DROP_OLDEST},
    "block timeout": {"buffer_size": 4, "block_timeout": 0.0005},
}


@pytest.mark.parametrize("case", CASES)
def test_random_threads_against_a_random_close(case, switching):
    chance = random.Random(case)
    per_thread = 150 if case == "tiny" else 1_500
    for round_number in range(3):
        seen = []

        async def handle(batch, seen=seen):
            if len(batch) % 3 == 0:
                await asyncio.sleep(0)
            seen.extend(batch)  # a call that is cut off has handled nothing

        bridge = bq.SyncBridge()
        queue = bridge.get_or_create("stress", bq.QueueConfig(consumer=handle, **CASES[case]))
        go = threading.Barrier(THREADS + 1, timeout=PATIENCE)
        seeds = [chance.random() for _ in range(THREADS)]
        producers = [Caller(_produce, queue, thread, seeds[thread], per_thread, go) for thread in range(THREADS)]
        go.wait()
        if round_number:
            Caller(_wait_for_some, queue, chance.randrange(per_thread * 2)).outcome()
            report = queue.shutdown(timeout=PATIENCE if round_number == 1 else 0.0)
            assert queue.produce("late") is False
        accepted = [producer.outcome() for producer in producers]
        if not round_number:
            queue.flush(timeout=PATIENCE)
            report = queue.shutdown(timeout=PATIENCE)
        bridge.close()
        stats = queue.stats()
        assert_adds_up(stats)
        assert stats.accepted == sum(map(len, accepted))
        outcomes = Counter(seen)
        outcomes.update(report.undelivered)
        assert not [item for item, count in outcomes.items() if count > 1]
        lost = {item for items in accepted for item in items} - set(outcomes)
        assert len(lost) == stats.dropped_after
        assert set(outcomes) <= {item for items in accepted for item in items}
        if case != "in turns":
            _check_order(seen)


def _produce(queue, thread, seed, count, go):
    chance = random.Random(seed)
    accepted = []
    number = 0
    go.wait()
    while number < count:
        timeout = chance.choice([None, 0, 0.0001, 0.01])
        if chance.random() < 0.2:
            items = [(thread, number + step) for step in range(chance.randrange(1, 40))]
            try:
                taken = queue.produce_many(items, timeout=timeout)
            except bq.PartlyAcceptedError as error:
                taken = error.accepted
            accepted += items[:taken]
            number += len(items)
        else:
            if queue.produce((thread, number), timeout=timeout):
                accepted.append((thread, number))
            number += 1
    return accepted


def _wait_for_some(queue, count):
    while queue._queue.counters.handled < count and not queue.closed:
        try:
            queue.flush(timeout=0.01)
        except TimeoutError:
            continue
        if queue.stats(timeout=PATIENCE).attempted >= count:
            return


def _check_order(seen):
    numbers = defaultdict(list)
    for thread, number in seen:
        numbers[thread].append(number)
    assert all(each == sorted(each) for each in numbers.values())


@pytest.mark.parametrize("call", ["produce", "produce_many", "twins"])
def test_eight_producers_of_many_items_each(call):
    count = 20_000
    seen = defaultdict(list)

    async def handle(batch):
        for thread, number in batch:
            seen[thread].append(number)

    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("many", bq.QueueConfig(consumer=handle, buffer_size=1_000))

        def work(thread):
            if call == "produce":
                assert all(queue.produce((thread, number)) for number in range(count))
            elif call == "produce_many":
                for start in range(0, count, 500):
                    assert queue.produce_many([(thread, start + step) for step in range(500)]) == 500
            else:
                asyncio.run(twins(thread))

        async def twins(thread):
            for start in range(0, count, 10):
                assert await queue.produce_async((thread, start))
                rest = [(thread, start + step) for step in range(1, 10)]
                assert await queue.produce_many_async(rest) == 9

        for caller in [Caller(work, thread) for thread in range(THREADS)]:
            caller.outcome()
        queue.flush(timeout=PATIENCE)
        stats = queue.stats(timeout=PATIENCE)
    assert stats.handled == stats.attempted == THREADS * count
    assert_adds_up(stats)
    assert all(seen[thread] == list(range(count)) for thread in range(THREADS))


class _Item:
    """An item of a thread or a coroutine: the one with this number of its type."""

    def __init__(self, producer, number):
        self.producer = producer
        self.number = number


class _OddHash(type):
    """A metaclass all of whose classes have one hash, and are compared by code."""

    def __hash__(cls):
        return 7

    def __eq__(cls, other):
        return cls is other


class _FailingHash(type):
    """A metaclass whose hash raises now and then."""

    calls = 0

    def __hash__(cls):
        _FailingHash.calls += 1
        if not _FailingHash.calls % 40:
            raise ZeroDivisionError
        return 11


class _Mixed:
    """Producers that draw lists of mixed types, and write down what became of each."""

    def __init__(self, seed):
        chance = self.chance = random.Random(seed)
        self.kinds = [type(f"Plain{number}", (_Item,), {}) for number in range(20)]
        self.kinds += [_OddHash(f"Odd{number}", (_Item,), {}) for number in range(2)]
        self.kinds += [_FailingHash("Failing", (_Item,), {})]
        self.fixed = chance.random() < 0.5
        partitions = bq.PartitionPolicy.fixed(chance.choice([1, 4, 7])) if self.fixed else ADAPTIVE
        self.strategy = chance.choice(list(bq.BufferStrategy))
        self.config = bq.QueueConfig(
            fallback=self.handle,
            partitions=partitions,
            workers=bq.WorkerPolicy.fixed(1 if partitions == bq.PartitionPolicy.fixed(1) else 2),
            strategy=self.strategy,
            buffer_size=chance.choice([1, 2, 8, 50, 1000]),
            max_batch=chance.choice([1, 7, 50, 1000]),
            linger=chance.choice([0, 0, 0.001]),
            block_timeout=chance.choice([None, None, 0.005]),
        )
        self.interrupted = chance.random() < 0.5
        self.seen = []
        self.over = []
        self.calls = []  # the items of each call, and how many came in: None where it was cut off
        self.stop = threading.Event()
        self.ended = set()
        self.lock = threading.Lock()

    async def handle(self, batch):
        if len(batch) % 3 == 0:
            await asyncio.sleep(0)
        self.seen.extend(batch)

    def lists(self, producer, seed, calls):
        chance, numbers = random.Random(seed), Counter()
        kinds = self.kinds if chance.random() < 0.7 else chance.sample(self.kinds, 3)
        for _ in range(calls):
            items = []
            for kind in chance.choices(kinds, k=chance.choice([1, 2, 5, 40, 200])):
                items.append(kind(producer, numbers[id(kind)]))
                numbers[id(kind)] += 1
            yield chance, items

    def work(self, queue, producer, seed):
        with contextlib.suppress(KeyboardInterrupt):
            for chance, items in self.lists(producer, seed, 25):
                timeout = chance.choice([None, None, 0, 0.0005, 0.02])
                call = [items, None]
                self.calls.append(call)
                try:
                    call[1] = queue.produce_many(items) if timeout is None else queue.produce_many(items, timeout)
                except bq.PartlyAcceptedError as error:
                    call[1] = error.accepted
                except (KeyboardInterrupt, ZeroDivisionError):
                    pass
        while producer not in self.ended:  # whom nobody interrupts any more
            with contextlib.suppress(KeyboardInterrupt), self.lock:
                self.ended.add(producer)

    def interrupt(self, threads, seed):
        chance = random.Random(seed)
        # One that an interrupt ended in the midst of saying so is not among those that have ended.
        while len(self.ended) < len(threads) and any(thread.is_alive() for thread in threads):
            with self.lock:
                producer = chance.randrange(len(threads))
                if producer not in self.ended:
                    ident = ctypes.c_ulong(threads[producer].ident)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))
            time.sleep(0.002)

    async def work_at_home(self, queue, producer, seed):
        for chance, items in self.lists(producer, seed, 25):
            call = [items, None]
            self.calls.append(call)
            with contextlib.suppress(ZeroDivisionError, asyncio.CancelledError):
                task = asyncio.ensure_future(queue.produce_many(items))
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
                    task.cancel()
                call[1] = await task
            await asyncio.sleep(0)

    async def watch(self, queue):
        """The bound, as long as nothing moves: what moves may stand above it for a batch."""
        while not self.stop.is_set():
            self.over += [each for each in queue.router.partitions if self.fixed and each.room() < 0]
            await asyncio.sleep(0.0005)

    def check(self, stats, undelivered):
        outcomes = [*self.seen, *undelivered]
        came = set(map(id, outcomes))
        assert len(came) == len(outcomes)
        accepted = {id(item) for items, taken in self.calls for item in items[: taken or 0]}
        unknown = [items for items, taken in self.calls if taken is None]
        maybe = {id(item) for items in unknown for item in items}
        assert came <= accepted | maybe
        if self.strategy is bq.BufferStrategy.DROP_OLDEST:
            assert len(accepted - came) <= stats.dropped_after
        else:
            assert accepted <= came
            assert stats.accepted == len(came)
            for items in unknown:
                here = [id(item) in came for item in items]
                assert here == sorted(here, reverse=True)
        if not unknown:
            assert stats.accepted == len(accepted)
            assert stats.dropped_after == len(accepted - came)
        assert min(stats.refused, stats.dropped_before, stats.dropped_after) >= 0
        assert_adds_up(stats)
        assert not self.over
        last = {}
        for item in self.seen:
            if type(type(item)) is _FailingHash:
                continue  # an accepted item whose class fails stays where it is as the queue grows
            key = item.producer, id(type(item))
            assert last.get(key, -1) < item.number
            last[key] = item.number


ADAPTIVE = bq.PartitionPolicy.adaptive(1)


async def _all_places_are_accounted_for(inbox):
    inbox.collect()
    for share in [] if inbox.evicts else inbox._shares:
        inbox.guarded(share.balance)
        assert not share.waiting()
        assert share._lent == share.free == share.partition.held
        assert share._owed == 0
        assert all(each.stays for each in share.partition.everyone_waiting())  # for threads that have left


@pytest.fixture
def unraisable(monkeypatch):
    """What is raised where nothing can raise, in a weak reference's callback, say: kept by what nothing interrupts."""
    met = []
    monkeypatch.setattr(sys, "unraisablehook", met.append)
    yield met
    monkeypatch.undo()
    assert {each.exc_type for each in met} <= {KeyboardInterrupt}


@pytest.mark.usefixtures("unraisable")
@pytest.mark.parametrize("seed", range(24))
def test_random_threads_with_lists_of_mixed_types(seed, switching):
    """Amid handlers that are added, a queue that grows, coroutines on its loop, interrupts, and a close at times."""
    program = _Mixed(seed)
    chance = program.chance
    bridge = bq.SyncBridge()
    queue = bridge.get_or_create("mixed", program.config)
    threads = [Caller(program.work, queue, producer, chance.random()) for producer in range(THREADS)]
    helpers = [Caller(bridge.call, program.watch, queue._queue)]
    helpers += [
        Caller(bridge.call, program.work_at_home, queue._queue, 100 + number, seed) for number in range(seed % 3)
    ]
    if program.interrupted:
        helpers.append(Caller(program.interrupt, threads, seed))
    for kind in chance.sample(program.kinds[:20], 12):
        queue.add_handler(kind, program.handle, timeout=PATIENCE)
    report = queue.shutdown(timeout=chance.choice([0, 0.05, PATIENCE])) if seed % 4 == 3 else None
    for thread in threads:
        thread.outcome()
    program.stop.set()
    for helper in helpers:
        helper.outcome()
    if report is None:
        queue.flush(timeout=PATIENCE)
        bridge.call(_all_places_are_accounted_for, queue._inbox)
        report = queue.shutdown(timeout=PATIENCE)
    bridge.close()
    program.check(queue.stats(), report.undelivered)
