"""How much is taken and how many handlers run: bounds by bytes, pauses, adaptive workers, health, stops."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from intake_handlers import Recorder, adds_up, bodies

import batchqueue_async as bq
from batchqueue_async import intake
from batchqueue_async.testing import FakeBroker

KINDS = ("amqp", "kafka", "nats", "redis")


# --- bounds


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_bound_everything_that_is_held(kind):
    """In the buffer, with handlers, and waiting for a later attempt: at most the bound and one message."""
    broker, most = FakeBroker(kind), 0
    failed = set()

    async def handle(message):
        nonlocal most
        most = max(most, consumer.stats().held_bytes)
        await asyncio.sleep(0.1)
        if message.id not in failed and len(failed) < 10:
            failed.add(message.id)
            raise ValueError("once")

    broker.publish(*[b"x" * 1000] * 60)
    options = {"workers": 4, "prefetch": 50, "prefetch_bytes": 8_000, "retry": bq.RetryPolicy(initial=0.3)}
    consumer = broker.consumer(handle, **options)
    async with consumer:
        await broker.drained()
        assert consumer.stats().acked == 60
        assert consumer.stats().held_bytes == 0
    assert 4_000 <= most <= 9_000
    assert broker.violations == []


async def test_a_message_larger_than_the_bound_is_handled_alone():
    broker, seen = FakeBroker(), []

    async def handle(message):
        seen.append(consumer.stats().held_bytes)
        await asyncio.sleep(0.1)

    broker.publish(*[b"x" * 5_000] * 3)
    consumer = broker.consumer(handle, workers=4, prefetch_bytes=1_000)
    async with consumer:
        await broker.drained()
    assert seen == [5_000] * 3


async def test_a_downstream_that_blocks_holds_up_the_broker_and_nothing_else():
    broker, handler = FakeBroker(), Recorder(delay=1000.0)
    broker.publish(*bodies(100))
    async with broker.consumer(handler, workers=4, prefetch=10) as consumer:
        await asyncio.sleep(500)
        stats = consumer.stats()
        assert (stats.in_flight, stats.buffered, broker.depth) == (4, 6, 90)
        await consumer.shutdown(0)


# --- holds


async def test_a_queue_that_is_full_holds_everything_and_costs_no_attempt():
    broker, refused, attempts = FakeBroker(), [], []

    async def handle(message):
        attempts.append(message.attempt)
        if asyncio.get_running_loop().time() < 20.0:
            refused.append(message.body)
            raise bq.QueueFullError("downstream is full")

    broker.publish(*bodies(10))
    retry = bq.RetryPolicy(initial=1.0, max_attempts=2)
    async with broker.consumer(handle, workers=2, retry=retry) as consumer:
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            while consumer.stats().paused_for != ("downstream",):
                await asyncio.sleep(0.1)
        assert consumer.stats().state == "paused"
        await broker.drained()
        stats = consumer.stats()
    assert len(refused) >= 3  # more often than max_attempts allows a failure
    assert set(attempts) == {1}
    assert (stats.acked, stats.dead_lettered) == (10, 0)
    assert adds_up(stats)
    assert stats.paused_for == ()


async def test_order_holds_through_a_hold():
    broker, done = FakeBroker(), []

    async def handle(message):
        if asyncio.get_running_loop().time() < 5.0 and message.body != b"0":
            raise bq.QueueFullError("downstream is full")
        done.append(message.body)

    broker.publish(*bodies(20), key="a")
    async with broker.consumer(handle, workers=4, ordered_by=intake.KEY):
        await broker.drained()
    assert done == bodies(20)


# --- pauses


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pause_takes_and_starts_nothing_and_a_resume_goes_on(kind):
    broker, handler = FakeBroker(kind), Recorder(delay=1.0)
    broker.publish(*bodies(6))
    async with broker.consumer(handler, workers=2, prefetch=4) as consumer:
        await asyncio.sleep(0.5)
        began = len(handler.seen)
        consumer.pause()
        broker.publish(*bodies(30)[6:])
        await asyncio.sleep(100)
        assert handler.seen == handler.done  # what ran has ended
        assert len(handler.seen) == began  # and nothing has begun
        stats = consumer.stats()
        assert (stats.state, stats.paused_for) == ("paused", ("user",))
        assert stats.received <= 5
        assert consumer.healthy()
        assert stats.reconnects == 0
        consumer.resume()
        await broker.drained()
        assert consumer.stats().state == "running"
    assert sorted(handler.done) == sorted(bodies(30))
    assert broker.violations == []


async def test_a_stop_of_a_paused_consumer_handles_what_it_holds():
    broker, handler = FakeBroker(), Recorder(delay=1.0)
    broker.publish(*bodies(10))
    async with broker.consumer(handler, workers=2, prefetch=4) as consumer:
        await asyncio.sleep(0.5)
        consumer.pause()
        await asyncio.sleep(10)
    assert consumer.report.released == 0
    assert consumer.report.acked == consumer.stats().received
    assert broker.unsettled == 10 - consumer.report.acked


# --- adaptive workers


async def run_adaptive(delay, *, seconds, count=100, **policy):
    """Workers over time; `delay` of a call from the number of those that run."""
    broker, found = FakeBroker(), []
    running = 0

    async def handle(message):
        nonlocal running
        running += 1
        try:
            await asyncio.sleep(delay(running))
        finally:
            running -= 1

    adaptive = bq.AdaptivePolicy(interval=2.0, **policy)
    async with broker.consumer(handle, workers=4, prefetch=200, adaptive=adaptive) as consumer:
        for _ in range(seconds):
            if broker.depth < 100:
                broker.publish(*bodies(count))
            await asyncio.sleep(1)
            found.append((consumer.stats().workers, running))
        await consumer.shutdown(0)
    return found


async def test_adaptive_workers_grow_with_the_depth_up_to_their_bound():
    found = await run_adaptive(lambda _: 0.5, seconds=40, min_workers=2, max_workers=12)
    workers = [each for each, _ in found]
    assert workers[-1] == 12
    assert max(workers) == 12
    assert workers == sorted(workers)
    assert max(running for _, running in found) == 12  # they are used


async def test_adaptive_workers_shrink_when_calls_take_longer_and_not_below_their_bound():
    # Beyond 8 at once the downstream gets slower in proportion to the square.
    found = await run_adaptive(
        lambda n: 0.5 if n <= 8 else 0.5 * (n / 8) ** 2, seconds=120, min_workers=2, max_workers=64
    )
    workers = [each for each, _ in found]
    assert min(workers) >= 2
    assert max(workers) < 32  # it does not run away to its bound
    drops = sum(after < before for before, after in itertools.pairwise(workers))
    assert drops >= 1


async def test_adaptive_workers_do_not_grow_without_depth():
    found = await run_adaptive(lambda _: 0.1, seconds=30, count=3, min_workers=1, max_workers=32)
    assert {each for each, _ in found} == {4}


async def test_a_call_that_times_out_takes_workers_away():
    broker = FakeBroker()

    async def handle(message):
        await asyncio.sleep(1000)

    adaptive = bq.AdaptivePolicy(min_workers=2, max_workers=16)
    broker.publish(*bodies(40))
    retry = bq.RetryPolicy(initial=0.1, max_attempts=2)
    options = {"workers": 16, "adaptive": adaptive, "handler_timeout": 5.0, "retry": retry}
    async with broker.consumer(handle, **options) as consumer:
        await asyncio.sleep(60)
        assert consumer.stats().workers == 2
        assert consumer.stats().in_flight >= 2  # and they are at work
        await consumer.shutdown(0)


# --- the pool of database connections


@pytest.mark.parametrize(("size", "warned"), [(74, 0), (73, 1)])
async def test_workers_of_all_consumers_and_the_spare_fit_into_the_pool_of_connections(size, warned, logs):
    pool = intake.ConnectionPool(name="orders-db", size=size)
    broker, other = FakeBroker(), FakeBroker()
    async with broker.consumer(Recorder(), name="one", workers=32, database=pool):
        assert not [each for each in logs if each["event"] == "database_pool_too_small"]
        async with other.consumer(Recorder(), name="two", workers=32, database=pool):
            found = [each for each in logs if each["event"] == "database_pool_too_small"]
    assert len(found) == warned
    if warned:
        assert {name: found[0][name] for name in ("pool", "size", "needed", "workers", "consumers", "spare")} == {
            "pool": "orders-db", "size": 73, "needed": 74, "workers": 64, "consumers": 2, "spare": 10,
        }  # fmt: skip


async def test_another_pool_and_consumers_that_have_gone_do_not_count(logs):
    pool = intake.ConnectionPool(name="orders-db", size=20)
    async with FakeBroker().consumer(Recorder(), name="gone", workers=10, database=pool):
        pass
    elsewhere = intake.ConnectionPool(name="stock-db", size=20)
    async with (
        FakeBroker().consumer(Recorder(), name="one", workers=10, database=pool),
        FakeBroker().consumer(Recorder(), name="two", workers=10, database=elsewhere),
        FakeBroker().consumer(Recorder(), name="three", workers=10),
    ):
        pass
    assert not [each for each in logs if each["event"] == "database_pool_too_small"]


async def test_adaptive_workers_need_connections_for_their_most(logs):
    pool = intake.ConnectionPool(name="orders-db", size=40, spare=0)
    adaptive = bq.AdaptivePolicy(max_workers=64)
    async with FakeBroker().consumer(Recorder(), workers=8, adaptive=adaptive, database=pool):
        pass
    (found,) = [each for each in logs if each["event"] == "database_pool_too_small"]
    assert found["needed"] == 64


# --- health


async def test_health_follows_outcomes_and_not_receipts():
    broker = FakeBroker()
    go = asyncio.Event()

    async def handle(message):
        await go.wait()

    broker.publish(*bodies(20))
    async with broker.consumer(handle, workers=2, prefetch=10, handler_timeout=None) as consumer:
        await asyncio.sleep(59)
        assert consumer.healthy()
        broker.publish(*bodies(5))  # what comes in says nothing
        await asyncio.sleep(2)
        assert not consumer.healthy()
        assert consumer.healthy(stall=120)
        go.set()
        await broker.drained()
        assert consumer.healthy()
        await asyncio.sleep(1000)
        assert consumer.healthy()  # nothing to do is no stall
    assert not consumer.healthy()


async def test_health_goes_with_the_connection():
    broker = FakeBroker()
    async with broker.consumer(Recorder()) as consumer:
        await asyncio.sleep(100)
        broker.down()
        await asyncio.sleep(59)
        assert consumer.healthy()
        await asyncio.sleep(5)
        assert not consumer.healthy()
        assert consumer.stats().state == "connecting"
        broker.up()
        await asyncio.sleep(60)
        assert consumer.healthy()


@pytest.mark.parametrize("stall", [-1, "soon"])
async def test_health_wants_a_time(stall):
    async with FakeBroker().consumer(Recorder()) as consumer:
        with pytest.raises(bq.ConfigError, match="stall"):
            consumer.healthy(stall=stall)


# --- stops


async def test_the_log_tells_how_far_a_stop_is(logs):
    broker = FakeBroker()
    broker.publish(*bodies(8))
    async with broker.consumer(Recorder(delay=12.0), workers=4, prefetch=8) as consumer:
        await asyncio.sleep(1)
    said = [each for each in logs if each["event"] == "intake_draining"]
    assert [(each["buffered"], each["in_flight"]) for each in said] == [(4, 4), (4, 4), (0, 4), (0, 4)]
    assert [each["left"] for each in said] == [25.0, 20.0, 15.0, 10.0]
    (closed,) = [each for each in logs if each["event"] == "intake_closed"]
    assert (closed["acked"], closed["left"]) == (8, 0)
    assert consumer.report.acked == 8


# --- what came again


@pytest.mark.parametrize("kind", ["nats", "redis"])
async def test_what_comes_again_is_counted_where_the_broker_says_so(kind):
    broker, handler = FakeBroker(kind), Recorder(delay=1.0)
    broker.publish(*bodies(10))
    async with broker.consumer(handler, workers=2, prefetch=10) as consumer:
        await asyncio.sleep(1.5)
        broker.reset()
        await broker.drained()
        stats = consumer.stats()
    assert stats.redelivered == 8
    assert stats.received == 18
    assert adds_up(stats)


# --- several faults at once


async def test_a_handler_that_swallows_its_timeout_has_handled_its_message():
    broker, swallowed = FakeBroker(), []

    async def handle(message):
        try:
            await asyncio.sleep(10.0 if message.body == b"0" else 0.1)
        except asyncio.CancelledError:
            swallowed.append(message.body)
            await asyncio.sleep(0.1)  # and its task is not cancelled any more

    broker.publish(*bodies(5))
    async with broker.consumer(handle, workers=1, handler_timeout=1.0) as consumer:
        await broker.drained()
        stats = consumer.stats()
    assert swallowed == [b"0"]
    assert (stats.acked, stats.failures) == (5, 0)
    assert broker.violations == []


async def test_a_handler_that_swallows_the_stop_has_handled_its_message():
    broker = FakeBroker()

    async def handle(message):
        try:
            await asyncio.sleep(100.0)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)

    broker.publish(*bodies(3))
    async with broker.consumer(handle, workers=1) as consumer:
        await asyncio.sleep(1)
        report = await consumer.shutdown(0)
    assert (report.acked, report.released, report.abandoned) == (1, 2, 0)
    assert broker.unsettled == 2
    assert broker.violations == []


async def test_a_reset_while_dead_letters_are_down_loses_nothing_and_buries_once():
    broker, handler = FakeBroker(), Recorder(fail=lambda message: bq.PermanentError("no"))
    broker.dead_letters_down = True
    broker.publish(*bodies(6))
    async with broker.consumer(handler, workers=2, prefetch=4) as consumer:
        await asyncio.sleep(3)
        assert consumer.stats().paused_for == ("dead_letters",)
        broker.down()
        await asyncio.sleep(3)
        broker.up()
        await asyncio.sleep(5)
        broker.dead_letters_down = False
        await broker.drained()
        stats = consumer.stats()
    assert sorted(letter.body for letter in broker.dead_letters) == bodies(6)
    assert stats.forward_errors > 0
    assert stats.paused_for == ()
    assert adds_up(stats)
    assert broker.violations == []


async def test_a_stop_while_the_broker_and_the_dead_letters_are_down_ends():
    broker, handler = FakeBroker(), Recorder(fail=lambda message: bq.PermanentError("no"))
    broker.dead_letters_down = True
    broker.publish(*bodies(6))
    consumer = broker.consumer(handler, workers=2, prefetch=4, drain_timeout=5.0)
    async with consumer:
        await asyncio.sleep(3)
        stopping = asyncio.create_task(consumer.shutdown())
        await asyncio.sleep(1)
        broker.down()
        report = await stopping
    assert report.elapsed <= 10.0
    assert report.dead_lettered == 0
    assert broker.unsettled == 6
    assert adds_up(consumer.stats())
    assert consumer.stats().in_flight == 0


@pytest.mark.parametrize("after", [0.0, 0.05, 0.5, 1.5])
async def test_whoever_waits_for_a_stop_may_be_cancelled_and_the_stop_goes_on(after):
    broker, handler = FakeBroker(), Recorder(delay=1.0)
    broker.publish(*bodies(8))
    consumer = broker.consumer(handler, workers=4, prefetch=8)
    await consumer.__aenter__()
    await asyncio.sleep(0.5)
    waiting = asyncio.create_task(consumer.shutdown())
    await asyncio.sleep(after)
    waiting.cancel()
    await asyncio.wait((waiting,))
    report = await consumer.shutdown()
    assert (report.acked, report.released) == (8, 0)
    assert broker.unsettled == 0


async def test_an_entry_that_is_cancelled_leaves_nothing_behind():
    broker = FakeBroker("kafka", partitions=2)
    for turns in range(6):
        consumer = broker.consumer(Recorder())
        entering = asyncio.create_task(consumer.__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait((entering,))
        report = await consumer.shutdown()
        assert report.acked == 0
        assert broker._sessions == []
    await asyncio.sleep(1)
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("intake-")] == []
