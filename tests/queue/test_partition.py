"""A partition by itself: like asyncio.Queue, with a bulk take, and first come, first served."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_tools import outcome

from batchqueue_async.queue.partition import Partition
from batchqueue_async.testing import settle


def test_it_is_bounded_and_first_in_first_out():
    partition = Partition[int](0, capacity=3)
    assert partition.empty()
    for number in range(3):
        partition.put_nowait(number)
    assert (partition.full(), partition.qsize(), partition.room()) == (True, 3, 0)
    with pytest.raises(asyncio.QueueFull):
        partition.put_nowait(3)
    assert [partition.get_nowait() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(asyncio.QueueEmpty):
        partition.get_nowait()
    assert (partition.empty(), partition.accepted, partition.finished) == (True, 3, 3)


async def test_put_and_get_wait_in_order():
    partition = Partition[int](0, capacity=1)
    getters = [asyncio.create_task(partition.get()) for _ in range(2)]
    await settle()
    await partition.put(0)
    await partition.put(1)
    assert [await getter for getter in getters] == [0, 1]
    putters = [asyncio.create_task(partition.put(number)) for number in range(4)]
    await settle()
    assert partition.qsize() == 1
    assert [await partition.get() for _ in range(4)] == [0, 1, 2, 3]
    assert [await outcome(putter) for putter in putters] == [None] * 4


async def test_put_nowait_does_not_pass_a_waiting_putter():
    partition = Partition[str](0, capacity=1)
    partition.put_nowait("first")
    putter = asyncio.create_task(partition.put("patient"))
    await settle()
    assert partition.get_nowait() == "first"
    with pytest.raises(asyncio.QueueFull):
        partition.put_nowait("pushy")
    await putter
    assert partition.get_nowait() == "patient"


async def test_put_nowait_fills_what_is_left_beside_the_places_of_waiting_putters():
    """They have their places, whatever comes in before they run."""
    partition = Partition[str](0, capacity=3)
    for item in "abc":
        partition.put_nowait(item)
    putters = [asyncio.create_task(partition.put(f"patient {number}")) for number in range(2)]
    await settle()
    assert partition.take(3) == ["a", "b", "c"]
    partition.put_nowait("quick")
    with pytest.raises(asyncio.QueueFull):
        partition.put_nowait("pushy")
    await asyncio.gather(*putters)
    assert partition.take(3) == ["quick", "patient 0", "patient 1"]


async def test_a_putter_that_is_cancelled_with_its_place_reserved_leaves_that_to_others():
    partition = Partition[str](0, capacity=2)
    partition.put_nowait("a")
    partition.put_nowait("b")
    putter = asyncio.create_task(partition.put("patient"))
    await settle()
    assert partition.take(2) == ["a", "b"]
    partition.put_nowait("quick")
    putter.cancel()
    await asyncio.wait([putter])
    partition.put_nowait("late")
    assert partition.take(2) == ["quick", "late"]
    assert partition.waiters is None


async def test_closing_sends_putters_away():
    partition = Partition[int](0, capacity=1)
    partition.put_nowait(0)
    putter = asyncio.create_task(partition.put(1))
    await settle()
    partition.close()
    assert isinstance(await outcome(putter), asyncio.QueueFull)
    with pytest.raises(asyncio.QueueFull):
        await partition.put(2)
    with pytest.raises(asyncio.QueueFull):
        partition.put_nowait(2)
    assert partition.take(10) == [0]
    assert partition.reserved == 0


async def test_as_many_getters_as_items_that_come_together():
    partition = Partition[int](0, capacity=10)
    getters = [asyncio.create_task(partition.get()) for _ in range(3)]
    await settle()
    assert partition.offer_many([1, 2, 3])
    assert not partition.offer_many(list(range(20)))
    assert [await getter for getter in getters] == [1, 2, 3]


@given(st.lists(st.one_of(st.integers(1, 6), st.tuples(st.just("take"), st.integers(1, 7)), st.just("evict"))))
def test_bulk_takes_against_a_plain_list(steps):
    partition, model = Partition[int](0, capacity=10), []
    number = removed = 0
    for step in steps:
        if isinstance(step, int):
            items = list(range(number, number + step))
            number += step
            fits = len(model) + step <= 10
            if step == 1:
                assert partition.offer(items[0]) == fits
            else:
                assert partition.offer_many(items) == fits
            model += items if fits else []
        elif step == "evict":
            if model:
                assert partition.evict() == model.pop(0)
                removed += 1
        else:
            taken, model = model[: step[1]], model[step[1] :]
            assert partition.take(step[1]) == taken
            removed += len(taken)
        assert (partition.qsize(), partition.removed, partition.room()) == (len(model), removed, 10 - len(model))
        assert partition.items() == model


def test_a_partition_keeps_no_item_that_was_taken():
    import gc
    import weakref

    class Thing: ...

    partition = Partition[Thing](0, capacity=10)
    things = [Thing() for _ in range(6)]
    references = [weakref.ref(thing) for thing in things]
    assert partition.offer_many(things)
    del things
    partition.take(2)
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, False, False, False, False]
