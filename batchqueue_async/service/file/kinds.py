"""The kinds of sinks and sources that a file may name: the class of each, and its fields.

A field has the name that the class has for it, so that there is one vocabulary; what is not here is code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchqueue_async._support.checks import Seconds
from batchqueue_async.intake.config import INTAKE_RULES, IntakeConfig
from batchqueue_async.service.file.parts import (
    ADAPTIVE,
    BYTES,
    FLAG,
    LOGIN,
    MAP,
    NEEDED,
    OAUTH2,
    OPTIONAL_BATCH,
    RETRY,
    SECONDS,
    SECRET,
    TEXT,
    TEXTS,
    TLS,
    WHOLE,
    WHOLES,
    choice,
    fields_of,
    make_policies,
    texts_in,
)
from batchqueue_async.service.file.rules import AnyMap, Named, Registered, Text
from batchqueue_async.service.file.shapes import Field, Struct, Tagged

if TYPE_CHECKING:
    from collections.abc import Mapping

_TLS = Field(of=TLS)
_OAUTH2 = Field(of=OAUTH2)
_TIMES = {"timeout": SECONDS, "connect_timeout": SECONDS}
_KAFKA_LOGIN = {
    **LOGIN,
    "mechanism": choice("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"),
    "client_id": TEXT,
}
_NATS_LOGIN = {**LOGIN, "token": SECRET, "credentials": TEXT}
_OTLP = {
    "endpoint": NEEDED,
    "signal": choice("traces", "metrics", "logs"),
    "resource": Field(of=AnyMap()),
    "scope": TEXT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A class that a file can name.

    Attributes:
        module: where it is.
        name: its name there.
        fields: what a file says of it.
        positional: the fields that the class takes by place, in this order.
        extra: what is installed for it, as in `batchqueue-async[kafka]`; "" for nothing.
        code: parameters of the class that are code, or that nobody needs in a file.
        text: what it is, in a line.
    """

    module: str
    name: str
    fields: Mapping[str, Field]
    positional: tuple[str, ...] = ()
    extra: str = ""
    code: tuple[str, ...] = ()
    text: str = ""

    def load(self) -> Any:
        """The class; a class needs its extra only when it is made."""
        return getattr(import_module(self.module), self.name)

    def texts(self) -> dict[str, str]:
        """What the class says of its parameters."""
        return texts_in(self.load().__init__.__doc__)


_HTTP = {
    "headers": MAP,
    "token": SECRET,
    "user": TEXT,
    "password": SECRET,
    "oauth2": _OAUTH2,
    "connections": WHOLE,
    "tls": _TLS,
    "proxy": TEXT,
    "retryable": WHOLES,
    **_TIMES,
}


def _sink(module: str, name: str, text: str, fields: Mapping[str, Field], *positional: str, **more: Any) -> Kind:
    return Kind(
        module=f"batchqueue_async.sinks.{module}", name=name, text=text, fields=fields, positional=positional, **more
    )


