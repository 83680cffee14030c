"""A queue on disk: confirmed means delivered at least once, through crashes, full disks and damaged files.

    put ── pump ── writer (thread) ── segments          format, segment, acklog: the bytes
                                         │              recovery: what a directory holds
    lease ── leasing ── backlog ── loader (thread)      state: every decision, without a loop

`docs/spec/durable-format.md` is the format, `docs/how-to/durable-queue.md` the guide.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchqueue_async.durable.config import Compression, Durability, DurableConfig, Order, Overflow
from batchqueue_async.leases.lease import Lease, Record

if TYPE_CHECKING:
    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.durable.disk.recovery import RecoveryReport
    from batchqueue_async.durable.queue import DurableQueue
    from batchqueue_async.durable.stats import DurableStats

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

# Imported when they are first asked for: the configuration can be read where the disk's system calls are missing.
_LATER = {
    "DeadLetter": "dead_letters",
    "DurableQueue": "queue",
    "DurableStats": "stats",
    "RecoveryReport": "disk.recovery",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
        globals()[name] = found
        return found
