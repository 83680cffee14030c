"""What a durable queue counts: the document's metrics, as one frozen snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchqueue_async.queue.stats import Distribution, Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchqueue_async.durable.state.queue_state import QueueState


@dataclass(slots=True)
class Counters:
    """The counts that only rise, kept by the queue; names as in `DurableStats`."""

    recovered: int = 0
    put: int = 0
    put_bytes: int = 0
    acked: int = 0
    dead_lettered: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    retries: int = 0
    retry_successes: int = 0
    retry_failures: Counter[str] = field(default_factory=Counter[str])
    expired_leases: int = 0
    disk_full: int = 0
    write_errors: int = 0
    syncs: int = 0
    sync_errors: int = 0
    rotations: int = 0
    hint_writes: int = 0
    damaged: int = 0
    unreadable: int = 0
    compactions: int = 0
    compacted_bytes: int = 0
    rounds: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    sync_seconds: Histogram = field(default_factory=Histogram)

    def took(self, seconds: Mapping[str, float], *, synced: int) -> None:
        """A round of the writer took so long, by its parts, with so many syncs."""
        for part, spent in seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + spent
        if synced:
            self.sync_seconds.record(seconds.get("sync", 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableStats:
    """A moment of a durable queue.

    At every instant `recovered + put == acked + dead_lettered + sum(dropped) + damaged + records`, where the sum leaves
    out `newest`: that was refused before it was written.

    Attributes:
        records: written and not yet settled: ready, leased, delayed, or held for their keys.
        ready: records that a lease can have now, in memory or on disk.
        leased: records out on a lease.
        delayed: records that wait for the delay of their `nack`.
        max_records: the quota, or None.
        disk_bytes: everything in the directory.
        max_bytes: the quota, or None.
        utilization: the fuller of the two quotas, 0 to 1; 0 without quotas.
        free_bytes: what the file system has left, when it was last asked.
        memory_blocks: frames in memory, ready to be leased.
        memory_bytes: what the records in memory take that nobody has leased.
        pending: records that wait to be written.
        segments: segment files.
        recovered: records found at the opening.
        put: records written since; put_bytes: their payload bytes.
        acked: records acknowledged.
        dead_lettered: records moved to the dead letters.
        dropped: records dropped, by reason: `oldest`, `newest`, `max_age`.
        retries: records given back by `nack` or by a lease that ended.
        retry_successes: records acknowledged after an earlier attempt.
        retry_failures: records given back or dead-lettered, by reason.
        expired_leases: leases that ended unsettled.
        disk_full: writes that met a full disk, and puts that met a quota in bytes or `min_free_bytes`.
        write_errors: writes that failed otherwise.
        syncs: fdatasyncs that succeeded; sync_errors: that failed.
        rotations: segments opened.
        hint_writes: acknowledgement writes.
        spilled: frames that left the memory for the disk, to be read again.
        damaged: records that could not be delivered because their bytes are wrong.
        unreadable: records that could not be read in this run; they stay on the disk for the next.
        compactions: segments written anew without their settled records; compacted_bytes: the room that this gave back.
        rounds: rounds of the writer.
        seconds: where the writer's time goes: `write`, `sync`, `hints`.
        sync_seconds: how long the syncs of a round took, of the rounds that had any.

    Example:
        >>> import asyncio, tempfile, batchqueue_async as bq
        >>> async def main(path: str) -> bq.DurableStats:
        ...     async with bq.DurableQueue.open(path) as queue:
        ...         await queue.put_many([b"one", b"two"])
        ...         return queue.stats()
        >>> with tempfile.TemporaryDirectory() as path:
        ...     stats = asyncio.run(main(path))
        >>> stats.records, stats.put_bytes
        (2, 6)
    """

    records: int
    ready: int
    leased: int
    delayed: int
    max_records: int | None
    disk_bytes: int
    max_bytes: int | None
    utilization: float
    free_bytes: int | None
    memory_blocks: int
    memory_bytes: int
    pending: int
    segments: int
    recovered: int
    put: int
    put_bytes: int
    acked: int
    dead_lettered: int
    dropped: Mapping[str, int]
    retries: int
    retry_successes: int
    retry_failures: Mapping[str, int]
    expired_leases: int
    disk_full: int
    write_errors: int
    syncs: int
    sync_errors: int
    rotations: int
    hint_writes: int
    spilled: int
    damaged: int
    unreadable: int
    compactions: int
    compacted_bytes: int
    rounds: int
    seconds: Mapping[str, float]
    sync_seconds: Distribution = field(default_factory=Distribution, repr=False)


def snapshot(state: QueueState) -> DurableStats:
    """The counts of a queue as they are now."""
    counters = state.counters
    config = state.config
    disk = state.room.used_bytes
    held = state.gate.blocked if state.gate is not None else 0
    records = state.room.records
    delayed = state.index.delayed
    shares = [0.0]
    if config.max_records is not None:
        shares.append(records / config.max_records)
    if config.max_bytes is not None:
        shares.append(disk / config.max_bytes)
    return DurableStats(
        records=records,
        ready=records - state.leased - delayed - held - counters.unreadable,
        leased=state.leased,
        delayed=delayed,
        max_records=config.max_records,
        disk_bytes=disk,
        max_bytes=config.max_bytes,
        utilization=max(shares),
        free_bytes=state.room.free_bytes,
        memory_blocks=len(state.backlog.window),
        memory_bytes=state.backlog.window_bytes + state.held_bytes,
        pending=state.pending.records,
        segments=len(state.segments),
        recovered=counters.recovered,
        put=counters.put,
        put_bytes=counters.put_bytes,
        acked=counters.acked,
        dead_lettered=counters.dead_lettered,
        dropped=dict(state.room.dropped()),
        retries=counters.retries,
        retry_successes=counters.retry_successes,
        retry_failures=dict(counters.retry_failures),
        expired_leases=counters.expired_leases,
        disk_full=counters.disk_full,
        write_errors=counters.write_errors,
        syncs=counters.syncs,
        sync_errors=counters.sync_errors,
        rotations=counters.rotations,
        hint_writes=counters.hint_writes,
        spilled=state.backlog.spilled,
        damaged=counters.damaged,
        unreadable=counters.unreadable,
        compactions=counters.compactions,
        compacted_bytes=counters.compacted_bytes,
        rounds=counters.rounds,
        seconds=dict(counters.seconds),
        sync_seconds=counters.sync_seconds.summary(),
    )
