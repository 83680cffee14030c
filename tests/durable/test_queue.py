"""The durable queue as its users see it."""

from __future__ import annotations

import asyncio
import gc
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from durable_kit import ROOT, GatedRunner, RecordingFiles, drain, eventually, opened

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.durable.config import memory_limit
from batchqueue_async.durable.disk import compression
from batchqueue_async.errors import (
    ConfigError,
    DiskFullError,
    DurableQueueError,
    ForkedError,
    QueueClosedError,
    RecordTooLargeError,
    WrongLoopError,
)

# Leases


async def test_ack_out_of_order_and_nack_keep_the_order_of_the_rest():
    async with opened() as queue:
        assert await queue.put_many([b"%d" % number for number in range(6)]) == range(1, 7)
        lease = await queue.lease(5)
        assert [record.seq for record in lease.records] == [1, 2, 3, 4, 5]
        assert await lease.ack([4, 2]) == 2
        assert await lease.ack([4]) == 0
        assert lease.unsettled == 3
        assert await lease.nack() == 3
        assert await lease.ack() == 0
        assert {(record.seq, record.attempts) for record in (await queue.lease(10)).records} == {
            (1, 2),
            (3, 2),
            (5, 2),
            (6, 1),
        }


async def test_a_lease_acknowledges_as_a_context_manager_and_gives_back_on_error():
    async with opened() as queue:
        await queue.put(b"x")
        with pytest.raises(ZeroDivisionError):
            async with await queue.lease() as lease:
                raise ZeroDivisionError
        async with await queue.lease() as lease:
            assert lease.records[0].attempts == 2
        assert queue.stats().acked == 1
        assert queue.stats().retry_successes == 1


async def test_lease_limits_by_bytes_but_gives_at_least_one():
    async with opened() as queue:
        await queue.put_many([bytes(100)] * 10)
        assert len(await queue.lease(10, max_bytes=250)) == 2
        assert len(await queue.lease(10, max_bytes=1)) == 1
        assert len(await queue.lease(3)) == 3
        with pytest.raises(ConfigError):
            await queue.lease(0)


async def test_wait_0_is_empty_at_once_and_a_wait_ends():
    async with opened() as queue:
        lease = await queue.lease(wait=0)
        assert not lease
        assert lease.records == []
        assert await lease.ack() == 0
        assert not await queue.lease(wait=0.01)


async def test_waiting_leases_are_served_in_order_and_a_cancelled_one_gives_its_records_back():
    async with opened() as queue:
        first, second = (asyncio.create_task(queue.lease(1)) for _ in range(2))
        await asyncio.sleep(0)
        put = asyncio.create_task(queue.put_many([b"a", b"b"]))
        await asyncio.sleep(0)
        assert [record.payload for record in (await first).records] == [b"a"]
        assert [record.payload for record in (await second).records] == [b"b"]
        await put
        third = asyncio.create_task(queue.lease(1))
        await asyncio.sleep(0)
        put = asyncio.create_task(queue.put(b"c"))
        for _ in range(20):
            await asyncio.sleep(0)
            if queue.stats().leased == 3:
                break
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        await put
        lease = await queue.lease(1, wait=0)
        assert [(record.payload, record.attempts) for record in lease.records] == [(b"c", 1)]


async def test_an_expired_lease_is_delivered_again_and_its_late_ack_does_nothing():
    async with opened(lease_timeout=0.01) as queue:
        await queue.put(b"x")
        slow = await queue.lease()
        again = await queue.lease(wait=5)
        assert again.records[0].attempts == 2
        assert await slow.ack() == 0
        assert queue.stats().leased == 1
        assert await again.ack() == 1
        assert queue.stats().expired_leases == 1
        slow.extend()


async def test_extend_lets_the_time_begin_anew():
    async with opened(lease_timeout=1000.0) as queue:
        await queue.put(b"x")
        lease = await queue.lease()
        before = lease.deadline
        await asyncio.sleep(0.002)
        lease.extend()
        assert lease.deadline > before


