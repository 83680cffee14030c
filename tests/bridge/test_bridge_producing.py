"""Producing from threads: the exact bound, the order of those who wait, the strategies, several partitions, growth."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import pytest
from bridge_tools import PATIENCE, Caller, Held, assert_adds_up, fill, in_line, until
from queue_tools import kinds_by_home

import batchqueue_async as bq
from batchqueue_async.queue.partition import Partition
from batchqueue_async.queue.waiters import Waiter
from batchqueue_async.runtime.loop_calls import GLANCE

STRATEGIES = bq.BufferStrategy


@pytest.fixture
def bridge():
    with bq.SyncBridge() as bridge:
        yield bridge


# -- the bound


def test_the_bound_is_exact(bridge):
    handler = Held()
    queue = bridge.get_or_create("b", bq.QueueConfig(consumer=handler, buffer_size=3, max_batch=1))
    fill(queue, handler)
    assert [queue.produce(number, timeout=0) for number in range(5)] == [True, True, True, False, False]
    assert queue.stats(timeout=PATIENCE).used == 3
    assert_adds_up(queue.stats())
    assert queue.stats().refused == 2
    handler.open()


def test_many_items_come_in_up_to_the_bound_and_the_rest_as_there_is_room(bridge):
    handler = Held()
    queue = bridge.get_or_create("b", bq.QueueConfig(consumer=handler, buffer_size=3, max_batch=1))
    fill(queue, handler)
    with pytest.raises(bq.PartlyAcceptedError, match="3 of 10 items found room within 0 s") as caught:
        queue.produce_many(range(10), timeout=0)
    assert caught.value.accepted == 3
    producer = Caller(queue.produce_many, range(100, 120))
    until(lambda: in_line(queue) == 1)
    handler.open()
    assert producer.outcome() == 20
    queue.flush(timeout=PATIENCE)
    assert handler.items == ["first", 0, 1, 2, *range(100, 120)]
    assert_adds_up(queue.stats())


def test_those_who_wait_are_served_first_come_first_served(bridge):
    handler = Held()
    queue = bridge.get_or_create("b", bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1))
    fill(queue, handler)
    queue.produce("buffered")
    waiting = []
    for number in range(12):
        waiting.append(Caller(queue.produce, number) if number % 3 else Caller(queue.produce_many, [number]))
        until(lambda: in_line(queue) == len(waiting))
    assert not queue.produce("late", timeout=0)  # nobody passes the line
    handler.open()
    assert all(caller.outcome() for caller in waiting)
    queue.flush(timeout=PATIENCE)
    assert handler.items == ["first", "buffered", *range(12)]


def test_room_releases_one_waiting_thread_for_each_place(bridge):
    handler = Held()
    queue = bridge.get_or_create("b", bq.QueueConfig(consumer=handler, buffer_size=2, max_batch=1))
    fill(queue, handler)
    queue.produce_many("ab")
    waiting = [Caller(queue.produce, number) for number in range(4)]
    until(lambda: in_line(queue) == 4)
    for released in range(1, 5):
        handler.let_one_go()
        handler.wait_for_call()
        until(lambda left=4 - released: in_line(queue) == left)
        assert queue.stats(timeout=PATIENCE).used <= 2
    assert all(caller.outcome() for caller in waiting)
    handler.open()


def test_a_wait_ends_at_its_timeout_at_block_timeout_and_at_close(bridge):
    handler = Held()
    config = bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1, block_timeout=0.01)
    queue = bridge.get_or_create("b", config)
    fill(queue, handler)
    queue.produce("second")
    assert queue.produce("block_timeout") is False
    assert queue.produce_many(["block_timeout", "too"]) == 0
    assert queue.produce_many(["the shorter counts"], timeout=PATIENCE) == 0
    assert queue.produce("timeout", timeout=0.001) is False

    patient = bridge.get_or_create("p", bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1))
    fill(patient, handler)
    patient.produce("second")
    assert patient.produce("timeout", timeout=0.001) is False
    assert in_line(patient) == 0
    waiting = [Caller(patient.produce, "x"), Caller(patient.produce_many, "yz")]
    until(lambda: in_line(patient) == 2)
    closing = Caller(patient.shutdown, 0.01)
    assert waiting[0].outcome() is False
    assert waiting[1].outcome() == 0
    closing.outcome()
    assert_adds_up(patient.stats())
    handler.open()


@pytest.mark.parametrize("granted", [2, 10])
def test_a_producer_that_has_room_when_the_inbox_closes_is_sent_away_and_leaves_none_behind(bridge, granted):
    handler = Held()
    queue = bridge.get_or_create("b", bq.QueueConfig(consumer=handler, buffer_size=4, max_batch=1))
    fill(queue, handler)
    queue.produce_many(range(4))
    inbox = queue._inbox
    waiting = Caller(queue.produce_many, range(10))
    until(lambda: in_line(queue) == 1)

    async def close_between_grant_and_use():
        with inbox.lock:  # the waiting thread can't use what it is granted here before the inbox is closed
            share = inbox._shares[0]
            share.partition.hold(granted)
            share._lend(granted)
            queue._queue.close_gate()

    bridge.call(close_between_grant_and_use, timeout=PATIENCE)
    assert waiting.outcome() == 0
    assert queue.produce("late") is False
    assert queue.produce_many(["late"]) == 0
    handler.open()


def test_a_stalled_loop_does_not_refuse_who_waits(bridge):
    entered, release = threading.Event(), threading.Event()

    async def block():
        entered.set()
        release.wait(PATIENCE)

    handler = Held(held=False)
    queue = bridge.get_or_create("b", bq.QueueConfig(consumer=handler, buffer_size=1))
    stalling = Caller(bridge.call, block)
    assert entered.wait(PATIENCE)
    assert queue.produce("one")
    assert queue.produce("two", timeout=0.001) is False
    waiting = Caller(queue.produce, "three")
    until(lambda: in_line(queue) == 1)
    waiting.join(GLANCE * 1.1)
    assert waiting.is_alive()
    release.set()
    assert waiting.outcome() is True
    stalling.outcome()


# -- the other strategies


def test_if_possible_refuses_and_counts(bridge):
    handler = Held()
    config = bq.QueueConfig(consumer=handler, buffer_size=2, max_batch=1, strategy=STRATEGIES.IF_POSSIBLE)
    queue = bridge.get_or_create("b", config)
    fill(queue, handler)
    assert queue.produce("a")
    assert queue.produce_many("bcd") == 1
    assert queue.produce("e", timeout=PATIENCE) is False  # there is nothing to wait for
    assert queue.produce_many("fg", timeout=0) == 0
    stats = queue.stats(timeout=PATIENCE)
    assert (stats.accepted, stats.refused, stats.dropped) == (3, 5, 0)
    handler.open()
    queue.flush(timeout=PATIENCE)
    assert handler.items == ["first", "a", "b"]
    assert_adds_up(queue.stats())


def test_drop_newest_drops_and_counts(bridge):
    handler = Held()
    config = bq.QueueConfig(consumer=handler, buffer_size=2, max_batch=1, strategy=STRATEGIES.DROP_NEWEST)
    queue = bridge.get_or_create("b", config)
    fill(queue, handler)
    assert [queue.produce(letter) for letter in "abcd"] == [True, True, False, False]
    stats = queue.stats(timeout=PATIENCE)
    assert (stats.accepted, stats.refused, stats.dropped_before) == (3, 0, 2)
    handler.open()
    queue.flush(timeout=PATIENCE)
    assert handler.items == ["first", "a", "b"]


@pytest.mark.parametrize("partitions", [1, 3])
def test_drop_oldest_keeps_the_newest_of_each_partition(bridge, partitions):
    handler = Held()
    kinds = kinds_by_home(partitions)
    queue = bridge.get_or_create(
        "b",
        bq.QueueConfig(
            buffer_size=3,
            strategy=STRATEGIES.DROP_OLDEST,
            partitions=bq.PartitionPolicy.fixed(partitions),
            fallback=handler,
        ),
    )
    fill(queue, handler)
    fixed = bridge.call(_hold_loop_and_produce, queue, kinds)
    assert fixed == [True] * partitions * 10
    stats = queue.stats(timeout=PATIENCE)
    assert_adds_up(stats)
    assert stats.used == 3 * partitions
    handler.open()
    queue.flush(timeout=PATIENCE)
    for kind in kinds:
        assert [item.number for item in handler.items if type(item) is kind] == [7, 8, 9]
    stats = queue.stats(timeout=PATIENCE)
    assert (stats.accepted, stats.dropped_after) == (1 + 10 * partitions, 7 * partitions)
    assert queue.produce_many([kinds[0](number) for number in range(100)]) == 100
    queue.flush(timeout=PATIENCE)
    assert_adds_up(queue.stats())


async def _hold_loop_and_produce(queue, kinds):
    """While the loop does not get to collect, all partitions' items have room in the inbox."""
    caller = Caller(lambda: [queue.produce(kind(number)) for number in range(10) for kind in kinds])
    return caller.outcome()


