"""The faults of other consumers of Kafka, IN-37 to IN-53, against a real broker."""

from __future__ import annotations

import asyncio

import aiokafka
import pytest
from intake_handlers import repeated
from intake_kafka import make_topic, members, until
from kafka_tools import read

import batchqueue_async as bq
from batchqueue_async.intake import KEY
from batchqueue_async.testing import FaultProxy

pytestmark = pytest.mark.real_time


# --- commits


async def test_in_37_what_was_fetched_is_not_committed_while_it_is_handled(kafka):
    topic = await make_topic(kafka)
    await topic.send(20, keys=20)
    stuck = asyncio.Event()

    async def handle(message):
        if message.offset == 0:
            await stuck.wait()
        topic.note(message)

    async with topic.consumer(handle, ordered_by=KEY, workers=20) as consumer:
        await until(lambda: len(topic.handled) == 19)
        await asyncio.sleep(0.3)  # some commits
        assert await topic.committed() in ([None], [0])
        await consumer.shutdown(0)
    topic.handled.clear()
    async with topic.consumer():
        await until(lambda: topic.complete)
    assert await topic.committed() == [20]


async def test_in_38_what_was_received_and_not_begun_is_the_next_owners(kafka):
    topic = await make_topic(kafka, 2)
    await topic.send(200)

    async def handle(message):
        await asyncio.sleep(0.005)
        topic.note(message)

    async with topic.consumer(handle, workers=2, prefetch=200):
        await until(lambda: len(topic.handled) > 20)
        async with topic.consumer(handle, workers=2, prefetch=200, name="second"):
            await until(lambda: topic.complete)
    assert topic.twice == 0
    assert await topic.committed() == [100, 100]


async def test_in_39_markers_and_aborted_batches_leave_no_lag(kafka):
    topic = await make_topic(kafka)
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=kafka.address, transactional_id=topic.name)
    await producer.start()
    for number in range(6):
        await producer.begin_transaction()
        for _ in range(3):
            await producer.send(topic.name, b"m%d" % number)
        await (producer.abort_transaction() if number % 2 else producer.commit_transaction())
    await producer.stop()
    ends = await topic.ends()
    async with topic.consumer() as consumer:
        await until(lambda: len(topic.handled) == 3)
        await until(lambda: consumer.stats().lag == 0)
    assert sorted(topic.handled) == [0, 2, 4]
    assert set(topic.handled.values()) == {3}
    assert await topic.committed() == ends == [24]


async def test_in_39_only_aborted_batches_are_passed_too(kafka):
    topic = await make_topic(kafka)
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=kafka.address, transactional_id=topic.name)
    await producer.start()
    await producer.begin_transaction()
    await producer.send(topic.name, b"m0")
    await producer.abort_transaction()
    await producer.stop()
    async with topic.consumer() as consumer:
        await until(lambda: consumer.stats().lag == 0)
    assert await topic.committed() == await topic.ends() == [2]
    assert not topic.handled


async def test_in_39_a_compacted_topic_is_read_to_its_end(kafka):
    configs = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    topic = await make_topic(kafka, **configs)
    for _ in range(4):
        await topic.send(30, key_of=lambda number: b"%d" % number if number % 7 == 0 else b"same")
        await asyncio.sleep(0.15)  # the next record begins a new segment
    left = []
    async with asyncio.timeout(30):
        while not left or len(left) > 70:
            left = [record.offset for record in await read(kafka, topic.name)]
    assert left != list(range(left[0], left[0] + len(left)))
    async with topic.consumer() as consumer:
        await until(lambda: consumer.stats().lag == 0)
    # What was compacted away since is not there any more; the last of each key always is.
    offsets = sorted(offset for each in topic.by_key.values() for offset in each)
    assert set(offsets) <= set(left)
    assert offsets[-1] == 119
    assert await topic.committed() == await topic.ends() == [120]


async def test_in_53_the_first_resume_is_not_off_by_one(kafka):
    topic = await make_topic(kafka)
    await topic.send(1)
    async with topic.consumer():
        await until(lambda: topic.complete)
    assert await topic.committed() == [1]
    await topic.send(1)
    async with topic.consumer():
        await until(lambda: topic.complete)
    assert topic.handled == {0: 1, 1: 1}
    assert await topic.committed() == [2]


