"""A batch as one bulk request of documents, each with an outcome of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import msgspec

from batchqueue_async.errors import (
    AuthError,
    ConfigError,
    PermanentError,
    RetryableError,
    SinkError,
    ThrottledError,
)
from batchqueue_async.sinks._shared.payloads import verdict
from batchqueue_async.sinks._shared.records import is_table, lines, row
from batchqueue_async.sinks.base import SinkNeeds
from batchqueue_async.sinks.http.formats import Body, each
from batchqueue_async.sinks.http.sink import HttpSink
from batchqueue_async.sinks.http.status import error_for

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption
    from batchqueue_async.sinks.base import SendResult
    from batchqueue_async.sinks.http.transport import HttpAnswer, OAuth2

Operation = Literal["index", "create"]

_CONFLICT = 409
_NOT_FOUND = 404
_THROTTLED = 429
_LONGEST_ID = 512
# What an item's error may be although its status says otherwise, as the servers of several versions have it: an index
# that is closed to writes for a time (by hand, or as a disk is full) is 403 or 429, a shard that moves 503.
_LATER = {
    "cluster_block_exception",
    "no_shard_available_action_exception",
    "node_closed_exception",
    "node_disconnected_exception",
    "node_not_connected_exception",
    "primary_missing_action_exception",
    "process_cluster_event_timeout_exception",
    "unavailable_shards_exception",
}
_THROTTLING = {"circuit_breaking_exception", "es_rejected_execution_exception", "rejected_execution_exception"}
_REFUSES_US = {"security_exception", "status_exception"}
_MISSING = {"index_not_found_exception"}


@dataclass(frozen=True, kw_only=True)
class BulkBody:
    r"""The lines of a bulk request: for each record one that says where it goes, and the record itself.

    Example:
        >>> BulkBody(index="rows").encode([{"a": 1}], ["q/7"]).content
        b'{"index":{"_index":"rows","_id":"q/7"}}\n{"a":1}\n'

    Attributes:
        index: the index, alias or data stream; or a function that gives it for a record.
        id: the field with a record's id, or a function that gives it; None takes the record's key.
        operation: "index" replaces a document that is there, "create" leaves it.
    """

    index: str | Callable[[Any], str]
    id: str | Callable[[Any], Any] | None = None
    operation: Operation = "index"
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/x-ndjson"})
    compressed: bool = False

    @property
    def needs(self) -> SinkNeeds:
        """A document is replaced by the last record of its id; records with keys are documents of their own."""
        if self.id is None or self.operation == "create":
            return SinkNeeds(idempotent=True)
        return SinkNeeds(ordering="key", key=self.id_of, idempotent=True)

    def id_of(self, record: Any) -> Hashable:
        """The id of a record; those that have none share one, and are rejected."""
        try:
            return self._id(record, None)
        except PermanentError:
            return None

    def encode(self, batch: Sequence[Any], keys: Sequence[str] | None) -> Body:
        """Write the batch."""
        written: list[bytes] = []

        def take(place: int, record: Any) -> None:
            document = _document(record)
            where: dict[str, str] = {"_index": self._index(record)}
            found = self._id(record, keys[place] if keys else None)
            if found is not None:
                where["_id"] = found
            written.append(msgspec.json.encode({self.operation: where}))
            written.append(document)

        places, rejected = each(batch, take)
        return Body(b"".join([line + b"\n" for line in written]), places, rejected)

    def _index(self, record: Any) -> str:
        found: object = self.index(record) if callable(self.index) else self.index
        if not isinstance(found, str) or not found:
            raise PermanentError(f"a record's index is of type {type(found).__qualname__}, or empty; give a name")
        return found

    def _id(self, record: Any, key: str | None) -> str | None:
        if self.id is None:
            return key
        found: object = self.id(record) if callable(self.id) else _field(record, self.id)
        if isinstance(found, bool) or not isinstance(found, str | int):
            raise PermanentError(f"a record's id is of type {type(found).__qualname__}; give text or a whole number")
        text = str(found)
        if not text or len(text.encode(errors="replace")) > _LONGEST_ID:
            raise PermanentError(f"a record's id is empty, or of more than {_LONGEST_ID} bytes")
        return text


class OpenSearchSink(HttpSink):
    """Writes each record as a document, a batch in one bulk request, to OpenSearch or Elasticsearch.

    A document's id is the record's key, so that a repetition writes the same document again; or a field of the record,
    and the last record of an id wins. With `operation="create"`, which data streams demand, a document that is there is
    left alone and counted as skipped.

    Each document has its own outcome: what the mapping refuses is rejected by record, what a busy node or a blocked
    index refuses is tried again, alone. Records are mappings, structs, dataclasses, or JSON objects as bytes.

    Example:
        >>> OpenSearchSink("https://search:9200", index="orders", user="app", password="env:PASSWORD")
        OpenSearchSink('https://search:9200/_bulk', index='orders')
    """

    def __init__(
        self,
        url: str,
        *,
        index: str | Callable[[Any], str],
        id: str | Callable[[Any], Any] | None = None,  # noqa: A002 - the word that users know for it
        operation: Operation = "index",
        pipeline: str | None = None,
        headers: Mapping[str, str | Secret] | None = None,
        token: str | Secret | None = None,
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        oauth2: OAuth2 | None = None,
        compression: Literal["gzip"] | None = None,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        connections: int = 100,
        max_answer: int = 16_777_216,
        tls: TlsOption = None,
        proxy: str | Secret | None = None,
        retryable: Iterable[int] = (),
    ) -> None:
        """Say where to write.

        Args:
            url: `http://host:9200` or `https://...`, to which `/_bulk` is added.
            index: the index, alias or data stream; or a function that gives it for a record.
            id: the field with a document's id, or a function that gives it; None takes the records' keys.
            operation: "index" replaces a document with the same id, "create" leaves it as it is.
            pipeline: an ingest pipeline of the server.
            headers: more header fields; an API key of Elasticsearch is `{"Authorization": Secret("env:API_KEY")}`, with
                a value that begins with `ApiKey`.
            token: a bearer token: `env:NAME`, `file:/path` or the value; read for each request.
            user: for basic authentication.
            password: the user's password.
            oauth2: an `OAuth2` that gets bearer tokens.
            compression: "gzip" compresses the requests.
            timeout: seconds for each request.
            connect_timeout: seconds to get a connection.
            connections: how many there may be at once.
            max_answer: bytes of an answer that are read at most; a document takes up to about a hundred.
            tls: for `https`: a `Tls` with certificates; the system's certificates are trusted without.
            proxy: the URL of a proxy, or a reference to it.
            retryable: more statuses that may pass, of requests and of documents.
        """
        if not index:
            raise ConfigError("OpenSearch sink: index='' is empty; name one")
        if operation not in get_args(Operation):
            raise ConfigError(f"OpenSearch sink: operation={operation!r} is unknown; give 'index' or 'create'")
        self.index = index
        asked = "filter_path=errors,items.*.status,items.*.error.type,items.*.error.caused_by.type"
        if pipeline is not None:
            asked += f"&pipeline={pipeline}"
        super().__init__(
            f"{url.rstrip('/')}/_bulk?{asked}",
            format=BulkBody(index=index, id=id, operation=operation),
            headers=headers,
            token=token,
            user=user,
            password=password,
            oauth2=oauth2,
            compression=compression,
            timeout=timeout,
            connect_timeout=connect_timeout,
            connections=connections,
            max_answer=max_answer,
            tls=tls,
            proxy=proxy,
            retryable=retryable,
            idempotency_header=None,
            judge=self._outcomes,
        )

    def __repr__(self) -> str:
        shown = self.index if isinstance(self.index, str) else "..."
        return f"OpenSearchSink({self.shown!r}, index={shown!r})"

    def _outcomes(self, answer: HttpAnswer, count: int) -> SendResult | None:
        try:
            found = msgspec.json.decode(answer.body, type=dict[str, Any])
        except msgspec.DecodeError:
            found = {}
        if found.get("errors") is False:
            return None
        listed: object = found.get("items")
        items = cast("list[object]", listed) if isinstance(listed, list) else []
        if len(items) != count:
            raise ConfigError(f"{self.shown} answered with no list of {count} outcomes; check the URL")
        errors: dict[int, SinkError] = {}
        skipped = missing = 0
        for place, item in enumerate(items):
            outcome = _outcome(item)
            status = int(outcome.get("status") or 0)
            if "error" not in outcome:
                continue
            kind = str(outcome["error"].get("type") or "")
            if status == _CONFLICT and kind == "version_conflict_engine_exception":
                skipped += 1
                continue
            missing += kind in _MISSING
            errors[place] = self._error(status, kind, outcome["error"])
        if missing == count:
            raise ConfigError(f"{self.shown}: there is no such index, and none is made; make it, or correct the name")
        return verdict(errors, count, skipped=skipped)

    def _error(self, status: int, kind: str, error: Mapping[str, Any]) -> SinkError:
        """What a document's error means. The server's own text may quote the document, so only its names are in it."""
        inner: dict[str, Any] = error.get("caused_by") or {}
        cause = inner.get("type")
        said = f"a document was answered with {status} {kind}{f' ({cause})' if cause else ''} by {self.shown}"
        if kind in _THROTTLING or status == _THROTTLED:
            return ThrottledError(said)
        if kind in _LATER:
            return RetryableError(said, error_type="server")
        if kind in _REFUSES_US:
            return AuthError(f"{said}; check the user and its rights")
        if status == _NOT_FOUND:
            return PermanentError(said, error_type="refused")
        return error_for(status, said, statuses=self.statuses) or PermanentError(said, error_type="refused")


def _outcome(item: object) -> dict[str, Any]:
    """What is under the operation's name: `{"index": {"status": 201}}`."""
    if isinstance(item, dict):
        inner: object = next(iter(cast("dict[str, object]", item).values()), None)
        if isinstance(inner, dict):
            return cast("dict[str, Any]", inner)
    return {}


def _document(record: Any) -> bytes:
    if is_table(record):
        raise PermanentError("a record is a table of many rows; send its rows, each with an id of its own")
    if isinstance(record, bytes | bytearray | memoryview):
        (line,) = lines([record])
        # The next line would be taken for what this one says of it.
        if not line.lstrip().startswith(b"{") or not line.rstrip().endswith(b"}"):
            raise PermanentError("an encoded record is not a JSON object; send one on a line")
        return line
    (line,) = lines([dict(row(record))])
    return line


def _field(record: Any, name: str) -> object:
    if isinstance(record, bytes | bytearray | memoryview):
        try:
            found: object = msgspec.json.decode(bytes(cast("bytes", record)))
        except msgspec.DecodeError:
            raise PermanentError("an encoded record is not JSON, so that its id can't be read") from None
        return cast("dict[str, object]", found).get(name) if isinstance(found, dict) else None
    return row(record).get(name)
