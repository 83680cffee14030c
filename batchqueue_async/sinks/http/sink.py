"""Batches over HTTP: a request a batch, as JSON, NDJSON, Prometheus remote write or Loki push. Needs `[http]`."""

from __future__ import annotations

import asyncio
import gzip
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args
from urllib.parse import urlsplit

import msgspec

from batchqueue_async.errors import ConfigError, PermanentError, SinkError
from batchqueue_async.sinks._shared.batch_key import batch_key
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import Secret
from batchqueue_async.sinks.base import SendResult, SinkNeeds
from batchqueue_async.sinks.http.formats import Format, JsonArray, JsonLines, LokiPush
from batchqueue_async.sinks.http.remote_write import RemoteWrite
from batchqueue_async.sinks.http.status import Statuses, error_for
from batchqueue_async.sinks.http.transport import Credentials, HttpAnswer, OAuth2, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from batchqueue_async.sinks._shared.tls import TlsOption

Compression = Literal["gzip", "zstd"]
FormatName = Literal["json", "ndjson", "remote_write", "loki"]

_FORMATS: dict[str, Callable[[], Format]] = {
    "json": JsonArray,
    "ndjson": JsonLines,
    "remote_write": RemoteWrite,
    "loki": LokiPush,
}
_MULTI_STATUS = 207
_OFF_LOOP = 32_768  # bytes from which compressing would hold up the loop for a noticeable time


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


class PreparedRequest(NamedTuple):
    """A batch that is encoded and compressed.

    Attributes:
        content: the bytes of the request.
        headers: its own header fields.
        places: which records of the batch are in it.
        rejected: the others, by their places, each with its reason.
    """

    content: bytes
    headers: Mapping[str, str]
    places: Sequence[int]
    rejected: Mapping[int, SinkError]


