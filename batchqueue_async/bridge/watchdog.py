"""Noticing an event loop that does not run: one thread asks each loop for a sign of life, and names who holds it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from sys import _current_frames  # documented, for all its name  # pyright: ignore[reportPrivateUsage]
from typing import TYPE_CHECKING, Any, TypeAlias

from batchqueue_async._support import forks, log
from batchqueue_async._support.locked import locked
from batchqueue_async._support.log import describe

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
    """The sign of life of one event loop.

    Asked for and reported by the watchdog's thread, given by the loop's. The inboxes are guarded by the watchdog.
    """

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

    def ask(self, now: float, inboxes: list[ThreadInbox[Any]]) -> None:
        """Ask for a sign of life, or report that the last one is overdue."""
        if not self.loop.is_running():
            self._asked = None  # it is between two runs: nobody holds it up
        elif self._asked is None:
            self._asked = now
            self.loop.call_soon_threadsafe(self._beat)
        elif now - self._asked >= self._report_at:
            self._report_at *= 2
            log.warning("loop_stalled", lag=round(now - self._asked, 3), **self.suspect(inboxes))

    def _beat(self) -> None:
        asked = self._asked
        if asked is not None:
            self._lags.append(time.monotonic() - asked)
            if self._report_at > STALLED_AFTER:
                log.warning("loop_recovered", lag=round(self._lags[-1], 3))
        self._report_at = STALLED_AFTER
        self._asked = None

    def suspect(self, inboxes: list[ThreadInbox[Any]]) -> dict[str, str]:
        """Who holds the loop: queue and handler where it is a handler of ours, and the place in the code."""
        found: dict[str, str] = {}
        thread_id = 0
        # All this belongs to another thread, which may go on and change it at any moment.
        with contextlib.suppress(RuntimeError, LookupError, AttributeError):
            running = asyncio.current_task(self.loop)
            for inbox in inboxes:
                thread_id = thread_id or inbox.thread_id
                name = inbox.queue.handler_of(running)
                if name is not None:
                    found.update(queue=inbox.queue.name, handler=name)
            if running is not None:
                found.setdefault("task", running.get_name())
        frame = _current_frames().get(thread_id)
        if frame is not None:
            found["where"] = _place(frame)
        return found


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


_Watched: TypeAlias = "tuple[int, Pulse, list[ThreadInbox[Any]]]"


class Watchdog:
    """Looks after the loops of all queues that have a bridge; its thread runs only while there is one."""

    def __init__(self) -> None:
        self._pulses: dict[int, Pulse] = {}
        self._thread: threading.Thread | None = None
        # It can be taken again by its holder: a signal handler may ask for a bridge while its thread is making one.
        self._lock = threading.RLock()
        forks.watch(self)

    @locked
    def watch(self, inbox: ThreadInbox[Any]) -> None:
        """Look after the loop of an inbox's queue."""
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

    def watches(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the loop is looked after."""
        return self._pulse(loop) is not None

    def lag(self, loop: asyncio.AbstractEventLoop) -> float:
        """By how many seconds a loop is, or last was, late."""
        pulse = self._pulse(loop)
        return 0.0 if pulse is None else pulse.lag(time.monotonic())

    def suspect(self, loop: asyncio.AbstractEventLoop) -> dict[str, str]:
        """Who holds a loop that does not answer."""
        pulse = self._pulse(loop)
        return {} if pulse is None else pulse.suspect(self._inboxes(pulse))

    def _pulse(self, loop: asyncio.AbstractEventLoop) -> Pulse | None:
        pulse = self._pulses.get(id(loop))
        return pulse if pulse is not None and pulse.loop is loop else None

    @locked
    def _inboxes(self, pulse: Pulse) -> list[ThreadInbox[Any]]:
        return list(pulse.inboxes)

    def _run(self) -> None:
        while True:
            time.sleep(INTERVAL)
            ended, beating = self._sort()
            try:
                self._look(ended, beating)
            except Exception as error:  # noqa: BLE001 - the watchdog goes on for all other loops
                log.error("watchdog_failed", **describe(error))
            del ended  # what has ended is not kept until the next look
            if not beating:
                return
            del beating

    @locked
    def _sort(self) -> tuple[list[_Watched], list[_Watched]]:
        """The loops that have ended, which are forgotten, and those to look after; without any the thread ends."""
        pulses = [(key, pulse, list(pulse.inboxes)) for key, pulse in self._pulses.items()]
        ended = [entry for entry in pulses if entry[1].loop.is_closed()]
        beating = [entry for entry in pulses if entry not in ended and not all(one.closed for one in entry[2])]
        self._pulses = {key: pulse for key, pulse, _ in beating}
        if not beating:
            self._thread = None
        return ended, beating

    def _look(
        self,
        ended: list[_Watched],
        beating: list[_Watched],
    ) -> None:
        for _, _, inboxes in ended:
            for inbox in inboxes:
                # Nobody looks after the queues of a loop that was closed under them.
                inbox.loop_ended()
        for _, pulse, inboxes in beating:
            with contextlib.suppress(RuntimeError):  # the loop closed between the two lines
                pulse.ask(time.monotonic(), inboxes)

    def after_fork(self) -> None:
        """In a forked child there is neither the thread nor any loop to look after."""
        self._lock = threading.RLock()
        self._pulses = {}
        self._thread = None


watchdog = Watchdog()
