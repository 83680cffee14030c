"""D-26: a few old records and the files of acknowledgements hold no more room than they need."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from durable_kit import ROOT, GatedRunner, RecordingFiles, drain, io_error, opened

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.durable.disk import inspect
from batchqueue_async.errors import DiskFullError
from batchqueue_async.testing import run_virtual

SMALL: dict[str, Any] = {"segment_bytes": 4_000, "write_buffer": 700, "durability": "os"}
CALLS = ["create", "open_read", "read", "write", "sync", "replace", "sync_directory", "rename"]


class CountingFiles(RecordingFiles):
    """Counts the bytes that are read."""

    read_bytes = 0

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        data = super().read(descriptor, size, offset)
        self.read_bytes += len(data)
        return data


async def pinned(files: RecordingFiles, *, keep: int = 20, count: int = 200, **options: Any) -> tuple[Any, dict]:
    """A queue of which every `keep`-th record waits for a long delay and the others are settled."""
    queue = await opened(files, **{**SMALL, **options})
    await asyncio.gather(*(queue.put(b"%05d" % at + bytes(Random(at).randbytes(95))) for at in range(count)))
    left: dict[int, bytes] = {}
    while lease := await queue.lease(10, wait=0):
        waiting = [record for record in lease.records if record.seq % keep == 0]
        left |= {record.seq: record.payload for record in waiting}
        await lease.nack(3_600, [record.seq for record in waiting])
        await lease.ack()
    return queue, left


def test_d_26_segments_that_old_records_pin_are_compacted_in_the_background():
    async def main() -> None:
        files = CountingFiles()
        queue, left = await pinned(files, count=1_000)
        before, start = files.used(), files.read_bytes
        await asyncio.sleep(60)
        stats = queue.stats()
        given = before - files.used()
        assert stats.compactions > 10
        assert given > before * 0.7
        # The last segment is not touched, and the files of acknowledgements change as well.
        assert abs(stats.compacted_bytes - given) < 4_000 + 16 * stats.segments
        assert files.read_bytes - start <= 4 * given
        assert stats.disk_bytes == files.used()
        assert await drain(queue) == {}
        queue.hurry()
        assert await drain(queue) == left
        await queue.close()
        async with opened(files.snapshot(), **SMALL) as again:
            assert again.recovery.repairs == ()
            assert again.recovery.scanned == 0
            assert await drain(again) == left
            assert again.stats().damaged == 0

    run_virtual(main())


def test_d_26_few_delayed_records_do_not_fill_the_quota():
    async def main() -> None:
        files = RecordingFiles()
        held = 0
        async with opened(files, max_bytes=64 << 10, overflow="reject", durability="os") as queue:
            for count in range(3_000):
                await queue.put(b"x" * 100)
                lease = await queue.lease(1, wait=0)
                if count % 61 == 1:
                    await lease.nack(3_600)
                    held += 1
                else:
                    await lease.ack()
                if count % 50 == 0:
                    await asyncio.sleep(0.012)
                assert files.used() <= 64 << 10
            assert queue.stats().records == held
            queue.hurry()
            assert len(await drain(queue)) == held

    run_virtual(main())


@pytest.mark.parametrize("overflow", ["block", "drop_oldest"])
def test_d_26_room_inside_old_segments_comes_before_a_drop_and_ends_a_wait(overflow):
    async def main() -> None:
        files = RecordingFiles()
        options = {"max_bytes": 64 << 10, "overflow": overflow, "durability": "os"}
        async with opened(files, **options) as queue:
            await asyncio.gather(*(queue.put_many([b"%03d" % at + bytes(300)]) for at in range(120)))
            lease = await queue.lease(120, wait=0)
            await lease.ack([record.seq for record in lease.records if record.seq % 8])
            async with asyncio.timeout(30):
                for at in range(60):
                    await queue.put_many([b"new%03d" % at + bytes(300)])
            assert queue.stats().dropped.get("oldest", 0) == 0
            assert queue.stats().compactions
            assert lease.unsettled == 15
            assert len(await drain(queue)) == 60

    run_virtual(main())


def test_d_26_a_crash_amid_compaction_loses_and_doubles_nothing():
    async def main() -> None:
        files = RecordingFiles()
        queue, left = await pinned(files, count=120)
        await queue.close()
        files = files.snapshot()
        queue = await opened(files, **SMALL)
        before = len(files.log)
        await asyncio.sleep(30)
        assert queue.stats().compactions > 2
        random = Random(7)
        for moment in range(before, len(files.log) + 1):
            for crashed in (
                files.killed(moment, torn=random.random()),
                files.all_unsynced_lost(moment),
                files.lost_power(moment, random),
                files.lost_power(moment, random),
            ):
                # What was acknowledged may be delivered again: it was not said to be durable. Nothing else changes.
                async with opened(crashed, **SMALL) as again:
                    assert again.recovery.damaged_records == 0
                    found = await drain(again)
                    assert {seq: found.get(seq) for seq in left} == left
                    assert again.stats().damaged == 0
                    assert again.stats().records == len(found)
                    assert not [name for name in crashed.names(ROOT) if name.endswith((".new", ".tmp"))]

    run_virtual(main())


@pytest.mark.parametrize(
    "call", ["create", "open_read", "read", "write", "sync", "replace", "sync_directory", "rename"]
)
def test_d_26_a_failure_at_any_call_leaves_the_segment_as_it_was(call):
    async def main() -> None:
        files = RecordingFiles()
        queue, left = await pinned(files, count=120)
        await queue.close()
        for skip in range(6):
            failing = files.snapshot()
            queue = await opened(failing, **SMALL)
            seen = 0

            def fault(name: str, path: Any, skip: int = skip) -> OSError | None:
                nonlocal seen
                seen += name == call
                return io_error() if name == call and seen == skip + 1 else None

            failing.fault = fault
            await asyncio.sleep(200)
            failing.fault = None
            queue.hurry()
            found = await drain(queue)
            if call not in ("read", "open_read"):
                assert found == left
            await queue.close()
            async with opened(failing.snapshot(), **SMALL) as again:
                assert await drain(again) == left

    run_virtual(main())


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("order", ["fifo", "freshest", "key"])
def test_d_26_whatever_consumers_do_while_segments_are_compacted(order, compression):
    """Random work with much that is held back; what is neither settled nor leased in the end is all there, once."""
    if compression != "none":
        pytest.importorskip("cramjam")

    async def main(seed: int) -> None:
        random = Random(seed)
        files = RecordingFiles()
        options: dict[str, Any] = {**SMALL, "order": order, "memory_bytes": 6_000, "compression": compression}
        if order == "key":
            options |= {"key": lambda payload: payload[:1]}
        queue = await opened(files, **options)
        owed: dict[int, bytes] = {}
        compactions = 0
        for step in range(250):
            kind = random.choice(["put", "put_many", "settle", "settle", "settle", "wait", "reopen"])
            if kind == "put":
                payloads = [random.randbytes(random.randint(1, 300)) for _ in range(10)]
                seqs = await asyncio.gather(*(queue.put(payload) for payload in payloads))
                owed |= dict(zip(seqs, payloads, strict=True))
            elif kind == "put_many":
                payloads = [random.randbytes(random.randint(1, 200)) for _ in range(random.randint(1, 40))]
                owed |= dict(zip(await queue.put_many(payloads), payloads, strict=True))
            elif kind == "settle":
                lease = await queue.lease(random.randint(1, 60), wait=0)
                for record in lease.records:
                    assert owed[record.seq] == record.payload
                kept = [record.seq for record in lease.records if record.seq % 7 == 0]
                await lease.nack(random.choice([0, 5, 500]), kept)
                gone = [record.seq for record in lease.records if record.seq % 7]
                await lease.ack(gone)
                owed = {seq: payload for seq, payload in owed.items() if seq not in set(gone)}
            elif kind == "wait":
                await asyncio.sleep(random.choice([0.01, 1, 10]))
                queue.compact()
            elif step % 3 == 0:
                compactions += queue.stats().compactions
                await queue.close()
                queue = await opened(files := files.snapshot(), **options)
        compactions += queue.stats().compactions
        queue.hurry()
        found: dict[int, bytes] = {}
        while lease := await queue.lease(50, wait=0):
            for record in lease.records:
                assert record.seq not in found
                found[record.seq] = record.payload
            await lease.ack()
        assert found == owed
        assert queue.stats().damaged == 0
        await queue.close()
        assert compactions

    for seed in range(3):
        run_virtual(main(seed))


def test_d_26_a_compacted_segment_without_its_acknowledgements_or_footer():
    async def main() -> None:
        files = RecordingFiles()
        queue, left = await pinned(files, count=200)
        await asyncio.sleep(60)
        assert queue.stats().compactions > 2
        await queue.close()
        whole = dict(files.snapshot().base)
        for path, data in whole.items():
            if path.suffix == ".ack":
                less = {other: content for other, content in whole.items() if other != path}
            elif path.suffix == ".bqs":
                less = {**whole, path: data[:-1]}
            else:
                continue
            async with opened(RecordingFiles(base=less), **SMALL) as again:
                assert again.recovery.damaged_records == 0
                found = await drain(again)
                assert {seq: found.get(seq) for seq in left} == left
                assert again.stats().damaged == 0

    run_virtual(main())


def test_d_26_a_segment_that_is_deleted_while_it_is_copied_does_not_come_back():
    async def main() -> None:
        GatedRunner.shut, GatedRunner.held = False, []
        files = RecordingFiles()
        queue = await DurableQueue.open(ROOT, DurableConfig(**SMALL), files=files, runner=GatedRunner)
        await asyncio.gather(*(queue.put(bytes(100)) for _ in range(100)))
        lease = await queue.lease(100, wait=0)
        await lease.ack([record.seq for record in lease.records if record.seq % 10])
        await asyncio.sleep(0.1)
        GatedRunner.shut = True
        queue.compact()
        await lease.ack()
        for _ in range(200):
            held, GatedRunner.held = GatedRunner.held, []
            for call in held:
                call()
            await asyncio.sleep(0.01)
        GatedRunner.shut = False
        names = files.names(ROOT)
        assert len([name for name in names if name.endswith(".bqs")]) == 1
        assert not [name for name in names if name.endswith(".new")]
        await queue.close()
        async with opened(files.snapshot(), **SMALL) as again:
            assert again.recovery.records == 0

    run_virtual(main())


async def test_d_26_on_the_real_disk(tmp_path):
    config = DurableConfig(segment_bytes=64 << 10, durability="os", memory_bytes=100_000)
    async with DurableQueue.open(tmp_path, config) as queue:
        kept: dict[int, bytes] = {}
        for _ in range(20):
            await queue.put_many([os.urandom(1_000) for _ in range(100)])
            lease = await queue.lease(100, wait=0)
            kept |= {record.seq: record.payload for record in lease.records[::10]}
            await lease.ack([record.seq for record in lease.records if record.seq not in kept])
            await lease.nack(3_600)
        queue.compact()
        async with asyncio.timeout(60):
            while queue.stats().compactions < 15:
                await asyncio.sleep(0.01)
        queue.hurry()
        assert await drain(queue) == kept
    assert inspect.verify(tmp_path).problems == []
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 600_000
    async with DurableQueue.open(tmp_path, config) as queue:
        assert await drain(queue) == kept


def test_d_26_files_of_acknowledgements_stay_within_the_quota():
    async def main() -> None:
        files = RecordingFiles()
        async with opened(files, max_bytes=64 << 10, durability="os", overflow="reject") as queue:
            with suppress(DiskFullError):
                while True:
                    await queue.put(b"x" * 100)
            for count in range(150):
                while lease := await queue.lease(8, wait=0):
                    await lease.nack(0.0001)
                await asyncio.sleep(0.004 if count % 4 == 0 else 0)
                assert files.used() <= 64 << 10

    run_virtual(main())


def test_d_15_acknowledgements_are_durable_after_the_sync_interval():
    async def main() -> None:
        files = RecordingFiles()
        async with opened(files, sync_interval=0.5) as queue:
            await queue.put_many([b"%d" % at for at in range(10)])
            lease = await queue.lease(4, wait=0)
            await lease.ack()
            await asyncio.sleep(0.1)
            async with opened(files.all_unsynced_lost(len(files.log))) as again:
                assert again.recovery.records == 10
            await asyncio.sleep(0.5)
            async with opened(files.all_unsynced_lost(len(files.log))) as again:
                assert sorted(await drain(again)) == list(range(5, 11))
            syncs = [op for op in files.log if op.kind == "sync"]
            await asyncio.sleep(100)
            assert [op for op in files.log if op.kind == "sync"] == syncs, "nothing to sync, and it was"
        async with opened(files.all_unsynced_lost(len(files.log))) as again:
            assert len(await drain(again)) == 6

    run_virtual(main())


def test_d_15_a_failing_sync_of_acknowledgements_fails_nothing_else():
    async def main() -> None:
        files = RecordingFiles()
        async with opened(files, sync_interval=0.5) as queue:
            await queue.put_many([b"a", b"b"])
            await (await queue.lease(1, wait=0)).ack()
            await asyncio.sleep(0.1)
            files.fault = lambda call, path: io_error() if call == "sync" and path.suffix == ".ack" else None
            await asyncio.sleep(1)
            assert await queue.put(b"c") == 3
            assert queue.stats().write_errors == 0

    run_virtual(main())
