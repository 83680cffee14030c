"""How a durable queue is tuned: one frozen dataclass, checked before anything is opened."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from batchqueue_async.durable.disk import compression as codecs
from batchqueue_async.durable.disk.format import DATA_START, FOOTER, MAX_FRAME, frame_size
from batchqueue_async.durable.state.frame import ALWAYS, INTERVAL, OS
from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Durability = Literal["always", "interval", "os"]
Order = Literal["fifo", "freshest", "key"]
Overflow = Literal["block", "reject", "drop_oldest", "drop_newest"]
Compression = Literal["none", "lz4", "snappy", "zstd"]

RANKS: dict[str, int] = {"always": ALWAYS, "interval": INTERVAL, "os": OS}
_KIB = 1 << 10
_MIB = 1 << 20
# Share of `max_bytes` kept free for acknowledgements, which must never be refused for want of room.
_RESERVE = 16
LEAST_BYTES = 4 * _KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig:
    """How a durable queue behaves.

    Attributes:
        durability: when `put` returns. `always`: after an fdatasync that covers it (one for all that wait);
            `interval`: after the write, and a timer syncs at least every `sync_interval`; `os`: after the write, so it
            survives a crash of the process but maybe not of the machine. Each put can ask for another level.
        sync_interval: seconds between the syncs of `interval`.
        stale_flush: seconds without a put after which `os` records are synced as well; None leaves that to the system.
        order: `fifo`; `freshest` (newest first); `key` (fifo, and a record waits while an earlier one with its key is
            leased or delayed).
        key: for `order="key"`: from a payload to its key.
        key_lookahead: how many records may be held back for their keys before leasing waits.
        segment_bytes: a segment is sealed at this size (the document's chunk size); smaller under a small `max_bytes`.
        memory_bytes: payload bytes kept in memory between `put` and `lease`; the rest is read from the disk again.
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

    Example:
        >>> DurableConfig(max_bytes=1 << 30, overflow="drop_oldest").durability
        'always'
    """

    durability: Durability = "always"
    sync_interval: float = 1.0
    stale_flush: float | None = 30.0
    order: Order = "fifo"
    key: Callable[[bytes], Hashable] | None = None
    key_lookahead: int = 10_000
    segment_bytes: int = 64 * _MIB
    memory_bytes: int = 64 * _MIB
    memory_blocks: int = 8_192
    write_buffer: int = 256 * _KIB
    compression: Compression = "none"
    max_record: int = 16 * _MIB
    max_bytes: int | None = None
    max_records: int | None = None
    max_age: float | None = None
    min_free_bytes: int = 0
    overflow: Overflow = "block"
    block_timeout: float | None = None
    lease_timeout: float = 300.0

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, choices in (("durability", Durability), ("order", Order), ("overflow", Overflow)):
            if getattr(self, name) not in get_args(choices):
                raise _wrong(name, getattr(self, name), f"unknown; choose one of {', '.join(get_args(choices))}")
        if (self.order == "key") != (self.key is not None):
            raise _wrong("key", self.key, f"not for order={self.order!r}; give a function with order='key' alone")
        codecs.require(self.compression)

    def _check_numbers(self) -> None:
        for name in ("segment_bytes", "memory_bytes", "memory_blocks", "write_buffer", "max_record", "key_lookahead"):
            _whole(name, getattr(self, name), 1)
        _whole("min_free_bytes", self.min_free_bytes, 0)
        for name in ("max_bytes", "max_records"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        for name in ("sync_interval", "lease_timeout"):
            _seconds(name, getattr(self, name), above=True)
        for name in ("stale_flush", "max_age", "block_timeout"):
            if getattr(self, name) is not None:
                _seconds(name, getattr(self, name), above=name != "block_timeout")
        if frame_size(1, self.max_record) > MAX_FRAME:
            raise _wrong(
                "max_record", self.max_record, f"above {MAX_FRAME // 2}, half of the largest frame; store a reference"
            )
        if self.max_bytes is not None and self.max_bytes < LEAST_BYTES:
            raise _wrong(
                "max_bytes", self.max_bytes, f"below {LEAST_BYTES}, too small for the queue's own files; raise it"
            )

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
        for name, value in (("share", share), ("limit_ratio", limit_ratio)):
            if not 0 < value <= 1:
                raise _wrong(name, value, "outside (0, 1]; give e.g. 0.10")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(options) - known):
            raise _wrong("options", unknown, f"no fields of it; choose among {', '.join(sorted(known))}")
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


def _wrong(name: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"DurableConfig: {name}={value!r} is {rule}")


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(name, value, f"not a whole number of {least} or more; raise it")


def _seconds(name: str, value: object, *, above: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (above and value == 0):  # type: ignore[operator]  # it is a number by then
        raise _wrong(name, value, "not a number of seconds above 0; raise it")
