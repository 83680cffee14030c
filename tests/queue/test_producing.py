"""The way in: strategies, waiting in line, and many items at once."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from queue_tools import Item, check, kinds_by_home, make, now

import batchqueue_async as bq
from batchqueue_async.testing import RecordingHandler, advance, settle

STRATEGY = bq.BufferStrategy


def held(**options):
    """A queue whose handler is held, and the handler."""
    handler = RecordingHandler()
    handler.hold()
    return make(consumer=handler, **options), handler


async def filled(capacity: int = 3, **options):
    """A queue with one item in flight (0) and its only partition full (1, 2, 3...)."""
    queue, handler = held(buffer_size=capacity, max_batch=1, **options)
    assert queue.produce_nowait(0)
    await settle()
    assert queue.produce_many_nowait(range(1, capacity + 1)) == capacity
    return queue, handler


# --- strategies


async def test_blocking_waits_for_room_and_nowait_does_not():
    queue, handler = await filled()
    assert not queue.produce_nowait("refused")
    task = asyncio.create_task(queue.produce("late"))
    await advance(3600)
    assert not task.done()
    handler.release()
    assert await task
    await queue.flush(timeout=1)
    assert handler.handled == [0, 1, 2, 3, "late"]
    stats = check(queue)
    assert (stats.accepted, stats.refused, stats.dropped) == (5, 1, 0)


async def test_block_timeout_refuses_at_its_exact_time():
    queue, _ = await filled(block_timeout=1.5)
    assert not await queue.produce("late")
    assert now() == 1.5
    assert await queue.produce_many(["late", "later"]) == 0
    assert now() == 3.0
    with pytest.raises(bq.DeliveryError, match="1 of 1 items"):
        await queue.deliver(["late"])
    assert now() == 4.5
    assert check(queue).refused == 4


async def test_block_timeout_ends_a_produce_many_with_the_number_that_came_in():
    queue, handler = await filled(block_timeout=2.0)
    handler.delay = 1.5
    handler.release()
    assert await queue.produce_many(list(range(4, 20))) == 1
    assert now() == 2.0
    await queue.flush(timeout=100)
    assert handler.handled == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("turns", range(10))
async def test_block_timeout_holds_when_it_passes_as_a_place_comes_free(turns):
    """The timer may fire between the granting of a place and the producer's next step; it must not be lost."""
    queue, handler = await filled(block_timeout=1e-17)
    await advance(1.0)  # from here on that timeout is below the clock's resolution: it has passed one turn later
    handler.delay = lambda batch: 0.0 if batch == [0] else 100.0
    handler.release()
    for _ in range(turns):
        await asyncio.sleep(0)
    many = asyncio.create_task(queue.produce_many(list(range(4, 20))))
    await settle()
    assert many.done(), "produce_many waits beyond its block_timeout"
    assert check(queue).refused == 16 - many.result()


async def test_if_possible_refuses_at_once():
    queue, handler = await filled(strategy=STRATEGY.IF_POSSIBLE)
    assert not await queue.produce("x")
    assert not queue.produce_nowait("x")
    assert await queue.produce_many(["x", "y"]) == 0
    assert queue.produce_many_nowait(["x", "y"]) == 0
    stats = check(queue)
    assert (stats.refused, stats.dropped, now()) == (6, 0, 0.0)
    handler.release()
    await queue.flush(timeout=1)
    assert handler.handled == [0, 1, 2, 3]


async def test_drop_oldest_makes_room_for_the_newest():
    queue, handler = await filled(strategy=STRATEGY.DROP_OLDEST)
    assert await queue.produce(4)
    assert queue.produce_nowait(5)
    assert await queue.produce_many([6, 7]) == 2
    stats = check(queue)
    assert (stats.accepted, stats.dropped_after, stats.refused, stats.used) == (8, 4, 0, 3)
    handler.release()
    await queue.flush(timeout=1)
    assert handler.handled == [0, 5, 6, 7]


async def test_drop_oldest_takes_more_at_once_than_there_is_room():
    queue, handler = await filled(strategy=STRATEGY.DROP_OLDEST)
    assert queue.produce_many_nowait(list(range(4, 14))) == 10
    handler.release()
    await queue.flush(timeout=1)
    assert handler.handled == [0, 11, 12, 13]
    assert check(queue).dropped_after == 10


async def test_drop_newest_drops_and_counts():
    queue, handler = await filled(strategy=STRATEGY.DROP_NEWEST)
    assert not await queue.produce(4)
    assert not queue.produce_nowait(5)
    assert await queue.produce_many([6, 7]) == 0
    stats = check(queue)
    assert (stats.accepted, stats.dropped_before, stats.dropped_after, stats.refused) == (4, 4, 0, 0)
    handler.release()
    await queue.flush(timeout=1)
    assert handler.handled == [0, 1, 2, 3]


