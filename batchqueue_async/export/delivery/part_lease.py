"""Some records of a lease as a lease of their own, so that a part of a batch can wait by itself."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from batchqueue_async.export.send_queue.protocol import Span
from batchqueue_async.export.send_queue.weight import weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchqueue_async.export.send_queue.protocol import QueueLease


class PartLease:
    """Records of a lease by their own indices; what settles them here settles them there.

    Each record of the lease belongs to one part at most: `split` moves records from one to another.
    """

    __slots__ = ("_indices", "_lease", "_open", "numbers", "payloads", "spans", "weight")

    def __init__(self, lease: QueueLease, indices: Sequence[int]) -> None:
        self._lease = lease
        self._indices = indices
        # Its own indices of what is still to be settled, in their order.
        self._open = dict.fromkeys(range(len(indices)))
        self.payloads: list[Any] = [lease.payloads[index] for index in indices]
        self.numbers: Sequence[int] = [lease.numbers[index] for index in indices]
        self.spans = _spans(lease.spans, indices)
        self.weight = sum(weights(self.payloads))

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def unsettled(self) -> int:
        """How many are still to be settled; none when the time of the lease is over."""
        return len(self._open) if self._lease.unsettled else 0

    def split(self, indices: Sequence[int]) -> PartLease:
        """Move some records, by their indices here, into a part of their own."""
        for index in indices:
            self._open.pop(index, None)
        return PartLease(self._lease, [self._indices[index] for index in indices])

    async def ack(self, indices: Sequence[int] | None = None) -> int:
        """All that are left, or these, are done with; how many."""
        mine, theirs = self._chosen(indices)
        done = await self._lease.ack(theirs) if theirs else 0
        self._close(mine)
        return done

    async def nack(
        self,
        delay: float = 0.0,
        indices: Sequence[int] | None = None,
        *,
        reason: str = "nack",
        counted: bool = True,
        more: int = 0,
    ) -> int:
        """All that are left, or these, come again after `delay` seconds; not `counted`, this was no attempt."""
        mine, theirs = self._chosen(indices)
        done = await self._lease.nack(delay, theirs, reason=reason, counted=counted, more=more) if theirs else 0
        self._close(mine)
        return done

    async def dead_letter(self, reason: str, indices: Sequence[int] | None = None) -> int:
        """All that are left, or these, are given up."""
        mine, theirs = self._chosen(indices)
        done = await self._lease.dead_letter(reason, theirs) if theirs else 0
        self._close(mine)
        return done

    def extend(self) -> None:
        """Let the time of the lease begin anew."""
        self._lease.extend()

    def _chosen(self, indices: Sequence[int] | None) -> tuple[list[int], list[int]]:
        """Those of the records that are still to be settled, by their indices here and in the lease."""
        mine = list(self._open) if indices is None else [index for index in indices if index in self._open]
        return mine, [self._indices[index] for index in mine]

    def _close(self, mine: Iterable[int]) -> None:
        for index in mine:
            self._open.pop(index, None)


def _spans(spans: Sequence[Span], indices: Sequence[int]) -> list[Span]:
    """The history of these records, in their order."""
    history = [(span.attempts, span.enqueued_ns) for span in spans for _ in range(span.records)]
    found = groupby(history[index] for index in indices)
    return [Span(sum(1 for _ in same), attempts, enqueued_ns) for (attempts, enqueued_ns), same in found]
