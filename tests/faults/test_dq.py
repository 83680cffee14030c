"""One test for each fault of the peers that the reference lists; none may be reproducible here."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pickle
import tracemalloc

import pytest
from durable_kit import ROOT, RecordingFiles, drain, eventually, flip, io_error, opened, segments

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.errors import CorruptionError, DiskFullError, LockedError


def payload(number: int) -> bytes:
    return b"record %06d" % number


async def test_dq_1_interleaved_reads_and_writes_lose_nothing(tmp_path):
    config = DurableConfig(durability="os", memory_bytes=1_000, memory_blocks=4, segment_bytes=20_000)
    found: list[bytes] = []
    async with DurableQueue.open(tmp_path, config) as queue:

        async def produce() -> None:
            for start in range(0, 30_000, 100):
                await queue.put_many([payload(start + at) for at in range(100)])

        async def consume() -> None:
            while len(found) < 30_000:
                async with await queue.lease(77) as lease:
                    found.extend(record.payload for record in lease.records)

        await asyncio.gather(produce(), consume())
        assert queue.stats().spilled > 0, "the disk was never read: this proved nothing"
    assert found == [payload(number) for number in range(30_000)]


async def test_dq_2_a_reopened_queue_overwrites_nothing():
    files = RecordingFiles()
    for start in range(0, 5_000, 1_000):
        async with opened(files, segment_bytes=10_000) as queue:
            await queue.put_many([payload(start + at) for at in range(1_000)])
    async with opened(files) as queue:
        assert list((await drain(queue)).values()) == [payload(number) for number in range(5_000)]


@pytest.mark.parametrize("level", ["always", "interval", "os"])
async def test_dq_3_what_put_confirmed_survives_without_a_further_operation(level):
    files = RecordingFiles()
    queue = await opened(files, durability=level)
    await asyncio.gather(*(queue.put(payload(number)) for number in range(200)))
    killed = files.killed(len(files.log))
    await queue.close()
    async with opened(killed) as again:
        assert len(await drain(again)) == 200


async def test_dq_3_the_interval_timer_fires_when_the_queue_is_idle():
    files = RecordingFiles()
    async with opened(files, durability="interval", sync_interval=0.01) as queue:
        await queue.put(b"idle")
        await eventually(lambda: queue.stats().syncs)
        lost = files.all_unsynced_lost(len(files.log))
    async with opened(lost) as again:
        assert list((await drain(again)).values()) == [b"idle"]


async def test_dq_3_a_stale_os_queue_is_synced_too():
    files = RecordingFiles()
    async with opened(files, durability="os", stale_flush=0.01) as queue:
        await queue.put(b"stale")
        await eventually(lambda: queue.stats().syncs)
        assert list((await drain(await opened(files.all_unsynced_lost(len(files.log))))).values()) == [b"stale"]


async def test_dq_4_counters_equal_a_full_scan_after_a_crash_and_dropping_ends():
    files = RecordingFiles()
    queue = await opened(
        files, durability="os", memory_bytes=8_000, segment_bytes=1_000, max_records=50, overflow="drop_oldest"
    )
    for number in range(120):
        await queue.put(payload(number))
    lease = await queue.lease(7)
    await lease.ack(record.seq for record in lease.records[::2])
    async with asyncio.timeout(60):
        await asyncio.sleep(0.05)  # the hint is written a moment later
    files = files.killed(len(files.log))
    async with opened(files) as again:
        counted = again.stats().records
        assert again.recovery.records == counted == len(await drain(again)) == 46


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_dq_5_a_full_disk_blocks_puts_and_nothing_else(number):
    files = RecordingFiles()
    async with opened(files, segment_bytes=500) as queue:
        await queue.put_many([payload(at) for at in range(10)])
        files.fault = lambda call, path: io_error(number) if call == "write" and path.suffix == ".bqs" else None
        blocked = asyncio.create_task(queue.put(b"later"))
        lease = await queue.lease(10)
        assert len(lease) == 10
        assert await lease.ack() == 10
        await asyncio.sleep(0.3)
        assert not blocked.done()
        assert queue.stats().disk_full > 0
        files.fault = None
        assert await blocked > 0
        assert list((await drain(queue)).values()) == [b"later"]


async def test_dq_6_a_flipped_payload_costs_one_record(tmp_path):
    async with DurableQueue.open(tmp_path) as queue:
        await queue.put_many([payload(number) for number in range(100)])
    (path,) = segments(tmp_path)
    flip(path, path.read_bytes().index(payload(42)))
    async with DurableQueue.open(tmp_path) as queue:
        found = await drain(queue)
        assert list(found.values()) == [payload(number) for number in range(100) if number != 42]
        assert queue.stats().damaged == 1
    assert list((tmp_path / "quarantine").iterdir())


async def test_dq_6_a_flipped_payload_costs_one_record_after_a_crash_as_well(tmp_path):
    files = RecordingFiles()
    queue = await opened(files)
    await queue.put_many([payload(number) for number in range(100)])
    lease = await queue.lease(1)
    await asyncio.sleep(0.05)  # the hint, with the proof that the frame was durable, is written a moment later
    assert lease
    after = files.snapshot()
    (path,) = [path for path in after.entries if path.suffix == ".bqs"]
    data = after.nodes[after.entries[path]]
    data[data.index(payload(42))] ^= 1
    async with opened(after) as again:
        assert again.recovery.damaged_records == 1
        assert len(await drain(again)) == 99
    await queue.close()


async def test_dq_6_a_flipped_header_costs_its_frame_and_a_search(tmp_path):
    async with DurableQueue.open(tmp_path) as queue:
        for number in range(100):
            await queue.put(payload(number))
    (path,) = segments(tmp_path)
    flip(path, path.read_bytes().index(payload(42)) - 30)
    async with DurableQueue.open(tmp_path) as queue:
        assert list((await drain(queue)).values()) == [payload(number) for number in range(100) if number != 42]
        assert queue.stats().damaged == 1


async def test_dq_7_opening_twice_names_the_holder(tmp_path):
    async with DurableQueue.open(tmp_path):
        with pytest.raises(LockedError, match=rf'"pid": {os.getpid()}'):
            await DurableQueue.open(tmp_path)
    async with DurableQueue.open(tmp_path) as queue:
        assert await queue.put(b"free again") == 1


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage"])
async def test_dq_8_metadata_is_only_a_hint(tmp_path, damage):
    async with DurableQueue.open(tmp_path) as queue:
        await queue.put_many([payload(number) for number in range(100)])
        await (await queue.lease(10)).ack()
        queue_id = queue.queue_id
    for path in [tmp_path / "queue.id", tmp_path / "lock", *tmp_path.glob("*.ack")]:
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(b"" if damage == "empty" else os.urandom(100))
    async with DurableQueue.open(tmp_path) as queue:
        assert queue.queue_id == queue_id
        assert len(await drain(queue)) == 100


async def test_dq_9_a_crash_between_lease_and_ack_loses_nothing():
    files = RecordingFiles()
    queue = await opened(files)
    await queue.put_many([payload(number) for number in range(10)])
    assert len(await queue.lease(10)) == 10
    await asyncio.sleep(0.05)
    async with opened(files.snapshot()) as again:
        lease = await again.lease(10)
        assert [record.payload for record in lease.records] == [payload(number) for number in range(10)]
        assert {record.attempts for record in lease.records} == {2}, "the attempt of the crashed process counts"
    await queue.close()


async def test_dq_10_recovery_deletes_nothing_that_is_in_flight():
    files = RecordingFiles()
    queue = await opened(files)
    await queue.put_many([payload(number) for number in range(10)])
    await queue.lease(5)
    await asyncio.sleep(0.05)
    killed = files.snapshot()
    await queue.close()
    again = await opened(killed)
    # And a crash during or right after that recovery:
    for moment in range(len(killed.log) + 1):
        async with opened(killed.killed(moment)) as third:
            assert len(await drain(third)) == 10
    await again.close()


async def test_dq_11_put_returns_after_the_sync():
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put(b"x")
        kinds = [op.kind for op in files.log if op.path.suffix == ".bqs"]
        assert kinds == ["create", "write", "sync", "write", "sync"]
        assert list((await drain(await opened(files.all_unsynced_lost(len(files.log))))).values()) == [b"x"]


async def test_dq_12_a_bad_segment_is_quarantined_once(tmp_path):
    config = DurableConfig(segment_bytes=1_000)
    async with DurableQueue.open(tmp_path, config) as queue:
        for start in range(0, 100, 10):
            await queue.put_many([payload(start + at) for at in range(10)])
    broken = segments(tmp_path)[3]
    broken.write_bytes(os.urandom(2_000))
    async with DurableQueue.open(tmp_path) as queue:
        assert queue.recovery.quarantined == (broken.name,)
        assert 0 < len(await drain(queue)) < 100
    async with DurableQueue.open(tmp_path) as queue:
        assert queue.recovery.quarantined == ()
        assert queue.recovery.scanned == 0
    assert [path.name.startswith(broken.name) for path in (tmp_path / "quarantine").iterdir()] == [True]


@pytest.mark.parametrize("level", ["always", "interval"])
async def test_dq_13_a_descriptor_is_never_used_after_a_failed_sync(level):
    files = RecordingFiles()
    async with opened(files, durability=level, sync_interval=0.01) as queue:
        await queue.put(b"before")
        broken: list[int] = []

        def fault(call, path):
            if call == "sync" and not broken:
                broken.append(len(files.calls))
                broken.append(int(path.name[4:-4]))
                return io_error()
            return None

        files.fault = fault
        seqs = [await queue.put(b"during"), await queue.put(b"after")]
        await eventually(lambda: queue.stats().sync_errors and queue.stats().syncs)
        assert seqs == [2, 3]
        later = files.calls[broken[0] :]
        assert [
            call for call, path in later if call in ("write", "sync") and f"{broken[1]:012d}.bqs" in path.name
        ] == []
        survivors = await drain(await opened(files.all_unsynced_lost(len(files.log))))
        assert survivors == {1: b"before", 2: b"during", 3: b"after"}
        assert survivors == await drain(queue)


async def test_dq_13_when_the_rewrite_fails_too_the_puts_fail():
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put(b"before")
        files.fault = lambda call, path: io_error() if call == "sync" else None
        with pytest.raises(Exception, match="nothing was put"):
            await queue.put(b"lost")
        files.fault = None
        assert await queue.put(b"after") == 2
        assert list((await drain(queue)).values()) == [b"before", b"after"]
    async with opened(files.snapshot()) as again:
        assert list((await drain(again)).values()) == [b"before", b"after"]


async def test_dq_14_start_up_memory_is_bounded(tmp_path):
    config = DurableConfig(durability="os", segment_bytes=4 << 20, memory_bytes=1 << 20)
    async with DurableQueue.open(tmp_path, config) as queue:
        for _ in range(64):
            await queue.put_many([os.urandom(1_000)] * 1_000)
    tracemalloc.start()
    try:
        async with DurableQueue.open(tmp_path, config) as queue:
            assert queue.stats().records == 64_000
            await queue.lease(10)
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


async def test_dq_15_closing_keeps_what_is_not_acknowledged():
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put_many([payload(number) for number in range(10)])
        lease = await queue.lease(6)
        await lease.nack(delay=1_000, seqs=[1, 2])
    async with opened(files) as queue:
        assert len(await drain(queue)) == 10


async def test_dq_16_nothing_on_disk_is_ever_unpickled(tmp_path, monkeypatch):
    async with DurableQueue.open(tmp_path) as queue:
        await queue.put(pickle.dumps(print))
        lease = await queue.lease(1)
        await lease.dead_letter("a pickle")

    def refuse(*_):
        raise AssertionError("something was unpickled")

    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    async with DurableQueue.open(tmp_path) as queue:
        (letter,) = await queue.dead_letters()
        assert letter.payload == pickle.dumps(print)


async def test_a_newer_version_is_refused_and_left_alone(tmp_path):
    async with DurableQueue.open(tmp_path) as queue:
        await queue.put(b"from the future")
    (path,) = segments(tmp_path)
    header = fmt.decode_segment_header(path.read_bytes()[: fmt.DATA_START])
    assert header is not None
    path.write_bytes(fmt.encode_segment_header(header._replace(version=3)) + path.read_bytes()[fmt.DATA_START :])
    before = {entry: entry.read_bytes() for entry in tmp_path.iterdir() if entry.name != "lock"}
    with pytest.raises(CorruptionError, match="format version 3"):
        await DurableQueue.open(tmp_path)
    assert before == {entry: entry.read_bytes() for entry in tmp_path.iterdir() if entry.name != "lock"}
    assert json.loads((tmp_path / "queue.id").read_text())["format"] == 2


async def test_reject_and_block_timeout_say_so():
    for options in ({"overflow": "reject"}, {"block_timeout": 0.0}):
        files = RecordingFiles(capacity=2_000)
        async with opened(files, path=ROOT, **options) as queue:
            await queue.put(bytes(300))
            with pytest.raises(DiskFullError):
                await asyncio.gather(*(queue.put(bytes(300)) for _ in range(8)))
            assert len(await drain(queue, ack=True)) >= 1
