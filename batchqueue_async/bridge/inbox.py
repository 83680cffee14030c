"""The way into a queue from other threads and loops: in bulk, with one wake-up for many items, and an exact bound.

One lock guards everything that both sides touch; its holders never wait for anything else, and never call the user's
code. It can be taken again by its holder, because a signal handler or a finalizer may produce at any moment.

What came in is moved into the partitions by `collect`, on the queue's loop. The first item since the last `collect`
wakes the loop, before it goes in: a loop that has ended is met with nothing accepted, and an interrupt at any point
can't leave items inside that no wake-up is under way for.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from batchqueue_async._support import forks, log
from batchqueue_async.bridge.credits import Gate
from batchqueue_async.bridge.routing import Routing
from batchqueue_async.config import BufferStrategy
from batchqueue_async.errors import ForkedError, QueueClosedError
from batchqueue_async.policies import RoundRobin
from batchqueue_async.queue.migration import Migration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.bridge.credits import Ticket
    from batchqueue_async.bridge.routing import Route
    from batchqueue_async.queue.batch_queue import BatchQueue
    from batchqueue_async.queue.home import ThreadMark
    from batchqueue_async.queue.partition import Lane, Partition
    from batchqueue_async.queue.router import Route as ItemRoute

T = TypeVar("T")


class Door(Routing[T], Generic[T]):
    """The inbox of one queue for everybody who is not on its loop.

    Attributes:
        lock: guards everything here and in the gates.
        only: the gate of every item, where there is but one partition; producers read it directly.
        by_type: the gate of each type met so far, where types have their partitions.
        waking: whether the loop has been asked to collect, and has not begun to.
        closed: whether nothing comes in any more.
        attached: set when the loop has lent the door its first places.
        thread_id: the loop's thread, once attached.
        waits: whether producers wait for room.
        evicts: whether the oldest item makes room.
        refused, dropped_before, dropped_after: what the loop has not been told yet.
    """

    def __init__(self, queue: BatchQueue[T]) -> None:
        super().__init__(queue)
        self.loop = queue.loop
        self._renew_lock()
        self.waking = False
        self.attached = threading.Event()
        self.thread_id = 0
        self.waits = queue.config.strategy is BufferStrategy.BLOCKING
        self.evicts = queue.config.strategy is BufferStrategy.DROP_OLDEST
        self.refused = 0
        self.dropped_before = 0
        self.dropped_after = 0
        self._forked = False
        self._epoch = 0
        forks.watch(self)

    def _renew_lock(self) -> None:
        self.lock = threading.RLock()
        self.acquire = self.lock.acquire
        self.release = self.lock.release

    # -- on any thread -------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Release the lock after an error; if that was one of the wait for the lock, there is nothing to release."""
        if self.is_held_here():
            self.release()

    def check(self) -> None:
        """Raise in a forked child."""
        if self._forked:
            raise ForkedError(
                f"queue {self.queue.name!r} was made before this process was forked, and its loop's thread did not "
                "come along; make a new bridge in the child"
            )

    def is_held_here(self) -> bool:
        """Whether this thread has the lock: then it has interrupted itself."""
        return cast("ThreadMark", self.lock)._is_owned()

    def put(self, item: T) -> bool:
        """Put one item in if it has a place at once."""
        self.check()
        route = self._route(item)
        with self.lock:
            gate = self._gate(item, route) or self._gate_again(item)
            if gate is None or not (gate.credits or self.evicts):
                return False
            if not self.waking:
                self.wake_loop()
            return gate.add(item)

    def put_many(self, items: list[T] | tuple[T, ...]) -> int:
        """Put in as many items as have places at once: the first so many."""
        self.check()
        routes = self._routes(items)
        with self.lock:
            if self.closed or not items or not (self.evicts or any(gate.credits for gate in self._gates)):
                return 0
            if not self.waking:
                self.wake_loop()
            if self.only is not None:
                return self.only.add_many(items)
            if self._turn is not None:
                return self._deal_out(items)
            if self.by_type is not None:
                first = self._gate(items[0], None)
                kind = type(items[0])
                if first is not None and type(items[-1]) is kind and len(set(map(type, items))) == 1:
                    return first.add_many(items)
            return self._put_one_by_one(items, routes)

    def _deal_out(self, items: list[T] | tuple[T, ...]) -> int:
        """Partitions take turns, as those of the loop's producers do; their turns need not be the same."""
        turn, gates = self._turn or 0, self._gates
        count = len(items)
        if not self.evicts:
            # The first gate that is used up ends the prefix of what has a place.
            ends = (gates[(turn + step) % len(gates)].credits * len(gates) + step for step in range(len(gates)))
            count = min(count, *ends)
        for step in range(min(len(gates), count)):
            gates[(turn + step) % len(gates)].add_many(items[step : count : len(gates)])
        self._turn = turn + count
        return count

    def _put_one_by_one(self, items: Sequence[T], routes: Sequence[Route]) -> int:
        for count, item in enumerate(items):
            gate = self._gate(item, routes[count] if routes else None) or self._gate_again(item)
            if gate is None or not gate.add(item):
                return count
        return len(items)

    def enlist(self, ticket: Ticket, item: T, want: int) -> bool:
        """Join the line for the item's partition; False when the door is closed."""
        self.check()
        route = self._route(item)
        with self.lock:
            gate = self._gate(item, route) or self._gate_again(item)
            if gate is None:
                return False
            if not self.waking:
                self.wake_loop()
            ticket.gate, ticket.want, ticket.epoch = gate, want, self._epoch
            gate.line.append(ticket)
            gate.serve()  # places may have come free since the caller looked
        return True

    def redeem(self, ticket: Ticket, items: list[T] | tuple[T, ...]) -> int:
        """Put items into the places that the ticket was granted; how many."""
        with self.lock:
            gate = ticket.gate
            if gate is None:
                return 0
            if self.closed or ticket.epoch != self._epoch:
                gate.leave(ticket)  # whoever looks at its ticket next finds that it has to enlist again, if it can
                return 0
            if ticket.permits and items and not self.waking:
                self.wake_loop()
            return gate.redeem(ticket, items)

    def leave(self, ticket: Ticket) -> None:
        """Give up what a ticket waits for and has not used."""
        with self.lock:
            if ticket.gate is not None:
                ticket.gate.leave(ticket)

    def refuse(self, count: int) -> None:
        """Count items that were turned away."""
        with self.lock:
            if self.queue.config.strategy is BufferStrategy.DROP_NEWEST and not self.closed:
                self.dropped_before += count
            else:
                self.refused += count

    def shut(self) -> None:
        """Nothing comes in any more; everybody in line is sent away."""
        with self.lock:
            self.closed = True
            self.only = None
            for gate in self._gates:
                gate.credits = 0
                gate.send_away()
        self.attached.set()

    def give_back(self) -> list[Any]:
        """What came in and the queue's loop, which has ended, has not seen; nothing comes in any more."""
        self.shut()
        with self.lock:
            items = [item for gate in self._gates for item in gate.unload()]
            self.hand_in_counts()
        return items

    def uncollected(self) -> int:
        """How many items have come in that the loop has not seen; from any thread, without the lock."""
        return sum(len(gate.inbox) for gate in tuple(self._gates))

    def hand_in_counts(self) -> None:
        """Tell the queue what was turned away or dropped here."""
        with self.lock:
            if not (self.refused or self.dropped_before or self.dropped_after):
                return
            counters = self.queue.counters
            counters.refused += self.refused
            counters.dropped_before += self.dropped_before
            counters.dropped_after += self.dropped_after
            counters.dropped_at_door += self.dropped_after
            self.refused = self.dropped_before = self.dropped_after = 0

    # -- waking the loop -----------------------------------------------------------------------------------------

    def wake_loop(self) -> None:
        """Under the lock: have the loop collect; the caller may put something in afterwards."""
        try:
            self.loop.call_soon_threadsafe(self.collect)
        except RuntimeError:
            self.shut()
            raise QueueClosedError(
                f"queue {self.queue.name!r}: its event loop has ended; shut the queue down before the loop"
            ) from None
        self.waking = True

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

        What came in by the old routes is placed one by one first, under the same lock, so that no item is placed by
        a route that has changed since, and none passes an earlier one of its type.
        """
        router = self.queue.router
        new = [Gate(self, partition) for partition in router.partitions[len(self._gates) :]]
        with self.lock:
            self._move_in(one_by_one=True)
            self._epoch += 1
            for gate in self._gates:
                gate.send_away()
            if self.closed:
                return
            self._gates += new
            self._met = []
            self.by_type = {} if router.by_type is not None else None
            if router.only is not None:
                self.only = self._gates[0]
            elif isinstance(router.selector, RoundRobin):
                self._turn = self._turn or 0
            elif router.by_type is None:
                self._width = router.width
        for gate in new if not self.evicts else ():
            gate.partition.credits = gate
            gate.refill()

    def collect(self) -> None:
        """Move what came in into the partitions, where every item has its place already."""
        router = self.queue.router
        with self.lock:
            self.waking = False
            self._move_in(one_by_one=router.moving)
            waiting = [gate for gate in self._gates if gate.line]
        for gate in waiting:
            gate.refill()
            gate.queue_up()
            gate.watch_for_circles()

    def _move_in(self, *, one_by_one: bool) -> None:
        self.hand_in_counts()
        router = self.queue.router
        for kind in self._met:
            router.route_of_type(kind)
        self._met = []
        for gate in self._gates:
            if gate.inbox:
                items = gate.unload()
                if one_by_one:
                    self._place_one_by_one(gate, items)
                elif self.evicts:
                    self._force(gate.partition, items)
                else:
                    gate.partition.held -= len(items)
                    self._put_into_lanes(gate.partition, items)
                    gate.partition.announce()

    def _put_into_lanes(self, partition: Partition[T], items: list[T]) -> None:
        lanes = partition.lanes
        if lanes is not None and len(lanes) != 1:
            tails: dict[type, list[T]] = {}
            for item in items:
                kind: type = type(item)
                if kind not in tails:
                    tails[kind] = self.queue.router.route_of_type(kind).tail
                tails[kind].append(item)
            return
        place: Partition[T] | Lane[T] = partition if lanes is None else lanes[0]
        if place.tail:
            place.tail.extend(items)
        else:
            # Handed over whole: to copy it would touch each item, from another core than put it in.
            place.tail = items

    def _force(self, partition: Partition[T], items: list[T]) -> None:
        """Put items in that were accepted already, at the cost of older ones."""
        for _ in range(len(items) - partition.room()):
            partition.evict()
            self.queue.counters.dropped_after += 1
        partition.tail.extend(items)
        partition.announce()

    def _place_one_by_one(self, gate: Gate[T], items: list[T]) -> None:
        touched: dict[ItemRoute[T], None] = {}
        for item in items:
            place = gate.partition if self._turn is not None else self.queue.router.route(item)
            if self.evicts:
                self.queue.force(item)
                continue
            if place.partition is not gate.partition:
                # The place that the door had lent stays with the item: it stands above the bound of its new
                # partition until the next batch, once for each growth of the queue.
                gate.partition.held -= 1
                place.partition.held += 1
            if isinstance(place, Migration):
                place.items.append(item)
            else:
                place.partition.held -= 1
                place.tail.append(item)
                touched[place] = None
        for place in touched:
            place.partition.announce()

    def close(self) -> None:
        """Take in what is in the inbox, then nothing more; everybody in line is sent away."""
        with self.lock:
            self.collect()
            self.shut()
        for gate in self._gates:
            gate.partition.credits = None

    # -- when nobody is on the loop any more ---------------------------------------------------------------------

    def loop_ended(self) -> None:
        """The loop was closed without a shutdown of the queue: turn everybody away, and say what was lost."""
        if self.closed:
            return
        self.shut()
        with self.lock:
            left = sum(len(gate.inbox) for gate in self._gates)
        log.error(
            "queue_abandoned",
            queue=self.queue.name,
            items=left,
            way_out="shut the queue down, or use `async with BatchQueueManager()`, before the loop ends",
        )

    def after_fork(self) -> None:
        """In a forked child, whose other threads are gone: a lock that one of them held would stay locked."""
        self._renew_lock()
        self.attached = threading.Event()
        self.attached.set()
        self._forked = True
        self.closed = True
        self.only = None
        for gate in self._gates:
            gate.credits = 0
