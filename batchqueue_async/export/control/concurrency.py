"""How many workers the destination bears: additive increase, multiplicative decrease. Pure.

The latency that counts is a moving average (EWMA); what it is held against is the best that the destination has
shown, which is forgotten slowly, so that a destination that has become slower for good is not held against its youth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchqueue_async.export.policies import AdaptivePolicy

EWMA = 0.3
_FORGET = 0.01


def moved(average: float | None, value: float, alpha: float) -> float:
    """A moving average with one value more.

    Example:
        >>> moved(None, 0.2, 0.5), moved(0.2, 0.4, 0.5)
        (0.2, 0.30000000000000004)
    """
    return value if average is None else average + alpha * (value - average)


class Scaler:
    """The number of workers of one exporter.

    Example:
        >>> from batchqueue_async.export.policies import AdaptivePolicy
        >>> scaler = Scaler(AdaptivePolicy(max_workers=4), 2)
        >>> scaler.success(0.05, 1.0, busy=True)
        >>> scaler.workers
        3
        >>> scaler.failure(2.0)
        >>> scaler.workers
        1

    Attributes:
        workers: how many there are now.
        latency: the moving average; None before the first success.
    """

    __slots__ = ("_best", "_changed", "_policy", "latency", "workers")

    def __init__(self, policy: AdaptivePolicy, workers: int) -> None:
        self._policy = policy
        self.workers = min(policy.most, max(policy.min_workers, workers))
        self.latency: float | None = None
        self._best: float | None = None
        self._changed = 0.0

    def success(self, seconds: float, now: float, *, busy: bool) -> None:
        """A batch took so long; `busy` says that all workers were at work, and more is waiting."""
        policy = self._policy
        self.latency = latency = moved(self.latency, seconds, policy.alpha)
        best = latency if self._best is None else min(latency, moved(self._best, latency, _FORGET))
        self._best = best
        if now - self._changed < policy.interval:
            return
        if latency > policy.tolerance * best:
            self._less(now)
        elif busy and self.workers < policy.most:
            self.workers += 1
            self._changed = now

    def failure(self, now: float) -> None:
        """The destination was not well."""
        if now - self._changed >= self._policy.interval:
            self._less(now)

    def _less(self, now: float) -> None:
        self.workers = max(self._policy.min_workers, int(self.workers * self._policy.decrease))
        self._changed = now
