"""What a queue's directory holds: looked at without changing anything, then put right.

`survey` reads and decides; `repair` carries the decisions out. So the inspecting commands and `repair --dry-run`
tell exactly what opening the queue would do. Memory is bounded by a chunk and the largest frame, and time by the
number of segments plus the bytes of those without a footer.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.durable.disk import acklog, quarantine, segment
from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.disk.checksum import crc32
from batchqueue_async.durable.disk.scan import scan
from batchqueue_async.durable.state.ranges import RangeMap
from batchqueue_async.durable.state.table import Segment, merge_attempts
from batchqueue_async.errors import CorruptionError, DurableQueueError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchqueue_async.durable.disk.files import Files
    from batchqueue_async.durable.state.ranges import RangeSet

IDENTITY = "queue.id"
LOCK = "lock"
QUARANTINE = quarantine.NAME
DEAD = "dead"
# Sequence numbers passed over after an unclean end, so that none is ever given twice: see the specification.
SEQ_SKIP = 1 << 28
_MOST_ENDS = 1 << 32
_HINT_LIMIT = 256 << 20
# What a name is answered with that is a link, a directory, a pipe or a device.
NOT_OURS = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What opening a queue has found, and what it did about it.

    Attributes:
        queue_id: 32 hex digits; with a sequence number, a record's identity for ever.
        clean: the last owner closed the queue.
        segments: segments in use.
        scanned: those that had no valid footer, and were read.
        records: records that wait to be delivered.
        disk_bytes: everything in the directory.
        torn_bytes: bytes after the last good frame, cut off and kept in `quarantine/`.
        damaged_records: records whose bytes are wrong; they can't be delivered.
        damaged_ranges: byte ranges that held no valid frame or a damaged one.
        torn_records: records of writes that a crash has cut short; they were not confirmed as durable.
        quarantined: files that are not this queue's, or whose headers are all damaged.
        strays: names that look like this queue's files and are not; they are left alone.
        unreadable: segments that the device fails to read; they are left alone, and tried again at the next opening.
        repairs: what was done, in words.
        failed_repairs: what could not be done, and why; it is tried again at the next opening.
        elapsed: seconds.

    Example:
        >>> import asyncio, tempfile, batchqueue_async as bq
        >>> async def main(path: str) -> bq.RecoveryReport:
        ...     async with bq.DurableQueue.open(path) as queue:
        ...         return queue.recovery
        >>> with tempfile.TemporaryDirectory() as path:
        ...     report = asyncio.run(main(path))
        >>> report.clean, report.records, report.repairs
        (True, 0, ('write queue.id',))
    """

    queue_id: str
    clean: bool = True
    segments: int = 0
    scanned: int = 0
    records: int = 0
    disk_bytes: int = 0
    torn_bytes: int = 0
    damaged_records: int = 0
    damaged_ranges: int = 0
    torn_records: int = 0
    quarantined: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    failed_repairs: tuple[str, ...] = ()
    elapsed: float = 0.0


class Repair(NamedTuple):
    """One change to the directory, in words and as a call; nothing follows one that had to be `first` and failed."""

    words: str
    act: Callable[[], None]
    first: bool = False


@dataclass(slots=True)
class Survey:
    """A directory's content, and the changes it needs."""

    queue_id: bytes
    segments: list[Segment]
    next_seq: int
    next_number: int
    report: RecoveryReport
    repairs: list[Repair] = field(default_factory=list[Repair])


