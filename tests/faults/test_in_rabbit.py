"""IN-23 to IN-36: what goes wrong between a consumer and RabbitMQ, provoked on the real broker."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from intake.rabbit_tools import LIMIT, side
from intake_handlers import repeated

import batchqueue_async as bq
from batchqueue_async import intake
from batchqueue_async.testing import FaultProxy

pytestmark = pytest.mark.real_time

QUICK = bq.RetryPolicy(initial=0.05, max_delay=0.5)
PROGRAM = Path(__file__).parents[1] / "intake" / "rabbit_program.py"


@pytest.fixture
def name(request):
    return "in-" + "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[:100]


def consumer(server, queue, handler, *, address=None, **options):
    options = {"dead_letters": intake.DROP, "reconnect": QUICK, "workers": 8, "prefetch": 50, "heartbeat": 1} | options
    return intake.AmqpConsumer(f"amqp://{address or server.address}/", queue, handler, **options)


class Handled:
    """A handler that notes what it was given."""

    def __init__(self, delay: float = 0.0) -> None:
        self.bodies: list[bytes] = []
        self.attempts: list[int] = []
        self.delay = delay

    async def __call__(self, message: intake.Message) -> None:
        await asyncio.sleep(self.delay)
        self.bodies.append(message.body)
        self.attempts.append(message.attempt)

    async def reaches(self, count: int, limit: float = LIMIT) -> None:
        async with asyncio.timeout(limit):
            while len(set(self.bodies)) < count:
                await asyncio.sleep(0.01)


async def until(condition, limit: float = LIMIT) -> None:
    async with asyncio.timeout(limit):
        while not condition():
            await asyncio.sleep(0.01)


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%06d" % number for number in range(first, first + count)]


class TestReconnecting:
    @repeated
    @pytest.mark.parametrize("fault", ["reset", "refuse", "half_open", "mute"])
    async def test_in_23_consumes_again_after_every_fault_of_the_line(self, rabbit_server, name, fault):
        async with side(rabbit_server, name) as broker, FaultProxy(rabbit_server.address) as proxy:
            handled = Handled(0.002)
            async with consumer(rabbit_server, name, handled, address=proxy.address) as one:
                await broker.publish(*numbers(100))
                await until(lambda: handled.bodies)
                before = one.stats().reconnects
                await proxy.switch(fault)
                await until(lambda: one.stats().state == "connecting")
                await broker.publish(*numbers(100, 100))
                await proxy.switch("pass")
                await handled.reaches(200)
                assert one.stats().reconnects > before
                stats = one.stats()
                assert stats.dead_lettered == stats.settle_errors == 0
            assert await broker.count() == 0
            # Repeated is at most what was held when the line broke.
            assert len(handled.bodies) <= (200 + 50)

    @repeated
    @pytest.mark.timeout(300)  # a broker takes long to start where much else runs
    async def test_in_23_a_restarted_broker(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:
            handled = Handled()
            await broker.publish(*numbers(50), delivery_mode=2)
            async with consumer(rabbit_server, name, handled) as one:
                await handled.reaches(50)
                await asyncio.to_thread(rabbit_server.ctl, "eval", "mnesia:sync_log().")
                await asyncio.to_thread(rabbit_server.stop)
                await until(lambda: one.stats().state == "connecting")
                await asyncio.to_thread(rabbit_server.start)
                await broker.connect()
                await until(lambda: one.stats().state == "running")
                await broker.publish(*numbers(50, 50))
                await handled.reaches(100)
                assert one.healthy()

    async def test_in_24_in_25_nothing_stale_starts_and_no_ack_hangs(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker, FaultProxy(rabbit_server.address) as proxy:
            started: Counter[bytes] = Counter()
            gate = asyncio.Event()

            async def handler(message):
                started[message.body] += 1
                await gate.wait()

            await broker.publish(*numbers(50))
            async with consumer(rabbit_server, name, handler, address=proxy.address) as one:
                await until(lambda: one.stats().received == 50)
                await proxy.switch("refuse")
                await until(lambda: one.stats().state == "connecting")
                gate.set()
                await until(lambda: one.stats().in_flight == 0)
                await asyncio.sleep(0.1)
                assert sum(started.values()) == 8  # those that ran; none of the 42 that waited was started
                assert one.stats().stale == 50
                await proxy.switch("pass")
                await until(lambda: one.stats().acked == 50)
                assert set(started.values()) <= {1, 2}
                assert sum(started.values()) == 58
            assert await broker.count() == 0

    async def test_in_26_a_queue_that_was_deleted_and_declared_again(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:
            handled = Handled()
            async with consumer(rabbit_server, name, handled) as one:
                await broker.publish(b"before")
                await handled.reaches(1)
                await broker.delete()
                await until(lambda: one.stats().state == "connecting")
                await asyncio.sleep(0.3)  # it asks again and again for a queue that is not there
                await broker.declare()
                await broker.publish(b"after")
                await handled.reaches(2)

    async def test_in_28_a_channel_that_the_broker_closes_for_its_timeout(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:

            async def limit(timeout, tick):
                setting = "application:set_env(rabbit, {}, {})"
                both = [setting.format("consumer_timeout", timeout), setting.format("channel_tick_interval", tick)]
                await asyncio.to_thread(rabbit_server.ctl, "eval", f"{', '.join(both)}.")

            await limit(1_000, 200)
            try:
                calls: Counter[bytes] = Counter()

                async def handler(message):
                    calls[message.body] += 1
                    if message.body == b"slow" and calls[b"slow"] == 1:
                        await asyncio.sleep(4)

                async with consumer(rabbit_server, name, handler) as one:
                    await broker.publish(b"slow")
                    await until(lambda: one.stats().reconnects >= 1)
                    await broker.publish(b"next")
                    await until(lambda: calls[b"next"] and calls[b"slow"] >= 2)
                    await until(lambda: one.stats().acked == 2)
            finally:
                await limit(1_800_000, 60_000)


class TestStopping:
    @repeated
    async def test_in_20_in_27_a_graceful_stop_repeats_nothing(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:
            handled = Handled(0.01)
            await broker.publish(*numbers(400))
            for turn in range(3):
                async with consumer(rabbit_server, name, handled) as one:
                    await until(lambda done=turn * 60: len(handled.bodies) > done)
                report = one.report
                assert report.released == report.abandoned == report.stale == 0
            rest = await broker.drain()
            assert not any(message.redelivered for message in rest)
            assert len(handled.bodies) == len(set(handled.bodies))
            assert len(handled.bodies) + len(rest) == 400

    async def test_in_33_restarts_cost_a_quorum_queue_no_delivery(self, rabbit_server, name):
        async with side(rabbit_server, name, **{"x-queue-type": "quorum", "x-delivery-limit": 3}) as broker:
            handled = Handled(0.002)
            await broker.publish(*numbers(300))
            for turn in range(5):
                async with consumer(rabbit_server, name, handled, prefetch=20):
                    await until(lambda done=turn * 30: len(handled.bodies) > done)
            async with consumer(rabbit_server, name, handled, prefetch=20):
                await handled.reaches(300)
            # What the broker has under way to a consumer that it cancels, it takes back itself, and counts; see IN-33.
            assert len(handled.bodies) == 300
            assert max(handled.attempts) < 4

    @repeated
    async def test_in_10_what_was_running_at_a_kill_comes_again(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:
            await broker.publish(b"first", *numbers(40))
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                str(PROGRAM),
                f"amqp://{rabbit_server.address}/",
                name,
                stdout=asyncio.subprocess.PIPE,
            )
            assert child.stdout is not None
            async with asyncio.timeout(LIMIT):
                assert await child.stdout.readline() == b"acked 40\n"  # all but the first, which still runs
            child.send_signal(signal.SIGKILL)
            await child.wait()
            await broker.reaches(1)
            await broker.publish(*numbers(40))
            (found, *_) = await broker.drain()
            assert found.body == b"first"
            assert found.redelivered

    @pytest.mark.parametrize("kind", ["classic", "quorum"])
    async def test_in_21_order_holds_from_one_consumer_of_a_single_active_queue_to_the_next(
        self, rabbit_server, name, kind
    ):
        async with side(rabbit_server, name, **{"x-queue-type": kind, "x-single-active-consumer": True}) as broker:
            handled = Handled(0.01)
            await broker.publish(*numbers(100))
            options = {"workers": 1, "prefetch": 20}
            async with consumer(rabbit_server, name, handled, name="first", **options) as first:
                await until(lambda: handled.bodies)
                async with consumer(rabbit_server, name, handled, name="second", **options) as second:
                    await until(lambda: len(handled.bodies) > 30)
                    report = await first.shutdown()
                    await handled.reaches(100)
                    await until(lambda: second.stats().acked == 100 - report.acked)
            assert handled.bodies == numbers(100)
            # It had more than the one that ran, and another is the first to handle those.
            assert report.released > 0
            assert await broker.count() == 0


class TestRetrying:
    async def test_in_29_a_poison_message_is_tried_with_delays_and_buried(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:
            handled = Handled()

            async def handler(message):
                await handled(message)
                if message.body == b"poison":
                    raise ValueError("no")

            retry = bq.RetryPolicy(initial=0.1, multiplier=1.0, max_delay=0.1, jitter=False, max_attempts=4)
            letters = f"{name}.dead"
            async with consumer(rabbit_server, name, handler, retry=retry, dead_letters=letters) as one:
                await broker.publish(b"poison", *numbers(20))
                await until(lambda: one.stats().dead_lettered == 1 and one.stats().acked == 20)
            assert handled.bodies.count(b"poison") == 4
            (letter,) = await broker.drain(letters)
            assert letter.headers["bq-reason"] == "attempts"
            assert letter.headers["bq-attempts"] == "4"
            assert letter.headers["bq-error"] == "ValueError"
            assert await broker.count() == 0

    @pytest.mark.parametrize("kind", ["classic", "quorum"])
    async def test_in_30_attempts_are_counted_over_restarts(self, rabbit_server, name, kind):
        async with side(rabbit_server, name, **{"x-queue-type": kind}) as broker:
            handled = Handled()

            async def handler(message):
                await handled(message)
                raise bq.RetryableError("again", retry_after=6.0)

            letters = f"{name}.dead"
            retry = bq.RetryPolicy(initial=6.0, max_delay=6.0, jitter=False, max_attempts=3)
            await broker.publish(b"x")  # without a message_id
            for turn in range(3):
                async with consumer(rabbit_server, name, handler, retry=retry, dead_letters=letters) as one:
                    await until(lambda turn=turn: len(handled.bodies) == turn + 1)
                    await until(lambda one=one: one.stats().retried + one.stats().dead_lettered == 1)
                if turn < 2:
                    await broker.reaches(1, f"{name}.retry.8")
                    (waiting,) = await broker.drain(f"{name}.retry.8")  # not 8 seconds in a test
                    await broker.publish(waiting.body, headers=waiting.headers)
            assert handled.attempts == [1, 2, 3]
            assert len(await broker.drain(letters)) == 1

    async def test_in_34_order_of_a_key_holds_through_retries(self, rabbit_server, name):
        for kind in ("classic", "quorum"):
            async with side(rabbit_server, name, **{"x-queue-type": kind}) as broker:
                seen: dict[str, list[int]] = {"a": [], "b": [], "c": []}
                failed: set[bytes] = set()

                async def handler(message, seen=seen, failed=failed):
                    key, _, number = message.body.decode().partition("-")
                    await asyncio.sleep(0.001)
                    if int(number) % 7 == 3 and message.body not in failed:
                        failed.add(message.body)
                        raise OSError("once")
                    seen[key].append(int(number))

                retry = bq.RetryPolicy(initial=0.02, max_delay=0.05, max_attempts=5)
                bodies = [f"{key}-{number}".encode() for number in range(60) for key in seen]
                await broker.publish(*bodies)
                options = {"ordered_by": lambda message: message.body[:1], "retry": retry}
                async with consumer(rabbit_server, name, handler, **options) as one:
                    await until(lambda one=one: one.stats().acked == 180)
                assert seen == {key: list(range(60)) for key in seen}

    async def test_in_32_letters_that_go_nowhere_pause_and_lose_nothing(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:
            exchange = await broker.channel.declare_exchange(f"{name}.x", "fanout")
            try:

                async def handler(message):
                    raise bq.PermanentError("never")

                async with consumer(rabbit_server, name, handler, dead_letters=f"{name}.x") as one:
                    await broker.publish(b"bad")
                    await until(lambda: one.stats().forward_errors >= 1)
                    assert one.stats().dead_lettered == 0
                    await broker.declare(f"{name}.dead")
                    queue = await broker.channel.get_queue(f"{name}.dead")
                    await queue.bind(exchange)
                    await until(lambda: one.stats().dead_lettered == 1)
                assert [letter.body for letter in await broker.drain(f"{name}.dead")] == [b"bad"]
                assert await broker.count() == 0
            finally:
                await exchange.delete()

    async def test_in_69_a_backlog_above_the_bound_by_bytes_is_consumed(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:
            await broker.publish(*(number + bytes(100_000) for number in numbers(40)))
            handled = Handled()
            async with consumer(rabbit_server, name, handled, prefetch_bytes=1 << 19, heartbeat=10) as one:
                await until(lambda: one.stats().acked == 40)
                assert one.stats().reconnects == 0
            assert await broker.count() == 0

    async def test_in_70_letters_are_confirmed_while_too_many_bytes_wait(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:

            async def handler(message):
                await asyncio.sleep(0.1)  # meanwhile the others come, and fill the bound
                raise bq.PermanentError("never")

            letters = f"{name}.dead"
            options = {"dead_letters": letters, "prefetch_bytes": 1 << 19, "heartbeat": 10}
            async with consumer(rabbit_server, name, handler, **options) as one:
                await broker.publish(*(number + bytes(100_000) for number in numbers(40)))
                await until(lambda: one.stats().dead_lettered == 40)
                assert one.stats().forward_errors == one.stats().reconnects == 0
            assert sorted(letter.body[:6] for letter in await broker.drain(letters)) == numbers(40)


class TestSettling:
    async def test_in_36_adaptive_workers_leave_the_prefetch_alone(self, rabbit_server, name):
        async with side(rabbit_server, name) as broker:
            handled = Handled(0.005)
            adaptive = bq.AdaptivePolicy(max_workers=16)
            async with consumer(rabbit_server, name, handled, workers=2, prefetch=30, adaptive=adaptive) as one:
                await broker.publish(*numbers(300))
                most = 0
                while len(handled.bodies) < 300:
                    stats = one.stats()
                    most = max(most, stats.buffered + stats.waiting + stats.in_flight)
                    await asyncio.sleep(0.005)
            assert most <= 30
            assert await broker.count() == 0
