"""Which type a column gets that is made for Python's values, and the names that SQL takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from uuid import UUID

import msgspec

_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "bigint",
    float: "double precision",
    str: "text",
    bytes: "bytea",
    bytearray: "bytea",
    memoryview: "bytea",
    Decimal: "numeric",
    date: "date",
    time: "time",
    timedelta: "interval",
    UUID: "uuid",
    IPv4Address: "inet",
    IPv6Address: "inet",
}
# A column of whole and other numbers takes both.
_WIDER = {frozenset({"bigint", "double precision"}): "double precision", frozenset({"bigint", "numeric"}): "numeric"}
_LARGEST = 2**63


def quoted(name: str) -> str:
    """A name as SQL takes it.

    Example:
        >>> quoted('a "b"') == '"a ""b"' + '""'
        True
    """
    return '"' + name.replace('"', '""') + '"'


def listed(names: Iterable[str]) -> str:
    """Names as SQL takes them, with commas."""
    return ", ".join(map(quoted, names))


def column_type(values: Iterable[Any]) -> str:
    """The type of a column for these values; text where they are all None, or of no common type.

    Example:
        >>> column_type([1, None, 2.5]), column_type([{"a": 1}]), column_type([None])
        ('double precision', 'jsonb', 'text')
    """
    kinds = {type_of(value) for value in values if value is not None}
    if len(kinds) == 1:
        return kinds.pop()
    return _WIDER.get(frozenset(kinds), "text")


def type_of(value: Any) -> str:
    """The type of a column for one value."""
    value = plain(value)
    if isinstance(value, datetime):
        return "timestamp" if value.tzinfo is None else "timestamptz"
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return "numeric"
    for kind in type(value).__mro__:
        if kind in _TYPES:
            return _TYPES[kind]
    container = isinstance(value, Mapping | Sequence | set | msgspec.Struct) or dataclasses.is_dataclass(value)
    return "jsonb" if container else "text"


def plain(value: Any) -> Any:
    """A value as one that PostgreSQL's client knows: an enumeration's value, and Python's number for NumPy's."""
    if isinstance(value, Enum):
        return plain(value.value)
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "shape", None) == ():
        return item()
    return value


def with_plain_values(rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The rows with `plain` values."""
    return [tuple(map(plain, values)) for values in rows]
