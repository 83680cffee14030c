"""The way into a queue from other threads and loops: in bulk, with one wake-up for many items, and an exact bound.

One lock guards everything that both sides touch; its holders never wait for anything else, and never call the user's
code. It can be taken again by its holder, because a signal handler or a finalizer may produce at any moment.

What came in is moved into the partitions by `collect`, on the queue's loop. The first item since the last `collect`
wakes the loop, before it goes in: a loop that has ended is met with nothing accepted, and an interrupt at any point
can't leave items inside that no wake-up is under way for.

An item's partition is chosen on the caller's thread: by its type, in turns, or by asking the queue's selector. The
selector may be the user's code, so it is asked before the lock is taken, once for each item, for the number of
partitions known then, and again only if the queue has grown in between.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import deque
from operator import countOf
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from batchqueue_async._native import Inbox, InboxLock, TypeTable, key_indexes, put_credits, put_indexed
from batchqueue_async._support import forks, log
from batchqueue_async._support.thread_flag import ThreadFlag
from batchqueue_async.bridge.credits import PartitionCredits, pause_of
from batchqueue_async.config import BufferStrategy
from batchqueue_async.errors import ForkedError, QueueClosedError
from batchqueue_async.policies import RoundRobin, key_of, stable_type_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.bridge.credits import ThreadWaiter
    from batchqueue_async.queue.batch_queue import BatchQueue

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
Route = tuple[int, int]
"""The index of an item's partition, and of how many: 0 where nobody has to be asked."""

NO_ROUTE: Route = (0, 0)


class Offer(Generic[T]):
    """The items of one call, how many of them are in, and what the user's selector said of each.

    Attributes:
        items: the items of the call.
        done: how many have come in, always the first ones.
        width: among how many partitions the selector chose; 0 where it is not the user's.
    """

    __slots__ = ("_run_end", "done", "indexes", "items", "width")

    def __init__(self, items: Sequence[T], route: Route = NO_ROUTE) -> None:
        self.items = tuple(items)  # its own, since others may change a list while the call waits
        self.done = 0
        self.width = route[1]
        self.indexes: list[int] = [route[0]] if route[1] else []
        """What the selector said, as far as it was asked; for those that are in too."""
        self._run_end = 0

    @property
    def complete(self) -> bool:
        """Whether all items are in."""
        return self.done >= len(self.items)

    @property
    def left(self) -> int:
        """How many items are not in yet."""
        return max(0, len(self.items) - self.done)

    def rest(self, count: int | None = None) -> Sequence[T]:
        """The items that are not in yet, or the first `count` of them."""
        if not self.done and count in {None, len(self.items)}:
            return self.items
        return self.items[self.done : None if count is None else self.done + count]

    def route_by(self, ask: Callable[[Sequence[T], int, int], list[int]], width: int) -> None:
        """Ask for the partition of every item that has none yet, of as many as there are now.

        `ask` gives those of its items from an index on.
        """
        if self.width != width:
            self.width = width
            self.indexes = [0] * self.done
            self._run_end = 0
        if len(self.indexes) < len(self.items):
            self.indexes += ask(self.items, len(self.indexes), width)

    def route(self) -> Route:
        """The way of the first item that is not in."""
        return (self.indexes[self.done], self.width) if self.width else NO_ROUTE

    def run(self) -> int:
        """How many of the items that are not in yet stand together for sure: of one type, and for one partition."""
        if self._run_end <= self.done:
            self._run_end = self._find_run_end()
        return self._run_end - self.done

    def _find_run_end(self) -> int:
        items, start = self.items, self.done
        kind, count = type(items[start]), len(items)
        if not (start or self.width) and type(items[-1]) is kind and countOf(map(type, items), kind) == count:
            return count
        end = start + 1
        if not self.width:
            while end < count and type(items[end]) is kind:
                end += 1
            return end
        index = self.indexes[start]
        while end < count and self.indexes[end] == index and type(items[end]) is kind:
            end += 1
        return end


