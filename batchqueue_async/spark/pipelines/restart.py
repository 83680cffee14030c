"""When a query that died is started again: a pure decision, by the clock that it is given."""

from __future__ import annotations

from dataclasses import dataclass

from batchqueue_async._support.checks import (
    Checkup,
    Duration,
    Real,
    Rule,
    Seconds,
    Whole,
    default,
    named_fields,
    settle,
)


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a streaming query that died is started again from its checkpoint, and when no more.

    Attributes:
        attempts: starts again in a row before it is given up; 0 never starts one again.
        initial: seconds before the first.
        multiplier: by which the delay grows with each.
        max_delay: the longest delay.
        reset_after: seconds that a query has to run before its failures are forgotten.

    Example:
        >>> RestartPolicy(attempts=3, initial="2s").initial
        2.0
    """

    attempts: int = 5
    initial: Duration = default(1.0)
    multiplier: float = 2.0
    max_delay: Duration = default(60.0)
    reset_after: Duration = default(600.0)

    def __post_init__(self) -> None:
        settle(self, RESTART_RULES)
        Checkup("restart", self, RESTART_RULES).finish()

    def delay(self, failures: int) -> float:
        """Seconds before the start that follows a number of failures in a row.

        Example:
            >>> [RestartPolicy(max_delay="3s").delay(failures) for failures in (1, 2, 3)]
            [1.0, 2.0, 3.0]
        """
        return min(self.initial * self.multiplier ** min(failures - 1, 64), self.max_delay)


RESTART_RULES: dict[str, Rule] = {
    "attempts": Whole(least=0, most=1_000_000),
    "initial": Seconds(above=False),
    "multiplier": Real(least=1.0, above=False),
    "max_delay": Seconds(above=False),
    "reset_after": Seconds(above=False),
}


class Restarts:
    """The failures of one query, and what follows from each.

    Example:
        >>> restarts = Restarts(RestartPolicy(attempts=1))
        >>> restarts.started(now=0.0)
        >>> restarts.failed(now=5.0), restarts.failed(now=5.5)
        (6.0, None)
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._since: float | None = None
        self.in_a_row = 0
        self.total = 0

    def started(self, now: float) -> None:
        """The query runs."""
        self._since = now

    def failed(self, now: float) -> float | None:
        """The query died, or did not start: when to start it again; None gives it up."""
        if self._since is not None and now - self._since >= self._policy.reset_after:
            self.in_a_row = 0
        self._since = None
        self.in_a_row += 1
        self.total += 1
        return None if self.in_a_row > self._policy.attempts else now + self._policy.delay(self.in_a_row)
