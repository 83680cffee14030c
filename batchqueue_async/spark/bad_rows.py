"""Rows that can't be delivered, ever: on their way to the dead letters, so that the rest of their batch goes on."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, PermanentError
from batchqueue_async.sinks._shared.records import is_table
from batchqueue_async.sinks.base import SendResult, Sink
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.sqlite.sink import SqliteSink
from batchqueue_async.spark.record_keys import digest
from batchqueue_async.spark.requirements import need
from batchqueue_async.spark.route import SinkRoute

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MOST = 10_000


class Letters(Protocol):
    """What takes dead letters."""

    async def send(self, records: list[dict[str, Any]]) -> None:
        """Keep bad rows; durable when this returns, or with the batch."""
        ...


class DeadLetters:
    """Where bad rows go: a sink, opened with the first of them.

    Each is a record of four fields: `sink`, `batch`, `reason` and `row`.
    """

    def __init__(self, sink: Sink) -> None:
        self._route = SinkRoute(sink)
        self._opened = False

    async def send(self, records: list[dict[str, Any]]) -> None:
        """Keep bad rows; durable when this returns, as far as the sink is."""
        await self._route.open()  # anew where the loop that it was open on is gone, or is the parent process's
        self._opened = True
        check_kept(await self._route.send(records, None))

    async def close(self) -> None:
        """Close the sink."""
        if self._opened:
            self._opened = False
            await self._route.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return DeadLetters, (self._route.sink,)


def check_kept(result: SendResult | None) -> None:
    """Fail where a sink for dead letters has not taken all of them: a row that is in neither place is lost.

    Example:
        >>> check_kept(SendResult(rejected={0: PermanentError("too long")}))
        Traceback (most recent call last):
        ...
        batchqueue_async.errors.PermanentError: the sink for dead letters rejected 1 of them; the first: too long; ...
    """
    if result is not None and result.rejected:
        first = next(iter(result.rejected.values()))
        raise PermanentError(
            f"the sink for dead letters rejected {len(result.rejected)} of them; the first: {first}; "
            "give them one that takes any row, such as JSON lines"
        )


def dead_letters_at(owner: str, on_bad_row: str, target: object, rows_into: object) -> DeadLetters | None:
    """Where bad rows go, of the rows for a sink or handler; None: they fail their batch."""
    check_on_bad_row(owner, on_bad_row, given=target is not None)
    if target is None:
        return None
    if isinstance(target, str | os.PathLike):
        return DeadLetters(JsonLinesSink(os.fspath(cast("str", target))))
    if not isinstance(target, Sink):
        raise ConfigError(
            f"{owner}: dead_letters of type {type(target).__qualname__} is neither a path nor a sink; give one"
        )
    check_apart(owner, rows_into, target)
    return DeadLetters(target)


def check_on_bad_row(owner: str, on_bad_row: str, *, given: bool) -> None:
    """Refuse what contradicts itself; `given` says whether there is a place for dead letters."""
    if on_bad_row not in {"fail", "dead_letter"}:
        raise ConfigError(f"{owner}: on_bad_row={on_bad_row!r} is unknown; choose 'fail' or 'dead_letter'")
    if (on_bad_row == "dead_letter") != given:
        raise ConfigError(
            f"{owner}: on_bad_row={on_bad_row!r} does not go with dead_letters={'a target' if given else None}; give "
            "on_bad_row='dead_letter' and dead_letters='bad.jsonl' (or a sink), or neither"
        )


def check_apart(owner: str, target: object, letters: object) -> None:
    """Refuse dead letters in the SQLite file of the rows: they come first, and the rows' transaction locks it."""
    if isinstance(target, SqliteSink) and isinstance(letters, SqliteSink) and _same(target.path, letters.path):
        raise ConfigError(
            f"{owner}: dead_letters={str(letters.path)!r} is the database of the rows too, which is locked while they "
            "come in; give the dead letters a file of their own"
        )


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


