"""The writing half of the queue: what its one I/O thread does with a round of work. No loop, no lock, no clock.

A round is everything that has gathered while the last one was being written: it becomes one or a few `write` calls
and at most one `fdatasync`. The outcome says frame by frame what came of it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import acklog, segment
from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.state.frame import OS, Frame

if TYPE_CHECKING:
    from pathlib import Path

    from batchqueue_async.durable.disk.files import Files

_RETAIN = 32 << 20
_OPEN_HINTS = 8


@dataclass(slots=True)
class HintWrite:
    """What to write beside one segment: entries to append, or a whole new file."""

    number: int
    marker: bytes
    data: bytes
    anew: bool


@dataclass(slots=True)
class Round:
    """Work for the writer. `sync` asks for an fdatasync; `shrink` names a settled segment to empty; `last` closes."""

    frames: list[Frame] = field(default_factory=list[Frame])
    now_ns: int = 0
    sync: bool = False
    shrink: tuple[int, bytes] | None = None
    last: bool = False
    hints: list[HintWrite] = field(default_factory=list[HintWrite])
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
    """What came of a round: the first `done` frames are safe at their level, the others met `error`."""

    round: Round
    done: int = 0
    error: OSError | None = None
    opened: list[tuple[int, bytes, int]] = field(default_factory=list[tuple[int, bytes, int]])
    closed: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    moved: list[Moved] = field(default_factory=list[Moved])
    proven: tuple[int, int] | None = None
    dirty: bool = False
    synced: bool = False
    sync_errors: int = 0
    hint_errors: list[int] = field(default_factory=list[int])
    kept: list[int] = field(default_factory=list[int])
    shrunk: int | None = None
    free_bytes: int | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])


class Writer:
    """Owns the active segment and the hint files. Used by one thread at a time."""

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
    ) -> None:
        self._files = files
        self._directory = directory
        self._queue_id = queue_id
        self._number = number
        self._codec = codec
        self._segment_bytes = segment_bytes
        self._buffer = buffer
        self._watch_free = watch_free
        self._active: segment.SegmentWriter | None = None
        self._retained: list[tuple[Frame, list[bytes]]] = []
        self._retained_bytes = 0
        self._hints: dict[int, int] = {}
        self._outcome = Outcome(Round())

    def run(self, work: Round) -> Outcome:
        """Do a round. Never raises OSError: what failed is in the outcome."""
        self._outcome = outcome = Outcome(work)
        self._delete(work.deletes)
        if work.shrink is not None:
            self._shrink(*work.shrink)
        clock = time.perf_counter()
        try:
            self._write(work)
        except OSError as error:
            outcome.error = error
        lap = time.perf_counter()
        outcome.seconds["write"] = lap - clock
        try:
            if work.sync:
                self._sync_round(work)
            if work.last and self._active is not None:
                active, self._active = self._active, None
                active.wants_sync = True
                self._finish(active)
        except OSError as error:
            outcome.error = error
        clock = time.perf_counter()
        outcome.seconds["sync"] = clock - lap
        for hint in work.hints:
            self._write_hint(hint)
        outcome.seconds["hints"] = time.perf_counter() - clock
        if self._watch_free or work.hints or outcome.opened or outcome.error is not None:
            # For the statistics alone, often enough with the hints of a busy queue.
            with suppress(OSError):
                outcome.free_bytes = self._files.free_bytes(self._directory)
        outcome.dirty = bool(self._active is not None and self._active.synced_seq < self._active.next_seq)
        if work.last:
            self.close()
        return outcome

    def close(self) -> None:
        """Let go of every descriptor, as it is."""
        if self._active is not None:
            self._active.abandon()
            self._active = None
        for descriptor in self._hints.values():
            with suppress(OSError):
                self._files.close(descriptor)
        self._hints.clear()

    # Frames

    def _write(self, work: Round) -> None:
        frames = work.frames
        at = 0
        while at < len(frames):
            active = self._room_for(frames[at])
            stop = at
            parts: list[bytes] = []
            size = 0
            while stop < len(frames):
                frame = frames[stop]
                whole = fmt.frame_size(frame.count, frame.raw)
                if stop > at and (size + whole > self._buffer or active.offset + size + whole > self._segment_bytes):
                    break
                offset = active.offset + size
                pieces = self._encode(frame, frame.payloads or [], active, offset)
                # Without a codec that is known; with one it is three pieces at most, or the sum of all.
                stored = sum(map(len, pieces)) if self._codec else whole
                frame.segment, frame.offset, frame.stored = active.number, offset, stored
                size += stored
                parts += pieces
                stop += 1
            self._append(active, frames[at:stop], parts, size)
            at = self._outcome.done = stop

    def _encode(self, frame: Frame, payloads: list[bytes], target: segment.SegmentWriter, offset: int) -> list[bytes]:
        return fmt.encode_frame(
            payloads,
            kind=frame.kind,
            codec=self._codec,
            first_seq=frame.first,
            enqueued_ns=frame.enqueued_ns,
            synced_seq=target.synced_seq,
            marker=target.marker,
            offset=offset,
        )

    def _append(self, active: segment.SegmentWriter, frames: list[Frame], pieces: list[bytes], size: int) -> None:
        try:
            active.append(pieces, size, frames)
        except OSError:
            try:
                active.cut()
            except OSError:
                # The torn bytes can't be taken back: nothing more is appended behind them.
                self._leave(active)
            raise
        for frame in frames:
            if self._retained or frame.rank > OS:
                self._retained.append((frame, frame.payloads or []))
                self._retained_bytes += frame.raw
                active.wants_sync = True
        if self._retained_bytes > _RETAIN and not self._outcome.round.sync:
            self._sync()

    def _room_for(self, frame: Frame) -> segment.SegmentWriter:
        active = self._active
        if active is None:
            return self._open(frame.first)
        if active.records and active.offset + fmt.frame_size(frame.count, frame.raw) > self._segment_bytes:
            fresh = self._open(frame.first)
            self._finish(active)
            # What was not durable in the old segment may have had to move to a new one.
            return self._active or fresh
        return active

    def _open(self, first_seq: int) -> segment.SegmentWriter:
        number, self._number = self._number, self._number + 1
        opened = segment.SegmentWriter(
            self._files,
            self._directory,
            queue_id=self._queue_id,
            number=number,
            first_seq=first_seq,
            now_ns=self._outcome.round.now_ns,
        )
        self._active = opened
        self._outcome.opened.append((number, opened.marker, first_seq))
        return opened

    def _finish(self, old: segment.SegmentWriter) -> None:
        """Sync (when asked for), seal and close a segment that is no longer the active one."""
        if old.wants_sync:
            try:
                self._sync_segment(old)
            finally:
                moved = old.descriptor < 0
            if moved:
                return
        size = old.offset
        with suppress(OSError):
            # Without a footer, recovery reads it whole: slower, and nothing else.
            size = old.seal()
        self._outcome.closed.append((old.number, old.offset, size))

    def _leave(self, old: segment.SegmentWriter) -> None:
        """Close a segment without a footer."""
        old.abandon()
        size = old.offset
        with suppress(OSError):
            size = self._files.size(old.path)
        self._outcome.closed.append((old.number, old.offset, size))
        if self._active is old:
            self._active = None

    # Syncing

    def _sync_round(self, work: Round) -> None:
        self._sync()
        outcome = self._outcome
        outcome.synced = True
        atomic = any(frame.kind == fmt.ATOMIC for frame in work.frames[: outcome.done])
        if atomic and self._active is not None:
            outcome.proven = (self._active.number, self._active.synced_seq)

    def _sync(self) -> None:
        if self._active is not None and self._active.synced_seq < self._active.next_seq:
            self._sync_segment(self._active)

    def _sync_segment(self, target: segment.SegmentWriter) -> None:
        """Sync; after a failure, never that descriptor again: what was not durable goes to another segment."""
        try:
            target.sync()
        except OSError:
            self._outcome.sync_errors += 1
            self._leave(target)
            self._rewrite(target)
        self._retained = []
        self._retained_bytes = 0

    def _rewrite(self, old: segment.SegmentWriter) -> None:
        # Frames that asked for no sync, before the first that did, stay where they are.
        retained = self._retained
        if not retained:
            return
        offset, first_seq = retained[0][0].offset, retained[0][0].first
        if self._active is not None:
            # A segment that was just opened to go on in: its numbers begin too late for what comes now.
            self._leave(self._active)
        fresh: segment.SegmentWriter | None = None
        try:
            fresh = self._open(first_seq)
            shift = fresh.offset - offset
            for frame, payloads in retained:
                pieces = self._encode(frame, payloads, fresh, fresh.offset)
                fresh.append(pieces, sum(map(len, pieces)), [frame])
            fresh.sync()
        except OSError:
            self._give_up(old, fresh)
            raise
        with suppress(OSError):
            # If this fails, the specification says which copy is right: the one with the higher number.
            self._files.truncate(old.path, offset)
        self._outcome.moved.append(Moved(old.number, offset, first_seq, fresh.number, shift))

    def _give_up(self, old: segment.SegmentWriter, fresh: segment.SegmentWriter | None) -> None:
        """Neither the segment nor a copy could be made durable: the round's own frames fail, older ones stay."""
        if fresh is not None:
            self._leave(fresh)
            with suppress(OSError):
                self._files.unlink(fresh.path)
        outcome = self._outcome
        ours = [frame for frame in outcome.round.frames if frame.segment == old.number]
        if ours:
            with suppress(OSError):
                self._files.truncate(old.path, ours[0].offset)
        self._retained = []
        self._retained_bytes = 0
        outcome.done = 0

    # Hints and deletions

    def _write_hint(self, hint: HintWrite) -> None:
        path = self._directory / segment.hint_name(hint.number)
        try:
            if hint.anew:
                self._forget_hint(hint.number)
                self._files.replace(path, hint.data)
                return
            descriptor = self._hints.get(hint.number)
            data = hint.data
            if descriptor is None:
                descriptor, data = self._open_hint(path, hint)
            done = self._files.write(descriptor, data)
            if done < len(data):
                # A part of an entry would shift all that follow: the next round writes the file anew.
                self._outcome.hint_errors.append(hint.number)
        except OSError:
            self._forget_hint(hint.number)
            self._outcome.hint_errors.append(hint.number)

    def _open_hint(self, path: Path, hint: HintWrite) -> tuple[int, bytes]:
        while len(self._hints) >= _OPEN_HINTS:
            self._forget_hint(next(iter(self._hints)))
        data = hint.data
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
            with suppress(OSError):
                self._files.close(descriptor)

    def _shrink(self, number: int, footer: bytes) -> None:
        """Give back the room of a segment whose records are all settled, without needing any for a new file."""
        path = self._directory / segment.segment_name(number)
        if self._active is not None and self._active.number == number:
            self._active.abandon()
            self._active = None
            self._retained = []
            self._retained_bytes = 0
        with suppress(OSError):
            # Without the footer the next number is found by SEQ_SKIP; without the cut it is tried again.
            self._files.truncate(path, fmt.DATA_START)
            self._outcome.shrunk = number
            self._files.append(path, footer)

    def _delete(self, deletes: list[int]) -> None:
        if not deletes:
            return
        for number in deletes:
            self._forget_hint(number)
            try:
                self._files.unlink(self._directory / segment.segment_name(number))
                self._files.unlink(self._directory / segment.hint_name(number))
            except OSError:
                self._outcome.kept.append(number)
        with suppress(OSError):
            # Not durable, it may come back after a crash: with records that are then delivered twice.
            self._files.sync_directory(self._directory)
