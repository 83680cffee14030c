"""Steps under a lock that no interrupt leaves locked.

`with` does not do. An exception that another thread throws, and Ctrl-C, may come between the taking of the lock and the
block from Python 3.14 on (cpython #148874); in 3.13 one at the end of a loop's turn leaves the block without its exit
(#130279). Whoever needs the lock next, an event loop maybe, would stand still.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class _Lock(Protocol):
    def acquire(self) -> bool: ...
    def release(self) -> None: ...


class _HasLock(Protocol):
    @property
    def _lock(self) -> _Lock: ...


S = TypeVar("S", bound=_HasLock)


def guarded(lock: _Lock, step: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Take a step under a lock, an `RLock`: only its owner can release it, so that nobody loses it to another.

    Nothing that can be interrupted stands between the end of the step, or its error, and `release`.

    Example:
        >>> import threading
        >>> guarded(threading.RLock(), max, 1, 2)
        2
    """
    release = lock.release
    try:
        lock.acquire()
        result = step(*arguments, **options)
    except BaseException:  # an interrupt too: that is what this is for
        try:  # noqa: SIM105 - no further call may stand before the release
            release()
        except RuntimeError:
            pass  # interrupted in the wait for the lock, which another thread has
        raise
    release()
    return result


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that runs under its object's `_lock`, an `RLock`.

    Example:
        >>> import threading
        >>> class Counter:
        ...     def __init__(self) -> None:
        ...         self._lock = threading.RLock()
        ...         self.count = 0
        ...
        ...     @locked
        ...     def add(self) -> None:
        ...         self.count += 1
        >>> counter = Counter()
        >>> counter.add()
        >>> counter.count
        1
    """

    @wraps(method)
    def call(self: S, /, *arguments: P.args, **options: P.kwargs) -> R:
        owner: Any = self  # whose own lock it is
        return guarded(owner._lock, method, self, *arguments, **options)  # noqa: SLF001 - of the method's own object

    return call
