"""From an item to its gate, for callers on any thread: by its type, in turns, or by asking the queue's selector.

The selector may be the user's code: it is asked before the door's lock is taken, for the number of partitions known
then, and once more in the rare case that the queue has grown in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async.policies import stable_type_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.bridge.credits import Gate
    from batchqueue_async.queue.batch_queue import BatchQueue

T = TypeVar("T")
Route = tuple[int, int]
"""The index of an item's partition, and of how many."""


class Routing(Generic[T]):
    """The part of a door that knows the ways to its gates."""

    def __init__(self, queue: BatchQueue[T]) -> None:
        self.queue = queue
        self.closed = False
        self.only: Gate[T] | None = None
        self.by_type: dict[type, Gate[T]] | None = None
        self._gates: list[Gate[T]] = []
        self._turn: int | None = None
        self._width = 0
        self._met: list[type] = []
        """Types that came in and the placement has not been told of."""

    def _route(self, item: T) -> Route | None:
        """Outside the lock: what the user's selector says, if it is one that has to be asked."""
        width = self._width
        return (self.queue.router.ask(item, width), width) if width else None

    def _routes(self, items: Sequence[T]) -> Sequence[Route]:
        width = self._width
        ask = self.queue.router.ask
        return [(ask(item, width), width) for item in items] if width else ()

    def _gate(self, item: T, route: Route | None) -> Gate[T] | None:
        """Under the lock: the item's gate; None while there is none, or if the route is out of date."""
        if self.closed or not self._gates:
            return None
        if self.by_type is not None:
            kind = type(item)
            return self.by_type.get(kind) or self._meet(kind)
        if self._turn is not None:
            self._turn += 1
            return self._gates[(self._turn - 1) % len(self._gates)]
        if self._width:
            return self._gates[route[0]] if route is not None and route[1] == self._width else None
        return self.only

    def _gate_again(self, item: T) -> Gate[T] | None:
        """Under the lock: the gate if there is one, after the queue has grown between asking and taking the lock."""
        return self._gate(item, self._route(item)) if self._width and not self.closed else None

    def _meet(self, kind: Any) -> Gate[T]:
        """A type turns up for the first time since the routes were made."""
        places = self.queue.router.by_type or {}
        place = places.get(kind)
        if place is None:
            self._met.append(kind)
        index = stable_type_hash(kind) % len(self._gates) if place is None else place.partition.index
        gate = self._gates[index]
        if self.by_type is not None:
            self.by_type[kind] = gate
        return gate
