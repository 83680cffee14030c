"""The reference document, section by section: each option, default and metric has its counterpart, or its decision."""

from __future__ import annotations

import dataclasses

import pytest
from from_tree import ROOT

import batchqueue_async as bq
from batchqueue_async.durable.stats import DurableStats
from batchqueue_async.policies import available_cpus

PAGES = (
    "reference/exporter-metrics.md",
    "reference/durable-metrics.md",
    "decisions/export-and-the-reference-document.md",
)
TEXT = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
WORDS = TEXT.replace("-", "_")
CORES = available_cpus()
MIB = 1 << 20

# What the document's defaults are here; the document's value comes first.
DEFAULTS = {
    "queue-full-behavior": ("drop_oldest", bq.ExportConfig().overflow),
    "block, in seconds": (30.0, bq.ExportConfig().block_timeout),
    "queue-max-bytes": (1024 * MIB, bq.ExportConfig(path="x").byte_limit),
    "queue-workers": (2 * CORES, bq.ExportConfig().worker_count),
    "queue-retry-interval": (5.0, bq.RetryPolicy().initial),
    "queue-backoff-multiplier": (2.0, bq.RetryPolicy().multiplier),
    "queue-max-retry-delay": (300.0, bq.RetryPolicy().max_delay),
    "queue-circuit-breaker-enabled": (True, bq.BreakerPolicy().enabled),
    "queue-circuit-breaker-threshold": (5, bq.BreakerPolicy().threshold),
    "queue-circuit-breaker-reset-timeout": (30.0, bq.BreakerPolicy().reset_timeout),
    "pipeline_split.enabled": (None, bq.ExportConfig().split),
    "pipeline_split.preparer_count": (CORES, bq.SplitPolicy().preparer_count),
    "pipeline_split.sender_count": (2 * CORES, bq.SplitPolicy().sender_count),
    "pipeline_split.channel_size": (256, bq.SplitPolicy().channel),
    "max_concurrent_sends": (4, bq.SplitPolicy().sends_per_sender),
    "global_send_limit": (8 * CORES, bq.ExportConfig().send_limit),
    "adaptive_workers.enabled": (None, bq.ExportConfig().adaptive),
    "adaptive_workers.min_workers": (1, bq.AdaptivePolicy().min_workers),
    "adaptive_workers.max_workers": (4 * CORES, bq.AdaptivePolicy().most),
    "memory queue, entries": (1_000, bq.FailoverPolicy().max_entries),
    "memory queue, bytes": (256 * MIB, bq.FailoverPolicy().max_bytes),
    "memory queue, drained every": (5.0, bq.FailoverPolicy().interval),
    "memory queue, at once": (10, bq.FailoverPolicy().drain),
    "queue-memory-percent, memory-limit-ratio": (85_000, bq.ExportConfig.for_memory(limit=1_000_000).max_bytes),
    "queue-meta-sync": (1.0, bq.DurableConfig().sync_interval),
    "queue-stale-flush": (30.0, bq.DurableConfig().stale_flush),
    "queue-write-buffer-size": (256 << 10, bq.DurableConfig().write_buffer),
}

# Every option of the document's reference of flags and YAML.
OPTIONS = (
    *("enabled", "type", "path", "max_size", "max_bytes", "full_behavior", "always_queue", "workers"),
    *("inmemory_blocks", "chunk_size", "meta_sync", "stale_flush", "write_buffer_size", "compression"),
    *("retry_interval", "max_retry_delay", "backoff_enabled", "backoff_multiplier"),
    *("circuit_breaker_enabled", "threshold", "reset_timeout", "memory_percent", "memory_limit_ratio"),
    *("adaptive_enabled", "target_utilization", "pipeline_split.enabled", "preparer_count", "sender_count"),
    *("channel_size", "max_concurrent_sends", "global_send_limit", "adaptive_workers.enabled", "min_workers"),
    "max_workers",
)

# Every metric of the document: a field of the exporter's statistics, or of the durable queue's.
METRICS = {
    "queue_size": "records",
    "queue_bytes": "bytes",
    "queue_max_size": "max_records",
    "queue_max_bytes": "max_bytes",
    "queue_utilization_ratio": "utilization",
    "queue_disk_available_bytes": "disk_available_bytes",
    "queue_push_total": "accepted_batches",
    "queue_dropped_total": "dropped",
    "queue_retry_total": "retries",
    "_success_total": "retry_successes",
    "_failure_total": "retry_failures",
    "queue_disk_full_total": "disk_full",
    "fastqueue_inmemory_blocks": "durable.memory_blocks",
    "fastqueue_disk_bytes": "durable.disk_bytes",
    "fastqueue_meta_sync_total": "durable.syncs",
    "fastqueue_chunk_rotations": "durable.rotations",
    "fastqueue_inmemory_flushes": "durable.spilled",
    "queue_workers_active": "workers_active",
    "queue_workers_total": "workers_total",
    "queue_preparers_active": "preparers_active",
    "queue_senders_active": "senders_active",
    "queue_sends_inflight": "sends_in_flight",
    "queue_export_latency_ewma_seconds": "latency",
    "circuit_breaker_state": "breaker",
    "_open_total": "breaker_opens",
    "_rejected_total": "breaker_rejected",
    "queue_backoff_seconds": "backoff",
    "export_data_loss_total": "failover_evicted",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_is_the_documents(name):
    there, here = DEFAULTS[name]
    assert here == there


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_has_its_row_or_its_decision(option):
    assert option in WORDS


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_has_its_row_and_its_count(metric):
    assert metric in TEXT
    owner, _, name = METRICS[metric].rpartition(".")
    names = {each.name for each in dataclasses.fields(bq.ExporterStats)}
    if owner:
        assert owner in names
        names = set(dir(DurableStats)) | {*getattr(DurableStats, "__annotations__", {})}
    assert name in names
