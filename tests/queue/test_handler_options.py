"""What a handler may ask for: its own limits, another try, and a last call."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from queue_tools import Item, make

import batchqueue_async as bq
from batchqueue_async.testing import RecordingHandler, advance, settle


class Other(Item):
    pass


# --- max_batch, timeout, linger


async def test_a_handler_has_batches_of_its_own_size():
    small, large = RecordingHandler[Item](), RecordingHandler[Item]()
    queue = make(max_batch=20)
    queue.add_handler(Item, small, max_batch=3)
    queue.add_handler(Other, large)
    await queue.produce_many([Item(number) for number in range(7)] + [Other(number) for number in range(7)])
    await queue.shutdown()
    assert [len(batch) for batch in small.batches] == [3, 3, 1]
    assert [len(batch) for batch in large.batches] == [7]


async def test_a_handler_has_a_timeout_of_its_own_in_place_of_the_queues():
    async def slow(batch):
        await asyncio.sleep(3)

    queue = make(handler_timeout=10.0)
    queue.add_handler(Item, slow, timeout=1.0)
    queue.add_handler(Other, slow)
    await queue.produce_many([Item(1), Other(2)])
    await queue.flush()
    stats = queue.stats()
    assert (stats.failed, stats.handled) == (1, 1)
    await queue.shutdown()


async def test_a_handler_lingers_by_its_own_time():
    handler = RecordingHandler[Item]()
    queue = make(max_batch=10)
    queue.add_handler(Item, handler, linger=1.0)
    await queue.produce(Item(1))
    await advance(0.9)
    assert not handler.batches
    await queue.produce(Item(2))
    await advance(0.2)
    assert [len(batch) for batch in handler.batches] == [2]
    await queue.produce_many([Item(number) for number in range(10)])
    await settle()
    assert [len(batch) for batch in handler.batches] == [2, 10]  # a full one leaves at once
    await queue.produce(Item(3))
    await queue.flush()  # and so does one that somebody waits for
    await queue.shutdown()


async def test_types_of_their_own_partitions_linger_each_by_its_time():
    lingering, prompt = RecordingHandler[Item](), RecordingHandler[Item]()
    queue = make(partitions=bq.PartitionPolicy.adaptive(), workers=bq.WorkerPolicy.fixed(1))
    queue.add_handler(Item, lingering, weight=10, linger=1.0)
    queue.add_handler(Other, prompt, weight=10)
    assert queue.partition_count > 1
    await queue.produce(Item(1))
    await queue.produce(Other(2))
    await settle()
    assert [len(batch) for batch in prompt.batches] == [1]
    assert not lingering.batches
    await advance(1.1)
    assert [len(batch) for batch in lingering.batches] == [1]
    queue.remove_handler(Item)
    queue.add_handler(Item, lingering)
    await queue.produce(Item(3))
    await settle()
    assert len(lingering.batches) == 2
    await queue.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 11}, "max_batch=11 is above the queue's max_batch=10; raise the queue's max_batch"),
        ({"max_batch": 0}, "max_batch=0 is below 1"),
        ({"linger": -1}, "linger=-1 is below 0"),
        ({"timeout": 0}, "timeout=0 is not above 0"),
        ({"weight": "x"}, "weight='x' is not a finite number"),
    ],
)
async def test_an_option_out_of_its_range_is_refused(options, message):
    queue = make(max_batch=10)
    with pytest.raises(bq.ConfigError) as caught:
        queue.add_handler(Item, RecordingHandler(), **options)
    assert message in str(caught.value)
    with pytest.raises(bq.ConfigError):
        queue.handler(Item, **options)(RecordingHandler().consume)
    await queue.shutdown()


async def test_every_fault_of_a_handler_is_told_at_once():
    queue = make(max_batch=10)
    with pytest.raises(bq.ConfigError) as caught:
        queue.add_handler(Item, lambda batch, more: None, max_batch=99, timeout=-1)
    assert {fault.path for fault in caught.value.faults} == {"handler", "max_batch", "timeout"}
    await queue.shutdown()


# --- another try


class Failing:
    """Fails its first calls, each with the next of the errors, and handles the rest."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = []

    async def consume(self, batch):
        self.calls.append((asyncio.get_running_loop().time(), list(batch)))
        if self.errors:
            raise self.errors.pop(0)


RETRY = bq.HandlerRetry(initial=1.0, multiplier=2.0, max_delay=10.0, max_attempts=4)


async def test_a_batch_whose_handler_says_so_comes_again_with_backoff():
    handler = Failing(bq.RetryableError("away"), bq.RetryableError("away"))
    queue = make(consumer=handler, retry=RETRY, on_error=lambda batch, error: pytest.fail("it did not fail"))
    start = asyncio.get_running_loop().time()
    await queue.deliver([1, 2])
    assert [(round(at - start), batch) for at, batch in handler.calls] == [(0, [1, 2]), (1, [1, 2]), (3, [1, 2])]
    stats = queue.stats()
    assert (stats.handled, stats.failed, stats.last_error.count) == (2, 0, 2)
    await queue.shutdown()


