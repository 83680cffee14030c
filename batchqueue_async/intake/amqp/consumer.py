"""`AmqpConsumer`: a queue of RabbitMQ, consumed by a pool of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, RetryableError
from batchqueue_async.intake.amqp.broker import Broker
from batchqueue_async.intake.amqp.session import open_session
from batchqueue_async.intake.config import IntakeConfig
from batchqueue_async.intake.consumer import Consumer

if TYPE_CHECKING:
    from batchqueue_async.intake.amqp.session import AmqpSession, Reader
    from batchqueue_async.intake.ports import Plan, Retries
    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption

_READERS = ("stream", "client")
_CONSUMER_TIMEOUT = 1800.0  # seconds: RabbitMQ's own, after which it closes the channel of an unsettled message
_MANY = 10  # times the delivery limit


class AmqpLane:
    """The way to one queue of one broker."""

    retries: Retries = "long"
    counts_held = True

    def __init__(self, broker: Broker, queue: str, plan: Plan, reader: Reader, timeout: float) -> None:
        self._broker = broker
        self._queue = queue
        self._plan = plan
        self._reader: Reader = reader
        self._timeout = timeout
        self._known: dict[str, str] | None = None  # what the queue was declared with; None until it was consumed once

    async def connect(self) -> AmqpSession:
        """Connect and consume.

        Raises:
            ConfigError: there is no such queue, the first time; later its absence is an outage.
        """
        try:
            session = await open_session(
                self._broker,
                self._queue,
                self._plan,
                reader=self._reader,
                timeout=self._timeout,
                ask=self._known is None,
            )
        except ConfigError as error:
            if self._known is None:
                raise
            raise RetryableError(str(error), error_type="refused") from None
        if self._known is None:
            self._known = session.arguments
            self._warn(self._known)
        session.hand_over = self._plan.order != "none" and self._known.get("x-single-active-consumer") == "true"
        return session

    def _warn(self, known: dict[str, str]) -> None:
        """Say what of the queue does not go well with what was asked for."""
        limit = known.get("x-delivery-limit", "")
        if limit.isdigit() and self._plan.prefetch > _MANY * int(limit):
            log.warning(
                "intake_delivery_limit",
                consumer=self._plan.name,
                limit=int(limit),
                prefetch=self._plan.prefetch,
                advice="a lost connection costs each prefetched message a delivery; raise the limit, or lower prefetch",
            )
        if self._plan.order != "none" and known.get("x-single-active-consumer") != "true":
            log.info(
                "intake_order_is_local",
                consumer=self._plan.name,
                advice="other consumers of this queue share its keys; x-single-active-consumer keeps order across them",
            )


class AmqpConsumer(Consumer):
    """Consumes a queue of RabbitMQ, classic or quorum, and acknowledges each message after its outcome. Needs `[amqp]`.

    What a handler did not manage is tried again: after a short delay from here, after a longer one by a queue of the
    broker's (`orders.retry.8`), in its order where `ordered_by` asks for one. What is given up is published to
    `dead_letters`, with confirmation, before it is acknowledged.

    Example:
        >>> async def save(message: Message) -> None:
        ...     await asyncio.sleep(0)
        >>> consumer = AmqpConsumer("amqp://shop@localhost/shop", "orders", save, dead_letters="orders.dead")
        >>> consumer
        AmqpConsumer('orders', new)
    """

    def __init__(
        self,
        url: str,
        queue: str,
        handler: Any,
        *,
        name: str | None = None,
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        tls: TlsOption = None,
        heartbeat: int = 10,
        reader: Reader = "stream",
        **options: Any,
    ) -> None:
        """Say what to consume, and how.

        Args:
            url: `amqp://host/vhost`, or `amqps://` for TLS.
            queue: the queue, which has to be there.
            handler: an async function of a message, or of a batch with `batch=`; a `BatchQueue`; an `Exporter`.
            name: what logs, metrics and the broker call it; the queue's name when None.
            user: `env:NAME`, `file:/path` or the value; also in the URL.
            password: likewise.
            tls: for `amqps`: a `Tls` or an SSL context; without, certificates are verified against the system's.
            heartbeat: seconds; after two without a sign the connection is given up.
            reader: "stream" takes deliveries off the byte stream, several times as fast; "client" has the client
                library make them.
            options: the fields of `IntakeConfig`.
        """
        if not isinstance(queue, str) or not queue:
            raise ConfigError(f"AMQP consumer: queue={queue!r} is not the name of a queue; pass one, such as 'orders'")
        if reader not in _READERS:
            raise ConfigError(f"AMQP consumer: reader={reader!r} is not a way to read; pass 'stream' or 'client'")
        config = IntakeConfig(**options)
        super().__init__(handler, config, name=name or queue)
        self._broker = Broker(
            url, user=user, password=password, tls=tls, heartbeat=heartbeat, name=f"batchqueue {self.name}"
        )
        self._queue = queue
        self._reader: Reader = reader
        timeout = config.handler_timeout
        if timeout is None or timeout > _CONSUMER_TIMEOUT:
            log.warning(
                "intake_consumer_timeout",
                consumer=self.name,
                handler_timeout=timeout,
                advice=f"RabbitMQ closes the channel of a message that is unsettled for {_CONSUMER_TIMEOUT:g} s, "
                "unless its consumer_timeout is longer; set handler_timeout below it",
            )

    def _lane(self, plan: Plan) -> AmqpLane:
        return AmqpLane(self._broker, self._queue, plan, self._reader, self.config.connect_timeout)
