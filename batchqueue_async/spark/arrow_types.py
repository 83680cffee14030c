"""What Spark's types become in Python, at any depth of a column: instants, years, odd numbers, variants.

A rule here holds for a value wherever it is, in a column of its own or inside of arrays, maps and structs. What Python
can't hold is refused with the name of its column.
"""

from __future__ import annotations

import decimal
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from batchqueue_async.errors import ConfigError
from batchqueue_async.spark.requirements import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_YEARS = {"date32[day]": (-719_162, 2_932_896), "timestamp": (-62_135_596_800_000_000, 253_402_300_799_999_999)}
"""The years 1 to 9999, in days and in microseconds since 1970: what Python's dates can be."""


# --- schemas


def arrow_schema(owner: str, schema: Any) -> Any:
    """The Arrow schema of the rows of a DataFrame, by its Spark schema; its instants are in UTC.

    Raises:
        ConfigError: a column is of a type that Arrow or Python does not have.
    """
    arrow, types = need("pyarrow"), need("pyspark.sql.pandas.types")
    unsupported = need("pyspark.errors").PySparkTypeError
    fields: list[Any] = []
    for field in schema.fields:
        try:
            kind = types.to_arrow_type(field.dataType, timezone="UTC")
        except unsupported:
            raise ConfigError(
                f"{owner}: column {field.name!r} of type {field.dataType.simpleString()} is one that Python has no "
                f"type for; cast it in the query, as by cast({field.name} AS string)"
            ) from None
        fields.append(arrow.field(field.name, kind))
        check_type(fields[-1])
    return arrow.schema(fields)


def check_type(field: Any) -> None:
    """Refuse a column whose values Python can't hold, whatever they are."""
    for kind in _types(field.type):
        if str(kind) == "month_interval":
            raise ConfigError(
                f"column {field.name!r} is or has an interval of years and months, which Python has no type for; "
                f"cast it in the query, as by cast({field.name} AS string)"
            )
        if need("pyarrow").types.is_struct(kind):
            twice = [name for name, count in Counter(each.name for each in kind).items() if count > 1]
            if twice:
                raise ConfigError(
                    f"column {field.name!r} has a struct with several fields of the name {twice[0]!r}, of which one "
                    "would be lost; rename one in the query"
                )


def _types(kind: Any) -> Iterator[Any]:
    """A type, and those that it is made of."""
    yield kind
    for place in range(kind.num_fields):
        yield from _types(kind.field(place).type)


