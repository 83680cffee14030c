"""What is known of each segment while the queue is open: its place in the sequence, its size, what is settled."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk.acklog import DROPPED, LEASED, LOST, Entry
from batchqueue_async.durable.state.ranges import RangeMap, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchqueue_async.durable.disk.format import SegmentHeader

# How far apart the places are that are remembered: what is read in vain before a record that is wanted.
_GRAIN = 16 << 10


class Segment:
    """One segment of an open queue. `first` to `end` are its sequence numbers, `start` to `data_end` its frames."""

    __slots__ = (
        "attempts",
        "closed",
        "compacted",
        "data_end",
        "delayed",
        "deleted",
        "end",
        "first",
        "fresh_hint",
        "header",
        "held",
        "hint_anew",
        "hint_bytes",
        "index",
        "leased",
        "lost",
        "marker",
        "moved",
        "newest_ns",
        "number",
        "pending",
        "proven",
        "returned",
        "settled",
        "size",
        "sparse_at",
        "stuck",
        "swapping",
        "unreadable",
        "void_end",
    )

    def __init__(self, header: SegmentHeader, size: int) -> None:
        self.header = header
        self.number = header.number
        self.marker = header.marker
        first = header.first_seq
        self.first = self.end = first
        self.size = self.data_end = size
        self.newest_ns = 0
        self.closed = False
        self.deleted = False
        # It could not be deleted when that was tried last.
        self.stuck = False
        self.unreadable = False
        self.settled = RangeSet()
        self.lost = RangeSet()
        # How often each record was leased; kept up with every lease, and as true for records that are settled by now.
        self.attempts = RangeMap()
        self.leased = 0
        self.pending: list[Entry] = []
        # Records below this were durable, or have not met a crash since: an atomic frame of theirs can't be torn.
        self.proven = 1 << 63
        self.hint_bytes = 0
        # How large the hint was when it was last written anew.
        self.hint_anew = 0
        self.fresh_hint = False
        self.moved: tuple[int, int, int] | None = None
        # How many records its file holds, and how many have to be settled before compaction looks at it.
        self.held = 0
        self.sparse_at = 1 << 63
        # Where frames begin, by their first number: of a compacted segment each, else one in every `_GRAIN` bytes of
        # those that were written or read in this run. What is leased is written or read before.
        self.index: tuple[array[int], array[int]] = (array("Q"), array("Q"))
        self.compacted = False
        # Records that wait on the disk alone: for the delay of their nack, or to be delivered again.
        self.delayed = RangeSet()
        self.returned = RangeSet()
        self.swapping = False
        # Copies of the records from `end` up to here could not be cut off the file, and count no more.
        self.void_end = 0

    @property
    def unsettled(self) -> int:
        """How many of its records are still owed to a consumer."""
        return self.end - self.first - self.settled.count

    def arm_compaction(self, held: int) -> None:
        """It holds so many records, and no longer grows: it is looked at when a third of them at most is unsettled."""
        self.held = held
        self.sparse_at = self.end - self.first - held // 3

    @property
    def sparse(self) -> bool:
        """Whether so little of it is unsettled that compaction may be worth it."""
        return self.settled.count >= self.sparse_at

    def span(self, low: int, high: int) -> tuple[int, int]:
        """Where the frames with the numbers [low, high) are in a compacted segment."""
        firsts, offsets = self.index
        start, stop = bisect_left(firsts, low), bisect_left(firsts, high)
        return (
            offsets[start] if start < len(offsets) else self.data_end,
            offsets[stop] if stop < len(offsets) else self.data_end,
        )

    def remember(self, first: int, offset: int) -> None:
        """The frame that begins with record `first` is at this offset."""
        if self.compacted:
            return
        firsts, offsets = self.index
        at = bisect_left(firsts, first)
        if at and offset - offsets[at - 1] < _GRAIN:
            return
        if at < len(firsts) and firsts[at] == first:
            return
        firsts.insert(at, first)
        offsets.insert(at, offset)
        if at + 2 < len(offsets) and offsets[at + 2] - offset < _GRAIN:
            del firsts[at + 1], offsets[at + 1]

    def take_places(self, other: Segment, first: int, shift: int) -> None:
        """Frames of `other` from record `first` on are here now, this much further on."""
        firsts, offsets = other.index
        at = bisect_left(firsts, first)
        self.index[0].extend(firsts[at:])
        self.index[1].extend(array("Q", (offset + shift for offset in offsets[at:])))
        del firsts[at:], offsets[at:]

    def near(self, low: int, high: int) -> tuple[int, int, int]:
        """Between which offsets [low, high) are, with what is read on the way, and the number of the first of that."""
        firsts, offsets = self.index
        start, stop = bisect_right(firsts, low) - 1, bisect_left(firsts, high)
        end = offsets[stop] if stop < len(offsets) else self.data_end
        return (self.header.data_start, end, 0) if start < 0 else (offsets[start], end, firsts[start])

    def reach(self, high: int) -> int:
        """The number before which all is read with what is below `high`."""
        firsts = self.index[0]
        stop = bisect_left(firsts, high)
        return firsts[stop] if stop < len(firsts) else self.end

    def cut(self, low: int, high: int, size: int, *, newest_first: bool) -> tuple[int, int]:
        """The beginning of [low, high), or its end: what is in about `size` bytes."""
        firsts, offsets = self.index
        start, end, _ = self.near(low, high)
        if end - start <= size:
            return low, high
        if newest_first:
            at = bisect_right(offsets, end - size)
            return (min(max(low, firsts[at]), high - 1) if at < len(firsts) else low), high
        at = max(bisect_right(offsets, start + size) - 1, 0)
        while at < len(firsts) and firsts[at] <= low:
            at += 1
        return low, min(high, firsts[at]) if at < len(firsts) else high

    def settle(self, kind: int, low: int, high: int) -> int:
        """Mark [low, high) as done for this reason, in memory and for the hint; how many of them were not."""
        new = self.settled.add(low, high)
        if kind == LOST:
            self.lost.add(low, high)
        if new:
            self.note(Entry(kind, low, high))
        return new

    def void(self, high: int) -> None:
        """What is left behind its records of those up to `high` was not confirmed, or is elsewhere: it counts no more.

        Until that is noted, a crash leaves two copies of the same number, of which the later is right.
        """
        if self.end < high:
            self.void_end = high
            self.note(Entry(DROPPED, self.end, high))

    def note(self, entry: Entry) -> None:
        """Remember an entry for the hint, joined to the last or the one before where it continues that.

        In the hint the order of entries means nothing. Records that are leased and acknowledged batch by batch take
        two entries by this, and not two for each batch.
        """
        pending = self.pending
        kind, low, high, attempts = entry
        for at in (-1, -2)[: len(pending)]:
            last = pending[at]
            if last[2] == low and last[0] == kind and last[3] == attempts:
                pending[at] = Entry(kind, last[1], high, attempts)
                return
        pending.append(entry)


def merge_attempts(entries: Iterable[Entry], settled: RangeSet) -> list[tuple[int, int, int]]:
    """Leases as sorted ranges apart from each other, with the highest count of each record that is still unsettled."""
    points: list[tuple[int, int, int]] = []
    for entry in entries:
        if entry.kind == LEASED:
            for low, high in settled.missing(entry.low, entry.high):
                points += [(low, 1, entry.attempts), (high, 0, entry.attempts)]
    points.sort()
    merged: list[tuple[int, int, int]] = []
    open_counts: dict[int, int] = {}
    previous = 0
    for place, opening, times in points:
        if open_counts and previous < place:
            top = max(open_counts)
            if merged and merged[-1][1] == previous and merged[-1][2] == top:
                merged[-1] = (merged[-1][0], place, top)
            else:
                merged.append((previous, place, top))
        previous = place
        open_counts[times] = open_counts.get(times, 0) + (1 if opening else -1)
        if not open_counts[times]:
            del open_counts[times]
    return merged
