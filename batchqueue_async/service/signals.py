"""Signals of a service: the first asks for a stop, the second ends it at once, SIGHUP reads the file again.

A handler that blocks the event loop must not keep the process: what the loop does not do in its time, a thread ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Self

from batchqueue_async._support import log

if TYPE_CHECKING:
    from collections.abc import Callable

UNDELIVERED = 3
"""The exit status where something is left."""
HURRY = 5.0
"""Seconds that the loop has after the second signal to account for what is left."""
GRACE = 5.0
"""Seconds beyond the drain's deadline after which a process whose loop does not end it is ended."""


class StopSignals:
    """The signals of one service, within a `with` on the main thread and the running loop.

    Attributes:
        asked: set by the first signal.
        hurry: set by the second.
        reloads: set by SIGHUP; whoever has read the file again clears it.
    """

    def __init__(self, deadline: Callable[[], float], *, end: Callable[[int], Any] = os._exit) -> None:
        """Say how it is known how long a stop may take.

        Args:
            deadline: the seconds that a stop may take, asked at the first signal.
            end: what ends the process when the loop does not.
        """
        self._deadline = deadline
        self._end = end
        self._loop = asyncio.get_running_loop()
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self.reloads = asyncio.Event()
        self.name = ""
        # What signals have asked for; the events follow when the loop gets to it.
        self._stopped = self._hurried = False
        self._over = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Not the loop's own handlers: these are called while a handler of the user's blocks the loop, too.
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._stop)
        self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._reload)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop(self, reason: str) -> None:
        """Ask for a stop without a signal."""
        if not self.name:
            self.name = reason
        self.asked.set()

    def _stop(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if not self._stopped:
            self._stopped = True
            self.name = name
            seconds = self._deadline()
            self._say(f"{name}: draining within {seconds:g} s; once more ends at once")
            self._tell(self.asked.set)
            self._watch(seconds + GRACE, f"the drain is not over {GRACE:g} s after its {seconds:g} s: a handler blocks")
        elif not self._hurried:
            self._hurried = True
            self._say(f"{name}: ending at once")
            self._tell(self.hurry.set)
            self._watch(HURRY, f"nothing has ended {HURRY:g} s after the second signal: a handler blocks")
        else:
            self._say(f"{name}: ended")
            self._end(UNDELIVERED)

    def _reload(self, _number: int, _frame: object) -> None:
        self._tell(self.reloads.set)

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed: it has ended already
            log.debug("signal_after_end")

    def _watch(self, seconds: float, words: str) -> None:
        def wait() -> None:
            if not self._over.wait(seconds):
                self._say(f"{words} the event loop; what it holds is lost")
                self._end(UNDELIVERED)

        threading.Thread(target=wait, name="batchqueue-stop", daemon=True).start()

    def _say(self, text: str) -> None:
        # Not by `print`: a signal handler may interrupt one.
        os.write(2, f"{text}\n".encode())
