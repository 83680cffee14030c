"""One HTTP exchange as sinks make it: authenticated, answers read to a limit, errors as the sink's."""

from __future__ import annotations

import asyncio
import base64
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from batchqueue_async._support import tracing
from batchqueue_async.errors import AuthError, ConfigError, PermanentError, RetryableError, SinkError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import Secret, header_value, redacted, resolve
from batchqueue_async.sinks._shared.tls import context
from batchqueue_async.sinks.http.status import Statuses, error_for, retry_after

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from batchqueue_async.sinks._shared.tls import TlsOption

_DRAINED = 65_536
_MULTI_STATUS = 207
_INFLATED = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_EARLY = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A successful answer, for whoever judges what it says of single records.

    Attributes:
        status: the status, 200 to 299.
        headers: the header fields, by their names in lower case.
        body: the content, without any compression.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuth2:
    """Credentials for which a server of tokens gives a bearer token, as OAuth 2.0 has it for clients without a user.

    The token is asked for at the first request, and again before it expires or when it is refused.

    Example:
        >>> OAuth2(url="https://id.example/token", client_id="exporter", client_secret="env:CLIENT_SECRET").scope

    Attributes:
        url: where tokens are given.
        client_id: who asks.
        client_secret: `env:NAME`, `file:/path` or the value.
        scope: what is asked for, with spaces in between; None asks for the client's usual rights.
        parameters: more fields of the request, such as `audience`.
    """

    url: str
    client_id: str
    client_secret: str | Secret
    scope: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        object.__setattr__(self, "client_secret", Secret(self.client_secret))  # a dataclass shows its fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """How a request says who sends it; one of these at most."""

    token: Secret | None = None
    user: Secret | None = None
    password: Secret | None = None
    oauth2: OAuth2 | None = None


