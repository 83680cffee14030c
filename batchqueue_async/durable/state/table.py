"""What is known of each segment while the queue is open: its place in the sequence, its size, what is settled."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk.acklog import LEASED, LOST, Entry
from batchqueue_async.durable.state.ranges import RangeMap, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchqueue_async.durable.disk.format import SegmentHeader


class Segment:
    """One segment of an open queue. `first` to `end` are its sequence numbers, `start` to `data_end` its frames."""

    __slots__ = (
        "attempts",
        "closed",
        "data_end",
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
        "settled",
        "size",
        "sparse_at",
        "swapping",
        "unreadable",
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
        # A compacted segment: where each frame begins, by its first number. Places from before are looked up by number.
        self.index: tuple[array[int], array[int]] | None = None
        self.swapping = False

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
        firsts, offsets = self.index or (array("Q"), array("Q"))
        start, stop = bisect_left(firsts, low), bisect_left(firsts, high)
        return (
            offsets[start] if start < len(offsets) else self.data_end,
            offsets[stop] if stop < len(offsets) else self.data_end,
        )

    def settle(self, kind: int, low: int, high: int) -> int:
        """Mark [low, high) as done for this reason, in memory and for the hint; how many of them were not."""
        new = self.settled.add(low, high)
        if kind == LOST:
            self.lost.add(low, high)
        if new:
            self.note(Entry(kind, low, high))
        return new

    def note(self, entry: Entry) -> None:
        """Remember an entry for the hint, joined to the one before it where it continues it."""
        pending = self.pending
        if pending and (last := pending[-1]).high == entry.low and last[0] == entry.kind and last[3] == entry.attempts:
            pending[-1] = Entry(entry.kind, last.low, entry.high, entry.attempts)
        else:
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
