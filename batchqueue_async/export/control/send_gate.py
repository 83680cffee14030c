"""Whether anything may be sent now: the breaker, the pause after refused credentials, the time that was asked for.

Pure. The pause is a second breaker, which opens at the first refusal and never ramps: one batch tries the credentials
again, and as long as they are refused nothing else moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.export.control.breaker import REFUSED, Breaker
from batchqueue_async.export.policies import BreakerPolicy

if TYPE_CHECKING:
    from batchqueue_async.export.config import ExportConfig


class SendPermit(NamedTuple):
    """Leave for one send: tickets of the breaker and of the pause."""

    health: int
    auth: int


class SendGate:
    """The one place that every send passes.

    Attributes:
        health: the circuit breaker.
        auth: the pause after an `AuthError`.
        held_until: the loop's time before which the destination asked to be left alone.
    """

    __slots__ = ("_plain", "auth", "health", "held_until")

    def __init__(self, config: ExportConfig) -> None:
        self.health = Breaker(config.breaker)
        self.auth = Breaker(BreakerPolicy(threshold=1, reset_timeout=config.auth_pause, ramp=False))
        self.held_until = 0.0
        self._plain = SendPermit(self.health.generation, self.auth.generation)
        """The leave that all sends have while nothing is wrong: the one that is given and taken quickly."""

    def reconfigure(self, config: ExportConfig) -> None:
        """Go by other policies from the next failure on."""
        self.health.reconfigure(config.breaker)
        self.auth.reconfigure(BreakerPolicy(threshold=1, reset_timeout=config.auth_pause, ramp=False))

    def acquire(self, now: float) -> SendPermit | None:
        """Leave for one send, or None."""
        if now < self.held_until:
            return None
        if self.health.state == "closed" == self.auth.state:
            if self._plain != (self.health.generation, self.auth.generation):
                self._plain = SendPermit(self.health.generation, self.auth.generation)
            return self._plain
        auth = self.auth.acquire(now)
        if auth == REFUSED:
            return None
        health = self.health.acquire(now)
        if health == REFUSED:
            self.auth.release(auth)
            return None
        return SendPermit(health, auth)

    def is_valid(self, leave: SendPermit, now: float) -> bool:
        """Whether leave that was given earlier still is."""
        return now >= self.held_until and self.health.is_valid(leave.health) and self.auth.is_valid(leave.auth)

    def wait(self, now: float) -> float | None:
        """Seconds until it is worth to ask: 0 is now; None is when a probe has ended."""
        if now >= self.held_until and self.health.state == "closed" == self.auth.state:
            return 0.0
        health, auth = self.health.wait(now), self.auth.wait(now)
        if health is None or auth is None:
            return None
        return max(health, auth, self.held_until - now)

    def limit(self, full: int) -> int:
        """How many batches may be under way, of `full`."""
        return min(self.health.limit(full), self.auth.limit(full))

    def answered(self, leave: SendPermit) -> bool:
        """The destination took the batch, or refused it on its merits: it is well, and that may be news."""
        health, auth = self.health, self.auth
        if leave is self._plain and not health.failures and health.ramp is None:
            return False
        before = (health.state, auth.state)
        health.success(leave.health)
        auth.success(leave.auth)
        return before != (health.state, auth.state)

    def failed(self, leave: SendPermit, now: float, hold: float | None = None) -> None:
        """The destination is not well; it may have asked to be left alone for `hold` seconds."""
        self.health.failure(leave.health, now)
        self.auth.release(leave.auth)
        if hold is not None:
            self.held_until = max(self.held_until, now + hold)

    def throttled(self, leave: SendPermit, now: float, hold: float | None = None) -> None:
        """The destination answers, and asks for less: that says nothing about its health."""
        self.release(leave)
        if hold is not None:
            self.held_until = max(self.held_until, now + hold)

    def refused(self, leave: SendPermit, now: float) -> None:
        """Nothing can be sent as we are set up: the credentials are refused, or can't be read."""
        self.health.release(leave.health)
        self.auth.failure(leave.auth, now)

    def reset(self) -> None:
        """Let the next send try now, whatever there was to wait for."""
        self.health.reset()
        self.auth.reset()
        self.held_until = 0.0

    def release(self, leave: SendPermit) -> None:
        """The send came to no result."""
        if leave is self._plain:
            return
        self.health.release(leave.health)
        self.auth.release(leave.auth)
