"""List C of the fault register, as far as threads, loops, forks and the end of the program are concerned."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import thread_storm
from bridge_tools import PATIENCE, Caller, Held, run_file, run_script, until

import batchqueue_async as bq
from batchqueue_async.bridge.watchdog import watchdog
from batchqueue_async.policies import stable_type_hash
from batchqueue_async.queue.partition import Partition

PREAMBLE = """
import asyncio, os, signal, sys, threading, time
import batchqueue_async as bq
handled = []

async def handle(batch):
    handled.extend(batch)

def forked(call):
    try:
        call()
    except bq.ForkedError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("no ForkedError")

def in_child(function):
    pid = os.fork()
    if not pid:
        signal.alarm(50)
        try:
            function()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def program(code):
    done = run_script(PREAMBLE + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


async def ignore(batch):
    pass


def shared(name="POOL", **options):
    return bq.QueueConfig(scheduler=bq.SharedScheduler(name, bq.WorkerPolicy.fixed(2)), **options)


class Blocking:
    """A handler that blocks its event loop's thread until it is let go."""

    def __init__(self):
        self.entered = threading.Event()
        self.release = threading.Event()

    async def consume(self, batch):
        self.entered.set()
        assert self.release.wait(PATIENCE)


# -- C-3: a forked child

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@needs_fork
def test_c_3_every_call_of_a_plain_queue_says_so_in_a_child_that_is_forked_on_the_loops_thread():
    program(
        """
        CALLS = ["produce_nowait", "produce_many_nowait"]
        WAITING = ["produce", "produce_many", "deliver", "flush", "shutdown"]

        def child(queue):
            for name in CALLS:
                forked(lambda: getattr(queue, name)([1]))
            forked(queue.stats)
            forked(queue.bridge)
            forked(lambda: queue.add_handler(int, handle))

            async def waiting():
                for name in WAITING:
                    try:
                        await getattr(queue, name)(*([] if name in ("flush", "shutdown") else [[1]]))
                    except bq.ForkedError as error:
                        assert "fork" in str(error), error
                    else:
                        raise AssertionError(name)

            asyncio.run(waiting())

        async def main():
            async with bq.BatchQueueManager() as manager:
                queues = [manager.create("one", bq.QueueConfig(consumer=handle))]
                queues.append(manager.create("types", bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(3))))
                by_key = bq.by_key(str)
                queues.append(manager.create("keys", bq.QueueConfig(
                    consumer=handle, selector=by_key, partitions=bq.PartitionPolicy.fixed(3))))
                queues[1].add_handler(int, handle)
                for queue in queues:
                    assert await queue.produce(0)  # there are fast slots now
                    in_child(lambda: child(queue))
                    assert await queue.produce(1)
                    await queue.flush(30)
            assert handled == [0, 1] * 3, handled

        asyncio.run(main())
        """
    )


@needs_fork
def test_c_3_a_child_gets_fresh_queues_under_the_same_names():
    program(
        """
        manager = bq.BatchQueueManager()
        pool = bq.SharedScheduler("POOL", bq.WorkerPolicy.fixed(1))
        config = bq.QueueConfig(consumer=handle)

        def child(parents):
            handled.clear()
            assert manager.get("plain") is parents
            assert manager.names() == []
            assert asyncio.run(manager.shutdown_all()) == {}

            async def work():
                mine = manager.get_or_create("plain", config)
                assert mine is not parents
                assert await mine.produce("child")
                pooled = manager.create("pooled", bq.QueueConfig(consumer=handle, scheduler=pool)).bridge()
                await pooled.deliver_async(["pooled"], timeout=30)
                return await manager.shutdown_all(30)

            reports = asyncio.run(work())
            assert {name: report.handled for name, report in reports.items()} == {"plain": 1, "pooled": 1}
            assert sorted(handled) == ["child", "pooled"], handled

        async def main():
            queue = manager.get_or_create("plain", config)
            bridge = manager.create("pooled", bq.QueueConfig(consumer=handle, scheduler=pool)).bridge()
            assert await queue.produce("parent")
            await bridge.produce_async("parent")
            in_child(lambda: child(queue))
            assert await queue.produce("parent")
            reports = await manager.shutdown_all(30)
            assert {name: report.handled for name, report in reports.items()} == {"plain": 2, "pooled": 1}

        asyncio.run(main())
        """
    )


@needs_fork
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_c_3_a_process_of_multiprocessing_uses_queues_of_its_own(method, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        PREAMBLE
        + textwrap.dedent(
            f"""
            import multiprocessing
            queue = None

            def child(results):
                if queue is not None:
                    forked(lambda: queue.produce_nowait(1))

                async def work():
                    async with bq.BatchQueueManager() as manager:
                        mine = manager.create("metrics", bq.QueueConfig(consumer=handle))
                        assert await mine.produce_many(range(100)) == 100

                asyncio.run(work())
                with bq.SyncBridge() as bridge:
                    bridge.get_or_create("more", bq.QueueConfig(consumer=handle)).deliver(range(10), timeout=30)
                results.put(len(handled))

            async def main():
                global queue
                context = multiprocessing.get_context({method!r})
                results = context.Queue()
                async with bq.BatchQueueManager() as manager:
                    queue = manager.create("metrics", bq.QueueConfig(consumer=handle))
                    process = context.Process(target=child, args=(results,))
                    process.start()
                    print(await asyncio.to_thread(results.get, True, 60))
                    await asyncio.to_thread(process.join, 60)
                    assert process.exitcode == 0
                    assert await queue.produce("parent")

            if __name__ == "__main__":
                asyncio.run(main())
                assert handled == ["parent"], handled
            """
        )
    )
    done = run_file(path)
    assert (done.returncode, done.stdout) == (0, "110\n"), done.stderr


@needs_fork
def test_c_3_a_fork_in_another_thread_while_the_loop_is_busy():
    program(
        """
        async def main():
            async with bq.BatchQueueManager() as manager:
                queue = manager.create("q", bq.QueueConfig(consumer=handle, buffer_size=100))
                stop = asyncio.Event()

                async def work():
                    while not stop.is_set():
                        await queue.produce(1)

                workers = [asyncio.create_task(work()) for _ in range(4)]

                def child():
                    forked(lambda: queue.produce_nowait(1))
                    forked(queue.bridge)

                for _ in range(10):
                    await asyncio.to_thread(in_child, child)
                stop.set()
                await asyncio.gather(*workers)

        asyncio.run(main())
        """
    )


# -- C-6: circles of waits over loops and threads


class Pair:
    """Two queues on loops of their own, each of whose handlers passes on to the other."""

    def __init__(self, bridge, make_first, make_second, **options):
        self.told = []
        config = {"buffer_size": 2, "max_batch": 1, **options}
        first = make_first(lambda: self.second, self.told)
        second = make_second(lambda: self.first, self.told)
        self.first = bridge.get_or_create("first", shared("A", consumer=first, **config))
        self.second = bridge.get_or_create("second", shared("B", consumer=second, **config))

    def feed_until_told(self):
        producers = [Caller(self._feed, queue) for queue in (self.first, self.second)]
        until(lambda: self.told)
        for queue in (self.first, self.second):
            queue.shutdown(timeout=0.0)
        for producer in producers:
            producer.outcome()

    def _feed(self, queue):
        while not self.told and queue.produce("more"):
            pass


def _guard(told, error):
    told.append(str(error))


def by_coroutine(call):
    def make(other, told):
        async def handle(batch):
            try:
                await call(other())
            except bq.DeadlockError as error:
                _guard(told, error)

        return handle

    return make


def by_thread(call):
    def make(other, told):
        def handle(batch):
            try:
                call(other())
            except bq.DeadlockError as error:
                _guard(told, error)

        return bq.in_thread(handle)

    return make


def by_blocking_coroutine(call):
    """A handler that makes a blocking call in a coroutine, as it should not: its loop stands still meanwhile."""

    def make(other, told):
        async def handle(batch):
            try:
                call(other())
            except bq.DeadlockError as error:
                _guard(told, error)

        return handle

    return make


async def _produce_three(queue):
    for number in range(3):
        await queue.produce_async(number)


def _produce_three_from_thread(queue):
    for number in range(3):
        queue.produce(number)


WAYS = {
    "produce": by_coroutine(_produce_three),
    "produce_many": by_coroutine(lambda queue: queue.produce_many_async(range(5))),
    "deliver": by_coroutine(lambda queue: queue.deliver_async(["x"])),
    "flush": by_coroutine(lambda queue: queue.flush_async()),
    "produce in a thread": by_thread(_produce_three_from_thread),
    "produce_many in a thread": by_thread(lambda queue: queue.produce_many(range(5))),
    "deliver in a thread": by_thread(lambda queue: queue.deliver(["x"])),
    "flush in a thread": by_thread(lambda queue: queue.flush()),
    "produce, blocking": by_blocking_coroutine(_produce_three_from_thread),
    "flush, blocking": by_blocking_coroutine(lambda queue: queue.flush()),
}


@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_c_6_a_circle_over_two_loops_ends_with_an_error(first, second):
    with bq.SyncBridge() as bridge:
        pair = Pair(bridge, WAYS[first], WAYS[second])
        pair.feed_until_told()
        assert all("queue '" in text for text in pair.told)


def test_c_6_handlers_on_two_loops_that_wait_for_each_other_but_not_in_a_circle_go_on():
    """The second queue's handler needs nothing of the first's: however long the wait is, it is none of a circle."""
    handler = Held()
    told = []
    with bq.SyncBridge() as bridge:
        rows = bridge.get_or_create("rows", shared("A", consumer=handler, buffer_size=1, max_batch=1))

        async def parse(batch):
            try:
                for item in batch:
                    await rows.produce_async(item)
                await rows.flush_async()
            except bq.DeadlockError as error:
                told.append(error)

        lines = bridge.get_or_create("lines", shared("B", consumer=parse, buffer_size=5, max_batch=5))
        assert lines.produce_many(range(5)) == 5
        handler.wait_for_call()
        handler.open()
        lines.flush(timeout=PATIENCE)
        assert not told
        assert handler.items == list(range(5))


def test_c_6_a_producer_outside_of_handlers_is_never_told_of_a_circle():
    handler = Held()
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1))
        assert queue.produce("first")
        handler.wait_for_call()
        assert queue.produce("second")
        waiting = [Caller(queue.produce, "third"), Caller(queue.flush)]
        until(lambda: queue._inbox.waiting() == 1)
        handler.open()
        assert waiting[0].outcome()
        waiting[1].outcome()