async def test_the_time_that_a_destination_asks_for_is_waited():
    handler = Failing(bq.RetryableError("away", retry_after=7.0), bq.RetryableError("away", retry_after=0.1))
    queue = make(consumer=handler, retry=RETRY)
    await queue.deliver([1])
    times = [at for at, _ in handler.calls]
    assert [round(after - before) for before, after in pairwise(times)] == [7, 2]
    await queue.shutdown()


async def test_after_the_limit_the_batch_fails_as_ever():
    failed = []
    handler = Failing(*(bq.RetryableError("away") for _ in range(9)))
    queue = make(consumer=handler, retry=RETRY, on_error=lambda batch, error: failed.append(batch))
    with pytest.raises(bq.DeliveryError) as caught:
        await queue.deliver([1, 2])
    assert len(handler.calls) == 4
    assert failed == [[1, 2]]
    assert [failure.items for failure in caught.value.failures] == [(1, 2)]
    assert queue.stats().failed == 2
    await queue.shutdown()


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_on_error_may_ask_for_another_try(asynchronous):
    seen = []

    def answer(batch, error):
        seen.append(type(error))
        return bq.RETRY

    async def answer_later(batch, error):
        return answer(batch, error)

    handler = Failing(ValueError("one"), KeyError("two"))
    queue = make(consumer=handler, retry=RETRY, on_error=answer_later if asynchronous else answer)
    await queue.deliver([1])
    assert seen == [ValueError, KeyError]
    assert (queue.stats().handled, queue.stats().failed) == (1, 0)
    await queue.shutdown()


async def test_on_error_that_always_asks_meets_the_limit():
    handler = Failing(*(ValueError("no") for _ in range(9)))
    queue = make(consumer=handler, retry=RETRY, on_error=lambda batch, error: bq.RETRY)
    await queue.produce(1)
    await queue.flush()
    assert len(handler.calls) == 4
    assert queue.stats().failed == 1
    await queue.shutdown()


async def test_one_attempt_means_no_other():
    handler = Failing(bq.RetryableError("away"))
    queue = make(consumer=handler, retry=bq.HandlerRetry(max_attempts=1))
    await queue.produce(1)
    await queue.flush()
    assert len(handler.calls) == 1
    assert queue.stats().failed == 1
    await queue.shutdown()


async def test_a_batch_that_comes_again_keeps_its_order():
    handler = Failing(bq.RetryableError("away"))
    queue = make(retry=RETRY, max_batch=2)
    queue.add_handler(Item, handler)
    items = [Item(number) for number in range(5)]
    await queue.produce_many(items)
    await queue.flush()
    assert [batch for _, batch in handler.calls] == [items[:2], items[:2], items[2:4], items[4:]]
    await queue.shutdown()


async def test_a_shutdown_cuts_a_backoff_off_and_reports_the_batch():
    handler = Failing(*(bq.RetryableError("away") for _ in range(9)))
    queue = make(consumer=handler, retry=bq.HandlerRetry(initial=100.0, max_delay=100.0))
    await queue.produce_many([1, 2])
    await settle()
    report = await queue.shutdown(timeout=5)
    assert report.undelivered == [1, 2]
    assert report.elapsed <= 6
    assert queue.stats().adds_up


async def test_a_flush_of_a_batch_that_comes_again_keeps_its_timeout():
    handler = Failing(*(bq.RetryableError("away") for _ in range(2)))
    queue = make(consumer=handler, retry=bq.HandlerRetry(initial=100.0, max_delay=100.0))
    await queue.produce(1)
    with pytest.raises(TimeoutError):
        await queue.flush(timeout=5)
    await queue.flush()
    assert queue.stats().handled == 1
    await queue.shutdown()


async def test_a_handler_that_was_taken_away_during_its_backoff_is_not_called_again():
    first, second = Failing(bq.RetryableError("away")), RecordingHandler[Item]()
    queue = make(retry=RETRY)
    queue.add_handler(Item, first)
    await queue.produce(Item(1))
    await settle()
    queue.remove_handler(Item)
    queue.add_handler(Item, second)
    await queue.flush()
    assert len(first.calls) == 1
    assert sum(map(len, second.batches)) == 1
    assert queue.stats().adds_up
    await queue.shutdown()


async def test_produce_waits_for_a_batch_that_comes_again():
    handler = Failing(bq.RetryableError("away"), bq.RetryableError("away"))
    queue = make(consumer=handler, retry=RETRY, buffer_size=2, max_batch=2)
    assert await queue.produce_many(range(6)) == 6
    await queue.flush()
    assert queue.stats().handled == 6
    await queue.shutdown()


# --- a last call


