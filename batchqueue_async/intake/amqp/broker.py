"""Where the broker is, how to connect to it, and what its refusals mean."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from batchqueue_async.errors import AuthError, BatchQueueError, ConfigError, RetryableError
from batchqueue_async.sinks._shared.connection import uncut
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import Secret, redacted, resolve
from batchqueue_async.sinks._shared.tls import context

if TYPE_CHECKING:
    from batchqueue_async.intake.amqp.stream import StreamFactory
    from batchqueue_async.sinks._shared.tls import TlsOption

_CURRENT = re.compile(
    r"inequivalent arg '([^']+)' .*?(?:but )?current is (?:the value )?'?([^']*?)'?(?: of type '(\w+)')?$"
)
_MOST_ARGUMENTS = 16
_LONGEST_HEARTBEAT = 3600


class Broker:
    """A RabbitMQ, as a URL and credentials name it.

    Example:
        >>> Broker("amqp://shop:s3cret@localhost/orders")
        Broker('amqp://shop:***@localhost/orders')
    """

    def __init__(
        self,
        url: str,
        *,
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        tls: TlsOption = None,
        heartbeat: int = 10,
        name: str = "",
    ) -> None:
        """Say where it is.

        Args:
            url: `amqp://host/vhost`, or `amqps://` for TLS.
            user: `env:NAME`, `file:/path` or the value; also in the URL.
            password: likewise.
            tls: for `amqps`: a `Tls` or an SSL context; without, certificates are verified against the system's.
            heartbeat: seconds after which each side takes a silent connection for a dead one.
            name: what the broker's own tools call the connection.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"amqp", "amqps"} or not parts.hostname:
            shown = redacted(url)
            raise ConfigError(
                f"AMQP consumer: url={shown!r} does not name a broker; pass amqp://host/vhost or amqps://..."
            )
        if tls not in {None, False} and parts.scheme == "amqp":
            raise ConfigError("AMQP consumer: amqp:// is without TLS, and tls=... is given; pass amqps://")
        if not isinstance(heartbeat, int) or isinstance(heartbeat, bool) or not 1 <= heartbeat <= _LONGEST_HEARTBEAT:
            raise ConfigError(
                f"AMQP consumer: heartbeat={heartbeat!r} is not a whole number in 1 to {_LONGEST_HEARTBEAT}"
            )
        self._parts = parts
        self._user = None if user is None else Secret(user)
        self._password = None if password is None else Secret(password)
        self._tls = tls
        self._name = name
        self._shown = redacted(urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")))
        self.heartbeat = heartbeat

    def __repr__(self) -> str:
        return f"Broker({self._shown!r})"

    @property
    def place(self) -> str:
        """What messages call it; no secret in it."""
        return f"RabbitMQ at {self._shown}"

    async def connect(self, factory: StreamFactory | None) -> Any:
        """A connection of aiormq, which reads through the factory's stream if there is one.

        Raises:
            ConfigError: a credential or certificate can't be read.
            AuthError: the credentials are refused.
            RetryableError: the broker can't be reached.
        """
        client = require("aiormq", "amqp")
        parts = self._parts
        address = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))
        url = require("yarl", "amqp").URL(address)
        url = url.with_user(resolve(self._user) or unquote(parts.username or "guest"))
        url = url.with_password(resolve(self._password) or unquote(parts.password or "guest"))
        url = url.update_query(heartbeat=str(self.heartbeat), **({"name": self._name} if self._name else {}))
        options: dict[str, Any] = {} if factory is None else {"transport_factory": factory}
        if parts.scheme == "amqps" and self._tls not in {None, False}:
            options["context"] = context(self._tls)
        try:
            return await uncut(client.connect(url, **options), lambda connection: connection.close())
        except Exception as error:  # noqa: BLE001 - the client raises errors of many kinds; all are judged in one place
            raise self.judge(error) from None

    def judge(self, error: Exception) -> Exception:
        """What an error of the client means."""
        if isinstance(error, BatchQueueError):
            return error
        known = require("aiormq.exceptions", "amqp")
        if isinstance(error, known.AuthenticationError | known.ProbableAuthenticationError):
            return AuthError(f"{self.place} refuses us; check user and password")
        if isinstance(error, known.ChannelAccessRefused):
            return AuthError(f"{self.place} refuses us: {_words(error)}; check the user's permissions")
        closed_early = isinstance(error, known.InvalidFrameError) and "Connection.Close" in str(error)
        if isinstance(error, known.ConnectionNotAllowed) or closed_early:  # the client expects no refusal there
            return AuthError(f"{self.place} refuses us; check the virtual host and its permissions")
        late = isinstance(error, TimeoutError)
        what = "took too long" if late else f"{type(error).__name__}: {_words(error)}"
        return RetryableError(f"{self.place}: {what}", error_type="timeout" if late else "network")

    async def message_count(self, connection: Any, queue: str) -> int | None:
        """How many messages a queue holds that are ready; None if there is no such queue."""
        known = require("aiormq.exceptions", "amqp")
        channel = await connection.channel(publisher_confirms=False)
        try:
            return int((await channel.queue_declare(queue, passive=True)).message_count or 0)
        except known.ChannelNotFoundEntity:
            return None
        finally:
            await close_quietly(channel)

    async def has_exchange(self, connection: Any, exchange: str) -> bool:
        """Whether there is an exchange of that name."""
        known = require("aiormq.exceptions", "amqp")
        channel = await connection.channel(publisher_confirms=False)
        try:
            await channel.exchange_declare(exchange, passive=True)
        except known.ChannelNotFoundEntity:
            return False
        finally:
            await close_quietly(channel)
        return True

    async def arguments_of(self, connection: Any, queue: str) -> dict[str, str] | None:
        """What a queue that exists was declared with; None where that can't be learned.

        The protocol has no question for it. But the broker refuses to declare a queue anew with other arguments, and
        says of the first that differs what it is; so each refusal tells one more, until the declaration fits.
        """
        known = require("aiormq.exceptions", "amqp")
        found: dict[str, str] = {}
        options: dict[str, bool] = {"durable": True}
        arguments: dict[str, Any] = {}
        for _ in range(_MOST_ARGUMENTS):
            channel = await connection.channel(publisher_confirms=False)
            try:
                await channel.queue_declare(queue, arguments=dict(arguments), **options)
            except known.ChannelPreconditionFailed as error:
                match = _CURRENT.search(_words(error))
                if match is None:
                    return None
                name, value, kind = match[1], match[2], match[3] or ""
                if name in found:
                    return None  # a value that could not be said back
                found[name] = value
                if name in {"durable", "auto_delete", "exclusive"}:
                    options[name] = value == "true"
                else:
                    arguments[name] = _typed(value, kind)
            except known.AMQPError:  # no permission to declare: then nothing is known
                return None
            else:
                return found
            finally:
                await close_quietly(channel)
        return None


async def close_quietly(resource: Any) -> None:
    """Close a channel or connection; what the client has to say about the end is of no use."""
    with contextlib.suppress(Exception):
        await resource.close()


def _typed(value: str, kind: str) -> Any:
    if kind in {"bool", "boolean"} or value in {"true", "false"}:
        return value == "true"
    return int(value) if value.lstrip("-").isdigit() and kind != "longstr" else value


def _words(error: Exception) -> str:
    """The client's or the broker's text, without credentials."""
    return redacted(str(error.args[0]) if error.args else str(error)).strip()
