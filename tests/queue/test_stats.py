"""What a queue tells about itself."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_tools import check, make

import batchqueue_async as bq
from batchqueue_async.queue.stats import Histogram
from batchqueue_async.testing import RecordingHandler, advance, settle


async def test_a_snapshot_of_every_field():
    handler = RecordingHandler[int]()
    handler.hold()
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(3),
        selector=lambda item, count: item % count,
        strategy=bq.BufferStrategy.IF_POSSIBLE,
        buffer_size=4,
        max_batch=2,
        consumer=handler,
    )
    assert queue.produce_many_nowait([1, 1]) == 2
    await advance(1.0)
    assert queue.produce_many_nowait([0, 1, 1, 2, 2, 2]) == 6
    assert queue.produce_many_nowait([0] * 10) == 3
    await advance(0.5)
    stats = check(queue)
    assert dataclasses.asdict(stats) | {"partitions": None, "workers": None} == {
        "name": "q",
        "attempted": 18,
        "accepted": 8 + 3,
        "refused": 7,
        "dropped_before": 0,
        "dropped_after": 0,
        "handled": 0,
        "failed": 0,
        "unhandled": 0,
        "in_flight": 2 + 2,
        "undelivered": 0,
        "used": 7,
        "capacity": 12,
        "oldest_age": 0.5,
        "partitions": None,
        "workers": None,
        "batch_sizes": dataclasses.asdict(bq.Distribution(2, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0, ((84, 2),))),
        "queue_latency": dataclasses.asdict(stats.queue_latency),
        "loop_lag": stats.loop_lag,
        "handlers": (dataclasses.asdict(bq.HandlerStats("consumer", calls=0, items=0, failed=0, seconds=0.0)),),
        "last_error": None,
        "age": 0.0,
        "used_bytes": 0,
        "capacity_bytes": None,
        "wake_ups": 0,
    }
    assert stats.queue_latency.count == 2
    assert stats.queue_latency.max == 0.0
    assert stats.dropped == 0
    assert stats.used_ratio == 7 / 12
    assert [
        (each.index, each.used, each.capacity, each.accepted, each.owner, each.waiting) for each in stats.partitions
    ] == [
        (0, 2, 4, 4, 0, 0),
        (1, 2, 4, 4, 1, 0),
        (2, 3, 4, 3, 0, 0),
    ]
    assert [each.used_ratio for each in stats.partitions] == [0.5, 0.5, 0.75]
    assert [each.index for each in stats.top(2)] == [2, 0]
    assert [each.index for each in stats.top(99)] == [2, 0, 1]
    assert stats.top(0) == ()
    assert [(each.index, each.partitions, each.taken, each.in_flight) for each in stats.workers] == [
        (0, 2, 2, 2),
        (1, 1, 2, 2),
    ]
    handler.release()
    await queue.flush(timeout=1)
    stats = check(queue)
    assert (stats.handled, stats.in_flight, stats.used, stats.oldest_age) == (11, 0, 0, 0.0)
    assert sum(worker.taken for worker in stats.workers) == 11
    assert stats.workers[1].busy == 1.5


async def test_a_snapshot_does_not_change():
    queue = make(consumer=RecordingHandler())
    before = queue.stats()
    copy = dataclasses.asdict(before)
    assert await queue.produce(1)
    await queue.flush()
    assert dataclasses.asdict(before) == copy
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.accepted = 7


async def test_counters_add_up_at_every_instant():
    handler = RecordingHandler[int](delay=0.3, fail=lambda batch: ValueError() if batch[0] % 5 == 0 else None)
    queue = make(
        consumer=handler,
        strategy=bq.BufferStrategy.DROP_OLDEST,
        buffer_size=5,
        max_batch=2,
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(3),
    )
    for number in range(100):
        assert await queue.produce(number)
        check(queue)
        if number % 7 == 0:
            await advance(0.1)
            check(queue)
    await queue.shutdown(timeout=0.4)
    stats = check(queue)
    assert stats.dropped_after
    assert stats.failed
    assert stats.undelivered


async def test_oldest_age_is_an_upper_bound_and_falls_as_items_leave():
    handler = RecordingHandler[int]()
    handler.hold()
    queue = make(consumer=handler, max_batch=1)
    assert await queue.produce(0)
    await settle()
    assert check(queue).oldest_age == 0.0  # in a call, no longer waiting
    await advance(1.0)
    assert await queue.produce(1)
    await advance(1.0)
    assert await queue.produce(2)
    assert check(queue).oldest_age >= 1.0
    handler.release()
    await queue.flush(timeout=1)
    assert check(queue).oldest_age == 0.0


async def test_batch_sizes_and_latency_are_measured():
    handler = RecordingHandler[int](delay=1.0)
    queue = make(consumer=handler, max_batch=4)
    assert await queue.produce_many(range(10)) == 10
    await queue.flush(timeout=10)
    stats = check(queue)
    assert (stats.batch_sizes.count, stats.batch_sizes.max) == (3, 4)
    assert stats.batch_sizes.mean == pytest.approx(10 / 3)
    assert stats.queue_latency.count == 3
    assert stats.queue_latency.max == 2.0


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=300), st.sampled_from([0.5, 0.95, 0.99]))
def test_percentiles_err_by_less_than_a_fifth_and_never_low(values, share):
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert exact * (1 - 1e-9) <= histogram.percentile(share) < exact * 1.2
    summary = histogram.summary()
    assert (summary.count, summary.max) == (len(values), max(values))
    assert summary.mean == pytest.approx(sum(values) / len(values))
    assert summary.p50 <= summary.p95 <= summary.p99 <= summary.max


def test_an_empty_histogram_and_values_below_its_reach():
    assert Histogram().summary() == bq.Distribution()
    assert Histogram().percentile(0.5) == 0.0
    tiny = Histogram()
    tiny.record(0.0, times=3)
    assert (tiny.count, tiny.percentile(0.99)) == (3, 0.0)


def test_buckets_begin_at_a_power_of_two_and_hold_their_upper_edge():
    histogram = Histogram()
    for value in (2.0**-20, 2.0**-19, 2.0**-19 * 1.0001, 0.5, 1.0, 1.0001, 4096.0):
        histogram.record(value)
    assert histogram.summary().buckets == ((0, 1), (4, 1), (5, 1), (76, 1), (80, 1), (81, 1), (128, 1))
    assert histogram.summary().total == pytest.approx(histogram.total)


async def test_each_call_of_a_handler_is_timed_once_failed_or_not():
    async def handle(batch):
        await asyncio.sleep(2.0)
        if batch[0] == 1:
            raise ValueError

    queue = make(consumer=handle, max_batch=1)
    await queue.produce_many([0, 1, 2])
    await queue.flush(timeout=60)
    (stats,) = check(queue).handlers
    assert (stats.calls, stats.failed, stats.durations.count, stats.durations.total) == (3, 1, 3, 6.0)
    assert stats.seconds == stats.durations.total
