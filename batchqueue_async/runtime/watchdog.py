"""Noticing an event loop that does not run: one thread asks each loop for a sign of life, and names who holds it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from batchqueue_async import forks, log

if TYPE_CHECKING:
    from types import FrameType

    from batchqueue_async.queue.batch_queue import BatchQueue

INTERVAL = 0.25
"""Seconds between two looks at every loop."""
STALLED_AFTER = 1.0
"""Seconds without a sign of life after which a loop is reported."""


class Pulse:
    """The sign of life of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.queues: weakref.WeakSet[BatchQueue[Any]] = weakref.WeakSet()
        self.thread_id: int | None = None
        self._asked: float | None = None
        self._last_lag = 0.0
        self._report_at = STALLED_AFTER

    def lag(self, now: float) -> float:
        """By how many seconds the loop is, or last was, late."""
        asked = self._asked
        return self._last_lag if asked is None else max(self._last_lag, now - asked)

    def ask(self, now: float) -> None:
        """Ask for a sign of life, or report that the last one is overdue."""
        if self._asked is None:
            self._asked = now
            self.loop.call_soon_threadsafe(self._beat)
        elif now - self._asked >= self._report_at:
            self._report_at *= 2
            log.warning("loop_stalled", lag=round(now - self._asked, 3), **self.suspect())

    def _beat(self) -> None:
        self.thread_id = threading.get_ident()
        if self._asked is not None:
            self._last_lag = time.monotonic() - self._asked
            if self._report_at > STALLED_AFTER:
                log.warning("loop_recovered", lag=round(self._last_lag, 3))
        self._report_at = STALLED_AFTER
        self._asked = None

    def suspect(self) -> dict[str, str]:
        """Who holds the loop: queue and handler where it is one of ours, and the place in the code."""
        found: dict[str, str] = {}
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
            running = asyncio.current_task(self.loop)
            for queue in list(self.queues):
                name = queue.handler_of(running)
                if name is not None:
                    found.update(queue=queue.name, handler=name)
            if running is not None:
                found.setdefault("task", running.get_name())
        frame = sys._current_frames().get(self.thread_id or 0)
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
        self._changed = threading.Event()
        forks.watch(self)

    def watch(self, queue: BatchQueue[Any]) -> None:
        """Look after the loop of a queue."""
        with self._lock:
            pulse = self._pulses.get(id(queue.loop))
            if pulse is None or pulse.loop.is_closed():
                pulse = self._pulses[id(queue.loop)] = Pulse(queue.loop)
            pulse.queues.add(queue)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="batchqueue-watchdog", daemon=True)
                self._thread.start()

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
            self._changed.wait(INTERVAL)
            with self._lock:
                for key, pulse in list(self._pulses.items()):
                    if pulse.loop.is_closed() or not any(not queue.closed for queue in list(pulse.queues)):
                        del self._pulses[key]
                if not self._pulses:
                    self._thread = None
                    return
                pulses = list(self._pulses.values())
            for pulse in pulses:
                with contextlib.suppress(RuntimeError):  # the loop closed between the two lines
                    pulse.ask(time.monotonic())

    def after_fork(self) -> None:
        """In a forked child there is neither the thread nor any loop to look after."""
        self._lock = threading.Lock()
        self._pulses = {}
        self._thread = None


watchdog = Watchdog()
