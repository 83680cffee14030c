"""The records of one put to the send queue in memory: what the durable queue's leases have on disk as a frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from batchqueue_async.export.send_queue.codec import sizes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.durable.state.frame import Frame, Run


OVERHEAD = 64
"""Bytes that a record counts for besides its own: what Python takes for the object and its places in lists."""
SMALL = 64
"""Records of a put that joins the one before it, rather than being a stretch of its own."""
_MOST_JOINED = 512
# Records that are joined count as old as the first of them.
_TOGETHER_NS = 10_000_000


class Stretch:
    """Records with their sizes. Stands where a lease's runs have a frame."""

    __slots__ = ("count", "enqueued_ns", "payloads", "raw", "sizes")

    def __init__(self, payloads: list[Any], enqueued_ns: int) -> None:
        self.payloads = payloads
        self.sizes = sizes_of(payloads)
        self.count = len(payloads)
        self.raw = sum(self.sizes)
        self.enqueued_ns = enqueued_ns

    @property
    def cost(self) -> int:
        """The bytes that it counts for in the queue."""
        return self.raw + OVERHEAD * self.count

    def join(self, other: Stretch) -> bool:
        """Take in a small put that came soon after; whether that was done."""
        if self.count + other.count > _MOST_JOINED or other.enqueued_ns - self.enqueued_ns > _TOGETHER_NS:
            return False
        self.payloads += other.payloads
        self.sizes += other.sizes
        self.count += other.count
        self.raw += other.raw
        return True

    @property
    def frame(self) -> Frame:
        """Itself, for a run."""
        return cast("Frame", self)


def sizes_in(run: Run) -> list[int]:
    """The sizes of all records of the put that a run is of."""
    return cast("Stretch", run.frame).sizes


def size_of_run(run: Run) -> int:
    """The bytes of a run's records."""
    stretch = cast("Stretch", run.frame)
    if run.high - run.low == stretch.count:
        return stretch.raw
    return sum(stretch.sizes[run.low : run.high])


def stretch_of(run: Run) -> Stretch:
    """The put that a run is of."""
    return cast("Stretch", run.frame)


def cost_of(run: Run) -> int:
    """The bytes that a run counts for in the queue."""
    return size_of_run(run) + OVERHEAD * (run.high - run.low)


def forget(run: Run) -> None:
    """The run's records are done with: where others of their put are not, they must not be kept for those."""
    stretch = cast("Stretch", run.frame)
    if run.high - run.low < stretch.count:
        stretch.payloads[run.low : run.high] = [None] * (run.high - run.low)


def count_of(runs: Sequence[Run]) -> int:
    """The records of some runs."""
    return sum([run.high - run.low for run in runs])


def seq_of(run: Run) -> int:
    """The number of a run's first record, to sort by."""
    return run.seq


def fitting(run: Run, records: int, size: int, *, first: bool) -> Run | None:
    """As much of a run, from its beginning, as both limits allow; the `first` of a lease has one record at least."""
    count = run.high - run.low
    if count <= records and size_of_run(run) <= size:
        return run
    sizes = sizes_in(run)
    end = run.low
    while end < run.high and end - run.low < records and (sizes[end] <= size or (first and end == run.low)):
        size -= sizes[end]
        end += 1
    return run.part(run.seq, run.seq + end - run.low) if end > run.low else None


def making_room(run: Run, records: float, cost: float) -> int:
    """How many records of a run, from its beginning, free so many records and bytes; at most all."""
    sizes = sizes_in(run)
    count, freed = 0, 0
    while run.low + count < run.high and (count < records or freed < cost):
        freed += sizes[run.low + count] + OVERHEAD
        count += 1
    return count
