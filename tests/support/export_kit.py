"""What the exporter's tests stand on: a destination that does as it is told, and a disk that is the same each time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from durable_kit import InlineRunner

import batchqueue_async as bq
from batchqueue_async.durable import DurableConfig, DurableQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from batchqueue_async.sinks.base import SendResult

Answer = "BaseException | SendResult | None"


@dataclass
class Destination:
    """A sink that records what it is sent; `answer` says what each send comes to.

    `answer` is a function of the batch: what it returns is returned, or raised if it is an error.
    """

    answer: Callable[[list[Any]], Any] | None = None
    latency: float = 0.0
    concurrent: bool = True
    opening: list[BaseException] = field(default_factory=list)
    """What the next `open` calls raise."""

    def __post_init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.times: list[float] = []
        self.records: list[Any] = []
        self.active = self.most_active = self.opens = self.closes = 0
        self.cancelled = 0

    async def open(self) -> None:
        self.opens += 1
        if self.opening:
            raise self.opening.pop(0)

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        batch = list(batch)
        self.calls.append(batch)
        self.times.append(asyncio.get_running_loop().time())
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            if self.latency:
                await asyncio.sleep(self.latency)
            answer = self.answer(batch) if self.answer is not None else None
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1
        if isinstance(answer, BaseException):
            raise answer
        rejected = answer.rejected if answer is not None else {}
        self.records += [record for place, record in enumerate(batch) if place not in rejected]
        return answer

    async def close(self) -> None:
        self.closes += 1


class Keyed(Destination):
    """The same, with keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keys: list[list[str]] = []

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult | None:
        self.keys.append(list(keys))
        return await self.send(batch)


def down(message: str = "down", *, retry_after: float | None = None) -> bq.RetryableError:
    return bq.RetryableError(message, retry_after=retry_after)


def script(*answers: Any) -> Callable[[list[Any]], Any]:
    """The answers one after the other, then success for ever."""
    left = list(answers)
    return lambda _: left.pop(0) if left else None


def inline(path: Any, config: DurableConfig, **options: Any) -> DurableQueue:
    """A durable queue whose I/O is done on the loop: the same in virtual time, and each time."""
    return DurableQueue.open(path, config, runner=InlineRunner, wall_clock=lambda: 1_800_000_000_000_000_000, **options)


def exporter(sink: Any, path: Path | None = None, *, seed: int = 1, linger: float = 0.0, **options: Any) -> bq.Exporter:
    """An exporter with seeded jitter; without linger unless asked for."""
    batch = options.pop("batch", None) or bq.BatchPolicy(linger=linger, max_records=options.pop("batch_records", 500))
    config = bq.ExportConfig(path=path, batch=batch, **options)
    return bq.Exporter(sink, config, name="test", random=Random(seed), open_queue=inline)


def check(each: bq.Exporter) -> bq.ExporterStats:
    """Every accepted record has its place."""
    stats = each.stats()
    placed = stats.delivered + stats.dead_lettered + stats.dropped_after + stats.failover_evicted
    assert stats.accepted + stats.recovered == placed + stats.records + stats.failover_records
    assert stats.sends_in_flight <= stats.workers_active
    return stats
