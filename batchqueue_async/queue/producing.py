"""A queue's way in: producing one item or many, with or without waiting, and delivering to the end.

The hot path is written out in `produce` and in `produce_nowait` instead of being shared: a further Python call would
cost as much as the rest of it. It uses a partition's `spare` and `tail` and nothing else; see `buffer.py`.
"""

from __future__ import annotations

import asyncio
import threading
from operator import countOf
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from batchqueue_async.config import BufferStrategy, QueueConfig
from batchqueue_async.errors import DeadlockError, WrongLoopError
from batchqueue_async.policies import RoundRobin
from batchqueue_async.queue.buffer import Lane
from batchqueue_async.queue.drain import Worker, current_round
from batchqueue_async.queue.migration import Transit
from batchqueue_async.queue.partition import Partition
from batchqueue_async.queue.stats import Tally
from batchqueue_async.queue.waits import Wait, break_circle, circle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchqueue_async.queue.batch_queue import Door
    from batchqueue_async.queue.line import Waiter
    from batchqueue_async.queue.router import Place, Placement

T = TypeVar("T")


class ThreadMark(Protocol):
    """The part of a lock that tells whether the calling thread holds it; `threading.Condition` relies on it, too."""

    def _is_owned(self) -> bool: ...


def _running_loop(name: str) -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoopError(
            f"queue {name!r} is made outside a running event loop; make it inside a coroutine, "
            "or give it a scheduler=SharedScheduler(...)"
        ) from None


