"""The sinks of RabbitMQ, NATS JetStream and Redis against the real servers: what arrives, and what each failure is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle

import aio_pika
import nats
import pytest
import redis.asyncio
from nats.js.api import StreamConfig
from servers.nats import NatsServer
from servers.redis import RedisServer

import batchqueue_async as bq
from batchqueue_async.sinks._shared.connection import SharedConnection
from batchqueue_async.sinks._shared.payloads import UnderWay, payload, verdict
from batchqueue_async.sinks._shared.tls import Tls
from batchqueue_async.sinks.amqp import AmqpSink
from batchqueue_async.sinks.base import KeyedSink, Sink
from batchqueue_async.sinks.nats import NatsSink
from batchqueue_async.sinks.redis import RedisSink
from batchqueue_async.testing import FaultProxy, settle

LIMIT = 60.0
FAULTS = ("reset", "refuse", "half_open", "mute")


@contextlib.asynccontextmanager
async def opened(sink):
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


async def nothing(error):
    """What the client would log."""


async def again(sink, batch, keys):
    """Send until it goes: a server takes a moment to see that a connection is gone."""
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                return await sink.send_keyed(batch, keys)
            except bq.RetryableError:
                await asyncio.sleep(0.05)


class Redis:
    """What a broker's tests need, said the same way for each."""

    def __init__(self, server):
        self.server = server

    async def start(self, name):
        self.name = name
        await self.connect()

    async def connect(self):
        self.client = redis.asyncio.Redis(port=self.server.port)

    async def settle(self):
        """Wait until what holds the records survives a kill."""

    async def stop(self):
        await self.client.delete(self.name)
        await self.client.aclose()

    def sink(self, address=None, **options):
        return RedisSink(f"redis://{address or self.server.address}/0", stream=self.name, **options)

    async def records(self):
        return [
            (entry[b"data"], entry.get(b"bq-key", b"").decode()) for _, entry in await self.client.xrange(self.name)
        ]


class Nats:
    def __init__(self, server):
        self.server = server

    async def connect(self):
        self.client = await nats.connect(f"nats://{self.server.address}", allow_reconnect=False, error_cb=nothing)
        self.stream = self.client.jetstream()

    async def start(self, name):
        self.name = name
        await self.connect()
        await self.stream.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"]))

    async def settle(self):
        """The stream is on disk when it is made."""

    async def stop(self):
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await self.stream.delete_stream(self.name)
        await self.client.close()

    def sink(self, address=None, **options):
        return NatsSink(f"nats://{address or self.server.address}", **({"subject": f"{self.name}.rows"} | options))

    async def records(self):
        count = (await self.stream.stream_info(self.name)).state.messages
        found = [await self.stream.get_msg(self.name, number + 1) for number in range(count)]
        return [(message.data, (message.headers or {}).get("Nats-Msg-Id", "")) for message in found]


class Rabbit:
    def __init__(self, server):
        self.server = server

    async def start(self, name):
        self.name = name
        await self.connect()

    async def connect(self):
        self.connection = await aio_pika.connect(f"amqp://{self.server.address}/")
        self.channel = await self.connection.channel()
        self.queue = await self.channel.declare_queue(self.name, durable=True)

    async def settle(self):
        """A declared queue is in the broker's memory for some time, and messages in it are lost with it."""
        await asyncio.to_thread(self.server.ctl, "eval", "mnesia:sync_log().")

    async def stop(self):
        await self.queue.delete(if_unused=False, if_empty=False)
        await self.connection.close()

    def sink(self, address=None, **options):
        return AmqpSink(f"amqp://{address or self.server.address}/", **({"queue": self.name} | options))

    async def records(self):
        found = []
        while message := await self.queue.get(no_ack=True, fail=False):
            found.append((message.body, message.message_id or ""))
        return found


@pytest.fixture(params=[Redis, Nats, Rabbit], ids=["redis", "nats", "rabbitmq"])
def kind(request):
    return request.param


@pytest.fixture
async def broker(kind, request):
    server = request.getfixturevalue({Redis: "redis_server", Nats: "nats_server", Rabbit: "rabbit_server"}[kind])
    broker = kind(server)
    await broker.start(f"t{abs(hash(request.node.nodeid))}")
    yield broker
    await broker.stop()


@pytest.fixture
async def proxy(broker):
    async with FaultProxy(broker.server.address) as proxy:
        yield proxy


# --- pure parts


def test_a_record_is_bytes_text_or_json():
    assert [payload(record) for record in (b"a", bytearray(b"b"), "ü", 5)] == [b"a", b"b", "ü".encode(), b"5"]
    with pytest.raises(bq.PermanentError, match="has no form in JSON"):
        payload(object())


