"""Looking at a queue's directory without owning it: nothing is written, nothing is locked for longer than a question.

All of it is safe beside a running owner. What the owner is just doing may show as a torn tail or a file that has gone:
`owner` says whether there is one.
"""

from __future__ import annotations

import errno
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from batchqueue_async.durable import dead_letters
from batchqueue_async.durable.disk import acklog, files, recovery, segment
from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from batchqueue_async.durable.dead_letters import DeadLetter

_NS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """One segment as its header, footer and hint show it."""

    name: str
    number: int
    first_seq: int
    next_seq: int
    records: int
    unsettled: int
    bytes: int
    sealed: bool
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A queue's directory."""

    path: str
    queue_id: str
    owner: str | None
    format: int
    records: int
    disk_bytes: int
    free_bytes: int
    next_seq: int
    dead_letters: int
    quarantined: tuple[str, ...]
    segments: tuple[SegmentView, ...]
    repairs: tuple[str, ...]


@dataclass(slots=True)
class Verification:
    """Every frame of every segment, checked."""

    segments: int = 0
    frames: int = 0
    records: int = 0
    bytes: int = 0
    damaged_records: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordView:
    """One record as it is on the disk."""

    seq: int
    segment: int
    offset: int
    enqueued_at: float
    settled: bool
    payload: bytes


def survey(path: Path) -> recovery.Survey:
    """What opening the queue would find and do; nothing is done."""
    _must_exist(path)
    return recovery.Surveyor(files.OsFiles(), path).survey()


def overview(path: Path) -> Overview:
    """A queue's directory at a glance: headers, footers and hints are read, and the frames of what isn't sealed."""
    found = survey(path)
    system = files.OsFiles()
    views: list[SegmentView] = []
    for entry in found.segments:
        name = segment.segment_name(entry.number)
        with _reading(path / name) as descriptor:
            if descriptor is None:
                continue
            header = segment.read_header(system, descriptor)
            footer = segment.read_footer(system, descriptor, _size(path / name), entry.header)
        views.append(
            SegmentView(
                name=name,
                number=entry.number,
                first_seq=entry.first,
                next_seq=entry.end,
                records=entry.end - entry.first - entry.lost.count,
                unsettled=entry.unsettled,
                bytes=entry.size,
                sealed=footer is not None,
                created_at=header.created_ns * _NS if header is not None else 0.0,
            )
        )
    dead = path / recovery.DEAD
    buried = recovery.Surveyor(system, dead).survey().report.records if dead.is_dir() else 0
    return Overview(
        path=str(path),
        queue_id=found.report.queue_id,
        owner=files.held(path / recovery.LOCK),
        format=fmt.VERSION,
        records=found.report.records,
        disk_bytes=found.report.disk_bytes,
        free_bytes=system.free_bytes(path),
        next_seq=found.next_seq,
        dead_letters=buried,
        quarantined=tuple(sorted(system.names(path / recovery.QUARANTINE))),
        segments=tuple(views),
        repairs=tuple(repair.words for repair in found.repairs),
    )


def verify(path: Path) -> Verification:
    """Read and check everything: every segment, the acknowledgements, `queue.id`, and the same of the dead letters.

    What an owner is just writing counts as no problem.
    """
    _must_exist(path)
    result = Verification()
    owned = files.held(path / recovery.LOCK) is not None
    _verify_directory(path, result, owned=owned)
    if (path / recovery.DEAD).is_dir():
        _verify_directory(path / recovery.DEAD, result, owned=owned, prefix=f"{recovery.DEAD}/")
    return result


def _verify_directory(path: Path, result: Verification, *, owned: bool, prefix: str = "") -> None:
    system = files.OsFiles()
    start = len(result.problems)
    names = system.names(path)
    numbers = segment.numbers(names)
    for number in numbers:
        try:
            _verify_segment(path, number, result, written=owned and number == numbers[-1])
        except OSError as error:
            result.problems.append(
                {"segment": segment.segment_name(number), "problem": f"can't be read: {error.strerror}"}
            )
    for number in segment.numbers(names, hints=True):
        _verify_hint(path, number, result, written=owned)
    _verify_identity(path, names, result)
    result.problems += [
        {"segment": name, "problem": "not one of the queue's files"} for name in names if segment.is_stray(name)
    ]
    for problem in result.problems[start:]:
        problem["segment"] = prefix + problem["segment"]


