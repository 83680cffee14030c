"""What is known of each segment while the queue is open: its place in the sequence, its size, what is settled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.durable.disk.acklog import LEASED, LOST, Entry
from batchqueue_async.durable.state.ranges import RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
        "hint_bytes",
        "lost",
        "marker",
        "moved",
        "newest_ns",
        "number",
        "pending",
        "proven",
        "settled",
        "size",
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
        self.attempts: list[tuple[int, int, int]] = []
        self.pending: list[Entry] = []
        # Records below this were durable, or have not met a crash since: an atomic frame of theirs can't be torn.
        self.proven = 1 << 63
        self.hint_bytes = 0
        self.fresh_hint = False
        self.moved: tuple[int, int, int] | None = None

    @property
    def unsettled(self) -> int:
        """How many of its records are still owed to a consumer."""
        return self.end - self.first - self.settled.count

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

    def attempts_in(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """[low, high) in parts, with how often each was leased in earlier runs of the program."""
        for start, stop, times in self.attempts:
            if stop <= low:
                continue
            if start >= high:
                break
            if start > low:
                yield low, start, 0
                low = start
            yield low, min(stop, high), times
            low = min(stop, high)
        if low < high:
            yield low, high, 0


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
