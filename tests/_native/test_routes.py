"""Partitions by key and in turns, and lists of many types from threads: the same compiled and in Python."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
from typing import Any

import pytest

import batchqueue_async as bq
from batchqueue_async import _native
from batchqueue_async.policies import ByKey, RoundRobin

compiled_only = pytest.mark.skipif(not bq.accelerated, reason="the hot path is not compiled, or not wanted")

WAYS = ["produce", "produce_nowait", "produce_many", "produce_many_nowait"]


async def ignore(batch):
    """Handle nothing."""


def make(selector: Any, **options: Any) -> Any:
    """A queue of four partitions, which nobody drains before the test lets the loop run."""
    partitions = bq.PartitionPolicy.fixed(4)
    return bq.BatchQueue("routes", bq.QueueConfig(consumer=ignore, partitions=partitions, selector=selector, **options))


def inside(queue: Any) -> list[list[Any]]:
    """What stands in each partition."""
    return [list(partition.tail) for partition in queue._router.partitions]


async def put(queue: Any, way: str, items: list[Any]) -> int:
    """Put items in, one way or the other; how many came in."""
    if way == "produce":
        return sum([await queue.produce(item) for item in items])
    if way == "produce_nowait":
        return sum([queue.produce_nowait(item) for item in items])
    if way == "produce_many":
        return await queue.produce_many(items)
    return queue.produce_many_nowait(items)


class Asked:
    """A key function that notes what it was asked for."""

    def __init__(self, key: Any) -> None:
        self.key, self.items = key, []

    def __call__(self, item: Any) -> Any:
        self.items.append(item)
        return self.key(item)


class Hashed:
    """A key with the hash that it was told, or an error of it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


# -- by key ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "key", [int, lambda item: -7 * item, lambda item: 2**70 + item, lambda item: Hashed(-1 - item)]
)
async def test_an_item_goes_where_the_hash_of_its_key_says(way, key):
    asked = Asked(key)
    queue = make(bq.by_key(asked))
    items = list(range(10, 30))
    assert await put(queue, way, items) == 20
    assert asked.items == items
    assert inside(queue) == [[item for item in items if hash(key(item)) % 4 == index] for index in range(4)]
    assert (await queue.shutdown()).handled == 20


