"""What a partition holds: items in the order in which they came, or of some types each in a lane of its own.

A producer's fast path uses only `spare` and `tail`: `spare` counts the places down that may be filled without a
further look, and appending to `tail` is all there is to do. An `itertools.repeat` is the cheapest countdown there is:
one step of it costs a third of comparing a length with a limit.

Items have no numbers until their order matters, as they are taken out or waited for: then the buffer is sealed, and
they stand in runs, oldest first.
"""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchqueue_async.queue.line import Waiter
    from batchqueue_async.queue.partition import Partition
    from batchqueue_async.queue.waits import Wait

T = TypeVar("T")

NOTHING_TO_SPARE = repeat(None, 0)


class Lane(Generic[T]):
    """The items of one type in a partition: kept by type as they come, they need not be sorted as they go."""

    __slots__ = ("kind", "line", "spare", "tail")

    def __init__(self, kind: type, line: Partition[T]) -> None:
        self.kind = kind
        self.line = line
        self.tail: list[T] = []
        self.spare = line.spare

    def offer(self, item: T) -> bool:
        """Take an item in if the partition has a free place and nobody waits for it."""
        return self.line.offer(item, self)

    def redeem(self, waiter: Waiter, items: Iterable[T]) -> None:
        """Put items into the places that the waiter was granted."""
        self.line.redeem(waiter, items, self)

    def evict(self) -> T:
        """Remove the oldest waiting item of the partition to make room."""
        return self.line.evict()

    def watch(self, wait: Wait, count: int) -> None:
        """Let a caller wait for the last `count` items, put in right after `order`."""
        self.line.watch(wait, count)


class Buffer(Generic[T]):
    """Items in order, with a countdown of the places that producers may fill."""

    __slots__ = ("_position", "_sealed", "_sealed_count", "capacity", "lanes", "removed", "spare", "tail")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tail: list[T] = []
        self.spare = NOTHING_TO_SPARE
        self.lanes: list[Lane[T]] | None = None
        """Where items are kept by type instead of in `tail`."""
        # Items stand in the order of their numbers once they are sealed: in runs, from `_position` on in the first.
        self._sealed: deque[tuple[type | None, list[Any]]] | None = None
        self._sealed_count: int = 0
        self._position: int = 0
        self.removed: int = 0
        """How many items have left the buffer, taken or evicted: the sequence number of the oldest one inside."""

    def qsize(self) -> int:
        """How many items wait inside."""
        count = self._sealed_count + len(self.tail)
        for lane in self.lanes or ():
            count += len(lane.tail)
        return count

    def items(self) -> list[T]:
        """The items that wait inside: those with a number first, oldest first."""
        numbered = [item for _, run in self._sealed or () for item in run][self._position :]
        return [*numbered, *self.tail, *(item for lane in self.lanes or () for item in lane.tail)]

    def empty(self) -> bool:
        """Whether no item waits inside."""
        return not self.qsize()

    @property
    def accepted(self) -> int:
        """How many items have ever come in."""
        return self.removed + self.qsize()

    def order(self) -> None:
        """Let what comes in later come after what is inside, whatever its type."""
        if self.lanes is not None:
            self.seal()

    def seal(self) -> None:
        """Give every item inside its number. The countdown of places goes on: as many are taken as before."""
        runs = self._open_runs()
        if runs:
            if self._sealed is None:
                self._sealed = deque()
            for run in runs:
                self._sealed.append(run)
                self._sealed_count += len(run[1])

    def close_lane(self, kind: type) -> None:
        """The items of a type come in elsewhere from now on."""
        self.seal()
        self.lanes = [lane for lane in self.lanes or () if lane.kind is not kind]

    def _set_spare(self, spare: repeat[None]) -> None:
        self.spare = spare
        for lane in self.lanes or ():
            lane.spare = spare  # one countdown for all of them

    def _open_runs(self) -> list[tuple[type | None, list[T]]]:
        """Take out what is not sealed."""
        runs: list[tuple[type | None, list[T]]] = []
        if self.tail:
            runs.append((None, self.tail))
            self.tail = []
        for lane in self.lanes or ():
            if lane.tail:
                runs.append((lane.kind, lane.tail))
                lane.tail = []
        return runs

    def _all_sealed(self) -> list[tuple[type | None, list[T]]]:
        runs = list(self._sealed or ())
        if self._position:
            runs[0] = (runs[0][0], runs[0][1][self._position :])
        self._sealed = None
        self._sealed_count = self._position = 0
        return runs

    def _remove(self, most: int) -> list[tuple[type | None, list[T]]]:
        self.seal()
        runs: list[tuple[type | None, list[T]]] = []
        while most and self._sealed:
            kind, run = self._sealed[0]
            start, end = self._position, min(self._position + most, len(run))
            if end < len(run):
                taken = run[start:end]
                # Taken places let go of their items at once; the list itself goes when it is used up.
                gone: list[Any] = [None] * len(taken)
                run[start:end] = gone
                self._position = end
            else:
                taken = run[start:] if start else run
                self._sealed.popleft()
                self._position = 0
            runs.append((kind, taken))
            most -= len(taken)
            self._sealed_count -= len(taken)
            self.removed += len(taken)
        return runs

    def drop(self) -> list[T]:
        """Remove everything, and tell nobody: the loop of those who wait has ended."""
        return [item for _, run in self._remove(self.qsize()) for item in run]
