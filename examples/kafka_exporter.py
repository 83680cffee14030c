"""Export events to Kafka, through outages of the brokers and kills of this process.

Events go into a queue, from there in batches to an exporter, and from its directory on disk to a topic. What the
exporter has confirmed arrives, if not in this run, then in the next one with the same directory. Interrupt it, stop the
broker, or kill it, and start it again: it begins with what is left.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from functools import partial
from pathlib import Path

from destination import look_for, status, watching

import batchqueue_async as bq
from batchqueue_async.sinks.kafka import KafkaSink

PAGES = ("/", "/cart", "/pay", "/search")


def events(count: int) -> list[dict[str, object]]:
    """Requests to a shop."""
    return [{"user": f"user-{number % 50}", "page": random.choice(PAGES), "n": number} for number in range(count)]


async def run(arguments: argparse.Namespace, manager: bq.BatchQueueManager) -> int:
    """Produce the events, and wait until Kafka has confirmed them; the exit status."""
    # The events of one user stay in order: in one partition, and none sent while an earlier one waits.
    sink = KafkaSink(arguments.bootstrap, topic=arguments.topic, key="user", compression="gzip", timeout=5.0)
    config = bq.ExportConfig(
        path=arguments.directory,
        ordering="key",
        key=lambda event: event["user"],
        retry=bq.RetryPolicy(initial=0.5, max_delay=10.0),
        breaker=bq.BreakerPolicy(reset_timeout=5.0),
        drain_timeout=arguments.wait,
    )
    exporter = bq.Exporter(sink, config, name="kafka")
    await look_for(arguments.bootstrap)
    async with watching(exporter), exporter:
        left = exporter.stats().records
        queue = manager.create("events", bq.QueueConfig(consumer=exporter))
        accepted = await queue.produce_many(events(arguments.count))
        await queue.shutdown()
        print(f"{left} events left by an earlier run, {accepted} new ones confirmed on disk")
    stats = exporter.stats()
    if stats.records:
        print(f"Kafka does not take them now: {stats.records} wait in {arguments.directory}")
    print(f"delivered {stats.delivered} in {stats.delivered_batches} batches, sent again {stats.retries}")
    return status(exporter)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default="localhost:9092", help="the brokers, host:port (%(default)s)")
    parser.add_argument("--topic", default="events", help="the topic (%(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("kafka-export"), help="the send queue (%(default)s)")
    parser.add_argument("--count", type=int, default=10_000, help="how many events (%(default)s)")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds to wait for Kafka (%(default)s)")
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what is wrong is said here, once
    code = bq.run(partial(run, parser.parse_args()))
    sys.exit("interrupted" if code is None else code)


if __name__ == "__main__":
    main()
