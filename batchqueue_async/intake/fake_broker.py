"""A broker in memory for tests: the semantics of RabbitMQ, Kafka, NATS and Redis as a consumer meets them.

It runs in virtual time, breaks when asked to, and writes down what happened: what was delivered, what was settled how,
and each settlement that a real broker would have refused.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from batchqueue_async.intake.config import IntakeConfig
from batchqueue_async.intake.consumer import Consumer
from batchqueue_async.intake.ports import DeadLetter, Delivery, Epoch, Order, Outcomes, Retry, SessionLostError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from random import Random

    from batchqueue_async.intake.ports import Lane, Plan, Retries, Room, Taken

Kind = Literal["amqp", "kafka", "nats", "redis"]
What = Literal["delivered", "acked", "retried", "dead_lettered", "released", "kept", "lost", "reset"]
_RETRIES: Mapping[Kind, Retries] = {"amqp": "long", "kafka": "kept", "nats": "broker", "redis": "kept"}
_COMMIT_EVERY = 0.1


class Event(NamedTuple):
    """Something that happened at the broker.

    Attributes:
        what: `delivered`, `acked`, `retried`, `dead_lettered`, `released`, `kept` or `reset`.
        id: the message's; "" for a reset.
        at: the loop's time.
    """

    what: What
    id: str
    at: float


class Letter(NamedTuple):
    """A dead letter as it was published.

    Attributes:
        body, key: the message's own.
        headers: its own, and those that say why it is here.
    """

    body: bytes
    key: str | bytes | None
    headers: Mapping[str, str]


@dataclass(eq=False, slots=True)
class _Record:
    """A message at the broker: waiting, out with a session, or done."""

    number: int
    body: bytes
    key: str | bytes | None
    headers: dict[str, str]
    partition: int
    id: str
    published_at: float
    state: Literal["waiting", "out", "done"] = "waiting"
    source: str = ""
    deliveries: int = 0
    not_before: float = 0.0
    holder: FakeSession | None = None


class _FakeDelivery(Delivery):
    __slots__ = ("record",)

    record: _Record


@dataclass(eq=False, slots=True)
class _Partition:
    """One partition of the Kafka kind: what is done beyond the commit point, and the point."""

    number: int
    committed: int = 0
    epoch: Epoch = field(default_factory=Epoch)
    owner: FakeSession | None = None
    records: list[_Record] = field(default_factory=list[_Record])


class FakeBroker:
    """A broker to test consumers with, in virtual time and without a server.

    `consumer(handler, ...)` makes a consumer of it; `replace(consumer)` lets one that your program has made consume
    from here instead of from its broker.

    Example:
        >>> from batchqueue_async.testing import run_virtual
        >>> async def main() -> list[bytes]:
        ...     seen: list[bytes] = []
        ...     async def save(message) -> None:
        ...         seen.append(message.body)
        ...     broker = FakeBroker("amqp")
        ...     broker.publish(b"1")
        ...     async with broker.consumer(save):
        ...         await broker.drained()
        ...     return seen
        >>> run_virtual(main)
        [b'1']

    Attributes:
        kind: whose semantics: "amqp", "kafka", "nats" or "redis".
        source: the name of its queue, topic, subject or stream.
        single_active: whether one consumer at a time gets messages, and the next one when that is gone.
        log: what happened, in order.
        dead_letters: what was given up.
        violations: settlements that a real broker would have refused; empty where consumers are right.
        dead_letters_down: set it to let publishing dead letters fail.
        connections: attempts to connect so far.
    """

    def __init__(
        self, kind: Kind = "amqp", *, partitions: int = 1, source: str = "fake", single_active: bool = False
    ) -> None:
        """Say whose semantics, and how many partitions; `single_active`: one consumer at a time, in order."""
        self.kind: Kind = kind
        self.single_active = single_active
        self.source = source
        self.log: list[Event] = []
        self.dead_letters: list[Letter] = []
        self.violations: list[str] = []
        self.dead_letters_down = False
        self.connections = 0
        self._down: BaseException | None = None
        self._numbers = itertools.count()
        self._records: list[_Record] = []
        self._partitions = [_Partition(number) for number in range(partitions if kind == "kafka" else 1)]
        self._sessions: list[FakeSession] = []
        self._bells: list[asyncio.Future[None]] = []
        self._turn = asyncio.Lock()

    # -- what tests do -----------------------------------------------------------------------------------------------

    def publish(
        self,
        *bodies: bytes,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        source: str | None = None,
        deliveries: int = 0,
    ) -> list[str]:
        """Add messages; their ids."""
        ids: list[str] = []
        for body in bodies:
            number = next(self._numbers)
            place = partition if partition is not None else self._place(key, number)
            home = self._partitions[place % len(self._partitions)]
            identity = f"{self.source}/{home.number}/{len(home.records)}"
            record = _Record(number, body, key, dict(headers or {}), home.number, identity, _now())
            record.deliveries = deliveries
            record.source = source or self.source
            home.records.append(record)
            self._records.append(record)
            ids.append(identity)
        self.ring()
        return ids

    def _place(self, key: str | bytes | None, number: int) -> int:
        if key is None:
            return number
        return zlib.crc32(key.encode() if isinstance(key, str) else key)

    def consumer(
        self, handler: Any, *, name: str = "fake", random: Random | None = None, **options: Any
    ) -> FakeConsumer:
        """A consumer of this broker; the options are those of every consumer, dead letters go to `dead_letters`."""
        return FakeConsumer(self, handler, name=name, random=random, **options)

    def replace(self, consumer: Consumer) -> None:
        """Let a consumer, before it is entered, consume from here."""
        consumer.use_lane(self.lane)

    def lane(self, plan: Plan) -> Lane:
        """The lane to this broker."""
        return FakeLane(self, plan)

    def reset(self) -> None:
        """Break all connections; what was out and unsettled is delivered again."""
        self._note("reset", "")
        for session in list(self._sessions):
            session.lose()

    def down(self, error: BaseException | None = None) -> None:
        """Break all connections, and refuse new ones with this error until `up`."""
        self._down = error or ConnectionRefusedError("the fake broker is down")
        self.reset()

    def up(self) -> None:
        """Let consumers connect again."""
        self._down = None

    async def rebalance(self, partitions: Iterable[int] | None = None, *, timeout: float = 15.0) -> None:
        """Revoke partitions as Kafka does (close, drain, commit, end) and assign them anew."""
        async with self._turn:
            chosen = [
                self._partitions[each] for each in (range(len(self._partitions)) if partitions is None else partitions)
            ]
            await self._move([each for each in chosen if each.owner is not None], timeout)

    async def drained(self) -> None:
        """Return when every message has its final outcome: acknowledged or a dead letter."""
        while self.unsettled:
            await self.wait(None)

    @property
    def unsettled(self) -> int:
        """Messages without a final outcome."""
        return sum(1 for record in self._records if not self._is_final(record))

    @property
    def depth(self) -> int:
        """Messages that wait for a consumer."""
        return sum(each.state == "waiting" for each in self._records)

    def events(self, what: What) -> list[str]:
        """The ids of the messages to which this has happened, in order."""
        return [each.id for each in self.log if each.what == what]

    # -- what sessions do --------------------------------------------------------------------------------------------

    def _is_final(self, record: _Record) -> bool:
        if self.kind == "kafka":
            return self._partitions[record.partition].committed > self._offset(record)
        return record.state == "done"

    @staticmethod
    def _offset(record: _Record) -> int:
        return int(record.id.rpartition("/")[2])

    def _note(self, what: What, identity: str) -> None:
        self.log.append(Event(what, identity, _now()))

    def ring(self) -> None:
        """Something has changed: those who wait look again."""
        bells, self._bells = self._bells, []
        for bell in bells:
            if not bell.done():
                bell.set_result(None)

    async def wait(self, until: float | None) -> None:
        """Wait for a change, at most until then."""
        bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bells.append(bell)
        await asyncio.wait((bell,), timeout=None if until is None else max(0.0, until - _now()))

    async def join(self, plan: Plan) -> FakeSession:
        """A new connection."""
        self.connections += 1
        await asyncio.sleep(0)
        if self._down is not None:
            raise self._down
        session = FakeSession(self, plan)
        self._sessions.append(session)
        if self.kind == "kafka":
            try:
                async with self._turn:
                    moving = [each for each in self._partitions if each.owner is not None]
                    await self._move(moving, 15.0)
            except BaseException:  # whoever joined does not wait any longer: so it is not a member
                self.leave(session)
                raise
        return session

    def leave(self, session: FakeSession) -> None:
        """A connection is gone: what it held is anybody's."""
        if session not in self._sessions:
            return
        self._sessions.remove(session)
        session.epoch.end()
        for partition in self._partitions:
            if partition.owner is session:
                partition.epoch.end()
                self._rewind(partition)
        for record in self._records:
            if record.holder is session:
                self._back(record)
        if self.kind == "kafka":
            self._assign()
        self.ring()

    def _back(self, record: _Record) -> None:
        record.holder = None
        if record.state == "out":
            record.state = "waiting"

    def _rewind(self, partition: _Partition) -> None:
        """Everything from the commit point on comes again, what was done beyond it included."""
        partition.owner = None
        for record in partition.records[partition.committed :]:
            record.state, record.holder = "waiting", None

    async def _move(self, partitions: Sequence[_Partition], timeout: float) -> None:
        """Revoke partitions and assign them anew; one that is closed is assigned, though whoever asked goes away."""
        for partition in partitions:
            partition.epoch.close()
        try:
            for partition in partitions:
                await partition.epoch.drain(timeout)
        finally:
            for partition in partitions:
                self.commit(partition)
                partition.epoch.end()
                if partition.owner is not None:
                    self._rewind(partition)
            self._assign()

    def _assign(self) -> None:
        if not self._sessions:
            return
        for partition in self._partitions:
            if partition.owner is None:
                partition.owner = self._sessions[partition.number % len(self._sessions)]
                partition.epoch = Epoch(f"{self.source}/{partition.number}")
        self.ring()

    def commit(self, partition: _Partition) -> None:
        """Move the commit point up to the first record that is not done."""
        records = partition.records
        while partition.committed < len(records) and records[partition.committed].state == "done":
            partition.committed += 1
        self.ring()

    def commit_all(self, session: FakeSession) -> None:
        """Commit what a session has finished."""
        for partition in self._partitions:
            if partition.owner is session:
                self.commit(partition)

    def take(self, session: FakeSession, room: Room) -> list[_FakeDelivery]:
        """What this session may have now."""
        now = _now()
        found: list[_FakeDelivery] = []
        left = room.bytes
        if self.single_active and self._sessions[0] is not session:
            return found
        for record in self._records:
            if len(found) >= room.messages or left <= 0:
                break
            if record.state != "waiting" or record.not_before > now:
                continue
            epoch = session.epoch
            if self.kind == "kafka":
                partition = self._partitions[record.partition]
                if partition.owner is not session or not partition.epoch.open:
                    continue
                epoch = partition.epoch
            record.state, record.holder = "out", session
            record.deliveries += 1
            found.append(self._delivery(record, epoch, session.plan))
            left -= len(record.body)
            self._note("delivered", record.id)
        return found

    def _delivery(self, record: _Record, epoch: Epoch, plan: Plan) -> _FakeDelivery:
        counted = int(record.headers.get("bq-attempt", "1"))
        attempt = counted if self.kind in {"amqp", "kafka"} else max(counted, record.deliveries)
        delivery = _FakeDelivery(
            record.body,
            epoch=epoch,
            key=record.key,
            headers=record.headers,
            attempt=attempt,
            id=record.id,
            published_at=record.published_at,
            source=record.source,
        )
        delivery.record = record
        if plan.order == "partition":
            delivery.order = (self.source, record.partition)
        elif plan.order == "key" and record.key is not None:
            delivery.order = (self.source, record.partition, record.key)
        return delivery

    @property
    def next_delay(self) -> float | None:
        """When the next delayed message is due."""
        now = _now()
        return min(
            (each.not_before for each in self._records if each.state == "waiting" and each.not_before > now),
            default=None,
        )

    def owned(self, session: FakeSession, delivery: Any, what: What) -> bool:
        """Whether a settlement is one that a broker takes; else it is a violation."""
        record: _Record = delivery.record
        if delivery.epoch.over or record.holder is not session or record.state != "out":
            self.violations.append(f"{what} of {record.id}, which is {record.state} and not this session's")
            return False
        return True

    def settle(self, session: FakeSession, deliveries: Iterable[Any], what: What) -> None:
        """Apply an outcome to deliveries."""
        for delivery in deliveries:
            record: _Record = delivery.record
            if what == "kept":
                self._note(what, record.id)
                continue
            if not self.owned(session, delivery, what):
                continue
            self._note(what, record.id)
            if what in {"acked", "dead_lettered"}:
                record.state = "done"
            else:
                record.state, record.holder = "waiting", None
        self.ring()


