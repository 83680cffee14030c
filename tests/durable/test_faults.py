"""Every call of the file system fails in turn, with every error that matters: what was confirmed stays, no hang."""

from __future__ import annotations

import asyncio
import errno

import pytest
from durable_kit import ROOT, InlineRunner, OneFailure, RecordingFiles, drain, io_error, opened

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.errors import BatchQueueError

CALLS = [
    "make_directory", "names", "size", "create", "open_append", "open_read", "write", "read", "sync", "sync_directory",
    "truncate", "append", "replace", "rename", "unlink", "free_bytes", "lock",
]  # fmt: skip


async def work(files: RecordingFiles, confirmed: dict[int, bytes], tried: set[bytes], **options) -> None:
    try:
        async with opened(files, segment_bytes=400, memory_bytes=300, write_buffer=200, **options) as queue:
            for number in range(12):
                payloads = [b"%d/%d/" % (number, at) + bytes(40) for at in range(3)]
                tried |= set(payloads)
                try:
                    if number % 3:
                        confirmed |= dict(zip(await queue.put_many(payloads), payloads, strict=False))
                    else:
                        confirmed[await queue.put(payloads[0])] = payloads[0]
                except BatchQueueError:
                    pass
                if number % 4 == 3:
                    lease = await queue.lease(3, wait=0)
                    for record in lease.records:
                        assert record.payload in tried
                        confirmed.pop(record.seq, None)
                    await lease.ack()
                await asyncio.sleep(0)
            found = await drain(queue)
            missing = set(confirmed) - set(found) - {-1}
            assert len(missing) <= queue.stats().unreadable
    except BatchQueueError:
        pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", CALLS)
async def test_one_call_fails_once(call, number):
    fault_free = RecordingFiles()
    await work(fault_free, {}, set(), overflow="reject")
    total = sum(1 for name, _ in fault_free.calls if name == call)
    for turn in range(total):
        files = RecordingFiles()
        seen = 0

        def fault(name, path, turn=turn):
            nonlocal seen
            if name != call:
                return None
            seen += 1
            return io_error(number) if seen == turn + 1 else None

        files.fault = fault
        confirmed: dict[int, bytes] = {}
        tried: set[bytes] = set()
        async with asyncio.timeout(20):
            await work(files, confirmed, tried, overflow="reject")
        files.fault = None
        await check(files, confirmed, tried)


@pytest.mark.parametrize(
    "call", ["write", "sync", "create", "truncate", "sync_directory", "append", "replace", "read", "unlink"]
)
@pytest.mark.parametrize("overflow", ["reject", "drop_newest"])
async def test_one_call_fails_from_some_point_on_and_then_no_longer(call, overflow):
    for start in range(0, 30, 4):
        files = RecordingFiles()
        seen = 0

        def fault(name, path, start=start):
            nonlocal seen
            seen += name == call
            return (
                io_error(errno.ENOSPC if start % 8 else errno.EIO)
                if name == call and start <= seen < start + 6
                else None
            )

        files.fault = fault
        confirmed: dict[int, bytes] = {}
        tried: set[bytes] = set()
        async with asyncio.timeout(20):
            await work(files, confirmed, tried, overflow=overflow)
        confirmed.pop(-1, None)
        files.fault = None
        await check(files, confirmed, tried)


async def check(files: RecordingFiles, confirmed: dict[int, bytes], tried: set[bytes]) -> None:
    for after in (files.snapshot(), files.all_unsynced_lost(len(files.log))):
        async with opened(after) as queue:
            found = await drain(queue)
        for seq, payload in confirmed.items():
            assert found.get(seq) == payload, (seq, sorted(found))
        assert set(found.values()) <= tried
        assert len(set(found.values())) == len(found)


async def test_a_read_error_sets_records_aside_for_the_next_run():
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put_many([b"a", b"b"])
    files = files.snapshot()
    async with opened(files) as queue:
        files.fault = lambda call, path: io_error() if call == "read" else None
        assert not await queue.lease(wait=0)
        assert queue.stats().unreadable == 2
        assert queue.stats().records == 2
        files.fault = None
        await queue.put(b"c")
        assert list((await drain(queue, ack=True)).values()) == [b"c"]
    async with opened(files.snapshot()) as queue:
        assert list((await drain(queue)).values()) == [b"a", b"b"]


