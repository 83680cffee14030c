"""The end of a queue: it drains, its deadline is real, and its report places every item."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from queue_tools import Item, check, check_report, kinds, make, now, outcome

import batchqueue_async as bq
from batchqueue_async.queue.shutdown import CANCEL_GRACE
from batchqueue_async.testing import RecordingErrorHandler, RecordingHandler, advance, settle


async def test_shutdown_drains_everything():
    handler = RecordingHandler[int](delay=0.5)
    queue = make(
        consumer=handler, max_batch=7, workers=bq.WorkerPolicy.fixed(2), partitions=bq.PartitionPolicy.fixed(5)
    )
    assert await queue.produce_many(range(100)) == 100
    report = await queue.shutdown()
    assert sorted(handler.handled) == list(range(100))
    assert (report.handled, report.failed, report.undelivered, report.accepted) == (100, 0, [], 100)
    assert report.complete
    assert report.name == "q"
    assert report.elapsed == now()
    check(queue)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("q-")]


async def test_shutdown_of_an_idle_queue_is_immediate():
    queue = make(workers=bq.WorkerPolicy.fixed(4), partitions=bq.PartitionPolicy.fixed(4))
    await advance(10)
    report = await queue.shutdown()
    assert (report.elapsed, report.accepted, now()) == (0.0, 0, 10.0)


async def test_the_report_counts_each_outcome():
    good, bad, unknown = kinds(3)
    queue = make(strategy=bq.BufferStrategy.DROP_OLDEST, buffer_size=4, on_error=RecordingErrorHandler())
    queue.add_handler(good, RecordingHandler())
    queue.add_handler(bad, RecordingHandler(fail=ValueError()))
    for number, kind in enumerate([good, good, good, bad, unknown, good]):
        assert queue.produce_nowait(kind(number))
    report = await queue.shutdown()
    assert (report.handled, report.failed, report.unhandled, report.dropped_after) == (2, 1, 1, 2)
    check_report(report)
    check(queue)


async def test_a_deadline_gives_back_what_is_left_the_interrupted_call_first():
    handler = RecordingHandler[int]()
    handler.hold()
    on_error = RecordingErrorHandler()
    queue = make(consumer=handler, max_batch=2, on_error=on_error)
    assert await queue.produce_many(range(7)) == 7
    await settle()
    report = await queue.shutdown(timeout=3.0)
    assert now() == 3.0
    assert report.undelivered == list(range(7))
    assert (report.handled, report.failed, report.complete, handler.cancelled) == (0, 0, False, 1)
    assert on_error.failures == []  # a call that was cut off has no outcome
    check_report(report)
    assert check(queue).undelivered == 7


async def test_drain_timeout_is_the_deadline_where_none_is_given():
    handler = RecordingHandler[int]()
    handler.hold()
    queue = make(consumer=handler, drain_timeout=7.0)
    assert await queue.produce(1)
    report = await queue.shutdown()
    assert (report.elapsed, report.undelivered) == (7.0, [1])


async def test_a_shutdown_without_any_time_gives_everything_back():
    queue = make(consumer=RecordingHandler[int](delay=1.0))
    assert await queue.produce_many(range(5)) == 5
    report = await queue.shutdown(timeout=0)
    assert report.undelivered == list(range(5))
    assert (now(), report.elapsed) == (0.0, 0.0)
    other = make(consumer=RecordingHandler())
    assert (await other.shutdown(timeout=0)).complete


async def test_a_handler_that_swallows_its_cancellation_is_left_behind(logs):
    release = asyncio.Event()

    async def stubborn(batch: list[int]) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    queue = make(consumer=stubborn, max_batch=2)
    assert await queue.produce_many(range(5)) == 5
    await settle()
    report = await queue.shutdown(timeout=1.0)
    assert now() == 1.0 + CANCEL_GRACE
    assert report.undelivered == [0, 1, 2, 3, 4]
    before = check(queue)
    release.set()  # what it still does no longer counts
    await settle()
    assert dataclasses.replace(check(queue), workers=()) == dataclasses.replace(before, workers=())
    event = next(event for event in logs if event["event"] == "queue_closed_undelivered")
    assert (event["queue"], event["undelivered"], event["log_level"]) == ("q", 5, "warning")


async def test_a_handler_that_needs_a_moment_to_clean_up_gets_it():
    cleaned = []

    async def careful(batch: list[int]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(CANCEL_GRACE / 2)
            cleaned.append(now())

    queue = make(consumer=careful)
    assert await queue.produce(1)
    report = await queue.shutdown(timeout=1.0)
    assert cleaned == [1.0 + CANCEL_GRACE / 2] == [report.elapsed]
    assert report.undelivered == [1]


async def test_a_second_call_joins_and_can_bring_the_deadline_forward():
    handler = RecordingHandler[int]()
    handler.hold()
    queue = make(consumer=handler)
    assert await queue.produce(1)
    await settle()
    first = asyncio.create_task(queue.shutdown(timeout=100.0))
    await advance(1.0)
    second = asyncio.create_task(queue.shutdown(timeout=200.0))  # not later
    third = asyncio.create_task(queue.shutdown(timeout=2.0))
    assert (await first) is (await second) is (await third) is (await queue.shutdown())
    assert now() == 3.0


async def test_those_who_wait_for_items_that_are_cut_off_are_told():
    handler = RecordingHandler[int]()
    handler.hold()
    queue = make(consumer=handler, max_batch=2)
    delivery = asyncio.create_task(queue.deliver(range(5)))
    await settle()
    flush = asyncio.create_task(queue.flush())
    await settle()
    report = await queue.shutdown(timeout=1.0)
    error = await outcome(delivery)
    assert isinstance(error, bq.DeliveryError)
    ((items, reason),) = error.failures
    assert (list(items), type(reason)) == (report.undelivered, bq.QueueClosedError)
    flush_error = await outcome(flush)
    assert isinstance(flush_error, bq.QueueClosedError)
    assert "queue 'q'" in str(flush_error)


async def test_deliver_and_flush_end_well_when_the_drain_does():
    handler = RecordingHandler[int](delay=1.0)
    queue = make(consumer=handler, max_batch=2)
    delivery = asyncio.create_task(queue.deliver(range(5)))
    await settle()
    flush = asyncio.create_task(queue.flush())
    assert (await queue.shutdown()).handled == 5
    assert [await outcome(delivery), await outcome(flush)] == [None, None]


async def test_items_that_are_moving_are_drained_too():
    handler = RecordingHandler[Item](delay=0.5)
    queue = make(partitions=bq.PartitionPolicy.adaptive(), workers=bq.WorkerPolicy.fixed(2), max_batch=1)
    queue.add_handler(Item, handler)
    many = kinds(20)
    assert await queue.produce_many([kind(0) for kind in many]) == 20
    await settle()
    for kind in many:
        queue.add_handler(kind, handler)
    assert await queue.produce_many([kind(1) for kind in many]) == 20
    assert queue._router.migrations
    report = await queue.shutdown(timeout=100)
    assert (report.handled, report.undelivered) == (40, [])
    for kind in many:
        assert [item.number for item in handler.handled if type(item) is kind] == [0, 1]


async def test_items_that_are_moving_are_given_back_too():
    handler = RecordingHandler[Item]()
    handler.hold()
    queue = make(partitions=bq.PartitionPolicy.adaptive(), max_batch=1)
    queue.add_handler(Item, handler)
    many = kinds(20)
    assert await queue.produce_many([kind(0) for kind in many]) == 20
    await settle()
    for kind in many:
        queue.add_handler(kind, handler)
    delivery = asyncio.create_task(queue.deliver([kind(1) for kind in many]))
    await settle()
    assert queue._router.migrations
    report = await queue.shutdown(timeout=1.0)
    assert sorted((type(item).__name__, item.number) for item in report.undelivered) == sorted(
        (kind.__name__, number) for kind in many for number in (0, 1)
    )
    assert sum(len(failure.items) for failure in (await outcome(delivery)).failures) == 20
    check(queue)


async def test_a_balancer_stops_at_shutdown_and_a_hand_over_is_called_off():
    class Swap:
        def assign(self, throughput, owners, workers):
            return [1 - owner for owner in owners]

    handler = RecordingHandler[int](delay=5.0)
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(2),
        balancer=Swap(),
        balance_interval=1.0,
        consumer=handler,
        max_batch=1,
    )
    assert await queue.produce_many(range(6)) == 6
    await advance(1.5)  # both partitions are in flight and on their way
    report = await queue.shutdown()
    assert report.handled == 6
    check(queue)


@pytest.mark.parametrize("timeout", [None, 0.5])
async def test_growth_and_handlers_end_with_the_queue(timeout):
    queue = make(partitions=bq.PartitionPolicy.adaptive())
    queue.add_handler(Item, RecordingHandler())
    await queue.shutdown(timeout)
    with pytest.raises(bq.QueueClosedError):
        queue.add_handler(int, RecordingHandler())
    assert queue.remove_handler(Item)
    assert repr(queue) == "<BatchQueue 'q' closed, 1 workers, 1 partitions>"
