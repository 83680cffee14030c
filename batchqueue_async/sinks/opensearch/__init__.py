"""Documents in OpenSearch or Elasticsearch. Needs `[http]`."""

from __future__ import annotations

from batchqueue_async.sinks.opensearch.sink import OpenSearchSink

__all__ = ["OpenSearchSink"]
