"""The way in: messages of a broker, handled by a bounded pool of workers and acknowledged after their outcome.

    broker == session.take --> key lanes --> workers --> handler
       ^                                                    |
       +------------- session.settle <-- settlement <-------+

A message is acknowledged when its handler has returned, and only then; the consumers differ in their lanes alone.
"""

from __future__ import annotations

from batchqueue_async.intake.amqp.consumer import AmqpConsumer
from batchqueue_async.intake.config import ConnectionPool, IntakeConfig
from batchqueue_async.intake.kafka.consumer import KafkaConsumer
from batchqueue_async.intake.message import Message
from batchqueue_async.intake.nats.consumer import NatsConsumer
from batchqueue_async.intake.ports import DROP, KEY, PARTITION
from batchqueue_async.intake.redis.consumer import RedisConsumer
from batchqueue_async.intake.stats import IntakeReport, IntakeStats

__all__ = [
    "DROP",
    "KEY",
    "PARTITION",
    "AmqpConsumer",
    "ConnectionPool",
    "IntakeConfig",
    "IntakeReport",
    "IntakeStats",
    "KafkaConsumer",
    "Message",
    "NatsConsumer",
    "RedisConsumer",
]
