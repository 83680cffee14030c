"""D-1 to D-15: what lost confirmed records, confirmed too early, or left a queue that can't be opened."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from durable_kit import ROOT, OneFailure, RecordingFiles, drain, io_error, opened, segments

from batchqueue_async.durable import DurableQueue
from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.disk import inspect
from batchqueue_async.durable.disk.files import OsFiles
from batchqueue_async.errors import DiskFullError, DurableQueueError, LockedError

if TYPE_CHECKING:
    from pathlib import Path

SEGMENT = ".bqs"


async def fill(queue: DurableQueue) -> int:
    """Puts until the next one would need room; how many records there are."""
    while not queue.stats().dropped.get("oldest"):
        await queue.put(b"x" * 1_000)
    return queue.stats().records


@pytest.mark.parametrize("acks", [0, 3])
async def test_d_1_a_put_too_many_drops_one_segment_at_most(acks):
    async with opened(max_bytes=1 << 20, overflow="drop_oldest") as queue:
        await fill(queue)
        lease = await queue.lease(20, wait=0)
        before = queue.stats()
        puts = [asyncio.create_task(queue.put(b"y" * 1_000)) for _ in range(64)]
        for record in lease.records[:acks]:
            await lease.ack([record.seq])
            await asyncio.sleep(0)
        await asyncio.gather(*puts)
        dropped = queue.stats().dropped["oldest"] - before.dropped["oldest"]
        # 64 records came in: as many have to go, and what is left of the segment of the last of them.
        assert dropped <= 64 + 62


async def test_d_1_what_a_settled_segment_frees_is_waited_for_before_anything_is_dropped():
    async with opened(max_bytes=64 << 10, overflow="drop_oldest", durability="os") as queue:
        while queue.stats().disk_bytes + 1_100 < queue.config.usable_bytes:
            await queue.put(b"x" * 1_000)
        lease = await queue.lease(20, wait=0)
        await lease.ack()
        await queue.put(b"y" * 1_000)
        assert queue.stats().dropped == {}


@pytest.mark.parametrize("kind", ["write", "sync", "truncate"])
async def test_d_2_what_always_confirms_is_there_after_a_power_cut(kind):
    for place in range(1, 12):
        files = RecordingFiles()
        seen = {"all": 0}

        def fault(call, path, place=place, seen=seen):
            if not path.name.endswith(SEGMENT) or call not in (kind, "truncate"):
                return None
            seen["all"] += 1
            return io_error() if seen["all"] in (place, place + 1) else None

        queue = await opened(files)
        files.fault = fault
        results = await asyncio.gather(
            *(queue.put_many([bytes([65 + at]) * 90_000]) for at in range(4)), return_exceptions=True
        )
        confirmed = [result.start for result in results if isinstance(result, range)]
        async with opened(files.all_unsynced_lost(len(files.log))) as again:
            assert set(confirmed) <= set(await drain(again))
        files.fault = None
        await queue.close()


async def test_d_3_a_failed_sync_at_a_rotation_and_a_kill_leave_a_queue_that_opens():
    files = RecordingFiles()
    failed = []

    def fault(call, path):
        if call == "sync" and failed == ["now"]:
            failed.append("done")
            return io_error()
        return None

    files.fault = fault
    queue = await opened(files, durability="interval", segment_bytes=4_096)
    for _ in range(3):
        await queue.put(b"x" * 1_000)
    failed.append("now")
    await queue.put(b"y" * 2_000)
    assert queue.stats().sync_errors == 1
    killed = files.snapshot()
    for count in range(4, 7):
        async with opened(killed) as again:
            assert again.recovery.records == again.stats().records == count
            await again.put(b"z")
    await queue.close()


async def test_d_4_every_bit_of_queue_id_flipped_loses_nothing(tmp_path):
    async with DurableQueue.open(tmp_path / "q") as queue:
        await queue.put_many([b"%d" % number for number in range(10)])
    whole = (tmp_path / "q" / "queue.id").read_bytes()
    for at in range(len(whole)):
        hurt = bytearray(whole)
        hurt[at] ^= 1 << (at % 8)
        files = RecordingFiles(base={ROOT / "queue.id": bytes(hurt), **_content(tmp_path / "q")})
        async with opened(files) as queue:
            assert len(await drain(queue)) == 10
            assert queue.recovery.quarantined == ()
    (tmp_path / "q" / "queue.id").write_bytes(whole.replace(b'"queue_id": "', b'"queue_id": "0')[:-4])
    assert inspect.verify(tmp_path / "q").problems


def _content(place: Path) -> dict[Path, bytes]:
    return {ROOT / path.name: path.read_bytes() for path in place.iterdir() if path.suffix in (SEGMENT, ".ack")}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.ESTALE])
async def test_d_5_what_can_not_be_opened_is_an_error_and_never_damage(number):
    files = RecordingFiles()
    async with opened(files, segment_bytes=700) as queue:
        for at in range(6):
            await queue.put(b"%d" % at + bytes(300))
    files = files.snapshot()
    for call in ("open_read", "size"):
        once = []

        def fault(asked, path, call=call, once=once):
            if asked == call and path.name.endswith("2.bqs") and not once:
                once.append(1)
                return io_error(number)
            return None

        files.fault = fault
        with pytest.raises(DurableQueueError, match=errno.errorcode[number]):
            await opened(files)
    files.fault = None
    async with opened(files) as queue:
        assert (queue.recovery.records, queue.recovery.quarantined) == (6, ())


class BadSector(RecordingFiles):
    """One range of one file that the device fails to read."""

    bad: tuple[str, int, int] = ("", 0, 0)

    def read(self, descriptor, size, offset):
        name, low, high = self.bad
        if self.descriptors[descriptor][1].name == name and offset < high and offset + size > low:
            raise io_error()
        return super().read(descriptor, size, offset)


@pytest.mark.parametrize("where", ["first header", "amid", "footer", "every header"])
async def test_d_6_a_sector_that_can_not_be_read_costs_what_is_in_it(where):
    files = RecordingFiles()
    async with opened(files, segment_bytes=30_000) as queue:
        for at in range(20):
            await queue.put_many([b"%02d/%d" % (at, one) + bytes(1_000) for one in range(5)])
    content = files.snapshot().base
    name = sorted(path.name for path in content if path.suffix == SEGMENT)[1]
    size = len(content[ROOT / name])
    bad = BadSector(base=content)
    places = {
        "first header": (0, 512),
        "amid": (12_288, 12_800),
        "footer": (size - 144, size),
        "every header": (0, 4_096),
    }
    bad.bad = (name, *places[where])
    for _ in range(2):
        async with opened(bad) as queue:
            found = await drain(queue)
            lost = 100 - len(found)
            assert lost <= {"first header": 0, "amid": 5, "footer": 5, "every header": 30}[where]
            assert queue.stats().damaged == 0
            assert queue.recovery.damaged_records == 0
    # The device gives it again: nothing was given up.
    async with opened(RecordingFiles(base=bad.snapshot().base)) as queue:
        assert len(await drain(queue)) == 100


def no_header_of(name):
    """The device fails at one file while it is opened."""
    return lambda call, path: io_error() if call == "read" and path.name == name else None


async def test_d_6_numbers_of_a_segment_that_can_not_be_read_are_not_given_again():
    """After an unclean end the numbers have moved on, and only the unreadable segment knows that."""
    files = RecordingFiles()
    queue = await opened(files)
    await queue.put(b"first")
    files = files.snapshot()  # a kill
    async with opened(files) as queue:
        confirmed = await queue.put(b"second")
    files = files.snapshot()
    newest = max(path.name for path in files.entries if path.suffix == SEGMENT)
    files.fault = no_header_of(newest)
    async with opened(files) as queue:
        assert queue.recovery.unreadable == (newest,)
        later = await queue.put(b"third")
    assert later > confirmed
    files.fault = None
    async with opened(files.snapshot()) as queue:
        assert sorted((await drain(queue)).values()) == [b"first", b"second", b"third"]


@pytest.mark.parametrize("hurt", ["missing", "unreadable"])
async def test_d_6_who_the_queue_is_is_not_made_up_when_nothing_can_be_read(hurt):
    """A new id would make all of its segments another queue's, at the opening after this one."""
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put(b"confirmed")
        identity = queue.queue_id
    base = {path: data for path, data in files.snapshot().base.items() if hurt != "missing" or path.name != "queue.id"}
    files = RecordingFiles(base=base)
    files.fault = lambda call, path: io_error() if call == "read" else None
    with pytest.raises(DurableQueueError, match=r"neither queue\.id nor the header of a segment"):
        await opened(files)
    files.fault = None
    async with opened(files) as queue:
        assert queue.queue_id == identity
        assert list((await drain(queue)).values()) == [b"confirmed"]


