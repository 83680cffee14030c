"""The drain task: it owns partitions, takes bounded rounds of batches from them, and rests when there is nothing.

A worker never looks at an empty partition: the first item into one puts it on the worker's `ready` list and cuts the
worker's sleep short. A round takes at most one bounded batch from each ready partition, so none waits longer than
one round for its turn.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from batchqueue_async.queue.waits import circle

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchqueue_async.queue.partition import Partition
    from batchqueue_async.queue.stats import Histogram

T = TypeVar("T")

current_round: ContextVar[tuple[Worker[Any], int] | None] = ContextVar("batchqueue_round", default=None)
"""The worker in whose handler call this code runs, and the number of its round: a deadlock shows by it."""


Chunk = tuple["Partition[T]", "list[T]", "type | None"]
"""Items taken out of a partition, and their type if they are of one."""


class Dispatch(Protocol[T]):
    """What a worker does with what it took: the next station of an item's way."""

    async def run(self, worker: Worker[T], chunks: list[Chunk[T]]) -> None:
        """Give every item of the chunks to its handler; raise only when the worker is cancelled."""
        ...

    async def idle(self, worker: Worker[T]) -> None:
        """Tell the handlers that want to know that there is nothing to do."""
        ...

    def wants_idle(self) -> bool:
        """Whether any handler has an `on_idle`."""
        ...


REVIEW_AFTER = 1_000
"""Items that a worker takes before its queue looks once whether its selector spreads them."""


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The loop's clock, where it is fine enough to measure by.

    uvloop's counts whole milliseconds and stands still within a turn of the loop; the system's monotonic clock is
    the one that it is made from.
    """
    return time.monotonic if type(loop).__module__.startswith("uvloop") else loop.time


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRules:
    """The part of a queue's configuration that its workers go by."""

    max_batch: int
    linger: float
    min_idle: float
    max_idle: float
    whole_rounds: bool
    """Whether a round's batches make one handler call, so that together they may not exceed `max_batch`."""

    def backoff(self, idle_rounds: int) -> float:
        """The sleep after so many rounds in a row that found nothing: doubling from `min_idle` to `max_idle`."""
        # 2 ** 60 is far beyond any ratio of the two, and well inside a float.
        return min(self.min_idle * 2.0 ** min(idle_rounds, 60), self.max_idle)


