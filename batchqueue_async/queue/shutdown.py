"""The end of a queue: the gate, the final drain, the deadline, and a report that places every accepted item."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async._support import log
from batchqueue_async.errors import Failure, QueueClosedError
from batchqueue_async.queue.stats import ShutdownReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.queue.drain import Worker
    from batchqueue_async.queue.partition import Partition
    from batchqueue_async.queue.router import Placement
    from batchqueue_async.queue.stats import Tally

T = TypeVar("T")

CANCEL_GRACE = 0.25
"""Seconds that a handler gets, after the deadline, to react to its cancellation before it is left behind."""


class Closing(Generic[T]):
    """One shutdown in progress; everybody who asked for it waits for the same one."""

    def __init__(
        self,
        name: str,
        workers: Sequence[Worker[T]],
        placement: Placement[T],
        tally: Tally,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = name
        self.workers = workers
        self.placement = placement
        self.tally = tally
        self.loop = loop
        # Kept here because uvloop's handle for a time that has come does not tell it.
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._expired: asyncio.Future[None] = loop.create_future()

    def hasten(self, deadline: float) -> None:
        """Cut off what still runs at `deadline`, unless an earlier deadline is set already."""
        if deadline < self._deadline:
            self._deadline = deadline
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        for worker in self.workers:
            if worker.task is not None:
                worker.task.cancel()
        if not self._expired.done():
            self._expired.set_result(None)

    async def run(self, deadline: float) -> ShutdownReport:
        """Drain until nothing is left or the deadline passes, then account for everything."""
        start = self.loop.time()
        self.hasten(deadline)
        self._let_workers_finish()
        tasks = {worker.task for worker in self.workers if worker.task is not None}
        drained = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait((drained, self._expired), return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            await asyncio.wait(tasks, timeout=CANCEL_GRACE)
        if self._timer is not None:
            self._timer.cancel()
        self._expired.cancel()
        undelivered = self._give_up()
        report = self._report(undelivered, self.loop.time() - start)
        if undelivered:
            log.warning("queue_closed_undelivered", queue=self.name, undelivered=len(undelivered))
        log.info("queue_closed", queue=self.name, handled=report.handled, failed=report.failed, elapsed=report.elapsed)
        return report

    def abandon(self, came_in: list[T]) -> ShutdownReport:
        """The report of a queue whose loop can't drain it any more: what has no outcome is undelivered."""
        left = [item for worker in self.workers for item in worker.unfinished()]
        for worker in self.workers:
            self._abandon_worker(worker)
        for transit in self.placement.transits:
            left += transit.drop()
        for partition in self.placement.partitions:
            left += partition.drop()
        left += came_in
        log.warning("queue_closed_undelivered", queue=self.name, undelivered=len(left))
        return self._report(left, 0.0)

    def _let_workers_finish(self) -> None:
        self.placement.on_settled = self._settled
        for partition in self.placement.partitions:
            partition.heir = None  # nothing moves any more: whoever owns a partition drains it
        for worker in self.workers:
            worker.closing = True
            worker.may_exit = not self.placement.transits
            worker.wake()

    def _settled(self) -> None:
        for worker in self.workers:
            worker.may_exit = True
            worker.wake()

    def _give_up(self) -> list[T]:
        """Collect what has no outcome, those of interrupted calls first, and tell those who wait for it."""
        left: list[T] = []
        error = QueueClosedError(f"queue {self.name!r} was shut down before it could handle the item")
        while self.placement.transits:
            self.placement.transits[0].arrive()
        for worker in self.workers:
            left += worker.unfinished()
            self._fail_round(worker, error)
            self._abandon_worker(worker)
        for partition in self.placement.partitions:
            _fail_waiting(partition, error)
            left += partition.take(partition.qsize())
            partition.in_flight = 0
            partition.settle()
        return left

    def _abandon_worker(self, worker: Worker[T]) -> None:
        worker.abandoned = True
        worker.pending = 0
        worker.groups = []
        worker.ready.clear()

    def _fail_round(self, worker: Worker[T], error: QueueClosedError) -> None:
        if worker.in_round:
            for place in range(worker.place, len(worker.groups)):
                worker.note_failure(place, error)

    def lose(self, worker: Worker[T]) -> None:
        """End the waits for what a drain task that is gone would have handled; the items stay for the report."""
        error = QueueClosedError(f"queue {self.name!r} has lost the drain task that would have handled the item")
        self._fail_round(worker, error)
        for transit in self.placement.transits:
            if transit.source.owner is worker:
                transit.fail_waits(error)
        for partition in worker.partitions:
            _fail_waiting(partition, error)
            watches, partition.watches = partition.watches, None
            for watch in watches or ():
                watch.reach()

    def _report(self, undelivered: list[T], elapsed: float) -> ShutdownReport:
        tally = self.tally
        done = tally.handled + tally.failed + tally.unhandled + tally.dropped_after
        return ShutdownReport(
            handled=tally.handled,
            failed=tally.failed,
            undelivered=undelivered,
            elapsed=elapsed,
            accepted=done + len(undelivered),
            unhandled=tally.unhandled,
            dropped_after=tally.dropped_after,
            name=self.name,
        )


def _fail_waiting(partition: Partition[Any], error: QueueClosedError) -> None:
    items, start = partition.items(), partition.removed
    for watch in partition.watches or ():
        watch.wait.fail(items[max(0, watch.start - start) : max(0, watch.end - start)], error)


def merged(failures: Sequence[Failure]) -> list[Failure]:
    """Failures with the items of one error together, in the order in which they failed."""
    items: dict[int, list[Any]] = {}
    errors: dict[int, BaseException] = {}
    for failure in failures:
        errors[id(failure.error)] = failure.error
        items.setdefault(id(failure.error), []).extend(failure.items)
    return [Failure(tuple(items[key]), error) for key, error in errors.items()]
