"""The bound by bytes: what items weigh, beside how many there are."""

from __future__ import annotations

import asyncio
import threading

import pytest
from queue_tools import check, kinds_by_home, make, outcome

import batchqueue_async as bq
from batchqueue_async.queue.intake import RemoteOffer
from batchqueue_async.testing import RecordingHandler, advance, settle

STRATEGY = bq.BufferStrategy


def weighed(limit=10, **options):
    """A queue bound by bytes whose handler is held, and the handler."""
    handler = RecordingHandler()
    handler.hold()
    options = {"size_of": len, "max_batch": 1, "consumer": handler} | options
    return make(buffer_bytes=limit, **options), handler


async def busy(limit=10, **options):
    """The same with an item in its handler, so that nothing is taken out."""
    queue, handler = weighed(limit, **options)
    assert queue.produce_nowait("in hand")
    await settle()
    return queue, handler


def held_bytes(queue):
    stats = check(queue)
    assert stats.used_bytes <= stats.capacity_bytes
    return stats.used_bytes


async def test_items_come_in_up_to_the_last_byte_and_not_beyond():
    queue, handler = await busy(strategy=STRATEGY.IF_POSSIBLE)
    assert queue.produce_nowait("x" * 4)
    assert queue.produce_nowait("x" * 6)
    assert not queue.produce_nowait("x")
    assert queue.produce_nowait("")
    stats = check(queue)
    assert (stats.used, stats.used_bytes, stats.capacity_bytes, stats.refused) == (3, 10, 10, 1)
    assert (stats.partitions[0].used_bytes, stats.partitions[0].capacity_bytes, stats.used_ratio) == (10, 10, 1.0)
    handler.release()
    await queue.flush(timeout=1)
    assert held_bytes(queue) == 0


async def test_both_bounds_hold():
    queue, _ = await busy(strategy=STRATEGY.IF_POSSIBLE, buffer_size=2)
    assert queue.produce_many_nowait(["a", "b", "c"]) == 2
    assert held_bytes(queue) == 2


async def test_without_the_bound_there_are_no_bytes():
    stats = make(consumer=RecordingHandler()).stats()
    assert (stats.used_bytes, stats.capacity_bytes, stats.partitions[0].capacity_bytes) == (0, None, None)


async def test_a_smaller_item_does_not_pass_one_that_waits():
    queue, handler = await busy()
    assert queue.produce_nowait("x" * 8)
    large = asyncio.create_task(queue.produce("y" * 5))
    await settle()
    small = asyncio.create_task(queue.produce("z"))
    await advance(3600)
    assert not large.done()
    assert not small.done()
    assert not queue.produce_nowait("z")
    handler.release()
    assert await asyncio.gather(large, small) == [True, True]
    await queue.flush(timeout=1)
    assert handler.handled == ["in hand", "x" * 8, "y" * 5, "z"]


async def test_bulk_waits_for_bytes_in_parts_and_keeps_its_order():
    queue, handler = await busy()
    task = asyncio.create_task(queue.produce_many(["a" * 6, "b" * 3, "c" * 5, "d"]))
    await settle()
    assert (held_bytes(queue), task.done()) == (9, False)
    handler.release()
    assert await task == 4
    await queue.flush(timeout=1)
    assert handler.handled == ["in hand", "a" * 6, "b" * 3, "c" * 5, "d"]


async def test_a_cancelled_waiter_gives_its_bytes_back():
    queue, handler = await busy(max_batch=2)
    assert queue.produce_nowait("x" * 10)
    first, second = (asyncio.create_task(queue.produce(letter * 9)) for letter in "ab")
    await settle()
    handler.release()
    while queue.stats().used_bytes == 10:
        await asyncio.sleep(0)
    first.cancel()  # it has its bytes, and has not run yet
    assert await second
    assert isinstance(await outcome(first), bool | str)
    await queue.flush(timeout=1)
    assert held_bytes(queue) == 0


