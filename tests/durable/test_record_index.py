"""Where records are while the queue is open: the index, the delays, and what came back, each against a simple model."""

from __future__ import annotations

import ast
import asyncio
import os
from pathlib import Path
from random import Random

import pytest
from durable_kit import RecordingFiles, drain, opened

from batchqueue_async.durable import state
from batchqueue_async.durable.disk.format import SegmentHeader
from batchqueue_async.durable.state.backlog import Backlog, Extent, Load
from batchqueue_async.durable.state.delays import Delays
from batchqueue_async.durable.state.frame import Frame, Run
from batchqueue_async.durable.state.record_index import RecordIndex
from batchqueue_async.durable.state.returned import ReturnedRuns
from batchqueue_async.durable.state.table import Segment
from batchqueue_async.testing import run_virtual


def segment(number: int, first: int, end: int, frame_bytes: int = 5_000) -> Segment:
    """Two records a frame, all written."""
    entry = Segment(SegmentHeader(b"q" * 16, number, first, b"m" * 8, 0), 0)
    entry.end, entry.data_end = end, frame_bytes * ((end - first + 1) // 2)
    for at, seq in enumerate(range(first, end, 2)):
        entry.remember(seq, frame_bytes * at)
    return entry


@pytest.mark.parametrize("seed", range(5))
def test_delays_come_out_by_their_time(seed):
    random = Random(seed)
    delays, model, now, seq = Delays(), [], 0.0, 0
    for _ in range(4_000):
        if random.random() < 0.7:
            due, count = now + random.choice([0.0, 1.0, random.random() * 100]), random.randint(1, 5)
            delays.add(due, seq, seq + count)
            model += [(due, at) for at in range(seq, seq + count)]
            seq += count
        else:
            now += random.random()
            most = random.randint(1, 2_000)
            taken = [at for low, high in delays.pop(now, most) for at in range(low, high)]
            due = sorted(entry for entry in model if entry[0] <= now)
            assert set(taken) <= {at for _, at in due}
            if len(delays) == 0 or (delays.next_due or 0) > now:
                assert sorted(taken) == sorted(at for _, at in due)
            model = [entry for entry in model if entry[1] not in set(taken)]
        assert delays.next_due == min((due for due, _ in model), default=None)
    delays.clear()
    assert (delays.next_due, delays.pop(1e9, 10)) == (None, [])


@pytest.mark.parametrize("newest_first", [False, True])
def test_runs_that_came_back_are_known_by_order_and_by_age(newest_first):
    random = Random(3)
    frame = Frame(1, [b""] * 9, 0, 0)
    runs, model = ReturnedRuns(newest_first=newest_first), {}
    for _ in range(5_000):
        seq = random.randrange(0, 5_000, 9)
        if seq not in model and random.random() < 0.6:
            model[seq] = Run(seq, frame, 0, random.randint(1, 9), 1)
            runs.add(model[seq])
        elif model:
            gone = runs.next() if random.random() < 0.5 else runs.oldest()
            assert gone is model.pop(gone.seq)
            runs.remove(gone)
            assert not runs.has(gone)
        assert len(runs) == len(model)
        wanted = max(model) if newest_first and model else min(model, default=None)
        assert (runs.next().seq if runs.next() else None) == wanted
        assert (runs.oldest().seq if runs.oldest() else None) == min(model, default=None)


@pytest.mark.parametrize("newest_first", [False, True])
def test_x_18_of_many_ranges_one_step_reads_some_hundred(newest_first):
    entry = segment(1, 0, 2_000, frame_bytes=20_000)
    index = RecordIndex([entry])
    for seq in range(0, 2_000, 2):
        index.give_back(seq, seq + 1)
    found = []
    while (stretch := index.stretch(1 << 40, newest_first=newest_first)) is not None:
        found.append(index.read(entry, stretch.low, stretch.high))
    assert [len(ranges) for ranges in found] == [256, 256, 256, 232]
    assert sorted(low for ranges in found for low, _ in ranges) == list(range(0, 2_000, 2))


@pytest.mark.parametrize("seed", range(5))
def test_the_index_knows_what_waits_for_what(seed):
    random = Random(seed)
    entries = [segment(number, 100 * number, 100 * number + 100) for number in range(1, 30)]
    index = RecordIndex(entries)
    delayed: dict[int, float] = {}
    returned: set[int] = set()
    now = 0.0
    for _ in range(2_000):
        low = random.randrange(100, 2_990)
        high = low + random.randint(1, 8)
        free = not any(seq in delayed or seq in returned for seq in range(low, high))
        action = random.choice(["delay", "back", "wake", "read", "drop", "oldest", "all"])
        if action == "delay" and free:
            due = now + random.random() * 10
            index.delay(due, low, high)
            delayed |= dict.fromkeys(range(low, high), due)
        elif action == "back" and free:
            index.give_back(low, high)
            returned |= set(range(low, high))
        elif action == "wake":
            now += random.random() * 3
            woken = {seq for start, stop in index.wake(now) for seq in range(start, stop)}
            assert woken == {seq for seq, due in delayed.items() if due <= now}
            delayed = {seq: due for seq, due in delayed.items() if due > now}
        elif action == "read":
            newest_first = random.random() < 0.5
            stretch = index.stretch(random.choice([1, 20_000, 1 << 20]), newest_first=newest_first)
            assert (stretch is None) == (not returned)
            if stretch is not None:
                assert (max(returned) + 1 == stretch.high) if newest_first else (min(returned) == stretch.low)
                entry = entries[stretch.number - 1]
                assert stretch.least <= stretch.low
                assert stretch.start <= 5_000 * ((stretch.low - entry.first) // 2) < stretch.end
                assert stretch.end >= 5_000 * ((stretch.high - entry.first + 1) // 2)
                found = index.read(entry, stretch.low, stretch.high)
                gone = {seq for start, stop in found for seq in range(start, stop)}
                assert gone == {seq for seq in returned if stretch.low <= seq < stretch.high}
                returned -= gone
        elif action == "drop" and (oldest := index.oldest()) is not None:
            entry, start, stop = oldest
            assert start == min([*delayed, *returned])
            parts = index.drop(entry, start, min(stop, start + 2))
            taken = set(range(start, min(stop, start + 2)))
            assert {seq for first, end in parts for seq in range(first, end)} == taken & delayed.keys()
            delayed = {seq: due for seq, due in delayed.items() if seq not in taken}
            returned -= taken
        elif action == "all" and random.random() < 0.05:
            index.wake_all()
            returned |= delayed.keys()
            delayed.clear()
        assert index.delayed == len(delayed)
        assert index.any_returned == bool(returned)
        assert index.first_returned() == min(returned, default=None)
        assert index.last_returned() == (max(returned) + 1 if returned else None)


def test_of_two_segments_with_a_record_the_later_one_has_it():
    index = RecordIndex([segment(1, 10, 20), segment(2, 15, 18), segment(4, 30, 40)])
    assert [getattr(index.at(seq), "number", None) for seq in (9, 10, 14, 15, 17, 18, 19, 20, 30, 40)] == [
        None, 1, 1, 2, 2, 1, 1, None, 4, None,
    ]  # fmt: skip
    assert [(entry.number, low, high) for entry, low, high in index.parts(5, 50)] == [
        (1, 10, 15),
        (2, 15, 18),
        (1, 18, 20),
        (4, 30, 40),
    ]


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_places_are_few_and_near(newest_first, backwards):
    """However frames come to be known, one place is kept for about 16 KiB, and none is much farther than that."""
    entry = Segment(SegmentHeader(b"q" * 16, 1, 0, b"m" * 8, 0), 0)
    entry.end, entry.data_end = 10_000, 10_000 * 300
    seqs = range(10_000)
    for seq in reversed(seqs) if backwards else seqs:
        entry.remember(seq, 300 * seq)
    assert len(entry.index[0]) < 10_000 * 300 / (8 << 10)
    for seq in range(0, 10_000, 7):
        start, end, least = entry.near(seq, seq + 1)
        assert start <= 300 * seq
        assert end >= 300 * (seq + 1)
        assert end - start < 64 << 10
        assert least <= seq
        low, high = entry.cut(seq, 10_000, 100_000, newest_first=newest_first)
        start, end, _ = entry.near(low, high)
        assert low < high
        assert end - start < 200_000
        assert (high == 10_000) if newest_first else (low == seq)


@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_a_backlog_that_was_given_back_comes_again_whole(order):
    """Whatever was in memory, on the disk, delayed, moved by a failed sync or compacted meanwhile."""

    async def main(seed: int) -> None:
        random = Random(seed)
        files = RecordingFiles()
        options = {"segment_bytes": 30_000, "memory_bytes": 20_000, "order": order, "durability": "interval"}
        async with opened(files, **options) as queue:
            owed: dict[int, bytes] = {}
            for _ in range(30):
                payloads = [os.urandom(random.randint(1, 400)) for _ in range(random.randint(1, 60))]
                owed |= dict(zip(await queue.put_many(payloads), payloads, strict=True))
            leases = []
            for _ in range(200):
                if random.random() < 0.02:
                    failing = iter([True])
                    files.fault = lambda call, path, failing=failing: (
                        OSError(5, "EIO") if call == "sync" and next(failing, False) else None
                    )
                    await queue.put(b"more")
                    owed[queue.next_seq - 1] = b"more"
                    await queue.put(b"more", durability="always")
                    owed[queue.next_seq - 1] = b"more"
                if lease := await queue.lease(random.randint(1, 80), random.choice([2_000, 1 << 20]), wait=0):
                    leases.append(lease)
                if len(leases) > 5:
                    lease = leases.pop(random.randrange(5))
                    for record in lease.records:
                        assert owed[record.seq] == record.payload
                    kept = [record.seq for record in lease.records if random.random() < 0.7]
                    late = [seq for seq in kept if random.random() < 0.5]
                    await lease.nack(random.choice([0.01, 0.5, 50]), late)
                    await lease.nack(0, [seq for seq in kept if seq not in set(late)])
                    for record in lease.records:
                        if record.seq not in set(kept):
                            del owed[record.seq]
                    await lease.ack()
                if random.random() < 0.2:
                    await asyncio.sleep(random.choice([0.01, 2]))
            for lease in leases:
                await lease.nack(random.choice([0, 5]))
            queue.hurry()
            assert await drain(queue, ack=True) == owed
            assert queue.stats().damaged == 0
            assert queue.stats().records == 0

    for seed in range(4):
        run_virtual(main(seed))


def test_the_state_of_a_queue_never_awaits():
    (folder,) = state.__path__
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    for module in Path(folder).glob("*.py"):
        nodes = ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        assert not [node.lineno for node in nodes if isinstance(node, waiting)], module.name


def test_an_extent_goes_with_the_last_of_its_records_that_are_wanted():
    """The oldest three are dropped while the newest are read: nothing is left to read then, though frames are."""
    backlog = Backlog(RecordIndex([]), newest_first=True, memory_bytes=1 << 20, memory_blocks=100)
    extent = Extent(1, (0, 300), (1, 7), 0)
    backlog.add_extent(extent)
    extent.first = 4
    backlog.loaded(Load(extent, 100, 300, 4), [Run(4, Frame(1, [b""] * 3, 0, 0), 0, 3, 0)], 300, (4, 7))
    assert not backlog.extents
    assert backlog.oldest() == backlog.window[0]
