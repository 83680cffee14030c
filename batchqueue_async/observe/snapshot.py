"""Everything of the process that has statistics, read at one moment, from any thread and without asking a loop."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import forks
from batchqueue_async._support.registry import registered
from batchqueue_async._support.reloads import reloads
from batchqueue_async.config import BufferStrategy
from batchqueue_async.observe.letter_requests import own_sockets
from batchqueue_async.observe.loop_beats import beats

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from batchqueue_async._support.registry import Registered
    from batchqueue_async._support.reloads import Reload
    from batchqueue_async.bridge.stats import BridgeStats
    from batchqueue_async.durable.stats import DurableStats
    from batchqueue_async.export.stats import ExporterStats
    from batchqueue_async.observe.rates import ExporterRates
    from batchqueue_async.queue.stats import CloseUp, QueueStats
    from batchqueue_async.runtime.manager import BatchQueueManager

MOST_PARTITIONS = 64
"""Partitions of a queue that a page shows."""
STARTED = time.time()
"""When this process began to be watched, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """A queue at one moment.

    Attributes:
        name: its name; where two queues of the process have the same, the later one's has a number.
        stats: its numbers.
        closed: whether it takes nothing any more.
        waits: whether producers wait for room, so that a full queue loses and refuses nothing.
        loop: the name of its loop.
        consumer: the exporter that is its handler, by name; None where it is another.
        feeds: the queues into which its handlers produce.
        close_up: what the page shows of it besides; None where it was not asked for.
    """

    name: str
    stats: QueueStats
    closed: bool = False
    waits: bool = True
    loop: str = "main"
    consumer: str | None = None
    feeds: tuple[str, ...] = ()
    close_up: CloseUp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterView:
    """An exporter at one moment.

    Attributes:
        name: its name.
        sink: the class of its sink.
        stats: its numbers.
        rates: what comes in and is delivered per second, and what follows from that; None before the second look.
        overflow: what happens when its send queue is full.
        on_disk: whether its send queue is on disk.
        closed: whether it takes nothing any more.
        loop: the name of its loop.
    """

    name: str
    sink: str
    stats: ExporterStats
    rates: ExporterRates | None = None
    overflow: str = "drop_oldest"
    on_disk: bool = False
    closed: bool = False
    loop: str = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskView:
    """A durable queue at one moment: an exporter's, whose name it has, or one that is used by itself."""

    name: str
    stats: DurableStats


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeView:
    """A bridge at one moment."""

    name: str
    stats: BridgeStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerView:
    """A consumer of a broker at one moment, with the statistics that it gives."""

    name: str
    kind: str
    stats: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkQueryView:
    """One query of a Spark pipeline at one moment."""

    pipeline: str
    name: str
    progress: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopView:
    """An event loop at one moment.

    Attributes:
        name: its thread's name, "main" for the main thread.
        lag: seconds by which it is late.
    """

    name: str
    lag: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """The process at one moment.

    Example:
        >>> import asyncio, batchqueue_async as bq
        >>> async def main() -> list[str]:
        ...     async with bq.BatchQueueManager() as manager:
        ...         manager.create("spans", bq.QueueConfig())
        ...         return [queue.name for queue in take_snapshot(manager).queues]
        >>> asyncio.run(main())
        ['spans']

    Attributes:
        at: when it was taken, in seconds since the epoch.
        started: when the process began to be watched.
        version: that of this library; python: that of Python.
        pid: the process's number.
        queues: what there is, in the order in which it was made; likewise exporters, disks, bridges, consumers,
            queries and loops.
        unreadable: what could not be read, as "kind/name".
        reload: the last reading of the service's file; None where there is none.
        reload_taken: the last one that was taken.
        commands: whether commands of the same user can put dead letters back while it runs.
    """

    at: float
    started: float = STARTED
    version: str = ""
    python: str = ""
    pid: int = 0
    queues: tuple[QueueView, ...] = ()
    exporters: tuple[ExporterView, ...] = ()
    disks: tuple[DiskView, ...] = ()
    bridges: tuple[BridgeView, ...] = ()
    consumers: tuple[ConsumerView, ...] = ()
    queries: tuple[SparkQueryView, ...] = ()
    loops: tuple[LoopView, ...] = ()
    unreadable: tuple[str, ...] = field(default=())
    reload: Reload | None = None
    reload_taken: Reload | None = None
    commands: bool = False


class Names:
    """A name of its own for each thing of a kind: a later one of the same name gets a number, and keeps it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[tuple[str, str], weakref.ref[Any]] = {}
        self._given: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child there is nothing that had a name."""
        self._lock = threading.Lock()
        self._taken = {}
        self._given = weakref.WeakKeyDictionary()

    def of(self, things: list[Registered]) -> list[str]:
        """The names of everything that there is; those of other things are free from now on."""
        with self._lock:
            self._free({id(each.thing) for each in things})
            return [self._given.get(each.thing) or self._give(each) for each in things]

    def _give(self, each: Registered) -> str:
        kind, name, thing = each
        given, number = name, 1
        while (kind, given) in self._taken and self._taken[kind, given]() not in {None, thing}:
            number += 1
            given = f"{name}#{number}"
        self._taken[kind, given] = weakref.ref(thing)
        self._given[thing] = given
        return given

    def _free(self, there: set[int]) -> None:
        for key, reference in list(self._taken.items()):
            thing = reference()
            if thing is None or id(thing) not in there:
                del self._taken[key]
                if thing is not None:
                    self._given.pop(thing, None)


_names = Names()


