"""Faults of list C in the queue itself: handlers that misbehave, programs that end badly, work that grows."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import inspect
import logging
import sys
import threading
import time
import tracemalloc
import weakref
from typing import Any

import anyio
import process_functions
import pytest
import structlog
from queue_tools import Item, check, check_report, kinds, make
from work_meter import Meter

import batchqueue_async as bq
from batchqueue_async.queue.limiter import CallLimiter
from batchqueue_async.testing import RecordingErrorHandler, RecordingHandler, VirtualTimeLoop, advance, settle

# -- C-1: who may end a drain task ----------------------------------------------------------------------


class Other(Item):
    pass


async def _fails() -> None:
    await asyncio.sleep(0)
    raise ConnectionError


async def _task_group_whose_child_fails() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_fails())
        group.create_task(asyncio.sleep(5))


async def _anyio_group_whose_child_fails() -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(_fails)
        group.start_soon(anyio.sleep, 5)


async def _task_group_that_is_swallowed() -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_fails())
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(5)
    except* ConnectionError:
        pass


async def _cancels_itself_and_catches_it() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(1)


async def _cancels_itself_and_returns() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def _cancels_itself() -> None:
    await _cancels_itself_and_returns()
    await asyncio.sleep(1)


async def _times_out_in_the_old_style() -> None:
    task = asyncio.current_task()
    assert task is not None
    timer = asyncio.get_running_loop().call_later(0.01, task.cancel)
    try:
        await asyncio.sleep(1)
    except asyncio.CancelledError:
        pass
    finally:
        timer.cancel()


async def _has_a_child_that_cancels_it() -> None:
    task = asyncio.current_task()
    assert task is not None

    async def child() -> None:
        task.cancel()

    other = asyncio.create_task(child())
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(1)
    await other


async def _leaves_a_timer_that_cancels_it_later() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(0.2, task.cancel)


CANCELLERS = [
    _task_group_whose_child_fails,
    _anyio_group_whose_child_fails,
    _task_group_that_is_swallowed,
    _cancels_itself_and_catches_it,
    _cancels_itself_and_returns,
    _cancels_itself,
    _times_out_in_the_old_style,
    _has_a_child_that_cancels_it,
    _leaves_a_timer_that_cancels_it_later,
]


@pytest.mark.parametrize("timeout", [None, 0.5])
@pytest.mark.parametrize("misbehave", CANCELLERS)
async def test_c_1_a_handler_that_cancels_its_own_task_ends_no_drain_task(misbehave, timeout):
    async def handle(batch: list[Item]) -> None:
        await misbehave()

    other = RecordingHandler[Any]()
    queue = make(max_batch=1, handler_timeout=timeout)
    queue.add_handler(Item, handle)
    queue.add_handler(Other, other)
    for number in range(5):
        assert await queue.produce(Item(number))
        assert await queue.produce(Other(number))
        await advance(0.1)
    await queue.flush(timeout=60)
    await advance(5.0)
    assert not queue.closed
    stats = check(queue)
    assert stats.handled + stats.failed == 10
    assert [item.number for item in other.handled] == list(range(5))
    assert await queue.produce(Other(5))
    await queue.flush(timeout=60)
    report = await queue.shutdown()
    assert report.complete
    check_report(report)


@pytest.mark.parametrize("misbehave", CANCELLERS)
async def test_c_1_what_a_handler_leaves_cancelled_reaches_no_other(misbehave):
    """A task group of the next handler must not take a cancellation that was left over for its own."""
    met: list[BaseException] = []

    async def handle(batch: list[Item]) -> None:
        await misbehave()

    async def group(batch: list[Item]) -> None:
        try:
            await _task_group_whose_child_fails()
        except BaseException as error:
            met.append(error)
            raise

    queue = make(max_batch=1)
    queue.add_handler(Item, handle)
    queue.add_handler(Other, group)
    for number in range(3):
        await queue.produce_many([Item(number), Other(number)])
        await queue.flush(timeout=60)
    assert [type(error) for error in met] == [ExceptionGroup] * 3
    await queue.shutdown()


@pytest.mark.parametrize("misbehave", CANCELLERS)
async def test_c_1_the_same_in_on_idle_and_on_error(misbehave):
    class Idler(RecordingHandler[int]):
        async def on_idle(self) -> None:
            await misbehave()

    async def on_error(batch: Any, error: BaseException) -> None:
        await misbehave()

    handler = Idler(fail=ValueError())
    queue = make(consumer=handler, max_batch=1, on_error=on_error)
    for number in range(3):
        assert await queue.produce(number)
        await advance(2.0)
    assert not queue.closed
    assert check(queue).failed == 3
    assert (await queue.shutdown()).complete


async def test_c_1_the_queue_and_the_end_of_the_loop_still_end_it():
    handler = RecordingHandler[int](delay=60.0)
    queue = make(consumer=handler)
    await queue.produce(1)
    await settle()
    report = await queue.shutdown(timeout=1.0)
    assert (report.undelivered, handler.cancelled) == ([1], 1)

    # A handler swallows the one cancellation that it gets: it is for the drain task all the same.
    async def stubborn(batch: list[int]) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()

    queue = make(consumer=stubborn, max_batch=1)
    await queue.produce_many([1, 2])
    await settle()
    report = await queue.shutdown(timeout=1.0)
    assert (report.handled, report.undelivered) == (1, [2])


def test_c_1_a_loop_that_ends_is_not_held_up():
    made: list[bq.BatchQueue[int]] = []

    async def main() -> None:
        made.append(make(consumer=RecordingHandler(delay=60.0)))
        await made[0].produce(1)
        await settle()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    assert made[0].closed
    assert made[0].abandon().undelivered == [1]


@pytest.mark.parametrize("error", [GeneratorExit, StopIteration, StopAsyncIteration, asyncio.CancelledError])
async def test_c_18_whatever_a_handler_raises_fails_its_batch_alone(error):
    errors = RecordingErrorHandler()
    handler = RecordingHandler[int](fail=lambda batch: error() if batch == [0] else None)
    queue = make(consumer=handler, max_batch=1, on_error=errors)
    await queue.produce_many([0, 1, 2])
    await queue.flush(timeout=5)
    assert not queue.closed
    assert (handler.handled, [items for items, _ in errors.failures]) == ([1, 2], [[0]])
    assert (await queue.shutdown()).failed == 1


_user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")
_unlike_anything: contextvars.ContextVar[object] = contextvars.ContextVar("unlike")


class _Uncomparable:
    def __eq__(self, _: object) -> bool:
        raise RuntimeError

    __hash__ = None


class _Sets:
    """Leaves its batch in context variables, in every way in which it is called."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.idled = 0
        self.seen: list[str] = []

    async def consume(self, batch: list[Item]) -> None:
        self.seen.append(_user.get())
        _user.set("consume")
        _unlike_anything.set(_Uncomparable())
        if self.way == "turn":
            await asyncio.sleep(0)
            self.seen.append(_user.get())
        if self.way == "raise":
            raise ValueError
        if self.way == "retry" and len(self.seen) == 1:
            raise bq.RetryableError
        if self.way == "task":
            await asyncio.create_task(asyncio.sleep(0))

    async def on_idle(self) -> None:
        self.idled += 1
        _user.set("on_idle")


