"""The queue that users hold: handlers, growth, numbers and the end; its way in is in `producing.py`."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async.config import BufferStrategy, Handler, QueueConfig, check_handler
from batchqueue_async.errors import ConfigError, DeadlockError, ForkedError, QueueClosedError
from batchqueue_async.policies import TypeHash, WorkerPolicy
from batchqueue_async.queue.delivering import Delivering
from batchqueue_async.queue.dispatch import Dispatcher, Entry
from batchqueue_async.queue.drain import DrainRules, Worker
from batchqueue_async.queue.partition import Partition
from batchqueue_async.queue.rebalance import Rebalancer
from batchqueue_async.queue.router import Placement
from batchqueue_async.queue.shutdown import Closing
from batchqueue_async.queue.stats import Histogram, PartitionStats, QueueStats, ShutdownReport, Sizes, WorkerStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchqueue_async.bridge.sync_queue import SyncQueue
    from batchqueue_async.queue.stats import Tally
    from batchqueue_async.queue.waits import Turns

T = TypeVar("T")
_TYPE = type  # add_handler's parameter hides the builtin
HandlerT = TypeVar("HandlerT", bound="Callable[..., Any]")


class Door(Protocol):
    """What the queue knows of the door by which other threads come in."""

    def collect(self) -> None:
        """Move what came in into the partitions."""
        ...

    def meet_partitions(self) -> None:
        """Get to know new partitions and routes."""
        ...

    def close(self) -> None:
        """Take nothing in any more."""
        ...

    def give_back(self) -> list[Any]:
        """What came in and the queue's loop has not seen."""
        ...


