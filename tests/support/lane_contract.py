"""What every lane promises the pool, checked on one: each family by itself, so that a broken lane fails in its own.

A subject connects lanes to one broker and publishes to it. `FAMILIES` are run by `tests/intake/test_lane_contract.py`
with every lane, and with a lane that is broken in one way at a time.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from batchqueue_async.intake.ports import DeadLetter, Outcomes, Room, SessionLostError


class Subject(Protocol):
    """A lane on a broker of its own.

    Attributes:
        patience: seconds within which the broker delivers again what was not settled.
    """

    patience: float

    async def connect(self) -> Any: ...
    async def publish(self, bodies: list[bytes]) -> None: ...
    async def letters(self) -> list[tuple[bytes, dict[str, str]]]: ...


def bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def taken(session, count, *, room=1000, seconds=10.0):
    """Take until there are this many messages."""
    found = []
    async with asyncio.timeout(seconds):
        while len(found) < count:
            part = await session.take(Room(room, 1 << 20))
            assert len(part) <= room, f"take gave {len(part)} messages for a room of {room}"
            found.extend(part)
    return found


async def ack(session, deliveries):
    await session.settle(Outcomes(list(deliveries), [], []))


async def takes(subject):
    """What was published comes, once, within the room, with its body and an open epoch."""
    session = await subject.connect()
    await subject.publish(bodies(30))
    found = await taken(session, 30, room=7)
    assert sorted(each.body for each in found) == sorted(bodies(30)), "not each message came once"
    assert all(each.epoch.open for each in found), "a message came with an epoch that is closed"
    assert all(each.attempt == 1 for each in found), "a first delivery has another attempt than 1"
    assert len({each.id for each in found}) == 30, "ids are not unique"
    await ack(session, found)
    await session.flush()
    await session.end()


async def fits(subject):
    """What is taken fits into the room's bytes, but for its last message."""
    session = await subject.connect()
    body, count = b"x" * 10_000, 0
    await subject.publish([body] * 12)
    async with asyncio.timeout(20):
        while count < 12:
            part = await session.take(Room(1000, 25_000))
            count += len(part)
            assert len(part) <= 3, f"take gave {len(part)} messages of 10 kB for a room of 25 kB"
            await ack(session, part)
    await session.flush()
    await session.end()


async def acknowledges(subject):
    """What was acknowledged and flushed does not come again; what was not does."""
    session = await subject.connect()
    await subject.publish(bodies(20))
    found = await taken(session, 20)
    done = {each.body for each in found[:10]}
    await ack(session, found[:10])
    await session.flush()
    await session.end()
    session = await subject.connect()
    again = set()
    try:
        async with asyncio.timeout(subject.patience):
            while len(again) < 10:
                again |= {each.body for each in await session.take(Room(20, 1 << 20))}
    finally:
        await session.end()
    assert again == set(bodies(20)) - done, "what comes again is not what was not acknowledged"


async def releases(subject):
    """What is given back comes again, to whoever is there."""
    session = await subject.connect()
    await subject.publish(bodies(5))
    found = await taken(session, 5)
    await session.settle(Outcomes([], list(found), []))
    await session.flush()
    await session.end()
    session = await subject.connect()
    again = set()
    try:
        async with asyncio.timeout(subject.patience):
            while again != set(bodies(5)):  # a broker that took the first session for alive sent some there once more
                again |= {each.body for each in await session.take(Room(10, 1 << 20))}
    finally:
        await session.end()


async def ends(subject):
    """An end makes the epochs stale at once, lets a waiting take return, and may be called twice."""
    session = await subject.connect()
    await subject.publish(bodies(3))
    found = await taken(session, 3)
    waiting = asyncio.ensure_future(session.take(Room(10, 1 << 20)))
    await asyncio.sleep(0.1)
    await session.end()
    assert all(each.epoch.over for each in found), "an epoch outlived its session"
    done, _ = await asyncio.wait((waiting,), timeout=5.0)
    waiting.cancel()
    assert done, "a take waits for a session that has ended"
    if waiting.exception() is None:
        assert not waiting.result(), "a session that has ended gave messages"
    else:
        assert isinstance(waiting.exception(), SessionLostError), f"take raised {waiting.exception()!r}"
    await session.end()


async def stops(subject):
    """After a stop, what was under way comes out, then nothing; and nothing is left with nobody."""
    session = await subject.connect()
    await subject.publish(bodies(50))
    found = await taken(session, 1, room=5)
    await session.stop()
    async with asyncio.timeout(60):
        while part := await session.take(Room(1000, 1 << 20)):
            found.extend(part)
    await subject.publish([b"late"])
    assert not await session.take(Room(10, 1 << 20)), "messages came after the stop"
    await ack(session, found)
    await session.flush()
    await session.end()
    session = await subject.connect()
    left = await taken(session, 51 - len(found), seconds=subject.patience)
    assert sorted(each.body for each in (*found, *left)) == sorted([*bodies(50), b"late"]), "a stop lost or repeated"
    assert all(each.attempt == 1 for each in left), "the stop has cost a delivery"
    await session.end()


async def buries(subject):
    """A dead letter is there when `forward` returns, says why, and its message does not come again."""
    session = await subject.connect()
    await subject.publish([b"bad", b"good"])
    found = await taken(session, 2)
    (bad,) = [each for each in found if each.body == b"bad"]
    await session.forward(bad, DeadLetter(reason="permanent", error="ValueError", attempts=1))
    letters = await subject.letters()
    assert [body for body, _ in letters] == [b"bad"], "the dead letter is not there"
    assert letters[0][1]["bq-reason"] == "permanent", "the dead letter does not say why"
    await session.flush()
    await session.end()
    session = await subject.connect()
    (again,) = await taken(session, 1, seconds=subject.patience)
    assert again.body == b"good", "a buried message came again"
    await session.end()


FAMILIES = {family.__name__: family for family in (takes, fits, acknowledges, releases, ends, stops, buries)}
