"""The HTTP sink against a real server: what arrives, and which error each answer is."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import gzip
import json
import pickle
import threading
import time
from datetime import UTC, datetime

import cramjam
import msgspec
import pytest
from servers.http import HttpServer

import batchqueue_async as bq
from batchqueue_async.sinks._shared.batch_key import batch_key
from batchqueue_async.sinks._shared.secrets import Secret
from batchqueue_async.sinks._shared.tls import Tls
from batchqueue_async.sinks.base import KeyedSink, Sink
from batchqueue_async.sinks.http import HttpSink, item_statuses
from batchqueue_async.sinks.http.formats import JsonArray, JsonLines, LokiPush
from batchqueue_async.sinks.http.remote_write import RemoteWrite, write_request
from batchqueue_async.sinks.http.status import error_for, retry_after
from batchqueue_async.testing import FaultProxy

TOKEN = "t0ken-of-the-test"


class Opened:
    """A sink that is open while its block runs."""

    def __init__(self, url, **options):
        self.sink = HttpSink(url, **options)

    async def __aenter__(self):
        await self.sink.open()
        return self.sink

    async def __aexit__(self, *_):
        await self.sink.close()


class Row(msgspec.Struct):
    a: int


# --- pure parts


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        (" 7.5 ", 7.5),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("", None),
        (None, None),
        ("Wed, 21 Oct", None),
        ("tomorrow", None),
        (email.utils.formatdate(1_000_060, usegmt=True), 60.0),
        ("Mon, 12 Jan 1970 13:47:40 -0000", 60.0),
        ("Mon, 12 Jan 1970 14:47:40 +0100", 60.0),
        (email.utils.formatdate(1, usegmt=True), 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value, seconds):
    assert retry_after(value, now=1_000_000.0) == seconds


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, None),
        (207, None),
        (301, bq.PermanentError),
        (400, bq.PermanentError),
        (401, bq.AuthError),
        (403, bq.AuthError),
        (404, bq.PermanentError),
        (407, bq.AuthError),
        (408, bq.RetryableError),
        (413, bq.TooLargeError),
        (422, bq.PermanentError),
        (425, bq.RetryableError),
        (429, bq.ThrottledError),
        (500, bq.RetryableError),
        (503, bq.RetryableError),
        (599, bq.RetryableError),
    ],
)
def test_a_status_is_one_error(status, kind):
    error = error_for(status, "POST", wait=3.0)
    assert (None if error is None else type(error)) is kind
    if isinstance(error, bq.RetryableError):
        assert error.retry_after == 3.0


def test_a_record_without_a_form_is_rejected_alone():
    batch = [{"a": 1}, {"a": object()}, b'{"b":2}', Row(3)]
    body = JsonArray().encode(batch, None)
    assert body.content == b'[{"a":1},{"b":2},{"a":3}]'
    assert (body.places, list(body.rejected)) == ([0, 2, 3], [1])
    keyed = JsonLines(key_field="id").encode(batch, ["k0", "k1", "k2", "k3"])
    assert keyed.content == b'{"a":1,"id":"k0"}\n{"a":3,"id":"k3"}\n'
    assert (keyed.places, sorted(keyed.rejected)) == ([0, 3], [1, 2])


def test_loki_groups_by_labels_in_order_of_time():
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    batch = [
        {"labels": {"app": "web"}, "timestamp": 2, "line": "second"},
        {"labels": {"app": "web"}, "timestamp": 1.000001, "line": "first", "metadata": {"trace": 7}},
        "bare",
        {"timestamp": moment, "level": "info", "n": 1},
        {"time_unix_nano": 5, "line": b"exact"},
        {"labels": 3, "line": "x"},
        {"timestamp": "yesterday", "line": "x"},
        {"time_unix_nano": 1.5, "line": "x"},
        {"timestamp": float("inf"), "line": "x"},
    ]
    body = LokiPush(labels={"job": "j"}, clock=lambda: 9.0).encode(batch, None)
    assert json.loads(body.content) == {
        "streams": [
            {
                "stream": {"app": "web", "job": "j"},
                "values": [["1000001000", "first", {"trace": "7"}], ["2000000000", "second"]],
            },
            {
                "stream": {"job": "j"},
                "values": [
                    ["5", "exact"],
                    ["9000000000", "bare"],
                    [str(int(moment.timestamp()) * 10**9), '{"level":"info","n":1}'],
                ],
            },
        ]
    }
    assert sorted(body.rejected) == [5, 6, 7, 8]


def test_remote_write_is_sorted_and_rejects_what_is_no_sample():
    batch = [
        {"name": "up", "labels": {"job": "a", "empty": ""}, "value": 1, "timestamp": 2},
        {"labels": {"__name__": "up", "job": "a"}, "samples": [(1, 0.5), (0.5, 0.25)]},
        {"name": "down", "value": True},
        {"value": 1},
        {"name": "x", "value": "high"},
        {"name": "x", "labels": "a=b", "value": 1},
        {"name": "x", "samples": "none"},
        {"name": "x", "samples": [1]},
    ]
    body = RemoteWrite(labels={"zone": "z"}, clock=lambda: 3.0).encode(batch, None)
    message = write_request().FromString(bytes(cramjam.snappy.decompress_raw(body.content)))
    found = [
        ({label.name: label.value for label in series.labels}, [(s.timestamp, s.value) for s in series.samples])
        for series in message.timeseries
    ]
    assert found == [
        ({"__name__": "up", "job": "a", "zone": "z"}, [(500, 0.25), (1000, 0.5), (2000, 1.0)]),
        ({"__name__": "down", "zone": "z"}, [(3000, 1.0)]),
    ]
    assert [label.name for label in message.timeseries[0].labels] == ["__name__", "job", "zone"]
    assert sorted(body.rejected) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("ftp://host/", {}, "scheme 'ftp'"),
        ("nonsense", {}, "scheme ''"),
        ("http://host:x/", {}, "can't be read"),
        ("http://user:s3cret@host/", {}, "holds a password"),
        ("http://host/", {"format": "xml"}, "format='xml' is unknown; give one of json, ndjson"),
        ("http://host/", {"compression": "zip"}, "compression='zip'"),
        ("http://host/", {"timeout": 0}, "timeout=0"),
        ("http://host/", {"connections": 0}, "connections=0"),
        ("http://host/", {"token": "a", "user": "b", "password": "c"}, "both token and user"),
        ("http://host/", {"user": "b"}, "belong together"),
    ],
)
def test_wrong_options_are_named(url, options, message):
    with pytest.raises(bq.ConfigError, match=message) as caught:
        HttpSink(url, **options)
    assert "s3cret" not in str(caught.value)


def test_it_shows_no_secret_and_is_pickled_before_it_is_open():
    sink = HttpSink("http://h/x?token=s3cret", token="s3cret", headers={"X-Key": Secret("s3cret")})
    assert "s3cret" not in repr(sink)
    assert pickle.loads(pickle.dumps(sink)).url == sink.url
    assert isinstance(sink, Sink)
    assert isinstance(sink, KeyedSink)
    assert sink.concurrent


async def test_it_wants_to_be_opened_and_may_be_closed_twice():
    sink = HttpSink("http://127.0.0.1:1/")
    with pytest.raises(RuntimeError, match="not open"):
        await sink.send([1])
    await sink.close()
    await sink.close()


# --- a real server


@pytest.fixture
async def proxy(http_server):
    async with FaultProxy(http_server.address) as proxy:
        yield proxy


@pytest.mark.real_time
class TestServer:
    async def test_json_arrives_with_its_headers(self, http_server, monkeypatch):
        monkeypatch.setenv("A_KEY", "key-value")
        headers = {"X-Plain": "1", "X-Key": Secret("env:A_KEY")}
        async with Opened(f"{http_server.url}/rows?x=1", headers=headers, token=TOKEN) as sink:
            assert await sink.send_keyed([{"a": 1}, Row(2)], ["q/1", "q/2"]) is None
            assert await sink.send([]) is None
        (request,) = http_server.received()
        assert (request.path, request.query, json.loads(request.body)) == ("/rows", "x=1", [{"a": 1}, {"a": 2}])
        shown = {name: request.headers[name] for name in ("content-type", "x-plain", "x-key", "authorization")}
        assert shown == {
            "content-type": "application/json",
            "x-plain": "1",
            "x-key": "key-value",
            "authorization": f"Bearer {TOKEN}",
        }
        assert request.headers["idempotency-key"] == batch_key(["q/1", "q/2"])

    async def test_a_prepared_request_is_the_same_and_encoded_in_a_thread(self, http_server):
        threads = []

        class Noted(JsonArray):
            def encode(self, batch, keys):
                threads.append(threading.current_thread().name)
                return super().encode(batch, keys)

        sink = HttpSink(http_server.url, format=Noted(), compression="gzip")
        assert isinstance(sink, bq.PreparingSink)
        batch, keys = [{"a": 1}, {"odd": object()}, {"a": 2}], ["q/1", "q/2", "q/3"]
        await sink.open()
        assert list((await sink.send_keyed(batch, keys)).rejected) == [1]
        assert list((await sink.send_prepared(sink.prepare(batch, keys))).rejected) == [1]
        await sink.close()
        assert [thread.startswith("batchqueue-prepare") for thread in threads] == [False, False]
        config = bq.ExportConfig(split=bq.SplitPolicy(preparers=1))
        async with bq.Exporter(HttpSink(http_server.url, format=Noted(), compression="gzip"), config) as exporter:
            await exporter.deliver([{"a": 3}])
        assert threads[2].startswith("batchqueue-prepare")
        first, second, third = http_server.received()
        del first.headers["user-agent"], second.headers["user-agent"]
        assert (first.body, first.headers) == (second.body, second.headers)
        assert json.loads(gzip.decompress(third.body)) == [{"a": 3}]
        assert "idempotency-key" in third.headers

    async def test_a_batch_of_nothing_but_rejects_makes_no_request(self, http_server):
        async with Opened(http_server.url) as sink:
            result = await sink.send([object()])
        assert list(result.rejected) == [0]
        assert http_server.received() == []

    @pytest.mark.parametrize("count", [1, 20_000])
    async def test_gzip(self, http_server, count):
        async with Opened(http_server.url, format="ndjson", compression="gzip") as sink:
            await sink.send([{"a": 1}] * count)
        (request,) = http_server.received()
        assert request.headers["content-encoding"] == "gzip"
        assert gzip.decompress(request.body) == b'{"a":1}\n' * count

    async def test_basic_authentication(self, http_server):
        async with Opened(http_server.url, user="me", password="pass:word") as sink:
            await sink.send([1])
        (request,) = http_server.received()
        assert base64.b64decode(request.headers["authorization"].removeprefix("Basic ")) == b"me:pass:word"

    async def test_statuses_are_errors_that_show_no_payload(self, http_server):
        later = email.utils.formatdate(time.time() + 3600, usegmt=True)
        http_server.script(
            {"status": 503, "headers": {"Retry-After": "17"}, "body": "s3cret"},
            {"status": 429, "headers": {"Retry-After": later}},
            {"status": 413},
            {"status": 401},
            {"status": 400, "body": "s3cret"},
            {"status": 307, "headers": {"Location": "/elsewhere"}},
        )
        kinds = []
        waits = []
        async with Opened(f"{http_server.url}/r?k=s3cret", token="s3cret") as sink:
            for _ in range(6):
                with pytest.raises(bq.SinkError) as caught:
                    await sink.send(["s3cret"])
                assert "s3cret" not in str(caught.value)
                kinds.append(type(caught.value))
                waits.append(getattr(caught.value, "retry_after", None))
        assert kinds == [
            bq.RetryableError,
            bq.ThrottledError,
            bq.TooLargeError,
            bq.AuthError,
            bq.PermanentError,
            bq.PermanentError,
        ]
        assert waits[0] == 17.0
        assert 3000 < waits[1] <= 3600
        assert http_server.received() == []

    async def test_an_answer_may_reject_single_records(self, http_server):
        body = json.dumps({"items": [{"index": {"status": 201}}, {"status": 400}, {"status": 503}]})
        http_server.script({"status": 207, "body": body}, {"status": 200, "body": body}, {"status": 200, "body": "[]"})
        batch = [{"a": 1}, object(), {"a": 2}, {"a": 3}]
        async with Opened(http_server.url) as sink:
            result = await sink.send(batch)
        assert {place: type(error) for place, error in result.rejected.items()} == {
            1: bq.PermanentError,
            2: bq.PermanentError,
            3: bq.RetryableError,
        }
        async with Opened(http_server.url, judge=item_statuses) as sink:
            assert sorted((await sink.send(batch)).rejected) == [1, 2, 3]
            with pytest.raises(bq.PermanentError, match="no list of 1 statuses"):
                await sink.send([1])

    async def test_a_rotated_token_counts_at_the_next_request(self, http_server, tmp_path):
        path = tmp_path / "token"
        path.write_text("old\n")
        http_server.rules(token="new")
        async with Opened(http_server.url, token=f"file:{path}") as sink:
            with pytest.raises(bq.AuthError):
                await sink.send([1])
            path.write_text("new\n")
            await sink.send([1])
        assert len(http_server.received()) == 1

    async def test_a_slow_server_is_a_timeout(self, http_server):
        http_server.rules(delay=60)
        async with Opened(http_server.url, timeout=0.2) as sink:
            with pytest.raises(bq.RetryableError, match="took too long"):
                await sink.send([1])

    async def test_broken_lines_are_worth_another_try(self, http_server, proxy):
        async with Opened(f"http://{proxy.address}/", timeout=1.0) as sink:
            await sink.send([1])
            for fault in ("reset", "refuse", "half_open", "mute"):
                await proxy.switch(fault)
                with pytest.raises(bq.RetryableError):
                    await sink.send([2])
                await proxy.switch("pass")
                await proxy.cut()
                await sink.send([3])

    async def test_a_cancelled_send_leaves_the_sink_usable(self, http_server, proxy):
        async with Opened(f"http://{proxy.address}/") as sink:
            await sink.send([1])
            await proxy.switch("half_open")
            sending = asyncio.create_task(sink.send([2]))
            await asyncio.sleep(0)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await proxy.switch("pass")
            await sink.send([3])

    async def test_sends_overlap(self, http_server):
        http_server.rules(delay=0.2)
        async with Opened(http_server.url) as sink:
            started = asyncio.get_running_loop().time()
            await asyncio.gather(*(sink.send([number]) for number in range(20)))
            assert asyncio.get_running_loop().time() - started >= 0.2
        assert sorted(json.loads(request.body)[0] for request in http_server.received()) == list(range(20))

    async def test_tls_is_verified_unless_told(self, certificate_files):
        server = HttpServer(certificate_files)
        server.start()
        try:
            async with Opened(server.url) as sink:
                with pytest.raises(bq.RetryableError, match="Certificate"):
                    await sink.send([1])
            for tls in (Tls(ca=certificate_files[0]), Tls(verify=False)):
                async with Opened(server.url, tls=tls) as sink:
                    await sink.send([1])
        finally:
            server.dispose()
