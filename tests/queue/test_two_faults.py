"""Two faults at once: a retry, a removal, a close or a cancellation in the midst of something else."""

from __future__ import annotations

import asyncio
import contextlib
import math

import pytest
from queue_tools import Item, check, check_report, make

import batchqueue_async as bq
from batchqueue_async.queue.limiter import CallLimiter
from batchqueue_async.testing import RecordingHandler, advance, settle

RETRY = bq.HandlerRetry(initial=1.0, multiplier=2.0, max_delay=10.0, max_attempts=3)


class Other(Item):
    pass


class Closing:
    """A handler whose calls take a second, and whose last call is seen."""

    def __init__(self):
        self.batches, self.closes, self.running = [], 0, 0

    async def consume(self, batch):
        self.batches.append(list(batch))
        self.running += 1
        await asyncio.sleep(1)
        self.running -= 1

    async def on_close(self):
        assert not self.running, "closed in the midst of a call"
        self.closes += 1


# --- a retry, and what a handler raises


class Bare(bq.RetryableError):
    """An error of a user's that never calls its base class."""

    def __init__(self):
        pass


class Unreadable(bq.RetryableError):
    """An error whose attribute can't be read."""

    @property
    def retry_after(self):
        raise OSError

    @retry_after.setter
    def retry_after(self, value):
        pass


@pytest.mark.parametrize(
    "error",
    [
        Bare(),
        Unreadable(),
        bq.RetryableError(retry_after="Wed, 21 Oct 2026 07:28:00 GMT"),
        bq.RetryableError(retry_after=[]),
        bq.RetryableError(retry_after=math.inf),
        bq.RetryableError(retry_after=math.nan),
        bq.RetryableError(retry_after=-1e12),
        bq.RetryableError(retry_after=10**400),
    ],
    ids=["no attribute", "unreadable", "a text", "a list", "inf", "nan", "negative", "huge"],
)
async def test_a_time_that_is_no_time_is_not_waited(error):
    calls = []

    async def handle(batch):
        calls.append(list(batch))
        if len(calls) == 1:
            raise error

    queue = make(consumer=handle, retry=RETRY)
    await queue.produce(Item(1))
    await advance(0.9)
    assert len(calls) == 1
    check(queue)
    await advance(0.2)
    assert len(calls) == 2
    assert check(queue).handled == 1
    check_report(await queue.shutdown())


async def test_a_time_of_a_century_ends_with_the_deadline():
    async def handle(batch):
        raise bq.RetryableError(retry_after=1e12)

    queue = make(consumer=handle, retry=bq.HandlerRetry(max_delay=1e9))
    await queue.produce(Item(1))
    delivery = asyncio.ensure_future(queue.deliver([Item(2)]))
    flush = asyncio.ensure_future(queue.flush())
    await advance(100)
    assert check(queue).in_flight == 1
    report = await queue.shutdown(1)
    check_report(report)
    assert report.undelivered == [Item(1), Item(2)]
    assert isinstance(await _error_of(delivery), bq.DeliveryError)
    assert isinstance(await _error_of(flush), bq.QueueClosedError)


async def _error_of(task):
    await asyncio.wait([task])
    return task.exception()


@pytest.mark.parametrize("answers", [False, True], ids=["retryable error", "on_error"])
async def test_the_deadline_ends_a_retry_whose_handler_hides_its_cancellation(answers):
    calls = []

    async def handle(batch):
        calls.append(asyncio.get_running_loop().time())
        try:
            await asyncio.sleep(50)
        except asyncio.CancelledError:
            raise (ConnectionError if answers else bq.RetryableError) from None

    async def on_error(batch, error):
        return bq.RETRY

    queue = make(consumer=handle, retry=bq.HandlerRetry(initial=0.01), on_error=on_error)
    await queue.produce_many([Item(1), Item(2)])
    await advance(1)
    report = await queue.shutdown(1)
    check_report(report)
    assert report.undelivered == [Item(1), Item(2)]
    assert len(calls) == 1  # after its deadline, nothing is tried again
    drains = [each for each in asyncio.all_tasks() if "drain" in each.get_name()]
    assert not drains


