"""Cancelled at every await: each call is stopped after k turns of the loop, for every k, and the state is looked at.

The I/O runs on the loop, some turns after it was asked for, so that a cancellation also falls before a write, between
the write and its answer, and after the answer, before the caller has seen it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from durable_kit import ROOT, InlineRunner, RecordingFiles, drain, eventually, io_error

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.durable.read import leasing, rereading
from batchqueue_async.durable.state import backlog, queue_state, record_index
from batchqueue_async.errors import BatchQueueError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchqueue_async.durable import Lease

TURNS = 50

pytestmark = pytest.mark.seeds(3)


class LateRunner(InlineRunner):
    """Does each call some turns of the loop after it was submitted, in order."""

    DELAY = 2

    def submit(
        self, call: Callable[..., Any], *arguments: Any, done: Callable[[Any, BaseException | None], None]
    ) -> None:
        self._later(self.DELAY, lambda: super(LateRunner, self).submit(call, *arguments, done=done))

    def _later(self, turns: int, run: Callable[[], None]) -> None:
        self._loop.call_soon(run if turns == 0 else lambda: self._later(turns - 1, run))


@dataclass
class Scene:
    """A queue before the call, and what was done to it."""

    files: RecordingFiles
    queue: DurableQueue
    there: set[bytes] = field(default_factory=set)  # put and confirmed, so it has to be there
    maybe: set[bytes] = field(default_factory=set)  # the cancelled call's: there, or not
    together: set[bytes] = field(default_factory=set)  # all of these or none
    gone: set[bytes] = field(default_factory=set)  # acknowledged: may come again only after a crash
    dead: set[bytes] = field(default_factory=set)  # in the dead letters, or still in the queue
    background: list[asyncio.Task[Any]] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)


def opening(files: RecordingFiles, config: DurableConfig | None = None) -> DurableQueue:
    return DurableQueue.open(ROOT, config, files=files, runner=LateRunner)


async def scene(config: DurableConfig | None = None, records: int = 6) -> Scene:
    files = RecordingFiles()
    queue = await opening(files, config)
    made = Scene(files, queue)
    if records:
        made.there = {b"record %d" % number for number in range(records)}
        await queue.put_many(sorted(made.there))
    return made


async def leased(config: DurableConfig | None = None) -> Scene:
    made = await scene(config)
    made.leases.append(await made.queue.lease(4))
    return made


async def put(here: Scene) -> None:
    here.maybe.add(b"one")
    await here.queue.put(b"one")
    here.there.add(b"one")


async def put_among_others(here: Scene) -> None:
    """A put that shares its frame with others that are not cancelled."""
    others = [asyncio.create_task(here.queue.put(b"other %d" % number)) for number in range(3)]
    here.there |= {b"other %d" % number for number in range(3)}
    here.background = others
    await put(here)


async def put_many(here: Scene) -> None:
    here.together = {b"many %d" % number for number in range(4)}
    here.maybe |= here.together
    await here.queue.put_many(sorted(here.together))
    here.there |= here.together


async def lease(here: Scene) -> None:
    here.leases.append(await here.queue.lease(3))


async def lease_from_the_disk(here: Scene) -> None:
    await lease(here)


async def lease_that_waits(here: Scene) -> None:
    waiting = asyncio.get_running_loop().create_task(here.queue.put(b"late"))
    here.there.add(b"late")
    here.background = [waiting]
    here.leases.append(await here.queue.lease(100))
    here.leases.append(await here.queue.lease(100, wait=5))


async def ack(here: Scene) -> None:
    payloads = {record.payload for record in here.leases[0].records[:2]}
    await here.leases[0].ack([record.seq for record in here.leases[0].records[:2]])
    here.there -= payloads
    here.gone |= payloads


async def nack(here: Scene) -> None:
    await here.leases[0].nack(seqs=[here.leases[0].records[0].seq])
    await here.leases[0].nack(delay=5.0)


async def as_a_context(here: Scene) -> None:
    payloads = {record.payload for record in here.leases[0].records}
    async with here.leases[0]:
        await asyncio.sleep(0)
    here.there -= payloads
    here.gone |= payloads


async def dead_letter(here: Scene) -> None:
    chosen = here.leases[0].records[:2]
    payloads = {record.payload for record in chosen}
    here.there -= payloads
    here.dead |= payloads
    await here.leases[0].dead_letter("why", [record.seq for record in chosen])


async def requeue(here: Scene) -> None:
    await here.queue.requeue_dead_letters()


async def list_the_dead(here: Scene) -> None:
    await here.queue.dead_letters()


async def close(here: Scene) -> None:
    await here.queue.close()


async def close_with_work(here: Scene) -> None:
    here.background = [asyncio.create_task(here.queue.put(b"last %d" % number)) for number in range(3)]
    here.maybe |= {b"last %d" % number for number in range(3)}
    await asyncio.sleep(0)
    await here.queue.close()


async def dead_already() -> Scene:
    made = await leased()
    await dead_letter(made)
    return made


async def full(**options: Any) -> Scene:
    return await scene(DurableConfig(max_records=6, **options))


async def full_disk() -> Scene:
    """Writes fail until somebody frees the disk, some time later."""
    made = await scene()
    made.files.fault = lambda call, path: io_error(28) if call == "write" and path.suffix == ".bqs" else None
    asyncio.get_running_loop().call_later(0.6, lambda: setattr(made.files, "fault", None))
    return made


async def blocked_put(here: Scene) -> None:
    """There is room later."""

    async def make_room() -> None:
        await asyncio.sleep(0.2)
        held = await here.queue.lease(2)
        payloads = {record.payload for record in held.records}
        here.there -= payloads
        here.gone |= payloads
        await held.ack()

    here.background = [asyncio.create_task(make_room())]
    await put(here)


SCENES: dict[str, tuple[Callable[[], Awaitable[Scene]], Callable[[Scene], Awaitable[None]]]] = {
    "put": (scene, put),
    "put into a new segment": (lambda: scene(DurableConfig(segment_bytes=128)), put),
    "put among others": (scene, put_among_others),
    "put_many": (scene, put_many),
    "put, os": (lambda: scene(DurableConfig(durability="os")), put),
    "put, max_records, block": (full, blocked_put),
    "put, max_records, drop_oldest": (lambda: full(overflow="drop_oldest", memory_bytes=1), put),
    "put, a full disk": (full_disk, put),
    "put_many, a full disk": (full_disk, put_many),
    "lease": (scene, lease),
    "lease from the disk": (lambda: scene(DurableConfig(memory_bytes=1)), lease_from_the_disk),
    "lease, newest first, from the disk": (
        lambda: scene(DurableConfig(memory_bytes=1, memory_blocks=1, order="freshest")),
        lease_from_the_disk,
    ),
    "lease by key": (lambda: scene(DurableConfig(order="key", key=lambda payload: payload[-1:])), lease),
    "lease that waits": (scene, lease_that_waits),
    "ack": (leased, ack),
    "nack": (leased, nack),
    "a lease as a context": (leased, as_a_context),
    "dead_letter": (leased, dead_letter),
    "dead_letter again": (dead_already, dead_letter),
    "requeue": (dead_already, requeue),
    "list the dead": (dead_already, list_the_dead),
    "close": (leased, close),
    "close with work": (scene, close_with_work),
}


async def one_by_one(**options: Any) -> Scene:
    """Each record in a frame of its own."""
    made = await scene(DurableConfig(**options), records=0)
    made.there = {b"record %d" % number for number in range(9)}
    for payload in sorted(made.there):
        await made.queue.put(payload)
    return made


async def lease_most(here: Scene) -> None:
    here.leases.append(await here.queue.lease(7))
    assert 5 <= len(here.leases[-1]) <= 7


async def lease_the_newest(here: Scene) -> None:
    here.leases.append(await here.queue.lease(1))  # which is in memory
    await lease_most(here)


async def lease_twice(here: Scene) -> None:
    """Another consumer comes in between two portions, and records that came back are leased again."""

    async def consume() -> None:
        here.leases.append(await here.queue.lease(3))

    other = asyncio.create_task(consume())
    here.background = [other]
    mine = await here.queue.lease(7)
    here.leases.append(mine)
    await other
    await mine.nack()
    here.leases.append(await here.queue.lease(7))


async def lease_amid_a_close(here: Scene) -> None:
    leasing = here.queue._leasing
    close, before = leasing.close, []

    def note() -> None:
        before.append(here.queue.leased)
        close()

    leasing.close = note
    here.background = [asyncio.create_task(here.queue.close())]
    here.leases.append(await here.queue.lease(7))
    assert not before or len(here.leases[-1]) == before[0], "records were leased of a queue that is closed"


PORTIONED: dict[str, tuple[Callable[[], Awaitable[Scene]], Callable[[Scene], Awaitable[None]]]] = {
    "from memory": (one_by_one, lease_most),
    "from the disk": (lambda: one_by_one(memory_bytes=1), lease_most),
    "newest first": (lambda: one_by_one(memory_bytes=1, order="freshest"), lease_the_newest),
    "by key": (lambda: one_by_one(order="key", key=lambda payload: payload), lease_most),
    "noted before": (lambda: one_by_one(max_attempts=100), lease_most),
    "closed meanwhile": (one_by_one, lease_amid_a_close),
    "two consumers": (one_by_one, lease_twice),
    "two consumers, from the disk": (lambda: one_by_one(memory_bytes=1), lease_twice),
}


@pytest.fixture
def portions_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the loop takes two records, not hundreds."""
    for module, name in [
        (leasing, "PORTION"),
        (queue_state, "PORTION"),
        (rereading, "_PORTION"),
        (backlog, "_KEPT"),
        (record_index, "_RANGES"),
    ]:
        monkeypatch.setattr(module, name, 2)


