"""Every call of the file system fails, with each class of error, once and twice; then the crash, at every later change.

Against a model: what was confirmed is there, once and unchanged, or acknowledged, dropped by a limit, or among the dead
letters; nothing hangs, puts work afterwards, no descriptor and no lock is left.
`BATCHQUEUE_CHAOS=20000 make chaos-durable` tries so many random histories with up to five faults.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random

import pytest
from disk_faults import CHANGES, KINDS, History, Prover, Script, applies
from durable_kit import ROOT, RecordingFiles, drain, opened

from batchqueue_async.testing import run_virtual

GOLDEN = Path(__file__).parents[1] / "golden" / "durable"
CHAOS = int(os.environ.get("BATCHQUEUE_CHAOS", "0"))
pytestmark = pytest.mark.timeout(900)

SMALL = {"segment_bytes": 300, "write_buffer": 200, "memory_bytes": 500}


async def puts(history: History) -> None:
    """Every level, alone, together, at once; two rotations."""
    await history.put()
    await asyncio.gather(history.put(level="os"), history.put(2, "interval"), history.put())
    await history.put(3)


async def acknowledgements(history: History) -> None:
    """In part, out of order, given back and leased again."""
    await history.put(4)
    lease = await history.lease(3)
    await history.ack(lease, [1])
    await asyncio.sleep(0.05)
    await history.nack(lease, numbers=[0])
    await history.ack(lease, [2])
    await history.put(2)
    await history.ack(await history.lease(2))
    await asyncio.sleep(0.05)


async def dead_letters(history: History) -> None:
    """Buried, put back, and handled then."""
    await history.put(3)
    lease = await history.lease()
    await history.bury(lease, [0, 2])
    await history.ack(lease, [1])
    await history.requeue()
    await history.ack(await history.lease(1))


async def purged(history: History) -> None:
    """Buried and deleted, beside others that stay."""
    await history.put(2)
    await history.bury(await history.lease(1), [0])
    await history.purge()
    await history.bury(await history.lease(1), [0])


async def compaction(history: History) -> None:
    """A few old records among many that are settled; the room of the others is given back."""
    for count in (2, 3, 3):
        await history.put(count)
    lease = await history.lease()
    await history.ack(lease, [0, 1, 3, 4, 5, 6, 7])
    await asyncio.sleep(0.05)
    assert history.queue is not None
    history.queue.compact()
    await asyncio.sleep(0.05)
    await history.put()
    await history.ack(lease, [2])
    await history.ack(await history.lease())
    history.queue.compact()
    await asyncio.sleep(0.05)
    await history.put()


async def compacted(history: History) -> None:
    """One old record pins a segment, which is written anew without the others, in the background."""
    for _ in range(4):
        await history.put(4, size=200)
    lease = await history.lease()
    await history.ack(lease, [at for at in range(14) if at != 5])
    await asyncio.sleep(5)
    await history.nack(lease)
    await history.put()
    await history.ack(await history.lease(2))
    await asyncio.sleep(5)


async def delayed(history: History) -> None:
    """Records that wait for their time, while others come in."""
    await history.put(3)
    lease = await history.lease()
    await history.nack(lease, 5.0, [0, 1])
    await history.ack(lease, [2])
    await history.put(2)
    await asyncio.sleep(6)
    await history.ack(await history.lease(2))


async def attempts(history: History) -> None:
    """A record that comes back too often goes to the dead letters by itself."""
    await history.put(2)
    for _ in range(2):
        lease = await history.lease(1)
        history.may_die(lease)
        await history.nack(lease)
    lease = await history.lease(1)
    await asyncio.sleep(1)
    await history.ack(lease)


async def reopened(history: History) -> None:
    """Closed and opened again, with some of it settled."""
    await history.put()
    await history.put(2, "os")
    await history.close()
    await history.open()
    await history.put(2)
    await history.ack(await history.lease(2))
    await history.close()
    await history.open()
    await history.put()


async def limited(history: History) -> None:
    """More than the limit: the oldest go, and never what is leased."""
    await history.put(2)
    await history.put(2)
    await history.lease(1)
    await history.put(2)
    await history.put()


async def taken_over(history: History) -> None:
    """What is found at the opening is handled, and something is put."""
    await history.put()
    lease = await history.lease()
    await history.ack(lease, [0])
    await asyncio.sleep(0.05)


def of_format_1() -> Prover:
    """A queue that an older version has left: two of its four records are settled."""
    base = {
        ROOT / "seg-000000000007.bqs": (GOLDEN / "segment.bqs").read_bytes(),
        ROOT / "seg-000000000007.ack": (GOLDEN / "hint.ack").read_bytes(),
    }
    return Prover(taken_over, base, {102: b"beta", 103: b"gamma"}, {100: b"alpha", 101: b""}, **SMALL)


def after_a_kill() -> Prover:
    """What a kill amid a write has left: a torn frame at the end, and no footer."""
    files, promises, _ = Prover(puts, **SMALL).run({})
    moment = max(at for at, op in enumerate(files.log) if op.kind == "write" and len(op.data) > 100)
    left = files.killed(moment, torn=0.7)
    owed, _ = promises.owed(moment, power=False)
    files.log.clear()
    return Prover(taken_over, left.base, owed, **SMALL)


PROVERS = {
    "puts": lambda: Prover(puts, **SMALL),
    "acknowledgements": lambda: Prover(acknowledgements, **SMALL),
    "dead letters": lambda: Prover(dead_letters, **SMALL),
    "purged": lambda: Prover(purged, **SMALL),
    "compaction": lambda: Prover(compaction, **SMALL),
    "compacted": lambda: Prover(compacted, **{**SMALL, "segment_bytes": 3_000}),
    "delayed": lambda: Prover(delayed, **SMALL),
    "attempts": lambda: Prover(attempts, **SMALL, max_attempts=2),
    "reopened": lambda: Prover(reopened, **SMALL),
    "limited": lambda: Prover(limited, **SMALL, max_records=4, overflow="drop_oldest"),
    "format 1": of_format_1,
    "after a kill": after_a_kill,
}


def some_traced(names, traced):
    """All names, of which only some are worth the time of the coverage's tracer."""
    return [pytest.param(name, marks=[] if name in traced else [pytest.mark.untraced]) for name in names]


