"""One connection that consumes one queue: what came in, what is acknowledged, and how it ends."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, RetryableError
from batchqueue_async.intake.amqp.acks import AckWindow
from batchqueue_async.intake.amqp.broker import close_quietly
from batchqueue_async.intake.amqp.delivery import AmqpDelivery
from batchqueue_async.intake.amqp.publisher import Publisher
from batchqueue_async.intake.amqp.stream import StreamFactory
from batchqueue_async.intake.cancelling import asked_for
from batchqueue_async.intake.ports import Epoch, SessionLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.intake.amqp.broker import Broker
    from batchqueue_async.intake.amqp.stream import Envelope
    from batchqueue_async.intake.ports import DeadLetter, Delivery, Outcomes, Plan, Retry, Room

Reader: TypeAlias = Literal["stream", "client"]
"""Who takes deliveries apart: this package, off the byte stream, or the client.

With both, the connection is read through a stream of ours, which bounds what is read, and acknowledgements are frames
of ours, written between those of the client.
"""

# Frames that the client keeps for the channel until it looks at them, where it takes deliveries apart: the more, the
# fewer turns of the loop. Its own 10 are three messages; and a frame may have 128 KiB.
_CLIENT_FRAMES = 32
_CLOSE_GRACE = 2.0  # seconds
_DEPTH_EVERY = 5.0  # seconds between questions for the queue's length
# RabbitMQ closes a connection that it could not write to for 30 s (`tcp_listen_options.send_timeout`), and what is with
# handlers would be repeated. So reading goes on sooner, for some bytes above the bound: enough to get through what the
# sockets hold to the message that the broker is at, which is then read whole.
_LONGEST_PAUSE = 10.0  # seconds
_BREATH = 8 << 20


class AmqpSession:
    """The state of one channel, from the first delivery to its end.

    Invariants: every tag in `_window` belongs to `_epoch`; `_lost` is set in the turn of the loop in which the epoch
    ends, and after that nothing is written. What the broker has sent and nobody has settled is bounded by the prefetch,
    and in bytes (`_held`: here, waiting in the pool and with handlers, counted once) by pausing the transport. While it
    is paused no answer comes in: nothing is asked over this connection between the first delivery and the stop, which
    lifts the bound, but for the queue's length, which can do without.

    Attributes:
        arguments: what the queue was declared with, if `begin` was to find out.
    """

    def __init__(
        self, broker: Broker, connection: Any, factory: StreamFactory, queue: str, *, plan: Plan, reader: Reader
    ) -> None:
        self.hand_over = False
        self._broker = broker
        self._connection = connection
        self._stream, self._writer = factory.stream, factory.writer
        self._reader: Reader = reader
        self._queue = queue
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._epoch = Epoch(f"{queue}@{id(connection):x}")
        self._window = AckWindow()
        self._buffer: deque[AmqpDelivery] = deque()
        self._held = 0
        self._reading = True
        self._bounded = True
        self._leeway = 0  # what may be held above the bound by bytes, for the broker's sake
        self._pause: asyncio.TimerHandle | None = None
        self.arguments: dict[str, str] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._lost: str | None = None
        self._stopped = False
        self._ended = False
        self._channel: Any = None
        self._tag = ""
        self._depth: int | None = None
        self._pulse: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._publisher = Publisher(
            broker,
            queue=queue,
            letters=plan.dead_letters,
            timeout=max(10.0, 2.0 * broker.heartbeat),
        )

    async def begin(self, *, ask: bool = True) -> None:
        """Check what the queue is, and consume it.

        Args:
            ask: whether to find out what the queue was declared with.

        Raises:
            ConfigError: there is no such queue.
        """
        self._depth = await self._broker.message_count(self._connection, self._queue)
        if self._depth is None:
            raise ConfigError(f"{self._broker.place} has no queue {self._queue!r}; declare it, or correct the name")
        await self._publisher.prepare(self._connection)
        if ask:
            self.arguments = await self._broker.arguments_of(self._connection, self._queue) or {}
        channel = self._channel = await self._connection.channel(
            publisher_confirms=False, frame_buffer_size=_CLIENT_FRAMES
        )
        await channel.basic_qos(prefetch_count=self._plan.prefetch)
        arrived = self._arrived if self._reader == "stream" else None
        self._stream.keep(channel.number, arrived, self._wake, self._lose)
        self._pulse = self._loop.call_later(self._broker.heartbeat, self._check_pulse)
        channel.closing.add_done_callback(partial(self._on_closed, "channel"))
        self._connection.closing.add_done_callback(partial(self._on_closed, "connection"))
        self._tag = (await channel.basic_consume(self._queue, self._on_message)).consumer_tag
        self._asking = self._loop.create_task(self._ask_depth(), name=f"intake-depth-{self._queue}")

    async def take(self, room: Room) -> Sequence[AmqpDelivery]:
        """Wait for deliveries; [] when it was stopped and all have come out."""
        while not self._buffer:
            if self._lost is not None:
                break
            if self._stopped:
                return []
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._lost is not None:
            raise SessionLostError(f"{self._broker.place}, queue {self._queue!r}: {self._lost}")
        buffer, left = self._buffer, room.bytes
        taken: list[AmqpDelivery] = []
        while buffer and left > 0 and len(taken) < room.messages:
            delivery = buffer.popleft()
            taken.append(delivery)
            left -= delivery.size
        return taken

    async def settle(self, outcomes: Outcomes) -> None:
        """Acknowledge what is done up to the first open tag at once, what lies beyond alone; give back the released."""
        freed = 0
        for delivery in cast("list[AmqpDelivery]", outcomes.acked):
            freed += delivery.size
            self._window.done(delivery.tag)
        for delivery in cast("list[AmqpDelivery]", outcomes.released):
            freed += delivery.size
            if not (self.hand_over and self._stopped):
                self._window.give_back(delivery.tag)
        self._held -= freed
        self._mind_bytes()
        self._write()

    async def forward(self, delivery: Delivery, outcome: Retry | DeadLetter) -> None:
        """Publish, wait for the confirmation, then acknowledge."""
        own = cast("AmqpDelivery", delivery)
        await self._publisher.publish(own, outcome)
        if not own.epoch.over:
            self._window.done(own.tag)
            self._held -= own.size
            self._mind_bytes()
            self._write()

    async def flush(self) -> None:
        """Wait until acknowledgements have left for the broker: it answers in order, so any answer says so."""
        if self._lost is None and not self._ended:
            self._lift_bound()
            await self._channel.basic_qos(prefetch_count=self._plan.prefetch)

    async def stop(self) -> None:
        """Cancel the consumer; the broker's answer comes after the last delivery.

        That of a single-active queue is not cancelled: the next one would begin while this one still handles messages,
        and what is given back would come behind what that one has. The end of the connection hands over, and gives
        everything back in its order.
        """
        self._lift_bound()
        if self._stopped or self._lost is not None or self.hand_over:
            self._stopped = True
            if self.hand_over:
                self._drop_buffer()
            self._wake()
            return
        try:
            await self._channel.basic_cancel(self._tag)
        except (Exception, asyncio.CancelledError) as error:  # the session is over in any case
            if asked_for(error):
                raise
            self._lose(f"the consumer could not be cancelled: {type(error).__name__}")
        self._stopped = True
        self._wake()

    async def end(self) -> None:
        """Close everything."""
        if self._ended:
            return
        self._ended = True
        self._stream.let_go()
        self._lose("it was closed")
        for timer in (self._pulse, self._pause):
            if timer is not None:
                timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        closing = [
            self._loop.create_task(step) for step in (_closed(self._connection, self._writer), self._publisher.close())
        ]
        try:
            await asyncio.wait(closing, timeout=_CLOSE_GRACE)
        finally:
            for task in closing:
                task.cancel()
            await asyncio.wait(closing, timeout=_CLOSE_GRACE)

    def lag(self) -> int | None:
        """The messages that are ready in the queue, as the broker said a few seconds ago."""
        return self._depth

    def _write(self) -> None:
        """Write acknowledgements; what waits for a line that is broken is bounded by the prefetch."""
        settlement = self._window.take()
        if self._lost is None and (frames := settlement.frames(self._channel.number)):
            self._writer.write(frames)

    def _arrived(self, envelope: Envelope, body: bytes, raw: bytes) -> None:
        self._put(
            AmqpDelivery(
                body, epoch=self._epoch, queue=self._queue, raw=raw, **envelope._asdict()
            )  # a namedtuple's own
        )

    async def _on_message(self, message: Any) -> None:
        """A delivery as the client makes it; never called where the stream is read here."""
        self._put(
            AmqpDelivery(
                message.body,
                epoch=self._epoch,
                queue=self._queue,
                tag=message.delivery.delivery_tag,
                redelivered=bool(message.delivery.redelivered),
                exchange=message.delivery.exchange or "",
                routing_key=message.delivery.routing_key or "",
                properties=message.header.properties,
            )
        )
        self._wake()

    def _put(self, delivery: AmqpDelivery) -> None:
        if self._lost is not None:
            return
        self._window.received(delivery.tag)
        if self.hand_over and self._stopped:
            return
        self._buffer.append(delivery)
        self._held += delivery.size
        if self._held > self._plan.prefetch_bytes:
            self._mind_bytes()

    def _mind_bytes(self) -> None:
        """Stop reading while too many bytes are held: the broker's bound is by messages alone."""
        if self._lost is not None:
            return
        above = self._held - self._plan.prefetch_bytes
        if above <= 0:
            self._leeway = 0
        full = self._bounded and above > self._leeway
        if full == (not self._reading):
            return
        self._reading = not full
        if full:
            self._stream.rest()
            self._pause = self._loop.call_later(_LONGEST_PAUSE, self._breathe)
            return
        if self._pause is not None:
            self._pause.cancel()
        self._stream.go_on()

    def _breathe(self) -> None:
        """Read a little, though nothing was settled: the broker must be able to write."""
        if not self._leeway:
            log.warning(
                "intake_bytes_above_bound",
                consumer=self._plan.name,
                held=self._held,
                prefetch_bytes=self._plan.prefetch_bytes,
                advice="RabbitMQ closes a connection that is not read for 30 s, so reading goes on above the bound; "
                "lower prefetch, so that as many messages fit into prefetch_bytes",
            )
        self._leeway = self._held - self._plan.prefetch_bytes + _BREATH
        self._mind_bytes()

    def _lift_bound(self) -> None:
        """Read all that comes: answers are waited for, and all that is under way comes out of `take`."""
        self._bounded = False
        self._mind_bytes()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lose(self, reason: str) -> None:
        """The session is over: nothing of it is handled or acknowledged from here on."""
        if self._lost is None:
            self._lost = reason
            self._drop_buffer()
            self._epoch.end()
            self._wake()

    def _drop_buffer(self) -> None:
        """Forget what was not taken: it goes to the next consumer when the connection ends."""
        self._held -= sum(each.size for each in self._buffer)
        self._buffer.clear()
        self._mind_bytes()

    def _check_pulse(self) -> None:
        """A broker that sends nothing for two heartbeats is gone, or the line to it is."""
        if self._lost is not None:
            return
        stream, heartbeat = self._stream, self._broker.heartbeat
        silent = self._loop.time() - stream.last_data
        if not self._reading:
            stream.rested()  # nothing can come in, by our own wish
        elif silent > 2 * heartbeat:
            self._lose(f"nothing came from the broker for {silent:.0f} s, with a heartbeat of {heartbeat} s")
            return
        self._pulse = self._loop.call_later(heartbeat / 2, self._check_pulse)

    def _on_closed(self, what: str, end: asyncio.Future[Any]) -> None:
        error = None if end.cancelled() else end.exception()
        self._lose(f"the {what} is closed{'' if error is None else f': {error}'}")

    async def _ask_depth(self) -> None:
        while self._lost is None:
            await asyncio.sleep(_DEPTH_EVERY)
            if not self._reading:
                continue  # the answer would not come in
            try:
                async with asyncio.timeout(_DEPTH_EVERY):
                    self._depth = await self._broker.message_count(self._connection, self._queue)
            except Exception:  # noqa: BLE001 - a number for statistics; what broke shows where messages are taken
                self._depth = None


async def _closed(connection: Any, writer: asyncio.StreamWriter) -> None:
    try:
        await close_quietly(connection)
    finally:
        writer.transport.abort()  # a client that was interrupted would leave it open


async def open_session(
    broker: Broker, queue: str, plan: Plan, *, reader: Reader, timeout: float, ask: bool = True
) -> AmqpSession:
    """Connect and consume."""
    factory = StreamFactory()
    connection = await broker.connect(factory)
    session = AmqpSession(broker, connection, factory, queue, plan=plan, reader=reader)
    try:
        async with asyncio.timeout(timeout):
            await session.begin(ask=ask)
    except TimeoutError:
        await session.end()
        raise RetryableError(
            f"{broker.place}: the queue {queue!r} could not be consumed within {timeout:g} s", error_type="timeout"
        ) from None
    except BaseException:  # a cancelled one too would leave its connection behind
        await session.end()
        raise
    return session