async def test_full_disk_with_block_resumes_when_acks_free_it():
    files = RecordingFiles(capacity=9_000)
    got = 0
    async with opened(files, segment_bytes=1 << 20) as queue:
        producer = asyncio.create_task(produce(queue, 100))
        while got < 100:
            async with asyncio.timeout(20):
                lease = await queue.lease(20, wait=1)
            got += len(lease)
            await lease.ack()
        await producer
        assert queue.stats().disk_full > 0
        assert files.used() <= 9_000


async def produce(queue, count):
    for number in range(count):
        await queue.put(b"%d" % number + bytes(700))


async def test_full_disk_with_drop_oldest_keeps_the_newest():
    files = RecordingFiles(capacity=20_000)
    async with opened(files, segment_bytes=4_000, overflow="drop_oldest") as queue:
        await produce(queue, 100)
        assert queue.stats().dropped["oldest"] > 0
        found = await drain(queue)
        assert found[100].startswith(b"99")
        assert len(found) == queue.stats().records


@pytest.mark.parametrize("order", ["fifo", "freshest"])
@pytest.mark.parametrize("limit", [None, 6])
async def test_frames_that_a_failed_sync_has_moved_are_read_where_they_are_now(order, limit):
    """They are on the disk alone, and are dropped, read and acknowledged at their new place."""
    files = RecordingFiles()
    options = {"memory_bytes": 1, "order": order, "max_records": limit, "overflow": "drop_oldest"}
    async with opened(files, durability="interval", sync_interval=100.0, **options) as queue:
        await queue.put(b"0", durability="os")
        await queue.put_many([b"1", b"2", b"3"])
        await queue.put(b"4")
        broken = []

        def fault(call, path):
            if call != "sync" or broken:
                return None
            broken.append(path)
            return io_error()

        files.fault = fault
        await queue.put(b"5", durability="always")
        assert broken
        await queue.put_many([b"6", b"7"])
        expected = [b"%d" % number for number in range(8)][-(limit or 8) :]
        found = await drain(queue, ack=True)
        assert sorted(found.values()) == expected
        assert list(found) == sorted(found, reverse=order == "freshest")
        assert queue.stats().records == 0
        assert queue.stats().damaged == 0
        everything = files.snapshot()
    async with opened(everything, **options) as again:
        assert set((await drain(again)).values()) <= {b"%d" % number for number in range(8)}


@pytest.mark.parametrize("limit", [None, 3])
async def test_moved_frames_survive_the_loss_of_what_was_not_synced(limit):
    files = RecordingFiles()
    options = {"memory_bytes": 1, "max_records": limit, "overflow": "drop_oldest"}
    queue = await opened(files, durability="interval", sync_interval=100.0, **options)
    await queue.put_many([b"1", b"2", b"3"])
    files.fault = lambda call, path: io_error() if call == "sync" and path.name.endswith("001.bqs") else None
    await queue.put(b"4", durability="always")
    files.fault = None
    after = files.all_unsynced_lost(len(files.log))
    async with opened(after, **options) as again:
        assert {b"4"} <= set((await drain(again)).values()) <= {b"1", b"2", b"3", b"4"}
        assert len(await drain(again)) == 0
    await queue.close()


class LateNews(InlineRunner):
    """What the writer has done shows on the disk at once, and to the loop some turns later."""

    def __init__(self, loop, name):
        super().__init__(loop, name)
        self.turns = 6 if "write" in name else 0

    def submit(self, call, *arguments, done):
        def later(turns, *outcome):
            self._loop.call_soon(*((done, *outcome) if not turns else (later, turns - 1, *outcome)))

        super().submit(call, *arguments, done=lambda *outcome: later(self.turns, *outcome))


