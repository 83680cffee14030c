"""Faults at the file seam, and histories to meet them in: what a durable queue has promised, and whether it is kept.

A plan says which calls of a history fail, and how. Every call of the seam counts, those that only read as well. What a
crash at any later moment leaves is opened, and compared with what the history was promised until then.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from durable_kit import ROOT, InlineRunner, Op, RecordingFiles

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.durable.disk import acklog
from batchqueue_async.errors import BatchQueueError, DiskFullError
from batchqueue_async.testing import run_virtual

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from batchqueue_async.durable import Lease

ERRORS = {
    errno.errorcode[number]: number
    for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ESTALE, errno.EACCES)
}
# `late`: the change is made, and then the error comes. `short`: a write takes half, and says so. `torn`: it takes half
# and fails.
KINDS = (*ERRORS, "MemoryError", "late", "short", "torn")
CHANGES = frozenset(
    {
        "make_directory", "create", "write", "write_pieces", "sync", "sync_directory", "truncate", "append",
        "replace", "rename", "unlink",
    }
)  # fmt: skip
ASKING = frozenset(
    {"names", "size", "open_append", "open_read", "read", "close", "free_bytes", "linked", "is_locked", "lock"}
)
# After these the queue can't know what is left, in bytes, until it looks again.
UNSURE = frozenset(
    {"size", "names", "free_bytes", "truncate", "append", "unlink", "write", "replace", "open_read", "read", "close"}
)
NEVER = 1 << 62


def _seam(name: str) -> Callable[..., Any]:
    """One call of the seam, which fails when the plan says so; calls that it makes itself are part of it."""

    def call(self: FaultyFiles, *arguments: Any) -> Any:
        original = getattr(RecordingFiles, name)
        if self.inside:
            return original(self, *arguments)
        kind = self.next_fault(name)
        self.inside = True
        try:
            return self.fail(kind, name, original, arguments) if kind is not None else original(self, *arguments)
        finally:
            self.inside = False

    return call


@dataclass
class FaultyFiles(RecordingFiles):
    """Fails the calls of a plan, by their number."""

    plan: dict[int, str] = field(default_factory=dict)
    count: int = 0
    met: list[tuple[int, str, str]] = field(default_factory=list)
    moments: list[int] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    inside: bool = False
    quiet: bool = False

    def next_fault(self, name: str) -> str | None:
        if self.quiet:
            return None
        self.count += 1
        self.named.append(name)
        kind = self.plan.get(self.count)
        if kind is not None and (applies(kind, name)):
            self.met.append((self.count, name, kind))
            self.moments.append(len(self.log))
            return kind
        return None

    def fail(self, kind: str, name: str, original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if kind in ("short", "torn"):
            return self._cut_short(kind, name, arguments)
        if kind == "late" or name == "close":
            # A descriptor is gone whatever close says.
            original(self, *arguments)
        if name == "sync":
            node, path, _ = self.descriptors[arguments[0]]
            if kind == "late":
                self.log.pop()
            self._record("sync_failed", path, node)
        if kind == "MemoryError":
            raise MemoryError
        number = ERRORS.get(kind, errno.EIO)
        raise OSError(number, os.strerror(number))

    def _cut_short(self, kind: str, name: str, arguments: tuple[Any, ...]) -> int:
        if name == "append":
            path, data = arguments
            node = self.entries[path]
        else:
            descriptor, pieces = arguments
            node, path, _ = self.descriptors[descriptor]
            data = b"".join(pieces) if name == "write_pieces" else bytes(pieces)
        part = data[: len(data) // 2]
        self._record("write", path, node, len(self.nodes[node]), part)
        self.nodes[node] += part
        if kind == "torn":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return len(part)


for _name in sorted(CHANGES | ASKING):
    setattr(FaultyFiles, _name, _seam(_name))


def applies(kind: str, name: str) -> bool:
    """Whether this call can fail so."""
    if kind == "short":
        return name in ("write", "write_pieces")
    if kind == "torn":
        return name in ("write", "write_pieces", "append")
    if kind == "late":
        return name in CHANGES and name not in ("write", "write_pieces", "create")
    if kind in ("ENOSPC", "EDQUOT"):
        return name in CHANGES
    return True


@contextmanager
def repeatable() -> Iterator[None]:
    """The same random bytes in every run: what is the same then is the same byte by byte, and looked at once."""
    numbers = itertools.count(1)
    original = os.urandom
    os.urandom = lambda size: Random(next(numbers)).randbytes(size)
    try:
        yield
    finally:
        os.urandom = original


@dataclass
class Put:
    """One record: when it was confirmed, under which number, and from when on it may be elsewhere or gone."""

    payload: bytes
    seq: int = -1
    confirmed: int = NEVER
    level: str = "always"
    gone: int = NEVER
    dying: int = NEVER
    """From then on it may be among the dead letters, and under another number when it was put back."""


@dataclass
class Promises:
    """What a history was told, and when: moments are places in the log of changes."""

    puts: dict[bytes, Put] = field(default_factory=dict)
    seen: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    batches: list[frozenset[bytes]] = field(default_factory=list)
    refused: list[BaseException] = field(default_factory=list)

    def saw(self, seq: int, payload: bytes, moment: int) -> None:
        known, _ = self.seen.setdefault(seq, (payload, moment))
        assert known == payload, f"number {seq} was {known!r} and is {payload!r} now"

    def owed(self, moment: int, *, power: bool) -> tuple[dict[int, bytes], set[bytes]]:
        """What must be delivered, under its number; and what must be there or among the dead letters."""
        queue: dict[int, bytes] = {}
        anywhere: set[bytes] = set()
        for put in self.puts.values():
            if put.confirmed <= moment < put.gone and (put.level == "always" or not power):
                if put.dying <= moment:
                    anywhere.add(put.payload)
                else:
                    queue[put.seq] = put.payload
        return queue, anywhere


class History:
    """A queue on a faulty file system, driven by a test; whatever fails by a fault is a refusal, and goes on."""

    def __init__(self, files: FaultyFiles, promises: Promises, **options: Any) -> None:
        self.files = files
        self.promises = promises
        self.config = DurableConfig(**{"overflow": "reject", **options})
        self.queue: DurableQueue | None = None
        self._names = itertools.count(1 + 100 * bool(promises.puts))
        self._dropped: set[int] = set()

    @property
    def now(self) -> int:
        return len(self.files.log)

    async def _try(self, work: Awaitable[Any]) -> Any:
        async with asyncio.timeout(300):
            try:
                return await work
            except (BatchQueueError, MemoryError) as error:
                self.promises.refused.append(error)
                return None

    async def open(self) -> None:
        """Open; what a fault has refused works when it is gone, with nothing done in between."""
        for attempt in range(8):
            # A disk that fails for good is repaired in the end.
            self.files.quiet = attempt == 7
            config = self.config
            queue = DurableQueue.open(
                ROOT, config, files=self.files, runner=InlineRunner, wall_clock=lambda: 1_700_000_000 * 10**9
            )
            if await self._try(queue.__aenter__()) is not None:
                self.queue = queue
                self._watch(queue)
                return
        raise AssertionError(f"it can't be opened: {self.promises.refused}")

    def _watch(self, queue: DurableQueue) -> None:
        """What a limit drops may be gone from then on, and is never leased."""
        state = queue._state
        settle = state.settle_range

        def settle_range(entry: Any, kind: int, low: int, high: int) -> int:
            if kind == acklog.DROPPED:
                assert all(not low <= seq < high for run in state.outstanding() for seq in range(run.seq, run.end))
                for put in self.promises.puts.values():
                    if low <= put.seq < high:
                        put.gone = min(put.gone, self.now)
                self._dropped.update(range(low, high))
            return settle(entry, kind, low, high)

        state.settle_range = settle_range

    async def put(self, count: int = 1, level: str = "always", size: int = 40, *, atomic: bool = True) -> None:
        """One `put`, or a `put_many`, or some puts at once."""
        assert self.queue is not None
        batch = next(self._names)
        payloads = [b"%d/%d/" % (batch, at) + bytes([batch]) * size for at in range(count)]
        self.promises.puts |= {payload: Put(payload, level=level) for payload in payloads}
        if count > 1 and atomic:
            self.promises.batches.append(frozenset(payloads))
            seqs = await self._try(self.queue.put_many(payloads, level))
            results: Sequence[int | None] = list(seqs) if seqs is not None else [None] * count
        else:
            results = await asyncio.gather(*(self._try(self.queue.put(payload, level)) for payload in payloads))
        for payload, seq in zip(payloads, results, strict=False):
            if seq is not None and seq >= 0:
                put = self.promises.puts[payload]
                self.promises.saw(seq, payload, self.now)
                put.seq, put.confirmed = seq, self.now
                if seq in self._dropped:
                    put.gone = min(put.gone, self.now)

    async def lease(self, count: int = 100) -> Lease:
        assert self.queue is not None
        # Memory may be short for reading it: then the caller is told, and asks again.
        tries = 0
        while (lease := await self._try(self.queue.lease(count, wait=0))) is None:
            tries += 1
            self.files.quiet = tries == 3
            assert tries < 4, self.promises.refused
        for record in lease.records:
            assert record.payload in self.promises.puts, "something was delivered that was not put"
            self.promises.saw(record.seq, record.payload, self.now)
            put = self.promises.puts[record.payload]
            # What was buried may be in both places when the burial was not told to the end.
            assert put.gone == NEVER or put.dying < NEVER, "what was settled came again in the same run"
        return lease

    async def ack(self, lease: Lease, numbers: Sequence[int] | None = None) -> None:
        chosen = lease.records if numbers is None else [lease.records[at] for at in numbers if at < len(lease.records)]
        for record in chosen:
            put = self.promises.puts[record.payload]
            put.gone = min(put.gone, self.now)
        await self._try(lease.ack([record.seq for record in chosen]))

    async def bury(self, lease: Lease, numbers: Sequence[int]) -> None:
        chosen = [lease.records[at] for at in numbers if at < len(lease.records)]
        for record in chosen:
            self.promises.puts[record.payload].dying = min(self.now, self.promises.puts[record.payload].dying)
        await self._try(lease.dead_letter("no use", [record.seq for record in chosen]))

    async def nack(self, lease: Lease, delay: float = 0.0, numbers: Sequence[int] | None = None) -> None:
        seqs = None if numbers is None else [lease.records[at].seq for at in numbers if at < len(lease.records)]
        await self._try(lease.nack(delay, seqs))

    def may_die(self, lease: Lease) -> None:
        """Under `max_attempts`: what is leased now may go to the dead letters by itself."""
        for record in lease.records:
            put = self.promises.puts[record.payload]
            put.dying = min(put.dying, self.now)

    async def purge(self) -> None:
        assert self.queue is not None
        for put in self.promises.puts.values():
            if put.dying < NEVER:
                put.gone = min(put.gone, self.now)
        await self._try(self.queue.purge_dead_letters())

    async def requeue(self) -> None:
        assert self.queue is not None
        await self._try(self.queue.requeue_dead_letters())

    async def close(self) -> None:
        assert self.queue is not None
        queue, self.queue = self.queue, None
        async with asyncio.timeout(300):
            await queue.close()

    async def end(self) -> None:
        """Counts add up; nothing stays open and nothing stays locked when it is closed."""
        if self.queue is not None:
            # Not the time of one of its timers: what a round under way has done is counted a turn later.
            await asyncio.sleep(1.637)
            stats = self.queue.stats()
            done = stats.acked + stats.dead_lettered + stats.damaged
            done += sum(count for reason, count in stats.dropped.items() if reason != "newest")
            assert stats.recovered + stats.put == done + stats.records, stats
            assert stats.pending == 0
            out = stats.leased + stats.ready + stats.delayed + stats.unreadable
            assert out == stats.records or (self.config.order == "key" and out < stats.records), stats
            # What a failed call has left cannot be told for sure; the next opening looks again.
            unsure = {name for _, name, _ in self.files.met} & UNSURE
            assert stats.disk_bytes == self.files.used() or unsure, (stats.disk_bytes, self.files.used())
            await self.close()
        assert not self.files.descriptors
        assert not self.files.locked


async def dead_payloads(queue: DurableQueue, files: RecordingFiles) -> list[bytes]:
    if "dead" not in files.names(ROOT):
        return []
    return [letter.payload for letter in await queue.dead_letters(10_000)]


async def check(
    left: RecordingFiles, promises: Promises, moment: int, config: DurableConfig, log: Sequence[Op], *, power: bool
) -> None:
    """Open what a crash at `moment` has left: everything that is owed is there, once and unchanged, and it goes on."""
    owed, anywhere = promises.owed(moment, power=power)
    if config.order == "key":
        # All of them are leased below without settling any: that no key may stand in the way of.
        config = replace(config, order="fifo", key=None)
    open_it = {"files": left, "runner": InlineRunner, "wall_clock": lambda: 1_700_000_100 * 10**9}
    async with asyncio.timeout(300):
        async with DurableQueue.open(ROOT, config, **open_it) as queue:
            found: dict[int, bytes] = {}
            while lease := await queue.lease(5, wait=0):
                for record in lease.records:
                    assert record.seq not in found, "delivered twice"
                    found[record.seq] = record.payload
            # What had been leased as often as it may be is on its way to the dead letters.
            await asyncio.sleep(1)
            dead = await dead_payloads(queue, left)
            stats = queue.stats()
            dropped = sum(stats.dropped.values())
            assert stats.records == len(found), (stats, found)
            assert stats.recovered == stats.records + stats.damaged + stats.dead_lettered + dropped
            assert stats.unreadable == 0
            assert stats.damaged == 0 or power, "a kill has damaged something"
            with suppress(DiskFullError):
                fresh = await queue.put(b"and on it goes")
                older = [seq for seq, (_, at) in promises.seen.items() if at <= moment]
                assert fresh > max(older, default=0), f"number {fresh} was given before"
        missing = {seq: payload for seq, payload in owed.items() if found.get(seq) != payload}
        if dropped:
            assert len(missing) <= dropped
        else:
            assert not {seq for seq, payload in missing.items() if payload not in dead}, f"lost at {moment}: {missing}"
        everywhere = set(found.values()) | set(dead)
        assert anywhere <= everywhere, f"neither in the queue nor among the dead letters at {moment}"
        assert everywhere <= set(promises.puts), "something was delivered that was not put"
        # Settling is known to the disk some milliseconds later: what was buried or put back may be in both places.
        twice = {payload for payload, count in Counter([*found.values(), *dead]).items() if count > 1}
        assert all(promises.puts[payload].dying <= moment for payload in twice), f"more than once: {twice}"
        # After a failed sync what the page cache shows is not what the power leaves, and no later opening can know.
        torn = power and any(op.kind == "sync_failed" for op in log)
        for batch in promises.batches:
            # Of a put without a sync, what was buried and put back is a put of its own by now, and durable by itself.
            alone = {payload for payload in batch if promises.puts[payload].dying > moment}
            if not torn and alone & set(found.values()) and not dropped:
                gone = {payload for payload in batch if promises.puts[payload].gone <= moment}
                assert batch <= everywhere | gone, "a part of a put_many"


Script = Callable[[History], Awaitable[None]]


class Prover:
    """Runs one script with plan after plan, and looks at every state that a crash can leave; at equal ones once."""

    def __init__(
        self,
        script: Script,
        base: dict[Path, bytes] | None = None,
        owed: dict[int, bytes] | None = None,
        settled: dict[int, bytes] | None = None,
        **options: Any,
    ) -> None:
        self.script = script
        self.base = base or {}
        self.owed = owed or {}
        self.settled = settled or {}
        self.options = options
        self.known: set[Any] = set()
        self.runs: set[int] = set()
        self.tried = self.checked = 0
        self.power = 1.0
        """How often a crash is also tried with any part of what was not synced lost, torn or reordered."""

    def run(self, plan: dict[int, str]) -> tuple[FaultyFiles, Promises, History]:
        """The script with this plan."""
        files, promises = FaultyFiles(base=self.base, plan=plan), Promises()
        for seq, payload in [*self.owed.items(), *self.settled.items()]:
            promises.puts[payload] = Put(payload, seq, confirmed=0)
            promises.saw(seq, payload, 0)
        for payload in self.settled.values():
            # When its acknowledgement can't be read, it comes again.
            promises.puts[payload].gone = promises.puts[payload].dying = 0
        history = History(files, promises, **self.options)

        async def main() -> None:
            await history.open()
            await self.script(history)
            await history.end()

        with repeatable():
            run_virtual(main())
        files.quiet = True
        return files, promises, history

    def prove(self, plan: dict[int, str], *, every: int = 1, seed: int = 0) -> FaultyFiles:
        """Run, then crash at every `every`-th moment from the first fault on."""
        files, promises, history = self.run(plan)
        same = (repr(files.log), repr(promises.puts), repr(files.moments[:1]))
        if hash(same) in self.runs:
            # Another class of error, and the queue did the same: the same crashes leave the same.
            return files
        self.runs.add(hash(same))
        start = files.moments[0] if files.moments else 0
        random = Random(seed)
        for moment in range(start + random.randrange(every), len(files.log) + 1, every):
            states = [
                (files.killed(moment), False),
                (files.killed(moment, torn=random.random()), False),
                (files.all_unsynced_lost(moment), True),
            ]
            if random.random() < self.power:
                states.append((files.lost_power(moment, random), True))
            for left, power in states:
                self.look(left, files, history, moment, power=power)
        return files

    def look(self, left: RecordingFiles, files: FaultyFiles, history: History, moment: int, *, power: bool) -> None:
        """Check one state, unless an equal one with as much owed was checked before."""
        self.tried += 1
        promises = history.promises
        owed, anywhere = promises.owed(moment, power=power)
        newest = max((seq for seq, (_, at) in promises.seen.items() if at <= moment), default=0)
        gone = frozenset(put.payload for put in promises.puts.values() if put.gone <= moment)
        key = (frozenset(left.base.items()), power, frozenset(owed.items()), frozenset(anywhere), newest, gone)
        if key in self.known:
            return
        self.known.add(key)
        self.checked += 1
        try:
            with repeatable():
                run_virtual(check(left, promises, moment, history.config, files.log[:moment], power=power))
        except BaseException as error:
            error.add_note(f"faults {files.met}, crash at change {moment}, {'power' if power else 'kill'}")
            raise
