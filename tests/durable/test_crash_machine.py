"""Crashes, everywhere: random work on a recording file system, then every prefix of its writes is recovered from."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from durable_kit import ROOT, OneFailure, RecordingFiles, opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchqueue_async.durable.disk import acklog
from batchqueue_async.errors import DiskFullError, DurableQueueError
from batchqueue_async.testing import VirtualTimeLoop, run_virtual

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from batchqueue_async.durable import DurableQueue, Lease
    from batchqueue_async.leases.lease import Record

SMALL = {"segment_bytes": 700, "memory_bytes": 400, "memory_blocks": 4, "write_buffer": 200}
# The profile `chaos` looks for thousands of times longer.
CHAOS = settings.get_profile("chaos").max_examples if settings.get_current_profile_name() == "chaos" else 0


class Attempts:
    """How often each record was leased, as far as a crash at any moment may show it.

    A lease is asked for at one moment and seen at a later one, and the disk knows of it in between. `least` counts what
    was seen by then, `most` what was asked for.
    """

    def __init__(self) -> None:
        self._asked: dict[bytes, list[tuple[int, int]]] = {}
        self._seen: dict[bytes, list[tuple[int, int]]] = {}

    def least(self, payload: bytes, moment: int) -> int:
        return max((count for at, count in self._seen.get(payload, ()) if at <= moment), default=0)

    def most(self, payload: bytes, moment: int) -> int:
        return max((count for at, count in self._asked.get(payload, ()) if at <= moment), default=0)

    def note(self, payload: bytes, count: int, asked: int, seen: int) -> None:
        self._asked.setdefault(payload, []).append((asked, count))
        self._seen.setdefault(payload, []).append((seen, count))

    def crash(self, moment: int, *, power: bool) -> None:
        """From here on there is another log. The power may take notes of leases, a kill may not."""
        self._asked = {payload: [(0, self.most(payload, moment))] for payload in self._asked}
        self._seen = {} if power else {payload: [(0, self.least(payload, moment))] for payload in self._seen}


class Work:
    """A queue on a recording file system, and what may be expected of it after a crash at any point."""

    def __init__(self, files: RecordingFiles, **options: Any) -> None:
        self.files = files
        self.options = {**SMALL, **options}
        self.put: set[bytes] = set()
        self.confirmed: dict[int, tuple[bytes, int, bool]] = {}  # seq -> payload, moment, always
        self.settled: dict[bytes, int] = {}  # payload -> the moment from which it may be gone
        self.batches: list[set[bytes]] = []
        self.number = 0
        self.dead: dict[bytes, int] = {}
        self.attempts = Attempts()
        self.moved: int | None = (
            None  # since when frames have moved: what is known of them follows some milliseconds later
        )
        self.seen: dict[int, bytes] = {}  # every number under which something was ever delivered or confirmed
        self.leases: list[Lease] = []
        self.dropped: set[int] = set()
        self.queue: DurableQueue | None = None

    def now(self) -> int:
        return len(self.files.log)

    def payloads(self, count: int, size: int) -> list[bytes]:
        self.number += 1
        batch = self.number
        made = [b"%d/%d/" % (batch, at) + bytes((batch * 7 + at + n) % 256 for n in range(size)) for at in range(count)]
        self.put |= set(made)
        return made

    async def step(self, action: str, count: int, size: int, level: str) -> None:
        queue = self.queue
        if queue is None:
            self.queue = await opened(self.files, **self.options)
            self._watch_drops(self.queue)
            return
        before, moves = self.now(), queue._state.moves
        try:
            await self._act(queue, action, count, size, level)
        except DiskFullError:
            assert queue.stats().leased, "no room, and something could have been dropped"
        except DurableQueueError:
            assert self.files.fault is not None, "it failed without a reason"
        else:
            if action in ("put", "gather", "put_many") and queue.config.max_records is not None:
                # A crash may have brought back what was dropped; the next put makes room again.
                assert queue.stats().records <= queue.config.max_records
        await asyncio.sleep(0.006)
        if queue._state.moves > moves and self.moved is None:
            self.moved = before

    def _watch_drops(self, queue: DurableQueue) -> None:
        """What the queue drops may be gone from then on; it never drops what is leased."""
        state = queue._state
        settle = state.settle_range

        def settle_range(entry: Any, kind: int, low: int, high: int) -> int:
            new = settle(entry, kind, low, high)
            if kind == acklog.DROPPED:
                assert all(not low <= seq < high for run in state.outstanding() for seq in range(run.seq, run.end))
                for seq in range(low, high):
                    if seq in self.seen:
                        self.settled.setdefault(self.seen[seq], self.now())
                    self.dropped.add(seq)
            return new

        state.settle_range = settle_range

    async def _act(self, queue: DurableQueue, action: str, count: int, size: int, level: str) -> None:
        if action == "put":
            made = self.payloads(1, size)
            self._confirm([await queue.put(made[0], durability=level)], made, level)
        elif action == "gather":
            made = self.payloads(count, size)
            self._confirm(await asyncio.gather(*(queue.put(p, durability=level) for p in made)), made, level)
        elif action == "put_many":
            made = self.payloads(count, size)
            self.batches.append(set(made))
            self._confirm(await queue.put_many(made, durability=level), made, level)
        elif action == "lease":
            asked, ready = self.now(), queue.stats().ready
            lease = await queue.lease(count, wait=0)
            assert lease or not ready or self.most_attempts, "nothing was leased, and something is ready"
            if lease:
                for record in lease.records:
                    assert record.payload in self.put
                    self._leased_again(record, asked)
                    self.attempts.note(record.payload, record.attempts, asked, self.now())
                    self.confirmed.setdefault(record.seq, (record.payload, 1 << 60, False))
                    assert self.confirmed[record.seq][0] == record.payload
                    assert self.seen.setdefault(record.seq, record.payload) == record.payload
                self.leases.append(lease)
        elif action == "break":
            self.files.fault = OneFailure()
        elif action == "close":
            self.leases.clear()
            self.queue = None
            await queue.close()
        elif self.leases:
            lease = self.leases.pop(size % len(self.leases))
            chosen = [record for record in lease.records if size % 2 or (record.seq + size) % 3]
            seqs = [record.seq for record in chosen]
            if action == "nack":
                await lease.nack()
            else:
                for record in chosen:
                    self.settled.setdefault(record.payload, self.now())
                if action == "ack":
                    await lease.ack(seqs)
                else:
                    await lease.dead_letter("no use", seqs)
                    self.dead |= dict.fromkeys((record.payload for record in chosen), self.now())
                await lease.nack()

    @property
    def most_attempts(self) -> int | None:
        return self.options.get("max_attempts")

    def _leased_again(self, record: Record, moment: int, *, unsure: bool = False) -> None:
        """It counts every lease that was seen, and none that was not asked for."""
        least = 0 if unsure else self.attempts.least(record.payload, moment)
        assert self.most_attempts is None or record.attempts <= self.most_attempts, "leased more often than it may be"
        if self.most_attempts is not None:
            # Otherwise a lease is noted some milliseconds after it was seen.
            assert record.attempts > least, "a lease that was seen does not count"
        assert record.attempts <= self.attempts.most(record.payload, moment) + 1, "a lease counts twice"

    def _may_be_given_up(self, payload: bytes, moment: int) -> bool:
        return self.most_attempts is not None and self.attempts.most(payload, moment) >= self.most_attempts

    def _confirm(self, seqs: Any, made: list[bytes], level: str) -> None:
        moment = self.now()
        for seq, payload in zip(seqs, made, strict=True):
            if seq in self.dropped:
                self.settled.setdefault(payload, moment)
            assert seq not in self.confirmed, "a sequence number was given twice"
            assert self.seen.setdefault(seq, payload) == payload, "a number that was delivered is given again"
            self.confirmed[seq] = (payload, moment, level == "always")

    async def check(self, files: RecordingFiles, moment: int, *, power: bool) -> None:
        """Recover from what a crash at `moment` has left, and compare what is delivered with what was promised."""
        delivered: dict[int, bytes] = {}
        async with opened(files, **self.options) as queue:
            before = queue.stats().records
            while lease := await queue.lease(5, wait=0):
                for record in lease.records:
                    assert record.seq not in delivered
                    unsure = power or (self.moved is not None and self.moved <= moment)
                    self._leased_again(record, moment, unsure=unsure)
                    delivered[record.seq] = record.payload
            # What was leased as often as it may be is on its way to the dead letters.
            await asyncio.sleep(1)
            stats = queue.stats()
            assert stats.records == len(delivered), (before, stats)
            assert stats.recovered == stats.records + stats.damaged + stats.dead_lettered
            letters = await queue.dead_letters(10_000) if "dead" in names(files) else []
        dead = {letter.payload for letter in letters}
        given_up = {letter.payload for letter in letters if letter.reason == "max_attempts"}
        for letter in letters:
            assert letter.payload in self.put, "a dead letter that was not put"
            if letter.reason == "max_attempts":
                assert letter.attempts == self.most_attempts
                assert self._may_be_given_up(letter.payload, moment), "given up before its last attempt"
            else:
                assert self.settled.get(letter.payload, 1 << 60) <= moment
        got = set(delivered.values())
        assert len(got) == len(delivered)
        for seq, payload in delivered.items():
            assert payload in self.put, "something was delivered that was not put"
            if seq in self.confirmed and self.confirmed[seq][1] < 1 << 60:
                assert self.confirmed[seq][0] == payload, "another payload under this number"
        for seq, (payload, confirmed_at, always) in self.confirmed.items():
            if confirmed_at <= moment and (always or not power) and self.settled.get(payload, 1 << 60) > moment:
                there = delivered.get(seq) == payload or payload in given_up
                assert there, f"confirmed and lost: {seq} at {moment}"
        for payload, moment_dead in self.dead.items():
            if moment_dead <= moment:
                assert payload in got | dead, "neither in the queue nor among the dead letters"
        for batch in self.batches:
            if batch & got:
                gone = {payload for payload in batch if self.settled.get(payload, 1 << 60) <= moment}
                assert batch <= got | gone | given_up, "a part of a put_many"


def names(files: RecordingFiles) -> set[str]:
    return set(files.names(ROOT))


ACTIONS = st.sampled_from(
    ["put", "put", "gather", "put_many", "put_many", "lease", "lease", "ack", "ack", "nack", "dead", "close", "break"]
)
STEPS = st.lists(
    st.tuples(ACTIONS, st.integers(1, 6), st.integers(0, 120), st.sampled_from(["always", "always", "interval", "os"])),
    min_size=1,
    max_size=25,
)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    run_virtual(coroutine)


DROPPING = {"max_records": 8, "overflow": "drop_oldest"}
LIMITS = st.sampled_from(
    [
        {}, {}, {"order": "freshest"}, DROPPING, {**DROPPING, "order": "freshest"}, {"max_attempts": 1},
        {"max_attempts": 2}, {"max_attempts": 3, "order": "freshest"}, {**DROPPING, "max_attempts": 2},
    ]
)  # fmt: skip


@pytest.mark.untraced
@given(steps=STEPS, seed=st.integers(0, 1 << 30), compression=st.sampled_from(["none", "none", "lz4"]), limits=LIMITS)
@settings(max_examples=CHAOS or 50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_prefix_of_every_run_recovers(steps, seed, compression, limits):
    if compression != "none":
        pytest.importorskip("cramjam")

    async def scenario() -> None:
        work = Work(RecordingFiles(), compression=compression, **limits)
        for step in [("open", 1, 0, "always"), *steps]:
            await work.step(*step)
        random = Random(seed)
        files = work.files
        for moment in range(len(files.log) + 1):
            await work.check(files.killed(moment, torn=random.random()), moment, power=False)
            await work.check(files.all_unsynced_lost(moment), moment, power=True)
            await work.check(files.lost_power(moment, random), moment, power=True)

    run(scenario())


@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_drops_before_a_segment_is_abandoned_are_not_in_the_way_of_the_next(order):
    async def scenario() -> None:
        work = Work(RecordingFiles(), **DROPPING, order=order)
        for action, count, size, level in [
            ("open", 1, 0, "always"),
            ("gather", 3, 66, "always"),
            ("break", 1, 0, "always"),
            ("gather", 1, 0, "interval"),
            ("put_many", 7, 0, "always"),  # drops the first three, and then their segment is found bad
            *[("gather", 1, 0, "always")] * 9,
        ]:
            await work.step(action, count, size, level)
            queue = work.queue
            assert queue is not None
            assert all(extent.first < extent.stop for extent in queue._state.backlog.extents)

    run(scenario())


class CrashMachine(RuleBasedStateMachine):
    """The queue lives through crash after crash; between them it has to behave."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop(time_limit=3600.0)
        self.work = Work(RecordingFiles())

    @initialize(limits=LIMITS)
    def limit(self, limits):
        self.work.options |= limits

    def step(self, *arguments: Any) -> None:
        self.loop.run_until_complete(self.work.step(*arguments))

    @rule(count=st.integers(1, 8), size=st.integers(0, 150), level=st.sampled_from(["always", "interval", "os"]))
    def put_many(self, count, size, level):
        self.step("put_many", count, size, level)

    @rule(count=st.integers(1, 5), size=st.integers(0, 150), level=st.sampled_from(["always", "interval", "os"]))
    def put(self, count, size, level):
        self.step("gather", count, size, level)

    @rule(count=st.integers(1, 20))
    def lease(self, count):
        self.step("lease", count, 0, "always")

    @precondition(lambda self: self.work.leases)
    @rule(action=st.sampled_from(["ack", "nack", "dead"]), size=st.integers(0, 100))
    def settle(self, action, size):
        self.step(action, 1, size, "always")

    @rule()
    def break_the_next_sync(self):
        self.step("break", 1, 0, "always")

    @rule()
    def close(self):
        self.step("close", 1, 0, "always")

    @rule(seed=st.integers(0, 1 << 20), power=st.booleans())
    def crash(self, seed, power):
        work = self.work
        moment = work.now()
        files = work.files.lost_power(moment, Random(seed)) if power else work.files.snapshot()
        self.loop.run_until_complete(work.check(files.snapshot(), moment, power=power))
        if power:
            # What weaker durability has promised ends here.
            work.confirmed = {seq: entry for seq, entry in work.confirmed.items() if entry[2]}
        work.confirmed = {seq: (entry[0], 0, entry[2]) for seq, entry in work.confirmed.items() if entry[1] < 1 << 60}
        work.attempts.crash(moment, power=power or work.moved is not None)
        work.moved = None
        work.settled = dict.fromkeys(work.settled, 0)
        work.dead = dict.fromkeys(work.dead, 0)
        work.batches.clear()
        work.leases.clear()
        work.queue = None
        work.files = files

    @invariant()
    def counts_add_up(self):
        if self.work.queue is not None:
            stats = self.work.queue.stats()
            dropped = sum(count for reason, count in stats.dropped.items() if reason != "newest")
            done = stats.acked + stats.dead_lettered + dropped + stats.damaged
            assert stats.recovered + stats.put == done + stats.records
            assert stats.ready >= 0
            assert stats.disk_bytes >= 0

    def teardown(self) -> None:
        if self.work.queue is not None:
            self.loop.run_until_complete(self.work.queue.close())
        self.loop.close()


CrashMachine.TestCase.settings = settings(max_examples=CHAOS or 60, stateful_step_count=40, deadline=None)
TestCrashMachine = CrashMachine.TestCase
TestCrashMachine.pytestmark = [pytest.mark.untraced]
