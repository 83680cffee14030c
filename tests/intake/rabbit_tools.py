"""A queue of the real RabbitMQ, seen from the other side."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aio_pika

from batchqueue_async.intake.ports import Plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LIMIT = 30.0


def plan(**changes: Any) -> Plan:
    options = {"name": "test", "workers": 8, "prefetch": 100, "prefetch_bytes": 1 << 20, "dead_letters": None}
    return Plan(**(options | changes))


class Side:
    """Publishes to a queue and looks into it."""

    def __init__(self, server: Any, name: str) -> None:
        self.server = server
        self.name = name
        self.url = f"amqp://{server.address}/"

    async def connect(self) -> None:
        self.connection = await aio_pika.connect(self.url)
        self.channel = await self.connection.channel()

    async def declare(self, name: str | None = None, **arguments: Any) -> None:
        await self.channel.declare_queue(name or self.name, durable=True, arguments=arguments or None)

    async def publish(self, *bodies: bytes, to: str | None = None, **properties: Any) -> None:
        for body in bodies:
            message = aio_pika.Message(body, **properties)
            await self.channel.default_exchange.publish(message, to or self.name)

    async def count(self, name: str | None = None) -> int:
        """The messages that are ready."""
        found = await self.channel.declare_queue(name or self.name, passive=True)
        return found.declaration_result.message_count

    async def reaches(self, count: int, name: str | None = None) -> None:
        async with asyncio.timeout(LIMIT):
            while await self.count(name) != count:
                await asyncio.sleep(0.02)

    async def drain(self, name: str | None = None) -> list[Any]:
        """Take everything out."""
        queue = await self.channel.get_queue(name or self.name)
        found = []
        while message := await queue.get(no_ack=True, fail=False):
            found.append(message)
        return found

    async def delete(self, *names: str) -> None:
        for name in names or (self.name,):
            await self.channel.queue_delete(name)


@contextlib.asynccontextmanager
async def side(server: Any, name: str, **arguments: Any) -> AsyncIterator[Side]:
    """A queue of its own for a test."""
    found = Side(server, name)
    await found.connect()
    await found.delete(name, f"{name}.dead", *(f"{name}.retry.{1 << power}" for power in range(7)))
    await found.declare(**arguments)
    try:
        yield found
    finally:
        with contextlib.suppress(Exception):
            if found.connection.is_closed:
                await found.connect()
            await found.delete(name, f"{name}.dead", *(f"{name}.retry.{1 << power}" for power in range(7)))
        await found.connection.close()
