"""Public path of Prometheus remote write; it lives in `sinks.http.remote_write`."""

from __future__ import annotations

from batchqueue_async.sinks.http.remote_write import RemoteWrite

__all__ = ["RemoteWrite"]
