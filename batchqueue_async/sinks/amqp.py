"""A message a record to RabbitMQ, each confirmed by the broker. Needs `[amqp]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from batchqueue_async.errors import AuthError, ConfigError, PermanentError, RetryableError, SinkError, TooLargeError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.messages import MessageSink
from batchqueue_async.sinks._shared.secrets import Secret, redacted, resolve
from batchqueue_async.sinks._shared.tls import context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from batchqueue_async.sinks._shared.tls import TlsOption

_LOST = "the connection broke"
# The reply codes that cost a message or a pause, and the client's class for each, which has no code itself.
_CODES = {
    312: "PublishError",
    403: "ChannelAccessRefused",
    405: "ChannelLockedResource",
    406: "ChannelPreconditionFailed",
}


class _Line(NamedTuple):
    """What a sink publishes through."""

    connection: Any
    channel: Any
    underlay: Any
    """The channel of the client beneath, whose publishing need not wait for the socket between two messages."""


class AmqpSink(MessageSink[_Line]):
    """Publishes each record as a message, and returns when the broker confirmed all; delivers at least once.

    Records are bytes, text, or anything that has a form in JSON. `message_id` is the record's idempotency key. A
    message that no queue takes comes back and is rejected, unless `mandatory` is off; one that the broker refuses, such
    as for a full queue, is tried again. A batch of which the broker confirmed a part is not sent whole again.

    Example:
        >>> AmqpSink("amqp://shop:s3cret@localhost/orders", queue="rows")
        AmqpSink('amqp://shop:***@localhost/orders', exchange='', queue='rows')
    """

    client = ("aio_pika", "amqp")

    def __init__(
        self,
        url: str,
        *,
        queue: str | None = None,
        exchange: str = "",
        routing_key: str | Callable[[Any], str] | None = None,
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        persistent: bool = True,
        mandatory: bool = True,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 10.0,
        connect_timeout: float = 5.0,
        tls: TlsOption = None,
        retryable: Iterable[int] = (),
    ) -> None:
        """Say where to publish, and how.

        Args:
            url: `amqp://host/vhost`, or `amqps://` for TLS.
            queue: a durable queue, which is declared, and the routing key where none is given.
            exchange: the exchange, which has to be there; "" is the one that leads to each queue by its name.
            routing_key: the key of each message, or a function that gives it for a record.
            user: `env:NAME`, `file:/path` or the value; also in the URL.
            password: likewise.
            persistent: whether the broker writes messages to its disk.
            mandatory: whether messages that no queue takes are rejected, instead of dropped by the broker.
            content_type: that of each message.
            headers: those of each message.
            timeout: seconds in which at least one confirmation of a batch, or of those before it, has to come.
            connect_timeout: seconds to connect.
            tls: for `amqps`: a `Tls` or an SSL context; without, certificates are verified against the system's.
            retryable: more of AMQP's reply codes that may pass: 312 (no queue takes the message), 403, 405 or 406.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"amqp", "amqps"} or not parts.hostname:
            raise ConfigError(f"AMQP sink: a URL of scheme {parts.scheme!r} is none of ours; give amqp:// or amqps://")
        if queue is None and routing_key is None and not exchange:
            raise ConfigError(
                "AMQP sink: there is nowhere to send; give queue=..., or exchange=... and routing_key=..."
            )
        if tls not in {None, False} and parts.scheme == "amqp":
            raise ConfigError("AMQP sink: amqp:// is without TLS, and tls=... is given; give amqps://")
        if timeout <= 0 or connect_timeout <= 0:
            raise ConfigError(f"AMQP sink: timeout={timeout}, connect_timeout={connect_timeout}; give seconds above 0")
        super().__init__()
        self.url = url
        self.queue = queue
        self.exchange = exchange
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self._shown = redacted(url)
        self._routing_key = routing_key if routing_key is not None else queue or ""
        self._user = None if user is None else Secret(user)
        self._password = None if password is None else Secret(password)
        self._tls = tls
        self._mandatory = mandatory
        self._retryable = frozenset(retryable)
        unknown = sorted(self._retryable - _CODES.keys())
        if unknown:
            raise ConfigError(
                f"AMQP sink: retryable={unknown[0]!r} is not a reply code that is refused; give some of {list(_CODES)}"
            )
        self._headers = dict(headers or {})
        self._properties = {"content_type": content_type, "delivery_mode": 1 + persistent}

    def __repr__(self) -> str:
        return f"AmqpSink({self._shown!r}, exchange={self.exchange!r}, queue={self.queue!r})"

    def _judge(self, errors: dict[int, SinkError]) -> None:
        for error in errors.values():
            if isinstance(error, TooLargeError):
                raise error  # the broker closed the channel for one message, and does not say which

    async def _publish(self, line: _Line, record: Any, body: bytes, key: str | None, traced: Mapping[str, str]) -> bool:
        routing = self._routing_key(record) if callable(self._routing_key) else self._routing_key
        properties = require("pamqp.commands", "amqp").Basic.Properties(
            message_id=key, headers={**traced, **self._headers}, **self._properties
        )
        # Without `wait=False` each message waits for its predecessor to be in the socket, which is two rounds of the
        # loop a message: on a busy machine a few batches at once took longer than `timeout` for that alone.
        await line.underlay.basic_publish(
            body,
            exchange=self.exchange,
            routing_key=routing,
            properties=properties,
            mandatory=self._mandatory,
            wait=False,
        )
        return False

    def _is_broken(self, line: _Line) -> bool:
        return bool(line.connection.is_closed or line.channel.is_closed)

    async def _connect(self) -> _Line:
        client = require("aio_pika", "amqp")
        parts = urlsplit(self.url)
        address = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))
        url = require("yarl", "amqp").URL(address)
        user = resolve(self._user) or unquote(parts.username or "guest")
        password = resolve(self._password) or unquote(parts.password or "guest")
        url = url.with_user(user).with_password(password)
        options = {}
        if parts.scheme == "amqps" and self._tls is not None:
            options["ssl_context"] = context(self._tls)
        connection = client.Connection(url, **options)
        try:
            await connection.connect()
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            if self.queue is not None:
                await channel.declare_queue(self.queue, durable=True)
            if self.exchange:
                await channel.get_exchange(self.exchange)
            underlay = await channel.get_underlay_channel()
        except BaseException:  # a cancelled one too would leave its connection behind
            # And one that was refused would, when it is collected, make a task of its own to be closed in.
            await connection.close()
            raise
        return _Line(connection, channel, underlay)

    @staticmethod
    async def _disconnect(line: _Line) -> None:
        await line.connection.close()

    def _error(self, error: Exception, line: _Line | None) -> SinkError:
        """What an error of the client means; a broken line is dropped."""
        known = require("aio_pika.exceptions", "amqp")
        where = f"RabbitMQ at {self._shown}"
        if isinstance(error, ConfigError):
            raise error
        code = next((code for code in self._retryable if type(error).__name__ == _CODES[code]), None)
        if not isinstance(error, known.DeliveryError):
            self._drop(line)
        if code is not None:
            return RetryableError(f"{where} answered with the code {code}", error_type="server")
        return self._meaning(error, where)

    def _meaning(self, error: Exception, where: str) -> SinkError:
        known = require("aio_pika.exceptions", "amqp")
        inner = require("aiormq.exceptions", "amqp")
        if isinstance(error, known.PublishError):
            return PermanentError(f"{where}: no queue takes the message from the exchange {self.exchange!r}")
        if isinstance(error, known.DeliveryError):
            return RetryableError(f"{where} did not take the message")
        if isinstance(
            error, known.AuthenticationError | known.ProbableAuthenticationError | inner.ChannelAccessRefused
        ):
            return AuthError(f"{where} refuses us; check user, password and permissions")
        closed_early = isinstance(error, known.InvalidFrameError) and "Connection.Close" in str(error)
        if isinstance(error, inner.ConnectionNotAllowed) or closed_early:  # the client expects no refusal there
            return AuthError(f"{where} refuses us; check the virtual host and its permissions")
        if isinstance(error, known.ChannelNotFoundEntity):
            return RetryableError(f"{where} has no exchange {self.exchange!r}; declare it")
        if isinstance(error, known.ChannelPreconditionFailed):
            if "larger than" in str(error):
                return TooLargeError(f"{where} takes no message of that size")
            return PermanentError(f"{where}: the queue {self.queue!r} is there with other properties")
        late = isinstance(error, TimeoutError)
        what = "took too long" if late else f"{_LOST}: {type(error).__name__}"
        return RetryableError(f"{where}: {what}", error_type="timeout" if late else "network")
