"""JSON lines that many tasks stage and one process publishes, out of the reach of tasks that should have ended.

A task that was killed, or lost against its speculative copy, may still write: a zombie. So publishing first takes the
staged directory away, to a name that no task knows; only then it looks what is in it. A zombie that comes later makes
a new staged directory, which is never published, and is removed by a later job::

    out/
      .staging/<source>-<batch>/<part>-<attempt>.jsonl     being written; readers skip names with a dot
      .staging/.taken-<source>-<batch>/...                 being published
      .staging/.abandoned-<source>-<batch>                 a job failed; its tasks clean up after themselves
      <source>-<batch>/<part>-<attempt>.jsonl              published
"""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.sinks._shared.files import Staging, batch_name, make_directory, sync_directory
from batchqueue_async.sinks.jsonl import Fsync, JsonLinesSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.sinks.base import Attempt, BatchKey

_OLD = 7 * 24 * 3600.0
"""Seconds without a change after which what is staged belongs to nobody."""


class StagedLines:
    """A directory of JSON lines, written by many processes; batches are there with all of their parts or not at all."""

    def __init__(self, sink: JsonLinesSink) -> None:
        self._sink = sink
        self.path = Path(sink.path)
        self._staging = Staging(self.path / ".staging", ".jsonl")

    async def open(self) -> None:
        """Open the file that the path is, for a process that does not stage."""
        await self._sink.open()

    async def send(self, batch: Sequence[Any]) -> None:
        """Append records to it."""
        await self._sink.send(batch)

    async def close(self) -> None:
        """Close it."""
        await self._sink.close()

    # -- many processes ------------------------------------------------------------------------------------------

    def stage(self, attempt: Attempt) -> StagedPart:
        """A sink for one attempt's file."""
        fsync: Fsync = "never" if self._sink.fsync == "never" else "close"
        path = self._staging.file(attempt)
        return StagedPart(JsonLinesSink(path, fsync=fsync), path, self._abandoned(attempt.key))

    async def publish(self, key: BatchKey, attempts: Sequence[Attempt]) -> bool:
        """Give the batch's directory its final name, with nothing in it but the attempts that count."""
        return await asyncio.to_thread(self._publish, key, attempts)

    async def discard(self, key: BatchKey) -> None:
        """Remove what was staged for the batch, which may come again."""
        await asyncio.to_thread(self._staging.discard, key)

    async def abandon(self, key: BatchKey) -> None:
        """Remove what was staged for a batch that never comes again, and let tasks that still run do the same."""
        await asyncio.to_thread(self._abandon, key)

    def _publish(self, key: BatchKey, attempts: Sequence[Attempt]) -> bool:
        final, taken = self.path / batch_name(key), self._taken(key)
        fresh = not final.exists()
        if fresh:
            make_directory(self._staging.directory(key))  # a batch without rows has staged nothing
            shutil.rmtree(taken, ignore_errors=True)  # of a publication that did not come to its end
            self._staging.directory(key).rename(taken)
            counting = {self._staging.path(attempt).name for attempt in attempts}
            for path in taken.iterdir():
                if path.name not in counting:
                    path.unlink()
            missing = counting - {path.name for path in taken.iterdir()}
            if missing:
                raise FileNotFoundError(f"staged parts of batch {key} are not in {str(taken)!r}: {sorted(missing)}")
            sync_directory(taken)
            taken.rename(final)
            sync_directory(self.path)
        self._staging.discard(key)
        self._prune()
        return fresh

    def _abandon(self, key: BatchKey) -> None:
        make_directory(self._staging.root)
        self._abandoned(key).touch()
        shutil.rmtree(self._staging.directory(key), ignore_errors=True)

    def _taken(self, key: BatchKey) -> Path:
        return self._staging.root / f".taken-{batch_name(key)}"

    def _abandoned(self, key: BatchKey) -> Path:
        return self._staging.root / f".abandoned-{batch_name(key)}"

    def _prune(self) -> None:
        """Remove what failed jobs left, and what nobody has touched for a week."""
        root, now = self._staging.root, time.time()
        if not root.exists():
            return
        for path in list(root.iterdir()):
            with suppress(FileNotFoundError):  # its task removed it
                if path.name.startswith(".abandoned-"):
                    shutil.rmtree(root / path.name.removeprefix(".abandoned-"), ignore_errors=True)
                    path.unlink()
                elif now - _last_change(path) > _OLD:
                    shutil.rmtree(path, ignore_errors=True)
                    log.warning("spark_staging_pruned", path=str(path))
        with suppress(OSError):  # other batches are in it
            root.rmdir()


def _last_change(path: Path) -> float:
    """When anything in a directory was changed last."""
    return max(each.stat().st_mtime for each in (path, *path.rglob("*")))


class StagedPart:
    """A sink for one attempt's file, which goes again when its batch was abandoned meanwhile."""

    def __init__(self, sink: JsonLinesSink, path: Path, abandoned: Path) -> None:
        self._sink = sink
        self._path = path
        self._abandoned = abandoned

    async def open(self) -> None:
        """Open the file."""
        await self._sink.open()

    async def send(self, batch: Sequence[Any]) -> None:
        """Append records."""
        await self._sink.send(batch)

    async def close(self) -> None:
        """Close it; it is staged when this returns."""
        await self._sink.close()
        if self._abandoned.exists():
            with suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()
