"""The OpenSearch sink against a real server: what arrives, and what each document's outcome means."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

import msgspec
import pytest
from outage_kit import outage, until

import batchqueue_async as bq
from batchqueue_async.sinks.base import KeyedSink, needs_of
from batchqueue_async.sinks.http.transport import HttpAnswer
from batchqueue_async.sinks.opensearch import OpenSearchSink
from batchqueue_async.sinks.opensearch.sink import BulkBody
from batchqueue_async.testing import FaultProxy

_names = itertools.count()


@dataclass
class Order:
    id: int
    name: str


@pytest.fixture
def index():
    return f"orders{next(_names)}"


@contextlib.asynccontextmanager
async def opened(sink):
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


def answer(*items, errors=True):
    body = msgspec.json.encode({"errors": errors, "items": [{"index": item} for item in items]})
    return HttpAnswer(status=200, headers={}, body=body)


def failed(status, kind, cause=None):
    error = {"type": kind} | ({"caused_by": {"type": cause}} if cause else {})
    return {"status": status, "error": error}


# --- pure parts


def test_records_are_lines_that_no_other_line_can_be_taken_for():
    batch = [{"a": 1}, Order(2, "x"), b'{"a": 3}', "text", b"[1]", b"", b'"x"', object(), {"f": float("nan")}]
    body = BulkBody(index="i").encode(batch, [f"q/{at}" for at in range(len(batch))])
    assert (list(body.places), sorted(body.rejected)) == ([0, 1, 2, 3], [4, 5, 6, 7, 8])
    lines = [json.loads(line) for line in body.content.splitlines()]
    assert lines[::2] == [{"index": {"_index": "i", "_id": f"q/{at}"}} for at in range(4)]
    assert lines[1::2] == [{"a": 1}, {"id": 2, "name": "x"}, {"a": 3}, {"value": "text"}]


def test_odd_values_are_written_as_they_are_or_refused():
    pa = pytest.importorskip("pyarrow")
    when = datetime(2024, 2, 29, tzinfo=UTC)
    batch = [
        {"n": 2**70, "d": Decimal("0.10"), "t": when, "none": None, "deep": [None, {"a": None}]},
        {"s": "\ud800"},
        pa.RecordBatch.from_pydict({"a": [1, 2]}),
        {"b": b"\xff\x00"},
    ]
    body = BulkBody(index="i").encode(batch, None)
    assert sorted(body.rejected) == [1, 2]
    first, last = (json.loads(line) for line in body.content.splitlines()[1::2])
    assert first == {"n": 2**70, "d": "0.10", "t": "2024-02-29T00:00:00Z", "none": None, "deep": [None, {"a": None}]}
    assert last == {"b": "/wA="}


def test_ids_and_indexes_from_the_record():
    body = BulkBody(index=lambda record: record["at"], id="id", operation="create")
    batch = [
        {"id": 1, "at": "a"},
        {"at": "a"},
        {"id": True, "at": "a"},
        {"id": "x" * 513, "at": "a"},
        {"id": 2, "at": ""},
    ]
    found = body.encode(batch, ["k"] * 5)
    assert (list(found.places), json.loads(found.content.splitlines()[0])) == (
        [0],
        {"create": {"_index": "a", "_id": "1"}},
    )
    assert BulkBody(index="i", id="id").encode([b'{"id": 5}', b"{no}"], None).places == [0]


def test_what_it_needs():
    by_key, by_field = OpenSearchSink("http://h", index="i"), OpenSearchSink("http://h", index="i", id="n")
    assert isinstance(by_key, KeyedSink)
    assert (needs_of(by_key).ordering, needs_of(by_key).idempotent, needs_of(by_key).same_bytes) == ("any", True, False)
    assert (needs_of(by_field).ordering, needs_of(by_field).key({"n": 3}), needs_of(by_field).key({})) == (
        "key",
        "3",
        None,
    )
    assert needs_of(OpenSearchSink("http://h", index="i", id="n", operation="create")).ordering == "any"


@pytest.mark.parametrize(
    ("status", "kind", "meant"),
    [
        (400, "mapper_parsing_exception", bq.PermanentError),
        (400, "document_parsing_exception", bq.PermanentError),
        (400, "strict_dynamic_mapping_exception", bq.PermanentError),
        (400, "illegal_argument_exception", bq.PermanentError),
        (404, "index_not_found_exception", bq.PermanentError),
        (403, "cluster_block_exception", bq.RetryableError),
        (429, "cluster_block_exception", bq.ThrottledError),
        (429, "es_rejected_execution_exception", bq.ThrottledError),
        (429, "circuit_breaking_exception", bq.ThrottledError),
        (503, "unavailable_shards_exception", bq.RetryableError),
        (500, "node_not_connected_exception", bq.RetryableError),
        (500, "null_pointer_exception", bq.RetryableError),
        (403, "security_exception", bq.AuthError),
        (401, "security_exception", bq.AuthError),
        (418, "teapot_exception", bq.PermanentError),
    ],
)
def test_an_outcome_is_one_error(status, kind, meant):
    sink = OpenSearchSink("http://h", index="i")
    result = sink._outcomes(answer({"status": 201}, failed(status, kind, "why_exception")), 2)
    assert {place: type(error) for place, error in result.rejected.items()} == {1: meant}
    assert f"{status} {kind} (why_exception) by http://h/_bulk" in str(result.rejected[1])


def test_outcomes_of_all():
    sink = OpenSearchSink("http://h", index="i")
    assert sink._outcomes(answer({"status": 201}, errors=False), 1) is None
    assert sink._outcomes(answer({"status": 201}, failed(409, "version_conflict_engine_exception")), 2).skipped == 1
    with pytest.raises(bq.ThrottledError):  # all of the batch: the exporter slows down
        sink._outcomes(answer(*[failed(429, "rejected_execution_exception")] * 2), 2)
    with pytest.raises(bq.ConfigError, match="no such index"):
        sink._outcomes(answer(*[failed(404, "index_not_found_exception")] * 2), 2)
    for odd in (b"<html>", b"[]", b'{"errors": true}', b'{"errors": true, "items": [{}]}'):
        with pytest.raises(bq.ConfigError, match="no list of 2 outcomes"):
            sink._outcomes(HttpAnswer(status=200, headers={}, body=odd), 2)
    assert (
        type(OpenSearchSink("http://h", index="i", retryable=[400])._error(400, "mapper_parsing_exception", {}))
        is bq.RetryableError
    )


def test_options_are_checked_and_secrets_hidden():
    with pytest.raises(bq.ConfigError, match="index='' is empty"):
        OpenSearchSink("http://h", index="")
    with pytest.raises(bq.ConfigError, match="operation='update'"):
        OpenSearchSink("http://h", index="i", operation="update")
    sink = OpenSearchSink("https://h:9200/", index="i", user="u", password="s3cret")
    assert repr(sink) == "OpenSearchSink('https://h:9200/_bulk', index='i')"
    assert b"s3cret" not in repr(sink).encode()
    assert repr(pickle.loads(pickle.dumps(sink))) == repr(sink)


# --- a real server


@pytest.mark.real_time
class TestServer:
    async def test_a_document_is_in_once_by_its_key(self, opensearch, index):
        batch = [{"n": number, "s": "ü"} for number in range(300)]
        keys = [f"q/{number}" for number in range(300)]
        async with opened(OpenSearchSink(opensearch.url, index=index, compression="gzip")) as sink:
            for _ in range(2):
                assert await sink.send_keyed(batch, keys) is None
        assert opensearch.documents(index) == dict(zip(keys, batch, strict=True))
        async with opened(OpenSearchSink(opensearch.url, index=index, operation="create")) as sink:
            result = await sink.send_keyed([{"n": -1}, {"n": 300}], ["q/5", "q/300"])
        assert (result.skipped, result.rejected) == (1, {})
        assert (opensearch.documents(index)["q/5"], len(opensearch.documents(index))) == (batch[5], 301)

    async def test_the_last_record_of_an_id_wins(self, opensearch, index):
        async with bq.Exporter(OpenSearchSink(opensearch.url, index=index, id="id")) as exporter:
            await exporter.consume([{"id": number % 7, "n": number} for number in range(100)])
            await exporter.flush(60)
        assert {key: found["n"] for key, found in opensearch.documents(index).items()} == {
            str(number % 7): number for number in range(93, 100)
        }

    async def test_what_the_mapping_refuses_is_rejected_alone_and_not_quoted(self, opensearch, index):
        opensearch.ask(
            "PUT", f"/{index}", {"mappings": {"dynamic": "strict", "properties": {"n": {"type": "integer"}}}}
        )
        async with opened(OpenSearchSink(opensearch.url, index=index)) as sink:
            batch = [{"n": 1}, {"n": "s3cret"}, {"m": 1}, {"n": 2**40}, {"n": 2}]
            result = await sink.send(batch)
        assert {place: type(error) for place, error in result.rejected.items()} == dict.fromkeys(
            (1, 2, 3), bq.PermanentError
        )
        assert "mapper_parsing_exception" in str(result.rejected[1])
        assert "s3cret" not in str(result.rejected)
        assert sorted(found["n"] for found in opensearch.documents(index).values()) == [1, 2]

    async def test_a_blocked_index_is_waited_for(self, opensearch, index):
        opensearch.ask("PUT", f"/{index}")
        opensearch.ask("PUT", f"/{index}/_settings", {"index.blocks.write": True})
        async with bq.Exporter(OpenSearchSink(opensearch.url, index=index)) as exporter:
            await exporter.consume([{"n": 1}, {"n": 2}])
            await until(lambda: exporter.stats().retries > 0)
            assert "cluster_block_exception" in exporter.stats().last_error
            opensearch.ask("PUT", f"/{index}/_settings", {"index.blocks.write": False})
            await exporter.flush(60)
        assert len(opensearch.documents(index)) == 2

    async def test_an_index_that_is_not_made_is_a_fault_of_the_configuration(self, opensearch, index):
        opensearch.ask("PUT", "/_cluster/settings", {"transient": {"action.auto_create_index": "false"}})
        try:
            async with opened(OpenSearchSink(opensearch.url, index=index)) as sink:
                with pytest.raises(bq.ConfigError, match="no such index"):
                    await sink.send([{"n": 1}])
        finally:
            opensearch.ask("PUT", "/_cluster/settings", {"transient": {"action.auto_create_index": None}})

    async def test_every_record_is_in_once_after_an_outage(self, opensearch, index):
        async with FaultProxy(opensearch.address) as proxy:
            sink = OpenSearchSink(f"http://{proxy.address}", index=index, timeout=2.0, connect_timeout=0.5)
            met = await outage(sink, proxy, lambda number: {"n": number})
        met.check()
        assert sorted(found["n"] for found in opensearch.documents(index).values()) == list(range(met.count))
