"""What goes when there is no room, or when it is too old: never a leased record, and each with its reason."""

from __future__ import annotations

from heapq import heapify, heappush
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import acklog
from batchqueue_async.durable.state.backlog import Extent
from batchqueue_async.durable.state.frame import EPOCH_NS, Run

if TYPE_CHECKING:
    from batchqueue_async.durable.state.queue_state import QueueState


class Eviction:
    """The dropping decisions of one queue."""

    def __init__(self, state: QueueState) -> None:
        self._state = state

    def drop_oldest(self, reason: str, records: int, size: int) -> bool:
        """Drop what `overflow="drop_oldest"` allows so that these come in; whether room is made, or on its way.

        Room that earlier drops and settlements will free counts before anything else is dropped; and what is dropped is
        never more than what is needed, and the rest of one segment.
        """
        state = self._state
        if reason == "max_records":
            limit = state.config.max_records or 0
            wanted = state.records + state.pending.records + records - limit
            dropped = 0
            while dropped < wanted and (new := self._drop_next(wanted - dropped)):
                dropped += new
            return dropped > 0
        needed = state.missing_bytes(size)
        while needed > state.freeing_bytes():
            if not self._drop_segment():
                break
        return state.freeing_bytes() > 0

    def make_room_on_disk(self) -> bool:
        """Drop one segment's records for a disk that is full; whether that, or an earlier drop, will free anything."""
        return self._state.freeing_bytes() > 0 or self._drop_segment()

    def _oldest(self) -> Run | Extent | None:
        """What holds the oldest record of the backlog."""
        return self._state.backlog.oldest()

    def _drop_next(self, most: int) -> int:
        state = self._state
        oldest = self._oldest()
        first = 1 << 63 if oldest is None else oldest.first if isinstance(oldest, Extent) else oldest.seq
        held = state.gate.oldest_held() if state.gate is not None else None
        delayed = min(state.delayed, key=_seq_of, default=None)
        if delayed is not None and delayed[1].seq < first and (held is None or delayed[1].seq < held.seq):
            state.delayed.remove(delayed)
            heapify(state.delayed)
            if (rest := delayed[1].high - delayed[1].low - most) > 0:
                run = delayed[1]
                heappush(state.delayed, (delayed[0], run.part(run.end - rest, run.end)))
                delayed = (delayed[0], run.part(run.seq, run.end - rest))
            return self._drop_delayed([delayed])
        if held is not None and held.seq < first and state.gate is not None:
            return state.drop(state.gate.drop_held(lambda run: run.seq == held.seq), "oldest")
        if oldest is None:
            return 0
        if isinstance(oldest, Run):
            cut = state.backlog.cut_first(oldest, most)
            if cut is None:
                cut = state.backlog.cut_out(oldest.seq, min(oldest.end, oldest.seq + most))
            return state.drop(cut, "oldest")
        return self._drop_extent(oldest, oldest.first, min(oldest.stop, oldest.first + most), "oldest")

    def _drop_extent(self, extent: Extent, low: int, high: int, reason: str) -> int:
        state = self._state
        new = state.settle_range(state.segments[extent.segment], acklog.DROPPED, low, high)
        state.counters.dropped[reason] += new
        extent.first = high
        if extent.first >= extent.stop:
            state.backlog.forget(extent)
        return new or (high - low)

    def _drop_segment(self) -> bool:
        """Drop all records of the oldest segment of which none is leased; whether there was one.

        A segment with a leased record stays whatever else of it is dropped, so nothing of it is.
        """
        state = self._state
        for number in sorted(state.segments):
            entry = state.segments[number]
            if entry.unsettled and not entry.leased and not entry.unreadable:
                self._drop_all_of(number)
                return True
        return False

    def _drop_all_of(self, number: int) -> None:
        state = self._state

        def here(run: Run) -> bool:
            return state.place(run.frame)[0] == number

        state.drop(state.backlog.drop_where(here), "oldest")
        if state.gate is not None:
            state.drop(state.gate.drop_held(here), "oldest")
        for extent in [extent for extent in state.backlog.extents if extent.segment == number]:
            self._drop_extent(extent, extent.first, extent.stop, "oldest")
        runs = [entry for entry in state.delayed if here(entry[1])]
        if runs:
            state.delayed = [entry for entry in state.delayed if not here(entry[1])]
            heapify(state.delayed)
            self._drop_delayed(runs)
        entry = state.segments[number]
        # Nothing of it is left then, wherever it was known: the segment can go.
        state.counters.dropped["oldest"] += state.settle_range(entry, acklog.DROPPED, entry.first, entry.end)

    def _drop_delayed(self, entries: list[tuple[float, Run]]) -> int:
        state = self._state
        runs = [run for _, run in entries]
        if state.gate is not None:
            state.backlog.give_back(state.gate.release(runs))
        return state.drop(runs, "oldest")

    def drop_aged(self, now_ns: int) -> int:
        """Drop what is past `max_age` without being asked for it; how many records."""
        state = self._state
        cutoff = state.cutoff(now_ns)
        if cutoff is None:
            return 0
        before = state.counters.dropped["max_age"]
        for extent in [extent for extent in state.backlog.extents if EPOCH_NS < extent.newest_ns < cutoff]:
            self._drop_extent(extent, extent.first, extent.stop, "max_age")
        state.drop(state.backlog.drop_where(lambda run: EPOCH_NS < run.frame.enqueued_ns < cutoff), "max_age")
        return state.counters.dropped["max_age"] - before


def _seq_of(entry: tuple[float, Run]) -> int:
    return entry[1].seq