async def test_d_7_without_the_lock_file_the_directory_still_has_one_owner(tmp_path):
    async with DurableQueue.open(tmp_path / "q") as owner:
        await owner.put(b"1")
        (tmp_path / "q" / "lock").unlink()
        with pytest.raises(LockedError):
            await DurableQueue.open(tmp_path / "q")
        await owner.put(b"2")
    async with DurableQueue.open(tmp_path / "q") as again:
        assert again.recovery.records == 2


@pytest.mark.parametrize("error", [MemoryError, ValueError, RuntimeError])
async def test_d_8_no_number_is_given_twice_whatever_breaks_a_round(error):
    for place in range(1, 6):
        files = RecordingFiles()
        queue = await opened(files)
        await queue.put(b"first")
        writes = []

        def fault(call, path, writes=writes, place=place):
            if call == "write" and path.name.endswith(SEGMENT):
                writes.append(1)
                if len(writes) == place:
                    raise error

        files.fault = fault
        results = await asyncio.gather(
            *(queue.put_many([bytes([65 + at]) * 200_000]) for at in range(3)), return_exceptions=True
        )
        files.fault = None
        confirmed = {result.start: bytes([65 + at]) for at, result in enumerate(results) if isinstance(result, range)}
        for at in range(3):
            seq = await queue.put(b"%d" % at)
            assert seq not in confirmed
            confirmed[seq] = b"%d" % at
        await queue.close()
        async with opened(files.snapshot()) as again:
            found = {seq: payload[:1] for seq, payload in (await drain(again)).items()}
            assert confirmed.items() <= found.items()


