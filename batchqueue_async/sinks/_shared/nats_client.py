"""How to reach NATS: servers, credentials and TLS, the same words for sinks and consumers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import Secret, redacted, resolve
from batchqueue_async.sinks._shared.tls import context

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from batchqueue_async.sinks._shared.tls import TlsOption


class NatsServers:
    """The servers of a NATS system, and what they are shown.

    Example:
        >>> NatsServers("NATS sink", "nats://shop:s3cret@localhost:4222").shown
        'nats://shop:***@localhost:4222'

    Attributes:
        urls: where they are.
        shown: the same without credentials, for texts.
        connect_timeout: seconds to connect.
    """

    def __init__(
        self,
        owner: str,
        url: str | Sequence[str],
        *,
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        token: str | Secret | None = None,
        credentials: str | os.PathLike[str] | None = None,
        tls: TlsOption = None,
        connect_timeout: float = 5.0,
    ) -> None:
        """Say where they are and who we are; `owner` begins the texts of errors."""
        self.urls = [url] if isinstance(url, str) else list(url)
        for each in self.urls:
            scheme = urlsplit(each).scheme
            if scheme not in {"nats", "tls", "ws", "wss"}:
                raise ConfigError(f"{owner}: a URL of scheme {scheme!r} is not supported; give nats:// or tls://")
        if not self.urls:
            raise ConfigError(f"{owner}: there is no URL; give one at least")
        self.shown = ", ".join(map(redacted, self.urls))
        self.connect_timeout = connect_timeout
        self._login = {
            name: Secret(value)
            for name, value in (("user", user), ("password", password), ("token", token))
            if value is not None
        }
        self._credentials = credentials
        self._tls = tls

    async def connect(self, **options: Any) -> Any:
        """A client with one connection, which does not connect again by itself; `options` are more of the client's."""
        found: dict[str, Any] = {name: resolve(value) for name, value in self._login.items()}
        if self._credentials is not None:
            found["user_credentials"] = _readable(self._credentials)
        if (tls := context(self._tls)) is not None:
            found["tls"] = tls
        client = require("nats", "nats").NATS()
        options.setdefault("error_cb", ignore)
        try:
            await client.connect(
                servers=self.urls,
                allow_reconnect=False,
                max_reconnect_attempts=1,  # how often a server is tried before the next; 0 tries for ever
                reconnect_time_wait=0.0,
                connect_timeout=max(1, round(self.connect_timeout)),
                **found,
                **options,
            )
        except BaseException:  # a refused or cancelled one too would leave its connection behind
            await client.close()
            raise
        return client


def _readable(path: str | os.PathLike[str]) -> str:
    """The path of a file that can be read."""
    try:
        with Path(path).open("rb"):
            return str(path)
    except OSError as error:
        raise ConfigError(f"NATS: the credentials {str(path)!r} cannot be read: {error.strerror}") from None


async def ignore(_error: Exception) -> None:
    """The client would log what its caller raises."""