# -- C-9: a queue that is made on its own scheduler's loop; bridge() never blocks a loop


def test_c_9_a_queue_made_on_its_own_schedulers_loop_works_at_once():
    out = []
    handler = Held(held=False)
    manager = bq.BatchQueueManager()

    async def make(batch):
        queue = manager.create("second", shared(consumer=handler))
        out.append(await queue.produce("direct"))
        out.append(queue.bridge().produce("by its bridge"))
        out.append(queue.stats().accepted)

    first = manager.create("first", shared(consumer=make)).bridge()
    first.deliver([1], timeout=PATIENCE)
    assert out == [True, True, 2]
    asyncio.run(manager.shutdown_all())
    assert handler.items == ["direct", "by its bridge"]


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_c_9_bridge_does_not_wait_for_a_blocked_loop_where_a_loop_runs(timeout):
    """The loop is blocked until the bridge is there: if `bridge()` waited, the test would notice by its order."""
    blocking, seen = Blocking(), []
    manager = bq.BatchQueueManager()

    async def main():
        busy = manager.create("busy", shared(consumer=blocking))
        await busy.bridge().produce_async("x")
        await asyncio.to_thread(blocking.entered.wait, PATIENCE)
        other = manager.create("other", shared(consumer=ignore))
        asyncio.get_running_loop().call_later(0.2, seen.append, "the loop goes on")
        bridge = other.bridge()
        seen.append("bridge")
        producing = asyncio.create_task(bridge.produce_async("y", timeout=timeout))
        await asyncio.to_thread(until, lambda: len(seen) == 2)
        assert not producing.done()
        blocking.release.set()
        assert await producing
        await manager.shutdown_all()

    asyncio.run(main())
    assert seen == ["bridge", "the loop goes on"]


