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
    """What reading a segment without a footer has found.

    `torn` are records that stay in it and were not confirmed, `cut` those of an unfinished put at its end, which are
    no longer in it.
    """

    next_seq: int
    data_end: int
    records: int = 0
    frames: int = 0
    times: list[int] = field(default_factory=list[int])
    lost: RangeSet = field(default_factory=RangeSet)
    left_out: RangeSet = field(default_factory=RangeSet)
    damage: list[segment.Gap] = field(default_factory=list[segment.Gap])
    unreadable: list[segment.Gap] = field(default_factory=list[segment.Gap])
    torn: int = 0
    cut: int = 0


def scan(  # noqa: C901, PLR0912 - one pass, in which each rule of the specification stands once
    files: Files, descriptor: int, header: fmt.SegmentHeader, end: int, proof: int
) -> Scan:
    """Every frame up to `end`; `proof`: records with smaller sequence numbers are known to have been durable."""
    found = Scan(header.first_seq, header.data_start)
    doubtful: list[tuple[int, int]] = []
    groups: list[tuple[int, int]] = []
    chain: _Chain | None = None
    pending: segment.Gap | None = None
    walk = segment.Walk(files, descriptor, header.marker, start=header.data_start, end=end, next_seq=header.first_seq)
    for item in walk:
        if isinstance(item, segment.Gap):
            pending = item
            continue
        if pending is not None:
            found.damage.append(pending)
        frame = item.header
        if frame.first_seq > found.next_seq:
            # Behind bytes that are no frame, nobody can say what was in them.
            settled = frame.flags & fmt.SPARSE and pending is None
            (found.left_out if settled else found.lost).add(found.next_seq, frame.first_seq)
        pending = None
        proof = max(proof, frame.synced_seq)
        last = frame.first_seq + frame.records
        bad = _bad_records(item)
        if chain is not None and not chain.goes_on(frame):
            doubtful.append(chain.seqs)
            chain = None
        if frame.kind == fmt.ATOMIC:
            chain = chain or _Chain(frame, item.offset)
            chain.take(frame, whole=not bad)
            if not frame.flags & fmt.MORE:
                if not chain.whole:
                    doubtful.append(chain.seqs)
                chain = None
        elif bad:
            groups.append((frame.first_seq, len(bad)))
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
    if chain is not None and chain.seqs[1] > proof and not walk.unreadable:
        _cut_off(found, chain)
    elif chain is not None:
        doubtful.append(chain.seqs)
    for low, high in doubtful:
        if high > proof:
            # Not known to have been durable, so not confirmed: what is missing was torn, and the rest goes with it.
            found.torn += high - low
            found.lost.add(low, high)
    # The same of the last puts that were written together: what was not known to be durable was torn, not damaged.
    found.torn += sum(count for first, count in groups if first >= proof)
    found.unreadable = walk.unreadable
    found.records = found.next_seq - header.first_seq - found.lost.count - found.left_out.count
    return found


class _Chain:
    """The frames of one atomic put, as they come."""

    def __init__(self, first: fmt.FrameHeader, offset: int) -> None:
        self.offset = offset
        self.frames = 0
        self.seqs = (first.first_seq, first.first_seq)
        # Of a put whose first frame is missing, the rest is as doubtful as that.
        self.whole = not first.flags & fmt.CONTINUED

    def goes_on(self, frame: fmt.FrameHeader) -> bool:
        return bool(frame.kind == fmt.ATOMIC and frame.flags & fmt.CONTINUED)

    def take(self, frame: fmt.FrameHeader, *, whole: bool) -> None:
        self.frames += 1
        self.whole = self.whole and whole and frame.first_seq == self.seqs[1]
        self.seqs = (self.seqs[0], frame.first_seq + frame.records)


def _cut_off(found: Scan, chain: _Chain) -> None:
    """Its writing was cut short: none of it is here, so that a whole copy in an older segment counts."""
    found.cut = chain.seqs[1] - chain.seqs[0]
    found.lost.remove(*chain.seqs)
    found.damage = [gap for gap in found.damage if gap.offset < chain.offset]
    found.next_seq, found.data_end = chain.seqs[0], chain.offset
    found.frames -= chain.frames


def _bad_records(item: segment.Found) -> list[int]:
    first = item.header.first_seq
    if item.decoded is None:
        return list(range(first, first + item.header.records))
    if not item.decoded.damaged:
        return []
    return [first + at for at, payload in enumerate(item.decoded.payloads) if payload is None]
