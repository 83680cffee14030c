"""Where each item's partition is kept: the queue's partitions, which type lives where, and growth.

The order of items is kept through growth by moving a type (or, with other selectors, a pair of old and new
partition) through a `Transit` whenever its old partition still has something of it in hand.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from batchqueue_async.errors import ConfigError
from batchqueue_async.policies import RoundRobin, TypeHash, stable_type_hash
from batchqueue_async.queue.buffer import Lane
from batchqueue_async.queue.migration import Transit
from batchqueue_async.queue.partition import Partition
from batchqueue_async.queue.waits import Wait, break_circle

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from batchqueue_async.policies import Selector

T = TypeVar("T")
Place = Partition[T] | Lane[T] | Transit[T]


def _nothing() -> None:
    """Nobody wants to know."""


class Placement(Generic[T]):
    """The partitions of one queue, and the way from an item to its place.

    Attributes:
        by_type: under `type_hash`, the place of each type met so far; producers read it directly. None otherwise.
        only: the single partition of a queue that can't grow, else None.
        transits: what is moving.
    """

    def __init__(
        self, name: str, selector: Selector[T], partitions: list[Partition[T]], *, grows: bool, lanes: bool
    ) -> None:
        self.name = name
        self.selector = selector
        self.partitions = partitions
        self.only: Partition[T] | None = partitions[0] if len(partitions) == 1 and not grows else None
        typed = self.only is None and type(selector) is TypeHash
        self.by_type: dict[type, Place[T]] | None = {} if typed else None
        self._lanes = lanes
        self.transits: list[Transit[T]] = []
        self.on_settled: Callable[[], None] = _nothing
        self.on_rerouted: Callable[[], None] = _nothing
        # A selector that is not type_hash is asked for an index below `_width`. While it moves to more partitions,
        # `_fences` says up to which number each old partition holds items that were placed by the old width.
        self._width = len(partitions)
        self._next_width = 0
        self._fences: list[int] = []
        self._pairs: dict[tuple[int, int], Transit[T]] = {}

    def place(self, item: T) -> Place[T]:
        """The place that takes the item."""
        if self.only is not None:
            return self.only
        if self.by_type is not None:
            return self.place_of_type(type(item))
        index = self.index_of(item)
        return self._moving(item, index) if self._fences else self.partitions[index]

    def place_of_type(self, kind: type) -> Place[T]:
        """Where the items of a type go, under `type_hash`; a type met for the first time gets its place."""
        return (self.by_type or {}).get(kind) or self._first_of(kind)

    def place_in_line(self, item: T, line: Partition[T]) -> Place[T]:
        """The place of an item whose producer has got room by waiting in a line."""
        if self.by_type is not None:
            return self.place(item)
        if not self._fences:
            return line  # to ask a selector like round_robin() again would send the producer to another line
        place = self.place(item)
        return place if place.line is line else line

    def grow(self, new: list[Partition[T]]) -> None:
        """Add partitions, and start to move what belongs to them."""
        self.partitions.extend(new)
        if self.by_type is not None:
            for kind in list(self.by_type):
                self._move_type(kind)
            self._lead_waiters()
        elif isinstance(self.selector, RoundRobin):
            self._width = len(self.partitions)  # no order to keep
        elif not self._fences:
            self._move_all()

    def _lead_waiters(self) -> None:
        """Let every waiting producer stand where its item belongs now, in the order in which they came.

        Left in its old line it would wait for a partition that its item has nothing to do with any more, while later
        items of its type pass it.
        """
        crowded = [partition for partition in self.partitions if partition.waiters or partition.granted]
        for partition in crowded:
            for waiter in partition.in_line():
                if waiter.stays:
                    continue
                try:
                    line = self.place(waiter.item).line
                except Exception:  # noqa: BLE001, S112 - the selector is the user's: its own producer gets the error
                    continue
                if line is not partition:
                    partition.lead(waiter, line)
                    if waiter.worker is not None:
                        break_circle(waiter.worker)

    # -- type_hash: a type at a time -----------------------------------------------------------------------------

    def _home(self, kind: type) -> Partition[T]:
        return self.partitions[stable_type_hash(kind) % len(self.partitions)]

    def _first_of(self, kind: type) -> Place[T]:
        return self._settle_type(kind, self._home(kind))

    def _settle_type(self, kind: type, home: Partition[T]) -> Partition[T] | Lane[T]:
        place = home.lane(kind) if self._lanes else home
        if self.by_type is not None:
            self.by_type[kind] = place
        return place

    def _move_type(self, kind: type) -> None:
        if self.by_type is None:
            return
        old, home = self.by_type[kind], self._home(kind)
        if isinstance(old, Transit) or old.line is home:
            return  # one on its way is looked at again when it arrives
        if self._lanes:
            old.line.close_lane(kind)
        if old.line.finished == old.line.accepted:
            self._settle_type(kind, home)
            return
        transit = Transit(old.line, home, partial(self._settle_type, kind, home), partial(self._type_arrived, kind))
        self.transits.append(transit)
        self.by_type[kind] = transit

    def _type_arrived(self, kind: type, transit: Transit[T]) -> None:
        self.transits.remove(transit)
        self._move_type(kind)
        self.on_rerouted()
        self._lead_waiters()  # it may move on: the queue may have grown again meanwhile
        self._tell_settled()

    # -- other selectors: all at once, each pair of old and new partition through its own transit ------------------

    def index_of(self, item: T) -> int:
        """The index that a selector gives for the item now."""
        return self.ask(item, self._width)

    @property
    def width(self) -> int:
        """Below what a selector's index is for an item that comes in now: its last stop has that index."""
        return self._next_width if self._fences else self._width

    @property
    def moving(self) -> bool:
        """Whether some items have to take their way through a transit."""
        return bool(self.transits) or bool(self._fences)

    def ask(self, item: T, width: int) -> int:
        """The selector's index for an item, checked; from any thread."""
        index = self.selector(item, width)
        if not 0 <= index < width:
            raise ConfigError(
                f"queue {self.name!r}: selector={self.selector} gave {index!r} for {width} partitions; "
                f"return an index from 0 to {width - 1}"
            )
        return index

    def _move_all(self) -> None:
        old = self.partitions[: self._width]
        wait = Wait()
        for partition in old:
            wait.watch(partition, 0, partition.accepted)
        wait.seal()
        if wait.future.done():
            self._width = len(self.partitions)
        else:
            self._next_width = len(self.partitions)
            self._fences = [partition.accepted for partition in old]
            wait.future.add_done_callback(self._all_moved)
        self._lead_waiters()

    def _all_moved(self, _: asyncio.Future[None]) -> None:
        self._width = self._next_width
        self._fences = []
        if len(self.partitions) > self._width:
            self._move_all()
        self.on_rerouted()

    def _moving(self, item: T, index: int) -> Place[T]:
        old = self.partitions[index]
        new_index = self.ask(item, self._next_width)
        if new_index == index:
            return old
        pair = (index, new_index)
        transit = self._pairs.get(pair)
        if transit is not None:
            return transit
        new = self.partitions[new_index]
        if old.finished >= self._fences[index]:
            return new
        transit = Transit(old, new, lambda: new, partial(self._pair_arrived, pair))
        transit.fence = self._fences[index]
        self._pairs[pair] = transit
        self.transits.append(transit)
        return transit

    def _pair_arrived(self, pair: tuple[int, int], transit: Transit[T]) -> None:
        del self._pairs[pair]
        self.transits.remove(transit)
        self._tell_settled()

    def _tell_settled(self) -> None:
        if not self.transits:
            self.on_settled()
