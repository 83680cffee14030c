"""The Kafka sink beside aiokafka: records of 100 bytes, 500 a batch, confirmed by all replicas before the next one."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING

import aiokafka

from batchqueue_async.sinks.kafka import KafkaSink
from tests.servers.kafka import Kafka

from .measuring import Comparison, Row, compare, timed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOPIC = "bench"
RECORDS = 500
BATCH = [b"%0100d" % number for number in range(RECORDS)]
PLAIN, HAND = "aiokafka send of each record", "aiokafka create_batch / send_batch by hand"
SINK, KEYED = "KafkaSink.send", "KafkaSink.send_keyed, a key in each header"


@asynccontextmanager
async def producing(address: str, **options: object) -> AsyncIterator[aiokafka.AIOKafkaProducer]:
    """A producer with the sink's guarantees."""
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=address, enable_idempotence=True, acks="all", **options)
    await producer.start()
    try:
        await producer.send_and_wait(TOPIC, b"first")
        yield producer
    finally:
        await producer.stop()


async def rows(turns: int, batches: int) -> list[Row]:
    """The table's rows."""
    server = Kafka()
    server.start()
    numbers = count()

    async def plain(count: int) -> float:
        async with producing(server.address) as producer:

            async def send(_: int) -> None:
                await asyncio.gather(*[await producer.send(TOPIC, record) for record in BATCH])

            return await timed(send, count, RECORDS)

    async def hand(count: int) -> float:
        async with producing(server.address, max_batch_size=1_000_000) as producer:

            async def send(number: int) -> None:
                batch = producer.create_batch()
                for record in BATCH:
                    batch.append(key=None, value=record, timestamp=None)
                await (await producer.send_batch(batch, TOPIC, partition=number % 3))

            return await timed(send, count, RECORDS)

    async def sink(count: int, *, keyed: bool = False) -> float:
        subject = KafkaSink(server.address, TOPIC)
        await subject.open()
        try:
            await subject.send([b"first"])
            if not keyed:
                return await timed(lambda _: subject.send(BATCH), count, RECORDS)
            keys = [[f"0123456789abcdef/{next(numbers)}" for _ in BATCH] for _ in range(count)]
            return await timed(lambda number: subject.send_keyed(BATCH, keys[number]), count, RECORDS)
        finally:
            await subject.close()

    try:
        return await compare(
            {PLAIN: plain, HAND: hand, SINK: sink, KEYED: lambda count: sink(count, keyed=True)},
            [
                Comparison(SINK, PLAIN, 1.5),
                Comparison(SINK, HAND, 0.9),
                Comparison(KEYED, PLAIN, 1.5),
                Comparison(KEYED, HAND, None),
            ],
            turns=turns,
            batches=batches,
        )
    finally:
        server.dispose()
