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
from batchqueue_async.spark.feed import feed
from batchqueue_async.spark.route import SinkRoute


class Minute(dict):
    pass


class Slow(dict):
    pass


def batch_of(*numbers):
    return pa.record_batch({"number": list(numbers)})


def test_a_batch_that_waits_for_anothers_transaction_holds_nobody_up_in_their_queue(tmp_path):
    """Two tables of one file: while one batch is written the other's transaction has to wait, but not in the queue."""
    path = tmp_path / "results.db"
    go_on = threading.Event()
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("results", bq.QueueConfig(buffer_size=1, max_batch=1))
        routes = {}
        for kind in (Minute, Slow):
            routes[kind] = SinkRoute(SqliteSink(path, kind.__name__, columns=["number"], busy_timeout=2 * PATIENCE))
            bridge.call(routes[kind].open)
            queue.add_handler(kind, routes[kind])
            bridge.call(routes[kind].begin, BatchKey(kind.__name__, 0))

        def deliver(kind, batches):
            fed = feed(
                kind.__name__,
                batches,
                queue=queue,
                route=routes[kind],
                bridge=bridge,
                convert=lambda batch: [kind(row) for row in batch.to_pylist()],
                unit=1,
            )
            bridge.call(routes[kind].commit)
            return fed.rows

        def minutes():
            yield batch_of(1)
            assert go_on.wait(PATIENCE)
            yield batch_of(2, 3)

        def slow():
            yield batch_of(4)

        first = Caller(deliver, Minute, minutes())
        until(lambda: routes[Minute].taken == 1)
        second = Caller(deliver, Slow, slow())
        until(routes[Slow]._turn.locked)
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
    with closing(sqlite3.connect(path)) as other, bq.SyncBridge() as bridge:
        other.execute("CREATE TABLE held (x)")
        route = SinkRoute(SqliteSink(path, "rows", columns=["number"], busy_timeout=0.01))
        bridge.call(route.open)
        queue = bridge.get_or_create("rows", bq.QueueConfig(consumer=route))
        bridge.call(route.begin, BatchKey("q", 0))
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(bq.DeliveryError, match="locked"):
            feed(
                "rows",
                (batch_of(number) for number in range(3)),
                queue=queue,
                route=route,
                bridge=bridge,
                convert=pa.RecordBatch.to_pylist,
                unit=1,
            )
        bridge.call(route.rollback)
        bridge.call(route.close)
        assert queue.stats().accepted == 0