@pytest.mark.parametrize("name", some_traced(PROVERS, {"puts"}))
def test_d_2_3_8_22_any_call_fails_once_and_then_the_crash(name):
    """Every call, every class of error, every later moment: nothing is left to chance but what the power takes."""
    prover = PROVERS[name]()
    whole = prover.prove({})
    prover.power = 1.0 if CHAOS else 0.3
    assert whole.count > 30
    assert not whole.met
    for place, call in enumerate(whole.named, 1):
        for kind in KINDS:
            if applies(kind, call):
                assert prover.prove({place: kind}).met, (place, call, kind)


@pytest.mark.untraced
@pytest.mark.parametrize("name", PROVERS)
def test_d_2_3_8_22_any_two_calls_fail_and_then_the_crash(name):
    """The calls after a fault are those that make it good: each of them fails too."""
    prover = PROVERS[name]()
    whole = prover.run({})[0]
    reach = len(whole.named) if CHAOS else 3
    for place, call in enumerate(whole.named, 1):
        if call not in CHANGES:
            continue
        for first, second in (("EIO", "EIO"), ("ENOSPC", "ENOSPC"), ("late", "MemoryError")):
            if applies(first, call):
                for after in range(1, reach + 1):
                    prover.prove({place: first, place + after: second}, every=1 if CHAOS else 7, seed=after)