SINKS: dict[str, Kind] = {
    "sqlite": _sink(
        "sqlite",
        "SqliteSink",
        "rows of a table in an SQLite file",
        {
            "path": NEEDED,
            "table": TEXT,
            "columns": TEXTS,
            "busy_timeout": SECONDS,
            "schema": choice("strict", "widen", "add"),
            "upsert_on": TEXTS,
        },
        "path",
    ),
    "jsonl": _sink(
        "jsonl",
        "JsonLinesSink",
        "a line of JSON per record, in files that are rotated",
        {
            "path": NEEDED,
            "fsync": choice("batch", "close", "never"),
            "max_bytes": BYTES,
            "keep_files": WHOLE,
            "keep_seconds": SECONDS,
        },
        "path",
        code=("reopen_on",),
    ),
    "postgres": _sink(
        "postgres",
        "PostgresSink",
        "rows of a table of PostgreSQL",
        {
            "dsn": NEEDED,
            "table": TEXT,
            "schema": choice("strict", "widen", "add"),
            "namespace": TEXT,
            "columns": TEXTS,
            "upsert_on": TEXTS,
            "key_column": TEXT,
            "password": SECRET,
            "tls": _TLS,
            "connections": WHOLE,
            "retryable": TEXTS,
            **_TIMES,
        },
        "dsn",
        extra="postgres",
    ),
    "kafka": _sink(
        "kafka",
        "KafkaSink",
        "records of a Kafka topic",
        {
            "bootstrap": replace(TEXTS, needed=True),
            "topic": NEEDED,
            "key": TEXT,
            "value": TEXT,
            "key_header": TEXT,
            "compression": choice("gzip", "lz4", "snappy", "zstd", optional=True),
            "idempotent": FLAG,
            "max_batch_bytes": BYTES,
            "max_record_bytes": BYTES,
            **_KAFKA_LOGIN,
            "transaction_timeout": SECONDS,
            "retryable": TEXTS,
            **_TIMES,
        },
        "bootstrap",
        "topic",
        extra="kafka",
        code=("headers", "timestamp", "partitioner"),
    ),
    "http": _sink(
        "http",
        "HttpSink",
        "a request per batch",
        {
            "url": NEEDED,
            "format": choice("json", "ndjson", "remote_write", "loki"),
            "method": choice("POST", "PUT", "PATCH"),
            "compression": choice("gzip", "zstd", optional=True),
            "keepalive": SECONDS,
            "max_answer": BYTES,
            "final": WHOLES,
            "idempotency_header": TEXT,
            **_HTTP,
        },
        "url",
        extra="http",
        code=("judge", "explain"),
    ),
    "otlp": _sink(
        "otlp",
        "OtlpSink",
        "spans, log records or metrics over OTLP by gRPC",
        {
            **_OTLP,
            "headers": MAP,
            "token": SECRET,
            "compression": choice("gzip", optional=True),
            "timeout": SECONDS,
            "tls": _TLS,
            "retryable": TEXTS,
        },
        "endpoint",
        extra="otlp",
    ),
    "otlp-http": _sink(
        "otlp",
        "OtlpHttpSink",
        "the same by HTTP",
        {
            **_OTLP,
            "compression": choice("gzip", "zstd", optional=True),
            **{name: each for name, each in _HTTP.items() if name not in ("user", "password")},
        },
        "endpoint",
        extra="otlp,http",
    ),
    "clickhouse": _sink(
        "clickhouse",
        "ClickHouseSink",
        "rows of a table of ClickHouse",
        {
            "url": NEEDED,
            "table": NEEDED,
            "database": TEXT,
            "columns": TEXTS,
            "deduplicate": FLAG,
            "settings": MAP,
            "compression": choice("gzip", "zstd", optional=True),
            **_HTTP,
        },
        "url",
        "table",
        extra="http",
    ),
    "opensearch": _sink(
        "opensearch",
        "OpenSearchSink",
        "documents of an index of OpenSearch or Elasticsearch",
        {
            "url": NEEDED,
            "index": NEEDED,
            "id": TEXT,
            "operation": choice("index", "create"),
            "pipeline": TEXT,
            "compression": choice("gzip", optional=True),
            "max_answer": BYTES,
            **_HTTP,
        },
        "url",
        extra="http",
    ),
    "amqp": _sink(
        "amqp",
        "AmqpSink",
        "messages of RabbitMQ",
        {
            "url": NEEDED,
            "queue": TEXT,
            "exchange": TEXT,
            "routing_key": TEXT,
            **LOGIN,
            "persistent": FLAG,
            "mandatory": FLAG,
            "content_type": TEXT,
            "headers": MAP,
            "retryable": WHOLES,
            **_TIMES,
        },
        "url",
        extra="amqp",
    ),
    "nats": _sink(
        "nats",
        "NatsSink",
        "messages of a NATS JetStream stream",
        {
            "url": replace(TEXTS, needed=True),
            "subject": NEEDED,
            "stream": TEXT,
            **_NATS_LOGIN,
            "headers": MAP,
            "retryable": WHOLES,
            **_TIMES,
        },
        "url",
        extra="nats",
    ),
    "redis": _sink(
        "redis",
        "RedisSink",
        "entries of a Redis stream",
        {
            "url": NEEDED,
            "stream": NEEDED,
            "maxlen": WHOLE,
            "approximate": FLAG,
            "rows": FLAG,
            "field": TEXT,
            "key_field": TEXT,
            **LOGIN,
            "connections": WHOLE,
            "retryable": TEXTS,
            **_TIMES,
        },
        "url",
        extra="redis",
    ),
    "parquet": _sink(
        "parquet",
        "ParquetSink",
        "Parquet files, in a directory or an object store",
        {
            "url": NEEDED,
            "columns": TEXTS,
            "max_bytes": BYTES,
            "max_seconds": SECONDS,
            "compression": TEXT,
            "options": MAP,
        },
        "url",
        extra="parquet",
        code=("schema",),
    ),
    "delta": _sink(
        "delta",
        "DeltaSink",
        "a Delta Lake table",
        {
            "uri": NEEDED,
            "columns": TEXTS,
            "schema": choice("strict", "add"),
            "partition_by": TEXTS,
            "storage_options": MAP,
        },
        "uri",
        extra="delta",
    ),
    "iceberg": _sink(
        "iceberg",
        "IcebergSink",
        "an Iceberg table",
        {
            "table": NEEDED,
            "catalog": replace(MAP, needed=True),
            "name": TEXT,
            "columns": TEXTS,
            "schema": choice("strict", "add"),
        },
        "table",
        extra="iceberg",
    ),
    "memory": _sink("memory", "MemorySink", "memory: to try a file, without a destination", {}),
}
CODE_SINK = Struct(
    fields={
        "use": Field(of=Registered(what="sink"), needed=True, text="the name that @app.sink gave a function or class"),
        "options": Field(of=AnyMap(), text="what that is called with"),
    },
    what="code sink",
)
"""A sink that the program's code makes, such as a `GrpcSink`, which takes functions."""


