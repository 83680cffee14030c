"""The parts of one open exporter, and what holds them together. Lives on one loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.errors import QueueClosedError
from batchqueue_async.export.control.backoff import Backoff, Budget
from batchqueue_async.export.control.concurrency import EWMA, Scaler, moved
from batchqueue_async.export.control.send_gate import Gate
from batchqueue_async.export.delivery.failover import Failover
from batchqueue_async.export.delivery.opening import Opening
from batchqueue_async.export.delivery.pipeline import Pipeline
from batchqueue_async.export.delivery.puller import Feeder
from batchqueue_async.export.delivery.sender import Courier
from batchqueue_async.export.send_queue.disk import DiskQueue, decoder, durable_config, record_key
from batchqueue_async.export.send_queue.memory import MemoryQueue
from batchqueue_async.export.stats import Counts
from batchqueue_async.sinks.base import is_concurrent

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from batchqueue_async.durable.queue import DurableQueue
    from batchqueue_async.export.config import ExportConfig
    from batchqueue_async.export.control.send_gate import Pass
    from batchqueue_async.export.delivery.in_flight import Parcel
    from batchqueue_async.export.send_queue.disk import SendQueue
    from batchqueue_async.sinks.base import Sink

_CANCEL_GRACE = 0.25


class Engine:
    """Made on the loop; `open` and `start` begin it, `drain` and `close` end it.

    Attributes:
        counts: what has been counted.
        gate: whether anything may be sent.
        disk: the durable send queue, if there is one.
        queue: the send queue, whichever it is.
        failover: the failover queue, if there is one.
        pipeline: the stages, if there are any.
        feeder: what takes batches out of the send queue.
        courier: what brings them to the sink.
        opening: the sink's life.
    """

    def __init__(self, sink: Sink, config: ExportConfig, *, name: str, random: Random) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._config = config
        self._name = name
        self.counts = Counts()
        self.gate = Gate(config)
        self._backoff = Backoff(config.retry, random)
        self._workers = config.worker_count
        self._scaler = None if config.adaptive is None else Scaler(config.adaptive, self._workers)
        self._alpha = EWMA if config.adaptive is None else config.adaptive.alpha
        self._most_sends = config.send_limit if is_concurrent(sink) else 1
        self.failover = None if config.failover is None else Failover(config.failover)
        self._failing_over: asyncio.Task[None] | None = None
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        self.disk: DurableQueue | None = None
        self.pipeline: Pipeline | None = None
        self._decode = None if config.path is None else decoder(config)
        self.queue: SendQueue
        self.feeder: Feeder
        self.courier: Courier
        self.opening: Opening

    # -- the beginning -------------------------------------------------------------------------------------------

    async def open(self, open_queue: Callable[..., DurableQueue]) -> None:
        """Open the send queue, then the sink; nothing stays open when one of them fails."""
        config = self._config
        if config.path is None:
            self.queue = MemoryQueue(
                max_records=config.max_records,
                max_bytes=config.byte_limit,
                overflow=config.overflow,
                block_timeout=config.block_timeout,
                key=record_key(config),
                on_drop=self._settled,
            )
        else:
            self.disk = await open_queue(config.path, durable_config(config))
            self.queue = DiskQueue(self.disk, config.encode)
        try:
            self._build()
            await self.opening.first()
        except BaseException:
            if self.disk is not None:
                await self.disk.close()
            raise

    def _build(self) -> None:
        config, sink, name, queue, gate, counts = (
            self._config,
            self._sink,
            self._name,
            self.queue,
            self.gate,
            self.counts,
        )
        budget = None if config.retry.budget is None else Budget(config.retry.budget, self._loop.time())
        self.courier = Courier(
            sink,
            config,
            name=name,
            queue=queue,
            gate=gate,
            backoff=self._backoff,
            budget=budget,
            counts=counts,
            key=record_key(config),
            on_latency=self._note_latency,
            on_failure=self._note_failure,
            failover=None if self.failover is None else self.failover.add,
        )
        self.opening = Opening(
            sink,
            name=name,
            timeout=config.send_timeout,
            gate=gate,
            backoff=self._backoff,
            counts=counts,
            courier=self.courier,
        )
        if config.split is not None:
            self.pipeline = Pipeline(
                config.split,
                sink,
                queue_id=queue.queue_id,
                gate=gate,
                most_sends=self._most_sends,
                decode=self._decode,
                deliver=self.courier.deliver,
            )
        self.feeder = Feeder(
            name=name,
            queue=queue,
            policy=config.batch,
            gate=gate,
            budget=budget,
            counts=counts,
            limit=self._limit,
            ready=self.opening.ready,
            carry=self._carry,
            on_settled=self._settled,
            more=lambda: bool(self.failover),
        )

    def start(self) -> None:
        """Begin to send."""
        self.feeder.start()
        if self.failover is not None:
            self._failing_over = self._loop.create_task(self._fail_over(), name=f"export-{self._name}-failover")

    # -- sending -------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """The batches that may be under way when all is well."""
        if self.pipeline is not None:
            return self.pipeline.capacity
        workers = self._workers if self._scaler is None else self._scaler.workers
        return min(workers * self._config.sends_per_worker, self._most_sends)

    def _limit(self) -> int:
        return self.gate.limit(self.workers)

    async def _carry(self, parcel: Parcel, leave: Pass) -> None:
        if self.pipeline is not None:
            await self.pipeline.carry(parcel, leave)
            return
        if self._decode is not None:
            parcel.decode(self._decode)
        await self.courier.deliver(parcel, leave)

    def _note_latency(self, seconds: float) -> None:
        self.counts.latency = moved(self.counts.latency, seconds, self._alpha)
        if self._scaler is not None:
            busy = self.feeder.active >= self._limit() and self.queue.records > self.queue.leased
            self._scaler.success(seconds, self._loop.time(), busy=busy)

    def _note_failure(self) -> None:
        if self._scaler is not None:
            self._scaler.failure(self._loop.time())

    async def _fail_over(self) -> None:
        """Look into the failover queue from time to time, and send the oldest of it."""
        policy, failover, feeder = self._config.failover, self.failover, self.feeder
        while policy is not None and failover is not None:
            await asyncio.sleep(policy.interval)
            for _ in range(policy.drain):
                if not failover or feeder.active >= self._limit() or not await self._fail_over_one(failover):
                    break

    async def _fail_over_one(self, failover: Failover) -> bool:
        """Whether another entry may be sent."""
        leave = self.gate.acquire(self._loop.time()) if self.opening.opened else None
        if leave is None:
            return False
        entry = failover.take()
        self.feeder.active += 1
        try:
            if entry is not None:
                await self.courier.deliver(entry, leave)
        finally:
            self.feeder.active -= 1
            self.gate.release(leave)
            self.counts.failover_out += 0 if entry is None else entry.delivered
            done = failover.put_back()
            self.feeder.poke()
            self._settled()
        return done

    # -- flushing ------------------------------------------------------------------------------------------------

    async def flush(self, timeout: float | None) -> None:
        """Wait until everything that is in now has been settled."""
        future: asyncio.Future[None] = self._loop.create_future()
        entry = (self.queue.next_seq, future)
        self._flushes.append(entry)
        self.feeder.hurry += 1
        self.feeder.ring()
        self._settled()
        try:
            async with asyncio.timeout(timeout):
                await future
        finally:
            self._flushes.remove(entry)
            self.feeder.hurry -= 1

    def _settled(self) -> None:
        if not self._flushes:
            return
        oldest = self.queue.oldest
        over = self.failover.oldest if self.failover is not None else None
        for mark, future in self._flushes:
            if all(number is None or number >= mark for number in (oldest, over)) and not future.done():
                future.set_result(None)

    # -- the end -------------------------------------------------------------------------------------------------

    async def drain(self, deadline: float) -> None:
        """Let everything be delivered until the deadline, then cut off what is under way."""
        feeder = self.feeder
        feeder.deadline = deadline
        feeder.ring()
        task = feeder.task
        if task is not None:
            await asyncio.wait((task,), timeout=max(0.0, deadline - self._loop.time()))
        tasks = {each for each in (task, self._failing_over, *feeder.tasks) if each is not None and not each.done()}
        for each in tasks:
            each.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_CANCEL_GRACE)
            if stuck:
                log.error("exporter_send_stuck", exporter=self._name, sends=len(stuck))
        for _, future in self._flushes:
            if not future.done():
                future.set_exception(QueueClosedError(f"exporter {self._name!r}: shut down before the flush was done"))

    async def close(self) -> tuple[list[Any], int]:
        """Close everything: the records that are left over, without a disk; and how many stay on it."""
        if self.pipeline is not None:
            self.pipeline.close()
        await self.opening.close()
        if self.disk is not None:
            on_disk = self.queue.records
            await self.disk.close()
            return [], on_disk
        left: list[Any] = [] if self.failover is None else self.failover.take_all()
        if isinstance(self.queue, MemoryQueue):
            self.queue.close()
            left += self.queue.take_all()
        return left, 0
