"""From Arrow record batches to what a handler takes: dicts, tuples, typed structs, or the batches as they are.

One rule for each kind of value, whatever the session's settings: instants are in UTC, maps are dicts, structs are dicts
or, where a field asks for one, typed objects at any depth, variants are what they hold. What Python can't hold names
its column.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args, get_type_hints

import msgspec

from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks.base import Sink
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.sqlite.sink import SqliteSink
from batchqueue_async.spark.arrow_types import (
    check_type,
    check_years,
    finite,
    has,
    has_whole_texts,
    in_utc,
    is_map,
    is_nested,
    is_text,
    is_time,
    is_variant,
    json_variant,
    number_variant,
    python_variant,
    reviver,
    with_escaped_texts,
)
from batchqueue_async.spark.requirements import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Rows = str | type
"""How rows are handed over: "dict", "tuple", "batch" (Arrow), or a msgspec.Struct or dataclass type."""

NonFinite = Literal["keep", "null", "fail"]
"""What becomes of NaN and infinity in columns of floating-point numbers."""


def check_rows(rows: object) -> None:
    """Refuse what is no way to hand rows over."""
    if rows in ("dict", "tuple", "batch") or (isinstance(rows, type) and _is_struct(rows)):
        return
    raise ConfigError(
        f"rows={rows!r} is unknown; give 'dict', 'tuple', 'batch' (Arrow record batches), "
        "or a msgspec.Struct or dataclass type"
    )


def takes_record_batches(sink: object) -> bool:
    """Whether a sink takes Arrow record batches at less cost than rows: those of this package that write tables.

    A subclass may look at what it is sent, so that it gets what it was written for.
    """
    return type(sink) in {SqliteSink, JsonLinesSink} or is_postgres(sink)


def is_postgres(sink: object) -> bool:
    """Whether a sink is this package's for PostgreSQL.

    Example:
        >>> is_postgres(SqliteSink("rows.db"))
        False
    """
    kind = type(sink)  # by name, because its module needs an extra that may not be installed
    return kind.__qualname__ == "PostgresSink" and kind.__module__.startswith("batchqueue_async.sinks.postgres")


def default_rows(sink: object) -> str:
    """How a sink gets its rows where nobody says it.

    Example:
        >>> default_rows(SqliteSink("rows.db")), default_rows(print)
        ('batch', 'dict')
    """
    return "batch" if takes_record_batches(sink) else "dict"


def default_non_finite(target: object) -> NonFinite:
    """What becomes of NaN and infinity where nobody says it: JSON and SQLite have no form for them.

    Example:
        >>> default_non_finite(SqliteSink("rows.db")), default_non_finite(print)
        ('null', 'keep')
    """
    return "null" if isinstance(target, SqliteSink | JsonLinesSink) else "keep"


def check_non_finite(owner: str, rule: object) -> None:
    """Refuse an unknown rule."""
    if rule not in get_args(NonFinite):
        raise ConfigError(f"{owner}: non_finite={rule!r} is unknown; choose 'keep', 'null' or 'fail'")


def check_columns(owner: str, names: Sequence[str], rows: Rows, target: object) -> None:
    """Refuse columns of which one would be lost."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice and rows != "tuple":
        raise ConfigError(
            f"{owner}: the DataFrame has {Counter(names)[twice[0]]} columns of the name {twice[0]!r}, of which one "
            "would be lost; rename one, as with df.withColumnsRenamed or toDF, or take rows='tuple'"
        )
    if not names and (isinstance(target, SqliteSink) or is_postgres(target)):
        raise ConfigError(
            f"{owner}: the DataFrame has no columns, and a table has at least one; select some, or count the rows"
        )


def table_schema(schema: Any, rows: Rows, target: object) -> Any:
    """The Arrow schema of the table that these rows go into; None where the values are to say it."""
    if isinstance(rows, type) or not len(schema):
        return None  # a typed row has the columns of its class
    if rows != "tuple":
        return schema
    names = getattr(target, "columns", None)
    if names is None or len(names) != len(schema):
        return None
    return need("pyarrow").schema([field.with_name(name) for field, name in zip(schema, names, strict=True)])


# --- converters


def _variant_for(target: object) -> Callable[[bytes, bytes], Any]:
    """What a variant becomes for a destination."""
    if isinstance(target, SqliteSink):
        return json_variant  # it keeps JSON as text, and a number in a column of texts would be changed
    return number_variant if isinstance(target, JsonLinesSink) or is_postgres(target) else python_variant


