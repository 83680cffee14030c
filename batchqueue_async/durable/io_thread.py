"""A thread for blocking calls, whose results arrive on the loop."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class Runner(Protocol):
    """What runs blocking calls for the queue: a thread, or, in tests, the loop itself."""

    def submit(
        self, call: Callable[..., Any], *arguments: Any, done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Run `call`, in order with the others, and give `done` its result or error on the loop."""
        ...

    def stop(self) -> None:
        """Run what was submitted, then end; doesn't wait for that."""
        ...

    def join(self) -> None:
        """Wait until it has ended: for another thread than the loop's."""
        ...


class Worker:
    """One thread, calls in the order in which they were submitted, one wake-up of the loop for each result."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._calls: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Callable[..., None]] | None] = SimpleQueue()
        # The loop of `batchqueue_async.testing` jumps in time when it is idle, which it isn't while a thread works.
        self._hold: Callable[[], AbstractContextManager[None]] | None = getattr(loop, "hold_clock", None)
        # A daemon: what was confirmed is on the disk, so an exit that skips close() must not hang on this thread.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, call: Callable[..., Any], *arguments: Any, done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Run `call` in the thread, and `done(result, error)` on the loop."""
        if self._hold is not None:
            done = _held(self._hold(), done)
        self._calls.put((call, arguments, done))

    def stop(self) -> None:
        """End the thread after the calls that it has."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, arguments, done = entry
            result, error = None, None
            try:
                result = call(*arguments)
            except BaseException as raised:  # noqa: BLE001 - it is not handled here, but carried to the loop whole
                error = raised
            with suppress(RuntimeError):
                # The loop may be closed by now: then nobody is left to tell.
                self._loop.call_soon_threadsafe(done, result, error)
            del entry, result, error


def _held(
    hold: AbstractContextManager[None], done: Callable[[Any, BaseException | None], None]
) -> Callable[[Any, BaseException | None], None]:
    """`done`, with the clock of the loop held until it is called."""
    hold.__enter__()

    def release(result: Any, error: BaseException | None) -> None:
        hold.__exit__(None, None, None)
        done(result, error)

    return release
