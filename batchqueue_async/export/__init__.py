"""Delivering batches to a destination: kept until they are delivered, sent again until they are, and bounded meanwhile.

    consume --> send queue == feeder --> gate --> courier --> sink

In the order of the way: `policies` and `config`, `codec` (records on disk), `memory_queue` and `send_queue` (where they
wait), `breaker` and `gate` (whether anything may be sent), `retry` (when again), `scaling` (how many at once),
`outcome` (what an error means), `parcel` (a batch on its way), `failover`, `delivery` (one batch, until each of its
records is settled), `opening` (the sink's life), `pipeline`, `feeding`, `engine` (all of it), `exporter`.
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
