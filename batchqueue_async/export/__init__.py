"""Delivering batches to a destination: kept until they are delivered, sent again until they are, and bounded meanwhile.

    consume --> send queue == feeder --> gate --> courier --> sink

In the order of the way: `config`, `codec` (records on disk), `memory_queue` and `send_queue` (where they wait),
`breaker` and `gate` (whether anything may be sent), `retry` (when again), `outcome` (what an error means), `parcel` (a
batch on its way), `delivery` (one batch, until each of its records is settled), `feeding`, `exporter`.
"""

from __future__ import annotations

from batchqueue_async.export.config import (
    AdaptivePolicy,
    BatchPolicy,
    BreakerPolicy,
    ExportConfig,
    FailoverPolicy,
    RetryBudget,
    RetryPolicy,
    SplitPolicy,
)
from batchqueue_async.export.exporter import Exporter
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
