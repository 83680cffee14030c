"""The bytes of format 2, and of format 1 as it is read: golden files, round trips, and a fuzzed parser."""

from __future__ import annotations

import asyncio
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from durable import fuzz_records
from durable_kit import ROOT, RecordingFiles, drain, opened
from hypothesis import given, settings
from hypothesis import strategies as st

from batchqueue_async.durable.disk import acklog, compression
from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.disk.acklog import Entry
from batchqueue_async.durable.state.ranges import RangeMap, RangeSet
from batchqueue_async.durable.state.table import Segment, merge_attempts

GOLDEN = Path(__file__).parents[1] / "golden" / "durable"
MARKER = b"\x01\x02\x03\x04\x05\x06\x07\x08"
HEADER = fmt.SegmentHeader(bytes(range(16)), 7, 100, MARKER, 1_700_000_000_000_000_000)
HEADER_1 = HEADER._replace(version=1)


def golden_segment(header: fmt.SegmentHeader = HEADER) -> bytes:
    """A sealed segment with a group and an atomic put, which is in two frames where the format knows that."""
    data = fmt.encode_segment_header(header)
    common = {"codec": 0, "enqueued_ns": 1_700_000_000_000_000_001, "marker": MARKER}
    data += b"".join(
        fmt.encode_frame([b"alpha", b""], kind=fmt.GROUP, first_seq=100, synced_seq=100, offset=len(data), **common)
    )
    atomic = [[b"beta", b"gamma"]] if header.version == 1 else [[b"beta"], [b"gamma"]]
    seq = 102
    for at, payloads in enumerate(atomic):
        flags = (fmt.CONTINUED if at else 0) | (fmt.MORE if at < len(atomic) - 1 else 0)
        data += b"".join(
            fmt.encode_frame(
                payloads, kind=fmt.ATOMIC, first_seq=seq, synced_seq=102, offset=len(data), flags=flags, **common
            )
        )
        seq += len(payloads)
    times = (1_700_000_000_000_000_001, 1_700_000_000_000_000_001)
    frames = 1 + len(atomic)
    return data + fmt.encode_footer(fmt.SegmentFooter(7, 100, 104, 4, frames, *times, len(data), synced=True), header)


def golden_hint() -> bytes:
    settled = RangeSet()
    settled.add(100, 101)
    data = acklog.encode_header(7, MARKER) + acklog.encode_snapshot(settled, 100, MARKER)
    entries = [Entry(acklog.LEASED, 101, 103, 3), Entry(acklog.ACKED, 101, 102), Entry(acklog.SYNCED, 100, 104)]
    return data + acklog.encode_entries(entries, 100, MARKER)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("segment.bqs", lambda: golden_segment(HEADER_1)),
        ("segment-2.bqs", golden_segment),
        ("hint.ack", golden_hint),
    ],
)
def test_the_format_has_not_changed(name, make):
    assert make() == (GOLDEN / name).read_bytes(), (
        "a change here is a new format number: see docs/spec/durable-format.md"
    )


@pytest.mark.parametrize("name", ["segment.bqs", "segment-2.bqs"])
async def test_the_golden_queue_is_read(name):
    base = {
        ROOT / "seg-000000000007.bqs": (GOLDEN / name).read_bytes(),
        ROOT / "seg-000000000007.ack": (GOLDEN / "hint.ack").read_bytes(),
    }
    async with opened(RecordingFiles(base=base)) as queue:
        assert queue.queue_id == bytes(range(16)).hex()
        lease = await queue.lease()
        assert [(record.seq, record.payload, record.attempts) for record in lease.records] == [
            (102, b"beta", 4),
            (103, b"gamma", 1),
        ]
        assert lease.records[0].enqueued_at == pytest.approx(1_700_000_000)
        assert await queue.put(b"next") == 104


PAYLOADS = st.lists(st.binary(max_size=300), min_size=1, max_size=20)


@given(payloads=PAYLOADS, codec=st.integers(0, 3), seq=st.integers(0, 1 << 60), offset=st.integers(128, 1 << 50))
@settings(max_examples=200, deadline=None)
def test_a_frame_comes_back(payloads, codec, seq, offset):
    if codec:
        pytest.importorskip("cramjam")
    data = b"".join(
        fmt.encode_frame(
            payloads,
            kind=fmt.GROUP,
            codec=codec,
            first_seq=seq,
            enqueued_ns=5,
            synced_seq=seq,
            marker=MARKER,
            offset=offset,
        )
    )
    header = fmt.decode_frame_header(data, 0, MARKER, offset)
    assert header is not None
    assert (header.first_seq, header.records, header.size) == (seq, len(payloads), len(data))
    assert len(data) <= fmt.frame_size(len(payloads), sum(map(len, payloads)))
    decoded = fmt.decode_frame_body(header, memoryview(data)[fmt.FRAME_HEADER :])
    assert decoded == fmt.DecodedFrame(payloads, 0)
    assert fmt.decode_frame_header(data, 0, MARKER, offset + 1) is None
    assert fmt.decode_frame_header(data, 0, MARKER[::-1], offset) is None


