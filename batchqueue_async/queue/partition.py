"""One bounded partition: a first-in-first-out buffer that producers append to and one worker takes from in bulk.

The state machine never awaits. A producer's fast path uses only `spare` and `tail`: `spare` counts the places down
that may be filled without a further look, and appending to `tail` is all there is to do. Everything unusual (a
partition nobody watches yet, a full or closed one, waiting producers, a batch that lingers) leaves nothing to spare,
so that the producer takes the slow path. An `itertools.repeat` is the cheapest countdown there is: one step of it
costs a third of comparing a length with a limit.

A producer that must wait gets a permit for a place, not the place itself, and puts its item there when it runs
again: a producer cancelled in between gives the permit back, and has left no trace.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from batchqueue_async.errors import ItemDroppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchqueue_async.queue.drain import Worker
    from batchqueue_async.queue.moves import Transit
    from batchqueue_async.queue.waits import Wait, Watch

T = TypeVar("T")

NOTHING_TO_SPARE = repeat(None, 0)


class Gate(Protocol):
    """What a partition knows of the door by which other threads come in."""

    def refill(self) -> None:
        """Lend the door the places that are free now."""
        ...

    def reclaim(self) -> bool:
        """Take places back that the door has not used; whether there were any."""
        ...

    def unused(self) -> int:
        """How many of the places lent to the door hold no item."""
        ...


class Waiter:
    """A producer in line for places: `future` resolves when `permits` of the `want` are granted, or on closing.

    Attributes:
        line: where it stands; growth may lead it to another partition, and its place in the order with it.
        item: the first item that it waits with: its line is where that item belongs.
        worker: the worker whose handler call waits here, if it is one.
        broken: whether the wait could never end, and so must.
        expired: whether its time is over.
    """

    __slots__ = ("broken", "expired", "future", "item", "line", "permits", "want", "worker")

    line: Partition[Any]
    stays = False
    """Whether it stands for several producers of this very partition, whom growth leads elsewhere by itself."""

    def __init__(self, want: int, item: Any = None) -> None:
        self.want = want
        self.item = item
        self.permits = 0
        self.broken = self.expired = False
        self.worker: Worker[Any] | None = None
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def notify(self) -> None:
        """Let the producer run and look at what it got."""
        if not self.future.done():
            self.future.set_result(None)

    def break_wait(self) -> None:
        """End the wait: it is part of a circle of waits."""
        self.broken = True
        self.notify()

    def expire(self) -> None:
        """End the wait: its time is over."""
        self.expired = True
        self.notify()

    def needs(self) -> list[list[Worker[Any]]]:
        """Whom the producer waits for: nobody any more when it is about to run."""
        return [] if self.future.done() else self.line.needs()

    def renew(self) -> None:
        """Be ready to wait for the rest of the places."""
        self.future = asyncio.get_running_loop().create_future()


class Lane(Generic[T]):
    """The items of one type in a partition: kept by type as they come, they need not be sorted as they go."""

    __slots__ = ("kind", "line", "spare", "tail")

    def __init__(self, kind: type, line: Partition[T]) -> None:
        self.kind = kind
        self.line = line
        self.tail: list[T] = []
        self.spare = line.spare

    def offer(self, item: T) -> bool:
        """Take an item in if the partition has a free place and nobody waits for it."""
        return self.line.offer(item, self)

    def redeem(self, waiter: Waiter, items: Iterable[T]) -> None:
        """Put items into the places that the waiter was granted."""
        self.line.redeem(waiter, items, self)

    def evict(self) -> T:
        """Remove the oldest waiting item of the partition to make room."""
        return self.line.evict()

    def watch(self, wait: Wait, count: int) -> None:
        """Let a caller wait for the last `count` items, put in right after `order`."""
        self.line.watch(wait, count)


class Partition(Generic[T]):
    """A bounded asyncio queue with a bulk `take`; like `asyncio.Queue`, except that waiting putters are never passed.

    Example:
        >>> partition = Partition[str](0, capacity=2)
        >>> partition.put_nowait("a"), partition.put_nowait("b")
        (None, None)
        >>> partition.take(10)
        ['a', 'b']
    """

    __slots__ = (
        "_position",
        "_sealed",
        "_sealed_count",
        "arriving",
        "attend",
        "capacity",
        "closed",
        "flight_start",
        "gate",
        "getters",
        "granted",
        "heir",
        "held",
        "in_flight",
        "index",
        "lanes",
        "leaving",
        "linger_step",
        "listed",
        "marks",
        "owner",
        "permits",
        "removed",
        "since",
        "spare",
        "tail",
        "waiters",
        "watches",
    )

    def __init__(self, index: int, capacity: int, attend: Callable[[Partition[T]], float] | None = None) -> None:
        self.index = index
        self.capacity = capacity
        self.tail: list[T] = []
        self.spare = NOTHING_TO_SPARE
        self.lanes: list[Lane[T]] | None = None
        """Where items are kept by type instead of in `tail`."""
        # Items stand in the order of their numbers once they are sealed: in runs, from `_position` on in the first.
        self._sealed: deque[tuple[type | None, list[Any]]] | None = None
        self._sealed_count = 0
        self._position = 0
        self.removed = 0
        """How many items have left the buffer, taken or evicted: the sequence number of the oldest one inside."""
        self.in_flight = 0
        """How many items its worker has taken and not finished; the first has the number `flight_start`."""
        self.flight_start = 0
        self.permits = 0
        self.held = 0
        """Places kept for items of types that are moving here."""
        self.closed = False
        self.listed = False
        """Whether its worker (or `attend`) knows that there are items."""
        self.linger_step: int | None = None
        self.since = 0.0
        """No item inside is older than this."""
        self.marks: list[tuple[int, float]] | None = None
        self.owner: Worker[T] | None = None
        self.heir: Worker[T] | None = None
        self.arriving: list[Transit[T]] | None = None
        """Those that move here; `held` counts their items."""
        self.leaving: list[Transit[T]] | None = None
        """Types or keys that move to other partitions as soon as what is here of them is finished."""
        self.gate: Gate | None = None
        """The share of this partition that the door for other threads has."""
        self.waiters: deque[Waiter] | None = None
        self.granted: dict[Waiter, None] | None = None
        """The producers that have permits, in order; `waiters` are those who want more."""
        self.getters: deque[asyncio.Future[None]] | None = None
        self.watches: list[Watch] | None = None
        self.attend = attend

    # -- what is inside ------------------------------------------------------------------------------------------

    def qsize(self) -> int:
        """How many items wait inside."""
        count = self._sealed_count + len(self.tail)
        for lane in self.lanes or ():
            count += len(lane.tail)
        return count

    def items(self) -> list[T]:
        """The items that wait inside: those with a number first, oldest first."""
        numbered = [item for _, run in self._sealed or () for item in run][self._position :]
        return [*numbered, *self.tail, *(item for lane in self.lanes or () for item in lane.tail)]

    def order(self) -> None:
        """Let what comes in later come after what is inside, whatever its type."""
        if self.lanes is not None:
            self.seal()

    def seal(self) -> None:
        """Give every item inside its number. The countdown of places goes on: as many are taken as before."""
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
        for lane in self.lanes or ():
            if lane.tail:
                runs.append((lane.kind, lane.tail))
                lane.tail = []
        return runs

    def lane(self, kind: type) -> Lane[T]:
        """Keep the items of a type by themselves from now on."""
        lane = Lane(kind, self)
        self.lanes = [*(self.lanes or ()), lane]
        return lane

    def close_lane(self, kind: type) -> None:
        """The items of a type come in elsewhere from now on."""
        self.seal()
        self.lanes = [lane for lane in self.lanes or () if lane.kind is not kind]

    def empty(self) -> bool:
        """Whether no item waits inside."""
        return not self.qsize()

    def full(self) -> bool:
        """Whether a further item would be refused or have to wait."""
        unused = 0 if self.gate is None else self.gate.unused()
        return bool(self.waiters) or bool(self.permits) or self.room() + unused <= 0

    def room(self) -> int:
        """How many places are neither taken nor promised."""
        return self.capacity - self.qsize() - self.permits - self.held

    @property
    def accepted(self) -> int:
        """How many items have ever come in."""
        return self.removed + self.qsize()

    @property
    def finished(self) -> int:
        """Every item with a sequence number below this one has been handled, failed or been dropped."""
        return self.flight_start if self.in_flight else self.removed

    @property
    def line(self) -> Partition[T]:
        """Where a producer waits for room: here; for a type that is moving, at its new partition."""
        return self

    def needs(self) -> list[list[Worker[Any]]]:
        """Whom a producer in this line waits for."""
        if self.owner is None:
            return []
        # With nothing to take out, room comes only from what is on its way here: one of its sources must finish first.
        coming = [] if self.qsize() else [each.source.owner for each in self.arriving or () if each.items]
        sources = [owner for owner in coming if owner is not None]
        return [[self.owner], sources] if sources else [[self.owner]]

    # -- coming in -----------------------------------------------------------------------------------------------

    def offer(self, item: T, into: Lane[T] | None = None) -> bool:
        """Take an item in if there is a free place and nobody waits for it."""
        tail = self.tail if into is None else into.tail
        if self.closed or self.waiters or self.permits:
            return False
        if self.listed or self.attend is None or self.held >= self.capacity:
            if not self.make_room(1):
                return False
            tail.append(item)
            self.touch()
            return True
        tail.append(item)
        # The usual case of `touch`, written out: the first item into an empty partition.
        self.listed = True
        self.since = self.attend(self)
        if self.linger_step is None:
            self._set_spare(repeat(None, self.capacity - self.held - 1))
        else:
            self.arm()
        return True

    def offer_many(self, items: Sequence[T], into: Lane[T] | None = None) -> bool:
        """Take all items in, in bulk, if there is room for all and nobody waits; else none."""
        if self.closed or self.waiters or self.permits or not self.make_room(len(items)):
            return False
        (self.tail if into is None else into.tail).extend(items)
        self.touch()
        return True

    def make_room(self, count: int) -> bool:
        """Whether there are so many free places, once the door has given back what it does not use."""
        while self.room() < count:
            if self.gate is None or not self.gate.reclaim():
                return False
        return True

    def touch(self) -> None:
        """Tell whoever attends that there are items, and reopen the fast path as far as it may go."""
        if self.attend is None:
            self._wake_getter()
        elif not self.listed:
            self.listed = True
            self.since = self.attend(self)
        elif self.linger_step is not None:
            self.attend(self)
        self.arm()

    def arm(self) -> None:
        """Set how many places the producers' fast path may fill."""
        if self.closed or not self.listed or self.waiters or self.permits:
            self._set_spare(NOTHING_TO_SPARE)
            return
        room = self.capacity - self.qsize() - self.held
        if self.linger_step is not None:
            # The item that fills the partition, or may fill the batch, takes the slow path: its worker has to know.
            room = min(room, self.linger_step) - 1
        self._set_spare(repeat(None, max(0, room)))

    def _set_spare(self, spare: repeat[None]) -> None:
        self.spare = spare
        for lane in self.lanes or ():
            lane.spare = spare  # one countdown for all of them

    def evict(self) -> T:
        """Remove the oldest waiting item to make room; whoever waits for it learns that it was dropped."""
        if not self.qsize():
            return next(transit for transit in self.arriving or () if transit.items).evict_first()
        number = self.removed
        ((_, (item,)),) = self._remove(1)
        for watch in self.watches or ():
            if watch.start <= number < watch.end:
                watch.wait.fail((item,), ItemDroppedError("the item made room for a newer one (DROP_OLDEST)"))
        self.settle()
        return item

    def settle(self) -> None:
        """Some items are finished: tell those who wait for them, and let go those who move away."""
        if self.watches:
            finished = self.finished
            reached = [watch for watch in self.watches if watch.end <= finished]
            self.watches = [watch for watch in self.watches if watch.end > finished] or None
            for watch in reached:
                watch.reach()
        for transit in tuple(self.leaving or ()):
            transit.try_to_arrive()

    # -- waiting for a place -------------------------------------------------------------------------------------

    def enlist(self, want: int, item: T | None = None) -> Waiter:
        """Join the line for `want` places."""
        waiter = Waiter(want, item)
        self.join(waiter)
        return waiter

    def join(self, waiter: Waiter) -> None:
        """Let a waiter join the line."""
        waiter.line = self
        if self.waiters is None:
            self.waiters = deque()
        self.waiters.append(waiter)
        self.arm()
        self.grant()

    def in_line(self) -> list[Waiter]:
        """Everybody in the line, those with permits first."""
        granted = self.granted or {}
        return [*granted, *(waiter for waiter in self.waiters or () if waiter not in granted)]

    def lead(self, waiter: Waiter, line: Partition[T]) -> None:
        """Let a producer of the line go to the end of another one."""
        want = waiter.want + waiter.permits
        self.leave(waiter)
        waiter.want = want
        line.join(waiter)

    def grant(self) -> None:
        """Give free places to the line, first come, first served."""
        waiters = self.waiters
        while waiters:
            room = self.room()
            if room <= 0:
                if self.gate is not None and self.gate.reclaim():
                    continue
                break
            waiter = waiters[0]
            share = min(room, waiter.want)
            waiter.want -= share
            waiter.permits += share
            self.permits += share
            if self.granted is None:
                self.granted = {}
            self.granted[waiter] = None
            waiter.notify()
            if waiter.want:
                break
            waiters.popleft()
        self.arm()

    def redeem(self, waiter: Waiter, items: Iterable[T], into: Lane[T] | None = None) -> None:
        """Put items into the places that the waiter was granted."""
        tail = self.tail if into is None else into.tail
        before = len(tail)
        tail.extend(items)
        self.use_permits(waiter, len(tail) - before)
        self.touch()

    def use_permits(self, waiter: Waiter, used: int) -> None:
        """Places that were granted are taken."""
        waiter.permits -= used
        self.permits -= used
        if not waiter.permits and self.granted is not None:
            self.granted.pop(waiter, None)

    def leave(self, waiter: Waiter) -> None:
        """Quit the line; granted places that were not used go to the next."""
        self.use_permits(waiter, waiter.permits)
        if waiter.want and self.waiters and waiter in self.waiters:
            self.waiters.remove(waiter)
        waiter.want = 0
        self.grant()
        if self.gate is not None:
            self.gate.refill()

    def watch(self, wait: Wait, count: int) -> None:
        """Let a caller wait for the last `count` items, put in right after `order`."""
        self.order()
        wait.watch(self, self.accepted - count, self.accepted)

    def awaited_by(self, wait: Wait) -> bool:
        """Whether a caller waits for items of this partition."""
        return any(watch.wait is wait for watch in self.watches or ())

    def close(self) -> None:
        """Take nothing in any more, and send every waiting producer away."""
        self.closed = True
        waiters, self.waiters = self.waiters, None
        for waiter in waiters or ():
            waiter.notify()
        self.arm()

    # -- going out -----------------------------------------------------------------------------------------------

    def take(self, most: int) -> list[T]:
        """Remove up to `most` items, oldest first, and let waiting producers have the room."""
        return [item for _, run in self.take_runs(most) for item in run]

    def take_runs(self, most: int) -> list[tuple[type | None, list[T]]]:
        """The same, as runs of items: of one type where the run names it, of any type else."""
        count = self.qsize()
        if count <= most and not (self.waiters or self.permits or self.gate):
            runs = self._open_runs()
            if self._sealed:
                runs = [*self._all_sealed(), *runs]
            self.removed += count
            self.listed = False
            self._set_spare(NOTHING_TO_SPARE)
            return runs
        runs = self._remove(most)
        self.listed = self.listed and self.qsize() > 0
        if self.waiters or self.permits:
            self.grant()
        else:
            self.arm()
        if self.gate is not None:
            self.gate.refill()
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
        return runs

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
        waiter = self.enlist(1)
        try:
            await waiter.future
            if self.closed:
                raise asyncio.QueueFull
            self.redeem(waiter, (item,))
        finally:
            self.leave(waiter)

    def get_nowait(self) -> T:
        """Like `asyncio.Queue.get_nowait`; raises `asyncio.QueueEmpty`."""
        if not self.qsize():
            raise asyncio.QueueEmpty
        return self.take(1)[0]

    async def get(self) -> T:
        """Like `asyncio.Queue.get`, for a partition that no worker owns."""
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
