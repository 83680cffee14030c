"""The way into a queue from other threads and loops: in bulk, with one wake-up for many items, and an exact bound.

The queue's loop lends the door places in each partition, as `credits`. A producer on any thread that finds a credit
puts its item into the inbox and is done: the item has its place. When the credits are used up it waits in line; as
the worker takes a batch, the loop hands out the room that this made. Everything that both sides touch is guarded by
one lock, so nothing relies on the order of unlocked operations.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from batchqueue_async import forks
from batchqueue_async.config import BufferStrategy
from batchqueue_async.errors import DeadlockError, ForkedError, QueueClosedError
from batchqueue_async.queue.moves import Transit
from batchqueue_async.queue.partition import Waiter
from batchqueue_async.queue.selector import stable_type_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.queue.batch_queue import BatchQueue
    from batchqueue_async.queue.partition import Partition
    from batchqueue_async.queue.placement import Place

T = TypeVar("T")


class Ticket:
    """A producer of another thread or loop in line for places; `wake` makes it look at what it got."""

    __slots__ = ("permits", "wake", "want")

    def __init__(self, want: int, wake: Callable[[], object]) -> None:
        self.want = want
        self.permits = 0
        self.wake = wake


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

    __slots__ = ("credits", "door", "line", "partition", "proxy", "shared")

    def __init__(self, door: Door[T], partition: Partition[T]) -> None:
        self.door = door
        self.partition = partition
        self.credits = 0
        self.line: deque[Ticket] = deque()
        self.proxy: _Proxy | None = None
        self.shared = False
        """Whether the loop's own producers need places, too, so that the door may not have all of them."""

    # -- on the queue's loop -------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Lend the door the free places of the partition; called whenever there are some more."""
        partition = self.partition
        if partition.closed or partition.waiters or partition.permits:
            return
        room = partition.room()
        share = room - room // 2 if self.shared and self.door.waits else room
        if share > 0:
            partition.held += share
            partition.arm()
            with self.door.lock:
                self.credits += share
                self.serve()

    def reclaim(self) -> bool:
        """Take unused places back for a producer of the loop; whether there were any."""
        self.shared = True
        with self.door.lock:
            # Where threads don't wait, a place too many taken from them would be a refusal without need.
            share = self.credits - self.credits // 2 if self.door.waits else min(1, self.credits)
            self.credits -= share
        self.partition.held -= share
        self.partition.arm()
        return share > 0

    def queue_up(self) -> None:
        """Join the partition's own line for those who wait at the door."""
        with self.door.lock:
            wanted = sum(ticket.want for ticket in self.line)
        if not wanted or self.partition.closed:
            return
        if self.proxy is not None and self.proxy.want:
            self.proxy.want = wanted
            return
        self.proxy = _Proxy(self, wanted)
        self.partition.join(self.proxy)

    def granted(self, proxy: _Proxy) -> None:
        """The partition's line has come to us, or the partition has closed."""
        share = proxy.permits
        self.partition.use_permits(proxy, share)
        self.partition.held += share
        with self.door.lock:
            self.credits += share
            self.serve()

    # -- under the door's lock -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Give credits to the line, first come, first served."""
        while self.line and self.credits:
            ticket = self.line[0]
            share = min(self.credits, ticket.want)
            self.credits -= share
            ticket.want -= share
            ticket.permits += share
            if not ticket.want:
                self.line.popleft()
            ticket.wake()

    def leave(self, ticket: Ticket) -> None:
        """Quit the line; places that were granted and not used go to the next."""
        self.credits += ticket.permits
        ticket.permits = 0
        if ticket.want and ticket in self.line:
            self.line.remove(ticket)
        ticket.want = 0
        self.serve()


