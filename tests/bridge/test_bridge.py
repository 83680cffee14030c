"""The bridge as its users see it: every call from threads, its timeout, and its end."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from bridge_tools import PATIENCE, Caller, Held, assert_adds_up, fill, in_line, until
from untraced import untraced

import batchqueue_async as bq


@pytest.fixture
def bridge():
    with bq.SyncBridge() as bridge:
        yield bridge


async def ignore(batch):
    pass


def test_a_thread_produces_and_flushes(bridge):
    handler = Held(held=False)
    queue = bridge.get_or_create("words", bq.QueueConfig(consumer=handler))
    assert queue.produce("a") is True
    assert queue.produce_many(["b", "c"]) == 2
    assert queue.produce_many(word for word in "de") == 2
    queue.flush(timeout=PATIENCE)
    assert handler.items == list("abcde")
    stats = queue.stats(timeout=PATIENCE)
    assert (stats.accepted, stats.handled, stats.used) == (5, 5, 0)
    assert_adds_up(stats)


def test_deliver_returns_when_all_is_handled_and_raises_the_failures(bridge):
    async def handle(batch):
        if "bad" in batch:
            raise ValueError("no")

    queue = bridge.get_or_create("words", bq.QueueConfig(consumer=handle))
    queue.deliver(["good"], timeout=PATIENCE)
    with pytest.raises(bq.DeliveryError) as caught:
        queue.deliver(iter(["bad"]), timeout=PATIENCE)
    assert [failure.items for failure in caught.value.failures] == [("bad",)]


def test_what_a_thread_produced_before_its_deliver_is_handled_first(bridge):
    handler = Held(held=False)
    queue = bridge.get_or_create("words", bq.QueueConfig(consumer=handler))
    for number in range(50):
        queue.produce(number)
    queue.deliver([50], timeout=PATIENCE)
    assert handler.items == list(range(51))


def test_handlers_by_type_are_added_from_a_thread(bridge):
    texts, numbers = Held(held=False), Held(held=False)
    queue = bridge.get_or_create("mixed", bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(4)))
    queue.add_handler(str, texts)
    queue.add_handler(int, numbers, weight=2.0, timeout=PATIENCE)
    queue.produce_many(["a", 1, "b", 2])
    queue.flush(timeout=PATIENCE)
    assert (texts.items, numbers.items) == (["a", "b"], [1, 2])
    with pytest.raises(bq.ConfigError, match="weight=-1"):
        queue.add_handler(str, texts, weight=-1)


def test_flush_keeps_its_timeout(bridge):
    handler = Held()
    queue = bridge.get_or_create("slow", bq.QueueConfig(consumer=handler))
    fill(queue, handler)
    with pytest.raises(TimeoutError, match=r"queue 'slow': flush took longer than 0\.05 s"):
        queue.flush(timeout=0.05)
    with pytest.raises(TimeoutError, match="queue 'slow': deliver"):
        queue.deliver(["x"], timeout=0.05)
    handler.open()
    queue.flush(timeout=PATIENCE)
    assert handler.items == ["first", "x"]  # a deliver that gives up takes nothing back


def test_call_runs_a_coroutine_function_on_the_bridges_loop(bridge):
    async def where(text):
        return text, threading.current_thread().name

    assert bridge.call(where, "here") == ("here", f"batchqueue-{bridge.name}")

    async def fail():
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        bridge.call(fail, timeout=PATIENCE)
    ended = threading.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError, match=r"hang took longer than 0\.01 s"):
        bridge.call(hang, timeout=0.01)
    assert ended.wait(PATIENCE)  # it was cancelled
    with pytest.raises(TypeError):
        bridge.call(len, "not a coroutine function")


def test_calls_own_timeout_error_is_told_from_the_bridges(bridge):
    async def fail():
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match=r"^mine$"):
        bridge.call(fail, timeout=PATIENCE)


def test_call_on_the_bridges_own_thread_is_a_deadlock(bridge):
    async def inside():
        bridge.call(ignore, [])

    with pytest.raises(bq.DeadlockError, match="call was called on the bridge's own thread"):
        bridge.call(inside, timeout=PATIENCE)

    async def close():
        bridge.close()

    with pytest.raises(bq.DeadlockError, match="close was called on the bridge's own thread"):
        bridge.call(close, timeout=PATIENCE)


def test_waiting_calls_on_the_queues_own_thread_are_deadlocks(bridge):
    queue = bridge.get_or_create("own", bq.QueueConfig(consumer=ignore))

    async def inside(call):
        getattr(queue, call)(*([[]] if call == "deliver" else []))

    for call in ("deliver", "flush", "stats", "shutdown"):
        with pytest.raises(bq.DeadlockError, match=f"queue 'own': {call}"):
            bridge.call(inside, call, timeout=PATIENCE)


def test_shutdown_reports_and_is_repeatable(bridge):
    handler = Held()
    queue = bridge.get_or_create("words", bq.QueueConfig(consumer=handler, max_batch=1))
    fill(queue, handler)
    queue.produce_many(["b", "c"])
    report = queue.shutdown(timeout=0.05)
    assert report.undelivered == ["first", "b", "c"]
    assert queue.shutdown() is report
    assert queue.closed
    assert queue.produce("late") is False
    assert queue.produce_many(["late", "later"]) == 0
    assert queue.produce_many(["late"], timeout=PATIENCE) == 0
    stats = queue.stats()
    assert (stats.refused, stats.undelivered) == (4, 3)
    assert_adds_up(stats)
    with pytest.raises(bq.QueueClosedError):
        queue.add_handler(int, ignore)


def test_a_further_shutdown_joins_one_whose_time_is_over():
    bridge = bq.SyncBridge()
    handler = Held()
    queue = bridge.get_or_create("words", bq.QueueConfig(consumer=handler))
    fill(queue, handler)
    report = queue.shutdown(timeout=0.0)
    assert report.undelivered == ["first"]
    assert queue.shutdown() is report
    assert bridge.close() == {}  # the queue has ended, and left the manager


def test_a_queue_that_was_shut_down_makes_room_for_another_of_its_name(bridge):
    first = bridge.get_or_create("words", bq.QueueConfig(consumer=ignore))
    first.shutdown(timeout=PATIENCE)
    handler = Held(held=False)
    second = bridge.get_or_create("words", bq.QueueConfig(consumer=handler))
    assert second is not first
    second.deliver(["again"], timeout=PATIENCE)
    assert handler.items == ["again"]
    assert bridge.get_or_create("words", bq.QueueConfig(consumer=handler)) is second


def test_close_handles_what_is_left_and_can_be_called_again():
    bridge = bq.SyncBridge()
    handler = Held(held=False)
    queue = bridge.get_or_create("words", bq.QueueConfig(consumer=handler))
    queue.produce_many(range(1000))
    reports = bridge.close()
    assert reports["words"].handled == 1000
    assert reports["words"].complete
    assert handler.items == list(range(1000))
    assert bridge.close() == {}
    assert queue.stats().handled == 1000


def test_an_unused_bridge_starts_nothing_and_closes():
    before = threading.active_count()
    bridge = bq.SyncBridge()
    assert threading.active_count() == before
    assert bridge.close() == {}


def test_after_close_every_use_says_so():
    bridge = bq.SyncBridge()
    queue = bridge.get_or_create("words", bq.QueueConfig(consumer=ignore))
    bridge.close()
    assert queue.produce("late") is False
    uses = [
        lambda: bridge.get_or_create("words"),
        lambda: bridge.get_or_create(
            "shared", bq.QueueConfig(scheduler=bq.SharedScheduler("POOL", bq.WorkerPolicy.fixed(1)))
        ),
        lambda: bridge.queue("words"),
        lambda: bridge.call(ignore, []),
        queue.flush,
        lambda: queue.deliver(["late"]),
        lambda: queue.add_handler(int, ignore),
    ]
    for use in uses:
        with pytest.raises(bq.QueueClosedError, match=r"make a new"):
            use()


def test_close_with_a_handler_that_does_not_end_reports_what_is_left():
    bridge = bq.SyncBridge()
    handler = Held()
    queue = bridge.get_or_create("stuck", bq.QueueConfig(consumer=handler, max_batch=1))
    fill(queue, handler)
    queue.produce("behind")
    reports = bridge.close(timeout=0.05)
    assert reports["stuck"].undelivered == ["first", "behind"]
    assert queue.produce("late") is False


def test_close_with_a_loop_that_is_blocked_ends_all_the_same(logs):
    bridge = bq.SyncBridge()
    entered, release = threading.Event(), threading.Event()

    async def block(batch):
        entered.set()
        release.wait(PATIENCE)

    queue = bridge.get_or_create("blocked", bq.QueueConfig(consumer=block, max_batch=1))
    queue.produce_many(["first", "behind"])
    assert entered.wait(PATIENCE)
    try:
        reports = bridge.close(timeout=0.05)
    finally:
        release.set()
    assert reports["blocked"].undelivered == ["first", "behind"]
    assert reports["blocked"].handled == 0
    assert any(event["event"] == "loop_stalled" for event in logs)
    until(lambda: not bridge._home.running)  # once the handler lets go, the thread ends by itself
    assert_adds_up(queue.stats())


def test_many_queues_share_a_bridge(bridge):
    handlers = [Held(held=False) for _ in range(30)]
    queues = [bridge.get_or_create(f"q{n}", bq.QueueConfig(consumer=each)) for n, each in enumerate(handlers)]
    for number, queue in enumerate(queues):
        queue.produce(number)
    for queue in queues:
        queue.flush(timeout=PATIENCE)
    assert [handler.items for handler in handlers] == [[number] for number in range(30)]
    assert bridge.queue("q7") is queues[7]
    with pytest.raises(bq.ConfigError, match="queue 'no'"):
        bridge.queue("no")


def test_queues_on_shared_schedulers_are_closed_with_the_bridge():
    bridge = bq.SyncBridge()
    handler = Held(held=False)
    scheduler = bq.SharedScheduler("POOL", bq.WorkerPolicy.fixed(2))
    queue = bridge.get_or_create("shared", bq.QueueConfig(consumer=handler, scheduler=scheduler))
    for number in range(100):
        assert queue.produce(number)
    assert bridge.close()["shared"].handled == 100
    assert handler.items == list(range(100))
    assert not bridge.manager.names()


def test_threads_use_a_queue_of_a_shared_scheduler_by_its_own_bridge():
    handler = Held(held=False)
    manager = bq.BatchQueueManager()
    scheduler = bq.SharedScheduler("POOL", bq.WorkerPolicy.fixed(2))
    queue = manager.create("shared", bq.QueueConfig(consumer=handler, scheduler=scheduler)).bridge()
    assert queue.produce("x")
    queue.flush(timeout=PATIENCE)
    asyncio.run(manager.shutdown_all())
    assert handler.items == ["x"]
    assert queue.produce("late") is False


def test_a_bridge_beside_a_manager_whose_queue_lives_on_the_main_loop():
    handler, other = Held(held=False), Held(held=False)

    async def main():
        async with bq.BatchQueueManager() as manager:
            manager.create("main", bq.QueueConfig(consumer=handler))
            bridge = bq.SyncBridge(manager)

            def work():
                bridge.queue("main").deliver(["from a thread"], timeout=PATIENCE)
                bridge.get_or_create("own", bq.QueueConfig(consumer=other)).deliver(["too"], timeout=PATIENCE)
                reports = bridge.close()
                assert list(reports) == ["own"]
                assert manager.names() == ["main"]

            await asyncio.to_thread(work)
            assert manager.get("main").produce_nowait("the loop's own")

    asyncio.run(main())
    assert handler.items == ["from a thread", "the loop's own"]
    assert other.items == ["too"]


def test_a_bridge_is_used_inside_a_running_loop_as_in_a_notebook():
    handler = Held(held=False)

    async def cell():
        with bq.SyncBridge() as bridge:
            queue = bridge.get_or_create("cell", bq.QueueConfig(consumer=handler))
            assert queue.produce("sync")
            assert await queue.produce_async("async")
            await queue.flush_async(timeout=PATIENCE)
            queue.flush(timeout=PATIENCE)

    asyncio.run(cell())
    assert handler.items == ["sync", "async"]


def test_a_loop_that_ends_without_a_shutdown_turns_its_threads_away(logs):
    manager = bq.BatchQueueManager()
    handler = Held()

    async def main():
        queue = manager.create("lost", bq.QueueConfig(consumer=handler, buffer_size=1)).bridge()
        await asyncio.to_thread(fill, queue, handler)
        queue.produce("buffered")
        waiting = Caller(queue.produce, "waits")
        flushing = Caller(queue.flush)
        await asyncio.to_thread(until, lambda: in_line(queue) == 1)
        return queue, waiting, flushing

    queue, waiting, flushing = asyncio.run(main())
    assert waiting.outcome() is False
    with pytest.raises(bq.QueueClosedError):
        flushing.outcome()
    assert queue.produce("late") is False
    with pytest.raises(bq.QueueClosedError, match="its event loop does not run any more"):
        queue.flush()
    assert any(event["event"] == "queue_abandoned" for event in logs)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_closed_under_its_queue_turns_its_threads_away(logs):
    loop = asyncio.new_event_loop()
    handler = Held()

    async def make():
        queue = bq.BatchQueueManager().create("cut", bq.QueueConfig(consumer=handler, buffer_size=1)).bridge()
        await asyncio.to_thread(fill, queue, handler)
        await asyncio.to_thread(queue.produce, "buffered")
        return queue, Caller(queue.produce, "waits")

    queue, waiting = loop.run_until_complete(make())
    until(lambda: in_line(queue) == 1)
    drains = [task for task in asyncio.all_tasks(loop) if not task.done()]
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert waiting.outcome() is False
    assert queue.produce("late") is False
    assert any(event["event"] == "queue_abandoned" for event in logs)
    for task in drains:
        task._log_destroy_pending = False
    drains.clear()
    gc.collect()


def test_a_bridge_that_is_made_on_the_loops_thread_before_it_was_met_works_there():
    handler = Held(held=False)
    results = []

    async def main():
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("met", bq.QueueConfig(consumer=handler))
            made = Caller(queue.bridge)
            made.join(PATIENCE)  # its first step on this loop has not run yet
            results.append(made.outcome().produce("on the loop"))

    asyncio.run(main())
    assert results == [True]
    assert handler.items == ["on the loop"]


def test_bridged_queues_linger_as_others_do(bridge):
    handler = Held(held=False)
    queue = bridge.get_or_create("lingering", bq.QueueConfig(consumer=handler, linger=30.0, max_batch=3))
    for number in range(5):
        queue.produce(number)
        queue.stats(timeout=PATIENCE)  # the loop has the item now
    until(lambda: handler.batches)
    assert handler.batches == [[0, 1, 2]]
    queue.flush(timeout=PATIENCE)
    assert handler.batches == [[0, 1, 2], [3, 4]]


def test_a_stalled_loop_is_noticed_with_its_handler_and_for_how_long(bridge, logs):
    entered, release = threading.Event(), threading.Event()

    async def stall(batch):
        entered.set()
        release.wait(PATIENCE)

    queue = bridge.get_or_create("stalling", bq.QueueConfig(consumer=stall))
    queue.produce("x")
    assert entered.wait(PATIENCE)
    until(lambda: any(event["event"] == "loop_stalled" for event in logs))
    with pytest.raises(TimeoutError, match=r"its loop has not answered for .*queue=stalling handler=consumer: "):
        queue.stats(timeout=0.01)
    release.set()
    warning = next(event for event in logs if event["event"] == "loop_stalled")
    assert warning["queue"] == "stalling"
    assert warning["handler"].startswith("consumer: test_a_stalled_loop")
    assert warning["handler"].endswith(".stall")
    assert "in wait" in warning["where"]
    assert warning["lag"] >= 1.0
    assert warning["log_level"] == "warning"
    until(lambda: any(event["event"] == "loop_recovered" for event in logs))
    assert queue.stats(timeout=PATIENCE).loop_lag >= 1.0


def test_an_idle_loop_shows_no_lag_to_speak_of(bridge):
    queue = bridge.get_or_create("idle", bq.QueueConfig(consumer=ignore))
    assert queue.stats(timeout=PATIENCE).loop_lag < PATIENCE


def test_an_interrupt_while_waiting_leaves_no_trace(bridge):
    handler = Held()
    queue = bridge.get_or_create("words", bq.QueueConfig(consumer=handler, buffer_size=1))
    fill(queue, handler)
    queue.produce("second")
    main = threading.main_thread()

    def interrupt():
        import signal

        until(lambda: in_line(queue) == 1)
        signal.pthread_kill(main.ident, signal.SIGINT)

    interrupter = Caller(interrupt)
    with untraced(), pytest.raises(KeyboardInterrupt):
        queue.produce("interrupted")
    interrupter.outcome()
    assert in_line(queue) == 0
    handler.open()
    assert queue.produce("third", timeout=PATIENCE)
    queue.flush(timeout=PATIENCE)
    assert handler.items == ["first", "second", "third"]
    assert_adds_up(queue.stats())


def test_an_interrupt_while_flushing_can_be_followed_by_anything(bridge):
    handler = Held()
    queue = bridge.get_or_create("words", bq.QueueConfig(consumer=handler))
    fill(queue, handler)
    main = threading.main_thread()

    def interrupt():
        import signal

        until(lambda: queue._queue._drains[0].hurry)  # the flush has begun
        signal.pthread_kill(main.ident, signal.SIGINT)

    with untraced():
        Caller(interrupt)
        with pytest.raises(KeyboardInterrupt):
            queue.flush()
    handler.open()
    queue.flush(timeout=PATIENCE)


def test_a_signal_handler_may_produce_while_its_thread_is_producing(bridge):
    """It never waits: where it interrupts a call that holds the inbox's lock, nobody could make room."""
    import signal

    handler = Held(held=False)
    config = bq.QueueConfig(consumer=handler, buffer_size=50, partitions=bq.PartitionPolicy.fixed(2))
    queue = bridge.get_or_create("signals", config)
    accepted = []
    done = threading.Event()
    handled = threading.Semaphore(0)

    def produce(number, frame):
        accepted.append(queue.produce("signal"))
        handled.release()

    def send():
        while not done.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            handled.acquire(timeout=0.1)

    with untraced():
        before = signal.signal(signal.SIGUSR1, produce)
        sender = Caller(send)
        try:
            made = sum(queue.produce("plain") for _ in range(20_000))
        finally:
            done.set()
            sender.outcome()
            signal.signal(signal.SIGUSR1, before)
    queue.flush(timeout=PATIENCE)
    assert made == 20_000
    assert sum(accepted) > 0
    assert len(handler.items) == 20_000 + sum(accepted)
    assert_adds_up(queue.stats())


def test_reprs_name_the_queue(bridge):
    queue = bridge.get_or_create("named", bq.QueueConfig(consumer=ignore))
    assert "'named'" in repr(queue)
    assert queue.name == "named"
    assert not queue.closed
