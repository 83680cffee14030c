"""Runs that were leased, came back, and still have their payloads: what is next of them, and what is oldest."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchqueue_async.leases.run import Run

_SPARE = 64


class ReturnedRuns:
    """Runs by the queue's order and by their age, at once; none overlaps another."""

    # Invariant: both heaps have an entry for each run; the entries of runs that are gone go when they come up.
    def __init__(self, *, newest_first: bool) -> None:
        self._newest_first = newest_first
        self._runs: dict[int, Run] = {}
        self._by_age: list[tuple[int, int]] = []
        self._by_end: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def add(self, run: Run) -> None:
        """A run comes back."""
        self._runs[run.seq] = run
        heappush(self._by_age, (run.seq, run.end))
        if self._newest_first:
            heappush(self._by_end, (-run.end, run.seq))
        if len(self._by_age) > 2 * len(self._runs) + _SPARE:
            self._by_age = sorted((each.seq, each.end) for each in self)
        if len(self._by_end) > 2 * len(self._runs) + _SPARE:
            self._by_end = sorted((-each.end, each.seq) for each in self)

    def remove(self, run: Run) -> None:
        """A run is leased again, or dropped."""
        del self._runs[run.seq]

    def has(self, run: Run) -> bool:
        """Whether this very run is in."""
        return self._runs.get(run.seq) is run

    def next(self) -> Run | None:
        """The run that is to be delivered next."""
        if not self._newest_first:
            return self.oldest()
        heap = self._by_end
        while heap:
            run = self._runs.get(heap[0][1])
            if run is not None and run.end == -heap[0][0]:
                return run
            heappop(heap)
        return None

    def oldest(self) -> Run | None:
        """The run with the oldest record."""
        heap = self._by_age
        while heap:
            run = self._runs.get(heap[0][0])
            if run is not None and run.end == heap[0][1]:
                return run
            heappop(heap)
        return None
