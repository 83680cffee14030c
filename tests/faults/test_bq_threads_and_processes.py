"""Faults of the peers where threads, forks, signals and the end of the process meet; most in a process of their own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from bridge_tools import PATIENCE, Caller, Held, fill, in_line, run_script, until

import batchqueue_async as bq

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
PREAMBLE = """
import asyncio, atexit, os, signal, sys, threading, time
import batchqueue_async as bq
handled = []
async def handle(batch):
    handled.extend(batch)
"""


def run(code: str, *, expect: int = 0, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    done = run_script(PREAMBLE + textwrap.dedent(code), timeout)
    assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done


# -- BQ-p: a call from another thread


def test_bq_p_a_thread_wakes_a_sleeping_consumer_through_the_bridge_and_only_so():
    handler = Held(held=False)

    async def main():
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("q", bq.QueueConfig(consumer=handler))
            await asyncio.sleep(0.1)  # the drain task is parked
            with pytest.raises(bq.WrongLoopError, match="bridge"):
                await asyncio.to_thread(queue.produce_nowait, "lost")
            assert await asyncio.to_thread(queue.bridge().produce, "found")
            await asyncio.to_thread(handler.wait_for_call)

    asyncio.run(main())
    assert handler.items == ["found"]


# -- BQ-q: a producer that waits when the queue closes


@pytest.mark.parametrize("close", ["queue", "bridge", "gate"])
def test_bq_q_closing_releases_blocked_threads(close):
    bridge = bq.SyncBridge()
    handler = Held()
    queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handler, buffer_size=1, max_batch=1))
    fill(queue, handler)
    queue.produce("second")
    waiting = [Caller(queue.produce, number) for number in range(8)]
    waiting += [Caller(queue.produce_many, [number]) for number in range(8)]
    until(lambda: in_line(queue) == 16)
    closing = {
        "queue": lambda: queue.shutdown(timeout=PATIENCE),
        "bridge": lambda: bridge.close(timeout=PATIENCE),
        "gate": lambda: queue._loop.call_soon_threadsafe(queue._queue.close_gate),
    }[close]
    ending = Caller(closing)
    assert not any(caller.outcome() for caller in waiting)  # while the handler still has its item
    handler.open()
    ending.outcome()
    bridge.close()
    assert handler.items == ["first", "second"]
    assert queue.stats().refused == 16


# -- BQ-r: fork


@needs_fork
def test_bq_r_a_forked_child_is_told_at_once_and_ends():
    run(
        """
        bridge = bq.SyncBridge()
        queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handle, buffer_size=100_000))
        late = bq.BatchQueueManager()
        pool = bq.SharedScheduler("POOL", bq.WorkerPolicy.fixed(1))
        unbridged = late.create("late", bq.QueueConfig(consumer=handle, scheduler=pool))
        queue.produce("parent")
        pid = os.fork()
        if not pid:
            async def twins():
                for call in (queue.produce_async("x"), queue.flush_async(), queue.stats_async()):
                    try:
                        await call
                    except bq.ForkedError:
                        continue
                    os._exit(3)
            calls = [lambda: queue.produce("x"), lambda: queue.produce_many(["x"]), lambda: queue.deliver(["x"]),
                queue.flush, queue.stats, queue.shutdown, lambda: queue.add_handler(int, handle),
                lambda: bridge.call(handle, []), lambda: bridge.get_or_create("q"), lambda: bridge.queue("q"),
                unbridged.bridge]
            for call in calls:
                try:
                    call()
                except bq.ForkedError as error:
                    assert "fork" in str(error)
                    continue
                os._exit(2)
            asyncio.run(twins())
            assert bridge.close() == {}
            sys.exit(0)
        begun = time.monotonic()
        assert os.waitpid(pid, 0)[1] == 0
        queue.flush(timeout=30)
        assert handled == ["parent"], handled
        bridge.close()
        asyncio.run(late.shutdown_all())
        """
    )


@needs_fork
def test_bq_r_a_child_may_make_a_bridge_of_its_own():
    done = run(
        """
        bridge = bq.SyncBridge()
        queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handle))
        queue.deliver(["parent"], timeout=30)
        parents = bq.default_manager()
        pid = os.fork()
        if not pid:
            handled.clear()
            assert bq.default_manager() is not parents
            with bq.SyncBridge() as mine:
                again = mine.get_or_create("q", bq.QueueConfig(consumer=handle))
                assert again.produce("child")
                again.flush(timeout=30)
                assert handled == ["child"], handled
            last = bq.SyncBridge().get_or_create("last", bq.QueueConfig(consumer=handle, linger=60.0))
            last.produce("at the child's exit")
            atexit.register(lambda: None)
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        queue.deliver(["still here"], timeout=30)
        assert handled == ["parent", "still here"], handled
        bridge.close()
        """
    )
    assert "queue='last' handled=1 undelivered=0" in done.stderr


@needs_fork
def test_bq_r_leaving_the_with_block_in_a_child_does_not_hide_its_exit():
    run(
        """
        with bq.SyncBridge() as bridge:
            queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handle))
            queue.produce("x")
            pid = os.fork()
            if not pid:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert handled == ["x"]
        """
    )


@needs_fork
def test_bq_r_a_fork_at_any_moment_of_busy_threads_leaves_the_child_no_lock_that_is_held():
    run(
        """
        sys.setswitchinterval(1e-5)
        bridge = bq.SyncBridge()
        config = bq.QueueConfig(consumer=handle, buffer_size=50, max_batch=50)
        queue = bridge.get_or_create("q", config)
        several = bridge.get_or_create("s", bq.QueueConfig(consumer=handle, partitions=bq.PartitionPolicy.fixed(3)))
        stop = threading.Event()

        def work():
            while not stop.is_set():
                queue.produce("x", timeout=0.01)
                several.produce_many(["y", "z"], timeout=0)
                bridge.get_or_create("q", config)
                queue._queue.bridge()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 4
        for number in range(60):
            pid = os.fork()
            if not pid:
                signal.alarm(20)
                for call in (lambda: queue.produce("c"), lambda: several.produce_many(["c"]), queue.stats,
                             lambda: bridge.get_or_create("q"), lambda: bridge.call(handle, [])):
                    try:
                        call()
                    except bq.ForkedError:
                        continue
                    os._exit(2)
                if number % 10 == 0:
                    with bq.SyncBridge() as mine:
                        mine.get_or_create("mine", bq.QueueConfig(consumer=handle)).deliver(["m"], timeout=20)
                os._exit(0) if number % 2 else sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0, number
            if time.monotonic() > deadline:
                break
        stop.set()
        for thread in threads:
            thread.join()
        bridge.close()
        """
    )


# -- BQ-s: the interpreter's shutdown


def test_bq_s_a_bridge_first_used_at_exit_says_that_it_is_too_late():
    done = run(
        """
        bridge = bq.SyncBridge()

        def late():
            try:
                bridge.call(handle, ["x"])
            except bq.QueueClosedError as error:
                print("refused:", error)
            else:
                print("worked:", handled)

        atexit.register(late)
        """
    )
    too_late = r"refused: .*its thread can't be started .*at the exit of a program it is too late"
    # Whether a thread may still start, and what it needs still be imported, differs from version to version.
    assert "worked: ['x']" in done.stdout or re.search(too_late, done.stdout)


def test_bq_s_a_bridge_that_runs_already_is_of_use_in_the_programs_own_exit_handlers():
    done = run(
        """
        bridge = bq.SyncBridge()
        queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handle))

        def late():
            assert queue.produce("at exit")
            queue.flush(timeout=30)
            other = bridge.get_or_create("new", bq.QueueConfig(consumer=handle))
            other.deliver(["new"], timeout=30)
            bridge.close()
            print(handled)

        atexit.register(late)
        """
    )
    assert "['at exit', 'new']" in done.stdout
    assert "drained_at_exit" not in done.stderr


def test_bq_s_threads_that_still_produce_while_the_interpreter_ends_do_not_hold_it_up():
    run(
        """
        bridge = bq.SyncBridge()
        queue = bridge.get_or_create("q", bq.QueueConfig(consumer=handle, buffer_size=100))

        def work():
            while queue.produce("x"):
                pass

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        while len(handled) < 1000:
            time.sleep(0.001)
        """
    )


# -- BQ-m: nobody closed


def test_bq_m_what_is_left_at_exit_is_handled_and_said():
    done = run(
        """
        async def slow(batch):
            await asyncio.sleep(0.05)
            print("handled", len(batch), flush=True)

        queue = bq.SyncBridge().get_or_create("tail", bq.QueueConfig(consumer=slow, linger=60.0))
        queue.produce_many(range(1000))
        """
    )
    assert "handled 1000" in done.stdout
    assert "queue_drained_at_exit queue='tail' handled=1000 undelivered=0" in done.stderr


def test_bq_m_a_queue_of_a_shared_scheduler_is_drained_at_exit_too():
    done = run(
        """
        pool = bq.SharedScheduler("POOL", bq.WorkerPolicy.fixed(1))
        queue = bq.default_manager().create("pooled", bq.QueueConfig(scheduler=pool, linger=60.0, consumer=handle))
        queue.bridge().produce("x")
        atexit.register(lambda: print("the queue is still open:", queue.bridge().produce("y"), handled))
        """
    )
    assert "the queue is still open: True ['x']" in done.stdout
    assert "queue_drained_at_exit queue='pooled' handled=2 undelivered=0" in done.stderr


def test_bq_m_a_handler_that_does_not_end_holds_the_exit_up_for_drain_timeout_only():
    done = run(
        """
        async def stuck(batch):
            await asyncio.Event().wait()

        bridge = bq.SyncBridge()
        queue = bridge.get_or_create("stuck", bq.QueueConfig(consumer=stuck, drain_timeout=0.1, max_batch=2))
        queue.produce_many(range(5))
        """,
        timeout=20,
    )
    assert "queue_drained_at_exit queue='stuck' handled=0 undelivered=5" in done.stderr


def test_bq_m_loops_that_are_blocked_hold_the_exit_up_once_and_not_one_after_the_other():
    done = run(
        """
        def make(name):
            entered = threading.Event()

            async def block(batch):
                entered.set()
                time.sleep(3600)

            queue = bq.SyncBridge().get_or_create(name, bq.QueueConfig(consumer=block, drain_timeout=0.1))
            queue.produce("x")
            entered.wait()

        for name in "abc":
            make(name)
        """,
        timeout=30,
    )
    assert done.stderr.count("undelivered=1") >= 3


def test_bq_m_a_program_that_closed_hears_nothing():
    done = run(
        """
        with bq.SyncBridge() as bridge:
            bridge.get_or_create("q", bq.QueueConfig(consumer=handle)).produce("x")
        assert handled == ["x"]
        flushed = bq.SyncBridge().get_or_create("q", bq.QueueConfig(consumer=handle))
        flushed.deliver(["y"], timeout=30)
        """
    )
    assert done.stderr == ""


def test_bq_m_an_error_in_the_program_does_not_keep_its_tail_from_being_handled():
    done = run_script(
        PREAMBLE
        + textwrap.dedent(
            """
            queue = bq.SyncBridge().get_or_create("tail", bq.QueueConfig(consumer=handle, linger=60.0))
            queue.produce_many(range(10))
            raise SystemExit("failed")
            """
        )
    )
    assert done.returncode == 1
    assert "queue_drained_at_exit queue='tail' handled=10" in done.stderr


# -- BQ-m: the runner and its signals


RUNNER = """
async def main(manager):
    async def slow(batch):
        {body}
        handled.extend(batch)
    queue = manager.create("q", bq.QueueConfig(consumer=slow, max_batch=10))
    await queue.produce_many(range(100))
    print("ready", flush=True)
    await asyncio.Event().wait()

