"""Readings from a Redis stream into SQLite in batches; kill it and start it again, and each is there once.

    python examples/redis_to_sqlite.py redis://localhost --publish 10000

An entry is acknowledged when its batch is in the database. What a killed run held is read first by the next one, which
has the same name; the id of the entry is the table's key, so that what comes twice is in it once.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis.asyncio

import batchqueue_async as bq
from batchqueue_async import intake

if TYPE_CHECKING:
    from collections.abc import Sequence

STREAM, GROUP = "readings", "to-sqlite"
PAGE = 1_000


def write(path: Path, rows: list[tuple[str, bytes]]) -> None:
    """Put rows into the table; one that is there already stays as it is."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS readings (id TEXT PRIMARY KEY, body BLOB) WITHOUT ROWID")
        database.executemany("INSERT OR IGNORE INTO readings VALUES (?, ?)", rows)


async def save(path: Path, batch: Sequence[intake.Message]) -> None:
    """Write a batch; returning acknowledges all of it."""
    await asyncio.to_thread(write, path, [(message.id, message.body) for message in batch])


async def publish(url: str, count: int) -> None:
    """Add readings to the stream."""
    async with redis.asyncio.Redis.from_url(url) as client:
        for first in range(0, count, PAGE):
            pipeline = client.pipeline(transaction=False)
            for number in range(first, min(first + PAGE, count)):
                pipeline.xadd(STREAM, {"data": f"reading {number}"})
            await pipeline.execute()


async def left(url: str) -> int:
    """Entries that the group has not handled."""
    async with redis.asyncio.Redis.from_url(url) as client:
        (group,) = await client.xinfo_groups(STREAM)
        return int(group["pending"]) + int(group["lag"] or 0)


async def main(url: str, count: int, path: Path) -> None:
    """Publish, then consume until nothing is left."""
    await publish(url, count)
    options: dict[str, Any] = {
        "group": GROUP,
        "consumer": "one",
        "batch": bq.BatchPolicy(max_records=500, linger=0.05),
        "workers": 1,  # SQLite has one writer
        "dead_letters": f"{STREAM}.dead",
    }
    async with intake.RedisConsumer(url, STREAM, partial(save, path), **options) as consumer, asyncio.timeout(120):
        unhandled = 1
        while unhandled:
            await asyncio.sleep(0.05)
            unhandled = await left(url)
        stats = consumer.stats()
    with closing(sqlite3.connect(path)) as database:
        (rows,) = database.execute("SELECT count(*) FROM readings").fetchone()
    print(f"{stats.acked} handled, {stats.dead_lettered} to {STREAM}.dead; {rows} in {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the server, as redis://host:6379/0")
    parser.add_argument("--publish", type=int, default=10_000, metavar="N", help="readings to add first (%(default)s)")
    parser.add_argument("--database", type=Path, default=Path("readings.db"), help="the file (%(default)s)")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.publish, arguments.database))
