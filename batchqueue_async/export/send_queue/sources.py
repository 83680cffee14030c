"""Names for the records of a directory that stay different where the directory is copied.

A record's idempotency key is a source and its sequence number. The source is the durable queue's id, until something
says that the same numbers may be given elsewhere, or were given before: from there on new records have a new source,
while those that were in the queue keep theirs, so that repetitions are still known as such. What says so:

- the directory, or the file that names the queue, is another one than before (its inode, the time of its last change,
  the machine, or its last start): it was copied, or restored in its place from a backup, whose numbers were given out
  once already;
- the clock of the day has jumped against the one that only counts: the machine itself may have been copied while it
  ran, or set back to a snapshot.

A new source too many costs a few bytes; one too few costs records.
"""

from __future__ import annotations

import os
import time
import uuid
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from batchqueue_async._support import log
from batchqueue_async._support.log import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAME = "sources.json"
_IDENTITY = "queue.id"
# Seconds: more than a clock that is kept in step is moved at once.
_JUMP = 1.0


class _Found(msgspec.Struct):
    """What the file has."""

    queue_id: str
    place: str
    sources: list[tuple[int, str]]


def _clocks() -> float:
    """How far the clock of the day is from the one that only counts: the same as long as nothing sets it."""
    return time.time() - time.monotonic()


class Sources:
    """The sources of one directory: from which number on each of them counts."""

    def __init__(
        self,
        directory: Path,
        queue_id: str,
        next_seq: int,
        *,
        oldest: int | None = None,
        clocks: Callable[[], float] = _clocks,
    ) -> None:
        self._directory = directory
        self._queue_id = queue_id
        self._clocks = clocks
        self._difference = clocks()
        self._starts = [0]
        self._names = [queue_id]
        if not directory.is_dir():
            return
        before: _Found | None = None
        with suppress(OSError, msgspec.DecodeError):
            before = msgspec.json.decode((directory / NAME).read_bytes(), type=_Found)
        if before is not None and before.queue_id == queue_id and before.sources:
            self._starts = [start for start, _ in before.sources]
            self._names = [name for _, name in before.sources]
            if before.place == _place(directory):
                return
            self._begin(next_seq, oldest)
        self._write()

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """The idempotency keys of the records with these numbers."""
        names = self._names
        if len(names) == 1:
            name = names[0]
            return [f"{name}/{number}" for number in numbers]
        starts = self._starts
        return [f"{names[bisect_right(starts, number) - 1]}/{number}" for number in numbers]

    @property
    def doubtful(self) -> bool:
        """Whether the machine may not be the only one any more that gives out numbers here; asked before each put."""
        now = self._clocks()
        jump, self._difference = now - self._difference, now
        return abs(jump) > _JUMP

    def renew(self, next_seq: int, oldest: int | None) -> None:
        """Give records from this number on a source of their own."""
        if self._directory.is_dir():
            self._begin(next_seq, oldest)
            self._write()

    def _begin(self, next_seq: int, oldest: int | None) -> None:
        """From this number on records have a source of their own."""
        if next_seq > self._starts[-1]:
            self._starts.append(next_seq)
            self._names.append(uuid.uuid4().hex)
        else:
            # Nothing has been given a number yet since the last one began.
            self._names[-1] = uuid.uuid4().hex if next_seq else self._queue_id
        # What is settled is asked for no more.
        needed = bisect_right(self._starts, next_seq if oldest is None else oldest) - 1
        del self._starts[:needed], self._names[:needed]

    def _write(self) -> None:
        found = _Found(self._queue_id, _place(self._directory), list(zip(self._starts, self._names, strict=True)))
        try:
            _replace(self._directory / NAME, msgspec.json.encode(found))
        except OSError as error:
            log.warning("sources_not_written", path=str(self._directory / NAME), **describe(error))


def _place(directory: Path) -> str:
    """Where the directory is, and since when: inodes, the machine, and its last start."""
    parts: list[str] = []
    with suppress(OSError):
        found = directory.stat()
        parts += [str(found.st_dev), str(found.st_ino)]
    with suppress(OSError):
        found = (directory / _IDENTITY).stat()
        # Nobody writes to it again; a copy in its place can have all of its times but this one.
        parts += [str(found.st_ino), str(found.st_ctime_ns)]
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
