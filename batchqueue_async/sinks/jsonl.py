"""JSON lines in files: one record, one line.

Used by one process, `JsonLinesSink("out.jsonl")` appends to that file. Used by many, as a `StagingSink`, the same path
is a directory: each batch is published into it as a directory of parts, by one atomic rename, so that its name is there
with all of its parts or not at all::

    out/
      .staging/...                                the parts of batches under way; readers skip names with a dot
      <source>-<batch>/<part>-<attempt>.jsonl     published
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, PermanentError, RetryableError
from batchqueue_async.sinks._shared.files import (
    batch_name,
    make_directory,
    open_append,
    sync_directory,
    write_all,
)
from batchqueue_async.sinks._shared.records import line_blocks, lines
from batchqueue_async.sinks._shared.staging import Staging
from batchqueue_async.sinks._shared.thread import SinkThread
from batchqueue_async.sinks.base import SinkNeeds

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from batchqueue_async.sinks.base import Attempt, BatchKey, StagedPart

Fsync = Literal["batch", "close", "never"]
_BLOCK = 65536


class JsonLinesSink:
    """Appends each record as a line of JSON; delivers at least once.

    A half line at the end of the file, left by a crash, is cut off when the file is opened; a whole one without its
    line break gets one. The file and those that it rotates to are readable by their owner only.

    Example:
        >>> import asyncio, pathlib, tempfile
        >>> async def main(path: pathlib.Path) -> str:
        ...     sink = JsonLinesSink(path)
        ...     await sink.open()
        ...     await sink.send([{"a": 1}, {"a": 2}])
        ...     await sink.close()
        ...     return path.read_text()
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     print(asyncio.run(main(pathlib.Path(directory, "out.jsonl"))), end="")
        {"a":1}
        {"a":2}
    """

    concurrent = False  # a file has one writer
    needs = SinkNeeds(ordering="any", concurrency=1, atomic=True)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fsync: Fsync = "batch",
        max_bytes: int | None = None,
        keep_files: int | None = None,
        keep_seconds: float | None = None,
        reopen_on: signal.Signals | None = None,
    ) -> None:
        """Say where to write, and how durably.

        Args:
            path: the file; for staged writing the directory. A file that was moved or removed meanwhile, as by
                logrotate, is made anew for the next batch.
            fsync: "batch" makes each `send` durable before it returns, "close" only the `close`, "never" leaves it to
                the system.
            max_bytes: a file that has reached this size is renamed to `<path>.1`, the next to `<path>.2` and so on, and
                a new one is begun; None never does.
            keep_files: how many of those files are kept, the newest; None keeps all.
            keep_seconds: how long they are kept; None keeps them without end.
            reopen_on: a signal, such as `signal.SIGHUP`, at which the file is closed and opened again; for an event
                loop in the main thread.
        """
        if fsync not in {"batch", "close", "never"}:
            raise ConfigError(f"JSON lines sink: fsync={fsync!r} is unknown; give 'batch', 'close' or 'never'")
        for name, value in (("max_bytes", max_bytes), ("keep_files", keep_files), ("keep_seconds", keep_seconds)):
            if value is not None and value < 1:
                raise ConfigError(f"JSON lines sink: {name}={value} is below 1; give a number from 1 on, or None")
        if max_bytes is None and not keep_files is keep_seconds is None:
            raise ConfigError("JSON lines sink: keep_files and keep_seconds go with max_bytes; give it too")
        self.path = Path(path)
        self.fsync: Fsync = fsync
        self.max_bytes = max_bytes
        self.keep_files = keep_files
        self.keep_seconds = keep_seconds
        self.reopen_on = reopen_on
        self._file = -1
        self._size = 0
        self._stale = False
        self._thread: SinkThread | None = None

    # -- one file ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the file, and cut off what a crash left half written."""
        self._thread = SinkThread("jsonl")
        await self._thread.run(self._open)
        if self.reopen_on is not None:
            asyncio.get_running_loop().add_signal_handler(self.reopen_on, self.reopen)

    def reopen(self) -> None:
        """Have the next batch close the file and open what has its name then; from any thread."""
        self._stale = True

    async def send(self, batch: Sequence[Any]) -> None:
        """Append the records.

        Raises:
            PermanentError: records have no form in JSON, its `culprits`; nothing of the batch is written.
            RetryableError: the system did not take the data, as on a full disk; the file is as before.
        """
        if self._thread is None:
            raise RuntimeError(f"JSON lines sink {str(self.path)!r} is not open; call open() first")
        await self._thread.run(self._append, batch)

    async def close(self) -> None:
        """Close the file, durably unless `fsync` is "never"."""
        thread, self._thread = self._thread, None
        if thread is not None:
            if self.reopen_on is not None:
                asyncio.get_running_loop().remove_signal_handler(self.reopen_on)
            try:
                await thread.run(self._close)
            finally:
                await thread.close()

    def _open(self) -> None:
        if self.path.is_dir():
            raise ConfigError(f"JSON lines sink: {str(self.path)!r} is a directory; name a file in it")
        make_directory(self.path.parent)
        self._file = open_append(self.path)
        self._size = _end_last_line(self._file, self.path)
        self._stale = False

    def _append(self, batch: Sequence[Any]) -> None:
        blocks = self._lines(batch)
        size = sum(map(len, blocks))
        try:
            self._find_file()
            if self.max_bytes is not None and self._size and self._size + size > self.max_bytes:
                self._rotate()
            self._write(blocks)
        except OSError as error:
            raise RetryableError(
                f"JSON lines sink {str(self.path)!r}: {error.strerror}; the batch is not in", error_type="server"
            ) from error

    @staticmethod
    def _lines(batch: Sequence[Any]) -> list[bytes]:
        try:
            return line_blocks(batch)
        except PermanentError as error:
            error.culprits = tuple(place for place, record in enumerate(batch) if not _has_line(record))
            raise

    def _find_file(self) -> None:
        """Open the file where it is closed, or where its name belongs to another file or to none."""
        if self._file >= 0:
            mine = os.fstat(self._file)
            try:
                there: os.stat_result | None = self.path.stat()
            except FileNotFoundError:
                there = None
            if not self._stale and there is not None and os.path.samestat(mine, there):
                self._size = mine.st_size  # others may have cut it
                return
            self._leave()
        self._open()

    def _leave(self) -> None:
        """Close a file whose name is gone; its directory may be too."""
        file, self._file = self._file, -1
        try:
            if self.fsync != "never":
                os.fsync(file)
        finally:
            os.close(file)

    def _write(self, blocks: Sequence[bytes]) -> None:
        try:
            for block in blocks:
                write_all(self._file, block)
            if self.fsync == "batch":
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += sum(map(len, blocks))

    def _rotate(self) -> None:
        self._close()
        taken = self._rotated()
        self.path.rename(self.path.with_name(f"{self.path.name}.{max(taken, default=0) + 1}"))
        self._open()
        self._forget_old()

    def _rotated(self) -> dict[int, Path]:
        found = ((self._numbered(path), path) for path in self.path.parent.iterdir())
        return {int(number[1]): path for number, path in found if number}

    def _forget_old(self) -> None:
        """Remove the rotated files that are not to be kept any more."""
        newest_first = [path for _, path in sorted(self._rotated().items(), reverse=True)]
        kept = newest_first if self.keep_files is None else newest_first[: self.keep_files]
        limit = None if self.keep_seconds is None else time.time() - self.keep_seconds
        for path in newest_first:
            with suppress(FileNotFoundError):
                if path not in kept or (limit is not None and path.stat().st_mtime < limit):
                    path.unlink()

    def _numbered(self, path: Path) -> re.Match[str] | None:
        return re.fullmatch(re.escape(self.path.name) + r"\.(\d+)", path.name)

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file < 0:
            return
        try:
            if self.fsync != "never":
                os.fsync(file)
                sync_directory(self.path.parent)
        finally:
            os.close(file)

    # -- many processes ------------------------------------------------------------------------------------------

    @property
    def _staging(self) -> Staging:
        return Staging(self.path / ".staging", ".jsonl")

    def stage(self, attempt: Attempt) -> StagedLines:
        """A sink for one attempt's file."""
        fsync: Fsync = "never" if self.fsync == "never" else "close"
        return StagedLines(JsonLinesSink(self._staging.file(attempt), fsync=fsync), self._staging, attempt)

    async def publish(self, key: BatchKey, attempts: Sequence[Attempt]) -> bool:
        """Give the batch's directory its final name, with nothing in it but the attempts that count."""
        return await asyncio.to_thread(self._publish, key, attempts)

    def is_published(self, key: BatchKey) -> bool:
        """Whether the directory of a batch is there."""
        return (self.path / batch_name(key)).exists()

    def _publish(self, key: BatchKey, attempts: Sequence[Attempt]) -> bool:
        staging, final = self._staging, self.path / batch_name(key)
        fresh = not self.is_published(key)
        if fresh:
            taken = staging.take(key, attempts)
            sync_directory(taken)
            taken.rename(final)
            sync_directory(self.path)
        staging.finish(key)
        return fresh

    async def discard(self, key: BatchKey) -> None:
        """Remove what was staged for the batch, which may come again."""
        await asyncio.to_thread(self._staging.discard, key)

    async def abandon(self, key: BatchKey) -> None:
        """Remove what was staged for a batch that never comes again, and let tasks that still run do the same."""
        await asyncio.to_thread(self._staging.abandon, key)

    async def staged(self) -> list[StagedPart]:
        """What is staged, of all batches."""
        return await asyncio.to_thread(self._staging.parts)

    async def prune(self, older_than: float) -> list[BatchKey]:
        """Remove what was not changed for so many seconds."""
        return await asyncio.to_thread(self._staging.prune, older_than)


