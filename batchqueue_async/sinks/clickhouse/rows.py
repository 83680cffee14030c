"""A batch as one INSERT with its rows behind it, each checked against the columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from batchqueue_async.errors import PermanentError, SinkError
from batchqueue_async.sinks._shared.batch_key import batch_key
from batchqueue_async.sinks._shared.records import lines
from batchqueue_async.sinks._shared.tabular import Rows, tabular
from batchqueue_async.sinks.base import SinkNeeds
from batchqueue_async.sinks.clickhouse.columns import MisfitError, fit_of
from batchqueue_async.sinks.http.formats import Body

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def quoted(name: str) -> str:
    r"""A name as ClickHouse's SQL takes it.

    Example:
        >>> quoted("a`b")
        '`a\\`b`'
    """
    escaped = name.replace("\\", "\\\\").replace("`", "\\`")
    return f"`{escaped}`"


def literal(value: object) -> str:
    r"""A setting's value as ClickHouse's SQL takes it.

    Example:
        >>> literal(1), literal("it's")
        ('1', "'it\\'s'")
    """
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int | float):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@dataclass(frozen=True, kw_only=True)
class InsertBody:
    r"""One INSERT: its settings, a token for the batch, and the rows that fit as lines of JSON.

    Example:
        >>> body = InsertBody(target="`t`", columns={"a": "UInt8"}, settings={"x": 1}, tokens=False)
        >>> body.encode([{"a": 1}, {"a": 300}], None).content
        b'INSERT INTO `t` SETTINGS x=1 FORMAT JSONEachRow\n{"a":1}\n'

    Attributes:
        target: the table, as SQL has it.
        columns: its columns with their types.
        settings: what goes with each INSERT.
        tokens: whether the keys of a batch become its token for deduplication.
        names: the names of the values in records that are tuples.
    """

    target: str
    columns: Mapping[str, str]
    settings: Mapping[str, Any]
    tokens: bool
    names: tuple[str, ...] | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/plain; charset=UTF-8"})
    compressed: bool = False
    # A token stands for a whole batch; an INSERT of more rows than make a block is not taken whole.
    needs: ClassVar[SinkNeeds] = SinkNeeds(same_bytes=True, max_records=500_000)

    def encode(self, batch: Sequence[Any], keys: Sequence[str] | None) -> Body:
        """Write the batch."""
        found, refused = tabular(batch, self.names)
        rows: dict[int, list[bytes]] = {}
        for each in found:
            for place, line in self._lines(each, refused):
                rows.setdefault(place, []).append(line)
        places = [place for place in sorted(rows) if place not in refused]  # a record of many rows is refused whole
        settings = dict(self.settings)
        if self.tokens and keys:
            settings["insert_deduplication_token"] = batch_key([keys[place] for place in places])
        shown = ", ".join(f"{name}={literal(value)}" for name, value in settings.items())
        statement = f"INSERT INTO {self.target}{f' SETTINGS {shown}' if shown else ''} FORMAT JSONEachRow\n"
        written = [line + b"\n" for place in places for line in rows[place]]
        return Body(statement.encode() + b"".join(written), places, refused)

    def _lines(self, rows: Rows, refused: dict[int, SinkError]) -> list[tuple[int, bytes]]:
        for name in rows.names:
            if name not in self.columns:
                reason = PermanentError(
                    f"table {self.target} has no column {name!r}, only {list(self.columns)}; add it by ALTER TABLE, or "
                    "send records without it",
                    error_type="refused",
                )
                refused |= dict.fromkeys(rows.places, reason)
                return []
        columns = [self._column(name, rows, at, refused) for at, name in enumerate(rows.names)]
        found: list[tuple[int, bytes]] = []
        for place, values in zip(rows.places, zip(*columns, strict=True), strict=True):
            if place not in refused:
                try:
                    found.append((place, lines([dict(zip(rows.names, values, strict=True))])[0]))
                except PermanentError as error:
                    refused[place] = error
        return found

    def _column(self, name: str, rows: Rows, at: int, refused: dict[int, SinkError]) -> list[Any]:
        values = [row[at] for row in rows.values]
        fit = fit_of(self.columns[name])
        if fit.column(values):
            return values
        taken: list[Any] = []
        for place, value in zip(rows.places, values, strict=True):
            try:
                taken.append(fit.take(value))
            except MisfitError as error:
                taken.append(None)
                refused[place] = PermanentError(
                    f"table {self.target}: column {name!r} of type {self.columns[name]} would change {error}; send "
                    "values that it holds, or make it another type by ALTER TABLE",
                    error_type="refused",
                )
        return taken
