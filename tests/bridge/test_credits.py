"""A loop that is never idle lets the threads run that it has granted places; and places are never lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

import batchqueue_async as bq
from batchqueue_async.bridge import credits as credits_module
from batchqueue_async.bridge.credits import LONGEST_PAUSE, PAUSE_SHARE, SHORTEST_PAUSE, LoopPause, ThreadWaiter
from batchqueue_async.bridge.inbox import Offer
from batchqueue_async.queue.migration import Migration
from batchqueue_async.queue.partition import Partition
from batchqueue_async.testing import RecordingHandler


class Clock:
    """Time that passes only in sleeps, which take twice as long as they were meant to, and when told to."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += 2 * seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(credits_module, "time", clock)
    monkeypatch.setattr(credits_module, "HAS_GIL", True)
    return clock


@pytest.fixture
async def place():
    """A queue of one place, its share of the inbox, and a waiter of a thread that stands in line for the place."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(batch):
        entered.set()
        await leave.wait()

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=handle, buffer_size=1, max_batch=1))
        inbox = queue.bridge()._inbox
        await queue.produce("held")
        await entered.wait()
        await queue.produce("fills")
        waiter = ThreadWaiter(lambda: True)
        offer = Offer(["thread's"])
        assert inbox.wait_for(waiter, offer)
        await asyncio.sleep(0)
        own = asyncio.create_task(queue.produce("own"))
        await asyncio.sleep(0)
        yield SimpleNamespace(queue=queue, inbox=inbox, share=waiter.share, waiter=waiter, offer=offer, own=own)
        leave.set()
        inbox.leave(waiter)
        await own


def free_the_place(place):
    partition = place.queue.router.partitions[0]
    assert partition.take(1) == ["fills"]
    assert place.waiter.permits == 1


async def test_the_loop_pauses_longer_each_time_that_the_thread_did_not_come(clock, place):
    free_the_place(place)
    for _ in range(8):
        clock.now += 2 * LONGEST_PAUSE / PAUSE_SHARE
        place.share.refill()
    assert clock.pauses[:3] == [SHORTEST_PAUSE, 2 * SHORTEST_PAUSE, 4 * SHORTEST_PAUSE]
    assert clock.pauses[-1] == LONGEST_PAUSE


async def test_a_thread_that_came_is_owed_nothing(clock, place):
    free_the_place(place)
    place.share.refill()
    place.inbox.pause.length = LONGEST_PAUSE
    before = len(clock.pauses)
    place.inbox.fill(place.waiter, place.offer, lambda: None)
    assert place.offer.complete
    clock.now += 1.0
    place.share.refill()
    assert len(clock.pauses) == before
    assert place.inbox.pause.length == SHORTEST_PAUSE


async def test_a_thread_that_left_is_owed_nothing(clock, place):
    free_the_place(place)
    place.inbox.leave(place.waiter)
    before = len(clock.pauses)
    clock.now += 1.0
    place.share.refill()
    assert len(clock.pauses) == before


async def test_where_threads_run_at_once_there_is_no_pause(clock, place, monkeypatch):
    monkeypatch.setattr(credits_module, "HAS_GIL", False)
    free_the_place(place)
    clock.now += 1.0
    place.share.refill()
    assert clock.pauses == []


@pytest.mark.parametrize("queues", [1, 5])
def test_c_18_pauses_take_their_share_of_the_time_by_the_clock_for_all_queues_of_a_loop_together(clock, queues):
    loop, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        pauses = [credits_module.pause_of(loop) for _ in range(queues)]
        for step in range(20_000):
            clock.now += SHORTEST_PAUSE / 10
            for pause in pauses:
                pause.take()
            if not step % 50:
                pauses[0].worked()
        assert len(clock.pauses) > 10
        assert 2 * sum(clock.pauses) <= PAUSE_SHARE * (clock.now - 1_000.0) + 2 * LONGEST_PAUSE
        assert credits_module.pause_of(other) is not pauses[0]
    finally:
        loop.close()
        other.close()


async def test_c_18_threads_that_gave_up_leave_no_place_to_the_loop_alone():
    """The loop's line still has one who stands for them, and takes the places back that they left."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(batch):
        entered.set()
        await leave.wait()

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=handle, buffer_size=3, max_batch=1))
        inbox = queue.bridge()._inbox
        assert inbox.put("held") is None
        await entered.wait()
        for item in (1, 2, 3):
            assert inbox.put(item) is None
        inbox.collect()
        waiters = [ThreadWaiter(lambda: True) for _ in range(2)]
        for waiter in waiters:
            assert inbox.wait_for(waiter, Offer(["thread's"]))
        await asyncio.sleep(0)  # the loop sees that they wait
        partition = queue.router.partitions[0]
        assert partition.take(1) == [1]
        assert [waiter.permits for waiter in waiters] == [1, 0]
        for waiter in reversed(waiters):
            inbox.leave(waiter)
        partition.serve()
        assert partition.take(2) == [2, 3]
        assert [inbox.put(item) for item in "abc"] == [None] * 3  # all places are the threads'
        leave.set()


