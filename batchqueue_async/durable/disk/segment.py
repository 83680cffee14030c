"""Segments as files: their names, walking through their frames, and appending to one.

The reading half is used by recovery, by the loader behind `lease`, and by the inspecting commands; it allocates no
more than a chunk and the one frame whose checked header asks for more.
"""

from __future__ import annotations

import errno
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
# The last number that is believed. One more digit, and a stray file could push all that is written after it out of
# what a reader looks for.
LAST_NUMBER = 10**15 - 1
_NAME = re.compile(r"seg-([0-9]{12,15})\.bqs")
_HINT_NAME = re.compile(r"seg-([0-9]{12,15})\.ack")
# A file that takes another's place when it is whole: a segment being compacted, a hint written anew.
_UNFINISHED = re.compile(r"seg-[0-9]{12,15}\.(new|ack\.tmp|bqs\.tmp)")
_BLOCK = 512


def segment_name(number: int) -> str:
    """The file name of segment `number`."""
    return f"seg-{number:012d}.bqs"


def hint_name(number: int) -> str:
    """The file name of its hint."""
    return f"seg-{number:012d}.ack"


def rewrite_name(number: int) -> str:
    """The name under which a segment is written anew, until it takes the old one's place."""
    return f"seg-{number:012d}.new"


def is_unfinished(name: str) -> bool:
    """Whether a file was on its way to take another's place: it holds nothing that is not elsewhere."""
    return _UNFINISHED.fullmatch(name) is not None


def numbers(names: list[str], *, hints: bool = False) -> list[int]:
    """The segment numbers (or those of the hints) among file names, rising; other names are not ours."""
    pattern = _HINT_NAME if hints else _NAME
    found = (int(match[1]) for name in names if (match := pattern.fullmatch(name)))
    name_of = hint_name if hints else segment_name
    return sorted(number for number in found if name_of(number) in names)


def is_stray(name: str) -> bool:
    """Whether a name looks like a segment's or an acknowledgement file's, and is none that this library gives."""
    ours = numbers([name]) or numbers([name], hints=True) or is_unfinished(name)
    return name.startswith("seg-") and not ours


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
    """The header of an open segment, from whichever copy is readable and right.

    Raises:
        OSError: no copy is right, and one of them could not be read.
    """
    failed: OSError | None = None
    places = (0, fmt.SEGMENT_HEADER, fmt.SECTOR)
    for place in places:
        try:
            found = fmt.decode_header_copy(files.read(descriptor, fmt.SEGMENT_HEADER, place))
        except OSError as error:
            failed = error
            continue
        if found is not None:
            return found
    if failed is not None:
        raise failed
    return None


def read_last_header(files: Files, descriptor: int, size: int) -> fmt.SegmentHeader | None:
    """The copy of the header that ends a sealed segment."""
    if size < fmt.DATA_START + fmt.FOOTER:
        return None
    return fmt.decode_header_copy(files.read(descriptor, fmt.SEGMENT_HEADER, size - fmt.SEGMENT_HEADER))


def read_footer(files: Files, descriptor: int, size: int, header: fmt.SegmentHeader) -> fmt.SegmentFooter | None:
    """The footer of an open segment of this size; None while it isn't sealed, or when that can't be read."""
    offset = size - header.footer_size
    if offset < header.data_start:
        return None
    try:
        data = files.read(descriptor, header.footer_size, offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return None
    return fmt.decode_footer(data, header.marker, offset)


class Walk:
    """The frames of an open segment between two offsets, resynchronising after damage.

    Sequence numbers below `next_seq`, which rises with every frame, are taken for leftovers and skipped. `end` comes
    down when the file turns out to be shorter. Where the device fails to read, what can be read around that place is;
    `unreadable` says which bytes could not be.
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
        chunk: int = CHUNK,
    ) -> None:
        self._files = files
        self._chunk = chunk
        self._descriptor = descriptor
        self._marker = marker
        self.end = end
        self._bodies = bodies
        self._base = start
        self._buffer = b""
        self.unreadable: list[Gap] = []
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
        wanted = min(max(size, self._chunk), self.end - position)
        try:
            self._buffer = self._files.read(self._descriptor, wanted, position)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._buffer = self._around(position, wanted)
        self._base = position
        if len(self._buffer) < wanted:
            # The file is shorter than it was: its owner has cut it meanwhile. There is nothing to search beyond.
            self.end = position + len(self._buffer)

    def _around(self, position: int, size: int) -> bytes:
        """What can be read, block by block, with zeros for what can't: they are no frame and no marker."""
        parts: list[bytes] = []
        at, end = position, position + size
        while at < end:
            stop = min(end, at - at % _BLOCK + _BLOCK)
            try:
                data = self._files.read(self._descriptor, stop - at, at)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = bytes(stop - at)
                self.unreadable.append(Gap(at, stop))
            parts.append(data)
            if len(data) < stop - at:
                break
            at = stop
        return b"".join(parts)


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
        self.header = fmt.SegmentHeader(queue_id, number, first_seq, self.marker, now_ns)
        self.descriptor = files.create(self.path)
        try:
            self._write([fmt.encode_segment_header(self.header)], fmt.DATA_START)
            # The header keeps the sequence numbers when all older segments are deleted: it has to be there before that.
            files.sync(self.descriptor)
            files.sync_directory(directory)
        except BaseException:
            self.abandon()
            with suppress(OSError, MemoryError):
                files.unlink(self.path)
            raise

    @property
    def data_bytes(self) -> int:
        """The bytes of its frames."""
        return self.offset - fmt.DATA_START

    @property
    def unsynced(self) -> bool:
        """Whether any of its frames may not be durable yet."""
        return self.synced_seq < self.next_seq

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

    def sync(self) -> None:
        """Make all frames so far durable. After an error the descriptor must not be used again: `abandon`."""
        self._files.sync(self.descriptor)
        self.synced_seq = self.next_seq
        self.wants_sync = False

    def seal(self) -> int:
        """Write the footer and close; the file's size."""
        values = (self.number, self.first_seq, self.next_seq, self.records, self.frames, self.oldest_ns, self.newest_ns)
        footer = fmt.SegmentFooter(*values, data_end=self.offset, synced=self.synced_seq == self.next_seq)
        try:
            self._write([fmt.encode_footer(footer, self.header)], fmt.FOOTER)
        finally:
            self.abandon()
        return self.offset + fmt.FOOTER

    def abandon(self) -> None:
        """Close without a footer; recovery will scan this segment."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with suppress(OSError, MemoryError):
                # The descriptor is gone either way, and its state may have been the reason to drop it.
                self._files.close(descriptor)

    def _write(self, pieces: list[bytes], size: int) -> None:
        done = self._files.write_pieces(self.descriptor, pieces)
        if done < size:
            view = memoryview(b"".join(pieces))
            while done < size:
                done += self._files.write(self.descriptor, view[done:])
