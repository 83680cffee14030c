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
# Samples after a change before it is judged, and the share of the latency that counts as no faster.
_ENOUGH = 5
_NO_FASTER = 0.9


def moved(average: float | None, value: float, alpha: float) -> float:
    """A moving average with one value more.

    Example:
        >>> moved(None, 0.2, 0.5), moved(0.2, 0.4, 0.5)
        (0.2, 0.30000000000000004)
    """
    return value if average is None else average + alpha * (value - average)


class _Level:
    """The latency of batches of about one size: its moving average, and the best that it was."""

    __slots__ = ("average", "best")

    def __init__(self, seconds: float) -> None:
        self.average = self.best = seconds

    def note(self, seconds: float, alpha: float) -> None:
        self.average = moved(self.average, seconds, alpha)
        self.best = min(self.average, moved(self.best, self.average, _FORGET))


class Scaler:
    """The number of workers of one exporter.

    Batches are compared with batches of about their size: a full one takes longer than a single record, and that says
    nothing about the destination. Where the fewest workers have not made it faster, it was not for their number, and
    what it takes now is the new measure. In a lull the number returns to where it started.

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
        latency: the moving average over all sizes; None before the first success.
    """

    __slots__ = ("_before", "_changed", "_levels", "_policy", "_samples", "_start", "latency", "workers")

    def __init__(self, policy: AdaptivePolicy, workers: int) -> None:
        self._policy = policy
        self._start = self.workers = min(policy.most, max(policy.min_workers, workers))
        self.latency: float | None = None
        self._levels: dict[int, _Level] = {}
        self._changed = 0.0
        # The size, average and number of workers when latency last took some away.
        self._before: tuple[int, float, int] | None = None
        self._samples = 0

    def success(self, seconds: float, now: float, *, busy: bool, size: int = 1) -> None:
        """A batch of this size took so long; `busy` says that all workers were at work, and more is waiting."""
        policy = self._policy
        self.latency = moved(self.latency, seconds, policy.alpha)
        step = size.bit_length()
        level = self._levels.get(step)
        if level is None:
            level = self._levels[step] = _Level(seconds)
        else:
            level.note(seconds, policy.alpha)
        self._samples += 1
        if now - self._changed < policy.interval:
            return
        if level.average > policy.tolerance * level.best:
            self._slower(step, level, now)
        elif busy and self.workers < policy.most:
            self.workers += 1
            self._changed = now
        elif not busy and self.workers < self._start:
            calm = int((now - self._changed) / policy.interval)
            self.workers = min(self._start, self.workers + calm)
            self._changed = now

    def _slower(self, step: int, level: _Level, now: float) -> None:
        before = self._before
        if before is not None and before[0] == step and self._samples >= _ENOUGH:
            if level.average <= _NO_FASTER * before[1]:
                self._before = None
            elif self.workers == self._policy.min_workers:
                self.workers, self._before, self._changed = before[2], None, now
                self._levels.clear()
                return
        if self._before is None:
            self._before = (step, level.average, self.workers)
        self._less(now)

    def failure(self, now: float) -> None:
        """The destination was not well."""
        self._before = None
        if now - self._changed >= self._policy.interval:
            self._less(now)

    def _less(self, now: float) -> None:
        self.workers = max(self._policy.min_workers, int(self.workers * self._policy.decrease))
        self._changed = now
        self._samples = 0
