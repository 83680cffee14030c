"""What `DurableQueue.lease` returns: records, and the ways to be done with them."""

from __future__ import annotations

from asyncio import sleep
from bisect import bisect_right
from itertools import islice, repeat
from operator import index
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from batchqueue_async.durable.state.ranges import RangeSet
from batchqueue_async.errors import ConfigError
from batchqueue_async.leases.run import joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from batchqueue_async.leases.run import Run

_NS = 1e-9
# Ranges of records that one step of the loop settles.
_PORTION = 150


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record of a lease.

    Attributes:
        seq: its sequence number; with the queue's id its identity for ever.
        payload: what was put.
        attempts: how often it has been leased, this time included.
        enqueued_at: when it was put, in seconds since 1970.
    """

    seq: int
    payload: bytes
    attempts: int
    enqueued_at: float

    def __repr__(self) -> str:
        """Without the payload: it has no place in logs."""
        return f"Record(seq={self.seq}, attempts={self.attempts}, size={len(self.payload)})"


class Owner(Protocol):
    """What a lease asks of its queue."""

    def ack(self, lease: Lease, runs: list[Run]) -> int:
        """Settle these."""
        ...

    def nack(self, lease: Lease, runs: list[Run], delay: float, reason: str) -> int:
        """Give these back."""
        ...

    async def bury(self, lease: Lease, runs: list[Run], reason: str) -> int:
        """Move these to the dead letters."""
        ...

    def extend(self, lease: Lease) -> None:
        """Let the lease's time begin anew."""
        ...


