"""Asking another thread's event loop for something: the answer comes, or the timeout, or word that the loop ended.

A loop that is closed forgets what it was asked, silently. So nobody here waits longer than a moment without looking
whether the loop is still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async._support.thread_flag import SafeFuture
from batchqueue_async.errors import QueueClosedError

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine

R = TypeVar("R")

GLANCE = 0.5
"""Seconds between two looks at a loop that somebody waits for."""


class LoopCall(SafeFuture[R]):
    """What `submit` asked a loop for. Cancelling it cancels the coroutine there.

    Attributes:
        loop: the loop.
        begun: whether the loop has got to it: one that has not is blocked, or stands still.
        broken_off: whether `break_off` has ended it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self.begun = False
        self.broken_off = False

    def answer(self, result: R) -> None:
        """Give the answer before the coroutine has come to its end."""
        self.resolve(result)

    def break_off(self) -> None:
        """Cancel a call that could never come to its end, because of the caller's own wait."""
        self.broken_off = self.cancel()


def submit(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, R]]) -> LoopCall[R]:
    """Have a loop make and run a coroutine; raises RuntimeError if it is closed.

    Unlike `asyncio.run_coroutine_threadsafe` it makes the coroutine on the loop, so that a loop which closes before
    it gets there leaves no coroutine behind that was never awaited.
    """
    call: LoopCall[R] = LoopCall(loop)
    loop.call_soon_threadsafe(_begin, make, call)
    return call


def _begin(make: Callable[[], Coroutine[Any, Any, R]], call: LoopCall[R]) -> None:
    if call.cancelled():
        return
    call.begun = True
    try:
        task = call.loop.create_task(make())
    except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
        call.fail(error)
        return
    task.add_done_callback(partial(_answer, call))
    call.add_done_callback(partial(_cancel, call.loop, task))


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], call: concurrent.futures.Future[Any]) -> None:
    if call.cancelled():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs there any more
            loop.call_soon_threadsafe(task.cancel)


def _answer(call: LoopCall[R], task: asyncio.Task[R]) -> None:
    if task.cancelled():
        call.cancel()
    elif (error := task.exception()) is not None:
        call.fail(error)
    else:
        call.resolve(task.result())


def deadline_of(timeout: float | None) -> float | None:
    """When a timeout that begins now will be over."""
    return None if timeout is None else time.monotonic() + timeout


def left_of(deadline: float | None) -> float:
    """How long to wait before looking again: no longer than until the deadline, and never below 0."""
    return GLANCE if deadline is None else max(0.0, min(GLANCE, deadline - time.monotonic()))


def is_over(deadline: float | None) -> bool:
    """Whether a deadline has passed."""
    return deadline is not None and time.monotonic() >= deadline


class AskedTooLongError(Exception):
    """The timeout passed before the answer came, which was cancelled."""


def wait(call: LoopCall[R], timeout: float | None) -> R:
    """Wait in this thread for what `submit` began.

    Raises:
        AskedTooLongError: `timeout` seconds passed first.
        QueueClosedError: the loop ended first.
    """
    deadline = deadline_of(timeout)
    try:
        while True:
            call.settled.wait(left_of(deadline))
            if _settled(call, deadline):
                return call.result()
    finally:
        call.cancel()  # for a KeyboardInterrupt; without effect on a call that is done


async def wait_async(call: LoopCall[R], timeout: float | None) -> R:
    """Wait on this loop for what `submit` began on another; cancelling the wait cancels it."""
    deadline = deadline_of(timeout)
    mine = asyncio.wrap_future(call)
    try:
        while True:
            await asyncio.wait((mine,), timeout=left_of(deadline))
            if _settled(call, deadline):
                return call.result()
    finally:
        mine.cancel()
        if mine.done() and not mine.cancelled():
            mine.exception()  # the same as the call's, which its caller got


def _settled(call: LoopCall[Any], deadline: float | None) -> bool:
    if call.cancelled() or (not call.done() and call.loop.is_closed()):
        call.cancel()
        raise QueueClosedError("it was cancelled on its event loop, which has ended or is about to")
    if call.done():
        return True
    if is_over(deadline):
        if call.cancel():
            raise AskedTooLongError
        return True
    return False
