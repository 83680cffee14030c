"""Segments as files: their names, walking through their frames, and appending to one.

The reading half is used by recovery, by the loader behind `lease`, and by the inspecting commands; it allocates no
more than a chunk and the one frame whose checked header asks for more.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.durable.disk import format as fmt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batchqueue_async.durable.disk.files import Files
    from batchqueue_async.durable.state.frame import Frame

CHUNK = 1 << 20
_NAME = re.compile(r"seg-([0-9]{12,19})\.bqs")
_HINT_NAME = re.compile(r"seg-([0-9]{12,19})\.ack")


def segment_name(number: int) -> str:
    """The file name of segment `number`."""
    return f"seg-{number:012d}.bqs"


def hint_name(number: int) -> str:
    """The file name of its hint."""
    return f"seg-{number:012d}.ack"


def numbers(names: list[str], *, hints: bool = False) -> list[int]:
    """The segment numbers (or those of the hints) among file names, rising; other names are not ours."""
    pattern = _HINT_NAME if hints else _NAME
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))


class Found(NamedTuple):
    """A frame with a valid header; `decoded` is None when its table or packed body is damaged, or wasn't asked for."""

    offset: int
    header: fmt.FrameHeader
    decoded: fmt.DecodedFrame | None

    @property
    def end(self) -> int:
        """Where the next frame begins."""
        return self.offset + self.header.size


class Gap(NamedTuple):
    """Bytes that are no frame."""

    offset: int
    end: int


def read_header(files: Files, descriptor: int) -> fmt.SegmentHeader | None:
    """The header of an open segment."""
    return fmt.decode_segment_header(files.read(descriptor, fmt.DATA_START, 0))


def read_footer(files: Files, descriptor: int, size: int, marker: bytes) -> fmt.SegmentFooter | None:
    """The footer of an open segment of this size, or None while it isn't sealed."""
    offset = size - fmt.FOOTER
    if offset < fmt.DATA_START:
        return None
    return fmt.decode_footer(files.read(descriptor, fmt.FOOTER, offset), marker, offset)


class Walk:
    """The frames of an open segment between two offsets, resynchronising after damage.

    Sequence numbers below `next_seq`, which rises with every frame, are taken for leftovers and skipped. `end` comes
    down when the file turns out to be shorter.
    """

    def __init__(
        self,
        files: Files,
        descriptor: int,
        marker: bytes,
        *,
        start: int,
        end: int,
        next_seq: int = 0,
        bodies: bool = True,
    ) -> None:
        self._files = files
        self._descriptor = descriptor
        self._marker = marker
        self.end = end
        self._bodies = bodies
        self._base = start
        self._buffer = b""
        self.position = start
        self.next_seq = next_seq

    def __iter__(self) -> Iterator[Found | Gap]:
        gap: int | None = None
        while self.position < self.end:
            header = self._header(self.position)
            if header is None:
                gap = self.position if gap is None else gap
                self.position = self._search(self.position + 1)
                continue
            found = Found(self.position, header, self._decode(self.position, header))
            if found.end > self.end:
                # It was cut between the header and the body.
                gap = self.position if gap is None else gap
                break
            if gap is not None:
                yield Gap(gap, self.position)
                gap = None
            self.position = found.end
            self.next_seq = header.first_seq + header.records
            yield found
        if gap is not None and gap < self.end:
            yield Gap(gap, self.end)

    def _header(self, position: int) -> fmt.FrameHeader | None:
        self._have(position, fmt.FRAME_HEADER)
        header = fmt.decode_frame_header(self._buffer, position - self._base, self._marker, position)
        if header is None or header.first_seq < self.next_seq or position + header.size > self.end:
            return None
        return header

    def _decode(self, position: int, header: fmt.FrameHeader) -> fmt.DecodedFrame | None:
        if not self._bodies:
            return None
        self._have(position, header.size)
        start = position - self._base + fmt.FRAME_HEADER
        body = memoryview(self._buffer)[start : position - self._base + header.size]
        return fmt.decode_frame_body(header, body)

    def _search(self, position: int) -> int:
        while position < self.end:
            self._have(position, fmt.FRAME_HEADER)
            at = self._buffer.find(self._marker, position - self._base)
            if at >= 0:
                return self._base + at
            # The marker may straddle two chunks: keep its last bytes.
            position = max(position + 1, self._base + len(self._buffer) - len(self._marker) + 1)
        return self.end

    def _have(self, position: int, size: int) -> None:
        loaded = self._base + len(self._buffer)
        if position < self._base or loaded < min(position + size, self.end):
            self._load(position, size)

    def _load(self, position: int, size: int) -> None:
        wanted = min(max(size, CHUNK), self.end - position)
        self._buffer = self._files.read(self._descriptor, wanted, position)
        self._base = position
        if len(self._buffer) < wanted:
            # The file is shorter than it was: its owner has cut it meanwhile. There is nothing to search beyond.
            self.end = position + len(self._buffer)


