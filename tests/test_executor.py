"""The threads of background loops: as those of `ThreadPoolExecutor`, and to the end of the program."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from batchqueue_async._support.executor import LastingExecutor

PATIENCE = 60.0


@pytest.fixture
def executor():
    executor = LastingExecutor("test", most=3)
    yield executor
    executor.shutdown(wait=False, cancel_futures=True)


def test_results_errors_and_arguments_come_back(executor):
    assert executor.submit(divmod, 7, 2).result(PATIENCE) == (3, 1)
    assert executor.submit(int, "ff", base=16).result(PATIENCE) == 255
    with pytest.raises(ValueError, match="invalid literal"):
        executor.submit(int, "x").result(PATIENCE)
    with pytest.raises(SystemExit):
        executor.submit(exit, 3).result(PATIENCE)
    assert executor.submit(abs, -1).result(PATIENCE) == 1  # the thread goes on


def test_idle_threads_are_used_again_and_there_are_no_more_than_allowed(executor):
    assert [executor.submit(threading.current_thread).result(PATIENCE).name for _ in range(5)] == ["test-0"] * 5
    together, release = threading.Barrier(4, timeout=PATIENCE), threading.Event()

    def hold():
        together.wait()
        release.wait(PATIENCE)
        return threading.current_thread().name

    held = [executor.submit(hold) for _ in range(3)]
    together.wait()
    waiting = executor.submit(threading.current_thread)
    assert not waiting.done()
    release.set()
    assert sorted(future.result(PATIENCE) for future in held) == ["test-0", "test-1", "test-2"]
    assert waiting.result(PATIENCE).name.startswith("test-")


def test_a_prepared_executor_has_a_thread():
    executor = LastingExecutor("prepared")
    executor.prepare()
    executor.prepare()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("prepared")] == ["prepared-0"]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("prepared"))
    executor.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prepared")]
    executor.prepare()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prepared")]


def test_shutdown_finishes_what_was_submitted_and_takes_no_more():
    executor = LastingExecutor("test", most=1)
    futures = [executor.submit(abs, -number) for number in range(10)]
    executor.shutdown()
    assert [future.result(0) for future in futures] == list(range(10))
    with pytest.raises(RuntimeError, match="'test' were shut down"):
        executor.submit(abs, 1)


def test_shutdown_can_cancel_what_has_not_begun():
    executor = LastingExecutor("test", most=1)
    release, entered = threading.Event(), threading.Event()

    def hold():
        entered.set()
        release.wait(PATIENCE)

    running, waiting = executor.submit(hold), executor.submit(abs, 1)
    assert entered.wait(PATIENCE)
    cancelled = executor.submit(abs, 1)
    assert cancelled.cancel()
    executor.shutdown(wait=False, cancel_futures=True)
    release.set()
    assert running.result(PATIENCE) is None
    for future in (waiting, cancelled):
        with pytest.raises(CancelledError):
            future.result(PATIENCE)


def test_without_a_further_thread_the_work_waits_for_those_that_there_are(executor, monkeypatch):
    """As at the exit of a program, from Python 3.12 on."""
    executor.prepare()
    start = threading.Thread.start

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    futures = [executor.submit(abs, -number) for number in range(10)]
    assert [future.result(PATIENCE) for future in futures] == list(range(10))
    none = LastingExecutor("none")
    with pytest.raises(RuntimeError, match="can't create"):
        none.submit(abs, 1)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert none.submit(abs, -1).result(PATIENCE) == 1
    none.shutdown()


def test_an_idle_thread_keeps_nothing_of_the_last_call(executor):
    class Thing:
        def work(self):
            pass

    thing = Thing()
    gone = weakref.ref(thing)
    executor.submit(thing.work).result(PATIENCE)
    del thing
    executor.submit(abs, 1).result(PATIENCE)
    gc.collect()
    assert gone() is None


def test_an_event_loop_takes_it(executor):
    async def main():
        asyncio.get_running_loop().set_default_executor(executor)
        assert await asyncio.to_thread(abs, -1) == 1
        assert await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 80)

    asyncio.run(main())
    with pytest.raises(RuntimeError):
        executor.submit(abs, 1)  # asyncio.run has shut it down