def has(kind: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a type is made of one that is wanted.

    Example:
        >>> import pyarrow
        >>> has(pyarrow.list_(pyarrow.float64()), pyarrow.types.is_floating)
        True
    """
    return any(map(wanted, _types(kind)))


def is_nested(kind: Any) -> bool:
    """Whether values of a type are made of others."""
    return bool(need("pyarrow").types.is_nested(kind))


def is_map(kind: Any) -> bool:
    """Whether a type is a map's."""
    return bool(need("pyarrow").types.is_map(kind))


def is_time(kind: Any) -> bool:
    """Whether a type has years."""
    types = need("pyarrow").types
    return bool(types.is_date32(kind) or (types.is_timestamp(kind) and kind.unit == "us"))


def is_variant(kind: Any) -> bool:
    """Whether a type is what Spark makes of a variant: a struct with a mark."""
    if not need("pyarrow").types.is_struct(kind):
        return False
    place = kind.get_field_index("metadata")
    marks: dict[bytes, bytes] = (kind.field(place).metadata or {}) if place >= 0 else {}
    return marks.get(b"variant") == b"true"


def in_utc(kind: Any) -> Any:
    """A type whose instants are in UTC, at any depth; variants stay as they are."""
    arrow = need("pyarrow")
    if arrow.types.is_timestamp(kind) and kind.tz is not None:
        return kind if kind.tz == "UTC" else arrow.timestamp(kind.unit, "UTC")
    return with_types(kind, in_utc)


def with_types(kind: Any, change: Callable[[Any], Any]) -> Any:
    """A type with those that it is made of changed; one that is made of none stays as it is."""
    arrow = need("pyarrow")
    types = arrow.types
    if types.is_list(kind):
        return arrow.list_(kind.value_field.with_type(change(kind.value_type)))
    if types.is_struct(kind):
        return arrow.struct([field.with_type(change(field.type)) for field in kind])
    if types.is_map(kind):
        return arrow.map_(
            kind.key_field.with_type(change(kind.key_type)), kind.item_field.with_type(change(kind.item_type))
        )
    return kind


# --- values


def _leaves(column: Any) -> Iterator[Any]:
    """The arrays of plain values that a column is made of; without what is in nulls and outside of a slice."""
    types = need("pyarrow").types
    kind = column.type
    if types.is_struct(kind):
        for child in column.flatten():
            yield from _leaves(child)
    elif types.is_map(kind):
        start, stop = column.offsets[0].as_py(), column.offsets[-1].as_py()
        for child in (column.keys, column.items):
            yield from _leaves(child.slice(start, stop - start))
    elif types.is_nested(kind):
        yield from _leaves(column.flatten())
    else:
        yield column


def check_years(field: Any, column: Any) -> None:
    """Refuse a column with dates or times that Python can't hold."""
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    for leaf in _leaves(column):
        if not is_time(leaf.type):
            continue
        is_date = arrow.types.is_date32(leaf.type)
        first, last = _YEARS["date32[day]" if is_date else "timestamp"]
        found = compute.min_max(leaf.cast(arrow.int32() if is_date else arrow.int64())).as_py()
        if found["min"] is not None and (found["min"] < first or found["max"] > last):
            raise ConfigError(
                f"column {field.name!r} has a value outside of the years 1 to 9999, which Python can't hold; "
                f"cast it in the query, as by cast({field.name} AS string)"
            )


def is_text(kind: Any) -> bool:
    """Whether values of a type are texts."""
    types = need("pyarrow").types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def has_whole_texts(column: Any) -> bool:
    r"""Whether all texts of a column are UTF-8, at any depth: Spark takes any bytes for a text.

    Example:
        >>> import pyarrow
        >>> odd = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())
        >>> has_whole_texts(odd.slice(0, 1)), has_whole_texts(odd)
        (True, False)
    """
    invalid = need("pyarrow").ArrowInvalid
    try:
        for leaf in _leaves(column):
            if is_text(leaf.type):
                leaf.validate(full=True)
    except invalid:
        return False
    return True


def with_escaped_texts(column: Any) -> list[Any]:
    r"""The values of a column, with what is not UTF-8 in them escaped, so that a dead letter can hold it.

    Example:
        >>> import pyarrow
        >>> with_escaped_texts(pyarrow.array([[b"a", b"\xff"]]).cast(pyarrow.list_(pyarrow.binary())))
        [['a', '\\xff']]
    """
    return list(map(_escaped, column.cast(_in_bytes(column.type)).to_pylist()))


def _escaped(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, dict):
        return {name: _escaped(each) for name, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_escaped(each) for each in cast("list[Any]", value)]
    return value


def _in_bytes(kind: Any) -> Any:
    """A type with bytes in place of texts, at any depth."""
    arrow = need("pyarrow")
    return arrow.large_binary() if is_text(kind) else with_types(kind, _in_bytes)


class Finite(NamedTuple):
    """A column without numbers that are not finite, and how many there were."""

    column: Any
    odd: int


def finite(column: Any) -> Finite:
    """Make nulls of the numbers that are NaN or infinite, at any depth; but not of the keys of maps.

    Example:
        >>> import pyarrow
        >>> finite(pyarrow.array([[1.0, float("nan")], None])).column.to_pylist()
        [[1.0, None], None]
    """
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    count = 0
    for leaf in _leaves(column):
        if arrow.types.is_floating(leaf.type):
            count += compute.sum(compute.invert(compute.is_finite(leaf))).as_py() or 0
    if not count:
        return Finite(column, 0)
    if arrow.types.is_floating(column.type):
        odd = compute.invert(compute.is_finite(column))
        return Finite(compute.if_else(odd, arrow.scalar(None, column.type), column), count)
    return Finite(arrow.array([_finite(each, column.type) for each in column.to_pylist()], column.type), count)


def _finite(value: Any, kind: Any) -> Any:
    types = need("pyarrow").types
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or not types.is_nested(kind):
        return value
    if types.is_struct(kind):
        return {field.name: _finite(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return [(key, _finite(each, kind.item_type)) for key, each in value]
    return [_finite(each, kind.value_type) for each in value]


def reviver(kind: Any, variant: Callable[[bytes, bytes], Any]) -> Callable[[Any], Any] | None:
    """A function from a value, as Arrow gives it, to one whose variants are what they hold; None where there are none.

    Maps come as dicts, or as pairs where their keys are no keys of a dict.
    """
    types = need("pyarrow").types
    if not has(kind, is_variant):
        return None
    if is_variant(kind):
        return lambda value: None if value is None else variant(value["value"], value["metadata"])
    if types.is_struct(kind):
        inner = [(field.name, made) for field in kind if (made := reviver(field.type, variant)) is not None]
        return lambda value: value and {**value, **{name: make(value[name]) for name, make in inner}}
    if types.is_map(kind):
        of_item = cast("Callable[[Any], Any]", reviver(kind.item_type, variant))
        return lambda value: value and _map_items(value, of_item)
    of_value = cast("Callable[[Any], Any]", reviver(kind.value_type, variant))
    return lambda value: value and [of_value(each) for each in value]


def _map_items(value: dict[Any, Any] | list[tuple[Any, Any]], make: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: make(each) for key, each in value.items()}
    return [(key, make(each)) for key, each in value]


def python_variant(value: bytes, metadata: bytes) -> Any:
    """What a variant holds, as Python's own values."""
    return need("pyspark.sql.types").VariantVal(value, metadata).toPython()


def number_variant(value: bytes, metadata: bytes) -> Any:
    """The same for JSON: decimals, which it would have as texts, are numbers where a double is exactly the same."""
    return _as_number(python_variant(value, metadata))


def _as_number(value: Any) -> Any:
    if isinstance(value, decimal.Decimal):
        number = float(value)
        return number if decimal.Decimal(repr(number)) == value else value
    if isinstance(value, dict):
        return {name: _as_number(each) for name, each in cast("dict[str, Any]", value).items()}
    return list(map(_as_number, cast("list[object]", value))) if isinstance(value, list) else value


def json_variant(value: bytes, metadata: bytes) -> str:
    """What a variant holds, as JSON; its instants are in UTC."""
    return str(need("pyspark.sql.types").VariantVal(value, metadata).toJson("UTC"))
