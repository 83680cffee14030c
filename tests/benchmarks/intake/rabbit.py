"""RabbitMQ: the iterator of aio-pika, and the consumer with both readers; a no-op handler, and one of 100 ms."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from pathlib import Path

from servers.rabbitmq import RabbitServer

from batchqueue_async import intake

from .measuring import Measured, Meter, Row, compare

QUEUE = "bench"
DELAY = 0.1
BODY = b"x" * 100


def certificate(directory: Path) -> tuple[Path, Path]:
    """The server has a TLS port too, and wants one."""
    files = directory / "cert.pem", directory / "key.pem"
    options = f"-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {files[1]} -out {files[0]}"
    subprocess.run(["openssl", "req", *options.split()], check=True, capture_output=True)
    return files


async def fill(server, count: int) -> None:
    """Persistent messages of 100 bytes, all confirmed."""
    import aiormq
    from pamqp.commands import Basic

    connection = await aiormq.connect(f"amqp://{server.address}/")
    channel = await connection.channel(publisher_confirms=True)
    await channel.queue_declare(QUEUE, durable=True)
    await channel.queue_purge(QUEUE)
    properties = Basic.Properties(delivery_mode=2)
    for at in range(0, count, 500):
        number = min(500, count - at)
        await asyncio.gather(
            *(channel.basic_publish(BODY, routing_key=QUEUE, properties=properties) for _ in range(number))
        )
    await connection.close()


async def iterator(server, count: int) -> Measured:
    import aio_pika

    await fill(server, count)
    meter = Meter(count)
    connection = await aio_pika.connect(f"amqp://{server.address}/")
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=1000)
    queue = await channel.get_queue(QUEUE)
    meter.begin()
    async with queue.iterator() as messages:
        async for message in messages:
            await message.ack()
            meter.add()
            if meter.done.is_set():
                break
    await connection.close()
    return meter.measured()


async def ours(server, count: int, reader: str) -> Measured:
    await fill(server, count)
    meter = Meter(count)

    async def handle(message):
        meter.add()

    url = f"amqp://{server.address}/"
    consumer = intake.AmqpConsumer(
        url, QUEUE, handle, workers=32, prefetch=1000, dead_letters=intake.DROP, reader=reader
    )
    meter.begin()
    async with consumer:
        await meter.done.wait()
    return meter.measured()


async def faststream(server, count: int) -> Measured:
    from faststream import AckPolicy
    from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

    await fill(server, count)
    meter = Meter(count)
    broker = RabbitBroker(f"amqp://{server.address}/", logger=None, default_channel=Channel(prefetch_count=1000))

    @broker.subscriber(RabbitQueue(QUEUE, declare=False), ack_policy=AckPolicy.ACK)
    async def handle(body: bytes):
        meter.add()

    meter.begin()
    await broker.start()
    await meter.done.wait()
    await broker.stop()
    return meter.measured()


async def ideal(server, workers: int) -> str:
    """The share of what this number of workers could do at most with a handler of 100 ms, and its 95th percentile."""
    count = workers * 50
    await fill(server, count)
    meter = Meter(count)
    seconds: list[float] = []

    async def handle(message):
        began = time.perf_counter()
        await asyncio.sleep(DELAY)
        seconds.append(time.perf_counter() - began)
        meter.add()

    url = f"amqp://{server.address}/"
    consumer = intake.AmqpConsumer(url, QUEUE, handle, workers=workers, prefetch=500, dead_letters=intake.DROP)
    async with consumer:
        while not consumer.stats().in_flight:
            await asyncio.sleep(0)
        meter.begin()
        await meter.done.wait()
    share = meter.measured().rate / (workers / DELAY)
    late = sorted(seconds)[int(len(seconds) * 0.95)]
    return f"RabbitMQ: handler of 100 ms, {workers} workers: {share:.1%} of ideal, p95 {late * 1000:.1f} ms"


async def rows(turns: int, count: int) -> list[Row]:
    """All of them; the shares of the ideal are printed."""
    with tempfile.TemporaryDirectory() as directory:
        server = RabbitServer(certificate(Path(directory)))
        server.start()
        try:
            for workers in (32, 64):
                print(await ideal(server, workers), flush=True)
            base = "RabbitMQ: aio-pika, iterator"
            subjects = {
                base: lambda: iterator(server, count),
                "RabbitMQ: AmqpConsumer": lambda: ours(server, count, "stream"),
                "RabbitMQ: AmqpConsumer, reader=client": lambda: ours(server, count, "client"),
            }
            against = {
                "RabbitMQ: AmqpConsumer": (base, 4.0),
                "RabbitMQ: AmqpConsumer, reader=client": (base, 2.0),
            }
            try:
                import faststream as _  # noqa: F401
            except ImportError:
                print("FastStream is not installed: its rows are left out")
            else:
                subjects["RabbitMQ: FastStream"] = lambda: faststream(server, count)
                against["RabbitMQ: FastStream"] = (base, None)
            return await compare(subjects, turns, against)
        finally:
            server.dispose()
