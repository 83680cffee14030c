"""One sealed segment, written anew without the records that were settled: measured first, then copied in steps.

The copy has the number, the marker and the sequence numbers of the segment, so that its acknowledgements stay right;
it grows beside it under another name, is synced, and takes its place by a rename. A crash before that leaves the
segment as it was, a crash after it leaves the copy, and both hold every record that was unsettled.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.disk import segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from batchqueue_async.durable.disk.files import Files
    from batchqueue_async.durable.state.ranges import RangeSet

# One step of copying, in bytes: what other reads may have to wait for.
STEP = 1 << 20
# What is read at once while measuring: frames that are larger are passed over without their bodies.
_PEEK = 4 << 10
_MEASURED = 4_096


@dataclass(frozen=True, slots=True)
class Task:
    """What to compact: a segment, where its frames are, and what of it is settled by now.

    `most` is how large the copy may be: there is no use in one that gives back too little.
    """

    header: fmt.SegmentHeader
    data_end: int
    end_seq: int
    newest_ns: int
    settled: RangeSet
    unsettled: int
    most: int


@dataclass(frozen=True, slots=True)
class Compacted:
    """A finished copy: its size, where its frames end, and where each begins, by its first sequence number."""

    number: int
    size: int
    data_end: int
    firsts: array[int]
    offsets: array[int]


class Refusal(Exception):  # noqa: N818 - a decision and no error: it ends the steps of one compaction
    """This segment can't be compacted, or it isn't worth it."""


class Rewrite:
    """The steps of one compaction. Used by one thread at a time; each step reads and writes about `STEP` bytes."""

    def __init__(self, files: Files, directory: Path, task: Task) -> None:
        self._files = files
        self._task = task
        self._old = directory / segment.segment_name(task.header.number)
        self.path = directory / segment.rewrite_name(task.header.number)
        self._reading = -1
        self._writing = -1
        # The frames that hold anything unsettled, in order: where they are, and how large.
        self._places: array[int] = array("Q")
        self._sizes: array[int] = array("Q")
        self._walk: Iterator[segment.Found | segment.Gap] | None = None
        self._at = 0
        self._next_seq = task.header.first_seq
        self._offset = fmt.DATA_START
        self._live = self._records = self._frames = 0
        self._times = (task.newest_ns, 0)
        self._firsts: array[int] = array("Q")
        self._offsets: array[int] = array("Q")
        self.size = 0
        """How large the copy will be, once it was measured."""

    def measure(self) -> bool:
        """Look at the next headers and tables; whether that was the last of them.

        Raises:
            Refusal: it isn't worth it, or something about the segment is not as it should be.
        """
        if self._walk is None:
            task = self._task
            self._reading = self._files.open_read(self._old)
            size = self._files.size(self._old)
            if segment.read_footer(self._files, self._reading, size, task.header) is None:
                raise Refusal("not sealed")
            self._walk = iter(
                segment.Walk(
                    self._files,
                    self._reading,
                    task.header.marker,
                    start=task.header.data_start,
                    end=task.data_end,
                    next_seq=task.header.first_seq,
                    bodies=False,
                    chunk=_PEEK,
                )
            )
            self.size = fmt.DATA_START + fmt.FOOTER
        for count, item in enumerate(self._walk, 1):
            if isinstance(item, segment.Gap):
                raise Refusal("damaged")
            self._measure_frame(item)
            if self.size > self._task.most:
                raise Refusal("too little to give back")
            if count >= _MEASURED:
                return False
        if self._live != self._task.unsettled:
            raise Refusal("damaged")
        return True

    def _measure_frame(self, found: segment.Found) -> None:
        header = found.header
        first, stop = header.first_seq, header.first_seq + header.records
        live = list(self._task.settled.missing(first, stop))
        if not live:
            return
        self._live += sum(high - low for low, high in live)
        self._places.append(found.offset)
        self._sizes.append(header.size)
        if live == [(first, stop)]:
            self.size += header.size
            return
        table = self._files.read(self._reading, fmt.TABLE_ROW * header.records, found.offset + fmt.FRAME_HEADER)
        sizes = fmt.decode_frame_sizes(header, table)
        if sizes is None:
            raise Refusal("damaged")
        for low, high in _bridged(live, first, sizes):
            raw = sum(sizes[low - first : high - first])
            # Compressed, a part takes about its share; without a codec this is exact.
            body = raw * header.body_size // max(1, header.raw_size) if header.codec else raw
            self.size += fmt.FRAME_HEADER + fmt.TABLE_ROW * (high - low) + body

    def copy(self) -> bool:
        """Copy the next frames; whether those were the last, and the copy is durable under its own name."""
        if self._writing < 0:
            self._files.unlink(self.path)
            self._writing = self._files.create(self.path)
            self._write([fmt.encode_segment_header(self._task.header)])
        pieces: list[bytes] = []
        budget = STEP
        while self._at < len(self._places) and budget > 0:
            budget -= self._sizes[self._at]
            pieces += self._copy_frame(self._places[self._at], self._sizes[self._at])
            self._at += 1
        if pieces:
            self._write(pieces)
        if self._at < len(self._places):
            return False
        self._seal()
        return True

    def _copy_frame(self, offset: int, size: int) -> list[bytes]:
        task = self._task
        data = memoryview(self._files.read(self._reading, size, offset))
        header = fmt.decode_frame_header(data, 0, task.header.marker, offset)
        decoded = fmt.decode_frame_body(header, data[fmt.FRAME_HEADER :]) if header is not None else None
        if header is None or decoded is None or decoded.damaged or header.size != size:
            # Whoever reads it for a consumer counts it, and keeps its bytes aside.
            raise Refusal("damaged")
        payloads = [payload for payload in decoded.payloads if payload is not None]
        first, stop = header.first_seq, header.first_seq + header.records
        pieces: list[bytes] = []
        for low, high in _bridged(task.settled.missing(first, stop), first, list(map(len, payloads))):
            made = fmt.encode_frame(
                payloads[low - first : high - first],
                # Of a put that was all or none, all was durable before anything of it was settled.
                kind=fmt.GROUP,
                codec=header.codec,
                first_seq=low,
                enqueued_ns=header.enqueued_ns,
                # It gets its place when it is durable.
                synced_seq=task.end_seq,
                marker=task.header.marker,
                offset=self._offset,
                flags=fmt.SPARSE if low > self._next_seq else 0,
            )
            self._firsts.append(low)
            self._offsets.append(self._offset)
            self._offset += sum(map(len, made))
            self._frames += 1
            self._next_seq = high
            self._count(low, high, header.enqueued_ns)
            pieces += made
        return pieces

    def _count(self, low: int, high: int, enqueued_ns: int) -> None:
        self._records += high - low
        self._times = (min(self._times[0], enqueued_ns), max(self._times[1], enqueued_ns))

    def _seal(self) -> None:
        task = self._task
        footer = fmt.SegmentFooter(
            task.header.number,
            task.header.first_seq,
            task.end_seq,
            self._records,
            self._frames,
            *self._times,
            data_end=self._offset,
            synced=True,
            compacted=True,
        )
        self._write([fmt.encode_footer(footer, task.header)])
        self._files.sync(self._writing)
        self._close()

    def result(self) -> Compacted:
        """What the finished copy is like."""
        size = self._offset + fmt.FOOTER
        return Compacted(self._task.header.number, size, self._offset, self._firsts, self._offsets)

    def abandon(self) -> None:
        """Leave everything as it was."""
        started = self._writing >= 0 or self._frames > 0
        self._close()
        if started:
            with suppress(OSError, MemoryError):
                # The next opening removes it.
                self._files.unlink(self.path)

    def _close(self) -> None:
        for descriptor in (self._reading, self._writing):
            if descriptor >= 0:
                with suppress(OSError, MemoryError):
                    self._files.close(descriptor)
        self._reading = self._writing = -1

    def _write(self, pieces: list[bytes]) -> None:
        data = memoryview(b"".join(pieces))
        while data:
            data = data[self._files.write(self._writing, data) :]


def _bridged(
    live: Iterable[tuple[int, int]], first: int, sizes: list[int] | tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Ranges of records to keep, each a frame of its own: what is settled between two stays where it is smaller."""
    start = stop = -1
    for low, high in live:
        if start < 0:
            start, stop = low, high
        elif sum(sizes[stop - first : low - first]) + fmt.TABLE_ROW * (low - stop) <= fmt.FRAME_HEADER:
            stop = high
        else:
            yield start, stop
            start, stop = low, high
    if start >= 0:
        yield start, stop