class Converter:
    """Makes items of record batches, all in the same way.

    Attributes:
        non_finite: how many values were NaN or infinite, and made null.
    """

    def __init__(self, rows: Rows = "dict", *, target: object = None, non_finite: NonFinite = "keep") -> None:
        check_rows(rows)
        self.rows = rows
        self.non_finite = 0
        self._rule: NonFinite = non_finite
        self._target = target
        self._rows = _Rows(_variant_for(target))
        self._make = self._maker(rows)
        self._checked: Any = None
        self._plan: _Plan

    def _maker(self, rows: Rows) -> Callable[[Any, Any], list[Any]]:
        columns = getattr(self._target, "columns", None)
        in_tables = type(self._target) is SqliteSink or is_postgres(self._target)
        if rows == "tuple" and in_tables and columns is not None:
            return _Named(tuple(columns), self._rows).items
        if rows == "batch" or (rows == "dict" and takes_record_batches(self._target)):
            # A handler asked for what Arrow has; a sink of tables is to get what it can write.
            return partial(_for_sink, self._rows) if isinstance(self._target, Sink) else _whole
        if rows == "tuple":
            return self._rows.tuples
        return self._rows.dicts if rows == "dict" else _Structs(cast("type", rows), self._rows).items

    def __call__(self, batch: Any, refuse: Any = None) -> list[Any]:
        """The items of a record batch; rows that don't fit their type are given to `refuse`, if there is one."""
        # Each record batch of a stream has an object of its own for the schema that they share: it is not compared by
        # identity. What marks a variant is in the metadata.
        if self._checked is None or not batch.schema.equals(self._checked, check_metadata=True):
            self._plan = self._make_plan(batch.schema)
            check_columns("rows", batch.schema.names, self.rows, self._target)
            self._checked = batch.schema
        plan = self._plan
        for place in plan.instants:
            field = batch.schema.field(place)
            wanted = in_utc(field.type)
            batch = batch.set_column(place, field.with_type(wanted), batch.column(place).cast(wanted))
        for place in plan.times:
            check_years(batch.schema.field(place), batch.column(place))
        odd = [place for place in plan.texts if not has_whole_texts(batch.column(place))]
        if odd:
            batch = _with_whole_texts(batch, odd, refuse)
        for place in plan.floats:
            batch = self._finite(batch, place)
        return self._make(batch, refuse)

    def _make_plan(self, schema: Any) -> _Plan:
        is_floating = need("pyarrow").types.is_floating
        plan = _Plan([], [], [], [])
        reads_texts = self.rows != "batch" or takes_record_batches(self._target)
        for place, field in enumerate(schema):
            check_type(field)
            if in_utc(field.type) != field.type:
                plan.instants.append(place)
            # JSON, which is what PostgreSQL keeps of what is nested, has no form for such numbers.
            kept = self._rule == "keep" and not (is_nested(field.type) and is_postgres(self._target))
            if not kept and has(field.type, is_floating):
                plan.floats.append(place)
            if has(field.type, is_time):
                plan.times.append(place)
            if reads_texts and has(field.type, is_text):
                plan.texts.append(place)
        return plan

    def _finite(self, batch: Any, place: int) -> Any:
        field = batch.schema.field(place)
        found = finite(batch.column(place))
        if not found.odd:
            return batch
        if self._rule == "fail":
            raise ConfigError(
                f"column {field.name!r} has {found.odd} values that are NaN or infinite, which the sink has no form "
                "for; replace them in the query, or give non_finite='null' or 'keep'"
            )
        self.non_finite += found.odd
        return batch.set_column(place, field.with_nullable(True), found.column)


def converter(rows: Rows) -> Converter:
    """A function from an Arrow record batch to the items that go into the queue.

    Example:
        >>> import pyarrow
        >>> converter("tuple")(pyarrow.RecordBatch.from_pydict({"a": [1, 2], "b": ["x", None]}))
        [(1, 'x'), (2, None)]
    """
    return Converter(rows)


class _Plan(NamedTuple):
    """What has to be done to the columns of a schema before rows are made of them: their places."""

    instants: list[int]
    floats: list[int]
    times: list[int]
    texts: list[int]


