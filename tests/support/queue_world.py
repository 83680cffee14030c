"""One queue under test, and a simple model of what it owes: shared by the state machine and by the seeded driver.

Every item is an object of its own that knows its producer, its number there, and its key. The model keeps what each
call answered for its items and what handlers, `on_error` and the report showed of them, and compares. It looks into
the queue's parts only where a guarantee is about them: who owns what, who is listed, how much is inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from queue_actors import (
    KINDS,
    Call,
    ClosingHandler,
    Handler,
    HashError,
    IdleHandler,
    Item,
    MoodyHash,
    OopsError,
    RandomBalancer,
    ViolationError,
    size_of,
)

import batchqueue_async as bq
from batchqueue_async.testing import VirtualTimeLoop, settle

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Sequence

PATIENCE = 2_000.0
"""Virtual seconds after which a wait that has to end has not."""


class World:
    """The queue, its handlers, and the model."""

    def __init__(self, loop: VirtualTimeLoop, rng: random.Random, options: dict[str, Any]) -> None:
        self.loop, self.rng = loop, rng
        self.selector_kind: str = options.pop("selector")
        self.single: bool = options.pop("single")
        self.with_idle: bool = options.pop("on_idle", False)
        self.with_close: bool = options.pop("on_close", False)
        self.with_options: bool = options.pop("handler_options", False)
        MoodyHash.rng = rng if options.pop("moody_hash", False) else None
        self.options, self.ready, self.removed = options, False, False
        self.again: dict[Item, int | None] = {}
        """Items whose handler is to be called again, and how far their line had got by then."""
        self.violations: list[str] = []
        self.draining = False
        self.over = False
        self.calls: list[Call] = []
        self.idle: set[Handler] = set()
        self.handlers: dict[str, Handler] = {}
        self.every_handler: list[Handler] = []
        self.numbers = Counter[int]()
        self.accepted: set[Item] = set()
        self.unsure: set[Item] = set()
        self.forbidden: set[Item] = set()
        self.cut: list[list[Item]] = []
        self.refused = self.dropped = 0
        self.shown: set[Item] = set()
        self.handled: set[Item] = set()
        self.failed: set[Item] = set()
        self.last: dict[Any, int] = {}
        self.budget = 200
        selectors: dict[str, Any] = {
            "type_hash": bq.type_hash,
            "round_robin": bq.round_robin,
            "by_key": lambda: bq.by_key(lambda item: item.key),
            "custom": lambda: lambda item, count: (item.key * 7 + item.number) % count,
            "moody": lambda: self._moody,
        }
        if self.single:
            options["consumer"] = self._make_handler("consumer")
        elif options.pop("fallback", False):
            options["fallback"] = self._make_handler("fallback")
        if self.single:
            options.pop("fallback", None)
        self.balanced = options.pop("balanced", False)
        config: bq.QueueConfig[Item] = bq.QueueConfig(
            **options,
            selector=selectors[self.selector_kind](),
            on_error=self._on_error,
            balancer=RandomBalancer(rng) if self.balanced else None,
            balance_interval=0.35,
        )
        self.config = config
        self.ready = True
        self.queue: bq.BatchQueue[Item] = bq.BatchQueue("model", config)
        self.parts: Any = self.queue  # the same queue, for looks inside

    # -- handlers ----------------------------------------------------------------------------------------------------

    def _make_handler(self, label: str) -> Handler:
        handler = (IdleHandler if self.with_idle else ClosingHandler if self.with_close else Handler)(self, label)
        self.handlers[label] = handler
        self.every_handler.append(handler)
        return handler

    def add_handler(self, kind: type, weight: float) -> None:
        """Register a new handler object: a replaced one must not run beside it."""
        before = self.queue.partition_count
        handler, rng = self._make_handler(kind.__name__), self.rng
        options: dict[str, Any] = {}
        if self.with_options:
            handler.max_batch = rng.randint(1, self.config.max_batch)
            linger, timeout = rng.choice([None, None, 0.0, 0.2, 1.0]), rng.choice([None, 0.05, 0.5])
            options = {"max_batch": handler.max_batch, "linger": linger, "timeout": timeout}
        with contextlib.suppress(HashError):  # then the one before stays
            self.queue.add_handler(kind, handler, weight, **options)
        self.expect(self.queue.partition_count >= before, "partitions got fewer")

    def _moody(self, item: Item, count: int) -> int:
        if self.rng.random() < 0.05:
            raise OopsError
        return item.key % count

    def remove_handler(self, kind: type) -> None:
        """Take a handler away."""
        with contextlib.suppress(HashError):
            if self.queue.remove_handler(kind) and not self.removed:
                self.removed = True
                if self.selector_kind == "by_key":
                    self.last.clear()

    def call_begins(self, handler: Handler, batch: list[Item]) -> Call:
        call = Call(handler, batch)
        if self.over:
            self.expect(False, f"{handler.label} called with {batch} after the end")
            return call
        self.expect(0 < len(batch) <= handler.max_batch, f"{len(batch)} items in one call of {handler.label}")
        self.expect(not handler.closes, f"{handler.label} was called after its on_close")
        repeated = {item: self.again.pop(item) for item in batch if item in self.again}
        self.shown -= repeated.keys()
        self.failed -= repeated.keys()
        same = [each for each in self.calls if each.handler.label == handler.label]
        most = self.queue.worker_count if self.single else 1
        self.expect(len(same) < most, f"{handler.label}: {len(same) + 1} calls at once")
        self.expect(handler not in self.idle, f"{handler.label} called beside its on_idle")
        for item in batch:
            self.expect(item not in self.shown, f"{item} handled twice")
            self.expect(item not in self.forbidden, f"{item} handled though it was not accepted")
            self.expect(item in self.accepted or item in self.unsure, f"{item} came from nowhere")
            if item in repeated:
                passed = self._place(handler, item) != repeated[item]
                self.expect(not passed, f"{item} was passed while it was to be handled again")
            else:
                self._check_order(handler, item)
        self.shown.update(batch)
        running = [item for each in self.calls for item in each.batch]
        if self.selector_kind == "type_hash":
            self.expect(not ({*map(type, running)} & {*map(type, batch)}), "two calls of one type at once")
        elif self.selector_kind == "by_key":
            self.expect(not ({each.key for each in running} & {each.key for each in batch}), "two calls of one key")
        self.calls.append(call)
        self.check()
        return call

    def _line(self, handler: Handler, item: Item) -> Any:
        """What keeps its order: the items of a producer of one type, or of one key and one handler."""
        if self.selector_kind == "type_hash":
            return (item.producer, type(item))
        if self.selector_kind != "by_key":
            return None
        # What a round has sorted for a handler that is taken away comes to the next one after what that has already.
        return (item.producer, item.key, handler.label, type(item) if self.removed else None)

    def _place(self, handler: Handler, item: Item) -> int | None:
        """How far the line of an item has got; None where that is not known: there is none, or another handler's."""
        return self.last.get(self._line(handler, item)) if self.selector_kind == "type_hash" else None

    def _check_order(self, handler: Handler, item: Item) -> None:
        line = self._line(handler, item)
        if line is None:
            return
        before = self.last.get(line, -1)
        self.expect(before < item.number, f"{item} came after #{before} of its producer")
        self.last[line] = item.number

    def call_ends(self, call: Call, *, good: bool, again: bool = False) -> None:
        if again:
            self.again.update((item, self._place(call.handler, item)) for item in call.batch)
        if call in self.calls:
            self.calls.remove(call)
        if good and not any(worker.round is not None and worker.round.abandoned for worker in self.parts._drains):
            self.handled.update(call.batch)

    async def _on_error(self, batch: Sequence[Item], error: BaseException) -> object:
        if not isinstance(error, HashError):  # its items never get to a handler, not even if they are called again
            self.expect(not (self.failed & {*batch}), "a batch failed twice")
        self.failed.update(batch)
        for item in batch:
            self.again.pop(item, None)
        if self.rng.random() < 0.3:
            raise OopsError
        if self.rng.random() < 0.3:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                if self.rng.random() < 0.5:
                    raise
        task = asyncio.current_task()
        if self.rng.random() < 0.05 and task is not None:
            task.cancel()
        if self.rng.random() < 0.4:
            # It has failed if that was its last call, which only the queue knows; or is called again.
            lines = {item: self.last.get((item.producer, type(item))) for item in batch}
            self.again.update(lines if self.selector_kind == "type_hash" else dict.fromkeys(batch))
            return bq.RETRY
        return None

    async def produce_from_handler(self, batch: list[Item]) -> None:
        """What a handler may do to its own queue: it is done at once, waits for others, or is told the deadlock."""
        if self.budget <= 0:
            return
        self.budget -= 1
        # A producer of its own for each call: nothing orders what two calls put in.
        producer = 1000 + self.budget
        if self.rng.random() < 0.5:
            self.produce_nowait(self.make(producer, self.rng.randrange(len(KINDS)), self.rng.randrange(3)))
            return
        item = self.make(producer, self.rng.randrange(len(KINDS)), self.rng.randrange(3))
        with contextlib.suppress(bq.DeadlockError):
            await self.produce(item)

    # -- calls -------------------------------------------------------------------------------------------------------

    def make(self, producer: int, kind: int, key: int) -> Item:
        self.numbers[producer] += 1
        return KINDS[kind](producer, self.numbers[producer], key)

    def _answer(self, items: Sequence[Item], count: int, *, closed: bool) -> None:
        self.unsure.difference_update(items)
        self.accepted.update(items[:count])
        self.forbidden.update(items[count:])
        for item in items[count:]:
            self.expect(item not in self.shown, f"{item} was handled, and then not accepted")
        if self.config.strategy is bq.BufferStrategy.DROP_NEWEST and not closed:
            self.dropped += len(items) - count
        else:
            self.refused += len(items) - count

    def produce_nowait(self, item: Item) -> bool:
        closed = self.queue.closed
        self.unsure.add(item)
        lines = self._lines()
        try:
            answer = self.queue.produce_nowait(item)
        except OopsError:  # the selector's
            self.unsure.discard(item)
            self.forbidden.add(item)
            return False
        self._answer([item], int(answer), closed=closed)
        self._check_no_overtaking([item][: int(answer)], lines)
        return answer

    def produce_many_nowait(self, items: list[Item]) -> int:
        closed = self.queue.closed
        self.unsure.update(items)
        lines = self._lines()
        try:
            count = self.queue.produce_many_nowait(items)
        except OopsError:
            self.cut.append(items)
            return 0
        self._answer(items, count, closed=closed)
        self._check_no_overtaking(items[:count], lines)
        return count

    def _lines(self) -> set[Any]:
        return {each for each in self.parts._router.partitions if each.contended}

    def _check_no_overtaking(self, items: list[Item], lines: set[Any]) -> None:
        """Who came later must not have got a place where others wait for one."""
        router = self.parts._router
        passed = [item for each in lines for item in each.items() if item in items]
        passed += [item for each in router.migrations if each.target in lines for item in each.items if item in items]
        self.expect(not passed, f"{passed} passed those who wait")

    async def produce(self, item: Item) -> bool:
        self.unsure.add(item)
        closed = self.queue.closed
        try:
            answer = await self.queue.produce(item)
        except BaseException:
            self.unsure.discard(item)
            self.forbidden.add(item)
            self.expect(item not in self.shown, f"{item} was handled, and its produce raised")
            raise
        self._answer([item], int(answer), closed=closed)
        return answer

    async def produce_many(self, items: list[Item]) -> int:
        self.unsure.update(items)
        closed = self.queue.closed
        try:
            count = await self.queue.produce_many(items)
        except BaseException:
            self.cut.append(items)
            raise
        self._answer(items, count, closed=closed)
        return count

    async def deliver(self, items: list[Item]) -> None:
        self.unsure.update(items)
        try:
            await self.queue.deliver(items)
        except bq.DeliveryError as error:
            not_handled = [item for failure in error.failures for item in failure.items]
            self.expect(len({*not_handled}) == len(not_handled), "an item failed twice in one delivery")
            self.expect(
                {*items} - {*not_handled} <= self.handled and not ({*not_handled} & self.handled),
                f"deliver told of {not_handled}, but handled were {[i for i in items if i in self.handled]} of {items}",
            )
            self.cut.append(items)
        except BaseException:
            self.cut.append(items)
            raise
        else:
            self.expect({*items} <= self.handled, f"deliver returned before { ({*items} - self.handled) } were handled")
            self._answer(items, len(items), closed=False)

    async def flush(self, timeout: float | None = None) -> None:
        before = self.inside()
        try:
            await self.queue.flush(timeout)
        except (TimeoutError, bq.QueueClosedError):
            return
        left = {*before} & {*self.inside()}
        self.expect(not left, f"flush returned while {left} had no outcome")

    async def shutdown(self, timeout: float | None) -> bq.ShutdownReport:
        self.draining = True
        start = self.loop.time()
        report = await self.queue.shutdown(timeout)
        allowed = (self.config.drain_timeout if timeout is None else timeout) + 0.25
        self.expect(self.loop.time() - start <= allowed + 1e-6, f"shutdown took {self.loop.time() - start} s")
        if not self.over:
            self.over = True
            self.report = report
        return report

    def peek(self) -> None:
        """Read the statistics without the loop, here or on another thread, which finds the same."""
        found: list[bq.QueueStats] = []
        if self.rng.random() < 0.3:
            reader = threading.Thread(target=lambda: found.append(self.queue.peek()))
            reader.start()
            reader.join()
        else:
            found.append(self.queue.peek())
        stats = found[0]
        done = stats.handled + stats.failed + stats.unhandled + stats.dropped_after + stats.undelivered
        self.expect(stats.accepted == done + stats.in_flight + stats.used, f"peek does not add up: {stats}")
        self.expect(stats.attempted == stats.accepted + stats.refused + stats.dropped_before, f"peek: {stats}")
        self.expect(stats.accepted == self.queue.stats().accepted, "peek does not see what stats does")

    def fork(self) -> None:
        """In a forked child every call says so, and the parent goes on."""
        child = os.fork()
        if not child:
            os._exit(self._check_child())
        self.expect(os.waitpid(child, 0)[1] == 0, "a forked child could use its parent's queue")

    def _check_child(self) -> int:
        try:
            for call in (lambda: self.queue.produce_nowait(self.make(0, 0, 0)), self.queue.bridge, self.queue.stats):
                try:
                    call()
                except bq.ForkedError:
                    continue
                return 1
        except BaseException:
            return 2
        return 0

    def interrupt(self) -> None:
        """Ctrl-C: whoever ends the program cancels every task, those of the queue too."""
        tasks = [each for each in asyncio.all_tasks() if each.get_name().startswith("model-")]
        self.rng.shuffle(tasks)
        for task in tasks:
            task.cancel()

    # -- what must hold ----------------------------------------------------------------------------------------------

    def expect(self, holds: object, what: str) -> None:
        if not holds:
            self.violations.append(what)
            raise ViolationError(what)

    def fail_on_violations(self) -> None:
        """Raise what was found inside a handler, where a raised assertion is just a failing handler."""
        if self.violations:
            raise ViolationError("; ".join(self.violations[:3]))

    def inside(self) -> list[Item]:
        """Every item without an outcome."""
        router = self.parts._router
        items = [item for each in router.partitions for item in each.items()]
        items += [item for each in router.migrations for item in each.items]
        return items + [item for worker in self.parts._drains for item in worker.unfinished()]

    def check(self) -> None:
        """What must hold whenever the loop is not inside the queue."""
        self.fail_on_violations()
        stats = self.queue.stats()
        done = stats.handled + stats.failed + stats.unhandled + stats.dropped_after + stats.undelivered
        self.expect(stats.accepted == done + stats.in_flight + stats.used, f"counters do not add up: {stats}")
        totals = self.queue.peek(totals=True)
        for each in ("attempted", "accepted", "handled", "used", "in_flight", "dropped_after", "undelivered"):
            self.expect(getattr(totals, each) == getattr(stats, each), f"totals have another {each}: {totals}, {stats}")
        low = len(self.accepted)
        high = low + len(self.unsure)
        self.expect(low <= stats.accepted <= high, f"accepted={stats.accepted}, the model has {low} to {high}")
        if not self.cut and not self.unsure:
            self.expect(stats.refused == self.refused, f"refused={stats.refused}, the model has {self.refused}")
            self.expect(stats.dropped_before == self.dropped, f"dropped_before={stats.dropped_before}")
        if not self.over:
            for partition in self.parts._router.partitions:
                self._check_partition(partition)
            self._check_moves()

    def _check_partition(self, each: Any) -> None:
        name = f"partition {each.index}"
        workers = self.parts._drains
        taken = each.qsize() + each.reserved + each.held
        self.expect(taken <= each.capacity, f"{name}: {taken} places of {each.capacity} taken")
        owners = [worker for worker in workers for owned in worker.partitions if owned is each]
        self.expect(owners == [each.owner], f"{name} has owners {[worker.index for worker in owners]}")
        listed = [worker for worker in workers for ready in worker.ready if ready is each]
        self.expect(listed == ([each.owner] if each.listed else []), f"{name} is listed={each.listed} at {listed}")
        self.expect(each.listed or not each.qsize(), f"{name} has items that nobody knows of")
        self.expect(each.on_ready == each.owner.on_ready, f"{name} tells another than its owner")
        room, spare = each.capacity - taken, each.fast_slots.__length_hint__()
        self.expect(spare <= room, f"{name}: the fast path may fill {spare} places of {room}")
        if each.contended or each.closed or not each.listed:
            self.expect(spare == 0, f"{name}: the fast path is open past those who wait")
        self.expect(each.held == sum(len(one.items) for one in each.arriving or ()), f"{name}: held={each.held}")
        self.expect(
            each.reserved == sum(one.reserved for one in each.everyone_waiting()), f"{name}: permits={each.reserved}"
        )
        if each.byte_room is not None:
            self._check_bytes(name, each)
        self.expect(each.in_flight or each.next_owner is None, f"{name} has an heir and nothing in flight")
        for lane in each.lanes or ():
            self.expect({type(item) for item in lane.tail} <= {lane.kind}, f"{name}: a lane holds other types")
            self.expect(lane.fast_slots is each.fast_slots, f"{name}: a lane counts places by itself")
            self.expect(self.parts._by_type[lane.kind] is lane, f"{name} has a lane that nothing comes into")

    def _check_bytes(self, name: str, each: Any) -> None:
        room = each.byte_room
        total = room.used + room.held + room.reserved
        self.expect(total <= room.limit, f"{name}: {total} bytes of {room.limit} taken")
        used = sum(map(size_of, each.items()))
        self.expect(room.used == used, f"{name}: counts {room.used} bytes inside, there are {used}")
        held = sum(size_of(item) for one in each.arriving or () for item in one.items)
        self.expect(room.held == held, f"{name}: holds {room.held} bytes for {held}")
        granted = sum(sum(one.sizes[one.filled : one.filled + one.reserved]) for one in each.everyone_waiting())
        self.expect(room.reserved == granted, f"{name}: has reserved {room.reserved} bytes for {granted}")
        self.expect(not each.fast_slots.__length_hint__(), f"{name}: an item may come in without being weighed")

    def _check_moves(self) -> None:
        router = self.parts._router
        for migration in router.migrations:
            self.expect(migration.clear_at > migration.source.finished, "a move waits although its way is clear")
            self.expect(migration in (migration.source.leaving or ()), "a move that its source does not know")
        for partition in router.partitions:
            for each in partition.leaving or ():
                self.expect(each in router.migrations, "a move nobody knows")
        for kind, place in (self.parts._by_type or {}).items():
            for partition in router.partitions:
                wrong = [
                    each
                    for each in partition.everyone_waiting()
                    if type(each.item) is kind and place.partition is not partition
                ]
                self.expect(not wrong, f"a producer of {kind.__name__} waits where its type is not")

    def check_settled(self) -> None:
        """What must hold when nothing more happens without time or a call."""
        self.check()
        if self.over:
            return
        for each in self.parts._router.partitions:
            free = each.capacity - each.qsize() - each.held
            self.expect(not each.reserved, f"partition {each.index}: a producer with a permit does not run")
            waiting = each.waiting
            if waiting and each.byte_room is not None and not each.byte_room.fitting(next(iter(each.waiters.waiting))):
                free = 0
            self.expect(not waiting or free <= 0, f"partition {each.index}: {waiting} wait beside {free} free places")
            self.expect(not waiting or not self.queue.closed, f"{waiting} producers wait at a closed queue")
        for worker in self.parts._drains:
            lingers = (
                (self.config.linger or self.parts._dispatcher.lingers)
                and not worker.hurry
                and not worker._batch_is_full()
            )
            if worker.ready and not lingers:
                self.expect(worker.calling, f"worker {worker.index} sleeps beside items")

    async def long_idle(self) -> None:
        """With nothing to do, and nobody who wants on_idle, no timer is left."""
        if self.inside() or self.over or self.with_idle or self.calls:
            return
        await asyncio.sleep(1.0)
        if self.inside() or self.calls or self.loop._holds:
            return
        mine = [timer for timer in self.loop._scheduled if not timer.cancelled() and "wake" in repr(timer._callback)]
        self.expect(not mine, f"an idle queue polls: {mine}")

    def release(self) -> None:
        """Let everything that hangs go on, and all further calls be quick."""
        for handler in self.every_handler:
            handler.mode = "ok"
            handler.gate.set()

    def check_end(self) -> None:
        """Every accepted item has its place in the report, and only one."""
        self.check()
        report, stats = self.report, self.queue.stats()
        left = {*report.undelivered}
        # What on_error wanted to have called again and never was: it failed for good, or has lost its handler.
        self.failed -= left & self.again.keys()
        open_ = len(self.failed & self.again.keys())
        self.expect(len(left) == len(report.undelivered), "an item is undelivered twice")
        handled = self.handled - left
        self.expect(not (handled & self.failed), f"handled and failed: {handled & self.failed}")
        self.expect(not (left & self.failed), f"undelivered and failed: {left & self.failed}")
        self.expect(report.handled == len(handled), f"report.handled={report.handled}, seen {len(handled)}")
        fewest = len(self.failed) - open_
        self.expect(
            fewest <= report.failed <= len(self.failed), f"report.failed={report.failed}, seen {len(self.failed)}"
        )
        self.expect(not (left & self.forbidden), f"undelivered though not accepted: {left & self.forbidden}")
        placed = len(handled | left) + report.failed + report.unhandled + report.dropped_after
        self.expect(report.accepted == stats.accepted == placed, f"{report.accepted} accepted, {placed} have a place")
        known = handled | self.failed | left
        gone = report.unhandled + report.dropped_after
        self.expect(len(self.accepted - known) <= gone, f"lost: {self.accepted - known}, dropped or unhandled: {gone}")
        if not gone:
            for items in self.cut:
                shown = [item in known for item in items]
                self.expect(shown == sorted(shown, reverse=True), f"{items} were not accepted as a prefix: {shown}")
        self.expect(not self.inside(), "items are left inside")

    async def finish(self, timeout: float | None = PATIENCE) -> None:
        """Let everything come to its end, and look at the accounts."""
        self.release()
        if not self.over:
            self.release()
            await self.guard("the final flush", self.flush)
            await settle()
            self.check_settled()
            await self.guard("the final shutdown", lambda: self.shutdown(timeout))
        await settle()
        self.check_end()

    async def guard(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await something that has to end."""
        limit = asyncio.timeout(PATIENCE)
        try:
            async with limit:
                return await call()
        except TimeoutError:
            if limit.expired():
                raise ViolationError(f"{what} did not end: {self.describe()}") from None
            raise

    def describe(self) -> str:
        lines = [repr(self.queue)]
        lines += [
            f"worker {worker.index}: owns {[p.index for p in worker.partitions]}"
            f" ready {[p.index for p in worker.ready]} calling={worker.calling} blocked={worker.waits.needs()}"
            for worker in self.parts._drains
        ]
        lines += [
            f"partition {p.index}: {p.qsize()} held={p.held} permits={p.reserved} waiting={p.waiting}"
            f" in_flight={p.in_flight}"
            for p in self.parts._router.partitions
        ]
        return "\n  ".join(lines)
