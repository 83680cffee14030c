"""A queue on disk: confirmed means delivered at least once, through crashes, full disks and damaged files.

    put ── pump ── writer (thread) ── segments          format, segment, acklog: the bytes
                                         │              recovery: what a directory holds
    lease ── leasing ── backlog ── loader (thread)      state: every decision, without a loop

`docs/spec/durable-format.md` is the format, `docs/how-to/durable-queue.md` the guide.
"""

from __future__ import annotations

from batchqueue_async.durable.config import Compression, Durability, DurableConfig, Order, Overflow
from batchqueue_async.durable.dead_letters import DeadLetter
from batchqueue_async.durable.disk.recovery import RecoveryReport
from batchqueue_async.durable.queue import DurableQueue
from batchqueue_async.durable.stats import DurableStats
from batchqueue_async.leases.lease import Lease, Record

__all__ = [
    "Compression",
    "DeadLetter",
    "Durability",
    "DurableConfig",
    "DurableQueue",
    "DurableStats",
    "Lease",
    "Order",
    "Overflow",
    "Record",
    "RecoveryReport",
]
