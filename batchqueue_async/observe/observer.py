"""Looks at the process on behalf of all who ask: one look serves them, and what has to be remembered is kept here."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from batchqueue_async.observe.dashboard import Frame, frame_of
from batchqueue_async.observe.rates import RateTracker
from batchqueue_async.observe.snapshot import take_snapshot
from batchqueue_async.observe.status import StatusTracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchqueue_async.observe.snapshot import ProcessSnapshot
    from batchqueue_async.observe.status import Phase, Status
    from batchqueue_async.runtime.manager import BatchQueueManager

FRESH = 0.2
"""Seconds for which one look serves all who ask."""
FRAME_EVERY = 0.9
"""Seconds between two frames: each is compared with the one before, and many pages share them."""
FRAMES_SHARE = 200.0
"""A frame comes after this many times the CPU seconds of the one before: half a percent of a core, without sending."""
SLOWEST_FRAMES = 1.5
"""The most seconds between two frames, so that a fault shows soon; frames that take long may cost more of a core."""
HISTORY = 600
"""Frames that a page is given at its start: ten minutes."""


class Observer:
    """Snapshots, statuses and frames of this process, from any thread.

    Example:
        >>> observer = Observer()
        >>> snapshot, status = observer.look()
        >>> status.live
        True
    """

    def __init__(
        self,
        manager: BatchQueueManager | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._clock = clock
        # Those who ask are on the ops thread and, where the application is mounted, on others.
        self._lock = threading.Lock()
        self._rates = RateTracker()
        self._statuses = StatusTracker()
        self._last: tuple[float, ProcessSnapshot, Status] | None = None
        self._glanced: tuple[float, ProcessSnapshot, Status] | None = None
        self._before: ProcessSnapshot | None = None
        self._frame: Frame | None = None
        self._framed_at = 0.0
        self._frame_every = FRAME_EVERY
        self._shown: frozenset[str] | None = None
        self._history: deque[list[float | None]] = deque(maxlen=HISTORY)

    @property
    def phase(self) -> Phase:
        """The phase of the program, "starting", "running" or "draining": only while it runs is it ready."""
        return self._statuses.phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        with self._lock:
            self._statuses.phase = phase
            self._last = self._glanced = None

    def look(self) -> tuple[ProcessSnapshot, Status]:
        """The process now, or as somebody saw it a moment ago."""
        with self._lock:
            now = self._clock()
            if self._last is None or now - self._last[0] >= FRESH:
                self._last = (now, *self._see(None))
            return self._last[1:]

    def glance(self) -> tuple[ProcessSnapshot, Status]:
        """As `look`, with the totals of queues alone: what their states need, and a tenth of the work."""
        with self._lock:
            now = self._clock()
            for seen in (self._last, self._glanced):
                if seen is not None and now - seen[0] < FRESH:
                    return seen[1:]
            self._glanced = (now, *self._see(lambda _: False))
            return self._glanced[1:]

    def _see(self, closer: Callable[[str], bool] | None) -> tuple[ProcessSnapshot, Status]:
        snapshot = take_snapshot(self._manager, rates=self._rates.of, closer=closer)
        return snapshot, self._statuses.see(snapshot)

    def _is_shown(self, queue: str) -> bool:
        return self._shown is None or queue in self._shown

    def frame(self) -> Frame:
        """What the page shows now, or showed less than `FRAME_EVERY` seconds ago."""
        with self._lock:
            now = self._clock()
            if self._frame is None or now - self._framed_at >= self._frame_every:
                began = time.thread_time()
                # Who comes among the queues that are shown one by one is looked at closely from the next frame on.
                snapshot, status = self._see(self._is_shown)
                self._frame, self._before = frame_of(snapshot, status, self._before), snapshot
                self._framed_at = now
                self._shown = frozenset(row["name"] for row in self._frame.queues)
                self._history.append(self._frame.point())
                cost = time.thread_time() - began
                self._frame_every = min(SLOWEST_FRAMES, max(FRAME_EVERY, FRAMES_SHARE * cost))
            return self._frame

    def next_frame_in(self) -> float:
        """Seconds until there is a frame that is not the last one."""
        with self._lock:
            return max(0.0, self._framed_at + self._frame_every - self._clock())

    def history(self) -> list[list[float | None]]:
        """The charts' points of the last frames, the oldest first."""
        with self._lock:
            return list(self._history)

    def as_json(self, value: Any) -> bytes:
        """A value as JSON; dataclasses as objects, and what is infinite as null."""
        import msgspec  # noqa: PLC0415 - only for who asks for JSON

        return msgspec.json.encode(value)
