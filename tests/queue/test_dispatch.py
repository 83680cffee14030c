"""From a batch to its handler: single consumer, handlers by type, errors, timeouts and on_idle."""

from __future__ import annotations

import asyncio
import math
import threading

import process_functions
import pytest
from queue_tools import Item, check, kinds, make, now

import batchqueue_async as bq
from batchqueue_async.testing import (
    IdleRecordingHandler,
    RecordingErrorHandler,
    RecordingHandler,
    advance,
    settle,
)

# --- single consumer


async def test_a_single_consumer_gets_whole_batches_of_mixed_types():
    handler = RecordingHandler[object]()
    queue = make(consumer=handler)
    items = [1, "two", 3.0, Item(4), None, True]
    assert await queue.produce_many(items) == 6
    await queue.flush(timeout=1)
    assert handler.batches == [items]


async def test_a_consumer_may_be_a_plain_function():
    seen: list[int] = []

    async def consume(batch: list[int]) -> None:
        seen.extend(batch)

    queue = make(consumer=consume)
    assert await queue.produce_many([1, 2]) == 2
    await queue.flush(timeout=1)
    assert seen == [1, 2]


async def test_one_round_of_a_consumer_joins_its_partitions():
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, partitions=bq.PartitionPolicy.fixed(4), max_batch=10)
    assert await queue.produce_many(range(16)) == 16
    await queue.flush(timeout=1)
    assert [len(batch) for batch in handler.batches] == [10, 6]


async def test_a_consumer_is_called_once_per_worker_at_once():
    handler = RecordingHandler[int](delay=1.0)
    queue = make(
        consumer=handler, workers=bq.WorkerPolicy.fixed(3), partitions=bq.PartitionPolicy.fixed(6), max_batch=2
    )
    assert await queue.produce_many(range(60)) == 60
    await queue.flush(timeout=1000)
    assert handler.max_active == 3
    assert sorted(handler.handled) == list(range(60))


async def test_a_consumer_takes_no_handlers_by_type():
    queue = make(consumer=RecordingHandler())
    with pytest.raises(bq.ConfigError, match=r"queue 'q': add_handler: .*single consumer"):
        queue.add_handler(int, RecordingHandler())


# --- handlers by type


async def test_each_type_goes_to_its_handler_in_order():
    handlers = {kind: RecordingHandler[Item]() for kind in kinds(20)}
    queue = make(workers=bq.WorkerPolicy.fixed(2), partitions=bq.PartitionPolicy.fixed(4))
    for kind, handler in handlers.items():
        queue.add_handler(kind, handler)
    for number in range(10):
        assert await queue.produce_many([kind(number) for kind in handlers]) == 20
    await queue.flush(timeout=1)
    for kind, handler in handlers.items():
        assert handler.handled == [kind(number) for number in range(10)]


async def test_handlers_may_be_registered_by_decorator():
    queue = make()
    seen: list[object] = []

    @queue.handler(str, weight=2.0)
    async def words(batch: list[str]) -> None:
        seen.extend(batch)

    assert words.__name__ == "words"
    assert await queue.produce_many(["a", "b"]) == 2
    await queue.flush(timeout=1)
    assert seen == ["a", "b"]


class Base(Item):
    pass


class Middle(Base):
    pass


class Leaf(Middle):
    pass


async def test_the_nearest_base_class_takes_a_type_without_a_handler():
    base, leaf, fallback = RecordingHandler[Item](), RecordingHandler[Item](), RecordingHandler[Item]()
    queue = make(fallback=fallback)
    queue.add_handler(Base, base)
    queue.add_handler(Leaf, leaf)
    items = [Base(1), Middle(2), Leaf(3), Item(4)]
    assert await queue.produce_many(items) == 4
    await queue.flush(timeout=1)
    assert (base.handled, leaf.handled, fallback.handled) == ([Base(1), Middle(2)], [Leaf(3)], [Item(4)])
    middle = RecordingHandler[Item]()
    queue.add_handler(Middle, middle)
    assert queue.remove_handler(Leaf)
    assert not queue.remove_handler(Leaf)
    assert await queue.produce_many(items) == 4
    await queue.flush(timeout=1)
    assert (base.handled[2:], middle.handled) == ([Base(1)], [Middle(2), Leaf(3)])
    assert queue.remove_handler(Base)
    assert await queue.produce(Base(5))
    await queue.flush(timeout=1)
    assert fallback.handled == [Item(4), Item(4), Base(5)]


