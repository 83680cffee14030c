"""The faults of other batch queues, j to v, each by its id; q, r and s are the bridge's."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from queue_tools import Item, check, kinds, make, now, outcome

import batchqueue_async as bq
from batchqueue_async.testing import RecordingErrorHandler, RecordingHandler, VirtualTimeLoop, advance, settle

# --- j: sparse traffic


async def test_bq_j_the_first_item_cuts_the_sleep_short():
    delays: list[float] = []

    async def handle(batch: list[float]) -> None:
        delays.extend(now() - produced for produced in batch)

    queue = make(consumer=handle)  # the defaults: sleeps of 1 to 50 ms, then parked
    for gap in [0.0205] * 20 + [0.0005, 0.003, 0.012, 0.049, 0.2, 3600]:
        await advance(gap)
        assert await queue.produce(now())
    await queue.flush(timeout=1)
    assert delays == [0.0] * 26
    assert queue.stats().queue_latency.max == 0.0


async def test_bq_j_a_long_idle_queue_costs_nothing():
    loop = asyncio.get_running_loop()
    queues = [make(consumer=RecordingHandler(), partitions=bq.PartitionPolicy.fixed(4)) for _ in range(10)]
    await advance(0.2)
    assert [timer for timer in loop._scheduled if not timer.cancelled()] == []
    assert all(queue.produce_nowait(1) for queue in queues)
    await settle()
    assert [queue.stats().handled for queue in queues] == [1] * 10


# --- k: waiting for oneself


@pytest.mark.parametrize("call", ["produce", "produce_many", "deliver", "flush"])
async def test_bq_k_a_handler_that_would_wait_for_itself_gets_an_error_at_once(call):
    on_error = RecordingErrorHandler()
    times: list[float] = []

    async def handle(batch: list[str]) -> None:
        times.append(now())
        if batch == ["go"]:
            while queue.produce_nowait("fill"):
                pass
            arguments = {"produce": ["x"], "produce_many": [["x", "y"]], "deliver": [["x"]], "flush": []}[call]
            await getattr(queue, call)(*arguments)

    queue = make(consumer=handle, on_error=on_error, buffer_size=3, max_batch=1)
    assert await queue.produce("go")
    await settle()
    ((items, error),) = on_error.failures
    assert items == ["go"]
    assert isinstance(error, bq.DeadlockError)
    assert "queue 'q'" in str(error)
    assert "produce" in str(error)  # the way out
    assert times == [0.0] * 4
    stats = check(queue)
    assert (stats.handled, stats.failed) == (3, 1)


async def test_bq_k_a_handler_may_produce_into_its_queue_while_there_is_room():
    handled: list[int] = []

    async def handle(batch: list[int]) -> None:
        handled.extend(batch)
        for number in batch:
            if number:
                assert await queue.produce(number - 1)

    queue = make(consumer=handle, buffer_size=3)
    assert await queue.produce(10)
    await settle()
    assert handled == list(range(10, -1, -1))


# --- l: counters


async def test_bq_l_what_was_refused_is_no_throughput_and_every_count_is_its_own():
    class Recording:
        seen: list[list[int]] = []  # noqa: RUF012

        def assign(self, throughput, owners, workers):
            self.seen.append(list(throughput))

    class Bad(Item):
        pass

    handler = RecordingHandler[Item](fail=lambda batch: ValueError() if isinstance(batch[0], Bad) else None)
    handler.hold()
    queue = make(
        strategy=bq.BufferStrategy.IF_POSSIBLE,
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(2),
        selector=lambda item, count: item.number % count,
        buffer_size=3,
        balancer=Recording(),
        balance_interval=1.0,
    )
    queue.add_handler(Item, handler)
    queue.add_handler(Bad, handler)
    assert [queue.produce_nowait(Item(number)) for number in range(0, 20, 2)] == [True] * 3 + [False] * 7
    assert [queue.produce_nowait(Bad(number)) for number in range(1, 3, 2)] == [True]
    assert queue.produce_nowait(Item(3))
    await advance(1.0)
    assert Recording.seen == [[3, 2]]
    stats = check(queue)
    assert (stats.attempted, stats.accepted, stats.refused, stats.in_flight) == (12, 5, 7, 5)
    handler.release()
    await queue.flush(timeout=1)
    stats = check(queue)
    assert (stats.handled, stats.failed, stats.unhandled, stats.dropped) == (4, 1, 0, 0)
    await advance(1.0)
    assert Recording.seen[1:] == [[0, 0]]


# --- m: the tail at the end


async def test_bq_m_async_with_drains_the_tail():
    handler = RecordingHandler[int](delay=1.0)
    async with bq.BatchQueueManager() as manager:
        queues = [manager.create(name, bq.QueueConfig(consumer=handler, max_batch=10)) for name in "ab"]
        for queue in queues:
            assert await queue.produce_many(range(30)) == 30
    assert sorted(handler.handled) == sorted([*range(30)] * 2)
    assert all(queue.closed for queue in queues)


async def test_bq_m_async_with_drains_the_tail_when_the_body_fails():
    handler = RecordingHandler[int]()

    async def body() -> None:
        async with bq.BatchQueueManager() as manager:
            assert await manager.create("q", bq.QueueConfig(consumer=handler)).produce(1)
            raise KeyError

    with pytest.raises(KeyError):
        await body()
    assert handler.handled == [1]


@pytest.mark.parametrize("workers", [1, 2])
def test_bq_m_a_loop_that_ends_without_shutdown_says_how_much_is_lost(logs, workers):
    async def main() -> bq.BatchQueue[int]:
        handler = RecordingHandler[int]()
        handler.hold()
        queue = make(
            consumer=handler,
            workers=bq.WorkerPolicy.fixed(workers),
            partitions=bq.PartitionPolicy.fixed(workers),
            max_batch=2,
        )
        assert await queue.produce_many(range(10)) == 10
        await settle()
        return queue

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        queue = runner.run(main())
    (event,) = [event for event in logs if event["log_level"] == "error"]
    assert (event["event"], event["queue"], event["items"]) == ("queue_abandoned", "q", 10)
    assert "async with BatchQueueManager()" in event["way_out"]
    assert queue.closed


# --- n: cancelling one of many


async def test_bq_n_a_cancelled_caller_affects_nobody_else_and_no_batch_runs_twice():
    handler = RecordingHandler[int](delay=1.0)
    queue = make(consumer=handler, max_batch=100)
    callers = [asyncio.create_task(queue.deliver([number])) for number in range(10)]
    await settle()
    assert handler.active == 1  # one batch for all ten
    callers[0].cancel()  # the first of them, and one in the middle
    callers[4].cancel()
    results = [await outcome(caller) for caller in callers]
    assert results == ["cancelled" if number in {0, 4} else None for number in range(10)]
    assert handler.batches == [list(range(10))]
    assert handler.handled == list(range(10))
    assert handler.cancelled == 0


# --- o: nobody passes


async def test_bq_o_nowait_never_passes_a_waiting_producer():
    handler = RecordingHandler[str]()
    handler.hold()
    queue = make(consumer=handler, buffer_size=1, max_batch=1)
    assert queue.produce_nowait("in flight")
    await settle()
    assert queue.produce_nowait("waiting")
    patient = asyncio.create_task(queue.produce("patient"))
    await settle()
    handler.release()
    partition = queue._router.partitions[0]
    tried = 0
    for _ in range(20):
        if partition.reserved:  # the place is free, and the patient one has not run yet
            tried += 1
            assert not queue.produce_nowait("pushy")
            assert queue.produce_many_nowait(["pushy", "pushier"]) == 0
            with pytest.raises(asyncio.QueueFull):
                partition.put_nowait("pushiest")
        await asyncio.sleep(0)
    assert tried > 0
    assert await patient
    await queue.flush(timeout=1)
    assert handler.handled == ["in flight", "waiting", "patient"]


# --- p: other threads and loops

CALLS = {
    "produce_nowait": lambda queue: queue.produce_nowait(1),
    "produce_many_nowait": lambda queue: queue.produce_many_nowait([1]),
    "produce": lambda queue: asyncio.run(queue.produce(1)),
    "produce_many": lambda queue: asyncio.run(queue.produce_many([1])),
    "deliver": lambda queue: asyncio.run(queue.deliver([1])),
    "flush": lambda queue: asyncio.run(queue.flush()),
    "shutdown": lambda queue: asyncio.run(queue.shutdown()),
    "stats": lambda queue: queue.stats(),
    "add_handler": lambda queue: queue.add_handler(int, RecordingHandler()),
    "remove_handler": lambda queue: queue.remove_handler(int),
}


@pytest.mark.parametrize("call", CALLS)
async def test_bq_p_a_call_from_another_thread_raises(call):
    queue = make()
    with pytest.raises(bq.WrongLoopError, match=rf"queue 'q': {call}.* another thread or event loop.*queue.bridge\(\)"):
        await asyncio.to_thread(CALLS[call], queue)
    stats = check(queue)
    assert stats.attempted == 0
    assert not queue.closed


@pytest.mark.parametrize("call", CALLS)
async def test_bq_p_a_call_from_another_thread_raises_while_the_fast_path_is_open(call):
    handler = RecordingHandler[int]()
    handler.hold()
    queue = make(consumer=handler, max_batch=1)
    assert queue.produce_many_nowait([1, 2, 3]) == 3
    await settle()
    with pytest.raises(bq.WrongLoopError):
        await asyncio.to_thread(CALLS[call], queue)
    assert check(queue).attempted == 3


@pytest.mark.parametrize("call", CALLS)
def test_bq_p_a_call_from_a_second_loop_in_the_same_thread_raises(call):
    async def on_second_loop() -> None:
        calls = {
            "produce": lambda: queue.produce(1),
            "produce_many": lambda: queue.produce_many([1]),
            "deliver": lambda: queue.deliver([1]),
            "flush": queue.flush,
            "shutdown": queue.shutdown,
        }
        if call in calls:
            await calls[call]()
        else:
            CALLS[call](queue)

    async def make_queue() -> bq.BatchQueue[int]:
        return make()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as first, asyncio.Runner(loop_factory=VirtualTimeLoop) as second:
        queue = first.run(make_queue())
        with pytest.raises(bq.WrongLoopError, match=f"queue 'q': {call.removesuffix('_nowait')}"):
            second.run(on_second_loop())

        async def end() -> bq.ShutdownReport:
            return await queue.shutdown()

        assert first.run(end()).accepted == 0


def test_bq_p_an_item_from_a_second_loop_in_the_same_thread_is_refused_or_handled():
    """While items wait, the fast path looks at the thread alone; what it lets in this way must not be lost."""
    handler = RecordingHandler[str]()

    async def make_queue() -> bq.BatchQueue[str]:
        queue = make(consumer=handler)
        assert queue.produce_nowait("first")
        return queue

    async def on_second_loop() -> bool:
        try:
            return queue.produce_nowait("second")
        except bq.WrongLoopError:
            return False

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as first, asyncio.Runner(loop_factory=VirtualTimeLoop) as second:
        queue = first.run(make_queue())
        accepted = second.run(on_second_loop())
        first.run(queue.flush(timeout=1))
        first.run(queue.shutdown())
    assert handler.handled == ["first", "second"][: 1 + accepted]


def test_bq_p_a_call_outside_any_loop_raises():
    async def make_queue() -> bq.BatchQueue[int]:
        return make()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        queue = runner.run(make_queue())
        with pytest.raises(bq.WrongLoopError):
            queue.produce_nowait(1)
        with pytest.raises(bq.WrongLoopError):
            queue.stats()
        runner.run(queue.shutdown())
        assert queue.stats().attempted == 0  # after the end it can be asked for anywhere
    with pytest.raises(bq.WrongLoopError, match="queue 'q' is made outside a running event loop"):
        make()


def test_bq_p_a_thread_that_starts_after_the_loop_ended_is_refused_too():
    """The new thread may get the ended one's number."""
    made: list[bq.BatchQueue[int]] = []

    def loop_thread() -> None:
        async def main() -> None:
            made.append(make(consumer=RecordingHandler()))
            made[0].produce_nowait(1)

        asyncio.run(main())

    results: list[object] = []

    def call() -> None:
        try:
            results.append(made[0].produce_nowait(2))
        except bq.WrongLoopError as error:
            results.append(error)

    for target in (loop_thread, *[call] * 5):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert [type(result) for result in results] == [bq.WrongLoopError] * 5


