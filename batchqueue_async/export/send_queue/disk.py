"""A send queue on disk: a durable queue whose payloads are encoded records; and the protocol that both kinds keep."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from batchqueue_async.durable.disk.format import frame_size
from batchqueue_async.durable.state.backlog import run_bytes
from batchqueue_async.errors import (
    DeliveryError,
    Failure,
    PermanentError,
    QueueFullError,
    RecordTooLargeError,
)
from batchqueue_async.export.send_queue import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from batchqueue_async.durable.config import DurableConfig
    from batchqueue_async.durable.queue import DurableQueue
    from batchqueue_async.durable.stats import DurableStats
    from batchqueue_async.export.config import ExportConfig
    from batchqueue_async.leases.lease import Lease

# Less than the durable queue takes in one put: what the queue can hold at once comes in whole, or not at all.
_PUT_BYTES = 240 << 20
_PARTS = 4


class SendQueue(Protocol):
    """What the exporter asks of either queue."""

    @property
    def queue_id(self) -> str:
        """Its name for ever; with a sequence number, a record's identity."""
        ...

    @property
    def next_seq(self) -> int:
        """The number of the next record."""
        ...

    @property
    def oldest(self) -> int | None:
        """The lowest number of a record that is not settled."""
        ...

    @property
    def records(self) -> int:
        """Records in it, those under way included."""
        ...

    @property
    def size(self) -> int:
        """Their bytes."""
        ...

    @property
    def leased(self) -> int:
        """Records under way."""
        ...

    @property
    def next_due(self) -> float | None:
        """The loop's time at which the next delayed record is ready."""
        ...

    @property
    def dropped(self) -> Mapping[str, int]:
        """Records dropped, by reason."""
        ...

    async def put(self, batch: Sequence[Any], /) -> None:
        """Keep records; returns when they are as safe as they will be."""
        ...

    async def lease(self, max_records: int, max_bytes: int, wait: float | None) -> Lease:
        """The next records."""
        ...

    def weigh(self, lease: Lease) -> int:
        """The bytes of a lease's records."""
        ...

    def now_ns(self) -> int:
        """The time on the clock of a record's `enqueued_ns`."""
        ...


