"""Which public names get a page of the reference beyond those of the package; for conf.py and a test.

Those of `reference/sinks.md` and `reference/spark-pipeline-fields.md` stand there.
"""

from __future__ import annotations

_SINKS = "batchqueue_async.sinks"

PAGES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "7-spark": (
        "Spark",
        {"batchqueue_async.spark": ("DriverSink", "DriverStats", "BatchQueueDataSource")},
    ),
    "5-more-about-sinks": (
        "More about sinks",
        {
            f"{_SINKS}.base": ("TransactionalSink", "StagingSink", "DeclaringSink", "LedgerSink", "PrunableSink"),
            f"{_SINKS}.sqlite": ("SqliteTransaction",),
            f"{_SINKS}.http_formats": ("Format", "Body"),
            f"{_SINKS}.otlp_request": ("Grouping", "Request", "Signal"),
        },
    ),
    "8-observe": (
        "Watching",
        {
            "batchqueue_async.observe": (
                "serve",
                "OpsServer",
                "asgi",
                "BatchQueueCollector",
                "instrument",
                "trace",
                "Traces",
                "take_snapshot",
                "ProcessSnapshot",
                "Status",
                "ComponentStatus",
                "OpsClient",
                "find_processes",
                "METRICS",
            )
        },
    ),
    "9-durable-records": (
        "Records of the durable queue",
        {"batchqueue_async.durable": ("Record",)},
    ),
}

INTERNAL = frozenset(
    {
        f"{owner}.{name}"
        for owner, names in {
            "BatchQueue": "abandon after_fork attach_inbox close_gate close_up counters forbid_shutdown_here forked "
            "handler_of intake loop on_own_thread owns router ended",
            "BatchQueueManager": "after_fork shutdown_all_from_thread",
        }.items()
        for name in names.split()
    }
)
"""Members that other parts of the library call, and users don't: the reference leaves them out."""

NOT_PUBLIC = frozenset({"batchqueue_async.durable.config", "batchqueue_async.durable.state.frame"})
"""Modules with `__all__` for their neighbours' sake."""
