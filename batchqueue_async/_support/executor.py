"""Threads for blocking calls that take work to the very end of a program.

The pools of `concurrent.futures` refuse new work as soon as the main thread has ended, before any `atexit` function
runs and before the last batches are handled: `asyncio.to_thread` and `loop.getaddrinfo` then fail in handlers. This one
goes on until the process is gone. Its threads are daemons, so that none keeps a program from ending.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

MOST_THREADS = 32


class LastingExecutor(ThreadPoolExecutor):
    """A thread pool that works until its own `shutdown`, also while the interpreter ends.

    It is a `ThreadPoolExecutor` because an event loop takes nothing else as its default executor; of that it uses the
    interface alone. From Python 3.12 on no thread starts any more at the exit of a program: `prepare` makes sure that
    there is one by then.

    Args:
        name: what the names of its threads begin with.
        most: how many threads at the most; as many as `ThreadPoolExecutor` would have when None.

    Example:
        >>> executor = LastingExecutor("example")
        >>> executor.submit(sum, [1, 2, 3]).result(timeout=5)
        6
        >>> executor.shutdown()
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        super().__init__(max_workers=most or min(MOST_THREADS, (os.cpu_count() or 1) + 4))
        self._name = name
        self._most = most or min(MOST_THREADS, (os.cpu_count() or 1) + 4)
        # The condition guards all that follows.
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._workers: list[threading.Thread] = []
        self._idle = 0
        self._ended = False

    def prepare(self) -> None:
        """Start a thread if there is none yet, so that there is one at the exit of the program."""
        with self._changed:
            if not self._workers and not self._ended:
                self._start_thread()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a function in one of the threads.

        Raises:
            RuntimeError: after `shutdown`, or if no thread can be started at all.
        """
        future: Future[R] = Future()
        with self._changed:
            if self._ended:
                raise RuntimeError(f"the threads {self._name!r} were shut down and take no more work")
            if self._idle <= len(self._jobs) and len(self._workers) < self._most:
                # At the exit of a program none may start: then those that there are take the work in turn.
                with contextlib.suppress(RuntimeError) if self._workers else contextlib.nullcontext():
                    self._start_thread()
            self._jobs.append((future, lambda: fn(*args, **kwargs)))
            self._changed.notify()
        return future

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._workers)}", daemon=True)
        thread.start()
        self._workers.append(thread)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not (self._jobs or self._ended):
                    self._changed.wait()
                self._idle -= 1
                if not self._jobs:
                    return
                future, call = self._jobs.popleft()
            _run(future, call)
            del future, call  # an idle thread keeps nothing of the last call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as the base's
        """Take no more work; what was submitted is done, or cancelled with `cancel_futures`."""
        with self._changed:
            self._ended = True
            if cancel_futures:
                while self._jobs:
                    self._jobs.popleft()[0].cancel()
            self._changed.notify_all()
            workers = list(self._workers)
        for thread in workers if wait else ():
            thread.join()


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the result gets it, no matter what it is
        future.set_exception(error)
    else:
        future.set_result(result)
