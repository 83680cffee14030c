"""What sinks share that publish one message a record over one connection, and wait for all to be confirmed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from batchqueue_async._support import tracing
from batchqueue_async.sinks._shared.connection import SharedConnection
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.payloads import UnderWay, payloads, verdict
from batchqueue_async.sinks.base import SinkNeeds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchqueue_async.errors import SinkError
    from batchqueue_async.sinks.base import SendResult

L = TypeVar("L")


class MessageSink(ABC, Generic[L]):
    """Makes the connection at the first batch, and again when it broke; a subclass says what there is to publish.

    Attributes:
        client: the client's module, and the extra that brings it.
        timeout: seconds in which at least one confirmation of a batch, or of those before it, has to come.
        connect_timeout: seconds to connect.
    """

    concurrent = True
    needs = SinkNeeds()
    client: ClassVar[tuple[str, str]]
    timeout: float
    connect_timeout: float
    _headers: Mapping[str, str]

    def __init__(self) -> None:
        self._shared: SharedConnection[L] | None = None
        self._under_way = UnderWay()

    async def open(self) -> None:
        """Get ready; the connection is made at the first batch."""
        require(*self.client)
        if self._shared is None:
            self._shared = SharedConnection(self._connect, self._disconnect)

    async def close(self) -> None:
        """Close the connection."""
        shared, self._shared = self._shared, None
        if shared is not None:
            await shared.close()

    async def send(self, batch: Sequence[Any]) -> SendResult | None:
        """Publish the batch; returns when all of it is confirmed."""
        return await self._send(batch, None)

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str]) -> SendResult | None:
        """Publish the batch, each message with its record's key."""
        return await self._send(batch, keys)

    async def _send(self, batch: Sequence[Any], keys: Sequence[str] | None) -> SendResult | None:
        if self._shared is None:
            raise RuntimeError(f"{self!r} is not open; call open() first")
        bodies, errors = payloads(batch)
        if not bodies:
            return verdict(errors, len(batch))
        line = await self._line(self._shared)
        traced = tracing.headers(self._headers)
        calls = [
            self._publish(line, batch[place], body, keys[place] if keys else None, traced)
            for place, body in bodies.items()
        ]
        answers = await self._under_way.all_of(calls, self.timeout)
        skipped = 0
        for place, answer in zip(bodies, answers, strict=True):
            if isinstance(answer, Exception):
                errors[place] = self._error(answer, line)
            else:
                skipped += answer
        self._judge(errors)
        return verdict(errors, len(batch), skipped=skipped)

    async def _line(self, shared: SharedConnection[L]) -> L:
        try:
            async with asyncio.timeout(self.connect_timeout):
                line = await shared.get()
        except Exception as error:  # noqa: BLE001 - the client raises errors of many kinds; all are judged in one place
            raise self._error(error, None) from None
        if self._is_broken(line):
            shared.drop(line)
            return await self._line(shared)
        return line

    def _drop(self, line: L | None) -> None:
        """Have the next batch make another connection."""
        if line is not None and self._shared is not None:
            self._shared.drop(line)

    @abstractmethod
    async def _connect(self) -> L:
        """Make the connection."""

    @staticmethod
    @abstractmethod
    async def _disconnect(line: L) -> None:
        """End it."""

    @abstractmethod
    def _is_broken(self, line: L) -> bool:
        """Whether nothing can be published over it any more."""

    @abstractmethod
    async def _publish(self, line: L, record: Any, body: bytes, key: str | None, traced: Mapping[str, str]) -> bool:
        """Publish one message; returns when it is confirmed: whether it was there already.

        `traced` are the headers of the send's trace; those that the user has set win.
        """

    @abstractmethod
    def _error(self, error: Exception, line: L | None) -> SinkError:
        """What an error of the client means; a connection that broke is dropped."""

    def _judge(self, errors: dict[int, SinkError]) -> None:
        """Raise, if errors of single messages mean the batch."""
