"""For the tests of the bridge: a handler that threads hold and release, and threads that report back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import batchqueue_async as bq

PATIENCE = 60.0
"""Seconds after which a test gives up; nothing here is expected to take even one."""


class Held:
    """A handler that keeps its first batch, or each, until it is let go; `batches` has what it got."""

    def __init__(self, *, held: bool = True) -> None:
        self.batches: list[list[Any]] = []
        self.entered = threading.Semaphore(0)
        self._held = held
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def consume(self, batch):
        self.batches.append(list(batch))
        loop = asyncio.get_running_loop()
        with self._lock:
            future = loop.create_future()
            if self._held:
                self._waiting.append((loop, future))
            else:
                future.set_result(None)
        self.entered.release()
        await future

    @property
    def items(self):
        return [item for batch in self.batches for item in batch]

    def wait_for_call(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE)

    def hold(self) -> None:
        """Keep every batch from now on."""
        with self._lock:
            self._held = True

    def let_one_go(self) -> None:
        with self._lock:
            loop, future = self._waiting.pop(0)
        loop.call_soon_threadsafe(self._release, future)

    @staticmethod
    def _release(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    def open(self) -> None:
        with self._lock:
            self._held = False
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            loop.call_soon_threadsafe(self._release, future)


class Caller(threading.Thread):
    """A thread that makes one call; `outcome` waits for what came of it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self._call = (function, arguments, options)
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        function, arguments, options = self._call
        try:
            self._result = function(*arguments, **options)
        except BaseException as error:
            self._error = error

    def outcome(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive(), "the call did not return"
        if self._error is not None:
            raise self._error
        return self._result


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread is about to bring about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.0005)


def in_line(queue: bq.SyncQueue[Any]) -> int:
    """How many producers of other threads and loops wait for room."""
    return queue._inbox.waiting()


def fill(queue: bq.SyncQueue[Any], held: Held, first: Any = "first") -> None:
    """Let the handler hold one item, so that from now on the buffer is all the room there is."""
    assert queue.produce(first, timeout=PATIENCE)
    held.wait_for_call()


def assert_adds_up(stats: bq.QueueStats) -> None:
    assert stats.attempted == stats.accepted + stats.refused + stats.dropped_before
    outcomes = stats.handled + stats.failed + stats.unhandled + stats.dropped_after + stats.undelivered
    assert stats.accepted == outcomes + stats.in_flight + stats.used


def run_script(code: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a program of its own."""
    return _run("-c", code, timeout=timeout)


def run_file(path: Path, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a program of its own from a file, which processes of `multiprocessing` need."""
    return _run(str(path), *arguments, timeout=timeout)


def _run(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    # From Python 3.12 on a fork beside threads is warned of: the very thing that the tests are about.
    command = [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
