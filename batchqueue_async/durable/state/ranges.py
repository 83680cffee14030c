"""A set of sequence numbers, kept as sorted ranges: small when records are settled roughly in order."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_MOST = 0xFFFF


class RangeSet:
    """Half-open ranges of whole numbers, 16 bytes a range.

    Example:
        >>> done = RangeSet()
        >>> done.add(0, 5), done.add(3, 8), done.count
        (5, 3, 8)
        >>> list(done.missing(0, 10))
        [(8, 10)]
    """

    __slots__ = ("_highs", "_lows", "count")

    def __init__(self) -> None:
        self._lows: array[int] = array("Q")
        self._highs: array[int] = array("Q")
        self.count = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._lows, self._highs, strict=True))

    def __len__(self) -> int:
        return len(self._lows)

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._lows, value) - 1
        return at >= 0 and value < self._highs[at]

    def add(self, low: int, high: int) -> int:
        """Put in [low, high); the answer is how many of them were not in yet."""
        if low >= high:
            return 0
        lows, highs = self._lows, self._highs
        if highs and highs[-1] == low:
            # The usual case by far: records are settled in order.
            highs[-1] = high
            self.count += high - low
            return high - low
        start = bisect_left(highs, low)
        stop = bisect_right(lows, high)
        new = high - low
        if start < stop:
            low, high = min(low, lows[start]), max(high, highs[stop - 1])
            new = (high - low) - sum(highs[at] - lows[at] for at in range(start, stop))
        lows[start:stop] = array("Q", (low,))
        highs[start:stop] = array("Q", (high,))
        self.count += new
        return new

    def copy(self) -> RangeSet:
        """The same ranges, for another thread to look at."""
        other = RangeSet()
        other._lows, other._highs, other.count = self._lows[:], self._highs[:], self.count
        return other

    def missing(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The parts of [low, high) that are not in the set, in order."""
        lows, highs = self._lows, self._highs
        at = bisect_right(highs, low)
        while low < high:
            if at == len(lows) or lows[at] >= high:
                yield low, high
                return
            if lows[at] > low:
                yield low, lows[at]
            low = highs[at]
            at += 1

    def split(self, at: int) -> RangeSet:
        """Take out everything from `at` on, and return it."""
        tail = RangeSet()
        for low, high in self:
            if high > at:
                tail.add(max(low, at), high)
        keep = RangeSet()
        for low, high in self:
            keep.add(low, min(high, at))
        self._lows, self._highs, self.count = keep._lows, keep._highs, keep.count
        return tail


class RangeMap:
    """Counts of sequence numbers, kept as sorted ranges that don't overlap: 18 bytes a range, 0 for all the others.

    Example:
        >>> times = RangeMap()
        >>> times.put(0, 10, 1), times.put(4, 6, 2)
        (None, None)
        >>> list(times)
        [(0, 4, 1), (4, 6, 2), (6, 10, 1)]
    """

    __slots__ = ("_counts", "_highs", "_lows")

    def __init__(self, parts: Iterable[tuple[int, int, int]] = ()) -> None:
        self._lows: array[int] = array("Q")
        self._highs: array[int] = array("Q")
        self._counts: array[int] = array("H")
        for low, high, count in parts:
            self.put(low, high, count)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return iter(zip(self._lows, self._highs, self._counts, strict=True))

    def __len__(self) -> int:
        return len(self._lows)

    def put(self, low: int, high: int, count: int) -> None:
        """[low, high) have this count from now on, of 65,535 at most."""
        lows, highs, counts = self._lows, self._highs, self._counts
        count = min(count, _MOST)
        if not highs or highs[-1] < low:
            # The usual case by far: records are leased in order.
            lows.append(low)
            highs.append(high)
            counts.append(count)
            return
        at = bisect_right(lows, low) - 1
        if at >= 0 and counts[at] == count and highs[at] >= low:
            if high <= highs[at]:
                return
            if at + 1 == len(lows) or lows[at + 1] > high:
                highs[at] = high
                return
        start, stop = bisect_left(highs, low), bisect_right(lows, high)
        parts = [
            (lows[place], min(highs[place], low), counts[place]) for place in range(start, stop) if lows[place] < low
        ]
        _append(parts, low, high, count)
        for place in range(start, stop):
            if highs[place] > high:
                _append(parts, max(lows[place], high), highs[place], counts[place])
        lows[start:stop] = array("Q", (part[0] for part in parts))
        highs[start:stop] = array("Q", (part[1] for part in parts))
        counts[start:stop] = array("H", (part[2] for part in parts))

    def within(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """[low, high) in parts, each with its count."""
        at = bisect_right(self._highs, low)
        while low < high:
            if at == len(self._lows) or self._lows[at] >= high:
                yield low, high, 0
                return
            if self._lows[at] > low:
                yield low, self._lows[at], 0
                low = self._lows[at]
            stop = min(self._highs[at], high)
            yield low, stop, self._counts[at]
            low = stop
            at += 1


def _append(parts: list[tuple[int, int, int]], low: int, high: int, count: int) -> None:
    if parts and parts[-1][1] == low and parts[-1][2] == count:
        parts[-1] = (parts[-1][0], high, count)
    else:
        parts.append((low, high, count))
