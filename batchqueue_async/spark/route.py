"""Where Spark's rows go: a handler, or a sink with transactions or keys.

A route holds what lasts: the handler or the open sink. What belongs to one batch is in its `MicroBatch`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async.errors import ConfigError, RetryableError
from batchqueue_async.sinks.base import DeclaringSink, KeyedSink, Sink, TransactionalSink, needs_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from batchqueue_async.config import Handler, QueueConfig
    from batchqueue_async.sinks.base import BatchKey, SendResult, Transaction


class Route:
    """The way to one destination.

    Attributes:
        transactional: whether a batch goes in a transaction, and so exactly once.
        keyed: whether each record goes with a key.
        alone: whether calls are made one at a time, however many workers the queue has.
        isolates: whether a call that was refused may be made again with a part of its rows.
        declares: whether the destination makes its table by a schema.
        any_order: whether rows may go in after those that came later.
    """

    transactional = False
    keyed = False
    alone = False
    isolates = False
    declares = False
    any_order = False

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._home: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        """Get ready on this loop, once."""
        loop = asyncio.get_running_loop()
        if self._home is not loop:
            self.turn = asyncio.Lock()
            await self._open(again=self._home is not None)
            self._home = loop

    async def _open(self, *, again: bool) -> None:
        """Nothing to open, by default; `again` where the loop that it was open on is gone."""

    async def declare(self, schema: Any) -> None:
        """Have the destination make its table by an Arrow schema, if it `declares`."""

    async def send(self, rows: Sequence[Any], keys: Sequence[str] | None) -> SendResult | None:
        """Deliver rows outside of a transaction."""
        raise NotImplementedError

    async def begin(self, key: BatchKey) -> Transaction | None:
        """Begin a transaction; None: the batch is in."""
        raise NotImplementedError

    async def settle(self) -> None:
        """All rows of a batch were sent: wait for what is still on its way."""

    async def close(self) -> None:
        """Give everything back."""
        self._home = None

    def may_pass(self, error: Exception) -> bool:
        """Whether the same call may succeed later."""
        return isinstance(error, RetryableError)


class HandlerRoute(Route):
    """Rows go to a handler."""

    isolates = True

    def __init__(self, handler: Handler[Any]) -> None:
        super().__init__()
        consume = getattr(handler, "consume", handler)
        self._handle = cast("Callable[[Sequence[Any]], Awaitable[object]]", consume)

    async def send(self, rows: Sequence[Any], keys: Sequence[str] | None) -> None:  # noqa: ARG002 - a handler takes no keys
        """Call the handler."""
        await self._handle(rows)


class SinkRoute(Route):
    """Rows go to a sink: in a transaction or with keys, where it takes them."""

    alone = True
    isolates = True

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self.sink = sink
        self.transactional = isinstance(sink, TransactionalSink)
        self.keyed = isinstance(sink, KeyedSink) and not self.transactional
        self.declares = isinstance(sink, DeclaringSink)
        self.any_order = needs_of(sink).ordering == "any"
        self._process = os.getpid()

    async def _open(self, *, again: bool) -> None:
        if again and self._process != os.getpid():
            # Its threads stayed in the parent, where a close would wait for them; a sink travels by pickle unopened.
            self.sink = pickle.loads(pickle.dumps(self.sink))  # noqa: S301 - made here
        elif again:
            with suppress(Exception):  # its loop is gone, and so may be what it would close
                await self.sink.close()
        self._process = os.getpid()
        await self.sink.open()

    async def send(self, rows: Sequence[Any], keys: Sequence[str] | None) -> SendResult | None:
        """Send rows, with keys if there are any."""
        if keys is not None:
            return await cast("KeyedSink", self.sink).send_keyed(rows, keys)
        return await self.sink.send(rows)

    async def declare(self, schema: Any) -> None:
        """Have a sink of tables make its table."""
        if isinstance(self.sink, DeclaringSink):
            await self.sink.declare(schema)

    async def begin(self, key: BatchKey) -> Transaction | None:
        """Begin the sink's transaction."""
        return await cast("TransactionalSink", self.sink).begin(key)

    async def close(self) -> None:
        """Close the sink."""
        await super().close()
        await self.sink.close()

    def may_pass(self, error: Exception) -> bool:
        """Whether the same call may succeed later, by the rules for what sinks raise."""
        return isinstance(error, RetryableError | OSError | EOFError)


class StagedRoute(SinkRoute):
    """Rows go to one attempt's staged part, which Spark repeats as a whole."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.transactional = self.keyed = False
        self.isolates = needs_of(sink).atomic  # else a send that was refused may have left something

    def may_pass(self, error: Exception) -> bool:  # noqa: ARG002 - of no error
        """A part is one transaction, of which a failed send may have left something: its task begins anew."""
        return False


def check_order(what: str, target: object, config: QueueConfig[Any]) -> None:
    """Refuse several workers or partitions before a sink whose keys number the rows: a repetition would mix them up."""
    if not isinstance(target, KeyedSink) or isinstance(target, TransactionalSink):
        return
    workers = config.workers.resolve() if config.workers is not None else 1
    partitions = config.partitions.resolve(workers)
    if max(workers, partitions) > 1:
        raise ConfigError(
            f"{what}: key='position' with {workers} workers and {partitions} partitions would bring rows out of order "
            f"to {type(target).__qualname__}; use one worker and one partition, or key=[columns]"
        )
