"""What a sink is: three calls; and what some sinks can do besides, each a protocol of its own.

A sink says what it can do by having the methods; whoever holds it asks with `isinstance`:

| protocol | methods | what it promises |
|---|---|---|
| `Sink` | `open`, `send`, `close` | a `send` that returned is delivered; one that raised may be repeated |
| `KeyedSink` | `send_keyed` | a key goes with each record, so that the destination can tell a repetition |
| `PreparingSink` | `prepare`, `send_prepared` | what computing a send needs can be done in a thread, before it |
| `TransactionalSink` | `begin` | several sends and the note that their batch is in take effect together, once |
| `StagingSink` | `stage`, `publish`, `discard` | the same over many processes: each stages, one publishes |

What a sink raises says how its failure is to be treated: `RetryableError`, `PermanentError`, `TooLargeError`,
`AuthError`. Anything else counts as permanent, but for an `OSError` (`ConnectionError` and `TimeoutError` are such) or
`EOFError`, which counts as one that may pass. A sink is used by one event loop. It may be opened again after it was
closed, and pickled before it is opened.

Its calls are made one at a time, unless it says that its sends may overlap, by the class attribute `concurrent = True`:
then an exporter has several `send` or `send_keyed` calls under way at once, each with records of its own, and `open`
and `close` still alone. A sink with one connection that can't take turns by itself leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchqueue_async.errors import SinkError


class BatchKey(NamedTuple):
    """The name of a batch, the same each time that the batch is sent.

    The numbers of one source only go up: once a batch is in, none with the same or a lower number is taken any more,
    so that one row per source is all that a sink has to remember.

    Example:
        >>> str(BatchKey("8f14e45f", 12))
        '8f14e45f/12'

    Attributes:
        source: where the batches come from: a streaming query's id, a job's, a queue's.
        number: which batch it is.
    """

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}/{self.number}"


class Attempt(NamedTuple):
    """One task's attempt to write its part of a batch; several may exist, one of each part is published.

    Attributes:
        key: the batch.
        part: which part of the batch, such as Spark's partition.
        name: tells the attempts of all tasks of the batch apart; made of letters, digits and dashes.
    """

    key: BatchKey
    part: int
    name: str


def _nothing() -> dict[int, SinkError]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResult:
    """What became of the records of a send that did not fail as a whole; None says the same as an empty one.

    Example:
        >>> SendResult(skipped=2).rejected
        {}

    Attributes:
        rejected: the records that were not taken, by their place in the batch, each with its reason.
        skipped: how many records the destination had already, by their keys.
    """

    rejected: Mapping[int, SinkError] = field(default_factory=_nothing)
    skipped: int = 0


@runtime_checkable
class Sink(Protocol):
    """Takes batches of records: bytes, str, mappings, structs, dataclasses, or Arrow record batches of many.

    Example:
        >>> class Printer:
        ...     async def open(self) -> None: ...
        ...     async def send(self, batch: Sequence[Any]) -> None:
        ...         print(len(batch))
        ...     async def close(self) -> None: ...
        >>> isinstance(Printer(), Sink)
        True
    """

    async def open(self) -> None:
        """Get ready to send; called once before anything else."""
        ...

    async def send(self, batch: Sequence[Any], /) -> SendResult | None:
        """Deliver a batch; returns when it is delivered."""
        ...

    async def close(self) -> None:
        """Give everything back; may be called twice, and after an `open` that failed."""
        ...


def is_concurrent(sink: Sink) -> bool:
    """Whether the sink's sends may overlap: its attribute `concurrent`, which most sinks leave out.

    Example:
        >>> class Pool:
        ...     concurrent = True
        ...     async def open(self) -> None: ...
        ...     async def send(self, batch: Sequence[Any]) -> None: ...
        ...     async def close(self) -> None: ...
        >>> is_concurrent(Pool())
        True
    """
    return getattr(sink, "concurrent", False) is True


@runtime_checkable
class KeyedSink(Sink, Protocol):
    """A sink that carries an idempotency key with each record.

    Example:
        >>> from batchqueue_async.sinks.sqlite.sink import SqliteSink
        >>> isinstance(SqliteSink("rows.db"), KeyedSink)
        True
    """

    async def send_keyed(self, batch: Sequence[Any], keys: Sequence[str], /) -> SendResult | None:
        """Deliver a batch; `keys[i]` belongs to `batch[i]`, and is the same whenever that record is sent again."""
        ...


@runtime_checkable
class PreparingSink(Sink, Protocol):
    """A sink that can encode and compress a batch ahead of its send, in another thread."""

    def prepare(self, batch: Sequence[Any], keys: Sequence[str], /) -> object:
        """Make what is sent of a batch; called in a thread, so it touches nothing that `send` does."""
        ...

    async def send_prepared(self, prepared: Any, /) -> SendResult | None:
        """Deliver what `prepare` made; as `send`."""
        ...


class Transaction(Protocol):
    """The sends of one batch, which take effect together or not at all."""

    async def send(self, batch: Sequence[Any], /) -> SendResult | None:
        """Write records of the batch; nobody sees them yet."""
        ...

    async def commit(self) -> None:
        """Let all of it take effect, with the note that the batch is in; it is durable when this returns."""
        ...

    async def rollback(self) -> None:
        """Undo all of it; does nothing after a commit."""
        ...


@runtime_checkable
class TransactionalSink(Sink, Protocol):
    """A sink that takes a batch of any size exactly once."""

    async def begin(self, key: BatchKey, /) -> Transaction | None:
        """Start the batch, or return None: it is in already. One transaction at a time; a second `begin` waits."""
        ...


@runtime_checkable
class StagingSink(Sink, Protocol):
    """A sink that takes a batch exactly once from many processes.

    Every task stages its records under an attempt of its own; when all have ended well, one process publishes the
    attempts that count. What was staged and is not published is never visible.
    """

    def stage(self, attempt: Attempt, /) -> Sink:
        """A sink for the records of one attempt; when its `close` returned, they are safely staged."""
        ...

    async def publish(self, key: BatchKey, attempts: Sequence[Attempt], /) -> bool:
        """Make the attempts' records visible, all at once; False: the batch was published before, they are dropped."""
        ...

    async def discard(self, key: BatchKey, /) -> None:
        """Drop everything that was staged for the batch."""
        ...
