"""D-40 to D-42: what changes while a backlog is read again: blocks that fail, newer records, and records that go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from durable_kit import RecordingFiles, drain, io_error, opened

from batchqueue_async.durable.read import leasing

COUNT = 20


@dataclass
class FailingBlocks(RecordingFiles):
    """Bytes that the device fails to read, from some moment on."""

    low: int = 0
    high: int = 0

    def read(self, descriptor, size, offset):
        if self.low < offset + size and offset < self.high:
            raise io_error()
        return super().read(descriptor, size, offset)


def payload(number):
    return b"record %02d " % number + bytes(3_000)


async def left(order, count=COUNT, **options):
    """The files of a queue with so many records, in a frame each."""
    files = RecordingFiles()
    async with opened(files, order=order, **options) as queue:
        for number in range(count):
            await queue.put(payload(number))
    return files.snapshot().base


def hold_loads(queue):
    """Keep back what is read until it is asked for: a slow disk."""
    held = []
    submit = queue._reading.submit

    def slow(call, *arguments, done):
        if call.__name__ == "load":
            held.append(lambda: submit(call, *arguments, done=done))
        else:
            submit(call, *arguments, done=done)

    queue._reading.submit = slow

    def let_go():
        queue._reading.submit = submit
        for each in held:
            each()

    return held, let_go


async def turns(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("hurt", ["unreadable", "damaged"])
@pytest.mark.parametrize("order", ["fifo", "freshest"])
async def test_d_40_blocks_that_fail_after_the_frames_were_found_cost_their_records_alone(order, hurt, monkeypatch):
    """The pieces in which a backlog is read begin and end in, before and behind them."""
    monkeypatch.setattr(leasing, "_READ", 10_000)
    base = await left(order)
    costly = 0
    for start in range(COUNT):
        for length in (1, 4):
            files = FailingBlocks(base=base)
            (data,) = [files.nodes[node] for path, node in files.entries.items() if path.suffix == ".bqs"]
            async with opened(files, order=order, memory_bytes=1) as queue:
                found = {record.seq for record in (await queue.lease(1, wait=0)).records}
                low = data.index(payload(start)) - 20
                high = data.index(payload(start + length)) - 100 if start + length < COUNT else len(data) - 600
                if hurt == "unreadable":
                    files.low, files.high = low, high
                else:
                    data[low:high] = bytes(high - low)
                found |= set(await drain(queue))
                stats = queue.stats()
                where = (start, length, sorted(found), stats)
                missing = set(range(1, COUNT + 1)) - found
                # A block that can't be read has parts of its neighbours.
                assert missing <= set(range(start, start + length + 3)), where
                told = (len(missing), 0) if hurt == "unreadable" else (0, len(missing))
                assert (stats.unreadable, stats.damaged) == told, where
                assert not stats.ready, where
            costly += bool(missing)
            async with opened(files.snapshot(), order=order) as queue:
                again = set(await drain(queue))
                # What was read before its place on the disk was hurt is gone then.
                assert again == set(range(1, COUNT + 1)) if hurt == "unreadable" else again <= found, where
    assert costly > COUNT, "blocks that cost nothing prove nothing"


async def test_d_41_frames_that_leave_the_memory_while_older_ones_are_read_come_before_them():
    async with opened(RecordingFiles(base=await left("freshest")), order="freshest", memory_bytes=10_000) as queue:
        held, let_go = hold_loads(queue)
        waiting = asyncio.create_task(queue.lease(1))
        await turns(lambda: held)
        for number in range(COUNT, 2 * COUNT):
            await queue.put(payload(number))
        first = [record.seq for record in (await waiting).records]
        let_go()
        await asyncio.sleep(0)
        await queue.put(payload(2 * COUNT))
        extents = queue._state.backlog.extents
        assert sorted(extents, key=lambda extent: extent.first) == list(extents)
        assert [*first, *(await drain(queue, most=1))] == [
            COUNT + 1,
            *range(2 * COUNT + 1, COUNT + 1, -1),
            *range(COUNT, 0, -1),
        ]


@pytest.mark.parametrize("order", ["fifo", "freshest"])
@pytest.mark.parametrize("returned", [False, True])
async def test_d_42_records_that_are_dropped_and_deleted_while_they_are_read_leave_no_consumer_waiting(order, returned):
    options = {
        "order": order, "max_records": COUNT, "overflow": "drop_oldest", "memory_bytes": 1, "segment_bytes": 10_000
    }  # fmt: skip
    async with opened(RecordingFiles(base=await left(**options)), **options) as queue:
        if returned:
            for lease in [await queue.lease(1, wait=0) for _ in range(COUNT)]:
                await lease.nack()
        held, let_go = hold_loads(queue)
        # Whoever reads has no descriptor yet.
        queue._loader.close()
        waiting = asyncio.create_task(queue.lease(1))
        await turns(lambda: held)
        before = set(queue._state.segments)
        for number in range(COUNT, 3 * COUNT):
            await queue.put(payload(number))
        await turns(lambda: not before & set(queue._state.segments) or waiting.done())
        # Nothing else is under way by which the consumer could be served.
        await asyncio.sleep(60)
        let_go()
        assert await waiting
        assert queue.stats().unreadable == 0
        assert queue.stats().records == COUNT