@pytest.mark.parametrize("way", ["plain", "turn", "raise", "retry", "task"])
@pytest.mark.parametrize("workers", [1, 2])
async def test_c_18_what_a_handler_leaves_in_context_variables_no_other_sees(way, workers):
    _user.set("producer")

    def on_error(batch: list[Item], error: BaseException) -> None:
        _user.set("on_error")

    queue = make(workers=bq.WorkerPolicy.fixed(workers), on_error=on_error, max_batch=1)
    sets, seen = _Sets(way), []
    queue.add_handler(Item, sets)

    async def look(batch: list[Item]) -> None:
        seen.append(_user.get())
        assert _unlike_anything.get(None) is None

    queue.add_handler(Other, look)
    for number in range(3):
        # Some rounds have calls of both handlers, others one of each.
        await queue.produce_many([Item(2 * number), Other(number), Item(2 * number + 1)])
        if number:
            await queue.flush(timeout=5)
    await advance(1.0)
    await queue.produce(Other(10))
    await queue.flush(timeout=5)
    assert queue.stats().handled + queue.stats().failed == 10
    assert sets.idled
    assert seen == ["producer"] * 4
    expected = ["producer", "consume"] if way == "turn" else ["producer"]
    assert sets.seen == expected * (len(sets.seen) // len(expected))
    assert (await queue.shutdown()).undelivered == []


async def test_c_18_a_handler_that_leaves_something_may_still_be_cancelled_and_circles_are_found():
    errors = RecordingErrorHandler()

    async def handle(batch: list[int]) -> None:
        _user.set("left")
        if batch == [1]:
            await asyncio.sleep(60)
        elif batch == [2]:
            await queue.flush()

    queue = make(consumer=handle, handler_timeout=1.0, on_error=errors, max_batch=1)
    await queue.produce_many([0, 1, 2, 3])
    await queue.flush(timeout=5)
    assert [type(error) for _, error in errors.failures] == [TimeoutError, bq.DeadlockError]
    await queue.produce_many([4, 1])
    await settle()
    assert (await queue.shutdown(timeout=0.5)).undelivered == [1]


# -- C-4: a program that is interrupted while it drains -------------------------------------------------


@pytest.mark.parametrize("when", [0.0, 0.05, 0.3])
def test_c_4_ctrl_c_in_the_final_drain_leaves_a_report_that_names_the_items(when):
    manager = bq.BatchQueueManager()
    handler = RecordingHandler[int](delay=0.1)

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with manager:
            queue = manager.create("q", bq.QueueConfig(consumer=handler, max_batch=1))
            assert await queue.produce_many(range(20)) == 20
            # As asyncio.Runner does at Ctrl-C: the main task is cancelled, and then, as the loop ends, every other.
            asyncio.get_running_loop().call_later(when, task.cancel)

    runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
    with pytest.raises(asyncio.CancelledError), runner:
        runner.run(main())
    queue = manager.get("q")
    assert queue is not None
    assert queue.ended
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as again:
        report = again.run(manager.shutdown_all())["q"]
    assert report.handled == len(handler.handled)
    assert report.undelivered == list(range(20))[report.handled :]
    check_report(report)


async def test_c_4_every_task_cancelled_and_later_shutdowns_return_the_report():
    handler = RecordingHandler[int](delay=0.5)
    queue = make(consumer=handler, max_batch=1)
    await queue.produce_many(range(5))
    first = asyncio.create_task(queue.shutdown())
    await advance(0.7)
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert first.cancelled()
    report = await queue.shutdown()
    assert report is await queue.shutdown(1.0)
    assert (report.handled, report.undelivered) == (1, [1, 2, 3, 4])
    check(queue)


async def test_c_4_who_waits_for_a_shutdown_gets_the_report_though_its_task_is_cancelled():
    queue = make(consumer=RecordingHandler(delay=5.0))
    await queue.produce(1)
    await settle()
    waiting = asyncio.create_task(queue.shutdown())
    await settle()
    (closing,) = [task for task in asyncio.all_tasks() if task.get_name() == "q-shutdown"]
    closing.cancel()
    assert (await waiting).undelivered == [1]


async def test_c_4_a_shutdown_cancelled_before_it_began_still_reports():
    queue = make(consumer=RecordingHandler(delay=5.0))
    await queue.produce(1)
    waiting = asyncio.create_task(queue.shutdown())
    await asyncio.sleep(0)
    (closing,) = [task for task in asyncio.all_tasks() if task.get_name() == "q-shutdown"]
    closing.cancel()
    assert (await waiting).undelivered == [1]
    assert queue.ended


async def test_c_4_a_handler_that_ignores_all_of_it_is_left_behind():
    async def stubborn(batch: list[int]) -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    let_go = asyncio.Event()
    queue = make(consumer=stubborn)
    await queue.produce(1)
    waiting = asyncio.create_task(queue.shutdown())
    await settle()
    for task in asyncio.all_tasks() - {asyncio.current_task(), waiting}:
        task.cancel()
    assert (await waiting).undelivered == [1]
    let_go.set()
    await settle()
    assert check(queue).handled == 0


# -- C-5: items belong to the round from the take --------------------------------------------------------------------


class Unhashable(type):  # noqa: PLW1641 - that it has no hash is the point
    """A class of this kind can't be looked up: it has an equality and no hash."""

    def __eq__(cls, other: object) -> bool:
        return cls is other


class Odd(metaclass=Unhashable):
    pass


class Raising(type):
    """A class of this kind raises where it is compared, and where it is hashed."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError

    def __hash__(cls) -> int:
        raise RuntimeError


class Worse(metaclass=Raising):
    pass


@pytest.mark.parametrize("kind", [Odd, Worse])
@pytest.mark.parametrize("together", [False, True])
async def test_c_5_a_class_that_can_not_be_looked_up_fails_its_own_items_alone(kind, together):
    errors = RecordingErrorHandler()
    numbers = RecordingHandler[int]()
    queue = make(on_error=errors)
    queue.add_handler(int, numbers)
    odd = kind()
    items: list[Any] = [1, 2, odd, 3]
    if together:
        assert await queue.produce_many(items) == 4
    else:
        assert [await queue.produce(item) for item in items] == [True] * 4
    with pytest.raises(bq.DeliveryError) as caught:
        await queue.deliver([another := kind(), 4])
    assert [failure.items for failure in caught.value.failures] == [(another,)]
    await queue.flush(timeout=5)
    assert numbers.handled == [1, 2, 3, 4]
    assert [item for items, _ in errors.failures for item in items] == [odd, another]
    assert check(queue).failed == 2
    report = await queue.shutdown()
    assert (report.handled, report.failed, report.undelivered) == (4, 2, [])
    check_report(report)


async def test_c_5_whatever_ends_a_round_as_it_is_grouped_its_items_are_in_the_report():
    class Quits(type):
        def __hash__(cls) -> int:
            raise KeyboardInterrupt

    class Last(metaclass=Quits):
        pass

    queue = make()
    queue.add_handler(int, RecordingHandler())
    await queue.produce_many([1, last := Last(), 2])
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        await queue._drains[0]._drain()
    assert check(queue).in_flight == 3
    queue._drains[0].stop()
    report = await queue.shutdown()
    assert report.undelivered == [1, last, 2]
    check_report(report)


@pytest.mark.parametrize("strategy", [bq.BufferStrategy.BLOCKING, bq.BufferStrategy.DROP_OLDEST])
async def test_c_5_a_selector_is_asked_once_for_each_item(strategy):
    asked: list[int] = []

    def select(item: int, count: int) -> int:
        asked.append(item)
        return item % count

    handler = RecordingHandler[int]()
    queue = make(
        partitions=bq.PartitionPolicy.fixed(4), selector=select, buffer_size=5, consumer=handler, strategy=strategy
    )
    assert await queue.produce_many(range(300)) == 300
    assert await queue.produce_many(range(300, 303)) == 3
    await queue.flush()
    assert asked == list(range(303))
    asked.clear()
    if strategy is bq.BufferStrategy.BLOCKING:
        await queue.deliver(range(100))
        assert asked == list(range(100))


async def test_c_5_a_selector_that_raises_when_it_is_asked_again_loses_nothing():
    """What came in from a thread is placed anew when the queue has grown; where that fails it stays where it was."""
    tenants: dict[int, str] = {}
    handler = RecordingHandler[int]()
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.adaptive(),
        selector=bq.by_key(lambda item: tenants[item]),
        max_batch=2,
    )
    queue.add_handler(int, handler)
    bridge = queue.bridge()
    tenants.update(dict.fromkeys(range(20), "t"))
    assert [await asyncio.to_thread(bridge.produce, number) for number in range(10)] == [True] * 10
    # These stay in the inbox while the queue grows.
    assert [bridge.produce(number) for number in range(10, 20)] == [True] * 10
    tenants.clear()
    queue.add_handler(str, handler, weight=5.0)
    await queue.flush(timeout=60)
    assert sorted(handler.handled) == list(range(20))
    stats = queue.stats()
    assert stats.accepted == stats.handled == 20
    assert (await queue.shutdown()).complete


# -- C-7: one turn for each type, across removal ---------------------------------------------------------------------


async def test_c_7_a_handler_that_replaces_a_removed_one_never_runs_at_the_same_time():
    running: list[str] = []
    calls: list[tuple[str, int]] = []

    def handler(name: str) -> Any:
        async def handle(batch: list[Any]) -> None:
            running.append(name)
            assert len(running) == 1, running
            calls.append((name, len(batch)))
            await asyncio.sleep(0.1)
            running.remove(name)

        return handle

    queue = make(
        workers=bq.WorkerPolicy.fixed(2), partitions=bq.PartitionPolicy.fixed(2), selector=lambda item, _: item.number
    )
    queue.add_handler(Item, RecordingHandler(delay=0.05))
    queue.add_handler(Other, handler("old"))
    await queue.produce_many([Item(0), Other(0)])  # the first worker has Other still before it
    await advance(0.01)
    assert queue.remove_handler(Other)
    queue.add_handler(Other, handler("new"))
    await queue.produce(Other(1))
    await queue.flush(timeout=5)
    assert calls == [("new", 1), ("new", 1)]
    # The same while a call of the old one runs.
    await queue.produce(Other(0))
    await settle()
    assert queue.remove_handler(Other)
    queue.add_handler(Other, handler("newer"))
    await queue.produce(Other(1))
    await queue.flush(timeout=5)
    assert calls[2:] == [("new", 1), ("newer", 1)]
    assert (await queue.shutdown()).failed == 0


@pytest.mark.parametrize("then", ["nothing", "base", "fallback", "again"])
async def test_c_7_what_a_removed_handler_had_still_to_do_goes_to_the_next(then):
    fallback = RecordingHandler[Any]()
    base, old, new = RecordingHandler[Any](), RecordingHandler[Any](), RecordingHandler[Any]()
    slow = RecordingHandler[str](delay=1.0)
    queue = make(max_batch=2, fallback=fallback if then == "fallback" else None)
    queue.add_handler(str, slow)
    queue.add_handler(Other, old)
    if then == "base":
        queue.add_handler(Item, base)
    others = [Other(number) for number in range(3)]
    waiting = asyncio.create_task(queue.deliver(["first", *others]))
    await settle()
    queue.remove_handler(Other)
    if then == "again":
        queue.add_handler(Other, new)
    if then == "nothing":
        with pytest.raises(bq.DeliveryError) as caught:
            await waiting
        assert [item for failure in caught.value.failures for item in failure.items] == others
    else:
        await waiting
        assert {"base": base, "fallback": fallback, "again": new}[then].handled == others
    assert old.items == []
    stats = check(queue)
    assert stats.unhandled == (3 if then == "nothing" else 0)
    assert stats.handled == 4 - stats.unhandled
    assert (await queue.shutdown()).complete


async def test_c_7_an_item_without_a_handler_meets_one_that_is_added_before_its_turn():
    slow, late = RecordingHandler[str](delay=1.0), RecordingHandler[int]()
    queue = make()
    queue.add_handler(str, slow)
    await queue.produce_many(["first", 1, 2])
    await settle()
    queue.add_handler(int, late)
    await queue.flush(timeout=5)
    assert (late.handled, check(queue).unhandled) == ([1, 2], 0)
    await queue.shutdown()


# -- C-16 and C-17: work that grows with what comes in, not with what ever came --------------------------------------


def _run(main: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


async def _deliver(count: int) -> int:
    queue = make(consumer=RecordingHandler(), max_batch=10, buffer_size=1_000_000)
    with Meter() as meter:
        await asyncio.gather(*(queue.deliver([number]) for number in range(count)))
    assert queue.stats().handled == count
    assert queue._router.partitions[0].ranges is None
    await queue.shutdown()
    return meter.lines


def test_c_17_the_price_of_a_deliver_does_not_grow_with_their_number():
    few, many = _run(_deliver(500)) / 500, _run(_deliver(4_000)) / 4_000
    assert many < 1.05 * few, (few, many)


async def _deliver_by_type(count: int, *, fail: bool, strategy: str = "block") -> int:
    handler = RecordingHandler[Any](fail=(lambda _: ValueError()) if fail else None)
    queue = make(
        partitions=bq.PartitionPolicy.fixed(2), max_batch=10, buffer_size=1_000_000, overflow=strategy, fallback=handler
    )
    many = kinds(20)
    with Meter() as meter:
        calls = [queue.deliver([many[number % 20](number)]) for number in range(count)]
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(each, bq.DeliveryError) for each in results) == (count if fail else 0)
    await queue.shutdown()
    return meter.lines


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("strategy", ["block", "drop_oldest"])
def test_c_17_nor_with_their_failures_under_any_strategy(fail, strategy):
    few = _run(_deliver_by_type(300, fail=fail, strategy=strategy)) / 300
    many = _run(_deliver_by_type(2_400, fail=fail, strategy=strategy)) / 2_400
    assert many < 1.1 * few, (few, many)


async def _cancel_deliveries(count: int) -> int:
    handler = RecordingHandler[int]()
    handler.hold()
    queue = make(consumer=handler, buffer_size=1_000_000)
    calls = [asyncio.create_task(queue.deliver([number])) for number in range(count)]
    await settle()
    with Meter() as meter:
        for call in reversed(calls):
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    handler.release()
    await queue.shutdown()
    return meter.lines


def test_c_17_nor_does_that_of_cancelling_them():
    few, many = _run(_cancel_deliveries(300)) / 300, _run(_cancel_deliveries(2_400)) / 2_400
    assert many < 1.05 * few, (few, many)


async def test_c_17_flushes_that_time_out_leave_nothing_behind():
    handler = RecordingHandler[int]()
    handler.hold()
    queue = make(consumer=handler)
    await queue.produce(1)
    await settle()
    for _ in range(1_000):
        with pytest.raises(TimeoutError):
            await queue.flush(timeout=0.01)
    ranges = queue._router.partitions[0].ranges
    assert ranges is None or len(ranges._ranges) < 50
    handler.release()
    await queue.shutdown()


async def _one_item_after(types: int) -> int:
    queue = make(partitions=bq.PartitionPolicy.fixed(2), fallback=RecordingHandler())
    many = kinds(types)
    for kind in many:
        queue.produce_nowait(kind(0))
    await queue.flush()
    for _ in range(3):  # the lanes of types that are quiet go to sleep
        await queue.deliver([many[0](1)])
    with Meter() as meter:
        for number in range(20):
            queue.produce_nowait(many[number % 3](number))
            await queue.flush()
    await queue.shutdown()
    return meter.lines


def test_c_17_one_item_costs_the_same_after_thousands_of_types():
    few, many = _run(_one_item_after(30)), _run(_one_item_after(3_000))
    assert many < 1.2 * few, (few, many)


async def _add(handlers: int) -> int:
    queue = make(partitions=bq.PartitionPolicy.adaptive())
    handler = RecordingHandler[Any]()
    many = kinds(handlers)
    for kind in many[:-50]:
        queue.add_handler(kind, handler)
    with Meter() as meter:
        for kind in many[-50:]:
            queue.add_handler(kind, handler)
    await queue.shutdown()
    return meter.lines


def test_c_17_a_handler_that_is_added_costs_the_same_after_thousands_of_partitions():
    few, many = _run(_add(300)), _run(_add(4_000))
    assert many < 1.2 * few, (few, many)


async def _types_through(count: int) -> int:
    queue = make(partitions=bq.PartitionPolicy.adaptive(), buffer_size=100)
    handler = RecordingHandler[Any]()
    many = kinds(count)
    with Meter() as meter:
        for kind in many:
            queue.add_handler(kind, handler)
            assert queue.produce_nowait(kind(0))
        await queue.flush()
        for kind in many:
            assert queue.produce_nowait(kind(1))
        await queue.flush()
    assert queue.stats().handled == 2 * count
    await queue.shutdown()
    return meter.lines


def test_c_17_types_that_come_one_after_the_other_cost_the_same_each():
    # The queue grows with the first 200 of them, each time with what is inside.
    few, many = _run(_types_through(1_000)) / 1_000, _run(_types_through(4_000)) / 4_000
    assert many < 2 * few, (few, many)


async def _add_and_remove(count: int) -> tuple[int, int]:
    queue = make(partitions=bq.PartitionPolicy.adaptive(), workers=bq.WorkerPolicy.fixed(2))
    handler = RecordingHandler[Any]()
    for kind in kinds(50):
        queue.add_handler(kind, handler)
    with Meter() as meter:
        for _ in range(count):
            queue.add_handler(Other, handler)
            queue.remove_handler(Other)
    gc.collect()
    tracemalloc.start()
    for _ in range(count):
        queue.add_handler(Other, handler)
        queue.remove_handler(Other)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    await queue.shutdown()
    return meter.lines, grown


def test_c_17_adding_and_removing_is_linear_and_keeps_no_memory():
    (few, _), (many, grown) = _run(_add_and_remove(200)), _run(_add_and_remove(3_000))
    assert many / 3_000 < 1.05 * few / 200
    assert grown < 20_000, grown


async def test_c_16_types_that_were_removed_are_let_go():
    queue = make(partitions=bq.PartitionPolicy.fixed(2))
    handler = RecordingHandler[Any]()
    left: list[weakref.ref[type]] = []
    for number in range(300):
        kind: Any = type(f"Short{number}", (), {})
        left.append(weakref.ref(kind))
        queue.add_handler(kind, handler)
        await queue.produce(kind())
        await queue.flush()
        queue.remove_handler(kind)
        handler.items.clear()
        handler.handled.clear()
        handler.batches.clear()
    del kind
    gc.collect()
    assert sum(each() is not None for each in left) < 40
    await queue.shutdown()


# -- C-14: a task that a handler starts is only its own ---------------------------------------------------------------


async def _in_own_task(call: Any) -> None:
    await call()


async def _gathered(call: Any) -> None:
    await asyncio.gather(asyncio.sleep(0), call())


async def _in_a_group(call: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(call())


async def _in_a_group_of_anyio(call: Any) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(call)


async def _in_wait_for(call: Any) -> None:
    await asyncio.wait_for(call(), 3_600)


async def _waited_for(call: Any) -> None:
    done, _ = await asyncio.wait({asyncio.create_task(call())})
    done.pop().result()


async def _shielded(call: Any) -> None:
    await asyncio.shield(call())


async def _awaited_later(call: Any) -> None:
    task = asyncio.create_task(call())
    await asyncio.sleep(0.7)
    await task


async def _through_another_task(call: Any) -> None:
    await asyncio.create_task(_gathered(call))


AWAITED = [
    _in_own_task,
    _gathered,
    _in_a_group,
    _in_a_group_of_anyio,
    _in_wait_for,
    _waited_for,
    _shielded,
    _awaited_later,
    _through_another_task,
]
CALLS = ["produce", "produce_many", "deliver", "flush", "shutdown"]


def _call(queue: bq.BatchQueue[Any], name: str, outcomes: list[object]) -> Any:
    async def call() -> None:
        arguments: dict[str, Any] = {"produce": 9, "produce_many": [9, 9], "deliver": [9]}
        try:
            outcomes.append(await getattr(queue, name)(*([arguments[name]] if name in arguments else [])))
        except Exception as error:
            outcomes.append(type(error))
            raise

    return call


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", AWAITED)
async def test_c_14_a_wait_that_its_own_handler_waits_for_ends_with_an_error(way, name):
    outcomes: list[object] = []
    began = asyncio.get_running_loop().time()

    async def handle(batch: list[int]) -> None:
        if batch == [0]:
            assert queue.produce_many_nowait([1, 2]) == 2
            await way(_call(queue, name, outcomes))

    queue = make(consumer=handle, buffer_size=2, max_batch=1, drain_timeout=100.0)
    assert await queue.produce_many([0]) == 1
    await advance(3.0)
    assert outcomes == [bq.DeadlockError]
    assert asyncio.get_running_loop().time() - began < 5
    report = await queue.shutdown()
    assert (report.handled, report.failed) == (2, 1)


@pytest.mark.parametrize("name", CALLS)
async def test_c_14_a_task_that_a_handler_only_starts_gets_what_it_asks_for(name):
    outcomes: list[object] = []
    tasks: list[asyncio.Task[None]] = []

    async def handle(batch: list[int]) -> None:
        if batch == [0]:
            tasks.append(asyncio.create_task(_call(queue, name, outcomes)()))
            keep.update(tasks)
            tasks[0].add_done_callback(keep.discard)
            await asyncio.sleep(5.0)

    keep: set[Any] = set()
    queue = make(consumer=handle, buffer_size=2, max_batch=1)
    await queue.produce_many([0, 1])
    await asyncio.sleep(0.1)
    queue.produce_many_nowait([2, 3])
    await tasks[0]
    expected = {"produce": True, "produce_many": 2}.get(name)
    if name == "shutdown":
        assert isinstance(outcomes[0], bq.ShutdownReport)
        assert outcomes[0].complete
    else:
        assert outcomes == [expected]
    assert (await queue.shutdown()).failed == 0


async def test_c_14_a_shutdown_that_was_refused_has_closed_nothing():
    outcomes: list[object] = []

    async def handle(batch: list[int]) -> None:
        with contextlib.suppress(bq.DeadlockError):
            await asyncio.wait_for(_call(queue, "shutdown", outcomes)(), 60)

    queue = make(consumer=handle, drain_timeout=30.0)
    began = asyncio.get_running_loop().time()
    await queue.deliver([1])
    assert outcomes == [bq.DeadlockError]
    assert not queue.closed
    assert (await queue.shutdown()).complete
    assert asyncio.get_running_loop().time() - began < 1


async def test_c_14_two_handlers_that_wait_for_each_other_by_tasks_of_theirs():
    deadlocks: list[str] = []

    def handler(other: str) -> Any:
        async def handle(batch: list[int]) -> None:
            for number in batch:
                if number > 0:
                    try:
                        await asyncio.gather(queues[other].produce(number - 1), queues[other].produce(number - 1))
                    except bq.DeadlockError:
                        deadlocks.append(other)

        return handle

    queues: dict[str, bq.BatchQueue[int]] = {}
    for name, other in (("a", "b"), ("b", "a")):
        queues[name] = make(consumer=handler(other), buffer_size=1, max_batch=1)
    async with asyncio.timeout(1_000):
        await queues["a"].produce_many([3] * 20)
        for _ in range(10):
            for queue in queues.values():
                await queue.flush()
    assert deadlocks
    for queue in queues.values():
        assert (await queue.shutdown()).complete


# -- C-6: circles over loops and threads ------------------------------------------------------------------------------


def _scheduler(name: str, calls: int = 2) -> bq.SharedScheduler:
    return bq.SharedScheduler(name, bq.WorkerPolicy.fixed(calls))


@pytest.mark.real_time
@pytest.mark.parametrize("by", ["produce_async", "produce_many_async", "produce", "produce_many"])
async def test_c_6_producers_that_wait_in_a_circle_over_two_loops_are_told(by):
    """Two queues on two loops (or with threads), each of whose handlers fills the other's partition."""
    bridges: dict[str, Any] = {}
    deadlocks: list[str] = []

    def handler(other: str) -> Any:
        def items(batch: list[int]) -> list[int]:
            return [number - 1 for number in batch if number for _ in range(3)]

        async def handle(batch: list[int]) -> None:
            try:
                if by == "produce_many_async":
                    await bridges[other].produce_many_async(items(batch))
                else:
                    for number in items(batch):
                        await bridges[other].produce_async(number)
            except bq.DeadlockError:
                deadlocks.append(other)

        def handle_in_thread(batch: list[int]) -> None:
            try:
                if by == "produce_many":
                    bridges[other].produce_many(items(batch))
                else:
                    for number in items(batch):
                        bridges[other].produce(number)
            except bq.DeadlockError:
                deadlocks.append(other)

        return handle if by.endswith("_async") else bq.in_thread(handle_in_thread)

    async with asyncio.timeout(30), bq.BatchQueueManager() as manager:
        for name, other in (("a", "b"), ("b", "a")):
            config = bq.QueueConfig(consumer=handler(other), scheduler=_scheduler(name), buffer_size=2, max_batch=2)
            bridges[name] = manager.create(name, config).bridge()
        assert await bridges["a"].produce_many_async([3] * 20) == 20
        for _ in range(8):
            for bridge in bridges.values():
                await bridge.flush_async()
        assert deadlocks
        stats = [await bridge.stats_async() for bridge in bridges.values()]
        assert all(each.handled == each.accepted for each in stats)


@pytest.mark.real_time
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(("first", "second"), [("deliver", "flush"), ("flush", "deliver"), ("deliver", "deliver")])
async def test_c_6_so_are_those_who_wait_for_outcomes(first, second, threads):
    bridges: dict[str, Any] = {}
    deadlocks: list[str] = []

    def handler(other: str, call: str) -> Any:
        async def handle(batch: list[int]) -> None:
            bridge = bridges[other]
            await bridge.produce_async(0)
            try:
                await (bridge.flush_async() if call == "flush" else bridge.deliver_async([0]))
            except bq.DeadlockError:
                deadlocks.append(other)
            except bq.DeliveryError:
                pass

        def handle_in_thread(batch: list[int]) -> None:
            bridge = bridges[other]
            bridge.produce(0)
            try:
                bridge.flush() if call == "flush" else bridge.deliver([0])
            except bq.DeadlockError:
                deadlocks.append(other)
            except bq.DeliveryError:
                pass

        async def both(batch: list[int]) -> None:
            if batch[0]:
                await (bq.in_thread(handle_in_thread).consume(batch) if threads else handle(batch))

        return both

    async with asyncio.timeout(30), bq.BatchQueueManager() as manager:
        for name, other, call in (("a", "b", first), ("b", "a", second)):
            config = bq.QueueConfig(consumer=handler(other, call), scheduler=_scheduler(name, 1), max_batch=1)
            bridges[name] = manager.create(name, config).bridge()
        await asyncio.gather(*(bridge.deliver_async([1] * 5) for bridge in bridges.values()))
        for bridge in bridges.values():
            assert (await bridge.stats_async()).failed == 0
        assert deadlocks


@pytest.mark.real_time
async def test_c_6_no_circle_no_error():
    """A chain over three loops, whose last queue is slow: everybody waits, and nobody in a circle."""
    bridges: dict[str, Any] = {}
    handled: list[int] = []

    def handler(other: str) -> Any:
        async def handle(batch: list[int]) -> None:
            for number in batch:
                await bridges[other].produce_async(number)
                await bridges[other].deliver_async([number])

        return handle

    async def last(batch: list[int]) -> None:
        await asyncio.sleep(0.001)
        handled.extend(batch)

    async with asyncio.timeout(30), bq.BatchQueueManager() as manager:
        for name, consumer in (("c", last), ("b", handler("c")), ("a", handler("b"))):
            config = bq.QueueConfig(consumer=consumer, scheduler=_scheduler(name), buffer_size=1, max_batch=1)
            bridges[name] = manager.create(name, config).bridge()
        await bridges["a"].deliver_async(list(range(20)))
        for name in ("b", "c"):
            await bridges[name].flush_async()
        assert sorted(set(handled)) == list(range(20))
        assert [(await bridge.stats_async()).failed for bridge in bridges.values()] == [0, 0, 0]


@pytest.mark.real_time
async def test_c_6_calls_in_threads_leave_threads_for_those_they_wait_for():
    count = 60  # more than the threads that anyio lets everybody share
    stored: list[int] = []

    def parse(batch: list[int]) -> None:
        for _ in batch:
            for number in range(20):
                assert bridge.produce(number, timeout=60)

    async with asyncio.timeout(60), bq.BatchQueueManager() as manager:
        rows = manager.create("rows", bq.QueueConfig(consumer=bq.in_thread(stored.extend), buffer_size=5))
        bridge = rows.bridge()
        lines = manager.create(
            "lines",
            bq.QueueConfig(
                consumer=bq.in_thread(parse),
                workers=bq.WorkerPolicy.fixed(count),
                partitions=bq.PartitionPolicy.fixed(count),
                max_batch=1,
            ),
        )
        await lines.produce_many(range(count))
        await lines.flush()
        await rows.flush()
    assert len(stored) == 20 * count


async def test_c_6_one_turn_for_two_queues_is_a_circle_too():
    turns = CallLimiter(1)
    errors = RecordingErrorHandler()
    inner: bq.BatchQueue[int] = bq.BatchQueue("inner", bq.QueueConfig(consumer=RecordingHandler()), limiter=turns)

    async def outer_handler(batch: list[int]) -> None:
        await asyncio.create_task(inner.deliver(batch))

    config = bq.QueueConfig(consumer=outer_handler, on_error=errors)
    outer: bq.BatchQueue[int] = bq.BatchQueue("outer", config, limiter=turns)
    await outer.produce(1)
    await outer.flush(timeout=5)
    assert [type(error) for _, error in errors.failures] == [bq.DeadlockError]
    assert (await outer.shutdown()).failed == 1
    assert (await inner.shutdown()).handled == 1


# -- C-2, and the small ones of C-18 about threads and processes ----------------------------------------------------


@pytest.mark.real_time
async def test_c_2_a_call_that_can_not_be_ended_keeps_its_turn():
    running = most = 0
    lock = threading.Lock()
    stored: list[int] = []

    def store(batch: list[int]) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.25)
        stored.extend(batch)
        with lock:
            running -= 1

    errors = RecordingErrorHandler()
    queue = make(max_batch=1, handler_timeout=0.02, on_error=errors)
    queue.add_handler(int, bq.in_thread(store))
    await queue.produce_many(range(4))
    before = threading.active_count()
    await queue.flush(timeout=30)
    assert most == 1
    assert threading.active_count() <= before + 1
    assert stored == [0, 1, 2, 3]
    # They count as failed, and whoever looks at the error learns that they may have been stored.
    assert [items for items, _ in errors.failures] == [[0], [1], [2], [3]]
    for _, error in errors.failures:
        assert isinstance(error, TimeoutError)
        assert "handler_timeout=0.02" in str(error)
        assert "it may have done its work" in str(error)
    assert (await queue.shutdown()).failed == 4


