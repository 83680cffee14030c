"""Sinks for files of columns, read back by the libraries: Parquet, Delta and Iceberg."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from decimal import Decimal
from urllib.request import Request, urlopen

import pytest
from outage_kit import until
from sink_places import delivered_more, under_load

import batchqueue_async as bq
from batchqueue_async.sinks._shared.arrow import arrow_rows
from batchqueue_async.sinks.base import BatchKey, KeyedSink, TransactionalSink, needs_of
from batchqueue_async.sinks.delta import DeltaSink
from batchqueue_async.sinks.iceberg import IcebergSink
from batchqueue_async.sinks.parquet import ParquetSink
from batchqueue_async.testing import FaultProxy

pa = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.real_time


@asynccontextmanager
async def opened(sink):
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


# --- values


def test_rows_are_of_the_types_that_they_have():
    when = datetime(2024, 2, 29, tzinfo=UTC)
    record = {"i": 1, "f": 0.5, "s": "x", "t": when, "d": Decimal("1.10"), "l": [1], "m": {"a": 1}, "n": None}
    found = arrow_rows([record], None, None, "parquet")
    assert (found.table.to_pylist(), found.refused) == ([record], {})
    assert arrow_rows([], None, None, "parquet").table is None


@pytest.mark.parametrize(
    ("kind", "kept", "changed"),
    [
        (pa.int64(), [5, None], [0.75, "1", 2**64]),
        (pa.float64(), [0.5, 3], [2**60 + 1, Decimal("0.10000000000000000000001"), "x"]),
        (pa.float32(), [0.5], [0.1]),
        (pa.string(), ["007"], [7, b"\xff"]),
        (pa.decimal128(6, 2), [Decimal("1.50")], [Decimal("1.505")]),
        (pa.timestamp("s"), [datetime(2024, 1, 1)], [datetime(2024, 1, 1, 0, 0, 0, 5)]),  # noqa: DTZ001
    ],
    ids=str,
)
def test_x_1_no_column_changes_a_value(kind, kept, changed):
    schema = pa.schema([("id", pa.int64()), ("v", kind)])
    batch = [{"id": at, "v": value} for at, value in enumerate([*kept, *changed])]
    found = arrow_rows(batch, None, schema, "parquet")
    assert sorted(found.refused) == list(range(len(kept), len(batch)))
    assert found.table.column("v").to_pylist() == kept


def test_x_1_without_a_schema_the_widest_of_what_was_seen_holds_or_the_first_type():
    assert arrow_rows([{"v": 1}, {"v": 0.5}], None, None, "parquet").table.column("v").to_pylist() == [1, 0.5]
    found = arrow_rows([{"v": 2**60 + 1}, {"v": 0.5}, {"v": "x"}], None, None, "parquet")
    assert (found.table.to_pylist(), sorted(found.refused)) == ([{"v": 2**60 + 1}], [1, 2])
    found = arrow_rows([{"v": None}, {"v": math.nan}], None, None, "parquet")
    assert math.isnan(found.table.to_pylist()[1]["v"])


# --- Parquet


def parquet(directory):
    import pyarrow.parquet as pq

    files = sorted(directory.glob("*.parquet"))
    return files, [row for path in files for row in pq.read_table(path).to_pylist()]


@pytest.fixture
def obstore():
    return pytest.importorskip("obstore")


async def test_sends_that_are_under_way_together_share_a_file(obstore, tmp_path):
    async with opened(ParquetSink(tmp_path / "rows", max_seconds=0.1)) as sink:
        results = await asyncio.gather(*(sink.send([{"i": n}, {"i": "x"}] if n == 3 else [{"i": n}]) for n in range(8)))
        await sink.send([{"i": 8}])
    assert [list(result.rejected) for result in results if result] == [[1]]
    files, rows = parquet(tmp_path / "rows")
    assert (len(files), sorted(row["i"] for row in rows)) == (2, list(range(9)))


async def test_a_file_that_is_large_enough_is_written_at_once(obstore, tmp_path):
    async with opened(ParquetSink(tmp_path, max_seconds=3600, max_bytes=1000)) as sink:
        await asyncio.gather(*(sink.send([{"x": "y" * 400}]) for _ in range(6)))
        late = asyncio.create_task(sink.send([{"other": 1}]))
        await asyncio.sleep(0.3)
    await late  # by close
    files, rows = parquet(tmp_path)
    assert (len(files), len(rows)) == (3, 7)


async def test_a_batch_with_a_key_is_one_file_once(obstore, tmp_path):
    async with opened(ParquetSink(tmp_path)) as sink:
        assert isinstance(sink, TransactionalSink)
        for _ in range(2):
            transaction = await sink.begin(BatchKey("q", 1))
            if transaction is not None:
                await transaction.send([{"i": 1}])
                assert list((await transaction.send([{"i": 2}, {"i": 0.5}])).rejected) == [1]
                await transaction.commit()
        undone = await sink.begin(BatchKey("q", 2))
        await undone.send([{"i": 3}])
        await undone.rollback()
        empty = await sink.begin(BatchKey("q", 3))
        await empty.commit()
        assert await sink.begin(BatchKey("q", 3)) is None
    files, rows = parquet(tmp_path)
    assert ([path.name for path in files], [row["i"] for row in rows]) == (
        ["q-00000001.parquet", "q-00000003.parquet"],
        [1, 2],
    )


async def test_parquet_behind_an_exporter(obstore, tmp_path):
    async with bq.Exporter(ParquetSink(tmp_path / "out", max_seconds=0.05)) as exporter:
        await exporter.consume([*({"i": i, "v": i / 2} for i in range(2000)), {"i": "bad", "v": {}}])
        await exporter.flush(20)
        stats = exporter.stats()
    assert (stats.delivered, stats.dead_lettered) == (2000, 1)
    assert sorted(row["i"] for row in parquet(tmp_path / "out")[1]) == list(range(2000))


@pytest.fixture
def s3():
    """An S3 server of moto, in this process, over a real socket."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # What it keeps belongs to the process, and outlives the server.
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.filterwarnings("ignore")
async def test_parquet_in_an_s3_bucket(obstore, s3, monkeypatch):
    import pyarrow.parquet as pq

    monkeypatch.setenv("TEST_S3_SECRET", "s3cret")
    options = {
        "endpoint": s3,
        "access_key_id": "key",
        "secret_access_key": "env:TEST_S3_SECRET",
        "region": "us-east-1",
        "client_options": {"allow_http": True},
    }
    sink = ParquetSink("s3://lake/rows", max_seconds=0.05, options=options)
    async with opened(sink):
        with pytest.raises(bq.ConfigError, match="make the bucket"):
            await sink.send([{"i": 1}])
        boto = pytest.importorskip("boto3").client(
            "s3", endpoint_url=s3, aws_access_key_id="key", aws_secret_access_key="s", region_name="us-east-1"
        )
        boto.create_bucket(Bucket="lake")
        await sink.send([{"i": 1}, {"i": 2}])
    (found,) = boto.list_objects_v2(Bucket="lake")["Contents"]
    assert found["Key"].startswith("rows/")
    body = boto.get_object(Bucket="lake", Key=found["Key"])["Body"].read()
    assert pq.read_table(pa.BufferReader(body)).to_pylist() == [{"i": 1}, {"i": 2}]


