"""One bounded partition: a first-in-first-out buffer that producers append to and one drain task takes from in bulk.

The state machine never awaits. A producer's fast path uses only `fast_slots` and `tail`: `fast_slots` counts the
places down that may be filled without a further look, and appending to `tail` is all there is to do. In Python an
`itertools.repeat` is the cheapest countdown there is: one step of it costs a third of comparing a length with a limit.
The compiled hot path has a `Countdown` of its own in its place, which counts the same.

Everything unusual (a partition nobody watches yet, a full or closed one, waiting producers, a batch that lingers)
leaves no fast slots, so that the producer takes the slow path. `rearm` is the one place that decides how many there
may be.

Items have no numbers until their order matters, as they are taken out or waited for: then the buffer is sealed, and
they stand in runs, oldest first.

What belongs together, between any two calls:

- `capacity >= qsize() + held + reserved`: every place is free, filled, held for what comes from elsewhere (items that
  are moving here, places lent to the inbox of other threads), or reserved for a waiter. Fast slots are free places.
- There are fast slots only while the partition is open, its drain task knows of its items (`listed`), and everybody who
  waits has a place reserved: so no producer takes another's place.
- The items with numbers from `removed` on are inside. Those from `flight_start` on, `in_flight` of them, are with the
  drain task. Everything below `finished` has an outcome.
- `waiters` is None when nobody waits for a place and nothing is reserved, `ranges` when nobody waits for an outcome.
- A lane whose type has been quiet is asleep: it is empty, has no fast slots, and is not in `lanes`. So what a round
  costs goes by the types that come in, not by those that ever came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async._native import NO_SLOTS, Countdown, LaneFields, PartitionFields, accelerated, put_together
from batchqueue_async.errors import ItemDroppedError
from batchqueue_async.queue.completion import RangeQueue
from batchqueue_async.queue.waiters import Waiter, WaiterQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from batchqueue_async.queue.byte_room import ByteRoom
    from batchqueue_async.queue.completion import CompletionWait, SequenceRange
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.migration import Migration
    from batchqueue_async.queue.ports import PartitionCredits

T = TypeVar("T")

QUIET_LANES = 8
"""Lanes that may be awake in vain, next to two for each that had items: beyond, those without items go to sleep."""


class Lane(LaneFields, Generic[T]):
    """The items of one type in a partition: kept by type as they come, they need not be sorted as they go."""

    __slots__ = ()

    def __init__(self, kind: type, partition: Partition[T]) -> None:
        self.kind = kind
        self.partition = partition
        self.tail: list[T] = []
        self.fast_slots = NO_SLOTS
        self.asleep = True

    def offer(self, item: T) -> bool:
        """Take an item in if the partition has a free place and nobody waits for it."""
        if self.asleep:
            self.partition.wake_lane(self)
            for _ in self.fast_slots:
                self.tail.append(item)
                return True
        return self.partition.offer(item, self)

    def fill(self, waiter: Waiter, items: Collection[T]) -> None:
        """Put items into the places that were reserved for the waiter."""
        self.partition.fill(waiter, items, self)

    def evict(self) -> T:
        """Remove the oldest waiting item of the partition to make room."""
        return self.partition.evict()

    def watch(self, wait: CompletionWait, count: int) -> None:
        """Let a caller wait for the last `count` items, put in right after `order`."""
        self.partition.watch(wait, count)


class Partition(PartitionFields, Generic[T]):
    """A bounded asyncio queue with a bulk `take`; unlike those of an `asyncio.Queue`, waiting putters lose no place.

    Example:
        >>> partition = Partition[str](0, capacity=2)
        >>> partition.put_nowait("a"), partition.put_nowait("b")
        (None, None)
        >>> partition.take(10)
        ['a', 'b']
    """

    __slots__ = ("_position", "_sealed_count", "arriving", "crowded", "getters", "index", "owner")

    def __init__(
        self,
        index: int,
        capacity: int,
        on_ready: Callable[[Partition[T]], float] | None = None,
        *,
        byte_room: ByteRoom[T] | None = None,
        crowded: set[Partition[T]] | None = None,
    ) -> None:
        self.index = index
        # -- what is inside
        self.tail: list[T] = []
        self.lanes: dict[Lane[T], None] | None = None
        """Where items are kept by type instead of in `tail`: the lanes that are awake."""
        # How many items are in lanes: so many, and as many as were put into fast slots since.
        self._in_lanes: int = 0
        self._armed: int = 0
        # Items stand in the order of their numbers once they are sealed: in runs, from `_position` on in the first.
        self._sealed: deque[tuple[type | None, list[Any]]] | None = None
        self._sealed_count: int = 0
        self._position: int = 0
        self.removed: int = 0
        """How many items have left the buffer, taken or evicted: the sequence number of the oldest one inside."""
        # -- who may come in
        self.capacity = capacity
        self.byte_room = byte_room
        """The bound by bytes, where there is one: then there are no fast slots and no lanes."""
        self.fast_slots = NO_SLOTS
        self.closed = False
        self.held = 0
        """Places kept for items of types that are moving here, and for the inbox of other threads."""
        self.waiters: WaiterQueue | None = None
        self.crowded = crowded
        """Those of the queue's partitions where somebody waits: each enters and leaves by itself."""
        self.credits: PartitionCredits | None = None
        """The share of this partition that the inbox of other threads has."""
        # -- who takes out
        self.on_ready = on_ready
        """Told when there are items, or as many more as a lingering batch was waiting for."""
        self.listed = False
        """Whether the drain task (or `on_ready`) knows that there are items."""
        self.linger_step: int | None = None
        self.owner: DrainTask[T] | None = None
        self.next_owner: DrainTask[T] | None = None
        self.in_flight = 0
        """How many items its drain task has taken and not finished; the first has the number `flight_start`."""
        self.flight_start = 0
        self.since = 0.0
        """No item inside is older than this."""
        self.marks: list[tuple[int, float]] | None = None
        # -- who has to know what is finished
        self.ranges: RangeQueue | None = None
        self.arriving: list[Migration[T]] | None = None
        """What moves here; `held` counts its items."""
        self.leaving: list[Migration[T]] | None = None
        """Types or keys that move to other partitions as soon as what is here of them is finished."""
        self.getters: deque[asyncio.Future[None]] | None = None

    # -- what is inside ------------------------------------------------------------------------------------------

    def qsize(self) -> int:
        """How many items wait inside."""
        count = self._sealed_count + len(self.tail)
        if self.lanes is not None:
            count += self._in_lanes + self._armed - self.fast_slots.__length_hint__()
        return count

    def items(self) -> list[T]:
        """The items that wait inside: those with a number first, oldest first."""
        numbered = [item for _, run in self._sealed or () for item in run][self._position :]
        return [*numbered, *self.tail, *(item for lane in self.lanes or () for item in lane.tail)]

    def empty(self) -> bool:
        """Whether no item waits inside."""
        return not self.qsize()

    @property
    def accepted(self) -> int:
        """How many items have ever come in."""
        return self.removed + self.qsize()

    @property
    def finished(self) -> int:
        """Every item with a sequence number below this one has been handled, failed or been dropped."""
        return self.flight_start if self.in_flight else self.removed

    @property
    def idle(self) -> bool:
        """Whether everything that ever came in is finished."""
        return not self.in_flight and not self.qsize()

    @property
    def partition(self) -> Partition[T]:
        """Where a producer waits for room: here; for a type that is moving, at its new partition."""
        return self

    def lane(self, kind: type) -> Lane[T]:
        """Keep the items of a type by themselves from now on."""
        lane = Lane(kind, self)
        if self.lanes is None:
            self.lanes = {}
            self._armed = self.fast_slots.__length_hint__()
        self.wake_lane(lane)
        return lane

    def wake_lane(self, lane: Lane[T]) -> None:
        """Let items come into a lane again."""
        if self.lanes is not None:
            self.lanes[lane] = None
            lane.asleep = False
            lane.fast_slots = self.fast_slots

    def close_lane(self, lane: Lane[T]) -> None:
        """The items of a type come in elsewhere from now on."""
        self.seal()
        self._put_to_sleep(lane)

    def kinds(self) -> list[type] | None:
        """The types of the items inside, where they are kept by type; None where any type may be."""
        return None if self.lanes is None else [lane.kind for lane in self.lanes]

    def close_lanes(self) -> None:
        """The same for every type."""
        self.order()
        for lane in list(self.lanes or ()):
            self._put_to_sleep(lane)

    def _put_to_sleep(self, lane: Lane[T]) -> None:
        if self.lanes is not None and not lane.asleep:
            del self.lanes[lane]
            lane.asleep = True
            lane.fast_slots = NO_SLOTS

    def order(self) -> None:
        """Let what comes in later come after what is inside, whatever its type."""
        if self.lanes is not None:
            self.seal()

    def seal(self) -> None:
        """Give every item inside its number. The countdown of places goes on: as many are filled as before."""
        runs = self._open_runs()
        if runs:
            if self._sealed is None:
                self._sealed = deque()
            for run in runs:
                self._sealed.append(run)
                self._sealed_count += len(run[1])

    def _open_runs(self) -> list[tuple[type | None, list[T]]]:
        """Take out what is not sealed."""
        runs: list[tuple[type | None, list[T]]] = []
        if self.tail:
            runs.append((None, self.tail))
            self.tail = []
        lanes = self.lanes
        if lanes is not None:
            self._in_lanes = 0
            self._armed = self.fast_slots.__length_hint__()
            for lane in lanes:
                if lane.tail:
                    runs.append((lane.kind, lane.tail))
                    lane.tail = []
            if len(lanes) > QUIET_LANES + 3 * len(runs):
                busy = {id(kind) for kind, _ in runs}
                for lane in [lane for lane in lanes if id(lane.kind) not in busy]:
                    self._put_to_sleep(lane)
        return runs

    def _all_sealed(self) -> list[tuple[type | None, list[T]]]:
        runs = list(self._sealed or ())
        if self._position:
            runs[0] = (runs[0][0], runs[0][1][self._position :])
        self._sealed = None
        self._sealed_count = self._position = 0
        return runs

    def _remove(self, most: int) -> list[tuple[type | None, list[T]]]:
        self.seal()
        runs: list[tuple[type | None, list[T]]] = []
        while most and self._sealed:
            kind, run = self._sealed[0]
            start, end = self._position, min(self._position + most, len(run))
            if end < len(run):
                taken = run[start:end]
                # Taken places let go of their items at once; the list itself goes when it is used up.
                gone: list[Any] = [None] * len(taken)
                run[start:end] = gone
                self._position = end
            else:
                taken = run[start:] if start else run
                self._sealed.popleft()
                self._position = 0
            runs.append((kind, taken))
            most -= len(taken)
            self._sealed_count -= len(taken)
            self.removed += len(taken)
            if self.byte_room is not None:
                self.byte_room.take(len(taken))
        return runs

    # -- who may come in -----------------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        """How many places are reserved for waiters and not filled yet."""
        waiters = self.waiters  # read once: other threads ask too
        return 0 if waiters is None else waiters.reserved

    @property
    def contended(self) -> bool:
        """Whether somebody waits for a place who has none reserved yet, and so must not be passed."""
        return self.waiters is not None and bool(self.waiters.waiting)

    def room(self) -> int:
        """How many places are neither filled nor promised."""
        return self.capacity - self.qsize() - self.reserved - self.held

    def full(self) -> bool:
        """Whether a further item would be refused or have to wait; by bytes, whether one had to."""
        if self.byte_room is not None and (self.byte_room.crowded or self.byte_room.free <= 0):
            return True
        unused = 0 if self.credits is None else self.credits.unused()
        return self.contended or self.room() + unused <= 0

    def make_room(self, count: int) -> bool:
        """Whether there are so many free places, once the inbox has given back what it does not use."""
        while self.room() < count:
            if self.credits is None or not self.credits.reclaim():
                return False
        return True

    def rearm(self) -> None:
        """Set how many places the producers' fast path may fill."""
        waiters = self.waiters
        if self.closed or not self.listed or self.byte_room is not None or (waiters is not None and waiters.waiting):
            self._set_fast_slots(NO_SLOTS)
            return
        room = self.capacity - self.qsize() - self.held
        if waiters is not None:
            room -= waiters.reserved
        if self.linger_step is not None:
            # The item that fills the partition, or may fill the batch, takes the slow path: its drain has to know.
            room = min(room, self.linger_step) - 1
        self._set_fast_slots(Countdown(None, max(0, room)))

    def _set_fast_slots(self, slots: Countdown[None]) -> None:
        if self.lanes is not None and slots is not self.fast_slots:
            self._in_lanes += self._armed - self.fast_slots.__length_hint__()
            self._armed = slots.__length_hint__()
            for lane in self.lanes:
                lane.fast_slots = slots  # one countdown for all of them
        self.fast_slots = slots

    def hold(self, count: int) -> None:
        """Keep free places for items that come from elsewhere: the inbox's, or those of types that move here."""
        self.held += count
        self.rearm()

    def unhold(self, count: int) -> None:
        """Places that were held are free again, or about to be filled."""
        self.held -= count
        self.rearm()

    def offer(self, item: T, into: Lane[T] | None = None) -> bool:
        """Take an item in if there is a free place and nobody waits for it."""
        if self.closed or (self.waiters is not None and self.contended):
            return False
        if self.byte_room is not None:
            return self._offer_weighed((item,), self.byte_room)
        if self.listed or self.on_ready is None or self.waiters is not None or self.held >= self.capacity:
            if not self.make_room(1):
                return False
            self.put_in((item,), into)
            return True
        if into is None:
            self.tail.append(item)
        else:
            into.tail.append(item)
            self._in_lanes += 1
        # The usual case of `announce`, written out: the first item into an empty partition.
        self.listed = True
        self.since = self.on_ready(self)
        if self.linger_step is None:
            self._set_fast_slots(Countdown(None, self.capacity - self.held - 1))
        else:
            self.rearm()
        return True

    def offer_many(self, items: Sequence[T], into: Lane[T] | None = None) -> bool:
        """Take all items in, in bulk, if there is room for all and nobody waits; else none."""
        if accelerated and put_together(into or self, items):
            return True
        if self.closed or (self.waiters is not None and self.contended) or not self.make_room(len(items)):
            return False
        if self.byte_room is not None:
            return self._offer_weighed(items, self.byte_room)
        self.put_in(items, into)
        return True

    def _offer_weighed(self, items: Sequence[T], byte_room: ByteRoom[T]) -> bool:
        sizes = byte_room.weigh(items)
        if not self.has_room(sizes):
            return False
        self._put_weighed(items, sizes, byte_room)
        return True

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Whether there are places and bytes for items of these sizes, in a partition that is bound by bytes."""
        byte_room = self.byte_room
        if byte_room is not None and self.room() >= len(sizes):
            if sum(sizes) <= byte_room.free:
                return True
            self._crowd(byte_room)
        return False

    def _crowd(self, byte_room: ByteRoom[T]) -> None:
        """Somebody found no bytes: the partition is full, and must not linger."""
        byte_room.crowded = True
        if self.linger_step is not None and self.on_ready is not None:
            self.on_ready(self)

    def _put_weighed(self, items: Collection[T], sizes: Sequence[int], byte_room: ByteRoom[T]) -> None:
        self.tail.extend(items)
        byte_room.put(sizes)
        self.announce()

    def fitting(self, items: Sequence[T]) -> int:
        """How many of the items, in order, could come in now."""
        if self.byte_room is None:
            return 0 if self.full() else min(len(items), self.room())
        if self.closed or (self.waiters is not None and self.contended):
            return 0
        return self.byte_room.prefix(self.byte_room.weigh(items[: max(0, self.room())]))

    def put_in(self, items: Collection[T], into: Lane[T] | None = None) -> None:
        """Put items into places that are free for them already."""
        if into is None:
            self.tail.extend(items)
        else:
            if into.asleep:
                self.wake_lane(into)
            before = len(into.tail)
            into.tail.extend(items)
            self._in_lanes += len(into.tail) - before  # what came in: another thread may be changing the list
        self.announce()

    def adopt(self, parts: Iterable[tuple[Lane[T] | None, list[T]]]) -> None:
        """Put lists of items into places that are held for them; the lists are the partition's own from now on."""
        for into, items in parts:
            self.held -= len(items)
            if into is not None:
                if into.asleep:
                    self.wake_lane(into)
                self._in_lanes += len(items)
            place = into or self
            if place.tail:
                place.tail.extend(items)
            else:
                # Handed over whole: to copy it would touch each item, from another core than put it in.
                place.tail = items
        self.announce()

    def announce(self) -> None:
        """Tell whoever takes out that there are items, and reopen the fast path as far as it may go."""
        if self.on_ready is None:
            self._wake_getter()
        elif not self.listed:
            self.listed = True
            self.since = self.on_ready(self)
        elif self.linger_step is not None:
            self.on_ready(self)
        self.rearm()

    def evict(self) -> T:
        """Remove the oldest waiting item to make room; whoever waits for it learns that it was dropped."""
        if not self.qsize():
            return next(each for each in self.arriving or () if each.items).evict_first()
        number = self.removed
        ((_, (item,)),) = self._remove(1)
        if self.ranges:
            self.fail_item(number, item, ItemDroppedError("the item made room for a newer one (DROP_OLDEST)"))
        self.settle()
        return item

    def close(self) -> None:
        """Take nothing in any more, and send every waiting producer away."""
        self.closed = True
        if self.waiters is not None:
            self.waiters.dismiss()
            self._forget_idle_waiters()
        self.rearm()

    # -- waiting for a place -------------------------------------------------------------------------------------

    def wait_for(self, items: Sequence[T]) -> Waiter:
        """Join those who wait, for places for the items."""
        sizes = None if self.byte_room is None else self.byte_room.weigh(items)
        return self._joined(self._line().add(Waiter(len(items), items[0], sizes)))

    def join(self, waiter: Waiter) -> None:
        """Let a waiter join the others."""
        self._joined(self._line().add(waiter))

    def _line(self) -> WaiterQueue:
        if self.waiters is None:
            self.waiters = WaiterQueue()
            if self.crowded is not None:
                self.crowded.add(self)
        return self.waiters

    def _joined(self, waiter: Waiter) -> Waiter:
        waiter.partition = self
        self.rearm()
        self.serve()
        if self.byte_room is not None and waiter.want:
            self._crowd(self.byte_room)
        return waiter

    def serve(self) -> None:
        """Reserve free places for those who wait, first come, first served."""
        waiters = self.waiters
        while waiters is not None and waiters.waiting:
            room = self.room()
            if room > 0:
                if not waiters.grant(room, self.byte_room):
                    break
            elif self.credits is None or not self.credits.reclaim():
                break
        self._forget_idle_waiters()  # who stands for several may have passed on at once what was reserved
        self.rearm()

    def use_reserved(self, waiter: Waiter, used: int) -> list[int]:
        """Places that were reserved for the waiter are filled, or held by it in another way; the bytes of each."""
        sizes = [] if self.byte_room is None else self.byte_room.use(waiter, used)
        waiter.filled += used
        if self.waiters is not None:
            self.waiters.use(waiter, used)
            self._forget_idle_waiters()
        return sizes

    def leave(self, waiter: Waiter) -> None:
        """Let a waiter quit; places that were reserved for it and not filled go to the next."""
        if self.waiters is not None:
            if self.byte_room is not None:
                self.byte_room.release(waiter)
            self.waiters.remove(waiter)
            self._forget_idle_waiters()
        self.serve()
        if self.credits is not None:
            self.credits.refill()

    def lead(self, waiter: Waiter, partition: Partition[T]) -> None:
        """Let a waiter go to the end of those of another partition."""
        want = waiter.want + waiter.reserved
        self.leave(waiter)
        waiter.want = want
        partition.join(waiter)

    def fill(self, waiter: Waiter, items: Collection[T], into: Lane[T] | None = None) -> None:
        """Put items into the places that were reserved for the waiter."""
        sizes = self.use_reserved(waiter, len(items))
        if self.byte_room is not None:
            self._put_weighed(items, sizes, self.byte_room)
        else:
            self.put_in(items, into)
        if self.credits is not None:
            self.credits.refill()

    def everyone_waiting(self) -> list[Waiter]:
        """All waiters in order, those with reservations first."""
        return [] if self.waiters is None else self.waiters.everyone()

    @property
    def waiting(self) -> int:
        """How many producers wait for places."""
        return 0 if self.waiters is None else len(self.waiters.waiting)

    def needs(self) -> list[list[DrainTask[Any]]]:
        """Whom a producer that waits here needs."""
        if self.owner is None:
            return []
        # With nothing to take out, and nobody about to put in, room comes only from what is on its way here: one of its
        # sources must finish first.
        coming = (
            [] if self.qsize() or self.reserved else [each.source.owner for each in self.arriving or () if each.items]
        )
        sources = [owner for owner in coming if owner is not None]
        return [[self.owner], sources] if sources else [[self.owner]]

    def _forget_idle_waiters(self) -> None:
        if self.waiters is not None and not (self.waiters.waiting or self.waiters.granted):
            self.waiters = None
            if self.crowded is not None:
                self.crowded.discard(self)

    # -- going out -----------------------------------------------------------------------------------------------

    def take(self, most: int) -> list[T]:
        """Remove up to `most` items, oldest first, and let waiting producers have the room."""
        return [item for _, run in self.take_runs(most) for item in run]

    def take_runs(self, most: int) -> list[tuple[type | None, list[T]]]:
        """The same, as runs of items: of one type where the run names it, of any type else."""
        whole = self.qsize() <= most
        if whole:
            # First of all, for a finalizer or a signal handler may produce between any two steps: what comes in from
            # here on lists the partition anew.
            self.listed = False
            self._set_fast_slots(NO_SLOTS)
        if whole and self.waiters is None:
            runs = self._open_runs()
            if self._sealed:
                runs = [*self._all_sealed(), *runs]
            count = len(runs[0][1]) if len(runs) == 1 else sum(len(run) for _, run in runs)
            self.removed += count
            if self.byte_room is not None:
                self.byte_room.take(count)
            if self.credits is not None:
                self.credits.refill()
            return runs
        runs = self._remove(most)
        if self.waiters is not None:
            self.serve()
        else:
            self.rearm()
        if self.credits is not None:
            self.credits.refill()
        return runs

    def finish_flight(self) -> None:
        """What its drain task has taken is accounted for."""
        self.in_flight = 0

    def stay(self) -> None:
        """Change to no other drain task any more."""
        self.next_owner = None

    def drop(self) -> list[T]:
        """Remove everything, and tell nobody: the loop of those who wait has ended."""
        return [item for _, run in self._remove(self.qsize()) for item in run]

    def note_rest(self, now: float) -> None:
        """Remember, at a take that left items behind, what bounds their age."""
        if self.marks is None:
            self.marks = []
        self.marks.append((self.accepted, now))
        while self.marks[0][0] <= self.removed:
            self.since = self.marks.pop(0)[1]

    # -- waiting for an outcome ----------------------------------------------------------------------------------

    @property
    def drained_by(self) -> DrainTask[T] | None:
        """The drain task that has to go on before the items are finished."""
        return self.owner

    def watch(self, wait: CompletionWait, count: int) -> None:
        """Let a caller wait for the last `count` items, put in right after `order`."""
        self.order()
        end = self.accepted
        if count and end > self.finished:
            self._watch(wait, end - count, end)

    def fence(self, wait: CompletionWait) -> None:
        """Let a caller wait until everything that came in so far is finished."""
        self.order()
        end = self.accepted
        if end > self.finished:
            self._watch(wait, end, end)

    def watch_moved(self, moved: SequenceRange, start: int, end: int) -> None:
        """Let whoever waits for a range of a migration wait for the numbers that its items have here."""
        if end > self.finished:
            self._watch(moved.wait, start, end)
        moved.reach()

    def _watch(self, wait: CompletionWait, start: int, end: int) -> None:
        if self.ranges is None:
            self.ranges = RangeQueue()
        self.ranges.watch(wait, self, start, end)

    def forget_range(self) -> None:
        """Nobody waits for one of its ranges any more."""
        if self.ranges is not None:
            self.ranges.forget_one()
            self._drop_empty_ranges()

    def fail_item(self, number: int, item: T, error: BaseException) -> None:
        """Tell whoever waits for an item that it was not handled."""
        if self.ranges is not None:
            self.ranges.fail(number, item, error)

    def fail_waiting(self, error: BaseException) -> None:
        """Tell those who wait for items inside that these will not be handled."""
        if self.ranges is not None:
            self.ranges.fail_from(self.items(), self.removed, error)

    def end_waits(self) -> None:
        """Let nobody wait for an outcome any more."""
        ranges, self.ranges = self.ranges, None
        for each in () if ranges is None else ranges.take_all():
            each.reach()

    def settle(self) -> None:
        """Some items are finished: tell those who wait for them, and let go those who move away."""
        if self.ranges is not None:
            self.ranges.settle(self.finished)
            self._drop_empty_ranges()
        for migration in tuple(self.leaving or ()):
            # As one arrives, items of threads are put in: these may evict others here, and so let the next ones go.
            if migration in (self.leaving or ()):
                migration.try_to_arrive()

    def _drop_empty_ranges(self) -> None:
        if self.ranges is not None and self.ranges.empty:
            self.ranges = None

    # -- moving types and keys -----------------------------------------------------------------------------------

    def departing(self, migration: Migration[T]) -> None:
        """Something moves elsewhere as soon as what is here of it is finished."""
        if self.leaving is None:
            self.leaving = []
        self.leaving.append(migration)

    def departed(self, migration: Migration[T]) -> None:
        """It has moved."""
        if self.leaving is not None:
            self.leaving.remove(migration)
            self.leaving = self.leaving or None

    def expect(self, migration: Migration[T]) -> None:
        """Something moves here; its items are held until it arrives."""
        if self.arriving is None:
            self.arriving = []
        self.arriving.append(migration)

    def arrived(self, migration: Migration[T]) -> None:
        """It is here."""
        if self.arriving is not None:
            self.arriving.remove(migration)
            self.arriving = self.arriving or None

    def hold_for_migration(self, count: int, sizes: Sequence[int]) -> None:
        """Keep places for items that move here, and the bytes that each of them takes."""
        self.held += count
        if self.byte_room is not None:
            self.byte_room.held += sum(sizes)
        if self.linger_step is None:
            self.rearm()
        else:
            self.announce()  # what is held may make it full: then it must not linger

    def pass_held(self, other: Partition[T]) -> None:
        """Let another partition hold a place in this one's stead, even beyond its bound."""
        self.held -= 1
        other.hold_for_migration(1, ())
        self.serve()  # the place is free again, and nothing that is taken out would say so
        if self.credits is not None:
            self.credits.refill()

    def skip_held(self, count: int, sizes: Sequence[int]) -> None:
        """Items that were held for count as if they had come in and gone."""
        self.held -= count
        self.removed += count
        if self.byte_room is not None:
            self.byte_room.held -= sum(sizes)

    def put_held(self, items: Collection[T], sizes: Sequence[int], into: Lane[T] | None = None) -> None:
        """Items that were held for are here."""
        self.unhold(len(items))
        if not items:
            return
        if self.byte_room is not None:
            self.byte_room.held -= sum(sizes)
            self._put_weighed(items, sizes, self.byte_room)
        else:
            self.put_in(items, into)

    # -- as an asyncio.Queue -------------------------------------------------------------------------------------

    def put_nowait(self, item: T) -> None:
        """Like `asyncio.Queue.put_nowait`; raises `asyncio.QueueFull`."""
        if not self.offer(item):
            raise asyncio.QueueFull

    async def put(self, item: T) -> None:
        """Like `asyncio.Queue.put`; raises `asyncio.QueueFull` if the partition closes."""
        if self.offer(item):
            return
        if self.closed:
            raise asyncio.QueueFull
        waiter = self.wait_for((item,))
        try:
            await waiter.future
            if self.closed:
                raise asyncio.QueueFull
            self.fill(waiter, (item,))
        finally:
            self.leave(waiter)

    def get_nowait(self) -> T:
        """Like `asyncio.Queue.get_nowait`; raises `asyncio.QueueEmpty`."""
        if not self.qsize():
            raise asyncio.QueueEmpty
        return self.take(1)[0]

    async def get(self) -> T:
        """Like `asyncio.Queue.get`, for a partition that no drain task owns."""
        while not self.qsize():
            getter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self.getters is None:
                self.getters = deque()
            self.getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                if getter in self.getters:
                    self.getters.remove(getter)
                elif self.qsize():
                    self._wake_getter()  # the wake-up was ours to use; hand it on
                raise
        item = self.get_nowait()
        if self.qsize():
            self._wake_getter()  # items that came in together woke one getter
        return item

    def _wake_getter(self) -> None:
        while self.getters:
            getter = self.getters.popleft()
            if not getter.done():
                getter.set_result(None)
                return
