"""The sources and views of a pipeline as DataFrames: streams, or the rows of a span of time for a batch job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as f

from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks._shared.secrets import resolve_option
from batchqueue_async.spark.pipelines.kinds import JDBC_DRIVERS, SOURCES
from batchqueue_async.spark.pipelines.targets import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession

    from batchqueue_async.spark.pipelines.spec import PipelineSpec, SourceSpec, ViewSpec, Watermark


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of event time, `since` in it and `until` not; None is open.

    Example:
        >>> str(Span())
        '..'
    """

    since: datetime | None = None
    until: datetime | None = None

    def __str__(self) -> str:
        return "..".join("" if each is None else each.isoformat() for each in (self.since, self.until))

    def __bool__(self) -> bool:
        return self.since is not None or self.until is not None


class Streams:
    """The frames of a run: each source a stream unless it is static, each stored view read from where it is kept.

    Attributes:
        frames: by name, what others read. A stored view is what was kept of it.
        computed: by name, the stored views as they are computed, for the queries that keep them.
    """

    def __init__(self, spark: SparkSession, spec: PipelineSpec) -> None:
        self.frames: dict[str, DataFrame] = {}
        self.computed: dict[str, DataFrame] = {}
        for source in spec.sources.values():
            made = _static(spark, source, Span()) if source.static else _stream(spark, source)
            self._add(source.name, _watermarked(made, source.watermark))
        for view in spec.views.values():
            made = _view(spark, view, self.frames)
            if view.store is not None and spec.is_stream(view.name):
                self.computed[view.name] = made
                made = spark.readStream.schema(made.schema).parquet(view.store.path)
            self._add(view.name, _watermarked(made, view.watermark))

    def _add(self, name: str, frame: DataFrame) -> None:
        frame.createOrReplaceTempView(name)
        self.frames[name] = frame


def batch_frames(spark: SparkSession, spec: PipelineSpec, span: Span, wanted: Iterable[str]) -> dict[str, DataFrame]:
    """The frames of a batch job over a span of time, by name: those wanted, and what they are made of."""
    needed = {name for each in wanted for name in spec.made_of(each)}
    frames: dict[str, DataFrame] = {}
    for source in spec.sources.values():
        if source.name in needed:
            frames[source.name] = _static(spark, source, span)
            frames[source.name].createOrReplaceTempView(source.name)
    for view in spec.views.values():
        if view.name not in needed:
            continue
        made = _view(spark, view, frames)
        readers = [other for other in spec.views.values() if view.name in other.inputs and other.name in needed]
        writers = [output for output in spec.outputs.values() if output.view == view.name]
        if len(readers) + len(writers) > 1:
            made = made.persist()
        made.createOrReplaceTempView(view.name)
        frames[view.name] = made
    return frames


def _view(spark: SparkSession, view: ViewSpec, frames: dict[str, DataFrame]) -> DataFrame:
    if view.function is None:
        return spark.sql(view.sql or "")
    made: Any = view.function(*[frames[name] for name in view.inputs])
    if not hasattr(made, "createOrReplaceTempView"):
        raise ConfigError(
            f"view {view.name!r}: function={view.function.__name__} returned {type(made).__name__}, which is not a "
            "DataFrame; return one"
        )
    return made  # type: ignore[no-any-return]  # just checked: PySpark has one class for each way of running


def _watermarked(frame: DataFrame, watermark: Watermark | None) -> DataFrame:
    if watermark is None or not frame.isStreaming:
        return frame
    return frame.withWatermark(watermark.column, watermark.delay)


# -- streams -----------------------------------------------------------------------------------------------------------


def _stream(spark: SparkSession, source: SourceSpec) -> DataFrame:
    reader, options = spark.readStream, source.options
    if source.type == "table":
        return reader.options(**plain(options["options"])).table(options["table"])
    if source.type == "rate":
        reader = reader.format("rate").option("rowsPerSecond", options["rows_per_second"])
        if options["partitions"]:
            reader = reader.option("numPartitions", options["partitions"])
        return reader.options(**plain(options["options"])).load()
    if source.type == "rate-micro-batch":
        return (
            reader.format("rate-micro-batch")
            .option("rowsPerBatch", options["rows_per_batch"])
            .option("numPartitions", options["partitions"])
            .option("startTimestamp", round(options["start"].timestamp() * 1000))
            .option("advanceMillisPerBatch", round(options["advance"] * 1000))
            .load()
        )
    if source.type == "files":
        files = _files(spark, reader, source)
        if options["max_files_per_trigger"]:
            files = files.option("maxFilesPerTrigger", options["max_files_per_trigger"])
        found: DataFrame = files.load(options["path"])
        return found
    messages = _kafka(reader, source).option("startingOffsets", options["start"])
    if options["max_offsets_per_trigger"]:
        messages = messages.option("maxOffsetsPerTrigger", options["max_offsets_per_trigger"])
    return _parsed(messages.load(), options["schema"])