# -- several partitions


@pytest.mark.parametrize("call", ["produce", "produce_many"])
@pytest.mark.parametrize("selector", ["type_hash", "by_key", "round_robin", "custom"])
def test_every_selector_fills_each_partition_to_its_bound_and_keeps_its_order(bridge, selector, call):
    handler = Held()
    selectors = {
        "type_hash": bq.type_hash(),
        "by_key": bq.by_key(lambda item: getattr(item, "number", 0) % 4),
        "round_robin": bq.round_robin(),
        "custom": lambda item, count: getattr(item, "number", 0) % count,
    }
    config = bq.QueueConfig(
        fallback=handler,
        selector=selectors[selector],
        partitions=bq.PartitionPolicy.fixed(4),
        buffer_size=5,
        max_batch=100,
    )
    queue = bridge.get_or_create("s", config)
    fill(queue, handler)
    kinds = kinds_by_home(4)
    items = [kinds[number % 4](number) for number in range(20)]
    if call == "produce":
        assert all(queue.produce(item, timeout=PATIENCE) for item in items)
    else:
        assert queue.produce_many(items, timeout=PATIENCE) == 20
    stats = queue.stats(timeout=PATIENCE)
    assert [partition.used for partition in stats.partitions] == [5, 5, 5, 5]
    assert not any(queue.produce(kind(99), timeout=0) for kind in kinds)
    handler.open()
    queue.flush(timeout=PATIENCE)
    seen = defaultdict(list)
    for item in handler.items[1:]:
        seen[item.number % 4].append(item.number)
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert sum(map(len, seen.values())) == 20


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 11, 12, 15])
def test_in_turns_a_prefix_is_accepted(bridge, count):
    handler = Held()
    config = bq.QueueConfig(consumer=handler, partitions=bq.PartitionPolicy.fixed(3), buffer_size=3)
    queue = bridge.get_or_create(f"r{count}", config)
    fill(queue, handler)
    with pytest.raises(bq.PartlyAcceptedError) if count > 9 else nullcontext() as caught:
        assert queue.produce_many(range(count), timeout=0) == count
    handler.open()
    queue.flush(timeout=PATIENCE)
    accepted = caught.value.accepted if count > 9 else count
    assert accepted == min(count, 9)
    assert sorted(handler.items[1:]) == list(range(accepted))


