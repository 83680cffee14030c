"""One partition's share of the door: the places it was lent, what came in for it, and the line of those who wait.

The queue's loop lends places, as `credits`; a producer on any thread that finds a credit puts its item into the
inbox and is done: the item has its place. When the credits are used up producers wait in line, and as the worker takes
a batch, the loop hands out the room that this made. Inbox, credits and line are touched only under the door's lock, so
nothing relies on the order of two unlocked operations.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async.queue.deadlock import waits
from batchqueue_async.queue.waiters import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence, Sequence

    from batchqueue_async.bridge.inbox import Door
    from batchqueue_async.queue.deadlock import BlockedWait
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.partition import Partition

T = TypeVar("T")

HAS_GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether threads take turns at running Python."""

SHORTEST_PAUSE = 50e-6
LONGEST_PAUSE = 0.002
PAUSE_SHARE = 10
"""How long a loop pauses for threads to run, in seconds: longer each time that nobody came; and for what part of the
time at the most: one in so many."""


class Ticket:
    """A producer of another thread or loop in line for places.

    Attributes:
        wake: makes the producer look at what it got; says whether there still is one.
        gate: where it stands in line; None before, and again when a growing queue sends it to look for its new place.
        epoch: which of the door's routings led it to the gate.
        want: how many places it still waits for.
        permits: how many it was granted and has not used.
        drain: the drain task whose `in_thread` handler waits, if one does: then the wait may never end.
        blocked: that wait among those of handler calls, once it is known there.
        stuck: whether the wait was found to be one of a circle that nothing can open.
    """

    __slots__ = ("blocked", "drain", "epoch", "gate", "permits", "stuck", "wake", "want")

    def __init__(self, wake: Callable[[], bool]) -> None:
        self.gate: Gate[Any] | None = None
        self.epoch = 0
        self.want = 0
        self.permits = 0
        self.wake = wake
        self.drain: DrainTask[Any] | None = None
        self.blocked: BlockedWait | None = None
        self.stuck = False