async def cancelled_after(turns: int, call: Awaitable[None]) -> bool:
    """Cancel a call after so many turns of the loop; whether it had not ended before."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        if task.done():
            break
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return not ended
    except BatchQueueError:
        pass
    return False


async def look(here: Scene) -> None:
    """Everything that was promised holds, now and after the next opening."""
    queue = here.queue
    await asyncio.gather(*here.background, return_exceptions=True)
    if not queue.closed:
        await settled(queue)
        for entry in here.leases:
            await entry.nack()
        stats = queue.stats()
        assert stats.pending == 0
        assert queue._state.pending.disk_bytes == 0
        assert stats.leased == 0, "leased, and nobody has the lease"
        dropped = sum(stats.dropped.values())
        assert stats.recovered + stats.put == stats.acked + stats.dead_lettered + dropped + stats.records
        if queue.config.max_records is None:
            assert await queue.put(b"more") > 0
            here.there.add(b"more")
        first = await drain(queue)
        assert len(set(first.values())) == len(first), "delivered twice"
        check(here, set(first.values()), await buried(queue), dropped)
        assert not here.gone & set(first.values()), "acknowledged, and delivered again"
        await queue.close()
    await queue.close()
    again = await opening(here.files)
    dropped = sum(queue.stats().dropped.values())
    check(here, set((await drain(again)).values()), await buried(again), dropped)
    assert again.recovery.clean
    await again.close()
    assert not here.files.locked
    assert not here.files.descriptors, "a file was left open"


async def settled(queue: DurableQueue) -> None:
    """Return when the writer has nothing left to do and the delays of `nack` are over."""
    await eventually(lambda: not (queue._pump.busy or queue._state.pending.frames or queue.stats().delayed))


async def buried(queue: DurableQueue) -> set[bytes]:
    return {letter.payload for letter in await queue.dead_letters()}


def check(here: Scene, found: set[bytes], dead: set[bytes], dropped: int) -> None:
    missing = here.there - found - here.dead
    assert len(missing) <= dropped, "confirmed and lost"
    assert found <= here.there | here.maybe | here.gone | here.dead, "never put"
    assert here.dead <= found | dead, "neither in the queue nor among the dead letters"
    assert not here.together & found or here.together <= found, "a part of a put_many"


@pytest.mark.parametrize("name", SCENES)
async def test_cancelled_after_every_turn(name):
    await cancelled_at_every_turn(*SCENES[name])


@pytest.mark.usefixtures("portions_of_two")
@pytest.mark.parametrize("name", PORTIONED)
async def test_cancelled_between_portions(name):
    await cancelled_at_every_turn(*PORTIONED[name])


async def cancelled_at_every_turn(
    make: Callable[[], Awaitable[Scene]], act: Callable[[Scene], Awaitable[None]]
) -> None:
    stopped = turns = 0
    for turns in range(TURNS):
        here = await make()
        hit = await cancelled_after(turns, act(here))
        await look(here)
        stopped += hit
        if not hit:
            break
    assert stopped, "nothing was ever cancelled: this proved nothing"
    if turns == TURNS - 1:
        # It waits for time to pass: it is stopped on both sides of every timer.
        for hundredths in range(0, 200, 3):
            here = await make()
            hit = await cancelled_at(hundredths / 100, act(here))
            await look(here)
            if not hit:
                return
        pytest.fail("it never came to its end")


async def cancelled_at(delay: float, call: Awaitable[None]) -> bool:
    """Cancel a call after some virtual time."""
    task = asyncio.ensure_future(call)
    await asyncio.wait([task], timeout=delay)
    return await cancelled_after(0, task)


@pytest.mark.parametrize("broken", [False, True])
async def test_an_opening_cancelled_after_every_turn_gives_the_directory_back(broken):
    before = await scene()
    await before.queue.put(b"last")
    content = before.files.snapshot() if broken else before.files
    await before.queue.close()
    stopped = 0
    for turns in range(TURNS):
        files = content.snapshot()
        queue = opening(files)
        hit = await cancelled_after(turns, queue.__aenter__())
        stopped += hit
        if not hit:
            await queue.close()
            break
        await eventually(lambda: queue._phase in ("new", "closed"))  # noqa: B023 - called at once
        await eventually(lambda: not files.locked)  # noqa: B023 - called at once
        with pytest.raises(BatchQueueError):
            await queue.put(b"never opened")
        await queue.close()
        again = await opening(files)
        assert set((await drain(again)).values()) == before.there | {b"last"}
        await again.close()
        assert not files.descriptors
    assert stopped > 3


@pytest.mark.every_loop
async def test_everything_cancelled_at_once_leaves_a_queue_that_opens(tmp_path):
    """As when the program is interrupted: the tasks of the queue itself are cancelled too."""
    confirmed: set[int] = set()
    for turns in range(0, 60, 3):
        async with DurableQueue.open(tmp_path) as queue:
            confirmed.add(await queue.put(b"before"))
            tasks = [asyncio.create_task(queue.put(b"%d" % number)) for number in range(20)]
            tasks.append(asyncio.create_task(queue.lease(5)))
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(queue.close()))
            await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            confirmed |= {result for result in results if type(result) is int}
    async with DurableQueue.open(tmp_path) as queue:
        assert queue.recovery.damaged_records == 0
        assert confirmed <= set(await drain(queue))
