"""Prometheus remote write 1.0: time series as a snappy-compressed protobuf message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async.errors import PermanentError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.fields import labels_of, nanoseconds, time_of
from batchqueue_async.sinks._shared.records import lines, row
from batchqueue_async.sinks.base import SinkNeeds
from batchqueue_async.sinks.http.formats import Body, each

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
_NANOS_PER_MILLI = 1_000_000
_Labels = tuple[tuple[str, str], ...]

# The messages of prompb/remote.proto and prompb/types.proto that senders write: (field, number, type), where a type
# that is no scalar is a repeated message.
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "Label": [("name", 1, "string"), ("value", 2, "string")],
    "Sample": [("value", 1, "double"), ("timestamp", 2, "int64")],
    "TimeSeries": [("labels", 1, "Label"), ("samples", 2, "Sample")],
    "WriteRequest": [("timeseries", 1, "TimeSeries")],
}


@cache
def write_request() -> Any:
    """The class of the protobuf message `prometheus.WriteRequest`, built from its description.

    Example:
        >>> message = write_request()()
        >>> message.timeseries.add().samples.add(value=1.5, timestamp=1000).value
        1.5
    """
    pb = require("google.protobuf.descriptor_pb2", "http")
    pool = require("google.protobuf.descriptor_pool", "http").DescriptorPool()
    factory = require("google.protobuf.message_factory", "http")
    kinds = pb.FieldDescriptorProto
    file = pb.FileDescriptorProto(name="batchqueue_async/remote_write.proto", package="prometheus", syntax="proto3")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, kind in fields:
            if kind in _MESSAGES:
                options = {"type": kinds.TYPE_MESSAGE, "type_name": f".prometheus.{kind}"}
                described.field.add(name=name, number=number, label=kinds.LABEL_REPEATED, **options)
            else:
                scalar = getattr(kinds, f"TYPE_{kind.upper()}")
                described.field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL, type=scalar)
    pool.Add(file)
    return factory.GetMessageClass(pool.FindMessageTypeByName("prometheus.WriteRequest"))


@dataclass(frozen=True, kw_only=True)
class RemoteWrite:
    """Prometheus remote write: each record is a sample, or several, of one time series.

    A record is a row with these fields:

    - `name`: the metric's name; or `__name__` among the labels;
    - `labels`: a mapping, added to the format's own;
    - `value`, `timestamp`: one sample; seconds since 1970 or a datetime, or `time_unix_nano`; without a time, now;
    - `samples`: instead of the two: several, as `(timestamp, value)`.

    Example:
        >>> body = RemoteWrite().encode([{"name": "up", "labels": {"job": "a"}, "value": 1, "timestamp": 12.5}], None)
        >>> import cramjam
        >>> message = write_request().FromString(bytes(cramjam.snappy.decompress_raw(body.content)))
        >>> [(label.name, label.value) for label in message.timeseries[0].labels]
        [('__name__', 'up'), ('job', 'a')]
        >>> message.timeseries[0].samples[0].timestamp
        12500

    Attributes:
        labels: those of every series, such as the instance.
        clock: tells the time of samples that have none, in seconds since 1970.
    """

    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    clock: Callable[[], float] = field(default=lambda: datetime.now(UTC).timestamp())
    headers: Mapping[str, str] = field(default_factory=lambda: dict(_HEADERS))
    compressed: bool = True

    @property
    def needs(self) -> SinkNeeds:
        """Samples of a series go in the order of their time: a server refuses one that is older than the last."""
        return SinkNeeds(ordering="key", key=self.series_of, atomic=True)

    def series_of(self, record: Any) -> Hashable:
        """Which series a record belongs to; what is none shares one, and is rejected.

        Example:
            >>> RemoteWrite().series_of({"name": "up", "labels": {"job": "a"}, "value": 1})
            (('__name__', 'up'), ('job', 'a'))
        """
        try:
            return self._labels(row(record))
        except PermanentError:
            return ()

    def encode(self, batch: Sequence[Any], keys: Sequence[str] | None) -> Body:  # noqa: ARG002
        """Write the batch, a series once with its samples in order of time; keys have no place in it."""
        try:
            return self._written(batch, checked=False)
        except ValueError:  # text that is not Unicode; which record has it, is found out one by one
            return self._written(batch, checked=True)

    def _written(self, batch: Sequence[Any], *, checked: bool) -> Body:
        series: dict[_Labels, list[tuple[int, float]]] = {}
        now = nanoseconds(self.clock())

        def take(_place: int, record: Any) -> None:
            labels, samples = self._samples(record, now)
            if checked:
                lines([labels])
            series.setdefault(labels, []).extend(samples)

        places, rejected = each(batch, take)
        message = write_request()()
        for labels, samples in series.items():
            added = message.timeseries.add()
            for name, value in labels:
                added.labels.add(name=name, value=value)
            for milliseconds, number in sorted(samples):
                added.samples.add(value=number, timestamp=milliseconds)
        snappy = require("cramjam", "http").snappy
        return Body(bytes(snappy.compress_raw(message.SerializeToString())), places, rejected)

    def _samples(self, record: Any, now: int) -> tuple[_Labels, list[tuple[int, float]]]:
        fields = dict(row(record))
        ordered = self._labels(fields)
        if fields.get("samples") is None:
            return ordered, [(time_of(fields, now) // _NANOS_PER_MILLI, _number(fields.get("value")))]
        return ordered, [_sample(pair) for pair in _pairs(fields["samples"])]

    def _labels(self, fields: Mapping[str, Any]) -> _Labels:
        labels = {**self.labels, **labels_of(fields.get("labels"))}
        if fields.get("name") is not None:
            labels["__name__"] = str(fields["name"])
        if not labels.get("__name__"):
            raise PermanentError("a record has no metric name; give it a field 'name', or a label '__name__'")
        return tuple(sorted((name, value) for name, value in labels.items() if value))  # "" is no label


def _pairs(samples: Any) -> list[Any]:
    if not isinstance(samples, Sequence) or isinstance(samples, str | bytes):
        raise PermanentError(f"a record's samples are of type {type(samples).__qualname__}; give (timestamp, value)s")
    return list(cast("Sequence[object]", samples))


def _sample(pair: Any) -> tuple[int, float]:
    try:
        at, value = pair
    except (TypeError, ValueError):
        raise PermanentError("one of a record's samples is not a pair; give (timestamp, value)") from None
    return time_of({"timestamp": at}, 0) // _NANOS_PER_MILLI, _number(value)


def _number(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    raise PermanentError(f"a sample's value is of type {type(value).__qualname__}; give a number")
