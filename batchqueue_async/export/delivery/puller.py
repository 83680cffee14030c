"""From the send queue to the sends: one task that takes out a batch whenever one may be sent.

It alone leases, so that small puts gather in one batch however many workers there are, and nothing is leased while
the gate is shut. A worker is a place among those under way: each batch has a task of its own while it is sent.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async.errors import QueueClosedError
from batchqueue_async.export.delivery.classify import is_fatal, is_sinks_own
from batchqueue_async.export.delivery.leased_batch import LeasedBatch
from batchqueue_async.export.delivery.resume import resume
from batchqueue_async.export.send_queue.memory import MOST_RUNS

if TYPE_CHECKING:
    from batchqueue_async.export.control.send_gate import SendPermit
    from batchqueue_async.export.delivery.context import ExportContext
    from batchqueue_async.export.delivery.failover import Failover
    from batchqueue_async.export.delivery.host import DeliveryHost
    from batchqueue_async.export.delivery.kept import KeptBatches
    from batchqueue_async.export.delivery.sink_lifecycle import SinkLifecycle
    from batchqueue_async.export.send_queue.protocol import QueueLease

_AFTER_BUG = 1.0
_TICK = 1e-6


class Puller:
    """The task that leases, and the tasks of the batches under way.

    Attributes:
        active: batches under way.
        hurry: how many flushes, or a shutdown, want batches to leave before they are full.
        deadline: the loop's time at which the drain of a shutdown ends; None before.
        tasks: those of the batches under way.
    """

    def __init__(
        self,
        context: ExportContext,
        kept: KeptBatches,
        lifecycle: SinkLifecycle,
        failover: Failover | None,
        host: DeliveryHost,
    ) -> None:
        self._context = context
        self._kept = kept
        self._lifecycle = lifecycle
        self._failover = failover
        self._host = host
        self.active = 0
        self.hurry = 0
        self.deadline: float | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.task: asyncio.Task[None] | None = None
        self._bell: asyncio.Future[None] | None = None
        self._leasing = self._rung = False
        self._wanted: int | None = None
        """How many records a batch that lingers has room for; None when none lingers."""
        self._full_at = 0
        self._counted_wait = False

    def start(self) -> None:
        """Begin."""
        self.task = self._context.loop.create_task(self._run(), name=f"export-{self._context.name}-pull")

    def poke(self) -> None:
        """A batch has ended, or the gate has changed: look again, unless there is nothing to send anyway."""
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    def ring(self) -> None:
        """Look again now: wait no longer for records, nor for a batch to fill."""
        self.poke()
        if self._leasing and not self._rung and self.task is not None:
            self._rung = True
            self.task.cancel()

    # -- the task ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        resumed = False
        while True:
            try:
                if not resumed:
                    resumed = True
                    await resume(self._context, self._kept)
                while await self._may_send():
                    batch = await self._collect()
                    if batch is not None:
                        await self._dispatch(batch)
            except QueueClosedError:
                return
            except Exception as error:  # noqa: BLE001 - a disk, or a bug: to try again is better than to end
                log.error("export_pull_failed", exporter=self._context.name, **describe(error))
                await asyncio.sleep(_AFTER_BUG)
            else:
                return

    async def _may_send(self) -> bool:
        """Wait until a batch may be sent; False at the end of a drain."""
        context = self._context
        while True:
            if self.deadline is not None and (self.finished or context.now() >= self.deadline):
                return False
            wait = context.gate.wait(context.now())
            if self.active >= self._host.limit:
                await self._nap(None)
            elif wait == 0.0:
                wait = await self._lifecycle.ready()
                if wait == 0.0:
                    self._counted_wait = False
                    return True
                if self._is_hopeless(wait):
                    return False
                await self._nap(wait)
            else:
                if not self._counted_wait:
                    self._counted_wait = True
                    context.gate.health.count_rejected()
                if self._is_hopeless(wait):
                    return False
                await self._nap(wait)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to send, nor under way."""
        return not self.active and not self._context.queue.records and not self._failover

    def _is_hopeless(self, wait: float | None) -> bool:
        """Whether a drain has nothing to do before its deadline."""
        if self.deadline is None or self.active:
            return False
        return wait is None or self._context.now() + wait > self.deadline

    async def _nap(self, seconds: float | None) -> None:
        """Wait for a poke, or so many seconds."""
        self._bell = self._context.loop.create_future()
        timer = None if seconds is None else self._context.loop.call_later(seconds, self.poke)
        try:
            await self._bell
        finally:
            self._bell = None
            if timer is not None:
                timer.cancel()

    # -- a batch -------------------------------------------------------------------------------------------------

    async def _collect(self) -> LeasedBatch | None:
        """The next batch; None when there is none after all."""
        again = self._kept.take_due(self._context.now())
        if again is not None:
            again.repeat()
            return again
        if self.deadline is not None:
            return await self._collect_last()
        if self._kept.full:
            await self._nap(self._until_kept())
            return None
        policy = self._context.config.batch
        lease = await self._lease(policy.max_records, policy.max_bytes, self._until_kept())
        if lease is None:
            return None
        lingers = policy.linger > 0 and not self.hurry
        if len(lease) < policy.max_records and (lingers or len(lease.spans) >= MOST_RUNS):
            return await self._fill(lease)
        return LeasedBatch([lease])

    def _until_kept(self) -> float | None:
        due = self._kept.next_due
        return None if due is None else max(0.0, due - self._context.now())

    async def _collect_last(self) -> LeasedBatch | None:
        policy, queue = self._context.config.batch, self._context.queue
        lease = None if self._kept.full else await queue.lease(policy.max_records, policy.max_bytes, 0)
        if lease is not None:
            return LeasedBatch([lease])
        due = min([each for each in (queue.next_due, self._kept.next_due) if each is not None], default=None)
        wait = None if due is None else max(0.0, due - self._context.now())
        if self._is_hopeless(wait) and not self._failover:
            self.deadline = -math.inf
        else:
            await self._nap(wait)
        return None

    async def _lease(self, records: int, size: int, wait: float | None) -> QueueLease | None:
        """Lease, until a `ring`."""
        self._leasing = True
        try:
            return await self._context.queue.lease(records, size, wait)
        except asyncio.CancelledError:
            if not self._rung or self.task is None or self.task.uncancel():
                raise  # it was not, or not only, the ring
            return None
        finally:
            self._leasing = self._rung = False

    async def _fill(self, first: QueueLease) -> LeasedBatch:
        """Wait for more records, up to the linger of the oldest, and take what has come by then."""
        policy, queue = self._context.config.batch, self._context.queue
        leases = [first]
        records, size = policy.max_records - len(first), policy.max_bytes - first.weight
        oldest = min([span.enqueued_ns for span in first.spans])
        left = policy.linger - (queue.now_ns() - oldest) * 1e-9
        try:
            await self._linger(left, records, size)
            while records > 0 and size > 0:
                lease = await queue.lease(records, size, 0)
                if lease is None:
                    break
                weight = lease.weight
                if weight > size:
                    await lease.nack(counted=False)  # one record alone is given out whatever its size
                    break
                leases.append(lease)
                records, size = records - len(lease), size - weight
                await asyncio.sleep(0)  # a lease may be all that a step should do
        except BaseException:
            for lease in leases:
                await lease.nack(counted=False)
            raise
        finally:
            self._wanted = None
        return LeasedBatch(leases)

    async def _linger(self, seconds: float, records: int, size: int) -> None:
        """Wait until so many records or bytes have come in, or the time is over, or somebody is in a hurry."""
        context = self._context
        end = context.now() + seconds
        self._wanted, self._full_at = records, context.queue.size + size
        # Batches that end meanwhile poke as well.
        while self._wanted > 0 and context.queue.size < self._full_at and not self.hurry and self.deadline is None:
            left = end - context.now()
            if left <= _TICK:
                return
            await self._nap(left)

    def arrived(self, count: int) -> None:
        """So many records have come in: enough for a batch that lingers?"""
        if self._wanted is not None:
            self._wanted -= count
            if self._wanted <= 0 or self._context.queue.size >= self._full_at:
                self.poke()

    async def _dispatch(self, batch: LeasedBatch) -> None:
        context = self._context
        now = context.now()
        again = batch.attempts > 1
        if again and context.budget is not None and (wait := context.budget.take(now)):
            await self.put_back(batch, wait, "budget")
            return
        # Both may have changed while the batch was collected.
        permit = context.gate.acquire(now) if self.active < self._host.limit else None
        if permit is None:
            if again and context.budget is not None:
                context.budget.give_back()
            await self.put_back(batch, 0.0, "gate_closed")
            return
        context.counts.retries += again
        self.active += 1
        task = context.loop.create_task(self._one(batch, permit), name=f"export-{context.name}-send")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def put_back(self, batch: LeasedBatch, delay: float, why: str) -> None:
        """A batch that was not sent goes back to where it came from."""
        if batch.repeats or batch.apart:
            batch.unrepeat()
            self._kept.add(batch, self._context.now() + delay)
        else:
            await batch.nack(delay, reason=why, counted=False)

    async def _one(self, batch: LeasedBatch, permit: SendPermit) -> None:
        context = self._context
        try:
            await self._host.carry(batch, permit)
        except QueueClosedError:
            pass  # its leases are gone: what was not settled is delivered after the next opening
        except BaseException as error:
            # A disk, or a bug: the batch goes back, the others go on. What ends the program, or this task, does.
            if is_fatal(error) or (isinstance(error, asyncio.CancelledError) and not is_sinks_own(error)):
                raise
            log.error("export_delivery_failed", exporter=context.name, records=len(batch), **describe(error))
        finally:
            context.gate.release(permit)
            self.active -= 1
            self.poke()
            self._host.settled()
