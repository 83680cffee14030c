"""The dead letters of an open queue: written before the record is settled, listed, and put back on request."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from batchqueue_async.durable import dead_letters
from batchqueue_async.errors import BatchQueueError, DiskFullError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.durable.queue import DurableQueue
    from batchqueue_async.durable.state.frame import Run
    from batchqueue_async.leases.lease import Lease

    Progress = Callable[[Sequence[int]], object]

_BATCH = 500
_BATCH_BYTES = 16 << 20
_ASIDE = 1e9


class DeadLetterQueue:
    """A second queue inside the first, opened when it is first needed."""

    def __init__(
        self,
        make: Callable[[], DurableQueue],
        put_many: Callable[..., Awaitable[range]],
        *,
        part: tuple[int, int],
        clock: Callable[[], int],
    ) -> None:
        """Say where the letters are, and where they come from.

        Args:
            make: makes the second queue, which nobody has open.
            put_many: puts records into the first.
            part: records and bytes that are put back at once: fewer than the first queue can ever hold.
            clock: the time, in nanoseconds since 1970.
        """
        self._part = part
        self._make = make
        self._put_many = put_many
        self._clock = clock
        self._opening: asyncio.Task[DurableQueue] | None = None

    async def bury(self, runs: list[Run], reason: str) -> None:
        """Write records among the dead letters; returns when they are durable there."""
        letters: list[bytes] = []
        size = 0
        dead = await self._opened()
        for count, letter in enumerate(_encoded(runs, reason, self._clock()), 1):
            if letters and size + len(letter) > _BATCH_BYTES:
                # As many as a round takes, one after the other: if a later part fails, the records of this one are in
                # both places, and in none lost.
                await dead.put_many(letters, durability="always")
                letters, size = [], 0
            letters.append(letter)
            size += len(letter)
            if count % _BATCH == 0:
                await asyncio.sleep(0)
        if letters:
            await dead.put_many(letters, durability="always")

    async def list(self, limit: int) -> list[DeadLetter]:
        """The first dead letters."""
        letters: list[DeadLetter] = []

        async def take(lease: Lease) -> int:
            letters.extend(_letters(lease))
            return 0

        await self._walk(take, lambda: limit - len(letters))
        return letters

    async def requeue(self, seqs: Iterable[int] | None, progress: Progress | None = None) -> int:
        """Put them back, all or these; how many came in."""
        wanted = _Wanted(seqs)

        async def put_back(lease: Lease) -> int:
            chosen = [letter for letter in _letters(lease) if letter.seq in wanted]
            if not chosen:
                return 0
            put = await self._put_many([letter.payload for letter in chosen], durability="always")
            if len(put) < len(chosen):
                raise DiskFullError(
                    "dead letters: the queue has no room for more of them, and its overflow='drop_newest' would drop "
                    "them; those that are left stay where they are. Lease and ack faster, or raise the quota"
                )
            return await _settle(lease, [letter.seq for letter in chosen], wanted, progress)

        return await self._walk(put_back, wanted.room, *self._part)

    async def purge(self, seqs: Iterable[int] | None, before: float | None, progress: Progress | None = None) -> int:
        """Delete them, all or these, or those that died before a moment; how many."""
        wanted = _Wanted(seqs)

        async def delete(lease: Lease) -> int:
            chosen = [
                letter.seq
                for letter in _letters(lease)
                if letter.seq in wanted and (before is None or letter.died_at < before)
            ]
            return await _settle(lease, chosen, wanted, progress) if chosen else 0

        return await self._walk(delete, wanted.room)

    async def _walk(
        self,
        act: Callable[[Lease], Awaitable[int]],
        room: Callable[[], int],
        records: int = _BATCH,
        size: int = _BATCH_BYTES,
    ) -> int:
        """Act on every dead letter, some at a time; the sum of what that answers. What is left of each stays."""
        dead = await self._opened()
        count = 0
        try:
            while (most := min(records, room())) > 0 and (lease := await dead.lease(most, size, wait=0)):
                try:
                    count += await act(lease)
                finally:
                    # Out of the way of the next lease, and without their payloads: there may be any number of them.
                    await lease.nack(_ASIDE, counted=False)
        finally:
            if not dead.closed:
                dead.hurry()
                dead.compact()
        return count

    def disk_bytes(self) -> int | None:
        """What the dead letters take, while their queue is open."""
        if self._opening is None or not self._opening.done() or not _succeeded(self._opening):
            return None
        return self._opening.result().stats().disk_bytes

    async def close(self) -> None:
        """Close the second queue, if it was opened."""
        if self._opening is not None:
            with suppress(BatchQueueError, MemoryError):
                # It could not be opened: whoever asked for it was told.
                await (await self._opening).close()

    async def _opened(self) -> DurableQueue:
        if self._opening is None or (self._opening.done() and not _succeeded(self._opening)):
            self._opening = asyncio.get_running_loop().create_task(self._open())
        # A task of its own: a caller that is cancelled leaves the opening to the next one, who would meet its lock.
        return await asyncio.shield(self._opening)

    async def _open(self) -> DurableQueue:
        return await self._make()


class _Wanted:
    """The numbers that are still looked for; without any, every letter is wanted."""

    def __init__(self, seqs: Iterable[int] | None) -> None:
        self._left = None if seqs is None else set(seqs)

    def __contains__(self, seq: int) -> bool:
        return self._left is None or seq in self._left

    def found(self, seqs: Iterable[int]) -> None:
        """These need not be looked for any more."""
        if self._left is not None:
            self._left.difference_update(seqs)

    def room(self) -> int:
        """How many letters the next look may take: none, once every number was found."""
        return _BATCH if self._left is None or self._left else 0


async def _settle(lease: Lease, seqs: list[int], wanted: _Wanted, progress: Progress | None) -> int:
    """Take letters out that have been dealt with, and say so."""
    count = await lease.ack(seqs)
    wanted.found(seqs)
    if progress is not None:
        progress(seqs)
    return count


def _letters(lease: Lease) -> list[DeadLetter]:
    found = (dead_letters.decode(record.seq, record.payload) for record in lease.records)
    return [letter for letter in found if letter is not None]


def _encoded(runs: Iterable[Run], reason: str, now: int) -> Iterator[bytes]:
    for run in runs:
        for at, payload in enumerate((run.frame.payloads or [])[run.low : run.high]):
            yield dead_letters.encode(
                payload,
                reason=reason,
                attempts=run.attempts,
                seq=run.seq + at,
                enqueued_ns=run.frame.enqueued_ns,
                died_ns=now,
            )


def _succeeded(task: asyncio.Task[DurableQueue]) -> bool:
    return not task.cancelled() and task.exception() is None
