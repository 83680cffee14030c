"""What a lease is made of: runs of records, each a part of one block. Pure, and without a file or a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from batchqueue_async.durable.state.frame import Frame


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
