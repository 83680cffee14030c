"""The circuit breaker: a state machine that is asked before each send and told of each result. Pure.

    closed -- threshold failures in a row --> open -- reset_timeout --> half open -- the probe succeeds --> closed
                                                ^                          |
                                                +-- the probe fails -------+

Whoever may send gets a ticket, and the result comes back with it. A ticket of an earlier state has no say any more:
what was sent before the breaker opened must not close it, nor end a probe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from batchqueue_async.export.policies import BreakerPolicy

BreakerState = Literal["closed", "open", "half_open"]
REFUSED = 0


class Breaker:
    """One breaker; time comes in as an argument.

    Example:
        >>> from batchqueue_async.export.policies import BreakerPolicy
        >>> breaker = Breaker(BreakerPolicy(threshold=1, reset_timeout=30.0))
        >>> breaker.failure(breaker.acquire(0.0), 0.0)
        >>> breaker.acquire(29.0), breaker.wait(29.0)
        (0, 1.0)
        >>> probe = breaker.acquire(30.0)
        >>> breaker.acquire(30.0), breaker.state
        (0, 'half_open')
        >>> breaker.success(probe)
        >>> breaker.state
        'closed'

    Attributes:
        state: what it is.
        opens: how often it opened.
        rejected: how many sends it refused.
        failures: failures in a row, while closed.
        generation: the ticket of what it is now.
        ramp: while it recovers, how many sends may be under way; else None.
    """

    __slots__ = (
        "_enabled",
        "_policy",
        "_probing",
        "_until",
        "failures",
        "generation",
        "opens",
        "ramp",
        "rejected",
        "state",
    )

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._enabled = policy.enabled
        self.generation = 1
        self._until = 0.0
        self._probing = False
        self.ramp: int | None = None
        self.state: BreakerState = "closed"
        self.failures = 0
        self.opens = 0
        self.rejected = 0

    def acquire(self, now: float) -> int:
        """A ticket for one send, or `REFUSED`."""
        if self.state == "closed":
            return self.generation
        if self._probing or now < self._until:
            self.rejected += 1
            return REFUSED
        self.state = "half_open"
        self._probing = True
        self.generation += 1
        return self.generation

    def count_rejected(self) -> None:
        """A batch was kept from being sent, unless the breaker is closed."""
        self.rejected += self.state != "closed"

    def is_valid(self, ticket: int) -> bool:
        """Whether a ticket still lets a send pass: nothing has changed since."""
        return ticket == self.generation and self.state != "open"

    def wait(self, now: float) -> float | None:
        """Seconds until it is worth to ask again: 0 is now, None is when the probe has ended."""
        if self.state == "closed":
            return 0.0
        if self._probing:
            return None
        return max(0.0, self._until - now)

    def success(self, ticket: int) -> None:
        """The destination took it, or answered that it won't: it is well."""
        if ticket != self.generation:
            return
        self.failures = 0
        if self.state == "closed":
            if self.ramp is not None:
                self.ramp += 1
            return
        self.state = "closed"
        self._probing = False
        self.generation += 1
        self.ramp = 1 if self._policy.ramp else None

    def failure(self, ticket: int, now: float) -> None:
        """The destination is not well."""
        if ticket != self.generation or not self._enabled:
            return
        self.failures += 1
        if self.state != "closed" or self.failures >= self._policy.threshold:
            self.trip(now)

    def release(self, ticket: int) -> None:
        """The send came to no result; if it was the probe, the next one is."""
        if ticket == self.generation and self._probing:
            self._probing = False
            self.generation += 1

    def trip(self, now: float) -> None:
        """Open it, whatever it was."""
        self.state = "open"
        self.opens += 1
        self.failures = 0
        self._probing = False
        self.ramp = None
        self.generation += 1
        self._until = now + self._policy.reset_timeout

    def reconfigure(self, policy: BreakerPolicy) -> None:
        """Go by another policy from the next failure on; one that is switched off lets the next send try."""
        self._policy = policy
        self._enabled = policy.enabled
        if not policy.enabled:
            self.reset()

    def reset(self) -> None:
        """Let the next send be a probe now, rather than after `reset_timeout`."""
        self._until = 0.0

    def limit(self, full: int) -> int:
        """How many sends may be under way, of `full`: one for the probe, then one more with each success."""
        if self.state != "closed":
            return 1
        if self.ramp is None:
            return full
        if self.ramp >= full:
            self.ramp = None
            return full
        return self.ramp
