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
    loop.call_at(loop.time() + 1.0, queue._router.partitions[0].take, 1)
    await advance(1.0)
    await settle()
    assert many.done()
    assert await many <= 1
    queue._counters.handled += 1  # the item that this test took


async def test_a_waiting_producer_keeps_its_place_under_round_robin(manager):
    handler = RecordingHandler[int]()
    handler.hold()
    partitions = bq.PartitionPolicy.fixed(2)
    queue = manager.create("q", bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1, partitions=partitions))
    producers = [asyncio.create_task(queue.produce(item)) for item in range(9)]
    await settle()
    lines = [[waiter.item for waiter in each.everyone_waiting()] for each in queue._router.partitions]
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


# -- deadlocks: found where they are, and only there -----------------------------------------------------------------


class Base:
    def __init__(self, number: int = 0) -> None:
        self.number = number


class Left(Base):
    pass


class Right(Base):
    pass


def _by_side(item: Base, count: int) -> int:
    return int(isinstance(item, Right)) % count


def _two_sides(manager: bq.BatchQueueManager, **options: Any) -> bq.BatchQueue[Base]:
    """A queue whose `Left` items are worker 0's and whose `Right` items are worker 1's."""
    config = bq.QueueConfig(
        workers=bq.WorkerPolicy.fixed(2), partitions=bq.PartitionPolicy.fixed(2), selector=_by_side, **options
    )
    return manager.create("sides", config)


async def test_a_granted_place_is_not_taken_for_a_deadlock(manager):
    queue = _two_sides(manager, buffer_size=1, max_batch=1)
    gate = asyncio.Event()
    outcome: list[object] = []

    async def base(batch: list[Base]) -> None:
        for item in batch:
            if isinstance(item, Left):
                try:
                    outcome.append(await queue.produce(Right(3)))
                except bq.DeadlockError as error:
                    outcome.append(error)
                await asyncio.sleep(0.1)

    class Other(Right):
        pass

    async def other(batch: list[Other]) -> None:
        await gate.wait()

    queue.add_handler(Base, base)
    queue.add_handler(Other, other)
    await queue.produce(Other())
    await settle()  # worker 1 is in `other`
    await queue.produce(Right(1))  # its partition is full
    await queue.produce(Left())
    await settle()  # worker 0 is in `base`, and waits there for a place behind Right(1)
    gate.set()  # worker 1 takes Right(1), which grants the place, and waits for its turn at `base`
    await queue.flush(timeout=10)
    assert outcome == [True]


async def test_a_granted_turn_is_not_taken_for_a_deadlock(manager):
    queue = _two_sides(manager, buffer_size=1, max_batch=1)
    first, outcome = asyncio.Event(), []

    class Other(Left):
        pass

    async def base(batch: list[Base]) -> None:
        if batch[0].number == 1:
            await first.wait()

    async def other(batch: list[Other]) -> None:
        await first.wait()
        try:
            outcome.append(await queue.produce(Right(3)))
        except bq.DeadlockError as error:
            outcome.append(error)

    third = manager.create("third", bq.QueueConfig(buffer_size=1))
    third.add_handler(Other, other)
    queue.add_handler(Base, base)
    await queue.produce(Left(1))
    await settle()  # worker 0 is in `base`
    await queue.produce(Right(2))
    await settle()  # worker 1 has taken it and waits for its turn
    await queue.produce(Right(9))  # partition 1 is full
    await third.produce(Other())
    await settle()
    first.set()  # worker 0 leaves: worker 1 has the turn, and has not run yet when `other` produces
    await queue.flush(timeout=10)
    await third.flush(timeout=10)
    assert outcome == [True]


async def test_a_hand_over_does_not_make_a_handler_wait_for_itself(manager):
    class Mover:
        wanted: list[int] | None = None

        def assign(self, throughput: Any, owners: Any, workers: int) -> list[int] | None:
            return self.wanted

    mover = Mover()
    queue = _two_sides(manager, buffer_size=1, max_batch=1, balancer=mover)
    held = RecordingHandler[Any](delay=5.0)
    outcome: list[object] = []

    async def left(batch: list[Left]) -> None:
        outcome.append(await queue.produce(Right(3)))

    queue.add_handler(Left, left)
    queue.add_handler(Right, held)
    await queue.produce(Right(1))
    await settle()
    await queue.produce(Right(2))
    await queue.produce(Left())
    await settle()
    mover.wanted = [0, 0]
    queue._rebalancer.look()  # what worker 0's handler waits for would become worker 0's own
    await queue.flush(timeout=60)
    assert outcome == [True]
    await queue.flush(timeout=60)
    assert len(held.items) == 3


