"""The split pipeline: preparers, which compute in threads, a bounded channel, and senders, which wait for the network.

A stage is a number of places, taken in the order of arrival; a batch goes from one to the next, and holds its place
until the next one has room. So nothing is ever between two stages: a shutdown that waits for the batches under way has
drained the stages in their order.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from batchqueue_async.sinks.base import PreparingSink

if TYPE_CHECKING:
    from batchqueue_async.export.control.send_gate import SendPermit
    from batchqueue_async.export.delivery.context import ExportContext
    from batchqueue_async.export.delivery.leased_batch import LeasedBatch
    from batchqueue_async.export.delivery.puller import Puller
    from batchqueue_async.export.delivery.sender import BatchSender
    from batchqueue_async.export.policies import SplitPolicy


class Pipeline:
    """The stages of one exporter.

    Attributes:
        capacity: batches that it holds, in all of its stages.
        preparing: batches that are with a preparer.
        waiting: batches in the channel.
    """

    def __init__(
        self,
        policy: SplitPolicy,
        context: ExportContext,
        *,
        most_sends: int,
        sender: BatchSender,
        puller: Puller,
    ) -> None:
        self._context = context
        self._prepare = policy.prepare
        self._sink = context.sink if isinstance(context.sink, PreparingSink) else None
        self._sender = sender
        self._puller = puller
        self._preparers = asyncio.Semaphore(policy.preparer_count)
        self._channel = asyncio.Semaphore(policy.channel)
        sends = min(policy.sender_count * policy.sends_per_sender, most_sends)
        self._senders = asyncio.Semaphore(sends)
        self._threads = ThreadPoolExecutor(policy.preparer_count, thread_name_prefix="batchqueue-prepare")
        self.capacity = policy.preparer_count + policy.channel + sends
        self.preparing = self.waiting = 0

    async def carry(self, batch: LeasedBatch, permit: SendPermit) -> None:
        """Bring a batch through the stages."""
        try:
            await self._stages(batch, permit)
        finally:
            if batch.unsettled and not batch.kept:
                await batch.nack(0.0, reason="cut_off", counted=False)

    async def _stages(self, batch: LeasedBatch, permit: SendPermit) -> None:
        with self._context.keeper.holding(batch):
            await self._until_a_sender(batch)
        try:
            gate, now = self._context.gate, self._context.now()
            given = permit if gate.is_valid(permit, now) else gate.acquire(now)
            if given is not None:
                await self._sender.deliver(batch, given)
            else:
                await self._puller.put_back(batch, 0.0, "gate_closed")
        finally:
            self._senders.release()

    async def _until_a_sender(self, batch: LeasedBatch) -> None:
        async with self._preparers:
            self.preparing += 1
            try:
                if not batch.made:  # what is sent again as it is was prepared the first time
                    await self._context.loop.run_in_executor(self._threads, partial(self._make, batch))
                    batch.made = True
            finally:
                self.preparing -= 1
            await self._channel.acquire()
        self.waiting += 1
        try:
            await self._senders.acquire()
        finally:
            self.waiting -= 1
            self._channel.release()

    def _make(self, batch: LeasedBatch) -> None:
        """In a thread: from what is in the queue to what is sent."""
        context = self._context
        if context.decode is not None:
            batch.decode(context.decode)
        if self._prepare is not None:
            batch.prepare(self._prepare)
        if self._sink is not None and not batch.broken:
            places = range(len(batch))
            try:
                batch.prepared = self._sink.prepare(batch.take(places), context.queue.keys(batch.numbers))
            except Exception:  # noqa: BLE001 - the plain `send` meets the same records, and tells what they are
                batch.prepared = None

    def close(self) -> None:
        """End the threads; what they do now is of no use any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
