"""Batches to any gRPC method. Needs `[otlp]`, which brings gRPC."""

from __future__ import annotations

from batchqueue_async.sinks.grpc.sink import GrpcSink

__all__ = ["GrpcSink"]
