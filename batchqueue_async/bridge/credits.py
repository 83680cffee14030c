"""One partition's share of a queue's thread inbox: the places it was lent, what came in, and who waits for a place.

The queue's loop lends places as credits (credit-based flow control): a producer on any thread that finds one puts its
item in and is done, because the item has its place. When the credits are used up producers wait in line, and as the
drain task takes a batch, the loop lends the room that this made.

What is true whenever nobody holds the inbox's lock:

* `lent == free + owed + len(items)`: a place that was lent is unused, promised to somebody who waits, or taken;
* `owed` is the sum of the permits of those who wait;
* while anybody stands in line, `free` is 0.

Everything here is touched only under the inbox's lock, except what says that it belongs to the loop. A thread can be
interrupted between any two steps, by Ctrl-C or by an exception that another thread throws into it, so the sums are not
trusted to stay right: `balance` counts them anew from `lent`, which the loop alone changes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async._native import Share
from batchqueue_async._support.locked import guarded
from batchqueue_async.bridge.held_loops import held_loops
from batchqueue_async.queue.waiters import Waiter

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, MutableSequence, Sequence

    from batchqueue_async.bridge.inbox import ThreadInbox
    from batchqueue_async.queue.deadlock import Needs
    from batchqueue_async.queue.partition import Partition

T = TypeVar("T")

HAS_GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether threads take turns at running Python."""

SHORTEST_PAUSE = 50e-6
LONGEST_PAUSE = 0.002
"""How long a loop pauses for threads to run, in seconds: longer each time that nobody came."""
PAUSE_SHARE = 0.1
"""The part of a loop's time that may go into such pauses."""


class ThreadWaiter:
    """A producer of another thread or loop that waits for places.

    Only the producer's own frame keeps it: the waiter of a thread that was torn out of its wait is simply gone. Torn a
    second time, out of the cleaning up after the first, a frame may be part of a circle, which the collector opens.

    Attributes:
        wake: makes the producer look at what it got; says whether there still is one.
        share: where it stands in line; None before, and again when a growing queue sends it to look for its new place.
        epoch: which of the inbox's routings led it there.
        want: how many places it still waits for.
        permits: how many it was granted and has not used.
        stuck: whether the wait was found to be one of a circle that nothing can open.
    """

    __slots__ = ("__weakref__", "epoch", "permits", "share", "stuck", "wake", "want")

    def __init__(self, wake: Callable[[], bool]) -> None:
        self.share: PartitionCredits[Any] | None = None
        self.epoch = 0
        self.want = 0
        self.permits = 0
        self.wake = wake
        self.stuck = False

    def needs(self) -> Needs:
        """Whom the producer needs in order to go on: nobody when it is about to run. On any thread."""
        share = self.share
        return [] if share is None or self.permits else share.needs()


class Parker:
    """A thread's sleep until it is woken; a plain lock, since the inbox's own lock already orders everything."""

    __slots__ = ("_asleep", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._asleep = True

    def wake(self) -> bool:
        """Under the inbox's lock: end the sleep, now or when it begins."""
        if self._asleep:
            self._asleep = False
            self._lock.release()
        return True

    def sleep(self, seconds: float) -> None:
        """Sleep until woken, `seconds` at the most."""
        self._lock.acquire(timeout=seconds)

    def renew(self) -> None:
        """Under the inbox's lock, after a sleep: be ready for the next."""
        self._lock.acquire(blocking=False)
        self._asleep = True


class LoopPause:
    """The moments in which one event loop lets threads run that it has granted places.

    A loop that is never idle releases the interpreter's lock only for the moment of a poll, and has it back before
    another thread can wake up; and each such moment begins that thread's wait for its turn anew. Without this, threads
    were left to chance on a busy machine: one item of theirs for hundreds of the loop's.

    All queues of a loop share one, so that together they hold it up for `PAUSE_SHARE` of the time at the most: a pause
    is followed by as much work as its real length asks for, which is longer than what was asked of the clock.
    """

    __slots__ = ("_next", "length")

    def __init__(self) -> None:
        self.length = SHORTEST_PAUSE
        self._next = 0.0

    def take(self) -> None:
        """Pause, if the last pause is long enough ago."""
        begun = time.monotonic()
        if not HAS_GIL or begun < self._next:
            return
        time.sleep(self.length)
        ended = time.monotonic()
        self._next = ended + (ended - begun) * (1 / PAUSE_SHARE - 1)
        self.length = min(2 * self.length, LONGEST_PAUSE)

    def worked(self) -> None:
        """A thread came: begin with short pauses again."""
        self.length = SHORTEST_PAUSE


_pauses: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopPause] = weakref.WeakKeyDictionary()
_pauses_lock = threading.RLock()


