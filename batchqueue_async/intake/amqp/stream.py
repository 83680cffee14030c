"""The bytes of a connection, of which the deliveries of one channel are taken out before the client sees them.

The client keeps the connection: handshake, TLS, heartbeats, declarations, publishing, errors. Of a message it would
make three queue operations and a task; here it costs a few slices. What is not a delivery passes on unchanged.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Callable

_FRAME = struct.Struct(">BHI")
_METHOD_ID = struct.Struct(">I")
_DELIVERY = struct.Struct(">QBB")
_BODY_SIZE = struct.Struct(">Q")
_CODE = struct.Struct(">H")
_METHOD, _HEADER, _BODY = 1, 2, 3
_HEAD, _FRAMING = 7, 8  # bytes before a frame's payload, and around it
_DELIVER = 60 << 16 | 60
_CANCEL = 60 << 16 | 30
_CHANNEL_CLOSE = 20 << 16 | 40
_CONNECTION_CLOSE = 10 << 16 | 50
_HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"
_HEARTBEAT_EVERY = 1.0  # seconds


class _ReadSwitch:
    """A transport as its stream reader sees it: reading goes on when neither the reader nor we want it to rest."""

    def __init__(self, transport: asyncio.ReadTransport) -> None:
        self._transport = transport
        self._full = False
        self._resting = False
        self._stopped = False

    def pause_reading(self) -> None:
        """The reader has more than its limit."""
        self._full = True
        self._turn()

    def resume_reading(self) -> None:
        """The reader has room again."""
        self._full = False
        self._turn()

    def rest(self, resting: bool) -> None:  # noqa: FBT001 - it is the state
        """Whether we want it to rest."""
        self._resting = resting
        self._turn()

    def _turn(self) -> None:
        stopped = self._full or self._resting
        if stopped != self._stopped:
            self._stopped = stopped
            (self._transport.pause_reading if stopped else self._transport.resume_reading)()


class Envelope(NamedTuple):
    """What `basic.deliver` says of a message."""

    tag: int
    redelivered: bool
    exchange: str
    routing_key: str


class DeliveryStream(asyncio.StreamReader):
    """A stream reader that keeps the deliveries of one channel, and reports its end in the turn the bytes come in.

    Attributes:
        last_data: the loop's time of the last bytes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._clock = loop.time
        self._rest = bytearray()  # the beginning of a frame whose end has not come
        self._raw = False  # a peer that does not speak AMQP 0-9-1 is the client's affair
        self._channel = 0
        self._on_delivery: Callable[[Envelope, bytes, bytes], None] | None = None
        self._on_chunk: Callable[[], None] | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._envelope: Envelope | None = None
        self._header = b""
        self._parts: list[bytes] = []
        self._left = 0
        self._fed = 0.0
        self._switch: _ReadSwitch | None = None
        self.last_data = loop.time()

    def set_transport(self, transport: asyncio.BaseTransport) -> None:
        """Called once, by the protocol: the connection is made."""
        self._switch = _ReadSwitch(cast("asyncio.ReadTransport", transport))
        super().set_transport(cast("asyncio.BaseTransport", self._switch))

    def rest(self) -> None:
        """Read nothing more until `go_on`."""
        if self._switch is not None:
            self._switch.rest(True)

    def go_on(self) -> None:
        """Read again."""
        self.rested()
        if self._switch is not None:
            self._switch.rest(False)

    def keep(
        self,
        channel: int,
        on_delivery: Callable[[Envelope, bytes, bytes], None] | None,
        on_chunk: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Keep the deliveries of a channel from now on, or only look for its end.

        Args:
            channel: its number.
            on_delivery: called with the envelope, the body, and the payload of the content header; None leaves
                deliveries to the client.
            on_chunk: called after the deliveries that came in together.
            on_lost: called with the reason when the channel, its consumer or the connection ends.
        """
        self._channel = channel
        self._on_delivery = on_delivery
        self._on_chunk = on_chunk
        self._on_lost = on_lost

    def let_go(self) -> None:
        """Call nobody any more; what comes in passes on to the client."""
        self._on_delivery = self._on_chunk = self._on_lost = None

    def rested(self) -> None:
        """Reading was paused here: the silence was not the broker's, nor does the client have to take it for that."""
        self.last_data = self._fed = self._clock()
        super().feed_data(_HEARTBEAT)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # what transports give is bytes
        """Take what is ours out of the bytes, and pass on the rest."""
        self.last_data = self._clock()
        if self._raw or (not self._rest and data.startswith(b"AMQP")):
            self._raw = True
            super().feed_data(data)
            return
        if self._on_lost is None and not self._rest:
            end = _whole_frames(data)
            if end:
                super().feed_data(data[:end])
            self._rest += data[end:]
            return
        self._rest += data
        self._split()

    def feed_eof(self) -> None:
        """The peer has ended the connection."""
        self._lose("the broker closed the connection")
        super().feed_eof()

    def set_exception(self, exc: Exception) -> None:
        """The connection broke."""
        self._lose(f"the connection broke: {type(exc).__name__}")
        super().set_exception(exc)

    def _split(self) -> None:
        buffer, at, end = self._rest, 0, len(self._rest)
        view = memoryview(buffer)
        passed: list[bytes] = []
        passed_from = 0  # frames of the client that stand together are passed on as one piece
        taken = False
        try:
            while end - at >= _FRAMING:
                kind, channel, size = _FRAME.unpack_from(view, at)
                after = at + size + _FRAMING
                if after > end:
                    break
                if channel == self._channel and self._on_delivery is not None and self._is_ours(view, kind, at, after):
                    if passed_from < at:
                        passed.append(bytes(view[passed_from:at]))
                    passed_from = after
                    taken = True
                elif kind == _METHOD:
                    self._notice(view, channel, at)
                at = after
            if passed_from < at:
                passed.append(bytes(view[passed_from:at]))
        finally:
            view.release()
        del buffer[:at]
        if taken and not passed and self.last_data - self._fed >= _HEARTBEAT_EVERY:
            # The client takes a connection without frames for a dead one.
            passed.append(_HEARTBEAT)
        if passed:
            self._fed = self.last_data
            super().feed_data(b"".join(passed))
        if taken and self._on_chunk is not None:
            self._on_chunk()

    def _is_ours(self, view: memoryview, kind: int, at: int, after: int) -> bool:
        """Whether a frame belongs to a delivery; if so, it is taken."""
        if kind == _METHOD:
            if _METHOD_ID.unpack_from(view, at + _HEAD)[0] != _DELIVER:
                return False
            self._envelope = _envelope(view, at + _HEAD + 4)
            return True
        if self._envelope is None:
            return False  # the content of a returned message
        if kind == _HEADER:
            self._header = bytes(view[at + _HEAD : after - 1])
            self._left = _BODY_SIZE.unpack_from(self._header, 4)[0]
        elif kind == _BODY:
            part = bytes(view[at + _HEAD : after - 1])
            self._left -= len(part)
            self._parts.append(part)
        if self._left <= 0:
            self._deliver(self._envelope)
        return True

    def _deliver(self, envelope: Envelope) -> None:
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        header, self._header, self._parts, self._envelope = self._header, b"", [], None
        if self._on_delivery is not None:
            self._on_delivery(envelope, body, header)

    def _notice(self, view: memoryview, channel: int, at: int) -> None:
        """Tell at once what ends the consumer; the client gets the frame too, and does its own part."""
        if self._on_lost is None:
            return
        method = _METHOD_ID.unpack_from(view, at + _HEAD)[0]
        if channel == self._channel and method == _CANCEL:
            self._lose("the broker cancelled the consumer; its queue was deleted or moved")
        elif channel == self._channel and method == _CHANNEL_CLOSE:
            self._lose(f"the broker closed the channel: {_reply(view, at + _HEAD + 4)}")
        elif channel == 0 and method == _CONNECTION_CLOSE:
            self._lose(f"the broker closed the connection: {_reply(view, at + _HEAD + 4)}")

    def _lose(self, reason: str) -> None:
        tell = self._on_lost
        if tell is not None:
            self.let_go()
            tell(reason)


class StreamFactory:
    """Gives the client a connection whose reader is a `DeliveryStream`; the client's class for that is its base.

    Attributes:
        stream: the reader of the last connection made.
        writer: its writer, for acknowledgements.
    """

    stream: DeliveryStream
    writer: asyncio.StreamWriter

    def cut(self) -> None:
        """End the connection without a good-bye, if one was made: a client that was interrupted would leave it open."""
        if hasattr(self, "writer"):
            self.writer.transport.abort()

    async def create(self, url: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, with TLS for `amqps`."""
        loop = asyncio.get_running_loop()
        provider = options.pop("ssl_context_provider", None)
        context = await provider.get_context() if url.scheme == "amqps" and provider is not None else None
        self.stream = DeliveryStream(loop)
        protocol = asyncio.StreamReaderProtocol(self.stream, loop=loop)
        transport, _ = await loop.create_connection(lambda: protocol, url.host, url.port, ssl=context)
        self.writer = asyncio.StreamWriter(transport, protocol, self.stream, loop)
        return self.stream, self.writer


def _envelope(view: memoryview, at: int) -> Envelope:
    at += 1 + view[at]  # the consumer's tag: a channel has one consumer here
    tag, redelivered, length = _DELIVERY.unpack_from(view, at)
    at += _DELIVERY.size
    exchange = str(view[at : at + length], "utf-8", "replace")
    at += length
    return Envelope(tag, bool(redelivered & 1), exchange, str(view[at + 1 : at + 1 + view[at]], "utf-8", "replace"))


def _reply(view: memoryview, at: int) -> str:
    """The code and text that the broker closes with."""
    code = _CODE.unpack_from(view, at)[0]
    return f"{code} {str(view[at + 3 : at + 3 + view[at + 2]], 'utf-8', 'replace')}"


def _whole_frames(data: bytes) -> int:
    """Where the last whole frame ends."""
    at, end = 0, len(data)
    while end - at >= _FRAMING:
        after: int = at + _FRAME.unpack_from(data, at)[2] + _FRAMING
        if after > end:
            break
        at = after
    return at
