"""Which record is next: a window of frames in memory, and extents of the disk for all the rest.

Pure, and bounded: a backlog of any length is a window of at most `memory_bytes` and one extent per stretch of a
segment. In `fifo` order the window is the front of the queue and new frames go past it to the disk when it is
full. In `freshest` order it is the end of the queue, and the oldest frames leave it when it is full. Records that come
back from a lease keep their payloads while the window has room for them; the others wait in the index.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.durable.state.frame import RECORD_COST, Run
from batchqueue_async.durable.state.returned import ReturnedRuns
from batchqueue_async.leases.run import joined

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable

    from batchqueue_async.durable.state.frame import Frame
    from batchqueue_async.durable.state.record_index import RecordIndex, Stretch

# What a run that came back takes in memory besides its records: it, its frame, and their places.
_RUN_COST = 512
# How many of the runs that come back together keep their payloads.
_KEPT = 500


class Extent:
    """Frames of one segment that are only on the disk: bytes `start` to `end`.

    `first` to `stop` are the records that are still wanted, at least one of them: an extent without any is not in the
    backlog any longer. `floor`, the number that the frame at `start` may begin with, is lower where some were dropped.
    """

    __slots__ = ("busy", "end", "first", "floor", "index", "newest_ns", "segment", "start", "stop")

    def __init__(self, segment: int, place: tuple[int, int], seqs: tuple[int, int], newest_ns: int) -> None:
        self.segment = segment
        self.start, self.end = place
        self.first, self.stop = seqs
        self.floor = self.first
        self.newest_ns = newest_ns
        # Of its frames, where they begin, and their first numbers.
        self.index: tuple[array[int], array[int]] | None = None
        self.busy = False


class Load(NamedTuple):
    """A piece of an extent, from record `first` on, to read; `offsets` asks for where its frames are instead."""

    extent: Extent
    start: int
    end: int
    first: int
    offsets: bool = False


def run_bytes(run: Run) -> int:
    """The payload bytes of a run that are in memory."""
    if run.frame.payloads is None:
        return 0
    if run.high - run.low == run.frame.count:
        return run.frame.raw
    return sum(map(len, run.frame.payloads[run.low : run.high]))


def run_cost(run: Run) -> int:
    """What a run takes in memory."""
    return 0 if run.frame.payloads is None else run_bytes(run) + RECORD_COST * (run.high - run.low)


def trimmed(run: Run) -> Run:
    """The run with a frame that has its payloads alone: else those of its neighbours stay in memory as long as it."""
    if run.high - run.low == run.frame.count:
        return run
    return Run(run.seq, run.frame.part(run.low, run.high), 0, run.high - run.low, run.attempts)


class Backlog:
    """The records that may be leased now, in the order in which they will be."""

    def __init__(self, index: RecordIndex, *, newest_first: bool, memory_bytes: int, memory_blocks: int) -> None:
        self._index = index
        self._newest_first = newest_first
        self._memory_bytes = memory_bytes
        self._memory_blocks = memory_blocks
        self.window: deque[Run] = deque()
        self.window_bytes = 0
        self.extents: deque[Extent] = deque()
        self.returned = ReturnedRuns(newest_first=newest_first)
        self.spilled = 0

    def __bool__(self) -> bool:
        return bool(self.window or self.extents or self.returned or self._index.any_returned)

    @property
    def runs(self) -> int:
        """How many runs are in memory."""
        return len(self.window) + len(self.returned)

    @property
    def on_disk(self) -> bool:
        """Whether any of them have to be read before they are leased."""
        return bool(self.extents) or self._index.any_returned

    # Frames come in

    def add(self, frame: Frame) -> None:
        """A frame that was just written."""
        fits = self.window_bytes + frame.cost <= self._memory_bytes and len(self.window) < self._memory_blocks
        if self._newest_first or (fits and not self.extents):
            self._push(Run(frame.first, frame, 0, frame.count, 0))
            self._shrink()
        else:
            self._spill_to_end(frame)

    def add_extent(self, extent: Extent) -> None:
        """Frames that are on the disk already, newer than all that are known."""
        self.extents.append(extent)

    def give_back(self, runs: Iterable[Run]) -> None:
        """Runs that were leased, or held, and are to be delivered again: with their payloads where there is room.

        Of thousands, which are in memory run by run, most are left to the disk: that is a range for many of them.
        """
        parked: list[Run] = []
        kept = 0
        for run in runs:
            if (
                kept == _KEPT
                or run.frame.payloads is None
                or self.window_bytes + run_cost(run) + _RUN_COST > self._memory_bytes
            ):
                parked.append(run)
            else:
                kept += 1
                self.keep(run)
        for low, high, _ in joined(parked):
            self._index.give_back(low, high)

    def keep(self, run: Run) -> None:
        """A run is to be delivered again, and its payloads stay in memory until then."""
        self.returned.add(run := trimmed(run))
        self.window_bytes += run_cost(run) + _RUN_COST

    def _take_returned(self, run: Run) -> None:
        self.returned.remove(run)
        self.window_bytes -= run_cost(run) + _RUN_COST

    @property
    def any_returned(self) -> bool:
        """Whether anything that was leased before waits to be delivered again."""
        return bool(self.returned) or self._index.any_returned

    def _push(self, run: Run) -> None:
        self.window.append(run)
        self.window_bytes += run.frame.cost

    def _shrink(self) -> None:
        while len(self.window) > 1 and (
            self.window_bytes > self._memory_bytes or len(self.window) > self._memory_blocks
        ):
            run = self.window[0]
            self.window.popleft()
            self.window_bytes -= run_cost(run)
            if run.high - run.low < run.frame.count or run.attempts:
                # A part of it is leased or settled: only whole fresh frames can be read again as an extent.
                self._index.give_back(run.seq, run.end)
            else:
                self._spill_to_end(run.frame)

    def _spill_to_end(self, frame: Frame) -> None:
        self.spilled += 1
        frame.payloads = None
        frame.gathered = []
        end = frame.offset + frame.stored
        stop = frame.first + frame.count
        last = self.extents[-1] if self.extents else None
        if last is not None and last.segment == frame.segment and last.end == frame.offset and not last.busy:
            last.end, last.stop, last.newest_ns = end, stop, max(last.newest_ns, frame.enqueued_ns)
            if last.index is not None:
                last.index[0].append(frame.offset)
                last.index[1].append(frame.first)
        else:
            self.extents.append(Extent(frame.segment, (frame.offset, end), (frame.first, stop), frame.enqueued_ns))

    # Records go out

    def take(self, max_records: int, max_bytes: int, *, most: int, at_least_one: bool = True) -> list[Run]:
        """The next records within both limits and in `most` runs, as far as they are in memory.

        The first record may break the limit of bytes.
        """
        taken: list[Run] = []
        records, size = max_records, max_bytes
        while records > 0 and len(taken) < most and (run := self.peek()) is not None and run.frame.payloads is not None:
            count = run.high - run.low
            # Only of as many as are wanted: a run may have thousands more.
            if count > records or (whole := run_bytes(run)) > size:
                count, whole = self._fitting(run, records, size, first=at_least_one and not taken)
                if not count:
                    break
            taken.append(self._pop(run, count, whole))
            records -= count
            size -= whole
        return taken

    def peek(self) -> Run | None:
        """The run that is next; None when there is none, or the disk has it."""
        if not self.returned and not self._index.any_returned:
            # The usual case: nothing has come back.
            return (self.window[-1] if self._newest_first else self.window[0]) if self.window else None
        run = self.returned.next()
        if not self._newest_first:
            parked = self._index.first_returned()
            if run is None:
                return None if parked is not None or not self.window else self.window[0]
            return run if parked is None or run.seq < parked else None
        if self.window and (run is None or self.window[-1].end > run.end):
            run = self.window[-1]
        parked = self._index.last_returned()
        return run if parked is None or (run is not None and run.end >= parked) else None

    def first_returned(self) -> int | None:
        """The lowest number of what came back to be delivered again, in memory or on the disk."""
        run, parked = self.returned.oldest(), self._index.first_returned()
        if run is None or parked is None:
            return parked if run is None else run.seq
        return min(run.seq, parked)

    def next_stretch(self, size: int) -> Stretch | None:
        """What to read, about `size` bytes, when the records that are next came back, and only the disk has them."""
        if not self._index.any_returned or self.peek() is not None:
            return None
        return self._index.stretch(size, newest_first=self._newest_first)

    def _fitting(self, run: Run, records: int, size: int, *, first: bool) -> tuple[int, int]:
        payloads = run.frame.payloads or []
        if self._newest_first:
            wanted = reversed(payloads[max(run.low, run.high - records) : run.high])
        else:
            wanted = iter(payloads[run.low : min(run.high, run.low + records)])
        count, total = 0, 0
        for end in accumulate(map(len, wanted)):
            if end > size and (count or not first):
                break
            count, total = count + 1, end
        return count, total

    def _pop(self, run: Run, count: int, size: int) -> Run:
        returned = self.returned.has(run)
        if returned:
            self.returned.remove(run)
            self.window_bytes -= _RUN_COST
            self.window_bytes -= size + RECORD_COST * count if count == run.high - run.low else run_cost(run)
        else:
            self.window_bytes -= size + RECORD_COST * count
            self.window.pop() if self._newest_first else self.window.popleft()
        if count == run.high - run.low:
            return run
        if self._newest_first:
            rest, taken = run.part(run.seq, run.end - count), run.part(run.end - count, run.end)
        else:
            rest, taken = run.part(run.seq + count, run.end), run.part(run.seq, run.seq + count)
        if returned:
            self.returned.add(rest)
            self.window_bytes += run_cost(rest) + _RUN_COST
        elif self._newest_first:
            self.window.append(rest)
        else:
            self.window.appendleft(rest)
        return taken

    # The disk comes back to memory

    def next_load(self, size: int) -> Load | None:
        """The piece of disk to read now, about `size` bytes of it, when the window runs low."""
        if (
            not self.extents
            or self.window_bytes > self._memory_bytes // 2
            or len(self.window) > self._memory_blocks // 2
        ):
            return None
        if not self._newest_first:
            extent = self.extents[0]
            return Load(extent, extent.start, extent.end, extent.first)
        if self.window:
            return None
        extent = self.extents[-1]
        if extent.index is None:
            return Load(extent, extent.start, extent.end, extent.first, offsets=True)
        offsets, firsts = extent.index
        at = min(bisect_left(offsets, extent.end - size), len(offsets) - 1)
        if at <= 0:
            return Load(extent, extent.start, extent.end, extent.first)
        return Load(extent, offsets[at], extent.end, firsts[at])

    def indexed(self, load: Load, index: tuple[array[int], array[int]]) -> None:
        """The offsets of an extent's frames have been read, and their first numbers."""
        load.extent.index = index

    def is_next(self, extent: Extent) -> bool:
        """Whether what was read of an extent may come in: it was not dropped meanwhile, and nothing goes before it.

        In `freshest` order newer frames may have left the memory while it was read: they would come after it else.
        """
        return extent is self.extents[-1] if self._newest_first and self.extents else extent in self.extents

    def loaded(self, load: Load, runs: list[Run], stopped_at: int, seqs: tuple[int, int]) -> None:
        """A piece has been read up to `stopped_at`; it held `seqs`, and `runs` are what is left to deliver of them."""
        extent = load.extent
        self.window_bytes += sum(map(run_cost, runs))
        if self._newest_first:
            self.window.extendleft(reversed(runs))
            extent.end, extent.stop = load.start, seqs[0]
            if extent.index is not None:
                at = bisect_left(extent.index[0], load.start)
                for column in extent.index:
                    del column[at:]
        else:
            self.window.extend(runs)
            extent.start, extent.first, extent.floor = stopped_at, max(seqs[1], extent.first), seqs[1]
        if extent.start >= extent.end or extent.first >= extent.stop:
            # All of it was read, or what is left of it was dropped before.
            self.extents.remove(extent)

    def relocate(self, source: int, offset: int, first_seq: int, target: int, shift: int) -> None:
        """Frames of `source` from `offset` on are now in `target`."""
        moved: deque[Extent] = deque()
        for extent in self.extents:
            if extent.segment != source or extent.end <= offset:
                moved.append(extent)
                continue
            start = max(extent.start, offset)
            if extent.first < first_seq:
                kept = Extent(source, (extent.start, offset), (extent.first, first_seq), extent.newest_ns)
                kept.floor = extent.floor
                moved.append(kept)
            seqs = (max(extent.first, first_seq), extent.stop)
            there = Extent(target, (start + shift, extent.end + shift), seqs, extent.newest_ns)
            there.floor = max(extent.floor, first_seq)
            moved.append(there)
        self.extents = moved
        for frame in {id(run.frame): run.frame for run in self.window}.values():
            # In memory, but it may have to be found on the disk when it leaves.
            if frame.segment == source and frame.offset >= offset:
                frame.segment, frame.offset = target, frame.offset + shift

    def front(self) -> int | None:
        """The segment of the oldest records that nobody has leased yet; None when it isn't the oldest that go first."""
        if self._newest_first:
            return None
        if self.window:
            return self.window[0].frame.segment
        return self.extents[0].segment if self.extents else 1 << 62

    def compacted(self, number: int, span: Callable[[int, int], tuple[int, int]]) -> None:
        """The frames of a segment are elsewhere in it now, and some of them smaller: `span` says where."""
        extents: deque[Extent] = deque()
        for extent in self.extents:
            if extent.segment != number:
                extents.append(extent)
                continue
            place = span(extent.floor, extent.stop)
            if place[0] < place[1]:
                there = Extent(number, place, (extent.first, extent.stop), extent.newest_ns)
                there.floor = extent.floor
                extents.append(there)
        self.extents = extents
        for frame in {id(run.frame): run.frame for run in self.window}.values():
            # As in `relocate`.
            if frame.segment == number:
                start, end = span(frame.first, frame.first + frame.count)
                frame.offset, frame.stored = start, end - start

    # Records are dropped

    def drop_where(self, wanted: Callable[[Run], bool]) -> list[Run]:
        """Take out the runs in memory that `wanted` says."""
        back = [run for run in self.returned if wanted(run)]
        for run in back:
            self._take_returned(run)
        fresh = [run for run in self.window if wanted(run)]
        if fresh:
            self.window = deque(run for run in self.window if not wanted(run))
            self.window_bytes -= sum(map(run_cost, fresh))
        return back + fresh

    def oldest(self) -> Run | Extent | None:
        """What holds the oldest record that was leased never, or has its payload in memory."""
        run = self.returned.oldest()
        if self.window and (run is None or self.window[0].seq < run.seq):
            run = self.window[0]
        extent = self.extents[0] if self.extents else None
        if run is None or extent is None:
            return run or extent
        return run if run.seq < extent.first else extent

    def cut_oldest(self, run: Run, most: int) -> Run:
        """Take up to `most` records from the beginning of `run`, which is what `oldest` has said."""
        stop = min(run.end, run.seq + most)
        cut, rest = run.part(run.seq, stop), run.part(stop, run.end)
        if self.returned.has(run):
            self._take_returned(run)
            if rest.low < rest.high:
                self.keep(rest)
            return cut
        if rest.low < rest.high:
            self.window[0] = rest
        else:
            self.window.popleft()
        self.window_bytes -= run_cost(cut)
        return cut

    def forget(self, extent: Extent) -> None:
        """An extent whose records are all settled, or can't be read."""
        if extent in self.extents:
            self.extents.remove(extent)

    def forget_segment(self, number: int) -> None:
        """A segment whose records are all settled, some of them perhaps since an earlier run, goes."""
        if any(extent.segment == number for extent in self.extents):
            self.extents = deque(extent for extent in self.extents if extent.segment != number)
