"""What the sinks for Delta and Iceberg commit, read back by a Spark with the jars of both."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from servers import base as servers
from servers import lake

from batchqueue_async.sinks.base import BatchKey
from batchqueue_async.sinks.delta import DeltaSink
from batchqueue_async.sinks.iceberg import IcebergSink

pytestmark = pytest.mark.timeout(600)  # the jars are a few hundred megabytes, the first time


@pytest.fixture(scope="module")
def reader():
    return servers.provide("Delta and Iceberg in Spark", lake.Lake)


async def write(sink):
    """Each record once by its key, over repetitions and two sinks; a batch once by its own; and a column that comes."""
    keys = [f"q/{number}" for number in range(10)]
    rows = [{"i": number, "v": number / 2, "s": f"ü{number}"} for number in range(10)]
    for low, high in ((0, 4), (2, 7), (0, 10)):
        await sink.open()
        try:
            await sink.send_keyed(rows[low:high], keys[low:high])
            result = await sink.send_keyed(rows[low:high], keys[low:high])
            assert result.skipped == high - low
        finally:
            await sink.close()
    await sink.open()
    try:
        for _ in range(2):  # the second one is there already
            transaction = await sink.begin(BatchKey("b", 1))
            if transaction is not None:
                await transaction.send([{"i": 10, "v": 5.0, "s": "ü10", "later": "here"}])
                await transaction.commit()
    finally:
        await sink.close()


@pytest.mark.filterwarnings("ignore")
def test_delta_and_iceberg_tables_are_read_by_spark_each_record_once(reader, tmp_path):
    pytest.importorskip("deltalake")
    catalogs = pytest.importorskip("pyiceberg.catalog")
    pytest.importorskip("sqlalchemy")
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}"}

    async def main():
        await write(DeltaSink(str(tmp_path / "delta"), schema="add"))
        await write(IcebergSink("lake.rows", catalog=catalog, schema="add"))

    asyncio.run(main())
    place = catalogs.load_catalog("default", **catalog).load_table("lake.rows").metadata_location
    found = reader.read(delta=str(tmp_path / "delta"), iceberg=urlsplit(place).path)
    wanted = [{"i": number, "v": number / 2, "s": f"ü{number}"} for number in range(10)]
    wanted.append({"i": 10, "v": 5.0, "s": "ü10", "later": "here"})
    for name in ("delta", "iceberg"):
        assert sorted(found[name], key=lambda row: row["i"]) == wanted, name
