"""Rows in a table of PostgreSQL. Needs `[postgres]`."""

from __future__ import annotations

from batchqueue_async.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
