"""A connection that the server refuses is closed when the sink or the consumer is, and not some time after."""

from __future__ import annotations

import asyncio
import ssl

import pytest

import batchqueue_async as bq
from batchqueue_async import intake
from batchqueue_async.sinks._shared import redis_client
from batchqueue_async.sinks._shared.tls import Tls
from batchqueue_async.sinks.redis import RedisSink

pytestmark = pytest.mark.real_time


class Refusing:
    """A server that speaks TLS and as much of Redis' protocol as it takes to refuse a password."""

    def __init__(self, certificate, *, says_goodbye=True):
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(*certificate)
        self.tls = Tls(ca=certificate[0])
        self.says_goodbye = says_goodbye
        self.begun = self.ended = 0
        self.lost = asyncio.Event()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=self.context)
        self.url = f"rediss://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.server.close()
        await self.server.wait_closed()

    async def serve(self, reader, writer):
        self.begun += 1
        try:
            await reader.read(1_000)
            writer.write(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n")
            await writer.drain()
            if not self.says_goodbye:
                writer.transport.pause_reading()
                async with asyncio.timeout(60):
                    await self.lost.wait()
                return
            writer.transport.pause_reading()
            await asyncio.sleep(0.05)
            writer.transport.resume_reading()
            while await reader.read(1_000):
                pass
            self.ended += 1
        finally:
            writer.transport.abort()


async def handle(message):
    raise AssertionError("nothing comes")


async def refused_sink(server):
    sink = RedisSink(server.url, stream="s", password="wrong", tls=server.tls)
    await sink.open()
    with pytest.raises(bq.AuthError):
        await sink.send([{"a": 1}])
    await sink.close()


async def refused_consumer(server):
    options = {"group": "g", "dead_letters": intake.DROP, "password": "wrong", "tls": server.tls}
    with pytest.raises(bq.AuthError):
        async with intake.RedisConsumer(server.url, "s", handle, **options):
            pass


@pytest.mark.parametrize("refused", [refused_sink, refused_consumer])
async def test_x_44_a_refused_connection_is_closed_when_its_owner_is(refused, certificate_files, monkeypatch):
    monkeypatch.setattr(redis_client, "GRACE", 60.0)
    async with Refusing(certificate_files) as server:
        await refused(server)
        assert server.begun == server.ended >= 1


@pytest.mark.parametrize("refused", [refused_sink, refused_consumer])
async def test_x_44_a_server_that_never_says_good_bye_holds_nobody_up(refused, certificate_files, monkeypatch):
    monkeypatch.setattr(redis_client, "GRACE", 0.05)
    async with Refusing(certificate_files, says_goodbye=False) as server:
        await refused(server)
        server.lost.set()
        assert server.begun >= 1
