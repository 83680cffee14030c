"""The file-system seam: every call that the durable queue makes of the operating system, and nothing clever.

Production code uses `OsFiles`. The tests put a recording file system in its place, which replays every crash, and
one that fails any call with any error.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from batchqueue_async.errors import LockedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

# What every POSIX system in use takes in one call; it is IOV_MAX there.
_PIECES = 1024
_LOCK_TRIES = 4
_LOCK_PAUSE = 0.005
_BUSY = frozenset({errno.EAGAIN, errno.EACCES})
_locks: set[int] = set()
"""The descriptors of all locks that this process holds."""

_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_COMMON = _CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
# What opening a directory, a pipe or a device under a file's name is answered with, as for a link.
NO_FILE = errno.ELOOP


class Files(Protocol):
    """What the durable queue asks of a file system; `path` is always inside the queue's directory."""

    def make_directory(self, path: Path) -> None:
        """Create the directory, private to the user, unless it is there."""
        ...

    def names(self, path: Path) -> list[str]:
        """The names in a directory; empty when there is none."""
        ...

    def size(self, path: Path) -> int:
        """The size of a file."""
        ...

    def create(self, path: Path) -> int:
        """A new file to append to; fails when the name is taken."""
        ...

    def open_read(self, path: Path) -> int:
        """A descriptor to read from."""
        ...

    def open_append(self, path: Path) -> int:
        """A descriptor to append to an existing file."""
        ...

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        """Append some of `data`; how many bytes."""
        ...

    def write_pieces(self, descriptor: int, pieces: Sequence[bytes]) -> int:
        """Append some of the pieces, as one write of them all; how many bytes."""
        ...

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file."""
        ...

    def sync(self, descriptor: int) -> None:
        """Make the file's data durable."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the creations and deletions in a directory durable."""
        ...

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file, by a descriptor of its own, and make that durable."""
        ...

    def append(self, path: Path, data: bytes) -> None:
        """Append to a file by a descriptor of its own, and make that durable."""
        ...

    def replace(self, path: Path, data: bytes) -> None:
        """Write the whole file anew: both the old and the new content survive a crash whole."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Move a file."""
        ...

    def unlink(self, path: Path) -> None:
        """Delete a file, if it is there."""
        ...

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        ...

    def free_bytes(self, path: Path) -> int:
        """What an unprivileged user can still write on this file system."""
        ...

    def linked(self, descriptor: int) -> bool:
        """Whether an open file still has its name: one that was deleted under its owner keeps nothing."""
        ...

    def is_locked(self, lock: int, path: Path) -> bool:
        """Whether the directory at this path is the one of this lock, and not another under its name."""
        ...

    def lock(self, path: Path) -> int:
        """Take the directory's lock or raise `LockedError` naming its holder; a descriptor to close.

        `path` is the note beside it that names the holder: it decides nothing, and its loss admits nobody.
        """
        ...


