"""A Hypothesis state machine drives one queue in virtual time and compares it with the model of `queue_world.py`.

Each rule makes one call and then lets the loop run: to a standstill, or for a few turns only, so that the next rule
meets the queue in the middle of things. After each step the guarantees are checked.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from queue_actors import CLASSES, KINDS, Even
from queue_world import PATIENCE, World

import batchqueue_async as bq
from batchqueue_async.testing import VirtualTimeLoop, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

pytestmark = pytest.mark.untraced

PRODUCERS = 4
CONFIGURATIONS = st.fixed_dictionaries(
    {
        "workers": st.builds(bq.WorkerPolicy.fixed, st.integers(1, 4)),
        "partitions": st.one_of(
            st.just(bq.PartitionPolicy.adaptive()),
            st.just(bq.PartitionPolicy.adaptive()),
            st.builds(bq.PartitionPolicy.fixed, st.integers(1, 5)),
            st.builds(bq.PartitionPolicy.worker_multiply, st.integers(1, 2)),
        ),
        "selector": st.sampled_from(["type_hash", "by_key", "type_hash", "by_key", "round_robin", "custom"]),
        "buffer_size": st.sampled_from([1, 1, 2, 2, 3, 5, 8]),
        "strategy": st.sampled_from([bq.BufferStrategy.BLOCKING, bq.BufferStrategy.BLOCKING, *bq.BufferStrategy]),
        "block_timeout": st.sampled_from([None, 0.2]),
        "max_batch": st.integers(1, 5),
        "linger": st.sampled_from([0.0, 0.3]),
        "handler_timeout": st.sampled_from([None, 0.5]),
        "single": st.booleans(),
        "fallback": st.booleans(),
        "balanced": st.booleans(),
        "on_idle": st.booleans(),
    }
)
SOME = st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, 3)), min_size=1, max_size=6)
"""The kinds and keys of some items."""
MODES = st.sampled_from(["ok", "turn", "slow", "slow", "fail", "cancelled", "hang", "stubborn", "produce"])
TURNS = st.sampled_from([None, None, 0, 1, 3])
"""How long the loop runs after a rule: so many turns, or (None) until nothing more happens."""


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop(time_limit=100 * PATIENCE, stall_timeout=0.05)
        asyncio.set_event_loop(self.loop)
        # The one pending call of each producer: what a producer puts in is in the order of its calls.
        self.busy: dict[int, asyncio.Task[Any]] = {}
        self.flushes: list[asyncio.Task[Any]] = []
        self.ends: list[asyncio.Task[Any]] = []

    def run(self, turns: int | None, call: Callable[[], object] = lambda: None) -> None:
        async def act() -> None:
            call()
            if turns is None:
                await settle()
                self.world.check_settled()
            else:
                for _ in range(turns):
                    await asyncio.sleep(0)
                self.world.check()

        self.loop.run_until_complete(act())
        self.collect()

    def collect(self) -> None:
        """Let no error of a call go unseen."""
        for task in [*self.busy.values(), *self.flushes, *self.ends]:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and not isinstance(error, bq.DeliveryError):
                raise error
        self.busy = {number: task for number, task in self.busy.items() if not task.done()}
        self.flushes = [task for task in self.flushes if not task.done()]

    def start(self, what: str, act: Callable[..., Coroutine[Any, Any, Any]], *arguments: object) -> asyncio.Task[Any]:
        return self.loop.create_task(self.world.guard(what, partial(act, *arguments)))

    @initialize(options=CONFIGURATIONS, seed=st.integers(0, 1 << 16), mode=MODES, turns=TURNS)
    def make(self, options: dict[str, Any], seed: int, mode: str, turns: int | None) -> None:
        def create() -> None:
            self.world = World(self.loop, random.Random(seed), dict(options))
            if not self.world.single:
                self.world.add_handler(Even, 1.0)
                self.world.add_handler(CLASSES[seed % len(CLASSES)], 1.0)
            for handler in self.world.every_handler:
                handler.mode = mode

        self.run(turns, create)

    # -- putting in --------------------------------------------------------------------------------------------------

    def free(self) -> int | None:
        return next((number for number in range(PRODUCERS) if number not in self.busy), None)

    def make_items(self, what: list[tuple[int, int]]) -> list[Any]:
        number = self.free()
        assert number is not None
        return [self.world.make(number, kind, key) for kind, key in what]

    def begin(self, what: str, argument: Any, producer: int, turns: int | None) -> None:
        self.busy[producer] = self.start(what, getattr(self.world, what), argument)
        self.run(turns)

    @precondition(lambda self: self.free() is not None)
    @rule(what=SOME, turns=TURNS)
    def produce_nowait(self, what: list[tuple[int, int]], turns: int | None) -> None:
        for item in self.make_items(what):
            self.run(turns, partial(self.world.produce_nowait, item))

    @precondition(lambda self: self.free() is not None)
    @rule(what=SOME, turns=TURNS)
    def produce_many_nowait(self, what: list[tuple[int, int]], turns: int | None) -> None:
        self.run(turns, partial(self.world.produce_many_nowait, self.make_items(what)))

    @precondition(lambda self: self.free() is not None)
    @rule(what=SOME, turns=TURNS)
    def produce_many(self, what: list[tuple[int, int]], turns: int | None) -> None:
        items = self.make_items(what)
        self.begin("produce_many", items, items[0].producer, turns)

    @precondition(lambda self: self.free() is not None)
    @rule(what=SOME, turns=TURNS)
    def deliver(self, what: list[tuple[int, int]], turns: int | None) -> None:
        items = self.make_items(what)
        self.begin("deliver", items, items[0].producer, turns)

    @precondition(lambda self: self.free() is not None)
    @rule(kind=st.integers(0, len(KINDS) - 1), key=st.integers(0, 3), count=st.integers(1, 4), turns=TURNS)
    def crowd(self, kind: int, key: int, count: int, turns: int | None) -> None:
        """Several producers at once, all with items for one place."""
        for number in [number for number in range(PRODUCERS) if number not in self.busy][:count]:
            self.busy[number] = self.start("produce", self.world.produce, self.world.make(number, kind, key))
        self.run(turns)

    @precondition(lambda self: self.busy or self.flushes)
    @rule(data=st.data(), turns=TURNS)
    def cancel(self, data: st.DataObject, turns: int | None) -> None:
        tasks = [*self.busy.values(), *self.flushes]
        task = tasks[data.draw(st.integers(0, len(tasks) - 1))]
        self.run(turns, task.cancel)

    @precondition(lambda self: self.busy)
    @rule(turns=TURNS)
    def cancel_when_granted(self, turns: int | None) -> None:
        """Cancel the producers in the very turn in which a line gets places, before they can run."""

        async def act() -> None:
            for turn in range(120):
                if any(partition.reserved for partition in self.world.parts._router.partitions):
                    for task in self.busy.values():
                        task.cancel()
                    return
                await asyncio.sleep(0 if turn % 6 else 0.01)

        self.loop.run_until_complete(act())
        self.run(turns)

    # -- handlers ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.world.single and not self.world.queue.closed)
    @rule(kind=st.sampled_from(CLASSES), weight=st.sampled_from([0.3, 1.0, 2.0]), mode=MODES, turns=TURNS)
    def add_handler(self, kind: type, weight: float, mode: str, turns: int | None) -> None:
        def add() -> None:
            self.world.add_handler(kind, weight)
            self.world.every_handler[-1].mode = mode

        self.run(turns, add)

    @precondition(lambda self: self.world.parts._grows and not self.world.queue.closed)
    @rule(kind=st.sampled_from(CLASSES), mode=MODES, what=SOME, turns=TURNS)
    def grow(self, kind: type, mode: str, what: list[tuple[int, int]], turns: int | None) -> None:
        """Growth in the middle of things: with items waiting, in a call, and coming in right after it."""

        def act() -> None:
            for item in [self.world.make(PRODUCERS + 1, number, key) for number, key in what]:
                self.world.produce_nowait(item)
            for number in [number for number in range(PRODUCERS) if number not in self.busy][:2]:
                item = self.world.make(number, *what[0])
                self.busy[number] = self.start("produce", self.world.produce, item)

        async def grow() -> None:
            for handler in self.world.every_handler:
                handler.mode = "slow"
            act()
            await settle()
            self.world.add_handler(kind, 2.5)
            self.world.every_handler[-1].mode = mode
            act()

        self.loop.run_until_complete(grow())
        self.run(turns)

    @precondition(lambda self: not self.world.single)
    @rule(kind=st.sampled_from(CLASSES), turns=TURNS)
    def remove_handler(self, kind: type, turns: int | None) -> None:
        self.run(turns, partial(self.world.remove_handler, kind))

    @precondition(lambda self: self.world.every_handler)
    @rule(which=st.integers(0, 50), mode=MODES, delay=st.sampled_from([0.01, 0.1, 0.7]), turns=TURNS)
    def change(self, which: int, mode: str, delay: float, turns: int | None) -> None:
        """Let a handler behave otherwise from the next call on; one that hangs goes on."""
        handler = self.world.every_handler[which % len(self.world.every_handler)]
        handler.gate.set()
        handler.gate = asyncio.Event()
        handler.mode, handler.delay = mode, delay
        self.run(turns)

    @precondition(lambda self: self.world.parts._rebalancer is not None and not self.world.queue.closed)
    @rule(turns=TURNS)
    def rebalance(self, turns: int | None) -> None:
        self.run(turns, self.world.parts._rebalancer.look)

    # -- time, flushes and the end -----------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.3, 1.0]))
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.run(None)

    @precondition(lambda self: not self.busy and self.world.shown)
    @rule()
    def idle(self) -> None:
        self.loop.run_until_complete(self.world.long_idle())
        self.run(None)

    @precondition(lambda self: len(self.flushes) < 2)
    @rule(timeout=st.sampled_from([None, 0.0, 0.2]), turns=TURNS)
    def flush(self, timeout: float | None, turns: int | None) -> None:
        self.flushes.append(self.start("flush", self.world.flush, timeout))
        self.run(turns)

    @rule(timeout=st.sampled_from([0.0, 0.1, 2.0, None]), now=st.sampled_from([False, False, True]), turns=TURNS)
    def shutdown(self, timeout: float | None, now: bool, turns: int | None) -> None:
        if not now and not self.busy:
            return  # most programs should have time to get into trouble first
        self.ends.append(self.start("shutdown", self.world.shutdown, timeout))
        self.run(turns)

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.world.release()
                self.loop.run_until_complete(self._end())
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            asyncio.set_event_loop(None)
            self.loop.close()

    async def _end(self) -> None:
        """Nothing hangs any more: every call comes to its end, and the accounts are complete."""
        await asyncio.gather(*self.busy.values(), *self.flushes, *self.ends, return_exceptions=True)
        self.collect()
        await self.world.finish()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="batchqueue_async")


@pytest.mark.timeout(600)
def test_the_queue_keeps_its_guarantees_whatever_is_done_to_it() -> None:
    examples = max(400, settings.default.max_examples)
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
