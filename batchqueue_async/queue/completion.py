"""Waiting until items have an outcome: what a `deliver` or a `flush` counts on, without a future per item.

A caller's `CompletionWait` is spread over ranges of sequence numbers, each in one partition. A partition finishes its
items in the order of their numbers, and hands the ranges out in that order too: so the first range that is not
complete ends every look at them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Protocol

from batchqueue_async.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.queue.drain import DrainTask


class RangeHolder(Protocol):
    """Where the items of a range are: a partition, or a migration on its way to one."""

    @property
    def drained_by(self) -> DrainTask[Any] | None:
        """The drain task that has to go on before the items are finished."""
        ...

    def forget_range(self) -> None:
        """Nobody waits for one of its ranges any more."""
        ...


class CompletionWait:
    """One caller who waits for items in several partitions; `future` resolves when all are finished.

    Attributes:
        failures: what kept some of the items from being handled.
        lost: why some of what a fence stands behind will never be finished; None if all was.
        broken: whether the wait was ended because it could never end by itself.
    """

    __slots__ = ("_open", "_ranges", "_sealed", "broken", "failures", "future", "lost")

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failures: list[Failure] = []
        self.lost: BaseException | None = None
        self.broken = False
        self._open = 0
        self._sealed = False
        self._ranges: list[SequenceRange] = []

    def open_range(self, holder: RangeHolder, start: int, end: int) -> SequenceRange:
        """Wait for one range more, until it is reached."""
        self._open += 1
        added = SequenceRange(self, holder, start, end)
        self._ranges.append(added)
        return added

    def close_range(self) -> None:
        """One range less to wait for."""
        self._open -= 1
        self._resolve()

    def seal(self) -> None:
        """Everything to wait for has been named."""
        self._sealed = True
        self._resolve()

    def _resolve(self) -> None:
        if self._sealed and not self._open and not self.future.done():
            self.future.set_result(None)

    def break_wait(self) -> None:
        """End the wait: it is part of a circle of waits."""
        if not self.future.done():
            self.broken = True
            self.future.set_result(None)

    def fail(self, items: Sequence[Any], error: BaseException) -> None:
        """Some of the items were not handled."""
        if items:
            self.failures.append(Failure(tuple(items), error))

    def needs(self) -> list[list[DrainTask[Any]]]:
        """Whom the caller waits for: every drain task that has some of its items."""
        if self.future.done():
            return []
        owners = [each.holder.drained_by for each in self._ranges if not each.over]
        return [[owner] for owner in dict.fromkeys(owners) if owner is not None]

    def forget(self) -> None:
        """Nobody waits any more: leave no trace in the partitions."""
        for each in self._ranges:
            if not each.over:
                each.over = True
                each.holder.forget_range()
        self._ranges.clear()


class SequenceRange:
    """A range of the items of a partition, or of a migration, that a `CompletionWait` counts on.

    An empty range is a fence: its caller wants to know when everything before it is finished, and not how.

    Attributes:
        over: whether nobody waits for it any more: it was reached, or its caller has left.
    """

    __slots__ = ("end", "holder", "over", "start", "wait")

    def __init__(self, wait: CompletionWait, holder: RangeHolder, start: int, end: int) -> None:
        self.wait = wait
        self.holder = holder
        self.start = start
        self.end = end
        self.over = False

    def reach(self) -> None:
        """Every item of the range is finished."""
        if not self.over:
            self.over = True
            self.wait.close_range()

    def fail_from(self, items: Sequence[Any], first: int, error: BaseException) -> None:
        """None of these items, numbered from `first` on, will be handled."""
        if self.over:
            return
        if self.start == self.end:
            self.wait.lost = error
        else:
            self.wait.fail(items[max(0, self.start - first) : max(0, self.end - first)], error)


_MANY = 16
"""So many ranges that nobody waits for any more are not worth a look."""


class RangeQueue:
    """The ranges of one partition (or migration) that somebody waits for.

    They come in the order of their numbers, starts and ends alike, and no two of them overlap: so those that are
    reached are always the first ones, and the one that holds a number is found without looking at all of them.
    """

    __slots__ = ("_first", "_forgotten", "_ranges")

    def __init__(self) -> None:
        self._ranges: list[SequenceRange] = []
        self._first = 0
        """What stands before it in the list was reached."""
        self._forgotten = 0

    @property
    def empty(self) -> bool:
        """Whether nobody waits."""
        return self._first + self._forgotten >= len(self._ranges)

    def watch(self, wait: CompletionWait, holder: RangeHolder, start: int, end: int) -> None:
        """Let a caller wait for the items from `start` to `end - 1`, which come after all that are waited for."""
        last = self._ranges[-1] if self._first < len(self._ranges) else None
        if last is not None and last.wait is wait and not last.over and last.start < last.end == start < end:
            last.end = end
        else:
            self._ranges.append(wait.open_range(holder, start, end))

    def settle(self, finished: int) -> None:
        """Everything below this number is finished: tell those who wait for it."""
        ranges, first = self._ranges, self._first
        while self._first < len(ranges) and ranges[self._first].end <= finished:
            self._forgotten -= ranges[self._first].over
            self._first += 1
        reached = ranges[first : self._first]
        if self._first > len(ranges) // 2:
            del ranges[: self._first]
            self._first = 0
        for each in reached:
            each.reach()

    def fail(self, number: int, item: Any, error: BaseException) -> None:
        """Tell who waits for an item that it was not handled."""
        index = bisect_right(self._ranges, number, lo=self._first, key=_start_of) - 1
        if index >= self._first:
            found = self._ranges[index]
            if number < found.end and not found.over:
                found.wait.fail((item,), error)

    def fail_from(self, items: Sequence[Any], first: int, error: BaseException) -> None:
        """Tell those who wait for items numbered from `first` on that none of these will be handled."""
        for each in self._ranges[self._first :]:
            each.fail_from(items, first, error)

    def take_all(self) -> list[SequenceRange]:
        """Remove the ranges that somebody waits for, in order."""
        left = [each for each in self._ranges[self._first :] if not each.over]
        self._ranges.clear()
        self._first = self._forgotten = 0
        return left

    def forget_one(self) -> None:
        """Nobody waits for one of the ranges any more; its room is given back when there are many."""
        self._forgotten += 1
        if self._forgotten > _MANY and 2 * self._forgotten > len(self._ranges) - self._first:
            self._ranges = [each for each in self._ranges[self._first :] if not each.over]
            self._first = self._forgotten = 0


def _start_of(range_: SequenceRange) -> int:
    return range_.start
