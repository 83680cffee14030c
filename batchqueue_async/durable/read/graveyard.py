"""The dead letters of an open queue: written before the record is settled, listed, and put back on request."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from batchqueue_async.durable import dead_letters
from batchqueue_async.errors import BatchQueueError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.durable.queue import DurableQueue
    from batchqueue_async.durable.state.frame import Run
    from batchqueue_async.durable.state.queue_state import QueueState
    from batchqueue_async.leases.lease import Lease

_BATCH = 500


class Graveyard:
    """A second queue inside the first, opened when it is first needed."""

    def __init__(
        self,
        state: QueueState,
        make: Callable[[], DurableQueue],
        put_many: Callable[..., Awaitable[range]],
        *,
        clock: Callable[[], int],
        size: int,
    ) -> None:
        self._state = state
        self._make = make
        self._put_many = put_many
        self._clock = clock
        self._size = size
        self._opening: asyncio.Task[DurableQueue] | None = None

    async def bury(self, runs: list[Run], reason: str) -> None:
        """Write records among the dead letters; returns when they are durable there."""
        now = self._clock()
        letters = [
            dead_letters.encode(
                payload,
                reason=reason,
                attempts=run.attempts,
                seq=run.seq + at,
                enqueued_ns=run.frame.enqueued_ns,
                died_ns=now,
            )
            for run in runs
            for at, payload in enumerate((run.frame.payloads or [])[run.low : run.high])
        ]
        dead = await self._opened()
        await dead.put_many(letters)
        self._count(dead)

    async def list(self, limit: int) -> list[DeadLetter]:
        """The first dead letters."""
        dead = await self._opened()
        letters: list[DeadLetter] = []
        held: list[Lease] = []
        try:
            # A lease is what is in memory by then, so one of them is seldom all.
            while len(letters) < limit and (lease := await dead.lease(limit - len(letters), wait=0)):
                held.append(lease)
                found = (dead_letters.decode(record.seq, record.payload) for record in lease.records)
                letters += [letter for letter in found if letter is not None]
        finally:
            for lease in held:
                await lease.nack(counted=False)
        return letters

    async def requeue(self, seqs: Iterable[int] | None) -> int:
        """Put them back, all or these."""
        wanted = None if seqs is None else set(seqs)
        dead = await self._opened()
        count = 0
        held: list[Lease] = []
        try:
            while lease := await dead.lease(_BATCH, wait=0):
                held.append(lease)
                found = [dead_letters.decode(record.seq, record.payload) for record in lease.records]
                chosen = [letter for letter in found if letter is not None and (wanted is None or letter.seq in wanted)]
                if chosen:
                    await self._put_many([letter.payload for letter in chosen], durability="always")
                    await lease.ack([letter.seq for letter in chosen])
                    count += len(chosen)
        finally:
            for lease in held:
                await lease.nack(counted=False)
        self._count(dead)
        return count

    async def close(self) -> None:
        """Close the second queue, if it was opened."""
        if self._opening is not None:
            with suppress(BatchQueueError):
                # It could not be opened: whoever asked for it was told.
                await (await self._opening).close()

    async def _opened(self) -> DurableQueue:
        if self._opening is None or (self._opening.done() and not _succeeded(self._opening)):
            self._opening = asyncio.get_running_loop().create_task(self._open())
        # A task of its own: a caller that is cancelled leaves the opening to the next one, who would meet its lock.
        return await asyncio.shield(self._opening)

    async def _open(self) -> DurableQueue:
        return await self._make()

    def _count(self, dead: DurableQueue) -> None:
        # The first queue's own count began with what was there when it was opened.
        self._state.extra_bytes = dead.stats().disk_bytes - self._size


def _succeeded(task: asyncio.Task[DurableQueue]) -> bool:
    return not task.cancelled() and task.exception() is None
