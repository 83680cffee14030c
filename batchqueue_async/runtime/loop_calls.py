"""Asking another thread's event loop for something: the answer comes, or the timeout, or word that the loop ended.

A loop that is closed forgets what it was asked, silently. So nobody here waits longer than a moment without looking
whether the loop is still there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async.errors import QueueClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

R = TypeVar("R")
Future = concurrent.futures.Future

GLANCE = 0.5
"""Seconds between two looks at a loop that somebody waits for."""


def submit(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, R]]) -> Future[R]:
    """Have a loop make and run a coroutine; raises RuntimeError if it is closed. Cancelling the future cancels it.

    Unlike `asyncio.run_coroutine_threadsafe` it makes the coroutine on the loop, so that a loop which closes before
    it gets there leaves no coroutine behind that was never awaited.
    """
    future: Future[R] = Future()
    loop.call_soon_threadsafe(_begin, loop, make, future)
    return future


def _begin(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, R]], future: Future[R]) -> None:
    if future.cancelled():
        return
    try:
        task = loop.create_task(make())
    except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
        future.set_exception(error)
        return
    task.add_done_callback(partial(_answer, future))
    future.add_done_callback(partial(_cancel, loop, task))


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], future: Future[Any]) -> None:
    if future.cancelled():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs there any more
            loop.call_soon_threadsafe(task.cancel)


def _answer(future: Future[R], task: asyncio.Task[R]) -> None:
    error = None if task.cancelled() else task.exception()
    if task.cancelled():
        future.cancel()
    elif future.set_running_or_notify_cancel():
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


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


def wait(future: Future[R], loop: asyncio.AbstractEventLoop, timeout: float | None) -> R:
    """Wait in this thread for what `submit` started.

    Raises:
        AskedTooLongError: `timeout` seconds passed first.
        QueueClosedError: the loop ended first.
    """
    deadline = deadline_of(timeout)
    try:
        while True:
            concurrent.futures.wait((future,), left_of(deadline))
            if _settled(future, loop, deadline):
                return future.result()
    finally:
        future.cancel()  # for a KeyboardInterrupt; without effect on a future that is done


async def wait_async(future: Future[R], loop: asyncio.AbstractEventLoop, timeout: float | None) -> R:
    """Wait on this loop for what `submit` started on another; cancelling the wait cancels it."""
    deadline = deadline_of(timeout)
    mine = asyncio.wrap_future(future)
    try:
        while True:
            await asyncio.wait((mine,), timeout=left_of(deadline))
            if _settled(future, loop, deadline):
                return future.result()
    finally:
        mine.cancel()
        if mine.done() and not mine.cancelled():
            mine.exception()  # the same as the future's, which its caller got


def _settled(future: Future[Any], loop: asyncio.AbstractEventLoop, deadline: float | None) -> bool:
    if future.cancelled() or (not future.done() and loop.is_closed()):
        future.cancel()
        raise QueueClosedError("it was cancelled on its event loop, which has ended or is about to")
    if future.done():
        return True
    if is_over(deadline):
        if future.cancel():
            raise AskedTooLongError
        return True
    return False
