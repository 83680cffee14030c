"""PySpark through queues: `DriverSink` in the driver, the data source `batchqueue` on the executors."""

from __future__ import annotations

from batchqueue_async.spark import requirements

requirements.check()

from batchqueue_async.spark.data_source import BatchQueueDataSource  # noqa: E402 - after the check of what it needs
from batchqueue_async.spark.driver_sink import DriverSink, DriverStats  # noqa: E402

__all__ = ["BatchQueueDataSource", "DriverSink", "DriverStats"]
