"""Real brokers for the scenarios that every lane has to pass: how to publish, to consume, and to look at what is left.

A lane adds a rig here; `test_real.py` runs every scenario with every rig.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import kafka_tools

import batchqueue_async as bq
from batchqueue_async import intake

QUICK = {
    "reconnect": bq.RetryPolicy(initial=0.05, max_delay=0.5),
    "connect_timeout": 3.0,
    "dead_letters": "dead.letters",
}


class NatsRig:
    name = "nats"

    def __init__(self, server):
        self.server = server
        self.mark = uuid.uuid4().hex[:8]
        self.stream, self.durable = f"S{self.mark}", "workers"
        self.dead = f"D{self.mark}"

    async def _client(self):
        import nats

        return await nats.connect(f"nats://{self.server.address}", allow_reconnect=False, connect_timeout=5)

    async def prepare(self):
        from nats.js.api import StreamConfig

        client = await self._client()
        stream = client.jetstream()
        await stream.add_stream(StreamConfig(name=self.stream, subjects=[f"{self.stream}.>"]))
        await stream.add_stream(StreamConfig(name=self.dead, subjects=[f"{self.dead}.>"]))
        await client.close()

    async def publish(self, bodies, *, key="a"):
        client = await self._client()
        stream = client.jetstream()
        futures = [await stream.publish_async(f"{self.stream}.{key}", body) for body in bodies]
        for future in futures:
            await future
        await client.close()

    def consumer(self, handler, *, address=None, **options):
        options = {**QUICK, "dead_letters": f"{self.dead}.x", **options}
        options.setdefault("ack_wait", 3.0)
        # Through a proxy a silent server is to be noticed soon; else a busy machine alone must end no session.
        options.setdefault("heartbeat", 5.0 if address is None else 0.5)
        return intake.NatsConsumer(
            f"nats://{address or self.server.address}",
            f"{self.stream}.>",
            handler,
            stream=self.stream,
            durable=self.durable,
            **options,
        )

    async def unsettled(self):
        client = await self._client()
        info = await client.jetstream().consumer_info(self.stream, self.durable)
        await client.close()
        return info.num_pending + info.num_ack_pending

    async def unacked(self):
        client = await self._client()
        info = await client.jetstream().consumer_info(self.stream, self.durable)
        await client.close()
        return info.num_ack_pending

    async def letters(self):
        client = await self._client()
        stream = client.jetstream()
        found = []
        for sequence in range(1, (await stream.stream_info(self.dead)).state.messages + 1):
            raw = await stream.get_msg(self.dead, sequence)
            found.append((raw.data, dict(raw.headers or {})))
        await client.close()
        return found


class RedisRig:
    name = "redis"

    def __init__(self, server):
        self.server = server
        self.stream = f"s-{uuid.uuid4().hex[:8]}"
        self.group = "workers"

    def _client(self):
        import redis.asyncio

        return redis.asyncio.Redis(port=self.server.port)

    async def prepare(self):
        pass

    async def publish(self, bodies, *, key=None):
        async with self._client() as client:
            pipeline = client.pipeline(transaction=False)
            for body in bodies:
                pipeline.xadd(self.stream, {"data": body, **({"bq-key": key} if key else {})})
            await pipeline.execute()

    def consumer(self, handler, *, address=None, **options):
        options = {**QUICK, "dead_letters": f"{self.stream}.dead", **options}
        options.setdefault("claim_after", 2.0)
        # As with NATS's heartbeats.
        options.setdefault("timeout", 60.0 if address is None else 1.0)
        return intake.RedisConsumer(
            f"redis://{address or self.server.address}",
            self.stream,
            handler,
            group=self.group,
            block=0.5,
            **options,
        )

    async def unsettled(self):
        async with self._client() as client:
            (group,) = await client.xinfo_groups(self.stream)
            return group["pending"] + (group["lag"] or 0)

    async def unacked(self):
        async with self._client() as client:
            (group,) = await client.xinfo_groups(self.stream)
            return group["pending"]

    async def letters(self):
        async with self._client() as client:
            return [
                (fields[b"data"], {name.decode(): value.decode() for name, value in fields.items()})
                for _, fields in await client.xrange(f"{self.stream}.dead")
            ]


class RabbitRig:
    name = "rabbitmq"

    def __init__(self, server):
        self.server = server
        self.queue = f"q-{uuid.uuid4().hex[:8]}"

    @contextlib.asynccontextmanager
    async def _channel(self):
        import aio_pika

        connection = await aio_pika.connect(f"amqp://{self.server.address}/")
        try:
            yield await connection.channel()
        finally:
            await connection.close()

    async def prepare(self):
        async with self._channel() as channel:
            await channel.declare_queue(self.queue, durable=True)

    async def publish(self, bodies, *, key=None):
        import aio_pika

        headers = {"key": key} if key else None
        async with self._channel() as channel:
            for body in bodies:
                message = aio_pika.Message(body, headers=headers, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                await channel.default_exchange.publish(message, self.queue)

    def consumer(self, handler, *, address=None, **options):
        options = {**QUICK, "dead_letters": f"{self.queue}.dead", **options}
        url = f"amqp://{address or self.server.address}/"
        return intake.AmqpConsumer(url, self.queue, handler, heartbeat=1, **options)

    async def _counts(self, column):
        # rabbitmqctl knows what is unacknowledged; the protocol tells of what is ready alone.
        listed = await asyncio.to_thread(self.server.ctl, "list_queues", "name", column, "--no-table-headers")
        return next((int(line.split()[1]) for line in listed.splitlines() if line.split()[0] == self.queue), 0)

    async def unsettled(self):
        async with self._channel() as channel:
            queue = await channel.declare_queue(self.queue, passive=True)
            if ready := queue.declaration_result.message_count:
                return ready  # the broker's command takes seconds
        return await self._counts("messages")

    async def unacked(self):
        return await self._counts("messages_unacknowledged")

    async def letters(self):
        found = []
        async with self._channel() as channel:
            queue = await channel.declare_queue(f"{self.queue}.dead", durable=True)
            while letter := await queue.get(fail=False):
                found.append((letter.body, {name: str(value) for name, value in letter.headers.items()}))
        return found


class KafkaRig:
    """One partition, so that what was handled first is committed first."""

    name = "kafka"

    def __init__(self, server):
        self.server = server
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        self.dead = f"{self.topic}.dead"
        self.group = f"g-{self.topic}"

    async def prepare(self):
        await kafka_tools.create(self.server, self.topic)
        await kafka_tools.create(self.server, self.dead)

    async def publish(self, bodies, *, key=None):
        import aiokafka

        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=self.server.address)
        await producer.start()
        try:
            for body in bodies:
                await producer.send(self.topic, body, key=None if key is None else key.encode())
            await producer.flush()
        finally:
            await producer.stop()

    def consumer(self, handler, *, address=None, **options):
        options = {**QUICK, "dead_letters": self.dead, **options}
        return intake.KafkaConsumer(
            address or self.server.address,
            self.topic,
            handler,
            group=self.group,
            session_timeout=2.0,
            rebalance_timeout=10.0,
            **options,
        )

    async def unsettled(self):
        import aiokafka

        place = aiokafka.TopicPartition(self.topic, 0)
        client = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=self.server.address, group_id=self.group, enable_auto_commit=False
        )
        client.assign([place])
        await client.start()
        try:
            return (await client.end_offsets([place]))[place] - (await client.committed(place) or 0)
        finally:
            await client.stop()

    async def letters(self):
        return [
            (record.value, {name: value.decode() for name, value in record.headers})
            for record in await kafka_tools.read(self.server, self.dead)
        ]


RIGS = {
    "rabbitmq": ("rabbit_server", RabbitRig),
    "nats": ("nats_server", NatsRig),
    "redis": ("redis_server", RedisRig),
    "kafka": ("kafka", KafkaRig),
}
"""What the rigs are called, with the fixture of their server."""
