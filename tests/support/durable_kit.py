"""What the durable queue's tests stand on.

A file system that records every call and can be crashed anywhere, faults, and a runner that does the I/O on the loop
itself, so that a run is the same each time.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.errors import LockedError

if TYPE_CHECKING:
    from random import Random

ROOT = Path("/queue")


@dataclass
class Op:
    """One recorded change. `node` is the file's data, which a rename does not change."""

    kind: str
    path: Path
    node: int = -1
    offset: int = 0
    data: bytes = b""
    other: Path | None = None


Fault = Callable[[str, Path], OSError | None]


@dataclass
class RecordingFiles:
    """`Files` in memory. Every change is an `Op` in `log`; `crashed` builds what a crash may have left."""

    log: list[Op] = field(default_factory=list)
    base: dict[Path, bytes] = field(default_factory=dict)
    fault: Fault | None = None
    capacity: int | None = None
    free: int = 1 << 40
    calls: list[tuple[str, Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes: dict[int, bytearray] = {}
        self.entries: dict[Path, int] = {}
        self.descriptors: dict[int, tuple[int, Path, str]] = {}
        self.locked: set[Path] = set()
        self.directories: set[Path] = {ROOT.parent}
        self._next = 3
        for path, data in self.base.items():
            self.nodes[self._node()] = bytearray(data)
            self.entries[path] = self._next - 1

    def _node(self) -> int:
        self._next += 1
        return self._next - 1

    def _check(self, call: str, path: Path) -> None:
        self.calls.append((call, path))
        error = self.fault(call, path) if self.fault is not None else None
        if error is not None:
            raise error

    def _record(self, *args: Any, **options: Any) -> None:
        self.log.append(Op(*args, **options))

    def used(self) -> int:
        return sum(len(self.nodes[node]) for node in self.entries.values())

    # Files

    def make_directory(self, path: Path) -> None:
        self._check("make_directory", path)
        self.directories.add(path)

    def names(self, path: Path) -> list[str]:
        self._check("names", path)
        found = {entry.name for entry in self.entries if entry.parent == path}
        return sorted(found | {entry.name for entry in self.directories if entry.parent == path and entry != path})

    def size(self, path: Path) -> int:
        self._check("size", path)
        if path in self.directories:
            return 0
        return len(self.nodes[self._found(path)])

    def _found(self, path: Path) -> int:
        if path not in self.entries:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return self.entries[path]

    def _opened(self, node: int, path: Path, mode: str) -> int:
        descriptor = self._node()
        self.descriptors[descriptor] = (node, path, mode)
        return descriptor

    def create(self, path: Path) -> int:
        self._check("create", path)
        if path in self.entries:
            raise FileExistsError(errno.EEXIST, "file exists", str(path))
        node = self._node()
        self.nodes[node] = bytearray()
        self.entries[path] = node
        self._record("create", path, node)
        return self._opened(node, path, "append")

    def open_append(self, path: Path) -> int:
        self._check("open_append", path)
        return self._opened(self._found(path), path, "append")

    def open_read(self, path: Path) -> int:
        self._check("open_read", path)
        if path in self.directories:
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        return self._opened(self._found(path), path, "read")

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        node, path, mode = self.descriptors[descriptor]
        assert mode == "append", "a write through a descriptor for reading"
        data = bytes(data)
        self._check("write", path)
        if self.capacity is not None:
            room = self.capacity - self.used()
            if room < len(data):
                if room <= 0:
                    raise OSError(errno.ENOSPC, "no space left on device", str(path))
                data = data[:room]
        self._record("write", path, node, len(self.nodes[node]), data)
        self.nodes[node] += data
        return len(data)

    def write_pieces(self, descriptor: int, pieces: Sequence[bytes]) -> int:
        return self.write(descriptor, b"".join(pieces))

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        node, path, mode = self.descriptors[descriptor]
        assert mode == "read", "a read through a descriptor for writing"
        self._check("read", path)
        return bytes(self.nodes[node][offset : offset + size])

    def sync(self, descriptor: int) -> None:
        node, path, _ = self.descriptors[descriptor]
        self._check("sync", path)
        self._record("sync", path, node)

    def sync_directory(self, path: Path) -> None:
        self._check("sync_directory", path)
        self._record("sync_directory", path)

    def truncate(self, path: Path, size: int) -> None:
        self._check("truncate", path)
        node = self._found(path)
        del self.nodes[node][size:]
        self._record("truncate", path, node, size)
        self._record("sync", path, node)

    def append(self, path: Path, data: bytes) -> None:
        self._check("append", path)
        node = self._found(path)
        self._record("write", path, node, len(self.nodes[node]), data)
        self.nodes[node] += data
        self._record("sync", path, node)

    def replace(self, path: Path, data: bytes) -> None:
        self._check("replace", path)
        if self.capacity is not None and self.used() + len(data) > self.capacity:
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        # As the real one does it: a crash in the middle leaves the temporary file.
        temporary = path.with_name(path.name + ".tmp")
        if temporary in self.entries:
            self._record("unlink", temporary, self.entries.pop(temporary))
        node = self._node()
        self._record("create", temporary, node)
        self._record("write", temporary, node, 0, data)
        self._record("sync", temporary, node)
        self.nodes[node] = bytearray(data)
        self.entries[path] = node
        self._record("rename", temporary, node, other=path)

    def rename(self, old: Path, new: Path) -> None:
        self._check("rename", old)
        node = self.entries.pop(old)
        self.entries[new] = node
        self._record("rename", old, node, other=new)

    def unlink(self, path: Path) -> None:
        self._check("unlink", path)
        if path in self.entries:
            self._record("unlink", path, self.entries.pop(path))

    def close(self, descriptor: int) -> None:
        if descriptor in self.descriptors:
            del self.descriptors[descriptor]
        else:
            self.locked.clear()

    def free_bytes(self, path: Path) -> int:
        self._check("free_bytes", path)
        return self.free if self.capacity is None else max(0, self.capacity - self.used())

    def linked(self, descriptor: int) -> bool:
        node, path, _ = self.descriptors[descriptor]
        return self.entries.get(path) == node

    def is_locked(self, lock: int, path: Path) -> bool:
        self._check("is_locked", path)
        return True

    def lock(self, path: Path) -> int:
        self._check("lock", path)
        if path in self.locked:
            raise LockedError(f"durable queue {path.parent}: owned by the other test")
        self.locked.add(path)
        return -5

    # Crashes

    def snapshot(self) -> RecordingFiles:
        """Everything as it is now, as after a kill of the process."""
        return self._fresh({path: bytes(self.nodes[node]) for path, node in self.entries.items()})

    def _fresh(self, content: dict[Path, bytes]) -> RecordingFiles:
        fresh = RecordingFiles(base=content)
        fresh.directories |= {path.parent for path in content}
        return fresh

    def killed(self, prefix: int, torn: float = 0.0) -> RecordingFiles:
        """As after a kill at the `prefix`-th change, with a part of that change done: all that was written is there."""
        return self._replay(prefix, torn, lambda _: True, lambda op: op.data)

    def lost_power(self, prefix: int, random: Random) -> RecordingFiles:
        """As after a loss of power there: each change that no sync covers is kept, lost or torn, in any combination."""
        durable = self._durable(prefix)
        decided: dict[int, bool] = {}

        def kept(index: int) -> bool:
            return durable[index] or decided.setdefault(index, random.random() < 0.5)

        def content(op: Op) -> bytes:
            if durable[self._index[id(op)]] or random.random() < 0.5:
                return op.data
            low, high = sorted((random.randint(0, len(op.data)), random.randint(0, len(op.data))))
            if random.random() < 0.5:
                return op.data[:low] + bytes(high - low) + op.data[high:]
            return bytes(low) + op.data[low:high] + bytes(len(op.data) - high)

        return self._replay(prefix, 0.0, kept, content)

    def all_unsynced_lost(self, prefix: int) -> RecordingFiles:
        """As after a loss of power that kept nothing but what was synced."""
        durable = self._durable(prefix)
        return self._replay(prefix, 0.0, lambda index: durable[index], lambda op: op.data)

    def _durable(self, prefix: int) -> list[bool]:
        self._index = {id(op): index for index, op in enumerate(self.log)}
        result = [False] * prefix
        waiting: dict[int | Path, list[int]] = {}
        for index, op in enumerate(self.log[:prefix]):
            if op.kind in ("sync", "sync_directory"):
                for earlier in waiting.pop(op.node if op.kind == "sync" else op.path, ()):
                    result[earlier] = True
            elif op.kind == "sync_failed":
                # The page cache has dropped what could not be written: no later sync makes it durable.
                waiting.pop(op.node, None)
            else:
                waiting.setdefault(op.node if op.kind in ("write", "truncate") else op.path.parent, []).append(index)
        return result

    def _replay(
        self, prefix: int, torn: float, kept: Callable[[int], bool], content: Callable[[Op], bytes]
    ) -> RecordingFiles:
        entries: dict[Path, int] = {}
        nodes: dict[int, bytearray] = {}
        for number, (path, data) in enumerate(self.base.items()):
            entries[path] = 3 + number
            nodes[3 + number] = bytearray(data)
        for index, op in enumerate(self.log[:prefix]):
            if kept(index):
                _apply(op, content(op), entries, nodes)
        if torn and prefix < len(self.log) and self.log[prefix].kind == "write":
            op = self.log[prefix]
            _apply(op, op.data[: int(len(op.data) * torn)], entries, nodes)
        return self._fresh({path: bytes(nodes.get(node, b"")) for path, node in entries.items()})


def _apply(op: Op, data: bytes, entries: dict[Path, int], nodes: dict[int, bytearray]) -> None:
    node = nodes.setdefault(op.node, bytearray())
    if op.kind == "create":
        entries[op.path] = op.node
    elif op.kind == "write":
        if len(node) < op.offset:
            node.extend(bytes(op.offset - len(node)))
        node[op.offset : op.offset + len(data)] = data
    elif op.kind == "truncate":
        if len(node) > op.offset:
            del node[op.offset :]
        else:
            node.extend(bytes(op.offset - len(node)))
    elif op.kind == "rename" and op.other is not None:
        entries.pop(op.path, None)
        entries[op.other] = op.node
    elif op.kind == "unlink" and entries.get(op.path) == op.node:
        del entries[op.path]


class InlineRunner:
    """Does each call at once and gives its result on the loop's next turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop

    def submit(
        self, call: Callable[..., Any], *arguments: Any, done: Callable[[Any, BaseException | None], None]
    ) -> None:
        result, error = None, None
        try:
            result = call(*arguments)
        except BaseException as raised:
            error = raised
        self._loop.call_soon(done, result, error)

    def stop(self) -> None:
        pass

    def join(self) -> None:
        pass


class GatedRunner(InlineRunner):
    """Holds calls back while `shut` is set, so that a test decides what the writer has and what waits for it."""

    shut = False
    held: ClassVar[list[Callable[[], None]]] = []

    def submit(
        self, call: Callable[..., Any], *arguments: Any, done: Callable[[Any, BaseException | None], None]
    ) -> None:
        if type(self).shut:
            type(self).held.append(lambda: InlineRunner.submit(self, call, *arguments, done=done))
        else:
            super().submit(call, *arguments, done=done)


def opened(files: RecordingFiles | None = None, path: Path = ROOT, **options: Any) -> DurableQueue:
    """A queue on a recording file system, with its I/O on the loop."""
    config = DurableConfig(**options)
    return DurableQueue.open(path, config, files=files or RecordingFiles(), runner=InlineRunner)


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("seg-*.bqs"))


def flip(path: Path, at: int, mask: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


async def drain(queue: DurableQueue, *, ack: bool = False, most: int = 1_000) -> dict[int, bytes]:
    """Everything that can be leased now, by sequence number; left leased unless acknowledged."""
    found: dict[int, bytes] = {}
    while lease := await queue.lease(most, wait=0):
        for record in lease.records:
            assert record.seq not in found, "delivered twice without a reason"
            found[record.seq] = record.payload
        if ack:
            await lease.ack()
    return found


async def eventually(condition: Callable[[], object]) -> None:
    """Return when `condition` holds: for what a timer or a thread of the queue does by itself."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def io_error(number: int = errno.EIO) -> OSError:
    return OSError(number, os.strerror(number))


class OneFailure:
    """The next sync fails, and no other: what it should have made durable has to go to another file."""

    def __init__(self) -> None:
        self.done = False

    def __call__(self, call: str, _path: Path) -> OSError | None:
        if call != "sync" or self.done:
            return None
        self.done = True
        return io_error()
