"""`batchqueue run` of a pipeline of Spark, until it is stopped, or until it is done."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli.commands import PATH, flag, option, say
from batchqueue_async.errors import BatchQueueError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import click

    from batchqueue_async.cli.commands import Arguments
    from batchqueue_async.spark.pipelines.pipeline import PipelineReport, SparkPipeline

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def params() -> list[click.Parameter]:
    """The options that only pipelines of Spark have."""
    return [
        flag("--explain", "Spark: start it, print the plan of each query, and end"),
        flag("--once", "Spark: take what the sources have now (availableNow), and end"),
        option("--from", "since", metavar="TIME", text="Spark: write what happened from here on, as a batch job"),
        option("--until", metavar="TIME", text="Spark: and before this; 2026-01-31 or 2026-01-31T12:00:00Z"),
        option(
            "--picture", type=PATH, metavar="FILE", text="Spark: write rates, lag and batch times as SVG in the end"
        ),
        flag("--quiet", "Spark: show no table, only how it ended"),
    ]


def load(arguments: Arguments) -> SparkPipeline:
    """The pipeline that the arguments name.

    Raises:
        ConfigError: something is wrong with it, or Spark's packages are missing.
    """
    overrides: dict[str, Any] = {}
    for text in arguments.set:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--set {text}: is not NAME=VALUE; write --set spark.master=local[4]")
        overrides[name] = value
    # Functions are looked for where Python looks for a program's modules: next to the file, and where it is run.
    sys.path[:0] = [str(arguments.file.resolve().parent), str(Path.cwd())]
    from batchqueue_async.spark.pipelines.pipeline import SparkPipeline

    return SparkPipeline.from_file(arguments.file, overrides=overrides)


def check(arguments: Arguments) -> int:
    """Say everything that is wrong with a file, without starting Spark; 1 if anything is."""
    try:
        pipeline = load(arguments)
    except ConfigError as error:
        for fault in error.faults or (error,):
            say(str(fault))
        return 1
    spec = pipeline.spec
    say(f"{arguments.file}: {len(spec.sources)} sources, {len(spec.views)} views, {len(spec.outputs)} outputs; fine")
    return 0


def run(arguments: Arguments) -> int:
    """Run the pipeline of a file; the exit status."""
    pipeline = load(arguments)
    since, until = (_moment(name, text) for name, text in (("--from", arguments.since), ("--until", arguments.until)))
    stop = threading.Event()
    before = {each: signal.signal(each, _stopper(stop)) for each in _SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` has set it
    try:
        if arguments.explain:
            say(_explained(pipeline))
            return 0
        report = pipeline.run(once=arguments.once, since=since, until=until, stop=stop, watch=_watch(arguments))
    except TimeoutError as error:
        raise BatchQueueError(
            f"pipeline {pipeline.spec.name!r}: {error}; raise timeouts, or look for the cause"
        ) from error
    except BatchQueueError:
        raise
    except Exception as error:
        # Spark's own errors have no common base: a view that it can't analyse, a master that is not there.
        from batchqueue_async.spark.pipelines.supervisor import error_text

        raise BatchQueueError(f"pipeline {pipeline.spec.name!r}: {error_text(error)}") from error
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if arguments.picture is not None:
        from batchqueue_async.spark.pipelines.picture import draw

        arguments.picture.write_text(draw(pipeline.spec.name, report.samples), encoding="utf-8")
    _conclude(pipeline, report)
    return report.code


def _explained(pipeline: SparkPipeline) -> str:
    spark = pipeline.session()
    try:
        return pipeline.explain(spark)
    finally:
        spark.stop()


def _watch(arguments: Arguments) -> Callable[[Any], bool] | None:
    from batchqueue_async.spark.pipelines.display import Display

    return None if arguments.quiet else Display(sys.stdout).watch


def _stopper(stop: threading.Event) -> Callable[[int, object], None]:
    def on_signal(number: int, _frame: object) -> None:
        if stop.is_set():
            os._exit(3)  # the second one: what is not in the targets comes again from the checkpoints
        os.write(2, f"{signal.Signals(number).name}: stopping in order; once more ends at once\n".encode())
        stop.set()

    return on_signal


def _moment(name: str, text: str | None) -> Any:
    from batchqueue_async.spark.pipelines.fields import parse_moment

    if text is None:
        return None
    try:
        return parse_moment(text)
    except ValueError:
        raise ConfigError(f"{name} {text}: is not a time; write 2026-01-31 or 2026-01-31T12:00:00Z") from None


def _conclude(pipeline: SparkPipeline, report: PipelineReport) -> None:
    rows = sum(each.rows for each in report.queries)
    written = f"; written as batch jobs: {', '.join(report.batch)}" if report.batch else ""
    say(f"{pipeline.spec.name}: {rows:,} rows read in {report.seconds:.0f} s{written}")
    for name, text in report.failed.items():
        say(f"{name}: given up: {text}")
    for name in report.stuck:
        say(f"did not end in order: {name}")
