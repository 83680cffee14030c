"""Test tools: an event loop in virtual time, handlers that record what they were given, a proxy that breaks lines.

On a `VirtualTimeLoop` nobody sleeps: when no callback is ready the clock jumps to the next timer, so that an hour of
backoff passes in milliseconds, `loop.time()` is exact, and a test that would hang fails with the list of what waits.
A seed shuffles which runnable task goes next: one test tries many interleavings, and a failing one replays.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import random
import selectors
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchqueue_async.errors import BatchQueueError
from batchqueue_async.fault_proxy import FaultCounts, FaultProxy
from batchqueue_async.intake.fake_broker import FakeBroker
from batchqueue_async.sinks.conformance import SinkChecks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Sequence
    from concurrent.futures import Executor
    from contextvars import Context
    from typing import TypeVarTuple

    from batchqueue_async.sinks.base import Sink

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")

__all__ = [
    "FakeBroker",
    "FaultCounts",
    "FaultProxy",
    "IdleRecordingHandler",
    "RecordingErrorHandler",
    "RecordingHandler",
    "VirtualTimeError",
    "VirtualTimeLoop",
    "advance",
    "check_sink",
    "run_virtual",
    "settle",
]


class VirtualTimeError(BatchQueueError, RuntimeError):
    """A test in virtual time can't go on: it waits for ever, never settles or is out of time; lists the tasks."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where an event loop would wait for its next timer, asks the loop to jump there instead."""

    loop: VirtualTimeLoop
    jump: Callable[[], bool]
    stalled: Callable[[], VirtualTimeError]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and (timeout is None or timeout > 0) and not self.jump():
            events = super().select(self.loop.stall_timeout)
            if not events:
                raise self.stalled()
        return events


_QUIET_ROUNDS = 2
"""Rounds in which nothing was ready: with the last of them the loop has asked for I/O in between, too."""


class _OrderedTimer(asyncio.TimerHandle):
    """A timer that runs in the order of scheduling among those of one time, which asyncio's heap does not promise."""

    __slots__ = ("number",)
    number: int
    _scheduled: bool

    def enter(self, number: int) -> None:
        """Be among the loop's timers from now on, as asyncio's own: it is counted if it is cancelled."""
        self.number = number
        self._scheduled = True

    def __lt__(self, other: Any) -> bool:
        return (self.when(), self.number) < (other.when(), other.number)


