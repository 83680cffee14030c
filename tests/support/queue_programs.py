"""Programs by chance in task orders by chance: producers, cancellers, growers, balancers and flushers at once.

A seed decides the configuration, the program and the order in which ready tasks run. `make chaos` runs many thousands
of seeds, `make chaos SEED=123` one; from pytest: `pytest tests/queue/test_seeds.py --seed 123`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

from queue_actors import CLASSES, KINDS, OopsError, draw_options
from queue_world import PATIENCE, World

import batchqueue_async as bq
from batchqueue_async.testing import VirtualTimeLoop, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

MODES = ["ok", "ok", "turn", "turn", "slow", "slow", "fail", "cancelled", "hang", "stubborn", "produce", "produce"]
MODES += ["retry", "retry", "fail", "cancels itself", "cancels itself unseen", "group"]


MOST_SHOWN = 25


class Program:
    """What one seed does to one queue."""

    def __init__(self, seed: int, loop: VirtualTimeLoop) -> None:
        self.rng = random.Random(seed)
        self.world = World(loop, self.rng, draw_options(self.rng))
        self.calls: dict[asyncio.Task[Any], str] = {}
        self.stopped = False

    async def pause(self) -> None:
        """Let the others go on: for a turn of the loop, or for some time."""
        await asyncio.sleep(self.rng.choice([0, 0, 0, 0.01, 0.05, 0.2]))

    def call(self, what: str, act: Callable[..., Coroutine[Any, Any, Any]], *arguments: object) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(self.world.guard(what, partial(act, *arguments)))
        self.calls[task] = what
        task.add_done_callback(self.calls.pop)
        return task

    async def producer(self, number: int) -> None:
        world, rng = self.world, self.rng
        kinds = rng.sample(range(len(KINDS)), rng.randint(1, len(KINDS)))
        for _ in range(rng.randint(3, 10)):
            items = [world.make(number, rng.choice(kinds), rng.randrange(4)) for _ in range(rng.randint(1, 6))]
            way = rng.random()
            if way < 0.25:
                world.produce_nowait(items[0])
            elif way < 0.35:
                world.produce_many_nowait(items)
            elif way < 0.65:
                await self.outcome(self.call("produce", world.produce, items[0]))
            elif way < 0.85:
                await self.outcome(self.call("produce_many", world.produce_many, items))
            else:
                await self.outcome(self.call("deliver", world.deliver, items))
            if rng.random() < 0.6:
                await self.pause()

    async def outcome(self, task: asyncio.Task[Any]) -> None:
        await asyncio.wait([task])
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, bq.DeliveryError | OopsError):
            raise error

    async def repeat(self, act: Callable[[], object], times: int) -> None:
        for _ in range(times):
            await self.pause()
            if self.world.draining:
                return
            answer = act()
            if isinstance(answer, asyncio.Task):
                await self.outcome(answer)
            self.world.check()

    def cancel_one(self) -> None:
        if self.calls:
            self.rng.choice(list(self.calls)).cancel()

    def set_mode(self) -> None:
        handler = self.rng.choice(self.world.every_handler) if self.world.every_handler else None
        if handler is not None:
            if handler.mode == "hang":
                handler.gate.set()
            handler.mode, handler.delay = self.rng.choice(MODES), self.rng.choice([0.01, 0.1, 0.7])
            handler.gate = handler.gate if handler.mode != "hang" else asyncio.Event()

    def change_handlers(self) -> None:
        kind = self.rng.choice(CLASSES)
        if self.rng.random() < 0.25:
            self.world.remove_handler(kind)
        else:
            self.world.add_handler(kind, self.rng.choice([0.3, 1.0, 2.0]))
            self.world.every_handler[-1].mode = self.rng.choice([*MODES[:6], "retry"])

    def move(self) -> None:
        if self.world.parts._rebalancer is not None:
            self.world.parts._rebalancer.look()

    def flush(self) -> asyncio.Task[Any]:
        return self.call("flush", self.world.flush, self.rng.choice([None, 0.3]))

    async def keep_releasing(self) -> None:
        """Whatever hangs is let go sooner or later: a flush without a timeout has an end then."""
        while True:
            await asyncio.sleep(5.0)
            for handler in self.world.every_handler:
                if handler.mode == "hang":
                    handler.mode = "ok"
                handler.gate.set()

    async def run(self) -> World:
        world, rng = self.world, self.rng
        if not world.single:
            for kind in rng.sample(CLASSES, rng.randint(1, 3)):
                world.add_handler(kind, 1.0)
        helper = asyncio.ensure_future(self.keep_releasing())
        tasks = [self.producer(number) for number in range(rng.randint(2, 4))]
        tasks += [self.repeat(self.cancel_one, rng.randint(0, 8)), self.repeat(self.set_mode, rng.randint(0, 8))]
        tasks += [self.repeat(self.flush, rng.randint(0, 3))]
        if not world.single:
            tasks.append(self.repeat(self.change_handlers, rng.randint(0, 8)))
        if world.balanced:
            tasks.append(self.repeat(self.move, rng.randint(0, 10)))
        tasks.append(self.repeat(self.world.peek, rng.randint(0, 3)))
        if rng.random() < 0.05 and hasattr(os, "fork"):
            tasks.append(self.repeat(self.world.fork, 1))
        if rng.random() < 0.4:
            tasks.append(self.early_end())
        await asyncio.gather(*tasks)
        helper.cancel()
        world.release()
        await world.finish()
        return world

    async def early_end(self) -> None:
        for _ in range(self.rng.randint(1, 15)):
            await self.pause()
        self.world.draining = True
        deadlines = [self.rng.choice([0.0, 0.1, 1.0, PATIENCE]) for _ in range(self.rng.randint(1, 2))]
        ends = [self.world.guard("shutdown", partial(self.world.shutdown, each)) for each in deadlines]
        if self.rng.random() < 0.3:
            ends.append(self.ctrl_c())
        await asyncio.gather(*ends)

    async def ctrl_c(self) -> None:
        await self.pause()
        self.world.interrupt()


def run_seed(seed: int) -> World:
    """Run the program of one seed; an error that leaves says how to run it again."""

    def factory() -> VirtualTimeLoop:
        return VirtualTimeLoop(seed=seed, time_limit=10 * PATIENCE, stall_timeout=0.05)

    program: Program | None = None

    async def main() -> World:
        nonlocal program
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        program = Program(seed, loop)
        world = await program.run()
        await settle()
        return world

    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main())
    except BaseException as error:
        error.add_note(f"seed {seed}: make chaos SEED={seed}, or pytest tests/queue/test_seeds.py --seed {seed}")
        if program is not None:
            error.add_note(f"{program.world.config}\n{program.world.describe()}")
        raise


def say(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """`make chaos`: many seeds, their progress and totals; the exit code says whether all held."""
    parser = argparse.ArgumentParser(description="many programs by chance against one queue each")
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None, help="run this one alone, and show its error")
    options = parser.parse_args()
    logging.getLogger("batchqueue_async").setLevel(logging.CRITICAL)
    if options.seed is not None:
        run_seed(options.seed)
        say(f"seed {options.seed}: every guarantee held")
        return 0
    began, items, broken = time.monotonic(), 0, []
    for done, seed in enumerate(range(options.first, options.first + options.seeds), 1):
        try:
            items += run_seed(seed).queue.stats().accepted
        except Exception as error:
            broken.append(seed)
            reason = "".join(traceback.format_exception_only(error)).splitlines()[0]
            say(f"seed {seed}: {reason}\n  replay: make chaos SEED={seed}")
        if len(broken) >= MOST_SHOWN:
            say("too many violations to go on")
            break
        if done % max(1, options.seeds // 20) == 0:
            spent = time.monotonic() - began
            say(f"{done} seeds, {items} items, {len(broken)} violations, {spent:.0f} s")
    say(f"total: {options.seeds} seeds, {items} items, {len(broken)} violations {broken}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
