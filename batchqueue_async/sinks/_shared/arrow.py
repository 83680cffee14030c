"""Records as one Arrow table, which is what files of columns are made of; no value changes on its way."""

from __future__ import annotations

import importlib
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from batchqueue_async.errors import PermanentError, SinkError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.tabular import tabular

if TYPE_CHECKING:
    from collections.abc import Sequence


class ArrowRows(NamedTuple):
    """Rows as Arrow has them.

    Attributes:
        table: a `pyarrow.Table`; None where there are no rows.
        refused: the records that are not in it, by their places, with the reason.
    """

    table: Any
    refused: dict[int, SinkError]


def unwritable(error: Exception, who: object, extra: str) -> PermanentError | None:
    """What an error of Arrow means that is about the rows and not about a disk or the memory; None for all others."""
    lib = require("pyarrow", extra).lib
    if not isinstance(error, lib.ArrowException) or isinstance(error, OSError | MemoryError):
        return None
    return PermanentError(
        f"{who!r}: {type(error).__name__}: rows have a form that can't be written", error_type="refused"
    )


def arrow_rows(batch: Sequence[Any], columns: Sequence[str] | None, schema: Any, extra: str) -> ArrowRows:
    """The records as a table of this schema, or of the types that they have; what does not fit is refused by record.

    Example:
        >>> found = arrow_rows([{"a": 1}, {"a": 2, "b": "x"}, (3,)], None, None, "parquet")
        >>> found.table.to_pylist(), list(found.refused)
        ([{'a': 1, 'b': None}, {'a': 2, 'b': 'x'}], [2])
    """
    pa = require("pyarrow", extra)
    found, refused = tabular(batch, columns)
    names = (
        list(schema.names) if schema is not None else list(dict.fromkeys(name for rows in found for name in rows.names))
    )
    values: dict[str, list[Any]] = {name: [] for name in names}
    places: list[int] = []
    for rows in found:
        unknown = [name for name in rows.names if name not in values]
        if unknown:
            error = PermanentError(
                f"the table has no column {unknown[0]!r}, only {names}; send records without it, or have the sink add "
                "columns",
                error_type="refused",
            )
            refused |= dict.fromkeys(rows.places, error)
            continue
        places += rows.places
        by_name = dict(zip(rows.names, zip(*rows.values, strict=True), strict=True))
        for name in names:
            values[name] += by_name.get(name) or [None] * len(rows.values)
    arrays = [
        _array(name, values[name], None if schema is None else schema.field(name).type, places, refused)
        for name in names
    ]
    if not places:
        return ArrowRows(None, refused)
    table = pa.table(arrays, names=names) if schema is None else pa.table(arrays, schema=schema)
    if refused:
        table = table.filter(pa.array([place not in refused for place in places]))
    return ArrowRows(table if table.num_rows else None, refused)


def _array(name: str, values: list[Any], kind: Any, places: Sequence[int], refused: dict[int, SinkError]) -> Any:
    pa: Any = importlib.import_module("pyarrow")
    errors: tuple[type[Exception], ...] = (pa.lib.ArrowException, OverflowError, TypeError, ValueError)
    try:
        return _exact(pa, values, kind)
    except errors:
        pass  # which record it is, is found out one by one
    if kind is None:
        kind = _type_of_first(pa, values, errors)
    kept: list[Any] = []
    for place, value in zip(places, values, strict=True):
        try:
            _exact(pa, [value], kind)
        except errors:
            refused[place] = PermanentError(
                f"column {name!r} of type {kind} would change a value of type {type(value).__qualname__}; send values "
                "that it holds",
                error_type="refused",
            )
            kept.append(None)
        else:
            kept.append(value)
    return pa.array(kept, type=kind)


def _exact(pa: Any, values: Sequence[Any], kind: Any) -> Any:
    """The values as an array that gives them back as they are."""
    made = pa.array(values, type=kind)
    # Arrow takes a decimal for a float, an aware time for a local one, and the like: what comes back is looked at where
    # the types do not say it.
    if set(map(type, values)) - {_PLAIN.get(str(made.type)), type(None)}:
        for value, back in zip(values, made.to_pylist(), strict=True):
            if type(value) in _COMPARED and value != back and value == value:  # noqa: PLR0124 - not a number is kept
                raise ValueError("a value would change")
    return made


def _type_of_first(pa: Any, values: Sequence[Any], errors: tuple[type[Exception], ...]) -> Any:
    for value in values:
        if value is not None:
            try:
                return pa.array([value]).type
            except errors:
                continue
    return pa.null()


_PLAIN: dict[str, type] = {"int64": int, "double": float, "string": str, "bool": bool, "null": type(None)}
_COMPARED = frozenset({bool, int, float, Decimal, date, datetime, time, timedelta, bytes, str})
