"""The registry of queues by name, the owner of shared schedulers, and the order in which everything ends."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

from batchqueue_async._support import forks, log
from batchqueue_async._support.checks import check_timeout
from batchqueue_async._support.locked import guarded, locked
from batchqueue_async.config import QueueConfig
from batchqueue_async.errors import ConfigError, DeadlockError, QueueExistsError
from batchqueue_async.queue.batch_queue import BatchQueue
from batchqueue_async.runtime.at_exit import exit_drain
from batchqueue_async.runtime.ending import end_async, end_in_thread
from batchqueue_async.runtime.scheduler import Scheduler, stop_async, stop_in_thread

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from types import TracebackType

    from batchqueue_async.config import SharedScheduler
    from batchqueue_async.queue.stats import ShutdownReport
    from batchqueue_async.runtime.ending import Ending

T = TypeVar("T")

LEAST_STOP = 0.1
"""Seconds that schedulers get to stop, even where the queues have used up all of the call's time."""


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
        # It can be taken again by its holder: a signal handler may ask for a queue while its thread is making one.
        self._lock = threading.RLock()
        self._queues: dict[str, BatchQueue[Any]] = {}
        self._schedulers: dict[str, Scheduler] = {}
        # Queues that a call here is ending, or was ending when it was cancelled: its caller is to get their reports.
        self._ending: set[BatchQueue[Any]] = set()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: a lock that another thread held would stay locked, and nothing here is the child's.

        The parent's queues can still be asked for, and say so; their names are free for queues of the child.
        """
        self._lock = threading.RLock()
        self._schedulers = {}
        self._ending = set()
        exit_drain.discard(self)

    # -- making and finding --------------------------------------------------------------------------------------

    def create(self, name: str, config: QueueConfig[T] | None = None) -> BatchQueue[T]:
        """Make a queue under a name of its own.

        Raises:
            QueueExistsError: the name is taken.
            ConfigError: the configuration breaks a rule.
            WrongLoopError: no event loop runs here, and the configuration names no scheduler.
        """
        wanted: QueueConfig[T] = config or QueueConfig()
        queue, found = self._find_or_make(name, wanted)
        if found:
            raise QueueExistsError(
                f"queue {name!r}: the name is taken; choose another, or share the queue with get_or_create"
            )
        return queue

    def get_or_create(self, name: str, config: QueueConfig[T] | None = None) -> BatchQueue[T]:
        """The queue of that name, made if there is none; the first configuration wins.

        Raises:
            ConfigError: one of the two configurations has a single consumer and the other has not.
        """
        wanted: QueueConfig[T] = config or QueueConfig()
        queue, found = self._find_or_make(name, wanted)
        if found:
            self._compare(queue, wanted)
        return queue

    @locked
    def _find_or_make(self, name: str, config: QueueConfig[Any]) -> tuple[BatchQueue[Any], bool]:
        """The queue, and whether there was one."""
        queue = self.find(name)
        return (self._make(name, config), False) if queue is None else (queue, True)

    def _make(self, name: str, config: QueueConfig[T]) -> BatchQueue[T]:
        config.validate(name)
        if config.scheduler is None:
            queue = BatchQueue(name, config, on_end=self._queue_ended)
        else:
            scheduler = self._scheduler_for(name, config.scheduler)
            queue = BatchQueue(name, config, loop=scheduler.loop, limiter=scheduler.turns, on_end=self._queue_ended)
        self._queues[name] = queue
        return queue

    def _scheduler_for(self, queue: str, wanted: SharedScheduler) -> Scheduler:
        scheduler = self._schedulers.get(wanted.name)
        if scheduler is not None and not scheduler.running:
            # Somebody stopped it, or a handler raised SystemExit: its queues are lost, but new ones need not be.
            log.warning("scheduler_replaced", queue=queue, scheduler=wanted.name)
            scheduler = None
        if scheduler is None:
            scheduler = self._schedulers[wanted.name] = Scheduler(wanted.name, wanted.policy)
            exit_drain.add(self)
            log.info("scheduler_created", scheduler=wanted.name, policy=str(wanted.policy), calls=scheduler.limit)
        elif scheduler.policy != wanted.policy:
            log.warning(
                "scheduler_policy_ignored",
                queue=queue,
                scheduler=wanted.name,
                policy=str(wanted.policy),
                first=str(scheduler.policy),
            )
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
        """The queue of that name, or None; one that can't work any more says why when it is used."""
        return self._queues.get(name)

    def find(self, name: str) -> BatchQueue[Any] | None:
        """The queue of that name, or None if there is none that can still work: then the name is free.

        A queue can't work any more when it is shut down, when its event loop is closed, and, if it is the parent's, in
        a forked child.
        """
        queue = self._queues.get(name)
        if queue is None or queue.ended or queue.forked:
            return None
        if queue.loop.is_closed():
            report = queue.abandon()
            log.warning(
                "queue_replaced",
                queue=name,
                undelivered=len(report.undelivered),
                way_out="await shutdown_all before the event loop ends",
            )
            return None
        return queue

    def names(self) -> list[str]:
        """The names of all queues, in the order in which they were made."""
        return [queue.name for queue in self.queues()]

    def scheduler(self, name: str) -> Scheduler | None:
        """The shared scheduler of that name, or None if no queue has named it yet."""
        return self._schedulers.get(name)

    @locked
    def queues(self) -> list[BatchQueue[Any]]:
        """All queues, in the order in which they were made."""
        return [queue for queue in self._queues.values() if not queue.forked]

    # -- ending --------------------------------------------------------------------------------------------------

    async def shutdown(self, name: str, timeout: float | None = None) -> ShutdownReport:
        """Shut one queue down and forget it; its shared scheduler goes on for the others.

        Raises:
            ConfigError: there is no queue of that name.
            DeadlockError: from a handler of the queue.
        """
        check_timeout(f"queue {name!r}: shutdown", timeout)
        queue = self._queues.get(name)
        if queue is None:
            raise ConfigError(f"queue {name!r}: there is none of that name; the manager has {self.names()}")
        if queue.loop is asyncio.get_running_loop():
            queue.forbid_shutdown_here()
        self._ending.add(queue)
        ending = await end_async([queue], {}, timeout)
        self._forget([queue])
        return ending.reports[queue]

    def _queue_ended(self, queue: BatchQueue[Any]) -> None:
        """A queue is shut down, by whomever, on its loop or in another thread."""
        if queue not in self._ending:
            self._forget([queue])

    @locked
    def _forget(self, queues: Iterable[BatchQueue[Any]]) -> None:
        """Free the names of queues that are shut down."""
        for queue in queues:
            self._ending.discard(queue)
            if self._queues.get(queue.name) is queue:
                del self._queues[queue.name]

    @locked
    def _forget_schedulers(self, schedulers: Iterable[Scheduler]) -> None:
        for scheduler in schedulers:
            if self._schedulers.get(scheduler.name) is scheduler:
                del self._schedulers[scheduler.name]

    @locked
    def _everything(self) -> tuple[list[BatchQueue[Any]], list[Scheduler]]:
        return self.queues(), list(self._schedulers.values())

    async def shutdown_all(self, timeout: float | None = None) -> dict[str, ShutdownReport]:
        """End everything: gates close, queues drain, then the schedulers stop and the registries are cleared.

        A queue that another one feeds (`QueueConfig.feeds`) ends after it; queues that feed each other in a circle,
        and those that have nothing to do with each other, end together. A call that is cancelled lets what has begun
        go on; a further call joins it, and returns the reports of all.

        Args:
            timeout: seconds for the drain of all queues together; when None, each queue has its `drain_timeout`, and
                all of them together have the longest of those.

        Raises:
            DeadlockError: from a handler of one of the queues, or on a shared scheduler's loop.
        """
        check_timeout("shutdown_all", timeout)
        queues, schedulers = self._begin_end()
        if not queues and not schedulers:
            return {}  # as in a forked child, where no loop runs
        for queue in queues:
            if queue.loop is asyncio.get_running_loop():
                queue.forbid_shutdown_here()
        self._ending.update(queues)
        ending = await end_async(queues, self.feeds(queues), timeout)
        await stop_async(schedulers, max(LEAST_STOP, ending.last - time.monotonic()), blocked=ending.stalled)
        return self._finish_end(ending, schedulers)

    def shutdown_all_from_thread(
        self,
        timeout: float | None = None,
        *,
        only: Collection[BatchQueue[Any]] | None = None,
        also_stop: Collection[Scheduler] = (),
    ) -> dict[str, ShutdownReport]:
        """`shutdown_all` for a thread that runs none of the queues' loops, and blocks until it is done.

        Args:
            timeout: as for `shutdown_all`.
            only: the queues to end, and none of the manager's schedulers; all of both when None.
            also_stop: further schedulers to stop when the queues have ended.

        Raises:
            DeadlockError: in a thread that runs one of the loops.
        """
        check_timeout("shutdown_all", timeout)
        queues, schedulers = self._begin_end() if only is None else (list(only), [])
        for queue in queues:
            if queue.on_own_thread():
                raise DeadlockError(
                    f"queue {queue.name!r}: it lives on the event loop of this thread, which would stop here and could "
                    "not drain it; await shutdown_all of the manager"
                )
        self._ending.update(queues)
        ending = end_in_thread(queues, self.feeds(queues), timeout)
        stopping = [*schedulers, *also_stop]
        stop_in_thread(stopping, max(LEAST_STOP, ending.last - time.monotonic()), blocked=ending.stalled)
        return self._finish_end(ending, schedulers, whole=only is None)

    def _begin_end(self) -> tuple[list[BatchQueue[Any]], list[Scheduler]]:
        queues, schedulers = self._everything()
        for scheduler in schedulers:
            if scheduler.is_current:
                raise DeadlockError(
                    f"scheduler {scheduler.name!r}: shutdown_all was called on its own loop, which it would wait for; "
                    "call it from another thread or loop"
                )
        return queues, schedulers

    def _finish_end(
        self, ending: Ending, schedulers: list[Scheduler], *, whole: bool = True
    ) -> dict[str, ShutdownReport]:
        self._forget(ending.reports)
        self._forget_schedulers(schedulers)
        if whole:
            exit_drain.discard(self)
        return {queue.name: report for queue, report in ending.reports.items()}

    def feeds(self, queues: Iterable[BatchQueue[Any]]) -> dict[BatchQueue[Any], list[BatchQueue[Any]]]:
        """Which of the queues each one's handlers produce into, by what the configurations say."""
        named = {queue.name: queue for queue in queues}
        return {queue: [named[name] for name in queue.config.feeds if name in named] for queue in named.values()}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown_all()


_default: BatchQueueManager | None = None
_default_lock = threading.RLock()


class _Default:
    """A forked child gets a default manager of its own."""

    def after_fork(self) -> None:
        global _default, _default_lock
        _default, _default_lock = None, threading.RLock()


_of_this_process = _Default()
forks.watch(_of_this_process)


def default_manager() -> BatchQueueManager:
    """The process-wide manager, made on first use.

    Example:
        >>> default_manager() is default_manager()
        True
    """
    return guarded(_default_lock, _find_or_make_default)


def _find_or_make_default() -> BatchQueueManager:
    global _default  # noqa: PLW0603 - one for the process is what it is
    if _default is None:
        _default = BatchQueueManager()
    return _default
