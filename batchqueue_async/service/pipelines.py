"""A pipeline of Spark next to the rest of a service: in a thread of its own, which waits for Spark all the time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async._support.log import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class PipelineThread:
    """One pipeline's run.

    Attributes:
        problem: what went wrong; None while it runs, and where nothing did.
    """

    def __init__(
        self,
        name: str,
        values: Mapping[str, Any],
        on_end: Callable[[], object],
        *,
        load: Callable[[str], Any] | None = None,
    ) -> None:
        """Say what runs.

        Args:
            name: what the service's file calls it.
            values: what the file says of it.
            on_end: called in the pipeline's thread when its run is over, however.
            load: makes the pipeline of a file.
        """
        self.problem: str | None = None
        self._name = name
        self._file: str = values["file"]
        self._once: bool = values.get("once", False)
        self._on_end = on_end
        self._load = load or _load
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"service-pipeline-{name}", daemon=True)

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self._ended.is_set()

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    def _run(self) -> None:
        try:
            report = self._load(self._file).run(once=self._once, stop=self._stop)
            if report.code:
                undone = [f"{name}: {text}" for name, text in report.failed.items()]
                undone += [f"{name}: did not end in order" for name in report.stuck]
                self.problem = "; ".join(undone) or f"ended with status {report.code}"
        except BaseException as error:  # noqa: BLE001 - a thread: whoever started it is to hear of it
            said = describe(error, full=True)
            self.problem = f"{said['error']}: {said['text']}"
        finally:
            if self.problem is not None:
                log.error("pipeline_failed", pipeline=self._name, problem=self.problem)
            self._ended.set()
            self._on_end()

    def stop(self) -> None:
        """Ask it to end in order."""
        self._stop.set()

    def finish(self, seconds: float) -> str | None:
        """Wait for the end; what went wrong, or None."""
        self.stop()
        if not self._ended.wait(seconds):
            return "has not ended in time; what it has not written comes again from its checkpoints"
        return self.problem


def _load(file: str) -> Any:
    from batchqueue_async.spark.pipelines.pipeline import SparkPipeline  # noqa: PLC0415 - pyspark is an extra

    return SparkPipeline.from_file(file)
