"""Connects that are cancelled half-way: no task, no socket is left of them, whichever step the client was at."""

from __future__ import annotations

import asyncio
import gc
import types

import pytest

from batchqueue_async.sinks._shared import connection
from batchqueue_async.sinks._shared.connection import SharedConnection, uncut
from batchqueue_async.sinks.amqp import AmqpSink
from batchqueue_async.sinks.base import BatchKey
from batchqueue_async.sinks.kafka import KafkaSink
from batchqueue_async.sinks.nats import NatsSink

STEPS = 25


PLACES = {
    "rabbit_server": lambda address: AmqpSink(f"amqp://{address}/", queue="cut"),
    "kafka": lambda address: KafkaSink(address, "cut"),
    "nats_server": lambda address: NatsSink(f"nats://{address}", subject="cut"),
}


@types.coroutine
def cut(coroutine, step):
    """Cancel a coroutine at its wait of this number."""
    error = None
    while True:
        try:
            future = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            return stop.value
        error = None
        if step == 0:
            if future is not None:
                future.cancel()
                future._asyncio_future_blocking = False
            error = asyncio.CancelledError()
        else:
            try:
                yield future
            except BaseException as caught:
                error = caught
        step -= 1


async def none_left(before):
    """What a client ends by itself may take a while, on a slow machine."""
    async with asyncio.timeout(60):
        while asyncio.all_tasks() - before:
            await asyncio.sleep(0.01)


@pytest.mark.real_time
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("server", "call"), [("rabbit_server", "send"), ("kafka", "send"), ("kafka", "begin"), ("nats_server", "send")]
)
async def test_x_40_a_connect_that_is_cancelled_at_any_step_leaves_nothing_behind(server, call, request):
    before = asyncio.all_tasks()
    address = request.getfixturevalue(server).address
    for step in range(STEPS):
        sink = PLACES[server](address)
        await sink.open()
        work = sink.send([b"x"]) if call == "send" else sink.begin(BatchKey("cut", step + 1))
        task = asyncio.create_task(cut(work, step))
        await asyncio.gather(task, return_exceptions=True)
        await sink.close()
        await none_left(before)
    del sink, work, task
    gc.collect()  # a socket that nobody closed warns here, and a warning is an error


class Client:
    """A client that loses its socket where its connect is cancelled at the second step."""

    def __init__(self, seconds=1.0, error=None):
        self.seconds = seconds
        self.error = error
        self.sockets = 0
        self.ended = []

    async def connect(self):
        self.sockets += 1
        await asyncio.sleep(self.seconds)
        if self.error:
            raise self.error
        return self

    async def end(self, made):
        assert made is self
        self.sockets -= 1
        self.ended.append(asyncio.get_running_loop().time())


class TestUncut:
    async def test_x_40_what_was_made_meanwhile_is_ended(self):
        client = Client(seconds=1.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await uncut(client.connect(), client.end)
        assert client.ended == [1.5]
        assert len(asyncio.all_tasks()) == 1

    async def test_x_40_a_connect_that_never_ends_is_cancelled_after_the_grace(self):
        client = Client(seconds=1e9)
        task = asyncio.create_task(uncut(client.connect(), client.end))
        await asyncio.sleep(1.0)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        assert asyncio.get_running_loop().time() == 1.0 + connection.GRACE
        assert client.ended == []
        assert len(asyncio.all_tasks()) == 1

    async def test_x_40_who_cancels_twice_waits_no_longer(self):
        client = Client(seconds=1e9)
        task = asyncio.create_task(uncut(client.connect(), client.end))
        await asyncio.sleep(1.0)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        assert asyncio.get_running_loop().time() == 1.0
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    @pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError()])
    async def test_x_40_its_own_errors_are_told_apart_from_our_cancellation(self, error):
        client = Client(error=error)
        expected = ValueError if isinstance(error, ValueError) else ConnectionError
        with pytest.raises(expected):
            await uncut(client.connect(), client.end)

    @pytest.mark.parametrize("error", [None, ValueError("no"), asyncio.CancelledError()])
    async def test_x_40_the_next_who_asks_gets_a_connection_of_its_own(self, error):
        clients = [Client(error=error), Client()]
        made = iter(clients)
        shared = SharedConnection(lambda: next(made).connect(), lambda client: client.end(client))
        task = asyncio.create_task(shared.get())
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await shared.get() is clients[1]
        await shared.close()
        assert [client.sockets for client in clients] == [0 if error is None else 1, 0]
