"""Everything the queue knows, and every decision it takes. No await, no thread, no file: the loop calls it.

The shell around it (`write`, `read` and `durable.queue`) carries frames to the writer and back, and asks here what to
do. Time comes in as arguments.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.durable.disk import acklog
from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.disk.acklog import Entry
from batchqueue_async.durable.state.backlog import Backlog, Extent, run_bytes, run_cost, trimmed
from batchqueue_async.durable.state.frame import EPOCH_NS, Frame, Run
from batchqueue_async.durable.state.ranges import RangeMap
from batchqueue_async.durable.state.record_index import RecordIndex
from batchqueue_async.durable.state.room import Room
from batchqueue_async.durable.state.table import Segment
from batchqueue_async.durable.stats import Counters
from batchqueue_async.durable.write.writer import HintWrite, Outcome
from batchqueue_async.leases.key_order import KeyOrder
from batchqueue_async.leases.run import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from batchqueue_async.durable.config import DurableConfig
    from batchqueue_async.durable.disk.compaction import Compacted
    from batchqueue_async.durable.disk.recovery import Survey
    from batchqueue_async.durable.write.pending import WriteBuffer

_NS = 1_000_000_000
_COMPACT = 64 * 1024
_COMPACT_RATIO = 4
# A hint is rewritten when it is larger than this part of a segment: under a small `max_bytes`, hints are small as well.
_HINT_SHARE = 32
# What one step of the loop grants: runs, or records where each is asked for its key.
PORTION = 400
# What it costs besides to look for them once more, in records.
_PASS = 4
# Records that wait for their keys keep their payloads in this part of the window, so that reading never stands still.
_HELD_SHARE = 4
# What the keys of leased and delayed records take, likewise.
_KEYS_SHARE = 4


class Granted(NamedTuple):
    """Runs for a lease, and whether there may be more of them that are ready: it has stopped for the loop's sake."""

    runs: list[Run]
    more: bool