@pytest.mark.parametrize("way", WAYS)
async def test_a_key_is_asked_for_once_where_its_partition_is_full(way):
    asked = Asked(lambda item: item // 3)
    queue = make(bq.by_key(asked), buffer_size=2, overflow="reject")
    items = list(range(9))
    accepted = await put(queue, way, items)
    assert accepted == (2 if "many" in way else 6)
    assert asked.items == items
    stats = queue.stats()
    assert (stats.attempted, stats.accepted, stats.refused) == (9, accepted, 9 - accepted)
    await queue.shutdown()


async def test_a_key_is_asked_for_once_by_those_who_wait():
    asked = Asked(int)
    queue = make(bq.by_key(asked), buffer_size=1)
    calls = [asyncio.ensure_future(queue.produce(4 * number)) for number in range(3)]
    calls.append(asyncio.ensure_future(queue.produce_many([1, 5, 9])))
    assert [await call for call in calls] == [True, True, True, 3]
    assert sorted(asked.items) == [0, 1, 4, 5, 8, 9]
    assert (await queue.shutdown()).handled == 6


ERRORS = [
    ValueError(),
    KeyError(),
    AttributeError(),
    KeyboardInterrupt(),
    SystemExit(),
    GeneratorExit(),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_hash", [False, True])
async def test_an_error_of_a_key_or_of_its_hash_comes_out_and_nothing_goes_in(way, error, in_hash):
    def key(item):
        if item == 2 and not in_hash:
            raise error
        return Hashed(error) if item == 2 else item

    queue = make(bq.by_key(key))
    with pytest.raises(type(error)):
        await put(queue, way, [0, 1, 2, 3])
    assert inside(queue) == ([[], [], [], []] if "many" in way else [[0], [1], [], []])
    assert queue.produce_nowait(7)
    report = await queue.shutdown()
    assert report.handled == queue.stats().accepted == (1 if "many" in way else 3)


@pytest.mark.parametrize("way", WAYS)
async def test_a_key_function_may_put_something_in_and_change_the_list(way):
    queue: Any
    items = [0, 1, 2, 3]

    def key(item):
        if item == 1:
            assert queue.produce_nowait(50)
            items.append(60)
        return item

    queue = make(bq.by_key(key))
    given = items if "many" in way else items[:]
    accepted = await put(queue, way, given)
    assert accepted == (5 if given is items else 4)
    assert inside(queue) == [[0, 60] if given is items else [0], [1], [50, 2], [3]]
    assert (await queue.shutdown()).handled == accepted + 1


@pytest.mark.parametrize("way", ["produce", "produce_nowait"])
async def test_a_key_function_may_close_the_queue(way):
    queue: Any
    ends = []

    def close(item):
        if item == 1:
            ends.append(queue.shutdown(1))
            ends[0].send(None)
        return item

    asked = Asked(close)
    queue = make(bq.by_key(asked))
    assert await put(queue, way, [0, 1, 2]) == 1
    assert asked.items == [0, 1, 2]
    ends[0].close()
    assert (await queue.shutdown()).handled == 1
    assert queue.stats().refused == 2


@pytest.mark.parametrize("way", WAYS)
async def test_a_key_function_may_let_the_queue_grow(way):
    queue: Any
    seen: list[int] = []

    async def note(batch):
        seen.extend(batch)

    def key(item):
        if item in {3, 6}:
            queue.add_handler(type("Kind", (), {}), ignore, 3)
        return item % 2

    config: Any = bq.QueueConfig(partitions=bq.PartitionPolicy.adaptive(), selector=bq.by_key(key), fallback=note)
    queue = bq.BatchQueue("growing", config)
    items = list(range(12))
    assert await put(queue, way, items) == 12
    await queue.flush()
    assert sorted(seen) == items
    assert [item for item in seen if item % 2] == items[1::2], "each key is first in, first out"
    assert [item for item in seen if not item % 2] == items[::2]
    await queue.shutdown()


# -- in turns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_partitions_take_turns(way):
    selector = bq.round_robin()
    assert [selector(0, 3) for _ in range(5)] == [0, 1, 2, 0, 1]
    queue = make(selector)
    for start in range(0, 20, 5):
        assert await put(queue, way, list(range(start, start + 5))) == 5
        selector(0, 3)  # by hand, beside the queue, which has turns of its own
    assert [len(each) for each in inside(queue)] == [5] * 4
    if "many" not in way:
        assert inside(queue) == [list(range(index, 20, 4)) for index in range(4)]
    assert (await queue.shutdown()).handled == 20


async def test_a_refused_item_takes_its_turn():
    queue = make(bq.round_robin(), buffer_size=1, overflow="reject")
    assert [queue.produce_nowait(item) for item in range(6)] == [True] * 4 + [False] * 2
    await queue.flush()
    assert [queue.produce_nowait(item) for item in range(6, 8)] == [True] * 2
    assert inside(queue) == [[], [], [6], [7]]
    await queue.shutdown()


@pytest.mark.parametrize("way", WAYS)
async def test_a_selector_of_a_derived_class_is_asked_itself(way):
    class Mine(ByKey[Any]):
        __slots__ = ()

        def __call__(self, item, partition_count):
            return 1

    class Turning(RoundRobin):
        __slots__ = ()

        def __call__(self, item, partition_count):
            return 2

        def fresh(self):
            return self

    for selector, index in ((Mine(int), 1), (Turning(), 2)):
        queue = make(selector)
        assert await put(queue, way, [0, 1, 2, 3] if index == 1 else [0]) == (4 if index == 1 else 1)
        assert [len(each) for each in inside(queue)][index] == (4 if index == 1 else 1)
        await queue.shutdown()


@pytest.mark.parametrize("name", ["_key", "_turns", "_fences", "partitions", "_width"])
@pytest.mark.parametrize("selector", ["by_key", "round_robin"])
async def test_a_router_with_fields_missing_or_of_odd_classes_harms_nothing(name, selector):
    queue = make(bq.by_key(int) if selector == "by_key" else bq.round_robin())
    router = queue._router
    whole = getattr(router, name)
    for value in (None, 5, [], (), object(), "", -1, _native.Turns(), "gone"):
        try:
            setattr(router, name, value)
            if value == "gone":
                delattr(router, name)
        except (AttributeError, TypeError):
            continue  # a number, compiled
        for step in (
            lambda: queue.produce_nowait(1),
            lambda: queue.produce_many_nowait([1, 2]),
            lambda: queue.produce(1).send(None),
        ):
            with contextlib.suppress(Exception):  # whatever the Python makes of it
                step()
    setattr(router, name, whole)
    await queue.flush()
    stats = queue.stats()
    assert stats.accepted == stats.handled
    await queue.shutdown()


# -- lists of many types from a thread ---------------------------------------------------------------------------------

KINDS: list[Any] = [type(f"Routed{number}", (int,), {}) for number in range(30)]


def typed_queue(bridge: bq.SyncBridge, handler: Any, **options: Any) -> Any:
    config: Any = bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(4), fallback=handler, **options)
    return bridge.get_or_create("typed", config)


@pytest.mark.parametrize("size", [1, 7, 300])
def test_lists_that_find_room_in_part_come_in_whole_and_in_order(size):
    seen: dict[type, list[int]] = {}

    async def note(batch):
        for item in batch:
            seen.setdefault(type(item), []).append(int(item))
        await asyncio.sleep(0)

    def work(first):
        items = [kind(number) for number in range(40) for kind in KINDS[first::3]]
        for start in range(0, len(items), size):
            assert queue.produce_many(items[start : start + size]) == len(items[start : start + size])

    with bq.SyncBridge() as bridge:
        queue = typed_queue(bridge, note, buffer_size=16)
        threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        queue.flush()
        stats = queue.stats()
    assert seen == {kind: list(range(40)) for kind in KINDS}
    assert stats.accepted == stats.handled == 1_200


def test_what_finds_no_room_is_refused_and_counted_once():
    gate = threading.Event()

    async def hold(batch):
        await asyncio.to_thread(gate.wait)

    with bq.SyncBridge() as bridge:
        queue = typed_queue(bridge, hold, buffer_size=8, overflow="reject")
        items = [kind(number) for number in range(40) for kind in KINDS]
        counts = [queue.produce_many(items) for _ in range(5)]
        gate.set()
        queue.flush()
        stats = queue.stats()
    assert stats.accepted == sum(counts) == stats.handled
    assert stats.refused == 5 * len(items) - sum(counts)
    assert 0 < sum(counts) < 5 * len(items)


def test_a_list_that_another_thread_changes_is_never_counted_wrong():
    seen: list[Any] = []

    async def note(batch):
        seen.extend(batch)

    done = threading.Event()
    items: list[Any] = []

    def change():
        while not done.is_set():
            items.extend(kind(1) for kind in KINDS)
            del items[::2]
            items.clear()

    accepted, cut_short = 0, False
    with bq.SyncBridge() as bridge:
        queue = typed_queue(bridge, note, buffer_size=64)
        changer = threading.Thread(target=change)
        changer.start()
        for _ in range(50):
            try:
                accepted += queue.produce_many(items)
            except IndexError:
                cut_short = True  # as the rest of it was to come in
        done.set()
        changer.join()
        queue.flush()
        stats = queue.stats()
    assert stats.accepted == stats.handled == len(seen)
    assert accepted == len(seen) or (cut_short and accepted < len(seen))


@compiled_only
def test_what_is_accepted_comes_in_where_there_is_no_memory_for_a_lane():
    """Each allocation fails once: the items stay in the list that the Python hands over, and no error comes out."""
    nomemory = pytest.importorskip("_testcapi")
    for at in range(1, 12):
        partition: Any = _native.PartitionFields()
        table: Any = _native.TypeTable()
        items = [kind(number) for number in range(40) for kind in KINDS[:2]]
        for kind in KINDS[:2]:
            table[kind] = []
        for _ in range(3):
            _native.sort_run(table, items, 0)
        lanes: dict[Any, Any] = {}
        for kind in KINDS[:2]:
            lane: Any = _native.LaneFields()
            lane.kind, lane.partition, lane.asleep = kind, partition, False
            lane.tail, lane.fast_slots = [], _native.NO_SLOTS
            lanes[lane] = None
            table[kind] = lane
        partition.lanes, partition.held, partition._in_lanes = lanes, 80, 0
        left = items[:]
        nomemory.set_nomemory(at, at + 1)
        try:
            _native.put_held(table, partition, left)
        finally:
            nomemory.remove_mem_hooks()
        moved = [len(lane.tail) for lane in lanes]
        assert (partition.held, partition._in_lanes) == (80 - sum(moved), sum(moved))
        assert left == items[sum(moved) :]
        assert [lane.tail for lane in lanes] == [items[0 : sum(moved) : 2], items[1 : sum(moved) : 2]]


@pytest.mark.parametrize("call", ["produce", "produce_many"])
def test_a_thread_asks_once_for_each_key_also_where_it_waits(call):
    seen: dict[int, list[int]] = {}

    async def note(batch):
        for item in batch:
            seen.setdefault(item % 8, []).append(item)
        await asyncio.sleep(0)

    asked = Asked(lambda item: item % 8)
    items = list(range(400))
    with bq.SyncBridge() as bridge:
        partitions = bq.PartitionPolicy.fixed(4)
        config: Any = bq.QueueConfig(
            consumer=note, partitions=partitions, selector=bq.by_key(asked), buffer_size=4, max_batch=3
        )
        queue = bridge.get_or_create("keys", config)
        if call == "produce":
            assert all(queue.produce(item) for item in items)
        else:
            assert sum(queue.produce_many(items[start : start + 40]) for start in range(0, 400, 40)) == 400
        queue.flush()
    assert asked.items == items
    assert seen == {key: items[key::8] for key in range(8)}


@pytest.mark.parametrize("error", [*ERRORS, StopIteration()], ids=repr)
@pytest.mark.parametrize("in_hash", [False, True])
def test_an_error_of_a_key_comes_out_in_the_thread(error, in_hash):
    def key(item):
        if item == 2 and not in_hash:
            raise error
        return Hashed(error) if item == 2 else item

    seen: list[int] = []

    async def note(batch):
        seen.extend(batch)

    with bq.SyncBridge() as bridge:
        config: Any = bq.QueueConfig(
            consumer=note, partitions=bq.PartitionPolicy.fixed(4), selector=bq.by_key(key), buffer_size=50
        )
        queue = bridge.get_or_create("keys", config)
        for _ in range(3):
            assert queue.produce(1)
            with pytest.raises(type(error)):
                queue.produce(2)
            with pytest.raises(type(error)):
                queue.produce_many([0, 1, 2, 3])
        queue.flush()
        stats = queue.stats()
    assert seen == [1, 1, 1]
    assert (stats.accepted, stats.handled, stats.refused) == (3, 3, 0)


def test_a_key_function_of_a_thread_may_produce_and_close():
    seen: list[int] = []

    async def note(batch):
        seen.extend(batch)

    def key(item):
        if item == 1:
            assert queue.produce(50)
        if item == 2:
            queue.shutdown()
        return item

    with bq.SyncBridge() as bridge:
        config: Any = bq.QueueConfig(
            consumer=note, partitions=bq.PartitionPolicy.fixed(4), selector=bq.by_key(key), buffer_size=50
        )
        queue = bridge.get_or_create("keys", config)
        assert [queue.produce(item) for item in range(4)] == [True, True, False, False]
    assert sorted(seen) == [0, 1, 50]


def test_threads_take_turns_with_partitions():
    lengths: list[int] = []
    gate = threading.Event()

    async def hold(batch):
        await asyncio.to_thread(gate.wait)
        lengths.append(len(batch))

    with bq.SyncBridge() as bridge:
        config: Any = bq.QueueConfig(
            consumer=hold,
            partitions=bq.PartitionPolicy.fixed(4),
            selector=bq.round_robin(),
            buffer_size=6,
            overflow="reject",
        )
        queue = bridge.get_or_create("turns", config)
        accepted = sum(queue.produce(item) for item in range(200))
        gate.set()
        queue.flush()
        stats = queue.stats()
    assert stats.accepted == stats.handled == sum(lengths) == accepted >= 4
    assert stats.refused == 200 - accepted


# -- memory ----------------------------------------------------------------------------------------------------------


async def test_routes_leave_no_reference_behind(caplog):
    caplog.set_level(logging.CRITICAL, logger="batchqueue_async")
    key, item, odd = object(), KINDS[0](1), object()

    def key_of(each):
        if each is odd:
            raise ValueError
        return key

    queues = [make(bq.by_key(key_of), overflow="reject", buffer_size=60), make(bq.round_robin())]
    bridge = make(bq.type_hash()).bridge()
    many = [kind(2) for kind in KINDS] + [item]
    watched = [None, True, key, key_of, item, odd, many, *KINDS[:4], *queues, bridge]

    async def everything(times):
        for _ in range(times):
            for queue in queues:
                for each in (item, odd):
                    for way in WAYS:
                        if each is item or queue is queues[1]:
                            await put(queue, way, [each, each])
                            continue
                        with pytest.raises(ValueError):
                            await put(queue, way, [item, each])
                queue.produce_many_nowait(many * 3)
                await queue.flush()
            await asyncio.to_thread(bridge.produce_many, many)
            await bridge._queue.flush()

    def counts():
        gc.collect()
        return [sys.getrefcount(each) for each in watched]

    await everything(10)
    before, blocks = counts(), sys.getallocatedblocks()
    await everything(100)
    grown = [now - then for now, then in zip(counts(), before, strict=True)]
    assert max(grown) < 50, f"of 100 times, each left something: {grown}"
    assert sys.getallocatedblocks() - blocks < 2_000
    for queue in (*queues, bridge._queue):
        await queue.shutdown()
