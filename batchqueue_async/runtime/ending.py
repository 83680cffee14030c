"""Ending several queues: those that feed others first, on whatever loops they live, within one deadline for all.

`Ending` decides and never waits: each `step` begins what may end now, takes note of what has ended, and gives up on
queues whose loop does not answer. `end_async` and `end_in_thread` only wait in between.

The deadline is that of the whole call. Once it has passed, everything left begins at once with no time to drain, and
the call returns within `CANCEL_GRACE + LOOP_GRACE`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async._support.home_loop import running_loop
from batchqueue_async._support.log import describe
from batchqueue_async._support.thread_flag import ThreadFlag
from batchqueue_async.queue.shutdown import CANCEL_GRACE
from batchqueue_async.runtime.drain_order import DrainOrder
from batchqueue_async.runtime.loop_calls import GLANCE, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from batchqueue_async.queue.batch_queue import BatchQueue
    from batchqueue_async.queue.stats import ShutdownReport
    from batchqueue_async.runtime.loop_calls import LoopCall

LOOP_GRACE = 0.5
"""Seconds, on top of the deadline, for another thread's loop to answer before it counts as stalled."""
SHORTEST_GLANCE = 0.01
ATTEMPTS = 3
"""How often a queue is asked to end whose answer somebody cancels."""


class Ending:
    """The end of several queues; see the top of the module.

    Args:
        queues: all of them, each once.
        feeds: which of them each one's handlers produce into.
        timeout: seconds for all of them together; when None, each queue's `drain_timeout`, and the longest for all.
        clock: what the deadline is measured by.
        changed: called, on any thread, when `step` has something to do.
        spent: seconds of all these times that are gone already.

    Attributes:
        reports: what became of each queue that has ended.
        stalled: the loops that did not answer.
        last: when, by `time.monotonic`, the whole call is to be over, whatever stands still.
    """

    def __init__(
        self,
        queues: Collection[BatchQueue[Any]],
        feeds: Mapping[BatchQueue[Any], Collection[BatchQueue[Any]]],
        timeout: float | None,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
        spent: float = 0.0,
    ) -> None:
        self.reports: dict[BatchQueue[Any], ShutdownReport] = {}
        self.stalled: set[asyncio.AbstractEventLoop] = set()
        self._own_limits = timeout is None
        allowed = max((queue.config.drain_timeout for queue in queues), default=0.0) if timeout is None else timeout
        self._clock = clock
        self._spent = spent
        left = max(0.0, allowed - spent)
        self._deadline = clock() + left
        self.last = time.monotonic() + left + CANCEL_GRACE + LOOP_GRACE
        self._changed = changed
        self._order = DrainOrder(queues, feeds)
        # What was begun: the loop's answer, and from when on, by time.monotonic, that loop counts as stalled.
        self._running: dict[BatchQueue[Any], tuple[LoopCall[ShutdownReport], float]] = {}
        self._attempts: dict[BatchQueue[Any], int] = {}

    def step(self) -> float | None:
        """Do everything that can be done at once; after how many seconds to look again, None when all have ended."""
        for queue, (call, stalled_at) in list(self._running.items()):
            if call.done():
                self._take_answer(queue, call)
            elif call.loop.is_closed():
                self._abandon(queue, "loop_ended")
            elif queue.loop is not running_loop() and time.monotonic() >= _with_grace(call, stalled_at):
                self.stalled.add(queue.loop)
                self._abandon(queue, "loop_stalled")
        while ready := self._next():
            here = [queue for queue in ready if queue.loop is running_loop() and not queue.ended]
            for queue in here:
                queue.close_gate()
            for queue in ready:
                self._begin(queue)
        if not self._running:
            return None
        rest = min(_with_grace(*each) for each in self._running.values()) - time.monotonic()
        if not self._order.complete:
            rest = min(rest, self._deadline - self._clock())
        return min(GLANCE, max(SHORTEST_GLANCE, rest))

    def cancel(self) -> None:
        """Stop waiting; the queues that have begun to end go on by themselves."""
        for call, _ in self._running.values():
            call.cancel()

    def _next(self) -> list[BatchQueue[Any]]:
        if self._clock() >= self._deadline:
            return self._order.take_all()
        return self._order.take_ready()

    def _begin(self, queue: BatchQueue[Any]) -> None:
        if queue.ended:
            self._ended(queue, queue.abandon())
            return
        left = self._deadline - self._clock()
        if self._own_limits:
            left = min(left, queue.config.drain_timeout - self._spent)
        allowed = max(0.0, left)
        with contextlib.suppress(RuntimeError):  # the loop closes between the two lines
            if queue.loop.is_running():
                call = submit(queue.loop, lambda: queue.shutdown(allowed))
                self._running[queue] = call, time.monotonic() + allowed + CANCEL_GRACE
                call.add_done_callback(lambda _: self._changed())
                return
        self._ended(queue, queue.abandon())

    def _take_answer(self, queue: BatchQueue[Any], call: LoopCall[ShutdownReport]) -> None:
        del self._running[queue]
        try:
            report = call.result()
        except concurrent.futures.CancelledError:
            # Somebody cancelled all tasks of that loop, or the loop ends.
            self._attempts[queue] = self._attempts.get(queue, 0) + 1
            if self._attempts[queue] < ATTEMPTS:
                self._begin(queue)
            else:
                self._abandon(queue, "loop_ended")
        except Exception as error:  # noqa: BLE001 - whatever went wrong with one queue, the others are to end
            log.error("shutdown_failed", queue=queue.name, **describe(error))
            self._abandon(queue, "shutdown_failed")
        else:
            self._ended(queue, report)

    def _abandon(self, queue: BatchQueue[Any], why: str) -> None:
        """Account for what is in a queue without its loop."""
        running = self._running.pop(queue, None)
        if running is not None:
            running[0].cancel()
        if not queue.ended:
            log.error(why, queue=queue.name)
        self._ended(queue, queue.abandon())

    def _ended(self, queue: BatchQueue[Any], report: ShutdownReport) -> None:
        self.reports[queue] = report
        self._order.done(queue)


def _with_grace(call: LoopCall[Any], stalled_at: float) -> float:
    """A loop that has begun may be in the midst of its report; one that has not is blocked for sure."""
    return stalled_at + LOOP_GRACE if call.begun else stalled_at


async def end_async(
    queues: Collection[BatchQueue[Any]],
    feeds: Mapping[BatchQueue[Any], Collection[BatchQueue[Any]]],
    timeout: float | None,
) -> Ending:
    """End queues from a coroutine; cancelling it lets those that have begun go on by themselves."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed under the one who waited
            loop.call_soon_threadsafe(changed.set)

    ending = Ending(queues, feeds, timeout, clock=loop.time, changed=tell)
    try:
        while (rest := ending.step()) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await changed.wait()
            changed.clear()
    finally:
        ending.cancel()
    return ending


def end_in_thread(
    queues: Collection[BatchQueue[Any]],
    feeds: Mapping[BatchQueue[Any], Collection[BatchQueue[Any]]],
    timeout: float | None,
    *,
    spent: float = 0.0,
) -> Ending:
    """End queues from a thread that runs none of their loops."""
    changed = ThreadFlag()
    ending = Ending(queues, feeds, timeout, clock=time.monotonic, changed=changed.set, spent=spent)
    try:
        while (rest := ending.step()) is not None:
            changed.wait(rest)
            changed.clear()
    finally:
        ending.cancel()
    return ending
