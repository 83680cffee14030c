"""What a pipeline's file says, checked: a frozen value for each of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from batchqueue_async.spark.pipelines.restart import RestartPolicy

Place = Literal["driver", "executors", "spark"]
"""Where an output is written: by a sink in the driver, by sinks on the executors, or by Spark itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The Spark that a pipeline runs on; what is not set is left to Spark's own configuration.

    Attributes:
        master: "local[2]", "spark://host:7077", "yarn", "k8s://..."; None leaves it to `spark-submit`.
        packages: Maven coordinates of what Spark is to load.
        jars: files that Spark is to load.
        py_files: Python files that the executors need.
        conf: Spark's own settings.
        log_level: how much Spark logs to the terminal.
    """

    master: str | None = None
    packages: tuple[str, ...] = ()
    jars: tuple[str, ...] = ()
    py_files: tuple[str, ...] = ()
    conf: Mapping[str, str] = field(default_factory=dict[str, str])
    log_level: str = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """How late rows may come: `delay` behind the newest time in `column`."""

    column: str
    delay: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Where rows come from.

    Attributes:
        name: the view's name in SQL.
        type: "rate", "rate-micro-batch", "files", "kafka", "jdbc" or "table".
        options: its fields, by name.
        static: whether it is read whole, for joins, instead of as a stream.
        watermark: how late rows may come; None for a stream without aggregates.
        time: the column that `--from` and `--until` are about; None reads the source whole in a batch job.
    """

    name: str
    type: str
    options: Mapping[str, Any]
    static: bool = False
    watermark: Watermark | None = None
    time: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerSpec:
    """When a micro-batch begins.

    Attributes:
        every: seconds between their beginnings; None begins one when the last is done.
        available_now: whether the query takes what there is and ends.
    """

    every: float | None = None
    available_now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Where the rows of a view are kept, so that several others read them and it is computed once.

    Attributes:
        path: the directory of its Parquet files.
        retention: after which time Spark drops files from the view, such as "7d"; None keeps them.
        partitions: how many files a micro-batch writes; None leaves it to Spark.
        trigger: when a micro-batch begins.
    """

    path: str
    retention: str | None = None
    partitions: int | None = None
    trigger: TriggerSpec = field(default_factory=TriggerSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSpec:
    """A stage between sources and outputs: SQL, or a function of DataFrames.

    Attributes:
        name: the view's name in SQL.
        inputs: the sources and views that it reads.
        sql: the query; None where there is a function.
        function: takes the inputs as DataFrames and returns one; None where there is SQL.
        watermark: how late rows of the view may come.
        store: where its rows are kept; None computes it anew for each output that reads it.
    """

    name: str
    inputs: tuple[str, ...]
    sql: str | None = None
    function: Callable[..., Any] | None = None
    watermark: Watermark | None = None
    store: StoreSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """One place that an output is written to.

    Attributes:
        type: "sqlite", "postgres", "parquet", "kafka" and so on.
        place: who writes.
        options: its fields, by name; paths are whole, references are still references.
    """

    type: str
    place: Place
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """A view and where its rows go.

    Attributes:
        name: the query's name.
        view: the view or source that is written.
        mode: "append", "update" or "complete".
        trigger: when a micro-batch begins.
        checkpoint: where Spark keeps how far the query is.
        key: the columns that make a row, for upserts and for the keys of records.
        dead_letters: the file, or on executors the directory, for rows that can't be delivered; None fails their batch.
        targets: where each batch goes; it is computed once for all of them.
    """

    name: str
    view: str
    mode: str
    trigger: TriggerSpec
    checkpoint: str
    key: tuple[str, ...]
    dead_letters: str | None
    targets: tuple[TargetSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The limits of a run's waits, in seconds.

    Attributes:
        start: for Spark, and for each query, to start.
        stop: for the queries, and then for Spark, to stop.
        once: for a run with `--once`, or a batch job, to be done; None does not limit it.
    """

    start: float = 180.0
    stop: float = 30.0
    once: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """Everything that a file says.

    Attributes:
        name: of the pipeline and of its Spark application.
        directory: what relative paths are relative to.
        state: the directory of checkpoints, stored views and the ledger, unless they say otherwise.
        session: the Spark that it runs on.
        sources: by name.
        views: by name, each after those that it reads.
        outputs: by name.
        restart: when a query that died is started again.
        timeouts: the limits of its waits.
    """

    name: str
    directory: Path
    state: str
    session: SessionSpec
    sources: Mapping[str, SourceSpec]
    views: Mapping[str, ViewSpec]
    outputs: Mapping[str, OutputSpec]
    restart: RestartPolicy
    timeouts: Timeouts

    def inputs_of(self, name: str) -> tuple[str, ...]:
        """The sources and views that a view reads; none for a source."""
        view = self.views.get(name)
        return () if view is None else view.inputs

    def made_of(self, name: str) -> set[str]:
        """A source or view itself, and every one that it is made of."""
        return {name}.union(*(self.made_of(each) for each in self.inputs_of(name)))

    def sources_of(self, name: str) -> set[str]:
        """The sources that a view is made of, by way of any other."""
        return self.made_of(name) & set(self.sources)

    def is_stream(self, name: str) -> bool:
        """Whether a source or view has rows that come in over time."""
        return any(not self.sources[source].static for source in self.sources_of(name))
