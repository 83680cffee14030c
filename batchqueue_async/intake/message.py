"""What a handler is given: one message of a broker, whichever broker it came from."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_NO_HEADERS: Mapping[str, str] = {}
_STORED: Callable[[Any], bytes] = attrgetter("_body")


class Message:
    """One message of a broker, as a handler sees it; the lanes' own classes derive from it.

    A lane may replace any attribute but `attempt` and `value` by a property that parses when it is asked: most handlers
    read the body alone.

    Example:
        >>> message = Message(b"{}", key="42", source="orders", id="orders/0/7")
        >>> message.body, message.key, message.attempt
        (b'{}', '42', 1)

    Attributes:
        body: the payload.
        key: what the broker calls the message's key: the record's key with Kafka, the routing key with RabbitMQ, the
            subject with NATS; None where there is none.
        headers: its headers, as text.
        attempt: which attempt at handling it this is, from 1; it counts those before a restart where the broker does.
        id: its identity at the broker, for logs and for recognising repetitions.
        published_at: when it was published, in seconds since 1970; None where the broker does not say.
        source: where it came from: queue, topic, subject or stream.
        value: what `decode` made of it; None without one.
    """

    __slots__ = ("__weakref__", "_body", "_headers", "_id", "_key", "_published_at", "_source", "attempt", "value")

    def __init__(
        self,
        body: bytes = b"",
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        attempt: int = 1,
        id: str = "",  # noqa: A002 - the attribute's name
        published_at: float | None = None,
        source: str = "",
    ) -> None:
        self._body = body
        self._key = key
        self._headers = headers
        self._id = id
        self._published_at = published_at
        self._source = source
        self.attempt = attempt
        self.value: Any = None

    @property
    def body(self) -> bytes:
        """The payload."""
        return self._body

    @property
    def key(self) -> str | bytes | None:
        """The broker's key of the message, or None."""
        return self._key

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers, as text."""
        return self._headers or _NO_HEADERS

    @property
    def id(self) -> str:
        """Its identity at the broker."""
        return self._id

    @property
    def published_at(self) -> float | None:
        """When it was published, in seconds since 1970, or None."""
        return self._published_at

    @property
    def source(self) -> str:
        """The queue, topic, subject or stream it came from."""
        return self._source

    def __repr__(self) -> str:
        # No payload, and no key: both may be personal data, and a repr goes to logs.
        return f"{type(self).__name__}(id={self.id!r}, source={self.source!r}, attempt={self.attempt})"


def bodies_of(batch: Sequence[Message]) -> list[bytes]:
    """The bodies of a batch, of messages of one class.

    A property costs a call for each message. So a run gives them itself, and where the class stores its bodies, as most
    do, they are read from there.

    Example:
        >>> bodies_of([Message(b"1"), Message(b"2")])
        [b'1', b'2']
    """
    if not isinstance(batch, list):
        bodies = getattr(batch, "bodies", None)
        if bodies is not None:
            return cast("list[bytes]", bodies())
    if batch and type(batch[0]).body is Message.body:
        return list(map(_STORED, batch))
    return [each.body for each in batch]
