"""Faults of the sinks that must not come back: those that need no server of someone else's."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import shutil
import signal
import zlib
from contextlib import asynccontextmanager

import cramjam
import grpc
import pytest

import batchqueue_async as bq
from batchqueue_async.sinks._shared.tls import Tls
from batchqueue_async.sinks.amqp import AmqpSink
from batchqueue_async.sinks.base import needs_of
from batchqueue_async.sinks.grpc import GrpcSink
from batchqueue_async.sinks.grpc.status import error_for as grpc_error_for
from batchqueue_async.sinks.http import HttpSink, OAuth2
from batchqueue_async.sinks.http.formats import LokiPush
from batchqueue_async.sinks.http.remote_write import RemoteWrite, write_request
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.kafka import KafkaSink
from batchqueue_async.sinks.nats import NatsSink
from batchqueue_async.sinks.otlp import OtlpSink
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.sinks.redis import RedisSink

pytestmark = pytest.mark.real_time


@asynccontextmanager
async def opened(sink):
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


class Answers:
    """A server of HTTP over a real socket, whose answers a test writes byte by byte."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.seen = []
        self.connections = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                body = await reader.readexactly(int(length[0].split(":")[1])) if length else b""
                self.seen.append((head, body))
                pieces = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                for piece in pieces if isinstance(pieces, list) else [pieces]:
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def answer(status, body=b"", *fields):
    lines = "".join(f"{field}\r\n" for field in fields)
    return f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body


# --- what can't be read is the configuration's

NOWHERE = "127.0.0.1:1"
UNSET = "env:BATCHQUEUE_NOT_SET"
UNREADABLE = {
    "http token": lambda: HttpSink(f"http://{NOWHERE}/", token=UNSET),
    "http password": lambda: HttpSink(f"http://{NOWHERE}/", user="u", password="file:/nonexistent"),
    "http tls": lambda: HttpSink(f"https://{NOWHERE}/", tls=Tls(ca="/nonexistent.pem")),
    "http proxy": lambda: HttpSink(f"http://{NOWHERE}/", proxy=UNSET),
    "http oauth2": lambda: HttpSink(
        f"http://{NOWHERE}/", oauth2=OAuth2(url=f"http://{NOWHERE}/", client_id="c", client_secret=UNSET)
    ),
    "postgres dsn": lambda: PostgresSink(UNSET),
    "postgres password": lambda: PostgresSink(f"postgresql://a@{NOWHERE}/x", password=UNSET),
    "postgres tls": lambda: PostgresSink(f"postgresql://a@{NOWHERE}/x", tls=Tls(ca="/nonexistent.pem")),
    "redis password": lambda: RedisSink(f"redis://{NOWHERE}/0", stream="s", password=UNSET),
    "redis tls": lambda: RedisSink(f"rediss://{NOWHERE}/0", stream="s", tls=Tls(ca="/nonexistent.pem")),
    "otlp token": lambda: OtlpSink(f"http://{NOWHERE}", token=UNSET, signal="logs"),
    "otlp tls": lambda: OtlpSink(f"https://{NOWHERE}", tls=Tls(ca="/nonexistent.pem"), signal="logs"),
    "grpc token": lambda: GrpcSink(f"http://{NOWHERE}", token=UNSET, method="/a.B/C", request=lambda _: b""),
    "amqp password": lambda: AmqpSink(f"amqp://{NOWHERE}/", queue="q", password=UNSET),
    "amqp tls": lambda: AmqpSink(f"amqps://{NOWHERE}/", queue="q", tls=Tls(ca="/nonexistent.pem")),
    "nats token": lambda: NatsSink(f"nats://{NOWHERE}", subject="s", token=UNSET),
    "nats tls": lambda: NatsSink(f"tls://{NOWHERE}", subject="s", tls=Tls(ca="/nonexistent.pem")),
    "nats credentials": lambda: NatsSink(f"nats://{NOWHERE}", subject="s", credentials="/nonexistent.creds"),
    "kafka password": lambda: KafkaSink(NOWHERE, "t", user="u", password=UNSET, connect_timeout=1.0),
    "kafka tls": lambda: KafkaSink(NOWHERE, "t", tls=Tls(ca="/nonexistent.pem"), connect_timeout=1.0),
}


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=list(UNREADABLE))
async def test_x_3_what_cannot_be_read_is_an_error_of_the_configuration(make):
    sink = make()
    with pytest.raises(bq.ConfigError):
        async with opened(sink):
            await sink.send([{"body": "x"}])


