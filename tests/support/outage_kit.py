"""An outage under load: an exporter sends through a fault proxy, which fails it in several ways, and then recovers.

The tests take seconds; `make chaos-export` a minute for each sink, by BATCHQUEUE_OUTAGE=60.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import batchqueue_async as bq
from batchqueue_async.export.config import BatchPolicy, BreakerPolicy, ExportConfig, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchqueue_async.export.stats import ExporterStats
    from batchqueue_async.sinks.base import Sink
    from batchqueue_async.testing import FaultProxy

SECONDS = float(os.environ.get("BATCHQUEUE_OUTAGE", "2"))
"""How long an outage is."""
LIMIT = 60.0 + SECONDS
"""Seconds without any progress after it that are too many."""
PATIENCE = max(0.5, SECONDS / 30)
"""Seconds that a sink gives a call: many fit into an outage, and a busy machine can connect within them."""
FAULTS = ("refuse", "half_open", "reset", "mute")
_PAUSE = 0.01


class Outage(NamedTuple):
    """What there is to check afterwards.

    Attributes:
        count: the records 0 to count - 1 were accepted.
        stats: the exporter's, after everything was flushed.
        latest: the longest time for which the event loop did not come round.
    """

    count: int
    stats: ExporterStats
    latest: float

    def check(self) -> None:
        """Nothing was lost on this side, the outage was one, and the loop did not wait for the line."""
        assert (self.stats.accepted, self.stats.delivered) == (self.count, self.count)
        assert (self.stats.dead_lettered, self.stats.dropped_after, self.stats.records) == (0, 0, 0)
        assert self.stats.retries > 0
        assert self.latest < max(SECONDS, 2.0) / 2


def config(**changes) -> ExportConfig:
    """An exporter in a hurry: the defaults leave a destination alone for longer than a test takes."""
    options = {
        "batch": BatchPolicy(max_records=100, linger=0.02),
        "retry": RetryPolicy(initial=0.05, max_delay=0.5),
        "breaker": BreakerPolicy(threshold=3, reset_timeout=0.2),
        "workers": bq.WorkerPolicy.fixed(4),
        "overflow": "block",
        "auth_pause": 0.1,
    }
    return ExportConfig(**(options | changes))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what nobody tells of."""
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(_PAUSE)


async def drained(exporter: bq.Exporter) -> None:
    """Wait until everything is delivered, for as long as there is any progress within the limit.

    What an outage of a minute leaves is much for a machine that is busy: in order by key a send is no larger than the
    number of keys.
    """
    while True:
        before = exporter.stats().delivered
        try:
            return await exporter.flush(timeout=LIMIT)
        except TimeoutError:
            if exporter.stats().delivered == before:
                raise


async def outage(
    sink: Sink,
    proxy: FaultProxy,
    record: Callable[[int], object] = lambda number: {"id": number},
    *,
    faults: Sequence[str] = FAULTS,
    **changes,
) -> Outage:
    """Send records all the time, let the line fail in each way in turn, then pass, and wait until all is delivered."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    numbers = itertools.count()
    latest = 0.0

    async def produce() -> None:
        while not over.is_set():
            await exporter.consume([record(next(numbers)) for _ in range(10)])
            await asyncio.sleep(_PAUSE)

    async def watch() -> None:
        nonlocal latest
        while not over.is_set():
            before = loop.time()
            await asyncio.sleep(_PAUSE)
            latest = max(latest, loop.time() - before - _PAUSE)

    async with bq.Exporter(sink, config(**changes)) as exporter, asyncio.TaskGroup() as group:
        producing = group.create_task(produce())
        group.create_task(watch())
        await until(lambda: exporter.stats().delivered > 0)
        for fault in faults:
            await proxy.switch(fault)
            await asyncio.sleep(SECONDS / len(faults))
        await proxy.switch("pass")
        over.set()
        await producing
        await drained(exporter)
        stats = exporter.stats()
    return Outage(next(numbers), stats, latest)


def arrived(count: int, found: Iterable[int], keys: Iterable[tuple[int, str]] | None = None) -> int:
    """Check that every record arrived, and repetitions with the key of the first; how many repetitions there are."""
    times = Counter(found)
    assert sorted(times) == list(range(count))
    if keys is not None:
        pairs = set(keys)
        assert len(pairs) == count
        assert len({key for _, key in pairs}) == count
    return sum(times.values()) - count
