"""Running a program to its end: a fast loop, and signals that end it by draining instead of by losing the tail."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from asyncio import FIRST_COMPLETED
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async._support import log
from batchqueue_async._support.checks import check_timeout
from batchqueue_async.runtime.manager import BatchQueueManager, default_manager
from batchqueue_async.runtime.scheduler import new_event_loop
from batchqueue_async.runtime.service_manager import ServiceManager

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

R = TypeVar("R")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGUP = getattr(signal, "SIGHUP", None)
"""Ends a program like the others, unless it handles it itself or, as under `nohup`, ignores it."""


def run(
    main: Callable[[BatchQueueManager], Coroutine[Any, Any, R]],
    *,
    manager: BatchQueueManager | None = None,
    drain_timeout: float | None = None,
) -> R | None:
    """Run `main(manager)` on a fast event loop, and drain the manager's queues however it ends.

    SIGINT and SIGTERM cancel `main`; its queues are then shut down within their `drain_timeout` (or the one given),
    and `run` returns None. A second signal ends the drain at once: what is left is in the log by its number. The
    program's own handlers of these signals are back when `run` returns. SIGHUP, which a closed terminal sends, does as
    SIGTERM, unless the program has a handler of its own for it or ignores it, as under `nohup`.

    Under systemd (`Type=notify`) it reports READY when `main` first waits for something, STOPPING when the drain
    begins, and feeds the watchdog from the loop: one that is blocked for `WatchdogSec` is ended and started anew.

    Example:
        >>> import batchqueue_async as bq
        >>> async def main(manager: bq.BatchQueueManager) -> str:
        ...     async def handle(batch: list[int]) -> None: ...
        ...     await manager.create("numbers", bq.QueueConfig(consumer=handle)).produce(1)
        ...     return "done"
        >>> bq.run(main)
        'done'
    """
    check_timeout("run", drain_timeout, name="drain_timeout")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_supervise(main, manager or default_manager(), drain_timeout))


class _Signals:
    """SIGINT, SIGTERM and SIGHUP while a program runs: the first ends it, a second ends its drain.

    Attributes:
        seen: whether one has come.
        hurry: set by a second one.
    """

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end
        self.seen = False
        self.hurry = asyncio.Event()

    @contextlib.contextmanager
    def handled(self) -> Generator[None]:
        """Take the signals within the block, and leave them as they were after it."""
        loop = asyncio.get_running_loop()
        # Only the main thread may handle signals; elsewhere the program's own thread ends `main`.
        if threading.current_thread() is not threading.main_thread() or not hasattr(loop, "add_signal_handler"):
            yield
            return
        before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in SIGNALS}
        if HANGUP is not None and signal.getsignal(HANGUP) is signal.SIG_DFL:
            before[HANGUP] = signal.SIG_DFL
        for number in before:
            loop.add_signal_handler(number, self._take, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                if handler is not None:  # None: not set by Python
                    signal.signal(number, handler)

    def _take(self, number: int) -> None:
        log.info("signal_received", signal=signal.Signals(number).name)
        if self.seen:
            self.hurry.set()
        self.seen = True
        self._end()


async def _supervise(
    main: Callable[[BatchQueueManager], Coroutine[Any, Any, R]], manager: BatchQueueManager, drain_timeout: float | None
) -> R | None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main(manager), name="main")
    signals = _Signals(task.cancel)
    systemd = ServiceManager()
    with signals.handled(), systemd.fed(loop):
        loop.call_soon(_report_ready, task, systemd)  # the task's first step comes before
        try:
            return await task
        except asyncio.CancelledError:
            if not signals.seen:
                raise
            return None
        finally:
            systemd.stopping()
            await _drain(manager, drain_timeout, signals.hurry)


def _report_ready(task: asyncio.Task[Any], systemd: ServiceManager) -> None:
    if not task.done():  # what has failed at once never was ready
        systemd.ready()


async def _drain(manager: BatchQueueManager, timeout: float | None, hurry: asyncio.Event) -> None:
    """Shut the manager's queues down; whatever comes in between, each of them makes its report.

    A second signal cuts the drain short. So does a cancellation, of this or of all tasks: it takes effect when
    everything is accounted for.
    """
    loop = asyncio.get_running_loop()
    cancelled: asyncio.CancelledError | None = None
    drains: list[asyncio.Task[Any]] = []
    while not any(drain.done() and not drain.cancelled() for drain in drains):
        drains.append(loop.create_task(manager.shutdown_all(0.0 if drains else timeout), name="drain"))
        second = loop.create_task(hurry.wait(), name="second-signal")
        try:
            await asyncio.wait((drains[-1],) if hurry.is_set() else (drains[-1], second), return_when=FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
            hurry.set()
        finally:
            second.cancel()
    for outcome in await asyncio.gather(*drains, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    if cancelled is not None:
        raise cancelled