async def test_x_3_a_credential_that_is_away_for_a_moment_drops_nothing(tmp_path):
    token = tmp_path / "token"
    token.write_text("t1")
    async with Answers(answer(204)) as server, opened(HttpSink(server.url, token=f"file:{token}")) as sink:
        await sink.send([1])
        for state in (None, b"", b"\xff", b"t2\r\nX-Evil: 1"):
            token.unlink() if state is None else token.write_bytes(state)
            with pytest.raises(bq.ConfigError):
                await sink.send([2])
        token.write_text("t2\n")
        await sink.send([3])
        assert [head.split("Bearer ")[1].split("\r\n")[0] for head, _ in server.seen] == ["t1", "t2"]


# --- what sinks need


def test_x_6_samples_of_one_series_need_their_order():
    needs = needs_of(HttpSink("http://host/", format="remote_write"))
    assert (needs.ordering, needs.same_bytes) == ("key", False)
    one, other = ({"name": "up", "labels": {"b": 1, "a": 2}, "value": n, "timestamp": n} for n in (1, 2))
    assert needs.key(one) == needs.key(other) != needs.key({"name": "up", "value": 1})
    assert needs.key({"value": 1}) == needs.key("text") == ()


async def test_x_7_a_repetition_with_a_key_is_the_same_request():
    for sink in (HttpSink("http://h/"), GrpcSink("http://h", method="/a.B/C", request=lambda _: b"")):
        assert needs_of(sink).same_bytes
    assert not needs_of(HttpSink("http://h/", idempotency_header=None)).same_bytes
    for compression in (None, "gzip", "zstd"):
        async with Answers(answer(503), answer(204)) as server:
            async with opened(HttpSink(server.url, compression=compression)) as sink:
                with pytest.raises(bq.RetryableError):
                    await sink.send_keyed([{"a": 1}, {"b": 2}], ["q/1", "q/2"])
                await sink.send_keyed([{"a": 1}, {"b": 2}], ["q/1", "q/2"])
            assert server.seen[0] == server.seen[1]
            assert "Idempotency-Key" in server.seen[0][0]


# --- JSON lines


async def test_x_8_a_whole_last_line_without_its_break_is_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    for text, kept in [
        ('{"i":1}\n{"i":2}', '{"i":1}\n{"i":2}\n'),
        ('{"db":"x","users":[1,2]}', '{"db":"x","users":[1,2]}\n'),
        ('{"i":1}\n{"i":', '{"i":1}\n'),
        ('{"i":1}\n12', '{"i":1}\n'),
        ('{"i":1}\ntrue', '{"i":1}\ntrue\n'),
        ('{"i":1}\n\xff', '{"i":1}\n'),
    ]:
        path.write_bytes(text.encode("latin-1"))
        async with opened(JsonLinesSink(path)) as sink:
            await sink.send([{"i": 3}])
        assert path.read_text() == kept + '{"i":3}\n'


async def test_x_8_a_directory_that_goes_away_and_comes_back_is_written_to_again(tmp_path):
    path = tmp_path / "out" / "r.jsonl"
    async with opened(JsonLinesSink(path, max_bytes=100)) as sink:
        await sink.send([{"x": "y" * 60}])
        shutil.rmtree(path.parent)
        path.parent.write_text("something else has the name")
        for _ in range(2):
            with pytest.raises(bq.RetryableError):
                await sink.send([{"x": "y" * 60}])
        path.parent.unlink()
        for _ in range(2):
            await sink.send([{"x": "y" * 60}])
    assert sorted(each.name for each in path.parent.iterdir()) == ["r.jsonl", "r.jsonl.1"]


async def test_x_8_a_file_that_was_moved_is_made_anew(tmp_path):
    path = tmp_path / "r.jsonl"
    async with opened(JsonLinesSink(path)) as sink:
        await sink.send([1])
        path.rename(tmp_path / "moved")
        await sink.send([2])
        os.truncate(path, 0)  # logrotate's copytruncate
        await sink.send([3])
    assert (path.read_text(), (tmp_path / "moved").read_text()) == ("3\n", "1\n")


