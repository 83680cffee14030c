"""Deliveries are taken off the bytes in whatever pieces those come; all else reaches the client unchanged."""

from __future__ import annotations

import asyncio
from typing import Any

import pamqp.body
import pamqp.frame
import pamqp.header
import pamqp.heartbeat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands

from batchqueue_async.intake.amqp.stream import DeliveryStream, Envelope

CHANNEL = 3
Taken = list[tuple[Envelope, bytes, bytes]]


def message(tag: int, body: bytes, *, channel: int = CHANNEL, piece: int = 100, headers: Any = None) -> bytes:
    deliver = commands.Basic.Deliver("ctag", tag, tag % 2 == 0, "shop", f"key.{tag}")
    properties = commands.Basic.Properties(headers=headers, delivery_mode=2)
    frames = [deliver, pamqp.header.ContentHeader(0, len(body), properties)]
    frames += [pamqp.body.ContentBody(body[at : at + piece]) for at in range(0, len(body), piece)]
    return b"".join(pamqp.frame.marshal(frame, channel) for frame in frames)


def other(number: int) -> bytes:
    """What is the client's: heartbeats, answers, confirmations, messages and returned messages of other channels."""
    match number % 4:
        case 0:
            return pamqp.frame.marshal(pamqp.heartbeat.Heartbeat(), 0)
        case 1:
            return pamqp.frame.marshal(commands.Basic.Ack(number), 9)
        case 2:
            return message(number, b"another channel's", channel=4)
        case _:
            return pamqp.frame.marshal(commands.Basic.CancelOk("ctag"), CHANNEL)


class Stream:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.taken: Taken = []
        self.chunks = 0
        self.lost: list[str] = []
        self.reader = DeliveryStream(loop)
        self.reader.keep(CHANNEL, lambda *what: self.taken.append(what), self.chunk, self.lost.append)

    def chunk(self) -> None:
        self.chunks += 1

    @property
    def passed(self) -> bytes:
        return bytes(self.reader._buffer)  # what the client would read


async def test_one_message_is_taken_whole() -> None:
    stream = Stream(asyncio.get_running_loop())
    stream.reader.feed_data(message(1, b"x" * 250) + message(2, b""))
    assert [(one[0], one[1]) for one in stream.taken] == [
        (Envelope(1, False, "shop", "key.1"), b"x" * 250),
        (Envelope(2, True, "shop", "key.2"), b""),
    ]
    assert stream.chunks == 1
    header = pamqp.header.ContentHeader()
    header.unmarshal(stream.taken[0][2])
    assert (header.body_size, header.properties.delivery_mode) == (250, 2)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 250)), max_size=12),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
)
def test_any_pieces_of_any_frames(parts: list[tuple[bool, int]], pieces: list[int]) -> None:
    wire, bodies, rest = b"", [], b""
    for number, (ours, size) in enumerate(parts):
        if ours:
            bodies.append(bytes([number]) * size)
            wire += message(number + 1, bodies[-1])
        else:
            rest += (foreign := other(number))
            wire += foreign

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stream = Stream(loop)
        stream.reader._fed = loop.time() + 3600  # no heartbeat of our own among what is compared
        left, turn = wire, 0
        while left:
            size = pieces[turn % len(pieces)]
            stream.reader.feed_data(left[:size])
            left, turn = left[size:], turn + 1
        assert [one[1] for one in stream.taken] == bodies
        assert stream.passed == rest
        assert stream.lost == []

    asyncio.run(main())


async def test_before_a_channel_is_kept_the_client_gets_everything() -> None:
    reader = DeliveryStream(asyncio.get_running_loop())
    wire = other(0) + message(1, b"early") + other(1)
    for at in range(0, len(wire), 7):
        reader.feed_data(wire[at : at + 7])
    assert bytes(reader._buffer) == wire  # what the client would read


