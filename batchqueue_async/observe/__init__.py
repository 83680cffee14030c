"""Watching a process: metrics, health, status and a live page, answered by a thread of its own.

    queues, exporters, disks, consumers --> snapshot --> table of metrics --> Prometheus, OpenTelemetry
                                                     --> status ---------> health, sentences, the page, commands
    calls of handlers and sinks -----------------------------------------> traces

A snapshot is read without asking any loop; everything else here is computed from snapshots.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchqueue_async.observe.client import OpsClient, find_processes
    from batchqueue_async.observe.opentelemetry import instrument
    from batchqueue_async.observe.prometheus import BatchQueueCollector
    from batchqueue_async.observe.server import OpsServer, serve
    from batchqueue_async.observe.snapshot import ProcessSnapshot, take_snapshot
    from batchqueue_async.observe.status import ComponentStatus, Status
    from batchqueue_async.observe.table import METRICS
    from batchqueue_async.observe.traces import Traces, trace
    from batchqueue_async.observe.web import asgi

# Imported when asked for: a program that only writes metrics needs no web server.
_WHERE = {
    "METRICS": "table",
    "BatchQueueCollector": "prometheus",
    "ComponentStatus": "status",
    "OpsClient": "client",
    "OpsServer": "server",
    "ProcessSnapshot": "snapshot",
    "Status": "status",
    "Traces": "traces",
    "asgi": "web",
    "find_processes": "client",
    "instrument": "opentelemetry",
    "serve": "server",
    "take_snapshot": "snapshot",
    "trace": "traces",
}

__all__ = [
    "METRICS",
    "BatchQueueCollector",
    "ComponentStatus",
    "OpsClient",
    "OpsServer",
    "ProcessSnapshot",
    "Status",
    "Traces",
    "asgi",
    "find_processes",
    "instrument",
    "serve",
    "take_snapshot",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
