"""The sink's life: opened before the first send, again and again while it can't be, and closed at the end."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Literal

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async.errors import ConfigError, RetryableError
from batchqueue_async.export.delivery.classify import Disposition, classify, is_fatal, is_sinks_own, reason

if TYPE_CHECKING:
    from batchqueue_async.export.delivery.context import ExportContext

StartCheck = Literal["warn", "fail", "off"]

_CLOSE_MOST = 5.0
# The share of the time in which a sink that did not close is to end its cancelled `close`.
_GRACE = 0.2
_GRACE_MOST = 0.25
# Sinks that an open exporter uses, by their identity: a sink has one owner, who opens and closes it.
_owners: dict[int, tuple[object, str]] = {}


class SinkLifecycle:
    """Opens and closes one sink.

    Attributes:
        opened: whether it is open.
    """

    def __init__(self, context: ExportContext) -> None:
        self._context = context
        self._attempts = 0
        self._claimed = False
        self._closing: asyncio.Task[None] | None = None
        self.opened = False

    def claim(self) -> None:
        """Take the sink for this exporter.

        Raises:
            ConfigError: another exporter has it.
        """
        sink, name = self._context.sink, self._context.name
        owner, other = _owners.setdefault(id(sink), (self, name))
        if owner is not self:
            raise ConfigError(
                f"exporter {name!r}: its sink is in use by exporter {other!r}, which opens and closes it; make a sink "
                "for each exporter"
            )
        self._claimed = True

    def disclaim(self) -> None:
        """Give the sink up."""
        if self._claimed:
            self._claimed = False
            _owners.pop(id(self._context.sink), None)

    async def first(self, check: StartCheck, timeout: float) -> None:
        """Open it, and have it look whether it could send; what may pass is no error.

        Raises:
            Exception: with `fail`, whatever will not pass by itself; with `warn`, what no sending can repair.
        """
        if check == "off":
            return
        error = await self._try(timeout, check=True)
        if error is None:
            return
        disposition = classify(error).disposition
        passing = disposition in (Disposition.RETRY, Disposition.SLOW_DOWN)
        hopeless = disposition in (Disposition.GIVE_UP, Disposition.SPLIT)
        if hopeless or (check == "fail" and not passing):
            raise error
        self._context.counts.failed(reason(error))

    async def ready(self) -> float | None:
        """See to it that it is open: 0, or the seconds until the next attempt; None is when something changes."""
        if self.opened:
            return 0.0
        context = self._context
        permit = context.gate.acquire(context.now())
        if permit is None:
            return context.gate.wait(context.now())
        try:
            error = await self._try(context.config.send_timeout, check=False)
        except BaseException:
            context.gate.release(permit)
            raise
        if error is None:
            self._attempts = 0
            context.gate.release(permit)
            return 0.0
        self._attempts += 1
        disposition, kind = classify(error)
        context.counts.failures[kind] += 1
        context.counts.failed(reason(error))
        if disposition is Disposition.PAUSE:
            context.pause(error, permit)
            return context.gate.wait(context.now())
        asked = context.backoff.asked(error.retry_after) if isinstance(error, RetryableError) else None
        if disposition is Disposition.RETRY:
            context.gate.failed(permit, context.now(), asked)
        else:
            context.gate.throttled(permit, context.now(), asked)
            if disposition is Disposition.UNKNOWN:
                context.warn_of(error)
        context.counts.backoff = delay = context.backoff.delay(self._attempts, asked)
        return delay

    async def _try(self, timeout: float, *, check: bool) -> BaseException | None:
        context = self._context
        try:
            async with asyncio.timeout(timeout):
                await context.sink.open()
                look: Any = getattr(context.sink, "check", None)
                if check and inspect.iscoroutinefunction(look):
                    await look()
        except BaseException as error:  # whatever it is, the caller decides whether it may pass
            await self.close()
            own = isinstance(error, Exception) or is_sinks_own(error)
            if is_fatal(error) or (isinstance(error, asyncio.CancelledError) and not own):
                raise
            log.warning("sink_not_open", exporter=context.name, reason=reason(error), **describe(error))
            return error
        self.opened = True
        return None

    async def close(self, timeout: float = _CLOSE_MOST) -> None:
        """Close it, whatever it says to that, and leave it behind when it does not end in time."""
        context = self._context
        self.opened = False
        if self._closing is None or self._closing.done():
            # One at a time: an opening that is cut off closes the sink, too.
            self._closing = context.loop.create_task(self._close(), name=f"export-{context.name}-close")
        task = self._closing
        try:
            await asyncio.wait((task,), timeout=min(_CLOSE_MOST, (1.0 - _GRACE) * timeout))
        except BaseException:
            task.cancel()
            raise
        if task.done():
            return
        task.cancel()
        await asyncio.wait((task,), timeout=min(_GRACE_MOST, _GRACE * timeout))
        if not task.done():
            log.error("sink_close_stuck", exporter=context.name, way_out="let the sink's close() end when cancelled")

    async def _close(self) -> None:
        try:
            await self._context.sink.close()
        except asyncio.CancelledError:
            log.error("sink_close_failed", exporter=self._context.name, error="TimeoutError")
        except BaseException as error:  # the end goes on; what the sink had confirmed it has
            if is_fatal(error):
                raise
            log.error("sink_close_failed", exporter=self._context.name, **describe(error))
