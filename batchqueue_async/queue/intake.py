"""What comes in beside the fast path: the strategies of a full partition, items in bulk, and waiting for room.

A producer's fast path, in `BatchQueue`, fills a free place of a partition by itself. Everything else comes here: the
first item into an empty partition, a partition that is full or closed, many items at once, and those for which a
`deliver` waits.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async._native import group_by_type, key_parts, one_type, put_held, put_run, put_together
from batchqueue_async._support import log
from batchqueue_async._support.locked import locked
from batchqueue_async._support.log import describe
from batchqueue_async.config import BufferStrategy
from batchqueue_async.errors import DeadlockError
from batchqueue_async.policies import RoundRobin
from batchqueue_async.queue.deadlock import WaitHere, caller_here, waits
from batchqueue_async.queue.migration import Migration
from batchqueue_async.queue.partition import Lane, Partition
from batchqueue_async.queue.round import current_round

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from batchqueue_async._support.home_loop import HomeLoop
    from batchqueue_async.config import QueueConfig
    from batchqueue_async.queue.completion import CompletionWait
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.router import PartitionRouter, Route
    from batchqueue_async.queue.stats import Counters
    from batchqueue_async.queue.waiters import Waiter

T = TypeVar("T")


class Routes(Generic[T]):
    """The routes of a call's items: each is asked for once, for as long as the queue does not grow."""

    __slots__ = ("_epoch", "_first", "_found", "_router")

    def __init__(self, router: PartitionRouter[T], found: list[Route[T]] | None = None) -> None:
        self._router = router
        self._epoch = router.epoch
        self._found: list[Route[T]] = found or []
        self._first = 0
        """The index of the item that the first of them is for."""

    def of(self, index: int, item: T) -> Route[T]:
        """The route of an item; items are asked for in order, as often as one likes."""
        router = self._router
        if router.by_type is not None:
            return router.route(item)
        if self._epoch != router.epoch or index > self._first + len(self._found):
            self._epoch = router.epoch
            self._found = []
            self._first = index
        if index == self._first + len(self._found):
            self._found.append(router.route(item))
        return self._found[index - self._first]


class RemoteOffer(Generic[T]):
    """The items of a caller on another thread or loop, who may withdraw what has not come in at any moment.

    So whoever gives up knows what was accepted, even if the queue's loop stands still just then.

    Attributes:
        items: the items.
        done: how many have come in, always the first ones.
    """

    __slots__ = ("_lock", "_tell", "_withdrawn", "done", "items")

    def __init__(self, items: Sequence[T]) -> None:
        self.items = items
        self.done = 0
        self._withdrawn = False
        self._tell: Callable[[], None] | None = None
        self._lock = threading.RLock()

    @property
    def complete(self) -> bool:
        """Whether all items are in."""
        return self.done == len(self.items)

    @locked
    def advance(self, step: Callable[[], int]) -> bool:
        """Put some in, on the queue's loop, and count them; False when the caller has withdrawn."""
        if self._withdrawn:
            return False
        self.done += step()
        if self.complete and self._tell is not None:
            self._tell()
        return True

    @locked
    def when_complete(self, tell: Callable[[], None]) -> None:
        """Have the caller told at once when everything is in: the loop may be a handler's for long, right after."""
        self._tell = tell
        if self.complete:
            tell()

    @locked
    def withdraw(self) -> int:
        """Let no more come in; how many have."""
        self._withdrawn = True
        return self.done