class _ShuffledReady(deque[Any]):
    """A loop's ready queue that keeps each callback's place, and gives a task step's place to any ready task step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)  # noqa: S311 - it chooses an order, not a secret
        self._steps: list[asyncio.Handle] = []

    def append(self, handle: asyncio.Handle, /) -> None:
        callback: Any = getattr(handle, "_callback", None)
        task = getattr(callback, "__self__", None)
        step = isinstance(task, asyncio.Task) and not hasattr(asyncio.Task, getattr(callback, "__name__", ""))
        if step:  # a method that tasks do not show: task.cancel and the like are callbacks as any other
            self._steps.append(handle)  # first, so that a place never stands in the queue without a step
        super().append(None if step else handle)

    def popleft(self) -> asyncio.Handle:
        handle = super().popleft()
        return self._steps.pop(self._random.randrange(len(self._steps))) if handle is None else handle


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is ready.

    I/O and `call_soon_threadsafe` work as ever. A call through `run_in_executor` or `asyncio.to_thread` holds the clock
    until it returns; for other threads (anyio's, your own) and for processes say so with `hold_clock`. With nothing
    ready and no timer the loop waits `stall_timeout` real seconds for I/O or a thread, then raises `VirtualTimeError`.

    `seed` shuffles the order in which ready tasks run; other callbacks keep their order. `start` is the clock's first
    reading. After `time_limit` virtual seconds the loop raises `VirtualTimeError`, so a test that polls for ever ends.

    Example:
        >>> with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start=100.0)) as runner:
        ...     runner.run(asyncio.sleep(0.25))
        ...     runner.get_loop().time()
        100.25
    """

    _ready: deque[Any]
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float

    def __init__(
        self, *, seed: int | None = None, start: float = 0.0, stall_timeout: float = 10.0, time_limit: float = math.inf
    ) -> None:
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.loop, selector.jump, selector.stalled = self, self._jump, self._stalled
        self.seed = seed
        self.stall_timeout = stall_timeout
        self.time_limit = time_limit
        self._holds = self._settling = 0
        self._timer_numbers = itertools.count()
        self._now = start
        self._clock_resolution = math.ulp(start)  # see _jump
        self._limit = start + time_limit
        if seed is not None:
            self._ready = _ShuffledReady(seed)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    @contextlib.contextmanager
    def hold_clock(self) -> Generator[None]:
        """Keep the clock from jumping while real threads or processes are at work: `with loop.hold_clock(): ...`."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback; those of one time run in the order in which they were scheduled."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = _OrderedTimer(when, callback, args, self, context)
        timer.enter(next(self._timer_numbers))
        heapq.heappush(self._scheduled, timer)
        return timer

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run `func` in a thread, and hold the clock until it returns."""
        future = super().run_in_executor(executor, func, *args)
        hold = contextlib.ExitStack()
        hold.enter_context(self.hold_clock())
        future.add_done_callback(lambda _: hold.close())
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        """Wait for the executor's threads in real time: recent Pythons set a timeout, which must not jump."""
        with self.hold_clock():
            await super().shutdown_default_executor(*args)

    def _jump(self) -> bool:
        when = self._scheduled[0].when() if self._scheduled else math.inf
        if self._holds or when == math.inf:  # anyio.sleep_forever has a timer, at infinity
            return False
        if when > self._limit:
            self._limit = self._now + self.time_limit  # as much again for the clean-up
            raise self._error(f"the virtual time limit of {self.time_limit} s is over at {self._now} s")
        self._now = when
        # asyncio runs timers that are due before now + resolution: with one unit in the last place that is exactly
        # those with when <= now, none of them early and, however it is rounded, none left behind.
        self._clock_resolution = math.ulp(when)
        return True

    def _stalled(self) -> VirtualTimeError:
        why = f"no timer can fire (holds on the clock: {self._holds}), no I/O or thread came"
        return self._error(f"nothing is ready, {why} in {self.stall_timeout} real seconds")

    async def settle(self, rounds: int) -> None:
        """Let everything that is ready run, until nothing is; see `settle` of this module."""
        quiet = 0
        self._settling += 1
        try:
            for _ in range(rounds):
                await asyncio.sleep(0)
                # The other callers of settle() are always ready.
                quiet = quiet + 1 if len(self._ready) < self._settling else 0
                if quiet == _QUIET_ROUNDS:
                    return
        finally:
            self._settling -= 1
        raise self._error(f"not settled after {rounds} rounds: something is always ready, such as a loop of sleep(0)")

    def _error(self, reason: str) -> VirtualTimeError:
        tasks = sorted(map(_whereabouts, asyncio.all_tasks(self)))
        return VirtualTimeError("\n  ".join([f"{reason}; pending tasks ({len(tasks)}):", *tasks[:50]]))


def _whereabouts(task: asyncio.Task[Any]) -> str:
    steps: list[str] = []
    awaited: Any = task.get_coro()
    while frame := getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None):
        steps.append(f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return f"{task.get_name()}: {' > '.join(steps)}"


def run_virtual(
    main: Callable[[], Coroutine[Any, Any, T]] | Coroutine[Any, Any, T],
    *,
    seed: int | None = None,
    timeout: float | None = 3600.0,
    stall_timeout: float = 10.0,
) -> T:
    """Run a coroutine on a fresh `VirtualTimeLoop`, as `asyncio.run` does, and return its result.

    After `timeout` virtual seconds (None sets no limit) it raises `VirtualTimeError`. `seed` and `stall_timeout` are
    those of `VirtualTimeLoop`; an error that leaves carries the seed as a note.

    Example:
        >>> run_virtual(lambda: asyncio.sleep(3600, "an hour later"))
        'an hour later'
    """
    factory = partial(
        VirtualTimeLoop, seed=seed, stall_timeout=stall_timeout, time_limit=math.inf if timeout is None else timeout
    )
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main() if callable(main) else main)
    except BaseException as error:
        if seed is not None:
            error.add_note(f"in the task order of seed={seed}; run_virtual(..., seed={seed}) replays it")
        raise


