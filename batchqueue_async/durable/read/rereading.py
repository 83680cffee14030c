"""What becomes of frames that were read from the disk again: ready, lost, or set aside for the next run."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import acklog
from batchqueue_async.durable.disk.format import ATOMIC
from batchqueue_async.durable.read.loader import Loaded
from batchqueue_async.durable.state.backlog import Extent
from batchqueue_async.durable.state.frame import Frame, Run
from batchqueue_async.durable.state.ranges import RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchqueue_async.durable.state.backlog import Load
    from batchqueue_async.durable.state.queue_state import QueueState
    from batchqueue_async.durable.state.record_index import Stretch
    from batchqueue_async.durable.state.table import Segment

# What one step of the loop takes in: frames, and the runs that are left of them. Of an extent one frame may have more:
# it can't be taken in by halves.
_PORTION = 256


class Rereading:
    """Takes in what the loader has read for one queue."""

    def __init__(self, state: QueueState) -> None:
        self._state = state

    def loaded(self, load: Load, found: Loaded) -> Load | None:
        """Frames of an extent have been read: what is unsettled of them becomes ready, what is missing is lost.

        One portion of them: those leave `found`, and while there are others the answer is what to go on with.
        """
        state = self._state
        extent = load.extent
        newest_first = state.config.order == "freshest"
        if not state.backlog.is_next(extent):
            return None
        entry = state.segments[extent.segment]
        ready: list[list[Run]] = []
        count = 0
        for frame, damaged in reversed(found.frames) if newest_first else found.frames:
            if count >= _PORTION:
                break
            ready.append(self._ready(entry, frame, damaged, extent, found))
            count += max(1, len(ready[-1]))
        load, part, rest = _cut(load, found, len(ready), newest_first=newest_first)
        if newest_first:
            ready.reverse()
        missing = self._unread if found.unreadable else self._lost
        # What was wanted of the piece, though none of its frames may have been found. Older ones may be gone meanwhile.
        seq = low = extent.first if load.start == extent.start else max(extent.first, load.first)
        high = extent.stop if part.stopped_at >= extent.end else None
        for frame, _ in part.frames:
            if frame.first > seq:
                missing(entry, seq, frame.first)
            seq = max(seq, frame.first + frame.count)
            entry.remember(frame.first, frame.offset)
        if high is not None and seq < high:
            missing(entry, seq, high)
        state.backlog.loaded(load, list(chain.from_iterable(ready)), part.stopped_at, (low, high or seq))
        return rest

    def _ready(self, entry: Segment, frame: Frame, damaged: list[int], extent: Extent, found: Loaded) -> list[Run]:
        """What is to be delivered of a frame, after its damaged places are known to be lost, or unread."""
        missing = self._unread if found.unreadable else self._lost
        # Of a torn write that was never durable, nothing is delivered.
        torn = damaged and frame.kind == ATOMIC and frame.first + frame.count > entry.proven
        for at in range(frame.count) if torn else damaged:
            missing(entry, frame.first + at, frame.first + at + 1)
        unread = set(damaged) if found.unreadable else set[int]()
        return list(self._runs(entry, frame, max(frame.first, extent.first), unread))

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

    def fetched(self, stretch: Stretch, found: Loaded) -> Stretch | None:
        """Records that came back and had left the memory have been read: they are there again, or lost.

        One portion, as in `loaded`.
        """
        state = self._state
        entry = state.segments.get(stretch.number)
        if entry is None:
            return None  # all of it was settled meanwhile
        missing = self._unread if found.unreadable else self._lost
        reached = stretch.low
        count = 0
        for place, (frame, damaged) in enumerate(found.frames):
            if count >= _PORTION:
                found.frames = found.frames[place:]
                return stretch._replace(low=reached)
            entry.remember(frame.first, frame.offset)
            stop = frame.first + frame.count
            gone = [(reached, min(frame.first, stretch.high))]
            gone += [(frame.first + at, frame.first + at + 1) for at in damaged]
            for low, high in gone:
                for part in state.index.read(entry, max(low, stretch.low), min(high, stretch.high)):
                    missing(entry, *part)
            until, more = state.index.cut(entry, max(frame.first, stretch.low), min(stop, stretch.high), _PORTION)
            count += 1 + self._keep(entry, frame, max(frame.first, stretch.low), until)
            if more:
                found.frames = found.frames[place:]
                return stretch._replace(low=until)
            reached = max(reached, stop)
        if found.stopped_at >= stretch.end:
            for part in state.index.read(entry, reached, stretch.high):
                missing(entry, *part)
        return None

    def _keep(self, entry: Segment, frame: Frame, low: int, high: int) -> int:
        """What came back of [low, high) is in memory again, with this frame; in how many runs."""
        runs = [
            Run(start, frame, start - frame.first, end - frame.first, times)
            for part in self._state.index.read(entry, low, high)
            for start, end, times in entry.attempts.within(*part)
        ]
        for run in runs:
            self._state.backlog.keep(run)
        return len(runs)

    def _unread(self, entry: Segment, low: int, high: int) -> None:
        """The device has failed to give these: they stay on the disk, for a later run to read."""
        entry.unreadable = True
        self._state.counters.unreadable += sum(end - start for start, end in entry.settled.missing(low, high))

    def _lost(self, entry: Segment, low: int, high: int) -> None:
        state = self._state
        state.counters.damaged += state.settle_range(entry, acklog.LOST, low, high)

    def unreadable(self, item: Extent | Stretch) -> int:
        """Records that can't be read in this run; they stay on the disk for the next.

        None, where they have been dropped meanwhile: that may be why their segment could not be opened.
        """
        state = self._state
        entry = state.segments.get(item.segment if isinstance(item, Extent) else item.number)
        if entry is None:
            return 0
        if not isinstance(item, Extent):
            parts = state.index.read(entry, item.low, item.high)
        elif item in state.backlog.extents:
            state.backlog.forget(item)
            parts = list(entry.settled.missing(item.first, item.stop))
        else:
            parts = []
        if count := sum(high - low for low, high in parts):
            entry.unreadable = True
            state.counters.unreadable += count
        return count


def _cut(load: Load, found: Loaded, count: int, *, newest_first: bool) -> tuple[Load, Loaded, Load | None]:
    """The first `count` frames, or the last, as if they alone had been read; the others stay in `found`."""
    frames = found.frames
    if count == len(frames):
        return load, found, None
    if newest_first:
        cut = len(frames) - count
        oldest = frames[cut][0]
        part = Loaded(found.stopped_at, frames[cut:])
        found.frames, found.stopped_at = frames[:cut], oldest.offset
        return load._replace(start=oldest.offset, first=oldest.first), part, load._replace(end=oldest.offset)
    place = frames[count][0].offset
    found.frames = frames[count:]
    return load, Loaded(place, frames[:count]), load._replace(start=place)
