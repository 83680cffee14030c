"""Which type a column gets that is made for Python's values, and what a column takes without changing it. Pure."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast
from uuid import UUID

import msgspec

if TYPE_CHECKING:
    from batchqueue_async.sinks._shared.declared import Column

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
_LARGEST = 2**63
_EXACT = 2**53


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
    found = [value for value in values if value is not None]
    kinds = {type_of(value) for value in found}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds and kinds <= {"bigint", "double precision", "numeric"}:
        # A column of whole and other numbers takes both, as long as a float can hold them.
        return "double precision" if "double precision" in kinds and _are_doubles(found) else "numeric"
    return "timestamp" if kinds == {"date", "timestamp"} else "text"


def _are_doubles(values: Iterable[Any]) -> bool:
    try:
        for value in values:
            _double(value)
    except MisfitError:
        return False
    return True


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


# --- values as a column takes them


class MisfitError(ValueError):
    """A value would be changed by the column that it is for; the text says which rule, and quotes no value."""


Take: TypeAlias = Callable[[Any], Any]


class Fit(NamedTuple):
    """What a column of one type takes as it is, and how it takes the rest.

    The client would cut a fraction, round a number or take a time for local without a word; here each value is stored
    as it is, or refused.

    Attributes:
        plain: the types whose values the column takes as they are; None where the client refuses what does not fit.
        take: a value as the client is to have it.
        every: whether values of these types, none of them None, are all taken as they are; where the type alone does
            not say it.
    """

    plain: frozenset[type] | None
    take: Take
    every: Callable[[Sequence[Any]], bool] | None = None

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether all values are taken as they are."""
        if self.plain is None:
            return True
        kinds: set[type] = set(map(type, values))
        if not kinds <= self.plain:
            return False
        if self.every is None or (len(kinds) == 1 and _NONE in kinds):
            return True
        # A None is told by its type, once for all values: `None in values` compares it with each of them.
        return self.every(values if _NONE not in kinds else [value for value in values if value is not None])


_NONE = type(None)
_INTEGERS = {"smallint": 2**15, "integer": 2**31, "bigint": 2**63, "oid": 2**32}
_TEXTS = {"text", "character varying", "character", "name", "citext"}
_KIND = re.compile(r"(?P<base>[^(\[]*)(?:\((?P<args>[\d,]+)\))?(?P<rest>[^\[]*)(?P<array>(?:\[\])*)")
_MICROS = 6


@cache
def fit_of(kind: str) -> Fit:
    """What a column takes, whose type is named as PostgreSQL's `format_type` does.

    Example:
        >>> fit_of("bigint").take(2.0)
        2
        >>> fit_of("bigint").take(0.75)
        Traceback (most recent call last):
        ...
        batchqueue_async.sinks.postgres.types.MisfitError: a float with a fraction
        >>> fit_of("numeric").take(0.1)
        Decimal('0.1')
    """
    parts = _KIND.fullmatch(kind)
    base = kind if parts is None else f"{parts['base']}{parts['rest']}".strip()
    args = [int(each) for each in parts["args"].split(",")] if parts is not None and parts["args"] else []
    if parts is not None and parts["array"]:
        return _array(fit_of(kind[: -len("[]")]))
    if base in _INTEGERS:
        low = 0 if base == "oid" else -_INTEGERS[base]
        return Fit(frozenset({int, _NONE}), partial(_whole, low=low, high=_INTEGERS[base]))
    if base in _TEXTS:
        length = args[0] if args else 1 if base == "character" and parts is not None else None
        return _texts(length)
    known = _FITS.get(base)
    return Fit(None, plain) if known is None else known(args)


def _array(of: Fit) -> Fit:
    def take(value: Any) -> Any:
        if isinstance(value, list | tuple | set | frozenset):
            return [take(each) for each in cast("Iterable[Any]", value)]
        return value if value is None else of.take(value)

    return Fit(frozenset({_NONE}), take) if of.plain is not None else Fit(None, plain)


