"""What a Python worker of an executor keeps from task to task: a loop thread, a queue, and where it leads."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batchqueue_async.sinks.base import Attempt, BatchKey, StagingSink
from batchqueue_async.spark import process_bridge
from batchqueue_async.spark.exporting import WorkerExporterRoute, route_to
from batchqueue_async.spark.feed import feed
from batchqueue_async.spark.options import Options, read_options
from batchqueue_async.spark.route import Route, SinkRoute
from batchqueue_async.spark.rows import converter

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """What one task wrote.

    Attributes:
        attempt: which attempt of which part of which batch.
        rows: how many rows.
        bytes: of how much Arrow data.
        seconds: in what time, Spark's own work on them included.
    """

    attempt: Attempt
    rows: int
    bytes: int
    seconds: float


class Worker:
    """Writes one part after the other through one queue."""

    def __init__(self, options: Options) -> None:
        self._options = read_options(options)
        self._target = self._options.make()
        self._convert = converter(self._options.rows)
        whole = self._options.rows == "batch"
        config, self._unit = process_bridge.sized(
            "batchqueue", self._options.queue, self._options.rows_in_flight, whole=whole
        )
        self._turn = threading.Lock()
        self._route: Route = Route()
        self._queue = process_bridge.free_queue("batchqueue", replace(config, consumer=self._consume))
        self._lasting: Route | None = None
        if self._options.export is not None:
            self._lasting = WorkerExporterRoute(self._target, self._options.export)
        elif not isinstance(self._target, StagingSink):
            self._lasting = route_to(self._target)

    async def _consume(self, batch: Sequence[Any]) -> None:
        await self._route.consume(batch)

    def write(self, attempt: Attempt, batches: Iterator[Any]) -> Part:
        """Write a part; returns when all of it is handled, and staged where the sink stages."""
        started = time.perf_counter()
        bridge = process_bridge.bridge()
        with self._turn:
            route = self._route = self._lasting or SinkRoute(self._target.stage(attempt))
            bridge.call(route.open)
            key = None if self._lasting is None else part_key(attempt)
            bridge.call(route.begin, key)
            try:
                fed = feed(
                    f"format batchqueue: batch {attempt.key}, part {attempt.part}",
                    _generator(batches),
                    queue=self._queue,
                    route=route,
                    bridge=bridge,
                    convert=self._convert,
                    unit=self._unit,
                )
                bridge.call(route.commit)
            except BaseException:
                bridge.call(route.rollback)
                raise
            finally:
                if self._lasting is None:
                    bridge.call(route.close)
        return Part(attempt, fed.rows, fed.bytes, time.perf_counter() - started)


def part_key(attempt: Attempt) -> BatchKey:
    """The key of a part for sinks that can't stage: each partition is a source of its own.

    Example:
        >>> str(part_key(Attempt(BatchKey("query", 3), 1, "a7")))
        'query/1/3'
    """
    return BatchKey(f"{attempt.key.source}/{attempt.part}", attempt.key.number)


def _generator(batches: Iterator[Any]) -> Generator[Any]:
    yield from batches


_lock = threading.Lock()
_workers: dict[Options, Worker] = {}


def worker(options: Options) -> Worker:
    """The worker of this process for these options; tasks of one Python worker come one after the other."""
    with _lock:
        found = _workers.get(options)
        if found is None:
            found = _workers[options] = Worker(options)
        return found
