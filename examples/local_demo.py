"""The demo that needs nothing but Python: `make demo-local`. A destination goes away and comes back; nothing is lost.

Events go through a queue, in batches to an exporter, and from its directory on disk to a destination: a process of its
own, which is killed while events come in, and is started again. In the end each event is looked for there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import batchqueue_async as bq

if TYPE_CHECKING:
    from collections.abc import Sequence

TICK = 0.1
WIDTH = 40


# -- the destination, a process of its own -------------------------------------------------------------------------


async def serve(address: str, path: Path) -> None:
    """Take batches, `count` and as many lines, append them to a file, and confirm each batch."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                count = int(await reader.readuntil())
                lines = b"".join([await reader.readuntil() for _ in range(count)])
                with path.open("ab") as file:
                    file.write(lines)
                writer.write(b"ok\n")
                await writer.drain()

    async with await asyncio.start_unix_server(answer, address) as server:
        await server.serve_forever()


# -- the sink ------------------------------------------------------------------------------------------------------


class LinesSink:
    """Sends numbers to the destination over one connection, which is made when it is needed."""

    concurrent = False

    def __init__(self, address: str) -> None:
        self.address = address
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        """Nothing: the destination may be away."""

    async def send(self, batch: Sequence[int]) -> None:
        """Send a batch and wait for its confirmation."""
        try:
            async with asyncio.timeout(2.0):
                if self._connection is None:
                    self._connection = await asyncio.open_unix_connection(self.address)
                reader, writer = self._connection
                writer.write(b"%d\n" % len(batch) + b"".join(b"%d\n" % number for number in batch))
                await reader.readuntil()
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            await self.close()
            raise bq.RetryableError(f"the destination: {type(error).__name__}", error_type="network") from error

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection[1].close()


# -- the demo ------------------------------------------------------------------------------------------------------


class Demo:
    """A run of the demo: what is accepted, the destination's process, and the lines that show both."""

    def __init__(self, home: Path, arguments: argparse.Namespace) -> None:
        self.received = home / "received"
        self.count: int = arguments.count
        self.seconds: float = arguments.seconds
        self.address = str(home / "destination")
        self.accepted = 0
        self.most_waiting = 0
        self._destination: asyncio.subprocess.Process | None = None
        self._began = time.monotonic()
        self._shown = 0.0
        self._live = sys.stdout.isatty()

    async def start_destination(self) -> None:
        """Start the destination."""
        program = (sys.executable, __file__, "--serve", self.address, str(self.received))
        self._destination = await asyncio.create_subprocess_exec(*program)

    async def kill_destination(self) -> None:
        """Kill the destination, as a power cut would."""
        process, self._destination = self._destination, None
        if process is not None:
            process.kill()
            await process.wait()

    def show(self, exporter: bq.Exporter, *, now: bool = False) -> None:
        """One line: how many events are where."""
        seconds = time.monotonic() - self._began
        stats = exporter.stats()
        self.most_waiting = max(self.most_waiting, stats.records)
        if not now and seconds - self._shown < (TICK if self._live else 1.0):
            return
        self._shown = seconds
        full = round(WIDTH * min(stats.records / max(self.count, 1), 1.0))
        away = "up  " if self._destination is not None else "DOWN"
        line = (
            f"{seconds:4.1f} s  destination {away}  breaker {stats.breaker:<9}  accepted {self.accepted:>7,}  "
            f"waiting on disk {stats.records:>7,} [{'#' * full}{' ' * (WIDTH - full)}]  delivered {stats.delivered:>7,}"
        )
        print(f"\r\x1b[2K{line}" if self._live else line, end="" if self._live else "\n", flush=True)

    async def produce(self, queue: bq.BatchQueue[int], exporter: bq.Exporter) -> None:
        """Events at a steady rate; the destination is away for the middle third of the time."""
        began = time.monotonic()
        while self.accepted < self.count:
            share = min((time.monotonic() - began) / self.seconds, 1.0)
            if self._destination is not None and 1 / 3 <= share < 2 / 3:
                await self.kill_destination()
            elif self._destination is None and share >= 2 / 3:
                await self.start_destination()
            due = int(self.count * share) - self.accepted
            self.accepted += await queue.produce_many(range(self.accepted, self.accepted + due))
            self.show(exporter)
            await asyncio.sleep(TICK)

    def check(self) -> int:
        """Look for each event at the destination; the exit status."""
        found = Counter(map(int, self.received.read_text(encoding="ascii").split()))
        lost = self.count - len(found)
        again = found.total() - len(found)
        print(f"\n{self.count:,} events accepted, at most {self.most_waiting:,} waited while the destination was away")
        print(f"lost: {lost}; delivered more than once: {again:,} (what was not confirmed when it was killed)")
        return 1 if lost else 0


async def run(home: Path, arguments: argparse.Namespace, manager: bq.BatchQueueManager) -> int:
    """Run the demo; its exit status."""
    demo = Demo(home, arguments)
    config = bq.ExportConfig(
        path=home / "send-queue",
        batch=bq.BatchPolicy(max_records=500, linger=0.05),
        retry=bq.RetryPolicy(initial=0.2, max_delay=1.0),
        breaker=bq.BreakerPolicy(threshold=3, reset_timeout=0.5),
        workers=bq.WorkerPolicy.fixed(1),  # the sink has one connection
    )
    await demo.start_destination()
    try:
        async with bq.Exporter(LinesSink(demo.address), config) as exporter:
            queue = manager.create("events", bq.QueueConfig(consumer=exporter))
            await demo.produce(queue, exporter)
            await queue.flush()
            flushed = asyncio.create_task(exporter.flush(timeout=30.0))
            while not flushed.done():
                demo.show(exporter)
                await asyncio.wait([flushed], timeout=TICK)
            await flushed
            demo.show(exporter, now=True)
    finally:
        await demo.kill_destination()
    return demo.check()


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40_000, help="how many events (%(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="over how long (%(default)s)")
    parser.add_argument("--serve", nargs=2, metavar=("ADDRESS", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(arguments.serve[0], Path(arguments.serve[1])))
        return
    logging.basicConfig(level=logging.ERROR)  # the table says it too
    with tempfile.TemporaryDirectory() as home:
        status = bq.run(functools.partial(run, Path(home), arguments))
    sys.exit("interrupted" if status is None else status)


if __name__ == "__main__":
    main()