async def test_one_call_at_once_for_a_base_class_with_many_types_on_many_workers():
    handler = RecordingHandler[Item](delay=0.1)
    queue = make(workers=bq.WorkerPolicy.fixed(4), partitions=bq.PartitionPolicy.fixed(16), max_batch=3)
    queue.add_handler(Item, handler)
    types = kinds(30)
    for number in range(10):
        assert await queue.produce_many([kind(number) for kind in types]) == 30
    await queue.flush(timeout=1000)
    assert handler.max_active == 1
    for kind in types:
        assert [item.number for item in handler.handled if type(item) is kind] == list(range(10))


async def test_replacing_a_handler_never_runs_the_two_at_once():
    active, most = 0, 0

    async def consume(batch: list[Item]) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(1.0)
        active -= 1

    queue = make(
        workers=bq.WorkerPolicy.fixed(3),
        partitions=bq.PartitionPolicy.fixed(3),
        selector=bq.by_key(lambda item: item.number),
        max_batch=1,
    )
    queue.add_handler(Item, consume)
    for number in range(9):
        assert await queue.produce(Item(number))
    for step in range(4):
        await advance(0.7)
        if step % 2:  # taking it away and giving another is no way around the rule
            assert queue.remove_handler(Item)
        queue.add_handler(Item, consume)
    await queue.flush(timeout=100)
    assert most == 1
    assert check(queue).handled == 9


async def test_a_removed_handlers_call_goes_on_to_its_end():
    handler = RecordingHandler[Item](delay=1.0)
    queue = make(max_batch=1)
    queue.add_handler(Item, handler)
    assert await queue.produce_many([Item(1), Item(2)]) == 2
    await settle()
    assert queue.remove_handler(Item)
    await queue.flush(timeout=10)
    assert handler.handled == [Item(1)]
    assert check(queue).unhandled == 1


async def test_a_handler_may_change_its_batch_without_harm():
    on_error = RecordingErrorHandler()

    async def consume(batch: list[int]) -> None:
        assert isinstance(batch, list)
        batch.clear()
        raise ValueError

    queue = make(consumer=consume, on_error=on_error)
    assert await queue.produce_many([1, 2, 3]) == 3
    await queue.flush(timeout=1)
    assert [items for items, _ in on_error.failures] == [[1, 2, 3]]
    assert check(queue).failed == 3


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((int, None), "handler=None is not a handler; give an async callable"),
        (("int", RecordingHandler()), "type='int' is not a class"),
        ((int, RecordingHandler(), 0), "weight=0 is not above 0"),
        ((int, RecordingHandler(), -1.5), "weight=-1.5 is below 0"),
        ((int, RecordingHandler(), math.nan), "weight=nan is not a finite number"),
        ((int, RecordingHandler(), math.inf), "weight=inf is not a finite number"),
        ((int, RecordingHandler(), "heavy"), "weight='heavy' is not a finite number; give a number above 0"),
    ],
)
async def test_add_handler_refuses_what_breaks_a_rule(arguments, rule):
    queue = make()
    with pytest.raises(bq.ConfigError) as caught:
        queue.add_handler(*arguments)
    assert str(caught.value).startswith("queue 'q': add_handler: ")
    assert rule in str(caught.value)
    await queue.shutdown()
    with pytest.raises(bq.QueueClosedError, match="queue 'q'"):
        queue.add_handler(int, RecordingHandler())


# --- failures


