"""Move the records of a Kafka topic into PostgreSQL, through a directory on disk; kill any part of it at any time.

A record is committed in Kafka when the exporter's directory has it, and leaves the directory when PostgreSQL has it.
After a kill some records come again; their topic, partition and offset are the table's key, so each is there once.
While PostgreSQL is down the directory fills, and Kafka waits when it is full.

With --ops it serves metrics, health and the live page. examples/deploy runs it as a container, as a service of systemd
and in Kubernetes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from functools import partial
from pathlib import Path
from typing import Any

from destination import watching

import batchqueue_async as bq
from batchqueue_async import intake
from batchqueue_async.sinks.postgres import PostgresSink

KEY = ("topic", "part", "position")


def row_of(message: Any) -> dict[str, Any]:
    """A record of Kafka as a row; what raises here goes to the dead letters."""
    return {
        "topic": message.source,
        "part": message.partition,
        "position": message.offset,
        "body": message.body.decode(),
    }


async def run(arguments: argparse.Namespace, manager: bq.BatchQueueManager) -> None:
    """Consume until a signal comes."""
    del manager  # the consumer hands its records to the exporter, without a queue in between
    sink = PostgresSink(arguments.dsn, arguments.table, upsert_on=KEY, password=arguments.password)
    config = bq.ExportConfig(
        path=arguments.directory,
        overflow="block",
        ordering="key",
        key=lambda row: tuple(row[name] for name in KEY),
        retry=bq.RetryPolicy(initial=0.2, max_delay=5.0),
        breaker=bq.BreakerPolicy(reset_timeout=1.0),
        drain_timeout=arguments.drain,
    )
    async with contextlib.AsyncExitStack() as stack:
        ops = None
        if arguments.ops:
            from batchqueue_async import observe  # noqa: PLC0415 - the extra `service`

            server = observe.serve(*arguments.ops, token=arguments.token, hosts=arguments.ops_host)
            ops = await stack.enter_async_context(server)
            ops.phase = "starting"
        exporter = bq.Exporter(sink, config, name="postgres")
        await stack.enter_async_context(watching(exporter))
        await stack.enter_async_context(exporter)
        consumer = intake.KafkaConsumer(
            arguments.bootstrap,
            arguments.topic,
            exporter,
            group=arguments.group,
            decode=row_of,
            dead_letters=f"{arguments.topic}.dead",
            session_timeout=arguments.session_timeout,
        )
        try:
            async with consumer:
                if ops is not None:
                    ops.phase = "running"
                print("consuming", flush=True)
                try:
                    await asyncio.Event().wait()  # until a signal cancels it
                finally:
                    if ops is not None:
                        ops.phase = "draining"
        finally:
            if (report := consumer.report) is not None:  # it was entered, and has ended
                print(f"handled {report.acked}, dead letters {report.dead_lettered}, given back {report.released}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default="localhost:9092", help="the brokers, host:port (%(default)s)")
    parser.add_argument("--topic", default="events", help="the topic (%(default)s)")
    parser.add_argument("--group", default="to-postgres", help="the consumer group (%(default)s)")
    parser.add_argument("--dsn", default="postgresql://localhost/postgres", help="the database (%(default)s)")
    parser.add_argument("--password", help="its password: env:NAME or file:/path")
    parser.add_argument("--table", default="events", help="the table, made if there is none (%(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("kafka-to-postgres"), help="the disk (%(default)s)")
    parser.add_argument("--session-timeout", type=float, default=10.0, help="seconds until a dead member is noticed")
    parser.add_argument("--drain", type=float, default=20.0, help="seconds to deliver what is left (%(default)s)")
    parser.add_argument("--ops", action="append", metavar="ADDRESS", help="serve metrics and the page: 127.0.0.1:9464")
    parser.add_argument("--ops-host", action="append", default=[], help="a host name that callers of --ops use")
    parser.add_argument("--token", help="what callers of --ops show: env:NAME or file:/path")
    bq.run(partial(run, parser.parse_args()))


if __name__ == "__main__":
    main()
