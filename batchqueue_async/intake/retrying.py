"""What a failure means for a message: another attempt and when, or the dead letters and why. Pure.

For a consumer an unknown error is retryable: most are bugs or outages, and to send a bug's whole queue to the dead
letters would be worse than to try in vain.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from batchqueue_async.errors import (
    AuthError,
    ConfigError,
    PermanentError,
    QueueFullError,
    RetryableError,
    TooLargeError,
)
from batchqueue_async.export.control.backoff import Backoff
from batchqueue_async.intake.ports import DeadLetter, Retry

if TYPE_CHECKING:
    from random import Random

    from batchqueue_async.export.policies import RetryPolicy
    from batchqueue_async.intake.ports import Delivery, Epoch, Reason


class HandlerTimeoutError(RetryableError):
    """The handler took longer than `handler_timeout`, and was cancelled."""

    error_type = "timeout"


class UndecodableError(PermanentError):
    """`decode` or the function of `ordered_by` refused the message."""

    error_type = "undecodable"


class Hold(NamedTuple):
    """Nothing is wrong with the message: what the handler writes to is full, or refuses us. All wait, nothing counts.

    Attributes:
        delay: seconds until one is tried again.
    """

    delay: float


Verdict: TypeAlias = "Retry | DeadLetter | Hold"


class Judge:
    """Decides by a `RetryPolicy` what becomes of a message that failed.

    Example:
        >>> from random import Random
        >>> from batchqueue_async.export.policies import RetryPolicy
        >>> judge = Judge(RetryPolicy(initial=1.0, jitter=False, max_attempts=2), Random(1))
        >>> judge.verdict(OSError("gone"), attempt=1, age=0.0, now=0.0)
        Retry(delay=1.0, attempt=2)
        >>> judge.verdict(OSError("gone"), attempt=2, age=1.0, now=0.0).reason
        'attempts'
    """

    def __init__(self, policy: RetryPolicy, random: Random, *, texts: bool = False) -> None:
        self._policy = policy
        self._backoff = Backoff(policy, random)
        self._texts = texts

    def verdict(self, error: BaseException, *, attempt: int, age: float, now: float) -> Verdict:
        """What becomes of a message whose handling ended in this error.

        Args:
            error: what the handler raised, or said of the message.
            attempt: which attempt it was, from 1.
            age: seconds since the message was taken first.
            now: seconds since 1970.
        """
        if isinstance(error, QueueFullError | AuthError | ConfigError):
            return Hold(self._backoff.ceiling(1))
        policy = self._policy
        if isinstance(error, PermanentError | TooLargeError):
            reason: Reason = "undecodable" if isinstance(error, UndecodableError) else "permanent"
        elif policy.max_attempts is not None and attempt >= policy.max_attempts:
            reason = "timeout" if isinstance(error, HandlerTimeoutError) else "attempts"
        elif policy.max_age is not None and age >= policy.max_age:
            reason = "age"
        else:
            asked = error.retry_after if isinstance(error, RetryableError) else None
            return Retry(self._backoff.delay(attempt, asked), attempt + 1)
        return DeadLetter(
            reason=reason,
            error=type(error).__qualname__,
            text=_text(error) if self._texts else None,
            attempts=attempt,
            first_at=now - age,
            at=now,
        )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the error's class is the user's, and the letter goes without its text
        return ""


class RetryQueue:
    """What waits here for its next attempt, by the time at which that is due.

    Example:
        >>> from batchqueue_async.intake.ports import Delivery, Epoch
        >>> queue = RetryQueue()
        >>> queue.add(Delivery(b"a", epoch=Epoch()), due=5.0)
        >>> queue.due(4.0), [each.body for each in queue.due(5.0)], len(queue)
        ([], [b'a'], 0)
    """

    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Delivery]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> float | None:
        """When the next one is due."""
        return self._heap[0][0] if self._heap else None

    def add(self, delivery: Delivery, *, due: float) -> None:
        """Keep one until then."""
        heapq.heappush(self._heap, (due, next(self._numbers), delivery))

    def due(self, now: float) -> list[Delivery]:
        """Take those whose time has come, the longest due first."""
        found: list[Delivery] = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[2])
        return found

    def forget(self, epoch: Epoch | None) -> list[Delivery]:
        """Take those of an epoch, or all when None, whose attempt nobody will make."""
        gone = [each for *_, each in self._heap if epoch is None or each.epoch is epoch]
        if gone:
            self._heap = [each for each in self._heap if not (epoch is None or each[2].epoch is epoch)]
            heapq.heapify(self._heap)
        return gone
