"""Which writes were delivered: for sinks that can't note it in a transaction of their own.

A ledger file is small: the last batch of each source, because a source's batches come in order. It is JSON::

    {"version": 1, "delivered": {"<query id>": 41}, "noted": {"<query id>": 1790000000.0}}

A process has one ledger object for a file, however many sinks name it, and each note keeps what other processes wrote.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from batchqueue_async._support import forks
from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks._shared.files import make_directory, open_append, replace_file
from batchqueue_async.sinks.base import BatchKey, Delivered

fcntl: Any = None
with suppress(ImportError):  # Windows has none: there one process may use a ledger at a time
    fcntl = importlib.import_module("fcntl")

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_VERSION = 1


class Ledger(Protocol):
    """Remembers the last batch of each source that was delivered."""

    def is_delivered(self, key: BatchKey) -> bool:
        """Whether the batch, or a later one of its source, was delivered."""
        ...

    def note(self, key: BatchKey) -> None:
        """Note that the batch was delivered; the note is as durable as the ledger when this returns."""
        ...


class MemoryLedger:
    """A ledger for the life of the process.

    Example:
        >>> from batchqueue_async.sinks.base import BatchKey
        >>> ledger = MemoryLedger()
        >>> ledger.note(BatchKey("query", 2))
        >>> ledger.is_delivered(BatchKey("query", 1)), ledger.is_delivered(BatchKey("query", 3))
        (True, False)
    """

    def __init__(self) -> None:
        self.delivered: dict[str, int] = {}

    def is_delivered(self, key: BatchKey) -> bool:
        """Whether the batch, or a later one of its source, was delivered."""
        return self.delivered.get(key.source, -1) >= key.number

    def note(self, key: BatchKey) -> None:
        """Note that the batch was delivered."""
        self.delivered[key.source] = max(key.number, self.delivered.get(key.source, -1))


class FileLedger(MemoryLedger):
    """A ledger in a file, which each note replaces as a whole, durably. `ledger_at` gives the one of a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self._turn = threading.Lock()
        forks.watch(self)
        make_directory(self.path.parent)
        self.delivered = self._read()

    def after_fork(self) -> None:
        """In a forked child: another thread may have held the lock."""
        self._turn = threading.Lock()

    def is_delivered(self, key: BatchKey) -> bool:
        """Whether the batch, or a later one of its source, was delivered, by this process or another."""
        self.delivered = self._read()
        return super().is_delivered(key)

    def note(self, key: BatchKey) -> None:
        """Note that the batch was delivered, with what others noted meanwhile, and make the note durable."""
        with self._turn, self._alone():
            contents = _read(self.path)
            contents.delivered[key.source] = max(key.number, contents.delivered.get(key.source, -1))
            contents.noted[key.source] = time.time()
            self._replace(contents)

    def notes(self) -> list[Delivered]:
        """All notes, by source."""
        found = _read(self.path)
        return [
            Delivered(BatchKey(source, number), found.noted.get(source))
            for source, number in sorted(found.delivered.items())
        ]

    def forget(self, sources: Sequence[str]) -> int:
        """Take back the notes of sources; how many there were."""
        with self._turn, self._alone():
            contents = _read(self.path)
            gone = [source for source in sources if contents.delivered.pop(source, None) is not None]
            for source in gone:
                contents.noted.pop(source, None)
            self._replace(contents)
        return len(gone)

    def _replace(self, contents: _Contents) -> None:
        replace_file(self.path, msgspec.json.encode(contents))
        self.delivered = contents.delivered

    def _read(self) -> dict[str, int]:
        return _read(self.path).delivered

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Keep other processes out; the file itself is replaced, so that the lock is on one next to it."""
        if fcntl is None:
            yield
            return
        lock = open_append(self.path.with_name(f".{self.path.name}.lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


class _Contents(msgspec.Struct):
    version: int
    delivered: dict[str, int]
    noted: dict[str, float] = {}


def _read(path: Path) -> _Contents:
    if not path.exists():
        return _Contents(_VERSION, {})
    way_out = "move the file away, and the last batch may be delivered twice"
    try:
        contents = msgspec.json.decode(path.read_bytes(), type=_Contents)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"ledger {str(path)!r} is not one: {error}; {way_out}") from None
    if contents.version != _VERSION:
        raise ConfigError(f"ledger {str(path)!r} has version {contents.version}, and {_VERSION} is known; {way_out}")
    return contents


class _Ledgers:
    """The ledger objects of this process, by their files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: WeakValueDictionary[Path, FileLedger] = WeakValueDictionary()
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def at(self, path: Path) -> FileLedger:
        with self._lock:
            found = self._open.get(path)
            if found is None:
                found = self._open[path] = FileLedger(path)
            return found


_ledgers = _Ledgers()


def ledger_at(path: Any) -> Ledger:
    """The ledger in that file, the same object for the same file; one in memory for None."""
    return MemoryLedger() if path is None else _ledgers.at(Path(path).resolve())
