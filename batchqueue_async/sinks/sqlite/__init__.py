"""Rows in a SQLite table."""

from __future__ import annotations

from batchqueue_async.sinks.sqlite.sink import SqliteSink, SqliteTransaction

__all__ = ["SqliteSink", "SqliteTransaction"]
