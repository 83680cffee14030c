"""Asking the balancer from time to time, and moving partitions as it says."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Generic, TypeVar

from batchqueue_async._support import log
from batchqueue_async._support.log import describe

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from batchqueue_async.config import DrainBalancer
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.partition import Partition

T = TypeVar("T")


class Rebalancer(Generic[T]):
    """Counts what each partition accepted since the last look, and carries out the balancer's answer."""

    def __init__(
        self,
        name: str,
        balancer: DrainBalancer,
        partitions: Sequence[Partition[T]],
        drains: Sequence[DrainTask[T]],
    ) -> None:
        self.name = name
        self.balancer = balancer
        self.partitions = partitions
        self.drains = drains
        self.moves = 0
        self._counted: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        """Look every `interval` seconds."""
        self._timer = loop.call_later(interval, self._tick, loop, interval)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self.start(loop, interval)
        self.look()

    def look(self) -> int:
        """Ask the balancer once; the number of partitions that got another drain task."""
        accepted = [partition.accepted for partition in self.partitions]
        before = self._counted + [0] * (len(accepted) - len(self._counted))
        self._counted = accepted
        throughput = [now - then for now, then in zip(accepted, before, strict=True)]
        owners = [self._owner(partition).index for partition in self.partitions]
        try:
            wanted = self.balancer.assign(throughput, owners, len(self.drains))
            if wanted is None:
                return 0
            wanted = [operator.index(each) for each in wanted]
            self._check(wanted)
        except Exception as error:  # noqa: BLE001 - a balancer is the user's code; without its advice all goes on
            log.error("balancer_failed", queue=self.name, **describe(error))
            return 0
        moved = 0
        for partition, owner, new in zip(self.partitions, owners, wanted, strict=True):
            if new != owner and partition.owner is not None:
                partition.owner.hand_over(partition, self.drains[new])
                moved += 1
        self.moves += moved
        log.debug("rebalanced", queue=self.name, moved=moved)
        return moved

    def _owner(self, partition: Partition[T]) -> DrainTask[T]:
        """Who owns the partition, or will as soon as what is in flight from it is finished."""
        owner = partition.next_owner or partition.owner
        if owner is None:
            raise AssertionError(f"queue {self.name!r}: partition {partition.index} has no drain task")
        return owner

    def _check(self, wanted: Sequence[int]) -> None:
        if len(wanted) != len(self.partitions) or any(not 0 <= each < len(self.drains) for each in wanted):
            raise ValueError(
                f"the balancer gave {len(wanted)} owners from {min(wanted, default=0)} to {max(wanted, default=0)}; "
                f"{len(self.partitions)} from 0 to {len(self.drains) - 1} are needed"
            )
