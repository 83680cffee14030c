"""Noticing an event loop that does not run: one thread asks each loop for a sign of life, and names who holds it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from sys import _current_frames  # documented, for all its name
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import forks, log

if TYPE_CHECKING:
    from types import FrameType

    from batchqueue_async.bridge.inbox import ThreadInbox

INTERVAL = 0.25
"""Seconds between two looks at every loop."""
STALLED_AFTER = 1.0
"""Seconds without a sign of life after which a loop is reported."""
REMEMBERED = 40
"""How many signs of life `lag` looks back at: those of ten seconds."""


class Pulse:
    """The sign of life of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.inboxes: weakref.WeakSet[ThreadInbox[Any]] = weakref.WeakSet()
        self._asked: float | None = None
        self._lags = deque[float](maxlen=REMEMBERED)
        self._report_at = STALLED_AFTER

    def lag(self, now: float) -> float:
        """The longest delay, in seconds, of the signs of life of the last moments, with one that is still awaited."""
        asked = self._asked
        return max([*self._lags, 0.0 if asked is None else now - asked])

    def loop_ended(self) -> None:
        """Nobody looks after the queues of a loop that was closed under them."""
        for inbox in list(self.inboxes):
            inbox.loop_ended()

    def ask(self, now: float) -> None:
        """Ask for a sign of life, or report that the last one is overdue."""
        if self._asked is None:
            self._asked = now
            self.loop.call_soon_threadsafe(self._beat)
        elif now - self._asked >= self._report_at:
            self._report_at *= 2
            log.warning("loop_stalled", lag=round(now - self._asked, 3), **self.suspect())

    def _beat(self) -> None:
        if self._asked is not None:
            self._lags.append(time.monotonic() - self._asked)
            if self._report_at > STALLED_AFTER:
                log.warning("loop_recovered", lag=round(self._lags[-1], 3))
        self._report_at = STALLED_AFTER
        self._asked = None

    def suspect(self) -> dict[str, str]:
        """Who holds the loop: queue and handler where it is one of ours, and the place in the code."""
        found: dict[str, str] = {}
        thread_id = 0
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
            running = asyncio.current_task(self.loop)
            for inbox in list(self.inboxes):
                name = inbox.queue.handler_of(running)
                if name is not None:
                    found.update(queue=inbox.queue.name, handler=name)
                thread_id = thread_id or inbox.thread_id
            if running is not None:
                found.setdefault("task", running.get_name())
        frame = _current_frames().get(thread_id)
        if frame is not None:
            found["where"] = _place(frame)
        return found


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class Watchdog:
    """Looks after the loops of all queues that have a bridge; its thread runs only while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pulses: dict[int, Pulse] = {}
        self._thread: threading.Thread | None = None
        forks.watch(self)

    def watch(self, inbox: ThreadInbox[Any]) -> None:
        """Look after the loop of a inbox's queue."""
        with self._lock:
            pulse = self._pulses.get(id(inbox.loop))
            if pulse is None or pulse.loop is not inbox.loop:
                pulse = self._pulses[id(inbox.loop)] = Pulse(inbox.loop)
            pulse.inboxes.add(inbox)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="batchqueue-watchdog", daemon=True)
                # From Python 3.12 on no thread starts once the interpreter shuts down; a queue can do without.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def lag(self, loop: asyncio.AbstractEventLoop) -> float:
        """By how many seconds a loop is, or last was, late."""
        with self._lock:
            pulse = self._pulses.get(id(loop))
        return 0.0 if pulse is None else pulse.lag(time.monotonic())

    def suspect(self, loop: asyncio.AbstractEventLoop) -> dict[str, str]:
        """Who holds a loop that does not answer."""
        with self._lock:
            pulse = self._pulses.get(id(loop))
        return {} if pulse is None else pulse.suspect()

    def _run(self) -> None:
        while True:
            time.sleep(INTERVAL)
            with self._lock:
                pulses = list(self._pulses.items())
                ended = [pulse for _, pulse in pulses if pulse.loop.is_closed()]
                for key, pulse in pulses:
                    if pulse in ended or all(inbox.closed for inbox in list(pulse.inboxes)):
                        del self._pulses[key]
                beating = list(self._pulses.values())
                if not beating:
                    self._thread = None
            for pulse in ended:
                pulse.loop_ended()
            for pulse in beating:
                with contextlib.suppress(RuntimeError):  # the loop closed between the two lines
                    pulse.ask(time.monotonic())
            if not beating:
                return

    def after_fork(self) -> None:
        """In a forked child there is neither the thread nor any loop to look after."""
        self._lock = threading.Lock()
        self._pulses = {}
        self._thread = None


watchdog = Watchdog()
