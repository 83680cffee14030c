"""The writing half of the queue: what its one I/O thread does with a round of work. No loop, no lock, no clock.

A round is everything that has gathered while the last one was being written: it becomes one or a few `write` calls
and at most one `fdatasync`. The outcome says frame by frame what came of it.
"""

from __future__ import annotations

import errno
import time
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import acklog, segment
from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.state.frame import OS, Frame

if TYPE_CHECKING:
    from pathlib import Path

    from batchqueue_async.durable.disk.files import Files
    from batchqueue_async.durable.state.ranges import RangeMap, RangeSet

_RETAIN = 32 << 20
_OPEN_HINTS = 8
_NAMES = 100


@dataclass(slots=True)
class HintWrite:
    """What to write beside one segment: entries to append, or a whole new file.

    It is encoded on the writer's thread: for a segment whose records were settled one by one that takes long.

    Attributes:
        records: the segment's.
        entries: what to append; in a new file the records that are lost, and the copies that count no more.
        settled: for a new file, what is settled; None to append.
        attempts: for a new file, how often records were leased; None to leave that out.
    """

    number: int
    marker: bytes
    records: range
    entries: list[acklog.Entry]
    settled: RangeSet | None = None
    attempts: RangeMap | None = None

    @property
    def anew(self) -> bool:
        """Whether it is a whole new file."""
        return self.settled is not None

    def encode(self) -> bytes:
        """The bytes."""
        if self.settled is None:
            return acklog.encode_entries(self.entries, self.records.start, self.marker)
        return acklog.encode_anew(
            self.number, self.marker, self.records, self.settled, lost=self.entries, attempts=self.attempts
        )


@dataclass(slots=True)
class Round:
    """Work for the writer.

    Attributes:
        frames: what to append.
        sync: every frame so far is to be durable at the end.
        stale: those of sealed segments as well, that asked for no sync when they were written.
        sync_hints: what was acknowledged so far is to be durable at the end, as far as that can be.
        shrink: a settled segment to empty: its number, where its frames begin, and its footer.
        swaps: compacted copies that take their segments' places, each after this hint is durable.
        last: seal it, and close every file.
    """

    frames: list[Frame] = field(default_factory=list[Frame])
    now_ns: int = 0
    sync: bool = False
    stale: bool = False
    sync_hints: bool = False
    shrink: tuple[int, int, bytes] | None = None
    last: bool = False
    segment_bytes: int | None = None
    hints: list[HintWrite] = field(default_factory=list[HintWrite])
    swaps: list[HintWrite] = field(default_factory=list[HintWrite])
    deletes: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class Moved:
    """Frames that were written again elsewhere: those of `source` from `offset` on are now in `target`."""

    source: int
    offset: int
    first_seq: int
    target: int
    shift: int


@dataclass(slots=True)
class Outcome:
    """What came of a round: the first `done` frames are safe at their level, the others met `error`.

    `failures` are the errors that were met on the way, those that a fresh segment has made good too. `left_behind` are
    the segments off which frames could not be taken that met `error`, or that are in a later one.
    `hint_sizes` has the bytes of each acknowledgement file that was written anew.
    """

    round: Round
    done: int = 0
    error: Exception | None = None
    failures: list[Exception] = field(default_factory=list[Exception])
    opened: list[fmt.SegmentHeader] = field(default_factory=list[fmt.SegmentHeader])
    closed: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    moved: list[Moved] = field(default_factory=list[Moved])
    proven: tuple[int, int] | None = None
    left_behind: tuple[int, ...] = ()
    dirty: bool = False
    hints_dirty: bool = False
    synced: bool = False
    sync_errors: int = 0
    hint_errors: list[int] = field(default_factory=list[int])
    hint_sizes: dict[int, int] = field(default_factory=dict[int, int])
    kept: list[int] = field(default_factory=list[int])
    shrunk: int | None = None
    swapped: list[int] = field(default_factory=list[int])
    free_bytes: int | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])


