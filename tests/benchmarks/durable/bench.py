"""The durable queue beside its peers, in one run on one file system: `make bench-durable`.

Prints a table, where the writer's time goes, and what the file system's fdatasync costs; writes the same as JSON into
`bench-results/`. `--quick` does a tenth of the work; `--path` chooses the file system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peers
from peers import KB, PRODUCERS, RESULTS

from batchqueue_async.durable import DurableConfig, DurableQueue

if TYPE_CHECKING:
    from collections.abc import Callable

TURNS = 5
# As many put at the same time where the Go queue has its one goroutine: a put here returns after the write, there it
# returns after a copy into a buffer. Segments are as large as its chunks, so that neither deletes in the measured time.
BATCH_PRODUCERS = 8
VM_CHUNK = 512 << 20


def say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


class Bench:
    def __init__(self, place: Path, scale: float) -> None:
        self.place = place
        self.scale = scale
        self.rows: list[dict[str, Any]] = []

    def fresh(self) -> Path:
        shutil.rmtree(self.place, ignore_errors=True)
        return self.place

    def row(
        self,
        what: str,
        rates: list[float],
        unit: str,
        *,
        against: list[float] | None = None,
        target: float = 0.0,
        note: str = "",
    ) -> None:
        """Medians; a ratio is taken turn by turn, so that what else the machine did hits both sides of it."""
        rate = statistics.median(rates)
        ratio = None
        if against is not None:
            pairs = zip(rates, against if len(against) == len(rates) else against * len(rates), strict=True)
            ratio = statistics.median(mine / theirs for mine, theirs in pairs)
        entry = {"what": what, "rate": rate, "unit": unit, "ratio": ratio, "target": target or None, "note": note}
        self.rows.append({**entry, "rates": rates})
        shown = f"{rate:>12,.0f} {unit:<10}"
        if ratio is not None:
            shown += f" {ratio:6.2f}x" + (f" of a wanted {target:.2f}x" if target else "")
        say(f"{what:<52} {shown}  {note}")

    def count(self, full: int) -> int:
        return max(1, int(full * self.scale))

    def turns(self, *measures: Callable[[], float], count: int = 3) -> list[list[float]]:
        """What each of these measures, one after the other, and all of them again."""
        found = [[measure() for measure in measures] for _ in range(count)]
        return [list(column) for column in zip(*found, strict=True)]


def share(queue: DurableQueue, elapsed: float) -> str:
    stats = queue.stats()
    parts = ", ".join(f"{name} {seconds / elapsed:.0%}" for name, seconds in stats.seconds.items())
    return f"{stats.put / max(1, stats.rounds):.0f} records a round; the writer: {parts}"


# fdatasync


def sync_cost(bench: Bench) -> dict[str, float]:
    bench.fresh().mkdir(parents=True)
    descriptor = os.open(bench.place / "x", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    costs: dict[str, float] = {}
    for size in (1 << 10, 256 << 10, 1 << 20):
        block = os.urandom(size)
        times: list[float] = []
        for _ in range(bench.count(60)):
            os.write(descriptor, block)
            start = time.perf_counter()
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - start)
        costs[f"{size >> 10} KiB"] = statistics.median(times)
    os.close(descriptor)
    return costs


# put, always


def ours_put(bench: Bench, count: int, note: list[str]) -> float:
    async def main() -> float:
        async with DurableQueue.open(bench.fresh(), DurableConfig(memory_bytes=1 << 20)) as queue:

            async def produce() -> None:
                for _ in range(count // PRODUCERS):
                    await queue.put(KB)

            start = time.perf_counter()
            await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
            elapsed = time.perf_counter() - start
            note[:] = [share(queue, elapsed)]
            return count // PRODUCERS * PRODUCERS / elapsed

    return asyncio.run(main())


# put_many, always


def ours_put_many(bench: Bench, calls: int, note: list[str]) -> float:
    async def main() -> float:
        payloads = [KB] * 1_000
        async with DurableQueue.open(bench.fresh(), DurableConfig(memory_bytes=1 << 20)) as queue:
            start = time.perf_counter()
            for _ in range(calls):
                await queue.put_many(payloads)
            elapsed = time.perf_counter() - start
            note[:] = [share(queue, elapsed)]
            return calls * 1_000 * 1_024 / elapsed

    return asyncio.run(main())


# put + lease + ack, os


def ours_through(bench: Bench, count: int, shape: tuple[int, int], note: list[str], lag: list[float]) -> float:
    batch, size = shape
    payloads = [os.urandom(size) for _ in range(batch)]

    async def main() -> float:
        loop = asyncio.get_running_loop()
        left, got, total = count, 0, 0
        async with DurableQueue.open(bench.fresh(), DurableConfig(durability="os", segment_bytes=VM_CHUNK)) as queue:

            async def produce() -> None:
                nonlocal left
                while left > 0:
                    left -= batch
                    await queue.put_many(payloads)

            async def consume() -> None:
                nonlocal got, total
                while got < count:
                    lease = await queue.lease(batch, wait=0.5)
                    for record in lease.records:
                        total += len(record.payload)
                    got += len(lease)
                    await lease.ack()

            async def watch() -> None:
                while got < count:
                    start = loop.time()
                    await asyncio.sleep(0.001)
                    lag.append(loop.time() - start - 0.001)

            start = time.perf_counter()
            await asyncio.gather(*(produce() for _ in range(BATCH_PRODUCERS)), consume(), watch())
            elapsed = time.perf_counter() - start
            note[:] = [share(queue, elapsed)]
            if total != got * size:
                raise SystemExit("a wrong payload")
            return got / elapsed

    return asyncio.run(main())


MAKERS = {
    "sealed": "",
    # As a kill leaves it: one segment without a footer.
    "unsealed": "        os._exit(0)\n",
    "delayed": (
        "        while lease := await queue.lease(1_000, wait=0):\n"
        "            await lease.nack(3_600)\n"
    ),
}  # fmt: skip


def opening(bench: Bench, records: int, kind: str) -> tuple[float, float]:
    """Seconds and MB of opening a queue of such records, in a process of its own."""
    # 10 million of 32 bytes fit into one segment, whose size is limited.
    size, payload = (1 << 40, 32) if kind == "unsealed" else (64 << 20, 64)
    make = (
        "import asyncio, os, sys\n"
        "from batchqueue_async.durable import DurableConfig, DurableQueue\n"
        "async def main():\n"
        f"    config = DurableConfig(durability='os', memory_bytes=1 << 20, segment_bytes={size})\n"
        "    async with DurableQueue.open(sys.argv[1], config) as queue:\n"
        "        for _ in range(int(sys.argv[2]) // 10_000):\n"
        f"            await queue.put_many([b'x' * {payload}] * 10_000)\n" + MAKERS[kind] + "asyncio.run(main())\n"
    )
    number = str(records // 10_000 * 10_000)
    subprocess.run([sys.executable, "-c", make, str(bench.fresh()), number], check=True, timeout=600)
    if kind == "unsealed" and len(list(bench.place.glob("seg-*.bqs"))) > 1:
        raise SystemExit("more than one segment, of which all but one are sealed")
    code = (
        "import asyncio, resource, sys, time\n"
        "from batchqueue_async.durable import DurableQueue\n"
        "async def main():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    start = time.perf_counter()\n"
        "    async with DurableQueue.open(sys.argv[1]) as queue:\n"
        "        elapsed = time.perf_counter() - start\n"
        "        assert queue.stats().records == int(sys.argv[2])\n"
        "        print(elapsed, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(bench.place), number]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    seconds, megabytes = map(float, done.stdout.split())
    return seconds, megabytes


# drop_oldest, partial acknowledgements


def ours_dropping(bench: Bench, count: int, limit: str, *, full: bool) -> float:
    """Puts each second, at a limit of 20,000 records or far below one; the segments are as large either way."""

    async def main() -> float:
        most = 20_000 if full else 20 * count
        options: dict[str, Any] = {limit: most if limit == "max_records" else most * 1_200}
        if limit == "max_bytes":
            options["segment_bytes"] = DurableConfig(max_bytes=20_000 * 1_200).rotate_bytes
        config = DurableConfig(durability="os", overflow="drop_oldest", **options)
        async with DurableQueue.open(bench.fresh(), config) as queue:
            while full and not queue.stats().dropped:
                await queue.put_many([KB] * 100)
            left = count

            async def produce() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    await queue.put(KB)

            start = time.perf_counter()
            await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
            return count / (time.perf_counter() - start)

    return asyncio.run(main())


def ours_partial_acks(bench: Bench, leased: int, calls: int) -> float:
    """Acknowledgements of single records each second, of a lease of so many."""

    async def main() -> float:
        async with DurableQueue.open(bench.fresh(), DurableConfig(durability="os", memory_bytes=1 << 30)) as queue:
            for _ in range(leased // 1_000):
                await queue.put_many([b"x" * 64] * 1_000)
            lease = await queue.lease(leased, 1 << 40)
            if len(lease) != leased:
                raise SystemExit(f"{len(lease)} of {leased} leased")
            first = lease.records[0].seq
            step = leased // calls
            start = time.perf_counter()
            for at in range(calls):
                await lease.ack([first + at * step])
            return calls / (time.perf_counter() - start)

    return asyncio.run(main())


def compression_table(bench: Bench) -> None:
    """The default codec is chosen by this: JSON-like records through `put_many`, `os`."""
    rows = [
        json.dumps({"id": n, "name": f"user-{n % 97}", "ok": n % 3 == 0, "value": n * 1.5}).encode()
        for n in range(1_000)
    ]
    raw = sum(map(len, rows))
    for codec in ("none", "lz4", "snappy", "zstd"):

        async def main(codec: Any = codec) -> tuple[float, float]:
            config = DurableConfig(durability="os", compression=codec, memory_bytes=1 << 20)
            async with DurableQueue.open(bench.fresh(), config) as queue:
                start = time.perf_counter()
                for _ in range(bench.count(200)):
                    await queue.put_many(rows)
                return time.perf_counter() - start, queue.stats().disk_bytes

        elapsed, disk = asyncio.run(main())
        calls = bench.count(200)
        note = f"{disk / (calls * raw):.0%} of the payloads' bytes on disk"
        bench.row(f"put_many of 1,000 JSON rows, os, {codec}", [calls * 1_000 / elapsed], "records/s", note=note)


def put(bench: Bench) -> None:
    note: list[str] = []
    count = bench.count(60_000)
    bare, ours = bench.turns(
        lambda: peers.bare_loop(bench.fresh(), count), lambda: ours_put(bench, count, note), count=TURNS
    )
    bench.row(f"bare loop, 1 KB, {PRODUCERS} producers, write + fdatasync", bare, "records/s")
    bench.row(f"put, 1 KB, {PRODUCERS} producers, always", ours, "records/s", against=bare, target=0.75, note=note[0])
    peer = peers.persist_queue(bench.fresh(), bench.count(1_500))
    if peer is not None:
        bench.row("persist-queue SQLiteAckQueue, 1 KB", [peer], "records/s")
        bench.row("  put, always, against it", ours, "records/s", against=[peer], target=30)


def put_many(bench: Bench) -> None:
    note: list[str] = []
    calls = bench.count(150)
    raw, many, sqlite = bench.turns(
        lambda: peers.raw_append(bench.fresh(), calls << 20) / 1e6,
        lambda: ours_put_many(bench, calls, note) / 1e6,
        lambda: peers.sqlite_many(bench.fresh(), calls) / 1e6,
    )
    bench.row("raw append + fdatasync per MiB", raw, "MB/s")
    bench.row("put_many, 1,000 x 1 KB, always", many, "MB/s", against=raw, target=0.8, note=note[0])
    bench.row("sqlite3 WAL FULL, 1,000 rows a transaction", sqlite, "MB/s")
    bench.row("  put_many, always, against it", many, "MB/s", against=sqlite, target=2)


def through(bench: Bench) -> None:
    for size, batch, total in ((1_024, 100, 300_000), (100 * 1_024, 1, 5_000)):
        count = bench.count(total)
        note: list[str] = []
        lag: list[float] = []
        ours, vm = bench.turns(
            lambda: ours_through(bench, count, (batch, size), note, lag),  # noqa: B023 - called at once
            lambda: peers.victoriametrics(bench.fresh(), size, count) or 0.0,  # noqa: B023 - called at once
            count=TURNS,
        )
        what = f"put + lease + ack, {size // 1024} KB, batches of {batch}, os"
        if all(vm):
            bench.row(f"VictoriaMetrics persistentqueue, {size // 1024} KB", vm, "records/s")
        target = 1.0 if batch > 1 else 1.2
        bench.row(what, ours, "records/s", against=vm if all(vm) else None, target=target, note=note[0])
        ordered = sorted(lag)
        p99 = ordered[int(len(ordered) * 0.99)] * 1e6
        bench.row("  the loop's lag meanwhile, p99 in microseconds", [p99], "us", note="wanted: under 10,000")


def open_again(bench: Bench) -> None:
    for kind, full, wanted in (
        ("sealed", 10_000_000, "1,000 ms and 100 MB"),
        ("unsealed", 10_000_000, "10,000 ms"),
        ("delayed", 1_000_000, "5,000 ms"),
    ):
        records = bench.count(full)
        seconds, megabytes = opening(bench, records, kind)
        note = f"{megabytes:.0f} MB; wanted: under {wanted}"
        bench.row(f"opening {records:,} {kind} records", [seconds * 1e3], "ms", note=note)


def dropping(bench: Bench) -> None:
    count = bench.count(20_000)
    for limit in ("max_records", "max_bytes"):
        below, at = bench.turns(
            lambda: ours_dropping(bench, count, limit, full=False),  # noqa: B023 - called at once
            lambda: ours_dropping(bench, count, limit, full=True),  # noqa: B023 - called at once
        )
        bench.row(f"put, 1 KB, os, below {limit}", below, "records/s")
        bench.row("  at it, drop_oldest", at, "records/s", against=below, target=0.7)


def acks(bench: Bench) -> None:
    few, many = bench.turns(
        lambda: ours_partial_acks(bench, 1_000, 500),
        lambda: ours_partial_acks(bench, bench.count(1_000_000), 500),
    )
    bench.row("ack of one record of 1,000 leased", few, "acks/s")
    bench.row(f"  of {bench.count(1_000_000):,} leased", many, "acks/s", against=few, target=0.5)


PARTS = {
    "drop": dropping,
    "acks": acks,
    "put": put,
    "put_many": put_many,
    "through": through,
    "open": open_again,
    "compression": compression_table,
}


def run(bench: Bench, parts: list[str]) -> dict[str, Any]:
    costs = sync_cost(bench)
    system = subprocess.run(["stat", "-f", "-c", "%T", str(bench.place)], capture_output=True, text=True, check=False)
    say(f"file system: {system.stdout.strip()}; fdatasync after a write of ", end="")
    say(", ".join(f"{size}: {seconds * 1e6:.0f} us" for size, seconds in costs.items()))
    for part in parts:
        PARTS[part](bench)
    return {"file_system": system.stdout.strip(), "fdatasync_seconds": costs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=RESULTS / "queue", help="where the queues are made")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part, more than once for several")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    bench = Bench(arguments.path, 0.1 if arguments.quick else 1.0)
    try:
        report = run(bench, arguments.only or list(PARTS))
    finally:
        shutil.rmtree(bench.place, ignore_errors=True)
    report |= {"rows": bench.rows, "cpus": os.cpu_count(), "python": sys.version.split()[0], "load": os.getloadavg()}
    report["peak_rss_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (RESULTS / "durable.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
