"""How to reach Redis: its address, credentials and TLS, the same words for sinks and consumers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit, urlunsplit

from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import Secret, redacted, resolve
from batchqueue_async.sinks._shared.tls import Tls

if TYPE_CHECKING:
    from batchqueue_async.sinks._shared.tls import TlsOption

GRACE = 1.0
"""Seconds that connections get to close in order."""


class RedisServer:
    """A Redis server, and what it is shown.

    Example:
        >>> RedisServer("Redis sink", "redis://:s3cret@localhost:6379/0").shown
        'redis://:***@localhost:6379/0'

    Attributes:
        url: where it is.
        shown: the same without credentials, for texts.
    """

    def __init__(
        self,
        owner: str,
        url: str,
        *,
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        tls: TlsOption = None,
    ) -> None:
        """Say where it is and who we are; `owner` begins the texts of errors."""
        scheme = urlsplit(url).scheme
        if scheme not in {"redis", "rediss", "unix"}:
            raise ConfigError(f"{owner}: a URL of scheme {scheme!r} is not supported; give redis:// or rediss://")
        if tls not in {None, False} and scheme != "rediss":
            raise ConfigError(f"{owner}: {scheme}:// is without TLS, and tls=... is given; give rediss://")
        if tls not in {None, False, True} and not isinstance(tls, Tls):
            raise ConfigError(f"{owner}: the client takes no SSL context; give tls=Tls(...)")
        self.url = url
        self.shown = redacted(url)
        self._user = None if user is None else Secret(user)
        self._password = None if password is None else Secret(password)
        self._tls = tls

    def client(self, **options: Any) -> Any:
        """A client that repeats nothing by itself; its connections are made when they are needed."""
        retrying = require("redis.asyncio.retry", "redis").Retry
        # Whoever calls repeats; the client would do so with what may have arrived.
        options["retry"] = retrying(require("redis.backoff", "redis").NoBackoff(), 0)
        options["redis_connect_func"] = _Opening().introduce
        url = self.url
        if self._user is not None or self._password is not None:
            url = self._with_credentials(options)
        if isinstance(self._tls, Tls):
            options |= _tls_options(self._tls)
        client = require("redis.asyncio", "redis").Redis.from_url(url, **options)
        client.connection_pool.connection_class = _remembering(client.connection_pool.connection_class)
        return client

    def _with_credentials(self, options: dict[str, Any]) -> str:
        """Have the client ask for the credentials at each connection; the URL without its own."""
        parts = urlsplit(self.url)
        user, password = self._user, self._password
        given_user, given_password = unquote(parts.username or ""), unquote(parts.password or "")

        class Provider(require("redis.credentials", "redis").CredentialProvider):  # type: ignore[misc]
            def get_credentials(self) -> tuple[str, ...]:
                name, secret = resolve(user) or given_user, resolve(password) or given_password
                return (name, secret) if name else (secret,)

        Provider().get_credentials()  # a reference that leads nowhere shows at the start
        options["credential_provider"] = Provider()
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))


def _remembering(kind: type[Any]) -> type[Any]:
    """The client's kind of connection, which knows those that it closes without waiting for it.

    After an error it goes on at once. A connection with TLS is open then, until the other side has said good-bye too;
    a loop that ends first has it left on its hands.
    """

    class Connection(kind):  # type: ignore[misc]  # a class that is known when the client is there
        closing: ClassVar[dict[asyncio.Task[None], asyncio.StreamWriter]] = {}

        async def disconnect(self, *arguments: Any, **options: Any) -> None:
            writer: asyncio.StreamWriter | None = getattr(self, "_writer", None)
            try:
                await kind.disconnect(self, *arguments, **options)
            finally:
                if writer is not None:
                    task = asyncio.get_running_loop().create_task(writer.wait_closed(), name="redis-connection-closing")
                    self.closing[task] = writer
                    task.add_done_callback(self._has_closed)

        @classmethod
        def _has_closed(cls, task: asyncio.Task[None]) -> None:
            del cls.closing[task]
            if not task.cancelled():
                task.exception()  # whatever a good-bye met, it is over

    return Connection


class _Opening:
    """What a client does with each new connection: introduces itself, unless the client has been closed by then.

    Closing a client ends the connections that it has. A command that was about to be sent makes a new one, which nobody
    would ever close.
    """

    def __init__(self) -> None:
        self.closed = False

    async def introduce(self, connection: Any) -> None:
        """The handshake of a connection that has just been made."""
        try:
            self._check()
            await connection.on_connect()
            self._check()
        except BaseException:  # a cancellation too: nobody else knows the connection yet
            await connection.disconnect(nowait=True)
            raise

    def _check(self) -> None:
        if self.closed:
            raise require("redis.exceptions", "redis").ConnectionError("the client is closed")


async def end(*clients: Any) -> None:
    """Close clients, and return when none of their connections is open any more; commands that still run fail.

    Those that do not close in order within a second are broken off.
    """
    for client in clients:
        client.connection_pool.connection_kwargs["redis_connect_func"].__self__.closed = True
    try:
        for client in clients:
            with contextlib.suppress(Exception):  # its connections are closed in any case, and so are the other's
                await client.aclose(close_connection_pool=True)
    finally:
        kinds = [client.connection_pool.connection_class for client in clients]
        closing = {task: writer for kind in kinds for task, writer in kind.closing.items()}
        if closing:
            try:
                await asyncio.wait(closing, timeout=GRACE)
            finally:
                for task, writer in closing.items():
                    if not task.done():
                        task.cancel()
                        writer.transport.abort()


def _tls_options(tls: Tls) -> dict[str, Any]:
    """The same, as the client has it."""
    tls.context()  # a file that can't be used shows here, and not as a connection that breaks
    return {
        "ssl_ca_certs": None if tls.ca is None else str(tls.ca),
        "ssl_certfile": None if tls.cert is None else str(tls.cert),
        "ssl_keyfile": None if tls.key is None else str(tls.key),
        "ssl_password": resolve(tls.key_password),
        "ssl_cert_reqs": "required" if tls.verify else "none",
        "ssl_check_hostname": tls.verify,
    }
