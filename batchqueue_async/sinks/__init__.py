"""Where batches end: each sink in a module of its own, so that extras stay optional; by its name it is found here too.

Example:
    >>> from batchqueue_async.sinks import JsonLinesSink
    >>> JsonLinesSink.__module__
    'batchqueue_async.sinks.jsonl'
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "AmqpSink": "amqp",
    "ClickHouseSink": "clickhouse",
    "DeltaSink": "delta",
    "GrpcSink": "grpc",
    "HttpSink": "http",
    "IcebergSink": "iceberg",
    "JsonLinesSink": "jsonl",
    "KafkaSink": "kafka",
    "MemorySink": "memory",
    "NatsSink": "nats",
    "OpenSearchSink": "opensearch",
    "OtlpHttpSink": "otlp",
    "OtlpSink": "otlp",
    "ParquetSink": "parquet",
    "PostgresSink": "postgres",
    "RedisSink": "redis",
    "SqliteSink": "sqlite",
}
"""Which module has which sink; it is imported when its sink is asked for, with the dependencies that it needs."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
