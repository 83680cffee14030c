"""A frame in memory: what one `put_many`, or some puts that were written together, has become."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.leases.run import Run

if TYPE_CHECKING:
    import asyncio

__all__ = ["ALWAYS", "EPOCH_NS", "INTERVAL", "OS", "RECORD_COST", "Frame", "Run"]

ALWAYS = 2
INTERVAL = 1
OS = 0
# The first of January 2020. A stamp before it comes from a clock that was not set yet: such a record has no known age.
EPOCH_NS = 1_577_836_800_000_000_000
# Bytes that a record takes in memory besides its payload's: the object, and its places in lists.
RECORD_COST = 64


class Frame:
    """Records with consecutive sequence numbers, and where they are on the disk.

    `payloads` is None while only the disk has them. The writer fills in the place; until then nobody else looks.
    """

    __slots__ = (
        "__weakref__",
        "count",
        "deadline",
        "enqueued_ns",
        "first",
        "gathered",
        "kept",
        "kind",
        "offset",
        "parts",
        "payloads",
        "rank",
        "raw",
        "segment",
        "stored",
        "waiters",
    )

    def __init__(self, kind: int, payloads: list[bytes] | None, raw: int, enqueued_ns: int, rank: int = OS) -> None:
        self.kind = kind
        self.payloads = payloads
        # The same list while puts still join it; `payloads` goes when the frame leaves the memory.
        self.gathered = payloads if payloads is not None else []
        self.count = len(self.gathered)
        self.raw = raw
        self.enqueued_ns = enqueued_ns
        self.rank = rank
        self.first = -1
        self.segment = -1
        self.offset = 0
        self.stored = 0
        # Where it is in several frames on the disk: the first record and the offset of each.
        self.parts: list[tuple[int, int]] = []
        # A copy of it could not be taken off the disk. Its numbers are final then, and its records too: written again
        # under the same, the later copy is right.
        self.kept = False
        self.deadline: float | None = None
        self.waiters: list[asyncio.Future[int]] = []

    @property
    def cost(self) -> int:
        """What its records take in memory: their payloads, and what Python takes for each."""
        return self.raw + RECORD_COST * self.count

    def part(self, low: int, high: int) -> Frame:
        """The records at these places in a frame of their own: the payloads of the others are not kept by it."""
        frame = Frame(self.kind, (self.payloads or [])[low:high], 0, self.enqueued_ns, self.rank)
        frame.raw = sum(map(len, frame.gathered))
        frame.first = self.first + low
        frame.segment, frame.offset, frame.stored = self.segment, self.offset, self.stored
        return frame
