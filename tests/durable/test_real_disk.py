"""What only a real file system can show: a full tmpfs, a read-only one, and ten million records."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
from durable_kit import drain, eventually
from mounts import mounted

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.errors import DiskFullError, DurableQueueError
from batchqueue_async.testing import VirtualTimeLoop


@contextmanager
def formatted(path, *, megabytes):
    """An ext4 of its own in a file, where this machine allows one."""
    image, place = path / "image", path / "mounted"
    image.write_bytes(b"")
    os.truncate(image, megabytes << 20)
    place.mkdir()
    for command in (["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a loop mount is not possible here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def disk_command(action, path):
    """What `batchqueue disk` says, from a process of its own."""
    command = [sys.executable, "-m", "batchqueue_async.cli.main", "disk", action, str(path), "--json"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


async def aside(call, *arguments, **options):
    """Run a process without the loop: on a busy machine its start alone may take longer than virtual time waits."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualTimeLoop):
        loop.stall_timeout = 120.0
    return await asyncio.to_thread(call, *arguments, **options)


@pytest.fixture(autouse=True)
def _needs_root():
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting needs root on Linux")


@pytest.mark.every_loop
async def test_a_full_tmpfs_blocks_puts_until_acks_have_freed_it(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as place:
        async with DurableQueue.open(place / "queue") as queue:
            producer = asyncio.create_task(produce(queue, 300))
            got = []
            await eventually(lambda: queue.stats().disk_full)
            while len(got) < 300:
                lease = await queue.lease(400)
                got += [record.payload[:4] for record in lease.records]
                await lease.ack()
            await producer
            assert got == [b"%04d" % number for number in range(300)]
            assert queue.stats().disk_full > 0


async def produce(queue, count):
    for number in range(count):
        await queue.put(b"%04d" % number + os.urandom(10_000))


@pytest.mark.every_loop
async def test_a_full_disk_that_somebody_else_frees_and_the_commands_beside_it(tmp_path):
    """A file system of its own: files of others fill it, and what they give back is noticed."""
    with formatted(tmp_path, megabytes=8) as place:
        async with DurableQueue.open(place / "queue") as queue:
            (place / "ballast").write_bytes(bytes(3 << 20))
            producer = asyncio.create_task(produce(queue, 500))
            await eventually(lambda: queue.stats().disk_full > 2)
            assert not producer.done()
            waiting = queue.stats().records
            assert waiting > 50
            for action in ("inspect", "stats", "verify", "dump"):
                text = await aside(disk_command, action, place / "queue")
                if action == "stats":
                    assert json.loads(text)["records"] == waiting
            lease = await queue.lease(20)
            assert len(lease) == 20
            assert await lease.ack() == 20
            (place / "ballast").unlink()
            await eventually(lambda: queue.stats().records > waiting)
            got = 20
            while got < 500:
                async with await queue.lease(100) as lease:
                    assert [int(record.payload[:4]) for record in lease.records] == list(range(got, got + len(lease)))
                    got += len(lease)
            await producer
            await aside(disk_command, "verify", place / "queue")
        async with DurableQueue.open(place / "queue") as queue:
            assert queue.recovery.records == 0
            assert queue.recovery.clean


async def test_a_put_that_waits_for_a_full_disk_can_be_cancelled(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as place:
        async with DurableQueue.open(place / "queue") as queue:
            puts = [asyncio.create_task(queue.put(b"%04d" % number + bytes(10_000))) for number in range(200)]
            await eventually(lambda: queue.stats().disk_full)
            written = [task for task in puts if task.done()]
            for task in puts[::2]:
                task.cancel()
            gone = [task for task in puts[::2] if task not in written]
            with pytest.raises(asyncio.CancelledError):
                await gone[0]
            kept = {b"%04d" % number for number, task in enumerate(puts) if task not in gone}
            got = set()
            while len(got) < len(kept):
                async with await queue.lease(10) as lease:
                    got |= {record.payload[:4] for record in lease.records}
            assert got == kept
            assert queue.stats().pending == 0


@pytest.mark.every_loop
@pytest.mark.parametrize("overflow", ["reject", "drop_oldest", "drop_newest"])
async def test_a_full_tmpfs_with_the_other_policies(tmp_path, overflow):
    config = DurableConfig(overflow=overflow, segment_bytes=100_000)
    confirmed: dict[int, bytes] = {}
    refused = 0
    with mounted(tmp_path / "small", "size=1m") as place:
        async with DurableQueue.open(place / "queue", config) as queue:
            for number in range(200):
                payload = b"%04d" % number + os.urandom(10_000)
                try:
                    confirmed[await queue.put(payload)] = payload
                except DiskFullError:
                    refused += 1
        dropped = confirmed.pop(-1, None)
        async with DurableQueue.open(place / "queue", config) as queue:
            found = await drain(queue)
    assert bool(refused) == (overflow == "reject")
    assert (dropped is not None) == (overflow == "drop_newest")
    if overflow == "drop_oldest":
        assert confirmed.items() >= found.items()
        assert max(found) == max(confirmed)
        assert len(found) > 50
    else:
        assert found == confirmed


async def test_a_read_only_directory_is_refused_with_its_reason(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as place:
        async with DurableQueue.open(place / "queue") as queue:
            await queue.put(b"x")
        await aside(subprocess.run, ["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(DurableQueueError, match="Read-only"):
            await DurableQueue.open(place / "queue")


def test_ten_million_records_open_in_bounded_memory(tmp_path):
    # The time is the benchmark's to measure; the memory is looked at here, in a process of its own.
    code = """
import asyncio, resource, sys
from batchqueue_async.durable import DurableConfig, DurableQueue
async def make():
    async with DurableQueue.open(sys.argv[1], DurableConfig(durability="os", memory_bytes=1 << 20)) as queue:
        payloads = [b"0123456789abcdef"] * 10_000
        for _ in range(1_000):
            await queue.put_many(payloads)
async def look():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with DurableQueue.open(sys.argv[1]) as queue:
        assert queue.stats().records == 10_000_000
        assert queue.recovery.scanned == 0
        assert len(await queue.lease(100)) == 100
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
asyncio.run(make() if sys.argv[2] == "make" else look())
"""
    path = str(tmp_path / "queue")
    subprocess.run([sys.executable, "-c", code, path, "make"], check=True, timeout=100)
    done = subprocess.run(
        [sys.executable, "-c", code, path, "look"], check=True, timeout=60, capture_output=True, text=True
    )
    assert int(done.stdout) < 100 * 1024, "KiB"
    assert resource.RLIMIT_AS
