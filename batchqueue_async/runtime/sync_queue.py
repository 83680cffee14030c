"""One queue, as threads and other event loops use it.

Handlers stay async and run on the queue's loop; only the callers are elsewhere. A single item costs a lock and an
append; a future, a task or a wake-up of the loop is made for many at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async.errors import (
    DeadlockError,
    PartlyAcceptedError,
    QueueClosedError,
)
from batchqueue_async.queue.batch_queue import BatchQueue
from batchqueue_async.queue.closing import CANCEL_GRACE
from batchqueue_async.runtime.door import Door
from batchqueue_async.runtime.manager import LOOP_GRACE
from batchqueue_async.runtime.watchdog import watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from batchqueue_async.config import Handler
    from batchqueue_async.queue.stats import QueueStats, ShutdownReport
    from batchqueue_async.runtime.door import Gate, Ticket

T = TypeVar("T")
R = TypeVar("R")

ATTACH_TIMEOUT = 10.0
"""Seconds for a queue's loop to meet its bridge: only a stalled loop takes longer than a moment."""


class SyncQueue(Generic[T]):
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

    def __init__(self, queue: BatchQueue[T]) -> None:
        self._queue = queue
        self._door: Door[T] = Door(queue)
        self._loop = queue.loop
        queue.set_door(self._door)
        if queue.on_own_thread():
            self._door.attach()
        else:
            self._call_soon(self._door.attach)
        watchdog.watch(queue)

    def _call_soon(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            raise QueueClosedError(f"queue {self.name!r}: its event loop has ended; make a new queue") from None

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._queue.name

    @property
    def closed(self) -> bool:
        """Whether the queue takes nothing any more."""
        return self._door.closed or self._queue.closed

    # -- producing from a thread ---------------------------------------------------------------------------------

    def produce(self, item: T, timeout: float | None = None) -> bool:
        """Put an item in; under `BLOCKING` wait for room in this thread, first come, first served.

        Args:
            item: what to put in.
            timeout: seconds to wait for room at the most; None waits, within the queue's `block_timeout`.

        Returns:
            True when the item was accepted. False when there was no room in time, or the queue is closed.

        Raises:
            DeadlockError: the wait could only be ended by the caller itself.
            ForkedError: in a child process that was forked after the bridge was made.
        """
        return self._door.put(item) or self._produce_late(item, timeout)

    def _produce_late(self, item: T, timeout: float | None) -> bool:
        deadline = self._deadline(timeout)
        if not self._may_wait(deadline) and not self._door.put(item):
            self._door.refuse(1)
            return False
        accepted = self._wait_in_line((item,), deadline) == 1 if self._door.waits else self._door.put(item)
        if not accepted:
            self._door.refuse(1)
        return accepted

    def produce_many(self, items: Iterable[T], timeout: float | None = None) -> int:
        """Put items in, in bulk; under `BLOCKING` wait for room for the rest.

        Returns:
            How many were accepted: always the first so many; less than all when the queue has no room and does not
            wait, or was closed.

        Raises:
            PartlyAcceptedError: a `TimeoutError` whose `accepted` says how many came in before the timeout.
        """
        batch = items if isinstance(items, list | tuple) else list(items)
        done = self._door.put_many(batch)
        if done == len(batch):
            return done
        deadline = self._deadline(timeout)
        if not self._door.attached.is_set():
            self._may_wait(deadline)
            done += self._door.put_many(batch[done:])
        while done < len(batch) and self._door.waits and not self._door.closed:
            rest = batch[done:] if self._queue.placement.only is not None else batch[done : done + 1]
            got = self._wait_in_line(rest, deadline)
            done += got
            if got < len(rest):
                break
            done += self._door.put_many(batch[done:])
        if done < len(batch):
            self._door.refuse(len(batch) - done)
            self._raise_if_late(done, len(batch), timeout, deadline)
        return done

    def _raise_if_late(self, done: int, count: int, timeout: float | None, deadline: float | None) -> None:
        if timeout is not None and deadline is not None and time.monotonic() >= deadline and not self._door.closed:
            raise PartlyAcceptedError(
                f"queue {self.name!r}: produce_many: {done} of {count} items found room within {timeout} s; "
                "the error's `accepted` says how many; produce the rest later, or wait longer",
                accepted=done,
            )

    def _deadline(self, timeout: float | None) -> float | None:
        own = self._queue.config.block_timeout
        shortest = min((each for each in (timeout, own) if each is not None), default=None)
        return None if shortest is None else time.monotonic() + shortest

    def _may_wait(self, deadline: float | None) -> bool:
        """Let the door meet its queue, which happens once; whether the call may wait at all."""
        self._door.check()
        if not self._door.attached.is_set() and not self._queue.on_own_thread():
            left = ATTACH_TIMEOUT if deadline is None else min(ATTACH_TIMEOUT, deadline - time.monotonic())
            self._door.attached.wait(max(0.0, left))
        return not self._door.closed and (deadline is None or deadline > time.monotonic())

    def _wait_in_line(self, items: Sequence[T], deadline: float | None) -> int:
        event = threading.Event()
        place = self._door.enlist(items[0], len(items), event.set)
        if place is None:
            return 0
        gate, ticket = place
        done = 0
        try:
            deadlock = self._door.deadlock_here(gate)
            if deadlock is not None:
                raise deadlock
            while done < len(items):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                in_time = event.wait(left)
                event.clear()
                done += self._door.redeem(gate, ticket, items[done:])
                if self._door.closed or (not in_time and done < len(items)):
                    break
            return done
        finally:
            self._leave(gate, ticket)

    def _leave(self, gate: Gate[T], ticket: Ticket) -> None:
        with self._door.lock:
            gate.leave(ticket)

    # -- producing from another event loop -----------------------------------------------------------------------

    async def produce_async(self, item: T, timeout: float | None = None) -> bool:
        """`produce` for a coroutine on another event loop."""
        return self._door.put(item) or await self._produce_late_async(item, timeout)

    async def _produce_late_async(self, item: T, timeout: float | None) -> bool:
        if asyncio.get_running_loop() is self._loop:
            return await self._on_own_loop(self._queue.produce(item), timeout, late=False)
        accepted = await self._put_async((item,), self._deadline(timeout)) == 1
        if not accepted:
            self._door.refuse(1)
        return accepted

    async def produce_many_async(self, items: Iterable[T], timeout: float | None = None) -> int:
        """`produce_many` for a coroutine on another event loop."""
        batch = items if isinstance(items, list | tuple) else list(items)
        done = self._door.put_many(batch)
        if done == len(batch):
            return done
        deadline = self._deadline(timeout)
        done += await self._put_async(batch[done:], deadline)
        if done < len(batch):
            self._door.refuse(len(batch) - done)
            self._raise_if_late(done, len(batch), timeout, deadline)
        return done

    async def _put_async(self, items: Sequence[T], deadline: float | None) -> int:
        """Put items in, waiting for room as long as `deadline` allows; how many came in."""
        loop = asyncio.get_running_loop()
        done = 0
        if not self._door.attached.is_set():
            await asyncio.to_thread(self._may_wait, deadline)
        while done < len(items):
            done += self._door.put_many(items[done:])
            if done == len(items) or not self._door.waits:
                break
            wakened = asyncio.Event()
            rest = items[done:] if self._queue.placement.only is not None else items[done : done + 1]
            place = self._door.enlist(rest[0], len(rest), partial(loop.call_soon_threadsafe, wakened.set))
            if place is None:
                break
            got = await self._redeem_async(*place, rest, deadline, wakened)
            done += got
            if got < len(rest):
                break
        return done

    async def _redeem_async(
        self, gate: Gate[T], ticket: Ticket, items: Sequence[T], deadline: float | None, wakened: asyncio.Event
    ) -> int:
        done = 0
        try:
            while done < len(items):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    async with asyncio.timeout(left):
                        await wakened.wait()
                except TimeoutError:
                    break
                wakened.clear()
                done += self._door.redeem(gate, ticket, items[done:])
                if self._door.closed:
                    break
            return done
        finally:
            self._leave(gate, ticket)

    async def _on_own_loop(self, call: Coroutine[Any, Any, bool], timeout: float | None, *, late: bool) -> bool:
        try:
            async with asyncio.timeout(timeout):
                return await call
        except TimeoutError:
            return late

    # -- everything else, on the queue's loop --------------------------------------------------------------------

    def deliver(self, items: Iterable[T], timeout: float | None = None) -> None:
        """Put items in and return when all were handled; see `BatchQueue.deliver`."""
        self._ask("deliver", lambda: self._queue.deliver(list(items)), timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything accepted before the call has an outcome; see `BatchQueue.flush`."""
        self._ask("flush", self._queue.flush, timeout)

    def add_handler(self, type: type, handler: Handler[Any], weight: float = 1.0, timeout: float | None = None) -> None:  # noqa: A002 - as BatchQueue
        """Let an async handler take the items of a type; see `BatchQueue.add_handler`."""
        kind = type
        self._ask("add_handler", lambda: as_coroutine(self._queue.add_handler, kind, handler, weight), timeout)

    def stats(self, timeout: float | None = None) -> QueueStats:
        """A snapshot of the queue's counters, with the `loop_lag` that the bridge sees."""
        if self._queue.closed and not self._loop.is_running():
            return self._queue.stats()
        return self._with_lag(self._ask("stats", lambda: as_coroutine(self._queue.stats), timeout))

    def shutdown(self, timeout: float | None = None) -> ShutdownReport:
        """Shut the queue down; `timeout` is the deadline of its final drain; see `BatchQueue.shutdown`."""
        return self._ask("shutdown", lambda: self._queue.shutdown(timeout), self._patience(timeout))

    async def deliver_async(self, items: Iterable[T], timeout: float | None = None) -> None:
        """`deliver` for a coroutine on another event loop."""
        await self._ask_async("deliver", lambda: self._queue.deliver(list(items)), timeout)

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
        return self._with_lag(await self._ask_async("stats", lambda: as_coroutine(self._queue.stats), timeout))

    async def shutdown_async(self, timeout: float | None = None) -> ShutdownReport:
        """`shutdown` for a coroutine on another event loop."""
        return await self._ask_async("shutdown", lambda: self._queue.shutdown(timeout), self._patience(timeout))

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
        future = self._start(call, make)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise  # the call's own TimeoutError
            future.cancel()
            raise self._too_late(call, timeout) from None

    async def _ask_async(self, call: str, make: Callable[[], Coroutine[Any, Any, R]], timeout: float | None) -> R:
        self._door.check()
        if asyncio.get_running_loop() is self._loop:
            async with asyncio.timeout(timeout):
                return await make()
        future = self._start(call, make)
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._too_late(call, timeout) from None

    def _start(self, call: str, make: Callable[[], Coroutine[Any, Any, R]]) -> concurrent.futures.Future[R]:
        coroutine = make()
        if self._loop.is_running():
            try:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except RuntimeError:
                pass  # the loop closed between the two lines
        coroutine.close()
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


BatchQueue.make_bridge = SyncQueue
