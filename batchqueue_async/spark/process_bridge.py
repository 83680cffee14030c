"""The event loop of this process's Spark work: one bridge, made on first use, in the driver and in each worker."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchqueue_async.bridge.sync_bridge import SyncBridge
from batchqueue_async.config import BufferStrategy, QueueConfig
from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    from batchqueue_async.bridge.sync_queue import SyncQueue

ARROW_ROWS = 10_000
"""The most rows of one Arrow record batch that is put into a queue; Spark makes them of this size by default."""

_QUARTERS = 4

_lock = threading.Lock()
_bridges: dict[int, SyncBridge] = {}
_users: dict[str, int] = {}


def bridge() -> SyncBridge:
    """The bridge of this process; a forked child gets its own."""
    with _lock:
        found = _bridges.get(os.getpid())
        if found is None:
            _bridges.clear()
            _users.clear()
            found = _bridges[os.getpid()] = SyncBridge()
        return found


def free_queue(name: str, config: QueueConfig[Any]) -> SyncQueue[Any]:
    """A queue of its own for one consumer, under the name, or under the name and a number where that is taken."""
    number = 1
    while True:
        wanted = name if number == 1 else f"{name}#{number}"
        if bridge().manager.get(wanted) is None:
            return bridge().get_or_create(wanted, config)
        number += 1


def shared_queue(name: str, config: QueueConfig[Any]) -> SyncQueue[Any]:
    """The queue of that name, for one more of its users; the last to leave ends it."""
    queue = bridge().get_or_create(name, config)
    with _lock:
        _users[name] = _users.get(name, 0) + 1
    return queue


def leave_queue(name: str) -> None:
    """End a queue, unless others share it."""
    with _lock:
        left = _users.pop(name, 1) - 1
        if left:
            _users[name] = left
            return
    found = bridge()
    found.call(found.manager.shutdown, name)


def sized(name: str, config: QueueConfig[Any], rows_in_flight: int, *, whole: bool) -> tuple[QueueConfig[Any], int]:
    """A configuration under which at most `rows_in_flight` rows are on their way, and the rows of one hand-over.

    A quarter waits in the queue's partitions, a quarter is with its handlers, a quarter is being handed over, and a
    quarter is left for the record batch from which rows are made. With `whole` the items are record batches.

    Example:
        >>> config, rows = sized("q", QueueConfig(), 40_000, whole=False)
        >>> config.buffer_size, config.max_batch, rows
        (10000, 10000, 10000)
    """
    if config.strategy is not BufferStrategy.BLOCKING or config.block_timeout is not None:
        raise ConfigError(
            f"queue {name!r}: strategy={config.strategy.name} with block_timeout={config.block_timeout} may refuse "
            "rows of a batch that Spark counts as written; use BLOCKING without block_timeout"
        )
    workers = config.workers.resolve() if config.workers is not None else 1
    slots = max(workers, config.partitions.resolve(workers))
    share = rows_in_flight // _QUARTERS // slots
    if share < 1:
        raise ConfigError(
            f"queue {name!r}: rows_in_flight={rows_in_flight} is below {_QUARTERS * slots}, four rows for each of "
            f"{slots} workers or partitions; raise rows_in_flight"
        )
    unit = min(share, ARROW_ROWS)
    most = share // unit if whole else share
    return replace(config, buffer_size=most, max_batch=min(config.max_batch, most)), unit
