"""The registry of queues by name, the owner of shared schedulers, and the order in which everything ends."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from batchqueue_async._support import forks, log
from batchqueue_async.config import QueueConfig
from batchqueue_async.errors import ConfigError, DeadlockError, QueueClosedError, QueueExistsError
from batchqueue_async.queue.batch_queue import BatchQueue
from batchqueue_async.queue.shutdown import CANCEL_GRACE
from batchqueue_async.runtime.loop_calls import AskedTooLongError, submit, wait, wait_async
from batchqueue_async.runtime.scheduler import Scheduler, stop_all

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable
    from types import TracebackType

    from batchqueue_async.config import SharedScheduler
    from batchqueue_async.queue.stats import ShutdownReport

T = TypeVar("T")

LOOP_GRACE = 1.0
"""Seconds, on top of a queue's own deadline, for another thread's loop to answer before it counts as stalled."""


class BatchQueueManager:
    """Makes queues by name, shares them, and shuts them down in order.

    It may be used from any thread; each queue it makes lives on one event loop: the one that runs where it is made,
    or its shared scheduler's.

    Example:
        >>> import asyncio
        >>> async def main() -> list[str]:
        ...     async with BatchQueueManager() as manager:
        ...         manager.get_or_create("spans", QueueConfig())
        ...         return manager.names()
        >>> asyncio.run(main())
        ['spans']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, BatchQueue[Any]] = {}
        self._schedulers: dict[str, Scheduler] = {}
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: a lock that another thread held would stay locked, and nothing here is the child's."""
        self._lock = threading.Lock()
        self.closed_by_itself()

    # -- making and finding --------------------------------------------------------------------------------------

    def create(self, name: str, config: QueueConfig[T] | None = None) -> BatchQueue[T]:
        """Make a queue under a name of its own.

        Raises:
            QueueExistsError: the name is taken.
            ConfigError: the configuration breaks a rule.
            WrongLoopError: no event loop runs here, and the configuration names no scheduler.
        """
        wanted: QueueConfig[T] = config or QueueConfig()
        with self._lock:
            if self._find(name) is not None:
                raise QueueExistsError(
                    f"queue {name!r}: the name is taken; choose another, or share the queue with get_or_create"
                )
            return self._make(name, wanted)

    def get_or_create(self, name: str, config: QueueConfig[T] | None = None) -> BatchQueue[T]:
        """The queue of that name, made if there is none; the first configuration wins.

        Raises:
            ConfigError: one of the two configurations has a single consumer and the other has not.
        """
        wanted: QueueConfig[T] = config or QueueConfig()
        with self._lock:
            queue = self._find(name)
            if queue is None:
                return self._make(name, wanted)
        self._compare(queue, wanted)
        return queue

    def _find(self, name: str) -> BatchQueue[Any] | None:
        """The queue of that name; one whose shutdown is complete, without the manager, leaves its name free."""
        queue = self._queues.get(name)
        return None if queue is None or queue.ended else queue

    def _make(self, name: str, config: QueueConfig[T]) -> BatchQueue[T]:
        config.validate(name)
        if config.scheduler is None:
            queue = BatchQueue(name, config)
        else:
            scheduler = self._scheduler_for(name, config.scheduler)
            queue = BatchQueue(name, config, loop=scheduler.loop, limiter=scheduler.turns)
        self._queues[name] = queue
        return queue

    def _scheduler_for(self, queue: str, wanted: SharedScheduler) -> Scheduler:
        scheduler = self._schedulers.get(wanted.name)
        if scheduler is None:
            scheduler = self._schedulers[wanted.name] = Scheduler(wanted.name, wanted.policy)
            self.close_at_exit()
            log.info("scheduler_created", scheduler=wanted.name, policy=str(wanted.policy), calls=scheduler.limit)
        elif scheduler.policy != wanted.policy:
            log.warning(
                "scheduler_policy_ignored",
                queue=queue,
                scheduler=wanted.name,
                policy=str(wanted.policy),
                first=str(scheduler.policy),
            )
        scheduler.check()
        return scheduler

    def _compare(self, queue: BatchQueue[Any], config: QueueConfig[Any]) -> None:
        if (queue.config.consumer is None) != (config.consumer is None):
            has, wants = ("handlers by type", "a single consumer")
            if queue.config.consumer is not None:
                has, wants = wants, has
            raise ConfigError(
                f"queue {queue.name!r}: consumer={config.consumer!r} asks for {wants}, "
                f"but the queue exists with {has}; use the same mode, or another name"
            )
        differing = queue.config.differences(config)
        if differing:
            log.warning("queue_config_ignored", queue=queue.name, fields=differing)

    def get(self, name: str) -> BatchQueue[Any] | None:
        """The queue of that name, or None."""
        return self._queues.get(name)

    def names(self) -> list[str]:
        """The names of all queues, in the order in which they were made."""
        with self._lock:
            return list(self._queues)

    def scheduler(self, name: str) -> Scheduler | None:
        """The shared scheduler of that name, or None if no queue has named it yet."""
        return self._schedulers.get(name)

    def queues(self) -> list[BatchQueue[Any]]:
        """All queues, in the order in which they were made."""
        with self._lock:
            return list(self._queues.values())

    # -- ending --------------------------------------------------------------------------------------------------

    async def shutdown(self, name: str, timeout: float | None = None) -> ShutdownReport:
        """Shut one queue down and forget it; its shared scheduler goes on for the others.

        Raises:
            ConfigError: there is no queue of that name.
            DeadlockError: from a handler of the queue.
        """
        queue = self._queues.get(name)
        if queue is None:
            raise ConfigError(f"queue {name!r}: there is none of that name; the manager has {self.names()}")
        report = await self._end(queue, timeout)
        self.forget([queue])
        return report

    def forget(self, queues: list[BatchQueue[Any]]) -> None:
        """Free the names of queues that are shut down."""
        with self._lock:
            for queue in queues:
                if self._queues.get(queue.name) is queue:
                    del self._queues[queue.name]

    async def shutdown_all(self, timeout: float | None = None) -> dict[str, ShutdownReport]:
        """End everything: all gates close, all queues drain, then the schedulers stop and the registries are cleared.

        Args:
            timeout: seconds for the drain of all queues together; each queue's `drain_timeout` when None.

        Raises:
            DeadlockError: from a handler of one of the queues, or on a shared scheduler's loop.
        """
        with self._lock:
            queues, schedulers = list(self._queues.values()), list(self._schedulers.values())
        self._forbid_shutdown_here(queues, schedulers)
        here = asyncio.get_running_loop()
        for queue in queues:
            self._close_gate(queue, here)
        reports = await asyncio.gather(*(self._end(queue, timeout) for queue in queues))
        for scheduler in schedulers:
            await asyncio.to_thread(scheduler.stop)
        self.forget(queues)
        with self._lock:
            for scheduler in schedulers:
                if self._schedulers.get(scheduler.name) is scheduler:
                    del self._schedulers[scheduler.name]
        self.closed_by_itself()
        return {report.name: report for report in reports}

    def close_at_exit(self) -> None:
        """Have the queues on background loops drained at the exit of the program, if nobody does it before."""
        _open_managers.add(self)

    def closed_by_itself(self) -> None:
        """Nothing is left to do at the exit of the program."""
        _open_managers.discard(self)

    def drain_at_exit(self) -> list[Callable[[], None]]:
        """Begin to shut down the queues on other threads' loops; each of the results waits for one, and tells of it."""
        begun = time.monotonic()
        ending: list[Callable[[], None]] = []
        for queue in self.queues():
            if queue.loop.is_running() and not queue.ended:
                with contextlib.suppress(RuntimeError):  # the loop ended between the two lines
                    before = queue.counters.handled
                    ending.append(partial(_await_exit, queue, submit(queue.loop, queue.shutdown), before, begun))
        return ending

    def _forbid_shutdown_here(self, queues: list[BatchQueue[Any]], schedulers: list[Scheduler]) -> None:
        for scheduler in schedulers:
            if scheduler.is_current:
                raise DeadlockError(
                    f"scheduler {scheduler.name!r}: shutdown_all was called on its own loop, which it would wait for; "
                    "call it from another thread or loop"
                )
        for queue in queues:
            if queue.loop is asyncio.get_running_loop():
                queue.forbid_shutdown_here()

    def _close_gate(self, queue: BatchQueue[Any], here: asyncio.AbstractEventLoop) -> None:
        if queue.loop is here:
            queue.close_gate()
        elif queue.loop.is_running():
            queue.loop.call_soon_threadsafe(queue.close_gate)

    async def _end(self, queue: BatchQueue[Any], timeout: float | None) -> ShutdownReport:
        if queue.loop is asyncio.get_running_loop():
            return await queue.shutdown(timeout)
        allowed = queue.config.drain_timeout if timeout is None else timeout
        if queue.loop.is_running():
            try:
                ending = submit(queue.loop, partial(queue.shutdown, timeout))
                return await wait_async(ending, queue.loop, max(0.0, allowed) + CANCEL_GRACE + LOOP_GRACE)
            except AskedTooLongError:
                log.error("loop_stalled", queue=queue.name, timeout=allowed)
            except (QueueClosedError, RuntimeError):
                log.error("loop_ended", queue=queue.name)
        return queue.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown_all()