class ThreadInbox(Inbox, Generic[T]):
    """The inbox of one queue for everybody who is not on its loop.

    Attributes:
        queue: the queue.
        loop: the queue's loop.
        lock: guards everything here and in the shares.
        only: the share of every item, where there is but one partition; producers read it directly.
        by_type: the share of each type met so far, where types have their partitions.
        waking: whether the loop has been asked to collect, and has not begun to.
        closed: whether nothing comes in any more.
        attached: set when the loop has lent the inbox its first places.
        thread_id: the loop's thread, once attached.
        waits: whether producers wait for room.
        evicts: whether the oldest item makes room.
        pause: the moments in which the loop lets threads run.
        refused, dropped_before, dropped_after: what the loop has not counted yet.
        wake_ups: how often the loop was asked to collect.
    """

    def __init__(self, queue: BatchQueue[T]) -> None:
        self.queue = queue
        self.loop = queue.loop
        self._router = queue.router
        self._intake = queue.intake
        self.only: PartitionCredits[T] | None = None
        self.by_type: dict[type, PartitionCredits[T]] | None = None
        self.waking = False
        self.closed = False
        self.attached = ThreadFlag()
        self.thread_id = 0
        self.waits = queue.config.strategy is BufferStrategy.BLOCKING
        self.evicts = queue.config.strategy is BufferStrategy.DROP_OLDEST
        self.pause = pause_of(queue.loop)
        self.refused = 0
        self.dropped_before = 0
        self.dropped_after = 0
        self.wake_ups = 0
        self._shares: list[PartitionCredits[T]] = []
        self._turn = -1
        """Under `round_robin`, whose turn it is; below 0 otherwise."""
        self._key: Callable[[T], Any] | None = None
        self._width = 0
        self._met: list[type] = []
        """Types that came in and the queue's router has not met."""
        self._unloaded: deque[tuple[PartitionCredits[T], list[T], bool]] = deque()
        """The loop's: what it has taken out and not put into the partitions yet, and whether routes had changed."""
        self._to_meet: list[type] = []
        self._placing = False
        self._forked = False
        self._epoch = 0
        self._renew_lock()
        forks.watch(self)

    def _renew_lock(self) -> None:
        self.lock = InboxLock()
        self.acquire = self.lock.acquire
        self.release = self.lock.release
        # Whether this thread has the lock: then it has interrupted itself. `threading.Condition` asks it the same way.
        self.is_held_here: Callable[[], bool] = operator.attrgetter("_is_owned")(self.lock)

    # -- on any thread -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise in a forked child."""
        if self._forked:
            raise ForkedError(
                f"queue {self.queue.name!r} was made before this process was forked, and its loop's thread did not "
                "come along; make a new bridge in the child"
            )

    def guarded(self, step: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        """Take a step under the lock, which no interrupt leaves locked: `_support.locked.guarded`, written out.

        Called from here it would cost a step nearly twice as much, and threads' items take this way. What holds there
        holds here: nothing that can be interrupted stands between the end of the step, or its error, and `release`.
        """
        release = self.release
        try:
            self.acquire()
            result = step(*arguments, **options)
        except BaseException:
            try:  # noqa: SIM105 - no further call may stand before the release
                release()
            except RuntimeError:
                pass  # interrupted in the wait for the lock, which another thread has
            raise
        release()
        return result

    def put(self, item: T, asked: Route | None = None) -> Route | None:
        """Put one item in if it has a place at once: None; else the way that the selector gave for it.

        `asked` is what it has given already.
        """
        self.check()
        inside = self.is_held_here()
        while True:
            route = asked or self._route(item)
            accepted = self.guarded(self._put, item, route, inside)
            if accepted:
                return None
            if accepted is not None:
                return route
            asked = None

    def _put(self, item: T, route: Route, inside: bool) -> bool | None:  # noqa: FBT001 - what `is_held_here` said, by place: a hot path
        """None: the queue has grown since the route was asked for."""
        share = self._share_of(item, route)
        if share is None:
            return False if self.closed or route[1] == self._width else None
        if share.free <= 0 and not self.evicts:
            if not inside:
                share.balance()
            if share.free <= 0:
                return False
        if not self.waking:
            self.wake_loop()
        return share.add(item)

    def put_many(self, offer: Offer[T]) -> None:
        """Put in as many of the offer's items as have places at once."""
        self.check()
        inside = self.is_held_here()
        while not offer.complete:
            self._ask(offer)
            if self.guarded(self._put_many, offer, inside):
                return

    def _put_many(self, offer: Offer[T], inside: bool) -> bool:  # noqa: FBT001 - what `is_held_here` said, by place: a hot path
        """False: the queue has grown since the routes were asked for."""
        if self.closed:
            return True
        if offer.width != self._width:
            return False
        if not (inside or self.evicts):
            for share in self._shares:
                if share.free <= 0:
                    share.balance()
        if not (self.evicts or any(share.free > 0 for share in self._shares)):
            return True
        if not self.waking:
            self.wake_loop()
        if self.only is not None:
            offer.done += self.only.add_many(offer.rest())
        elif self._turn >= 0:
            self._deal_out(offer, self._turn)
        else:
            self._put_runs(offer)
        return True

    def _deal_out(self, offer: Offer[T], turn: int) -> None:
        """Partitions take turns, as those of the loop's producers do; their turns need not be the same."""
        shares, items = self._shares, offer.rest()
        count = len(items)
        if not self.evicts:
            # The first share that is used up ends the prefix of what has a place.
            ends = (shares[(turn + step) % len(shares)].free * len(shares) + step for step in range(len(shares)))
            count = min(count, *ends)
        for step in range(min(len(shares), count)):
            shares[(turn + step) % len(shares)].add_many(items[step : count : len(shares)])
        self._turn = turn + count
        offer.done += count

    def _put_runs(self, offer: Offer[T]) -> None:
        while not offer.complete:
            if self.by_type is not None:
                offer.done = put_credits(self.by_type, offer.items, offer.done)
            elif offer.width:
                offer.done = put_indexed(self._shares, offer.items, offer.indexes, offer.done)
            if not offer.left:
                return
            share = self._share_of(offer.items[offer.done], offer.route())
            run = offer.run()
            if share is None:
                return
            added = share.add_many(offer.rest(run))
            offer.done += added
            if added < run:
                return

    def wait_for(self, waiter: ThreadWaiter, offer: Offer[T]) -> bool:
        """Join the line for places for the items of the offer; False when the inbox is closed."""
        self.check()
        self._ask(offer)
        return self.guarded(self._wait_for, waiter, offer)

    def _wait_for(self, waiter: ThreadWaiter, offer: Offer[T]) -> bool:
        share = self._share_of(offer.items[offer.done], offer.route())
        if share is None:
            # The queue has grown since, and the next try finds the share; or nobody is there to lend any places.
            return bool(self._shares) and not self.closed
        if not self.waking:
            self.wake_loop()
        waiter.epoch = self._epoch
        if self.only is not None:
            share.join(waiter, len(offer.items) - offer.done)
        else:
            share.join(waiter, 1 if self._turn >= 0 else offer.run())
        return True

    def fill(self, waiter: ThreadWaiter, offer: Offer[T], renew: Callable[[], None]) -> None:
        """After a wake-up: put items into the places that the waiter was granted, and be ready for the next."""
        self.guarded(self._fill, waiter, offer, renew, self.is_held_here())

    def _fill(self, waiter: ThreadWaiter, offer: Offer[T], renew: Callable[[], None], inside: bool) -> None:  # noqa: FBT001 - what `is_held_here` said, by place: a hot path
        renew()
        share = waiter.share
        if share is None:
            return
        if self.closed or waiter.epoch != self._epoch:
            self._leave(waiter)  # it finds that it has to join a line again, if it can
            return
        if not (waiter.permits or inside):
            share.balance()
        if waiter.permits and not self.waking:
            self.wake_loop()
        offer.done += share.fill(waiter, offer.rest(min(waiter.permits, len(offer.items) - offer.done)))

    def leave(self, waiter: ThreadWaiter) -> None:
        """Give up what a producer waits for and has not used."""
        self.guarded(self._leave, waiter)

    def _leave(self, waiter: ThreadWaiter) -> None:
        share = waiter.share
        if share is not None:
            share.leave(waiter)
            if share.in_vain() and not (self.waking or self.closed):
                with contextlib.suppress(QueueClosedError):
                    self.wake_loop()

    def break_wait(self, waiter: ThreadWaiter) -> None:
        """End a wait that nothing else could end."""
        self.guarded(self._break_wait, waiter)

    def _break_wait(self, waiter: ThreadWaiter) -> None:
        if waiter.share is not None:
            waiter.stuck = True
            self._leave(waiter)
            waiter.wake()

    def refuse(self, count: int) -> None:
        """Count items that were turned away."""
        if count:
            self.guarded(self._refuse, count)

    def _refuse(self, count: int) -> None:
        if self.queue.config.strategy is BufferStrategy.DROP_NEWEST and not self.closed:
            self.dropped_before += count
        else:
            self.refused += count

    def waiting(self) -> int:
        """How many producers of other threads and loops stand in line for room."""
        return self.guarded(lambda: sum(share.waiting() for share in self._shares))

    def shut(self) -> None:
        """Nothing comes in any more; everybody in line is sent away."""
        self.guarded(self._shut)
        self.attached.set()

    def _shut(self) -> None:
        self.closed = True
        self.only = None
        for share in self._shares:
            share.close()

    def give_back(self) -> list[Any]:
        """What came in and the queue's loop, which has ended, has not seen; nothing comes in any more."""
        self.shut()
        return self.guarded(self._give_back)

    def _give_back(self) -> list[Any]:
        self._hand_in_counts()
        for share in self._shares:
            self._unloaded.append((share, share.unload(), False))
        return [item for _, items, _ in self._unloaded for item in items]

    def uncollected(self) -> int:
        """How many items have come in that the loop has not seen; from any thread, without the lock."""
        unloaded = sum(len(items) for _, items, _ in tuple(self._unloaded))
        return unloaded + sum(len(share.items) for share in tuple(self._shares))

    def hand_in_counts(self) -> None:
        """Have the queue count what was turned away or dropped here."""
        self.guarded(self._hand_in_counts)

    def _hand_in_counts(self) -> None:
        if not (self.refused or self.dropped_before or self.dropped_after):
            return
        counters = self.queue.counters
        counters.refused += self.refused
        counters.dropped_before += self.dropped_before
        counters.dropped_after += self.dropped_after
        counters.dropped_at_door += self.dropped_after
        self.refused = self.dropped_before = self.dropped_after = 0

    # -- the way of an item --------------------------------------------------------------------------------------

    def _route(self, item: T) -> Route:
        """Outside the lock: what the user's selector says, if it is one that has to be asked."""
        width = self._width
        return (self._router.ask(item, width), width) if width else NO_ROUTE

    def _ask(self, offer: Offer[T]) -> None:
        """Outside the lock: ask the user's selector, if there is one, for each item that it was not asked for."""
        width = self._width
        if width:
            offer.route_by(self._ask_each, width)

    def _ask_each(self, items: Sequence[T], start: int, width: int) -> list[int]:
        if self._key is not None:
            return key_indexes(self._key, items, start, width)
        ask = self._router.ask
        return [ask(item, width) for item in items[start:]]

    def _share_of(self, item: T, route: Route) -> PartitionCredits[T] | None:
        """Under the lock: where an item's places are; None while there is none, or if the route is out of date."""
        if self.closed or not self._shares:
            return None
        if self.by_type is not None:
            kind = type(item)
            return self.by_type.get(kind) or self._meet(kind)
        if self._turn >= 0:
            self._turn += 1
            return self._shares[(self._turn - 1) % len(self._shares)]
        if self._width:
            return self._shares[route[0]] if route[1] == self._width else None
        return self.only

    def _meet(self, kind: Any) -> PartitionCredits[T]:
        """A type turns up for the first time since the routes were made."""
        places = self._router.by_type or {}
        place = places.get(kind)
        if place is None:
            self._met.append(kind)
        index = stable_type_hash(kind) % len(self._shares) if place is None else place.partition.index
        if index >= len(self._shares):
            # The queue is growing just now, and meets us in a moment: then the item finds its way from here.
            index %= len(self._shares)
        share = self._shares[index]
        if self.by_type is not None:
            self.by_type[kind] = share
        return share

    # -- waking the loop -----------------------------------------------------------------------------------------

    def wake_loop(self) -> bool:
        """Under the lock: have the loop collect; the caller may put something in afterwards."""
        try:
            self.loop.call_soon_threadsafe(self.collect)
        except RuntimeError:
            self.shut()
            raise QueueClosedError(
                f"queue {self.queue.name!r}: its event loop has ended; shut the queue down before the loop"
            ) from None
        self.waking = True
        self.wake_ups += 1
        return True

    # -- on the queue's loop -------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Meet the partitions, and borrow places."""
        self.thread_id = threading.get_ident()
        if not self.attached.is_set():
            self.meet_partitions()
            if self.queue.closed:
                self.close()
            self.attached.set()

    def meet_partitions(self) -> None:
        """Get to know new partitions and routes, and borrow places.

        What came in by the old routes is taken out under the same lock, and placed before what comes in by the new
        ones: so no item is placed by a route that has changed since, and none passes an earlier one of its type.
        """
        if self.queue.config.buffer_bytes is not None:
            return  # places alone let nothing in there: each call asks the loop
        router = self._router
        new = [PartitionCredits(self, partition) for partition in router.partitions[len(self._shares) :]]
        open_ = self.guarded(self._take_routes, new)
        self._place()
        if not open_:
            return
        for share in new if not self.evicts else ():
            share.partition.credits = share
            share.refill()
        for share in self._shares:
            if share.stands:
                share.queue_up()  # those for whom it stood were sent away

    def _take_routes(self, new: list[PartitionCredits[T]]) -> bool:
        """Under the lock; False when the inbox is closed."""
        router = self._router
        self._unload(rerouted=True)
        self._epoch += 1
        for share in self._shares:
            share.send_away()
        if self.closed:
            return False
        self._shares += new
        self._met = []
        self.by_type = TypeTable() if router.by_type is not None else None
        if router.only is not None:
            self.only = self._shares[0]
        elif isinstance(router.selector, RoundRobin):
            self._turn = max(0, self._turn)
        elif router.by_type is None:
            self._key = key_of(router.selector)
            self._width = router.width
        return True

    def collect(self) -> None:
        """Move what came in into the partitions, where every item has its place already."""
        inside = self.is_held_here()
        waiting = self.guarded(self._collect, inside)
        self._place()
        for share in waiting:
            share.refill()
            share.queue_up()

    def _collect(self, inside: bool) -> list[PartitionCredits[T]]:  # noqa: FBT001 - what `is_held_here` said, by place: a hot path
        """Under the lock; the shares in whose line somebody stands, or that stand in the loop's for somebody."""
        self.waking = False
        self._unload(rerouted=False)
        waiting: list[PartitionCredits[T]] = []
        for share in self._shares:
            if share.line or share.stands:
                waiting.append(share)
                if not inside:
                    share.balance()
        return waiting

    def _unload(self, *, rerouted: bool) -> None:
        """Under the lock: take out what came in. It is placed later, for that may call the user's code."""
        self._hand_in_counts()
        self._to_meet += self._met
        self._met = []
        for share in self._shares:
            if share.items:
                self._unloaded.append((share, share.unload(), rerouted))

    def _place(self) -> None:
        """Without the lock: put what was taken out into the partitions, in order."""
        if self._placing:
            return  # the user's code has come back here: whoever placed the items before goes on with these
        self._placing = True
        try:
            self._meet_types()
            while self._unloaded:
                share, items, rerouted = self._unloaded.popleft()
                self._intake.take_in(share.partition, items, rerouted=rerouted)
        finally:
            self._placing = False

    def _meet_types(self) -> None:
        met, self._to_meet = self._to_meet, []
        for kind in met:
            # The hash of a class may be the user's: its items come in all the same.
            with contextlib.suppress(Exception):
                self._router.route_of_type(kind)

    def close(self) -> None:
        """Take in what came, then nothing more; everybody in line is sent away."""
        self.guarded(self._close)
        self._place()
        for share in self._shares:
            share.partition.credits = None

    def _close(self) -> None:
        self._unload(rerouted=False)
        self.shut()

    # -- when nobody is on the loop any more ---------------------------------------------------------------------

    def loop_ended(self) -> None:
        """The loop was closed without a shutdown of the queue: turn everybody away, and say what was lost."""
        if self.closed:
            return
        self.shut()
        left = self.guarded(lambda: sum(len(share.items) for share in self._shares))
        log.error(
            "queue_abandoned",
            queue=self.queue.name,
            items=left,
            way_out="shut the queue down, or use `async with BatchQueueManager()`, before the loop ends",
        )

    def after_fork(self) -> None:
        """In a forked child, whose other threads are gone: a lock that one of them held would stay locked."""
        self._renew_lock()
        self.attached = ThreadFlag()
        self.attached.set()
        self._forked = True
        self.closed = True
        self.only = None
        for share in self._shares:
            share.free = 0
