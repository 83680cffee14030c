"""Order by key: what a record costs does not depend on how many wait for its key, and none overtakes another."""

from __future__ import annotations

import asyncio
import random

import pytest
from durable_kit import ROOT, RecordingFiles, opened
from steps import STEP_LIMIT, Steps

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.durable.state.frame import Frame, Run
from batchqueue_async.leases.key_order import KeyOrder


def by_first_byte(payload: bytes) -> bytes:
    return payload[:1]


def order_of(*payloads: bytes, lookahead: int = 100) -> tuple[KeyOrder, list[Run]]:
    """An order by the first byte, and a run for each record."""
    frame = Frame(0, list(payloads), 0, 0)
    runs = [Run(at, frame, at, at + 1, 0) for at in range(len(payloads))]
    return KeyOrder(by_first_byte, lookahead, 1 << 20, lambda run: run), runs


def numbers(runs: list[Run]) -> list[int]:
    return [seq for run in runs for seq in range(run.seq, run.end)]


def test_records_of_a_key_that_is_free_are_taken_out_as_they_are_wanted():
    order, runs = order_of(b"a0", b"a1", b"b2", b"a3", b"b4")
    assert numbers(order.admit(runs[:1], set())) == [0]
    assert numbers(order.admit(runs[1:], set())) == [2, 4]
    assert (order.held, order.next_free()) == (2, None)
    order.release([(0, 1)])
    assert order.next_free() == runs[1]
    assert order.take_free() == runs[1]
    assert numbers(order.admit([runs[1]], set())) == [1]
    assert (order.held, order.next_free()) == (1, None)
    order.release([(1, 2), (2, 3), (4, 5)])
    assert order.next_free() == runs[3]
    assert order.drop_oldest() == runs[3]
    assert (order.held, order.next_free()) == (0, None)


def test_what_comes_back_goes_before_the_younger_ones_that_wait_for_its_key():
    order, runs = order_of(*(b"a%d" % at for at in range(6)))
    assert numbers(order.admit(runs[:3], set())) == [0, 1, 2]
    assert order.admit(runs[3:5], set()) == []
    order.release([(2, 3)])
    assert order.admit(runs[2:3], set()) == []  # 0 and 1 have the key
    order.release([(0, 1), (1, 2)])
    assert order.next_free() == runs[2]
    assert order.admit(runs[5:], set()) == []  # the key is free, and older ones wait for it
    assert numbers(order.admit(runs[:1], set())) == [0]
    assert order.next_free() is None
    order.release([(0, 1)])
    assert [order.take_free().seq for _ in range(4)] == [2, 3, 4, 5]


def test_of_keys_that_are_free_the_oldest_record_goes_first_and_those_that_are_dropped_are_passed_over():
    order, runs = order_of(b"a0", b"b1", b"a2", b"b3", b"a4", b"b5", b"a6")
    assert numbers(order.admit(runs[:2], set())) == [0, 1]
    assert order.admit(runs[2:], set()) == []
    order.release([(0, 2)])
    assert order.drop_held(lambda run: run.seq in {2, 5}) == [runs[2], runs[5]]
    assert [order.take_free().seq for _ in range(3)] == [3, 4, 6]
    assert (order.next_free(), order.held, order.oldest_held()) == (None, 0, None)


def test_what_is_known_of_free_keys_stays_small():
    order, runs = order_of(*(b"a%d" % at for at in range(3_000)), lookahead=10_000)
    order.admit(runs[:1], set())
    order.admit(runs[1:], set())
    for at in range(2_999):
        order.release([(at, at + 1)])
        assert numbers(order.admit([order.take_free()], set())) == [at + 1]
    assert order.held == 0
    assert len(order._free) < 100


async def many_of_one_key(count: int, **options: object) -> DurableQueue:
    files = RecordingFiles()
    config = DurableConfig(durability="os", order="key", key=by_first_byte, **options)
    queue = await DurableQueue.open(ROOT, config, files=files)
    await queue.put_many([b"a%d" % number for number in range(count)])
    return queue


async def cost_of_settling(count: int) -> int:
    """The calls that it takes to settle one of many records of a key, and to lease the next, with two consumers."""
    queue = await many_of_one_key(count)
    first = await queue.lease(1)
    assert not await queue.lease(1, wait=0)
    assert (queue.stats().ready, queue.stats().records) == (0, count)
    with Steps() as steps:
        for _ in range(20):
            await first.ack()
            first = await queue.lease(1)
            assert not await queue.lease(1, wait=0)
        total = steps.count
    await queue.close()
    return total


async def test_d_51_settling_one_record_of_a_key_costs_the_same_among_many_that_wait_for_it():
    few, many = await cost_of_settling(200), await cost_of_settling(3_000)
    assert 100 < many < 2 * few


@pytest.mark.untraced
@pytest.mark.parametrize("memory_bytes", [1, 64 << 20])
async def test_x_18_passing_over_thousands_of_records_whose_key_is_in_use_has_no_long_step(memory_bytes):
    count = 4_000
    queue = await many_of_one_key(count, memory_bytes=memory_bytes)
    await queue.put(b"b")
    seen = []
    with Steps() as steps:
        first = await queue.lease(1)
        await asyncio.sleep(0)
        # In several steps, and the caller doesn't wait: reading and looking on is no waiting.
        other = await queue.lease(1, wait=0)
        assert [record.payload for record in other.records] == [b"b"]
        await first.ack()
        while lease := await queue.lease(2_000, wait=0):
            await asyncio.sleep(0)
            seen += [record.payload for record in lease.records]
            await asyncio.sleep(0)
            await lease.ack()
            await asyncio.sleep(0)
    assert seen == [b"a%d" % number for number in range(1, count)]
    await queue.close()
    assert 1_000 < steps.most < STEP_LIMIT