async def test_the_deadline_ends_an_on_error_that_hides_its_cancellation():
    calls = []

    async def handle(batch):
        calls.append(list(batch))
        raise ConnectionError

    async def on_error(batch, error):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(50)
        return bq.RETRY

    queue = make(consumer=handle, retry=bq.HandlerRetry(initial=0.01), on_error=on_error)
    await queue.produce(Item(1))
    await advance(1)
    report = await queue.shutdown(1)
    check_report(report)
    assert report.undelivered == [Item(1)]
    assert len(calls) == 1
    assert check(queue).adds_up


async def test_a_failure_that_is_tried_again_is_counted_once():
    async def handle(batch):
        raise ConnectionError

    queue = make(consumer=handle, retry=RETRY, on_error=lambda batch, error: bq.RETRY)
    await queue.produce(Item(1))
    await queue.flush()
    assert queue.stats().last_error.count == 3
    await queue.shutdown()


@pytest.mark.parametrize("again", [False, True], ids=["removed", "added again"])
@pytest.mark.parametrize("when", [0.0, 0.5, 1.0, 1.5, 2.5])
async def test_a_handler_that_is_taken_away_between_two_tries(when, again):
    failing, after = [], RecordingHandler()

    async def handle(batch):
        failing.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        raise bq.RetryableError

    queue = make(retry=RETRY)
    queue.add_handler(Item, handle)
    delivery = asyncio.ensure_future(queue.deliver([Item(1)]))
    await advance(when)
    check(queue)
    queue.remove_handler(Item)
    if again:
        queue.add_handler(Item, after)
    await settle()
    check(queue)
    tried = len(failing)
    error = await _error_of(delivery)
    assert len(failing) == tried
    assert (error is None) is again
    stats = check(queue)
    assert (stats.handled, stats.unhandled) == ((1, 0) if again else (0, 1))
    check_report(await queue.shutdown())


# --- a scheduler's bound on calls


async def test_a_call_that_waits_for_the_scheduler_is_the_handlers_of_the_moment():
    limiter = CallLimiter(1)
    queues = [bq.BatchQueue(f"q{index}", bq.QueueConfig(), limiter=limiter) for index in range(2)]
    first, removed, after = Closing(), Closing(), RecordingHandler()
    queues[0].add_handler(Item, first)
    queues[1].add_handler(Item, removed)
    queues[1].add_handler(Other, removed)
    await queues[0].produce(Item(1))
    await settle()
    await queues[1].produce_many([Item(2), Other(3)])
    await advance(0.5)
    queues[1].add_handler(Item, after)
    queues[1].remove_handler(Other)
    await advance(5)
    assert not removed.batches
    assert after.batches == [[Item(2)], [Other(3)]]  # its base class's handler is the next one for the type
    assert check(queues[1]).handled == 2
    for queue in queues:
        check_report(await queue.shutdown())
    assert removed.closes == 1


# --- on_close


async def test_on_close_of_a_handler_of_two_types_waits_for_both():
    handler = Closing()
    queue = make()
    queue.add_handler(Item, handler)
    queue.add_handler(Other, handler)
    await queue.produce(Item(1))
    await advance(0.5)
    queue.remove_handler(Item)
    queue.remove_handler(Other)
    await advance(3)
    assert check(queue).handled == 1
    check_report(await queue.shutdown())
    assert handler.closes == 1


async def test_a_handler_that_is_let_go_of_twice_is_closed_once():
    handler = Closing()
    queue = make()
    queue.add_handler(Item, handler)
    await queue.produce(Item(1))
    await advance(0.5)
    queue.remove_handler(Item)
    queue.add_handler(Item, handler)
    await advance(3)
    queue.remove_handler(Item)
    await queue.shutdown()
    assert handler.closes == 1


async def test_a_handler_that_is_taken_away_after_the_end_is_not_closed_again():
    handler = Closing()
    queue = make()
    queue.add_handler(Item, handler)
    await queue.shutdown()
    assert queue.remove_handler(Item)
    await settle()
    assert handler.closes == 1


async def test_an_on_close_that_takes_handlers_away_is_called_once():
    handler = Closing()
    close = handler.on_close
    queue = make()

    async def on_close():
        await close()
        queue.remove_handler(Item)
        await asyncio.sleep(0)

    handler.on_close = on_close
    queue.add_handler(Item, handler)
    await queue.shutdown()
    await settle()
    assert handler.closes == 1


class Abort(BaseException):
    pass


