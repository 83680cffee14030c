"""PySpark through queues: `DriverSink` in the driver, the data source `batchqueue` on the executors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async.spark import requirements

requirements.check()

from batchqueue_async.spark.driver_sink import DriverSink, DriverStats  # noqa: E402 - after the check of its needs
from batchqueue_async.spark.executors.data_source import BatchQueueDataSource  # noqa: E402 - after the check of its needs

if TYPE_CHECKING:
    from batchqueue_async.spark.pipelines.pipeline import SparkPipeline

__all__ = ["BatchQueueDataSource", "DriverSink", "DriverStats", "SparkPipeline"]


def __getattr__(name: str) -> Any:
    # The Python workers of the executors import this package too, and have no use for pipelines.
    if name == "SparkPipeline":
        from batchqueue_async.spark.pipelines.pipeline import SparkPipeline  # noqa: PLC0415 - when it is asked for

        return SparkPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
