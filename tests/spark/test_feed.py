"""Batches of several queries through one queue, without Spark."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing

import pyarrow as pa
import pytest
from bridge_tools import PATIENCE, Caller, until

import batchqueue_async as bq
from batchqueue_async.sinks.base import BatchKey
from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark.feed import Feeder
from batchqueue_async.spark.micro_batch import MicroBatch, handle_chunks
from batchqueue_async.spark.process_bridge import Sizes
from batchqueue_async.spark.route import SinkRoute


def batch_of(*numbers):
    return pa.record_batch({"number": list(numbers)})


def one_row_each():
    return Sizes("rows", bq.QueueConfig(max_batch=1, consumer=handle_chunks), 4, whole=False)


def test_a_batch_that_waits_for_anothers_transaction_holds_nobody_up_in_their_queue(tmp_path):
    """Two tables of one file: while one batch is written the other's transaction has to wait, but not in the queue."""
    path = tmp_path / "results.db"
    go_on = threading.Event()
    sizes = one_row_each()
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("results", sizes.queue)
        routes = {
            name: SinkRoute(SqliteSink(path, name, columns=["number"], busy_timeout=2 * PATIENCE))
            for name in ("Minute", "Slow")
        }
        batches = {name: MicroBatch(name, route, BatchKey(name, 0)) for name, route in routes.items()}
        for route in routes.values():
            bridge.call(route.open)

        def deliver(name, found):
            fed = Feeder(queue, bridge, sizes).feed(batches[name], found, pa.RecordBatch.to_pylist)
            bridge.call(batches[name].commit)
            return fed.rows

        def minutes():
            yield batch_of(1)
            assert go_on.wait(PATIENCE)
            yield batch_of(2, 3)

        def slow():
            yield batch_of(4)

        first = Caller(deliver, "Minute", minutes())
        until(lambda: batches["Minute"].taken == 1)
        second = Caller(deliver, "Slow", slow())
        until(routes["Slow"].turn.locked)
        go_on.set()
        assert first.outcome() == 3
        assert second.outcome() == 1
        for route in routes.values():
            bridge.call(route.close)
    with closing(sqlite3.connect(path)) as rows:
        assert rows.execute("SELECT number FROM Minute UNION ALL SELECT number FROM Slow").fetchall() == [
            (1,),
            (2,),
            (3,),
            (4,),
        ]


def test_a_transaction_that_cannot_begin_fails_the_batch_before_a_row_is_in_the_queue(tmp_path):
    path = tmp_path / "results.db"
    sizes = one_row_each()
    with closing(sqlite3.connect(path)) as other, bq.SyncBridge() as bridge:
        other.execute("CREATE TABLE held (x)")
        route = SinkRoute(SqliteSink(path, "rows", columns=["number"], busy_timeout=0.01))
        bridge.call(route.open)
        queue = bridge.get_or_create("rows", sizes.queue)
        batch = MicroBatch("rows", route, BatchKey("q", 0))
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(bq.DeliveryError, match="locked"):
            Feeder(queue, bridge, sizes).feed(
                batch, (batch_of(number) for number in range(3)), pa.RecordBatch.to_pylist
            )
        bridge.call(batch.rollback)
        bridge.call(route.close)
        assert queue.stats().accepted == 0
