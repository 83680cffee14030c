"""A queue's statistics: read on its loop, or from any thread without waiting for the loop.

The numbers are the parts' own, and only the queue's loop writes them. On the loop, between two steps, they add up. A
reader on another thread may come amid a step; it sees that by the identity that does not hold, looks again, and
otherwise gives the last snapshot that did add up, with its age. Nothing is written for a reader that never comes.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from batchqueue_async._support.registry import looked_at
from batchqueue_async.queue.stats import (
    CloseUp,
    Distribution,
    HandlerStats,
    PartitionStats,
    QueueStats,
    WorkerStats,
    used_ratio,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from batchqueue_async.queue.dispatch import Dispatcher, HandlerEntry
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.partition import Partition
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
    The queues of a loop share one: a look at hundreds of them wakes the loop once.
    """

    __slots__ = ("__weakref__", "_asked", "_lag", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked: float | None = None
        self._lag = 0.0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopProbe:
        """The one of a loop, which there is as long as one of its queues has it."""
        found = _probes.get(id(loop))
        if found is None:
            found = _probes[id(loop)] = cls(loop)
        return found

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


_probes: WeakValueDictionary[int, LoopProbe] = WeakValueDictionary()
"""By the id of their loop, which they keep, so that no other loop can have it meanwhile."""


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
        self._probe = LoopProbe.of(loop)
        self._shutdown = shutdown
        self._inbox: ThreadInbox | None = None
        # An empty queue's numbers add up. A reader who comes amid every step gets them, and their age.
        empty = time.monotonic(), self.read()
        self._last = {False: empty, True: empty}

    def attach_inbox(self, inbox: ThreadInbox) -> None:
        """Count what waits in the inbox of other threads, too."""
        self._inbox = inbox

    def peek(self, *, totals: bool = False) -> QueueStats:
        """A snapshot, from any thread; never waits for the loop.

        Args:
            totals: leave out partitions, workers, handlers, distributions and the lag: a tenth of the work.
        """
        lag = 0.0 if totals else self._probe.lag()
        for look in range(LOOKS):
            if look:
                time.sleep(0)  # let the loop finish the step that it is in
            try:
                stats = self.read(lag, totals=totals)
            except RuntimeError:  # a table grew while it was read
                continue
            if stats.adds_up:
                self._last[totals] = time.monotonic(), stats
                return stats
        read_at, last = self._last[totals]
        return replace(last, age=time.monotonic() - read_at, loop_lag=lag)

    def _settled(self) -> int | None:
        """How many items have ever come in, where no worker has anything to do; None where one has.

        Whatever came in has an outcome then, and nobody need look at the partitions. A reader may come while one of
        them goes from one worker to another: neither has anything to do with it, and fewer came in than before. Then
        it is None, too.
        """
        for drain in self._drains:
            if drain.round is not None or drain.ready:
                return None
        router, counters, report = self._router, self._counters, self._shutdown.report
        if self._inbox is not None or router.migrations or router.partitions[0].byte_room is not None:
            return None
        accepted = counters.handled + counters.failed + counters.unhandled + counters.dropped_after
        accepted += 0 if report is None else len(report.undelivered)
        return accepted if accepted >= self._last[True][1].accepted else None

    def _same(self, last: QueueStats) -> bool:
        """Whether what may change while nothing comes in is what it was."""
        counters, errors = self._counters, self._dispatcher.errors
        return (
            counters.refused == last.refused
            and counters.dropped_before == last.dropped_before
            and len(self._router.partitions) * self._capacity == last.capacity
            and errors.last() == last.last_error
        )

    def close_up(self, most: int) -> CloseUp:
        """What a page shows of the queue beyond its totals, from any thread; a fifth of the work of all numbers.

        Args:
            most: of how many partitions.
        """
        router, drains = self._router, tuple(self._drains)
        partitions = tuple(router.partitions)
        return CloseUp(
            waits=looked_at(self._latency.summary),
            busy=sum([each.in_flight > 0 for each in drains]),
            workers=len(drains),
            handlers=tuple([each.label for each in looked_at(self._dispatcher.all_entries)]),
            partitions=tuple([_fill(each) for each in partitions[:most]]),
            more_partitions=max(0, len(partitions) - most),
        )

    def read(self, loop_lag: float = 0.0, *, totals: bool = False) -> QueueStats:
        """The numbers as they stand; with `totals` those of the queue as a whole alone."""
        counters, report, inbox = self._counters, self._shutdown.report, self._inbox
        partitions, drains = tuple(self._router.partitions), tuple(self._drains)
        settled = self._settled() if totals else None
        if settled is not None:
            accepted, used, since, in_flight, rooms = settled, 0, math.inf, [0], None
            inside = removed = []
            last = self._last[True][1]
            if settled == last.accepted and not (last.used or last.in_flight) and self._same(last):
                return last
        else:
            # Each number is read once: what is added up is what is shown. Those that have left come first: if items
            # are taken between the two, the sums don't add up and it is seen; the other way they'd be counted twice.
            removed = [each.removed for each in partitions]
            inside = [each.qsize() for each in partitions]
            used = sum(inside)
            for migration in tuple(self._router.migrations):
                used += len(migration.items)
            if inbox is not None:
                used += inbox.uncollected()  # what the loop has not collected is accepted, and waits
            accepted = used + sum(removed) + counters.dropped_at_door
            since = _oldest(partitions, inside) if used else math.inf
            rooms = None if partitions[0].byte_room is None else [_bytes(each) for each in partitions]
            in_flight = [each.in_flight for each in drains]
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
            in_flight=sum(in_flight),
            undelivered=0 if report is None else len(report.undelivered),
            used=used,
            capacity=len(partitions) * self._capacity,
            oldest_age=max(0.0, drains[0].clock() - since) if since < math.inf else 0.0,
            partitions=()
            if totals
            else tuple(map(_partition, partitions, inside, removed, rooms or repeat((0, None)))),
            workers=() if totals else tuple(map(_worker, drains, in_flight)),
            batch_sizes=NOTHING if totals else self._sizes.summary(),
            queue_latency=NOTHING if totals else self._latency.summary(),
            loop_lag=loop_lag,
            handlers=() if totals else tuple(map(_handler, self._dispatcher.all_entries())),
            last_error=self._dispatcher.errors.last(),
            used_bytes=0 if rooms is None else sum(used for used, _ in rooms),
            capacity_bytes=None if rooms is None else sum(limit or 0 for _, limit in rooms),
            wake_ups=0 if inbox is None else inbox.wake_ups,
        )


