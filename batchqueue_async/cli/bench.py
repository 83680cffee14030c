"""`batchqueue bench`: what this machine does, in seconds; for a first idea, not for a comparison."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli.commands import PATH, command, flag, option, raw, say
from batchqueue_async.config import QueueConfig
from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.export.config import ExportConfig
from batchqueue_async.export.exporter import Exporter
from batchqueue_async.runtime.manager import BatchQueueManager
from batchqueue_async.runtime.scheduler import new_event_loop
from batchqueue_async.sinks.memory import MemorySink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from batchqueue_async.cli.commands import Arguments, Command

_EPILOG = """\
Items are small integers, records on disk have 100 bytes. `make bench` in the source tree measures with care.
"""
_CHUNK = 1_000


def make() -> Command:
    """The command."""
    params = [
        option("--seconds", type=float, default=1.0, show_default=True, text="for each measurement"),
        option(
            "--path", type=PATH, metavar="DIRECTORY", text="where the disk is measured; the temporary directory else"
        ),
        flag("--json", "JSON, one document"),
    ]
    return command(
        "bench", _run, "measure queues, exporters and the disk for a few seconds", params, epilog=raw(_EPILOG)
    )


def _run(arguments: Arguments) -> int:
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="batchqueue-bench-", dir=arguments.path) as directory,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        for name, measure in MEASUREMENTS.items():
            wall, cpu = time.perf_counter(), time.process_time()
            count = runner.run(measure(arguments.seconds, Path(directory)))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            rows.append({"what": name, "count": count, "per_second": count / wall, "cpu_us": cpu / count * 1e6})
    accelerated = bool(getattr(sys.modules["batchqueue_async"], "accelerated", False))
    about = {
        "python": platform.python_version(),
        "accelerated": accelerated,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    if arguments.json:
        say(json.dumps({"machine": about, "measured": rows}, indent=2))
        return 0
    for row in rows:
        say(f"{row['what']:<42} {row['per_second']:>12,.0f} per s   {row['cpu_us']:>8.2f} us of CPU each")
    said = "compiled" if accelerated else "in Python"
    say(f"Python {about['python']}, hot path {said}, {about['cores']} cores, load {about['load']}")
    return 0


async def _until(seconds: float, work: Callable[[], Awaitable[int]]) -> int:
    end = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end:
        count += await work()
    return count


async def _nothing(batch: Sequence[Any]) -> None:
    """Handle a batch by doing nothing with it."""


async def _queue_one(seconds: float, _: Path) -> int:
    async with BatchQueueManager() as manager:
        queue = manager.create("bench", QueueConfig(consumer=_nothing, buffer_size=10 * _CHUNK))

        async def work() -> int:
            for item in range(_CHUNK):
                await queue.produce(item)
            return _CHUNK

        count = await _until(seconds, work)
        await queue.flush()
    return count


async def _queue_many(seconds: float, _: Path) -> int:
    items = list(range(_CHUNK))
    async with BatchQueueManager() as manager:
        queue = manager.create("bench", QueueConfig(consumer=_nothing, buffer_size=10 * _CHUNK))
        count = await _until(seconds, lambda: queue.produce_many(items))
        await queue.flush()
    return count


async def _exporter(seconds: float, _: Path) -> int:
    items = list(range(_CHUNK))
    sink = MemorySink()

    async with Exporter(sink, ExportConfig(overflow="block"), name="bench") as exporter:

        async def work() -> int:
            await exporter.consume(items)
            if len(sink.records) > 100 * _CHUNK:  # it keeps what it is sent
                sink.records.clear()
                sink.batches.clear()
            return _CHUNK

        count = await _until(seconds, work)
        await exporter.flush()
    return count


async def _disk(seconds: float, directory: Path) -> int:
    payloads = [b"x" * 100] * _CHUNK
    async with DurableQueue.open(directory / "disk", DurableConfig(durability="always")) as queue:

        async def work() -> int:
            return len(await queue.put_many(payloads))

        return await _until(seconds, work)


async def _sync(seconds: float, directory: Path) -> int:
    async with DurableQueue.open(directory / "sync", DurableConfig(durability="always")) as queue:

        async def work() -> int:
            await queue.put(b"x" * 100)
            return 1

        return await _until(seconds, work)


MEASUREMENTS: dict[str, Callable[[float, Path], Any]] = {
    "queue, items one by one": _queue_one,
    "queue, 1,000 items at a time": _queue_many,
    "exporter in memory, 1,000 records at a time": _exporter,
    "disk, 1,000 records per sync": _disk,
    "disk, one record per sync": _sync,
}