class Transport:
    """The connections of one sink. Made when the sink is opened."""

    def __init__(
        self,
        *,
        where: str,
        credentials: Credentials,
        headers: Mapping[str, str | Secret],
        timeout: float,
        connect_timeout: float,
        connections: int,
        keepalive: float,
        max_answer: int,
        tls: TlsOption,
        proxy: str | Secret | None,
        statuses: Statuses,
    ) -> None:
        self._http = require("aiohttp", "http")
        ssl_context: ssl.SSLContext | bool | None = True if tls is None else context(tls)
        self._where = where
        self._credentials = credentials
        self._headers = headers
        self._limits = f"timeout={timeout}, connect_timeout={connect_timeout}"
        self._max_answer = max_answer
        self._proxy = None if proxy is None else Secret(proxy)
        self._statuses = statuses
        self._bearer: tuple[str, float] | None = None
        self._asking = asyncio.Lock()
        self._session: Any = self._http.ClientSession(
            connector=self._http.TCPConnector(limit=connections, ssl=ssl_context or True, keepalive_timeout=keepalive),
            timeout=self._http.ClientTimeout(total=timeout, connect=connect_timeout, sock_connect=connect_timeout),
            cookie_jar=self._http.DummyCookieJar(),
            # An answer is inflated here, to a limit, where a server compresses it in spite of this.
            headers={"User-Agent": "batchqueue_async", "Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def send(
        self,
        method: str,
        url: str,
        content: bytes,
        headers: Mapping[str, str],
        *,
        judged: bool,
        explain: Callable[[HttpAnswer], SinkError | None] | None = None,
    ) -> HttpAnswer:
        """Make a request, and return its answer if that is a success; its content is read if it is judged.

        `explain` says what a failure means by the beginning of its content; None leaves it to the status.

        Raises:
            SinkError: it is none, or none came.
        """
        fields = tracing.headers((*headers, *self._headers)) | dict(headers)
        fields |= {
            name: header_value(name, resolve(value) if isinstance(value, Secret) else value)
            for name, value in self._headers.items()
        }
        await self._authorize(fields)
        answer = await self._exchange(method, url, content, fields, read=judged, explained=explain is not None)
        success = 200 <= answer.status < 300  # noqa: PLR2004 - HTTP's successes
        failure = None if explain is None or success else explain(answer)
        failure = failure or error_for(
            answer.status,
            f"{method} to {self._where}",
            wait=retry_after(answer.headers.get("retry-after"), time.time()),
            statuses=self._statuses,
        )
        if failure is not None:
            if isinstance(failure, AuthError):
                self._bearer = None
            raise failure
        return answer

    async def _exchange(
        self,
        method: str,
        url: str,
        content: bytes,
        headers: Mapping[str, str],
        *,
        read: bool,
        explained: bool = False,
        where: str | None = None,
    ) -> HttpAnswer:
        what = f"{method} to {where or self._where}"
        proxy = None if self._proxy is None else self._proxy.reveal()
        try:
            async with self._session.request(
                method, url, data=content, headers=headers, allow_redirects=False, proxy=proxy
            ) as response:
                status: int = response.status
                answered = {name.lower(): value for name, value in response.headers.items()}
                success = 200 <= status < 300  # noqa: PLR2004 - HTTP's successes
                read = success and (read or status == _MULTI_STATUS)
                body = await self._read(response, answered, what) if read else b""
                if explained and not success:
                    body = await response.content.read(_DRAINED)
                if not body or not success:
                    await self._drain(response)
        except TimeoutError:
            raise RetryableError(f"{what} took too long ({self._limits})", error_type="timeout") from None
        except self._http.ClientProxyConnectionError as error:
            at = "" if proxy is None else f" through {redacted(proxy)}"
            raise RetryableError(f"{what}{at} broke: {type(error).__name__}", error_type="network") from None
        except (self._http.ClientError, OSError) as error:
            # The client's errors quote the URL, whose query may hold a secret.
            kind = "refused" if _is_refusal(error) else "network"
            raise RetryableError(f"{what} broke: {type(error).__name__}{_reason(error)}", error_type=kind) from None
        return HttpAnswer(status=status, headers=answered, body=body)

    async def _read(self, response: Any, headers: Mapping[str, str], what: str) -> bytes:
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity" and encoding not in _INFLATED:
            raise PermanentError(f"{what} was answered in the encoding {encoding!r}, which was not asked for")
        inflating = None if encoding == "identity" else zlib.decompressobj(_INFLATED[encoding])
        found = bytearray()
        async for piece in response.content.iter_chunked(_DRAINED):
            try:
                found += piece if inflating is None else inflating.decompress(piece, self._max_answer + 1 - len(found))
            except zlib.error:
                raise PermanentError(f"{what} was answered with content that can't be inflated") from None
            if len(found) > self._max_answer:
                response.close()
                raise PermanentError(
                    f"{what} was answered with more than max_answer={self._max_answer} bytes; raise it, or have the "
                    "server say less",
                    error_type="too_large",
                )
        return bytes(found)

    @staticmethod
    async def _drain(response: Any) -> None:
        """Read what is left of a short answer, so that its connection can be used again; a long one is cut off."""
        left = _DRAINED
        async for piece in response.content.iter_chunked(_DRAINED):
            left -= len(piece)
            if left < 0:
                response.close()
                return

    # -- who we are ----------------------------------------------------------------------------------------------

    async def _authorize(self, headers: dict[str, str]) -> None:
        who = self._credentials
        if who.token is not None:
            headers["Authorization"] = header_value("Authorization", f"Bearer {who.token.reveal()}")
        elif who.user is not None and who.password is not None:
            pair = f"{who.user.reveal()}:{who.password.reveal()}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        elif who.oauth2 is not None:
            headers["Authorization"] = f"Bearer {await self._token(who.oauth2)}"

    async def _token(self, who: OAuth2) -> str:
        loop = asyncio.get_running_loop()
        async with self._asking:  # many sends at once ask once
            if self._bearer is None or self._bearer[1] <= loop.time():
                token, seconds = await self._ask_token(who)
                self._bearer = token, loop.time() + max(0.0, seconds - min(_EARLY, seconds / 2))
            return self._bearer[0]

    async def _ask_token(self, who: OAuth2) -> tuple[str, float]:
        where = redacted(who.url.partition("?")[0])
        form = self._http.FormData({"grant_type": "client_credentials", **who.parameters})
        if who.scope is not None:
            form.add_field("scope", who.scope)
        pair = f"{who.client_id}:{Secret(who.client_secret).reveal()}".encode()
        headers = {
            "Authorization": f"Basic {base64.b64encode(pair).decode()}",
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        }
        answer = await self._exchange("POST", who.url, form(), headers, read=True, where=where)
        failure = error_for(answer.status, f"POST to {where}", statuses=Statuses())
        if isinstance(failure, PermanentError):  # 400 is what it says of a wrong client or scope
            raise AuthError(f"{failure}; check the client's id, secret and scope")
        if failure is not None:
            raise failure
        try:
            found = msgspec.json.decode(answer.body, type=dict[str, Any])
            token, seconds = str(found["access_token"]), float(found.get("expires_in") or 300.0)
        except (msgspec.DecodeError, KeyError, ValueError, TypeError):
            raise ConfigError(f"{where} gives no tokens as OAuth 2.0 has them; check the URL") from None
        return header_value("Authorization", token), seconds


def _is_refusal(error: BaseException) -> bool:
    inner = error if isinstance(error, OSError) else error.__cause__
    return isinstance(inner, ConnectionRefusedError) or getattr(error, "errno", None) == 111  # noqa: PLR2004


def _reason(error: BaseException) -> str:
    inner = error if isinstance(error, OSError) else error.__cause__
    return f" ({inner.strerror})" if isinstance(inner, OSError) and inner.strerror else ""