class Surveyor:
    """Reads one directory; holds what `survey` gathers on the way."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._repairs: list[Repair] = []
        self._quarantined: list[str] = []
        self._strays: list[str] = []
        self._unreadable: list[str] = []
        self._torn_records = 0
        self._scanned = self._torn = self._damaged = self._ranges = 0
        self._clean = True

    def survey(self) -> Survey:
        """Everything about the directory; nothing in it changes."""
        names = self._files.names(self._directory)
        self._strays += sorted(name for name in names if segment.is_stray(name))
        found = segment.numbers(names)
        headers = self._headers(found)
        queue_id = self._identity(names, headers)
        segments: list[Segment] = []
        for number in found:
            if number not in headers:
                self._clean = self._clean and number != found[-1]
                continue
            header = headers[number]
            if header is not None and header.queue_id == queue_id and header.number == number:
                with suppress(FileNotFoundError):
                    # Only an inspecting command can miss one: the owner beside it has just deleted the file.
                    segments.append(self._segment(header, newest=number == found[-1]))
            else:
                self._reject(number, header, newest=number == found[-1])
        self._supersede(segments)
        for name in sorted(name for name in names if segment.is_unfinished(name)):
            words = f"remove {name}: it was to take another's place, and was cut short"
            self._do(words, self._files.unlink, self._directory / name)
        self._stray_hints(names, {entry.number for entry in segments})
        next_seq = max((entry.end for entry in segments), default=1)
        aside = self._files.names(self._directory / QUARANTINE)
        kept = [int(match[1]) for name in aside if (match := re.match(r"seg-([0-9]{12,15})(?![0-9])", name))]
        used = [*found, *segment.numbers(names, hints=True), *kept]
        report = RecoveryReport(
            queue_id=queue_id.hex(),
            clean=self._clean,
            segments=len(segments),
            scanned=self._scanned,
            records=sum(entry.unsettled for entry in segments),
            disk_bytes=disk_bytes(self._files, self._directory),
            torn_bytes=self._torn,
            damaged_records=self._damaged,
            damaged_ranges=self._ranges,
            torn_records=self._torn_records,
            quarantined=tuple(self._quarantined),
            strays=tuple(self._strays),
            unreadable=tuple(self._unreadable),
            repairs=tuple(entry.words for entry in self._repairs),
        )
        next_number = max(used, default=0) + 1
        if not self._clean:
            # Each end in between that left an unreadable segment behind may have passed over as many.
            readable = max((entry.number for entry in segments), default=0)
            next_seq += SEQ_SKIP * (1 + min(max(0, found[-1] - readable), _MOST_ENDS))
            segments.append(self._reserve(queue_id, next_number, next_seq))
            next_number += 1
        return Survey(queue_id, segments, next_seq, next_number, report, self._repairs)

    def _reserve(self, queue_id: bytes, number: int, next_seq: int) -> Segment:
        """An empty, sealed segment that remembers the numbers that were passed over, whatever becomes of the others."""
        header = fmt.SegmentHeader(queue_id, number, next_seq, os.urandom(8), 0)
        entry = Segment(header, fmt.DATA_START + fmt.FOOTER)
        entry.closed, entry.data_end = True, fmt.DATA_START
        values = (number, next_seq, next_seq, 0, 0, 0, 0)
        footer = fmt.SegmentFooter(*values, data_end=fmt.DATA_START, synced=True)
        data = fmt.encode_segment_header(header) + fmt.encode_footer(footer, header)

        def act() -> None:
            self._files.replace(self._path(number), data)
            self._files.sync_directory(self._directory)

        self._repairs.insert(0, Repair(f"go on at sequence number {next_seq}, after an unclean end", act, first=True))
        return entry

    def _path(self, number: int) -> Path:
        return self._directory / segment.segment_name(number)

    def _headers(self, found: list[int]) -> dict[int, fmt.SegmentHeader | None]:
        headers: dict[int, fmt.SegmentHeader | None] = {}
        for number in found:
            try:
                headers[number] = header = self._header(self._path(number))
            except FileNotFoundError:
                continue  # it went away beside a running owner
            except OSError as error:
                name = segment.segment_name(number)
                if error.errno in NOT_OURS:
                    self._strays.append(name)
                elif error.errno == errno.EIO:
                    # The device fails at this one file: it is neither damaged nor gone, and the others are there.
                    self._unreadable.append(name)
                else:
                    raise _unopened(self._path(number), error) from error
                continue
            if header is not None and header.version not in fmt.READABLE:
                raise CorruptionError(
                    f"durable queue {self._directory}: {segment.segment_name(number)} has format version "
                    f"{header.version}, and this library reads up to {fmt.VERSION}; upgrade it, or open "
                    "another directory"
                )
        return headers

    def _identity(self, names: list[str], headers: dict[int, fmt.SegmentHeader | None]) -> bytes:
        path = self._directory / IDENTITY
        data = b""
        if IDENTITY in names:
            try:
                data = self._content(path)
            except OSError as error:
                if error.errno not in (errno.EIO, errno.ENOENT, *NOT_OURS):
                    raise _unopened(path, error) from error
        known = parse_identity(data)
        votes = Counter(header.queue_id for header in headers.values() if header is not None)
        if known is not None and (known in votes or not votes):
            return known
        if not votes and self._unreadable:
            # With an id that is made up they would be another queue's, once they can be read.
            raise DurableQueueError(
                f"durable queue {self._directory}: neither queue.id nor the header of a segment can be read "
                f"({', '.join(self._unreadable)}: {os.strerror(errno.EIO)}); nothing was changed. Open it again when "
                "the device gives them, or move these segments to another directory"
            )
        # The segments are the only truth: an id that none of them has is not this queue's, however right its checksum.
        queue_id = votes.most_common(1)[0][0] if votes else uuid.uuid4().bytes
        self._do(
            "write queue.id" + (" as the segments have it" if votes else ""),
            self._files.replace,
            path,
            encode_identity(queue_id),
        )
        return queue_id

    def _header(self, path: Path) -> fmt.SegmentHeader | None:
        descriptor = self._files.open_read(path)
        try:
            found = segment.read_header(self._files, descriptor)
            return found or segment.read_last_header(self._files, descriptor, self._files.size(path))
        finally:
            self._files.close(descriptor)

    def _content(self, path: Path) -> bytes:
        descriptor = self._files.open_read(path)
        try:
            return self._files.read(descriptor, 4096, 0)
        finally:
            self._files.close(descriptor)

    def _segment(self, header: fmt.SegmentHeader, *, newest: bool) -> Segment:
        path = self._path(header.number)
        try:
            size = self._files.size(path)
            descriptor = self._files.open_read(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _unopened(path, error) from error
        try:
            footer = segment.read_footer(self._files, descriptor, size, header)
            if footer is not None and footer.first_seq == header.first_seq and footer.number == header.number:
                return self._sealed(header, footer, size, descriptor)
            self._clean = self._clean and not newest
            return self._unsealed(header, size, descriptor)
        finally:
            self._files.close(descriptor)

    def _sealed(self, header: fmt.SegmentHeader, footer: fmt.SegmentFooter, size: int, descriptor: int) -> Segment:
        entry = Segment(header, size)
        entry.end, entry.data_end, entry.closed = footer.next_seq, footer.data_end, True
        entry.newest_ns = footer.newest_ns
        hint = self._hint(entry)
        self._adopt(entry, hint)
        entry.arm_compaction(footer.records)
        if footer.data_end == header.data_start:
            # Emptied when all of it was settled: it is there for its numbers.
            entry.settled.add(entry.first, entry.end)
            return entry
        if not footer.synced:
            entry.proven = hint.synced_seq
        missing = footer.next_seq - footer.first_seq - footer.records
        if (hint.settled if footer.compacted else hint.lost).count < missing:
            # It was sealed with damage inside, and the hint that says where is gone: look once more, and write it anew.
            proof = footer.next_seq if footer.synced else hint.synced_seq
            found = scan(self._files, descriptor, header, footer.data_end, proof)
            self._scanned += 1
            (found.left_out if footer.compacted and not found.damage else found.lost).add(
                found.next_seq, footer.next_seq
            )
            if not found.unreadable:
                self._leave_out(entry, found.left_out)
                self._lose(entry, found.lost)
        return entry

    def _unsealed(self, header: fmt.SegmentHeader, size: int, descriptor: int) -> Segment:
        self._scanned += 1
        entry = Segment(header, size)
        entry.end = header.first_seq + 0xFFFFFFFF
        proof = self._hint(entry).synced_seq
        found = scan(self._files, descriptor, header, size, proof)
        entry.end, entry.data_end, entry.closed = found.next_seq, found.data_end, True
        entry.newest_ns = found.times[1] if found.times else header.created_ns
        self._adopt(entry, self._hint(entry))
        if found.unreadable:
            # The device fails amid it: nothing is decided now, and nothing changes, so that the next opening can.
            entry.end = max(entry.end, header.first_seq)
            entry.data_end = size
            self._unreadable.append(segment.segment_name(entry.number))
            return entry
        for gap in found.damage:
            self._ranges += 1
            self._do(
                f"keep damaged bytes {gap.offset} to {gap.end} of {segment.segment_name(entry.number)} aside",
                self._copy_aside,
                entry.number,
                gap,
            )
        self._leave_out(entry, found.left_out)
        # In a compacted segment, what is missing behind damage may as well have been left out as settled.
        lost = _unsettled(entry, found.lost) if found.left_out.count else found.lost.count
        self._damaged += max(0, lost - found.torn)
        self._torn_records += found.torn + found.cut
        self._lose(entry, found.lost)
        entry.arm_compaction(found.records)
        self._torn += size - found.data_end
        oldest = found.times[0] if found.times else header.created_ns
        footer = fmt.SegmentFooter(
            header.number,
            header.first_seq,
            found.next_seq,
            found.records,
            found.frames,
            oldest,
            entry.newest_ns,
            data_end=found.data_end,
            synced=True,
            compacted=found.left_out.count > 0,
        )
        words = f"seal {segment.segment_name(entry.number)} at {found.data_end}"
        if size > found.data_end:
            words += f", with {size - found.data_end} torn bytes kept aside"
        self._do(words, self._seal, entry, footer, size)
        return entry

    def _hint(self, entry: Segment) -> acklog.Hint:
        data, there = b"", True
        path = self._directory / segment.hint_name(entry.number)
        try:
            size = self._files.size(path)
            if size <= _HINT_LIMIT:
                descriptor = self._files.open_read(path)
                try:
                    data = self._files.read(descriptor, size, 0)
                finally:
                    self._files.close(descriptor)
        except OSError as error:
            # None, or none that can be read: records are delivered again. But what is only out of reach is no loss.
            if error.errno not in (errno.ENOENT, errno.EIO, *NOT_OURS):
                raise _unopened(path, error) from error
            data, size = b"", 0
            there = error.errno != errno.ENOENT
        entry.hint_bytes = size
        # Whatever is there, what is appended to it may not count: its beginning may be missing, or a part of an entry
        # stand at its end.
        entry.fresh_hint = there
        return acklog.decode(data, number=entry.number, marker=entry.marker, first_seq=entry.first, next_seq=entry.end)

    @staticmethod
    def _adopt(entry: Segment, hint: acklog.Hint) -> None:
        entry.settled, entry.lost = hint.settled, hint.lost
        entry.attempts = RangeMap(merge_attempts(hint.attempts, hint.settled))

    @staticmethod
    def _leave_out(entry: Segment, settled: RangeSet) -> None:
        # What compaction has left out was settled, whatever the hint still knows.
        for low, high in settled:
            entry.settle(acklog.ACKED, low, high)

    @staticmethod
    def _lose(entry: Segment, lost: RangeSet) -> None:
        for low, high in lost:
            entry.settle(acklog.LOST, low, high)

    def _supersede(self, segments: list[Segment]) -> None:
        for at, older in enumerate(segments):
            for newer in segments[at + 1 :]:
                if newer.first >= older.end:
                    break
                low, high = max(newer.first, older.first), min(newer.end, older.end)
                if low < high:
                    older.settle(acklog.DROPPED, low, high)

    def _reject(self, number: int, header: fmt.SegmentHeader | None, *, newest: bool) -> None:
        name = segment.segment_name(number)
        self._clean = self._clean and not newest
        try:
            size = self._files.size(self._path(number))
        except FileNotFoundError:
            return
        if header is None and size <= fmt.DATA_START:
            self._do(f"remove {name}: its creation was cut short", self._files.unlink, self._path(number))
            return
        reason = "every copy of its header is damaged" if header is None else "it belongs to another queue"
        self._quarantined.append(name)
        self._do(f"move {name} to the quarantine: {reason}", self._move_aside, number)

    def _stray_hints(self, names: list[str], known: set[int]) -> None:
        for number in segment.numbers(names, hints=True):
            if number not in known:
                path = self._directory / segment.hint_name(number)
                self._do(f"remove {path.name}: it has no segment", self._files.unlink, path)

    def _do(self, words: str, act: Callable[..., None], *arguments: object) -> None:
        self._repairs.append(Repair(words, lambda: act(*arguments)))

    # The acts: called by `repair` alone.

    def _quarantine(self) -> Path:
        path = self._directory / QUARANTINE
        self._files.make_directory(path)
        return path

    def _move_aside(self, number: int) -> None:
        target = self._quarantine() / f"{segment.segment_name(number)}.{uuid.uuid4().hex[:8]}"
        self._files.rename(self._path(number), target)
        self._files.sync_directory(target.parent)
        self._files.sync_directory(self._directory)

    def _copy_aside(self, number: int, gap: segment.Gap) -> None:
        quarantine.copy_aside(self._files, self._directory, number, gap)

    def _seal(self, entry: Segment, footer: fmt.SegmentFooter, size: int) -> None:
        path = self._path(entry.number)
        if size > footer.data_end:
            self._copy_aside(entry.number, segment.Gap(footer.data_end, size))
        # Cutting also syncs the file, so what the footer vouches for is durable before it is written.
        self._files.truncate(path, footer.data_end)
        self._files.append(path, fmt.encode_footer(footer, entry.header))
        entry.size = footer.data_end + entry.header.footer_size


def encode_identity(queue_id: bytes) -> bytes:
    """The content of `queue.id`."""
    fields = {"format": fmt.VERSION, "queue_id": queue_id.hex(), "crc32": f"{crc32(queue_id):08x}"}
    return (json.dumps(fields) + "\n").encode()


def parse_identity(data: bytes) -> bytes | None:
    """The queue id in the content of `queue.id`; None when it can't be read, or its checksum is wrong."""
    try:
        found = json.loads(data)
        queue_id = bytes.fromhex(found["queue_id"])
        right = found["format"] == 1 or int(found["crc32"], 16) == crc32(queue_id)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return queue_id if right and len(queue_id) == len(uuid.UUID(int=0).bytes) else None


