"""One queue, as threads and other event loops use it.

Handlers stay async and run on the queue's loop; only the callers are elsewhere. A single item costs a lock and an
append; a future, a task or a wake-up of the loop is made for many at once. Only a producer that finds no room does
more: it stands in line, and looks now and then whether the loop is still there. All other calls ask the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from batchqueue_async._native import Door, compiled
from batchqueue_async._support.checks import check_timeout
from batchqueue_async._support.home_loop import running_loop
from batchqueue_async.bridge.credits import Parker, ThreadWaiter
from batchqueue_async.bridge.held_loops import held_loops
from batchqueue_async.bridge.inbox import Offer, Route, ThreadInbox
from batchqueue_async.bridge.watchdog import watchdog
from batchqueue_async.errors import DeadlockError, PartlyAcceptedError, QueueClosedError
from batchqueue_async.queue.adapters import InThread
from batchqueue_async.queue.deadlock import acting_for, caller_here, round_here, waits
from batchqueue_async.queue.intake import RemoteOffer
from batchqueue_async.runtime.ending import end_async, end_in_thread
from batchqueue_async.runtime.loop_calls import (
    AskedTooLongError,
    deadline_of,
    is_over,
    left_of,
    submit,
    wait,
    wait_async,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence

    from batchqueue_async.config import Handler
    from batchqueue_async.queue.batch_queue import BatchQueue
    from batchqueue_async.queue.deadlock import BlockedWait, Needs
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.stats import QueueStats, ShutdownReport
    from batchqueue_async.runtime.loop_calls import LoopCall

T = TypeVar("T")
R = TypeVar("R")

MEETING = 1.0
"""Seconds that a loop has to answer, in the first call and where bytes decide: only one that is blocked needs them."""


class SyncQueue(Door, Generic[T]):
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
        self._inbox: ThreadInbox[T] = ThreadInbox(queue)
        self._loop = queue.loop
        self._by_loop = queue.config.buffer_bytes is not None
        """Whether there are no places to lend, since bytes decide: then every call asks the loop."""
        self._open = False

    def meet(self) -> None:
        """Have the queue's loop collect from here, and give it a moment to lend the first places.

        Only a thread waits for that, so that its first call finds them. Where an event loop runs, on which this would
        be a standstill, the first call waits.
        """
        if not self._open:
            self._meet_queue()
            self._open = True
        if not self._inbox.attached.is_set() and running_loop() is None:
            self._inbox.attached.wait(MEETING)

    def _meet_queue(self) -> None:
        """May be done again, by a signal handler or a further thread."""
        self._queue.attach_inbox(self._inbox)
        if self._queue.on_own_thread():
            self._inbox.attach()
        else:
            try:
                self._loop.call_soon_threadsafe(self._inbox.attach)
            except RuntimeError:
                raise QueueClosedError(f"queue {self.name!r}: its event loop has ended; make a new queue") from None
        watchdog.watch(self._inbox)

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._queue.name

    @property
    def closed(self) -> bool:
        """Whether the queue takes nothing any more."""
        return self._inbox.closed or self._queue.closed

    def __repr__(self) -> str:
        return f"<SyncQueue of {self._queue!r}>"

    # -- producing from a thread ---------------------------------------------------------------------------------

    @compiled("thread_produce")
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
        # it is seen as the wait for the lock ends without it, or after a call, and `release` is past the `try`. So the
        # handler makes no call before `release` either: a second interrupt would leave the lock locked for ever. The
        # place is looked for again after the wake-up, in which a signal handler of this thread may have taken it.
        inbox = self._inbox
        release = inbox.release
        try:
            inbox.acquire()
            share = inbox.only
            if share is None and inbox.by_type is not None:
                share = inbox.by_type.get(type(item))
            if share is not None and share.free and (inbox.waking or inbox.wake_loop()) and share.free:
                share.free -= 1
                share.items.append(item)
                accepted = True
            else:
                accepted = False
        except BaseException:
            try:  # noqa: SIM105 - no further call may stand before the release
                release()
            except RuntimeError:
                pass  # interrupted in the wait for the lock, which another thread has
            raise
        release()
        return accepted or self._produce_late(item, timeout)

    def _produce_asked(self, item: T, index: int, width: int) -> bool:
        """Go on where the compiled hot path has asked for the item's partition, and it has no place for it."""
        return self._produce_late(item, None, (index, width))

    def _produce_late(self, item: T, timeout: float | None, asked: Route | None = None) -> bool:
        self._check_timeout("produce", timeout)
        inbox = self._inbox
        if self._by_loop:
            offer = Offer((item,))
            self._put_by_loop(offer, self._deadline(timeout))
            inbox.refuse(offer.left)
            return offer.complete
        route = inbox.put(item, asked)
        if route is None:
            return True
        offer = Offer((item,), route)
        deadline = self._deadline(timeout)
        if self._meet(deadline):
            inbox.put_many(offer)
        if not offer.complete and inbox.waits and not inbox.closed and not is_over(deadline):
            self._wait_in_line(offer, deadline)
        inbox.refuse(offer.left)
        return offer.complete

    @compiled("thread_produce_many")
    def produce_many(self, items: Iterable[T], timeout: float | None = None) -> int:
        """Put items in, in bulk; under `BLOCKING` wait for room for the rest.

        Returns:
            How many were accepted: always the first ones; less than all when the queue has no room and does not
            wait, or not longer than `block_timeout`, or was closed.

        Raises:
            PartlyAcceptedError: a `TimeoutError` whose `accepted` says how many came in before the timeout.
        """
        inbox = self._inbox
        batch = tuple(items)  # its own, since others may change a list meanwhile
        count = len(batch)
        release = inbox.release
        try:  # as in `produce`
            inbox.acquire()
            share = inbox.only
            enough = share is not None and share.free >= count
            if share is not None and enough and (inbox.waking or inbox.wake_loop()) and share.free >= count:
                share.free -= count
                share.items.extend(batch)
                accepted = True
            else:
                accepted = False
        except BaseException:
            try:  # noqa: SIM105 - no further call may stand before the release
                release()
            except RuntimeError:
                pass  # interrupted in the wait for the lock, which another thread has
            raise
        release()
        if accepted:
            return count
        return self._produce_many_late(Offer(batch), timeout)

    def _produce_rest(self, batch: Sequence[T], done: int) -> int:
        """Go on where the compiled hot path has put some of the items in: the first ones, and no others.

        What another thread has taken out of the list since is in, and counts.
        """
        offer = Offer(batch)
        offer.done = done
        return self._produce_many_late(offer, None)

    def _produce_many_late(self, offer: Offer[T], timeout: float | None) -> int:
        self._check_timeout("produce_many", timeout)
        inbox = self._inbox
        if self._by_loop:
            deadline = self._deadline(timeout)
            self._put_by_loop(offer, deadline)
            return self._count(offer, timeout, deadline)
        inbox.put_many(offer)
        if offer.complete:
            return offer.done
        deadline = self._deadline(timeout)
        if self._meet(deadline):
            inbox.put_many(offer)
        while not offer.complete and inbox.waits and not inbox.closed and not is_over(deadline):
            if not self._wait_in_line(offer, deadline):
                break
            inbox.put_many(offer)
        return self._count(offer, timeout, deadline)

    def _count(self, offer: Offer[T], timeout: float | None, deadline: float | None) -> int:
        """How many of the items came in; an error if that is for the caller's timeout."""
        if offer.complete:
            return offer.done
        self._inbox.refuse(offer.left)
        own = self._queue.config.block_timeout
        if timeout is None or not self._inbox.waits or self._inbox.closed or (own is not None and own < timeout):
            return offer.done
        if not is_over(deadline):
            return offer.done
        raise PartlyAcceptedError(
            f"queue {self.name!r}: produce_many: {offer.done} of {len(offer.items)} items found room within "
            f"{timeout} s; the error's `accepted` says how many; produce the rest later, or wait longer",
            accepted=offer.done,
        )

    def _put_by_loop(self, offer: Offer[T], deadline: float | None) -> None:
        """Have the loop put the items in; what it has not by the deadline, it will not."""
        inbox = self._inbox
        inbox.check()
        if self._queue.on_own_thread():
            offer.done = self._queue.intake.put_now(offer.items)
            if not offer.complete and inbox.waits and not self.closed and not is_over(deadline):
                raise self._deadlock("it came from the thread of the queue's own loop, which it would stop")
            return
        remote = RemoteOffer(offer.items)
        drain = waiting_drain()
        if self.closed:
            return
        asked = self._submit("produce", partial(self._put_remote, remote, deadline), drain)
        remote.when_complete(partial(asked.answer, None))
        try:
            with held_loops.held_by(drain), self._waiting_for_loop(asked, drain):
                wait(asked, _with_grace(deadline))
        except AskedTooLongError:
            pass  # what has come in by then is counted
        except QueueClosedError:
            self._meet_end(asked)
        finally:
            offer.done = remote.withdraw()

    async def _put_by_loop_async(self, offer: Offer[T], deadline: float | None) -> None:
        """The same for a coroutine."""
        self._inbox.check()
        remote = RemoteOffer(offer.items)
        drain = caller_here()
        if self.closed:
            return
        try:
            if asyncio.get_running_loop() is self._loop:
                await self._put_remote(remote, deadline)
                return
            asked = self._submit("produce", partial(self._put_remote, remote, deadline), drain)
            remote.when_complete(partial(asked.answer, None))
            try:
                with contextlib.suppress(AskedTooLongError), self._waiting_for_loop(asked, drain):
                    await wait_async(asked, _with_grace(deadline))
            except QueueClosedError:
                self._meet_end(asked)
        finally:
            offer.done = remote.withdraw()

    async def _put_remote(self, remote: RemoteOffer[T], deadline: float | None) -> None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        await self._queue.intake.put_remote(remote, left)

    def _meet_end(self, asked: LoopCall[Any]) -> None:
        """The loop did not come to the end of a call: because it has ended itself, or because of a circle."""
        self._check_circle("produce", asked)
        if not self._is_lost() and not self.closed:
            raise QueueClosedError(f"queue {self.name!r}: produce was cancelled on its event loop, which is ending")

    def _check_timeout(self, call: str, timeout: float | None) -> None:
        if timeout is not None:
            check_timeout(f"queue {self.name!r}: {call}", timeout)

    def _deadline(self, timeout: float | None) -> float | None:
        own = self._queue.config.block_timeout
        return deadline_of(min((each for each in (timeout, own) if each is not None), default=None))

    def _meet(self, deadline: float | None) -> bool:
        """Let the inbox meet its queue, and make what room there is; whether it makes sense to try once more."""
        inbox = self._inbox
        inbox.check()
        if self._queue.on_own_thread():
            inbox.attach()
            inbox.collect()  # which nobody else would do while the caller runs
            return True
        if inbox.attached.is_set():
            return False
        while not inbox.attached.is_set() and self._loop.is_running() and not is_over(deadline):
            inbox.attached.wait(left_of(deadline))
        return True

    def _wait_in_line(self, offer: Offer[T], deadline: float | None) -> bool:
        """Wait for places for the offer's next items that all go to one partition; whether they all got one."""
        if self._queue.on_own_thread():
            raise self._deadlock("it came from the thread of the queue's own loop, which it would stop")
        inbox = self._inbox
        if inbox.is_held_here():
            # A signal handler or a finalizer, in the midst of a call of this very thread: to wait would be for ever,
            # and to raise would tear that call apart.
            return False
        parker = Parker()
        waiter = ThreadWaiter(parker.wake)
        drain = waiting_drain()
        goal = offer.done + 1
        blocked = None
        try:
            with held_loops.held_by(drain):
                while offer.done < goal and not (is_over(deadline) or self._is_lost()):
                    if waiter.share is None:
                        parker.renew()
                        if not inbox.wait_for(waiter, offer):
                            break
                        goal = offer.done + waiter.permits + waiter.want
                        blocked = blocked or self._begin_wait(waiter, drain)
                    else:
                        parker.sleep(left_of(deadline))
                        inbox.fill(waiter, offer, parker.renew)
                    self._check_wait(waiter, blocked)
            return offer.done >= goal
        finally:
            inbox.leave(waiter)
            if blocked is not None:
                waits.finish(blocked)

    def _begin_wait(self, waiter: ThreadWaiter, drain: DrainTask[Any] | None) -> BlockedWait | None:
        """If a handler call waits here, let that be known to those who look for circles of waits."""
        if drain is None:
            return None
        if waiter.share is not None and [drain] in waiter.needs():
            index = waiter.share.partition.index
            raise self._deadlock(f"partition {index} is drained only after this handler returns")
        return waits.begin(drain, waiter.needs, partial(self._inbox.break_wait, waiter), any_thread=True)

    def _check_wait(self, waiter: ThreadWaiter, blocked: BlockedWait | None) -> None:
        """Raise if the wait could never end; looked at whenever what it waits for may have changed."""
        if blocked is not None and not waiter.permits:
            blocked.break_circles()
        if waiter.stuck:
            raise self._deadlock("the handlers that would make room wait for each other in a circle")

    def _deadlock(self, reason: str) -> DeadlockError:
        return DeadlockError(
            f"queue {self.name!r}: produce would have to wait for room, and could never return: {reason}; "
            "await the queue's own methods, produce with timeout=0, or into another queue"
        )

    def _is_lost(self) -> bool:
        if self._loop.is_closed():
            self._inbox.loop_ended()
            return True
        return False

    # -- producing from another event loop -----------------------------------------------------------------------

    async def produce_async(self, item: T, timeout: float | None = None) -> bool:
        """`produce` for a coroutine on another event loop; cancelling it while it waits leaves no trace."""
        self._check_timeout("produce_async", timeout)
        inbox = self._inbox
        if self._by_loop:
            offer = Offer((item,))
            await self._put_by_loop_async(offer, self._deadline(timeout))
            inbox.refuse(offer.left)
            return offer.complete
        route = inbox.put(item)
        if route is None:
            return True
        if asyncio.get_running_loop() is self._loop:
            return await self._produce_at_home(item, timeout)
        offer = Offer((item,), route)
        await self._put_async(offer, self._deadline(timeout))
        inbox.refuse(offer.left)
        return offer.complete

    async def _produce_at_home(self, item: T, timeout: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout):
                return await self._queue.produce(item)
        except TimeoutError:
            self._inbox.refuse(1)
            return False

    async def produce_many_async(self, items: Iterable[T], timeout: float | None = None) -> int:
        """`produce_many` for a coroutine on another event loop; cancelled while it waits, it has put in a prefix."""
        self._check_timeout("produce_many_async", timeout)
        offer = Offer(tuple(items))
        if self._by_loop:
            deadline = self._deadline(timeout)
            await self._put_by_loop_async(offer, deadline)
            return self._count(offer, timeout, deadline)
        self._inbox.put_many(offer)
        if offer.complete:
            return offer.done
        deadline = self._deadline(timeout)
        await self._put_async(offer, deadline)
        return self._count(offer, timeout, deadline)

    async def _put_async(self, offer: Offer[T], deadline: float | None) -> None:
        """Put the offer's items in, waiting for room as long as `deadline` allows."""
        inbox = self._inbox
        await self._meet_async(deadline)
        while True:
            inbox.put_many(offer)
            if offer.complete or not inbox.waits or inbox.closed or is_over(deadline):
                return
            if not await self._wait_in_line_async(offer, deadline):
                return

    async def _meet_async(self, deadline: float | None) -> None:
        self._inbox.check()
        if self._inbox.attached.is_set() or not self._loop.is_running():
            return
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(AskedTooLongError, QueueClosedError):
            await wait_async(self._submit("produce", lambda: as_coroutine(self._inbox.attach), None), left)

    async def _wait_in_line_async(self, offer: Offer[T], deadline: float | None) -> bool:
        inbox = self._inbox
        wakened = asyncio.Event()
        waiter = ThreadWaiter(partial(_wake_other_loop, asyncio.get_running_loop(), wakened))
        # What a task that a handler started waits for, its handler need not wait for.
        drain = caller_here()
        goal = offer.done + 1
        blocked = None
        try:
            while offer.done < goal and not (is_over(deadline) or self._is_lost()):
                if waiter.share is None:
                    if not inbox.wait_for(waiter, offer):
                        break
                    goal = offer.done + waiter.permits + waiter.want
                    blocked = blocked or self._begin_wait(waiter, drain)
                else:
                    if not waiter.permits:
                        await _first(wakened, left_of(deadline))
                    inbox.fill(waiter, offer, wakened.clear)
                self._check_wait(waiter, blocked)
            return offer.done >= goal
        finally:
            inbox.leave(waiter)
            if blocked is not None:
                waits.finish(blocked)

    # -- everything else, on the queue's loop --------------------------------------------------------------------

    def deliver(self, items: Iterable[T], timeout: float | None = None) -> None:
        """Put items in and return when all were handled; see `BatchQueue.deliver`."""
        self._ask("deliver", partial(self._queue.deliver, list(items)), timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything accepted before the call has an outcome; see `BatchQueue.flush`."""
        self._ask("flush", self._queue.flush, timeout)

    def add_handler(
        self,
        type: type,  # noqa: A002 - as BatchQueue
        handler: Handler[Any],
        weight: float = 1.0,
        timeout: float | None = None,
        *,
        max_batch: int | None = None,
        linger: float | None = None,
        handler_timeout: float | None = None,
    ) -> None:
        """Let an async handler take the items of a type; see `BatchQueue.add_handler`.

        `timeout` is that of this call; that of the handler's calls is `handler_timeout` here.
        """
        add = partial(self._add_handler, type, handler, weight, max_batch, linger, handler_timeout)
        self._ask("add_handler", lambda: as_coroutine(add), timeout)

    def stats(self, timeout: float | None = None) -> QueueStats:
        """A snapshot of the queue's counters, with the `loop_lag` that the bridge sees."""
        self._check_timeout("stats", timeout)
        if self._queue.ended:
            return self._last_stats()
        return self._with_lag(self._ask("stats", lambda: as_coroutine(self._queue.stats), timeout))

    def peek(self) -> QueueStats:
        """A snapshot of the queue's counters without waiting for its loop; see `BatchQueue.peek`."""
        return self._queue.peek()

    def shutdown(self, timeout: float | None = None) -> ShutdownReport:
        """Shut the queue down; `timeout` is the deadline of its final drain; see `BatchQueue.shutdown`."""
        self._check_call("shutdown", timeout)
        self._forbid_shutdown_here()
        return end_in_thread([self._queue], {}, timeout).reports[self._queue]

    async def deliver_async(self, items: Iterable[T], timeout: float | None = None) -> None:
        """`deliver` for a coroutine on another event loop."""
        await self._ask_async("deliver", partial(self._queue.deliver, list(items)), timeout)

    async def flush_async(self, timeout: float | None = None) -> None:
        """`flush` for a coroutine on another event loop."""
        await self._ask_async("flush", self._queue.flush, timeout)

    def _add_handler(self, kind: type[Any], handler: Handler[Any], *options: Any) -> None:
        self._queue.add_handler(kind, cast("Any", handler), *options)

    async def add_handler_async(
        self,
        type: type,  # noqa: A002 - as BatchQueue
        handler: Handler[Any],
        weight: float = 1.0,
        timeout: float | None = None,
        *,
        max_batch: int | None = None,
        linger: float | None = None,
        handler_timeout: float | None = None,
    ) -> None:
        """`add_handler` for a coroutine on another event loop."""
        add = partial(self._add_handler, type, handler, weight, max_batch, linger, handler_timeout)
        await self._ask_async("add_handler", lambda: as_coroutine(add), timeout)

    async def stats_async(self, timeout: float | None = None) -> QueueStats:
        """`stats` for a coroutine on another event loop."""
        self._check_timeout("stats", timeout)
        if self._queue.ended:
            return self._last_stats()
        return self._with_lag(await self._ask_async("stats", lambda: as_coroutine(self._queue.stats), timeout))

    async def shutdown_async(self, timeout: float | None = None) -> ShutdownReport:
        """`shutdown` for a coroutine on another event loop."""
        self._inbox.check()
        self._check_timeout("shutdown", timeout)
        self._forbid_shutdown_here()
        if asyncio.get_running_loop() is self._loop:
            return await self._queue.shutdown(timeout)
        return (await end_async([self._queue], {}, timeout)).reports[self._queue]

    def _forbid_shutdown_here(self) -> None:
        if self._queue.owns(waiting_drain()):
            raise DeadlockError(
                f"queue {self.name!r}: shutdown was called from one of its own handlers, which it would wait for; "
                "let the handler return, and shut down from outside"
            )

    def _last_stats(self) -> QueueStats:
        self._inbox.hand_in_counts()
        return self._with_lag(self._queue.stats())

    def _with_lag(self, stats: QueueStats) -> QueueStats:
        return dataclasses.replace(stats, loop_lag=watchdog.lag(self._loop))

    def _check_call(self, call: str, timeout: float | None) -> None:
        """Refuse what could not work, before anything is begun."""
        self._inbox.check()
        self._check_timeout(call, timeout)
        if self._queue.on_own_thread():
            raise DeadlockError(
                f"queue {self.name!r}: {call} was called on the thread of the queue's own loop, which it would stop; "
                "await the queue's own methods there"
            )

    def _ask(self, call: str, make: Callable[[], Coroutine[Any, Any, R]], timeout: float | None) -> R:
        self._check_call(call, timeout)
        drain = waiting_drain()
        asked = self._submit(call, make, drain)
        try:
            with held_loops.held_by(drain), self._waiting_for_loop(asked, drain):
                return wait(asked, timeout)
        except AskedTooLongError:
            raise self._too_late(call, timeout) from None
        except QueueClosedError:
            self._check_circle(call, asked)
            raise

    async def _ask_async(self, call: str, make: Callable[[], Coroutine[Any, Any, R]], timeout: float | None) -> R:
        self._inbox.check()
        self._check_timeout(call, timeout)
        if asyncio.get_running_loop() is self._loop:
            async with asyncio.timeout(timeout):
                return await make()
        drain = caller_here()
        asked = self._submit(call, make, drain)
        try:
            with self._waiting_for_loop(asked, drain):
                return await wait_async(asked, timeout)
        except AskedTooLongError:
            raise self._too_late(call, timeout) from None
        except QueueClosedError:
            self._check_circle(call, asked)
            raise

    def _submit(
        self, call: str, make: Callable[[], Coroutine[Any, Any, R]], drain: DrainTask[Any] | None
    ) -> LoopCall[R]:
        """Ask the loop; if a handler waits here, what it waits for there is its own wait."""
        round_ = None if drain is None else drain.round

        async def act_for_handler() -> R:
            if round_ is None:
                return await make()
            with acting_for(round_):
                return await make()

        if self._loop.is_running():
            try:
                return submit(self._loop, act_for_handler if round_ is not None else make)
            except RuntimeError:
                pass  # the loop closed between the two lines
        raise QueueClosedError(f"queue {self.name!r}: {call}: its event loop does not run any more; make a new queue")

    @contextlib.contextmanager
    def _waiting_for_loop(self, asked: LoopCall[Any], drain: DrainTask[Any] | None) -> Generator[None]:
        """Let it be known that a handler waits for what it asked of the loop, and needs whoever holds that up."""
        if drain is None:
            yield
            return

        def needs() -> Needs:
            return [] if asked.done() else held_loops.needs(self._loop)

        blocked = waits.begin(drain, needs, asked.break_off, any_thread=True)
        try:
            blocked.break_circles()
            yield
        finally:
            waits.finish(blocked)

    def _check_circle(self, call: str, asked: LoopCall[Any]) -> None:
        if asked.broken_off:
            raise DeadlockError(
                f"queue {self.name!r}: {call} waits for an event loop that stands still, because a handler on it waits "
                "for the caller; in coroutines await the calls that end in _async, which hold no loop up"
            ) from None

    def _too_late(self, call: str, timeout: float | None) -> TimeoutError:
        lag = watchdog.lag(self._loop)
        suspect = " ".join(f"{name}={value}" for name, value in watchdog.suspect(self._loop).items())
        held = f"its loop has not answered for {lag:.1f} s ({suspect})" if lag > 1 else "its handlers are not done"
        return TimeoutError(f"queue {self.name!r}: {call} took longer than {timeout} s: {held}; wait longer")


def _with_grace(deadline: float | None) -> float | None:
    """How long to wait for a loop that is to end a call by itself at the deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic()) + MEETING


async def as_coroutine(function: Callable[..., R], *arguments: Any) -> R:
    """Call a function where a coroutine is wanted."""
    return function(*arguments)


def waiting_drain() -> DrainTask[Any] | None:
    """The drain task whose handler call waits if the code here does, in a coroutine or in a thread."""
    drain = caller_here()
    round_ = round_here()
    if drain is not None or round_ is None or running_loop() is not None:
        return drain
    # The thread of an `in_thread` handler is its drain task's call: whoever waits for that waits for this.
    entry = round_.entry_here()
    return round_.drain if entry is not None and isinstance(entry.handler, InThread) else None


def _wake_other_loop(loop: asyncio.AbstractEventLoop, wakened: asyncio.Event) -> bool:
    try:
        loop.call_soon_threadsafe(wakened.set)
    except RuntimeError:
        return False  # closed under a producer that nobody cancelled
    return True


async def _first(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, `seconds` at the most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