async def test_d_9_requeueing_into_a_full_queue_keeps_the_letters():
    async with opened(max_records=10, overflow="drop_newest") as queue:
        await queue.put_many([b"p%d" % at for at in range(8)])
        await (await queue.lease()).dead_letter("later")
        await queue.put_many([b"n%d" % at for at in range(8)])
        with pytest.raises(DiskFullError, match="no room for more of them"):
            await queue.requeue_dead_letters()
        assert len(await queue.dead_letters()) == 6  # two have found room
        lease = await queue.lease()
        found = [record.payload for record in lease.records]
        await lease.ack()
        assert await queue.requeue_dead_letters() == 6
        found += (await drain(queue)).values()
        assert sorted(found) == sorted(b"%c%d" % (letter, at) for letter in b"np" for at in range(8))
        assert await queue.dead_letters() == []


async def test_d_10_drop_oldest_on_a_disk_smaller_than_a_segment():
    files = RecordingFiles(capacity=300_000)
    async with opened(files, overflow="drop_oldest") as queue:
        least = 1 << 30
        for _ in range(800):
            await queue.put(b"x" * 1_000)
            if queue.stats().dropped:
                least = min(least, queue.stats().records)
        assert least > 200


async def test_d_11_sealed_segments_are_synced_and_a_failed_sync_is_made_good():
    files = RecordingFiles()
    queue = await opened(files, durability="os", segment_bytes=4_096, stale_flush=0.2)
    for number in range(20):
        await queue.put(b"%04d" % number * 200)
    await asyncio.sleep(1)
    async with opened(files.all_unsynced_lost(len(files.log))) as again:
        assert len(await drain(again)) == 20
    await queue.close()
    files, failing = RecordingFiles(), {"sync": 0, "create": 0}

    def fault(call, path):
        if failing.get(call) and path.name.endswith(SEGMENT):
            failing[call] -= 1
            return io_error(errno.EIO if call == "sync" else errno.ENOSPC)
        return None

    files.fault = fault
    queue = await opened(files, durability="interval", sync_interval=0.1)
    for number in range(20):
        await queue.put(b"%04d" % number)
    failing.update(sync=1, create=1)
    await asyncio.sleep(1)
    async with opened(files.all_unsynced_lost(len(files.log))) as again:
        assert len(await drain(again)) == 20
    await queue.close()