_open_managers: set[BatchQueueManager] = set()


@atexit.register
def _drain_all_at_exit() -> None:
    """Loops in daemon threads still run here, and no thread has to be started: this is the last moment that works."""
    for finish in [finish for manager in list(_open_managers) for finish in manager.drain_at_exit()]:
        finish()
    stop_all(LOOP_GRACE)


def _await_exit(
    queue: BatchQueue[Any], future: concurrent.futures.Future[ShutdownReport], before: int, begun: float
) -> None:
    left = begun + queue.config.drain_timeout + CANCEL_GRACE + LOOP_GRACE - time.monotonic()
    try:
        report = wait(future, queue.loop, max(0.0, left))
    except (AskedTooLongError, QueueClosedError):
        report = queue.abandon()
    tell = log.warning if report.handled > before or report.undelivered else log.debug
    tell(
        "queue_drained_at_exit",
        queue=queue.name,
        handled=report.handled - before,
        undelivered=len(report.undelivered),
        way_out="close the bridge, or await shutdown_all, before the program ends",
    )


_default: BatchQueueManager | None = None
_default_lock = threading.Lock()


class _Default:
    """A forked child gets a default manager of its own."""

    def after_fork(self) -> None:
        global _default, _default_lock
        _default, _default_lock = None, threading.Lock()


_of_this_process = _Default()
forks.watch(_of_this_process)


def default_manager() -> BatchQueueManager:
    """The process-wide manager, made on first use.

    Example:
        >>> default_manager() is default_manager()
        True
    """
    global _default  # noqa: PLW0603 - one for the process is what it is
    with _default_lock:
        if _default is None:
            _default = BatchQueueManager()
        return _default
