"""What a lane is: the protocol between the worker pool and one broker.

A lane connects, and a session takes deliveries, settles them and ends. Everything else (order, workers, retries,
back-pressure, the stop, counts, logs, reconnecting) is the pool's, the same for every broker.

    lane.connect() -> session
        session.take(room) -> deliveries       waits; [] when stopped and dry; raises when the session is over
        session.settle(outcomes)               acks and releases of one turn of the loop; one call at a time
        session.forward(delivery, outcome)     a retry or a dead letter that the broker takes: confirmed, then acked
        session.stop()                         take no more; what is under way still comes out of `take`
        session.end()                          close; never raises, and may be called at any time

The rules:

1. Every delivery carries the epoch that it was taken in. When the connection, channel or assignment that it belongs to
   is gone, the lane calls `epoch.end()` in the same turn of the loop in which it learns of it. The pool then starts no
   handler for it, and settles nothing of it: a stale tag never reaches the wire.
2. `take` is never called twice at once, and the pool does not cancel it, except to abandon the session: it then calls
   `end()` first. A cancelled read may therefore lose nothing but the session.
3. `settle` is never called twice at once. `forward` may be, next to `settle` and to itself, with other deliveries.
4. An error of `settle` is logged and counted, and ends the session if it is not a `PermanentError`: the lane raises
   only where the wire is broken. An error of `forward` means that nothing happened: the delivery is kept and tried
   again.
5. What is returned by `take` and not settled is the broker's to deliver again when the session ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from batchqueue_async.errors import RetryableError
from batchqueue_async.intake.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

ATTEMPT = "bq-attempt"
"""The header of a message that was published again for a later attempt, with its number."""

Reason = Literal["permanent", "attempts", "age", "undecodable", "timeout"]
"""Why a message goes to the dead letters."""

Retries = Literal["kept", "long", "broker"]
"""Who holds a message that waits for its next attempt.

