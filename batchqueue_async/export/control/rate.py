"""How fast sends may follow each other: limits that were configured, and one that is learned from refusals. Pure.

The learned limit is what the destination took since it last refused, a little less; it then rises slowly, faster the
longer nothing is refused, and is forgotten when it has not been needed for a while.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchqueue_async.export.policies import RatePolicy

# An estimate over less than this is not one: what was let through at once was saved up. Over more than this it would
# be one of the past, when less was sent.
_ESTIMATED_OVER = 0.5
_RECENT = 5.0
_BUCKETS_PER_SECOND = 4.0
# What is kept of an estimate, of a first guess, and of a limit that was refused soon after a pause, later and late.
_BELOW_ESTIMATE = 0.97
_BLIND_STEP = 0.7
_KEPT = ((2.0, 0.7), (10.0, 0.85), (math.inf, 0.97))
_GROWTH = 0.002
_GROWTH_DOUBLES = 60.0
# By how many times the time of a pause that was asked for the growth is slower: each refusal costs one.
_CAUTION = 8.0
_FORGOTTEN_AFTER = 900.0
_LEAST = 0.1
_MOST_GROWTH = 0.5


class _Spacing:
    """Times for sends, one after the other, so that no more than `rate` units go per second."""

    __slots__ = ("free", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free = -math.inf

    def reserve(self, now: float, units: float) -> float:
        """The next time at which so many units may go."""
        start = max(now, self.free)
        self.free = start + units / self.rate
        return start


class SendRate:
    """The pace of one exporter.

    Example:
        >>> from batchqueue_async.export.policies import RatePolicy
        >>> rate = SendRate(RatePolicy(requests=10.0), now=0.0)
        >>> [round(rate.reserve(0.0, 1_000), 2) for _ in range(3)]
        [0.0, 0.1, 0.2]

    Attributes:
        learned: requests per second that the destination seems to take; None while it takes all.
    """

    def __init__(self, policy: RatePolicy, now: float) -> None:
        self._requests = None if policy.requests is None else _Spacing(policy.requests)
        self._bytes = None if policy.bytes is None else _Spacing(policy.bytes)
        self._learn = policy.learn
        self._spacing: _Spacing | None = None
        # The requests that were taken, by quarters of a second: each with its beginning.
        self._taken: deque[tuple[float, int]] = deque()
        self._since = now
        self._refused_at = -math.inf
        self._hold = 0.0
        self._grown_at = now

    @property
    def learned(self) -> float | None:
        """Requests per second that the destination seems to take; None while it takes all."""
        return None if self._spacing is None else self._spacing.rate

    @property
    def unlimited(self) -> bool:
        """Whether nothing is to be waited for."""
        return self._spacing is None and self._requests is None and self._bytes is None

    def reserve(self, now: float, size: int) -> float:
        """Seconds until a request of so many bytes may go; it is counted as sent then."""
        start = now
        if self._spacing is not None:
            self._grow(now)
        if self._spacing is not None:
            start = max(start, self._spacing.reserve(now, 1))
        if self._requests is not None:
            start = max(start, self._requests.reserve(now, 1))
        if self._bytes is not None:
            start = max(start, self._bytes.reserve(now, size))
        return start - now

    def answered(self, now: float) -> None:
        """The destination took a request."""
        taken = self._taken
        if taken and now - taken[-1][0] < 1.0 / _BUCKETS_PER_SECOND:
            taken[-1] = taken[-1][0], taken[-1][1] + 1
            return
        taken.append((now, 1))
        while now - taken[0][0] > _RECENT:
            taken.popleft()

    def refused(self, now: float, sent_at: float, hold: float = 0.0) -> None:
        """The destination asked for less, and for a pause of `hold` seconds.

        What was sent before it last said so says nothing new.
        """
        if not self._learn or sent_at < self._refused_at:
            return
        spacing = self._spacing
        over = now - self._since
        recent = min(over, _RECENT)
        taken = sum(count for start, count in self._taken if start >= now - recent)
        if spacing is None:
            share = _BELOW_ESTIMATE if over >= _ESTIMATED_OVER and taken else _BLIND_STEP
            limit = share * max(taken / max(recent, 1e-3), 1.0 if share == _BLIND_STEP else 0.0)
        elif over < _ESTIMATED_OVER and now - self._refused_at < _ESTIMATED_OVER:
            limit = spacing.rate  # too soon to know more
        else:
            # After a pause more is taken than can last, so that soon after it an estimate is too high.
            limit = spacing.rate * (next(kept for most, kept in _KEPT if over < most) if hold else _BELOW_ESTIMATE)
            used = spacing.free >= now - 1.0 / spacing.rate
            if used and over >= _ESTIMATED_OVER and taken:
                limit = min(limit, _BELOW_ESTIMATE * taken / recent)
        if spacing is None or over >= _ESTIMATED_OVER or now - self._refused_at >= _ESTIMATED_OVER:
            self._since = now + hold
            self._taken.clear()
        self._refused_at = self._grown_at = now
        self._hold = hold
        if spacing is None:
            self._spacing = _Spacing(max(_LEAST, limit))
        else:
            spacing.rate = max(_LEAST, limit)

    def _grow(self, now: float) -> None:
        spacing = self._spacing
        if spacing is None:
            return
        calm = now - self._refused_at
        if calm > _FORGOTTEN_AFTER:
            self._spacing = None
            return
        elapsed, self._grown_at = now - self._grown_at, now
        doubles = _GROWTH_DOUBLES * max(1.0, self._hold)
        speed = min(_MOST_GROWTH, _GROWTH * 2.0 ** min(calm / doubles, 30.0) / max(1.0, _CAUTION * self._hold))
        # A limit that is not used says nothing of what there would be room for.
        if spacing.free >= now - 1.0 / spacing.rate:
            spacing.rate *= math.exp(speed * min(elapsed, 1.0))
