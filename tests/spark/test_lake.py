"""What the sinks for files of columns write, read by Spark."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from batchqueue_async.sinks.base import BatchKey
from batchqueue_async.sinks.parquet import ParquetSink


def test_parquet_files_are_read_by_spark(spark, tmp_path):
    pytest.importorskip("obstore")
    when = datetime(2024, 2, 29, 12, tzinfo=UTC)

    async def write():
        sink = ParquetSink(tmp_path / "rows", max_seconds=0.05)
        await sink.open()
        await asyncio.gather(*(sink.send([{"i": n, "v": n / 2, "at": when, "s": f"ü{n}"}]) for n in range(50)))
        for _ in range(2):  # the second one is there already
            transaction = await sink.begin(BatchKey("q", 1))
            if transaction is not None:
                await transaction.send([{"i": 50, "v": 25.0, "at": when, "s": "ü50"}])
                await transaction.commit()
        await sink.close()

    asyncio.run(write())
    found = spark.read.parquet(str(tmp_path / "rows")).orderBy("i").collect()
    assert [(row.i, row.v, row.s) for row in found] == [(n, n / 2, f"ü{n}") for n in range(51)]
    assert {row["at"].timestamp() for row in found} == {when.timestamp()}
