"""What tests of Kafka look into a topic with."""

from __future__ import annotations

import asyncio

import aiokafka
from aiokafka.admin import AIOKafkaAdminClient, NewTopic


async def create(kafka, topic, partitions=1, **configs):
    """Make a topic."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    # A broker that its controller has not heard for a moment, as on a machine that is busy, has no controller.
    while admin._client.cluster.controller is None:
        await admin._client.force_metadata_update()
        await asyncio.sleep(0.1)
    await admin.create_topics([NewTopic(topic, partitions, 1, topic_configs=configs)])
    await admin.close()


async def read(kafka, topic):
    """All committed messages of a topic, by partition."""
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed", "enable_auto_commit": False}
    consumer = aiokafka.AIOKafkaConsumer(topic, bootstrap_servers=kafka.address, **options)
    await consumer.start()
    try:
        places = sorted(consumer.assignment())
        ends = await consumer.end_offsets(places)
        found = []
        for place in places:
            while await consumer.position(place) < ends[place]:
                found += (await consumer.getmany(place, timeout_ms=200)).get(place, [])
        return found
    finally:
        await consumer.stop()
