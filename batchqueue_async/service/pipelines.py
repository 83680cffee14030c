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
        ended: set when the run is over, however.
    """

    def __init__(self, name: str, values: Mapping[str, Any], *, load: Callable[[str], Any] | None = None) -> None:
        self.ended = threading.Event()
        self._name = name
        self._file: str = values["file"]
        self._once: bool = values.get("once", False)
        self._load = load or _load
        self._stop = threading.Event()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"service-pipeline-{name}", daemon=True)

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    def _run(self) -> None:
        try:
            report = self._load(self._file).run(once=self._once, stop=self._stop)
            if report.code:
                undone = [f"{name}: {text}" for name, text in report.failed.items()]
                undone += [f"{name}: did not end in order" for name in report.stuck]
                self._problem = "; ".join(undone) or f"ended with status {report.code}"
        except BaseException as error:  # noqa: BLE001 - a thread: whoever started it is to hear of it
            said = describe(error, full=True)
            self._problem = f"{said['error']}: {said['text']}"
        finally:
            if self._problem is not None:
                log.error("pipeline_failed", pipeline=self._name, problem=self._problem)
            self.ended.set()

    def stop(self) -> None:
        """Ask it to end in order."""
        self._stop.set()

    def finish(self, seconds: float) -> str | None:
        """Wait for the end; what went wrong, or None."""
        self.stop()
        if not self.ended.wait(seconds):
            return "has not ended in time; what it has not written comes again from its checkpoints"
        return self._problem


def _load(file: str) -> Any:
    from batchqueue_async.spark.pipelines.pipeline import SparkPipeline  # noqa: PLC0415 - half a second of imports

    return SparkPipeline.from_file(file)
