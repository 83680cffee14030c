"""The library's own cases: a burst through each way to produce, to a handler that does nothing."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import batchqueue_async as bq

from .bursts import Case, Gate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from .bursts import Burst, Workload


CROWD = 8
"""Producers that meet a full buffer together."""


class _QueueBurst:
    def __init__(self, queue: bq.BatchQueue[Any], workload: Workload, gate: Gate) -> None:
        self._queue = queue
        self._workload = workload
        self._gate = gate
        self.expected = 0

    def prepare(self) -> None:
        self._gate.arm(len(self._workload.items))
        self.expected += len(self._workload.items)


class _NowaitBurst(_QueueBurst):
    async def run(self) -> None:
        produce_nowait = self._queue.produce_nowait
        for item in self._workload.items:
            produce_nowait(item)
        await self._gate.done


class _ProduceBurst(_QueueBurst):
    async def run(self) -> None:
        produce = self._queue.produce
        for item in self._workload.items:
            await produce(item)
        await self._gate.done


class _CrowdBurst(_QueueBurst):
    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(CROWD):
                group.create_task(self._produce(self._workload.items[number::CROWD]))
        await self._gate.done

    async def _produce(self, items: list[Any]) -> None:
        produce = self._queue.produce
        for item in items:
            await produce(item)


class _ManyBurst(_QueueBurst):
    async def run(self) -> None:
        produce_many = self._queue.produce_many
        for chunk in self._workload.chunks:
            await produce_many(chunk)
        await self._gate.done


class _ManyNowaitBurst(_QueueBurst):
    async def run(self) -> None:
        produce_many_nowait = self._queue.produce_many_nowait
        for chunk in self._workload.chunks:
            produce_many_nowait(chunk)
        await self._gate.done


BURSTS: dict[str, Callable[[bq.BatchQueue[Any], Workload, Gate], Any]] = {
    "produce_nowait": _NowaitBurst,
    "produce": _ProduceBurst,
    "produce, 8 producers": _CrowdBurst,
    "produce_many": _ManyBurst,
    "produce_many_nowait": _ManyNowaitBurst,
}


def consumer_case(name: str, way: str, workload: str = "one") -> Case:
    """All defaults and one consumer, which gets every batch whole."""

    @asynccontextmanager
    async def open_case(items: Workload) -> AsyncIterator[Burst]:
        gate = Gate()
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("bench", bq.QueueConfig(consumer=gate.handler()))
            burst = BURSTS[way](queue, items, gate)
            yield burst
            _check_all_handled(queue, burst.expected)

    return Case(name=name, workload=workload, open=open_case, subject=True)


SELECTORS: dict[str, Callable[[], bq.Selector[Any]]] = {
    "in turns": bq.round_robin,
    "by key": lambda: bq.by_key(id),
}


def selector_case(name: str, way: str, selector: str) -> Case:
    """One consumer for 16 partitions, which a selector chooses among."""

    @asynccontextmanager
    async def open_case(items: Workload) -> AsyncIterator[Burst]:
        gate = Gate()
        config: bq.QueueConfig[Any] = bq.QueueConfig(
            consumer=gate.handler(), partitions=bq.PartitionPolicy.fixed(16), selector=SELECTORS[selector]()
        )
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("bench", config)
            burst = BURSTS[way](queue, items, gate)
            yield burst
            _check_all_handled(queue, burst.expected)

    return Case(name=name, workload="one", open=open_case, subject=True)


def handlers_case(name: str, way: str, workload: str) -> Case:
    """A handler for each type, in partitions that grow with the handlers."""

    @asynccontextmanager
    async def open_case(items: Workload) -> AsyncIterator[Burst]:
        gate = Gate()
        async with bq.BatchQueueManager() as manager:
            queue = manager.create("bench", bq.QueueConfig(partitions=bq.PartitionPolicy.adaptive()))
            for kind in items.types:
                queue.add_handler(kind, gate.handler())
            burst = BURSTS[way](queue, items, gate)
            yield burst
            _check_all_handled(queue, burst.expected)

    return Case(name=name, workload=workload, open=open_case, subject=True)


def _check_all_handled(queue: bq.BatchQueue[Any], expected: int) -> None:
    """A fast queue that loses items would win every row."""
    stats = queue.stats()
    if stats.handled != expected or stats.accepted != expected:
        raise RuntimeError(f"of {expected} items {stats.accepted} were accepted and {stats.handled} handled")
