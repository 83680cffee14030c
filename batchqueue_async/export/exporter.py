"""The exporter: what is handed over is kept and delivered, even if the destination is away meanwhile.

    consume --> send queue (memory or disk) == puller --> sender --> sink
                    ^                                       |
                    +----------- not delivered: later ------+

What it is made of, and what makes it go, is in `engine`; here is what its users hold.
"""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import TYPE_CHECKING, Any, Self

from batchqueue_async._support import forks, log
from batchqueue_async._support.registry import everything, looked_at
from batchqueue_async.errors import (
    ConfigError,
    DeliveryError,
    DiskFullError,
    Failure,
    ForkedError,
    QueueClosedError,
    QueueFullError,
    WrongLoopError,
)
from batchqueue_async.export.config import ExportConfig, frozen_differences
from batchqueue_async.export.delivery.dead_letters import as_dead_letter
from batchqueue_async.export.delivery.waiters import DeliveryWaiter, error_of
from batchqueue_async.export.engine import Engine, ShutdownTimes
from batchqueue_async.export.stats import ExporterStats, ExportReport
from batchqueue_async.sinks.base import require_sink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.durable.queue import DurableQueue
    from batchqueue_async.export.control.breaker import BreakerState
    from batchqueue_async.export.delivery.sink_lifecycle import StartCheck
    from batchqueue_async.export.send_queue.protocol import Placed
    from batchqueue_async.sinks.base import Sink

