"""The columns of an Arrow schema, as far as tables of SQL tell them apart; read without importing pyarrow."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal[
    "integer", "float", "decimal", "boolean", "text", "bytes", "date", "time", "datetime", "instant", "interval",
    "container", "any",
]  # fmt: skip


class Column(NamedTuple):
    """A column that rows will have.

    Attributes:
        name: its name.
        kind: what its values are; "any" where they may be anything, or are all null.
        bits: how large a number is.
        digits: how many digits a decimal has, and how many of them are after the point.
    """

    name: str
    kind: Kind
    bits: int = 0
    digits: tuple[int, int] = (0, 0)


_NUMBER = re.compile(r"(u?int|decimal)(\d+)(?:\((\d+), (-?\d+)\))?")
_FLOATS = {"halffloat": 16, "float": 32, "double": 64}
_KINDS: tuple[tuple[str, Kind], ...] = (
    ("bool", "boolean"),
    ("large_string", "text"),
    ("string", "text"),
    ("large_binary", "bytes"),
    ("binary", "bytes"),
    ("fixed_size_binary", "bytes"),
    ("date", "date"),
    ("time32", "time"),
    ("time64", "time"),
    ("duration", "interval"),
    ("list", "container"),
    ("large_list", "container"),
    ("fixed_size_list", "container"),
    ("struct", "container"),
    ("map", "container"),
)


def columns_of(schema: Any) -> list[Column]:
    """The columns of a `pyarrow.Schema`.

    Example:
        >>> import pyarrow
        >>> columns_of(pyarrow.schema([("id", pyarrow.int64()), ("at", pyarrow.timestamp("us", "UTC"))]))
        [Column(name='id', kind='integer', bits=64, digits=(0, 0)), Column(name='at', kind='instant', bits=0, digits=(0, 0))]
    """  # noqa: E501 - one line of output
    return list(_columns(schema))


def _columns(schema: Any) -> Iterator[Column]:
    for field in schema:
        text = str(field.type)
        if text in _FLOATS:
            yield Column(field.name, "float", bits=_FLOATS[text])
        elif number := _NUMBER.fullmatch(text):
            base, bits, precision, scale = number.groups()
            if base == "decimal":
                yield Column(field.name, "decimal", digits=(int(precision), int(scale)))
            else:
                yield Column(field.name, "integer", bits=int(bits) * (2 if base == "uint" else 1))
        elif text.startswith("timestamp"):
            yield Column(field.name, "instant" if "tz=" in text else "datetime")
        else:
            yield Column(field.name, _kind(text))


def _kind(text: str) -> Kind:
    for start, kind in _KINDS:
        if text.startswith(start):
            return kind
    return "any"