async def settle(rounds: int = 10_000) -> None:
    """Let everything that is ready run, until nothing is, without letting time pass.

    On a `VirtualTimeLoop` that is exact, and a program that is still busy after `rounds` turns of the loop gets a
    `VirtualTimeError`. Any other loop, which does not show when it is idle, is given at most 50 turns.

    Example:
        >>> async def main() -> bool:
        ...     task = asyncio.create_task(asyncio.sleep(0))
        ...     await settle()
        ...     return task.done()
        >>> run_virtual(main)
        True
    """
    if isinstance(loop := asyncio.get_running_loop(), VirtualTimeLoop):
        await loop.settle(rounds)
        return
    for _ in range(min(rounds, 50)):
        await asyncio.sleep(0)


async def advance(seconds: float) -> None:
    """Let `seconds` of virtual time pass; everything that falls due until then, that instant included, has run.

    Example:
        >>> async def main() -> bool:
        ...     task = asyncio.create_task(asyncio.sleep(1))
        ...     await advance(1)
        ...     return task.done()
        >>> run_virtual(main)
        True
    """
    if not isinstance(loop := asyncio.get_running_loop(), VirtualTimeLoop):
        raise VirtualTimeError(f"advance() was called on {loop!r}, whose time is real; run the test with run_virtual()")
    await asyncio.sleep(seconds)
    await settle()


class _Bell:
    """Wakes those who wait, each on its own loop: a handler may run on a scheduler's loop, and its test on another."""

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        waiter = (asyncio.get_running_loop(), rung := asyncio.Event())
        self._waiting.append(waiter)  # before the condition is looked at: another thread may ring at any time
        try:
            while not condition():
                await rung.wait()
                rung.clear()
        finally:
            self._waiting.remove(waiter)

    def ring(self) -> None:
        for loop, rung in list(self._waiting):
            loop.call_soon_threadsafe(rung.set)


class RecordingHandler(Generic[T]):
    """A handler that records each call, and can be slow, fail or be held; for one loop at a time.

    Attributes:
        batches, items, times: what each call was given, all of it in one list, and the loop's time at each call.
        handled: the items of the calls that ended well.
        calls, idle_calls, cancelled: how many calls began, how many of `on_idle`, and how many were cancelled.
        active, max_active: how many calls run now, and the most that ran at once.
        delay: seconds that a call takes, or a function of the batch; may be set at any time.
        fail: the exception that a call raises at its end, or a function of the batch; may be set at any time.

    Example:
        >>> handler = RecordingHandler[int](delay=0.5)
        >>> run_virtual(lambda: handler.consume([1, 2]))
        >>> handler.batches, handler.times
        ([[1, 2]], [0.0])
    """

    def __init__(
        self,
        *,
        delay: float | Callable[[Sequence[T]], float] = 0.0,
        fail: BaseException | Callable[[Sequence[T]], BaseException | None] | None = None,
    ) -> None:
        self.delay: float | Callable[[Sequence[T]], float] = delay
        self.fail: BaseException | Callable[[Sequence[T]], BaseException | None] | None = fail
        self.batches: list[list[T]] = []
        self.items: list[T] = []
        self.handled: list[T] = []
        self.times: list[float] = []
        self.calls = self.idle_calls = self.active = self.max_active = self.cancelled = 0
        self._held = False
        self._bell = _Bell()

    async def consume(self, batch: Sequence[T]) -> None:
        """Record the batch; then wait while held, take `delay` seconds, and raise what `fail` says."""
        items = list(batch)
        with self._running():
            self.batches.append(items)
            self.times.append(asyncio.get_running_loop().time())
            self.items.extend(items)
            self.calls += 1
            self._bell.ring()
            await self._bell.until(lambda: not self._held)
            delay = self.delay(items) if callable(self.delay) else self.delay
            if delay > 0:
                await asyncio.sleep(delay)
            error = self.fail(items) if callable(self.fail) else self.fail
            if error is not None:
                raise error
            self.handled.extend(items)

    def hold(self) -> None:
        """Let every call wait from now on, until `release`."""
        self._held = True

    def release(self) -> None:
        """Let the held calls go on, and those to come pass."""
        self._held = False
        self._bell.ring()

    async def wait_for(self, n_items: int, *, timeout: float | None = None) -> None:
        """Wait until `n_items` items have arrived in all; `TimeoutError` after `timeout` seconds says how many did."""
        try:
            async with asyncio.timeout(timeout):
                await self._bell.until(lambda: len(self.items) >= n_items)
        except TimeoutError:
            raise TimeoutError(f"{len(self.items)} of {n_items} items arrived within {timeout} s") from None

    @contextlib.contextmanager
    def _running(self) -> Generator[None]:
        self.active += 1
        self.max_active = max(self.max_active, self.active)
        try:
            yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1


