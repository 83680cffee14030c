"""D-53: dead letters that go back into a queue which holds fewer than there are."""

from __future__ import annotations

import asyncio

import pytest
from durable_kit import opened

from batchqueue_async.errors import DiskFullError


async def buried(queue, count, size):
    """Letters in a queue that holds fewer of them."""
    for number in range(count):
        await queue.put(b"%d" % number + bytes(size))
        await (await queue.lease(wait=0)).dead_letter("refused")


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"max_records": 40}, 0),
        ({"max_records": 3}, 0),
        ({"max_bytes": 1 << 20}, 10_000),
    ],
)
async def test_d_53_more_letters_than_a_queue_holds_go_back_as_there_is_room(config, size):
    async with opened(overflow="block", **config) as queue:
        count = 60
        await buried(queue, count, size)
        told = []
        back = asyncio.create_task(queue.requeue_dead_letters(progress=told.extend))
        found = []
        while len(found) < count:
            lease = await queue.lease(10, wait=None)
            found += [int(record.payload.rstrip(b"\0")) for record in lease.records]
            await lease.ack()
        assert await back == count
        assert sorted(found) == list(range(count))
        assert len(set(told)) == count


async def test_d_53_what_is_refused_stays_and_what_went_back_is_known():
    async with opened(max_records=40, overflow="reject") as queue:
        await buried(queue, 60, 0)
        told = []
        with pytest.raises(DiskFullError):
            await queue.requeue_dead_letters(progress=told.extend)
        assert queue.stats().records == len(told) == 40
        assert len(await queue.dead_letters()) == 20


async def test_numbers_end_the_walk_once_they_are_found_and_a_purge_says_which():
    async with opened() as queue:
        await buried(queue, 30, 0)
        told = []
        assert await queue.purge_dead_letters([3, 5, 99], progress=told.extend) == 2
        assert sorted(told) == [3, 5]
        assert await queue.requeue_dead_letters([]) == 0
        assert await queue.requeue_dead_letters([4]) == 1
        assert len(await queue.dead_letters()) == 27
