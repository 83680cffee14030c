"""The Kafka sink against a real broker."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from datetime import UTC, datetime
from itertools import count

import aiokafka
import pyarrow as pa
import pytest
from kafka_tools import create, read

import batchqueue_async as bq
from batchqueue_async.sinks._shared.secrets import Secret
from batchqueue_async.sinks.base import BatchKey, KeyedSink, TransactionalSink
from batchqueue_async.sinks.kafka import KafkaSink
from batchqueue_async.sinks.kafka import client as kafka_client
from batchqueue_async.sinks.kafka.delivery import Batch, Partitioner, UnconfirmedSends
from batchqueue_async.sinks.kafka.messages import Encoder, Messages

pytestmark = pytest.mark.real_time

_names = count()


@pytest.fixture
def topic():
    return f"t{next(_names)}"


@pytest.fixture
async def make(kafka, topic):
    made = []

    def make(address=kafka.address, **options):
        made.append(KafkaSink(address, options.pop("topic", topic), **options))
        return made[-1]

    yield make
    for sink in made:
        await sink.close()


@pytest.fixture
async def sink(make):
    sink = make()
    await sink.open()
    return sink


def values(messages):
    return [message.value for message in messages]


# --- records


async def test_records_become_messages(kafka, sink, topic):
    assert isinstance(sink, KeyedSink)
    arrow = pa.RecordBatch.from_pydict({"x": [1, 2]})
    result = await sink.send([b"bytes", "té", {"a": 1}, bytearray(b"array"), arrow, 5])
    assert (result.rejected, result.skipped) == ({}, 0)
    expected = [b"bytes", "té".encode(), b'{"a":1}', b"array", b'{"x":1}', b'{"x":2}', b"5"]
    assert values(await read(kafka, topic)) == expected


async def test_each_record_carries_its_key(kafka, sink, topic):
    arrow = pa.RecordBatch.from_pydict({"x": [1, 2]})
    await sink.send_keyed([b"a", arrow], ["q/1", "q/2"])
    await sink.send_keyed([b"b"], ["q/3"])
    found = {message.value: dict(message.headers)["bq-key"] for message in await read(kafka, topic)}
    assert found == {b"a": b"q/1", b'{"x":1}': b"q/2#0", b'{"x":2}': b"q/2#1", b"b": b"q/3"}


async def test_keys_headers_and_values_by_functions(kafka, make, topic):
    sink = make(
        key=lambda record: record["id"],
        value=lambda record: json.dumps(record).encode(),
        headers=lambda record: [("kind", "spän"), ("n", b"1")],
        key_header=None,
    )
    await sink.open()
    await sink.send_keyed([{"id": 7}, {"id": "x"}], ["q/1", "q/2"])
    found = sorted((m.key, m.value, m.headers) for m in await read(kafka, topic))
    headers = (("kind", "spän".encode()), ("n", b"1"))
    assert found == [(b"7", b'{"id": 7}', headers), (b"x", b'{"id": "x"}', headers)]


async def test_one_key_is_one_partition_the_one_of_kafkas_own_clients(kafka, make, topic):
    await create(kafka, topic, 5)
    sink = make(key="k")
    await sink.open()
    records = [{"k": f"key{number % 7}", "n": number} for number in range(100)]
    await asyncio.gather(*(sink.send(records[start : start + 25]) for start in range(0, 100, 25)))
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=kafka.address)
    await producer.start()
    theirs = {
        f"key{n}".encode(): (await producer.send_and_wait(topic, b"own", key=f"key{n}".encode())).partition
        for n in range(7)
    }
    await producer.stop()
    found = await read(kafka, topic)
    assert len(found) == 107
    assert {message.key: message.partition for message in found} == theirs


async def test_without_keys_batches_take_turns(kafka, sink, topic):
    for number in range(6):
        await sink.send([b"%d" % number] * 10)
    found = await read(kafka, topic)
    assert [[m.partition for m in found].count(partition) for partition in range(3)] == [20, 20, 20]
    assert len({(message.partition, message.value) for message in found}) == 6


async def test_a_partitioner_of_ones_own(kafka, make, topic):
    sink = make(key="k", partitioner=lambda key, partitions: partitions[int(key)])
    await sink.open()
    await sink.send([{"k": 2}, {"k": 0}, {"k": 2}])
    assert [message.partition for message in await read(kafka, topic)] == [0, 2, 2]
    wrong = make(partitioner=lambda key, partitions: 9)
    await wrong.open()
    with pytest.raises(bq.ConfigError, match="chose 9"):
        await wrong.send([b"x"])


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
async def test_compression(kafka, make, topic, compression):
    sink = make(compression=compression)
    await sink.open()
    await sink.send([b"x" * 5_000] * 50)
    assert values(await read(kafka, topic)) == [b"x" * 5_000] * 50


async def test_large_sends_become_several_batches(kafka, make, topic):
    sink = make(max_batch_bytes=10_000)
    await sink.open()
    batch = [b"%05d" % number + b"x" * 400 for number in range(200)]
    await sink.send_keyed(batch, [f"q/{number}" for number in range(200)])
    assert sorted(values(await read(kafka, topic))) == batch


async def test_sends_at_once(kafka, sink, topic):
    await asyncio.gather(*(sink.send_keyed([b"%d" % n] * 3, [f"q/{n}.{i}" for i in range(3)]) for n in range(40)))
    assert sorted(values(await read(kafka, topic))) == sorted([b"%d" % n for n in range(40)] * 3)


async def test_nothing_is_no_message(sink):
    assert await sink.send([]) == await sink.send_keyed([], [])


# --- records that are refused


async def test_a_record_above_the_sinks_limit_is_given_back(kafka, make, topic):
    sink = make(max_record_bytes=5_000)
    await sink.open()
    for send in (sink.send, lambda batch: sink.send_keyed(batch, ["q/1", "q/2", "q/3"])):
        result = await send([b"a", b"x" * 5_000, b"b"])
        assert {place: type(error) for place, error in result.rejected.items()} == {1: bq.TooLargeError}
    assert sorted(values(await read(kafka, topic))) == [b"a", b"a", b"b", b"b"]
    alone = await sink.send([b"x" * 5_000])
    assert list(alone.rejected) == [0]


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_record_above_the_topics_limit_is_found(kafka, make, topic, idempotent):
    await create(kafka, topic, **{"max.message.bytes": "2000"})
    sink = make(idempotent=idempotent)
    await sink.open()
    batch = [b"%03d" % number + b"x" * 300 for number in range(30)]
    batch[17] = b"large" * 1_000
    result = await sink.send_keyed(batch, [f"q/{number}" for number in range(30)])
    assert {place: type(error) for place, error in result.rejected.items()} == {17: bq.TooLargeError}
    await sink.send([b"after"])
    expected = [value for value in batch if len(value) < 1_000]
    assert sorted(values(await read(kafka, topic))) == [*expected, b"after"]


async def test_what_the_broker_has_no_place_for_is_permanent(kafka, make, topic):
    await create(kafka, topic, **{"cleanup.policy": "compact"})
    sink = make()
    await sink.open()
    result = await sink.send([b"no", b"key"])
    assert [type(error) for error in result.rejected.values()] == [bq.PermanentError] * 2


async def test_what_the_broker_refuses_may_pass_where_that_is_said(kafka, make, topic):
    await create(kafka, topic, **{"max.message.bytes": "1000"})
    sink = make(retryable=["MessageSizeTooLarge"])
    await sink.open()
    with pytest.raises(bq.RetryableError, match="MessageSizeTooLargeError"):
        await sink.send([b"x" * 5000])


async def test_records_without_a_message(make):
    sink = make(key="id")
    await sink.open()
    result = await sink.send([{"id": 1}, {"no": 1}, {"id": 2, "o": object()}, None])
    assert {place: type(error) for place, error in result.rejected.items()} == dict.fromkeys(
        (1, 2, 3), bq.PermanentError
    )


# --- a batch in one transaction


async def test_a_batch_is_in_once_and_all_at_once(kafka, sink, topic):
    assert isinstance(sink, TransactionalSink)
    transaction = await sink.begin(BatchKey(topic, 5))
    await transaction.send([b"a", b"b"])
    await transaction.send([])
    await transaction.send([b"c"])
    before = await asyncio.wait_for(read_open(kafka, topic), 60)
    assert before == []
    await transaction.commit()
    await transaction.rollback()
    for number in (5, 4):
        assert await sink.begin(BatchKey(topic, number)) is None
    await sink.close()
    await sink.open()
    assert await sink.begin(BatchKey(topic, 5)) is None
    assert sorted(values(await read(kafka, topic))) == [b"a", b"b", b"c"]


async def read_open(kafka, topic):
    """What a reader of committed messages sees while a transaction is open: its end is before the open part."""
    consumer = aiokafka.AIOKafkaConsumer(
        topic, bootstrap_servers=kafka.address, auto_offset_reset="earliest", isolation_level="read_committed"
    )
    await consumer.start()
    found = await consumer.getmany(timeout_ms=300)
    await consumer.stop()
    return [message for messages in found.values() for message in messages]


async def test_a_batch_that_is_rolled_back_can_be_sent_again(kafka, sink, topic):
    for end in ("rollback", "rollback", "commit"):
        transaction = await sink.begin(BatchKey(topic, 0))
        await transaction.send([end.encode()])
        await getattr(transaction, end)()
    assert values(await read(kafka, topic)) == [b"commit"]


async def test_who_takes_over_ends_what_another_has_begun(kafka, make, topic):
    old, new = make(), make()
    await old.open()
    await new.open()
    lost = await old.begin(BatchKey(topic, 1))
    await lost.send([b"old"])
    transaction = await new.begin(BatchKey(topic, 1))
    await transaction.send([b"new"])
    await transaction.commit()
    with pytest.raises(bq.SinkError):
        await lost.commit()
    await lost.rollback()
    assert values(await read(kafka, topic)) == [b"new"]


async def test_a_second_begin_waits_and_sources_stand_alone(kafka, sink, topic):
    first = await sink.begin(BatchKey(f"{topic}a", 1))
    waiting = asyncio.create_task(sink.begin(BatchKey(f"{topic}b", 1)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await first.send([b"a"])
    await first.commit()
    second = await waiting
    await second.send([b"b"])
    await second.commit()
    assert sorted(values(await read(kafka, topic))) == [b"a", b"b"]


async def test_a_refused_record_breaks_its_transaction(kafka, make, topic):
    await create(kafka, topic, **{"max.message.bytes": "2000"})
    sink = make(max_record_bytes=10_000)
    await sink.open()
    transaction = await sink.begin(BatchKey(topic, 1))
    assert list((await transaction.send([b"x", b"x" * 20_000])).rejected) == [1]
    with pytest.raises(bq.TooLargeError):
        await transaction.send([b"x" * 5_000])
    with pytest.raises(bq.RetryableError, match="has failed"):
        await transaction.commit()
    await transaction.rollback()
    assert await read(kafka, topic) == []


# --- what goes wrong outside


async def test_sasl(kafka, make, topic):
    sink = make(kafka.sasl_address, user="tester", password="right-password")
    await sink.open()
    await sink.send([b"x"])
    assert values(await read(kafka, topic)) == [b"x"]


async def test_a_wrong_password_is_told_and_not_shown(kafka, make, topic):
    sink = make(kafka.sasl_address, user="tester", password="wr0ng-pass", client_id="exporter")
    await sink.open()
    for _ in range(2):
        with pytest.raises(bq.AuthError, match="SaslAuthenticationFailed") as error:
            await sink.send([b"x"])
        assert "wr0ng" not in repr(sink) + str(error.value)


async def test_a_broker_that_is_not_there_is_waited_for(make):
    sink = make("127.0.0.1:1", user="tester", password="x")
    await sink.open()
    with pytest.raises(bq.RetryableError, match="KafkaConnectionError"):
        await sink.send([b"x"])
    with pytest.raises(bq.RetryableError, match="KafkaConnectionError"):
        await sink.begin(BatchKey("a", 1))


async def test_tls_is_demanded_where_it_is_asked_for(kafka, make):
    sink = make(tls=True, timeout=3.0)
    await sink.open()
    with pytest.raises(bq.RetryableError):
        await sink.send([b"x"])


async def sent(sink, left):
    """Send until all are in: on a slow machine a send may run out of its time."""
    while left:
        try:
            result = await sink.send_keyed(left, [f"q/{value.decode()}" for value in left])
        except bq.RetryableError:
            continue
        left = [] if result is None else [left[place] for place in result.rejected]  # the others are in


async def test_a_broker_that_dies_and_comes_back_has_each_record_once(kafka, make, topic):
    await create(kafka, topic, 1)
    sink = make(timeout=1.0)
    await sink.open()
    await sent(sink, [b"0"])
    kafka.kill()
    for _ in range(3):
        with pytest.raises(bq.RetryableError, match="not confirmed within"):
            await sink.send_keyed([b"1", b"2"], ["q/1", "q/2"])
    assert len(sink._unconfirmed) == 2
    kafka.start()
    await sent(sink, [b"2", b"3", b"1"])
    assert values(await read(kafka, topic)) == [b"0", b"1", b"2", b"3"]


async def test_a_send_that_is_cancelled_is_not_sent_again(kafka, make, topic):
    await create(kafka, topic, 1)
    sink = make()
    await sink.open()
    await sink.send_keyed([b"0"], ["q/0"])
    sending = asyncio.create_task(sink.send_keyed([b"1"], ["q/1"]))
    while not sending.done() and not len(sink._unconfirmed):
        await asyncio.sleep(0)
        sending.cancel()
    await asyncio.wait([sending])
    await sink.send_keyed([b"1", b"2"], ["q/1", "q/2"])
    assert values(await read(kafka, topic)) == [b"0", b"1", b"2"]


async def test_a_transaction_whose_broker_dies_can_be_repeated(kafka, make, topic):
    sink = make(timeout=2.0)
    await sink.open()
    transaction = await sink.begin(BatchKey(topic, 1))
    await transaction.send([b"lost"])
    kafka.kill()
    with pytest.raises(bq.RetryableError):
        await transaction.commit()
    await transaction.rollback()
    kafka.start()
    while True:
        try:
            transaction = await sink.begin(BatchKey(topic, 1))
            await transaction.send([b"kept"])
            await transaction.commit()
            break
        except bq.RetryableError:
            if transaction is not None:
                await transaction.rollback()
    assert values(await read(kafka, topic)) == [b"kept"]


# --- the parts


class Future:
    """As much of a future as `UnconfirmedSends` looks at."""

    def __init__(self, done=False, error=None):
        self.is_done, self.error = done, error

    def done(self):
        return self.is_done

    def cancelled(self):
        return False

    def exception(self):
        return self.error


def test_unconfirmed_keys_are_waited_for_once():
    unconfirmed = UnconfirmedSends()
    one, other, sent, failed = Future(), Future(), Future(done=True), Future(done=True, error=ValueError())
    keys = ["a", "b", "c", "d", "e"]
    unconfirmed.keep(keys, [Batch(one, [0, 1]), Batch(sent, [2]), Batch(failed, [3])], "producer")
    unconfirmed.keep(None, [Batch(other, [0])], "producer")
    unconfirmed.keep(keys, [Batch(other, [4])], None)
    waited, fresh = unconfirmed.take(["e", "b", "c", "d", "a"])
    assert waited == {one: ([1, 4], "producer"), sent: ([2], "producer")}
    assert (fresh, len(unconfirmed)) == ([0, 3], 0)
    assert unconfirmed.take(["a"]) == ({}, [])
    unconfirmed.keep_waited(keys[::-1], waited)
    assert len(unconfirmed) == 2
    unconfirmed.forget("another")
    unconfirmed.forget("producer")
    assert len(unconfirmed) == 0


def test_unconfirmed_keys_are_bounded(monkeypatch):
    monkeypatch.setattr("batchqueue_async.sinks.kafka.delivery._REMEMBERED", 3)
    unconfirmed = UnconfirmedSends()
    unconfirmed.keep([*"abcde"], [Batch(Future(), range(5))], "producer")
    assert len(unconfirmed) == 3
    assert unconfirmed.take(["a", "e"])[1] == [0]


def test_messages_without_a_key_beside_such_with_one():
    messages = Messages([b"a", b"b", b"c"], [None, b"k", None], None, range(3))
    spread = Partitioner(None).spread(messages, range(3), [0, 1, 2])
    assert sorted(index for indexes in spread.values() for index in indexes) == [0, 1, 2]
    assert any({0, 2} <= set(indexes) for indexes in spread.values())


def test_a_value_of_nothing_is_a_deletion_and_needs_a_key():
    encoder = Encoder(lambda record: record[0], lambda record: record[1], None, None, 1_000)
    messages, refused = encoder.encode([(b"k", None), (None, None), (bytearray(b"b"), b"v")], None)
    assert (messages.keys, messages.values, messages.places) == ([b"k", b"b"], [None, b"v"], [0, 2])
    assert list(refused) == [1]


def test_options_are_checked():
    for options, message in [
        ({"bootstrap": "localhost"}, "not host:port"),
        ({"bootstrap": []}, "names no broker"),
        ({"client_id": ""}, "client_id=''"),
        ({"topic": ""}, "topic=''"),
        ({"compression": "rar"}, "compression='rar'"),
        ({"timeout": 0}, "timeout=0"),
        ({"partitioner": 5}, "partitioner=5"),
        ({"retryable": ["TOPIC_AUTHORISATION_FAILED"]}, "did you mean TopicAuthorizationFailedError"),
        ({"retryable": ["xyzzy"]}, "see aiokafka.errors"),
    ]:
        with pytest.raises(bq.ConfigError, match=message):
            KafkaSink(**({"bootstrap": "a:1", "topic": "t"} | options))


async def test_a_sink_that_is_not_open_says_so(make):
    with pytest.raises(RuntimeError, match="call open"):
        await make().send([b"x"])
    with pytest.raises(RuntimeError, match="call open"):
        await make().begin(BatchKey("a", 1))


def test_a_pickled_sink_is_the_same():
    sink = KafkaSink(
        ["a:1", "b:2"],
        "t",
        key="k",
        compression="lz4",
        user="u",
        password="s3cret",
        client_id="exporter",
        retryable=["INVALID_TOPIC"],
    )
    copy = pickle.loads(pickle.dumps(sink))
    assert repr(copy) == repr(sink) == "KafkaSink('a:1,b:2', topic='t')"
    assert (copy._encoder, copy._cluster, copy._producer_options) == (
        sink._encoder,
        sink._cluster,
        sink._producer_options,
    )
    assert copy._cluster.password == Secret("s3cret")
    assert copy._cluster.client_id == "exporter"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("KafkaConnectionError", bq.RetryableError),
        ("NotEnoughReplicasError", bq.RetryableError),
        ("UnknownTopicOrPartitionError", bq.RetryableError),
        ("ProducerFenced", bq.RetryableError),
        ("TopicAuthorizationFailedError", bq.AuthError),
        ("SaslAuthenticationFailed", bq.AuthError),
        ("MessageSizeTooLargeError", bq.TooLargeError),
        ("InvalidTopicError", bq.PermanentError),
        ("UnknownError", bq.RetryableError),
    ],
)
def test_what_an_error_means(name, kind):
    assert type(kafka_client.translate_error("here", getattr(aiokafka.errors, name)("secret"))) is kind


@pytest.mark.parametrize("name", ["TopicAuthorizationFailedError", "MessageSizeTooLargeError", "InvalidTopicError"])
def test_more_errors_may_pass_where_that_is_said(name):
    error = getattr(aiokafka.errors, name)("secret")
    found = kafka_client.translate_error("here", error, kafka_client.error_names([name]))
    assert (type(found), str(found)) == (bq.RetryableError, f"here: {name}")
    assert not kafka_client.is_of_record(error, {name})


def test_other_errors_are_told_or_go_on_as_they_are():
    assert type(kafka_client.translate_error("here", ConnectionResetError(104, "reset"))) is bq.RetryableError
    for error in (KeyError("a mistake"), bq.ConfigError("x"), bq.TooLargeError("y")):
        assert kafka_client.translate_error("here", error) is error


async def test_times_and_headers_from_fields_and_zstd(kafka, make, topic):
    sink = make(headers={"tenant": "t", "kind": "k"}, timestamp="at", compression="zstd", key="id")
    sink = pickle.loads(pickle.dumps(sink))
    await sink.open()
    when = datetime(2024, 2, 29, 12, 0, 0, 250_000, tzinfo=UTC)
    batch = [{"id": 1, "t": "a", "k": 5, "at": when}, {"id": 2, "t": None, "at": 1.5}, {"id": 3}]
    result = await sink.send_keyed([*batch, {"id": 4, "at": "noon"}], ["q/1", "q/2", "q/3", "q/4"])
    await sink.close()
    assert list(result.rejected) == [3]
    found = {message.key: message for message in await read(kafka, topic)}
    assert found[b"1"].timestamp == round(when.timestamp() * 1000)
    assert found[b"2"].timestamp == 1500
    assert abs(found[b"3"].timestamp / 1000 - time.time()) < 3600
    headers = [[pair for pair in found[key].headers if pair[0] != "bq-key"] for key in (b"1", b"2", b"3")]
    assert headers == [[("tenant", b"a"), ("kind", b"5")], [], []]
    with pytest.raises(bq.ConfigError, match="headers='tenant'"):
        make(headers="tenant")


# --- quotas


@pytest.fixture
async def quota(kafka):
    """The name of clients that may produce 100,000 bytes a second."""
    await asyncio.to_thread(kafka.set_quota, "exporter", 100_000)
    yield "exporter"
    await asyncio.to_thread(kafka.set_quota, "exporter", None)


@pytest.fixture
def throttled(monkeypatch):
    """The throttle times that brokers' answers have named, in milliseconds."""
    times = []
    send = aiokafka.client.AIOKafkaClient.send

    async def noting(self, node, request, **options):
        response = await send(self, node, request, **options)
        times.append(getattr(response, "throttle_time_ms", 0))
        return response

    monkeypatch.setattr(aiokafka.client.AIOKafkaClient, "send", noting)
    return times


