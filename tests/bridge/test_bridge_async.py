"""The `..._async` twins: a queue used from an event loop that is not its own."""

from __future__ import annotations

import asyncio

import pytest
from bridge_tools import PATIENCE, Held, assert_adds_up, fill, in_line, until

import batchqueue_async as bq

pytestmark = pytest.mark.real_time


@pytest.fixture
def bridge():
    with bq.SyncBridge() as bridge:
        yield bridge


async def ignore(batch):
    pass


async def line_has(queue, count):
    await asyncio.to_thread(until, lambda: in_line(queue) == count)


def full(bridge, **options):
    handler = Held()
    queue = bridge.get_or_create("full", bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1, **options))
    fill(queue, handler)
    queue.produce("second")
    return queue, handler


async def test_every_call_has_a_twin(bridge):
    handler, numbers = Held(held=False), Held(held=False)
    queue = bridge.get_or_create("q", bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(2)))
    await queue.add_handler_async(str, handler)
    await queue.add_handler_async(int, numbers, weight=2.0, timeout=PATIENCE)
    assert await queue.produce_async("a") is True
    assert await queue.produce_many_async(letter for letter in "bc") == 2
    await queue.deliver_async(["d", 1], timeout=PATIENCE)
    await queue.flush_async(timeout=PATIENCE)
    assert (handler.items, numbers.items) == (list("abcd"), [1])
    assert (await queue.stats_async(timeout=PATIENCE)).handled == 5
    report = await queue.shutdown_async(timeout=PATIENCE)
    assert report.handled == 5
    assert await queue.shutdown_async() is report
    assert await queue.produce_async("late") is False
    assert await queue.produce_many_async(["late"]) == 0
    stats = await queue.stats_async()
    assert stats.refused == 2
    assert_adds_up(stats)


async def test_timeouts_hold_and_nothing_stays_in_line(bridge):
    queue, handler = full(bridge)
    assert await queue.produce_async("late", timeout=0.001) is False
    assert await queue.produce_async("late", timeout=0) is False
    with pytest.raises(bq.PartlyAcceptedError) as caught:
        await queue.produce_many_async(["late", "later"], timeout=0.001)
    assert caught.value.accepted == 0
    for call in (queue.flush_async, lambda timeout: queue.deliver_async(["x"], timeout=timeout)):
        with pytest.raises(TimeoutError, match="took longer than"):
            await call(timeout=0.001)
    assert in_line(queue) == 0
    handler.open()
    await queue.flush_async(timeout=PATIENCE)


async def test_producers_wait_in_line_with_threads_first_come_first_served(bridge):
    queue, handler = full(bridge)
    tasks = []
    for number in range(6):
        if number % 2:
            call = queue.produce_async(number)
        elif number % 4:
            call = queue.produce_many_async([number])
        else:
            call = asyncio.to_thread(queue.produce, number)
        tasks.append(asyncio.create_task(call))
        await line_has(queue, number + 1)
    handler.open()
    assert all(await asyncio.gather(*tasks))
    await queue.flush_async(timeout=PATIENCE)
    assert handler.items == ["first", "second", *range(6)]


async def test_a_cancelled_producer_leaves_no_trace(bridge):
    queue, handler = full(bridge)
    tasks = [asyncio.create_task(queue.produce_async(number)) for number in range(4)]
    await line_has(queue, 4)
    tasks[0].cancel()
    tasks[2].cancel()
    assert [type(each) for each in await asyncio.gather(*tasks[::2], return_exceptions=True)] == [
        asyncio.CancelledError,
        asyncio.CancelledError,
    ]
    assert in_line(queue) == 2
    handler.open()
    assert await tasks[1]
    assert await tasks[3]
    await queue.flush_async(timeout=PATIENCE)
    assert handler.items == ["first", "second", 1, 3]
    assert_adds_up(await queue.stats_async())