async def test_x_8_rotated_files_are_kept_as_is_said_and_a_signal_reopens(tmp_path):
    path = tmp_path / "r.jsonl"
    async with opened(JsonLinesSink(path, max_bytes=5, keep_files=2, reopen_on=signal.SIGUSR2)) as sink:
        for number in range(6):
            await sink.send([1000 + number])
        first = sink._file
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.sleep(0.05)
        assert sink._stale
        await sink.send([1])
        assert (sink._stale, first >= 0) == (False, True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["r.jsonl", "r.jsonl.5", "r.jsonl.6"]
    with pytest.raises(bq.ConfigError, match="max_bytes"):
        JsonLinesSink(path, keep_files=1)


# --- too large, in every implementation's words

TOO_LARGE = {
    "c-core": ("RESOURCE_EXHAUSTED", "Received message larger than max (10485760 vs. 4194304)"),
    "c-core, newer": ("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (10485760 vs. 4194304)"),
    "go": ("RESOURCE_EXHAUSTED", "grpc: received message larger than max (10485760 vs. 4194304)"),
    "go, compressed": (
        "RESOURCE_EXHAUSTED",
        "grpc: received message after decompression larger than max (10485760 vs. 4194304)",
    ),
    "java": ("RESOURCE_EXHAUSTED", "gRPC message exceeds maximum size 4194304: 10485760"),
    "java, compressed": ("RESOURCE_EXHAUSTED", "Decompressed gRPC message exceeds maximum size 4194304"),
    "dotnet": ("RESOURCE_EXHAUSTED", "Received message exceeds the maximum configured message size."),
    "tonic": (
        "OUT_OF_RANGE",
        "Error, decoded message length too large: found 10485760 bytes, the limit is: 4194304 bytes",
    ),
    "proxy": ("UNKNOWN", "Received http2 header with status: 413"),
    "proxy, go": ("INTERNAL", "unexpected HTTP status code received from server: 413 (Request Entity Too Large)"),
}


@pytest.mark.parametrize(("code", "details"), TOO_LARGE.values(), ids=list(TOO_LARGE))
async def test_x_10_a_message_above_the_limit_is_split_whoever_refuses_it(grpc_server, code, details):
    grpc_server.script({"code": code, "details": details})
    async with opened(OtlpSink(grpc_server.url)) as sink:
        with pytest.raises(bq.TooLargeError):
            await sink.send([{"name": "x"}])


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        ("RESOURCE_EXHAUSTED", "quota exceeded for messages", bq.ThrottledError),
        ("RESOURCE_EXHAUSTED", "", bq.ThrottledError),
        ("OUT_OF_RANGE", "offset 413 is past the end", bq.RetryableError),
        ("INTERNAL", "message too large for the table", bq.PermanentError),
    ],
)
def test_x_10_other_words_are_not_a_limit(code, details, kind):
    assert type(grpc_error_for(code, "call", details=details)) is kind
    assert type(grpc_error_for("INTERNAL", "call", retryable=frozenset({"INTERNAL"}))) is bq.RetryableError


# --- answers


async def test_x_16_answers_are_read_to_a_limit(tmp_path):
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

    squeezed = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(squeezed.compress(bytes(1 << 20)) for _ in range(300)) + squeezed.flush()
    huge = [b"HTTP/1.1 500 x\r\nContent-Length: %d\r\n\r\n" % (300 << 20), *([bytes(1 << 20)] * 300)]
    before = peak()
    async with Answers(huge) as server, opened(HttpSink(server.url)) as sink:
        with pytest.raises(bq.RetryableError, match="500"):
            await sink.send([1])
    async with Answers(answer(200, bomb, "Content-Encoding: gzip")) as server:
        async with opened(HttpSink(server.url)) as sink:
            assert await sink.send([1]) is None  # nobody looks into it
        async with opened(HttpSink(server.url, judge=lambda answer, _: None)) as sink:
            with pytest.raises(bq.PermanentError, match="max_answer=1048576"):
                await sink.send([1])
    assert peak() - before < 60
    fine = zlib.compress(b'[{"status":201}]')
    async with Answers(answer(207, fine, "Content-Encoding: deflate")) as server, opened(HttpSink(server.url)) as sink:
        assert await sink.send([1]) is None


# --- Redis says it is not well

