"""Records as rows with the same columns, which is what a table takes in bulk; each row knows its record."""

from __future__ import annotations

from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from batchqueue_async.errors import PermanentError, SinkError
from batchqueue_async.sinks._shared.records import is_table, row, table_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Rows(NamedTuple):
    """Rows of the same columns.

    Attributes:
        names: the columns.
        values: the rows, each with one value for each column.
        places: where in the batch the record of each row is; an Arrow record batch is one record of many rows.
        columns: the values once more, column by column, where they came so; else None.
    """

    names: tuple[str, ...]
    values: Sequence[Sequence[Any]]
    places: Sequence[int]
    columns: Sequence[Sequence[Any]] | None = None

    def without(self, places: set[int]) -> Rows:
        """The rows of the other records."""
        kept = [index for index, place in enumerate(self.places) if place not in places]
        return Rows(self.names, [self.values[index] for index in kept], [self.places[index] for index in kept])

    def part(self, start: int, stop: int) -> Rows:
        """Some of the rows."""
        return Rows(self.names, self.values[start:stop], self.places[start:stop])

    def some(self, indexes: Sequence[int]) -> Rows:
        """The rows of these indexes."""
        return Rows(self.names, [self.values[at] for at in indexes], [self.places[at] for at in indexes])


def tabular(batch: Sequence[Any], columns: Sequence[str] | None) -> tuple[list[Rows], dict[int, SinkError]]:
    """The records by their columns, and those that are no rows with the reason.

    Example:
        >>> rows, refused = tabular([{"a": 1, "b": 2}, {"a": 3, "b": 4}, (5,)], None)
        >>> [(each.names, each.values) for each in rows], list(refused)
        ([(('a', 'b'), [(1, 2), (3, 4)])], [2])
    """
    kinds = set(map(type, batch))
    # The two usual forms are told apart in C, since a sink for tables spends its time here.
    if kinds == {dict}:
        names: tuple[str, ...] = tuple(batch[0])
        if names and set(map(len, batch)) == {len(names)}:
            with suppress(KeyError):
                return [Rows(names, list(map(values_of(names), batch)), range(len(batch)))], {}
    elif kinds <= {tuple, list} and columns and set(map(len, batch)) == {len(columns)}:
        return [Rows(tuple(columns), batch, range(len(batch)))], {}
    return _sorted(batch, columns)


def values_of(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """What makes a row with all of these columns a tuple."""
    if len(names) == 1:
        (name,) = names
        return lambda record: (record[name],)
    return itemgetter(*names)


def _sorted(batch: Sequence[Any], columns: Sequence[str] | None) -> tuple[list[Rows], dict[int, SinkError]]:
    found: list[Rows] = []
    refused: dict[int, SinkError] = {}
    shapes: dict[tuple[str, ...], tuple[list[tuple[Any, ...]], list[int]]] = {}
    for place, record in enumerate(batch):
        if is_table(record):
            by_column = table_columns(record)
            values = list(zip(*by_column, strict=True))
            found.append(Rows(tuple(record.schema.names), values, [place] * len(values), by_column))
            continue
        try:
            named = row(record, columns)
        except PermanentError as error:
            refused[place] = error
            continue
        if not named:
            refused[place] = PermanentError("a record has no columns")
            continue
        values, places = shapes.setdefault(tuple(named), ([], []))
        values.append(tuple(named.values()))
        places.append(place)
    found += [Rows(names, values, places) for names, (values, places) in shapes.items()]
    return [rows for rows in found if rows.values], refused