# --- t: flush


async def test_bq_t_flush_means_that_what_was_accepted_before_has_been_handled():
    handler = RecordingHandler[int](delay=1.0, fail=lambda batch: ValueError() if 3 in batch else None)
    queue = make(
        consumer=handler, max_batch=2, workers=bq.WorkerPolicy.fixed(2), partitions=bq.PartitionPolicy.fixed(4)
    )
    assert await queue.produce_many(range(16)) == 16
    await advance(0.5)
    flush = asyncio.create_task(queue.flush())
    await settle()
    assert await queue.produce_many(range(100, 140)) == 40  # not waited for
    await flush
    assert set(range(16)) <= set(handler.items)
    stats = check(queue)
    assert stats.failed == 2
    assert 16 <= stats.handled + stats.failed < 40
    await queue.flush()
    assert check(queue).handled == 54
    before = now()
    await queue.flush()
    assert now() == before  # nothing to wait for


async def test_bq_t_the_timeout_of_flush_holds():
    handler = RecordingHandler[int]()
    handler.hold()
    queue = make(consumer=handler, max_batch=2)
    assert await queue.produce_many(range(6)) == 6
    with pytest.raises(TimeoutError, match=r"queue 'q': flush: 6 items are left after 1.5 s"):
        await queue.flush(timeout=1.5)
    assert now() == 1.5
    with pytest.raises(TimeoutError):
        await queue.flush(timeout=0)
    handler.release()
    await queue.flush(timeout=1.5)
    assert handler.handled == list(range(6))


