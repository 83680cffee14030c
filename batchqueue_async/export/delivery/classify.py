"""What an error of a sink means for its batch: decided by its class, never by its text."""

from __future__ import annotations

import asyncio
from enum import Enum

from batchqueue_async.errors import AuthError, PermanentError, RetryableError, TooLargeError


class Verdict(Enum):
    """What is to be done with the records."""

    RETRY = "retry"
    """The destination is not well: the same records again, later."""
    SPLIT = "split"
    """The batch is too large for it."""
    PAUSE = "pause"
    """It does not take our credentials: the same records again, when it does."""
    GIVE_UP = "give_up"
    """It never will take these."""


_BY_CLASS: tuple[tuple[type[BaseException], Verdict, str], ...] = (
    (RetryableError, Verdict.RETRY, "retryable"),
    (TooLargeError, Verdict.SPLIT, "too_large"),
    (AuthError, Verdict.PAUSE, "auth"),
    (PermanentError, Verdict.GIVE_UP, "permanent"),
    # A sink that lets its client's errors through: a network that fails is no reason to give records up.
    (TimeoutError, Verdict.RETRY, "timeout"),
    (ConnectionError, Verdict.RETRY, "connection"),
    (OSError, Verdict.RETRY, "os"),
    (EOFError, Verdict.RETRY, "connection"),
    # Raised though nobody cancelled the send: something inside the sink was.
    (asyncio.CancelledError, Verdict.RETRY, "cancelled"),
)


def judge(error: BaseException) -> tuple[Verdict, str]:
    """What an error means, and its name in the counts.

    Example:
        >>> judge(RetryableError("503", retry_after=2.0))
        (<Verdict.RETRY: 'retry'>, 'throttled')
        >>> judge(KeyError("id"))
        (<Verdict.GIVE_UP: 'give_up'>, 'unexpected')
    """
    if isinstance(error, RetryableError) and error.retry_after is not None:
        return Verdict.RETRY, "throttled"
    for kind, verdict, name in _BY_CLASS:
        if isinstance(error, kind):
            return verdict, name
    return Verdict.GIVE_UP, "unexpected"


def is_sinks_own(error: BaseException) -> bool:
    """Whether a `CancelledError` came from inside the sink: nobody has cancelled the task that called it."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()


def reason(error: BaseException) -> str:
    """An error as the reason of a dead letter: a sink's own errors in their words, others by their class.

    The text of an error that the library does not know may quote the record.
    """
    name = type(error).__name__
    if isinstance(error, RetryableError | TooLargeError | AuthError | PermanentError):
        return f"{name}: {error}" if str(error) else name
    return name
