"""Records that fail again and again with errors of unknown classes, and can't be divided any further. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SENT_AS_IT_IS = 4
"""After so many sends of unknown outcome a batch that should stay as it is gets divided, or is called stuck."""

_LEAST = 1_000


def as_it_is(max_attempts: int | None) -> int:
    """Sends of a batch as it is while its errors are of unknown classes; fewer where few attempts are allowed.

    Example:
        >>> as_it_is(None), as_it_is(100), as_it_is(5), as_it_is(1)
        (4, 4, 2, 1)
    """
    return SENT_AS_IT_IS if max_attempts is None else max(1, min(SENT_AS_IT_IS, max_attempts // 2))


class StuckRecords:
    """The numbers of such records, until they are settled. While there is none it costs nothing.

    Example:
        >>> stuck = StuckRecords()
        >>> stuck.add([7, 8], oldest=1), stuck.add([9], oldest=7)
        (True, False)
        >>> stuck.settled([8])
        >>> stuck.count(oldest=7), stuck.count(oldest=8), stuck.count(oldest=None)
        (2, 1, 0)
        >>> stuck.add([20], oldest=20)
        True
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        # With more than this, those that were dropped are looked for; then it doubles what was left.
        self._most = _LEAST

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def add(self, numbers: Iterable[int], *, oldest: int | None) -> bool:
        """These are; whether no other is. Those below the send queue's oldest number were dropped by it."""
        first = oldest is None or not any(number >= oldest for number in self._numbers)
        if len(self._numbers) >= self._most:
            self._numbers = set() if oldest is None else {number for number in self._numbers if number >= oldest}
            self._most = max(_LEAST, 2 * len(self._numbers))
        self._numbers.update(numbers)
        return first

    def settled(self, numbers: Iterable[int]) -> None:
        """These are no more, if they were."""
        self._numbers.difference_update(numbers)

    def count(self, oldest: int | None) -> int:
        """How many there are, of those from the send queue's oldest number on: it may have dropped the others."""
        if oldest is None:
            return 0
        return sum(number >= oldest for number in self._numbers)
