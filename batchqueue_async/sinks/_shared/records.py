"""What records are made of: any of them as a row of named values, or as one line of JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import msgspec

from batchqueue_async.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

VALUE = "value"
"""The column of a record that is one value without a name."""


def is_table(record: Any) -> bool:
    """Whether a record is an Arrow record batch or table, which is many rows; found without importing pyarrow."""
    return hasattr(record, "to_pylist") and hasattr(record, "num_rows")


def table_columns(table: Any) -> list[list[Any]]:
    """The values of an Arrow table's columns as plain Python ones; by way of NumPy where that gives the same faster.

    Example:
        >>> import pyarrow
        >>> table_columns(pyarrow.RecordBatch.from_pydict({"a": [1, 2], "b": ["x", None], "c": [1.5, None]}))
        [[1, 2], ['x', None], [1.5, None]]
    """
    return [_values(column) for column in table.columns]


_ALIKE = frozenset({"string", "large_string"})
_ALIKE_WITHOUT_NULLS = frozenset(
    {"bool", "double", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
)


def _values(column: Any) -> list[Any]:
    kind = str(column.type)
    if kind in _ALIKE or (kind in _ALIKE_WITHOUT_NULLS and not column.null_count):
        with suppress(ImportError):  # Arrow may be installed without NumPy
            return cast("list[Any]", column.to_numpy(zero_copy_only=False).tolist())
    return cast("list[Any]", column.to_pylist())


def rows(batch: Iterable[Any], columns: Sequence[str] | None = None) -> Iterator[Mapping[str, Any]]:
    """Each record as a row; an Arrow record batch as all of its rows.

    `columns` names the values of records that are tuples or lists.

    Example:
        >>> list(rows([{"a": 1}, "text", (2, 3)], columns=["a", "b"]))
        [{'a': 1}, {'value': 'text'}, {'a': 2, 'b': 3}]
    """
    for record in batch:
        if is_table(record):
            yield from record.to_pylist()
        else:
            yield row(record, columns)


def row(record: Any, columns: Sequence[str] | None = None) -> Mapping[str, Any]:
    """One record as a row of named values."""
    if isinstance(record, Mapping):
        return cast("Mapping[str, Any]", record)
    if isinstance(record, msgspec.Struct):
        return {name: getattr(record, name) for name in record.__struct_fields__}
    named = getattr(record, "_asdict", None)
    if callable(named):
        return cast("dict[str, Any]", named())
    if isinstance(record, tuple | list):
        return _named(cast("Sequence[Any]", record), columns)
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}
    return {VALUE: record}


def row_key(names: Sequence[str], columns: Sequence[str] | None) -> Callable[[Any], Hashable]:
    """From a record to the key of its row; one that has none shares it with the others that have none."""

    def key(record: Any) -> Hashable:
        try:
            fields = row(record, columns)
        except PermanentError:
            return None
        found = tuple(fields.get(name) for name in names)
        try:
            hash(found)
        except TypeError:
            return repr(found)
        return found

    return key


def _named(values: Sequence[Any], columns: Sequence[str] | None) -> dict[str, Any]:
    if columns is None:
        raise PermanentError(
            f"a record of {len(values)} values has no names for them; give the sink columns=[...], "
            "or send mappings, structs or dataclasses"
        )
    if len(columns) != len(values):
        raise PermanentError(f"a record has {len(values)} values for the {len(columns)} columns {list(columns)}")
    return dict(zip(columns, values, strict=True))


def check_numbers(value: Any, encoded: bytes) -> None:
    """Refuse a value with a number that JSON has not: the encoder writes null for those that are not finite.

    Example:
        >>> check_numbers({"a": None}, b'{"a":null}')
        >>> check_numbers([float("nan")], b"[null]")
        Traceback (most recent call last):
        ...
        ValueError: a number that is not finite has no form in JSON
    """
    # The search costs little, and what follows it only records with a null.
    if b"null" in encoded and _has_odd_number(value):
        raise ValueError("a number that is not finite has no form in JSON")


def _has_odd_number(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(_has_odd_number, cast("Mapping[object, object]", value).values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_odd_number, cast("Iterable[Any]", value)))
    if isinstance(value, msgspec.Struct) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return any(map(_has_odd_number, row(value).values()))
    return False


_encoder = msgspec.json.Encoder(decimal_format="string")
_BLOCK = 65536
"""Blocks of lines that are smaller, in the mean, are joined: each costs a write."""


def lines(batch: Iterable[Any]) -> list[bytes]:
    """Each record as a line of JSON, without its end; bytes are taken as a line that is encoded already.

    Example:
        >>> lines([{"a": 1}, b'{"b":2}', "text"])
        [b'{"a":1}', b'{"b":2}', b'"text"']
    """
    encode = _encoder.encode
    found: list[bytes] = []
    for record in batch:
        if isinstance(record, bytes | bytearray | memoryview):
            found.append(_line(bytes(cast("bytes", record))))
            continue
        try:
            if is_table(record):
                for each in record.to_pylist():
                    found.append(encode(each))
                    check_numbers(each, found[-1])
            else:
                found.append(_line(encode(record)))
                check_numbers(record, found[-1])
        except (TypeError, ValueError) as error:
            raise PermanentError(
                f"a record of type {type(record).__qualname__} has no form in JSON ({type(error).__name__}); "
                "send mappings, structs or dataclasses of plain values, or encoded bytes"
            ) from None
    return found


def line_blocks(batch: Sequence[Any]) -> list[bytes]:
    """The records as lines of JSON, each with its end: what `lines` gives, at a fraction of the time.

    They come in blocks of many lines. To join those as well would cost a fifth more, since each is of a megabyte.

    Example:
        >>> b"".join(line_blocks([{"a": 1}, b'{"b":2}', "text"])).split()
        [b'{"a":1}', b'{"b":2}', b'"text"']
    """
    found: list[bytes] = []
    for is_quick, run in groupby(batch, key=_is_quick):
        records = list(run)
        if is_quick is True:
            found.append(_quick_lines(records))
        elif is_quick is None:
            found += [_table_lines(each) for each in records]
        else:
            found.append(b"".join([line + b"\n" for line in lines(records)]))
    return found if sum(map(len, found)) > _BLOCK * len(found) else [b"".join(found)]


def _is_quick(record: Any) -> bool | None:
    """Whether a record may be encoded with others at once; None for a table."""
    if type(record) is dict or isinstance(record, msgspec.Struct):
        return True
    return None if is_table(record) else False


def _quick_lines(records: list[Any]) -> bytes:
    try:
        encoded = _encoder.encode_lines(records)
    except (TypeError, ValueError):
        encoded = None
    if (
        encoded is None
        or encoded.count(b"\n") != len(records)  # a line break in what was encoded already
        or (b"null" in encoded and any(map(_has_odd_number, records)))
    ):
        return b"".join([line + b"\n" for line in lines(records)])
    return encoded


def _table_lines(table: Any) -> bytes:
    """The rows of a table: as structs, which are made and encoded several times faster than dicts."""
    columns = table_columns(table) if table.num_columns else []
    row_type = _row_type(tuple(table.schema.names)) if columns else None
    if row_type is not None and not any(map(_has_odd_values, table.columns, columns)):
        with suppress(TypeError, ValueError):
            return _encoder.encode_lines(list(map(row_type, *columns)))
    return b"".join([line + b"\n" for line in lines([table])])


def _has_odd_values(column: Any, values: list[Any]) -> bool:
    """Whether a column may hold numbers that JSON has not."""
    kind = str(column.type)
    if kind in _ALIKE or kind.startswith(_WITHOUT_FLOATS):
        return False
    if kind == "double" and not column.null_count and math.isfinite(sum(values)):
        return False  # an odd number would have made the sum odd
    return any(map(_has_odd_number, values))


_WITHOUT_FLOATS = ("bool", "int", "uint", "decimal", "timestamp", "date", "time", "duration", "binary", "large_binary")


@lru_cache(64)
def _row_type(names: tuple[str, ...]) -> Callable[..., Any] | None:
    """A struct with fields that are encoded under these names; None where msgspec takes them not, or there are two."""
    if len(set(names)) < len(names):
        return None
    fields = [f"f{place}" for place in range(len(names))]
    try:
        return msgspec.defstruct("Row", fields, rename=dict(zip(fields, names, strict=True)), gc=False)
    except ValueError:  # a name that would have to be escaped
        return None


def _line(encoded: bytes) -> bytes:
    if b"\n" in encoded:
        raise PermanentError("an encoded record holds a line break; send JSON on one line, as msgspec.json.encode does")
    return encoded