def _with_whole_texts(batch: Any, places: Sequence[int], refuse: Any) -> Any:
    """The rows whose texts are UTF-8; the others are refused, each with its reason."""
    reason = "column {!r} has a text that is not UTF-8"
    names = batch.schema.names
    if refuse is None:
        name = names[places[0]]
        raise ConfigError(
            f"{reason.format(name)}, which Python can't hold; cast it in the query, as by cast({name} AS binary), or "
            "give on_bad_row='dead_letter'"
        )
    # Tuples may have two columns of one name.
    labels = names if len(set(names)) == len(names) else [f"{name} ({place})" for place, name in enumerate(names)]
    good: list[int] = []
    for row in range(batch.num_rows):
        one = batch.slice(row, 1)
        odd = [place for place in places if not has_whole_texts(one.column(place))]
        if not odd:
            good.append(row)
            continue
        values = [
            (with_escaped_texts(column) if place in odd else column.to_pylist())[0]
            for place, column in enumerate(one.columns)
        ]
        refuse(dict(zip(labels, values, strict=True)), reason.format(names[odd[0]]))
    return batch.take(good)


def _whole(batch: Any, refuse: Any) -> list[Any]:  # noqa: ARG001 - a record batch refuses no row
    return [batch]


def _for_sink(rows: _Rows, batch: Any, refuse: Any) -> list[Any]:
    """A record batch as a sink of tables takes it; as rows where that would show: maps, variants, and no columns."""
    if batch.num_columns == 0 or any(has(field.type, _shows) for field in batch.schema):
        return rows.dicts(batch, refuse)
    return [batch]


def _shows(kind: Any) -> bool:
    return is_map(kind) or is_variant(kind)


class _Named:
    """Record batches whose columns have the sink's names: what tuples become in it, without making them."""

    def __init__(self, columns: tuple[str, ...], rows: _Rows) -> None:
        self._columns = columns
        self._rows = rows

    def items(self, batch: Any, refuse: Any) -> list[Any]:
        if len(self._columns) != batch.num_columns:
            return self._rows.tuples(batch, refuse)  # the sink says what is wrong
        return _for_sink(self._rows, batch.rename_columns(list(self._columns)), refuse)


def columns(batch: Any, variant: Callable[[bytes, bytes], Any] = python_variant) -> list[list[Any]]:
    """The values of each column as plain Python ones; by way of numpy where that gives the same, three times faster."""
    found: list[list[Any]] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            found.append(_values(column, variant))
        except (ValueError, OverflowError, NotImplementedError) as error:
            raise ConfigError(
                f"column {name!r} of type {column.type} has a value that Python can't hold ({error}); "
                f"cast it in the query, as by cast({name} AS string)"
            ) from error
    return found


def _values(column: Any, variant: Callable[[bytes, bytes], Any]) -> list[Any]:
    types = need("pyarrow").types
    kind = column.type
    plain = types.is_integer(kind) or types.is_float64(kind) or types.is_boolean(kind)
    if (plain and column.null_count == 0) or types.is_string(kind) or types.is_large_string(kind):
        return cast("list[Any]", column.to_numpy(zero_copy_only=False).tolist())
    if not types.is_nested(kind):
        return cast("list[Any]", column.to_pylist())
    found = _nested_values(column) if has(kind, is_map) else cast("list[Any]", column.to_pylist())
    revive = reviver(kind, variant)
    return found if revive is None else list(map(revive, found))


def _nested_values(column: Any) -> list[Any]:
    try:
        return cast("list[Any]", column.to_pylist(maps_as_pydicts="strict"))
    except TypeError:  # keys that are structs or arrays; a dict has none, so they stay pairs
        return cast("list[Any]", column.to_pylist())


class _Rows:
    """Rows as plain Python values."""

    def __init__(self, variant: Callable[[bytes, bytes], Any]) -> None:
        self._variant = variant

    def columns(self, batch: Any) -> list[list[Any]]:
        return columns(batch, self._variant)

    def tuples(self, batch: Any, refuse: Any) -> list[Any]:  # noqa: ARG002 - plain values refuse no row
        return list(zip(*self.columns(batch), strict=True)) if batch.num_columns else [()] * batch.num_rows

    def dicts(self, batch: Any, refuse: Any) -> list[Any]:  # noqa: ARG002 - plain values refuse no row
        names = batch.schema.names
        if not names:
            return [{} for _ in range(batch.num_rows)]
        return [dict(zip(names, values, strict=True)) for values in zip(*self.columns(batch), strict=True)]


# --- typed rows


