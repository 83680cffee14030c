"""D-23 to D-29: memory, time, limits, and what is told of it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from durable_kit import ROOT, GatedRunner, RecordingFiles, drain, eventually, flip, io_error, opened, segments

from batchqueue_async.cli.main import main
from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.durable.disk import acklog, inspect
from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.disk.files import OsFiles
from batchqueue_async.leases.lease import Lease
from batchqueue_async.leases.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

WINDOW = 1 << 20
SLACK = 8 << 20


async def grown(work: Any) -> int:
    """By how much the peak of Python's own memory was above what it was before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        await work
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


async def test_d_23_delayed_records_are_not_kept_in_memory(tmp_path):
    config = DurableConfig(memory_bytes=WINDOW, durability="os")
    async with DurableQueue.open(tmp_path, config) as queue:
        for _ in range(40):
            await queue.put_many([os.urandom(10_000) for _ in range(100)])

        async def delay_all() -> None:
            while lease := await queue.lease(1_000, wait=0):
                await lease.nack(delay=3_600)

        assert await grown(delay_all()) < WINDOW + 2 * SLACK
        assert queue.stats().delayed == 4_000
        queue.hurry()
        assert len(await drain(queue)) == 4_000


async def test_d_23_the_keys_of_delayed_records_are_bounded_by_bytes(tmp_path):
    config = DurableConfig(memory_bytes=WINDOW, durability="os", order="key", key=lambda payload: payload)
    async with DurableQueue.open(tmp_path, config) as queue:
        for start in range(0, 20_000, 1_000):
            await queue.put_many([b"%010d" % number for number in range(start, start + 1_000)])

        async def delay_all() -> None:
            while lease := await queue.lease(1_000, wait=0):
                await lease.nack(delay=3_600)

        assert await grown(delay_all()) < WINDOW + SLACK
        # As many as fit are out, and not the others: leasing waits until some come back.
        assert 1_000 <= queue.stats().delayed < WINDOW // 4 // 200 + 1_000
        queue.hurry()
        assert len(await drain(queue, ack=True)) == 20_000


async def test_d_23_keys_weigh_what_they_take():
    async with opened(order="key", key=lambda payload: payload, memory_bytes=1 << 20, max_record=1 << 20) as queue:
        for number in range(20):
            await queue.put(b"%06d" % number + bytes(100_000))
        leases = []
        while lease := await queue.lease(1, wait=0):
            leases.append(lease)
        # Three keys take more than a quarter of the window.
        assert len(leases) == 3
        await leases[0].ack()
        assert await queue.lease(1, wait=0)
        assert not await queue.lease(1, wait=0)


async def test_d_23_keys_that_lie_about_their_size_stop_nothing():
    sizes = iter([10_000_000, 0] * 1_000)

    class Odd(bytes):
        def __sizeof__(self):
            size = next(sizes)
            if not size:
                raise RuntimeError("no size")
            return size

    async with opened(order="key", key=Odd, memory_bytes=1 << 20) as queue:
        await queue.put_many([b"%d" % number for number in range(50)])
        seen = []
        while lease := await queue.lease(5, wait=0):
            seen += [record.payload for record in lease.records]
            await lease.ack()
        assert len(seen) == 50


async def test_d_23_freshest_after_a_partial_lease(tmp_path):
    config = DurableConfig(order="freshest", memory_bytes=WINDOW, durability="os")
    async with DurableQueue.open(tmp_path, config) as queue:
        await queue.put_many([b"a" * 100] * 100)
        await (await queue.lease(10)).ack()
        for _ in range(30):
            await queue.put_many([os.urandom(100_000) for _ in range(10)])
            assert queue.stats().memory_bytes <= WINDOW + 1_100_000
        assert len(await drain(queue)) == 390


async def test_d_23_small_records_count_for_what_they_take(tmp_path):
    config = DurableConfig(durability="os", memory_bytes=WINDOW)
    async with DurableQueue.open(tmp_path, config) as queue:

        async def fill() -> None:
            for _ in range(50):
                await queue.put_many([b"%04d" % (at % 10_000) for at in range(10_000)])

        assert await grown(fill()) < WINDOW + SLACK