def test_a_full_partition_ends_the_prefix_though_others_have_room(bridge):
    handler = Held()
    one, other = kinds_by_home(2)
    config = bq.QueueConfig(fallback=handler, partitions=bq.PartitionPolicy.fixed(2), buffer_size=2)
    queue = bridge.get_or_create("s", config)
    fill(queue, handler)
    items = [one(0), other(1), one(2), one(3), other(4)]
    with pytest.raises(bq.PartlyAcceptedError) as caught:
        queue.produce_many(items, timeout=0)
    assert caught.value.accepted == 3
    waiting = Caller(queue.produce_many, items)
    until(lambda: in_line(queue) == 1)
    handler.open()
    assert waiting.outcome() == 5
    queue.flush(timeout=PATIENCE)
    assert sorted(item.number for item in handler.items[1:] if type(item) is other) == [1, 1, 4]


def test_a_selector_that_fails_fails_its_caller_alone(bridge):
    handler = Held(held=False)
    config = bq.QueueConfig(
        consumer=handler, selector=bq.by_key(lambda item: 1 // item), partitions=bq.PartitionPolicy.fixed(2)
    )
    queue = bridge.get_or_create("s", config)
    queue.produce(1, timeout=PATIENCE)
    with pytest.raises(ZeroDivisionError):
        queue.produce(0)
    with pytest.raises(ZeroDivisionError):
        queue.produce_many([1, 0])
    wrong = bridge.get_or_create("w", bq.QueueConfig(consumer=handler, selector=lambda item, count: count))
    wide = bq.QueueConfig(consumer=handler, selector=lambda item, count: count, partitions=bq.PartitionPolicy.fixed(2))
    with pytest.raises(bq.ConfigError, match="gave 2 for 2 partitions"):
        bridge.get_or_create("w2", wide).produce(1)
    assert wrong.produce(1)  # one partition asks nobody
    queue.deliver([3], timeout=PATIENCE)


def test_a_selector_runs_outside_the_lock(bridge):
    """A key function that waits for a thread which is producing must not wait for ever."""
    handler = Held(held=False)
    lock = threading.Lock()

    def key(item):
        with lock:
            return item

    config = bq.QueueConfig(consumer=handler, selector=bq.by_key(key), partitions=bq.PartitionPolicy.fixed(2))
    queue = bridge.get_or_create("s", config)
    queue.produce(0, timeout=PATIENCE)
    with lock:
        waiting = Caller(queue.produce, 1)
        queue.stats(timeout=PATIENCE)
        with queue._inbox.lock:
            pass
    assert waiting.outcome()


CHANGES = {
    "cleared": lambda items: items.clear(),
    "shortened": lambda items: items.__delitem__(slice(12, None)),
    "grown": lambda items: items.extend([1, 2, 3]),
    "moved": lambda items: items.insert(0, "another"),
}


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", ["thread", "loop", "deliver"])
def test_c_26_a_list_that_changes_while_its_call_waits_comes_in_as_it_was(bridge, partitions, change, call):
    handler = Held()
    config = bq.QueueConfig(
        fallback=handler, buffer_size=4, max_batch=1, partitions=bq.PartitionPolicy.fixed(partitions)
    )
    queue = bridge.get_or_create("changing", config)
    fill(queue, handler, 0)
    items: list[Any] = [*range(1, 11), "between", *range(11, 21)]
    before = list(items)
    at_home = {"loop": queue._queue.produce_many, "deliver": queue._queue.deliver}.get(call)
    producer = Caller(bridge.call, at_home, items) if at_home else Caller(queue.produce_many, items)
    until(lambda: queue.stats(timeout=PATIENCE).used > 3 and (at_home or in_line(queue)))
    CHANGES[change](items)
    handler.open()
    assert producer.outcome() == (None if call == "deliver" else 21)
    queue.flush(timeout=PATIENCE)
    assert [item for item in handler.items if item != "between"] == list(range(21))
    assert len(handler.items) == 1 + len(before)
    stats = queue.stats(timeout=PATIENCE)
    assert stats.accepted == stats.attempted == 22
    assert_adds_up(stats)


@pytest.mark.parametrize("partitions", [1, 4])
def test_c_26_a_list_that_is_cleared_while_its_call_waits_in_vain_is_counted_as_it_was(bridge, partitions):
    handler = Held()
    config = bq.QueueConfig(
        fallback=handler,
        buffer_size=4,
        max_batch=1,
        partitions=bq.PartitionPolicy.fixed(partitions),
        block_timeout=PATIENCE,
    )
    queue = bridge.get_or_create("changing", config)
    fill(queue, handler, 0)
    items = list(range(1, 21))
    producer = Caller(queue.produce_many, items)
    until(lambda: in_line(queue) == 1)
    items.clear()
    queue._inbox.loop.call_soon_threadsafe(handler.open)
    queue.shutdown(timeout=PATIENCE)
    accepted = producer.outcome()
    stats = queue.stats()
    assert stats.accepted == stats.handled == 1 + accepted
    assert stats.refused == 20 - accepted
    assert_adds_up(stats)


class _Longer(list):
    """A list that gives other items than it has, and says so."""

    def __iter__(self):
        return iter(range(50))


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_class_of_lists_is_taken_by_what_it_gives(bridge, partitions):
    handler = Held()
    config = bq.QueueConfig(
        fallback=handler, buffer_size=4, max_batch=1, partitions=bq.PartitionPolicy.fixed(partitions)
    )
    queue = bridge.get_or_create("odd", config)
    fill(queue, handler, 0)
    with pytest.raises(bq.PartlyAcceptedError, match="4 of 50"):
        queue.produce_many(_Longer([1]), timeout=0)

    async def at_home():
        return queue._queue.produce_many_nowait(_Longer([1]))

    assert bridge.call(at_home) == 0
    handler.open()
    queue.flush(timeout=PATIENCE)
    assert handler.items == [0, 0, 1, 2, 3]
    assert queue.stats(timeout=PATIENCE).refused == 46 + 50
    assert_adds_up(queue.stats())


# -- growth


@pytest.mark.parametrize("selector", [bq.type_hash(), bq.by_key(lambda item: type(item).__name__), bq.round_robin()])
def test_growth_keeps_each_threads_order_for_each_type(bridge, selector):
    seen = defaultdict(list)
    running = set()
    clashes = []
    kinds = [type(f"Grown{number}", (_Numbered,), {}) for number in range(24)]

    def handler_of(kind):
        async def handle(batch):
            if kind in running:
                clashes.append(kind)
            running.add(kind)
            for item in batch:
                seen[kind, item.thread].append(item.number)
            await asyncio.sleep(0)
            running.discard(kind)

        return handle

    config = bq.QueueConfig(
        partitions=bq.PartitionPolicy.adaptive(1), workers=bq.WorkerPolicy.fixed(2), buffer_size=8, selector=selector
    )
    queue = bridge.get_or_create("g", config)
    for kind in kinds[:2]:
        queue.add_handler(kind, handler_of(kind))
    stop = threading.Event()

    def work(thread):
        counts = dict.fromkeys(kinds, 0)
        known = 0
        while not stop.is_set() or known < 400:
            kind = kinds[known % len(registered)]
            item = kind(thread, counts[kind])
            assert queue.produce(item) if known % 3 else queue.produce_many([item]) == 1
            counts[kind] += 1
            known += 1
        return counts

    registered = kinds[:2]
    workers = [Caller(work, thread) for thread in range(3)]
    for kind in kinds[2:]:
        queue.add_handler(kind, handler_of(kind), timeout=PATIENCE)
        registered = [*registered, kind]
        until(lambda latest=kind: any((latest, thread) in seen for thread in range(3)))
    stop.set()
    counts = [worker.outcome() for worker in workers]
    queue.flush(timeout=PATIENCE)
    assert len(queue.stats(timeout=PATIENCE).partitions) > 2
    assert not clashes
    for kind in kinds:
        for thread in range(3):
            numbers = seen[kind, thread]
            assert sorted(numbers) == list(range(counts[thread][kind]))
            if not isinstance(selector, type(bq.round_robin())):
                assert numbers == sorted(numbers)
    assert_adds_up(queue.stats())


class _Numbered:
    def __init__(self, thread, number):
        self.thread = thread
        self.number = number


def test_a_thread_that_waits_while_its_type_moves_is_served_at_the_new_place(bridge):
    handler, others = Held(), Held(held=False)
    config = bq.QueueConfig(partitions=bq.PartitionPolicy.adaptive(1), buffer_size=2, max_batch=1)
    queue = bridge.get_or_create("g", config)
    kinds = [type(f"Moved{number}", (_Numbered,), {}) for number in range(40)]
    queue.add_handler(kinds[0], handler)
    fill(queue, handler, kinds[0](0, 0))
    assert queue.produce_many([kinds[0](0, 1), kinds[0](0, 2)], timeout=PATIENCE) == 2
    waiting = [Caller(queue.produce, kinds[0](0, 3)), Caller(queue.produce_many, [kinds[0](0, 4), kinds[0](0, 5)])]
    until(lambda: in_line(queue) == 2)
    for kind in kinds[1:]:
        queue.add_handler(kind, others, timeout=PATIENCE)
    assert len(queue.stats().partitions) > 10
    handler.open()
    assert waiting[0].outcome() is True
    assert waiting[1].outcome() == 2
    queue.flush(timeout=PATIENCE)
    numbers = [item.number for item in handler.items]
    assert sorted(numbers) == list(range(6))
    assert numbers[:3] == [0, 1, 2]
    assert numbers.index(4) < numbers.index(5)


def test_the_loops_own_producer_finds_room_in_a_partition_whose_places_the_inbox_has():
    """A type is on its way to an empty partition, all of whose places are lent to threads that do not use them."""

    async def main():
        handler = Held()
        async with bq.BatchQueueManager() as manager:
            config = bq.QueueConfig(partitions=bq.PartitionPolicy.adaptive(1), buffer_size=2, max_batch=1)
            queue = manager.create("g", config)
            queue.bridge()
            kinds = [type(f"Own{number}", (_Numbered,), {}) for number in range(30)]
            queue.add_handler(kinds[0], handler)
            assert await queue.produce(kinds[0](0, 0))
            await asyncio.to_thread(handler.wait_for_call)
            for kind in kinds[1:]:
                queue.add_handler(kind, handler)
            async with asyncio.timeout(PATIENCE):
                assert await queue.produce(kinds[0](0, 1))
                assert await queue.produce_many([kinds[0](0, 2)]) == 1
            handler.open()
            await queue.flush(timeout=PATIENCE)
        assert [item.number for item in handler.items] == [0, 1, 2]

    asyncio.run(main())


# -- together with the loop's own producers


def test_threads_and_the_loops_own_producers_share_the_room():
    handler = Held()
    results = {}

    async def main():
        async with bq.BatchQueueManager() as manager:
            config = bq.QueueConfig(consumer=handler, buffer_size=4, max_batch=1)
            queue = manager.create("both", config)
            bridge = queue.bridge()
            await asyncio.to_thread(fill, bridge, handler)
            assert queue.produce_nowait("loop")
            assert await asyncio.to_thread(bridge.produce, "thread")
            assert await queue.produce_many(["loop", "loop"]) == 2
            assert not queue.produce_nowait("too many")
            assert not await asyncio.to_thread(bridge.produce, "too many", 0)
            assert queue.stats().used == 4
            assert_adds_up(queue.stats())
            own = [asyncio.create_task(queue.produce(f"loop {n}")) for n in range(5)]
            others = []
            for number in range(5):
                others.append(Caller(bridge.produce, f"thread {number}"))
                await asyncio.to_thread(until, lambda: in_line(bridge) == len(others))
            handler.open()
            results["own"] = await asyncio.gather(*own)
            results["others"] = [await asyncio.to_thread(other.outcome) for other in others]
            await queue.flush()
            assert_adds_up(queue.stats())

    asyncio.run(main())
    assert all(results["own"])
    assert all(results["others"])
    assert len(handler.items) == 15


def test_neither_the_loop_nor_the_threads_starve():
    """Both sides always have more to put in than there is room; each gets its items through while the other goes on."""
    counts = {"loop": 0, "thread": 0}
    both = threading.Event()

    async def handle(batch):
        for item in batch:
            counts[item] += 1
        if min(counts.values()) > 500:
            both.set()
        await asyncio.sleep(0)

    async def main():
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("both", bq.QueueConfig(consumer=handle, buffer_size=8, max_batch=4))
            bridge = queue.bridge()

            async def produce():
                while not both.is_set():
                    await queue.produce("loop")

            def work():
                while not both.is_set():
                    assert bridge.produce("thread", timeout=PATIENCE)

            threads = [Caller(work) for _ in range(3)]
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*(produce() for _ in range(3)))
            for thread in threads:
                await asyncio.to_thread(thread.outcome)
            await queue.flush()
            stats = queue.stats()
            assert stats.handled == stats.accepted == sum(counts.values())
            assert_adds_up(stats)

    asyncio.run(main())