@pytest.mark.parametrize("error", [Abort, asyncio.CancelledError, GeneratorExit, TimeoutError])
@pytest.mark.parametrize("early", [False, True], ids=["at the end", "when it is let go of"])
async def test_no_on_close_keeps_the_others_from_their_end(error, early, caplog):
    class Bad(Closing):
        async def on_close(self):
            raise error

    class Slow(Closing):
        async def on_close(self):
            await asyncio.sleep(2)
            self.closes += 1

    slow, unretrieved = Slow(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unretrieved.append(context))
    queue = make()
    queue.add_handler(Item, Bad())
    queue.add_handler(Other, slow)
    await queue.produce(Other(1))
    if early:
        queue.remove_handler(Item)
        await settle()
    report = await queue.shutdown(10)
    assert slow.closes == 1
    check_report(report)
    assert "on_close_failed" in caplog.text
    assert not unretrieved


async def test_an_on_close_that_never_ends_is_cut_off_with_the_queue():
    ends = []

    class Hanging(Closing):
        async def on_close(self):
            try:
                await asyncio.sleep(1000)
            finally:
                ends.append(asyncio.get_running_loop().time())

    async def stuck(batch):
        await asyncio.sleep(1000)

    queue = make()
    queue.add_handler(Item, Hanging())
    queue.add_handler(Other, stuck)
    await queue.produce(Other(1))
    await settle()
    queue.remove_handler(Item)
    await settle()
    report = await queue.shutdown(1)
    check_report(report)
    assert report.undelivered == [Other(1)]
    await settle()
    assert len(ends) == 1


async def test_on_close_may_offer_items_to_its_own_queue_in_vain():
    answers = []

    class Producing(Closing):
        async def on_close(self):
            answers.append(queue.produce_nowait(Item(2)))
            answers.append(await queue.produce(Item(3)))
            answers.append(await queue.produce_many([Item(4), Item(5)]))
            for call in (queue.flush, queue.shutdown, lambda: queue.deliver([Item(6)])):
                with pytest.raises((bq.DeadlockError, bq.DeliveryError)):
                    await call()

    queue = make()
    queue.add_handler(Item, Producing())
    await queue.produce(Item(1))
    report = await queue.shutdown(5)
    check_report(report)
    assert answers == [False, False, 0]
    assert check(queue).adds_up


async def test_a_handler_that_takes_less_gets_no_batch_that_was_meant_for_the_one_before():
    first, after, small = Closing(), RecordingHandler(), RecordingHandler()
    queue = make(max_batch=5)
    queue.add_handler(Other, first)
    queue.add_handler(Item, after)
    await queue.produce_many([Other(0), *map(Item, range(5))])
    await advance(0.5)
    queue.add_handler(Item, small, max_batch=2)
    await advance(1)
    assert [len(batch) for batch in small.batches] == [2, 2, 1]
    assert not after.batches
    assert check(queue).handled == 6
    assert {each.items for each in queue.stats().handlers} == {1, 5}
    await queue.shutdown()


# --- classes and selectors with faults in them


class Moody(type):
    """The class of classes that can be hashed until something is up with them."""

    broken = False

    def __hash__(cls):
        if Moody.broken:
            raise OSError
        return type.__hash__(cls)


@pytest.fixture
def moody():
    yield Moody("MoodyItem", (), {})
    Moody.broken = False


