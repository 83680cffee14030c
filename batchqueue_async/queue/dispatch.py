"""From a drain task's round to handler calls: who takes which items, one call at a time for each handler.

The grouping is a plain function of the items and the registered types. The shell around each call does the
accounting: whatever a handler does, its items end as handled, failed or, when the call itself was cut off by a
shutdown, undelivered.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from contextlib import nullcontext, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet, WeakValueDictionary

from batchqueue_async._native import (
    NO_CALL,
    HandlerFields,
    TypeTable,
    accelerated,
    call_usual,
    group_usual,
    one_type,
    sort_run,
)
from batchqueue_async._support import log, tracing
from batchqueue_async._support.contexts import has_left, restore_context
from batchqueue_async._support.handlers import call_of, method_of
from batchqueue_async._support.last_error import ErrorKeeper
from batchqueue_async._support.log import describe
from batchqueue_async.config import Again, HandlerOptions
from batchqueue_async.errors import RetryableError, UnhandledTypeError
from batchqueue_async.queue.deadlock import acting_for
from batchqueue_async.queue.limiter import CallLimiter
from batchqueue_async.queue.stats import Histogram

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from contextvars import Context

    from batchqueue_async.config import Handler, HandlerRetry, QueueConfig
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.partition import Partition
    from batchqueue_async.queue.round import Call, Chunk, Round
    from batchqueue_async.queue.stats import Counters, Sizes

T = TypeVar("T")

MANY_CALLS = 64
"""Calls in one round from which on only every `SAMPLED`th round is timed."""
SAMPLED = 8
OVERRUN = 0.1
"""Seconds after which a call that was cancelled, and has not returned, counts as one that could not be ended."""


class HandlerEntry(HandlerFields, Generic[T]):
    """A registered handler, whose turn it is to call it, and what its calls took.

    Attributes:
        timeout: how many seconds a call may take, by its own options or the queue's.
        most: how many items a call may have, by its own options; 0 where these say nothing.
        calls, items: of its calls so far; estimates where rounds had many calls, see `Dispatcher.run`.
        durations: the seconds of its calls, likewise.
        failed: items of its calls that failed.
    """

    __slots__ = ("failed", "handler", "label", "on_idle", "options", "queue")

    def __init__(
        self,
        queue: str,
        label: str,
        handler: Handler[T],
        options: HandlerOptions,
        turns: CallLimiter,
        *,
        timeout: float | None,
    ) -> None:
        self.queue = queue
        self.label = label
        self.turns = turns
        self.calls = self.items = self.failed = 0
        self.durations = Histogram()
        self.replace(handler, options, timeout)

    def replace(self, handler: Handler[T], options: HandlerOptions, timeout: float | None) -> None:
        """Use another handler from the next call on; the turn stays, so the two never run at once."""
        self.handler = handler
        self.options = options
        self.timeout = options.timeout or timeout
        self.most = options.max_batch or 0
        consume: Callable[[list[T]], Awaitable[object]] = call_of(handler)
        self.consume = consume if tracing.active is None else tracing.active.handler(self.queue, self.label, consume)
        self.on_idle: Callable[[], Awaitable[object]] | None = method_of(handler, "on_idle")

    def retire(self) -> None:
        """Call the handler no more; a round that still has items for it looks for another one."""
        self.consume = _retired
        self.on_idle = None


class _RetiredError(Exception):
    """The handler was taken away before its call began."""


_PLAIN = HandlerOptions(weight=0.0)


async def _retired(_: list[Any]) -> None:
    raise _RetiredError


class Dispatcher(Generic[T]):
    """The handlers of one queue, and the calls to them.

    Attributes:
        entries: the handlers by type.
        weight: the sum of their weights.
        lingers: whether one of them has a linger of its own.
    """

    __slots__ = (
        "_closed",
        "_closing",
        "_fallback",
        "_full_errors",
        "_idlers",
        "_lingering",
        "_resolved",
        "_retry",
        "_single",
        "_told",
        "_turns",
        "_unclosed",
        "counters",
        "entries",
        "errors",
        "handler_timeout",
        "limiter",
        "linger",
        "lingers",
        "max_batch",
        "name",
        "on_error",
        "sizes",
        "weight",
    )

    def __init__(
        self,
        name: str,
        config: QueueConfig[T],
        *,
        counters: Counters,
        sizes: Sizes,
        workers: int,
        limiter: CallLimiter | None,
    ) -> None:
        self.name = name
        self.counters = counters
        self.sizes = sizes
        self.max_batch = config.max_batch
        self.handler_timeout = config.handler_timeout
        self.on_error = config.on_error
        self.limiter = limiter
        self.errors = ErrorKeeper()
        self._full_errors = config.log_errors == "full"
        self.entries: dict[type, HandlerEntry[T]] = {}
        self.weight = 0.0
        self.linger = config.linger
        self._retry = config.retry
        self._lingering = 0
        self.lingers = False
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        """Whether every `on_close` was called for the last time."""
        self._unclosed: dict[int, Handler[T]] = {}
        """Handlers with `on_close` that were let go of in the midst of a call, by identity."""
        self._single = self._alone("consumer", config.consumer, workers)
        self._fallback = self._alone("fallback", config.fallback, 1)
        self._resolved: dict[type, HandlerEntry[T] | None] = TypeTable()
        # Whoever has an entry, as its type's handler or as a round that has not called it yet, keeps its turns alive:
        # a handler that is taken away and added again meets them, and never runs at the same time as the one before.
        self._turns: WeakValueDictionary[type, CallLimiter] | None = None
        self._idlers: dict[HandlerEntry[T], None] = {}
        self._told: WeakSet[type] | None = None
        self._note_idler(self._single)
        self._note_idler(self._fallback)

    def _alone(self, label: str, handler: Handler[T] | None, calls_at_once: int) -> HandlerEntry[T] | None:
        turns = CallLimiter(calls_at_once)
        return (
            None
            if handler is None
            else HandlerEntry(self.name, label, handler, _PLAIN, turns, timeout=self.handler_timeout)
        )

    def _note_idler(self, entry: HandlerEntry[T] | None) -> None:
        if entry is not None:
            self._idlers.pop(entry, None)
            if entry.on_idle is not None:
                self._idlers[entry] = None

    def reconfigure(self, config: QueueConfig[T]) -> None:
        """Go by other numbers from the next round on; handlers, and the options of their own, stay."""
        self.max_batch, self.linger = config.max_batch, config.linger
        self.handler_timeout, self._retry = config.handler_timeout, config.retry
        for entry in (self._single, self._fallback, *self.entries.values()):
            if entry is not None:
                entry.timeout = entry.options.timeout or self.handler_timeout

    # -- who takes what ------------------------------------------------------------------------------------------

    def add(self, kind: type, handler: Handler[T], options: HandlerOptions) -> None:
        """Register, or replace, the handler of a type."""
        entry = self.entries.get(kind)
        before: Handler[T] | None = None
        if entry is None:
            if self._turns is None:
                self._turns = WeakValueDictionary()
            turns = self._turns.get(kind) or self._turns.setdefault(kind, CallLimiter(1))
            entry = HandlerEntry(self.name, kind.__qualname__, handler, options, turns, timeout=self.handler_timeout)
            self.entries[kind] = entry
            self._resolved.clear()
        else:
            before = entry.handler
            self._uncount(entry)
            if (options.max_batch or self.max_batch) < (entry.options.max_batch or self.max_batch):
                entry = self._renew(kind, entry)
            entry.replace(handler, options, self.handler_timeout)
        self.weight += options.weight
        self._lingering += options.linger is not None
        self.lingers = self._lingering > 0
        self._note_idler(entry)
        if before is not handler:
            self._let_go(before, entry.turns)

    def _renew(self, kind: type, old: HandlerEntry[T]) -> HandlerEntry[T]:
        """Another entry for the type: calls that wait are too large for the next handler, and are grouped anew."""
        new = HandlerEntry(old.queue, old.label, old.handler, old.options, old.turns, timeout=old.timeout)
        new.calls, new.items, new.failed, new.durations = old.calls, old.items, old.failed, old.durations
        old.retire()
        self._note_idler(old)
        self.entries[kind] = new
        self._resolved.clear()
        return new

    def _uncount(self, entry: HandlerEntry[T]) -> None:
        self._lingering -= entry.options.linger is not None
        self.weight -= entry.options.weight

    def remove(self, kind: type) -> bool:
        """Forget the handler of a type: a call that runs goes on, and no other begins."""
        entry = self.entries.pop(kind, None)
        if entry is None:
            return False
        entry.retire()
        self._uncount(entry)
        self.lingers = self._lingering > 0
        if not self.entries:
            self.weight = 0.0  # no rounding error outlives the handlers
        self._note_idler(entry)
        self._resolved.clear()
        self._let_go(entry.handler, entry.turns)
        return True

    # -- lingering -----------------------------------------------------------------------------------------------

    def linger_of(self, partition: Partition[T]) -> float:
        """How many seconds a batch of the partition may wait: the shortest time of the types that it holds."""
        kinds = partition.kinds()
        try:
            entries = list(self.entries.values()) if kinds is None else [self.resolve(kind) for kind in kinds]
        except Exception:  # noqa: BLE001 - the hash of a class may be the user's: its items fail when they leave
            return 0.0
        own = (self.linger if each is None or each.options.linger is None else each.options.linger for each in entries)
        return min(own, default=self.linger)

    def resolve(self, kind: type) -> HandlerEntry[T] | None:
        """The handler of a type: its own, else that of the nearest base class, else the fallback."""
        try:
            return self._resolved[kind]
        except KeyError:
            entries = self.entries
            found = next((entries[base] for base in kind.__mro__ if base in entries), self._fallback)
            self._resolved[kind] = found
            return found

    def takes(self, kind: type) -> bool:
        """Whether a type has a handler of its own, or by a base class."""
        return any(base in self.entries for base in kind.__mro__)

    def group(self, chunks: list[Chunk[T]]) -> list[Call[T]]:
        """Sort a round's items by handler, in the order in which they came, in lists of at most `max_batch`."""
        if self._single is not None:
            if len(chunks) == 1:
                return [(self._single, chunks[0][1])]
            together: list[T] = []
            for _, items, _ in chunks:
                together += items
            return [(self._single, together)]
        usual: list[Call[T]] | None = group_usual(self._resolved, chunks, self.max_batch)
        if usual is not None:
            return usual
        lists: dict[HandlerEntry[T] | None, list[T]] = {}
        own: set[HandlerEntry[T] | None] = set()
        for _, items, known in chunks:
            kind = known or type(items[0])
            if known is None and not one_type(items):
                self._sort(items, lists, own)
                continue
            entry = self.resolve(kind)
            if entry in lists:
                _own_list(entry, lists, own).extend(items)
            else:
                lists[entry] = items
        return [call for entry, items in lists.items() for call in self._bounded(entry, items)]

    def _sort(
        self, items: list[T], lists: dict[HandlerEntry[T] | None, list[T]], own: set[HandlerEntry[T] | None]
    ) -> None:
        by_type: dict[type, list[T]] = TypeTable()
        index = 0
        while (index := sort_run(by_type, items, index)) < len(items):
            kind = type(items[index])
            by_type[kind] = mine = _own_list(self.resolve(kind), lists, own)
            mine.append(items[index])
            index += 1

    def _bounded(self, entry: HandlerEntry[T] | None, items: list[T]) -> list[Call[T]]:
        most = self.max_batch if entry is None else entry.options.max_batch or self.max_batch
        if len(items) <= most:
            return [(entry, items)]
        return [(entry, items[start : start + most]) for start in range(0, len(items), most)]

    def _group_one_by_one(self, items: Iterable[T]) -> list[Call[T]]:
        """The same where a class is in the way: one that can't be hashed or compared fails its own items alone."""
        found: dict[int, HandlerEntry[T] | None] = {}
        lists: dict[HandlerEntry[T] | None, list[T]] = {}
        for item in items:
            kind = type(item)
            if id(kind) not in found:
                try:
                    found[id(kind)] = self.resolve(kind)
                except Exception as error:  # noqa: BLE001 - whatever a metaclass raises is its items' failure
                    found[id(kind)] = _refusing(kind, error)
            lists.setdefault(found[id(kind)], []).append(item)
        return [call for entry, mine in lists.items() for call in self._bounded(entry, mine)]

    # -- calling -------------------------------------------------------------------------------------------------

    async def run(  # noqa: C901, PLR0912, PLR0915 - the hot path of a call, written out
        self, round_: Round[T]
    ) -> None:
        """Call the handlers of everything in the round, one after the other."""
        try:
            calls = self.group(round_.chunks)
        except Exception:  # noqa: BLE001 - the hash and the comparison of a class may be the user's
            calls = self._group_one_by_one(item for _, items, _ in round_.chunks for item in items)
        round_.calls = calls
        drain = round_.drain
        counters = self.counters
        sizes = self.sizes.exact
        plain = self.limiter is None
        clock = drain.clock
        # Two looks at the clock cost as much as a small batch. A round of many calls is timed one time in eight.
        timed = 1 if len(calls) <= MANY_CALLS else 0 if drain.rounds % SAMPLED else SAMPLED
        context = copy_context()
        usual = plain and accelerated
        under_way: Any = NO_CALL
        round_.began = clock()
        index = 0
        while index < len(calls):
            if usual:
                # Where the hot path is compiled, it makes the calls up to one that waits or raises, which is awaited
                # here, or up to one that is not for it.
                under_way = call_usual(round_, counters, self.sizes, context, timed)
                if round_.abandoned:
                    return
                if under_way is NO_CALL:
                    if drain.disturbed:
                        await drain.recover()
                    if round_.call_index > index and has_left(context):
                        await restore_context(context)
                    if (index := round_.call_index) >= len(calls):
                        return
                else:
                    index = round_.call_index
            round_.call_index = index
            entry, items = calls[index]
            index += 1
            if entry is None:
                self._without_handler(round_, items)
                round_.call_index = index
                continue
            count = len(items)
            took: float | None = None
            if under_way is NO_CALL:
                try:
                    sizes[count] += 1
                except KeyError:
                    self.sizes.first(count)
            turns = entry.turns
            holders = turns.holders
            try:
                # The handler gets a list of its own: what it does to it must not reach the record kept here.
                if under_way is not NO_CALL:
                    try:
                        await under_way
                    finally:
                        under_way = NO_CALL
                        turns.leave(drain)
                elif plain and entry.timeout is None and not turns.waiting and len(holders) < turns.limit:
                    holders.append(drain)
                    try:
                        await entry.consume(items.copy())
                    finally:
                        turns.leave(drain)
                else:
                    await self._call(drain, entry, items.copy())
            except BaseException as error:  # whatever a handler raises is its batch's failure, not ours
                if drain.is_ended_by(error):
                    raise
                if drain.disturbed and not drain.stopping:
                    await drain.recover()
                if isinstance(error, _RetiredError):
                    self.sizes.undo(count)
                    self._without_handler(round_, items)
                else:
                    took = clock() - round_.began
                    await self._not_handled(round_, entry, items, error, context)
                    round_.began = clock()  # neither `on_error` nor a backoff is the handler's time
            else:
                if not round_.abandoned:
                    counters.handled += count
                    round_.pending -= count
            if round_.abandoned:
                return
            if timed:
                ended = clock()
                entry.durations.record(ended - round_.began if took is None else took, timed)
                entry.calls += timed
                entry.items += count * timed
                round_.began = ended
            if usual or drain.disturbed:
                round_.call_index = index
            if drain.disturbed:
                await drain.recover()  # raises if it was for the drain task, though the handler has swallowed it
            try:  # `has_left`, written out
                left = copy_context() != context
            except Exception:  # noqa: BLE001 - the values are the user's, and so is their comparison
                left = True
            if left:
                await restore_context(context)

    async def _call(self, drain: DrainTask[T], entry: HandlerEntry[T], items: list[T]) -> None:
        turns = entry.turns
        if not turns.enter_nowait(drain):
            await turns.enter(drain)
        try:
            await self._guarded(drain, entry, lambda: entry.consume(items))
        finally:
            turns.leave(drain)

    async def _guarded(
        self, drain: DrainTask[T], entry: HandlerEntry[T], call: Callable[[], Awaitable[object]]
    ) -> None:
        """Make a call within the scheduler's bound on calls and within its timeout.

        `call` looks the handler up as late as that: it may be replaced or taken away while the call waits.
        """
        limiter = self.limiter
        if limiter is not None:
            await limiter.enter(drain)
        limit = asyncio.timeout(entry.timeout)
        began = drain.clock()
        try:
            async with limit:
                await call()
        except TimeoutError:
            if not limit.expired():
                raise  # the handler's own
            raise TimeoutError(self._overrun(drain.clock() - began, entry.timeout)) from None
        finally:
            if limiter is not None:
                limiter.leave(drain)

    def _overrun(self, took: float, timeout: float | None) -> str:
        most = timeout or 0.0
        text = f"queue {self.name!r}: the call took longer than handler_timeout={most} s"
        if took < most + OVERRUN:
            return text
        return f"{text}; it could not be ended, and returned after {took:.2f} s: it may have done its work"

    async def _not_handled(
        self, round_: Round[T], entry: HandlerEntry[T], items: list[T], error: BaseException, context: Context
    ) -> None:
        """Call the handler again, as long as it or `on_error` asks for that and the limit allows it; else it failed.

        The batch stays in the round meanwhile: it keeps its place in the order, and nothing of its types passes it. A
        shutdown's deadline cuts the backoff off, and the batch is in its report.
        """
        retry = self._retry
        for attempt in range(1, retry.max_attempts + 1):
            if round_.abandoned:
                return
            self.errors.seen(error)
            last = attempt == retry.max_attempts
            if last or not isinstance(error, RetryableError):
                answer = await self._ask_on_error(round_, entry, items, error)
                if last or answer is not Again.RETRY or round_.abandoned:
                    break
            if not await self._backoff(round_, entry, len(items), error, attempt):
                return
            if has_left(context):
                await restore_context(context)
            failure = await self._call_again(round_, entry, items)
            if failure is None:
                return
            error = failure
        self._count_failed(round_, entry, items, error)

    async def _call_again(self, round_: Round[T], entry: HandlerEntry[T], items: list[T]) -> BaseException | None:
        """Call the handler with the batch once more; what it raised, or None where the items have an outcome."""
        drain = round_.drain
        try:
            await self._call(drain, entry, items.copy())
        except BaseException as error:  # whatever a handler raises is its batch's failure, not ours
            if drain.is_ended_by(error):
                raise
            if drain.disturbed and not drain.stopping:
                await drain.recover()
            if not isinstance(error, _RetiredError):
                return error
            self._without_handler(round_, items)
            return None
        if not round_.abandoned:
            self.counters.handled += len(items)
            round_.pending -= len(items)
        return None

    async def _backoff(
        self, round_: Round[T], entry: HandlerEntry[T], items: int, error: BaseException, attempt: int
    ) -> bool:
        """Wait before the next call; False if the round was given up meanwhile."""
        if round_.drain.stopping:
            raise asyncio.CancelledError  # the handler, or `on_error`, has made something else of its cancellation
        delay = max(_own_delay(self._retry, attempt), min(_asked_delay(error), self._retry.max_delay))
        log.warning(
            "handler_retried",
            queue=self.name,
            worker=round_.drain.index,
            handler=entry.label,
            items=items,
            attempt=attempt,
            delay=delay,
            **describe(error, full=self._full_errors),
        )
        try:
            await asyncio.sleep(delay)
        except asyncio.CancelledError:
            await round_.drain.recover()  # raises if it was for the drain task
        return not round_.abandoned

    def _count_failed(self, round_: Round[T], entry: HandlerEntry[T], items: list[T], error: BaseException) -> None:
        if not round_.abandoned:
            self.counters.failed += len(items)
            entry.failed += len(items)
            round_.fail(error)

    async def _ask_on_error(
        self, round_: Round[T], entry: HandlerEntry[T], items: list[T], error: BaseException
    ) -> object:
        """Log the failure, and give it to `on_error`; what that answers."""
        log.warning(
            "handler_failed",
            queue=self.name,
            worker=round_.drain.index,
            partitions=round_.partitions_of(items),
            handler=entry.label,
            items=len(items),
            **describe(error, full=self._full_errors),
        )
        if self.on_error is None:
            return None
        try:
            async with asyncio.timeout(self.handler_timeout):
                answer = self.on_error(items.copy(), error)
                if inspect.isawaitable(answer):
                    answer = await answer
        except BaseException as failure:  # the error handler is the user's too; nothing stops for it
            if round_.drain.is_ended_by(failure):
                self._count_failed(round_, entry, items, error)  # it was given to `on_error`: that is its outcome
                raise
            self._log_on_error(round_, failure)
            return None
        return answer

    def _log_on_error(self, round_: Round[T], failure: BaseException) -> None:
        log.error(
            "on_error_failed", queue=self.name, worker=round_.drain.index, **describe(failure, full=self._full_errors)
        )

    def _without_handler(self, round_: Round[T], items: list[T]) -> None:
        """The items had no handler when the round began, or it was taken away since: look for one now."""
        if round_.abandoned:
            return
        calls = self._group_one_by_one(items)
        if all(entry is None for entry, _ in calls):
            self._unhandled(round_, items)
        else:
            round_.replace_call(round_.call_index, calls)

    def _unhandled(self, round_: Round[T], items: list[T]) -> None:
        self.counters.unhandled += len(items)
        round_.fail(
            UnhandledTypeError(f"queue {self.name!r} has no handler for the item's type; add one, or a fallback")
        )
        with suppress(Exception):  # the hash of a class may be the user's: it is not worth a drain task
            self._tell_unhandled(round_, items)

    def _tell_unhandled(self, round_: Round[T], items: list[T]) -> None:
        """Warn of types that have no handler, once for each."""
        if self._told is None:
            self._told = WeakSet()
        for kind in dict.fromkeys(map(type, items)):
            if kind not in self._told:
                self._told.add(kind)
                log.warning(
                    "type_unhandled",
                    queue=self.name,
                    worker=round_.drain.index,
                    partitions=round_.partitions_of([item for item in items if type(item) is kind]),
                    type=kind.__qualname__,
                )

    # -- closing -------------------------------------------------------------------------------------------------

    def _let_go(self, handler: Handler[T] | None, turns: CallLimiter) -> None:
        """A handler was replaced or removed: close it, now if no call of it can be under way, else at the end."""
        if handler is None or self._closed or method_of(handler, "on_close") is None:
            return
        if not turns.idle:
            # Whatever becomes of its other types: this call may outlast them.
            self._unclosed[id(handler)] = handler
        elif id(handler) not in self._unclosed and all(each.handler is not handler for each in self.all_entries()):
            task = asyncio.get_running_loop().create_task(self._close(handler))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close_handlers(self, round_: Round[T]) -> None:
        """Call `on_close` of every handler, once for each object, no matter how many types it handles.

        The calls act for the round: a wait in them that could never end is found as in a handler's call.
        """
        open_ = {id(entry.handler): entry.handler for entry in self.all_entries()} | self._unclosed
        self._unclosed = {}
        self._closed = True
        closing = [self._close(handler, round_) for handler in open_.values()]
        await asyncio.gather(*closing, *self._closing, return_exceptions=True)

    def stop_closing(self) -> None:
        """Cut off what is still in its `on_close`."""
        for task in self._closing:
            task.cancel()

    async def _close(self, handler: Handler[T], round_: Round[T] | None = None) -> None:
        on_close = method_of(handler, "on_close")
        if on_close is None:
            return
        try:
            with nullcontext() if round_ is None else acting_for(round_):
                await on_close()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the handler's own, whatever it is; the others are closed all the same
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            self.errors.seen(error)
            name = type(handler).__qualname__
            log.error("on_close_failed", queue=self.name, handler=name, **describe(error, full=self._full_errors))

    @property
    def has_closers(self) -> bool:
        """Whether a handler has an `on_close` that was not called."""
        entries = (entry.handler for entry in self.all_entries())
        return bool(self._unclosed or self._closing) or any(method_of(each, "on_close") for each in entries)

    # -- idling --------------------------------------------------------------------------------------------------

    def all_entries(self) -> list[HandlerEntry[T]]:
        """Every handler that is registered; may be asked by any thread."""
        alone = (entry for entry in (self._single, self._fallback) if entry is not None)
        return [*list(self.entries.values()), *alone]

    def wants_idle(self) -> bool:
        """Whether any handler has an `on_idle`."""
        return bool(self._idlers)

    async def idle(self, drain: DrainTask[T]) -> None:
        """Call `on_idle` of every handler that is not in a call; stop at once when items arrive."""
        called: set[int] = set()
        context = copy_context()
        for entry in list(self._idlers):
            if drain.ready or drain.closing:
                return
            if entry.on_idle is None or id(entry.handler) in called:
                continue
            called.add(id(entry.handler))
            await self._idle_call(drain, entry, entry.on_idle)
            if drain.disturbed:
                await drain.recover()
            if has_left(context):
                await restore_context(context)

    async def _idle_call(
        self, drain: DrainTask[T], entry: HandlerEntry[T], on_idle: Callable[[], Awaitable[object]]
    ) -> None:
        # One object may handle several types: none of its calls may run at the same time as its on_idle.
        siblings = [other for other in self._idlers if other.handler is entry.handler]
        if entry not in siblings:
            return  # it was removed while the on_idle of another one ran
        if any(not other.turns.idle for other in siblings):
            return
        for other in siblings:
            other.turns.enter_alone(drain)
        handler = entry.handler

        async def still_idle() -> None:
            if entry in self._idlers and entry.handler is handler:
                await on_idle()

        try:
            await self._guarded(drain, entry, still_idle)
        except BaseException as error:  # a failing on_idle is the handler's fault and stops nothing
            if drain.is_ended_by(error):
                raise
            self._log_on_idle(drain, entry, error)
        finally:
            for other in siblings:
                other.turns.leave_alone()

    def _log_on_idle(self, drain: DrainTask[T], entry: HandlerEntry[T], error: BaseException) -> None:
        log.warning(
            "on_idle_failed",
            queue=self.name,
            worker=drain.index,
            handler=entry.label,
            **describe(error, full=self._full_errors),
        )