@given(
    data=st.binary(max_size=400),
    payloads=PAYLOADS,
    cuts=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 60), st.binary(max_size=60)), max_size=6),
    codec=st.integers(0, 3),
)
@settings(max_examples=400, deadline=None)
def test_fuzz_the_record_parser(data, payloads, cuts, codec):
    if codec:
        pytest.importorskip("cramjam")
    frame = b"".join(
        fmt.encode_frame(
            payloads, kind=fmt.ATOMIC, codec=codec, first_seq=1, enqueued_ns=5, synced_seq=1, marker=MARKER, offset=128
        )
    )
    hurt = bytearray(fmt.encode_segment_header(HEADER) + frame + data)
    for at, size, new in cuts:
        hurt[at : at + size] = new
    fuzz_records.check_parser(bytes(hurt), set(payloads))


@given(data=st.binary(max_size=600))
@settings(max_examples=300, deadline=None)
def test_fuzz_whole_files(data):
    fuzz_records.one_input(data)


def test_the_fuzz_target_runs_without_atheris(monkeypatch, capsys):
    monkeypatch.setattr(fuzz_records, "atheris", None)
    monkeypatch.setattr(sys, "argv", ["fuzz_records.py", "--seconds", "0.2", "--seed", "1"])
    fuzz_records.main()
    assert "random inputs, seed 1" in capsys.readouterr().out


def test_a_codec_that_lies_about_its_size_is_damage():
    pytest.importorskip("cramjam")
    for codec in (1, 2, 3):
        packed = memoryview(compression.compress(codec, b"a" * 100))
        assert compression.decompress(codec, packed, 100) == b"a" * 100
        assert compression.decompress(codec, packed, 99) is None
        assert compression.decompress(codec, packed, 101) is None
        assert compression.decompress(codec, memoryview(b"nonsense"), 100) is None
    assert compression.compress(0, b"x") == b"x"


def test_a_damaged_snapshot_ends_the_reading_of_a_hint():
    data = bytearray(golden_hint())
    data[acklog.HEADER + acklog.ENTRY] ^= 1
    hint = acklog.decode(bytes(data), number=7, marker=MARKER, first_seq=100, next_seq=104)
    assert hint.settled.count == 0
    assert hint.attempts == []


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=30)


@given(ranges=RANGES, low=st.integers(0, 80), span=st.integers(0, 40), at=st.integers(0, 80))
def test_a_range_set_is_a_set(ranges, low, span, at):
    found, model = RangeSet(), set[int]()
    for start, size in ranges:
        new = set(range(start, start + size)) - model
        assert found.add(start, start + size) == len(new)
        model |= new
    assert found.count == len(model)
    assert {number for number in range(100) if number in found} == model
    missing = {number for start, stop in found.missing(low, low + span) for number in range(start, stop)}
    assert missing == set(range(low, low + span)) - model
    lows = list(found)
    assert all(before[1] < after[0] for before, after in pairwise(lows))
    tail = found.split(at)
    assert {number for number in range(100) if number in tail} == {number for number in model if number >= at}
    assert found.count + tail.count == len(model)


@given(
    entries=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10), st.integers(1, 5)), max_size=12), settled=RANGES
)
def test_attempts_are_the_highest_of_each_record(entries, settled):
    done = RangeSet()
    for low, size in settled:
        done.add(low, low + size)
    merged = merge_attempts([Entry(acklog.LEASED, low, low + size, times) for low, size, times in entries], done)
    expected = {
        number: max((times for low, size, times in entries if low <= number < low + size), default=0)
        for number in range(60)
        if number not in done
    }
    assert {number: times for low, high, times in merged for number in range(low, high)} == {
        number: times for number, times in expected.items() if times
    }
    entry = Segment(HEADER._replace(first_seq=0), 128)
    entry.attempts = RangeMap(merged)
    parts = list(entry.attempts.within(3, 40))
    assert [part[0] for part in parts] == [3, *[part[1] for part in parts[:-1]]]
    assert parts[-1][1] == 40
    for low, high, times in parts:
        assert all(expected.get(number, 0) == times for number in range(low, high) if number not in done)


async def test_a_hint_is_made_small_again(monkeypatch):
    from batchqueue_async.durable.state import queue_state as state

    monkeypatch.setattr(state, "_COMPACT", 200)
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put_many([b"%d" % number for number in range(10)])
        await queue.lease(2)
        for _ in range(40):
            lease = await queue.lease(3)
            await lease.nack()
            await queue.put(b"x")
            await asyncio.sleep(0.02)  # the hint is written a moment later
        assert max(len(files.nodes[node]) for path, node in files.entries.items() if path.suffix == ".ack") < 800
        killed = files.snapshot()
    async with opened(killed) as again:
        lease = await again.lease(3)
        assert [record.attempts for record in lease.records] == [2, 2, 41]
        assert len(await drain(again)) == 47
