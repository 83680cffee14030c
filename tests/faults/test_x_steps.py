"""X-18 on disk: leases of thousands of records that were put one by one, in steps that the loop can bear; D-43."""

from __future__ import annotations

import asyncio

import pytest
from durable_kit import ROOT, InlineRunner, OneFailure, RecordingFiles, io_error, opened
from steps import STEP_LIMIT, Steps

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.errors import DurableQueueError

COUNT = 3_000
MANY = 2_500
ORDERS = {
    "fifo": {},
    "freshest": {"order": "freshest"},
    "key": {"order": "key", "key": lambda payload: payload, "key_lookahead": COUNT},
    "max_age": {"max_age": 3_600.0},
}


async def one_by_one(options, count=COUNT):
    """An open queue with a frame for each record, which only the disk has."""
    files = RecordingFiles()
    config = DurableConfig(durability="os", **options)
    async with DurableQueue.open(ROOT, config, files=files, runner=InlineRunner) as queue:
        for number in range(count):
            await queue.put(b"%d" % number)
    # The threads' work is not the loop's.
    return await DurableQueue.open(ROOT, config, files=files)


@pytest.mark.parametrize("order", ORDERS)
async def test_x_18_leases_of_thousands_of_records_from_the_disk_have_no_long_step(order):
    queue = await one_by_one(ORDERS[order])
    seen = []
    with Steps() as steps:
        while len(seen) < COUNT:
            lease = await queue.lease(MANY)
            await asyncio.sleep(0)
            seen += [int(record.payload) for record in lease.records]
            await asyncio.sleep(0)
            await lease.ack()
            await asyncio.sleep(0)
    assert sorted(seen) == list(range(COUNT))
    assert queue.records == 0
    await queue.close()
    assert 1_000 < steps.most < STEP_LIMIT


@pytest.mark.parametrize("delay", [0, 5.0])
@pytest.mark.parametrize("memory_bytes", [1, 64 << 20])
async def test_x_18_what_comes_back_by_the_thousand_has_no_long_step(delay, memory_bytes):
    queue = await one_by_one({"memory_bytes": memory_bytes})
    lease = await queue.lease(MANY)
    assert len(lease) == MANY
    back = {record.seq: record.payload for record in lease.records}
    with Steps() as steps:
        await asyncio.sleep(0)
        await lease.nack(delay)
        await asyncio.sleep(2 * delay)
        found = {}
        while len(found) < MANY:
            again = await queue.lease(MANY)
            assert {record.attempts for record in again.records if record.seq in back} <= {2}
            found |= {record.seq: record.payload for record in again.records if record.seq in back}
            await asyncio.sleep(0)
    assert found == back
    await queue.close()
    assert 1_000 < steps.most < STEP_LIMIT


SETTLES = {
    "ack": lambda lease, seqs: lease.ack(seqs),
    "nack": lambda lease, seqs: lease.nack(0, seqs),
    "delayed": lambda lease, seqs: lease.nack(3_600, seqs),
    "dead letters": lambda lease, seqs: lease.dead_letter("no use", seqs),
}


@pytest.mark.parametrize("settle", SETTLES)
async def test_x_18_settling_thousands_by_their_numbers_has_no_long_step(settle):
    queue = await one_by_one({})
    lease = await queue.lease(MANY)
    numbers = [record.seq for record in lease.records]
    settled = SETTLES[settle]
    with Steps() as steps:
        await asyncio.sleep(0)
        # No two of them are next to each other, and what is left isn't either.
        assert await settled(lease, numbers[::2]) == MANY / 2
        assert lease.unsettled == MANY / 2
        assert await settled(lease, None) == MANY / 2
        await asyncio.sleep(0)
    assert queue.leased == 0
    assert queue.stats().dead_lettered == (MANY if settle == "dead letters" else 0)
    await queue.close()
    assert 1_000 < steps.most < STEP_LIMIT


@pytest.mark.parametrize("settle", SETTLES)
async def test_x_18_settling_a_whole_lease_of_thousands_apart_from_each_other_has_no_long_step(settle):
    queue = await one_by_one({}, 2 * MANY)
    first = await queue.lease(2 * MANY)
    await first.ack([record.seq for record in first.records][::2])
    await first.nack()
    lease = await queue.lease(MANY)
    assert len(lease) == MANY
    with Steps() as steps:
        await asyncio.sleep(0)
        assert await SETTLES[settle](lease, None) == MANY
        await asyncio.sleep(0)
    assert queue.leased == lease.unsettled == 0
    await queue.close()
    assert 1_000 < steps.most < STEP_LIMIT


async def test_x_18_moving_a_frame_of_thousands_to_the_dead_letters_has_no_long_step():
    files = RecordingFiles()
    async with DurableQueue.open(ROOT, DurableConfig(durability="os"), files=files) as queue:
        payloads = [b"%d" % number for number in range(4 * MANY)]
        await queue.put_many(payloads)
        lease = await queue.lease(4 * MANY)
        with Steps() as steps:
            await asyncio.sleep(0)
            assert await lease.dead_letter("no use") == 4 * MANY
            await asyncio.sleep(0)
        assert [letter.payload for letter in await queue.dead_letters(8 * MANY)] == payloads
    assert 1_000 < steps.most < STEP_LIMIT