def _fill(each: Partition[Any]) -> tuple[float, int]:
    """How full a partition is, and the worker that drains it."""
    used_bytes, capacity_bytes = _bytes(each)
    owner = each.owner
    return used_ratio(each.qsize(), each.capacity, used_bytes, capacity_bytes), -1 if owner is None else owner.index


def _oldest(partitions: Sequence[Partition[Any]], inside: Sequence[int]) -> float:
    """When the oldest item came that waits in a partition."""
    return min([each.since for each, count in zip(partitions, inside, strict=True) if count], default=math.inf)


def _bytes(each: Partition[Any]) -> tuple[int, int | None]:
    """What the items of a partition take, and may take, where it is bounded by bytes."""
    room = each.byte_room
    return (0, None) if room is None else (room.used + room.held, room.limit)


def _partition(each: Partition[Any], inside: int, removed: int, sizes: tuple[int, int | None]) -> PartitionStats:
    used_bytes, capacity_bytes = sizes
    return PartitionStats(
        index=each.index,
        used=inside,
        capacity=each.capacity,
        accepted=removed + inside,
        owner=each.owner.index if each.owner is not None else -1,
        waiting=each.waiting,
        used_bytes=used_bytes,
        capacity_bytes=capacity_bytes,
    )


def _worker(each: DrainTask[Any], in_flight: int) -> WorkerStats:
    return WorkerStats(
        index=each.index,
        partitions=len(each.partitions),
        taken=each.taken,
        busy=each.busy,
        in_flight=in_flight,
    )


def _handler(each: HandlerEntry[Any]) -> HandlerStats:
    return HandlerStats(each.label, each.calls, each.items, each.failed, each.durations.total, each.durations.summary())
