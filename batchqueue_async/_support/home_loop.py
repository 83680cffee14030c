"""The one thread and event loop that a queue lives on, and the check of who calls."""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol, cast

from batchqueue_async.errors import BatchQueueError, ForkedError, WrongLoopError


class ThreadMark(Protocol):
    """The part of a lock that tells whether the calling thread holds it; `threading.Condition` relies on it, too."""

    def _is_owned(self) -> bool: ...


class HomeLoop:
    """A queue's own event loop, and a mark on the thread that runs it.

    The mark is a lock that the loop's thread takes once and keeps: asking a lock whether this thread owns it is the
    cheapest test of the thread there is, and it is made for every item.

    Attributes:
        loop: the event loop.
        mark: owned by the loop's thread, once `mark_thread` has run on it.
        forked: whether this is a child process, where the loop does not run.
    """

    __slots__ = ("_lock", "_queue", "forked", "loop", "mark")

    def __init__(self, queue: str, loop: asyncio.AbstractEventLoop | None) -> None:
        self._queue = queue
        self.loop = loop or _required_loop(queue)
        self.forked = False
        self._renew_mark()

    def _renew_mark(self) -> None:
        self._lock = threading.RLock()
        self.mark = cast("ThreadMark", self._lock)

    def after_fork(self) -> None:
        """In a forked child: no thread is the loop's, not even the one that was."""
        self.forked = True
        self._renew_mark()

    def mark_thread(self) -> None:
        """Remember the loop's thread; called on it."""
        self._lock.acquire()

    def is_here(self) -> bool:
        """Whether this is the thread on which the queue's loop runs now.

        A thread runs one loop at a time: if this is the queue's thread, and its loop runs, then it runs here. That is
        a quarter of the price of asyncio.get_running_loop().
        """
        return self.mark._is_owned() and self.loop.is_running()  # pyright: ignore[reportPrivateUsage]

    def check(self, call: str) -> None:
        """The full check, of thread and running loop, on every path but the hottest."""
        if not (self.mark._is_owned() and self.loop.is_running()):  # pyright: ignore[reportPrivateUsage]
            raise self.error(call)

    def check_thread(self, call: str) -> None:
        """The check of the thread alone, for a path that makes the full one later."""
        if not self.mark._is_owned():  # pyright: ignore[reportPrivateUsage]
            raise self.error(call)

    def error(self, call: str) -> BatchQueueError:
        """What a call from elsewhere raises."""
        if self.forked:
            return ForkedError(
                f"queue {self._queue!r}: {call}: it was made before this process was forked, and its event loop did "
                "not come along; make a new queue in the child"
            )
        if self.loop.is_closed():
            return WrongLoopError(
                f"queue {self._queue!r}: {call}: its event loop is closed; make the queue again on the loop that runs "
                "now, and shut it down before that ends"
            )
        return WrongLoopError(
            f"queue {self._queue!r}: {call} was called on another thread or event loop than the queue's own; "
            "call queue.bridge() once and use what it returns there"
        )


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _required_loop(queue: str) -> asyncio.AbstractEventLoop:
    loop = running_loop()
    if loop is None:
        raise WrongLoopError(
            f"queue {queue!r} is made outside a running event loop; make it inside a coroutine, "
            "or give it a scheduler=SharedScheduler(...)"
        )
    return loop
