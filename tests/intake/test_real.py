"""Every lane against its real broker: nothing is lost, and what comes twice was unsettled when the line broke.

`make chaos-intake` runs each scenario many times.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from intake_handlers import repeated
from intake_rigs import RIGS

import batchqueue_async as bq
from batchqueue_async.testing import FaultProxy

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(400)]
COUNT = 400


async def prepared(request):
    server, make = RIGS[request.param]
    made = make(request.getfixturevalue(server))
    await made.prepare()
    return made


@pytest.fixture(params=RIGS)
async def rig(request):
    return await prepared(request)


# Kafka's client connects again by itself, and its broker says where a proxy has to be: its outages are in
# test_kafka_outages.py.
@pytest.fixture(params=[name for name in RIGS if name != "kafka"])
async def line(request):
    return await prepared(request)


def bodies(count):
    return [b"%d" % number for number in range(count)]


class Handled:
    """What was handled, and waiting for it."""

    def __init__(self, delay=0.005):
        self.delay = delay
        self.bodies = []
        self.begun = Counter()

    async def __call__(self, message):
        self.begun[message.body] += 1
        await asyncio.sleep(self.delay)
        self.bodies.append(message.body)

    @property
    def distinct(self):
        return len(set(self.bodies))

    async def reach(self, count, timeout=60.0):
        async with asyncio.timeout(timeout):
            while self.distinct < count:
                await asyncio.sleep(0.02)


def adds_up(stats):
    parts = stats.acked + stats.retried + stats.dead_lettered + stats.released + stats.stale
    return stats.received == parts + stats.buffered + stats.waiting + stats.in_flight


async def settled(rig, timeout=150.0):  # the broker's own command takes half a minute on a busy machine
    async with asyncio.timeout(timeout):
        while await rig.unsettled():
            await asyncio.sleep(0.1)


async def test_each_message_is_handled_and_acked_once(rig):
    handled = Handled()
    await rig.publish(bodies(COUNT))
    async with rig.consumer(handled, workers=16, prefetch=100) as consumer:
        await handled.reach(COUNT)
        assert adds_up(consumer.stats())
        assert consumer.healthy()
    assert sorted(handled.bodies) == sorted(bodies(COUNT))
    assert consumer.report.acked == COUNT
    assert await rig.unsettled() == 0


async def test_batches_and_their_rejected(rig):
    seen = Counter()

    async def save(batch):
        bad = {place: bq.PermanentError("no") for place, each in enumerate(batch) if each.body == b"7"}
        seen.update(each.body for each in batch)
        return bq.SendResult(rejected=bad)

    await rig.publish(bodies(100))
    policy = bq.BatchPolicy(max_records=30, linger=0.05)
    async with rig.consumer(save, batch=policy, workers=2) as consumer:
        async with asyncio.timeout(30):
            while consumer.stats().acked + consumer.stats().dead_lettered < 100:
                await asyncio.sleep(0.02)
    assert seen == Counter(bodies(100))
    ((body, headers),) = await rig.letters()
    assert (body, headers["bq-reason"]) == (b"7", "permanent")


async def test_a_failure_comes_again_and_ends_in_the_dead_letters(rig):
    attempts = []

    async def fail(message):
        attempts.append(message.attempt)
        raise ValueError("never")

    await rig.publish([b"bad"])
    retry = bq.RetryPolicy(initial=0.1, max_delay=0.2, max_attempts=3)
    async with rig.consumer(fail, workers=2, retry=retry) as consumer:
        async with asyncio.timeout(30):
            while not consumer.stats().dead_lettered:
                await asyncio.sleep(0.02)
    assert attempts == [1, 2, 3]
    ((body, headers),) = await rig.letters()
    assert body == b"bad"
    assert headers["bq-reason"] == "attempts"
    assert headers["bq-error"] == "ValueError"
    assert headers["bq-attempts"] == "3"
    assert await rig.unsettled() == 0


@repeated
async def test_a_stop_under_load_repeats_nothing(rig):
    handled = Handled()
    await rig.publish(bodies(COUNT))
    stops = 0
    while handled.distinct < COUNT:
        async with rig.consumer(handled, workers=8, prefetch=40):
            await handled.reach(min(COUNT, handled.distinct + 100))
        stops += 1
    assert stops >= 2
    assert sorted(handled.bodies) == sorted(bodies(COUNT))
    assert await rig.unsettled() == 0


@repeated
@pytest.mark.parametrize("fault", ["reset", "half_open", "mute", "restart"])
async def test_what_breaks_the_line_loses_nothing(line, fault):
    handled = Handled()
    await line.publish(bodies(COUNT))
    async with FaultProxy(line.server.address) as proxy:
        address = proxy.address
        async with line.consumer(handled, address=address, workers=8, prefetch=40) as consumer:
            await handled.reach(COUNT // 4)
            if fault == "restart":
                await asyncio.to_thread(line.server.kill)
                await asyncio.to_thread(line.server.start)
            elif fault == "reset":
                await proxy.cut()
            else:
                await proxy.switch(fault)
                await asyncio.sleep(3.0)
                await proxy.switch("pass")
            await handled.reach(COUNT, 150)  # a broker that was restarted takes its time
            await settled(line)
            stats = consumer.stats()
            assert adds_up(stats)
            assert stats.reconnects >= 1
    repeated = len(handled.bodies) - COUNT
    assert repeated >= 0
    # A broker that is killed has not written the newest acks.
    if fault != "restart" or line.name == "redis":
        # What was with a handler, or handled and not yet acknowledged, when the line broke; nothing that was acked.
        assert repeated <= 40 * (1 + stats.reconnects)
    assert await line.unsettled() == 0


@repeated
async def test_a_killed_consumer_loses_nothing(line, tmp_path):
    await line.publish(bodies(COUNT))
    path = tmp_path / "handled"
    consumer = line.consumer(Handled())
    if line.name == "nats":
        options = {"url": consumer.servers.urls[0], "source": consumer.subject, "stream": line.stream}
        options |= {"durable": line.durable, "ack_wait": 3.0, "dead_letters": f"{line.dead}.x"}
    elif line.name == "rabbitmq":
        options = {
            "url": f"amqp://{line.server.address}/",
            "source": line.queue,
            "dead_letters": f"{line.queue}.dead",
        }
    else:
        options = {"url": consumer.server.url, "source": line.stream, "group": line.group, "claim_after": 2.0}
        options |= {"dead_letters": "dead"}
    program = [sys.executable, str(Path(__file__).parents[1] / "support" / "killed_consumer.py"), line.name]
    process = subprocess.Popen([*program, json.dumps(options), str(path)])
    try:
        async with asyncio.timeout(150):
            while not path.exists() or path.read_bytes().count(b"\n") < COUNT // 4:
                await asyncio.sleep(0.02)
                assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    first = path.read_bytes().split()
    handled = Handled(delay=0.001)
    async with line.consumer(handled, workers=8, prefetch=100):
        async with asyncio.timeout(150):
            while len({*first, *handled.bodies}) < COUNT:
                await asyncio.sleep(0.05)
        await settled(line)
    assert {*first, *handled.bodies} == set(bodies(COUNT))
    # At most what it held: 100.
    assert len(first) + len(handled.bodies) - COUNT <= 100
