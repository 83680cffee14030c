"""A program that exports numbers for ever, and is killed: what it prints was confirmed before it was printed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import batchqueue_async as bq
from batchqueue_async.sinks.jsonl import JsonLinesSink


async def main(directory: Path, first: int) -> None:
    config = bq.ExportConfig(path=directory / "queue", batch=bq.BatchPolicy(max_records=50, linger=0.0))
    async with bq.Exporter(JsonLinesSink(directory / "out.jsonl"), config) as exporter:
        number = first
        while True:
            await exporter.consume([{"n": number + place} for place in range(7)])
            number += 7
            print(number, flush=True)


asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
