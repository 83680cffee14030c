"""NATS: pulls by the client's fetch, and the consumer."""

from __future__ import annotations

import uuid

from servers.nats import NatsServer

from batchqueue_async import intake

from .measuring import Measured, Meter, Row, compare


async def fill(server, stream: str, count: int) -> None:
    import nats
    from nats.js.api import StreamConfig

    client = await nats.connect(f"nats://{server.address}")
    await client.jetstream().add_stream(StreamConfig(name=stream, subjects=[f"{stream}.>"]))
    for at in range(0, count, 1000):
        for number in range(at, min(at + 1000, count)):
            await client.publish(f"{stream}.a", b"%010d" % number + b"x" * 90)
        await client.flush()
    while (await client.jetstream().stream_info(stream)).state.messages < count:
        await client.flush()
    await client.close()


async def fetch(server, stream: str, count: int) -> Measured:
    import nats

    client = await nats.connect(f"nats://{server.address}")
    subscription = await client.jetstream().pull_subscribe(f"{stream}.>", uuid.uuid4().hex[:8], stream=stream)
    meter = Meter(count)
    meter.begin()
    while not meter.done.is_set():
        found = await subscription.fetch(100, timeout=5)
        for message in found:
            await message.ack()
        meter.add(len(found))
    await client.flush()
    await client.close()
    return meter.measured()


async def ours(server, stream: str, count: int) -> Measured:
    meter = Meter(count)

    async def handle(message):
        meter.add()

    consumer = intake.NatsConsumer(
        f"nats://{server.address}",
        f"{stream}.>",
        handle,
        stream=stream,
        durable=uuid.uuid4().hex[:8],
        workers=32,
        prefetch=1000,
        dead_letters=intake.DROP,
    )
    async with consumer:
        meter.begin()
        await meter.done.wait()
    return meter.measured()


async def faststream(server, stream: str, count: int) -> Measured:
    from faststream.nats import JStream, NatsBroker, PullSub

    meter = Meter(count)
    broker = NatsBroker(f"nats://{server.address}", logger=None)

    @broker.subscriber(
        f"{stream}.>", stream=JStream(stream, declare=False), durable=uuid.uuid4().hex[:8], pull_sub=PullSub(100)
    )
    async def handle(body: bytes):
        meter.add()

    meter.begin()
    await broker.start()
    await meter.done.wait()
    await broker.stop()
    return meter.measured()


async def rows(turns: int, count: int) -> list[Row]:
    server = NatsServer()
    server.start()
    try:
        stream = "BENCH"
        await fill(server, stream, count)
        subjects = {
            "NATS: fetch(100), ack each": lambda: fetch(server, stream, count),
            "NATS: NatsConsumer, no-op handler": lambda: ours(server, stream, count),
        }
        against = {"NATS: NatsConsumer, no-op handler": ("NATS: fetch(100), ack each", 2.5)}
        try:
            import faststream as _  # noqa: F401
        except ImportError:
            print("FastStream is not installed: its rows are left out")
        else:
            subjects["NATS: FastStream, pull"] = lambda: faststream(server, stream, count)
            against["NATS: FastStream, pull"] = ("NATS: fetch(100), ack each", None)
        return await compare(subjects, turns, against)
    finally:
        server.dispose()
