"""What becomes of frames that were read from the disk again: ready, lost, or set aside for the next run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import acklog
from batchqueue_async.durable.disk.format import ATOMIC
from batchqueue_async.durable.state.backlog import Extent
from batchqueue_async.durable.state.frame import Frame, Run
from batchqueue_async.durable.state.ranges import RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchqueue_async.durable.read.loader import Loaded
    from batchqueue_async.durable.state.backlog import Load
    from batchqueue_async.durable.state.queue_state import QueueState
    from batchqueue_async.durable.state.record_index import Stretch
    from batchqueue_async.durable.state.table import Segment


class Rereading:
    """Takes in what the loader has read for one queue."""

    def __init__(self, state: QueueState) -> None:
        self._state = state

    def loaded(self, load: Load, found: Loaded) -> None:
        """Frames of an extent have been read: what is unsettled of them becomes ready, what is missing is lost."""
        state = self._state
        extent = load.extent
        if extent not in state.backlog.extents:
            return
        entry = state.segments[extent.segment]
        missing = self._unread if found.unreadable else self._lost
        low = extent.first if load.start == extent.start else None
        high = extent.stop if found.stopped_at >= extent.end else None
        runs: list[Run] = []
        seq = low
        for frame, damaged in found.frames:
            if seq is not None and frame.first > seq:
                missing(entry, seq, frame.first)
            # Of a torn write that was never durable, nothing is delivered.
            torn = damaged and frame.kind == ATOMIC and frame.first + frame.count > entry.proven
            for at in range(frame.count) if torn else damaged:
                missing(entry, frame.first + at, frame.first + at + 1)
            runs += self._runs(
                entry, frame, max(frame.first, extent.first), set(damaged) if found.unreadable else set()
            )
            seq = frame.first + frame.count
            entry.remember(frame.first, frame.offset)
        if seq is not None and high is not None and seq < high:
            missing(entry, seq, high)
        first = found.frames[0][0].first if found.frames else extent.first
        last = seq if seq is not None else extent.stop
        state.backlog.loaded(load, runs, found.stopped_at, (first, high or last))

    def _runs(self, entry: Segment, frame: Frame, first: int, unread: set[int]) -> Iterable[Run]:
        """What is to be delivered of a frame: what is not settled, but for the places that could not be read."""
        stop = frame.first + frame.count
        gone = entry.settled
        if unread:
            gone = RangeSet()
            for low, high in [*entry.settled, *((frame.first + at, frame.first + at + 1) for at in sorted(unread))]:
                gone.add(low, high)
        for low, high in gone.missing(first, stop):
            for start, end, times in entry.attempts.within(low, high):
                yield Run(start, frame, start - frame.first, end - frame.first, times)

    def fetched(self, stretch: Stretch, found: Loaded) -> None:
        """Records that came back and had left the memory have been read: they are there again, or lost."""
        state = self._state
        entry = state.segments.get(stretch.number)
        if entry is None:
            return  # all of it was settled meanwhile
        missing = self._unread if found.unreadable else self._lost
        reached = stretch.low
        for frame, damaged in found.frames:
            entry.remember(frame.first, frame.offset)
            stop = frame.first + frame.count
            gone = [(reached, min(frame.first, stretch.high))]
            gone += [(frame.first + at, frame.first + at + 1) for at in damaged]
            for low, high in gone:
                for part in state.index.read(entry, max(low, stretch.low), min(high, stretch.high)):
                    missing(entry, *part)
            for low, high in state.index.read(entry, max(frame.first, stretch.low), min(stop, stretch.high)):
                for start, end, times in entry.attempts.within(low, high):
                    state.backlog.keep(Run(start, frame, start - frame.first, end - frame.first, times))
            reached = max(reached, stop)
        if found.stopped_at >= stretch.end:
            for part in state.index.read(entry, reached, stretch.high):
                missing(entry, *part)

    def _unread(self, entry: Segment, low: int, high: int) -> None:
        """The device has failed to give these: they stay on the disk, for a later run to read."""
        entry.unreadable = True
        self._state.counters.unreadable += sum(end - start for start, end in entry.settled.missing(low, high))

    def _lost(self, entry: Segment, low: int, high: int) -> None:
        state = self._state
        state.counters.damaged += state.settle_range(entry, acklog.LOST, low, high)

    def unreadable(self, item: Extent | Stretch) -> int:
        """Records that can't be read in this run; they stay on the disk for the next."""
        state = self._state
        if isinstance(item, Extent):
            entry = state.segments[item.segment]
            state.backlog.forget(item)
            parts = list(entry.settled.missing(item.first, item.stop))
        else:
            entry = state.segments[item.number]
            parts = state.index.read(entry, item.low, item.high)
        entry.unreadable = True
        count = sum(high - low for low, high in parts)
        state.counters.unreadable += count
        return count
