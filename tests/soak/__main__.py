"""Run exporters to every server that starts here, through faults at random, and judge: nothing lost, memory flat.

python -m tests.soak --minutes 10 --seed 1 --out bench-results/soak

A queue takes numbered events from coroutines and from threads and passes them to an exporter with a directory for each
server: PostgreSQL, Redis, Kafka, NATS JetStream and RabbitMQ, all read back in the end. First all of them sleep, so
that each exporter has been behind once and has had as many sends in flight as it may. Then each is killed and started
again, or put to sleep, at times that the seed decides. In the end every event has to be everywhere, and memory must not
have grown by more than a megabyte a minute. The exit status is 0 if both hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from servers import base

import batchqueue_async as bq

from .destinations import KINDS, Destination, start
from .report import slope, write_report

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
SLOPE_LIMIT = 1.0
"""Megabytes per minute by which memory may grow."""
SETTLED = 0.3
"""The share of the run that comes before the memory is judged: caches fill, files are opened."""
REHEARSED = 0.05
"""The share of the run that all servers sleep through at its beginning.

A send in flight costs a few kilobytes a record, with the clients that have a task for each. That is bounded by the
workers and the batches, and reached when a backlog is sent; without this, by chance at any time of the run.
"""
MEMORY = 256 * 2**10
"""Bytes of its backlog that an exporter keeps in memory beside the disk: so few that the first outage fills them."""


@dataclass
class Verdict:
    """What a run came to."""

    seed: int
    minutes: float
    accepted: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)
    faults: list[tuple[float, str, str]] = field(default_factory=list)
    memory_slope: float = 0.0
    samples: list[dict[str, float]] = field(default_factory=list)
    machine: str = platform.platform()

    @property
    def passed(self) -> bool:
        return self.accepted > 0 and not any(self.lost.values()) and self.memory_slope < SLOPE_LIMIT


class Soak:
    """One run."""

    def __init__(self, options: argparse.Namespace, destinations: dict[str, Destination], directory: Path) -> None:
        self.options = options
        self.destinations = destinations
        self.directory = directory
        self.verdict = Verdict(options.seed, options.minutes)
        self.random = random.Random(options.seed)
        self.began = time.monotonic()
        self.ended = threading.Event()
        self.numbers = iter(range(10**12))
        self.lock = threading.Lock()

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    async def run(self) -> Verdict:
        config = bq.ExportConfig(
            overflow="block",
            block_timeout=None,
            retry=bq.RetryPolicy(initial=0.1, max_delay=2.0),
            breaker=bq.BreakerPolicy(reset_timeout=0.5),
            batch=bq.BatchPolicy(max_records=500, linger=0.05),
            drain_timeout=120.0,
            durable=bq.DurableConfig(memory_bytes=MEMORY),
        )
        exporters = {
            name: bq.Exporter(
                each.sink(), bq.ExportConfig(**_fields(config) | {"path": self.directory / name}), name=name
            )
            for name, each in self.destinations.items()
        }
        for each in self.destinations.values():
            await each.prepare()
        async with bq.BatchQueueManager() as manager:
            for exporter in exporters.values():
                await exporter.__aenter__()
            queues = [
                manager.create(name, bq.QueueConfig(consumer=exporter, max_batch=500, linger=0.02))
                for name, exporter in exporters.items()
            ]
            bridges = [queue.bridge() for queue in queues]
            thread = threading.Thread(target=self.produce_from_a_thread, args=(bridges,), daemon=True)
            thread.start()
            rehearsed = asyncio.create_task(self.rehearse())
            tasks = [
                asyncio.create_task(each)
                for each in (
                    self.sample(exporters),
                    *(self.break_it(name, after=rehearsed) for name in self.destinations),
                )
            ]
            await self.produce(queues)
            self.ended.set()
            await asyncio.to_thread(thread.join)
            await asyncio.gather(*tasks)
            for queue in queues:
                await queue.shutdown()
            for name, exporter in exporters.items():
                await exporter.flush(timeout=120.0)
                await exporter.shutdown()
                print(f"{name}: {exporter.stats().accepted:,} accepted, {exporter.stats().delivered:,} delivered")
        await self.judge()
        return self.verdict

    def next_number(self) -> int:
        with self.lock:
            self.verdict.accepted += 1
            return next(self.numbers)

    async def produce(self, queues) -> None:
        every = 0.05
        while self.now < self.options.minutes * 60:
            for _ in range(max(1, int(self.options.rate * every * 0.8))):
                row = {"n": self.next_number()}
                for queue in queues:
                    assert await queue.produce(row)
            await asyncio.sleep(every)

    def produce_from_a_thread(self, bridges) -> None:
        while not self.ended.is_set():
            row = {"n": self.next_number()}
            for bridge in bridges:
                assert bridge.produce(row)
            self.ended.wait(5.0 / self.options.rate)

    async def rehearse(self) -> None:
        """An outage of all at once, which ends in good time for what it left to be sent before memory is judged."""
        seconds = REHEARSED * self.options.minutes * 60
        await asyncio.gather(*(self.put_to_sleep(each.server, seconds) for each in self.destinations.values()))

    @staticmethod
    async def put_to_sleep(server: base.Server, seconds: float) -> None:
        pids = [server.process.pid, *base.descendants(server.process.pid)]
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for pid in pids:
            _signal(pid, signal.SIGCONT)

    async def break_it(self, name: str, *, after: asyncio.Task[None]) -> None:
        """Faults of one server, from the seed and its name alone.

        It is up for at least as long as it was down: one that needs a minute to start would serve for none of the run.
        """
        chance = random.Random(f"{self.options.seed} {name}")
        server: base.Server = self.destinations[name].server
        end = self.options.minutes * 60
        down = 0.0
        await asyncio.wait((after,))
        while True:
            wait = max(down, chance.uniform(3.0, 12.0) * min(1.0, self.options.minutes))
            if self.now + wait > end - 3.0:
                return
            await asyncio.sleep(wait)
            kind = chance.choice(("kill", "sleep"))
            seconds = chance.uniform(0.5, 4.0)
            began = self.now
            self.verdict.faults.append((round(began, 2), name, f"{kind} {seconds:.1f} s"))
            if kind == "kill":
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(seconds)
                await asyncio.to_thread(server.start)
            else:
                await self.put_to_sleep(server, seconds)
            down = self.now - began

    async def sample(self, exporters) -> None:
        while not self.ended.is_set():
            sample = {"t": self.now, "rss": _rss() / 2**20, "accepted": float(self.verdict.accepted)}
            for name, exporter in exporters.items():
                sample[f"{name} waiting"] = float(exporter.stats().records)
                sample[f"{name} delivered"] = float(exporter.stats().delivered)
            self.verdict.samples.append(sample)
            await asyncio.sleep(0.5)

    async def judge(self) -> None:
        """Look for every number at every destination."""
        for name, destination in self.destinations.items():
            found = await destination.numbers()
            self.verdict.lost[name] = len(set(range(self.verdict.accepted)) - set(found))
            self.verdict.repeated[name] = len(found) - len(set(found))
        settled = [each for each in self.verdict.samples if each["t"] > SETTLED * self.options.minutes * 60]
        self.verdict.memory_slope = slope([(each["t"] / 60, each["rss"]) for each in settled])


def _fields(config: bq.ExportConfig) -> dict[str, object]:
    names = ("overflow", "block_timeout", "retry", "breaker", "batch", "drain_timeout", "durable")
    return {name: getattr(config, name) for name in names}


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_SIZE


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=500.0, help="events per second")
    parser.add_argument("--servers", default=",".join(KINDS), help="some of %(default)s")
    parser.add_argument("--out", type=Path, default=Path("bench-results/soak"))
    options = parser.parse_args()
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # a line for each refused connection
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    destinations: dict[str, Destination] = {}
    try:
        start(options.servers.split(","), destinations)
        verdict = asyncio.run(Soak(options, destinations, directory).run())
    finally:
        for each in destinations.values():
            each.server.dispose()
        shutil.rmtree(directory, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.json").write_text(json.dumps(asdict(verdict) | {"passed": verdict.passed}, indent=1))
    write_report(options.out / "soak.html", verdict)
    print(
        f"{'PASSED' if verdict.passed else 'FAILED'}: {verdict.accepted:,} events, {len(verdict.faults)} faults, "
        f"lost {sum(verdict.lost.values())}, repeated {verdict.repeated}, "
        f"memory {verdict.memory_slope:+.2f} MB/min; {options.out / 'soak.html'}"
    )
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