def test_c_9_a_producer_that_meets_a_blocked_loop_keeps_its_timeout_without_a_thread():
    """The wait for a loop that was never met needs no thread of the caller's loop, of which there may be none left."""
    blocking, release = Blocking(), threading.Event()
    manager = bq.BatchQueueManager()

    async def main():
        loop = asyncio.get_running_loop()
        busy = manager.create("busy", shared(consumer=blocking))
        await busy.bridge().produce_async("x")
        await asyncio.to_thread(blocking.entered.wait, PATIENCE)
        bridge = manager.create("other", shared(consumer=ignore)).bridge()
        calls = [loop.run_in_executor(None, release.wait, PATIENCE) for _ in range(64)]  # all the threads there are
        assert not await bridge.produce_async("y", timeout=0.01)
        with pytest.raises(bq.PartlyAcceptedError):
            await bridge.produce_many_async("yz", timeout=0.01)
        release.set()
        await asyncio.gather(*calls)
        blocking.release.set()
        await manager.shutdown_all()

    asyncio.run(main())


# -- C-11: a deadline is the whole call's


@pytest.mark.parametrize("way", ["coroutine", "thread", "bridge"])
def test_c_11_many_stuck_schedulers_cost_their_deadline_once(way, logs):
    """Each of them took ten seconds of its own: more than `PATIENCE` together."""
    blocking = [Blocking() for _ in range(5)]
    bridge = bq.SyncBridge()
    manager = bridge.manager
    queues = [manager.create(f"q{n}", shared(f"S{n}", consumer=each)).bridge() for n, each in enumerate(blocking)]
    schedulers = [manager.scheduler(f"S{n}") for n in range(5)]
    for queue, each in zip(queues, blocking, strict=True):
        assert queue.produce("x")
        assert each.entered.wait(PATIENCE)
    calls = {
        "coroutine": lambda: asyncio.run(manager.shutdown_all(timeout=0.05)),
        "thread": lambda: manager.shutdown_all_from_thread(timeout=0.05),
        "bridge": lambda: bridge.close(timeout=0.05),
    }
    reports = Caller(calls[way]).outcome()
    assert {name: report.undelivered for name, report in reports.items()} == {f"q{n}": ["x"] for n in range(5)}
    stuck = [event for event in logs if event["event"] == "scheduler_stuck"]
    assert len(stuck) == 5
    for each in blocking:
        each.release.set()
    assert all(scheduler.stop(timeout=PATIENCE) for scheduler in schedulers)