async def test_a_producer_that_is_cancelled_as_it_is_served_hands_its_place_on(bridge):
    """Whatever comes first, its item is in and it returned True, or neither; and its place is not lost."""
    queue, handler = full(bridge)
    handler.open()
    accepted = []
    for number in range(300):
        task = asyncio.create_task(queue.produce_async(number))
        for _ in range(number % 7):
            await asyncio.sleep(0)
        task.cancel()
        try:
            if await task:
                accepted.append(number)
        except asyncio.CancelledError:
            pass
    assert await queue.produce_async("last", timeout=PATIENCE)
    await queue.flush_async(timeout=PATIENCE)
    assert handler.items == ["first", "second", *accepted, "last"]
    assert_adds_up(await queue.stats_async())


async def test_a_producer_whose_loop_is_closed_under_it_gives_up_its_place(bridge):
    queue, handler = full(bridge)

    def abandon():
        loop = asyncio.new_event_loop()
        task = loop.create_task(queue.produce_async("abandoned"))
        task._log_destroy_pending = False
        while in_line(queue) < 1:
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        return task

    task = await asyncio.to_thread(abandon)
    waiting = asyncio.create_task(queue.produce_async("next"))
    await line_has(queue, 2)
    handler.open()
    assert await waiting
    await queue.flush_async(timeout=PATIENCE)
    assert handler.items == ["first", "second", "next"]
    task.get_coro().close()


async def test_cancelling_a_flush_cancels_it_on_the_queues_loop(bridge):
    queue, handler = full(bridge)
    task = asyncio.create_task(queue.flush_async())
    worker = queue._queue._drains[0]
    await asyncio.to_thread(until, lambda: worker.hurry)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: not worker.hurry)
    handler.open()


async def test_close_releases_who_waits(bridge):
    queue, handler = full(bridge)
    tasks = [asyncio.create_task(queue.produce_async("x")), asyncio.create_task(queue.produce_many_async("yz"))]
    await line_has(queue, 2)
    closing = asyncio.create_task(queue.shutdown_async(0.001))
    assert await tasks[0] is False
    assert await tasks[1] == 0
    assert (await closing).undelivered == ["first", "second"]
    handler.open()


async def test_on_the_queues_own_loop_they_are_the_queues_own():
    handler = Held()
    async with bq.BatchQueueManager() as manager:
        own = manager.create("own", bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1))
        queue = own.bridge()
        await own.produce("first")
        await asyncio.to_thread(handler.wait_for_call)
        assert await queue.produce_async("second")
        assert await queue.produce_async("late", timeout=0.001) is False
        with pytest.raises(bq.PartlyAcceptedError):
            await queue.produce_many_async(["late"], timeout=0.001)
        with pytest.raises(TimeoutError):
            await queue.flush_async(timeout=0.001)
        with pytest.raises(TimeoutError):
            await queue.deliver_async(["x"], timeout=0.001)
        handler.open()
        await queue.flush_async(timeout=PATIENCE)
        assert (await queue.stats_async()).handled == 2
        await queue.shutdown_async()
    assert handler.items == ["first", "second"]


async def test_a_handler_that_would_wait_for_itself_is_told():
    told = []

    async def handle(batch):
        if batch == ["go"]:
            assert await queue.produce_async("fits")
            for call in (queue.produce_async("no room"), queue.produce_many_async(["no room"])):
                try:
                    await call
                except bq.DeadlockError as error:
                    told.append(str(error))

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("own", bq.QueueConfig(consumer=handle, buffer_size=1, max_batch=1)).bridge()
        await queue.deliver_async(["go"], timeout=PATIENCE)
    assert len(told) == 2
    assert all("own" in text for text in told)


async def test_block_timeout_holds_here_too(bridge):
    queue, handler = full(bridge, block_timeout=0.001)
    assert await queue.produce_async("late") is False
    assert await queue.produce_many_async(["late", "later"]) == 0
    handler.open()


@pytest.mark.parametrize("strategy", [bq.BufferStrategy.IF_POSSIBLE, bq.BufferStrategy.DROP_NEWEST])
async def test_where_nobody_waits_the_twins_do_not_either(bridge, strategy):
    queue, handler = full(bridge, strategy=strategy)
    assert await queue.produce_async("no room", timeout=PATIENCE) is False
    assert await queue.produce_many_async(["no", "room"], timeout=0) == 0
    handler.open()