@pytest.mark.parametrize(
    "name", ["seg-9999999999999999999.bqs", "seg-9999999999999999999.ack", "seg-1.bqs", "seg-0000000000001.bqs"]
)
async def test_d_12_a_stray_file_hides_nothing(name):
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put(b"0")
    files = RecordingFiles(base={**files.snapshot().base, ROOT / name: b""})
    async with opened(files) as queue:
        assert queue.recovery.strays == (name,)
        for _ in range(10):
            await queue.put(b"confirmed")
    async with opened(files.snapshot()) as queue:
        assert queue.recovery.records == 11
        assert ROOT / name in files.entries


@pytest.mark.parametrize("start", [0, 512])
async def test_d_13_a_zeroed_sector_costs_no_segment(start):
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put_many([b"%d" % number for number in range(1_000)])
    base = dict(files.snapshot().base)
    (path,) = [path for path in base if path.suffix == SEGMENT]
    base[path] = base[path][:start] + bytes(64) + base[path][start + 64 :]
    async with opened(RecordingFiles(base=base)) as queue:
        assert queue.recovery.records == 1_000
    whole = files.snapshot().base[path]
    base[path] = bytes(fmt.DATA_START) + whole[fmt.DATA_START :]
    async with opened(RecordingFiles(base=base)) as queue:
        assert queue.recovery.records == 1_000


async def test_d_14_nothing_is_confirmed_into_a_directory_that_was_deleted(tmp_path):
    queue = await DurableQueue.open(tmp_path / "q")
    await queue.put(b"1")
    shutil.rmtree(tmp_path / "q")
    for _ in range(3):
        with pytest.raises(DurableQueueError):
            await queue.put(b"never")
    assert queue.stats().write_errors == 3
    await queue.close()


@pytest.mark.parametrize("left", [b"", b"BQAACK", bytes(32)], ids=["nothing", "a part", "zeros"])
@pytest.mark.parametrize("unreadable", [False, True])
async def test_d_47_an_acknowledgement_file_without_a_beginning_gets_one(left, unreadable):
    """A power failure leaves its name and not what was written; what is appended to that counts for nothing."""
    files = RecordingFiles()
    async with opened(files) as queue:
        await queue.put_many([b"a", b"b"])
    (path,) = (path for path in files.entries if path.suffix == ".bqs")
    base = {**files.snapshot().base, path.with_suffix(".ack"): left}
    files = RecordingFiles(base=base)
    if unreadable:
        files.fault = lambda call, path: io_error() if call in ("size", "read") and path.suffix == ".ack" else None
    queue = await opened(files)
    lease = await queue.lease()
    await lease.ack([lease.records[0].seq])
    await asyncio.sleep(1)
    files.fault = None
    async with opened(files.snapshot()) as again:
        assert list((await drain(again)).values()) == [b"b"]
    await queue.close()


async def test_d_49_what_is_known_of_records_that_move_as_the_queue_closes_goes_with_them():
    """The last sync fails, and what it should have covered is written to a fresh segment: so are its notes."""
    files = RecordingFiles()
    async with opened(files, max_attempts=3) as queue:
        for payload in (b"a", b"b", b"c"):
            await queue.put(payload, durability="interval")
        lease = await queue.lease()
        await lease.ack([lease.records[0].seq])
        await asyncio.sleep(0.02)
        files.fault = OneFailure()
    assert files.fault.done
    files.fault = None
    async with opened(files, max_attempts=3) as queue:
        found = (await queue.lease(wait=0)).records
        assert [(record.payload, record.attempts) for record in found] == [(b"b", 2), (b"c", 2)]


class Full:
    """While it is on, the disk takes writes into the page cache, and nothing else."""

    on = False

    def __call__(self, call: str, _path: Path) -> OSError | None:
        return io_error(errno.ENOSPC) if self.on and call in ("sync", "truncate", "create", "unlink") else None


