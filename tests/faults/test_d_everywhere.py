"""Each call of the file system fails, with each class of error, once and twice; then the crash, at every later change.

Against a model: what was confirmed is there, once and unchanged, or acknowledged; nothing hangs; puts work afterwards.
`BATCHQUEUE_CHAOS=20000 make chaos-durable` tries so many random histories with up to five faults.
"""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import pytest
from durable_kit import RecordingFiles, drain, opened

from batchqueue_async.errors import BatchQueueError
from batchqueue_async.testing import run_virtual

if TYPE_CHECKING:
    from pathlib import Path

CALLS = (
    "write",
    "sync",
    "create",
    "sync_directory",
    "truncate",
    "replace",
    "unlink",
    "append",
    "open_append",
    "linked",
)
NUMBERS = {
    errno.errorcode[number]: number for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ESTALE)
}
SMALL = {"segment_bytes": 500, "write_buffer": 300, "memory_bytes": 2_000, "overflow": "reject"}


class FaultyFiles(RecordingFiles):
    """Fails the calls of a plan: which call, counted over all that can fail, and how; `short` writes a part of it."""

    plan: dict[int, str]
    count = 0

    def linked(self, descriptor: int) -> bool:
        self._check("linked", self.descriptors[descriptor][1])
        return super().linked(descriptor)

    def _check(self, call: str, path: Path) -> None:
        super()._check(call, path)
        if call not in CALLS or not self.armed:
            return
        self.count += 1
        kind = self.plan.get(self.count)
        if kind is not None and kind != "short":
            self.met.append(self.count)
            raise (
                MemoryError if kind == "MemoryError" else OSError(NUMBERS[kind], os.strerror(NUMBERS[kind]), str(path))
            )

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        if self.armed and self.plan.get(self.count + 1) == "short" and len(data) > 1:
            # A part of it is there when the error comes, as on a disk that fills up.
            self.count += 1
            node, path, _ = self.descriptors[descriptor]
            part = bytes(data)[: len(data) // 2]
            self._record("write", path, node, len(self.nodes[node]), part)
            self.nodes[node] += part
            self.met.append(self.count)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().write(descriptor, data)

    armed = False

    def arm(self, plan: dict[int, str]) -> None:
        self.plan, self.met, self.armed = plan, [], True


@dataclass
class Model:
    """What the history was told, and when."""

    confirmed: dict[int, tuple[bytes, int, str]] = field(default_factory=dict)
    acked: dict[int, int] = field(default_factory=dict)
    put: set[bytes] = field(default_factory=set)


async def history(files: FaultyFiles, model: Model, seed: int | None = None) -> None:
    """Puts at every level, alone and together, a rotation, a lease and its acknowledgement, and a close."""
    random = Random(seed)
    queue = opened(files, durability="always", sync_interval=0.05, **SMALL)

    async def put(name: bytes, level: str, count: int) -> None:
        payloads = [b"%s/%d/" % (name, at) + bytes(60) for at in range(count)]
        model.put |= set(payloads)
        try:
            async with asyncio.timeout(30):
                seqs = (
                    [await queue.put(payloads[0], level)] if count == 1 else list(await queue.put_many(payloads, level))
                )
        except (BatchQueueError, MemoryError):
            return
        for seq, payload in zip(seqs, payloads, strict=True):
            assert seq not in model.confirmed, "a number was given twice"
            model.confirmed[seq] = (payload, len(files.log), level)

    async with queue:
        for step in range(3 if seed is None else random.randint(2, 8)):
            levels = ["always", "interval", "os"]
            if seed is not None:
                random.shuffle(levels)
            await asyncio.gather(
                put(b"a%d" % step, levels[0], 1),
                put(b"b%d" % step, levels[1], 2),
                put(b"c%d" % step, levels[2], 1),
                put(b"d%d" % step, levels[0], 1 if seed is None else random.randint(1, 6)),
            )
            lease = await queue.lease(2, wait=0)
            for record in lease.records:
                assert record.payload in model.put
                if record.seq in model.confirmed:
                    assert model.confirmed[record.seq][0] == record.payload
                model.acked.setdefault(record.seq, len(files.log))
            await lease.ack()
            await asyncio.sleep(0.06)


async def check(files: RecordingFiles, model: Model, moment: int, *, power: bool) -> None:
    async with asyncio.timeout(60):
        async with opened(files, **SMALL) as queue:
            stats = queue.stats()
            found = await drain(queue)
            assert stats.records == len(found) + queue.stats().damaged
            assert set(found.values()) <= model.put
            for seq, (payload, at, level) in model.confirmed.items():
                owed = at <= moment and (level == "always" or not power) and model.acked.get(seq, 1 << 60) > moment
                if owed:
                    assert found.get(seq) == payload, f"confirmed at {at} and lost at {moment}: {seq}"
            fresh = await queue.put(b"and on it goes")
            for seq, (_, at, level) in model.confirmed.items():
                assert fresh != seq or at > moment or (power and level != "always"), "a number was given twice"


async def one(plan: dict[int, str], *, seed: int | None = None, every: int = 1) -> int:
    """A history with this plan, and a crash at every `every`th change after the first fault; how many were tried."""
    files, model = FaultyFiles(), Model()
    files.arm(plan)
    with suppress(BatchQueueError, MemoryError):
        # It may not open, or not close in order: what was confirmed is owed all the same.
        await history(files, model, seed)
    files.armed = False
    random = Random(len(files.log))
    tried = 0
    for moment in range(random.randrange(every), len(files.log) + 1, every):
        await check(files.killed(moment, torn=random.random()), model, moment, power=False)
        await check(files.all_unsynced_lost(moment), model, moment, power=True)
        await check(files.lost_power(moment, random), model, moment, power=True)
        tried += 3
    return tried


def calls_of_a_history() -> int:
    files = FaultyFiles()
    files.arm({})
    run_virtual(history(files, Model()))
    return files.count


KINDS = [*NUMBERS, "MemoryError", "short"]


@pytest.mark.parametrize("kind", KINDS)
def test_d_2_3_8_22_any_call_fails_once_and_then_the_crash(kind):
    async def scenario() -> None:
        for place in range(1, calls_of + 1):
            await one({place: kind}, every=9)

    calls_of = calls_of_a_history()
    assert calls_of > 40
    run_virtual(scenario())


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_d_2_3_8_22_any_two_calls_fail_and_then_the_crash(kind):
    async def scenario() -> None:
        for place in range(1, calls_of + 1):
            # The next calls are those that make good what the first fault has broken: all pairs of them.
            for after in (1, 2, 3, 5):
                await one({place: kind, place + after: "EIO"}, every=37)

    calls_of = calls_of_a_history()
    run_virtual(scenario())


def test_random_histories_with_many_faults():
    count = int(os.environ.get("BATCHQUEUE_CHAOS", "60"))
    start = int(os.environ.get("BATCHQUEUE_CHAOS_SEED", "1"))

    async def scenario(seed: int) -> None:
        random = Random(seed)
        first = random.randint(1, 120)
        plan = {
            first + random.choice((0, 1, 2, 3, random.randint(0, 60))): random.choice(KINDS)
            for _ in range(random.randint(1, 5))
        }
        await one(plan, seed=seed, every=random.randint(5, 40))

    for seed in range(start, start + count):
        try:
            run_virtual(scenario(seed))
        except BaseException as error:
            error.add_note(f"BATCHQUEUE_CHAOS_SEED={seed}")
            raise


def test_one_flipped_bit_of_any_byte_costs_one_frame_at_most():
    async def scenario() -> None:
        files = RecordingFiles()
        async with opened(files, segment_bytes=700) as queue:
            for at in range(6):
                await queue.put_many([b"%d/%d" % (at, one) + bytes(40) for one in range(3)])
            lease = await queue.lease(2)
            await lease.ack()
            await asyncio.sleep(0.05)
        base = files.snapshot().base
        everything = {b"%d/%d" % (at, one) + bytes(40) for at in range(6) for one in range(3)}
        async with opened(RecordingFiles(base=base)) as queue:
            owed = set((await drain(queue)).values())
        assert len(owed) == 16
        for path, content in base.items():
            for place in range(len(content)):
                hurt = bytearray(content)
                hurt[place] ^= 1 << (place % 8)
                async with opened(RecordingFiles(base={**base, path: bytes(hurt)})) as queue:
                    found = list((await drain(queue)).values())
                    assert len(found) == len(set(found))
                    assert set(found) <= everything
                    missing = owed - set(found)
                    assert len(missing) <= 3
                    assert not missing or (
                        path.suffix == ".bqs" and queue.stats().damaged + queue.recovery.damaged_records >= len(missing)
                    )

    run_virtual(scenario())
