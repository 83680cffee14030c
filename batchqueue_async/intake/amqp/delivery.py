"""A message of RabbitMQ, whose properties are parsed when somebody asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.intake.ports import ATTEMPT, Delivery
from batchqueue_async.sinks._shared.extras import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchqueue_async.intake.ports import Epoch

ROUTING_KEY = "bq-routing-key"
_DELIVERY_COUNT = "x-delivery-count"
_FLAGS_AT = 12  # of a content header's payload: class, weight and body size come first
_HAS_HEADERS = 0x20  # in the first byte of the flags


class AmqpDelivery(Delivery):
    """One delivery of a channel.

    Attributes:
        tag: its delivery tag, which counts within the channel that it came in.
        exchange: the exchange that it was published to.
    """

    __slots__ = ("_parsed", "_queue", "_raw", "_redelivered", "_routing_key", "exchange", "tag")

    def __init__(
        self,
        body: bytes,
        *,
        epoch: Epoch,
        queue: str,
        tag: int,
        redelivered: bool,
        exchange: str,
        routing_key: str,
        raw: bytes = b"",
        properties: Any = None,
    ) -> None:
        # Not by super().__init__: this is made once per message, and most of those fields are properties here.
        self._body = body
        self.epoch = epoch
        self.order = None
        self.size = len(body) + len(raw)
        self.taken = 0.0
        self.value = None
        self.tag = tag
        self.exchange = exchange
        self._queue = queue
        self._redelivered = redelivered
        self._routing_key = routing_key
        self._raw = raw
        self._parsed = properties
        plain = properties is None and not (len(raw) > _FLAGS_AT and raw[_FLAGS_AT] & _HAS_HEADERS)
        self.attempt = 1 + redelivered if plain else self._attempt()

    @property
    def properties(self) -> Any:
        """Its properties, as the client's object; those that it can't read, and what comes after them, are not there.

        The broker passes on everything that a publisher has sent: text that is not UTF-8, a time that no calendar has.
        """
        if self._parsed is None:
            header = require("pamqp.header", "amqp").ContentHeader()
            self._parsed = header.properties
            try:
                header.unmarshal(self._raw)
            except Exception as error:  # noqa: BLE001 - the client's parser raises anything; the message is there all the same
                log.warning(
                    "message_properties_unreadable", queue=self._queue, tag=self.tag, error_type=type(error).__name__
                )
        return self._parsed

    @property
    def typed_headers(self) -> dict[str, Any]:
        """Its headers as they are on the wire, of any type that AMQP knows."""
        return self.properties.headers or {}

    @property
    def key(self) -> str:
        """The routing key that it was published with, also after a wait for another attempt."""
        return self._original(ROUTING_KEY) or self._routing_key

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers, as text."""
        return {name: _text(value) for name, value in self.typed_headers.items()}

    @property
    def id(self) -> str:
        """Its `message_id`, or its place in the channel where the publisher gave it none."""
        return self.properties.message_id or f"{self._queue}#{self.tag}"

    @property
    def published_at(self) -> float | None:
        """Its `timestamp`, where the publisher set it."""
        stamp = self.properties.timestamp
        return None if stamp is None else stamp.timestamp()

    @property
    def source(self) -> str:
        """The queue."""
        return self._queue

    def _original(self, header: str) -> str | None:
        value = self.typed_headers.get(header)
        return value if isinstance(value, str) else None

    def _attempt(self) -> int:
        """What earlier attempts left in the header, and the deliveries since, which a quorum queue counts."""
        headers = self.typed_headers
        told = headers.get(ATTEMPT)
        base = (
            int(told) if isinstance(told, int) or (isinstance(told, str) and told.isascii() and told.isdigit()) else 1
        )
        count = headers.get(_DELIVERY_COUNT)
        return max(base, 1) + (count if isinstance(count, int) and count > 0 else int(self._redelivered))


def _text(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    return value if isinstance(value, str) else str(value)
