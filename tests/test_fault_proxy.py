"""The fault proxy between real sockets: each fault, its end, and the counts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

import pytest

from batchqueue_async.errors import ConfigError
from batchqueue_async.testing import FaultProxy, VirtualTimeLoop

pytestmark = pytest.mark.real_time

LIMIT = 60.0  # real seconds: only a failing test takes them
TICK = 0.002  # seconds: uvloop counts whole milliseconds


class Echo:
    """A server that answers each line with itself, and knows what it was sent."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.arrived = asyncio.Event()
        self.address = ""
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                self.lines.append(line)
                self.arrived.set()
                writer.write(line)
                await writer.drain()
        writer.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, line: bytes) -> bytes:
        self.writer.write(line)
        return await asyncio.wait_for(self.reader.readline(), LIMIT)

    async def gone(self) -> bool:
        """Whether the connection is reset, or becomes so."""
        try:
            await asyncio.wait_for(self.reader.read(), LIMIT)
        except ConnectionResetError:
            return True
        return False

    async def silent(self, seconds: float = 0.05) -> bool:
        """Whether nothing comes for a while: it can be right by luck, and never wrong by slowness."""
        try:
            await asyncio.wait_for(self.reader.read(1), seconds)
        except TimeoutError:
            return True
        return False


@pytest.fixture
async def echo():
    async with Echo() as server:
        yield server


@pytest.fixture
async def proxy(echo):
    async with FaultProxy(echo.address) as proxy:
        yield proxy


@pytest.fixture
async def connect(proxy):
    async with contextlib.AsyncExitStack() as stack:

        async def connect() -> Client:
            reader, writer = await asyncio.open_connection(proxy.host, proxy.port)

            async def close() -> None:
                writer.transport.abort()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

            stack.push_async_callback(close)
            return Client(reader, writer)

        yield connect


async def test_it_passes_and_counts(proxy, connect):
    client = await connect()
    assert await client.ask(b"hello\n") == b"hello\n"
    counts = proxy.counts()
    assert (counts.accepted, counts.active, counts.resets, counts.to_target, counts.from_target) == (1, 1, 0, 6, 6)
    client.writer.write_eof()
    assert await asyncio.wait_for(client.reader.read(), LIMIT) == b""
    big = await connect()
    assert await big.ask(b"x" * 60_000 + b"\n") == b"x" * 60_000 + b"\n"
    assert proxy.counts().from_target == 60_007
    assert proxy.address == f"127.0.0.1:{proxy.port}"


async def test_delay_holds_each_piece_for_its_time(proxy, connect):
    loop = asyncio.get_running_loop()
    client = await connect()
    await proxy.switch("delay", seconds=0.05)
    started = loop.time()
    assert await client.ask(b"slow\n") == b"slow\n"
    assert loop.time() - started >= 0.1 - TICK  # there and back; later is the machine's matter, sooner can't be


async def test_the_end_of_a_fault_ends_its_waits(proxy, connect, echo):
    client = await connect()
    await client.ask(b"warm\n")
    await proxy.switch("delay", seconds=3600)
    client.writer.write(b"now\n")
    assert await client.silent()
    await proxy.switch("pass")
    assert await asyncio.wait_for(client.reader.readline(), LIMIT) == b"now\n"


async def test_reset_cuts_what_is_there_and_what_comes(proxy, connect):
    client = await connect()
    await client.ask(b"a\n")
    await proxy.switch("reset")
    assert await client.gone()
    assert await (await connect()).gone()
    assert proxy.counts().resets == 2
    assert proxy.counts().active == 0
    await proxy.switch("pass")
    assert await (await connect()).ask(b"d\n") == b"d\n"


async def test_cut_resets_once(proxy, connect):
    client = await connect()
    await client.ask(b"a\n")
    await proxy.cut()
    assert await client.gone()
    assert await (await connect()).ask(b"c\n") == b"c\n"