async def test_drop_oldest_drops_as_many_as_it_takes_and_no_more():
    queue, handler = await busy(strategy=STRATEGY.DROP_OLDEST)
    assert queue.produce_many_nowait(["a" * 3, "b" * 3, "c" * 3]) == 3
    assert queue.produce_nowait("d" * 5)
    assert check(queue).dropped_after == 2
    handler.release()
    await queue.flush(timeout=1)
    assert handler.handled == ["in hand", "c" * 3, "d" * 5]


async def test_drop_newest_counts_what_finds_no_bytes():
    queue, _ = await busy(strategy=STRATEGY.DROP_NEWEST)
    assert queue.produce_many_nowait(["a" * 6, "b" * 6, "c"]) == 1
    assert (check(queue).dropped_before, held_bytes(queue)) == (2, 6)


@pytest.mark.parametrize("strategy", STRATEGY)
async def test_what_could_never_come_in_is_an_error_and_nothing_of_its_call_comes_in(strategy):
    queue, _ = await busy(strategy=strategy, block_timeout=None)
    assert queue.produce_nowait("keep")
    message = r"queue 'q': a str of 11 bytes can never come in, since a partition holds buffer_bytes=10; split"
    items = ["a", "x" * 11]
    with pytest.raises(bq.ItemTooLargeError, match=message):
        await queue.produce(items[1])
    with pytest.raises(bq.ItemTooLargeError):
        queue.produce_nowait(items[1])
    with pytest.raises(bq.ItemTooLargeError):
        await queue.produce_many(items)
    with pytest.raises(bq.ItemTooLargeError):
        queue.produce_many_nowait(items)
    with pytest.raises(bq.ItemTooLargeError):
        await queue.deliver(items)
    stats = check(queue)
    assert (stats.used, stats.used_bytes, stats.dropped, stats.refused) == (1, 4, 0, 0)


@pytest.mark.parametrize("size", [-1, 1.0, None, True, "4"])
async def test_a_size_that_is_no_number_of_bytes_is_an_error(size):
    queue, _ = await busy(size_of=lambda item: 0 if item == "in hand" else size)
    with pytest.raises(bq.ConfigError, match=rf"queue 'q': size_of gave {size!r} for a str; return a whole number"):
        await queue.produce("x")
    assert check(queue).used == 0


async def test_an_item_counts_by_what_it_weighed_as_it_came_in():
    queue, handler = await busy(strategy=STRATEGY.IF_POSSIBLE)
    growing = bytearray(4)
    assert queue.produce_nowait(growing)
    growing.extend(bytes(100))
    assert held_bytes(queue) == 4
    assert queue.produce_nowait(b"x" * 6)
    handler.release()
    await queue.flush(timeout=1)
    assert held_bytes(queue) == 0


async def test_want_of_bytes_ends_a_batch_that_lingers():
    handler = RecordingHandler()
    queue = make(consumer=handler, buffer_bytes=10, size_of=len, linger=60.0)
    assert await queue.produce("a" * 6)
    await advance(1)
    assert not handler.handled
    assert await queue.produce("b" * 6)
    await settle()
    assert handler.handled == ["a" * 6]
    assert await queue.produce("c" * 4)  # the last byte is used
    await settle()
    assert handler.handled == ["a" * 6, "b" * 6, "c" * 4]


async def test_a_producer_that_waits_too_long_is_refused():
    queue, _ = await busy(block_timeout=1.5)
    assert await queue.produce("x" * 8)
    assert not await queue.produce("y" * 3)
    with pytest.raises(bq.DeliveryError, match="1 of 1 items"):
        await queue.deliver(["y" * 3])


async def test_a_handler_that_waits_for_its_own_bytes_is_told():
    errors = []

    async def handle(batch):
        if "go" in batch:
            try:
                await queue.produce("x" * 10)
                await queue.produce("y")
            except bq.DeadlockError as error:
                errors.append(str(error))

    queue = make(consumer=handle, buffer_bytes=10, size_of=len)
    await queue.deliver(["go"])
    assert "raise buffer_size and buffer_bytes" in errors[0]


