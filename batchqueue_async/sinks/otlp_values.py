"""Plain Python values as OpenTelemetry's protobuf messages: spans, log records, metrics and what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async.errors import PermanentError
from batchqueue_async.sinks.extras import require
from batchqueue_async.sinks.fields import nanoseconds

if TYPE_CHECKING:
    from collections.abc import Callable

_INT64 = range(-(2**63), 2**63)

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


def any_value(value: Any) -> Any:
    """A value of an attribute or a log's body; what is none of the known kinds is written as text.

    Example:
        >>> any_value([1, "a"]).array_value.values[1].string_value
        'a'
    """
    common = messages("common")
    if isinstance(value, str):
        return common.AnyValue(string_value=value)
    if isinstance(value, bool):  # before int, which it is too
        return common.AnyValue(bool_value=value)
    if isinstance(value, int) and value in _INT64:
        return common.AnyValue(int_value=value)
    if isinstance(value, float):
        return common.AnyValue(double_value=value)
    if isinstance(value, bytes):
        return common.AnyValue(bytes_value=value)
    if value is None:
        return common.AnyValue()
    if isinstance(value, Mapping):
        return common.AnyValue(kvlist_value=common.KeyValueList(values=key_values(cast("Mapping[str, object]", value))))
    if isinstance(value, Sequence):
        items = cast("Sequence[object]", value)
        return common.AnyValue(array_value=common.ArrayValue(values=[any_value(each) for each in items]))
    return common.AnyValue(string_value=str(value))


def key_values(attributes: Any) -> list[Any]:
    """Attributes as messages.

    Example:
        >>> [pair.key for pair in key_values({"a": 1})]
        ['a']
    """
    if not isinstance(attributes, Mapping):
        raise PermanentError(f"attributes are of type {type(attributes).__qualname__}; give a mapping")
    pair = messages("common").KeyValue
    found = cast("Mapping[object, object]", attributes)
    return [pair(key=str(key), value=any_value(value)) for key, value in found.items()]


def message(kind: Any, fields: Mapping[str, Any]) -> Any:
    r"""A message of a class, from fields that may be given as Python has them.

    Ids may be hexadecimal text, times seconds or datetimes (`start`, `end`, `timestamp`, `observed`), attributes a
    mapping, kinds and codes their names; all other fields are the message's own.

    Example:
        >>> span = message(messages("trace").Span, {"name": "GET", "span_id": "00ff", "kind": "server", "start": 2})
        >>> span.span_id, span.kind, span.start_time_unix_nano
        (b'\x00\xff', 2, 2000000000)
    """
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name in _TIMES:
            found[_TIMES[name]] = nanoseconds(value)
        else:
            convert = _CONVERT.get(name)
            found[name] = value if convert is None else convert(value)
    try:
        return kind(**found)
    except (TypeError, ValueError, OverflowError):
        title: str = kind.DESCRIPTOR.name
        unknown = sorted(set(found) - set(kind.DESCRIPTOR.fields_by_name))
        if unknown:
            raise PermanentError(f"a record has fields that a {title} has not: {', '.join(unknown)}") from None
        raise PermanentError(f"a record's field is of a type that it can't have in a {title}") from None


def _identifier(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise PermanentError("an id is neither bytes nor hexadecimal text") from None


def _named(enumeration: Any, prefix: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return enumeration.Value(f"{prefix}{value.upper()}")
        except ValueError:
            raise PermanentError(f"{prefix.lower()}{value.lower()} is not known") from None

    return convert


def _kind(value: Any) -> Any:
    return _named(messages("trace").Span.SpanKind, "SPAN_KIND_")(value)


def _severity(value: Any) -> Any:
    return _named(messages("logs").SeverityNumber, "SEVERITY_NUMBER_")(value)


def _status(value: Any) -> Any:
    status = messages("trace").Status
    if isinstance(value, status):
        return value
    fields = dict(cast("Mapping[str, object]", value)) if isinstance(value, Mapping) else {"code": value}
    fields["code"] = _named(status.StatusCode, "STATUS_CODE_")(fields.get("code", 0))
    return message(status, fields)


def _several(kind: str) -> Callable[[Any], list[Any]]:
    def convert(values: Any) -> list[Any]:
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise PermanentError(f"{kind.lower()}s are of type {type(values).__qualname__}; give a list")
        cls = getattr(messages("trace").Span, kind)
        found = cast("Iterable[object]", values)
        return [message(cls, cast("Mapping[str, Any]", each)) if isinstance(each, Mapping) else each for each in found]

    return convert


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "trace_id": _identifier,
    "span_id": _identifier,
    "parent_span_id": _identifier,
    "attributes": key_values,
    "kind": _kind,
    "status": _status,
    "events": _several("Event"),
    "links": _several("Link"),
    "body": any_value,
    "severity_number": _severity,
}
