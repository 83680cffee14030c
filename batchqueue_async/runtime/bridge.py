"""A background event loop for programs that have threads and no loop: `SyncBridge`.

Handlers stay async and run on the bridge's loop; only the callers are elsewhere, and use each queue by its `SyncQueue`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from batchqueue_async.errors import ConfigError, DeadlockError, QueueClosedError
from batchqueue_async.policies import WorkerPolicy
from batchqueue_async.runtime.manager import BatchQueueManager
from batchqueue_async.runtime.scheduler import Scheduler
from batchqueue_async.runtime.sync_queue import SyncQueue, as_coroutine

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from batchqueue_async.config import QueueConfig
    from batchqueue_async.queue.stats import ShutdownReport

T = TypeVar("T")
R = TypeVar("R")

_bridge_numbers = itertools.count(1)


class SyncBridge:
    """An event loop in a background thread, with queues for programs that have threads and no loop.

    The thread starts with the first call that needs it. Leave the `with` block, or call `close`, to handle what is
    left; a program that exits without has the same done for it, within each queue's `drain_timeout`.

    Args:
        manager: a manager whose queues to serve; without one the bridge has its own.

    Example:
        >>> import batchqueue_async as bq
        >>> async def handle(batch: list[str]) -> None:
        ...     print(len(batch), "lines")
        >>> with bq.SyncBridge() as bridge:
        ...     lines = bridge.get_or_create("lines", bq.QueueConfig(consumer=handle))
        ...     for line in ("a", "b", "c"):
        ...         lines.produce(line)
        ...     lines.flush(timeout=5)
        True
        True
        True
        3 lines
    """

    def __init__(self, manager: BatchQueueManager | None = None) -> None:
        self._own_manager = manager is None
        self._manager = manager or BatchQueueManager()
        self._lock = threading.Lock()
        self._home: Scheduler | None = None
        self._closed = False
        self.name = f"bridge-{next(_bridge_numbers)}"

    @property
    def manager(self) -> BatchQueueManager:
        """The manager that knows the bridge's queues."""
        return self._manager

    def _scheduler(self) -> Scheduler:
        with self._lock:
            if self._closed:
                raise QueueClosedError(f"{self.name} is closed; make a new SyncBridge")
            if self._home is None:
                self._home = Scheduler(self.name, WorkerPolicy.io_bound())
                self._manager.close_at_exit()
            self._home.check()
            return self._home

    def get_or_create(
        self, name: str, config: QueueConfig[T] | None = None, timeout: float | None = None
    ) -> SyncQueue[T]:
        """The queue of that name; made on the bridge's loop, or on the scheduler that `config` names."""
        existing = self._manager.get(name)
        if existing is not None or (config is not None and config.scheduler is not None):
            return self._manager.get_or_create(name, config).bridge()
        queue = self.call(as_coroutine, self._manager.get_or_create, name, config, timeout=timeout)
        return cast("SyncQueue[T]", queue.bridge())

    def queue(self, name: str) -> SyncQueue[Any]:
        """The queue of that name.

        Raises:
            ConfigError: there is none.
        """
        queue = self._manager.get(name)
        if queue is None:
            raise ConfigError(f"queue {name!r}: there is none of that name; the manager has {self._manager.names()}")
        return queue.bridge()

    def call(self, function: Callable[..., Coroutine[Any, Any, R]], *arguments: Any, timeout: float | None = None) -> R:
        """Run a coroutine function on the bridge's loop and return its result.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; it was cancelled.
        """
        home = self._scheduler()
        if home.is_current:
            raise DeadlockError(
                f"{self.name}: call was called on the bridge's own thread, which it would stop; await it"
            )
        future = home.submit(function, *arguments)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            called = getattr(function, "__qualname__", function)
            raise TimeoutError(f"{self.name}: call: {called} took longer than {timeout} s; wait longer") from None

    def close(self, timeout: float | None = None) -> dict[str, ShutdownReport]:
        """Shut down the queues on the bridge's loop (all queues, if the manager is its own), and end the loop."""
        with self._lock:
            if self._closed:
                return {}
            self._closed = True
            home = self._home
        if home is None:
            return {}
        home.check()
        reports = home.submit(self._end_queues, home, timeout).result()
        home.stop()
        if self._own_manager:
            self._manager.closed_by_itself()
        return reports

    async def _end_queues(self, home: Scheduler, timeout: float | None) -> dict[str, ShutdownReport]:
        if self._own_manager:
            return await self._manager.shutdown_all(timeout)
        mine = [queue for queue in self._manager.queues() if queue.loop is home.loop]
        reports = await asyncio.gather(*(self._manager.shutdown(queue.name, timeout) for queue in mine))
        return {report.name: report for report in reports}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