async def test_half_open_accepts_and_never_answers(proxy, connect, echo):
    old = await connect()
    await old.ask(b"a\n")
    await proxy.switch("half_open")
    new = await connect()
    for client in (old, new):
        client.writer.write(b"b\n")
        assert await client.silent()
    assert echo.lines == [b"a\n"]
    assert proxy.fault == "half_open"
    await proxy.switch("pass")
    for client in (old, new):
        assert await asyncio.wait_for(client.reader.readline(), LIMIT) == b"b\n"


async def test_mute_passes_requests_and_no_answers(proxy, connect, echo):
    client = await connect()
    await client.ask(b"a\n")
    echo.arrived.clear()
    await proxy.switch("mute")
    client.writer.write(b"b\n")
    await asyncio.wait_for(echo.arrived.wait(), LIMIT)
    assert await client.silent()
    assert echo.lines == [b"a\n", b"b\n"]


async def test_slow_close_passes_the_end_late(proxy, connect):
    loop = asyncio.get_running_loop()
    client = await connect()
    await client.ask(b"a\n")
    await proxy.switch("slow_close", seconds=0.05)
    started = loop.time()
    client.writer.write_eof()
    assert await asyncio.wait_for(client.reader.read(), LIMIT) == b""
    assert loop.time() - started >= 0.1 - TICK  # the client's end on its way, and the server's on its way back


async def test_limit_is_a_rate_in_each_direction(proxy, connect):
    loop = asyncio.get_running_loop()
    client = await connect()
    await client.ask(b"warm\n")
    await proxy.switch("limit", rate=100_000)
    started = loop.time()
    line = b"x" * 9_999 + b"\n"
    assert await client.ask(line) == line
    assert loop.time() - started >= 0.1 - TICK


async def test_refuse_closes_the_port_and_keeps_its_number(proxy, connect):
    port = proxy.port
    client = await connect()
    await client.ask(b"a\n")
    await proxy.switch("refuse")
    assert await client.gone()
    with pytest.raises(ConnectionRefusedError):
        await connect()
    await proxy.switch("refuse")  # twice is as once
    await proxy.switch("pass")
    assert proxy.port == port
    assert await (await connect()).ask(b"c\n") == b"c\n"


async def test_a_target_that_is_not_there_is_counted():
    async with Echo() as gone:
        address = gone.address
    async with FaultProxy(address) as proxy:
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        assert await asyncio.wait_for(reader.read(), LIMIT) == b""
        writer.close()
        await writer.wait_closed()
        assert proxy.counts().unreachable == 1


async def test_a_server_that_goes_takes_its_connections_along(connect, echo):
    client = await connect()
    await client.ask(b"a\n")
    await echo.__aexit__()
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(client.reader.read(), LIMIT) == b""


async def test_close_may_be_called_twice_and_start_again(proxy, connect):
    port = proxy.port
    await proxy.close()
    await proxy.close()
    with pytest.raises(ConnectionRefusedError):
        await connect()
    await proxy.start()
    assert proxy.port == port
    assert await (await connect()).ask(b"a\n") == b"a\n"


@pytest.mark.parametrize(
    ("target", "fault", "options", "message"),
    [
        ("nowhere", "pass", {}, "target='nowhere' has no host and port"),
        ("localhost:x", "pass", {}, "target='localhost:x' has no host and port"),
        ("127.0.0.1:1", "explode", {}, "fault='explode' is unknown; give one of pass, delay"),
        ("127.0.0.1:1", "delay", {"seconds": -1}, "seconds=-1"),
        ("127.0.0.1:1", "limit", {"rate": 0}, "rate=0"),
    ],
)
async def test_wrong_values_are_named(target, fault, options, message):
    with pytest.raises(ConfigError, match=message):
        await FaultProxy(target).switch(fault, **options)


def test_on_a_virtual_clock_its_waits_take_no_time():
    async def main() -> float:
        loop = asyncio.get_running_loop()
        async with Echo() as echo, FaultProxy(echo.address) as proxy:
            await proxy.switch("delay", seconds=100)
            reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
            writer.write(b"a\n")
            assert await reader.readline() == b"a\n"
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return loop.time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main()) == 200
