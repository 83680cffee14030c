"""Batches over HTTP. Needs `[http]`."""

from __future__ import annotations

from batchqueue_async.sinks.http.sink import FormatName, HttpAnswer, HttpSink, item_statuses

__all__ = ["FormatName", "HttpAnswer", "HttpSink", "item_statuses"]
