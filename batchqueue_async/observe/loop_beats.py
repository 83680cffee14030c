"""Signs of life of the process's event loops: asked for by whoever watches, from any thread, and given by the loops."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from batchqueue_async._support import forks

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Beat:
    """The sign of life of one loop; `ask` sends a callback into it, and its waiting time is the loop's lag.

    Attributes:
        name: the loop's thread, "main" for the main thread; empty until the loop has answered once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = weakref.ref(loop)
        self._clock = clock
        # Written by the asking thread and by the loop; each only replaces it, and a reader takes one value.
        self._asked: float | None = None
        self._lag = 0.0
        self.name = ""

    def ask(self) -> None:
        """Ask for a sign of life, unless one is awaited already."""
        loop = self._loop()
        if self._asked is not None or loop is None:
            return
        self._asked = self._clock()
        try:
            loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # the loop is closed: nothing of it is late any more
            self._asked = None
            self._lag = 0.0

    def lag(self) -> float:
        """Seconds by which the loop is late: now, while it owes an answer, or when it last answered."""
        asked = self._asked
        loop = self._loop()
        if loop is None or not loop.is_running():
            return 0.0  # it is between two runs, or has ended
        return self._lag if asked is None else max(self._lag, self._clock() - asked)

    def _answer(self) -> None:
        asked = self._asked
        if not self.name:
            thread = threading.current_thread()
            self.name = "main" if thread is threading.main_thread() else thread.name.removeprefix("batchqueue-")
        if asked is not None:
            self._lag = self._clock() - asked
            self._asked = None


class LoopBeats:
    """The beats of every loop that something observable lives on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beats: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Beat] = weakref.WeakKeyDictionary()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child none of the loops runs."""
        self._lock = threading.Lock()
        self._beats = weakref.WeakKeyDictionary()

    def of(self, loop: asyncio.AbstractEventLoop) -> Beat:
        """The beat of a loop, asked for now if none is awaited."""
        with self._lock:
            beat = self._beats.get(loop)
            if beat is None:
                beat = self._beats[loop] = Beat(loop)
        beat.ask()
        return beat


beats = LoopBeats()
"""Those of this process."""
