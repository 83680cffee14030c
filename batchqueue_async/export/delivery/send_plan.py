"""Which records of a batch go into which send: a list of parts that are still to be sent. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class SendPlan:
    """The sends of one batch, in order.

    Example:
        >>> plan = SendPlan([range(4)], extra=10)
        >>> plan.halve(plan.next())
        True
        >>> plan.next(), plan.next(), bool(plan)
        (range(0, 2), range(2, 4), False)

    Attributes:
        extra: how many more sends may be added in a row.
    """

    def __init__(self, parts: Iterable[Sequence[int]], extra: int) -> None:
        self._parts = list(reversed(list(parts)))
        self.extra = extra

    def __bool__(self) -> bool:
        return bool(self._parts)

    def next(self) -> Sequence[int]:
        """The places of the next send; there is one."""
        return self._parts.pop()

    def back(self, places: Sequence[int]) -> None:
        """These were not sent after all."""
        self._parts.append(places)

    def halve(self, places: Sequence[int]) -> bool:
        """Send these in two halves, the first half next; False when no more sends may be added."""
        if self.extra < 1:
            return False
        self.extra -= 1
        middle = (len(places) + 1) // 2
        self._parts += [places[middle:], places[:middle]]
        return True

    def without(self, places: Sequence[int], gone: Sequence[int]) -> bool:
        """Send these next, but for some; False when no more sends may be added."""
        if self.extra < 1:
            return False
        self.extra -= 1
        out = set(gone)
        left = [place for place in places if place not in out]
        if left:
            self._parts.append(left)
        return True

    def rest(self) -> list[int]:
        """All places that are still to be sent; none is, after that."""
        left = [place for part in reversed(self._parts) for place in part]
        self._parts.clear()
        return left
