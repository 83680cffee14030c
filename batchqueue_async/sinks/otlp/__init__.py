"""Spans, log records and metrics over OTLP, by gRPC or HTTP. Needs `[otlp]`."""

from __future__ import annotations

from batchqueue_async.sinks.otlp.http import OtlpHttpSink
from batchqueue_async.sinks.otlp.sink import OtlpSink, OtlpStats

__all__ = ["OtlpHttpSink", "OtlpSink", "OtlpStats"]
