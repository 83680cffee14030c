"""What goes when there is no room, or when it is too old: never a leased record, and each with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import acklog
from batchqueue_async.durable.state.backlog import Extent
from batchqueue_async.durable.state.frame import EPOCH_NS, Run

if TYPE_CHECKING:
    from batchqueue_async.durable.state.queue_state import QueueState

_NONE = 1 << 63


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
            state.room.pay()
            limit = state.config.max_records or 0
            return self.drop_records(state.records + state.pending.records + records - limit) > 0
        needed = state.room.missing_bytes(size)
        while needed > state.freeing_bytes():
            if not self._drop_segment():
                break
        return state.freeing_bytes() > 0

    def drop_records(self, wanted: int) -> int:
        """Drop so many of the oldest records that nobody has, or as many as there are; how many."""
        before = self._state.records
        left = before - wanted
        # What a step says may have been settled already, in an earlier run: it is no record any longer.
        while (excess := self._state.records - left) > 0 and self._drop_next(excess):
            pass
        return before - self._state.records

    def make_room_on_disk(self) -> bool:
        """Drop one segment's records for a disk that is full; whether that, or an earlier drop, will free anything."""
        return self._state.freeing_bytes() > 0 or self._drop_segment()

    def _drop_next(self, most: int) -> int:
        """Drop up to so many of the oldest records that nobody has; 0 when there are none."""
        state = self._state
        oldest = state.backlog.oldest()
        first = _NONE if oldest is None else oldest.first if isinstance(oldest, Extent) else oldest.seq
        parked = state.index.oldest()
        waits = _NONE if parked is None else parked[1]
        held = state.gate.oldest_held() if state.gate is not None else None
        if held is not None and held < min(first, waits):
            return state.drop_oldest_held()
        if parked is not None and waits < first:
            entry, low, high = parked
            return state.drop_parked(entry, low, min(high, low + most), "oldest")
        if oldest is None:
            return 0
        if isinstance(oldest, Run):
            return state.drop([state.backlog.cut_oldest(oldest, most)], "oldest")
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
        entry = state.segments[number]

        def here(run: Run) -> bool:
            return state.index.at(run.seq) is entry

        state.drop(state.backlog.drop_where(here), "oldest")
        state.drop_held(here)
        for extent in [extent for extent in state.backlog.extents if extent.segment == number]:
            self._drop_extent(extent, extent.first, extent.stop, "oldest")
        state.drop_parked(entry, entry.first, entry.end, "oldest")
        # Nothing of it is left then, wherever it was known: the segment can go.
        state.counters.dropped["oldest"] += state.settle_range(entry, acklog.DROPPED, entry.first, entry.end)

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
        for entry in state.index.aged(cutoff, EPOCH_NS):
            # Those that wait on the disk go with the last of their segment; before that, when they are to be leased.
            state.drop_parked(entry, entry.first, entry.end, "max_age")
        return state.counters.dropped["max_age"] - before
