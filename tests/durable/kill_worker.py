"""A process that puts and leases until it is killed; what it was promised goes to its standard output.

`P n` is written after the put of payload n was confirmed, `A n` before its acknowledgement is asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys

from batchqueue_async.durable import DurableConfig, DurableQueue


def payload(number: int) -> bytes:
    body = b"%d:" % number + random.Random(number).randbytes(number % 700)
    return hashlib.blake2b(body, digest_size=8).digest() + body


def number_of(data: bytes) -> int:
    if hashlib.blake2b(data[8:], digest_size=8).digest() != data[:8]:
        raise SystemExit("a wrong payload was delivered")
    return int(data[8:].split(b":", 1)[0])


def say(kind: str, numbers: list[int]) -> None:
    # One write of less than PIPE_BUF bytes is atomic: no line is torn by the kill.
    for start in range(0, len(numbers), 50):
        os.write(1, "".join(f"{kind} {number}\n" for number in numbers[start : start + 50]).encode())


async def main(path: str, first: int, seed: int) -> None:
    chance = random.Random(seed)
    config = DurableConfig(
        durability=chance.choice(["always", "always", "interval", "os"]),
        sync_interval=0.01,
        segment_bytes=chance.choice([20_000, 200_000]),
        memory_bytes=chance.choice([2_000, 1_000_000]),
        compression=chance.choice(["none", "none", "lz4"]),
    )
    counter = iter(range(first, first + 1_000_000))
    async with DurableQueue.open(path, config) as queue:
        if queue.recovery.damaged_records or queue.recovery.quarantined:
            raise SystemExit(f"a kill has damaged something: {queue.recovery}")

        async def produce(index: int) -> None:
            while True:
                numbers = [next(counter) for _ in range(1 if index % 2 else chance.randint(1, 40))]
                if index % 2:
                    await queue.put(payload(numbers[0]))
                else:
                    await queue.put_many([payload(number) for number in numbers])
                say("P", numbers)
                if queue.stats().records > 3_000:
                    await asyncio.sleep(0.002)

        async def consume() -> None:
            while True:
                lease = await queue.lease(chance.randint(1, 100))
                numbers = [number_of(record.payload) for record in lease.records]
                if chance.random() < 0.2:
                    await lease.nack(delay=chance.choice([0, 0.005]))
                    continue
                say("A", numbers)
                await lease.ack()

        os.write(1, b"ready\n")
        await asyncio.gather(*(produce(index) for index in range(8)), *(consume() for _ in range(4)))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
