"""Keeps leases alive while their batches wait on our side: for their repetition, their turn, or a free stage. Pure.

The time of a lease is for a sink that never comes back. A batch that waits for a pace or a thread of ours may wait for
longer; were its lease over by then, it would be sent all the same, and never be acknowledged.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Generator

    from batchqueue_async.export.delivery.kept import KeptBatches
    from batchqueue_async.export.delivery.leased_batch import Batch

# How often in the time of a lease the leases of batches that wait are extended.
_EXTENSIONS = 3


class LeaseKeeper:
    """Extends the leases of the batches that wait, as long as there are any.

    Args:
        loop: the event loop.
        lease_time: seconds that a lease takes; None where it has no end.
        kept: the batches that wait for their repetition.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, lease_time: float | None, kept: KeptBatches) -> None:
        self._loop = loop
        self._pause = None if lease_time is None else lease_time / _EXTENSIONS
        self._kept = kept
        # By identity: a batch has no hash of its own, and may wait for one thing within another.
        self._waiting: dict[int, tuple[Batch, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @contextmanager
    def holding(self, batch: Batch) -> Generator[None]:
        """The batch waits on our side within the block."""
        if self._pause is None:
            yield
            return
        name = id(batch)
        times = self._waiting.get(name, (batch, 0))[1]
        self._waiting[name] = batch, times + 1
        self.arm()
        try:
            yield
        finally:
            times = self._waiting.pop(name)[1]
            if times > 1:
                self._waiting[name] = batch, times - 1

    def arm(self) -> None:
        """There is a batch that waits."""
        if self._pause is not None and self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._pause, self._extend)

    def _extend(self) -> None:
        self._timer = None
        self._kept.extend_all()
        for batch, _ in self._waiting.values():
            batch.extend()
        if self._kept or self._waiting:
            self.arm()

    def close(self) -> None:
        """Extend nothing any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