def test_c_11_a_healthy_queue_is_drained_next_to_a_stuck_one():
    blocking, handler = Blocking(), Held(held=False)
    with bq.SyncBridge() as bridge:
        stuck = bridge.get_or_create("stuck", shared("A", consumer=blocking))
        healthy = bridge.get_or_create("healthy", shared("B", consumer=handler, linger=PATIENCE))
        stuck.produce("x")
        assert blocking.entered.wait(PATIENCE)
        healthy.produce_many(range(100))
        reports = bridge.close(timeout=0.5)
        assert reports["stuck"].undelivered == ["x"]
        assert reports["healthy"].handled == 100
        blocking.release.set()


def test_c_11_the_bridges_own_loop_that_is_blocked_does_not_keep_the_others_from_draining():
    blocking, handler = Blocking(), Held(held=False)
    bridge = bq.SyncBridge()
    own = bridge.get_or_create("own", bq.QueueConfig(consumer=blocking))
    other = bridge.get_or_create("other", shared(consumer=handler, linger=PATIENCE))
    own.produce("x")
    assert blocking.entered.wait(PATIENCE)
    other.produce_many(range(100))
    reports = bridge.close(timeout=0.3)
    blocking.release.set()
    assert reports["own"].undelivered == ["x"]
    assert reports["other"].handled == 100
    assert handler.items == list(range(100))


def test_c_11_shutdown_of_a_queue_whose_loop_is_blocked_reports_what_is_left():
    blocking = Blocking()
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("q", bq.QueueConfig(consumer=blocking))
        queue.produce("x")
        assert blocking.entered.wait(PATIENCE)
        assert queue.shutdown(timeout=0.01).undelivered == ["x"]
        blocking.release.set()


# -- C-12: a second event loop in one process


def test_c_12_asyncio_run_twice_with_one_manager(logs):
    manager = bq.BatchQueueManager()
    handled = []

    async def handle(batch):
        handled.extend(batch)

    async def main(number, *, flush):
        queue = manager.get_or_create("q", bq.QueueConfig(consumer=handle, linger=0 if flush else PATIENCE))
        assert await queue.produce(number)
        if flush:
            await queue.flush(timeout=PATIENCE)
        return queue

    first = asyncio.run(main(1, flush=True))
    second = asyncio.run(main(2, flush=False))  # nobody drains it: its item is named in its report
    third = asyncio.run(main(3, flush=True))
    assert handled == [1, 3]
    assert second is not first
    assert third is not second
    assert second.stats().undelivered == 1
    replaced = [event["undelivered"] for event in logs if event["event"] == "queue_replaced"]
    assert replaced == [0, 1]
    assert asyncio.run(manager.shutdown_all())["q"].handled == 1


def test_c_12_create_uses_the_name_of_a_queue_whose_loop_is_closed():
    manager = bq.BatchQueueManager()

    async def main():
        assert await manager.create("q", bq.QueueConfig(consumer=ignore)).produce(1)

    asyncio.run(main())
    asyncio.run(main())
    asyncio.run(manager.shutdown_all())


def test_c_12_a_scheduler_that_somebody_stopped_is_replaced(logs):
    manager = bq.BatchQueueManager()
    queue = manager.get_or_create("q", shared(consumer=ignore)).bridge()
    assert queue.produce(1)
    queue.flush(timeout=PATIENCE)
    assert manager.scheduler("POOL").stop(timeout=PATIENCE)
    handler = Held(held=False)
    again = manager.get_or_create("q", shared(consumer=handler)).bridge()
    again.deliver([2], timeout=PATIENCE)
    assert handler.items == [2]
    assert any(event["event"] == "scheduler_replaced" for event in logs)
    asyncio.run(manager.shutdown_all())


