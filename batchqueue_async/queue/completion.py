"""Waiting until items have an outcome: what a `deliver` or a `flush` counts on, without a future per item.

A caller's `CompletionWait` is spread over ranges of sequence numbers, each in one partition. A partition finishes its
items in the order of their numbers, and hands the ranges out in that order too: so the first range that is not
complete ends every look at them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from batchqueue_async.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.partition import Partition


class RangeHolder(Protocol):
    """Where the items of a range are: a partition, or a migration on its way to one."""

    @property
    def drained_by(self) -> DrainTask[Any] | None:
        """The drain task that has to go on before the items are finished."""
        ...

    def forget(self, range_: SequenceRange) -> None:
        """Nobody waits for the range any more."""
        ...


class CompletionWait:
    """One caller who waits for items in several partitions; `future` resolves when all are finished.

    Attributes:
        failures: what kept some of the items from being handled; filled only for those who asked to know.
        broken: whether the wait was ended because it could never end by itself.
    """

    __slots__ = ("_open", "_ranges", "_sealed", "broken", "failures", "future")

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failures: list[Failure] = []
        self.broken = False
        self._open = 0
        self._sealed = False
        self._ranges: list[SequenceRange] = []

    def watch(self, partition: Partition[Any], start: int, end: int) -> None:
        """Wait for the items numbered from `start` to `end - 1` of a partition too."""
        if end <= partition.finished or end <= start:
            return
        last = partition.ranges[-1] if partition.ranges else None
        if last is not None and last.wait is self and last.end == start:
            last.end = end
            return
        if partition.ranges is None:
            partition.ranges = []
        partition.ranges.append(self.open_range(partition, start, end))

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
                each.holder.forget(each)
        self._ranges.clear()


class SequenceRange:
    """A range of the items of a partition, or of a migration, that a `CompletionWait` counts on."""

    __slots__ = ("end", "holder", "over", "start", "wait")

    def __init__(self, wait: CompletionWait, holder: RangeHolder, start: int, end: int) -> None:
        self.wait = wait
        self.holder = holder
        self.start = start
        self.end = end
        self.over = False

    def reach(self) -> None:
        """Every item of the range is finished."""
        self.over = True
        self.wait.close_range()
