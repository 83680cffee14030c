"""Who waits for whom: every wait of a handler call, on every loop and thread, and the circles among them.

A handler call may wait for room in a queue, for items that it delivers, for a flush, or for a turn. What it waits for
comes from drain tasks, each of which goes on only after the handler call that it is in. So the waits form a graph of
drain tasks, and a wait that closes a circle in it could never end: it ends at once, with a `DeadlockError`.

There is one registry for the process, since a circle may lead over several queues, loops and threads. Only a wait of
a handler call enters it, under its lock; producers that nobody waits for, and everything that does not wait, never
do. What a wait needs is asked when somebody looks for a circle, for it changes while it waits: partitions get other
owners, and room comes. Another loop may be in the midst of such a change; a circle that spans loops therefore counts
only when a second look finds the same waits with the same needs. A real one stands still, for all in it are stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import types
import weakref
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async._support import forks
from batchqueue_async._support.home_loop import running_loop
from batchqueue_async._support.locked import guarded, locked
from batchqueue_async.queue.round import current_round

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from typing import Self

    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.round import Round

R = TypeVar("R")
Needs = list[list["DrainTask[Any]"]]
"""Whom a wait is for: it ends when, of every group, one goes on. Empty when it is about to end anyway."""

FIRST_LOOK = 0.05
LAST_LOOK = 1.0
"""Seconds between two looks whether a handler waits for a task that it has started; each is twice the last one."""
MOST_FUTURES = 1_000
"""How many futures are looked at to find out who waits for a task."""
LOOKS = 10
"""How often a circle that spans loops is looked at again before it counts as none: it changes all the time."""


class BlockedWait:
    """One wait of a handler call; made by `WaitRegistry.begin`, and kept by whoever waits.

    Attributes:
        drain: the drain task whose handler call waits.
        loop: the event loop on which the wait has to be ended; None if that may be done on any thread.
        ended: whether it was found in a circle and told to end.
    """

    __slots__ = ("__weakref__", "_end", "_needs", "_registry", "drain", "ended", "loop")

    def __init__(
        self,
        registry: WaitRegistry,
        drain: DrainTask[Any],
        needs: Callable[[], Needs],
        end: Callable[[], None] | None,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._registry = registry
        self.drain = drain
        self._needs = needs
        self._end = end
        self.loop = loop
        self.ended = False

    @property
    def breakable(self) -> bool:
        """Whether the wait can be ended, and has not been."""
        return self._end is not None and not self.ended

    def needs(self) -> Needs:
        """Whom the wait is for now; called on any thread, without any lock of the loop in question."""
        return [] if self.ended else self._needs()

    def break_circles(self) -> None:
        """End one wait of each circle that this one is part of."""
        self._registry.break_circles(self.drain)

    def end(self) -> None:
        """End the wait; its caller gets a `DeadlockError`."""
        if self._end is None or self.ended:
            return
        self.ended = True
        if self.loop is None or self.loop is running_loop():
            self._end()
        else:
            with contextlib.suppress(RuntimeError):  # its loop has ended, and everybody's wait there with it
                self.loop.call_soon_threadsafe(self._end)


class HandlerWaits:
    """What the handler calls of one drain task wait for: its edges in the graph that the registry searches.

    They are kept at the drain task, so that they are gone with it, also when its loop was closed in the midst of them.
    """

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        # A thread that was torn out of its wait, before it could say so, leaves nothing behind that others wait for.
        self._waits: list[weakref.ref[BlockedWait]] = []

    def add(self, wait: BlockedWait) -> None:
        """One wait more, from now on; under the registry's lock."""
        self._waits = [each for each in self._waits if each() is not None]
        self._waits.append(weakref.ref(wait))

    def remove(self, wait: BlockedWait) -> None:
        """A wait is over; under the registry's lock."""
        self._waits = [each for each in self._waits if each() not in {wait, None}]

    def all(self) -> list[BlockedWait]:
        """The waits that have begun and not ended."""
        return [wait for each in self._waits if (wait := each()) is not None]

    def needs(self) -> Needs:
        """Whom the running handler call waits for: it goes on when, of every group, one goes on."""
        return [group for wait in self.all() for group in wait.needs()]


