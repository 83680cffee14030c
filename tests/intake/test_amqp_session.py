"""RabbitMQ's lane without a pool, against the real broker: deliveries, acknowledgements, every kind of end."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest
from intake.rabbit_tools import LIMIT, plan, side
from pamqp import commands
from structlog.testing import capture_logs

from batchqueue_async.errors import AuthError, ConfigError, PermanentError, RetryableError
from batchqueue_async.intake.amqp import session as amqp_session
from batchqueue_async.intake.amqp.broker import Broker
from batchqueue_async.intake.amqp.session import open_session
from batchqueue_async.intake.ports import DeadLetter, Outcomes, Retry, Room, SessionLostError
from batchqueue_async.testing import FaultProxy

pytestmark = pytest.mark.real_time

WIDE = Room(1000, 1 << 30)


@contextlib.asynccontextmanager
async def session(server, queue, *, address=None, heartbeat=10, reader="stream", **changes):
    broker = Broker(f"amqp://{address or server.address}/", heartbeat=heartbeat)
    found = await open_session(broker, queue, plan(**changes), reader=reader, timeout=10.0)
    try:
        yield found
    finally:
        await found.end()


async def take(found, count, room=WIDE):
    taken = []
    async with asyncio.timeout(LIMIT):
        while len(taken) < count:
            taken += await found.take(room)
    return taken


async def lost(found):
    """The words of its end."""
    with pytest.raises(SessionLostError) as told:
        async with asyncio.timeout(LIMIT):
            await found.take(WIDE)
    return str(told.value)


class RawProperties(commands.Basic.Properties):
    """Flags and values as they are on the wire."""

    def __init__(self, raw):
        super().__init__()
        self.raw = raw

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)

    def marshal(self):
        return self.raw


async def publish_raw(broker, body, raw):
    channel = await broker.channel.get_underlay_channel()
    await channel.basic_publish(body, routing_key=broker.name, properties=RawProperties(raw))


def acked(*deliveries):
    return Outcomes(list(deliveries), [], [])


def released(*deliveries):
    return Outcomes([], list(deliveries), [])


@pytest.fixture
def name(request):
    return "intake-" + "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[:100]


@pytest.fixture(params=["stream", "client"])
def reader(request):
    return request.param


class TestSettling:
    async def test_what_is_acked_is_gone_and_the_rest_comes_again(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker:
            await broker.publish(*(b"%d" % number for number in range(10)))
            async with session(rabbit_server, name, reader=reader) as found:
                taken = await take(found, 10)
                assert [one.body for one in taken] == [b"%d" % number for number in range(10)]
                assert [one.attempt for one in taken] == [1] * 10
                await found.settle(acked(*taken[:3], taken[7], taken[5]))
                await found.flush()
            await broker.reaches(5)
            again = await broker.drain()
            assert [one.body for one in again] == [b"3", b"4", b"6", b"8", b"9"]
            assert all(one.redelivered for one in again)

    async def test_what_is_released_comes_again_at_once(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker:
            await broker.publish(b"a", b"b", b"c")
            async with session(rabbit_server, name, reader=reader) as found:
                taken = await take(found, 3)
                await found.settle(Outcomes([taken[2]], taken[:2], []))
                again = await take(found, 2)
                assert sorted(one.body for one in again) == [b"a", b"b"]
                assert {one.attempt for one in again} == {2}
                await found.settle(acked(*again))
                await found.flush()
            assert await broker.count() == 0

    async def test_thousands_in_wild_order(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker:
            total = 2000
            await asyncio.gather(*(broker.publish(b"x" * (number % 300)) for number in range(total)))
            async with session(rabbit_server, name, reader=reader, prefetch=50) as found:
                held, seen = [], 0
                while seen < total:
                    held += (taken := await take(found, 1))
                    seen += len(taken)
                    held.sort(key=lambda one: one.tag * 7919 % 101)
                    half = len(held) // 2 or 1
                    done, held = held[:half], held[half:]
                    await found.settle(acked(*done))
                await found.settle(acked(*held))
                await found.flush()
            assert await broker.count() == 0

    async def test_a_large_body_of_many_frames(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker:
            body = bytes(range(256)) * 3000
            await broker.publish(body, b"")
            async with session(rabbit_server, name, reader=reader) as found:
                taken = await take(found, 2)
                assert [one.body for one in taken] == [body, b""]

    async def test_in_1_the_prefetch_is_the_broker_s_bound(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker:
            await broker.publish(*[b"x"] * 20)
            async with session(rabbit_server, name, reader=reader, prefetch=7) as found:
                await take(found, 7)
                await broker.reaches(13)

    async def test_in_75_bytes_bound_what_is_held_here_and_by_the_pool_together(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker:
            await broker.publish(*[b"x" * 500_000] * 40)
            bounds = {"prefetch": 1000, "prefetch_bytes": 1 << 20}
            most = 4 if reader == "stream" else 14  # the client keeps a queue of frames
            async with session(rabbit_server, name, reader=reader, **bounds) as found:
                seen = 0
                while seen < 40:
                    held = []
                    async with asyncio.timeout(LIMIT):
                        # Until no more can come, or all are here.
                        while (found._reading or found._buffer) and seen + len(held) < 40:
                            held += await found.take(WIDE) if found._buffer else []
                            await asyncio.sleep(0.01)
                    assert 1 <= len(held) <= most, "what was taken counts until it is settled"
                    await found.settle(acked(*held))
                    seen += len(held)
                await found.flush()
            assert await broker.count() == 0

    async def test_in_74_a_broker_can_write_while_handlers_take_long(self, rabbit_server, name, reader, monkeypatch):
        monkeypatch.setattr(amqp_session, "_LONGEST_PAUSE", 0.2)
        monkeypatch.setattr(amqp_session, "_BREATH", 3_000_000)
        async with side(rabbit_server, name) as broker:
            await broker.publish(*[b"x" * 500_000] * 40)
            held = []
            with capture_logs() as logs:
                bounds = {"prefetch": 1000, "prefetch_bytes": 1 << 20}
                async with session(rabbit_server, name, reader=reader, **bounds) as found:
                    held += await take(found, 40)  # nothing is settled: without a breath, the third is the last
                    assert found._leeway <= 20_000_000 + 3_000_000
                    await found.settle(acked(*held))
                    assert found._reading
                    assert not found._leeway
                    await found.flush()
            assert await broker.count() == 0
        (said,) = [each for each in logs if each["event"] == "intake_bytes_above_bound"]
        assert said["held"] > said["prefetch_bytes"] == 1 << 20


class TestForwarding:
    async def test_a_later_attempt_waits_in_a_queue_of_its_delay(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker:
            await broker.publish(b"again", headers={"tenant": "t"}, message_id="m-1", content_type="text/plain")
            async with session(rabbit_server, name, reader=reader) as found:
                (first,) = await take(found, 1)
                await found.forward(first, Retry(0.4, 2))
                await broker.reaches(1, f"{name}.retry.1")
                (second,) = await take(found, 1)
                assert (second.body, second.attempt, second.key, second.id) == (b"again", 2, name, "m-1")
                assert second.headers["tenant"] == "t"
                assert second.properties.content_type == "text/plain"
                await found.forward(second, Retry(1.5, 3))  # another queue, declared on the way
                (third,) = await take(found, 1)
                assert third.attempt == 3
                await found.settle(acked(third))
                await found.flush()
            assert await broker.count() == 0
            assert await broker.count(f"{name}.retry.1") == await broker.count(f"{name}.retry.2") == 0

    async def test_in_32_a_dead_letter_is_confirmed_before_the_ack(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker:
            await broker.publish(b"bad", headers={"tenant": "t", "bq-attempt": 3})
            letters = f"{name}.dead"
            async with session(rabbit_server, name, reader=reader, dead_letters=letters) as found:
                (one,) = await take(found, 1)
                assert one.attempt == 3
                await found.forward(one, DeadLetter(reason="permanent", error="ValueError", attempts=3, at=5.0))
                await found.flush()
            assert await broker.count() == 0
            (letter,) = await broker.drain(letters)
            assert letter.body == b"bad"
            assert letter.headers["bq-reason"] == "permanent"
            assert letter.headers["bq-error"] == "ValueError"
            assert letter.headers["bq-attempts"] == "3"
            assert letter.headers["bq-source"] == name
            assert letter.headers["tenant"] == "t"
            assert "bq-attempt" not in letter.headers  # put back, it begins anew

    async def test_in_32_an_exchange_that_leads_nowhere_keeps_the_message(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:
            exchange = await broker.channel.declare_exchange(f"{name}.x", "direct")
            try:
                await broker.publish(b"bad")
                async with session(rabbit_server, name, dead_letters=f"{name}.x") as found:
                    (one,) = await take(found, 1)
                    letter = DeadLetter(reason="attempts", error="ValueError")
                    with pytest.raises(PermanentError, match="no queue takes"):
                        await found.forward(one, letter)
                    await found.flush()
                await broker.reaches(1)  # not acked, so it came back when the session ended
            finally:
                await exchange.delete()

    @pytest.mark.parametrize(
        "raw",
        [
            struct.pack(">HQ", 0x40, 2**63),  # a timestamp that no calendar has
            struct.pack(">H", 0x80) + bytes([2, 0xFF, 0xFE]),  # an id that is not UTF-8
            struct.pack(">HIB", 0x2000, 9, 2) + b"\xff\xfe" + b"S\0\0\0\1x",  # nor is a header's name
        ],
        ids=["timestamp", "id", "header"],
    )
    async def test_in_76_a_message_whose_properties_can_t_be_read_is_handled_like_any_other(
        self, rabbit_server, name, raw
    ):
        async with side(rabbit_server, name) as broker:
            await publish_raw(broker, b"odd", raw)
            letters = f"{name}.dead"
            async with session(rabbit_server, name, dead_letters=letters) as found:
                (one,) = await take(found, 1)
                assert (one.body, one.id, one.attempt, one.published_at) == (b"odd", f"{name}#1", 1, None)
                assert name in repr(one)
                await found.forward(one, Retry(0.2, 2))
                (two,) = await take(found, 1)
                assert (two.body, two.attempt) == (b"odd", 2)
                await found.forward(two, DeadLetter(reason="permanent", error="ValueError"))
                await found.flush()
            assert await broker.count() == 0
            (letter,) = await broker.drain(letters)
            assert letter.headers["bq-reason"] == "permanent"

    async def test_in_77_a_header_that_the_client_reads_and_can_t_write_goes_back_all_the_same(
        self, rabbit_server, name
    ):
        table = b"\1aS\0\0\0\2\xff\xfe" + b"\1bF\0\0\0\x09" + b"\1aS\0\0\0\2\xff\xfe" + b"\1cS\0\0\0\1x"
        async with side(rabbit_server, name) as broker:
            await publish_raw(broker, b"odd", struct.pack(">HI", 0x2000, len(table)) + table)
            letters = f"{name}.dead"
            async with session(rabbit_server, name, dead_letters=letters) as found:
                (one,) = await take(found, 1)
                assert one.headers["a"] == "\ufffd\ufffd"
                await found.forward(one, Retry(0.2, 2))
                (two,) = await take(found, 1)
                await found.forward(two, DeadLetter(reason="permanent", error="ValueError"))
                await found.flush()
            (letter,) = await broker.drain(letters)
            assert letter.headers["a"] == b"\xff\xfe"
            assert letter.headers["b"] == {"a": b"\xff\xfe"}
            assert letter.headers["c"] == "x"

    async def test_in_78_the_broker_sends_no_copy_of_a_retry_or_letter_to_whom_the_sender_named(
        self, rabbit_server, name
    ):
        async with side(rabbit_server, name) as broker, side(rabbit_server, f"{name}.other") as other:
            await broker.publish(b"once", headers={"CC": [other.name], "tenant": "t"})
            await other.reaches(1)
            letters = f"{name}.dead"
            async with session(rabbit_server, name, dead_letters=letters) as found:
                (one,) = await take(found, 1)
                await found.forward(one, Retry(0.2, 2))
                (two,) = await take(found, 1)
                assert two.headers["tenant"] == "t"
                await found.forward(two, DeadLetter(reason="permanent", error="ValueError"))
                await found.flush()
            await broker.reaches(1, letters)
            assert await other.count() == 1

    async def test_the_publishing_channel_is_made_anew(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:
            await broker.publish(b"a", b"b")
            letters = f"{name}.dead"
            async with session(rabbit_server, name, dead_letters=letters) as found:
                first, second = await take(found, 2)
                letter = DeadLetter(reason="attempts", error="E")
                await found.forward(first, letter)
                await found._publisher._channel.close()
                await found.forward(second, letter)
            assert len(await broker.drain(letters)) == 2


class TestEnds:
    async def test_in_27_a_stop_throws_nothing_away(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker:
            await asyncio.gather(*(broker.publish(b"x") for _ in range(500)))
            async with session(rabbit_server, name, reader=reader, prefetch=1000) as found:
                taken = await take(found, 1, Room(1, 1 << 30))
                await found.stop()
                while more := await found.take(WIDE):
                    taken += more
                assert await found.take(WIDE) == []
                await found.settle(acked(*taken))
                await found.flush()
            assert await broker.count() == 500 - len(taken)
            rest = await broker.drain()
            assert not any(one.redelivered for one in rest)

    async def test_in_26_a_deleted_queue_ends_the_session(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker, session(rabbit_server, name, reader=reader) as found:
            await broker.delete()
            assert "cancelled the consumer" in await lost(found)

    async def test_in_24_nothing_of_a_dead_connection_is_handed_out(self, rabbit_server, name, reader):
        async with side(rabbit_server, name) as broker, FaultProxy(rabbit_server.address) as proxy:
            await broker.publish(*[b"x"] * 50)
            async with session(rabbit_server, name, address=proxy.address, reader=reader) as found:
                taken = await take(found, 1, Room(1, 1 << 30))
                await asyncio.sleep(0.2)  # the other 49 are here
                over = asyncio.Event()
                taken[0].epoch.watch(lambda epoch: over.set())
                await proxy.switch("reset")
                async with asyncio.timeout(LIMIT):
                    await over.wait()
                assert taken[0].epoch.over
                await lost(found)
                async with asyncio.timeout(LIMIT):
                    await found.settle(acked(*taken))  # IN-25: neither hangs nor raises
                await found.end()
                await found.end()
            await proxy.switch("pass")
            await broker.reaches(50)

    @pytest.mark.parametrize("fault", ["half_open", "mute", "reset"])
    async def test_in_25_an_ack_on_a_lost_line_neither_hangs_nor_raises(self, rabbit_server, name, reader, fault):
        async with side(rabbit_server, name) as broker, FaultProxy(rabbit_server.address) as proxy:
            await broker.publish(*[b"x"] * 30)
            async with session(rabbit_server, name, address=proxy.address, reader=reader) as found:
                taken = await take(found, 30)
                await proxy.switch(fault)
                async with asyncio.timeout(LIMIT):
                    for one in reversed(taken):
                        await found.settle(acked(one))
                    await found.end()

    @pytest.mark.parametrize("fault", ["half_open", "mute"])
    async def test_in_23_a_silent_line_is_noticed(self, rabbit_server, name, reader, fault):
        async with (
            side(rabbit_server, name),
            FaultProxy(rabbit_server.address) as proxy,
            session(rabbit_server, name, address=proxy.address, reader=reader, heartbeat=1) as found,
        ):
            await proxy.switch(fault)
            assert "nothing came from the broker" in await lost(found)
            async with asyncio.timeout(LIMIT):
                await found.end()

    async def test_a_taker_that_waits_is_woken_by_the_end(self, rabbit_server, name):
        async with side(rabbit_server, name), session(rabbit_server, name) as found:
            waiting = asyncio.create_task(found.take(WIDE))
            await asyncio.sleep(0)
            await found.end()
            with pytest.raises(SessionLostError):
                await waiting

    async def test_a_quiet_connection_lives(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker, session(rabbit_server, name, heartbeat=1) as found:
            await asyncio.sleep(4)
            await broker.publish(b"late")
            (one,) = await take(found, 1)
            await found.settle(acked(one))
            await found.flush()


class TestConnecting:
    async def test_no_such_queue(self, rabbit_server):
        with pytest.raises(ConfigError, match="has no queue 'intake-nowhere'; declare it"):
            async with session(rabbit_server, "intake-nowhere"):
                pass

    async def test_refused(self, rabbit_server, name):
        async with side(rabbit_server, name):
            broker = Broker(f"amqp://guest:wr0ng@{rabbit_server.address}/")
            with pytest.raises(AuthError) as told:
                await open_session(broker, name, plan(), reader="stream", timeout=10.0)
            assert "wr0ng" not in str(told.value)

    async def test_nobody_there(self, name):
        async with FaultProxy("127.0.0.1:1") as proxy:
            await proxy.switch("refuse")
            with pytest.raises(RetryableError):
                await open_session(Broker(f"amqp://{proxy.address}/"), name, plan(), reader="stream", timeout=10.0)

    async def test_tls(self, rabbit_server, name, certificate_files):
        from batchqueue_async.sinks._shared.tls import Tls

        async with side(rabbit_server, name) as broker:
            await broker.publish(b"secret")
            url = f"amqps://127.0.0.1:{rabbit_server.tls_port}/"
            where = Broker(url, tls=Tls(ca=certificate_files[0]))
            found = await open_session(where, name, plan(), reader="stream", timeout=10.0)
            try:
                (one,) = await take(found, 1)
                await found.settle(acked(one))
                await found.flush()
            finally:
                await found.end()
            with pytest.raises(RetryableError):
                await open_session(Broker(url, tls=True), name, plan(), reader="stream", timeout=10.0)

    async def test_what_a_queue_was_declared_with(self, rabbit_server, name):
        arguments = {"x-queue-type": "quorum", "x-delivery-limit": 3, "x-single-active-consumer": True}
        async with side(rabbit_server, name, **arguments):
            broker = Broker(f"amqp://{rabbit_server.address}/")
            connection = await broker.connect(None)
            try:
                found = await broker.arguments_of(connection, name)
                assert found == {
                    "x-queue-type": "quorum",
                    "x-delivery-limit": "3",
                    "x-single-active-consumer": "true",
                }
            finally:
                await connection.close()
