"""What is in a table of PostgreSQL already: the last batch of each source, and the numbers of single records.

Two tables of the library's own, beside the target and written in the same transactions:

    batchqueue_sources(id, target, source, number, noted_at)   each source of a target, and the last batch of it
    batchqueue_keys(source, numbers)                           its records that are in, one row for each write

The source of a batch job never comes again; its note is kept for a month.

A record's key is its source and a number in it, as the exporter gives it: `{queue id}/{sequence}`. The numbers of one
write are few ranges, so that a write adds one row here, whatever the count of its records. An exclusion constraint
lets no number in twice: of two transactions with the same number the second waits for the first, and then fails.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.errors import ConfigError, PermanentError
from batchqueue_async.sinks.base import BatchKey, Delivered
from batchqueue_async.sinks.postgres.client import state_of
from batchqueue_async.sinks.postgres.types import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchqueue_async.sinks.postgres.client import Connection

RESERVED = frozenset({"batchqueue_sources", "batchqueue_keys", "batchqueue_stage"})
_OLDEST = 14
_EXCLUSION = "23P01"
_ONCE = "batchqueue_once"
_DATED = "SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass($1) AND attname = 'noted_at'"
_JOB = "job-"


class Numbered(NamedTuple):
    """The keys of a batch: the sources, and for each record its source and number.

    Example:
        >>> numbered(["q/1", "q/2", "r/1"])
        Numbered(sources=['q', 'r'], keys=[('q', 1), ('q', 2), ('r', 1)])
    """

    sources: list[str]
    keys: list[tuple[str, int]]


def in_a_row(keys: Sequence[str]) -> tuple[str, range] | None:
    """The source and the numbers of keys that follow each other, as an exporter's mostly do; None for others.

    Example:
        >>> in_a_row(["q/7", "q/8"]), in_a_row(["q/7", "q/9"]), in_a_row(["q/07", "q/8"])
        (('q', range(7, 9)), None, None)
    """
    source, _, first = keys[0].rpartition("/") if keys else ("", "", "")
    if not source or not _are_digits(first):
        return None
    start = int(first)
    numbers = range(start, start + len(keys))
    return (source, numbers) if list(keys) == [f"{source}/{number}" for number in numbers] else None


def numbered(keys: Sequence[str]) -> Numbered:
    """Take keys apart."""
    source = keys[0].rpartition("/")[0] if keys else ""
    # The usual batch has one source: its keys are taken apart all at once. Where what is left between the prefixes is
    # digits and nothing else, no key holds a line break of its own.
    digits = "\n".join(("", *keys)).split(f"\n{source}/") if source else []
    if len(digits) == len(keys) + 1 and not digits[0] and all(digits[1:]) and _are_digits("".join(digits)):
        return Numbered([source], list(zip(repeat(source), map(int, digits[1:]), strict=False)))
    found = [_numbered(key) for key in keys]
    return Numbered(list(dict.fromkeys(source for source, _ in found)), found)


def _numbered(key: str) -> tuple[str, int]:
    source, _, number = key.rpartition("/")
    if not source or not _are_digits(number):
        raise PermanentError(
            f"PostgreSQL sink: the key {key!r} is not of the form 'source/number', such as the exporter's; for other "
            "keys name a column of the table for them: PostgresSink(..., key_column='...')"
        )
    return source, int(number)


def _by_source(keys: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    every = list(keys)
    sources = {source for source, _ in every}
    if len(sources) == 1:
        return {sources.pop(): [number for _, number in every]}
    found: dict[str, list[int]] = {}
    for source, number in every:
        found.setdefault(source, []).append(number)
    return found


def _are_digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


def multirange(numbers: Iterable[int]) -> str:
    """Numbers as PostgreSQL's int8multirange.

    Example:
        >>> multirange([7, 1, 2, 3])
        '{[1,4),[7,8)}'
    """
    ordered = sorted(numbers)
    # As an exporter's usually are; asked by their count first, since between two runs of one there are 2^28 numbers.
    if ordered and ordered[-1] - ordered[0] == len(ordered) - 1 == len(set(ordered)) - 1:
        return f"{{[{ordered[0]},{ordered[-1] + 1})}}"
    ranges: list[list[int]] = []
    for number in ordered:
        if ranges and number <= ranges[-1][1]:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number, number + 1])
    return "{" + ",".join(f"[{start},{stop})" for start, stop in ranges) + "}"


class Ledger:
    """What is in one target; has no connection of its own."""

    def __init__(self, target: str, schema: str | None) -> None:
        self.target = target
        self.schema = schema
        prefix = "" if schema is None else f"{quoted(schema)}."
        self._sources = f"{prefix}batchqueue_sources"
        self._keys = f"{prefix}batchqueue_keys"
        self._ready = False
        self._dated = False  # an earlier version made the table without
        self._ids: dict[str, int] = {}

    async def open(self, connection: Connection) -> None:
        """Make the tables, unless they are there."""
        if self._ready:
            return
        version = connection.get_server_version().major
        if version < _OLDEST:
            raise ConfigError(
                f"PostgreSQL sink: the server is version {version}, and what is in is noted in multiranges, which "
                f"version {_OLDEST} has; use key_column, or a newer server"
            )
        if await connection.fetchval("SELECT to_regclass($1)", self._keys) is None:
            await self._create(connection)
        self._dated = await connection.fetchval(_DATED, self._sources) is not None
        self._ready = True

    async def _create(self, connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", self._keys)
            await connection.execute(
                f"CREATE TABLE IF NOT EXISTS {self._sources} (id integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY, "
                "target text NOT NULL, source text NOT NULL, number bigint NOT NULL DEFAULT -1, "
                "noted_at timestamptz, UNIQUE (target, source))"
            )
            # The source as a range, since GiST has no equality of integers without an extension.
            await connection.execute(
                f"CREATE TABLE IF NOT EXISTS {self._keys} (source integer NOT NULL, numbers int8multirange NOT NULL, "
                f"CONSTRAINT {_ONCE} "
                "EXCLUDE USING gist (numbers WITH &&, int4range(source, source, '[]') WITH &&))"
            )

    def forget(self) -> None:
        """Look for the tables again: a transaction in which they may have been made was undone."""
        self._ready = False
        self._ids.clear()

    # -- batches -------------------------------------------------------------------------------------------------

    async def is_delivered(self, connection: Connection, key: BatchKey) -> bool:
        """Whether the batch, or a later one of its source, is in. Locks the source until the transaction's end."""
        last = await connection.fetchval(
            f"INSERT INTO {self._sources} AS s (target, source) VALUES ($1, $2) "  # noqa: S608 - quoted
            "ON CONFLICT (target, source) DO UPDATE SET number = s.number RETURNING number",
            self.target,
            key.source,
        )
        return bool(last >= key.number)

    async def is_over(self, connection: Connection, key: BatchKey) -> bool:
        """Whether the batch, or a later one of its source, is in or was given up; locks nothing, and makes no table."""
        if await connection.fetchval("SELECT to_regclass($1)", self._sources) is None:
            return False
        last = await connection.fetchval(
            f"SELECT number FROM {self._sources} WHERE target = $1 AND source = $2",  # noqa: S608 - quoted
            self.target,
            key.source,
        )
        return last is not None and bool(last >= key.number)

    async def note_delivered(self, connection: Connection, key: BatchKey) -> None:
        """Note that the batch is in. Needs the transaction in which it was asked for."""
        now = ", noted_at = now()" if self._dated else ""
        await connection.execute(
            f"UPDATE {self._sources} SET number = $3{now} WHERE target = $1 AND source = $2",  # noqa: S608 - quoted
            self.target,
            key.source,
            key.number,
        )
        if self._dated and key.source.startswith(_JOB):
            await connection.execute(
                f"DELETE FROM {self._sources} WHERE target = $1 AND starts_with(source, $2) "  # noqa: S608 - quoted
                "AND noted_at < now() - interval '30 days'",
                self.target,
                _JOB,
            )

    async def delivered(self, connection: Connection) -> list[Delivered]:
        """The notes of batches, by source."""
        await self.open(connection)
        noted = "extract(epoch FROM noted_at)::float8" if self._dated else "NULL::float8"
        rows = await connection.fetch(
            f"SELECT source, number, {noted} FROM {self._sources} "  # noqa: S608 - quoted
            "WHERE target = $1 AND number >= 0 ORDER BY source",
            self.target,
        )
        return [Delivered(BatchKey(source, number), at) for source, number, at in rows]

    async def take_back(self, connection: Connection, sources: Sequence[str]) -> int:
        """Take back the notes of the batches of sources; those of single records stay."""
        await self.open(connection)
        done = await connection.execute(
            f"UPDATE {self._sources} SET number = -1 "  # noqa: S608 - quoted
            "WHERE target = $1 AND source = ANY($2::text[]) AND number >= 0",
            self.target,
            list(sources),
        )
        return int(done.rpartition(" ")[2])

    # -- records -------------------------------------------------------------------------------------------------

    async def learn(self, connection: Connection, sources: Iterable[str]) -> None:
        """Learn the ids of sources; outside of a transaction, so that a new one is there for everyone at once."""
        for source in sources:
            if source not in self._ids:
                self._ids[source] = await connection.fetchval(
                    f"INSERT INTO {self._sources} AS s (target, source) VALUES ($1, $2) "  # noqa: S608 - quoted
                    "ON CONFLICT (target, source) DO UPDATE SET source = s.source RETURNING id",
                    self.target,
                    source,
                )

    def taking(self, keys: Iterable[tuple[str, int]]) -> list[str]:
        """The statements that note that records are in; they fail with `is_taken` where one of them is already."""
        return [self._taking(source, multirange(numbers)) for source, numbers in _by_source(keys).items()]

    def taking_range(self, source: str, numbers: range) -> list[str]:
        """The same for records whose numbers follow each other."""
        return [self._taking(source, f"{{[{numbers.start},{numbers.stop})}}")]

    def _taking(self, source: str, numbers: str) -> str:
        return f"INSERT INTO {self._keys} VALUES ({self._ids[source]}, '{numbers}')"  # noqa: S608 - numbers

    async def run(self, connection: Connection, statements: Sequence[str]) -> None:
        """Note that records are in. Needs a transaction, which is of no use where one of them is already."""
        if statements:
            await connection.execute("; ".join(statements))

    async def seen(self, connection: Connection, keys: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
        """Which of the records are in."""
        found: set[tuple[str, int]] = set()
        for source, numbers in _by_source(keys).items():
            rows = await connection.fetch(
                "SELECT n FROM unnest($2::bigint[]) n WHERE EXISTS ("  # noqa: S608 - quoted
                f"SELECT FROM {self._keys} WHERE source = $1 AND numbers @> n AND numbers && $3::text::int8multirange)",
                self._ids[source],
                numbers,
                multirange(numbers),
            )
            found.update((source, number) for (number,) in rows)
        return found


def is_taken(error: BaseException) -> bool:
    """Whether an error says that a record of the write is in already: find out what is in, and write the rest."""
    return state_of(error) == _EXCLUSION and getattr(error, "constraint_name", None) == _ONCE