async def test_d_23_one_letter_among_many_is_requeued_in_bounded_memory(tmp_path):
    config = DurableConfig(durability="os", memory_bytes=WINDOW)
    async with DurableQueue.open(tmp_path, config) as queue:
        for _ in range(20):
            await queue.put_many([os.urandom(10_000) for _ in range(100)])
            while lease := await queue.lease(100, wait=0):
                await lease.dead_letter("r")
    async with DurableQueue.open(tmp_path, config) as queue:
        # The window of the dead letters' own queue, and what is read into it at once.
        small = await grown(queue.requeue_dead_letters([5]))
        assert small < 40 << 20
        assert len(await queue.dead_letters(10_000)) == 1_999


@pytest.mark.untraced
async def test_d_23_records_that_are_delayed_one_by_one_take_some_bytes_each(tmp_path):
    config = DurableConfig(memory_bytes=WINDOW, durability="os")
    count = 30_000
    async with DurableQueue.open(tmp_path, config) as queue:
        for _ in range(count // 1_000):
            await queue.put_many([b"x" * 20] * 1_000)

        async def delay_each() -> None:
            while lease := await queue.lease(1_000, wait=0):
                for record in lease.records:
                    await lease.nack(3_600 + record.seq * 7_919 % 1_000, [record.seq])

        # 100 bytes each would come to 3 MB: of a million, 100 MB.
        assert await grown(delay_each()) < 2 * WINDOW + 64 * count
        assert queue.stats().delayed == count
        queue.hurry()
        assert len(await drain(queue)) == count


async def test_d_23_what_is_left_of_a_lease_does_not_keep_the_rest_of_it(tmp_path):
    config = DurableConfig(memory_bytes=WINDOW, durability="os")
    async with DurableQueue.open(tmp_path, config) as queue:
        acked = 0

        async def most_of_each() -> None:
            nonlocal acked
            for _ in range(60):
                await queue.put_many([os.urandom(10_000) for _ in range(50)])
                lease = await queue.lease(50, wait=0)  # fewer, where the rest has to be read first
                acked += len(lease.records) - 1
                later = [lease.records[-1].seq]
                await lease.nack(0.0, later)
                await lease.ack()

        assert await grown(most_of_each()) < WINDOW + 2 * SLACK
        assert acked > 1_000
        left = 60 * 50 - acked
        assert queue.stats().records == left
        assert len(await drain(queue)) == left


async def test_d_23_records_that_wait_for_their_key_are_within_the_window(tmp_path):
    config = DurableConfig(memory_bytes=WINDOW, durability="os", order="key", key=lambda payload: payload[:1])
    async with DurableQueue.open(tmp_path, config) as queue:
        for _ in range(40):
            await queue.put_many([b"k" + os.urandom(10_000) for _ in range(100)])
        first = await queue.lease(1)

        async def look_for_another_key() -> None:
            assert not await queue.lease(1, wait=0.3)

        assert await grown(look_for_another_key()) < WINDOW + 2 * SLACK
        assert queue.stats().memory_bytes <= 2 * WINDOW
        await first.ack()
        seen: list[int] = []
        while lease := await queue.lease(100, wait=0):
            seen += [record.seq for record in lease.records]
            await lease.ack()
        assert seen == list(range(2, 4_001))


class Owner:
    """Takes what a lease gives back."""

    def ack(self, lease: Lease, runs: list[Run]) -> int:
        return sum(run.high - run.low for run in runs)


async def test_d_24_a_partial_ack_costs_what_it_touches():
    """Counted, not timed: the runs that are cut. Of a lease of many runs, a call for one makes two at most."""
    frame = type("Block", (), {"payloads": [b""] * 1, "enqueued_ns": 0, "count": 1})()
    runs = [Run(seq, frame, 0, 1, 1) for seq in range(4_000)]
    lease = Lease(Owner(), runs, 0.0)  # type: ignore[arg-type]
    assert await lease.ack([seq for seq in range(4_000) if seq % 100]) == 3_960
    assert [run.seq for run in lease.unsettled_runs] == list(range(0, 4_000, 100))
    assert await lease.ack([0]) == 1
    assert lease.unsettled == 39


def calls_of(work: Any) -> int:
    """How many calls of functions a coroutine makes that never waits, those of C included."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        with pytest.raises(StopIteration):
            work.send(None)
    finally:
        sys.setprofile(None)
    return count


def test_d_24_a_partial_ack_among_many_costs_the_same():
    """Counted, not timed: of a lease of a hundred thousand runs, and of one of a hundred."""
    frame = type("Block", (), {"payloads": [b""] * 1, "enqueued_ns": 0, "count": 1})()

    def cost(runs: int) -> int:
        # Every other number, so that no two runs join.
        lease = Lease(Owner(), [Run(2 * at, frame, 0, 1, 1) for at in range(runs)], 0.0)  # type: ignore[arg-type]
        calls_of(lease.ack([0]))
        return calls_of(lease.ack([runs, runs + 2, runs + 20]))

    assert cost(100_000) < 2 * cost(100)


async def test_d_24_cancelled_puts_go_together():
    GatedRunner.shut, GatedRunner.held = False, []
    files = RecordingFiles()
    queue = await DurableQueue.open(ROOT, files=files, runner=GatedRunner)
    GatedRunner.shut = True
    first = asyncio.create_task(queue.put(b"first"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(queue.put(b"x")) for _ in range(3_000)]
    await asyncio.sleep(0.01)
    assert queue.stats().pending == 3_001
    for task in waiting[:2_999]:
        task.cancel()
    await asyncio.gather(*waiting[:2_999], return_exceptions=True)
    await asyncio.sleep(0)
    assert queue.stats().pending == 2
    GatedRunner.shut = False
    held, GatedRunner.held = GatedRunner.held, []
    for call in held:
        call()
    assert (await first, await waiting[-1]) == (1, 2)
    await queue.close()


async def test_d_24_closing_does_not_hold_the_loop_while_the_disk_reads(tmp_path):
    class Slow(OsFiles):
        slow = False

        def read(self, descriptor, size, offset):
            if self.slow and size > 1_000:
                time.sleep(0.5)
            return super().read(descriptor, size, offset)

    async with DurableQueue.open(tmp_path, DurableConfig(durability="os")) as queue:
        await queue.put_many([b"x" * 1_000] * 100)
    files = Slow()
    queue = await DurableQueue.open(tmp_path, files=files)
    files.slow = True
    reading = asyncio.create_task(queue.lease(1, wait=1))
    await asyncio.sleep(0)
    closing = asyncio.create_task(queue.close())
    await asyncio.sleep(0)
    # The loop turns while the thread still reads: that close had to wait for it would show as a closing that is done.
    assert not closing.done()
    await asyncio.gather(closing, reading, return_exceptions=True)


async def test_d_25_records_given_back_one_by_one_are_read_frame_by_frame():
    class Counting(RecordingFiles):
        read_bytes = 0

        def read(self, descriptor, size, offset):
            data = super().read(descriptor, size, offset)
            self.read_bytes += len(data)
            return data

    files = Counting()
    async with opened(files, durability="os", memory_bytes=100_000) as queue:
        await queue.put_many([bytes(5_000)] * 400)
        lease = await queue.lease(400, 1 << 30, wait=0)
        back = len(lease) - len(lease.records[::2])
        await lease.ack([record.seq for record in lease.records[::2]])
        await lease.nack()
        start, got = files.read_bytes, 0
        while got < back:
            again = await queue.lease(back - got, 100_000, wait=0)
            got += len(again)
            await again.ack()
        assert files.read_bytes - start <= 4 * 5_000 * back


async def test_d_25_a_drop_among_many_delayed_records_costs_what_it_drops():
    """Counted, not timed: at `max_records`, each put drops the oldest of 100 or 4,000 delayed records, or held ones."""

    async def cost(waiting: int, **options: Any) -> int:
        options = {"max_records": waiting, "overflow": "drop_oldest", "durability": "os", **options}
        async with opened(RecordingFiles(), **options) as queue:
            await asyncio.gather(*(queue.put(b"%d" % (at % 7)) for at in range(waiting)))
            lease = await queue.lease(waiting, wait=0)
            for record in lease.records[::2]:
                await lease.nack(1_000 + record.seq % 13, [record.seq])
            await lease.nack(1_000)
            dropper = queue._state.room.eviction
            assert queue.stats().delayed + len(lease) > 0

            async def drop() -> None:
                assert dropper.drop_oldest("max_records", 1, 10)

            calls = calls_of(drop())
            assert queue.stats().dropped == {"oldest": 1}
            return calls

    for options in ({}, {"order": "freshest"}, {"order": "key", "key": lambda payload: payload}):
        assert await cost(4_000, **options) < 2 * await cost(100, **options), options


async def test_d_25_few_records_among_many_are_read_without_the_others():
    class Counting(RecordingFiles):
        read_bytes = 0

        def read(self, descriptor, size, offset):
            data = super().read(descriptor, size, offset)
            self.read_bytes += len(data)
            return data

    files = Counting()
    async with opened(files, durability="os", memory_bytes=100_000) as queue:
        for _ in range(40):
            await asyncio.gather(*(queue.put_many([bytes(1_000)]) for _ in range(100)))
        back = []
        while lease := await queue.lease(400, wait=0):
            late = [record.seq for record in lease.records if record.seq % 200 == 0]
            await lease.nack(5, late)
            back += late
            await lease.ack()
        start = files.read_bytes
        queue.hurry()
        assert sorted(await drain(queue)) == back
        # 20 records among 4 MB: for each at most some tens of kilobytes around it.
        assert files.read_bytes - start < len(back) * (40 << 10)


@pytest.mark.parametrize("codec", ["none", "lz4"])
async def test_d_27_one_bit_costs_one_frame(tmp_path, codec):
    if codec != "none":
        pytest.importorskip("cramjam")
    async with DurableQueue.open(tmp_path / "q", DurableConfig(compression=codec)) as queue:
        await asyncio.gather(*(queue.put(b"%08d" % at + os.urandom(200)) for at in range(5_000)))
        await queue.put_many([os.urandom(1_000) for _ in range(2_000)])
        await queue.put_many([b"after"] * 10)
    (path,) = segments(tmp_path / "q")
    whole = path.read_bytes()
    marker = fmt.decode_segment_header(whole).marker
    starts, at = [], fmt.DATA_START
    while (header := fmt.decode_frame_header(whole, at, marker, at)) is not None:
        assert header.records == 1 or fmt.FRAME_HEADER + 8 * header.records + header.raw_size <= fmt.FRAME_BYTES
        starts.append((at, header))
        at += header.size
    assert len(starts) > 8
    for start, header in starts[1::3]:
        for place in (start + 20, start + fmt.FRAME_HEADER + 3, start + header.size - 1):
            flip(path, place, 4)
            async with opened(RecordingFiles(base={ROOT / path.name: path.read_bytes()}), compression=codec) as queue:
                assert 1 <= 7_010 - len(await drain(queue)) <= header.records
                assert queue.stats().damaged == 7_010 - len(await drain(queue)) - queue.stats().leased
            flip(path, place, 4)


async def test_d_28_a_clock_that_starts_in_1970_drops_nothing():
    files = RecordingFiles()
    config = DurableConfig(max_age=86_400.0)
    async with DurableQueue.open(ROOT, config, files=files, wall_clock=lambda: 5 * 10**9) as queue:
        await queue.put_many([b"x"] * 100)
    async with DurableQueue.open(ROOT, config, files=files.snapshot()) as queue:
        assert len(await queue.lease(wait=0)) == 100
        assert not queue.stats().dropped.get("max_age")


async def test_d_28_what_can_be_put_can_be_buried(tmp_path):
    config = DurableConfig(durability="os", memory_bytes=600 << 20, max_record=200 << 20)
    async with DurableQueue.open(tmp_path, config) as queue:
        await queue.put(bytes(150 << 20))
        assert await (await queue.lease()).dead_letter("poison") == 1


async def test_d_29_verify_looks_at_everything(tmp_path, capsys):
    place = tmp_path / "q"
    async with DurableQueue.open(place) as queue:
        await queue.put_many([b"x%d" % at for at in range(2_000)])
        await (await queue.lease(10)).dead_letter("because\nof\tit")
        await (await queue.lease(10)).ack()
    assert main(["disk", "verify", str(place)]) == 0
    for path, at in [
        (segments(place / "dead")[0], fmt.DATA_START + 70),
        (next(place.glob("*.ack")), 40),
        (place / "queue.id", 25),
        (segments(place)[0], fmt.DATA_START + 2),
    ]:
        flip(path, at, 1)
        assert main(["disk", "verify", str(place)]) == 1, path
        flip(path, at, 1)
    assert main(["disk", "verify", str(place)]) == 0
    capsys.readouterr()
    assert main(["disk", "dead-letters", "list", str(place)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10
    assert main(["disk", "verify", str(tmp_path / "nothing")]) == 2


async def test_d_29_a_torn_write_that_was_not_confirmed_is_no_damage():
    files = RecordingFiles()
    queue = await opened(files)
    await queue.put(b"confirmed")
    before = len(files.log)
    await asyncio.gather(*(queue.put(b"%04d" % at * 100) for at in range(50)))
    write = next(op for op in files.log[before:] if op.kind == "write")
    base = dict(files.snapshot().base)
    (path,) = [path for path in base if path.suffix == ".bqs"]
    body = write.offset + fmt.FRAME_HEADER + 8 * 50
    base[path] = base[path][:body] + bytes(len(base[path]) - body)
    async with opened(RecordingFiles(base=base)) as again:
        assert again.recovery.damaged_records == 0
        assert again.recovery.torn_records == 50
    await queue.close()


def test_d_29_a_fork_while_it_opens_keeps_no_lock(tmp_path):
    code = (
        "import asyncio, os, sys, time, batchqueue_async as bq\n"
        "from batchqueue_async.durable.disk.files import OsFiles\n"
        "class Slow(OsFiles):\n"
        "    def names(self, path):\n"
        "        time.sleep(0.3)\n"
        "        return super().names(path)\n"
        "async def main():\n"
        "    opening = asyncio.ensure_future(bq.DurableQueue.open(sys.argv[1], files=Slow()).__aenter__())\n"
        "    await asyncio.sleep(0.1)\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        time.sleep(20)\n"
        "        os._exit(0)\n"
        "    await (await opening).close()\n"
        "    async with bq.DurableQueue.open(sys.argv[1]) as queue:\n"
        "        print('opened', flush=True)\n"
        "    os.kill(child, 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "q")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "opened\n", done.stderr


async def test_d_29_repairs_and_damage_are_logged(caplog):
    files = RecordingFiles()
    queue = await opened(files)
    await queue.put_many([b"one", b"two"])
    base = {**files.snapshot().base, ROOT / "seg-000000000009.bqs": os.urandom(2_000)}
    with caplog.at_level("INFO"):
        async with opened(RecordingFiles(base=base)):
            pass
    text = caplog.text
    assert "durable_quarantined" in text
    assert "durable_repaired" in text
    await queue.close()


async def test_what_was_set_aside_can_be_put_back(tmp_path, capsys):
    place = tmp_path / "q"
    async with DurableQueue.open(place) as queue:
        await queue.put_many([b"one", b"two"])
    (path,) = segments(place)
    (place / "quarantine").mkdir()
    path.rename(place / "quarantine" / f"{path.name}.1234")
    assert main(["disk", "restore", str(place), f"{path.name}.1234", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"restored": path.name}
    async with DurableQueue.open(place) as queue:
        assert queue.recovery.records == 2
    assert main(["disk", "restore", str(place), "no-such-file"]) == 2
    assert inspect.verify(place).problems == []


async def test_a_record_that_kills_its_process_three_times_is_given_up():
    files = RecordingFiles()
    async with opened(files, max_attempts=3) as queue:
        await queue.put_many([b"poison", b"good"])
    killed = files.snapshot()
    for attempt in range(1, 4):
        queue = await opened(killed, max_attempts=3)
        lease = await queue.lease(1)
        assert (lease.records[0].payload, lease.records[0].attempts) == (b"poison", attempt)
        killed = killed.snapshot()
    async with opened(killed, max_attempts=3) as queue:
        assert [record.payload for record in (await queue.lease(10, wait=5)).records] == [b"good"]
        await asyncio.sleep(1)
        (letter,) = await queue.dead_letters()
        assert (letter.payload, letter.reason) == (b"poison", "max_attempts")
        assert queue.stats().dead_lettered == 1


async def seen_after_a_kill(files: RecordingFiles) -> dict[bytes, int]:
    """How often each record was leased, as the next opening counts it: its own lease included."""
    async with opened(files.snapshot(), max_attempts=9) as queue:
        return {record.payload: record.attempts for record in (await queue.lease(wait=0)).records}


@pytest.fixture
def gate() -> Iterator[type[GatedRunner]]:
    GatedRunner.shut, GatedRunner.held = False, []
    yield GatedRunner
    GatedRunner.shut, GatedRunner.held = False, []


def gated(files: RecordingFiles, **options: Any) -> DurableQueue:
    return DurableQueue.open(ROOT, DurableConfig(**options), files=files, runner=GatedRunner)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_d_45_a_lease_waits_for_its_own_note_and_not_for_those_of_the_round_under_way(gate):
    files = RecordingFiles()
    async with gated(files, max_attempts=9) as queue:
        await queue.put_many([b"first", b"second"])
        first = await queue.lease(1)
        gate.shut = True
        await first.ack()
        await asyncio.sleep(0.05)
        assert len(gate.held) == 1  # a round with the acknowledgement, and without what is leased from here on
        leasing = asyncio.create_task(queue.lease(1))
        await turns()
        gate.held.pop()()
        await turns()
        assert not leasing.done()
        gate.shut = False
        gate.held.pop()()
        lease = await leasing
        assert [record.payload for record in lease.records] == [b"second"]
        assert await seen_after_a_kill(files) == {b"second": 2}


async def test_d_45_a_lease_waits_for_the_round_that_is_under_way_with_its_note(gate):
    files = RecordingFiles()
    async with gated(files, max_attempts=9) as queue:
        leasing = asyncio.create_task(queue.lease(1))
        await asyncio.sleep(0.05)
        gate.shut = True
        puts = [asyncio.create_task(queue.put(b"first"))]
        await turns()
        puts.append(asyncio.create_task(queue.put(b"second")))
        await asyncio.sleep(0.05)
        # It is granted at the end of this round, and noted with the next, which is sent before its caller has a turn.
        gate.held.pop(0)()
        await turns()
        assert gate.held
        assert not leasing.done()
        gate.shut = False
        gate.held.pop(0)()
        lease = await leasing
        assert [record.payload for record in lease.records] == [b"first"]
        assert (await seen_after_a_kill(files))[b"first"] == 2
        await asyncio.gather(*puts)


@pytest.mark.parametrize("wait", [0, None])
@pytest.mark.parametrize("order", ["fifo", "freshest"])
async def test_d_46_records_that_are_given_up_do_not_hide_the_others(wait, order):
    """Each grant of the queue's finds records alone that were leased as often as they may be."""
    payloads = [b"%d" % number for number in range(12)]
    good = {payloads[0 if order == "freshest" else -1]}
    async with opened(max_attempts=1, order=order) as queue:
        await queue.put_many(payloads)
        for record in (await queue.lease()).records:
            assert record.attempts == 1
        lease = next(iter(queue._leasing._leases.values()))
        await lease.nack(counted=False, seqs=[record.seq for record in lease.records if record.payload in good])
        await lease.nack()
        found = await asyncio.wait_for(queue.lease(3, wait=wait), 60)
        assert {record.payload for record in found.records} == good
        await asyncio.sleep(1)
        letters = await queue.dead_letters()
        assert {letter.payload for letter in letters} == set(payloads) - good


async def test_d_48_a_record_that_is_given_up_counts_no_lease_that_nobody_had():
    """Nor after a kill amid giving it up, when the next opening does that once more."""
    files = RecordingFiles()
    async with opened(files, max_attempts=2) as queue:
        await queue.put(b"poison")
        for attempt in (1, 2):
            lease = await queue.lease()
            assert lease.records[0].attempts == attempt
            await lease.nack()
        files.fault = lambda _, path: io_error(errno.ENOSPC) if path.name == "dead" else None
        assert not await queue.lease(wait=1)
        files.fault = None
        killed = files.snapshot()
    async with opened(killed, max_attempts=2) as queue:
        assert not await queue.lease(wait=1)
        (letter,) = await queue.dead_letters()
        assert (letter.payload, letter.attempts) == (b"poison", 2)


@pytest.mark.parametrize("order", ["fifo", "freshest"])
async def test_d_38_a_lease_of_one_record_costs_the_same_in_a_frame_of_thousands(order):
    """Counted, not timed: the calls of a lease, and of giving it back for later."""

    async def cost(records: int) -> int:
        async with opened(RecordingFiles(), durability="os", order=order) as queue:
            await queue.put_many([b"x"] * records)
            calls = calls_of(queue.lease(1))
            assert queue.leased == 1
            return calls

    assert await cost(20_000) < 2 * await cost(20)


async def test_d_39_acknowledgements_that_are_written_anew_are_encoded_on_the_writers_thread():
    """Counted, not timed: what the loop does of it for 10,000 records that were settled one by one."""
    async with opened(RecordingFiles(), durability="os") as queue:
        await queue.put_many([b"x"] * 20_000)
        lease = await queue.lease(20_000)
        await lease.ack([record.seq for record in lease.records[::2]])
        await lease.nack(1_000)
        state = queue._state
        entry = state.segments[state.newest]

        async def write() -> None:
            hint.append(state._hint(entry, anew=True))

        hint: list[Any] = []
        assert calls_of(write()) < 1_000
        data = hint[0].encode()
        assert len(data) <= entry.hint_bytes
        known = acklog.decode(data, number=entry.number, marker=entry.marker, first_seq=entry.first, next_seq=entry.end)
        assert known.settled.count == 10_000
        assert sum(each.high - each.low for each in known.attempts) == 10_000
        state.touched.add(entry.number)
        entry.fresh_hint = True
        queue._pump.kick()
        await eventually(lambda: entry.hint_bytes == len(data))
        assert queue.stats().disk_bytes == queue._files.used()