async def left_after_kills(files: RecordingFiles, since: int) -> set[tuple[bytes, ...]]:
    """What the next opening delivers, for each moment of a kill."""
    found: set[tuple[bytes, ...]] = set()
    for moment in range(since, len(files.log) + 1):
        async with opened(files.killed(moment)) as queue:
            found.add(tuple((await drain(queue)).values()))
    return found


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_d_44_what_waits_for_room_is_never_on_the_disk_under_two_numbers(many, cancelled):
    """Its first copy could not be taken off the disk, and stays as long as another record of that segment does."""
    files = RecordingFiles()
    files.fault = full = Full()
    new = [b"new", b"newer"] if many else [b"new"]
    async with opened(files, segment_bytes=250) as queue:
        await queue.put(b"old")
        since = len(files.log)
        full.on = True
        putting = asyncio.create_task(queue.put_many(new) if many else queue.put(new[0]))
        await asyncio.sleep(1)
        if cancelled:
            putting.cancel()  # too late: it is on the disk
        full.on = False
        assert (await asyncio.gather(putting, return_exceptions=True))[0] in (2, range(2, 4)) or cancelled
        await asyncio.sleep(1)
        assert await left_after_kills(files, since) == {(b"old",), (b"old", *new)}
        assert await queue.put(bytes(200)) == 2 + len(new)
        lease = await queue.lease()
        assert [record.payload for record in lease.records] == [b"old", *new, bytes(200)]
        await lease.ack([record.seq for record in lease.records[1:]])
        await queue.put(b"last")
        await asyncio.sleep(1)
        assert queue.stats().segments == 2  # that of the old one and the newest: the second copy is gone
        assert await left_after_kills(files, len(files.log)) == {(b"old", b"last")}
        stats = queue.stats()
        assert (stats.records, stats.put) == (2, 3 + len(new))
        await lease.ack()
    async with opened(files) as queue:
        assert list((await drain(queue)).values()) == [b"last"]


@pytest.mark.parametrize("level", ["always", "interval"])
async def test_d_44_what_was_written_again_at_once_does_not_come_back_either(level):
    """The first copy could not be cut off; the second is acknowledged, and its segment deleted."""
    files = RecordingFiles()
    once = OneFailure()
    async with opened(files, segment_bytes=250) as queue:
        await queue.put(b"old")
        files.fault = lambda call, path: (
            io_error() if call == "truncate" else once(call, path) if not path.name.endswith(".ack") else None
        )
        await queue.put(b"new", level)
        await asyncio.sleep(5)
        assert queue.stats().sync_errors == 1
        await queue.put(bytes(200))
        lease = await queue.lease()
        await lease.ack([record.seq for record in lease.records[1:]])
        await queue.put(bytes(200))
        await asyncio.sleep(1)
        files.fault = None
        assert await left_after_kills(files, len(files.log)) == {(b"old", bytes(200))}


async def test_d_50_a_large_put_that_is_written_again_is_whole_in_one_of_its_copies():
    """A kill amid that leaves a part of its frames in the fresh segment, and all of them in the abandoned one."""
    files = RecordingFiles()
    payloads = [bytes([number]) * 100_000 for number in range(6)]
    async with opened(files) as queue:
        await queue.put_many(payloads, "interval")
        since = len(files.log)
        files.fault = OneFailure()
        await asyncio.sleep(5)
        assert queue.stats().sync_errors == 1
    for moment in range(since, len(files.log)):
        for torn in (0.0, 0.3, 0.6, 0.9):
            async with opened(files.killed(moment, torn=torn)) as queue:
                assert list((await drain(queue)).values()) == payloads


async def test_d_15_every_new_name_is_durable(tmp_path):
    class Watched(OsFiles):
        synced: list[Path] = []  # noqa: RUF012 - one test, one list

        def sync_directory(self, path):
            self.synced.append(path)
            super().sync_directory(path)

    files = Watched()
    place = tmp_path / "spool" / "logs"
    async with DurableQueue.open(place, files=files) as queue:
        await queue.put(b"dead")
        await (await queue.lease()).dead_letter("because")
    assert {tmp_path, place.parent, place, place / "dead"} <= set(files.synced)


def test_d_15_a_link_and_a_missing_parent_need_no_right_that_was_not_needed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    code = (
        "import asyncio, sys, batchqueue_async as bq\n"
        "async def main():\n"
        "    async with bq.DurableQueue.open(sys.argv[1]) as queue:\n"
        "        print(await queue.put(b'x'))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "link")], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout == "1\n"
    assert segments(tmp_path / "real")
