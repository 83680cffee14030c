"""Where the events of a soak go: each server with its sink, and which numbers it holds in the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import kafka_tools
from servers.kafka import Kafka
from servers.nats import NatsServer
from servers.postgres import Postgres
from servers.rabbitmq import RabbitServer
from servers.redis import RedisServer

from batchqueue_async.sinks.amqp import AmqpSink
from batchqueue_async.sinks.kafka import KafkaSink
from batchqueue_async.sinks.nats import NatsSink
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.sinks.redis import RedisSink

if TYPE_CHECKING:
    from batchqueue_async.sinks.base import Sink

NAME = "soak"
"""The table, stream, topic or queue."""
PATIENCE = 60.0
"""Seconds for an answer of a server when its numbers are read: it may just have been started."""


class Destination(Protocol):
    """One server and its sink."""

    server: Any

    async def prepare(self) -> None:
        """Make what the sink does not."""

    def sink(self) -> Sink:
        """What sends to it."""

    async def numbers(self) -> list[int]:
        """The numbers that arrived."""


class InPostgres:
    def __init__(self) -> None:
        self.server = Postgres()

    async def prepare(self) -> None:
        """The sink makes its table."""

    def sink(self) -> Sink:
        return PostgresSink(self.server.dsn, NAME, upsert_on=["n"])

    async def numbers(self) -> list[int]:
        return [int(line) for line in await asyncio.to_thread(self.server.sql, f"SELECT n FROM {NAME}")]


class InRedis:
    def __init__(self) -> None:
        self.server = RedisServer()

    async def prepare(self) -> None:
        """A stream is there with its first entry."""

    def sink(self) -> Sink:
        return RedisSink(f"redis://{self.server.address}", stream=NAME, rows=True)

    async def numbers(self) -> list[int]:
        import redis.asyncio

        async with redis.asyncio.Redis.from_url(f"redis://{self.server.address}", socket_timeout=PATIENCE) as client:
            found: list[int] = []
            last = "-"
            while entries := await client.xrange(NAME, min=last, count=10_000):
                found += [int(fields[b"n"]) for _, fields in entries]
                last = f"({entries[-1][0].decode()}"
            return found


class InKafka:
    def __init__(self) -> None:
        self.server = Kafka()

    async def prepare(self) -> None:
        await kafka_tools.create(self.server, NAME)

    def sink(self) -> Sink:
        return KafkaSink(self.server.address, topic=NAME, value=lambda row: str(row["n"]).encode())

    async def numbers(self) -> list[int]:
        return [int(message.value) for message in await kafka_tools.read(self.server, NAME)]


class InNats:
    def __init__(self) -> None:
        self.server = NatsServer()

    async def prepare(self) -> None:
        import nats

        client = await nats.connect(f"nats://{self.server.address}")
        await client.jetstream().add_stream(name=NAME, subjects=[NAME])
        await client.close()

    def sink(self) -> Sink:
        return NatsSink(f"nats://{self.server.address}", subject=NAME)

    async def numbers(self) -> list[int]:
        import nats

        client = await nats.connect(f"nats://{self.server.address}", connect_timeout=PATIENCE)
        try:
            stream = client.jetstream(timeout=PATIENCE)
            left = (await stream.stream_info(NAME)).state.messages
            subscription = await stream.pull_subscribe(NAME, durable="judge")
            found: list[int] = []
            while len(found) < left:
                for message in await subscription.fetch(min(1_000, left - len(found)), timeout=PATIENCE):
                    found.append(_number(message.data))
                    await message.ack()
            return found
        finally:
            await client.close()


class InRabbit:
    def __init__(self) -> None:
        self.server = RabbitServer(None)

    async def prepare(self) -> None:
        """The sink declares its queue."""

    def sink(self) -> Sink:
        return AmqpSink(f"amqp://{self.server.address}/", queue=NAME)

    async def numbers(self) -> list[int]:
        import aio_pika

        async with await aio_pika.connect(f"amqp://{self.server.address}/", timeout=PATIENCE) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=1_000)
            queue = await channel.declare_queue(NAME, passive=True)
            left = queue.declaration_result.message_count
            found: list[int] = []
            if left:
                async with queue.iterator(no_ack=True, timeout=PATIENCE) as messages:
                    async for message in messages:
                        found.append(_number(message.body))
                        if len(found) == left:
                            break
            return found


def _number(body: bytes) -> int:
    import msgspec

    return msgspec.json.decode(body)["n"]


KINDS: dict[str, type[Destination]] = {
    "postgres": InPostgres,
    "redis": InRedis,
    "kafka": InKafka,
    "nats": InNats,
    "rabbitmq": InRabbit,
}


def start(names: list[str], found: dict[str, Destination]) -> None:
    """Start the servers; those that are up are in `found` even where the next one fails."""
    for name in names:
        found[name] = KINDS[name]()
        found[name].server.start()