def _unsettled(entry: Segment, ranges: RangeSet) -> int:
    """How many of these are not settled."""
    return sum(stop - start for low, high in ranges for start, stop in entry.settled.missing(low, high))


def _unopened(path: Path, error: OSError) -> DurableQueueError:
    return DurableQueueError(
        f"durable queue {path.parent}: {path.name} can't be read: {error.strerror or error} "
        f"({errno.errorcode.get(error.errno or 0, error.errno)}); nothing was changed. Remove the reason (its owner "
        "and mode, the limit of open files, the device), and open the queue again"
    )


def disk_bytes(files: Files, directory: Path) -> int:
    """Every byte of every file in a queue's directory, its quarantine and its dead letters."""
    total = 0
    for place in (directory, directory / QUARANTINE, directory / DEAD, directory / DEAD / QUARANTINE):
        for name in files.names(place):
            if name not in (QUARANTINE, DEAD):
                try:
                    total += files.size(place / name)
                except OSError:
                    continue  # it went away beside a running owner
    return total


def repair(found: Survey, files: Files, directory: Path) -> Survey:
    """Carry out what `survey` has decided; what fails stays as it is and is tried again at the next opening."""
    failed: list[str] = []
    for entry in found.repairs:
        try:
            entry.act()
        except OSError as error:
            failed.append(f"{entry.words}: {error.strerror or error}")
            if entry.first:
                break
    found.report = replace(found.report, failed_repairs=tuple(failed), disk_bytes=disk_bytes(files, directory))
    return found
