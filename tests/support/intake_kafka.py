"""Consumers of Kafka under test: what is produced, what was handled, what the group has committed."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from contextlib import asynccontextmanager
from itertools import count

import aiokafka
import aiokafka.errors
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

import batchqueue_async as bq
from batchqueue_async.intake import DROP
from batchqueue_async.intake.kafka import KafkaConsumer

_numbers = count()

# A group that notices within a second what it would notice in half a minute.
FAST = {
    "session_timeout": 2.0,
    "rebalance_timeout": 10.0,
    "stall_timeout": 30.0,
    "retry": bq.RetryPolicy(initial=0.05, max_attempts=4),
}


async def until(condition, seconds=60.0, step=0.02):
    """Wait for something that is on its way, and fail when it does not come."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(step)


class Topic:
    """A topic of its own, with what was handled of it."""

    def __init__(self, kafka, name, partitions):
        self.kafka = kafka
        self.name = name
        self.group = f"g-{name}"
        self.partitions = partitions
        self.handled = Counter()
        self.by_key = {}
        self.sent = 0

    async def send(self, count, *, partition=None, key=None, size=0, keys=0, key_of=None):
        """Produce messages `m0`, `m1` and so on, over all partitions in turn."""
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=self.kafka.address, linger_ms=5)
        await producer.start()
        try:
            for number in range(self.sent, self.sent + count):
                where = number % self.partitions if partition is None else partition
                mark = key_of(number) if key_of else key if not keys else b"k%d" % (number % keys)
                await producer.send(self.name, b"m%d" % number + b"." * size, key=mark, partition=where)
            await producer.flush()
        finally:
            await producer.stop()
        self.sent += count

    def note(self, message):
        """Count a message as handled."""
        number = int(message.body.rstrip(b".")[1:])
        self.handled[number] += 1
        self.by_key.setdefault((message.partition, message.key), []).append(message.offset)

    @property
    def complete(self):
        return len(self.handled) >= self.sent

    @property
    def twice(self):
        return sum(times - 1 for times in self.handled.values())

    async def committed(self):
        """The group's offsets, by partition; None where there is none."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self._committed()
                except aiokafka.errors.KafkaError as error:
                    if not error.retriable:
                        raise
                await asyncio.sleep(0.1)  # a broker that has just begun knows neither itself nor its coordinator

    async def _committed(self):
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka.address)
        await admin.start()
        try:
            found = await admin.list_consumer_group_offsets(self.group)
        finally:
            await admin.close()
        by_number = {place.partition: mark.offset for place, mark in found.items() if place.topic == self.name}
        return [by_number.get(number) for number in range(self.partitions)]

    async def ends(self, isolation="read_uncommitted"):
        """The end of each partition."""
        consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=self.kafka.address, isolation_level=isolation)
        await consumer.start()
        try:
            places = [aiokafka.TopicPartition(self.name, number) for number in range(self.partitions)]
            found = await consumer.end_offsets(places)
        finally:
            await consumer.stop()
        return [found[place] for place in places]

    def consumer(self, handler=None, **options):
        """A consumer of the topic; without a handler it notes what it gets."""

        async def note(message):
            self.note(message)

        options = {"group": self.group, "dead_letters": DROP, "workers": 8, **FAST, **options}
        return KafkaConsumer(options.pop("bootstrap", self.kafka.address), self.name, handler or note, **options)


async def make_topic(kafka, partitions=1, **configs):
    """A new topic."""
    name = f"in{next(_numbers)}-{uuid.uuid4().hex[:6]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=configs)])
    finally:
        await admin.close()
    return Topic(kafka, name, partitions)


@asynccontextmanager
async def members(topic, number, handler=None, **options):
    """Members of one group, which have joined one after the other."""
    made = [topic.consumer(handler, name=f"{topic.group}-{each}", **options) for each in range(number)]
    try:
        for each in made:
            await each.__aenter__()
        yield made
    finally:
        for each in made:
            await each.shutdown()
