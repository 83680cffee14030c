"""Messages on their way to a topic: into batches by partition, sent, and confirmed or not.

The client tries a batch again for as long as its producer lives, under the same sequence number, so that the broker
takes it once. A send whose time is over therefore leaves its batches with the client, and remembers which keys are in
them: when those records are sent again, it waits for the same batches instead of sending them twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from batchqueue_async.errors import ConfigError, RetryableError, SinkError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks.kafka.client import is_of_record, is_of_sequence, translate_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from batchqueue_async.sinks.kafka.client import BatchBuilder, Producer
    from batchqueue_async.sinks.kafka.messages import Messages

_REMEMBERED = 100_000
_KNOWN_KEYS = 10_000
_NONE: list[tuple[str, bytes]] = []


class Batch(NamedTuple):
    """A batch that the client has: when it is confirmed, and which messages are in it."""

    confirmed: asyncio.Future[Any]
    messages: Sequence[int]


Waited: TypeAlias = "dict[asyncio.Future[Any], tuple[list[int], Producer]]"
"""Batches of earlier sends: which records of this one are in each, and the producer that has it."""


class UnconfirmedSends:
    """Keys whose records a producer still tries to deliver, or has delivered since, for the next send of them."""

    def __init__(self) -> None:
        self._batches: OrderedDict[str, tuple[asyncio.Future[Any], Producer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._batches)

    def take(self, keys: Sequence[str] | None) -> tuple[Waited, list[int]]:
        """The batches that have records of these keys, and the places of the others."""
        waited: Waited = {}
        fresh: list[int] = []
        if not self._batches or keys is None:
            return waited, fresh
        for place, key in enumerate(keys):
            confirmed, producer = self._batches.pop(key, (None, None))
            if confirmed is None or producer is None or _failed(confirmed):
                fresh.append(place)
            else:
                waited.setdefault(confirmed, ([], producer))[0].append(place)
        return waited, fresh

    def keep(self, keys: Sequence[str] | None, batches: Sequence[Batch], producer: Producer | None) -> None:
        """Note the batches of a send that has ended; `messages` are places of its records here."""
        if keys is not None and producer is not None:
            for batch in batches:
                for place in batch.messages:
                    self._batches[keys[place]] = (batch.confirmed, producer)
            while len(self._batches) > _REMEMBERED:
                self._batches.popitem(last=False)

    def keep_waited(self, keys: Sequence[str] | None, waited: Waited) -> None:
        """Note again what a send has waited for in vain."""
        for confirmed, (places, producer) in waited.items():
            if not confirmed.done():
                self.keep(keys, [Batch(confirmed, places)], producer)

    def forget(self, producer: Producer) -> None:
        """What this producer had and did not deliver will never be: it was given up."""
        lost = [key for key, (confirmed, its) in self._batches.items() if its is producer and not confirmed.done()]
        for key in lost:
            del self._batches[key]


def _failed(confirmed: asyncio.Future[Any]) -> bool:
    return confirmed.done() and (confirmed.cancelled() or confirmed.exception() is not None)


class Partitioner:
    """Which partition a message goes to: by its key as Kafka's own clients do; without a key, in turns by batch."""

    def __init__(self, choose: Callable[[bytes | None, list[int]], int] | None) -> None:
        self._choose = choose
        self._turn = count()
        self._known: dict[bytes, int] = {}
        self._partitions: list[int] = []

    def next(self, partitions: list[int]) -> int:
        """The partition whose turn it is."""
        return partitions[next(self._turn) % len(partitions)]

    def spread(self, messages: Messages, indexes: Sequence[int], partitions: list[int]) -> dict[int, Sequence[int]]:
        """The messages by their partitions."""
        if self._choose is None and messages.keys is None:
            return {self.next(partitions): indexes}
        if partitions != self._partitions:
            self._partitions, self._known = partitions, {}
        found: dict[int, list[int]] = {}
        keyless: int | None = None
        for index in indexes:
            key = messages.keys[index] if messages.keys is not None else None
            if self._choose is not None:
                partition = self._chosen(key, partitions)
            elif key is None:
                partition = keyless = self.next(partitions) if keyless is None else keyless
            else:
                partition = self._by_key(key, partitions)
            found.setdefault(partition, []).append(index)
        return dict(found)

    def _chosen(self, key: bytes | None, partitions: list[int]) -> int:
        partition = self._choose(key, partitions) if self._choose is not None else -1
        if partition not in partitions:
            raise ConfigError(f"Kafka sink: the partitioner chose {partition!r}, which is none of {partitions}")
        return partition

    def _by_key(self, key: bytes, partitions: list[int]) -> int:
        # The client's hash is written in Python: keys that come again are remembered.
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KNOWN_KEYS:
                self._known.clear()
            hashed: int = require("aiokafka.partitioner", "kafka").murmur2(key)
            found = self._known[key] = partitions[(hashed & 0x7FFFFFFF) % len(partitions)]
        return found


