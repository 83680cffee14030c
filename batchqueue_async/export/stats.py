"""What an exporter tells about itself: cheap counts inside, frozen snapshots outside."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple

from batchqueue_async.queue.stats import Distribution, Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchqueue_async.durable.stats import DurableStats
    from batchqueue_async.export.control.breaker import BreakerState


NEWEST_DEAD = 20
"""How many of the newest dead letters `ExporterStats` names."""


class DeadBatch(NamedTuple):
    """Records that were given up together, without the records.

    Example:
        >>> DeadBatch(at=1_700_000_000.0, records=2, reason="PermanentError: 400").records
        2

    Attributes:
        at: when, in seconds since the epoch.
        records: how many.
        reason: why, in the sink's own words.
    """

    at: float
    records: int
    reason: str


def kind_of(reason: str) -> str:
    """The kind of a reason for giving up: the class of the error, or "exhausted" where attempts or time were over.

    Example:
        >>> kind_of("PermanentError: 400"), kind_of("5 attempts, and max_attempts=5; the last was ...")
        ('PermanentError', 'exhausted')
    """
    name = reason.partition(":")[0]
    return name if name.isidentifier() else "exhausted"


class Counters:
    """The running counts of one exporter; touched by its loop alone."""

    __slots__ = (
        "accepted",
        "accepted_batches",
        "backoff",
        "dead_kinds",
        "dead_lettered",
        "delivered",
        "delivered_batches",
        "delivered_bytes",
        "disk_full",
        "failover_in",
        "failover_out",
        "failures",
        "forwarded",
        "isolations",
        "last_error",
        "last_error_at",
        "last_success_at",
        "latency",
        "newest_dead",
        "pauses",
        "refused",
        "retries",
        "retry_failures",
        "retry_successes",
        "send_seconds",
        "sending",
        "skipped",
        "splits",
    )

    def __init__(self) -> None:
        self.accepted = self.accepted_batches = self.refused = 0
        self.delivered = self.delivered_batches = self.skipped = self.dead_lettered = 0
        self.retries = self.retry_successes = 0
        self.retry_failures: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.splits = self.isolations = self.pauses = self.disk_full = 0
        self.failover_in = self.failover_out = 0
        self.sending = 0
        self.forwarded = 0
        self.backoff = 0.0
        self.latency: float | None = None
        self.last_error: str | None = None
        self.last_error_at: float | None = None
        self.last_success_at: float | None = None
        self.delivered_bytes = 0
        self.send_seconds = Histogram()
        self.dead_kinds: Counter[str] = Counter()
        self.newest_dead: deque[DeadBatch] = deque(maxlen=NEWEST_DEAD)

    def given_up(self, records: int, why: str) -> None:
        """Records became dead letters."""
        self.dead_lettered += records
        self.dead_kinds[kind_of(why)] += records
        self.newest_dead.append(DeadBatch(time(), records, why))
        self.failed(why)

    def failed(self, why: str) -> None:
        """The sink refused something, in these words."""
        self.last_error = why
        self.last_error_at = time()

    def answered(self, seconds: float) -> None:
        """A send was answered after this time."""
        self.send_seconds.record(seconds)
        self.last_success_at = time()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterStats:
    """An exporter at one moment.

    `accepted + recovered == delivered + dead_lettered + dropped_after + failover_evicted + records + failover_records +
    undelivered`, where records under way count among `records`, and `undelivered` is 0 before the end.

    Example:
        >>> import asyncio, batchqueue_async as bq
        >>> from batchqueue_async.sinks.memory import MemorySink
        >>> async def main() -> None:
        ...     async with bq.Exporter(MemorySink()) as exporter:
        ...         await exporter.consume(["a", "b"])
        ...         await exporter.flush()
        ...         stats = exporter.stats()
        ...         print(stats.accepted, stats.delivered, stats.records, stats.breaker)
        >>> asyncio.run(main())
        2 2 0 closed

    Attributes:
        name: the exporter's name.
        accepted: records that `consume` confirmed; accepted_batches: the calls of which any came in.
        recovered: records that were on disk when the exporter was opened.
        refused: records that `consume` did not take, since there was no room.
        delivered: records that the sink took; delivered_batches: its sends that succeeded, parts of batches included;
            delivered_bytes: their bytes, as `bytes` counts those of records.
        skipped: those of the delivered that the destination had already, by their keys.
        dead_lettered: records that were given up.
        dead_kinds: those that were given up in this run, by the class of the error, or "exhausted" where attempts or
            time were over; newest_dead: the last batches of them, without the records.
        dropped: records dropped by the send queue's bounds, by reason: `oldest`, `max_age`; `newest` and `too_large`,
            which were never accepted.
        records: records in the send queue, those under way included.
        bytes: their bytes, in memory with 64 more for each; on disk, of the whole directory.
        max_records: the bound on them, or None.
        max_bytes: likewise.
        utilization: the fuller of the two, 0 to 1.
        disk_available_bytes: what the file system has left, when it was last asked; None without a path.
        disk_full: calls of `consume` that met a full disk or quota, likewise.
        retries: batches sent again; retry_successes: those of them that the sink took.
        retry_failures: those that failed again, by kind of error: `throttled`, `timeout`, `refused`, `network`,
            `server`, `retryable`, `auth`, `config`, `too_large`, `permanent`, `unexpected`, or a word of
            the sink's own.
        failures: all sends that failed, by kind.
        last_error: the last failure in the sink's own words; None before the first. last_error_at: when that was, in
            seconds since the epoch; last_success_at: when the sink last answered a send.
        oldest_age: an upper bound, in seconds, on how long the oldest record has been in the send queue; 0 when empty.
        next_send_in: seconds until anything may be sent again: 0 while nothing keeps it, None while a probe is out.
        send_seconds: how long the sink took to answer.
        splits: batches halved because they were too large; isolations: because they held what is refused for good.
        backoff: seconds that the batch that failed last is put off.
        breaker: the circuit breaker's state.
        breaker_opens: how often it opened.
        breaker_rejected: how often it kept a batch from being sent.
        paused: whether the destination refuses our credentials; pauses: how often it did.
        stuck: records that fail again and again with errors of classes that say nothing of repetition, one at a time or
            as the batch that their sink needs them to stay in.
        workers_active: batches under way; workers_total: how many may be.
        preparers_active: batches that are being prepared; senders_active: batches that are with a sender.
        sends_in_flight: calls of the sink that have not returned.
        learned_rate: sends per second that the destination seems to take, where it refused some; else None.
        undelivered: after the end, without a path, the records that are in the report.
        latency: the moving average of the sink's latency in seconds; None before the first success.
        failover_records, failover_entries, failover_bytes: what is in the failover queue.
        failover_in, failover_out, failover_evicted: records that came into it, left it delivered, or had to make room.
        durable: the durable send queue's own counts, or None.
    """

    name: str
    accepted: int = 0
    accepted_batches: int = 0
    recovered: int = 0
    refused: int = 0
    delivered: int = 0
    delivered_batches: int = 0
    skipped: int = 0
    dead_lettered: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    records: int = 0
    bytes: int = 0
    max_records: int | None = None
    max_bytes: int | None = None
    utilization: float = 0.0
    disk_available_bytes: int | None = None
    disk_full: int = 0
    retries: int = 0
    retry_successes: int = 0
    retry_failures: Mapping[str, int] = field(default_factory=dict[str, int])
    failures: Mapping[str, int] = field(default_factory=dict[str, int])
    splits: int = 0
    isolations: int = 0
    backoff: float = 0.0
    breaker: BreakerState = "closed"
    breaker_opens: int = 0
    breaker_rejected: int = 0
    paused: bool = False
    pauses: int = 0
    stuck: int = 0
    workers_active: int = 0
    workers_total: int = 0
    preparers_active: int = 0
    senders_active: int = 0
    sends_in_flight: int = 0
    latency: float | None = None
    last_error: str | None = None
    last_error_at: float | None = None
    last_success_at: float | None = None
    oldest_age: float = 0.0
    next_send_in: float | None = 0.0
    send_seconds: Distribution = field(default_factory=Distribution, repr=False)
    delivered_bytes: int = 0
    dead_kinds: Mapping[str, int] = field(default_factory=dict[str, int])
    newest_dead: tuple[DeadBatch, ...] = field(default=(), repr=False)
    learned_rate: float | None = None
    undelivered: int = 0
    failover_records: int = 0
    failover_entries: int = 0
    failover_bytes: int = 0
    failover_in: int = 0
    failover_out: int = 0
    failover_evicted: int = 0
    durable: DurableStats | None = field(default=None, repr=False)

    @property
    def adds_up(self) -> bool:
        """Whether every record that was accepted is in exactly one place."""
        gone = self.delivered + self.dead_lettered + self.dropped_after + self.failover_evicted + self.undelivered
        return self.accepted + self.recovered == gone + self.records + self.failover_records

    @property
    def dropped_after(self) -> int:
        """Records dropped after they were accepted."""
        return sum(count for reason, count in self.dropped.items() if reason not in {"newest", "too_large"})

    @property
    def healthy(self) -> bool:
        """Whether sending is neither paused nor held up by an open breaker, and no record is stuck."""
        return not self.paused and self.breaker != "open" and not self.stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Records that an exporter gave up, as its report has them.

    Example:
        >>> GivenUp(records=["secret"], reason="PermanentError: 400")
        GivenUp(reason='PermanentError: 400')

    Attributes:
        records: the records.
        reason: why.
    """

    records: Sequence[Any] = field(repr=False)
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What became of the records of an exporter, up to the end of its shutdown.

    Example:
        >>> ExportReport(name="spans", delivered=8, undelivered=["late"], elapsed=30.0).complete
        False

    Attributes:
        name: the exporter's name.
        delivered: records that the sink took.
        dead_lettered: records that were given up.
        undelivered: without a path, the records that the deadline left over, in their order; some of them may have
            been delivered by a send that was cut off.
        on_disk: with a path, how many records stay there for the next opening.
        elapsed: seconds that the shutdown took.
        dropped: records dropped by the bounds, by reason.
        given_up: without a path, what was given up: the newest 1,000 records of it, up to 16 MiB.
    """

    name: str
    delivered: int = 0
    dead_lettered: int = 0
    undelivered: list[Any] = field(default_factory=list[Any], repr=False)
    on_disk: int = 0
    elapsed: float = 0.0
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    given_up: Sequence[GivenUp] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing was left over."""
        return not self.undelivered and not self.on_disk
