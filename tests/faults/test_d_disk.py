"""The durable queue's faults on file systems of the machine's own, where it lets us make them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from durable_kit import drain

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.errors import DurableQueueError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECTORS = 40_000


@pytest.fixture(autouse=True)
def _root_on_linux() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting needs root on Linux")


def ran(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def tmpfs(place: Path) -> Iterator[Path]:
    place.mkdir()
    if not ran("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)):
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        yield place
    finally:
        ran("umount", "-l", str(place))


async def test_d_22_a_read_only_remount_fails_puts_and_loses_nothing(tmp_path):
    with tmpfs(tmp_path / "small") as place:
        async with DurableQueue.open(place / "q", DurableConfig(segment_bytes=4_000)) as queue:
            for number in range(5):
                await queue.put(b"%d" % number)
            if not ran("mount", "-o", "remount,ro", str(place)):
                pytest.skip("this machine does not allow a read-only remount")
            # What is open for writing keeps a tmpfs writable in some kernels: then the puts are good ones.
            for number in range(5, 20):
                try:
                    await queue.put(b"%d" % number + bytes(1_000))
                except DurableQueueError:
                    break
            confirmed = queue.stats().records
            assert len(await drain(queue)) == confirmed
            ran("mount", "-o", "remount,rw", str(place))
            assert await queue.put(b"writable again") > 0
        async with DurableQueue.open(place / "q") as queue:
            assert len(await drain(queue)) == confirmed + 1


@contextmanager
def error_target(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """An ext4 on a device-mapper target whose table a test can exchange for one that fails."""
    name = f"bq-{os.getpid()}"
    if shutil.which("dmsetup") is None:
        pytest.skip("dmsetup is not installed")
    image = tmp_path / "image"
    image.write_bytes(b"")
    os.truncate(image, SECTORS * 512)
    loop = subprocess.run(["losetup", "--show", "-f", str(image)], capture_output=True, text=True, check=False)
    if loop.returncode:
        pytest.skip("this machine has no loop devices to give")
    device = loop.stdout.strip()
    place = tmp_path / "mount"
    place.mkdir()
    try:
        table = f"0 {SECTORS} linear {device} 0"
        if not ran("dmsetup", "create", name, "--table", table):
            pytest.skip("this machine does not allow device-mapper targets")
        if not (ran("mkfs.ext4", "-q", f"/dev/mapper/{name}") and ran("mount", f"/dev/mapper/{name}", str(place))):
            pytest.skip("no ext4 can be made and mounted here")
        yield place, name
    finally:
        ran("umount", "-l", str(place))
        ran("dmsetup", "remove", "--force", name)
        ran("losetup", "-d", device)


async def test_d_2_a_device_that_fails_confirms_nothing_that_is_not_there(tmp_path):
    with error_target(tmp_path) as (place, name):
        async with DurableQueue.open(place / "q") as queue:
            await queue.put(b"before")
            ran("dmsetup", "suspend", "--noflush", name)
            ran("dmsetup", "load", name, "--table", f"0 {SECTORS} error")
            ran("dmsetup", "resume", name)
            with pytest.raises(DurableQueueError):
                await queue.put(b"never")
            assert queue.stats().write_errors
