"""Public path of the HTTP body formats; they live in `sinks.http.formats`."""

from __future__ import annotations

from batchqueue_async.sinks.http.formats import Body, Format, JsonArray, JsonLines, LokiPush

__all__ = ["Body", "Format", "JsonArray", "JsonLines", "LokiPush"]
