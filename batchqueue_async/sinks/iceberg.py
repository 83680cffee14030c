"""Rows in an Apache Iceberg table, each batch in one commit that carries its key. Needs `[iceberg]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import AuthError, BatchQueueError, ConfigError, PermanentError, RetryableError
from batchqueue_async.sinks._shared.commits import CommitSink, SchemaMode
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import resolve_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchqueue_async.sinks._shared.secrets import Secret

_MARK = "batchqueue.last."


class IcebergSink(CommitSink):
    """Appends records to an Iceberg table, which is made from the first ones; exactly once with keys.

    Each commit sets a property of the table, `batchqueue.last.<source>`, to the number of the last record or of the
    batch, together with the rows; a repetition finds it and is skipped. Batches of a source have to come in order, one
    at a time, which the exporter sees to. A value that its column would change is refused by record; `schema="add"`
    adds columns.

    Example:
        >>> IcebergSink("lake.rows", catalog={"type": "sql", "uri": "sqlite:////var/lib/catalog.db"})
        IcebergSink('lake.rows')
    """

    extra = "iceberg"

    def __init__(
        self,
        table: str,
        *,
        catalog: Mapping[str, str | Secret],
        name: str = "default",
        columns: Sequence[str] | None = None,
        schema: SchemaMode = "strict",
    ) -> None:
        """Say which table of which catalog.

        Args:
            table: `namespace.table`; both are made where they are not there.
            catalog: the catalog's properties, as pyiceberg has them; a value may be `env:NAME` or `file:/path`.
            name: the catalog's name.
            columns: the names of the values in records that are tuples.
            schema: "strict" refuses records with columns that the table has not, "add" adds the columns.
        """
        super().__init__(columns=columns, schema=schema)
        if "." not in table:
            raise ConfigError(f"Iceberg sink: table={table!r} has no namespace; give 'namespace.table'")
        self.table = table
        self._name = name
        self._properties = dict(catalog)
        self._catalog: Any = None
        self._loaded: Any = None

    def __repr__(self) -> str:
        return f"IcebergSink({self.table!r})"

    def _check(self) -> None:
        require("pyiceberg.catalog", self.extra)

    def _open_catalog(self) -> Any:
        if self._catalog is None:
            properties = {key: resolve_option(value) for key, value in self._properties.items()}
            self._catalog = require("pyiceberg.catalog", self.extra).load_catalog(self._name, **properties)
        return self._catalog

    def _current(self) -> Any:
        """The table as it is now; None where there is none."""
        catalog = self._open_catalog()
        if self._loaded is None:
            if not catalog.table_exists(self.table):
                return None
            self._loaded = catalog.load_table(self.table)
        else:
            self._loaded.refresh()
        return self._loaded

    def _schema(self) -> Any:
        table = self._current()
        return None if table is None else self._arrow_schema(table)

    def _arrow_schema(self, table: Any) -> Any:
        pa = require("pyarrow", self.extra)
        found = require("pyiceberg.io.pyarrow", self.extra).schema_to_pyarrow(table.schema(), include_field_ids=False)
        return pa.schema(found)

    def _last(self, source: str) -> int:
        table = self._current()
        return -1 if table is None else int(table.properties.get(f"{_MARK}{source}", -1))

    def _append(self, table: Any, mark: tuple[str, int] | None) -> None:
        known = self._current()
        if known is None:
            if table is None:
                return  # a batch of nothing, into no table
            known = self._create(table.schema)
        with known.transaction() as transaction:
            if table is not None:
                if self.schema == "add" and set(table.schema.names) - set(known.schema().column_names):
                    with transaction.update_schema() as update:
                        update.union_by_name(table.schema)
                transaction.append(table)
            if mark is not None:
                transaction.set_properties({f"{_MARK}{mark[0]}": str(mark[1])})

    def _create(self, schema: Any) -> Any:
        catalog = self._open_catalog()
        catalog.create_namespace_if_not_exists(self.table.rpartition(".")[0])
        self._loaded = catalog.create_table_if_not_exists(self.table, schema=schema)
        return self._loaded

    def _error(self, error: Exception) -> Exception:
        if isinstance(error, BatchQueueError):
            return error
        known = require("pyiceberg.exceptions", self.extra)
        self._catalog = self._loaded = None  # look at it anew
        where = f"{self!r}: {type(error).__name__}"
        if isinstance(error, known.UnauthorizedError | known.ForbiddenError | known.AuthorizationExpiredError):
            return AuthError(f"{where}; check the catalog's credentials")
        if isinstance(error, known.CommitFailedException | known.CommitStateUnknownException | known.NoSuchTableError):
            return RetryableError(where, error_type="conflict")
        if isinstance(error, known.ValidationError):
            return PermanentError(f"{where}; the rows do not fit the table", error_type="refused")
        if isinstance(error, OSError) or type(error).__module__.startswith(("pyiceberg", "requests", "sqlalchemy")):
            return RetryableError(where, error_type="server")
        return error