class BatchQueue(Delivering[T], Generic[T]):
    """A partitioned queue that hands its items to async handlers in batches.

    A queue lives on the event loop that made it, and is made by a `BatchQueueManager`. Every call from another
    thread or loop raises `WrongLoopError`; `bridge()` gives those callers a door of their own.

    Example:
        >>> import asyncio, batchqueue_async as bq
        >>> async def main() -> None:
        ...     async with bq.BatchQueueManager() as manager:
        ...         queue: bq.BatchQueue[str] = manager.create("words", bq.QueueConfig())
        ...         @queue.handler(str)
        ...         async def count(batch: list[str]) -> None:
        ...             print(len(batch), "words")
        ...         await queue.produce_many(["to", "be", "or", "not"])
        >>> asyncio.run(main())
        4 words

    Attributes:
        name: the name under which the manager knows the queue.
        config: what the queue was made with.
    """

    make_bridge: ClassVar[Callable[[BatchQueue[Any]], SyncQueue[Any]] | None] = None
    """Set by the bridge, which stands behind this module in an item's way."""

    def __init__(
        self,
        name: str,
        config: QueueConfig[T] | None = None,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        limiter: Turns | None = None,
    ) -> None:
        super().__init__(name, config or QueueConfig(), loop)
        config = self.config
        workers, partitions = self._resolve_counts()
        self._grows = config.partitions.kind == "adaptive" and config.consumer is None
        self._sizes = Sizes()
        self._latency = Histogram()
        self._dispatcher: Dispatcher[T] = Dispatcher(
            name=name,
            tally=self._tally,
            sizes=self._sizes,
            max_batch=config.max_batch,
            handler_timeout=config.handler_timeout,
            on_error=config.on_error,
            limiter=limiter,
        )
        if config.consumer is not None:
            self._dispatcher.single = Entry("consumer", config.consumer, calls_at_once=workers)
        if config.fallback is not None:
            self._dispatcher.fallback = Entry("fallback", config.fallback)
        rules = DrainRules(
            max_batch=config.max_batch,
            linger=config.linger,
            min_idle=config.min_idle,
            max_idle=config.max_idle,
            whole_rounds=config.consumer is not None,
        )
        self._workers = [Worker(index, rules, self._dispatcher, self._latency, self._loop) for index in range(workers)]
        made = [Partition[T](index, config.buffer_size) for index in range(partitions)]
        # Kept by type, items lose their order among types: a single consumer, and dropping the oldest, want that.
        lanes = config.consumer is None and config.strategy is not BufferStrategy.DROP_OLDEST
        self._placement = Placement(name, config.make_selector(), made, grows=self._grows, lanes=lanes)
        for partition in made:
            self._workers[partition.index % workers].adopt(partition)
        self._only = self._placement.only
        self._by_type = self._placement.by_type
        self._closing: asyncio.Task[ShutdownReport] | None = None
        self._closer = Closing(name, self._workers, self._placement, self._tally, self._loop)
        self._report: ShutdownReport | None = None
        self._rebalancer: Rebalancer[T] | None = None
        self._bridge: SyncQueue[T] | None = None
        self._bridge_lock = threading.Lock()
        self._pid = os.getpid()
        if loop is None:
            self._start()
        else:
            # The loop is another thread's: whatever it is asked to do with the queue comes after this.
            loop.call_soon_threadsafe(self._start)

    def _resolve_counts(self) -> tuple[int, int]:
        config = self.config
        # A queue on a shared scheduler has one drain task: the scheduler's policy bounds the calls, not the tasks.
        policy = WorkerPolicy.fixed(1) if config.scheduler is not None else config.workers or WorkerPolicy.fixed(1)
        workers = policy.resolve()
        partitions = config.partitions.resolve(workers)
        if partitions < workers:
            log.warning("workers_reduced", queue=self.name, workers=workers, partitions=partitions)
            workers = partitions
        if config.consumer is not None and partitions > 1 and isinstance(config.selector, TypeHash):
            self._warn_spread("a single consumer takes every type, so items of one type keep to one partition")
        return workers, partitions

    def _warn_spread(self, reason: str) -> None:
        log.warning(
            "type_hash_cannot_spread", queue=self.name, reason=reason, way_out="selector=round_robin() or by_key(fn)"
        )

    def _review_spread(self) -> None:
        for worker in self._workers:
            worker.review = None
        types = self._by_type
        if types is not None and len(types) < len(self._workers):
            self._warn_spread(f"{len(types)} types for {len(self._workers)} workers leave some of these without work")

    def _start(self) -> None:
        self._mark_thread()
        for worker in self._workers:
            worker.review = self._review_spread
            worker.task = self._loop.create_task(worker.run(), name=f"{self.name}-drain-{worker.index}")
            worker.task.add_done_callback(self._worker_ended)
        if self.config.balancer is not None and len(self._workers) > 1:
            self._rebalancer = Rebalancer(self.name, self.config.balancer, self._placement.partitions, self._workers)
            self._rebalancer.start(self._loop, self.config.balance_interval)
        log.info(
            "queue_created",
            queue=self.name,
            workers=self.worker_count,
            partitions=self.partition_count,
            buffer_size=self.config.buffer_size,
            strategy=self.config.strategy.value,
        )

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the queue lives on."""
        return self._loop

    @property
    def closed(self) -> bool:
        """Whether the queue takes nothing any more."""
        return self._closed

    @property
    def ended(self) -> bool:
        """Whether its shutdown is complete: every item is accounted for."""
        return self._report is not None

    @property
    def partition_count(self) -> int:
        """How many partitions there are; under `adaptive` it grows with the handlers."""
        return len(self._placement.partitions)

    @property
    def worker_count(self) -> int:
        """How many drain tasks there are."""
        return len(self._workers)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<BatchQueue {self.name!r} {state}, {self.worker_count} workers, {self.partition_count} partitions>"

    # -- for the door by which other threads come in -----------------------------------------------------------

    @property
    def placement(self) -> Placement[T]:
        """The queue's partitions and routes."""
        return self._placement

    @property
    def tally(self) -> Tally:
        """The queue's running counts."""
        return self._tally

    def set_door(self, door: Door) -> None:
        """Collect from a door from now on."""
        self._door = door
        self._placement.on_rerouted = door.meet_partitions

    def force(self, item: T) -> None:
        """Put an item in that was accepted already, at the cost of older ones."""
        place = self._placement.place(item)
        if not place.offer(item):
            place.evict()
            self._tally.dropped_after += 1
            place.offer(item)

    def on_own_thread(self) -> bool:
        """Whether this is the thread on which the queue's loop runs now."""
        return self._here._is_owned() and self._loop.is_running()

    def round_here(self) -> Worker[Any] | None:
        """The worker in whose handler call this code runs, if any."""
        return self._round_here()

    def has_worker(self, worker: Worker[Any]) -> bool:
        """Whether a worker is one of this queue's."""
        return worker in self._workers

    def handler_of(self, task: asyncio.Task[Any] | None) -> str | None:
        """The handler that a task of this queue is calling, or None."""
        for worker in self._workers:
            if worker.task is task and worker.in_round and worker.place < len(worker.groups):
                entry = worker.groups[worker.place][0]
                return None if entry is None else f"{entry.label}: {_name_of(entry.handler)}"
        return None

    def bridge(self) -> SyncQueue[T]:
        """The queue as threads and other event loops use it; may be called, and is shared, anywhere."""
        if BatchQueue.make_bridge is None:
            raise AssertionError("import batchqueue_async, not a part of it")
        if os.getpid() != self._pid:
            raise ForkedError(
                f"queue {self.name!r} was made before this process was forked, and its loop's thread did not come "
                "along; make a new manager and queue in the child"
            )
        with self._bridge_lock:
            if self._bridge is None:
                self._bridge = BatchQueue.make_bridge(self)
        self._bridge.meet()
        return self._bridge

    # -- handlers ------------------------------------------------------------------------------------------------

    def add_handler(self, type: type, handler: Handler[Any], weight: float = 1.0) -> None:  # noqa: A002 - contract
        """Let a handler take the items of a type, and of its subclasses that have no nearer handler.

        A handler is never called beside itself for one type. Adding a type again replaces its handler. Under
        `PartitionPolicy.adaptive` the weights of all handlers decide how many partitions there are.

        Raises:
            ConfigError: not a type, not a handler, a weight that is not above 0, or the queue has a single consumer.
            QueueClosedError: the queue is shut down.
        """
        self._check_loop("add_handler")
        kind = type
        self._check_handler(kind, handler, weight)
        self._dispatcher.add(kind, handler, float(weight))
        for worker in self._workers:
            worker.wake()  # a parked drain has to look whether the handler wants on_idle
        if self._grows:
            self._grow()

    def _check_handler(self, kind: object, handler: object, weight: object) -> None:
        subject = f"queue {self.name!r}: add_handler"
        if self._closed:
            raise QueueClosedError(f"{subject}: the queue is shut down; make a new one")
        if self.config.consumer is not None:
            raise ConfigError(
                f"{subject}: the queue has a single consumer, which takes every type; make it without one"
            )
        if not isinstance(kind, _TYPE):
            raise ConfigError(f"{subject}: type={kind!r} is not a class; give the class of the items")
        check_handler(subject, handler, weight)

    def remove_handler(self, type: type) -> bool:  # noqa: A002 - contract
        """Take a type's handler away; False if it had none. A call that runs goes on to its end."""
        self._check_loop("remove_handler")
        return self._dispatcher.remove(type)

    def handler(self, type: type, weight: float = 1.0) -> Callable[[HandlerT], HandlerT]:  # noqa: A002 - contract
        """Register the decorated function as the handler of a type; see `add_handler`."""

        def register(function: HandlerT) -> HandlerT:
            self.add_handler(type, function, weight)
            return function

        return register

    def _grow(self) -> None:
        weight = sum(entry.weight for entry in self._dispatcher.entries.values())
        have = self.partition_count
        wanted = self.config.partitions.resolve(self.worker_count, weight)
        if wanted <= have:
            return
        new = [Partition[T](index, self.config.buffer_size) for index in range(have, wanted)]
        for partition in new:
            min(self._workers, key=lambda worker: len(worker.partitions)).adopt(partition)
        if self._door is not None:
            self._door.collect()
        self._placement.grow(new)
        self._placement.on_rerouted()
        log.debug("queue_grown", queue=self.name, partitions=wanted)

    # -- numbers -------------------------------------------------------------------------------------------------

    def stats(self) -> QueueStats:
        """A snapshot of the queue's counters; after shutdown it can be asked for anywhere."""
        if self._report is None:
            self._check_loop("stats")
            self._collect_door()
        tally = self._tally
        partitions = self._placement.partitions
        moving = sum(len(transit.items) for transit in self._placement.transits)
        accepted = sum(partition.accepted for partition in partitions) + moving + tally.dropped_at_door
        undelivered = len(self._report.undelivered) if self._report is not None else 0
        now = self._workers[0].clock()
        waiting = [partition.since for partition in partitions if partition.qsize()]
        return QueueStats(
            name=self.name,
            attempted=accepted + tally.refused + tally.dropped_before,
            accepted=accepted,
            refused=tally.refused,
            dropped_before=tally.dropped_before,
            dropped_after=tally.dropped_after,
            handled=tally.handled,
            failed=tally.failed,
            unhandled=tally.unhandled,
            in_flight=sum(worker.pending for worker in self._workers),
            undelivered=undelivered,
            used=sum(partition.qsize() for partition in partitions) + moving,
            capacity=len(partitions) * self.config.buffer_size,
            oldest_age=max(0.0, now - min(waiting)) if waiting else 0.0,
            partitions=tuple(
                PartitionStats(
                    index=each.index,
                    used=each.qsize(),
                    capacity=each.capacity,
                    accepted=each.accepted,
                    owner=each.owner.index if each.owner is not None else -1,
                    waiting=len(each.waiters or ()),
                )
                for each in partitions
            ),
            workers=tuple(
                WorkerStats(
                    index=each.index,
                    partitions=len(each.partitions),
                    taken=each.taken,
                    busy=each.busy,
                    in_flight=each.pending,
                )
                for each in self._workers
            ),
            batch_sizes=self._sizes.summary(),
            queue_latency=self._latency.summary(),
        )

    # -- the end -------------------------------------------------------------------------------------------------

    async def shutdown(self, timeout: float | None = None) -> ShutdownReport:
        """Close the gate, handle what is left within `timeout` seconds, and account for every accepted item.

        Producers that wait for room are sent away at once with False. Whatever the deadline cuts off comes back in
        the report's `undelivered`. A second call joins the first, and can only bring its deadline forward.

        Args:
            timeout: seconds for the final drain; `config.drain_timeout` when None.

        Raises:
            DeadlockError: from a handler of this queue, which the shutdown would wait for.
        """
        self._check_loop("shutdown")
        self.forbid_shutdown_here()
        deadline = self._loop.time() + (self.config.drain_timeout if timeout is None else max(0.0, timeout))
        if self._closing is None:
            self.close_gate()
            self._closing = self._loop.create_task(self._finish(deadline), name=f"{self.name}-shutdown")
        else:
            self._closer.hasten(deadline)
        # Several callers may wait for the one shutdown: cancelling one of them must not end it for the others.
        return await asyncio.shield(self._closing)

    async def _finish(self, deadline: float) -> ShutdownReport:
        self._report = await self._closer.run(deadline)
        return self._report

    def abandon(self) -> ShutdownReport:
        """Account for everything without the queue's loop, which has ended or does not answer."""
        if self._report is None:
            self._closed = True
            self._report = self._closer.abandon([] if self._door is None else self._door.give_back())
        return self._report

    def close_gate(self) -> None:
        """Take nothing in from now on, and send waiting producers away; the first step of a shutdown."""
        if self._closed:
            return
        self._closed = True
        if self._rebalancer is not None:
            self._rebalancer.stop()
        if self._door is not None:
            self._door.close()
        for partition in self._placement.partitions:
            partition.close()

    def forbid_shutdown_here(self) -> None:
        """Raise `DeadlockError` if this runs in a handler of the queue."""
        worker = self._round_here()
        if worker in self._workers and asyncio.current_task() is worker.task:
            raise DeadlockError(
                f"queue {self.name!r}: shutdown was called from one of its own handlers, which it would wait for; "
                "let the handler return and shut down from outside, e.g. by asyncio.create_task(queue.shutdown())"
            )

    def _worker_ended(self, task: asyncio.Task[None]) -> None:
        """A drain task that ends while the queue is open has lost its loop, or met a fault of this library."""
        if self._closed and (task.cancelled() or task.exception() is None):
            return
        self.close_gate()
        self._closer.lose(next(worker for worker in self._workers if worker.task is task))
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("worker_died", queue=self.name, **describe(error))
        else:
            log.error(
                "queue_abandoned",
                queue=self.name,
                items=self._outstanding(),
                way_out="shut the queue down, or use `async with BatchQueueManager()`, before the loop ends",
            )


def _name_of(handler: object) -> str:
    return getattr(handler, "__qualname__", type(handler).__qualname__)
