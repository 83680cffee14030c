"""The ClickHouse sink against Debian's server and against a current engine: no value changes, and what errors mean."""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import pickle
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pyarrow as pa
import pytest
from outage_kit import outage

import batchqueue_async as bq
from batchqueue_async.sinks.base import KeyedSink, needs_of
from batchqueue_async.sinks.clickhouse import ClickHouseSink
from batchqueue_async.sinks.clickhouse.columns import MisfitError, fit_of
from batchqueue_async.sinks.clickhouse.errors import error_for
from batchqueue_async.sinks.clickhouse.rows import InsertBody
from batchqueue_async.sinks.http.transport import HttpAnswer
from batchqueue_async.testing import FaultProxy

_names = itertools.count()
WHEN = datetime(2024, 2, 29, 12, 30, tzinfo=UTC)


class Colour(enum.Enum):
    RED = "red"


@pytest.fixture
def table():
    return f"t{next(_names)}"


@contextlib.asynccontextmanager
async def opened(sink):
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


def keys(count, start=0):
    return [f"q/{start + number}" for number in range(count)]


# --- pure parts


@pytest.mark.parametrize(
    ("kind", "kept", "changed"),
    [
        ("UInt8", [0, 255, 2.0, True], [256, -1, 0.5, None, "1", math.nan, math.inf]),
        ("Int64", [-(2**63), 2**63 - 1, Decimal(5)], [2**63, Decimal("0.1")]),
        ("UInt256", [2**256 - 1], [2**256]),
        (
            "Float64",
            [0.1, 5, Decimal("0.5"), 2**53],
            [2**53 + 1, 10**400, math.nan, -math.inf, Decimal("0." + "1" * 20)],
        ),
        ("Float32", [0.1, 0.5, 16777216], [0.123456789, 1e300]),
        ("Decimal(5, 2)", [1, 0.25, Decimal("999.99"), Decimal("1.500")], [1000, Decimal("0.125"), 0.1 + 0.2, None]),
        ("Decimal64(3)", [Decimal("1.125")], [Decimal("1.1255"), Decimal("NaN")]),
        ("String", ["", "ü", b"text", Colour.RED], [5, None, b"\xff", {"a": 1}]),
        ("FixedString(2)", ["de"], ["d", "deu", "dü"]),
        ("Nullable(UInt8)", [None, 1], [256]),
        ("LowCardinality(Nullable(String))", [None, "a"], [5]),
        ("Array(UInt8)", [[], [1, 2], (3,)], [[256], [None], "ab", None]),
        ("Array(Nullable(UInt8))", [[None, 1]], [[-1]]),
        ("Map(String, Int8)", [{"a": 1}], [{"a": 128}, [("a", 1)]]),
        ("Bool", [True], [1, "true"]),
        ("Date", [date(2024, 1, 1), datetime(2024, 1, 1)], [date(1969, 1, 1), datetime(2024, 1, 1, 5), "2024-01-01"]),  # noqa: DTZ001
        ("DateTime", [WHEN, 0], [WHEN.replace(tzinfo=None), WHEN.replace(microsecond=1), -1, 2**32]),
        ("DateTime('Europe/Berlin')", [WHEN], [WHEN.replace(tzinfo=None)]),
        (
            "DateTime64(3)",
            [WHEN.replace(microsecond=5000)],
            [WHEN.replace(microsecond=1), datetime(1, 1, 1, tzinfo=UTC)],
        ),
        ("UUID", [UUID(int=1), str(UUID(int=1))], [None, 1.5]),
        ("Enum8('red' = 1, 'a,b(' = 2)", ["red", Colour.RED, 1], [None, 1.5]),
        ("SimpleAggregateFunction(sum, UInt64)", [1], [-1]),
    ],
)
def test_x_1_no_column_changes_a_value(kind, kept, changed):
    fit = fit_of(kind)
    for value in kept:
        fit.take(value)
    for value in changed:
        with pytest.raises(MisfitError):
            fit.take(value)
        assert not fit.column([value])