def test_c_12_a_bridge_whose_loop_has_ended_makes_another(logs):
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("q", bq.QueueConfig(consumer=ignore))
        queue.deliver([1], timeout=PATIENCE)

        async def stop():
            raise SystemExit

        with pytest.raises((bq.QueueClosedError, SystemExit)):
            bridge.call(stop, timeout=PATIENCE)
        until(queue._loop.is_closed)
        handler = Held(held=False)
        bridge.get_or_create("q", bq.QueueConfig(consumer=handler)).deliver([2], timeout=PATIENCE)
        assert handler.items == [2]
    assert any(event["event"] == "scheduler_ended" and event["error"] == "SystemExit" for event in logs)


# -- C-13: the exit of the program

TAIL = """
import asyncio, sys, threading, time
import batchqueue_async as bq

async def to_thread(batch):
    await asyncio.to_thread(time.sleep, 0.001)

async def dns(batch):
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)

# Nothing is handled before the end of the main thread, and nothing so soon after it that it could be taken for that.
def in_thread(batch):
    threading.main_thread().join()
    time.sleep(0.2)

class Counted:
    def __init__(self, handle):
        self.handle = handle

    async def consume(self, batch):
        while threading.main_thread().is_alive():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)
        await self.handle(batch)
        print("handled", len(batch), flush=True)

def make(handle):
    consumer = bq.in_thread(handle) if handle is in_thread else Counted(handle)
    queue = bq.SyncBridge().get_or_create("tail", bq.QueueConfig(consumer=consumer, max_batch=2))
    assert queue.produce_many(range(4)) == 4
    return queue
"""


