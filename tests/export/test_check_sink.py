"""The conformance suite of sinks: a sound sink passes, and each that breaks one rule on purpose fails by its name."""

from __future__ import annotations

import asyncio
import warnings

import pytest
from export_kit import Destination

import batchqueue_async as bq
from batchqueue_async.sinks.base import SendResult, SinkNeeds
from batchqueue_async.sinks.conformance import SinkChecks
from batchqueue_async.sinks.memory import MemorySink, MemoryTransaction
from batchqueue_async.testing import check_sink

pytestmark = pytest.mark.real_time


class World:
    """What a destination holds, whatever sinks come and go."""

    def __init__(self):
        self.memory = MemorySink()
        self.staged = {}
        self.published = set()


class Sound:
    """A sink that can do everything, and keeps to every rule."""

    concurrent = True
    needs = SinkNeeds(idempotent=True)

    def __init__(self, world):
        self.world = world
        self.memory = world.memory
        self.is_open = False

    async def open(self):
        self.is_open = True
        if self.memory._turn is None:
            await self.memory.open()

    async def send(self, batch):
        await asyncio.sleep(0)
        bad = {place: bq.PermanentError("odd") for place, record in enumerate(batch) if record.get("bad")}
        self.memory.keep([record for place, record in enumerate(batch) if place not in bad])
        return SendResult(rejected=bad) if bad else None

    async def send_keyed(self, batch, keys):
        return await self.memory.send_keyed(batch, keys)

    def prepare(self, batch, keys):
        return list(batch)

    async def send_prepared(self, prepared):
        return await self.send(prepared)

    async def begin(self, key):
        return await self.memory.begin(key)

    def stage(self, attempt):
        return Staged(self.world, attempt)

    async def publish(self, key, attempts):
        if key in self.world.published:
            return False
        self.world.published.add(key)
        for attempt in attempts:
            self.memory.keep(self.world.staged.pop(attempt, []))
        return True

    async def discard(self, key):
        self.world.staged = {attempt: rows for attempt, rows in self.world.staged.items() if attempt.key != key}

    async def close(self):
        self.is_open = False


class Staged:
    concurrent = False

    def __init__(self, world, attempt):
        self.rows = world.staged.setdefault(attempt, [])

    async def open(self): ...

    async def send(self, batch):
        self.rows.extend(batch)

    async def close(self): ...


async def run(kind, **options):
    world = World()

    async def read():
        return world.memory.records

    def bad(number):
        return {"id": number, "bad": True}

    await check_sink(lambda: kind(world), **({"read": read, "bad": bad, "timeout": 5.0} | options))


async def test_a_sound_sink_passes_and_every_rule_is_looked_at():
    away = type("Away", (Sound,), {"open": _raising(ConnectionRefusedError())})
    await run(Sound, away=lambda: away(World()))
    world = World()
    checks = SinkChecks(lambda: Sound(world), record=lambda number: {"id": number})
    await checks.run()
    assert checks.found == []
    assert {rule for _, rule, *_ in BROKEN} | {"away"} == set(checks.rules)


def _raising(error):
    async def call(*_):
        raise error

    return call


# --- sinks that break one rule


class NoClose:
    def __init__(self, world): ...

    async def open(self): ...

    async def send(self, batch): ...


class NotAsync(Sound):
    def send(self, batch):
        self.memory.keep(batch)


class Undecided(Sound):
    concurrent = None


class Needy(Sound):
    needs = {"ordering": "key"}  # noqa: RUF012


class ClosesOnce(Sound):
    async def close(self):
        if not self.is_open:
            raise RuntimeError("closed already")
        self.is_open = False


class OpensOnce(Sound):
    opened = False

    async def open(self):
        if self.opened:
            raise RuntimeError("opened already")
        self.opened = True
        await super().open()


class FailsItsCheck(Sound):
    async def check(self):
        raise bq.ConfigError("no such table")


class LeavesATask(Sound):
    async def open(self):
        await super().open()
        self.task = asyncio.create_task(asyncio.sleep(60), name="pings")


class Loses(Sound):
    async def send(self, batch):
        await super().send(batch[:-1])