@pytest.mark.untraced
@pytest.mark.parametrize("name", PROVERS)
@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "MemoryError"])
def test_d_2_3_8_22_everything_fails_from_some_call_on_until_the_crash(name, kind):
    """A disk that does not come back: each put ends, the closing ends, and what was confirmed is there."""
    prover = PROVERS[name]()
    count = prover.run({})[0].count
    opened_at = 15
    for place in range(opened_at, count + 1, 1 if CHAOS else 8):
        prover.prove(dict.fromkeys(range(place, place + 2_000), kind), every=1 if CHAOS else 5, seed=place)


def test_d_37_a_refused_batch_that_could_not_be_cut_off_keeps_its_numbers():
    """Nothing else takes them: a record that took the first would leave the others as a part of the batch."""
    for place in range(26, 37):  # around the check of the segment behind the write of the second batch
        PROVERS["compacted"]().prove(dict.fromkeys(range(place, place + 2_000), "MemoryError"), every=1, seed=place)


LEVELS = ("always", "always", "interval", "os")


def random_script(random: Random):
    """A long history of everything that a queue can be asked for."""

    async def script(history: History) -> None:
        leases = []
        for _ in range(random.randint(4, 16)):
            action = random.choice(
                ["put", "put", "many", "gather", "lease", "lease", "ack", "ack", "nack", "delay", "bury", "requeue",
                 "purge", "compact", "sleep", "reopen"]
            )  # fmt: skip
            if action in ("put", "many", "gather"):
                count = 1 if action == "put" else random.randint(2, 6)
                await history.put(count, random.choice(LEVELS), random.randint(0, 90), atomic=action == "many")
            elif action == "lease":
                lease = await history.lease(random.randint(1, 8))
                if history.config.max_attempts is not None:
                    history.may_die(lease)
                leases.append(lease)
            elif action in ("requeue", "purge"):
                await (history.requeue() if action == "requeue" else history.purge())
            elif action == "compact" and history.queue is not None:
                history.queue.compact()
            elif action == "sleep":
                await asyncio.sleep(random.choice([0.005, 0.05, 2.0]))
            elif action == "reopen":
                leases.clear()
                await history.close()
                await history.open()
            elif leases:
                lease = leases.pop(random.randrange(len(leases)))
                chosen = [at for at in range(len(lease)) if random.random() < 0.6]
                if action == "ack":
                    await history.ack(lease, chosen)
                elif action == "bury":
                    await history.bury(lease, chosen)
                await history.nack(lease, random.choice([0.0, 1.0]) if action == "delay" else 0.0)
        await asyncio.sleep(random.choice([0, 0.05]))

    return script


OPTIONS = (
    {}, {}, {"max_attempts": 3}, {"max_records": 8, "overflow": "drop_oldest"}, {"order": "freshest"},
    {"max_bytes": 8_192, "overflow": "drop_oldest"}, {"compression": "lz4"}, {"order": "key", "key": lambda p: p[:1]},
)  # fmt: skip


@pytest.mark.untraced
def test_random_histories_with_many_faults():
    start = int(os.environ.get("BATCHQUEUE_CHAOS_SEED", "1"))
    for seed in range(start, start + (CHAOS or 60)):
        random = Random(seed)
        options = random.choice(OPTIONS)
        if "compression" in options:
            pytest.importorskip("cramjam")
        prover = Prover(random_script(Random(seed)), **{**SMALL, **options})
        first = random.randint(1, 150)
        plan = {
            first + random.choice((0, 1, 2, 3, random.randint(0, 60))): random.choice(KINDS)
            for _ in range(random.randint(0, 5))
        }
        try:
            prover.prove(plan, every=random.randint(3, 30), seed=seed)
        except BaseException as error:
            error.add_note(f"BATCHQUEUE_CHAOS_SEED={seed}")
            raise


async def many_files(history: History) -> None:
    """Groups and atomic puts in several segments, acknowledgements, and dead letters."""
    await asyncio.gather(*(history.put(size=3) for _ in range(3)))
    await history.put(3, size=3)
    lease = await history.lease(2)
    await history.bury(lease, [0])
    await history.ack(lease, [1])
    await asyncio.sleep(0.05)
    await history.put(3, size=3)
    await history.ack(await history.lease(1))
    await asyncio.sleep(0.05)


