"""Whether a put may come in now: quotas, a full disk, and what `overflow` says to do about them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk.format import frame_size
from batchqueue_async.durable.state.dropping import Eviction
from batchqueue_async.errors import DiskFullError, QueueClosedError, RecordTooLargeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchqueue_async.durable.state.queue_state import QueueState
    from batchqueue_async.durable.write.pump import GroupCommit


class Admission:
    """The door of one queue: first come, first served."""

    def __init__(self, state: QueueState, pump: GroupCommit, path: Path, *, on_full: Callable[[], bool]) -> None:
        self._state = state
        self._config = config = state.config
        self._pump = pump
        self._path = path
        self._dropper = Eviction(state)
        # Asks for the room of settled records inside old segments; whether that may give any.
        self._on_full = on_full
        self._turn = asyncio.Lock()
        self._closed = False
        pump.guards += bool(config.max_records is not None or config.max_bytes is not None or config.min_free_bytes)

    def close(self) -> None:
        """Those who wait for room give up."""
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise QueueClosedError(f"durable queue {self._path}: closed while a put waited for room; it was not put")

    async def admit(self, records: int, raw: int) -> bool:
        """Wait or make room, as `overflow` says; False when the put itself is dropped."""
        size = frame_size(records, raw)
        # Behind others that wait, nobody passes: first come, first served.
        if not self._turn.locked() and self._reason(records, size) is None:
            return True
        config = self._config
        if not self._state.fits_ever(records, size):
            if self._state.fits_alone(records, size):
                self._count_full("max_bytes")
                raise self._no_room("dead letters, the quarantine and other files leave too little", records, size)
            raise RecordTooLargeError(
                f"durable queue {self._path}: {records} records in {size} bytes can never fit into "
                f"max_bytes={config.max_bytes} and max_records={config.max_records}; raise them, or put less at once"
            )
        if config.overflow in ("block", "drop_oldest"):
            timeout = config.block_timeout if config.overflow == "block" else None
            # Meanwhile others line up behind this one, though there be room for them.
            self._pump.guards += 1
            try:
                async with asyncio.timeout(timeout), self._turn:
                    await self._await_room(records, size)
            except TimeoutError:
                raise self._no_room("block_timeout is over", records, size) from None
            finally:
                self._pump.guards -= 1
            return True
        reason = self._reason(records, size)
        if reason is None:
            return True
        self._count_full(reason)
        self._pump.look()
        if reason != "max_records":
            self._on_full()
        if config.overflow == "reject":
            raise self._no_room(reason, records, size)
        self._state.counters.dropped["newest"] += records
        return False

    async def _await_room(self, records: int, size: int) -> None:
        counted = False
        while (reason := self._reason(records, size)) is not None:
            self._check()
            if not counted:
                counted = True
                self._count_full(reason)
            if reason != "max_records" and self._on_full():
                pass
            elif self._config.overflow == "drop_oldest" and reason != "disk_full":
                if self._dropper.drop_oldest(reason, records, size):
                    self._pump.touch()
                    if self._reason(records, size) is None:
                        return
                elif not self._pump.freeing:
                    self._pump.look()
                    raise self._no_room(f"{reason}, and what could be dropped is leased", records, size)
            elif reason == "max_bytes" and not self._state.fits_ever(records, size):
                raise self._no_room("dead letters, the quarantine and other files leave too little", records, size)
            await self._pump.progress()
        self._check()

    def _reason(self, records: int, size: int) -> str | None:
        return "disk_full" if self._pump.stalled else self._state.room(records, size)

    def _count_full(self, reason: str) -> None:
        if reason != "max_records":
            self._state.counters.disk_full += 1

    def _no_room(self, reason: str, records: int, size: int) -> DiskFullError:
        state, config = self._state, self._config
        return DiskFullError(
            f"durable queue {self._path}: no room for {records} records in {size} bytes ({reason}): "
            f"{state.records} records, {state.disk_bytes + state.extra_bytes} bytes on disk, "
            f"{state.free_bytes} bytes free, max_records={config.max_records}, "
            f"max_bytes={config.max_bytes}, min_free_bytes={config.min_free_bytes}, "
            f"{state.fixed_bytes()} bytes of them in dead letters, quarantine and other files; raise the quota, "
            "lease and ack faster, or purge the dead letters"
        )
