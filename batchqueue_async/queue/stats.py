"""What a queue tells about itself: cheap counters inside, frozen snapshots outside."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchqueue_async._native import CounterFields, SizeFields

if TYPE_CHECKING:
    from batchqueue_async._support.last_error import LastError

STEPS = 4
"""Buckets per doubling: those of an OpenTelemetry histogram of scale 2, since the grid begins at a power of two."""
LOWEST = 2.0**-20
"""The upper edge of bucket 0, which holds what is not above it: about a millionth."""


class Counters(CounterFields):
    """The running counts of one queue; touched by its loop alone."""

    __slots__ = ("dropped_after", "dropped_at_door", "dropped_before", "failed", "refused", "unhandled")

    def __init__(self) -> None:
        self.refused = 0
        self.dropped_before = 0
        self.dropped_after = 0
        self.dropped_at_door = 0
        """Those of `dropped_after` that never reached a partition."""
        self.handled = 0
        self.failed = 0
        self.unhandled = 0


class Histogram:
    """Counts of positive values in buckets that grow by the fourth root of 2, so percentiles err by under 20 %.

    Bucket k holds values above `LOWEST * 2 ** ((k - 1) / STEPS)`, up to and including `LOWEST * 2 ** (k / STEPS)`.
    """

    __slots__ = ("buckets", "count", "largest", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self.buckets: dict[int, int] = {}

    def record(self, value: float, times: int = 1) -> None:
        """Count a value, once or several times."""
        self.count += times
        self.total += value * times
        self.largest = max(self.largest, value)
        place = math.ceil(math.log2(value / LOWEST) * STEPS) if value > LOWEST else 0
        self.buckets[place] = self.buckets.get(place, 0) + times

    def copy(self) -> Histogram:
        """The same counts, to be added to."""
        other = Histogram()
        other.buckets = self.buckets.copy()
        other.count, other.total, other.largest = self.count, self.total, self.largest
        return other

    def percentile(self, share: float) -> float:
        """The value that `share` of all values do not exceed, up to the width of its bucket."""
        buckets = sorted(self.buckets.copy().items())
        return _percentile(buckets, share * sum(count for _, count in buckets), self.largest)

    def summary(self) -> Distribution:
        """A frozen summary of what was counted so far; another thread may call it while values are counted."""
        total, largest = self.total, self.largest
        # A copy is one step of the interpreter. The count is that of the copy, so that the two always agree.
        buckets = sorted(self.buckets.copy().items())
        count = sum([times for _, times in buckets])
        if not count:
            return Distribution()
        return Distribution(
            count=count,
            mean=total / count,
            p50=_percentile(buckets, 0.50 * count, largest),
            p95=_percentile(buckets, 0.95 * count, largest),
            p99=_percentile(buckets, 0.99 * count, largest),
            max=largest,
            total=total,
            buckets=tuple(buckets),
        )


def _percentile(buckets: list[tuple[int, int]], wanted: float, largest: float) -> float:
    seen = 0
    for place, count in buckets:
        seen += count
        if seen >= wanted:
            return min(largest, LOWEST * 2 ** (place / STEPS))
    return 0.0


class Sizes(SizeFields):
    """Counts of whole numbers: exact while there are few different ones, by bucket beyond.

    Attributes:
        exact: how often each number came.
        last: a number that has come `times` more: a compiled hot path counts so what comes again and again.
        times: see `last`.
    """

    MOST_EXACT = 256

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self.last = self.times = 0
        self.exact: dict[int, int] = {}
        """How often each number came; a hot path counts here by itself, and calls `first` for one that is missing."""
        self._rest = Histogram()

    def first(self, size: int) -> None:
        """Count a number that is not in `exact`."""
        if len(self.exact) >= self.MOST_EXACT:
            self._fold()
        self.exact[size] = 1

    def undo(self, size: int) -> None:
        """Take back a number that was just counted."""
        if self.times and self.last == size:
            self.times -= 1
        elif self.exact.get(size, 0) > 1:
            self.exact[size] -= 1
        else:
            self.exact.pop(size, None)

    def _fold(self) -> None:
        for size, times in self.exact.items():
            self._rest.record(size, times)
        self.exact.clear()

    def summary(self) -> Distribution:
        """A frozen summary of what was counted so far; changes nothing, since other threads read it too."""
        everything = self._rest.copy()
        while True:
            last, more = self.last, self.times
            exact = list(self.exact.items())
            if self.last == last and self.times >= more:
                break  # else the hot path has moved them into `exact` meanwhile
        for size, times in exact:
            everything.record(size, times)
        if more:
            everything.record(last, more)
        return everything.summary()


@dataclass(frozen=True, slots=True)
class Distribution:
    """A summary of many values.

    Example:
        >>> Distribution().count
        0

    Attributes:
        count: how many values.
        mean: their mean.
        p50: the median, as the other percentiles exact to about 20 %.
        p95: the value that 95 % do not exceed.
        p99: the value that 99 % do not exceed.
        max: the largest, exact.
        total: their sum.
        buckets: how many values there are per bucket, as (k, count) with rising k, empty ones left out. Bucket k ends,
            inclusively, at `2 ** (k / 4 - 20)`; bucket 0 begins at 0.
    """

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    total: float = 0.0
    buckets: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def since(self, before: Distribution) -> Distribution:
        """What was counted after an earlier summary of the same values; `max` is the upper edge of its last bucket.

        Example:
            >>> histogram = Histogram()
            >>> histogram.record(1.0)
            >>> early = histogram.summary()
            >>> histogram.record(4.0, times=2)
            >>> late = histogram.summary().since(early)
            >>> late.count, late.p50, late.total
            (2, 4.0, 8.0)
        """
        known = dict(before.buckets)
        buckets = [(k, more) for k, times in self.buckets if (more := times - known.get(k, 0)) > 0]
        count = sum([times for _, times in buckets])
        if not count:
            return Distribution()
        largest = min(self.max, LOWEST * 2 ** (buckets[-1][0] / STEPS))
        total = max(0.0, self.total - before.total)
        return Distribution(
            count=count,
            mean=total / count,
            p50=_percentile(buckets, 0.50 * count, largest),
            p95=_percentile(buckets, 0.95 * count, largest),
            p99=_percentile(buckets, 0.99 * count, largest),
            max=largest,
            total=total,
            buckets=tuple(buckets),
        )


def used_ratio(used: int, capacity: int, used_bytes: int, capacity_bytes: int | None) -> float:
    """How full something is, from 0 to 1: by items or by bytes, whichever is more."""
    return max(used / capacity, used_bytes / capacity_bytes if capacity_bytes else 0.0)


@dataclass(frozen=True, slots=True)
class PartitionStats:
    """One partition at one moment.

    Example:
        >>> PartitionStats(index=0, used=30, capacity=40, accepted=100, owner=0, waiting=0).used_ratio
        0.75

    Attributes:
        index: its number, from 0.
        used: items waiting in it.
        capacity: items it can hold.
        accepted: items that have ever come in.
        owner: the number of the worker that drains it.
        waiting: producers in line for room.
        used_bytes: what the waiting items take, and those that are moving here; 0 without `buffer_bytes`.
        capacity_bytes: how many bytes it can hold; None without `buffer_bytes`.
    """

    index: int
    used: int
    capacity: int
    accepted: int
    owner: int
    waiting: int
    used_bytes: int = 0
    capacity_bytes: int | None = None

    @property
    def used_ratio(self) -> float:
        """How full the partition is, from 0 to 1: by items or by bytes, whichever is more."""
        return used_ratio(self.used, self.capacity, self.used_bytes, self.capacity_bytes)


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One drain task at one moment.

    Example:
        >>> WorkerStats(index=0, partitions=4, taken=1_000, busy=2.5, in_flight=10).taken
        1000

    Attributes:
        index: its number, from 0.
        partitions: how many partitions it owns.
        taken: items it has taken out of partitions.
        busy: seconds it has spent in rounds of handler calls.
        in_flight: items it has taken and not finished.
    """

    index: int
    partitions: int
    taken: int
    busy: float
    in_flight: int


