"""Names for the records of a directory that stay different where the directory is copied.

A record's idempotency key is a source and its sequence number. The source is the durable queue's id, until the
directory is found at another place than before (another inode, machine or start of the machine): a copy of it may be
in use elsewhere then, with records of its own under the same numbers. From there on new records have a new source,
while those that were in the queue keep theirs, so that repetitions are still known as such.
"""

from __future__ import annotations

import os
import uuid
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from batchqueue_async._support import log
from batchqueue_async._support.log import describe

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "sources.json"


class _Found(msgspec.Struct):
    """What the file has."""

    queue_id: str
    place: str
    sources: list[tuple[int, str]]


class Sources:
    """The sources of one directory: from which number on each of them counts."""

    def __init__(self, directory: Path, queue_id: str, next_seq: int) -> None:
        self._starts = [0]
        self._names = [queue_id]
        if not directory.is_dir():
            return
        path = directory / NAME
        here = _place(directory)
        before: _Found | None = None
        with suppress(OSError, msgspec.DecodeError):
            before = msgspec.json.decode(path.read_bytes(), type=_Found)
        if before is not None and before.queue_id == queue_id and before.sources:
            self._starts = [start for start, _ in before.sources]
            self._names = [name for _, name in before.sources]
            if before.place == here:
                return
            if next_seq > self._starts[-1]:
                self._starts.append(next_seq)
                self._names.append(uuid.uuid4().hex)
            else:
                self._names[-1] = uuid.uuid4().hex if next_seq else queue_id
        found = _Found(queue_id, here, list(zip(self._starts, self._names, strict=True)))
        try:
            _replace(path, msgspec.json.encode(found))
        except OSError as error:
            log.warning("sources_not_written", path=str(path), **describe(error))

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """The idempotency keys of the records with these numbers."""
        names = self._names
        if len(names) == 1:
            name = names[0]
            return [f"{name}/{number}" for number in numbers]
        starts = self._starts
        return [f"{names[bisect_right(starts, number) - 1]}/{number}" for number in numbers]


def _place(directory: Path) -> str:
    """Where the directory is: its inode, the machine, and its last start."""
    found = directory.stat()
    parts = [str(found.st_dev), str(found.st_ino)]
    for name in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with suppress(OSError):
            parts.append(Path(name).read_text().strip())
    return ":".join(parts)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
