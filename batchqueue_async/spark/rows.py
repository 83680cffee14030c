"""From Arrow record batches to what a handler takes: dicts, tuples, typed structs, or the batches as they are."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, cast

import msgspec

from batchqueue_async.errors import ConfigError
from batchqueue_async.spark.requirements import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Rows = str | type
"""How rows are handed over: "dict", "tuple", "batch" (Arrow), or a msgspec.Struct or dataclass type."""


def check_rows(rows: object) -> None:
    """Refuse what is no way to hand rows over."""
    if rows in ("dict", "tuple", "batch") or (isinstance(rows, type) and _fields(rows) is not None):
        return
    raise ConfigError(
        f"rows={rows!r} is unknown; give 'dict', 'tuple', 'batch' (Arrow record batches), "
        "or a msgspec.Struct or dataclass type"
    )


def converter(rows: Rows) -> Callable[[Any], list[Any]]:
    """A function from an Arrow record batch to the items that go into the queue.

    Example:
        >>> import pyarrow
        >>> converter("tuple")(pyarrow.RecordBatch.from_pydict({"a": [1, 2], "b": ["x", None]}))
        [(1, 'x'), (2, None)]
    """
    check_rows(rows)
    if rows == "batch":
        return lambda batch: [batch]
    if rows == "tuple":
        return lambda batch: list(zip(*columns(batch), strict=True))
    if rows == "dict":
        return _dicts
    return _Structs(cast("type", rows))


def columns(batch: Any) -> list[list[Any]]:
    """The values of each column as plain Python ones; by way of numpy where that gives the same, three times faster."""
    return [_values(column) for column in batch.columns]


def _values(column: Any) -> list[Any]:
    types = need("pyarrow").types
    kind = column.type
    plain = types.is_integer(kind) or types.is_float64(kind) or types.is_boolean(kind)
    if (plain and column.null_count == 0) or types.is_string(kind) or types.is_large_string(kind):
        return cast("list[Any]", column.to_numpy(zero_copy_only=False).tolist())
    return cast("list[Any]", column.to_pylist())


def _dicts(batch: Any) -> list[Any]:
    names = batch.schema.names
    return [dict(zip(names, values, strict=True)) for values in zip(*columns(batch), strict=True)]


def _fields(kind: type) -> list[tuple[str, bool, bool]] | None:
    """Name, whether it has a default, and whether it is given by name only, of each field of a struct type."""
    if not (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(cast("object", kind))):
        return None
    found = inspect.signature(cast("Callable[..., Any]", kind)).parameters.values()
    return [(each.name, each.default is not each.empty, each.kind is each.KEYWORD_ONLY) for each in found]


class _Structs:
    """Makes structs of rows: the columns are found by the fields' names, and the first row is checked by its types."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.fields = _fields(kind) or []
        self._checked: Any = None

    def __call__(self, batch: Any) -> list[Any]:
        names = batch.schema.names
        missing = [name for name, optional, _ in self.fields if name not in names and not optional]
        if missing:
            raise ConfigError(
                f"rows={self.kind.__qualname__} has a field {missing[0]!r}, and the DataFrame has only the columns "
                f"{names}; add the column, or give the field a default"
            )
        fields = [field for field in self.fields if field[0] in names]
        values = columns(batch.select([name for name, _, _ in fields]))
        if batch.num_rows and self._checked != batch.schema:
            self._check({name: column[0] for (name, _, _), column in zip(fields, values, strict=True)})
            self._checked = batch.schema
        return list(self._make([name for name, _, _ in fields], values))

    def _make(self, names: Sequence[str], values: Sequence[list[Any]]) -> Iterator[Any]:
        leading = [name for name, _, by_name in self.fields[: len(names)] if not by_name]
        if list(names) == leading:
            return map(self.kind, *values)
        make: Callable[..., Any] = self.kind
        return (make(**dict(zip(names, row, strict=True))) for row in zip(*values, strict=True))

    def _check(self, row: dict[str, Any]) -> None:
        try:
            msgspec.convert(row, self.kind)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"rows={self.kind.__qualname__} does not fit the DataFrame: {error}; "
                "cast the column, or change the field"
            ) from None
