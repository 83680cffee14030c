"""Delivering batches to a destination: kept until they are delivered, sent again until they are, and bounded meanwhile.

    consume --> send_queue == delivery (when control says so) --> sink

Records wait in `send_queue`, in memory or on disk. `control` decides whether, when and how much may be sent. `delivery`
takes batches out, sends them, and settles each record. `engine` holds the parts together; `exporter` is what users see.
"""

from __future__ import annotations

from batchqueue_async.export.config import ExportConfig
from batchqueue_async.export.exporter import Exporter
from batchqueue_async.export.policies import (
    AdaptivePolicy,
    BatchPolicy,
    BreakerPolicy,
    FailoverPolicy,
    RetryBudget,
    RetryPolicy,
    SplitPolicy,
)
from batchqueue_async.export.stats import ExporterStats, ExportReport, GivenUp

__all__ = [
    "AdaptivePolicy",
    "BatchPolicy",
    "BreakerPolicy",
    "ExportConfig",
    "ExportReport",
    "Exporter",
    "ExporterStats",
    "FailoverPolicy",
    "GivenUp",
    "RetryBudget",
    "RetryPolicy",
    "SplitPolicy",
]
