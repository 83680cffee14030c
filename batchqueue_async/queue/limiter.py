"""How many calls run at once: of one handler, or of everything on a scheduler."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from batchqueue_async._native import TurnFields
from batchqueue_async.queue.deadlock import waits

if TYPE_CHECKING:
    from batchqueue_async.queue.drain import DrainTask


class CallLimiter(TurnFields):
    """At most `limit` calls at once; the others wait for their turn, first come, first served.

    Unlike `asyncio.Semaphore`, it knows who calls (a deadlock is found by that), and can be taken whole.

    Attributes:
        limit: how many calls run at once.
        holders: the drain tasks that have a turn.
        waiting: those that wait for one.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.holders: list[DrainTask[Any]] = []
        self.waiting: deque[tuple[DrainTask[Any], asyncio.Future[None]]] | None = None

    @property
    def idle(self) -> bool:
        """Whether nobody has or awaits a turn."""
        return not self.waiting and not self.holders

    def needs(self) -> list[list[DrainTask[Any]]]:
        """Whom the waiting ones need: any one of the holders."""
        return [list(self.holders)]

    def enter_nowait(self, drain: DrainTask[Any]) -> bool:
        """Take a turn if one is free and nobody waits for it."""
        if self.waiting or len(self.holders) >= self.limit:
            return False
        self.holders.append(drain)
        return True

    def enter_alone(self, drain: DrainTask[Any]) -> None:
        """Take all turns at once; only while `idle`. `leave_alone` gives them back."""
        self.holders = [drain] * self.limit

    async def enter(self, drain: DrainTask[Any]) -> None:
        """Take a turn, after all those who came before."""
        if self.enter_nowait(drain):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append((drain, future))
        # Once it has its turn it waits for nobody, though it has not run yet.
        with waits.blocked(drain, lambda: [] if future.done() else self.needs()):
            try:
                await future
            except asyncio.CancelledError:
                if future.cancelled():
                    if (drain, future) in self.waiting:
                        self.waiting.remove((drain, future))
                    self._serve()
                else:
                    self.leave(drain)  # the turn came together with the cancellation
                raise

    def leave(self, drain: DrainTask[Any]) -> None:
        """Give back one turn of the drain task."""
        self.holders.remove(drain)
        if self.waiting:
            self._serve()

    def leave_alone(self) -> None:
        """Give back what `enter_alone` took."""
        self.holders = []
        self._serve()

    def _serve(self) -> None:
        while self.waiting and len(self.holders) < self.limit:
            drain, future = self.waiting.popleft()
            if not future.done():
                self.holders.append(drain)
                future.set_result(None)