def _own_list(
    entry: HandlerEntry[T] | None, lists: dict[HandlerEntry[T] | None, list[T]], own: set[HandlerEntry[T] | None]
) -> list[T]:
    """A handler's list to add to: never one that belongs to a chunk."""
    if entry not in own:
        own.add(entry)
        lists[entry] = lists[entry].copy() if entry in lists else []
    return lists[entry]


def _own_delay(retry: HandlerRetry, attempt: int) -> float:
    """The policy's delay; the longest that it allows where its class is the user's, and gives nothing of the kind."""
    try:
        delay = float(retry.delay(attempt))
    except Exception:  # noqa: BLE001 - the class may be the user's, and its `delay` raise anything
        return retry.max_delay
    return delay if 0.0 <= delay <= retry.max_delay else retry.max_delay


def _asked_delay(error: BaseException) -> float:
    """The seconds for which a failed call asks to be left alone; 0 where that is not a time."""
    if not isinstance(error, RetryableError):
        return 0.0
    try:
        asked = float(error.retry_after or 0.0)
    except Exception:  # noqa: BLE001 - the error may be of a class of the user's, and its time a text of a server's
        return 0.0
    return asked if math.isfinite(asked) else 0.0


def _refusing(kind: type, error: Exception) -> HandlerEntry[Any]:
    """A handler that fails what it is given: items of a class that can't be looked up."""

    async def refuse(_: list[Any]) -> None:
        raise error

    return HandlerEntry("", type.__repr__(kind), refuse, _PLAIN, CallLimiter(1), timeout=None)
