"""Moving partitions between workers: the pure decision, its safety under skew, and what it is good for."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_tools import Item, check, kinds, make, now

import batchqueue_async as bq
from batchqueue_async.testing import RecordingHandler, advance, run_virtual, settle


def loads(throughput, owners, workers):
    total = [0] * workers
    for amount, owner in zip(throughput, owners, strict=True):
        total[owner] += amount
    return total


# --- the decision


@given(
    throughput=st.lists(st.integers(0, 10_000), min_size=1, max_size=60),
    workers=st.integers(1, 9),
    data=st.data(),
)
def test_every_partition_gets_an_owner_and_the_load_is_within_the_lpt_bound(throughput, workers, data):
    owners = data.draw(st.lists(st.integers(0, workers - 1), min_size=len(throughput), max_size=len(throughput)))
    balancer = bq.throughput_weighted()
    before = list(owners)
    assigned = balancer.assign(throughput, owners, workers)
    assert owners == before
    assert assigned == balancer.assign(throughput, owners, workers)
    if assigned is None:
        had = loads(throughput, owners, workers)
        assert (
            workers == 1
            or sum(throughput) == 0
            or max(had) < 1.15 * min(had)
            or (
                # the owners are those that it would give
                bq.throughput_weighted(1.0).assign(throughput, owners, workers) is None
            )
        )
        return
    assert len(assigned) == len(throughput)
    assert all(0 <= owner < workers for owner in assigned)
    # Longest first to the least loaded: a worker above the mean got its last partition when it was the least loaded.
    mean = sum(throughput) / workers
    for worker, load in enumerate(loads(throughput, assigned, workers)):
        mine = [amount for amount, owner in zip(throughput, assigned, strict=True) if owner == worker]
        assert load <= mean + min(mine, default=0)


@given(throughput=st.lists(st.integers(1, 9), min_size=4, max_size=9))
def test_the_lpt_bound_against_the_best_assignment(throughput):
    """Graham's bound: at most 4/3 - 1/(3 workers) of the optimum."""
    workers = 2
    assigned = bq.throughput_weighted(1.0).assign(throughput, [0] * len(throughput), workers)
    best = min(
        max(loads(throughput, owners, workers)) for owners in itertools.product(range(workers), repeat=len(throughput))
    )
    assert max(loads(throughput, assigned, workers)) <= (4 / 3 - 1 / (3 * workers)) * best


@pytest.mark.parametrize(
    ("throughput", "owners", "moves"),
    [
        ([100, 100], [0, 1], False),
        ([114, 100], [0, 1], False),  # below 1.15
        ([60, 55, 50, 50], [0, 0, 1, 1], True),  # 115 to 100: 1.15
        ([0, 0, 0], [0, 0, 0], False),  # nothing to go by
        ([5, 0], [0, 0], True),  # one worker has nothing
    ],
)
def test_a_small_difference_moves_nothing(throughput, owners, moves):
    assigned = bq.throughput_weighted().assign(throughput, owners, 2)
    assert (assigned is not None) == (moves and assigned != owners)


def test_one_worker_has_nothing_to_balance():
    assert bq.throughput_weighted().assign([5, 1], [0, 0], 1) is None


def test_a_balancer_tells_its_name_and_refuses_nonsense():
    assert str(bq.throughput_weighted(1.3)) == "throughput_weighted(1.3)"
    for ratio in (0.9, math.nan, math.inf):
        with pytest.raises(bq.ConfigError, match=rf"throughput_weighted: skip_ratio={ratio} is (below 1|not a finite)"):
            bq.throughput_weighted(ratio)


# --- in a queue


class Always:
    """Gives one answer after the other, for ever."""

    def __init__(self, *answers) -> None:
        self.answers = itertools.cycle(answers)
        self.seen: list[tuple[list[int], list[int], int]] = []

    def assign(self, throughput, owners, workers):
        self.seen.append((list(throughput), list(owners), workers))
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_the_balancer_is_asked_every_interval_for_what_was_accepted_since():
    balancer = Always(None)
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(3),
        selector=lambda item, count: item % count,
        balancer=balancer,
        balance_interval=5.0,
        consumer=RecordingHandler(),
    )
    assert await queue.produce_many([0, 0, 0, 2]) == 4
    await advance(5.0)
    assert await queue.produce_many([1, 1]) == 2
    await advance(5.0)
    assert balancer.seen == [([3, 0, 1], [0, 1, 0], 2), ([0, 2, 0], [0, 1, 0], 2)]
    await queue.shutdown()
    await advance(100.0)
    assert len(balancer.seen) == 2


async def test_one_worker_never_asks_its_balancer():
    balancer = Always(None)
    make(partitions=bq.PartitionPolicy.fixed(3), balancer=balancer, balance_interval=1.0)
    await advance(10.0)
    assert balancer.seen == []


@pytest.mark.parametrize("answer", [ValueError("secret"), [0], [0, 1, 2], [0, -1], []])
async def test_a_balancer_that_fails_is_logged_and_nothing_moves(answer, logs):
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(2),
        balancer=Always(answer),
        balance_interval=1.0,
        consumer=RecordingHandler(),
    )
    await advance(2.5)
    events = [event for event in logs if event["event"] == "balancer_failed"]
    assert [(event["queue"], event["log_level"]) for event in events] == [("q", "error")] * 2
    assert [partition.owner for partition in check(queue).partitions] == [0, 1]
    assert await queue.produce(1)
    await queue.flush(timeout=1)


