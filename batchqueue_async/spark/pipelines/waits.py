"""Waits for Spark with a limit: a call in a thread of its own, which is left behind when it takes too long."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


def call_within(seconds: float | None, what: str, function: Callable[[], T]) -> T:
    """What a function returns or raises, if it does so in time.

    Example:
        >>> call_within(60.0, "adding", lambda: 1 + 1)
        2

    Raises:
        TimeoutError: it is not done; it goes on in its thread, and nobody will know what comes of it.
    """
    return begin(what, function).wait(seconds)


def begin(what: str, function: Callable[[], T]) -> Call[T]:
    """The same without the wait."""
    return Call(what, function)


class Call(Generic[T]):
    """A call that is under way in a thread."""

    def __init__(self, what: str, function: Callable[[], T]) -> None:
        self._what = what
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(function,), name=f"pipeline {what}", daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self._errors.append(error)

    def is_done(self) -> bool:
        """Whether it has returned or raised."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None) -> T:
        """Its result, or its error; TimeoutError if neither came in time."""
        self._thread.join(seconds)
        if self._errors:
            raise self._errors[0]
        if not self._results:
            raise TimeoutError(f"{self._what} is not done after {seconds:g} s")
        return self._results[0]


def all_within(seconds: float, calls: Mapping[str, Callable[[], object]]) -> dict[str, BaseException]:
    """Make calls at the same time, with one limit for all; the errors, by name, TimeoutError for what is not done.

    Example:
        >>> all_within(60.0, {"fine": lambda: None})
        {}
    """
    deadline = time.monotonic() + seconds
    begun = {name: begin(name, function) for name, function in calls.items()}
    errors: dict[str, BaseException] = {}
    for name, call in begun.items():
        try:
            call.wait(max(deadline - time.monotonic(), 0.0))
        except BaseException as error:  # noqa: BLE001 - given to the caller
            errors[name] = error
    return errors
