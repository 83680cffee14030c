"""Moving types or keys to other partitions as a queue grows, without letting a later item pass an earlier one.

When a queue grows, a type (or key) may belong to another partition than before. Its new partition must not serve it
while the old one still holds or handles earlier items of it. Until then its items wait in a `Transit`, in places that
the new partition keeps for them: nothing else in either partition waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from batchqueue_async.errors import ItemDroppedError
from batchqueue_async.queue.buffer import NOTHING_TO_SPARE
from batchqueue_async.queue.waits import Watch, break_circle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batchqueue_async.queue.buffer import Lane
    from batchqueue_async.queue.line import Waiter
    from batchqueue_async.queue.partition import Partition
    from batchqueue_async.queue.waits import Wait

T = TypeVar("T")


class Transit(Generic[T]):
    """Items on their way from an old partition to a new one, in order, until the old one has finished its part."""

    __slots__ = ("_entrance", "_on_arrival", "fence", "items", "source", "target", "watches")

    # To a producer's fast path a transit looks like a full partition, so that it takes the slow path.
    spare = NOTHING_TO_SPARE
    tail: ClassVar[list[Any]] = []

    def __init__(
        self,
        source: Partition[T],
        target: Partition[T],
        entrance: Callable[[], Partition[T] | Lane[T]],
        on_arrival: Callable[[Transit[T]], None],
    ) -> None:
        source.order()
        self.source = source
        self.target = target
        self.fence = source.accepted
        """When the source has finished everything below this number, the way is clear."""
        self.items: list[T] = []
        self.watches: list[Watch] = []
        self._entrance = entrance
        self._on_arrival = on_arrival
        if source.leaving is None:
            source.leaving = []
        source.leaving.append(self)
        if target.arriving is None:
            target.arriving = []
        target.arriving.append(self)

    @property
    def line(self) -> Partition[T]:
        """Where a producer waits for room: the partition that keeps the places."""
        return self.target

    def offer(self, item: T) -> bool:
        """Take an item in if the target has a free place and nobody waits for it."""
        target = self.target
        if target.closed or target.waiters or target.permits or not target.make_room(1):
            return False
        self._hold((item,))
        return True

    def redeem(self, waiter: Waiter, items: Iterable[T]) -> None:
        """Put items into the places that the target granted."""
        self.target.use_permits(waiter, self._hold(items))
        self.target.arm()
        if not self.target.qsize():
            # Those behind in the line wait for the source now, which may wait for them.
            for other in self.target.in_line():
                if other.worker is not None:
                    break_circle(other.worker)

    def evict(self) -> T:
        """Remove the oldest item that can make room in the target."""
        return self.target.evict()

    def evict_first(self) -> T:
        """Remove the oldest item on its way to the target, which is empty, as if it had arrived and gone."""
        self.target.held -= 1
        self.target.removed += 1
        item = self.items.pop(0)
        for watch in self.watches:
            if watch.start == 0 < watch.end:
                watch.wait.fail((item,), ItemDroppedError("the item made room for a newer one (DROP_OLDEST)"))
            watch.start = max(0, watch.start - 1)
            watch.end -= 1
        return item

    def watch(self, wait: Wait, count: int) -> None:
        """Let a caller wait for the last `count` items."""
        end = len(self.items)
        if self.watches and self.watches[-1].wait is wait and self.watches[-1].end == end - count:
            self.watches[-1].end = end
            return
        wait.hold()
        self.watches.append(Watch(wait, end - count, end))

    def awaited_by(self, wait: Wait) -> bool:
        """Whether a caller waits for items that are on their way here."""
        return any(watch.wait is wait for watch in self.watches)

    def try_to_arrive(self) -> bool:
        """Go on into the target if the source has finished its part."""
        if self.source.finished < self.fence:
            return False
        self.arrive()
        return True

    def arrive(self) -> None:
        """Put everything into the target, and be gone."""
        source, target = self.source, self.target
        if source.leaving is not None:
            source.leaving.remove(self)
            source.leaving = source.leaving or None
        if target.arriving is not None:
            target.arriving.remove(self)
            target.arriving = target.arriving or None
        target.order()
        base = target.accepted
        target.held -= len(self.items)
        self._entrance().tail.extend(self.items)
        if self.watches:
            target.order()
        for watch in self.watches:
            watch.wait.watch(target, base + watch.start, base + watch.end)
            watch.wait.release()
        if self.items:
            target.touch()
        else:
            target.arm()
        self._on_arrival(self)

    def fail_waits(self, error: BaseException) -> None:
        """Nothing here will arrive: tell those who wait for it."""
        watches, self.watches = self.watches, []
        for watch in watches:
            watch.wait.fail(self.items[watch.start : watch.end], error)
            watch.wait.release()

    def drop(self) -> list[T]:
        """Remove everything, and tell nobody: the loop of those who wait has ended."""
        items, self.items = self.items, []
        self.target.held -= len(items)
        self.target.removed += len(items)
        return items

    def _hold(self, items: Iterable[T]) -> int:
        before = len(self.items)
        self.items.extend(items)
        count = len(self.items) - before
        self.target.held += count
        if self.target.linger_step is None:
            self.target.arm()
        else:
            self.target.touch()  # what is kept for us may make it full: then it must not linger
        return count
