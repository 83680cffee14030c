"""The durable queue: a thin shell over `state`, with `pump` towards the disk and `leasing` towards consumers."""

from __future__ import annotations

import asyncio
import re
import time
from asyncio import get_running_loop
from pathlib import Path
from typing import TYPE_CHECKING, cast

from batchqueue_async.durable.config import RANKS, Durability, DurableConfig
from batchqueue_async.durable.disk import recovery
from batchqueue_async.durable.disk.files import Files, OsFiles
from batchqueue_async.durable.disk.format import MAX_FRAME, MAX_RECORDS, frame_size
from batchqueue_async.durable.io_thread import Runner, Worker
from batchqueue_async.durable.lifetime import Lifetime
from batchqueue_async.durable.stats import DurableStats, snapshot
from batchqueue_async.durable.write.pump import DROPPED
from batchqueue_async.errors import ConfigError, RecordTooLargeError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.durable.disk.recovery import RecoveryReport
    from batchqueue_async.leases.lease import Lease

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_LEASE_RECORDS = 1_000
_LEASE_BYTES = 16 << 20
_DEAD_LETTERS = 500


class DurableQueue(Lifetime):
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
            path: the directory; relative to the current one.
            config: how it behaves.
            name: a directory below `path`: letters, digits, dots, dashes and underscores.
            files: the file system; the tests replace it.
            wall_clock: nanoseconds since 1970, asked once at the opening; from then on time is the loop's.
            runner: what makes the I/O threads; the tests replace it.
        """
        place = Path(path)
        if name is not None:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"DurableQueue.open: name={name!r} can't be a directory below {str(place)!r}; "
                    "use letters, digits, '.', '-' and '_', at most 100, not starting with '.' or '-'"
                )
            place /= name
        return cls(place, config or DurableConfig(), files or OsFiles(), wall_clock, runner)

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
        if self._open_loop is None or get_running_loop() is not self._open_loop:
            self._check()
        if type(payload) is not bytes:
            payload = _as_bytes(payload)
        size = len(payload)
        if size > self._limit:
            raise self._too_large(size)
        rank = self._rank if durability is None else self._rank_of(durability)
        if self._pump.guards and not await self._admission.admit(1, size):
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
        if self._open_loop is None or get_running_loop() is not self._open_loop:
            self._check()
        items = list(payloads)
        if not items:
            return range(0)
        if set(map(type, items)) != {bytes}:
            items = list(map(_as_bytes, items))
        sizes = list(map(len, items))
        raw = sum(sizes)
        if max(sizes) > self._limit:
            raise self._too_large(max(sizes))
        if frame_size(len(items), raw) > MAX_FRAME or len(items) > MAX_RECORDS:
            raise RecordTooLargeError(
                f"durable queue {self.path}: put_many of {len(items)} records and {raw} bytes is more than one "
                f"atomic frame of {MAX_FRAME} bytes holds; put them in several calls"
            )
        rank = self._rank if durability is None else self._rank_of(durability)
        if self._pump.guards and not await self._admission.admit(len(items), raw):
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
        if self._open_loop is None or get_running_loop() is not self._open_loop:
            self._check()
        if max_records < 1 or max_bytes < 1:
            raise ConfigError(f"DurableQueue.lease: max_records={max_records}, max_bytes={max_bytes}; give 1 or more")
        return await self._leasing.lease(max_records, max_bytes, wait)

    # Dead letters

    async def dead_letters(self, limit: int = _DEAD_LETTERS) -> list[DeadLetter]:
        """The first dead letters; they stay where they are."""
        self._check()
        return await self._graveyard.list(limit)

    async def requeue_dead_letters(self, seqs: Iterable[int] | None = None) -> int:
        """Put dead letters into the queue again, all or those with these numbers among the dead letters; how many.

        Each gets a new sequence number. A crash in the middle leaves some of them in both places.
        """
        self._check()
        return await self._graveyard.requeue(seqs)

    def _open_dead(self) -> DurableQueue:
        self._check()
        config = DurableConfig(max_record=MAX_FRAME // 2, compression=self.config.compression, overflow="reject")
        return DurableQueue(self.path / recovery.DEAD, config, self._files, self._wall, self._make_runner)

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

    def stats(self) -> DurableStats:
        """A snapshot of every count."""
        return snapshot(self._state)


def _as_bytes(payload: object) -> bytes:
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(cast("bytes", payload))
    raise ConfigError(f"DurableQueue: a payload is bytes, not {type(payload).__name__}; encode it first")