async def test_nack_with_a_delay_waits_for_it():
    async with opened() as queue:
        await queue.put_many([b"a", b"b"])
        lease = await queue.lease()
        await lease.nack(delay=0.02, seqs=[1])
        await lease.nack(delay=500, reason="later")
        assert queue.stats().delayed == 2
        assert not await queue.lease(wait=0)
        assert [record.payload for record in (await queue.lease(wait=5)).records] == [b"a"]
        assert queue.stats().retry_failures == {"nack": 1, "later": 1}
        with pytest.raises(ConfigError):
            await lease.nack(delay=-1)


@pytest.mark.every_loop
async def test_a_delay_that_is_as_good_as_over_may_be_followed_by_another():
    """uvloop gives a timer of less than half a millisecond as a handle that can't tell its time."""
    async with opened() as queue:
        await queue.put_many([b"a", b"b"])
        lease = await queue.lease()
        await lease.nack(delay=1e-5, seqs=[1])
        await lease.nack(delay=2e-5, seqs=[2])
        got = [record.payload for _ in range(2) for record in (await queue.lease(1, wait=5)).records]
        assert sorted(got) == [b"a", b"b"]


async def test_a_number_that_is_not_in_the_lease_is_refused():
    async with opened() as queue:
        await queue.put(b"x")
        lease = await queue.lease()
        with pytest.raises(ConfigError, match="number 7"):
            await lease.ack([7])
        assert "payload" not in repr(lease.records[0])
        assert repr(lease) == "Lease(1 records, 1 unsettled)"


# Order


async def test_freshest_first_from_memory_and_disk():
    files = RecordingFiles()
    options = {"order": "freshest", "memory_bytes": 60, "memory_blocks": 3, "segment_bytes": 600}
    async with opened(files, **options) as queue:
        for number in range(30):
            await queue.put(b"%02d" % number + bytes(20))
        assert list(await drain(queue, ack=False, most=4)) == list(range(30, 0, -1))
    async with opened(files.snapshot(), **options) as queue:
        lease = await queue.lease(3)
        assert [record.seq for record in lease.records] == [30, 29, 28]
        await queue.put(b"new")
        await lease.nack()
        assert (await queue.lease(1)).records[0].payload == b"new"
        assert list(await drain(queue)) == list(range(30, 0, -1))


async def test_by_key_waits_for_the_earlier_record_of_the_key():
    async with opened(order="key", key=lambda payload: payload[:1]) as queue:
        await queue.put_many([b"a1", b"b1", b"a2", b"c1", b"a3"])
        first = await queue.lease(1)
        second = await queue.lease(10)
        assert [record.payload for record in second.records] == [b"b1", b"c1"]
        assert not await queue.lease(wait=0)
        await first.nack(delay=0.02)
        assert not await queue.lease(wait=0)
        third = await queue.lease(1, wait=5)
        assert [record.payload for record in third.records] == [b"a1"]
        await third.ack()
        assert [record.payload for record in (await queue.lease(10)).records] == [b"a2", b"a3"]


async def test_by_key_looks_only_so_far_ahead():
    async with opened(order="key", key=lambda payload: payload[:1], key_lookahead=3) as queue:
        await queue.put_many([b"a%d" % number for number in range(8)] + [b"b"])
        lease = await queue.lease(1)
        assert not await queue.lease(wait=0)
        await lease.ack()
        assert (await queue.lease(20)).records[0].payload == b"a1"


# Room