_INTAKE_FIELDS = fields_of(
    IntakeConfig,
    INTAKE_RULES,
    without=("database", "ordered_by", "dead_letters"),
    retry=RETRY,
    reconnect=RETRY,
    adaptive=ADAPTIVE,
    batch=OPTIONAL_BATCH,
    decode=Registered(what="decoder", built_in=("json", "text"), optional=True),
) | {
    "ordered_by": Field(
        of=Registered(what="key", built_in=("partition", "key"), optional=True),
        text="keep messages in order: partition or key where the broker has them, or a key that @app.key registered",
    ),
    "dead_letters": Field(
        of=Text(),
        needed=True,
        text="the broker's queue, topic, subject or stream for messages that are given up; drop loses them knowingly",
    ),
    "to": Field(of=Named(sections=("queues", "exporters")), text="the queue or exporter that messages go to"),
    "handler": Field(of=Registered(what="handler"), text="instead of `to`: the handler that takes the messages"),
}

_PLACEHOLDERS = ("decode", "dead_letters", "ordered_by", "to", "handler")


def _check_intake(**values: Any) -> None:
    """Check the fields together that `IntakeConfig` has; what a file names by name is left out."""
    known = {name: each for name, each in values.items() if name in INTAKE_RULES and name not in _PLACEHOLDERS}
    IntakeConfig(**make_policies(known), dead_letters="unnamed")


def _source(module: str, name: str, text: str, fields: Mapping[str, Field], *positional: str, **more: Any) -> Kind:
    return Kind(
        module=f"batchqueue_async.intake.{module}.consumer",
        name=name,
        text=text,
        fields={**fields, **_INTAKE_FIELDS},
        positional=positional,
        **more,
    )


SOURCES: dict[str, Kind] = {
    "amqp": _source(
        "amqp",
        "AmqpConsumer",
        "a queue of RabbitMQ",
        {
            "url": NEEDED,
            "queue": NEEDED,
            **LOGIN,
            "heartbeat": WHOLE,
            "reader": choice("stream", "client"),
        },
        "url",
        "queue",
        extra="amqp",
    ),
    "kafka": _source(
        "kafka",
        "KafkaConsumer",
        "topics of Kafka, as a member of a group",
        {
            "bootstrap": replace(TEXTS, needed=True),
            "topics": replace(TEXTS, needed=True),
            "group": NEEDED,
            "start": choice("earliest", "latest"),
            "isolation": choice("read_committed", "read_uncommitted"),
            "group_instance_id": TEXT,
            "session_timeout": SECONDS,
            "rebalance_timeout": SECONDS,
            "revoke_timeout": Field(of=Seconds(above=False, optional=True)),
            "stall_timeout": SECONDS,
            "ahead": WHOLE,
            "max_partition_bytes": BYTES,
            **_KAFKA_LOGIN,
            "timeout": SECONDS,
        },
        "bootstrap",
        "topics",
        extra="kafka",
    ),
    "nats": _source(
        "nats",
        "NatsConsumer",
        "a stream of NATS JetStream",
        {
            "url": replace(TEXTS, needed=True),
            "subject": NEEDED,
            "stream": NEEDED,
            "durable": NEEDED,
            **_NATS_LOGIN,
            "ack_wait": SECONDS,
            "heartbeat": SECONDS,
            "expires": SECONDS,
        },
        "url",
        "subject",
        extra="nats",
    ),
    "redis": _source(
        "redis",
        "RedisConsumer",
        "a stream of Redis, as a consumer of a group",
        {
            "url": NEEDED,
            "stream": NEEDED,
            "group": NEEDED,
            "consumer": TEXT,
            "start": Field(of=Text()),
            "field": TEXT,
            "key_field": TEXT,
            **LOGIN,
            "block": SECONDS,
            "claim_after": Field(of=Seconds(above=False)),
            "timeout": SECONDS,
        },
        "url",
        "stream",
        extra="redis",
    ),
}

SINK = Tagged(
    what="sink",
    kinds={
        **{name: Struct(fields=kind.fields, what=f"{name} sink") for name, kind in SINKS.items()},
        "code": CODE_SINK,
    },
)
SOURCE = Tagged(
    what="source",
    kinds={
        name: Struct(fields=kind.fields, what=f"{name} source", make=_check_intake) for name, kind in SOURCES.items()
    },
)