class OsFiles:
    """The real file system."""

    def make_directory(self, path: Path) -> None:
        """Create the directory, mode 0700, and its parents; each new name is durable before this returns."""
        missing = [path]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for place in reversed(missing):
            if place.is_dir():
                continue
            place.mkdir(mode=DIRECTORY_MODE if place == path else 0o777, exist_ok=True)
            with suppress(PermissionError):
                # A parent that may be searched and not read can't be synced by this user.
                self.sync_directory(place.parent)

    def names(self, path: Path) -> list[str]:
        """The names in a directory; empty when there is none."""
        try:
            return [entry.name for entry in path.iterdir()]
        except FileNotFoundError:
            return []

    def size(self, path: Path) -> int:
        """The size of a file, without following a link."""
        return path.stat(follow_symlinks=False).st_size

    def create(self, path: Path) -> int:
        """A new file, mode 0600, to append to."""
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | _COMMON, FILE_MODE)

    def open_append(self, path: Path) -> int:
        """A descriptor to append to an existing file."""
        return os.open(path, os.O_WRONLY | os.O_APPEND | _COMMON)

    def open_read(self, path: Path) -> int:
        """A descriptor to read from; anything but a regular file is refused, and never waited for."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _COMMON)
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except BaseException:
            os.close(descriptor)
            raise
        if not regular:
            os.close(descriptor)
            raise OSError(NO_FILE, "is not a regular file", str(path))
        return descriptor

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        """Append some of `data`."""
        return os.write(descriptor, data)

    def write_pieces(self, descriptor: int, pieces: Sequence[bytes]) -> int:
        """`writev`: nothing is copied before the kernel does it."""
        if len(pieces) <= _PIECES:
            return os.writev(descriptor, pieces)
        return os.write(descriptor, b"".join(pieces))

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset`, whatever the operating system's limit for one call is."""
        data = os.pread(descriptor, size, offset)
        if len(data) == size or not data:
            return data
        parts = [data]
        while (missing := size - sum(map(len, parts))) and (
            more := os.pread(descriptor, missing, offset + size - missing)
        ):
            parts.append(more)
        return b"".join(parts)

    def sync(self, descriptor: int) -> None:
        """`fdatasync` where there is one."""
        getattr(os, "fdatasync", os.fsync)(descriptor)

    def sync_directory(self, path: Path) -> None:
        """`fsync` of the directory."""
        # Following links: the queue's own directory may be one.
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def truncate(self, path: Path, size: int) -> None:
        """Cut and `fsync`, through a fresh descriptor."""
        with self._opened(path, os.O_WRONLY) as descriptor:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)

    def append(self, path: Path, data: bytes) -> None:
        """Append and `fsync`, through a fresh descriptor."""
        with self._opened(path, os.O_WRONLY | os.O_APPEND) as descriptor:
            self._write_all(descriptor, data)
            os.fsync(descriptor)

    def replace(self, path: Path, data: bytes) -> None:
        """A temporary file, `fsync`, and a rename over the old one."""
        temporary = path.with_name(path.name + ".tmp")
        self.unlink(temporary)
        try:
            with self._opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                self._write_all(descriptor, data)
                os.fsync(descriptor)
            temporary.rename(path)
        except OSError:
            self.unlink(temporary)
            raise

    def rename(self, old: Path, new: Path) -> None:
        """Move a file."""
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Delete a file, if it is there."""
        path.unlink(missing_ok=True)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        _locks.discard(descriptor)
        os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        """`f_bavail` of the file system."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def linked(self, descriptor: int) -> bool:
        """By the number of its names."""
        return os.fstat(descriptor).st_nlink > 0

    def is_locked(self, lock: int, path: Path) -> bool:
        """By the number of its inode."""
        try:
            there = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        here = os.fstat(lock)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def lock(self, path: Path) -> int:
        """`flock` on the directory: between processes, and between two queues of one process as well."""
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | _CLOEXEC)
        try:
            _take(descriptor)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _BUSY:
                raise
            raise LockedError(
                f"durable queue {path.parent}: owned by {_note(path) or 'an owner that left no name'}; close that one "
                "first, set lock_timeout to wait for it, or open another directory"
            ) from error
        _locks.add(descriptor)
        try:
            self.unlink(path)
            with self._opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as note:
                self._write_all(note, _holder().encode())
        except OSError as error:
            # A full disk can't keep an owner from its own queue: the lock is flock's, the note is for people. But where
            # no file can be made for another reason, there is no queue to be had.
            if error.errno not in NO_ROOM:
                self.close(descriptor)
                raise
        return descriptor

    @staticmethod
    def _opened(path: Path, flags: int) -> _Descriptor:
        return _Descriptor(os.open(path, flags | _COMMON, FILE_MODE))

    @staticmethod
    def _write_all(descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]


class _Descriptor:
    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> int:
        return self._number

    def __exit__(self, *_: object) -> None:
        os.close(self._number)


def _take(descriptor: int) -> None:
    # An inspecting command holds the lock for some microseconds while it asks who does: that is no owner.
    for _ in range(_LOCK_TRIES - 1):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_PAUSE)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder() -> str:
    return json.dumps(
        {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
    )


def held(path: Path) -> str | None:
    """Who holds the lock of the directory in which the note `path` is, or None; for the inspecting commands.

    The probe asks for a shared lock and gives it back at once, so it never keeps an owner out for longer than that.
    """
    try:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | _CLOEXEC)
    except OSError:
        return None
    with _Descriptor(descriptor):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _note(path) or "unknown"
        return None


def _note(path: Path) -> str:
    with suppress(OSError), _Descriptor(os.open(path, os.O_RDONLY | os.O_NONBLOCK | _COMMON)) as descriptor:
        return os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
    return ""


def _after_fork() -> None:
    # A lock lives as long as any descriptor of it: a child must not keep it beyond the end of the owner, its parent.
    for descriptor in list(_locks):
        with suppress(OSError):
            os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork)