LATER = [
    *("CLUSTERDOWN The cluster is down", "READONLY You can't write against a read only replica.", "LOADING Redis is"),
    *("OOM command not allowed when used memory > 'maxmemory'.", "MISCONF x", "NOREPLICAS x", "BUSY x", "TRYAGAIN x"),
    *("MASTERDOWN Link with MASTER is down", "UNKILLABLE x", "NOTREADY x", "ERR max number of clients reached"),
]


class Replies:
    """A server that answers each XADD with the same error, as Redis writes it."""

    def __init__(self, text):
        self.text = text

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/0"

    async def __aexit__(self, *_):
        self.server.close()

    async def serve(self, reader, writer):
        try:
            while data := await reader.read(65536):
                other = data.count(b"CLIENT") + data.count(b"HELLO")
                writer.write(b"+OK\r\n" * other + f"-{self.text}\r\n".encode() * data.count(b"XADD"))
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.mark.parametrize("text", LATER)
async def test_x_20_redis_that_is_not_well_is_asked_again(text):
    async with Replies(text) as url, opened(RedisSink(url, stream="s", timeout=2)) as sink:
        with pytest.raises(bq.RetryableError) as caught:
            await sink.send([b"x", b"y"])
        assert caught.value.error_type == "server"


async def test_x_20_what_redis_refuses_and_where_it_points_elsewhere():
    for text, kind in [("MOVED 1234 127.0.0.1:7001", bq.ConfigError), ("NOPERM x", bq.AuthError)]:
        async with Replies(text) as url, opened(RedisSink(url, stream="s", timeout=2)) as sink:
            with pytest.raises(kind):
                await sink.send([b"x"])
    async with Replies("WRONGTYPE x") as url, opened(RedisSink(url, stream="s", timeout=2)) as sink:
        assert list((await sink.send([b"x"])).rejected) == [0]
    async with (
        Replies("WRONGTYPE x") as url,
        opened(RedisSink(url, stream="s", timeout=2, retryable=["WRONGTYPE"])) as sink,
    ):
        with pytest.raises(bq.RetryableError):
            await sink.send([b"x"])


# --- failures told apart


async def test_x_28_failures_of_http_are_told_apart():
    kinds = {}
    async with (
        Answers(answer(429), answer(503), answer(504), answer(404)) as server,
        opened(HttpSink(server.url, retryable=[404])) as sink,
    ):
        for status in (429, 503, 504, 404):
            with pytest.raises(bq.RetryableError) as caught:
                await sink.send([1])
            kinds[status] = caught.value.error_type
    async with Answers([]) as silent:
        for name, url, timeout in (("nobody", f"http://{NOWHERE}/", 5.0), ("late", silent.url, 0.1)):
            async with opened(HttpSink(url, timeout=timeout)) as sink:
                with pytest.raises(bq.RetryableError) as caught:
                    await sink.send([1])
                kinds[name] = caught.value.error_type
    assert kinds == {
        429: "throttled",
        503: "server",
        504: "timeout",
        404: "server",
        "nobody": "refused",
        "late": "timeout",
    }
    async with Answers(answer(500)) as server, opened(HttpSink(server.url, final=[500])) as sink:
        with pytest.raises(bq.PermanentError):
            await sink.send([1])


# --- new ways of HTTP


async def test_tokens_are_got_for_credentials_and_anew_when_they_are_refused(monkeypatch):
    monkeypatch.setenv("CLIENT_SECRET", "s3cret")

    def token(name, seconds):
        return answer(200, json.dumps({"access_token": name, "expires_in": seconds}).encode())

    async with (
        Answers(token("one", 3600), token("two", 3600), answer(400, b"{}")) as tokens,
        Answers(answer(204), answer(204), answer(401), answer(204), answer(401), answer(204)) as server,
    ):
        who = OAuth2(url=tokens.url, client_id="me", client_secret="env:CLIENT_SECRET", scope="write")
        async with opened(HttpSink(server.url, oauth2=who)) as sink:
            await asyncio.gather(sink.send([1]), sink.send([2]))
            with pytest.raises(bq.AuthError):
                await sink.send([3])
            await sink.send([3])
            for _ in range(2):  # refused again, and then no token is given
                with pytest.raises(bq.AuthError):
                    await sink.send([4])
        assert [head.split("Bearer ")[1].split("\r\n")[0] for head, _ in server.seen] == [*["one"] * 3, *["two"] * 2]
        assert tokens.seen[0][1] == b"grant_type=client_credentials&scope=write"
        assert base64.b64encode(b"me:s3cret").decode() in tokens.seen[0][0]
        assert "s3cret" not in repr(who)


