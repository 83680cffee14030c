"""A background event loop for programs that have threads and no loop: `SyncBridge`.

Handlers stay async and run on the bridge's loop; only the callers are elsewhere, and use each queue by its `SyncQueue`.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from batchqueue_async._support import forks
from batchqueue_async._support.checks import check_timeout
from batchqueue_async._support.locked import guarded, locked
from batchqueue_async._support.registry import everything
from batchqueue_async.bridge.stats import BridgeStats
from batchqueue_async.bridge.sync_queue import SyncQueue, as_coroutine
from batchqueue_async.errors import ConfigError, DeadlockError, ForkedError, QueueClosedError
from batchqueue_async.policies import WorkerPolicy
from batchqueue_async.runtime.at_exit import exit_drain
from batchqueue_async.runtime.loop_calls import AskedTooLongError, wait
from batchqueue_async.runtime.manager import BatchQueueManager
from batchqueue_async.runtime.scheduler import Scheduler

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
        # It can be taken again by its holder: a signal handler may close the bridge that its thread is starting.
        self._lock = threading.RLock()
        self._home: Scheduler | None = None
        self._closed = False
        self._forked = False
        forks.watch(self)
        self.name = f"bridge-{next(_bridge_numbers)}"
        everything.add("bridge", self)

    @property
    def manager(self) -> BatchQueueManager:
        """The manager that knows the bridge's queues."""
        return self._manager

    def peek(self) -> BridgeStats:
        """What it is doing, from any thread and without waiting."""
        home = self._home
        return BridgeStats(
            name=self.name,
            running=home is not None and home.running,
            closed=self._closed,
            queues=tuple(self._manager.names()),
        )

    def after_fork(self) -> None:
        """In a forked child: a lock that another thread held would stay locked."""
        self._lock = threading.RLock()
        self._forked = True

    def _check(self) -> None:
        if self._forked:
            raise ForkedError(
                f"{self.name} was made before this process was forked, and its loop's thread did not come along; "
                "make a new SyncBridge in the child"
            )
        if self._closed:
            raise QueueClosedError(f"{self.name} is closed; make a new SyncBridge")

    def _scheduler(self) -> Scheduler:
        self._check()  # in a forked child the lock may be another thread's
        return guarded(self._lock, self._checked_start)

    def _checked_start(self) -> Scheduler:
        self._check()
        return self._start()

    @locked
    def _begin_close(self) -> Scheduler | None:
        home = self._home
        if home is not None and home.is_current:
            raise DeadlockError(
                f"{self.name}: close was called on the bridge's own thread, which it would end; close it elsewhere"
            )
        self._closed = True
        return home

    def _start(self) -> Scheduler:
        if self._home is None or not self._home.running:
            self._home = Scheduler(self.name, WorkerPolicy.io_bound())
            exit_drain.add(self._manager)
        return self._home

    def get_or_create(
        self, name: str, config: QueueConfig[T] | None = None, timeout: float | None = None
    ) -> SyncQueue[T]:
        """The queue of that name; made on the bridge's loop, or on the scheduler that `config` names."""
        self._check()
        check_timeout(f"{self.name}: get_or_create", timeout)
        shared = config is not None and config.scheduler is not None
        if shared or self._manager.find(name) is not None:
            return self._manager.get_or_create(name, config).bridge()
        made = self.call(as_coroutine, self._make, name, config, timeout=timeout)
        return cast("SyncQueue[T]", made)

    def _make(self, name: str, config: QueueConfig[Any] | None) -> SyncQueue[Any]:
        return self._manager.get_or_create(name, config).bridge()

    def queue(self, name: str) -> SyncQueue[Any]:
        """The queue of that name.

        Raises:
            ConfigError: there is none.
        """
        self._check()
        queue = self._manager.get(name)
        if queue is None:
            raise ConfigError(f"queue {name!r}: there is none of that name; the manager has {self._manager.names()}")
        return queue.bridge()

    def call(self, function: Callable[..., Coroutine[Any, Any, R]], *arguments: Any, timeout: float | None = None) -> R:
        """Run a coroutine function on the bridge's loop and return its result.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; it was cancelled.
        """
        check_timeout(f"{self.name}: call", timeout)
        home = self._scheduler()
        if home.is_current:
            raise DeadlockError(
                f"{self.name}: call was called on the bridge's own thread, which it would stop; await it"
            )
        try:
            return wait(home.submit(function, *arguments), timeout)
        except AskedTooLongError:
            called = getattr(function, "__qualname__", function)
            raise TimeoutError(f"{self.name}: call: {called} took longer than {timeout} s; wait longer") from None

    def close(self, timeout: float | None = None) -> dict[str, ShutdownReport]:
        """Shut down the queues on the bridge's loop (all queues, if the manager is its own), and end the loop.

        A queue that another one feeds ends after it, as in `BatchQueueManager.shutdown_all`. The call returns within
        the longest `drain_timeout`, or within `timeout` seconds, and a moment: what a handler that does not end keeps
        from being handled is in the reports. A further call has nothing to do; in a forked child there is nothing to
        close.

        Raises:
            DeadlockError: on the bridge's own thread, which it would end, or on that of another queue of its manager.
        """
        check_timeout(f"{self.name}: close", timeout)
        if self._forked:
            return {}
        home = self._begin_close()
        everything.remove(self)
        mine = [queue for queue in self._manager.queues() if home is not None and queue.loop is home.loop]
        return self._manager.shutdown_all_from_thread(
            timeout, only=None if self._own_manager else mine, also_stop=[] if home is None else [home]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
