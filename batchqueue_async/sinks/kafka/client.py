"""The edge to aiokafka: its producers and consumers as far as they are used, how they are made, what its errors mean.

aiokafka has no types; what is used of it is written down here, and nowhere else.
"""

# ruff: noqa: D102 - the methods are aiokafka's

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from batchqueue_async._support.wording import closest
from batchqueue_async.errors import (
    AuthError,
    BatchQueueError,
    ConfigError,
    PermanentError,
    RetryableError,
    TooLargeError,
)
from batchqueue_async.sinks._shared import tls as tls_options
from batchqueue_async.sinks._shared.connection import uncut
from batchqueue_async.sinks._shared.extras import require

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption


class BatchBuilder(Protocol):
    """What is used of `aiokafka.producer.message_accumulator.BatchBuilder`."""

    def append(
        self,
        *,
        timestamp: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]] = ...,
    ) -> Any: ...


class Producer(Protocol):
    """What is used of `aiokafka.AIOKafkaProducer`."""

    client: Any

    def start(self) -> Coroutine[Any, Any, None]: ...
    async def stop(self) -> None: ...
    async def partitions_for(self, topic: str) -> set[int]: ...
    async def send_and_wait(
        self, topic: str, *, value: bytes | None, key: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> Any: ...
    def create_batch(self) -> BatchBuilder: ...
    async def send_batch(self, batch: BatchBuilder, topic: str, *, partition: int) -> asyncio.Future[Any]: ...
    async def begin_transaction(self) -> None: ...
    async def commit_transaction(self) -> None: ...
    async def abort_transaction(self) -> None: ...
    async def send_offsets_to_transaction(self, offsets: Any, group_id: str) -> None: ...


class Consumer(Protocol):
    """What is used of `aiokafka.AIOKafkaConsumer`."""

    def start(self) -> Coroutine[Any, Any, None]: ...
    async def stop(self) -> None: ...
    def subscribe(self, topics: Sequence[str], *, listener: Any) -> None: ...
    def assignment(self) -> set[Any]: ...
    async def topics(self) -> set[str]: ...
    def partitions_for_topic(self, topic: str) -> set[int] | None: ...
    async def getmany(
        self, *partitions: Any, timeout_ms: int = ..., max_records: int | None = ...
    ) -> dict[Any, list[Any]]: ...
    async def position(self, partition: Any) -> int: ...
    def highwater(self, partition: Any) -> int | None: ...
    async def end_offsets(self, partitions: Sequence[Any]) -> dict[Any, int]: ...
    async def commit(self, offsets: Mapping[Any, int]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where the brokers are, and how to come in."""

    bootstrap: tuple[str, ...]
    client_id: str | None = None
    user: str | None = None
    password: Secret | None = None
    mechanism: str = "PLAIN"
    tls: TlsOption = None
    connect_timeout: float
    timeout: float
    retryable: frozenset[str] = frozenset()

    def _options(self) -> dict[str, Any]:
        context = tls_options.context(self.tls)
        options: dict[str, Any] = {
            "request_timeout_ms": max(1, int(self.timeout * 1000)),
            "security_protocol": f"{'SASL_' if self.user else ''}{'SSL' if context else 'PLAINTEXT'}",
            "ssl_context": context,
        }
        if self.client_id is not None:
            options["client_id"] = self.client_id
        if self.user is not None:
            options["sasl_mechanism"] = self.mechanism
            options["sasl_plain_username"] = self.user
            options["sasl_plain_password"] = self.password.reveal() if self.password is not None else ""
        return options

    async def producer(self, **options: Any) -> Producer:
        """A producer that has found its brokers."""
        aiokafka = require("aiokafka", "kafka")
        _name_invalid_record()
        bootstrap = list(self.bootstrap)
        producer: Producer = aiokafka.AIOKafkaProducer(bootstrap_servers=bootstrap, **self._options(), **options)
        try:
            async with asyncio.timeout(self.connect_timeout):
                await uncut(producer.start())
        except BaseException as error:
            await stop(producer)
            if isinstance(error, Exception):
                await self.check_credentials()
            raise
        return producer

    async def consumer(self, **options: Any) -> Consumer:
        """A consumer that has found its brokers.

        It is subscribed to nothing yet: joining a group may take longer than connecting.
        """
        aiokafka = require("aiokafka", "kafka")
        options = self._options() | options
        consumer: Consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=list(self.bootstrap), **options)
        try:
            async with asyncio.timeout(self.connect_timeout):
                await uncut(consumer.start())
        except BaseException as error:
            await stop_consumer(consumer)
            if isinstance(error, Exception):
                await self.check_credentials()
            raise
        return consumer

    async def check_credentials(self) -> None:
        """Raise what a broker says of our credentials: the client tries for ever, and only logs it.

        Raises:
            AuthError: they are refused.
        """
        if self.user is None:
            return
        connections = require("aiokafka.conn", "kafka")
        for address in self.bootstrap:
            host, _, port = address.rpartition(":")
            try:
                async with asyncio.timeout(self.connect_timeout):
                    connection = await connections.create_conn(host, int(port), **self._options())
                connection.close()
            except Exception as error:  # noqa: BLE001 - a refusal alone counts; the caller has its own error else
                if type(error).__name__ in _REFUSED:
                    text = f"Kafka at {address}: {type(error).__name__}; check the user, the password and the mechanism"
                    raise AuthError(text) from None

    async def committed(self, topic: str, group: str) -> int | None:
        """The offset that a group has committed for the topic's first partition."""
        aiokafka = require("aiokafka", "kafka")
        place = aiokafka.TopicPartition(topic, 0)
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=list(self.bootstrap), group_id=group, enable_auto_commit=False, **self._options()
        )
        try:
            await uncut(consumer.start())
            consumer.assign([place])
            offset: int | None = await consumer.committed(place)
        finally:
            await stop_consumer(consumer)
        return offset


def broker_addresses(owner: str, bootstrap: str | Sequence[str]) -> tuple[str, ...]:
    """The brokers to begin with, from one text with commas or one by one.

    Raises:
        ConfigError: there is none, or one has no port.
    """
    addresses = [each.strip() for each in (bootstrap.split(",") if isinstance(bootstrap, str) else bootstrap)]
    if not addresses:
        raise ConfigError(f"{owner}: bootstrap={bootstrap!r} names no broker; give one as host:port")
    for address in addresses:
        if not address.rpartition(":")[2].isdigit():
            raise ConfigError(f"{owner}: bootstrap={address!r} is not host:port; add the port, such as :9092")
    return tuple(addresses)


def check_client_id(owner: str, client_id: str | None) -> None:
    """Raise a ConfigError for what can't be a client's name.

    Brokers take an empty one for no name at all, so that a quota for it would limit nobody.
    """
    if client_id is not None and not client_id:
        raise ConfigError(f"{owner}: client_id='' is empty; name one, or None for the client's own")


def offsets(topic: str, offset: int) -> Any:
    """An offset of the topic's first partition, as `send_offsets_to_transaction` takes it."""
    aiokafka = require("aiokafka", "kafka")
    return {aiokafka.TopicPartition(topic, 0): offset}


async def stop(producer: Producer, grace: float = 1.0) -> None:
    """End a producer, whatever it still tries to send."""
    with suppress(Exception):  # whatever a good-bye meets, the producer is given up
        async with asyncio.timeout(grace):
            await producer.stop()
            return
    # A producer that cannot deliver waits in `stop` for ever, and has no call for giving up.
    parts: tuple[Any, Any] = (getattr(producer, "_sender", None), producer.client)
    for part in parts:
        with suppress(Exception):
            async with asyncio.timeout(grace):
                await part.close()


async def stop_consumer(consumer: Consumer, grace: float = 1.0) -> None:
    """End a consumer: leave the group, and give up what does not answer."""
    # In a task: what the client cancels within itself must not look like our own cancellation.
    leaving = asyncio.get_running_loop().create_task(consumer.stop(), name="kafka-consumer-stop")
    done, _ = await asyncio.wait((leaving,), timeout=grace)
    if done and not leaving.cancelled() and leaving.exception() is None:
        return
    leaving.cancel()
    # Without its coordinator a consumer waits in `stop` for a request's time and more, and has no call for giving up.
    coordinator: Any = getattr(consumer, "_coordinator", None)
    for name in ("_coordination_task", "_heartbeat_task", "_commit_refresh_task"):
        task: asyncio.Task[Any] | None = getattr(coordinator, name, None)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=grace)
    for name in ("_fetcher", "_client"):
        # They await tasks that they have cancelled, and may pass that on.
        with suppress(Exception, asyncio.CancelledError):
            async with asyncio.timeout(grace):
                await getattr(consumer, name).close()


