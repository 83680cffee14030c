"""The sink's life: opened before the first send, again and again while it can't be, and closed at the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async.errors import AuthError, RetryableError
from batchqueue_async.export.delivery.classify import Verdict, is_sinks_own, judge

if TYPE_CHECKING:
    from batchqueue_async.export.control.backoff import Backoff
    from batchqueue_async.export.control.send_gate import Gate
    from batchqueue_async.export.delivery.sender import Courier
    from batchqueue_async.export.stats import Counts
    from batchqueue_async.sinks.base import Sink

_CLOSE_GRACE = 5.0


class Opening:
    """Opens and closes one sink.

    Attributes:
        opened: whether it is open.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        name: str,
        timeout: float,
        gate: Gate,
        backoff: Backoff,
        counts: Counts,
        courier: Courier,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._name = name
        self._timeout = timeout
        self._gate = gate
        self._backoff = backoff
        self._counts = counts
        self._courier = courier
        self._attempts = 0
        self.opened = False

    async def first(self) -> None:
        """Open it; what may pass is no error, since what comes in is kept meanwhile."""
        error = await self._try()
        if error is not None and judge(error)[0] not in (Verdict.RETRY, Verdict.PAUSE):
            raise error

    async def ready(self) -> float | None:
        """See to it that it is open: 0, or the seconds until the next attempt; None is when something changes."""
        if self.opened:
            return 0.0
        leave = self._gate.acquire(self._loop.time())
        if leave is None:
            return self._gate.wait(self._loop.time())
        try:
            error = await self._try()
        except BaseException:
            self._gate.release(leave)
            raise
        if error is None:
            self._attempts = 0
            self._gate.release(leave)
            return 0.0
        self._attempts += 1
        self._counts.failures[judge(error)[1]] += 1
        if isinstance(error, AuthError):
            self._courier.pause(error, leave)
            return self._gate.wait(self._loop.time())
        asked = self._backoff.asked(error.retry_after) if isinstance(error, RetryableError) else None
        self._gate.failed(leave, self._loop.time(), asked)
        self._counts.backoff = delay = self._backoff.delay(self._attempts, asked)
        return delay

    async def _try(self) -> BaseException | None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._sink.open()
        except BaseException as error:  # whatever it is, the caller decides whether it may pass
            await self.close()
            if not isinstance(error, Exception) and not is_sinks_own(error):
                raise
            log.warning("sink_not_open", exporter=self._name, **describe(error))
            return error
        self.opened = True
        return None

    async def close(self) -> None:
        """Close it, whatever it says to that."""
        self.opened = False
        try:
            async with asyncio.timeout(_CLOSE_GRACE):
                await self._sink.close()
        except Exception as error:  # noqa: BLE001 - the end goes on; what the sink had confirmed it has
            log.error("sink_close_failed", exporter=self._name, **describe(error))