@pytest.mark.real_time(one_loop=True)
async def test_a_quota_slows_an_exporter_down_and_costs_no_record(kafka, make, topic, quota, throttled):
    # More than the broker lets in while it counts the first seconds.
    records = [b"%06d" % number + bytes(994) for number in range(1_500)]
    config = bq.ExportConfig(batch=bq.BatchPolicy(max_records=100, linger=0.0), workers=bq.WorkerPolicy.fixed(4))
    async with bq.Exporter(make(client_id=quota), config) as export:
        await export.consume(records)
        await export.flush(240.0)
        stats = export.stats()
    assert (stats.delivered, stats.dead_lettered, stats.records, stats.breaker_opens) == (1_500, 0, 0, 0)
    assert set(values(await read(kafka, topic))) == set(records)
    assert max(throttled) > 0
    throttled.clear()
    other = make(client_id="another")
    await other.open()
    for start in range(0, 1_500, 100):
        await other.send(records[start : start + 100])
    assert len(throttled) >= 15
    assert max(throttled) == 0


async def test_every_connection_has_the_sinks_name(kafka, make, monkeypatch):
    names = set()
    send = aiokafka.conn.AIOKafkaConnection.send

    def noting(self, request, **options):
        names.add(self._client_id)
        return send(self, request, **options)

    monkeypatch.setattr(aiokafka.conn.AIOKafkaConnection, "send", noting)
    sink = make(kafka.sasl_address, user="tester", password="right-password", client_id="exporter")
    await sink.open()
    await sink.send([b"x"])
    transaction = await sink.begin(BatchKey("a", 1))
    await transaction.send([b"y"])
    await transaction.commit()
    await sink._cluster.check_credentials()
    assert names == {"exporter"}
