"""The way in for puts while there is a quota or a full disk: who waits for room, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
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


class _Waiter:
    """A put that waits for room. `granted`: the room is reserved, and its task has not gone on with it yet."""

    __slots__ = ("counted", "future", "granted", "records", "size")

    def __init__(self, records: int, size: int, future: asyncio.Future[None]) -> None:
        self.records = records
        self.size = size
        self.future = future
        self.counted = self.granted = False


class Admission:
    """The waiting of puts; what becomes of them is `Room`'s to decide."""

    # Invariants: who waits is in `_waiters` in the order of arrival; a later put is granted nothing before an earlier
    # one, nor goes on before it: `_granted` counts those that are granted room and have not gone on.
    def __init__(self, state: QueueState, pump: GroupCommit, path: Path, *, on_full: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._state = state
        self._room = state.room
        self._config = state.config
        self._pump = pump
        self._path = path
        # Asks for the room of settled records inside old segments; whether that may give any.
        self._on_full = on_full
        self._waiters: deque[_Waiter] = deque()
        self._granted = 0
        self._looking = self._paying = False
        self._closed = False
        pump.guards += self._room.is_bounded

    def close(self) -> None:
        """Those who wait for room give up."""
        self._closed = True
        for waiter in self._waiters:
            _fail(waiter, self._closed_error())
        self._waiters.clear()

    def _closed_error(self) -> QueueClosedError:
        return QueueClosedError(f"durable queue {self._path}: closed while a put waited for room; it was not put")

    def at_once(self, records: int, raw: int) -> bool:
        """Whether a put may come in now, without a wait and without a refusal."""
        if self._waiters or self._granted or not self._room.takes(records, frame_size(records, raw)):
            return False
        if self._room.owed and not self._paying:
            self._paying = True
            self._loop.call_soon(self._pay)
        return True

    def _pay(self) -> None:
        self._paying = False
        self._room.pay()
        self._pump.touch()

    async def admit(self, records: int, raw: int) -> bool:
        """Wait or make room, as `overflow` says; False when the put itself is dropped."""
        size = frame_size(records, raw)
        decision = self._room.decide(records, size, others_wait=bool(self._waiters or self._granted))
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
        waiter = _Waiter(records, size, self._loop.create_future())
        self._waiters.append(waiter)
        # Meanwhile others line up behind this one, though there be room for them.
        self._pump.guards += 1
        if len(self._waiters) == 1:
            self._look() if not self._granted else self._look_soon()
        timer = None
        if not waiter.future.done() and self._config.overflow == "block" and self._config.block_timeout is not None:
            timer = self._loop.call_later(self._config.block_timeout, self._time_over, waiter)
        went_on = False
        try:
            await waiter.future
            went_on = True
        finally:
            self._pump.guards -= 1
            if timer is not None:
                timer.cancel()
            if waiter.granted:
                self._granted -= 1
                self._state.pending.release(records, size)
            if not went_on:
                # It was the first that waits, or leaves its room to the others.
                self._look_soon()
        if self._closed:
            raise self._closed_error()

    def _time_over(self, waiter: _Waiter) -> None:
        _fail(waiter, self._no_room("block_timeout is over", waiter.records, waiter.size))

    def _look_soon(self) -> None:
        """Look after those who are granted room already have gone on."""
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Grant room to those who wait, as far as there is any, or can be made."""
        self._looking = False
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.future.done():
                try:
                    if not self._has_room(waiter):
                        self._pump.on_progress(self._look_soon)
                        return
                except Exception as error:  # noqa: BLE001 - whatever it is, the put that waits is to raise it
                    _fail(waiter, error)
                else:
                    waiter.granted = True
                    self._granted += 1
                    self._state.pending.reserve(waiter.records, waiter.size)
                    waiter.future.set_result(None)
            self._waiters.popleft()
        self._pump.on_progress(None)

    def _has_room(self, waiter: _Waiter) -> bool:
        """Whether there is room for the first that waits, if need be made for it."""
        records, size = waiter.records, waiter.size
        reason = self._room.lacks(records, size)
        if reason is None:
            return True
        if not waiter.counted:
            waiter.counted = True
            self._count_full(reason)
        decision = self._room.decide_again(records, size, compact=self._on_full, freeing=lambda: self._pump.freeing)
        if self._state.touched:
            # What was dropped is to be noted, and may free a segment.
            self._pump.touch()
        if decision is Decision.REFUSE:
            self._pump.look()
            raise self._no_room(f"{reason}, and what could be dropped is leased", records, size)
        if decision is Decision.OCCUPIED:
            raise self._no_room(_OCCUPIED, records, size)
        return decision is Decision.ADMIT

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


def _fail(waiter: _Waiter, error: Exception) -> None:
    if not waiter.future.done():
        waiter.future.set_exception(error)
        # Its task may have been cancelled meanwhile, and then never asks.
        waiter.future.exception()
