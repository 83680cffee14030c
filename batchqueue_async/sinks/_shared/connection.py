"""A connection that is made when it is needed, shared by those who send, and replaced when it broke."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

GRACE = 1.0
"""Seconds that a connect gets to come to its end, when nobody waits for it any more."""


async def uncut(connect: Coroutine[Any, Any, T], end: Callable[[T], Awaitable[None]] | None = None) -> T:
    """What a connect makes. When we are cancelled it goes on to its end, and what it made is ended by `end`.

    Clients lose sockets and tasks when their connect is cut off between two of its steps: what is half made is in none
    of their hands yet. Only a connect that does not end within a second of the cancellation is cancelled.

    Raises:
        ConnectionError: the client cancelled its own connect, which must not look as if we were cancelled.
    """
    task = asyncio.get_running_loop().create_task(connect, name="sink-connecting")
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        try:
            if not (await asyncio.wait((task,), timeout=GRACE))[0]:
                task.cancel()
                await asyncio.wait((task,), timeout=GRACE)
        finally:
            task.cancel()  # does nothing to one that is done
        if end is not None and task.done() and not task.cancelled() and task.exception() is None:
            with contextlib.suppress(Exception):  # whatever a good-bye meets, nobody uses the connection
                await end(task.result())
        raise
    if task.cancelled():
        raise ConnectionError("the client gave up its own connect")
    return task.result()


class SharedConnection(Generic[T]):
    """Holds one connection at most.

    The exporter decides when to try again; clients that reconnect by themselves would send what was given up, or be
    asleep when the server is back.

    Example:
        >>> async def make() -> object:
        ...     return object()
        >>> async def end(connection: object) -> None: ...
        >>> async def main() -> bool:
        ...     shared = SharedConnection(make, end)
        ...     first = await shared.get()
        ...     same = await shared.get() is first
        ...     shared.drop(first)
        ...     other = await shared.get() is not first
        ...     await shared.close()
        ...     return same and other
        >>> asyncio.run(main())
        True
    """

    def __init__(
        self, make: Callable[[], Coroutine[Any, Any, T]], end: Callable[[T], Awaitable[None]], *, grace: float = 1.0
    ) -> None:
        self._make = make
        self._end = end
        self._grace = grace
        self._current: T | None = None
        self._turn = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    async def get(self) -> T:
        """The connection; the first who asks makes it, the others wait for it."""
        if self._current is not None:
            return self._current
        async with self._turn:
            if self._current is None:
                self._current = await uncut(self._make(), self._end)
            return self._current

    def drop(self, broken: T) -> None:
        """Forget a connection, unless it was replaced already; it is closed in the background."""
        if broken is self._current:
            self._current = None
            task = asyncio.get_running_loop().create_task(self._finish(broken), name="sink-connection-closing")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Close the connection, and wait for those that are being closed."""
        if self._current is not None:
            self.drop(self._current)
        while self._ending:
            await asyncio.wait(self._ending)

    async def _finish(self, connection: T) -> None:
        # Whatever a client has to say about the end of a broken connection, it is the end.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._grace):
                await self._end(connection)
