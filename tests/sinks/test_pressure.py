"""More that real servers do under load: credentials that are rotated, and refusals or stalls for too much."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import urllib.error
import urllib.request

import nats
import pytest
from nats.js.api import StreamConfig
from outage_kit import LIMIT, until
from servers.nats import NatsServer
from sink_places import (
    PATIENT,
    ClickHouse,
    Nats,
    OpenSearch,
    Rabbit,
    arrived,
    delivered_more,
    new_name,
    paused,
    under_load,
)

pytestmark = [pytest.mark.real_time(one_loop=True), pytest.mark.timeout(3 * LIMIT)]


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "password"
    path.write_text("one")
    return path


# --- credentials that are rotated


@pytest.mark.timeout(8 * LIMIT)  # the server's command takes long where the processors are busy
async def test_rabbitmq_with_a_password_that_is_rotated(rabbit_server, secret):
    place = Rabbit(rabbit_server, new_name())
    add = (
        f'U = <<"{place.name}">>, rabbit_auth_backend_internal:add_user(U, <<"one">>, <<"test">>), '
        'rabbit_auth_backend_internal:set_permissions(U, <<"/">>, <<".*">>, <<".*">>, <<".*">>, <<"test">>).'
    )
    async with place.ready(), place.proxied() as proxy:
        await asyncio.to_thread(rabbit_server.ctl, "eval", add)

        async def rotate(exporter):
            await asyncio.to_thread(rabbit_server.ctl, "change_password", place.name, "two")
            # A connection that is open stays; the next one is asked.
            await proxy.switch("reset")
            await proxy.switch("pass")
            await until(paused(exporter))
            secret.write_text("two")
            await delivered_more(exporter)

        sink = place.sink(proxy.address, user=place.name, password=f"file:{secret}", **PATIENT)
        # The server's command takes seconds, and what arrives is read message by message.
        count, stats, dead = await under_load(sink, place.record, rotate, pace=0.2)
        assert dead == []
        assert stats.failures["auth"] > 0
        arrived(place, await place.numbers(), range(count))


async def test_nats_with_a_password_that_is_rotated(secret, tmp_path):
    config = tmp_path / "nats.conf"

    def write(password):
        users = f'{{user: app, password: "{password}"}}, {{user: reader, password: "r"}}'
        config.write_text(f"authorization {{ users: [{users}] }}\n")

    write("one")
    server = NatsServer("-c", str(config))
    server.start()
    place = Nats(server, new_name())
    try:
        client = await nats.connect(f"nats://reader:r@{server.address}", error_cb=quiet)
        place.stream = client.jetstream()
        await place.stream.add_stream(StreamConfig(name=place.name, subjects=[place.name]))

        async def rotate(exporter):
            write("two")
            for step in (server.stop, server.start):  # this version loses its streams when it reads them anew by SIGHUP
                await asyncio.to_thread(step)
            await until(paused(exporter))
            secret.write_text("two")
            await delivered_more(exporter)

        sink = place.sink(server.address, user="app", password=f"file:{secret}", **PATIENT)
        count, stats, dead = await under_load(sink, place.record, rotate)
        assert dead == []
        assert stats.failures["auth"] > 0
        arrived(place, await place.numbers(), range(count))
        await client.close()
    finally:
        server.dispose()


async def quiet(_error):
    """The client would log that its server is away."""


class OldClickHouse(ClickHouse):
    """Debian's server, which has users; it knows no tokens, so that what is repeated may be there twice."""

    once = False

    @contextlib.asynccontextmanager
    async def ready(self):
        self.server.sql(f"CREATE TABLE {self.name} (id UInt64) ENGINE = MergeTree ORDER BY id")
        yield


def change_users(server, old, new):
    """Change the server's users: in one step, and with another second as its time, for the server looks at no more."""
    path = server.directory / "users.xml"
    text, before = path.read_text(), path.stat().st_mtime
    assert old in text
    fresh = path.with_suffix(".new")
    fresh.write_text(text.replace(old, new))
    os.utime(fresh, (before + 2, before + 2))
    fresh.replace(path)


async def test_clickhouse_with_a_password_that_is_rotated(clickhouse_server, secret):
    place = OldClickHouse(clickhouse_server, new_name())
    secret.write_text("right-password")

    async def rotate(exporter):
        change_users(clickhouse_server, "right-password", "two")  # the server looks every two seconds
        try:
            await until(paused(exporter))
            secret.write_text("two")
            await delivered_more(exporter)
        finally:
            change_users(clickhouse_server, "<password>two", "<password>right-password")
        await until(lambda: exporter.stats().pauses > 1)
        secret.write_text("right-password")
        await delivered_more(exporter)

    async with place.ready():
        sink = place.sink(clickhouse_server.address, user="tester", password=f"file:{secret}", **PATIENT)
        count, stats, dead = await under_load(sink, place.record, rotate)
        assert (dead, stats.breaker_opens) == ([], 0)
        assert stats.failures["auth"] > 0
        arrived(place, await place.numbers(), range(count))


