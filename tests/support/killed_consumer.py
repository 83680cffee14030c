"""A consumer in a process of its own, which writes down what it has handled until it is killed."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from batchqueue_async import intake


async def main() -> None:
    kind, options, path = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def handle(message: intake.Message) -> None:
        await asyncio.sleep(0.005)
        os.write(file, message.body + b"\n")

    make = {"nats": intake.NatsConsumer, "rabbitmq": intake.AmqpConsumer, "redis": intake.RedisConsumer}[kind]
    positional = [options.pop("url"), options.pop("source")]
    async with make(*positional, handle, workers=8, prefetch=100, **options) as consumer:
        await consumer.closed()


asyncio.run(main())