class Writer:
    """Owns the active segment and the acknowledgement files. Used by one thread at a time.

    There is one way to fail. Whatever goes wrong while frames are written, synced or sealed: the active segment is
    abandoned, every frame that may not be durable yet is written to a fresh one, and what is then confirmed is what the
    fresh one's fdatasync has covered. Fails that too, the round's frames fail, and nothing else.

    Invariants: `_retained` holds, in order, the frames that a caller was promised a sync for and that none has covered
    yet, with all that follow them; they are all in `_source`. `_source` is the active segment, or, after a failure that
    could not be made good, the abandoned one: then `_active` is None and the next round begins with a fresh segment.
    `_placed` counts the frames of the round that are in segments sealed since it began.
    """

    def __init__(
        self,
        files: Files,
        directory: Path,
        *,
        queue_id: bytes,
        number: int,
        codec: int,
        segment_bytes: int,
        buffer: int,
        watch_free: bool,
        lock: int,
    ) -> None:
        self._files = files
        self._directory = directory
        self._queue_id = queue_id
        self._number = number
        self._codec = codec
        self._segment_bytes = segment_bytes
        self._buffer = buffer
        self._watch_free = watch_free
        self._lock = lock
        self._active: segment.SegmentWriter | None = None
        self._source: segment.SegmentWriter | None = None
        self._retained: list[tuple[Frame, list[bytes]]] = []
        self._retained_bytes = 0
        self._placed = 0
        # Sealed segments of which no sync has covered all frames: nobody asked for it.
        self._unsynced: list[int] = []
        self._hints: dict[int, int] = {}
        # Acknowledgement files that were written since they were last synced.
        self._dirty_hints: set[int] = set()
        self._outcome = Outcome(Round())

    def run(self, work: Round) -> Outcome:
        """Do a round. What failed is in the outcome, of whatever class it is."""
        self._outcome = Outcome(work)
        self._placed = 0
        return self._carry_out(work) if self._is_mine() else self._refuse_all(work)

    def _carry_out(self, work: Round) -> Outcome:
        outcome = self._outcome
        if work.segment_bytes is not None:
            self._segment_bytes = work.segment_bytes
        self._delete(work.deletes)
        if work.shrink is not None:
            self._shrink(*work.shrink)
        clock = time.perf_counter()
        try:
            self._round(work)
        except Exception as error:  # noqa: BLE001 - an error of any class leaves each frame confirmed or failed
            self._start_anew(work, error)
        if work.stale or work.last:
            self._sync_sealed()
        lap = time.perf_counter()
        outcome.seconds["write"] = lap - clock - outcome.seconds.get("sync", 0.0)
        for hint in work.hints:
            self._write_hint(hint)
        for hint in work.swaps:
            self._swap(hint)
        if work.sync_hints or work.last:
            self._sync_hints()
        outcome.hints_dirty = bool(self._dirty_hints)
        outcome.seconds["hints"] = time.perf_counter() - lap
        if self._watch_free or work.hints or work.swaps or outcome.opened or outcome.error is not None:
            # For the statistics alone, often enough with the hints of a busy queue.
            with suppress(Exception):
                outcome.free_bytes = self._files.free_bytes(self._directory)
        active = self._active
        outcome.dirty = bool(self._retained or self._unsynced or (active is not None and active.unsynced))
        if work.last:
            self.close()
        return outcome

    def _is_mine(self) -> bool:
        """Whether the directory is still the locked one: in one that has taken its name, others own every file."""
        try:
            return self._files.is_locked(self._lock, self._directory)
        except Exception:  # noqa: BLE001 - a disk that is ill shows it in the calls that follow
            return True

    def _refuse_all(self, work: Round) -> Outcome:
        outcome = self._outcome
        outcome.error = OSError(errno.ENOENT, "the directory was deleted, moved or replaced", str(self._directory))
        outcome.kept = list(work.deletes)
        outcome.hint_errors = [hint.number for hint in work.hints]
        if work.last:
            self.close()
        return outcome

    def close(self) -> None:
        """Let go of every descriptor, as it is."""
        if self._active is not None:
            self._active.abandon()
            self._active = None
        for number in list(self._hints):
            self._forget_hint(number)

    # Frames

    def _round(self, work: Round) -> None:
        if self._retained and self._active is None and (work.frames or work.sync or work.last):
            raise OSError(errno.EIO, "an earlier write has failed, and could not be made good yet")
        self._append_all(work.frames)
        active = self._active
        if active is not None and (work.frames or work.sync) and not self._files.linked(active.descriptor):
            raise OSError(errno.ENOENT, "the segment was deleted under its owner", str(active.path))
        clock = time.perf_counter()
        if work.sync:
            self._sync()
            self._prove(work)
        if work.last:
            self._seal(sync=True)
        self._outcome.done = len(work.frames)
        self._outcome.synced = work.sync
        self._outcome.seconds["sync"] = time.perf_counter() - clock

    def _append_all(self, frames: list[Frame]) -> None:
        at = 0
        while at < len(frames):
            active = self._room_for(frames, at)
            stop = at
            parts: list[bytes] = []
            size = 0
            while stop < len(frames):
                frame = frames[stop]
                whole = fmt.frame_size(frame.count, frame.raw)
                full = active.data_bytes + size + whole > self._segment_bytes
                if stop > at and (size + whole > self._buffer or full):
                    break
                offset = active.offset + size
                pieces, stored = self._encode(frame, frame.payloads or [], active, offset)
                frame.segment, frame.offset, frame.stored = active.number, offset, stored
                size += stored
                parts += pieces
                stop += 1
            self._append(active, frames[at:stop], parts, size)
            at = stop

    def _encode(
        self, frame: Frame, payloads: list[bytes], target: segment.SegmentWriter, offset: int
    ) -> tuple[list[bytes], int]:
        """The pieces of a frame, or of as many as it takes, and their bytes."""
        frame.parts = []
        whole = fmt.frame_size(len(payloads), frame.raw)
        if len(payloads) == 1 or whole <= fmt.FRAME_BYTES:
            return self._encode_one(frame, payloads, target, (frame.first, offset, 0), whole)
        pieces: list[bytes] = []
        sizes, table = fmt.encode_table(payloads)
        ends = list(accumulate(sizes))
        at = before = total = 0

        def size_up_to(last: int) -> int:
            return fmt.FRAME_HEADER + fmt.TABLE_ROW * (last + 1 - at) + ends[last] - before

        while at < len(payloads):
            stop = at + max(1, bisect_right(range(at, len(payloads)), fmt.FRAME_BYTES, key=size_up_to))
            flags = 0
            if frame.kind == fmt.ATOMIC:
                flags = (fmt.CONTINUED if at else 0) | (fmt.MORE if stop < len(payloads) else 0)
            place = (frame.first + at, offset + total, flags)
            frame.parts.append(place[:2])
            rows = table[fmt.TABLE_ROW * at : fmt.TABLE_ROW * stop]
            whole = size_up_to(stop - 1)
            part, size = self._encode_one(frame, payloads[at:stop], target, place, whole, table=rows)
            pieces += part
            total += size
            at, before = stop, ends[stop - 1]
        return pieces, total

    def _encode_one(
        self,
        frame: Frame,
        payloads: list[bytes],
        target: segment.SegmentWriter,
        place: tuple[int, int, int],
        plain_size: int,
        *,
        table: bytes | None = None,
    ) -> tuple[list[bytes], int]:
        pieces = fmt.encode_frame(
            payloads,
            kind=frame.kind,
            codec=self._codec,
            first_seq=place[0],
            enqueued_ns=frame.enqueued_ns,
            synced_seq=target.synced_seq,
            marker=target.marker,
            offset=place[1],
            flags=place[2],
            table=table,
            raw_size=plain_size - fmt.FRAME_HEADER - fmt.TABLE_ROW * len(payloads),
        )
        return pieces, sum(map(len, pieces)) if self._codec else plain_size

    def _append(self, active: segment.SegmentWriter, frames: list[Frame], pieces: list[bytes], size: int) -> None:
        active.append(pieces, size, frames)
        for frame in frames:
            if self._retained or frame.rank > OS:
                self._retained.append((frame, frame.payloads or []))
                self._retained_bytes += frame.raw
                self._source = active
                active.wants_sync = True
            elif frame.count > 1 and frame.stored > fmt.FRAME_BYTES:
                # It is in several frames: only what was synced before it was sealed is known to have them all.
                active.wants_sync = True
        if self._retained_bytes > _RETAIN and not self._outcome.round.sync:
            self._sync()

    def _room_for(self, frames: list[Frame], at: int) -> segment.SegmentWriter:
        frame, active = frames[at], self._active
        full = active is not None and active.data_bytes + fmt.frame_size(frame.count, frame.raw) > self._segment_bytes
        if active is not None and active.records and full:
            self._seal(sync=active.wants_sync)
            self._placed = at
        return self._active or self._open(frame.first)

    def _open(self, first_seq: int) -> segment.SegmentWriter:
        for _ in range(_NAMES):
            number, self._number = self._number, self._number + 1
            with suppress(FileExistsError):
                # A name that somebody else has taken is left alone: the next one will do.
                opened = segment.SegmentWriter(
                    self._files,
                    self._directory,
                    queue_id=self._queue_id,
                    number=number,
                    first_seq=first_seq,
                    now_ns=self._outcome.round.now_ns,
                )
                self._active = opened
                self._outcome.opened.append(opened.header)
                return opened
        raise OSError(errno.EEXIST, f"the names of {_NAMES} segments in a row are taken", str(self._directory))

    def _seal(self, *, sync: bool) -> None:
        """Close the active segment with its footer; with `sync`, everything in it is durable first."""
        active = self._active
        if active is None:
            return
        if sync:
            self._sync()
        elif active.unsynced:
            self._unsynced.append(active.number)
        offset = active.offset
        size = active.seal()
        self._active = None
        self._outcome.closed.append((active.number, offset, size))

    # Syncing

    def _prove(self, work: Round) -> None:
        """What an atomic put of this round needs to be whole after a crash, however damaged it then is."""
        if self._active is not None and any(frame.kind == fmt.ATOMIC for frame in work.frames):
            self._outcome.proven = (self._active.number, self._active.synced_seq)

    def _sync(self) -> None:
        if self._active is not None and self._active.unsynced:
            try:
                self._active.sync()
            except Exception:
                self._outcome.sync_errors += 1
                raise
        self._retained = []
        self._retained_bytes = 0
        self._source = None

    def _sync_sealed(self) -> None:
        left: list[int] = []
        for number in self._unsynced:
            try:
                descriptor = self._files.open_append(self._directory / segment.segment_name(number))
                try:
                    self._files.sync(descriptor)
                finally:
                    self._files.close(descriptor)
            except FileNotFoundError:
                continue  # consumed by now
            except Exception as error:  # noqa: BLE001 - of any class, it leaves this segment unsynced, and the others go on
                self._outcome.failures.append(error)
                self._outcome.sync_errors += 1
                left.append(number)
        # Tried once: what the page cache has dropped after a failed sync, no second one brings back.
        self._unsynced = []

    # The one way to fail

    def _start_anew(self, work: Round, error: Exception) -> None:
        outcome = self._outcome
        outcome.failures.append(error)
        ours = {id(frame) for frame in work.frames}
        earlier = [entry for entry in self._retained if id(entry[0]) not in ours]
        again = earlier + [(frame, frame.payloads or []) for frame in work.frames[self._placed :]]
        old = self._active or self._source
        start = self._abandon(again, earlier, work)
        if not again:
            # Nothing was on its way: the segment alone was to be sealed or synced.
            self._source, self._retained, self._retained_bytes = None, [], 0
            outcome.done = len(work.frames)
            if work.last:
                outcome.error = error
            return
        fresh: segment.SegmentWriter | None = None
        count = len(outcome.opened)
        try:
            fresh = self._open(again[0][0].first)
            shift = fresh.offset - start
            for frame, payloads in again:
                pieces, stored = self._encode(frame, payloads, fresh, fresh.offset)
                if id(frame) in ours:
                    frame.segment, frame.offset, frame.stored = fresh.number, fresh.offset, stored
                fresh.append(pieces, stored, [frame])
            fresh.sync()
        except Exception as second:  # noqa: BLE001 - an error of any class fails the frames, and nothing else
            outcome.failures.append(second)
            self._give_up(fresh, count, earlier, old)
            outcome.error = second
            return
        if earlier and old is not None:
            try:
                self._files.truncate(old.path, start)
            except Exception:  # noqa: BLE001 - of two copies the specification says which is right: that in the later segment
                outcome.left_behind += (old.number,)
            outcome.moved.append(Moved(old.number, start, again[0][0].first, fresh.number, shift))
        self._source, self._retained, self._retained_bytes = None, [], 0
        outcome.done = len(work.frames)
        outcome.synced = True
        self._prove(work)
        if work.last:
            with suppress(Exception):
                # Without a footer the next opening reads it whole: slower, and nothing else.
                self._seal(sync=False)

    def _abandon(
        self, again: list[tuple[Frame, list[bytes]]], earlier: list[tuple[Frame, list[bytes]]], work: Round
    ) -> int:
        """Leave the active segment without a footer; where in it the frames begin that are written again."""
        old, self._active = self._active, None
        if old is None:
            return again[0][0].offset if earlier else 0
        old.abandon()
        keep = old.offset
        if earlier:
            keep = earlier[0][0].offset
        else:
            written = [frame.offset for frame in work.frames[self._placed :] if frame.segment == old.number]
            keep = min([keep, *written])
        cut = keep
        if earlier:
            # They stay where they are until they are durable elsewhere.
            last = earlier[-1][0]
            cut = last.offset + last.stored
        size = cut
        try:
            self._files.truncate(old.path, cut)
        except Exception:  # noqa: BLE001 - whatever the disk says, the frames then stay in the file, and are not confirmed
            self._leave_behind(old.number, earlier)
            with suppress(Exception):
                size = max(size, self._files.size(old.path))
        self._outcome.closed.append((old.number, cut, size))
        return keep

    def _leave_behind(self, number: int, earlier: list[tuple[Frame, list[bytes]]]) -> None:
        """Frames of this round stay in a segment where they were written. They are not confirmed.

        Their numbers are given to nothing else: what took some of them would leave a part of an atomic frame.
        """
        if self._outcome.round.frames and not earlier:
            self._outcome.left_behind += (number,)

    def _give_up(
        self,
        fresh: segment.SegmentWriter | None,
        opened: int,
        earlier: list[tuple[Frame, list[bytes]]],
        old: segment.SegmentWriter | None,
    ) -> None:
        """The frames could not be made durable anywhere: the round's own fail, older ones stay and are tried again."""
        outcome = self._outcome
        if fresh is not None:
            self._active = None
            fresh.abandon()
            try:
                self._files.unlink(fresh.path)
            except Exception:  # noqa: BLE001 - whatever the disk says, the frames then stay in the file, and are not confirmed
                self._leave_behind(fresh.number, earlier)
                # It has no record that counts, and is deleted when that is possible.
                size = fresh.offset
                with suppress(Exception):
                    size = max(size, self._files.size(fresh.path))
                outcome.closed.append((fresh.number, fmt.DATA_START, size))
            else:
                del outcome.opened[opened:]
        self._retained = earlier
        self._retained_bytes = sum(frame.raw for frame, _ in earlier)
        self._source = old if earlier else None
        outcome.done = self._placed

    # Hints and deletions

    def _write_hint(self, hint: HintWrite) -> None:
        path = self._directory / segment.hint_name(hint.number)
        try:
            data = hint.encode()
            if hint.anew:
                self._forget_hint(hint.number)
                # Durable by itself, but for its name.
                self._files.replace(path, data)
                self._dirty_hints.add(hint.number)
                self._outcome.hint_sizes[hint.number] = len(data)
                return
            descriptor = self._hints.get(hint.number)
            if descriptor is None:
                descriptor, data = self._open_hint(path, hint, data)
            self._dirty_hints.add(hint.number)
            done = self._files.write(descriptor, data)
            if done < len(data):
                # A part of an entry would shift all that follow: the next round writes the file anew.
                self._outcome.hint_errors.append(hint.number)
        except Exception:  # noqa: BLE001 - an error of any class: the next round writes the file anew
            self._forget_hint(hint.number)
            self._outcome.hint_errors.append(hint.number)

    def _sync_hints(self) -> None:
        """Make the acknowledgement files durable. What fails is lost at a power cut, and delivered again."""
        dirty, self._dirty_hints = self._dirty_hints, set()
        for number in sorted(dirty):
            with suppress(Exception):
                descriptor = self._hints.get(number)
                if descriptor is not None:
                    self._files.sync(descriptor)
                    continue
                descriptor = self._files.open_append(self._directory / segment.hint_name(number))
                try:
                    self._files.sync(descriptor)
                finally:
                    self._files.close(descriptor)
        if dirty:
            with suppress(Exception):
                self._files.sync_directory(self._directory)

    def _open_hint(self, path: Path, hint: HintWrite, data: bytes) -> tuple[int, bytes]:
        while len(self._hints) >= _OPEN_HINTS:
            self._forget_hint(next(iter(self._hints)))
        try:
            descriptor = self._files.open_append(path)
        except FileNotFoundError:
            descriptor = self._files.create(path)
            data = acklog.encode_header(hint.number, hint.marker) + data
        self._hints[hint.number] = descriptor
        return descriptor, data

    def _forget_hint(self, number: int) -> None:
        descriptor = self._hints.pop(number, None)
        if descriptor is not None:
            with suppress(Exception):
                self._files.close(descriptor)

    def _shrink(self, number: int, start: int, footer: bytes) -> None:
        """Give back the room of a segment whose records are all settled, without needing any for a new file."""
        path = self._directory / segment.segment_name(number)
        if self._active is not None and self._active.number == number:
            self._active.abandon()
            self._active = None
        if self._source is not None and self._source.number == number:
            self._source, self._retained, self._retained_bytes = None, [], 0
        with suppress(Exception):
            # Without the footer the next number is found by SEQ_SKIP; without the cut it is tried again.
            self._files.truncate(path, start)
            self._outcome.shrunk = number
            self._files.append(path, footer)

    def _swap(self, hint: HintWrite) -> None:
        """Put a compacted copy in its segment's place."""
        path = self._directory / segment.segment_name(hint.number)
        copy = self._directory / segment.rewrite_name(hint.number)
        self._forget_hint(hint.number)
        try:
            # What the copy leaves out is settled: that is known for certain before anybody can see the copy.
            data = hint.encode()
            self._files.replace(self._directory / segment.hint_name(hint.number), data)
            self._outcome.hint_sizes[hint.number] = len(data)
            self._files.sync_directory(self._directory)
            self._files.rename(copy, path)
        except Exception as error:  # noqa: BLE001 - an error of any class leaves the segment as it was
            self._outcome.failures.append(error)
            return
        self._outcome.swapped.append(hint.number)
        with suppress(Exception):
            # Not durable, the old file may come back after a crash: it holds the same records.
            self._files.sync_directory(self._directory)

    def _delete(self, deletes: list[int]) -> None:
        if not deletes:
            return
        for number in deletes:
            self._forget_hint(number)
            self._dirty_hints.discard(number)
            try:
                self._files.unlink(self._directory / segment.segment_name(number))
                self._files.unlink(self._directory / segment.hint_name(number))
            except Exception:  # noqa: BLE001 - an error of any class: its deletion is tried again
                self._outcome.kept.append(number)
        with suppress(Exception):
            # Not durable, it may come back after a crash: with records that are then delivered twice.
            self._files.sync_directory(self._directory)
