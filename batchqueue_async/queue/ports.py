"""What the queue asks of those who stand behind it in an item's way: the protocols that they fulfil."""

from __future__ import annotations

from typing import Any, Protocol


class ThreadInbox(Protocol):
    """What a queue knows of the inbox by which other threads and loops put items in."""

    def collect(self) -> None:
        """Move what came in into the partitions."""
        ...

    def meet_partitions(self) -> None:
        """Get to know new partitions and routes."""
        ...

    def close(self) -> None:
        """Take nothing in any more."""
        ...

    @property
    def wake_ups(self) -> int:
        """How often the loop was asked to collect."""
        ...

    def uncollected(self) -> int:
        """How many items have come in that `collect` has not moved yet; from any thread, without a lock."""
        ...

    def give_back(self) -> list[Any]:
        """What came in and the queue's loop has not seen."""
        ...


class PartitionCredits(Protocol):
    """What a partition knows of the places that it lent to the inbox."""

    def refill(self) -> None:
        """Lend the inbox the places that are free now."""
        ...

    def reclaim(self) -> bool:
        """Take places back that the inbox has not used; whether there were any."""
        ...

    def unused(self) -> int:
        """How many of the places lent to the inbox hold no item."""
        ...
