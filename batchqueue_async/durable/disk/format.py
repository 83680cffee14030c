"""The bytes of format 2, and how format 1 is read: pure functions between values and bytes.

`docs/spec/durable-format.md` is the specification; names and order here follow it. Nothing in this module opens a
file, and nothing trusts a length before the checksum that covers it.
"""

from __future__ import annotations

import struct
import sys
from array import array
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.durable.disk import compression
from batchqueue_async.durable.disk.checksum import crc32

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 2
READABLE = (1, 2)
"""The versions that this library reads; it writes the last alone."""
MAX_PUT = 256 * 1024 * 1024
"""The most bytes of one put, with its tables."""
MAX_FRAME = MAX_PUT + 64 * 1024
"""The most that a frame is believed to hold: a put of one record, and a dead letter's own words with it."""
FRAME_BYTES = 256 * 1024
"""The most bytes of a frame of more than one record: what one flipped bit may cost."""
MAX_RECORDS = 1 << 24

SEGMENT_MAGIC = b"BQASEG\r\n"
FOOTER_MAGIC = b"BQAEND\r\n"

_SEGMENT = struct.Struct("<8sIHH16sQQ8sQ")
_FRAME = struct.Struct("<8sIBBHIQQQIIII")
_FOOTER = struct.Struct("<8sIHHQQQQQQQQ")
_OFFSET = struct.Struct("<Q")

SEGMENT_HEADER = _SEGMENT.size
SECTOR = 512
DATA_START = SECTOR + SEGMENT_HEADER
_STARTS = {1: 2 * SEGMENT_HEADER, 2: DATA_START}
FRAME_HEADER = _FRAME.size
TABLE_ROW = 8
_FOOTER_1 = _FOOTER.size
FOOTER = _FOOTER_1 + SEGMENT_HEADER
_FOOTERS = {1: _FOOTER_1, 2: FOOTER}

GROUP = 1
ATOMIC = 2
MORE = 1
"""Flag of a frame of an atomic put: its records go on in the next frame."""
CONTINUED = 2
"""Flag of a frame of an atomic put: its records began in an earlier frame."""
SPARSE = 4
"""Flag of a frame that compaction wrote: the numbers missing before it were settled, and their records left out."""

# Payloads of fewer bytes than this are small beside what Python takes for each.
_SMALL = 4096

_SYNCED = 1
_COMPACTED = 2


class SegmentHeader(NamedTuple):
    """Who a segment is."""

    queue_id: bytes
    number: int
    first_seq: int
    marker: bytes
    created_ns: int
    version: int = VERSION

    @property
    def data_start(self) -> int:
        """Where the first frame begins."""
        return _STARTS.get(self.version, DATA_START)

    @property
    def footer_size(self) -> int:
        """The bytes behind the frames of a sealed segment."""
        return _FOOTERS.get(self.version, FOOTER)


class FrameHeader(NamedTuple):
    """A frame's header, after its checksum was found right."""

    kind: int
    codec: int
    records: int
    first_seq: int
    enqueued_ns: int
    synced_seq: int
    raw_size: int
    body_size: int
    table_crc: int
    body_crc: int
    flags: int = 0

    @property
    def size(self) -> int:
        """The bytes of the whole frame on disk."""
        return FRAME_HEADER + TABLE_ROW * self.records + self.body_size


class SegmentFooter(NamedTuple):
    """What a sealed segment holds."""

    number: int
    first_seq: int
    next_seq: int
    records: int
    frames: int
    oldest_ns: int
    newest_ns: int
    data_end: int
    synced: bool
    compacted: bool = False


class DecodedFrame(NamedTuple):
    """A frame's payloads: None stands where a record's checksum is wrong."""

    payloads: list[bytes | None]
    damaged: int


