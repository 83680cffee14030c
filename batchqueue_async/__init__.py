"""An asyncio-native batch queue framework: items go in one at a time or by the thousand, and come out in batches.

The way of an item::

    producer -- selector -- partition == drain task -- dispatch -- handler

Two rules carry the design. A queue lives on exactly one event loop, so its hot path has no locks; every caller from
elsewhere comes through one door, the bridge. And accepted is a promise: when `produce` says yes, the item is handled,
given to the error handler, or returned in the shutdown report.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchqueue_async._native import accelerated
from batchqueue_async._support.last_error import LastError
from batchqueue_async._support.registry import Registered, registered
from batchqueue_async.bridge.stats import BridgeStats
from batchqueue_async.bridge.sync_bridge import SyncBridge
from batchqueue_async.bridge.sync_queue import SyncQueue
from batchqueue_async.config import (
    RETRY,
    BufferStrategy,
    Consumer,
    DrainBalancer,
    ErrorHandler,
    Handler,
    HandlerRetry,
    QueueConfig,
    SharedScheduler,
    load_config,
)
from batchqueue_async.errors import (
    AuthError,
    BatchQueueError,
    ConfigError,
    ConfigFault,
    CorruptionError,
    DeadlockError,
    DeliveryError,
    DiskFullError,
    DurableQueueError,
    Failure,
    ForkedError,
    ItemDroppedError,
    ItemTooLargeError,
    LockedError,
    PartlyAcceptedError,
    PermanentError,
    QueueClosedError,
    QueueExistsError,
    QueueFullError,
    RecordTooLargeError,
    RetryableError,
    SinkError,
    ThrottledError,
    TooLargeError,
    UnhandledTypeError,
    WrongLoopError,
)
from batchqueue_async.policies import (
    PartitionPolicy,
    Selector,
    WorkerPolicy,
    by_key,
    round_robin,
    throughput_weighted,
    type_hash,
)
from batchqueue_async.queue.adapters import in_process, in_thread
from batchqueue_async.queue.batch_queue import BatchQueue
from batchqueue_async.queue.stats import (
    Distribution,
    HandlerStats,
    PartitionStats,
    QueueStats,
    ShutdownReport,
    WorkerStats,
)
from batchqueue_async.runtime.manager import BatchQueueManager, default_manager
from batchqueue_async.runtime.runner import run
from batchqueue_async.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    from batchqueue_async.durable import (
        DeadLetter,
        DurableConfig,
        DurableQueue,
        DurableStats,
        Lease,
        RecoveryReport,
    )
    from batchqueue_async.export import (
        AdaptivePolicy,
        BatchPolicy,
        BreakerPolicy,
        ExportConfig,
        Exporter,
        ExporterStats,
        ExportReport,
        FailoverPolicy,
        FanOut,
        GivenUp,
        RatePolicy,
        RetryBudget,
        RetryPolicy,
        Router,
        SplitPolicy,
    )
    from batchqueue_async.sinks.base import KeyedSink, PreparingSink, SendResult, Sink, SinkNeeds

__version__ = "0.1.0"

__all__ = [
    "RETRY",
    "AdaptivePolicy",
    "AuthError",
    "BatchPolicy",
    "BatchQueue",
    "BatchQueueError",
    "BatchQueueManager",
    "BreakerPolicy",
    "BridgeStats",
    "BufferStrategy",
    "ConfigError",
    "ConfigFault",
    "Consumer",
    "CorruptionError",
    "DeadLetter",
    "DeadlockError",
    "DeliveryError",
    "DiskFullError",
    "Distribution",
    "DrainBalancer",
    "DurableConfig",
    "DurableQueue",
    "DurableQueueError",
    "DurableStats",
    "ErrorHandler",
    "ExportConfig",
    "ExportReport",
    "Exporter",
    "ExporterStats",
    "FailoverPolicy",
    "Failure",
    "FanOut",
    "ForkedError",
    "GivenUp",
    "Handler",
    "HandlerRetry",
    "HandlerStats",
    "ItemDroppedError",
    "ItemTooLargeError",
    "KeyedSink",
    "LastError",
    "Lease",
    "LockedError",
    "PartitionPolicy",
    "PartitionStats",
    "PartlyAcceptedError",
    "PermanentError",
    "PreparingSink",
    "QueueClosedError",
    "QueueConfig",
    "QueueExistsError",
    "QueueFullError",
    "QueueStats",
    "RatePolicy",
    "RecordTooLargeError",
    "RecoveryReport",
    "Registered",
    "RetryBudget",
    "RetryPolicy",
    "RetryableError",
    "Router",
    "Scheduler",
    "Selector",
    "SendResult",
    "SharedScheduler",
    "ShutdownReport",
    "Sink",
    "SinkError",
    "SinkNeeds",
    "SplitPolicy",
    "SyncBridge",
    "SyncQueue",
    "ThrottledError",
    "TooLargeError",
    "UnhandledTypeError",
    "WorkerPolicy",
    "WorkerStats",
    "WrongLoopError",
    "accelerated",
    "by_key",
    "default_manager",
    "in_process",
    "in_thread",
    "load_config",
    "registered",
    "round_robin",
    "run",
    "throughput_weighted",
    "type_hash",
]

# Imported when they are first asked for: many programs need neither, and start without what that takes.
_DURABLE = ("DeadLetter", "DurableConfig", "DurableQueue", "DurableStats", "Lease", "RecoveryReport")
_EXPORT = (
    "AdaptivePolicy",
    "BatchPolicy",
    "BreakerPolicy",
    "ExportConfig",
    "ExportReport",
    "Exporter",
    "ExporterStats",
    "FailoverPolicy",
    "FanOut",
    "GivenUp",
    "RatePolicy",
    "RetryBudget",
    "RetryPolicy",
    "Router",
    "SplitPolicy",
)
_SINKS = ("KeyedSink", "PreparingSink", "SendResult", "Sink", "SinkNeeds")
_LATER = {
    **dict.fromkeys(_DURABLE, "batchqueue_async.durable"),
    **dict.fromkeys(_EXPORT, "batchqueue_async.export"),
    **dict.fromkeys(_SINKS, "batchqueue_async.sinks.base"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(_LATER[name]), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
