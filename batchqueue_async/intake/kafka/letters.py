"""Dead letters in a topic: confirmed by all in-sync replicas, with the record's key, value and headers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchqueue_async.errors import RetryableError
from batchqueue_async.intake.message import Message
from batchqueue_async.intake.ports import ATTEMPT
from batchqueue_async.sinks._shared.connection import SharedConnection
from batchqueue_async.sinks.kafka import client

if TYPE_CHECKING:
    from batchqueue_async.intake.kafka.records import KafkaMessage
    from batchqueue_async.intake.ports import DeadLetter


def letter_headers(delivery: KafkaMessage, outcome: DeadLetter) -> list[tuple[str, bytes]]:
    """The headers of a dead letter: the record's own, as they are, and why it is here.

    What an earlier consumer has written under these names is replaced.
    """
    bare = Message(source=delivery.source)
    added = outcome.headers(bare, partition=delivery.partition, offset=delivery.offset)
    kept = [(name, value) for name, value in delivery.raw_headers if name not in added and name != ATTEMPT]
    return [*kept, *((name, text.encode()) for name, text in added.items())]


class Letters:
    """Produces dead letters, over one producer that is made at the first."""

    def __init__(self, cluster: client.Cluster, topic: str | None) -> None:
        self.topic = topic
        self._cluster = cluster
        self._producer = SharedConnection(self._make, client.stop)

    async def _make(self) -> client.Producer:
        return await self._cluster.producer(acks="all")

    async def send(self, delivery: KafkaMessage, outcome: DeadLetter) -> None:
        """Produce a letter, and return when it is confirmed.

        Raises:
            SinkError: it was not; whether the broker has it is unknown then.
        """
        where = f"dead letters, topic {self.topic!r}"
        assert self.topic is not None  # noqa: S101 - the pool forwards nothing where letters are dropped
        producer: client.Producer | None = None
        value = None if delivery.tombstone else delivery.body
        try:
            async with asyncio.timeout(self._cluster.timeout):
                producer = await self._producer.get()
                headers = letter_headers(delivery, outcome)
                await producer.send_and_wait(self.topic, value=value, key=delivery.key, headers=headers)
        except TimeoutError:
            self._drop(producer)
            raise RetryableError(
                f"{where}: not confirmed in {self._cluster.timeout:g} s", error_type="timeout"
            ) from None
        except Exception as error:  # noqa: BLE001 - it goes on, by the library's class
            meant = client.translate_error(where, error)
            if isinstance(meant, RetryableError):
                self._drop(producer)
            raise meant from None

    def _drop(self, producer: client.Producer | None) -> None:
        if producer is not None:
            self._producer.drop(producer)

    async def close(self) -> None:
        """Close the producer, if there is one."""
        await self._producer.close()
