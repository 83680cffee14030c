"""A batch as one INSERT into a table of ClickHouse, over HTTP, with a token by which the server tells a repetition."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from batchqueue_async.errors import ConfigError, RetryableError
from batchqueue_async.sinks.clickhouse.errors import code_of, error_for, is_of_columns, is_of_setup
from batchqueue_async.sinks.clickhouse.rows import InsertBody, quoted
from batchqueue_async.sinks.http.sink import HttpSink, PreparedRequest
from batchqueue_async.sinks.http.status import error_for as status_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from batchqueue_async.errors import SinkError
    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption
    from batchqueue_async.sinks.base import SendResult
    from batchqueue_async.sinks.http.transport import HttpAnswer, OAuth2

_MODERN = 22  # tokens, and settings in the statement
_GENERATED = {"MATERIALIZED", "ALIAS"}
# So that what does not fit is an error and not something else, and a row's number counts from the first one.
_EXACTLY = {
    "date_time_input_format": "best_effort",
    "input_format_null_as_default": 0,
    "input_format_parallel_parsing": 0,
    "input_format_skip_unknown_fields": 0,
}
_LOOKED = 60.0


class _Unprepared(NamedTuple):
    """A batch and its keys, as long as the columns are not known."""

    batch: Sequence[Any]
    keys: Sequence[str]


class ClickHouseSink(HttpSink):
    """Writes each batch by one INSERT of JSONEachRow.

    The INSERT carries a token made of the records' keys, so that a table that deduplicates (a replicated one, or one
    with `non_replicated_deduplication_window`) has a batch once however often it is sent; other tables have it at least
    once. Servers before version 22 know no tokens: there a replicated table tells a repetition by its bytes.

    The server wraps, cuts or fills up values that a column has no room for, without a word. The sink therefore looks at
    the columns, at the first batch, once a minute and after an error of columns, and refuses such records by
    themselves. The rest is written.

    Example:
        >>> ClickHouseSink("https://clickhouse:8443", "events", user="app", password="env:PASSWORD")
        ClickHouseSink('https://clickhouse:8443', table='events')
    """

    def __init__(
        self,
        url: str,
        table: str,
        *,
        database: str | None = None,
        columns: Sequence[str] | None = None,
        deduplicate: bool = True,
        settings: Mapping[str, str | float] | None = None,
        headers: Mapping[str, str | Secret] | None = None,
        token: str | Secret | None = None,
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        oauth2: OAuth2 | None = None,
        compression: Literal["gzip", "zstd"] | None = None,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        connections: int = 100,
        tls: TlsOption = None,
        proxy: str | Secret | None = None,
        retryable: Iterable[int] = (),
    ) -> None:
        """Say where to write.

        Args:
            url: `http://host:8123` or `https://...`.
            table: the table, which has to be there.
            database: its database; None is the user's.
            columns: the names of the values in records that are tuples.
            deduplicate: whether a batch with keys has a token.
            settings: more settings of each INSERT, such as `{"async_insert": 1}`.
            headers: more header fields; a `Secret` shows nowhere.
            token: a bearer token: `env:NAME`, `file:/path` or the value; read for each request.
            user: for basic authentication.
            password: the user's password.
            oauth2: an `OAuth2` that gets bearer tokens.
            compression: "gzip" or "zstd" compresses the requests.
            timeout: seconds for each request.
            connect_timeout: seconds to get a connection.
            connections: how many there may be at once.
            tls: for `https`: a `Tls` with certificates; the system's certificates are trusted without.
            proxy: the URL of a proxy, or a reference to it.
            retryable: more of ClickHouse's error codes that may pass.
        """
        if not table:
            raise ConfigError("ClickHouse sink: table='' is empty; name one")
        if settings is not None and str(settings.get("wait_for_async_insert", 1)) in {"0", "False"}:
            raise ConfigError(
                "ClickHouse sink: with wait_for_async_insert=0 the server confirms what it may still lose; leave it out"
            )
        self.table = table
        self.database = database
        self.deduplicate = deduplicate
        self._target = quoted(table) if database is None else f"{quoted(database)}.{quoted(table)}"
        self._settings = dict(settings or {})
        self._codes = frozenset(retryable)
        self._body = InsertBody(
            target=self._target,
            columns={},
            settings=self._settings,
            tokens=deduplicate,
            names=None if columns is None else tuple(columns),
        )
        self._looked: float | None = None
        self._looking: asyncio.Lock
        super().__init__(
            f"{url.rstrip('/')}/",
            format=self._body,
            headers=headers,
            token=token,
            user=user,
            password=password,
            oauth2=oauth2,
            compression=compression,
            timeout=timeout,
            connect_timeout=connect_timeout,
            connections=connections,
            tls=tls,
            proxy=proxy,
            idempotency_header=None,
            judge=self._confirmed,
            explain=self._meaning,
        )

    def __repr__(self) -> str:
        return f"ClickHouseSink({self.shown.rstrip('/')!r}, table={self.table!r})"

    async def open(self) -> None:
        """Get ready; no connection is made before the first batch."""
        self._looking = asyncio.Lock()
        self._looked = None
        await super().open()

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Write the batch by one INSERT."""
        await self._look()
        return await super().send(batch)

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult | None:
        """Write the batch by one INSERT, with a token made of the records' keys."""
        await self._look()
        return await super().send_keyed(batch, keys)

    def prepare(self, batch: Sequence[Any], keys: Sequence[str]) -> PreparedRequest | _Unprepared:  # type: ignore[override]
        """Check, encode and compress the batch in a thread, once the columns are known."""
        return super().prepare(batch, keys) if self._body.columns else _Unprepared(batch, keys)

    async def send_prepared(self, prepared: PreparedRequest | _Unprepared) -> SendResult | None:
        """Send what `prepare` made."""
        if isinstance(prepared, _Unprepared):
            return await self.send_keyed(*prepared)
        await self._look()
        return await super().send_prepared(prepared)

    # -- the table -----------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Know the columns, as they were a minute ago at most."""
        self._open_transport()
        now = asyncio.get_running_loop().time()
        if self._looked is not None and now - self._looked < _LOOKED:
            return
        async with self._looking:
            if self._looked is None or now - self._looked >= _LOOKED:
                version = (await self._ask("SELECT version()")).strip()
                found = await self._ask(f"DESCRIBE TABLE {self._target} FORMAT JSONEachRow")
                self._learn(version, [msgspec.json.decode(line) for line in found.splitlines()])
                self._looked = asyncio.get_running_loop().time()

    def _learn(self, version: str, described: Sequence[Mapping[str, str]]) -> None:
        major = version.partition(".")[0]
        modern = not major.isdecimal() or int(major) >= _MODERN
        if not modern and self._settings:
            raise ConfigError(f"{self!r}: the server is version {version}, and takes settings={self._settings} nowhere")
        columns = {each["name"]: each["type"] for each in described if each.get("default_type") not in _GENERATED}
        body = self._body
        self.format = self._body = InsertBody(
            target=body.target,
            columns=columns,
            settings={**_EXACTLY, **self._settings} if modern else {},
            tokens=self.deduplicate and modern,
            names=body.names,
        )

    async def _ask(self, query: str) -> str:
        answer = await self._open_transport().send(
            "POST", self.url, query.encode(), dict(self._body.headers), judged=True, explain=self._meaning
        )
        self._confirmed(answer, 0, nothing=False)
        return answer.body.decode(errors="replace")

    # -- answers -------------------------------------------------------------------------------------------------

    def _confirmed(self, answer: HttpAnswer, count: int, *, nothing: bool = True) -> None:  # noqa: ARG002 - a judge's
        """See that a success is one: an error that came late is in the content of an answer that began as a success."""
        text = answer.body[-4096:].decode(errors="replace")
        if "x-clickhouse-exception-code" in answer.headers or "DB::Exception" in text:
            raise self._meaning(answer) or RetryableError(f"{self!r} ended with an error", error_type="server")
        if nothing and text.strip():
            raise ConfigError(f"{self!r} was answered with something else than ClickHouse's; check the URL")

    def _meaning(self, answer: HttpAnswer) -> SinkError | None:
        text = answer.body.decode(errors="replace")
        code = code_of(answer.headers, text)
        if is_of_columns(code):
            self._looked = None
        error = error_for(code, repr(self), text, self._codes)
        if error is None and is_of_setup(code):
            raise ConfigError(f"{self!r}: code {code}; check the table, its database, its columns and the settings")
        return error if error is not None or not code else status_error(answer.status, f"{self!r}: code {code}")
