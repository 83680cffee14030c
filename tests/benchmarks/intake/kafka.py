"""`KafkaConsumer` compared with its bare client and with FastStream, on the same records of a real broker.

Each row consumes the whole topic in a group of its own; a run is all rows one after the other, and its ratios are those
of rows of one run. Every row counts distinct records, and fails when one is missing or came twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
import uuid
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiokafka
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

import batchqueue_async as bq
from batchqueue_async import intake

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

KEYS = 1_000
PARTITIONS = 3
_groups = count()


class Meter:
    """Counts the records that were handled, and the time from the first to the last."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.seen = bytearray(total)
        self.left = total
        self.done = asyncio.Event()
        self.began = self.cpu = 0.0
        self.result: dict[str, float] = {}

    def begin(self) -> None:
        self.began, self.cpu = time.perf_counter(), time.process_time()

    def add(self, body: bytes) -> None:
        if not self.began:  # of a consumer that joins its group by itself: the time for that is not compared
            self.begin()
        number = int(body[:10])
        if self.seen[number]:
            raise RuntimeError(f"record {number} came twice")
        self.seen[number] = 1
        self.left -= 1
        if not self.left:
            seconds, used = time.perf_counter() - self.began, time.process_time() - self.cpu
            self.result = {"per_s": self.total / seconds, "us_cpu": used / self.total * 1e6}
            self.done.set()


