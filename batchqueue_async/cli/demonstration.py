"""The demonstration: a queue, an exporter on disk, and a destination on a socket that goes away and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchqueue_async.config import QueueConfig
from batchqueue_async.errors import RetryableError
from batchqueue_async.export.config import ExportConfig
from batchqueue_async.export.exporter import Exporter
from batchqueue_async.export.policies import BatchPolicy, BreakerPolicy, RetryPolicy
from batchqueue_async.runtime.manager import BatchQueueManager

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

AWAY_FROM, AWAY_UNTIL = 0.25, 0.6
"""The part of the time in which the destination is away."""


class Destination:
    """A server on a port of loopback that takes lines of JSON, and answers each batch with a byte.

    Attributes:
        seen: how often each record came.
        host, port: where it listens; the same after it was away.
    """

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.host, self.port = "127.0.0.1", 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=1 << 24)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Be away: refuse connections, and break those that there are."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                for record in json.loads(line):
                    self.seen[record["n"]] = self.seen.get(record["n"], 0) + 1
                writer.write(b"+")
                await writer.drain()
        except OSError:
            pass  # it was stopped
        finally:
            self._writers.discard(writer)
            writer.close()


class SocketSink:
    """Sends each batch as a line, and waits for the answer."""

    concurrent = False

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        """Nothing: it connects when it sends."""

    async def send(self, batch: Sequence[Any]) -> None:
        """Send a batch."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._destination.host, self._destination.port)
            reader, writer = self._streams
            writer.write(json.dumps(list(batch)).encode() + b"\n")
            await writer.drain()
            await reader.readexactly(1)
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            where = f"{self._destination.host}:{self._destination.port}"
            raise RetryableError(f"{where} is away ({type(error).__name__})", error_type="network") from error

    async def close(self) -> None:
        """Disconnect."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with contextlib.suppress(OSError):
                await streams[1].wait_closed()


@dataclass(slots=True)
class DemoResult:
    """How it went.

    Attributes:
        produced: records that the program put into the queue.
        arrived: different records that the destination has seen.
        repeated: how often a record came again, which "at least once" allows.
        most_waiting: the most records that waited on disk.
        opened: how often the breaker opened.
    """

    produced: int = 0
    arrived: int = 0
    repeated: int = 0
    most_waiting: int = 0
    opened: int = 0
    lines: list[str] = field(default_factory=list[str])

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.arrived == self.produced


async def demonstrate(path: Path, *, seconds: float, rate: int, say: Callable[[str], object]) -> DemoResult:
    """Run it.

    Args:
        path: a directory for the send queue.
        seconds: how long records are produced.
        rate: records per second.
        say: takes the lines to show.
    """
    result = DemoResult()
    destination = Destination()
    await destination.start()
    config = ExportConfig(
        path=path,
        overflow="block",
        batch=BatchPolicy(max_records=200, linger=0.05),
        retry=RetryPolicy(initial=seconds / 100, max_delay=seconds / 20),
        breaker=BreakerPolicy(threshold=3, reset_timeout=seconds / 40),
    )
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with BatchQueueManager() as manager, Exporter(SocketSink(destination), config, name="demo") as exporter:
        queue = manager.create("demo", QueueConfig(consumer=exporter, max_batch=200))
        shown, phase = began, "here"
        while (now := loop.time()) < began + seconds:
            share = (now - began) / seconds
            if phase == "here" and share >= AWAY_FROM:
                phase = "away"
                await destination.stop()
                say("-- the destination goes away: records wait on disk, and the program goes on")
            elif phase == "away" and share >= AWAY_UNTIL:
                phase = "back"
                await destination.start()
                say("-- the destination is back: what waited is delivered, in batches")
            wanted = int((now - began) * rate) - result.produced
            if wanted > 0:
                result.produced += await queue.produce_many([{"n": result.produced + each} for each in range(wanted)])
            stats = exporter.stats()
            result.most_waiting = max(result.most_waiting, stats.records)
            if now >= shown:
                shown += max(1.0, seconds / 20)
                say(_line(now - began, result.produced, stats))
            await asyncio.sleep(0.02)
        if phase == "away":
            await destination.start()
        await queue.flush()
        await exporter.flush(timeout=max(30.0, seconds))
        stats = exporter.stats()
        say(_line(loop.time() - began, result.produced, stats))
        result.opened = stats.breaker_opens
    await destination.stop()
    result.arrived = len(destination.seen)
    result.repeated = sum(destination.seen.values()) - result.arrived
    return result


def _line(at: float, produced: int, stats: Any) -> str:
    return (
        f"{at:5.1f} s  produced {produced:>8,}  delivered {stats.delivered:>8,}  on disk {stats.records:>8,}  "
        f"breaker {stats.breaker}"
    )
