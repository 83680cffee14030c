"""Puts at a limit: what they drop, whom they wait for, and what becomes of those that give up."""

from __future__ import annotations

import asyncio

import pytest
from durable_kit import RecordingFiles, drain, eventually, io_error, opened

from batchqueue_async.errors import DiskFullError, QueueClosedError


async def full(queue, *payloads):
    await queue.put_many(payloads)
    return [asyncio.create_task(queue.put(b"new %d" % number)) for number in range(3)]


async def test_puts_of_one_turn_drop_one_each_and_count_it_at_once():
    async with opened(max_records=4, overflow="drop_oldest") as queue:
        puts = await full(queue, b"a", b"b", b"c", b"d")
        await asyncio.sleep(0)
        stats = queue.stats()
        assert (queue.records, stats.records, stats.ready, stats.pending) == (1, 1, 1, 3)
        assert dict(queue.dropped) == dict(stats.dropped) == {"oldest": 3}
        await asyncio.gather(*puts)
        assert dict(queue.dropped) == {"oldest": 3}
        assert list((await drain(queue)).values()) == [b"d", b"new 0", b"new 1", b"new 2"]


async def test_puts_of_one_turn_drop_together():
    async with opened(max_records=100, overflow="drop_oldest") as queue:
        await queue.put_many([b"old"] * 100)
        eviction, steps = queue._state.room.eviction, []
        drop = eviction.drop_records
        eviction.drop_records = lambda wanted: steps.append(wanted) or drop(wanted)
        await asyncio.gather(*(queue.put(b"new") for _ in range(60)))
        assert [wanted for wanted in steps if wanted] == [60]


async def test_segments_that_the_next_round_deletes_are_room():
    files = RecordingFiles()
    async with opened(files, max_bytes=40_000, overflow="reject") as queue:
        while True:
            try:
                await queue.put(bytes(700))
            except DiskFullError:
                break
        lease = await queue.lease(100)
        assert len(lease) > 20
        await lease.ack()
        # Nothing is deleted yet; the round that writes these deletes first.
        assert queue.stats().disk_bytes > 30_000
        await asyncio.gather(*(queue.put(bytes(700)) for _ in range(8)))
        assert files.used() <= 40_000


async def test_a_lease_in_the_same_turn_does_not_get_what_a_put_has_dropped():
    async with opened(max_records=4, overflow="drop_oldest") as queue:
        puts = await full(queue, b"a", b"b", b"c", b"d")
        await asyncio.sleep(0)
        lease = await queue.lease(10, wait=0)
        assert [record.payload for record in lease.records] == [b"d"]
        await asyncio.gather(*puts)
        assert queue.stats().records == 4


async def test_no_put_comes_in_for_records_that_are_leased():
    async with opened(max_records=4, overflow="drop_oldest") as queue:
        await queue.put_many([b"a", b"b", b"c", b"d"])
        lease = await queue.lease(3)
        await asyncio.gather(*(queue.put(b"new %d" % number) for number in range(2)))
        assert queue.stats().dropped == {"oldest": 2}
        assert [record.payload for record in (await queue.lease(3)).records] == [b"new 1"]
        with pytest.raises(DiskFullError, match="leased"):
            await queue.put(b"no")
        assert await lease.ack() == 3
        assert await queue.put_many([b"x", b"y", b"z"]) == range(7, 10)


async def waiting(queue, count):
    puts = [asyncio.create_task(queue.put(b"new %d" % number)) for number in range(count)]
    await asyncio.sleep(0)
    return puts


async def test_room_that_was_granted_to_a_cancelled_put_goes_to_the_next():
    async with opened(max_records=1) as queue:
        await queue.put(b"a")
        first, second = await waiting(queue, 2)
        lease = await queue.lease(1)
        await lease.ack()
        await asyncio.sleep(0)
        assert queue.stats().pending == 1
        first.cancel()
        assert await second == 2
        assert first.cancelled()
        assert queue.stats().pending == 0
        assert list((await drain(queue)).values()) == [b"new 1"]


async def test_a_put_that_comes_later_does_not_pass_one_that_is_granted_room():
    async with opened(max_records=3) as queue:
        await queue.put_many([b"a", b"b", b"c"])
        (first,) = await waiting(queue, 1)
        lease = await queue.lease(3)
        await lease.ack()
        late = asyncio.create_task(queue.put(b"late"))
        assert (await first, await late) == (4, 5)


async def test_many_that_wait_come_in_by_their_order_as_room_is_made():
    async with opened(max_records=4) as queue:
        await queue.put_many([b"a", b"b", b"c", b"d"])
        puts = await waiting(queue, 10)
        seen = []
        while len(seen) < 14:
            lease = await queue.lease(3)
            seen += [record.payload for record in lease.records]
            assert queue.stats().records <= 4
            await lease.ack()
        assert seen[4:] == [b"new %d" % number for number in range(10)]
        assert [await put for put in puts] == list(range(5, 15))


async def test_closing_ends_the_waits_of_all_and_of_one_that_is_granted_room():
    queue = await opened(max_records=1)
    await queue.put(b"a")
    puts = await waiting(queue, 3)
    lease = await queue.lease(1)
    closing = asyncio.create_task(queue.close())
    await lease.ack()
    found = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(each) for each in found] == [QueueClosedError] * 3
    await closing


async def test_one_that_gives_up_makes_way_for_a_smaller_one():
    async with opened(max_records=4, block_timeout=1.0) as queue:
        await queue.put_many([b"a", b"b", b"c"])
        large = asyncio.create_task(queue.put_many([b"x"] * 3))
        await asyncio.sleep(0.5)
        small = asyncio.create_task(queue.put(b"small"))
        with pytest.raises(DiskFullError, match="block_timeout"):
            await large
        assert await small == 4


async def test_what_could_not_be_deleted_is_no_room():
    files = RecordingFiles()
    async with opened(files, max_bytes=40_000, overflow="drop_oldest") as queue:
        refusing = True
        files.fault = lambda call, path: io_error() if refusing and call == "unlink" and path.suffix == ".bqs" else None
        for _ in range(12):
            puts = [asyncio.create_task(queue.put(bytes(700))) for _ in range(8)]
            await asyncio.wait(puts, timeout=2.0)
            assert files.used() <= 40_000
            for put in puts:
                put.cancel()
            await asyncio.gather(*puts, return_exceptions=True)
        refusing = False
        await eventually(lambda: queue.stats().disk_bytes < 36_000)
        assert await queue.put(b"again") > 0


async def test_what_was_settled_before_the_opening_does_not_count_as_dropped():
    files = RecordingFiles()
    options = {"max_records": 4, "overflow": "drop_oldest", "memory_bytes": 1}
    async with opened(files, **options) as queue:
        await queue.put_many([b"a", b"b", b"c", b"d"])
        lease = await queue.lease(4)
        await lease.ack([1, 2])
        await lease.nack()
    async with opened(files, **options) as queue:
        await queue.put_many([b"e", b"f"])
        await queue.put(b"g")
        assert queue.stats().records == 4
        assert queue.stats().dropped == {"oldest": 1}