@pytest.mark.parametrize("threads", [2, 32])
async def test_c_31_the_loops_own_producers_get_their_turn_while_threads_wait_again_as_soon_as_they_are_served(threads):
    """One stands in the loop's line for all threads: who comes later must not stand there in the place of the first."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(batch):
        entered.set()
        await leave.wait()

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=handle, buffer_size=1, max_batch=1))
        inbox, partition = queue.bridge()._inbox, queue.router.partitions[0]
        await queue.produce("held")
        await entered.wait()
        await queue.produce("first")
        in_line = [ThreadWaiter(lambda: True) for _ in range(threads)]
        for waiter in in_line:
            assert inbox.wait_for(waiter, Offer(["thread's"]))
        await asyncio.sleep(0)  # the loop sees that they wait
        own = [asyncio.create_task(queue.produce(name)) for name in ("own", "own too")]
        came = []
        for _ in range(4 * threads):
            await asyncio.sleep(0)
            came += partition.take(1)
            for waiter in [each for each in in_line if each.permits]:
                inbox.fill(waiter, Offer(["thread's"]), lambda: None)
                inbox.leave(waiter)
                assert inbox.wait_for(waiter, Offer(["thread's"]))
            await asyncio.sleep(0)
        mine = ["thread's"] * threads
        assert came[: 2 * threads + 3] == ["first", *mine, "own", "own too", *mine]
        for waiter in in_line:
            inbox.leave(waiter)
        leave.set()
        assert all(await asyncio.gather(*own))


async def test_threads_are_lent_what_is_left_as_the_last_item_in_the_loops_line_goes_into_a_migration():
    """Nothing is lent while somebody waits; and such an item is not in the partition, which nobody takes from then."""
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=RecordingHandler(), buffer_size=2))
        inbox, new = queue.bridge()._inbox, queue.router.partitions[0]
        migration = Migration(Partition[str](1, 2), new, lambda: new, lambda _: None)
        assert await queue.produce_many(["a", "b"]) == 2
        waiter = new.wait_for(["moves"])
        assert new.take(2) == ["a", "b"]
        migration.fill(waiter, ["moves"])
        assert inbox.put("fits") is None
        assert inbox.put("no room") is not None
        migration.arrive()


@pytest.mark.parametrize("way", ["give up", "broken off", "sent away"])
async def test_c_34_threads_that_gave_up_with_their_places_are_not_in_the_way_of_the_loops_own_producers(way):
    """Nobody takes anything from an empty partition any more, which would serve the line."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(batch):
        entered.set()
        await leave.wait()

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=handle, buffer_size=1, max_batch=1))
        inbox, partition = queue.bridge()._inbox, queue.router.partitions[0]
        await queue.produce("held")
        await entered.wait()
        await queue.produce("first")
        waiters = [ThreadWaiter(lambda: True) for _ in range(2)]
        for waiter in waiters:
            assert inbox.wait_for(waiter, Offer(["thread's"]))
        await asyncio.sleep(0)  # the loop sees that they wait
        assert partition.take(1) == ["first"]
        assert [waiter.permits for waiter in waiters] == [1, 0]
        assert not queue.produce_nowait("too early")
        if way == "sent away":
            inbox.meet_partitions()
        for waiter in waiters if way != "sent away" else ():
            (inbox.leave if way == "give up" else inbox.break_wait)(waiter)
        await asyncio.sleep(0)
        assert partition.waiting == 0
        assert queue.produce_nowait("own")
        leave.set()


def test_a_fresh_loop_pauses_when_first_asked(clock):
    LoopPause().take()
    assert clock.pauses == [SHORTEST_PAUSE]