class HttpSink:
    """Sends each batch in one request; delivers at least once.

    The request carries an `Idempotency-Key`, for servers that know what to do with it; a repetition is the same
    request, byte for byte. 408, 425, 429, all of 5xx, broken connections and timeouts are worth another try (with the
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
        oauth2: OAuth2 | None = None,
        compression: Compression | None = None,
        timeout: float = 10.0,
        connect_timeout: float = 5.0,
        connections: int = 100,
        keepalive: float = 15.0,
        max_answer: int = 1_048_576,
        tls: TlsOption = None,
        proxy: str | Secret | None = None,
        retryable: Iterable[int] = (),
        final: Iterable[int] = (),
        idempotency_header: str | None = "Idempotency-Key",
        judge: Callable[[HttpAnswer, int], SendResult | None] | None = None,
        explain: Callable[[HttpAnswer], SinkError | None] | None = None,
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
            oauth2: an `OAuth2` that gets bearer tokens, instead of a token.
            compression: "gzip" or "zstd" compresses the body, off the loop when it is large; remote write compresses as
                it must.
            timeout: seconds for the whole exchange.
            connect_timeout: seconds to get a connection.
            connections: how many there may be at once.
            keepalive: seconds that an idle connection is kept; below those of the server or of what is in between.
            max_answer: bytes of an answer that are read at most, inflated; what is not judged is not read.
            tls: for `https`: None or True verifies against the system's certificates; a `Tls` or an SSL context else.
            proxy: `http://user:password@host:port` of a proxy, or a reference to it: `env:NAME`, `file:/path`.
            retryable: more statuses that may pass, such as 404 while a service is rolled out.
            final: statuses that never pass, such as 500 from a server that says so of bad records.
            idempotency_header: the header field for the batch's key; None sends none. Remote write and Loki know none.
            judge: what a successful answer says of the records, by their places among those that were sent; returns
                None where all are in, and may raise a `SinkError`.
            explain: what an answer that is no success means, from its header fields and the first bytes of its content;
                None leaves it to the status. `culprits` are places among the records that were sent.
        """
        parts = _checked(url)
        _positive(
            timeout=timeout,
            connect_timeout=connect_timeout,
            connections=connections,
            keepalive=keepalive,
            max_answer=max_answer,
        )
        if compression not in {None, *get_args(Compression)}:
            raise ConfigError(f"HTTP sink: compression={compression!r} is unknown; give 'gzip', 'zstd' or None")
        given = [name for name, each in (("token", token), ("user", user), ("oauth2", oauth2)) if each is not None]
        if len(given) > 1:
            raise ConfigError(f"HTTP sink: both {given[0]} and {given[1]} are given; give one of them")
        if (user is None) != (password is None):
            raise ConfigError("HTTP sink: user and password belong together; give both")
        self.url = url
        self.format: Format = _format(format)
        self.method = method
        self.compression: Compression | None = compression
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.connections = connections
        self.idempotency_header = idempotency_header
        self._name = format if isinstance(format, str) else type(format).__name__
        host = parts.hostname or ""
        at = f"[{host}]" if ":" in host else host
        self.shown = f"{parts.scheme}://{at}{f':{parts.port}' if parts.port else ''}{parts.path}"
        self._headers = dict(headers or {})
        self._credentials = Credentials(
            token=None if token is None else Secret(token),
            user=None if user is None else Secret(user),
            password=None if password is None else Secret(password),
            oauth2=oauth2,
        )
        self.keepalive = keepalive
        self.max_answer = max_answer
        self.statuses = Statuses(retryable=frozenset(retryable), final=frozenset(final))
        self._tls = tls
        self._proxy = None if proxy is None else Secret(proxy)
        self._judge = judge
        self._explain = explain
        self._transport: Transport | None = None
        self.needs = self._needs()

    def _needs(self) -> SinkNeeds:
        """What the format needs; a key that stands for a whole batch needs the same batch."""
        of_format = getattr(self.format, "needs", None)
        if isinstance(of_format, SinkNeeds):
            return of_format
        return SinkNeeds(same_bytes=self.idempotency_header is not None)

    def __repr__(self) -> str:
        return f"HttpSink({self.shown!r}, format={self._name!r})"

    async def open(self) -> None:
        """Get ready; no connection is made before the first batch."""
        if self._transport is None:
            self._transport = Transport(
                where=self.shown,
                credentials=self._credentials,
                headers=self._headers,
                timeout=self.timeout,
                connect_timeout=self.connect_timeout,
                connections=self.connections,
                keepalive=self.keepalive,
                max_answer=self.max_answer,
                tls=self._tls,
                proxy=self._proxy,
                statuses=self.statuses,
            )

    async def close(self) -> None:
        """Close the connections."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Send the batch in one request."""
        return await self._send(batch, None)

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult | None:
        """Send the batch in one request, with a key made of the records' keys."""
        return await self._send(batch, keys)

    def prepare(self, batch: Sequence[Any], keys: Sequence[str]) -> PreparedRequest:
        """Encode and compress the batch; in a thread, where the exporter splits its pipeline."""
        request = self._encoded(batch, keys)
        how = self._compression_of(request)
        return request if how is None else request._replace(content=_COMPRESS[how](request.content))

    async def send_prepared(self, prepared: PreparedRequest) -> SendResult | None:
        """Send what `prepare` made."""
        return await self._exchange(prepared)

    async def _send(self, batch: Sequence[Any], keys: Sequence[str] | None) -> SendResult | None:
        self._open_transport()
        request = self._encoded(batch, keys)
        how = self._compression_of(request)
        if how is not None:
            request = request._replace(content=await _compressed(request.content, how))
        return await self._exchange(request)

    def _encoded(self, batch: Sequence[Any], keys: Sequence[str] | None) -> PreparedRequest:
        """The batch as a request, before its compression; touches nothing that sends do."""
        body = self.format.encode(batch, keys)
        headers = dict(self.format.headers)
        if keys and self.idempotency_header is not None and not hasattr(self.format, "needs"):
            headers[self.idempotency_header] = batch_key([keys[place] for place in body.places])
        if self.compression is not None and not self.format.compressed:
            headers["Content-Encoding"] = self.compression
        return PreparedRequest(body.content, headers, body.places, body.rejected)

    def _compression_of(self, request: PreparedRequest) -> Compression | None:
        return None if self.format.compressed or not request.places else self.compression

    async def _exchange(self, request: PreparedRequest) -> SendResult | None:
        transport = self._open_transport()
        if not request.places:
            return SendResult(rejected=request.rejected) if request.rejected else None
        # What is not judged is of no interest, whatever its size; 207 always says something of records.
        answer = await transport.send(
            self.method,
            self.url,
            request.content,
            request.headers,
            judged=self._judge is not None,
            explain=None if self._explain is None else partial(self._explained, request),
        )
        return _whole(self._judged(answer, len(request.places)), request)

    def _explained(self, request: PreparedRequest, answer: HttpAnswer) -> SinkError | None:
        """What a failure's content means, with the records that it names by their places in the batch."""
        error = None if self._explain is None else self._explain(answer)
        if error is not None and error.culprits:
            error.culprits = tuple(request.places[at] for at in error.culprits if 0 <= at < len(request.places))
        return error

    def _open_transport(self) -> Transport:
        if self._transport is None:
            raise RuntimeError(f"HTTP sink {self.shown!r} is not open; call open() first")
        return self._transport

    def _judged(self, answer: HttpAnswer, count: int) -> SendResult | None:
        if self._judge is not None:
            return self._judge(answer, count)
        return item_statuses(answer, count) if answer.status == _MULTI_STATUS else None


async def _compressed(content: bytes, how: Compression) -> bytes:
    compress = _COMPRESS[how]
    if len(content) < _OFF_LOOP:
        return compress(content)
    return await asyncio.to_thread(compress, content)


def _compress_gzip(content: bytes) -> bytes:
    return gzip.compress(content, 5, mtime=0)


def _compress_zstd(content: bytes) -> bytes:
    return bytes(require("cramjam", "http").zstd.compress(content, 3))


_COMPRESS: dict[Compression, Callable[[bytes], bytes]] = {"gzip": _compress_gzip, "zstd": _compress_zstd}


def _whole(result: SendResult | None, body: PreparedRequest) -> SendResult | None:
    """A result by the places in the batch, with what was rejected before the request."""
    if result is None or not result.rejected:
        if not body.rejected:
            return result
        return SendResult(rejected=body.rejected, skipped=0 if result is None else result.skipped)
    answered = {body.places[place]: error for place, error in result.rejected.items()}
    return SendResult(rejected={**body.rejected, **answered}, skipped=result.skipped)


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
