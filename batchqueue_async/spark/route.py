"""Where the rows of one Spark batch go: a handler, or a sink with the batch's transaction or keys.

A route is the handler that the queue calls. It remembers the first failure, and from then on drops what is left of the
batch: Spark repeats it as a whole.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async.errors import ConfigError, PermanentError
from batchqueue_async.sinks.base import KeyedSink, Sink, TransactionalSink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from batchqueue_async.config import Handler, QueueConfig
    from batchqueue_async.sinks.base import BatchKey, SendResult, Transaction


class Route:
    """One handler, as the queue of a Spark batch calls it.

    Attributes:
        failure: what the first call that failed in this batch raised.
        taken: rows that were handled in this batch.
    """

    exactly_once = False
    wants_order = False

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.taken = 0

    async def consume(self, batch: Sequence[Any]) -> None:
        """Handle rows, unless the batch has failed."""
        if self.failure is not None:
            return
        try:
            await self._take(batch)
        except asyncio.CancelledError:
            self.failure = self.failure or TimeoutError("the call was cut off, by handler_timeout or by a shutdown")
            raise
        except Exception as error:
            self.failure = self.failure or error
            raise
        self.taken += len(batch)

    async def _take(self, batch: Sequence[Any]) -> None:
        raise NotImplementedError

    async def open(self) -> None:
        """Get ready, once."""

    async def begin(self, key: BatchKey | None) -> None:  # noqa: ARG002 - for those that know keys
        """Start a batch."""
        self.failure, self.taken = None, 0

    async def prepare(self) -> None:
        """The batch's first rows are there, and not in the queue yet: wait here for whatever has to be waited for.

        In the queue a handler that waits holds up the others, and so maybe the one that it waits for.
        """
        try:
            await self._prepare()
        except Exception as error:  # noqa: BLE001 - it is the batch's failure, told as every other
            self.failure = self.failure or error

    async def _prepare(self) -> None:
        """Nothing, by default."""

    async def commit(self) -> bool:
        """End a batch that was handled; False if it had been in before."""
        return True

    async def rollback(self) -> None:
        """End a batch that failed."""

    async def close(self) -> None:
        """Give everything back."""


class HandlerRoute(Route):
    """Rows go to a handler."""

    def __init__(self, handler: Handler[Any]) -> None:
        super().__init__()
        consume = getattr(handler, "consume", handler)
        self._handle = cast("Callable[[Sequence[Any]], Awaitable[object]]", consume)

    async def _take(self, batch: Sequence[Any]) -> None:
        await self._handle(batch)


class SinkRoute(Route):
    """Rows go to a sink: in a transaction or with keys, where it takes them."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self.sink = sink
        self.exactly_once = isinstance(sink, TransactionalSink)
        self.wants_order = isinstance(sink, KeyedSink) and not self.exactly_once
        self._opened = False
        self._key: BatchKey | None = None
        self._begun = False
        self._transaction: Transaction | None = None
        self._sent = 0
        self._turn: asyncio.Lock

    async def open(self) -> None:
        """Open the sink."""
        if not self._opened:
            self._turn = asyncio.Lock()
            await self.sink.open()
            self._opened = True

    async def close(self) -> None:
        """Close the sink."""
        self._opened = False
        await self.sink.close()

    async def begin(self, key: BatchKey | None) -> None:
        """Start a batch; its transaction begins in `prepare`."""
        await super().begin(key)
        self._key, self._begun, self._transaction, self._sent = key, False, None, 0

    async def _prepare(self) -> None:
        # With the first rows, not while Spark still computes them: a transaction locks others out.
        if isinstance(self.sink, TransactionalSink) and self._key is not None:
            async with self._turn:
                self._transaction = await self.sink.begin(self._key)
                self._begun = True

    async def _take(self, batch: Sequence[Any]) -> None:
        async with self._turn:  # a sink takes one call at a time, however many workers the queue has
            check(await self._send(batch))
            self._sent += len(batch)

    async def _send(self, batch: Sequence[Any]) -> SendResult | None:
        key = self._key
        if key is None:
            return await self.sink.send(batch)
        if isinstance(self.sink, TransactionalSink):
            return await self._transaction.send(batch) if self._transaction is not None else None
        if isinstance(self.sink, KeyedSink):
            keys = [f"{key}/{number}" for number in range(self._sent, self._sent + len(batch))]
            return await self.sink.send_keyed(batch, keys)
        return await self.sink.send(batch)

    async def commit(self) -> bool:
        """Commit the transaction, if rows began one."""
        transaction = self._transaction
        if transaction is not None:
            await transaction.commit()
            self._transaction = None
        return transaction is not None or not self._begun

    async def rollback(self) -> None:
        """Undo the transaction."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            await transaction.rollback()


def check(result: SendResult | None) -> None:
    """Raise for records that the destination did not take: Spark knows batches, and no part of them."""
    if result is not None and result.rejected:
        first = next(iter(result.rejected.values()))
        raise PermanentError(f"the sink rejected {len(result.rejected)} records; the first: {first}") from first


def check_order(what: str, target: object, config: QueueConfig[Any]) -> None:
    """Refuse several workers or partitions before a sink whose keys number the rows: a repetition would mix them up."""
    if not isinstance(target, KeyedSink) or isinstance(target, TransactionalSink):
        return
    workers = config.workers.resolve() if config.workers is not None else 1
    partitions = config.partitions.resolve(workers)
    if max(workers, partitions) > 1:
        raise ConfigError(
            f"{what}: {workers} workers and {partitions} partitions would bring rows out of order to "
            f"{type(target).__qualname__}, whose keys are the rows' places; use one worker and one partition"
        )
