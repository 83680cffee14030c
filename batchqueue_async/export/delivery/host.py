"""What the parts of the delivery ask of the exporter's engine that holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.export.control.send_gate import SendPermit
    from batchqueue_async.export.delivery.leased_batch import Batch, LeasedBatch


class DeliveryHost(Protocol):
    """The engine, as the puller and the sender see it."""

    @property
    def limit(self) -> int:
        """Batches that may be under way now."""
        ...

    async def carry(self, batch: LeasedBatch, permit: SendPermit, /) -> None:
        """Bring a batch that may be sent to the sender, by way of the stages if there are any."""
        ...

    def settled(self) -> None:
        """Records were settled: somebody may wait for that."""
        ...

    def answered(self, seconds: float, records: int, /) -> None:
        """The sink answered a send of so many records after this time."""
        ...

    def failed(self) -> None:
        """The destination was not well."""
        ...

    def fail_over(self, batch: Batch, places: Sequence[int], /) -> bool:
        """Take records whose attempts are over into the failover queue; False where there is none."""
        ...