class WaitRegistry:
    """The waits of handler calls, on all loops and threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread may have held the lock, which nobody would release."""
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def blocked(
        self, drain: DrainTask[Any], needs: Callable[[], Needs], end: Callable[[], None] | None = None
    ) -> Generator[BlockedWait]:
        """Within the block a handler call of this drain task waits; if that closes a circle, one wait of it is ended.

        Args:
            drain: the drain task.
            needs: says whom the wait is for; any thread may call it, so it takes no lock.
            end: ends the wait, so that its caller raises `DeadlockError`; None if it can't be ended. It is called on
                the loop that runs here, or, where none runs, on any thread.
        """
        wait = self.begin(drain, needs, end)
        try:
            wait.break_circles()
            yield wait
        finally:
            self.finish(wait)

    def begin(
        self,
        drain: DrainTask[Any],
        needs: Callable[[], Needs],
        end: Callable[[], None] | None = None,
        *,
        any_thread: bool = False,
    ) -> BlockedWait:
        """A handler call of the drain task waits from now on, until `finish`; `any_thread` may call `end`."""
        wait = BlockedWait(self, drain, needs, end, None if any_thread else running_loop())
        guarded(self._lock, drain.waits.add, wait)
        return wait

    def finish(self, wait: BlockedWait) -> None:
        """The wait is over."""
        guarded(self._lock, wait.drain.waits.remove, wait)

    @locked
    def find_cycle(self, drain: DrainTask[Any]) -> list[DrainTask[Any]]:
        """Those who, with the drain task, wait for each other in a circle that nothing can open; empty if none."""
        stuck = _stuck(drain)
        for _ in range(LOOKS):
            if all(other.loop is drain.loop for other in stuck):
                return list(stuck)
            before, stuck = stuck, _stuck(drain)
            if stuck == before:
                return list(stuck)
        return []

    def break_circles(self, drain: DrainTask[Any]) -> None:
        """As long as the drain task's wait closes a circle, end one wait of the circle with a `DeadlockError`."""
        # One may not be enough: who waits for several partitions at once may be in several circles.
        while breakable := self._breakable(drain):
            breakable[0].end()

    @locked
    def _breakable(self, drain: DrainTask[Any]) -> list[BlockedWait]:
        circle = self.find_cycle(drain)
        return [wait for other in circle for wait in other.waits.all() if wait.breakable]


def _stuck(drain: DrainTask[Any]) -> dict[DrainTask[Any], tuple[list[BlockedWait], Needs]]:
    """Every drain task that waits, directly or through others, is first taken for stuck.

    Then those that something can still set free are let go until nothing changes.
    """
    stuck: dict[DrainTask[Any], tuple[list[BlockedWait], Needs]] = {}
    ahead = [drain]
    while ahead:
        other = ahead.pop()
        if other in stuck:
            continue
        groups = other.waits.needs()
        if groups:
            stuck[other] = other.waits.all(), groups
            ahead.extend(member for group in groups for member in group)
    free: list[DrainTask[Any]] | None = None
    while free is None or free:
        free = [
            each
            for each, (_, groups) in stuck.items()
            if all(any(member not in stuck for member in group) for group in groups)
        ]
        for each in free:
            del stuck[each]
    return stuck if drain in stuck else {}


waits = WaitRegistry()
"""The registry of this process."""


# -- who waits here ------------------------------------------------------------------------------------------------

_acting: ContextVar[tuple[Round[Any], object] | None] = ContextVar("batchqueue_acting", default=None)


