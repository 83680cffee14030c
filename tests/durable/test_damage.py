"""A small queue's files, damaged in every way: no crash, no hang, no wrong payload, no large allocation."""

from __future__ import annotations

import asyncio
import os
from random import Random

import pytest
from durable_kit import ROOT, RecordingFiles, drain, opened

from batchqueue_async.durable.disk import format as fmt

SEGMENT = ROOT / "seg-000000000001.bqs"


async def made(**options) -> tuple[dict, dict[int, bytes]]:
    """The files of a closed queue with a few frames of all kinds, and its records."""
    files = RecordingFiles()
    async with opened(files, **options) as queue:
        for number in range(4):
            await queue.put(b"single %d " % number + bytes(range(20)))
        await queue.put_many([b"many %d " % number * 3 for number in range(4)])
        await asyncio.gather(*(queue.put(b"gathered %d" % number) for number in range(3)))
        lease = await queue.lease(2)
        await lease.ack()
        records = {**{record.seq: record.payload for record in lease.records}, **await drain(queue)}
    return {path: bytes(files.nodes[node]) for path, node in files.entries.items()}, records


async def recovered(content: dict) -> tuple[dict[int, bytes], object]:
    fresh = RecordingFiles(base=content)
    fresh.directories.add(ROOT)
    async with asyncio.timeout(20):
        async with opened(fresh) as queue:
            found = await drain(queue)
            assert queue.stats().records == len(found)
            return found, queue.recovery


def right(found: dict[int, bytes], records: dict[int, bytes]) -> None:
    for seq, payload in found.items():
        assert records[seq] == payload


OTHERS = [pytest.param(each, marks=pytest.mark.untraced) for each in ("lz4", "snappy", "zstd")]


@pytest.mark.parametrize("compression", ["none", *OTHERS])
async def test_every_byte_flipped(compression):
    if compression != "none":
        pytest.importorskip("cramjam")
    content, records = await made(compression=compression)
    data = content[SEGMENT]
    for at in range(len(data)):
        for mask in (0x01, 0xFF) if compression == "none" else (0x10,):
            hurt = bytearray(data)
            hurt[at] ^= mask
            found, _ = await recovered({**content, SEGMENT: bytes(hurt)})
            right(found, records)
            assert len(found) >= len(records) - 2 - 4, f"byte {at} costs more than a frame"


async def test_every_byte_of_a_hint_flipped_loses_nothing():
    content, records = await made()
    (hint,) = [path for path in content if path.suffix == ".ack"]
    for at in range(len(content[hint])):
        hurt = bytearray(content[hint])
        hurt[at] ^= 0x41
        found, _ = await recovered({**content, hint: bytes(hurt)})
        right(found, records)
        assert set(range(3, 12)) <= set(found)


@pytest.mark.untraced
async def test_every_truncation():
    content, records = await made()
    data = content[SEGMENT]
    previous = -1
    for size in range(len(data) + 1):
        found, _ = await recovered({**content, SEGMENT: data[:size]})
        right(found, records)
        assert len(found) >= previous or size == len(data), "a longer file holds less"
        previous = len(found)


@pytest.mark.parametrize("tail", [bytes(5_000), os.urandom(5_000), b"\xff" * 5_000, b"BQASEG\r\n" * 500])
async def test_a_tail_that_is_no_frame_is_cut_and_kept_aside(tail):
    content, records = await made()
    data = content[SEGMENT][: -fmt.FOOTER]
    fresh = RecordingFiles(base={**content, SEGMENT: data + tail})
    fresh.directories.add(ROOT)
    async with opened(fresh) as queue:
        found = await drain(queue)
        assert queue.recovery.torn_bytes == len(tail)
        assert not queue.recovery.clean
    right(found, records)
    assert len(found) == len(records) - 2
    assert any(
        path.parent.name == "quarantine" and bytes(fresh.nodes[node]) == tail for path, node in fresh.entries.items()
    )
    async with opened(fresh.snapshot()) as queue:
        assert queue.recovery.clean
        assert queue.recovery.torn_bytes == 0


async def test_a_huge_length_allocates_nothing():
    content, _ = await made()
    data = bytearray(content[SEGMENT][: -fmt.FOOTER])
    marker = bytes(data[48:56])
    for at in range(fmt.DATA_START, len(data)):
        if data[at : at + 8] == marker:
            data[at + 44 : at + 52] = b"\xff" * 8
    fresh = RecordingFiles(base={**content, SEGMENT: bytes(data)})
    fresh.directories.add(ROOT)
    sizes: list[int] = []
    read = fresh.read
    fresh.read = lambda descriptor, size, offset: sizes.append(size) or read(descriptor, size, offset)  # type: ignore[method-assign]
    async with opened(fresh) as queue:
        assert await drain(queue) == {}
    assert max(sizes) <= max(4096, len(data))


