"""The workers: their tasks, which of them are idle, how long a call may take, and their end.

A worker is a task that takes what is ready as long as there is something, and only then waits. It belongs to the pool
and not to a message, so that a message costs no task, future, timer or log line.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import structlog

from batchqueue_async._support import log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from batchqueue_async.intake.ports import Taken


class Worker:
    """One of the workers: its task, and the call that it is in.

    Attributes:
        number: from 1, for logs.
        task: what runs its calls.
        since: the loop's time at which its call began; meaningful while `busy`.
        busy: the deliveries of its call; None between calls.
        why: why its call was cancelled by us; None while it was not.
    """

    __slots__ = ("busy", "number", "since", "task", "why")

    def __init__(self, number: int) -> None:
        self.number = number
        self.since = 0.0
        self.busy: Sequence[Taken] | None = None
        self.why: Literal["timeout", "stop"] | None = None
        self.task: asyncio.Task[None]

    def outlived(self) -> bool:
        """A call was cancelled and returned all the same, so it has handled its message; whether the worker ends."""
        why, self.why = self.why, None
        self.task.uncancel()
        return why == "stop"


class Workers:
    """All workers of one consumer.

    Attributes:
        idle: one waiter for each worker that has nothing to do.
        unwatched: whether no timer looks at the calls, so that the next call has to set it by `watch`.
    """

    def __init__(self, name: str, count: int, timeout: float | None) -> None:
        """Say how many there are, and how many seconds a call may take; None sets no bound."""
        self._name = name
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._all = [Worker(number) for number in range(1, count + 1)]
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self.idle: deque[asyncio.Future[None]] = deque()
        self.unwatched = timeout is not None

    def start(self, run: Callable[[Worker], Coroutine[None, None, None]]) -> None:
        """Begin to work."""
        for worker in self._all:
            # What a handler logs by structlog says whose worker it is, where the program merges context variables.
            context = contextvars.copy_context()
            context.run(structlog.contextvars.bind_contextvars, consumer=self._name, worker=worker.number)
            name = f"intake-{self._name}-worker-{worker.number}"
            worker.task = self._loop.create_task(run(worker), name=name, context=context)
            worker.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("intake_worker_broke", consumer=self._name, task=task.get_name(), **log.describe(error))

    @property
    def broken(self) -> bool:
        """Whether a worker has ended that nobody has stopped."""
        return not self._stopping and any(worker.task.done() for worker in self._all)

    @property
    def active(self) -> int:
        """Workers that are not idle."""
        return len(self._all) - len(self.idle)

    def has(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task is one of theirs: a handler's call runs in it."""
        return any(worker.task is task for worker in self._all)

    def oldest(self, now: float) -> float:
        """Seconds that the call that has run longest has taken; from any thread."""
        return max((now - worker.since for worker in self._all if worker.busy is not None), default=0.0)

    # -- nothing to do -----------------------------------------------------------------------------------------------

    async def park(self) -> None:
        """Wait to be woken."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self.idle.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self.idle:
                self.idle.remove(waiter)
            raise

    def wake(self, most: int) -> None:
        """Wake some of the idle ones, those that have waited longest."""
        idle = self.idle
        while most and idle:
            waiter = idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                most -= 1

    # -- too long ----------------------------------------------------------------------------------------------------

    def watch(self, since: float) -> None:
        """Look when the call that began then has had its time.

        The time is the same for all, so the call that began first is over first: one timer is exact for all of them,
        and a call costs none.
        """
        if self._timeout is not None:
            self.unwatched = False
            self._timer = self._loop.call_at(since + self._timeout, self._sweep, self._timeout)

    def _sweep(self, timeout: float) -> None:
        """Cancel the calls whose time is over, and look again when the next one's will be."""
        self.unwatched = True
        now = self._loop.time()
        oldest: float | None = None
        for worker in self._all:
            if worker.busy is None or worker.why is not None:
                continue
            if worker.since + timeout <= now:
                worker.why = "timeout"
                worker.task.cancel()
            elif oldest is None or worker.since < oldest:
                oldest = worker.since
        if oldest is not None:
            self.watch(oldest)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def cancel(self, grace: float) -> int:
        """End them, cancelling their calls; how many calls did not end within the grace."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        running = [worker for worker in self._all if not worker.task.done()]
        for worker in running:
            worker.why = "stop"
            worker.task.cancel()
        if not running:
            return 0
        _, left = await asyncio.wait([worker.task for worker in running], timeout=grace)
        for worker in running:
            if worker.task in left:
                log.error(
                    "handler_abandoned",
                    consumer=self._name,
                    worker=worker.number,
                    seconds=round(self._loop.time() - worker.since, 3),
                )
        return len(left)
