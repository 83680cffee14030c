"""The durable queue: from new to open to closed, and the calls of producers and consumers.

A thin shell over `state`, with `pump` towards the disk and `leasing` towards consumers.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

from batchqueue_async._support import log
from batchqueue_async._support.registry import everything, looked_at
from batchqueue_async.durable.arguments import as_bytes, as_count, as_directory
from batchqueue_async.durable.config import RANKS, Durability, DurableConfig
from batchqueue_async.durable.disk import compression, recovery
from batchqueue_async.durable.disk.files import Files, OsFiles
from batchqueue_async.durable.disk.format import MAX_FRAME, MAX_PUT, MAX_RECORDS, frame_size
from batchqueue_async.durable.io_thread import Runner, Worker
from batchqueue_async.durable.losses import LossLog, log_report
from batchqueue_async.durable.read.graveyard import DeadLetterQueue
from batchqueue_async.durable.read.leasing import LeaseManager
from batchqueue_async.durable.read.loader import Loader
from batchqueue_async.durable.state.compaction import CompactionPlan
from batchqueue_async.durable.state.queue_state import QueueState
from batchqueue_async.durable.stats import DurableStats, snapshot
from batchqueue_async.durable.write.admission import Admission
from batchqueue_async.durable.write.compactor import Compactor
from batchqueue_async.durable.write.pending import WriteBuffer
from batchqueue_async.durable.write.pump import DROPPED, GroupCommit
from batchqueue_async.durable.write.writer import Writer
from batchqueue_async.errors import (
    ConfigError,
    DurableQueueError,
    ForkedError,
    LockedError,
    QueueClosedError,
    RecordTooLargeError,
    WrongLoopError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.durable.disk.recovery import RecoveryReport
    from batchqueue_async.leases.lease import Lease

_LEASE_RECORDS = 1_000
_LEASE_BYTES = 16 << 20
_DEAD_LETTERS = 500
# Dead letters that are put back at once: a few of these have to fit, so that each waits for a part of the room alone.
_PARTS = 4
_PART = 500
_PART_BYTES = 16 << 20
# A segment takes at most this part of what the file system has for the queue: a full disk is freed segment by segment.
_DISK_SHARE = 16
_LEAST_SEGMENT = 16 << 10
_LOCK_PAUSE = 0.05

_open_queues: weakref.WeakSet[DurableQueue] = weakref.WeakSet()


class DurableQueue:
    """A queue on disk: what `put` has confirmed is delivered at least once, through crashes and restarts.

    Made with `open`, as an async context manager or with `await`. It belongs to the event loop that opened it, and to
    one owner at a time: the directory is locked.

    Example:
        >>> import asyncio, tempfile, batchqueue_async as bq
        >>> async def main(path: str) -> None:
        ...     async with bq.DurableQueue.open(path) as queue:
        ...         await queue.put(b"payload")
        ...         async with await queue.lease(wait=1.0) as lease:
        ...             print([record.payload for record in lease.records])
        >>> with tempfile.TemporaryDirectory() as path:
        ...     asyncio.run(main(path))
        [b'payload']

    Attributes:
        path: its directory.
        config: what it was opened with.
    """

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        config: DurableConfig | None = None,
        *,
        name: str | None = None,
        files: Files | None = None,
        wall_clock: Callable[[], int] = time.time_ns,
        runner: Callable[[asyncio.AbstractEventLoop, str], Runner] = Worker,
    ) -> DurableQueue:
        """A queue in the directory `path`, made when it isn't there; nothing happens before `async with` or `await`.

        Args:
            path: the directory; relative to the one that is current now.
            config: how it behaves.
            name: a directory below `path`: letters, digits, dots, dashes and underscores.
            files: the file system; the tests replace it.
            wall_clock: nanoseconds since 1970, asked once at the opening; from then on time is the loop's.
            runner: what makes the I/O threads; the tests replace it.
        """
        return cls(as_directory(path, name), config or DurableConfig(), files or OsFiles(), wall_clock, runner)

    # Opening and closing

    def __init__(
        self, path: Path, config: DurableConfig, files: Files, wall: Callable[[], int], runner: Callable[..., Runner]
    ) -> None:
        self.path = path
        self.config = config
        self._files = files
        self._wall = wall
        self._make_runner = runner
        self._phase = "new"
        # The loop's thread while the queue is open, else 0, which is none: with the loop running, a call is made on it.
        # Asking for the running loop itself costs a system call in Python below 3.14, a tenth of a put.
        self._thread = 0
        self._lock: int | None = None
        # The opening was cancelled: its thread, which may wait for the lock, is not to take it any more.
        self._given_up = False
        self._closing: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[None] | None = None
        self._most_bytes = MAX_PUT
        # The dead letters are a part of their queue, and in its statistics.
        self._is_listed = True
        self._closers: list[Callable[[], None]] = []
        self._recovery: RecoveryReport

    def after_fork(self) -> None:
        """In a forked child: the threads are gone, and the parent is still the owner."""
        self._phase = "forked"
        self._thread = 0
        self._lock = None  # its descriptor is closed where it was opened
        if hasattr(self, "_leasing"):
            self._leasing.after_fork()

    def __repr__(self) -> str:
        return f"DurableQueue({str(self.path)!r}, {self._phase})"

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        """Lock, recover, and start the I/O threads."""
        if self._phase != "new":
            raise DurableQueueError(f"durable queue {self.path}: {self._phase} already; call DurableQueue.open again")
        self._phase = "opening"
        self._loop = asyncio.get_running_loop()
        self._writing = self._make_runner(self._loop, f"batchqueue-write-{self.path.name}")
        self._reading = self._make_runner(self._loop, f"batchqueue-read-{self.path.name}")
        _open_queues.add(self)
        boot = self._loop.create_task(self._boot())
        try:
            await asyncio.shield(boot)
        except asyncio.CancelledError:
            # The thread can't be stopped in the middle: it ends what it does, and the lock is given back then.
            self._given_up = True
            if boot.done():
                self._undo_boot(boot)
            else:
                boot.add_done_callback(self._undo_boot)
            raise
        except BaseException as error:
            await self._release()
            if isinstance(error, OSError):
                raise DurableQueueError(f"durable queue {self.path}: can't be opened: {error}") from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _boot(self) -> None:
        start, wall = self._loop.time(), self._wall()
        survey, lock, free = await self._call(self._writing, self._prepare)
        self._lock = lock
        log_report(self.path, survey.report)
        self._recovery = replace(survey.report, elapsed=self._loop.time() - start)
        # The wall clock is asked once. From here on time is the loop's, so a clock that jumps expires nothing.
        self._origin_ns = wall - int(start * 1e9)
        config = self.config
        pending = WriteBuffer(
            clock=self._now_ns, deadline=self._deadline, future=self._loop.create_future, buffer=config.write_buffer
        )
        self._state = state = QueueState(config, survey, pending)
        state.room.looked(free)
        self._losses = LossLog(state.counters.dropped, self.path, self._loop.time)
        writer = Writer(
            self._files,
            self.path,
            queue_id=survey.queue_id,
            number=survey.next_number,
            codec=compression.require(config.compression),
            segment_bytes=_segment_bytes(config.rotate_bytes, free, survey.report.disk_bytes),
            buffer=config.write_buffer,
            watch_free=config.min_free_bytes > 0,
            lock=lock,
        )
        dead_bytes = await self._call(self._reading, recovery.disk_bytes, self._files, self.path / recovery.DEAD)
        self._graveyard = DeadLetterQueue(self._open_dead, self.put_many, part=self._part_of_room(), clock=self._now_ns)
        state.room.count_dead_letters(dead_bytes, self._graveyard.disk_bytes)
        self._loader = Loader(self._files, self.path)
        self._leasing = leasing = LeaseManager(
            state,
            self._loader,
            self._reading,
            files=self._files,
            path=self.path,
            clock=self._now_ns,
            pump=lambda: self._pump,
            bury=self._graveyard.bury,
        )
        self._pump = GroupCommit(
            state,
            writer,
            self._writing,
            path=self.path,
            clock=self._now_ns,
            on_ready=self._after_round,
            on_deleted=self._forget_files,
        )
        self._compactor = Compactor(
            CompactionPlan(state),
            self._pump,
            self._reading,
            files=self._files,
            path=self.path,
            on_swapped=self._forget_files,
        )
        self._admission = Admission(state, self._pump, self.path, on_full=self._compactor.press)
        self._closers = [writer.close, self._loader.close]
        state.outstanding = leasing.outstanding  # type: ignore[method-assign]  # the leases live in the shell
        self._limit = max(1, min(config.max_record, self._most_bytes - frame_size(1, 0)))
        self._rank = RANKS[config.durability]
        self._phase = "open"
        self._thread = get_ident()
        if self._is_listed:
            everything.add("durable_queue", self)
        if state.touched or state.emptied:
            self._pump.touch()
        self._compactor.look()

    def _prepare(self) -> tuple[recovery.Survey, int, int | None]:
        self._files.make_directory(self.path)
        lock = self._lock_directory()
        try:
            survey = recovery.repair(recovery.Surveyor(self._files, self.path).survey(), self._files, self.path)
            free = None
            with suppress(OSError):
                free = self._files.free_bytes(self.path)
        except BaseException:
            self._files.close(lock)
            raise
        return survey, lock, free

    def _lock_directory(self) -> int:
        """In the thread: with `lock_timeout`, as long as that another owner is waited for."""
        until = time.monotonic() + self.config.lock_timeout
        while True:
            try:
                return self._files.lock(self.path / recovery.LOCK)
            except LockedError:
                if self._given_up or time.monotonic() >= until:
                    raise
            time.sleep(_LOCK_PAUSE)

    def _undo_boot(self, boot: asyncio.Task[None]) -> None:
        if not boot.cancelled() and boot.exception() is None:
            self._leasing.close()
            self._compactor.close()
        self._let_go()

    def _let_go(self) -> asyncio.Future[None]:
        """Close every file and give the directory back: in the threads, after what they are at, without a wait here."""
        if self._gone is not None:
            return self._gone
        gone = self._gone = self._loop.create_future()
        everything.remove(self)
        self._phase = "closed"
        self._thread = 0
        _open_queues.discard(self)
        lock, self._lock = self._lock, None
        closers, self._closers = self._closers, []

        def finish() -> None:
            # Whatever one of them meets, the others are closed, and the lock last of all.
            with ExitStack() as last:
                if lock is not None:
                    last.callback(self._files.close, lock)
                for close in closers:
                    last.callback(close)
                self._reading.join()

        def done(_result: object, error: BaseException | None) -> None:
            if error is not None:
                log.warning("durable_close_failed", path=str(self.path), error=repr(error))
            if not gone.done():
                gone.set_result(None)

        self._reading.stop()
        self._writing.submit(finish, done=done)
        self._writing.stop()
        return gone

    async def _release(self) -> None:
        """`_let_go`, and wait for it."""
        await asyncio.shield(self._let_go())
        # It has nothing left to do but to end.
        self._writing.join()

    async def _call(self, runner: Runner, call: Callable[..., Any], *arguments: Any) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        runner.submit(call, *arguments, done=done)
        return await future

    def _deadline(self) -> float | None:
        timeout = self.config.block_timeout
        return None if timeout is None else self._loop.time() + timeout

    def _now_ns(self) -> int:
        return self._origin_ns + int(self._loop.time() * 1e9)

    @property
    def name(self) -> str:
        """Its directory, as logs have it."""
        return str(self.path)

    @property
    def closed(self) -> bool:
        """Whether the queue is closed, or closing."""
        return self._phase != "open"

    async def close(self) -> None:
        """Write what was accepted, seal the active segment, and let go of the directory.

        Puts that wait for room and leases that wait for records get QueueClosedError. What is not acknowledged stays.
        """
        if self._phase in ("new", "forked"):
            self._phase = "closed" if self._phase == "new" else self._phase
            return
        if self._closing is None:
            if self._phase != "open":
                if self._gone is not None:
                    await asyncio.shield(self._gone)
                return
            self._phase = "closed"
            self._thread = 0
            self._closing = self._loop.create_task(self._shut())
            self._closing.add_done_callback(self._shut_ended)
        try:
            # A cancelled close goes on in the background: half closed is no state to leave a queue in.
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closing.cancelled() or task is None or task.cancelling():
                raise
            # Not this caller was cancelled but, with all tasks of the loop, the closing: the files are let go even so.
            await asyncio.shield(self._let_go())

    async def _shut(self) -> None:
        self._leasing.close()
        self._compactor.close()
        self._admission.close()
        try:
            try:
                await self._graveyard.close()
            finally:
                await self._pump.drain()
                self._losses.look(last=True)
        finally:
            await self._release()

    def _shut_ended(self, closing: asyncio.Task[None]) -> None:
        if closing.cancelled():
            # Perhaps before it had begun: the directory is given back in any case, and nobody waits any longer.
            self._leasing.close()
            self._compactor.close()
            self._admission.close()
            self._pump.abandon()
            self._let_go()

    def _after_round(self) -> None:
        self._losses.look()
        self._leasing.serve()
        self._compactor.look()

    def _forget_files(self, numbers: list[int]) -> None:
        self._reading.submit(self._loader.forget, numbers, done=_nothing)

    def _check(self) -> None:
        if self._phase != "open":
            if self._phase == "forked":
                raise ForkedError(
                    f"durable queue {self.path}: opened before a fork, and this is the child; its owner is the parent. "
                    "Open another directory here, or close the queue before forking"
                )
            raise QueueClosedError(
                f"durable queue {self.path}: {self._phase}, not open; use `async with DurableQueue.open(…)`"
            )
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoopError(
                f"durable queue {self.path}: called from another event loop than the one that opened it"
            )

    # Putting

    async def put(self, payload: bytes, durability: Durability | None = None) -> int:
        """Put one record; returns its sequence number when it is as durable as asked.

        Cancelled while it waits for room or for the writer, it is not put; once the writer has it, it is put, and will
        be delivered. Under `overflow="drop_newest"` a record that was dropped has the number -1.

        Raises:
            RecordTooLargeError: it is larger than `max_record`, or could never fit.
            DiskFullError: there is no room, and `overflow` says to refuse.
            QueueClosedError: the queue is closed.
        """
        if get_ident() != self._thread or not self._loop.is_running():
            self._check()
        if type(payload) is not bytes:
            payload = as_bytes(payload)
        size = len(payload)
        if size > self._limit:
            raise self._too_large(size)
        rank = self._rank if durability is None else self._rank_of(durability)
        if self._pump.guards and not (self._admission.at_once(1, size) or await self._admission.admit(1, size)):
            return DROPPED
        future = self._state.pending.append(payload, size, rank)
        try:
            return await future
        except asyncio.CancelledError:
            self._pump.withdraw(future)
            raise

    async def put_many(self, payloads: Iterable[bytes], durability: Durability | None = None) -> range:
        """Put records as one atomic frame: all of them or none; returns their sequence numbers.

        Cancelled, it does as `put` does. Dropped under `overflow="drop_newest"`, the range is empty.
        """
        if get_ident() != self._thread or not self._loop.is_running():
            self._check()
        items = list(payloads)
        if not items:
            return range(0)
        if set(map(type, items)) != {bytes}:
            items = list(map(as_bytes, items))
        raw = sum(map(len, items))
        if raw > self._limit and (size := max(map(len, items))) > self._limit:
            raise self._too_large(size)
        if frame_size(len(items), raw) > self._most_bytes or len(items) > MAX_RECORDS:
            raise RecordTooLargeError(
                f"durable queue {self.path}: put_many of {len(items)} records and {raw} bytes is more than one "
                f"atomic put of {self._most_bytes} bytes holds; put them in several calls"
            )
        rank = self._rank if durability is None else self._rank_of(durability)
        count = len(items)
        if self._pump.guards and not (self._admission.at_once(count, raw) or await self._admission.admit(count, raw)):
            return range(0)
        future = self._state.pending.append_frame(items, raw, rank)
        try:
            first = await future
        except asyncio.CancelledError:
            self._pump.withdraw(future)
            raise
        return range(0) if first == DROPPED else range(first, first + len(items))

    def _too_large(self, size: int) -> RecordTooLargeError:
        return RecordTooLargeError(
            f"durable queue {self.path}: a record of {size} bytes is above max_record={self._limit}; "
            "raise it, or store a reference"
        )

    def _rank_of(self, durability: str) -> int:
        if durability not in RANKS:
            raise ConfigError(f"durability={durability!r} is unknown; choose one of {', '.join(RANKS)}")
        return RANKS[durability]

    # Leasing

    async def lease(
        self, max_records: int = _LEASE_RECORDS, max_bytes: int = _LEASE_BYTES, wait: float | None = None
    ) -> Lease:
        """The next records, at most this many and these bytes (but at least one record).

        Args:
            max_records: 1 or more.
            max_bytes: 1 or more; a single larger record comes alone.
            wait: seconds to wait for a record, 0 for none, None for as long as it takes. Records that are on the disk
                are read, however short it is.

        Returns:
            A lease; empty and falsy when nothing came in time.
        """
        if get_ident() != self._thread or not self._loop.is_running():
            self._check()
        # Before anything is taken: a number that fails amid it would take records along.
        if type(max_records) is not int or type(max_bytes) is not int or max_records < 1 or max_bytes < 1:
            max_records, max_bytes = as_count("max_records", max_records), as_count("max_bytes", max_bytes)
        if wait is not None and (not isinstance(wait, int | float) or wait != wait):  # noqa: PLR0124 - not a number
            raise ConfigError(f"DurableQueue.lease: wait={wait!r} is not a number of seconds; None waits, 0 does not")
        return self._leasing.at_once(max_records, max_bytes) or await self._leasing.lease(max_records, max_bytes, wait)

    # Dead letters

    async def dead_letters(self, limit: int = _DEAD_LETTERS) -> list[DeadLetter]:
        """The first dead letters; they stay where they are."""
        self._check()
        return await self._graveyard.list(limit)

    async def requeue_dead_letters(
        self, seqs: Iterable[int] | None = None, *, progress: Callable[[Sequence[int]], object] | None = None
    ) -> int:
        """Put dead letters into the queue again, all or those with these numbers among the dead letters; how many.

        Each gets a new sequence number. A crash or a cancellation in the middle leaves some of them in both places.

        Args:
            seqs: their numbers among the dead letters.
            progress: called with the numbers of those that have been put back, some at a time.
        """
        self._check()
        return await self._graveyard.requeue(seqs, progress)

    async def purge_dead_letters(
        self,
        seqs: Iterable[int] | None = None,
        *,
        before: float | None = None,
        progress: Callable[[Sequence[int]], object] | None = None,
    ) -> int:
        """Delete dead letters: all, those with these numbers, or those that died before this moment; how many.

        Args:
            seqs: their numbers among the dead letters.
            before: seconds since 1970.
            progress: called with the numbers of those that have been deleted, some at a time.
        """
        self._check()
        return await self._graveyard.purge(seqs, before, progress)

    def hurry(self) -> None:
        """Make every record ready now that waits for the delay of its `nack`."""
        self._check()
        self._leasing.hurry()

    def compact(self) -> None:
        """Give back the room of settled records soon, instead of when it is needed or the queue has nothing to do.

        The newest segment is emptied with the next round, if all of its records are settled. Of older segments, which
        are deleted by themselves when all of theirs are, those that hold little else are written anew without them.
        """
        self._check()
        self._pump.compact()
        self._compactor.press()

    def _part_of_room(self) -> tuple[int, int]:
        """Records and bytes that a put can hold which must not wait for more room than there ever is."""
        most = self.config.max_records
        size = min(self._most_bytes, self.config.usable_bytes, _PART_BYTES * _PARTS)
        return (_PART if most is None else min(_PART, max(1, most // _PARTS))), max(1, int(size // _PARTS))

    def _open_dead(self) -> DurableQueue:
        self._check()
        config = self.config
        kept = DurableConfig(
            max_record=MAX_PUT,
            compression=config.compression,
            max_bytes=config.dead_letter_bytes,
            max_age=config.dead_letter_age,
            overflow="reject" if config.dead_letter_bytes is None else "drop_oldest",
        )
        dead = DurableQueue(self.path / recovery.DEAD, kept, self._files, self._wall, self._make_runner)
        # A letter is a record and the words about it: whatever could be put can be buried.
        dead._most_bytes = MAX_FRAME
        dead._is_listed = False
        return dead

    # The rest

    @property
    def recovery(self) -> RecoveryReport:
        """What opening the queue has found."""
        return self._recovery

    @property
    def queue_id(self) -> str:
        """32 hex digits; with a sequence number, a record's identity for ever."""
        return self._recovery.queue_id

    @property
    def oldest(self) -> int | None:
        """The lowest sequence number that is not settled; None when all are."""
        found = [
            next(entry.settled.missing(entry.first, entry.end))[0]
            for entry in self._state.segments.values()
            if entry.unsettled
        ]
        return min(found, default=None)

    def segment_ages(self) -> list[tuple[int, float]]:
        """Per segment its first number, and for how many seconds there has been that segment."""
        now = self._now_ns()
        return [
            (entry.first, (now - entry.header.created_ns) * 1e-9) for _, entry in sorted(self._state.segments.items())
        ]

    # What an owner that looks often asks, without a snapshot of everything

    @property
    def next_seq(self) -> int:
        """The number of the next record."""
        return self._state.next_seq

    @property
    def records(self) -> int:
        """Records that are not settled."""
        return self._state.room.records

    @property
    def leased(self) -> int:
        """Those of them that are leased."""
        return self._state.leased

    @property
    def size(self) -> int:
        """The bytes of everything in the directory."""
        return self._state.room.used_bytes

    @property
    def next_due(self) -> float | None:
        """The loop's time at which the next delayed record is ready."""
        return self._state.index.next_due

    @property
    def record_limit(self) -> int:
        """The bytes of the largest record that can be put."""
        return self._limit

    @property
    def dropped(self) -> Mapping[str, int]:
        """Records dropped, by reason."""
        return self._state.room.dropped()

    def now_ns(self) -> int:
        """The time on the clock of `Record.enqueued_at`, in nanoseconds."""
        return self._now_ns()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the queue lives on."""
        return self._loop

    def stats(self) -> DurableStats:
        """A snapshot of every count."""
        return snapshot(self._state)

    def peek(self) -> DurableStats:
        """A snapshot of every count, from any thread and without waiting for the loop.

        Amid a step of the loop two counts may be a step apart.

        Raises:
            QueueClosedError: it has not been opened.

        Example:
            >>> import asyncio, tempfile, batchqueue_async as bq
            >>> async def main(path: str) -> int:
            ...     async with bq.DurableQueue.open(path) as queue:
            ...         await queue.put(b"one")
            ...         return (await asyncio.to_thread(queue.peek)).records
            >>> with tempfile.TemporaryDirectory() as path:
            ...     asyncio.run(main(path))
            1
        """
        if not hasattr(self, "_state"):
            raise QueueClosedError(f"durable queue {self.path}: {self._phase}, and was never open; open it first")
        return looked_at(partial(snapshot, self._state))


def _segment_bytes(wanted: int, free: int | None, used: int) -> int:
    """The size of segments, small beside what the file system has for the queue."""
    return wanted if free is None else min(wanted, max(_LEAST_SEGMENT, (free + used) // _DISK_SHARE))


def _nothing(_result: object, _error: BaseException | None) -> None:
    """Closing descriptors of deleted files: nobody waits for it."""


def _after_fork() -> None:
    """In the child of a fork the threads are gone and the parent is still the owner."""
    for queue in list(_open_queues):
        queue.after_fork()
    _open_queues.clear()


os.register_at_fork(after_in_child=_after_fork)