@pytest.mark.parametrize("call", ["produce", "flush", "deliver", "shutdown"])
async def test_on_idle_that_waits_for_its_own_queue_gets_an_error(manager, call):
    outcome: list[BaseException] = []

    class Idler(RecordingHandler[int]):
        async def on_idle(self) -> None:
            if outcome:
                return
            queue.produce_nowait(1)
            try:
                if call == "produce":
                    await queue.produce(2)
                elif call == "deliver":
                    await queue.deliver([3])
                else:
                    await getattr(queue, call)()
            except bq.DeadlockError as error:
                outcome.append(error)

    queue = manager.create("q", bq.QueueConfig(consumer=Idler(), buffer_size=1))
    await advance(0.2)
    assert len(outcome) == 1


@pytest.mark.parametrize("call", ["flush", "deliver"])
async def test_a_flush_that_waits_for_its_own_call_slot_ends(manager, call):
    # Two queues on one scheduler that runs one call at a time: the second can't begin before the first returns.
    from batchqueue_async.queue.limiter import CallLimiter

    turns = CallLimiter(1)
    inner: bq.BatchQueue[int] = bq.BatchQueue("inner", bq.QueueConfig(consumer=RecordingHandler()), limiter=turns)
    outcome: list[BaseException] = []

    async def outer_handler(batch: list[int]) -> None:
        try:
            if call == "flush":
                await inner.produce(1)
                await inner.flush()
            else:
                await inner.deliver([1])
        except bq.DeadlockError as error:
            outcome.append(error)

    outer: bq.BatchQueue[int] = bq.BatchQueue("outer", bq.QueueConfig(consumer=outer_handler), limiter=turns)
    await outer.produce(1)
    await outer.flush(timeout=10)
    assert len(outcome) == 1
    await outer.shutdown()
    assert (await inner.shutdown()).handled == 1


async def test_delivering_beside_a_worker_that_waits_for_the_caller_is_no_deadlock(manager):
    """`deliver` waits for its own items alone, so another worker's wait for its caller closes no circle."""
    outcome: list[object] = []
    other = _two_sides(manager, buffer_size=1, max_batch=1)
    gate = asyncio.Event()

    async def caller(batch: list[int]) -> None:
        await gate.wait()
        try:
            await other.deliver([Left(1)])
            outcome.append("delivered")
        except bq.DeadlockError as error:
            outcome.append(error)

    queue = manager.create("q", bq.QueueConfig(consumer=caller, buffer_size=1, max_batch=1))

    async def right(batch: list[Right]) -> None:
        await queue.produce(2)

    other.add_handler(Left, RecordingHandler())
    other.add_handler(Right, right)
    await queue.produce(0)
    await settle()
    await queue.produce(1)  # full
    await other.produce(Right())
    await settle()  # worker 1 of `other` waits for room in `q`, whose worker is about to deliver to worker 0
    gate.set()
    await queue.flush(timeout=10)
    assert outcome[0] == "delivered"


async def test_a_handler_whose_own_round_holds_up_the_type_that_it_produces_gets_an_error(manager):
    config = bq.QueueConfig(
        workers=bq.WorkerPolicy.fixed(2), partitions=bq.PartitionPolicy.adaptive(), buffer_size=1, max_batch=2
    )
    queue = manager.create("q", config)
    outcome: list[object] = []
    # Two workers give two partitions from the start; a third type makes it three.
    kinds = [type(f"Grow{number}", (int,), {"__module__": "tests"}) for number in range(500)]
    select = bq.type_hash()
    moving = next(kind for kind in kinds if select(kind(), 2) == 0 and select(kind(), 3) == 2)

    async def handle(batch: list[Any]) -> None:
        if outcome:
            return
        for kind in kinds[:3]:
            queue.add_handler(kind, RecordingHandler())
        target = queue._router.partitions[2]
        assert queue.produce_nowait(moving(2))
        assert target.held == 1
        if target.owner is queue._drains[0]:
            queue._drains[0].hand_over(target, queue._drains[1])
        outcome.append(None)
        try:
            outcome.append(await queue.produce(moving(3)))
        except bq.DeadlockError as error:
            outcome.append(error)

    queue.add_handler(moving, handle)
    assert queue.partition_count == 2
    await queue.produce(moving(1))
    await queue.flush(timeout=10)
    assert isinstance(outcome[1], bq.DeadlockError)


