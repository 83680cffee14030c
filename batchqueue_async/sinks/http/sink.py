"""Batches over HTTP: a request a batch, as JSON, NDJSON, Prometheus remote write or Loki push. Needs `[http]`."""

from __future__ import annotations

import asyncio
import base64
import gzip
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args
from urllib.parse import urlsplit

import msgspec

from batchqueue_async.errors import ConfigError, PermanentError, RetryableError, SinkError
from batchqueue_async.sinks._shared.batch_key import batch_key
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import Secret, resolve
from batchqueue_async.sinks._shared.tls import context
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.sinks.http.formats import Format, JsonArray, JsonLines, LokiPush
from batchqueue_async.sinks.http.remote_write import RemoteWrite
from batchqueue_async.sinks.http.status import error_for, retry_after

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from batchqueue_async.sinks._shared.tls import TlsOption
    from batchqueue_async.sinks.http.formats import Body

FormatName = Literal["json", "ndjson", "remote_write", "loki"]

_FORMATS: dict[str, Callable[[], Format]] = {
    "json": JsonArray,
    "ndjson": JsonLines,
    "remote_write": RemoteWrite,
    "loki": LokiPush,
}
_MULTI_STATUS = 207
_OFF_LOOP = 32_768  # bytes from which compressing would hold up the loop for a noticeable time


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A successful answer, for whoever judges what it says of single records.

    Attributes:
        status: the status, 200 to 299.
        headers: the header fields, by their names in lower case.
        body: the content.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


def item_statuses(answer: HttpAnswer, count: int) -> SendResult | None:
    """Judge an answer in JSON that has a status for each record: a list, or an object whose `items` is one.

    Each item is an object with a `status`, or an object whose only value is such, as bulk interfaces write
    `{"index": {"status": 201}}`. Statuses below 400 are successes.

    Example:
        >>> answer = HttpAnswer(status=207, headers={}, body=b'[{"status": 201}, {"status": 400}]')
        >>> item_statuses(answer, 2).rejected
        {1: PermanentError('record 1 was answered with 400 Bad Request')}
    """
    try:
        found: Any = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        found = None
    listed: Any = cast("dict[str, Any]", found).get("items") if isinstance(found, dict) else found
    items = cast("list[object]", listed) if isinstance(listed, list) else []
    if len(items) != count:
        raise PermanentError(f"an answer of status {answer.status} is no list of {count} statuses in JSON")
    rejected: dict[int, SinkError] = {}
    for place, item in enumerate(items):
        error = error_for(_status(item), f"record {place}")
        if error is not None:
            rejected[place] = error
    return SendResult(rejected=rejected) if rejected else None


def _status(item: object) -> int:
    if isinstance(item, dict):
        fields = cast("dict[str, Any]", item)
        if "status" not in fields and len(fields) == 1:
            return _status(next(iter(fields.values())))
        status = fields.get("status")
        if isinstance(status, int):
            return status
    raise PermanentError("an item of an answer has no status")