class DiskQueue:
    """A durable queue as a send queue: records are encoded on their way in."""

    def __init__(self, queue: DurableQueue, encode: Callable[[Any], bytes] | None) -> None:
        self.queue = queue
        self._encode = encode
        config = queue.config
        room = config.usable_bytes - frame_size(1, 0)
        self._limit = queue._limit if room == math.inf else max(1, min(queue._limit, int(room)))
        self._parted = config.overflow != "reject"
        self._most_records = math.inf if config.max_records is None else config.max_records
        self._most_bytes = config.usable_bytes

    async def put(self, batch: Sequence[Any]) -> None:
        """Encode records and put them: all or none, unless they are more than the queue can ever hold.

        Raises:
            DeliveryError: some of them have no form on disk or are too large for it; the others are put.
            QueueFullError: there is no room, or there never can be for so many at once.
        """
        try:
            payloads = codec.encode_all(batch) if self._encode is None else list(map(self._encode, batch))
            good = all(len(payload) <= self._limit for payload in payloads)
        except Exception:  # noqa: BLE001 - whatever an encoder raises, its record is the reason
            good, payloads = False, []
        if good:
            await self._put(payloads)
        else:
            await self._put_good(batch)

    async def _put(self, payloads: list[bytes]) -> None:
        size = sum(map(len, payloads))
        most, most_bytes = len(payloads), _PUT_BYTES
        if self._parted and (most > self._most_records or size + frame_size(most, 0) > self._most_bytes):
            most = int(min(most, max(1, self._most_records // _PARTS)))
            most_bytes = int(min(_PUT_BYTES, self._most_bytes // _PARTS))
        try:
            for part in _parts(payloads, most, most_bytes):
                await self.queue.put_many(part)
        except RecordTooLargeError as error:
            raise QueueFullError(f"send queue: {error}") from error

    async def _put_good(self, batch: Sequence[Any]) -> None:
        """Put the records that can be, and tell of the others."""
        good: list[bytes] = []
        failures: list[Failure] = []
        for record in batch:
            try:
                good.append(self._checked(codec.encode(record) if self._encode is None else self._encode(record)))
            except Exception as error:  # noqa: BLE001 - as above
                failures.append(Failure((record,), error))
        if good:
            await self._put(good)
        if not failures:
            return  # what failed for the batch did not fail for any record
        raise DeliveryError(
            f"send queue: {len(failures)} of {len(batch)} records could not be put, the others are; "
            "DeliveryError.failures has them with their reasons",
            failures,
        )

    def _checked(self, payload: bytes) -> bytes:
        if len(payload) > self._limit:
            raise RecordTooLargeError(
                f"a record of {len(payload)} bytes is above {self._limit}, which max_record and max_bytes allow at "
                "most; raise them, or send a reference"
            )
        return bytes(payload)

    async def lease(self, max_records: int, max_bytes: int, wait: float | None) -> Lease:
        """The next records."""
        return await self.queue.lease(max_records, max_bytes, wait)

    @property
    def queue_id(self) -> str:
        """The durable queue's id."""
        return self.queue.queue_id

    @property
    def next_seq(self) -> int:
        """The number of the next record."""
        return self.queue._state.next_seq

    @property
    def oldest(self) -> int | None:
        """The lowest number of a record that is not settled."""
        return self.queue.oldest

    @property
    def records(self) -> int:
        """Records in it, those under way included."""
        return self.queue._state.records

    @property
    def size(self) -> int:
        """Its bytes on disk."""
        state = self.queue._state
        return state.disk_bytes + state.extra_bytes

    @property
    def leased(self) -> int:
        """Records under way."""
        return self.queue._state.leased

    @property
    def next_due(self) -> float | None:
        """The loop's time at which the next delayed record is ready."""
        delayed = self.queue._state.delayed
        return delayed[0][0] if delayed else None

    @property
    def dropped(self) -> Mapping[str, int]:
        """Records dropped, by reason."""
        return self.queue._state.counters.dropped

    @property
    def stats(self) -> DurableStats:
        """The durable queue's own counts."""
        return self.queue.stats()

    def weigh(self, lease: Lease) -> int:
        """The bytes of a lease's records."""
        return sum(map(run_bytes, lease._all))

    def now_ns(self) -> int:
        """The time on the clock of a record's `enqueued_ns`."""
        return self.queue._now_ns()


def _parts(payloads: list[bytes], most: int, most_bytes: int) -> Iterator[list[bytes]]:
    """Payloads in lists within both limits."""
    part: list[bytes] = []
    size = 0
    for payload in payloads:
        if part and (size + len(payload) > most_bytes or len(part) >= most):
            yield part
            part, size = [], 0
        part.append(payload)
        size += len(payload)
    if part:
        yield part


def decoder(config: ExportConfig) -> Callable[[Sequence[bytes]], list[Any]]:
    """What makes records of payloads from the disk; raises `PermanentError` where one can't be."""
    decode = config.decode
    if decode is None:
        return codec.decode_all

    def decode_all(payloads: Sequence[bytes]) -> list[Any]:
        try:
            return list(map(decode, payloads))
        except Exception as error:
            raise PermanentError(f"decode raised {type(error).__name__}") from error

    return decode_all


def durable_config(config: ExportConfig) -> DurableConfig:
    """How the durable send queue of an exporter behaves."""
    # The exporter settles all that it leases; the time of a lease is only for a sink that never comes back.
    waits = 2 if config.split is None else 2 + config.split.channel // config.split.sender_count
    durable = replace(
        config.durable,
        lease_timeout=max(config.durable.lease_timeout, waits * config.send_timeout),
        max_records=config.max_records or config.durable.max_records,
        max_bytes=config.byte_limit,
        overflow=config.overflow,
        block_timeout=config.block_timeout,
    )
    key = record_key(config)
    if key is None:
        return durable
    decode = decoder(config)

    def key_of(payload: bytes) -> Hashable:
        try:
            return key(decode([payload])[0])
        except PermanentError:
            return None  # it is found again, and given up, when it is to be sent

    return replace(durable, order="key", key=key_of)


def record_key(config: ExportConfig) -> Callable[[Any], Hashable] | None:
    """The user's key function, made safe: records for which it fails are in order among each other."""
    key = config.key
    if key is None:
        return None

    def key_of(record: Any) -> Hashable:
        try:
            found = key(record)
            hash(found)
        except Exception:  # noqa: BLE001 - a user's function; the record is no worse for it
            return None
        return found

    return key_of
