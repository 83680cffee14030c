"""A durable queue as a send queue: records are encoded on their way in. The one module here that knows `durable`."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from batchqueue_async.durable.disk.format import frame_size
from batchqueue_async.errors import (
    DeliveryError,
    Failure,
    PermanentError,
    QueueClosedError,
    QueueFullError,
    RecordTooLargeError,
)
from batchqueue_async.export.send_queue import codec
from batchqueue_async.export.send_queue.attempt_log import AttemptLog
from batchqueue_async.export.send_queue.protocol import Placed, Span
from batchqueue_async.export.send_queue.record_key import record_key
from batchqueue_async.export.send_queue.sources import Sources

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from batchqueue_async.durable.config import DurableConfig
    from batchqueue_async.durable.queue import DurableQueue
    from batchqueue_async.export.config import ExportConfig
    from batchqueue_async.leases.lease import Lease

# Less than the durable queue takes in one put: what the queue can hold at once comes in whole, or not at all.
_PUT_BYTES = 240 << 20
_PARTS = 4
_NS = 1e9
_history = attrgetter("attempts", "enqueued_at")


class DiskLease:
    """A lease of the durable queue, by index instead of by number."""

    __slots__ = ("_lease", "_owner", "numbers", "payloads", "spans", "weight")

    def __init__(self, owner: DiskQueue, lease: Lease) -> None:
        self._owner = owner
        self._lease = lease
        records = lease.records
        self.payloads: list[Any] = [record.payload for record in records]
        self.numbers: Sequence[int] = [record.seq for record in records]
        first, last = records[0], records[-1]
        if last.seq - first.seq == len(records) - 1:
            self.numbers = range(first.seq, last.seq + 1)
        self.weight = sum(map(len, self.payloads))
        self.spans = [
            Span(sum(1 for _ in same), attempts, int(enqueued_at * _NS))
            for (attempts, enqueued_at), same in groupby(records, _history)
        ]

    def __len__(self) -> int:
        return len(self.payloads)

    @property
    def unsettled(self) -> int:
        """How many are still to be settled."""
        return self._lease.unsettled

    async def ack(self, indices: Sequence[int] | None = None) -> int:
        """All that are left, or these, are done with; how many."""
        self._owner.attempts.settled(self.numbers if indices is None else self._numbers(indices))
        return await self._lease.ack(None if indices is None else self._numbers(indices))

    async def nack(
        self,
        delay: float = 0.0,
        indices: Sequence[int] | None = None,
        *,
        reason: str = "nack",
        counted: bool = True,
        more: int = 0,
    ) -> int:
        """All that are left, or these, come again after `delay` seconds.

        Not `counted`, this lease was no attempt; `more` attempts were made on it besides.
        """
        seqs = None if indices is None else self._numbers(indices)
        return await self._lease.nack(delay, seqs, reason=reason, counted=counted, more=more)

    async def dead_letter(self, reason: str, indices: Sequence[int] | None = None) -> int:
        """All that are left, or these, are given up; returns when the disk has them."""
        gone = await self._lease.dead_letter(reason, None if indices is None else self._numbers(indices))
        self._owner.attempts.settled(self.numbers if indices is None else self._numbers(indices))
        return gone

    def extend(self) -> None:
        """Let the time of the lease begin anew."""
        self._lease.extend()

    def _numbers(self, indices: Sequence[int]) -> list[int]:
        numbers = self.numbers
        return [numbers[index] for index in indices]


class DiskQueue:
    """A durable queue as a send queue.

    Attributes:
        queue: the durable queue.
        attempts: which records are being sent.
    """

    def __init__(self, queue: DurableQueue, encode: Callable[[Any], bytes] | None) -> None:
        self.queue = queue
        self.attempts = AttemptLog(queue.path)
        self._sources = Sources(queue.path, queue.queue_id, queue.next_seq, oldest=queue.oldest)
        self._encode = encode
        self._accepting = True
        config = queue.config
        room = config.usable_bytes - frame_size(1, 0)
        limit = queue.record_limit
        self._limit = limit if room == math.inf else max(1, min(limit, int(room)))
        self._parted = config.overflow != "reject"
        self._most_records = math.inf if config.max_records is None else config.max_records
        self._most_bytes = config.usable_bytes

    async def put(self, batch: Sequence[Any], placed: list[Placed] | None = None) -> list[range]:
        """Encode records and put them: all or none, unless they are more than the queue can ever hold.

        Args:
            batch: the records.
            placed: takes what came in, as it does.

        Returns:
            The numbers of the records that came in.

        Raises:
            DeliveryError: some of them have no form on disk or are too large for it; the others are put.
            QueueFullError: there is no room, or there never can be for so many at once.
        """
        try:
            payloads = codec.encode_all(batch) if self._encode is None else list(map(self._encode, batch))
            good = all(len(payload) <= self._limit for payload in payloads)
        except Exception:  # noqa: BLE001 - whatever an encoder raises, its record is the reason
            good, payloads = False, []
        placed = [] if placed is None else placed
        if good:
            return await self._put(payloads, range(len(payloads)), placed)
        return await self._put_good(batch, placed)

    async def _put(self, payloads: list[bytes], places: Sequence[int], placed: list[Placed]) -> list[range]:
        if self._sources.doubtful:
            self._sources.renew(self.queue.next_seq, self.queue.oldest)
        size = sum(map(len, payloads))
        most, most_bytes = len(payloads), _PUT_BYTES
        if self._parted and (most > self._most_records or size + frame_size(most, 0) > self._most_bytes):
            most = int(min(most, max(1, self._most_records // _PARTS)))
            most_bytes = int(min(_PUT_BYTES, self._most_bytes // _PARTS))
        done: list[range] = []
        low = 0
        try:
            for part in _parts(payloads, most, most_bytes):
                self._check_accepting()
                numbers = await self.queue.put_many(part)
                if numbers:
                    done.append(numbers)
                    placed.append(Placed(places[low : low + len(part)], numbers))
                low += len(part)
        except RecordTooLargeError as error:
            full = QueueFullError(f"send queue: {error}")
            full.accepted = sum(map(len, done))
            raise full from error
        except QueueFullError as error:
            error.accepted = sum(map(len, done))
            raise
        return done

    def stop_intake(self) -> None:
        """Refuse every put that has not reached the durable queue; those that wait there end with its closing."""
        self._accepting = False

    def _check_accepting(self) -> None:
        if not self._accepting:
            raise QueueClosedError("send queue: closed; nothing of this call was kept that it did not confirm")

    async def _put_good(self, batch: Sequence[Any], placed: list[Placed]) -> list[range]:
        """Put the records that can be, and tell of the others."""
        good: list[bytes] = []
        places: list[int] = []
        failures: list[Failure] = []
        for place, record in enumerate(batch):
            try:
                good.append(self._checked(codec.encode(record) if self._encode is None else self._encode(record)))
                places.append(place)
            except Exception as error:  # noqa: BLE001 - whatever an encoder raises, its record is the one to fail
                failures.append(Failure((record,), error))
        done = await self._put(good, places, placed) if good else []
        if not failures:
            return done  # what failed for the batch did not fail for any record
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

    async def lease(self, max_records: int, max_bytes: int, wait: float | None) -> DiskLease | None:
        """The next records; None when there are none in time."""
        lease = await self.queue.lease(max_records, max_bytes, wait)
        return DiskLease(self, lease) if lease else None

    @property
    def lease_time(self) -> float:
        """Seconds after which a lease that is not extended is over."""
        return self.queue.config.lease_timeout

    @property
    def queue_id(self) -> str:
        """The durable queue's id."""
        return self.queue.queue_id

    @property
    def next_seq(self) -> int:
        """The number of the next record."""
        return self.queue.next_seq

    @property
    def oldest(self) -> int | None:
        """The lowest number of a record that is not settled."""
        return self.queue.oldest

    @property
    def records(self) -> int:
        """Records in it, those under way included."""
        return self.queue.records

    @property
    def size(self) -> int:
        """Its bytes on disk."""
        return self.queue.size

    @property
    def leased(self) -> int:
        """Records under way."""
        return self.queue.leased

    @property
    def next_due(self) -> float | None:
        """The loop's time at which the next delayed record is ready."""
        return self.queue.next_due

    @property
    def dropped(self) -> Mapping[str, int]:
        """Records dropped, by reason."""
        return self.queue.dropped

    def decoder(self, config: ExportConfig) -> Callable[[Sequence[bytes]], list[Any]]:
        """What makes records of payloads; raises `PermanentError` where one can't be."""
        return decoder(config)

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """The idempotency keys of the records with these numbers."""
        return self._sources.keys(numbers)

    def now_ns(self) -> int:
        """The time on the clock of a record's `enqueued_ns`."""
        return self.queue.now_ns()

    async def close(self) -> None:
        """Close the durable queue, which ends every wait."""
        self.stop_intake()
        self.attempts.close()
        await self.queue.close()


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
    # A batch that is kept together for its repetition stays leased for its delay.
    longest = waits * config.send_timeout + 2 * config.retry.max_delay + config.batch.linger
    durable = replace(
        config.durable,
        lease_timeout=max(config.durable.lease_timeout, longest),
        max_records=config.max_records or config.durable.max_records,
        max_bytes=config.byte_limit,
        overflow=config.overflow,
        block_timeout=config.block_timeout,
    )
    if config.ordering == "order":
        return replace(durable, order="key", key=_one_key)
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


def _one_key(payload: bytes) -> Hashable:  # noqa: ARG001 - all records have the same
    return None