class WritesAtClose(Sound):
    def __init__(self, world):
        super().__init__(world)
        self.kept = []

    async def send(self, batch):
        self.kept += batch

    async def close(self):
        self.memory.keep(self.kept)
        self.kept = []


class Changes(Sound):
    async def send(self, batch):
        await super().send(batch)
        batch.pop()


class Returns(Sound):
    async def send(self, batch):
        await super().send(batch)
        return len(batch)


class MiscountsRejected(Sound):
    async def send(self, batch):
        await super().send(batch)
        return SendResult(rejected={len(batch): bq.PermanentError("off by one")})


class RejectsWithText(Sound):
    async def send(self, batch):
        await super().send(batch)
        return SendResult(rejected={0: "bad"})


class Hangs(Sound):
    async def send(self, batch):
        await asyncio.Event().wait()


class RefusesAll(Sound):
    async def send(self, batch):
        if any(record.get("bad") for record in batch):
            return SendResult(rejected=dict.fromkeys(range(len(batch)), bq.PermanentError("one is odd")))
        return await super().send(batch)


class CallsItAnOutage(Sound):
    async def send(self, batch):
        if any(record.get("bad") for record in batch):
            raise bq.RetryableError("try again")
        return await super().send(batch)


class NamesAnother(Sound):
    async def send(self, batch):
        if any(record.get("bad") for record in batch):
            raise bq.PermanentError("odd", culprits=[0])
        return await super().send(batch)


class WritesHalf(Sound):
    async def send(self, batch):
        result = await super().send(batch)
        if result is not None:
            raise bq.PermanentError("odd")


class PreparesOne(Sound):
    prepared = None

    def prepare(self, batch, keys):
        self.prepared = list(batch)
        return self

    async def send_prepared(self, prepared):
        await super().send(self.prepared)


class PreparesOnTheLoop(Sound):
    def prepare(self, batch, keys):
        asyncio.get_running_loop()
        return list(batch)


class Repeats(Sound):
    async def send_keyed(self, batch, keys):
        await self.send(batch)


class LosesKeyed(Sound):
    needs = SinkNeeds()

    async def send_keyed(self, batch, keys):
        return None


class EatsKeys(Sound):
    async def send_keyed(self, batch, keys):
        await super().send_keyed(batch, keys)
        keys.clear()


class OneAtATime(Sound):
    busy = False

    async def send(self, batch):
        if self.busy:
            raise RuntimeError("one at a time")
        self.busy = True
        try:
            await asyncio.sleep(0.001)
            return await super().send(batch)
        finally:
            self.busy = False


class LosesOverlapping(Sound):
    batch = None

    async def send(self, batch):
        self.batch = batch
        await asyncio.sleep(0.001)
        return await super().send(self.batch)


class BreaksWhenCancelled(Sound):
    broken = False

    async def send(self, batch):
        if self.broken:
            return None
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.broken = True
            raise
        return await super().send(batch)


class TranslatesCancelling(Sound):
    async def send(self, batch):
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            raise bq.RetryableError("broken off") from None
        return await super().send(batch)


class ShowsAtOnce(Sound):
    async def begin(self, key):
        found = await super().begin(key)
        if found is not None:
            found.send = self.send
        return found


class ForgetsBatches(Sound):
    async def begin(self, key):
        self.memory.delivered.clear()
        return await super().begin(key)


class NotesWhatIsUndone(Sound):
    async def begin(self, key):
        found = await super().begin(key)
        self.memory.delivered[key.source] = key.number
        return found


class Unordered(Sound):
    async def begin(self, key):
        if self.memory.delivered.get(key.source, -1) >= key.number:
            return None
        turn = asyncio.Lock()
        await turn.acquire()
        return MemoryTransaction(self.memory, key, turn)


class PublishesTwice(Sound):
    async def publish(self, key, attempts):
        self.world.published.clear()
        kept = {attempt: list(self.world.staged.get(attempt, [])) for attempt in attempts}
        done = await super().publish(key, attempts)
        self.world.staged |= kept
        return done


class PublishesAll(Sound):
    async def publish(self, key, attempts):
        return await super().publish(key, list(self.world.staged))