async def test_a_failing_batch_goes_to_on_error_and_nothing_stops():
    error = ValueError("no")
    good, bad = kinds(2)
    handlers = RecordingHandler[Item](), RecordingHandler[Item](fail=error)
    on_error = RecordingErrorHandler()
    queue = make(on_error=on_error)
    queue.add_handler(good, handlers[0])
    queue.add_handler(bad, handlers[1])
    for number in range(3):
        assert await queue.produce_many([good(number), bad(number)]) == 2
        await queue.flush(timeout=1)
    assert handlers[0].handled == [good(0), good(1), good(2)]
    assert on_error.failures == [([bad(number)], error) for number in range(3)]
    stats = check(queue)
    assert (stats.handled, stats.failed) == (3, 3)


async def test_on_error_may_be_async():
    given: list[object] = []

    async def on_error(batch: list[int], error: BaseException) -> None:
        await asyncio.sleep(1.0)
        given.append((list(batch), type(error)))

    queue = make(consumer=RecordingHandler(fail=KeyError()), on_error=on_error)
    await outcome_of_deliver(queue, [1, 2])
    assert now() == 1.0
    assert given == [([1, 2], KeyError)]


async def outcome_of_deliver(queue, items):
    with pytest.raises(bq.DeliveryError) as caught:
        await queue.deliver(items)
    return caught.value


@pytest.mark.parametrize("kind", ["sync", "async", "cancelled", "hangs"])
async def test_an_on_error_that_fails_is_logged_and_nothing_stops(kind, logs):
    def sync(batch, error):
        raise KeyError

    async def fail(batch, error):
        raise KeyError

    async def cancelled(batch, error):
        raise asyncio.CancelledError

    async def hangs(batch, error):
        await asyncio.Event().wait()

    handler = RecordingHandler[int](fail=lambda batch: ValueError() if batch[0] == 1 else None)
    on_error = {"sync": sync, "async": fail, "cancelled": cancelled, "hangs": hangs}[kind]
    queue = make(consumer=handler, on_error=on_error, max_batch=1, handler_timeout=5.0)
    assert await queue.produce_many([1, 2]) == 2
    await queue.flush(timeout=10)
    assert handler.handled == [2]
    stats = check(queue)
    assert (stats.handled, stats.failed) == (1, 1)
    events = [event for event in logs if event["event"] == "on_error_failed"]
    assert [(event["queue"], event["worker"], event["log_level"]) for event in events] == [("q", 0, "error")]


async def test_a_handler_that_raises_cancelled_error_fails_its_batch_only():
    error = asyncio.CancelledError()
    handler = RecordingHandler[int](fail=lambda batch: error if batch[0] == 1 else None)
    on_error = RecordingErrorHandler()
    queue = make(consumer=handler, on_error=on_error, max_batch=1)
    assert await queue.produce_many([1, 2]) == 2
    await queue.flush(timeout=1)
    assert handler.handled == [2]
    assert on_error.failures == [([1], error)]


async def test_handler_timeout_gives_the_batch_to_on_error():
    handler = RecordingHandler[int](delay=lambda batch: 10.0 if batch[0] == 1 else 0.5)
    on_error = RecordingErrorHandler()
    queue = make(consumer=handler, on_error=on_error, handler_timeout=2.0, max_batch=1)
    assert await queue.produce_many([1, 2]) == 2
    await queue.flush(timeout=100)
    assert now() == 2.5
    ((items, error),) = on_error.failures
    assert (items, type(error)) == ([1], TimeoutError)
    assert (handler.handled, handler.cancelled) == ([2], 1)


async def test_one_round_with_several_groups_counts_each_by_itself():
    first, second, third = kinds(3)
    queue = make(selector=bq.round_robin(), on_error=RecordingErrorHandler())
    ok, broken = RecordingHandler[Item](), RecordingHandler[Item](fail=ValueError())
    queue.add_handler(first, ok)
    queue.add_handler(second, broken)
    assert await queue.produce_many([second(1), first(1), third(1), first(2), second(2)]) == 5
    await queue.flush(timeout=1)
    stats = check(queue)
    assert (stats.handled, stats.failed, stats.unhandled) == (2, 2, 1)
    assert (ok.batches, broken.batches) == ([[first(1), first(2)]], [[second(1), second(2)]])


