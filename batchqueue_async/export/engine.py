"""The parts of one open exporter, and what holds them together. Lives on one loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async.errors import QueueClosedError
from batchqueue_async.export.control.age_marks import AgeMarks
from batchqueue_async.export.control.backoff import Backoff, Budget
from batchqueue_async.export.control.concurrency import EWMA, Scaler, moved
from batchqueue_async.export.control.rate import SendRate
from batchqueue_async.export.control.send_gate import SendGate
from batchqueue_async.export.delivery.context import ExportContext
from batchqueue_async.export.delivery.dead_letters import DeadLetters
from batchqueue_async.export.delivery.failover import Failover
from batchqueue_async.export.delivery.kept import KeptBatches
from batchqueue_async.export.delivery.lease_keeper import LeaseKeeper
from batchqueue_async.export.delivery.pipeline import Pipeline
from batchqueue_async.export.delivery.puller import Puller
from batchqueue_async.export.delivery.sender import BatchSender
from batchqueue_async.export.delivery.sink_lifecycle import SinkLifecycle
from batchqueue_async.export.delivery.waiters import DeliveryWaiters
from batchqueue_async.export.needs import is_kept_together, sends_at_once, with_needs
from batchqueue_async.export.send_queue.memory import MemoryQueue
from batchqueue_async.export.send_queue.record_key import record_key
from batchqueue_async.export.stats import Counters
from batchqueue_async.sinks.base import needs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from batchqueue_async.durable.queue import DurableQueue
    from batchqueue_async.export.config import ExportConfig
    from batchqueue_async.export.control.send_gate import SendPermit
    from batchqueue_async.export.delivery.leased_batch import Batch, LeasedBatch
    from batchqueue_async.export.delivery.sink_lifecycle import StartCheck
    from batchqueue_async.export.send_queue.disk import DiskQueue
    from batchqueue_async.export.send_queue.protocol import SendQueue
    from batchqueue_async.sinks.base import Sink

# The share of the time that is left for sends to end that are cut off, and for the sink to close.
_CUT_OFF = 0.4
_CLOSE = 0.8
# Nobody else holds them.
_left_behind: set[asyncio.Task[None]] = set()
_RESERVE = 1.0
_RESERVED = 0.05
_LEAST_END = 0.25
_KEPT_LEAST = 64
_LEASE_SLACK = 1.1
_LOOK = 1.0


class ShutdownTimes(NamedTuple):
    """When the parts of a shutdown are to be over, so that its deadline covers all of them.

    Attributes:
        drain: the loop's time until which records are delivered.
        end: the time at which the report is made, whatever hangs.
    """

    drain: float
    end: float

    @classmethod
    def within(cls, now: float, timeout: float) -> ShutdownTimes:
        """A twentieth of the time, and at most a second, is for the end; without any time at all a moment is.

        Example:
            >>> ShutdownTimes.within(100.0, 30.0)
            ShutdownTimes(drain=129.0, end=130.0)
            >>> ShutdownTimes.within(100.0, 0.0)
            ShutdownTimes(drain=100.0, end=100.25)
        """
        reserve = min(_RESERVE, timeout * _RESERVED)
        return cls(now + timeout - reserve, now + max(timeout, _LEAST_END))

    def left(self, now: float) -> float:
        """Seconds until the end."""
        return max(0.0, self.end - now)


class Engine:
    """Made on the loop; `open` and `start` begin it, `drain` and `close` end it.

    Attributes:
        counts: what has been counted.
        gate: whether anything may be sent.
        disk: the send queue, if it is one on disk.
        queue: the send queue, whichever it is.
        failover: the failover queue, if there is one.
        pipeline: the stages, if there are any.
        ages: when the records in the send queue came in.
        kept: batches that wait for their repetition as they are.
        keeper: what keeps the leases of batches that wait.
        puller: what takes batches out of the send queue.
        sender: what brings them to the sink.
        lifecycle: the sink's life.
        dead_letters: what was given up.
        waiters: those who wait for their records to be delivered.
    """

    def __init__(self, sink: Sink, config: ExportConfig, *, name: str, random: Random) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._config = config = with_needs(sink, config, name)
        self._name = name
        self._random = random
        self.counts = Counters()
        self.gate = SendGate(config)
        self._workers = config.worker_count
        self._scaler = None if config.adaptive is None else Scaler(config.adaptive, self._workers)
        self._alpha = EWMA if config.adaptive is None else config.adaptive.alpha
        self._most_sends = sends_at_once(sink, config, name)
        self.failover = None if config.failover is None else Failover(config.failover)
        self._failing_over: asyncio.Task[None] | None = None
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        self._watching: asyncio.TimerHandle | None = None
        self._closed = False
        self._end: ShutdownTimes | None = None
        # Done when the end of a drain has come nearer.
        self._sooner: asyncio.Future[None] | None = None
        self.waiters = DeliveryWaiters(on_disk=config.path is not None)
        self.kept = KeptBatches(max(_KEPT_LEAST, 4 * self._most_sends))
        self.disk: DiskQueue | None = None
        self.pipeline: Pipeline | None = None
        self._context: ExportContext
        self.queue: SendQueue
        self.rate: SendRate
        self.ages: AgeMarks
        self.puller: Puller
        self.sender: BatchSender
        self.lifecycle: SinkLifecycle
        self.dead_letters: DeadLetters
        self.keeper: LeaseKeeper

    # -- the beginning -------------------------------------------------------------------------------------------

    async def open(
        self,
        open_queue: Callable[..., DurableQueue] | None = None,
        *,
        check: StartCheck = "warn",
        check_timeout: float | None = None,
        forward: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Open the send queue, then the sink; nothing stays open when one of them fails."""
        config = self._config
        if config.path is None:
            self.queue = MemoryQueue(
                max_records=config.max_records,
                max_bytes=config.byte_limit,
                overflow=config.overflow,
                block_timeout=config.block_timeout,
                key=record_key(config),
                serial=config.ordering == "order",
                on_drop=self._dropped,
            )
        else:
            self.queue = self.disk = await _open_disk(config, open_queue)
        try:
            self._build(forward)
            self.lifecycle.claim()
            await self.lifecycle.first(check, check_timeout or config.send_timeout)
        except BaseException:
            self.lifecycle.disclaim()
            if self.disk is not None:
                await self.disk.close()
            raise

    def _build(self, forward: Callable[[list[Any]], Any] | None) -> None:
        config = self._config
        now = self._loop.time()
        together, strict = is_kept_together(self._sink)
        self.rate = SendRate(config.rate, now)
        self.keeper = LeaseKeeper(self._loop, None if self.disk is None else self.disk.lease_time, self.kept)
        self.ages = AgeMarks()
        if self.disk is not None:
            for first, age in self.disk.queue.segment_ages():
                self.ages.note(first, now - age)
        self._context = context = ExportContext(
            loop=self._loop,
            name=self._name,
            sink=self._sink,
            config=config,
            queue=self.queue,
            gate=self.gate,
            rate=self.rate,
            keeper=self.keeper,
            backoff=Backoff(config.retry, self._random),
            budget=None if config.retry.budget is None else Budget(config.retry.budget, now),
            counts=self.counts,
            key=None if needs_of(self._sink).atomic else record_key(config),
            decode=None if self.disk is None else self.disk.decoder(config),
            attempts=None if self.disk is None else self.disk.attempts,
            together=together,
            strict=strict,
        )
        self.dead_letters = DeadLetters(context, forward)
        self.sender = BatchSender(context, self.dead_letters, self.kept, self.waiters, self)
        self.lifecycle = SinkLifecycle(context)
        self.puller = Puller(context, self.kept, self.lifecycle, self.failover, self)
        if config.split is not None:
            self.pipeline = Pipeline(
                config.split, context, most_sends=self._most_sends, sender=self.sender, puller=self.puller
            )
        self._decode = context.decode
        self.kept.on_add = self._kept_added

    def start(self) -> None:
        """Begin to send."""
        self.puller.start()
        if self.failover is not None:
            self._failing_over = self._loop.create_task(self._fail_over(), name=f"export-{self._name}-failover")

    def outlives_lease(self, config: ExportConfig) -> bool:
        """Whether a batch could be held longer than the leases that the send queue on disk gives out."""
        if self.disk is None:
            return False
        from batchqueue_async.export.send_queue.disk import durable_config  # noqa: PLC0415 - it is loaded by now

        # The time of a lease counts each delay twice: a little more is no reason to refuse.
        return durable_config(config).lease_timeout > _LEASE_SLACK * self.disk.lease_time

    def reconfigure(self, config: ExportConfig) -> None:
        """Go by other policies from the next batch on; the caller has seen that nothing else differs."""
        context, now = self._context, self._loop.time()
        before, self._config = context.config, with_needs(self._sink, config, self._name)
        context.config = config = self._config
        if config.retry != before.retry:
            context.backoff = Backoff(config.retry, self._random)
            context.budget = None if config.retry.budget is None else Budget(config.retry.budget, now)
        if config.rate != before.rate:
            self.rate = context.rate = SendRate(config.rate, now)
        self.gate.reconfigure(config)
        self._workers = config.worker_count
        self._most_sends = sends_at_once(self._sink, config, self._name)
        if isinstance(self.queue, MemoryQueue):
            self.queue.resize(config.max_records, config.byte_limit)
        self.puller.poke()

    # -- sending -------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """The batches that may be under way when all is well."""
        if self.pipeline is not None:
            return self.pipeline.capacity
        workers = self._workers if self._scaler is None else self._scaler.workers
        return min(workers * self._config.sends_per_worker, self._most_sends)

    def arrived(self, first: int, count: int) -> None:
        """Records came into the send queue, the first of them with this number."""
        self.ages.note(first, self._loop.time())
        if self.ages.crowded:
            self.ages.settled(self.queue.oldest)
        self.puller.arrived(count)

    def now(self) -> float:
        """The loop's time."""
        return self._loop.time()

    @property
    def oldest_age(self) -> float:
        """How long the oldest record has been in the send queue, in seconds, at most; from any thread."""
        return self.ages.age(self.queue.oldest, self._loop.time())

    @property
    def stuck(self) -> int:
        """Records that fail again and again, nobody knows why."""
        stuck = self._context.stuck
        return stuck.count(self.queue.oldest) if stuck else 0

    @property
    def limit(self) -> int:
        """The batches that may be under way now."""
        return self.gate.limit(self.workers)

    async def carry(self, batch: LeasedBatch, permit: SendPermit) -> None:
        """Bring a batch that may be sent to the sender, by way of the stages if there are any."""
        if self.pipeline is not None:
            await self.pipeline.carry(batch, permit)
            return
        if self._decode is not None and not batch.made:
            batch.decode(self._decode)
            batch.made = True
        await self.sender.deliver(batch, permit)

    def _kept_added(self) -> None:
        self.puller.ring()  # a wait for records must end when this batch is due
        self.keeper.arm()

    def answered(self, seconds: float, records: int) -> None:
        """The sink answered a send."""
        self.counts.latency = moved(self.counts.latency, seconds, self._alpha)
        self.counts.answered(seconds)
        if self._scaler is not None:
            busy = self.puller.active >= self.limit and self.queue.records > self.queue.leased
            self._scaler.success(seconds, self._loop.time(), busy=busy, size=records)

    def failed(self) -> None:
        """The destination was not well."""
        if self._scaler is not None:
            self._scaler.failure(self._loop.time())

    def _dropped(self, numbers: range) -> None:
        if self.waiters:
            self.waiters.settled(numbers, "dropped")
        self.settled()

    # -- failing over --------------------------------------------------------------------------------------------

    def fail_over(self, batch: Batch, places: Sequence[int]) -> bool:
        """Take records whose attempts are over into the failover queue; False where there is none."""
        if self.failover is None:
            return False
        gone = self.failover.add(batch, places)
        if self.waiters and gone:
            self.waiters.settled(gone, "dropped")
        return True

    async def _fail_over(self) -> None:
        """Look into the failover queue from time to time, and send the oldest of it."""
        policy, failover, puller = self._config.failover, self.failover, self.puller
        while policy is not None and failover is not None:
            await asyncio.sleep(policy.interval)
            for _ in range(policy.drain):
                if not failover or puller.active >= self.limit or not await self._fail_over_safely(failover):
                    break

    async def _fail_over_safely(self, failover: Failover) -> bool:
        try:
            return await self._fail_over_one(failover)
        except Exception as error:  # noqa: BLE001 - a bug, of ours or in a class of the sink's: the next look is as good
            log.error("export_delivery_failed", exporter=self._name, **describe(error))
            return False

    async def _fail_over_one(self, failover: Failover) -> bool:
        """Whether another entry may be sent."""
        permit = self.gate.acquire(self._loop.time()) if self.lifecycle.opened else None
        if permit is None:
            return False
        entry = failover.take()
        self.puller.active += 1
        try:
            if entry is not None:
                await self.sender.deliver(entry, permit)
        finally:
            self.puller.active -= 1
            self.gate.release(permit)
            self.counts.failover_out += 0 if entry is None else entry.delivered
            done = failover.put_back()
            self.puller.poke()
            self.settled()
        return done

    # -- flushing ------------------------------------------------------------------------------------------------

    async def flush(self, timeout: float | None) -> None:
        """Wait until everything that is in now has been settled."""
        future: asyncio.Future[None] = self._loop.create_future()
        entry = (self.queue.next_seq, future)
        self._flushes.append(entry)
        self.watch()
        self.puller.hurry += 1
        self.puller.ring()
        self.settled()
        try:
            async with asyncio.timeout(timeout):
                await future
        finally:
            self._flushes.remove(entry)
            self.puller.hurry -= 1

    def watch(self) -> None:
        """Look from time to time, as long as somebody waits: a disk drops what is too old without saying so."""
        if self.disk is not None and self._watching is None and not self._closed:
            self._watching = self._loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        self._watching = None
        self.settled()
        if self._flushes or self.waiters:
            self.watch()

    def settled(self) -> None:
        """Records were settled: those who wait for that are looked at."""
        if not self._flushes and not (self.waiters and self.disk is not None):
            return
        oldest = self.queue.oldest
        if self.waiters and self.disk is not None:
            self.waiters.dropped_below(oldest)
        over = self.failover.oldest if self.failover is not None else None
        for mark, future in self._flushes:
            if all(number is None or number >= mark for number in (oldest, over)) and not future.done():
                future.set_result(None)

    # -- the end -------------------------------------------------------------------------------------------------

    def hasten(self, end: ShutdownTimes) -> None:
        """Bring the end of the drain that is under way, or about to begin, forward to this; never back."""
        if self._end is None or end.end < self._end.end:
            self._end = end
            if self._sooner is not None and not self._sooner.done():
                self._sooner.set_result(None)

    async def drain(self, end: ShutdownTimes) -> ShutdownTimes:
        """Take nothing in, let everything be delivered in time, then cut off what is under way.

        Returns:
            When the rest is to be over: as asked for, or earlier if `hasten` was called.
        """
        puller = self.puller
        self.hasten(end)
        self.queue.stop_intake()
        try:
            while True:
                now, until = self._loop.time(), (self._end or end).drain
                puller.deadline = until
                puller.ring()
                if puller.task is None or puller.task.done() or until <= now:
                    break
                self._sooner = self._loop.create_future()
                tasks = (puller.task, self._sooner)
                done, _ = await asyncio.wait(tasks, timeout=until - now, return_when=asyncio.FIRST_COMPLETED)
                if self._sooner not in done:
                    break
        finally:
            # Cancelled, the drain is over at once; what is under way must end even so.
            end = self._end or end
            await self._cut_off(end)
        return end

    async def _cut_off(self, end: ShutdownTimes) -> None:
        puller = self.puller
        tasks = {
            each for each in (puller.task, self._failing_over, *puller.tasks) if each is not None and not each.done()
        }
        for each in tasks:
            each.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_CUT_OFF * end.left(self._loop.time()))
            if stuck:
                log.error("exporter_send_stuck", exporter=self._name, sends=len(stuck))
        error = f"exporter {self._name!r}: shut down before "
        for _, future in self._flushes:
            if not future.done():
                future.set_exception(QueueClosedError(error + "the flush was done"))
        self.waiters.close(QueueClosedError(error + "the records were delivered"))

    async def close(self, end: ShutdownTimes) -> tuple[list[Any], int]:
        """Close everything: the records that are left over, without a disk; and how many stay on it."""
        self._closed = True
        self.keeper.close()
        if self._watching is not None:
            self._watching.cancel()
        if self.pipeline is not None:
            self.pipeline.close()
        on_disk = 0
        try:
            await self.lifecycle.close(_CLOSE * end.left(self._loop.time()))
            for batch in self.kept.take_all():
                await batch.nack(0.0, reason="cut_off")
        finally:
            self.lifecycle.disclaim()
            if self.disk is not None:
                on_disk = self.queue.records
                await self._close_disk(self.disk, end)
        if self.disk is not None:
            return [], on_disk
        left: list[Any] = [] if self.failover is None else self.failover.take_all()
        if isinstance(self.queue, MemoryQueue):
            self.queue.close()
            left += self.queue.take_all()
        return left, 0

    async def _close_disk(self, disk: DiskQueue, end: ShutdownTimes) -> None:
        """Close the send queue on disk; a disk that does not answer is left behind, and closed when it does."""
        task = self._loop.create_task(disk.close(), name=f"export-{self._name}-close-queue")
        try:
            await asyncio.wait((task,), timeout=end.left(self._loop.time()))
        finally:
            if task.done():
                task.result()
            else:
                log.error("send_queue_close_stuck", exporter=self._name)
                _left_behind.add(task)
                task.add_done_callback(_left_behind.discard)


async def _open_disk(config: ExportConfig, open_queue: Callable[..., DurableQueue] | None) -> DiskQueue:
    # Here, so that an exporter in memory needs nothing of what a disk takes.
    from batchqueue_async.durable.queue import DurableQueue  # noqa: PLC0415
    from batchqueue_async.export.send_queue.disk import DiskQueue, durable_config  # noqa: PLC0415

    make: Callable[..., DurableQueue] = open_queue or DurableQueue.open
    queue = await make(config.path, durable_config(config))
    return DiskQueue(queue, config.encode)
