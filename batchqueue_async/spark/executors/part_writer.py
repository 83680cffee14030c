"""What a Python worker of an executor keeps from task to task: a loop thread, a queue, and where it leads."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import forks
from batchqueue_async.sinks.base import Attempt, BatchKey, StagingSink
from batchqueue_async.spark.bad_rows import BadRows
from batchqueue_async.spark.executors.letters import StagedLetters
from batchqueue_async.spark.executors.options import Options, read_options
from batchqueue_async.spark.exporting import WorkerExporterRoute, route_to
from batchqueue_async.spark.feed import Feeder
from batchqueue_async.spark.micro_batch import MicroBatch, Patience, Retries, handle_chunks
from batchqueue_async.spark.process_bridge import host
from batchqueue_async.spark.record_keys import RecordKeys
from batchqueue_async.spark.route import Route, StagedRoute
from batchqueue_async.spark.rows import Converter

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from batchqueue_async.bridge.sync_bridge import SyncBridge

_KEPT_WORKERS = 8
"""The most sets of options that a Python worker keeps a queue for."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one task wrote.

    Attributes:
        attempt: which attempt of which part of which batch.
        rows: how many rows.
        bytes: of how much Arrow data.
        seconds: in what time, Spark's own work on them included.
        dead_rows: how many of the rows are staged for the dead letters instead.
        run: the run of the streaming query; empty where there is none.
    """

    attempt: Attempt
    rows: int
    bytes: int
    seconds: float
    dead_rows: int = 0
    run: str = ""


class Worker:
    """Writes one part after the other through one queue."""

    def __init__(self, options: Options) -> None:
        self._options = read_options(options)
        self._target = self._options.make()
        self._letters = self._options.letters()
        self._convert = Converter(self._options.rows, target=self._target, non_finite=self._options.non_finite)
        self._sizes = self._options.sizes()
        self._turn = threading.Lock()
        self._bridge: SyncBridge = host.bridge()
        self._queue = self._make_queue()
        self._lasting: Route | None = None
        if self._options.export is not None:
            self._lasting = WorkerExporterRoute(self._target, self._options.export)
        elif not isinstance(self._target, StagingSink):
            self._lasting = route_to(self._target)

    def _make_queue(self) -> Any:
        return host.free_queue("batchqueue", replace(self._sizes.queue, consumer=handle_chunks))

    def write(self, attempt: Attempt, batches: Iterator[Any], schema: Any = None, *, run: str = "") -> Part:
        """Write a part; returns when all of it is handled, and staged where the sink stages.

        Args:
            attempt: which attempt of which part of which batch.
            batches: its record batches.
            schema: what a sink of tables is to make its table by, also where there are none; None for by values.
            run: the run of the streaming query.
        """
        started = time.perf_counter()
        with self._turn:
            bridge = host.bridge()
            if bridge is not self._bridge:  # the one before was closed
                self._bridge, self._queue = bridge, self._make_queue()
            route = self._lasting or StagedRoute(self._target.stage(attempt))
            key = None if self._lasting is None else part_key(attempt)
            keys = RecordKeys(key, self._options.key, None) if route.keyed and key is not None else None
            patience = Patience(timeout=self._options.queue.handler_timeout)
            what = f"format batchqueue: batch {attempt.key}, part {attempt.part}"
            letters = None if self._letters is None else StagedLetters(self._letters, attempt)
            bad = None if letters is None else BadRows(self._options.sink, str(attempt.key), letters)
            convert = self._convert if bad is None else partial(self._convert, refuse=bad.refuse)
            batch = MicroBatch(what, route, key, keys=keys, retries=Retries(patience), bad=bad, schema=schema)
            try:
                bridge.call(route.open)
                fed = Feeder(self._queue, bridge, self._sizes).feed(batch, _generator(batches), convert)
                bridge.call(batch.commit)
            except BaseException:
                bridge.call(batch.rollback)
                raise
            finally:
                try:
                    if self._lasting is None:
                        bridge.call(route.close)
                finally:
                    if letters is not None:
                        bridge.call(letters.close)
        dead_rows = 0 if bad is None else bad.count
        return Part(attempt, fed.rows, fed.bytes, time.perf_counter() - started, dead_rows, run)

    def close(self) -> None:
        """Give the queue and what it leads to back."""
        with self._turn:
            bridge = host.bridge()
            if bridge is self._bridge:
                host.leave_queue(self._queue.name)
                if self._lasting is not None:
                    bridge.call(self._lasting.close)


def part_key(attempt: Attempt) -> BatchKey:
    """The key of a part for sinks that can't stage: each partition is a source of its own.

    Example:
        >>> str(part_key(Attempt(BatchKey("query", 3), 1, "a7")))
        'query/1/3'
    """
    return BatchKey(f"{attempt.key.source}/{attempt.part}", attempt.key.number)


def _generator(batches: Iterator[Any]) -> Generator[Any]:
    yield from batches


class Workers:
    """The workers of this process, one for each set of options, of which the last ones used are kept."""

    def __init__(self) -> None:
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: the parent's queues are not here, and its lock may be held."""
        self._lock = threading.Lock()
        self._workers: dict[Options, Worker] = {}

    def at(self, options: Options) -> Worker:
        """The worker for these options; tasks of one Python worker come one after the other."""
        with self._lock:
            found = self._workers.pop(options, None) or Worker(options)
            self._workers[options] = found
            old = [] if len(self._workers) <= _KEPT_WORKERS else [self._workers.pop(next(iter(self._workers)))]
        for each in old:
            each.close()
        return found


_workers = Workers()


def worker(options: Options) -> Worker:
    """The worker of this process for these options."""
    return _workers.at(options)
