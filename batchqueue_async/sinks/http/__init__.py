"""Batches over HTTP. Needs `[http]`."""

from __future__ import annotations

from batchqueue_async.sinks.http.sink import FormatName, HttpSink, item_statuses
from batchqueue_async.sinks.http.transport import HttpAnswer, OAuth2

__all__ = ["FormatName", "HttpAnswer", "HttpSink", "OAuth2", "item_statuses"]
