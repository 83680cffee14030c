"""Reading a segment that has no footer: what is in it, what is damaged, and what was never confirmed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.disk import segment
from batchqueue_async.durable.state.ranges import RangeSet

if TYPE_CHECKING:
    from batchqueue_async.durable.disk.files import Files


@dataclass(slots=True)
class Scan:
    """What reading a segment without a footer has found."""

    next_seq: int
    data_end: int
    records: int = 0
    frames: int = 0
    times: list[int] = field(default_factory=list[int])
    lost: RangeSet = field(default_factory=RangeSet)
    damage: list[segment.Gap] = field(default_factory=list[segment.Gap])


def scan(files: Files, descriptor: int, header: fmt.SegmentHeader, end: int, proof: int) -> Scan:
    """Every frame up to `end`; `proof`: records with smaller sequence numbers are known to have been durable."""
    found = Scan(header.first_seq, fmt.DATA_START)
    doubtful: list[tuple[segment.Found, list[int]]] = []
    pending: segment.Gap | None = None
    walk = segment.Walk(files, descriptor, header.marker, start=fmt.DATA_START, end=end, next_seq=header.first_seq)
    for item in walk:
        if isinstance(item, segment.Gap):
            pending = item
            continue
        if pending is not None:
            found.damage.append(pending)
            pending = None
        frame = item.header
        if frame.first_seq > found.next_seq:
            found.lost.add(found.next_seq, frame.first_seq)
        proof = max(proof, frame.synced_seq)
        last = frame.first_seq + frame.records
        bad = _bad_records(item)
        if bad and frame.kind == fmt.ATOMIC and len(bad) < frame.records:
            doubtful.append((item, bad))
        for seq in bad:
            found.lost.add(seq, seq + 1)
        if bad:
            found.damage.append(segment.Gap(item.offset, item.end))
        found.next_seq, found.data_end = last, item.end
        found.frames += 1
        found.records += frame.records
        found.times = [
            min(found.times[0], frame.enqueued_ns) if found.times else frame.enqueued_ns,
            max(found.times[1], frame.enqueued_ns) if found.times else frame.enqueued_ns,
        ]
    for item, _ in doubtful:
        if item.header.first_seq + item.header.records > proof:
            found.lost.add(item.header.first_seq, item.header.first_seq + item.header.records)
    found.records = found.next_seq - header.first_seq - found.lost.count
    return found


def _bad_records(item: segment.Found) -> list[int]:
    first = item.header.first_seq
    if item.decoded is None:
        return list(range(first, first + item.header.records))
    if not item.decoded.damaged:
        return []
    return [first + at for at, payload in enumerate(item.decoded.payloads) if payload is None]
