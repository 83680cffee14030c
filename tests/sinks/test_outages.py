"""Each network sink behind an exporter, through an outage; and what servers refuse, from end to end."""

from __future__ import annotations

import asyncio
import json
import time

import aio_pika
import nats
import pytest
import redis.asyncio
from nats.js.api import StreamConfig
from outage_kit import LIMIT, PATIENCE, arrived, config, outage, until

import batchqueue_async as bq
from batchqueue_async.export.config import RetryPolicy
from batchqueue_async.sinks.amqp import AmqpSink
from batchqueue_async.sinks.grpc import GrpcSink
from batchqueue_async.sinks.http import HttpSink
from batchqueue_async.sinks.http.formats import JsonArray
from batchqueue_async.sinks.http.remote_write import RemoteWrite
from batchqueue_async.sinks.nats import NatsSink
from batchqueue_async.sinks.otlp import OtlpHttpSink, OtlpSink
from batchqueue_async.sinks.otlp.request import SIGNALS
from batchqueue_async.sinks.redis import RedisSink
from batchqueue_async.testing import FaultProxy

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(6 * LIMIT)]

QUICK = {"timeout": 0.5, "connect_timeout": 0.5}


def rows(requests):
    return [row for request in requests for row in json.loads(request.body)]


def pairs(found):
    return [(row["id"], row["key"]) for row in found]


class TestOutage:
    async def test_http(self, http_server):
        async with FaultProxy(http_server.address) as proxy:
            sink = HttpSink(f"http://{proxy.address}/", format=JsonArray(key_field="key"), **QUICK)
            result = await outage(sink, proxy)
        result.check()
        found = rows(http_server.received())
        arrived(result.count, [row["id"] for row in found], pairs(found))

    @pytest.mark.parametrize("path", [None, "queue"], ids=["memory", "durable"])
    async def test_otlp(self, grpc_server, path, tmp_path):
        async with FaultProxy(grpc_server.address) as proxy:
            sink = OtlpSink(f"http://{proxy.address}", timeout=PATIENCE)
            place = None if path is None else tmp_path / path
            result = await outage(sink, proxy, lambda number: {"name": str(number)}, path=place)
        result.check()
        found = [SIGNALS["traces"].request().FromString(call.content) for call in grpc_server.received()]
        names = [span.name for request in found for span in request.resource_spans[0].scope_spans[0].spans]
        arrived(result.count, map(int, names))

    async def test_otlp_over_http(self, http_server):
        http_server.rules(status=200)
        async with FaultProxy(http_server.address) as proxy:
            sink = OtlpHttpSink(f"http://{proxy.address}", signal="traces", **QUICK)
            result = await outage(sink, proxy, lambda number: {"name": str(number)})
        result.check()
        found = [SIGNALS["traces"].request().FromString(each.body) for each in http_server.received()]
        names = [span.name for each in found for span in each.resource_spans[0].scope_spans[0].spans]
        arrived(result.count, map(int, names))

    async def test_remote_write_exactly_once(self, prometheus, request):
        """A sample that is there already is taken again without effect."""
        name, now = f"outage_{request.node.callspec.id}", int(time.time())
        async with FaultProxy(prometheus.address) as proxy:
            sink = HttpSink(f"http://{proxy.address}/api/v1/write", format=RemoteWrite(), **QUICK)
            sample = {"name": name, "timestamp": now}
            result = await outage(sink, proxy, lambda number: sample | {"labels": {"n": number}, "value": number})
        result.check()
        found = [int(labels["n"]) for labels, values in prometheus.samples(f"{name}[15m]") for _ in values]
        assert arrived(result.count, found) == 0

    async def test_grpc(self, grpc_server):
        async with FaultProxy(grpc_server.address) as proxy:
            sink = GrpcSink(
                f"http://{proxy.address}", method="/test.Store/PutAll", request=list, streaming=True, timeout=PATIENCE
            )
            result = await outage(sink, proxy, lambda number: str(number).encode())
        result.check()
        calls = grpc_server.received()
        arrived(result.count, [int(number) for call in calls for number in call.content.split(b"|")])
        contents = {(call.metadata["idempotency-key"], call.content) for call in calls}
        assert len({key for key, _ in contents}) == len(contents)  # the same key, the same records

    async def test_redis(self, redis_server, request):
        stream = f"outage-{request.node.callspec.id}"
        async with FaultProxy(redis_server.address) as proxy:
            result = await outage(RedisSink(f"redis://{proxy.address}", stream=stream, **QUICK), proxy)
        result.check()
        client = redis.asyncio.Redis(port=redis_server.port)
        found, last = [], "-"
        while page := await client.xrange(stream, min=last, count=2_000):  # fifty thousand at once take too long
            found += [(json.loads(entry[b"data"])["id"], entry[b"bq-key"]) for _, entry in page]
            last = b"(" + page[-1][0]
        await client.delete(stream)
        await client.aclose()
        arrived(result.count, [number for number, _ in found], found)

    async def test_nats_exactly_once(self, nats_server, request):
        name = f"outage-{request.node.callspec.id}"
        client = await nats.connect(f"nats://{nats_server.address}")
        stream = client.jetstream()
        await stream.add_stream(StreamConfig(name=name, subjects=[name]))
        try:
            async with FaultProxy(nats_server.address) as proxy:
                result = await outage(NatsSink(f"nats://{proxy.address}", subject=name, **QUICK), proxy)
            result.check()
            found = []
            subscription = await stream.pull_subscribe(name)
            while len(found) < (await stream.stream_info(name)).state.messages:
                for message in await subscription.fetch(500):
                    found.append(json.loads(message.data)["id"])
                    await message.ack()  # without it there is a limit on those under way
            assert arrived(result.count, found) == 0
        finally:
            await stream.delete_stream(name)
            await client.close()

    async def test_rabbitmq(self, rabbit_server, request):
        name = f"outage-{request.node.callspec.id}"
        connection = await aio_pika.connect(f"amqp://{rabbit_server.address}/")
        queue = await (await connection.channel()).declare_queue(name, durable=True)
        try:
            async with FaultProxy(rabbit_server.address) as proxy:
                sink = AmqpSink(f"amqp://{proxy.address}/", queue=name, timeout=1.0, connect_timeout=1.0)
                result = await outage(sink, proxy)
            result.check()
            found = []
            while message := await queue.get(no_ack=True, fail=False):
                found.append((json.loads(message.body)["id"], message.message_id))
            arrived(result.count, [number for number, _ in found], found)
        finally:
            await queue.delete(if_unused=False, if_empty=False)
            await connection.close()


