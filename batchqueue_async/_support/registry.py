"""Everything of this process that has statistics, found by whoever wants to show them; nothing is kept alive by it.

Queues, bridges, durable queues and exporters register when they are made. Metrics, dashboards and commands read.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from batchqueue_async._support import forks
from batchqueue_async._support.locked import guarded, locked

if TYPE_CHECKING:
    from collections.abc import Callable

S = TypeVar("S")

Kind = Literal["queue", "bridge", "durable_queue", "exporter", "consumer", "pipeline"]


class Observable(Protocol):
    """Something with a name, whose numbers any thread may read without waiting."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    def peek(self) -> Any:
        """A snapshot of its numbers, from any thread and without waiting."""
        ...


class Registered(NamedTuple):
    """One thing that has statistics.

    Example:
        >>> Registered("queue", "spans", object()).kind
        'queue'

    Attributes:
        kind: what it is: "queue", "bridge", "durable_queue", "exporter", "consumer" or "pipeline".
        name: what it is called; unique for no kind but "queue", and there only within its manager.
        thing: the object itself; `thing.peek()` reads its numbers from any thread.
    """

    kind: Kind
    name: str
    thing: Any


class Registry:
    """A weak, ordered set of things with statistics; every call is safe from every thread.

    Example:
        >>> class Pump:
        ...     name = "pump"
        ...     def peek(self) -> int:
        ...         return 3
        >>> registry, pump = Registry(), Pump()
        >>> registry.add("consumer", pump)
        >>> [(each.kind, each.name, each.thing.peek()) for each in registry.all()]
        [('consumer', 'pump', 3)]
        >>> del pump
        >>> registry.all()
        []
    """

    def __init__(self) -> None:
        # Taken again by its holder where a finalizer runs amid a call.
        self._lock = threading.RLock()
        # The collector may run at any allocation, and take entries out. A walk over the table itself would then fail,
        # as does `list()` of its items, which allocates for each; a copy is made in one step.
        self._things: dict[int, tuple[Kind, weakref.ref[Any]]] = {}
        self._numbers = 0
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child nothing that was registered goes on: their threads and loops stayed behind."""
        self._lock = threading.RLock()
        self._things = {}

    @locked
    def add(self, kind: Kind, thing: Observable) -> None:
        """Let a thing be found until it is collected or removed."""
        self._numbers += 1
        number = self._numbers
        self._things[number] = (kind, weakref.ref(thing, lambda _: self._things.pop(number, None)))

    @locked
    def remove(self, thing: Observable) -> None:
        """Let a thing be found no more; for one that has ended and is still referred to."""
        for number, (_, reference) in self._things.copy().items():
            if reference() is thing:
                self._things.pop(number, None)

    def all(self, kind: Kind | None = None) -> list[Registered]:
        """What is alive now, in the order in which it came; of one kind, or of every."""
        held = guarded(self._lock, self._things.copy).values()
        found: list[Registered] = []
        for each, reference in held:
            thing = reference()
            if thing is not None and kind in {None, each}:
                found.append(Registered(each, thing.name, thing))
        return found


def looked_at(read: Callable[[], S], *, looks: int = 8) -> S:
    """Read numbers that another thread may be changing: again, where a table grew while it was read.

    Example:
        >>> looked_at(lambda: 3)
        3
    """
    for _ in range(looks - 1):
        try:
            return read()
        except (RuntimeError, LookupError, StopIteration):  # a table changed during its iteration, or was emptied
            time.sleep(0)  # let the loop finish the step that it is in
    return read()


everything = Registry()
"""The process's own registry."""


def registered(kind: Kind | None = None) -> list[Registered]:
    """Everything of this process that has statistics, or what is of one kind, in the order in which it was made.

    Safe from every thread. Nothing is kept alive by being listed, except by the list itself.

    Example:
        >>> import asyncio, batchqueue_async as bq
        >>> async def main() -> list[str]:
        ...     async with bq.BatchQueueManager() as manager:
        ...         spans = manager.create("spans", bq.QueueConfig())
        ...         return [each.name for each in bq.registered("queue") if each.thing is spans]
        >>> asyncio.run(main())
        ['spans']
    """
    return everything.all(kind)