# --- on_idle


class Timer(IdleRecordingHandler[object]):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.idle_times: list[float] = []

    async def on_idle(self) -> None:
        self.idle_times.append(now())
        await super().on_idle()
        if self.delay:
            with self._running():
                await asyncio.sleep(self.delay)


async def test_on_idle_follows_the_backoff_and_data_resets_it():
    timer = Timer()
    queue = make(consumer=timer, min_idle=1.0, max_idle=4.0)
    await advance(20.0)
    assert timer.idle_times == [0.0, 1.0, 3.0, 7.0, 11.0, 15.0, 19.0]
    timer.idle_times.clear()
    assert await queue.produce("x")
    await advance(8.0)
    assert timer.idle_times == [20.0, 21.0, 23.0, 27.0]


async def test_on_idle_of_every_handler_by_type():
    timers = [Timer() for _ in range(3)]
    queue = make(fallback=timers[2], min_idle=1.0, max_idle=1.0)
    queue.add_handler(int, timers[0])
    queue.add_handler(str, timers[1])
    queue.add_handler(bytes, RecordingHandler())
    await advance(2.0)
    assert [timer.idle_calls for timer in timers] == [3, 3, 3]
    queue.remove_handler(int)
    await advance(1.0)
    assert [timer.idle_calls for timer in timers] == [3, 4, 4]


async def test_a_handler_added_to_a_parked_queue_gets_its_on_idle():
    queue = make()
    await advance(3600)
    timer = Timer()
    queue.add_handler(int, timer)
    await settle()
    assert timer.idle_calls == 1
    await advance(0.05)
    assert timer.idle_calls > 1


async def test_one_object_for_several_types_idles_once():
    timer = Timer()
    queue = make(min_idle=1.0, max_idle=1.0)
    queue.add_handler(int, timer)
    queue.add_handler(str, timer)
    await settle()
    assert timer.idle_calls == 1


async def test_on_idle_never_runs_beside_a_call_of_its_handler():
    timer = Timer(delay=0.7)
    queue = make(
        workers=bq.WorkerPolicy.fixed(3),
        partitions=bq.PartitionPolicy.fixed(3),
        min_idle=0.25,
        max_idle=0.25,
        selector=bq.by_key(int),
    )
    queue.add_handler(int, timer)
    queue.add_handler(float, timer)
    await advance(0.1)
    for number in range(12):
        assert await queue.produce(number if number % 2 else float(number))
        await advance(0.33)
    await queue.flush(timeout=100)
    await advance(3.0)
    assert timer.idle_calls > 3
    # on_idle counts itself once more while it sleeps; two types may be handled at once, on_idle stands alone.
    assert timer.max_active <= 2
    assert len(timer.handled) == 12


async def test_on_idle_waits_for_nobody_and_stops_for_items():
    slow, other = Timer(), Timer()
    queue = make(min_idle=1.0, max_idle=1.0)
    queue.add_handler(int, slow)
    queue.add_handler(str, other)
    await settle()
    before = other.idle_calls
    slow.delay = 0.5
    await advance(1.2)  # in the middle of slow's on_idle
    assert await queue.produce("x")
    await settle()
    assert other.handled == []
    await advance(0.3)
    assert other.handled == ["x"]
    assert other.idle_calls in {before, before + 1}


async def test_on_idle_is_not_called_in_the_final_drain():
    timer = Timer(delay=1.0)
    queue = make(consumer=timer, max_batch=1)
    timer.delay = 0.0
    await settle()
    timer.delay = 1.0
    assert await queue.produce_many([1, 2, 3]) == 3
    calls = timer.idle_calls
    await queue.shutdown()
    assert timer.handled == [1, 2, 3]
    assert timer.idle_calls == calls