async def test_c_35_a_handler_may_wait_for_a_place_that_another_producer_is_about_to_fill(manager):
    """The partition is empty but for a type on its way; the other's item comes in, goes out, and leaves its place."""
    gate = asyncio.Event()

    async def hold(batch: list[Any]) -> None:
        await gate.wait()

    config = bq.QueueConfig(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.adaptive(),
        buffer_size=2,
        max_batch=2,
        fallback=hold,
    )
    queue = manager.create("q", config)
    outcome: list[object] = []
    kinds = [type(f"Grow{number}", (int,), {"__module__": "tests"}) for number in range(500)]
    select = bq.type_hash()
    moving = next(kind for kind in kinds[2:] if select(kind(), 2) == 0 and select(kind(), 3) == 2)
    native = next(kind for kind in kinds[2:] if kind is not moving and select(kind(), 3) == 2)

    async def handle(batch: list[Any]) -> None:
        if outcome:
            return
        outcome.append(None)
        for kind in kinds[:2]:
            queue.add_handler(kind, RecordingHandler())
        target = queue._router.partitions[2]
        if target.owner is queue._drains[0]:
            queue._drains[0].hand_over(target, queue._drains[1])
        assert queue.produce_nowait(moving(2))
        assert queue.produce_nowait(native(1))
        await settle()
        assert queue.produce_nowait(native(2))
        assert (target.held, target.qsize()) == (1, 1)
        other = asyncio.create_task(queue.produce(native(3)))
        await settle()
        gate.set()
        while not target.reserved:
            assert target.waiting
            await asyncio.sleep(0)
        assert target.empty()
        outcome.append(await queue.produce(moving(3)))
        assert await other

    queue.add_handler(moving, handle)
    assert queue.partition_count == 2
    await queue.produce(moving(1))
    async with asyncio.timeout(10):
        await queue.flush()
    assert outcome == [None, True]
    assert queue.stats().failed == 0


# -- accounts --------------------------------------------------------------------------------------------------------


def _adds_up(stats: bq.QueueStats) -> bool:
    done = stats.handled + stats.failed + stats.unhandled + stats.dropped_after + stats.undelivered
    return stats.accepted == done + stats.in_flight + stats.used


async def test_drop_oldest_makes_room_where_only_moving_items_are(manager):
    kinds = [type(f"Evict{number}", (int,), {"__module__": "tests"}) for number in range(500)]
    select = bq.type_hash()
    moving = next(kind for kind in kinds if select(kind(), 2) == 0 and select(kind(), 3) == 2)
    native = next(kind for kind in kinds if kind is not moving and select(kind(), 3) == 2)
    config = bq.QueueConfig(
        partitions=bq.PartitionPolicy.adaptive(), buffer_size=2, strategy=bq.BufferStrategy.DROP_OLDEST
    )
    queue = manager.create("q", config)
    handler = RecordingHandler[Any]()
    handler.hold()
    queue.add_handler(moving, handler)
    await queue.produce(moving(1))
    await settle()
    for kind in (native, kinds[-1]):
        queue.add_handler(kind, handler)
    assert queue.partition_count == 3
    delivery = asyncio.create_task(queue.deliver([moving(2), moving(3)]))
    await settle()
    assert await queue.produce(native(4))  # the oldest that can go is moving(2)
    assert await queue.produce(moving(5))  # native(4) is in the partition: it goes
    assert await queue.produce(moving(6))  # moving(3)
    assert _adds_up(queue.stats()), queue.stats()
    assert queue.stats().dropped_after == 3
    handler.release()
    with pytest.raises(bq.DeliveryError) as failed:
        await delivery
    assert [item for failure in failed.value.failures for item in failure.items] == [2, 3]
    await queue.flush()
    assert sorted(handler.items) == [1, 5, 6]
    assert _adds_up(queue.stats())


