"""What the compiled hot path replaces and no class of its own has: the same in Python."""

from __future__ import annotations

from itertools import count as Turns  # noqa: N812 - its name here says what it is used for
from itertools import repeat as Countdown  # noqa: N812 - likewise
from math import inf
from operator import countOf
from threading import RLock as InboxLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableSequence, Sequence

__all__ = [
    "NO_CALL",
    "NO_SLOTS",
    "Countdown",
    "CounterFields",
    "Door",
    "DrainFields",
    "Entrance",
    "HandlerFields",
    "Inbox",
    "InboxLock",
    "LaneFields",
    "PartitionFields",
    "Place",
    "RoundFields",
    "RouterFields",
    "Share",
    "SizeFields",
    "TurnFields",
    "Turns",
    "TypeTable",
    "call_usual",
    "finish_usual",
    "group_by_type",
    "group_usual",
    "key_indexes",
    "key_parts",
    "one_type",
    "put_credits",
    "put_held",
    "put_indexed",
    "put_run",
    "put_together",
    "sort_run",
    "take_usual",
]

TypeTable = dict
NO_SLOTS: Countdown[None] = Countdown(None, 0)
NO_CALL = object()
"""What `call_usual` answers with where nothing is to be awaited."""


class Place:
    """The fields of a partition and of a lane that the hot path uses."""

    __slots__ = ("fast_slots", "tail")

    tail: list[Any]
    fast_slots: Countdown[None]


class PartitionFields(Place):
    """The fields of a partition that the hot path uses."""

    __slots__ = (
        "_armed",
        "_in_lanes",
        "_sealed",
        "byte_room",
        "capacity",
        "closed",
        "credits",
        "flight_start",
        "held",
        "in_flight",
        "lanes",
        "leaving",
        "linger_step",
        "listed",
        "marks",
        "next_owner",
        "on_ready",
        "ranges",
        "removed",
        "since",
        "waiters",
    )


class LaneFields(Place):
    """The fields of a lane that the hot path uses."""

    __slots__ = ("asleep", "kind", "partition")


class DrainFields:
    """The fields of a drain task that the hot path uses."""

    __slots__ = ("_sleeper", "clock", "dispatch", "disturbed", "prompt", "ready")


class RoundFields:
    """The fields of a round that the hot path uses."""

    __slots__ = ("_numbers", "abandoned", "began", "call_index", "calls", "chunks", "drain", "pending")


class HandlerFields:
    """The fields of a handler's entry that the hot path uses."""

    __slots__ = ("calls", "consume", "durations", "items", "most", "timeout", "turns")


class TurnFields:
    """The fields of the turns of a handler that the hot path uses."""

    __slots__ = ("holders", "limit", "waiting")


class CounterFields:
    """The field of a queue's counts that the hot path uses."""

    __slots__ = ("handled",)


class SizeFields:
    """The fields of the counts of batch sizes that the hot path uses."""

    __slots__ = ("exact", "last", "times")


class RouterFields:
    """The fields of a router that the hot path uses."""

    __slots__ = ()

    partitions: list[Any]
    _fences: list[int]
    _key: Callable[[Any], Any] | None
    _turns: Turns[int] | None
    _width: int


class Entrance:
    """The fields of a queue that the hot path uses."""

    __slots__ = ()

    _thread: int


class Share:
    """The fields of an inbox's share that the hot path uses."""

    __slots__ = ("batch", "free", "items")

    batch: int
    free: int
    items: MutableSequence[Any]


class Inbox:
    """The fields of an inbox that the hot path uses."""

    __slots__ = ()


class Door:
    """The field of a queue's bridge that the hot path uses."""

    __slots__ = ()


def put_run(by_type: Mapping[type, Any], items: Sequence[Any], start: int) -> int:
    """Put items into the fast slots of their types, from an index on; the index of the first that has none."""
    end = len(items)
    for index in range(start, end):
        item = items[index]
        try:
            route = by_type[type(item)]
        except KeyError:
            return index
        for _ in route.fast_slots:
            route.tail.append(item)
            break
        else:
            return index
    return end


def put_together(place: Any, items: Sequence[Any]) -> bool:
    """Put items into free places of a partition or a lane, all or none; none, as `Partition.offer_many` does so."""
    del place, items
    return False


def sort_run(by_type: Mapping[type, list[Any]], items: Sequence[Any], start: int) -> int:
    """Append items to the lists of their types, from an index on; the index of the first whose type has none."""
    end = len(items)
    for index in range(start, end):
        item = items[index]
        try:
            by_type[type(item)].append(item)
        except KeyError:
            return index
    return end


def one_type(items: Sequence[object]) -> bool:
    """Whether all items are of one type; True where there are none."""
    if not items:
        return True
    kind: type[object] = type(items[0])
    return type(items[-1]) is kind and countOf(map(type, items), kind) == len(items)


def put_credits(by_type: Mapping[type, Any], items: Sequence[Any], start: int) -> int:
    """Put items into the places of their types, from an index on; none, as the Python does so a run at a time."""
    del by_type, items
    return start


def put_held(by_type: Mapping[type, Any] | None, partition: Any, items: list[Any]) -> None:
    """Let items go from a list into the lanes of their types; none, as `Partition.adopt` takes lists of them."""
    del by_type, partition, items


def group_by_type(items: list[Any]) -> list[list[Any]] | None:
    """The items of each type, in their order; None where the identities of the types have to do."""
    if one_type(items):
        return [items]
    return None


def key_indexes(key: Callable[[Any], Any], items: Sequence[Any], start: int, width: int) -> list[int]:
    """The indexes that the keys of the items from `start` on give, of `width` partitions."""
    return [hash(key(item)) % width for item in items[start:]]


def put_indexed(shares: list[Any], items: Sequence[Any], indexes: list[int], start: int) -> int:
    """Put items into the shares of their indexes, from an index on; none, as the Python does so a run at a time."""
    del shares, items, indexes
    return start


def key_parts(router: Any, items: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, list[Any]]]] | None:
    """The partition of each item by its key, and the items of each; None, as the Python has its own loop."""
    del router, items
    return None


def take_usual(ready: Any, chunks: list[Any], left: int, most: int, together: int) -> tuple[int, int, float]:
    """Take partitions whole, up to the first that is not usual; none, as the Python has its own loop."""
    del ready, chunks, most, together
    return left, 0, inf


def finish_usual(chunks: list[Any]) -> int:
    """Let the partitions of chunks be finished, up to the first that is not usual; none."""
    del chunks
    return 0


def group_usual(resolved: Mapping[type, Any], chunks: list[Any], most: int) -> list[Any] | None:
    """The calls for chunks that are each of a type of its own; None where the Python has to look."""
    del resolved, chunks, most
    return None


def call_usual(round_: Any, counters: Any, sizes: Any, context: Any, timed: int) -> Any:
    """Make the calls of a round, up to the first that waits or raises: what is to be awaited; none."""
    del round_, counters, sizes, context, timed
    return NO_CALL
