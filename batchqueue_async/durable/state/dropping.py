"""What goes when there is no room, or when it is too old: never a leased record, and each with its reason."""

from __future__ import annotations

from heapq import heapify
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import acklog
from batchqueue_async.durable.state.backlog import Extent
from batchqueue_async.durable.state.frame import Run

if TYPE_CHECKING:
    from batchqueue_async.durable.state.queue_state import QueueState


class Dropper:
    """The dropping decisions of one queue."""

    def __init__(self, state: QueueState) -> None:
        self._state = state

    def drop_oldest(self, reason: str, records: int) -> bool:
        """Drop what `overflow="drop_oldest"` allows for `reason`; whether anything was dropped."""
        state = self._state
        if reason == "max_records":
            limit = state.config.max_records or 0
            wanted = state.records + state.pending.records + records - limit
            dropped = 0
            while dropped < wanted and (new := self._drop_next(wanted - dropped)):
                dropped += new
            return dropped > 0
        oldest, delayed = self._oldest()
        if delayed is not None:
            return self._drop_segment(state.place(delayed[1].frame)[0]) > 0
        if oldest is None:
            return False
        number = oldest.segment if isinstance(oldest, Extent) else state.place(oldest.frame)[0]
        return self._drop_segment(number) > 0

    def _oldest(self) -> tuple[Run | Extent | None, tuple[float, Run] | None]:
        """What holds the oldest record that isn't leased: in the backlog, or delayed, which then is the second."""
        state = self._state
        oldest = state.backlog.oldest()
        delayed = min(state.delayed, key=lambda entry: entry[1].seq, default=None)
        if delayed is None or oldest is None:
            return oldest, delayed
        first = oldest.first if isinstance(oldest, Extent) else oldest.seq
        return (oldest, None) if first < delayed[1].seq else (None, delayed)

    def _drop_next(self, most: int) -> int:
        state = self._state
        oldest, delayed = self._oldest()
        if delayed is not None:
            state.delayed.remove(delayed)
            heapify(state.delayed)
            return self._drop_delayed([delayed])
        if oldest is None:
            return 0
        if isinstance(oldest, Run):
            return state.drop(state.backlog.cut_out(oldest.seq, min(oldest.end, oldest.seq + most)), "oldest")
        return self._drop_extent(oldest, oldest.first, min(oldest.stop, oldest.first + most), "oldest")

    def _drop_extent(self, extent: Extent, low: int, high: int, reason: str) -> int:
        state = self._state
        new = state.settle_range(state.segments[extent.segment], acklog.DROPPED, low, high)
        state.counters.dropped[reason] += new
        extent.first = high
        if extent.first >= extent.stop:
            state.backlog.forget(extent)
        return new or (high - low)

    def _drop_segment(self, number: int) -> int:
        state = self._state
        dropped = state.drop(state.backlog.drop_where(lambda run: state.place(run.frame)[0] == number), "oldest")
        for extent in [extent for extent in state.backlog.extents if extent.segment == number]:
            dropped += self._drop_extent(extent, extent.first, extent.stop, "oldest")
        runs = [entry for entry in state.delayed if state.place(entry[1].frame)[0] == number]
        if runs:
            state.delayed = [entry for entry in state.delayed if entry not in runs]
            heapify(state.delayed)
            dropped += self._drop_delayed(runs)
        return dropped

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
        for extent in [extent for extent in state.backlog.extents if extent.newest_ns < cutoff]:
            self._drop_extent(extent, extent.first, extent.stop, "max_age")
        state.drop(state.backlog.drop_where(lambda run: run.frame.enqueued_ns < cutoff), "max_age")
        return state.counters.dropped["max_age"] - before
