"""The records of one put to the send queue in memory, and runs of them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from batchqueue_async.export.send_queue.weight import OVERHEAD, weights

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL = 64
"""Records of a put that joins the one before it, rather than being a block of its own."""
_MOST_JOINED = 512
# Records that are joined count as old as the first of them.
_TOGETHER_NS = 10_000_000


class RecordBlock:
    """Records with their sizes, kept whole, so that a record costs nothing of its own.

    Attributes:
        payloads: the records; None where one is settled and others are not.
        sizes: their bytes.
        count: how many there are.
        raw: the sum of their bytes.
        enqueued_ns: when the first came in.
    """

    __slots__ = ("count", "enqueued_ns", "payloads", "raw", "sizes")

    def __init__(self, payloads: list[Any], enqueued_ns: int, sizes: list[int] | None = None) -> None:
        self.payloads = payloads
        self.sizes = weights(payloads) if sizes is None else sizes
        self.count = len(payloads)
        self.raw = sum(self.sizes)
        self.enqueued_ns = enqueued_ns

    @property
    def cost(self) -> int:
        """The bytes that it counts for in the queue."""
        return self.raw + OVERHEAD * self.count

    def part(self, low: int, high: int) -> RecordBlock:
        """Some of the records, as a block of their own."""
        return RecordBlock(self.payloads[low:high], self.enqueued_ns, self.sizes[low:high])

    def join(self, other: RecordBlock) -> bool:
        """Take in a small put that came soon after; whether that was done."""
        if self.count + other.count > _MOST_JOINED or other.enqueued_ns - self.enqueued_ns > _TOGETHER_NS:
            return False
        self.payloads += other.payloads
        self.sizes += other.sizes
        self.count += other.count
        self.raw += other.raw
        return True


class Run(NamedTuple):
    """The records `seq` to `seq + high - low` of a block, which have been sent `attempts` times so far."""

    seq: int
    block: RecordBlock
    low: int
    high: int
    attempts: int

    @property
    def end(self) -> int:
        """One more than the last sequence number."""
        return self.seq + self.high - self.low

    @property
    def size(self) -> int:
        """The bytes of the records."""
        block = self.block
        return block.raw if self.high - self.low == block.count else sum(block.sizes[self.low : self.high])

    @property
    def cost(self) -> int:
        """The bytes that they count for in the queue."""
        return self.size + OVERHEAD * (self.high - self.low)

    def part(self, low: int, high: int) -> Run:
        """The records of this run with sequence numbers in [low, high)."""
        start = self.low + low - self.seq
        return Run(low, self.block, start, start + high - low, self.attempts)

    def forget(self) -> None:
        """The records are done with: where others of their block are not, they must not be kept for those."""
        if self.high - self.low < self.block.count:
            self.block.payloads[self.low : self.high] = [None] * (self.high - self.low)


def count_of(runs: Sequence[Run]) -> int:
    """The records of some runs."""
    return sum([run.high - run.low for run in runs])


def fitting(run: Run, records: int, size: int, *, first: bool) -> Run | None:
    """As much of a run, from its beginning, as both limits allow; the `first` of a lease has one record at least."""
    if run.high - run.low <= records and run.size <= size:
        return run
    sizes = run.block.sizes
    end = run.low
    while end < run.high and end - run.low < records and (sizes[end] <= size or (first and end == run.low)):
        size -= sizes[end]
        end += 1
    return run.part(run.seq, run.seq + end - run.low) if end > run.low else None


def making_room(run: Run, records: float, cost: float) -> int:
    """How many records of a run, from its beginning, free so many records and bytes; at most all."""
    sizes = run.block.sizes
    count, freed = 0, 0
    while run.low + count < run.high and (count < records or freed < cost):
        freed += sizes[run.low + count] + OVERHEAD
        count += 1
    return count