async def test_stats_add_up_after_a_shutdown_that_cuts_off_a_move(manager):
    stays, moves = _types_that_part(1, 2)
    queue = manager.create("q", bq.QueueConfig(partitions=bq.PartitionPolicy.adaptive()))
    handler = RecordingHandler[Any]()
    handler.hold()
    queue.add_handler(moves, handler)
    await queue.produce(moves(1))
    await settle()
    queue.add_handler(stays, handler)
    await queue.produce_many([moves(2), moves(3)])
    report = await queue.shutdown(timeout=1.0)
    assert report.undelivered == [1, 2, 3]
    assert _adds_up(queue.stats()), queue.stats()


async def test_deliver_learns_of_its_own_items_alone_when_partitions_share_a_call(manager):
    """Two partitions' items in one call of a base-class handler: each failure is counted where it belongs."""

    class GoneError(RuntimeError):
        pass

    calls = 0

    async def base(batch: list[Base]) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(1)
        if calls == 2:
            raise GoneError

    config = bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(2), selector=_by_side)
    queue = manager.create("q", config)
    queue.add_handler(Base, base)
    await queue.produce(Left(0))
    await settle()
    left, right, later = Left(1), Right(2), Left(3)
    first = asyncio.create_task(queue.deliver([left]))
    second = asyncio.create_task(queue.deliver([right]))
    await asyncio.sleep(1.5)  # both are in the second call
    third = asyncio.create_task(queue.deliver([later]))
    outcomes = await asyncio.gather(first, second, third, return_exceptions=True)
    assert [getattr(each, "failures", None) and each.failures[0].items for each in outcomes] == [
        (left,),
        (right,),
        None,
    ]
    assert outcomes[2] is None


async def test_on_error_may_do_what_it_likes_with_its_batch(manager):
    async def fail(batch: list[Base]) -> None:
        raise ValueError

    async def emptied(batch: list[Any], error: BaseException) -> None:
        batch.clear()

    partitions = bq.PartitionPolicy.fixed(2)
    queue = manager.create("q", bq.QueueConfig(partitions=partitions, selector=_by_side, max_batch=2, on_error=emptied))
    queue.add_handler(Base, fail)
    items = [Left(1), Left(2), Right(3), Right(4)]
    with pytest.raises(bq.DeliveryError) as failed:
        await queue.deliver(items)
    assert {item for failure in failed.value.failures for item in failure.items} == set(items)


# -- handlers that misbehave -----------------------------------------------------------------------------------------


async def test_a_handler_that_is_removed_and_added_again_runs_once_at_a_time(manager):
    queue = _two_sides(manager)
    handler = RecordingHandler[Any](delay=1.0)
    queue.add_handler(Base, handler)
    await queue.produce(Left(1))
    await settle()
    assert queue.remove_handler(Base)
    queue.add_handler(Base, handler)
    await queue.produce(Right(2))
    await queue.flush()
    assert len(handler.items) == 2
    assert handler.max_active == 1


async def test_a_worker_that_was_left_behind_makes_no_further_call():
    queue: bq.BatchQueue[Any] = bq.BatchQueue("q", bq.QueueConfig(max_batch=10))
    loop = asyncio.get_running_loop()

    async def stubborn(batch: list[int]) -> None:
        end = loop.time() + 10.0
        while loop.time() < end:
            try:
                await asyncio.sleep(end - loop.time())
            except asyncio.CancelledError:
                continue
        raise ValueError

    later = RecordingHandler[Any]()
    queue.add_handler(int, stubborn)
    queue.add_handler(str, later)
    await queue.produce_many([1, "a"])
    report = await queue.shutdown(timeout=1.0)
    assert report.undelivered == [1, "a"]
    await advance(20)
    assert later.items == []
    assert _adds_up(queue.stats())


