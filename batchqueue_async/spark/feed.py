"""Record batches into a queue, from a thread, until all of them are handled or one failed."""

from __future__ import annotations

import gc
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from batchqueue_async.errors import DeliveryError, Failure, QueueClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from batchqueue_async.bridge.sync_bridge import SyncBridge
    from batchqueue_async.bridge.sync_queue import SyncQueue
    from batchqueue_async.spark.route import Route

_USUAL_THRESHOLD = 2_000  # of Python 3.13; 700 before
_RARE_THRESHOLD = 100_000


class Fed(NamedTuple):
    """What went through the queue: rows, and bytes of Arrow data."""

    rows: int = 0
    bytes: int = 0


@contextmanager
def rarer_collections() -> Generator[None]:
    """Let the cyclic garbage collector run once in 100,000 new containers meanwhile, unless the program set it itself.

    Rows come and go by the ten thousand and hold no cycles, but each is a container: by default the collector walks
    over those that are alive every 700 or 2,000 of them, a third of the time that rows as tuples take.
    """
    threshold, *older = gc.get_threshold()
    if not 0 < threshold <= _USUAL_THRESHOLD:
        yield
        return
    gc.set_threshold(_RARE_THRESHOLD, *older)
    try:
        yield
    finally:
        gc.set_threshold(threshold, *older)


def feed(
    what: str,
    batches: Generator[Any],
    *,
    queue: SyncQueue[Any],
    route: Route,
    bridge: SyncBridge,
    convert: Callable[[Any], list[Any]],
    unit: int,
) -> Fed:
    """Put rows into the queue, at most `unit` at once, and return when the route has handled all of them.

    Raises:
        DeliveryError: the route failed; what is left was not put in, or dropped by the route.
    """
    handed = rows = size = 0
    try:
        with rarer_collections(), closing(batches):
            for batch in batches:
                for start in range(0, batch.num_rows, unit):
                    items = convert(batch.slice(start, unit))
                    if not handed:
                        bridge.call(route.prepare)
                    if route.failure is not None:
                        break
                    handed += len(items)
                    queue.produce_many(items)
                rows += batch.num_rows
                size += batch.nbytes
                if route.failure is not None:
                    break
    finally:
        with suppress(QueueClosedError):  # the count tells
            queue.flush()  # nothing of this batch may come into the next one
    error = route.failure
    if error is None and route.taken < handed:
        error = QueueClosedError(f"only {route.taken} of {handed} items reached the handler before the queue closed")
    if error is not None:
        raise DeliveryError(
            f"{what}: its rows were not handled: {type(error).__qualname__}: {error}", [Failure((), error)]
        ) from error
    return Fed(rows, size)