class Lease:
    """Records that are yours until they are settled, the lease's time is over, or the queue is closed.

    Falsy when it is empty. As a context manager it acknowledges what is left at the end, or gives it back when the
    block raises.

    Example:
        >>> import asyncio, tempfile, batchqueue_async as bq
        >>> async def main(path: str) -> None:
        ...     async with bq.DurableQueue.open(path) as queue:
        ...         await queue.put_many([b"good", b"bad"])
        ...         lease = await queue.lease(max_records=100)
        ...         await lease.dead_letter("not wanted", [lease.records[1].seq])
        ...         print(await lease.ack(), "acknowledged")
        >>> with tempfile.TemporaryDirectory() as path:
        ...     asyncio.run(main(path))
        1 acknowledged

    Attributes:
        deadline: the loop's time at which it ends by itself.
        more: for the owner, before it hands the lease out: whether there may be more for it in later steps.
    """

    __slots__ = (
        "__weakref__",
        "_all",
        "_in_order",
        "_left",
        "_newest_first",
        "_owner",
        "_records",
        "_starts",
        "deadline",
        "more",
    )

    def __init__(
        self, owner: Owner, runs: list[Run], deadline: float, *, newest_first: bool = False, more: bool = False
    ) -> None:
        self._owner = owner
        self._all = runs
        # What is unsettled, by number; None as long as that is everything.
        self._left: RangeSet | None = None
        self._newest_first = newest_first
        self._records: list[Record] | None = None
        self._in_order: list[Run] = []
        self._starts: list[int] | None = None
        self.deadline = deadline
        self.more = more

    def __repr__(self) -> str:
        return f"Lease({len(self)} records, {self.unsettled} unsettled)"

    def __len__(self) -> int:
        return sum(run.high - run.low for run in self._all)

    def __bool__(self) -> bool:
        return bool(self._all)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            await self.ack()
        else:
            await self.nack()

    @property
    def records(self) -> list[Record]:
        """The records, in the queue's order."""
        if self._records is None:
            self._records = []
            for run in self._all:
                payloads = (run.frame.payloads or [])[run.low : run.high]
                numbers = range(run.seq, run.end)
                enqueued_at = run.frame.enqueued_ns * _NS
                made = list(map(Record, numbers, payloads, repeat(run.attempts), repeat(enqueued_at)))
                self._records += reversed(made) if self._newest_first else made
        return self._records

    @property
    def blocks(self) -> Sequence[Run]:
        """All of its records as runs, a part of one block each: for who takes them by the thousand."""
        return self._all

    @property
    def unsettled_runs(self) -> Sequence[Run]:
        """The runs that are still this lease's to settle."""
        if self._left is None:
            return self._all
        return [run for low, high in self._left for run in self._parts(low, high)]

    def extend_by(self, runs: list[Run]) -> None:
        """For the owner, before it hands the lease out: these are in it too."""
        self._all += runs
        if not self._newest_first:
            self._all.sort()  # by number: in an order by key, older ones may have become free meanwhile

    def forfeit(self) -> list[Run]:
        """What is unsettled goes back to the lease's owner, who says so: its time is over, or nobody ever got it."""
        runs, self._left = list(self.unsettled_runs), _NOTHING
        return runs

    def restore(self, runs: list[Run]) -> None:
        """For the owner: what it could not settle is this lease's again."""
        if self._left is _NOTHING:
            self._left = RangeSet()
        left = self._by_number()
        for run in runs:
            left.add(run.seq, run.end)

    @property
    def unsettled(self) -> int:
        """How many of the records are still this lease's to settle; 0 once its time is over."""
        return len(self) if self._left is None else self._left.count

    async def ack(self, seqs: Iterable[int] | None = None) -> int:
        """The records are done with, all or these; the answer is how many were still this lease's.

        After the lease's time is over this does nothing: the records are, or will be, somebody else's. Thousands that
        are not next to each other take several steps of the loop: cancelled between two, it has settled a part.
        """
        if seqs is None and self._left is None and len(self._all) <= _PORTION:
            return self._owner.ack(self, self.forfeit())
        count = 0
        for taken, more in self._portions(seqs):
            count += self._owner.ack(self, taken)
            if more:
                await sleep(0)
        return count

    async def nack(
        self,
        delay: float = 0,
        seqs: Iterable[int] | None = None,
        *,
        reason: str = "nack",
        counted: bool = True,
        more: int = 0,
    ) -> int:
        """Deliver the records again, all or these, not before `delay` seconds; `reason` is for the counts.

        Of thousands it gives back a part in each step of the loop, as `ack` settles them.

        Not `counted`, this lease is no attempt: nobody tried what the records are for. `more` attempts were made on
        this lease besides the one that it counts for.
        """
        if not isinstance(delay, int | float) or not delay >= 0:
            raise ConfigError(f"Lease.nack: delay={delay!r} is below 0; give 0 or more seconds")
        count = 0
        extra = more - (not counted)
        for taken, goes_on in self._portions(seqs):
            back = [run._replace(attempts=run.attempts + extra) for run in taken] if extra else taken
            count += self._owner.nack(self, back, delay, reason)
            if goes_on:
                await sleep(0)
        return count

    async def dead_letter(self, reason: str, seqs: Iterable[int] | None = None) -> int:
        """Move the records, all or these, to the dead letters with this reason; returns when they are durable there.

        Thousands that are not next to each other go part by part: when it is cancelled, or fails, some have been moved,
        and the others are still this lease's.
        """
        count = 0
        for taken, more in self._portions(seqs):
            count += await self._owner.bury(self, taken, reason)
            if more:
                await sleep(0)
        return count

    def extend(self) -> None:
        """Let the lease's time begin anew; nothing when it is over."""
        if self.unsettled:
            self._owner.extend(self)

    def _portions(self, seqs: Iterable[int] | None) -> Iterator[tuple[list[Run], bool]]:
        """What one step of the loop settles of these records, or of all, and whether there is more."""
        if seqs is None:
            if self._left is None and len(joined(self._all)) > _PORTION:
                self._by_number()
                yield [], True
            while self._left is not None and len(self._left) > _PORTION:
                yield self._take(list(islice(self._left, _PORTION))), True
            yield self.forfeit(), False
            return
        ranges = self._ranges(seqs)
        for at in range(0, max(1, len(ranges)), _PORTION):
            yield self._take(ranges[at : at + _PORTION]), at + _PORTION < len(ranges)

    def _ranges(self, seqs: Iterable[int]) -> list[tuple[int, int]]:
        """These numbers, which are all of this lease, as ranges."""
        try:
            wanted = sorted({index(seq) for seq in seqs})
        except TypeError as error:
            raise ConfigError(f"Lease: seqs={seqs!r}: {error}; give the `seq` of its records") from error
        self._must_have(wanted)
        ranges: list[tuple[int, int]] = []
        at = 0
        while at < len(wanted):
            low = high = wanted[at]
            while at < len(wanted) and wanted[at] == high:
                at, high = at + 1, high + 1
            ranges.append((low, high))
        return ranges

    def _take(self, ranges: list[tuple[int, int]]) -> list[Run]:
        left = self._by_number()
        taken: list[Run] = []
        for low, high in ranges:
            for part in list(left.present(low, high)):
                left.remove(*part)
                taken += self._parts(*part)
        return taken

    def _by_number(self) -> RangeSet:
        if self._left is None:
            self._sort()
            ranges: list[tuple[int, int]] = []
            for low, high, _ in joined(self._in_order):
                if ranges and ranges[-1][1] == low:
                    ranges[-1] = ranges[-1][0], high  # they were leased before, and not as often
                else:
                    ranges.append((low, high))
            self._left = RangeSet.of_rising(ranges)
        return self._left

    def _sort(self) -> list[int]:
        if self._starts is None:
            self._in_order = sorted(self._all)  # by number: no two have the same
            self._starts = [run.seq for run in self._in_order]
        return self._starts

    def _must_have(self, wanted: list[int]) -> None:
        starts = self._sort()
        for seq in wanted:
            at = bisect_right(starts, seq) - 1
            if at < 0 or seq >= self._in_order[at].end:
                raise ConfigError(f"Lease: sequence number {seq} is not in this lease; give numbers of its records")

    def _parts(self, low: int, high: int) -> Iterator[Run]:
        """The records [low, high) of this lease, as parts of its runs."""
        at = bisect_right(self._sort(), low) - 1
        while low < high:
            run = self._in_order[at]
            stop = min(high, run.end)
            yield run if (low, stop) == (run.seq, run.end) else run.part(low, stop)
            low, at = stop, at + 1


# What is left of a lease that has given everything away. Nothing is ever put into it.
_NOTHING = RangeSet()