async def test_bq_t_flush_covers_items_that_move_to_another_partition():
    handler = RecordingHandler[Item](delay=1.0)
    queue = make(partitions=bq.PartitionPolicy.adaptive(), max_batch=1)
    queue.add_handler(Item, handler, weight=1.0)
    first, *others = kinds(30)
    assert await queue.produce(first(0))
    await settle()
    for kind in others:
        queue.add_handler(kind, handler)
        assert await queue.produce(first(1))
    assert queue._router.migrations
    await queue.flush(timeout=100)
    assert len(handler.handled) == 30


# --- u: linger


async def test_bq_u_a_full_batch_does_not_linger():
    handler = RecordingHandler[int]()
    queue = make(consumer=handler, max_batch=10, linger=5.0)
    for _ in range(7):
        assert await queue.produce_many(range(10)) == 10
        await settle()
    for number in range(10):
        assert queue.produce_nowait(number)
    await settle()
    assert handler.batches == [list(range(10))] * 8
    assert handler.times == [0.0] * 8


# --- v: unknown types


async def test_bq_v_unknown_types_are_counted_and_logged_once_each(logs):
    queue = make(partitions=bq.PartitionPolicy.fixed(3))
    queue.add_handler(str, RecordingHandler())
    first, second = kinds(2)
    for number in range(5):
        assert await queue.produce(first(number))
        await queue.flush(timeout=1)
        assert await queue.produce_many([second(number), first(number)]) == 2
        await queue.flush(timeout=1)
    stats = check(queue)
    assert (stats.unhandled, stats.handled, stats.failed) == (15, 0, 0)
    events = [event for event in logs if event["event"] == "type_unhandled"]
    assert [(event["queue"], event["type"]) for event in events] == [("q", "Kind0"), ("q", "Kind1")]
    assert {event["log_level"] for event in events} == {"warning"}


async def test_bq_v_the_fallback_is_offered_unknown_types(caplog):
    fallback = RecordingHandler[object]()
    queue = make(fallback=fallback)
    queue.add_handler(str, RecordingHandler())
    assert await queue.produce_many([1, "text", 2.0]) == 3
    await queue.flush(timeout=1)
    assert fallback.handled == [1, 2.0]
    assert check(queue).handled == 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