@pytest.mark.parametrize("linger", [None, 1.0])
@pytest.mark.parametrize("handled", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
async def test_a_class_that_loses_its_hash_ends_no_drain_task(moody, linger, handled, adaptive):
    handler = RecordingHandler()
    policy = bq.PartitionPolicy.adaptive() if adaptive else bq.PartitionPolicy.fixed(1)
    queue = make(partitions=policy)
    queue.add_handler(Item, handler, linger=linger)
    if handled:
        queue.add_handler(moody, RecordingHandler(), linger=linger, weight=3)
    await queue.produce_many([moody(), moody()])
    Moody.broken = True
    await advance(3)
    stats = check(queue)
    assert stats.failed + stats.unhandled == 2
    Moody.broken = False
    await queue.deliver([Item(1)])
    check_report(await queue.shutdown())


async def test_a_class_that_loses_its_hash_in_the_midst_is_told_of_or_not(moody):
    class Late(Closing):
        async def consume(self, batch):
            Moody.broken = True
            await asyncio.sleep(1)

    queue = make(partitions=bq.PartitionPolicy.fixed(1))
    queue.add_handler(Item, Late())
    await queue.produce_many([Item(1), moody(), moody()])
    await advance(3)
    stats = check(queue)
    assert (stats.handled, stats.unhandled + stats.failed) == (1, 2)
    Moody.broken = False
    await queue.deliver([Item(1)])
    check_report(await queue.shutdown())


async def test_a_selector_that_raises_takes_nothing_else_along():
    failing = {3}

    def select(item, count):
        if item.number in failing:
            raise OSError
        return item.number % count

    handler = Closing()
    queue = make(selector=select, partitions=bq.PartitionPolicy.adaptive(), buffer_size=2)
    queue.add_handler(Item, handler)
    await queue.produce_many([Item(1), Item(2)])
    await settle()
    waiting = [asyncio.ensure_future(queue.produce(Item(number))) for number in (5, 6, 7, 8, 9)]
    await settle()
    failing.update({7, 9})
    queue.add_handler(Other, handler, weight=4)
    for call in (queue.produce, queue.deliver, queue.produce_many):
        with pytest.raises(OSError):
            await call(Item(3) if call == queue.produce else [Item(4), Item(3)])
    for call, given in ((queue.produce_nowait, Item(3)), (queue.produce_many_nowait, [Item(3)])):
        with pytest.raises(OSError):
            call(given)
    check(queue)
    await asyncio.wait(waiting)
    await queue.flush()
    check(queue)
    check_report(await queue.shutdown())
    assert queue.stats().adds_up


class Flaky(type):
    """The class of classes whose hash fails once, after so many times."""

    left = -1

    def __hash__(cls):
        Flaky.left -= 1
        if Flaky.left == 0:
            raise OSError
        return type.__hash__(cls)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("left", range(1, 16))
async def test_a_hash_that_fails_once_ends_no_drain_task(left, adaptive):
    Flaky.left = -1
    kind = Flaky("FlakyItem", (), {})
    policy = bq.PartitionPolicy.adaptive() if adaptive else bq.PartitionPolicy.fixed(1)
    queue = make(partitions=policy)
    queue.add_handler(Item, RecordingHandler(), linger=0.1)
    await queue.produce_many([kind(), kind(), Item(0)])
    Flaky.left = left
    await advance(3)
    stats = check(queue)
    assert (stats.handled, stats.failed + stats.unhandled) == (1, 2)
    await queue.deliver([Item(1)])
    check_report(await queue.shutdown())


class _RaisingPolicy(bq.HandlerRetry):
    def delay(self, attempt: int) -> float:
        raise RuntimeError(attempt)


class _OddPolicy(bq.HandlerRetry):
    def delay(self, attempt: int) -> float:
        return [float("nan"), -1.0, float("inf"), "soon"][attempt - 1]  # type: ignore[return-value]


@pytest.mark.parametrize("policy", [_RaisingPolicy, _OddPolicy])
async def test_c_20_a_retry_policy_that_gives_no_delay_ends_no_drain_task(policy):
    handler = RecordingHandler[int](fail=lambda batch: bq.RetryableError() if batch == [1] else None)
    queue = make(consumer=handler, max_batch=1, retry=policy(max_delay=7.0))
    await queue.produce_many([1, 2])
    began = asyncio.get_running_loop().time()
    await queue.flush(timeout=60)
    assert asyncio.get_running_loop().time() - began == pytest.approx(4 * 7.0)
    report = await queue.shutdown()
    assert (report.handled, report.failed) == (1, 1)


class _FailingClose(RecordingHandler[int]):
    spoilt = False

    @property
    def on_close(self) -> object:
        if self.spoilt:
            raise RuntimeError
        return None


async def test_c_20_an_on_close_that_can_not_be_looked_up_keeps_no_other_from_its_end():
    queue, closed = make(), []

    class Closing(RecordingHandler[str]):
        async def on_close(self) -> None:
            closed.append(self)

    failing = _FailingClose()
    queue.add_handler(int, failing)
    queue.add_handler(str, Closing())
    failing.spoilt = True
    assert (await queue.shutdown()).undelivered == []
    assert len(closed) == 1


async def test_c_20_a_handler_whose_hooks_can_not_be_looked_up_is_refused():
    failing = _FailingClose()
    failing.spoilt = True
    queue = make()
    with pytest.raises(bq.ConfigError, match="has an on_close that raises RuntimeError; make it async def on_close"):
        queue.add_handler(int, failing)
    await queue.shutdown()
