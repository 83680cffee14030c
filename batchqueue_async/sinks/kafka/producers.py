"""The producer that sends go through: made when it is needed, and another one when it is of no more use."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchqueue_async.sinks.kafka.client import stop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchqueue_async.sinks.kafka.client import Producer


class Producers:
    """One producer at a time; those that were retired may finish what they have."""

    def __init__(self, make: Callable[[], Awaitable[Producer]], grace: float, gone: Callable[[Producer], None]) -> None:
        self._make = make
        self._grace = grace
        self._gone = gone
        self._turn = asyncio.Lock()
        self._current: Producer | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def get(self) -> Producer:
        """The producer."""
        if self._current is None:
            async with self._turn:
                if self._current is None:
                    self._current = await self._make()
        return self._current

    def retire(self, producer: Producer) -> None:
        """Take another producer from now on."""
        if self._current is producer:
            self._current = None
            task = asyncio.create_task(self._end(producer, self._grace))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all producers."""
        if self._current is not None:
            producer, self._current = self._current, None
            await self._end(producer, min(self._grace, 1.0))
        while self._ending:
            await asyncio.wait(self._ending)

    async def _end(self, producer: Producer, grace: float) -> None:
        try:
            await stop(producer, grace)
        finally:
            self._gone(producer)
