"""IN-54 to IN-60 against the real servers."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from intake_rigs import NatsRig, RedisRig

import batchqueue_async as bq
from batchqueue_async.intake.ports import Outcomes, Room, SessionLostError

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(180)]


def bodies(count):
    return [b"%d" % number for number in range(count)]


@pytest.fixture
async def nats(nats_server):
    rig = NatsRig(nats_server)
    await rig.prepare()
    return rig


@pytest.fixture
async def redis(redis_server):
    return RedisRig(redis_server)


async def until(condition, timeout=30.0):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)


async def test_in_54_a_pull_that_was_lost_with_the_server_is_made_anew(nats):
    seen = []

    async def save(message):
        seen.append(message.body)

    async with nats.consumer(save) as consumer:
        await asyncio.sleep(0.3)  # a pull is outstanding, and nothing has come
        await asyncio.to_thread(nats.server.kill)
        await asyncio.to_thread(nats.server.start)
        await until(lambda: consumer.stats().reconnects >= 1 and consumer.stats().state == "running")
        await nats.publish(bodies(10))
        await until(lambda: len(seen) == 10)


async def test_in_55_what_waits_here_is_not_delivered_again(nats):
    seen = Counter()

    async def slow(message):
        seen[message.body] += 1
        await asyncio.sleep(0.5)

    await nats.publish(bodies(24))
    async with nats.consumer(slow, workers=4, prefetch=100, ack_wait=1.0) as consumer:
        await until(lambda: consumer.stats().acked == 24)
        assert consumer.stats().received == 24
    assert seen == Counter(bodies(24))


async def test_in_56_a_stop_amid_pulls_leaves_nothing_with_nobody(nats):
    seen = []

    async def save(message):
        seen.append(message.body)

    for start in range(5):
        consumer = nats.consumer(save, workers=4, prefetch=20)
        async with consumer:
            publishing = asyncio.create_task(nats.publish(b"%d-%d" % (start, number) for number in range(50)))
            await asyncio.sleep(random.uniform(0.0, 0.05))
        await publishing
        assert consumer.report.released == 0
        assert await nats.unacked() == 0
    async with nats.consumer(save):
        await until(lambda: len(seen) >= 250)
    assert len(seen) == len(set(seen)) == 250


async def test_in_57_attempts_end_in_the_dead_letters_and_not_in_silence(nats, logs):
    from nats.js.api import AckPolicy, ConsumerConfig

    client = await nats._client()
    config = ConsumerConfig(
        durable_name=nats.durable, filter_subject=f"{nats.stream}.>", ack_policy=AckPolicy.EXPLICIT, max_deliver=3
    )
    await client.jetstream().add_consumer(nats.stream, config)
    await client.close()

    async def fail(message):
        raise ValueError

    await nats.publish([b"bad"])
    retry = bq.RetryPolicy(initial=0.1, max_delay=0.2, max_attempts=3)
    async with nats.consumer(fail, retry=retry) as consumer:
        await until(lambda: consumer.stats().dead_lettered == 1)
    ((body, headers),) = await nats.letters()
    assert (body, headers["bq-attempts"]) == (b"bad", "3")
    (warned,) = [each for each in logs if each["event"] == "nats_max_deliver"]
    assert (warned["max_deliver"], warned["max_attempts"]) == (3, 3)


@pytest.mark.parametrize(
    "headers", [{"Nats-Expected-Stream": "{stream}"}, {"Nats-Expected-Last-Sequence": "0"}], ids=["stream", "sequence"]
)
async def test_in_79_a_letter_carries_no_orders_to_the_server_that_its_message_had(nats, headers):
    async def fail(message):
        raise bq.PermanentError("never")

    client = await nats._client()
    orders = {name: value.format(stream=nats.stream) for name, value in headers.items()}
    await client.jetstream().publish(f"{nats.dead}.first", b"the target holds others")
    await client.jetstream().publish(f"{nats.stream}.a", b"bad", headers={**orders, "tenant": "t"})
    await client.close()
    async with nats.consumer(fail) as consumer:
        await until(lambda: consumer.stats().dead_lettered == 1)
        assert consumer.stats().forward_errors == 0
    _, (body, found) = await nats.letters()
    assert (body, found["tenant"]) == (b"bad", "t")


async def test_in_58_a_read_that_ends_early_loses_nothing(redis):
    seen = []

    async def save(message):
        seen.append(message.body)

    await redis.publish([b"first"])
    for start in range(10):
        consumer = redis.consumer(save, workers=4, prefetch=20)
        async with consumer:
            publishing = asyncio.create_task(redis.publish([b"%d-%d" % (start, number) for number in range(50)]))
            await asyncio.sleep(random.uniform(0.0, 0.03))
        await publishing
        assert consumer.report.released == 0
        assert await redis.unacked() == 0
    async with redis.consumer(save):
        await until(lambda: len(seen) >= 501)
    assert len(seen) == len(set(seen)) == 501


async def test_in_59_entries_that_a_killed_consumer_held_are_read_again_by_its_name(redis, tmp_path):
    await redis.publish(bodies(200))
    path = tmp_path / "handled"
    options = {"url": f"redis://{redis.server.address}", "source": redis.stream, "group": redis.group}
    options |= {"consumer": "one", "dead_letters": "dead", "claim_after": 3600.0}
    program = Path(__file__).parents[1] / "support" / "killed_consumer.py"
    process = subprocess.Popen([sys.executable, str(program), "redis", json.dumps(options), str(path)])
    try:
        await until(lambda: path.exists() and path.read_bytes().count(b"\n") >= 50)
    finally:
        process.kill()
        process.wait()
    assert await redis.unacked() > 0
    first, seen = path.read_bytes().split(), []

    async def save(message):
        seen.append((message.body, message.attempt))

    async with redis.consumer(save, consumer="one", claim_after=3600.0):
        await until(lambda: len({*first, *(body for body, _ in seen)}) == 200)
        async with asyncio.timeout(60):
            while await redis.unsettled():
                await asyncio.sleep(0.05)


async def test_in_60_what_was_trimmed_while_it_was_pending_is_counted(redis, logs):
    await redis.publish(bodies(10))
    async with redis._client() as client:
        await client.xgroup_create(redis.stream, redis.group, id="0")
        await client.xreadgroup(redis.group, "one", {redis.stream: ">"}, count=10)
        await client.xtrim(redis.stream, maxlen=4, approximate=False)
    seen = []

    async def save(message):
        seen.append(message.body)

    async with redis.consumer(save, consumer="one") as consumer:
        await until(lambda: len(seen) == 4)
        assert consumer.stats().lost == 6
    assert seen == bodies(10)[6:]
    assert await redis.unacked() == 0
    assert [each["count"] for each in logs if each["event"] == "messages_trimmed"] == [6]


@pytest.mark.parametrize("between", ["reads", "settlements"])
async def test_in_71_a_session_that_ends_between_two_commands_leaves_no_connection(redis, between):
    async def never(message):
        raise AssertionError

    async with redis._client() as other:

        async def connections():
            return {each["id"] for each in await other.client_list()}

        before = await connections()
        await redis.publish(bodies(4))
        consumer = redis.consumer(never, consumer="me")
        lane = consumer._lane(consumer.plan)
        for turn in range(2):
            session = await lane.connect()
            taken = await session.take(Room(4, 1 << 20)) if turn == 0 or between == "settlements" else []
            if turn == 0:
                await (
                    session.end()
                )  # what it has taken is pending, so the next one asks for that, and how often it came
        client, command = (session._reader, "xreadgroup") if between == "reads" else (session._writer, "xack")
        first = getattr(client, command)

        async def ends_meanwhile(*arguments, **options):
            answer = await first(*arguments, **options)
            await session.end()
            return answer

        setattr(client, command, ends_meanwhile)
        step = (
            session.take(Room(4, 1 << 20)) if between == "reads" else session.settle(Outcomes(taken[:2], taken[2:], []))
        )
        with pytest.raises(SessionLostError):
            await step
        async with asyncio.timeout(30):
            while await connections() - before:
                await asyncio.sleep(0.02)


async def test_in_72_a_consumer_that_was_given_no_name_leaves_the_group_when_it_stops(redis):
    async def save(message):
        if message.body == b"2":
            await asyncio.sleep(60)

    async def members():
        async with redis._client() as other:
            return [each["name"].decode() for each in await other.xinfo_consumers(redis.stream, redis.group)]

    for name in (None, "stays"):
        await redis.publish(bodies(2))
        async with redis.consumer(save, consumer=name) as consumer:
            await until(lambda consumer=consumer: consumer.stats().acked == 2, 60)
            assert len(await members()) == 1
    assert await members() == ["stays"]
    await redis.publish([b"2"])
    async with redis.consumer(save, drain_timeout=0.1) as consumer:
        await until(lambda: consumer.stats().in_flight == 1, 60)
    # It has something pending, which leaving would lose.
    assert len(set(await members()) - {"stays"}) == 1
    assert await redis.unacked() == 1
