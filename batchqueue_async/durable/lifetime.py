"""A durable queue's life: the lock, recovery, the parts and how they are joined, closing, and the child of a fork."""

from __future__ import annotations

import asyncio
import os
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from batchqueue_async.durable.config import RANKS
from batchqueue_async.durable.disk import compression, recovery
from batchqueue_async.durable.disk.format import MAX_FRAME, frame_size
from batchqueue_async.durable.read.graveyard import Graveyard
from batchqueue_async.durable.read.leasing import Leasing
from batchqueue_async.durable.read.loader import Loader
from batchqueue_async.durable.state.admission import Admission
from batchqueue_async.durable.state.queue_state import QueueState
from batchqueue_async.durable.write.pending import Pending
from batchqueue_async.durable.write.pump import Pump
from batchqueue_async.durable.write.writer import Writer
from batchqueue_async.errors import DurableQueueError, ForkedError, QueueClosedError, WrongLoopError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

    from batchqueue_async.durable.config import Durability, DurableConfig
    from batchqueue_async.durable.disk.files import Files
    from batchqueue_async.durable.disk.recovery import RecoveryReport
    from batchqueue_async.durable.io_thread import Runner
    from batchqueue_async.durable.queue import DurableQueue

_open_queues: weakref.WeakSet[Lifetime] = weakref.WeakSet()


class Lifetime(ABC):
    """From new to open to closed: what a queue is made of. What it does is `DurableQueue`'s."""

    def __init__(
        self, path: Path, config: DurableConfig, files: Files, wall: Callable[[], int], runner: Callable[..., Runner]
    ) -> None:
        self.path = path
        self.config = config
        self._files = files
        self._wall = wall
        self._make_runner = runner
        self._phase = "new"
        # The loop while the queue is open: one comparison tells every call that it may go on.
        self._open_loop: asyncio.AbstractEventLoop | None = None
        self._lock: int | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closers: list[Callable[[], None]] = []
        self._recovery: RecoveryReport

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
        boot = self._loop.create_task(self._boot())
        try:
            await asyncio.shield(boot)
        except asyncio.CancelledError:
            # The thread can't be stopped in the middle: it ends what it does, and the lock is given back then.
            if boot.done():
                self._undo_boot(boot)
            else:
                boot.add_done_callback(self._undo_boot)
            raise
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise DurableQueueError(f"durable queue {self.path}: can't be opened: {error}") from error
            raise
        return self

    @abstractmethod
    async def put_many(self, payloads: Iterable[bytes], durability: Durability | None = None) -> range:
        """For the dead letters that go back into the queue."""

    @abstractmethod
    def _open_dead(self) -> DurableQueue:
        """The queue of the dead letters, not opened yet."""

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _boot(self) -> None:
        start, wall = self._loop.time(), self._wall()
        survey, self._lock, free = await self._call(self._writing, self._prepare)
        self._recovery = replace(survey.report, elapsed=self._loop.time() - start)
        # The wall clock is asked once. From here on time is the loop's, so a clock that jumps expires nothing.
        self._origin_ns = wall - int(start * 1e9)
        config = self.config
        pending = Pending(
            clock=self._now_ns, deadline=self._deadline, future=self._loop.create_future, buffer=config.write_buffer
        )
        self._state = state = QueueState(config, survey, pending)
        state.free_bytes = free
        writer = Writer(
            self._files,
            self.path,
            queue_id=survey.queue_id,
            number=survey.next_number,
            codec=compression.require(config.compression),
            segment_bytes=config.rotate_bytes,
            buffer=config.write_buffer,
            watch_free=config.min_free_bytes > 0,
        )
        dead_bytes = await self._call(self._reading, recovery.disk_bytes, self._files, self.path / recovery.DEAD)
        self._graveyard = Graveyard(state, self._open_dead, self.put_many, clock=self._now_ns, size=dead_bytes)
        self._loader = Loader(self._files, self.path)
        self._leasing = leasing = Leasing(
            state,
            self._loader,
            self._reading,
            files=self._files,
            path=self.path,
            clock=self._now_ns,
            pump=lambda: self._pump,
            bury=self._graveyard.bury,
        )
        self._pump = Pump(
            state,
            writer,
            self._writing,
            path=self.path,
            clock=self._now_ns,
            on_ready=leasing.serve,
            on_deleted=self._forget_files,
        )
        self._admission = Admission(state, self._pump, self.path)
        self._closers = [writer.close, self._loader.close]
        state.outstanding = leasing.outstanding  # type: ignore[method-assign]  # the leases live in the shell
        self._limit = max(1, min(config.max_record, MAX_FRAME - frame_size(1, 0)))
        self._rank = RANKS[config.durability]
        self._phase = "open"
        self._open_loop = self._loop
        _open_queues.add(self)
        if state.touched or state.emptied:
            self._pump.touch()

    def _prepare(self) -> tuple[recovery.Survey, int, int | None]:
        self._files.make_directory(self.path)
        lock = self._files.lock(self.path / recovery.LOCK)
        try:
            survey = recovery.repair(recovery.Surveyor(self._files, self.path).survey(), self._files, self.path)
            free = None
            with suppress(OSError):
                free = self._files.free_bytes(self.path)
        except BaseException:
            self._files.close(lock)
            raise
        return survey, lock, free

    def _undo_boot(self, boot: asyncio.Task[None]) -> None:
        if not boot.cancelled() and boot.exception() is None:
            self._leasing.close()
        self._release()

    def _release(self) -> None:
        self._phase = "closed"
        self._open_loop = None
        self._writing.stop()
        self._reading.stop()
        while self._closers:
            self._closers.pop()()
        if self._lock is not None:
            self._files.close(self._lock)
            self._lock = None

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
                return
            self._phase = "closed"
            self._open_loop = None
            self._closing = self._loop.create_task(self._shut())
            self._closing.add_done_callback(self._shut_ended)
        try:
            # A cancelled close goes on in the background: half closed is no state to leave a queue in.
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closing.cancelled() or task is None or task.cancelling():
                raise
            # Not this caller was cancelled but, with all tasks of the loop, the closing: that has ended then, too.

    async def _shut(self) -> None:
        self._leasing.close()
        self._admission.close()
        try:
            await self._graveyard.close()
            await self._pump.drain()
        finally:
            self._release()
            _open_queues.discard(self)

    def _shut_ended(self, closing: asyncio.Task[None]) -> None:
        if closing.cancelled():
            # Perhaps before it had begun: the directory is given back in any case, and nobody waits any longer.
            self._leasing.close()
            self._admission.close()
            self._pump.abandon()
            self._release()
            _open_queues.discard(self)

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


def _nothing(_result: object, _error: BaseException | None) -> None:
    """Closing descriptors of deleted files: nobody waits for it."""


def _after_fork() -> None:
    """In the child of a fork the threads are gone and the parent is still the owner."""
    for queue in list(_open_queues):
        queue._phase = "forked"
        queue._open_loop = None
        if queue._lock is not None:
            # The parent's lock lives as long as any descriptor of it: a child must not keep it beyond the parent's end.
            with suppress(OSError):
                queue._files.close(queue._lock)
            queue._lock = None
    _open_queues.clear()


os.register_at_fork(after_in_child=_after_fork)