def test_an_error_of_all_is_the_error_of_the_whole():
    late, bad = bq.RetryableError("later"), bq.PermanentError("never")
    with pytest.raises(bq.RetryableError):
        verdict({0: late, 1: bq.RetryableError("too")}, 2)
    assert verdict({0: late, 1: bad}, 2).rejected == {0: late, 1: bad}
    assert verdict({0: bad, 1: bad}, 2).rejected == {0: bad, 1: bad}
    assert verdict({0: late}, 2).rejected == {0: late}
    assert verdict({}, 2, skipped=1).skipped == 1
    assert verdict({}, 0) is None


async def test_calls_end_with_their_time_or_their_caller():
    ended = []

    async def call(seconds):
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(seconds)
        if seconds == 2:
            raise KeyError(seconds)
        return seconds

    results = await UnderWay().all_of([call(1), call(2), call(100)], timeout=3)
    assert (results[0], type(results[1]), type(results[2])) == (1, KeyError, TimeoutError)
    assert asyncio.get_running_loop().time() == 6  # three seconds in which none came
    task = asyncio.create_task(UnderWay().all_of([call(50)], timeout=100))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1, 2, 100, 50]


@pytest.mark.real_time(one_loop=True)
async def test_a_refused_connection_to_rabbitmq_is_closed(monkeypatch):
    closed = []

    class Connection(aio_pika.Connection):
        async def close(self, *arguments):
            closed.append(self)
            await super().close(*arguments)

    monkeypatch.setattr(aio_pika, "Connection", Connection)
    sink = AmqpSink("amqp://127.0.0.1:1/", queue="rows")
    await sink.open()
    with pytest.raises(bq.RetryableError, match="the connection broke"):
        await sink.send([b"x"])
    assert len(closed) == 1  # else it begins a task to be closed in when it is collected
    await sink.close()


async def test_a_connection_is_made_once_and_replaced_once():
    made, ended = [], []

    async def make():
        await asyncio.sleep(1)
        made.append(object())
        return made[-1]

    async def end(connection):
        ended.append(connection)
        await asyncio.sleep(100)

    shared = SharedConnection(make, end, grace=2.0)
    first, second = await asyncio.gather(shared.get(), shared.get())
    assert first is second
    shared.drop(first)
    shared.drop(first)  # by another sender that met the same failure
    third = await shared.get()
    shared.drop(first)
    assert await shared.get() is third
    await shared.close()
    await shared.close()
    assert (made, ended) == ([first, third], [first, third])
    assert asyncio.get_running_loop().time() == 4.0  # two to make, two to wait for a close that never ends


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AmqpSink("http://h", queue="q"), "scheme 'http'"),
        (lambda: AmqpSink("amqp://h"), "nowhere to send"),
        (lambda: AmqpSink("amqp://h", queue="q", tls=True), "amqp:// is without TLS"),
        (lambda: AmqpSink("amqp://h", queue="q", timeout=0), "timeout=0"),
        (lambda: AmqpSink("amqp://h", queue="q", retryable=[200]), "retryable=200"),
        (lambda: NatsSink("http://h", subject="s"), "scheme 'http'"),
        (lambda: NatsSink([], subject="s"), "no URL"),
        (lambda: NatsSink("nats://h", subject="s", connect_timeout=0), "connect_timeout=0"),
        (lambda: RedisSink("http://h", stream="s"), "scheme 'http'"),
        (lambda: RedisSink("redis://h", stream="s", tls=Tls()), "redis:// is without TLS"),
        (lambda: RedisSink("rediss://h", stream="s", tls=object()), "takes no SSL context"),
        (lambda: RedisSink("redis://h", stream="s", connections=0), "connections=0"),
        (lambda: RedisSink("redis://h", stream="s", maxlen=0), "maxlen=0"),
    ],
)
def test_wrong_options_are_named(make, message):
    with pytest.raises(bq.ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "sink",
    [
        AmqpSink("amqp://u:s3cret@127.0.0.1/v", queue="q", password="s3cret"),
        NatsSink("nats://u:s3cret@127.0.0.1", subject="q", token="s3cret"),
        RedisSink("redis://u:s3cret@127.0.0.1", stream="q", password="s3cret"),
    ],
    ids=["rabbitmq", "nats", "redis"],
)
async def test_they_show_no_secret_and_are_pickled_before_they_are_open(sink):
    assert "s3cret" not in repr(sink)
    assert repr(pickle.loads(pickle.dumps(sink))) == repr(sink)
    assert isinstance(sink, Sink)
    assert isinstance(sink, KeyedSink)
    assert sink.concurrent
    with pytest.raises(RuntimeError, match="not open"):
        await sink.send([1])
    await sink.close()
    await sink.close()


