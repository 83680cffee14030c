"""What of one partition is handled, and so which offset may be committed. Pure.

    pending     offsets that were received and not yet passed by the commit point, in the broker's order
    done        those of them that are finished, while an earlier one is not
    point       the first pending offset; with none pending, the consumer's position

Nothing is computed from offsets: a transaction's marker, an aborted batch and what compaction took leave gaps that have
no meaning here, and the position, which counts them, brings the lag to 0.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchqueue_async.intake.ports import Epoch


class Place(NamedTuple):
    """A partition of a topic; equal to the client's own."""

    topic: str
    partition: int


class Window:
    """The offsets of one partition from the commit point on.

    A run of neighbouring records may be received and finished under its first offset alone. Where it goes on as single
    records, it is split, and is finished when all of them are.

    Example:
        >>> window = Window()
        >>> for offset in (5, 6, 9):  # nothing at 7 and 8
        ...     window.received(offset)
        >>> window.finished(6)
        >>> window.point(10), window.finished(5), window.point(10), window.finished(9), window.point(10)
        (5, None, 9, None, 10)
    """

    __slots__ = ("_done", "_pending", "_split")

    def __init__(self, offsets: Iterable[int] = ()) -> None:
        self._pending = deque(offsets)
        self._done: set[int] = set()
        self._split: dict[int, Window] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def received(self, offset: int) -> None:
        """The next record, or the first of the next run."""
        self._pending.append(offset)

    def split(self, first: int, offsets: Iterable[int]) -> None:
        """Go on with the records of a run, by their own offsets."""
        self._split[first] = Window(offsets)

    def finished(self, offset: int) -> None:
        """A record, or a whole run, needs nothing more."""
        pending = self._pending
        if pending[0] != offset:
            self._done.add(offset)
            return
        pending.popleft()
        done = self._done
        while pending and pending[0] in done:
            done.remove(pending.popleft())

    def finished_within(self, first: int, offset: int) -> None:
        """A record of a run that was split needs nothing more."""
        inner = self._split[first]
        inner.finished(offset)
        if not inner._pending:  # noqa: SLF001 - of the same class
            del self._split[first]
            self.finished(first)

    def point(self, position: int | None) -> int | None:
        """What may be committed: everything before it is finished. None where nothing is known."""
        if not self._pending:
            return position
        first = self._pending[0]
        inner = self._split.get(first)
        return first if inner is None else inner.point(None)


class Progress:
    """One assignment of one partition: its epoch, its window, and how much of it is held here.

    Attributes:
        place: topic and partition.
        epoch: the validity of its deliveries.
        window: what is received and what is finished.
        held: messages that were taken and have no outcome.
        bytes: their size.
        committed: the offset that was committed last; None before the first.
        full: whether it is left alone until it has room again.
    """

    __slots__ = ("bytes", "committed", "epoch", "full", "held", "place", "window")

    def __init__(self, place: Place, epoch: Epoch) -> None:
        self.place = place
        self.epoch = epoch
        self.window = Window()
        self.held = 0
        self.bytes = 0
        self.committed: int | None = None
        self.full = False

    def received(self, offset: int, count: int, size: int) -> None:
        """A record, or a run by its first offset, was taken."""
        self.window.received(offset)
        self.held += count
        self.bytes += size

    def freed(self, count: int, size: int) -> None:
        """Some of what is held has its outcome."""
        self.held -= count
        self.bytes -= size
