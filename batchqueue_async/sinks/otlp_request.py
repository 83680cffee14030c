"""Public path of OTLP requests; they live in `sinks.otlp.request`."""

from __future__ import annotations

from batchqueue_async.sinks.otlp.request import SIGNALS, Grouping, Request, Signal, SignalName

__all__ = ["SIGNALS", "Grouping", "Request", "Signal", "SignalName"]
