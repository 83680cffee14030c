"""Waiting: for a turn, for items to be finished, and knowing when a wait could never end.

All three are plain bookkeeping on one event loop. `Turns` bounds how many calls run at once and serves the line in
order; a `Watch` counts a caller's items down; `circle` looks at who waits for whom.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.queue.drain import Worker
    from batchqueue_async.queue.partition import Partition


class Turns:
    """At most `limit` holders at once; the others wait in line, first come, first served.

    Unlike `asyncio.Semaphore`, it knows its holders (for the deadlock check), and can be taken whole.
    """

    __slots__ = ("holders", "limit", "line")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.holders: list[Worker[Any]] = []
        self.line: deque[tuple[Worker[Any], asyncio.Future[None]]] | None = None

    @property
    def idle(self) -> bool:
        """Whether nobody has or awaits a turn."""
        return not self.line and not self.holders

    def needs(self) -> list[list[Worker[Any]]]:
        """Whom the line waits for: any one of the holders."""
        return [list(self.holders)]

    def enter_nowait(self, worker: Worker[Any]) -> bool:
        """Take a turn if one is free and nobody waits for it."""
        if self.line or len(self.holders) >= self.limit:
            return False
        self.holders.append(worker)
        return True

    def enter_alone(self, worker: Worker[Any]) -> None:
        """Take all turns at once; only while `idle`. `leave_alone` gives them back."""
        self.holders = [worker] * self.limit

    async def enter(self, worker: Worker[Any]) -> None:
        """Take a turn, after all those who came before."""
        if self.enter_nowait(worker):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.line is None:
            self.line = deque()
        self.line.append((worker, future))
        # Once it has its turn it waits for nobody, though it has not run yet.
        worker.blocked_on = lambda: [] if future.done() else self.needs()
        break_circle(worker)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                if (worker, future) in self.line:
                    self.line.remove((worker, future))
                self._serve()
            else:
                self.leave(worker)  # the turn came together with the cancellation
            raise
        finally:
            worker.blocked_on = None

    def leave(self, worker: Worker[Any]) -> None:
        """Give back one turn of the worker."""
        self.holders.remove(worker)
        if self.line:
            self._serve()

    def leave_alone(self) -> None:
        """Give back what `enter_alone` took."""
        self.holders = []
        self._serve()

    def _serve(self) -> None:
        while self.line and len(self.holders) < self.limit:
            worker, future = self.line.popleft()
            if not future.done():
                self.holders.append(worker)
                future.set_result(None)


class Wait:
    """One caller who waits for items in several partitions; `future` resolves when all are finished.

    Attributes:
        failures: what kept some of the items from being handled; filled only for those who asked to know.
        broken: whether the wait was ended because it could never end by itself.
    """

    __slots__ = ("_open", "_sealed", "broken", "failures", "future")

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failures: list[Failure] = []
        self.broken = False
        self._open = 0
        self._sealed = False

    def watch(self, partition: Partition[Any], start: int, end: int) -> None:
        """Wait for the items numbered from `start` to `end - 1` of a partition too."""
        if end <= partition.finished or end <= start:
            return
        last = partition.watches[-1] if partition.watches else None
        if last is not None and last.wait is self and last.end == start:
            last.end = end
            return
        self._open += 1
        if partition.watches is None:
            partition.watches = []
        partition.watches.append(Watch(self, start, end))

    def hold(self) -> None:
        """Wait for one thing more, until `release`."""
        self._open += 1

    def release(self) -> None:
        """One thing less to wait for."""
        self._open -= 1
        self._resolve()

    def seal(self) -> None:
        """Everything to wait for has been named."""
        self._sealed = True
        self._resolve()

    def _resolve(self) -> None:
        if self._sealed and not self._open and not self.future.done():
            self.future.set_result(None)

    def break_wait(self) -> None:
        """End the wait: it is part of a circle of waits."""
        if not self.future.done():
            self.broken = True
            self.future.set_result(None)

    def fail(self, items: Sequence[Any], error: BaseException) -> None:
        """Some of the items were not handled."""
        if items:
            self.failures.append(Failure(tuple(items), error))


class Watch:
    """A range of one partition's items that a `Wait` counts on."""

    __slots__ = ("end", "start", "wait")

    def __init__(self, wait: Wait, start: int, end: int) -> None:
        self.wait = wait
        self.start = start
        self.end = end

    def reach(self) -> None:
        """Every item of the range is finished."""
        self.wait.release()


def circle(worker: Worker[Any]) -> list[Worker[Any]]:
    """Those who, with the worker, wait for each other in a circle that nothing can open; empty if there is none.

    Every worker that waits, directly or through others, is first taken for stuck; then those that something can
    still set free are let go until nothing changes.
    """
    stuck: dict[Worker[Any], list[list[Worker[Any]]]] = {}
    ahead = [worker]
    while ahead:
        other = ahead.pop()
        groups = other.needs()
        if other not in stuck and groups:
            stuck[other] = groups
            ahead.extend(member for group in groups for member in group)
    free: list[Worker[Any]] | None = None
    while free is None or free:
        free = [each for each, groups in stuck.items() if all(any(m not in stuck for m in group) for group in groups)]
        for each in free:
            del stuck[each]
    return list(stuck) if worker in stuck else []


def break_circle(worker: Worker[Any]) -> None:
    """As long as the worker's wait closes a circle, end one wait of the circle with a `DeadlockError`."""
    # One may not be enough: who waits for several partitions at once may be in several circles.
    while ends := [other.break_wait for other in circle(worker) if other.break_wait is not None]:
        ends[0]()
