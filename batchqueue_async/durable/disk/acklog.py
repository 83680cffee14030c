"""The hint beside a segment: what is acknowledged and how often each record was leased. Pure, as `format` is.

Its loss delivers records twice, so nothing here is ever an error: what can't be read is left out.
"""

from __future__ import annotations

import struct
from array import array
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.durable.disk.checksum import crc32
from batchqueue_async.durable.state.ranges import RangeMap, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAGIC = b"BQAACK\r\n"
VERSION = 1
_HEADER = struct.Struct("<8sIHHQ8s")
_ENTRY = struct.Struct("<BBHIII")
_BODY = struct.Struct("<BBHII")
SPAN = 8
HEADER = _HEADER.size
ENTRY = _ENTRY.size

ACKED = 1
LEASED = 2
LOST = 3
DROPPED = 4
SYNCED = 5
_SNAPSHOT = 6
_SETTLED = (ACKED, LOST, DROPPED)
MAX_ATTEMPTS = 0xFFFF


class Entry(NamedTuple):
    """One thing that happened to the records [low, high) of a segment, by sequence number."""

    kind: int
    low: int
    high: int
    attempts: int = 0


class Hint(NamedTuple):
    """What a hint file says, clipped to the segment's own records."""

    settled: RangeSet
    attempts: list[Entry]
    synced_seq: int
    lost: RangeSet


def encode_header(number: int, marker: bytes) -> bytes:
    """The start of a hint file."""
    blank = _HEADER.pack(MAGIC, 0, VERSION, 0, number, marker)
    return _HEADER.pack(MAGIC, crc32(blank[12:], crc32(marker)), VERSION, 0, number, marker)


def encode_entries(entries: Iterable[Entry], first_seq: int, marker: bytes) -> bytes:
    """Entries, relative to the segment's first sequence number."""
    seed = crc32(marker)
    parts: list[bytes] = []
    for kind, low, high, attempts in entries:
        body = _BODY.pack(kind, 0, min(attempts, MAX_ATTEMPTS), low - first_seq, high - first_seq)
        parts.append(body)
        parts.append(crc32(body, seed).to_bytes(4, "little"))
    return b"".join(parts)


def encode_snapshot(settled: RangeSet, first_seq: int, marker: bytes) -> bytes:
    """All that is settled, as one block for the start of a new hint file."""
    pairs = array("I", (value - first_seq for pair in settled for value in pair)).tobytes()
    body = _BODY.pack(_SNAPSHOT, 0, 0, len(settled), crc32(pairs))
    return body + crc32(body, crc32(marker)).to_bytes(4, "little") + pairs


def encode_anew(
    number: int,
    marker: bytes,
    records: range,
    settled: RangeSet,
    *,
    lost: Iterable[Entry] = (),
    attempts: RangeMap | None = None,
) -> bytes:
    """A whole hint file for the records of a segment."""
    parts = [
        encode_header(number, marker),
        encode_snapshot(settled, records.start, marker),
        encode_entries(lost, records.start, marker),
    ]
    if attempts is not None:
        parts.append(encode_entries(attempts_left(records, settled, attempts), records.start, marker))
    return b"".join(parts)


def attempts_left(records: range, settled: RangeSet, attempts: RangeMap) -> Iterator[Entry]:
    """How often those of these records were leased that are not settled.

    Example:
        >>> list(attempts_left(range(10), RangeSet([(2, 4)]), RangeMap([(1, 3, 1), (3, 9, 5)])))
        [Entry(kind=2, low=1, high=2, attempts=1), Entry(kind=2, low=4, high=9, attempts=5)]
    """
    over = (records.stop, records.stop, 0)
    runs = iter(attempts)
    run, at = next(runs, over), records.start
    for start, stop in chain(settled, (over[:2],)):
        # The records from `at` to `start` are not settled.
        while run[0] < start:
            low, high, times = run
            low, upto = max(low, at), min(high, start)
            if low < upto:
                yield Entry(LEASED, low, upto, times)
            if high > start:
                break
            run = next(runs, over)
        at = stop


def belongs(data: bytes, number: int, marker: bytes) -> bool:
    """Whether this is the start of the hint file of that very segment."""
    return data[:HEADER] == encode_header(number, marker)


def damage(data: bytes, number: int, marker: bytes) -> str | None:
    """What is wrong with a file of acknowledgements, in words; None when all of it is right."""
    if not belongs(data, number, marker):
        return "not the acknowledgements of this segment"
    seed = crc32(marker)
    at, wrong = HEADER, 0
    while at + ENTRY <= len(data):
        kind, _, _, low, high, crc = _ENTRY.unpack_from(data, at)
        right = crc32(data[at : at + ENTRY - 4], seed) == crc
        at += ENTRY
        wrong += not right
        if kind == _SNAPSHOT and right and at == HEADER + ENTRY:
            if crc32(data[at : at + low * SPAN]) != high:
                return "the snapshot of what is settled is damaged"
            at += low * SPAN
    if wrong or at < len(data):
        return f"{wrong} damaged entries" + (", and a part of one at the end" if at < len(data) else "")
    return None


def decode(data: bytes, *, number: int, marker: bytes, first_seq: int, next_seq: int) -> Hint:
    """Everything that can be trusted in a hint file; nothing when it belongs to another segment."""
    settled, attempts, synced, lost = RangeSet(), list[Entry](), first_seq, RangeSet()
    if not belongs(data, number, marker):
        return Hint(settled, attempts, synced, lost)
    seed = crc32(marker)
    span = next_seq - first_seq
    at = HEADER
    while at + ENTRY <= len(data):
        kind, _, times, low, high, crc = _ENTRY.unpack_from(data, at)
        right = crc32(data[at : at + ENTRY - 4], seed) == crc
        at += ENTRY
        if kind == _SNAPSHOT and right and at == HEADER + ENTRY:
            size = low * SPAN
            pairs = data[at : at + size]
            if len(pairs) != size or crc32(pairs) != high:
                break
            values = array("I", pairs)
            for start, stop in zip(values[::2], values[1::2], strict=True):
                settled.add(first_seq + min(start, span), first_seq + min(stop, span))
            at += size
        elif right and kind in _SETTLED:
            settled.add(first_seq + min(low, span), first_seq + min(high, span))
            if kind == LOST:
                lost.add(first_seq + min(low, span), first_seq + min(high, span))
        elif right and kind == LEASED:
            attempts.append(Entry(LEASED, first_seq + min(low, span), first_seq + min(high, span), times))
        elif right and kind == SYNCED:
            synced = max(synced, first_seq + high)
    return Hint(settled, attempts, synced, lost)