class TestRefusals:
    async def test_ex_9_a_413_splits_down_to_the_record_that_is_too_large(self, http_server):
        http_server.rules(max_body=2_000)
        dead = []
        changes = {"on_dead_letter": lambda records, why: dead.append((records, why))}
        async with bq.Exporter(HttpSink(http_server.url), config(**changes)) as exporter:
            batch = [{"id": number, "text": "x" * (5_000 if number == 37 else 10)} for number in range(100)]
            await exporter.consume(batch)
            await exporter.flush(timeout=LIMIT)
            stats = exporter.stats()
        assert sorted(row["id"] for row in rows(http_server.received())) == [n for n in range(100) if n != 37]
        assert [[record["id"] for record in records] for records, _ in dead] == [[37]]
        assert "413" in dead[0][1]
        assert (stats.delivered, stats.dead_lettered) == (99, 1)
        assert stats.splits > 0
        assert stats.breaker_opens == 0

    async def test_ex_10_a_401_pauses_and_drops_nothing(self, http_server, tmp_path):
        token = tmp_path / "token"
        token.write_text("old")
        http_server.rules(token="new")
        async with bq.Exporter(HttpSink(http_server.url, token=f"file:{token}"), config()) as exporter:
            for number in range(10):
                await exporter.consume([{"id": number}])
            await until(lambda: exporter.stats().paused)
            assert exporter.stats().delivered == 0
            token.write_text("new")
            await exporter.flush(timeout=LIMIT)
            stats = exporter.stats()
        assert sorted(row["id"] for row in rows(http_server.received())) == list(range(10))
        assert (stats.delivered, stats.dead_lettered, stats.dropped_after) == (10, 0, 0)

    @pytest.mark.parametrize("kind", ["http", "grpc"])
    async def test_ex_3_what_a_server_asks_for_is_given(self, kind, request):
        loop = asyncio.get_running_loop()
        server = request.getfixturevalue(f"{kind}_server")
        if kind == "http":
            server.script({"status": 503, "headers": {"Retry-After": "1"}})
            sink, record = HttpSink(server.url), {"id": 1}
        else:
            server.script({"code": "RESOURCE_EXHAUSTED", "retry": 1.0})
            sink, record = OtlpSink(server.url), {"name": "1"}
        async with bq.Exporter(sink, config(retry=RetryPolicy(initial=0.05, max_delay=10.0))) as exporter:
            started = loop.time()
            await exporter.consume([record])
            await exporter.flush(timeout=LIMIT)
            assert loop.time() - started >= 1.0  # later is the machine's matter, sooner can't be
            assert exporter.stats().failures == {"server" if kind == "http" else "throttled": 1}
        assert len(server.received()) == 1

    async def test_a_poison_record_is_found_and_the_others_arrive(self, grpc_server):
        dead = []
        changes = {"on_dead_letter": lambda records, why: dead.extend(records)}
        async with bq.Exporter(OtlpSink(grpc_server.url), config(**changes)) as exporter:
            await exporter.consume([{"name": "a"}, {"poison": 1}, {"name": "b"}])
            await exporter.flush(timeout=LIMIT)
        assert dead == [{"poison": 1}]
        assert len(grpc_server.received()) == 1