async def test_max_records_blocks_in_order_and_acks_let_puts_go_on():
    async with opened(max_records=2) as queue:
        await queue.put_many([b"a", b"b"])
        waiting = [asyncio.create_task(queue.put(b"%d" % number)) for number in range(3)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        lease = await queue.lease(2)
        await lease.ack([1])
        assert await waiting[1] == 3
        assert not waiting[2].done()
        await lease.ack()
        assert await waiting[2] == 4
        assert [record.payload for record in (await queue.lease()).records] == [b"1", b"2"]


async def test_drop_oldest_never_drops_a_leased_record():
    async with opened(max_records=4, overflow="drop_oldest", memory_bytes=8) as queue:
        await queue.put_many([b"a", b"b"])
        lease = await queue.lease(1)
        for number in range(6):
            await queue.put(b"%d" % number)
        assert queue.stats().records == 4
        assert queue.stats().dropped == {"oldest": 4}
        assert [record.payload for record in (await queue.lease(10)).records] == [b"3", b"4", b"5"]
        with pytest.raises(DiskFullError, match="leased"):
            await queue.put(b"no")
        await lease.nack(delay=100)
        await queue.put(b"yes")
        assert queue.stats().dropped == {"oldest": 5}


async def test_dropping_a_part_of_a_frame_on_the_disk_keeps_the_rest_of_it():
    async with opened(max_records=6, overflow="drop_oldest", memory_bytes=1) as queue:
        await queue.put_many([b"%d" % number for number in range(6)])
        await queue.put(b"6")
        await queue.put(b"7")
        assert list((await drain(queue)).values()) == [b"%d" % number for number in range(2, 8)]
        assert queue.stats().damaged == 0
        assert queue.stats().dropped == {"oldest": 2}


async def test_dropping_goes_on_beyond_a_segment_whose_end_was_acknowledged_in_an_earlier_run():
    files = RecordingFiles()
    options = {"max_records": 3, "overflow": "drop_oldest", "memory_bytes": 1}
    async with opened(files, **options) as queue:
        await queue.put_many([b"1", b"2", b"3"])
        lease = await queue.lease(3)
        await lease.ack([3])
    async with opened(files, **options) as queue:
        for number in range(4, 12):
            await queue.put(b"%d" % number)
            await asyncio.sleep(0.02)
        assert list((await drain(queue)).values()) == [b"9", b"10", b"11"]
        assert queue.stats().dropped == {"oldest": 7}


async def test_drop_newest_answers_minus_1_and_an_empty_range():
    async with opened(max_records=1, overflow="drop_newest") as queue:
        assert await queue.put(b"a") == 1
        assert await queue.put(b"b") == -1
        assert await queue.put_many([b"c"]) == range(0)
        assert queue.stats().dropped == {"newest": 2}


@pytest.mark.parametrize("overflow", ["block", "drop_oldest", "reject"])
async def test_max_bytes_holds_for_everything_on_disk(overflow):
    files = RecordingFiles()
    async with opened(files, max_bytes=40_000, overflow=overflow) as queue:
        refused = 0
        for number in range(200):
            if overflow == "block" and queue.stats().records >= 12:
                async with await queue.lease(6) as lease:
                    assert len(lease) == 6
            try:
                await queue.put(b"%d" % number + bytes(700))
            except DiskFullError:
                refused += 1
            assert files.used() <= 40_000
        assert abs(files.used() - queue.stats().disk_bytes) < 300
        assert bool(refused) == (overflow == "reject")
        assert queue.stats().utilization > 0


async def test_min_free_bytes_is_left_free():
    files = RecordingFiles()
    async with opened(files, min_free_bytes=1_000_000, overflow="reject") as queue:
        await queue.put(b"x")
        files.free = 1_000_100
        await queue.put(b"y")
        with pytest.raises(DiskFullError, match="min_free_bytes"):
            await queue.put(bytes(500))


async def test_a_blocked_put_notices_that_somebody_else_freed_the_disk():
    files = RecordingFiles()
    async with opened(files, min_free_bytes=1_000_000) as queue:
        files.free = 10
        await queue.put(b"x")
        blocked = asyncio.create_task(queue.put(bytes(500)))
        await asyncio.sleep(0.01)
        assert not blocked.done()
        files.free = 1 << 30
        assert await blocked == 2


async def test_block_timeout_raises():
    async with opened(max_records=1, block_timeout=0.01) as queue:
        await queue.put(b"x")
        with pytest.raises(DiskFullError, match="block_timeout"):
            await queue.put(b"y")


async def test_max_age_drops_what_waits_too_long_and_a_clock_that_jumps_drops_nothing():
    now = [1_700_000_000_000_000_000]
    files = RecordingFiles()
    config = DurableConfig(max_age=0.05, memory_bytes=8)
    queue = await DurableQueue.open(ROOT, config, files=files, wall_clock=lambda: now[0])
    await queue.put(b"fresh")
    now[0] += 10**18
    assert [record.payload for record in (await queue.lease(1)).records] == [b"fresh"]
    await queue.put_many([b"memory"])
    await queue.put_many([b"on the disk", b"both"])
    await eventually(lambda: queue.stats().dropped.get("max_age") == 3)
    assert not await queue.lease(wait=0)
    await queue.close()


async def test_max_age_is_looked_at_when_leasing_too():
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put_many([b"old", b"older"])
    config = DurableConfig(max_age=3600.0)
    later = 4_000_000_000 * 10**9
    async with DurableQueue.open(ROOT, config, files=files.snapshot(), wall_clock=lambda: later) as queue:
        assert not await queue.lease(wait=0)
        assert queue.stats().dropped == {"max_age": 2}


async def test_too_large_records_are_refused():
    async with opened(max_record=100) as queue:
        with pytest.raises(RecordTooLargeError, match="max_record=100"):
            await queue.put(bytes(101))
        with pytest.raises(RecordTooLargeError):
            await queue.put_many([b"", bytes(101)])
        assert await queue.put(bytes(100)) == 1
    async with opened(max_bytes=10_000) as queue:
        with pytest.raises(RecordTooLargeError, match="never fit"):
            await queue.put(bytes(40_000))
    async with opened(max_record=1 << 27) as queue:
        with pytest.raises(RecordTooLargeError, match="several calls"):
            await queue.put_many([bytes(1 << 27)] * 2)


# Put


async def test_payloads_are_bytes():
    async with opened() as queue:
        assert await queue.put(bytearray(b"x")) == 1
        assert await queue.put_many([memoryview(b"y"), b""]) == range(2, 4)
        assert await queue.put_many([]) == range(0)
        assert list((await drain(queue)).values()) == [b"x", b"y", b""]
        for wrong in ("text", 3, None):
            with pytest.raises(ConfigError, match="bytes"):
                await queue.put(wrong)
        with pytest.raises(ConfigError, match="durability"):
            await queue.put(b"", durability="maybe")


async def test_puts_that_wait_together_share_one_sync():
    files = RecordingFiles()
    async with opened(files) as queue:
        seqs = await asyncio.gather(*(queue.put(b"%d" % number) for number in range(100)))
        assert seqs == list(range(1, 101))
        assert sum(op.kind == "sync" and op.path.suffix == ".bqs" for op in files.log) == 2, (
            "one for the new segment's header, one for them all"
        )


async def test_a_put_cancelled_before_the_writer_has_it_is_not_put():
    GatedRunner.shut, GatedRunner.held = False, []
    files = RecordingFiles()
    queue = await DurableQueue.open(ROOT, files=files, runner=GatedRunner)
    GatedRunner.shut = True
    with_writer = asyncio.create_task(queue.put(b"with the writer"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(queue.put(b"%d" % number)) for number in range(3)]
    many = asyncio.create_task(queue.put_many([b"m", b"n"]))
    alone = asyncio.create_task(queue.put(b"alone", durability="os"))
    await asyncio.sleep(0)
    for task in (with_writer, waiting[1], many, alone):
        task.cancel()
    await asyncio.sleep(0)
    GatedRunner.shut = False
    for call in GatedRunner.held:
        call()
    assert await asyncio.gather(waiting[0], waiting[2]) == [2, 3]
    assert list((await drain(queue)).values()) == [b"with the writer", b"0", b"2"]
    assert queue.stats().pending == 0
    assert queue._state.pending.disk_bytes == 0
    await queue.close()


# Opening and closing


async def test_files_are_private_and_names_stay_inside(tmp_path):
    async with DurableQueue.open(tmp_path, name="spool") as queue:
        await queue.put(b"x")
        lease = await queue.lease()
        await lease.dead_letter("why")
        assert queue.path == tmp_path / "spool"
        for path in [queue.path, *queue.path.rglob("*")]:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    for name in ("../up", "a/b", "", ".", "..", ".hidden", "-x", "x\0", "a" * 101):
        with pytest.raises(ConfigError, match="name="):
            DurableQueue.open(tmp_path, name=name)


async def test_a_link_in_place_of_a_segment_is_not_followed(tmp_path):
    async with DurableQueue.open(tmp_path / "q") as queue:
        await queue.put(b"x")
    (tmp_path / "q" / "seg-000000000001.bqs").rename(tmp_path / "elsewhere")
    (tmp_path / "q" / "seg-000000000001.bqs").symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    async with DurableQueue.open(tmp_path / "q") as queue:
        assert await drain(queue) == {}
    assert (tmp_path / "elsewhere").read_bytes() == before


async def test_sequence_numbers_go_on_when_everything_is_acknowledged():
    files = RecordingFiles()
    for turn in range(1, 4):
        async with opened(files) as queue:
            assert queue.recovery.clean
            assert await queue.put(bytes(500)) == turn
            await (await queue.lease()).ack()
    assert files.used() < 1_000


async def test_closing_ends_every_wait_and_every_call():
    queue = await opened(max_records=1)
    await queue.put(b"x")
    lease = await queue.lease()
    waiting = asyncio.create_task(queue.lease())
    blocked = asyncio.create_task(queue.put(b"y"))
    await asyncio.sleep(0.005)
    await asyncio.gather(queue.close(), queue.close())
    assert queue.closed
    for call in (
        waiting,
        blocked,
        queue.put(b"z"),
        queue.put_many([b"z"]),
        queue.lease(),
        lease.ack(),
        lease.dead_letter(""),
    ):
        with pytest.raises(QueueClosedError):
            await call
    with pytest.raises(DurableQueueError):
        async with queue:
            pass
    assert "closed" in repr(queue)


async def test_a_cancelled_close_still_closes():
    queue = await opened()
    await queue.put(b"x")
    task = asyncio.create_task(queue.close())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await queue.close()
    assert queue._lock is None


async def test_a_cancelled_opening_gives_the_lock_back(tmp_path):
    for turns in range(4):
        task = asyncio.ensure_future(DurableQueue.open(tmp_path).__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with asyncio.timeout(60):
        while True:
            try:
                queue = await DurableQueue.open(tmp_path)
                break
            except DurableQueueError:
                await asyncio.sleep(0.01)
    await queue.close()


async def test_a_never_opened_queue_closes_and_refuses():
    queue = DurableQueue.open(ROOT, files=RecordingFiles())
    with pytest.raises(QueueClosedError, match="async with"):
        await queue.put(b"x")
    await queue.close()


async def test_another_loop_is_refused():
    async with opened() as queue:

        def elsewhere():
            with pytest.raises(WrongLoopError):
                asyncio.run(queue.put(b"x"))

        await asyncio.to_thread(elsewhere)


def test_a_later_loop_of_the_same_thread_is_refused():
    loop = asyncio.new_event_loop()
    queue = loop.run_until_complete(opened().__aenter__())
    for call in (lambda: queue.put(b"x"), lambda: queue.put_many([b"x"]), queue.lease):
        with pytest.raises(WrongLoopError):
            asyncio.run(call())
    assert loop.run_until_complete(queue.put(b"x")) == 1
    loop.run_until_complete(queue.close())
    loop.close()


async def test_a_directory_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DurableQueueError, match="can't be opened"):
        await DurableQueue.open(tmp_path / "file" / "queue")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_child_of_a_fork_is_told(tmp_path):
    code = """
import asyncio, os, sys, warnings
warnings.simplefilter("ignore")
from batchqueue_async.durable import DurableQueue
from batchqueue_async.errors import ForkedError
async def main():
    async with DurableQueue.open(sys.argv[1]) as queue:
        await queue.put(b"x")
        child = os.fork()
        if child == 0:
            try:
                await queue.put(b"y")
            except ForkedError:
                await queue.close()
                os._exit(7)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), await queue.put(b"z"))
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["7", "2"], done.stderr
    assert ForkedError.__doc__


def open_files() -> int:
    place = Path("/proc/self/fd")
    return len(list(place.iterdir())) if place.is_dir() else 0


async def test_no_threads_and_no_files_are_left(tmp_path):
    import threading

    threads = threading.active_count()
    files = open_files()
    for _ in range(3):
        async with DurableQueue.open(tmp_path) as queue:
            await queue.put(b"x")
            lease = await queue.lease()
            await lease.dead_letter("x")
    gc.collect()
    assert threading.active_count() == threads
    assert open_files() == files


# Dead letters


async def test_dead_letters_keep_their_reason_and_can_be_put_back():
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put_many([b"a", b"b", b"c"])
        lease = await queue.lease()
        assert await lease.dead_letter("poison", [1, 3]) == 2
        assert await lease.dead_letter("none left", [1]) == 0
        await lease.ack()
        letters = await queue.dead_letters()
        assert [(letter.payload, letter.reason, letter.original_seq, letter.attempts) for letter in letters] == [
            (b"a", "poison", 1, 1),
            (b"c", "poison", 3, 1),
        ]
        assert "payload" not in repr(letters[0])
        assert queue.stats().dead_lettered == 2
    async with opened(files) as queue:
        assert queue.stats().records == 0
        assert await queue.requeue_dead_letters([letters[1].seq]) == 1
        assert [record.payload for record in (await queue.lease()).records] == [b"c"]
        assert [letter.payload for letter in await queue.dead_letters()] == [b"a"]
        assert await queue.requeue_dead_letters() == 1
        assert await queue.dead_letters() == []


async def test_all_dead_letters_are_listed_those_of_earlier_runs_and_large_ones_too():
    files = RecordingFiles()
    for run in range(3):
        async with opened(files) as queue:
            await queue.put_many([b"%d" % run + bytes(9 << 20), b"small"])
            await (await queue.lease(1, wait=0)).dead_letter("large")
            await (await queue.lease(1, wait=0)).dead_letter("small")
            letters = await queue.dead_letters()
            assert [letter.seq for letter in letters] == list(range(1, 2 * run + 3))
            assert [letter.seq for letter in await queue.dead_letters(2)] == [1, 2]
            assert [letter.payload[:1] for letter in letters[::2]] == [b"%d" % number for number in range(run + 1)]


async def test_a_dead_letter_that_cannot_be_written_stays_leased():
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put(b"a")
        lease = await queue.lease()
        files.fault = lambda call, path: (
            OSError(28, "full") if call == "create" and path.parent.name == "dead" else None
        )
        with pytest.raises(DiskFullError):
            await lease.dead_letter("x")
        assert lease.unsettled == 1
        files.fault = None
        assert await lease.dead_letter("x") == 1


# Compression and configuration


@pytest.mark.parametrize("codec", ["lz4", "snappy", "zstd"])
async def test_compression_saves_room_and_gives_back_the_same(codec):
    pytest.importorskip("cramjam")
    files = RecordingFiles()
    payloads = [b"compressible " * 50, os.urandom(300), b""]
    async with opened(files, compression=codec) as queue:
        await queue.put_many(payloads)
        await queue.put(os.urandom(400))
        assert queue.stats().disk_bytes < 1_900
    async with opened(files.snapshot()) as queue:
        assert list((await drain(queue)).values())[:3] == payloads


async def test_a_missing_extra_names_the_pip_command(monkeypatch):
    files = RecordingFiles()
    pytest.importorskip("cramjam")
    async with opened(files, compression="zstd") as queue:
        await queue.put(b"x" * 500)
    monkeypatch.setitem(sys.modules, "cramjam", None)
    with pytest.raises(ConfigError, match=r"pip install 'batchqueue-async\[durable\]'"):
        DurableConfig(compression="lz4")
    async with opened(files.snapshot()) as queue:
        with pytest.raises(ConfigError, match="pip install"):
            await queue.lease(wait=0)
        monkeypatch.undo()
        assert len(await drain(queue)) == 1


def test_without_the_faster_checksum_it_is_zlibs(monkeypatch):
    import zlib

    from batchqueue_async.durable.disk import checksum

    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert checksum._fastest() is zlib.crc32
    assert checksum.crc32(b"abc", 7) == zlib.crc32(b"abc", 7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"durability": "maybe"},
        {"order": "random"},
        {"overflow": "explode"},
        {"compression": "rar"},
        {"segment_bytes": 0},
        {"memory_bytes": True},
        {"max_bytes": 10},
        {"max_records": 0},
        {"min_free_bytes": -1},
        {"sync_interval": 0},
        {"lease_timeout": float("nan")},
        {"max_age": 0},
        {"block_timeout": -1},
        {"order": "key"},
        {"key": len},
        {"max_record": (1 << 28) + 1},
    ],
)
def test_wrong_configuration_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong)) if wrong != {"order": "key"} else "key"):
        DurableConfig(**wrong)


def test_sizing_by_a_share_of_memory():
    assert DurableConfig.for_memory(0.5, limit=1000, limit_ratio=0.5).memory_bytes == 250
    assert 0 < DurableConfig.for_memory(max_records=5).memory_bytes <= memory_limit()
    with pytest.raises(ConfigError, match="share"):
        DurableConfig.for_memory(0)
    with pytest.raises(ConfigError, match="nonsense is not a field"):
        DurableConfig.for_memory(nonsense=1)
    assert compression.known(0)


async def test_stats_count_everything_of_the_document():
    async with opened(max_records=100, max_bytes=1_000_000) as queue:
        await queue.put_many([bytes(10)] * 10)
        lease = await queue.lease(5)
        await lease.nack(seqs=[1])
        await lease.ack()
        stats = queue.stats()
        assert (stats.put, stats.put_bytes, stats.acked, stats.retries, stats.ready) == (10, 100, 4, 1, 6)
        assert stats.memory_blocks >= 1
        assert stats.memory_bytes >= 50
        assert stats.rotations == 1
        assert stats.free_bytes
        assert 0 < stats.utilization < 1
        assert set(stats.seconds) == {"write", "sync", "hints"}


async def test_hints_are_written_ten_milliseconds_after_they_are_due_and_not_with_every_round():
    files = RecordingFiles()

    def hints() -> int:
        return sum(op.kind == "write" and op.path.suffix == ".ack" for op in files.log)

    async with opened(files, durability="os") as queue:
        for number in range(20):
            await queue.put(b"%d" % number)
            await (await queue.lease(1)).ack()
        assert hints() <= 1, "no time has passed"
        await asyncio.sleep(0.011)
        before = hints()
        assert before >= 1
        await asyncio.sleep(10)
        assert hints() == before, "nothing new to write"
        async with opened(files.snapshot()) as again:
            assert again.stats().records == 0


# What leaves the memory while it waits


@pytest.mark.parametrize("order", ["fifo", "freshest"])
async def test_returned_records_beyond_the_window_are_read_again(order):
    files = RecordingFiles()
    async with opened(files, memory_bytes=50, order=order) as queue:
        for number in range(10):
            await queue.put(b"%02d" % number + bytes(20))
        leases = [await queue.lease(1, wait=0) for _ in range(10)]
        for lease in leases:
            await lease.nack()
        assert queue.stats().memory_bytes <= 66
        found = await drain(queue)
        assert sorted(found) == list(range(1, 11))
        assert list(found) == sorted(found, reverse=order == "freshest")


async def test_returned_records_that_were_damaged_meanwhile_are_counted_not_delivered():
    files = RecordingFiles()
    async with opened(files, memory_bytes=50) as queue:
        await queue.put_many([b"%02d" % number + bytes(20) for number in range(10)])
        await queue.put_many([b"gone %d" % number for number in range(3)])
        leases = [await queue.lease(1, wait=0) for _ in range(11)]
        for lease in leases:
            await lease.nack()
        (data,) = [files.nodes[node] for path, node in files.entries.items() if path.suffix == ".bqs"]
        data[data.index(b"05") : data.index(b"05") + 1] = b"x"
        at = data.index(b"gone 0")
        data[at - 60 : at - 40] = bytes(20)
        found = await drain(queue)
        assert 6 not in found
        assert set(range(1, 11)) - {6} <= set(found)
        assert queue.stats().damaged + len(found) == 13


async def test_a_read_error_of_returned_records_keeps_them_for_the_next_run():
    files = RecordingFiles()
    async with opened(files, memory_bytes=1) as queue:
        await queue.put(b"first")
        lease = await queue.lease()
        await lease.nack()
        files.fault = lambda call, path: OSError(5, "input/output error") if call == "read" else None
        assert not await queue.lease(wait=0)
        assert queue.stats().unreadable == 1
        files.fault = None
    async with opened(files.snapshot()) as queue:
        assert list((await drain(queue)).values()) == [b"first"]


async def test_drop_oldest_by_bytes_reaches_memory_disk_returned_and_delayed_records():
    files = RecordingFiles()
    async with opened(files, max_bytes=12_000, overflow="drop_oldest", memory_bytes=1_000) as queue:
        for number in range(8):
            await queue.put(b"%02d" % number + bytes(500))
        first, second, third = [await queue.lease(1, wait=0) for _ in range(3)]
        await first.nack()
        await second.nack(delay=1_000)
        for number in range(40):
            await queue.put(b"%02d" % number + bytes(500))
        assert files.used() <= 12_000
        assert third.unsettled == 1
        assert queue.stats().delayed == 0
        found = await drain(queue)
        assert 1 not in found
        assert 2 not in found
        assert max(found) == 48
        await third.ack()


async def test_drop_oldest_by_key_lets_the_held_records_go():
    async with opened(order="key", key=lambda payload: payload[:1], max_records=3, overflow="drop_oldest") as queue:
        await queue.put_many([b"a1", b"a2"])
        lease = await queue.lease(1)
        assert not await queue.lease(wait=0)
        await lease.nack(delay=1_000)
        await queue.put_many([b"b1", b"b2"])
        assert queue.stats().dropped == {"oldest": 1}
        assert sorted((await drain(queue)).values()) in ([b"a2", b"b1", b"b2"], [b"b1", b"b2"], [b"a2", b"b2"])


async def test_a_blocked_put_on_a_full_disk_times_out():
    files = RecordingFiles(capacity=3_000)
    async with opened(files, block_timeout=0.01) as queue:
        results = await asyncio.gather(*(queue.put(bytes(700)) for _ in range(6)), return_exceptions=True)
        results += await asyncio.gather(*(queue.put(bytes(700)) for _ in range(6)), return_exceptions=True)
        assert any(isinstance(result, DiskFullError) for result in results)
        assert len(await drain(queue)) == queue.stats().put


async def test_a_fault_of_the_writer_itself_leaves_nobody_waiting(monkeypatch):
    async with opened() as queue:
        monkeypatch.setattr(queue._pump._writer, "run", lambda work: 1 // 0)
        with pytest.raises(DurableQueueError, match="ZeroDivisionError"):
            await queue.put(b"x")
        monkeypatch.undo()
        assert await queue.put(b"y") == 1