async def test_requests_go_through_a_proxy_and_are_compressed():
    async with Answers(answer(204)) as proxy:
        address = proxy.url.replace("http://", "http://user:s3cret@")
        sink = HttpSink("http://rows.example:8080/in", proxy=address, compression="zstd")
        async with opened(sink):
            await sink.send([{"a": 1}])
        head, body = proxy.seen[0]
        assert head.startswith("POST http://rows.example:8080/in HTTP/1.1")
        assert base64.b64encode(b"user:s3cret").decode() in head
        assert bytes(cramjam.zstd.decompress(body)) == b'[{"a":1}]'
    async with opened(HttpSink("http://rows.example/", proxy=f"http://user:s3cret@{NOWHERE}")) as sink:
        with pytest.raises(bq.RetryableError) as caught:
            await sink.send([1])
        assert "s3cret" not in str(caught.value)


async def test_an_idle_connection_is_kept_as_long_as_is_said():
    async with Answers(answer(204)) as server, opened(HttpSink(server.url, keepalive=0.05)) as sink:
        for wait in (0, 0.2, 0):
            await sink.send([1])
            await asyncio.sleep(wait)
        assert server.connections == 2


@pytest.mark.parametrize(
    "odd",
    [
        {"line": "\ud800"},
        {"line": "x", "labels": {"a": "\ud800"}},
        {"line": "x", "metadata": {"a": "\ud800"}},
        "\ud800",
    ],
    ids=["line", "label", "metadata", "text"],
)
def test_x_41_a_text_that_is_not_unicode_is_refused_by_itself_for_loki(odd):
    body = LokiPush(labels={}).encode([{"line": "a"}, odd, {"line": "b"}], None)
    assert (body.places, list(body.rejected)) == ([0, 2], [1])
    assert isinstance(body.rejected[1], bq.PermanentError)
    assert [entry[1] for stream in json.loads(body.content)["streams"] for entry in stream["values"]] == ["a", "b"]


@pytest.mark.parametrize("odd", [{"name": "\ud800", "value": 1}, {"name": "x", "labels": {"a": "\ud800"}, "value": 1}])
def test_x_41_a_text_that_is_not_unicode_is_refused_by_itself_for_prometheus(odd):
    body = RemoteWrite().encode([{"name": "a", "value": 1}, odd, {"name": "b", "value": 2}], None)
    assert (body.places, list(body.rejected)) == ([0, 2], [1])
    assert isinstance(body.rejected[1], bq.PermanentError)
    message = write_request().FromString(bytes(cramjam.snappy.decompress_raw(body.content)))
    assert [series.labels[0].value for series in message.timeseries] == ["a", "b"]


async def test_x_42_a_stream_that_is_cut_off_is_told_from_a_whole_one(grpc_server):
    """grpc.aio ends a server's iterator over a cancelled stream as it ends that over a complete one."""
    metadata = (("idempotency-key", "k"), ("message-count", "3"))
    async with grpc.aio.insecure_channel(grpc_server.address) as channel:
        call = channel.stream_unary("/test.Store/PutAll")(metadata=metadata)
        await call.write(b"a")
        call.cancel()
        short = channel.stream_unary("/test.Store/PutAll")(iter([b"a"]), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError, match="1 of 3 messages"):
            await short
    async with opened(GrpcSink(grpc_server.url, method="/test.Store/PutAll", request=list, streaming=True)) as sink:
        await sink.send_keyed([b"a", b"b", b"c"], ["q/1", "q/2", "q/3"])
    (call,) = grpc_server.received()
    assert (call.content, call.metadata["message-count"]) == (b"a|b|c", "3")


async def test_x_43_a_generator_of_messages_that_fails_names_its_record(grpc_server):
    def request(batch):
        return (each.encode() for each in batch)

    async with opened(GrpcSink(grpc_server.url, method="/test.Store/PutAll", request=request, streaming=True)) as sink:
        await sink.send(["a"])
        with pytest.raises(bq.PermanentError, match="request raised AttributeError for 1 of 3 records") as told:
            await sink.send(["b", 7, "c"])
    assert list(told.value.culprits) == [1]
    assert [call.content for call in grpc_server.received()] == [b"a"]
