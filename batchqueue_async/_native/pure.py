"""What the compiled hot path replaces and no class of its own has: the same in Python."""

from __future__ import annotations

from itertools import repeat as Countdown  # noqa: N812 - its name here says what it is used for
from operator import countOf
from threading import RLock as InboxLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableSequence, Sequence

__all__ = [
    "Countdown",
    "Door",
    "Entrance",
    "Inbox",
    "InboxLock",
    "Place",
    "Share",
    "group_by_type",
    "one_type",
    "put_credits",
    "put_run",
    "sort_run",
]


class Place:
    """The fields of a partition and of a lane that the hot path uses."""

    __slots__ = ("fast_slots", "tail")

    tail: list[Any]
    fast_slots: Countdown[None]


class Entrance:
    """The fields of a queue that the hot path uses."""

    __slots__ = ()

    _thread: int


class Share:
    """The fields of an inbox's share that the hot path uses."""

    __slots__ = ("free", "items")

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
    for index in range(start, len(items)):
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
    return len(items)


def sort_run(by_type: Mapping[type, list[Any]], items: Sequence[Any], start: int) -> int:
    """Append items to the lists of their types, from an index on; the index of the first whose type has none."""
    for index in range(start, len(items)):
        item = items[index]
        try:
            by_type[type(item)].append(item)
        except KeyError:
            return index
    return len(items)


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


def group_by_type(items: list[Any]) -> list[list[Any]] | None:
    """The items of each type, in their order; None where the identities of the types have to do."""
    if one_type(items):
        return [items]
    return None
