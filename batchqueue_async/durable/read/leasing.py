"""From the backlog to consumers and back: leases, their time, and the disk reads that feed them. On the loop."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.durable.disk import quarantine
from batchqueue_async.durable.read.rereading import Rereading
from batchqueue_async.durable.state.backlog import run_bytes
from batchqueue_async.durable.state.queue_state import PORTION, Granted
from batchqueue_async.errors import BatchQueueError, ForkedError, QueueClosedError
from batchqueue_async.leases.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from pathlib import Path

    from batchqueue_async.durable.disk.files import Files
    from batchqueue_async.durable.io_thread import Runner
    from batchqueue_async.durable.read.loader import Loaded, Loader
    from batchqueue_async.durable.state.backlog import Extent, Load
    from batchqueue_async.durable.state.frame import Run
    from batchqueue_async.durable.state.queue_state import QueueState
    from batchqueue_async.durable.state.record_index import Stretch
    from batchqueue_async.durable.write.pump import GroupCommit

_READ = 4 << 20
_SWEEP = 60.0
_BURY_AGAIN = 5.0
_READ_AGAIN = 0.25
_LONGEST = 86_400.0 * 365
# Not the place's fault but the moment's: a limit of the process, of memory, or a mount that comes back.
_PASSING = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EAGAIN,
        errno.EINTR,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
    }
)


class _Waiter:
    __slots__ = ("expired", "future", "max_bytes", "max_records", "timer")

    def __init__(self, future: asyncio.Future[Lease], max_records: int, max_bytes: int) -> None:
        self.future = future
        self.max_records = max_records
        self.max_bytes = max_bytes
        self.expired = False
        self.timer: asyncio.TimerHandle | None = None


class LeaseManager:
    """Who waits for records, and who has them."""

    def __init__(
        self,
        state: QueueState,
        loader: Loader,
        runner: Runner,
        *,
        files: Files,
        path: Path,
        clock: Callable[[], int],
        pump: Callable[[], GroupCommit],
        bury: Callable[[list[Run], str], Awaitable[None]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._state = state
        self._rereading = Rereading(state)
        self._loader = loader
        self._runner = runner
        self._files = files
        self._path = path
        self._clock = clock
        self._pump = pump
        self._bury = bury
        self._waiters: deque[_Waiter] = deque()
        self._leases: dict[int, Lease] = {}
        self._reading = False
        # Reading has met an error that passes: until a timer says so, nothing is read.
        self._paused = False
        # Each with its time: uvloop answers a timer that is due at once with a plain handle, which has no `when`.
        self._timers: dict[str, tuple[float, asyncio.Handle]] = {}
        self._burials: set[asyncio.Task[None]] = set()
        # What is on its way to the dead letters: no lease has it, and it is leased.
        self._moving: dict[int, list[Run]] = {}
        self._closed = self._forked = self._serving_on = False
        self._newest_first = state.config.order == "freshest"
        self._timeout = state.config.lease_timeout
        self._most_attempts = state.config.max_attempts
        self._ages = state.config.max_age is not None
        if state.config.max_age is not None:
            self._arm_sweep()

    # Leasing

    def at_once(self, max_records: int, max_bytes: int) -> Lease | None:
        """The next records, if there are any in memory, nobody waits before, and nothing is to be noted before.

        Not so many as may take several steps of the loop.
        """
        if self._waiters or self._serving_on or self._most_attempts is not None:
            return None
        if max_records > PORTION and (self._state.gate is not None or self._state.backlog.runs > PORTION):
            return None
        return self._grant(max_records, max_bytes)

    async def lease(self, max_records: int, max_bytes: int, wait: float | None) -> Lease:
        """The next records, waiting for them as long as `wait` allows; reading the disk is no waiting."""
        lease = await self._next(max_records, max_bytes, wait)
        try:
            if lease.more:
                await self._fill(lease, max_records, max_bytes)
            if lease and self._most_attempts is not None:
                # The attempt is on the disk before anybody sees the records: one that kills its process is counted.
                await self._pump().noted()
        except asyncio.CancelledError:
            self._undo(lease)
            raise
        return lease

    async def _fill(self, lease: Lease, max_records: int, max_bytes: int) -> None:
        """Go on where a grant has stopped for the loop's sake, portion by portion, while there is more in memory."""
        runs, more = lease.blocks, lease.more
        while more:
            for run in runs:
                max_records -= run.high - run.low
                max_bytes -= run_bytes(run)
            await asyncio.sleep(0)
            if self._closed or self._waiters or self._leases.get(id(lease)) is not lease:
                return  # the queue is closed, others came before, or its time is over
            runs, more = self._granted(max_records, max_bytes, at_least_one=False)
            lease.extend_by(runs)

    async def _next(self, max_records: int, max_bytes: int, wait: float | None) -> Lease:
        if not self._waiters and not self._serving_on:
            lease = self._grant(max_records, max_bytes)
            if lease is not None:
                return lease
        waiter = _Waiter(self._loop.create_future(), max_records, max_bytes)
        waiter.expired = wait is not None and wait <= 0
        if wait is not None and wait > 0:
            waiter.timer = self._loop.call_later(min(wait, _LONGEST), self._time_over, waiter)
        self._waiters.append(waiter)
        if not self._serving_on:
            self.serve()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self._undo(waiter.future.result())
            raise
        finally:
            if waiter.timer is not None:
                waiter.timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def serve(self) -> None:
        """Give what is ready to those who wait, first come first served."""
        granted = 0
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.future.done():
                self._waiters.popleft()
                continue
            if granted >= PORTION:
                self._serve_on()
                return
            lease = self._grant(waiter.max_records, waiter.max_bytes)
            if lease is not None:
                granted += len(lease.blocks)
                self._waiters.popleft()
                waiter.future.set_result(lease)
            elif self._reading or self._serving_on:
                return
            else:
                break
        for waiter in [entry for entry in self._waiters if entry.expired]:
            self._waiters.remove(waiter)
            if not waiter.future.done():
                waiter.future.set_result(Lease(self, [], 0.0))

    def _serve_on(self) -> None:
        """The others get theirs, or what there is behind this portion, in the next turn of the loop."""
        if not self._serving_on:
            self._serving_on = True
            self._loop.call_soon(self._serve_next)

    def _serve_next(self) -> None:
        self._serving_on = False
        self.serve()

    def _grant(self, max_records: int, max_bytes: int) -> Lease | None:
        runs, more = self._granted(max_records, max_bytes)
        if not runs:
            if more:
                self._serve_on()  # all of this portion waits for its keys, or was too old
            return None
        deadline = self._loop.time() + self._timeout
        lease = Lease(self, runs, deadline, newest_first=self._newest_first, more=more)
        self._leases[id(lease)] = lease
        if "lease" not in self._timers:
            # All leases are as long: the timer of an earlier one is never too late for this one.
            self._arm("lease", lease.deadline, self._expire)
        return lease

    def _granted(self, max_records: int, max_bytes: int, *, at_least_one: bool = True) -> Granted:
        state = self._state
        runs, more = state.grant(max_records, max_bytes, self._clock() if self._ages else 0, at_least_one=at_least_one)
        if state.backlog.on_disk:
            self._read_on()
        if runs:
            self._pump().touch()
        if self._most_attempts is None or not runs:
            return Granted(runs, more)
        wanted = self._give_up(runs, self._most_attempts)
        # Behind records that are all given up there may be others.
        return Granted(wanted, more or not wanted)

    def _give_up(self, runs: list[Run], most: int) -> list[Run]:
        """Send the records to the dead letters that were leased as often as they may be; the others."""
        # Nobody gets them, so that this lease does not count.
        over = [run._replace(attempts=run.attempts - 1) for run in runs if run.attempts > most]
        if over:
            lease = Lease(self, over, self._loop.time() + self._timeout)
            self._leases[id(lease)] = lease
            task = self._loop.create_task(self._bury_quietly(lease))
            self._burials.add(task)
            task.add_done_callback(self._burials.discard)
        return [run for run in runs if run.attempts <= most]

    async def _bury_quietly(self, lease: Lease) -> None:
        count = len(lease)
        try:
            await lease.dead_letter("max_attempts")
        except (BatchQueueError, MemoryError) as error:
            log.error(
                "durable_dead_letter_failed", path=str(self._path), records=count, error=str(error) or repr(error)
            )
            if not self._closed:
                await lease.nack(_BURY_AGAIN, reason="max_attempts")
        else:
            log.warning("durable_max_attempts", path=str(self._path), records=count)

    def _undo(self, lease: Lease) -> None:
        self._leases.pop(id(lease), None)
        self._state.undo(lease.forfeit())
        self.serve()

    def _time_over(self, waiter: _Waiter) -> None:
        waiter.expired = True
        self.serve()

    def outstanding(self) -> Iterable[Run]:
        """Every run that is leased."""
        owned = chain(self._moving.values(), (lease.unsettled_runs for lease in self._leases.values()))
        return list(chain.from_iterable(owned))

    # What a lease asks for

    def ack(self, lease: Lease, runs: list[Run]) -> int:
        """Settle records of a lease."""
        self._check()
        self._settled(lease)
        count = self._state.ack(runs)
        self._after_change()
        return count

    def nack(self, lease: Lease, runs: list[Run], delay: float, reason: str) -> int:
        """Give records of a lease back."""
        self._check()
        self._settled(lease)
        due = self._loop.time() + delay if delay > 0 else None
        self._state.give_back(runs, reason, due)
        if due is not None and runs:
            self._arm("delay", due, self._wake_delayed)
        self._after_change()
        return sum(run.high - run.low for run in runs)

    async def bury(self, lease: Lease, runs: list[Run], reason: str) -> int:
        """Move records of a lease to the dead letters, then settle them."""
        self._check()
        if not runs:
            return 0
        self._moving[id(runs)] = runs
        try:
            await self._bury(runs, reason)
        except BaseException:
            del self._moving[id(runs)]
            # Cancelled or failed: they may be in the dead letters, and are still this lease's, or ready again.
            if not self._closed and id(lease) in self._leases and self._leases[id(lease)] is lease:
                lease.restore(runs)
            elif not self._closed:
                self._state.give_back(runs, reason, None)
                self._after_change()
            raise
        del self._moving[id(runs)]
        self._settled(lease)
        count = self._state.bury(runs, reason)
        self._after_change()
        return count

    def extend(self, lease: Lease) -> None:
        """Let a lease's time begin anew."""
        self._check()
        if self._leases.pop(id(lease), None) is not None:
            lease.deadline = self._loop.time() + self._timeout
            self._leases[id(lease)] = lease

    def after_fork(self) -> None:
        """In a forked child: what is leased is the parent's to settle."""
        self._forked = True

    def _check(self) -> None:
        if self._forked:
            raise ForkedError(
                f"durable queue {self._path}: leased before a fork, and this is the child; its owner is the parent. "
                "Settle the lease there, or close the queue before forking"
            )
        if self._closed:
            raise QueueClosedError(
                f"durable queue {self._path}: closed; what its leases had not settled is delivered "
                "after the next opening"
            )

    def _settled(self, lease: Lease) -> None:
        if not lease.unsettled:
            self._leases.pop(id(lease), None)

    def _after_change(self) -> None:
        pump = self._pump()
        pump.touch()
        pump.room_changed()
        if self._waiters:
            self.serve()

    # Time

    def _arm(self, name: str, when: float, call: Callable[[], None]) -> None:
        # What is further off is looked at again then: loops don't take every number.
        when = min(when, self._loop.time() + _LONGEST)
        armed = self._timers.get(name)
        if armed is not None:
            due, timer = armed
            if due <= when:
                return
            timer.cancel()
        self._timers[name] = when, self._loop.call_at(when, self._fire, name, call)

    def _fire(self, name: str, call: Callable[[], None]) -> None:
        del self._timers[name]
        call()

    def _expire(self) -> None:
        now = self._loop.time()
        for key, lease in list(self._leases.items()):
            # Insertion order is the order of the deadlines.
            if lease.deadline > now:
                self._arm("lease", lease.deadline, self._expire)
                break
            del self._leases[key]
            runs = lease.forfeit()
            if runs:
                self._state.counters.expired_leases += 1
                log.warning(
                    "durable_lease_expired", path=str(self._path), records=sum(run.high - run.low for run in runs)
                )
            self._state.give_back(runs, "lease_expired", None)
        self._after_change()

    def _wake_delayed(self) -> None:
        state = self._state
        if state.wake_delayed(self._loop.time()):
            self._after_change()
        if (due := state.index.next_due) is not None:
            # Perhaps now: of many, each turn of the loop takes a part.
            self._arm("delay", due, self._wake_delayed)

    def hurry(self) -> None:
        """Make every delayed record ready now."""
        if self._state.wake_all():
            self._after_change()

    def _arm_sweep(self) -> None:
        age = self._state.config.max_age or 0.0
        self._arm("sweep", self._loop.time() + min(_SWEEP, age / 2), self._sweep)

    def _sweep(self) -> None:
        if self._state.room.eviction.drop_aged(self._clock()):
            self._after_change()
        self._arm_sweep()

    # Reading

    def _read_on(self) -> None:
        if self._reading or self._closed or self._paused:
            return
        state = self._state
        stretch = state.backlog.next_stretch(_READ)
        if stretch is not None:
            self._reading = True
            number = stretch.number
            place = (stretch.start, stretch.end)
            self._submit(
                number,
                self._loader.load,
                (number, state.segments[number].marker, place, stretch.least, 2 * _READ),
                partial(self._fetched, stretch),
            )
            return
        if state.gate is not None and state.gate.full:
            return
        load = state.backlog.next_load(_READ)
        if load is None:
            return
        self._reading = load.extent.busy = True
        extent = load.extent
        marker = state.segments[extent.segment].marker
        least = extent.floor if load.start == extent.start else 0
        if load.offsets:
            call: Callable[..., Any] = self._loader.index
            arguments: tuple[Any, ...] = (extent.segment, marker, (load.start, load.end), least)
        else:
            call = self._loader.load
            budget = 1 << 62 if self._newest_first else _READ
            arguments = (extent.segment, marker, (load.start, load.end), least, budget)
        self._submit(extent.segment, call, arguments, partial(self._loaded, load))

    def _submit(
        self,
        number: int,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        take: Callable[[Any, BaseException | None, int], None],
    ) -> None:
        """Read; `take` gets what was found, and how often frames had been moved elsewhere when it was asked for."""
        state = self._state
        moves = state.moves

        def landed(result: Any, error: BaseException | None) -> None:
            entry = state.segments.get(number)
            moving = entry is not None and (entry.swapping or not entry.closed)
            if self._pump().busy and not self._closed and moving:
                # The round under way may have moved what was looked for: what is missing counts when that is known.
                self._pump().after_round(lambda: landed(result, error))
            else:
                take(result, error, moves)

        self._runner.submit(call, *arguments, done=landed)

    def _fetched(self, stretch: Stretch, found: Any, error: BaseException | None, moves: int) -> None:
        self._reading = False
        if self._closed:
            return
        if self._state.moves != moves:
            pass  # it is read again, where it is now
        elif error is not None:
            if not self._unreadable(stretch, error):
                return
        else:
            before = self._state.counters.damaged
            rest = self._rereading.fetched(stretch, found)
            found.lost += self._state.counters.damaged - before
            if rest is not None:
                self._reading = True
                self._loop.call_soon(self._fetched, rest, found, None, moves)
                return
            self._tell_damage(stretch.number, found)
        self._serve_on()

    def _loaded(self, load: Load, found: Any, error: BaseException | None, moves: int) -> None:
        self._reading = load.extent.busy = False
        if self._closed:
            return
        if self._state.moves != moves:
            pass  # it is read again, where it is now
        elif error is not None:
            if not self._unreadable(load.extent, error):
                return
        elif load.offsets:
            self._state.backlog.indexed(load, found)
        else:
            before = self._state.counters.damaged
            rest = self._rereading.loaded(load, found)
            found.lost += self._state.counters.damaged - before
            if rest is not None:
                self._reading = load.extent.busy = True
                self._loop.call_soon(self._loaded, rest, found, None, moves)
                return
            self._tell_damage(load.extent.segment, found)
            self._set_aside(load.extent.segment, found)
        self.serve()
        self._read_on()

    def _tell_damage(self, number: int, found: Loaded) -> None:
        if found.unreadable:
            log.error("durable_records_unreadable", path=str(self._path), segment=number, blocks=len(found.unreadable))
        elif found.gaps or found.lost:
            log.error("durable_records_damaged", path=str(self._path), segment=number, records=found.lost)

    def _set_aside(self, number: int, found: Loaded) -> None:
        for gap in found.gaps if not found.unreadable else ():
            self._runner.submit(quarantine.copy_aside, self._files, self._path, number, gap, done=_ignore)

    def _unreadable(self, item: Extent | Stretch, error: BaseException) -> bool:
        """Whether reading goes on with what comes after."""
        if isinstance(error, OSError) and error.errno in _PASSING:
            log.warning("durable_read_delayed", path=str(self._path), error=str(error), delay=_READ_AGAIN)
            self._paused = True
            self._arm("read", self._loop.time() + _READ_AGAIN, self._read_again)
            return True
        if isinstance(error, OSError):
            count = self._rereading.unreadable(item)
            if not count:
                return True
            log.error("durable_records_unreadable", path=str(self._path), records=count, error=str(error))
            return True
        # Not the disk's fault but, for one, a codec that isn't installed: the caller can mend it, and is told.
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)
        return False

    def _read_again(self) -> None:
        self._paused = False
        self.serve()
        self._read_on()

    # The end

    def close(self) -> None:
        """Nobody waits any longer; what is leased stays on the disk."""
        self._closed = True
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_exception(QueueClosedError(f"durable queue {self._path}: closed while leasing"))


def _ignore(_result: object, _error: BaseException | None) -> None:
    """A copy for the quarantine is made if it can be."""
