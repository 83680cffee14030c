"""A named event loop in a thread of its own, shared by the queues that name it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async._support import log
from batchqueue_async._support.checks import check_timeout
from batchqueue_async._support.executor import LastingExecutor
from batchqueue_async._support.log import describe
from batchqueue_async._support.thread_flag import SafeFuture, ThreadFlag
from batchqueue_async.errors import ForkedError, QueueClosedError, WrongLoopError
from batchqueue_async.queue.limiter import CallLimiter
from batchqueue_async.queue.shutdown import CANCEL_GRACE
from batchqueue_async.runtime.loop_calls import submit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Sequence

    from batchqueue_async.policies import WorkerPolicy
    from batchqueue_async.runtime.loop_calls import LoopCall

R = TypeVar("R")

START_TIMEOUT = 10.0
"""Seconds to wait for a new thread to run its loop: far more than it takes on a machine that works."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop where there is one for the platform, else asyncio's own."""
    try:
        import uvloop  # noqa: PLC0415 - there is no uvloop on Windows
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class Scheduler:
    """One event loop in a daemon thread; its policy bounds the handler calls of all its queues together.

    A manager makes it when a queue names it first, and ends it in `shutdown_all`.

    Example:
        >>> from batchqueue_async.policies import WorkerPolicy
        >>> async def answer() -> int:
        ...     return 42
        >>> scheduler = Scheduler("IO_POOL", WorkerPolicy.fixed(2))
        >>> scheduler.submit(answer).result(timeout=5)
        42
        >>> scheduler.stop(timeout=5)
        True

    Attributes:
        name: its name within the manager.
        policy: what decides `limit`.
        limit: how many handler calls run at once.
        loop: the event loop.
    """

    def __init__(self, name: str, policy: WorkerPolicy) -> None:
        self.name = name
        self.policy = policy
        self.limit = policy.resolve()
        self.turns = CallLimiter(self.limit)
        self.loop: asyncio.AbstractEventLoop
        self._pid = os.getpid()
        self._stop = asyncio.Event()
        self._threads = LastingExecutor(f"batchqueue-{name}-call")
        self._ended = ThreadFlag()
        """Set when the loop is closed."""
        started: SafeFuture[None] = SafeFuture()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"batchqueue-{name}", daemon=True)
        try:
            self._thread.start()
            started.result(START_TIMEOUT)
        except (RuntimeError, TimeoutError) as error:
            # No thread starts once the interpreter shuts down from Python 3.12 on (cpython #113964), and before that
            # some modules can't be imported any more.
            self._stop.set()  # for a thread that starts after all
            raise QueueClosedError(
                f"scheduler {name!r}: its thread can't be started ({error}); at the exit of a program it is too late: "
                "make the bridge or queue, and call it once, before"
            ) from None
        _running.add(self)

    def _run(self, started: SafeFuture[None]) -> None:
        async def main() -> None:
            started.set_result(None)
            await self._stop.wait()

        try:
            self.loop = loop = new_event_loop()
            # For handlers that use asyncio.to_thread and the like in the last batches, at the exit of the program.
            loop.set_default_executor(self._threads)
            self._threads.prepare()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the loop gets it, whatever it is
            started.set_exception(error)
            return
        try:
            loop.run_until_complete(main())
        except BaseException as error:  # noqa: BLE001 - a handler's SystemExit, say; the thread ends with it anyway
            log.error("scheduler_ended", scheduler=self.name, **describe(error))
        finally:
            # A call that does not return stays behind in its thread: nothing here waits for it.
            try:
                _end_tasks(loop)
            finally:
                loop.close()
                self._ended.set()

    @property
    def running(self) -> bool:
        """Whether the loop's thread is alive."""
        return self._thread.is_alive() and not self._ended.is_set() and not self.loop.is_closed()

    @property
    def is_current(self) -> bool:
        """Whether this code runs on the scheduler's own thread."""
        return threading.current_thread() is self._thread

    @property
    def mine(self) -> bool:
        """Whether this is the process that made it, not one that was forked from it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise if the scheduler can't run anything here: after a fork, or after it was stopped."""
        if not self.mine:
            raise ForkedError(
                f"scheduler {self.name!r} was made before this process was forked, and its thread did not come along; "
                "make a new manager in the child"
            )
        if not self.running:
            raise self._stopped()

    def _stopped(self) -> QueueClosedError:
        return QueueClosedError(f"scheduler {self.name!r} was stopped; make a new manager")

    def submit(self, function: Callable[..., Coroutine[Any, Any, R]], *arguments: Any) -> LoopCall[R]:
        """Start a coroutine function on the scheduler's loop, from any thread."""
        self.check()
        try:
            return submit(self.loop, partial(function, *arguments))
        except RuntimeError:
            raise self._stopped() from None

    async def run(self, function: Callable[..., Coroutine[Any, Any, R]], *arguments: Any) -> R:
        """Run a coroutine function on the scheduler's loop and await its result on this one."""
        return await asyncio.wrap_future(self.submit(function, *arguments))

    def ask_to_stop(self) -> None:
        """Have the loop end as soon as it can."""
        # It may have closed already: then the thread is about to end by itself.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._stop.set)

    def stop(self, timeout: float = START_TIMEOUT) -> bool:
        """End the loop and its thread; False if the thread did not end within `timeout` seconds."""
        check_timeout(f"scheduler {self.name!r}: stop", timeout)
        return stop_in_thread([self], timeout)

    def check_stop_here(self) -> None:
        """Raise if this thread is the one that would end."""
        if self.is_current:
            raise WrongLoopError(f"scheduler {self.name!r}: stop was called on its own thread, which it would wait for")

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Call a function, on any thread, when the loop is closed."""
        self._ended.when_set(tell)

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return f"<Scheduler {self.name!r} {state}, {self.limit} calls at once>"


_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what still runs on a loop that is about to close, and give it a moment to react."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_GRACE))
    with contextlib.suppress(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), CANCEL_GRACE))


async def stop_async(
    schedulers: Sequence[Scheduler], timeout: float, *, blocked: Collection[asyncio.AbstractEventLoop] = ()
) -> bool:
    """End several schedulers at once; whether all ended within `timeout` seconds.

    Args:
        schedulers: which.
        timeout: seconds for all of them together.
        blocked: loops that are known not to answer: they end when they can, and are not waited for.
    """
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(changed.set)

    awaited = _ask_to_stop(schedulers, blocked, tell)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while any(scheduler.running for scheduler in awaited):
                await changed.wait()
                changed.clear()
    return _have_stopped(schedulers, timeout)


def stop_in_thread(
    schedulers: Sequence[Scheduler], timeout: float, *, blocked: Collection[asyncio.AbstractEventLoop] = ()
) -> bool:
    """The same for a thread that is none of theirs."""
    changed = ThreadFlag()
    awaited = _ask_to_stop(schedulers, blocked, changed.set)
    deadline = time.monotonic() + timeout
    while any(scheduler.running for scheduler in awaited):
        if not changed.wait(max(0.0, deadline - time.monotonic())):
            break
        changed.clear()
    return _have_stopped(schedulers, timeout)


def stop_all(timeout: float) -> None:
    """End the threads of this process's schedulers, within `timeout` seconds: the last thing at its exit."""
    ending = [each for each in list(_running) if each.mine and each.running and not each.is_current]
    stop_in_thread(ending, timeout)


def _ask_to_stop(
    schedulers: Sequence[Scheduler], blocked: Collection[asyncio.AbstractEventLoop], tell: Callable[[], None]
) -> list[Scheduler]:
    for scheduler in schedulers:
        scheduler.check_stop_here()
    for scheduler in schedulers:
        scheduler.when_ended(tell)
        scheduler.ask_to_stop()
    return [scheduler for scheduler in schedulers if scheduler.loop not in blocked]


def _have_stopped(schedulers: Sequence[Scheduler], timeout: float) -> bool:
    stuck = [scheduler for scheduler in schedulers if scheduler.running]
    for scheduler in stuck:
        log.error("scheduler_stuck", scheduler=scheduler.name, timeout=round(timeout, 3))
    return not stuck