async def test_foreign_missing_and_misnamed_files():
    content, records = await made()
    other, _ = await made()
    extra = {
        ROOT / "seg-000000000007.bqs": other[SEGMENT],  # another queue's, and another number's
        ROOT / "seg-000000000008.bqs": b"",
        ROOT / "seg-000000000009.ack": b"stray",
        ROOT / "seg-1.bqs": b"not a name of ours",
        ROOT / "notes.txt": b"mine",
    }
    fresh = RecordingFiles(base={**content, **extra})
    fresh.directories.add(ROOT)
    async with opened(fresh) as queue:
        right(await drain(queue), records)
        assert queue.recovery.quarantined == ("seg-000000000007.bqs",)
    assert ROOT / "notes.txt" in fresh.entries
    assert ROOT / "seg-1.bqs" in fresh.entries
    assert ROOT / "seg-000000000009.ack" not in fresh.entries
    gone = {path: data for path, data in content.items() if path != SEGMENT}
    found, _ = await recovered(gone)
    assert found == {}


async def test_a_payload_that_is_a_copy_of_the_file_is_only_a_payload():
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put_many([b"first", b"second"])
        copy = bytes(files.nodes[files.entries[SEGMENT]])
        await queue.put(copy)
        await queue.put(copy + copy[128:])
        lease = await queue.lease(10)
        await lease.nack()
    content = {path: bytes(files.nodes[node]) for path, node in files.entries.items()}
    data = content[SEGMENT]
    allowed = {b"first", b"second", copy, copy + copy[128:]}
    for at in range(0, len(data), 3):
        hurt = bytearray(data)
        hurt[at] ^= 0x55
        found, _ = await recovered({**content, SEGMENT: bytes(hurt)})
        assert set(found.values()) <= allowed
        assert len(found) == len(set(found.values()))


async def test_random_files_never_crash_recovery():
    random = Random(7)
    content, records = await made()
    data = content[SEGMENT]
    for _ in range(300):
        hurt = bytearray(data)
        for _ in range(random.randint(1, 20)):
            at = random.randrange(len(hurt))
            action = random.randrange(4)
            if action == 0:
                hurt[at] = random.randrange(256)
            elif action == 1:
                del hurt[at : at + random.randrange(40)]
            elif action == 2:
                hurt[at:at] = hurt[: random.randrange(200)]
            else:
                hurt[at : at + 30] = bytes(30)
            if not hurt:
                break
        found, _ = await recovered({**content, SEGMENT: bytes(hurt)})
        right(found, records)


async def test_damage_found_while_reading_is_counted_and_not_delivered_again():
    content, records = await made()
    data = bytearray(content[SEGMENT])
    data[data.index(b"single 2")] ^= 1
    fresh = RecordingFiles(base={**content, SEGMENT: bytes(data)})
    fresh.directories.add(ROOT)
    async with opened(fresh) as queue:
        found = await drain(queue)
        assert queue.stats().damaged == 1
        assert len(found) == len(records) - 3
    async with opened(fresh.snapshot()) as queue:
        assert queue.stats().records == len(records) - 3
        assert len(await drain(queue)) == len(records) - 3
        assert queue.stats().damaged == 0


async def test_a_segment_sealed_with_damage_inside_is_not_scanned_for_ever():
    content, _ = await made()
    data = bytearray(content[SEGMENT][: -fmt.FOOTER])
    data[data.index(b"single 2")] ^= 1
    fresh = RecordingFiles(base={**content, SEGMENT: bytes(data)})
    fresh.directories.add(ROOT)
    for scanned in (1, 0, 0):
        async with opened(fresh) as queue:
            assert queue.recovery.scanned == scanned
            assert queue.stats().records == 8
        fresh = fresh.snapshot()
    hints = {path for path in fresh.entries if path.suffix == ".ack"}
    for path in hints:
        del fresh.entries[path]
    for scanned in (1, 0):
        async with opened(fresh) as queue:
            assert queue.recovery.scanned == scanned
            assert queue.stats().records == 10
            assert len(await drain(queue)) == 10
        fresh = fresh.snapshot()