class QueueState:
    """The segments, the backlog and the counts of one open queue."""

    def __init__(self, config: DurableConfig, found: Survey, pending: WriteBuffer) -> None:
        self.config = config
        self.segments = {entry.number: entry for entry in found.segments}
        self.touched = {entry.number for entry in found.segments if entry.pending}
        self.next_seq = found.next_seq
        self.newest = max(self.segments, default=-1)
        self.index = RecordIndex(found.segments)
        self.backlog = Backlog(
            self.index,
            newest_first=config.order == "freshest",
            memory_bytes=config.memory_bytes,
            memory_blocks=config.memory_blocks,
        )
        share = config.memory_bytes // _KEYS_SHARE
        self.gate = KeyOrder(config.key, config.key_lookahead, share, self._hold) if config.key is not None else None
        self.held_bytes = 0
        self.counters = Counters(recovered=found.report.records)
        self.records = found.report.records
        self.disk_bytes = found.report.disk_bytes
        self.pending = pending
        self.room = Room(self)
        self.moves = 0
        self.leased = 0
        self.emptied = {entry.number for entry in found.segments if not entry.unsettled}
        self.sparse: set[int] = set()
        for entry in found.segments:
            if entry.sparse:
                self.sparse.add(entry.number)
            if entry.unsettled:
                extent = Extent(
                    entry.number, (entry.header.data_start, entry.data_end), (entry.first, entry.end), entry.newest_ns
                )
                self.backlog.add_extent(extent)

    def deletable_bytes(self) -> int:
        """What the next round gives back before it writes anything: settled segments, unless that has failed before."""
        total = 0
        for number in self.emptied:
            entry = self.segments.get(number)
            if entry is not None and self._is_deletable(entry) and not entry.stuck:
                total += entry.size + entry.hint_bytes
        return total

    def _is_deletable(self, entry: Segment) -> bool:
        return _empty(entry) and entry.number != self.newest and not self._referred(entry.number)

    def freeing_bytes(self) -> int:
        """What settled segments that are not deleted yet take, and will give back with the next rounds."""
        total = 0
        for number in self.emptied:
            entry = self.segments.get(number)
            if entry is not None and self._is_deletable(entry):
                total += entry.size + entry.hint_bytes
        newest = self.segments.get(self.newest)
        if newest is not None and not newest.unsettled and not self._referred(newest.number):
            total += max(0, newest.data_end - newest.header.data_start)
        return total

    # The writer

    def place(self, frame: Frame) -> tuple[int, int, int]:
        """The segment where a frame is now, and the offsets between which what is unsettled of it lies."""
        number, offset = frame.segment, frame.offset
        while (moved := self.segments[number].moved) is not None and offset >= moved[0]:
            number, offset = moved[1], offset + moved[2]
        entry = self.segments[number]
        if entry.compacted:
            return number, *entry.span(frame.first, frame.first + frame.count)
        return number, offset, offset + frame.stored

    def relocating(self, number: int) -> bool:
        """Whether places in this segment are looked up through it elsewhere, or may come to be."""
        return self.segments[number].moved is not None

    def assign(self, frames: Iterable[Frame]) -> None:
        """Give frames their sequence numbers; `applied` makes those of the written ones final.

        A frame of which a copy is left on the disk has its numbers: those are the first of a round, and without a gap.
        """
        seq = self.next_seq
        for frame in frames:
            if not frame.kept:
                frame.first = seq
                seq += frame.count

    def applied(self, outcome: Outcome) -> list[Frame]:
        """Take in what the writer has done; the frames that are safe now, which become ready."""
        counters = self.counters
        counters.rounds += 1
        counters.took(outcome.seconds, synced=outcome.synced)
        counters.sync_errors += outcome.sync_errors
        counters.syncs += outcome.synced
        counters.rotations += len(outcome.opened)
        self.room.looked(outcome.free_bytes)
        if outcome.shrunk is not None:
            self.shrunk(outcome.shrunk)
        self._follow(outcome)
        done = outcome.round.frames[: outcome.done]
        for frame in done:
            self._written(frame)
        if outcome.left_behind:
            self._left_behind(outcome)
        for number, _, _ in outcome.closed:
            entry = self.segments[number]
            entry.arm_compaction(entry.end - entry.first)
            if not entry.unsettled:
                self.emptied.add(number)
            elif entry.sparse:
                self.sparse.add(number)
        if outcome.proven is not None:
            self._note(
                self.segments[outcome.proven[0]],
                Entry(acklog.SYNCED, self.segments[outcome.proven[0]].first, outcome.proven[1]),
            )
        self._hints_written(outcome)
        return done

    def _left_behind(self, outcome: Outcome) -> None:
        """Copies of frames could not be taken off the disk: of those that failed the numbers are final."""
        for frame in outcome.round.frames[outcome.done :]:
            frame.kept = True
            self.next_seq = max(self.next_seq, frame.first + frame.count)
        for number in outcome.left_behind:
            if (entry := self.segments.get(number)) is not None:  # else it is deleted, copies and all
                entry.void(self.next_seq)
                self.touched.add(number)

    def _hints_written(self, outcome: Outcome) -> None:
        """Take the sizes of the hint files that were written anew; those that could not be written are to be."""
        for number, size in outcome.hint_sizes.items():
            if number in self.segments:
                self.segments[number].hint_anew = size
                self._resize_hint(self.segments[number], size)
        for number in outcome.hint_errors:
            if number in self.segments:
                self.segments[number].fresh_hint = True
                self.touched.add(number)

    def _follow(self, outcome: Outcome) -> None:
        """Which segments the writer has opened, closed and moved."""
        for header in outcome.opened:
            number = header.number
            entry = self.segments[number] = Segment(header, fmt.DATA_START)
            self.index.add(entry)
            self.disk_bytes += fmt.DATA_START
            self.newest = number
            self.emptied |= {entry.number for entry in self.segments.values() if _empty(entry)}
        for number, _, size in outcome.closed:
            entry = self.segments[number]
            entry.closed = True
            self._resize(entry, size)
        for moved in outcome.moved:
            self._move(moved.source, moved.offset, moved.first_seq, moved.target, moved.shift)

    def _written(self, frame: Frame) -> None:
        frame.segment, frame.offset, _ = self.place(frame)
        entry = self.segments[frame.segment]
        entry.end = frame.first + frame.count
        self.next_seq = max(self.next_seq, entry.end)
        entry.data_end = max(entry.data_end, frame.offset + frame.stored)
        entry.newest_ns = max(entry.newest_ns, frame.enqueued_ns)
        shift = frame.offset - frame.parts[0][1] if frame.parts else 0
        for first, offset in frame.parts or ((frame.first, frame.offset),):
            entry.remember(first, offset + shift)
        frame.parts = []
        if not entry.closed:
            self._resize(entry, entry.data_end)
        self.records += frame.count
        self.counters.put += frame.count
        self.counters.put_bytes += frame.raw
        self.backlog.add(frame)

    def _resize(self, entry: Segment, size: int) -> None:
        self.disk_bytes += size - entry.size
        entry.size = size

    def _move(self, source: int, offset: int, first_seq: int, target: int, shift: int) -> None:
        self.moves += 1
        old, new = self.segments[source], self.segments[target]
        old.moved = (offset, target, shift)
        if old.end > first_seq:
            new.end = max(new.end, old.end)
            new.data_end = max(new.data_end, old.data_end + shift)
            new.settled, old.end = old.settled.split(first_seq), first_seq
            new.attempts = RangeMap(entry for entry in old.attempts if entry[1] > first_seq)
            new.leased = sum(run.high - run.low for run in self.outstanding() if first_seq <= run.seq < new.end)
            old.leased -= new.leased
            self._resize(new, max(new.size, new.data_end))
        self.index.moved(old, new, first_seq, shift)
        old.data_end = min(old.data_end, offset)
        new.newest_ns = max(new.newest_ns, old.newest_ns)
        self._resize(old, old.data_end)
        for entry in (old, new):
            entry.pending.clear()
            entry.fresh_hint = True
            self.touched.add(entry.number)
        self.backlog.relocate(source, offset, first_seq, target, shift)

    def shrinkable(self) -> tuple[int, int, bytes] | None:
        """The newest segment and a footer, when all of its records are settled: its frames may go, its numbers stay."""
        entry = self.segments.get(self.newest)
        if (
            entry is None
            or entry.unsettled
            or entry.data_end == entry.header.data_start
            or self._referred(entry.number)
        ):
            return None
        times = (entry.newest_ns, entry.newest_ns)
        footer = fmt.SegmentFooter(
            entry.number, entry.first, self.next_seq, 0, 0, *times, data_end=entry.header.data_start, synced=True
        )
        return entry.number, entry.header.data_start, fmt.encode_footer(footer, entry.header)

    def shrunk(self, number: int) -> None:
        """The newest segment is an empty, sealed one now."""
        entry = self.segments[number]
        entry.closed = True
        entry.data_end = entry.header.data_start
        self._resize(entry, entry.header.data_start + entry.header.footer_size)
        self.emptied.add(number)

    def deletable(self) -> list[int]:
        """Segments whose file may go; they are forgotten here."""
        gone: list[int] = []
        for number in sorted(self.emptied):
            entry = self.segments.get(number)
            if entry is None:
                self.emptied.discard(number)
            elif self._is_deletable(entry):
                self.emptied.discard(number)
                self.backlog.forget_segment(number)
                gone.append(number)
                entry.deleted = True
                self.disk_bytes -= entry.size + entry.hint_bytes
                self.touched.discard(number)
                self.sparse.discard(number)
        return gone

    # Compaction

    def swap(self, number: int) -> HintWrite | None:
        """The hint to write before a finished copy takes the segment's place; None when the segment has gone."""
        entry = self.segments.get(number)
        if entry is None or entry.deleted or not entry.unsettled:
            return None
        entry.swapping = True
        return self._hint(entry, anew=True)

    def unswapped(self, number: int) -> None:
        """The copy could not take the segment's place: it is as it was, and its hint is written anew."""
        entry = self.segments.get(number)
        if entry is not None:
            entry.swapping = False
            entry.fresh_hint = True
            self.touched.add(number)

    def compacted(self, result: Compacted) -> None:
        """The copy has taken the segment's place."""
        entry = self.segments[result.number]
        self.moves += 1
        self.counters.compactions += 1
        self.counters.compacted_bytes += entry.size - result.size
        entry.swapping = False
        entry.index = (result.firsts, result.offsets)
        entry.compacted = True
        entry.data_end = result.data_end
        self._resize(entry, result.size)
        entry.arm_compaction(entry.unsettled)
        self.backlog.compacted(entry.number, entry.span)

    def forget(self, numbers: list[int]) -> None:
        """Segments that are deleted from the disk."""
        for number in numbers:
            entry = self.segments.pop(number, None)
            if entry is not None:
                self.index.forget(entry)

    def undelete(self, numbers: list[int]) -> None:
        """Segments whose deletion failed; it is tried again."""
        for number in numbers:
            entry = self.segments[number]
            entry.deleted, entry.stuck = False, True
            self.disk_bytes += entry.size + entry.hint_bytes
            self.emptied.add(number)

    def _referred(self, number: int) -> bool:
        # A frame of this segment moved on: its old place is looked up through here until its records are settled.
        moved = self.segments[number].moved
        return moved is not None and moved[1] in self.segments and bool(self.segments[moved[1]].unsettled)

    def hints(self) -> list[HintWrite]:
        """What to write beside the segments now."""
        writes: list[HintWrite] = []
        floor = min(_COMPACT, self.config.rotate_bytes // _HINT_SHARE)
        # Where the reserve of `max_bytes` is half used up, a hint is as small as it can be.
        reserve = (self.config.max_bytes or 0) - min(self.config.usable_bytes, 1 << 62)
        ratio = 1 if 2 * self.room.spare_bytes < reserve else _COMPACT_RATIO
        for number in sorted(self.touched):
            entry = self.segments.get(number)
            if entry is None or entry.deleted or not (entry.pending or entry.fresh_hint):
                continue
            least = max(entry.hint_anew, acklog.HEADER + acklog.ENTRY + acklog.SPAN * len(entry.settled))
            size = entry.hint_bytes + acklog.ENTRY * len(entry.pending)
            anew = (
                entry.fresh_hint or size > max(floor, ratio * least) or self.room.spare_bytes < size - entry.hint_bytes
            )
            writes.append(self._hint(entry, anew=anew))
        self.touched.clear()
        self.counters.hint_writes += len(writes)
        return writes

    def _hint(self, entry: Segment, *, anew: bool) -> HintWrite:
        write = HintWrite(entry.number, entry.marker, range(entry.first, entry.end), entry.pending)
        if anew:
            write.entries = [Entry(acklog.LOST, low, high) for low, high in entry.lost]
            if entry.void_end > entry.end:
                write.entries.append(Entry(acklog.DROPPED, entry.end, entry.void_end))
            write.settled = entry.settled.copy()
            size = acklog.HEADER + acklog.ENTRY * (1 + len(write.entries)) + acklog.SPAN * len(entry.settled)
            # At most: the writer finds out which of them are of records that are not settled.
            attempts = acklog.ENTRY * (len(entry.settled) + 1 + len(entry.attempts))
            if self.config.max_attempts is not None or size + attempts - entry.hint_bytes <= self.room.spare_bytes:
                # Else there is no room for them: how often a record was leased counts from here on.
                write.attempts = entry.attempts.copy()
                size += attempts
            entry.hint_anew = size
        else:
            size = (entry.hint_bytes or acklog.HEADER) + acklog.ENTRY * len(entry.pending)
        entry.pending = []
        entry.fresh_hint = False
        self._resize_hint(entry, size)
        return write

    def _resize_hint(self, entry: Segment, size: int) -> None:
        self.disk_bytes += size - entry.hint_bytes
        entry.hint_bytes = size

    def outstanding(self) -> Iterable[Run]:
        """The runs that are leased; the leasing half of the shell says so."""
        return ()

    # Leases

    def grant(self, max_records: int, max_bytes: int, now_ns: int, *, at_least_one: bool = True) -> Granted:
        """The next records for a lease, one portion of them; those past `max_age` are dropped on the way."""
        if self.room.owed:
            # Before they are leased, and can't be dropped.
            self.room.pay()
        granted: list[Run] = []
        keys: set[Hashable] = set()
        room = PORTION
        while max_records > 0 and max_bytes > 0 and room > 0:
            first = at_least_one and not granted
            if self.gate is None:
                runs = self.backlog.take(max_records, max_bytes, most=room, at_least_one=first)
            else:
                runs = self._look_at(self.gate, keys, min(max_records, room), max_bytes, at_least_one=first)
            if not runs:
                break
            # What was looked at, for that is what takes time: with an order by key most of it may have to wait.
            room -= self._weight(runs) + _PASS
            if self.config.max_age is not None:
                runs = self._unexpired(runs, now_ns)
            if self.gate is not None:
                runs = self.gate.admit(runs, keys)
            granted += runs
            if self.gate is None and self.config.max_age is None:
                break  # nothing was filtered out: `take` has gone as far as the limits allow
            max_records -= sum(run.high - run.low for run in runs)
            max_bytes -= sum(map(run_bytes, runs))
        if self.gate is not None:
            granted.sort()  # by number: those that had waited for their keys, and others
        return Granted(self._leased(granted), more=room <= 0)

    def _look_at(
        self, gate: KeyOrder, keys: set[Hashable], records: int, size: int, *, at_least_one: bool
    ) -> list[Run]:
        """What is next in an order by key: records that have waited for keys that are free now, else the backlog's."""
        freed: list[Run] = []
        parked: list[Run] = []
        limit = min(records, gate.key_room)
        while len(freed) < limit and len(parked) < PORTION // 2 and (run := gate.next_free(keys)) is not None:
            if run.frame is _ON_DISK:
                if freed:
                    break
                # It is read, and comes back through the backlog; so are its followers, at once.
                parked.append(gate.take_free(keys))
                continue
            returned = parked[0].seq if parked else self.backlog.first_returned()
            if returned is not None and returned < run.seq:
                break  # that may be of the same key
            size -= run_bytes(run)
            if size < 0 and (freed or not at_least_one):
                return freed
            self._count_held([gate.take_free(keys)])
            freed.append(run)
        for low, high, _ in joined(parked):
            self.index.give_back(low, high)
        if freed or (gate.full and not self.backlog.any_returned):
            return freed
        return self.backlog.take(min(records, gate.room), size, most=records, at_least_one=at_least_one)

    def _weight(self, runs: Sequence[Run]) -> int:
        return len(runs) if self.gate is None else sum(run.high - run.low for run in runs)

    def _leased(self, runs: list[Run]) -> list[Run]:
        """Runs are out on a lease now: one attempt more."""
        most = self.config.max_attempts
        for low, high, attempts in joined(runs):
            for entry, start, stop in self.index.parts(low, high):
                self.leased += stop - start
                entry.leased += stop - start
                if most is not None and attempts >= most:
                    continue  # they are given up: nobody gets them, and nothing is noted
                entry.attempts.put(start, stop, attempts + 1)
                entry.note(Entry(acklog.LEASED, start, stop, attempts + 1))
                self.touched.add(entry.number)
        return [Run(seq, frame, low, high, attempts + 1) for seq, frame, low, high, attempts in runs]

    def _unlease(self, runs: Sequence[Run]) -> Iterator[tuple[Segment, int, int, int]]:
        """Runs are no longer out; their numbers by segments, with their attempts."""
        for low, high, attempts in joined(runs):
            for entry, start, stop in self.index.parts(low, high):
                self.leased -= stop - start
                entry.leased -= stop - start
                yield entry, start, stop, attempts

    def _come_back(self, runs: Sequence[Run]) -> None:
        for entry, low, high, attempts in self._unlease(runs):
            # Fewer than were noted, if this lease was no attempt.
            entry.attempts.put(low, high, attempts)

    def drop(self, runs: list[Run], reason: str) -> int:
        """Records go for this reason; how many."""
        dropped = self.settle(acklog.DROPPED, runs)
        self.counters.dropped[reason] += dropped
        return dropped

    def _unexpired(self, runs: list[Run], now_ns: int) -> list[Run]:
        cutoff = self.cutoff(now_ns)
        if cutoff is None:
            return runs
        old = [run for run in runs if EPOCH_NS < run.frame.enqueued_ns < cutoff]
        self.drop(old, "max_age")
        return [run for run in runs if not EPOCH_NS < run.frame.enqueued_ns < cutoff]

    def cutoff(self, now_ns: int) -> int | None:
        """Records enqueued before this are past `max_age`."""
        return None if self.config.max_age is None else now_ns - int(self.config.max_age * _NS)

    def ack(self, runs: list[Run]) -> int:
        """Leased records are done."""
        count = self._settle_leased(runs)
        self.counters.acked += count
        self.counters.retry_successes += sum(run.high - run.low for run in runs if run.attempts > 1)
        return count

    def bury(self, runs: list[Run], reason: str) -> int:
        """Leased records are in the dead letters now."""
        count = self._settle_leased(runs)
        self.counters.dead_lettered += count
        self.counters.retry_failures[reason] += count
        return count

    def give_back(self, runs: list[Run], reason: str, due: float | None) -> None:
        """Leased records are to be delivered again, at the loop time `due` or now."""
        count = sum(run.high - run.low for run in runs)
        self.counters.retries += count
        self.counters.retry_failures[reason] += count
        self._come_back(runs)
        if due is None:
            self._ready(runs)
        else:
            for low, high, _ in joined(runs):
                # Without their payloads: a delay may be long, and there may be many.
                self.index.delay(due, low, high)

    def undo(self, runs: list[Run]) -> None:
        """A lease that never reached its caller: its records are as they were."""
        back = [run._replace(attempts=run.attempts - 1) for run in runs]
        self._come_back(back)
        self._ready(back)

    def wake_delayed(self, now: float) -> bool:
        """Make records ready whose delay is over, as many as one step should take; whether there were any."""
        woken = self.index.wake(now)
        self.release(woken)
        for low, high in woken:
            self.index.give_back(low, high)
        return bool(woken)

    def wake_all(self) -> bool:
        """Make all records ready that are delayed; whether there were any."""
        if not self.index.delayed:
            return False
        if self.gate is None:
            self.index.wake_all()
        while self.wake_delayed(math.inf):
            pass
        return True

    def _ready(self, runs: list[Run]) -> None:
        self.release((run.seq, run.end) for run in runs)
        self.backlog.give_back(runs)

    def release(self, ranges: Iterable[tuple[int, int]]) -> None:
        """These records no longer use their keys: those that wait for them may be ready."""
        if self.gate is not None:
            self.gate.release(ranges)

    def _hold(self, run: Run) -> Run:
        """A record waits for its key: with its payload as long as there is room for that."""
        size = run_cost(run)
        if self.held_bytes + size > self.config.memory_bytes // _HELD_SHARE:
            return Run(run.seq, _ON_DISK, 0, run.high - run.low, run.attempts)
        self.held_bytes += size
        return trimmed(run)

    def _count_held(self, gone: Iterable[Run]) -> None:
        self.held_bytes -= sum(map(run_cost, gone))

    def drop_held(self, wanted: Callable[[Run], bool]) -> int:
        """Drop records that wait for their keys; how many."""
        gone = self.gate.drop_held(wanted) if self.gate is not None else []
        self._count_held(gone)
        return self.drop(gone, "oldest")

    def drop_oldest_held(self) -> int:
        """Drop the oldest record that waits for its key; how many."""
        gone = [self.gate.drop_oldest()] if self.gate is not None else []
        self._count_held(gone)
        return self.drop(gone, "oldest")

    def drop_parked(self, entry: Segment, low: int, high: int, reason: str) -> int:
        """Drop what of [low, high) waits on the disk, to be delivered again now or later; how many."""
        waiting = [*entry.delayed.present(low, high), *entry.returned.present(low, high)]
        self.release(self.index.drop(entry, low, high))
        dropped = sum(self.settle_range(entry, acklog.DROPPED, *part) for part in waiting)
        self.counters.dropped[reason] += dropped
        return dropped

    def _settle_leased(self, runs: list[Run]) -> int:
        count = 0
        for entry, low, high, _ in self._unlease(runs):
            count += self.settle_range(entry, acklog.ACKED, low, high)
        if self.gate is not None:
            self.release((run.seq, run.end) for run in runs)
        return count

    def settle(self, kind: int, runs: list[Run]) -> int:
        """Records are done for this reason; how many were not done before."""
        return sum(
            self.settle_range(entry, kind, start, stop)
            for low, high, _ in joined(runs)
            for entry, start, stop in self.index.parts(low, high)
        )

    def settle_range(self, entry: Segment, kind: int, low: int, high: int) -> int:
        """The same for a range of one segment."""
        new = entry.settle(kind, low, high)
        self.records -= new
        self.touched.add(entry.number)
        if entry.closed:
            if not entry.unsettled:
                self.emptied.add(entry.number)
            elif entry.settled.count >= entry.sparse_at:
                self.sparse.add(entry.number)
        return new

    def _note(self, entry: Segment, what: Entry) -> None:
        entry.note(what)
        self.touched.add(entry.number)


# The frame of a record that is held without its payload.
_ON_DISK = Frame(fmt.GROUP, None, 0, 0)


def _empty(entry: Segment) -> bool:
    return entry.closed and not entry.unsettled and not entry.deleted