# --- real servers


@pytest.mark.real_time
class TestTls:
    """Certificates are verified unless told, by the client of each."""

    async def check(self, make, certificate, answer=contextlib.nullcontext):
        async with opened(make(None)) as sink:
            with pytest.raises(bq.RetryableError) as caught:
                await sink.send([1])
            assert "no stream" not in str(caught.value)
        for tls in (Tls(ca=certificate[0]), Tls(verify=False)):
            async with opened(make(tls)) as sink:
                with answer():
                    await sink.send([1])

    async def test_redis(self, redis_process, certificate_files):
        server = RedisServer(certificate_files)
        server.start()
        try:
            await self.check(
                lambda tls: RedisSink(f"rediss://{server.address}", stream="s", tls=tls), certificate_files
            )
        finally:
            server.dispose()

    async def test_nats(self, nats_process, certificate_files):
        cert, key = map(str, certificate_files)
        server = NatsServer("--tls", "--tlscert", cert, "--tlskey", key)
        server.start()
        try:
            await self.check(
                lambda tls: NatsSink(f"tls://{server.address}", subject="s", tls=tls),
                certificate_files,
                lambda: pytest.raises(bq.RetryableError, match="no stream"),  # it has none, and says so
            )
        finally:
            server.dispose()

    async def test_rabbitmq(self, rabbit_server, certificate_files):
        url = f"amqps://127.0.0.1:{rabbit_server.tls_port}/"
        await self.check(lambda tls: AmqpSink(url, queue="tls", tls=tls), certificate_files)


@pytest.mark.real_time
class TestEach:
    async def test_records_arrive_with_their_keys(self, broker):
        async with opened(broker.sink()) as sink:
            batch = [b"raw", "text", {"a": 1}, *range(200)]
            assert await sink.send_keyed(batch, [f"q/{place}" for place in range(len(batch))]) is None
            assert await sink.send([]) is None
            assert await sink.send([b"last"]) is None
        *records, last = await broker.records()
        expected = [b"raw", b"text", b'{"a":1}', *(str(number).encode() for number in range(200))]
        assert records == [(body, f"q/{place}") for place, body in enumerate(expected)]
        assert last[0] == b"last"

    async def test_a_record_without_a_form_is_rejected_alone(self, broker):
        async with opened(broker.sink()) as sink:
            result = await sink.send([1, object(), 2])
            assert list(result.rejected) == [1]
            assert list((await sink.send([object()])).rejected) == [0]
        assert [body for body, _ in await broker.records()] == [b"1", b"2"]

    async def test_sends_overlap_over_one_sink(self, broker):
        async with opened(broker.sink()) as sink:
            await asyncio.gather(*(sink.send([b"%d" % number] * 5) for number in range(20)))
        assert len(await broker.records()) == 100

    async def test_broken_lines_are_worth_another_try(self, broker, proxy):
        async with opened(broker.sink(proxy.address, timeout=0.5, connect_timeout=1.0)) as sink:
            await sink.send_keyed([b"0"], ["first"])
            for fault in FAULTS:
                await proxy.switch(fault)
                with pytest.raises(bq.RetryableError):
                    await sink.send_keyed([fault.encode()], [f"in/{fault}"])
                await proxy.switch("pass")
                await again(sink, [b"1"], [f"after/{fault}"])
        keys = [key for _, key in await broker.records()]
        assert {"first", *(f"after/{fault}" for fault in FAULTS)} <= set(keys)

    async def test_a_cancelled_send_leaves_the_sink_usable(self, broker, proxy):
        async with opened(broker.sink(proxy.address)) as sink:
            await sink.send([b"0"])
            await proxy.switch("mute")
            sending = asyncio.create_task(sink.send([b"1"] * 10))
            await asyncio.sleep(0.02)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await proxy.switch("pass")
            await again(sink, [b"2"], ["k"])
        assert b"2" in [body for body, _ in await broker.records()]

    async def test_nobody_there_is_worth_another_try(self, kind, broker):
        async with FaultProxy(broker.server.address) as proxy:
            await proxy.switch("refuse")
            async with opened(broker.sink(proxy.address)) as sink:
                for _ in range(3):
                    with pytest.raises(bq.RetryableError):
                        await sink.send([1])

    async def test_a_server_that_was_killed_is_used_again(self, kind, broker):
        async with opened(broker.sink(timeout=2.0)) as sink:
            await broker.settle()
            await again(sink, [b"before"], ["k/1"])
            broker.server.kill()
            with pytest.raises(bq.RetryableError):
                await sink.send_keyed([b"while"], ["k/2"])
            await asyncio.to_thread(broker.server.start)
            await again(sink, [b"after"], ["k/3"])
        await broker.connect()  # its connection died with the server
        assert {"k/1", "k/3"} <= {key for _, key in await broker.records()}


