"""Whether a write is in already, and whether that is certain: the notes that make a repetition have no effect.

The key of a write is a source and the batch's number. The source is the query's id, which lives in its checkpoint, so
that a new checkpoint never has the notes of an old one; with a `source=` of the user's it is that name and the id. The
first checkpoint under a name claims it. Another one is refused, because nobody could say which of its batches are in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import quote

from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks.base import BatchKey

if TYPE_CHECKING:
    from batchqueue_async.spark.route import Route
    from batchqueue_async.spark.writes.ledger import Ledger

IS_IN = "it is in already"
"""Why a write is skipped."""


class Notes(Protocol):
    """Where it is noted what is in."""

    async def has(self, key: BatchKey) -> bool:
        """Whether the batch, or a later one of its source, is in."""
        ...

    async def add(self, key: BatchKey) -> None:
        """Note that it is in."""
        ...


class LedgerNotes:
    """The notes of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def has(self, key: BatchKey) -> bool:
        """Whether the batch is in."""
        return self._ledger.is_delivered(key)

    async def add(self, key: BatchKey) -> None:
        """Note the batch."""
        self._ledger.note(key)


class TransactionNotes:
    """The notes that a sink makes in its transactions."""

    def __init__(self, route: Route) -> None:
        self._route = route

    async def has(self, key: BatchKey) -> bool:
        """Whether the batch is in: then the sink begins no transaction for it."""
        async with self._route.turn:
            transaction = await self._route.begin(key)
            if transaction is not None:
                await transaction.rollback()
        return transaction is None

    async def add(self, key: BatchKey) -> None:
        """Note the batch, by a transaction without rows."""
        async with self._route.turn:
            transaction = await self._route.begin(key)
            if transaction is not None:
                await transaction.commit()


class WriteSource(NamedTuple):
    """Whose batches a write belongs to.

    Attributes:
        name: the source of the batch's key.
        claim: the user's name for it; None where the query's id is the name.
        checkpoint: the query's id; None where Spark does not say it.
    """

    name: str
    claim: str | None
    checkpoint: str | None


def source_of(query: str | None, claim: str | None) -> WriteSource | None:
    """The source of a query's batches; None: nothing names it.

    Example:
        >>> source_of("8f14", None).name, source_of("8f14", "orders").name, source_of(None, "orders").name
        ('8f14', 'orders@8f14', 'orders')
    """
    if claim is None:
        return None if query is None else WriteSource(query, None, query)
    return WriteSource(claim if query is None else f"{claim}@{query}", claim, query)


def write_key(source: WriteSource, batch: int, place: int, part: str | None, *, sink: str = "") -> BatchKey:
    """The key of a write: the first one of a batch has the source's own name.

    Args:
        source: whose batch it is.
        batch: its number.
        place: the write's place among those of the batch into its destination.
        part: the user's name for it, in the place's stead.
        sink: the name of the sink, where several write their notes into one ledger; "" where the ledger is the
            destination's own.

    Example:
        >>> source = source_of("8f14", None)
        >>> [str(write_key(source, 7, place, None)) for place in (0, 1)], str(write_key(source, 7, 0, "even"))
        (['8f14/7', '8f14/write-1/7'], '8f14/part-even/7')
        >>> str(write_key(source, 7, 0, None, sink="to lines"))
        '8f14/to-to%20lines/7'
    """
    name = f"{source.name}/to-{quote(sink, safe='')}" if sink else source.name
    if part is not None:
        return BatchKey(f"{name}/part-{part}", batch)
    return BatchKey(f"{name}/write-{place}" if place else name, batch)


async def claim_source(what: str, notes: Notes, source: WriteSource) -> None:
    """See to it that the user's name for a source belongs to this checkpoint alone.

    Raises:
        ConfigError: another checkpoint has it.
    """
    if source.claim is None or source.checkpoint is None:
        return
    mine = BatchKey(f"{source.name}/claim", 0)
    anyone = BatchKey(f"{source.claim}/claim", 0)
    # In this order: a crash between the two notes leaves a name that is ours and looks free, never one that is lost.
    if not await notes.has(mine):
        if await notes.has(anyone):
            raise ConfigError(
                f"{what}: source={source.claim!r} belongs to another checkpoint, so that nobody can say which batches "
                f"of this one (query {source.checkpoint}) are in; if it is another query, or the old checkpoint is "
                "gone, give this one a source of its own, such as "
                f"source='{source.claim}-2', and all of its batches are delivered"
            )
        await notes.add(mine)
    if not await notes.has(anyone):
        await notes.add(anyone)


async def check_repetition(what: str, notes: Notes, source: WriteSource, key: BatchKey) -> None:
    """A write is in by its key: see to it that it is the same one.

    Raises:
        ConfigError: it may be another.
    """
    # Spark repeats the last batch of a query, and no earlier one.
    if not await notes.has(key._replace(number=key.number + 1)):
        return
    if source.checkpoint is None:
        raise ConfigError(
            f"{what}: batch {key.number} of source={source.claim!r} looks like a repetition, but later ones are in: "
            "its checkpoint is new or another one, and skipping would lose its rows; give the query a source of its "
            f"own, such as source='{source.claim}-2', and all of its batches are delivered"
        )
    raise rewound(what, key)


def rewound(what: str, key: BatchKey) -> ConfigError:
    """The error of a batch that is in, and later ones too: its checkpoint is older than what was delivered.

    Example:
        >>> str(rewound("DriverSink 'rows'", BatchKey("8f14", 7))).partition(":")[0]
        "DriverSink 'rows'"
    """
    return ConfigError(
        f"{what}: batch {key.number} looks like a repetition, but later ones of the query are in: its checkpoint was "
        "restored from a copy or changed by hand, so that its batches may hold other rows than those that are in, and "
        "skipping would lose them; start the query with a new checkpoint, or take back what the destination has of "
        f"these batches and run: batchqueue spark ledger reset TARGET --source {key.source}"
    )
