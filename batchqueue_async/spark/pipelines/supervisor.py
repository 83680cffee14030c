"""The queries of a running pipeline: started in order, started again when they die, stopped in order."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async._support.redaction import shortened, without_credentials
from batchqueue_async._support.registry import everything
from batchqueue_async.errors import ConfigError
from batchqueue_async.spark.pipelines.frames import Streams
from batchqueue_async.spark.pipelines.progress import ProgressListener
from batchqueue_async.spark.pipelines.restart import Restarts
from batchqueue_async.spark.pipelines.targets import Writing
from batchqueue_async.spark.pipelines.waits import all_within, call_within
from batchqueue_async.spark.run_reports import RunReport, total_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from batchqueue_async.spark.pipelines.progress import QueryProgress, Sample
    from batchqueue_async.spark.pipelines.spec import PipelineSpec, StoreSpec, ViewSpec


@dataclass(slots=True)
class Supervised:
    """One query and what is known of it.

    Attributes:
        name: the output's, or the stored view's.
        start: starts it; the handle of Spark's query is what it returns.
        restarts: its failures.
        needs: queries that have to be done before it starts.
        writing: the output's own; None for a stored view.
        handle: Spark's query; None while it does not run.
        last: the handle of the last one that ran, or runs.
        runs: the ids of all of its runs.
        next_start: when to start it, by the clock; None: not any more.
        ended: how it ended: "done", "stopped" or "failed"; empty while it has not.
        error: what it died with last.
    """

    name: str
    start: Callable[[], Any]
    restarts: Restarts
    needs: frozenset[str] = frozenset()
    writing: Writing | None = None
    handle: Any = None
    last: Any = None
    runs: list[str] = field(default_factory=list[str])
    next_start: float | None = 0.0
    ended: str = ""
    error: BaseException | None = field(default=None, repr=False)


class PipelineRun:
    """A pipeline whose queries run; `step` sees to them, `stop` ends them."""

    def __init__(
        self,
        spark: SparkSession,
        spec: PipelineSpec,
        *,
        once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the frames and the sinks; nothing runs before the first `step`.

        Raises:
            ConfigError: a function of the pipeline does not return a DataFrame.
        """
        self._spark = spark
        self._spec = spec
        self._once = once
        self._clock = clock
        for view in spec.views.values():
            if view.store is not None and spec.is_stream(view.name):
                make_directory(spark, view.store.path)
        streams = Streams(spark, spec)
        self._queries = [
            *(self._stored(spec.views[name], frame) for name, frame in streams.computed.items()),
            *(self._output(name, streams) for name, output in spec.outputs.items() if spec.is_stream(output.view)),
        ]
        self.name = spec.name
        self.listener = ProgressListener([each.name for each in self._queries])
        spark.streams.addListener(self.listener)
        everything.add("pipeline", self)

    def _stored(self, view: ViewSpec, frame: Any) -> Supervised:
        store = view.store
        assert store is not None  # noqa: S101 - for type checkers: only stored views are computed by a query
        checkpoint = f"{store.path.rstrip('/')}-checkpoint"
        return Supervised(
            name=view.name,
            start=lambda: _start_store(frame, view.name, store, checkpoint, once=self._once),
            restarts=Restarts(self._spec.restart),
            needs=self._stores_before(view.inputs),
        )

    def _output(self, name: str, streams: Streams) -> Supervised:
        output = self._spec.outputs[name]
        writing = Writing(self._spec.name, output, f"{self._spec.state}/ledger")
        return Supervised(
            name=name,
            start=lambda: writing.start(streams.frames[output.view], once=self._once),
            restarts=Restarts(self._spec.restart),
            needs=self._stores_before((output.view,)),
            writing=writing,
        )

    def _stores_before(self, names: tuple[str, ...]) -> frozenset[str]:
        """The stored views that something reads, near or far; a run that ends takes them in this order."""
        if not self._once:
            return frozenset()
        found: set[str] = set()
        for name in names:
            view = self._spec.views.get(name)
            if view is not None:
                found |= {name} if view.store is not None else set()
                found |= self._stores_before(view.inputs)
        return frozenset(found)

    # -- while it runs -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Start what is due, and see what has ended; to be called every now and then."""
        done = {each.name for each in self._queries if each.ended == "done"}
        for query in self._queries:
            if query.handle is not None:
                self._look(query)
            elif query.next_start is not None and query.needs <= done and self._clock() >= query.next_start:
                self._start(query)
            self._note(query)

    @property
    def is_over(self) -> bool:
        """Whether no query runs and none will."""
        return all(query.handle is None and query.next_start is None for query in self._queries)

    @property
    def failed(self) -> dict[str, BaseException | None]:
        """The queries that were given up, and what they died with."""
        return {each.name: each.error for each in self._queries if each.ended == "failed"}

    def _start(self, query: Supervised) -> None:
        try:
            query.handle = call_within(
                self._spec.timeouts.start, f"the start of query {query.name!r}", lambda: self._start_here(query)
            )
        except Exception as error:  # noqa: BLE001 - Spark's and the sinks' own errors, and each is a failed start
            self._failed(query, error)
            return
        query.last = query.handle
        query.runs.append(str(query.handle.runId))
        if query.restarts.total:
            log.warning("spark_query_restarted", query=query.name, failures=query.restarts.in_a_row)
        query.restarts.started(self._clock())

    def _start_here(self, query: Supervised) -> Any:
        # Spark looks for a data source written in Python in the session that is active in the thread, and PySpark has
        # this one call that makes a session so.
        spark: Any = self._spark
        spark.createDataFrame([], "nothing INT")
        return query.start()

    def _take_last(self, query: Supervised) -> None:
        """Count the reports that the listener has not got yet: Spark brings them on a thread of its own, at leisure."""
        if query.last is None:
            return
        try:
            for progress in query.last.recentProgress:
                self.listener.take(progress)
        except Exception as error:  # noqa: BLE001 - Spark itself is gone, and the reports with it
            log.warning("spark_report_failed", query=query.name, **log.describe(error))

    def _look(self, query: Supervised) -> None:
        if query.handle.isActive:
            return
        error = query.handle.exception()
        query.handle = None
        if error is not None:
            failure = query.writing.failure if query.writing is not None else None
            self._failed(query, failure or error)
            return
        # It had no more to do, or someone else stopped it by Spark's own means.
        query.ended, query.next_start = "done", None

    def _failed(self, query: Supervised, error: BaseException) -> None:
        query.handle, query.error = None, error
        again = None if _is_final(error) else query.restarts.failed(self._clock())
        query.next_start = again
        fields = log.describe(error)
        if again is None:
            query.ended = "failed"
            log.error("spark_query_given_up", query=query.name, failures=query.restarts.total, **fields)
        else:
            delay = round(again - self._clock(), 3)
            log.warning("spark_query_died", query=query.name, again_in=delay, **fields)

    def _note(self, query: Supervised) -> None:
        state = query.ended or ("running" if query.handle is not None else "waiting" if query.error else "starting")
        sinks = [sink.stats() for sink in query.writing.sinks] if query.writing is not None else []
        executors = total_of(query.runs) if query.writing is not None and query.writing.on_executors else RunReport()
        self.listener.set(
            query.name,
            state=state,
            restarts=query.restarts.total if query.ended != "failed" else max(query.restarts.total - 1, 0),
            error="" if query.error is None else type(query.error).__name__,
            written=sum(each.rows for each in sinks) + executors.rows,
            skipped=sum(each.skipped_rows for each in sinks) + executors.skipped_rows,
            dead=sum(each.dead_rows for each in sinks) + executors.dead_rows,
        )

    def queries(self) -> list[QueryProgress]:
        """What each query has done, stored views first."""
        found = self.listener.queries()
        return [found[query.name] for query in self._queries]

    def peek(self) -> tuple[QueryProgress, ...]:
        """What each query has done, for who finds the run in `registered("pipeline")`."""
        return tuple(self.queries())

    def samples(self) -> list[Sample]:
        """The last micro-batches of all queries."""
        return self.listener.samples()

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self) -> list[str]:
        """Stop the queries, then close the sinks, within the limit; what was not done in time.

        What was delivered is in the targets, and what was not comes again when the pipeline is run again.
        """
        deadline = self._clock() + self._spec.timeouts.stop
        active = {each.name: each.handle.stop for each in self._queries if each.handle is not None}
        errors = all_within(self._spec.timeouts.stop, active)
        sinks = {
            f"the sinks of {each.name}": each.writing.close
            for each in self._queries
            if each.writing is not None and each.name not in errors
        }
        errors |= all_within(max(deadline - self._clock(), 1.0), sinks)
        for query in self._queries:
            if query.handle is not None:
                query.handle, query.ended = None, query.ended or "stopped"
            query.next_start = None
            self._take_last(query)
            self._note(query)
        for name, error in errors.items():
            log.error("spark_query_stop_failed", query=name, **log.describe(error))
        everything.remove(self)
        try:
            self._spark.streams.removeListener(self.listener)
        except Exception as error:  # noqa: BLE001 - Spark itself is gone, and its listeners with it
            log.warning("spark_stop_failed", **log.describe(error))
        return list(errors)


