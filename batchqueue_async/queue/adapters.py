"""Making handlers of functions that are not async: in a worker thread, or in a worker process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import anyio
import anyio.to_process
import anyio.to_thread

from batchqueue_async._support.handlers import Nature, Unfit, function_problem, nature_of
from batchqueue_async._support.wording import short
from batchqueue_async.errors import ConfigError, ConfigFault
from batchqueue_async.queue.deadlock import acting_for, round_here

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractContextManager

    from batchqueue_async.queue.round import Round

T = TypeVar("T")


class InThread(Generic[T]):
    """A handler that runs a function in a worker thread; see `in_thread`."""

    def __init__(self, function: Callable[[list[T]], Any]) -> None:
        self.function = function
        self._limiter: anyio.CapacityLimiter | None = None

    async def consume(self, batch: list[T]) -> Any:
        """Run the function with the batch; the event loop goes on meanwhile."""
        if self._limiter is None:
            # There are as many threads as calls: how many of these run at once is for the queue to bound. Threads that
            # all queues shared could all be taken by calls that wait for one that has none.
            self._limiter = anyio.CapacityLimiter(math.inf)
        call = partial(_call_in_thread, round_here(), self.function, batch)
        with _clock_held():
            return await _to_its_end(anyio.to_thread.run_sync(call, limiter=self._limiter))

    def __repr__(self) -> str:
        return f"in_thread({_name_of(self.function)})"


class InProcess(Generic[T]):
    """A handler that runs a function in a worker process; see `in_process`."""

    def __init__(self, function: Callable[[list[T]], Any]) -> None:
        self.function = function

    async def consume(self, batch: list[T]) -> Any:
        """Run the function with the batch; cancelling the call kills the process that runs it."""
        call = _CallInProcess(self.function)
        with _clock_held():
            return await anyio.to_process.run_sync(
                call, batch, cancellable=True, limiter=cast("Any", _StartedProcess())
            )

    def __repr__(self) -> str:
        return f"in_process({_name_of(self.function)})"


def in_thread(function: Callable[[list[T]], Any]) -> InThread[T]:
    """Make a handler of a synchronous function: it runs in a worker thread, so that it may block.

    A thread can't be interrupted. A call that exceeds `handler_timeout` keeps its turn until the function returns, and
    counts as failed then, though it may have done its work; a shutdown that passes its deadline leaves the thread
    behind, and counts its items in the report's `still_running`.

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
    _check_function("in_thread", function)
    return InThread(function)


def _check_function(call: str, function: object) -> None:
    unfit = function_problem(function, ("batch",), may_be_class=True)
    if unfit is None and nature_of(function) is Nature.ASYNC:
        unfit = Unfit("is async, and nothing would await it", "")
    if unfit is None:
        return
    rule, way_out = unfit
    if "is async" in rule:
        way_out = f"give it to the queue as it is, without {call}, or give {call} a plain function of (batch)"
    faults = [ConfigFault(owner=call, path="function", value=short(function), rule=rule, way_out=way_out)]
    raise ConfigError.of(faults)


def in_process(function: Callable[[list[T]], Any]) -> InProcess[T]:
    """Make a handler of a CPU-bound function: it runs in a worker process, on another core than the event loop.

    Function, items and result travel between the processes by pickle, so the function must be importable by name.
    A call that is cancelled, or exceeds `handler_timeout`, has its process killed.

    Example:
        >>> import math
        >>> in_process(math.fsum)
        in_process(fsum)
    """
    _check_function("in_process", function)
    return InProcess(function)


def _name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", function))


def _call_in_thread(round_: Round[Any] | None, function: Callable[[list[T]], Any], batch: list[T]) -> Any:
    """In the thread: call the function, in the name of the handler call that waits for it."""
    try:
        with contextlib.nullcontext() if round_ is None else acting_for(round_):
            return function(batch)
    except Exception:
        raise
    except BaseException as error:
        raise _exit_of("in_thread", function, error) from error


class _StartedProcess:
    """Stands for anyio's limiter: whoever enters finds a process that has started, and takes it without waiting.

    anyio forgets a process whose start is cancelled: it would live on, with its pipes, until this program ends, and a
    `handler_timeout` that is shorter than the start would leave one behind with each batch. So the start is a call of
    its own, which nothing cancels, and only one at a time: no other call takes the process away before its turn.
    """

    _starting: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]] = (
        weakref.WeakKeyDictionary()
    )

    async def __aenter__(self) -> None:
        self._limiter = anyio.to_process.current_default_process_limiter()
        await self._limiter.acquire_on_behalf_of(self)
        try:
            async with self._starting.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                await _to_its_end(anyio.to_process.run_sync(_nothing, limiter=anyio.CapacityLimiter(1)))
        except BaseException:
            self._limiter.release_on_behalf_of(self)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._limiter.release_on_behalf_of(self)


def _nothing() -> None:
    """What a process does that is only to start."""


class _CallInProcess(Generic[T]):
    """The function as it travels to the process."""

    def __init__(self, function: Callable[[list[T]], Any]) -> None:
        self.function = function

    def __call__(self, batch: list[T]) -> Any:
        try:
            return self.function(batch)
        except Exception:
            raise
        except BaseException as error:
            raise _exit_of("in_process", self.function, error) from error


def _exit_of(adapter: str, function: object, error: BaseException) -> RuntimeError:
    """The failure of a batch whose function wanted to end its thread or process: that is not the program's end."""
    return RuntimeError(f"{adapter}: {_name_of(function)} raised {error!r}, which ends no handler; raise an Exception")


async def _to_its_end(call: Coroutine[Any, Any, Any]) -> Any:
    """Wait for a call that can't be interrupted; a cancellation takes effect when it has returned."""
    task = asyncio.ensure_future(call)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


def _clock_held() -> AbstractContextManager[Any]:
    """On a loop in virtual time: no time passes while a real thread or process works."""
    hold: Any = getattr(asyncio.get_running_loop(), "hold_clock", None)
    return contextlib.nullcontext() if hold is None else hold()