class BadRows:
    """The bad rows of one batch, through all attempts at it.

    Attributes:
        count: how many are in the dead letters.
        check_at_once: whether a transaction is to check at each send what it would check at its commit alone.
    """

    def __init__(self, sink: str, batch: str, letters: Letters) -> None:
        self.count = 0
        self.check_at_once = False
        self._sink = sink
        self._batch = batch
        self._letters = letters
        self._waiting: list[dict[str, Any]] = []
        self._held: list[tuple[Any, str]] = []
        self._refused = 0
        self._known: dict[bytes, str] = {}
        self._buried: Counter[bytes] = Counter()
        self._again: Counter[bytes] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether there are so many that it is not the rows that are wrong."""
        return max(len(self._known), self._refused) >= _MOST

    def begin_attempt(self) -> None:
        """All rows of the batch come once more; what was found bad by the sink is known when it comes.

        What an earlier attempt gave to the dead letters, before its commit failed, is not given to them again.
        """
        self._waiting.clear()
        self._held.clear()
        self._refused = 0
        self._again = self._buried.copy()

    @property
    def known(self) -> int:
        """How many different rows are known to be bad before they are sent."""
        return len(self._known)

    def add(self, rows: Sequence[Any], reason: str, *, come_again: bool = False) -> None:
        """Note rows that are not in; those that come again, in another attempt at the batch, are known from now on."""
        for each in plain_rows(rows):
            if come_again:
                self._known[digest(each)] = reason
            else:
                self._keep(each, reason)
                self._refused += 1

    def hold(self, record: Any, reason: str) -> None:
        """Note a record, of one row, that may go in when others have gone in which came later."""
        # A slice would keep all of the record batch that it is of.
        self._held.append((record.take([0]) if is_table(record) else record, reason))
        self._refused += 1

    @property
    def held(self) -> int:
        """How many rows are to be tried again."""
        return len(self._held)

    def take_held(self) -> list[Any]:
        """The records that are to be tried again; those that are refused once more are held once more."""
        held, self._held = self._held, []
        self._refused -= len(held)
        return with_tables_joined([record for record, _ in held])

    def give_up_held(self) -> None:
        """What is still held is bad."""
        for record, reason in self._held:
            for each in plain_rows([record]):
                self._keep(each, reason)
        self._held.clear()

    def refuse(self, values: dict[str, Any], reason: str) -> None:
        """Note a row that is not what its type asks for."""
        self._keep(values, reason)

    def without(self, rows: list[Any]) -> list[Any]:
        """The rows but for those that are known to be bad; these are kept for the dead letters."""
        if not self._known:
            return rows
        return [left for each in rows for left in self._good(each)]

    def _good(self, record: Any) -> list[Any]:
        if not is_table(record):
            reason = self._known.get(digest(record))
            if reason is None:
                return [record]
            self._keep(record, reason)
            return []
        reasons = [self._known.get(digest(each)) for each in record.to_pylist()]
        if not any(reasons):
            return [record]
        for place, reason in enumerate(reasons):
            if reason is not None:
                self._keep(record.slice(place, 1).to_pylist()[0], reason)
        left = record.take([place for place, reason in enumerate(reasons) if reason is None])
        return [left] if left.num_rows else []

    def _keep(self, record: Any, reason: str) -> None:
        self._waiting.append(as_letter(self._sink, self._batch, record, reason))

    async def bury(self) -> None:
        """Give the bad rows to the dead letters, before the rest of the batch is committed."""
        waiting, self._waiting = [each for each in self._waiting if self._is_new(each)], []
        if waiting:
            await self._letters.send(waiting)
            self.count += len(waiting)
            self._buried.update(map(digest, waiting))
            log.warning("spark_rows_dead", sink=self._sink, batch=self._batch, rows=len(waiting))

    def _is_new(self, letter: dict[str, Any]) -> bool:
        found = digest(letter)
        self._again[found] -= 1
        return self._again[found] < 0


def as_letter(sink: str, batch: str, record: Any, reason: str) -> dict[str, Any]:
    """The record of a dead letter; numbers that are not finite, which JSON has not, are texts in it.

    Example:
        >>> as_letter("rows", "8f14/7", {"v": None}, "no value")
        {'sink': 'rows', 'batch': '8f14/7', 'reason': 'no value', 'row': {'v': None}}
        >>> as_letter("rows", "8f14/7", {"v": [float("nan")]}, "not a number")["row"]
        {'v': ['nan']}
    """
    row = _finite(msgspec.to_builtins(record, enc_hook=repr, builtin_types=(), str_keys=True))
    return {"sink": sink, "batch": batch, "reason": reason, "row": row}


def _finite(value: Any) -> Any:
    """A plain value with what is not finite as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_finite(each) for each in cast("Sequence[Any]", value)]
    return value


def plain_rows(rows: Sequence[Any]) -> list[Any]:
    """Rows, with those of Arrow record batches one by one."""
    return [row for each in rows for row in (each.to_pylist() if is_table(each) else [each])]


def halves(rows: list[Any]) -> list[list[Any]]:
    """Rows in two parts; in one, where there is one row.

    Example:
        >>> halves([1, 2, 3]), halves([1])
        ([[1], [2, 3]], [[1]])
    """
    if len(rows) > 1:
        return [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    if rows and is_table(rows[0]) and rows[0].num_rows > 1:
        middle = rows[0].num_rows // 2
        return [[rows[0].slice(0, middle)], [rows[0].slice(middle)]]
    return [rows]


def with_tables_joined(records: Sequence[Any]) -> list[Any]:
    """Records, with Arrow record batches of one schema that follow each other as one: a table may look at all at once.

    Example:
        >>> import pyarrow
        >>> one = pyarrow.RecordBatch.from_pydict({"v": [1]})
        >>> [found.num_rows for found in with_tables_joined([one, one, one.rename_columns(["w"])])]
        [2, 1]
    """
    found: list[list[Any]] = []
    for each in records:
        alike = found and is_table(each) and is_table(found[-1][0]) and found[-1][0].schema.equals(each.schema)
        if alike:
            found[-1].append(each)
        else:
            found.append([each])
    return [run[0] if len(run) == 1 else _joined(run) for run in found]


def _joined(batches: list[Any]) -> Any:
    arrow = need("pyarrow")
    return arrow.Table.from_batches(batches).combine_chunks().to_batches()[0]
