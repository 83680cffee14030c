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
from batchqueue_async.export.delivery.in_flight import Parcel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchqueue_async.export.control.backoff import Budget
    from batchqueue_async.export.control.send_gate import Gate, Pass
    from batchqueue_async.export.policies import BatchPolicy
    from batchqueue_async.export.send_queue.disk import SendQueue
    from batchqueue_async.export.stats import Counts
    from batchqueue_async.leases.lease import Lease

_AFTER_FAULT = 1.0
_TICK = 1e-6


class Feeder:
    """The task that leases, and the tasks of the batches under way.

    Attributes:
        active: batches under way.
        hurry: how many flushes, or a shutdown, want batches to leave before they are full.
        deadline: the loop's time at which the drain of a shutdown ends; None before.
        tasks: those of the batches under way.
    """

    def __init__(
        self,
        *,
        name: str,
        queue: SendQueue,
        policy: BatchPolicy,
        gate: Gate,
        budget: Budget | None,
        counts: Counts,
        limit: Callable[[], int],
        ready: Callable[[], Awaitable[float | None]],
        carry: Callable[[Parcel, Pass], Awaitable[None]],
        on_settled: Callable[[], None],
        more: Callable[[], bool],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._queue = queue
        self._policy = policy
        self._gate = gate
        self._budget = budget
        self._counts = counts
        self._limit = limit
        self._ready = ready
        self._carry = carry
        self._on_settled = on_settled
        self._more = more
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
        self.task = self._loop.create_task(self._run(), name=f"export-{self._name}-feed")

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
        while True:
            try:
                while await self._may_send():
                    parcel = await self._collect()
                    if parcel is not None:
                        await self._dispatch(parcel)
            except QueueClosedError:
                return
            except Exception as error:  # noqa: BLE001 - a disk, or a fault of ours: to try again is better than to end
                log.error("export_feed_failed", exporter=self._name, **describe(error))
                await asyncio.sleep(_AFTER_FAULT)
            else:
                return

    async def _may_send(self) -> bool:
        """Wait until a batch may be sent; False at the end of a drain."""
        while True:
            if self.deadline is not None and (self.finished or self._loop.time() >= self.deadline):
                return False
            wait = self._gate.wait(self._loop.time())
            if self.active >= self._limit():
                await self._nap(None)
            elif wait == 0.0:
                wait = await self._ready()
                if wait == 0.0:
                    self._counted_wait = False
                    return True
                if self._is_hopeless(wait):
                    return False
                await self._nap(wait)
            else:
                if not self._counted_wait:
                    self._counted_wait = True
                    self._gate.health.rejected += self._gate.health.state != "closed"
                if self._is_hopeless(wait):
                    return False
                await self._nap(wait)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to send, nor under way."""
        return not self.active and not self._queue.records and not self._more()

    def _is_hopeless(self, wait: float | None) -> bool:
        """Whether a drain has nothing to do before its deadline."""
        if self.deadline is None or self.active:
            return False
        return wait is None or self._loop.time() + wait > self.deadline

    async def _nap(self, seconds: float | None) -> None:
        """Wait for a poke, or so many seconds."""
        self._bell = self._loop.create_future()
        timer = None if seconds is None else self._loop.call_later(seconds, self.poke)
        try:
            await self._bell
        finally:
            self._bell = None
            if timer is not None:
                timer.cancel()

    # -- a batch -------------------------------------------------------------------------------------------------

    async def _collect(self) -> Parcel | None:
        """The next batch; None when there is none after all."""
        policy = self._policy
        if self.deadline is not None:
            return await self._collect_last()
        lease = await self._lease(policy.max_records, policy.max_bytes, None)
        if not lease:
            return None
        if policy.linger > 0 and not self.hurry and len(lease) < policy.max_records:
            return await self._fill(lease)
        return Parcel([lease])

    async def _collect_last(self) -> Parcel | None:
        lease = await self._queue.lease(self._policy.max_records, self._policy.max_bytes, 0)
        if lease:
            return Parcel([lease])
        due = self._queue.next_due
        wait = None if due is None else max(0.0, due - self._loop.time())
        if self._is_hopeless(wait) and not self._more():
            self.deadline = -math.inf
        else:
            await self._nap(wait)
        return None

    async def _lease(self, records: int, size: int, wait: float | None) -> Lease | None:
        """Lease, until a `ring`."""
        self._leasing = True
        try:
            return await self._queue.lease(records, size, wait)
        except asyncio.CancelledError:
            if not self._rung or self.task is None or self.task.uncancel():
                raise  # it was not, or not only, the ring
            return None
        finally:
            self._leasing = self._rung = False

    async def _fill(self, first: Lease) -> Parcel:
        """Wait for more records, up to the linger of the oldest, and take what has come by then."""
        policy, queue = self._policy, self._queue
        leases = [first]
        records, size = policy.max_records - len(first), policy.max_bytes - queue.weigh(first)
        left = policy.linger - (queue.now_ns() - Parcel(leases).enqueued_ns) * 1e-9
        try:
            await self._linger(left, records, size)
            while records > 0 and size > 0:
                lease = await queue.lease(records, size, 0)
                if not lease:
                    break
                weight = queue.weigh(lease)
                if weight > size:
                    await lease.nack(counted=False)  # one record alone is given out whatever its size
                    break
                leases.append(lease)
                records, size = records - len(lease), size - weight
        except BaseException:
            for lease in leases:
                await lease.nack(counted=False)
            raise
        finally:
            self._wanted = None
        return Parcel(leases)

    async def _linger(self, seconds: float, records: int, size: int) -> None:
        """Wait until so many records or bytes have come in, or the time is over, or somebody is in a hurry."""
        end = self._loop.time() + seconds
        self._wanted, self._full_at = records, self._queue.size + size
        # Batches that end meanwhile poke as well.
        while self._wanted > 0 and self._queue.size < self._full_at and not self.hurry and self.deadline is None:
            left = end - self._loop.time()
            if left <= _TICK:
                return
            await self._nap(left)

    def arrived(self, count: int) -> None:
        """So many records have come in: enough for a batch that lingers?"""
        if self._wanted is not None:
            self._wanted -= count
            if self._wanted <= 0 or self._queue.size >= self._full_at:
                self.poke()

    async def _dispatch(self, parcel: Parcel) -> None:
        now = self._loop.time()
        again = parcel.attempts > 1
        if again and self._budget is not None and (wait := self._budget.take(now)):
            await parcel.nack(wait, reason="budget", counted=False)
            return
        # Both may have changed while the batch was collected.
        leave = self._gate.acquire(now) if self.active < self._limit() else None
        if leave is None:
            if again and self._budget is not None:
                self._budget.give_back()
            await parcel.nack(0.0, reason="gate_closed", counted=False)
            return
        self._counts.retries += again
        self.active += 1
        task = self._loop.create_task(self._one(parcel, leave), name=f"export-{self._name}-send")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _one(self, parcel: Parcel, leave: Pass) -> None:
        try:
            await self._carry(parcel, leave)
        except QueueClosedError:
            pass  # its leases are gone: what was not settled is delivered after the next opening
        except Exception as error:  # noqa: BLE001 - a disk, or a fault of ours: the batch goes back, the others go on
            log.error("export_delivery_failed", exporter=self._name, records=len(parcel), **describe(error))
        finally:
            self._gate.release(leave)
            self.active -= 1
            self.poke()
            self._on_settled()
