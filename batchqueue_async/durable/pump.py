"""From `put` to the writer and back: what gathers while one round is written is the next round.

Lives on the loop. The writer's thread sees a round only while it works on it, so there is no lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import structlog

from batchqueue_async.durable import format as fmt
from batchqueue_async.durable.dropping import Dropper
from batchqueue_async.durable.files import NO_ROOM
from batchqueue_async.durable.frame import ALWAYS, INTERVAL, Frame
from batchqueue_async.durable.writer import Outcome, Round, Writer
from batchqueue_async.errors import BatchQueueError, DiskFullError, DurableQueueError, QueueClosedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchqueue_async.durable.config import DurableConfig
    from batchqueue_async.durable.state import QueueState
    from batchqueue_async.durable.worker import Runner

DROPPED = -1
_ROUND_BYTES = 32 << 20
_GROUP_RECORDS = 1 << 14
# Acknowledgements are a hint: they wait this long for a round of frames to travel with.
_HINT_DELAY = 0.01
_PROBE = 0.25

_log = structlog.get_logger("batchqueue_async")


class Pump:
    """Gathers frames, sends rounds, and tells everybody what came of them."""

    def __init__(
        self,
        state: QueueState,
        writer: Writer,
        runner: Runner,
        *,
        path: Path,
        clock: Callable[[], int],
        on_ready: Callable[[], None],
        on_deleted: Callable[[list[int]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._state = state
        self._config: DurableConfig = state.config
        self._writer = writer
        self._runner = runner
        self._path = path
        self._clock = clock
        self._on_ready = on_ready
        self._on_deleted = on_deleted
        self._pending: deque[Frame] = deque()
        self._group: Frame | None = None
        self.busy = False
        self._scheduled = False
        self.stalled = False
        self._sync_due = False
        self._interval_dirty = False
        self._last_write = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._room_waiters: list[asyncio.Future[None]] = []
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._ended = False

    # Frames come in

    def append(self, payload: bytes, rank: int) -> asyncio.Future[int]:
        """One record: it joins the group that the next round will write."""
        group = self._group
        if (
            group is None
            or group.rank != rank
            or group.raw >= self._config.write_buffer
            or group.count >= _GROUP_RECORDS
        ):
            group = self._group = Frame(fmt.GROUP, [], 0, self._clock(), rank)
            self._enter(group)
        size = len(payload)
        group.gathered.append(payload)
        group.count += 1
        group.raw += size
        state = self._state
        state.pending_records += 1
        state.pending_bytes += size + fmt.TABLE_ROW
        future: asyncio.Future[int] = self._loop.create_future()
        group.waiters.append(future)
        return future

    def append_frame(self, payloads: list[bytes], raw: int, rank: int) -> asyncio.Future[int]:
        """Records that are written together or not at all."""
        frame = Frame(fmt.ATOMIC, payloads, raw, self._clock(), rank)
        self._group = None
        self._enter(frame)
        self._state.pending_records += frame.count
        self._state.pending_bytes += raw + fmt.TABLE_ROW * frame.count
        future: asyncio.Future[int] = self._loop.create_future()
        frame.waiters.append(future)
        return future

    def _enter(self, frame: Frame) -> None:
        timeout = self._config.block_timeout
        frame.deadline = None if timeout is None else self._loop.time() + timeout
        self._pending.append(frame)
        self._state.pending_bytes += fmt.FRAME_HEADER
        self.kick()

    def withdraw(self, future: asyncio.Future[int]) -> None:
        """The caller of a put was cancelled: the record goes, unless the writer has it already."""
        for frame in self._pending:
            if future in frame.waiters:
                if frame.kind == fmt.ATOMIC or frame.count == 1:
                    self._pending.remove(frame)
                    self._unpend(frame)
                    if self._group is frame:
                        self._group = None
                else:
                    self._take_out(frame, frame.waiters.index(future))
                self._end_stall()
                self._wake_room()
                return

    def _take_out(self, frame: Frame, at: int) -> None:
        payloads = frame.payloads or []
        size = len(payloads[at])
        del payloads[at], frame.waiters[at]
        frame.count -= 1
        frame.raw -= size
        self._state.pending_records -= 1
        self._state.pending_bytes -= size + fmt.TABLE_ROW

    def _unpend(self, frame: Frame) -> None:
        self._state.pending_records -= frame.count
        self._state.pending_bytes -= fmt.frame_size(frame.count, frame.raw)

    # Rounds

    @property
    def freeing(self) -> bool:
        """Whether a round is under way, or to come, that may free some room."""
        return self.busy or bool(self._state.touched) or self._state.shrinkable() is not None

    def kick(self) -> None:
        """Send a round after everybody who runs in this turn of the loop has had a say."""
        if not self._scheduled and not self.busy and not self._ended:
            self._scheduled = True
            self._loop.call_soon(self._send)

    def touch(self) -> None:
        """There is something for the hints: soon, or with the next round."""
        if not self.busy and "hints" not in self._timers:
            self._after("hints", _HINT_DELAY, self.kick)

    def _send(self, *, last: bool = False) -> None:
        self._scheduled = False
        if self.busy or self._ended:
            return
        state = self._state
        work = Round(now_ns=self._clock(), last=last)
        work.deletes = state.deletable()
        if self._room_waiters or self.stalled or last:
            work.shrink = None if self._pending and not self.stalled else state.shrinkable()
        if not self.stalled or "probe" not in self._timers:
            work.frames = self._next_frames()
            state.assign(work.frames)
        work.hints = state.hints()
        work.sync = self._sync_due or any(frame.rank == ALWAYS for frame in work.frames)
        wanted = work.frames or work.deletes or work.hints or work.sync or work.shrink or work.last
        if not wanted and not self._room_waiters:
            return
        self._sync_due = False
        self.busy = True
        self._cancel("hints")
        self._runner.submit(self._writer.run, work, done=lambda result, error: self._done(work, result, error))

    def _next_frames(self) -> list[Frame]:
        self._group = None
        taken: list[Frame] = []
        room = _ROUND_BYTES
        while self._pending and (room > 0 or not taken):
            frame = self._pending.popleft()
            room -= frame.raw
            taken.append(frame)
        return taken

    def _done(self, work: Round, outcome: Outcome | None, error: BaseException | None) -> None:
        self.busy = False
        if outcome is None:
            # Not an OSError, so not the disk's: a fault of this library. Nobody may be left waiting for it.
            _log.error("durable_writer_failed", path=str(self._path), error=repr(error))
            outcome = Outcome(work, error=OSError(0, f"the writer failed: {error!r}"))
        state = self._state
        gone = [number for number in work.deletes if number not in outcome.kept]
        state.undelete(outcome.kept)
        state.forget(gone)
        if gone:
            self._on_deleted(gone)
        for frame in state.applied(outcome):
            self._unpend(frame)
            self._confirm(frame)
        failed = work.frames[outcome.done :]
        if outcome.error is not None:
            self._report(outcome.error, len(failed))
        if failed:
            self._refuse(failed, outcome.error or OSError(0, "unknown"))
        elif work.frames:
            self.stalled = False
        self._after_round(outcome)

    def _confirm(self, frame: Frame) -> None:
        if frame.rank == INTERVAL:
            self._interval_dirty = True
        for at, waiter in enumerate(frame.waiters):
            if not waiter.done():
                waiter.set_result(frame.first + at)
        frame.waiters = []

    def _after_round(self, outcome: Outcome) -> None:
        if outcome.synced:
            self._interval_dirty = False
        if outcome.round.frames:
            self._last_write = self._loop.time()
        if outcome.dirty:
            self._arm_syncs()
        self._end_stall()
        if not self.stalled:
            self._on_ready()
        self._wake_room()
        if self._pending or self._sync_due:
            if not self.stalled or "probe" not in self._timers:
                self.kick()
        elif self._state.touched:
            # What could not be written now is tried again with the next frames, or after a while.
            self._after("hints", _PROBE if outcome.hint_errors else _HINT_DELAY, self.kick)
        if not self.busy and not self._pending:
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                _wake(waiter)

    # Time

    def _arm_syncs(self) -> None:
        if self._interval_dirty:
            self._after("sync", self._config.sync_interval, self._sync_now)
        if self._config.stale_flush is not None:
            self._after("stale", self._config.stale_flush, self._sync_stale)

    def _after(self, name: str, delay: float, call: Callable[[], None]) -> None:
        if name not in self._timers and not self._ended:
            self._timers[name] = self._loop.call_later(delay, self._fire, name, call)

    def _fire(self, name: str, call: Callable[[], None]) -> None:
        self._timers.pop(name, None)
        call()

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _sync_now(self) -> None:
        self._sync_due = True
        self.kick()

    def _sync_stale(self) -> None:
        idle = self._loop.time() - self._last_write
        left = (self._config.stale_flush or 0.0) - idle
        if left > 0:
            self._after("stale", left, self._sync_stale)
        else:
            self._sync_now()

    # Failure

    def _report(self, error: OSError, count: int) -> None:
        full = error.errno in NO_ROOM
        if full:
            self._state.counters.disk_full += 1
        else:
            self._state.counters.write_errors += 1
        if not self.stalled:
            event = "durable_disk_full" if full else "durable_write_failed"
            _log.warning(event, path=str(self._path), error=str(error), frames=count, overflow=self._config.overflow)

    def _refuse(self, failed: list[Frame], error: OSError) -> None:
        overflow = self._config.overflow
        if error.errno not in NO_ROOM:
            self._fail(
                failed,
                DurableQueueError(f"durable queue {self._path}: writing failed: {error}; nothing was put"),
                error,
            )
        elif overflow == "drop_newest":
            for frame in failed:
                self._unpend(frame)
                self._drop(frame)
        elif overflow == "block" and not self._ended:
            self.stalled = True
            now = self._loop.time()
            late = [frame for frame in failed if frame.deadline is not None and frame.deadline <= now]
            self._put_back([frame for frame in failed if frame not in late])
            self._fail(late, self._full("block_timeout is over"), error)
            self._after("probe", _PROBE, self.kick)
        elif overflow == "drop_oldest" and Dropper(self._state).drop_oldest("disk_full", 0):
            self._put_back(failed)
        else:
            self._fail(
                failed,
                self._full("nothing can be dropped" if overflow == "drop_oldest" else "overflow='reject'"),
                error,
            )

    def _end_stall(self) -> None:
        # With every put cancelled there is nothing to probe the disk with: the next put finds out how it is.
        if self.stalled and not self.busy and not self._pending:
            self.stalled = False

    def _put_back(self, frames: list[Frame]) -> None:
        self._pending.extendleft(
            reversed([frame for frame in frames if not all(waiter.done() for waiter in frame.waiters)])
        )
        for frame in frames:
            if all(waiter.done() for waiter in frame.waiters):
                self._unpend(frame)
        self._group = None

    def _full(self, why: str) -> DiskFullError:
        return DiskFullError(f"durable queue {self._path}: the disk is full ({why}); free some room, or set max_bytes")

    def _fail(self, frames: list[Frame], error: BatchQueueError, cause: BaseException | None) -> None:
        for frame in frames:
            self._unpend(frame)
            for waiter in frame.waiters:
                if not waiter.done():
                    raised = type(error)(str(error))
                    raised.__cause__ = cause
                    waiter.set_exception(raised)

    def _drop(self, frame: Frame) -> None:
        self._state.counters.dropped["newest"] += frame.count
        for waiter in frame.waiters:
            if not waiter.done():
                waiter.set_result(DROPPED)

    # Room

    async def progress(self) -> None:
        """Return after the next round, settlement or probe: a good moment to look for room again."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._room_waiters.append(waiter)
        if not self.stalled:
            if self._state.shrinkable() or self._state.touched:
                self.kick()
            self._after("room", _PROBE, self.kick)
        try:
            await waiter
        finally:
            if waiter in self._room_waiters:
                self._room_waiters.remove(waiter)

    def room_changed(self) -> None:
        """Records were settled: that may be what a blocked put waits for."""
        if self._room_waiters:
            self._wake_room()
            self.kick()

    def _wake_room(self) -> None:
        waiters, self._room_waiters = self._room_waiters, []
        for waiter in waiters:
            _wake(waiter)

    # The end

    async def drain(self) -> None:
        """Return when everything that was accepted is written or refused, and the writer has closed its files."""
        overflowed = [frame for frame in self._pending if self.stalled]
        for frame in overflowed:
            self._pending.remove(frame)
        self._fail(overflowed, self._full("the queue was closed while puts were blocked"), None)
        self.stalled = False
        self._wake_room()
        await self._idle()
        self._send(last=True)
        await self._idle()
        self._ended = True
        for name in list(self._timers):
            self._cancel(name)

    def abandon(self) -> None:
        """The closing was cancelled: whatever the writer hasn't got is not put."""
        self._ended = True
        pending = list(self._pending)
        self._pending.clear()
        error = QueueClosedError(f"durable queue {self._path}: its closing was cancelled; this was not put")
        self._fail(pending, error, None)
        self._wake_room()
        for name in list(self._timers):
            self._cancel(name)

    async def _idle(self) -> None:
        while self.busy or self._pending:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._idle_waiters.append(waiter)
            self.kick()
            await waiter


def _wake(waiter: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_result(None)
