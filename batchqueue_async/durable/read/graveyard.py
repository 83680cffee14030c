"""The dead letters of an open queue: written before the record is settled, listed, and put back on request."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from batchqueue_async.durable import dead_letters
from batchqueue_async.errors import BatchQueueError, DiskFullError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.durable.queue import DurableQueue
    from batchqueue_async.durable.state.frame import Run
    from batchqueue_async.leases.lease import Lease

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
        clock: Callable[[], int],
    ) -> None:
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

    async def requeue(self, seqs: Iterable[int] | None) -> int:
        """Put them back, all or these; how many came in."""
        wanted = None if seqs is None else set(seqs)

        async def put_back(lease: Lease) -> int:
            chosen = [letter for letter in _letters(lease) if wanted is None or letter.seq in wanted]
            if not chosen:
                return 0
            put = await self._put_many([letter.payload for letter in chosen], durability="always")
            if len(put) < len(chosen):
                raise DiskFullError(
                    "dead letters: the queue has no room for them, and its overflow='drop_newest' would drop them; "
                    f"{len(chosen)} letters stay where they are. Lease and ack faster, or raise the quota"
                )
            return await lease.ack([letter.seq for letter in chosen])

        return await self._walk(put_back)

    async def purge(self, seqs: Iterable[int] | None, before: float | None) -> int:
        """Delete them, all or these, or those that died before a moment; how many."""
        wanted = None if seqs is None else set(seqs)

        async def delete(lease: Lease) -> int:
            chosen = [
                letter.seq
                for letter in _letters(lease)
                if (wanted is None or letter.seq in wanted) and (before is None or letter.died_at < before)
            ]
            return await lease.ack(chosen) if chosen else 0

        return await self._walk(delete)

    async def _walk(self, act: Callable[[Lease], Awaitable[int]], room: Callable[[], int] = lambda: _BATCH) -> int:
        """Act on every dead letter, some at a time; the sum of what that answers. What is left of each stays."""
        dead = await self._opened()
        count = 0
        try:
            while (most := min(_BATCH, room())) > 0 and (lease := await dead.lease(most, _BATCH_BYTES, wait=0)):
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
