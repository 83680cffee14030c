"""How a durable queue is tuned: one frozen dataclass, checked before anything is opened."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from batchqueue_async._support.checks import (
    Bytes,
    Checkup,
    Choice,
    Duration,
    Function,
    OptionalDuration,
    OptionalSize,
    Real,
    Rule,
    Seconds,
    Size,
    Whole,
    default,
    named_fields,
    require,
    settle,
)
from batchqueue_async.durable.disk import compression as codecs
from batchqueue_async.durable.disk.format import DATA_START, FOOTER, MAX_PUT
from batchqueue_async.durable.state.frame import ALWAYS, INTERVAL, OS
from batchqueue_async.policies import OVERFLOWS, Overflow

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Durability = Literal["always", "interval", "os"]
Order = Literal["fifo", "freshest", "key"]
Compression = Literal["none", "lz4", "snappy", "zstd"]

__all__ = ["Compression", "Durability", "DurableConfig", "Order", "Overflow", "memory_limit"]

RANKS: dict[str, int] = {"always": ALWAYS, "interval": INTERVAL, "os": OS}
_KIB = 1 << 10
_MIB = 1 << 20
# Share of `max_bytes` kept free for acknowledgements, which must never be refused for want of room.
_RESERVE = 16
LEAST_BYTES = 4 * _KIB


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig:
    """How a durable queue behaves.

    Attributes:
        durability: when `put` returns. `always`: after an fdatasync that covers it (one for all that wait);
            `interval`: after the write, and a timer syncs at least every `sync_interval`; `os`: after the write, so it
            survives a crash of the process but maybe not of the machine. Each put can ask for another level.
        sync_interval: seconds between the syncs of `interval`, and of acknowledgements.
        stale_flush: seconds without a put after which `os` records are synced as well; None leaves that to the system.
        order: `fifo`; `freshest` (newest first); `key` (fifo, and a record waits while an earlier one with its key is
            leased or delayed).
        key: for `order="key"`: from a payload to its key. The keys of leased, delayed and held records are in memory;
            those of leased and delayed ones take a quarter of `memory_bytes`, and then leasing waits.
        key_lookahead: how many records may be held back for their keys before leasing waits.
        segment_bytes: a segment is sealed at this size (the document's chunk size); smaller under a small `max_bytes`.
        memory_bytes: payload bytes kept in memory between `put` and `lease`; the rest is read from the disk again. A
            lease keeps its own payloads beside that, as long as the consumer keeps the lease.
        memory_blocks: frames kept in memory, likewise (the document's in-memory blocks).
        write_buffer: puts that wait together are written as frames and calls of about this size.
        compression: of each frame; `none`, `lz4`, `snappy` or `zstd`, the last three by `batchqueue-async[durable]`.
        max_record: the largest payload, in bytes.
        max_bytes: everything in the directory; None is only limited by the disk.
        max_records: records that wait or are leased.
        max_age: seconds after which a record that isn't leased is dropped.
        min_free_bytes: what to leave free on the file system.
        overflow: what a put does when there is no room: `block`, `reject` (DiskFullError), `drop_oldest` (never a
            leased record), `drop_newest` (the put itself: it returns -1, or an empty range).
        block_timeout: seconds that `block` waits before it raises DiskFullError; None waits.
        lease_timeout: seconds after which an unsettled lease ends and its records are delivered again.
        max_attempts: a record that was leased this many times and comes back goes to the dead letters; None never
            gives up. Attempts are on the disk before a lease is given out, so those count that end with the process.
        lock_timeout: seconds to wait for another owner of the directory at the opening.
        dead_letter_bytes: the most that dead letters take; the oldest are dropped. None: as much as there are.
        dead_letter_age: seconds after which a dead letter is dropped; None keeps it.

    Example:
        >>> DurableConfig(max_bytes=1 << 30, overflow="drop_oldest").durability
        'always'
    """

    durability: Durability = "always"
    sync_interval: Duration = default(1.0)
    stale_flush: OptionalDuration = default(30.0)
    order: Order = "fifo"
    key: Callable[[bytes], Hashable] | None = None
    key_lookahead: int = 10_000
    segment_bytes: Size = default(64 * _MIB)
    memory_bytes: Size = default(64 * _MIB)
    memory_blocks: int = 8_192
    write_buffer: Size = default(256 * _KIB)
    compression: Compression = "none"
    max_record: Size = default(16 * _MIB)
    max_bytes: OptionalSize = default(None)
    max_records: int | None = None
    max_age: OptionalDuration = default(None)
    min_free_bytes: Size = default(0)
    overflow: Overflow = "block"
    block_timeout: OptionalDuration = default(None)
    lease_timeout: Duration = default(300.0)
    max_attempts: int | None = None
    lock_timeout: Duration = default(0.0)
    dead_letter_bytes: OptionalSize = default(None)
    dead_letter_age: OptionalDuration = default(None)

    def __post_init__(self) -> None:
        settle(self, DURABLE_RULES)
        check = Checkup("DurableConfig", self, DURABLE_RULES)
        if check.sound("order", "key") and (self.order == "key") != (self.key is not None):
            rule = f"does not go with order={self.order!r}"
            check.fault("key", rule, "give a function with order='key' alone", besides=("order",))
        if check.sound("max_record") and self.max_record > MAX_PUT:
            check.fault("max_record", f"is above {MAX_PUT}, the largest put", "store a reference")
        check.finish()
        codecs.require(self.compression)

    @property
    def usable_bytes(self) -> float:
        """The bytes on disk above which puts overflow: `max_bytes` less a reserve, or infinity."""
        if self.max_bytes is None:
            return math.inf
        return self.max_bytes - self.max_bytes // _RESERVE - 4 * (DATA_START + FOOTER)

    @property
    def rotate_bytes(self) -> int:
        """The size at which segments are sealed: small enough that `max_bytes` holds several."""
        if self.max_bytes is None:
            return self.segment_bytes
        return max(_KIB, min(self.segment_bytes, self.max_bytes // _RESERVE))

    @classmethod
    def for_memory(
        cls, share: float = 0.10, *, limit: int | None = None, limit_ratio: float = 0.85, **options: Any
    ) -> DurableConfig:
        """A configuration whose memory window is a share of what the process may use.

        Args:
            share: the part of the usable memory for `memory_bytes`.
            limit: the memory limit in bytes; by default the control group's, or the machine's memory.
            limit_ratio: the part of the limit that counts as usable.
            options: the other fields.

        Example:
            >>> DurableConfig.for_memory(0.10, limit=1_000_000_000).memory_bytes
            85000000
        """
        require("DurableConfig", "share", share, Real(most=1.0))
        require("DurableConfig", "limit_ratio", limit_ratio, Real(most=1.0))
        usable = (memory_limit() if limit is None else limit) * limit_ratio
        return cls(memory_bytes=max(1, int(usable * share)), **options)


def memory_limit() -> int:
    """The control group's memory limit where there is one, else the machine's memory, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            # "max", or no such file: no limit from there.
            total = min(total, int(Path(path).read_text(encoding="ascii")))
    return total


DURABLE_RULES: dict[str, Rule] = {
    "durability": Choice(words=get_args(Durability)),
    "sync_interval": Seconds(),
    "stale_flush": Seconds(optional=True),
    "order": Choice(words=get_args(Order)),
    "key": Function(parameters=("payload",), may_be_class=True, optional=True),
    "key_lookahead": Whole(),
    "segment_bytes": Bytes(),
    "memory_bytes": Bytes(),
    "memory_blocks": Whole(),
    "write_buffer": Bytes(),
    "compression": Choice(words=get_args(Compression)),
    "max_record": Bytes(),
    "max_bytes": Bytes(least=LEAST_BYTES, optional=True),
    "max_records": Whole(optional=True),
    "max_age": Seconds(optional=True),
    "min_free_bytes": Bytes(least=0),
    "overflow": Choice(words=OVERFLOWS),
    "block_timeout": Seconds(above=False, optional=True),
    "lease_timeout": Seconds(),
    "max_attempts": Whole(optional=True),
    "lock_timeout": Seconds(above=False),
    "dead_letter_bytes": Bytes(least=LEAST_BYTES, optional=True),
    "dead_letter_age": Seconds(optional=True),
}