def _files(spark: SparkSession, reader: Any, source: SourceSpec) -> Any:
    options = source.options
    reader = reader.format(options["format"]).options(**plain(options["options"]))
    if options["schema"]:
        return reader.schema(options["schema"])
    if options["format"] in {"parquet", "orc"}:  # which hold their schema
        return reader.schema(spark.read.format(options["format"]).load(options["path"]).schema)
    return reader


def _kafka(reader: Any, source: SourceSpec) -> Any:
    options = source.options
    reader = reader.format("kafka").option("kafka.bootstrap.servers", ",".join(options["brokers"]))
    if options["topics"]:
        reader = reader.option("subscribe", ",".join(options["topics"]))
    else:
        reader = reader.option("subscribePattern", options["pattern"])
    return reader.options(**plain(options["options"]))


def _parsed(frame: DataFrame, schema: str | None) -> DataFrame:
    """Kafka's columns, with the value as the struct of a schema: null where it is not JSON of that kind."""
    text = frame.withColumn("key", f.col("key").cast("string"))
    if schema is None:
        return text
    return text.withColumn("value", f.from_json(f.col("value").cast("string"), schema))


# -- spans of time -----------------------------------------------------------------------------------------------------


def _static(spark: SparkSession, source: SourceSpec, span: Span) -> DataFrame:
    made = _STATIC[source.type](spark, source, span)
    if source.time is None:
        return made
    if span.since is not None:
        made = made.where(f.col(source.time) >= f.lit(span.since))
    return made if span.until is None else made.where(f.col(source.time) < f.lit(span.until))


def _static_files(spark: SparkSession, source: SourceSpec, _: Span) -> DataFrame:
    return _files(spark, spark.read, source).load(source.options["path"])  # type: ignore[no-any-return]  # a DataFrame


def _static_table(spark: SparkSession, source: SourceSpec, _: Span) -> DataFrame:
    return spark.read.options(**plain(source.options["options"])).table(source.options["table"])


def _static_kafka(spark: SparkSession, source: SourceSpec, span: Span) -> DataFrame:
    reader = _kafka(spark.read, source)
    if source.time == "timestamp":  # Kafka's own: then it reads no more than the span
        if span.since is not None:
            reader = reader.option("startingTimestamp", round(span.since.timestamp() * 1000))
            reader = reader.option("startingOffsetsByTimestampStrategy", "latest")
        if span.until is not None:
            reader = reader.option("endingTimestamp", round(span.until.timestamp() * 1000))
    return _parsed(reader.load(), source.options["schema"])


def _static_jdbc(spark: SparkSession, source: SourceSpec, _: Span) -> DataFrame:
    options = source.options
    url = resolve_option(options["url"])
    driver = options["driver"] or next(
        (name for start, (name, *_) in JDBC_DRIVERS.items() if url.startswith(start)), None
    )
    given = {
        "url": url,
        "driver": driver,
        "dbtable": options["table"],
        "query": options["query"],
        "user": resolve_option(options["user"]),
        "password": resolve_option(options["password"]),
        "partitionColumn": options["partition_column"],
        "lowerBound": options["lower"],
        "upperBound": options["upper"],
        "numPartitions": options["partitions"],
        **plain(options["options"]),
    }
    return spark.read.format("jdbc").options(**{name: str(value) for name, value in given.items() if value}).load()


def _static_generated(spark: SparkSession, source: SourceSpec, span: Span) -> DataFrame:
    """The rows of `rate-micro-batch` whose time is before the span's end: they are a function of their number."""
    options = source.options
    if span.until is None:
        raise ConfigError(f"source {source.name!r}: type=rate-micro-batch has no last row; give --until")
    start, advance, rows = options["start"], options["advance"], options["rows_per_batch"]
    batches = max(math.ceil((span.until - start).total_seconds() / advance), 0)
    millis = f.lit(round(start.timestamp() * 1000)) + f.floor(f.col("id") / rows) * round(advance * 1000)
    timestamp = f.timestamp_millis(millis).alias("timestamp")
    return spark.range(0, batches * rows, 1, options["partitions"]).select(timestamp, f.col("id").alias("value"))


_STATIC: dict[str, Callable[[Any, SourceSpec, Span], DataFrame]] = {
    "files": _static_files,
    "table": _static_table,
    "kafka": _static_kafka,
    "jdbc": _static_jdbc,
    "rate-micro-batch": _static_generated,
}


def unreplayable(spec: PipelineSpec) -> list[SourceSpec]:
    """The sources that a batch job can't read."""
    return [source for source in spec.sources.values() if not SOURCES[source.type].replays]