class Worker(Generic[T]):
    """One drain task and the partitions that it owns."""

    def __init__(
        self,
        index: int,
        rules: DrainRules,
        dispatch: Dispatch[T],
        latency: Histogram,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.index = index
        self.rules = rules
        self.dispatch = dispatch
        self.latency = latency
        self.loop = loop
        self.clock = clock_of(loop)
        self.review: Callable[[], None] | None = None
        """Called after `REVIEW_AFTER` items, until the queue takes it away."""
        self.partitions: list[Partition[T]] = []
        self.ready: deque[Partition[T]] = deque()
        self.chunks: list[Chunk[T]] = []
        self.round = 0
        self.in_round = False
        self.in_idle = False
        self.hurry = 0
        """How many flushes (or a shutdown) want lingering batches to leave at once."""
        self.closing = False
        self.may_exit = True
        self.taken = 0
        self.pending = 0
        """How many items of the round have no outcome yet."""
        self.groups: list[tuple[Any, list[T]]] = []
        """The handler calls of the round, the current one at `place`."""
        self.place = 0
        self.abandoned = False
        """Whether a shutdown gave up on this worker, so that what it still does no longer counts."""
        self.break_wait: Callable[[], None] | None = None
        """Ends the wait of the running handler call with a `DeadlockError`."""
        self.busy = 0.0
        self.task: asyncio.Task[None] | None = None
        self.blocked_on: Callable[[], list[list[Worker[Any]]]] | None = None
        self._sleeper: asyncio.Future[None] | None = None

    # -- owning --------------------------------------------------------------------------------------------------

    def adopt(self, partition: Partition[T]) -> None:
        """Own a partition from now on, with whatever waits in it."""
        partition.owner = self
        partition.heir = None
        partition.attend = self.attend
        self.partitions.append(partition)
        if partition.listed:
            self.ready.append(partition)
            self.wake()
        partition.linger_step = None
        partition.arm()

    def hand_over(self, partition: Partition[T], heir: Worker[T]) -> None:
        """Give a partition to another worker: now, or when the items that are in flight from it are finished.

        A worker whose handler waits for this very partition would then wait for itself: it does not get it.
        """
        partition.heir = None if heir is self else heir
        if not partition.in_flight:
            self._give_to_heir(partition)

    def _give_to_heir(self, partition: Partition[T]) -> None:
        heir, partition.heir = partition.heir, None
        if heir is None:
            return
        partition.owner = heir
        if heir.blocked_on is not None and circle(heir):
            partition.owner = self
            return
        self._release(partition)
        heir.adopt(partition)

    def _release(self, partition: Partition[T]) -> None:
        self.partitions.remove(partition)
        if partition.listed and partition in self.ready:
            self.ready.remove(partition)

    def attend(self, partition: Partition[T]) -> float:
        """A partition got its first item, or has as many more as a lingering batch was waiting for."""
        if partition.linger_step is None:
            self.ready.append(partition)
            if self.rules.linger:
                partition.linger_step = self._linger_step()
            if self._sleeper is not None:
                self.wake()
        elif self._batch_is_full():
            self.wake()
        else:
            self._set_linger_steps()
        return self.clock()

    @property
    def calling(self) -> bool:
        """Whether the worker is in a handler's hands, so that nothing else of it goes on."""
        return self.in_round or self.in_idle

    def needs(self) -> list[list[Worker[Any]]]:
        """Whom the running handler call waits for: it goes on when, of every group, one goes on."""
        return [] if self.blocked_on is None else self.blocked_on()

    # -- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drain until the queue closes and nothing is left."""
        idle_rounds = 0
        while True:
            if self.ready:
                idle_rounds = 0
                rest = self._linger_left()
                if rest > 0:
                    await self._nap(rest)
                    continue
                await self._round()
                # Producers and other workers of this loop get their turn between two rounds.
                await asyncio.sleep(0)
            elif self.closing:
                if self.may_exit:
                    return
                await self._nap(None)
            else:
                if self.dispatch.wants_idle():
                    await self._idle()
                    if self.ready or self.closing:
                        continue
                delay = self.rules.backoff(idle_rounds)
                parked = delay >= self.rules.max_idle and not self.dispatch.wants_idle()
                await self._nap(None if parked else delay)
                idle_rounds += 1

    async def _idle(self) -> None:
        self.round += 1
        current_round.set((self, self.round))
        self.in_idle = True
        try:
            await self.dispatch.idle(self)
        finally:
            self.in_idle = False

    async def _round(self) -> None:
        start = self.clock()
        self.round += 1
        current_round.set((self, self.round))
        chunks = self._take(start)
        if not chunks:
            return
        self.chunks = chunks
        self.in_round = True
        await self.dispatch.run(self, chunks)
        # A round that is cut off stays a round: a shutdown reads from it what is unfinished.
        self.in_round = False
        self.busy += self.clock() - start
        if self.review is not None and self.taken >= REVIEW_AFTER:
            self.review()
        self.chunks, self.groups = [], []
        for partition, _, _ in chunks:
            partition.in_flight = 0
            if partition.watches or partition.leaving:
                partition.settle()
            if partition.heir is not None:
                self._give_to_heir(partition)

    def _take(self, now: float) -> list[Chunk[T]]:
        ready = self.ready
        whole = self.rules.whole_rounds
        budget = self.rules.max_batch
        oldest = math.inf
        taken = 0
        chunks: list[Chunk[T]] = []
        for _ in range(len(ready)):
            partition = ready.popleft()
            partition.linger_step = None
            since = partition.since
            start = partition.removed
            runs = partition.take_runs(budget)
            if partition.listed:
                ready.append(partition)
                partition.note_rest(now)
            elif partition.marks:
                partition.marks = None
            count = partition.removed - start
            if not count:
                continue
            partition.flight_start = start
            partition.in_flight = count
            taken += count
            if since < oldest:  # noqa: PLR1730 - min() costs ten times as much, for each partition of each round
                oldest = since
            for kind, items in runs:
                chunks.append((partition, items, kind))
            if whole:
                budget -= count
                if not budget:
                    break
        if chunks:
            self.taken += taken
            self.latency.record(now - oldest)
        return chunks

    # -- lingering -----------------------------------------------------------------------------------------------

    def _linger_left(self) -> float:
        """How many seconds the waiting batch may still wait for more items; 0 when it is to leave."""
        if not self.rules.linger or self.hurry or self.closing or self._batch_is_full():
            return 0.0
        oldest = min(partition.since for partition in self.ready)
        left = oldest + self.rules.linger - self.clock()
        if left > 0:
            self._set_linger_steps()
        return left

    def _batch_is_full(self) -> bool:
        most = self.rules.max_batch
        if any(partition.qsize() >= most or partition.full() for partition in self.ready):
            return True
        return self.rules.whole_rounds and self._waiting() >= most

    def _waiting(self) -> int:
        return sum(partition.qsize() for partition in self.ready)

    def _linger_step(self) -> int:
        """How many items one partition may take before the batch could be full: then it is worth another look."""
        missing = self.rules.max_batch - self._waiting()
        return max(1, math.ceil(missing / len(self.partitions)))

    def _set_linger_steps(self) -> None:
        step = self._linger_step()
        for partition in self.ready:
            partition.linger_step = step
            partition.arm()

    # -- resting -------------------------------------------------------------------------------------------------

    async def _nap(self, delay: float | None) -> None:
        """Sleep for `delay` seconds, or without an end for None; `wake` cuts it short."""
        self._sleeper = sleeper = self.loop.create_future()
        timer = None if delay is None else self.loop.call_later(delay, self.wake)
        try:
            await sleeper
        finally:
            self._sleeper = None
            if timer is not None:
                timer.cancel()

    def unfinished(self) -> list[T]:
        """The items of the round whose handler call was cut off or never began."""
        return [item for _, items in self.groups[self.place :] for item in items] if self.in_round else []

    def note_failure(self, place: int, error: BaseException) -> None:
        """Tell those who wait for the items of a handler call that they were not handled."""
        if not any(partition.watches for partition, _, _ in self.chunks):
            return
        entry, items = self.groups[place]
        # The calls of one handler hold its items in the order of the chunks: that gives each item's number back.
        kinds = {type(item) for other, batch in self.groups if other is entry for item in batch}
        first = sum(len(batch) for other, batch in self.groups[:place] if other is entry)
        passed = 0
        numbers: dict[Partition[T], int] = {}
        for partition, taken, _ in self.chunks:
            start = numbers.get(partition, partition.flight_start)
            numbers[partition] = start + len(taken)
            for number, item in enumerate(taken, start):
                if type(item) in kinds:
                    if first <= passed < first + len(items):
                        for watch in partition.watches or ():
                            if watch.start <= number < watch.end:
                                watch.wait.fail((item,), error)
                    passed += 1

    def wake(self) -> None:
        """Cut the worker's sleep short, if it sleeps."""
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
