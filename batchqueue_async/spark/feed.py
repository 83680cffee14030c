"""Record batches into a queue, from a thread, until all of them are handled or one failed."""

from __future__ import annotations

import gc
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from batchqueue_async.errors import DeliveryError, Failure, QueueClosedError
from batchqueue_async.spark.micro_batch import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from batchqueue_async.bridge.sync_bridge import SyncBridge
    from batchqueue_async.bridge.sync_queue import SyncQueue
    from batchqueue_async.spark.micro_batch import MicroBatch
    from batchqueue_async.spark.process_bridge import Sizes

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


class Feeder:
    """Feeds batches into one queue.

    Example:
        >>> Feeder.__name__
        'Feeder'
    """

    def __init__(self, queue: SyncQueue[Any], bridge: SyncBridge, sizes: Sizes, chunk: type[Chunk] = Chunk) -> None:
        self._chunk = chunk
        self._queue = queue
        self._bridge = bridge
        self._sizes = sizes

    def feed(
        self,
        batch: MicroBatch,
        found: Generator[Any],
        convert: Callable[[Any], list[Any]],
        on_first: Callable[[], None] = lambda: None,
    ) -> Fed:
        """Put rows into the queue and return when the batch has handled all of them.

        Args:
            batch: what the rows belong to.
            found: the record batches.
            convert: makes items of one.
            on_first: called when the batch is prepared, before its first rows go into the queue.

        Raises:
            DeliveryError: the batch failed; what is left was not put in, or dropped by the batch.
        """
        handed = rows = size = 0
        try:
            with rarer_collections(), closing(found):
                for record_batch in found:
                    for part in self._parts(record_batch):
                        items = convert(part)
                        if not rows:
                            self._bridge.call(batch.prepare)
                            on_first()
                        rows += part.num_rows
                        for chunk in self._chunks(batch, items):
                            handed += len(chunk.rows)
                            if batch.failure is None and not self._queue.produce(chunk):
                                batch.fail(QueueClosedError("the queue was closed amid the batch"))
                    size += record_batch.nbytes
                    if batch.failure is not None:
                        break
            with suppress(QueueClosedError):  # the count tells
                self._queue.flush()
        except BaseException as error:
            batch.fail(error)
            raise
        _check(batch, handed)
        return Fed(rows, size)

    def _parts(self, record_batch: Any) -> Iterator[Any]:
        """Slices of at most the rows and bytes of a chunk."""
        rows, unit = record_batch.num_rows, self._sizes.unit
        if self._sizes.unit_bytes is not None and rows and record_batch.nbytes:
            unit = min(unit, max(1, self._sizes.unit_bytes * rows // record_batch.nbytes))
        for start in range(0, rows, unit):
            yield record_batch if rows <= unit else record_batch.slice(start, unit)

    def _chunks(self, batch: MicroBatch, items: list[Any]) -> list[Chunk]:
        select, count = self._sizes.selector, self._sizes.slots
        if select is None:
            return [self._chunk(batch, items)] if items else []
        by_place: dict[int, list[Any]] = {}
        for item in items:
            by_place.setdefault(select(item, count), []).append(item)
        return [self._chunk(batch, found, place) for place, found in by_place.items()]


def _check(batch: MicroBatch, handed: int) -> None:
    error = batch.failure
    if error is None and batch.taken < handed:
        error = QueueClosedError(f"only {batch.taken} of {handed} items reached the handler before the queue closed")
    if error is not None:
        raise DeliveryError(
            f"{batch.what}: its rows were not handled: {type(error).__qualname__}: {error}", [Failure((), error)]
        ) from error