def _verify_hint(path: Path, number: int, result: Verification, *, written: bool) -> None:
    name = segment.hint_name(number)
    system = files.OsFiles()
    with _reading(path / segment.segment_name(number)) as descriptor:
        header = segment.read_header(system, descriptor) if descriptor is not None else None
    if header is None:
        if not written:
            result.problems.append({"segment": name, "problem": "acknowledgements of no segment"})
        return
    with _reading(path / name) as descriptor:
        data = system.read(descriptor, _size(path / name), 0) if descriptor is not None else b""
    wrong = acklog.damage(data, number, header.marker)
    if wrong and not written:
        result.problems.append({"segment": name, "problem": f"{wrong}; records may be delivered again"})


def _verify_identity(path: Path, names: list[str], result: Verification) -> None:
    system = files.OsFiles()
    known = None
    if recovery.IDENTITY in names:
        with _reading(path / recovery.IDENTITY) as descriptor:
            data = system.read(descriptor, 4096, 0) if descriptor is not None else b""
        known = recovery.parse_identity(data)
        if known is not None and b"crc32" in data and data != recovery.encode_identity(known):
            result.problems.append(
                {"segment": recovery.IDENTITY, "problem": "not as it was written, and still readable"}
            )
    ids: set[bytes] = set()
    for number in segment.numbers(names):
        with _reading(path / segment.segment_name(number)) as descriptor:
            header = segment.read_header(system, descriptor) if descriptor is not None else None
        if header is not None:
            ids.add(header.queue_id)
    if known is None:
        result.problems.append({"segment": recovery.IDENTITY, "problem": "missing or damaged; opening writes it again"})
    elif ids - {known}:
        problem = "some segments are another queue's" if known in ids else "no segment has this queue id"
        result.problems.append({"segment": recovery.IDENTITY, "problem": problem})


def _verify_segment(path: Path, number: int, result: Verification, *, written: bool) -> None:
    system = files.OsFiles()
    name = segment.segment_name(number)
    with _reading(path / name) as descriptor:
        if descriptor is None:
            return
        header = segment.read_header(system, descriptor)
        result.segments += 1
        if header is None:
            if not (written and _size(path / name) <= fmt.DATA_START):
                result.problems.append({"segment": name, "problem": "no valid header"})
            return
        size = _size(path / name)
        footer = segment.read_footer(system, descriptor, size, header)
        _verify_copies(descriptor, size, header, result, sealed=footer is not None)
        end = footer.data_end if footer is not None else size
        result.bytes += size
        walk = segment.Walk(
            system, descriptor, header.marker, start=header.data_start, end=end, next_seq=header.first_seq
        )
        records = 0
        for item in walk:
            if isinstance(item, segment.Gap):
                torn = footer is None and item.end == walk.end
                if torn and written:
                    continue
                problem = "torn" if torn else "no valid frame"
                result.problems.append({"segment": name, "problem": problem, "offset": item.offset, "end": item.end})
                continue
            result.frames += 1
            bad = item.header.records if item.decoded is None else item.decoded.damaged
            records += item.header.records
            result.damaged_records += bad
            if bad:
                problem = f"{bad} of {item.header.records} records damaged"
                result.problems.append({"segment": name, "problem": problem, "offset": item.offset, "end": item.end})
        result.records += records
        if footer is not None and end == walk.end > header.data_start and records < footer.records:
            missing = footer.records - records
            result.damaged_records += missing
            result.problems.append({"segment": name, "problem": f"{missing} records missing that its footer counts"})


def _verify_copies(
    descriptor: int, size: int, header: fmt.SegmentHeader, result: Verification, *, sealed: bool
) -> None:
    """Each copy of the header: one that is damaged costs nothing as long as another is right, and is told."""
    system = files.OsFiles()
    places = [0, fmt.SECTOR] if header.version > 1 else [0, fmt.SEGMENT_HEADER]
    if sealed and header.version > 1:
        places.append(size - fmt.SEGMENT_HEADER)
    for place in places:
        if fmt.decode_header_copy(system.read(descriptor, fmt.SEGMENT_HEADER, place)) != header:
            result.problems.append(
                {
                    "segment": segment.segment_name(header.number),
                    "problem": "a copy of the header is damaged; the others are right",
                    "offset": place,
                    "end": place + fmt.SEGMENT_HEADER,
                }
            )