class Intake(Generic[T]):
    """The slow ways into one queue, under its strategy.

    Attributes:
        closed: whether nothing comes in any more.
        blocking: whether a producer waits for room.
        weighs: whether there is a bound by bytes.
    """

    __slots__ = ("_counters", "_home", "_router", "blocking", "closed", "config", "name", "weighs")

    def __init__(
        self, name: str, config: QueueConfig[T], router: PartitionRouter[T], counters: Counters, home: HomeLoop
    ) -> None:
        self.name = name
        self.config = config
        self.closed = False
        self.blocking = config.strategy is BufferStrategy.BLOCKING
        self.weighs = config.buffer_bytes is not None
        self._router = router
        self._counters = counters
        self._home = home

    def close(self) -> None:
        """Take nothing in any more."""
        self.closed = True

    def send_away(self) -> None:
        """Close the partitions: every waiting producer leaves without its item."""
        for partition in self._router.partitions:
            partition.close()

    # -- one item ------------------------------------------------------------------------------------------------

    def offer(self, route: Route[T], item: T) -> bool:
        """The way in when there is no fast slot; refusals are counted here except under `BLOCKING`."""
        self._home.check("produce")
        if self.closed:
            if not self.blocking:
                self._counters.refused += 1
            return False
        if route.offer(item):
            return True
        if self.blocking:
            return False
        strategy = self.config.strategy
        if strategy is BufferStrategy.DROP_OLDEST:
            return self._make_way(route, item)
        if strategy is BufferStrategy.DROP_NEWEST:
            self._counters.dropped_before += 1
        else:
            self._counters.refused += 1
        return False

    def _make_way(self, route: Route[T], item: T) -> bool:
        """Let the oldest item make room for this one; or the oldest ones, where these take fewer bytes."""
        while True:
            route.evict()
            self._counters.dropped_after += 1
            accepted = route.offer(item)
            if accepted or not self.weighs:
                return accepted

    def refuse(self, count: int) -> None:
        """Count items that were turned away."""
        if self.config.strategy is BufferStrategy.DROP_NEWEST and not self.closed:
            self._counters.dropped_before += count
        else:
            self._counters.refused += count

    # -- what came in from other threads -------------------------------------------------------------------------

    def take_in(self, partition: Partition[T], items: list[T], *, rerouted: bool) -> None:
        """Put in what the inbox of other threads has accepted for a partition; the list is handed over.

        Each item has its place already, which the partition holds; under `DROP_OLDEST` the oldest ones make room.

        Args:
            partition: where the items were accepted.
            items: the items.
            rerouted: whether routes have changed since they were accepted.
        """
        evicts = self.config.strategy is BufferStrategy.DROP_OLDEST
        if rerouted or self._router.moving:
            self._take_in_anew(partition, items, evicts=evicts)
        elif evicts:
            for _ in range(len(items) - partition.room()):
                partition.evict()
                self._counters.dropped_after += 1
            partition.put_in(items)
        elif partition.lanes is None:
            partition.adopt([(None, items)])
        else:
            by_type = self._router.by_type
            if by_type is not None and not one_type(items):  # the list of a single type is handed over whole
                put_held(by_type, partition, items)
            partition.adopt(self._by_lane(partition, items) if items else ())

    def _by_lane(self, partition: Partition[T], items: list[T]) -> list[tuple[Lane[T] | None, list[T]]]:
        """The items by type, while nothing moves: each type has its lane in the partition, or gets it now."""
        lists: list[list[T]] | None = group_by_type(items)
        if lists is None:
            by_kind: dict[int, list[T]] = {}  # by the identities of the types, some of which may not be comparable
            for item in items:
                by_kind.setdefault(id(type(item)), []).append(item)
            lists = list(by_kind.values())
        return [(self._lane_of(partition, type(mine[0])), mine) for mine in lists]

    def _lane_of(self, partition: Partition[T], kind: type) -> Lane[T] | None:
        try:
            route = self._router.route_of_type(kind)
        except Exception:  # noqa: BLE001 - the hash of a class may be the user's; an accepted item stays where it is
            return None
        return route if isinstance(route, Lane) and route.partition is partition else None

    def _take_in_anew(self, partition: Partition[T], items: list[T], *, evicts: bool) -> None:
        """The same one by one, each where it belongs by now."""
        keep = isinstance(self._router.selector, RoundRobin)  # it has no order, and one partition is as good as another
        failed: list[BaseException] = []
        for item in items:
            route: Route[T] = partition if keep else self._route_or(partition, item, failed)
            if evicts:
                if not route.offer(item):
                    self._make_way(route, item)
                continue
            if route.partition is not partition:
                # The place that the inbox was lent stays with the item: it stands above the bound of its new partition
                # until the next batch, once for each growth of the queue.
                partition.pass_held(route.partition)
            if isinstance(route, Migration):
                route.receive(item)
            else:
                route.partition.adopt([(route if isinstance(route, Lane) else None, [item])])
        if failed:
            fields = describe(failed[0])
            log.warning("selector_failed", queue=self.name, partition=partition.index, items=len(failed), **fields)
            ends = [error for error in failed if not isinstance(error, Exception)]
            if ends:
                raise ends[0]  # an exit, say: it takes effect when every item has its place

    def _route_or(self, partition: Partition[T], item: T, failed: list[BaseException]) -> Route[T]:
        """Where an accepted item goes; it stays in its partition if that can't be found out."""
        try:
            return self._router.route(item)
        except BaseException as error:  # noqa: BLE001 - the selector is the user's, and the item is accepted
            failed.append(error)
            return partition

    # -- waiting for room ----------------------------------------------------------------------------------------

    async def wait_and_put(self, route: Route[T], item: T) -> bool:
        """Put one item in as soon as there is room, first come, first served."""
        if not self.closed and await self._wait_for_room(route, (item,), self._block_deadline()):
            return True
        self._counters.refused += 1
        return False

    async def _wait_for_room(
        self,
        route: Route[T],
        items: Sequence[T],
        deadline: float | None,
        completion: CompletionWait | None = None,
        remote: RemoteOffer[T] | None = None,
    ) -> int:
        """Wait until all items have got places, in parts if need be; how many did."""
        in_handler = current_round.get() is not None  # else no handler call waits with it, and there can be no circle
        drain = caller_here() if in_handler else None
        if drain is not None:
            self._forbid_wait_of(drain, route.partition)
        waiter = route.partition.wait_for(items)
        timer = None if deadline is None else self._home.loop.call_at(deadline, waiter.expire)
        try:
            if not in_handler:
                return await self._fill_when_granted(waiter, items, completion, remote)
            with WaitHere(waiter.needs, waiter.break_wait) as waiter.here:
                return await self._fill_when_granted(waiter, items, completion, remote)
        finally:
            if timer is not None:
                timer.cancel()
            if waiter.want or waiter.reserved:
                waiter.partition.leave(waiter)

    async def _fill_when_granted(
        self, waiter: Waiter, items: Sequence[T], completion: CompletionWait | None, remote: RemoteOffer[T] | None
    ) -> int:
        done = 0
        while done < len(items) and not waiter.expired:
            await waiter.future
            if waiter.broken:
                raise self._deadlock(waiter.partition)
            if self.closed:
                break
            part = items[done : done + waiter.reserved]
            if remote is None:
                self._fill(waiter, part, completion)
            elif not remote.advance(partial(self._fill, waiter, part, completion)):
                break
            done += len(part)
            if done < len(items):
                waiter.renew()
                waiter.partition.serve()
                waiter.look_for_circle()  # it waited for nobody while it had places; now it does again
        return done

    def _fill(self, waiter: Waiter, items: Sequence[T], completion: CompletionWait | None) -> int:
        """Put items into the places that were reserved for the waiter; how many."""
        if items:
            route = self._router.only or self._router.route_in(items[0], waiter.partition)
            if completion is not None:
                route.partition.order()
            route.fill(waiter, items)
            if completion is not None:
                route.watch(completion, len(items))
        return len(items)

    def _block_deadline(self) -> float | None:
        timeout = self.config.block_timeout
        return None if timeout is None else self._home.loop.time() + timeout

    def _forbid_wait_of(self, drain: DrainTask[Any], partition: Partition[T]) -> None:
        """Refuse a wait of its handler call that this very call would have to end, before it has begun."""
        wait = waits.begin(drain, partition.needs)
        try:
            if waits.find_cycle(drain):
                raise self._deadlock(partition)
        finally:
            waits.finish(wait)

    def _deadlock(self, partition: Partition[T]) -> DeadlockError:
        return DeadlockError(
            f"queue {self.name!r}: a handler waits for room in partition {partition.index}, which has "
            f"{partition.capacity} items and is drained only after that handler returns; use produce_nowait, produce "
            f"into another queue, or raise buffer_size{' and buffer_bytes' if self.weighs else ''}; "
            "to have a failed batch again, return bq.RETRY from on_error"
        )

    # -- many items ----------------------------------------------------------------------------------------------

    def put_all(self, items: Sequence[T]) -> bool | Routes[T]:
        """Put all items in at once (True), or none; the routes that were asked for in vain are for `put_rest`."""
        if self.closed or not items:
            return not items
        self._home.check("produce_many")
        router = self._router
        if self.weighs:
            self.weigh(items)
        if router.only is not None:
            return router.only.offer_many(items)
        if self.weighs:
            return False
        if router.by_type is not None:
            return self._put_all_by_type(items)
        if isinstance(router.selector, RoundRobin):
            return self._put_all_in_turns(items)
        return self._put_all_by_route(items)

    def weigh(self, items: Sequence[T]) -> None:
        """Refuse items that could never come in for their bytes, before any of them does."""
        byte_room = self._router.partitions[0].byte_room
        if byte_room is not None:
            byte_room.weigh(items)

    def _put_all_by_type(self, items: Sequence[T]) -> bool:
        if not one_type(items):
            return False
        route = self._router.route(items[0])
        if isinstance(route, Migration):
            return False
        return route.partition.offer_many(items, route if isinstance(route, Lane) else None)

    def _put_all_in_turns(self, items: Sequence[T]) -> bool:
        partitions = self._router.partitions
        first = self._router.route(items[0]).partition.index
        turns = range(min(len(partitions), len(items)))
        return self._put_parts(
            [(partitions[(first + turn) % len(partitions)], items[turn :: len(partitions)]) for turn in turns]
        )

    def _put_all_by_route(self, items: Sequence[T]) -> bool | Routes[T]:
        by_key: tuple[list[Route[T]], list[tuple[Route[T], list[T]]]] | None = key_parts(self._router, items)
        if by_key is not None:
            return self._put_parts(by_key[1]) or Routes(self._router, by_key[0])
        routes = Routes(self._router)
        parts: dict[Route[T], list[T]] = {}
        for index, item in enumerate(items):
            parts.setdefault(routes.of(index, item), []).append(item)
        return self._put_parts(parts.items()) or routes

    def _put_parts(self, parts: Collection[tuple[Route[T], Sequence[T]]]) -> bool:
        if any(not isinstance(route, Partition) or route.full() or route.room() < len(part) for route, part in parts):
            return False
        for route, part in parts:
            if not put_together(route, part):
                route.partition.put_in(part)
        return True

    async def put_rest(self, items: Sequence[T], completion: CompletionWait | None, asked: Routes[T] | None) -> int:
        """Put items in one after the other, waiting for room where the strategy does; how many were accepted."""
        items = tuple(items)  # its own, since others may change a list while the call waits
        deadline = self._block_deadline()
        only = self._router.only
        routes = asked or (Routes(self._router) if only is None else None)
        done = 0
        while True:
            done = self.put_what_fits(items, done, completion, routes)
            if done == len(items) or self.closed or not self.blocking:
                break
            route: Route[T] = self._router.partitions[0] if routes is None else routes.of(done, items[done])
            rest = items[done:] if only is not None else items[done : done + 1]
            granted = await self._wait_for_room(route, rest, deadline, completion)
            done += granted
            if granted < len(rest):
                break
        self.refuse(len(items) - done)
        return done

    def put_now(self, items: Sequence[T]) -> int:
        """Put in as many of the items as there is room for now; the caller counts those that are refused."""
        self.weigh(items)
        return 0 if self.closed else self.put_what_fits(items, 0, None, Routes(self._router))

    async def put_remote(self, remote: RemoteOffer[T], wait: float | None) -> None:
        """Put in what a caller on another thread or loop offers, waiting up to `wait` seconds for room.

        Refusals are the caller's to count.
        """
        items = remote.items
        self._home.check("produce")
        self.weigh(items)
        deadline = None if wait is None else self._home.loop.time() + wait
        routes = Routes(self._router)
        while remote.advance(lambda: self.put_what_fits(items, remote.done, None, routes) - remote.done):
            done = remote.done
            if remote.complete or self.closed or not self.blocking or wait == 0:
                break
            route = routes.of(done, items[done])
            rest = items[done:] if self._router.only is not None else items[done : done + 1]
            if await self._wait_for_room(route, rest, deadline, remote=remote) < len(rest):
                break

    def put_what_fits(
        self, items: Sequence[T], start: int, completion: CompletionWait | None, asked: Routes[T] | None
    ) -> int:
        """Put items in one by one from `start` on, without waiting; the index of the first that has no place."""
        only = self._router.only
        if only is not None and self.config.strategy is not BufferStrategy.DROP_OLDEST:
            return self._fill_only(only, items, start, completion)
        routes = asked or Routes(self._router)
        if completion is not None:
            return self._put_watched(items, start, completion, routes)
        by_type = self._router.by_type
        index = start
        while index < len(items):
            if by_type is not None and (index := put_run(by_type, items, index)) >= len(items):
                break
            item = items[index]
            route = routes.of(index, item)
            for _ in route.fast_slots:
                route.tail.append(item)
                break
            else:
                if not self._offer_counted_by_caller(route, item):
                    return index
            index += 1
        return index

    def _put_watched(self, items: Sequence[T], start: int, completion: CompletionWait, routes: Routes[T]) -> int:
        """The same for items that a caller waits for, a run of one type at a time."""
        # Where one item may evict the one before, each has to be watched before the next comes.
        one_by_one = self._router.by_type is None or self.config.strategy is BufferStrategy.DROP_OLDEST
        index = start
        while index < len(items):
            route, kind, first = routes.of(index, items[index]), type(items[index]), index
            route.partition.order()
            while index < len(items) and type(items[index]) is kind:
                if not self._offer_counted_by_caller(route, items[index]):
                    route.watch(completion, index - first)
                    return index
                index += 1
                if one_by_one:
                    break
            route.watch(completion, index - first)
        return index

    def _fill_only(
        self, partition: Partition[T], items: Sequence[T], start: int, completion: CompletionWait | None
    ) -> int:
        """The same for a single partition: as many as there is room for, at once."""
        count = len(items) - start
        if not partition.offer_many(items[start:] if start else items):
            count = partition.fitting(items[start:] if start else items)
            if not count or not partition.offer_many(items[start : start + count]):
                return start
        if completion is not None:
            partition.watch(completion, count)
        return start + count

    def _offer_counted_by_caller(self, route: Route[T], item: T) -> bool:
        """Like `offer`, but a refusal is not counted."""
        if self.closed:
            return False
        if route.offer(item):
            return True
        return self.config.strategy is BufferStrategy.DROP_OLDEST and self._make_way(route, item)
