"""What a lease is made of: runs of records, each a part of one block. Pure, and without a file or a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def joined(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """The numbers of runs, and their attempts: those that touch and were leased as often are one range.

    What is noted of a lease of thousands of records that were put one by one costs as much as of a single frame.

    Example:
        >>> from batchqueue_async.durable.state.frame import Frame
        >>> frame = Frame(0, [b"a", b"b", b"c"], 3, 0)
        >>> joined([Run(5, frame, 0, 1, 1), Run(6, frame, 1, 2, 1), Run(7, frame, 2, 3, 2)])
        [(5, 7, 1), (7, 8, 2)]
    """
    if len(runs) == 1:
        seq, _, low, high, attempts = runs[0]
        return [(seq, seq + high - low, attempts)]
    ranges: list[tuple[int, int, int]] = []
    start = end = times = -1
    for seq, _, low, high, attempts in runs:
        if attempts == times and seq == end:
            end += high - low
        elif attempts == times and seq + high - low == start:
            start = seq  # the newest first
        else:
            if end >= 0:
                ranges.append((start, end, times))
            start, end, times = seq, seq + high - low, attempts
    if end >= 0:
        ranges.append((start, end, times))
    return ranges