def test_records_are_rows_and_those_that_are_none_are_refused():
    body = InsertBody(target="t", columns={"a": "UInt8", "s": "String"}, settings={"x": "it's"}, tokens=True)
    batch = [
        {"a": 1, "s": "ü"},
        {"a": 300},
        {"b": 1},
        (1, 2),
        {"s": "\ud800"},
        pa.RecordBatch.from_pydict({"a": [2, 3]}),
        pa.RecordBatch.from_pydict({"a": [4, 400]}),
        {"s": object()},
    ]
    found = body.encode(batch, keys(8))
    assert (found.places, sorted(found.rejected)) == ([0, 5], [1, 2, 3, 4, 6, 7])
    statement, *rows = found.content.decode().splitlines()
    assert statement.startswith(r"INSERT INTO t SETTINGS x='it\'s', insert_deduplication_token='")
    assert rows == ['{"a":1,"s":"ü"}', '{"a":2}', '{"a":3}']
    assert body.encode(batch, keys(8)).content == found.content


@pytest.mark.parametrize(
    ("code", "meant"),
    [
        (27, bq.PermanentError),
        (53, bq.PermanentError),
        (117, bq.PermanentError),
        (241, bq.RetryableError),
        (242, bq.RetryableError),
        (319, bq.RetryableError),
        (999, bq.RetryableError),
        (202, bq.ThrottledError),
        (252, bq.ThrottledError),
        (193, bq.AuthError),
        (497, bq.AuthError),
        (516, bq.AuthError),
        (123456, type(None)),
    ],
)
def test_a_code_is_one_error(code, meant):
    assert type(error_for(code, "here", "")) is meant
    assert type(error_for(code, "here", "", frozenset({code}))) is bq.RetryableError


def test_an_error_that_comes_late_is_one():
    sink = ClickHouseSink("http://h", "t")
    late = b"Code: 241. DB::Exception: Memory limit exceeded: s3cret (MEMORY_LIMIT_EXCEEDED)"
    with pytest.raises(bq.RetryableError, match="code 241 MEMORY_LIMIT_EXCEEDED"):
        sink._confirmed(HttpAnswer(status=200, headers={}, body=late), 1)
    with pytest.raises(bq.RetryableError, match="ended with an error"):
        sink._confirmed(HttpAnswer(status=200, headers={"x-clickhouse-exception-code": "7777"}, body=b""), 1)
    with pytest.raises(bq.ConfigError, match="something else than ClickHouse"):
        sink._confirmed(HttpAnswer(status=200, headers={}, body=b"<html>"), 1)


def test_options_are_checked_and_secrets_hidden():
    with pytest.raises(bq.ConfigError, match="table='' is empty"):
        ClickHouseSink("http://h", "")
    with pytest.raises(bq.ConfigError, match="wait_for_async_insert=0"):
        ClickHouseSink("http://h", "t", settings={"async_insert": 1, "wait_for_async_insert": 0})
    sink = ClickHouseSink("https://h:8443/", "t", user="u", password="s3cret")
    assert repr(sink) == "ClickHouseSink('https://h:8443', table='t')"
    assert isinstance(sink, KeyedSink)
    assert isinstance(sink, bq.PreparingSink)
    assert needs_of(sink).same_bytes
    assert repr(pickle.loads(pickle.dumps(sink))) == repr(sink)


# --- a current engine

COLUMNS = (
    "id UInt64, s String, n Nullable(Float64), d Decimal(9, 2), at DateTime64(6, 'Asia/Tokyo'), day Date, "
    "u UUID, e Enum8('red' = 1), tags Array(LowCardinality(String)), m Map(String, Int32), sec DateTime('Asia/Tokyo')"
)


