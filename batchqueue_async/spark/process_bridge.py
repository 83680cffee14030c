"""The event loop of this process's Spark work: one bridge, made on first use, in the driver and in each worker."""

from __future__ import annotations

import atexit
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from batchqueue_async._support import forks, log
from batchqueue_async.bridge.sync_bridge import SyncBridge
from batchqueue_async.config import BufferStrategy, QueueConfig
from batchqueue_async.errors import ConfigError, ForkedError, QueueClosedError
from batchqueue_async.policies import RoundRobin, TypeHash

if TYPE_CHECKING:
    from batchqueue_async.bridge.sync_queue import SyncQueue
    from batchqueue_async.spark.micro_batch import Chunk

ARROW_ROWS = 10_000
"""The most rows of one Arrow record batch that is put into a queue; Spark makes them of this size by default."""

_QUARTERS = 4

_EXIT = 60.0
"""Seconds that one destination may take to close at the exit of the program."""


class Closable(Protocol):
    """What is closed at the exit of the program, if nobody did it before."""

    def is_busy(self) -> bool:
        """Whether another thread still uses it."""
        ...

    async def close(self) -> None:
        """Give everything back."""
        ...


class Host:
    """The bridge of this process, and what is known of its queues.

    Invariants: everything here belongs to the bridge of `_bridge`; with a new one it begins anew. `_lock` is never held
    while the bridge's loop is waited for, but for `_making`, which is held while a queue is made.
    """

    def __init__(self) -> None:
        self._begin()
        self._open: dict[Closable, None] = {}
        forks.watch(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._bridge: SyncBridge | None = None
        self._users: dict[str, int] = {}
        self._row_types: dict[tuple[str, type], weakref.ref[object]] = {}

    def after_fork(self) -> None:
        """In a forked child: the parent's loop is not here, and its locks may be held."""
        self._begin()
        self._open = {}

    def bridge(self) -> SyncBridge:
        """The bridge of this process; a new one where the last one was closed."""
        with self._lock:
            if self._bridge is None or not _is_usable(self._bridge):
                self._bridge = SyncBridge()
                self._users.clear()
                self._row_types.clear()
            return self._bridge

    def free_queue(self, name: str, config: QueueConfig[Any]) -> SyncQueue[Any]:
        """A queue of its own for one consumer, under the name, or under the name and a number where that is taken."""
        with self._making:
            number, wanted = 1, name
            while self.bridge().manager.get(wanted) is not None:
                number += 1
                wanted = f"{name}#{number}"
            return self.bridge().get_or_create(wanted, config)

    def shared_queue(self, name: str, config: QueueConfig[Any], rows: type, user: object) -> SyncQueue[Any]:
        """The queue of that name, for one more of its users; the last to leave ends it.

        Raises:
            ConfigError: another user brings rows of the same type.
        """
        with self._making:
            bridge = self.bridge()
            with self._lock:
                other = self._row_types.get((name, rows), lambda: None)()
                if other is not None and other is not user:
                    raise ConfigError(
                        f"queue {name!r}: another DriverSink of that name brings rows of type {rows.__qualname__} too, "
                        "and a queue has one handler for a type; give this one another name or rows of a type of their "
                        "own, or close the other one first"
                    )
                self._row_types[name, rows] = weakref.ref(user)
                self._users[name] = self._users.get(name, 0) + 1
            return bridge.get_or_create(name, config)

    def leave_queue(self, name: str, rows: type | None = None) -> None:
        """End a queue, unless others share it."""
        with self._lock:
            bridge = self._bridge
            if rows is not None:
                self._row_types.pop((name, rows), None)
            left = self._users.pop(name, 1) - 1
            if left:
                self._users[name] = left
                return
        if bridge is not None and _is_usable(bridge):
            bridge.call(bridge.manager.shutdown, name)

    def close_at_exit(self, thing: Closable) -> None:
        """Close it when the program ends, unless it is closed by then."""
        self._open[thing] = None

    def closed(self, thing: Closable) -> None:
        """Nothing is left to do for it at the exit."""
        self._open.pop(thing, None)

    def close_idle(self) -> None:
        """Close what is still open and not in use: as the main thread ends, and when its last users have ended."""
        bridge = self._bridge
        if bridge is None or not _is_usable(bridge):
            return
        for each in [each for each in self._open if not each.is_busy()]:
            self.closed(each)
            try:
                bridge.call(each.close, timeout=_EXIT)
            except Exception as error:  # noqa: BLE001 - the program ends: the others shall be closed too
                log.error("spark_sink_not_closed", sink=type(each).__qualname__, **log.describe(error))


def _is_usable(bridge: SyncBridge) -> bool:
    """Whether the bridge is open, and of this process."""
    try:
        bridge.queue("")
    except (QueueClosedError, ForkedError):
        return False
    except ConfigError:  # there is no queue without a name: the bridge looked
        return True
    return True


host = Host()
"""That of this process."""

# Once as the main thread ends, because the pools of `concurrent.futures`, which sinks have, take no more work after
# that; and once before the loops end, for what other threads used until then.
getattr(threading, "_register_atexit", atexit.register)(host.close_idle)
atexit.register(host.close_idle)


def bridge() -> SyncBridge:
    """The bridge of this process."""
    return host.bridge()


def by_partition(chunk: Chunk, partition_count: int) -> int:
    """The selector of a queue of chunks whose rows were asked for their partitions."""
    return chunk.partition % partition_count


class Sizes:
    """What a queue of chunks may hold, so that at most `rows_in_flight` rows and `bytes_in_flight` are on their way.

    A quarter waits in the queue's partitions, a quarter is with its handlers, a quarter is being handed over, and a
    quarter is left for the record batch from which rows are made.

    Example:
        >>> sizes = Sizes("q", QueueConfig(), 40_000, whole=False)
        >>> sizes.unit, sizes.queue.buffer_size, sizes.queue.max_batch
        (10000, 1, 1)

    Attributes:
        queue: the configuration of the queue of chunks.
        unit: the most rows of a chunk.
        unit_bytes: the most bytes of Arrow data that a chunk is made from.
        selector: asks each row for its partition; None where chunks go round.
    """

    def __init__(
        self,
        name: str,
        config: QueueConfig[Any],
        rows_in_flight: int,
        *,
        whole: bool,
        bytes_in_flight: int | None = None,
    ) -> None:
        if config.strategy is not BufferStrategy.BLOCKING or config.block_timeout is not None:
            raise ConfigError(
                f"queue {name!r}: strategy={config.strategy.name} with block_timeout={config.block_timeout} may refuse "
                "rows of a batch that Spark counts as written; use BLOCKING without block_timeout"
            )
        workers = config.workers.resolve() if config.workers is not None else 1
        self.slots = max(workers, config.partitions.resolve(workers))
        share = rows_in_flight // _QUARTERS // self.slots
        if share < 1:
            raise ConfigError(
                f"queue {name!r}: rows_in_flight={rows_in_flight} is below {_QUARTERS * self.slots}, four rows for "
                f"each of {self.slots} workers or partitions; raise rows_in_flight"
            )
        self.unit = min(share, ARROW_ROWS if whole else min(ARROW_ROWS, config.max_batch))
        chunks = share // self.unit
        self.unit_bytes = None
        if bytes_in_flight is not None:
            if bytes_in_flight < 1:
                raise ConfigError(f"queue {name!r}: bytes_in_flight={bytes_in_flight} is below 1; raise it")
            self.unit_bytes = max(1, bytes_in_flight // _QUARTERS // self.slots // chunks)
        most = min(chunks, config.max_batch if whole else max(1, config.max_batch // self.unit))
        rounds = isinstance(config.selector, TypeHash | RoundRobin)
        self.selector = None if rounds or self.slots == 1 else config.selector
        self.queue: QueueConfig[Any] = replace(
            config,
            buffer_size=chunks,
            max_batch=most,
            handler_timeout=None,  # each batch applies it to its own calls
            fallback=None,
            on_error=None if config.on_error is None else _OnError(config.on_error),
            selector=config.selector if self.selector is None else by_partition,
        )


class _OnError:
    """The user's error handler, which knows rows."""

    def __init__(self, on_error: Any) -> None:
        self._on_error = on_error

    def __call__(self, chunks: Any, error: BaseException) -> Any:
        return self._on_error([row for chunk in chunks for row in chunk.rows], error)
