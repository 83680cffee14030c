"""The lane to Kafka: what is handled of each partition, rebalances, commits, and the consumer itself."""

from __future__ import annotations

from batchqueue_async.intake.kafka.consumer import KafkaConsumer

__all__ = ["KafkaConsumer"]
