"""The bound of a partition by bytes: how many its items take, and who may bring how many more.

It stands beside the bound by places, and only where a queue asks for it. Such a partition has no fast slots: each item
is weighed as it comes in, once for good, and counts by that weight until it leaves, whatever becomes of it meanwhile.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from batchqueue_async.errors import ConfigError, ItemTooLargeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchqueue_async.queue.waiters import Waiter

T = TypeVar("T")


class ByteRoom(Generic[T]):
    """The bytes of one partition.

    What belongs together, between any two calls: `limit >= used + held + reserved`; `used` is the sum of what the
    items inside weigh, oldest first; `reserved` is what waiters have been granted, and `held` what is moving here.

    Attributes:
        limit: how many bytes there may be.
        used: how many the items inside take.
        held: how many are kept for items that are moving here.
        reserved: how many are kept for waiters that have not used them yet.
        crowded: whether somebody found no bytes since items were last taken out.
    """

    __slots__ = ("_name", "_size_of", "_sizes", "crowded", "held", "limit", "reserved", "used")

    def __init__(self, name: str, limit: int, size_of: Callable[[T], int]) -> None:
        self._name = name
        self._size_of = size_of
        self._sizes: deque[int] = deque()
        self.limit = limit
        self.used = self.held = self.reserved = 0
        self.crowded = False

    @property
    def free(self) -> int:
        """How many bytes are neither used nor promised."""
        return self.limit - self.used - self.held - self.reserved

    def weigh(self, items: Iterable[T]) -> list[int]:
        """What each item takes, by the user's function.

        Raises:
            ItemTooLargeError: an item takes more than there may ever be.
            ConfigError: the function gave no number of bytes.
        """
        return [self._weigh(item) for item in items]

    def _weigh(self, item: T) -> int:
        size = self._size_of(item)
        if type(size) is not int or size < 0:
            raise ConfigError(
                f"queue {self._name!r}: size_of gave {size!r} for a {type(item).__qualname__}; "
                "return a whole number of bytes, 0 or more"
            )
        if size > self.limit:
            raise ItemTooLargeError(
                f"queue {self._name!r}: a {type(item).__qualname__} of {size} bytes can never come in, since a "
                f"partition holds buffer_bytes={self.limit}; split the item, or raise buffer_bytes"
            )
        return size

    def prefix(self, sizes: Sequence[int], start: int = 0) -> int:
        """How many of the sizes from `start` on, in order, there are bytes for."""
        free, count = self.free, 0
        for size in islice(sizes, start, None):
            free -= size
            if free < 0:
                break
            count += 1
        return count

    # -- items that come in and go out ---------------------------------------------------------------------------

    def put(self, sizes: Sequence[int]) -> None:
        """Items have come in at the end."""
        self._sizes.extend(sizes)
        self.used += sum(sizes)

    def take(self, count: int) -> None:
        """The oldest `count` items have left."""
        self.crowded = False
        if count == len(self._sizes):
            self._sizes.clear()
            self.used = 0
            return
        for _ in range(count):
            self.used -= self._sizes.popleft()

    # -- waiters -------------------------------------------------------------------------------------------------

    def fitting(self, waiter: Waiter) -> int:
        """How many more of a waiter's items there are bytes for."""
        return self.prefix(waiter.sizes, waiter.filled + waiter.reserved)

    def reserve(self, waiter: Waiter, most: int) -> int:
        """Reserve bytes for up to `most` more of the waiter's items, in order; for how many there were some."""
        start = waiter.filled + waiter.reserved
        count = min(most, self.prefix(waiter.sizes, start))
        self.reserved += sum(waiter.sizes[start : start + count])
        return count

    def use(self, waiter: Waiter, count: int) -> list[int]:
        """The waiter is about to put in so many of its items; what they take."""
        sizes = waiter.sizes[waiter.filled : waiter.filled + count]
        self.reserved -= sum(sizes)
        return sizes

    def release(self, waiter: Waiter) -> None:
        """What was reserved for a waiter is free."""
        self.reserved -= sum(waiter.sizes[waiter.filled : waiter.filled + waiter.reserved])