@pytest.mark.parametrize("ending", ["returns", "raises"])
async def test_a_worker_stops_at_the_deadline_although_its_handler_swallows_the_cancellation(ending):
    queue: bq.BatchQueue[Any] = bq.BatchQueue("q", bq.QueueConfig(max_batch=10))

    async def stubborn(batch: list[int]) -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            if ending == "raises":
                raise ValueError from None

    later = RecordingHandler[Any]()
    queue.add_handler(int, stubborn)
    queue.add_handler(str, later)
    await queue.produce_many([1, "a", 2])
    await settle()
    await queue.produce(3)
    report = await queue.shutdown(timeout=1.0)
    assert report.undelivered == ["a", 3]
    assert report.handled + report.failed == 2
    assert (report.elapsed, later.items) == (1.0, [])


def test_a_loop_ends_although_a_handler_swallows_its_cancellation():
    from batchqueue_async.testing import run_virtual

    async def main() -> None:
        async def stubborn(batch: list[int]) -> None:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                return

        queue: bq.BatchQueue[int] = bq.BatchQueue("q", bq.QueueConfig(consumer=stubborn))
        await queue.produce(1)
        await settle()

    run_virtual(main, stall_timeout=0.1)


class _Abort(BaseException):
    """An error that no `except Exception` sees; as some test and actor frameworks have them."""


@pytest.mark.parametrize("where", ["handler", "on_error", "on_idle"])
async def test_any_error_of_a_handler_is_the_batch_s_own(manager, where):
    failures: list[BaseException] = []
    raised = 0

    class Handler(RecordingHandler[int]):
        async def on_idle(self) -> None:
            nonlocal raised
            if where == "on_idle" and not raised:
                raised += 1
                raise _Abort

    def on_error(batch: Any, error: BaseException) -> None:
        nonlocal raised
        failures.append(error)
        if where == "on_error":
            raised += 1
            raise _Abort

    handler = Handler(fail=lambda batch: _Abort() if where != "on_idle" and batch == [1] else None)
    queue = manager.create("q", bq.QueueConfig(consumer=handler, on_error=on_error))
    await queue.produce(1)
    await advance(1)
    await queue.produce(2)
    await queue.flush(timeout=5)
    assert handler.handled[-1] == 2
    assert not queue.closed
    assert len(failures) == (where != "on_idle")
    assert raised == (where != "handler")


async def test_nobody_waits_for_a_drain_task_that_is_gone(manager):
    """Whoever cancels a drain task from outside ends the queue: waits end with it, and the report has every item."""
    queue = _two_sides(manager, buffer_size=2, max_batch=1)
    tasks: list[Any] = []

    async def left(batch: list[Left]) -> None:
        tasks.append(asyncio.current_task())
        await asyncio.sleep(2)

    right = RecordingHandler[Any](delay=10)
    queue.add_handler(Left, left)
    queue.add_handler(Right, right)
    lefts, rights = [Left(1), Left(2)], [Right(3)]
    calls = [
        asyncio.create_task(queue.deliver(lefts)),
        asyncio.create_task(queue.deliver(rights)),
        asyncio.create_task(queue.flush()),
        asyncio.create_task(queue.produce_many([Left(5), Left(6)])),
    ]
    await advance(1)
    tasks[0].cancel()
    await advance(0.5)
    assert queue.closed
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in results] == [bq.DeliveryError, type(None), bq.QueueClosedError, int]
    assert set(results[0].failures[0].items) == set(lefts)
    with pytest.raises(bq.QueueClosedError):
        await queue.flush()
    report = await queue.shutdown()
    assert report.handled == 1
    assert len(report.undelivered) == 2 + results[3]
    assert _adds_up(queue.stats())


# -- smaller things --------------------------------------------------------------------------------------------------


async def test_put_into_a_closed_partition_raises():
    from batchqueue_async.queue.partition import Partition

    partition = Partition[int](0, capacity=1)
    await partition.put(1)
    partition.close()
    with pytest.raises(asyncio.QueueFull):
        async with asyncio.timeout(1):
            await partition.put(2)


async def test_items_that_come_in_bulk_wake_every_getter():
    from batchqueue_async.queue.partition import Partition

    partition = Partition[int](0, capacity=5)
    getters = [asyncio.create_task(partition.get()) for _ in range(3)]
    await settle()
    partition.offer_many([1, 2, 3])
    await settle()
    assert [getter.result() for getter in getters if getter.done()] == [1, 2, 3]