@pytest.mark.real_time
@pytest.mark.parametrize("kind", [Redis], ids=["redis"])
class TestRedis:
    async def test_a_stream_is_kept_short(self, broker):
        async with opened(broker.sink(maxlen=10, approximate=False)) as sink:
            await sink.send(list(range(50)))
        assert [body for body, _ in await broker.records()] == [str(number).encode() for number in range(40, 50)]

    async def test_rows_are_the_fields_of_an_entry(self, broker):
        async with opened(broker.sink(rows=True)) as sink:
            result = await sink.send_keyed([{"a": 1, "b": "x", "c": None, "d": [1]}, {"a": None}], ["k1", "k2"])
            assert list(result.rejected) == [1]
        (found,) = await broker.client.xrange(broker.name)
        assert found[1] == {b"a": b"1", b"b": b"x", b"d": b"[1]", b"bq-key": b"k1"}

    async def test_the_stream_may_depend_on_the_record(self, broker):
        sink = RedisSink(f"redis://{broker.server.address}", stream=lambda record: f"{broker.name}-{record['to']}")
        async with opened(sink):
            await sink.send([{"to": "a"}, {"to": "b"}, {"to": "a"}])
        counts = [await broker.client.xlen(f"{broker.name}-{name}") for name in "ab"]
        await broker.client.delete(f"{broker.name}-a", f"{broker.name}-b")
        assert (counts, repr(sink).endswith("stream='...')")) == ([2, 1], True)

    async def test_what_redis_says_is_judged_by_record(self, broker):
        await broker.client.set(broker.name, "no stream")
        async with opened(broker.sink()) as sink:
            result = await sink.send([1, 2])
            assert [type(error) for error in result.rejected.values()] == [bq.PermanentError] * 2
        await broker.client.delete(broker.name)
        await broker.client.config_set("maxmemory", "1")
        try:
            async with opened(broker.sink()) as sink:
                with pytest.raises(bq.RetryableError, match="no writes now"):
                    await sink.send([1])
        finally:
            await broker.client.config_set("maxmemory", "0")

    async def test_credentials(self, broker, monkeypatch):
        monkeypatch.setenv("REDIS_PASSWORD", "s3cret")
        await broker.client.acl_setuser(
            "writer", enabled=True, passwords=["+s3cret"], keys=["other"], commands=["+xadd"]
        )
        async with opened(broker.sink(user="writer", password="env:REDIS_PASSWORD")) as sink:
            with pytest.raises(bq.AuthError):
                await sink.send([1])  # it may not write this key
        async with opened(broker.sink(user="writer", password="wrong")) as sink:
            with pytest.raises(bq.AuthError) as caught:
                await sink.send([1])
        assert "s3cret" not in str(caught.value)


@pytest.mark.real_time
@pytest.mark.parametrize("kind", [Nats], ids=["nats"])
class TestNats:
    async def test_what_the_stream_has_is_skipped(self, broker):
        async with opened(broker.sink()) as sink:
            await sink.send_keyed([1, 2], ["k1", "k2"])
            result = await sink.send_keyed([2, 3], ["k2", "k3"])
            assert result.skipped == 1
        assert [key for _, key in await broker.records()] == ["k1", "k2", "k3"]

    async def test_the_subject_may_depend_on_the_record(self, broker):
        sink = broker.sink(subject=lambda record: f"{broker.name}.{record}", headers={"h": "v"}, stream=broker.name)
        async with opened(sink):
            await sink.send(["a", "b"])
            result = await sink.send(["a", "no subject\n"])
            assert [type(error) for error in result.rejected.values()] == [bq.PermanentError]
        assert [body for body, _ in await broker.records()] == [b"a", b"b", b"a"]

    async def test_a_stream_that_is_not_there_may_come(self, broker):
        async with opened(broker.sink(subject="nobody.takes.it")) as sink:
            with pytest.raises(bq.RetryableError, match="no stream takes the subject"):
                await sink.send([1])
        async with opened(broker.sink(stream="another")) as sink:
            result = await sink.send([1])
            assert [type(error) for error in result.rejected.values()] == [bq.PermanentError]

    async def test_a_message_that_is_too_large_is_rejected_alone(self, broker):
        async with opened(broker.sink()) as sink:
            result = await sink.send([b"x" * 1_100_000, b"y"])
        assert {place: type(error) for place, error in result.rejected.items()} == {0: bq.TooLargeError}

    async def test_credentials(self, kind, monkeypatch):
        server = NatsServer("--user", "me", "--pass", "s3cret")
        server.start()
        try:
            monkeypatch.setenv("NATS_PASSWORD", "s3cret")
            sink = NatsSink(f"nats://{server.address}", subject="x", user="me", password="env:NATS_PASSWORD")
            async with opened(sink):
                with pytest.raises(bq.RetryableError, match="no stream"):
                    await sink.send([1])
            async with opened(NatsSink(f"nats://me:wr0ng@{server.address}", subject="x")) as sink:
                with pytest.raises(bq.AuthError) as caught:
                    await sink.send([1])
            assert "wr0ng" not in str(caught.value)
        finally:
            server.dispose()


