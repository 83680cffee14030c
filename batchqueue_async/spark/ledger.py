"""Which batches were delivered: for sinks that can't note it in a transaction of their own.

A ledger file is small: the last batch of each source, for a source's batches come in order. It is JSON::

    {"version": 1, "delivered": {"<query id>": 41}}
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks._shared.files import make_directory, replace_file

if TYPE_CHECKING:
    import os

    from batchqueue_async.sinks.base import BatchKey

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
        self.delivered[key.source] = key.number


class FileLedger(MemoryLedger):
    """A ledger in a file, which each note replaces as a whole, durably; one process uses it at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        make_directory(self.path.parent)
        if self.path.exists():
            self.delivered = _read(self.path)

    def note(self, key: BatchKey) -> None:
        """Note that the batch was delivered, and make the note durable."""
        delivered = {**self.delivered, key.source: key.number}
        replace_file(self.path, msgspec.json.encode({"version": _VERSION, "delivered": delivered}))
        self.delivered = delivered


class _Contents(msgspec.Struct):
    version: int
    delivered: dict[str, int]


def _read(path: Path) -> dict[str, int]:
    way_out = "move the file away, and the last batch may be delivered twice"
    try:
        contents = msgspec.json.decode(path.read_bytes(), type=_Contents)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"ledger {str(path)!r} is not one: {error}; {way_out}") from None
    if contents.version != _VERSION:
        raise ConfigError(f"ledger {str(path)!r} has version {contents.version}, and {_VERSION} is known; {way_out}")
    return contents.delivered


def ledger_at(path: Any) -> Ledger:
    """The ledger in that file, or one in memory for None."""
    return MemoryLedger() if path is None else FileLedger(path)
