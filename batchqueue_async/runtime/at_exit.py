"""The end of a program that did not shut its queues down: those on background loops are drained all the same.

It happens in two steps, which together have the queues' `drain_timeout`:

1. As the main thread ends, everything that was accepted is handled. A thread of this module waits for that moment: it
   is no daemon, so the interpreter waits for it, and while it runs handlers can still start threads. By then the pools
   of `concurrent.futures` take no more work; that is why background loops have threads of their own for blocking calls.
2. After the program's own `atexit` functions, which may still use the queues, these are shut down.

Processes of `multiprocessing` end without `atexit`: there the first step shuts the queues down.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from batchqueue_async._support import forks, log
from batchqueue_async._support.locked import locked
from batchqueue_async._support.thread_flag import ThreadFlag
from batchqueue_async.runtime.drain_order import DrainOrder
from batchqueue_async.runtime.ending import LOOP_GRACE, end_in_thread
from batchqueue_async.runtime.loop_calls import GLANCE, submit
from batchqueue_async.runtime.scheduler import stop_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchqueue_async.queue.batch_queue import BatchQueue
    from batchqueue_async.runtime.loop_calls import LoopCall

Feeds = dict["BatchQueue[Any]", list["BatchQueue[Any]"]]


class Drained(Protocol):
    """What has queues on background loops: a manager."""

    def queues(self) -> list[BatchQueue[Any]]:
        """All its queues."""
        ...

    def feeds(self, queues: Iterable[BatchQueue[Any]]) -> Feeds:
        """Which of the queues each one's handlers produce into."""
        ...


class ExitDrain:
    """What is to be drained at the exit of this process."""

    def __init__(self) -> None:
        self._open: set[Drained] = set()
        self._reset()
        forks.watch(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._waiter: threading.Thread | None = None
        self._handled_before: dict[BatchQueue[Any], int] = {}
        self._spent = 0.0
        """Seconds that the first step took: the second has what they leave."""

    def after_fork(self) -> None:
        """In a forked child there is neither the thread nor any queue of the child's own."""
        self._open.clear()
        self._reset()

    @property
    def waiting(self) -> bool:
        """Whether the thread for the exit runs."""
        return self._waiter is not None

    @locked
    def add(self, manager: Drained) -> None:
        """Drain the manager's queues on background loops at the exit, unless `discard` is called before."""
        self._open.add(manager)
        if self._waiter is None:
            waiter = threading.Thread(target=self._wait_for_main, name="batchqueue-exit", daemon=False)
            # From Python 3.12 on no thread starts once the interpreter shuts down: the second step has to do.
            with contextlib.suppress(RuntimeError):
                waiter.start()
                self._waiter = waiter

    @locked
    def discard(self, manager: Drained) -> None:
        """Nothing is left to do for a manager."""
        self._open.discard(manager)

    @locked
    def _is_done(self) -> bool:
        """Whether the thread for the exit may end: then it is not there any more."""
        if not self._open:
            self._waiter = None
        return self._waiter is None

    # -- the first step: as the main thread ends -----------------------------------------------------------------

    def _wait_for_main(self) -> None:
        main = threading.main_thread()
        while main.is_alive():
            main.join(GLANCE)
            if self._is_done():
                return
        begun = time.monotonic()
        queues, feeds = self._queues()
        self._handled_before = {queue: queue.counters.handled for queue in queues}
        _flush(queues, feeds)
        self._spent = time.monotonic() - begun
        if _is_child_of_multiprocessing():
            for thread in threading.enumerate():
                if not thread.daemon and thread not in {main, threading.current_thread()}:
                    thread.join()  # the interpreter would wait for it, too, and it may still produce
            self.shut_down()

    # -- the second step: after the program's own exit functions ---------------------------------------------------

    def shut_down(self) -> None:
        """Shut down what is on background loops, which in daemon threads run to the very end."""
        queues, feeds = self._queues()
        before = {queue: self._handled_before.get(queue, queue.counters.handled) for queue in queues}
        ending = end_in_thread(queues, feeds, None, spent=self._spent)
        for queue, report in ending.reports.items():
            handled = report.handled - before[queue]
            event = log.warning if handled or report.undelivered else log.debug
            event(
                "queue_drained_at_exit",
                queue=queue.name,
                handled=handled,
                undelivered=len(report.undelivered),
                way_out="close the bridge, or await shutdown_all, before the program ends",
            )
        self._open.clear()
        stop_all(LOOP_GRACE)

    def _queues(self) -> tuple[list[BatchQueue[Any]], Feeds]:
        """The queues that can still be drained, and which of them feed which."""
        found: list[BatchQueue[Any]] = []
        feeds: Feeds = {}
        for manager in list(self._open):
            queues = [queue for queue in manager.queues() if queue.loop.is_running() and not queue.ended]
            found += queues
            feeds.update(manager.feeds(queues))
        return found, feeds


def _flush(queues: list[BatchQueue[Any]], feeds: Feeds) -> None:
    """Have everything handled that was accepted, upstream first, each queue within its `drain_timeout`."""
    begun = time.monotonic()
    order = DrainOrder(queues, feeds)
    calls: dict[LoopCall[None], BatchQueue[Any]] = {}
    changed = ThreadFlag()
    while True:
        for queue in order.take_ready():
            left = begun + queue.config.drain_timeout - time.monotonic()
            try:
                call = submit(queue.loop, partial(queue.flush, max(0.0, left)))
                calls[call] = queue
                call.settled.when_set(changed.set)
            except RuntimeError:  # the loop has ended
                order.done(queue)
        if not calls:
            return
        soonest = begun + min(queue.config.drain_timeout for queue in calls.values()) - time.monotonic()
        changed.wait(max(0.0, min(GLANCE, soonest)))
        changed.clear()
        for call, queue in list(calls.items()):
            if call.done() or call.loop.is_closed() or time.monotonic() >= begun + queue.config.drain_timeout:
                # What came of it, the second step finds out.
                call.cancel()
                del calls[call]
                order.done(queue)


def _is_child_of_multiprocessing() -> bool:
    module: Any = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


exit_drain = ExitDrain()
"""The one of this process."""

atexit.register(exit_drain.shut_down)
