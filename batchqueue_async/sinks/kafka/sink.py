"""Messages in a topic of Kafka: in batches by partition, confirmed by all replicas, each with its key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import AuthError, ConfigError, RetryableError, SinkError
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import Secret
from batchqueue_async.sinks.base import SendResult, SinkNeeds
from batchqueue_async.sinks.kafka.client import Cluster, broker_addresses, check_client_id, error_names, translate_error
from batchqueue_async.sinks.kafka.delivery import Delivery, Partitioner, UnconfirmedSends
from batchqueue_async.sinks.kafka.messages import Encoder, check_option
from batchqueue_async.sinks.kafka.producers import Producers
from batchqueue_async.sinks.kafka.transactions import KafkaTransaction, Transactions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.sinks._shared.tls import TlsOption
    from batchqueue_async.sinks.base import BatchKey
    from batchqueue_async.sinks.kafka.client import Producer
    from batchqueue_async.sinks.kafka.delivery import Waited
    from batchqueue_async.sinks.kafka.messages import HeadersOption, KeyOption, TimeOption, ValueOption

_COMPRESSIONS = (None, "gzip", "snappy", "lz4", "zstd")


class KafkaSink:
    """Sends records to a topic; a send returns when all in-sync replicas have them.

    Bytes are sent as they are, text as UTF-8, and other records as JSON, one message each. The batches of a send are
    made by partition and go out whole, which is several times as fast as sending records one by one. A record that is
    too large, for the sink or for the topic, is given back in `SendResult.rejected`, and the others are sent.

    The producer is idempotent: what it tries again, the broker takes once. With `send_keyed`, which the exporter uses,
    each message has its key in a header, and records whose first send was given up are not sent twice as long as the
    process lives; after a restart their repetition has the same key. With `begin` a whole batch is in once, for
    consumers that read committed messages.

    Example:
        >>> KafkaSink("kafka-1:9092,kafka-2:9092", topic="spans", key="trace_id", compression="lz4")
        KafkaSink('kafka-1:9092,kafka-2:9092', topic='spans')
    """

    concurrent = True
    # The broker takes once what one producer repeats; what is sent again after a restart, or after it was confirmed, it
    # takes again.
    needs = SinkNeeds()

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        topic: str,
        *,
        key: KeyOption = None,
        value: ValueOption = None,
        headers: HeadersOption = None,
        timestamp: TimeOption = None,
        partitioner: Callable[[bytes | None, list[int]], int] | None = None,
        key_header: str | None = "bq-key",
        compression: str | None = None,
        idempotent: bool = True,
        max_batch_bytes: int = 1_000_000,
        max_record_bytes: int = 1_000_000,
        user: str | None = None,
        password: str | Secret | None = None,
        mechanism: str = "PLAIN",
        tls: TlsOption = None,
        client_id: str | None = None,
        transaction_timeout: float = 60.0,
        connect_timeout: float = 10.0,
        timeout: float = 10.0,
        retryable: Iterable[str] = (),
    ) -> None:
        """Say which topic of which cluster.

        Args:
            bootstrap: brokers to begin with, `host:port` each, in one text with commas or one by one.
            topic: the topic.
            key: the messages' key: the name of a column, or a function of the record; messages with one key stay in
                order, in one partition.
            value: a function that makes a record's bytes; None is bytes as they are, text as UTF-8, else JSON.
            headers: the columns that are headers too, or by the headers' names; or a function that gives a record's
                headers, pairs of a name and bytes or text.
            timestamp: the column with each record's time, in seconds since 1970 or a datetime, or a function that gives
                it; without, and for records that have none, it is the time of the send.
            partitioner: a function of the key and the list of partitions that chooses one; None hashes the key as
                Kafka's Java client does, and takes turns by batch where there is no key.
            key_header: the header for a record's idempotency key; None sends none.
            compression: gzip, snappy, lz4, zstd, or None.
            idempotent: whether what the client tries again is taken once; needs nothing of a broker since Kafka 1.0.
            max_batch_bytes: how large a batch of one partition may become, before compression.
            max_record_bytes: a record above this is refused; the topic's own limit is max.message.bytes.
            user: the user for SASL; None connects without.
            password: the user's password: `env:NAME`, `file:/path` or the value.
            mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.
            tls: True, a `Tls` or an `ssl.SSLContext`; None is no TLS.
            client_id: what the brokers call the sink's connections, in their quotas, metrics and logs; None leaves it
                to the client, which numbers them.
            transaction_timeout: seconds after which the broker undoes a transaction by itself.
            connect_timeout: seconds that a first connection may take.
            timeout: seconds that a send may take until it is confirmed.
            retryable: more of Kafka's errors that may pass, such as "TOPIC_AUTHORIZATION_FAILED" while rights are
                given; what else is not about a record or our rights always may.
        """
        require("aiokafka", "kafka")
        addresses = broker_addresses("Kafka sink", bootstrap)
        check_client_id("Kafka sink", client_id)
        if not topic:
            raise ConfigError("Kafka sink: topic='' is empty; name one")
        if compression not in _COMPRESSIONS:
            raise ConfigError(
                f"Kafka sink: compression={compression!r} is none of {', '.join(map(str, _COMPRESSIONS))}"
            )
        for name, number in (
            ("max_batch_bytes", max_batch_bytes),
            ("max_record_bytes", max_record_bytes),
            ("transaction_timeout", transaction_timeout),
            ("connect_timeout", connect_timeout),
            ("timeout", timeout),
        ):
            if number <= 0:
                raise ConfigError(f"Kafka sink: {name}={number} is not above 0")
        for name, function in (("value", value), ("partitioner", partitioner)):
            check_option(name, function)
        if isinstance(headers, str) or not (headers is None or callable(headers) or isinstance(headers, Iterable)):
            raise ConfigError(f"Kafka sink: headers={headers!r} are neither columns nor a function of a record")
        self.topic = topic
        self.timeout = timeout
        self._cluster = Cluster(
            bootstrap=addresses,
            client_id=client_id,
            user=user,
            password=None if password is None else Secret(password),
            mechanism=mechanism,
            tls=tls,
            connect_timeout=connect_timeout,
            timeout=timeout,
            retryable=error_names(retryable),
        )
        self._encoder = Encoder(key, value, headers, key_header, max_record_bytes, timestamp)
        self._partitioner = partitioner
        self._producer_options: dict[str, Any] = {
            "compression_type": compression,
            "max_batch_size": max_batch_bytes,
            "max_request_size": max(max_batch_bytes, max_record_bytes),
            "acks": "all",
        }
        self._idempotent = idempotent
        self._transaction_timeout = transaction_timeout
        self._where = f"Kafka sink, topic {topic!r}"
        self._unconfirmed = UnconfirmedSends()
        self._spread: Partitioner
        self._transactions: Transactions
        self._producers: Producers | None = None

    def __repr__(self) -> str:
        return f"KafkaSink({','.join(self._cluster.bootstrap)!r}, topic={self.topic!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        encoder, cluster = self._encoder, self._cluster
        options = {
            "key": encoder.key,
            "value": encoder.value,
            "headers": encoder.headers,
            "timestamp": encoder.timestamp,
            "partitioner": self._partitioner,
            "key_header": encoder.key_header,
            "compression": self._producer_options["compression_type"],
            "idempotent": self._idempotent,
            "max_batch_bytes": self._producer_options["max_batch_size"],
            "max_record_bytes": encoder.max_record_bytes,
            "user": cluster.user,
            "password": cluster.password,
            "mechanism": cluster.mechanism,
            "tls": cluster.tls,
            "client_id": cluster.client_id,
            "transaction_timeout": self._transaction_timeout,
            "connect_timeout": cluster.connect_timeout,
            "timeout": self.timeout,
            "retryable": sorted(cluster.retryable),
        }
        return partial(type(self), cluster.bootstrap, self.topic, **options), ()

    async def open(self) -> None:
        """Get ready; the first send connects, so that a broker which is down keeps no program from starting."""
        self._unconfirmed = UnconfirmedSends()
        self._spread = Partitioner(self._partitioner)
        self._producers = Producers(self._make_producer, self.timeout, self._unconfirmed.forget)
        self._transactions = Transactions(
            self._cluster, self.topic, self._where, self._producer_options, self._transaction_timeout
        )

    async def _make_producer(self) -> Producer:
        return await self._cluster.producer(enable_idempotence=self._idempotent, **self._producer_options)

    async def close(self) -> None:
        """Disconnect; a transaction that is under way is undone."""
        producers, self._producers = self._producers, None
        if producers is not None:
            await self._transactions.close()
            await producers.close()

    async def send(self, batch: Sequence[Any]) -> SendResult:
        """Send the records.

        Raises:
            RetryableError: the brokers are not there, or did not confirm in time; what was given to them may still be
                delivered. Without keys a repetition is delivered too.
            AuthError: they refuse the user, the password or what the user wants to do.
        """
        return await self._send(batch, None)

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult:
        """Send the records, each with its key in a header; what an earlier send has already given away is not sent."""
        return await self._send(batch, keys)

    async def _send(self, batch: Sequence[Any], keys: Sequence[str] | None) -> SendResult:
        producers = self._open_producers
        if not batch:
            return SendResult()
        waited, delivery = self._deliver(batch, keys)
        producer: Producer | None = None
        try:
            async with asyncio.timeout(self.timeout):
                if waited:
                    await asyncio.wait(waited)
                while delivery.todo:
                    producer = await producers.get()
                    await delivery.run(producer)
                    if delivery.broken:
                        producers.retire(producer)
                        delivery.broken = False
        except Exception as error:  # noqa: BLE001 - each is told as what it means; the unforeseen goes on as it is
            delivery.give_up(await self._meant(error))
            if producer is not None and not isinstance(error, TimeoutError):
                producers.retire(producer)
        except asyncio.CancelledError:
            delivery.take_results()
            self._unconfirmed.keep(keys, delivery.taken(), producer)  # confirmed, and nobody was told
            raise
        finally:
            self._unconfirmed.keep(keys, delivery.pending(), producer)
            self._unconfirmed.keep_waited(keys, waited)
        for confirmed, (places, _) in waited.items():
            if not confirmed.done() or confirmed.exception() is not None:
                delivery.failed |= dict.fromkeys(places, self._late())
        return _result(delivery.failed, len(batch))

    def _deliver(self, batch: Sequence[Any], keys: Sequence[str] | None) -> tuple[Waited, Delivery]:
        """What is left to send, and what an earlier send has given away and this one only waits for."""
        waited, fresh = self._unconfirmed.take(keys)
        if waited and keys is not None:
            batch, keys = [batch[place] for place in fresh], [keys[place] for place in fresh]
        messages, refused = self._encoder.encode(batch, keys)
        if waited:
            messages.places = [fresh[place] for place in messages.places]
            refused = {fresh[place]: error for place, error in refused.items()}
        return waited, Delivery(
            self.topic, self._where, self._spread, messages, refused, retryable=self._cluster.retryable
        )

    async def _meant(self, error: Exception) -> SinkError:
        if isinstance(error, TimeoutError):
            try:
                await self._cluster.check_credentials()
            except AuthError as refusal:
                return refusal
            return self._late()
        meant = translate_error(self._where, error, self._cluster.retryable)
        if not isinstance(meant, SinkError):
            raise meant
        return meant

    def _late(self) -> RetryableError:
        return RetryableError(f"{self._where}: not confirmed within {self.timeout} s", error_type="timeout")

    @property
    def _open_producers(self) -> Producers:
        if self._producers is None:
            raise RuntimeError(f"{self!r} is not open; call open() first")
        return self._producers

    async def begin(self, key: BatchKey) -> KafkaTransaction | None:
        """Start a transaction for the batch, or return None: it is in already.

        What is in is noted in the same transaction, as the offset of a consumer group of the batch's source, which
        the brokers keep for offsets.retention.minutes, a week, after the last batch.
        """
        if self._producers is None:
            raise RuntimeError(f"{self!r} is not open; call open() first")
        return await self._transactions.begin(key, self._encoder, self._spread)


def _result(failed: dict[int, SinkError], count: int) -> SendResult:
    """What became of the records; an error where nothing was delivered, and may be later."""
    if len(failed) == count:
        for error in failed.values():
            if isinstance(error, AuthError):
                raise error
        if all(isinstance(error, RetryableError) for error in failed.values()):
            raise next(iter(failed.values()))
    return SendResult(rejected=failed)
