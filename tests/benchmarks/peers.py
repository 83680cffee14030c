"""The queues that users would otherwise take, each in its own natural way of one producer and one consumer task."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from .bursts import Case, Gate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from types import ModuleType

    from .bursts import Burst, Workload

CAPACITY = 10_000
ASYNCIO_PUT = "asyncio.Queue put/get"


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A peer's two ends: one of `put` and `put_nowait`, and `get` unless the peer calls a handler itself."""

    put: Callable[[Any], Awaitable[object]] | None = None
    put_nowait: Callable[[Any], object] | None = None
    get: Callable[[], Awaitable[Any]]


class _PeerBurst:
    def __init__(self, ends: Ends, workload: Workload, gate: Gate) -> None:
        self._ends = ends
        self._items = workload.items
        self._gate = gate

    def prepare(self) -> None:
        self._gate.arm(len(self._items))

    async def run(self) -> None:
        if self._ends.put_nowait is not None:
            put_nowait = self._ends.put_nowait
            for item in self._items:
                put_nowait(item)
        elif self._ends.put is not None:
            put = self._ends.put
            for item in self._items:
                await put(item)
        await self._gate.done


async def _consume(get: Callable[[], Awaitable[Any]], gate: Gate, burst: int) -> None:
    while True:
        for _ in range(burst):
            await get()
        gate.done.set_result(None)


def _peer(name: str, make_ends: Callable[[], Ends], workload: str = "one") -> Case:
    @asynccontextmanager
    async def open_case(items: Workload) -> AsyncIterator[Burst]:
        gate = Gate()
        ends = make_ends()
        consumer = asyncio.create_task(_consume(ends.get, gate, len(items.items)))
        try:
            yield _PeerBurst(ends, items, gate)
        finally:
            consumer.cancel()
            await asyncio.wait([consumer])

    return Case(name=name, workload=workload, open=open_case)


def _asyncio_put() -> Ends:
    queue: asyncio.Queue[Any] = asyncio.Queue(CAPACITY)
    return Ends(put=queue.put, get=queue.get)


def _asyncio_put_nowait() -> Ends:
    queue: asyncio.Queue[Any] = asyncio.Queue(CAPACITY)
    return Ends(put_nowait=queue.put_nowait, get=queue.get)


@asynccontextmanager
async def _open_anyio(items: Workload, *, nowait: bool) -> AsyncIterator[Burst]:
    gate = Gate()
    send, receive = anyio.create_memory_object_stream[Any](CAPACITY)
    consumer = asyncio.create_task(_consume(receive.receive, gate, len(items.items)))
    with send, receive:
        try:
            ends = Ends(put=send.send, put_nowait=send.send_nowait if nowait else None, get=receive.receive)
            yield _PeerBurst(ends, items, gate)
        finally:
            consumer.cancel()
            await asyncio.wait([consumer])


def _anyio(name: str, *, nowait: bool, workload: str) -> Case:
    return Case(name=name, workload=workload, open=lambda items: _open_anyio(items, nowait=nowait))


def _flushq(module: ModuleType, workload: str) -> Case:
    @asynccontextmanager
    async def open_case(items: Workload) -> AsyncIterator[Burst]:
        gate = Gate()
        policy = module.NaturalPolicy(max_records=CAPACITY)
        async with module.FlushQueue(gate.handler(), policy, max_queue_size=CAPACITY) as queue:
            yield _PeerBurst(Ends(put=queue.enqueue, get=asyncio.Event().wait), items, gate)

    return Case(name="flushq enqueue/flush_fn", workload=workload, open=open_case)


def _installed(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def waiting_peers(workload: str = "one") -> list[Case]:
    """Peers whose producer awaits each put."""
    cases = [_peer(ASYNCIO_PUT, _asyncio_put, workload), _anyio("anyio send/receive", nowait=False, workload=workload)]
    if culsans := _installed("culsans"):

        def culsans_ends() -> Ends:
            queue = culsans.Queue(CAPACITY)
            return Ends(put=queue.async_q.put, get=queue.async_q.get)

        cases.append(_peer("culsans async_q put/get", culsans_ends, workload))
    if aiologic := _installed("aiologic"):

        def aiologic_ends() -> Ends:
            queue = aiologic.Queue(CAPACITY)
            return Ends(put=queue.async_put, get=queue.async_get)

        cases.append(_peer("aiologic.Queue async_put/async_get", aiologic_ends, workload))
    if flushq := _installed("flushq"):
        cases.append(_flushq(flushq, workload))
    return cases


def nowait_peers(workload: str = "one") -> list[Case]:
    """asyncio.Queue's put/get, which the target is about, and the peers that can put without waiting."""
    cases = [
        _peer(ASYNCIO_PUT, _asyncio_put, workload),
        _peer("asyncio.Queue put_nowait/get", _asyncio_put_nowait, workload),
        _anyio("anyio send_nowait/receive", nowait=True, workload=workload),
    ]
    if culsans := _installed("culsans"):

        def culsans_ends() -> Ends:
            queue = culsans.Queue(CAPACITY)
            return Ends(put_nowait=queue.async_q.put_nowait, get=queue.async_q.get)

        cases.append(_peer("culsans async_q put_nowait/get", culsans_ends, workload))
    if aiologic := _installed("aiologic"):

        def aiologic_ends() -> Ends:
            queue = aiologic.SimpleQueue()
            return Ends(put_nowait=queue.put, get=queue.async_get)

        cases.append(_peer("aiologic.SimpleQueue put/async_get", aiologic_ends, workload))
    if flushq := _installed("flushq"):
        cases.append(_flushq(flushq, workload))
    return cases


def missing_peers() -> dict[str, str]:
    """Which peers are left out, and why."""
    ways = {
        "culsans": "not installed; `make bench` installs the group `bench`",
        "aiologic": "not installed; `make bench` installs the group `bench`",
        "flushq": "not installed; it needs Python 3.12 or newer: make bench PYTHON=python3.12",
    }
    return {name: why for name, why in ways.items() if _installed(name) is None}
