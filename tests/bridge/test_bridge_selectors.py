"""Threads' items under each selector: how often a key is asked for, what its errors do, and lists of many types."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict

import pytest
from bridge_tools import PATIENCE, Caller, Held, assert_adds_up, fill, in_line, until
from queue_tools import kinds_by_home

import batchqueue_async as bq

FOUR = bq.PartitionPolicy.fixed(4)


@pytest.fixture
def bridge():
    with bq.SyncBridge() as bridge:
        yield bridge


class AskedKey:
    """A key function that counts how often it was asked for each item."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()

    def __call__(self, item: int) -> int:
        self.asked[item] += 1
        return item % 4


# -- a key function is asked once for each item


@pytest.mark.parametrize("call", ["produce", "produce_many"])
def test_a_key_is_asked_once_for_each_item_that_comes_in_at_once(bridge, call):
    key, handler = AskedKey(), Held(held=False)
    queue = bridge.get_or_create("k", bq.QueueConfig(consumer=handler, selector=bq.by_key(key), partitions=FOUR))
    if call == "produce":
        assert all(queue.produce(number) for number in range(100))
    else:
        assert queue.produce_many(list(range(100))) == 100
    queue.flush(timeout=PATIENCE)
    assert key.asked == dict.fromkeys(range(100), 1)
    assert sorted(handler.items) == list(range(100))


@pytest.mark.parametrize("call", ["produce", "produce_many"])
def test_a_key_is_asked_once_for_an_item_that_waits_for_room(bridge, call):
    key, handler = AskedKey(), Held()
    config = bq.QueueConfig(consumer=handler, selector=bq.by_key(key), partitions=FOUR, buffer_size=2, max_batch=1)
    queue = bridge.get_or_create("k", config)
    fill(queue, handler, first=0)
    key.asked.clear()
    numbers = [4, 8, 12, 16, 20]
    produce = queue.produce_many if call == "produce_many" else lambda each: [queue.produce(one) for one in each]
    waiting = Caller(produce, numbers)
    until(lambda: in_line(queue) == 1)
    handler.open()
    assert waiting.outcome() in (5, [True] * 5)
    queue.flush(timeout=PATIENCE)
    assert key.asked == dict.fromkeys(numbers, 1)
    assert handler.items[1:] == numbers
    assert_adds_up(queue.stats())


def test_a_key_is_asked_once_for_an_item_that_is_refused(bridge):
    key, handler = AskedKey(), Held()
    config = bq.QueueConfig(
        consumer=handler,
        selector=bq.by_key(key),
        partitions=FOUR,
        buffer_size=1,
        strategy=bq.BufferStrategy.IF_POSSIBLE,
    )
    queue = bridge.get_or_create("k", config)
    fill(queue, handler, first=0)
    key.asked.clear()
    assert [queue.produce(number) for number in (4, 8, 12)] == [True, False, False]
    assert queue.produce_many([16, 20]) == 0
    assert key.asked == dict.fromkeys((4, 8, 12, 16, 20), 1)
    assert queue.stats(timeout=PATIENCE).refused == 4
    handler.open()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("call", ["produce", "produce_many"])
def test_what_a_key_raises_reaches_its_caller_and_nothing_comes_in(bridge, call, error):
    handler = Held(held=False)

    def key(item):
        if item == 3:
            raise error(item)
        return item

    queue = bridge.get_or_create("k", bq.QueueConfig(consumer=handler, selector=bq.by_key(key), partitions=FOUR))
    queue.produce(0)
    with pytest.raises(error):
        queue.produce(3) if call == "produce" else queue.produce_many([1, 2, 3])
    queue.produce(4)
    queue.flush(timeout=PATIENCE)
    assert sorted(handler.items) == [0, 4]
    assert_adds_up(queue.stats())


@pytest.mark.parametrize("call", ["produce", "produce_many"])
def test_a_key_that_can_not_be_hashed_is_the_callers_error(bridge, call):
    handler = Held(held=False)
    config = bq.QueueConfig(consumer=handler, selector=bq.by_key(lambda item: [item]), partitions=FOUR)
    queue = bridge.get_or_create("k", config)
    with pytest.raises(TypeError, match="unhashable"):
        queue.produce(1) if call == "produce" else queue.produce_many([1])
    assert queue.stats(timeout=PATIENCE).accepted == 0


def test_a_key_may_produce_into_its_own_queue(bridge):
    handler = Held(held=False)

    def key(item):
        if item < 100:
            queue.produce(item + 100)
        return item

    queue = bridge.get_or_create("k", bq.QueueConfig(consumer=handler, selector=bq.by_key(key), partitions=FOUR))
    assert all(queue.produce(number) for number in range(10))
    assert queue.produce_many(list(range(10, 20))) == 10
    queue.flush(timeout=PATIENCE)
    assert sorted(handler.items) == [*range(20), *range(100, 120)]


