"""The end of a queue: the gate, the final drain, the deadline, and a report that places every accepted item."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async._support import log
from batchqueue_async.errors import DeadlockError, Failure, QueueClosedError
from batchqueue_async.queue.deadlock import WaitHere, round_here
from batchqueue_async.queue.round import Round, current_round
from batchqueue_async.queue.stats import ShutdownReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.queue.dispatch import Dispatcher
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.router import PartitionRouter
    from batchqueue_async.queue.stats import Counters

T = TypeVar("T")

CANCEL_GRACE = 0.25
"""Seconds that a handler gets, after the deadline, to react to its cancellation before it is left behind."""


class Shutdown(Generic[T]):
    """One shutdown in progress; everybody who asked for it waits for the same one."""

    __slots__ = (
        "_deadline",
        "_expired",
        "_on_end",
        "_reported",
        "_start",
        "_task",
        "_timer",
        "counters",
        "dispatcher",
        "drains",
        "loop",
        "name",
        "report",
        "router",
    )

    def __init__(
        self,
        name: str,
        *,
        drains: Sequence[DrainTask[T]],
        router: PartitionRouter[T],
        counters: Counters,
        dispatcher: Dispatcher[T],
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[[], None],
    ) -> None:
        self.name = name
        self.drains = drains
        self.router = router
        self.counters = counters
        self.dispatcher = dispatcher
        self.loop = loop
        self._on_end = on_end
        self.report: ShutdownReport | None = None
        self._task: asyncio.Task[None] | None = None
        self._start = 0.0
        # Kept here because uvloop's handle for a time that has come does not tell it.
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._expired: asyncio.Future[None]
        # Not the task: whoever cancels every task of the loop must not keep others from learning what became of it.
        self._reported: asyncio.Future[ShutdownReport]

    @property
    def begun(self) -> bool:
        """Whether it is under way, or over."""
        return self._task is not None

    def begin(self, deadline: float) -> None:
        """Drain until nothing is left or the deadline passes, then account for everything."""
        self._start = self.loop.time()
        self._expired = self.loop.create_future()
        self._reported = self.loop.create_future()
        self.hasten(deadline)
        self._let_drains_finish()
        self._task = self.loop.create_task(self._run(), name=f"{self.name}-shutdown")
        self._task.add_done_callback(self._conclude)

    def hasten(self, deadline: float) -> None:
        """Cut off what still runs at `deadline`, unless an earlier deadline is set already."""
        if deadline < self._deadline:
            self._deadline = deadline
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(deadline, self._expire)

    async def wait(self) -> ShutdownReport:
        """The report, as soon as there is one. Cancelling one caller ends the shutdown for no other."""
        if round_here() is None:
            return await asyncio.shield(self._reported)
        broken: asyncio.Future[None] = self.loop.create_future()
        with WaitHere(self._needs, partial(_resolve, broken)):
            await asyncio.wait((self._reported, broken), return_when=asyncio.FIRST_COMPLETED)
        if not self._reported.done():
            raise self.deadlock()
        return self._reported.result()

    def _needs(self) -> list[list[DrainTask[Any]]]:
        return [[drain] for drain in self.drains if drain.task is not None and not drain.task.done()]

    def deadlock(self) -> DeadlockError:
        """What a shutdown raises that waits for its own caller."""
        return DeadlockError(
            f"queue {self.name!r}: shutdown was called from one of its own handlers, which it would wait for; "
            "let the handler return and shut down from outside, e.g. by asyncio.create_task(queue.shutdown())"
        )

    def _expire(self) -> None:
        for drain in self.drains:
            drain.stop()
        if not self._expired.done():
            self._expired.set_result(None)

    async def _run(self) -> None:
        tasks = {drain.task for drain in self.drains if drain.task is not None}
        try:
            drained = asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait((drained, self._expired), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # Somebody cancels every task: a program that ends, most often by Ctrl-C. It waits for this task, so that
            # there is time for handlers to end, and for the report.
            self._expire()
            await asyncio.wait(tasks, timeout=CANCEL_GRACE)
            raise
        if not drained.done():
            await asyncio.wait(tasks, timeout=CANCEL_GRACE)
        await self._close_handlers()

    async def _close_handlers(self) -> None:
        """Let the handlers give away what they hold, as long as the deadline allows."""
        if not self.dispatcher.has_closers:
            return
        if self._expired.done():
            self.dispatcher.stop_closing()
            log.warning("on_close_skipped", queue=self.name, way_out="give the shutdown more time")
            return
        closing = self.loop.create_task(self._close_as_handler(), name=f"{self.name}-close")
        await asyncio.wait((closing, self._expired), return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            closing.cancel()
            await asyncio.wait((closing,), timeout=CANCEL_GRACE)
            log.warning("on_close_cut_off", queue=self.name, way_out="give the shutdown more time")

    async def _close_as_handler(self) -> None:
        # A wait for this queue's shutdown would wait for itself, as in a handler: it is refused as there.
        round_ = Round(self.drains[0])
        current_round.set(round_)
        try:
            await self.dispatcher.close_handlers(round_)
        finally:
            round_.close()

    def _conclude(self, _: asyncio.Task[None]) -> None:
        """Account for everything, however the task has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._expired.cancel()
        if self.report is not None:
            return  # the queue was abandoned meanwhile
        still_running = sum(drain.still_running() for drain in self.drains)
        undelivered = self._give_up()
        report = self._make_report(undelivered, self.loop.time() - self._start, still_running)
        self.report = report
        if undelivered:
            log.warning(
                "queue_closed_undelivered",
                queue=self.name,
                undelivered=len(undelivered),
                still_running=report.still_running,
            )
        log.info("queue_closed", queue=self.name, handled=report.handled, failed=report.failed, elapsed=report.elapsed)
        if not self._reported.done():
            self._reported.set_result(report)
        self._on_end()

    def abandon(self, came_in: list[T]) -> ShutdownReport:
        """The report of a queue whose loop can't drain it any more: what has no outcome is undelivered."""
        still_running = sum(drain.still_running() for drain in self.drains)
        left = [item for drain in self.drains for item in drain.give_up()]
        for migration in self.router.migrations:
            left += migration.drop()
        for partition in self.router.partitions:
            left += partition.drop()
        left += came_in
        log.warning("queue_closed_undelivered", queue=self.name, undelivered=len(left))
        self.report = report = self._make_report(left, 0.0, still_running)
        self._on_end()
        return report

    def _let_drains_finish(self) -> None:
        self.router.on_settled = self._settled
        for partition in self.router.partitions:
            partition.stay()  # nothing moves any more: whoever owns a partition drains it
        for drain in self.drains:
            drain.finish(may_exit=not self.router.migrations)

    def _settled(self) -> None:
        for drain in self.drains:
            drain.finish(may_exit=True)

    def _give_up(self) -> list[T]:
        """Collect what has no outcome, those of interrupted calls first, and tell those who wait for it."""
        left: list[T] = []
        error = QueueClosedError(f"queue {self.name!r} was shut down before it could handle the item")
        while self.router.migrations:
            next(iter(self.router.migrations)).arrive()
        for drain in self.drains:
            drain.fail_unfinished(error)
            left += drain.give_up()
        for partition in self.router.partitions:
            partition.fail_waiting(error)
            left += partition.take(partition.qsize())
            partition.finish_flight()
            partition.settle()
        return left

    def lose(self, drain: DrainTask[T]) -> None:
        """End the waits for what a drain task that is gone would have handled; the items stay for the report."""
        error = QueueClosedError(f"queue {self.name!r} has lost the drain task that would have handled the item")
        drain.fail_unfinished(error)
        for migration in self.router.migrations:
            if migration.source.owner is drain:
                migration.fail_waits(error)
        for partition in drain.partitions:
            partition.fail_waiting(error)
            partition.end_waits()

    def _make_report(self, undelivered: list[T], elapsed: float, still_running: int = 0) -> ShutdownReport:
        counters = self.counters
        done = counters.handled + counters.failed + counters.unhandled + counters.dropped_after
        return ShutdownReport(
            handled=counters.handled,
            failed=counters.failed,
            undelivered=undelivered,
            elapsed=elapsed,
            accepted=done + len(undelivered),
            unhandled=counters.unhandled,
            dropped_after=counters.dropped_after,
            name=self.name,
            still_running=still_running,
        )


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def merged(failures: Sequence[Failure]) -> list[Failure]:
    """Failures with the items of one error together, in the order in which they failed."""
    items: dict[int, list[Any]] = {}
    errors: dict[int, BaseException] = {}
    for failure in failures:
        errors[id(failure.error)] = failure.error
        items.setdefault(id(failure.error), []).extend(failure.items)
    return [Failure(tuple(items[key]), error) for key, error in errors.items()]
