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
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchqueue_async.durable import DurableConfig, DurableQueue

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
RESULTS = Path("bench-results")
KB = os.urandom(1024)
PRODUCERS = 256
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
        self, what: str, rate: float, unit: str, *, against: float = 0.0, target: float = 0.0, note: str = ""
    ) -> None:
        ratio = rate / against if against else None
        entry = {"what": what, "rate": rate, "unit": unit, "ratio": ratio, "target": target or None, "note": note}
        self.rows.append(entry)
        shown = f"{rate:>12,.0f} {unit:<10}"
        if ratio is not None:
            shown += f" {ratio:6.2f}x" + (f" of a wanted {target:.2f}x" if target else "")
        say(f"{what:<52} {shown}  {note}")

    def count(self, full: int) -> int:
        return max(1, int(full * self.scale))

    def best(self, measure: Callable[[], float], turns: int = 3) -> float:
        """The best of some turns: others use this machine too, and noise only ever slows down."""
        return max(measure() for _ in range(turns))


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


def bare_loop(bench: Bench, count: int) -> float:
    """What asyncio and the disk allow: the same producers, gathered into one write and one fdatasync."""
    bench.fresh().mkdir(parents=True)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        descriptor = os.open(bench.place / "x", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        waiting: list[tuple[bytes, asyncio.Future[None]]] = []

        def flush() -> None:
            group = list(waiting)
            waiting.clear()
            os.write(descriptor, b"".join([payload for payload, _ in group]))
            os.fdatasync(descriptor)
            for _, future in group:
                future.set_result(None)

        async def put(payload: bytes) -> None:
            future = loop.create_future()
            if not waiting:
                loop.call_soon(flush)
            waiting.append((payload, future))
            await future

        async def produce() -> None:
            for _ in range(count // PRODUCERS):
                await put(KB)

        start = time.perf_counter()
        await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
        elapsed = time.perf_counter() - start
        os.close(descriptor)
        return count // PRODUCERS * PRODUCERS / elapsed

    return asyncio.run(main())


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


def persist_queue(bench: Bench, count: int) -> float | None:
    try:
        from persistqueue import SQLiteAckQueue
    except ImportError:
        return None
    queue = SQLiteAckQueue(str(bench.fresh()), auto_commit=True)
    start = time.perf_counter()
    for _ in range(count):
        queue.put(KB)
    elapsed = time.perf_counter() - start
    queue.close()
    return count / elapsed


# put_many, always


def raw_append(bench: Bench, size: int) -> float:
    bench.fresh().mkdir(parents=True)
    block = os.urandom(1 << 20)
    descriptor = os.open(bench.place / "x", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    start = time.perf_counter()
    for _ in range(size >> 20):
        os.write(descriptor, block)
        os.fdatasync(descriptor)
    elapsed = time.perf_counter() - start
    os.close(descriptor)
    return size / elapsed


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


def sqlite_many(bench: Bench, calls: int) -> float:
    bench.fresh().mkdir(parents=True)
    connection = sqlite3.connect(bench.place / "x.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE queue (id INTEGER PRIMARY KEY, payload BLOB)")
    rows = [(KB,)] * 1_000
    start = time.perf_counter()
    for _ in range(calls):
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO queue (payload) VALUES (?)", rows)
        connection.execute("COMMIT")
    elapsed = time.perf_counter() - start
    connection.close()
    return calls * 1_000 * 1_024 / elapsed


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


def victoriametrics(bench: Bench, size: int, count: int) -> float | None:
    go = shutil.which("go")
    if go is None:
        return None
    binary = RESULTS.resolve() / "vmbench"
    built = subprocess.run(
        [go, "build", "-o", str(binary), "."], cwd=HERE / "victoriametrics", capture_output=True, check=False
    )
    if built.returncode:
        say(f"victoriametrics is left out: {built.stderr.decode()[-300:]}")
        return None
    command = [str(binary), str(bench.fresh()), str(size), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return float(json.loads(done.stdout.splitlines()[-1])["blocks_per_second"])


# Opening


def opening(bench: Bench, records: int) -> tuple[float, float]:
    """Seconds and MB of opening a queue of sealed records, in a process of its own."""

    async def make() -> None:
        config = DurableConfig(durability="os", memory_bytes=1 << 20)
        async with DurableQueue.open(bench.fresh(), config) as queue:
            for _ in range(records // 10_000):
                await queue.put_many([KB[:64]] * 10_000)

    asyncio.run(make())
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
    command = [sys.executable, "-c", code, str(bench.place), str(records // 10_000 * 10_000)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    seconds, megabytes = map(float, done.stdout.split())
    return seconds, megabytes


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
        bench.row(f"put_many of 1,000 JSON rows, os, {codec}", calls * 1_000 / elapsed, "records/s", note=note)


def run(bench: Bench) -> dict[str, Any]:
    note: list[str] = []
    costs = sync_cost(bench)
    system = subprocess.run(["stat", "-f", "-c", "%T", str(bench.place)], capture_output=True, text=True, check=False)
    say(f"file system: {system.stdout.strip()}; fdatasync after a write of ", end="")
    say(", ".join(f"{size}: {seconds * 1e6:.0f} us" for size, seconds in costs.items()))

    count = bench.count(60_000)
    bare = bench.best(lambda: bare_loop(bench, count))
    bench.row(f"bare loop, 1 KB, {PRODUCERS} producers, write + fdatasync", bare, "records/s")
    ours = bench.best(lambda: ours_put(bench, count, note))
    bench.row(f"put, 1 KB, {PRODUCERS} producers, always", ours, "records/s", against=bare, target=0.8, note=note[0])
    peer = persist_queue(bench, bench.count(1_500))
    if peer is not None:
        bench.row("persist-queue SQLiteAckQueue, 1 KB", peer, "records/s")
        bench.row("  put, always, against it", ours, "records/s", against=peer, target=30)

    calls = bench.count(150)
    raw = bench.best(lambda: raw_append(bench, calls << 20))
    bench.row("raw append + fdatasync per MiB", raw / 1e6, "MB/s")
    many = bench.best(lambda: ours_put_many(bench, calls, note))
    bench.row("put_many, 1,000 x 1 KB, always", many / 1e6, "MB/s", against=raw / 1e6, target=0.8, note=note[0])
    sqlite = bench.best(lambda: sqlite_many(bench, calls))
    bench.row("sqlite3 WAL FULL, 1,000 rows a transaction", sqlite / 1e6, "MB/s")
    bench.row("  put_many, always, against it", many / 1e6, "MB/s", against=sqlite / 1e6, target=2)

    for size, batch, total in ((1_024, 100, 300_000), (100 * 1_024, 1, 6_000)):
        count = bench.count(total)
        lag: list[float] = []
        rate = bench.best(lambda: ours_through(bench, count, (batch, size), note, lag))  # noqa: B023 - called at once
        go_rate = victoriametrics(bench, size, count)
        what = f"put + lease + ack, {size // 1024} KB, batches of {batch}, os"
        if go_rate is not None:
            bench.row(f"VictoriaMetrics persistentqueue, {size // 1024} KB", go_rate, "records/s")
            bench.row(what, rate, "records/s", against=go_rate, target=0.6 if batch > 1 else 1.0, note=note[0])
        else:
            bench.row(what, rate, "records/s", note=note[0])
        ordered = sorted(lag)
        if ordered:
            p99 = ordered[int(len(ordered) * 0.99)] * 1e3
            bench.row("  the loop's lag meanwhile, p99 in microseconds", p99 * 1e3, "us", note="wanted: under 10,000")

    records = bench.count(10_000_000)
    seconds, megabytes = opening(bench, records)
    note_open = f"{megabytes:.0f} MB; wanted: under 1,000 ms and 100 MB"
    bench.row(f"opening {records:,} sealed records", seconds * 1e3, "ms", note=note_open)
    compression_table(bench)
    return {"file_system": system.stdout.strip(), "fdatasync_seconds": costs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=RESULTS / "queue", help="where the queues are made")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    bench = Bench(arguments.path, 0.1 if arguments.quick else 1.0)
    try:
        report = run(bench)
    finally:
        shutil.rmtree(bench.place, ignore_errors=True)
    report |= {"rows": bench.rows, "cpus": os.cpu_count(), "python": sys.version.split()[0], "load": os.getloadavg()}
    report["peak_rss_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (RESULTS / "durable.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
