"""A consumer that is killed: its first message never ends, and it says how many others are acknowledged."""

from __future__ import annotations

import asyncio
import sys

from batchqueue_async import intake


async def handle(message: intake.Message) -> None:
    if message.body == b"first":
        await asyncio.sleep(3600)


async def main(url: str, queue: str) -> None:
    async with intake.AmqpConsumer(
        url, queue, handle, workers=4, prefetch=20, dead_letters=intake.DROP, handler_timeout=None
    ) as consumer:
        while consumer.stats().acked < 40:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # until the acknowledgements have been taken
        print("acked 40", flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
