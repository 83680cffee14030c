"""What takes part in the programs against a queue: items, handlers that behave well and badly, a balancer by chance."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import batchqueue_async as bq

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from queue_world import World


class Item:
    def __init__(self, producer: int, number: int, key: int) -> None:
        self.producer, self.number, self.key = producer, number, key

    def __repr__(self) -> str:
        return f"{type(self).__name__}(p{self.producer} #{self.number} k{self.key})"


class OopsError(Exception):
    """What a failing handler or selector raises."""


class HashError(OopsError):
    """What a class raises that can't be hashed now."""


class MoodyHash(type):
    """A class whose hash raises now and then, if it is the library that asks for it; `rng` says when."""

    rng: random.Random | None = None

    def __hash__(cls) -> int:
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        if MoodyHash.rng is not None and asked_by.startswith("batchqueue_async.") and MoodyHash.rng.random() < 0.06:
            raise HashError
        return type.__hash__(cls)


class Even(Item):
    pass


class Odd(Item):
    pass


MOST_BYTES = 5
"""What an item of the programs takes at the most."""


def size_of(item: Item) -> int:
    """What an item takes, where there is a bound by bytes."""
    return (3 * item.number + item.key) % (MOST_BYTES + 1)


KINDS: list[type[Item]] = [
    (MoodyHash if index > 3 else type)(f"K{index}", (Odd if index % 2 else Even,), {}) for index in range(6)
]
CLASSES: list[type] = [*KINDS, Even, Odd]


class Handler:
    """A handler under the model's eyes; `mode` says how its next calls go."""

    def __init__(self, world: World, label: str) -> None:
        self.world, self.label = world, label
        self.mode = "ok"
        self.delay = 0.1
        self.gate = asyncio.Event()
        self.max_batch = world.config.max_batch if world.ready else world.options["max_batch"]
        self.closes = 0

    async def consume(self, batch: list[Item]) -> None:
        world = self.world
        call = world.call_begins(self, batch)
        try:
            await self._act(self.mode, batch)
            batch.clear()  # the list is the handler's own
        except BaseException as error:
            world.call_ends(call, good=False, again=isinstance(error, bq.RetryableError))
            raise
        world.call_ends(call, good=True)

    async def _act(self, mode: str, batch: list[Item]) -> None:
        if mode == "turn":
            await asyncio.sleep(0)
        elif mode in ("slow", "fail"):
            await asyncio.sleep(self.delay)
            if mode == "fail":
                raise OopsError
        elif mode == "cancelled":
            await asyncio.sleep(0)
            raise asyncio.CancelledError
        elif mode == "hang":
            await self.gate.wait()
        elif mode == "stubborn":
            await self._stubborn()
        elif mode == "produce":
            await self.world.produce_from_handler(batch)
        elif mode == "retry":
            await self._retry()
        elif mode in ("cancels itself", "cancels itself unseen"):
            await self._cancel_itself(wait=mode == "cancels itself")
        elif mode == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fail())
                group.create_task(asyncio.sleep(self.delay))

    async def _retry(self) -> None:
        rng = self.world.rng
        try:
            await asyncio.sleep(rng.choice([0, self.delay]))
        except asyncio.CancelledError:
            if rng.random() < 0.5:
                raise
        if rng.random() < 0.6:
            raise bq.RetryableError("not now", retry_after=rng.choice([None, None, 0.2, float("inf"), -1.0]))

    async def _cancel_itself(self, *, wait: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if wait:
            await asyncio.sleep(self.delay)

    async def _fail(self) -> None:
        await asyncio.sleep(0)
        raise OopsError

    async def _stubborn(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self.delay
        while loop.time() < end:
            try:
                await asyncio.sleep(end - loop.time())
            except asyncio.CancelledError:
                continue


class IdleHandler(Handler):
    async def on_idle(self) -> None:
        world = self.world
        draining = any(worker.closing for worker in world.parts._drains)
        world.expect(not draining, f"on_idle of {self.label} in the final drain")
        world.expect(all(each.handler is not self for each in world.calls), f"on_idle of {self.label} beside its call")
        world.idle.add(self)
        try:
            await asyncio.sleep(0)
        finally:
            world.idle.discard(self)


class ClosingHandler(Handler):
    async def on_close(self) -> None:
        world = self.world
        self.closes += 1
        world.expect(self.closes == 1, f"{self.label} was closed {self.closes} times")
        world.expect(all(each.handler is not self for each in world.calls), f"{self.label} was closed in its call")
        world.expect(not world.over, f"{self.label} was closed after the end")
        await asyncio.sleep(world.rng.choice([0, 0, 0.1]))
        if world.rng.random() < 0.3:
            raise world.rng.choice([OopsError, asyncio.CancelledError])


class Call:
    def __init__(self, handler: Handler, batch: list[Item]) -> None:
        self.handler, self.batch = handler, list(batch)


class RandomBalancer:
    """Sends partitions to any worker; `wanted` overrules chance once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def assign(self, throughput: Sequence[int], owners: Sequence[int], workers: int) -> list[int] | None:
        if self.rng.random() < 0.1:
            return None
        return [self.rng.randrange(workers) if self.rng.random() < 0.6 else owner for owner in owners]


class ViolationError(AssertionError):
    """A guarantee that did not hold."""


def draw_options(rng: random.Random) -> dict[str, Any]:
    """A configuration by chance; the state machine draws its own."""
    workers = rng.randint(1, 4)
    single = rng.random() < 0.25
    buffer_bytes = rng.choice([None, None, None, rng.randint(MOST_BYTES, 4 * MOST_BYTES)])
    partitions = rng.choice(
        [
            bq.PartitionPolicy.fixed(rng.randint(1, 5)),
            bq.PartitionPolicy.worker_multiply(rng.randint(1, 2)),
            bq.PartitionPolicy.adaptive(),
            bq.PartitionPolicy.adaptive(),
        ]
    )
    return {
        "workers": bq.WorkerPolicy.fixed(workers),
        "partitions": partitions,
        "selector": rng.choice(["type_hash", "type_hash", "by_key", "by_key", "round_robin", "custom", "moody"]),
        "buffer_size": rng.randint(1, 8),
        "buffer_bytes": buffer_bytes,
        "size_of": None if buffer_bytes is None else size_of,
        "strategy": rng.choice([*bq.BufferStrategy, bq.BufferStrategy.BLOCKING, bq.BufferStrategy.BLOCKING]),
        "block_timeout": rng.choice([None, None, 0.2]),
        "max_batch": rng.randint(1, 5),
        "linger": rng.choice([0.0, 0.0, 0.3]),
        "handler_timeout": rng.choice([None, None, 0.5]),
        "single": single,
        "fallback": rng.random() < 0.5,
        "balanced": rng.random() < 0.5,
        "on_idle": rng.random() < 0.2,
        "on_close": rng.random() < 0.5,
        "moody_hash": rng.random() < 0.3,
        "handler_options": rng.random() < 0.5,
        "retry": bq.HandlerRetry(initial=rng.choice([0.001, 0.1, 1.0]), max_attempts=rng.randint(1, 4)),
    }
