"""A loop that is never idle lets the threads run that it has granted places."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

import batchqueue_async as bq
from batchqueue_async.bridge import credits as gates
from batchqueue_async.bridge.credits import LONGEST_PAUSE, PAUSE_SHARE, SHORTEST_PAUSE, Ticket


class Clock:
    """Time that passes only in sleeps and when told to."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(gates, "time", clock)
    monkeypatch.setattr(gates, "HAS_GIL", True)
    return clock


@pytest.fixture
async def place():
    """A queue of one place, its gate, and a ticket of a thread that stands in line for the place."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(batch):
        entered.set()
        await leave.wait()

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=handle, buffer_size=1, max_batch=1))
        queue.bridge()
        await queue.produce("held")
        await entered.wait()
        await queue.produce("fills")
        door = queue._inbox
        ticket = Ticket(lambda: True)
        assert door.enlist(ticket, "thread's", 1)
        await asyncio.sleep(0)
        own = asyncio.create_task(queue.produce("own"))
        await asyncio.sleep(0)
        yield SimpleNamespace(queue=queue, door=door, gate=ticket.gate, ticket=ticket, own=own)
        leave.set()
        door.leave(ticket)
        await own


def free_the_place(place):
    partition = place.queue.router.partitions[0]
    assert partition.take(1) == ["fills"]
    assert place.ticket.permits == 1


async def test_the_loop_pauses_longer_each_time_that_the_thread_did_not_come(clock, place):
    free_the_place(place)
    for _ in range(8):
        clock.now += PAUSE_SHARE * LONGEST_PAUSE
        place.gate.refill()
    assert clock.pauses[:3] == [SHORTEST_PAUSE, 2 * SHORTEST_PAUSE, 4 * SHORTEST_PAUSE]
    assert clock.pauses[-1] == LONGEST_PAUSE


async def test_pauses_take_a_small_share_of_the_time(clock, place):
    free_the_place(place)
    for _ in range(1_000):
        clock.now += SHORTEST_PAUSE / 10
        place.gate.refill()
    assert clock.pauses
    assert sum(clock.pauses) <= (clock.now - 1_000.0) / PAUSE_SHARE + LONGEST_PAUSE


async def test_a_thread_that_came_is_owed_nothing(clock, place):
    free_the_place(place)
    place.gate.refill()
    place.gate.pause = LONGEST_PAUSE
    before = len(clock.pauses)
    assert place.door.redeem(place.ticket, ["thread's"]) == 1
    clock.now += 1.0
    place.gate.refill()
    assert len(clock.pauses) == before
    assert (place.gate.owed, place.gate.pause) == (0, SHORTEST_PAUSE)


async def test_a_thread_that_left_is_owed_nothing(clock, place):
    free_the_place(place)
    place.door.leave(place.ticket)
    before = len(clock.pauses)
    clock.now += 1.0
    place.gate.refill()
    assert place.gate.owed == 0
    assert len(clock.pauses) == before


async def test_where_threads_run_at_once_there_is_no_pause(clock, place, monkeypatch):
    monkeypatch.setattr(gates, "HAS_GIL", False)
    free_the_place(place)
    clock.now += 1.0
    place.gate.refill()
    assert clock.pauses == []
