"""What is measured, each as a function that returns its figure."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import batchqueue_async as bq
from batchqueue_async.export.delivery.leased_batch import LeasedBatch
from batchqueue_async.export.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORD = 1024
BATCH = 500
WORKERS = 8
LATENCY = 0.05


class NoOp:
    """A sink that takes everything at once, and notes when."""

    concurrent = True

    def __init__(self) -> None:
        self.records = 0
        self.down = False
        self.latency = 0.0
        self.delays: list[float] = []
        self.ends: list[float] = []

    async def open(self) -> None:
        """Nothing to open."""

    async def send(self, batch: Sequence[Any]) -> None:
        """Take the batch; a record that is a float is the time at which it was handed over."""
        if self.down:
            raise bq.RetryableError("down")
        if self.latency:
            await asyncio.sleep(self.latency)
            self.ends.append(time.perf_counter())
        elif type(batch[0]) is float:
            self.delays.append(time.perf_counter() - batch[0])
        self.records += len(batch)

    async def close(self) -> None:
        """Nothing to close."""


def config(path: Path | None = None, **options: Any) -> bq.ExportConfig:
    """An exporter's configuration without linger, which is a wait that the user asks for."""
    batch = options.pop("batch", bq.BatchPolicy(linger=0.0, max_records=BATCH))
    return bq.ExportConfig(path=path, batch=batch, **options)


def throughput(batches: int) -> float:
    """Records per second through a memory exporter."""

    async def run() -> float:
        # Records of their own, so that the caches are no kinder than they would be to a program.
        made = [[bytes([number % 251]) * RECORD for number in range(BATCH)] for _ in range(16)]
        sink = NoOp()
        async with bq.Exporter(sink, config(overflow="block")) as exporter:
            start = time.perf_counter()
            for number in range(batches):
                await exporter.consume(made[number & 15])
            await exporter.flush()
            elapsed = time.perf_counter() - start
        assert sink.records == batches * BATCH
        return sink.records / elapsed

    return asyncio.run(run())


def bookkeeping(times: int) -> float:
    """Seconds a batch that the gate, the breaker, the budget and the counts of a success take."""

    async def run() -> float:
        engine = Engine(NoOp(), config(), name="bench", random=Random(1))
        await engine.open(bq.DurableQueue.open)
        await engine.queue.put([b"x"])
        lease = await engine.queue.lease(1, 1_000, 0)
        assert lease is not None
        batch = LeasedBatch([lease])
        gate, sender, now = engine.gate, engine.sender, asyncio.get_running_loop().time
        start = time.perf_counter()
        for _ in range(times):
            gate.wait(now())
            leave = gate.acquire(now())
            assert leave is not None
            sender.answered(leave)
            sender.count_delivered(batch, 0)
            gate.release(leave)
        return (time.perf_counter() - start) / times

    return asyncio.run(run())


def idle_latency(path: Path | None, times: int) -> tuple[list[float], list[float]]:
    """Seconds from `consume` to the sink, each time with nothing else to do; and of an fdatasync of a line beside it.

    The two take turns, so that what the disk does at the moment meets both.
    """
    syncs: list[float] = []

    def sync(descriptor: int) -> None:
        start = time.perf_counter()
        os.write(descriptor, bytes(100))
        os.fdatasync(descriptor)
        syncs.append(time.perf_counter() - start)

    async def run() -> list[float]:
        sink = NoOp()
        probe = None if path is None else os.open(f"{path}.probe", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        async with bq.Exporter(sink, config(path)) as exporter:
            for _ in range(times):
                await exporter.consume([time.perf_counter()])
                await asyncio.sleep(0.002)
                if probe is not None:
                    sync(probe)
                    await asyncio.sleep(0.002)
        if probe is not None:
            os.close(probe)
        return sink.delays

    return asyncio.run(run()), syncs


def recovery(records: int, batch: int) -> tuple[float, float]:
    """Batches per second of a drain after an outage, and those of the sizing formula."""

    async def run() -> float:
        sink = NoOp()
        sink.down = True
        options = {"workers": bq.WorkerPolicy.fixed(WORKERS), "max_records": 2 * records}
        policy = bq.BatchPolicy(linger=0.0, max_records=batch)
        async with bq.Exporter(sink, config(batch=policy, **options)) as exporter:
            for start in range(0, records, 1_000):
                await exporter.consume([b"x" * 100] * min(1_000, records - start))
            while exporter.breaker != "open":
                await asyncio.sleep(0.01)
            sink.down, sink.latency = False, LATENCY
            exporter.resume()
            # Those that failed before the breaker opened come back after their delays, which are no part of the drain.
            most = records // batch - WORKERS
            begin = time.perf_counter()
            while len(sink.ends) < most:
                await asyncio.sleep(LATENCY)
            await exporter.shutdown(0)
        return most / (sink.ends[most - 1] - begin)

    return asyncio.run(run()), WORKERS / LATENCY


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory on the disk that is worked on, not in memory."""
    return tempfile.TemporaryDirectory(prefix="bench-export-", dir=Path.cwd())
