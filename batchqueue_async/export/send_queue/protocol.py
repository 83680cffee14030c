"""What the exporter asks of a send queue and of its leases, in memory or on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Placed(NamedTuple):
    """Records of one `put` that came in: their places in its batch, and the numbers that they were given."""

    places: Sequence[int]
    numbers: range


class Span(NamedTuple):
    """Consecutive records of a lease that have the same history.

    Attributes:
        records: how many.
        attempts: how often they have been sent, this time included.
        enqueued_ns: when they came in, on the queue's clock.
    """

    records: int
    attempts: int
    enqueued_ns: int


class QueueLease(Protocol):
    """Records on loan; a record is named by its index in the lease."""

    @property
    def payloads(self) -> list[Any]:
        """The records as the queue holds them."""
        ...

    @property
    def numbers(self) -> Sequence[int]:
        """Their sequence numbers."""
        ...

    @property
    def spans(self) -> list[Span]:
        """Their history, in the order of the records."""
        ...

    @property
    def weight(self) -> int:
        """Their bytes."""
        ...

    @property
    def unsettled(self) -> int:
        """How many are still to be settled."""
        ...

    def __len__(self) -> int: ...

    async def ack(self, indices: Sequence[int] | None = None) -> int:
        """All that are left, or these, are done with; how many."""
        ...

    async def nack(
        self,
        delay: float = 0.0,
        indices: Sequence[int] | None = None,
        *,
        reason: str = "nack",
        counted: bool = True,
        more: int = 0,
    ) -> int:
        """All that are left, or these, come again after `delay` seconds.

        Not `counted`, this lease was no attempt; `more` attempts were made on it besides.
        """
        ...

    async def dead_letter(self, reason: str, indices: Sequence[int] | None = None) -> int:
        """All that are left, or these, are given up."""
        ...

    def extend(self) -> None:
        """Let the time of the lease begin anew."""
        ...


class SendQueue(Protocol):
    """A bounded queue of records."""

    @property
    def queue_id(self) -> str:
        """Its name; with a sequence number, the identity of a record."""
        ...

    @property
    def next_seq(self) -> int:
        """One more than the highest number that was given."""
        ...

    @property
    def oldest(self) -> int | None:
        """The lowest number of a record that is not settled."""
        ...

    @property
    def records(self) -> int:
        """Records in it, those under way included."""
        ...

    @property
    def size(self) -> int:
        """Their bytes."""
        ...

    @property
    def leased(self) -> int:
        """Records under way."""
        ...

    @property
    def next_due(self) -> float | None:
        """The loop's time at which the next delayed record is ready."""
        ...

    @property
    def dropped(self) -> Mapping[str, int]:
        """Records dropped, by reason."""
        ...

    async def put(self, batch: Sequence[Any], placed: list[Placed] | None = None, /) -> list[range]:
        """Keep records; returns when they are as safe as they will be, with the numbers that they were given.

        `placed` takes what came in, as it does: an error at the end takes nothing of that back.
        """
        ...

    async def lease(self, max_records: int, max_bytes: int, wait: float | None) -> QueueLease | None:
        """The next records; None when there are none in time."""
        ...

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """The idempotency keys of the records with these numbers."""
        ...

    def now_ns(self) -> int:
        """The time on the clock of `enqueued_ns`."""
        ...

    def stop_intake(self) -> None:
        """Refuse every put from now on, those that wait for room included, with `QueueClosedError`."""
        ...