class Door(Generic[T]):
    """The inbox of one queue for everybody who is not on its loop."""

    def __init__(self, queue: BatchQueue[T]) -> None:
        self.queue = queue
        self.loop = queue.loop
        self.lock = threading.RLock()
        self.inbox: list[T] = []
        self.closed = False
        self.forked = False
        self.refused = 0
        self.dropped_before = 0
        self.dropped_after = 0
        self.attached = threading.Event()
        self.waits = queue.config.strategy is BufferStrategy.BLOCKING
        self._evicts = queue.config.strategy is BufferStrategy.DROP_OLDEST
        self._gates: list[Gate[T]] = []
        self._gate_of_type: dict[type, Gate[T]] = {}
        self._gates_of_inbox: list[Gate[T]] = []
        self._only: Gate[T] | None = None
        self._waking = False
        forks.watch(self)

    # -- on any thread -------------------------------------------------------------------------------------------

    def put(self, item: T) -> bool:
        """Put one item in if it has a place at once."""
        with self.lock:
            gate = self._only
            if gate is None:
                if not self._put_by_gate(item):
                    return False
            elif gate.credits and not gate.line:
                gate.credits -= 1
                self.inbox.append(item)
            else:
                self.check()
                return False
            if self._waking:
                return True
            self._waking = True
        self._wake()
        return True

    def put_many(self, items: Sequence[T]) -> int:
        """Put in as many items as have places at once: the first so many."""
        with self.lock:
            gate = self._only
            if gate is None or gate.line:
                count = 0
                while count < len(items) and self.put(items[count]):
                    count += 1
                return count
            count = min(gate.credits, len(items))
            gate.credits -= count
            self.inbox.extend(items if count == len(items) else items[:count])
            if self._waking or not count:
                return count
            self._waking = True
        self._wake()
        return count

    def _put_by_gate(self, item: T) -> bool:
        """Under the lock: where there are several partitions, or the oldest item makes room."""
        self.check()
        if self.closed:
            return False
        if self._evicts:
            if len(self.inbox) >= self.queue.config.buffer_size:
                del self.inbox[0]
                self.dropped_after += 1
            self.inbox.append(item)
            return True
        gate = self._gate_for(item)
        if gate is None or not gate.credits or gate.line:
            return False
        gate.credits -= 1
        self.inbox.append(item)
        self._gates_of_inbox.append(gate)
        return True

    def enlist(self, item: T, want: int, wake: Callable[[], object]) -> tuple[Gate[T], Ticket] | None:
        """Join the line for the item's partition; None when the door is closed."""
        with self.lock:
            self.check()
            gate = self._only or self._gate_for(item)
            if self.closed or gate is None:
                return None
            ticket = Ticket(want, wake)
            gate.line.append(ticket)
            gate.serve()  # places may have come free since the caller looked
            wake_loop = not self._waking
            self._waking = True
        if wake_loop:
            self._wake()
        return gate, ticket

    def redeem(self, gate: Gate[T], ticket: Ticket, items: Sequence[T]) -> int:
        """Put items into the places that the ticket was granted; how many."""
        with self.lock:
            if self.closed:
                return 0
            count = min(ticket.permits, len(items))
            ticket.permits -= count
            self.inbox.extend(items[:count])
            if self._only is None:
                self._gates_of_inbox.extend([gate] * count)
            wake_loop = not self._waking and count > 0
            self._waking = self._waking or wake_loop
        if wake_loop:
            self._wake()
        return count

    def refuse(self, count: int) -> None:
        """Count items that were turned away."""
        with self.lock:
            if self.queue.config.strategy is BufferStrategy.DROP_NEWEST and not self.closed:
                self.dropped_before += count
            else:
                self.refused += count

    def check(self) -> None:
        """Raise in a forked child."""
        if self.forked:
            raise ForkedError(
                f"queue {self.queue.name!r} was made before this process was forked, and its loop's thread did not "
                "come along; make a new bridge in the child"
            )

    def _gate_for(self, item: T) -> Gate[T] | None:
        gates = self._gates
        if not gates:
            return None
        placement = self.queue.placement
        if placement.by_type is None:
            return gates[placement.index_of(item)]
        kind: Any = type(item)
        gate = self._gate_of_type.get(kind)
        if gate is None:
            place = placement.by_type.get(kind)
            index = stable_type_hash(kind) % len(gates) if place is None else place.line.index
            gate = self._gate_of_type[kind] = gates[index]
        return gate

    def _wake(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self.collect)
        except RuntimeError:
            with self.lock:
                self._waking = False
                self.close_for_all()
            raise QueueClosedError(
                f"queue {self.queue.name!r}: its event loop has ended; shut the queue down before the loop"
            ) from None

    # -- on the queue's loop -------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Meet the partitions, and borrow places."""
        self.meet_partitions()
        self.attached.set()
        self.collect()
        if self.queue.closed:
            self.close()

    def meet_partitions(self) -> None:
        """Get to know new partitions and routes, and borrow places."""
        if self._evicts:
            return
        placement = self.queue.placement
        new = [Gate(self, partition) for partition in placement.partitions[len(self._gates) :]]
        with self.lock:
            self._gates += new
            self._gate_of_type.clear()
            self._only = self._gates[0] if placement.only is not None else None
        for gate in new:
            gate.partition.gate = gate
            gate.refill()

    def collect(self) -> None:
        """Move the inbox into the partitions, where every item has its place already."""
        with self.lock:
            self._waking = False
            items, self.inbox = self.inbox, []
            gates, self._gates_of_inbox = self._gates_of_inbox, []
            waiting = [gate for gate in self._gates if gate.line]
            self._hand_in_counts()
        if items:
            if self._only is not None:
                line = self._only.partition
                line.held -= len(items)
                line.tail.extend(items)
                line.touch()
            elif self._evicts:
                for item in items:
                    self.queue.force(item)
            else:
                self._spread(items, gates)
        for gate in waiting:
            gate.refill()
            gate.queue_up()

    def _spread(self, items: list[T], gates: list[Gate[T]]) -> None:
        placement = self.queue.placement
        touched: dict[Place[T], None] = {}
        for item, gate in zip(items, gates, strict=True):
            place = placement.place(item)
            if isinstance(place, Transit):
                place.items.append(item)  # the place that the gate held stays held, for the transit
                if place.line is not gate.partition:
                    gate.partition.held -= 1
                    place.line.held += 1
            else:
                # Where a selector that is not type_hash moves to more partitions, the place may be in another one
                # than the credit was for; it then stands above the bound until the next batch.
                gate.partition.held -= 1
                place.tail.append(item)
                touched[place] = None
        for place in touched:
            cast("Partition[T]", place).touch()

    def _hand_in_counts(self) -> None:
        tally = self.queue.tally
        tally.refused += self.refused
        tally.dropped_before += self.dropped_before
        tally.dropped_after += self.dropped_after
        tally.dropped_at_door += self.dropped_after
        self.refused = self.dropped_before = self.dropped_after = 0

    def close(self) -> None:
        """Take in what is in the inbox, then nothing more; everybody in line is sent away."""
        with self.lock:
            self.collect()
            self.close_for_all()
        for gate in self._gates:
            gate.partition.gate = None

    def give_back(self) -> list[Any]:
        """What came in and the queue's loop, which has ended, has not seen; nothing comes in any more."""
        with self.lock:
            self.close_for_all()
            items: list[Any] = list(self.inbox)
            self.inbox = []
        return items

    def close_for_all(self) -> None:
        """Under the lock: nothing comes in any more."""
        self.closed = True
        for gate in self._gates:
            gate.partition.held -= gate.credits
            gate.credits = 0
            tickets, gate.line = gate.line, deque()
            for ticket in tickets:
                ticket.wake()

    def after_fork(self) -> None:
        """In a forked child, whose other threads are gone: a lock that one of them held would stay locked."""
        self.lock = threading.RLock()
        self.forked = True
        self.closed = True
        self._only = None

    def deadlock_here(self, gate: Gate[T]) -> DeadlockError | None:
        """The error for a wait whose own caller would have to end it, or None."""
        if self.queue.on_own_thread():
            return DeadlockError(
                f"queue {self.queue.name!r}: a call that has to wait came from the thread of the queue's own loop, "
                "which it would stop; await the queue's own methods there"
            )
        if gate.partition.owner is not None and gate.partition.owner is self.queue.round_here():
            return DeadlockError(
                f"queue {self.queue.name!r}: a handler waits for room in partition {gate.partition.index}, which is "
                "drained only after that handler returns; use produce with timeout=0, or another queue"
            )
        return None
