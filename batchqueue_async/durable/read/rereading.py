"""What becomes of frames that were read from the disk again: ready, lost, or set aside for the next run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import acklog
from batchqueue_async.durable.disk.format import ATOMIC
from batchqueue_async.durable.state.frame import Frame, Run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchqueue_async.durable.read.loader import Loaded
    from batchqueue_async.durable.state.backlog import Extent, Load
    from batchqueue_async.durable.state.queue_state import QueueState
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
        low = extent.first if load.start == extent.start else None
        high = extent.stop if found.stopped_at >= extent.end else None
        runs: list[Run] = []
        seq = low
        for frame, damaged in found.frames:
            if seq is not None and frame.first > seq:
                self._lost(entry, seq, frame.first)
            # Of a torn write that was never durable, nothing is delivered.
            torn = damaged and frame.kind == ATOMIC and frame.first + frame.count > entry.proven
            for at in range(frame.count) if torn else damaged:
                self._lost(entry, frame.first + at, frame.first + at + 1)
            runs += self._unsettled_runs(entry, frame, max(frame.first, extent.first))
            seq = frame.first + frame.count
        if seq is not None and high is not None and seq < high:
            self._lost(entry, seq, high)
        first = found.frames[0][0].first if found.frames else extent.first
        last = seq if seq is not None else extent.stop
        state.backlog.loaded(load, runs, found.stopped_at, (first, high or last))

    def _unsettled_runs(self, entry: Segment, frame: Frame, first: int) -> Iterable[Run]:
        stop = frame.first + frame.count
        for low, high in entry.settled.missing(first, stop):
            for start, end, times in entry.attempts_in(low, high):
                yield Run(start, frame, start - frame.first, end - frame.first, times)

    def refetched(self, run: Run, frame: Frame, damaged: list[int]) -> None:
        """The payloads of a run that waits to be delivered again are back in memory, but for the damaged ones."""
        state = self._state
        number, offset = state.place(run.frame)
        frame.segment, frame.offset = number, offset
        state.backlog.fetched(run, frame)
        for at in damaged:
            seq = frame.first + at
            if run.seq <= seq < run.end:
                self._lost(state.segments[number], seq, seq + 1)
        if damaged:
            runs = state.backlog.cut_out(run.seq, run.end)
            entry = state.segments[number]
            for part in runs:
                state.backlog.give_back(part.part(low, high) for low, high in entry.settled.missing(part.seq, part.end))

    def lose(self, run: Run) -> None:
        """The payloads of a run that waits to be delivered again are gone."""
        state = self._state
        state.backlog.cut_out(run.seq, run.end)
        self._lost(state.segments[state.place(run.frame)[0]], run.seq, run.end)

    def _lost(self, entry: Segment, low: int, high: int) -> None:
        state = self._state
        state.counters.damaged += state.settle_range(entry, acklog.LOST, low, high)

    def unreadable(self, item: Extent | Run) -> int:
        """Records that can't be read in this run; they stay on the disk for the next."""
        state = self._state
        if isinstance(item, Run):
            state.backlog.cut_out(item.seq, item.end)
            count = item.high - item.low
        else:
            state.backlog.forget(item)
            missing = state.segments[item.segment].settled.missing(item.first, item.stop)
            count = sum(high - low for low, high in missing)
        state.counters.unreadable += count
        return count