async def test_an_owner_that_is_no_whole_number_is_the_balancer_s_fault(manager, caplog):
    class Halves:
        def assign(self, throughput: Any, owners: Any, workers: int) -> list[Any]:
            return [0.5] * len(owners)

    queue = _two_sides(manager, balancer=Halves(), balance_interval=1.0)
    await advance(2.5)
    assert caplog.text.count("balancer_failed") == 2
    assert [each.owner for each in queue.stats().partitions] == [0, 1]


@pytest.mark.seeds(20)
async def test_a_shutdown_without_time_ends_in_every_task_order():
    async def stubborn(batch: list[int]) -> None:
        end = loop.time() + 10.0
        while loop.time() < end:
            try:
                await asyncio.sleep(end - loop.time())
            except asyncio.CancelledError:
                continue

    loop = asyncio.get_running_loop()
    queue: bq.BatchQueue[int] = bq.BatchQueue("q", bq.QueueConfig(consumer=stubborn))
    await queue.produce(1)
    await settle()
    busy = [asyncio.create_task(asyncio.sleep(0)) for _ in range(5)]
    ends = [asyncio.create_task(queue.shutdown(timeout)) for timeout in (5.0, 0.0)]
    reports = await asyncio.gather(*ends)
    await asyncio.gather(*busy)
    assert reports[0].elapsed <= 0.25
    await advance(20)


async def test_a_failure_is_traced_to_its_items_among_partitions_with_one_type_and_with_several(manager):
    fine = RecordingHandler[Any]()
    failed_calls: list[list[int]] = []

    async def choosy(batch: list[Right]) -> None:
        if any(item.number == 9 for item in batch):
            failed_calls.append([item.number for item in batch])
            raise ValueError

    config = bq.QueueConfig(
        partitions=bq.PartitionPolicy.fixed(2), selector=lambda item, count: item.number % count, max_batch=3
    )
    queue = manager.create("q", config)
    queue.add_handler(Left, fine)
    queue.add_handler(Right, choosy)
    # Partition 0 gets both types, partition 1 one.
    items = [Left(2), Right(4), Left(6), Right(1), Right(3), Right(9)]
    with pytest.raises(bq.DeliveryError) as failed:
        await queue.deliver(items)
    assert [[item.number for item in failure.items] for failure in failed.value.failures] == failed_calls
    assert len(failed_calls) == 1


async def test_a_handler_that_is_removed_while_another_idles_does_not_idle_beside_its_call(manager):
    queue = _two_sides(manager)
    gate = asyncio.Event()
    idled: list[str] = []

    class First(RecordingHandler[Any]):
        async def on_idle(self) -> None:
            await gate.wait()

    class Second(RecordingHandler[Any]):
        async def on_idle(self) -> None:
            idled.append("beside" if self.active else "alone")

    second = Second()
    queue.add_handler(Left, First())
    queue.add_handler(Right, second)
    await settle()  # one worker is in the first handler's on_idle, on its way to the second's
    idled.clear()
    second.hold()
    await queue.produce(Right(1))
    await settle()
    assert second.active == 1
    queue.remove_handler(Right)
    gate.set()
    await settle()
    second.release()
    assert "beside" not in idled


async def test_flush_waits_for_what_was_there_although_later_items_of_another_type_come(manager):
    """Items are kept by type: one that comes after the flush must not be counted for one that was there before."""
    kinds = [type(f"Lane{number}", (int,), {"__module__": "tests"}) for number in range(50)]
    select = bq.type_hash()
    early, late = [kind for kind in kinds if select(kind(), 2) == 0][:2]
    queue = manager.create("q", bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(2), max_batch=1))
    handlers = {kind: RecordingHandler[Any](delay=1.0) for kind in (early, late)}
    for kind, handler in handlers.items():
        queue.add_handler(kind, handler)
    await queue.produce(early(0))
    await settle()
    await queue.produce(late(1))
    flushing = asyncio.create_task(queue.flush())
    await settle()
    await queue.produce(early(2))
    await flushing
    assert handlers[late].handled == [1]