def named_registered() -> list[tuple[str, Registered]]:
    """Everything of the process, with the name that snapshots have for it: unique among those of its kind."""
    everything = registered()
    return list(zip(_names.of(everything), everything, strict=True))


def take_snapshot(
    manager: BatchQueueManager | None = None,
    *,
    rates: Callable[[str, ExporterStats, float], ExporterRates | None] | None = None,
    closer: Callable[[str], bool] | None = None,
) -> ProcessSnapshot:
    """Read everything of the process that has statistics.

    Args:
        manager: whose queues are shown; those of every manager when None.
        rates: computes an exporter's rates from its name, its numbers and the time.
        closer: for a page: of each queue its totals, and of these, by name, what a page shows of them besides.
    """
    now = time.time()
    only = None if manager is None else set(manager.queues())
    named = [
        (name, each) for name, each in named_registered() if only is None or each.kind != "queue" or each.thing in only
    ]
    reader = _Reader(now, rates, closer, {id(each.thing): name for name, each in named if each.kind == "exporter"})
    for name, each in named:
        try:
            reader.read(each.kind, name, each.thing)
        except Exception:  # noqa: BLE001 - one thing that has just ended, or a consumer's own fault, hides no other
            reader.unreadable.append(f"{each.kind}/{name}")
    return reader.snapshot()


class _Reader:
    """Collects the views of one snapshot."""

    def __init__(self, now: float, rates: Any, closer: Callable[[str], bool] | None, exporters: dict[int, str]) -> None:
        self._now = now
        self._rates = rates
        self._closer = closer
        self._names_of_exporters = exporters
        self._loops: dict[int, tuple[str, float]] = {}
        self._queues: list[QueueView] = []
        self._exporters: list[ExporterView] = []
        self._disks: list[DiskView] = []
        self._own_disks: list[DiskView] = []
        self._paths: set[str] = set()
        self._bridges: list[BridgeView] = []
        self._consumers: list[ConsumerView] = []
        self._queries: list[SparkQueryView] = []
        self.unreadable: list[str] = []

    def read(self, kind: str, name: str, thing: Any) -> None:
        """Read one thing."""
        loop = self._loop_name(thing)
        if kind == "queue":
            self._queues.append(self._queue(name, thing, loop))
        elif kind == "exporter":
            self._exporter(name, thing, loop)
        elif kind == "durable_queue":
            self._paths_of(name, thing)
        elif kind == "bridge":
            self._bridges.append(BridgeView(name=name, stats=thing.peek()))
        elif kind == "pipeline":
            self._queries += [SparkQueryView(pipeline=name, name=each.name, progress=each) for each in thing.peek()]
        elif kind == "consumer":
            self._consumers.append(ConsumerView(name=name, kind=type(thing).__name__, stats=thing.peek()))

    def _loop_name(self, thing: Any) -> str:
        """The name of a thing's loop, which is asked how late it is: once in a snapshot."""
        loop: asyncio.AbstractEventLoop | None = getattr(thing, "loop", None)
        if loop is None:
            return ""
        found = self._loops.get(id(loop))
        if found is None:
            beat = beats.of(loop)
            found = self._loops[id(loop)] = (beat.name or "main", beat.lag())
        return found[0]

    def _queue(self, name: str, thing: Any, loop: str) -> QueueView:
        config, closer = thing.config, self._closer
        return QueueView(
            name=name,
            stats=thing.peek(totals=closer is not None),
            close_up=thing.close_up(MOST_PARTITIONS) if closer is not None and closer(name) else None,
            closed=thing.closed,
            waits=config.strategy is BufferStrategy.BLOCKING,
            loop=loop,
            consumer=self._names_of_exporters.get(id(config.consumer)),
            feeds=tuple(config.feeds),
        )

    def _exporter(self, name: str, thing: Any, loop: str) -> None:
        stats: ExporterStats = thing.peek()
        self._exporters.append(
            ExporterView(
                name=name,
                sink=type(thing.sink).__name__,
                stats=stats,
                rates=None if self._rates is None else self._rates(name, stats, self._now),
                overflow=thing.config.overflow,
                on_disk=thing.config.path is not None,
                closed=thing.closed,
                loop=loop,
            )
        )
        if stats.durable is not None:
            self._disks.append(DiskView(name=name, stats=stats.durable))
            self._paths.add(os.path.realpath(thing.config.path))

    def _paths_of(self, name: str, thing: Any) -> None:
        # An exporter's own queue registers before the exporter does; which it is, is known at the end.
        self._own_disks.append(DiskView(name=os.path.realpath(thing.path), stats=thing.peek()))
        del name

    def snapshot(self) -> ProcessSnapshot:
        """What was read."""
        loops: dict[str, float] = {}
        for name, lag in self._loops.values():
            loops[name] = max(lag, loops.get(name, 0.0))
        return ProcessSnapshot(
            at=self._now,
            version=str(getattr(sys.modules["batchqueue_async"], "__version__", "")),
            python=sys.version.split()[0],
            pid=os.getpid(),
            queues=tuple(self._queues),
            exporters=tuple(self._exporters),
            disks=(*self._disks, *(disk for disk in self._own_disks if disk.name not in self._paths)),
            bridges=tuple(self._bridges),
            consumers=tuple(self._consumers),
            queries=tuple(self._queries),
            loops=tuple(LoopView(name=name, lag=lag) for name, lag in loops.items()),
            unreadable=tuple(self.unreadable),
            reload=reloads.last,
            reload_taken=reloads.taken,
            commands=bool(own_sockets),
        )
