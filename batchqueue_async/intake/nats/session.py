"""Pulls of our own on one inbox, acknowledgements in one write, and progress for what waits.

A client's `fetch` asks, waits, and asks again; here the next pull goes out while the messages of the last are handled.
Pulls end after a time and carry a heartbeat, so that one that was lost with its server is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, RetryableError
from batchqueue_async.intake.nats.message import NatsDelivery
from batchqueue_async.intake.portions import Portion
from batchqueue_async.intake.ports import DeadLetter, Delivery, Epoch, Outcomes, Retry, Room, SessionLostError
from batchqueue_async.sinks._shared.extras import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.intake.ports import Plan, Taken

_NANO = 1_000_000_000
_MISSED = 3  # heartbeats
_ORDERS = "nats-"
_NAK = b"-NAK"
_TERM = b"+TERM"
_PROGRESS = b"+WPI"


class NatsSession:
    """One connection that pulls from one consumer of a stream.

    `_asked` counts messages that were asked for and have not come. With what is in `_buffer` it never passes the room
    that the pool has given, so that the broker does not deliver what would wait here for long.
    """

    hand_over = False

    def __init__(
        self, client: Any, plan: Plan, *, stream: str, durable: str, ack_wait: float, expires: float, heartbeat: float
    ) -> None:
        self.epoch = Epoch(f"{stream}/{durable}")
        self._client = client
        self._plan = plan
        self._stream = stream
        self._ack_wait = ack_wait
        self._expires = expires
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop()
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._inbox: str = client.new_inbox()
        self._subscription: Any = None
        self._jetstream = client.jetstream()
        self._buffer: deque[NatsDelivery] = deque()
        self._asked = 0
        self._pulls: dict[str, int] = {}
        self._numbers = 0
        self._heard = 0.0
        self._bell: asyncio.Future[None] | None = None
        self._stopped = False
        self._over: Exception | None = None
        self._ended = False
        self._lag: int | None = None
        self._portion = Portion()
        # What is here and has no outcome, the oldest first: the broker hears that it is being worked on.
        self._held: dict[NatsDelivery, None] = {}
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen at the inbox, and keep alive what is held."""
        self._subscription = await self._client.subscribe(
            f"{self._inbox}.*", cb=self._came, pending_msgs_limit=-1, pending_bytes_limit=0
        )
        self._heard = self._loop.time()
        self._keeper = self._loop.create_task(self._keep_alive(), name=f"intake-{self._plan.name}-keep-alive")

    def lose(self, why: str) -> None:
        """The connection is over: nothing of it may be settled any more."""
        if self._over is None:
            self._over = SessionLostError(f"NATS: {why}")
        self.epoch.end()
        self._ring()

    # -- in ----------------------------------------------------------------------------------------------------------

    async def _came(self, message: Any) -> None:
        self._heard = self._loop.time()
        if not message.reply:
            self._status(message)
            return
        if message.headers and "Status" in message.headers:  # flow control; a pull has none
            return
        self._asked = max(0, self._asked - 1)
        delivery = NatsDelivery(message, self.epoch)
        self._buffer.append(delivery)
        self._ring()

    def _status(self, message: Any) -> None:
        """What the server says of a pull: alive, over, or wrong."""
        headers: dict[str, str] = message.headers or {}
        status = headers.get("Status", "")
        if status == "100":
            return
        left = headers.get("Nats-Pending-Messages")
        asked = self._pulls.pop(message.subject, 0)
        if left is not None:
            self._asked = max(0, self._asked - int(left))
        elif not self._pulls:
            self._asked = 0
        else:
            self._asked = max(0, self._asked - asked)
        if status == "409" and "Exceeded" not in headers.get("Description", ""):
            self.lose(f"the server ended a pull: {headers.get('Description', '409')}")
        self._ring()

    def _ring(self) -> None:
        bell = self._bell
        if bell is not None and not bell.done():
            bell.set_result(None)

    async def take(self, room: Room) -> Sequence[Taken]:
        """What has come, within the room; asks for more where there is room for more."""
        while True:
            if self._over is not None:
                raise self._over
            if self._buffer or self._stopped:
                break
            await self._ask(self._portion.most(room.messages, room.bytes))
            await self._wait()
        buffer = self._buffer
        if len(buffer) <= room.messages:
            taken = list(buffer)
            buffer.clear()
        else:
            taken = [buffer.popleft() for _ in range(room.messages)]
        now = self._loop.time()
        size = 0
        for each in taken:
            each.taken = now
            size += each.size
        self._portion.took(len(taken), size)
        self._held.update(dict.fromkeys(taken))
        if taken:
            self._lag = taken[-1].pending
        left = Room(room.messages - len(taken), room.bytes - size)
        if not self._stopped and not buffer and left.messages > 0 and left.bytes > 0:
            await self._ask(self._portion.most(*left))
        return taken

    async def _wait(self) -> None:
        """Until something comes; a server that is silent for some heartbeats while it owes us an answer is gone."""
        self._bell = self._loop.create_future()
        await asyncio.wait((self._bell,), timeout=self._heartbeat)
        silent = self._loop.time() - self._heard
        if not self._bell.done() and self._asked and silent > _MISSED * self._heartbeat:
            self.lose(f"no heartbeat for {silent:.0f} s while messages were asked for")

    async def _ask(self, room: int) -> None:
        """Ask for what there is room for, in pulls of some size, two or three of them at once."""
        free = room - self._asked
        if free <= 0 or (self._asked and free < max(1, self._plan.prefetch // 2)):
            return
        self._numbers += 1
        reply = f"{self._inbox}.{self._numbers}"
        body = {
            "batch": free,
            "expires": int(self._expires * _NANO),
            "idle_heartbeat": int(self._heartbeat * _NANO),
        }
        self._asked += free
        self._pulls[reply] = free
        while len(self._pulls) > 64:  # noqa: PLR2004 - those that were delivered whole have no status
            self._pulls.pop(next(iter(self._pulls)))
        await self._publish(self._subject, json.dumps(body).encode(), reply)

    async def _publish(self, subject: str, body: bytes, reply: str = "") -> None:
        try:
            await self._client.publish(subject, body, reply=reply)
        except Exception as error:
            self.lose(f"publishing failed: {type(error).__name__}")
            raise SessionLostError(f"NATS: publishing failed: {type(error).__name__}") from error

    # -- out ---------------------------------------------------------------------------------------------------------

    async def settle(self, outcomes: Outcomes) -> None:
        """Acknowledge, and give back; the client writes what comes in one turn of the loop at once."""
        held, publish = self._held, self._client.publish
        try:
            for each in outcomes.acked:
                assert isinstance(each, NatsDelivery)  # noqa: S101 - there are no others here
                held.pop(each, None)
                await publish(each.reply, b"")
            for each in outcomes.released:
                assert isinstance(each, NatsDelivery)  # noqa: S101 - there are no others here
                held.pop(each, None)
                await publish(each.reply, _NAK)
        except Exception as error:
            self.lose(f"acknowledging failed: {type(error).__name__}")
            raise SessionLostError(f"NATS: acknowledging failed: {type(error).__name__}") from error

    async def forward(self, delivery: Delivery, outcome: Retry | DeadLetter) -> None:
        """Have the server deliver it again later, or publish it to the dead letters and end its deliveries."""
        assert isinstance(delivery, NatsDelivery)  # noqa: S101 - there are no others here
        if isinstance(outcome, Retry):
            body = _NAK + b' {"delay": %d}' % int(outcome.delay * _NANO)
            await self._publish(delivery.reply, body)
        else:
            await self._bury(delivery, outcome)
            await self._publish(delivery.reply, _TERM)
        self._held.pop(delivery, None)

    async def _bury(self, delivery: NatsDelivery, letter: DeadLetter) -> None:
        target = self._plan.dead_letters
        if target is None:
            raise ConfigError("NATS: there is no subject for dead letters; give dead_letters=...")
        # The server's own headers are orders: which stream a message expects, or that it replaces all others. They were
        # meant for the stream that the message was published to.
        headers = {
            name: value for name, value in letter.headers(delivery).items() if not name.lower().startswith(_ORDERS)
        }
        # One letter per message, though we may die before the message's own deliveries have ended.
        headers["Nats-Msg-Id"] = f"bq-dead/{delivery.id}"
        headers = {name: value for name, value in headers.items() if "\n" not in value and "\r" not in value}
        errors = require("nats.errors", "nats")
        stream_errors = require("nats.js.errors", "nats")
        try:
            await self._jetstream.publish(target, delivery.body, headers=headers, timeout=self._ack_wait / 2)
        except (errors.NoRespondersError, stream_errors.NoStreamResponseError):
            raise RetryableError(f"NATS: no stream takes the subject {target!r} of dead letters; make one") from None

    async def _keep_alive(self) -> None:
        """Say of everything that is here that it is being worked on, so that the server does not deliver it again."""
        pause = self._ack_wait / 4
        while True:
            await asyncio.sleep(pause)
            for each in list(self._buffer):
                await self._progress(each)
            before = self._loop.time() - pause / 2
            for each in list(self._held):
                if each.taken > before:
                    break
                if each in self._held:
                    await self._progress(each)

    async def _progress(self, delivery: NatsDelivery) -> None:
        with contextlib.suppress(SessionLostError):  # `take` says so
            await self._publish(delivery.reply, _PROGRESS)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Return when the server has read what was written."""
        if self._over is None:
            await self._client.flush()

    async def stop(self) -> None:
        """End the pulls; what is under way still comes."""
        try:
            if self._over is None and self._subscription is not None:
                # UNSUB, then a round trip: the server has dropped the pulls, and all that it sent before is here.
                await self._subscription.drain()
        finally:
            self._stopped = True
            self._ring()

    async def end(self) -> None:
        """Close the connection."""
        if self._ended:
            return
        self._ended = True
        self.lose("the session was ended")
        if self._keeper is not None:
            self._keeper.cancel()
        try:
            await self._client.close()
        except Exception as error:  # noqa: BLE001 - it is over either way
            log.debug("nats_close_failed", consumer=self._plan.name, **log.describe(error))

    def lag(self) -> int | None:
        """What the consumer still had to come when the last message was sent."""
        return self._lag
