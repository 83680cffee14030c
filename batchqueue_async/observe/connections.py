"""The connections of the ops thread: bounded in number, and none may be open for long without a whole request.

A probe has to be answered however many others hold connections open: where there are too many, the one that has
waited longest without asking anything makes room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

MOST_CONNECTIONS = 192
"""The connections that may be open at once; each takes a file descriptor of the program."""
REQUEST_WITHIN = 10.0
"""Seconds within which a request's head has to be there."""


class Connection(H11Protocol):
    """One connection, as uvicorn has it, with the two bounds."""

    _asked_within: asyncio.TimerHandle | None = None
    _waits_since: float = 0.0

    def connection_made(self, transport: Any) -> None:
        """Take it, and let another go where there are too many."""
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > MOST_CONNECTIONS:
            idle = [each for each in cast("Iterable[Connection]", self.connections) if each.waits]
            min(idle, key=lambda each: each._waits_since, default=self).transport.abort()  # noqa: SLF001 - its own class

    def data_received(self, data: bytes) -> None:
        """Read on; what is not a whole head yet may not take for ever."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the timer."""
        super().connection_lost(exc)
        if self._asked_within is not None:
            self._asked_within.cancel()

    @property
    def waits(self) -> bool:
        """Whether nothing whole has been asked that is not answered."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # uvicorn declares it without the None
        return cycle is None or cycle.response_complete

    def _watch(self) -> None:
        if not self.waits:
            if self._asked_within is not None:
                self._asked_within.cancel()
            self._asked_within = None
        elif self._asked_within is None:
            self._waits_since = self.loop.time()
            self._asked_within = self.loop.call_later(REQUEST_WITHIN, self._give_up)

    def _give_up(self) -> None:
        self._asked_within = None
        if self.waits and not self.transport.is_closing():
            self.transport.abort()