# -- from handlers


def test_produce_from_a_handler_on_the_loop_thread_uses_room_and_never_waits(bridge):
    outcomes = []

    async def handle(batch):
        for item in batch:
            if item == "go":
                outcomes.append(queue.produce("one"))
                outcomes.append(queue.produce_many(["two"]))
                outcomes.append(queue.produce("no room", timeout=0))
                for call in (queue.produce, lambda item: queue.produce_many([item])):
                    try:
                        call("no room")
                    except bq.DeadlockError as error:
                        outcomes.append(str(error))

    queue = bridge.get_or_create("b", bq.QueueConfig(consumer=handle, buffer_size=2, max_batch=1))
    queue.produce("go")
    queue.flush(timeout=PATIENCE)
    assert outcomes[:3] == [True, 1, False]
    assert len(outcomes) == 5
    assert all("thread of the queue's own loop" in text for text in outcomes[3:])
    assert queue.stats().accepted == 3


def test_an_in_thread_handler_that_would_wait_for_itself_is_told_at_once(bridge):
    outcomes = []

    def handle(batch):
        if batch != ["go"]:
            return
        outcomes.append(queue.produce("fits"))
        outcomes.append(queue.produce_many(["fits too"]))
        outcomes.append(queue.produce("no room", timeout=0))
        calls = [
            lambda: queue.produce("no room"),
            lambda: queue.produce_many(["no room"]),
            queue.flush,
            queue.shutdown,
            lambda: queue.deliver(["x"]),
        ]
        for call in calls:
            with pytest.raises(bq.DeadlockError) as caught:
                call()
            outcomes.append(str(caught.value))

    queue = bridge.get_or_create("b", bq.QueueConfig(consumer=bq.in_thread(handle), buffer_size=2, max_batch=1))
    queue.deliver(["go"], timeout=PATIENCE)
    queue.flush(timeout=PATIENCE)
    assert outcomes[:3] == [True, 1, False]
    assert len(outcomes) == 8
    assert all("is drained only after this handler returns" in text for text in outcomes[3:5])
    assert queue.stats().handled == 3


