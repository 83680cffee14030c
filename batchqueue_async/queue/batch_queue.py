"""The queue that users hold: its public calls and the hot path, and how its parts are put together.

The hot path is written out in `produce` and in `produce_nowait` instead of being shared: a further Python call would
cost as much as the rest of it. It uses a partition's `fast_slots` and `tail` and nothing else; see `partition.py`.
Whatever that does not take goes to the `Intake`. Where the hot path is compiled, `compiled` puts C before a method,
which takes an item that finds a fast slot by a known route; see `_native`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast, overload

from batchqueue_async._native import Entrance, compiled
from batchqueue_async._support import forks, log
from batchqueue_async._support.checks import check_timeout
from batchqueue_async._support.home_loop import HomeLoop, running_loop
from batchqueue_async._support.locked import guarded
from batchqueue_async._support.log import describe
from batchqueue_async._support.registry import everything
from batchqueue_async.config import (
    CHANGEABLE,
    BufferStrategy,
    Consumer,
    Handler,
    HandlerOptions,
    QueueConfig,
    check_handler,
)
from batchqueue_async.errors import (
    ConfigError,
    DeadlockError,
    DeliveryError,
    ItemDroppedError,
    QueueClosedError,
)
from batchqueue_async.policies import TypeHash, WorkerPolicy
from batchqueue_async.queue.byte_room import ByteRoom
from batchqueue_async.queue.completion import CompletionWait
from batchqueue_async.queue.deadlock import WaitHere, caller_here
from batchqueue_async.queue.dispatch import Dispatcher
from batchqueue_async.queue.drain import DrainRules, DrainTask
from batchqueue_async.queue.intake import Intake
from batchqueue_async.queue.observer import QueueObserver
from batchqueue_async.queue.partition import Lane, Partition
from batchqueue_async.queue.rebalance import Rebalancer
from batchqueue_async.queue.router import PartitionRouter
from batchqueue_async.queue.shutdown import Shutdown, merged
from batchqueue_async.queue.stats import (
    CloseUp,
    Counters,
    Histogram,
    QueueStats,
    ShutdownReport,
    Sizes,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from types import TracebackType

    from batchqueue_async.bridge.sync_queue import SyncQueue
    from batchqueue_async.queue.limiter import CallLimiter
    from batchqueue_async.queue.ports import ThreadInbox
    from batchqueue_async.queue.router import Route

MOST_REMOVED_TYPES = 32
"""The router is cleared of types without handlers when half as many were removed, and as half of those it knows."""

T = TypeVar("T")
_TYPE = type  # add_handler's parameter hides the builtin
K = TypeVar("K")
R = TypeVar("R")
HandlerFunction = Callable[[list[K]], Awaitable[object]]


class HandlerDecorator(Protocol[K]):
    """Takes a handler of batches of K, and gives it back as it is."""

    def __call__(
        self, function: Callable[[list[K]], Coroutine[Any, Any, R]], /
    ) -> Callable[[list[K]], Coroutine[Any, Any, R]]:
        """Register the function."""
        ...


class BatchQueue(Entrance, Generic[T]):
    """A partitioned queue that hands its items to async handlers in batches.

    A queue lives on the event loop that made it, and is made by a `BatchQueueManager`. Every call from another
    thread or loop raises `WrongLoopError`; `bridge()` is for those callers.

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

    name: str
    config: QueueConfig[T]

    def __init__(
        self,
        name: str,
        config: QueueConfig[T] | None = None,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        limiter: CallLimiter | None = None,
        on_end: Callable[[BatchQueue[T]], None] | None = None,
    ) -> None:
        config = config or QueueConfig()
        config.validate(name)
        self.name = name
        self.config = config
        self._home = HomeLoop(name, loop)
        self._loop = self._home.loop
        workers, partitions = self._resolve_counts()
        self._grows = config.partitions.kind == "adaptive" and config.consumer is None
        self._counters = Counters()
        self._sizes = Sizes()
        self._latency = Histogram()
        self._dispatcher: Dispatcher[T] = Dispatcher(
            name, config, counters=self._counters, sizes=self._sizes, workers=workers, limiter=limiter
        )
        rules = DrainRules(
            max_batch=config.max_batch,
            linger=config.linger,
            min_idle=config.min_idle,
            max_idle=config.max_idle,
            whole_rounds=config.consumer is not None,
        )
        self._drains = [
            DrainTask(index, rules, self._dispatcher, self._latency, self._loop) for index in range(workers)
        ]
        self._crowded: set[Partition[T]] = set()
        made = [self._make_partition(index) for index in range(partitions)]
        # Kept by type, items lose their order among types: a single consumer, dropping the oldest, and a bound by
        # bytes, which goes by the order of the items, want that.
        lanes = (
            config.consumer is None
            and config.strategy is not BufferStrategy.DROP_OLDEST
            and config.buffer_bytes is None
        )
        self._router = PartitionRouter(
            name, config.make_selector(), made, crowded=self._crowded, grows=self._grows, lanes=lanes
        )
        for partition in made:
            self._drains[partition.index % workers].adopt(partition)
        self._intake: Intake[T] = Intake(name, config, self._router, self._counters, self._home)
        # Read by the hot path instead of asking the parts: the loop's thread, the only partition, the routes by type.
        self._here = self._home.mark
        self._thread = 0
        self._blocking = self._intake.blocking
        self._only = self._router.only
        self._by_type: Mapping[type, Partition[T] | Lane[T]] | None = self._router.by_type
        self._shutdown = Shutdown(
            name,
            drains=self._drains,
            router=self._router,
            counters=self._counters,
            dispatcher=self._dispatcher,
            loop=self._loop,
            on_end=self._tell_end,
        )
        self._observer: QueueObserver[T] = QueueObserver(
            name,
            loop=self._loop,
            capacity=config.buffer_size,
            counters=self._counters,
            sizes=self._sizes,
            latency=self._latency,
            dispatcher=self._dispatcher,
            router=self._router,
            drains=self._drains,
            shutdown=self._shutdown,
        )
        self._reviewed = False
        self._removed_types = 0
        self._rebalancer: Rebalancer[T] | None = None
        self._inbox: ThreadInbox | None = None
        self._bridge: SyncQueue[T] | None = None
        self._bridge_lock = threading.RLock()
        self._on_end = on_end
        forks.watch(self)
        everything.add("queue", self)
        if loop is None or loop is running_loop():
            self._start()
        else:
            # The loop is another thread's: whatever it is asked to do with the queue comes after this.
            loop.call_soon_threadsafe(self._start)

    def _make_partition(self, index: int) -> Partition[T]:
        config = self.config
        if config.buffer_bytes is None or config.size_of is None:
            return Partition(index, config.buffer_size, crowded=self._crowded)
        byte_room = ByteRoom(self.name, config.buffer_bytes, config.size_of)
        return Partition(index, config.buffer_size, byte_room=byte_room, crowded=self._crowded)

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
        if self._reviewed:
            return
        self._reviewed = True
        types = self._by_type
        if types is not None and len(types) < len(self._drains):
            self._warn_spread(f"{len(types)} types for {len(self._drains)} workers leave some of these without work")

    def _start(self) -> None:
        self._home.mark_thread()
        self._thread = threading.get_ident()
        for drain in self._drains:
            task = drain.start(f"{self.name}-drain-{drain.index}", self._review_spread)
            task.add_done_callback(self._drain_ended)
        if self.config.balancer is not None and len(self._drains) > 1:
            self._rebalancer = Rebalancer(self.name, self.config.balancer, self._router.partitions, self._drains)
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
        return self._intake.closed

    @property
    def forked(self) -> bool:
        """Whether the queue is the parent's, and this a forked child."""
        return self._home.forked

    @property
    def ended(self) -> bool:
        """Whether its shutdown is complete: every item is accounted for."""
        return self._shutdown.report is not None

    @property
    def partition_count(self) -> int:
        """How many partitions there are; under `adaptive` it grows with the handlers."""
        return len(self._router.partitions)

    @property
    def worker_count(self) -> int:
        """How many drain tasks there are."""
        return len(self._drains)

    def __repr__(self) -> str:
        state = "closed" if self._intake.closed else "open"
        return f"<BatchQueue {self.name!r} {state}, {self.worker_count} workers, {self.partition_count} partitions>"

    # -- one item ------------------------------------------------------------------------------------------------

    @compiled("produce")
    async def produce(self, item: T) -> bool:
        """Put an item in; under `BLOCKING` wait for room, first come, first served.

        Returns:
            True when the item was accepted: it will be handled, given to `on_error`, or be in the shutdown report.
            False when it was refused: no room (or not within `block_timeout`), dropped, or the queue is closed.

        Raises:
            WrongLoopError: on another thread or loop; use `bridge()` there.
            DeadlockError: from a handler of this queue whose own partition is full.
            ItemTooLargeError: the item alone takes more than `buffer_bytes`. Calls with many items raise it too, and
                put nothing in.

        Example:
            >>> import asyncio, batchqueue_async as bq
            >>> async def main() -> bool:
            ...     async def handle(batch: list[str]) -> None: ...
            ...     async with bq.BatchQueueManager() as manager:
            ...         return await manager.create("words", bq.QueueConfig(consumer=handle)).produce("hello")
            >>> asyncio.run(main())
            True
        """
        if self._here._is_owned():  # pyright: ignore[reportPrivateUsage]
            route: Route[T] | None = self._only
            if route is None:
                by_type = self._by_type
                if by_type is None:
                    route = self._router.route(item)
                else:
                    try:
                        route = by_type[type(item)]
                    except KeyError:
                        route = self._router.route(item)
            for _ in route.fast_slots:
                route.tail.append(item)
                return True
            return await self._wait_at(route, item)
        raise self._home.error("produce")

    async def _wait_at(self, route: Route[T], item: T) -> bool:
        """The end of `produce`, where there is no fast slot."""
        return self._intake.offer(route, item) or (self._blocking and await self._intake.wait_and_put(route, item))

    @compiled("produce_nowait")
    def produce_nowait(self, item: T) -> bool:
        """Put an item in if that is possible at once; False if it was refused or dropped.

        Raises:
            WrongLoopError: on another thread or loop; use `bridge()` there.
        """
        if self._here._is_owned():  # pyright: ignore[reportPrivateUsage]
            route: Route[T] | None = self._only
            if route is None:
                by_type = self._by_type
                if by_type is None:
                    route = self._router.route(item)
                else:
                    try:
                        route = by_type[type(item)]
                    except KeyError:
                        route = self._router.route(item)
            for _ in route.fast_slots:
                route.tail.append(item)
                return True
            return self._put_at(route, item)
        raise self._home.error("produce_nowait")

    def _put_at(self, route: Route[T], item: T) -> bool:
        """The end of `produce_nowait`, where there is no fast slot."""
        if self._intake.offer(route, item):
            return True
        if self._blocking:
            self._counters.refused += 1
        return False

    # -- many items ----------------------------------------------------------------------------------------------

    async def produce_many(self, items: Iterable[T]) -> int:
        """Put items in, in bulk when there is room for all; under `BLOCKING` wait for room for the rest.

        Returns:
            How many items were accepted: always the first so many. A call that is cancelled while it waits has put
            in the first so many too; `block_timeout` ends a wait with the number. Where the queue does not wait, the
            first item whose partition is full ends the call: go on behind it if the others need not wait for it.

        Example:
            >>> import asyncio, batchqueue_async as bq
            >>> async def main() -> int:
            ...     async def handle(batch: list[int]) -> None: ...
            ...     async with bq.BatchQueueManager() as manager:
            ...         queue = manager.create("numbers", bq.QueueConfig(consumer=handle))
            ...         return await queue.produce_many(range(1000))
            >>> asyncio.run(main())
            1000
        """
        self._home.check_thread("produce_many")
        batch = _in_order(items)
        put = self._intake.put_all(batch)
        if put is True:
            return len(batch)
        return await self._intake.put_rest(batch, None, put or None)

    def produce_many_nowait(self, items: Iterable[T]) -> int:
        """Put in as many of the items as is possible at once: always the first so many; the others are refused."""
        self._home.check_thread("produce_many_nowait")
        batch = _in_order(items)
        put = self._intake.put_all(batch)
        if put is True:
            return len(batch)
        accepted = self._intake.put_what_fits(batch, 0, None, put or None)
        self._intake.refuse(len(batch) - accepted)
        return accepted

    # -- waiting for the outcome; no item costs a future of its own ------------------------------------------------

    async def deliver(self, items: Iterable[T]) -> None:
        """Put items in, and return when all of them were handled.

        Cancelling the call takes nothing back: what was accepted by then is handled like everything else.

        Raises:
            DeliveryError: some items were refused, dropped, failed in their handler, have no handler, or were left
                over by a shutdown; `failures` says which and why.
            DeadlockError: from a handler of this queue, which would wait for itself.

        Example:
            >>> import asyncio, batchqueue_async as bq
            >>> async def main() -> None:
            ...     async def handle(batch: list[int]) -> None:
            ...         print(sum(batch))
            ...     async with bq.BatchQueueManager() as manager:
            ...         await manager.create("numbers", bq.QueueConfig(consumer=handle)).deliver([1, 2, 3])
            >>> asyncio.run(main())
            6
        """
        self._home.check("deliver")
        self._collect_inbox()
        batch = tuple(items)
        wait = CompletionWait()
        try:
            self._forbid_here("deliver")
            if self._intake.weighs:
                self._intake.weigh(batch)
            accepted = await self._intake.put_rest(batch, wait, None)
            if accepted < len(batch):
                wait.fail(batch[accepted:], self._why_refused())
            wait.seal()
            await self._outcome(wait, "deliver")
        finally:
            wait.forget()
        if wait.failures:
            failed = sum(len(failure.items) for failure in wait.failures)
            raise DeliveryError(
                f"queue {self.name!r}: {failed} of {len(batch)} items were not handled; see the failures",
                merged(wait.failures),
            )

    async def flush(self, timeout: float | None = None) -> None:
        """Return when everything accepted before the call has an outcome: handled, failed, or without a handler.

        Lingering batches leave at once. Items that come in later are not waited for.

        Raises:
            TimeoutError: `timeout` seconds passed first; the message says how many items are left.
            QueueClosedError: a shutdown left some of the items over.
            DeadlockError: from a handler of this queue, which would wait for itself.
        """
        self._home.check("flush")
        check_timeout(f"queue {self.name!r}: flush", timeout)
        self._collect_inbox()
        self._forbid_here("flush")
        wait = CompletionWait()
        for partition in self._router.partitions:
            partition.fence(wait)
        for migration in self._router.migrations:
            migration.fence(wait)
        wait.seal()
        if any(owner.task is not None and owner.task.done() for [owner] in wait.needs()):
            wait.forget()
            raise QueueClosedError(f"queue {self.name!r} has lost a drain task; shut it down: the report has its items")
        try:
            with self._hurry():
                async with asyncio.timeout(timeout):
                    await self._outcome(wait, "flush")
        except TimeoutError:
            left = self._outstanding()
            raise TimeoutError(
                f"queue {self.name!r}: flush: {left} items are left after {timeout} s; "
                "wait longer, or look for a slow handler in stats()"
            ) from None
        finally:
            wait.forget()
        if wait.lost is not None:
            raise QueueClosedError(f"queue {self.name!r} was shut down before the flush was complete; see its report")

    def _outstanding(self) -> int:
        """How many accepted items have no outcome yet."""
        waiting = sum(partition.qsize() for partition in self._router.partitions)
        moving = sum(len(migration.items) for migration in self._router.migrations)
        return waiting + moving + sum(drain.in_flight for drain in self._drains)

    def _why_refused(self) -> Exception:
        if self._intake.closed:
            return QueueClosedError(f"queue {self.name!r} is shut down and takes nothing any more")
        return ItemDroppedError(
            f"queue {self.name!r} had no room under {self.config.strategy.name} "
            f"(block_timeout={self.config.block_timeout}, buffer_size={self.config.buffer_size}, "
            f"buffer_bytes={self.config.buffer_bytes})"
        )

    @contextmanager
    def _hurry(self) -> Generator[None]:
        """Let no batch linger meanwhile."""
        for drain in self._drains:
            drain.begin_hurry()
        try:
            yield
        finally:
            for drain in self._drains:
                drain.end_hurry()

    def _collect_inbox(self) -> None:
        """What other threads have put in by now comes before whatever is asked next."""
        if self._inbox is not None:
            self._inbox.collect()

    def _forbid_here(self, call: str) -> None:
        if self.owns(caller_here()):
            raise self._endless(call, "was called from a handler of the same queue")

    def _endless(self, call: str, why: str) -> DeadlockError:
        return DeadlockError(
            f"queue {self.name!r}: {call} {why}; do not wait for {call} in a handler that it waits for; "
            f"produce, and let the caller {call}"
        )

    async def _outcome(self, wait: CompletionWait, call: str) -> None:
        """Wait to the end; while a handler of another queue does, note for whom, and refuse if that has no end."""
        with WaitHere(wait.needs, wait.break_wait):
            await wait.future
        if wait.broken:
            raise self._endless(call, "waits for a handler that waits for it")

    # -- for the bridge and the manager --------------------------------------------------------------------------

    @property
    def router(self) -> PartitionRouter[T]:
        """The queue's partitions and routes."""
        return self._router

    @property
    def intake(self) -> Intake[T]:
        """The slow ways into the queue, by which other threads and loops come too."""
        return self._intake

    @property
    def counters(self) -> Counters:
        """The queue's running counts."""
        return self._counters

    def close_up(self, partitions: int) -> CloseUp:
        """What a page shows beyond the totals, of so many partitions; from any thread."""
        return self._observer.close_up(partitions)

    def attach_inbox(self, inbox: ThreadInbox) -> None:
        """Collect from an inbox of other threads from now on."""
        self._inbox = inbox
        self._observer.attach_inbox(inbox)
        self._router.on_rerouted = inbox.meet_partitions

    def after_fork(self) -> None:
        """In a forked child, where its loop does not run: every call raises `ForkedError` from now on."""
        self._home.after_fork()
        self._here = self._home.mark
        self._thread = 0
        self._bridge_lock = threading.RLock()

    def on_own_thread(self) -> bool:
        """Whether this is the thread on which the queue's loop runs now."""
        return self._home.is_here()

    def owns(self, drain: DrainTask[Any] | None) -> bool:
        """Whether a drain task is one of this queue's."""
        return drain in self._drains

    def handler_of(self, task: asyncio.Task[Any] | None) -> str | None:
        """The handler that a task of this queue is calling, or None."""
        for drain in self._drains:
            if drain.task is task and drain.round is not None:
                entry = drain.round.entry_here()
                return None if entry is None else f"{entry.label}: {_name_of(entry.handler)}"
        return None

    def bridge(self) -> SyncQueue[T]:
        """The queue as threads and other event loops use it; may be called, and is shared, anywhere."""
        from batchqueue_async.bridge.sync_queue import SyncQueue  # noqa: PLC0415 - it stands behind this module

        if self._home.forked:
            raise self._home.error("bridge")

        def make() -> SyncQueue[T]:
            made = self._bridge or SyncQueue(self)
            if self._bridge is None:  # a signal handler of this thread may have asked for one meanwhile
                self._bridge = made
            return self._bridge

        bridge = guarded(self._bridge_lock, make)
        bridge.meet()
        return bridge

    def reconfigure(self, config: QueueConfig[T]) -> None:
        """Change `max_batch`, `linger`, `handler_timeout`, `retry`, `drain_timeout` while the queue runs.

        Raises:
            ConfigError: the configuration breaks a rule, or differs in another field too, or a handler's own
                `max_batch` would be above the queue's; nothing has changed then.
            WrongLoopError: called on another thread or loop than the queue's own.
        """
        self._home.check("reconfigure")
        config.validate(self.name)
        other = [each for each in self.config.differences(config) if each not in CHANGEABLE]
        if other:
            raise ConfigError(
                f"queue {self.name!r}: {', '.join(other)} can't change while it runs; shut it down, and make it again"
            )
        for entry in self._dispatcher.entries.values():
            if (entry.options.max_batch or 0) > config.max_batch:
                raise ConfigError(
                    f"queue {self.name!r}: max_batch={config.max_batch} is below max_batch={entry.options.max_batch} "
                    f"of the handler of {entry.label}; lower that first"
                )
        self.config = config
        self._dispatcher.reconfigure(config)
        for drain in self._drains:
            drain.reconfigure(replace(drain.rules, max_batch=config.max_batch, linger=config.linger))
        log.info("queue_reconfigured", queue=self.name, max_batch=config.max_batch, linger=config.linger)

    # -- handlers ------------------------------------------------------------------------------------------------

    # Two overloads, since a type checker does not find K in a union of the two.
    @overload
    def add_handler(
        self,
        type: type[K],
        handler: Consumer[K],
        weight: float = 1.0,
        max_batch: int | None = None,
        linger: float | None = None,
        timeout: float | None = None,
    ) -> None: ...
    @overload
    def add_handler(
        self,
        type: type[K],
        handler: HandlerFunction[K],
        weight: float = 1.0,
        max_batch: int | None = None,
        linger: float | None = None,
        timeout: float | None = None,
    ) -> None: ...
    def add_handler(  # noqa: PLR0917 - contract
        self,
        type: type[K],  # noqa: A002 - contract
        handler: Handler[K],
        weight: float = 1.0,
        max_batch: int | None = None,
        linger: float | None = None,
        timeout: float | None = None,
    ) -> None:
        """Let a handler take the items of a type, and of its subclasses that have no nearer handler.

        Calls to a handler never overlap for one type. Adding a type again replaces its handler. Under
        `PartitionPolicy.adaptive` the weights of all handlers decide how many partitions there are.

        Args:
            type: the class of the items.
            handler: an async callable of one batch, or an object with `async consume(batch)`, which may have
                `async on_idle()` and `async on_close()` too.
            weight: how much the handler adds to the number of partitions.
            max_batch: the most items per call; the queue's `max_batch` when None, which is its limit too.
            linger: how many seconds the first item of a batch may wait for more; the queue's `linger` when None.
                Types that share a partition leave together, by the shortest of their times.
            timeout: how many seconds a call may take; the queue's `handler_timeout` when None.

        Raises:
            ConfigError: not a type, not a handler, an option out of its range, or the queue has a single consumer.
            QueueClosedError: the queue is shut down.

        Example:
            >>> import asyncio, batchqueue_async as bq
            >>> async def write(batch: list[str]) -> None:
            ...     print(len(batch))
            >>> async def main() -> None:
            ...     async with bq.BatchQueueManager() as manager, manager.create("words") as words:
            ...         words.add_handler(str, write, max_batch=2, timeout=5.0)
            ...         await words.produce_many(["to", "be", "or"])
            >>> asyncio.run(main())
            2
            1
        """
        self._home.check("add_handler")
        kind = type
        options = HandlerOptions(weight=weight, max_batch=max_batch, linger=linger, timeout=timeout)
        self._check_handler(kind, handler, options)
        # Which items come is for the type to say, and the queue's own type variable does not know it.
        self._dispatcher.add(kind, cast("Handler[Any]", handler), options)
        for drain in self._drains:
            drain.wake()  # a parked drain has to look whether the handler wants on_idle
        if self._grows:
            self._grow()

    def _check_handler(self, kind: object, handler: object, options: HandlerOptions) -> None:
        subject = f"queue {self.name!r}: add_handler"
        if self._intake.closed:
            raise QueueClosedError(f"{subject}: the queue is shut down; make a new one")
        if self.config.consumer is not None:
            raise ConfigError(
                f"{subject}: the queue has a single consumer, which takes every type; make it without one"
            )
        if not isinstance(kind, _TYPE):
            raise ConfigError(f"{subject}: type={kind!r} is not a class; give the class of the items")
        check_handler(subject, handler, options, most=self.config.max_batch)

    def remove_handler(self, type: type) -> bool:  # noqa: A002 - contract
        """Take a type's handler away; False if it had none.

        A call that runs goes on to its end, and no other begins: what waits goes to the next handler that there is for
        the type by then, be it that of a base class, the fallback, or one that is added meanwhile. Items of one key
        but several types, which a round has sorted by handler, keep no order among these types when that happens.
        """
        self._home.check("remove_handler")
        removed = self._dispatcher.remove(type)
        if removed:
            self._removed_types += 1
            if 2 * self._removed_types > MOST_REMOVED_TYPES + len(self._by_type or ()):
                self._removed_types = 0
                self._router.forget_types(lambda kind: not self._dispatcher.takes(kind))
        return removed

    def handler(
        self,
        type: type[K],  # noqa: A002 - contract
        weight: float = 1.0,
        max_batch: int | None = None,
        linger: float | None = None,
        timeout: float | None = None,
    ) -> HandlerDecorator[K]:
        """Register the decorated function as the handler of a type; see `add_handler`."""

        def register(
            function: Callable[[list[K]], Coroutine[Any, Any, R]],
        ) -> Callable[[list[K]], Coroutine[Any, Any, R]]:
            self.add_handler(type, function, weight, max_batch, linger, timeout)
            return function

        return register

    def _grow(self) -> None:
        have = self.partition_count
        wanted = self.config.partitions.resolve(self.worker_count, self._dispatcher.weight)
        if wanted <= have:
            return
        new = [self._make_partition(index) for index in range(have, wanted)]
        for partition in new:
            min(self._drains, key=lambda drain: len(drain.partitions)).adopt(partition)
        if self._inbox is not None:
            self._inbox.collect()
        self._router.grow(new)
        self._router.on_rerouted()
        log.debug("queue_grown", queue=self.name, partitions=wanted)

    # -- numbers -------------------------------------------------------------------------------------------------

    def stats(self) -> QueueStats:
        """A snapshot of the queue's counters, on its loop; after shutdown it can be asked for anywhere."""
        if self._shutdown.report is None:
            self._home.check("stats")
            self._collect_inbox()
        return self._observer.read()

    def peek(self, *, totals: bool = False) -> QueueStats:
        """A snapshot of the queue's counters, from any thread and without waiting for the loop.

        Fit for a scrape while a handler blocks the loop: what a busy loop has not seen yet is counted, and
        `loop_lag` says how late the loop is. `age` is above 0 when only an older snapshot added up.

        Args:
            totals: leave out partitions, workers, handlers, distributions and `loop_lag`, for who looks at hundreds
                of queues.

        Example:
            >>> import asyncio, threading, batchqueue_async as bq
            >>> async def main() -> None:
            ...     async with bq.BatchQueueManager() as manager:
            ...         queue = manager.create("words", bq.QueueConfig())
            ...         await queue.produce_many(["to", "be"])
            ...         reader = threading.Thread(target=lambda: print(queue.peek().used, "waiting"))
            ...         reader.start()
            ...         reader.join()
            >>> asyncio.run(main())
            2 waiting
        """
        return self._observer.peek(totals=totals)

    # -- the end -------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """The queue itself; leaving the block shuts it down.

        Example:
            >>> import asyncio, batchqueue_async as bq
            >>> async def handle(batch: list[int]) -> None:
            ...     print(sum(batch))
            >>> async def main() -> None:
            ...     async with bq.BatchQueueManager() as manager:
            ...         async with manager.create("numbers", bq.QueueConfig(consumer=handle)) as numbers:
            ...             await numbers.produce_many([1, 2, 3])
            >>> asyncio.run(main())
            6
        """
        self._home.check("async with")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut the queue down, within its `drain_timeout`; what is left over is in the log and in `shutdown()`."""
        await self.shutdown()

    async def shutdown(self, timeout: float | None = None) -> ShutdownReport:
        """Close the gate, handle what is left within `timeout` seconds, and account for every accepted item.

        Producers that wait for room are sent away at once with False. Whatever the deadline cuts off comes back in
        the report's `undelivered`. A second call joins the first, and can only bring its deadline forward.

        Args:
            timeout: seconds for the final drain; `config.drain_timeout` when None.

        Raises:
            DeadlockError: from a handler of this queue, which the shutdown would wait for.
        """
        self._home.check("shutdown")
        check_timeout(f"queue {self.name!r}: shutdown", timeout)
        self.forbid_shutdown_here()
        deadline = self._loop.time() + (self.config.drain_timeout if timeout is None else timeout)
        if self._shutdown.report is not None:
            return self._shutdown.report
        if self._shutdown.begun:
            self._shutdown.hasten(deadline)
        else:
            self.close_gate()
            self._shutdown.begin(deadline)
        return await self._shutdown.wait()

    def abandon(self) -> ShutdownReport:
        """Account for everything without the queue's loop, which has ended or does not answer."""
        if self._shutdown.report is not None:
            return self._shutdown.report
        self._close_intake()
        return self._shutdown.abandon([] if self._inbox is None else self._inbox.give_back())

    def _tell_end(self) -> None:
        """The report is there: whoever keeps a list of queues may let go of this one."""
        everything.remove(self)
        if self._on_end is not None:
            self._on_end(self)

    def close_gate(self) -> None:
        """Take nothing in from now on, and send waiting producers away; the first step of a shutdown."""
        if self._intake.closed:
            return
        self._close_intake()
        if self._rebalancer is not None:
            self._rebalancer.stop()
        if self._inbox is not None:
            self._inbox.close()
        self._intake.send_away()

    def _close_intake(self) -> None:
        self._intake.close()
        self._thread = 0  # no thread's, so that the compiled hot path takes nothing in either

    def forbid_shutdown_here(self) -> None:
        """Raise `DeadlockError` if this runs in a handler of the queue."""
        if self.owns(caller_here()):
            raise self._shutdown.deadlock()

    def _drain_ended(self, task: asyncio.Task[None]) -> None:
        """A drain task that ends while the queue is open has lost its loop, or met a fault of this library."""
        if self._intake.closed and (task.cancelled() or task.exception() is None):
            return
        self.close_gate()
        self._shutdown.lose(next(drain for drain in self._drains if drain.task is task))
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


def _in_order(items: Iterable[T]) -> Sequence[T]:
    """Items that can be counted: a list or a tuple itself; a class of the user's may count otherwise."""
    kind = type(items)
    return cast("Sequence[T]", items) if kind is list or kind is tuple else list(items)
