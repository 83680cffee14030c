"""The faults of other batch queues, a to i, each by its id: none may be reproducible here."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_tools import Item, check, check_report, kinds, kinds_by_home, make, now

import batchqueue_async as bq
from batchqueue_async.testing import RecordingErrorHandler, RecordingHandler, advance, run_virtual, settle


class Scripted:
    """A balancer that gives the next answer of a script, and keeps what it was told."""

    def __init__(self, *answers: list[int] | None) -> None:
        self.answers = list(answers)
        self.throughputs: list[list[int]] = []

    def assign(self, throughput, owners, workers):
        self.throughputs.append(list(throughput))
        return self.answers.pop(0) if self.answers else None


# --- a, b: accepted is a promise, in a shutdown too


async def test_bq_a_a_shutdown_releases_every_waiting_producer_and_loses_nothing():
    handler = RecordingHandler[str]()
    handler.hold()
    queue = make(consumer=handler, buffer_size=2, max_batch=2)
    assert await queue.produce_many(["in flight 1", "in flight 2"]) == 2
    await settle()
    assert await queue.produce_many(["waiting 1", "waiting 2"]) == 2
    singles = [asyncio.create_task(queue.produce(f"refused {number}")) for number in range(5)]
    many = asyncio.create_task(queue.produce_many(["refused 5", "refused 6"]))
    delivery = asyncio.create_task(queue.deliver(["refused 7"]))
    await settle()
    assert check(queue).refused == 0  # they wait
    closing = asyncio.create_task(queue.shutdown())
    await settle()
    assert all(task.done() for task in (*singles, many, delivery)), "a producer hangs behind the closed gate"
    assert [task.result() for task in singles] == [False] * 5
    assert many.result() == 0
    assert isinstance(delivery.exception(), bq.DeliveryError)
    handler.release()
    report = await closing
    assert handler.handled == ["in flight 1", "in flight 2", "waiting 1", "waiting 2"]
    assert (report.handled, report.accepted, report.undelivered) == (4, 4, [])
    assert check(queue).refused == 8


@pytest.mark.parametrize("turns", range(8))
async def test_bq_a_a_producer_that_gets_its_place_as_the_gate_closes_is_told_the_truth(turns):
    """At one of these moments the place is granted, and the gate closes before the producer can run again."""
    handler = RecordingHandler[str]()
    queue = make(consumer=handler, buffer_size=1)
    queue.produce_nowait("first")
    waiting = asyncio.create_task(queue.produce("second"))
    for _ in range(turns):
        await asyncio.sleep(0)
    closing = asyncio.create_task(queue.shutdown())
    accepted = await waiting
    await closing
    assert handler.handled == ["first", "second"][: 1 + accepted]
    assert check(queue).accepted == 1 + accepted


@pytest.mark.seeds(30)
@pytest.mark.parametrize("deadline", [0.0, 0.05, None])
async def test_bq_b_what_races_a_shutdown_is_handled_or_failed_or_reported(deadline):
    loop = asyncio.get_running_loop()
    dice = random.Random(loop.seed)
    handler = RecordingHandler[int](
        delay=lambda batch: dice.choice([0, 0, 0.01, 0.03]), fail=lambda batch: ValueError() if 13 in batch else None
    )
    on_error = RecordingErrorHandler()
    queue = make(
        consumer=handler,
        on_error=on_error,
        buffer_size=4,
        max_batch=3,
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(3),
    )
    accepted: list[int] = []

    async def produce(first: int) -> None:
        for number in range(first, first + 10):
            await asyncio.sleep(dice.choice([0, 0.001]))
            if (await queue.produce(number)) if number % 2 else queue.produce_nowait(number):
                accepted.append(number)

    producers = [asyncio.create_task(produce(first)) for first in range(0, 80, 10)]
    await asyncio.sleep(dice.random() * 0.05)
    report = await queue.shutdown(deadline)
    await asyncio.gather(*producers)
    failed = [item for items, _ in on_error.failures for item in items]
    assert sorted([*handler.handled, *failed, *report.undelivered]) == sorted(accepted)
    assert (report.handled, report.failed) == (len(handler.handled), len(failed))
    check_report(report)
    check(queue)


# --- c, d, e: growth and hand-over


@given(
    steps=st.lists(st.one_of(st.integers(1, 7), st.lists(st.integers(0, 2), min_size=40, max_size=40)), max_size=12),
    busy=st.booleans(),
)
def test_bq_c_every_partition_has_one_owner_after_any_growth_and_rebalancing(steps, busy):
    async def main() -> None:
        balancer = Scripted()
        queue = make(
            workers=bq.WorkerPolicy.fixed(3),
            partitions=bq.PartitionPolicy.adaptive(),
            balancer=balancer,
            balance_interval=1.0,
        )
        handler = RecordingHandler[Item](delay=1.5 if busy else 0.0)
        unused = kinds(100)
        used: list[type] = []
        produced = 0
        for step in steps:
            if isinstance(step, int):
                for _ in range(step):
                    used.append(unused.pop())
                    queue.add_handler(used[-1], handler)
            else:
                balancer.answers = [step[: queue.partition_count]]
            for kind in used:
                assert await queue.produce(kind(produced))
                produced += 1
            await advance(0.6)
            check(queue)
        report = await queue.shutdown(timeout=1000)
        assert report.handled == produced
        check(queue)

    run_virtual(main)


async def test_bq_d_growth_during_a_hand_over_leaves_no_partition_unowned():
    slow, quick = RecordingHandler[Item](), RecordingHandler[Item]()
    balancer = Scripted([1, 0])  # the two workers swap their partitions
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.adaptive(),
        balancer=balancer,
        balance_interval=1.0,
    )
    first, second = kinds_by_home(2)
    queue.add_handler(first, slow)
    queue.add_handler(second, quick)
    slow.hold()
    assert queue.produce_nowait(first(1))
    await advance(1.0)
    # The first partition is on its way to worker 1, which gets it when the running call is over.
    assert [each.owner for each in check(queue).partitions] == [0, 0]
    for kind in kinds(7):
        queue.add_handler(kind, quick)
    check(queue)
    balancer.answers = [[(index + 1) % 2 for index in range(queue.partition_count)]]
    await advance(1.0)
    check(queue)
    slow.release()
    await settle()
    assert [each.owner for each in check(queue).partitions] == [(index + 1) % 2 for index in range(9)]
    for number in range(20):
        assert queue.produce_nowait(first(number))
        assert queue.produce_nowait(second(number))
    await queue.flush(timeout=1.0)
    assert (len(slow.handled), len(quick.handled)) == (21, 20)


def type_that_moves(old: int, new: int) -> type:
    """A type whose partition is another one when a queue grows from `old` to `new` partitions."""
    from batchqueue_async.policies import stable_type_hash

    return next(
        kind
        for kind in (type(f"Moving{number}", (Item,), {}) for number in range(1000))
        if stable_type_hash(kind) % old != stable_type_hash(kind) % new
    )


async def test_bq_e_a_type_that_moves_keeps_its_order_and_its_one_call_at_once():
    moving = type_that_moves(2, 9)
    handler = RecordingHandler[Item](delay=0.5)
    other = RecordingHandler[Item]()
    queue = make(
        workers=bq.WorkerPolicy.fixed(2), partitions=bq.PartitionPolicy.adaptive(), buffer_size=20, max_batch=3
    )
    queue.add_handler(moving, handler)
    for number in range(10):
        assert queue.produce_nowait(moving(number))
    await advance(0.1)
    assert handler.active == 1
    for kind in kinds(8):
        queue.add_handler(kind, other)
    assert queue.partition_count == 9
    for number in range(10, 20):
        assert await queue.produce(moving(number))
        check(queue)
    await queue.flush(timeout=60)
    assert handler.handled == [moving(number) for number in range(20)]
    assert handler.max_active == 1


async def test_bq_e_a_type_that_moves_twice_while_its_items_wait_keeps_its_order():
    handler = RecordingHandler[Item]()
    handler.hold()
    queue = make(workers=bq.WorkerPolicy.fixed(3), partitions=bq.PartitionPolicy.adaptive(), fallback=handler)
    many = kinds(40)
    number = 0
    for size in (1, 4, 7, 20, 40):
        for kind in many[len(queue._dispatcher.entries) : size]:
            queue.add_handler(kind, handler)
        for kind in many:
            assert await queue.produce(kind(number))
            number += 1
        await settle()
        check(queue)
    handler.release()
    await queue.flush(timeout=60)
    for kind in many:
        mine = [item.number for item in handler.handled if type(item) is kind]
        assert mine == sorted(mine)
        assert len(mine) == 5


async def test_bq_e_a_key_keeps_its_order_through_growth():
    handler = RecordingHandler[Item](delay=0.25)
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.adaptive(),
        selector=bq.by_key(lambda item: item.number % 10),
        max_batch=4,
    )
    queue.add_handler(Item, handler, weight=2.0)
    for number in range(40):
        assert await queue.produce(Item(number))
    await advance(0.1)
    for weight, start in ((7.0, 40), (13.0, 80), (31.0, 120)):
        queue.add_handler(Item, handler, weight=weight)
        assert queue.partition_count == weight
        for number in range(start, start + 40):
            assert await queue.produce(Item(number))
        check(queue)
        await advance(0.3)
    await queue.flush(timeout=600)
    for key in range(10):
        mine = [item.number for item in handler.handled if item.number % 10 == key]
        assert mine == list(range(key, 160, 10))
    assert handler.max_active == 1


# --- f to i: turns and bounds


async def test_bq_f_a_busy_partition_starves_neither_its_neighbours_nor_its_hand_over():
    balancer = Scripted([1, 1])
    queue = make(
        workers=bq.WorkerPolicy.fixed(2),
        partitions=bq.PartitionPolicy.fixed(2),
        balancer=balancer,
        balance_interval=10.0,
        max_batch=5,
        buffer_size=50,
    )
    busy, sparse = kinds_by_home(2)
    queue._drains[1].hand_over(queue._router.partitions[1], queue._drains[0])  # both have one worker
    rounds = 0
    waited: list[float] = []

    @queue.handler(busy)
    async def refill(batch: list[Item]) -> None:
        nonlocal rounds
        rounds += 1
        await asyncio.sleep(0.1)
        while rounds < 300 and queue.produce_nowait(busy(0)):
            pass

    @queue.handler(sparse)
    async def measure(batch: list[Item]) -> None:
        waited.extend(now() - item.number for item in batch)

    assert queue.produce_nowait(busy(0))
    for _ in range(5):
        await advance(0.95)
        assert queue.produce_nowait(sparse(now()))
    await advance(0.2)
    assert len(waited) == 5
    assert max(waited) < 0.21  # one round: the call that ran, at most
    await advance(10.0)
    assert [each.owner for each in check(queue).partitions] == [1, 1]
    assert rounds < 300  # it moved although it was never empty
    rounds = 300
    await queue.flush(timeout=60)


async def test_bq_g_shutdown_in_a_handler_says_at_once_what_to_do():
    on_error = RecordingErrorHandler()
    later: list[asyncio.Task[bq.ShutdownReport]] = []
    async with bq.BatchQueueManager() as manager:

        async def handle(batch: list[str]) -> None:
            calls = {
                "queue": queue.shutdown,
                "manager": lambda: manager.shutdown("q"),
                "all": manager.shutdown_all,
            }
            if batch[0] in calls:
                await calls[batch[0]]()
            later.append(asyncio.create_task(queue.shutdown()))

        queue = manager.create("q", bq.QueueConfig(consumer=handle, on_error=on_error, max_batch=1))
        for call in ("queue", "manager", "all"):
            assert await queue.produce(call)
        await queue.flush(timeout=1.0)
        assert [items for items, _ in on_error.failures] == [["queue"], ["manager"], ["all"]]
        for _, error in on_error.failures:
            assert isinstance(error, bq.DeadlockError)
            assert "queue 'q'" in str(error)
            assert "asyncio.create_task(queue.shutdown())" in str(error)
        assert not queue.closed
        # The way out that the message names works.
        assert await queue.produce("from a task")
        await queue.flush(timeout=1.0)
        report = await asyncio.wait_for(later[0], 1.0)
        assert (report.handled, report.failed) == (1, 3)


async def test_bq_g_shutdown_in_on_error_and_in_on_idle_says_what_to_do():
    errors: list[Exception] = []
    queue: bq.BatchQueue[str]

    class Idler(RecordingHandler[str]):
        async def on_idle(self) -> None:
            if not errors:
                try:
                    await queue.shutdown(timeout=5.0)
                except bq.DeadlockError as error:
                    errors.append(error)

    async def on_error(items: list[str], error: BaseException) -> None:
        try:
            await queue.shutdown(timeout=5.0)
        except bq.DeadlockError as found:
            errors.append(found)

    queue = make(consumer=Idler(fail=ValueError()), on_error=on_error)
    await advance(0.1)
    assert len(errors) == 1, "on_idle waits for its own queue's end"
    await queue.produce("x")
    await queue.flush(timeout=1.0)
    assert len(errors) == 2
    assert not queue.closed


async def test_bq_h_one_type_keeps_four_workers_busy(logs):
    handler = RecordingHandler[int](delay=1.0)
    queue = make(
        consumer=handler, workers=bq.WorkerPolicy.fixed(4), partitions=bq.PartitionPolicy.fixed(4), max_batch=1
    )
    for number in range(8):
        assert await queue.produce(number)
    await advance(0.5)
    assert handler.active == 4
    await queue.flush(timeout=1.6)
    assert handler.max_active == 4
    assert [worker.taken for worker in queue.stats().workers] == [2, 2, 2, 2]
    assert not [event for event in logs if event["log_level"] == "warning"]


async def test_bq_h_a_selector_that_cannot_spread_is_warned_of(logs):
    four = {"workers": bq.WorkerPolicy.fixed(4), "partitions": bq.PartitionPolicy.fixed(4)}
    make(consumer=RecordingHandler(), selector=bq.type_hash(), **four)
    (event,) = [event for event in logs if event["log_level"] == "warning"]
    assert (event["event"], event["queue"]) == ("type_hash_cannot_spread", "q")
    assert "round_robin()" in event["way_out"]
    logs.clear()
    make(consumer=RecordingHandler(), selector=bq.type_hash())
    make(consumer=RecordingHandler(), selector=bq.by_key(str), **four)
    make(**four)
    assert not [event for event in logs if event["log_level"] == "warning"]


@pytest.mark.parametrize("single", [True, False])
async def test_bq_i_no_call_receives_more_than_max_batch(single):
    handler = RecordingHandler[int]()
    queue = make(
        consumer=handler if single else None,
        selector=bq.round_robin(),
        partitions=bq.PartitionPolicy.fixed(64),
        buffer_size=1000,
        max_batch=100,
    )
    if not single:
        queue.add_handler(int, handler)
    handler.hold()
    assert await queue.produce_many(list(range(64_000))) == 64_000
    handler.release()
    await queue.flush(timeout=1.0)
    assert max(map(len, handler.batches)) == 100
    assert len(handler.handled) == 64_000
    assert queue.stats().batch_sizes.max == 100


async def test_bq_i_the_bound_holds_for_a_base_class_handler_of_many_types():
    handler = RecordingHandler[Item]()
    queue = make(partitions=bq.PartitionPolicy.fixed(8), max_batch=10)
    queue.add_handler(Item, handler)
    for kind in kinds(20):
        assert await queue.produce_many([kind(number) for number in range(20)]) == 20
    await queue.flush(timeout=1.0)
    assert max(map(len, handler.batches)) == 10
    assert len(handler.handled) == 400
