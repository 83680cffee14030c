"""Waiting for another thread in a way that leaves nothing locked, wherever a thread is torn out of its wait.

`threading.Event` and `concurrent.futures` take their locks in Python: an exception that arrives there, by Ctrl-C or
from another thread, leaves the lock locked, and whoever has something to tell stands still with it for ever. An event
loop must not depend on that. Everything here that two threads touch is a single step of the interpreter.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Callable

R = TypeVar("R")


class ThreadFlag:
    """As `threading.Event`, except that no interrupt of a thread that waits can hold up those that set it.

    Example:
        >>> flag = ThreadFlag()
        >>> flag.wait(0.001)
        False
        >>> flag.set()
        >>> flag.wait(), flag.is_set()
        (True, True)
    """

    __slots__ = ("_asleep", "_set", "_tell")

    def __init__(self) -> None:
        self._set = False
        self._asleep: list[LockType] = []
        """One lock for each thread that waits: it has locked it, and goes on when somebody has unlocked it."""
        self._tell: list[Callable[[], object]] = []

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake everybody who waits."""
        self._set = True
        while (asleep := _pop(self._asleep)) is not None:
            asleep.release()
        while (tell := _pop(self._tell)) is not None:
            tell()

    def clear(self) -> None:
        """Take it back: further calls of `wait` wait again."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, `timeout` seconds at the most; whether it is."""
        if not self._set:
            mine = threading.Lock()
            mine.acquire()
            self._asleep.append(mine)
            if not self._set:  # else it was set between the two looks, maybe without a look at `mine`
                mine.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
            with contextlib.suppress(ValueError):
                self._asleep.remove(mine)
        return self._set

    def when_set(self, tell: Callable[[], object]) -> None:
        """Call a function as soon as it is set, on the thread that sets it; now, if it is set already."""
        self._tell.append(tell)
        while self._set and (mine := _pop(self._tell)) is not None:
            mine()


def _pop(entries: list[R]) -> R | None:
    """The last entry; None if there is none, which another thread may have seen to."""
    try:
        return entries.pop()
    except IndexError:
        return None


class _LockInOneStep(type(threading.RLock())):  # type: ignore[misc]  # pyright: ignore[reportUntypedBaseClass]
    """What `SafeFuture` has for its condition: it is taken and released in C."""

    def notify_all(self) -> None:
        """Nobody waits here."""


class SafeFuture(Future[R]):
    """A `Future` whose waiters can't hold up those that resolve it, wherever they are torn out of their wait."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = _LockInOneStep()
        self.settled = ThreadFlag()
        """Set as it is resolved or cancelled."""
        self.add_done_callback(lambda _: self.settled.set())

    def result(self, timeout: float | None = None) -> R:
        """The result, for which it waits `timeout` seconds at the most; see `concurrent.futures.Future.result`."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, as soon as that is known; see `concurrent.futures.Future.exception`."""
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if not self.done() and not self.settled.wait(timeout):
            raise TimeoutError