class FakeSession:
    """One connection to a `FakeBroker`."""

    def __init__(self, broker: FakeBroker, plan: Plan) -> None:
        self.hand_over = broker.single_active
        self.plan = plan
        self.epoch = Epoch("fake")
        self._broker = broker
        self._stopped = False
        self._lost = False
        self._committing: asyncio.TimerHandle | None = None

    def lose(self) -> None:
        """The connection breaks."""
        self._lost = True
        self._broker.leave(self)

    async def take(self, room: Room) -> Sequence[Taken]:
        """What is there for it."""
        broker = self._broker
        while not self._lost:
            if self._stopped:
                return []
            found = broker.take(self, room)
            if found:
                return found
            await broker.wait(broker.next_delay)
        raise SessionLostError("the fake broker was reset")

    async def settle(self, outcomes: Outcomes) -> None:
        """Apply outcomes."""
        self._broker.settle(self, outcomes.kept, "kept")
        self._broker.settle(self, outcomes.acked, "acked")
        self._broker.settle(self, outcomes.released, "released")
        if self._broker.kind == "kafka" and self._committing is None:
            self._committing = asyncio.get_running_loop().call_later(_COMMIT_EVERY, self._commit)

    def _commit(self) -> None:
        self._committing = None
        self._broker.commit_all(self)

    async def forward(self, delivery: Delivery, outcome: Retry | DeadLetter) -> None:
        """Publish to the dead letters, or for later."""
        broker = self._broker
        await asyncio.sleep(0)
        if broker.dead_letters_down:
            raise ConnectionRefusedError("the target of dead letters is down")
        if self._lost or not broker.owned(self, delivery, "dead_lettered"):
            raise SessionLostError("the fake broker was reset")
        assert isinstance(delivery, _FakeDelivery)  # noqa: S101 - `owned` has looked
        record = delivery.record
        if isinstance(outcome, DeadLetter):
            broker.dead_letters.append(Letter(delivery.body, delivery.key, outcome.headers(delivery)))
            broker.settle(self, [delivery], "dead_lettered")
        else:
            record.headers["bq-attempt"] = str(outcome.attempt)
            record.not_before = _now() + outcome.delay
            broker.settle(self, [delivery], "retried")
        await self.settle(Outcomes([], [], []))

    async def flush(self) -> None:
        """Commit."""
        self._broker.commit_all(self)

    async def stop(self) -> None:
        """Take no more."""
        self._stopped = True
        self._broker.ring()

    async def end(self) -> None:
        """Close."""
        if self._committing is not None:
            self._committing.cancel()
        self.lose()

    def lag(self) -> int | None:
        """What waits."""
        return self._broker.depth


class FakeLane:
    """The way to a `FakeBroker`."""

    def __init__(self, broker: FakeBroker, plan: Plan) -> None:
        self._broker = broker
        self._plan = plan
        self.retries: Retries = _RETRIES[broker.kind]
        self.counts_held = broker.kind in {"amqp", "nats"}

    async def connect(self) -> FakeSession:
        """Connect."""
        return await self._broker.join(self._plan)


class FakeConsumer(Consumer):
    """A consumer of a `FakeBroker`; `FakeBroker.consumer` makes one."""

    orders = frozenset({Order.PARTITION, Order.KEY})
    lane_orders = True

    def __init__(
        self, broker: FakeBroker, handler: Any, *, name: str = "fake", random: Random | None = None, **options: Any
    ) -> None:
        self._broker = broker
        self.default_order = Order.PARTITION if broker.kind == "kafka" else None
        options.setdefault("dead_letters", "dead")
        super().__init__(handler, IntakeConfig(**options), name=name, random=random)

    def _lane(self, plan: Plan) -> Lane:
        return self._broker.lane(plan)


def _now() -> float:
    return asyncio.get_running_loop().time()