@pytest.mark.real_time
async def test_c_2_a_shutdown_counts_what_may_be_stored_yet():
    begun, let_go = threading.Event(), threading.Event()
    stored: list[int] = []

    def store(batch: list[int]) -> None:
        begun.set()
        let_go.wait(30)
        stored.extend(batch)

    queue = make(consumer=bq.in_thread(store), max_batch=2)
    await queue.produce_many([1, 2, 3, 4, 5])
    await asyncio.to_thread(begun.wait, 30)
    report = await queue.shutdown(timeout=0.05)
    assert (report.undelivered, report.still_running) == ([1, 2, 3, 4, 5], 2)
    check_report(report)
    let_go.set()
    await asyncio.sleep(0.05)
    assert stored == [1, 2]
    assert check(queue).handled == 0


def test_c_2_an_async_call_that_exceeds_its_time_is_ended_at_once():
    async def main() -> BaseException:
        errors = RecordingErrorHandler()
        queue = make(consumer=RecordingHandler(delay=60), handler_timeout=1.0, on_error=errors)
        await queue.produce(1)
        await queue.flush()
        await queue.shutdown()
        return errors.failures[0][1]

    error = _run(main())
    assert isinstance(error, TimeoutError)
    assert "handler_timeout=1.0" in str(error)
    assert "may have" not in str(error)


