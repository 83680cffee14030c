"""Spans, log records and metrics over OTLP/gRPC. Needs `[otlp]`."""

from __future__ import annotations

from batchqueue_async.sinks.otlp.sink import OtlpSink, OtlpStats

__all__ = ["OtlpSink", "OtlpStats"]
