"""A frame in memory: what one `put_many`, or some puts that were written together, has become."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio

ALWAYS = 2
INTERVAL = 1
OS = 0


class Frame:
    """Records with consecutive sequence numbers, and where they are on the disk.

    `payloads` is None while only the disk has them. The writer fills in the place; until then nobody else looks.
    """

    __slots__ = (
        "count",
        "deadline",
        "enqueued_ns",
        "first",
        "gathered",
        "kind",
        "offset",
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
        self.deadline: float | None = None
        self.waiters: list[asyncio.Future[int]] = []

    def bare(self) -> Frame:
        """The same frame without its payloads: they can be read from the disk again."""
        frame = Frame(self.kind, None, self.raw, self.enqueued_ns, self.rank)
        frame.count, frame.first = self.count, self.first
        frame.segment, frame.offset, frame.stored = self.segment, self.offset, self.stored
        return frame


class Run(NamedTuple):
    """The records `seq` to `seq + (high - low)` of a frame, which have been leased `attempts` times so far."""

    seq: int
    frame: Frame
    low: int
    high: int
    attempts: int

    @property
    def end(self) -> int:
        """One more than the last sequence number."""
        return self.seq + self.high - self.low

    def part(self, low: int, high: int) -> Run:
        """The records of this run with sequence numbers in [low, high)."""
        start = self.low + low - self.seq
        return Run(low, self.frame, start, start + high - low, self.attempts)