def exit_with(code):
    done = run_script(TAIL + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    assert "handler_failed" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("handler", ["to_thread", "dns", "in_thread"])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_c_13_the_last_batches_may_use_threads(handler, loop):
    if handler == "in_thread" and (3, 12) <= sys.version_info < (3, 12, 2):
        pytest.skip("these versions start no thread from the end of the main thread on (cpython #113964)")
    hide = "sys.modules['uvloop'] = None" if loop == "asyncio" else ""
    done = exit_with(f"{hide}\nmake({handler})")
    assert "queue_drained_at_exit queue='tail' handled=4 undelivered=0" in done.stderr


def test_c_13_the_queue_can_still_be_used_in_the_programs_own_exit_functions():
    done = exit_with(
        """
        import atexit
        queue = make(to_thread)

        def late():
            assert queue.produce_many(range(2)) == 2
            queue.deliver(["x"], timeout=30)

        atexit.register(late)
        """
    )
    assert "handled=7 undelivered=0" in done.stderr


def test_c_13_a_thread_that_outlives_the_main_thread_goes_on_producing():
    done = exit_with(
        """
        queue = make(to_thread)
        main = threading.main_thread()

        def work():
            main.join()
            for number in range(20):
                assert queue.produce(number)
                time.sleep(0.001)

        threading.Thread(target=work).start()
        """
    )
    assert "handled=24 undelivered=0" in done.stderr


def test_c_13_a_stuck_handler_holds_the_exit_up_for_its_drain_timeout_once():
    done = exit_with(
        """
        async def stuck(batch):
            await asyncio.Event().wait()

        bridge = bq.SyncBridge()
        for name in "abc":
            bridge.get_or_create(name, bq.QueueConfig(consumer=stuck, drain_timeout=0.1)).produce(name)
        """
    )
    assert done.stderr.count("handled=0 undelivered=1") == 3


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_c_13_a_process_of_multiprocessing_handles_its_tail(method, tmp_path):
    """It ends without `atexit`; its queues are drained all the same."""
    program = tmp_path / "program.py"
    program.write_text(
        TAIL
        + textwrap.dedent(
            f"""
            import multiprocessing

            def child():
                make(to_thread)

            if __name__ == "__main__":
                process = multiprocessing.get_context({method!r}).Process(target=child)
                process.start()
                process.join(60)
                sys.exit(process.exitcode)
            """
        )
    )
    done = run_file(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("handled 2") == 2
    assert "queue_drained_at_exit queue='tail' handled=4 undelivered=0" in done.stderr
    assert "Traceback" not in done.stderr


def test_c_13_a_program_that_has_closed_everything_has_no_thread_for_its_exit():
    exit_with(
        """
        from batchqueue_async.runtime.at_exit import exit_drain
        with bq.SyncBridge() as bridge:
            bridge.get_or_create("q", bq.QueueConfig(consumer=to_thread)).produce(1)
            assert exit_drain.waiting
        while exit_drain.waiting:
            time.sleep(0.01)
        """
    )


# -- C-16: what is shut down is forgotten


@pytest.mark.parametrize("way", ["queue", "bridge", "twin", "manager"])
def test_c_16_a_queue_that_is_shut_down_leaves_the_manager(way):
    async def main():
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("q", bq.QueueConfig(consumer=ignore))
            gone, loop = weakref.ref(queue), queue.loop
            bridge = queue.bridge()
            if way == "queue":
                report = await queue.shutdown()
                assert await queue.shutdown() is report
            elif way == "bridge":
                report = await asyncio.to_thread(bridge.shutdown)
            elif way == "twin":
                report = await bridge.shutdown_async()
            else:
                report = await manager.shutdown("q")
            assert report.name == "q"
            assert manager.get("q") is None
            assert manager.names() == []
            assert await manager.shutdown_all() == {}
            until(lambda: not watchdog.watches(loop))
            del queue, bridge
            await asyncio.sleep(0)
            gc.collect()
            assert gone() is None

    asyncio.run(main())


def test_c_16_many_queues_with_bridges_come_and_go():
    """What is left of each is counted: nothing that grows with their number."""

    async def cycle(manager, count):
        for number in range(count):
            queue = manager.create(f"q{number}", bq.QueueConfig(consumer=ignore))
            assert queue.bridge().produce(number)
            await queue.shutdown()

    def ours():
        gc.collect()
        names = {"BatchQueue", "ThreadInbox", "PartitionCredits", "SyncQueue", "DrainTask", "Partition"}
        return sum(type(each).__name__ in names for each in gc.get_objects())

    async def main():
        async with bq.BatchQueueManager() as manager:
            await cycle(manager, 5)
            until(lambda: not watchdog.watches(asyncio.get_running_loop()))
            before = ours()
            await cycle(manager, 100)
            until(lambda: not watchdog.watches(asyncio.get_running_loop()))
            assert ours() <= before

    asyncio.run(main())


# -- C-17: what grows with the square


@pytest.mark.parametrize("call", ["produce", "produce_many", "produce_async", "produce_many_async"])
def test_c_17_a_selector_is_asked_once_for_each_item_however_long_it_waits(call):
    asked = []

    def key(item):
        asked.append(item)
        return item

    config = bq.QueueConfig(
        consumer=ignore, partitions=bq.PartitionPolicy.fixed(4), buffer_size=10, max_batch=5, selector=bq.by_key(key)
    )
    items = list(range(600))
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("keys", config)
        if call == "produce":
            assert all(queue.produce(item) for item in items)
        elif call == "produce_many":
            assert queue.produce_many(items) == len(items)
        else:

            async def main():
                if call == "produce_async":
                    return all([await queue.produce_async(item) for item in items])
                return await queue.produce_many_async(items) == len(items)

            assert asyncio.run(main())
    assert sorted(asked) == items


def test_c_17_many_items_of_one_type_wait_in_line_together():
    """One wake-up of the thread for the room that a batch made, not one for each item."""
    handler = Held(held=False)
    with bq.SyncBridge() as bridge:
        config = bq.QueueConfig(fallback=handler, partitions=bq.PartitionPolicy.fixed(4), buffer_size=50, max_batch=50)
        queue = bridge.get_or_create("types", config)
        assert queue.produce_many(list(range(5_000))) == 5_000
    assert handler.items == list(range(5_000))
    assert len(handler.batches) < 1_000


# -- C-18: exceptions thrown into threads; each point of a call by itself is in test_c_interrupts.py


@pytest.mark.parametrize("overflow", ["block", "reject"])
@pytest.mark.parametrize("shape", ["one partition", "several", "growing"])
def test_c_18_an_exception_thrown_into_a_thread_costs_no_place(overflow, shape):
    """In a process of its own: a tracer, such as that of the coverage, would be torn apart as well, and stand still."""
    done = run_file(Path(thread_storm.__file__), overflow, shape, timeout=3 * PATIENCE)
    assert (done.returncode, done.stdout) == (0, "every place is there\n"), done.stderr


def test_c_18_a_waiter_that_never_left_the_line_holds_nobody_up():
    """Torn out of its wait, and out of what it does then, a thread leaves its place in line behind: it is skipped."""
    handler = Held()
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1))
        assert queue.produce("first")
        handler.wait_for_call()
        assert queue.produce("second")
        leave = queue._inbox.leave
        queue._inbox.leave = lambda waiter: None  # the thread is torn out of the `finally` too
        try:
            assert not queue.produce("torn", timeout=0.001)
        finally:
            queue._inbox.leave = leave
        waiting = Caller(queue.produce, "third")
        handler.open()
        assert waiting.outcome()
        queue.flush(timeout=PATIENCE)
    assert handler.items == ["first", "second", "third"]


