"""Those who wait for records to be delivered: `Exporter.deliver`. Pure but for its futures."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from batchqueue_async.errors import ItemDroppedError, PermanentError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Generator, Iterable, Sequence

    from batchqueue_async.export.send_queue.protocol import Placed


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
    """All calls that wait. While there is none it costs nothing."""

    def __init__(self) -> None:
        self._by_number: dict[int, DeliveryWaiter] = {}
        self._beginning = 0
        # What was settled while a call did not know its numbers yet.
        self._early: dict[int, str | None] = {}
        # What the queue may have let go of already, and whose end is about to be reported.
        self._settling: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._by_number or self._beginning)

    def begin(self) -> None:
        """A call is about to put its records."""
        self._beginning += 1

    def began(self, waiter: DeliveryWaiter | None, placed: Iterable[Placed]) -> None:
        """It has, and these are their numbers; or there is no call to wait any more."""
        if waiter is not None:
            for places, numbers in placed:
                for place, number in zip(places, numbers, strict=True):
                    waiter.left[number] = place
                    self._by_number[number] = waiter
            for number in list(waiter.left):
                if number in self._early:
                    self._settle(number, self._early[number])
            if not waiter.left and not waiter.future.done():
                waiter.future.set_result(None)
        self._beginning -= 1
        if not self._beginning:
            self._early.clear()

    def settled(self, numbers: Sequence[int], why: str | None) -> None:
        """Records were delivered, or not, for this reason."""
        if self._beginning:
            self._early.update(dict.fromkeys(numbers, why))
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
        gone = [
            number for number in self._by_number if (oldest is None or number < oldest) and number not in self._settling
        ]
        for number in gone:
            self._settle(number, "dropped")

    def forget(self, waiter: DeliveryWaiter) -> None:
        """The call does not wait any more."""
        for number in waiter.left:
            self._by_number.pop(number, None)

    def close(self, error: BaseException) -> None:
        """Nothing more is delivered."""
        for waiter in set(self._by_number.values()):
            if not waiter.future.done():
                waiter.future.set_exception(error)
        self._by_number.clear()


def error_of(why: str) -> Exception:
    """The reason of records that were not delivered, as an error."""
    if why == "dropped":
        return ItemDroppedError("dropped by the bounds of the send queue")
    return PermanentError(why)