def test_c_18_in_thread_runs_in_virtual_time():
    def work(batch: list[int]) -> None:
        time.sleep(0.05)

    async def main() -> tuple[int, float]:
        queue = make(consumer=bq.in_thread(work), handler_timeout=60.0, max_batch=1)
        await queue.produce_many(range(5))
        await queue.flush()
        await queue.shutdown()
        return queue.stats().handled, asyncio.get_running_loop().time()

    assert _run(main()) == (5, 0.0)


@pytest.mark.real_time
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration])
async def test_c_18_whatever_a_thread_raises_fails_its_batch_alone(error):
    def work(batch: list[int]) -> None:
        if batch == [0]:
            raise error

    errors = RecordingErrorHandler()
    queue = make(consumer=bq.in_thread(work), max_batch=1, on_error=errors)
    await queue.produce_many([0, 1, 2])
    await queue.flush(timeout=30)
    assert not queue.closed
    ((items, failure),) = errors.failures
    assert (items, type(failure)) == ([0], RuntimeError)
    assert queue.stats().handled == 2
    await queue.shutdown()


@pytest.mark.real_time
async def test_c_18_sys_exit_in_a_process_fails_its_batch_alone():
    errors = RecordingErrorHandler()
    queue = make(consumer=bq.in_process(process_functions.exit_on_zero), max_batch=1, on_error=errors)
    await queue.produce_many([0, 1])
    await queue.flush(timeout=60)
    ((items, failure),) = errors.failures
    assert (items, type(failure)) == ([0], RuntimeError)
    assert "exit_on_zero raised SystemExit(3)" in str(failure)
    assert queue.stats().handled == 1
    await queue.shutdown()


