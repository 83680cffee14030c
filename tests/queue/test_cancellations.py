"""A cancelled call leaves no trace: each await of the public API, and the state left behind."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from queue_tools import Item, check, check_report, kinds, make, outcome

import batchqueue_async as bq
from batchqueue_async.queue.drain import DrainTask
from batchqueue_async.queue.limiter import CallLimiter
from batchqueue_async.queue.partition import Partition
from batchqueue_async.testing import RecordingErrorHandler, RecordingHandler, advance, settle


async def full(capacity: int = 2, **options):
    """A queue with "flying" in its held handler, and its partition full of "waiting"."""
    handler = RecordingHandler()
    handler.hold()
    queue = make(consumer=handler, buffer_size=capacity, max_batch=1, **options)
    assert queue.produce_nowait("flying")
    await settle()
    assert queue.produce_many_nowait(["waiting"] * capacity) == capacity
    return queue, handler


def no_trace(queue: bq.BatchQueue) -> None:
    check(queue)
    for partition in queue._router.partitions:
        assert not partition.waiters
        assert partition.reserved == 0
        assert not partition.ranges
    assert not any(worker.waits.all() for worker in queue._drains)


async def rest(queue, handler) -> list:
    handler.release()
    await queue.flush(timeout=10)
    no_trace(queue)
    return handler.handled


# --- produce


async def test_cancel_produce_in_line():
    queue, handler = await full()
    tasks = [asyncio.create_task(queue.produce(number)) for number in range(5)]
    await settle()
    assert check(queue).partitions[0].waiting == 5
    for number in (0, 2, 4):
        tasks[number].cancel()
    await settle()
    stats = check(queue)
    assert stats.partitions[0].waiting == 2
    assert (stats.accepted, stats.refused) == (3, 0)  # a cancelled call is no attempt
    handler.release()
    assert [await outcome(task) for task in tasks] == ["cancelled", True, "cancelled", True, "cancelled"]
    assert await rest(queue, handler) == ["flying", "waiting", "waiting", 1, 3]


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("cancelled", [0, 1])
async def test_cancel_produce_at_every_moment_around_its_grant(turns, cancelled):
    queue, handler = await full(capacity=1)
    tasks = [asyncio.create_task(queue.produce(number)) for number in range(3)]
    await settle()
    handler.release()
    for _ in range(turns):
        await asyncio.sleep(0)
    tasks[cancelled].cancel()
    results = [await outcome(task) for task in tasks]
    assert results[cancelled] in {True, "cancelled"}
    accepted = [number for number, result in enumerate(results) if result is True]
    assert len(accepted) >= 2
    assert await rest(queue, handler) == ["flying", "waiting", *accepted]


async def test_cancel_produce_with_its_permit_in_hand_serves_the_next():
    queue, _handler = await full(capacity=1)
    first, second = (asyncio.create_task(queue.produce(number)) for number in range(2))
    await settle()
    partition = queue._router.partitions[0]
    queue._drains[0].partitions[0].take(1)  # a place comes free, and the grant reaches the first one...
    assert partition.reserved == 1
    first.cancel()  # ...which is cancelled before it can run
    assert await outcome(first) == "cancelled"
    assert await second is True
    assert partition.reserved == 0
    assert partition.qsize() == 1


async def test_cancel_produce_beside_a_block_timeout():
    queue, handler = await full(block_timeout=5.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await queue.produce("late")
    no_trace(queue)
    await advance(10)
    assert check(queue).refused == 0
    assert await rest(queue, handler) == ["flying", "waiting", "waiting"]


async def test_cancel_produce_inside_a_handler():
    """The timeout of a handler that waits for another queue takes the waiting call with it."""
    target, held = await full()
    on_error = RecordingErrorHandler()

    async def forward(batch: list[str]) -> None:
        await target.produce(batch[0])

    source = make(consumer=forward, handler_timeout=1.0, on_error=on_error)
    assert await source.produce("x")
    await advance(1.0)
    ((items, error),) = on_error.failures
    assert (items, type(error)) == (["x"], TimeoutError)
    no_trace(source)
    assert await rest(target, held) == ["flying", "waiting", "waiting"]


# --- produce_many


async def test_cancel_produce_many_partly_in():
    queue, handler = await full()
    many = asyncio.create_task(queue.produce_many(range(10)))
    next_in_line = asyncio.create_task(queue.produce("next"))
    await settle()
    handler.delay = 1.0
    handler.release()
    await advance(2.5)
    many.cancel()
    assert await outcome(many) == "cancelled"
    handler.delay = 0.0
    assert await next_in_line
    handled = await rest(queue, handler)
    into = handled[3:-1]
    assert 0 < len(into) < 10
    assert handled == ["flying", "waiting", "waiting", *range(len(into)), "next"]  # a prefix, in order
    stats = check(queue)
    assert (stats.accepted, stats.refused) == (4 + len(into), 0)


@pytest.mark.parametrize("turns", range(16))
async def test_cancel_produce_many_at_every_moment_around_its_grants(turns):
    queue, handler = await full(capacity=2)
    many = asyncio.create_task(queue.produce_many(range(6)))
    single = asyncio.create_task(queue.produce("single"))
    await settle()
    handler.release()
    for _ in range(turns):
        await asyncio.sleep(0)
    many.cancel()
    result = await outcome(many)
    assert result in {6, "cancelled"}
    assert await single
    handled = await rest(queue, handler)
    into = handled[3:-1]
    assert handled == ["flying", "waiting", "waiting", *range(len(into)), "single"]
    if result == 6:
        assert len(into) == 6


async def test_cancel_produce_many_over_types():
    first, second = kinds(2)
    handler = RecordingHandler[Item]()
    handler.hold()
    queue = make(partitions=bq.PartitionPolicy.fixed(2), buffer_size=2, max_batch=1)
    queue.add_handler(Item, handler)
    items = [kind(number) for number in range(10) for kind in (first, second)]
    many = asyncio.create_task(queue.produce_many(items))
    await settle()
    many.cancel()
    assert await outcome(many) == "cancelled"
    accepted = check(queue).accepted
    handled = await rest(queue, handler)
    assert sorted(handled, key=items.index) == items[:accepted]


# --- deliver, flush


async def test_cancel_deliver_while_it_waits_for_room():
    queue, handler = await full()
    delivery = asyncio.create_task(queue.deliver(range(5)))
    await settle()
    delivery.cancel()
    assert await outcome(delivery) == "cancelled"
    assert await rest(queue, handler) == ["flying", "waiting", "waiting"]


async def test_cancel_deliver_while_its_items_are_handled():
    handler = RecordingHandler[int](delay=1.0, fail=lambda batch: ValueError() if 2 in batch else None)
    queue = make(consumer=handler, max_batch=2, partitions=bq.PartitionPolicy.fixed(2))
    one = asyncio.create_task(queue.deliver(range(6)))
    other = asyncio.create_task(queue.deliver(range(10, 13)))
    await advance(0.5)
    one.cancel()
    assert await outcome(one) == "cancelled"
    assert handler.cancelled == 0
    with contextlib.suppress(bq.DeliveryError):  # one of its items may share a batch with the failing one
        await other
    await queue.flush(timeout=100)
    assert sorted(handler.items) == [*range(6), *range(10, 13)]  # nothing is taken back
    no_trace(queue)


async def test_cancel_deliver_whose_items_are_moving():
    handler = RecordingHandler[Item]()
    handler.hold()
    queue = make(partitions=bq.PartitionPolicy.adaptive(), max_batch=1)
    queue.add_handler(Item, handler)
    many = kinds(12)
    assert await queue.produce_many([kind(0) for kind in many]) == 12
    await settle()
    for kind in many:
        queue.add_handler(kind, handler)
    delivery = asyncio.create_task(queue.deliver([kind(1) for kind in many]))
    flush = asyncio.create_task(queue.flush())
    await settle()
    assert any(migration.ranges for migration in queue._router.migrations)
    delivery.cancel()
    flush.cancel()
    assert (await outcome(delivery), await outcome(flush)) == ("cancelled", "cancelled")
    assert not any(migration.ranges for migration in queue._router.migrations)
    assert len(await rest(queue, handler)) == 24


async def test_cancel_flush():
    queue, handler = await full(linger=0.0)
    flushes = [asyncio.create_task(queue.flush()) for _ in range(3)]
    await settle()
    flushes[1].cancel()
    assert await outcome(flushes[1]) == "cancelled"
    assert all(worker.hurry == 2 for worker in queue._drains)
    assert await rest(queue, handler) == ["flying", "waiting", "waiting"]
    assert [await outcome(flushes[0]), await outcome(flushes[2])] == [None, None]
    assert all(worker.hurry == 0 for worker in queue._drains)


async def test_cancel_flush_lets_batches_linger_again():
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, linger=5.0)
    assert await queue.produce(1)
    flush = asyncio.create_task(queue.flush())
    await asyncio.sleep(0)
    flush.cancel()
    await outcome(flush)
    await queue.flush(timeout=10)
    assert await queue.produce(2)
    await advance(4.9)
    assert handler.handled == [1]
    await advance(0.1)
    assert handler.handled == [1, 2]


# --- shutdown


async def test_cancel_one_of_several_callers_of_shutdown():
    queue, handler = await full()
    callers = [asyncio.create_task(queue.shutdown()) for _ in range(3)]
    await settle()
    callers[0].cancel()  # the one who started it
    assert await outcome(callers[0]) == "cancelled"
    assert queue.closed
    handler.release()
    reports = [await callers[1], await callers[2], await queue.shutdown()]
    assert reports[0] is reports[1] is reports[2]
    assert (reports[0].handled, reports[0].undelivered) == (3, [])
    assert handler.cancelled == 0


async def test_cancel_the_only_caller_of_shutdown():
    queue, _handler = await full()
    caller = asyncio.create_task(queue.shutdown(timeout=5.0))
    await settle()
    caller.cancel()
    assert await outcome(caller) == "cancelled"
    await advance(6.0)  # it goes on by itself, with its deadline
    report = await queue.shutdown()
    assert report.undelivered == ["flying", "waiting", "waiting"]
    check_report(report)
    check(queue)


async def test_cancel_shutdown_all_and_ask_again():
    async with bq.BatchQueueManager() as manager:
        handlers = [RecordingHandler[int]() for _ in range(2)]
        for name, handler in zip("ab", handlers, strict=True):
            handler.hold()
            assert await manager.create(name, bq.QueueConfig(consumer=handler)).produce(1)
        caller = asyncio.create_task(manager.shutdown_all())
        await settle()
        caller.cancel()
        assert await outcome(caller) == "cancelled"
        assert manager.names() == ["a", "b"]
        for handler in handlers:
            handler.release()
        reports = await manager.shutdown_all()
        assert {name: report.handled for name, report in reports.items()} == {"a": 1, "b": 1}
        assert manager.names() == []


# --- the parts


class StubDispatch:
    """No queue is needed to test who has a turn."""

    def wants_idle(self) -> bool:
        return False


def worker(index: int = 0) -> DrainTask:
    return DrainTask(index, rules=None, dispatch=StubDispatch(), latency=None, loop=asyncio.get_running_loop())


async def test_cancel_turns_enter_in_line():
    turns = CallLimiter(1)
    workers = [worker(index) for index in range(4)]
    await turns.enter(workers[0])
    tasks = [asyncio.create_task(turns.enter(each)) for each in workers[1:]]
    await settle()
    tasks[0].cancel()
    tasks[2].cancel()
    await settle()
    assert [each for each, _ in turns.waiting] == [workers[2]]
    assert not workers[1].waits.all()
    turns.leave(workers[0])
    assert await outcome(tasks[1]) is None
    assert turns.holders == [workers[2]]
    turns.leave(workers[2])
    assert turns.idle


async def test_cancel_turns_enter_together_with_its_turn():
    turns = CallLimiter(1)
    first, second, third = (worker(index) for index in range(3))
    await turns.enter(first)
    tasks = [asyncio.create_task(turns.enter(each)) for each in (second, third)]
    await settle()
    turns.leave(first)  # the turn is the second's...
    tasks[0].cancel()  # ...which is cancelled before it knows
    assert await outcome(tasks[0]) == "cancelled"
    assert await outcome(tasks[1]) is None
    assert turns.holders == [third]


async def test_cancel_partition_put():
    partition = Partition[int](0, capacity=1)
    partition.put_nowait(0)
    putters = [asyncio.create_task(partition.put(number)) for number in range(1, 4)]
    await settle()
    putters[0].cancel()
    await settle()
    assert partition.get_nowait() == 0
    assert partition.reserved == 1
    putters[1].cancel()  # with the permit in hand
    await settle()
    assert [await outcome(putter) for putter in putters] == ["cancelled", "cancelled", None]
    assert (await partition.get(), partition.reserved, partition.empty()) == (3, 0, True)


async def test_cancel_partition_get():
    partition = Partition[int](0, capacity=5)
    getters = [asyncio.create_task(partition.get()) for _ in range(3)]
    await settle()
    getters[0].cancel()
    await settle()
    partition.put_nowait(1)
    getters[1].cancel()  # woken by the item, and cancelled before it runs
    await settle()
    assert [await outcome(getter) for getter in getters] == ["cancelled", "cancelled", 1]
