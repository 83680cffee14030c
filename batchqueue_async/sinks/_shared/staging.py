"""A directory in which many processes stage the parts of batches, out of the reach of tasks that should have ended.

A task that was killed, or lost against its speculative copy, may still write: a zombie. So who publishes first takes
the staged directory away, to a name that no task knows, and only then looks what is in it. A zombie that comes later
makes a new directory, which is never published, and goes with a later batch::

    <root>/<source>-<batch>/<part>-<attempt>.<suffix>    being written
    <root>/.taken-<source>-<batch>/...                   being published
    <root>/.abandoned-<source>-<batch>                   never comes again: its tasks clean up after themselves
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from batchqueue_async._support import log
from batchqueue_async.sinks._shared.files import batch_name, make_directory
from batchqueue_async.sinks.base import BatchKey, StagedPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from batchqueue_async.sinks.base import Attempt

OLD = 7 * 24 * 3600.0
"""Seconds without a change after which what is staged belongs to nobody."""

_TAKEN, _ABANDONED = ".taken-", ".abandoned-"


class Staging:
    """The staged parts of one destination: one directory for each batch, in it one file for each attempt."""

    def __init__(self, root: Path, suffix: str) -> None:
        self.root = root
        self.suffix = suffix

    # -- for a task ----------------------------------------------------------------------------------------------

    def directory(self, key: BatchKey) -> Path:
        """Where the attempts of a batch are."""
        return self.root / batch_name(key)

    def file(self, attempt: Attempt) -> Path:
        """Where an attempt is; makes its directory."""
        make_directory(self.directory(attempt.key))
        return self.path(attempt)

    def path(self, attempt: Attempt) -> Path:
        """Where an attempt is."""
        return self.directory(attempt.key) / f"{attempt.part:06d}-{quote(attempt.name, safe='')}{self.suffix}"

    def leave(self, attempt: Attempt) -> None:
        """A task is done with its file, which goes again where its batch was abandoned meanwhile."""
        if self._abandoned(attempt.key).exists():
            with suppress(OSError):  # someone else removed it
                self.path(attempt).unlink()
                self.directory(attempt.key).rmdir()

    # -- for who publishes ---------------------------------------------------------------------------------------

    def take(self, key: BatchKey, attempts: Sequence[Attempt]) -> Path:
        """Move the batch where no task writes any more; the directory with nothing in it but the attempts that count.

        What an earlier call took, and was not published, counts as well.

        Raises:
            FileNotFoundError: an attempt is not there.
        """
        taken = self._taken(key)
        counting = {self.path(attempt).name for attempt in attempts}
        if not taken.is_dir() or counting - _names(taken):
            shutil.rmtree(taken, ignore_errors=True)
            make_directory(self.directory(key))  # a batch without rows has staged nothing
            self.directory(key).rename(taken)
        for path in taken.iterdir():
            if path.name not in counting:
                path.unlink()
        missing = counting - _names(taken)
        if missing:
            raise FileNotFoundError(f"staged parts of batch {key} are not in {str(taken)!r}: {sorted(missing)}")
        return taken

    def discard(self, key: BatchKey) -> None:
        """Remove everything of the batch, which may come again; and the root itself when nothing else is in it."""
        for path in (self.directory(key), self._taken(key)):
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # other batches are in it, or it is gone
            self.root.rmdir()

    def abandon(self, key: BatchKey) -> None:
        """Remove everything of a batch that never comes again, and let tasks that still run do the same."""
        make_directory(self.root)
        self._abandoned(key).touch()
        for path in (self.directory(key), self._taken(key)):
            shutil.rmtree(path, ignore_errors=True)

    def finish(self, key: BatchKey) -> None:
        """The batch is published: remove what is left of it, of earlier ones of its source, and of failed jobs."""
        for name, found in self._batches():
            if found.source == key.source and found.number < key.number:
                shutil.rmtree(self.root / name, ignore_errors=True)  # its query is past it: zombies made it
        if self.root.exists():
            for path in list(self.root.glob(f"{_ABANDONED}*")):
                shutil.rmtree(self.root / path.name.removeprefix(_ABANDONED), ignore_errors=True)
                path.unlink(missing_ok=True)
        self.prune(OLD)
        self.discard(key)

    # -- for who looks after it ----------------------------------------------------------------------------------

    def parts(self) -> list[StagedPart]:
        """What is staged."""
        found: list[StagedPart] = []
        for name, key in self._batches():
            state = "taken" if name.startswith(_TAKEN) else "staged"
            for path in sorted((self.root / name).glob(f"*{self.suffix}")):
                with suppress(FileNotFoundError):  # its task removed it
                    about = path.stat()
                    part, _, attempt = path.name.removesuffix(self.suffix).partition("-")
                    found.append(StagedPart(key, int(part), unquote(attempt), state, about.st_size, about.st_mtime))
        return found

    def prune(self, older_than: float) -> list[BatchKey]:
        """Remove what nobody has changed for so many seconds; the batches of which something was removed."""
        now = time.time()
        gone: list[BatchKey] = []
        for name, key in self._batches():
            with suppress(FileNotFoundError):  # its task removed it
                if now - _last_change(self.root / name) > older_than:
                    shutil.rmtree(self.root / name, ignore_errors=True)
                    log.warning("staging_pruned", path=str(self.root / name))
                    gone.append(key)
        with suppress(OSError):  # other batches are in it, or there is none
            self.root.rmdir()
        return gone

    def _batches(self) -> Iterator[tuple[str, BatchKey]]:
        """The directories in the root, with their batches."""
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            source, _, number = path.name.removeprefix(_TAKEN).rpartition("-")
            if source and number.isdigit() and path.is_dir():
                yield path.name, BatchKey(unquote(source), int(number))

    def _taken(self, key: BatchKey) -> Path:
        return self.root / f"{_TAKEN}{batch_name(key)}"

    def _abandoned(self, key: BatchKey) -> Path:
        return self.root / f"{_ABANDONED}{batch_name(key)}"


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def _last_change(path: Path) -> float:
    """When anything in a directory was changed last."""
    return max(each.stat().st_mtime for each in (path, *path.rglob("*")))
