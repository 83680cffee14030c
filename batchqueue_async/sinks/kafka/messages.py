"""Records as Kafka's messages: value, key and headers, each with its place in the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from batchqueue_async._support import tracing
from batchqueue_async.errors import ConfigError, PermanentError, SinkError, TooLargeError
from batchqueue_async.sinks._shared.fields import nanoseconds
from batchqueue_async.sinks._shared.records import is_table, lines, row

Headers: TypeAlias = list[tuple[str, bytes]]
Bytes: TypeAlias = bytes | str | None
KeyOption: TypeAlias = str | Callable[[Any], Bytes] | None
ValueOption: TypeAlias = Callable[[Any], bytes | None] | None
HeadersOption: TypeAlias = Callable[[Any], Iterable[tuple[str, bytes | str]]] | Sequence[str] | Mapping[str, str] | None
TimeOption: TypeAlias = str | Callable[[Any], object] | None

_NANOS = 1_000_000
_KEY_ROOM = 1_000  # for a key in a header, where records are looked at all together
OVERHEAD = 100
"""More than what Kafka adds to a record: lengths, offset and time, and the head of its batch."""


@dataclass(slots=True)
class Messages:
    """Messages in the order of their records; `places[i]` is the record of message i."""

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None
    headers: Sequence[Headers] | None
    places: Sequence[int]
    times: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Encoder:
    """How records become messages."""

    key: KeyOption
    value: ValueOption
    headers: HeadersOption
    key_header: str | None
    max_record_bytes: int
    timestamp: TimeOption = None

    def encode(self, batch: Sequence[Any], keys: Sequence[str] | None) -> tuple[Messages, dict[int, SinkError]]:
        """The records as messages, and those that are none with the reason."""
        keys = keys if self.key_header is not None else None
        traced = [(name, value.encode()) for name, value in tracing.headers().items()]
        if _size(traced) > _KEY_ROOM // 2:
            traced = []  # more baggage than a trace is worth
        if self._plain() and set(map(type, batch)) == {bytes} and max(map(len, batch)) <= self._room - _KEY_ROOM:
            headers = None if keys is None else [[(str(self.key_header), key.encode()), *traced] for key in keys]
            if keys is None or max(map(len, keys)) < _KEY_ROOM // 4:
                if traced and headers is None:
                    headers = [traced] * len(batch)
                return Messages(batch, None, headers, range(len(batch))), {}
        return self._encode(batch, keys, traced)

    @property
    def _room(self) -> int:
        return self.max_record_bytes - OVERHEAD

    def _plain(self) -> bool:
        return self.key is None and self.value is None and self.headers is None and self.timestamp is None

    def _encode(
        self, batch: Sequence[Any], keys: Sequence[str] | None, traced: Headers
    ) -> tuple[Messages, dict[int, SinkError]]:
        values: list[bytes | None] = []
        found_keys: list[bytes | None] = []
        headers: list[Headers] = []
        places: list[int] = []
        times: list[int] = []
        now = time.time_ns() // _NANOS
        refused: dict[int, SinkError] = {}
        for place, record in enumerate(batch):
            try:
                found = [
                    (*self._message(each, key, traced), self._time(each, now))
                    for each, key in _single(record, None if keys is None else keys[place])
                ]
            except SinkError as error:
                refused[place] = error
                continue
            for value, key, its_headers, moment in found:
                times.append(moment)
                values.append(value)
                found_keys.append(key)
                headers.append(its_headers)
                places.append(place)
        with_headers = keys is not None or self.headers is not None or bool(traced)
        messages = Messages(
            values,
            found_keys if self.key else None,
            headers if with_headers else None,
            places,
            None if self.timestamp is None else times,
        )
        return messages, refused

    def _message(self, record: Any, bq_key: str | None, traced: Headers) -> tuple[bytes | None, bytes | None, Headers]:
        value = record if type(record) is bytes and self.value is None else self._value(record)
        key = self._key(record) if self.key is not None else None
        if value is None and key is None:
            raise PermanentError("Kafka sink: a record has neither a value nor a key")
        headers = [(name, _bytes(given) or b"") for name, given in self._made_headers(record)]
        if bq_key is not None and self.key_header is not None:
            headers.append((self.key_header, bq_key.encode()))
        size = len(value or b"") + len(key or b"") + _size(headers)
        if size > self._room:
            raise TooLargeError(
                f"Kafka sink: a record of {size} bytes is above max_record_bytes={self.max_record_bytes}; raise it, "
                "and the topic's max.message.bytes, or send less"
            )
        if traced and size + _size(traced) <= self._room:  # no record is refused for its trace
            names = {name for name, _ in headers}
            headers += [each for each in traced if each[0] not in names]
        return value, key, headers

    def _made_headers(self, record: Any) -> Iterable[tuple[str, Any]]:
        if self.headers is None:
            return ()
        if callable(self.headers):
            return self.headers(record)
        fields = row(record)
        named = (
            self.headers.items() if isinstance(self.headers, Mapping) else zip(self.headers, self.headers, strict=True)
        )
        return [(name, fields[column]) for name, column in named if fields.get(column) is not None]

    def _time(self, record: Any, now: int) -> int:
        """When a record was made, in milliseconds; now where it does not say."""
        if self.timestamp is None:
            return now
        moment = self.timestamp(record) if callable(self.timestamp) else row(record).get(self.timestamp)
        return now if moment is None else nanoseconds(moment) // _NANOS

    def _value(self, record: Any) -> bytes | None:
        if self.value is not None:
            return self.value(record)
        if record is None or isinstance(record, bytes | bytearray | memoryview | str):
            return _bytes(record)
        return lines([record])[0]

    def _key(self, record: Any) -> bytes | None:
        if callable(self.key):
            return _bytes(self.key(record))
        column = self.key
        if column is None:
            return None
        try:
            return _bytes(row(record)[column])
        except KeyError:
            raise PermanentError(f"Kafka sink: a record has no {column!r}, which is to be its key") from None


def _single(record: Any, key: str | None) -> Iterable[tuple[Any, str | None]]:
    """A record as what becomes one message each; the rows of an Arrow record batch are told apart by their keys."""
    if not is_table(record):
        return ((record, key),)
    return ((each, None if key is None else f"{key}#{at}") for at, each in enumerate(record.to_pylist()))


def _size(headers: Headers) -> int:
    return sum(len(name) * 4 + len(given) + 10 for name, given in headers)


def _bytes(value: Any) -> bytes | None:
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray | memoryview):
        return bytes(cast("bytes", value))
    return str(value).encode()


def check_option(name: str, value: Any) -> None:
    """Refuse what is no function."""
    if value is not None and not callable(value):
        raise ConfigError(f"Kafka sink: {name}={value!r} is no function of a record")