@dataclass(frozen=True, slots=True)
class HandlerStats:
    """The calls of one handler so far; estimates, by one round in eight, where a round makes more than 64 calls.

    Example:
        >>> HandlerStats(name="Span", calls=4, items=1_000, failed=0, seconds=0.5).seconds
        0.5

    Attributes:
        name: the type's name, "consumer" or "fallback".
        calls: how many calls have ended.
        items: how many items they had.
        failed: items of calls that failed or timed out; exact.
        seconds: how long they took, the waits for their turn included.
        durations: how long each call took.
    """

    name: str
    calls: int
    items: int
    failed: int
    seconds: float
    durations: Distribution = field(default_factory=Distribution, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class QueueStats:
    """A queue at one moment.

    Example:
        >>> import asyncio, batchqueue_async as bq
        >>> async def main() -> None:
        ...     async def handle(batch: list[str]) -> None: ...
        ...     async with bq.BatchQueueManager() as manager:
        ...         queue = manager.create("words", bq.QueueConfig(consumer=handle))
        ...         await queue.produce_many(["to", "be"])
        ...         stats = queue.stats()
        ...         print(stats.accepted, "accepted,", stats.used, "waiting")
        >>> asyncio.run(main())
        2 accepted, 2 waiting

    The counts add up: `attempted == accepted + refused + dropped_before`, and
    `accepted == handled + failed + unhandled + dropped_after + undelivered + in_flight + used`.

    Attributes:
        name: the queue's name.
        attempted: items offered.
        accepted: items taken in: each is handled, given to `on_error`, counted, or named in the shutdown report.
        refused: items turned away because there was no room, the wait for it timed out, or the queue was closed.
        dropped: `dropped_before + dropped_after`.
        dropped_before: items turned away by `DROP_NEWEST`.
        dropped_after: accepted items that made room under `DROP_OLDEST`.
        handled: items whose handler call succeeded.
        failed: items whose handler call failed or timed out.
        unhandled: items that no handler takes.
        in_flight: items taken out of a partition whose handler call has not ended.
        undelivered: items that a shutdown gave back in its report; 0 before.
        used: items waiting in partitions.
        capacity: items that all partitions can hold.
        oldest_age: an upper bound, in seconds, on the age of the oldest waiting item; 0 when none waits.
        partitions: a snapshot of each partition.
        workers: a snapshot of each drain task.
        batch_sizes: items per handler call.
        loop_lag: seconds by which the queue's loop is late, as `peek` or a bridge saw it; else 0.
        queue_latency: seconds from produce to handler, measured once a round for the oldest item of the round.
        handlers: the calls of each handler.
        last_error: the newest error of a handler, its text without what could be payload; None if there was none.
        age: seconds since the numbers were read; above 0 only where `peek` found none that added up.
        used_bytes: what the waiting items take; 0 without `buffer_bytes`.
        capacity_bytes: how many bytes all partitions can hold; None without `buffer_bytes`.
        wake_ups: how often threads have woken the loop for what they put in; 0 without a bridge.
    """

    name: str
    attempted: int
    accepted: int
    refused: int
    dropped_before: int
    dropped_after: int
    handled: int
    failed: int
    unhandled: int
    in_flight: int
    undelivered: int
    used: int
    capacity: int
    oldest_age: float
    partitions: tuple[PartitionStats, ...] = field(repr=False)
    workers: tuple[WorkerStats, ...] = field(repr=False)
    batch_sizes: Distribution
    queue_latency: Distribution
    loop_lag: float = 0.0
    handlers: tuple[HandlerStats, ...] = field(default=(), repr=False)
    last_error: LastError | None = None
    age: float = 0.0
    used_bytes: int = 0
    capacity_bytes: int | None = None
    wake_ups: int = 0

    @property
    def adds_up(self) -> bool:
        """Whether every accepted item is in exactly one place."""
        done = self.handled + self.failed + self.unhandled + self.dropped_after + self.undelivered
        return self.accepted == done + self.in_flight + self.used

    @property
    def dropped(self) -> int:
        """Items lost to the strategy, before or after they were accepted."""
        return self.dropped_before + self.dropped_after

    @property
    def used_ratio(self) -> float:
        """How full the queue is, from 0 to 1: by items or by bytes, whichever is more."""
        return used_ratio(self.used, self.capacity, self.used_bytes, self.capacity_bytes)

    def top(self, n: int) -> tuple[PartitionStats, ...]:
        """The `n` fullest partitions, fullest first."""
        return tuple(sorted(self.partitions, key=lambda each: (-each.used, each.index))[:n])


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseUp:
    """What a page shows of a queue beyond its totals.

    Attributes:
        waits: seconds from produce to handler, as `QueueStats.queue_latency`.
        busy: workers with items in hand; workers: all of them.
        handlers: their names.
        partitions: how full each is, from 0 to 1, and the number of the worker that drains it.
        more_partitions: how many are not among them.
    """

    waits: Distribution
    busy: int
    workers: int
    handlers: tuple[str, ...]
    partitions: tuple[tuple[float, int], ...]
    more_partitions: int


@dataclass(frozen=True, slots=True)
class ShutdownReport:
    """What became of every item that a queue accepted, up to the end of its shutdown.

    Example:
        >>> report = ShutdownReport(handled=8, failed=1, undelivered=["late"], elapsed=2.0, accepted=10)
        >>> report.complete
        False

    `accepted == handled + failed + unhandled + dropped_after + len(undelivered)`.

    Attributes:
        handled: items whose handler call succeeded, over the queue's life.
        failed: items whose handler call failed or timed out; each was given to `on_error`.
        undelivered: the items themselves that the deadline left over, those of an interrupted handler call first.
        elapsed: seconds that the shutdown took.
        accepted: items that the queue ever accepted.
        unhandled: items that no handler takes.
        dropped_after: accepted items that made room under `DROP_OLDEST`.
        name: the queue's name.
        still_running: items of `undelivered`, the first ones, whose handler call could not be ended, such as one in a
            thread: they may be handled all the same.
    """

    handled: int
    failed: int
    undelivered: list[Any] = field(repr=False)
    elapsed: float
    accepted: int = 0
    unhandled: int = 0
    dropped_after: int = 0
    name: str = ""
    still_running: int = 0

    @property
    def complete(self) -> bool:
        """Whether nothing was left over."""
        return not self.undelivered