# --- Delta and Iceberg


class Delta:
    def __init__(self, directory):
        pytest.importorskip("deltalake")
        self.uri = str(directory / "delta")

    def sink(self, **options):
        return DeltaSink(self.uri, **options)

    def add_column(self, name):
        from deltalake import DeltaTable, Field
        from deltalake.schema import PrimitiveType

        DeltaTable(self.uri).alter.add_columns([Field(name, PrimitiveType("string"))])

    def rows(self):
        from deltalake import DeltaTable

        return pa.table(DeltaTable(self.uri).to_pyarrow_table()).to_pylist()


class Iceberg:
    def __init__(self, directory):
        pytest.importorskip("pyiceberg")
        pytest.importorskip("sqlalchemy")
        self.catalog = {"type": "sql", "uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}"}

    def sink(self, **options):
        return IcebergSink("lake.rows", catalog=self.catalog, **options)

    def add_column(self, name):
        from pyiceberg.catalog import load_catalog
        from pyiceberg.types import StringType

        with load_catalog("default", **self.catalog).load_table("lake.rows").update_schema() as update:
            update.add_column(name, StringType())

    def rows(self):
        from pyiceberg.catalog import load_catalog

        return load_catalog("default", **self.catalog).load_table("lake.rows").scan().to_arrow().to_pylist()


@pytest.fixture(params=[Delta, Iceberg])
def lake(request, tmp_path):
    return request.param(tmp_path)


def ids(lake):
    return sorted(row["i"] for row in lake.rows())