# How often `peek` looks for counts that add up, and for how many seconds those that did may stand for others.
_LOOKS = 4
_SEEN_FOR = 1.0
_LETTERS_PER_STEP = 100


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
        check: StartCheck = "warn",
        check_timeout: float | None = None,
        dead_letters: Exporter | None = None,
        random: Random | None = None,
        open_queue: Callable[..., DurableQueue] | None = None,
    ) -> None:
        """Say what to deliver to, and how; nothing happens before `async with`.

        Args:
            sink: the destination.
            config: how to deliver.
            name: for logs and counts; the sink's class when None.
            check: what happens at the start when the sink can't be opened, or its own `async check()` fails: `warn`
                logs it and tries again later; `fail` raises it, but for an outage, which may pass; `off` does not wait
                for the sink.
            check_timeout: seconds for that; `config.send_timeout` when None.
            dead_letters: where records go that are given up, as mappings with `exporter`, `reason` and `record`: an
                exporter of its own destination, opened and closed by its owner, around this one.
            random: where jitter comes from; the tests give a seeded one.
            open_queue: what opens the durable queue; the tests give one with faults.
        """
        _check_arguments(sink, config, check, dead_letters)
        self.sink = sink
        self.config = config or ExportConfig()
        self.name = name or type(sink).__name__
        self.report: ExportReport | None = None
        self._random = random or Random()  # noqa: S311 - it spreads retries, and guards nothing
        self._open_queue = open_queue
        self._check_at_start: StartCheck = check
        self._check_timeout = check_timeout
        self._forward = dead_letters
        self._undelivered = 0
        self._seen: tuple[float, ExporterStats] | None = None
        self._phase = "new"
        self._closing: asyncio.Task[ExportReport] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._engine: Engine
        self._opening: asyncio.Task[None]
        self._abandoned: asyncio.Future[None]

    def __repr__(self) -> str:
        return f"Exporter({self.name!r}, {self._phase})"

    async def __aenter__(self) -> Self:
        """Open the send queue and the sink; a sink that is not there yet is opened again later."""
        if self._phase != "new":
            raise QueueClosedError(f"exporter {self.name!r}: {self._phase} already; make another")
        self._phase = "opening"
        self._loop = asyncio.get_running_loop()
        self._abandoned = self._loop.create_future()
        # A task of its own, so that a shutdown can end it, and not the caller.
        self._opening = self._loop.create_task(self._open(), name=f"export-{self.name}-open")
        try:
            await self._opened()
        except BaseException:
            await self._undo_opening()
            raise
        self._phase = "open"
        forks.watch(self)
        everything.add("exporter", self)
        self._engine.start()
        return self

    async def _opened(self) -> None:
        await asyncio.wait((self._opening, self._abandoned), return_when=asyncio.FIRST_COMPLETED)
        if self._phase != "opening":
            raise QueueClosedError(f"exporter {self.name!r}: shut down while it was opening; nothing was taken in")
        self._opening.result()

    async def _undo_opening(self) -> None:
        """The caller was cancelled, the opening failed, or a shutdown ended it, which sees to the rest then."""
        opening = self._opening
        try:
            if not opening.done():
                opening.cancel()
                await asyncio.wait((opening, self._abandoned), return_when=asyncio.FIRST_COMPLETED)
            if self._phase == "opening" and not opening.cancelled() and opening.exception() is None:
                await self._engine.close(ShutdownTimes.within(self._loop.time(), self.config.drain_timeout))
        finally:
            if self._phase == "opening":
                self._phase = "closed"
            self.__dict__.pop("_engine", None)

    async def _open(self) -> None:
        self._engine = engine = Engine(self.sink, self.config, name=self.name, random=self._random)
        await engine.open(
            self._open_queue,
            check=self._check_at_start,
            check_timeout=self._check_timeout,
            forward=None if self._forward is None else self._forward.consume,
        )

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
        await self._put(batch)

    async def deliver(self, batch: Sequence[Any]) -> None:
        """Hand a batch over, and return when the sink took all of it: for callers that acknowledge upstream.

        Cancelled, it waits no longer; what the send queue has is delivered all the same.

        Raises:
            DeliveryError: some records were given up or dropped, or have no form on disk; its `failures` has them with
                their reasons, and the sink took all others.
            QueueFullError, QueueClosedError, WrongLoopError: as for `consume`; or the exporter was shut down before the
                sink took all records, which are on disk or in the report then.
        """
        self._check()
        engine = self._engine
        if not batch:
            return
        waiter = DeliveryWaiter(self._loop.create_future())
        placed: list[Placed] = []
        failures: list[Failure] = []
        mark = engine.waiters.begin(engine.queue.next_seq)
        try:
            await self._put(batch, placed)
        except DeliveryError as error:
            failures += error.failures  # the others are kept, and are waited for
        except BaseException:
            engine.waiters.began(mark, None, ())
            raise
        engine.waiters.began(mark, waiter, placed)
        engine.watch()
        engine.puller.hurry += 1
        engine.puller.ring()
        try:
            await waiter.future
        finally:
            engine.puller.hurry -= 1
            engine.waiters.forget(waiter)
        self._raise_failures(batch, placed, failures, waiter)

    def _raise_failures(
        self, batch: Sequence[Any], placed: list[Placed], failures: list[Failure], waiter: DeliveryWaiter
    ) -> None:
        """Name every record of a call that was not delivered: refused, dropped on its way in or later, given up."""
        if sum(len(each.places) for each in placed) < len(batch):
            came_in = {place for each in placed for place in each.places}
            refused = {id(record) for failure in failures for record in failure.items}
            for place, record in enumerate(batch):
                if place not in came_in and id(record) not in refused:
                    waiter.failed.setdefault("dropped", []).append(place)
        failures += [
            Failure(tuple(batch[place] for place in sorted(places)), error_of(why))
            for why, places in waiter.failed.items()
        ]
        if failures:
            count = sum(len(failure.items) for failure in failures)
            raise DeliveryError(f"exporter {self.name!r}: {count} of {len(batch)} records were not delivered", failures)

    async def _put(self, batch: Sequence[Any], placed: list[Placed] | None = None) -> None:
        self._check()
        engine = self._engine
        if engine.disk is None:
            # Before the put, so that nothing can come between it and the return; and so that whoever hands over one
            # batch after the other lets them be sent meanwhile.
            await asyncio.sleep(0)
            self._check()
        placed = [] if placed is None else placed
        try:
            await engine.queue.put(batch, placed)
        except QueueFullError as error:
            engine.counts.refused += len(batch) - error.accepted
            engine.counts.disk_full += isinstance(error, DiskFullError)
            raise
        finally:
            # Whatever ended it: of a call that is larger than the queue, a first part may have come in.
            count = sum([len(each.places) for each in placed])
            if count:
                engine.counts.accepted_batches += 1
                engine.arrived(min(each.numbers.start for each in placed), count)

    def _check(self, *, opening: bool = False) -> None:
        if self._phase != "open" and not (opening and self._phase == "opening"):
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
        """Try again now, rather than when a pause or an open breaker is over, once you have fixed the cause."""
        self._check()
        self._engine.gate.reset()
        self._engine.puller.poke()

    def refusals(self, config: ExportConfig) -> list[str]:
        """Why `reconfigure` would refuse a configuration; empty where it would take it."""
        self._check()
        refused = frozen_differences(self.name, self.config, config)
        if self._engine.outlives_lease(config):
            refused.append(
                f"exporter {self.name!r}: with these times a batch may be held longer than its lease on disk, which "
                "can't change while it runs; restart"
            )
        return refused

    def reconfigure(self, config: ExportConfig) -> None:
        """Change policies, numbers of workers and timeouts while the exporter runs, and limits in memory upward.

        Raises:
            ConfigError: the configuration differs in what can't change; nothing has changed then.
        """
        refused = self.refusals(config)
        if refused:
            raise ConfigError("\n".join(refused))
        self._engine.reconfigure(config)
        self.config = config
        log.info("exporter_reconfigured", exporter=self.name, workers=config.worker_count)

    async def dead_letters(self, limit: int = 500) -> list[DeadLetter]:
        """The oldest records that were given up, with their reasons; they stay where they are.

        With a path those on disk, and each payload as it is there; without one those that the report would have, in
        the form that they would have on disk. None where another exporter takes them.

        Example:
            >>> import asyncio, batchqueue_async as bq
            >>> from batchqueue_async.sinks.memory import MemorySink
            >>> async def main() -> list[bq.DeadLetter]:
            ...     async with bq.Exporter(MemorySink()) as exporter:
            ...         return await exporter.dead_letters()
            >>> asyncio.run(main())
            []
        """
        self._check()
        if self._engine.disk is not None:
            return await self._engine.disk.queue.dead_letters(limit)
        letters: list[DeadLetter] = []
        for at, kept in enumerate(self._engine.dead_letters.kept(limit), 1):
            letters.append(as_dead_letter(kept))
            if at % _LETTERS_PER_STEP == 0:
                await asyncio.sleep(0)
        return letters

    async def requeue_dead_letters(
        self, numbers: Sequence[int] | None = None, *, progress: Callable[[Sequence[int]], object] | None = None
    ) -> int:
        """Put records that were given up into the send queue again, while it runs; how many.

        With a path those on disk, without one those that the report would have: all, or those with these numbers.

        Args:
            numbers: as `dead_letters` has them in `seq`.
            progress: called with the numbers of those that have been put back, some at a time.

        Raises:
            QueueFullError: there is no room; the records stay dead letters.
        """
        self._check()
        engine = self._engine
        if engine.disk is not None:

            def came_back(seqs: Sequence[int]) -> None:
                engine.puller.arrived(len(seqs))
                if progress is not None:
                    progress(seqs)

            return await engine.disk.queue.requeue_dead_letters(numbers, progress=came_back)
        letters = engine.dead_letters.take(numbers)
        placed: list[Placed] = []
        try:
            if letters:
                await self._put([letter.record for letter in letters], placed)
        finally:
            # Whatever ended it, and wherever: what did not come in is a dead letter still.
            came_in = {place for each in placed for place in each.places}
            left = [letter for place, letter in enumerate(letters) if place not in came_in]
            engine.dead_letters.restore(left)
            if came_in and progress is not None:
                progress([letters[place].seq for place in sorted(came_in)])
        if left:
            raise QueueFullError(
                f"exporter {self.name!r}: no room for {len(left)} of {len(letters)} dead letters, which "
                f"overflow={self.config.overflow!r} would drop; they stay what they are. Put them back when there is"
            )
        return len(letters)

    async def purge_dead_letters(
        self,
        numbers: Sequence[int] | None = None,
        *,
        before: float | None = None,
        progress: Callable[[Sequence[int]], object] | None = None,
    ) -> int:
        """Delete records that were given up, while it runs; how many.

        With a path those on disk, without one those that the report would have.

        Args:
            numbers: as `dead_letters` has them in `seq`; all when None.
            before: only those that were given up before this moment, in seconds since 1970.
            progress: called with the numbers of those that have been deleted, some at a time.
        """
        self._check()
        engine = self._engine
        if engine.disk is not None:
            return await engine.disk.queue.purge_dead_letters(numbers, before=before, progress=progress)
        gone = engine.dead_letters.take(numbers, before)
        if gone and progress is not None:
            progress([letter.seq for letter in gone])
        return len(gone)

    @property
    def forwards_to(self) -> Exporter | None:
        """The exporter that takes its dead letters; None where it keeps them itself."""
        return self._forward

    @property
    def breaker(self) -> BreakerState:
        """The state of the circuit breaker: "closed", "open" or "half_open"."""
        return self._engine.gate.health.state if hasattr(self, "_engine") else "closed"

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it lives on; None before it is opened."""
        return self.__dict__.get("_loop")

    @property
    def closed(self) -> bool:
        """Whether it takes nothing in: shut down, or never opened."""
        return self._phase != "open"

    def stats(self) -> ExporterStats:
        """A snapshot of every count."""
        if not hasattr(self, "_engine"):
            return ExporterStats(name=self.name, max_records=self.config.max_records, max_bytes=self.config.byte_limit)
        return snapshot(self.name, self.config, self._engine, self._undelivered)

    def peek(self) -> ExporterStats:
        """A snapshot of every count, from any thread and without waiting for the loop.

        Called in the middle of a step of the loop, it looks again until the counts add up, or returns those of a moment
        ago that did.

        Example:
            >>> import asyncio, batchqueue_async as bq
            >>> from batchqueue_async.sinks.memory import MemorySink
            >>> async def main() -> int:
            ...     async with bq.Exporter(MemorySink(), name="spans") as exporter:
            ...         await exporter.consume(["a", "b"])
            ...         return (await asyncio.to_thread(exporter.peek)).accepted
            >>> asyncio.run(main())
            2
        """
        stats = looked_at(self.stats)
        for _ in range(_LOOKS):
            if stats.adds_up:
                self._seen = (time.monotonic(), stats)
                return stats
            time.sleep(0)  # let the loop finish the step that it is in
            stats = looked_at(self.stats)
        if self._seen is not None and time.monotonic() - self._seen[0] < _SEEN_FOR:
            return self._seen[1]
        return stats

    # -- the end -------------------------------------------------------------------------------------------------

    async def shutdown(self, timeout: float | None = None) -> ExportReport:
        """Take nothing in any more, deliver what is left within `timeout` seconds, and tell what became of everything.

        What is not delivered by then stays on disk or, without a path, is returned in the report. A second call waits
        for the first; with a shorter timeout it brings the end of the first forward. The time is for all of it, the
        sink's `close` included: what does not end in time is left behind, and named in the log. Called while the
        exporter opens, it ends that, and `async with` raises `QueueClosedError`.

        Args:
            timeout: seconds; `config.drain_timeout` when None. Less than a quarter of a second is one where the sink
                does not end at once.
        """
        if self._closing is None:
            if self._phase in ("new", "closed"):
                self._phase = "closed"
                self.report = ExportReport(name=self.name)
                return self.report
            self._check(opening=True)
            seconds = self.config.drain_timeout if timeout is None else max(0.0, timeout)
            end = ShutdownTimes.within(self._loop.time(), seconds)
            if self._phase == "opening":
                self._phase = "closing"
                self._closing = self._loop.create_task(self._stop_opening(end), name=f"export-{self.name}-shutdown")
            else:
                self._phase = "closing"
                self._close_until(end)
            assert self._closing is not None  # noqa: S101 - made there
        elif timeout is not None and self._phase == "closing" and hasattr(self, "_engine"):
            self._engine.hasten(ShutdownTimes.within(self._loop.time(), max(0.0, timeout)))
        # A cancelled shutdown goes on in the background: half closed is no state to leave it in.
        return await asyncio.shield(self._closing)

    async def _stop_opening(self, end: ShutdownTimes) -> ExportReport:
        """Cut an opening off, wherever it is."""
        opening = self._opening
        engine: Engine | None = self.__dict__.get("_engine")
        try:
            opening.cancel()
            await asyncio.wait((opening,), timeout=end.left(self._loop.time()))
            if not opening.done():
                log.error("exporter_opening_stuck", exporter=self.name, way_out="let open() end when it is cancelled")
            elif not opening.cancelled() and opening.exception() is None and engine is not None:
                await engine.close(end)  # it was open in that very moment
        finally:
            self._phase = "closed"
            self.report = ExportReport(name=self.name)
            if not self._abandoned.done():
                self._abandoned.set_result(None)
        return self.report

    def _close_until(self, end: ShutdownTimes) -> None:
        self._closing = self._loop.create_task(self._finish(end), name=f"export-{self.name}-shutdown")
        self._closing.add_done_callback(self._closing_ended)

    def _closing_ended(self, closing: asyncio.Task[ExportReport]) -> None:
        if closing.cancelled() and self._phase == "closing" and not self._loop.is_closed():
            # Cancelled with all tasks of the loop, before it had begun.
            self._close_until(ShutdownTimes.within(self._loop.time(), 0.0))

    async def _finish(self, end: ShutdownTimes) -> ExportReport:
        start = self._loop.time()
        engine = self._engine
        try:
            end = await engine.drain(end)
        finally:
            # Cancelled, too: the sink and the directory are given back, and the report says what is left.
            self._phase = "closed"
            everything.remove(self)
            report = await self._account(start, end)
        return report

    async def _account(self, start: float, end: ShutdownTimes) -> ExportReport:
        engine = self._engine
        undelivered, on_disk = await engine.close(end)
        self._undelivered = len(undelivered)
        self.report = ExportReport(
            name=self.name,
            delivered=engine.counts.delivered,
            dead_lettered=engine.counts.dead_lettered,
            undelivered=undelivered,
            on_disk=on_disk,
            elapsed=self._loop.time() - start,
            dropped=dict(engine.queue.dropped),
            given_up=engine.dead_letters.given_up,
        )
        left = len(undelivered) + on_disk
        write = log.warning if left else log.info
        write("exporter_closed", exporter=self.name, delivered=engine.counts.delivered, undelivered=left)
        return self.report

    def after_fork(self) -> None:
        """In the child the tasks run nowhere, and the parent is still the owner."""
        if self._phase in ("open", "closing"):
            self._phase = "forked"


def snapshot(name: str, config: ExportConfig, engine: Engine, undelivered: int = 0) -> ExporterStats:
    """The counts of an exporter as they are now."""
    counts, gate, queue, failover = engine.counts, engine.gate, engine.queue, engine.failover
    durable = engine.disk.queue.stats() if engine.disk is not None else None
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
        dead_lettered=counts.dead_lettered if durable is None else counts.forwarded + durable.dead_lettered,
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
        stuck=engine.stuck,
        workers_active=engine.puller.active,
        workers_total=engine.workers,
        preparers_active=0 if engine.pipeline is None else engine.pipeline.preparing,
        senders_active=counts.sending,
        sends_in_flight=counts.sending,
        latency=counts.latency,
        last_error=counts.last_error,
        last_error_at=counts.last_error_at,
        last_success_at=counts.last_success_at,
        oldest_age=engine.oldest_age,
        next_send_in=gate.wait(engine.now()),
        send_seconds=counts.send_seconds.summary(),
        delivered_bytes=counts.delivered_bytes,
        dead_kinds=dict(counts.dead_kinds),
        newest_dead=tuple(counts.newest_dead),
        learned_rate=engine.rate.learned,
        undelivered=undelivered,
        failover_records=0 if failover is None else failover.records,
        failover_entries=0 if failover is None else len(failover),
        failover_bytes=0 if failover is None else failover.size,
        failover_in=counts.failover_in,
        failover_out=counts.failover_out,
        failover_evicted=0 if failover is None else failover.evicted,
        durable=durable,
    )


def _check_arguments(sink: object, config: object, check: object, dead_letters: object) -> None:
    require_sink(sink, "Exporter")
    if config is not None and not isinstance(config, ExportConfig):
        raise ConfigError(f"Exporter: config={config!r} is not an ExportConfig; give an ExportConfig or None")
    if check not in ("warn", "fail", "off"):
        raise ConfigError(f"Exporter: check={check!r} is unknown; choose one of warn, fail, off")
    if dead_letters is not None and not isinstance(dead_letters, Exporter):
        raise ConfigError(f"Exporter: dead_letters={dead_letters!r} is not an Exporter; give an Exporter or None")
