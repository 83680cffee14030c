"""Threads that produce, give up, and are cut off at random: nothing is lost, nothing comes twice, and all adds up."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
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
