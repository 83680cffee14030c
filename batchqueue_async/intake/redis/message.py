"""An entry of a Redis stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async.intake.ports import Delivery, Epoch

if TYPE_CHECKING:
    from collections.abc import Mapping

_PER_FIELD = 16


class RedisDelivery(Delivery):
    """An entry: one of its fields is the body, and the others are headers."""

    __slots__ = ("entry", "fields", "places")

    places: RedisFields

    def __init__(
        self, entry: bytes, fields: Mapping[bytes, bytes], epoch: Epoch, places: RedisFields, attempt: int = 1
    ) -> None:
        self.entry = entry
        self.fields = fields
        self.places = places
        self.attempt = attempt
        self.value: Any = None
        self.epoch = epoch
        self.order = None
        self.size = sum(map(len, fields.values())) + _PER_FIELD * len(fields)
        self.taken = 0.0

    @property
    def body(self) -> bytes:
        """The field with the payload; empty where the entry has none."""
        return self.fields.get(self.places.body, b"")

    @property
    def key(self) -> str | None:
        """The field with the key."""
        found = self.fields.get(self.places.key)
        return None if found is None else found.decode("utf-8", "replace")

    @property
    def headers(self) -> Mapping[str, str]:
        """All other fields, as text."""
        own = {self.places.body, self.places.key}
        return {
            name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for name, value in self.fields.items()
            if name not in own
        }

    @property
    def id(self) -> str:
        """The entry's id."""
        return self.entry.decode("ascii", "replace")

    @property
    def published_at(self) -> float | None:
        """The time in the entry's id; None where its ids are not times."""
        first = self.entry.partition(b"-")[0]
        return int(first) / 1000 if first.isdigit() and len(first) >= 12 else None  # noqa: PLR2004 - since 2001

    @property
    def source(self) -> str:
        """The stream."""
        return self.places.stream


class RedisFields:
    """Which fields of an entry are what.

    Example:
        >>> RedisFields("rows", "data", "bq-key").body
        b'data'

    Attributes:
        stream: the stream's name.
        body: the name of the field with the payload.
        key: the name of the field with the key.
    """

    __slots__ = ("body", "key", "stream")

    def __init__(self, stream: str, body: str, key: str) -> None:
        self.stream = stream
        self.body = body.encode()
        self.key = key.encode()
