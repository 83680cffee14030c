"""The durable queue's faults on file systems of the machine's own, where it lets us make them.

What the kernel refuses is skipped with its own words as the reason. Without root, a namespace of its own still lets
this file mount a tmpfs: see the last test.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import struct
import subprocess
import sys
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from durable_kit import drain, segments

from batchqueue_async.cli.main import main
from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.errors import DurableQueueError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
IS_ROOT = sys.platform == "linux" and os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="mounting needs root on Linux")
# Of ext4 and XFS: everything that is not on the device by now is gone, as when the power goes.
_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
SECTORS = 40_000


def ran(*command: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def needed(*command: str | Path) -> str:
    """Its output; what this machine refuses is a reason to skip."""
    done = ran(*command)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        pytest.skip(f"this machine refuses {' '.join(map(str, command[:3]))} ...: {words[0] if words else 'no reason'}")
    return done.stdout.strip()


@contextmanager
def mounted(place: Path, *options: str | Path) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    needed("mount", *options, place)
    try:
        yield place
    finally:
        ran("umount", "-l", place)


def tmpfs(place: Path, size: str = "4m") -> AbstractContextManager[Path]:
    return mounted(place, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def image(path: Path, megabytes: int) -> Path:
    """An ext4 in a sparse file."""
    path.write_bytes(b"")
    os.truncate(path, megabytes << 20)
    needed("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", path)
    return path


def looped(path: Path, place: Path, options: str = "loop") -> AbstractContextManager[Path]:
    return mounted(place, "-o", options, path)


async def confirm(queue: DurableQueue, numbers: range) -> list[bytes]:
    """The payloads whose puts were confirmed; it ends with the first that is refused."""
    confirmed = []
    for number in numbers:
        payload = b"%04d" % number + os.urandom(3_000)
        try:
            await queue.put(payload)
        except DurableQueueError:
            break
        confirmed.append(payload)
    return confirmed


@needs_root
async def test_d_22_a_read_only_remount_fails_puts_and_loses_nothing(tmp_path):
    with tmpfs(tmp_path / "small") as place:
        async with DurableQueue.open(place / "q") as queue:
            await confirm(queue, range(5))
        # The kernel refuses it while a segment is open for writing: before the first put, none is.
        async with DurableQueue.open(place / "q") as queue:
            needed("mount", "-o", "remount,ro", place)
            with pytest.raises(DurableQueueError, match="Read-only"):
                await queue.put(b"never")
            assert len(await queue.lease(2)) == 2
            needed("mount", "-o", "remount,rw", place)
            assert await queue.put(b"writable again") > 0
        async with DurableQueue.open(place / "q") as queue:
            assert len(await drain(queue)) == 6


@needs_root
async def test_d_5_a_read_only_file_system_is_a_clear_error_at_the_opening(tmp_path, capsys):
    with tmpfs(tmp_path / "small") as place:
        async with DurableQueue.open(place / "q") as queue:
            await confirm(queue, range(5))
        needed("mount", "-o", "remount,ro", place)
        before = {path: path.read_bytes() for path in (place / "q").iterdir()}
        with pytest.raises(DurableQueueError, match="Read-only"):
            await DurableQueue.open(place / "q")
        # Who only looks can look.
        for action in ("inspect", "verify", "dump", "stats"):
            assert await asyncio.to_thread(main, ["disk", action, str(place / "q")]) == 0
        assert await asyncio.to_thread(main, ["disk", "repair", str(place / "q")]) == 2
        assert "Read-only" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in (place / "q").iterdir()} == before


@needs_root
async def test_d_22_a_file_system_that_turns_read_only_by_itself_confirms_nothing_more(tmp_path):
    """What ext4 does when its journal fails, with the segment open."""
    path = image(tmp_path / "image", 24)
    with looped(path, tmp_path / "mount") as place:
        queue = await DurableQueue.open(place / "q")
        confirmed = await confirm(queue, range(10))
        assert len(confirmed) == 10
        needed("mount", "-o", "remount,abort", place)
        assert await confirm(queue, range(10, 12)) == []
        assert queue.stats().write_errors
        with suppress(DurableQueueError):
            await queue.close()
        needed("umount", place)
        with looped(path, place):
            async with DurableQueue.open(place / "q") as again:
                assert list((await drain(again)).values()) == confirmed


@needs_root
@pytest.mark.parametrize("level", ["always", "os"])
async def test_d_2_what_is_confirmed_is_there_when_the_power_goes(tmp_path, level):
    """A file system that is shut down: nothing more reaches the device; the next mount replays its journal."""
    path = image(tmp_path / "image", 24)
    with looped(path, tmp_path / "mount") as place:
        queue = await DurableQueue.open(place / "q", DurableConfig(segment_bytes=20_000))
        confirmed = await confirm(queue, range(30))
        for number in range(10):
            await queue.put(b"%d" % number, durability=level)
        descriptor = os.open(place, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        except OSError as error:
            pytest.skip(f"this file system can't be shut down: {error.strerror}")
        finally:
            os.close(descriptor)
        assert await confirm(queue, range(100, 102)) == []
        with suppress(DurableQueueError):
            await queue.close()
        needed("umount", place)
        with looped(path, place):
            async with DurableQueue.open(place / "q") as again:
                found = list((await drain(again)).values())
                assert found[: len(confirmed)] == confirmed
                assert level == "os" or len(found) == len(confirmed) + 10
                assert again.recovery.damaged_records == 0


@needs_root
@pytest.mark.parametrize("readable", [True, False])
async def test_d_2_a_device_that_fails_to_write_confirms_nothing_that_is_not_there(tmp_path, readable):
    """A loop device whose backing file can not grow any more: real writeback errors, told by fsync once."""
    with tmpfs(tmp_path / "backing", "40m") as backing:
        path = image(backing / "image", 200)
        with looped(path, tmp_path / "mount") as place:
            queue = await DurableQueue.open(place / "q", DurableConfig(segment_bytes=100_000))
            confirmed = await confirm(queue, range(20))
            with suppress(OSError), (backing / "ballast").open("wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(1 << 16))
            confirmed += await confirm(queue, range(20, 3_000))
            assert len(confirmed) < 2_900, "the device did not fail"
            assert queue.stats().write_errors or queue.stats().disk_full
            if readable:
                assert list((await drain(queue)).values()) == confirmed
            (backing / "ballast").unlink()
            with suppress(DurableQueueError):
                await queue.close()
            needed("umount", place)
            # Only what the device has is seen from here on.
            with looped(path, place):
                async with DurableQueue.open(place / "q") as again:
                    assert list((await drain(again)).values())[: len(confirmed)] == confirmed
                    assert await again.put(b"and on it goes") > 0


@contextmanager
def error_target(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """An ext4 on a device-mapper target whose table a test can exchange for one that fails."""
    name = f"bq-{os.getpid()}"
    path = tmp_path / "image"
    path.write_bytes(b"")
    os.truncate(path, SECTORS * 512)
    needed("dmsetup", "version")
    device = needed("losetup", "--show", "-f", path)
    try:
        needed("dmsetup", "create", name, "--table", f"0 {SECTORS} linear {device} 0")
        needed("mkfs.ext4", "-q", f"/dev/mapper/{name}")
        with mounted(tmp_path / "mount", f"/dev/mapper/{name}") as place:
            yield place, name
    finally:
        ran("dmsetup", "remove", "--force", name)
        ran("losetup", "-d", device)


@needs_root
async def test_d_2_a_device_that_fails_confirms_nothing_that_is_not_there(tmp_path):
    with error_target(tmp_path) as (place, name):
        queue = await DurableQueue.open(place / "q")
        await queue.put(b"before")
        needed("dmsetup", "suspend", "--noflush", name)
        needed("dmsetup", "load", name, "--table", f"0 {SECTORS} error")
        needed("dmsetup", "resume", name)
        with pytest.raises(DurableQueueError):
            await queue.put(b"never")
        assert queue.stats().write_errors
        with suppress(DurableQueueError):
            await queue.close()


@needs_root
async def test_d_10_drop_oldest_on_a_full_tmpfs_drops_what_it_must(tmp_path):
    with tmpfs(tmp_path / "small", "2m") as place:
        async with DurableQueue.open(place / "q", DurableConfig(overflow="drop_oldest")) as queue:
            for number in range(2_000):
                await queue.put(b"%04d" % number + bytes(3_000))
            assert queue.stats().dropped["oldest"]
            found = [int(payload[:4]) for payload in (await drain(queue)).values()]
            # The newest in order, and a good part of what the disk holds.
            assert found == list(range(2_000 - len(found), 2_000))
            assert len(found) * 3_000 > 1 << 20
        assert segments(place / "q")


@pytest.mark.skipif(IS_ROOT or sys.platform != "linux", reason="as root, the tests above run by themselves")
def test_the_tests_of_this_file_that_a_namespace_allows(tmp_path):
    """Without root: in a user namespace, where a tmpfs can be mounted though no loop device."""
    if shutil.which("unshare") is None or ran("unshare", "-Urm", sys.executable, "-c", "").returncode:
        pytest.skip("this machine does not let its users make namespaces")
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inside'}"]
    files = [__file__, ROOT / "tests" / "durable" / "test_real_disk.py"]
    command = ["unshare", "-Urm", sys.executable, "-m", "pytest", *options, "-k", "tmpfs", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-5_000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout[-5_000:]