def _header_copy(header: SegmentHeader) -> bytes:
    fields = (header.queue_id, header.number, header.first_seq, header.marker, header.created_ns)
    blank = _SEGMENT.pack(SEGMENT_MAGIC, 0, header.version, SEGMENT_HEADER, *fields)
    return _SEGMENT.pack(SEGMENT_MAGIC, crc32(blank[12:]), header.version, SEGMENT_HEADER, *fields)


def encode_segment_header(header: SegmentHeader) -> bytes:
    """The start of a segment: its header in the first sector, and again in the second."""
    one = _header_copy(header)
    if header.version == 1:
        return one + one
    return one + bytes(SECTOR - SEGMENT_HEADER) + one


def decode_segment_header(data: bytes) -> SegmentHeader | None:
    """The first valid copy in the start of a file, or None."""
    for start in (0, SEGMENT_HEADER, SECTOR):
        if (header := decode_header_copy(data[start : start + SEGMENT_HEADER])) is not None:
            return header
    return None


def decode_header_copy(copy: bytes) -> SegmentHeader | None:
    """One copy of a segment's header, or None when it isn't a valid one."""
    if len(copy) < SEGMENT_HEADER:
        return None
    magic, crc, version, size, queue_id, number, first_seq, marker, created = _SEGMENT.unpack(copy)
    if magic == SEGMENT_MAGIC and crc == crc32(copy[12:]) and size == SEGMENT_HEADER:
        return SegmentHeader(queue_id, number, first_seq, marker, created, version)
    return None