@pytest.mark.real_time
class TestEngine:
    async def test_values_arrive_as_they_are(self, clickhouse, table):
        clickhouse.sql(f"CREATE TABLE {table} ({COLUMNS}) ENGINE = MergeTree ORDER BY id")
        other = WHEN.replace(microsecond=123456).astimezone(timezone(timedelta(hours=-3)))
        row = {
            "id": 2**64 - 1,
            "s": "ü\n\"'\\",
            "n": None,
            "d": Decimal("-12.5"),
            "at": other,
            "day": date(2024, 2, 29),
            "u": UUID(int=5),
            "e": Colour.RED,
            "tags": ["a", "b"],
            "m": {"x": -1},
            "sec": WHEN,
        }
        async with opened(ClickHouseSink(clickhouse.url, table)) as sink:
            result = await sink.send_keyed([row, row | {"id": 2**64}, row | {"id": 7, "n": 0.1}], keys(3))
        assert list(result.rejected) == [1]
        first, last = clickhouse.rows(table, "id")
        assert (first["id"], first["n"], last["id"], last["n"]) == (7, 0.1, 2**64 - 1, None)
        assert (last["s"], last["d"], last["day"], last["u"]) == (row["s"], -12.5, "2024-02-29", str(UUID(int=5)))
        assert (last["e"], last["tags"], last["m"]) == ("red", ["a", "b"], {"x": -1})
        assert (last["at"], last["sec"]) == ("2024-02-29 21:30:00.123456", "2024-02-29 21:30:00")

    async def test_a_batch_is_in_once_by_its_token(self, clickhouse, table):
        clickhouse.sql(
            f"CREATE TABLE {table} (id UInt64) ENGINE = MergeTree ORDER BY id "
            "SETTINGS non_replicated_deduplication_window = 100"
        )
        async with opened(ClickHouseSink(clickhouse.url, table, compression="gzip")) as sink:
            for _ in range(3):
                await sink.send_keyed([{"id": 1}, {"id": 2}], keys(2))
            await sink.send_keyed([{"id": 1}, {"id": 2}], keys(2, start=2))  # others, that look the same
            prepared = sink.prepare([{"id": 3}], keys(1, start=9))
            await sink.send_prepared(prepared)
            await sink.send_prepared(prepared)
        assert sorted(int(row["id"]) for row in clickhouse.rows(table)) == [1, 1, 2, 2, 3]

    async def test_what_the_server_refuses_of_a_row_is_that_record(self, clickhouse, table):
        clickhouse.sql(f"CREATE TABLE {table} (id UInt64, u UUID, e Enum8('red' = 1)) ENGINE = MergeTree ORDER BY id")
        good = {"u": UUID(int=1), "e": "red"}
        async with opened(ClickHouseSink(clickhouse.url, table)) as sink:
            for bad in ({"id": 1, "u": "s3cret", "e": "red"}, {"id": 1, "u": UUID(int=1), "e": "s3cret"}):
                # One is refused before it is sent, so that the server counts otherwise than the batch.
                batch = [{"id": 5} | good, {"id": -1} | good, {"id": 6} | good, bad, {"id": 7} | good]
                with pytest.raises(bq.PermanentError) as caught:
                    await sink.send(batch)
                assert caught.value.culprits == (3,)
                assert "s3cret" not in str(caught.value)
        assert clickhouse.rows(table) == []
        batch = [{"id": number} | good for number in range(200)]
        batch[77]["e"] = batch[150]["e"] = "green"
        async with bq.Exporter(ClickHouseSink(clickhouse.url, table)) as exporter:
            await exporter.consume(batch)
            await exporter.flush(60)
            assert exporter.stats().dead_lettered == 2
        assert sorted(int(row["id"]) for row in clickhouse.rows(table)) == sorted({*range(200)} - {77, 150})

    async def test_columns_that_change_are_found(self, clickhouse, table):
        clickhouse.sql(f"CREATE TABLE {table} (id UInt64, gone String) ENGINE = MergeTree ORDER BY id")
        async with opened(ClickHouseSink(clickhouse.url, table)) as sink:
            await sink.send([{"id": 1, "gone": "x"}])
            clickhouse.sql(f"ALTER TABLE {table} DROP COLUMN gone")
            clickhouse.sql(f"ALTER TABLE {table} ADD COLUMN n Int8")
            with pytest.raises((bq.PermanentError, bq.ConfigError)):
                await sink.send([{"id": 2, "gone": "x"}])
            result = await sink.send([{"id": 3, "n": 1}, {"id": 4, "gone": "x"}, {"id": 5, "n": 200}])
        assert list(result.rejected) == [1, 2] or sorted(result.rejected) == [1, 2]
        assert sorted(int(row["id"]) for row in clickhouse.rows(table)) == [1, 3]

    async def test_a_table_that_is_not_there_is_waited_for(self, clickhouse, table):
        async with opened(ClickHouseSink(clickhouse.url, table, database="tests")) as sink:
            with pytest.raises(bq.ConfigError, match="code 60"):
                await sink.send([{"id": 1}])
            clickhouse.sql(f"CREATE TABLE tests.{table} (id UInt64) ENGINE = MergeTree ORDER BY id")
            assert await sink.send([{"id": 1}]) is None

    async def test_every_record_is_in_once_after_an_outage(self, clickhouse, table):
        clickhouse.sql(
            f"CREATE TABLE {table} (id UInt64) ENGINE = MergeTree ORDER BY id "
            "SETTINGS non_replicated_deduplication_window = 10000"
        )
        async with FaultProxy(clickhouse.address) as proxy:
            sink = ClickHouseSink(f"http://{proxy.address}", table, timeout=2.0, connect_timeout=0.5)
            met = await outage(sink, proxy)
        met.check()
        assert sorted(int(row["id"]) for row in clickhouse.rows(table)) == list(range(met.count))


