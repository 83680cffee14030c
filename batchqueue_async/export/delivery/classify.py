"""What an error of a sink means for its batch: decided by its class, never by its text. Pure.

| what was raised | what becomes of the records | the breaker |
|---|---|---|
| `ThrottledError`, `RetryableError` with `retry_after` | sent again, and all sends slow down | does not count it |
| `RetryableError`, `OSError`, `EOFError` | sent again | counts it |
| `AuthError`, `ConfigError` | kept, and everything pauses | does not count it |
| `TooLargeError` | sent in halves | an answer: the destination is well |
| `PermanentError` | the culprits are given up, the others are sent | an answer |
| anything else | sent again, in halves when it fails again; the class is named once | has no say |
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.errors import (
    AuthError,
    ConfigError,
    PermanentError,
    RetryableError,
    SinkError,
    ThrottledError,
    TooLargeError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class Disposition(Enum):
    """What is to be done with the records."""

    RETRY = "retry"
    """The destination is not well: the same records again, later."""
    SLOW_DOWN = "slow_down"
    """It is well, and asks for less: the same records again, later, and all of them more slowly."""
    UNKNOWN = "unknown"
    """Nobody knows what this error means: the same records again, later."""
    SPLIT = "split"
    """The batch is too large for it."""
    PAUSE = "pause"
    """It does not take our credentials, or our side is set up wrong: the same records again, when that is repaired."""
    GIVE_UP = "give_up"
    """It never will take these."""


SENT_AGAIN = frozenset((Disposition.RETRY, Disposition.SLOW_DOWN, Disposition.UNKNOWN))


class Outcome(NamedTuple):
    """What an error means, and its kind for the counts."""

    disposition: Disposition
    error_type: str


_SINK_ERRORS: tuple[tuple[type[SinkError], Disposition], ...] = (
    (ThrottledError, Disposition.SLOW_DOWN),
    (RetryableError, Disposition.RETRY),
    (TooLargeError, Disposition.SPLIT),
    (AuthError, Disposition.PAUSE),
    (PermanentError, Disposition.GIVE_UP),
)

_OTHERS: tuple[tuple[type[BaseException], Disposition, str], ...] = (
    (ConfigError, Disposition.PAUSE, "config"),
    # A sink that lets its client's errors through: a network that fails is no reason to give records up.
    (TimeoutError, Disposition.RETRY, "timeout"),
    (ConnectionRefusedError, Disposition.RETRY, "refused"),
    (ConnectionError, Disposition.RETRY, "network"),
    (OSError, Disposition.RETRY, "network"),
    (EOFError, Disposition.RETRY, "network"),
    # Raised though nobody cancelled the send: something inside the sink was.
    (asyncio.CancelledError, Disposition.RETRY, "cancelled"),
)


def classify(error: BaseException) -> Outcome:
    """What an error means.

    Example:
        >>> classify(ThrottledError("429", retry_after=2.0))
        Outcome(disposition=<Disposition.SLOW_DOWN: 'slow_down'>, error_type='throttled')
        >>> classify(KeyError("id"))
        Outcome(disposition=<Disposition.UNKNOWN: 'unknown'>, error_type='unexpected')
    """
    if isinstance(error, SinkError):
        if isinstance(error, RetryableError) and error.retry_after is not None:
            own = "error_type" in error.__dict__
            return Outcome(Disposition.SLOW_DOWN, error.error_type if own else "throttled")
        if error.error_type == "throttled":
            return Outcome(Disposition.SLOW_DOWN, "throttled")
        for kind, disposition in _SINK_ERRORS:
            if isinstance(error, kind):
                return Outcome(disposition, error.error_type)
        return Outcome(Disposition.UNKNOWN, "unexpected")
    for other, disposition, name in _OTHERS:
        if isinstance(error, other):
            return Outcome(disposition, name)
    return Outcome(Disposition.UNKNOWN, "unexpected")


def is_fatal(error: BaseException) -> bool:
    """Whether an error is for the program and not for the batch: its user wants it to end."""
    return isinstance(error, KeyboardInterrupt | SystemExit)


def is_sinks_own(error: BaseException) -> bool:
    """Whether a `CancelledError` came from inside the sink: nobody has cancelled the task that called it."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()


def culprits(error: BaseException, places: Sequence[int]) -> list[int]:
    """The places of a send that the destination named as the reason; indices outside the send are nobody's."""
    if not isinstance(error, SinkError):
        return []
    # What a sink's author put there may be anything.
    indices = {index for index in error.culprits if type(index) is int and 0 <= index < len(places)}
    return [places[index] for index in sorted(indices)]


def reason(error: BaseException) -> str:
    """An error as the reason of a dead letter or a pause: a sink's own errors in their words, others by their class.

    The text of an error that the library does not know may quote the record.
    """
    name = type(error).__name__
    if isinstance(error, SinkError | ConfigError) and (text := words(error)):
        return f"{name}: {text}"
    return name


def words(error: BaseException) -> str:
    """The text of an error; empty where its class, which may be the user's, can't say it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the error counts by its class all the same
        return ""