class Delivery:
    """One send: its messages, and what became of each record.

    Attributes:
        todo: the messages that are still to be given to a producer.
        batches: what a producer has of this send and has not confirmed.
        failed: the records that were not delivered, each with its reason.
        broken: whether the producer is of no more use: the broker counts its batches, and one is missing.
    """

    def __init__(
        self,
        topic: str,
        where: str,
        partitioner: Partitioner,
        messages: Messages,
        failed: dict[int, SinkError],
        *,
        retryable: frozenset[str] = frozenset(),
    ) -> None:
        self.topic = topic
        self.where = where
        self.messages = messages
        self.partitioner = partitioner
        self.todo: list[Sequence[int]] = [range(len(messages.values))] if messages.values else []
        self.batches: list[Batch] = []
        self.failed = failed
        self.broken = False
        self._retryable = retryable
        self._confirmed: list[Batch] = []

    async def run(self, producer: Producer) -> None:
        """Send what there is to send, and wait until it is confirmed or refused; smaller batches may be left to do."""
        partitions = sorted(await producer.partitions_for(self.topic))
        for indexes in self.todo:
            for partition, some in self.partitioner.spread(self.messages, indexes, partitions).items():
                await self._submit(producer, partition, some)
        self.todo = []
        await asyncio.wait([batch.confirmed for batch in self.batches])
        self.take_results()

    async def _submit(self, producer: Producer, partition: int, indexes: Sequence[int]) -> None:
        for builder, some in _filled(producer, self.messages, indexes):
            confirmed = await producer.send_batch(builder, self.topic, partition=partition)
            self.batches.append(Batch(confirmed, some))

    def take_results(self) -> None:
        """What the batches came to."""
        batches, self.batches = self.batches, []
        for batch in batches:
            if not batch.confirmed.done():
                self.batches.append(batch)
            elif (error := batch.confirmed.exception()) is None:
                self._confirmed.append(batch)
            else:
                self.broken = True
                self._refused(batch, error)

    def _refused(self, batch: Batch, error: BaseException) -> None:
        if is_of_sequence(error):
            self.todo.append(batch.messages)
            return
        if is_of_record(error, self._retryable) and len(batch.messages) > 1:
            middle = len(batch.messages) // 2
            self.todo += [batch.messages[:middle], batch.messages[middle:]]
            return
        meant = translate_error(self.where, error, self._retryable)
        self._fail(batch.messages, meant if isinstance(meant, SinkError) else RetryableError(f"{self.where}: {error}"))

    def give_up(self, error: SinkError) -> None:
        """The time is over: what is confirmed is; the rest has failed, or is not known."""
        self.take_results()
        confirmed = {index for batch in self._confirmed for index in batch.messages}
        self._fail([index for index in range(len(self.messages.values)) if index not in confirmed], error)

    def pending(self) -> list[Batch]:
        """What is not confirmed yet, by records."""
        return self._by_records(self.batches)

    def taken(self) -> list[Batch]:
        """What is confirmed, by records."""
        return self._by_records(self._confirmed)

    def _by_records(self, batches: Sequence[Batch]) -> list[Batch]:
        places = self.messages.places
        return [Batch(batch.confirmed, [places[index] for index in batch.messages]) for batch in batches]

    def _fail(self, indexes: Sequence[int], error: SinkError) -> None:
        for index in indexes:
            self.failed.setdefault(self.messages.places[index], error)


def _filled(
    producer: Producer, messages: Messages, indexes: Sequence[int]
) -> Generator[tuple[BatchBuilder, Sequence[int]]]:
    """Batches as large as the producer makes them."""
    now = int(time.time() * 1000)  # as Kafka has it; asked once, not for each record
    start = 0
    while start < len(indexes):
        builder = producer.create_batch()
        end = _fill(builder, messages, indexes, start, now)
        yield builder, indexes[start:end]
        start = end


def _fill(builder: BatchBuilder, messages: Messages, indexes: Sequence[int], start: int, now: int) -> int:
    """Append messages until the batch is full; where the next one starts."""
    append, values, keys, headers = builder.append, messages.values, messages.keys, messages.headers
    times = messages.times
    if keys is None and headers is None and times is None:
        # A partition that has all messages has them in their order.
        some = values if len(indexes) == len(values) else [values[index] for index in indexes]
        for at, value in enumerate(islice(some, start, None), start):
            if append(timestamp=now, key=None, value=value) is None:
                return at
        return len(indexes)
    for at in range(start, len(indexes)):
        index = indexes[at]
        key = None if keys is None else keys[index]
        moment = now if times is None else times[index]
        if append(timestamp=moment, key=key, value=values[index], headers=headers[index] if headers else _NONE) is None:
            return at
    return len(indexes)
