"""Messages in a topic of Kafka. Needs `[kafka]`."""

from __future__ import annotations

from batchqueue_async.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
