"""D-16 to D-22: what made a put, a consumer or the opening wait without an end, or refuse for good."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
from typing import TYPE_CHECKING

import pytest
from durable_kit import ROOT, RecordingFiles, drain, io_error, opened

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.durable.disk.files import OsFiles
from batchqueue_async.errors import DiskFullError, DurableQueueError, RecordTooLargeError
from batchqueue_async.testing import VirtualTimeLoop

if TYPE_CHECKING:
    from pathlib import Path


async def test_d_16_who_could_free_the_full_disk_is_woken():
    files = RecordingFiles(capacity=2_200)
    queue = await opened(files, segment_bytes=500, write_buffer=100)
    consumer = asyncio.create_task(queue.lease(100, wait=None))
    await asyncio.sleep(0)
    puts = [asyncio.create_task(queue.put_many([bytes([65 + at]) * 300])) for at in range(4)]
    got: list[bytes] = []
    async with asyncio.timeout(30):
        while len(got) < 4:
            lease = await consumer
            got += [record.payload[:1] for record in lease.records]
            await lease.ack()
            consumer = asyncio.create_task(queue.lease(100, wait=None))
        await asyncio.gather(*puts)
    assert queue.stats().disk_full
    consumer.cancel()
    await queue.close()


def by_json(payload: bytes) -> str:
    return json.loads(payload)["k"]


async def test_d_17_a_key_function_that_raises_harms_no_record():
    async with opened(order="key", key=by_json) as queue:
        for number in range(9):
            await queue.put(json.dumps({"k": number}).encode())
        await queue.put(b"not json")
        await queue.put(b'{"k": []}')
        assert len(await drain(queue, ack=True)) == 11
        waiting = asyncio.create_task(queue.lease(wait=None))
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await asyncio.gather(queue.put(b"not json either"), *(queue.put(b'{"k": 1}') for _ in range(3)))
            assert (await waiting).records


@pytest.mark.parametrize("overflow", ["reject", "drop_newest", "drop_oldest", "block"])
async def test_d_18_room_that_was_freed_is_noticed(overflow):
    files = RecordingFiles()
    files.free = 5_000
    async with opened(files, overflow=overflow, min_free_bytes=10_000, block_timeout=2.0) as queue:
        with contextlib.suppress(DiskFullError):
            assert await queue.put(b"short") == -1
        files.free = 10**9
        await asyncio.sleep(1)
        assert await queue.put(b"x") > 0


@pytest.mark.parametrize(("quota", "size"), [(8_192, 6_000), (1 << 20, 980_000)])
async def test_d_19_what_can_never_fit_is_refused(quota, size):
    async with opened(max_bytes=quota) as queue:
        await queue.put(b"1")
        await (await queue.lease()).ack()
        async with asyncio.timeout(60):
            with pytest.raises((RecordTooLargeError, DiskFullError)):
                await queue.put(b"x" * (size + 20_000))


async def test_d_20_dead_letters_that_fill_the_quota_can_be_purged():
    async with opened(max_bytes=1 << 20, overflow="drop_oldest") as queue:

        async def bury_all() -> None:
            for _ in range(5_000):
                await queue.put(b"p" * 1_000)
                await (await queue.lease(1)).dead_letter("bad")

        with pytest.raises(DiskFullError, match="purge the dead letters"):
            await bury_all()
        letters = len(await queue.dead_letters(10_000))
        assert letters > 500
        assert await queue.purge_dead_letters([1, 2, 3]) == 3
        assert await queue.purge_dead_letters(before=0.0) == 0
        assert await queue.purge_dead_letters() == letters - 3
        await asyncio.sleep(1)
        assert await queue.put(b"again") > 0


async def test_d_20_dead_letters_have_a_bound_of_their_own():
    async with opened(dead_letter_bytes=64 << 10) as queue:
        for _ in range(300):
            await queue.put(b"p" * 1_000)
            await (await queue.lease(1)).dead_letter("bad")
        letters = await queue.dead_letters(10_000)
        assert 20 < len(letters) < 70
        assert letters[-1].original_seq == 300
    async with opened(dead_letter_age=50.0) as queue:
        await queue.put(b"p")
        await (await queue.lease(1)).dead_letter("bad")
        await asyncio.sleep(200)
        assert await queue.dead_letters() == []


async def test_d_21_a_directory_behind_a_link_is_as_good_as_any(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    async with DurableQueue.open(tmp_path / "link") as queue:
        assert await queue.put(b"x") == 1
        assert queue.recovery.failed_repairs == ()
    async with DurableQueue.open(tmp_path / "real") as queue:
        assert queue.recovery.records == 1


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EFBIG, errno.EBADF, errno.EIO])
async def test_d_22_a_descriptor_that_keeps_failing_is_replaced(number):
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put(b"1")
        files.fault = lambda call, path: io_error(number) if call == "write" and path.name.endswith("1.bqs") else None
        for at in range(5):
            assert await queue.put(b"%d" % at) == at + 2
        assert len(await drain(queue)) == 6
    async with opened(files.snapshot()) as queue:
        assert len(await drain(queue)) == 6


@pytest.mark.parametrize(
    ("name", "make"),
    [("seg-000000000007.bqs", os.mkdir), ("seg-000000000008.bqs", os.mkfifo), ("queue.id", os.mkdir)],
)
async def test_d_22_a_directory_or_pipe_in_a_files_place_is_left_alone(tmp_path, name, make):
    place = tmp_path / "q"
    async with DurableQueue.open(place) as queue:
        await queue.put(b"0")
    (place / name).unlink(missing_ok=True)
    make(place / name)
    async with asyncio.timeout(60):
        async with DurableQueue.open(place) as queue:
            assert queue.recovery.records == 1
            for _ in range(3):
                await queue.put(b"x")
    assert (place / name).exists()


async def test_a_second_owner_can_wait_for_the_first(tmp_path):
    first = await DurableQueue.open(tmp_path / "q")
    config = DurableConfig(lock_timeout=30.0)
    second = asyncio.ensure_future(DurableQueue.open(tmp_path / "q", config).__aenter__())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not second.done()
    await first.close()
    await (await second).close()


async def test_a_directory_in_which_no_file_can_be_made_says_so():
    class ReadOnly(OsFiles):
        def make_directory(self, path: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with pytest.raises(DurableQueueError, match="Read-only"):
        await DurableQueue.open(ROOT, files=ReadOnly())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE])
@pytest.mark.parametrize("call", ["open_read", "read"])
async def test_d_22_reading_goes_on_when_what_failed_it_has_passed(number, call):
    """A limit of the process or a mount that comes back: no record waits for the next run on that account."""
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put_many([b"a", b"b"])
    files = files.snapshot()
    async with opened(files) as queue:
        files.fault = lambda asked, path: io_error(number) if asked == call else None
        assert not await queue.lease(wait=0)
        waiting = asyncio.create_task(queue.lease(wait=60))
        await asyncio.sleep(5)
        assert not waiting.done()
        files.fault = None
        assert len(await waiting) == 2
        assert queue.stats().unreadable == 0


async def test_d_22_a_descriptor_that_reading_has_failed_by_is_not_used_again():
    """It is the descriptor that is stale, and not the file."""
    files = RecordingFiles()
    async with opened(files, memory_bytes=1) as queue:
        await queue.put_many([b"a", b"b"])
        await (await queue.lease()).nack(delay=1)
        stale = {fd for fd, (_, _, mode) in files.descriptors.items() if mode == "read"}
        assert stale
        used = []

        class Stale(RecordingFiles):
            def read(self, descriptor, size, offset):
                used.append(descriptor in stale)
                if descriptor in stale:
                    raise io_error(errno.ESTALE)
                return super().read(descriptor, size, offset)

        files.__class__ = Stale
        assert [record.payload for record in (await queue.lease(10, wait=5)).records] == [b"a", b"b"]
        assert used.count(True) == 1


async def test_d_22_a_segment_that_could_not_be_deleted_is_deleted_without_another_put():
    files = RecordingFiles()
    async with opened(files, segment_bytes=300) as queue:
        for _ in range(3):
            await queue.put(bytes(200))
        files.fault = lambda call, path: io_error() if call == "unlink" else None
        await (await queue.lease()).ack()
        await asyncio.sleep(1)
        left = len(files.entries)
        files.fault = None
        await asyncio.sleep(1)
        assert len(files.entries) < left
        assert queue.stats().disk_bytes == files.used()


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
async def test_d_8_whatever_a_close_meets_the_directory_is_given_back(error):
    files = RecordingFiles()

    async with opened(files, memory_bytes=1) as queue:
        await queue.put_many([b"a", b"b"])
        await (await queue.lease(1)).ack()
        close, met = files.close, []

        def failing(descriptor):
            close(descriptor)
            if descriptor >= 0:
                met.append(descriptor)
                raise error

        files.close = failing
    assert met
    assert not files.descriptors
    assert not files.locked


async def test_d_8_a_graveyard_that_can_not_be_opened_does_not_keep_the_queue_from_closing():
    files = RecordingFiles()
    queue = await opened(files, durability="os")
    await queue.put_many([b"a", b"b"])
    lease = await queue.lease(1)

    def short_of_memory(call, path):
        if call == "make_directory":
            raise MemoryError

    files.fault = short_of_memory
    with pytest.raises(MemoryError):
        await lease.dead_letter("no use")
    last = asyncio.create_task(queue.put(b"c"))
    await asyncio.sleep(0)
    await queue.close()
    assert await last == 3
    files.fault = None
    async with opened(files.snapshot()) as again:
        assert sorted((await drain(again)).values()) == [b"a", b"b", b"c"]
        assert again.recovery.clean


def test_d_52_a_rest_of_a_time_that_no_clock_resolves_does_not_hold_the_loop():
    """The timer of an idle disk came too early by less than the last digit of the loop's time, again and again."""

    async def main() -> None:
        async with opened(durability="os", stale_flush=0.1) as queue:
            for number in range(30):
                await queue.put(b"x")
                await asyncio.sleep(0.0137 * number)
            await asyncio.sleep(1)
            assert queue._state.counters.syncs > 0

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start=2.0**30)) as runner:
        runner.run(main())