class SegmentWriter:
    """The one segment that is being appended to. Every method may raise OSError; the caller decides what then."""

    def __init__(
        self, files: Files, directory: Path, *, queue_id: bytes, number: int, first_seq: int, now_ns: int
    ) -> None:
        self._files = files
        self.number = number
        self.path = directory / segment_name(number)
        self.marker = os.urandom(8)
        self.first_seq = self.next_seq = self.synced_seq = first_seq
        self.records = self.frames = 0
        self.oldest_ns = self.newest_ns = now_ns
        self.offset = fmt.DATA_START
        self.wants_sync = False
        header = fmt.SegmentHeader(queue_id, number, first_seq, self.marker, now_ns)
        self.descriptor = files.create(self.path)
        try:
            self._write([fmt.encode_segment_header(header)], fmt.DATA_START)
            # The header keeps the sequence numbers when all older segments are deleted: it has to be there before that.
            files.sync(self.descriptor)
            files.sync_directory(directory)
        except OSError:
            self.abandon()
            files.unlink(self.path)
            raise

    def append(self, pieces: list[bytes], size: int, frames: list[Frame]) -> None:
        """Append whole frames, which come to `size` bytes in these pieces."""
        self._write(pieces, size)
        last = frames[-1]
        times = (frames[0].enqueued_ns, last.enqueued_ns)
        if not self.records:
            self.oldest_ns, self.newest_ns = times
        self.oldest_ns = min(self.oldest_ns, times[0])
        self.newest_ns = max(self.newest_ns, times[1])
        self.offset += size
        self.next_seq = last.first + last.count
        self.records += sum(frame.count for frame in frames)
        self.frames += len(frames)

    def cut(self) -> None:
        """Take back what a failed write has left behind the last whole frame."""
        self._files.truncate(self.path, self.offset)

    def sync(self) -> None:
        """Make all frames so far durable. After an OSError the descriptor must not be used again: `abandon`."""
        self._files.sync(self.descriptor)
        self.synced_seq = self.next_seq
        self.wants_sync = False

    def seal(self) -> int:
        """Write the footer and close; the file's size."""
        values = (self.number, self.first_seq, self.next_seq, self.records, self.frames, self.oldest_ns, self.newest_ns)
        footer = fmt.SegmentFooter(*values, data_end=self.offset, synced=self.synced_seq == self.next_seq)
        try:
            self._write([fmt.encode_footer(footer, self.marker)], fmt.FOOTER)
        finally:
            self.abandon()
        return self.offset + fmt.FOOTER

    def abandon(self) -> None:
        """Close without a footer; recovery will scan this segment."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                # The descriptor is gone either way, and its state may have been the reason to drop it.
                self._files.close(descriptor)

    def _write(self, pieces: list[bytes], size: int) -> None:
        done = self._files.write_pieces(self.descriptor, pieces)
        if done < size:
            view = memoryview(b"".join(pieces))
            while done < size:
                done += self._files.write(self.descriptor, view[done:])