# -- C-19: what the loop asks of the user's code, it asks without a lock -------------------------------------------


def _amid_a_move(bridge: bq.SyncBridge, selector: Any, handled: list[int]) -> tuple[Any, threading.Event]:
    """A queue that grows while its handler is busy: where a thread's item goes, the loop asks the selector again."""
    gate = threading.Event()

    async def handle(batch: list[int]) -> None:
        handled.extend(batch)
        while not gate.is_set():  # a thread opens it
            await asyncio.sleep(0.005)

    grows = bq.PartitionPolicy.adaptive()
    config = bq.QueueConfig(partitions=grows, workers=bq.WorkerPolicy.fixed(2), selector=selector)
    queue = bridge.get_or_create("q", config)
    queue.add_handler(int, handle)
    assert queue.produce_many(range(10)) == 10
    queue.add_handler(str, handle, weight=50.0)
    return queue, gate


def _on_the_loop() -> bool:
    return threading.current_thread().name.startswith("batchqueue-bridge")


@pytest.mark.real_time
def test_c_19_a_selector_may_wait_for_a_thread_that_produces():
    asked, answered, handled = threading.Event(), threading.Event(), []
    in_time: list[bool] = []

    def select(item: int, count: int) -> int:
        if _on_the_loop() and item >= 100 and not asked.is_set():
            asked.set()
            in_time.append(answered.wait(PATIENCE))
        return item % count

    def produce_when_asked() -> None:
        assert asked.wait(PATIENCE)
        queue.produce(1000)
        answered.set()

    with bq.SyncBridge() as bridge:
        queue, gate = _amid_a_move(bridge, select, handled)
        other = threading.Thread(target=produce_when_asked)
        other.start()
        assert queue.produce_many([100, 101]) == 2
        other.join()
        gate.set()
        queue.flush(10)
    assert in_time == [True]
    assert sorted(handled) == [*range(10), 100, 101, 1000]


@pytest.mark.real_time
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_c_19_a_selector_that_ends_the_loop_loses_no_item(error):
    asked, handled = threading.Event(), []

    def select(item: int, count: int) -> int:
        if _on_the_loop() and item >= 100 and not asked.is_set():
            asked.set()
            raise error
        return item % count

    bridge = bq.SyncBridge()
    queue, gate = _amid_a_move(bridge, select, handled)
    assert queue.produce_many(range(100, 120)) == 20
    assert asked.wait(PATIENCE)
    gate.set()
    report = bridge.close(timeout=PATIENCE)["q"]
    assert report.accepted == 30
    assert report.handled + report.failed + len(report.undelivered) == 30


async def test_c_25_types_that_move_while_a_threads_items_evict_arrive_once():
    """As the first type arrives, items of threads evict others from where both come from: so the second one arrives."""
    kinds = [type(f"Moved{number}", (), {}) for number in range(40)]
    gate, seen, late = asyncio.Event(), [], []

    async def handle(batch):
        await gate.wait()
        seen.extend(batch)
        if not late:  # the next that the drain task does is to let go of those who move
            late.extend(stays() for _ in range(4))
            thread = threading.Thread(target=bridge.produce_many, args=(late,))
            thread.start()
            thread.join(PATIENCE)

    config = bq.QueueConfig(
        fallback=handle,
        partitions=bq.PartitionPolicy.adaptive(1),
        workers=bq.WorkerPolicy.fixed(1),
        buffer_size=4,
        strategy=bq.BufferStrategy.DROP_OLDEST,
    )
    queue: Any = bq.BatchQueue("moves", config)
    bridge = queue.bridge()
    items: list[Any] = [kinds[number]() for number in range(4)]
    assert queue.produce_many_nowait(items) == 4
    await asyncio.sleep(0)
    while queue.stats().in_flight < 4:
        await asyncio.sleep(0)
    for kind in kinds[:20]:
        queue.add_handler(kind, handle)
    source = queue._router.partitions[0]
    for kind in kinds:
        more = [kind(), kind()] if stable_type_hash(kind) % queue.partition_count else []
        items += more
        queue.produce_many_nowait(more)
    assert len(source.leaving) > 1
    (stays, *_) = [kind for kind in kinds if not stable_type_hash(kind) % queue.partition_count]
    items += [stays() for _ in range(4)]
    assert queue.produce_many_nowait(items[-4:]) == 4
    assert source.full()
    gate.set()
    while len(late) < 4:
        await asyncio.sleep(0)
    report = await queue.shutdown(timeout=PATIENCE)
    assert queue.stats().failed == 0
    everything = [*seen, *report.undelivered]
    assert len(everything) == len(set(map(id, everything)))
    assert len(everything) == len(items) + len(late) - queue.stats().dropped_after


