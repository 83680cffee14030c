"""The drain task's rounds, compiled or not: handlers of every kind, and whatever may happen amid their calls."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import sys
import weakref
from collections import deque
from contextlib import nullcontext
from sys import maxsize
from typing import Any

import pytest

import batchqueue_async as bq
from batchqueue_async import _native
from batchqueue_async.queue.stats import Sizes

compiled_only = pytest.mark.skipif(not bq.accelerated, reason="the hot path is not compiled, or not wanted")

KINDS: list[Any] = [type(f"Kind{number}", (), {}) for number in range(30)]
marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker", default="")

SHORT = 6
TIMES = 400


class Plain:
    """An awaitable that is no coroutine."""

    def __await__(self):
        yield from asyncio.sleep(0).__await__()


def typed(name="typed", **options):
    return bq.BatchQueue[Any](name, bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(4), **options))


async def ignore(batch):
    """Handle nothing."""


async def rounds(queue, handlers, times=4):
    """Give each type an item so many times, and wait for the end of each round."""
    for kind, handler in zip(KINDS, handlers, strict=False):
        queue.add_handler(kind, ignore)
        queue._dispatcher.entries[kind].consume = handler  # as it is: the adapter would make a coroutine of anything
    for _ in range(times):
        for kind in KINDS[: len(handlers)]:
            assert queue.produce_nowait(kind())
            assert await queue.produce(kind())
        await queue.flush()
    return queue.stats()


async def test_handlers_of_every_kind_in_one_round():
    calls: list[str] = []

    async def at_once(batch):
        calls.append("at once")

    async def waits(batch):
        await asyncio.sleep(0)
        calls.append("waits")
        await asyncio.sleep(0.001)

    def is_plain(batch):
        calls.append("plain")
        return Plain()

    async def fails(batch):
        raise ValueError(batch)

    async def fails_late(batch):
        await asyncio.sleep(0)
        raise ValueError(batch)

    def fails_before(batch):
        raise KeyError(batch)

    def gives_nothing(batch):
        calls.append("nothing")

    failed: list[Any] = []

    def on_error(batch, error):
        failed.append((batch, type(error)))

    queue = typed(on_error=on_error)
    handlers: list[Any] = [at_once, waits, is_plain, fails, fails_late, fails_before, gives_nothing, at_once]
    stats = await rounds(queue, handlers)
    assert stats.adds_up
    assert (stats.handled, stats.failed, stats.unhandled) == (8 * 4, 8 * 4, 0)
    assert calls.count("at once") == 8
    assert {calls.count(each) for each in ("waits", "plain", "nothing")} == {4}
    assert sorted({error.__name__ for _, error in failed}) == ["KeyError", "TypeError", "ValueError"]
    assert all(len(batch) == 2 and len({*map(type, batch)}) == 1 for batch, _ in failed)
    assert stats.batch_sizes.count == 8 * 4
    assert sum(each.calls for each in stats.handlers) > 0
    await queue.shutdown()


async def test_what_a_handler_does_to_its_batch_does_not_reach_the_record():
    failed: list[Any] = []

    async def greedy(batch):
        batch.clear()
        raise ValueError

    queue = typed(on_error=lambda batch, _: failed.extend(batch))
    stats = await rounds(queue, [greedy] * 3)
    assert stats.failed == len(failed) == 24
    await queue.shutdown()


@pytest.mark.parametrize("wait", [False, True])
async def test_each_call_has_a_context_of_its_own(wait):
    seen: list[str] = []

    async def leave(batch):
        seen.append(marker.get())
        if wait:
            await asyncio.sleep(0)
        marker.set("left")

    queue = typed()
    await rounds(queue, [leave] * 10)
    assert set(seen) == {""}
    await queue.shutdown()


async def test_a_handler_that_cancels_its_own_task_harms_no_other():
    async def cancel(batch):
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def fine(batch):
        pass

    queue = typed()
    stats = await rounds(queue, [fine, cancel, fine, cancel, fine])
    assert stats.adds_up
    assert stats.handled >= 3 * 8
    await queue.shutdown()


async def test_a_handler_may_take_away_another_that_comes_next():
    async def remove(batch):
        for kind in KINDS[1:5]:
            queue.remove_handler(kind)

    async def never(batch):
        pass

    queue = typed()
    stats = await rounds(queue, [remove, never, never, never, never], times=1)
    assert stats.adds_up
    assert stats.handled + stats.unhandled == 10
    await queue.shutdown()


async def test_a_handler_is_seen_from_outside_while_it_waits():
    gate = asyncio.Event()

    async def waits(batch):
        await gate.wait()

    queue = typed("seen", drain_timeout=0.0)
    queue.add_handler(KINDS[0], waits)
    queue.produce_nowait(KINDS[0]())
    while not queue.stats().in_flight:
        await asyncio.sleep(0)
    task = next(drain.task for drain in queue._drains if drain.in_flight)
    assert queue.handler_of(task) is not None
    gate.set()
    await queue.flush()
    gate.clear()
    queue.produce_nowait(KINDS[0]())
    await asyncio.sleep(0)
    report = await queue.shutdown(0.0)
    assert report.handled + len(report.undelivered) == 2


async def test_a_batch_has_at_most_so_many_items_and_its_order():
    seen: list[list[int]] = []

    async def note(batch):
        seen.append([each.number for each in batch])

    queue = typed()
    queue.add_handler(KINDS[0], note, max_batch=3)
    for number in range(10):
        item = KINDS[0]()
        item.number = number
        queue.produce_nowait(item)
    await queue.flush()
    assert seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    await queue.shutdown()


async def test_a_partition_of_many_types_that_fall_quiet():
    kinds = [type(f"Many{number}", (), {}) for number in range(1_100)]
    handled = 0

    async def count(batch):
        nonlocal handled
        handled += len(batch)

    queue = bq.BatchQueue[Any]("many", bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(2), fallback=count))
    for some in (kinds, kinds[:3], kinds[:200], kinds):
        for kind in some:
            assert queue.produce_nowait(kind())
        await queue.flush()
    assert handled == 2 * 1_100 + 203 == queue.stats().handled
    await queue.shutdown()


async def test_items_are_let_go_of_when_their_round_is_over():
    queue = typed()
    for kind in KINDS:
        queue.add_handler(kind, ignore)
    items = [kind() for kind in KINDS for _ in range(3)]
    gone = [weakref.ref(item) for item in items]
    await queue.produce_many(items)
    del items
    await queue.flush()
    await asyncio.sleep(0)
    assert [each for each in gone if each() is not None] == []
    await queue.shutdown()


async def test_rounds_leave_no_block_of_memory_behind(caplog):
    caplog.set_level(logging.CRITICAL, logger="batchqueue_async")

    async def at_once(batch):
        pass

    async def waits(batch):
        await asyncio.sleep(0)

    async def fails(batch):
        raise ValueError

    queue = typed(on_error=lambda batch, error: None)
    handlers = [at_once, at_once, waits, fails, at_once]
    for _ in range(3):
        await rounds(queue, handlers, times=10)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(10):
        await rounds(queue, handlers, times=10)
    gc.collect()
    assert sys.getallocatedblocks() - before < 300, "of 5,000 batches, some stayed"
    await queue.shutdown()


@pytest.mark.real_time
async def test_no_reference_stays_behind(caplog):
    caplog.set_level(logging.CRITICAL, logger="batchqueue_async")

    async def waits(batch):
        await asyncio.sleep(0)

    async def fails(batch):
        raise ValueError

    handlers = [ignore, waits, fails, ignore]
    queue = typed(on_error=lambda batch, error: None)
    for kind, handler in zip(KINDS, handlers, strict=False):
        queue.add_handler(kind, handler)
    single: Any = bq.BatchQueue("single", bq.QueueConfig(consumer=ignore))
    bridge = single.bridge()
    items = [kind() for kind in KINDS[: len(handlers)] * 60]

    def from_a_thread():
        for item in items[:10]:
            assert bridge.produce(item)
        assert bridge.produce_many(items[:10]) == 10

    async def everything(times):
        for _ in range(times):
            for each in (queue, single):
                for item in items[:8]:
                    assert each.produce_nowait(item)
                    assert await each.produce(item)
                    each.produce(item).close()
                assert await each.produce_many(items) == len(items)
                assert each.produce_many_nowait(items) == len(items)
                await each.flush()
            await asyncio.to_thread(from_a_thread)
            await single.flush()

    watched = [None, True, False, NotImplemented, (), *KINDS[:5], *handlers, items[0], queue, single, asyncio.Task]
    # of a debug build; uvloop's own objects grow it, with the Python as well
    plain = type(asyncio.get_running_loop()).__module__.startswith("asyncio")
    total = getattr(sys, "gettotalrefcount", lambda: 0) if plain else lambda: 0

    def counts():
        gc.collect()
        return [sys.getrefcount(each) for each in watched] + [total()]

    await everything(30)
    before = counts()
    await everything(TIMES)
    grown = [now - then for now, then in zip(counts(), before, strict=True)]
    assert max(grown) < TIMES // 2, f"of {TIMES} times, each left something: {grown}"
    await queue.shutdown()
    await single.shutdown()


# -- objects that are not as expected --------------------------------------------------------------------------------


def partition_like(**fields):
    made: Any = _native.PartitionFields()
    usual = {
        "tail": [1],
        "fast_slots": _native.Countdown(None, 3),
        "_sealed": None,
        "byte_room": None,
        "credits": None,
        "lanes": None,
        "leaving": None,
        "linger_step": None,
        "marks": None,
        "next_owner": None,
        "on_ready": None,
        "ranges": None,
        "since": 1.0,
        "waiters": None,
    }
    for name, value in (usual | fields).items():
        setattr(made, name, value)
    return made


@compiled_only
@pytest.mark.parametrize(
    "fields",
    [
        {"tail": ()},
        {"tail": []},
        {"tail": None},
        {"fast_slots": iter(())},
        {"waiters": 1},
        {"byte_room": 1},
        {"marks": [1]},
        {"since": 1},
        {"lanes": []},
        {"lanes": {1: None}},
        {"_sealed": deque([1])},
        {"_sealed": []},
    ],
)
def test_a_partition_that_is_not_usual_is_left_where_it_is(fields):
    partition = partition_like(**fields)
    ready, chunks = deque([partition]), []
    assert _native.take_usual(ready, chunks, 1, 100, maxsize) == (1, 0, float("inf"))
    assert list(ready) == [partition]
    assert chunks == []


class Lender:
    """What a partition tells that it has room again."""

    def __init__(self, chunks: list[Any], error: BaseException | None) -> None:
        self.chunks, self.error = chunks, error
        self.seen: list[list[int]] = []

    def refill(self) -> None:
        self.seen.append([item for _, items, _ in self.chunks for item in items])
        if self.error is not None:
            raise self.error


@compiled_only
@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_the_room_of_what_was_taken_is_lent_when_the_round_has_it(error):
    """An interrupt then leaves nothing behind that nobody has."""
    chunks: list[Any] = []
    lender = Lender(chunks, error)
    partition = partition_like(credits=lender)
    ready = deque([partition])
    with pytest.raises(KeyboardInterrupt) if error else nullcontext():
        assert _native.take_usual(ready, chunks, 1, 100, maxsize) == (0, 1, 1.0)
    assert lender.seen == [[1]]
    assert [items for _, items, _ in chunks] == [[1]]
    assert (list(ready), partition.tail, partition.in_flight) == ([], [], 1)


@compiled_only
def test_a_usual_partition_is_taken_whole():
    partition = partition_like(_sealed=deque())
    ready, chunks = deque([partition, 5]), []
    assert _native.take_usual(ready, chunks, 2, 100, maxsize) == (1, 1, 1.0)
    assert chunks == [(partition, [1], None)]
    assert (partition.tail, partition.removed, partition.in_flight) == ([], 1, 1)
    assert _native.finish_usual(chunks) == 1
    assert partition.in_flight == 0
    partition.ranges = 1
    assert _native.finish_usual([(partition, [], None)]) == 0
    assert _native.finish_usual([5]) == 0
    for arguments in [
        (ready, chunks),
        (5, chunks, 1, 1, 1),
        (ready, 5, 1, 1, 1),
        (ready, chunks, "", 1, 1),
        (ready, chunks, 1, 1, ""),
    ]:
        with pytest.raises(TypeError):
            _native.take_usual(*arguments)


@compiled_only
def test_partitions_are_taken_as_long_as_they_fit_together():
    parts = [partition_like(tail=[1] * size) for size in (3, 2, 2)]
    ready, chunks = deque(parts), []
    assert _native.take_usual(ready, chunks, 3, 5, 6) == (1, 5, 1.0)
    assert list(ready) == parts[2:]
    assert [len(items) for _, items, _ in chunks] == [3, 2]
    assert _native.take_usual(ready, chunks, 1, 1, 6) == (1, 0, float("inf"))


@pytest.mark.parametrize("partitions", [1, 3])
async def test_a_single_consumer_gets_at_most_so_many_items_of_all_partitions_together(partitions):
    seen: list[list[int]] = []

    async def consume(batch):
        seen.append(batch)

    config = bq.QueueConfig(
        consumer=consume, max_batch=10, partitions=bq.PartitionPolicy.fixed(partitions), selector=lambda item, _: item
    )
    queue: Any = bq.BatchQueue("single", config)
    for number in (3, 9, 30, 31):
        items = [each % partitions for each in range(number)]
        assert queue.produce_many_nowait(items) == number
        await queue.flush()
        assert {len(batch) for batch in seen[:-1]} <= {10}
        assert sorted(item for batch in seen for item in batch) == sorted(items)
        seen.clear()
    await queue.shutdown()


@compiled_only
@pytest.mark.parametrize("count", [SHORT, 600])
@pytest.mark.parametrize("deed", ["look", "clear", "append", "keep", "keep and clear"])
def test_a_finalizer_may_find_the_list_that_its_item_was_in(deed, count):
    kept: list[Any] = []
    found: list[int] = []

    class Item:
        """One of many."""

    class Last(Item):
        def __del__(self):
            # it dies first, while the collector still knows the list and the others in it
            for each in gc.get_objects():
                if type(each) is list and any(type(item) is Item for item in each):
                    found.append(len(each))
                    if "keep" in deed:
                        kept.append(each)
                    if "clear" in deed:
                        each.clear()
                    if deed == "append":
                        each.append(None)

    for _ in range(3):
        chunks: list[Any] = []
        partition = partition_like(tail=[*(Item() for _ in range(count - 1)), Last()])
        _native.take_usual(deque([partition]), chunks, 1, count, maxsize)
        assert len(chunks[0][1]) == count
        assert _native.finish_usual(chunks) == 1
        # whatever the finalizer did, the next round begins with an empty list
        again = partition_like()
        _native.take_usual(deque([again]), [], 1, 5, maxsize)
        assert again.tail == []
        assert not any(again.tail is each for each in kept)
        kept.clear()
    assert found == [count - 1] * 3


@compiled_only
def test_a_short_list_comes_back_with_its_memory_and_a_long_one_without():
    def size_after(count):
        partition = partition_like(tail=list(range(count)))
        chunks: list[Any] = []
        _native.take_usual(deque([partition]), chunks, 1, count, maxsize)
        _native.finish_usual(chunks)
        again = partition_like()
        _native.take_usual(deque([again]), [], 1, 5, maxsize)
        assert again.tail == []
        return sys.getsizeof(again.tail)

    empty = sys.getsizeof([])
    assert empty < size_after(100) <= empty + 128 * 8
    assert size_after(1_000) == empty


@compiled_only
@pytest.mark.skipif(sys.version_info >= (3, 15), reason="there lists grow by themselves")
def test_the_next_list_begins_with_as_many_places_as_items_were_taken_last():
    partition = partition_like(tail=list(range(1_000)), fast_slots=_native.Countdown(None, 3))
    _native.take_usual(deque([partition]), [], 1, 1_000, maxsize)
    assert sys.getsizeof(partition.tail) <= sys.getsizeof([None] * 128)  # it may be one that was used before
    partition.fast_slots = _native.Countdown(None, 5_000)
    sizes = set()
    for number in range(1, 3_001):
        assert _native.put_run({int: partition}, [5], 0) == 1
        assert len(partition.tail) == number
        sizes.add(sys.getsizeof(partition.tail))
    grown = {size for size in sizes if size > sys.getsizeof([None] * 128)}
    assert len(grown) == 4, "1,000 places at once, then half as many more each time"


@compiled_only
def test_stand_ins_of_all_sizes_are_bounded():
    drain, round_, sizes = _native.DrainFields(), _native.RoundFields(), Sizes()
    entry: Any = _native.HandlerFields()
    turns: Any = _native.TurnFields()
    turns.holders, turns.waiting, turns.limit = [], None, 1
    entry.timeout, entry.consume, entry.turns = None, ignore, turns
    round_.drain, round_._numbers = drain, None

    def call_and_look(count):
        sizes.exact.setdefault(count, 0)
        items = [object() for _ in range(count)]
        round_.chunks, round_.calls, round_.call_index = [(None, items, int)], [(entry, items)], 0
        del items
        counters, context = _native.CounterFields(), contextvars.copy_context()
        assert _native.call_usual(round_, counters, sizes, context, 0) is _native.NO_CALL
        (_, left, _), (_, same) = round_.chunks[0], round_.calls[0]
        assert left is same
        assert len(left) == count
        return left[0] is None

    for count in (1, 2, 512, 513, 1, 1_025, 5_000, 30_000, 29_999, 30_001, 30_002, 30_003, 30_004, 30_005, 1, 513):
        assert call_and_look(count)
    assert not call_and_look(100_000)  # too many to have so many None stand by


@compiled_only
def test_chunks_that_are_not_usual_are_grouped_by_the_python():
    entry: Any = _native.HandlerFields()
    chunk = (None, [1], int)
    assert _native.group_usual({int: entry}, [chunk], 10) == [(entry, [1])]
    for resolved, chunks, most in [
        ({int: entry}, [chunk, chunk], 10),
        ({int: entry}, [chunk], 0),
        ({int: None}, [chunk], 10),
        ({}, [chunk], 10),
        ([], [chunk], 10),
        ({}, (), 10),
        ({int: entry}, [(None, [1], None)], 10),
        ({int: entry}, [(None, (), int)], 10),
        ({int: entry}, [5], 10),
    ]:
        assert _native.group_usual(resolved, chunks, most) is None


@compiled_only
def test_calls_that_are_not_usual_are_made_by_the_python():
    counters, round_, drain = _native.CounterFields(), _native.RoundFields(), _native.DrainFields()
    context = contextvars.copy_context()

    def call(calls):
        round_.calls, round_.call_index = calls, 0
        return _native.call_usual(round_, counters, sizes, context, 0)

    sizes: Any = _native.SizeFields()
    sizes.exact = {1: 0}

    made: list[Any] = []

    async def handle(batch):
        made.append(batch)

    entry: Any = _native.HandlerFields()
    assert call([(entry, [1])]) is _native.NO_CALL
    round_.drain = drain
    for calls in (None, [], [5], [(None, [1])], [(entry, ())], [(entry, [1])]):
        assert call(calls) is _native.NO_CALL
    turns: Any = _native.TurnFields()
    entry.timeout, entry.consume, entry.turns = None, handle, turns
    for holders, waiting in [(None, None), ([], deque()), ([1], None), ((), None)]:
        turns.holders, turns.waiting, turns.limit = holders, waiting, 1
        assert call([(entry, [1])]) is _native.NO_CALL
    turns.holders, turns.waiting = [], None
    assert made == []
    assert call([(entry, [1, 2])]) is _native.NO_CALL  # a size that was never counted
    assert made == []
    assert call([(entry, [1]), (entry, [2])]) is _native.NO_CALL
    assert (made, counters.handled, round_.call_index, turns.holders) == ([[1], [2]], 2, 2, [])
    with pytest.raises(TypeError):
        _native.call_usual(round_, counters, sizes, context)
    with pytest.raises(TypeError):
        _native.call_usual(round_, 5, sizes, context, 0)
    round_.calls, round_.call_index = [(entry, [1])], 0
    with pytest.raises(TypeError, match="clock"):
        _native.call_usual(round_, counters, sizes, context, 1)


# -- what is let go of early, and counted late -----------------------------------------------------------------------


@compiled_only
@pytest.mark.parametrize("size", [5, 300])
async def test_a_call_that_has_ended_lets_go_of_its_items_at_once(size):
    alive: list[int] = []
    gone: list[Any] = []

    async def look(batch):
        alive.append(sum(each() is not None for each in gone))
        gone.extend(weakref.ref(item) for item in batch)

    queue = bq.BatchQueue[Any]("early", bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(2)))
    for kind in KINDS:
        queue.add_handler(kind, look)
    for _ in range(3):
        queue.produce_many_nowait([kind() for kind in KINDS for _ in range(size)])
        await queue.flush()
    assert alive[len(KINDS) :] == [0] * 2 * len(KINDS)  # the first batch of a size is counted by the Python, and stays
    await queue.shutdown()


@pytest.mark.parametrize("keep", ["the list", "the items", "nothing", "less", "more"])
async def test_a_handler_may_do_with_its_list_what_it_likes(keep):
    kept: list[Any] = []

    async def handle(batch):
        if keep == "the list":
            kept.append(batch)
        elif keep == "the items":
            kept.append([*batch])
        elif keep == "less":
            kept.append([batch.pop()])
        elif keep == "more":
            batch.extend([*batch, None])

    queue = typed()
    for kind in KINDS:
        queue.add_handler(kind, handle)
    for number in range(1, 5):
        for kind in KINDS:
            for _ in range(number):
                queue.produce_nowait(kind())
        await queue.flush()
        for batch in kept:
            assert len(batch) == (1 if keep == "less" else number)
            assert len({*map(type, batch)}) == 1
            assert None not in batch
        kept.clear()
    assert queue.stats().handled == 10 * len(KINDS)
    await queue.shutdown()


@pytest.mark.parametrize("extra", [(), (None,)])
async def test_whoever_waits_learns_which_items_failed_behind_calls_that_have_ended(extra):
    async def fail(batch):
        raise ValueError

    other: list[asyncio.Task[None]] = []

    async def begin(batch):
        if not other:  # a wait that begins amid the round, behind calls that have ended
            other.append(asyncio.create_task(queue.deliver([KINDS[2](), KINDS[5]()])))
            await asyncio.sleep(0)

    queue = bq.BatchQueue[Any]("told", bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(2)))
    for kind in [*KINDS, type(None)]:
        queue.add_handler(kind, ignore)
    queue.add_handler(KINDS[4], begin)
    for number in (2, 7, 12):
        queue.add_handler(KINDS[number], fail)
    items = [each for kind in KINDS[:15] for each in (kind(), kind(), *extra)]
    with pytest.raises(bq.DeliveryError) as failed:
        await queue.deliver(items)
    wrong = [item for failure in failed.value.failures for item in failure.items]
    assert sorted(map(id, wrong)) == sorted(id(item) for item in items if type(item) in {KINDS[2], KINDS[7], KINDS[12]})
    with pytest.raises(bq.DeliveryError) as failed:
        await other[0]
    assert [[type(each) for each in failure.items] for failure in failed.value.failures] == [[KINDS[2]]]
    await queue.shutdown()


async def test_batch_sizes_are_exact_at_any_time():
    seen: list[int] = []
    calls: list[int] = []

    async def look(batch):
        calls.append(len(batch))
        sizes = queue.stats().batch_sizes
        seen.append(sizes.count)
        assert (sizes.count, sizes.total) == (len(calls), sum(calls))

    queue = typed()
    for kind in KINDS:
        queue.add_handler(kind, look)
    for size in (1, 3, 3, 1, 2, 300):
        for number, kind in enumerate(KINDS):
            for _ in range(size + number % 2):
                queue.produce_nowait(kind())
        await queue.flush()
    assert seen == list(range(1, 6 * len(KINDS) + 1))
    assert queue.stats().batch_sizes.max == 301
    await queue.shutdown()


def test_a_size_that_was_counted_can_be_taken_back():
    sizes = Sizes()
    sizes.first(5)
    sizes.last, sizes.times = 5, 2  # as the hot path counts
    sizes.undo(5)
    assert (sizes.summary().count, sizes.summary().total) == (2, 10)
    for number in range(10, 10 + Sizes.MOST_EXACT):
        sizes.first(number)
    assert sizes.summary().count == 2 + Sizes.MOST_EXACT
    sizes.undo(5)
    sizes.undo(5)
    assert sizes.times == 0


@compiled_only
async def test_sizes_that_were_folded_away_are_counted_all_the_same():
    queue = typed(max_batch=1_000)
    queue.add_handler(KINDS[0], ignore)
    handled = 0
    for size in [7, *range(1, 300), 7, 7, 299]:
        for _ in range(size):
            queue.produce_nowait(KINDS[0]())
        handled += size
        await queue.flush()
    sizes = queue.stats().batch_sizes
    assert (sizes.count, sizes.total) == (303, handled)
    await queue.shutdown()


@compiled_only
def test_a_partition_keeps_its_countdown_from_round_to_round():
    partition = partition_like(fast_slots=_native.Countdown(None, 3))
    slots = partition.fast_slots
    _native.take_usual(deque([partition]), [], 1, 5, maxsize)
    assert partition.fast_slots is slots
    assert slots.__length_hint__() == 0
    assert next(slots, 5) == 5
