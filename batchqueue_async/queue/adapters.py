"""Making handlers of functions that are not async: in a worker thread, or in a worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio.to_process
import anyio.to_thread

from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class InThread(Generic[T]):
    """A handler that runs a function in a worker thread; see `in_thread`."""

    def __init__(self, function: Callable[[list[T]], Any]) -> None:
        self.function = function

    async def consume(self, batch: list[T]) -> Any:
        """Run the function with the batch; the event loop goes on meanwhile."""
        return await anyio.to_thread.run_sync(self.function, batch)

    def __repr__(self) -> str:
        return f"in_thread({getattr(self.function, '__qualname__', self.function)})"


class InProcess(Generic[T]):
    """A handler that runs a function in a worker process; see `in_process`."""

    def __init__(self, function: Callable[[list[T]], Any]) -> None:
        self.function = function

    async def consume(self, batch: list[T]) -> Any:
        """Run the function with the batch; cancelling the call kills the process that runs it."""
        return await anyio.to_process.run_sync(self.function, batch, cancellable=True)

    def __repr__(self) -> str:
        return f"in_process({getattr(self.function, '__qualname__', self.function)})"


def in_thread(function: Callable[[list[T]], Any]) -> InThread[T]:
    """Make a handler of a synchronous function: it runs in a worker thread, so that it may block.

    A thread can't be interrupted: `handler_timeout` takes effect when the function returns, and a shutdown that
    passes its deadline leaves the thread behind.

    Example:
        >>> import asyncio, batchqueue_async as bq
        >>> async def main() -> None:
        ...     async with bq.BatchQueueManager() as manager:
        ...         handler = bq.in_thread(lambda batch: print(sum(batch)))
        ...         queue = manager.create("numbers", bq.QueueConfig(consumer=handler))
        ...         await queue.produce_many([1, 2, 3])
        >>> asyncio.run(main())
        6
    """
    if not callable(function):
        raise ConfigError(f"in_thread: function={function!r} is not callable; give a function of one batch")
    return InThread(function)


def in_process(function: Callable[[list[T]], Any]) -> InProcess[T]:
    """Make a handler of a CPU-bound function: it runs in a worker process, beside the event loop's core.

    Function, items and result travel between the processes by pickle, so the function must be importable by name.
    A call that is cancelled, or exceeds `handler_timeout`, has its process killed.

    Example:
        >>> import math
        >>> in_process(math.fsum)
        in_process(fsum)
    """
    if not callable(function):
        raise ConfigError(f"in_process: function={function!r} is not callable; give a function of one batch")
    return InProcess(function)
