"""JSON lines in files: one record, one line.

Used by one process, `JsonLinesSink("out.jsonl")` appends to that file. Used by many, as a `StagingSink`, the same path
is a directory: each batch is published into it as a directory of parts, by one atomic rename, so that its name is there
with all of its parts or not at all::

    out/
      .staging/<source>-<batch>/<part>-<attempt>.jsonl     being written; readers skip names with a dot
      <source>-<batch>/<part>-<attempt>.jsonl              published
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, RetryableError
from batchqueue_async.sinks._shared.files import (
    Staging,
    batch_name,
    make_directory,
    open_append,
    sync_directory,
    write_all,
)
from batchqueue_async.sinks._shared.records import lines
from batchqueue_async.sinks._shared.thread import SinkThread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.sinks.base import Attempt, BatchKey

Fsync = Literal["batch", "close", "never"]
_BLOCK = 65536


class JsonLinesSink:
    """Appends each record as a line of JSON; delivers at least once.

    A half line at the end of the file, left by a crash, is cut off when the file is opened. The file and those that it
    rotates to are readable by their owner only.

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

    def __init__(self, path: str | os.PathLike[str], *, fsync: Fsync = "batch", max_bytes: int | None = None) -> None:
        """Say where to write, and how durably.

        Args:
            path: the file; for staged writing the directory.
            fsync: "batch" makes each `send` durable before it returns, "close" only the `close`, "never" leaves it to
                the system.
            max_bytes: a file that has reached so many bytes is renamed to `<path>.1`, the next to `<path>.2` and so
                on, and a new one is begun; None never does.
        """
        if fsync not in {"batch", "close", "never"}:
            raise ConfigError(f"JSON lines sink: fsync={fsync!r} is unknown; give 'batch', 'close' or 'never'")
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"JSON lines sink: max_bytes={max_bytes} is below 1; give a size in bytes, or None")
        self.path = Path(path)
        self.fsync: Fsync = fsync
        self.max_bytes = max_bytes
        self._file = -1
        self._size = 0
        self._thread: SinkThread | None = None

    # -- one file ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the file, and cut off what a crash left half written."""
        self._thread = SinkThread("jsonl")
        await self._thread.run(self._open)

    async def send(self, batch: Sequence[Any]) -> None:
        """Append the records.

        Raises:
            PermanentError: a record has no form in JSON; nothing of the batch is written.
            RetryableError: the system did not take the data, as on a full disk; the file is as before.
        """
        if self._thread is None:
            raise RuntimeError(f"JSON lines sink {str(self.path)!r} is not open; call open() first")
        await self._thread.run(self._append, batch)

    async def close(self) -> None:
        """Close the file, durably unless `fsync` is "never"."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                await thread.run(self._close)
            finally:
                await thread.close()

    def _open(self) -> None:
        if self.path.is_dir():
            raise ConfigError(f"JSON lines sink: {str(self.path)!r} is a directory; name a file in it")
        make_directory(self.path.parent)
        self._file = open_append(self.path)
        self._size = _cut_half_line(self._file, self.path)

    def _append(self, batch: Sequence[Any]) -> None:
        data = b"".join([line + b"\n" for line in lines(batch)])
        if self.max_bytes is not None and self._size and self._size + len(data) > self.max_bytes:
            self._rotate()
        try:
            write_all(self._file, data)
            if self.fsync == "batch":
                os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise RetryableError(
                f"JSON lines sink {str(self.path)!r}: {error.strerror}; the batch is not in"
            ) from error
        self._size += len(data)

    def _rotate(self) -> None:
        self._close()
        taken = [int(found[1]) for found in map(self._numbered, self.path.parent.iterdir()) if found]
        self.path.rename(self.path.with_name(f"{self.path.name}.{max(taken, default=0) + 1}"))
        self._open()

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

    def stage(self, attempt: Attempt) -> JsonLinesSink:
        """A sink for one attempt's file."""
        return JsonLinesSink(self._staging.file(attempt), fsync="never" if self.fsync == "never" else "close")

    async def publish(self, key: BatchKey, attempts: Sequence[Attempt]) -> bool:
        """Rename the batch's directory to its final name, with nothing in it but the attempts that count."""
        thread = SinkThread("jsonl")
        try:
            return await thread.run(self._publish, key, attempts)
        finally:
            await thread.close()

    def _publish(self, key: BatchKey, attempts: Sequence[Attempt]) -> bool:
        staging, final = self._staging, self.path / batch_name(key)
        if final.exists():
            staging.discard(key)
            return False
        make_directory(staging.directory(key))  # a batch without rows has staged nothing
        staging.keep_only(key, attempts)
        sync_directory(staging.directory(key))
        staging.directory(key).rename(final)
        sync_directory(self.path)
        staging.discard(key)
        return True

    async def discard(self, key: BatchKey) -> None:
        """Remove what was staged for the batch."""
        thread = SinkThread("jsonl")
        try:
            await thread.run(self._staging.discard, key)
        finally:
            await thread.close()


def _cut_half_line(file: int, path: Path) -> int:
    """Cut a file after its last line break; returns its size."""
    size = end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
        log.warning("half_line_cut", file=str(path), bytes=size - end)
    return end
