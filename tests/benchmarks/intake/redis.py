"""Redis: bare XREADGROUP and XACK, and the consumer in batches."""

from __future__ import annotations

import uuid

from servers.redis import RedisServer

import batchqueue_async as bq
from batchqueue_async import intake

from .measuring import Measured, Meter, Row, compare


async def fill(server, count: int) -> None:
    import redis.asyncio

    async with redis.asyncio.Redis(port=server.port) as client:
        for at in range(0, count, 1000):
            pipeline = client.pipeline(transaction=False)
            for number in range(at, min(at + 1000, count)):
                pipeline.xadd("bench", {"data": b"%010d" % number + b"x" * 90})
            await pipeline.execute()


async def bare(server, count: int) -> Measured:
    import redis.asyncio

    from batchqueue_async.intake.redis.session import entries_of

    group = uuid.uuid4().hex[:8]
    meter = Meter(count)
    async with redis.asyncio.Redis(port=server.port) as client:
        await client.xgroup_create("bench", group, id="0")
        meter.begin()
        while not meter.done.is_set():
            found = entries_of(await client.xreadgroup(group, "one", {"bench": ">"}, count=100, block=1000))
            await client.xack("bench", group, *(entry for entry, _ in found))
            meter.add(len(found))
    return meter.measured()


async def ours(server, count: int) -> Measured:
    meter = Meter(count)

    async def handle(batch):
        meter.add(len(batch))

    consumer = intake.RedisConsumer(
        f"redis://{server.address}",
        "bench",
        handle,
        group=uuid.uuid4().hex[:8],
        workers=4,
        prefetch=400,
        batch=bq.BatchPolicy(max_records=100, linger=0.0),
        dead_letters=intake.DROP,
    )
    async with consumer:
        meter.begin()
        await meter.done.wait()
    return meter.measured()


async def rows(turns: int, count: int) -> list[Row]:
    server = RedisServer()
    server.start()
    try:
        await fill(server, count)
        return await compare(
            {
                "Redis: bare xreadgroup(100), xack": lambda: bare(server, count),
                "Redis: RedisConsumer, batches of 100": lambda: ours(server, count),
            },
            turns,
            {"Redis: RedisConsumer, batches of 100": ("Redis: bare xreadgroup(100), xack", 0.9)},
        )
    finally:
        server.dispose()
