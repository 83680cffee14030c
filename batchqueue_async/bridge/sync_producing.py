"""Producing from threads and from other event loops: the hot half of a `SyncQueue`.

A single item costs a lock and an append; a future, a task or a wake-up of the loop is made for many at once. Only a
producer that finds no room does more: it stands in line, and looks now and then whether the loop is still there.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async.bridge.credits import Doze, Ticket
from batchqueue_async.bridge.inbox import Door
from batchqueue_async.bridge.watchdog import watchdog
from batchqueue_async.errors import DeadlockError, PartlyAcceptedError, QueueClosedError
from batchqueue_async.queue.adapters import InThread
from batchqueue_async.queue.deadlock import caller_here
from batchqueue_async.queue.round import round_here
from batchqueue_async.runtime.loop_calls import deadline_of, is_over, left_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchqueue_async.queue.batch_queue import BatchQueue
    from batchqueue_async.queue.drain import DrainTask

T = TypeVar("T")

MEETING = 1.0
"""Seconds that a new bridge waits for its queue's loop: only a loop that is blocked takes longer than a moment."""


class SyncProducing(Generic[T]):
    """The producers' side of a `SyncQueue`."""

    def __init__(self, queue: BatchQueue[T]) -> None:
        self._queue = queue
        self._door: Door[T] = Door(queue)
        self._loop = queue.loop
        queue.attach_inbox(self._door)
        if queue.on_own_thread():
            self._door.attach()
        else:
            try:
                self._loop.call_soon_threadsafe(self._door.attach)
            except RuntimeError:
                raise QueueClosedError(f"queue {self.name!r}: its event loop has ended; make a new queue") from None
        watchdog.watch(self._door)

    def meet(self) -> None:
        """Give the queue's loop a moment to lend the first places, so that the first call finds them."""
        if not self._door.attached.is_set() and not self._queue.on_own_thread():
            self._door.attached.wait(MEETING)

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
        # Written out here, as in the queue's own `produce`: a further call would cost as much as the rest of it, and
        # `with` twice as much as the two calls that it makes. An interrupt comes between no two steps that matter:
        # it is seen as the wait for the lock ends without it, or after a call, and `release` is past the `try`.
        door = self._door
        release = door.release
        try:
            door.acquire()
            gate = door.only
            if gate is None and door.by_type is not None:
                gate = door.by_type.get(type(item))
            if gate is not None and gate.credits:
                if not door.waking:
                    door.wake_loop()
                gate.credits -= 1
                gate.inbox.append(item)
                accepted = True
            else:
                accepted = False
        except BaseException:
            door.let_go()
            raise
        release()
        return accepted or self._produce_late(item, timeout)

    def _produce_late(self, item: T, timeout: float | None) -> bool:
        door = self._door
        if door.put(item):
            return True
        deadline = self._deadline(timeout)
        accepted = self._meet(deadline) and door.put(item)
        if not accepted and door.waits and not door.closed and not is_over(deadline):
            accepted = self._wait_in_line((item,), deadline) == 1
        if not accepted:
            door.refuse(1)
        return accepted

    def produce_many(self, items: Iterable[T], timeout: float | None = None) -> int:
        """Put items in, in bulk; under `BLOCKING` wait for room for the rest.

        Returns:
            How many were accepted: always the first so many; less than all when the queue has no room and does not
            wait, or not longer than `block_timeout`, or was closed.

        Raises:
            PartlyAcceptedError: a `TimeoutError` whose `accepted` says how many came in before the timeout.
        """
        door = self._door
        batch: list[T] = items if isinstance(items, list) else list(items)
        count = len(batch)
        with door.lock:
            gate = door.only
            if gate is not None and gate.credits >= count:
                if not door.waking:
                    door.wake_loop()
                gate.credits -= count
                gate.inbox.extend(batch)
                return count
        return self._produce_many_late(batch, timeout)

    def _produce_many_late(self, batch: list[T], timeout: float | None) -> int:
        door = self._door
        done = door.put_many(batch)
        if done == len(batch):
            return done
        deadline = self._deadline(timeout)
        if self._meet(deadline):
            done += door.put_many(batch[done:])
        while done < len(batch) and door.waits and not door.closed and not is_over(deadline):
            rest = batch[done : done + self._step(len(batch))]
            got = self._wait_in_line(rest, deadline)
            done += got
            if got < len(rest):
                break
            done += door.put_many(batch[done:])
        return self._count(done, len(batch), timeout, deadline)

    def _step(self, most: int) -> int:
        """How many items can wait in line together: those that go to one partition for sure."""
        return most if self._queue.router.only is not None else 1

    def _count(self, done: int, count: int, timeout: float | None, deadline: float | None) -> int:
        if done == count:
            return done
        self._door.refuse(count - done)
        own = self._queue.config.block_timeout
        if timeout is None or not self._door.waits or self._door.closed or (own is not None and own < timeout):
            return done
        if not is_over(deadline):
            return done
        raise PartlyAcceptedError(
            f"queue {self.name!r}: produce_many: {done} of {count} items found room within {timeout} s; "
            "the error's `accepted` says how many; produce the rest later, or wait longer",
            accepted=done,
        )

    def _deadline(self, timeout: float | None) -> float | None:
        own = self._queue.config.block_timeout
        return deadline_of(min((each for each in (timeout, own) if each is not None), default=None))

    def _meet(self, deadline: float | None) -> bool:
        """Let the door meet its queue, and make what room there is; whether it makes sense to try once more."""
        door = self._door
        door.check()
        if self._queue.on_own_thread():
            door.attach()
            door.collect()  # which nobody else would do while the caller runs
            return True
        if door.attached.is_set():
            return False
        while not door.attached.is_set() and self._loop.is_running() and not is_over(deadline):
            door.attached.wait(left_of(deadline))
        return True

    def _wait_in_line(self, items: list[T] | tuple[T, ...], deadline: float | None) -> int:
        """Wait for places for items that all go to one partition; how many got one."""
        if self._queue.on_own_thread():
            raise self._deadlock("it came from the thread of the queue's own loop, which it would stop")
        door = self._door
        if door.is_held_here():
            # A signal handler or a finalizer, in the midst of a call of this very thread: to wait would be for ever,
            # and to raise would tear that call apart.
            return 0
        doze = Doze()
        ticket = Ticket(doze.wake)
        drain = drain_here()
        # The thread of an `in_thread` handler is its drain task's call: whoever waits for that waits for this.
        ticket.drain = drain if isinstance(handler_of(drain), InThread) else None
        done = 0
        try:
            while done < len(items) and not (is_over(deadline) or self._is_lost()):
                if ticket.gate is None:
                    doze.renew()
                    if not door.enlist(ticket, items[done], len(items) - done):
                        break
                    self._forbid_own_wait(ticket, drain)
                else:
                    doze.sleep(left_of(deadline))
                    with door.lock:
                        doze.renew()
                        done += door.redeem(ticket, items[done:])
                if ticket.stuck:
                    raise self._deadlock("the handlers that would make room wait for each other in a circle")
            return done
        finally:
            door.leave(ticket)

    def _forbid_own_wait(self, ticket: Ticket, drain: DrainTask[Any] | None) -> None:
        gate = ticket.gate
        if drain is not None and gate is not None and not ticket.permits and gate.partition.owner is drain:
            raise self._deadlock(f"partition {gate.partition.index} is drained only after this handler returns")

    def _deadlock(self, reason: str) -> DeadlockError:
        return DeadlockError(
            f"queue {self.name!r}: produce would have to wait for room, and could never return: {reason}; "
            "await the queue's own methods, produce with timeout=0, or into another queue"
        )

    def _is_lost(self) -> bool:
        if self._loop.is_closed():
            self._door.loop_ended()
            return True
        return False

    # -- producing from another event loop -----------------------------------------------------------------------

    async def produce_async(self, item: T, timeout: float | None = None) -> bool:
        """`produce` for a coroutine on another event loop; cancelling it while it waits leaves no trace."""
        door = self._door
        if door.put(item):
            return True
        if asyncio.get_running_loop() is self._loop:
            return await self._produce_at_home(item, timeout)
        deadline = self._deadline(timeout)
        accepted = await self._put_async((item,), deadline) == 1
        if not accepted:
            door.refuse(1)
        return accepted

    async def _produce_at_home(self, item: T, timeout: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout):
                return await self._queue.produce(item)
        except TimeoutError:
            self._door.refuse(1)
            return False

    async def produce_many_async(self, items: Iterable[T], timeout: float | None = None) -> int:
        """`produce_many` for a coroutine on another event loop; cancelled while it waits, it has put in a prefix."""
        batch = items if isinstance(items, list | tuple) else list(items)
        done = self._door.put_many(batch)
        if done == len(batch):
            return done
        deadline = self._deadline(timeout)
        done += await self._put_async(batch[done:], deadline)
        return self._count(done, len(batch), timeout, deadline)

    async def _put_async(self, items: list[T] | tuple[T, ...], deadline: float | None) -> int:
        """Put items in, waiting for room as long as `deadline` allows; how many came in."""
        door = self._door
        done = 0
        if not door.attached.is_set():
            await asyncio.to_thread(self._meet, deadline)
        while True:
            done += door.put_many(items[done:])
            if done == len(items) or not door.waits or door.closed or is_over(deadline):
                return done
            rest = items[done : done + self._step(len(items))]
            got = await self._wait_in_line_async(rest, deadline)
            done += got
            if got < len(rest):
                return done

    async def _wait_in_line_async(self, items: list[T] | tuple[T, ...], deadline: float | None) -> int:
        door = self._door
        wakened = asyncio.Event()
        ticket = Ticket(partial(_wake_other_loop, asyncio.get_running_loop(), wakened))
        drain = drain_here()
        # What a task that a handler started waits for, its handler need not wait for.
        ticket.drain = caller_here()
        done = 0
        try:
            while done < len(items) and not (is_over(deadline) or self._is_lost()):
                wakened.clear()
                if ticket.gate is None:
                    if not door.enlist(ticket, items[done], len(items) - done):
                        break
                    self._forbid_own_wait(ticket, drain)
                else:
                    if not ticket.permits:
                        await _first(wakened, left_of(deadline))
                    done += door.redeem(ticket, items[done:])
                if ticket.stuck:
                    raise self._deadlock("the handlers that would make room wait for each other in a circle")
            return done
        finally:
            door.leave(ticket)


def handler_of(drain: DrainTask[Any] | None) -> object:
    """The handler that a drain task is calling."""
    entry = None if drain is None or drain.round is None else drain.round.entry_here()
    return None if entry is None else entry.handler


def drain_here() -> DrainTask[Any] | None:
    """The drain task in whose handler call, or in what it started, this code runs."""
    round_ = round_here()
    return None if round_ is None else round_.drain


def _wake_other_loop(loop: asyncio.AbstractEventLoop, wakened: asyncio.Event) -> bool:
    try:
        loop.call_soon_threadsafe(wakened.set)
    except RuntimeError:
        return False  # closed under a producer that nobody cancelled
    return True


async def _first(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but not longer than so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
