"""Every lane keeps what the pool relies on; and a lane that is broken fails in the family of its fault."""

from __future__ import annotations

import pytest
from intake_rigs import RIGS
from lane_contract import FAMILIES

from batchqueue_async.intake.ports import Outcomes, Plan, Room
from batchqueue_async.testing import FakeBroker

PLAN = Plan(name="contract", workers=4, prefetch=100, prefetch_bytes=1 << 20, dead_letters="dead", drain_timeout=5.0)
KINDS = ("amqp", "kafka", "nats", "redis")


class FakeSubject:
    patience = 5.0

    def __init__(self, kind, wrap=lambda session: session):
        self.broker = FakeBroker(kind, partitions=3)
        self.wrap = wrap

    async def connect(self):
        return self.wrap(await self.broker.lane(PLAN).connect())

    async def publish(self, bodies):
        self.broker.publish(*bodies)

    async def letters(self):
        return [(letter.body, letter.headers) for letter in self.broker.dead_letters]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_broker_in_memory_keeps_the_contract(kind, family):
    subject = FakeSubject(kind)
    await FAMILIES[family](subject)
    assert subject.broker.violations == []


async def nothing(message):
    pass


class RealSubject:
    def __init__(self, rig, wrap=lambda session: session, patience=20.0):
        self.rig = rig
        self.wrap = wrap
        self.patience = patience
        self.consumer = rig.consumer(nothing, workers=4, prefetch=100)
        self.sessions = []

    async def connect(self):
        session = await self.consumer._lane(self.consumer.plan).connect()
        self.sessions.append(session)
        return self.wrap(session)

    async def publish(self, bodies):
        await self.rig.publish(bodies)

    async def letters(self):
        return await self.rig.letters()


@pytest.mark.real_time
@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("broker", RIGS)
async def test_a_real_lane_keeps_the_contract(broker, family, request):
    server, make = RIGS[broker]
    rig = make(request.getfixturevalue(server))
    await rig.prepare()
    await FAMILIES[family](RealSubject(rig))


class Broken:
    """A session of the broker in memory with one fault."""

    hand_over = False

    def __init__(self, session):
        self.session = session

    def __getattr__(self, name):
        return getattr(self.session, name)


class IgnoresTheRoom(Broken):
    async def take(self, room):
        return await self.session.take(Room(1000, room.bytes))


class IgnoresTheBytes(Broken):
    async def take(self, room):
        return await self.session.take(Room(room.messages, 1 << 20))


class ForgetsAcks(Broken):
    async def settle(self, outcomes):
        await self.session.settle(Outcomes([], outcomes.released, outcomes.kept))


class KeepsWhatIsReleased(Broken):
    async def settle(self, outcomes):
        await self.session.settle(Outcomes([*outcomes.acked, *outcomes.released], [], outcomes.kept))


class OutlivesItsEnd(Broken):
    async def end(self):
        pass


class ThrowsAwayAtTheStop(Broken):
    async def stop(self):
        await self.session.settle(Outcomes(list(await self.session.take(Room(10, 1 << 20))), [], []))
        await self.session.stop()


class AcksBeforeTheLetter(Broken):
    async def forward(self, delivery, outcome):
        await self.session.settle(Outcomes([delivery], [], []))


FAULTS = {
    "takes": IgnoresTheRoom,
    "fits": IgnoresTheBytes,
    "acknowledges": ForgetsAcks,
    "releases": KeepsWhatIsReleased,
    "ends": OutlivesItsEnd,
    "stops": ThrowsAwayAtTheStop,
    "buries": AcksBeforeTheLetter,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_broken_lane_fails_in_the_family_of_its_fault(kind, family):
    with pytest.raises((AssertionError, TimeoutError)):
        await FAMILIES[family](FakeSubject(kind, FAULTS[family]))


@pytest.mark.real_time
@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_broken_lane_to_kafka_fails_in_the_family_of_its_fault(family, kafka):
    rig = RIGS["kafka"][1](kafka)
    await rig.prepare()
    subject = RealSubject(rig, FAULTS[family], patience=4.0)
    try:
        with pytest.raises((AssertionError, TimeoutError)):
            await FAMILIES[family](subject)
    finally:
        for session in subject.sessions:
            await session.end()