def partition_of(topic: str, partition: int) -> Any:
    """A partition by aiokafka's own type, which its calls insist on."""
    return require("aiokafka", "kafka").TopicPartition(topic, partition)


def listener(revoked: Callable[[Sequence[Any]], Awaitable[None]], assigned: Callable[[Sequence[Any]], None]) -> Any:
    """What `subscribe` takes: calls these two when partitions are taken away, and when they are given."""
    base: type = require("aiokafka", "kafka").ConsumerRebalanceListener

    async def on_revoked(_: object, places: Sequence[Any]) -> None:
        await revoked(places)

    async def on_assigned(_: object, places: Sequence[Any]) -> None:
        assigned(places)

    return type("Listener", (base,), {"on_partitions_revoked": on_revoked, "on_partitions_assigned": on_assigned})()


# --- errors, by the names of aiokafka's classes

_INVALID_RECORD = 87


def _name_invalid_record() -> None:
    """Give the broker's INVALID_RECORD a class, if aiokafka has none.

    Without one it is an UnknownError, as a fault within the broker is: and that says nothing against a record.
    """
    errors = require("aiokafka.errors", "kafka")
    if _INVALID_RECORD not in errors.kafka_errors:
        members = {"errno": _INVALID_RECORD, "message": "INVALID_RECORD"}
        # Whoever else uses the client in this process finds the class that it had.
        errors.kafka_errors[_INVALID_RECORD] = type("InvalidRecord", (errors.UnknownError,), members)


