"""How long the oldest record of a send queue has been in it, from a mark per moment instead of a time per record. Pure.

A mark says that the records from a number on came in at a time or later. Numbers rise with time, so the last mark at or
below the oldest number bounds its age from above, by the distance of two marks at most.
"""

from __future__ import annotations

from bisect import bisect_right

RESOLUTION = 0.25
"""Seconds between two marks, while there are few."""
MOST = 2048
"""Marks at most: beyond, every second one is dropped, and the bound is less close."""
_CROWDED = 128


class AgeMarks:
    """The marks of one send queue; `note` is called per put, `age` from any thread.

    Example:
        >>> marks = AgeMarks()
        >>> marks.note(0, 100.0)
        >>> marks.note(500, 160.0)
        >>> marks.age(499, 170.0), marks.age(500, 170.0), marks.age(None, 170.0)
        (70.0, 10.0, 0.0)
    """

    __slots__ = ("_crowded_at", "_marks", "_next", "_step")

    def __init__(self) -> None:
        # Replaced, never changed but at its end: a reader on another thread bisects a list that stays sorted.
        self._marks: list[tuple[int, float]] = []
        self._step = RESOLUTION
        self._next = float("-inf")
        self._crowded_at = _CROWDED

    @property
    def crowded(self) -> bool:
        """Whether it is time to forget marks, by `settled`."""
        return len(self._marks) >= self._crowded_at

    def note(self, number: int, now: float) -> None:
        """Records came in, the first of them with this number."""
        marks = self._marks
        if marks and (now < self._next or number <= marks[-1][0]):
            return  # the mark before stands for these, too
        marks.append((number, now))
        self._next = now + self._step

    def age(self, oldest: int | None, now: float) -> float:
        """Seconds since the record with this number came in, at most; 0 where there is none."""
        marks = self._marks
        if oldest is None or not marks:
            return 0.0
        place = bisect_right(marks, (oldest, float("inf")))
        return max(0.0, now - marks[max(0, place - 1)][1])

    def settled(self, oldest: int | None) -> None:
        """Forget marks that no record needs, since all before this number are settled."""
        marks = self._marks
        place = len(marks) if oldest is None else bisect_right(marks, (oldest, float("inf"))) - 1
        left = marks[max(0, place) :]
        if len(left) >= MOST:
            left = left[::2]
            self._step *= 2
        elif len(left) < _CROWDED:
            self._step = RESOLUTION
        self._marks = left
        self._crowded_at = max(_CROWDED, min(MOST, 2 * len(left)))
