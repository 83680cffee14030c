"""Which partition an item goes to: the first decision on its way.

A selector is any callable `(item, partition_count) -> index`. It decides what stays in order: items that share a
partition are handled first come, first served.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

T_contra = TypeVar("T_contra", contravariant=True)


class Selector(Protocol[T_contra]):
    """A callable that names the partition of an item.

    Example:
        >>> def by_first_letter(item: str, partition_count: int) -> int:
        ...     return ord(item[0]) % partition_count
    """

    def __call__(self, item: T_contra, partition_count: int, /) -> int:
        """The index of the item's partition, from 0 to `partition_count - 1`."""
        ...


@lru_cache(maxsize=16_384)
def stable_type_hash(kind: Any) -> int:
    """A number for a type that is the same in every process, unlike `hash(type)`."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class TypeHash:
    """Items of one type share a partition; see `type_hash`."""

    def __call__(self, item: object, partition_count: int) -> int:
        """The partition of the item's type."""
        kind: Any = type(item)
        return stable_type_hash(kind) % partition_count

    def __str__(self) -> str:
        return "type_hash()"


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Partitions take turns; see `round_robin`."""

    _turns: itertools.count[int] = field(default_factory=itertools.count, compare=False, repr=False)

    def __call__(self, item: object, partition_count: int) -> int:  # noqa: ARG002 - a selector's signature
        """The partition whose turn it is."""
        return next(self._turns) % partition_count

    def __str__(self) -> str:
        return "round_robin()"


@dataclass(frozen=True, slots=True)
class ByKey(Generic[T_contra]):
    """Items with equal keys share a partition; see `by_key`."""

    key: Callable[[T_contra], Any]

    def __call__(self, item: T_contra, partition_count: int) -> int:
        """The partition of the item's key."""
        return hash(self.key(item)) % partition_count

    def __str__(self) -> str:
        return f"by_key({getattr(self.key, '__qualname__', self.key)})"


def type_hash() -> TypeHash:
    """Items of one type go to one partition, the same one in every run: grouping by handler is then nearly free.

    Example:
        >>> type_hash()("any text", 8) == type_hash()("another", 8)
        True
    """
    return TypeHash()


def round_robin() -> RoundRobin:
    """Partitions take turns: the even spread for items of one kind; order holds only within a partition.

    Example:
        >>> select = round_robin()
        >>> [select("item", 3) for _ in range(4)]
        [0, 1, 2, 0]
    """
    return RoundRobin()


def by_key(key: Callable[[T_contra], Any]) -> ByKey[T_contra]:
    """Items with equal keys go to one partition, so each key is first in, first out; keys must be hashable.

    Example:
        >>> select = by_key(len)
        >>> select("abc", 4) == select("xyz", 4)
        True
    """
    if not callable(key):
        raise ConfigError(f"by_key: key={key!r} is not callable; give a function from item to key")
    return ByKey(key)
