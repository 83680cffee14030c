"""Rows in a table of ClickHouse. Needs `[http]`."""

from __future__ import annotations

from batchqueue_async.sinks.clickhouse.sink import ClickHouseSink

__all__ = ["ClickHouseSink"]
