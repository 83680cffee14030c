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


class Key:
    """A key whose hash and whose end call back."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        Odd.happen()
        return self.number

    def __del__(self) -> None:
        Odd.happen()


def key_of(item: Any) -> Any:
    """Few keys, some of which can't be hashed."""
    Odd.happen()
    number = hash(type(item).__name__) % 23
    return [] if number == 22 else Key(number - 11)


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
        Odd.act = self.rng.choice([*acts, self.stopping, self.router_fields, self.grow])

    def stopping(self) -> None:
        raise StopIteration

    def grow(self) -> None:
        """Partitions for more handlers, where the queue is adaptive; and the list that is being put in gets longer."""
        self.queue.add_handler(type("More", (), {}), ignore, 2)
        self.batch += [self.item()]

    def router_fields(self) -> None:
        """The fields of the router that are objects, for a moment of any class; the queue goes on with its own."""
        router: Any = self.queue._router
        name = self.rng.choice(["_key", "_turns", "_fences"])
        before = getattr(router, name)
        try:
            setattr(router, name, self.rng.choice([None, 5, [], (), {}, key_of, self.item(), _native.Turns()]))
            if self.rng.random() < 0.2:
                delattr(router, name)
            with suppress(Exception):  # whatever the Python makes of it
                self.nowait()
        finally:
            setattr(router, name, before)

    def routes(self) -> None:
        """The steps for keys and for what threads have put in, with whatever there is."""
        router: Any = _native.RouterFields()
        places: list[Any] = [_native.Place(), _native.PartitionFields(), None, 5, self.queue._router.partitions[0]]
        if _native.RouterFields.__dict__.get("_key") is not None:  # compiled
            router._key = self.rng.choice([None, key_of, 5])
            router.partitions = self.rng.choices(places, k=self.rng.randint(0, 5))
            router._width = self.rng.choice([-1, 0, 2, 5])
            router._fences = self.rng.choice([[], [1], None])
            router._turns = self.rng.choice([None, _native.Turns(2**64 - 1), iter(())])
        self.batch = [self.item() for _ in range(self.rng.randint(0, 9))]
        _native.key_parts(router, self.rng.choice([self.batch, tuple(self.batch), 5]))
        entrance: Any = _native.Entrance()
        entrance._thread = threading.get_ident()
        entrance._only = entrance._by_type = None
        entrance._router = router
        table: Any = _native.TypeTable()
        partition: Any = _native.PartitionFields()
        lane: Any = _native.LaneFields()
        with suppress(AttributeError):
            partition.lanes = self.rng.choice([{lane: None}, None, []])
            partition.held, partition._in_lanes = 9, 0
            lane.partition = self.rng.choice([partition, None])
            lane.tail = self.rng.choice([[], self.batch, None])
            lane.asleep = self.rng.random() < 0.2
        for kind in self.rng.sample(KINDS, 5):
            table[kind] = self.rng.choice([lane, lane, lane, 5, self.batch])
        for _ in range(3):
            _native.put_held(table, partition, self.batch)
            _native.sort_run(table, self.batch, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bq.BatchQueue.produce_nowait(entrance, self.item())

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
        acts = [self.nowait, self.many, self.call, self.steps, self.fields, self.handlers, self.drop, self.routes]
        act = self.rng.choice([*acts, self.router_fields])
        with suppress(
            OddHashError, StopIteration, LookupError, AttributeError, TypeError, RuntimeError, bq.BatchQueueError
        ):
            act()
        if self.rng.random() < 0.2:
            with suppress(OddHashError, TimeoutError, TypeError, RuntimeError, AttributeError):
                await asyncio.wait_for(self.queue.produce(self.item()), 0.01)


async def ignore(batch: list[Any]) -> None:
    """Handle nothing."""


def from_a_thread(queue: bq.BatchQueue[Any], seed: float) -> None:
    """Lists of many types through the bridge, one of which the thread and a finalizer may change."""
    rng = random.Random(seed)
    bridge = queue.bridge()
    for _ in range(20):
        items = [rng.choice(KINDS)() for _ in range(rng.randint(0, 40))]
        with suppress(Exception):
            bridge.produce_many(items)
        with suppress(Exception):
            bridge.produce_many(items[:5], timeout=0.001)


async def run_seed(seed: int) -> int:
    """One queue's life; how many items came in."""
    rng = random.Random(seed)
    partitions = rng.choice([bq.PartitionPolicy.fixed(1), bq.PartitionPolicy.fixed(4), bq.PartitionPolicy.adaptive()])
    config: bq.QueueConfig[Any] = bq.QueueConfig(
        partitions=partitions,
        buffer_size=rng.choice([1, 3, 50]),
        overflow=rng.choice(["block", "reject"]),
        selector=rng.choice([bq.type_hash, bq.round_robin, lambda: bq.by_key(key_of)])(),
        fallback=ignore,
    )
    queue: bq.BatchQueue[Any] = bq.BatchQueue(f"hostile-{seed}", config)
    world = Hostility(rng, queue)
    threads = [threading.Thread(target=from_a_thread, args=(queue, rng.random())) for _ in range(rng.choice([0, 0, 2]))]
    for thread in threads:
        thread.start()
    for _ in range(200):
        await world.step()
        if rng.random() < 0.1:
            await asyncio.sleep(0)
    Odd.act = None
    for thread in threads:
        await asyncio.to_thread(thread.join)
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
    for name in ("batchqueue_async", "asyncio"):  # of tasks that nobody looks at again, among others
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
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
