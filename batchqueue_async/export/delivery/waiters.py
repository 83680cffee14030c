"""Those who wait for records to be delivered: `Exporter.deliver`. Pure but for its futures."""

from __future__ import annotations

from contextlib import contextmanager
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from batchqueue_async.errors import ItemDroppedError, PermanentError
from batchqueue_async.export.send_queue.sorted_items import SortedItems

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Generator, Iterable, Sequence

    from batchqueue_async.export.send_queue.protocol import Placed

_EARLY_LEAST = 1_000


class DeliveryWaiter:
    """One call: the records that it waits for, and why some of them were not delivered.

    Attributes:
        left: the numbers that are not settled, each with the record's place in the call.
        failed: the places of records that were not delivered, by reason.
    """

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future
        self.left: dict[int, int] = {}
        self.failed: dict[str, list[int]] = {}

    def settle(self, number: int, why: str | None) -> None:
        """A record is done."""
        place = self.left.pop(number, None)
        if place is not None and why is not None:
            self.failed.setdefault(why, []).append(place)
        if not self.left and not self.future.done():
            self.future.set_result(None)


class DeliveryWaiters:
    """All calls that wait. While there is none it costs nothing.

    Args:
        on_disk: whether the queue drops records without saying so, so that `dropped_below` is to find them.
    """

    def __init__(self, *, on_disk: bool = False) -> None:
        self._by_number: dict[int, DeliveryWaiter] = {}
        # Of the calls that are putting their records, the lowest number that each may get.
        self._beginning = SortedItems[tuple[int, int]]()
        self._calls = 0
        # What was settled while a call did not know its numbers yet, from the lowest of those on.
        self._early: dict[int, str | None] = {}
        self._early_most = _EARLY_LEAST
        # What the queue may have let go of already, and whose end is about to be reported.
        self._settling: set[int] = set()
        # What calls wait for, lowest first; what was settled since is still in it.
        self._on_disk = on_disk
        self._ranges: list[tuple[int, int]] = []
        self._closed: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self._by_number or self._beginning)

    def begin(self, next_number: int) -> tuple[int, int]:
        """A call is about to put its records, whose numbers are not below this; what `began` takes."""
        self._calls += 1
        mark = next_number, self._calls
        self._beginning.add(mark)
        return mark

    def began(self, mark: tuple[int, int], waiter: DeliveryWaiter | None, placed: Iterable[Placed]) -> None:
        """It has, and these are their numbers; or there is no call to wait any more."""
        if waiter is not None:
            self._enter(waiter, placed)
        self._beginning.remove(mark)
        self._forget_early()

    def _enter(self, waiter: DeliveryWaiter, placed: Iterable[Placed]) -> None:
        if not self._by_number:
            self._ranges.clear()
        for places, numbers in placed:
            for place, number in zip(places, numbers, strict=True):
                waiter.left[number] = place
                self._by_number[number] = waiter
            if self._on_disk and numbers:
                heappush(self._ranges, (numbers.start, numbers.stop))
        for number in list(waiter.left):
            if number in self._early:
                self._settle(number, self._early[number])
        if waiter.future.done():
            return
        if not waiter.left:
            waiter.future.set_result(None)
        elif self._closed is not None:
            # The put was confirmed by a disk that took longer than the shutdown.
            self.forget(waiter)
            waiter.future.set_exception(self._closed)

    def _forget_early(self) -> None:
        """Forget what no call can ask for any more; some of it may stay for a while, so that this costs little."""
        if not self._beginning:
            self._early.clear()
            self._early_most = _EARLY_LEAST
        elif len(self._early) > self._early_most:
            lowest = self._beginning.first[0]
            self._early = {number: why for number, why in self._early.items() if number >= lowest}
            self._early_most = 2 * len(self._early) + _EARLY_LEAST

    def settled(self, numbers: Sequence[int], why: str | None) -> None:
        """Records were delivered, or not, for this reason."""
        if self._beginning:
            lowest = self._beginning.first[0]
            self._early.update((number, why) for number in numbers if number >= lowest)
        if self._by_number:
            for number in numbers:
                self._settle(number, why)

    @contextmanager
    def settling(self, numbers: Sequence[int]) -> Generator[None]:
        """Records are being settled within the block: what the queue does not have any more was not dropped."""
        if not self:
            yield
            return
        self._settling.update(numbers)
        try:
            yield
        finally:
            self._settling.difference_update(numbers)

    def _settle(self, number: int, why: str | None) -> None:
        waiter = self._by_number.pop(number, None)
        if waiter is not None:
            waiter.settle(number, why)

    def dropped_below(self, oldest: int | None) -> None:
        """All numbers below this are settled: those that nobody reported were dropped by the queue's bounds."""
        later: list[tuple[int, int]] = []
        while self._ranges and (oldest is None or self._ranges[0][0] < oldest):
            low, end = heappop(self._ranges)
            high = end if oldest is None else min(end, oldest)
            for number in range(low, high):
                if number not in self._settling:
                    self._settle(number, "dropped")
                elif number in self._by_number:
                    later.append((number, number + 1))
            if high < end:
                later.append((high, end))
        for each in later:
            heappush(self._ranges, each)

    def forget(self, waiter: DeliveryWaiter) -> None:
        """The call does not wait any more."""
        for number in waiter.left:
            self._by_number.pop(number, None)

    def close(self, error: BaseException) -> None:
        """Nothing more is delivered."""
        self._closed = error
        for waiter in set(self._by_number.values()):
            if not waiter.future.done():
                waiter.future.set_exception(error)
        self._by_number.clear()


def error_of(why: str) -> Exception:
    """The reason of records that were not delivered, as an error."""
    if why == "dropped":
        return ItemDroppedError("dropped by the bounds of the send queue")
    return PermanentError(why)