def _whole(value: Any, *, low: int, high: int) -> int:
    value = plain(value)
    if isinstance(value, float | Decimal):
        if value != value or value in {math.inf, -math.inf}:  # noqa: PLR0124 - not a number
            raise MisfitError("a number that is not finite")
        if value != int(value):
            raise MisfitError(f"a {type(value).__name__} with a fraction")
    elif not isinstance(value, int):
        raise MisfitError(f"a value of type {type(value).__qualname__}")
    number = int(value)
    if not low <= number < high:
        raise MisfitError("a whole number out of its range")
    return number


def _double(value: Any) -> float:
    value = plain(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        if abs(value) > _EXACT and int(_as_double(value)) != value:
            raise MisfitError("a whole number of more than 53 bits")
        return float(value)
    if isinstance(value, Decimal):
        found = float(value)
        if not value.is_nan() and Decimal(repr(found)) != value:
            raise MisfitError("a decimal of more digits")
        return found
    raise MisfitError(f"a value of type {type(value).__qualname__}")


def _as_double(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise MisfitError("a whole number out of its range") from None


def _single(value: Any) -> float:
    """A number that a column of 4 bytes shows as it was given, such as 0.1; or that is exactly one of its numbers."""
    number = _double(value)
    if not math.isfinite(number):
        return number
    try:
        (stored,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        raise MisfitError("a number out of its range") from None
    if stored == number:
        return number
    for digits in range(6, 10):
        shown = float(f"{stored:.{digits}g}")
        if struct.pack("f", shown) == struct.pack("f", stored):
            if shown == number:
                return number
            break
    raise MisfitError("a float of more digits than the 4 bytes of real hold; make the column double precision")


def _numeric(args: Sequence[int]) -> Fit:
    def take(value: Any) -> Any:
        value = plain(value)
        if isinstance(value, float):
            value = Decimal(repr(value))  # as it is shown, not the 50 digits that it stands for
        elif isinstance(value, int):
            value = int(value)
        elif not isinstance(value, Decimal):
            raise MisfitError(f"a value of type {type(value).__qualname__}")
        if args:
            _check_digits(Decimal(value), args[0], args[1] if len(args) > 1 else 0)
        return value

    return Fit(frozenset({_NONE}) if args else frozenset({Decimal, int, _NONE}), take)


def _check_digits(value: Decimal, precision: int, scale: int) -> None:
    if value.is_nan():
        return
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise MisfitError("a number that is not finite")
    places = max(0, -exponent)
    while places > scale and digits and digits[-1] == 0:
        digits, places = digits[:-1], places - 1
    if places > scale:
        raise MisfitError(f"a number of more than {scale} decimal places")
    if value.adjusted() + 1 > precision - scale and value != 0:
        raise MisfitError(f"a number of more than {precision - scale} digits before the point")


def _texts(length: int | None) -> Fit:
    def take(value: Any) -> str:
        value = plain(value)
        if not isinstance(value, str):
            raise MisfitError(f"a value of type {type(value).__qualname__}")
        if length is not None and len(value) > length:
            raise MisfitError(f"a text of more than {length} characters")
        return value

    return Fit(frozenset({str, _NONE} if length is None else {_NONE}), take)


def _bool(value: Any) -> bool:
    value = plain(value)
    if not isinstance(value, bool):
        raise MisfitError(f"a value of type {type(value).__qualname__}")
    return value


def _bytes(value: Any) -> Any:
    if isinstance(value, str | int):
        raise MisfitError(f"a value of type {type(value).__qualname__}")
    return value


def _date(value: Any) -> date:
    value = plain(value)
    if isinstance(value, datetime):
        if value.tzinfo is not None or value.time() != time():
            raise MisfitError("a time of day, which a date has not")
        return value.date()
    if not isinstance(value, date):
        raise MisfitError(f"a value of type {type(value).__qualname__}")
    return value


def _moment(args: Sequence[int], *, zone: bool) -> Fit:
    step = 10 ** (_MICROS - args[0]) if args else 1

    def take(value: Any) -> datetime:
        value = plain(value)
        if isinstance(value, date) and not isinstance(value, datetime) and not zone:
            value = datetime(value.year, value.month, value.day)  # noqa: DTZ001 - the column has no zone
        if not isinstance(value, datetime):
            raise MisfitError(f"a value of type {type(value).__qualname__}")
        if zone and value.tzinfo is None:
            raise MisfitError("a time without a zone, which would be taken for this machine's; give it one")
        if not zone and value.tzinfo is not None:
            raise MisfitError("a time with a zone; convert it, or make the column timestamptz")
        if value.microsecond % step:
            raise MisfitError("a time with more decimal places")
        return value

    def every(values: Sequence[Any]) -> bool:
        zones = set(map(_zone, values))
        return None not in zones if zone else zones == {None}

    return Fit(frozenset({datetime, _NONE} if step == 1 else {_NONE}), take, every)


_zone = attrgetter("tzinfo")


def _time(args: Sequence[int]) -> Fit:
    step = 10 ** (_MICROS - args[0]) if args else 1

    def take(value: Any) -> time:
        if not isinstance(value, time):
            raise MisfitError(f"a value of type {type(value).__qualname__}")
        if value.tzinfo is not None:
            raise MisfitError("a time of day with a zone")
        if value.microsecond % step:
            raise MisfitError("a time with more decimal places")
        return value

    return Fit(frozenset({_NONE}), take)


_FITS: dict[str, Callable[[Sequence[int]], Fit]] = {
    "double precision": lambda _: Fit(frozenset({float, _NONE}), _double),
    "real": lambda _: Fit(frozenset({_NONE}), _single),
    "numeric": _numeric,
    "boolean": lambda _: Fit(frozenset({bool, _NONE}), _bool),
    "bytea": lambda _: Fit(frozenset({bytes, bytearray, memoryview, _NONE}), _bytes),
    "date": lambda _: Fit(frozenset({date, _NONE}), _date),
    "timestamp without time zone": lambda args: _moment(args, zone=False),
    "timestamp with time zone": lambda args: _moment(args, zone=True),
    "time without time zone": _time,
}


# --- wider columns

_RANKS = {"smallint": 0, "integer": 1, "bigint": 2}


def wider(kind: str, values: Iterable[Any]) -> str | None:
    """The type of a column that holds what a column of this one holds, and these values too; None where there is none.

    Example:
        >>> wider("bigint", [0.75]), wider("integer", [0.75]), wider("integer", [2**40]), wider("text", [1])
        ('numeric', 'double precision', 'bigint', None)
    """
    wanted = column_type(values)
    base = kind.partition("(")[0]
    if base in _RANKS or base in {"real", "double precision", "numeric"}:
        return _wider_number(base, wanted)
    if base in _TEXTS:
        return "text" if wanted == "text" and kind != "text" else None
    if base == "timestamp" and wanted == "timestamp" and "without" in kind:
        return "timestamp"
    if base == "timestamp" and wanted == "timestamptz" and "without" not in kind:
        return "timestamptz"
    if base == "date" and wanted == "timestamp":
        return "timestamp"
    return "time" if base == "time" and wanted == "time" else None


def _wider_number(base: str, wanted: str) -> str | None:
    if wanted not in {"bigint", "numeric", "double precision", "real"}:
        return None
    if base in _RANKS and wanted == "bigint":
        return "bigint" if base != "bigint" else "numeric"
    if base in {"smallint", "integer", "real"} and wanted == "double precision":
        return "double precision"
    if base == "real" and wanted == "bigint":
        return "double precision"
    return "numeric"


# --- declared columns

_SHORT = {
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
    "time": "time without time zone",
}
_OF_KIND = {
    "boolean": "boolean",
    "text": "text",
    "bytes": "bytea",
    "date": "date",
    "time": "time",
    "datetime": "timestamp",
    "instant": "timestamptz",
    "interval": "interval",
    "container": "jsonb",
}
_SMALL, _INTEGER, _BIG, _SINGLE = 16, 32, 64, 32


def declared_type(column: Column) -> str:
    """The type of a column that is declared; nothing where its values may be anything.

    Example:
        >>> from batchqueue_async.sinks._shared.declared import Column
        >>> declared_type(Column("n", "integer", bits=32)), declared_type(Column("d", "decimal", digits=(10, 2)))
        ('integer', 'numeric(10,2)')
    """
    if column.kind == "integer":
        for bits, kind in ((_SMALL, "smallint"), (_INTEGER, "integer"), (_BIG, "bigint")):
            if column.bits <= bits:
                return kind
        return "numeric"
    if column.kind == "float":
        return "real" if column.bits <= _SINGLE else "double precision"
    if column.kind == "decimal":
        return f"numeric({column.digits[0]},{column.digits[1]})"
    return _OF_KIND.get(column.kind, "")


def wider_type(kind: str, declared: str) -> str | None:
    """The type that a column is to have, to hold what is declared too; None where it does, or no type holds both.

    Example:
        >>> wider_type("integer", "bigint"), wider_type("bigint", "integer"), wider_type("bigint", "double precision")
        ('bigint', None, 'numeric')
        >>> wider_type("numeric(5,2)", "numeric(6,1)"), wider_type("date", "timestamp"), wider_type("text", "bigint")
        ('numeric(7,2)', 'timestamp', None)
    """
    if kind in {declared, _SHORT.get(declared)}:
        return None
    if (base := _base(kind)) in _TEXTS:
        return "text" if declared == "text" else None
    if (base, declared) == ("date", "timestamp"):
        return declared
    old, new = _reach(kind), _reach(declared)
    if old is None or new is None:
        return None
    whole, scale = max(old.whole, new.whole), max(old.scale, new.scale)
    both = f"numeric({whole + scale:.0f},{scale:.0f})"
    for wide in (kind, declared, "double precision", both, "numeric"):
        reach = _reach(wide)
        if reach is not None and _covers(reach, old) and _covers(reach, new):
            return None if wide == kind else wide
    return None


class _Reach(NamedTuple):
    """What a type of numbers holds.

    Attributes:
        whole: digits before the point.
        scale: digits after it.
        bits: whole numbers of so many bits.
        floats: 1 for floats of 4 bytes, 2 for those of 8 bytes too.
        form: what its own numbers are: "whole", "decimal" or "float".
    """

    whole: float
    scale: float
    bits: float
    floats: int
    form: str


def _covers(wide: _Reach, narrow: _Reach) -> bool:
    if narrow.form == "float":
        return wide.floats >= narrow.floats
    if narrow.form == "whole":
        return wide.bits >= narrow.bits
    return wide.whole >= narrow.whole and wide.scale >= narrow.scale


_REACH = {
    "smallint": _Reach(5, 0, 15, 0, "whole"),
    "integer": _Reach(10, 0, 31, 0, "whole"),
    "bigint": _Reach(19, 0, 63, 0, "whole"),
    "real": _Reach(0, 0, 24, 1, "float"),
    "double precision": _Reach(0, 0, 53, 2, "float"),
    "numeric": _Reach(math.inf, math.inf, math.inf, 3, "decimal"),
}


def _reach(kind: str) -> _Reach | None:
    found = _REACH.get(_base(kind))
    args = kind.partition("(")[2].partition(")")[0]
    if found is None or not args or not args.replace(",", "").isdigit():
        return found
    precision, _, scale = args.partition(",")
    whole = int(precision) - int(scale or 0)
    return _Reach(whole, int(scale or 0), math.log2(10) * whole, 0, "decimal")


def _base(kind: str) -> str:
    return kind.partition("(")[0].strip()
