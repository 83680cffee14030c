"""A send queue in memory: what a durable one does, without the disk.

It is bounded by records and by bytes, those under way included, and gives out the same leases as the durable queue.
All of it but the wait for room and for records is plain bookkeeping on one event loop. Puts are kept whole, as
stretches of records, so that a record costs nothing of its own.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import Counter, deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

from batchqueue_async.durable.state.frame import Run
from batchqueue_async.errors import QueueClosedError, QueueFullError
from batchqueue_async.export.send_queue.stretch import (
    SMALL,
    Stretch,
    cost_of,
    count_of,
    fitting,
    forget,
    making_room,
    seq_of,
    size_of_run,
    stretch_of,
)
from batchqueue_async.leases.key_order import KeyOrder
from batchqueue_async.leases.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from batchqueue_async.durable.config import Overflow

_LOOKAHEAD = 10_000
_NS = 1e9


class MemoryQueue:
    """A bounded queue of records with leases.

    Example:
        >>> async def main() -> list[bytes]:
        ...     queue = MemoryQueue(max_records=2, max_bytes=None)
        ...     await queue.put([b"a", b"b"])
        ...     await queue.put([b"c"])
        ...     lease = await queue.lease(10, 1_000, 0)
        ...     found = [record.payload for record in lease.records]
        ...     await lease.ack()
        ...     return found
        >>> asyncio.run(main())
        [b'b', b'c']

    Attributes:
        queue_id: 32 hex digits; with a sequence number, a record's identity.
        next_seq: the number of the next record.
        records: those in the queue, ready, leased or delayed.
        size: their bytes, and for each record some more for what Python takes.
        leased: those that are leased.
        dropped: how many were dropped, by reason.
        most_size: the most bytes that it ever held.
    """

    def __init__(
        self,
        *,
        max_records: int | None,
        max_bytes: int | None,
        overflow: Overflow = "drop_oldest",
        block_timeout: float | None = None,
        key: Callable[[Any], Hashable] | None = None,
        on_drop: Callable[[], object] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.max_records = max_records
        self.max_bytes = max_bytes
        self._most_records = math.inf if max_records is None else max_records
        self._most_bytes = math.inf if max_bytes is None else max_bytes
        self._overflow = overflow
        self._block_timeout = block_timeout
        self._gate = KeyOrder(key, _LOOKAHEAD) if key is not None else None
        self._on_drop = on_drop
        self.queue_id = uuid.uuid4().hex
        self.next_seq = 0
        self.records = self.size = self.leased = 0
        self.most_size = 0
        self.dropped: Counter[str] = Counter()
        self._fresh: deque[Run] = deque()
        self._returned: list[Run] = []
        self._delayed: list[tuple[float, Run]] = []
        self._leases: dict[int, Lease] = {}
        self._timer: asyncio.TimerHandle | None = None
        # Kept here because uvloop's handle for a time that has come does not tell it.
        self._timer_due = math.inf
        self._waiter: asyncio.Future[bool] | None = None
        """Resolves to whether the time to wait is over."""
        self._door = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None
        self._closed = False

    # -- in ------------------------------------------------------------------------------------------------------

    async def put(self, batch: Sequence[Any]) -> None:
        """Put records, all or none; returns at once unless `overflow="block"` waits for room.

        More than the queue can ever hold come in in parts, unless `overflow="reject"`.

        Raises:
            QueueFullError: there is no room, and `overflow` says to refuse; or there never can be for so many at once.
            QueueClosedError: the queue is closed.
        """
        self._check()
        payloads = list(batch)
        if not payloads:
            return
        stretch = Stretch(payloads, int(self._loop.time() * _NS))
        if stretch.count > self._most_records or stretch.cost > self._most_bytes:
            if self._overflow == "reject" or stretch.count == 1:
                raise self._full(stretch, "which can never fit; raise them, or hand over less at once")
            middle = stretch.count // 2
            await self.put(payloads[:middle])
            await self.put(payloads[middle:])
            return
        if self._door.locked() or not self._fits(stretch):
            if self._overflow == "drop_newest":
                self.dropped["newest"] += stretch.count
                return
            if self._overflow == "reject":
                raise self._full(stretch, "and overflow='reject'; hand over less, or raise them")
            if self._overflow == "drop_oldest":
                self._make_room(stretch)
            else:
                await self._wait_for_room(stretch)
        self._enter(stretch)

    def _fits(self, stretch: Stretch) -> bool:
        return self.records + stretch.count <= self._most_records and self.size + stretch.cost <= self._most_bytes

    def _enter(self, stretch: Stretch) -> None:
        if not (stretch.count < SMALL and self._join(stretch)):
            self._fresh.append(Run(self.next_seq, stretch.frame, 0, stretch.count, 0))
        self.next_seq += stretch.count
        self.records += stretch.count
        self.size += stretch.cost
        self.most_size = max(self.most_size, self.size)
        self._wake()

    def _join(self, stretch: Stretch) -> bool:
        """Put a small stretch into the one before it, so that records that come one by one take little room."""
        last = self._fresh[-1] if self._fresh else None
        if last is None or last.high != stretch_of(last).count or not stretch_of(last).join(stretch):
            return False
        self._fresh[-1] = last._replace(high=last.high + stretch.count)
        return True

    def _make_room(self, stretch: Stretch) -> None:
        while not self._fits(stretch):
            oldest = self._oldest_free()
            if oldest is None:
                # Everything is under way, and that is never taken back: what comes in is what there is to drop.
                raise self._full(stretch, "and all of them are being sent; raise them, or hand over less at once")
            self._drop(oldest, stretch)
        if self._on_drop is not None:
            self._on_drop()

    def _oldest_free(self) -> Run | None:
        first = [runs[0] for runs in (self._fresh, self._returned) if runs]
        first += [run for _, run in self._delayed]
        if not first and self._gate is not None:
            first = [held[0] for held in self._gate._held.values()]
        return min(first, key=seq_of, default=None)

    def _drop(self, run: Run, stretch: Stretch) -> None:
        """Drop as much of the run, from its beginning, as makes room for the stretch; at most all of it."""
        count = making_room(
            run,
            self.records + stretch.count - self._most_records,
            self.size + stretch.cost - self._most_bytes,
        )
        gone, rest = run.part(run.seq, run.seq + count), run.part(run.seq + count, run.end)
        was_delayed = self._replace(run, rest if rest.high > rest.low else None)
        self.records -= count
        self.size -= cost_of(gone)
        self.dropped["oldest"] += count
        if self._gate is not None and was_delayed:
            self._return(self._gate.release([gone]))
        forget(gone)

    def _replace(self, run: Run, rest: Run | None) -> bool:
        """Put what is left of a run where the run was; whether that was among the delayed."""
        if self._fresh and self._fresh[0] is run:
            self._fresh.popleft()
            if rest is not None:
                self._fresh.appendleft(rest)
        elif self._returned and self._returned[0] is run:
            heappop(self._returned)
            if rest is not None:
                heappush(self._returned, rest)
        elif self._gate is not None and any(held[0] is run for held in self._gate._held.values()):
            self._unhold(self._gate, run)
        else:
            due = next(due for due, each in self._delayed if each is run)
            self._delayed = [entry for entry in self._delayed if entry[1] is not run]
            heapify(self._delayed)
            if rest is not None:
                heappush(self._delayed, (due, rest))
            return True
        return False

    def _unhold(self, gate: KeyOrder, run: Run) -> None:
        """Take out a record that waits for its key; it is a run by itself."""
        key = next(key for key, held in gate._held.items() if held[0] is run)
        gate._held[key].pop(0)
        gate.held -= 1
        if not gate._held[key]:
            del gate._held[key]

    async def _wait_for_room(self, stretch: Stretch) -> None:
        try:
            async with asyncio.timeout(self._block_timeout), self._door:
                while not self._fits(stretch):
                    self._room = self._loop.create_future()
                    await self._room
                    self._check()
        except TimeoutError:
            raise self._full(stretch, f"and block_timeout={self._block_timeout} is over; raise them") from None

    def _full(self, stretch: Stretch, rule: str) -> QueueFullError:
        return QueueFullError(
            f"send queue: no room for {stretch.count} records of {stretch.raw} bytes: it holds {self.records} records "
            f"of {self.size} bytes, with max_records={self.max_records} and max_bytes={self.max_bytes}, {rule}"
        )

    # -- out -----------------------------------------------------------------------------------------------------

    async def lease(self, max_records: int, max_bytes: int, wait: float | None) -> Lease:
        """The next records within both limits, at least one; an empty lease when `wait` is over. For one caller."""
        self._check()
        lease = self._grant(max_records, max_bytes)
        if lease or wait == 0:
            return lease
        timer = None if wait is None else self._loop.call_later(wait, self._time_over)
        try:
            while not lease:
                self._waiter = self._loop.create_future()
                over = await self._waiter
                self._check()
                lease = self._grant(max_records, max_bytes)
                if over:
                    break
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        return lease

    def _grant(self, max_records: int, max_bytes: int) -> Lease:
        taken: list[Run] = []
        records, size = max_records, max_bytes
        while records > 0 and (run := self._next()) is not None:
            part = fitting(run, records, size, first=not taken)
            if part is None:
                break
            self._replace_head(run, part.end)
            for each in (part,) if self._gate is None else self._gate.admit([part]):
                taken.append(each._replace(attempts=each.attempts + 1))
                records -= each.high - each.low
                size -= size_of_run(each)
        lease = Lease(self, taken, math.inf)
        if taken:
            self.leased += count_of(taken)
            self._leases[id(lease)] = lease
        return lease

    def _next(self) -> Run | None:
        if self._returned:
            return self._returned[0]
        if self._fresh and not (self._gate is not None and self._gate.full):
            return self._fresh[0]
        return None

    def _replace_head(self, run: Run, seq: int) -> None:
        if self._returned and self._returned[0] is run:
            heappop(self._returned)
            if seq < run.end:
                heappush(self._returned, run.part(seq, run.end))
            return
        self._fresh.popleft()
        if seq < run.end:
            self._fresh.appendleft(run.part(seq, run.end))

    # -- what a lease asks for -----------------------------------------------------------------------------------

    def ack(self, lease: Lease, runs: list[Run]) -> int:
        """The records are done with."""
        return self._settle(lease, runs)

    def nack(self, lease: Lease, runs: list[Run], delay: float, reason: str) -> int:  # noqa: ARG002 - a lease gives it
        """Give records back, to be had again after `delay` seconds; the reason is for those who count."""
        count = count_of(runs)
        self.leased -= count
        self._forget(lease)
        if delay > 0 and runs:
            due = self._loop.time() + delay
            for run in runs:
                heappush(self._delayed, (due, run))
            self._arm()
        else:
            self._ready(runs)
        return count

    async def bury(self, lease: Lease, runs: list[Run], reason: str) -> int:  # noqa: ARG002 - a lease gives it
        """Give records up; the exporter tells of them."""
        return self._settle(lease, runs)

    def extend(self, lease: Lease) -> None:
        """A lease of this queue has no end."""

    def _settle(self, lease: Lease, runs: list[Run]) -> int:
        count = count_of(runs)
        self._forget(lease)
        self.leased -= count
        self.records -= count
        for run in runs:
            self.size -= cost_of(run)
        if self._gate is not None:
            self._return(self._gate.release(runs))
        for run in runs:
            forget(run)
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        return count

    def _forget(self, lease: Lease) -> None:
        if not lease.unsettled:
            self._leases.pop(id(lease), None)

    def _ready(self, runs: list[Run]) -> None:
        freed = self._gate.release(runs) if self._gate is not None else []
        self._return([*runs, *freed])

    def _return(self, runs: Sequence[Run]) -> None:
        for run in runs:
            heappush(self._returned, run)
        if runs:
            self._wake()

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def next_due(self) -> float | None:
        """The loop's time at which the next delayed record is ready."""
        return self._delayed[0][0] if self._delayed else None

    def _arm(self) -> None:
        due = self._delayed[0][0]
        if due < self._timer_due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due = due
            self._timer = self._loop.call_at(due, self._wake_delayed)

    def _wake_delayed(self) -> None:
        self._timer, self._timer_due = None, math.inf
        due: list[Run] = []
        # A timer may fire a clock tick early: what is due at its time is due.
        while self._delayed and self._delayed[0][0] <= self._loop.time() + 1e-6:
            due.append(heappop(self._delayed)[1])
        self._ready(due)
        if self._delayed:
            self._arm()

    def hurry(self) -> int:
        """Make all delayed records ready now; how many."""
        runs = [run for _, run in self._delayed]
        self._delayed.clear()
        self._ready(runs)
        return count_of(runs)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)

    def _time_over(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    # -- the rest ------------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """The lowest number of a record in the queue; None when there is none."""
        runs = [run for lease in self._leases.values() for run in lease._runs]
        runs += [run for _, run in self._delayed]
        runs += [run[0] for run in (self._fresh, self._returned) if run]
        if self._gate is not None:
            runs += [run[0] for run in self._gate._held.values()]
        return min([run.seq for run in runs], default=None)

    def weigh(self, lease: Lease) -> int:
        """The bytes of a lease's records."""
        return sum(map(size_of_run, lease._all))

    def now_ns(self) -> int:
        """The time on the clock of `enqueued_ns`."""
        return int(self._loop.time() * _NS)

    def take_all(self) -> list[Any]:
        """Empty the queue, leases included, in the order of the numbers: for the report of a shutdown."""
        runs = [run for lease in self._leases.values() for run in lease._runs]
        runs += [*self._fresh, *self._returned, *(run for _, run in self._delayed)]
        if self._gate is not None:
            runs += [run for held in self._gate._held.values() for run in held]
        for lease in self._leases.values():
            lease._runs = []
        self._leases.clear()
        self._fresh.clear()
        self._returned.clear()
        self._delayed.clear()
        self.records = self.size = self.leased = 0
        return [record for run in sorted(runs, key=seq_of) for record in (run.frame.payloads or [])[run.low : run.high]]

    def close(self) -> None:
        """End every wait with `QueueClosedError`; what is in the queue stays for `take_all`."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _check(self) -> None:
        if self._closed:
            raise QueueClosedError("send queue: closed; what was handed over before is in the exporter's report")
