"""The drain task: it owns partitions, takes bounded rounds of batches from them, and rests when there is nothing.

Only two may end a drain task: the queue, by `stop`, and the end of its loop, which cancels every task from outside.
Whatever else cancels it comes from its own handlers: their timeouts and task groups cancel the task that they run in,
some of them (asyncio's task groups before Python 3.13, timeouts of an older style) without taking that back. So the
task looks at who cancels it, and not at how often it was cancelled.

A drain task never looks at an empty partition: the first item into one puts it on the task's `ready` list and cuts
its sleep short. A round takes at most one bounded batch from each ready partition, so none waits longer than
one round for its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from dataclasses import dataclass
from sys import maxsize
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from batchqueue_async._native import DrainFields, accelerated, compiled, finish_usual, take_usual
from batchqueue_async._support.contexts import InContexts
from batchqueue_async.queue.deadlock import HandlerWaits, waits
from batchqueue_async.queue.round import Round, current_round

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchqueue_async.queue.partition import Partition
    from batchqueue_async.queue.stats import Histogram

T = TypeVar("T")


class Dispatch(Protocol[T]):
    """What a drain task does with what it took: the next station of an item's way."""

    async def run(self, round_: Round[T]) -> None:
        """Give every item of the round to its handler; raise only when the drain task is cancelled."""
        ...

    async def idle(self, drain: DrainTask[T]) -> None:
        """Tell the handlers that want to know that there is nothing to do."""
        ...

    def wants_idle(self) -> bool:
        """Whether any handler has an `on_idle`."""
        ...

    @property
    def lingers(self) -> bool:
        """Whether a handler has a linger of its own; a plain attribute, read in each round."""
        ...

    def linger_of(self, partition: Partition[T]) -> float:
        """How many seconds a batch of the partition may wait."""
        ...


REVIEW_AFTER = 1_000
"""Items that a drain task takes before its queue looks once whether its selector spreads them."""


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The loop's clock, where it is fine enough to measure by.

    uvloop's counts whole milliseconds and stands still within a turn of the loop; the system's monotonic clock is
    the one that it is made from.
    """
    kind = type(loop)
    # asyncio's own is the system's too, behind a call of Python.
    plain = getattr(kind, "time", None) is asyncio.BaseEventLoop.time or kind.__module__.startswith("uvloop")
    return time.monotonic if plain else loop.time


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRules:
    """The part of a queue's configuration that its drain tasks go by."""

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