async def test_a_frame_that_is_cut_where_keeping_begins_is_put_together() -> None:
    stream = Stream(asyncio.get_running_loop())
    stream.reader.let_go()
    cut = other(0) + message(1, b"body")
    stream.reader.feed_data(cut[:11])
    stream.reader.keep(CHANNEL, lambda *what: stream.taken.append(what), stream.chunk, stream.lost.append)
    stream.reader.feed_data(cut[11:])
    assert [one[1] for one in stream.taken] == [b"body"]
    assert stream.passed.startswith(other(0))


async def test_a_peer_of_another_protocol_is_the_clients_affair() -> None:
    reader = DeliveryStream(asyncio.get_running_loop())
    reader.feed_data(b"AMQP\x00\x00\x09\x01")
    assert bytes(reader._buffer) == b"AMQP\x00\x00\x09\x01"


async def test_the_client_sees_a_sign_of_life_of_a_busy_connection() -> None:
    loop = asyncio.get_running_loop()
    stream = Stream(loop)
    stream.reader._fed = loop.time() - 2
    stream.reader.feed_data(message(1, b"a"))
    stream.reader.feed_data(message(2, b"b"))
    assert stream.passed == pamqp.frame.marshal(pamqp.heartbeat.Heartbeat(), 0)


@pytest.mark.parametrize(
    ("frame", "channel", "words"),
    [
        (commands.Basic.Cancel("ctag"), CHANNEL, "cancelled the consumer"),
        (commands.Channel.Close(406, "PRECONDITION_FAILED - x", 0, 0), CHANNEL, "channel: 406 PRECONDITION_FAILED - x"),
        (commands.Connection.Close(320, "CONNECTION_FORCED - bye", 0, 0), 0, "connection: 320 CONNECTION_FORCED - bye"),
    ],
    ids=["cancel", "channel", "connection"],
)
async def test_in_24_an_end_is_told_in_the_turn_it_comes(frame: Any, channel: int, words: str) -> None:
    stream = Stream(asyncio.get_running_loop())
    wire = pamqp.frame.marshal(frame, channel)
    stream.reader.feed_data(wire)
    assert len(stream.lost) == 1
    assert words in stream.lost[0]
    assert stream.passed == wire
    stream.reader.feed_eof()
    assert len(stream.lost) == 1


async def test_the_end_of_another_channel_is_nothing_of_ours() -> None:
    stream = Stream(asyncio.get_running_loop())
    stream.reader.feed_data(pamqp.frame.marshal(commands.Channel.Close(404, "NOT_FOUND", 0, 0), 5))
    assert stream.lost == []


async def test_a_broken_connection_is_told() -> None:
    stream = Stream(asyncio.get_running_loop())
    stream.reader.set_exception(ConnectionResetError("reset"))
    assert stream.lost == ["the connection broke: ConnectionResetError"]


class Socket:
    """A transport that remembers whether it is read, and minds being told twice, as uvloop's do."""

    def __init__(self):
        self.read = True

    def pause_reading(self):
        assert self.read
        self.read = False

    def resume_reading(self):
        assert not self.read
        self.read = True


async def test_reading_goes_on_when_neither_the_client_nor_we_want_it_to_rest():
    socket = Socket()
    stream = DeliveryStream(asyncio.get_running_loop())
    stream.set_transport(socket)
    frame = pamqp.frame.marshal(pamqp.body.ContentBody(bytes(400_000)), CHANNEL)  # more than a stream reader keeps
    stream.rest()
    stream.feed_data(frame)
    assert await stream.readexactly(len(frame)) == frame
    assert not socket.read, "the client has room, and we have none"
    stream.feed_data(frame)
    stream.go_on()
    assert not socket.read, "we have room, and the client has none"
    heartbeat = 8
    assert (await stream.readexactly(len(frame) + heartbeat))[:-heartbeat] == frame
    assert socket.read
    stream.rest()
    assert not socket.read
    stream.go_on()
    assert socket.read
