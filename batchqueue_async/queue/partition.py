"""One bounded partition: a first-in-first-out buffer that producers append to and one worker takes from in bulk.

The state machine never awaits. What it holds is in `buffer`, who waits for a place in `line`; here is how items come
in and go out, and what their worker and those who wait for them have to know. Everything unusual (a partition nobody
watches yet, a full or closed one, waiting producers, a batch that lingers) leaves nothing to spare, so that the
producer takes the slow path.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async.errors import ItemDroppedError
from batchqueue_async.queue.buffer import NOTHING_TO_SPARE, Lane
from batchqueue_async.queue.line import Line, Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchqueue_async.queue.drain import Worker
    from batchqueue_async.queue.migration import Transit
    from batchqueue_async.queue.waits import Wait, Watch

T = TypeVar("T")


class Partition(Line[T]):
    """A bounded asyncio queue with a bulk `take`; like `asyncio.Queue`, except that waiting putters are never passed.

    Example:
        >>> partition = Partition[str](0, capacity=2)
        >>> partition.put_nowait("a"), partition.put_nowait("b")
        (None, None)
        >>> partition.take(10)
        ['a', 'b']
    """

    __slots__ = (
        "arriving",
        "attend",
        "flight_start",
        "getters",
        "heir",
        "in_flight",
        "index",
        "leaving",
        "marks",
        "owner",
        "since",
        "watches",
    )

    def __init__(self, index: int, capacity: int, attend: Callable[[Partition[T]], float] | None = None) -> None:
        super().__init__(capacity)
        self.index = index
        self.attend = attend
        self.owner: Worker[T] | None = None
        self.heir: Worker[T] | None = None
        self.in_flight = 0
        """How many items its worker has taken and not finished; the first has the number `flight_start`."""
        self.flight_start = 0
        self.since = 0.0
        """No item inside is older than this."""
        self.marks: list[tuple[int, float]] | None = None
        self.arriving: list[Transit[T]] | None = None
        """Those that move here; `held` counts their items."""
        self.leaving: list[Transit[T]] | None = None
        """Types or keys that move to other partitions as soon as what is here of them is finished."""
        self.watches: list[Watch] | None = None
        self.getters: deque[asyncio.Future[None]] | None = None

    # -- what is inside ------------------------------------------------------------------------------------------

    def lane(self, kind: type) -> Lane[T]:
        """Keep the items of a type by themselves from now on."""
        lane = Lane(kind, self)
        self.lanes = [*(self.lanes or ()), lane]
        return lane

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

    def lead(self, waiter: Waiter, line: Partition[T]) -> None:
        """Let a producer of the line go to the end of another one."""
        want = waiter.want + waiter.permits
        self.leave(waiter)
        waiter.want = want
        line.join(waiter)

    def redeem(self, waiter: Waiter, items: Iterable[T], into: Lane[T] | None = None) -> None:
        """Put items into the places that the waiter was granted."""
        tail = self.tail if into is None else into.tail
        before = len(tail)
        tail.extend(items)
        self.use_permits(waiter, len(tail) - before)
        self.touch()

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
