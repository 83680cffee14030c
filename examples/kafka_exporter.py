"""Export events to Kafka, through outages of the brokers and kills of this process.

Events go into a queue, from there in batches to an exporter, and from its directory on disk to a topic. What the
exporter has confirmed arrives, if not in this run, then in the next one with the same directory. Interrupt it, stop the
broker, or kill it, and start it again: it begins with what is left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

import batchqueue_async as bq
from batchqueue_async.sinks.kafka import KafkaSink

PAGES = ("/", "/cart", "/pay", "/search")


def events(count: int) -> list[dict[str, object]]:
    """Requests to a shop."""
    return [{"user": f"user-{number % 50}", "page": random.choice(PAGES), "n": number} for number in range(count)]


async def run(arguments: argparse.Namespace) -> None:
    """Produce the events, and wait until Kafka has confirmed them."""
    # The events of one user stay in order: in one partition, and none sent while an earlier one waits.
    sink = KafkaSink(arguments.bootstrap, topic=arguments.topic, key="user", compression="gzip", timeout=5.0)
    config = bq.ExportConfig(
        path=arguments.directory,
        ordering="key",
        key=lambda event: event["user"],
        retry=bq.RetryPolicy(initial=0.5, max_delay=10.0),
        breaker=bq.BreakerPolicy(reset_timeout=5.0),
    )
    async with bq.Exporter(sink, config) as exporter:
        left = exporter.stats().records
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("events", bq.QueueConfig(consumer=exporter))
            accepted = await queue.produce_many(events(arguments.count))
            await queue.flush()
        print(f"{left} events left by an earlier run, {accepted} new ones confirmed on disk")
        try:
            await exporter.flush(timeout=arguments.wait)
        except TimeoutError:
            print(f"Kafka does not take them now: {exporter.stats().records} wait in {arguments.directory}")
        stats = exporter.stats()
    print(f"delivered {stats.delivered} in {stats.delivered_batches} batches, sent again {stats.retries}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default="localhost:9092", help="the brokers, host:port (%(default)s)")
    parser.add_argument("--topic", default="events", help="the topic (%(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("kafka-export"), help="the send queue (%(default)s)")
    parser.add_argument("--count", type=int, default=10_000, help="how many events (%(default)s)")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds to wait for Kafka (%(default)s)")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
