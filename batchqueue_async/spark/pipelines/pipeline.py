"""`SparkPipeline`: a pipeline of Structured Streaming from a file or mapping, checked, explained and run."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from batchqueue_async._support import log
from batchqueue_async._support.redaction import without_credentials
from batchqueue_async.errors import ConfigError, ConfigFault
from batchqueue_async.spark.pipelines import reading, session
from batchqueue_async.spark.pipelines.frames import Span, Streams, batch_frames, unreplayable
from batchqueue_async.spark.pipelines.restart import Restarts
from batchqueue_async.spark.pipelines.spans import WrittenSpans
from batchqueue_async.spark.pipelines.supervisor import PipelineRun, error_text, make_directory
from batchqueue_async.spark.pipelines.targets import Writing, appends, why_not_again
from batchqueue_async.spark.pipelines.waits import begin, call_within

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession

    from batchqueue_async.spark.pipelines.progress import QueryProgress, Sample
    from batchqueue_async.spark.pipelines.spec import OutputSpec, PipelineSpec

FINE = 0
COULD_NOT = 2
UNDONE = 3
_STEP = 0.2
_EXPLAINED = "explained_by_batchqueue"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """How a run ended.

    Attributes:
        code: the exit status: 0 in order, 3 with something that was not done.
        seconds: what it took.
        queries: what each query did.
        samples: the last micro-batches, for pictures.
        failed: outputs and stored views that were given up, each with its error in a line.
        stuck: what did not stop in time.
        batch: the outputs that were written as batch jobs, with their rows where a sink counted them.
    """

    code: int
    seconds: float
    queries: tuple[QueryProgress, ...] = ()
    samples: tuple[Sample, ...] = ()
    failed: Mapping[str, str]
    stuck: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()


class SparkPipeline:
    """Sources, views and outputs of one Spark application, as a file names them.

    Everything is Spark's own API: each output is a streaming query with a checkpoint, each view a DataFrame.

    Example:
        >>> pipeline = SparkPipeline.from_mapping({
        ...     "sources": {"ticks": {"type": "rate"}},
        ...     "views": {"even": {"sql": "SELECT value FROM ticks WHERE value % 2 = 0"}},
        ...     "outputs": {"even_rows": {"view": "even", "to": {"type": "console"}}},
        ... })
        >>> pipeline.spec.inputs_of("even")
        ('ticks',)
    """

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self._spans = WrittenSpans(Path(spec.state, "ledger"), spec.name)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, overrides: Mapping[str, Any] | None = None) -> Self:
        """The pipeline of a YAML file; `overrides` are values by dotted names, such as "spark.master".

        Raises:
            ConfigError: something is wrong with it; the error's `faults` has everything, with line and column.
        """
        return cls(reading.read_file(path, overrides))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, overrides: Mapping[str, Any] | None = None) -> Self:
        """The pipeline of a mapping that is made as a file would be.

        Raises:
            ConfigError: something is wrong with it; the error's `faults` has everything.
        """
        return cls(reading.read_mapping(mapping, overrides))

    # -- Spark ---------------------------------------------------------------------------------------------------------

    def session(self) -> SparkSession:
        """Start Spark with the pipeline's settings, or take the session that there is.

        Raises:
            TimeoutError: it did not start within `timeouts.start`.
        """
        return call_within(self.spec.timeouts.start, "the start of Spark", lambda: session.start(self.spec))

    def start(self, spark: SparkSession, *, once: bool = False) -> PipelineRun:
        """A run of the streaming outputs, for a program that steps it itself; nothing runs before its first `step`."""
        return PipelineRun(spark, self.spec, once=once)

    def batch(
        self, spark: SparkSession, *, since: datetime | None = None, until: datetime | None = None
    ) -> dict[str, DataFrame]:
        """Every source and view as the DataFrame of a batch job over a span of time, by name.

        Raises:
            ConfigError: a source has no past to read.
        """
        span = Span(since=since, until=until)
        self._check_span(span, outputs=())
        return batch_frames(spark, self.spec, span, [*self.spec.sources, *self.spec.views])

    def explain(self, spark: SparkSession) -> str:
        """Spark's plan for each stored view and each output, without credentials.

        Of a stream with aggregates it is the logical plan; Spark makes the physical one anew for each micro-batch.
        """
        for view in self.spec.views.values():
            if view.store is not None and self.spec.is_stream(view.name):
                make_directory(spark, view.store.path)
        streams = Streams(spark, self.spec)
        named = {f"view {name}, stored": frame for name, frame in streams.computed.items()}
        named |= {f"output {name}": streams.frames[output.view] for name, output in self.spec.outputs.items()}
        return "\n".join(f"-- {title}\n{without_credentials(_plan(spark, frame))}\n" for title, frame in named.items())

    # -- a run from beginning to end -----------------------------------------------------------------------------------

    def run(
        self,
        *,
        spark: SparkSession | None = None,
        once: bool = False,
        since: datetime | None = None,
        until: datetime | None = None,
        stop: threading.Event | None = None,
        watch: Callable[[PipelineRun], bool] | None = None,
    ) -> PipelineReport:
        """Run the pipeline until it is stopped, or, with `once` or a span of time, until it is done.

        Args:
            spark: the session; None starts one, and stops it in the end.
            once: take what the sources have now, and end.
            since: write what happened from here on, as a batch job.
            until: and before this.
            stop: ends the run in order when it is set, by a signal handler or another thread.
            watch: called a few times a second; returns True to end the run in order.

        Raises:
            ConfigError: the pipeline can't be run so; the message says why.
            TimeoutError: Spark did not start in time.
        """
        span = Span(since=since, until=until)
        if span and once:
            raise ConfigError("pipeline: once takes what streams have, and since and until a span; give one of them")
        wholes = [output for output in self.spec.outputs.values() if span or not self.spec.is_stream(output.view)]
        self._check_span(span, outputs=tuple(wholes))
        began = time.monotonic()
        stop = stop or threading.Event()
        found = spark if spark is not None else self.session()
        log.info("spark_pipeline_started", pipeline=self.spec.name, once=once, span=str(span) if span else None)
        try:
            failed = self._write_wholes(found, span, wholes, stop)
            report = self._supervise(found, stop, watch, once=once) if not span and not failed else None
        finally:
            if spark is None:
                call_within_or_log(self.spec.timeouts.stop, found.stop)
        return self._report(began, failed, report, wholes)

    def _report(
        self, began: float, failed: dict[str, str], run: tuple[PipelineRun, list[str]] | None, wholes: list[OutputSpec]
    ) -> PipelineReport:
        stuck: list[str] = []
        if run is not None:
            failed |= {name: error_text(error) for name, error in run[0].failed.items()}
            stuck = run[1]
        report = PipelineReport(
            code=UNDONE if failed or stuck else FINE,
            seconds=time.monotonic() - began,
            queries=() if run is None else tuple(run[0].queries()),
            samples=() if run is None else tuple(run[0].samples()),
            failed=failed,
            stuck=tuple(stuck),
            batch=tuple(each.name for each in wholes if each.name not in failed),
        )
        log.info("spark_pipeline_ended", pipeline=self.spec.name, code=report.code, seconds=round(report.seconds, 3))
        return report

    def _supervise(
        self, spark: SparkSession, stop: threading.Event, watch: Callable[[PipelineRun], bool] | None, *, once: bool
    ) -> tuple[PipelineRun, list[str]]:
        run = call_within(self.spec.timeouts.start, "the pipeline's frames", lambda: self.start(spark, once=once))
        limit = self.spec.timeouts.once if once else None
        began = time.monotonic()
        stuck: list[str] = []
        try:
            while True:
                try:
                    run.step()
                except Exception as error:  # noqa: BLE001 - its JVM is gone: PySpark has many errors for that
                    log.error("spark_lost", pipeline=self.spec.name, **log.describe(error))
                    stuck.append(f"Spark, which is gone ({type(error).__name__})")
                    break
                watched = watch is not None and watch(run)
                if run.is_over or stop.is_set() or watched or run.failed:
                    break
                if limit is not None and time.monotonic() - began > limit:
                    stuck.append(f"the run, which is not done after {limit:g} s")
                    break
                stop.wait(_STEP)
        finally:
            stuck += run.stop()
        if watch is not None:
            watch(run)
        return run, stuck

    # -- batch jobs ----------------------------------------------------------------------------------------------------

    def _check_span(self, span: Span, outputs: tuple[OutputSpec, ...]) -> None:
        """Refuse a batch job that can't be run, or that would not end in the same rows when it is run again."""
        faults: list[ConfigFault] = []
        if span.since is not None and span.until is not None and span.since >= span.until:
            faults.append(ConfigFault(path="from", rule="is not before until", way_out="exchange them"))
        needed = {name for output in outputs for name in self.spec.sources_of(output.view)} or set(self.spec.sources)
        for source in unreplayable(self.spec):
            if source.name in needed:
                rule, way_out = "can't be read by a batch job", "run it as a stream"
                faults.append(ConfigFault(owner=f"source {source.name!r}", path="type", rule=rule, way_out=way_out))
        if span and all(self.spec.sources[name].time is None for name in needed):
            rule, way_out = (
                "is missing in each source, so that a span means nothing",
                "add time: the column of the time",
            )
            faults.append(ConfigFault(owner="sources", path="time", rule=rule, way_out=way_out))
        for output in outputs:
            for target in output.targets:
                why = why_not_again(target, output.key, whole=not span)
                if why is not None:
                    owner = f"output {output.name!r}"
                    faults.append(ConfigFault(owner=owner, path=f"to.{target.type}", rule=why[0], way_out=why[1]))
            if span and self._notes_spans(output):
                faults += self._overlaps(output, span)
        if faults:
            raise ConfigError.of(faults)

    def _notes_spans(self, output: OutputSpec) -> bool:
        return appends(output) and "://" not in self.spec.state  # a ledger is a local file

    def _overlaps(self, output: OutputSpec, span: Span) -> list[ConfigFault]:
        other = self._spans.other(output.name, span)
        if other is None:
            return []
        reset = f"batchqueue spark ledger reset {self._spans.path} --source {self._spans.source(output.name, other)}"
        return [
            ConfigFault(
                owner=f"output {output.name!r}",
                path="from" if span.since is not None else "until",
                rule=f"makes the span {span} overlap {other}, which was written before: what they share would be in "
                "twice",
                way_out="write the same span again, or what is missing, or use a sink that takes a key, such as "
                f"postgres; if you took its rows back: {reset}",
            )
        ]

    def _write_wholes(
        self, spark: SparkSession, span: Span, outputs: list[OutputSpec], stop: threading.Event
    ) -> dict[str, str]:
        """Write outputs by batch jobs, one after the other; those that failed, with their errors in a line."""
        if not outputs:
            return {}
        frames = batch_frames(spark, self.spec, span, [output.view for output in outputs])
        for output in outputs:
            if span and self._notes_spans(output):
                self._spans.note(output.name, span)
        failed: dict[str, str] = {}
        for output in outputs:
            error = self._write_whole(spark, span, output, frames, stop)
            if error is not None:
                failed[output.name] = error_text(error)
        for frame in frames.values():
            frame.unpersist()
        return failed

    def _write_whole(
        self, spark: SparkSession, span: Span, output: OutputSpec, frames: dict[str, DataFrame], stop: threading.Event
    ) -> BaseException | None:
        restarts = Restarts(self.spec.restart)
        while True:
            restarts.started(time.monotonic())
            writing = Writing(self.spec.name, output, f"{self.spec.state}/ledger")
            job = begin(
                f"output {output.name!r}",
                lambda writing=writing: writing.write_whole(frames[output.view], str(span)),  # type: ignore[misc]
            )
            error = self._wait_for(spark, job, stop)
            if error is None or stop.is_set() or isinstance(error, ConfigError | TimeoutError):
                return error
            again = restarts.failed(time.monotonic())
            if again is None:
                log.error("spark_query_given_up", query=output.name, failures=restarts.total, **log.describe(error))
                return error
            log.warning("spark_query_died", query=output.name, **log.describe(error))
            if stop.wait(max(again - time.monotonic(), 0.0)):
                return error

    def _wait_for(self, spark: SparkSession, job: Any, stop: threading.Event) -> BaseException | None:
        """What a batch job ended with; one that is stopped or takes too long is cancelled."""
        limit = self.spec.timeouts.once
        began = time.monotonic()
        while not job.is_done() and not stop.is_set():
            if limit is not None and time.monotonic() - began > limit:
                break
            stop.wait(_STEP)
        if not job.is_done():
            spark.sparkContext.cancelAllJobs()
        try:
            job.wait(self.spec.timeouts.stop)
        except Exception as error:  # noqa: BLE001 - Spark's and the sinks' own errors, for the report
            return error
        return None


def _plan(spark: SparkSession, frame: DataFrame) -> str:
    captured = io.StringIO()
    if not frame.isStreaming:
        with contextlib.redirect_stdout(captured):
            frame.explain(mode="formatted")
        return captured.getvalue().strip()
    frame.createOrReplaceTempView(_EXPLAINED)
    try:
        told = str(spark.sql("EXPLAIN EXTENDED SELECT * FROM explained_by_batchqueue").collect()[0][0])
    finally:
        spark.catalog.dropTempView(_EXPLAINED)
    _, _, analyzed = told.partition("== Analyzed Logical Plan ==")
    return f"== Analyzed Logical Plan =={analyzed.partition('== Physical Plan ==')[0]}".strip()


def call_within_or_log(seconds: float, function: Callable[[], object]) -> None:
    """Stop Spark; one that does not stop in time ends with its process."""
    try:
        call_within(seconds, "the stop of Spark", function)
    except Exception as error:  # noqa: BLE001 - nothing depends on it any more
        log.warning("spark_stop_failed", **log.describe(error))