async def test_types_that_move_as_the_queue_grows_take_their_bytes_along():
    kinds = kinds_by_home(4)
    handler = RecordingHandler()
    handler.hold()
    queue = make(
        partitions=bq.PartitionPolicy.adaptive(), buffer_bytes=10, size_of=lambda item: item.number, max_batch=1
    )
    for kind in kinds:
        queue.add_handler(kind, handler)
        assert await queue.produce_many([kind(3), kind(4)]) == 2
        assert held_bytes(queue) <= 10 * queue.partition_count
    handler.release()
    await queue.flush(timeout=5)
    assert held_bytes(queue) == 0
    assert sorted(item.number for item in handler.handled) == [3] * 4 + [4] * 4


async def test_a_shutdown_gives_back_what_is_left():
    queue, _ = await busy()
    assert queue.produce_nowait("x" * 5)
    waiting = asyncio.create_task(queue.produce("y" * 6))
    await settle()
    report = await queue.shutdown(timeout=0)
    assert (report.undelivered, await waiting) == (["in hand", "x" * 5], False)


# --- from other threads and loops


async def until(condition):
    """Let the loop run until something on another thread has happened."""
    while not condition():
        await asyncio.sleep(0.001)


@pytest.fixture
def bridge():
    with bq.SyncBridge() as bridge:
        yield bridge


class Gate:
    """A handler that waits until it is let through."""

    def __init__(self):
        self.open = threading.Event()
        self.entered = threading.Event()
        self.handled = []

    async def consume(self, batch):
        self.entered.set()
        await until(self.open.is_set)
        self.handled += batch


def gated(bridge, **options):
    """A queue bound by 10 bytes with an item in its handler, which waits."""
    gate = Gate()
    queue = bridge.get_or_create(
        "q", bq.QueueConfig(consumer=gate, buffer_bytes=10, size_of=len, max_batch=1, **options)
    )
    assert queue.produce("in hand")
    assert gate.entered.wait(30)
    return queue, gate


def test_threads_keep_the_bound_exactly(bridge):
    queue, gate = gated(bridge)
    assert queue.produce("x" * 6)
    assert queue.produce_many(["y", "z" * 3], timeout=30) == 2
    assert not queue.produce("w", timeout=0)
    with pytest.raises(bq.PartlyAcceptedError) as caught:
        queue.produce_many(["", "w"], timeout=0)
    assert caught.value.accepted == 1
    assert queue.peek().used_bytes == 10
    gate.open.set()
    queue.flush(30)
    assert gate.handled == ["in hand", "x" * 6, "y", "z" * 3, ""]
    assert (queue.stats().refused, queue.stats().used_bytes) == (2, 0)


def test_a_thread_waits_for_bytes_in_line(bridge):
    queue, gate = gated(bridge)
    assert queue.produce("x" * 10)
    threads = [threading.Thread(target=queue.produce, args=(letter * 7, 30)) for letter in "ab"]
    for count, thread in enumerate(threads, start=1):
        thread.start()
        while queue.stats().partitions[0].waiting < count:
            pass
    gate.open.set()
    for thread in threads:
        thread.join(30)
    queue.flush(30)
    assert gate.handled == ["in hand", "x" * 10, "a" * 7, "b" * 7]


@pytest.mark.parametrize("strategy", [STRATEGY.DROP_OLDEST, STRATEGY.DROP_NEWEST, STRATEGY.IF_POSSIBLE])
def test_strategies_hold_for_threads_too(bridge, strategy):
    queue, gate = gated(bridge, strategy=strategy)
    assert queue.produce_many(["x" * 4, "y" * 4]) == 2
    assert queue.produce("z" * 7) is (strategy is STRATEGY.DROP_OLDEST)
    stats = queue.stats()
    counts = (stats.refused, stats.dropped_before, stats.dropped_after)
    assert counts == {"DROP_OLDEST": (0, 0, 2), "DROP_NEWEST": (0, 1, 0), "IF_POSSIBLE": (1, 0, 0)}[strategy.name]
    gate.open.set()
    queue.flush(30)


