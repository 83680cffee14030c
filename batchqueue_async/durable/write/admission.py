"""The way in for puts while there is a quota or a full disk: who waits for room, first come, first served."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk.format import frame_size
from batchqueue_async.durable.state.room import Decision
from batchqueue_async.errors import DiskFullError, QueueClosedError, RecordTooLargeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchqueue_async.durable.state.queue_state import QueueState
    from batchqueue_async.durable.write.pump import GroupCommit

_OCCUPIED = "dead letters, the quarantine and other files leave too little"


class Admission:
    """The waiting of puts; what becomes of them is `Room`'s to decide."""

    def __init__(self, state: QueueState, pump: GroupCommit, path: Path, *, on_full: Callable[[], bool]) -> None:
        self._state = state
        self._room = state.room
        self._config = state.config
        self._pump = pump
        self._path = path
        # Asks for the room of settled records inside old segments; whether that may give any.
        self._on_full = on_full
        self._turn = asyncio.Lock()
        self._closed = False
        pump.guards += self._room.is_bounded

    def close(self) -> None:
        """Those who wait for room give up."""
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise QueueClosedError(f"durable queue {self._path}: closed while a put waited for room; it was not put")

    async def admit(self, records: int, raw: int) -> bool:
        """Wait or make room, as `overflow` says; False when the put itself is dropped."""
        size = frame_size(records, raw)
        decision = self._room.decide(records, size, others_wait=self._turn.locked())
        if decision is Decision.ADMIT:
            return True
        if decision is Decision.WAIT:
            await self._wait(records, size)
            return True
        if decision is Decision.TOO_LARGE:
            raise RecordTooLargeError(
                f"durable queue {self._path}: {records} records in {size} bytes can never fit into "
                f"max_bytes={self._config.max_bytes} and max_records={self._config.max_records}; "
                "raise them, or put less at once"
            )
        if decision is Decision.OCCUPIED:
            self._count_full("max_bytes")
            raise self._no_room(_OCCUPIED, records, size)
        reason = self._room.lacks(records, size) or "others wait"
        self._count_full(reason)
        self._pump.look()
        if reason != "max_records":
            self._on_full()
        if decision is Decision.REFUSE:
            raise self._no_room(reason, records, size)
        self._state.counters.dropped["newest"] += records
        return False

    async def _wait(self, records: int, size: int) -> None:
        timeout = self._config.block_timeout if self._config.overflow == "block" else None
        # Meanwhile others line up behind this one, though there be room for them.
        self._pump.guards += 1
        try:
            async with asyncio.timeout(timeout), self._turn:
                await self._await_room(records, size)
        except TimeoutError:
            raise self._no_room("block_timeout is over", records, size) from None
        finally:
            self._pump.guards -= 1

    async def _await_room(self, records: int, size: int) -> None:
        counted = False
        while (reason := self._room.lacks(records, size)) is not None:
            self._check()
            if not counted:
                counted = True
                self._count_full(reason)
            decision = self._room.decide_again(records, size, compact=self._on_full, freeing=lambda: self._pump.freeing)
            if self._state.touched:
                # What was dropped is to be noted, and may free a segment.
                self._pump.touch()
            if decision is Decision.ADMIT:
                return
            if decision is Decision.REFUSE:
                self._pump.look()
                raise self._no_room(f"{reason}, and what could be dropped is leased", records, size)
            if decision is Decision.OCCUPIED:
                raise self._no_room(_OCCUPIED, records, size)
            await self._pump.progress()
        self._check()

    def _count_full(self, reason: str) -> None:
        if reason != "max_records":
            self._state.counters.disk_full += 1

    def _no_room(self, reason: str, records: int, size: int) -> DiskFullError:
        room, config = self._room, self._config
        return DiskFullError(
            f"durable queue {self._path}: no room for {records} records in {size} bytes ({reason}): "
            f"{self._state.records} records, {room.used_bytes} bytes on disk, "
            f"{room.free_bytes} bytes free, max_records={config.max_records}, "
            f"max_bytes={config.max_bytes}, min_free_bytes={config.min_free_bytes}, "
            f"{room.fixed_bytes()} bytes of them in dead letters, quarantine and other files; raise the quota, "
            "lease and ack faster, or purge the dead letters"
        )
