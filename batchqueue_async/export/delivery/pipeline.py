"""The split pipeline: preparers, which compute in threads, a bounded channel, and senders, which wait for the network.

A stage is a number of places, taken in the order of arrival; a batch goes from one to the next, and holds its place
until the next one has room. So nothing is ever between two stages: a shutdown that waits for the batches under way has
drained the stages in their order.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from batchqueue_async.sinks.base import PreparingSink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from batchqueue_async.export.control.send_gate import Gate, Pass
    from batchqueue_async.export.delivery.in_flight import Batch, Parcel
    from batchqueue_async.export.policies import SplitPolicy
    from batchqueue_async.sinks.base import Sink


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
        sink: Sink,
        *,
        queue_id: str,
        gate: Gate,
        most_sends: int,
        decode: Callable[[Sequence[bytes]], list[Any]] | None,
        deliver: Callable[[Batch, Pass], Awaitable[None]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._prepare = policy.prepare
        self._sink = sink if isinstance(sink, PreparingSink) else None
        self._queue_id = queue_id
        self._gate = gate
        self._decode = decode
        self._deliver = deliver
        self._preparers = asyncio.Semaphore(policy.preparer_count)
        self._channel = asyncio.Semaphore(policy.channel)
        sends = min(policy.sender_count * policy.sends_per_sender, most_sends)
        self._senders = asyncio.Semaphore(sends)
        self._threads = ThreadPoolExecutor(policy.preparer_count, thread_name_prefix="batchqueue-prepare")
        self.capacity = policy.preparer_count + policy.channel + sends
        self.preparing = self.waiting = 0

    async def carry(self, parcel: Parcel, leave: Pass) -> None:
        """Bring a batch through the stages."""
        try:
            await self._stages(parcel, leave)
        finally:
            if parcel.unsettled:
                await parcel.nack(0.0, reason="cut_off", counted=False)

    async def _stages(self, parcel: Parcel, leave: Pass) -> None:
        async with self._preparers:
            self.preparing += 1
            try:
                await self._loop.run_in_executor(self._threads, partial(self._make, parcel))
            finally:
                self.preparing -= 1
            await self._channel.acquire()
        self.waiting += 1
        try:
            await self._senders.acquire()
        finally:
            self.waiting -= 1
            self._channel.release()
        try:
            given = leave if self._gate.is_valid(leave) else self._gate.acquire(self._loop.time())
            if given is not None:
                await self._deliver(parcel, given)
        finally:
            self._senders.release()

    def _make(self, parcel: Parcel) -> None:
        """In a thread: from what is in the queue to what is sent."""
        if self._decode is not None:
            parcel.decode(self._decode)
        if self._prepare is not None:
            parcel.prepare(self._prepare)
        if self._sink is not None and not parcel.broken:
            places = range(len(parcel))
            try:
                parcel.prepared = self._sink.prepare(parcel.take(places), parcel.keys(places, self._queue_id))
            except Exception:  # noqa: BLE001 - the plain `send` meets the same records, and tells what they are
                parcel.prepared = None

    def close(self) -> None:
        """End the threads; what they do now is of no use any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
