"""How a batch becomes the body of one HTTP request: a format each, none of which does I/O.

A record that a format cannot express is rejected alone, with its reason; the others go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

from batchqueue_async.errors import PermanentError, SinkError
from batchqueue_async.sinks._shared.fields import labels_of, nanoseconds, time_of
from batchqueue_async.sinks._shared.records import is_table, lines, row
from batchqueue_async.sinks.base import SinkNeeds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Body(NamedTuple):
    """What goes into a request.

    Attributes:
        content: the bytes, before any compression that was asked for.
        places: which records of the batch are in it.
        rejected: the others, by their place, each with its reason.
    """

    content: bytes
    places: Sequence[int]
    rejected: dict[int, SinkError]


class Format(Protocol):
    """A way to write a batch; `HttpSink(format=...)` takes any object that has these."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What goes with each request."""
        ...

    @property
    def compressed(self) -> bool:
        """Whether the content is compressed already."""
        ...

    def encode(self, batch: Sequence[Any], keys: Sequence[str] | None) -> Body:
        """Write the batch; `keys` are the records' idempotency keys where there are any."""
        ...


def each(batch: Sequence[Any], take: Callable[[int, Any], None]) -> tuple[list[int], dict[int, SinkError]]:
    """Give each record to `take`; the places of those taken, and of those that it refused with their reasons.

    Example:
        >>> each([1, 2], lambda place, record: None)
        ([0, 1], {})
    """
    places: list[int] = []
    rejected: dict[int, SinkError] = {}
    for place, record in enumerate(batch):
        try:
            take(place, record)
        except PermanentError as error:
            rejected[place] = error
        else:
            places.append(place)
    return places, rejected


@dataclass(frozen=True, kw_only=True)
class JsonArray:
    """One array of the records: `[{"a":1},{"a":2}]`.

    Example:
        >>> JsonArray().encode([{"a": 1}, {"a": 2}], None).content
        b'[{"a":1},{"a":2}]'
        >>> JsonArray(key_field="id").encode([{"a": 1}], ["q/7"]).content
        b'[{"a":1,"id":"q/7"}]'

    Attributes:
        key_field: the field that carries a record's idempotency key; None carries none.
    """

    key_field: str | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    compressed: bool = False

    def encode(self, batch: Sequence[Any], keys: Sequence[str] | None) -> Body:
        """Write the batch."""
        found, places, rejected = _lines(batch, keys, self.key_field)
        return Body(b"[" + b",".join(found) + b"]", places, rejected)


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    r"""A record a line.

    Example:
        >>> JsonLines().encode([{"a": 1}, {"a": 2}], None).content
        b'{"a":1}\n{"a":2}\n'

    Attributes:
        key_field: the field that carries a record's idempotency key; None carries none.
    """

    key_field: str | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/x-ndjson"})
    compressed: bool = False

    def encode(self, batch: Sequence[Any], keys: Sequence[str] | None) -> Body:
        """Write the batch."""
        found, places, rejected = _lines(batch, keys, self.key_field)
        return Body(b"".join([line + b"\n" for line in found]), places, rejected)


@dataclass(frozen=True, kw_only=True)
class LokiPush:
    """Loki's push request in JSON: a stream for each set of labels.

    A record is text (bytes or str), whose time is now; or a row of which these fields count, the rest being the line:

    - `labels`: a mapping, added to the format's own;
    - `timestamp`: seconds since 1970, or a datetime; or `time_unix_nano`, whole nanoseconds;
    - `line`: the text; without it, the other fields as JSON;
    - `metadata`: structured metadata, a mapping.

    Example:
        >>> record = {"labels": {"app": "web"}, "timestamp": 1.5, "line": "GET /"}
        >>> LokiPush(labels={}).encode([record], None).content
        b'{"streams":[{"stream":{"app":"web"},"values":[["1500000000","GET /"]]}]}'

    Attributes:
        labels: those of every record.
        clock: tells the time of records that have none, in seconds since 1970.
    """

    labels: Mapping[str, str] = field(default_factory=lambda: {"job": "batchqueue"})
    clock: Callable[[], float] = field(default=lambda: datetime.now(UTC).timestamp())
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    compressed: bool = False
    needs: ClassVar[SinkNeeds] = SinkNeeds()

    def encode(self, batch: Sequence[Any], keys: Sequence[str] | None) -> Body:  # noqa: ARG002
        """Write the batch; keys have no place in it."""
        try:
            return self._written(batch, checked=False)
        except (TypeError, ValueError):  # which record it is, is found out one by one
            return self._written(batch, checked=True)

    def _written(self, batch: Sequence[Any], *, checked: bool) -> Body:
        streams: dict[tuple[tuple[str, str], ...], list[tuple[int, list[Any]]]] = {}
        now = nanoseconds(self.clock())

        def take(_place: int, record: Any) -> None:
            labels, at, entry = self._entry(record, now)
            if checked:
                lines([[labels, entry]])
            streams.setdefault(labels, []).append((at, entry))

        places, rejected = each(batch, take)
        for entries in streams.values():
            entries.sort(key=lambda entry: entry[0])
        body = [
            {"stream": dict(labels), "values": [entry for _, entry in entries]} for labels, entries in streams.items()
        ]
        return Body(msgspec.json.encode({"streams": body}), places, rejected)

    def _entry(self, record: Any, now: int) -> tuple[tuple[tuple[str, str], ...], int, list[Any]]:
        if isinstance(record, str | bytes):
            return tuple(sorted(self.labels.items())), now, [str(now), _text(record)]
        fields = dict(row(record))
        own = labels_of(fields.pop("labels", None))
        labels = tuple(sorted((self.labels | own if own else self.labels).items()))  # type: ignore[operator]
        at = time_of(fields, now)
        metadata = labels_of(fields.pop("metadata", None))
        line = fields["line"] if "line" in fields else lines([fields])[0]
        entry: list[Any] = [str(at), _text(line)]
        if metadata:
            entry.append(metadata)
        return labels, at, entry


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else str(value)


def _lines(
    batch: Sequence[Any], keys: Sequence[str] | None, key_field: str | None
) -> tuple[list[bytes], Sequence[int], dict[int, SinkError]]:
    if key_field is None or keys is None:
        try:
            return lines(batch), range(len(batch)), {}
        except PermanentError:  # which record it is, is found out one by one
            keys = None
    found: list[bytes] = []

    def take(place: int, record: Any) -> None:
        found.extend(lines([record if keys is None or key_field is None else _with(record, key_field, keys[place])]))

    places, rejected = each(batch, take)
    return found, places, rejected


def _with(record: Any, key_field: str, key: str) -> dict[str, Any]:
    if isinstance(record, bytes) or is_table(record):
        raise PermanentError(
            f"a record of type {type(record).__qualname__} has no place for its key in {key_field!r}; "
            "send mappings, structs or dataclasses, or leave key_field out"
        )
    return {**row(record), key_field: key}
