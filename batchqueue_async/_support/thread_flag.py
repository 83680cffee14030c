"""Waiting for another thread in a way that leaves nothing locked, wherever a thread is torn out of its wait.

`threading.Event` and `concurrent.futures` take their locks in Python: an exception that arrives there, by Ctrl-C or
from another thread, leaves the lock locked, and whoever has something to tell stands still with it for ever. An event
loop must not depend on that. Everything here that two threads touch is a single step of the interpreter.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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
        self._asleep: deque[LockType] = deque()
        """One lock for each thread that waits: it has locked it, and goes on when somebody has unlocked it."""
        self._tell: deque[Callable[[], object]] = deque()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake everybody who waits."""
        self._set = True
        while (asleep := _first(self._asleep)) is not None:
            asleep.release()
        while (tell := _first(self._tell)) is not None:
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
        while self._set and (mine := _first(self._tell)) is not None:
            mine()


def _first(entries: deque[R]) -> R | None:
    """Take the first entry out; None if there is none, which another thread may have seen to."""
    try:
        return entries.popleft()
    except IndexError:
        return None


class _Outcome(NamedTuple):
    state: str
    result: Any = None
    error: BaseException | None = None


_OPEN = _Outcome("PENDING")
_CANCELLED = "CANCELLED_AND_NOTIFIED"
_FINISHED = "FINISHED"


class _Look:
    """What a `SafeFuture` has in the place of its lock, for those who believe that they have to take it.

    Whoever takes it sees the future as it is then until they give it back: those who look several times count on that.
    """

    def __init__(self, future: SafeFuture[Any]) -> None:
        self._future = future
        self._seen: dict[int, _Outcome] = {}

    def acquire(self) -> None:
        """Nothing has to be waited for."""
        self._seen[threading.get_ident()] = self._future.outcome

    def release(self) -> None:
        """See what is."""
        self._seen.pop(threading.get_ident(), None)

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def outcome(self) -> _Outcome:
        """What this thread is to see."""
        seen = self._seen.get(threading.get_ident())
        return self._future.outcome if seen is None else seen


class _Waiters(list[Any]):
    """Where `concurrent.futures.wait` and `as_completed` enter who waits for the future."""

    def __init__(self, future: SafeFuture[Any]) -> None:
        super().__init__()
        self._future = future

    def append(self, waiter: Any) -> None:
        super().append(waiter)
        if self._future.look.outcome is _OPEN:  # else whoever waits has seen that it is settled
            self._future.settled.when_set(partial(self._tell, waiter))

    def _tell(self, waiter: Any) -> None:
        if waiter in self:
            future = self._future
            failed = not future.cancelled() and future.exception(0) is not None
            tell = waiter.add_cancelled if future.cancelled() else waiter.add_exception if failed else waiter.add_result
            tell(future)


class SafeFuture(Future[R]):
    """A `Future` whose waiters can't hold up those that resolve it, wherever they are torn out of their wait.

    It has no lock: who settles it is decided by `dict.setdefault`, a single step of the interpreter, and the first
    wins. A lock in a `with` could stay locked: from Python 3.14 on an interrupt may come between the taking of the
    lock and the block (cpython #148874).

    Example:
        >>> future = SafeFuture()
        >>> future.resolve(1), future.resolve(2), future.result()
        (True, False, 1)
    """

    def __init__(self) -> None:
        # Not the base's: what it would set is derived from the outcome here.
        self._decided: dict[int, _Outcome] = {}
        self.settled = ThreadFlag()
        """Set as it is resolved or cancelled."""

    @property
    def outcome(self) -> _Outcome:
        """What has become of it."""
        return self._decided.get(0, _OPEN)

    # Made when they are asked for: they lead back to the future.
    look = cached_property(_Look)
    _waiters: Any = cached_property(_Waiters)

    # The names by which concurrent.futures and asyncio look into a future.
    _condition: Any = property(lambda self: self.look)
    _state: Any = property(lambda self: self.look.outcome.state)
    _result: Any = property(lambda self: self.outcome.result)
    _exception: Any = property(lambda self: self.outcome.error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {id(self):#x} state={self.outcome.state.lower()}>"

    def _decide(self, outcome: _Outcome) -> bool:
        won = self._decided.setdefault(0, outcome) is outcome
        if won:
            self.settled.set()
        return won

    def resolve(self, result: R) -> bool:
        """Give the result, unless it is settled; whether it was not."""
        return self._decide(_Outcome(_FINISHED, result))

    def fail(self, error: BaseException) -> bool:
        """Give the error, unless it is settled; whether it was not."""
        return self._decide(_Outcome(_FINISHED, error=error))

    def set_result(self, result: R) -> None:
        """Give the result; see `concurrent.futures.Future.set_result`."""
        if not self.resolve(result):
            raise InvalidStateError(f"{self.outcome.state}: {self!r}")

    def set_exception(self, exception: BaseException | None) -> None:
        """Give the error; see `concurrent.futures.Future.set_exception`."""
        if not self._decide(_Outcome(_FINISHED, error=exception)):
            raise InvalidStateError(f"{self.outcome.state}: {self!r}")

    def set_running_or_notify_cancel(self) -> bool:
        """Whether somebody still waits for it; it can be cancelled until it is resolved."""
        return not self.cancelled()

    def cancel(self) -> bool:
        """Cancel it, unless it is resolved; whether it is cancelled."""
        self._decide(_Outcome(_CANCELLED))
        return self.cancelled()

    def cancelled(self) -> bool:
        """Whether it is cancelled."""
        return self.outcome.state == _CANCELLED

    def running(self) -> bool:
        """Never: until it is resolved it can be cancelled."""
        return False

    def done(self) -> bool:
        """Whether it is resolved or cancelled."""
        return bool(self._decided)

    def add_done_callback(self, fn: Callable[[Future[R]], object]) -> None:
        """Have a function called with it when it is settled; now, if it is."""
        self.settled.when_set(partial(self._call, fn))

    def _call(self, function: Callable[[Future[R]], object]) -> None:
        try:
            function(self)
        except Exception:  # it is the callback's own: the others are called all the same
            logging.getLogger("concurrent.futures").exception("exception calling callback for %r", self)

    def result(self, timeout: float | None = None) -> R:
        """The result, for which it waits `timeout` seconds at the most; see `concurrent.futures.Future.result`."""
        outcome = self._wait(timeout)
        if outcome.error is not None:
            try:
                raise outcome.error
            finally:
                del self, outcome  # the frames of the error must not lead back to it
        result: R = outcome.result
        return result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, as soon as that is known; see `concurrent.futures.Future.exception`."""
        return self._wait(timeout).error

    def _wait(self, timeout: float | None) -> _Outcome:
        if not self.done() and not self.settled.wait(timeout):
            raise TimeoutError
        outcome = self.outcome
        if outcome.state == _CANCELLED:
            raise CancelledError
        return outcome