begun = time.monotonic()
result = bq.run(main, drain_timeout=30)
print("result", result, len(handled), flush=True)
"""


def signalled(body: str, *numbers: int) -> tuple[int, str, str]:
    code = PREAMBLE + RUNNER.format(body=body)
    command = [sys.executable, "-W", "error", "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        for count, number in enumerate(numbers, 1):
            process.send_signal(number)
            if count < len(numbers):
                assert process.stdout.readline() == "draining\n"
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_bq_m_a_signal_drains_the_runners_queues(number):
    code, out, err = signalled("await asyncio.sleep(0.01)", number)
    assert (code, out) == (0, "result None 100\n"), err


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_bq_m_a_second_signal_ends_the_drain_at_once(second):
    body = """
        if not manager.get("q").closed:
            await asyncio.sleep(0)
        while not manager.get("q").closed:
            await asyncio.sleep(0.001)
        print("draining", flush=True)
        await asyncio.Event().wait()
    """.strip()
    code, out, err = signalled(body, signal.SIGTERM, second)
    assert (code, out) == (0, "result None 0\n"), err
    assert "undelivered=100" in err


def test_bq_m_the_runner_drains_when_main_returns_and_when_it_raises():
    handler = Held(held=False)

    async def main(manager):
        queue = manager.create("q", bq.QueueConfig(consumer=handler, linger=60.0))
        await queue.produce_many([1, 2])
        return "done"

    assert bq.run(main, manager=bq.BatchQueueManager()) == "done"
    assert handler.items == [1, 2]

    async def fail(manager):
        await main(manager)
        raise ValueError("main failed")

    with pytest.raises(ValueError, match="main failed"):
        bq.run(fail, manager=bq.BatchQueueManager())
    assert handler.items == [1, 2, 1, 2]

    async def cancelled(manager):
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        bq.run(cancelled, manager=bq.BatchQueueManager())


def test_bq_m_the_runner_works_in_a_thread():
    handler = Held(held=False)

    async def main(manager):
        await manager.create("q", bq.QueueConfig(consumer=handler)).produce("x")
        return "done"

    assert Caller(bq.run, main, manager=bq.BatchQueueManager()).outcome() == "done"
    assert handler.items == ["x"]
