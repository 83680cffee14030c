"""One round of a drain task: the items that it took, the handler calls that they make, and what becomes of them.

A round owns its items from the moment they leave their partitions until each has an outcome. Whoever wants to know
what is unfinished asks the round: the dispatch that calls the handlers, the drain task when it is cut off, and a
shutdown that gives up on it. A round that was abandoned counts nothing any more, whatever its handler still does.
"""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async._native import RoundFields

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchqueue_async.queue.dispatch import HandlerEntry
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.partition import Partition

T = TypeVar("T")

Chunk = tuple["Partition[T]", "list[T]", "type | None"]
"""Items taken out of a partition, and their type if they are of one."""

Call = tuple["HandlerEntry[T] | None", "list[T]"]
"""A handler (None: no handler takes the items) and the items of one call."""

current_round: ContextVar[Round[Any] | None] = ContextVar("batchqueue_round", default=None)
"""The round in one of whose handler calls this code runs: a deadlock shows by it."""


class Round(RoundFields, Generic[T]):
    """What a drain task took at once, and how far it has got with it.

    What belongs together: `calls[call_index:]` are the calls that have no outcome yet, the first of them running, and
    `pending` is the number of their items. Before the items are grouped into calls, all of `chunks` is pending. Only
    the dispatch advances the three; a hot path does so by itself.

    Attributes:
        drain: the drain task.
        chunks: the items as they were taken, by partition, in their order there; those of calls that have ended may be
            None by now, as many as they were.
        calls: the handler calls of the round; None until the items are grouped.
        call_index: which call is under way.
        pending: how many items have no outcome yet.
        began: when the call that is under way began, in a round whose calls are timed.
        running: whether the drain task is in it now.
        abandoned: whether a shutdown has given up on it, so that what its handler still does no longer counts.
    """

    __slots__ = ("_told_until", "running")

    def __init__(self, drain: DrainTask[T]) -> None:
        self.drain = drain
        self.chunks: list[Chunk[T]] = []
        self.calls: list[Call[T]] | None = None
        self.call_index = 0
        self.pending = 0
        self.began = 0.0
        self.running = True
        self.abandoned = False
        # For those who wait: the numbers, by type, of the items of the calls from `_told_until` on. Once they are
        # there, the items have to stay until the round is over.
        self._numbers: dict[int, deque[tuple[Partition[T], int]]] | None = None
        self._told_until = 0

    def unfinished(self) -> list[T]:
        """The items that have no outcome: those of the call that was cut off, and of those that never began."""
        if self.calls is None:
            return [item for _, items, _ in self.chunks for item in items]
        return [item for _, items in self.calls[self.call_index :] for item in items]

    def in_call(self) -> int:
        """How many items are with the call that is under way."""
        calls = self.calls
        return len(calls[self.call_index][1]) if calls is not None and self.call_index < len(calls) else 0

    def entry_here(self) -> HandlerEntry[T] | None:
        """The handler whose call is under way, if one is."""
        calls = self.calls
        return calls[self.call_index][0] if calls is not None and self.call_index < len(calls) else None

    def replace_call(self, index: int, calls: Sequence[Call[T]]) -> None:
        """Let the items of a call go into other calls, which come next."""
        if self.calls is not None:
            self.calls[index : index + 1] = [(None, []), *calls]

    def fail(self, error: BaseException) -> None:
        """The call under way has come to its end, and its items were not handled."""
        if self.calls is None:
            return
        self._tell_waiting(self.call_index, error)
        self.pending -= len(self.calls[self.call_index][1])
        self.call_index += 1

    def fail_unfinished(self, error: BaseException) -> None:
        """Tell those who wait for what is unfinished that it will not be handled."""
        if self.calls is not None:
            for index in range(self.call_index, len(self.calls)):
                self._tell_waiting(index, error)
        elif self.is_awaited:
            for partition, number, item in self._numbered():
                partition.fail_item(number, item, error)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the outcome of some of its items."""
        return any(partition.ranges is not None for partition, _, _ in self.chunks)

    def _tell_waiting(self, index: int, error: BaseException) -> None:
        """Tell those who wait for the items of a handler call that they were not handled."""
        if self.calls is None or not self.is_awaited:
            return
        if self._numbers is None:
            # Keyed by the types' identities: a type may have a hash that raises.
            self._numbers = {}
            for partition, number, item in self._numbered():
                self._numbers.setdefault(id(type(item)), deque()).append((partition, number))
        # The calls have the items of each type in the order of the chunks: that gives each item's number back.
        for _, items in self.calls[self._told_until : index]:
            for item in items:
                self._numbers[id(type(item))].popleft()
        for item in self.calls[index][1]:
            partition, number = self._numbers[id(type(item))].popleft()
            partition.fail_item(number, item, error)
        self._told_until = index + 1

    def _numbered(self) -> Iterable[tuple[Partition[T], int, T]]:
        """Every item with its partition and its sequence number there."""
        numbers: dict[Partition[T], int] = {}
        for partition, taken, _ in self.chunks:
            start = numbers.get(partition, partition.flight_start)
            numbers[partition] = start + len(taken)
            for number, item in enumerate(taken, start):
                yield partition, number, item

    def partitions_of(self, items: Sequence[object]) -> list[int]:
        """From which partitions such items come; looked up only for a log event."""
        kinds = {id(type(item)) for item in items}
        found = {
            partition.index
            for partition, taken, _ in self.chunks
            if not kinds.isdisjoint(id(type(item)) for item in taken)
        }
        return sorted(found)

    def close(self) -> None:
        """Every item has an outcome: let go of them, since a task that a handler started keeps the round alive."""
        self.running = False
        self.chunks = []
        self.calls = None

    def abandon(self) -> None:
        """Give up on it: its items are accounted for elsewhere, and whatever its handler still does counts nothing."""
        self.abandoned = True
        self.pending = 0
        self.chunks = []
        self.calls = None
