"""What a sink is: three calls; and what some sinks can do besides, each a protocol of its own.

A sink says what it can do by having the methods; whoever holds it asks with `isinstance`:

| protocol | methods | what it promises |
|---|---|---|
| `Sink` | `open`, `send`, `close` | a `send` that returned is delivered; one that raised may be repeated |
| `KeyedSink` | `send_keyed` | a key goes with each record, so that the destination can tell a repetition |
| `PreparingSink` | `prepare`, `send_prepared` | what computing a send needs can be done in a thread, before it |
| `TransactionalSink` | `begin` | several sends and the note that their batch is in take effect together, once |
| `StagingSink` | `stage`, `publish`, `discard` | the same over many processes: each stages, one publishes |
| `SiftingSink` | `publish_sifted` | the same without the rows that the destination refuses only then |
| `DeclaringSink` | `declare` | there is a table of these columns before the first record, and without any |
| `LedgerSink` | `delivered`, `forget` | its notes of what is in can be listed and taken back |
| `PrunableSink` | `abandon`, `staged`, `prune` | what nobody publishes can be found, and goes |

What a sink raises says how its failure is to be treated:

| error | what the exporter does |
|---|---|
| `RetryableError` | sends the same records again, after the later of its backoff and `retry_after` |
| `ThrottledError` | likewise, and slows down; the circuit breaker does not count it |
| `TooLargeError` | halves the batch; a single record that is too large goes to the dead letters |
| `PermanentError` | finds the records that are the reason, by its `culprits` or by halving, and gives up those alone |
| `AuthError`, `ConfigError` | pauses, logs an error, drops nothing, and tries one batch from time to time |
| `OSError`, `EOFError`, `TimeoutError` | as `RetryableError` |
| anything else | as `RetryableError`, within `max_attempts` and `max_age`; halves what fails again; one warning |

`ConfigError` in `open` or `send` is for what is set up wrong on our side: a certificate that can't be read, a missing
table. Every `SinkError` may carry an `error_type` for the counts. A send that took some records and not others returns
a `SendResult` whose `rejected` has an error of one of these classes for each record that was not taken.

A sink is used by one event loop. It may be opened again after it was closed, and pickled before it is opened. Its
calls are made one at a time, unless it says that its sends may overlap, by the class attribute `concurrent = True`:
then an exporter has several `send` or `send_keyed` calls under way at once, each with records of its own, and `open`
and `close` still alone. A sink with one connection that can't take turns by itself sets `concurrent = False`.

What else it needs it declares by an attribute `needs: SinkNeeds`; the exporter keeps to it, or refuses its own
configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from batchqueue_async._support.handlers import method_problem
from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from batchqueue_async.errors import SinkError

SinkOrdering = Literal["any", "key", "order"]


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


class Delivered(NamedTuple):
    """A note that the batches of a source are in, up to one.

    Attributes:
        key: the source, and its last batch.
        noted: when that was noted, in seconds since 1970; None where that is not known.
    """

    key: BatchKey
    noted: float | None


class StagedPart(NamedTuple):
    """What one attempt has staged, and nobody has published.

    Attributes:
        key: the batch; its source is empty where that is not known any more.
        part: which part of the batch.
        name: the attempt's name.
        state: "staged", or "taken" while it is being published.
        bytes: how large it is.
        changed: when it was changed last, in seconds since 1970; None where that is not known.
    """

    key: BatchKey
    part: int
    name: str
    state: str
    bytes: int
    changed: float | None


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


_CALLS = {"open": (), "send": ("batch",), "send_keyed": ("batch", "keys"), "send_prepared": ("prepared",), "close": ()}


def require_sink(sink: object, owner: str) -> Sink:
    """The same, if it can be called as a sink is; else each send would fail, and be repeated for ever.

    Example:
        >>> class Wrong:
        ...     async def open(self) -> None: ...
        ...     async def send(self) -> None: ...
        ...     async def close(self) -> None: ...
        >>> require_sink(Wrong(), "Exporter")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        batchqueue_async.errors.ConfigError: Exporter: sink=Wrong has a send that takes (); make it ...

    Args:
        sink: what is to be one.
        owner: whose it is, for the message.

    Raises:
        ConfigError: it can't.
    """
    if isinstance(sink, type):
        raise ConfigError(
            f"{owner}: sink={sink.__qualname__} is a class; make an object of it: {sink.__qualname__}(...)"
        )
    kind = type(sink).__qualname__
    if not isinstance(sink, Sink):
        raise ConfigError(f"{owner}: sink={kind} is not a sink; it needs async open(), send(batch) and close()")
    for name, parameters in _CALLS.items():
        unfit = method_problem(sink, name, *parameters)
        if unfit is not None:
            raise ConfigError(f"{owner}: sink={kind} {unfit.rule}; {unfit.way_out}")
    return sink


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkNeeds:
    """What a sink needs of whoever sends to it: its attribute `needs`, of the class or of the instance.

    Example:
        >>> class Samples:
        ...     needs = SinkNeeds(ordering="key", key=lambda sample: sample["series"], atomic=True)
        ...     async def open(self) -> None: ...
        ...     async def send(self, batch: Sequence[Any]) -> None: ...
        ...     async def close(self) -> None: ...
        >>> needs_of(Samples()).ordering
        'key'

    Attributes:
        ordering: `any`; `key`: records with one key must arrive in their order; `order`: all records must.
        key: from a record to its key, for `ordering="key"`; None leaves it to the exporter's configuration.
        concurrency: the most sends under way at once; None leaves it to the exporter's configuration.
        idempotent: a repetition with the same keys (or the same bytes) has no effect at the destination.
        max_records: the most records of one send.
        max_bytes: the most bytes of one send, as the exporter's queue weighs them.
        same_bytes: a repetition must be the same request, byte for byte: the same records, in the same batch, with the
            same keys. For sinks whose idempotency key stands for a whole batch. A batch that fails four times with
            errors of unknown classes is divided all the same, if the sink has `send_keyed`.
        atomic: a send is taken whole or not at all, its records in their order; then several records with one key may
            be in one send. Otherwise each send holds a key once.
    """

    ordering: SinkOrdering = "any"
    key: Callable[[Any], Hashable] | None = None
    concurrency: int | None = None
    idempotent: bool = False
    max_records: int | None = None
    max_bytes: int | None = None
    same_bytes: bool = False
    atomic: bool = False

    def __post_init__(self) -> None:
        if self.ordering not in get_args(SinkOrdering):
            raise ConfigError(
                f"SinkNeeds: ordering={self.ordering!r} is unknown; choose one of {', '.join(get_args(SinkOrdering))}"
            )
        for name in ("concurrency", "max_records", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"SinkNeeds: {name}={value!r} is below 1; give 1 or more, or None")
        if self.key is not None and self.ordering != "key":
            raise ConfigError(f"SinkNeeds: key is given with ordering={self.ordering!r}; it goes with 'key' alone")


_NO_NEEDS = SinkNeeds()


def needs_of(sink: Sink) -> SinkNeeds:
    """What the sink declares by its attribute `needs`; nothing special where it has none.

    Example:
        >>> class Plain:
        ...     async def open(self) -> None: ...
        ...     async def send(self, batch: Sequence[Any]) -> None: ...
        ...     async def close(self) -> None: ...
        >>> needs_of(Plain()).ordering
        'any'
    """
    needs = getattr(sink, "needs", None)
    return needs if isinstance(needs, SinkNeeds) else _NO_NEEDS


def replaces(sink: object) -> bool:
    """Whether the sink's transactions have a `clear`, which removes all rows of its table: its attribute `replaces`.

    Example:
        >>> from batchqueue_async.sinks.sqlite.sink import SqliteSink
        >>> replaces(SqliteSink("rows.db")), replaces(object())
        (True, False)
    """
    return getattr(sink, "replaces", False) is True


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
    """A sink that can encode and compress a batch ahead of its send, in another thread.

    Example:
        >>> import asyncio, zlib, batchqueue_async as bq
        >>> class Compressed:
        ...     concurrent = True
        ...     def __init__(self) -> None:
        ...         self.sent: list[bytes] = []
        ...     async def open(self) -> None: ...
        ...     def prepare(self, batch: Sequence[bytes], keys: Sequence[str]) -> bytes:
        ...         return zlib.compress(b"".join(batch))
        ...     async def send_prepared(self, prepared: bytes) -> None:
        ...         self.sent.append(prepared)
        ...     async def send(self, batch: Sequence[bytes]) -> None:
        ...         await self.send_prepared(self.prepare(batch, ()))
        ...     async def close(self) -> None: ...
        >>> async def main() -> list[bytes]:
        ...     sink = Compressed()
        ...     async with bq.Exporter(sink, bq.ExportConfig(split=bq.SplitPolicy(preparers=1))) as exporter:
        ...         await exporter.consume([b"to ", b"be"])
        ...     return [zlib.decompress(sent) for sent in sink.sent]
        >>> asyncio.run(main())
        [b'to be']
    """

    def prepare(self, batch: Sequence[Any], keys: Sequence[str], /) -> object:
        """Make what is sent of a batch; called in a thread, so it touches nothing that `send` does."""
        ...

    async def send_prepared(self, prepared: Any, /) -> SendResult | None:
        """Deliver what `prepare` made; as `send`."""
        ...


class Transaction(Protocol):
    """The sends of one batch, which take effect together or not at all.

    A send that raised makes the transaction one that can only be rolled back; one that returned `rejected` records left
    those out, each whole. Some transactions have two methods more: `try_send`, which raises `PermanentError` as `send`
    does, and then leaves nothing of its records and a transaction that goes on; and `check`, which raises it for what
    the commit would refuse, and has that checked at each `send` from then on.
    """

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


Refused = list[tuple[dict[str, Any], str]]
"""Rows that were refused, each with its reason."""


PASSES = 20
"""How often the rows that a table refuses are tried again after the others, as long as some of them go in."""


@runtime_checkable
class SiftingSink(StagingSink, Protocol):
    """A staging sink that can leave out rows which its destination refuses when a batch is published.

    Example:
        >>> from batchqueue_async.sinks.sqlite.sink import SqliteSink
        >>> isinstance(SqliteSink("rows.db"), SiftingSink)
        True
    """

    async def publish_sifted(
        self, key: BatchKey, attempts: Sequence[Attempt], bury: Callable[[Refused], None], /
    ) -> bool:
        """Publish but for the rows that are refused.

        `bury` is called in a thread with those, before the others are visible; not where the batch was in before.
        """
        ...


@runtime_checkable
class DeclaringSink(Sink, Protocol):
    """A sink of tables that takes the types of columns from a schema, where there is one, and not from values.

    Its transactions have a `declare` too, whose effect is part of them.

    Example:
        >>> from batchqueue_async.sinks.sqlite.sink import SqliteSink
        >>> isinstance(SqliteSink("rows.db"), DeclaringSink)
        True
    """

    async def declare(self, schema: Any, /) -> None:
        """See to it that there is a table for the columns of a `pyarrow.Schema`; called after `open`, often."""
        ...


@runtime_checkable
class LedgerSink(Protocol):
    """A sink, or a ledger beside one, whose notes of what is in can be listed and taken back.

    Example:
        >>> from batchqueue_async.sinks.sqlite.sink import SqliteSink
        >>> isinstance(SqliteSink("rows.db"), LedgerSink)
        True
    """

    async def delivered(self) -> list[Delivered]:
        """All notes, by source."""
        ...

    async def forget(self, sources: Sequence[str], /) -> int:
        """Take back the notes of sources, whose batches are delivered again if they come again; how many there were."""
        ...


@runtime_checkable
class PrunableSink(StagingSink, Protocol):
    """A staging sink that knows what is staged, so that what jobs left when they failed does not stay.

    Example:
        >>> from batchqueue_async.sinks.jsonl import JsonLinesSink
        >>> isinstance(JsonLinesSink("out"), PrunableSink)
        True
    """

    async def abandon(self, key: BatchKey, /) -> None:
        """Drop what was staged for a batch that never comes again; attempts under way drop their own at the end."""
        ...

    async def staged(self) -> list[StagedPart]:
        """What is staged, of all batches."""
        ...

    async def prune(self, older_than: float, /) -> list[BatchKey]:
        """Drop what was not changed for so many seconds; the batches of which something was dropped."""
        ...
