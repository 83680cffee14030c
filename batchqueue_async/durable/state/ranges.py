"""Sets of sequence numbers, and numbers by sequence number, kept as sorted ranges: small when work is roughly in order.

The ranges are in chunks, so that a change among a million of them moves a few hundred at most.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_CHUNK = 512
_MOST = 0xFFFF


class _Chunk(NamedTuple):
    lows: array[int]
    highs: array[int]
    values: array[int]


def _chunk(parts: Sequence[tuple[int, int, int]]) -> _Chunk:
    lows, highs, values = zip(*parts, strict=True) if parts else ((), (), ())
    return _Chunk(array("Q", lows), array("Q", highs), array("H", values))


class RangeMap:
    """A value for each sequence number, 0 for most: 18 bytes a range of the same value.

    Example:
        >>> times = RangeMap()
        >>> times.put(0, 10, 1), times.put(4, 6, 2)
        (None, None)
        >>> list(times)
        [(0, 4, 1), (4, 6, 2), (6, 10, 1)]
    """

    # Invariant: ranges rise and don't overlap, neighbours that touch have other values, no chunk is empty, and
    # `_tops` has the end of each chunk.
    __slots__ = ("_chunks", "_tops")

    def __init__(self, parts: Iterable[tuple[int, int, int]] = ()) -> None:
        self._chunks: list[_Chunk] = []
        self._tops: list[int] = []
        for low, high, value in parts:
            self.put(low, high, value)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        for chunk in self._chunks:
            yield from zip(chunk.lows, chunk.highs, chunk.values, strict=True)

    def __reversed__(self) -> Iterator[tuple[int, int, int]]:
        for chunk in reversed(self._chunks):
            yield from zip(reversed(chunk.lows), reversed(chunk.highs), reversed(chunk.values), strict=True)

    def __len__(self) -> int:
        return sum(len(chunk.lows) for chunk in self._chunks)

    @property
    def first(self) -> int | None:
        """The lowest number that has a value."""
        return self._chunks[0].lows[0] if self._chunks else None

    @property
    def end(self) -> int | None:
        """One more than the highest."""
        return self._tops[-1] if self._tops else None

    def extend(self, low: int, high: int, value: int) -> bool:
        """`put`, if it goes on where the last range ends, with the same value."""
        if not self._tops or self._tops[-1] != low:
            return False
        chunk = self._chunks[-1]
        if chunk.values[-1] != value:
            return False
        chunk.highs[-1] = self._tops[-1] = high
        return True

    def put(self, low: int, high: int, value: int) -> None:
        """[low, high) have this value from now on, of 65,535 at most; 0 takes them out."""
        if low >= high:
            return
        value = min(value, _MOST)
        tops = self._tops
        if not tops or low >= tops[-1]:
            # The usual case by far: records are leased in order.
            if value and not self.extend(low, high, value):
                self._push(low, high, value)
            return
        at = bisect_left(tops, low)
        chunk = self._chunks[at]
        start = bisect_left(chunk.highs, low)
        stop = bisect_right(chunk.lows, high, start)
        if (
            stop == start + 1
            and chunk.values[start] == value
            and chunk.lows[start] <= low
            and chunk.highs[start] >= high
        ):
            return
        found = list(zip(chunk.lows[start:stop], chunk.highs[start:stop], chunk.values[start:stop], strict=True))
        if stop == len(chunk.lows):
            found += self._cut_following(at + 1, high)
        self._replace(at, start, stop, _painted(found, low, high, value))

    def _cut_following(self, at: int, high: int) -> list[tuple[int, int, int]]:
        """Take out of the chunks from `at` on what begins at `high` or before."""
        found: list[tuple[int, int, int]] = []
        end = at
        while end < len(self._chunks) and self._chunks[end].lows[0] <= high:
            chunk = self._chunks[end]
            stop = bisect_right(chunk.lows, high)
            found += zip(chunk.lows[:stop], chunk.highs[:stop], chunk.values[:stop], strict=True)
            if stop < len(chunk.lows):
                for column in chunk:
                    del column[:stop]
                break
            end += 1
        del self._chunks[at:end]
        del self._tops[at:end]
        return found

    def _replace(self, at: int, start: int, stop: int, parts: list[tuple[int, int, int]]) -> None:
        chunk = self._chunks[at]
        fresh = _chunk(parts)
        chunk.lows[start:stop] = fresh.lows
        chunk.highs[start:stop] = fresh.highs
        chunk.values[start:stop] = fresh.values
        size = len(chunk.lows)
        if not size:
            del self._chunks[at]
            del self._tops[at]
        elif size > 2 * _CHUNK:
            halves = [_Chunk(*(column[low : low + _CHUNK] for column in chunk)) for low in range(0, size, _CHUNK)]
            self._chunks[at : at + 1] = halves
            self._tops[at : at + 1] = [half.highs[-1] for half in halves]
        else:
            self._tops[at] = chunk.highs[-1]

    def _push(self, low: int, high: int, value: int) -> None:
        if not self._chunks or len(self._chunks[-1].lows) >= _CHUNK:
            self._chunks.append(_chunk([(low, high, value)]))
            self._tops.append(high)
            return
        chunk = self._chunks[-1]
        chunk.lows.append(low)
        chunk.highs.append(high)
        chunk.values.append(value)
        self._tops[-1] = high

    @classmethod
    def of_rising(cls, ranges: Sequence[tuple[int, int]], value: int) -> RangeMap:
        """The same value for ranges that rise and don't touch."""
        made = cls()
        for start in range(0, len(ranges), _CHUNK):
            lows, highs = zip(*ranges[start : start + _CHUNK], strict=True)
            made._chunks.append(_Chunk(array("Q", lows), array("Q", highs), array("H", [value]) * len(lows)))
            made._tops.append(highs[-1])
        return made

    def get(self, value: int) -> int:
        """The value of one number."""
        return next(self.within(value, value + 1))[2]

    def within(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """[low, high) in parts, each with its value."""
        at = bisect_right(self._tops, low)
        place = bisect_right(self._chunks[at].highs, low) if at < len(self._chunks) else 0
        while low < high:
            if at == len(self._chunks) or self._chunks[at].lows[place] >= high:
                yield low, high, 0
                return
            chunk = self._chunks[at]
            start, stop = chunk.lows[place], min(chunk.highs[place], high)
            if start > low:
                yield low, start, 0
                low = start
            yield low, stop, chunk.values[place]
            low = stop
            place += 1
            if place == len(chunk.lows):
                at, place = at + 1, 0

    def last_before(self, limit: int) -> tuple[int, int, int] | None:
        """The last range that begins below this number, as far as it is below it."""
        at = bisect_left(self._tops, limit)
        if at == len(self._chunks) or self._chunks[at].lows[0] >= limit:
            at -= 1
        if at < 0:
            return None
        lows, highs, values = self._chunks[at]
        place = bisect_left(lows, limit) - 1
        return lows[place], min(highs[place], limit), values[place]

    def copy(self) -> RangeMap:
        """The same, for another thread to look at."""
        other = RangeMap()
        other._chunks = [_Chunk(*(column[:] for column in chunk)) for chunk in self._chunks]
        other._tops = self._tops[:]
        return other


def _painted(found: list[tuple[int, int, int]], low: int, high: int, value: int) -> list[tuple[int, int, int]]:
    """These ranges, which touch [low, high), with this value painted over that."""
    parts: list[tuple[int, int, int]] = [(start, min(stop, low), v) for start, stop, v in found if start < low]
    if value:
        _join(parts, low, high, value)
    for start, stop, other in found:
        if stop > high:
            _join(parts, max(start, high), stop, other)
    return parts


def _join(parts: list[tuple[int, int, int]], low: int, high: int, value: int) -> None:
    if parts and parts[-1][1] == low and parts[-1][2] == value:
        parts[-1] = (parts[-1][0], high, value)
    else:
        parts.append((low, high, value))


class RangeSet:
    """A set of sequence numbers.

    Example:
        >>> done = RangeSet()
        >>> done.add(0, 5), done.add(3, 8), done.count
        (5, 3, 8)
        >>> list(done.missing(0, 10))
        [(8, 10)]
    """

    __slots__ = ("_map", "count")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._map = RangeMap()
        self.count = 0
        for low, high in ranges:
            self.add(low, high)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((low, high) for low, high, _ in self._map)

    def __reversed__(self) -> Iterator[tuple[int, int]]:
        return ((low, high) for low, high, _ in reversed(self._map))

    def __len__(self) -> int:
        return len(self._map)

    @property
    def first(self) -> int | None:
        """The lowest number."""
        return self._map.first

    @property
    def end(self) -> int | None:
        """One more than the highest."""
        return self._map.end

    def __contains__(self, value: int) -> bool:
        return self._map.get(value) > 0

    def add(self, low: int, high: int) -> int:
        """Put in [low, high); the answer is how many of them were not in yet."""
        if low >= high:
            return 0
        if self._map.extend(low, high, 1):
            # The usual case by far: records are settled in order.
            self.count += high - low
            return high - low
        new = sum(stop - start for start, stop, value in self._map.within(low, high) if not value)
        if new:
            self._map.put(low, high, 1)
            self.count += new
        return new

    def remove(self, low: int, high: int) -> int:
        """Take out [low, high); the answer is how many of them were in."""
        gone = sum(stop - start for start, stop in self.present(low, high))
        if gone:
            self._map.put(low, high, 0)
            self.count -= gone
        return gone

    def missing(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The parts of [low, high) that are not in the set, in order."""
        return ((start, stop) for start, stop, value in self._map.within(low, high) if not value)

    def present(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The parts of [low, high) that are in the set, in order."""
        return ((start, stop) for start, stop, value in self._map.within(low, high) if value)

    def last_before(self, limit: int) -> tuple[int, int] | None:
        """The last part of the set below this number.

        Example:
            >>> RangeSet([(0, 5), (7, 9)]).last_before(8)
            (7, 8)
        """
        found = self._map.last_before(limit)
        return found[:2] if found is not None else None

    @classmethod
    def of_rising(cls, ranges: Sequence[tuple[int, int]]) -> RangeSet:
        """A set of ranges that rise and don't touch, made without a call for each.

        Example:
            >>> done = RangeSet.of_rising([(0, 5), (7, 8)])
            >>> done.add(5, 7), list(done)
            (2, [(0, 8)])
        """
        made = cls()
        made._map = RangeMap.of_rising(ranges, 1)
        made.count = sum(high - low for low, high in ranges)
        return made

    def split(self, at: int) -> RangeSet:
        """Take out everything from `at` on, and return it."""
        top = next(reversed(self), (0, 0))[1]
        tail = RangeSet(self.present(at, top))
        self.remove(at, max(at, top))
        return tail

    def copy(self) -> RangeSet:
        """The same ranges, for another thread to look at."""
        other = RangeSet()
        other._map, other.count = self._map.copy(), self.count
        return other