@pytest.mark.parametrize("strategy", list(STRATEGY))
async def test_after_close_everything_is_refused(strategy):
    queue, handler = held(strategy=strategy)
    await queue.shutdown()
    assert not await queue.produce(1)
    assert not queue.produce_nowait(1)
    assert await queue.produce_many([1, 2]) == 0
    assert queue.produce_many_nowait([1, 2]) == 0
    with pytest.raises(bq.DeliveryError) as caught:
        await queue.deliver([1])
    assert isinstance(caught.value.failures[0].error, bq.QueueClosedError)
    await queue.flush()
    stats = check(queue)
    assert (stats.refused, stats.dropped, handler.calls) == (7, 0, 0)
    assert queue.closed


# --- in line


async def test_waiting_producers_are_served_in_order():
    queue, handler = await filled()
    order: list[int] = []

    async def produce(number: int) -> None:
        assert await queue.produce(number)
        order.append(number)

    tasks = [asyncio.create_task(produce(number)) for number in range(4, 24)]
    await settle()
    handler.release()
    await asyncio.gather(*tasks)
    await queue.flush(timeout=1)
    assert handler.handled == list(range(24))
    assert order == list(range(4, 24))


async def test_a_large_produce_many_does_not_let_others_pass():
    queue, handler = await filled()
    first = asyncio.create_task(queue.produce_many(["a"] * 10))
    await asyncio.sleep(0)
    second = asyncio.create_task(queue.produce("b"))
    await settle()
    handler.release()
    assert (await first, await second) == (10, True)
    await queue.flush(timeout=1)
    assert handler.handled == [0, 1, 2, 3, *["a"] * 10, "b"]


@pytest.mark.parametrize("partitions", [2, 3, 4])
@pytest.mark.parametrize("selector", ["round_robin", "own"])
async def test_waiting_in_line_where_the_selector_never_gives_the_same_answer_twice(partitions, selector):
    turns = itertools.count()
    handler = RecordingHandler[int](delay=0.01)
    queue = make(
        consumer=handler,
        partitions=bq.PartitionPolicy.fixed(partitions),
        selector=bq.round_robin() if selector == "round_robin" else lambda item, count: next(turns) % count,
        buffer_size=2,
        max_batch=1,
    )

    async def produce(first: int) -> None:
        for number in range(first, first + 20):
            assert await queue.produce(number)

    await asyncio.gather(*(produce(first) for first in range(0, 160, 20)), queue.produce_many(range(160, 200)))
    await queue.flush(timeout=100)
    assert sorted(handler.handled) == list(range(200))
    check(queue)


# --- many at once


@pytest.mark.parametrize("nowait", [True, False])
@pytest.mark.parametrize("iterable", [list, tuple, iter, range])
async def test_produce_many_takes_any_iterable(nowait, iterable):
    handler = RecordingHandler[int]()
    queue = make(consumer=handler)
    items = range(5) if iterable is range else iterable(range(5))
    assert (queue.produce_many_nowait(items) if nowait else await queue.produce_many(items)) == 5
    assert await queue.produce_many([]) == 0
    assert queue.produce_many_nowait(()) == 0
    await queue.flush(timeout=1)
    assert handler.handled == [0, 1, 2, 3, 4]


async def test_produce_many_does_not_keep_the_callers_list():
    handler = RecordingHandler[int]()
    queue = make(consumer=handler)
    items = [1, 2, 3]
    await queue.produce_many(items)
    items.clear()
    await queue.flush(timeout=1)
    assert handler.handled == [1, 2, 3]


async def test_produce_many_nowait_takes_a_prefix():
    queue, handler = held(buffer_size=3)
    assert queue.produce_many_nowait("abcdef") == 3
    assert check(queue).refused == 3
    handler.release()
    await queue.flush(timeout=1)
    assert handler.handled == ["a", "b", "c"]


async def test_produce_many_over_types_takes_a_prefix():
    """The first item without a place ends it, even if a later one would have one."""
    first, second = kinds_by_home(2)
    handler = RecordingHandler[Item]()
    handler.hold()
    queue = make(partitions=bq.PartitionPolicy.fixed(2), buffer_size=2)
    queue.add_handler(Item, handler)
    items = [first(0), second(1), first(2), first(3), second(4)]
    assert queue.produce_many_nowait(items) == 3
    rest = asyncio.create_task(queue.produce_many(items[3:]))
    handler.release()
    assert await rest == 2
    await queue.flush(timeout=1)
    assert sorted(item.number for item in handler.handled) == [0, 1, 2, 3, 4]
    assert [item.number for item in handler.handled if type(item) is first] == [0, 2, 3]


