"""A batch of records as one OTLP request: grouped by resource and by scope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import msgspec

from batchqueue_async.errors import PermanentError, SinkError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.records import row
from batchqueue_async.sinks.otlp.values import fill, message, messages, put_attributes

if TYPE_CHECKING:
    from collections.abc import Sequence

SignalName = Literal["traces", "metrics", "logs"]


@dataclass(frozen=True, slots=True)
class Signal:
    """The names that OTLP has for one signal.

    Example:
        >>> SIGNALS["traces"].record
        'Span'

    Attributes:
        area: the module of its messages.
        record: the message that is one record.
        group: how the messages of a resource and a scope end: ResourceSpans, ScopeSpans.
        records: the field of the scope's message with the records.
        rejected: the field of a partial success that counts what was not taken.
    """

    area: str
    record: str
    group: str
    records: str
    rejected: str

    @property
    def resources(self) -> str:
        """The field of the request with the resources."""
        return f"resource_{self.group.lower()}"

    @property
    def scopes(self) -> str:
        """The field of a resource's message with the scopes."""
        return f"scope_{self.group.lower()}"

    @property
    def method(self) -> str:
        """The gRPC method."""
        return f"/opentelemetry.proto.collector.{self.area}.v1.{self.area.capitalize()}Service/Export"

    def service(self) -> Any:
        """The module of the request and the response."""
        return require(f"opentelemetry.proto.collector.{self.area}.v1.{self.area}_service_pb2", "otlp")

    def request(self) -> Any:
        """The class of the request."""
        return getattr(self.service(), f"Export{self.area.capitalize()}ServiceRequest")

    def response(self) -> Any:
        """The class of the response."""
        return getattr(self.service(), f"Export{self.area.capitalize()}ServiceResponse")


SIGNALS: dict[str, Signal] = {
    "traces": Signal("trace", "Span", "Spans", "spans", "rejected_spans"),
    "logs": Signal("logs", "LogRecord", "Logs", "log_records", "rejected_log_records"),
    "metrics": Signal("metrics", "Metric", "Metrics", "metrics", "rejected_data_points"),
}


class Request(NamedTuple):
    """What goes out.

    Attributes:
        message: the request.
        places: which records of the batch are in it.
        rejected: the others, by their place, each with its reason.
        weight: how many records it holds, as the server counts: spans, log records, or data points.
    """

    message: Any
    places: list[int]
    rejected: dict[int, SinkError]
    weight: int


@cache
def _classes(signal: Signal) -> tuple[Any, Any]:
    module = messages(signal.area)
    return getattr(module, signal.record), getattr(module, f"Resource{signal.group}")


