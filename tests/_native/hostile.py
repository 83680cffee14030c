"""Hostile objects against the compiled hot path, at random: run by `make test-native` with sanitizers."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import sys
import threading
import time
import warnings
from contextlib import suppress
from typing import Any

import batchqueue_async as bq
from batchqueue_async import _native


class OddHashError(Exception):
    """What a metaclass raises."""


class Odd(type):
    """A metaclass whose hash and comparison raise, call back, or change what is being looked at."""

    act: Any = None

    def __hash__(cls) -> int:
        Odd.happen()
        return type.__hash__(cls) if cls.__name__ < "O5" else type.__hash__(int)

    def __eq__(cls, other: object) -> bool:
        Odd.happen()
        return cls is other

    @staticmethod
    def happen() -> None:
        act, Odd.act = Odd.act, None
        if act is not None:
            act()


class Dying:
    """An item whose end calls back."""

    def __del__(self) -> None:
        Odd.happen()


KINDS: list[Any] = [Odd(f"O{number}", (Dying,) if number % 2 else (), {}) for number in range(10)]
KINDS += [int, str, list, Dying, object, type(None)]


class Hostility:
    """One queue, and everything that can be done to it at the wrong moment."""

    def __init__(self, rng: random.Random, queue: bq.BatchQueue[Any]) -> None:
        self.rng, self.queue = rng, queue
        self.kept: list[Any] = []
        self.batch: list[Any] = []
        self.tables: list[Any] = []

    def item(self) -> Any:
        return self.rng.choice(KINDS)()

    def later(self) -> None:
        """Let something happen at the next look-up or finalizer."""
        acts = [self.nowait, self.many, self.drop, self.empty, self.collect, self.raising, self.handlers, self.call]
        Odd.act = self.rng.choice(acts)

    def raising(self) -> None:
        raise OddHashError

    def drop(self) -> None:
        self.kept.clear()

    def empty(self) -> None:
        self.batch.clear()

    def collect(self) -> None:
        gc.collect()

    def handlers(self) -> None:
        kind = self.rng.choice(KINDS)
        if self.rng.random() < 0.5:
            self.queue.remove_handler(kind)
        else:
            self.queue.add_handler(kind, ignore)

    def nowait(self) -> None:
        self.queue.produce_nowait(self.item())

    def many(self) -> None:
        self.batch = [self.item() for _ in range(self.rng.randint(0, 9))]
        self.queue.produce_many_nowait(self.batch)

    def call(self) -> None:
        """A coroutine that is kept, closed, stepped or dropped."""
        call: Any = self.queue.produce(self.item())
        way = self.rng.randrange(7)
        if way == 0:
            self.kept.append(call)
        elif way == 1:
            call.close()
        elif way == 2:
            call.throw(OddHashError)
        elif way == 3:
            with suppress(StopIteration):  # amid another coroutine it would be a RuntimeError of that one
                call.send(None)
        elif way == 4:
            self.kept += [call, asyncio.ensure_future(call)]
        elif way == 5:
            self.kept.append([call])
            self.kept[-1].append(self.kept)

    def steps(self) -> None:
        """The module's own functions, with whatever there is."""
        function = self.rng.choice([_native.put_run, _native.sort_run])
        values: list[Any] = [[], None, 3, self.item(), _native.Place(), ()]
        known: dict[Any, Any] = self.rng.choice([dict, _native.TypeTable])()
        for _ in range(self.rng.randint(0, 5)):
            known[self.rng.choice(KINDS)] = self.rng.choice(values)
        self.tables.append(known)
        if self.rng.random() < 0.3:  # what was looked up in it may be gone by now
            known = self.rng.choice(self.tables)
            known.pop(self.rng.choice(KINDS), None)
        if self.rng.random() < 0.1:
            self.rng.choice(self.tables).clear()
            self.tables = []
        self.batch = [self.item() for _ in range(self.rng.randint(0, 9))]
        function(known, self.rng.choice([self.batch, tuple(self.batch)]), self.rng.randint(0, 3))
        _native.one_type(self.batch)

    def fields(self) -> None:
        """A place whose fields are anything."""
        place: Any = _native.Place()
        values: list[Any] = [[], (), 5, self.item(), _native.Countdown(None, 3), iter(())]
        with suppress(AttributeError):
            place.tail = self.rng.choice(values)
            place.fast_slots = self.rng.choice(values)
            del place.tail
        entrance: Any = _native.Entrance()
        entrance._thread = threading.get_ident()
        entrance._only = self.rng.choice([None, place, *values])
        table: Any = _native.TypeTable()
        table[self.rng.choice(KINDS)] = place
        entrance._by_type = self.rng.choice([None, {}, {self.rng.choice(KINDS): place}, table, *values])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bq.BatchQueue.produce_nowait(entrance, self.item())
        some: list[Any] = [[], (1, 2), [self.item()], 5]
        _native.put_together(self.rng.choice([place, *values]), self.rng.choice(some))

    async def step(self) -> None:
        if self.rng.random() < 0.5:
            self.later()
        act = self.rng.choice([self.nowait, self.many, self.call, self.steps, self.fields, self.handlers, self.drop])
        with suppress(OddHashError, StopIteration, AttributeError, TypeError, RuntimeError, bq.BatchQueueError):
            act()
        if self.rng.random() < 0.2:
            with suppress(OddHashError, TimeoutError):
                await asyncio.wait_for(self.queue.produce(self.item()), 0.01)


async def ignore(batch: list[Any]) -> None:
    """Handle nothing."""


async def run_seed(seed: int) -> int:
    """One queue's life; how many items came in."""
    rng = random.Random(seed)
    partitions = rng.choice([bq.PartitionPolicy.fixed(1), bq.PartitionPolicy.fixed(4), bq.PartitionPolicy.adaptive()])
    config: bq.QueueConfig[Any] = bq.QueueConfig(
        partitions=partitions,
        buffer_size=rng.choice([1, 3, 50]),
        overflow=rng.choice(["block", "reject"]),
        fallback=ignore,
    )
    queue: bq.BatchQueue[Any] = bq.BatchQueue(f"hostile-{seed}", config)
    world = Hostility(rng, queue)
    for _ in range(200):
        await world.step()
        if rng.random() < 0.1:
            await asyncio.sleep(0)
    Odd.act = None
    report = await queue.shutdown(5)
    stats = queue.stats()
    outcomes = stats.handled + stats.failed + stats.unhandled + stats.dropped_after + len(report.undelivered)
    assert stats.accepted == outcomes, f"seed {seed}: {stats} {report}"
    return stats.accepted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("batchqueue_async").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None
    until = time.monotonic() + options.seconds
    seed, items = options.first, 0
    while time.monotonic() < until:
        try:
            items += asyncio.run(run_seed(seed))
        except BaseException:
            sys.stderr.write(f"seed {seed}: --first {seed} begins with it\n")
            raise
        seed += 1
    sys.stdout.write(f"compiled {bq.accelerated}: {seed - options.first} seeds, {items} items, nothing broke\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
