"""A member of a group in a process of its own, to be killed: notes what it has handled in a file."""

from __future__ import annotations

import asyncio
import os
import sys

from batchqueue_async import intake


async def main(bootstrap: str, topic: str, group: str, path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def handle(message: intake.Message) -> None:
        await asyncio.sleep(0.002)
        os.write(file, message.body + b"\n")

    consumer = intake.KafkaConsumer(
        bootstrap, topic, handle, group=group, dead_letters=intake.DROP, workers=8, session_timeout=1.5,
        ordered_by=intake.KEY,
    )  # fmt: skip
    async with consumer:
        await consumer.closed()


asyncio.run(main(*sys.argv[1:]))