def test_threads_get_the_errors_of_items_that_can_never_come_in(bridge):
    queue, gate = gated(bridge)
    with pytest.raises(bq.ItemTooLargeError):
        queue.produce("x" * 11)
    with pytest.raises(TypeError):
        queue.produce_many(["a", 5])
    assert queue.stats().used == 0
    gate.open.set()


async def test_other_loops_wait_without_blocking_and_leave_no_trace_when_cancelled():
    bridge = await asyncio.to_thread(bq.SyncBridge)
    try:
        queue, gate = await asyncio.to_thread(gated, bridge)
        assert await queue.produce_async("x" * 10)
        waiting = asyncio.ensure_future(queue.produce_async("y"))
        await until(lambda: queue.peek().partitions[0].waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: not queue.peek().partitions[0].waiting)
        assert not await queue.produce_async("y", timeout=0)
        gate.open.set()
        assert await queue.produce_many_async(["a" * 9, "b" * 9]) == 2
        await queue.flush_async()
        assert gate.handled == ["in hand", "x" * 10, "a" * 9, "b" * 9]
    finally:
        await asyncio.to_thread(bridge.close)


def test_a_loop_that_stands_still_takes_nothing_from_who_has_given_up(bridge):
    let_go = threading.Event()
    handled = []

    async def block(batch):
        handled.extend(batch)
        if "stand still" in batch:
            let_go.wait(30)

    queue = bridge.get_or_create("q", bq.QueueConfig(consumer=block, buffer_bytes=100, size_of=len))
    queue.produce("stand still")
    while not handled:
        pass
    assert not queue.produce("too late", timeout=0.01)
    let_go.set()
    queue.flush(30)
    assert handled == ["stand still"]
    assert queue.stats().refused == 1


def test_on_the_loops_own_thread_it_never_waits(bridge):
    answers = []

    async def handle(batch):
        if batch != ["go"]:
            return
        answers.append(queue.produce("x" * 10))
        answers.append(queue.produce("y", timeout=0))
        try:
            queue.produce("y")
        except bq.DeadlockError as error:
            answers.append(type(error))

    queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handle, buffer_bytes=10, size_of=len))
    queue.produce("go")
    queue.flush(30)
    assert answers == [True, False, bq.DeadlockError]


def test_many_threads_lose_and_double_nothing(bridge):
    largest = 0
    seen = []

    async def handle(batch):
        nonlocal largest
        seen.extend(batch)
        largest = max(largest, queue.peek().used_bytes)

    queue = bridge.get_or_create(
        "q", bq.QueueConfig(consumer=handle, buffer_bytes=64, size_of=lambda item: item % 32, max_batch=5)
    )

    def produce(first):
        for number in range(first, first + 200):
            assert queue.produce(number, timeout=30)
        assert queue.produce_many(range(first + 200, first + 300), timeout=30) == 100

    threads = [threading.Thread(target=produce, args=(start,)) for start in range(0, 1200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    queue.flush(30)
    assert sorted(seen) == list(range(1200))
    assert all(
        [each for each in seen if each // 300 == part] == list(range(part * 300, part * 300 + 300)) for part in range(4)
    )
    assert largest <= 64


@pytest.mark.parametrize("when", range(6))
async def test_withdrawing_at_any_moment_tells_exactly_what_came_in(when):
    queue, handler = await busy()
    remote = RemoteOffer(["a" * 4, "b" * 4, "c" * 4, "d" * 4])
    task = asyncio.create_task(queue.intake.put_remote(remote, None))
    for turn in range(when):
        await asyncio.sleep(0)
        if turn == 2:
            handler.release()
    accepted = remote.withdraw()
    handler.release()
    await queue.flush(timeout=10)
    await outcome(task)
    assert handler.handled == ["in hand", *["a" * 4, "b" * 4, "c" * 4, "d" * 4][:accepted]]