def dump(path: Path, *, settled: bool = False, on_damage: Callable[[str], None] | None = None) -> Iterator[RecordView]:
    """The records on the disk, in order; with `settled`, also those that are acknowledged and not yet deleted.

    `on_damage` is told in words what is still wanted and can't be shown.
    """
    system = files.OsFiles()
    found = survey(path)
    tell = on_damage or _ignore
    for words in _out_of_reach(found.report):
        tell(words)
    for entry in found.segments:
        shown = 0
        with _reading(path / segment.segment_name(entry.number)) as descriptor:
            if descriptor is None:
                continue
            walk = segment.Walk(
                system,
                descriptor,
                entry.marker,
                start=entry.header.data_start,
                end=entry.data_end,
                next_seq=entry.first,
            )
            for item in walk:
                if isinstance(item, segment.Gap) or item.decoded is None:
                    continue
                for at, payload in enumerate(item.decoded.payloads):
                    seq = item.header.first_seq + at
                    done = seq in entry.settled
                    if payload is not None and (settled or not done):
                        shown += not done
                        yield RecordView(
                            seq=seq,
                            segment=entry.number,
                            offset=item.offset,
                            enqueued_at=item.header.enqueued_ns * _NS,
                            settled=done,
                            payload=payload,
                        )
        if shown < entry.unsettled:
            tell(f"{entry.unsettled - shown} records of {segment.segment_name(entry.number)} are damaged")


def _out_of_reach(report: recovery.RecoveryReport) -> Iterator[str]:
    if report.damaged_records:
        yield f"{report.damaged_records} records are damaged"
    for name in report.unreadable:
        yield f"{name} can't be read: {os.strerror(errno.EIO)}"
    for name in report.quarantined:
        yield f"{name} is another queue's, or every copy of its header is damaged"


def _ignore(_words: str) -> None:
    """Nobody asks what is damaged."""


def restore(path: Path, name: str) -> str:
    """Put a segment back that opening has set aside, under its own name; that name."""
    _must_exist(path)
    system = files.OsFiles()
    source = path / recovery.QUARANTINE / name
    header = None
    if source.name == name:
        with _reading(source) as descriptor:
            if descriptor is not None:
                header = segment.read_header(system, descriptor) or segment.read_last_header(
                    system, descriptor, _size(source)
                )
    if header is None:
        raise CorruptionError(f"{source}: no segment with a valid header; give a name that `inspect` shows")
    target = path / segment.segment_name(header.number)
    lock = system.lock(path / recovery.LOCK)
    try:
        queue_id = survey(path).queue_id
        others = segment.numbers(system.names(path))
        if others and header.queue_id != queue_id:
            raise CorruptionError(
                f"{source}: belongs to queue {header.queue_id.hex()}, and this is {queue_id.hex()}: the next opening "
                f"would set it aside again; put it into a directory of its own, as {target.name}, and open that"
            )
        if os.path.lexists(target):
            raise CorruptionError(f"{target}: is taken; move that one away first")
        system.rename(source, target)
        system.sync_directory(path)
    finally:
        system.close(lock)
    return target.name


def list_dead_letters(path: Path, *, on_damage: Callable[[str], None] | None = None) -> Iterator[DeadLetter]:
    """The dead letters, in order; `on_damage` is told in words what can't be shown."""
    _must_exist(path)
    dead = path / recovery.DEAD
    if not dead.is_dir():
        return
    for record in dump(dead, on_damage=on_damage):
        letter = dead_letters.decode(record.seq, record.payload)
        if letter is not None:
            yield letter
        else:
            (on_damage or _ignore)(f"dead letter {record.seq} is of another version")


def as_dict(view: Overview | Verification) -> dict[str, Any]:
    """A view as plain data, for JSON."""
    return asdict(view)


class _reading:  # noqa: N801 - used as a function
    """A descriptor for a file, or None when it has gone: a running owner deletes what is consumed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> int | None:
        try:
            self._descriptor = files.OsFiles().open_read(self._path)
        except OSError:
            self._descriptor = None
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            files.OsFiles().close(self._descriptor)


def _size(path: Path) -> int:
    """The size of a file; 0 when a running owner has deleted it by now."""
    try:
        return files.OsFiles().size(path)
    except FileNotFoundError:
        return 0


def _must_exist(path: Path) -> None:
    names = files.OsFiles().names(path)
    if recovery.IDENTITY not in names and not segment.numbers(names):
        raise CorruptionError(
            f"{path}: no durable queue here: neither queue.id nor a segment; give the queue's directory"
        )
