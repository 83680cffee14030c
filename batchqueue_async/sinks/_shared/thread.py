"""A thread of a sink's own, for clients that block and belong to one thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class SinkThread:
    """Runs blocking calls one after the other in one thread, in the order in which they were made.

    A caller that is cancelled leaves its call running: what follows waits for it, so that calls never overlap.

    Example:
        >>> async def main() -> int:
        ...     thread = SinkThread("example")
        ...     try:
        ...         return await thread.run(sum, [1, 2])
        ...     finally:
        ...         await thread.close()
        >>> asyncio.run(main())
        3
    """

    def __init__(self, name: str) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"batchqueue-{name}")
        self.closed = False

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in the thread, and return what it returns."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def start(self, function: Callable[[], object]) -> None:
        """Run a function in the thread after what it does now, and wait for nothing."""
        self._executor.submit(function)

    async def close(self) -> None:
        """End the thread when the calls before this one are done."""
        self.closed = True
        await self.run(lambda: None)
        self._executor.shutdown(wait=False)
