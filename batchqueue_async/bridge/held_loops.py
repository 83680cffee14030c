"""Event loops that stand still because a handler on them makes a call that blocks its thread.

The calls of a `SyncQueue` without `_async` are for threads. A coroutine may use them all the same, as one in a notebook
does, and holds its loop up meanwhile. If it is a handler's, whatever is asked of that loop waits for the handler call:
one more edge for the search for circles of waits.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from batchqueue_async._support.home_loop import running_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Generator

    from batchqueue_async.queue.deadlock import Needs
    from batchqueue_async.queue.drain import DrainTask


class HeldLoops:
    """Which loops stand still, and for whose handler call."""

    def __init__(self) -> None:
        # Each loop's entry is written by the loop's own thread.
        self._holders: dict[asyncio.AbstractEventLoop, DrainTask[Any]] = {}

    @contextlib.contextmanager
    def held_by(self, drain: DrainTask[Any] | None) -> Generator[None]:
        """Within the block, a handler call of the drain task blocks this thread, and the loop that it runs, if any."""
        loop = running_loop()
        if loop is None or drain is None or loop in self._holders:
            yield
            return
        self._holders[loop] = drain
        try:
            yield
        finally:
            self._holders.pop(loop, None)

    def needs(self, loop: asyncio.AbstractEventLoop) -> Needs:
        """Whom somebody needs who needs the loop to run."""
        holder = self._holders.get(loop)
        return [] if holder is None else [[holder]]


held_loops = HeldLoops()
"""Those of this process."""
