"""The engine of the throughput rows: bursts of items, each case on a fresh loop, cases in turns."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .loops import LOOP_FACTORIES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from .model import Samples, Sizes

BASELINE = "deque.append and one list()"
# A refused item would leave its burst waiting for ever; this turns it into an error.
BLOCK_TIMEOUT = 60.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The items of one burst, made once: the cases only move references."""

    items: list[Any]
    types: list[type]
    chunks: list[list[Any]]


def make_workload(count: int, types: int, chunk: int, prefix: str = "Metric") -> Workload:
    """`count` items, equally many of each type, shuffled by a fixed seed."""
    classes = [type(f"{prefix}{number}", (), {"__slots__": ("value",)}) for number in range(types)]
    order = [classes[number % types] for number in range(count)]
    random.Random(20_240_229).shuffle(order)
    # made in the order of their use, as a producer's items are: shuffled memory would measure the caches
    items = [kind() for kind in order]
    return Workload(items=items, types=classes, chunks=[items[at : at + chunk] for at in range(0, count, chunk)])


class Burst(Protocol):
    """`prepare` is outside the measured time, `run` returns when the last item has been handled."""

    def prepare(self) -> None: ...
    async def run(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to move a burst from a producer to a consumer."""

    name: str
    workload: str
    open: Callable[[Workload], AbstractAsyncContextManager[Burst]]
    subject: bool = False


class Gate:
    """Tells the producer that the last item of its burst has been handled, as cheaply as can be."""

    __slots__ = ("done", "goal", "seen")

    def __init__(self) -> None:
        self.goal = self.seen = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def arm(self, goal: int) -> None:
        """Expect `goal` items from now on."""
        self.goal = goal
        self.seen = 0
        self.done = asyncio.get_running_loop().create_future()

    def handler(self) -> Callable[[Sequence[Any]], Any]:
        """A handler that does nothing but count; a new one at each call, as each type has its own."""

        async def handle(batch: Sequence[Any]) -> None:
            self.seen += len(batch)
            if self.seen == self.goal:
                self.done.set_result(None)

        return handle


class _BaselineBurst:
    """The limit for pure Python: what no queue of Python objects can go below, item by item."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._deque: deque[Any] = deque()

    def prepare(self) -> None:
        self._deque.clear()

    async def run(self) -> None:
        append = self._deque.append
        for item in self._items:
            append(item)
        list(self._deque)


@asynccontextmanager
async def _open_baseline(workload: Workload) -> AsyncIterator[Burst]:
    yield _BaselineBurst(workload.items)


def baseline(name: str = BASELINE, workload: str = "one") -> Case:
    """The bare loop, over a workload's items."""
    return Case(name=name, workload=workload, open=_open_baseline)


def measure_cases(cases: Sequence[Case], workloads: dict[str, Workload], sizes: Sizes, loop: str) -> Samples:
    """Seconds per item of every burst of every case; the cases take turns, so that noise hits all of them."""
    samples: Samples = {case.name: [] for case in cases}
    gc.enable()
    for block in range(sizes.blocks):
        turn = block % len(cases)
        for case in (*cases[turn:], *cases[:turn]):
            with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop]) as runner:
                samples[case.name] += runner.run(_block(case, workloads[case.workload], sizes))
    return samples


async def _block(case: Case, workload: Workload, sizes: Sizes) -> list[float]:
    seconds: list[float] = []
    large = len(workload.items) > sizes.burst
    bursts, warmup = (sizes.large_bursts, 1) if large else (sizes.bursts, sizes.warmup)
    async with asyncio.timeout(BLOCK_TIMEOUT), case.open(workload) as burst:
        enough = time.perf_counter() + sizes.turn_seconds
        for number in range(-warmup, bursts):
            if number >= sizes.fewest_bursts and time.perf_counter() > enough:
                break  # a peer that is a hundred times slower need not take the whole afternoon
            if number == 0:
                gc.collect()
            burst.prepare()
            start = time.perf_counter()
            await burst.run()
            elapsed = time.perf_counter() - start
            if number >= 0:
                seconds.append(elapsed / len(workload.items))
    return seconds
