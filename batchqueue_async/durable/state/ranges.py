"""A set of sequence numbers, kept as sorted ranges: small when records are settled roughly in order."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