class Doze:
    """A thread's sleep until it is woken; a plain lock, since the door's own lock already orders everything."""

    __slots__ = ("_asleep", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._asleep = True

    def wake(self) -> bool:
        """Under the door's lock: end the sleep, now or when it begins."""
        if self._asleep:
            self._asleep = False
            self._lock.release()
        return True

    def sleep(self, seconds: float) -> None:
        """Sleep until woken, or so many seconds."""
        self._lock.acquire(timeout=seconds)

    def renew(self) -> None:
        """Under the door's lock, after a sleep: be ready for the next."""
        self._lock.acquire(blocking=False)
        self._asleep = True


class _Proxy(Waiter):
    """Stands in a partition's own line, among the loop's producers, for those who wait at the door."""

    __slots__ = ("gate",)

    stays = True

    def __init__(self, gate: Gate[Any], want: int) -> None:
        super().__init__(want)
        self.gate = gate

    def notify(self) -> None:
        self.gate.granted(self)


class Gate(Generic[T]):
    """One partition's share of a door."""

    __slots__ = ("credits", "door", "gave_way", "inbox", "line", "owed", "partition", "pause", "proxy", "shared")

    def __init__(self, door: Door[T], partition: Partition[T]) -> None:
        self.door = door
        self.partition = partition
        self.credits: int = 0
        # Where the oldest item makes room, it does so here too, without waiting for the loop.
        self.inbox: MutableSequence[T] = deque(maxlen=partition.capacity) if door.evicts else []
        self.line: deque[Ticket] = deque()
        self.proxy: _Proxy | None = None
        self.shared = False
        """Whether the loop's own producers need places, too, so that the door may not have all of them."""
        self.owed = 0
        """How many places have been granted to those in line and are not used yet: they have to wake up first."""
        self.pause = SHORTEST_PAUSE
        self.gave_way = 0.0

    # -- on the queue's loop -------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Lend the door the free places of the partition; called whenever there are some more."""
        partition = self.partition
        if self.owed and (partition.waiters is not None):
            self._give_way()
        if partition.closed or partition.waiters is not None or self.door.evicts:
            return
        room = partition.room()
        share = room - room // 2 if self.shared and self.door.waits else room
        if share > 0:
            partition.hold(share)
            with self.door.lock:
                self._lend(share)

    def reclaim(self) -> bool:
        """Take unused places back for a producer of the loop; whether there were any."""
        with self.door.lock:
            # Where threads don't wait, a place too many taken from them would be a refusal without need.
            share = self.credits - self.credits // 2 if self.door.waits else min(1, self.credits)
            self.credits -= share
        if not share:
            return False
        self.shared = True
        self.partition.unhold(share)
        return True

    def unused(self) -> int:
        """How many places the door has that nobody has used yet: the partition is not full as long as there are."""
        return self.credits

    def queue_up(self) -> None:
        """Join the partition's own line for those who wait at the door."""
        with self.door.lock:
            wanted = sum(ticket.want for ticket in self.line)
        if not wanted or self.partition.closed:
            return
        if self.proxy is None:
            self.proxy = _Proxy(self, 0)
        stands = bool(self.proxy.want)
        self.proxy.want = wanted
        if not stands:
            self.partition.join(self.proxy)

    def granted(self, proxy: _Proxy) -> None:
        """The partition's line has come to us, or the partition has closed."""
        share = proxy.reserved
        self.partition.use_reserved(proxy, share)
        self.partition.held += share
        with self.door.lock:
            self._lend(share)
            # Some of those for whom it stands may have left since, and others come.
            proxy.want = sum(ticket.want for ticket in self.line)

    def _give_way(self) -> None:
        """Let threads that were granted places run, now and then, while the loop's own producers are in line too.

        A loop that is never idle releases the interpreter's lock only for the moment of a poll, and has it back
        before another thread can wake up; and each such moment begins that thread's wait for its turn anew. Without
        this, threads were left to chance on a busy machine: one item of theirs for hundreds of the loop's.
        """
        now = time.monotonic()
        if HAS_GIL and now - self.gave_way >= PAUSE_SHARE * self.pause:
            time.sleep(self.pause)
            self.gave_way = time.monotonic()
            self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def watch_for_circles(self) -> None:
        """See whether a thread in line is waited for, through others, by those who would have to make room for it."""
        for ticket in tuple(self.line):
            drain = ticket.drain
            if drain is not None and drain.loop is self.door.loop and ticket.blocked is None:
                ticket.blocked = waits.begin(drain, self.partition.needs, partial(self.break_wait, ticket))
                ticket.blocked.break_circles()

    def break_wait(self, ticket: Ticket) -> None:
        """End a wait that nothing else could end."""
        with self.door.lock:
            if ticket.gate is self:
                ticket.stuck = True
                self.leave(ticket)
                ticket.wake()

    # -- under the door's lock -----------------------------------------------------------------------------------

    def unload(self) -> list[T]:
        """What came in since the last time."""
        items = self.inbox if isinstance(self.inbox, list) else list(self.inbox)
        if self.door.evicts:
            self.inbox.clear()
        else:
            self.inbox = []
        return items

    def redeem(self, ticket: Ticket, items: Sequence[T]) -> int:
        """Take in as many items as there are places that the ticket was granted; how many."""
        count = min(ticket.permits, len(items))
        ticket.permits -= count
        self.owed -= count
        self.pause = SHORTEST_PAUSE
        self.inbox.extend(items[:count])
        return count

    def add(self, item: T) -> bool:
        """Take an item in if there is a place for it."""
        if self.credits:
            self.credits -= 1
        elif not self.door.evicts:
            return False
        elif len(self.inbox) == self.partition.capacity:
            self.door.dropped_after += 1
        self.inbox.append(item)
        return True

    def add_many(self, items: list[T] | tuple[T, ...]) -> int:
        """Take in the first so many items as there are places."""
        count = min(self.credits, len(items))
        self.credits -= count
        if self.door.evicts:
            self.door.dropped_after += max(0, len(self.inbox) + len(items) - self.partition.capacity)
            count = len(items)
        self.inbox.extend(items if count == len(items) else items[:count])
        return count

    def _lend(self, share: int) -> None:
        """There are more places for the door's callers; those of a closed door are of no use to anybody."""
        if not self.door.closed:
            self.credits += share
            self.serve()

    def serve(self) -> None:
        """Give credits to the line, first come, first served: so as long as there is a line, there are no credits."""
        while self.line and self.credits:
            ticket = self.line[0]
            share = min(self.credits, ticket.want)
            self.credits -= share
            ticket.want -= share
            ticket.permits += share
            self.owed += share
            if not ticket.want:
                self.line.popleft()
            if not ticket.wake():
                # Its event loop was closed under it: nobody will use these places.
                self.credits += ticket.permits
                self.owed -= ticket.permits
                ticket.permits = 0
                if ticket.want:
                    self.line.popleft()

    def leave(self, ticket: Ticket) -> None:
        """Quit the line; places that were granted and not used go to the next."""
        if ticket.want and ticket in self.line:
            self.line.remove(ticket)
        share, ticket.permits, ticket.want, ticket.gate = ticket.permits, 0, 0, None
        self.owed -= share
        if ticket.blocked is not None:
            waits.finish(ticket.blocked)
            ticket.blocked = None
        self._lend(share)

    def send_away(self) -> None:
        """Let everybody in line leave it and look again."""
        for ticket in tuple(self.line):
            self.leave(ticket)
            ticket.wake()
