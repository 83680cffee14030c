"""Snapshots made by hand, for what is tested without a loop."""

from __future__ import annotations

from typing import Any

import batchqueue_async as bq
from batchqueue_async.observe.snapshot import DiskView, ExporterView, LoopView, ProcessSnapshot, QueueView

NOW = 1_700_000_000.0


def queue(name="rows", *, waits=True, closed=False, feeds=(), consumer=None, **numbers: Any) -> QueueView:
    numbers = {
        "attempted": 0, "accepted": 0, "refused": 0, "dropped_before": 0, "dropped_after": 0, "handled": 0, "failed": 0,
        "unhandled": 0, "in_flight": 0, "undelivered": 0, "used": 0, "capacity": 100, "oldest_age": 0.0,
        "partitions": (), "workers": (), "batch_sizes": bq.Distribution(), "queue_latency": bq.Distribution(),
    } | numbers  # fmt: skip
    stats = bq.QueueStats(name=name, **numbers)
    return QueueView(name=name, stats=stats, waits=waits, closed=closed, feeds=tuple(feeds), consumer=consumer)


def exporter(name="lake", *, rates=None, overflow="block", on_disk=True, closed=False, **numbers: Any) -> ExporterView:
    numbers = {"max_bytes": 1 << 20} | numbers
    stats = bq.ExporterStats(name=name, **numbers)
    return ExporterView(
        name=name, sink="Lake", stats=stats, rates=rates, overflow=overflow, on_disk=on_disk, closed=closed
    )


def disk(name="lake", **numbers: Any) -> DiskView:
    import dataclasses

    fields = dataclasses.fields(bq.DurableStats)
    empty = {
        "dropped": {},
        "retry_failures": {},
        "seconds": {},
        "max_records": None,
        "max_bytes": None,
        "free_bytes": None,
    }
    values = {each.name: empty.get(each.name, 0) for each in fields if each.name != "sync_seconds"} | numbers
    return DiskView(name=name, stats=bq.DurableStats(**values))


def loop(name="main", lag=0.0) -> LoopView:
    return LoopView(name=name, lag=lag)


def process(at: float, *views: Any, **more: Any) -> ProcessSnapshot:
    return ProcessSnapshot(
        at=NOW + at,
        started=NOW,
        version="1.2.3",
        queues=tuple(each for each in views if isinstance(each, QueueView)),
        exporters=tuple(each for each in views if isinstance(each, ExporterView)),
        disks=tuple(each for each in views if isinstance(each, DiskView)),
        loops=tuple(each for each in views if isinstance(each, LoopView)),
        **more,
    )