async def fill(bootstrap: str, topic: str, total: int) -> None:
    """Records of 100 bytes, with 1,000 keys, spread over the partitions."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(topic, PARTITIONS, 1)])
    await admin.close()
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5)
    await producer.start()
    number = 0
    while number < total:
        for partition in range(PARTITIONS):
            batch, first = producer.create_batch(), number
            while number < min(total, first + 500):
                value = b"%010d" % number + b"x" * 90
                if batch.append(key=b"%06d" % (number % KEYS), value=value, timestamp=None) is None:
                    break
                number += 1
            batch.close()
            await producer.send_batch(batch, topic, partition=partition)
    await producer.flush()
    await producer.stop()


def group() -> str:
    return f"bench-{uuid.uuid4().hex[:6]}-{next(_groups)}"


async def _client(bootstrap: str, topic: str) -> Any:
    options = {"enable_auto_commit": False, "auto_offset_reset": "earliest", "group_id": group()}
    consumer = aiokafka.AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, **options)
    await consumer.start()
    return consumer


async def getmany(bootstrap: str, topic: str, meter: Meter, *, commit: bool) -> None:
    consumer = await _client(bootstrap, topic)
    meter.begin()
    while not meter.done.is_set():
        found = await consumer.getmany(timeout_ms=200, max_records=500)
        for records in found.values():
            for record in records:
                meter.add(record.value)
        if commit and found:
            await consumer.commit({place: records[-1].offset + 1 for place, records in found.items()})
    await consumer.stop()


async def getone(bootstrap: str, topic: str, meter: Meter) -> None:
    consumer = await _client(bootstrap, topic)
    meter.begin()
    taken = 0
    while not meter.done.is_set():
        record = await consumer.getone()
        meter.add(record.value)
        taken += 1
        if taken % 500 == 0:
            await consumer.commit()
    await consumer.stop()


async def ours(bootstrap: str, topic: str, meter: Meter, **options: Any) -> None:
    async def one(message: intake.Message) -> None:
        meter.add(message.body)

    async def many(batch: Any) -> None:
        for message in batch:
            meter.add(message.body)

    handler = many if "batch" in options else one
    consumer = intake.KafkaConsumer(
        bootstrap, topic, handler, group=group(), dead_letters=intake.DROP, prefetch=1_000, **options
    )
    async with consumer:
        await meter.done.wait()


async def faststream(bootstrap: str, topic: str, meter: Meter, *, batch: bool) -> None:
    from faststream import AckPolicy
    from faststream.kafka import KafkaBroker

    broker = KafkaBroker(bootstrap, logger=None)
    options: dict[str, Any] = {"group_id": group(), "auto_offset_reset": "earliest"}
    if batch:

        @broker.subscriber(topic, batch=True, max_records=500, ack_policy=AckPolicy.ACK, **options)
        async def many(bodies: list[bytes]) -> None:
            for body in bodies:
                meter.add(body)

    else:

        @broker.subscriber(topic, ack_policy=AckPolicy.ACK_FIRST, **options)
        async def one(body: bytes) -> None:
            meter.add(body)

    await broker.start()
    await meter.done.wait()
    await broker.stop()


ROWS: dict[str, tuple[Callable[..., Awaitable[None]], dict[str, Any]]] = {
    "getmany(500)": (getmany, {"commit": False}),
    "getmany(500), awaited commits": (getmany, {"commit": True}),
    "KafkaConsumer, batches of 500": (ours, {"batch": bq.BatchPolicy(max_records=500, linger=0.0)}),
    "FastStream, batches of 500, ACK": (faststream, {"batch": True}),
    "getone, a commit in 500": (getone, {}),
    "KafkaConsumer, single, KEY": (ours, {"ordered_by": intake.KEY}),
    "KafkaConsumer, single, PARTITION": (ours, {}),
    "FastStream, single, ACK_FIRST": (faststream, {"batch": False}),
}

# Which row is measured against which, and what it has to reach.
TARGETS = (
    ("KafkaConsumer, batches of 500", "getmany(500), awaited commits", 1.2),
    ("KafkaConsumer, batches of 500", "getmany(500)", 0.75),
    ("KafkaConsumer, single, KEY", "getone, a commit in 500", 1.0),
    ("KafkaConsumer, single, KEY", "FastStream, single, ACK_FIRST", 8.0),
    ("KafkaConsumer, batches of 500", "FastStream, batches of 500, ACK", 5.0),
)


async def run(bootstrap: str, total: int, runs: int) -> dict[str, Any]:
    """All rows, `runs` times; the best of each, and the ratios of the targets."""
    logging.disable(logging.CRITICAL)
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    await fill(bootstrap, topic, total)
    best: dict[str, dict[str, float]] = {}
    for _ in range(runs):
        for name, (row, options) in ROWS.items():
            meter = Meter(total)
            try:
                async with asyncio.timeout(300):
                    await row(bootstrap, topic, meter, **options)
            except ModuleNotFoundError as error:
                print(f"{name:40} not run: {error.name} is not installed")
                continue
            print(f"{name:40} {meter.result['per_s']:12,.0f} /s {meter.result['us_cpu']:8.1f} us CPU", flush=True)
            if name not in best or meter.result["per_s"] > best[name]["per_s"]:
                best[name] = meter.result
    ratios = {
        f"{name} / {base}": {"ratio": best[name]["per_s"] / best[base]["per_s"], "target": target}
        for name, base, target in TARGETS
        if name in best and base in best
    }
    for name, found in ratios.items():
        print(f"{name:75} {found['ratio']:6.2f}   target {found['target']:g}")
    return {"rows": best, "ratios": ratios}


def main() -> None:
    """Start a broker unless one is given, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", help="a broker, host:port; one is started without")
    parser.add_argument(
        "--broker", action="append", help="do nothing where this is given, and names other brokers alone"
    )
    parser.add_argument("--messages", type=int, default=300_000, help="records (%(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="the best of so many counts (%(default)s)")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    arguments = parser.parse_args()
    if arguments.broker and "kafka" not in arguments.broker:
        return
    if arguments.bootstrap:
        result = asyncio.run(run(arguments.bootstrap, arguments.messages, arguments.turns))
    else:
        from tests.servers import base
        from tests.servers.kafka import Kafka

        server = base.provide("Kafka", Kafka)
        try:
            result = asyncio.run(run(server.address, arguments.messages, arguments.turns))
        finally:
            server.dispose()
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
