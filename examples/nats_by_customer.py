"""Orders from a NATS stream, each customer's one after the other, while the payment service fails now and then.

    python examples/nats_by_customer.py nats://localhost --publish 500

An order whose payment fails keeps its customer's place until it goes through; other customers go on meanwhile. An order
that is not to be paid at all goes to the subject `dead.orders`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import defaultdict
from typing import Any

import nats
from nats.js.api import StreamConfig

import batchqueue_async as bq
from batchqueue_async import intake

CUSTOMERS = 20
FAILS_ONE_IN = 50
REFUSED_ONE_IN = 100


class Payments:
    """A payment service that fails at first for some orders."""

    def __init__(self) -> None:
        self.paid: defaultdict[str | bytes | None, list[int]] = defaultdict(list)

    async def pay(self, message: intake.Message) -> None:
        """Pay an order; returning acknowledges it, raising has it tried again."""
        number = int(message.body)
        await asyncio.sleep(0.001)
        if number % REFUSED_ONE_IN == 0:
            raise bq.PermanentError("cancelled")  # no attempt would help
        if number % FAILS_ONE_IN == 1 and message.attempt == 1:
            raise ConnectionError("the payment service is away")
        self.paid[message.key].append(number)


async def publish(url: str, count: int) -> None:
    """Make the streams of orders and dead letters, and fill the first; orders count from 1."""
    client = await nats.connect(url)
    stream = client.jetstream()
    for name, subject in (("ORDERS", "orders.>"), ("DEAD", "dead.>")):
        await stream.add_stream(StreamConfig(name=name, subjects=[subject]))
    for number in range(1, count + 1):
        await stream.publish(f"orders.{number % CUSTOMERS}", b"%d" % number)
    await client.close()


async def main(url: str, count: int) -> None:
    """Publish, then consume until everything has its outcome."""
    logging.getLogger("batchqueue_async").setLevel(logging.CRITICAL)  # failures are part of it, and counted below
    await publish(url, count)
    payments = Payments()
    options: dict[str, Any] = {
        "stream": "ORDERS",
        "durable": "payments",
        "ordered_by": lambda message: message.key,  # the subject, which names the customer
        "workers": 16,
        "retry": bq.RetryPolicy(initial=0.1, max_attempts=5),
        "dead_letters": "dead.orders",
    }
    async with intake.NatsConsumer(url, "orders.>", payments.pay, **options) as consumer, asyncio.timeout(120):
        settled = 0
        while settled < count:
            await asyncio.sleep(0.05)
            stats = consumer.stats()
            settled = stats.acked + stats.dead_lettered
    paid = payments.paid.values()
    print(f"{sum(map(len, paid))} paid, {stats.dead_lettered} to dead.orders, {stats.failures} calls failed")
    print(f"each customer's in order: {all(numbers == sorted(numbers) for numbers in paid)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the server, as nats://host:4222")
    parser.add_argument("--publish", type=int, default=500, metavar="N", help="orders to publish first (%(default)s)")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.publish))
