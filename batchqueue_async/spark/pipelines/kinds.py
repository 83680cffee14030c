"""The kinds of sources and targets that a file may name, and the fields of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchqueue_async._support.checks import Bytes, Choice, Flag, Seconds, Whole
from batchqueue_async.spark.pipelines.fields import OPTIONS, PATH, Field, Moment, SecretText, Text, Texts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchqueue_async.spark.pipelines.spec import Place

_NEEDED = Field(rule=Text(), needed=True)
_TEXT = Field(rule=Text())
_CODE = Field(rule=Text(code=True))
_WHOLE = Field(rule=Whole())
_FLAG = Field(rule=Flag())
_SECONDS = Field(rule=Seconds())
_SECRET = Field(rule=SecretText())
_TEXTS = Field(rule=Texts(least=1))
_BROKERS = Field(rule=Texts(least=1), needed=True)
_PARTITION_BY = Field(rule=Texts(), default=())
_FORMATS = ("json", "csv", "parquet", "orc", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind:
    """A kind of source.

    Attributes:
        fields: its own fields.
        streams: whether it can be read as a stream.
        replays: whether a batch job can read what a stream of it has read.
        one_of: fields of which exactly one is given.
        jars: what Spark loads for it: the beginning of the file's name, and its coordinates without the version.
    """

    fields: Mapping[str, Field]
    streams: bool = True
    replays: bool = True
    one_of: tuple[str, ...] = ()
    jars: tuple[str, str] | None = None


_KAFKA_JARS = ("spark-sql-kafka-", "org.apache.spark:spark-sql-kafka-0-10_2.13")

SOURCES: dict[str, SourceKind] = {
    "rate": SourceKind(
        fields={"rows_per_second": Field(rule=Whole(), default=1), "partitions": _WHOLE, "options": OPTIONS},
        replays=False,
    ),
    "rate-micro-batch": SourceKind(
        fields={
            "rows_per_batch": Field(rule=Whole(), needed=True),
            "start": Field(rule=Moment(), needed=True),
            "advance": Field(rule=Seconds(least=0.001), default=1.0),
            "partitions": Field(rule=Whole(), default=1),
        }
    ),
    "files": SourceKind(
        fields={
            "path": PATH,
            "format": Field(rule=Choice(words=_FORMATS), needed=True),
            "schema": _TEXT,
            "max_files_per_trigger": _WHOLE,
            "options": OPTIONS,
        }
    ),
    "kafka": SourceKind(
        fields={
            "brokers": _BROKERS,
            "topics": _TEXTS,
            "pattern": _TEXT,
            "schema": _TEXT,
            "start": Field(rule=Choice(words=("earliest", "latest")), default="earliest"),
            "max_offsets_per_trigger": _WHOLE,
            "options": OPTIONS,
        },
        one_of=("topics", "pattern"),
        jars=_KAFKA_JARS,
    ),
    "jdbc": SourceKind(
        fields={
            "url": _NEEDED,
            "table": _TEXT,
            "query": _CODE,
            "user": _TEXT,
            "password": _SECRET,
            "driver": _TEXT,
            "partition_column": _TEXT,
            "lower": _TEXT,
            "upper": _TEXT,
            "partitions": _WHOLE,
            "options": OPTIONS,
        },
        streams=False,
        one_of=("table", "query"),
    ),
    "table": SourceKind(fields={"table": _NEEDED, "options": OPTIONS}),
}

JDBC_DRIVERS = {
    "jdbc:derby:": ("org.apache.derby.iapi.jdbc.AutoloadedDriver", "derby-", "org.apache.derby:derby"),
    "jdbc:sqlite:": ("org.sqlite.JDBC", "sqlite-jdbc-", "org.xerial:sqlite-jdbc"),
    "jdbc:postgresql:": ("org.postgresql.Driver", "postgresql-", "org.postgresql:postgresql"),
    "jdbc:mysql:": ("com.mysql.cj.jdbc.Driver", "mysql-connector-", "com.mysql:mysql-connector-j"),
    "jdbc:mariadb:": ("org.mariadb.jdbc.Driver", "mariadb-java-client-", "org.mariadb.jdbc:mariadb-java-client"),
    "jdbc:sqlserver:": (
        "com.microsoft.sqlserver.jdbc.SQLServerDriver",
        "mssql-jdbc-",
        "com.microsoft.sqlserver:mssql-jdbc",
    ),
    "jdbc:oracle:": ("oracle.jdbc.OracleDriver", "ojdbc", "com.oracle.database.jdbc:ojdbc11"),
}
"""For the beginning of a JDBC URL the driver's class, the beginning of its jar's name, and its coordinates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetKind:
    """A kind of target, as one of the three places writes it.

    Attributes:
        fields: its own fields.
        sink: "module:class" of the sink; "" where Spark writes.
        upserts: the field of the sink that is given the output's key, so that a row replaces its earlier version.
        modes: the output modes that it takes without a key.
        in_fan_out: whether it may be one of several targets: a repeated batch is then in it once, or it promises no
            more than at least once anyway.
        jars: as for sources.
    """

    fields: Mapping[str, Field]
    sink: str = ""
    upserts: str = ""
    modes: tuple[str, ...] = ("append",)
    in_fan_out: bool = True
    jars: tuple[str, str] | None = None


