"""Whole batches in one transaction of Kafka, with the note that they are in.

The note is an offset that the transaction commits for a consumer group named after the batch's source: the number of
the last batch. A producer of the same source elsewhere, which this one took over from, is fenced off by the brokers.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import PermanentError, RetryableError, SinkError
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.sinks.kafka.client import Cluster, is_fenced, offsets, stop, translate_error
from batchqueue_async.sinks.kafka.delivery import Delivery, Partitioner

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from batchqueue_async.sinks.base import BatchKey
    from batchqueue_async.sinks.kafka.client import Producer
    from batchqueue_async.sinks.kafka.messages import Encoder


class Transactions:
    """The transactions of one topic, one at a time; the producer of the last source is kept for its next batch."""

    def __init__(self, cluster: Cluster, topic: str, where: str, options: dict[str, Any], timeout: float) -> None:
        self.cluster = cluster
        self.topic = topic
        self.where = where
        self._options = options | {"transaction_timeout_ms": max(1, int(timeout * 1000))}
        self._turn = asyncio.Lock()
        self._producer: Producer | None = None
        self._source = ""
        self._last = -1

    def group(self, source: str) -> str:
        """The consumer group, and the transactional id, of a source's batches."""
        return f"batchqueue.{self.topic}.{source}"

    async def begin(self, key: BatchKey, encoder: Encoder, partitioner: Partitioner) -> KafkaTransaction | None:
        """Start a transaction for the batch, or return None: it is in already."""
        await self._turn.acquire()
        try:
            async with self.call():
                producer = await self._for(key.source)
                if self._last < key.number:
                    await producer.begin_transaction()
                    return KafkaTransaction(self, producer, key, encoder, partitioner)
        except BaseException:
            self._turn.release()
            raise
        self._turn.release()
        return None

    async def _for(self, source: str) -> Producer:
        if self._producer is None or self._source != source:
            await self.drop()
            self._producer = await self.cluster.producer(transactional_id=self.group(source), **self._options)
            self._source = source
            # Asked after the producer has its id: what an older one has begun is decided by then.
            self._last = (await self.cluster.committed(self.topic, self.group(source)) or 0) - 1
        return self._producer

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[None]:
        """In time, and with the sink's errors; after one of them the producer is another."""
        try:
            async with asyncio.timeout(self.cluster.timeout):
                yield
        except BaseException as error:
            await self.drop()
            if isinstance(error, TimeoutError):
                await self.cluster.check_credentials()
            if is_fenced(error):
                raise PermanentError(
                    f"{self.where}: another process has taken over the batches of this source"
                ) from None
            meant = translate_error(self.where, error, self.cluster.retryable)
            if meant is error:
                raise
            raise meant from None

    async def drop(self) -> None:
        """Give the producer up; what it has begun is undone, at the latest by the next one with its id."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop(producer)

    async def note(self, producer: Producer, key: BatchKey) -> None:
        """Let the transaction say that the batch is in."""
        await producer.send_offsets_to_transaction(offsets(self.topic, key.number + 1), self.group(key.source))

    def end(self, key: BatchKey | None) -> None:
        """The transaction is over; with a key its batch is in."""
        if key is not None:
            self._last = key.number
        self._turn.release()

    async def close(self) -> None:
        """Disconnect."""
        await self.drop()


class KafkaTransaction:
    """One batch on its way into a topic."""

    def __init__(
        self, owner: Transactions, producer: Producer, key: BatchKey, encoder: Encoder, partitioner: Partitioner
    ) -> None:
        self._owner = owner
        self._producer = producer
        self._key = key
        self._encoder = encoder
        self._partitioner = partitioner
        self._open = True
        self._broken = False

    async def send(self, batch: Sequence[Any]) -> SendResult:
        """Send records; consumers of committed messages see none of them before the commit."""
        if not batch:
            return SendResult()
        messages, refused = self._encoder.encode(batch, None)
        unsent = set(refused)
        owner = self._owner
        delivery = Delivery(
            owner.topic, owner.where, self._partitioner, messages, refused, retryable=owner.cluster.retryable
        )
        async with self._whole():
            if delivery.todo:
                await delivery.run(self._producer)
            for place, error in delivery.failed.items():
                if place not in unsent:
                    raise error  # the broker has refused a part of the transaction, and so all of it
            if delivery.todo:
                raise RetryableError(f"{self._owner.where}: the broker refuses a record of the batch")
        return SendResult(rejected=delivery.failed)

    async def commit(self) -> None:
        """Note the batch and commit all of it."""
        async with self._whole():
            await self._owner.note(self._producer, self._key)
            await self._producer.commit_transaction()
        self._finish(self._key)

    async def rollback(self) -> None:
        """Undo all of it."""
        if self._open:
            try:
                if not self._broken:
                    async with self._owner.call():
                        await self._producer.abort_transaction()
            except SinkError:
                pass  # the producer is given up, and its transaction with it
            finally:
                self._finish(None)

    @asynccontextmanager
    async def _whole(self) -> AsyncGenerator[None]:
        if self._broken:
            raise RetryableError(f"{self._owner.where}: the transaction has failed; roll back, and begin again")
        try:
            async with self._owner.call():
                yield
        except BaseException:
            self._broken = True
            raise

    def _finish(self, key: BatchKey | None) -> None:
        if self._open:
            self._open = False
            self._owner.end(key)
