"""One queue, as threads and other event loops use it.

Handlers stay async and run on the queue's loop; only the callers are elsewhere. Producing is in `sync_producing.py`;
here is what is asked of the loop: to deliver, to flush, to add a handler, for numbers, and to shut down.
"""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async.bridge.sync_producing import SyncProducing, drain_here, handler_of
from batchqueue_async.bridge.watchdog import watchdog
from batchqueue_async.errors import DeadlockError, QueueClosedError
from batchqueue_async.queue.adapters import InThread
from batchqueue_async.queue.shutdown import CANCEL_GRACE
from batchqueue_async.runtime.loop_calls import (
    AskedTooLongError,
    answer,
    answer_async,
    start,
)
from batchqueue_async.runtime.manager import LOOP_GRACE

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine, Iterable

    from batchqueue_async.config import Handler
    from batchqueue_async.queue.stats import QueueStats, ShutdownReport

T = TypeVar("T")
R = TypeVar("R")


class SyncQueue(SyncProducing[T], Generic[T]):
    """One queue, as threads use it; the `..._async` twins are for event loops other than the queue's own.

    `produce` says False when its timeout is over; every other call raises `TimeoutError`.

    Example:
        >>> import batchqueue_async as bq
        >>> async def handle(batch: list[int]) -> None:
        ...     print(sum(batch))
        >>> with bq.SyncBridge() as bridge:
        ...     queue = bridge.get_or_create("numbers", bq.QueueConfig(consumer=handle))
        ...     queue.deliver([1, 2, 3], timeout=5)
        6
    """

    # -- everything else, on the queue's loop --------------------------------------------------------------------

    def deliver(self, items: Iterable[T], timeout: float | None = None) -> None:
        """Put items in and return when all were handled; see `BatchQueue.deliver`."""
        self._ask("deliver", partial(self._queue.deliver, list(items)), timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything accepted before the call has an outcome; see `BatchQueue.flush`."""
        self._ask("flush", self._queue.flush, timeout)

    def add_handler(self, type: type, handler: Handler[Any], weight: float = 1.0, timeout: float | None = None) -> None:  # noqa: A002 - as BatchQueue
        """Let an async handler take the items of a type; see `BatchQueue.add_handler`."""
        kind = type
        self._ask("add_handler", lambda: as_coroutine(self._queue.add_handler, kind, handler, weight), timeout)

    def stats(self, timeout: float | None = None) -> QueueStats:
        """A snapshot of the queue's counters, with the `loop_lag` that the bridge sees."""
        if self._queue.ended:
            return self._last_stats()
        return self._with_lag(self._ask("stats", lambda: as_coroutine(self._queue.stats), timeout))

    def peek(self) -> QueueStats:
        """A snapshot of the queue's counters without waiting for its loop; see `BatchQueue.peek`."""
        return self._queue.peek()

    def shutdown(self, timeout: float | None = None) -> ShutdownReport:
        """Shut the queue down; `timeout` is the deadline of its final drain; see `BatchQueue.shutdown`."""
        self._forbid_shutdown_here()
        if self._queue.ended:
            return self._queue.abandon()
        return self._ask("shutdown", lambda: self._queue.shutdown(timeout), self._patience(timeout))

    async def deliver_async(self, items: Iterable[T], timeout: float | None = None) -> None:
        """`deliver` for a coroutine on another event loop."""
        await self._ask_async("deliver", partial(self._queue.deliver, list(items)), timeout)

    async def flush_async(self, timeout: float | None = None) -> None:
        """`flush` for a coroutine on another event loop."""
        await self._ask_async("flush", self._queue.flush, timeout)

    async def add_handler_async(
        self,
        type: type,  # noqa: A002 - as BatchQueue
        handler: Handler[Any],
        weight: float = 1.0,
        timeout: float | None = None,
    ) -> None:
        """`add_handler` for a coroutine on another event loop."""
        kind = type
        await self._ask_async(
            "add_handler", lambda: as_coroutine(self._queue.add_handler, kind, handler, weight), timeout
        )

    async def stats_async(self, timeout: float | None = None) -> QueueStats:
        """`stats` for a coroutine on another event loop."""
        if self._queue.ended:
            return self._last_stats()
        return self._with_lag(await self._ask_async("stats", lambda: as_coroutine(self._queue.stats), timeout))

    async def shutdown_async(self, timeout: float | None = None) -> ShutdownReport:
        """`shutdown` for a coroutine on another event loop."""
        self._forbid_shutdown_here()
        if self._queue.ended:
            return self._queue.abandon()
        return await self._ask_async("shutdown", lambda: self._queue.shutdown(timeout), self._patience(timeout))

    def _forbid_shutdown_here(self) -> None:
        drain = drain_here()
        if drain is not None and isinstance(handler_of(drain), InThread) and self._queue.owns(drain):
            raise DeadlockError(
                f"queue {self.name!r}: shutdown was called from one of its own handlers, which it would wait for; "
                "let the handler return, and shut down from outside"
            )

    def _last_stats(self) -> QueueStats:
        self._door.hand_in_counts()
        return self._with_lag(self._queue.stats())

    def _patience(self, timeout: float | None) -> float:
        drain = self._queue.config.drain_timeout if timeout is None else timeout
        return max(0.0, drain) + CANCEL_GRACE + LOOP_GRACE

    def _with_lag(self, stats: QueueStats) -> QueueStats:
        return dataclasses.replace(stats, loop_lag=watchdog.lag(self._loop))

    def _ask(self, call: str, make: Callable[[], Coroutine[Any, Any, R]], timeout: float | None) -> R:
        self._door.check()
        if self._queue.on_own_thread():
            raise DeadlockError(
                f"queue {self.name!r}: {call} was called on the thread of the queue's own loop, which it would stop; "
                "await the queue's own methods there"
            )
        try:
            return answer(self._start(call, make), self._loop, timeout)
        except AskedTooLongError:
            raise self._too_late(call, timeout) from None

    async def _ask_async(self, call: str, make: Callable[[], Coroutine[Any, Any, R]], timeout: float | None) -> R:
        self._door.check()
        if asyncio.get_running_loop() is self._loop:
            async with asyncio.timeout(timeout):
                return await make()
        try:
            return await answer_async(self._start(call, make), self._loop, timeout)
        except AskedTooLongError:
            raise self._too_late(call, timeout) from None

    def _start(self, call: str, make: Callable[[], Coroutine[Any, Any, R]]) -> concurrent.futures.Future[R]:
        if self._loop.is_running():
            try:
                return start(self._loop, make)
            except RuntimeError:
                pass  # the loop closed between the two lines
        raise QueueClosedError(f"queue {self.name!r}: {call}: its event loop does not run any more; make a new queue")

    def _too_late(self, call: str, timeout: float | None) -> TimeoutError:
        lag = watchdog.lag(self._loop)
        suspect = " ".join(f"{name}={value}" for name, value in watchdog.suspect(self._loop).items())
        held = f"its loop has not answered for {lag:.1f} s ({suspect})" if lag > 1 else "its handlers are not done"
        return TimeoutError(f"queue {self.name!r}: {call} took longer than {timeout} s: {held}; wait longer")

    def __repr__(self) -> str:
        return f"<SyncQueue of {self._queue!r}>"


async def as_coroutine(function: Callable[..., R], *arguments: Any) -> R:
    """Call a function where a coroutine is wanted."""
    return function(*arguments)
