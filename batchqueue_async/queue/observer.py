"""A queue's statistics: read on its loop, or from any thread without waiting for the loop.

The numbers are the parts' own, and only the queue's loop writes them. On the loop, between two steps, they add up. A
reader on another thread may come amid a step; it sees that by the identity that does not hold, looks again, and
otherwise gives the last snapshot that did add up, with its age. Nothing is written for a reader that never comes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async.queue.stats import Distribution, HandlerStats, PartitionStats, QueueStats, WorkerStats

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Sequence

    from batchqueue_async.queue.dispatch import Dispatcher
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.ports import ThreadInbox
    from batchqueue_async.queue.router import PartitionRouter
    from batchqueue_async.queue.shutdown import Shutdown
    from batchqueue_async.queue.stats import Counters, Histogram, Sizes

T = TypeVar("T")

NOTHING = Distribution()
LOOKS = 4
"""How often a reader on another thread looks for numbers that add up, before it gives older ones."""


class LoopProbe:
    """How late a loop is: a callback is sent to it whenever somebody asks, and the time until it runs is the lag.

    An idle loop is asked nothing. The first answer is 0; while a callback is under way, its waiting time is the lag.
    """

    __slots__ = ("_asked", "_lag", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked: float | None = None
        self._lag = 0.0

    def lag(self) -> float:
        """Seconds by which the loop is late now, or was when it last answered; from any thread."""
        asked, now = self._asked, time.monotonic()
        if asked is not None:
            return max(self._lag, now - asked)
        self._asked = now
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # the loop has ended: nothing of it is late any more
            self._asked = None
            self._lag = 0.0
        return self._lag

    def _answer(self) -> None:
        if self._asked is not None:
            self._lag = time.monotonic() - self._asked
            self._asked = None


class QueueObserver(Generic[T]):
    """Makes the snapshots of one queue."""

    def __init__(
        self,
        name: str,
        *,
        loop: asyncio.AbstractEventLoop,
        capacity: int,
        counters: Counters,
        sizes: Sizes,
        latency: Histogram,
        dispatcher: Dispatcher[T],
        router: PartitionRouter[T],
        drains: Sequence[DrainTask[T]],
        shutdown: Shutdown[T],
    ) -> None:
        self._name = name
        self._capacity = capacity
        self._counters = counters
        self._sizes = sizes
        self._latency = latency
        self._dispatcher = dispatcher
        self._router = router
        self._drains = drains
        self._probe = LoopProbe(loop)
        self._shutdown = shutdown
        self._inbox: ThreadInbox | None = None
        # An empty queue's numbers add up. A reader who comes amid every step gets them, and their age.
        self._last = (time.monotonic(), self.read())
        self._last_totals = (time.monotonic(), self.totals())

    def attach_inbox(self, inbox: ThreadInbox) -> None:
        """Count what waits in the inbox of other threads, too."""
        self._inbox = inbox

    def peek(self) -> QueueStats:
        """A snapshot, from any thread; never waits for the loop."""
        lag = self._probe.lag()
        for look in range(LOOKS):
            if look:
                time.sleep(0)  # let the loop finish the step that it is in
            try:
                stats = self.read(lag)
            except RuntimeError:  # a table grew while it was read
                continue
            if stats.adds_up:
                self._last = (time.monotonic(), stats)
                return stats
        read_at, last = self._last
        return replace(last, age=time.monotonic() - read_at, loop_lag=lag)

    def peek_totals(self) -> QueueStats:
        """As `peek`, without partitions, workers, handlers and distributions: a tenth of the work."""
        lag = self._probe.lag()
        for look in range(LOOKS):
            if look:
                time.sleep(0)  # as above
            try:
                stats = self.totals(lag)
            except RuntimeError:  # as above
                continue
            if stats.adds_up:
                self._last_totals = (time.monotonic(), stats)
                return stats
        read_at, last = self._last_totals
        return replace(last, age=time.monotonic() - read_at, loop_lag=lag)

    def totals(self, loop_lag: float = 0.0) -> QueueStats:
        """The numbers of the queue as a whole, as they stand."""
        counters, report = self._counters, self._shutdown.report
        waiting = sum(len(migration.items) for migration in tuple(self._router.migrations))
        waiting += 0 if self._inbox is None else self._inbox.uncollected()
        used, accepted, used_bytes, since = waiting, waiting + counters.dropped_at_door, 0, None
        capacities: list[int | None] = []
        partitions = tuple(self._router.partitions)
        for each in partitions:
            inside = each.qsize()
            accepted += each.removed + inside
            if inside:
                used += inside
                since = each.since if since is None else min(since, each.since)
            if each.byte_room is not None:
                used_bytes += each.byte_room.used + each.byte_room.held
                capacities.append(each.byte_room.limit)
        return QueueStats(
            name=self._name,
            attempted=accepted + counters.refused + counters.dropped_before,
            accepted=accepted,
            refused=counters.refused,
            dropped_before=counters.dropped_before,
            dropped_after=counters.dropped_after,
            handled=counters.handled,
            failed=counters.failed,
            unhandled=counters.unhandled,
            in_flight=sum([each.in_flight for each in tuple(self._drains)]),
            undelivered=0 if report is None else len(report.undelivered),
            used=used,
            capacity=len(partitions) * self._capacity,
            oldest_age=0.0 if since is None else max(0.0, self._drains[0].clock() - since),
            partitions=(),
            workers=(),
            batch_sizes=NOTHING,
            queue_latency=NOTHING,
            loop_lag=loop_lag,
            last_error=self._dispatcher.errors.last(),
            used_bytes=used_bytes,
            capacity_bytes=_sum_or_none(capacities),
            wake_ups=0 if self._inbox is None else self._inbox.wake_ups,
        )

    def read(self, loop_lag: float = 0.0) -> QueueStats:
        """The numbers as they stand."""
        counters, report = self._counters, self._shutdown.report
        partitions = tuple(self._router.partitions)
        # Each number is read once: what is added up is what is shown.
        each_partition = tuple(_partition(each) for each in partitions)
        each_worker = tuple(_worker(each) for each in tuple(self._drains))
        moving = sum(len(migration.items) for migration in tuple(self._router.migrations))
        # What threads have put in and the loop has not collected is accepted, and waits.
        waiting_outside = 0 if self._inbox is None else self._inbox.uncollected()
        used = sum(each.used for each in each_partition) + moving + waiting_outside
        accepted = sum(each.accepted for each in each_partition) + moving + waiting_outside + counters.dropped_at_door
        since = [partition.since for partition, stats in zip(partitions, each_partition, strict=True) if stats.used]
        now = self._drains[0].clock()
        return QueueStats(
            name=self._name,
            attempted=accepted + counters.refused + counters.dropped_before,
            accepted=accepted,
            refused=counters.refused,
            dropped_before=counters.dropped_before,
            dropped_after=counters.dropped_after,
            handled=counters.handled,
            failed=counters.failed,
            unhandled=counters.unhandled,
            in_flight=sum(each.in_flight for each in each_worker),
            undelivered=0 if report is None else len(report.undelivered),
            used=used,
            capacity=len(partitions) * self._capacity,
            oldest_age=max(0.0, now - min(since)) if since else 0.0,
            partitions=each_partition,
            workers=each_worker,
            batch_sizes=self._sizes.summary(),
            queue_latency=self._latency.summary(),
            loop_lag=loop_lag,
            handlers=tuple(
                HandlerStats(
                    each.label, each.calls, each.items, each.failed, each.durations.total, each.durations.summary()
                )
                for each in self._dispatcher.all_entries()
            ),
            last_error=self._dispatcher.errors.last(),
            used_bytes=sum(each.used_bytes for each in each_partition),
            capacity_bytes=_sum_or_none(each.capacity_bytes for each in each_partition),
            wake_ups=0 if self._inbox is None else self._inbox.wake_ups,
        )


def _sum_or_none(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _partition(each: Any) -> PartitionStats:
    byte_room = each.byte_room
    return PartitionStats(
        index=each.index,
        used=each.qsize(),
        capacity=each.capacity,
        accepted=each.accepted,
        owner=each.owner.index if each.owner is not None else -1,
        waiting=each.waiting,
        used_bytes=0 if byte_room is None else byte_room.used + byte_room.held,
        capacity_bytes=None if byte_room is None else byte_room.limit,
    )


def _worker(each: Any) -> WorkerStats:
    return WorkerStats(
        index=each.index,
        partitions=len(each.partitions),
        taken=each.taken,
        busy=each.busy,
        in_flight=each.in_flight,
    )
