"""IN-1 to IN-22: what the pool and the settlement of other consumers got wrong, each shown not to happen here."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref

import pytest
from structlog.testing import capture_logs

import batchqueue_async as bq
from batchqueue_async import intake
from batchqueue_async.export.control.concurrency import Scaler
from batchqueue_async.intake.pacing import Pacer
from batchqueue_async.intake.portions import GUESS, Portion
from batchqueue_async.testing import FakeBroker, settle

KINDS = ("amqp", "kafka", "nats", "redis")
FAST = bq.RetryPolicy(initial=0.1, max_delay=1.0, max_attempts=3)


def bodies(count):
    return [b"%d" % number for number in range(count)]


def adds_up(stats):
    parts = stats.acked + stats.retried + stats.dead_lettered + stats.released + stats.stale
    return stats.received == parts + stats.buffered + stats.waiting + stats.in_flight


class Calls:
    """A handler that takes its time and knows what ran."""

    def __init__(self, delay=0.0):
        self.delay = delay
        self.begun, self.done = [], []
        self.active = self.most = 0

    async def __call__(self, message):
        self.begun.append(message.body)
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            await asyncio.sleep(self.delay(message) if callable(self.delay) else self.delay)
            self.done.append(message.body)
        finally:
            self.active -= 1


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 5), (7, 20), (40, 60)])
async def test_in_1_workers_and_prefetch_are_used(workers, prefetch):
    broker, calls = FakeBroker(), Calls(delay=1.0)
    broker.publish(*bodies(200))
    async with broker.consumer(calls, workers=workers, prefetch=prefetch) as consumer:
        await asyncio.sleep(0.5)
        assert calls.most == workers
        assert broker.depth == 200 - prefetch
        assert (consumer.stats().workers, consumer.stats().prefetch) == (workers, prefetch)
        await consumer.shutdown(0)


async def test_in_1_what_is_asked_for_above_the_caps_is_lowered_aloud(logs):
    broker = FakeBroker()
    async with broker.consumer(Calls(), workers=500, prefetch=5000) as consumer:
        assert (consumer.plan.workers, consumer.plan.prefetch) == (200, 1000)
    (capped,) = [each for each in logs if each["event"] == "intake_capped"]
    assert capped["asked"] == {"workers": 500, "prefetch": 5000}
    assert intake.IntakeConfig(dead_letters="dead").resolve(8)[:2] == (32, 320)
    assert intake.IntakeConfig(dead_letters="dead").resolve(100)[:2] == (200, 500)


async def test_in_2_a_full_buffer_and_a_stuck_handler_do_not_hold_up_the_stop():
    broker = FakeBroker()
    broker.publish(*bodies(100))

    async def stuck(message):
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(5)
                raise

    loop = asyncio.get_running_loop()
    async with broker.consumer(stuck, workers=4, prefetch=10) as consumer:
        await asyncio.sleep(1)
        began = loop.time()
        report = await consumer.shutdown(2.0)
    assert loop.time() - began <= 5.0
    assert report.abandoned == 4
    assert broker.depth == 100
    await asyncio.sleep(10)


async def test_in_3_the_consumer_outlives_the_task_that_started_it():
    broker, calls = FakeBroker(), Calls()
    consumer = broker.consumer(calls)

    async def request():
        async with asyncio.timeout(1):
            await consumer.__aenter__()

    await asyncio.create_task(request())
    await asyncio.sleep(60)
    broker.publish(b"later")
    await broker.drained()
    assert calls.done == [b"later"]
    assert consumer.healthy()
    await consumer.shutdown()


@pytest.mark.parametrize("kind", KINDS)
async def test_in_4_a_handler_that_raises_leaves_no_slot_taken(kind):
    broker, seen = FakeBroker(kind), []

    async def fail(message):
        seen.append(message.body)
        if int(message.body) < 11:
            raise ValueError(message.body)

    broker.publish(*bodies(30))
    async with broker.consumer(fail, workers=2, prefetch=10, retry=FAST) as consumer:
        await broker.drained()
        assert consumer.stats().acked == 19
        assert consumer.stats().dead_lettered == 11
    assert len(broker.dead_letters) == 11


@pytest.mark.parametrize("option", ["decode", "ordered_by"])
async def test_in_5_a_decoder_or_a_key_function_that_raises_costs_its_message_alone(option):
    broker, calls = FakeBroker(), Calls()

    def read(message):
        return int(message.body)

    broker.publish(b"1", b"two", b"3")
    async with broker.consumer(calls, workers=1, prefetch=1, **{option: read}) as consumer:
        await broker.drained()
        assert adds_up(consumer.stats())
    assert calls.done == [b"1", b"3"]
    (letter,) = broker.dead_letters
    assert letter.headers["bq-reason"] == "undecodable"
    assert "two" not in str(letter.headers)  # a payload shows in no header


async def test_in_6_our_own_cancelling_is_a_release():
    broker, calls = FakeBroker(), Calls(delay=100.0)
    broker.publish(*bodies(5))
    consumer = broker.consumer(calls, workers=3, prefetch=5)
    async with consumer:
        await asyncio.sleep(1)
        report = await consumer.shutdown(2.0)
    assert (report.acked, report.dead_lettered, report.retried, report.released) == (0, 0, 0, 5)
    assert consumer.stats().failures == 0
    assert broker.depth == 5
    assert broker.violations == []


class Raises(logging.Handler):
    def emit(self, record):
        raise RuntimeError("the log is full")


async def test_in_7_settled_once_after_the_handler_whichever_way_the_log_breaks():
    broker, open_now, acked_inside = FakeBroker(), [], []
    logger = logging.getLogger("batchqueue_async")
    raising = Raises()
    logger.addHandler(raising)

    async def borrow(message):
        open_now.append(message.body)
        try:
            if message.body == b"1":
                raise bq.PermanentError("no")
        finally:
            await asyncio.sleep(0.1)
            acked_inside.extend(set(broker.events("acked")) & {message.id})
            open_now.remove(message.body)

    broker.publish(*bodies(3))
    try:
        async with broker.consumer(borrow):
            await broker.drained()
    finally:
        logger.removeHandler(raising)
    assert acked_inside == open_now == []
    assert sorted(broker.events("acked")) == ["fake/0/0", "fake/0/2"]
    assert broker.events("dead_lettered") == ["fake/0/1"]
    assert broker.violations == []


async def test_in_8_a_message_counts_when_it_is_done():
    broker = FakeBroker()
    broker.publish(b"1")
    async with broker.consumer(Calls(delay=50.0)) as consumer:
        await asyncio.sleep(10)
        stats = consumer.stats()
        assert (stats.received, stats.acked, stats.in_flight) == (1, 0, 1)
        assert stats.oldest_in_flight == 10.0
        await broker.drained()
        assert consumer.stats().acked == 1


async def test_in_9_a_slow_message_costs_a_slot_and_not_the_window():
    broker, calls = FakeBroker(), Calls(delay=lambda message: 1000.0 if message.body == b"0" else 0.1)
    broker.publish(*bodies(100))
    async with broker.consumer(calls, workers=5, prefetch=20) as consumer:
        await asyncio.sleep(20)
        assert len(calls.done) == 99
        assert len(broker.events("acked")) == 99
        await consumer.shutdown(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_in_10_what_is_still_handled_comes_again_after_a_break(kind):
    broker, gate = FakeBroker(kind), asyncio.Event()
    began = []

    async def wait(message):
        began.append(message.body)
        if message.body == b"0":
            await gate.wait()

    broker.publish(*bodies(20))
    async with broker.consumer(wait, workers=4, prefetch=20, ordered_by=lambda message: message.body):
        await asyncio.sleep(1)
        assert len(began) == 20
        broker.reset()
        gate.set()
        await broker.drained()
    assert began.count(b"0") == 2
    assert broker.violations == []


async def test_in_11_a_slow_key_holds_up_no_other():
    broker, calls = FakeBroker(), Calls(delay=lambda message: 1.0 if message.key == "slow" else 0.0)
    for number in range(1000):
        broker.publish(b"s", key="slow") if number % 100 == 0 else broker.publish(b"f", key=f"key-{number}")
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with broker.consumer(calls, workers=8, prefetch=500, ordered_by=intake.KEY):
        while calls.done.count(b"f") < 990:
            await asyncio.sleep(0.01)
        assert loop.time() - began < 0.5
        await broker.drained()
    assert loop.time() - began < 10.5


async def test_in_12_odd_keys_have_lanes_of_their_own():
    broker, running, together = FakeBroker(), set(), set()

    def key(message):
        return {"n": None, "l": [1, {"a": 2}], "d": {"x": [1]}, "t": "same"}[message.headers["kind"]]

    async def note(message):
        running.add((message.source, message.headers["kind"]))
        together.update((one, other) for one in running for other in running if one != other)
        await asyncio.sleep(1)
        running.discard((message.source, message.headers["kind"]))

    for kind, source in [("n", "a"), ("n", "a"), ("l", "a"), ("l", "a"), ("d", "a"), ("t", "a"), ("t", "b")]:
        broker.publish(b"x", headers={"kind": kind}, source=source)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with broker.consumer(note, workers=8, ordered_by=key):
        await broker.drained()
    assert loop.time() - began == pytest.approx(2.0, abs=0.2)  # the two lists, one after the other; all else at once
    assert (("a", "t"), ("b", "t")) in together


@pytest.mark.untraced
async def test_in_13_nothing_is_kept_of_keys_that_are_done_and_retries_count_against_the_bound():
    broker, calls = FakeBroker(), Calls()
    async with broker.consumer(calls, workers=8, prefetch=100, ordered_by=lambda message: message.body) as consumer:
        for start in range(0, 20_000, 1000):
            broker.publish(*(b"%d" % number for number in range(start, start + 1000)))
            await broker.drained()
            assert consumer.stats().keys == 0
        assert consumer.stats().held_bytes == 0

    async def fail(message):
        raise ValueError

    for kind, bound in (("amqp", 100), ("kafka", 1200)):
        broker = FakeBroker(kind)
        broker.publish(*bodies(5000))
        patient = bq.RetryPolicy(initial=50.0, max_delay=50.0, jitter=False, max_attempts=2)
        options = {} if kind == "amqp" else {"ordered_by": lambda message: message.body}
        async with broker.consumer(fail, workers=8, prefetch=100, retry=patient, **options) as consumer:
            await asyncio.sleep(20)
            stats = consumer.stats()
            assert stats.waiting + stats.buffered + stats.in_flight <= bound
            await consumer.shutdown(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_in_14_messages_that_fail_do_not_starve_those_that_work(kind):
    broker, done = FakeBroker(kind), []
    loop = asyncio.get_running_loop()

    async def work(message):
        await asyncio.sleep(0.01)
        if int(message.body) % 5 == 0:
            raise ValueError
        done.append(loop.time())

    broker.publish(*bodies(1000))
    retry = bq.RetryPolicy(initial=30.0, max_delay=30.0, jitter=False, max_attempts=5)
    options = {"ordered_by": lambda message: message.body} if kind == "kafka" else {}
    async with broker.consumer(work, workers=10, prefetch=100, retry=retry, **options) as consumer:
        await asyncio.sleep(30)
        assert len(done) == 800
        await consumer.shutdown(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_in_15_nothing_of_a_key_passes_its_failed_message(kind):
    broker, failed, done = FakeBroker(kind), set(), []

    async def flaky(message):
        await asyncio.sleep(0.01)
        number = int(message.body)
        if number % 7 == 3 and number not in failed:
            failed.add(number)
            raise ValueError
        done.append((message.key, number))

    for number in range(200):
        broker.publish(b"%d" % number, key=f"{number % 9}")
    async with broker.consumer(flaky, workers=8, ordered_by=intake.KEY, retry=FAST):
        await broker.drained()
    for key in range(9):
        of_key = [number for each, number in done if each == f"{key}"]
        assert of_key == sorted(of_key)
        assert len(of_key) == len(set(of_key))


@pytest.mark.parametrize("place", [0, 25, 49])
@pytest.mark.parametrize("how", ["raises", "rejects", "culprits", "permanent"])
@pytest.mark.parametrize("kind", KINDS)
async def test_in_16_one_bad_message_of_a_batch_costs_the_others_little(kind, how, place):
    broker, handled = FakeBroker(kind), []

    async def save(batch):
        bad = [at for at, each in enumerate(batch) if each.body == b"%d" % place]
        if bad and how == "raises":
            raise ValueError
        if bad and how == "permanent":
            raise bq.PermanentError("one of them")
        if bad and how == "culprits":
            raise bq.PermanentError("this one", culprits=bad)
        handled.extend(each.body for each in batch if each.body != b"%d" % place)
        return bq.SendResult(rejected={at: bq.RetryableError("no") for at in bad}) if bad else None

    broker.publish(*bodies(50))
    policy = bq.BatchPolicy(max_records=50, linger=0.01)
    async with broker.consumer(save, batch=policy, workers=2, prefetch=100, retry=FAST) as consumer:
        await broker.drained()
        assert adds_up(consumer.stats())
    assert sorted(handled) == sorted(each for each in bodies(50) if each != b"%d" % place)
    assert [letter.body for letter in broker.dead_letters] == [b"%d" % place]
    assert broker.violations == []
    if kind == "kafka":
        assert handled == [each for each in bodies(50) if each != b"%d" % place] or how == "rejects"


async def test_in_17_a_stop_does_not_wait_for_a_batch_to_fill():
    broker, handled = FakeBroker(), []

    async def save(batch):
        handled.extend(batch)

    broker.publish(*bodies(3))
    async with broker.consumer(save, batch=bq.BatchPolicy(max_records=100, linger=60.0)) as consumer:
        await asyncio.sleep(1)
        assert handled == []
        report = await consumer.shutdown()
    assert len(handled) == 3
    assert report.elapsed < 1.0
    assert report.acked == 3


class Refuses:
    """A sink whose destination answers 401."""

    concurrent = True

    async def open(self):
        pass

    async def send(self, batch):
        raise bq.AuthError("401")

    async def close(self):
        pass


async def test_in_18_what_an_exporter_has_in_memory_alone_is_not_acked():
    broker = FakeBroker()
    broker.publish(*bodies(5))
    async with (
        bq.Exporter(Refuses(), bq.ExportConfig(drain_timeout=0.1)) as exporter,
        broker.consumer(exporter, drain_timeout=0.5) as consumer,
    ):
        await asyncio.sleep(10)
        assert consumer.stats().acked == 0
    assert broker.depth == 5


async def test_in_18_an_exporter_with_a_disk_acks_when_the_disk_has_it(tmp_path):
    broker = FakeBroker()
    broker.publish(*bodies(5))
    config = bq.ExportConfig(path=tmp_path, overflow="block", drain_timeout=0.1)
    async with bq.Exporter(Refuses(), config) as exporter, broker.consumer(exporter) as consumer:
        await broker.drained()
        assert consumer.stats().acked == 5
        assert exporter.stats().records == 5


@pytest.mark.parametrize("durability", ["always", "os", "interval"])
@pytest.mark.parametrize("overflow", ["block", "drop_oldest"])
async def test_in_18_what_is_acked_before_the_disk_has_it_is_said_at_the_start(tmp_path, overflow, durability):
    durable = bq.DurableConfig(durability=durability)
    config = bq.ExportConfig(path=tmp_path, overflow=overflow, durable=durable, drain_timeout=0.1)
    with capture_logs() as logs:
        async with bq.Exporter(Refuses(), config) as exporter, FakeBroker().consumer(exporter):
            pass
    said = [each["durability"] for each in logs if each["event"] == "intake_acks_unsynced"]
    # With drop_oldest only the sink's answer is an acknowledgement.
    assert said == ([durability] if overflow == "block" and durability != "always" else [])


async def test_in_19_a_consumer_that_does_not_work_is_unhealthy_and_hammers_nobody():
    broker = FakeBroker()
    async with broker.consumer(Calls()) as consumer:
        assert consumer.healthy()
        broker.down()
        await asyncio.sleep(600)
        assert broker.connections < 60
        assert not consumer.healthy()
        assert consumer.stats().state == "connecting"
        broker.up()
        await asyncio.sleep(60)
        assert consumer.healthy()
        for _ in range(50):  # taken in and thrown out again
            broker.reset()
            await asyncio.sleep(0.2)
        assert broker.connections < 100


async def test_in_20_what_was_handled_is_acked_at_a_stop():
    broker, calls = FakeBroker(), Calls(delay=0.5)
    broker.publish(*bodies(500))
    for _ in range(5):
        async with broker.consumer(calls, workers=10, prefetch=30):
            await asyncio.sleep(0.7)
    await settle()
    assert len(calls.done) == len(set(calls.done)) == len(broker.events("acked"))
    assert broker.events("released") == []
    assert calls.done
    assert broker.violations == []


async def test_in_21_order_holds_from_one_consumer_to_the_next():
    broker, calls = FakeBroker(single_active=True), Calls(delay=0.1)
    broker.publish(*bodies(100))
    first = broker.consumer(calls, workers=1, prefetch=10)
    await first.__aenter__()
    async with broker.consumer(calls, workers=1, prefetch=10, name="second"):
        await asyncio.sleep(1.05)
        await first.shutdown()
        await broker.drained()
    assert calls.done == bodies(100)


@pytest.mark.parametrize("kind", KINDS)
async def test_in_22_the_default_is_at_least_once(kind):
    broker, gate = FakeBroker(kind), asyncio.Event()
    began = []

    async def first_dies(message):
        began.append(message.body)
        if len(began) == 1:
            await gate.wait()

    broker.publish(b"1")
    async with broker.consumer(first_dies):
        await asyncio.sleep(1)
        broker.reset()
        await asyncio.sleep(10)
        gate.set()
        await broker.drained()
    assert began == [b"1", b"1"]


class Between:
    """A lane to a broker in memory that can be slow to connect, and whose client cancels its own futures once."""

    def __init__(self, broker, plan, *, slow=0.0, cancels=()):
        self.inner = broker.lane(plan)
        self.retries, self.counts_held = self.inner.retries, self.inner.counts_held
        self.slow = slow
        self.cancels = set(cancels)

    async def cancel(self, call):
        if call in self.cancels:
            self.cancels.remove(call)
            lost = asyncio.get_running_loop().create_future()
            lost.cancel()
            await lost

    async def connect(self):
        await self.cancel("connect")
        await asyncio.sleep(self.slow)
        return BetweenSession(self, await self.inner.connect())


class BetweenSession:
    def __init__(self, lane, inner):
        self.lane, self.inner = lane, inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def take(self, room):
        await self.lane.cancel("take")
        return await self.inner.take(room)

    async def end(self):
        await self.inner.end()
        await self.lane.cancel("end")

    async def stop(self):
        await self.lane.cancel("stop")
        await self.inner.stop()

    async def flush(self):
        await self.lane.cancel("flush")
        await self.inner.flush()

    async def settle(self, outcomes):
        await self.lane.cancel("settle")
        await self.inner.settle(outcomes)

    async def forward(self, delivery, outcome):
        await self.lane.cancel("forward")
        await self.inner.forward(delivery, outcome)


async def test_in_61_a_stop_amid_connecting_takes_nothing():
    broker = FakeBroker()

    async def stubborn(message):
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(5)
                raise

    lanes = []

    def make(plan):
        lanes.append(Between(broker, plan))
        return lanes[-1]

    consumer = broker.consumer(stubborn, workers=1)
    consumer.use_lane(make)
    broker.publish(b"1")
    async with consumer:
        await asyncio.sleep(1)
        lanes[0].slow = 0.5
        broker.reset()
        broker.publish(*bodies(5))
        await asyncio.sleep(0.2)
        assert consumer.stats().state == "connecting"
        await consumer.shutdown(0)  # which waits a second for the handler, and meanwhile the connection is there
    assert broker.connections == 2
    assert len(broker.events("delivered")) == 1
    stats = consumer.stats()
    assert (stats.received, stats.buffered) == (1, 0)
    assert adds_up(stats)
    assert broker.depth == 6
    assert broker._sessions == []  # and it was closed
    await asyncio.sleep(10)


@pytest.mark.parametrize("call", ["connect", "take", "settle", "forward", "end", "stop", "flush"])
async def test_in_62_a_client_that_cancels_its_own_futures_ends_no_task_of_ours(call, logs):
    broker = FakeBroker()
    calls = Calls()

    async def handle(message):
        await calls(message)
        if message.body == b"3":
            raise bq.PermanentError("no")

    consumer = broker.consumer(handle, workers=2)
    consumer.use_lane(lambda plan: Between(broker, plan, cancels={call}))
    async with consumer:
        if call == "end":
            await asyncio.sleep(1)
            broker.reset()
        broker.publish(*bodies(10))
        await broker.drained()
        assert consumer.healthy()
        assert adds_up(consumer.stats())
    assert set(calls.done) == set(bodies(10))
    assert [letter.body for letter in broker.dead_letters] == [b"3"]
    assert broker.violations == []
    # It is told like any other failure of the line.
    told = {"intake_not_connected", "intake_disconnected", "settling_failed", "dead_letter_not_published"}
    told |= {"session_end_failed", "session_stop_failed", "intake_flush_failed"}
    assert [each for each in logs if each["event"] in told]


async def test_in_63_a_pause_does_not_hold_up_a_stop():
    broker, calls = FakeBroker(), Calls(delay=1.0)
    broker.publish(*bodies(8))
    async with broker.consumer(calls, workers=2, prefetch=8) as consumer:
        await asyncio.sleep(0.5)
        stop = asyncio.create_task(consumer.shutdown())
        await asyncio.sleep(0)
        consumer.pause()
        report = await stop
    assert (report.acked, report.released) == (8, 0)
    assert report.elapsed < 5.0


def test_in_64_thousands_of_calls_a_second_hide_no_slowdown():
    scaler = Scaler(bq.AdaptivePolicy(max_workers=16, interval=1.0), 16)
    pacer, now = Pacer(scaler, interval=1.0), 0.0
    for call in range(13_000):
        now += 0.001
        pacer.ended(0.01 if call < 10_000 else 0.05, now, busy=True)
    # A scaler that sees each call forgets within a tenth of a second, takes workers away once, and adds them again.
    assert pacer.workers <= 4


@pytest.mark.parametrize("size", [1, 1_000, 100_000])
def test_in_65_what_is_asked_for_fits_into_the_bound_by_bytes(size):
    portion, room = Portion(), 1 << 20
    for turn in range(10):
        asked = portion.most(500, room)
        assert asked == 1 or asked * (GUESS if turn == 0 else size) <= room  # the first time, nobody knows
        portion.took(asked, asked * size)
    assert portion.most(500, room) == max(1, min(500, room // size))
    portion.took(1, 4 * size)  # the next ones are larger
    assert portion.most(500, room) == max(1, min(500, room // (4 * size)))


class Run:
    """Neighbouring messages as one delivery, as the lane to Kafka gives them to a batch handler."""

    attempt = 1

    def __init__(self, messages):
        self.messages = messages
        self.epoch, self.order = messages[0].epoch, messages[0].order
        self.size = sum(each.size for each in messages)
        self.count, self.taken = len(messages), 0.0
        self.was_split = False

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        return self.messages[place]

    def __iter__(self):
        return iter(self.messages)

    def bodies(self):
        return [each.body for each in self.messages]

    def split(self):
        self.was_split = True
        return self.messages


class InRuns:
    """A lane to a broker in memory that gives runs of so many messages."""

    def __init__(self, broker, plan, length):
        self.inner, self.length = broker.lane(plan), length
        self.runs = []
        self.retries, self.counts_held = self.inner.retries, self.inner.counts_held

    async def connect(self):
        return InRunsSession(await self.inner.connect(), self.length, self.runs)


class InRunsSession:
    def __init__(self, inner, length, runs):
        self.inner, self.length, self.runs = inner, length, runs

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def take(self, room):
        found = await self.inner.take(room)
        runs = [Run(found[at : at + self.length]) for at in range(0, len(found), self.length)]
        self.runs += runs
        return runs

    async def settle(self, outcomes):
        acked, released = (
            [each for unit in units for each in (unit.messages if isinstance(unit, Run) else [unit])]
            for units in (outcomes.acked, outcomes.released)
        )
        await self.inner.settle(outcomes._replace(acked=acked, released=released))


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 9])
async def test_in_66_a_batch_is_of_messages_however_short_its_runs_are(count, length):
    broker, batches, failed = FakeBroker(), [], []

    async def handle(batch):
        batches.append([each.body for each in batch])
        if not failed and len(batches) > 2:
            failed.extend(batch)
            raise OSError("once")  # so that single messages come next to runs

    # Of several workers: with one alone all messages are one lane of the pool's, and no lane gives runs.
    consumer = broker.consumer(handle, workers=2, batch=bq.BatchPolicy(max_records=4, linger=0.0), retry=FAST)
    assert consumer.plan.run == 4
    lanes = []
    consumer.use_lane(lambda plan: lanes.append(InRuns(broker, plan, length)) or lanes[-1])
    async with consumer:
        broker.publish(*bodies(count))
        await broker.drained()
        stats = consumer.stats()
    # What was handled whole is settled whole.
    assert [each for run in lanes[0].runs if run.was_split for each in run] == failed
    assert {body for batch in batches for body in batch} == set(bodies(count))
    assert stats.failures == len(failed)
    assert (stats.acked, stats.dead_lettered) == (count, 0)
    assert broker.violations == []


@pytest.mark.parametrize("length", [1, 2, 4])
async def test_in_66_a_queue_gets_bodies_however_short_its_runs_are(length):
    broker, found = FakeBroker(), []

    async def handle(batch):
        found.extend(batch)

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("bodies", bq.QueueConfig(consumer=handle))
        consumer = broker.consumer(queue, workers=2, batch=bq.BatchPolicy(max_records=4, linger=0.0))
        consumer.use_lane(lambda plan: InRuns(broker, plan, length))
        async with consumer:
            broker.publish(*bodies(9))
            await broker.drained()
            assert consumer.stats().failures == 0
    assert sorted(found) == bodies(9)


@pytest.mark.parametrize("batch", [None, bq.BatchPolicy(max_records=8, linger=0.0)])
@pytest.mark.parametrize("kind", KINDS)
async def test_in_67_nothing_is_kept_of_what_is_done(kind, batch):
    """Nor of a batch that failed when its connection had gone, though it was to come again in smaller ones."""
    broker = FakeBroker(kind)
    seen = []

    async def handle(given):
        seen.extend(weakref.ref(each) for each in ([given] if batch is None else given))
        await asyncio.sleep(1)
        if broker.connections == 1:
            broker.reset()
            raise OSError("the same outage")

    broker.publish(*bodies(8))
    async with broker.consumer(handle, workers=2, batch=batch):
        await broker.drained()
        await asyncio.sleep(1)
        gc.collect()
        assert len(seen) >= 8
        assert [each() for each in seen if each() is not None] == []


@pytest.mark.parametrize("call", ["join", "rebalance"])
async def test_in_68_a_rebalance_that_is_cancelled_leaves_no_partition_without_an_owner(call):
    broker, calls = FakeBroker("kafka", partitions=3), Calls(delay=20.0)
    broker.publish(*bodies(6))
    async with broker.consumer(calls, workers=6, handler_timeout=None) as consumer:
        await asyncio.sleep(1)
        coming = broker.lane(consumer.plan).connect() if call == "join" else broker.rebalance(timeout=15.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(coming, 0.5)
        async with asyncio.timeout(600):
            await broker.drained()
    assert set(calls.done) == set(bodies(6))
    assert broker.violations == []


async def test_in_73_a_letter_that_is_put_back_begins_at_its_first_attempt():
    broker = FakeBroker("amqp")
    attempts = []

    async def fail(message):
        attempts.append(message.attempt)
        raise bq.RetryableError("not now", retry_after=6.0)

    broker.publish(b"1")
    retry = bq.RetryPolicy(initial=6.0, max_delay=6.0, max_attempts=3)
    async with broker.consumer(fail, retry=retry):
        await broker.drained()
        (letter,) = broker.dead_letters
        assert letter.headers["bq-attempts"] == "3"
        broker.publish(letter.body, headers=letter.headers)
        await broker.drained()
    assert attempts == [1, 2, 3, 1, 2, 3]


class Panic(BaseException):
    """As compiled libraries raise it: not an `Exception`."""


@pytest.mark.parametrize("batch", [None, bq.BatchPolicy(max_records=3, linger=0.0)], ids=["single", "batch"])
@pytest.mark.parametrize("where", ["handler", "decode", "ordered_by"])
async def test_in_80_an_error_that_is_no_exception_costs_its_message_alone(where, batch):
    broker = FakeBroker()

    def bad(message):
        if message.body == b"3":
            raise Panic
        return message.body

    async def one(message):
        if where == "handler":
            bad(message)

    async def many(messages):
        for message in messages:
            await one(message)

    broker.publish(*bodies(9))
    options = {} if where == "handler" else {where: bad}
    async with broker.consumer(many if batch else one, workers=2, retry=FAST, batch=batch, **options) as consumer:
        await broker.drained()
        stats = consumer.stats()
        assert adds_up(stats)
        assert (stats.acked, stats.dead_lettered, stats.reconnects) == (8, 1, 0)
        assert stats.buffered == stats.held_bytes == 0
        assert consumer.healthy()
    assert [letter.body for letter in broker.dead_letters] == [b"3"]


class Incomparable:
    """A key that has a hash, and can't be compared."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise RuntimeError


async def test_in_81_a_key_that_can_t_be_looked_up_costs_its_message_alone():
    broker, calls = FakeBroker(), Calls(0.1)
    broker.publish(*bodies(4))
    async with broker.consumer(calls, workers=4, ordered_by=lambda _: Incomparable()) as consumer:
        await broker.drained()
        stats = consumer.stats()
        assert adds_up(stats)
        assert (stats.acked + stats.dead_lettered, stats.reconnects, stats.buffered, stats.keys) == (4, 0, 0, 0)
    assert {letter.headers["bq-reason"] for letter in broker.dead_letters} == {"undecodable"}


@pytest.mark.parametrize("call", ["shutdown", "closed"])
async def test_in_82_a_handler_that_waits_for_the_end_of_its_consumer_is_told_so(call):
    broker, told = FakeBroker(), []

    async def handle(message):
        try:
            await getattr(consumer, call)()
        except bq.DeadlockError as error:
            told.append(str(error))

    broker.publish(b"1")
    consumer = broker.consumer(handle, drain_timeout=30.0)
    async with consumer:
        await broker.drained()
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < 1.0
    (said,) = told
    assert f"{call} in a handler" in said
    assert broker.depth == 0