class Producing(Generic[T]):
    """The producers' side of a `BatchQueue`."""

    name: str
    config: QueueConfig[T]
    _placement: Placement[T]
    _workers: list[Worker[T]]
    # Read by the hot path instead of asking the placement: the only partition, or the places by type.
    _only: Partition[T] | None
    _by_type: dict[type, Place[T]] | None

    def __init__(self, name: str, config: QueueConfig[T], loop: asyncio.AbstractEventLoop | None) -> None:
        config.validate(name)
        self.name = name
        self.config = config
        self._loop = loop or _running_loop(name)
        self._lock = threading.RLock()
        self._here = cast("ThreadMark", self._lock)
        self._closed = False
        self._door: Door | None = None
        self._blocking = config.strategy is BufferStrategy.BLOCKING
        self._tally = Tally()

    def _mark_thread(self) -> None:
        """Remember the loop's thread; called on it.

        The lock is held by that thread for good: asking a lock whether this thread owns it is the cheapest test of
        the thread there is, and it is made for every item.
        """
        self._lock.acquire()

    # -- one item ------------------------------------------------------------------------------------------------

    async def produce(self, item: T) -> bool:
        """Put an item in; under `BLOCKING` wait for room, first come, first served.

        Returns:
            True when the item was accepted: it will be handled, given to `on_error`, or be in the shutdown report.
            False when it was refused: no room (or not within `block_timeout`), dropped, or the queue is closed.

        Raises:
            WrongLoopError: on another thread or loop; use `bridge()` there.
            DeadlockError: from a handler of this queue whose own partition is full.

        Example:
            >>> import asyncio, batchqueue_async as bq
            >>> async def main() -> bool:
            ...     async def handle(batch: list[str]) -> None: ...
            ...     async with bq.BatchQueueManager() as manager:
            ...         return await manager.create("words", bq.QueueConfig(consumer=handle)).produce("hello")
            >>> asyncio.run(main())
            True
        """
        if self._here._is_owned():
            place: Place[T] | None = self._only
            if place is None:
                by_type = self._by_type
                if by_type is None:
                    place = self._placement.place(item)
                else:
                    try:
                        place = by_type[type(item)]
                    except KeyError:
                        place = self._placement.place(item)
            for _ in place.spare:
                place.tail.append(item)
                return True
            return self._offer(place, item) or (self._blocking and await self._produce_in_line(place, item))
        raise self._wrong_loop("produce")

    def produce_nowait(self, item: T) -> bool:
        """Put an item in if that is possible at once; False if it was refused or dropped.

        Raises:
            WrongLoopError: on another thread or loop; use `bridge()` there.
        """
        if self._here._is_owned():
            place: Place[T] | None = self._only
            if place is None:
                by_type = self._by_type
                if by_type is None:
                    place = self._placement.place(item)
                else:
                    try:
                        place = by_type[type(item)]
                    except KeyError:
                        place = self._placement.place(item)
            for _ in place.spare:
                place.tail.append(item)
                return True
            if self._offer(place, item):
                return True
            if self._blocking:
                self._tally.refused += 1
            return False
        raise self._wrong_loop("produce_nowait")

    def _offer(self, place: Place[T], item: T) -> bool:
        """The way in when the fast path is shut; refusals are counted here except under `BLOCKING`."""
        self._check_loop("produce")
        if self._closed:
            if not self._blocking:
                self._tally.refused += 1
            return False
        if place.offer(item):
            return True
        if self._blocking:
            return False
        strategy = self.config.strategy
        if strategy is BufferStrategy.DROP_OLDEST:
            place.evict()
            self._tally.dropped_after += 1
            return place.offer(item)
        if strategy is BufferStrategy.DROP_NEWEST:
            self._tally.dropped_before += 1
        else:
            self._tally.refused += 1
        return False

    async def _produce_in_line(self, place: Place[T], item: T) -> bool:
        if not self._closed and await self._stand_in_line(place.line, (item,), self._block_deadline()):
            return True
        self._tally.refused += 1
        return False

    async def _stand_in_line(
        self, line: Partition[T], items: Sequence[T], deadline: float | None, wait: Wait | None = None
    ) -> int:
        """Wait until all items have got places, in parts if need be; how many did."""
        worker = self._forbid_own_wait(line)
        waiter = line.enlist(len(items), items[0])
        timer = None if deadline is None else self._loop.call_at(deadline, waiter.expire)
        before = None
        if worker is not None:
            before = worker.blocked_on, worker.break_wait
            worker.blocked_on, worker.break_wait = waiter.needs, waiter.break_wait
            waiter.worker = worker
        done = 0
        try:
            while done < len(items) and not waiter.expired:
                await waiter.future
                if waiter.broken:
                    raise self._deadlock(waiter.line)
                if self._closed:
                    break
                done += self._redeem(waiter, items[done : done + waiter.permits], wait)
                if done < len(items):
                    waiter.renew()
                    waiter.line.grant()
                    if worker is not None:
                        break_circle(worker)  # it waited for nobody while it had places; now it does again
            return done
        finally:
            if worker is not None and before is not None:
                worker.blocked_on, worker.break_wait = before
            if timer is not None:
                timer.cancel()
            waiter.line.leave(waiter)

    def _redeem(self, waiter: Waiter, items: Sequence[T], wait: Wait | None) -> int:
        """Put items into the places that the line granted; how many."""
        if items:
            place = self._placement.place_in_line(items[0], waiter.line)
            if wait is not None:
                place.line.order()
            place.redeem(waiter, items)
            if wait is not None:
                place.watch(wait, len(items))
        return len(items)

    def _block_deadline(self) -> float | None:
        timeout = self.config.block_timeout
        return None if timeout is None else self._loop.time() + timeout

    # -- many items ----------------------------------------------------------------------------------------------

    async def produce_many(self, items: Iterable[T]) -> int:
        """Put items in, in bulk when there is room for all; under `BLOCKING` wait for room for the rest.

        Returns:
            How many items were accepted: always the first so many. A call that is cancelled while it waits has put
            in the first so many too; `block_timeout` ends a wait with the number.

        Example:
            >>> import asyncio, batchqueue_async as bq
            >>> async def main() -> int:
            ...     async def handle(batch: list[int]) -> None: ...
            ...     async with bq.BatchQueueManager() as manager:
            ...         queue = manager.create("numbers", bq.QueueConfig(consumer=handle))
            ...         return await queue.produce_many(range(1000))
            >>> asyncio.run(main())
            1000
        """
        self._check_thread("produce_many")
        batch = items if isinstance(items, list | tuple) else list(items)
        if self._bulk(batch):
            return len(batch)
        return await self._produce_rest(batch, None)

    def produce_many_nowait(self, items: Iterable[T]) -> int:
        """Put in as many of the items as is possible at once: always the first so many; the others are refused."""
        self._check_thread("produce_many_nowait")
        batch = items if isinstance(items, list | tuple) else list(items)
        if self._bulk(batch):
            return len(batch)
        accepted = self._take_what_fits(batch, 0, None)
        self._refuse(len(batch) - accepted)
        return accepted

    def _bulk(self, items: Sequence[T]) -> bool:
        """Put all items in at once, or none."""
        if self._closed or not items:
            return not items
        self._check_loop("produce_many")
        if self._only is not None:
            return self._only.offer_many(items)
        return self._bulk_by_type(items) if self._by_type is not None else self._bulk_by_place(items)

    def _bulk_by_type(self, items: Sequence[T]) -> bool:
        kind = type(items[0])
        if type(items[-1]) is not kind or countOf(map(type, items), kind) != len(items):
            return False
        place = self._placement.place(items[0])
        if isinstance(place, Transit):
            return False
        return place.line.offer_many(items, place if isinstance(place, Lane) else None)

    def _bulk_by_place(self, items: Sequence[T]) -> bool:
        parts: dict[Place[T], list[T]] = {}
        if isinstance(self._placement.selector, RoundRobin):
            partitions = self._placement.partitions
            first = self._placement.place(items[0]).line.index
            turns = range(min(len(partitions), len(items)))
            parts = {partitions[(first + turn) % len(partitions)]: [*items[turn :: len(partitions)]] for turn in turns}
        else:
            for item in items:
                parts.setdefault(self._placement.place(item), []).append(item)
        if any(
            not isinstance(place, Partition) or place.full() or place.room() < len(part)
            for place, part in parts.items()
        ):
            return False
        for place, part in parts.items():
            place.tail.extend(part)
            place.line.touch()
        return True

    async def _produce_rest(self, items: Sequence[T], wait: Wait | None) -> int:
        deadline = self._block_deadline()
        done = 0
        while True:
            done = self._take_what_fits(items, done, wait)
            if done == len(items) or self._closed or not self._blocking:
                break
            line = self._placement.place(items[done]).line
            rest = items[done:] if self._only is not None else items[done : done + 1]
            granted = await self._stand_in_line(line, rest, deadline, wait)
            done += granted
            if granted < len(rest):
                break
        self._refuse(len(items) - done)
        return done

    def _take_what_fits(self, items: Sequence[T], start: int, wait: Wait | None) -> int:
        """Put items in one by one from `start` on, without waiting; the index of the first that has no place."""
        if self._only is not None and self.config.strategy is not BufferStrategy.DROP_OLDEST:
            return self._fill_only(self._only, items, start, wait)
        if wait is not None:
            return self._take_watched(items, start, wait)
        by_type = self._by_type or {}
        for index in range(start, len(items)):
            item = items[index]
            try:
                place = by_type[type(item)]
            except KeyError:
                place = self._placement.place(item)
            for _ in place.spare:
                place.tail.append(item)
                break
            else:
                if not self._offer_counted_by_caller(place, item):
                    return index
        return len(items)

    def _take_watched(self, items: Sequence[T], start: int, wait: Wait) -> int:
        """The same for items that a caller waits for, a run of one type at a time."""
        # Where one item may evict the one before, each has to be watched before the next comes.
        one_by_one = self._by_type is None or self.config.strategy is BufferStrategy.DROP_OLDEST
        index = start
        while index < len(items):
            place, kind, first = self._placement.place(items[index]), type(items[index]), index
            place.line.order()
            while index < len(items) and type(items[index]) is kind:
                if not self._offer_counted_by_caller(place, items[index]):
                    place.watch(wait, index - first)
                    return index
                index += 1
                if one_by_one:
                    break
            place.watch(wait, index - first)
        return index

    def _fill_only(self, line: Partition[T], items: Sequence[T], start: int, wait: Wait | None) -> int:
        """The same for a single partition: as many as there is room for, at once."""
        count = len(items) - start
        if not line.offer_many(items[start:] if start else items):
            count = 0 if line.full() else min(count, line.room())
            if not count or not line.offer_many(items[start : start + count]):
                return start
        if wait is not None:
            line.watch(wait, count)
        return start + count

    def _offer_counted_by_caller(self, place: Place[T], item: T) -> bool:
        """Like `_offer`, but a refusal is not counted."""
        if self._closed:
            return False
        if place.offer(item):
            return True
        if self.config.strategy is not BufferStrategy.DROP_OLDEST:
            return False
        place.evict()
        self._tally.dropped_after += 1
        return place.offer(item)

    def _collect_door(self) -> None:
        """What other threads have put in by now comes before whatever is asked next."""
        if self._door is not None:
            self._door.collect()

    def _refuse(self, count: int) -> None:
        if self.config.strategy is BufferStrategy.DROP_NEWEST and not self._closed:
            self._tally.dropped_before += count
        else:
            self._tally.refused += count

    # -- who may call --------------------------------------------------------------------------------------------

    def _check_thread(self, call: str) -> None:
        if not self._here._is_owned():
            raise self._wrong_loop(call)

    def _check_loop(self, call: str) -> None:
        """The full check, of thread and running loop, on every path but the hottest."""
        # A thread runs one loop at a time: if this is the queue's thread, and its loop runs, then it runs here. That is
        # a quarter of the price of asyncio.get_running_loop().
        if not (self._here._is_owned() and self._loop.is_running()):
            raise self._wrong_loop(call)

    def _wrong_loop(self, call: str) -> WrongLoopError:
        return WrongLoopError(
            f"queue {self.name!r}: {call} was called on another thread or event loop than the queue's own; "
            "call queue.bridge() once and use what it returns there"
        )

    def _round_here(self) -> Worker[Any] | None:
        """The worker in whose running handler call this code runs, if any."""
        running = current_round.get()
        if running is None:
            return None
        worker, number = running
        return worker if worker.calling and worker.round == number and not worker.abandoned else None

    def _forbid_own_wait(self, line: Partition[T]) -> Worker[Any] | None:
        """Refuse a wait that its own caller would have to end; returns the worker that is about to wait."""
        worker = self._round_here()
        if worker is None:
            return None
        if line.owner is worker:
            raise self._deadlock(line)
        if asyncio.current_task() is not worker.task:
            return None  # a task that the handler started: whether the handler waits for it nobody knows
        before, worker.blocked_on = worker.blocked_on, line.needs
        try:
            if circle(worker):
                raise self._deadlock(line)
        finally:
            worker.blocked_on = before
        return worker

    def _deadlock(self, line: Partition[T]) -> DeadlockError:
        return DeadlockError(
            f"queue {self.name!r}: a handler waits for room in partition {line.index}, which has {line.capacity} items "
            "and is drained only after that handler returns; use produce_nowait, produce into another queue, "
            "or raise buffer_size"
        )
