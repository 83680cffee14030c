"""From `put` to the writer and back: what gathers while one round is written is the next round.

Lives on the loop. The writer's thread sees a round only while it works on it, so there is no lock.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.durable.disk.files import NO_ROOM
from batchqueue_async.durable.state.frame import ALWAYS, INTERVAL, Frame
from batchqueue_async.durable.write.writer import HintWrite, Outcome, Round, Writer
from batchqueue_async.errors import BatchQueueError, DiskFullError, DurableQueueError, QueueClosedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchqueue_async.durable.config import DurableConfig
    from batchqueue_async.durable.io_thread import Runner
    from batchqueue_async.durable.state.queue_state import QueueState

DROPPED = -1
_ROUND_BYTES = 32 << 20
# Acknowledgements are a hint: they wait this long for a round of frames to travel with.
_HINT_DELAY = 0.01
_PROBE = 0.25
_LEAST_DELAY = 0.001
# On a disk that was found full, a segment takes this part of what the queue has there.
_DISK_SHARE = 16
_LEAST_SEGMENT = 16 << 10


class GroupCommit:
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
        self._pending = state.pending
        self._pending.on_frame = self.kick
        self.busy = False
        self._scheduled = False
        # Whatever makes a put ask the door first: quotas, a full disk, others that wait for room. 0: straight in.
        self.guards = 0
        self._sync_due = self._stale_due = self._hint_sync_due = False
        self._looking = self._compacting = False
        self._short = False
        self._segment_bytes: int | None = None
        self._interval_dirty = False
        self._last_write = 0.0
        self._hints_due = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._purging = False
        # Who waits for room, to be called after the next round, settlement or probe.
        self._on_progress: Callable[[], None] | None = None
        self._idle_waiters: list[asyncio.Future[None]] = []
        # Who waits for a note beside the segments: for one that no round has yet, and for those of the round under way.
        self._note_waiters: list[asyncio.Future[None]] = []
        self._round_notes: list[asyncio.Future[None]] = []
        self._noting = False
        self._after_this: list[Callable[[], None]] = []
        self._swaps: dict[int, Callable[[bool], None]] = {}
        self._ended = False

    def withdraw(self, future: asyncio.Future[int]) -> None:
        """The caller of a put was cancelled: the record goes, unless the writer has it already."""
        if self._pending.withdraw(future) and not self._purging:
            # Those who are cancelled in the same turn go together: each by itself would search the others'.
            self._purging = True
            self._loop.call_soon(self._purge)

    def _purge(self) -> None:
        self._purging = False
        self._pending.purge()
        self._end_stall()
        self._wake_room()

    # Rounds

    @property
    def freeing(self) -> bool:
        """Whether a round is under way, or to come, that may free some room."""
        return self.busy or bool(self._state.touched) or self._state.shrinkable() is not None

    @property
    def stalled(self) -> bool:
        """Whether frames wait for room on a full disk."""
        return self._state.room.disk_full

    def _stall(self, *, stalled: bool) -> None:
        self.guards += stalled - self.stalled
        self._state.room.disk_full = stalled

    def kick(self) -> None:
        """Send a round after everybody who runs in this turn of the loop has had a say."""
        if not self._scheduled and not self.busy and not self._ended:
            self._scheduled = True
            self._loop.call_soon(self._send)

    def touch(self) -> None:
        """There is something for the hints: soon, or with the next round."""
        if not self.busy and "hints" not in self._timers:
            self._after("hints", _HINT_DELAY, self.kick)

    def _send_soon(self) -> None:
        if self._scheduled and self._pending.frames:
            self._send()

    def _send(self, *, last: bool = False) -> None:
        self._scheduled = False
        if self.busy or self._ended:
            return
        state = self._state
        work = Round(now_ns=self._clock(), last=last)
        work.deletes = state.deletable()
        if self.starved or self._compacting or last:
            starved = self.stalled or self._short
            work.shrink = None if self._pending.frames and not starved else state.shrinkable()
        work.segment_bytes = self._segment_bytes
        if not self.stalled or "probe" not in self._timers:
            work.frames = self._pending.take(_ROUND_BYTES)
            state.assign(work.frames)
        now = self._loop.time()
        awaited = self._on_progress is not None
        if last or self.stalled or awaited or now >= self._hints_due:
            # Not with every round of a busy queue: the entries of some milliseconds join, and cost one write.
            work.hints = state.hints()
            self._round_notes, self._note_waiters = self._note_waiters, []
            self._hints_due = now + _HINT_DELAY
            self._cancel("hints")
        elif state.touched:
            self._after("hints", self._hints_due - now, self.kick)
        work.swaps = self._take_swaps()
        work.stale, self._stale_due = self._stale_due, False
        work.sync_hints, self._hint_sync_due = self._hint_sync_due, False
        work.sync = self._sync_due or any(frame.rank == ALWAYS for frame in work.frames)
        wanted = work.frames or work.deletes or work.hints or work.sync or work.shrink or work.last
        wanted = wanted or work.swaps or work.sync_hints
        if not wanted and not awaited and not self._looking:
            self._wake_notes()
            return
        self._noting = bool(work.hints or work.swaps)
        self._sync_due = self._looking = self._compacting = False
        self.busy = True
        self._runner.submit(self._writer.run, work, done=lambda result, error: self._done(work, result, error))

    def _done(self, work: Round, outcome: Outcome | None, error: BaseException | None) -> None:
        self.busy = False
        if outcome is None:
            # The writer answers with an outcome, whatever it met: this is a bug. Nobody may be left waiting for it.
            log.error("durable_writer_failed", path=str(self._path), error=repr(error))
            outcome = Outcome(work, error=RuntimeError(f"the writer failed: {error!r}"))
        state = self._state
        gone = [number for number in work.deletes if number not in outcome.kept]
        state.undelete(outcome.kept)
        state.forget(gone)
        if gone:
            self._on_deleted(gone)
        written = state.applied(outcome)
        for frame in written:
            self._pending.settled(frame)
            self._confirm(frame)
        if written:
            # After those who were just told have put again, and before consumers have their turn: the writer is not
            # to wait for them.
            self._loop.call_soon(self._send_soon)
        for hint in work.swaps:
            if (done := self._swaps.pop(hint.number, None)) is not None:
                done(hint.number in outcome.swapped)
        failed = work.frames[outcome.done :]
        if outcome.error is not None or outcome.failures:
            self._report(outcome, len(failed))
        if failed:
            self._refuse(failed, _gravest(outcome))
        elif work.frames:
            self._short = False
            self._stall(stalled=False)
        self._after_round(outcome)

    def swap(self, number: int, done: Callable[[bool], None]) -> None:
        """With the next round, put the compacted copy of a segment in its place; `done` is told whether that went."""
        self._swaps[number] = done
        self.kick()

    def _take_swaps(self) -> list[HintWrite]:
        swaps: list[HintWrite] = []
        for number, done in list(self._swaps.items()):
            hint = self._state.swap(number)
            if hint is None:
                del self._swaps[number]
                done(False)
            else:
                swaps.append(hint)
        return swaps

    @property
    def starved(self) -> bool:
        """Whether anybody waits for room, or the disk was found full."""
        return self._on_progress is not None or self.stalled or self._short

    def _tell_readers(self) -> None:
        calls, self._after_this = self._after_this, []
        for call in calls:
            call()
        # With a full disk too: who leases and settles is who makes room.
        self._on_ready()

    def _confirm(self, frame: Frame) -> None:
        if frame.rank == INTERVAL:
            self._interval_dirty = True
        for seq, waiter in enumerate(frame.waiters, frame.first):
            if not waiter.done():
                waiter.set_result(seq)
        frame.waiters = []

    def after_round(self, call: Callable[[], None]) -> None:
        """Call this when what the round under way has done is known."""
        self._after_this.append(call)

    def _after_round(self, outcome: Outcome) -> None:
        if outcome.synced:
            self._interval_dirty = False
        if outcome.round.frames:
            self._last_write = self._loop.time()
        if outcome.dirty:
            self._arm_syncs()
        if outcome.hints_dirty:
            self._after("hint_sync", self._config.sync_interval, self._sync_hints)
        self._end_stall()
        self._wake_notes()
        self._tell_readers()
        self._wake_room()
        self._go_on(outcome)
        if not self.busy and not self._pending.frames:
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                _wake(waiter)

    def _go_on(self, outcome: Outcome) -> None:
        """Send what has gathered meanwhile."""
        if self._swaps:
            self.kick()
        if self._pending.frames or self._sync_due or self._hint_sync_due or self._note_waiters:
            if not self.stalled or "probe" not in self._timers:
                self.kick()
        elif self._state.touched or outcome.kept:
            # What could not be written or deleted now is tried again with the next frames, or after a while.
            self._after("hints", _PROBE if outcome.hint_errors or outcome.kept else _HINT_DELAY, self.kick)

    # Time

    def _arm_syncs(self) -> None:
        if self._interval_dirty:
            self._after("sync", self._config.sync_interval, self._sync_now)
        if self._config.stale_flush is not None:
            self._after("stale", self._config.stale_flush, self._sync_stale)

    def _after(self, name: str, delay: float, call: Callable[[], None]) -> None:
        if name not in self._timers and not self._ended:
            # What is left of a time may be less than the clock resolves, and the timer would come too early for ever.
            self._timers[name] = self._loop.call_later(max(delay, _LEAST_DELAY), self._fire, name, call)

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

    def _sync_hints(self) -> None:
        self._hint_sync_due = True
        self.kick()

    def _sync_stale(self) -> None:
        idle = self._loop.time() - self._last_write
        left = (self._config.stale_flush or 0.0) - idle
        if left > 0:
            self._after("stale", left, self._sync_stale)
        else:
            self._stale_due = True
            self._sync_now()

    # Failure

    def _report(self, outcome: Outcome, count: int) -> None:
        error = _gravest(outcome)
        full = _no_room(error)
        if full:
            self._state.counters.disk_full += 1
        else:
            self._state.counters.write_errors += 1
        if not self.stalled:
            event = "durable_disk_full" if full else "durable_write_failed"
            log.warning(
                event,
                path=str(self._path),
                error=str(error) or repr(error),
                frames=count,
                made_good=outcome.error is None,
                overflow=self._config.overflow,
            )

    def _refuse(self, failed: list[Frame], error: Exception) -> None:
        overflow = self._config.overflow
        if _no_room(error):
            # Segments that are small beside what the disk holds can be given back one by one.
            self._short = True
            share = self._state.disk_bytes // _DISK_SHARE
            wanted = self._segment_bytes or self._config.rotate_bytes
            self._segment_bytes = min(wanted, max(_LEAST_SEGMENT, share))
        if not _no_room(error):
            self._fail(
                failed,
                DurableQueueError(
                    f"durable queue {self._path}: writing failed: {error or repr(error)}; nothing was put"
                ),
                error,
            )
        elif overflow == "drop_newest":
            for frame in failed:
                self._pending.settled(frame)
                self._drop(frame)
        elif overflow == "block" and not self._ended:
            self._stall(stalled=True)
            now = self._loop.time()
            late = [frame for frame in failed if frame.deadline is not None and frame.deadline <= now]
            self._pending.put_back([frame for frame in failed if frame not in late])
            self._fail(late, self._full("block_timeout is over"), error)
            self._after("probe", _PROBE, self.kick)
        elif overflow == "drop_oldest" and not self._ended and self._state.room.eviction.make_room_on_disk():
            self._pending.put_back(failed)
        else:
            self._fail(
                failed,
                self._full("nothing can be dropped" if overflow == "drop_oldest" else "overflow='reject'"),
                error,
            )

    def _end_stall(self) -> None:
        # With every put cancelled there is nothing to probe the disk with: the next put finds out how it is.
        if self.stalled and not self.busy and not self._pending.frames:
            self._stall(stalled=False)

    def _full(self, why: str) -> DiskFullError:
        return DiskFullError(f"durable queue {self._path}: the disk is full ({why}); free some room, or set max_bytes")

    def _fail(self, frames: list[Frame], error: BatchQueueError, cause: BaseException | None) -> None:
        for frame in frames:
            self._pending.settled(frame)
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

    def on_progress(self, call: Callable[[], None] | None) -> None:
        """Call this after the next round, settlement or probe: somebody waits for room. None: nobody does."""
        self._on_progress = call
        if call is not None and not self.stalled:
            if self._state.shrinkable() or self._state.touched:
                self.kick()
            self._after("room", _PROBE, self.kick)

    async def noted(self) -> None:
        """Return when everything that is to be noted beside the segments by now is written there, or could not be."""
        if self._ended:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        if self._state.touched:
            self._hints_due = 0.0
            self._note_waiters.append(waiter)
            self.kick()
        elif self.busy and self._noting:
            self._round_notes.append(waiter)
        else:
            return
        await waiter

    def look(self) -> None:
        """A put was refused for what the disk was last seen to have: look again, so that the next one is not."""
        if not self._looking:
            self._looking = True
            self._after("look", _PROBE, self.kick)

    def compact(self) -> None:
        """Give back the room of the newest segment, if everything in it is settled."""
        self._compacting = True
        self.kick()

    def room_changed(self) -> None:
        """Records were settled: that may be what a blocked put waits for."""
        if self._on_progress is not None:
            self._wake_room()
            self.kick()

    def _wake_room(self) -> None:
        call, self._on_progress = self._on_progress, None
        if call is not None:
            call()

    # The end

    async def drain(self) -> None:
        """Return when everything that was accepted is written or refused, and the writer has closed its files."""
        self._fail(
            self._pending.empty() if self.stalled else [],
            self._full("the queue was closed while puts were blocked"),
            None,
        )
        self._swaps.clear()
        self._stall(stalled=False)
        self._wake_room()
        await self._idle()
        self._send(last=True)
        await self._idle()
        if self._state.touched:
            # Frames have moved to another segment with that round: what is known of them is written next to it.
            self._send(last=True)
            await self._idle()
        self._ended = True
        self._wake_all_notes()
        for name in list(self._timers):
            self._cancel(name)

    def _wake_notes(self) -> None:
        waiters, self._round_notes = self._round_notes, []
        for waiter in waiters:
            _wake(waiter)

    def _wake_all_notes(self) -> None:
        self._round_notes += self._note_waiters
        self._note_waiters = []
        self._wake_notes()

    def abandon(self) -> None:
        """The closing was cancelled: whatever the writer hasn't got is not put."""
        self._ended = True
        self._wake_all_notes()
        error = QueueClosedError(f"durable queue {self._path}: its closing was cancelled; this was not put")
        self._fail(self._pending.empty(), error, None)
        self._wake_room()
        for name in list(self._timers):
            self._cancel(name)

    async def _idle(self) -> None:
        while self.busy or self._pending.frames:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._idle_waiters.append(waiter)
            self.kick()
            await waiter


def _gravest(outcome: Outcome) -> Exception:
    """The error that says most: that the disk is full, else the last one."""
    errors = [*outcome.failures, *([outcome.error] if outcome.error is not None else [])]
    return next((error for error in errors if _no_room(error)), errors[-1] if errors else RuntimeError("unknown"))


def _no_room(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in NO_ROOM


def _wake(waiter: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_result(None)