# -- C-10 and C-15 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["filter", "processor", "plain structlog"])
async def test_c_10_a_logger_that_raises_stops_no_work(kind):
    class Filter(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise RuntimeError

    def processor(*_: Any) -> Any:
        raise RuntimeError

    logger = logging.getLogger("batchqueue_async")
    broken = Filter()
    if kind == "filter":
        logger.addFilter(broken)
    elif kind == "processor":
        structlog.configure(processors=[processor])
    else:
        structlog.configure(wrapper_class=structlog.BoundLogger, logger_factory=structlog.ReturnLoggerFactory())
    try:
        errors = RecordingErrorHandler()
        handler = RecordingHandler[int](fail=lambda batch: ValueError() if batch == [0] else None)
        queue = make(consumer=handler, max_batch=1, on_error=errors)
        await queue.produce_many(range(5))
        await queue.flush(timeout=5)
        assert (handler.handled, [items for items, _ in errors.failures]) == ([1, 2, 3, 4], [[0]])
        assert not queue.closed
        assert (await queue.shutdown()).complete
    finally:
        logger.removeFilter(broken)
        structlog.reset_defaults()


@pytest.mark.parametrize("where", ["no loop", "another loop"])
def test_c_15_a_call_from_elsewhere_on_the_same_thread_is_told_at_its_first_slow_step(where):
    handler = RecordingHandler[int]()
    handler.hold()
    home = VirtualTimeLoop()
    other = asyncio.new_event_loop()

    async def begin() -> bq.BatchQueue[int]:
        queue = make(consumer=handler, buffer_size=10)
        for number in range(2):
            await queue.produce(number)  # the first is held by the handler, the second waits
            await settle()
        return queue

    queue = home.run_until_complete(begin())

    def produce() -> bool:
        if where == "no loop":
            return queue.produce_nowait(2)
        return other.run_until_complete(queue.produce(2))

    # What the fast path takes is accepted: to look for the running loop would double the price of an item.
    assert [produce() for _ in range(9)] == [True] * 9
    with pytest.raises(bq.WrongLoopError):
        produce()
    for call in (
        lambda: queue.produce_many_nowait([1]),
        lambda: other.run_until_complete(queue.produce_many([1])),
        lambda: other.run_until_complete(queue.flush()),
        queue.stats,
        lambda: queue.remove_handler(int),
    ):
        with pytest.raises(bq.WrongLoopError):
            call()
    handler.release()
    assert home.run_until_complete(queue.shutdown()).handled == 11  # a promise all the same
    home.close()
    other.close()


# -- C-27: producers that wait for room together ----------------------------------------------------------------------


async def _produce_through_a_full_buffer(producers: int, way: str) -> int:
    queue = make(
        consumer=RecordingHandler(), buffer_size=1_000, max_batch=1_000, partitions=bq.PartitionPolicy.fixed(2)
    )
    each = 24_000 // producers

    async def by_item() -> None:
        for number in range(each):
            assert await queue.produce(number)

    async def by_ten() -> None:
        for number in range(0, each, 10):
            assert await queue.produce_many(range(number, number + 10)) == 10

    with Meter() as meter:
        async with asyncio.TaskGroup() as group:
            for _ in range(producers):
                group.create_task({"by item": by_item, "by ten": by_ten}[way]())
        await queue.flush()
    assert check(queue).handled == 24_000
    await queue.shutdown()
    return meter.lines


@pytest.mark.parametrize("way", ["by item", "by ten"])
def test_c_27_producers_that_get_room_together_fill_it_at_the_usual_speed(way):
    """Each took the slow way for each item, for as long as another had not run since its place was reserved."""
    alone, together = (_run(_produce_through_a_full_buffer(producers, way)) for producers in (1, 8))
    assert together < 4 * alone, (alone, together)


# -- C-28: a StopIteration is nobody's result -----------------------------------------------------------


def _first_tag(item: list[int]) -> int:
    return next(iter(item))


async def test_c_28_a_key_that_raises_stop_iteration_ends_a_produce_with_an_error():
    selector: Any = bq.by_key(_first_tag)
    queue = make(consumer=RecordingHandler[Any](), selector=selector, partitions=bq.PartitionPolicy.fixed(4))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="raised StopIteration") as met:
            await queue.produce([])
        assert isinstance(met.value.__cause__, StopIteration)
        with pytest.raises(StopIteration):
            queue.produce_nowait([])
    tasks = [asyncio.ensure_future(queue.produce(item)) for item in ([], [1])]
    await settle()
    assert [task.done() for task in tasks] == [True, True]
    assert isinstance(tasks[0].exception(), RuntimeError)
    assert await tasks[1]
    assert (await queue.shutdown()).handled == 1


async def test_c_28_a_handler_that_raises_stop_iteration_before_its_first_step_has_failed():
    def handle(batch: list[int]) -> Any:
        raise StopIteration(batch)

    inspect_as_async(handle)
    queue = make(consumer=handle)
    await queue.produce(1)
    await queue.flush()
    stats = queue.stats()
    assert (stats.handled, stats.failed) == (0, 1)
    await queue.shutdown()


def inspect_as_async(function: Any) -> None:
    """Let a plain function that returns awaitables pass for a coroutine function, as some decorators do."""
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(function)
    else:
        function._is_coroutine = asyncio.coroutines._is_coroutine