async def compacted_once(history: History) -> None:
    """A segment that was written anew: what is missing in it was settled."""
    for _ in range(4):
        await history.put(4, size=200)
    await history.ack(await history.lease(), [at for at in range(14) if at not in (5, 6)])
    await asyncio.sleep(5)


def left_behind(script: Script, *, closed: bool, **options: object) -> tuple[dict[Path, bytes], set[bytes]]:
    """A directory after this history, closed or killed; and every payload that was ever put."""
    files, promises, _ = Prover(script, **{**SMALL, **options}).run({})
    last = len(files.log) if closed else max(at for at, op in enumerate(files.log) if b"BQAEND" in op.data)
    return files.killed(last).base, set(promises.puts)


async def found_in(base: dict[Path, bytes]) -> tuple[list[bytes], list[bytes], int]:
    """What is delivered, what is among the dead letters, and how much was told as damaged or torn."""
    async with opened(RecordingFiles(base=base)) as queue:
        delivered = list((await drain(queue)).values())
        dead = [letter.payload for letter in await queue.dead_letters()] if ROOT / "dead" / "queue.id" in base else []
        report = queue.recovery
        told = queue.stats().damaged + report.damaged_records + report.torn_records + report.torn_bytes
        return delivered, dead, told


LEFT = {
    "closed": lambda: left_behind(many_files, closed=True, segment_bytes=220),
    "killed": lambda: left_behind(many_files, closed=False, segment_bytes=4_000),
    "compacted": lambda: left_behind(compacted_once, closed=True, segment_bytes=3_000),
    "compressed": lambda: left_behind(many_files, closed=True, segment_bytes=220, compression="lz4"),
}
TOLD = ("durable_records_damaged", "durable_repaired", "durable_quarantined")


@pytest.mark.parametrize("name", some_traced(LEFT, {"closed"}))
def test_d_27_one_flipped_bit_of_any_byte_costs_one_frame_at_most_and_is_told(name, caplog):
    """Of every file there is: segments with and without a footer, acknowledgements, `queue.id`, the dead letters'."""
    if name == "compressed":
        pytest.importorskip("cramjam")
    base, everything = LEFT[name]()
    kinds = {(path.parent.name, path.suffix) for path in base}
    assert {("queue", ".bqs"), ("queue", ".ack"), ("queue", ".id")} <= kinds
    assert name == "compacted" or {("dead", ".bqs"), ("dead", ".id")} <= kinds
    most = 8 if CHAOS else 1

    async def scenario() -> None:
        delivered, dead, told = await found_in(base)
        # What a frame held when it was written: 3 records, or 4 in the history that is compacted.
        frame = 4 if name == "compacted" else 3
        costly = 0
        for path, content in base.items():
            for place in range(len(content)):
                if path.suffix == ".bqs" and 64 <= place < 512 and place % 64:
                    continue  # zeros between the copies of the header: a sample of them
                for bit in range(most):
                    hurt = bytearray(content)
                    hurt[place] ^= 1 << ((place + bit) % 8)
                    caplog.clear()
                    now, now_dead, now_told = await found_in({**base, path: bytes(hurt)})
                    where = (path.name, place)
                    assert len(now) == len(set(now)), where
                    assert set(now) | set(now_dead) <= everything, where
                    missing = (set(delivered) - set(now)) | (set(dead) - set(now_dead))
                    assert len(missing) <= (frame if path.suffix == ".bqs" else 0), (where, missing)
                    costly += bool(missing)
                    if missing:
                        assert any(event in caplog.text for event in TOLD), where
                        assert path.parent.name == "dead" or now_told > told, where
        assert costly > 50, "bits that cost nothing prove nothing"

    with caplog.at_level("INFO"):
        run_virtual(scenario(), timeout=None)
