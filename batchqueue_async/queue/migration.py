"""Moving types or keys to other partitions as a queue grows, without letting a later item pass an earlier one.

When a queue grows, a type (or key) may belong to another partition than before. Its new partition must not serve it
while the old one still holds or handles earlier items of it. Until then its items wait in a `Migration`, in places that
the new partition keeps for them: nothing else in either partition waits for it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from batchqueue_async._native import NO_SLOTS
from batchqueue_async.errors import ItemDroppedError
from batchqueue_async.queue.completion import RangeQueue
from batchqueue_async.queue.partition import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from batchqueue_async.queue.completion import CompletionWait
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.partition import Partition
    from batchqueue_async.queue.waiters import Waiter

T = TypeVar("T")


class Migration(Generic[T]):
    """Items on their way from an old partition to a new one, in order, until the old one has finished its part."""

    __slots__ = ("_entrance", "_gone", "_on_arrival", "_sizes", "clear_at", "items", "ranges", "source", "target")

    # To a producer's fast path a migration looks like a full partition, so that it takes the slow path.
    fast_slots = NO_SLOTS
    tail: ClassVar[list[Any]] = []

    def __init__(
        self,
        source: Partition[T],
        target: Partition[T],
        entrance: Callable[[], Partition[T] | Lane[T]],
        on_arrival: Callable[[Migration[T]], None],
    ) -> None:
        source.order()
        self.source = source
        self.target = target
        self.clear_at = source.accepted
        """When the source has finished everything below this number, the way is clear."""
        self.items: deque[T] = deque()
        self._sizes: deque[int] = deque()
        """What each of the items takes, where the partitions are bound by bytes."""
        self._gone = 0
        """How many items have been evicted: the number of the first of `items`."""
        self.ranges: RangeQueue | None = None
        self._entrance = entrance
        self._on_arrival = on_arrival
        source.departing(self)
        target.expect(self)

    @property
    def partition(self) -> Partition[T]:
        """Where a producer waits for room: the partition that keeps the places."""
        return self.target

    @property
    def drained_by(self) -> DrainTask[T] | None:
        """The drain task that has to go on before anything here moves."""
        return self.source.owner

    def offer(self, item: T) -> bool:
        """Take an item in if the target has a free place and nobody waits for it."""
        target = self.target
        if target.closed or target.contended or not target.make_room(1):
            return False
        sizes: list[int] = []
        if target.byte_room is not None:
            sizes = target.byte_room.weigh((item,))
            if not target.has_room(sizes):
                return False
        self._hold((item,), sizes)
        return True

    def fill(self, waiter: Waiter, items: Collection[T]) -> None:
        """Put items into the places that the target reserved."""
        self._hold(items, self.target.use_reserved(waiter, len(items)))
        if not self.target.qsize():
            # Those who wait behind need the source now, which may wait for them.
            for other in self.target.everyone_waiting():
                other.look_for_circle()
        if self.target.credits is not None:
            self.target.credits.refill()

    def evict(self) -> T:
        """Remove the oldest item that can make room in the target."""
        return self.target.evict()

    def evict_first(self) -> T:
        """Remove the oldest item on its way to the target, which is empty, as if it had arrived and gone."""
        self.target.skip_held(1, self._take_sizes(1))
        item = self.items.popleft()
        if self.ranges is not None:
            error = ItemDroppedError("the item made room for a newer one (DROP_OLDEST)")
            self.ranges.fail(self._gone, item, error)
        self._gone += 1
        if self.ranges is not None:
            self.ranges.settle(self._gone)
        return item

    def watch(self, wait: CompletionWait, count: int) -> None:
        """Let a caller wait for the last `count` items."""
        if count:
            end = self._gone + len(self.items)
            self._watch(wait, end - count, end)

    def fence(self, wait: CompletionWait) -> None:
        """Let a caller wait until everything that came in so far is finished."""
        if self.items:
            end = self._gone + len(self.items)
            self._watch(wait, end, end)

    def _watch(self, wait: CompletionWait, start: int, end: int) -> None:
        if self.ranges is None:
            self.ranges = RangeQueue()
        self.ranges.watch(wait, self, start, end)

    def forget_range(self) -> None:
        """Nobody waits for one of its ranges any more."""
        if self.ranges is not None:
            self.ranges.forget_one()
            if self.ranges.empty:
                self.ranges = None

    def try_to_arrive(self) -> bool:
        """Go on into the target if the source has finished its part."""
        if self.source.finished < self.clear_at:
            return False
        self.arrive()
        return True

    def arrive(self) -> None:
        """Put everything into the target, and be gone."""
        source, target = self.source, self.target
        source.departed(self)
        target.arrived(self)
        target.order()
        first = target.accepted - self._gone
        entrance = self._entrance()
        target.put_held(self.items, self._sizes, entrance if isinstance(entrance, Lane) else None)
        if self.ranges is not None:
            target.order()
            for each in self.ranges.take_all():
                target.watch_moved(each, first + max(each.start, self._gone), first + each.end)
        self._on_arrival(self)

    def fail_waits(self, error: BaseException) -> None:
        """Nothing here will arrive: tell those who wait for it."""
        ranges, self.ranges = self.ranges, None
        if ranges is not None:
            ranges.fail_from(list(self.items), self._gone, error)
            for each in ranges.take_all():
                each.reach()

    def drop(self) -> list[T]:
        """Remove everything, and tell nobody: the loop of those who wait has ended."""
        items = list(self.items)
        self.items.clear()
        self.target.skip_held(len(items), self._take_sizes(len(items)))
        return items

    def receive(self, item: T) -> None:
        """Take an item in whose place the target holds already."""
        self.items.append(item)

    def _take_sizes(self, count: int) -> list[int]:
        """What the first of the items take."""
        return [self._sizes.popleft() for _ in range(min(count, len(self._sizes)))]

    def _hold(self, items: Collection[T], sizes: list[int]) -> None:
        self.items.extend(items)
        self._sizes.extend(sizes)
        self.target.hold_for_migration(len(items), sizes)