class _Task(asyncio.Task[None]):
    """The asyncio task of a drain task, which tells it of every cancellation before it happens."""

    __slots__ = ("_drain",)

    def __init__(self, drain: DrainTask[Any], name: str) -> None:
        self._drain = drain
        super().__init__(InContexts(drain.run()), loop=drain.loop, name=name)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel, as ever; what is to come of it is for the drain task to decide."""
        self._drain.note_cancellation()
        return super().cancel(msg)


class DrainTask(DrainFields, Generic[T]):
    """One drain task and the partitions that it owns.

    Attributes:
        ready: the partitions with items, in the order of their turns.
        round: the round that it is in; one that was cut off stays, so that a shutdown can account for it.
        rounds: how many rounds it began, looks at idle handlers included.
        waits: what its handler calls wait for.
        prompt: whether the queue itself, whatever its handlers want, lets no batch linger.
        stopping: whether a cancellation is on its way that ends it.
        disturbed: whether it was cancelled since the last `recover`, by whomever.
    """

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
        self.partitions: list[Partition[T]] = []
        self.ready: deque[Partition[T]] = deque()
        self.round: Round[T] | None = None
        self.rounds = 0
        self.hurry = 0
        """How many flushes (or a shutdown) want lingering batches to leave at once."""
        self.closing = False
        self.may_exit = True
        self.taken = 0
        self.busy = 0.0
        self.task: asyncio.Task[None] | None = None
        self._told = self.on_ready  # one for all partitions: there may be thousands
        self.waits = HandlerWaits()
        self.stopping = False
        self.disturbed = False
        self.prompt = False
        self._review: Callable[[], None] | None = None
        self._sleeper: asyncio.Future[None] | None = None

    # -- owning --------------------------------------------------------------------------------------------------

    def adopt(self, partition: Partition[T]) -> None:
        """Own a partition from now on, with whatever waits in it."""
        partition.owner = self
        partition.next_owner = None
        partition.on_ready = self._told
        self.partitions.append(partition)
        if partition.listed:
            self.ready.append(partition)
            self.wake()
        partition.linger_step = None
        partition.rearm()

    def hand_over(self, partition: Partition[T], next_owner: DrainTask[T]) -> None:
        """Give a partition to another drain task: now, or when the items that are in flight from it are finished.

        One whose handler waits for this very partition would then wait for itself: it does not get it.
        """
        partition.next_owner = None if next_owner is self else next_owner
        if not partition.in_flight:
            self._give_to_next_owner(partition)

    def _give_to_next_owner(self, partition: Partition[T]) -> None:
        next_owner, partition.next_owner = partition.next_owner, None
        if next_owner is None:
            return
        partition.owner = next_owner
        if waits.find_cycle(next_owner):
            partition.owner = self
            return
        self._release(partition)
        next_owner.adopt(partition)

    def _release(self, partition: Partition[T]) -> None:
        self.partitions.remove(partition)
        if partition.listed and partition in self.ready:
            self.ready.remove(partition)

    @compiled("on_ready")
    def on_ready(self, partition: Partition[T]) -> float:
        """A partition got its first item, or has as many more as a lingering batch was waiting for."""
        if partition.linger_step is None:
            self.ready.append(partition)
            if self.rules.linger or self.dispatch.lingers:
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
        """Whether it is in a handler's hands, so that nothing else of it goes on."""
        return self.round is not None

    @property
    def in_flight(self) -> int:
        """How many items it has taken that have no outcome yet."""
        return 0 if self.round is None else self.round.pending

    # -- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drain until the queue closes and nothing is left."""
        while True:
            try:
                return await self._drain()
            except asyncio.CancelledError:
                # It rested: its rounds deal with their cancellations by themselves.
                await self.recover()

    async def _drain(self) -> None:
        idle_rounds = 0
        while True:
            if self.ready:
                idle_rounds = 0
                rest = self._linger_left()
                if rest > 0:
                    await self._nap(rest)
                    continue
                await self._round()
                # Producers and other drain tasks of this loop get their turn between two rounds.
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
                await self._nap(None if parked else delay, idle=True)
                idle_rounds += 1

    async def _idle(self) -> None:
        self._begin_round()
        try:
            await self.dispatch.idle(self)
        finally:
            self._end_round()

    def _begin_round(self) -> Round[T]:
        self.rounds += 1
        self.round = begun = Round(self)
        current_round.set(begun)
        return begun

    def _end_round(self) -> None:
        if self.round is not None:
            self.round.close()
            self.round = None

    async def _round(self) -> None:
        start = self.clock()
        current = self._begin_round()
        self._take(current, start)
        chunks = current.chunks
        if not chunks:
            self._end_round()
            return
        await self.dispatch.run(current)
        # A round that is cut off stays a round: a shutdown reads from it what is unfinished.
        self._end_round()
        self.busy += self.clock() - start
        if self._review is not None and self.taken >= REVIEW_AFTER:
            review, self._review = self._review, None
            review()
        for partition, _, _ in chunks[finish_usual(chunks) :]:
            partition.in_flight = 0
            if partition.ranges is not None or partition.leaving:
                partition.settle()
            if partition.next_owner is not None:
                self._give_to_next_owner(partition)

    def _take(  # noqa: C901, PLR0912, PLR0915 - a hot path, written out
        self, current: Round[T], now: float
    ) -> None:
        """Move a bounded batch of each ready partition into the round, which owns them from here on."""
        ready = self.ready
        whole = self.rules.whole_rounds
        budget = self.rules.max_batch
        oldest = math.inf
        taken = 0
        chunks = current.chunks
        each_lingers = self.dispatch.lingers
        usual = accelerated and not each_lingers
        left = len(ready)
        while left:
            if usual:
                left, more, since = take_usual(ready, chunks, left, budget, budget if whole else maxsize)
                if more:
                    taken += more
                    oldest = min(oldest, since)
                    if whole:
                        budget -= more
                        if not budget:
                            break
                    continue
            left -= 1
            partition = ready.popleft()
            if each_lingers and self._may_linger(partition, now):
                ready.append(partition)
                continue
            partition.linger_step = None
            since = partition.since
            start = partition.removed
            runs = partition.take_runs(budget)
            if ready and ready[-1] is partition:
                pass  # a finalizer or a signal handler has produced meanwhile, and listed it anew
            elif partition.listed:
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
            current.pending = taken
            self.taken += taken
            self.latency.record(now - oldest)

    def start(self, name: str, review: Callable[[], None]) -> asyncio.Task[None]:
        """Begin to drain; `review` is called once, after `REVIEW_AFTER` items."""
        self._review = review
        self.prompt = not self.rules.linger
        # Made by hand, since a loop's own task factory makes tasks of another class, or begins to run them at once.
        self.task = _Task(self, name)
        return self.task

    def finish(self, *, may_exit: bool) -> None:
        """Drain what is left; then end, or wait until ending is allowed."""
        self.closing = True
        self.may_exit = may_exit
        self.wake()

    # -- being cancelled -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End, whatever it is at: the handler call that runs is cancelled."""
        self.stopping = True
        if self.task is not None:
            self.task.cancel()

    def note_cancellation(self) -> None:
        """Its task is about to be cancelled."""
        self.disturbed = True
        # A handler, what it awaits, its timers and the tasks that it started all run in the context of its round.
        origin = current_round.get()
        if origin is None or origin.drain is not self:
            self.stopping = True

    def is_ended_by(self, error: BaseException) -> bool:
        """Whether an error is meant for the drain task, the loop or the interpreter, and not for a handler's batch."""
        if isinstance(error, asyncio.CancelledError):
            return self.stopping
        if isinstance(error, GeneratorExit):  # if not of the handler's own making, somebody closes the coroutine
            return asyncio.current_task(self.loop) is not self.task
        return isinstance(error, KeyboardInterrupt | SystemExit)

    async def recover(self) -> None:
        """Go on after a cancellation that was a handler's own business; raise if it was for the drain task."""
        while self.disturbed:
            if self.stopping:
                raise asyncio.CancelledError
            self.disturbed = False
            # It may not have been delivered yet: a handler may cancel itself and return.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            while self.task is not None and self.task.uncancel():
                pass

    # -- when it is over -----------------------------------------------------------------------------------------

    def fail_unfinished(self, error: BaseException) -> None:
        """Tell those who wait for the items of a round that was cut off that these will not be handled."""
        if self.round is not None:
            self.round.fail_unfinished(error)

    def unfinished(self) -> list[T]:
        """The items of its round that have no outcome."""
        return [] if self.round is None else self.round.unfinished()

    def still_running(self) -> int:
        """How many items are with a handler call that goes on although it was cancelled."""
        going_on = self.task is not None and not self.task.done() and self.round is not None
        return self.round.in_call() if going_on and self.round is not None else 0

    def give_up(self) -> list[T]:
        """Do nothing more, and count nothing; what its round leaves over."""
        left = self.unfinished()
        if self.round is not None:
            self.round.abandon()
        self.ready.clear()
        return left

    # -- lingering -----------------------------------------------------------------------------------------------

    def _linger_left(self) -> float:
        """How many seconds the waiting batch may still wait for more items; 0 when it is to leave."""
        if self.hurry or self.closing or not (self.rules.linger or self.dispatch.lingers) or self._batch_is_full():
            return 0.0
        left = min(self._due(partition) for partition in self.ready) - self.clock()
        if left > 0:
            self._set_linger_steps()
        return left

    def _due(self, partition: Partition[T]) -> float:
        """When a partition's items are to leave, at the latest."""
        linger = self.dispatch.linger_of(partition) if self.dispatch.lingers else self.rules.linger
        return partition.since + linger

    def _may_linger(self, partition: Partition[T], now: float) -> bool:
        """Whether a partition may go on waiting while others leave."""
        if self.hurry or self.closing or partition.full() or partition.qsize() >= self.rules.max_batch:
            return False
        return self._due(partition) > now

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
            partition.rearm()

    def reconfigure(self, rules: DrainRules) -> None:
        """Go by other rules from the next round on; a batch that lingers is looked at again."""
        self.rules = rules
        self.prompt = not rules.linger
        self.wake()

    def begin_hurry(self) -> None:
        """Let no batch linger, until `end_hurry`."""
        self.hurry += 1
        self.wake()

    def end_hurry(self) -> None:
        """The hurry is over."""
        self.hurry -= 1

    # -- resting -------------------------------------------------------------------------------------------------

    async def _nap(self, delay: float | None, *, idle: bool = False) -> None:
        """Sleep for `delay` seconds, or without an end for None; `wake` cuts it short, and an item if it is `idle`."""
        self._sleeper = sleeper = self.loop.create_future()
        if idle and self.ready:  # a finalizer or a signal handler has produced since it was looked at
            return
        timer = None if delay is None else self.loop.call_later(delay, self.wake)
        try:
            await sleeper
        finally:
            self._sleeper = None
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Cut its sleep short, if it sleeps."""
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