def test_in_thread_handlers_that_wait_for_each_others_room_are_told(bridge):
    """Two workers' handlers, each in its thread, put into the other's full partition: neither could ever go on."""
    told = []
    meet = threading.Barrier(2, timeout=PATIENCE)
    one, other = kinds_by_home(2)

    def put_into(target):
        def handle(batch):
            if batch[0].number == 0:
                meet.wait()  # both handlers run, and their partitions are full
                meet.wait()
                try:
                    queue.produce(target(9), timeout=PATIENCE)
                except bq.DeadlockError as error:
                    told.append(str(error))

        return bq.in_thread(handle)

    config = bq.QueueConfig(
        workers=bq.WorkerPolicy.fixed(2), partitions=bq.PartitionPolicy.fixed(2), buffer_size=1, max_batch=1
    )
    queue = bridge.get_or_create("circle", config)
    queue.add_handler(one, put_into(other))
    queue.add_handler(other, put_into(one))
    queue.produce(one(0))
    queue.produce(other(0))
    until(lambda: meet.n_waiting == 2 or queue.stats().in_flight == 2)
    assert queue.produce(one(1), timeout=PATIENCE)
    assert queue.produce(other(1), timeout=PATIENCE)
    queue.stats(timeout=PATIENCE)
    queue.flush(timeout=PATIENCE)
    assert len(told) == 1
    assert "in a circle" in told[0]
    assert_adds_up(queue.stats())