class Gateway:
    """Asks for a password before it passes a request on, as what stands before an OpenSearch without its plugin."""

    def __init__(self, target):
        self.target = target
        self.password = "one"

    async def serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                body = await reader.readexactly(int(fields.get(b"content-length", 0)))
                wanted = base64.b64encode(f"app:{self.password}".encode()).decode()
                if f"Basic {wanted}".encode() not in head:
                    status, answer = 401, b"{}"
                else:
                    status, answer = await asyncio.to_thread(self.ask, head, body)
                start = (
                    f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n"
                )
                writer.write(start.encode() + answer)
                await writer.drain()
        writer.close()

    def ask(self, head, body):
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        kind = {"Content-Type": "application/x-ndjson"}
        request = urllib.request.Request(f"http://{self.target}{path}", body or None, kind, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


async def test_opensearch_with_a_password_that_is_rotated(opensearch, secret):
    place = OpenSearch(opensearch, new_name())
    gateway = Gateway(opensearch.address)
    listener = await asyncio.start_server(gateway.serve, "127.0.0.1")
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"

    async def rotate(exporter):
        gateway.password = "two"
        await until(paused(exporter))
        secret.write_text("two")
        await delivered_more(exporter)

    async with listener, place.ready():
        sink = place.sink(address, user="app", password=f"file:{secret}", **PATIENT)
        count, stats, dead = await under_load(sink, place.record, rotate)
        assert (dead, stats.breaker_opens) == ([], 0)
        assert stats.failures["auth"] > 0
        arrived(place, await place.numbers(), range(count))


# --- too much


async def test_clickhouse_with_too_many_queries_is_left_alone_for_a_while(clickhouse_server):
    """One query of the user at a time, and another one that takes a second."""
    place = OldClickHouse(clickhouse_server, new_name())
    limit = "<max_concurrent_queries_for_user>{}</max_concurrent_queries_for_user>"
    usual = "<max_memory_usage>"
    url = f"{clickhouse_server.url}/?user=tester&password=right-password"

    def occupy():
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(url, b"SELECT sleep(1)", timeout=20).close()

    async def crowd(exporter):
        change_users(clickhouse_server, usual, limit.format(1) + usual)
        try:
            while exporter.stats().failures.get("throttled", 0) < 3:
                await asyncio.to_thread(occupy)
        finally:
            change_users(clickhouse_server, limit.format(1), "")
        await delivered_more(exporter)

    async with place.ready():
        sink = place.sink(clickhouse_server.address, user="tester", password="right-password", **PATIENT)
        count, stats, dead = await under_load(sink, place.record, crowd)
        assert (dead, stats.breaker_opens) == ([], 0)
        assert stats.learned_rate is not None
        arrived(place, await place.numbers(), range(count))


@pytest.mark.timeout(8 * LIMIT)  # the server's command takes long where the processors are busy
async def test_a_rabbitmq_that_blocks_its_publishers_is_waited_for(rabbit_server):
    """Its memory alarm stops reading what publishers send; the connection stays, and nothing is answered."""
    place = Rabbit(rabbit_server, new_name())

    def watermark(size):
        rabbit_server.ctl("set_vm_memory_high_watermark", "absolute", size)

    async def block(exporter):
        try:
            await asyncio.to_thread(watermark, "1MB")
            await until(lambda: exporter.stats().failures.get("timeout", 0) > 0)
        finally:
            await asyncio.to_thread(watermark, "512MB")
        await delivered_more(exporter)

    async with place.ready():
        count, stats, dead = await under_load(place.sink(rabbit_server.address), place.record, block, pace=0.2)
        assert dead == []
        assert stats.records == 0
        arrived(place, await place.numbers(), range(count))


async def test_a_nats_stream_that_is_full_is_waited_for(nats_server):
    place = Nats(nats_server, new_name())
    async with place.ready():
        limits = {"name": place.name, "subjects": [place.name], "discard": "new"}
        await place.stream.update_stream(StreamConfig(max_msgs=100, **limits))

        async def fill(exporter):
            await until(lambda: exporter.stats().failures.get("server", 0) > 2)
            assert (await place.stream.stream_info(place.name)).state.messages == 100
            await place.stream.update_stream(StreamConfig(max_msgs=-1, **limits))
            await delivered_more(exporter)

        count, _, dead = await under_load(place.sink(nats_server.address, **PATIENT), place.record, fill)
        assert dead == []
        arrived(place, await place.numbers(), range(count))
