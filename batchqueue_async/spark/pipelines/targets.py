"""Where an output's rows go: sinks in the driver, the data source on the executors, or Spark's own writers."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks._shared.secrets import resolve_option
from batchqueue_async.sinks.base import Sink, TransactionalSink
from batchqueue_async.spark.driver_sink import DriverSink
from batchqueue_async.spark.pipelines.fields import is_reference
from batchqueue_async.spark.pipelines.kinds import TARGETS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchqueue_async.spark.pipelines.spec import OutputSpec, TargetSpec


def make_sink(output: str, target: TargetSpec, key: tuple[str, ...]) -> Any:
    """The sink of a target in the driver, not opened.

    Raises:
        ConfigError: its options contradict each other, or it needs a package that is not installed.
    """
    if target.type == "factory":
        module, _, name = str(target.options["factory"]).partition(":")
        return getattr(importlib.import_module(module), name)(plain(target.options["options"]))
    kind = TARGETS[target.type][target.place]
    module, _, name = kind.sink.partition(":")
    options = {field: value for field, value in target.options.items() if value is not None}
    if upserts(target, key):
        options[kind.upserts] = key
    try:
        return getattr(importlib.import_module(module), name)(**options)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"output {output!r}: {target.type} needs {error.name}, which is not installed; "
            f"run: pip install 'batchqueue-async[{target.type}]'"
        ) from error


def upserts(target: TargetSpec, key: tuple[str, ...]) -> bool:
    """Whether a row replaces its earlier version: the output has a key, and the sink takes one for that."""
    kind = TARGETS[target.type][target.place]
    if not (kind.upserts and key and kind.sink):
        return False
    module, _, name = kind.sink.partition(":")
    return kind.upserts in inspect.signature(getattr(importlib.import_module(module), name)).parameters


def appends(output: OutputSpec) -> bool:
    """Whether rows of two spans that overlap would be in twice: in a sink that knows spans, and not their rows."""
    return any(target.place == "driver" and not upserts(target, output.key) for target in output.targets)


def why_not_again(target: TargetSpec, key: tuple[str, ...], *, whole: bool) -> tuple[str, str] | None:
    """Why a batch job that is run twice would not leave the same rows, and the way out; None: it would.

    Args:
        target: where it writes.
        key: the output's key.
        whole: whether the job computes all rows there are, instead of those of a span of time.
    """
    if target.place == "executors":
        return "appends the rows of each run", "write in: driver"
    if target.place == "driver":
        if not whole or upserts(target, key) or target.type == "factory":
            return None
        return "appends all rows with each run", "give --from and --until, or a sink that takes a key, such as postgres"
    if target.type in {"console", "noop"} or (whole and target.type != "kafka"):
        return None
    if target.type == "kafka":
        return "sends every row again with each run", "write in: driver, which remembers what was sent"
    if target.options.get("partition_by"):
        return None
    return (
        "would be replaced whole by the rows of one span",
        "add partition_by: [columns], and only its parts are replaced",
    )


def plain(options: Mapping[str, str]) -> dict[str, str]:
    """Options with what `env:NAME` and `file:/path` stand for.

    Example:
        >>> plain({"path": "file:///data", "header": "true"})
        {'path': 'file:///data', 'header': 'true'}
    """
    return {name: str(resolve_option(value)) if is_reference(value) else value for name, value in options.items()}


def _label(target: TargetSpec) -> str:
    """What a target is, in short: its type, and what it writes to."""
    found = next((target.options[name] for name in _NAMES if target.options.get(name)), "")
    short = re.split("[/:]", str(found).rstrip("/"))[-1]
    return f"{target.type}-{short}" if short and not is_reference(found) else target.type


_NAMES = ("table", "topic", "subject", "stream", "queue", "factory", "path", "uri", "url")
"""The options that say what a target writes to, without where that is."""


class Writing:
    """One output: what writes its micro-batches, or the whole of a batch job.

    Attributes:
        sinks: the sinks in the driver.
        on_executors: whether executors write, whose commits report what they did.
        failure: what a sink raised in the last batch that failed; Spark itself passes on no more than its text.
    """

    def __init__(self, pipeline: str, output: OutputSpec, ledger: str) -> None:
        self._pipeline = pipeline
        self._output = output
        self._ledger = ledger
        self.sinks: list[DriverSink] = []
        self.on_executors = any(target.place == "executors" for target in output.targets)
        self.failure: BaseException | None = None
        self._by_target: dict[int, DriverSink] = {}
        for place, target in enumerate(output.targets):
            if target.place == "driver":
                self._by_target[place] = self._driver_sink(place, target, None)
        self.sinks = list(self._by_target.values())

    def _driver_sink(self, place: int, target: TargetSpec, source: str | None) -> DriverSink:
        output = self._output
        made = make_sink(output.name, target, output.key)
        is_sink = isinstance(made, Sink)
        key = list(output.key) if output.key else None
        dead = output.dead_letters
        several = sum(each.place == "driver" for each in output.targets) > 1
        return DriverSink(
            self._name(place),
            sink=made if is_sink else None,
            consumer=None if is_sink else made,
            key=key,
            source=source,
            ledger=None if not is_sink or isinstance(made, TransactionalSink) else self._ledger,
            on_bad_row="fail" if dead is None else "dead_letter",
            dead_letters=None if dead is None else f"{dead}.{place}" if several else dead,
        )

    def _name(self, place: int) -> str:
        """The name of a target's sink, by which its batches are known: the same when others are added or removed."""
        labels = [_label(target) for target in self._output.targets]
        before = labels[:place].count(labels[place])
        return f"{self._pipeline}-{self._output.name}-{labels[place]}{f'-{before + 1}' if before else ''}"

    def close(self) -> None:
        """Close the sinks."""
        for sink in self.sinks:
            sink.close()

    # -- streams -------------------------------------------------------------------------------------------------------

    def start(self, frame: Any, *, once: bool) -> Any:
        """Start the streaming query of the output, and return it."""
        output = self._output
        self.failure = None
        if len(output.targets) == 1:
            frame = _shaped(frame, output.targets[0])
        writer = frame.writeStream.queryName(output.name).outputMode(output.mode)
        writer = writer.option("checkpointLocation", output.checkpoint)
        if once or output.trigger.available_now:
            writer = writer.trigger(availableNow=True)
        elif output.trigger.every is not None:
            writer = writer.trigger(processingTime=f"{round(output.trigger.every * 1000)} milliseconds")
        target = output.targets[0]
        if len(output.targets) == 1 and target.place == "spark":
            return _stream_of_spark(writer, target)
        if target.place == "executors":
            return _formatted(writer, "batchqueue", executor_options(target, output.dead_letters)).start()
        return writer.foreachBatch(self.write).start()

    def write(self, frame: Any, batch_id: int) -> None:
        """Write one micro-batch to each target; it is computed once for all."""
        shared = len(self._output.targets) > 1
        if shared:
            frame.persist()
        try:
            for place, target in enumerate(self._output.targets):
                sink = self._by_target.get(place)
                if sink is not None:
                    sink(frame, batch_id)
                else:
                    _batch_of_spark(frame, target, self._output.mode, (self._output.checkpoint, batch_id))
        except BaseException as error:
            self.failure = error
            raise
        finally:
            if shared:
                frame.unpersist()

    # -- batch jobs ----------------------------------------------------------------------------------------------------

    def write_whole(self, frame: Any, span: str) -> None:
        """Write the result of a batch job over a span of time; a repetition of it has no effect, or replaces it."""
        shared = len(self._output.targets) > 1
        if shared:
            frame.persist()
        try:
            for place, target in enumerate(self._output.targets):
                if target.place == "driver":
                    # Where rows replace earlier ones, a repetition is written again, since its input may have changed.
                    again = upserts(target, self._output.key)
                    source = None if again else f"{self._pipeline}/{self._output.name}/{span}"
                    with self._driver_sink(place, target, source) as sink:
                        sink(frame, None if again else 0, part=self._name(place))
                elif target.place == "executors":
                    options = executor_options(target, self._output.dead_letters)
                    _formatted(frame.write, "batchqueue", options).mode("append").save()
                else:
                    _batch_of_spark(frame, target, self._output.mode, None)
        finally:
            if shared:
                frame.unpersist()


