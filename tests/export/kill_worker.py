"""A process that exports to Kafka and PostgreSQL at once until it is killed; what was confirmed goes to its output.

`K n` and `P n` are written after the exporter to Kafka, or to PostgreSQL, has confirmed record n. With `drain` as its
last word it takes no more records: it delivers what is left, says `done`, and ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from itertools import count

import batchqueue_async as bq
from batchqueue_async.durable import DurableConfig
from batchqueue_async.export.config import BatchPolicy, BreakerPolicy, RetryPolicy
from batchqueue_async.sinks.kafka import KafkaSink
from batchqueue_async.sinks.postgres import PostgresSink


def say(kind: str, numbers: list[int]) -> None:
    # One write of less than PIPE_BUF bytes is atomic: no line is torn by the kill.
    for start in range(0, len(numbers), 50):
        os.write(1, "".join(f"{kind} {number}\n" for number in numbers[start : start + 50]).encode())


async def main(path: str, kafka: str, dsn: str, name: str, *, first: int, seed: int, drain: bool) -> None:
    chance = random.Random(seed)
    numbers = count(first)

    def config(kind: str) -> bq.ExportConfig:
        return bq.ExportConfig(
            path=f"{path}/{kind}",
            durable=DurableConfig(durability=chance.choice(["always", "interval", "os"]), sync_interval=0.01),
            batch=BatchPolicy(max_records=chance.choice([20, 200]), linger=0.01),
            retry=RetryPolicy(initial=0.1, max_delay=1.0),
            breaker=BreakerPolicy(reset_timeout=0.5),
            workers=bq.WorkerPolicy.fixed(4),
            drain_timeout=60.0,
        )

    async def produce(exporter: bq.Exporter, kind: str) -> None:
        while True:
            some = [next(numbers) for _ in range(chance.randint(1, 40))]
            await exporter.consume([{"id": number, "text": "x" * (number % 100)} for number in some])
            say(kind, some)
            await asyncio.sleep(0.01 if exporter.stats().records > 2_000 else 0)

    async with (
        bq.Exporter(KafkaSink(kafka, topic=name), config("K")) as to_kafka,
        bq.Exporter(PostgresSink(dsn, name), config("P")) as to_postgres,
    ):
        if drain:
            await asyncio.gather(to_kafka.flush(), to_postgres.flush())
            say("done", [0])
            return
        os.write(1, b"ready\n")
        await asyncio.gather(
            *(produce(to_kafka, "K") for _ in range(2)), *(produce(to_postgres, "P") for _ in range(2))
        )


if __name__ == "__main__":
    where, kafka_address, postgres_dsn, target, start, chances = sys.argv[1:7]
    options = {"first": int(start), "seed": int(chances), "drain": sys.argv[7:] == ["drain"]}
    asyncio.run(main(where, kafka_address, postgres_dsn, target, **options))