`kept`: the pool, always. `long`: the pool for some seconds, the broker for more. `broker`: the broker, always. With an
order a message that fails keeps its lane, so it is always the pool.
"""


class SessionLostError(RetryableError):
    """A session is over through no wish of ours: the connection broke, or the broker ended it."""

    error_type = "network"


class Epoch:
    """One validity of deliveries: of a connection, a channel, or one assignment of a partition.

    It goes one way: `open` (handlers may start), closed (nothing more starts, what finishes is settled), `over` (what
    finishes is dropped). The pool counts in `running` what it has started and not yet handed back to the lane; a
    revoked partition closes, waits in `drain`, commits, and only then ends.

    Example:
        >>> epoch = Epoch("orders/0")
        >>> epoch.close()
        >>> epoch.open, epoch.over
        (False, False)
        >>> epoch.end()
        >>> epoch.over
        True

    Attributes:
        name: for logs.
        open: whether handlers of its deliveries may start.
        over: whether outcomes of its deliveries are dropped.
        running: deliveries that were started and whose outcome the lane does not have yet.
    """

    __slots__ = ("_drained", "_watchers", "name", "open", "over", "running")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.open = True
        self.over = False
        self.running = 0
        self._drained: list[asyncio.Future[None]] = []
        self._watchers: list[Callable[[Epoch], None]] = []

    def __repr__(self) -> str:
        state = "over" if self.over else "open" if self.open else "closed"
        return f"Epoch({self.name!r}, {state}, running={self.running})"

    def watch(self, watcher: Callable[[Epoch], None]) -> None:
        """Call back when the epoch closes and when it ends, in that turn of the loop."""
        if watcher not in self._watchers:
            self._watchers.append(watcher)

    def close(self) -> None:
        """Start nothing more; what was taken and not started is forgotten, and the broker will deliver it again."""
        if self.open:
            self.open = False
            self._notify()

    def end(self) -> None:
        """Drop what finishes from now on; its settlement would be wrong, or another's."""
        if not self.over:
            self.open = False
            self.over = True
            self._notify()
            self._wake()

    def finished(self, count: int = 1) -> None:
        """The lane has the outcome of some of what ran, or the pool has put it back."""
        self.running -= count
        if self.running <= 0 and self._drained:
            self._wake()

    async def drain(self, timeout: float) -> bool:
        """Wait until nothing of it runs any more, at most `timeout` seconds; whether that was reached."""
        if self.running <= 0 or self.over:
            return self.running <= 0
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drained.append(waiter)
        await asyncio.wait((waiter,), timeout=timeout)
        if waiter in self._drained:
            self._drained.remove(waiter)
        return self.running <= 0

    def _notify(self) -> None:
        for watcher in list(self._watchers):
            watcher(self)

    def _wake(self) -> None:
        waiters, self._drained = self._drained, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Delivery(Message):
    """A message together with what the pool needs of it; a lane derives its own class and adds its tag or offset.

    Example:
        >>> delivery = Delivery(b"x" * 100, epoch=Epoch())
        >>> delivery.size, delivery.count, delivery.order
        (100, 1, None)

    Attributes:
        epoch: the validity that it was taken in.
        order: the key of its lane; None has no order. The lane sets it where order is its own word (a partition, or a
            record's key); a function in `ordered_by` takes its place.
        size: what it counts against the bound by bytes: the body, and more where the lane knows of more.
        taken: the loop's time at which the pool took it; set by the pool.
    """

    __slots__ = ("epoch", "order", "size", "taken")

    count: int = 1
    """How many messages it stands for; more than one only for a `Run`."""

    def __init__(
        self,
        body: bytes = b"",
        *,
        epoch: Epoch,
        order: Hashable | None = None,
        size: int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(body, **fields)
        self.epoch = epoch
        self.order = order
        self.size = len(body) if size is None else size
        self.taken = 0.0


class Run(Protocol):
    """Neighbouring messages of one lane as a single delivery: for batch handlers, where an object each costs too much.

    Only given where `Plan.run` is above 0, and with at most that number of messages. It has the attributes of a
    `Delivery`; it is the batch that the handler gets, so it is a sequence of messages, which may be made when they are
    asked for. Where a handler takes only a part of it, or fails, the pool goes on with `split()`. Its `attempt` is 1:
    those of its messages may be higher.
    """

    attempt: int
    epoch: Epoch
    order: Hashable | None
    size: int
    taken: float

    @property
    def count(self) -> int:
        """How many messages."""
        ...

    def __len__(self) -> int:
        """The same."""
        ...

    def __getitem__(self, place: int, /) -> Message:
        """One of the messages."""
        ...

    def __iter__(self) -> Iterator[Message]:
        """Its messages, the same objects each time."""
        ...

    def bodies(self) -> list[bytes]:
        """The bodies of its messages."""
        ...

    def split(self) -> Sequence[Delivery]:
        """Its messages as deliveries of their own, in order; from then on only those are settled."""
        ...


Taken: TypeAlias = "Delivery | Run"
"""What `take` returns, and what is settled."""


class Room(NamedTuple):
    """What a session may take now.

    Attributes:
        messages: at least 1.
        bytes: at least 1; the last message may pass it.
    """

    messages: int
    bytes: int


class Retry(NamedTuple):
    """The outcome of a message that failed and comes again.

    Attributes:
        delay: seconds until then.
        attempt: which attempt that will be, for the header `bq-attempt` where the broker does not count.
    """

    delay: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """The outcome of a message that is given up.

    Attributes:
        reason: why: `permanent`, `attempts`, `age`, `undecodable` or `timeout`.
        error: the class of the last error.
        text: its text, only where `dead_letter_text=True` asks for it: it may quote the payload.
        attempts: how often the message was handled.
        first_at: when it was taken first, in seconds since 1970, as far as this process knows.
        at: when it was given up.
    """

    reason: Reason
    error: str
    text: str | None = None
    attempts: int = 1
    first_at: float = 0.0
    at: float = 0.0

    def headers(self, delivery: Message, *, partition: int | None = None, offset: int | None = None) -> dict[str, str]:
        """The headers of the letter: what the message had, and `bq-reason`, `bq-error`, `bq-attempts` and the like.

        Without the number of its attempt, from which a letter that is put back would go on.
        """
        added = {
            "bq-reason": self.reason,
            "bq-error": self.error,
            "bq-attempts": str(self.attempts),
            "bq-source": delivery.source,
            "bq-first-at": f"{self.first_at:.3f}",
            "bq-at": f"{self.at:.3f}",
        }
        if self.text is not None:
            added["bq-text"] = self.text
        if partition is not None:
            added["bq-partition"] = str(partition)
        if offset is not None:
            added["bq-offset"] = str(offset)
        kept: Mapping[str, str] = delivery.headers
        return {name: value for name, value in kept.items() if name != ATTEMPT} | added


class Outcomes(NamedTuple):
    """What became of deliveries since the last call of `settle`; none of a stale epoch.

    Attributes:
            acked: they are done; in the order in which they finished.
            released: they are given back at once, uncounted as far as the broker allows: our own stop.
            kept: they failed, and the pool keeps them for another attempt: `delivery.attempt` has been raised. A broker
    that can note the number does, before it applies the others: one of these may be among them by now.
    """

    acked: list[Taken]
    released: list[Taken]
    kept: list[Delivery]


class Session(Protocol):
    """One connection of a lane that consumes; see the rules above.

    Attributes:
        hand_over: at a stop, finish only what runs and close: what waits belongs to the next consumer, in its order.
            True for an ordered consumer of a single-active queue.
    """

    hand_over: bool

    async def take(self, room: Room) -> Sequence[Taken]:
        """Wait for deliveries, and return what is there within the room; [] only after `stop`, when no more will come.

        Raises:
            SessionLostError: the session is over; its epochs have ended.
        """
        ...

    async def settle(self, outcomes: Outcomes) -> None:
        """Apply outcomes; returns when they are written, or, where a broker takes them one at a time, taken."""
        ...

    async def forward(self, delivery: Delivery, outcome: Retry | DeadLetter) -> None:
        """Publish for a later attempt or to the dead letters; when that is confirmed, ack the delivery.

        Raises:
            Exception: the target did not confirm, and the delivery is not acked. `RetryableError`, `OSError` and
                `TimeoutError` are an outage; anything else is logged as an error. The pool pauses and tries again.
        """
        ...

    async def flush(self) -> None:
        """Return when everything that was settled has reached the broker: acks written, offsets committed."""
        ...

    async def stop(self) -> None:
        """Have the broker send no more; what is under way still comes out of `take`, which then returns []."""
        ...

    async def end(self) -> None:
        """Close: end the epochs, give the connection back. It never raises, and a second call does nothing."""
        ...

    def lag(self) -> int | None:
        """How many messages wait at the broker, as far as that is known without asking it now."""
        ...


class Lane(Protocol):
    """One way to one broker: what a consumer class brings to the pool.

    Attributes:
        retries: who holds a message that waits for its next attempt, where nothing has to stay in order.
        counts_held: whether the broker's own bound counts what waits for another attempt (a prefetch, ack-pending).
            Where it does not, the pool lets the waiting have room of their own, so that they don't crowd out the rest.
    """

    retries: Retries
    counts_held: bool

    async def connect(self) -> Session:
        """Connect, check what can be checked, and begin to consume.

        Raises:
            ConfigError: no repetition will help: no such queue, a wrong option.
            AuthError: the credentials are refused.
            Exception: anything else is an outage: the supervisor tries again.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The resolved numbers that a lane is made with.

    Attributes:
        name: what logs, counts and connections call the consumer.
        workers: handlers at once.
        prefetch: messages that may be held here: in buffers, lanes, delays and handlers together.
        prefetch_bytes: their bytes.
        order: where order comes from: "none", "partition", "key" (the lane's own), or "function" (the pool's).
        run: how many messages a `Run` may have; 0 asks for single deliveries.
        dead_letters: the target of dead letters; None where they are dropped.
        handler_timeout: seconds that a handler may take; None sets no bound.
        drain_timeout: seconds that a stop may take.
    """

    name: str
    workers: int
    prefetch: int
    prefetch_bytes: int
    order: Literal["none", "partition", "key", "function"] = "none"
    run: int = 0
    dead_letters: str | None = None
    handler_timeout: float | None = None
    drain_timeout: float = 30.0


class Drop(Enum):
    """Dead letters are dropped, which somebody has said aloud: `dead_letters=intake.DROP`."""

    DROP = "drop"


class Order(Enum):
    """An order that is the lane's own: `intake.PARTITION` or `intake.KEY`."""

    PARTITION = "partition"
    KEY = "key"


DROP: Final = Drop.DROP
PARTITION: Final = Order.PARTITION
KEY: Final = Order.KEY
