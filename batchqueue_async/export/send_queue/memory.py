"""A send queue in memory: what a durable one does, without the disk.

It is bounded by records and by bytes, those under way included, and gives records out on leases. All of it but the
waits for room and for records is plain bookkeeping on one event loop. Puts are kept whole, as blocks of records.

A record is in one place: in `_fresh` until its first lease, then leased, and after a failure ready, delayed or held.
What is ready, delayed or held is in `_waiting` by the number of its first record, and in the one index that says when
it may go: `_ready` by number, `_delayed` by time, `_held` by key; those delayed or held are in `_parked` by number as
well, so that the oldest record is found without looking at the others. Each call costs what it changes.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from bisect import bisect_right
from collections import Counter, deque
from itertools import chain
from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import QueueClosedError, QueueFullError
from batchqueue_async.export.send_queue.protocol import Placed, Span
from batchqueue_async.export.send_queue.record_block import (
    SMALL,
    RecordBlock,
    Run,
    count_of,
    fitting,
    making_room,
)
from batchqueue_async.export.send_queue.sorted_items import SortedItems

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from batchqueue_async.durable.config import Overflow

_LOOKAHEAD = 10_000
_NS = 1e9
# Delayed runs that one callback of the loop makes ready: thousands may be due at once.
_WOKEN = 256
MOST_RUNS = 256
"""Of records that were put one by one, or that failed one by one, a lease has no more: its step would be a long one."""


class _Waiting:
    """A run that is ready, delayed (`due`), or held for its key."""

    __slots__ = ("due", "held_for", "run")

    def __init__(self, run: Run, due: float | None = None, held_for: tuple[Hashable] | None = None) -> None:
        self.run = run
        self.due = due
        self.held_for = held_for


class _RoomWaiter:
    """A put that waits for room; `granted` is room that is reserved for it."""

    __slots__ = ("cost", "future", "granted", "records")

    def __init__(self, future: asyncio.Future[bool], records: int, cost: int) -> None:
        self.future = future
        self.records = records
        self.cost = cost
        self.granted = False


class MemoryLease:
    """Records on loan from a `MemoryQueue`."""

    __slots__ = ("_flags", "_left", "_queue", "_runs", "_starts", "numbers", "payloads", "spans", "weight")

    def __init__(self, queue: MemoryQueue, runs: list[Run]) -> None:
        self._queue = queue
        self._runs = runs
        self._left = 0
        self._starts: list[int] = []
        for run in runs:
            self._starts.append(self._left)
            self._left += run.high - run.low
        # One byte for each record: 1 when it is settled.
        self._flags = bytearray(self._left)
        self.payloads: list[Any]
        self.numbers: Sequence[int]
        if len(runs) == 1:
            (run,) = runs
            payloads = run.block.payloads
            self.payloads = payloads if run.high - run.low == len(payloads) else payloads[run.low : run.high]
            self.numbers = range(run.seq, run.end)
        else:
            self.payloads = [record for run in runs for record in run.block.payloads[run.low : run.high]]
            self.numbers = list(chain.from_iterable(range(run.seq, run.end) for run in runs))
        self.spans = [Span(run.high - run.low, run.attempts, run.block.enqueued_ns) for run in runs]
        self.weight = sum([run.size for run in runs])

    def __len__(self) -> int:
        return len(self._flags)

    @property
    def unsettled(self) -> int:
        """How many are still to be settled."""
        return self._left

    @property
    def oldest(self) -> int | None:
        """The lowest number of those."""
        return self.numbers[self._flags.find(0)] if self._left else None

    async def ack(self, indices: Sequence[int] | None = None) -> int:
        """All that are left, or these, are done with; how many."""
        return self._queue.settle(self, self.take(indices))

    async def nack(
        self,
        delay: float = 0.0,
        indices: Sequence[int] | None = None,
        *,
        reason: str = "nack",  # noqa: ARG002 - for those who count
        counted: bool = True,
        more: int = 0,
    ) -> int:
        """All that are left, or these, come again after `delay` seconds.

        Not `counted`, this lease was no attempt; `more` attempts were made on it besides.
        """
        runs = self.take(indices)
        if more or not counted:
            runs = [run._replace(attempts=run.attempts + more - (not counted)) for run in runs]
        return self._queue.give_back(self, runs, delay)

    async def dead_letter(self, reason: str, indices: Sequence[int] | None = None) -> int:  # noqa: ARG002 - likewise
        """All that are left, or these, are given up; the exporter keeps and reports them."""
        return self._queue.settle(self, self.take(indices))

    def extend(self) -> None:
        """A lease of this queue has no end."""

    def take(self, indices: Sequence[int] | None = None) -> list[Run]:
        """What is not settled of all records, or of these, as runs; they count as settled now."""
        if indices is None and self._left == len(self._flags):
            self._left = 0
            self._flags = bytearray(b"\1") * len(self._flags)
            return self._runs
        taken: list[Run] = []
        for low, high in self._stretches(indices):
            self._flags[low:high] = b"\1" * (high - low)
            self._left -= high - low
            at = bisect_right(self._starts, low) - 1
            while low < high:
                run, start = self._runs[at], self._starts[at]
                end = min(high, start + run.high - run.low)
                taken.append(run.part(run.seq + low - start, run.seq + end - start))
                low, at = end, at + 1  # noqa: PLW2901 - the rest of it
        return taken

    def _stretches(self, indices: Sequence[int] | None) -> Iterator[tuple[int, int]]:
        """Consecutive indices that are not settled, as (low, high)."""
        flags = self._flags
        if isinstance(indices, range) and indices.step == 1 and 1 not in flags[indices.start : indices.stop]:
            if indices:
                yield indices.start, indices.stop
            return
        wanted: Iterable[int] = range(len(flags)) if indices is None else sorted(set(indices))
        low = high = -1
        for index in [index for index in wanted if not flags[index]]:
            if index != high:
                if high > low:
                    yield low, high
                low = index
            high = index + 1
        if high > low:
            yield low, high


class MemoryQueue:
    """A bounded queue of records with leases.

    Example:
        >>> async def main() -> list[bytes]:
        ...     queue = MemoryQueue(max_records=2, max_bytes=None)
        ...     await queue.put([b"a", b"b"])
        ...     await queue.put([b"c"])
        ...     lease = await queue.lease(10, 1_000, 0)
        ...     found = list(lease.payloads)
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
        serial: bool = False,
        on_drop: Callable[[range], object] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.max_records = max_records
        self.max_bytes = max_bytes
        self._most_records = math.inf if max_records is None else max_records
        self._most_bytes = math.inf if max_bytes is None else max_bytes
        self._overflow = overflow
        self._block_timeout = block_timeout
        self._key = key
        self._serial = serial
        self._on_drop = on_drop
        self.queue_id = uuid.uuid4().hex
        self.next_seq = 0
        self.records = self.size = self.leased = 0
        self.most_size = 0
        self.dropped: Counter[str] = Counter()
        self._fresh: deque[Run] = deque()
        self._waiting: dict[int, _Waiting] = {}
        self._ready = SortedItems[int]()
        self._delayed = SortedItems[tuple[float, int]]()
        self._parked = SortedItems[int]()
        # By key: how many of its records are leased or delayed, and the runs of one record that wait for those.
        self._busy: dict[Hashable, int] = {}
        self._held: dict[Hashable, deque[int]] = {}
        self._held_count = 0
        # The key of each record that is leased or delayed, as it was found then: records may change meanwhile.
        self._keys: dict[int, Hashable] = {}
        self._leases: dict[int, MemoryLease] = {}
        self._timer: asyncio.TimerHandle | None = None
        # Kept here because uvloop's handle does not say it for a time that has come.
        self._timer_due = math.inf
        self._reader: asyncio.Future[bool] | None = None
        """Resolves to whether the time to wait is over."""
        self._room_waiters: deque[_RoomWaiter] = deque()
        self._reserved_records = self._reserved_bytes = 0
        self._accepting = True
        self._closed = False

    # -- in ------------------------------------------------------------------------------------------------------

    async def put(self, batch: Sequence[Any], placed: list[Placed] | None = None) -> list[range]:
        """Put records, all or none; returns at once unless `overflow="block"` waits for room.

        More than the queue can ever hold come in in parts, unless `overflow="reject"`.

        Args:
            batch: the records.
            placed: takes what came in, as it does.

        Returns:
            The numbers of the records that came in.

        Raises:
            QueueFullError: there is no room, and `overflow` says to refuse; or there never can be for so many at once.
                Its `accepted` says how many of them, the first ones, came in all the same.
            QueueClosedError: the queue is closed, or was while this waited.
        """
        self._check_accepting()
        payloads = list(batch)
        if not payloads:
            return []
        block = RecordBlock(payloads, int(self._loop.time() * _NS))
        placed = [] if placed is None else placed
        if block.count <= self._most_records and block.cost <= self._most_bytes:
            return await self._put(block, 0, placed)
        if self._overflow == "reject":
            raise self._full(block, "which can never fit; raise them, or hand over less at once")
        return await self._put_in_parts(block, placed)

    async def _put(self, block: RecordBlock, place: int, placed: list[Placed]) -> list[range]:
        if self._room_waiters or not self._fits(block.count, block.cost):
            if self._overflow == "drop_newest":
                self.dropped["newest"] += block.count
                return []
            if self._overflow == "reject":
                raise self._full(block, "and overflow='reject'; hand over less, or raise them")
            if self._overflow == "drop_oldest":
                count = block.count
                block = await self._make_room(block)
                place += count - block.count
                if not block.count:
                    return []
            else:
                await self._wait_for_room(block)
        numbers = self._enter(block)
        placed.append(Placed(range(place, place + block.count), numbers))
        return [numbers]

    async def _put_in_parts(self, block: RecordBlock, placed: list[Placed]) -> list[range]:
        done: list[range] = []
        records = max(1, int(min(self._most_records, block.count) // 2))
        low = 0
        while low < block.count:
            high, size = low, 0
            while high < block.count and high - low < records:
                size += block.part(high, high + 1).cost
                if high > low and size > self._most_bytes / 2:
                    break
                high += 1
            part = block.part(low, high)
            try:
                if part.cost > self._most_bytes:
                    if self._overflow == "block":
                        raise self._full(part, "which can never fit; raise max_bytes, or send a reference")
                    self.dropped["too_large"] += part.count
                else:
                    done += await self._put(part, low, placed)
            except QueueFullError as error:
                error.accepted = sum(map(len, done))
                raise
            low = high
        return done

    def resize(self, max_records: int | None, max_bytes: int | None) -> None:
        """Take other limits; those who wait for room are looked at again."""
        self.max_records, self.max_bytes = max_records, max_bytes
        self._most_records = math.inf if max_records is None else max_records
        self._most_bytes = math.inf if max_bytes is None else max_bytes
        self._serve()

    def _fits(self, count: int, cost: int) -> bool:
        return (
            self.records + self._reserved_records + count <= self._most_records
            and self.size + self._reserved_bytes + cost <= self._most_bytes
        )

    def _enter(self, block: RecordBlock) -> range:
        numbers = range(self.next_seq, self.next_seq + block.count)
        if not (block.count < SMALL and self._join(block)):
            self._fresh.append(Run(numbers.start, block, 0, block.count, 0))
        self.next_seq = numbers.stop
        self.records += block.count
        self.size += block.cost
        self.most_size = max(self.most_size, self.size)
        self._wake()
        return numbers

    def _join(self, block: RecordBlock) -> bool:
        """Put a small block into the one before it, so that records that come one by one take little room."""
        last = self._fresh[-1] if self._fresh else None
        if last is None or last.high != last.block.count or not last.block.join(block):
            return False
        self._fresh[-1] = last._replace(high=last.high + block.count)
        return True

    # -- no room -------------------------------------------------------------------------------------------------

    async def _make_room(self, block: RecordBlock) -> RecordBlock:
        """Drop the oldest records that are not under way; what of the block has room then.

        Records under way are never taken back: where they fill the queue, the older ones of what comes in are dropped.
        """
        dropped = 0
        while not self._fits(block.count, block.cost):
            dropped += 1
            if dropped % MOST_RUNS == 0:
                await asyncio.sleep(0)  # many small ones make no long step; others may come in between
                self._check_accepting()
                continue
            if not self._drop_oldest(block):
                keep = self._newest_that_fit(block)
                self.dropped["newest"] += block.count - keep
                return block.part(block.count - keep, block.count)
        return block

    def _newest_that_fit(self, block: RecordBlock) -> int:
        keep = cost = 0
        for size in reversed(block.sizes):
            cost += block.part(0, 1).cost - block.sizes[0] + size
            if not self._fits(keep + 1, cost):
                break
            keep += 1
        return keep

    def _drop_oldest(self, block: RecordBlock) -> bool:
        """Drop as much of the oldest run, from its beginning, as makes room for the block; whether there is one."""
        fresh = self._fresh[0].seq if self._fresh else math.inf
        waiting = min(self._ready.first if self._ready else math.inf, self._parked.first if self._parked else math.inf)
        if fresh == waiting == math.inf:
            return False
        entry = None if fresh < waiting else self._take_out(int(waiting))
        run = self._fresh.popleft() if entry is None else entry.run
        count = making_room(
            run, self.records + block.count - self._most_records, self.size + block.cost - self._most_bytes
        )
        gone, rest = run.part(run.seq, run.seq + count), run.part(run.seq + count, run.end)
        if rest.high > rest.low:
            if entry is None:
                self._fresh.appendleft(rest)
            else:
                entry.run = rest
                self._put_in(entry)
        self.records -= count
        self.size -= gone.cost
        self.dropped["oldest"] += count
        if entry is not None and entry.due is not None:
            self._release([gone])
        gone.forget()
        if self._on_drop is not None:
            self._on_drop(range(gone.seq, gone.end))
        return True

    async def _wait_for_room(self, block: RecordBlock) -> None:
        """Wait until there is room, first come, first served; nobody else gets it before the next `_enter`."""
        waiter = _RoomWaiter(self._loop.create_future(), block.count, block.cost)
        self._room_waiters.append(waiter)
        try:
            async with asyncio.timeout(self._block_timeout):
                await waiter.future
        except BaseException as error:
            self._leave(waiter)
            self._serve()
            if isinstance(error, TimeoutError):
                raise self._full(block, f"and block_timeout={self._block_timeout} is over; raise them") from None
            raise
        self._leave(waiter)
        # Between the moment at which the room was reserved and this one the queue may have been closed.
        self._check_accepting()

    def _leave(self, waiter: _RoomWaiter) -> None:
        if waiter.granted:
            self._reserved_records -= waiter.records
            self._reserved_bytes -= waiter.cost
        else:
            waiter.future.cancel()  # `_serve` passes over it

    def _serve(self) -> None:
        """Reserve the room that there is for those who wait for it."""
        while self._room_waiters and self._accepting:
            first = self._room_waiters[0]
            if first.future.done():
                self._room_waiters.popleft()
                continue
            if not self._fits(first.records, first.cost):
                return
            self._room_waiters.popleft()
            first.granted = True
            self._reserved_records += first.records
            self._reserved_bytes += first.cost
            first.future.set_result(True)

    def _full(self, block: RecordBlock, rule: str) -> QueueFullError:
        return QueueFullError(
            f"send queue: no room for {block.count} records of {block.raw} bytes: it holds {self.records} records "
            f"of {self.size} bytes, with max_records={self.max_records} and max_bytes={self.max_bytes}, {rule}"
        )

    # -- out -----------------------------------------------------------------------------------------------------

    async def lease(self, max_records: int, max_bytes: int, wait: float | None) -> MemoryLease | None:
        """The next records within both limits, at least one; None when `wait` is over. For one caller."""
        self._check()
        lease = self._grant(max_records, max_bytes)
        if lease is not None or wait == 0:
            return lease
        timer = None if wait is None else self._loop.call_later(wait, self._time_over)
        try:
            while lease is None:
                self._reader = self._loop.create_future()
                over = await self._reader
                self._check()
                lease = self._grant(max_records, max_bytes)
                if over:
                    break
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()
        return lease

    def _grant(self, max_records: int, max_bytes: int) -> MemoryLease | None:
        if self._serial and (self.leased or self._parked):
            return None  # one after the other: what comes later waits until this is settled
        taken: list[Run] = []
        # By key, how many records of it are in this lease: one lease may have several of a key, in their order.
        mine: dict[Hashable, int] = {}
        records, size = max_records, max_bytes
        while (
            records > 0 and len(taken) < MOST_RUNS and (part := self._next(records, size, first=not taken)) is not None
        ):
            for each in (part,) if self._key is None else self._admit(part, mine):
                taken.append(each._replace(attempts=each.attempts + 1))
                records -= each.high - each.low
                size -= each.size
        for key, count in mine.items():
            self._busy[key] = self._busy.get(key, 0) + count
        if not taken:
            return None
        lease = MemoryLease(self, taken)
        self.leased += len(lease)
        self._leases[id(lease)] = lease
        return lease

    def _next(self, records: int, size: int, *, first: bool) -> Run | None:
        """Take out what comes next, within the limits."""
        if self._ready:
            entry = self._waiting[self._ready.first]
            part = fitting(entry.run, records, size, first=first)
            if part is not None:
                self._take_out(entry.run.seq)
                if part.end < entry.run.end:
                    entry.run = entry.run.part(part.end, entry.run.end)
                    self._put_in(entry)
            return part
        if not self._fresh or self._held_count >= _LOOKAHEAD:
            return None
        run = self._fresh[0]
        part = fitting(run, records, size, first=first)
        if part is not None:
            self._fresh.popleft()
            if part.end < run.end:
                self._fresh.appendleft(run.part(part.end, run.end))
        return part

    # -- the places of those that wait ---------------------------------------------------------------------------

    def _put_in(self, entry: _Waiting) -> None:
        seq = entry.run.seq
        self._waiting[seq] = entry
        if entry.held_for is not None:
            self._parked.add(seq)
            held = self._held.setdefault(entry.held_for[0], deque())
            held.append(seq)
            self._held_count += 1
        elif entry.due is not None:
            self._parked.add(seq)
            self._delayed.add((entry.due, seq))
        else:
            self._ready.add(seq)

    def _take_out(self, seq: int) -> _Waiting:
        entry = self._waiting.pop(seq)
        if entry.held_for is not None:
            self._parked.remove(seq)
            held = self._held[entry.held_for[0]]
            held.remove(seq)  # only the oldest is ever taken out by itself: it stands near the front
            self._held_count -= 1
            if not held:
                del self._held[entry.held_for[0]]
        elif entry.due is not None:
            self._parked.remove(seq)
            self._delayed.remove((entry.due, seq))
        else:
            self._ready.remove(seq)
        return entry

    # -- keys ----------------------------------------------------------------------------------------------------

    def _admit(self, run: Run, mine: dict[Hashable, int]) -> list[Run]:
        """The records of a run that may be leased now; the others are held until their key is free."""
        key_of = self._key
        if key_of is None:
            return [run]
        admitted: list[Run] = []
        payloads = run.block.payloads
        for seq in range(run.seq, run.end):
            key = key_of(payloads[run.low + seq - run.seq])
            if key in self._busy or key in self._held:
                self._put_in(_Waiting(run.part(seq, seq + 1), held_for=(key,)))
                continue
            mine[key] = mine.get(key, 0) + 1
            self._keys[seq] = key
            if admitted and admitted[-1].end == seq:
                last = admitted[-1]
                admitted[-1] = Run(last.seq, last.block, last.low, last.high + 1, last.attempts)
            else:
                admitted.append(run.part(seq, seq + 1))
        return admitted

    def _release(self, runs: list[Run]) -> None:
        """The records' keys are no longer in use on their account; those held for them become ready."""
        if self._key is None:
            return
        freed: list[int] = []
        for run in runs:
            for seq in range(run.seq, run.end):
                key = self._keys.pop(seq)
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]
                    freed += self._held.pop(key, ())
        for seq in freed:
            entry = self._waiting[seq]
            entry.held_for = None
            self._held_count -= 1
            self._parked.remove(seq)
            self._ready.add(seq)
        if freed:
            self._wake()

    # -- what a lease asks for -----------------------------------------------------------------------------------

    def settle(self, lease: MemoryLease, runs: list[Run]) -> int:
        """Records of a lease are done with."""
        count = count_of(runs)
        self._forget(lease)
        self.leased -= count
        self.records -= count
        for run in runs:
            self.size -= run.cost
        self._release(runs)
        for run in runs:
            run.forget()
        self._serve()
        if self._serial:
            self._wake()
        return count

    def give_back(self, lease: MemoryLease, runs: list[Run], delay: float) -> int:
        """Records of a lease are to be had again after `delay` seconds."""
        count = count_of(runs)
        self.leased -= count
        self._forget(lease)
        if delay > 0 and runs:
            due = self._loop.time() + delay
            for run in runs:
                self._put_in(_Waiting(run, due))
            self._arm()
        else:
            for run in runs:
                self._put_in(_Waiting(run))
            self._release(runs)
            self._wake()
        return count

    def _forget(self, lease: MemoryLease) -> None:
        if not lease.unsettled:
            self._leases.pop(id(lease), None)

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def next_due(self) -> float | None:
        """The loop's time at which the next delayed record is ready."""
        return self._delayed.first[0] if self._delayed else None

    def _arm(self) -> None:
        due = self._delayed.first[0]
        if due < self._timer_due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due = due
            self._timer = self._loop.call_at(due, self._wake_delayed)

    def _wake_delayed(self) -> None:
        self._timer, self._timer_due = None, math.inf
        # A timer may fire a clock tick early: what is due at its time is due.
        now = self._loop.time() + 1e-6
        for _ in range(_WOKEN):
            if not self._delayed or self._delayed.first[0] > now:
                break
            entry = self._take_out(self._delayed.first[1])
            entry.due = None
            self._put_in(entry)
            self._release([entry.run])
        if self._delayed:
            self._arm()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(False)

    def _time_over(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(True)

    # -- the rest ------------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """The lowest number of a record in the queue; None when there is none."""
        found = [number for lease in self._leases.values() if (number := lease.oldest) is not None]
        found += [items.first for items in (self._ready, self._parked) if items]
        if self._fresh:
            found.append(self._fresh[0].seq)
        return min(found, default=None)

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """The idempotency keys of the records with these numbers."""
        queue_id = self.queue_id
        return [f"{queue_id}/{number}" for number in numbers]

    def now_ns(self) -> int:
        """The time on the clock of `enqueued_ns`."""
        return int(self._loop.time() * _NS)

    def take_all(self) -> list[Any]:
        """Empty the queue, leases included, in the order of the numbers: for the report of a shutdown."""
        runs = [run for lease in self._leases.values() for run in lease.take()]
        runs += [*self._fresh, *(entry.run for entry in self._waiting.values())]
        self._leases.clear()
        self._fresh.clear()
        self._waiting.clear()
        for items in (self._ready, self._parked, self._delayed):
            items.clear()
        self.records = self.size = self.leased = 0
        runs.sort(key=_seq_of)
        return [record for run in runs for record in run.block.payloads[run.low : run.high]]

    def stop_intake(self) -> None:
        """Refuse every put from now on, those that wait for room included, with `QueueClosedError`."""
        self._accepting = False
        for waiter in self._room_waiters:
            if not waiter.future.done():
                waiter.future.set_result(False)

    def close(self) -> None:
        """End every wait with `QueueClosedError`; what is in the queue stays for `take_all`."""
        self.stop_intake()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _check(self) -> None:
        if self._closed:
            raise QueueClosedError("send queue: closed; what was handed over before is in the exporter's report")

    def _check_accepting(self) -> None:
        if not self._accepting:
            raise QueueClosedError("send queue: closed; nothing of this call was kept that it did not confirm")


def _seq_of(run: Run) -> int:
    return run.seq
