"""From single calls to what a `Scaler` is made for: their mean over a moment, by the size of the batch. Pure.

A scaler forgets with every sample how fast the destination once was. Exporters send some batches a second; a pool may
make thousands of calls, and would have forgotten within a second what it should hold a slowdown against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchqueue_async.export.control.concurrency import Scaler

# Samples in one interval of the policy.
_SAMPLES = 5


class Pacer:
    """Tells a scaler now and then how long calls take, and whether more is waiting than workers can take.

    Example:
        >>> from batchqueue_async.export.control.concurrency import Scaler
        >>> from batchqueue_async.export.policies import AdaptivePolicy
        >>> pacer = Pacer(Scaler(AdaptivePolicy(max_workers=4, interval=1.0), 2), interval=1.0)
        >>> pacer.ended(0.05, 0.0, busy=False), pacer.ended(0.07, 0.1, busy=True), pacer.workers
        (None, None, 2)
        >>> pacer.ended(0.06, 1.0, busy=False), pacer.workers
        (None, 3)
    """

    __slots__ = ("_busy", "_due", "_period", "_scaler", "_sums")

    def __init__(self, scaler: Scaler, interval: float) -> None:
        self._scaler = scaler
        self._period = interval / _SAMPLES
        self._due = 0.0
        self._busy = False
        # By the step of the batch's size: seconds and calls.
        self._sums: dict[int, list[float]] = {}

    @property
    def workers(self) -> int:
        """How many workers there may be now."""
        return self._scaler.workers

    def ended(self, seconds: float, now: float, *, busy: bool, size: int = 1) -> None:
        """A call has ended; `busy`: all workers were at work, and more is waiting."""
        self._busy = self._busy or busy
        step = size.bit_length()
        total = self._sums.get(step)
        if total is None:
            total = self._sums[step] = [0.0, 0.0]
        total[0] += seconds
        total[1] += 1.0
        if now < self._due:
            return
        for each, (spent, calls) in self._sums.items():
            self._scaler.success(spent / calls, now, busy=self._busy, size=1 << (each - 1))
        self._sums.clear()
        self._busy = False
        self._due = now + self._period

    def failed(self, now: float) -> None:
        """A call took longer than it may."""
        self._scaler.failure(now)
