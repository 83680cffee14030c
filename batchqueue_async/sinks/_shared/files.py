"""Files that only their owner may read, and names that are there whole or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from pathlib import Path

    from batchqueue_async.sinks.base import BatchKey

OWNER_FILE = 0o600
OWNER_DIRECTORY = 0o700


def open_append(path: Path) -> int:
    """A descriptor that appends to a file, which is made if there is none."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, OWNER_FILE)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data; the system may take it in parts."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def make_directory(path: Path) -> None:
    """Make a directory and those above it, each for its owner only; those that exist stay as they are."""
    missing: list[Path] = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(mode=OWNER_DIRECTORY, exist_ok=True)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Give a file new contents: a crash leaves the old ones or the new ones."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, OWNER_FILE)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.replace(path)
    sync_directory(path.parent)


def batch_name(key: BatchKey) -> str:
    """A batch's name as a file name."""
    return f"{quote(key.source, safe='')}-{key.number:08d}"
