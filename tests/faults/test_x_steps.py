"""X-18 on disk: leases of thousands of records that were put one by one, in steps that the event loop can bear."""

from __future__ import annotations

import asyncio

import pytest
from durable_kit import ROOT, InlineRunner, RecordingFiles
from steps import STEP_LIMIT, Steps

from batchqueue_async.durable import DurableConfig, DurableQueue

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


async def test_x_18_a_lease_of_several_steps_is_as_large_as_one_that_takes_one():
    queue = await one_by_one({})
    lease = await queue.lease(COUNT + 1)
    assert [int(record.payload) for record in lease.records] == list(range(COUNT))
    assert len(lease.blocks) == COUNT
    assert await lease.ack([record.seq for record in lease.records[::2]]) == COUNT / 2
    assert await lease.ack() == COUNT / 2
    await queue.close()
