"""Events of several types from one RabbitMQ queue, handled in batches by type; acknowledged when they are handled.

    python examples/rabbitmq_by_type.py amqp://guest:guest@localhost/ --publish 1000

The consumer decodes each message and delivers it to a batch queue, whose handlers get batches of one type each. A
message that can't be decoded goes to the queue `events.dead`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiormq
import pamqp.commands

import batchqueue_async as bq
from batchqueue_async import intake

if TYPE_CHECKING:
    from collections.abc import Sequence

QUEUE = "events"
BAD_ONE_IN = 100


@dataclass(frozen=True)
class Order:
    """Somebody bought something."""

    number: int


@dataclass(frozen=True)
class Visit:
    """Somebody looked at something."""

    number: int


KINDS = {"order": Order, "visit": Visit}


def decode(message: intake.Message) -> Order | Visit:
    """What a message says; anything else raises, and the message goes to the dead letters."""
    fields = json.loads(message.body)
    return KINDS[fields["kind"]](fields["number"])


async def publish(url: str, count: int) -> None:
    """Declare the queue, and fill it: one message in a hundred can't be decoded."""
    connection = await aiormq.connect(url)
    channel = await connection.channel()
    await channel.queue_declare(QUEUE, durable=True)
    for number in range(count):
        kind = "order" if number % 3 == 0 else "visit"
        body = b"{" if (number + 1) % BAD_ONE_IN == 0 else json.dumps({"kind": kind, "number": number}).encode()
        properties = pamqp.commands.Basic.Properties(delivery_mode=2)
        await channel.basic_publish(body, routing_key=QUEUE, properties=properties)
    await connection.close()


async def main(url: str, count: int) -> None:
    """Publish, then consume until everything has its outcome."""
    logging.getLogger("batchqueue_async").setLevel(logging.CRITICAL)  # what can't be decoded is counted below
    await publish(url, count)
    handled: Counter[str] = Counter()
    calls: Counter[str] = Counter()

    async def write_orders(batch: Sequence[Order]) -> None:
        handled["orders"] += len(batch)
        calls["orders"] += 1

    async def count_visits(batch: Sequence[Visit]) -> None:
        handled["visits"] += len(batch)
        calls["visits"] += 1

    options: dict[str, Any] = {
        "batch": bq.BatchPolicy(max_records=100, linger=0.05),
        "prefetch": 400,
        "decode": decode,
        "dead_letters": f"{QUEUE}.dead",
    }
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("events", bq.QueueConfig())
        queue.add_handler(Order, write_orders)
        queue.add_handler(Visit, count_visits)
        async with intake.AmqpConsumer(url, QUEUE, queue, **options) as consumer, asyncio.timeout(60):
            settled = 0
            while settled < count:
                await asyncio.sleep(0.05)
                stats = consumer.stats()
                settled = stats.acked + stats.dead_lettered
        stats = consumer.stats()
    print(f"{handled['orders']} orders in {calls['orders']} calls, {handled['visits']} visits in {calls['visits']}")
    print(f"{stats.dead_lettered} to {QUEUE}.dead")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the broker, as amqp://user:password@host/vhost")
    parser.add_argument(
        "--publish", type=int, default=1_000, metavar="N", help="messages to publish first (%(default)s)"
    )
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.publish))
