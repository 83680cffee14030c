"""A data source that only iterates: over Arrow record batches, or over their rows as tuples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from batchqueue_async.spark.rows import columns

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Seen(WriterCommitMessage):
    rows: int


class BareWriter(DataSourceArrowWriter):
    def __init__(self, tuples: bool) -> None:
        self.tuples = tuples

    def write(self, iterator: Iterator[Any]) -> Seen:
        seen = 0
        for batch in iterator:
            if self.tuples:
                seen += len(list(zip(*columns(batch), strict=True)))
            else:
                seen += batch.num_rows
        return Seen(seen)


class Bare(DataSource):
    @classmethod
    def name(cls) -> str:
        return "bare"

    def writer(self, schema: Any, overwrite: bool) -> BareWriter:
        return BareWriter(self.options.get("tuples") == "yes")


def no_op(options: dict[str, str]) -> Any:
    async def handle(batch: Any) -> None:
        pass

    return handle
