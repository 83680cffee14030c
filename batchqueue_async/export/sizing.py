"""The sizing formula: how fast a backlog drains, how long that takes, and what an outage needs. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchqueue_async._support.checks import Real, faults_of, refuse
from batchqueue_async.durable.config import memory_limit
from batchqueue_async.export.send_queue.weight import OVERHEAD

DISK_OVERHEAD = 16
"""Bytes of the header and index that a record on disk takes, in frames of several."""
DISK_RESERVE = 16 / 15
"""The share of the directory that is kept free for acknowledgements, as a factor."""
DISK_SPARE = 2 << 20
"""Bytes for what is not a record: the end of a segment that waits to be deleted, and acknowledgements."""

_MOST = 1e18
_ABOVE = Real(most=_MOST)
_LEAST = Real(above=False, most=_MOST)
_SHARE = Real(most=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """How a backlog goes down.

    Attributes:
        batches_per_second: what the workers send: workers / latency.
        records_per_second: the same in records.
        seconds: until the backlog is gone while new records keep coming; infinite where they come faster.
    """

    batches_per_second: float
    records_per_second: float
    seconds: float


def drain(*, workers: int, latency: float, backlog: float, batch_records: int = 1, arrival: float = 0.0) -> Drain:
    """How fast a backlog drains, and how long that takes.

    The sizing formula: drain rate = workers / latency, drain time = backlog / drain rate.

    Args:
        workers: batches under way at once.
        latency: seconds that one takes.
        backlog: records that wait.
        batch_records: records of a batch.
        arrival: records that come in meanwhile, per second.

    Example:
        >>> drain(workers=8, latency=0.05, backlog=10_000)
        Drain(batches_per_second=160.0, records_per_second=160.0, seconds=62.5)
    """
    _check(_ABOVE, workers=workers, latency=latency, batch_records=batch_records)
    _check(_LEAST, backlog=backlog, arrival=arrival)
    batches = workers / latency
    records = batches * batch_records
    net = records - arrival
    seconds = 0.0 if not backlog else backlog / net if net > 0 else math.inf
    return Drain(batches_per_second=batches, records_per_second=records, seconds=seconds)


def workers_for(*, rate: float, latency: float, batch_records: int = 1) -> int:
    """The fewest workers that send so many records per second.

    Example:
        >>> workers_for(rate=10_000, latency=0.05, batch_records=500)
        1
    """
    _check(_ABOVE, rate=rate, latency=latency, batch_records=batch_records)
    # 0.15 / 0.05 is 2.9999999999999996 in binary, and 0.3 / 0.1 is 3: noise must not buy a worker, nor cost one.
    return max(1, math.ceil(round(rate * latency / batch_records, 9)))


def bytes_for_outage(*, arrival: float, record_bytes: float, outage: float, on_disk: bool = False) -> int:
    """The bytes that a send queue needs to keep everything through an outage of so many seconds.

    With what each record takes besides its own: in memory its place in the queue's lists, on disk its share of a frame
    and of the file that is written at the time.

    Args:
        arrival: records that come in, per second.
        record_bytes: bytes of a record: in memory as Python has it, on disk as it is encoded.
        outage: seconds.
        on_disk: whether the send queue has a path.

    Example:
        >>> bytes_for_outage(arrival=1_000, record_bytes=1_024, outage=3_600)
        3916800000
    """
    _check(_LEAST, arrival=arrival, record_bytes=record_bytes, outage=outage)
    each = record_bytes + (DISK_OVERHEAD if on_disk else OVERHEAD)
    spare = DISK_SPARE if on_disk else 0
    need = math.ceil(arrival * outage) * math.ceil(each) + spare
    return math.ceil(need * DISK_RESERVE) if on_disk else need


def memory_share(share: float, *, limit: int | None = None, limit_ratio: float = 0.85) -> int:
    """A share of what the process may use, in bytes.

    Args:
        share: the part of the usable memory.
        limit: the memory limit in bytes; the control group's, or the machine's memory, when None.
        limit_ratio: the part of the limit that counts as usable.

    Example:
        >>> memory_share(0.10, limit=1_000_000_000)
        85000000
    """
    _check(_SHARE, share=share, limit_ratio=limit_ratio)
    return max(1, int((memory_limit() if limit is None else limit) * limit_ratio * share))


def _check(rule: Real, **values: float) -> None:
    refuse(fault for name, value in values.items() for fault in faults_of("sizing", name, value, rule))