def test_c_29_a_place_that_is_free_as_an_item_goes_elsewhere_is_for_those_who_wait():
    """The queue grows after one of two threads in line has put its item in: that one goes to a new partition."""
    policy = bq.PartitionPolicy.adaptive(1)
    kinds = [type(f"Grown{number}", (), {}) for number in range(40)]
    partitions = policy.resolve(1, 20)
    stays, goes = (
        next(kind for kind in kinds if bool(stable_type_hash(kind) % partitions) is away) for away in (False, True)
    )
    gate, calls = threading.Event(), []

    async def handle(batch):
        calls.append(batch)
        if len(calls) == 1:
            while not gate.is_set():
                await asyncio.sleep(0)
        elif len(calls) == 2:
            until(lambda: queue._inbox.uncollected() == 1)
            queue._inbox.collect = lambda: None  # as if the item came in right after the growing queue has collected
            queue._queue.add_handler(int, handle, weight=20)
            del queue._inbox.collect

    config = bq.QueueConfig(
        fallback=handle, partitions=policy, workers=bq.WorkerPolicy.fixed(1), buffer_size=1, max_batch=1
    )
    with bq.SyncBridge() as bridge:
        queue: Any = bridge.get_or_create("grows", config)
        assert queue.produce(stays(), timeout=PATIENCE)
        until(lambda: calls)
        assert queue.produce(stays(), timeout=PATIENCE)
        first = Caller(queue.produce, goes())
        until(lambda: queue._inbox.waiting() == 1)
        second = Caller(queue.produce, stays())
        until(lambda: queue._inbox.waiting() == 2)
        queue.stats(timeout=PATIENCE)  # the loop has seen both
        gate.set()
        assert first.outcome()
        assert second.outcome()
        queue.flush(timeout=PATIENCE)
        assert queue.stats(timeout=PATIENCE).handled == 4


def test_c_30_a_type_whose_new_partition_a_thread_does_not_know_yet_comes_in():
    """A growing queue finds new routes before the inbox meets the partitions that they lead to."""
    policy = bq.PartitionPolicy.adaptive(1)
    kinds = [type(f"Grown{number}", (), {}) for number in range(40)]
    seen: list[Any] = []

    async def handle(batch):
        seen.extend(batch)

    async def grow():
        inbox = queue._inbox
        queue._queue._router.on_rerouted = lambda: None
        for kind in kinds[:20]:
            queue._queue.add_handler(kind, handle)
        routes = [queue._queue._router.route_of_type(kind) for kind in kinds]
        assert max(route.partition.index for route in routes) > 0
        items = [kind() for kind in kinds for _ in range(3)]
        Caller(inbox_calls, items).outcome()  # while the loop stands between two steps of growing
        queue._queue._router.on_rerouted = inbox.meet_partitions
        inbox.meet_partitions()
        return items

    def inbox_calls(items):
        assert all(queue.produce(item, timeout=0) for item in items[::3])
        rest = [item for index, item in enumerate(items) if index % 3]
        assert queue.produce_many(rest, timeout=0) == len(rest)

    config = bq.QueueConfig(fallback=handle, partitions=policy, workers=bq.WorkerPolicy.fixed(1))
    with bq.SyncBridge() as bridge:
        queue: Any = bridge.get_or_create("grows", config)
        items = bridge.call(grow, timeout=PATIENCE)
        queue.flush(timeout=PATIENCE)
    for kind in kinds:
        mine = [item for item in items if type(item) is kind]
        assert [item for item in seen if type(item) is kind] == mine
    assert len(seen) == len(items)


# -- C-33: what goes on to another partition takes its place there


async def test_c_33_items_of_threads_that_go_elsewhere_take_their_places_from_the_fast_path_there():
    """They came in before the queue grew; their type moves, and until it arrives they only hold their places."""
    old, new = Partition[str](0, 4), Partition[str](1, 4, lambda _: 0.0)
    assert new.offer("first")
    old.hold(3)
    for _ in range(3):
        old.pass_held(new)
    for _ in new.fast_slots:
        new.tail.append("more")
    assert new.qsize() + new.held == 4
    assert (old.held, old.room()) == (0, 4)


async def test_c_33_a_batch_that_waits_for_more_leaves_as_what_comes_from_elsewhere_fills_its_partition():
    told = []

    def on_ready(each):
        told.append((each.qsize(), each.held, each.full()))
        each.linger_step = 100
        return 0.0

    old, new = Partition[str](0, 4), Partition[str](1, 4, on_ready)
    assert new.offer("first")
    old.hold(3)
    for _ in range(3):
        old.pass_held(new)
    assert told[-1] == (1, 3, True)