# --- Debian's server


@pytest.mark.real_time
class TestServer:
    async def test_rows_arrive_and_its_answers_are_understood(self, clickhouse_server, table):
        clickhouse_server.sql(
            f"CREATE TABLE {table} (id UInt64, s String, sec DateTime) ENGINE = MergeTree ORDER BY id"
        )
        options = {"user": "tester", "password": "right-password", "compression": "gzip"}
        async with opened(ClickHouseSink(clickhouse_server.url, table, **options)) as sink:
            result = await sink.send_keyed(
                [{"id": 2**64 - 1, "s": "ü", "sec": WHEN}, {"id": 2**64}, {"id": 1, "s": "a"}], keys(3)
            )
            assert list(result.rejected) == [1]
        found = clickhouse_server.sql(f"SELECT id, s, toUnixTimestamp(sec) FROM {table} ORDER BY id")
        assert found == ["1\ta\t0", f"{2**64 - 1}\tü\t{int(WHEN.timestamp())}"]

    async def test_a_row_that_it_refuses_is_named(self, clickhouse_server, table):
        clickhouse_server.sql(f"CREATE TABLE {table} (id UInt64, u UUID) ENGINE = MergeTree ORDER BY id")
        async with opened(ClickHouseSink(clickhouse_server.url, table)) as sink:
            with pytest.raises(bq.PermanentError) as caught:
                await sink.send([{"id": 1, "u": UUID(int=1)}, {"id": 2, "u": "s3cret"}])
        assert "s3cret" not in str(caught.value)

    async def test_refusals_pause(self, clickhouse_server, table):
        async with opened(ClickHouseSink(clickhouse_server.url, table)) as sink:
            with pytest.raises(bq.ConfigError, match="code 60"):
                await sink.send([{"id": 1}])
        for user in ("tester", "nobody"):
            async with opened(ClickHouseSink(clickhouse_server.url, table, user=user, password="wrong")) as sink:
                with pytest.raises(bq.AuthError):
                    await sink.send([{"id": 1}])
        clickhouse_server.sql(f"CREATE TABLE {table} (id UInt64) ENGINE = MergeTree ORDER BY id")
        async with opened(ClickHouseSink(clickhouse_server.url, table, settings={"async_insert": 1})) as sink:
            with pytest.raises(bq.ConfigError, match="version 18"):
                await sink.send([{"id": 1}])