class HttpSink:
    """Sends each batch in one request; delivers at least once.

    The request carries an `Idempotency-Key`, the same whenever the same records are sent again, for servers that know
    what to do with it. 408, 425, 429, all of 5xx, broken connections and timeouts are worth another try (with the
    server's `Retry-After`); 401 and 403 are credentials; 413 is too large; any other status is final, redirects too,
    which are not followed. 207 is read as `item_statuses` says.

    Example:
        >>> HttpSink("https://user@host:8080/v1/rows?token=abc", format="ndjson", token="env:TOKEN")
        HttpSink('https://host:8080/v1/rows', format='ndjson')
    """

    concurrent = True

    def __init__(
        self,
        url: str,
        *,
        format: FormatName | Format = "json",  # noqa: A002 - the word that users know for it
        method: str = "POST",
        headers: Mapping[str, str | Secret] | None = None,
        token: str | Secret | None = None,
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        compression: Literal["gzip"] | None = None,
        timeout: float = 10.0,
        connect_timeout: float = 5.0,
        connections: int = 100,
        tls: TlsOption = None,
        idempotency_header: str | None = "Idempotency-Key",
        judge: Callable[[HttpAnswer, int], SendResult | None] | None = None,
    ) -> None:
        """Say where to send, and how.

        Args:
            url: the whole URL, `http` or `https`.
            format: "json" (an array), "ndjson", "remote_write", "loki", or an object of `sinks.http_formats`, which has
                options of its own.
            method: the request's method.
            headers: more header fields; a `Secret` shows nowhere.
            token: a bearer token: `env:NAME`, `file:/path` or the value; read for each request.
            user: for basic authentication, instead of a token.
            password: the user's password.
            compression: "gzip" compresses the body, off the loop when it is large; remote write compresses as it must.
            timeout: seconds for the whole exchange.
            connect_timeout: seconds to get a connection.
            connections: how many there may be at once.
            tls: for `https`: None or True verifies against the system's certificates; a `Tls` or an SSL context else.
            idempotency_header: the header field for the batch's key; None sends none.
            judge: what a successful answer says of the records, by their places among those that were sent; returns
                None where all are in, and may raise a `SinkError`.
        """
        parts = _checked(url)
        _positive(timeout=timeout, connect_timeout=connect_timeout, connections=connections)
        if compression not in {None, "gzip"}:
            raise ConfigError(f"HTTP sink: compression={compression!r} is unknown; give 'gzip' or None")
        if token is not None and user is not None:
            raise ConfigError("HTTP sink: both token and user are given; give one of them")
        if (user is None) != (password is None):
            raise ConfigError("HTTP sink: user and password belong together; give both")
        self.url = url
        self.format: Format = _format(format)
        self.method = method
        self.compression = compression
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.connections = connections
        self.idempotency_header = idempotency_header
        self._name = format if isinstance(format, str) else type(format).__name__
        host = parts.hostname or ""
        at = f"[{host}]" if ":" in host else host
        self._shown = f"{parts.scheme}://{at}{f':{parts.port}' if parts.port else ''}{parts.path}"
        self._what = f"{method} to {self._shown}"
        self._headers = dict(headers or {})
        self._token = None if token is None else Secret(token)
        self._user = None if user is None else Secret(user)
        self._password = None if password is None else Secret(password)
        self._tls = tls
        self._judge = judge
        self._session: Any = None

    def __repr__(self) -> str:
        return f"HttpSink({self._shown!r}, format={self._name!r})"

    async def open(self) -> None:
        """Get ready; no connection is made before the first batch."""
        if self._session is not None:
            return
        http = require("aiohttp", "http")
        ssl_context: ssl.SSLContext | bool | None = True if self._tls is None else context(self._tls)
        self._session = http.ClientSession(
            connector=http.TCPConnector(limit=self.connections, ssl=ssl_context or True),
            timeout=http.ClientTimeout(
                total=self.timeout, connect=self.connect_timeout, sock_connect=self.connect_timeout
            ),
            cookie_jar=http.DummyCookieJar(),
            headers={"User-Agent": "batchqueue_async"},
        )

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Send the batch in one request."""
        return await self._send(batch, None)

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult | None:
        """Send the batch in one request, with a key made of the records' keys."""
        return await self._send(batch, keys)

    async def _send(self, batch: Sequence[Any], keys: Sequence[str] | None) -> SendResult | None:
        if self._session is None:
            raise RuntimeError(f"HTTP sink {self._shown!r} is not open; call open() first")
        body = self.format.encode(batch, keys)
        if not body.places:
            return SendResult(rejected=body.rejected) if body.rejected else None
        headers = self._request_headers(body, keys)
        content = body.content
        if self.compression == "gzip" and not self.format.compressed:
            content = await _gzipped(content)
            headers["Content-Encoding"] = "gzip"
        result = await self._exchange(content, headers, len(body.places))
        return _whole(result, body)

    async def _exchange(self, content: bytes, headers: dict[str, str], count: int) -> SendResult | None:
        http = require("aiohttp", "http")
        try:
            async with self._session.request(
                self.method, self.url, data=content, headers=headers, allow_redirects=False
            ) as response:
                status: int = response.status
                answered: Mapping[str, str] = {name.lower(): value for name, value in response.headers.items()}
                received: bytes = await response.read()
        except TimeoutError:
            limits = f"timeout={self.timeout}, connect_timeout={self.connect_timeout}"
            raise RetryableError(f"{self._what} took too long ({limits})") from None
        except (http.ClientError, OSError) as error:
            # The client's errors quote the URL, whose query may hold a secret.
            raise RetryableError(f"{self._what} broke: {type(error).__name__}{_reason(error)}") from None
        failure = error_for(status, self._what, wait=retry_after(answered.get("retry-after"), time.time()))
        if failure is not None:
            raise failure
        answer = HttpAnswer(status=status, headers=answered, body=received)
        if self._judge is not None:
            return self._judge(answer, count)
        return item_statuses(answer, count) if status == _MULTI_STATUS else None

    def _request_headers(self, body: Body, keys: Sequence[str] | None) -> dict[str, str]:
        headers = dict(self.format.headers)
        headers |= {
            name: resolve(value) if isinstance(value, Secret) else value for name, value in self._headers.items()
        }
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.reveal()}"
        elif self._user is not None and self._password is not None:
            pair = f"{self._user.reveal()}:{self._password.reveal()}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        if keys is not None and self.idempotency_header is not None:
            headers[self.idempotency_header] = batch_key([keys[place] for place in body.places])
        return headers


async def _gzipped(content: bytes) -> bytes:
    if len(content) < _OFF_LOOP:
        return gzip.compress(content, 5, mtime=0)
    return await asyncio.to_thread(gzip.compress, content, 5, mtime=0)


def _whole(result: SendResult | None, body: Body) -> SendResult | None:
    """A result by the places in the batch, with what was rejected before the request."""
    if result is None or not result.rejected:
        if not body.rejected:
            return result
        return SendResult(rejected=body.rejected, skipped=0 if result is None else result.skipped)
    answered = {body.places[place]: error for place, error in result.rejected.items()}
    return SendResult(rejected=body.rejected | answered, skipped=result.skipped)


def _reason(error: BaseException) -> str:
    inner = error if isinstance(error, OSError) else error.__cause__
    return f" ({inner.strerror})" if isinstance(inner, OSError) and inner.strerror else ""


def _checked(url: str) -> Any:
    try:
        parts = urlsplit(url)
        port_is_a_number = parts.port is None or parts.port > 0
    except ValueError:
        raise ConfigError("HTTP sink: the URL can't be read; give http://host:port/path or https://...") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_is_a_number:
        raise ConfigError(f"HTTP sink: a URL of scheme {parts.scheme!r} is none of ours; give http:// or https://")
    if parts.password is not None:
        raise ConfigError("HTTP sink: the URL holds a password; give user=... and password='env:NAME' instead")
    return parts


def _format(given: FormatName | Format) -> Format:
    if not isinstance(given, str):
        return given
    if given not in _FORMATS:
        raise ConfigError(f"HTTP sink: format={given!r} is unknown; give one of {', '.join(get_args(FormatName))}")
    return _FORMATS[given]()


def _positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"HTTP sink: {name}={value} is not above 0; give a number above it")
