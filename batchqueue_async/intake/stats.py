"""What a consumer says of itself: counts that add up at every instant, readable from every thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    S = TypeVar("S")

State = Literal["new", "connecting", "running", "paused", "draining", "closed"]
"""Where a consumer is in its life."""

_LOOKS = 1_000


class Counters:
    """The running counts of one consumer; changed by its loop alone.

    `received` and the outcomes only grow, and what waits is what is left, so that no message can be counted twice or
    not at all. Between `begin` and `end` of a change `_version` is odd: a thread that reads meanwhile looks again.

    Example:
        >>> counts = Counters()
        >>> with counts:
        ...     counts.received += 3
        ...     counts.in_flight += 1
        >>> counts.buffered
        2
    """

    __slots__ = (
        "_version",
        "acked",
        "commits",
        "dead_lettered",
        "dropped",
        "failures",
        "forward_errors",
        "in_flight",
        "lost",
        "rebalances",
        "received",
        "reconnects",
        "redelivered",
        "released",
        "retried",
        "settle_errors",
        "stale",
        "waiting",
    )

    def __init__(self) -> None:
        self._version = 0
        self.received = self.acked = self.retried = self.dead_lettered = self.released = self.stale = 0
        self.waiting = self.in_flight = 0
        self.failures = self.dropped = self.settle_errors = self.forward_errors = self.reconnects = self.lost = 0
        self.redelivered = self.rebalances = self.commits = 0

    def __enter__(self) -> None:
        self._version += 1

    def __exit__(self, *_: object) -> None:
        self._version += 1

    @property
    def settled(self) -> int:
        """Messages that have their outcome."""
        return self.acked + self.retried + self.dead_lettered + self.released + self.stale

    @property
    def buffered(self) -> int:
        """Messages that wait for a handler."""
        return self.received - self.settled - self.waiting - self.in_flight

    def read(self, look: Callable[[], S]) -> S:
        """Read several counts as they were at one instant, from any thread."""
        for _ in range(_LOOKS):
            version = self._version
            found = look()
            if version == self._version and not version & 1:
                return found
            time.sleep(0)  # the loop's thread is amid a change: let it finish
        return look()


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeStats:
    """A consumer at one moment.

    `received == acked + retried + dead_lettered + released + stale + buffered + waiting + in_flight`, always.

    Example:
        >>> IntakeStats(name="orders", state="running", workers=8, prefetch=80, received=5, acked=3, in_flight=2).acked
        3

    Attributes:
        name: the consumer's name.
        state: `new`, `connecting`, `running`, `paused`, `draining` or `closed`.
        workers: handlers that may run at once now; prefetch: messages that may be held.
        received: messages taken from the broker, repetitions included.
        acked: handled and acknowledged.
        retried: given to the broker for a later attempt.
        dead_lettered: given up: published to the dead letters and acknowledged, or dropped with `DROP`.
        released: given back unhandled, by our own stop.
        stale: forgotten, as their connection or assignment was over: the broker delivers them again.
        buffered: waiting for a handler; waiting: for their next attempt here; in_flight: with a handler, or handled and
            not yet acknowledged.
        held_bytes: the bytes of those three.
        failures: calls of the handler, or messages of a batch, that failed.
        dropped: those of the dead-lettered that were dropped.
        settle_errors: acknowledgements that could not be written; forward_errors: attempts to publish a dead letter or
            a retry that failed.
        lost: messages that the broker says are gone, unhandled: trimmed from a stream.
        redelivered: those of the received that came again, as far as the broker, or their own header, says.
        reconnects: sessions after the first.
        rebalances: times that a consumer group took partitions away, to share them out anew; Kafka's alone.
        commits: commits of offsets that the broker took; Kafka's alone. Those it refused are among `settle_errors`.
        keys: lanes with messages in them.
        lag: messages that wait at the broker, as far as that is known.
        oldest_in_flight: seconds that the handler call that has run longest has taken.
        last_message: seconds since a message came; None before the first.
        last_outcome: seconds since a message had its outcome; likewise.
        last_error: the class of the last failure, of a handler or of the connection.
        paused_for: why nothing is handled now: `user`, `downstream`, `dead_letters`; empty while it is.
    """

    name: str
    state: State
    workers: int
    prefetch: int
    received: int = 0
    acked: int = 0
    retried: int = 0
    dead_lettered: int = 0
    released: int = 0
    stale: int = 0
    buffered: int = 0
    waiting: int = 0
    in_flight: int = 0
    held_bytes: int = 0
    failures: int = 0
    dropped: int = 0
    settle_errors: int = 0
    forward_errors: int = 0
    lost: int = 0
    redelivered: int = 0
    reconnects: int = 0
    rebalances: int = 0
    commits: int = 0
    keys: int = 0
    lag: int | None = None
    oldest_in_flight: float = 0.0
    last_message: float | None = None
    last_outcome: float | None = None
    last_error: str | None = None
    paused_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeReport:
    """What became of the messages of a consumer, when it has ended.

    Example:
        >>> IntakeReport(acked=10, retried=0, dead_lettered=1, released=2, stale=0, elapsed=0.1).released
        2

    Attributes:
        acked, retried, dead_lettered, released, stale: as in `IntakeStats`, over its whole life.
        abandoned: handler calls that did not end when they were cancelled; their messages have no outcome here, and are
            the broker's again with the end of the connection.
        elapsed: seconds that the stop took.
    """

    acked: int
    retried: int
    dead_lettered: int
    released: int
    stale: int
    abandoned: int = 0
    elapsed: float = 0.0
