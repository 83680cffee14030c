"""The exporter: what is handed over is kept, and delivered by and by, whatever the destination does meanwhile.

consume --> send queue (memory or disk) == feeder --> courier --> sink
                 ^                            |          |
                 +------- not delivered ------+----------+
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any, Self

from batchqueue_async import forks, log
from batchqueue_async.durable.durable_queue import DurableQueue
from batchqueue_async.errors import (
    AuthError,
    ConfigError,
    DiskFullError,
    ForkedError,
    QueueClosedError,
    QueueFullError,
    RetryableError,
    WrongLoopError,
)
from batchqueue_async.export.config import ExportConfig
from batchqueue_async.export.delivery import Courier
from batchqueue_async.export.feeding import Feeder
from batchqueue_async.export.gate import Gate
from batchqueue_async.export.memory_queue import MemoryQueue
from batchqueue_async.export.outcome import Verdict, judge
from batchqueue_async.export.retry import Backoff, Budget
from batchqueue_async.export.send_queue import DiskQueue, decoder, durable_config, record_key
from batchqueue_async.export.stats import Counts, ExporterStats, ExportReport
from batchqueue_async.queue.dispatch import describe
from batchqueue_async.sinks.base import Sink, is_concurrent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.export.breaker import BreakerState
    from batchqueue_async.export.gate import Pass
    from batchqueue_async.export.parcel import Parcel
    from batchqueue_async.export.send_queue import SendQueue

_CANCEL_GRACE = 0.25
_CLOSE_GRACE = 5.0
_EWMA = 0.3


class Exporter:
    """Delivers batches to a sink, through outages: the handler of a queue, or used by itself.

    `consume` puts a batch into the send queue and returns when that has confirmed it: on disk, where there is a path.
    From there batches go to the sink, several at once where it allows that; what fails is sent again for as long as it
    takes, so a record may arrive more than once, with the same key each time.

    Example:
        >>> import asyncio, batchqueue_async as bq
        >>> from batchqueue_async.sinks.memory import MemorySink
        >>> async def main() -> list[str]:
        ...     sink = MemorySink()
        ...     async with bq.Exporter(sink) as exporter, bq.BatchQueueManager() as manager:
        ...         queue = manager.create("words", bq.QueueConfig(consumer=exporter))
        ...         await queue.produce_many(["to", "be"])
        ...     return sink.records
        >>> asyncio.run(main())
        ['to', 'be']

    Attributes:
        sink: where batches go.
        config: how.
        name: what logs and counts call it.
        report: what became of the records; None before the shutdown.
    """

    def __init__(
        self,
        sink: Sink,
        config: ExportConfig | None = None,
        *,
        name: str | None = None,
        random: Random | None = None,
        open_queue: Callable[..., DurableQueue] = DurableQueue.open,
    ) -> None:
        """Say what to deliver to, and how; nothing happens before `async with`.

        Args:
            sink: the destination.
            config: how to deliver.
            name: for logs and counts; the sink's class when None.
            random: where jitter comes from; the tests give a seeded one.
            open_queue: what opens the durable queue; the tests give one with faults.
        """
        _check_arguments(sink, config)
        self.sink = sink
        self.config = config = config or ExportConfig()
        self.name = name or type(sink).__name__
        self.report: ExportReport | None = None
        self._random = random or Random()  # noqa: S311 - it spreads retries, and guards nothing
        self._open_queue = open_queue
        self._phase = "new"
        self._counts = Counts()
        self._gate = Gate(config)
        self._backoff = Backoff(config.retry, self._random)
        self._opened = False
        self._open_attempts = 0
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        self._closing: asyncio.Task[ExportReport] | None = None
        self._disk: DurableQueue | None = None
        self._workers = config.worker_count
        self._most_sends = config.send_limit if is_concurrent(sink) else 1
        self._loop: asyncio.AbstractEventLoop
        self._queue: SendQueue
        self._feeder: Feeder
        self._courier: Courier

    def __repr__(self) -> str:
        return f"Exporter({self.name!r}, {self._phase})"

    # -- the beginning -------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Open the send queue and the sink; a sink that is not there yet is opened again later."""
        if self._phase != "new":
            raise QueueClosedError(f"exporter {self.name!r}: {self._phase} already; make another")
        self._phase = "opening"
        self._loop = asyncio.get_running_loop()
        try:
            await self._open_send_queue()
            await self._try_open(first=True)
        except BaseException:
            self._phase = "closed"
            if self._disk is not None:
                await self._disk.close()
            raise
        self._phase = "open"
        forks.watch(self)
        self._feeder.start()
        return self

    async def _open_send_queue(self) -> None:
        config = self.config
        if config.path is None:
            queue: SendQueue = MemoryQueue(
                max_records=config.max_records,
                max_bytes=config.byte_limit,
                overflow=config.overflow,
                block_timeout=config.block_timeout,
                key=record_key(config),
                on_drop=self._settled,
            )
        else:
            self._disk = self._open_queue(config.path, durable_config(config))
            await self._disk
            queue = DiskQueue(self._disk, config.encode)
        self._queue = queue
        budget = None if config.retry.budget is None else Budget(config.retry.budget, self._loop.time())
        self._courier = Courier(
            self.sink,
            config,
            name=self.name,
            queue=queue,
            gate=self._gate,
            backoff=self._backoff,
            budget=budget,
            counts=self._counts,
            key=record_key(config),
            on_latency=self._note_latency,
            on_failure=self._note_failure,
        )
        self._decode = decoder(config) if self._disk is not None else None
        self._feeder = Feeder(
            name=self.name,
            queue=queue,
            policy=config.batch,
            gate=self._gate,
            budget=budget,
            counts=self._counts,
            limit=self._limit,
            ready=self._ready,
            carry=self._carry,
            on_settled=self._settled,
            more=lambda: False,
        )

    async def _try_open(self, *, first: bool = False) -> BaseException | None:
        try:
            async with asyncio.timeout(self.config.send_timeout):
                await self.sink.open()
        except Exception as error:
            await self._close_sink()
            verdict, _ = judge(error)
            if first and verdict not in (Verdict.RETRY, Verdict.PAUSE):
                raise
            log.warning("sink_not_open", exporter=self.name, **describe(error))
            return error
        except BaseException:
            await self._close_sink()
            raise
        self._opened = True
        return None

    async def _ready(self) -> float | None:
        """See to it that the sink is open: 0, or the seconds until the next attempt."""
        if self._opened:
            return 0.0
        leave = self._gate.acquire(self._loop.time())
        if leave is None:
            return self._gate.wait(self._loop.time())
        error = await self._try_open()
        if error is None:
            self._open_attempts = 0
            self._gate.release(leave)
            return 0.0
        self._open_attempts += 1
        self._counts.failures[judge(error)[1]] += 1
        now = self._loop.time()
        if isinstance(error, AuthError):
            self._courier.pause(error, leave)
            return self._gate.wait(now)
        asked = self._backoff.asked(error.retry_after) if isinstance(error, RetryableError) else None
        self._gate.failed(leave, now, asked)
        self._counts.backoff = delay = self._backoff.delay(self._open_attempts, asked)
        return delay

    # -- in ------------------------------------------------------------------------------------------------------

    async def consume(self, batch: Sequence[Any]) -> None:
        """Keep a batch for the sink; returns when the send queue has confirmed it.

        Cancelled, the batch is not kept, unless a disk had it already.

        Raises:
            QueueFullError: there is no room, and `overflow` says to refuse; nothing of the batch is kept.
            DeliveryError: with a path, some records have no form on disk; its `failures` has them, the others are kept.
            QueueClosedError: the exporter is not open.
            WrongLoopError: it lives on another loop.
        """
        self._check()
        if self._disk is None:
            # Before the put, so that nothing can come between it and the return; and so that whoever hands over one
            # batch after the other lets them be sent meanwhile.
            await asyncio.sleep(0)
            self._check()
        try:
            await self._queue.put(batch)
        except QueueFullError as error:
            self._counts.refused += len(batch)
            self._counts.disk_full += isinstance(error, DiskFullError)
            raise
        self._counts.accepted_batches += 1

    def _check(self) -> None:
        if self._phase != "open":
            if self._phase == "forked":
                raise ForkedError(
                    f"exporter {self.name!r}: opened before a fork, and this is the child; its owner is the parent. "
                    "Open another here, with a directory of its own"
                )
            raise QueueClosedError(
                f"exporter {self.name!r}: {self._phase}, not open; use it inside `async with Exporter(...)`"
            )
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoopError(
                f"exporter {self.name!r}: called on another event loop than the one that opened it; "
                "put a BatchQueue in front of it, and use the queue's bridge"
            )

    # -- out -----------------------------------------------------------------------------------------------------

    def _limit(self) -> int:
        """The batches that may be under way now."""
        return self._gate.limit(min(self._workers * self.config.sends_per_worker, self._most_sends))

    async def _carry(self, parcel: Parcel, leave: Pass) -> None:
        if self._decode is not None:
            parcel.decode(self._decode)
        await self._courier.deliver(parcel, leave)

    def _note_latency(self, seconds: float) -> None:
        was = self._counts.latency
        self._counts.latency = seconds if was is None else was + _EWMA * (seconds - was)

    def _note_failure(self) -> None:
        """A failure of the destination."""

    def _settled(self) -> None:
        if self._flushes:
            oldest = self._queue.oldest
            for mark, future in self._flushes:
                if (oldest is None or oldest >= mark) and not future.done():
                    future.set_result(None)

    async def flush(self, timeout: float | None = None) -> None:
        """Return when everything that was kept before the call has been delivered, given up or dropped.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
            QueueClosedError: the exporter was shut down meanwhile.
        """
        self._check()
        future: asyncio.Future[None] = self._loop.create_future()
        entry = (self._queue.next_seq, future)
        self._flushes.append(entry)
        self._feeder.hurry += 1
        self._feeder.ring()
        self._settled()
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            raise TimeoutError(
                f"exporter {self.name!r}: flush(timeout={timeout}) is over with {self._queue.records} records left; "
                f"the breaker is {self.breaker}"
            ) from None
        finally:
            self._flushes.remove(entry)
            self._feeder.hurry -= 1

    def resume(self) -> None:
        """Try again now, rather than when a pause or an open breaker is over: the reason is known to be mended."""
        self._check()
        self._gate.health.reset()
        self._gate.auth.reset()
        self._gate.held_until = 0.0
        self._feeder.poke()

    # -- looking -------------------------------------------------------------------------------------------------

    @property
    def breaker(self) -> BreakerState:
        """The state of the circuit breaker: "closed", "open" or "half_open"."""
        return self._gate.health.state

    @property
    def closed(self) -> bool:
        """Whether it takes nothing in: shut down, or never opened."""
        return self._phase != "open"

    def stats(self) -> ExporterStats:
        """A snapshot of every count."""
        counts, gate, config = self._counts, self._gate, self.config
        opened = self._phase not in ("new", "opening")
        queue = self._queue if opened else None
        durable = self._disk.stats() if opened and self._disk is not None and self._phase != "forked" else None
        records, size = (queue.records, queue.size) if queue is not None else (0, 0)
        max_records, max_bytes = config.max_records, config.byte_limit
        if durable is not None:
            max_records = durable.max_records
        return ExporterStats(
            name=self.name,
            accepted=durable.put if durable is not None else queue.next_seq if queue is not None else 0,
            accepted_batches=counts.accepted_batches,
            recovered=durable.recovered if durable is not None else 0,
            refused=counts.refused,
            delivered=counts.delivered,
            delivered_batches=counts.delivered_batches,
            skipped=counts.skipped,
            dead_lettered=counts.dead_lettered,
            dropped=dict(queue.dropped) if queue is not None else {},
            records=records,
            bytes=size,
            max_records=max_records,
            max_bytes=max_bytes,
            utilization=max(size / max_bytes, records / max_records if max_records else 0.0),
            disk_available_bytes=durable.free_bytes if durable is not None else None,
            disk_full=counts.disk_full,
            retries=counts.retries,
            retry_successes=counts.retry_successes,
            retry_failures=dict(counts.retry_failures),
            failures=dict(counts.failures),
            splits=counts.splits,
            isolations=counts.isolations,
            backoff=counts.backoff,
            breaker=gate.health.state,
            breaker_opens=gate.health.opens,
            breaker_rejected=gate.health.rejected,
            paused=gate.auth.state != "closed",
            pauses=counts.pauses,
            workers_active=self._feeder.active if queue is not None else 0,
            workers_total=self._workers,
            preparers_active=counts.preparing,
            senders_active=counts.sending,
            sends_in_flight=counts.sending,
            latency=counts.latency,
            failover_records=0,
            failover_entries=0,
            failover_bytes=0,
            failover_in=counts.failover_in,
            failover_out=counts.failover_out,
            failover_evicted=0,
            durable=durable,
        )

    # -- the end -------------------------------------------------------------------------------------------------

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def shutdown(self, timeout: float | None = None) -> ExportReport:
        """Take nothing in any more, deliver what is left within `timeout` seconds, and tell what became of everything.

        What is not delivered by then stays on disk or, without a path, is returned in the report. A second call waits
        for the first.

        Args:
            timeout: seconds for the drain; `config.drain_timeout` when None.
        """
        if self._closing is None:
            if self._phase != "open":
                return self._not_open()
            self._check()
            self._phase = "closing"
            deadline = self._loop.time() + (self.config.drain_timeout if timeout is None else max(0.0, timeout))
            self._closing = self._loop.create_task(self._finish(deadline), name=f"export-{self.name}-shutdown")
        # A cancelled shutdown goes on in the background: half closed is no state to leave it in.
        return await asyncio.shield(self._closing)

    def _not_open(self) -> ExportReport:
        self._phase = "closed" if self._phase == "new" else self._phase
        if self.report is None:
            self.report = ExportReport(
                name=self.name, delivered=0, dead_lettered=0, undelivered=[], on_disk=0, elapsed=0.0
            )
        return self.report

    async def _finish(self, deadline: float) -> ExportReport:
        start = self._loop.time()
        feeder = self._feeder
        feeder.deadline = deadline
        feeder.ring()
        await self._drain(deadline)
        self._phase = "closed"
        for _, future in self._flushes:
            if not future.done():
                future.set_exception(QueueClosedError(f"exporter {self.name!r}: shut down before the flush was done"))
        await self._close_sink()
        undelivered: list[Any] = []
        on_disk = 0
        if self._disk is not None:
            on_disk = self._queue.records
            await self._disk.close()
        elif isinstance(self._queue, MemoryQueue):
            self._queue.close()
            undelivered = self._queue.take_all()
        counts = self._counts
        self.report = ExportReport(
            name=self.name,
            delivered=counts.delivered,
            dead_lettered=counts.dead_lettered,
            undelivered=undelivered,
            on_disk=on_disk,
            elapsed=self._loop.time() - start,
            dropped=dict(self._queue.dropped),
            given_up=tuple(self._courier.given_up),
        )
        left = len(undelivered) + on_disk
        tell = log.warning if left else log.info
        tell("exporter_closed", exporter=self.name, delivered=counts.delivered, undelivered=left)
        return self.report

    async def _drain(self, deadline: float) -> None:
        """Let the feeder end by itself until the deadline, then cut off what is under way."""
        feeder = self._feeder
        task = feeder.task
        if task is not None:
            await asyncio.wait((task,), timeout=max(0.0, deadline - self._loop.time()))
        tasks = {each for each in (task, *feeder.tasks) if each is not None and not each.done()}
        for each in tasks:
            each.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_CANCEL_GRACE)
            if stuck:
                log.error("exporter_send_stuck", exporter=self.name, sends=len(stuck))

    async def _close_sink(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_GRACE):
                await self.sink.close()
        except Exception as error:  # noqa: BLE001 - the end goes on; what the sink had confirmed it has
            log.error("sink_close_failed", exporter=self.name, **describe(error))
        self._opened = False

    def after_fork(self) -> None:
        """In the child the tasks run nowhere, and the parent is still the owner."""
        if self._phase in ("open", "closing"):
            self._phase = "forked"


def _check_arguments(sink: object, config: object) -> None:
    if not isinstance(sink, Sink):
        raise ConfigError(
            f"Exporter: sink={type(sink).__qualname__} is no sink; give an object with async open(), send(batch) and "
            "close()"
        )
    if config is not None and not isinstance(config, ExportConfig):
        raise ConfigError(f"Exporter: config={config!r} is not an ExportConfig; give an ExportConfig or None")