def test_a_negative_hash_has_its_partition_too(bridge):
    handler = Held()
    config = bq.QueueConfig(consumer=handler, selector=bq.by_key(lambda item: item), partitions=FOUR)
    queue = bridge.get_or_create("k", config)
    numbers = [-7, -2, -1, sys.maxsize, -sys.maxsize]
    wanted = Counter(hash(number) % 4 for number in numbers * 2)
    fill(queue, handler)
    before = [partition.used for partition in queue.stats(timeout=PATIENCE).partitions]
    for number in numbers:
        assert queue.produce(number)
    assert queue.produce_many(numbers) == 5
    used = [partition.used for partition in queue.stats(timeout=PATIENCE).partitions]
    assert [now - then for now, then in zip(used, before, strict=True)] == [wanted[index] for index in range(4)]
    handler.open()


# -- in turns


def test_turns_go_on_between_items_and_lists(bridge):
    handler = Held()
    queue = bridge.get_or_create("r", bq.QueueConfig(consumer=handler, partitions=FOUR))
    fill(queue, handler)
    before = [partition.used for partition in queue.stats(timeout=PATIENCE).partitions]
    for number in range(6):
        assert queue.produce(number)
    assert queue.produce_many(list(range(6, 9))) == 3
    for number in range(9, 12):
        assert queue.produce(number)
    used = [partition.used for partition in queue.stats(timeout=PATIENCE).partitions]
    assert [now - then for now, then in zip(used, before, strict=True)] == [3, 3, 3, 3]
    handler.open()
    queue.flush(timeout=PATIENCE)
    assert sorted(handler.items[1:]) == list(range(12))


# -- lists of many types


@pytest.mark.parametrize("threads", [1, 8])
def test_lists_of_many_types_come_in_whole_and_in_order(bridge, threads):
    """With so little room that most lists come in by parts."""
    handler = Held(held=False)
    kinds = kinds_by_home(4)
    config = bq.QueueConfig(fallback=handler, partitions=FOUR, buffer_size=20, max_batch=7)
    queue = bridge.get_or_create("m", config)

    def work(thread):
        for start in range(0, 300, 30):
            batch = [kinds[(number * 7 + thread) % 4](thread * 1_000 + number) for number in range(start, start + 30)]
            assert queue.produce_many(batch) == 30

    callers = [Caller(work, thread) for thread in range(threads)]
    for caller in callers:
        caller.outcome()
    queue.flush(timeout=PATIENCE)
    seen = defaultdict(list)
    for item in handler.items:
        seen[type(item), item.number // 1_000].append(item.number)
    assert sum(map(len, seen.values())) == 300 * threads
    assert all(numbers == sorted(set(numbers)) for numbers in seen.values())
    assert_adds_up(queue.stats())


def test_a_list_that_finds_room_for_its_first_items_waits_with_the_others(bridge):
    handler = Held()
    one, other = kinds_by_home(2)
    config = bq.QueueConfig(fallback=handler, partitions=bq.PartitionPolicy.fixed(2), buffer_size=4)
    queue = bridge.get_or_create("m", config)
    fill(queue, handler)
    queue.produce(other(0))  # the loop is on its way, and all types are met
    queue.produce(one(0))
    items = [one(1), other(2), one(3), other(4), one(5), one(6), other(7)]
    waiting = Caller(queue.produce_many, items)
    until(lambda: in_line(queue) == 1)
    handler.open()
    assert waiting.outcome() == 7
    queue.flush(timeout=PATIENCE)
    numbers = {kind: [item.number for item in handler.items[1:] if type(item) is kind] for kind in (one, other)}
    assert numbers == {one: [0, 1, 3, 5, 6], other: [0, 2, 4, 7]}
    assert_adds_up(queue.stats())


def test_a_type_that_is_quiet_for_long_comes_in_by_a_list(bridge):
    """Its lane has gone to sleep meanwhile, beside the lanes of types that went on."""
    handler = Held(held=False)
    kinds = [type(f"Quiet{number}", (), {}) for number in range(60)]
    config = bq.QueueConfig(fallback=handler, partitions=bq.PartitionPolicy.fixed(2))
    queue = bridge.get_or_create("m", config)
    queue.produce_many([kind() for kind in kinds])
    queue.flush(timeout=PATIENCE)
    for _ in range(5):
        queue.produce_many([kinds[0](), kinds[1](), kinds[0]()])
        queue.flush(timeout=PATIENCE)
    queue.produce_many([kind() for kind in kinds] * 2)
    queue.flush(timeout=PATIENCE)
    assert Counter(map(type, handler.items)) == {
        kind: 13 if kind is kinds[0] else 8 if kind is kinds[1] else 3 for kind in kinds
    }
    assert_adds_up(queue.stats())


def test_a_list_that_is_changed_meanwhile_loses_nothing_that_was_accepted(bridge):
    handler = Held(held=False)
    kinds = kinds_by_home(4)
    queue = bridge.get_or_create("m", bq.QueueConfig(fallback=handler, partitions=FOUR, buffer_size=50))
    shared = [kinds[number % 4](number) for number in range(40)]
    stop = threading.Event()

    def change():
        while not stop.is_set():
            shared.append(shared.pop(0))

    changer = Caller(change)
    try:
        accepted = sum(queue.produce_many(shared) for _ in range(200))
    finally:
        stop.set()
    changer.outcome()
    queue.flush(timeout=PATIENCE)
    assert len(handler.items) == accepted == queue.stats(timeout=PATIENCE).handled
    assert_adds_up(queue.stats())
