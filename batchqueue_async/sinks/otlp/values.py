"""Plain Python values as OpenTelemetry's protobuf messages: spans, log records, metrics and what is in them.

Everything is written in its place: a message that is made first and then copied into another takes three times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async.errors import PermanentError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.fields import nanoseconds

if TYPE_CHECKING:
    from collections.abc import Callable

_SCALARS: dict[type, str] = {
    str: "string_value",
    bool: "bool_value",
    int: "int_value",
    float: "double_value",
    bytes: "bytes_value",
}

# What a field may be called instead, with a time in seconds or a datetime, as all of this package takes them.
_TIMES = {
    "start": "start_time_unix_nano",
    "end": "end_time_unix_nano",
    "timestamp": "time_unix_nano",
    "observed": "observed_time_unix_nano",
}


@cache
def messages(area: str) -> Any:
    """The module of messages of an area: `common`, `trace`, `logs`, `metrics`, `resource`.

    Example:
        >>> messages("trace").Span(name="GET").name
        'GET'
    """
    return require(f"opentelemetry.proto.{area}.v1.{area}_pb2", "otlp")


def put_value(target: Any, value: Any) -> None:
    """Write a value of an attribute, or a log's body; what is none of the known kinds is written as text.

    Example:
        >>> value = messages("common").AnyValue()
        >>> put_value(value, [1, "a"])
        >>> value.array_value.values[1].string_value
        'a'
    """
    field = _SCALARS.get(value.__class__)
    if field is not None:
        try:
            setattr(target, field, value)
        except ValueError:  # an int that has more than 64 bits, or text with half a surrogate pair
            target.string_value = str(value).encode(errors="replace").decode()
    elif value is None:
        pass
    elif isinstance(value, Mapping):
        target.kvlist_value.SetInParent()
        put_attributes(target.kvlist_value.values, cast("Mapping[object, object]", value))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        target.array_value.SetInParent()
        for item in cast("Sequence[object]", value):
            put_value(target.array_value.values.add(), item)
    else:
        target.string_value = str(value)


def put_attributes(target: Any, attributes: Any) -> None:
    """Write attributes into a message's field of them.

    Example:
        >>> span = messages("trace").Span()
        >>> put_attributes(span.attributes, {"a": 1})
        >>> span.attributes[0].value.int_value
        1
    """
    if not isinstance(attributes, Mapping):
        raise PermanentError(f"attributes are of type {type(attributes).__qualname__}; give a mapping")
    add = target.add
    for key, value in cast("Mapping[Any, object]", attributes).items():
        pair = add()
        kind = type(value)
        try:
            pair.key = key
            # The usual kinds, without a call: this is where most of the time goes.
            if kind is str:
                pair.value.string_value = value
            elif kind is int:
                pair.value.int_value = value
            else:
                put_value(pair.value, value)
        except (TypeError, ValueError):
            pair.key = str(key)
            put_value(pair.value, value)


def fill(target: Any, fields: Mapping[str, Any]) -> None:
    r"""Write a message's fields, which may be given as Python has them.

    Ids may be hexadecimal text, times seconds or datetimes (`start`, `end`, `timestamp`, `observed`), attributes a
    mapping, kinds and codes their names; all other fields are the message's own. `resource` and `scope` say where a
    record belongs, and are no part of it.

    Example:
        >>> span = messages("trace").Span()
        >>> fill(span, {"name": "GET", "span_id": "00ff", "kind": "server", "start": 2})
        >>> span.span_id, span.kind, span.start_time_unix_nano
        (b'\x00\xff', 2, 2000000000)
    """
    for name, value in fields.items():
        if value is None:
            continue
        put = _PUT.get(name)
        try:
            if put is None:
                setattr(target, name, value)
            else:
                put(target, value)
        except AttributeError:
            _put_composite(target, name, value)
        except (TypeError, ValueError, OverflowError):
            raise _unfit(target) from None


def message(kind: Any, fields: Mapping[str, Any]) -> Any:
    """A new message of a class, filled as `fill` does it.

    Example:
        >>> message(messages("trace").Span, {"name": "GET"}).name
        'GET'
    """
    made = kind()
    fill(made, fields)
    return made


def _put_composite(target: Any, name: str, value: Any) -> None:
    """A field that is a message or a list of them, given as such."""
    title: str = target.DESCRIPTOR.name
    if name not in target.DESCRIPTOR.fields_by_name:
        raise PermanentError(f"a record has a field that a {title} has not: {name}")
    place = getattr(target, name)
    try:
        if hasattr(place, "extend"):
            place.extend(value)
        else:
            place.CopyFrom(value)
    except (TypeError, ValueError, AttributeError):
        raise _unfit(target) from None


def _unfit(target: Any) -> PermanentError:
    return PermanentError(f"a record's field is of a type that it can't have in a {target.DESCRIPTOR.name}")


def _identifier(field: str) -> Callable[[Any, Any], None]:
    def put(target: Any, value: Any) -> None:
        if not isinstance(value, bytes):
            try:
                value = bytes.fromhex(value)
            except (TypeError, ValueError):
                raise PermanentError("an id is neither bytes nor hexadecimal text") from None
        setattr(target, field, value)

    return put


def _time(field: str) -> Callable[[Any, Any], None]:
    def put(target: Any, value: Any) -> None:
        setattr(target, field, nanoseconds(value))

    return put


def _put_own_attributes(target: Any, value: Any) -> None:
    put_attributes(target.attributes, value)


def _put_body(target: Any, value: Any) -> None:
    put_value(target.body, value)


def _named(field: str, prefix: str, enumeration: Callable[[], Any]) -> Callable[[Any, Any], None]:
    def put(target: Any, value: Any) -> None:
        if isinstance(value, str):
            try:
                value = enumeration().Value(f"{prefix}{value.upper()}")
            except ValueError:
                raise PermanentError(f"{prefix.lower()}{value.lower()} is not known") from None
        setattr(target, field, value)

    return put


_put_code = _named("code", "STATUS_CODE_", lambda: messages("trace").Status.StatusCode)


def _put_status(target: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        _put_code(target.status, fields.get("code", 0))
        target.status.message = fields.get("message", "")
    elif hasattr(value, "DESCRIPTOR"):
        target.status.CopyFrom(value)
    else:
        _put_code(target.status, value)


def _several(field: str) -> Callable[[Any, Any], None]:
    def put(target: Any, values: Any) -> None:
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise PermanentError(f"{field} are of type {type(values).__qualname__}; give a list")
        place = getattr(target, field)
        for each in cast("Iterable[object]", values):
            if isinstance(each, Mapping):
                fill(place.add(), cast("Mapping[str, Any]", each))
            else:
                place.append(each)

    return put


def _nothing(_target: Any, _value: Any) -> None:
    """What is said of the record, not by it."""


_PUT: dict[str, Callable[[Any, Any], None]] = {
    "trace_id": _identifier("trace_id"),
    "span_id": _identifier("span_id"),
    "parent_span_id": _identifier("parent_span_id"),
    "attributes": _put_own_attributes,
    "kind": _named("kind", "SPAN_KIND_", lambda: messages("trace").Span.SpanKind),
    "status": _put_status,
    "events": _several("events"),
    "links": _several("links"),
    "body": _put_body,
    "severity_number": _named("severity_number", "SEVERITY_NUMBER_", lambda: messages("logs").SeverityNumber),
    "resource": _nothing,
    "scope": _nothing,
} | {name: _time(field) for name, field in _TIMES.items()}
