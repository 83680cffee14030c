"""A TCP proxy on loopback between a client and a real server, which injects faults into what passes.

Public as `batchqueue_async.testing.FaultProxy`. Each fault is one that networks have:

| fault | what the client meets |
|---|---|
| `pass` | nothing: everything passes |
| `delay` | each piece of data waits `seconds` on its way, in both directions |
| `limit` | a line of `rate` bytes a second, in each direction of each connection |
| `half_open` | connections are accepted, nothing passes and nobody answers |
| `mute` | requests arrive, the answers never come: whether they took effect stays unknown |
| `slow_close` | data passes, the end of a connection only after `seconds` |
| `reset` | connections that are there, and each new one, are reset |
| `refuse` | connections that are there are reset, new ones are refused: the port is closed |

What `half_open` and `mute` hold back is held, not lost: it goes on when the fault ends, as after a healed partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

Fault = Literal["pass", "delay", "limit", "half_open", "mute", "slow_close", "reset", "refuse"]
Direction = Literal["to_target", "from_target"]

_PIECE = 65536
_TICKS = 20  # pieces per second that a limited line moves
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCounts:
    """What passed through a `FaultProxy` so far.

    Attributes:
        accepted: connections that clients made.
        active: those that are there now.
        resets: connections that the proxy reset.
        unreachable: connections that were closed because the target did not accept its half.
        to_target, from_target: bytes passed on, by direction.
    """

    accepted: int
    active: int
    resets: int
    unreachable: int
    to_target: int
    from_target: int


class FaultProxy:
    """Passes TCP connections on to a server, until told to delay, stall, cut or refuse them.

    The port stays the same through all faults. Use it as an async context manager, or call `start` and `close`.

    Args:
        target: the server, as "host:port".
        host: where to listen; the loopback interface.

    Example:
        >>> async def main() -> bytes:
        ...     async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ...         writer.write(b"hello")
        ...         writer.close()
        ...     server = await asyncio.start_server(greet, "127.0.0.1")
        ...     port = server.sockets[0].getsockname()[1]
        ...     async with server, FaultProxy(f"127.0.0.1:{port}") as proxy:
        ...         reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        ...         greeting = await reader.read()
        ...         writer.close()
        ...         await proxy.switch("refuse")
        ...         try:
        ...             await asyncio.open_connection(proxy.host, proxy.port)
        ...         except ConnectionRefusedError:
        ...             return greeting
        ...         raise AssertionError("not refused")
        >>> asyncio.run(main())
        b'hello'
    """

    def __init__(self, target: str, *, host: str = "127.0.0.1") -> None:
        name, _, port = target.rpartition(":")
        if not name or not port.isdecimal():
            raise ConfigError(f"fault proxy: target={target!r} has no host and port; give 'host:port'")
        self.target = target
        self.host = host
        self.port = 0
        self._target_host, self._target_port = name, int(port)
        self._fault: Fault = "pass"
        self._seconds = 0.0
        self._rate = 0.0
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._accepted = self._resets = self._unreachable = 0
        self._passed: dict[Direction, int] = {"to_target": 0, "from_target": 0}

    @property
    def address(self) -> str:
        """Where clients connect, as "host:port"."""
        return f"{self.host}:{self.port}"

    @property
    def fault(self) -> Fault:
        """The fault of the moment."""
        return self._fault

    def counts(self) -> FaultCounts:
        """A snapshot of the counts."""
        return FaultCounts(
            accepted=self._accepted,
            active=len(self._connections),
            resets=self._resets,
            unreachable=self._unreachable,
            to_target=self._passed["to_target"],
            from_target=self._passed["from_target"],
        )

    async def start(self) -> None:
        """Listen, on a free port the first time, on the same one from then on."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, self.host, self.port)
            self.port = int(self._server.sockets[0].getsockname()[1])

    async def switch(self, fault: Fault, *, seconds: float = 0.1, rate: float = 65536.0) -> None:
        """Set the fault, for the connections that are there and for new ones; "pass" ends it.

        Args:
            fault: one of the table above.
            seconds: how long `delay` and `slow_close` wait.
            rate: the bytes a second that `limit` lets through.
        """
        if fault not in get_args(Fault):
            raise ConfigError(f"fault proxy: fault={fault!r} is unknown; give one of {', '.join(get_args(Fault))}")
        if seconds < 0 or rate <= 0:
            raise ConfigError(f"fault proxy: seconds={seconds}, rate={rate}; give seconds >= 0 and rate > 0")
        self._fault, self._seconds, self._rate = fault, seconds, rate
        self._changed.set()
        self._changed = asyncio.Event()
        if fault == "refuse":
            self._stop_listening()
        else:
            await self.start()
        if fault in {"refuse", "reset"}:
            await self.cut()

    async def cut(self) -> None:
        """Reset all connections that are there, once; whether new ones pass is the fault's matter."""
        connections, self._connections = self._connections, {}
        for task, writer in connections.items():
            self._reset(writer)
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def close(self) -> None:
        """Stop listening, and reset what is there; may be called twice."""
        self._stop_listening()
        await self.cut()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- connections ---------------------------------------------------------------------------------------------

    def _stop_listening(self) -> None:
        # Not waited for: newer Pythons wait for the connections too, and those end in a way of their own.
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._accepted += 1
        if self._fault in {"reset", "refuse"}:
            self._reset(writer)
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="fault-proxy")
        self._connections[task] = writer
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        self._resets += 1
        raw = writer.get_extra_info("socket")
        if raw is None:  # uvloop gives none of a connection that is gone
            return
        with contextlib.suppress(OSError):  # it may be gone already
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._gate("to_target")
            try:
                target_reader, target_writer = await asyncio.open_connection(self._target_host, self._target_port)
            except OSError:
                self._unreachable += 1
                return
            try:
                await _both(
                    self._pump(reader, target_writer, "to_target"), self._pump(target_reader, writer, "from_target")
                )
            finally:
                await _end(target_writer)
        finally:
            await _end(writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        while True:
            await self._gate(direction)
            size = max(1, min(_PIECE, int(self._rate / _TICKS))) if self._fault == "limit" else _PIECE
            data = await reader.read(size)
            await self._gate(direction)  # the fault may have come while nothing did
            if not data:
                break
            if self._fault == "delay":
                await self._pause(self._seconds)
            elif self._fault == "limit":
                await self._pause(len(data) / self._rate)
            await self._gate(direction)
            writer.write(data)
            self._passed[direction] += len(data)
            await writer.drain()
        if self._fault == "slow_close":
            await self._pause(self._seconds)
        if writer.can_write_eof():
            writer.write_eof()

    async def _gate(self, direction: Direction) -> None:
        while self._fault == "half_open" or (self._fault == "mute" and direction == "from_target"):
            await self._changed.wait()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):  # the time is over, and the fault the same
            await asyncio.wait_for(self._changed.wait(), seconds)


async def _both(*pumps: Coroutine[Any, Any, None]) -> None:
    """Run both directions to their ends; one that breaks ends the other, as the connection is gone then."""
    try:
        async with asyncio.TaskGroup() as group:
            for pump in pumps:
                group.create_task(pump)
    except* OSError:
        pass  # a reset by either side: it is passed on by closing


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):  # it was reset: then it is closed
        await writer.wait_closed()
