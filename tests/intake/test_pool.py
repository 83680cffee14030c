"""The pool of a consumer, by what its users and its broker see; against a broker in memory, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from intake_handlers import Recorder, adds_up, bodies

import batchqueue_async as bq
from batchqueue_async import intake
from batchqueue_async.testing import FakeBroker, settle

KINDS = ("amqp", "kafka", "nats", "redis")


@pytest.mark.parametrize("kind", KINDS)
async def test_every_message_is_handled_and_acked_once(kind):
    broker, handler = FakeBroker(kind, partitions=3), Recorder(delay=0.1)
    broker.publish(*bodies(100))
    async with broker.consumer(handler, workers=8) as consumer:
        await broker.drained()
        assert adds_up(consumer.stats())
    assert sorted(handler.done) == sorted(bodies(100))
    assert len(broker.events("acked")) == 100
    assert broker.violations == []
    assert consumer.report.acked == 100
    assert handler.most == (8 if kind != "kafka" else 3)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_batch_handler_gets_batches(kind):
    broker = FakeBroker(kind, partitions=3)
    broker.publish(*bodies(100))
    sizes = []

    async def save(batch):
        sizes.append(len(batch))

    policy = bq.BatchPolicy(max_records=30, linger=0.5)
    async with broker.consumer(save, batch=policy, workers=2) as consumer:
        await broker.drained()
        assert adds_up(consumer.stats())
    assert sum(sizes) == 100
    assert max(sizes) == 30
    assert broker.violations == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_failure_is_tried_again_and_then_a_dead_letter(kind):
    broker = FakeBroker(kind)
    handler = Recorder(fail=lambda message: ValueError("no") if message.body == b"3" else None)
    broker.publish(*bodies(10))
    retry = bq.RetryPolicy(initial=1.0, max_attempts=3)
    async with broker.consumer(handler, workers=4, retry=retry) as consumer:
        await broker.drained()
        stats = consumer.stats()
    assert handler.seen.count(b"3") == 3
    assert [letter.body for letter in broker.dead_letters] == [b"3"]
    assert broker.dead_letters[0].headers["bq-reason"] == "attempts"
    assert broker.dead_letters[0].headers["bq-attempts"] == "3"
    assert stats.dead_lettered == 1
    assert adds_up(stats)
    assert broker.violations == []


async def test_stop_settles_what_was_taken():
    broker, handler = FakeBroker(), Recorder(delay=1.0)
    broker.publish(*bodies(100))
    consumer = broker.consumer(handler, workers=4, prefetch=20)
    async with consumer:
        await asyncio.sleep(1.5)
    assert consumer.report.acked == 24
    assert consumer.report.released == 0
    assert broker.unsettled == 76
    assert broker.violations == []


async def test_reset_redelivers_what_was_not_acked_and_nothing_else():
    broker, handler = FakeBroker(), Recorder(delay=1.0)
    broker.publish(*bodies(20))
    async with broker.consumer(handler, workers=2, prefetch=10) as consumer:
        await asyncio.sleep(1.5)
        broker.reset()
        await broker.drained()
        assert consumer.stats().reconnects == 1
        assert adds_up(consumer.stats())
    assert broker.violations == []
    assert set(handler.done) == set(bodies(20))
    assert len(handler.done) <= 22


async def test_keys_keep_their_order_through_failures():
    broker = FakeBroker()
    failed = set()

    def once(message):
        if message.body in failed or message.body[-1:] != b"3":
            return None
        failed.add(message.body)
        return ValueError("once")

    handler = Recorder(delay=0.01, fail=once)
    for number in range(50):
        broker.publish(b"%d-%d" % (number % 5, number), key=str(number % 5))
    async with broker.consumer(handler, workers=8, ordered_by=intake.KEY):
        await broker.drained()
    for key in range(5):
        of_key = [body for body in handler.done if body.startswith(b"%d-" % key)]
        assert of_key == sorted(of_key, key=lambda body: int(body.split(b"-")[1]))
    await settle()


async def test_a_handler_s_own_logs_say_which_worker_it_is():
    broker, said = FakeBroker(), {}

    async def handle(message):
        await asyncio.sleep(0.1)
        said[message.body] = structlog.contextvars.get_contextvars()

    broker.publish(*bodies(3))
    async with broker.consumer(handle, workers=3, name="orders"):
        await broker.drained()
    assert {each["consumer"] for each in said.values()} == {"orders"}
    assert {each["worker"] for each in said.values()} == {1, 2, 3}
    assert structlog.contextvars.get_contextvars() == {}
