"""When a failed batch is sent again: pure arithmetic over attempts, ages and time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from batchqueue_async.export.policies import RetryBudget, RetryPolicy

# 2.0 ** 1000 is still a float; no cap is reached later.
_MOST_DOUBLINGS = 1000
_SPREAD = 0.1
# Tokens come in fractions: without some tolerance the last of them would take for ever.
_NOISE = 1e-6
_LEAST = 1e-3
_HORIZON = 10.0


class Backoff:
    """The delays of one exporter.

    Example:
        >>> from random import Random
        >>> from batchqueue_async.export.policies import RetryPolicy
        >>> backoff = Backoff(RetryPolicy(jitter=False), Random(1))
        >>> [backoff.delay(attempts) for attempts in (1, 2, 3, 10)]
        [5.0, 10.0, 20.0, 300.0]
    """

    def __init__(self, policy: RetryPolicy, random: Random) -> None:
        self._policy = policy
        self._random = random

    def ceiling(self, attempts: int) -> float:
        """The longest delay after so many attempts."""
        policy = self._policy
        try:
            grown = policy.initial * policy.multiplier ** min(max(0, attempts - 1), _MOST_DOUBLINGS)
        except OverflowError:
            return policy.max_delay
        return min(policy.max_delay, grown)

    def delay(self, attempts: int, retry_after: float | None = None) -> float:
        """Seconds to wait after so many attempts, and not less than the destination asked for, up to the cap.

        What the destination asked for is spread by up to a tenth, so that those that were asked alike don't return at
        once.
        """
        policy = self._policy
        ceiling = self.ceiling(attempts)
        own = self._random.uniform(0.0, ceiling) if policy.jitter else ceiling
        asked = self.asked(retry_after)
        if asked is None:
            return own
        spread = 1.0 + _SPREAD * self._random.random() if policy.jitter else 1.0
        return max(own, asked * spread)

    def asked(self, retry_after: float | None) -> float | None:
        """The destination's `retry_after` within the cap; None if it gave none that makes sense."""
        # What a sink's author put there may be anything: the text of a header, for one.
        if not isinstance(retry_after, int | float) or math.isnan(retry_after) or retry_after < 0:
            return None
        return min(retry_after, self._policy.max_delay)

    def exhausted(self, attempts: int, age: float) -> str | None:
        """Why a record that failed is not sent again, or None."""
        policy = self._policy
        if policy.max_attempts is not None and attempts >= policy.max_attempts:
            return f"{attempts} attempts, and max_attempts={policy.max_attempts}"
        if policy.max_age is not None and age >= policy.max_age:
            return f"{age:.0f} s old, and max_age={policy.max_age}"
        return None


class Budget:
    """The tokens of a `RetryBudget`.

    Example:
        >>> from batchqueue_async.export.policies import RetryBudget
        >>> budget = Budget(RetryBudget(per_second=2.0, burst=1), now=0.0)
        >>> budget.take(0.0), budget.take(0.0), budget.take(0.5)
        (0.0, 0.5, 0.0)
    """

    def __init__(self, policy: RetryBudget, now: float) -> None:
        self._policy = policy
        self._tokens = float(policy.burst)
        self._then = now
        self._promised = 0.0

    def take(self, now: float) -> float:
        """Take a token: 0, or the seconds until there is one, and none was taken."""
        policy = self._policy
        if now > self._then:
            self._add((now - self._then) * policy.per_second)
            self._then = now
        if self._tokens >= 1.0 - _NOISE:
            self._tokens -= 1.0
            return 0.0
        # Those who wait are told different times, a token apart, or they would all return for the same one.
        slot = max(now + (1.0 - self._tokens) / policy.per_second, self._promised + 1.0 / policy.per_second)
        self._promised = min(slot, now + _HORIZON)
        return max(_LEAST, self._promised - now)

    def give_back(self) -> None:
        """The repetition succeeded, or never was."""
        self._add(1.0)

    def earn(self) -> None:
        """A batch was delivered at its first attempt."""
        self._add(self._policy.share)

    def _add(self, tokens: float) -> None:
        self._tokens = min(float(self._policy.burst), self._tokens + tokens)
