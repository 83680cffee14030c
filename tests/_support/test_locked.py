"""A lock is free again wherever a step under it is torn apart."""

from __future__ import annotations

import threading

import pytest
from bridge_tools import Caller

from batchqueue_async._support.locked import guarded, locked


class Torn(BaseException):
    """What a thread is torn out of its step by."""


class LateLock:
    """A lock in whose taking an exception comes: after it, as from Python 3.14 on, or while it is waited for."""

    def __init__(self, *, taken):
        self.lock = threading.RLock()
        self.taken = taken

    def acquire(self):
        if self.taken:
            self.lock.acquire()
        raise Torn

    def release(self):
        self.lock.release()


class Counter:
    """Counts under its lock."""

    def __init__(self):
        self._lock = threading.RLock()
        self.count = 0

    @locked
    def add(self, by=1):
        """Count."""
        self.count += by
        if self.count < 0:
            raise ValueError(self.count)
        return self.count

    @locked
    def add_twice(self):
        return self.add() + self.add()


def is_free(lock):
    return Caller(lambda: lock.acquire(blocking=False)).outcome()


@pytest.mark.parametrize("taken", [True, False])
def test_a_lock_in_whose_taking_an_exception_comes_is_free(taken):
    late = LateLock(taken=taken)
    with pytest.raises(Torn):
        guarded(late, print)
    assert is_free(late.lock)


def test_who_is_torn_out_of_the_wait_leaves_the_lock_to_its_owner():
    late = LateLock(taken=False)
    late.lock.acquire()

    def torn():
        with pytest.raises(Torn):
            guarded(late, print)
        return True

    assert Caller(torn).outcome()
    assert not is_free(late.lock)


def test_a_step_that_fails_leaves_the_lock_free():
    counter = Counter()
    with pytest.raises(ValueError, match="-1"):
        counter.add(-1)
    assert is_free(counter._lock)


def test_its_holder_may_take_another_step():
    counter = Counter()
    assert counter.add_twice() == 3
    assert is_free(counter._lock)
    assert counter.add.__doc__ == "Count."