def test_those_who_left_the_line_do_not_stand_in_the_way_of_the_loops_own_producers():
    handler = Held()

    async def main():
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("q", bq.QueueConfig(consumer=handler, buffer_size=2, max_batch=1))
            bridge = queue.bridge()
            await asyncio.to_thread(fill, bridge, handler)
            with pytest.raises(bq.PartlyAcceptedError) as caught:
                await asyncio.to_thread(bridge.produce_many, range(1000), 0.001)
            assert caught.value.accepted == 2
            own = asyncio.create_task(queue.produce("own"))
            handler.open()
            async with asyncio.timeout(PATIENCE):
                assert await own
                await queue.flush()
                assert await queue.produce_many(["a", "b", "c"]) == 3
                await queue.flush()
            assert not queue.router.partitions[0].waiters

    asyncio.run(main())
    assert handler.items == ["first", 0, 1, "own", "a", "b", "c"]


def test_threads_that_wait_are_lent_all_the_room_unless_the_loop_needs_some(bridge):
    handler = Held()
    queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handler, buffer_size=10))
    fill(queue, handler)
    queue.produce_many(range(10))
    waiting = Caller(queue.produce_many, range(10, 25))
    until(lambda: in_line(queue) == 1)
    handler.open()
    assert waiting.outcome() == 15
    queue.flush(timeout=PATIENCE)
    with queue._inbox.lock:
        assert [share.free for share in queue._inbox._shares] == [10]


async def test_those_who_come_into_line_as_it_is_served_are_served_with_the_room_that_is_left():
    class StandsForSeveral(Waiter):
        def notify(self):
            if not self.item:
                self.item = "another has come meanwhile"
                self.want += 1

    partition = Partition(0, 3)
    assert partition.offer_many([1, 2, 3])
    waiter = StandsForSeveral(1)
    partition.join(waiter)
    partition.take(3)
    assert (waiter.reserved, waiter.want) == (2, 0)
    assert not partition.waiting
