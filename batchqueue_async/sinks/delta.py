"""Rows in a Delta Lake table, each batch in one commit that carries its key. Needs `[delta]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import BatchQueueError, ConfigError, PermanentError, RetryableError
from batchqueue_async.sinks._shared.commits import CommitSink, SchemaMode
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import redacted, resolve_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret


class DeltaSink(CommitSink):
    """Appends records to a Delta table, which is made from the first ones; exactly once with keys.

    Each commit carries the source and the number of the last record, or of the batch, as the table's own transaction
    identifiers, so that whoever reads the log can tell; a repetition finds them and is skipped. Batches of a source
    have to come in order, one at a time, which the exporter sees to. A value that its column would change is refused by
    record; `schema="add"` adds columns.

    Example:
        >>> DeltaSink("s3://lake/rows", storage_options={"aws_secret_access_key": "env:SECRET"})
        DeltaSink('s3://lake/rows')
    """

    extra = "delta"

    def __init__(
        self,
        uri: str,
        *,
        columns: Sequence[str] | None = None,
        schema: SchemaMode = "strict",
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str | Secret] | None = None,
    ) -> None:
        """Say which table.

        Args:
            uri: a local path, or a URL of an object store, such as `s3://bucket/table`.
            columns: the names of the values in records that are tuples.
            schema: "strict" refuses records with columns that the table has not, "add" adds the columns.
            partition_by: the columns by which a table that is made is partitioned.
            storage_options: what the store needs; a value may be `env:NAME` or `file:/path`.
        """
        super().__init__(columns=columns, schema=schema)
        self.uri = uri
        self.partition_by = tuple(partition_by)
        self._options = dict(storage_options or {})
        self._table: Any = None

    def __repr__(self) -> str:
        return f"DeltaSink({redacted(self.uri)!r})"

    def _check(self) -> None:
        require("deltalake", self.extra)

    def _storage(self) -> dict[str, str]:
        return {name: resolve_option(value) for name, value in self._options.items()}

    def _current(self) -> Any:
        """The table as it is now; None where there is none."""
        delta = require("deltalake", self.extra)
        storage = self._storage()
        if self._table is None:
            if not delta.DeltaTable.is_deltatable(self.uri, storage):
                return None
            self._table = delta.DeltaTable(self.uri, storage_options=storage)
        else:
            self._table.update_incremental()
        return self._table

    def _schema(self) -> Any:
        table = self._current()
        return None if table is None else require("pyarrow", self.extra).schema(table.schema().to_arrow())

    def _last(self, source: str) -> int:
        table = self._current()
        found = None if table is None else table.transaction_version(source)
        return -1 if found is None else int(found)

    def _append(self, table: Any, mark: tuple[str, int] | None) -> None:
        delta = require("deltalake", self.extra)
        known = self._current()
        if table is None:
            if known is None:
                return  # a batch of nothing, into no table
            table = require("pyarrow", self.extra).schema(known.schema().to_arrow()).empty_table()
        transactions = [] if mark is None else [delta.Transaction(mark[0], mark[1])]
        delta.write_deltalake(
            self.uri if known is None else known,
            table,
            mode="append",
            partition_by=list(self.partition_by) or None if known is None else None,
            schema_mode="merge" if self.schema == "add" and known is not None else None,
            storage_options=self._storage() or None,
            # Another writer's commit of the same source must not be written over: a retry looks again.
            commit_properties=delta.CommitProperties(app_transactions=transactions),
        )

    def _error(self, error: Exception) -> Exception:
        if isinstance(error, BatchQueueError):
            return error
        known = require("deltalake.exceptions", self.extra)
        self._table = None  # look at it anew
        where = f"{self!r}: {type(error).__name__}"
        if isinstance(error, known.CommitFailedError | known.TableNotFoundError):
            return RetryableError(where, error_type="conflict")
        if isinstance(error, known.SchemaMismatchError):
            return PermanentError(f"{where}; the rows do not fit the table", error_type="refused")
        if isinstance(error, known.DeltaProtocolError):
            return ConfigError(f"{where}; the table needs a newer deltalake")
        if isinstance(error, OSError | known.DeltaError):
            return RetryableError(where, error_type="server")
        return error
