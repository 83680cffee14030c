"""Running a program to its end: a fast loop, and signals that end it by draining instead of by losing the tail."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async._support import log
from batchqueue_async.runtime.manager import BatchQueueManager, default_manager
from batchqueue_async.runtime.scheduler import new_event_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

R = TypeVar("R")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(
    main: Callable[[BatchQueueManager], Coroutine[Any, Any, R]],
    *,
    manager: BatchQueueManager | None = None,
    drain_timeout: float | None = None,
) -> R | None:
    """Run `main(manager)` on a fast event loop, and drain the manager's queues however it ends.

    SIGINT and SIGTERM cancel `main`; its queues are then shut down within their `drain_timeout` (or the one given),
    and `run` returns None. A second signal ends the drain at once: what is left is in the log by its number.

    Example:
        >>> import batchqueue_async as bq
        >>> async def main(manager: bq.BatchQueueManager) -> str:
        ...     async def handle(batch: list[int]) -> None: ...
        ...     await manager.create("numbers", bq.QueueConfig(consumer=handle)).produce(1)
        ...     return "done"
        >>> bq.run(main)
        'done'
    """
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_supervise(main, manager or default_manager(), drain_timeout))


async def _supervise(
    main: Callable[[BatchQueueManager], Coroutine[Any, Any, R]], manager: BatchQueueManager, drain_timeout: float | None
) -> R | None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main(manager), name="main")
    signalled = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal(number: int) -> None:
        log.info("signal_received", signal=signal.Signals(number).name)
        if signalled.is_set():
            hurry.set()
        signalled.set()
        task.cancel()

    # Only the main thread may handle signals; elsewhere the program's own thread ends `main`.
    watching = threading.current_thread() is threading.main_thread() and hasattr(loop, "add_signal_handler")
    for number in SIGNALS if watching else ():
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not signalled.is_set():
            raise
        return None
    finally:
        drain = loop.create_task(manager.shutdown_all(drain_timeout))
        second = loop.create_task(hurry.wait())
        await asyncio.wait((drain, second), return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        if not drain.done():
            await manager.shutdown_all(0.0)
        await drain
        for number in SIGNALS if watching else ():
            loop.remove_signal_handler(number)