async def act_for(round_: Round[Any], make: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Run a coroutine in a task of its own, on any loop, for a handler call that waits for it."""
    with acting_for(round_):
        return await make()


@contextlib.contextmanager
def acting_for(round_: Round[Any]) -> Generator[None]:
    """Let this very task (or thread, where no loop runs) act for a handler call, which waits until it is done.

    The task or thread has to run in the handler call's context, or a copy of it.
    """
    token = _acting.set((round_, _whoever_runs()))
    try:
        yield
    finally:
        _acting.reset(token)


def round_here() -> Round[Any] | None:
    """The round in whose running handler call this code runs, or that started it; None if there is none."""
    found = current_round.get()
    return found if found is not None and found.running and not found.abandoned else None


def caller_here() -> DrainTask[Any] | None:
    """The drain task whose handler call can't go on before the code here does, as far as anybody knows.

    That is so in the handler's own task, in what acts for it, and in a task for which the handler waits, directly or
    through others. None where no handler call is under way, and in a task that a handler has only started.
    """
    round_ = round_here()
    if round_ is None:
        return None
    here = _whoever_runs()
    if here is round_.drain.task or _acting.get() == (round_, here):
        return round_.drain
    return round_.drain if is_awaited(here, round_.drain.task) else None


class WaitHere:
    """A wait of the code that runs here, in a `with` block; the registry knows it while a handler call waits for it.

    In a task that a handler has started, and does not wait for yet, it looks again from time to time whether it does.

    Args:
        needs: says whom the wait is for; any thread may call it, so it takes no lock.
        end: ends the wait, so that its caller raises `DeadlockError`.
    """

    __slots__ = ("_blocked", "_delay", "_end", "_needs", "_round", "_task", "_timer")

    def __init__(self, needs: Callable[[], Needs], end: Callable[[], None]) -> None:
        self._needs = needs
        self._end = end
        self._blocked: BlockedWait | None = None
        self._round = round_here()
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._delay = FIRST_LOOK

    def __enter__(self) -> Self:
        if self._round is not None:
            drain = caller_here()
            if drain is not None:
                self._begin(drain)
            elif running_loop() is not None:
                self._task = asyncio.current_task()
                self._look_later()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._blocked is not None:
            waits.finish(self._blocked)
            self._blocked = None

    def break_circles(self) -> None:
        """What the wait needs has changed: end one wait of each circle that this closed."""
        if self._blocked is not None:
            self._blocked.break_circles()

    def _begin(self, drain: DrainTask[Any]) -> None:
        self._blocked = waits.begin(drain, self._needs, self._end)
        self._blocked.break_circles()

    def _look_later(self) -> None:
        if self._task is not None:
            self._timer = self._task.get_loop().call_later(self._delay, self._look)
            self._delay = min(2 * self._delay, LAST_LOOK)

    def _look(self) -> None:
        round_, task = self._round, self._task
        if round_ is None or task is None or not round_.running or round_.abandoned:
            return
        if is_awaited(task, round_.drain.task):
            self._begin(round_.drain)
        else:
            self._look_later()


def is_awaited(task: object, by: asyncio.Task[Any] | None) -> bool:
    """Whether one task waits for another, directly or through tasks, groups, `gather`, `wait`, `shield` and timeouts.

    A future knows what is called when it is done: the step of a task that awaits it, or a function of asyncio's that
    has another future in hand. What goes by other means, such as an event, is not seen.
    """
    seen: set[int] = set()
    ahead: list[Any] = [task]
    while ahead and len(seen) < MOST_FUTURES:
        future = ahead.pop()
        if future is by:
            return True
        if id(future) not in seen:
            seen.add(id(future))
            for callback, _ in getattr(future, "_callbacks", None) or ():
                ahead.extend(_futures_of(callback))
    return False


def _futures_of(callback: Any, depth: int = 3) -> list[Any]:
    """The futures that a callback has in hand."""
    if isinstance(callback, functools.partial):
        held = [callback.func, *callback.args, *callback.keywords.values()]
    elif isinstance(callback, types.FunctionType):
        held = [cell.cell_contents for cell in callback.__closure__ or () if _is_filled(cell)]
    else:
        held = [getattr(callback, "__self__", None)]
    found: list[Any] = []
    for each in held:
        if isinstance(each, asyncio.Future):
            found.append(each)
        elif isinstance(each, functools.partial | types.FunctionType | types.MethodType):
            found += _futures_of(each, depth - 1) if depth else []
        elif not isinstance(each, _NO_GROUPS):
            # A task group knows its parent. Siblings, which it has in a set, say nothing about who waits.
            found += [mine for mine in _attributes_of(each) if isinstance(mine, asyncio.Future)]
    return found


_NO_GROUPS = (type(None), type, types.ModuleType, str, int, float, list, tuple, dict, set, frozenset, deque)


def _attributes_of(thing: object) -> list[Any]:
    # What an object refers to is its attributes, or since Python 3.12 the dictionary that holds them.
    referents: list[Any] = gc.get_referents(thing)
    tables: list[Any] = [each for each in referents if type(each) is dict]
    return [*referents, *(value for table in tables for value in list(table.values()))]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable of the enclosing function that it has not assigned yet
        return False


def _whoever_runs() -> object:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident() if task is None else task