@pytest.mark.parametrize("order", ["fifo", "freshest"])
async def test_x_18_reading_a_frame_of_which_thousands_of_single_records_come_back_has_no_long_step(order):
    files = RecordingFiles()
    config = DurableConfig(durability="os", memory_bytes=1, order=order)
    async with DurableQueue.open(ROOT, config, files=files) as queue:
        await queue.put_many([b"%d" % number for number in range(4 * MANY)])
        lease = await queue.lease(4 * MANY)
        left = sorted(record.seq for record in lease.records)[::2]
        with Steps() as steps:
            for at in range(0, len(left), 1_000):
                await lease.ack([seq + 1 for seq in left[at : at + 1_000]])
                await asyncio.sleep(0)
            await lease.nack()
            seen = []
            while len(seen) < len(left):
                again = await queue.lease(MANY)
                await asyncio.sleep(0)
                seen += [record.seq for record in again.records]
                await asyncio.sleep(0)
                await again.ack()
                await asyncio.sleep(0)
        assert sorted(seen) == sorted(left)
        assert queue.records == 0
    assert 1_000 < steps.most < STEP_LIMIT


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_x_18_amid_thousands_of_dead_letters_each_record_is_in_one_place(how):
    files = RecordingFiles()
    async with opened(files, durability="os") as queue:
        await queue.put_many([b"%d" % number for number in range(MANY)])
        lease = await queue.lease(MANY)
        moving = asyncio.create_task(lease.dead_letter("no use", [record.seq for record in lease.records][::2]))
        seen = set()
        async with asyncio.timeout(60):
            while len(seen) < 4:
                stats = queue.stats()
                # What is on its way is the lease's no more, and still a record.
                assert stats.records == stats.leased == MANY - stats.dead_lettered
                assert sum(run.high - run.low for run in queue._state.outstanding()) == stats.leased
                seen.add(stats.dead_lettered)
                await asyncio.sleep(0)
        if how == "cancelled":
            moving.cancel()
        else:
            files.fault = lambda call, path: io_error() if path.parent.name == "dead" and call != "read" else None
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else DurableQueueError):
            await moving
        files.fault = None
        moved = queue.stats().dead_lettered
        assert 0 < moved < MANY / 2
        assert lease.unsettled == MANY - moved
        dead = [int(letter.payload) for letter in await queue.dead_letters(MANY)]
        # Whatever was being moved just then may be in both places.
        assert dead == list(range(0, 2 * len(dead), 2))
        assert moved <= len(dead) <= moved + 150
        assert await lease.ack() == MANY - moved
    async with opened(files.snapshot()) as queue:
        assert queue.records == 0
        assert [int(letter.payload) for letter in await queue.dead_letters(MANY)] == dead


async def test_d_43_what_is_on_its_way_to_the_dead_letters_is_leased_when_its_segment_is_abandoned():
    files = RecordingFiles()
    async with opened(files, durability="interval") as queue:
        await queue.put_many([b"a", b"b"])
        lease = await queue.lease(1)
        bury, goes_on = queue._leasing._bury, asyncio.Event()

        async def slow(runs, reason):
            await goes_on.wait()
            await bury(runs, reason)

        queue._leasing._bury = slow
        moving = asyncio.create_task(lease.dead_letter("no use"))
        await asyncio.sleep(0)
        files.fault = OneFailure()
        await queue.put(b"c", durability="always")
        assert queue._state.moves == 1
        goes_on.set()
        assert await moving == 1
        assert [entry.leased for entry in queue._state.segments.values()] == [0, 0]


async def test_x_18_cancelled_amid_thousands_a_part_is_settled_and_the_rest_stays_the_leases():
    queue = await one_by_one({})
    lease = await queue.lease(MANY)
    numbers = [record.seq for record in lease.records][::2]
    acking = asyncio.create_task(lease.ack(numbers))
    await asyncio.sleep(0)
    acking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acking
    assert 0 < MANY - lease.unsettled < len(numbers)
    assert queue.records == COUNT - (MANY - lease.unsettled)
    await lease.ack(numbers)
    assert lease.unsettled == MANY - len(numbers)
    await lease.ack()
    assert queue.records == COUNT - MANY
    await queue.close()


async def test_x_18_a_lease_of_several_steps_is_as_large_as_one_that_takes_one():
    queue = await one_by_one({})
    lease = await queue.lease(COUNT + 1)
    assert [int(record.payload) for record in lease.records] == list(range(COUNT))
    assert len(lease.blocks) == COUNT
    assert await lease.ack([record.seq for record in lease.records[::2]]) == COUNT / 2
    assert await lease.ack() == COUNT / 2
    await queue.close()