class Aggregator:
    """Holds what it gets, and gives it away when it is closed."""

    def __init__(self):
        self.held = []
        self.given = []
        self.closed = 0

    async def consume(self, batch):
        self.held += batch

    async def on_close(self):
        self.closed += 1
        self.given, self.held = self.held, []


async def test_on_close_is_called_once_after_the_last_batch():
    handler = Aggregator()
    queue = make(consumer=handler, max_batch=2)
    await queue.produce_many(range(5))
    await queue.shutdown()
    await queue.shutdown()
    assert (handler.given, handler.closed) == ([0, 1, 2, 3, 4], 1)


async def test_one_object_of_several_types_is_closed_once():
    handler, fallback = Aggregator(), Aggregator()
    queue = make(fallback=fallback)
    queue.add_handler(Item, handler)
    queue.add_handler(Other, handler)
    await queue.shutdown()
    assert (handler.closed, fallback.closed) == (1, 1)


async def test_on_close_has_the_time_of_the_drain(logs):
    class Slow(Aggregator):
        async def on_close(self):
            await asyncio.sleep(100)
            self.closed += 1

    handler = Slow()
    queue = make(consumer=handler)
    report = await queue.shutdown(timeout=5)
    assert handler.closed == 0
    assert report.elapsed == pytest.approx(5, abs=0.5)
    assert "on_close_cut_off" in [event["event"] for event in logs]


async def test_on_close_that_fails_stops_no_other(logs):
    class Bad(Aggregator):
        async def on_close(self):
            raise ValueError("no")

    good = Aggregator()
    queue = make()
    queue.add_handler(Item, Bad())
    queue.add_handler(Other, good)
    report = await queue.shutdown()
    assert good.closed == 1
    assert report.complete
    assert "on_close_failed" in [event["event"] for event in logs]


async def test_no_time_is_left_for_on_close_after_a_deadline(logs):
    handler = Aggregator()
    slow = RecordingHandler[Item]()
    slow.hold()
    queue = make()
    queue.add_handler(Item, slow)
    queue.add_handler(Other, handler)
    await queue.produce(Item(1))
    await settle()
    await queue.shutdown(timeout=1)
    assert handler.closed == 0
    assert "on_close_skipped" in [event["event"] for event in logs]


async def test_on_close_may_produce_into_another_queue():
    sink = RecordingHandler[int]()
    target = make(consumer=sink)

    class Forward(Aggregator):
        async def on_close(self):
            await target.produce(sum(self.held))

    source = make(consumer=Forward())
    await source.produce_many([1, 2, 3])
    await source.shutdown()
    await target.shutdown()
    assert sink.items == [6]


async def test_on_close_that_waits_for_its_own_queues_shutdown_is_told():
    errors = []

    class Circular(Aggregator):
        async def on_close(self):
            try:
                await queue.shutdown()
            except bq.DeadlockError as error:
                errors.append(error)

    queue = make(consumer=Circular())
    report = await queue.shutdown(timeout=5)
    assert len(errors) == 1
    assert report.elapsed < 1


async def test_a_handler_that_is_replaced_or_removed_is_closed_then():
    first, second, third = Aggregator(), Aggregator(), Aggregator()
    queue = make()
    queue.add_handler(Item, first)
    queue.add_handler(Other, third)
    await queue.produce(Item(1))
    await queue.flush()
    queue.add_handler(Item, second)
    await settle()
    assert (first.closed, first.given[0].number) == (1, 1)
    queue.remove_handler(Item)
    await settle()
    assert second.closed == 1
    queue.add_handler(Item, third)
    queue.remove_handler(Other)
    await settle()
    assert third.closed == 0  # it still handles the other type
    await queue.shutdown()
    assert (first.closed, second.closed, third.closed) == (1, 1, 1)


async def test_a_handler_that_is_replaced_amid_its_call_is_closed_at_the_end():
    class Slow(Aggregator):
        async def consume(self, batch):
            await asyncio.sleep(3)
            self.held += batch

    first = Slow()
    queue = make()
    queue.add_handler(Item, first)
    await queue.produce(Item(1))
    await settle()
    queue.add_handler(Item, Aggregator())
    await queue.flush()
    assert first.closed == 0
    await queue.shutdown()
    assert (first.closed, len(first.given)) == (1, 1)


# --- async with


async def test_leaving_the_block_shuts_the_queue_down():
    handler = RecordingHandler[int]()
    async with bq.BatchQueueManager() as manager:
        async with manager.create("q", bq.QueueConfig(consumer=handler)) as queue:
            await queue.produce_many([1, 2])
        assert queue.ended
        assert handler.items == [1, 2]
        assert manager.create("q") is not queue  # its name is free again


async def test_an_error_in_the_block_drains_too_and_passes():
    handler = RecordingHandler[int]()

    async def fail():
        async with make(consumer=handler) as queue:
            await queue.produce(1)
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert handler.items == [1]
