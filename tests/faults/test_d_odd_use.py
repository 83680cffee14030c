"""D-30 to D-36: odd arguments, keys, reasons, directories that change under their owner, forks, openings that end."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from durable_kit import drain, eventually, opened, segments

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.errors import ConfigError, DurableQueueError


@pytest.mark.parametrize("arguments", [(2.5,), ("3",), (None,), (0,), (3, 2.5), (3, 0)])
async def test_d_30_a_lease_with_an_odd_limit_takes_nothing_along(arguments):
    async with opened() as queue:
        await queue.put(b"alone")
        await queue.put_many([b"one", b"two", b"three"])
        with pytest.raises(ConfigError, match="whole number of at least 1"):
            await queue.lease(*arguments, wait=0)
        assert len(await drain(queue)) == 4


@pytest.mark.parametrize("seqs", [[1.0], [2, math.nan], ["1"], [None], 3, [-1], [1 << 70]])
async def test_d_30_numbers_that_are_none_settle_nothing(seqs):
    async with opened() as queue:
        await queue.put_many([b"one", b"two", b"three"])
        lease = await queue.lease(wait=0)
        for call in (lease.ack, lambda odd: lease.nack(0, odd), lambda odd: lease.dead_letter("why", odd)):
            with pytest.raises(ConfigError):
                await call(seqs)
        assert lease.unsettled == 3
        assert await lease.ack([True, 2]) == 2
        assert await lease.ack() == 1


async def test_d_30_odd_times_are_refused_and_long_ones_are_long():
    async with opened() as queue:
        await queue.put_many([b"one", b"two", b"three"])
        lease = await queue.lease(wait=0)
        for delay in (math.nan, "1", None, -1.0):
            with pytest.raises(ConfigError, match="delay="):
                await lease.nack(delay)
        for wait in (math.nan, "1"):
            with pytest.raises(ConfigError, match="wait="):
                await queue.lease(1, wait=wait)
        for delay, record in zip((math.inf, 1e300, 1e12), lease.records, strict=True):
            assert await lease.nack(delay, [record.seq]) == 1
        waiting = asyncio.ensure_future(queue.lease(1, wait=1e300))
        await asyncio.sleep(3_600)
        assert not waiting.done()
        assert queue.stats().delayed == 3
        queue.hurry()
        assert len(await waiting) == 1


class Odd:
    """A key that can be hashed, and not compared."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise ValueError("never")


async def test_d_31_keys_that_can_not_be_compared_lose_no_record():
    async with opened(order="key", key=Odd) as queue:
        await queue.put_many([b"%d" % number for number in range(6)])
        found = []
        for _ in range(6):
            async with await queue.lease(wait=0) as lease:
                found += [record.payload for record in lease.records]
        assert sorted(found) == [b"%d" % number for number in range(6)]
        assert queue.stats().records == 0


@pytest.mark.parametrize("reason", ["no such file: caf\udce9", "x" * 4_095 + "é", ""])
async def test_d_32_any_text_is_a_reason(reason):
    async with opened() as queue:
        await queue.put(b"poison")
        assert await (await queue.lease(wait=0)).dead_letter(reason) == 1
        (letter,) = await queue.dead_letters()
        assert letter.payload == b"poison"
        assert letter.reason[:4_000] == reason.encode(errors="backslashreplace").decode()[:4_000]


@pytest.mark.parametrize("gone", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
async def test_d_33_another_directory_under_the_name_is_left_alone(tmp_path, gone):
    path = tmp_path / "queue"
    config = DurableConfig(segment_bytes=2_000)
    first = await DurableQueue.open(path, config)
    await first.put_many([b"first", b"second"])
    lease = await first.lease(1)
    await asyncio.to_thread(gone, path)
    with pytest.raises(DurableQueueError, match="deleted, moved or replaced"):
        await first.put(b"into nothing")
    async with DurableQueue.open(path, config) as second:
        await second.put_many([b"other", b"others"])
        before = {name.name: name.read_bytes() for name in path.glob("[ql]*")}
        (segment,) = segments(path)
        for _ in range(3):
            with pytest.raises(DurableQueueError, match="deleted, moved or replaced"):
                await first.put(b"x" * 1_500)
        await lease.ack()
        first.compact()
        await asyncio.sleep(0.05)
        await first.close()
        assert {name.name: name.read_bytes() for name in path.glob("[ql]*")} == before
        assert segments(path) == [segment]
    async with DurableQueue.open(path, config) as again:
        assert again.recovery.quarantined == ()
        assert list((await drain(again)).values()) == [b"other", b"others"]


async def test_d_34_a_program_that_changes_its_directory_keeps_its_queue(tmp_path):
    home = Path.cwd()
    os.chdir(tmp_path)
    try:
        queue: Any = await DurableQueue.open("queue", DurableConfig(segment_bytes=1_000))
        os.chdir(home)
        numbers = [await queue.put(b"x" * 600) for _ in range(4)]
        await queue.close()
        async with DurableQueue.open(tmp_path / "queue") as again:
            assert list(await drain(again)) == numbers
    finally:
        os.chdir(home)


@pytest.mark.parametrize("path", ["with\0nul"])
async def test_d_34_a_path_that_can_not_be_is_refused(path):
    with pytest.raises(ConfigError, match="NUL"):
        DurableQueue.open(path)


def test_d_35_a_lease_is_not_settled_in_a_forked_child(tmp_path):
    code = (
        "import asyncio, os, sys, batchqueue_async as bq\n"
        "async def child(lease):\n"
        "    for call in (lease.ack, lease.nack, lambda: lease.dead_letter('why')):\n"
        "        try:\n"
        "            print('settled', await call(), flush=True)\n"
        "        except bq.ForkedError as error:\n"
        "            print('refused', 'leased before a fork' in str(error), flush=True)\n"
        "async def main():\n"
        "    async with bq.DurableQueue.open(sys.argv[1]) as queue:\n"
        "        await queue.put(b'x')\n"
        "        lease = await queue.lease(1)\n"
        "        if not (pid := os.fork()):\n"
        "            asyncio.events._set_running_loop(None)\n"
        "            asyncio.new_event_loop().run_until_complete(child(lease))\n"
        "            os._exit(0)\n"
        "        os.waitpid(pid, 0)\n"
        "        print('parent', await lease.ack())\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "q")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "refused True\n" * 3 + "parent 1\n", done.stderr


@pytest.mark.real_time
async def test_d_36_an_opening_that_was_cancelled_no_longer_waits_for_the_lock(tmp_path):
    async with DurableQueue.open(tmp_path) as queue:
        waiting = asyncio.ensure_future(DurableQueue.open(tmp_path, DurableConfig(lock_timeout=3_600)).__aenter__())
        await eventually(lambda: threads() == 4)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await queue.put(b"x")
        # Its threads end; those of the owner stay.
        await eventually(lambda: threads() == 2)
    async with DurableQueue.open(tmp_path) as again:
        assert again.recovery.records == 1


def threads() -> int:
    """The I/O threads of queues that are open, or opening."""
    return sum(thread.name.startswith("batchqueue-") for thread in threading.enumerate())
