"""A sorted collection with cheap insertion, removal and minimum. Pure.

Lists of bounded length, in order: each change touches one of them, so that its cost does not grow with the collection
in any way that shows; nothing is deleted lazily, so nothing is left behind.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T", bound=Any)
_MOST = 512


class SortedItems(Generic[T]):
    """Distinct, comparable items in order.

    Example:
        >>> items = SortedItems[int]()
        >>> for number in (3, 1, 2):
        ...     items.add(number)
        >>> items.remove(1)
        >>> items.first, list(items), len(items)
        (2, [2, 3], 2)
    """

    __slots__ = ("_count", "_lists", "_lows")

    def __init__(self) -> None:
        self._lists: list[list[T]] = []
        # The first item of each list, in the same order.
        self._lows: list[T] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for items in self._lists:
            yield from items

    @property
    def first(self) -> T:
        """The lowest item; there is one."""
        return self._lows[0]

    def add(self, item: T) -> None:
        """Put an item in its place."""
        self._count += 1
        lists, lows = self._lists, self._lows
        if not lists:
            lists.append([item])
            lows.append(item)
            return
        at = self._at(item)
        items = lists[at]
        if item < items[0]:
            items.insert(0, item)
            lows[at] = item
        else:
            insort(items, item)
        if len(items) > _MOST:
            half = items[_MOST // 2 :]
            del items[_MOST // 2 :]
            lists.insert(at + 1, half)
            lows.insert(at + 1, half[0])

    def remove(self, item: T) -> None:
        """Take an item out that is in."""
        at = self._at(item)
        items = self._lists[at]
        place = bisect_left(items, item)
        if items[place] != item:
            raise KeyError(item)
        del items[place]
        self._count -= 1
        if not items:
            del self._lists[at], self._lows[at]
        elif place == 0:
            self._lows[at] = items[0]

    def clear(self) -> None:
        """Take all of them out."""
        self._lists.clear()
        self._lows.clear()
        self._count = 0

    def _at(self, item: T) -> int:
        at = bisect_left(self._lows, item)
        return at if at < len(self._lows) and self._lows[at] == item else max(0, at - 1)
