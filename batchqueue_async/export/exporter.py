"""The exporter: what is handed over is kept, and delivered by and by, whatever the destination does meanwhile.

    consume --> send queue (memory or disk) == feeder --> courier --> sink
                    ^                                        |
                    +----------- not delivered: later -------+

What it is made of, and what makes it go, is in `engine`; here is what its users hold.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any, Self

from batchqueue_async._support import forks, log
from batchqueue_async.durable.queue import DurableQueue
from batchqueue_async.errors import (
    ConfigError,
    DiskFullError,
    ForkedError,
    QueueClosedError,
    QueueFullError,
    WrongLoopError,
)
from batchqueue_async.export.config import ExportConfig
from batchqueue_async.export.engine import Engine
from batchqueue_async.export.stats import ExporterStats, ExportReport
from batchqueue_async.sinks.base import Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.export.control.breaker import BreakerState


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
        self.config = config or ExportConfig()
        self.name = name or type(sink).__name__
        self.report: ExportReport | None = None
        self._random = random or Random()  # noqa: S311 - it spreads retries, and guards nothing
        self._open_queue = open_queue
        self._phase = "new"
        self._closing: asyncio.Task[ExportReport] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._engine: Engine

    def __repr__(self) -> str:
        return f"Exporter({self.name!r}, {self._phase})"

    async def __aenter__(self) -> Self:
        """Open the send queue and the sink; a sink that is not there yet is opened again later."""
        if self._phase != "new":
            raise QueueClosedError(f"exporter {self.name!r}: {self._phase} already; make another")
        self._phase = "opening"
        self._loop = asyncio.get_running_loop()
        self._engine = Engine(self.sink, self.config, name=self.name, random=self._random)
        try:
            await self._engine.open(self._open_queue)
        except BaseException:
            self._phase = "closed"
            del self._engine
            raise
        self._phase = "open"
        forks.watch(self)
        self._engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- in ------------------------------------------------------------------------------------------------------

    async def consume(self, batch: Sequence[Any]) -> None:
        """Keep a batch for the sink; returns when the send queue has confirmed it.

        Cancelled, the batch is not kept, unless a disk had it already.

        Raises:
            QueueFullError: there is no room, and `overflow` says to refuse; nothing of the batch is kept, or, if it is
                larger than the whole queue, a first part of it.
            DeliveryError: with a path, some records have no form on disk; its `failures` has them, the others are kept.
            QueueClosedError: the exporter is not open.
            WrongLoopError: it lives on another loop.
        """
        self._check()
        engine = self._engine
        if engine.disk is None:
            # Before the put, so that nothing can come between it and the return; and so that whoever hands over one
            # batch after the other lets them be sent meanwhile.
            await asyncio.sleep(0)
            self._check()
        try:
            await engine.queue.put(batch)
        except QueueFullError as error:
            engine.counts.refused += len(batch)
            engine.counts.disk_full += isinstance(error, DiskFullError)
            raise
        engine.counts.accepted_batches += 1
        engine.feeder.arrived(len(batch))

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

    # -- meanwhile -----------------------------------------------------------------------------------------------

    async def flush(self, timeout: float | None = None) -> None:
        """Return when everything that was kept before the call has been delivered, given up or dropped.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
            QueueClosedError: the exporter was shut down meanwhile.
        """
        self._check()
        try:
            await self._engine.flush(timeout)
        except TimeoutError:
            raise TimeoutError(
                f"exporter {self.name!r}: flush(timeout={timeout}) is over with {self._engine.queue.records} records "
                f"left; the breaker is {self.breaker}"
            ) from None

    def resume(self) -> None:
        """Try again now, rather than when a pause or an open breaker is over: the reason is known to be mended."""
        self._check()
        self._engine.gate.reset()
        self._engine.feeder.poke()

    @property
    def breaker(self) -> BreakerState:
        """The state of the circuit breaker: "closed", "open" or "half_open"."""
        return self._engine.gate.health.state if hasattr(self, "_engine") else "closed"

    @property
    def closed(self) -> bool:
        """Whether it takes nothing in: shut down, or never opened."""
        return self._phase != "open"

    def stats(self) -> ExporterStats:
        """A snapshot of every count."""
        if not hasattr(self, "_engine"):
            return ExporterStats(name=self.name, max_records=self.config.max_records, max_bytes=self.config.byte_limit)
        return snapshot(self.name, self.config, self._engine)

    # -- the end -------------------------------------------------------------------------------------------------

    async def shutdown(self, timeout: float | None = None) -> ExportReport:
        """Take nothing in any more, deliver what is left within `timeout` seconds, and tell what became of everything.

        What is not delivered by then stays on disk or, without a path, is returned in the report. A second call waits
        for the first.

        Args:
            timeout: seconds for the drain; `config.drain_timeout` when None.
        """
        if self._closing is None:
            if self._phase in ("new", "closed", "opening"):
                self._phase = "closed" if self._phase == "new" else self._phase
                self.report = ExportReport(name=self.name)
                return self.report
            self._check()
            self._phase = "closing"
            deadline = self._loop.time() + (self.config.drain_timeout if timeout is None else max(0.0, timeout))
            self._closing = self._loop.create_task(self._finish(deadline), name=f"export-{self.name}-shutdown")
        # A cancelled shutdown goes on in the background: half closed is no state to leave it in.
        return await asyncio.shield(self._closing)

    async def _finish(self, deadline: float) -> ExportReport:
        start = self._loop.time()
        engine = self._engine
        await engine.drain(deadline)
        self._phase = "closed"
        undelivered, on_disk = await engine.close()
        self.report = ExportReport(
            name=self.name,
            delivered=engine.counts.delivered,
            dead_lettered=engine.counts.dead_lettered,
            undelivered=undelivered,
            on_disk=on_disk,
            elapsed=self._loop.time() - start,
            dropped=dict(engine.queue.dropped),
            given_up=tuple(engine.courier.given_up),
        )
        left = len(undelivered) + on_disk
        tell = log.warning if left else log.info
        tell("exporter_closed", exporter=self.name, delivered=engine.counts.delivered, undelivered=left)
        return self.report

    def after_fork(self) -> None:
        """In the child the tasks run nowhere, and the parent is still the owner."""
        if self._phase in ("open", "closing"):
            self._phase = "forked"


def snapshot(name: str, config: ExportConfig, engine: Engine) -> ExporterStats:
    """The counts of an exporter as they are now."""
    counts, gate, queue, failover = engine.counts, engine.gate, engine.queue, engine.failover
    durable = engine.disk.stats() if engine.disk is not None else None
    max_records = config.max_records if durable is None else durable.max_records
    max_bytes = config.byte_limit
    return ExporterStats(
        name=name,
        accepted=queue.next_seq if durable is None else durable.put,
        accepted_batches=counts.accepted_batches,
        recovered=0 if durable is None else durable.recovered,
        refused=counts.refused,
        delivered=counts.delivered,
        delivered_batches=counts.delivered_batches,
        skipped=counts.skipped,
        dead_lettered=counts.dead_lettered,
        dropped=dict(queue.dropped),
        records=queue.records,
        bytes=queue.size,
        max_records=max_records,
        max_bytes=max_bytes,
        utilization=max(queue.size / max_bytes, queue.records / max_records if max_records else 0.0),
        disk_available_bytes=None if durable is None else durable.free_bytes,
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
        workers_active=engine.feeder.active,
        workers_total=engine.workers,
        preparers_active=0 if engine.pipeline is None else engine.pipeline.preparing,
        senders_active=counts.sending,
        sends_in_flight=counts.sending,
        latency=counts.latency,
        failover_records=0 if failover is None else failover.records,
        failover_entries=0 if failover is None else len(failover),
        failover_bytes=0 if failover is None else failover.size,
        failover_in=counts.failover_in,
        failover_out=counts.failover_out,
        failover_evicted=0 if failover is None else failover.evicted,
        durable=durable,
    )


def _check_arguments(sink: object, config: object) -> None:
    if not isinstance(sink, Sink):
        raise ConfigError(
            f"Exporter: sink={type(sink).__qualname__} is no sink; give an object with async open(), send(batch) and "
            "close()"
        )
    if config is not None and not isinstance(config, ExportConfig):
        raise ConfigError(f"Exporter: config={config!r} is not an ExportConfig; give an ExportConfig or None")