@pytest.mark.filterwarnings("ignore")
async def test_each_record_is_in_once_by_the_key_in_the_commit(lake):
    keys = [f"q/{number}" for number in range(5)]
    batch = [{"i": number, "v": number / 2} for number in range(5)]
    for _ in range(2):  # a new sink finds what the last one noted
        async with opened(lake.sink()) as sink:
            assert isinstance(sink, KeyedSink)
            assert (needs_of(sink).ordering, needs_of(sink).concurrency) == ("order", 1)
            first = await sink.send_keyed(batch[:3], keys[:3])
            again = await sink.send_keyed(batch, keys)
            assert (first.rejected, again.rejected) == ({}, {})
    assert (first.skipped, again.skipped) == (3, 5)
    assert ids(lake) == [0, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore")
async def test_a_value_that_does_not_fit_is_refused_by_record_and_a_column_is_added_where_asked(lake):
    async with opened(lake.sink()) as sink:
        await sink.send([{"i": 1, "v": "x"}])
        result = await sink.send([{"i": 0.75, "v": "x"}, {"i": 2, "v": "y"}, {"i": 3, "w": 1}])
        assert sorted(result.rejected) == [0, 2]
    async with opened(lake.sink(schema="add")) as sink:
        assert await sink.send([{"i": 4, "w": 1.5}]) is None
    assert sorted(lake.rows(), key=lambda row: row["i"]) == [
        {"i": 1, "v": "x", "w": None},
        {"i": 2, "v": "y", "w": None},
        {"i": 4, "v": None, "w": 1.5},
    ]


@pytest.mark.filterwarnings("ignore")
async def test_a_batch_is_in_once_and_whole(lake):
    async with opened(lake.sink()) as sink:
        assert isinstance(sink, TransactionalSink)
        transaction = await sink.begin(BatchKey("s", 1))
        await transaction.send([{"i": 1}])
        await transaction.send([{"i": 2}])
        await transaction.commit()
        await transaction.rollback()
        assert await sink.begin(BatchKey("s", 1)) is None
        undone = await sink.begin(BatchKey("s", 2))
        await undone.send([{"i": 3}])
        await undone.rollback()
        empty = await sink.begin(BatchKey("s", 2))
        await empty.commit()
        assert await sink.begin(BatchKey("s", 2)) is None
    assert ids(lake) == [1, 2]


@pytest.mark.filterwarnings("ignore")
async def test_a_lake_table_behind_an_exporter(lake):
    async with bq.Exporter(lake.sink()) as exporter:
        await exporter.consume([{"i": i} for i in range(1000)])
        await exporter.flush(30)
        assert exporter.stats().delivered == 1000
    assert ids(lake) == list(range(1000))


@pytest.mark.real_time(one_loop=True)
@pytest.mark.filterwarnings("ignore")
async def test_columns_that_come_under_load_by_records_and_by_another_writer(lake):
    """New records have another column; somebody else adds one to the table."""
    wider: list[bool] = []

    def record(number):
        return {"i": number, "v": number / 2} if wider else {"i": number}

    async def change(exporter):
        wider.append(True)
        await delivered_more(exporter)
        for _ in range(20):  # a commit of the sink's may come first
            with suppress(Exception):
                await asyncio.to_thread(lake.add_column, "later")
                break
        await delivered_more(exporter)

    count, _, dead = await under_load(lake.sink(schema="add"), record, change)
    assert dead == []
    found = {row["i"]: row for row in lake.rows()}
    assert sorted(found) == list(range(count))
    assert len(lake.rows()) == count
    assert {tuple(sorted(row)) for row in found.values()} == {("i", "later", "v")}
    assert {number: row["v"] for number, row in found.items() if row["v"] not in {None, number / 2}} == {}
    assert found[count - 1]["v"] is not None


@pytest.mark.real_time(one_loop=True)
@pytest.mark.filterwarnings("ignore")
async def test_an_object_store_that_flaps_costs_no_record(obstore, s3, monkeypatch):
    import pyarrow.parquet as pq

    monkeypatch.setenv("TEST_S3_SECRET", "s3cret")
    boto = pytest.importorskip("boto3").client(
        "s3", endpoint_url=s3, aws_access_key_id="key", aws_secret_access_key="s", region_name="us-east-1"
    )
    boto.create_bucket(Bucket="lake")
    async with FaultProxy(s3.removeprefix("http://")) as proxy:
        client = {"allow_http": True, "timeout": "1s", "connect_timeout": "500ms"}
        options = {
            "endpoint": f"http://{proxy.address}",
            "access_key_id": "key",
            "secret_access_key": "env:TEST_S3_SECRET",
            "region": "us-east-1",
            "client_options": client,
            "retry_config": {"max_retries": 0},
        }

        async def flap(exporter):
            for fault in ("refuse", "reset", "refuse"):
                failed = sum(exporter.stats().failures.values())
                await proxy.switch(fault)
                await until(lambda failed=failed: sum(exporter.stats().failures.values()) > failed)
                await proxy.switch("pass")
                await delivered_more(exporter)

        sink = ParquetSink("s3://lake/rows", max_seconds=0.05, options=options)
        count, stats, dead = await under_load(sink, lambda number: {"i": number}, flap)
    assert dead == []
    assert stats.retries > 0
    found = []
    for each in boto.list_objects_v2(Bucket="lake")["Contents"]:
        body = boto.get_object(Bucket="lake", Key=each["Key"])["Body"].read()
        found += [row["i"] for row in pq.read_table(pa.BufferReader(body)).to_pylist()]
    assert sorted(set(found)) == list(range(count))


def test_options_are_checked():
    for make, message in [
        (lambda: DeltaSink("x", schema="widen"), "schema='widen'"),
        (lambda: IcebergSink("rows", catalog={}), "no namespace"),
        (lambda: ParquetSink("x", max_bytes=0), "max_bytes=0"),
    ]:
        with pytest.raises(bq.ConfigError, match=message):
            make()
