"""Delivering batches to a destination: kept until they are delivered, sent again until they are, and bounded meanwhile.

    consume --> send_queue == puller --> control --> sender --> sink

Records wait in `send_queue`, in memory or on disk. `control` decides whether, when and how fast anything may be sent.
`delivery` takes batches out, sends them, and settles each record. `needs` puts together what the sink asks for and what
was configured; `engine` holds the parts together; `exporter` is what users see, and `fan_out` several of them.
"""

from __future__ import annotations

from batchqueue_async.export.config import ExportConfig
from batchqueue_async.export.exporter import Exporter
from batchqueue_async.export.fan_out import FanOut, Router
from batchqueue_async.export.policies import (
    AdaptivePolicy,
    BatchPolicy,
    BreakerPolicy,
    FailoverPolicy,
    RatePolicy,
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
    "FanOut",
    "GivenUp",
    "RatePolicy",
    "RetryBudget",
    "RetryPolicy",
    "Router",
    "SplitPolicy",
]
