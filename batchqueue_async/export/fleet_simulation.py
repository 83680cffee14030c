"""A fleet played through an outage, rebalances and a rolling restart, from a seed. Pure, and without a clock.

Each process takes what its partitions have, spends its core on it, and sends batches, several at once; a send takes
the destination's latency, drawn at random. While the destination is away nothing is delivered, and the first probe
after it comes at random. A process that is replaced is away, and so are, for the time of a rebalance, the partitions
that move with it.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchqueue_async.export.fleet import Fleet

STEP = 0.02
"""Seconds between two looks at what came in."""

# Less than this of a record is none: the shares of processes are not whole.
_WHOLE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What happens to a simulated fleet.

    Example:
        >>> Course(seconds=60.0, outages=((10.0, 20.0),)).outages
        ((10.0, 20.0),)

    Attributes:
        seconds: how long records come in; it is then played until all are delivered, ten times as long at most.
        outages: when the destination is away, as pairs of begin and end.
        restarts: when a process is replaced, as pairs of time and its number.
        probe: seconds within which a destination that is back is noticed.
        spread: how much latencies differ: the standard deviation as a share of the mean.
        linger: seconds for which a batch may wait to fill.
    """

    seconds: float
    outages: tuple[tuple[float, float], ...] = ()
    restarts: tuple[tuple[float, int], ...] = ()
    probe: float = 1.0
    spread: float = 0.2
    linger: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """How it went.

    Attributes:
        arrived: records that came in; delivered: those that the destination took.
        peak_backlog: the most that waited at once, in all processes and partitions.
        peak_process: the most that waited at one process.
        drained_at: when everything that had come in was delivered; infinite where it never was.
        rate: records per second that were delivered, over the time in which any were.
        busy: the share of their cores that the processes used.
    """

    arrived: int
    delivered: int
    peak_backlog: float
    peak_process: float
    drained_at: float
    rate: float
    busy: float


@dataclass(slots=True)
class _Process:
    """One process: what waits for it, when its senders are free, and its sends under way, each with its end."""

    backlog: float = 0.0
    free: list[float] = field(default_factory=list[float])
    core_free_at: float = 0.0
    core_used: float = 0.0
    away_until: float = 0.0
    # Partitions that have just moved here, or back, stand still until then.
    paused_until: float = 0.0
    held: float = 0.0
    waiting_since: float = math.inf
    ends: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


def play(fleet: Fleet, processes: int, course: Course, *, seed: int = 0) -> Played:
    """Play a fleet of so many processes through a course.

    Example:
        >>> from batchqueue_async.export.fleet import Fleet
        >>> fleet = Fleet(rate=10_000, record_bytes=300, outage=5, latency=0.05, batch_records=100, workers=8)
        >>> played = play(fleet, 2, Course(seconds=20.0, outages=((5.0, 10.0),)))
        >>> played.arrived == played.delivered == 200_000
        True
        >>> 50_000 <= played.peak_backlog < 62_000
        True
    """
    return _Play(fleet, processes, course, Random(seed)).run()  # noqa: S311 - it draws latencies, and guards nothing


class _Play:
    def __init__(self, fleet: Fleet, processes: int, course: Course, random: Random) -> None:
        self._fleet = fleet
        self._course = course
        self._random = random
        self._all = [_Process(free=[0.0] * fleet.workers) for _ in range(processes)]
        self._back = [(begin, end + random.uniform(0.0, course.probe)) for begin, end in course.outages]
        self._restarts = sorted(course.restarts)
        self._delivered = 0.0
        self._first = self._last = 0.0
        sigma = math.sqrt(math.log(1.0 + course.spread**2))
        self._latency = (math.log(fleet.latency) - sigma**2 / 2, sigma)

    def run(self) -> Played:
        """Step by step, until all is delivered."""
        total = round(self._fleet.rate * self._course.seconds)
        arrived, step, peak, peak_process, drained = 0.0, 0, 0.0, 0.0, False
        last_step = math.ceil(10 * self._course.seconds / STEP)
        while step <= last_step:
            now = step * STEP
            until = min(total, self._fleet.rate * (now + STEP))
            self._restart(now)
            self._share(until - arrived, now)
            arrived = until
            for process in self._all:
                self._deliver(process, now + STEP)
                self._send(process, now)
            waiting = arrived - self._delivered
            peak = max(peak, waiting)
            peak_process = max(peak_process, *(each.backlog + each.held for each in self._all))
            step += 1
            drained = arrived >= total and waiting < _WHOLE
            if drained:
                break
        seconds = max(self._last - self._first, STEP)
        return Played(
            arrived=round(arrived),
            delivered=round(self._delivered),
            peak_backlog=peak,
            peak_process=peak_process,
            drained_at=self._last if drained else math.inf,
            rate=self._delivered / seconds,
            busy=sum(each.core_used for each in self._all) / (step * STEP * len(self._all)),
        )

    def _restart(self, now: float) -> None:
        fleet = self._fleet
        while self._restarts and self._restarts[0][0] <= now:
            _, number = self._restarts.pop(0)
            leaving = self._all[number % len(self._all)]
            leaving.away_until = now + fleet.restart
            # What is on its disk waits there for its return; its partitions move to the others, and back.
            for each in self._all:
                each.paused_until = max(each.paused_until, now + fleet.rebalance) if each is not leaving else 0.0
            leaving.paused_until = leaving.away_until + fleet.rebalance

    def _share(self, records: float, now: float) -> None:
        there = [each for each in self._all if each.away_until <= now] or self._all
        away = records * (1 - len(there) / len(self._all))
        for each in there:
            own = records / len(self._all) + away / len(there)
            if each.paused_until > now:
                each.held += own
            else:
                each.backlog += own + each.held
                each.held = 0.0

    def _deliver(self, process: _Process, now: float) -> None:
        while process.ends and process.ends[0][0] <= now:
            ended, records = heapq.heappop(process.ends)
            heapq.heappush(process.free, ended)
            self._delivered += records
            self._last = max(self._last, ended)

    def _send(self, process: _Process, now: float) -> None:
        fleet, course = self._fleet, self._course
        if process.away_until > now or any(begin <= now < end for begin, end in self._back):
            return
        while process.free and process.backlog > 0:
            if process.backlog < fleet.batch_records:
                process.waiting_since = min(process.waiting_since, now)
                if now - process.waiting_since < course.linger:
                    return
            process.waiting_since = math.inf
            begins = max(now, process.core_free_at, process.free[0])
            if begins >= now + STEP:
                return  # the core is busy with what was sent before
            heapq.heappop(process.free)
            records = min(float(fleet.batch_records), process.backlog)
            cost = records / fleet.process_rate
            process.core_free_at = begins + cost
            process.core_used += cost
            process.backlog -= records
            ends = process.core_free_at + self._random.lognormvariate(*self._latency)
            heapq.heappush(process.ends, (ends, records))
            self._first = self._first or now
