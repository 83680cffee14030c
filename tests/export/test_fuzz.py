"""Many histories: random sinks, cancellations, flushes and restarts, in virtual time: nothing is lost or miscounted.

`make chaos-export` runs thousands: BATCHQUEUE_EXPORT_SEEDS=3000.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest
from export_kit import check, inline

import batchqueue_async as bq
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.testing import run_virtual

SEEDS = int(os.environ.get("BATCHQUEUE_EXPORT_SEEDS", "160"))
_CHUNK = 20
_UNKNOWN = (KeyError("x"), bq.ConfigError("x"), bq.ThrottledError("x", retry_after=1.0))


class RandomSink:
    """Answers as luck has it; remembers which key came with which record."""

    def __init__(self, randomly: Random) -> None:
        self.randomly = randomly
        self.concurrent = randomly.random() < 0.7
        # Whoever wants all in order has a sink that takes a batch whole, or not.
        self.whole = False
        self.got: list[dict] = []
        self.keys: dict[str, int] = {}
        self.records: dict[int, str] = {}

    async def open(self) -> None:
        if self.randomly.random() < 0.3:
            raise ConnectionError("x")

    async def send(self, batch):
        luck = self.randomly
        if luck.random() < 0.5:
            await asyncio.sleep(luck.choice([0, 0.01, 0.1, 1, 40]))
        bad = [index for index, each in enumerate(batch) if each["bad"]]
        if bad:
            raise bq.PermanentError("bad", culprits=bad if luck.random() < 0.5 else ())
        turn = luck.random()
        if turn < 0.1:
            raise bq.RetryableError("503", retry_after=luck.choice([None, 0, 1, 50]))
        if turn < 0.13:
            raise bq.AuthError("401")
        if turn < 0.18 and len(batch) > 3:
            raise bq.TooLargeError("413")
        if turn < 0.22:
            raise asyncio.CancelledError
        if turn < 0.26:
            raise luck.choice(_UNKNOWN)
        errors = [bq.RetryableError("n"), bq.TooLargeError("l"), bq.AuthError("a"), bq.ThrottledError("t")]
        rejected = {}
        if turn < 0.38 and not self.whole:
            rejected = {index: luck.choice(errors) for index in range(len(batch)) if luck.random() < 0.3}
        self.got += [each for index, each in enumerate(batch) if index not in rejected]
        return SendResult(rejected=rejected)

    async def close(self) -> None: ...


class KeyedSink(RandomSink):
    """The same, with keys."""

    async def send_keyed(self, batch, keys):
        for each, key in zip(batch, keys, strict=True):
            assert self.keys.setdefault(key, each["i"]) == each["i"], "a key was used twice"
            assert self.records.setdefault(each["i"], key) == key, "a record's key has changed"
        return await self.send(batch)


class History:
    """One exporter's life, or several with one directory."""

    def __init__(self, seed: int, path: Path | None) -> None:
        self.randomly = luck = Random(seed)
        self.path = path
        self.ordering = luck.choice(["any", "any", "any", "key", "key", "order"])
        attempts = luck.choice([None, None, 5])
        failover = None
        if attempts and self.ordering == "any" and path is None and luck.random() < 0.5:
            failover = bq.FailoverPolicy(max_entries=5, max_bytes=10_000, interval=2)
        self.dead: list[int] = []
        self.config = bq.ExportConfig(
            path=path,
            durable=bq.DurableConfig(durability="os", stale_flush=None),
            max_records=luck.choice([None, 20, 60]),
            overflow=luck.choice(["drop_oldest", "drop_newest", "block", "reject"]),
            block_timeout=5,
            batch=bq.BatchPolicy(max_records=luck.choice([1, 5, 30]), linger=luck.choice([0, 0.2])),
            retry=bq.RetryPolicy(
                initial=0.5, max_delay=10, max_attempts=attempts, isolation_sends=luck.choice([2, 128])
            ),
            breaker=bq.BreakerPolicy(threshold=3, reset_timeout=5),
            workers=bq.WorkerPolicy.fixed(luck.choice([1, 4, 9])),
            auth_pause=3,
            send_timeout=20,
            ordering=self.ordering,
            key=(lambda each: each["k"]) if self.ordering == "key" else None,
            failover=failover,
            split=bq.SplitPolicy(preparers=2, senders=2, channel=2) if luck.random() < 0.2 else None,
            adaptive=bq.AdaptivePolicy(max_workers=9) if luck.random() < 0.2 else None,
            drain_timeout=luck.choice([0, 5, 100]),
            on_dead_letter=lambda records, _: self.dead.extend(each["i"] for each in records),
        )
        self.sink = (KeyedSink if luck.random() < 0.5 else RandomSink)(luck)
        self.sink.whole = self.ordering == "order"
        self.confirmed: list[int] = []
        self.count = 0
        self.dropped = self.left = 0
        self.undelivered: list[dict] = []

    async def run(self) -> None:
        for _ in range(1 if self.path is None else self.randomly.choice([1, 2, 3])):
            export = bq.Exporter(self.sink, self.config, random=Random(1), open_queue=inline)
            async with export:
                await self.live(export)
                start = asyncio.get_running_loop().time()
                report = await export.shutdown()
            assert asyncio.get_running_loop().time() - start <= max(self.config.drain_timeout, 0.25)
            stats = export.stats()
            self.dropped += sum(report.dropped.values()) + stats.failover_evicted
            self.undelivered += report.undelivered
            self.left = report.on_disk
        self.finish()

    async def live(self, export: bq.Exporter) -> None:
        producers = [asyncio.create_task(self.produce(export, key)) for key in range(3)]
        await asyncio.wait(producers, timeout=self.randomly.choice([5, 60, 600]))
        for producer in producers:
            producer.cancel()
        for error in await asyncio.gather(*producers, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    async def produce(self, export: bq.Exporter, key: int) -> None:
        luck = self.randomly
        for _ in range(luck.randrange(8)):
            size = luck.choice([1, 3, 10, 70])
            batch = [{"i": self.count + at, "k": key, "bad": luck.random() < 0.03} for at in range(size)]
            self.count += size
            task = asyncio.ensure_future(export.consume(batch))
            if luck.random() < 0.15:
                asyncio.get_running_loop().call_later(luck.random() * 3, task.cancel)
            # A cancelled or refused batch was not confirmed.
            with contextlib.suppress(asyncio.CancelledError, bq.QueueFullError, bq.QueueClosedError):
                await task
                self.confirmed += [each["i"] for each in batch]
            check(export)
            most = self.config.max_records
            assert most is None or export.stats().records <= most
            await asyncio.sleep(luck.choice([0, 0.1, 3]))
            if luck.random() < 0.2:
                with contextlib.suppress(TimeoutError, bq.QueueClosedError):
                    await export.flush(luck.choice([0.1, 5, 50]))
            if luck.random() < 0.1 and not export.closed:
                export.resume()

    def finish(self) -> None:
        placed = {each["i"] for each in [*self.sink.got, *self.undelivered]} | set(self.dead)
        missing = set(self.confirmed) - placed
        assert len(missing) <= self.dropped + self.left
        if self.ordering == "any":
            return
        last: dict[int, int] = {}
        seen: set[int] = set()
        for each in self.sink.got:
            if each["i"] not in seen:  # a repetition may come late
                seen.add(each["i"])
                assert last.get(each["k"], -1) < each["i"], "out of order"
                last[each["k"]] = each["i"]


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(at, marks=pytest.mark.untraced) for at in range(_CHUNK, SEEDS, _CHUNK))]
)
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_many_histories(first, place):
    for seed in range(first, min(SEEDS, first + _CHUNK)):
        path = None if place == "memory" else Path(tempfile.mkdtemp(prefix="export-fuzz-"))
        try:
            run_virtual(History(seed, path).run(), seed=seed)
        except BaseException as error:
            error.add_note(f"seed {seed}, {place}")
            raise
        finally:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