# --- rebalances


async def test_in_40_a_record_that_outlives_the_revocation_is_not_committed_by_its_old_owner(kafka):
    topic = await make_topic(kafka, 2)
    await topic.send(2)
    release = asyncio.Event()
    begun = []

    async def slow(message):
        begun.append(message.partition)
        await release.wait()

    options = {"revoke_timeout": 0.2, "handler_timeout": None}
    async with topic.consumer(slow, **options) as first:
        await until(lambda: len(begun) == 2)
        async with topic.consumer(slow, name="second", **options):
            # The one that moved begins at its new owner; that which stayed waits for the call that still runs.
            await until(lambda: len(begun) == 3)
            assert set(await topic.committed()) <= {None, 0}
            release.set()
            await until(lambda: len(begun) == 4)
            await until(lambda: first.stats().in_flight == 0)
    assert await topic.committed() == [1, 1]
    assert sorted(begun) == [0, 0, 1, 1]


@repeated
@pytest.mark.timeout(300)
async def test_in_41_nothing_is_repeated_when_members_join_and_leave_gracefully(kafka):
    topic = await make_topic(kafka, 6)

    async def handle(message):
        await asyncio.sleep(0.02 + (message.offset % 7) * 0.03)
        topic.note(message)

    options = {"ordered_by": KEY, "workers": 50}
    async with members(topic, 2, handle, **options) as running:
        sending = asyncio.create_task(_send_slowly(topic, 1_500))
        for number in range(3):
            await asyncio.sleep(0.4)
            fresh = topic.consumer(handle, name=f"fresh-{number}", **options)
            await fresh.__aenter__()
            running.append(fresh)
            await asyncio.sleep(0.4)
            left = running.pop(0)
            await left.shutdown()
            assert left.stats().rebalances >= 1
            assert left.stats().reconnects == 0
        await sending
        await until(lambda: topic.complete, 60)
        assert sum(each.stats().commits for each in running) >= 1
    assert topic.twice == 0
    assert await topic.committed() == await topic.ends()
    assert all(offsets == sorted(offsets) for offsets in topic.by_key.values())


