"""Which segment is written anew without its settled records, and when: a few old records must not pin much room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.durable.disk.compaction import Task
from batchqueue_async.durable.disk.format import VERSION

if TYPE_CHECKING:
    from batchqueue_async.durable.disk.compaction import Compacted
    from batchqueue_async.durable.state.queue_state import QueueState
    from batchqueue_async.durable.state.table import Segment

# A copy takes at most this part of what it replaces: with the measuring, at most 4 bytes are read for each given back.
_PART = 3


class CompactionPlan:
    """The compaction decisions of one queue.

    A segment is looked at when at most a third of what it holds is unsettled (`Segment.arm_compaction`), so a byte is
    copied a few times at most, and never again for a segment that has not changed.
    """

    def __init__(self, state: QueueState) -> None:
        self._state = state
        # How many records of each were settled at the last tick: what has not changed since is not being consumed.
        self._seen: dict[int, int] = {number: state.segments[number].settled.count for number in state.sparse}
        self._quiet: list[int] = []
        self._deferred: set[int] = set()

    @property
    def waiting(self) -> bool:
        """Whether any segment may be worth it, now or later."""
        return bool(self._state.sparse or self._deferred)

    def tick(self) -> None:
        """Now and then: note in which segments nothing was settled since the last call."""
        state = self._state
        state.sparse |= self._deferred & state.segments.keys()
        self._deferred.clear()
        before = self._seen
        self._seen = {number: entry.settled.count for number in state.sparse if (entry := state.segments.get(number))}
        self._quiet = sorted((n for n, count in self._seen.items() if before.get(n) == count), reverse=True)

    def quiet(self) -> int | None:
        """The oldest segment that was quiet at the last tick, and still is."""
        state = self._state
        while self._quiet:
            number = self._quiet.pop()
            if number in state.sparse and state.segments[number].settled.count == self._seen.get(number):
                return number
        return None

    def passed(self) -> int | None:
        """When half of the room is used: the oldest segment that consumers have left behind."""
        state = self._state
        if not state.sparse or not state.room.is_half_used:
            return None
        number, front = min(state.sparse), state.backlog.front()
        return number if front is not None and number < front else None

    def any(self) -> int | None:
        """When somebody waits for room: the segment with the least in it."""
        segments = self._state.segments
        return min(self._state.sparse, default=None, key=lambda number: segments[number].unsettled)

    def task(self, number: int) -> Task | None:
        """What to do about a segment; None when it is better left alone."""
        state = self._state
        state.sparse.discard(number)
        entry = state.segments[number]
        if not self._eligible(entry):
            return None
        return Task(
            entry.header,
            entry.data_end,
            entry.end,
            entry.newest_ns,
            entry.settled.copy(),
            entry.unsettled,
            most=entry.size // _PART,
        )

    def _eligible(self, entry: Segment) -> bool:
        state = self._state
        return bool(
            entry.closed
            and entry.unsettled
            and not entry.deleted
            and not entry.unreadable
            and entry.number != state.newest
            and entry.header.version == VERSION
            and not state.relocating(entry.number)
        )

    def has_room(self, size: int) -> bool:
        """Whether there is room for the copy beside the segment: in the reserve, if need be."""
        return self._state.room.has(size)

    def refused(self, number: int) -> None:
        """It was not worth it: not again before half of what it holds now is settled."""
        entry = self._state.segments.get(number)
        if entry is not None:
            entry.arm_compaction(entry.unsettled)

    def defer(self, number: int) -> None:
        """Not now: at the next tick."""
        self._deferred.add(number)

    def undone(self, number: int) -> None:
        """The copy could not take the segment's place."""
        self._state.unswapped(number)

    def done(self, result: Compacted) -> None:
        """The copy has taken the segment's place."""
        self._state.compacted(result)