def executor_options(target: TargetSpec, dead_letters: str | None) -> dict[str, str]:
    """The options of `format("batchqueue")` for a target on the executors."""
    bad = {} if dead_letters is None else {"on_bad_row": "dead_letter", "dead_letters": dead_letters}
    if target.type == "factory":
        return {**plain(target.options["options"]), **bad, "sink": target.options["factory"]}
    options = {name: str(value) for name, value in target.options.items() if value is not None}
    return {"sink": target.type, **options, **bad}


def _formatted(writer: Any, name: str, options: Mapping[str, str]) -> Any:
    return writer.format(name).options(**options)


def _spark_format(target: TargetSpec) -> tuple[str, dict[str, str]]:
    """The format of one of Spark's own writers, and its options."""
    options = target.options
    if target.type == "kafka":
        brokers = ",".join(options["brokers"])
        return "kafka", {"kafka.bootstrap.servers": brokers, "topic": options["topic"], **plain(options["options"])}
    if target.type == "console":
        return "console", {"numRows": str(options["rows"]), "truncate": str(options["truncate"]).lower()}
    if target.type == "table":
        return cast("str", options["format"] or ""), plain(options["options"])
    path = {"path": options["path"]} if options.get("path") else {}
    return target.type, {**path, **plain(options.get("options") or {})}