@pytest.mark.parametrize("error", [ValueError(), asyncio.CancelledError()])
async def test_an_on_idle_that_fails_is_logged_and_nothing_stops(error, logs):
    class Broken(RecordingHandler[int]):
        async def on_idle(self) -> None:
            raise error

    handler = Broken()
    queue = make(consumer=handler)
    await settle()
    assert await queue.produce(1)
    await queue.flush(timeout=1)
    assert handler.handled == [1]
    event = next(event for event in logs if event["event"] == "on_idle_failed")
    assert (event["queue"], event["worker"], event["handler"], event["log_level"]) == ("q", 0, "consumer", "warning")


async def test_on_idle_has_the_handlers_timeout():
    class Hanging(RecordingHandler[int]):
        async def on_idle(self) -> None:
            await asyncio.Event().wait()

    handler = Hanging()
    queue = make(consumer=handler, handler_timeout=2.0, min_idle=1.0, max_idle=1.0)
    await advance(0.5)
    assert await queue.produce(1)
    await queue.flush(timeout=10)
    assert now() == 2.0


# --- synchronous and CPU-bound handlers


@pytest.mark.real_time
async def test_in_thread_runs_a_function_in_a_worker_thread():
    seen: list[tuple[list[int], bool]] = []
    main = threading.get_ident()
    queue = make(consumer=bq.in_thread(lambda batch: seen.append((batch, threading.get_ident() != main))))
    await queue.deliver([1, 2, 3])
    assert seen == [([1, 2, 3], True)]
    await queue.shutdown()


@pytest.mark.real_time
async def test_in_thread_leaves_the_loop_free_and_its_error_goes_to_on_error():
    free, on_error = threading.Event(), RecordingErrorHandler()

    def block(batch: list[int]) -> None:
        assert free.wait(30)
        raise ValueError(batch)

    queue = make(consumer=bq.in_thread(block), on_error=on_error)
    assert await queue.produce(1)
    asyncio.get_running_loop().call_soon(free.set)  # runs although the handler blocks
    await queue.flush(timeout=30)
    assert [items for items, _ in on_error.failures] == [[1]]
    await queue.shutdown()


@pytest.mark.real_time
async def test_a_call_to_the_queue_from_in_thread_raises():
    on_error = RecordingErrorHandler()

    def call(batch: list[int]) -> None:
        queue.produce_nowait(batch)

    queue = make(consumer=bq.in_thread(call), on_error=on_error)
    assert await queue.produce(1)
    await queue.flush(timeout=30)
    assert isinstance(on_error.failures[0][1], bq.WrongLoopError)
    await queue.shutdown()


@pytest.mark.real_time
async def test_in_process_runs_a_function_in_another_process(tmp_path):
    queue = make(consumer=bq.in_process(process_functions.write_pid), max_batch=10, on_error=RecordingErrorHandler())
    assert await queue.produce(str(tmp_path / "pid"))
    await queue.flush(timeout=60)
    assert queue.stats().handled == 1
    assert int((tmp_path / "pid").read_text()) != process_functions.own_pid()
    assert await queue.produce("no such directory/x")
    await queue.flush(timeout=60)
    ((items, error),) = queue.config.on_error.failures
    assert items == ["no such directory/x"]
    assert isinstance(error, FileNotFoundError)
    await queue.shutdown()


@pytest.mark.real_time
async def test_in_process_is_killed_by_handler_timeout():
    on_error = RecordingErrorHandler()
    queue = make(consumer=bq.in_process(process_functions.spin), handler_timeout=0.5, on_error=on_error)
    assert await queue.produce(1)
    await queue.flush(timeout=60)
    ((_, error),) = on_error.failures
    assert isinstance(error, TimeoutError)
    await queue.shutdown()


@pytest.mark.parametrize("make_handler", [bq.in_thread, bq.in_process])
def test_adapters_refuse_what_cannot_be_called(make_handler):
    with pytest.raises(bq.ConfigError, match=f"{make_handler.__name__}: function=3 is not callable"):
        make_handler(3)
    assert repr(make_handler(math.fsum)) == f"{make_handler.__name__}(fsum)"