def pause_of(loop: asyncio.AbstractEventLoop) -> LoopPause:
    """The pauses of a loop, the same for all its queues."""
    return guarded(_pauses_lock, _pauses.setdefault, loop, LoopPause())


class _LoopStandIn(Waiter):
    """Stands in a partition's own line, among the loop's producers, for those who wait at the inbox."""

    __slots__ = ("share",)

    stays = True

    def __init__(self, share: PartitionCredits[Any]) -> None:
        super().__init__(0)
        self.share = share

    def notify(self) -> None:
        self.share.granted(self)

    def stand_for(self, wanted: int) -> None:
        """So many places are wanted by now: some of those for whom it stands may have left, and others come.

        Those who came since its turn began wait for its next turn: else it would never leave the head of the line,
        where threads come as fast as they are served, and the loop's own producers would wait for ever.
        """
        self.want = min(self.want, wanted) or wanted


class PartitionCredits(Share, Generic[T]):
    """One partition's share of a thread inbox; see the invariants at the top of the module.

    Attributes:
        free: places that a producer may take at once; the hot path counts them down by itself.
        items: what came in and the loop has not moved into the partition; the hot path appends by itself.
        batch: how many these were the last time; the hot path makes room for as many at once.
        stands: the loop's: whether it stands in the partition's own line for those who wait at the inbox.
    """

    __slots__ = ("_lent", "_owed", "_shared", "_stand_in", "_waiters", "inbox", "line", "partition", "stands")

    def __init__(self, inbox: ThreadInbox[T], partition: Partition[T]) -> None:
        self.inbox = inbox
        self.partition = partition
        self.free = 0
        self.batch = 0
        # Where the oldest item makes room, it does so here too, without waiting for the loop.
        self.items: MutableSequence[T] = deque(maxlen=partition.capacity) if inbox.evicts else []
        self.line: deque[weakref.ref[ThreadWaiter]] = deque()
        self._waiters: weakref.WeakSet[ThreadWaiter] = weakref.WeakSet()
        """All in line, and all who were granted places and have not used them."""
        self._lent = 0
        self._owed = 0
        self._stand_in: _LoopStandIn | None = None
        self.stands = False
        self._shared = False
        """The loop's: whether its own producers need places too, so that the inbox may not have all of them."""

    # -- on the queue's loop -------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Lend the inbox the free places of the partition; called whenever there are some more."""
        partition = self.partition
        if self._owed and partition.waiters is not None:
            self.inbox.pause.take()
        if partition.closed or partition.waiters is not None or self.inbox.evicts:
            return
        room = partition.room()
        places = room - room // 2 if self._shared and self.inbox.waits else room
        if places > 0:
            partition.hold(places)
            self.inbox.guarded(self._lend, places)

    def reclaim(self) -> bool:
        """Take unused places back for whoever stands in the partition's line; whether there were any."""
        places = self.inbox.guarded(self._take_back, self.inbox.is_held_here())
        if not places:
            return False
        # Our own stand-in may be there for threads that have left since: it hands all of them back.
        line = self.partition.waiters
        if line is None or not all(each.stays for each in line.waiting):
            self._shared = True
        self.partition.unhold(places)
        return True

    def _take_back(self, inside: bool) -> int:  # noqa: FBT001 - what `is_held_here` said, by place: a hot path
        if not (self.free or inside):
            self.balance()
        # Where threads don't wait, a place too many taken from them would be a refusal without need.
        places = self.free - self.free // 2 if self.inbox.waits else min(1, self.free)
        self._lent -= places
        self.free -= places
        return places

    def unused(self) -> int:
        """How many places the inbox has that nobody has used yet: the partition is not full as long as there are."""
        return self.free

    def queue_up(self) -> None:
        """Stand in the partition's own line for those who wait at the inbox, for as long as there are any."""
        wanted = self.inbox.guarded(self._wanted)
        if self.partition.closed:
            return
        if not wanted:
            if self.stands and self._stand_in is not None:
                self.stands = False
                self.partition.leave(self._stand_in)
            return
        if self._stand_in is None:
            self._stand_in = _LoopStandIn(self)
        self._stand_in.stand_for(wanted)
        if not self.stands:
            self.stands = True
            self.partition.join(self._stand_in)

    def granted(self, stand_in: _LoopStandIn) -> None:
        """The partition's line has come to us, or the partition has closed."""
        places = stand_in.reserved
        self.partition.use_reserved(stand_in, places)
        self.partition.hold(places)
        self.inbox.guarded(self._lend, places)
        stand_in.stand_for(self.inbox.guarded(self._wanted))
        self.stands = bool(stand_in.want)

    def unload(self) -> list[T]:
        """Under the lock: what came in since the last time; its places are the partition's again."""
        items = self.items if isinstance(self.items, list) else list(self.items)
        if self.inbox.evicts:
            self.items.clear()
        else:
            self._lent -= len(items)
            self.batch = len(items)
            self.items = []
        return items

    # -- on any thread -------------------------------------------------------------------------------------------

    def needs(self) -> Needs:
        """Whom a producer that waits here needs."""
        if self.partition.closed or self.free > 0:
            return []
        if self.partition.room() > 0:
            # The loop is about to lend it, unless a handler's call through a bridge holds the loop up.
            return held_loops.needs(self.inbox.loop)
        return self.partition.needs()

    # -- under the inbox's lock ----------------------------------------------------------------------------------
    # The steps of each sum stand together, with no call between them: a thread is interrupted only after calls.

    def add(self, item: T) -> bool:
        """Take an item in if there is a place for it."""
        if self.inbox.evicts:
            if len(self.items) == self.partition.capacity:
                self.inbox.dropped_after += 1
        elif self.free <= 0:
            return False
        else:
            self.free -= 1
        self.items.append(item)
        return True

    def add_many(self, items: Sequence[T]) -> int:
        """Take in the first of the items, as many as there are places."""
        count = len(items)
        if self.inbox.evicts:
            self.inbox.dropped_after += max(0, len(self.items) + count - self.partition.capacity)
        elif self.free < count:
            count = max(0, self.free)
            items = items[:count]
        if not self.inbox.evicts:
            self.free -= count
        self.items.extend(items)
        return count

    def join(self, waiter: ThreadWaiter, want: int) -> None:
        """Stand in line for places, behind all who do; there may be some already."""
        waiter.share, waiter.want = self, want
        self._waiters.add(waiter)
        self.line.append(weakref.ref(waiter))
        self.serve()

    def fill(self, waiter: ThreadWaiter, items: Sequence[T]) -> int:
        """Take in as many items as the waiter was granted places; how many."""
        count = min(waiter.permits, len(items))
        taken = items[:count]
        waiter.permits -= count
        self._owed -= count
        self.items.extend(taken)
        if count:
            self.inbox.pause.worked()
        return count

    def leave(self, waiter: ThreadWaiter) -> None:
        """Quit the line; places that were granted and not used go to the next."""
        if waiter.want:
            self._remove(waiter)
        places = waiter.permits
        waiter.permits = waiter.want = 0
        waiter.share = None
        self._owed -= places
        self.free += places
        self._waiters.discard(waiter)
        self.serve()

    def in_vain(self) -> bool:
        """Whether it stands in the partition's line, which is in the way of others there, and nobody in its own."""
        return self.stands and not self._in_line()

    def send_away(self) -> None:
        """Let everybody who waits stop it and look again."""
        for waiter in tuple(self._waiters):
            self.leave(waiter)
            waiter.wake()

    def close(self) -> None:
        """Take nothing in any more."""
        self.send_away()
        self.free = 0

    def balance(self) -> None:
        """Count the places anew, so that none stays with a call that was cut off; not inside another call here."""
        if self.inbox.closed or self.inbox.evicts:
            return
        if not self._owed and self._lent == self.free + len(self.items):
            return
        self._owed = sum(waiter.permits for waiter in self._waiters)
        self.free = self._lent - self._owed - len(self.items)
        self.serve()

    def serve(self) -> None:
        """Give free places to the line, first come, first served: so as long as there is a line, none is free."""
        while self.line and self.free > 0:
            waiter = self.line[0]()
            if waiter is None or not waiter.want:
                self.line.popleft()  # its thread was torn out of its wait, or out of the lines below
                continue
            places = min(self.free, waiter.want)
            self.free -= places
            waiter.want -= places
            waiter.permits += places
            self._owed += places
            if not waiter.want:
                self.line.popleft()
            if not waiter.wake():
                # Its event loop was closed under it: nobody will use these places.
                if waiter.want:
                    self.line.popleft()
                places = waiter.permits
                waiter.permits = waiter.want = 0
                self._owed -= places
                self.free += places

    def waiting(self) -> int:
        """How many producers stand in line."""
        return len(self._in_line())

    def _in_line(self) -> list[ThreadWaiter]:
        found = [reference() for reference in self.line]
        return [waiter for waiter in found if waiter is not None and waiter.want]

    def _remove(self, waiter: ThreadWaiter) -> None:
        with contextlib.suppress(ValueError):  # torn out of `join`, it may not stand in the line yet
            self.line.remove(weakref.ref(waiter))

    def _wanted(self) -> int:
        return sum(waiter.want for waiter in self._in_line())

    def _lend(self, places: int) -> None:
        """There are more places for the inbox's callers; those of a closed one are of no use to anybody."""
        if not self.inbox.closed:
            self._lent += places
            self.free += places
            self.serve()