def _shaped(frame: Any, target: TargetSpec) -> Any:
    """The columns that Kafka's writer wants: the key, and the value as JSON unless a column is named for it."""
    if target.type != "kafka":
        return frame
    from pyspark.sql import functions as f  # noqa: PLC0415 - only where a pipeline runs

    key, value = target.options["key"], target.options["value"]
    whole = f.to_json(f.struct(*[f.col(f"`{name}`") for name in frame.columns]))
    columns = [(whole if value is None else f.col(value)).alias("value")]
    if key is not None:
        columns.append(f.col(key).cast("string").alias("key"))
    return frame.select(*columns)


def _stream_of_spark(writer: Any, target: TargetSpec) -> Any:
    name, options = _spark_format(target)
    if target.options.get("partition_by"):
        writer = writer.partitionBy(*target.options["partition_by"])
    if name:
        writer = writer.format(name)
    writer = writer.options(**options)
    if target.type in {"table", "iceberg"}:
        return writer.toTable(target.options["table"])
    return writer.start()


def _batch_of_spark(frame: Any, target: TargetSpec, mode: str, batch: tuple[str, int] | None) -> None:
    """Write a frame by Spark; `batch` is the micro-batch that it is, by which Delta knows a repetition."""
    if target.type == "console":
        frame.show(target.options["rows"], truncate=target.options["truncate"])
        return
    name, options = _spark_format(target)
    if target.type == "delta" and batch is not None:
        options |= {"txnAppId": batch[0], "txnVersion": str(batch[1])}
    writer = _shaped(frame, target).write.options(**options)
    if name:
        writer = writer.format(name)
    if target.options.get("partition_by"):
        writer = writer.partitionBy(*target.options["partition_by"])
        writer = writer.option("partitionOverwriteMode", "dynamic")
    replaces = batch is None and target.type not in {"kafka", "noop"}
    writer = writer.mode("overwrite" if replaces or mode == "complete" else "append")
    if target.type in {"table", "iceberg"}:
        writer.saveAsTable(target.options["table"])
    else:
        writer.save()