class ShowsWhatIsStaged(Sound):
    def stage(self, attempt):
        return Sound(self.world)


BROKEN = [
    (NoClose, "shape", "it needs async"),
    (NotAsync, "shape", r"send\(\) is not async"),
    (Undecided, "shape", "concurrent is None"),
    (Needy, "shape", "needs is not a SinkNeeds"),
    (ClosesOnce, "life", "closed already"),
    (OpensOnce, "life", "opened already"),
    (FailsItsCheck, "life", "no such table"),
    (LeavesATask, "life", r"after close\(\) tasks are left: pings"),
    (Loses, "sends", "arrived"),
    (WritesAtClose, "sends", "1 records were sent, 0 arrived"),
    (Changes, "sends", "has changed"),
    (Returns, "sends", "send returned int"),
    (MiscountsRejected, "sends", "the index 1 of rejected is not in the batch"),
    (RejectsWithText, "sends", "rejected holds str"),
    (Hangs, "sends", "was not over within"),
    (RefusesAll, "records", "rejected says"),
    (CallsItAnOutage, "records", "raised RetryableError"),
    (NamesAnother, "records", r"culprits says \[0\]"),
    (WritesHalf, "records", "the batch was refused as a whole, 4 arrived"),
    (PreparesOne, "prepare", "only 4 are different"),
    (PreparesOnTheLoop, "prepare", "no running event loop"),
    (Repeats, "keys", "6 arrived"),
    (LosesKeyed, "keys", "0 arrived"),
    (EatsKeys, "keys", "have changed"),
    (OneAtATime, "overlap", "one at a time|ExceptionGroup"),
    (LosesOverlapping, "overlap", "only 2 are different"),
    (BreaksWhenCancelled, "cancelling", "nothing arrives any more"),
    (TranslatesCancelling, "cancelling", "a cancelled send raised RetryableError"),
    (ShowsAtOnce, "transactions", "2 records were rolled back, 2 arrived"),
    (ForgetsBatches, "transactions", "takes a batch again"),
    (NotesWhatIsUndone, "transactions", "in which was rolled back"),
    (Unordered, "transactions", "does not wait"),
    (PublishesTwice, "staging", "takes a batch again"),
    (PublishesAll, "staging", "4 of 6 staged records were published, 6 arrived"),
    (ShowsWhatIsStaged, "staging", "staged and not published, 6 arrived"),
]


@pytest.mark.parametrize(("kind", "rule", "words"), BROKEN, ids=[kind.__name__ for kind, *_ in BROKEN])
async def test_a_broken_sink_fails_by_the_rules_name(kind, rule, words):
    with pytest.raises(AssertionError, match=f"- {rule}: .*({words})"):
        await run(kind, rules=[rule], timeout=0.5)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (bq.PermanentError("connection refused"), "PermanentError gives records up"),
        (bq.TooLargeError("connection refused"), "TooLargeError gives records up"),
        (KeyError("connection"), "KeyError is not known to be an outage"),
        (None, "open and send raised nothing"),
    ],
)
async def test_an_outage_that_gives_records_up_is_named(error, words):
    with pytest.raises(AssertionError, match=f"away: .*{words}"):
        await check_sink(Destination, away=lambda: Destination(answer=lambda _: error))


async def test_an_outage_that_is_one_passes():
    for error in (ConnectionRefusedError(), TimeoutError(), bq.RetryableError("down"), bq.AuthError("who?")):
        await check_sink(Destination, away=lambda error=error: Destination(opening=[error]), rules=["away"])


async def test_a_sink_that_does_not_say_whether_it_is_concurrent_is_warned_of():
    class Silent:
        async def open(self): ...

        async def send(self, batch): ...

        async def close(self): ...

    with pytest.warns(UserWarning, match="Silent does not say whether its sends may overlap"):
        await check_sink(Silent)
    Silent.concurrent = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await check_sink(Silent)


async def test_a_rule_that_there_is_not_is_refused():
    with pytest.raises(bq.ConfigError, match="no rule 'sparkle'; the rules are shape, life"):
        await check_sink(Destination, rules=["sparkle"])
