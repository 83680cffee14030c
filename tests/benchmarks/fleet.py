"""A fleet of real processes held against the simulation: `make fleet`.

python -m tests.benchmarks.fleet --processes 3 --rate 3000

Each process has an exporter with a directory. A destination in a process of its own takes each batch in a time that is
drawn at random, and nothing during an outage. Printed is what waited at most and when it was gone, really and played,
and the difference; the exit status is 1 where it is above 20 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import batchqueue_async as bq
from batchqueue_async.export.fleet import Fleet
from batchqueue_async.export.fleet_simulation import Course, play

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = 0.1
ALLOWED = 0.2
PROBE = 0.5
SPREAD = 0.2


async def serve(latency: float) -> None:
    """Be the destination: a line with a number comes for each batch, and "ok" or "away" goes back."""
    sigma = math.sqrt(math.log(1 + SPREAD**2))
    away = [0.0, 0.0]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            if away[0] <= time.time() < away[1]:
                writer.write(b"away\n")
            else:
                await asyncio.sleep(random.lognormvariate(math.log(latency) - sigma**2 / 2, sigma))
                writer.write(b"ok\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    away[:] = map(float, (await asyncio.to_thread(sys.stdin.readline)).split())
    await server.serve_forever()


class LineSink:
    """Sends a batch as one line, over as many connections as are needed at once."""

    concurrent = True

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self) -> None:
        pass

    async def send(self, batch) -> None:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"%d\n" % len(batch))
        answer = await reader.readline()
        self._idle.append((reader, writer))
        if answer != b"ok\n":
            raise bq.RetryableError("the destination is away")

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def work(options: argparse.Namespace) -> None:
    """Be one process of the fleet; print what waited, sample by sample."""
    config = bq.ExportConfig(
        path=options.directory,
        overflow="block",
        workers=bq.WorkerPolicy.fixed(options.workers),
        batch=bq.BatchPolicy(max_records=options.batch, linger=0.05),
        retry=bq.RetryPolicy(initial=0.1, max_delay=PROBE),
        breaker=bq.BreakerPolicy(threshold=3, reset_timeout=PROBE),
    )
    rate, waited, produced = options.rate / options.processes, [], 0
    async with bq.Exporter(LineSink(options.port), config) as exporter:
        print("ready", flush=True)
        begin = float(await asyncio.to_thread(sys.stdin.readline))
        await asyncio.sleep(max(0.0, begin - time.time()))
        while True:
            now = time.time() - begin
            due = int(min(now, options.seconds) * rate) - produced
            if due > 0:
                await exporter.consume([b"x" * options.record_bytes] * due)
                produced += due
            waiting = exporter.stats().records
            waited.append((round(now, 2), waiting))
            if now > options.seconds and not waiting and produced >= int(options.seconds * rate):
                break
            await asyncio.sleep(SAMPLE / 2)
    print(json.dumps(waited))


def tell(process: subprocess.Popen[str], line: str) -> None:
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def real(options: argparse.Namespace) -> tuple[float, float, float]:
    """Run the processes: what waited at most, what waited at most at one of them, and when all was gone."""
    module = [sys.executable, "-m", "tests.benchmarks.fleet"]
    pipes: dict[str, Any] = {"cwd": ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*module, "--serve", f"--latency={options.latency}"], **pipes) as destination:
        try:
            port = destination.stdout.readline().strip()
            with tempfile.TemporaryDirectory() as directory:
                names = ("rate", "seconds", "processes", "workers", "batch", "record_bytes")
                shared = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
                begun = [*module, "--work", f"--port={port}", *shared]
                children = [
                    subprocess.Popen([*begun, f"--directory={directory}/{number}"], **pipes)
                    for number in range(options.processes)
                ]
                for child in children:  # all begin when all are there
                    child.stdout.readline()
                begin = time.time() + 1.0
                tell(destination, f"{begin + options.outage_at} {begin + options.outage_at + options.outage}")
                for child in children:
                    tell(child, str(begin))
                series = [json.loads(child.communicate()[0]) for child in children]
        finally:
            destination.kill()
    bins: dict[int, float] = {}
    for each in series:
        most: dict[int, float] = {}
        for at, waiting in each:
            most[int(at / SAMPLE)] = max(waiting, most.get(int(at / SAMPLE), 0))
        for number, waiting in most.items():
            bins[number] = bins.get(number, 0) + waiting
    peak_process = max(waiting for each in series for _, waiting in each)
    return max(bins.values()), peak_process, max(each[-1][0] for each in series)


def main() -> int:
    """Compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.fleet", description=__doc__)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rate", type=float, default=3_000.0, help="records per second, in all")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--outage-at", type=float, default=4.0)
    parser.add_argument("--outage", type=float, default=5.0)
    parser.add_argument("--latency", type=float, default=0.2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--record-bytes", type=int, default=300)
    for hidden in ("--serve", "--work"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.latency))
    if options.work:
        asyncio.run(work(options))
        return 0
    fleet = Fleet(
        rate=options.rate,
        record_bytes=options.record_bytes,
        outage=options.outage,
        latency=options.latency,
        batch_records=options.batch,
        workers=options.workers,
    )
    outages = ((options.outage_at, options.outage_at + options.outage),)
    played = play(
        fleet, options.processes, Course(seconds=options.seconds, outages=outages, probe=PROBE, spread=SPREAD)
    )
    found = real(options)
    worst = 0.0
    rows = (played.peak_backlog, played.peak_process, played.drained_at)
    for name, really, simulated in zip(("most waiting", "at one process", "gone after, s"), found, rows, strict=True):
        apart = abs(simulated - really) / really
        worst = max(worst, apart)
        print(f"{name:16} really {really:>10,.1f}   played {simulated:>10,.1f}   apart {apart:6.1%}")
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