async def test_a_partition_in_flight_changes_hands_when_its_call_is_over():
    handler = RecordingHandler[Item](delay=1.0)
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(2),
        selector=lambda item, count: 0,
        balancer=Always([1, 1], [0, 0]),
        balance_interval=0.75,
        max_batch=2,
    )
    queue.add_handler(Item, handler)
    assert await queue.produce_many([Item(number) for number in range(20)]) == 20
    owners = []
    for _ in range(40):
        await advance(0.25)
        owners.append(check(queue).partitions[0].owner)
    await queue.flush(timeout=100)
    assert set(owners) == {0, 1}
    assert handler.max_active == 1
    assert handler.handled == [Item(number) for number in range(20)]


async def test_an_owner_that_is_named_again_before_the_hand_over_keeps_its_partition():
    handler = RecordingHandler[Item]()
    handler.hold()
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(2),
        selector=lambda item, count: 0,
        balancer=Always([1, 1], [0, 1]),
        balance_interval=1.0,
    )
    queue.add_handler(Item, handler)
    assert await queue.produce(Item(1))
    await advance(2.0)  # away, and back
    handler.release()
    await settle()
    assert [partition.owner for partition in check(queue).partitions] == [0, 1]


async def test_lingering_items_change_hands_too():
    handler = RecordingHandler[Item]()
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(2),
        selector=lambda item, count: 0,
        balancer=Always([1, 1], None),
        balance_interval=1.0,
        linger=3.0,
        max_batch=4,
    )
    queue.add_handler(Item, handler)
    assert await queue.produce(Item(0))
    await advance(1.5)
    assert check(queue).partitions[0].owner == 1
    assert handler.handled == []
    await advance(1.5)
    assert handler.times == [3.0]  # not 4.0: the item's age goes with it
    assert await queue.produce_many(map(Item, range(4))) == 4
    await settle()
    assert handler.times == [3.0, 3.0]  # a full batch leaves at once with the new owner as well


SKEW = [24] * 20 + [8] * 30 + [4] * 20 + [1] * 30  # the documents': 100 types in four classes


def skewed_queue(balancer, handled):
    """4 workers, a partition for each of 100 types, handlers that take 1 ms per item."""
    queue = make(
        workers=bq.WorkerPolicy.fixed(4),
        partitions=bq.PartitionPolicy.adaptive(),
        balancer=balancer,
        balance_interval=1.0,
        buffer_size=100_000,
    )
    types = kinds(len(SKEW))

    async def consume(batch: list[Item]) -> None:
        await asyncio.sleep(0.001 * len(batch))
        for item in batch:
            handled.append((type(item), item.number))

    for kind in types:
        queue.add_handler(kind, consume)
    return queue, types


async def run_skew(balancer, seconds):
    """Offer exactly as much as four workers can do, for so many seconds; how busy each was in the second half."""
    handled: list[tuple[type, int]] = []
    queue, types = skewed_queue(balancer, handled)
    produced = dict.fromkeys(types, 0)
    step, unit = 0.1, 0.0
    busy_before: list[float] = []
    handled_before = 0
    for tick in range(int(seconds / step)):
        unit += step * 4 * 1000 / sum(SKEW) * 0.95  # 95 % of four workers' time
        for kind, weight in zip(types, SKEW, strict=True):
            while produced[kind] < int(unit * weight):
                assert queue.produce_nowait(kind(produced[kind]))
                produced[kind] += 1
        await advance(step)
        if tick == int(seconds / step) // 2:
            busy_before = [worker.taken for worker in check(queue).workers]
            handled_before = len(handled)
    taken = [worker.taken - before for worker, before in zip(check(queue).workers, busy_before, strict=True)]
    throughput = (len(handled) - handled_before) / (seconds / 2)
    await queue.shutdown(timeout=1000)
    check(queue)
    return queue, types, produced, handled, taken, throughput


async def test_rebalancing_under_skew_loses_and_doubles_nothing_and_keeps_the_order():
    queue, types, produced, handled, _, _ = await run_skew(bq.throughput_weighted(), seconds=6.0)
    assert queue._rebalancer.moves > 0
    assert len(handled) == sum(produced.values())
    by_type: dict[type, list[int]] = {kind: [] for kind in types}
    for kind, number in handled:
        by_type[kind].append(number)
    for kind, numbers in by_type.items():
        assert numbers == list(range(produced[kind]))


async def test_rebalancing_evens_the_load_that_a_static_assignment_leaves_uneven():
    """In virtual time, so exactly: no worker does 1.05 times as much as another, and more gets done."""
    _, _, _, _, static, static_throughput = await run_skew(None, seconds=20.0)
    _, _, _, _, balanced, balanced_throughput = await run_skew(bq.throughput_weighted(), seconds=20.0)
    assert max(static) / min(static) > 1.2, "the static assignment is no skew to speak of"
    assert max(balanced) / min(balanced) <= 1.05
    assert balanced_throughput > static_throughput


def test_rebalancing_under_many_task_orders():
    def run(seed: int) -> None:
        async def main() -> None:
            handler = RecordingHandler[Item](delay=0.3)
            queue = make(
                workers=bq.WorkerPolicy.fixed(3),
                partitions=bq.PartitionPolicy.fixed(5),
                balancer=Always([2, 2, 2, 2, 2], [0, 0, 1, 1, 2], [1, 0, 1, 0, 1], None),
                balance_interval=0.4,
                buffer_size=4,
                max_batch=2,
            )
            queue.add_handler(Item, handler)
            types = kinds(6)
            for number in range(8):
                await asyncio.gather(*(queue.produce(kind(number)) for kind in types))
                check(queue)
            await queue.flush(timeout=1000)
            assert handler.max_active == 1
            for kind in types:
                assert [item.number for item in handler.handled if type(item) is kind] == list(range(8))
            assert now() < 1000

        run_virtual(main, seed=seed)

    for seed in range(20):
        run(seed)
