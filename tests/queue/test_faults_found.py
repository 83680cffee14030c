"""Faults that the model, the seeds or a hostile reading found in the in-memory queue; each stays as a named test."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import batchqueue_async as bq
from batchqueue_async.testing import RecordingHandler, advance, settle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def manager() -> AsyncIterator[bq.BatchQueueManager]:
    async with bq.BatchQueueManager() as manager:
        yield manager


# -- lingering -------------------------------------------------------------------------------------------------------


async def test_a_batch_that_the_fast_path_fills_leaves_at_once(manager):
    handler = RecordingHandler[int]()
    queue = manager.create("q", bq.QueueConfig(consumer=handler, linger=10.0, max_batch=5))
    for item in range(5):
        assert queue.produce_nowait(item)
        await settle()
    assert handler.batches == [[0, 1, 2, 3, 4]]


async def test_a_partition_that_is_full_before_the_batch_does_not_linger(manager):
    handler = RecordingHandler[int]()
    queue = manager.create("q", bq.QueueConfig(consumer=handler, linger=10.0, max_batch=50, buffer_size=4))
    for item in range(4):
        assert queue.produce_nowait(item)
        await settle()
    assert handler.batches == [[0, 1, 2, 3]]


async def test_a_batch_spread_over_partitions_leaves_when_it_is_full(manager):
    handler = RecordingHandler[int]()
    config = bq.QueueConfig(
        consumer=handler, linger=10.0, max_batch=10, partitions=bq.PartitionPolicy.fixed(3), selector=lambda i, n: i % 3
    )
    queue = manager.create("q", config)
    for item in [0, 0, 0, 1, 1, 1, 1, 0, 2, 2]:
        assert queue.produce_nowait(item)
        await settle()
    assert len(handler.items) == 10


# -- waiting for room ------------------------------------------------------------------------------------------------


async def test_block_timeout_holds_for_the_rest_after_a_partial_grant(manager):
    handler = RecordingHandler[int](delay=10.0)
    config = bq.QueueConfig(consumer=handler, buffer_size=2, max_batch=1, block_timeout=1.0)
    queue = manager.create("q", config)
    await queue.produce(0)
    await settle()  # one in the handler
    assert queue.produce_many_nowait([1, 2]) == 2
    loop = asyncio.get_running_loop()
    many = asyncio.create_task(queue.produce_many([3, 4, 5]))
    await settle()
    # The line gets one place in the same turn of the loop in which its time is over.
    loop.call_at(loop.time() + 1.0, queue._placement.partitions[0].take, 1)
    await advance(1.0)
    await settle()
    assert many.done()
    assert await many <= 1
    queue._tally.handled += 1  # the item that this test took


async def test_a_waiting_producer_keeps_its_place_under_round_robin(manager):
    handler = RecordingHandler[int]()
    handler.hold()
    partitions = bq.PartitionPolicy.fixed(2)
    queue = manager.create("q", bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1, partitions=partitions))
    producers = [asyncio.create_task(queue.produce(item)) for item in range(9)]
    await settle()
    lines = [[waiter.item for waiter in each.waiters] for each in queue._placement.partitions]
    assert all(len(line) > 1 for line in lines)
    handler.release()
    await asyncio.gather(*producers)
    await queue.flush()
    assert [[item for item in handler.items if item in line] for line in lines] == lines


async def test_a_selector_is_asked_once_for_an_item_that_waits(manager):
    asked: list[int] = []

    def select(item: int, count: int) -> int:
        asked.append(item)
        return item % count

    handler = RecordingHandler[int]()
    handler.hold()
    partitions = bq.PartitionPolicy.fixed(2)
    queue = manager.create(
        "q", bq.QueueConfig(consumer=handler, buffer_size=1, partitions=partitions, selector=select, max_batch=1)
    )
    producers = [asyncio.create_task(queue.produce(item)) for item in range(6)]
    await settle()
    handler.release()
    await asyncio.gather(*producers)
    assert asked == [0, 1, 2, 3, 4, 5]


# Two types that share a partition of two and part at three.
def _types_that_part(now: int, then: int) -> tuple[type, type]:
    kinds = [type(f"Kind{number}", (int,), {"__module__": "tests"}) for number in range(500)]
    select = bq.type_hash()
    stays = next(kind for kind in kinds if select(kind(), now) == select(kind(), then))
    moves = next(kind for kind in kinds if select(kind(), now) == select(stays(), now) and select(kind(), then) >= now)
    return stays, moves


@pytest.mark.parametrize("strategy", ["by type", "by key"])
async def test_growth_leads_waiting_producers_to_their_new_partition(manager, strategy):
    stays, moves = _types_that_part(1, 2)
    selector = bq.type_hash() if strategy == "by type" else bq.by_key(lambda item: int(type(item) is moves))
    config = bq.QueueConfig(buffer_size=2, partitions=bq.PartitionPolicy.adaptive(), selector=selector)
    queue = manager.create("q", config)
    hung, free = RecordingHandler[Any](), RecordingHandler[Any]()
    hung.hold()
    queue.add_handler(stays, hung)
    assert queue.partition_count == 1
    await queue.produce(stays(0))
    await settle()
    await queue.produce_many([stays(1), stays(2)])
    first = asyncio.create_task(queue.produce(moves(1)))
    second = asyncio.create_task(queue.produce(moves(2)))
    await settle()
    queue.add_handler(moves, free)
    assert queue.partition_count == 2
    assert not queue.produce_nowait(moves(3)), "a later item passed those that wait"
    await settle()
    assert first.done(), "waits for a partition that its type has left"
    assert second.done()
    hung.release()
    await queue.flush()
    assert free.items == [1, 2]