@pytest.mark.real_time
@pytest.mark.parametrize("kind", [Rabbit], ids=["rabbitmq"])
class TestRabbit:
    async def test_a_message_that_no_queue_takes_is_rejected(self, broker):
        sink = broker.sink(routing_key=lambda record: broker.name if record else "nowhere", content_type="text/plain")
        async with opened(sink):
            result = await sink.send([1, 0, 1])
        assert {place: type(error) for place, error in result.rejected.items()} == {1: bq.PermanentError}
        assert len(await broker.records()) == 2
        async with opened(broker.sink(routing_key="nowhere", mandatory=False)) as sink:
            assert await sink.send([1]) is None

    async def test_a_full_queue_is_worth_another_try(self, broker):
        name = f"{broker.name}-full"
        arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
        queue = await broker.channel.declare_queue(name, durable=True, arguments=arguments)
        try:
            async with opened(broker.sink(queue=None, routing_key=name)) as sink:
                result = await sink.send([1, 2, 3, 4])
                assert {type(error) for error in result.rejected.values()} == {bq.RetryableError}
                with pytest.raises(bq.RetryableError, match="did not take"):
                    await sink.send([5])
            async with opened(broker.sink(queue=name)) as sink:
                with pytest.raises(bq.PermanentError, match="other properties"):
                    await sink.send([1])
        finally:
            await queue.delete(if_unused=False, if_empty=False)

    async def test_a_message_that_is_too_large_closes_the_channel_and_the_batch_is_split(self, broker):
        async with opened(broker.sink()) as sink:
            with pytest.raises(bq.TooLargeError):
                await sink.send([b"a", b"x" * 1_100_000, b"b"])
            await sink.send([b"c"])
        assert b"c" in [body for body, _ in await broker.records()]

    async def test_an_exchange_that_is_not_there_may_come(self, broker):
        async with opened(broker.sink(queue=None, exchange="later", routing_key="k")) as sink:
            with pytest.raises(bq.RetryableError, match="no exchange 'later'"):
                await sink.send([1])
            exchange = await broker.channel.declare_exchange("later")
            await broker.queue.bind(exchange, "k")
            try:
                await sink.send([json.dumps({"a": 1})])
            finally:
                await exchange.delete()
        assert [body for body, _ in await broker.records()] == [b'{"a": 1}']

    async def test_more_codes_may_pass_where_that_is_said(self, broker):
        async with opened(broker.sink(routing_key="nowhere", retryable=[312])) as sink:
            with pytest.raises(bq.RetryableError, match="code 312"):
                await sink.send([1])
        # A queue of that name is there, with other properties.
        await broker.channel.declare_queue("transient", durable=False, auto_delete=True)
        async with opened(broker.sink(queue="transient", retryable=[406])) as sink:
            for _ in range(2):  # the channel, which the broker closed, is made anew
                with pytest.raises(bq.RetryableError, match="code 406"):
                    await sink.send([1])

    async def test_credentials(self, broker, monkeypatch):
        monkeypatch.setenv("RABBIT_PASSWORD", "guest")
        async with opened(broker.sink(user="guest", password="env:RABBIT_PASSWORD")) as sink:
            await sink.send([1])
        async with opened(broker.sink(password="wr0ng")) as sink:
            with pytest.raises(bq.AuthError) as caught:
                await sink.send([1])
        assert "wr0ng" not in str(caught.value)
        url = f"amqp://{broker.server.address}/nowhere"
        async with opened(AmqpSink(url, queue="x")) as sink:
            with pytest.raises(bq.AuthError, match="virtual host"):
                await sink.send([1])