async def _send_slowly(topic, count):
    for _ in range(count // 100):
        await topic.send(100, keys=25)
        await asyncio.sleep(0.05)


async def test_in_42_nothing_that_is_called_in_a_revocation_waits_for_it(kafka):
    topic = await make_topic(kafka, 2)
    await topic.send(40)
    release = asyncio.Event()

    async def slow(message):
        await release.wait()
        topic.note(message)

    async with topic.consumer(slow, handler_timeout=None) as first:
        await until(lambda: first.stats().in_flight)
        second = topic.consumer(name="second")
        joining = asyncio.create_task(second.__aenter__())
        await until(lambda: not first.stats().buffered)  # what was not begun is forgotten: the revocation is under way
        first.pause()
        first.resume()
        stopping = asyncio.create_task(first.shutdown(5))
        await asyncio.sleep(0.2)
        release.set()
        report = await asyncio.wait_for(stopping, 60)
        await joining
        await until(lambda: topic.complete)
        await second.shutdown()
    assert report.abandoned == 0
    assert topic.twice == 0


async def test_in_43_two_rebalances_within_one_drain_leave_every_partition_read(kafka):
    topic = await make_topic(kafka, 6)

    async def handle(message):
        await asyncio.sleep(0.6)
        topic.note(message)

    async with members(topic, 1, handle) as running:
        await topic.send(12)
        await until(lambda: running[0].stats().in_flight)
        for name in ("second", "third"):
            running.append(topic.consumer(handle, name=name))
        await asyncio.gather(*(each.__aenter__() for each in running[1:]))
        await topic.send(12)
        await until(lambda: topic.complete)
    assert topic.twice == 0
    assert await topic.committed() == await topic.ends()


async def test_in_44_partitions_that_stay_are_not_repeated_when_others_move(kafka):
    topic = await make_topic(kafka, 4)

    async def handle(message):
        await asyncio.sleep(0.01)
        topic.note(message)

    async with topic.consumer(handle):
        await topic.send(400)
        await until(lambda: len(topic.handled) > 50)
        async with topic.consumer(handle, name="second"):
            await until(lambda: topic.complete)
            assert topic.twice == 0
    assert await topic.committed() == [100] * 4


async def test_in_44_a_partition_whose_commit_is_refused_does_not_hold_up_the_others(kafka):
    topic = await make_topic(kafka, 3)
    async with topic.consumer() as consumer:
        client = consumer._session.consumer
        commit = client.commit

        async def refuse(offsets):
            if any(place.partition == 1 for place in offsets):
                raise aiokafka.errors.TopicAuthorizationFailedError(topic.name)
            await commit(offsets)

        client.commit = refuse
        await topic.send(30)
        await until(lambda: topic.complete)
        await until(lambda: consumer.stats().settle_errors > 2)
        assert await topic.committed() in ([10, 0, 10], [10, None, 10])
        client.commit = commit
    assert await topic.committed() == [10, 10, 10]


async def test_in_45_a_slow_handler_keeps_its_membership(kafka):
    topic = await make_topic(kafka, 2)
    await topic.send(2)

    async def slow(message):
        await asyncio.sleep(7)  # longer than the session, far longer than the heartbeat
        topic.note(message)

    patient = {"session_timeout": 3.0, "rebalance_timeout": 30.0}  # half of it for the handlers that are revoked
    async with (
        topic.consumer(slow, **patient) as consumer,
        topic.consumer(slow, **patient, name="b"),
    ):
        await until(lambda: topic.complete)
        assert consumer.stats().reconnects == 0
    assert topic.twice == 0


async def test_in_46_a_client_that_stands_still_is_made_anew(kafka, logs):
    topic = await make_topic(kafka, 2)
    async with topic.consumer(stall_timeout=3.0) as consumer:
        await topic.send(10)
        await until(lambda: topic.complete)
        # What a client does that has lost its way: it is a member, has its partitions, and fetches nothing.
        fetcher = consumer._session.consumer._fetcher
        for task in (fetcher._fetch_task, *fetcher._pending_tasks):
            task.cancel()
        await topic.send(10)
        await until(lambda: topic.complete)
        assert consumer.stats().reconnects == 1
    assert topic.twice == 0
    reasons = [event["reason"] for event in logs if event["event"] == "consumer_stuck"]
    assert reasons == ["there are messages, and none came for 3 s"]


async def test_in_46_a_client_without_its_coordinator_is_made_anew(kafka):
    topic = await make_topic(kafka)
    async with topic.consumer(stall_timeout=3.0) as consumer:
        await topic.send(5)
        await until(lambda: topic.complete)
        coordinator = consumer._session.consumer._coordinator
        coordinator._coordination_task.cancel()
        coordinator._subscription.abort_waiters(aiokafka.errors.KafkaError("gone"))
        await until(lambda: consumer.stats().reconnects == 1)
        await topic.send(5)
        await until(lambda: topic.complete)
    assert topic.twice == 0


async def test_in_48_records_of_before_a_revocation_are_not_begun_after_it(kafka):
    topic = await make_topic(kafka, 2)
    await topic.send(100)
    begun = []

    async def handle(message):
        begun.append((message.partition, message.offset))
        await asyncio.sleep(0.02)
        topic.note(message)

    async with topic.consumer(handle, workers=2, prefetch=100) as first:
        await until(lambda: len(topic.handled) > 4)
        revoked = first._session._revoked
        closed = []

        async def observed(places):
            await revoked(places)
            closed.append(len(begun))
            await asyncio.sleep(0.2)  # the client joins when this returns
            assert len(begun) == closed[-1]  # nothing of it begins any more

        first._session.consumer._subscription.listener.__class__.on_partitions_revoked = lambda _, places: observed(
            places
        )
        async with topic.consumer(handle, workers=2, prefetch=100, name="second"):
            await until(lambda: topic.complete)
    assert closed
    assert topic.twice == 0


# --- failures


async def test_in_47_a_partition_goes_on_after_a_failure_and_a_dead_letter(kafka):
    topic = await make_topic(kafka)
    letters = await make_topic(kafka)
    await topic.send(10, key=b"k")

    async def handle(message):
        if message.offset == 3:
            raise bq.PermanentError("no")
        topic.note(message)

    async with topic.consumer(handle, dead_letters=letters.name) as consumer:
        await until(lambda: len(topic.handled) == 9)
        await until(lambda: consumer.stats().dead_lettered == 1)
    assert await topic.committed() == [10]
    (letter,) = await read(kafka, letters.name)
    headers = {name: value.decode() for name, value in letter.headers}
    assert (letter.key, letter.value) == (b"k", b"m3")
    assert (headers["bq-reason"], headers["bq-source"], headers["bq-partition"], headers["bq-offset"]) == (
        "permanent",
        topic.name,
        "0",
        "3",
    )


async def test_in_51_a_poison_record_is_tried_with_delays_and_then_given_up(kafka):
    topic = await make_topic(kafka)
    letters = await make_topic(kafka)
    await topic.send(3)
    tries = []

    async def handle(message):
        if message.offset == 1:
            tries.append(message.attempt)
            raise ValueError(message.body)
        topic.note(message)

    retry = bq.RetryPolicy(initial=0.2, multiplier=1.0, jitter=False, max_attempts=3)
    async with topic.consumer(handle, retry=retry, dead_letters=letters.name):
        await until(lambda: len(topic.handled) == 2)
    assert tries == [1, 2, 3]
    assert topic.by_key == {(0, None): [0, 2]}
    (letter,) = await read(kafka, letters.name)
    assert dict(letter.headers)["bq-attempts"] == b"3"
    assert dict(letter.headers)["bq-error"] == b"ValueError"
    assert "bq-text" not in dict(letter.headers)


async def test_in_52_a_batch_of_several_partitions_that_fails_comes_again_whole(kafka):
    topic = await make_topic(kafka, 3)
    await topic.send(30)
    batches = []

    async def handle(batch):
        places = {message.partition for message in batch}
        batches.append((len(batch), places))
        if len(batches) == 1:
            assert not any(await topic.committed())
            raise OSError("the first batch fails")
        for message in batch:
            topic.note(message)

    batch = bq.BatchPolicy(max_records=30, linger=0.5)
    async with topic.consumer(handle, batch=batch, ordered_by=KEY, workers=1):
        await until(lambda: topic.complete)
    assert topic.twice == 0
    assert await topic.committed() == [10, 10, 10]


# --- room


async def test_in_49_back_pressure_does_not_fetch_again_what_was_fetched(kafka):
    topic = await make_topic(kafka)
    await topic.send(200, size=10_000)

    async def handle(message):
        await asyncio.sleep(0.002)
        topic.note(message)

    async with _proxy(kafka) as proxy:
        async with topic.consumer(handle, prefetch=16, workers=4, bootstrap=proxy.address):
            await until(lambda: topic.complete)
        fetched = proxy.counts().from_target
    assert topic.twice == 0
    assert fetched < 200 * 10_000 * 1.5


async def test_in_50_nothing_is_buffered_while_handlers_are_stuck(kafka):
    topic = await make_topic(kafka, 3)
    await topic.send(600, size=20_000)
    release = asyncio.Event()

    async def stuck(message):
        await release.wait()
        topic.note(message)

    async with _proxy(kafka) as proxy:
        options = {"prefetch": 60, "workers": 6, "max_partition_bytes": 200_000, "handler_timeout": None}
        async with topic.consumer(stuck, bootstrap=proxy.address, **options) as consumer:
            await until(lambda: consumer.stats().received)
            await asyncio.sleep(1.5)
            assert consumer.stats().received <= 60
            # What the pool holds, and what the client keeps of each partition, and no more of these 12 MB.
            assert proxy.counts().from_target < 60 * 20_000 + 2 * 3 * 220_000
            release.set()
            await until(lambda: topic.complete)
    assert topic.twice == 0


def _proxy(kafka):
    proxy = FaultProxy(kafka.proxied_address)
    proxy.port = kafka.proxy_port  # where the broker says that it is
    return proxy
