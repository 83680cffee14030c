"""Messages that go back to the broker: to wait for another attempt, or to the dead letters; each confirmed.

They go over a connection of their own. The consuming one is not read while too many bytes wait, so that a confirmation
would not come in until a message has its outcome, which waits for the confirmation. And a broker that runs out of
memory or disk stops reading from connections that publish: acknowledgements must still reach it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.errors import PermanentError, RetryableError
from batchqueue_async.intake.amqp.broker import close_quietly
from batchqueue_async.intake.amqp.delay_queues import DECLARED_FOR, delay_queue
from batchqueue_async.intake.amqp.delivery import ROUTING_KEY
from batchqueue_async.intake.amqp.stream import StreamFactory
from batchqueue_async.intake.ports import ATTEMPT, DeadLetter, Retry
from batchqueue_async.sinks._shared.extras import require

if TYPE_CHECKING:
    from batchqueue_async.intake.amqp.broker import Broker
    from batchqueue_async.intake.amqp.delivery import AmqpDelivery

_PERSISTENT = 2
# What a message does not take along: the queue's own count of its life before, the number of its attempt, and whom the
# sender wanted to have a copy, who has it.
_LEFT_BEHIND = frozenset({"x-delivery-count", ATTEMPT, "CC", "BCC"})


class Publisher:
    """Publishes over a connection and channel of its own, made when they are needed, and again after they broke."""

    def __init__(self, broker: Broker, *, queue: str, letters: str | None, timeout: float) -> None:
        """Say what for.

        Args:
            broker: where to.
            queue: whose messages.
            letters: the exchange or queue of dead letters.
            timeout: seconds for a confirmation.
        """
        self._broker = broker
        self._connection: Any = None
        self._factory: StreamFactory | None = None
        self._queue = queue
        self._letters = letters
        self._letters_exchange: str | None = None  # "" is the one that leads to each queue by its name
        self._timeout = timeout
        self._channel: Any = None
        self._closed = False
        self._opening = asyncio.Lock()
        self._declared: dict[str, float] = {}  # each delay queue: when it was declared last

    async def prepare(self, connection: Any) -> None:
        """Find what takes the dead letters: an exchange of that name, else a queue, which is declared durable.

        Args:
            connection: the consuming one, before it consumes.
        """
        if self._letters is None:
            return
        if await self._broker.has_exchange(connection, self._letters):
            self._letters_exchange = self._letters
            return
        if await self._broker.message_count(connection, self._letters) is None:
            channel = await connection.channel(publisher_confirms=False)
            try:
                await channel.queue_declare(self._letters, durable=True)
            finally:
                await close_quietly(channel)
        self._letters_exchange = ""

    async def publish(self, delivery: AmqpDelivery, outcome: Retry | DeadLetter) -> None:
        """Publish, and return when the broker has confirmed it.

        Raises:
            RetryableError: it did not.
            PermanentError: no queue takes it.
        """
        known = require("aiormq.exceptions", "amqp")
        try:
            async with asyncio.timeout(self._timeout):
                channel = await self._open()
                exchange, key, headers = await self._route(channel, delivery, outcome)
                await channel.basic_publish(
                    delivery.body,
                    exchange=exchange,
                    routing_key=key,
                    properties=_properties(delivery, headers),
                    mandatory=True,
                )
        except known.PublishError:
            raise PermanentError(
                f"{self._broker.place}: no queue takes messages from the exchange {self._letters_exchange!r} with the "
                f"routing key {delivery.key!r}; bind one, or use a fanout exchange"
            ) from None
        except known.DeliveryError:
            raise RetryableError(f"{self._broker.place} did not confirm the message", error_type="refused") from None
        except Exception as error:  # noqa: BLE001 - the client raises errors of many kinds; all are judged in one place
            self._declared.clear()
            if isinstance(error, TimeoutError) and self._factory is not None:
                self._factory.cut()  # a line that is half open would fail the next attempts too
            raise self._broker.judge(error) from None

    async def close(self) -> None:
        """Close the connection; what is not confirmed by now fails."""
        self._closed = True
        connection, self._connection, self._channel = self._connection, None, None
        try:
            if connection is not None:
                await close_quietly(connection)
        finally:
            if self._factory is not None:
                self._factory.cut()

    async def _open(self) -> Any:
        async with self._opening:
            if self._channel is None or self._channel.is_closed:
                self._declared.clear()
                if self._connection is None or self._connection.is_closed:
                    self._factory = StreamFactory()
                    self._connection = await self._broker.connect(self._factory)
                if self._closed:  # meanwhile
                    await self.close()
                    raise RetryableError(f"{self._broker.place}: the session is over", error_type="network")
                self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
            return self._channel

    async def _route(
        self, channel: Any, delivery: AmqpDelivery, outcome: Retry | DeadLetter
    ) -> tuple[str, str, dict[str, Any]]:
        """Exchange, routing key and headers."""
        headers = _writable(
            {name: value for name, value in delivery.typed_headers.items() if name not in _LEFT_BEHIND}, delivery
        )
        if isinstance(outcome, Retry):
            wait = delay_queue(self._queue, outcome.delay)
            now = asyncio.get_running_loop().time()
            if now - self._declared.get(wait.name, -DECLARED_FOR) >= DECLARED_FOR:
                await channel.queue_declare(wait.name, durable=True, arguments=wait.arguments)
                self._declared[wait.name] = now
            return "", wait.name, {**headers, ATTEMPT: outcome.attempt, ROUTING_KEY: delivery.key}
        if self._letters is None or self._letters_exchange is None:
            raise PermanentError(
                f"{self._broker.place}: no dead_letters are named; pass dead_letters='{self._queue}.dead'"
            )
        added = outcome.headers(delivery)
        headers |= {name: value for name, value in added.items() if name.startswith("bq-")}
        exchange = self._letters_exchange
        return exchange, delivery.key if exchange else self._letters, headers


def _writable(headers: dict[str, Any], delivery: AmqpDelivery) -> dict[str, Any]:
    """Headers that the client can write: it reads more than that, such as text that is not UTF-8.

    A header that it can't write is left out: the message would wait for ever, and all others behind it.
    """
    encode = require("pamqp.encode", "amqp")
    found: dict[str, Any] = {}
    for name, value in headers.items():
        own = _as_written(value)
        try:
            encode.field_table({name: own})
        except Exception as error:  # noqa: BLE001 - the client's encoder raises errors of many kinds
            log.warning("message_header_left_out", message=delivery.id, header=name, error_type=type(error).__name__)
        else:
            found[name] = own
    return found


def _as_written(value: Any) -> Any:
    """Bytes as the client writes them, in tables and arrays too."""
    if isinstance(value, bytes):
        return bytearray(value)
    if isinstance(value, dict):
        table: Any = value  # pyright: ignore[reportUnknownVariableType]
        return {name: _as_written(each) for name, each in table.items()}
    if isinstance(value, list):
        array: Any = value  # pyright: ignore[reportUnknownVariableType]
        return [_as_written(each) for each in array]
    return value


def _properties(delivery: AmqpDelivery, headers: dict[str, Any]) -> Any:
    """The message's own, with other headers; it is written to the broker's disk as the message itself may not be."""
    own = delivery.properties
    return require("pamqp.commands", "amqp").Basic.Properties(
        content_type=own.content_type,
        content_encoding=own.content_encoding,
        headers=headers,
        delivery_mode=_PERSISTENT,
        priority=own.priority,
        correlation_id=own.correlation_id,
        reply_to=own.reply_to,
        message_id=own.message_id,
        timestamp=own.timestamp,
        message_type=own.message_type,
        app_id=own.app_id,
    )
