"""What a column of ClickHouse takes without changing it, by the name of its type. Pure.

The server wraps a whole number that is too large, cuts the decimals that a column has no room for, takes a time without
a zone for its own, and stores 0 for null, all without a word. So each value is looked at here: it is written as it is,
or its record is refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, cast
from uuid import UUID

_EXACT = 2**53
_MICROS = 6
_DECIMALS = {"Decimal32": 9, "Decimal64": 18, "Decimal128": 38, "Decimal256": 76}
_DAYS = {"Date": (date(1970, 1, 1), date(2149, 6, 6)), "Date32": (date(1900, 1, 1), date(2299, 12, 31))}
_SECONDS = 2**32


class MisfitError(ValueError):
    """A value would be changed by the column that it is for; the text says which rule, and quotes no value."""


Take: TypeAlias = Callable[[Any], Any]


class Fit(NamedTuple):
    """How a column takes values.

    Attributes:
        plain: the types whose values are written as they are, where `every` agrees.
        take: a value as it is written.
        every: whether values of these types are all taken; None says that they are.
    """

    plain: frozenset[type]
    take: Take
    every: Callable[[list[Any]], bool] | None = None

    def column(self, values: list[Any]) -> bool:
        """Whether all values are written as they are."""
        return set(map(type, values)) <= self.plain and (self.every is None or self.every(values))


@cache
def fit_of(kind: str) -> Fit:
    """How a column takes values, whose type is named as `DESCRIBE` does.

    Example:
        >>> fit_of("UInt8").take(2.0), fit_of("Nullable(Decimal(9, 2))").take(0.1)
        (2, '0.1')
        >>> fit_of("UInt8").take(256)
        Traceback (most recent call last):
        ...
        batchqueue_async.sinks.clickhouse.columns.MisfitError: a whole number out of its range
    """
    base, args = _taken_apart(kind)
    if base in _WRAPPERS:
        return _WRAPPERS[base](*map(fit_of, args[-1:] if base in _OF_LAST else args))
    if base.removeprefix("U").startswith("Int") and base.removeprefix("U")[3:].isdigit():
        return _integers(int(base.removeprefix("U")[3:]), signed=base.startswith("I"))
    if base.startswith("Decimal"):
        precision, scale = (int(args[0]), int(args[1])) if base == "Decimal" else (_DECIMALS[base], int(args[0]))
        return Fit(frozenset(), partial(_decimal, precision, scale))
    if base in _DAYS:
        return Fit(frozenset(), partial(_date, *_DAYS[base]))
    if base == "DateTime":
        return Fit(frozenset(), _seconds)
    if base == "DateTime64":
        return Fit(frozenset(), partial(_moment, int(args[0])))
    if base == "FixedString":
        return Fit(frozenset(), partial(_fixed, int(args[0])))
    return _FITS.get(base, Fit(frozenset(), _any))


def _taken_apart(kind: str) -> tuple[str, list[str]]:
    """A type's name, and what stands in its brackets.

    Example:
        >>> _taken_apart("Map(String, Array(Decimal(9, 2)))")
        ('Map', ['String', 'Array(Decimal(9, 2))'])
    """
    base, bracket, rest = kind.strip().partition("(")
    if not bracket:
        return base, []
    args: list[str] = [""]
    depth = 0
    for letter in rest[: rest.rindex(")")]:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            args.append("")
        else:
            args[-1] += letter
    return base, [each.strip() for each in args]


def plain(value: Any) -> Any:
    """A value as Python's own: an enumeration's value, and Python's number for NumPy's."""
    if isinstance(value, Enum):
        return plain(value.value)
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "shape", None) == ():
        return item()
    return value


def _misfit(value: Any) -> MisfitError:
    if value is None:
        return MisfitError("a null, as it is not Nullable")
    return MisfitError(f"a value of type {type(value).__qualname__}")


def _nullable(of: Fit) -> Fit:
    every = of.every

    def all_of(values: list[Any]) -> bool:
        there = [value for value in values if value is not None]
        return not there or every is None or every(there)

    def take(value: Any) -> Any:
        return None if value is None else of.take(value)

    return Fit(of.plain | {type(None)}, take, all_of)


def _array(take: Take, value: Any) -> list[Any]:
    value = plain(value)
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        value = tolist()
    if not isinstance(value, list | tuple | set | frozenset):
        raise _misfit(value)
    return [take(each) for each in cast("Iterable[Any]", value)]


def _map(take_key: Take, take: Take, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _misfit(value)
    found = cast("dict[Any, Any]", value)
    return {str(take_key(name)): take(each) for name, each in found.items()}


def _integers(bits: int, *, signed: bool) -> Fit:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)

    def take(value: Any) -> int:
        value = plain(value)
        if isinstance(value, float | Decimal):
            if not math.isfinite(value):
                raise MisfitError("a number that is not finite")
            if value != int(value):
                raise MisfitError(f"a {type(value).__name__} with a fraction")
        elif not isinstance(value, int):
            raise _misfit(value)
        number = int(value)
        if not low <= number < high:
            raise MisfitError("a whole number out of its range")
        return number

    def every(values: list[Any]) -> bool:
        return bool(low <= min(values) and max(values) < high)

    return Fit(frozenset({int}), take, every)


def _double(value: Any) -> float:
    value = plain(value)
    if isinstance(value, int):
        if abs(value) > _EXACT and (value.bit_length() > 1023 or int(float(value)) != value):  # noqa: PLR2004 - a double's
            raise MisfitError("a whole number of more than 53 bits")
        return float(value)
    if isinstance(value, Decimal):
        found = float(value)
        if math.isfinite(found) and Decimal(repr(found)) != value:
            raise MisfitError("a decimal of more digits")
        value = found
    if not isinstance(value, float):
        raise _misfit(value)
    if not math.isfinite(value):
        raise MisfitError("a number that is not finite, which has no form in JSON")
    return float(value)


def _single(value: Any) -> float:
    """A number that a column of 4 bytes shows as it was given, such as 0.1; or that is exactly one of its numbers."""
    number = _double(value)
    try:
        (stored,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        raise MisfitError("a number out of its range") from None
    if stored != number and not any(float(f"{stored:.{digits}g}") == number for digits in range(6, 9)):
        raise MisfitError("a float of more digits than the 4 bytes of Float32 hold")
    return number


def _are_finite(values: list[Any]) -> bool:
    return all(map(math.isfinite, values))


def _decimal(precision: int, scale: int, value: Any) -> str:
    value = plain(value)
    if isinstance(value, float):
        value = Decimal(repr(value))  # as it is shown, not the 50 digits that it stands for
    elif isinstance(value, int):
        value = Decimal(int(value))
    elif not isinstance(value, Decimal):
        raise _misfit(value)
    if not value.is_finite():
        raise MisfitError("a number that is not finite")
    _, digits, exponent = value.as_tuple()
    places = max(0, -int(exponent))
    while places > scale and digits and digits[-1] == 0:
        digits, places = digits[:-1], places - 1
    if places > scale:
        raise MisfitError(f"a number of more than {scale} decimal places")
    if value != 0 and value.adjusted() + 1 > precision - scale:
        raise MisfitError(f"a number of more than {precision - scale} digits before the point")
    return f"{value:f}"


def _text(value: Any) -> str:
    value = plain(value)
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(cast("bytes", value)).decode()
        except UnicodeDecodeError:
            raise MisfitError("bytes that are not text in UTF-8, which have no form in JSON") from None
    if not isinstance(value, str):
        raise _misfit(value)
    return str(value)


def _fixed(length: int, value: Any) -> str:
    text = _text(value)
    if len(text.encode(errors="replace")) != length:
        raise MisfitError(f"a text that is not of {length} bytes, which would be filled up or cut")
    return text


def _bool(value: Any) -> bool:
    value = plain(value)
    if not isinstance(value, bool):
        raise _misfit(value)
    return value


def _date(first: date, last: date, value: Any) -> str:
    value = plain(value)
    if isinstance(value, datetime):
        if value.tzinfo is not None or value.time() != time():
            raise MisfitError("a time of day, which a date has not")
        value = value.date()
    if not isinstance(value, date):
        raise _misfit(value)
    if not first <= value <= last:
        raise MisfitError("a day out of its range")
    return value.isoformat()


def _instant(value: Any) -> datetime:
    value = plain(value)
    if not isinstance(value, datetime):
        raise _misfit(value)
    if value.tzinfo is None:
        raise MisfitError("a time without a zone, which would be taken for the server's; give it one")
    return value.astimezone(UTC)


def _seconds(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        seconds = int(value)
    else:
        moment = _instant(value)
        if moment.microsecond:
            raise MisfitError("a time with decimal places; make the column DateTime64")
        seconds = int(moment.timestamp())
    if not 0 <= seconds < _SECONDS:
        raise MisfitError("a time out of its range")
    return seconds


def _moment(places: int, value: Any) -> str:
    moment = _instant(value)
    if places < _MICROS and moment.microsecond % 10 ** (_MICROS - places):
        raise MisfitError(f"a time of more than {places} decimal places")
    if not _DAYS["Date32"][0] <= moment.date() <= _DAYS["Date32"][1]:
        raise MisfitError("a time out of its range")
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond:06}Z"


def _written(value: Any) -> Any:
    """What has a form as text: a UUID, an address, a member of an enumeration."""
    value = plain(value)
    if isinstance(value, str | int) and not isinstance(value, bool):
        return value
    if value is None or isinstance(value, float | bool | bytes | list | dict | tuple):
        raise _misfit(value)
    return str(value)


def _any(value: Any) -> Any:
    return str(value) if isinstance(value, UUID) else plain(value)


_FITS: dict[str, Fit] = {
    "Float64": Fit(frozenset({float}), _double, _are_finite),
    "Float32": Fit(frozenset(), _single),
    "BFloat16": Fit(frozenset(), _single),
    "String": Fit(frozenset({str}), _text),
    "Bool": Fit(frozenset({bool}), _bool),
    **{name: Fit(frozenset({str}), _written) for name in ("UUID", "Enum8", "Enum16", "IPv4", "IPv6")},
}

_OF_LAST = {"LowCardinality", "SimpleAggregateFunction"}


def _same(of: Fit) -> Fit:
    return of


def _arrays(of: Fit) -> Fit:
    return Fit(frozenset(), partial(_array, of.take))


def _maps(key: Fit, of: Fit) -> Fit:
    return Fit(frozenset(), partial(_map, key.take, of.take))


_WRAPPERS: dict[str, Callable[..., Fit]] = {
    **dict.fromkeys(_OF_LAST, _same),
    "Nullable": _nullable,
    "Array": _arrays,
    "Map": _maps,
}