class _Field(NamedTuple):
    """A field of a struct type.

    Attributes:
        name: its name in Python.
        column: the column's name, where the type says another one.
        type: what it takes.
        optional: whether it has a default.
        by_name: whether it is given by name only.
    """

    name: str
    column: str
    type: Any
    optional: bool
    by_name: bool


def _is_struct(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(cast("object", kind))


def _fields(kind: type) -> list[_Field]:
    hints = get_type_hints(kind, include_extras=True)
    columns = dict.fromkeys(hints, "")
    if issubclass(kind, msgspec.Struct):
        columns = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    found = inspect.signature(cast("Callable[..., Any]", kind)).parameters.values()
    return [
        _Field(
            each.name,
            columns.get(each.name) or each.name,
            hints.get(each.name, Any),
            each.default is not each.empty,
            each.kind is each.KEYWORD_ONLY,
        )
        for each in found
    ]


class _Structs:
    """Makes structs of rows: columns are found by the fields' names, and values become what the fields ask for."""

    def __init__(self, kind: type, rows: _Rows) -> None:
        self.kind = kind
        self.fields = _fields(kind)
        self._rows = rows

    def items(self, batch: Any, refuse: Any) -> list[Any]:
        names = batch.schema.names
        found = {each.name: each.column if each.column in names else each.name for each in self.fields}
        missing = [each.name for each in self.fields if found[each.name] not in names and not each.optional]
        if missing:
            raise ConfigError(
                f"rows={self.kind.__qualname__} has a field {missing[0]!r}, and the DataFrame has only the columns "
                f"{names}; add the column, or give the field a default"
            )
        fields = [each for each in self.fields if found[each.name] in names]
        chosen = batch.select([found[each.name] for each in fields])
        if not fields:
            return [self.kind() for _ in range(batch.num_rows)]
        values = self._rows.columns(chosen)
        try:
            typed = [
                _typed(each, column, arrow) for each, column, arrow in zip(fields, values, chosen.columns, strict=True)
            ]
        except _MisfitError as error:
            if refuse is None:
                raise ConfigError(
                    f"rows={self.kind.__qualname__} does not fit the DataFrame: column {error.column!r}: {error}; "
                    "cast the column, change the field, or give on_bad_row='dead_letter'"
                ) from None
            typed = self._good(fields, values, refuse)
        return list(self._make([each.name for each in fields], typed))

    def _good(self, fields: Sequence[_Field], values: Sequence[list[Any]], refuse: Any) -> list[list[Any]]:
        """The columns of the rows that fit; the others are refused, each with its reason."""
        kept: list[list[Any]] = [[] for _ in fields]
        for row in zip(*values, strict=True):
            try:
                made = [_typed(each, [value], None)[0] for each, value in zip(fields, row, strict=True)]
            except _MisfitError as error:
                plain = dict(zip([each.name for each in fields], row, strict=True))
                refuse(plain, f"column {error.column!r}: {error}")
                continue
            for column, value in zip(kept, made, strict=True):
                column.append(value)
        return kept

    def _make(self, names: Sequence[str], values: Sequence[list[Any]]) -> Iterator[Any]:
        leading = [each.name for each in self.fields[: len(names)] if not each.by_name]
        if list(names) == leading:
            return map(self.kind, *values)
        make: Callable[..., Any] = self.kind
        return (make(**dict(zip(names, row, strict=True))) for row in zip(*values, strict=True))


class _MisfitError(Exception):
    """A value is not what a field takes."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column


def _typed(field: _Field, values: list[Any], column: Any) -> list[Any]:
    """A column's values as the field takes them; as they are where their Arrow type says that they fit."""
    if field.type is Any or (column is not None and column.null_count == 0 and _fits(field.type, column.type)):
        return values
    try:
        return msgspec.convert(values, list[field.type])  # type: ignore[name-defined]
    except msgspec.ValidationError as error:
        raise _MisfitError(field.column, str(error)) from None
    except TypeError:  # a type that msgspec does not know: the values are given as they are
        return values


def _fits(kind: Any, arrow: Any) -> bool:
    types = need("pyarrow").types
    checks: dict[Any, Any] = {
        int: types.is_integer,
        float: types.is_float64,
        bool: types.is_boolean,
        str: lambda found: types.is_string(found) or types.is_large_string(found),  # pyright: ignore[reportUnknownLambdaType]
    }
    return kind in checks and bool(checks[kind](arrow))
