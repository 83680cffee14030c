"""A message of JetStream: its payload, and what the reply subject says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async.intake.ports import Delivery, Epoch

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

_OLD = 9  # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>
_NONE: Mapping[str, str] = {}


class NatsDelivery(Delivery):
    """A message of JetStream; `key` is its subject, `id` its place in the stream.

    The reply subject is where acknowledgements go, and holds the delivery's numbers: it is parsed when they are asked
    for, but for the number of deliveries, which every attempt needs.
    """

    __slots__ = ("_message", "_tokens", "reply")

    def __init__(self, message: Any, epoch: Epoch, order: Hashable | None = None) -> None:
        self._message = message
        self.reply: str = message.reply
        tokens = self.reply.split(".")
        # Newer servers put the domain and the account in front of the stream's name, and a token at the end.
        self._tokens = tokens if len(tokens) == _OLD else [*tokens[:2], *tokens[4:]]
        self._body = message.data
        self.attempt = int(self._tokens[4])
        self.value: Any = None
        self.epoch = epoch
        self.order = order
        self.size = len(self._body)
        self.taken = 0.0

    @property
    def key(self) -> str:
        """The subject."""
        return str(self._message.subject)

    @property
    def source(self) -> str:
        """The subject."""
        return str(self._message.subject)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers."""
        return self._message.headers or _NONE

    @property
    def id(self) -> str:
        """Stream and sequence."""
        return f"{self._tokens[2]}/{self._tokens[5]}"

    @property
    def published_at(self) -> float:
        """When the stream stored it."""
        return int(self._tokens[7]) / 1e9

    @property
    def pending(self) -> int:
        """How many messages the consumer had to come when this one was sent."""
        return int(self._tokens[8])
