"""Batches that wait for their repetition as they are: so that the same key comes with the same bytes. Pure.

Their leases stay open meanwhile, so their records can't be put into other batches. There is a bound on how many wait:
when it is reached nothing new is sent before one of them is.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchqueue_async.export.delivery.leased_batch import LeasedBatch


class KeptBatches:
    """Batches by the time at which they are due.

    Attributes:
        most: how many may wait before nothing new is sent; parts of one batch may be a few more.
        on_add: called when one comes to them.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.on_add: Callable[[], None] = _nobody
        self._heap: list[tuple[float, int, LeasedBatch]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def full(self) -> bool:
        """Whether nothing new may be sent."""
        return len(self._heap) >= self.most

    @property
    def next_due(self) -> float | None:
        """When the next one is due."""
        return self._heap[0][0] if self._heap else None

    def add(self, batch: LeasedBatch, due: float) -> None:
        """Keep a batch until then."""
        self._count += 1
        batch.kept = True
        heappush(self._heap, (due, self._count, batch))
        self.on_add()

    def take_due(self, now: float) -> LeasedBatch | None:
        """A batch whose time has come."""
        return heappop(self._heap)[2] if self._heap and self._heap[0][0] <= now + 1e-6 else None

    def extend_all(self) -> None:
        """Let the time that their leases may take begin anew: they may wait for longer than that."""
        for _, _, batch in self._heap:
            batch.extend()

    def take_all(self) -> list[LeasedBatch]:
        """All of them: at the end."""
        batches = [batch for _, _, batch in self._heap]
        self._heap.clear()
        return batches


def _nobody() -> None:
    """Nobody asked."""
