"""The listener, with a real query and with reports made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from batchqueue_async.sinks.memory import MemorySink
from batchqueue_async.spark import DriverSink
from batchqueue_async.spark.listener import QueryListener


@pytest.fixture
def listener(spark):
    made = QueryListener()
    spark.streams.addListener(made)
    yield made
    spark.streams.removeListener(made)


def test_the_listener_counts_what_a_query_does(spark, listener, tmp_path):
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 40).option("startTimestamp", 0).load()
    with DriverSink("listened to", sink=MemorySink(), rows="tuple") as sink:
        query = (
            source.withWatermark("timestamp", "1 second")
            .writeStream.queryName("listened")
            .foreachBatch(sink)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        while listener.stats().get(str(query.id)) is None or listener.stats()[str(query.id)].batches < 3:
            assert not query.awaitTermination(0.05), query.exception()
        query.stop()
        while listener.stats()[str(query.id)].active:  # Spark tells it on a thread of its own
            query.awaitTermination(0.05)
        found, delivered = listener.stats()[str(query.id)], sink.stats()
    assert (found.name, found.failed) == ("listened", False)
    assert found.rows == 40 * found.batches
    assert found.rows <= delivered.rows
    assert found.rows_per_second > 0
    assert found.durations.count == found.lag.count == found.batches
    assert 0 < found.durations.p50 <= found.durations.max
    assert found.lag.max > 0
    assert found.event_lag.max > 1e9  # the rows' times begin in 1970
    assert found.watermark is not None


# --- reports made up


def progress(batch, rows, **times):
    return SimpleNamespace(
        progress=SimpleNamespace(
            id="q",
            runId="run",
            name="named",
            batchId=batch,
            numInputRows=rows,
            processedRowsPerSecond=100.0 * batch,
            batchDuration=500,
            timestamp="1970-01-01T00:01:40.000Z",
            eventTime=times,
        )
    )


def test_the_listener_counts_what_spark_reports():
    listener = QueryListener(now=lambda: 101.0)
    listener.onQueryStarted(SimpleNamespace(id="q", runId="run", name="named"))
    listener.onQueryProgress(progress(1, 10, max="1970-01-01T00:01:31.000Z", watermark="1970-01-01T00:01:21.000Z"))
    listener.onQueryProgress(progress(2, 0))
    listener.onQueryIdle(None)
    stats = listener.stats()["q"]
    assert (stats.name, stats.batches, stats.rows, stats.rows_per_second) == ("named", 2, 10, 100.0)
    assert (stats.durations.max, stats.lag.max, stats.event_lag.max) == (0.5, 1.0, 10.0)
    assert stats.active
    listener.onQueryTerminated(SimpleNamespace(id="q", exception="it failed"))
    assert (listener.stats()["q"].active, listener.stats()["q"].failed) == (False, True)


def test_the_listener_takes_reports_in_any_order():
    listener = QueryListener()
    listener.onQueryTerminated(SimpleNamespace(id="gone", exception=None))
    listener.onQueryProgress(progress(1, 5))
    assert {query: each.active for query, each in listener.stats().items()} == {"gone": False, "q": True}
