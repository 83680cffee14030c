"""What a record takes in memory. Pure.

For bytes and ASCII text this is their length, for other values what Python takes for the object and for what it refers
to, without the names of fields, which records share. What each record takes besides, in the queue's own lists, is
`OVERHEAD`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from sys import getsizeof
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

OVERHEAD = 64
"""Bytes that a record counts for besides its own: the object's header and its places in lists."""

_TEXT = getsizeof("")
_FLAT = (int, float, complex, bool, type(None))
# A message of protobuf keeps its fields in an arena that is larger than its encoding.
_MESSAGE = 512
_MESSAGE_FACTOR = 2
_MOST_OBJECTS = 100_000
_KEYS: dict[str, str] = {}
_MOST_KEYS = 4_096


def weigh(record: Any) -> int:
    """The bytes of a record.

    Example:
        >>> weigh(b"abc"), weigh("abc"), weigh({"name": b"x" * 1_000}) > 1_000
        (3, 3, True)
    """
    if isinstance(record, bytes | bytearray):
        return len(record)
    if isinstance(record, str):
        return getsizeof(record) - _TEXT
    return _deep(record)


def weights(batch: Sequence[Any]) -> list[int]:
    """The bytes of each record of a batch."""
    kinds = set(map(type, batch))
    if kinds == {bytes}:
        return list(map(len, batch))
    return list(map(weigh, batch))


def _deep(record: Any) -> int:
    """The record and all that it alone refers to; of more objects than can be looked at, what was seen."""
    total = 0
    seen: set[int] = set()
    left: deque[Any] = deque((record,))
    while left:
        item = left.popleft()
        kind = cast("type[object]", type(item))
        if kind in _FLAT or kind is str or kind is bytes:
            total += getsizeof(item)
            continue
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        if len(seen) > _MOST_OBJECTS:
            return total
        total += _one(item, left)
    return total


def _one(item: Any, left: deque[Any]) -> int:
    """The bytes of one object; what it refers to is added to `left`."""
    size = getattr(item, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(item, Mapping):
        return _mapping(cast("Any", item), left)
    if isinstance(item, list | tuple | set | frozenset | deque):
        left.extend(cast("list[Any]", item))
        return getsizeof(cast("object", item))
    encoded = getattr(item, "ByteSize", None)
    if callable(encoded):
        length = encoded()
        return _MESSAGE + _MESSAGE_FACTOR * (length if isinstance(length, int) else 0)
    own = getsizeof(item)
    fields = getattr(item, "__dict__", None)
    if fields is not None:
        own += getsizeof(fields)
        left.extend(fields.values())
    for kind in type(item).__mro__:
        names: Any = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            value = getattr(item, name, None)
            if value is not None and name not in {"__dict__", "__weakref__"}:
                left.append(value)
    return own


def _mapping(mapping: Mapping[Any, Any], left: deque[Any]) -> int:
    left.extend(mapping.values())
    return getsizeof(mapping) + sum(map(_key, mapping))


def _key(key: Any) -> int:
    """The bytes of a mapping's key: none for a name that records share."""
    if type(key) is not str:
        return getsizeof(key)
    if _KEYS.get(key) is key:
        return 0
    if len(_KEYS) < _MOST_KEYS:
        _KEYS[key] = key
    return getsizeof(key)