@pytest.mark.parametrize("order", ["fifo", "freshest"])
@pytest.mark.parametrize("returned", [False, True])
async def test_a_read_that_a_failed_sync_has_overtaken_loses_nothing(order, returned):
    """The records have gone to another file, and the loop does not know it yet when it reads where they were."""
    for turns in range(12):
        files = RecordingFiles()
        config = DurableConfig(durability="interval", sync_interval=100.0, memory_bytes=1, order=order)
        async with DurableQueue.open(ROOT, config, files=files, runner=LateNews) as queue:
            for number in range(5):
                await queue.put(b"%d" % number)
            if returned:
                for lease in [await queue.lease(1, wait=0) for _ in range(5)]:
                    await lease.nack()
            files.fault = OneFailure()
            put = asyncio.create_task(queue.put(b"5", durability="always"))
            for _ in range(turns):
                await asyncio.sleep(0)
            found = {}
            async with asyncio.timeout(60):
                while len(found) < 6:
                    lease = await queue.lease(3, wait=1.0)
                    assert lease, f"gone: {sorted(found)}, {queue.stats()}"
                    found |= {record.seq: record.payload for record in lease.records}
                    await lease.ack()
            await put
            assert sorted(found.values()) == [b"%d" % number for number in range(6)]
            assert queue.stats().damaged == queue.stats().unreadable == 0


async def test_a_put_cancelled_on_a_full_disk_leaves_the_door_open():
    files = RecordingFiles()
    async with opened(files) as queue:
        files.fault = lambda call, path: io_error(errno.ENOSPC) if call == "write" else None
        blocked = asyncio.create_task(queue.put(b"cancelled"))
        await asyncio.sleep(0.1)
        blocked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await blocked
        files.fault = None
        async with asyncio.timeout(20):
            await queue.put(b"next")
        assert list((await drain(queue)).values()) == [b"next"]


async def test_closing_a_blocked_queue_fails_its_puts():
    files = RecordingFiles(capacity=3_000)
    queue = await opened(files)
    tasks = [asyncio.create_task(queue.put(bytes(600))) for _ in range(8)]
    await asyncio.sleep(0.05)
    await queue.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    written = [result for result in results if isinstance(result, int)]
    assert all(isinstance(result, int | BatchQueueError) for result in results)
    async with opened(files.snapshot()) as again:
        assert len(written) <= len(await drain(again))


async def test_closing_ends_when_no_hint_can_be_written():
    files = RecordingFiles()
    async with asyncio.timeout(60):
        async with opened(files) as queue:
            await queue.put_many([b"a", b"b"])
            files.fault = lambda call, path: io_error(errno.ENOSPC) if path.suffix == ".ack" else None
            lease = await queue.lease()
            await lease.ack([1])
            await asyncio.sleep(0.03)
    files.fault = None
    async with opened(files.snapshot()) as queue:
        assert list((await drain(queue)).values()) == [b"a", b"b"]


async def test_a_hint_that_failed_is_written_later():
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put_many([b"a", b"b"])
        files.fault = lambda call, path: io_error() if path.suffix == ".ack" else None
        lease = await queue.lease()
        await lease.ack([1])
        await asyncio.sleep(0.03)
        files.fault = None
        await queue.put(b"c")
    async with opened(files.snapshot()) as queue:
        assert list((await drain(queue)).values()) == [b"b", b"c"]


async def test_a_segment_that_cannot_be_deleted_is_tried_again():
    files = RecordingFiles()
    async with opened(files, segment_bytes=300) as queue:
        files.fault = lambda call, path: io_error() if call == "unlink" else None
        for number in range(6):
            await queue.put(b"%d" % number + bytes(200))
            await (await queue.lease()).ack()
        await asyncio.sleep(0.03)
        assert sum(path.suffix == ".bqs" for path in files.entries) > 3
        files.fault = None
        await queue.put(b"x")
        await asyncio.sleep(0.03)
        assert sum(path.suffix == ".bqs" for path in files.entries) <= 3
        assert queue.stats().disk_bytes == files.used()