class IdleRecordingHandler(RecordingHandler[T]):
    """A `RecordingHandler` that also has `on_idle`; a call of it during a running `consume` shows in `max_active`.

    Example:
        >>> handler = IdleRecordingHandler[int]()
        >>> run_virtual(handler.on_idle)
        >>> handler.idle_calls
        1
    """

    async def on_idle(self) -> None:
        """Count the call."""
        with self._running():
            self.idle_calls += 1


class RecordingErrorHandler:
    """An `on_error` that records the items and the error of each call in `failures`.

    Example:
        >>> on_error = RecordingErrorHandler()
        >>> on_error(["a", "b"], ValueError("no"))
        >>> on_error.failures
        [(['a', 'b'], ValueError('no'))]
    """

    def __init__(self) -> None:
        self.failures: list[tuple[list[Any], BaseException]] = []

    def __call__(self, batch: Sequence[Any], error: BaseException) -> None:
        """Record a failure."""
        self.failures.append((list(batch), error))


async def check_sink(
    make: Callable[[], Sink],
    *,
    record: Callable[[int], Any] = lambda number: {"id": number},
    bad: Callable[[int], Any] | None = None,
    read: Callable[[], Awaitable[Sequence[Any]]] | None = None,
    away: Callable[[], Sink] | None = None,
    rules: Collection[str] | None = None,
    timeout: float = 30.0,
) -> None:
    """Check that a sink keeps to what `sinks.base` asks of one, against a real destination.

    The rules, and what each checks:

    - `shape`: its methods are there and async, `concurrent` and `needs` are what they should be
    - `life`: `close` before `open` and twice, `check`, and another `open` after `close`
    - `sends`: each record has arrived when `send` returns; the batch stays as it was; what `send` returns
    - `records`: a bad record is refused alone and by its place, and its neighbours arrive
    - `prepare`: what `prepare` makes in threads, while sends are under way, arrives
    - `keys`: records with keys arrive, and once where the sink says so
    - `overlap`: sends at once, where it is `concurrent`
    - `transactions`: a batch is in at its commit, once, and what was rolled back never
    - `staging`: what is published is in once, and what was only staged never
    - `cancelling`: a cancelled send ends, and later ones arrive
    - `away`: an outage raises what the exporter repeats

    After each of them no task may be left. A sink that does not say whether it is `concurrent` is warned of.

    Args:
        make: makes a sink for the destination, a new one at each call.
        record: makes a record that the destination takes, a different one for each number.
        bad: makes a record that it refuses; without it that is not looked at.
        read: reads what has arrived, in any form in which each record is one item; without it nothing is counted.
        away: makes the same sink for a destination that is not there; without it that is not looked at.
        rules: the names of the rules to check; None checks all that the sink's methods and these arguments allow.
        timeout: seconds for each rule.

    Raises:
        AssertionError: it names everything that the sink does not keep to.

    Example:
        >>> from batchqueue_async.sinks.memory import MemorySink
        >>> sink = MemorySink()
        >>> async def read() -> list[Any]:
        ...     return sink.records
        >>> asyncio.run(check_sink(lambda: sink, read=read))
    """
    checks = SinkChecks(make, record=record, bad=bad, read=read, away=away, timeout=timeout)
    await checks.run(rules)
    if checks.found:
        raise AssertionError(
            f"{type(make()).__name__} does not keep to what a sink is:\n- " + "\n- ".join(checks.found)
        )
