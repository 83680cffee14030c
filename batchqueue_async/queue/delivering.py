"""Waiting for the outcome: `deliver` one's own items, or `flush` everything accepted so far."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from batchqueue_async.errors import DeadlockError, DeliveryError, ItemDroppedError, QueueClosedError
from batchqueue_async.queue.producing import Producing
from batchqueue_async.queue.shutdown import merged
from batchqueue_async.queue.waits import Wait, break_circle

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from batchqueue_async.queue.drain import Worker

T = TypeVar("T")


class Delivering(Producing[T]):
    """The part of a `BatchQueue` that waits for outcomes; no item costs a future of its own."""

    async def deliver(self, items: Iterable[T]) -> None:
        """Put items in, and return when all of them were handled.

        Cancelling the call takes nothing back: what was accepted by then is handled like everything else.

        Raises:
            DeliveryError: some items were refused, dropped, failed in their handler, have no handler, or were left
                over by a shutdown; `failures` says which and why.
            DeadlockError: from a handler of this queue, which would wait for itself.

        Example:
            >>> import asyncio, batchqueue_async as bq
            >>> async def main() -> None:
            ...     async def handle(batch: list[int]) -> None:
            ...         print(sum(batch))
            ...     async with bq.BatchQueueManager() as manager:
            ...         await manager.create("numbers", bq.QueueConfig(consumer=handle)).deliver([1, 2, 3])
            >>> asyncio.run(main())
            6
        """
        self._check_loop("deliver")
        self._collect_door()
        batch = items if isinstance(items, list | tuple) else list(items)
        wait = Wait()
        try:
            self._forbid_here("deliver")
            accepted = await self._produce_rest(batch, wait)
            if accepted < len(batch):
                wait.fail(batch[accepted:], self._why_refused())
            wait.seal()
            await self._outcome(wait, "deliver")
        finally:
            self._forget(wait)
        if wait.failures:
            failed = sum(len(failure.items) for failure in wait.failures)
            raise DeliveryError(
                f"queue {self.name!r}: {failed} of {len(batch)} items were not handled; see the failures",
                merged(wait.failures),
            )

    async def flush(self, timeout: float | None = None) -> None:
        """Return when everything accepted before the call has an outcome: handled, failed, or without a handler.

        Lingering batches leave at once. Items that come in later are not waited for.

        Raises:
            TimeoutError: `timeout` seconds passed first; the message says how many items are left.
            QueueClosedError: a shutdown left some of the items over.
            DeadlockError: from a handler of this queue, which would wait for itself.
        """
        self._check_loop("flush")
        self._collect_door()
        self._forbid_here("flush")
        wait = Wait()
        for partition in self._placement.partitions:
            partition.order()
            wait.watch(partition, partition.finished, partition.accepted)
        for transit in self._placement.transits:
            if transit.items:
                transit.watch(wait, len(transit.items))
        wait.seal()
        if any(owner.task is not None and owner.task.done() for [owner] in self._owners_of(wait)):
            self._forget(wait)
            raise QueueClosedError(f"queue {self.name!r} has lost a drain task; shut it down: the report has its items")
        try:
            with self._hurry():
                async with asyncio.timeout(timeout):
                    await self._outcome(wait, "flush")
        except TimeoutError:
            left = self._outstanding()
            raise TimeoutError(
                f"queue {self.name!r}: flush: {left} items are left after {timeout} s; "
                "wait longer, or look for a slow handler in stats()"
            ) from None
        finally:
            self._forget(wait)
        if any(isinstance(failure.error, QueueClosedError) for failure in wait.failures):
            raise QueueClosedError(f"queue {self.name!r} was shut down before the flush was complete; see its report")

    def _outstanding(self) -> int:
        """How many accepted items have no outcome yet."""
        waiting = sum(partition.qsize() for partition in self._placement.partitions)
        moving = sum(len(transit.items) for transit in self._placement.transits)
        return waiting + moving + sum(worker.pending for worker in self._workers)

    def _why_refused(self) -> Exception:
        if self._closed:
            return QueueClosedError(f"queue {self.name!r} is shut down and takes nothing any more")
        return ItemDroppedError(
            f"queue {self.name!r} had no room under {self.config.strategy.name} "
            f"(block_timeout={self.config.block_timeout})"
        )

    @contextmanager
    def _hurry(self) -> Generator[None]:
        """Let no batch linger meanwhile."""
        for worker in self._workers:
            worker.hurry += 1
            worker.wake()
        try:
            yield
        finally:
            for worker in self._workers:
                worker.hurry -= 1

    def _forbid_here(self, call: str) -> None:
        if self._round_here() in self._workers:
            raise self._endless(call, "was called from a handler of the same queue")

    def _endless(self, call: str, why: str) -> DeadlockError:
        return DeadlockError(
            f"queue {self.name!r}: {call} {why}; do not wait for {call} in a handler that it waits for; "
            f"produce, and let the caller {call}"
        )

    async def _outcome(self, wait: Wait, call: str) -> None:
        """Wait to the end; while a handler of another queue does, note for whom, and refuse if that has no end."""
        worker = self._round_here()
        if worker is None or asyncio.current_task() is not worker.task:
            await wait.future
            return
        before = worker.blocked_on, worker.break_wait
        worker.blocked_on, worker.break_wait = partial(self._owners_of, wait), wait.break_wait
        try:
            break_circle(worker)
            await wait.future
        finally:
            worker.blocked_on, worker.break_wait = before
        if wait.broken:
            raise self._endless(call, "waits for a handler that waits for it")

    def _owners_of(self, wait: Wait) -> list[list[Worker[T]]]:
        """Those who have to go on before the wait is over."""
        if wait.future.done():
            return []
        places = [each for each in self._placement.partitions if each.awaited_by(wait)]
        places += [each.source for each in self._placement.transits if each.awaited_by(wait)]
        return [[each.owner] for each in places if each.owner is not None]

    def _forget(self, wait: Wait) -> None:
        for partition in self._placement.partitions:
            if partition.watches:
                partition.watches = [watch for watch in partition.watches if watch.wait is not wait]
        for transit in self._placement.transits:
            transit.watches = [watch for watch in transit.watches if watch.wait is not wait]