def frame_size(count: int, raw_size: int) -> int:
    """The most that a put of `count` records and `raw_size` bytes takes on disk, in as many frames as it needs."""
    whole = FRAME_HEADER + TABLE_ROW * count + raw_size
    if count == 1 or whole <= FRAME_BYTES:
        return whole
    # Two neighbours together are larger than one frame may be, so there are at most twice as many as it takes.
    return whole + FRAME_HEADER * (2 * whole // FRAME_BYTES + 1)


def encode_table(payloads: Sequence[bytes]) -> tuple[list[int], bytes]:
    """The lengths of payloads, and the rows of the table for them: any stretch of the rows is one for those records."""
    sizes = list(map(len, payloads))
    # Lengths in the even places of the table, checksums in the odd ones.
    rows = array("I", bytes(TABLE_ROW * len(sizes)))
    rows[::2] = array("I", sizes)
    rows[1::2] = array("I", list(map(crc32, payloads)))
    if sys.byteorder == "big":
        rows.byteswap()
    return sizes, rows.tobytes()


def encode_frame(
    payloads: Sequence[bytes],
    *,
    kind: int,
    codec: int,
    first_seq: int,
    enqueued_ns: int,
    synced_seq: int,
    marker: bytes,
    offset: int,
    flags: int = 0,
    table: bytes | None = None,
    raw_size: int = 0,
) -> list[bytes]:
    """A whole frame in pieces, for this offset of this segment and no other place.

    `table` and `raw_size` are those of the payloads, where the caller has them already.
    """
    count = len(payloads)
    if table is None:
        sizes, table = encode_table(payloads)
        raw_size = sum(sizes)
    body: Sequence[bytes] = payloads
    body_size, body_crc = raw_size, 0
    if codec:
        packed = compression.compress(codec, b"".join(payloads))
        if len(packed) < raw_size:
            body, body_size, body_crc = (packed,), len(packed), crc32(packed)
        else:
            codec = compression.NONE
    fields = (
        kind,
        codec,
        flags,
        count,
        first_seq,
        enqueued_ns,
        synced_seq,
        raw_size,
        body_size,
        crc32(table),
        body_crc,
    )
    blank = _FRAME.pack(marker, 0, *fields)
    crc = crc32(_OFFSET.pack(offset), crc32(blank[12:], crc32(marker)))
    return [_FRAME.pack(marker, crc, *fields), table, *body]


def decode_frame_header(data: bytes | memoryview, start: int, marker: bytes, offset: int) -> FrameHeader | None:
    """The header at `start` of `data`, which is at `offset` of its file; None when it isn't a valid one."""
    raw = bytes(data[start : start + FRAME_HEADER])
    if len(raw) < FRAME_HEADER or raw[:8] != marker:
        return None
    fields = _FRAME.unpack(raw)
    if fields[1] != crc32(_OFFSET.pack(offset), crc32(raw[12:], crc32(marker))):
        return None
    header = FrameHeader._make((fields[2], fields[3], *fields[5:], fields[4]))
    sane = (
        header.kind in (GROUP, ATOMIC)
        and compression.known(header.codec)
        and 0 < header.records <= MAX_RECORDS
        and header.raw_size <= MAX_FRAME
        and header.body_size <= header.raw_size
    )
    return header if sane else None


def decode_frame_sizes(header: FrameHeader, table: bytes | memoryview) -> tuple[int, ...] | None:
    """The lengths of the payloads of the frame with this table; None when the table is damaged."""
    if len(table) != TABLE_ROW * header.records or crc32(table) != header.table_crc:
        return None
    return struct.unpack(f"<{2 * header.records}I", table)[::2]


def decode_frame_body(header: FrameHeader, data: memoryview) -> DecodedFrame | None:
    """The payloads of the frame whose table and body are `data`; None when the table or a packed body is damaged."""
    split = TABLE_ROW * header.records
    table = data[:split]
    if len(data) != split + header.body_size or crc32(table) != header.table_crc:
        return None
    rows = struct.unpack(f"<{2 * header.records}I", table)
    sizes, crcs = rows[::2], rows[1::2]
    if sum(sizes) != header.raw_size:
        return None
    body = data[split:]
    if header.codec:
        if crc32(body) != header.body_crc:
            return None
        unpacked = compression.decompress(header.codec, body, header.raw_size)
        if unpacked is None:
            return None
        body = memoryview(unpacked)
    places = pairwise(accumulate(sizes, initial=0))
    if header.raw_size < _SMALL * header.records:
        # One copy of all is cheaper than a view of each.
        whole = bytes(body)
        found = [whole[start:end] for start, end in places]
    else:
        found = [bytes(body[start:end]) for start, end in places]
    if tuple(map(crc32, found)) == crcs:
        return DecodedFrame(list(found), 0)
    checked = [payload if crc32(payload) == crc else None for payload, crc in zip(found, crcs, strict=True)]
    return DecodedFrame(checked, checked.count(None))


def encode_footer(footer: SegmentFooter, header: SegmentHeader) -> bytes:
    """The end of a sealed segment: what it holds, and the header once more, far from the other copies."""
    values = tuple(footer[:8])
    flags = (_SYNCED if footer.synced else 0) | (_COMPACTED if footer.compacted else 0)
    blank = _FOOTER.pack(FOOTER_MAGIC, 0, flags, 0, *values)
    crc = crc32(_OFFSET.pack(footer.data_end), crc32(blank[12:], crc32(header.marker)))
    data = blank[:8] + struct.pack("<I", crc) + blank[12:]
    return data if header.version == 1 else data + _header_copy(header)


def decode_footer(data: bytes, marker: bytes, offset: int) -> SegmentFooter | None:
    """The footer in `data`, which is at `offset` of its file; None when it isn't a valid one for that place."""
    data = data[:_FOOTER_1]
    if len(data) != _FOOTER_1 or data[:8] != FOOTER_MAGIC:
        return None
    fields = _FOOTER.unpack(data)
    if fields[1] != crc32(_OFFSET.pack(offset), crc32(data[12:], crc32(marker))):
        return None
    footer = SegmentFooter._make((*fields[4:], bool(fields[2] & _SYNCED), bool(fields[2] & _COMPACTED)))
    sane = footer.data_end == offset and footer.records <= footer.next_seq - footer.first_seq
    return footer if sane else None