async def test_a_lease_by_key_is_as_large_behind_thousands_that_have_to_wait():
    queue = await many_of_one_key(3_000)
    await queue.put_many([b"%c" % letter for letter in b"bcdefgh"])
    first = await queue.lease(1)
    lease = await queue.lease(600)
    assert [record.payload for record in lease.records] == [b"b", b"c", b"d", b"e", b"f", b"g", b"h"]
    await first.ack()
    await lease.ack()
    assert len(await queue.lease(300)) == 300
    await queue.close()


async def test_a_consumer_that_waits_behind_thousands_is_not_forgotten_when_it_is_cancelled_amid_them():
    queue = await many_of_one_key(3_000)
    first = await queue.lease(1)
    waiting = [asyncio.create_task(queue.lease(1)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await queue.put(b"b")
    assert [record.payload for record in (await waiting[1]).records] == [b"b"]
    await first.nack()
    assert [record.payload for record in (await queue.lease(2)).records] == [b"a0", b"a1"]
    await queue.close()


class Consumers:
    """Consumers who do anything, and what may be delivered to them."""

    def __init__(self, queue: DurableQueue, chance: random.Random) -> None:
        self.queue, self.chance = queue, chance
        self.wanted: dict[int, bytes] = {}
        self.leases: list = []
        self.delivered = 0

    def check_counts(self) -> None:
        """What is said to be ready is what could be leased."""
        stats = self.queue.stats()
        assert stats.records == len(self.wanted) == stats.leased + stats.delayed + stats.ready + self.blocked()

    def blocked(self) -> int:
        gate = self.queue._state.gate
        assert gate.blocked == sum(len(held) for key, held in gate._held.items() if key in gate._busy)
        return gate.blocked

    def check(self, lease) -> None:
        """No record before an earlier one of its key, unless that is in the same lease, before it."""
        assert [record.seq for record in lease.records] == sorted(record.seq for record in lease.records)
        out = {seq for each in self.leases for seq in each[1]}
        mine: list[int] = []
        for record in lease.records:
            assert self.wanted[record.seq] == record.payload
            assert record.seq not in out, "delivered to two at once"
            earlier = {seq for seq in self.wanted if seq < record.seq and self.wanted[seq][:1] == record.payload[:1]}
            assert earlier <= {*mine}, f"{record.seq} came before {sorted(earlier - {*mine})}"
            mine.append(record.seq)
        self.delivered += len(mine)
        self.leases.append((lease, mine))

    async def step(self) -> None:
        chance = self.chance
        action = chance.choice(
            ["put", "lease", "lease", "lease", "ack", "ack", "nack", "delay", "part", "wait", "cancel"]
        )
        if action == "put":
            payloads = [
                b"%c%s" % (chance.choice(b"aaabcd"), b"x" * chance.randrange(40))
                for _ in range(chance.randrange(1, 30))
            ]
            for seq, payload in zip(await self.queue.put_many(payloads), payloads, strict=True):
                self.wanted[seq] = payload
        elif action == "lease":
            if lease := await self.queue.lease(chance.choice([1, 2, 7, 700]), wait=0):
                self.check(lease)
        elif action == "cancel":
            task = asyncio.create_task(self.queue.lease(chance.choice([1, 7]), wait=None))
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            task.cancel()
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(done, BaseException):
                self.check(done)
        elif action == "wait":
            await asyncio.sleep(chance.choice([0, 0.5, 2]))
        elif self.leases:
            await self.settle(action)

    async def settle(self, action: str) -> None:
        lease, mine = self.leases.pop(self.chance.randrange(len(self.leases)))
        some = self.chance.sample(mine, self.chance.randrange(1, len(mine) + 1)) if action == "part" else mine
        left = [seq for seq in mine if seq not in some]
        if action == "ack" or (action == "part" and self.chance.random() < 0.5):
            for seq in some:
                del self.wanted[seq]
            await lease.ack(some)
        else:
            await lease.nack(self.chance.choice([0.3, 1.5]) if action == "delay" else 0, some)
        if left:
            self.leases.append((lease, left))

    async def finish(self) -> None:
        while self.leases:
            await self.settle("ack")
        self.queue.hurry()
        while lease := await self.queue.lease(700, wait=0):
            self.check(lease)
            await self.settle("ack")
        assert not self.wanted
        assert self.queue.records == 0


@pytest.mark.untraced
@pytest.mark.parametrize("memory_bytes", [1, 2_000, 64 << 20])
@pytest.mark.parametrize("first", range(0, 30, 10))
async def test_whatever_consumers_do_no_record_overtakes_an_earlier_one_of_its_key(first, memory_bytes):
    delivered = 0
    for seed in range(first, first + 10):
        chance = random.Random(seed)
        options = {"memory_bytes": memory_bytes, "key_lookahead": chance.choice([1, 5, 10_000]), "lease_timeout": 1e6}
        async with opened(order="key", key=by_first_byte, **options) as queue:
            consumers = Consumers(queue, chance)
            for _ in range(120):
                await consumers.step()
                consumers.check_counts()
            await consumers.finish()
            delivered += consumers.delivered
    assert delivered > 1_000
