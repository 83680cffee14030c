"""How a handler is called: with a message or a batch, or as a queue or an exporter; and what its answer means.

Every call returns the messages that were not handled, by their place, each with its error; or raises for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from batchqueue_async._support.handlers import call_of, handler_problem, method_of
from batchqueue_async._support.wording import name_of, short
from batchqueue_async.errors import ConfigError, DeliveryError
from batchqueue_async.export.policies import BatchPolicy
from batchqueue_async.intake.cancelling import ENDS
from batchqueue_async.intake.message import bodies_of
from batchqueue_async.intake.retrying import UndecodableError
from batchqueue_async.queue.batch_queue import BatchQueue
from batchqueue_async.sinks.base import SendResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from batchqueue_async.intake.message import Message

Rejected: TypeAlias = "Mapping[int, BaseException]"
BatchHandler: TypeAlias = "Callable[[Sequence[Message]], Awaitable[Rejected]]"
NOTHING: Rejected = {}
DEFAULT_BATCH = BatchPolicy(max_records=100, linger=0.0)


class HandlerCall(Protocol):
    """One way to call a handler.

    Attributes:
        cancellable: whether a call may be cancelled when its time is over. What a queue accepted is handled all the
            same, so its deliveries must not go back to the broker before their outcome is known.
    """

    cancellable: bool

    async def __call__(self, batch: Sequence[Message], /) -> Rejected:
        """Handle a batch; what was not handled, by place."""
        ...


class Decoder:
    """Makes the value of each message; an error of the user's function is the message's, never the worker's.

    Example:
        >>> from batchqueue_async.intake.message import Message
        >>> message = Message(b"3")
        >>> Decoder(lambda message: int(message.body))(message), message.value
        (None, 3)
    """

    def __init__(self, decode: Callable[[Message], Any]) -> None:
        self._decode = decode

    def __call__(self, message: Message) -> UndecodableError | None:
        """Set `message.value`; the error if that can't be done."""
        try:
            message.value = self._decode(message)
        except BaseException as error:  # whichever way a payload is bad, it will be so the next time
            if isinstance(error, ENDS):
                raise
            # The class of the error alone: its text may quote the payload.
            return UndecodableError(f"decode raised {type(error).__qualname__}")
        return None


class SingleCall:
    """An async function of one message; a `SendResult` that rejects it counts as its failure."""

    cancellable = True

    def __init__(self, handler: Callable[[Message], Awaitable[Any]]) -> None:
        self.handler = handler


class BatchCall:
    """An async function of a batch, whose answer may reject some of it."""

    cancellable = True

    def __init__(self, handler: Callable[[Sequence[Message]], Awaitable[Any]]) -> None:
        self.handler = handler

    async def __call__(self, batch: Sequence[Message]) -> Rejected:
        """Handle a batch."""
        answer = await self.handler(batch)
        return NOTHING if answer is None else rejected_of(answer, len(batch))


class DeliverCall:
    """A queue or an exporter, by `deliver`, or an exporter by `consume`: its items are the values of the messages.

    Attributes:
        unsynced: the `durability` of an exporter that confirms what a power failure can still take; None for others.
    """

    cancellable = False

    def __init__(
        self, deliver: Callable[[list[Any]], Awaitable[None]], *, decoded: bool, unsynced: str | None = None
    ) -> None:
        self._deliver = deliver
        self._decoded = decoded
        self.unsynced = unsynced

    async def __call__(self, batch: Sequence[Message]) -> Rejected:
        """Hand the items over; returns when all have their outcome."""
        items: list[Any] = [each.value for each in batch] if self._decoded else bodies_of(batch)
        try:
            await self._deliver(items)
        except DeliveryError as error:
            return _by_identity(items, error)
        return NOTHING


def _by_identity(items: list[Any], error: DeliveryError) -> Rejected:
    places: dict[int, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(id(item), []).append(place)
    rejected: dict[int, BaseException] = {}
    for failure in error.failures:
        for item in failure.items:
            # Small ints and texts may be one object in several places: each mention takes one of them.
            if found := places.get(id(item)):
                rejected[found.pop(0)] = failure.error
    return rejected or dict.fromkeys(range(len(items)), error)


def rejected_of(answer: object, count: int) -> Rejected:
    """What the answer of a handler says of its messages; anything but a `SendResult` says nothing.

    Example:
        >>> from batchqueue_async.errors import PermanentError
        >>> rejected_of(SendResult(rejected={0: PermanentError("no")}), 2)
        {0: PermanentError('no')}
    """
    if not isinstance(answer, SendResult) or not answer.rejected:
        return NOTHING
    rejected = cast("Mapping[Any, Any]", answer.rejected)
    if not isinstance(answer.rejected, Mapping) or any(
        not isinstance(place, int) or not 0 <= place < count or not isinstance(error, BaseException)
        for place, error in rejected.items()
    ):
        # Nothing can be said for sure of any message: all of them come again.
        raise TypeError(
            f"the handler's SendResult rejects {short(list(rejected)[:5])} of a batch of {count}; "
            "give the places in the batch, from 0, each with an error"
        )
    return rejected


def make_call(
    owner: str, handler: Any, batch: BatchPolicy | None, *, decoded: bool
) -> tuple[SingleCall | HandlerCall, BatchPolicy | None]:
    """How to call this handler, and with which batches; None is a message at a time.

    Raises:
        ConfigError: it is not a handler, or would acknowledge what can be lost.
    """
    target: Any = handler
    if isinstance(handler, BatchQueue):
        return _queue_call(target, decoded=decoded), batch or DEFAULT_BATCH
    if method_of(target, "deliver_async") is not None:  # the bridge of a queue on another loop
        return DeliverCall(target.deliver_async, decoded=decoded), batch or DEFAULT_BATCH
    if method_of(target, "deliver") is not None and hasattr(target, "config"):
        return _exporter_call(target, decoded=decoded), batch or DEFAULT_BATCH
    unfit = handler_problem(target)
    if unfit is not None:
        what = "message" if batch is None else "batch"
        raise ConfigError(
            f"{owner}: handler={name_of(target)} {unfit.rule}; {unfit.way_out}".replace("one batch", f"one {what}")
        )
    if batch is None and method_of(target, "consume") is None:
        return SingleCall(target), None
    return BatchCall(call_of(target)), batch or DEFAULT_BATCH


def _queue_call(queue: BatchQueue[Any], *, decoded: bool) -> DeliverCall:
    async def deliver(items: list[Any]) -> None:
        if queue.loop is asyncio.get_running_loop():
            await queue.deliver(items)
        else:
            await queue.bridge().deliver_async(items)

    return DeliverCall(deliver, decoded=decoded)


def _exporter_call(exporter: Any, *, decoded: bool) -> DeliverCall:
    config = exporter.config
    # `consume` confirms what is on disk and stays there; in memory, or where the oldest make room, only `deliver` does.
    if getattr(config, "path", None) is None or getattr(config, "overflow", None) not in {"block", "reject"}:
        return DeliverCall(exporter.deliver, decoded=decoded)
    durability: str = config.durable.durability
    unsynced = None if durability == "always" else durability
    return DeliverCall(exporter.consume, decoded=decoded, unsynced=unsynced)
