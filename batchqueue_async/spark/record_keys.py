"""The key of each record of a batch: the same when Spark computes the batch again, in whatever order its rows come.

Spark promises which rows a repeated batch has, and no order of them. So a key is made of what a row holds: of the
columns that the user names, or of all of its content. Rows with the same content are numbered, since there may be
several of them; they are the same, so that it does not matter which is which.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks._shared.records import is_table, row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.sinks.base import BatchKey

KeyBy = Literal["content", "position"] | tuple[str, ...]
"""What the keys of records are made of: all of a row, its place in the batch, or the named columns."""

_DIGEST = 16
_encoder = msgspec.msgpack.Encoder(enc_hook=repr, order="deterministic", decimal_format="string")


def check_key_by(owner: str, key: object) -> KeyBy:
    """What the keys are made of, from what a user gave.

    Example:
        >>> check_key_by("sink", None), check_key_by("sink", ["id"])
        ('content', ('id',))
    """
    if key is None or key == "content":
        return "content"
    if key == "position":
        return "position"
    if isinstance(key, list | tuple) and key:
        names = cast("Sequence[object]", key)
        if all(isinstance(each, str) for each in names):
            return tuple(map(str, names))
    raise ConfigError(
        f"{owner}: key={key!r} is not a list of columns; give key=['id'], None for the content of each row, or "
        "'position' where the query sorts its rows"
    )


def digest(value: Any) -> bytes:
    """What a row holds, in 16 bytes.

    Example:
        >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})
        True
    """
    if is_table(value):
        value = value.to_pylist()
    return hashlib.blake2b(_encoder.encode(value), digest_size=_DIGEST).digest()


class RecordKeys:
    """Gives the keys of one batch, in the order in which its rows are sent.

    Example:
        >>> from batchqueue_async.sinks.base import BatchKey
        >>> keys = RecordKeys(BatchKey("query", 3), ("id",), None)
        >>> keys.of([{"id": 7, "v": "x"}])
        ['query/3/7']
    """

    def __init__(self, key: BatchKey, by: KeyBy, columns: Sequence[str] | None) -> None:
        self._prefix = f"{key}/"
        self._by = by
        self._columns = columns
        self._sent = 0
        self._seen: dict[bytes, int] = {}

    def of(self, rows: Sequence[Any]) -> list[str]:
        """The keys of the next rows."""
        by = self._by
        if by == "position":
            start, self._sent = self._sent, self._sent + len(rows)
            return [f"{self._prefix}{number}" for number in range(start, start + len(rows))]
        make: Callable[[Any], str] = self._by_content if by == "content" else self._by_columns
        return [self._prefix + make(each) for each in rows]

    def _by_content(self, record: Any) -> str:
        found = digest(record)
        number = self._seen.get(found, 0)
        self._seen[found] = number + 1
        return f"{found.hex()}-{number}" if number else found.hex()

    def _by_columns(self, record: Any) -> str:
        named = row(record, self._columns)
        try:
            values = [named[name] for name in self._by]
        except KeyError as error:
            raise ConfigError(
                f"key={list(self._by)}: the rows have no column {error.args[0]!r}; they have {list(named)}"
            ) from None
        if len(values) == 1 and type(values[0]) in {int, str}:
            return str(values[0])
        return digest(values).hex()
