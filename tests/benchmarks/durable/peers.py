"""What the durable queue is measured against: bare loops over the same file system, and three peers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = Path("bench-results")
KB = os.urandom(1024)
PRODUCERS = 256


def bare_loop(place: Path, count: int) -> float:
    """What asyncio and the disk allow: the same producers, gathered into one write and one fdatasync."""
    place.mkdir(parents=True)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        descriptor = os.open(place / "x", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
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


def persist_queue(place: Path, count: int) -> float | None:
    try:
        from persistqueue import SQLiteAckQueue
    except ImportError:
        return None
    queue = SQLiteAckQueue(str(place), auto_commit=True)
    start = time.perf_counter()
    for _ in range(count):
        queue.put(KB)
    elapsed = time.perf_counter() - start
    queue.close()
    return count / elapsed


def raw_append(place: Path, size: int) -> float:
    place.mkdir(parents=True)
    block = os.urandom(1 << 20)
    descriptor = os.open(place / "x", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    start = time.perf_counter()
    for _ in range(size >> 20):
        os.write(descriptor, block)
        os.fdatasync(descriptor)
    elapsed = time.perf_counter() - start
    os.close(descriptor)
    return size / elapsed


def sqlite_many(place: Path, calls: int) -> float:
    place.mkdir(parents=True)
    connection = sqlite3.connect(place / "x.db", isolation_level=None)
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


def victoriametrics(place: Path, size: int, count: int) -> float | None:
    go = shutil.which("go")
    if go is None:
        return None
    binary = RESULTS.resolve() / "vmbench"
    built = subprocess.run(
        [go, "build", "-o", str(binary), "."], cwd=HERE / "victoriametrics", capture_output=True, check=False
    )
    if built.returncode:
        sys.stdout.write(f"victoriametrics is left out: {built.stderr.decode()[-300:]}\n")
        return None
    command = [str(binary), str(place), str(size), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return float(json.loads(done.stdout.splitlines()[-1])["blocks_per_second"])


# Opening