def _is_final(error: BaseException) -> bool:
    """Whether another start would end in the same way: the pipeline is wrong, and not something that it needs."""
    return isinstance(error, ConfigError) or type(error).__name__ in {"AnalysisException", "ParseException"}


def error_text(error: BaseException | None) -> str:
    """An error in one line for people: its class and its text, without credentials.

    Example:
        >>> error_text(ConnectionError("postgres://app:hunter2@db refused"))
        'ConnectionError: postgres://app:***@db refused'
    """
    if error is None:
        return "unknown"
    lines = [line.strip(" :\t") for line in without_credentials(str(error)).splitlines()]
    # What py4j says of every error of the JVM comes before the error itself.
    said = [line for line in lines if line and not line.startswith("An error occurred while calling ")]
    return f"{type(error).__name__}: {shortened(said[0] if said else '')}"


def _start_store(frame: Any, name: str, store: StoreSpec, checkpoint: str, *, once: bool) -> Any:
    """Start the query that keeps a view's rows: Spark's file sink, which writes each batch exactly once."""
    if store.partitions is not None:
        frame = frame.coalesce(store.partitions)
    writer = frame.writeStream.queryName(name).outputMode("append").format("parquet")
    writer = writer.option("path", store.path).option("checkpointLocation", checkpoint)
    if store.retention is not None:
        writer = writer.option("retention", store.retention)
    if once or store.trigger.available_now:
        writer = writer.trigger(availableNow=True)
    elif store.trigger.every is not None:
        writer = writer.trigger(processingTime=f"{round(store.trigger.every * 1000)} milliseconds")
    return writer.start()


def make_directory(spark: Any, path: str) -> None:
    """Make a directory where Spark keeps its files: its readers want it before its writer has made it."""
    context = spark.sparkContext
    java, settings = context._jvm, context._jsc.hadoopConfiguration()  # noqa: SLF001 - PySpark has no other way
    hadoop = java.org.apache.hadoop.fs.Path(path)
    hadoop.getFileSystem(settings).mkdirs(hadoop)
