"""Where each item's partition is kept: the queue's partitions, which type lives where, and growth.

The order of items is kept through growth by moving a type (or, with other selectors, a pair of old and new
partition) through a `Migration` whenever its old partition still has something of it in hand.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, SupportsIndex, TypeVar, cast

from batchqueue_async._native import RouterFields, TypeTable
from batchqueue_async._support.wording import short
from batchqueue_async.errors import ConfigError
from batchqueue_async.policies import RoundRobin, TypeHash, key_of, stable_type_hash
from batchqueue_async.queue.completion import CompletionWait
from batchqueue_async.queue.migration import Migration
from batchqueue_async.queue.partition import Lane, Partition

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from batchqueue_async.policies import Selector

T = TypeVar("T")
Route = Partition[T] | Lane[T] | Migration[T]
"""Where an item goes: all three take it by `offer`, and lead to a `partition`."""


def _nothing() -> None:
    """Nobody wants to know."""


class PartitionRouter(RouterFields, Generic[T]):
    """The partitions of one queue, and the way from an item to where it goes.

    Attributes:
        by_type: under `type_hash`, the route of each type that has been met since the queue grew and is not moving;
            producers read it directly. None otherwise.
        only: the single partition of a queue that can't grow, else None.
        migrations: what is moving.
        epoch: how often routes have changed; what was a route in one epoch may be none in the next.
    """

    def __init__(
        self,
        name: str,
        selector: Selector[T],
        partitions: list[Partition[T]],
        *,
        crowded: set[Partition[T]],
        grows: bool,
        lanes: bool,
    ) -> None:
        self.name = name
        self._crowded = crowded
        self.selector = selector
        self._turns = selector.turns if type(selector) is RoundRobin else None
        self._key = key_of(selector)
        self.partitions: list[Partition[T]] = partitions
        self.only: Partition[T] | None = partitions[0] if len(partitions) == 1 and not grows else None
        typed = self.only is None and type(selector) is TypeHash
        self.by_type: dict[type, Partition[T] | Lane[T]] | None = TypeTable() if typed else None
        # By the types' identities: a type may have a hash that raises, which must not lose track of what is under way.
        self._migrating: dict[int, tuple[type, Migration[T]]] = {}
        self._before: dict[int, tuple[type, Partition[T]]] = {}
        """Where a type was before the queue grew, if something of it may still be there."""
        self._lanes = lanes
        self.migrations: dict[Migration[T], None] = {}
        self.epoch = 0
        self.on_settled: Callable[[], None] = _nothing
        self.on_rerouted: Callable[[], None] = _nothing
        # A selector that is not type_hash is asked for an index below `_width`. While it moves to more partitions,
        # `_fences` says up to which number each old partition holds items that were placed by the old width.
        self._width = len(partitions)
        self._next_width = 0
        self._fences: list[int] = []
        self._pairs: dict[tuple[int, int], Migration[T]] = {}

    def route(self, item: T) -> Route[T]:
        """Where the item goes."""
        if self.only is not None:
            return self.only
        if self.by_type is not None:
            return self.route_of_type(type(item))
        index = self.index_of(item)
        return self._moving(item, index) if self._fences else self.partitions[index]

    def route_of_type(self, kind: type) -> Route[T]:
        """Where the items of a type go, under `type_hash`; a type met for the first time gets its route."""
        found = (self.by_type or {}).get(kind)
        if found is not None:
            return found
        _, migration = self._migrating.get(id(kind), (kind, None))
        return migration or self._first_of(kind)

    def route_in(self, item: T, partition: Partition[T]) -> Route[T]:
        """The route of an item whose producer has got room by waiting for a partition."""
        if self.by_type is not None:
            return self.route(item)
        if not self._fences:
            return partition  # to ask a selector like round_robin() again would send the producer elsewhere
        route = self.route(item)
        return route if route.partition is partition else partition

    def grow(self, new: list[Partition[T]]) -> None:
        """Add partitions, and start to move what belongs to them."""
        self.partitions.extend(new)
        self.epoch += 1
        if self.by_type is not None:
            self._unsettle_types()
            self._lead_waiters()
        elif isinstance(self.selector, RoundRobin):
            self._width = len(self.partitions)  # no order to keep
        elif not self._fences:
            self._move_all()

    def forget_types(self, unused: Callable[[type], bool]) -> None:
        """Let go of the types that nobody has a handler for any more, unless something of them is under way."""
        if self.by_type is not None:
            for kind, route in list(self.by_type.items()):
                with suppress(Exception):  # the hash of a class may be the user's: such a type stays
                    if route.partition.idle and unused(kind):
                        self._unsettle(kind)
            self._before = {key: (kind, place) for key, (kind, place) in self._before.items() if not place.idle}

    def _lead_waiters(self) -> None:
        """Let every waiting producer wait where its item belongs now, in the order in which they came.

        Left where it is it would wait for a partition that its item has nothing to do with any more, while later
        items of its type pass it.
        """
        # Kept by the partitions, since to look for them would cost each of many types that are added all partitions.
        for partition in sorted(self._crowded, key=lambda each: each.index):
            for waiter in partition.everyone_waiting():
                if waiter.stays:
                    continue
                try:
                    target = self.route(waiter.item).partition
                except Exception:  # noqa: BLE001, S112 - the selector is the user's: its own producer gets the error
                    continue
                if target is not partition:
                    partition.lead(waiter, target)
                    waiter.look_for_circle()

    # -- type_hash: a type at a time -----------------------------------------------------------------------------

    def _home(self, kind: type) -> Partition[T]:
        return self.partitions[stable_type_hash(kind) % len(self.partitions)]

    def _first_of(self, kind: type) -> Route[T]:
        """A type is met for the first time, or for the first time since the queue has grown."""
        home = self._home(kind)
        _, old = self._before.get(id(kind), (kind, None))
        if old is None or old is home or old.idle:
            route: Route[T] = self._settle_type(kind, home)
        else:
            route = Migration(old, home, partial(self._settle_arrived, kind, home), partial(self._type_arrived, kind))
            self.migrations[route] = None
            self._migrating[id(kind)] = kind, route
        self._before.pop(id(kind), None)
        return route

    def _settle_type(self, kind: type, home: Partition[T]) -> Partition[T] | Lane[T]:
        route = home.lane(kind) if self._lanes else home
        if self.by_type is not None:
            try:
                self.by_type[kind] = route
            except Exception:  # the hash of a class may be the user's: nobody finds a lane of it
                if isinstance(route, Lane):
                    home.close_lane(route)
                raise
        return route

    def _settle_arrived(self, kind: type, home: Partition[T]) -> Partition[T] | Lane[T]:
        """The same for a type that has moved: what has arrived has its place, whatever its class does."""
        try:
            return self._settle_type(kind, home)
        except Exception:  # noqa: BLE001 - the hash of a class may be the user's: its next item finds the way anew
            self._before[id(kind)] = kind, home
            return home

    def _unsettle_types(self) -> None:
        """The queue has grown: each type finds its home anew when it is met again, and moves then if it has to.

        So growing costs what was met since it grew last, and not what was ever met.
        """
        settled = dict(self.by_type or {})
        if self.by_type is not None:
            self.by_type.clear()
        for partition in dict.fromkeys(route.partition for route in settled.values()):
            partition.close_lanes()
        self._before.update(
            (id(kind), (kind, route.partition)) for kind, route in settled.items() if not route.partition.idle
        )

    def _unsettle(self, kind: type) -> None:
        """One type finds its home anew when it is met again."""
        if self.by_type is None or (route := self.by_type.pop(kind, None)) is None:
            return
        if isinstance(route, Lane):
            route.partition.close_lane(route)
        if not route.partition.idle:
            self._before[id(kind)] = kind, route.partition

    def _type_arrived(self, kind: type, migration: Migration[T]) -> None:
        self.epoch += 1
        del self.migrations[migration]
        del self._migrating[id(kind)]
        with suppress(Exception):  # the hash of a class may be the user's: such a type stays where it is
            if self._home(kind) is not migration.target:  # the queue may have grown again meanwhile
                self._unsettle(kind)
        self.on_rerouted()
        self._lead_waiters()
        self._tell_settled()

    # -- other selectors: all at once, each pair of old and new partition through its own migration ------------------

    def index_of(self, item: T) -> int:
        """The index that a selector gives for the item now."""
        return self.ask(item, self._width)

    @property
    def width(self) -> int:
        """Below what a selector's index is for an item that comes in now: its last stop has that index."""
        return self._next_width if self._fences else self._width

    @property
    def moving(self) -> bool:
        """Whether some items have to take their way through a migration."""
        return bool(self.migrations) or bool(self._fences) or bool(self._before)

    def ask(self, item: T, width: int) -> int:
        """The selector's index for an item, checked; from any thread."""
        index = self.selector(item, width)
        if type(index) is int and 0 <= index < width:
            return index
        return self._checked(index, width)

    def _checked(self, given: object, width: int) -> int:
        """What a selector gave that is not simply a right index: one of another class, or none at all."""
        problem = ", which is not a whole number"
        with suppress(TypeError):
            index = operator.index(cast("SupportsIndex", given))  # such as an index of NumPy's
            if 0 <= index < width:
                return index
            problem = ""
        raise ConfigError(
            f"queue {self.name!r}: selector={self.selector} gave {short(given)} for {width} partitions{problem}; "
            f"return an index from 0 to {width - 1}"
        )

    def _move_all(self) -> None:
        old = self.partitions[: self._width]
        wait = CompletionWait()
        for partition in old:
            partition.fence(wait)
        wait.seal()
        if wait.future.done():
            self._width = len(self.partitions)
        else:
            self._next_width = len(self.partitions)
            self._fences = [partition.accepted for partition in old]
            wait.future.add_done_callback(self._all_moved)
        self._lead_waiters()

    def _all_moved(self, _: asyncio.Future[None]) -> None:
        self.epoch += 1
        self._width = self._next_width
        self._fences = []
        if len(self.partitions) > self._width:
            self._move_all()
        self.on_rerouted()

    def _moving(self, item: T, index: int) -> Route[T]:
        old = self.partitions[index]
        new_index = self.ask(item, self._next_width)
        if new_index == index:
            return old
        pair = (index, new_index)
        migration = self._pairs.get(pair)
        if migration is not None:
            return migration
        new = self.partitions[new_index]
        if old.finished >= self._fences[index]:
            return new
        migration = Migration(old, new, lambda: new, partial(self._pair_arrived, pair))
        migration.clear_at = self._fences[index]
        self._pairs[pair] = migration
        self.migrations[migration] = None
        return migration

    def _pair_arrived(self, pair: tuple[int, int], migration: Migration[T]) -> None:
        self.epoch += 1
        del self._pairs[pair]
        del self.migrations[migration]
        self._tell_settled()

    def _tell_settled(self) -> None:
        if not self.migrations:
            self.on_settled()
