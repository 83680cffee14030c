"""What the examples say about their destinations: that one is away, as soon as a send has failed, and back."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import batchqueue_async as bq

EVERY = 0.2
LOOK = 3.0
UNDELIVERED = 3
"""The exit status of a program that ends with records undelivered, as that of `batchqueue run`."""


async def look_for(address: str) -> None:
    """Say at once when nobody listens at `http://host:port` or `host:port`; clients take longer to give up."""
    place = urlsplit(address if "//" in address else f"//{address.split(',', maxsplit=1)[0]}")
    try:
        async with asyncio.timeout(LOOK):
            _, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.close()
    except OSError as error:  # TimeoutError is one too
        why = error.strerror or f"no answer within {LOOK:.0f} s"
        print(f"nobody listens at {address} ({why}); it is tried again", file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def watching(*exporters: bq.Exporter[Any]) -> AsyncIterator[None]:
    """Say on stderr, within the block, when a destination refuses or does not answer, and when it does again."""
    tasks = [asyncio.create_task(_watch(exporter)) for exporter in exporters]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _watch(exporter: bq.Exporter[Any]) -> None:
    away = False
    while True:
        await asyncio.sleep(EVERY)
        stats = exporter.stats()
        failed, succeeded = stats.last_error_at or 0.0, stats.last_success_at or 0.0
        if failed > succeeded and not away:
            print(f"{exporter.name}: no success: {stats.last_error}; it is tried again", file=sys.stderr, flush=True)
        elif away and succeeded > failed:
            print(f"{exporter.name}: takes records again", file=sys.stderr, flush=True)
        away = failed > succeeded


def status(*exporters: bq.Exporter[Any]) -> int:
    """The exit status of a program whose exporters have ended: 0 if every record was delivered or refused for good."""
    kept = 0
    for exporter in exporters:
        stats = exporter.stats()
        kept += stats.accepted + stats.recovered - stats.delivered - stats.dead_lettered
    return UNDELIVERED if kept else 0
