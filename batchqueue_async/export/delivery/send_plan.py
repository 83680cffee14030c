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
        divided: whether the destination refused records together that it may take apart.
    """

    def __init__(self, parts: Iterable[Sequence[int]], extra: int) -> None:
        self._parts = list(reversed(list(parts)))
        self.extra = extra
        self.divided = False

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def size(self) -> int:
        """The records of the next send; there is one."""
        return len(self._parts[-1])

    def next(self) -> Sequence[int]:
        """The places of the next send; there is one."""
        return self._parts.pop()

    def halve(self, places: Sequence[int]) -> bool:
        """Send these in two halves, the first half next; False when no more sends may be added."""
        if self.extra < 1:
            return False
        self.extra -= 1
        self.divided = True
        middle = (len(places) + 1) // 2
        self._parts += [places[middle:], places[:middle]]
        return True

    def without(self, places: Sequence[int], gone: Sequence[int]) -> bool:
        """Send these next, but for some; False when no more sends may be added."""
        if self.extra < 1:
            return False
        self.extra -= 1
        self.divided = True
        out = set(gone)
        left = [place for place in places if place not in out]
        if left:
            self._parts.append(left)
        return True

    def rest(self) -> list[Sequence[int]]:
        """The sends that are left, in their order; none is, after that."""
        left = self._parts[::-1]
        self._parts.clear()
        return left
