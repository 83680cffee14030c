"""Faults of list C in the queue itself: handlers that misbehave, programs that end badly, work that grows."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import anyio
import pytest
from queue_tools import Item, check, check_report, make

import batchqueue_async as bq
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