_ALL_MODES = ("append", "update", "complete")
_FILES = {"path": PATH, "partition_by": _PARTITION_BY, "options": OPTIONS}
_SPARK_FILES = TargetKind(fields=_FILES, in_fan_out=False)
_SCHEMA = Field(rule=Choice(words=("strict", "widen", "add")), default="strict")
_LAKE_SCHEMA = Field(rule=Choice(words=("strict", "add")), default="strict")
_LOGIN = {"user": _TEXT, "password": _SECRET}
_SQLITE = {
    "path": PATH,
    "table": Field(rule=Text(), default="rows"),
    "busy_timeout": Field(rule=Seconds(), default=60.0),
}
_FACTORY = TargetKind(fields={"factory": _NEEDED, "options": OPTIONS}, modes=_ALL_MODES)

TARGETS: dict[str, dict[Place, TargetKind]] = {
    "sqlite": {
        "driver": TargetKind(
            fields={**_SQLITE, "columns": _TEXTS, "schema": _SCHEMA},
            sink="batchqueue_async.sinks.sqlite.sink:SqliteSink",
            upserts="upsert_on",
        ),
        "executors": TargetKind(fields=_SQLITE),
    },
    "postgres": {
        "driver": TargetKind(
            fields={
                "dsn": _NEEDED,
                "table": Field(rule=Text(), default="rows"),
                "schema": _SCHEMA,
                "namespace": _TEXT,
                "password": _SECRET,
                "connections": _WHOLE,
                "connect_timeout": _SECONDS,
                "timeout": _SECONDS,
            },
            sink="batchqueue_async.sinks.postgres.sink:PostgresSink",
            upserts="upsert_on",
        )
    },
    "jsonl": {
        "driver": TargetKind(
            fields={
                "path": PATH,
                "fsync": Field(rule=Choice(words=("batch", "close", "never")), default="batch"),
                "max_bytes": Field(rule=Bytes()),
                "keep_files": _WHOLE,
                "keep_seconds": _SECONDS,
            },
            sink="batchqueue_async.sinks.jsonl:JsonLinesSink",
        ),
        "executors": TargetKind(fields={"path": PATH}),
    },
    "kafka": {
        "spark": TargetKind(
            fields={
                "brokers": _BROKERS,
                "topic": _NEEDED,
                "key": _CODE,
                "value": _CODE,
                "options": OPTIONS,
            },
            modes=_ALL_MODES,
            jars=_KAFKA_JARS,
        ),
        "driver": TargetKind(
            fields={
                "bootstrap": _BROKERS,
                "topic": _NEEDED,
                "key": _TEXT,
                "compression": _TEXT,
                **_LOGIN,
                "mechanism": Field(rule=Text(), default="PLAIN"),
                "timeout": _SECONDS,
            },
            sink="batchqueue_async.sinks.kafka.sink:KafkaSink",
            modes=_ALL_MODES,
        ),
    },
    "http": {
        "driver": TargetKind(
            fields={
                "url": _NEEDED,
                "format": Field(rule=Choice(words=("json", "ndjson")), default="json"),
                "token": _SECRET,
                **_LOGIN,
                "timeout": _SECONDS,
            },
            sink="batchqueue_async.sinks.http.sink:HttpSink",
        )
    },
    "redis": {
        "driver": TargetKind(
            fields={"url": _NEEDED, "stream": _NEEDED, "maxlen": _WHOLE, "rows": _FLAG, **_LOGIN, "timeout": _SECONDS},
            sink="batchqueue_async.sinks.redis:RedisSink",
        )
    },
    "nats": {
        "driver": TargetKind(
            fields={
                "url": _NEEDED,
                "subject": _NEEDED,
                "stream": _TEXT,
                **_LOGIN,
                "token": _SECRET,
                "timeout": _SECONDS,
            },
            sink="batchqueue_async.sinks.nats:NatsSink",
        )
    },
    "amqp": {
        "driver": TargetKind(
            fields={
                "url": _NEEDED,
                "queue": _TEXT,
                "exchange": Field(rule=Text(), default=""),
                "routing_key": _TEXT,
                **_LOGIN,
                "timeout": _SECONDS,
            },
            sink="batchqueue_async.sinks.amqp:AmqpSink",
        )
    },
    "parquet": {
        "spark": _SPARK_FILES,
        "driver": TargetKind(
            fields={"url": PATH, "max_bytes": Field(rule=Bytes()), "options": OPTIONS},
            sink="batchqueue_async.sinks.parquet:ParquetSink",
        ),
    },
    "json": {"spark": _SPARK_FILES},
    "csv": {"spark": _SPARK_FILES},
    "orc": {"spark": _SPARK_FILES},
    "delta": {
        "spark": TargetKind(
            fields={"path": PATH, "partition_by": _PARTITION_BY, "options": OPTIONS},
            modes=("append", "complete"),
            jars=("delta-spark", "io.delta:delta-spark_2.13"),
        ),
        "driver": TargetKind(
            fields={"uri": PATH, "schema": _LAKE_SCHEMA, "partition_by": _PARTITION_BY, "storage_options": OPTIONS},
            sink="batchqueue_async.sinks.delta:DeltaSink",
        ),
    },
    "iceberg": {
        "spark": TargetKind(
            fields={"table": _NEEDED, "options": OPTIONS},
            modes=("append", "complete"),
            in_fan_out=False,
            jars=("iceberg-spark-runtime", "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13"),
        ),
        "driver": TargetKind(
            fields={"table": _NEEDED, "catalog": Field(rule=OPTIONS.rule, needed=True), "schema": _LAKE_SCHEMA},
            sink="batchqueue_async.sinks.iceberg:IcebergSink",
        ),
    },
    "table": {"spark": TargetKind(fields={"table": _NEEDED, "format": _TEXT, "options": OPTIONS}, in_fan_out=False)},
    "console": {
        "spark": TargetKind(
            fields={"rows": Field(rule=Whole(), default=20), "truncate": Field(rule=Flag(), default=True)},
            modes=_ALL_MODES,
        )
    },
    "noop": {"spark": TargetKind(fields={}, modes=_ALL_MODES)},
    "factory": {"driver": _FACTORY, "executors": TargetKind(fields=_FACTORY.fields)},
}
"""By type and place; the first place is the one that is meant where none is named."""
