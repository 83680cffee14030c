"""Each consumer with credentials by reference and over TLS, against its real server; and with wrong ones."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from intake_rigs import QUICK, KafkaRig, NatsRig, RabbitRig, RedisRig
from servers.base import provide
from servers.nats import NatsServer
from servers.redis import RedisServer

import batchqueue_async as bq
from batchqueue_async import intake
from batchqueue_async.sinks._shared.tls import Tls

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(120)]
USER, RIGHT, WRONG = "tester", "right-password", "wr0ng-password"


@pytest.fixture(scope="module")
def nats_door(certificate_files):
    cert, key = map(str, certificate_files)
    options = ("--tls", "--tlscert", cert, "--tlskey", key, "--user", USER, "--pass", RIGHT)
    server = provide("nats", lambda: NatsServer(*options))
    yield server
    server.dispose()


@pytest.fixture(scope="module")
def redis_door(certificate_files):
    server = provide("redis", lambda: RedisServer(certificate_files))
    yield server
    server.dispose()


class Kafka(KafkaRig):
    right = RIGHT

    def door(self, handler, tls, **options):
        return intake.KafkaConsumer(
            self.server.tls_address,
            self.topic,
            handler,
            group=self.group,
            user=USER,
            tls=Tls(ca=self.server.certificate) if tls is None else tls,
            **{**QUICK, "dead_letters": self.dead, **options},
        )


class Rabbit(RabbitRig):
    right = "guest"  # the broker's own; its command for others takes seconds

    def door(self, handler, tls, **options):
        return intake.AmqpConsumer(
            f"amqps://127.0.0.1:{self.server.tls_port}/",
            self.queue,
            handler,
            user="guest",
            tls=Tls(ca=self.server.certificate[0]) if tls is None else tls,
            **{**QUICK, "dead_letters": f"{self.queue}.dead", **options},
        )


class Nats(NatsRig):
    right = RIGHT

    async def _client(self):
        import nats

        context = Tls(verify=False).context()
        return await nats.connect(f"tls://{self.server.address}", user=USER, password=RIGHT, tls=context)

    def door(self, handler, tls, **options):
        return intake.NatsConsumer(
            f"tls://{self.server.address}",
            f"{self.stream}.>",
            handler,
            stream=self.stream,
            durable=self.durable,
            user=USER,
            tls=Tls(ca=self.ca) if tls is None else tls,
            **{**QUICK, "dead_letters": f"{self.dead}.x", **options},
        )


class Redis(RedisRig):
    right = RIGHT

    def _client(self):
        import redis.asyncio

        return redis.asyncio.Redis(port=self.server.port, ssl=True, ssl_cert_reqs="none")

    async def prepare(self):
        async with self._client() as client:
            await client.acl_setuser(
                USER, enabled=True, reset=True, passwords=[f"+{RIGHT}"], keys=["*"], commands=["+@all"]
            )

    def door(self, handler, tls, **options):
        return intake.RedisConsumer(
            f"rediss://{self.server.address}",
            self.stream,
            handler,
            group=self.group,
            user=USER,
            block=0.3,
            tls=Tls(ca=self.ca) if tls is None else tls,
            **{**QUICK, "dead_letters": f"{self.stream}.dead", **options},
        )


DOORS = {
    "kafka": ("kafka", Kafka),
    "rabbitmq": ("rabbit_server", Rabbit),
    "nats": ("nats_door", Nats),
    "redis": ("redis_door", Redis),
}


@pytest.fixture(params=DOORS)
async def door(request, certificate_files, monkeypatch):
    fixture, make = DOORS[request.param]
    made = make(request.getfixturevalue(fixture))
    made.ca = certificate_files[0]
    monkeypatch.setenv("INTAKE_PASSWORD", made.right)
    await made.prepare()
    return made


async def handle(message):
    if message.body == b"bad":
        raise bq.PermanentError("no")


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def test_the_right_ones_consume_and_bury(door):
    await door.publish([b"good", b"bad"])
    async with door.door(handle, None, password="env:INTAKE_PASSWORD") as consumer:
        await until(lambda: consumer.stats().acked + consumer.stats().dead_lettered == 2)
    assert [body for body, _ in await door.letters()] == [b"bad"]
    assert RIGHT not in repr(vars(consumer))


async def test_wrong_ones_are_refused_at_once_and_not_shown(door, logs):
    with pytest.raises(bq.AuthError) as told:
        async with door.door(handle, None, password=WRONG):
            pass
    assert WRONG not in str(told.value)
    assert not [each for each in logs if WRONG in repr(each)]


async def test_a_certificate_that_nobody_trusts_is_no_connection(door):
    async with door.door(handle, True, password=door.right, connect_timeout=2.0) as consumer:
        stats = consumer.stats()
        assert (stats.state, stats.received) == ("connecting", 0)
        assert stats.last_error
        await consumer.shutdown(0)


async def test_credentials_that_are_changed_are_read_at_the_next_connection(redis_door, certificate_files, monkeypatch):
    rig = Redis(redis_door)
    rig.ca = certificate_files[0]
    await rig.prepare()
    monkeypatch.setenv("INTAKE_PASSWORD", RIGHT)
    await rig.publish([b"before"])
    async with rig.door(handle, None, password="env:INTAKE_PASSWORD") as consumer:
        await until(lambda: consumer.stats().acked == 1)
        fresh = uuid.uuid4().hex
        async with rig._client() as client:
            await client.acl_setuser(
                USER, enabled=True, reset=True, passwords=[f"+{fresh}"], keys=["*"], commands=["+@all"]
            )
            await client.execute_command("CLIENT", "KILL", "USER", USER)
        # It was right once, so a refusal now is an outage: it goes on trying.
        await until(lambda: consumer.stats().last_error == "AuthError")
        monkeypatch.setenv("INTAKE_PASSWORD", fresh)
        await rig.publish([b"after"])
        await until(lambda: consumer.stats().acked == 2)
        assert consumer.stats().reconnects == 1
