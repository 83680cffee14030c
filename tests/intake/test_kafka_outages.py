"""Consumers of Kafka through broken lines, a killed broker and kills of their own: nothing lost, little repeated."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from example_runs import EXAMPLES
from intake_handlers import repeated
from intake_kafka import make_topic, until

import batchqueue_async as bq
from batchqueue_async.intake import KEY
from batchqueue_async.testing import FaultProxy

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(300)]

PREFETCH = 80


@pytest.fixture(autouse=True)
def running(request):
    """Servers run, also where a scenario before has failed after it had killed one."""
    for name in {"kafka", "postgres"} & set(request.fixturenames):
        server = request.getfixturevalue(name)
        if not server.running:
            server.start()


@pytest.fixture
async def proxy(kafka):
    proxy = FaultProxy(kafka.proxied_address)
    proxy.port = kafka.proxy_port  # where the broker says that it is
    async with proxy:
        yield proxy


@repeated
@pytest.mark.parametrize("fault", ["reset", "half_open", "mute"])
async def test_a_line_that_breaks_and_heals_loses_nothing(kafka, proxy, fault):
    topic = await make_topic(kafka, 2)

    async def handle(message):
        await asyncio.sleep(0.002)
        topic.note(message)

    options = {"workers": 8, "prefetch": PREFETCH, "ordered_by": KEY}
    async with topic.consumer(handle, bootstrap=proxy.address, **options):
        await topic.send(300, keys=20)
        await until(lambda: len(topic.handled) > topic.sent - 290)
        await proxy.switch(fault)
        await asyncio.sleep(1.0)
        await topic.send(100, keys=20)
        await proxy.switch("pass")
        await until(lambda: topic.complete, 90)
    # What was held at a fault, and what was handled and not committed yet, may have come again.
    assert topic.twice <= 2 * PREFETCH
    assert await topic.committed() == await topic.ends()


@repeated
async def test_a_broker_that_is_killed_and_started_is_consumed_on(kafka):
    topic = await make_topic(kafka, 2)
    loop = asyncio.get_running_loop()
    async with topic.consumer(prefetch=PREFETCH):
        await topic.send(200)
        await until(lambda: len(topic.handled) > topic.sent - 190)
        await loop.run_in_executor(None, kafka.kill)
        await asyncio.sleep(0.5)
        await loop.run_in_executor(None, kafka.start)
        await topic.send(100)
        await until(lambda: topic.complete, 90)
    # All that was sent before: the client has read ahead, and what is handled while the broker is away can't be
    # committed. One that is away longer than the group or the watch waits delivers it again.
    assert topic.twice <= 200
    assert await topic.committed() == await topic.ends()


@repeated
async def test_a_consumer_that_is_killed_loses_nothing(kafka, tmp_path):
    topic = await make_topic(kafka, 2)
    path = tmp_path / "handled"
    program = Path(__file__).parents[1] / "support" / "kafka_member.py"
    command = [sys.executable, str(program), kafka.address, topic.name, topic.group, str(path)]

    def begin():
        return subprocess.Popen(command)

    def handled():
        return path.read_bytes().split() if path.exists() else []

    await topic.send(400, keys=40)
    before = len(set(handled()))
    process = begin()
    try:
        await until(lambda: len(set(handled())) > before + 50, 150)
    finally:
        process.kill()
        process.wait()
    process = begin()
    try:
        await until(lambda: len(set(handled())) == topic.sent, 150)
    finally:
        process.terminate()
        process.wait()
    repeated = Counter(handled()).total() - topic.sent
    assert repeated <= (PREFETCH + 200)  # what was in handlers, and what 100 ms had not committed


async def test_a_static_member_comes_back_without_a_rebalance(kafka, logs):
    topic = await make_topic(kafka, 2)
    async with topic.consumer(name="stays", group_instance_id="one", session_timeout=10.0):
        async with topic.consumer(name="goes", group_instance_id="two", session_timeout=10.0):
            await topic.send(20)
            await until(lambda: topic.complete)
        revoked = [event for event in logs if event["event"] == "partitions_revoked" and event["consumer"] == "stays"]
        async with topic.consumer(name="goes", group_instance_id="two", session_timeout=10.0):
            await topic.send(20)
            await until(lambda: topic.complete)
        again = [event for event in logs if event["event"] == "partitions_revoked" and event["consumer"] == "stays"]
    assert topic.twice == 0
    assert len(again) == len(revoked)


async def test_the_brokers_know_the_consumer_by_the_name_it_was_given(kafka):
    topic = await make_topic(kafka)
    await topic.send(1)
    async with topic.consumer(client_id="billing-7", session_timeout=30.0):
        await until(lambda: topic.complete)
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
        await admin.start()
        try:
            (described,) = await admin.describe_consumer_groups([topic.group])
        finally:
            await admin.close()
    ((_, group, _, _, _, members, *_),) = described.groups
    assert (group, [name for _, name, *_ in members]) == (topic.group, ["billing-7"])
    with pytest.raises(bq.ConfigError, match="client_id='' is empty"):
        topic.consumer(client_id="")
    with pytest.raises(bq.ConfigError, match="names no broker"):
        topic.consumer(bootstrap=[])


@repeated
async def test_from_kafka_through_a_disk_into_postgresql_with_everything_killed(kafka, postgres, tmp_path):
    topic = await make_topic(kafka, 2)
    table = topic.name.replace("-", "_")
    command = [sys.executable, str(EXAMPLES / "kafka_to_postgres.py"), "--bootstrap", kafka.address]
    command += ["--topic", topic.name, "--group", topic.group, "--dsn", postgres.dsn, "--table", table]
    command += ["--directory", str(tmp_path / "disk"), "--session-timeout", "1.5"]
    loop = asyncio.get_running_loop()

    def rows():
        try:
            return int(postgres.sql(f"SELECT count(*) FROM {table}")[0])
        except Exception:
            return 0

    async def arrived(number):
        async with asyncio.timeout(120):
            while await loop.run_in_executor(None, rows) < number:
                await asyncio.sleep(0.1)

    written = tmp_path / "out"

    def begin():
        with written.open("wb") as out:  # the child has its own
            return subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)

    process = begin()
    try:
        await topic.send(300)
        await arrived(topic.sent - 290)
        process.kill()
        process.wait()
        process = begin()
        await topic.send(100)
        await arrived(topic.sent - 90)
        await loop.run_in_executor(None, postgres.kill)
        await topic.send(100)
        await loop.run_in_executor(None, postgres.start)
        await arrived(topic.sent - 50)
        await loop.run_in_executor(None, kafka.kill)
        await loop.run_in_executor(None, kafka.start)
        await topic.send(100)
        await arrived(topic.sent)
        process.terminate()
        await loop.run_in_executor(None, process.wait)
    finally:
        process.kill()
        process.wait()
    assert rows() == topic.sent  # the key is topic, partition and offset: nothing is there twice
    bodies = postgres.sql(f"SELECT body FROM {table}")
    assert sorted(bodies) == sorted(f"m{number}" for number in range(topic.sent))
    assert process.returncode == 0
    assert "given back 0" in written.read_text()
