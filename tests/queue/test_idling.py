"""Rest and linger of the drain tasks, to the exact instant of virtual time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_tools import check, make, now

import batchqueue_async as bq
from batchqueue_async.queue.drain import DrainRules
from batchqueue_async.testing import RecordingHandler, advance, settle


def rules(**options) -> DrainRules:
    return DrainRules(**{"max_batch": 10, "linger": 0.0, "whole_rounds": True, **options})


def timers() -> list[float]:
    """When the loop's timers fire, except those of the test's own sleeps."""
    return sorted(
        timer.when()
        for timer in asyncio.get_running_loop()._scheduled
        if not timer.cancelled() and "DrainTask" in repr(timer._callback)
    )


async def sleeps(until: float) -> list[float]:
    """The instants at which a worker set a timer, and how long it was to sleep."""
    loop, naps = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def spy(delay, callback, *args, **options):
        if "DrainTask" in repr(callback):
            naps.append(delay)
        return call_later(delay, callback, *args, **options)

    loop.call_later = spy
    await advance(until)
    loop.call_later = call_later
    return naps


# --- backoff


@given(st.floats(1e-6, 10.0), st.floats(1.0, 1e6), st.integers(0, 2000))
def test_backoff_doubles_from_min_idle_to_max_idle(least, ratio, rounds):
    each = rules(min_idle=least, max_idle=least * ratio)
    assert each.backoff(0) == least
    assert least <= each.backoff(rounds) <= least * ratio
    assert each.backoff(rounds + 1) in {each.backoff(rounds) * 2, least * ratio}
    assert each.backoff(100) == least * ratio


async def test_the_sleeps_double_and_then_the_drain_parks():
    make(consumer=RecordingHandler(), min_idle=0.001, max_idle=0.050)
    assert await sleeps(until=10.0) == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032]
    assert timers() == []
    assert len(asyncio.get_running_loop()._scheduled) == 0


async def test_data_resets_the_backoff():
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, min_idle=1.0, max_idle=100.0)
    assert await sleeps(until=20.0) == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert await queue.produce(1)
    assert await sleeps(until=10.0) == [1.0, 2.0, 4.0, 8.0]
    assert handler.times == [20.0]


async def test_where_on_idle_is_wanted_it_polls_at_max_idle_for_ever():
    class Timer(RecordingHandler[int]):
        async def on_idle(self) -> None: ...

    make(consumer=Timer(), min_idle=1.0, max_idle=4.0)
    assert await sleeps(until=22.5) == [1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("at", [0.0, 0.0005, 0.001, 0.0025, 0.0629, 0.063, 5.0])
async def test_the_first_item_cuts_the_sleep_short_at_any_moment(at):
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, workers=bq.WorkerPolicy.fixed(3), partitions=bq.PartitionPolicy.fixed(3))
    await advance(at)
    assert await queue.produce_many([1, 2, 3]) == 3
    await settle()
    assert handler.times == [at] * 3


async def test_an_item_wakes_only_the_worker_of_its_partition():
    queue = make(
        consumer=RecordingHandler(),
        workers=bq.WorkerPolicy.fixed(3),
        partitions=bq.PartitionPolicy.fixed(3),
        selector=lambda item, count: item,
    )
    await advance(1.0)
    rounds = [worker.rounds for worker in queue._drains]
    assert await queue.produce(1)
    await queue.flush(timeout=1)
    assert [worker.rounds - before for worker, before in zip(queue._drains, rounds, strict=True)] == [0, 1, 0]


# --- linger


async def test_a_partial_batch_leaves_exactly_at_linger():
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, max_batch=10, linger=0.5)
    await advance(1.0)
    for number in range(5):
        assert await queue.produce(number)
        await advance(0.1)
    await advance(5.0)
    assert (handler.batches, handler.times) == ([[0, 1, 2, 3, 4]], [1.5])


async def test_a_batch_leaves_the_moment_it_is_full():
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, max_batch=5, linger=0.5)
    for number in range(12):
        assert queue.produce_nowait(number)
        await advance(0.0625)
    assert handler.batches == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert handler.times == [4 * 0.0625, 9 * 0.0625]
    await advance(1.0)
    assert handler.batches[2:] == [[10, 11]]
    assert handler.times[2:] == [10 * 0.0625 + 0.5]


@pytest.mark.parametrize("partitions", [2, 3, 7])
@pytest.mark.parametrize("bulk", [1, 2, 3])
async def test_a_batch_that_fills_over_several_partitions_leaves_when_it_is_full(partitions, bulk):
    handler = RecordingHandler[int]()
    queue = make(
        consumer=handler, partitions=bq.PartitionPolicy.fixed(partitions), max_batch=12, linger=100.0, buffer_size=100
    )
    for number in range(0, 36, bulk):
        assert queue.produce_many_nowait(range(number, number + bulk)) == bulk
        await settle()
        assert len(handler.batches) == (number + bulk) // 12, f"after {number + bulk} items"
    assert [len(batch) for batch in handler.batches] == [12, 12, 12]
    assert now() == 0.0


@pytest.mark.parametrize("how", ["produce", "produce_many", "nowait"])
async def test_a_full_partition_does_not_linger(how):
    """Where the buffer is smaller than the batch, waiting would stop the producers for nothing."""
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, max_batch=100, linger=10.0, buffer_size=4)
    if how == "produce":
        for number in range(4):
            assert await queue.produce(number)
    elif how == "nowait":
        assert all(queue.produce_nowait(number) for number in range(4))
    else:
        assert await queue.produce_many(range(4)) == 4
    await settle()
    assert handler.batches == [[0, 1, 2, 3]]
    assert handler.times == [0.0]


async def test_producers_that_wait_do_not_linger():
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, max_batch=100, linger=10.0, buffer_size=4)
    assert await queue.produce_many(range(40)) == 40
    await settle()
    assert now() == 0.0
    assert sum(map(len, handler.batches)) == 40


async def test_flush_deliver_by_linger_and_shutdown_end_the_linger():
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, linger=60.0)
    assert await queue.produce(1)
    await queue.flush()
    assert (handler.handled, now()) == ([1], 0.0)
    await queue.deliver([2])
    assert now() == 60.0  # deliver does not hurry the others
    assert await queue.produce(3)
    await queue.shutdown()
    assert (handler.handled, now()) == ([1, 2, 3], 60.0)


async def test_the_items_behind_a_full_batch_linger_by_their_own_age():
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, max_batch=4, linger=1.0, buffer_size=100)
    assert await queue.produce_many([0, 1, 2]) == 3
    await advance(0.5)
    assert await queue.produce_many([3, 4, 5]) == 3
    await settle()
    assert handler.times == [0.5]
    await advance(5.0)
    assert handler.batches == [[0, 1, 2, 3], [4, 5]]
    assert handler.times[1] <= 1.5  # an upper bound on their age is what the queue knows


async def test_handlers_by_type_linger_by_partition():
    handler = RecordingHandler[object]()
    queue = make(max_batch=3, linger=1.0)
    queue.add_handler(object, handler)
    assert await queue.produce_many([1, "a", 2.0]) == 3
    await settle()
    assert handler.times == [0.0]
    assert await queue.produce(4)
    await advance(1.0)
    assert handler.times == [0.0, 1.0]
    check(queue)


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, 0.1, 0.3, 1.1])), min_size=1, max_size=15),
    partitions=st.integers(1, 4),
    max_batch=st.integers(1, 12),
    buffer_size=st.integers(1, 12),
)
async def test_no_item_waits_longer_than_linger(steps, partitions, max_batch, buffer_size):
    produced: dict[int, float] = {}
    waits: list[float] = []

    async def consume(batch: list[int]) -> None:
        assert len(batch) <= max_batch
        waits.extend(now() - produced[number] for number in batch)

    queue = make(
        consumer=consume,
        partitions=bq.PartitionPolicy.fixed(partitions),
        max_batch=max_batch,
        linger=1.0,
        buffer_size=buffer_size,
    )
    for count, pause in steps:
        for _ in range(count):
            produced[len(produced)] = now()
            assert await queue.produce(len(produced) - 1)
        await advance(pause)
    await advance(1.0)
    assert len(waits) == len(produced)
    assert max(waits) <= 1.0 + 1e-9
    await queue.shutdown()