@pytest.mark.parametrize("prepared", ["empty", "listed", "some full"])
@pytest.mark.parametrize("selector", [bq.type_hash(), bq.round_robin(), bq.by_key(lambda item: item.number)])
async def test_produce_many_over_several_partitions(prepared, selector):
    types = kinds_by_home(4)
    handler = RecordingHandler[Item]()
    queue = make(partitions=bq.PartitionPolicy.fixed(4), selector=selector, buffer_size=30)
    queue.add_handler(Item, handler)
    before = {"empty": 0, "listed": 8, "some full": 60}[prepared]
    assert await queue.produce_many([types[number % 4](number) for number in range(before)]) == before
    if prepared == "some full":
        assert await queue.produce_many([types[0](number) for number in range(before, 100)]) == 100 - before
        before = 100
    assert await queue.produce_many([types[number % 4](number) for number in range(before, before + 40)]) == 40
    check(queue)
    await queue.flush(timeout=1)
    assert sorted(item.number for item in handler.handled) == list(range(before + 40))
    if isinstance(selector, type(bq.type_hash())):
        for kind in types:
            mine = [item.number for item in handler.handled if type(item) is kind]
            assert mine == sorted(mine)


async def test_a_selector_that_gives_no_partition_is_a_config_error():
    queue = make(selector=lambda item, count: item, partitions=bq.PartitionPolicy.fixed(2))
    for answer in (2, -1):
        with pytest.raises(bq.ConfigError, match=rf"queue 'q': selector=.* gave {answer} for 2 partitions; .* 0 to 1"):
            queue.produce_nowait(answer)
    assert check(queue).accepted == 0


# --- deliver and flush


async def test_deliver_returns_when_its_items_are_handled():
    handler = RecordingHandler[int](delay=1.0)
    queue = make(consumer=handler, max_batch=2)
    await queue.deliver([1, 2, 3, 4, 5])
    assert now() == 3.0
    assert handler.handled == [1, 2, 3, 4, 5]
    await queue.deliver([])
    await queue.deliver(iter([6]))
    assert now() == 4.0


async def test_deliver_says_which_items_failed_and_why():
    error = ValueError("no")
    first, second, third = kinds_by_home(3)
    handler = RecordingHandler[Item](fail=lambda batch: error if batch[0].number >= 4 else None)
    queue = make(partitions=bq.PartitionPolicy.fixed(3), max_batch=2)
    queue.add_handler(first, handler)
    queue.add_handler(second, handler)
    items = [*map(first, range(8)), second(0), third(0), third(1)]
    with pytest.raises(bq.DeliveryError, match=r"queue 'q': 6 of 11 items were not handled") as caught:
        await queue.deliver(items)
    failures = {failure.error: list(failure.items) for failure in caught.value.failures}
    assert failures.pop(error) == items[4:8]
    ((unhandled, left),) = failures.items()
    assert isinstance(unhandled, bq.UnhandledTypeError)
    assert left == items[9:]


async def test_deliver_of_one_caller_says_nothing_of_anothers_items():
    handler = RecordingHandler[int](fail=lambda batch: ValueError() if 7 in batch else None)
    queue = make(consumer=handler, max_batch=1)
    results = await asyncio.gather(
        queue.deliver([1, 2]), queue.deliver([7, 8]), queue.deliver([9]), return_exceptions=True
    )
    assert results[0] is None
    assert results[2] is None
    assert [failure.items for failure in results[1].failures] == [(7,)]


@pytest.mark.parametrize("strategy", [STRATEGY.IF_POSSIBLE, STRATEGY.DROP_NEWEST])
async def test_deliver_without_room_says_so(strategy):
    queue, _ = await filled(strategy=strategy)
    with pytest.raises(bq.DeliveryError) as caught:
        await queue.deliver([4, 5])
    ((items, error),) = caught.value.failures
    assert items == (4, 5)
    assert isinstance(error, bq.ItemDroppedError)
    assert strategy.name in str(error)


async def test_deliver_whose_items_make_room_for_newer_ones_says_so():
    queue, handler = await filled(strategy=STRATEGY.DROP_OLDEST)
    delivery = asyncio.create_task(queue.deliver([4, 5]))
    await settle()
    assert queue.produce_nowait(6)  # drops 3
    assert queue.produce_nowait(7)  # drops 4
    handler.release()
    with pytest.raises(bq.DeliveryError) as caught:
        await delivery
    ((items, error),) = caught.value.failures
    assert items == (4,)
    assert isinstance(error, bq.ItemDroppedError)
    await queue.flush(timeout=1)
    assert handler.handled == [0, 5, 6, 7]


async def test_deliver_waits_for_room_under_blocking():
    queue, handler = await filled()
    delivery = asyncio.create_task(queue.deliver(list(range(4, 20))))
    await settle()
    assert not delivery.done()
    handler.release()
    await delivery
    assert handler.handled == list(range(20))


async def test_deliver_over_several_partitions_waits_for_all():
    types = kinds_by_home(3)
    handler = RecordingHandler[Item](delay=lambda batch: 1.0 + batch[0].number)
    queue = make(partitions=bq.PartitionPolicy.fixed(3), workers=bq.WorkerPolicy.fixed(3))
    for kind in types:
        queue.add_handler(kind, handler)
    await queue.deliver([kind(number) for number, kind in enumerate(types)])
    assert now() == 3.0
