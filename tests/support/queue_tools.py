"""What the tests of the in-memory queue share: making a queue, and the rules that hold at every instant."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import batchqueue_async as bq
from batchqueue_async.policies import stable_type_hash


def make(**options: Any) -> bq.BatchQueue[Any]:
    """A queue on the running loop, without a manager; made right before the test looks at it."""
    return bq.BatchQueue("q", bq.QueueConfig(**options))


@dataclass(frozen=True)
class Item:
    number: int


def kinds(count: int, base: type = Item) -> list[type]:
    """As many item types of their own as a test needs."""
    return [type(f"Kind{index}", (base,), {}) for index in range(count)]


def kinds_by_home(partitions: int) -> list[type]:
    """One type for each of so many partitions, in their order, as `type_hash` places them."""
    found: dict[int, type] = {}
    number = 0
    while len(found) < partitions:
        kind = type(f"Home{partitions}x{number}", (Item,), {})
        found.setdefault(stable_type_hash(kind) % partitions, kind)
        number += 1
    return [found[index] for index in range(partitions)]


def check(queue: bq.BatchQueue[Any]) -> bq.QueueStats:
    """Every item has its place, and every partition exactly one owner that knows it."""
    stats = queue.stats()
    assert stats.attempted == stats.accepted + stats.refused + stats.dropped_before
    outcomes = stats.handled + stats.failed + stats.unhandled + stats.dropped_after
    assert stats.accepted == outcomes + stats.in_flight + stats.used + stats.undelivered
    owned = Counter(partition.owner for partition in stats.partitions)
    assert all(0 <= owner < queue.worker_count for owner in owned)
    assert {worker.index: worker.partitions for worker in stats.workers if worker.partitions} == dict(owned)
    assert all(0 <= partition.used <= partition.capacity for partition in stats.partitions)
    return stats


def check_report(report: bq.ShutdownReport) -> None:
    """A report in which every accepted item has its place."""
    placed = report.handled + report.failed + report.unhandled + report.dropped_after + len(report.undelivered)
    assert report.accepted == placed


def now() -> float:
    return asyncio.get_running_loop().time()


async def outcome(task: asyncio.Task[Any]) -> object:
    """A task's result, or its error."""
    try:
        return await task
    except asyncio.CancelledError:
        return "cancelled"
    except Exception as error:
        return error
