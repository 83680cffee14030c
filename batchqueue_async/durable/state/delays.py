"""Records that wait for a time: ranges of sequence numbers by the time at which they are due."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import NamedTuple

_CHUNK = 512


class _Chunk(NamedTuple):
    dues: array[float]
    lows: array[int]
    highs: array[int]


class Delays:
    """Ranges by time, 24 bytes each, in chunks: what is added among a million moves some hundreds at most.

    Records that are settled meanwhile stay in until their time: who takes ranges out knows what is still wanted.

    Example:
        >>> delays = Delays()
        >>> delays.add(5.0, 10, 20), delays.add(1.0, 7, 9)
        (None, None)
        >>> delays.next_due, delays.pop(2.0, 100), delays.next_due
        (1.0, [(7, 9)], 5.0)
    """

    # Invariant: dues rise within and over the chunks, no chunk is empty, and `_tops` has the last due of each.
    __slots__ = ("_chunks", "_tops")

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._tops: list[float] = []

    def __len__(self) -> int:
        return sum(len(chunk.dues) for chunk in self._chunks)

    @property
    def next_due(self) -> float | None:
        """The earliest time of all; None when nothing is delayed."""
        return self._chunks[0].dues[0] if self._chunks else None

    def add(self, due: float, low: int, high: int) -> None:
        """[low, high) are due then."""
        if not self._chunks:
            self._chunks.append(_Chunk(array("d"), array("Q"), array("Q")))
            self._tops.append(due)
        at = min(bisect_right(self._tops, due), len(self._chunks) - 1)
        chunk = self._chunks[at]
        place = bisect_right(chunk.dues, due)
        if place and chunk.dues[place - 1] == due and chunk.highs[place - 1] == low:
            chunk.highs[place - 1] = high
            return
        chunk.dues.insert(place, due)
        chunk.lows.insert(place, low)
        chunk.highs.insert(place, high)
        self._tops[at] = chunk.dues[-1]
        if len(chunk.dues) > 2 * _CHUNK:
            halves = [
                _Chunk(chunk.dues[part], chunk.lows[part], chunk.highs[part])
                for part in (slice(_CHUNK), slice(_CHUNK, None))
            ]
            self._chunks[at : at + 1] = halves
            self._tops[at : at + 1] = [half.dues[-1] for half in halves]

    def pop(self, now: float, most: int) -> list[tuple[int, int]]:
        """Take out what is due by now, `most` ranges at a time."""
        taken: list[tuple[int, int]] = []
        while self._chunks and len(taken) < most:
            chunk = self._chunks[0]
            stop = min(bisect_right(chunk.dues, now), most - len(taken))
            if not stop:
                break
            taken += zip(chunk.lows[:stop], chunk.highs[:stop], strict=True)
            for column in chunk:
                del column[:stop]
            if not chunk.dues:
                del self._chunks[0]
                del self._tops[0]
        return taken

    def clear(self) -> None:
        """Nothing waits for a time any longer."""
        self._chunks.clear()
        self._tops.clear()
