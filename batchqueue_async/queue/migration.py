"""Moving types or keys to other partitions as a queue grows, without letting a later item pass an earlier one.

When a queue grows, a type (or key) may belong to another partition than before. Its new partition must not serve it
while the old one still holds or handles earlier items of it. Until then its items wait in a `Migration`, in places that
the new partition keeps for them: nothing else in either partition waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from batchqueue_async.errors import ItemDroppedError
from batchqueue_async.queue.partition import NO_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batchqueue_async.queue.completion import CompletionWait, SequenceRange
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.partition import Lane, Partition
    from batchqueue_async.queue.waiters import Waiter

T = TypeVar("T")


class Migration(Generic[T]):
    """Items on their way from an old partition to a new one, in order, until the old one has finished its part."""

    __slots__ = ("_entrance", "_on_arrival", "fence", "items", "ranges", "source", "target")

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
        self.fence = source.accepted
        """When the source has finished everything below this number, the way is clear."""
        self.items: list[T] = []
        self.ranges: list[SequenceRange] = []
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
        if target.closed or target.waiters is not None or not target.make_room(1):
            return False
        self._hold((item,))
        return True

    def fill(self, waiter: Waiter, items: Iterable[T]) -> None:
        """Put items into the places that the target reserved."""
        self.target.use_reserved(waiter, self._hold(items))
        self.target.rearm()
        if not self.target.qsize():
            # Those who wait behind need the source now, which may wait for them.
            for other in self.target.everyone_waiting():
                other.look_for_circle()

    def evict(self) -> T:
        """Remove the oldest item that can make room in the target."""
        return self.target.evict()

    def evict_first(self) -> T:
        """Remove the oldest item on its way to the target, which is empty, as if it had arrived and gone."""
        self.target.skip_held(1)
        item = self.items.pop(0)
        for each in self.ranges:
            if each.start == 0 < each.end:
                each.wait.fail((item,), ItemDroppedError("the item made room for a newer one (DROP_OLDEST)"))
            each.start = max(0, each.start - 1)
            each.end -= 1
        return item

    def watch(self, wait: CompletionWait, count: int) -> None:
        """Let a caller wait for the last `count` items."""
        end = len(self.items)
        if self.ranges and self.ranges[-1].wait is wait and self.ranges[-1].end == end - count:
            self.ranges[-1].end = end
            return
        self.ranges.append(wait.open_range(self, end - count, end))

    def forget(self, range_: SequenceRange) -> None:
        """Nobody waits for the range any more."""
        self.ranges = [each for each in self.ranges if each is not range_]

    def try_to_arrive(self) -> bool:
        """Go on into the target if the source has finished its part."""
        if self.source.finished < self.fence:
            return False
        self.arrive()
        return True

    def arrive(self) -> None:
        """Put everything into the target, and be gone."""
        source, target = self.source, self.target
        source.departed(self)
        target.arrived(self)
        target.order()
        base = target.accepted
        target.unhold(len(self.items))
        self._entrance().tail.extend(self.items)
        if self.ranges:
            target.order()
        for each in self.ranges:
            each.wait.watch(target, base + each.start, base + each.end)
            each.reach()
        if self.items:
            target.announce()
        else:
            target.rearm()
        self._on_arrival(self)

    def fail_waits(self, error: BaseException) -> None:
        """Nothing here will arrive: tell those who wait for it."""
        ranges, self.ranges = self.ranges, []
        for each in ranges:
            each.wait.fail(self.items[each.start : each.end], error)
            each.reach()

    def drop(self) -> list[T]:
        """Remove everything, and tell nobody: the loop of those who wait has ended."""
        items, self.items = self.items, []
        self.target.skip_held(len(items))
        return items

    def _hold(self, items: Iterable[T]) -> int:
        before = len(self.items)
        self.items.extend(items)
        count = len(self.items) - before
        self.target.hold_for_migration(count)
        return count
