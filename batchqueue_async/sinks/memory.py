"""A sink that keeps everything in memory: for tests, and for seeing what a pipeline would send."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batchqueue_async.sinks.base import BatchKey, SendResult

if TYPE_CHECKING:
    from collections.abc import Sequence


class MemorySink:
    """Keeps what it is sent; takes keys and transactions as a database does.

    Example:
        >>> async def main() -> list[str]:
        ...     sink = MemorySink()
        ...     await sink.open()
        ...     await sink.send_keyed(["a", "b"], ["k1", "k2"])
        ...     await sink.send_keyed(["b", "c"], ["k2", "k3"])
        ...     return sink.records
        >>> asyncio.run(main())
        ['a', 'b', 'c']

    Attributes:
        records: all records, in the order in which they came.
        batches: the same as they came, one list for each send.
        keys: the keys that were seen.
        delivered: the last batch of each source that is in.
        opened: whether it is open.
    """

    concurrent = False

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.batches: list[list[Any]] = []
        self.keys: set[str] = set()
        self.delivered: dict[str, int] = {}
        self.opened = False
        self._turn: asyncio.Lock | None = None

    async def open(self) -> None:
        """Start to take records."""
        self.opened = True
        self._turn = asyncio.Lock()

    async def send(self, batch: Sequence[Any]) -> None:
        """Keep the records."""
        self.keep(batch)

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult:
        """Keep the records whose keys are new."""
        fresh = [record for record, key in zip(batch, keys, strict=True) if key not in self.keys]
        self.keys.update(keys)
        self.keep(fresh)
        return SendResult(skipped=len(batch) - len(fresh))

    async def begin(self, key: BatchKey) -> MemoryTransaction | None:
        """Start a batch, or None if it is in already."""
        if self._turn is None:
            raise RuntimeError("the memory sink is not open; call open() first")
        await self._turn.acquire()
        if self.delivered.get(key.source, -1) >= key.number:
            self._turn.release()
            return None
        return MemoryTransaction(self, key, self._turn)

    async def close(self) -> None:
        """Stop taking records; they stay readable."""
        self.opened = False

    def keep(self, batch: Sequence[Any]) -> None:
        """Keep the records of a batch that is in."""
        if batch:
            self.batches.append(list(batch))
            self.records.extend(batch)


class MemoryTransaction:
    """A batch on its way into a `MemorySink`."""

    def __init__(self, sink: MemorySink, key: BatchKey, turn: asyncio.Lock) -> None:
        self._sink = sink
        self._key = key
        self._turn: asyncio.Lock | None = turn
        self._batches: list[list[Any]] = []

    async def send(self, batch: Sequence[Any]) -> None:
        """Hold the records until the commit."""
        self._batches.append(list(batch))

    async def commit(self) -> None:
        """Keep the records, and note that the batch is in."""
        for batch in self._batches:
            self._sink.keep(batch)
        self._sink.delivered[self._key.source] = self._key.number
        await self.rollback()

    async def rollback(self) -> None:
        """Drop what is held."""
        self._batches = []
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.release()
