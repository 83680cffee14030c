"""Random programs against a broker in memory with the semantics of four, under shuffled tasks: the promises hold.

A program publishes, breaks the line, rebalances, pauses, stops and starts consumers; handlers are slow, and fail.
At every step the counts add up and the bounds hold; in the end no message is lost, none is handled again that was
settled, no settlement was one that a broker would have refused, and what has a key was handled in its order.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict

import pytest

import batchqueue_async as bq
from batchqueue_async import intake
from batchqueue_async.testing import FakeBroker, run_virtual

KINDS = ("amqp", "kafka", "nats", "redis")
SEEDS = int(os.environ.get("BATCHQUEUE_INTAKE_SEEDS", "12"))


class Program:
    def __init__(self, kind, seed):
        self.random = random.Random(seed)
        self.broker = FakeBroker(kind, partitions=self.random.randint(1, 4))
        self.ordered = self.random.choice([None, intake.KEY])
        self.batch = self.random.choice([None, bq.BatchPolicy(max_records=self.random.randint(1, 9), linger=0.05)])
        self.prefetch = self.random.randint(5, 40)
        self.workers = self.random.randint(1, 8)
        self.failing = self.random.choice([0.0, 0.1, 0.4])
        self.published = 0
        self.handled = []
        self.consumers = []
        self.running = defaultdict(int)

    def make(self):
        retry = bq.RetryPolicy(initial=0.2, max_delay=1.0, max_attempts=self.random.choice([2, 4]))
        handler = self.single if self.batch is None else self.many
        timeout = self.random.choice([None, 1.5])
        return self.broker.consumer(
            handler,
            random=random.Random(self.random.random()),
            workers=self.workers,
            prefetch=self.prefetch,
            ordered_by=self.ordered,
            batch=self.batch,
            retry=retry,
            handler_timeout=timeout,
            drain_timeout=self.random.choice([0.0, 0.5, 30.0]),
            reconnect=bq.RetryPolicy(initial=0.1, max_delay=0.5),
        )

    async def single(self, message):
        await self.work(message)

    async def many(self, batch):
        for message in batch:
            await self.work(message)

    async def work(self, message):
        settled = {*self.broker.events("acked"), *self.broker.events("dead_lettered")}
        if self.broker.kind != "kafka":  # there a commit point below may bring again what was done
            assert message.id not in settled, f"{message.id} is handled again after it was settled"
        await asyncio.sleep(self.random.choice([0.0, 0.01, 0.3, 2.0]))
        if self.random.random() < self.failing:
            raise self.random.choice([ValueError("no"), bq.PermanentError("never"), bq.RetryableError("later")])
        self.handled.append((message.key, int(message.body)))

    def check(self):
        for consumer in self.consumers:
            stats = consumer.stats()
            parts = stats.acked + stats.retried + stats.dead_lettered + stats.released + stats.stale
            assert stats.received == parts + stats.buffered + stats.waiting + stats.in_flight
            assert min(stats.buffered, stats.waiting, stats.in_flight) >= 0
            bound = max(self.prefetch, 0 if self.batch is None else self.batch.max_records)
            if self.broker.kind in {"kafka", "redis"}:  # what waits for another attempt has room of its own
                bound += 10 * self.prefetch
            assert stats.buffered + stats.waiting + stats.in_flight <= bound
        assert self.broker.violations == []

    async def step(self):
        pick = self.random.random()
        if pick < 0.35:
            for _ in range(self.random.randint(1, 30)):
                key = self.random.choice(["a", "b", "c", None])
                self.broker.publish(b"%d" % self.published, key=key)
                self.published += 1
        elif pick < 0.45:
            self.broker.reset()
        elif pick < 0.55 and self.broker.kind == "kafka":
            await self.broker.rebalance(timeout=self.random.choice([0.1, 5.0]))
        elif pick < 0.65 and len(self.consumers) < 3:
            consumer = self.make()
            await consumer.__aenter__()
            self.consumers.append(consumer)
        elif pick < 0.72 and self.consumers:
            consumer = self.consumers.pop(self.random.randrange(len(self.consumers)))
            report = await consumer.shutdown(self.random.choice([None, 0, 0.3]))
            stats = consumer.stats()
            assert (
                stats.received == report.acked + report.retried + report.dead_lettered + report.released + report.stale
            )
        elif pick < 0.78 and self.consumers:
            consumer = self.random.choice(self.consumers)
            consumer.pause()
            await asyncio.sleep(self.random.choice([0.0, 1.0]))
            consumer.resume()
        elif pick < 0.82:
            self.broker.dead_letters_down = not self.broker.dead_letters_down
        else:
            await asyncio.sleep(self.random.choice([0.0, 0.05, 0.5, 3.0]))

    async def run(self):
        for _ in range(60):
            await self.step()
            self.check()
        self.broker.dead_letters_down = False
        self.failing = 0.0
        if not self.consumers:
            self.consumers.append(self.make())
            await self.consumers[0].__aenter__()
        async with asyncio.timeout(3000):
            await self.broker.drained()
        self.check()
        for consumer in self.consumers:
            await consumer.shutdown()
        self.check()
        done = {number for _, number in self.handled} | {int(letter.body) for letter in self.broker.dead_letters}
        assert done == set(range(self.published))


@pytest.mark.repeated
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_programs_keep_the_promises(kind, seed):
    run_virtual(lambda: Program(kind, seed).run(), seed=seed, timeout=24 * 3600.0)


@pytest.mark.repeated
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_keys_keep_their_order_while_one_consumer_lives(kind, seed):
    """Without breaks of the line, each key's messages are handled in the order in which they were published."""

    async def main():
        program = Program(kind, seed)
        program.ordered, program.failing = intake.KEY, 0.2
        consumer = program.make()
        async with consumer:
            for number in range(150):
                program.broker.publish(b"%d" % number, key=program.random.choice("abcdef"))
                if number % 10 == 0:
                    await asyncio.sleep(program.random.choice([0.0, 0.2]))
            await program.broker.drained()
        firsts = defaultdict(list)
        for key, number in program.handled:
            if number not in firsts[key]:
                firsts[key].append(number)
        for key, numbers in firsts.items():
            assert numbers == sorted(numbers), key
        assert program.broker.violations == []

    run_virtual(main, seed=seed, timeout=24 * 3600.0)