class Grouping:
    """Builds one request; made anew for each.

    A record is a message of the signal's kind, one with its resource (`ResourceSpans`), either of them serialized, or a
    mapping, struct or dataclass: see `otlp_values.fill`. Rows may have a `resource` and a `scope` of their own.

    Example:
        >>> grouping = Grouping(SIGNALS["traces"], {"service.name": "shop"}, "example")
        >>> request = grouping.build([{"name": "GET"}, {"name": "PUT", "scope": "other"}, {"nam": "?"}])
        >>> [group.scope.name for group in request.message.resource_spans[0].scope_spans], request.places
        (['example', 'other'], [0, 1])
    """

    def __init__(self, signal: Signal, resource: Mapping[str, Any], scope: str) -> None:
        self._signal = signal
        self._record, self._whole = _classes(signal)
        self._resource = resource
        self._scope = scope
        self._request = signal.request()()
        self._resources: dict[Any, Any] = {}
        self._scopes: dict[Any, Any] = {}
        self._metrics: dict[Any, Any] = {}
        self._own: Any = None
        self._weight = 0

    def build(self, batch: Sequence[Any]) -> Request:
        """Group the batch."""
        places: list[int] = []
        rejected: dict[int, SinkError] = {}
        plain: list[Any] = []  # messages without a group of their own, which is the usual case, go in at once
        for place, record in enumerate(batch):
            try:
                if type(record) is self._record:
                    plain.append(record)
                else:
                    self._add(record)
            except PermanentError as error:
                rejected[place] = error
            else:
                places.append(place)
        if plain:
            self._records(None, None).extend(plain)
            self._weight += sum(map(_points, plain)) if self._signal.area == "metrics" else len(plain)
        return Request(self._request, places, rejected, self._weight)

    def _add(self, record: Any) -> None:
        if isinstance(record, bytes):
            record = self._decoded(record)
        if isinstance(record, self._whole):
            getattr(self._request, self._signal.resources).append(record)
            for scope in getattr(record, self._signal.scopes):
                self._count(getattr(scope, self._signal.records))
        elif isinstance(record, self._record):
            self._records(None, None).append(record)
            self._count([record])
        elif hasattr(record, "DESCRIPTOR"):
            raise PermanentError(f"a record is a {record.DESCRIPTOR.full_name}, which is no {self._signal.record}")
        else:
            self._row(row(record))

    def _count(self, records: Sequence[Any]) -> None:
        self._weight += sum(map(_points, records)) if self._signal.area == "metrics" else len(records)

    def _decoded(self, record: bytes) -> Any:
        # No message of ours starts so: it would be the field 15 as a group, which protobuf gave up long ago.
        if record.startswith(b"{"):
            return msgspec.json.decode(record)
        broken: type[Exception] = require("google.protobuf.message", "otlp").DecodeError
        try:
            return self._record.FromString(record)
        except broken:
            raise PermanentError(f"a record of {len(record)} bytes is no serialized {self._signal.record}") from None

    def _row(self, fields: Mapping[str, Any]) -> None:
        resource = fields.get("resource")
        scope = fields.get("scope")
        if self._signal.area == "metrics":
            self._point(dict(fields), resource, scope)
        else:
            records = self._records(resource, scope)
            try:
                fill(records.add(), fields)
            except PermanentError:
                del records[-1]
                raise
        self._weight += 1

    def _records(self, resource: Any, scope: Any) -> Any:
        """The records of a resource and scope, to which more are added."""
        if resource is None and scope is None and self._own is not None:
            return self._own
        name: str = self._scope if scope is None else str(scope)
        key = (_key(resource), name)
        if key not in self._scopes:
            if key[0] not in self._resources:
                group = getattr(self._request, self._signal.resources).add()
                attributes = self._resource if resource is None else resource
                put_attributes(group.resource.attributes, attributes)
                self._resources[key[0]] = group
            made = getattr(self._resources[key[0]], self._signal.scopes).add()
            made.scope.name = name
            self._scopes[key] = made
        found = getattr(self._scopes[key], self._signal.records)
        if resource is None and scope is None:
            self._own = found
        return found

    def _point(self, fields: dict[str, Any], resource: Any, scope: Any) -> None:
        kind = fields.pop("kind", "gauge")
        identity = {name: fields.pop(name, None) for name in ("name", "unit", "description")}
        if kind not in {"gauge", "sum"}:
            raise PermanentError(f"a metric's kind is {kind!r}; give 'gauge' or 'sum', or a Metric message")
        monotonic = bool(fields.pop("monotonic", True))
        temporality = _temporality(fields.pop("temporality", "cumulative"))
        point = message(messages("metrics").NumberDataPoint, _valued(fields))
        key = (_key(resource), scope, *identity.values(), kind, monotonic, temporality)
        if key not in self._metrics:
            made = message(self._record, identity)
            metric = self._records(resource, scope).add()
            metric.CopyFrom(made)
            if kind == "sum":
                metric.sum.is_monotonic = monotonic
                metric.sum.aggregation_temporality = temporality
            self._metrics[key] = metric
        getattr(self._metrics[key], kind).data_points.append(point)


def _key(resource: Any) -> Any:
    if resource is None:
        return None
    if not isinstance(resource, Mapping):
        raise PermanentError(f"a record's resource is of type {type(resource).__qualname__}; give a mapping")
    return tuple(sorted((str(name), repr(value)) for name, value in cast("Mapping[object, object]", resource).items()))


def _valued(fields: dict[str, Any]) -> dict[str, Any]:
    value = fields.pop("value", None)
    if not isinstance(value, int | float):
        raise PermanentError(f"a metric's value is of type {type(value).__qualname__}; give a number")
    fields["as_int" if isinstance(value, int) else "as_double"] = value
    return fields


def _temporality(name: Any) -> int:
    known = {"cumulative": 2, "delta": 1}
    if name not in known:
        raise PermanentError("a sum's temporality is none of 'cumulative' and 'delta'")
    return known[name]


def _points(metric: Any) -> int:
    kind = metric.WhichOneof("data")
    return 0 if kind is None else len(getattr(metric, kind).data_points)