class StagedLines:
    """A sink for one attempt's file, which goes again where its batch was abandoned meanwhile."""

    needs = SinkNeeds(concurrency=1, atomic=True)

    def __init__(self, sink: JsonLinesSink, staging: Staging, attempt: Attempt) -> None:
        self._sink = sink
        self._staging = staging
        self._attempt = attempt

    async def open(self) -> None:
        """Open the file."""
        await self._sink.open()

    async def send(self, batch: Sequence[Any]) -> None:
        """Append records."""
        await self._sink.send(batch)

    async def close(self) -> None:
        """Close it; it is staged when this returns."""
        await self._sink.close()
        await asyncio.to_thread(self._staging.leave, self._attempt)


def _has_line(record: Any) -> bool:
    try:
        lines([record])
    except PermanentError:
        return False
    return True


def _end_last_line(file: int, path: Path) -> int:
    """See to it that a file ends with a line break; returns its size.

    A last line that is whole, and only lacks its break, gets one: other programs write such files. What a crash left of
    a line is cut off. The rest of a number cannot be told from a number, and was not confirmed.
    """
    size = end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        if _is_whole(os.pread(file, size - end, end)):
            write_all(file, b"\n")
            return size + 1
        os.ftruncate(file, end)
        log.warning("half_line_cut", file=str(path), bytes=size - end)
    return end


def _is_whole(line: bytes) -> bool:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(found, bool) or not isinstance(found, int | float)