_REFUSED = {
    "AuthenticationFailedError",
    "AuthenticationMethodNotSupported",
    "ClusterAuthorizationFailedError",
    "GroupAuthorizationFailedError",
    "IllegalSaslStateError",
    "SaslAuthenticationFailed",
    "SecurityDisabled",
    "TopicAuthorizationFailedError",
    "TransactionalIdAuthorizationFailed",
    "UnsupportedSaslMechanismError",
}
_LARGE = {"MessageSizeTooLargeError", "RecordListTooLargeError", "RecordTooLargeError"}
_RECORD = {"CorruptRecordException", "InvalidRecord", "InvalidTimestampError", "PolicyViolationError"}
_PERMANENT = {"InvalidRequiredAcksError", "InvalidTopicError", "UnsupportedForMessageFormatError"}


# The group has gone on without this member, or the partition is no longer its own.
_LEFT_BEHIND = {"CommitFailedError", "IllegalGenerationError", "IllegalStateError", "UnknownMemberIdError"}


def is_left_behind(error: BaseException) -> bool:
    """Whether a commit failed because the partitions are no longer this member's: it must not be tried again."""
    return type(error).__name__ in _LEFT_BEHIND


# A batch before this one was refused, and the broker counts: this one was not taken.
_SEQUENCE = {"OutOfOrderSequenceNumber", "UnknownProducerId"}


def is_of_sequence(error: BaseException) -> bool:
    """Whether a batch was not taken for the sake of one before it; another producer counts anew."""
    return type(error).__name__ in _SEQUENCE


def is_fenced(error: BaseException) -> bool:
    """Whether another producer has taken over the transactional id."""
    return type(error).__name__ == "ProducerFenced"


def is_of_record(error: BaseException, retryable: Collection[str] = ()) -> bool:
    """Whether a batch was refused for the sake of one of its records, perhaps."""
    name = type(error).__name__
    return name in _LARGE | _RECORD and name not in retryable


def error_names(names: Iterable[str]) -> frozenset[str]:
    """Kafka's errors by the names of aiokafka's classes, or by those that Kafka's documents have.

    Example:
        >>> sorted(error_names(["TOPIC_AUTHORIZATION_FAILED", "InvalidTopicError"]))
        ['InvalidTopicError', 'TopicAuthorizationFailedError']

    Raises:
        ConfigError: there is no such error.
    """
    classes: Iterable[object] = cast("Any", vars(require("aiokafka.errors", "kafka"))).values()
    known = {_bare(each.__name__): each.__name__ for each in classes if isinstance(each, type)}
    found: set[str] = set()
    for name in names:
        bare = _bare(name)
        if bare not in known:
            close = closest(bare, known)
            way_out = "see aiokafka.errors for their names" if close is None else f"did you mean {known[close]}?"
            raise ConfigError(f"Kafka sink: retryable={name!r} is not an error of Kafka's; {way_out}")
        found.add(known[bare])
    return frozenset(found)


def _bare(name: str) -> str:
    return name.replace("_", "").lower().removesuffix("error").removesuffix("exception")


def translate_error(where: str, error: BaseException, retryable: Collection[str] = ()) -> BaseException:
    """An error of aiokafka as the sink's; what was not foreseen goes on as it is.

    `retryable` are the names of more errors that may pass.
    """
    name = type(error).__name__
    if isinstance(error, BatchQueueError):
        return error
    if name in retryable:
        return RetryableError(f"{where}: {name}", error_type="server")
    if name in _REFUSED:
        return AuthError(f"{where}: {name}; check the user and its rights")
    if name in _LARGE:
        return TooLargeError(f"{where}: {name}: the broker takes no record of this size; see its message.max.bytes")
    if name in _PERMANENT | _RECORD:
        return PermanentError(f"{where}: {name}")
    if isinstance(error, OSError) or type(error).__module__.startswith("aiokafka"):
        kind = "network" if isinstance(error, OSError) or "Connection" in name else "server"
        return RetryableError(f"{where}: {name}", error_type=kind)
    return error
