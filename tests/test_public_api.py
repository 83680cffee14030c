"""The exported surface is the contract: names, signatures and defaults, docstrings."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import batchqueue_async as bq

# As ARCHITECTURE.md has them; the names after the empty line are given beside the contract.
NAMES = [
    "AuthError",
    "BatchQueue",
    "BatchQueueError",
    "BatchQueueManager",
    "BufferStrategy",
    "ConfigError",
    "CorruptionError",
    "DeadlockError",
    "DeliveryError",
    "DiskFullError",
    "DurableConfig",
    "DurableQueue",
    "DurableQueueError",
    "ForkedError",
    "Lease",
    "LockedError",
    "PartitionPolicy",
    "PermanentError",
    "QueueClosedError",
    "QueueConfig",
    "QueueExistsError",
    "QueueStats",
    "RecordTooLargeError",
    "RecoveryReport",
    "RetryableError",
    "SharedScheduler",
    "ShutdownReport",
    "SinkError",
    "SyncBridge",
    "SyncQueue",
    "TooLargeError",
    "WorkerPolicy",
    "WrongLoopError",
    "by_key",
    "default_manager",
    "in_process",
    "in_thread",
    "load_config",
    "round_robin",
    "throughput_weighted",
    "type_hash",
    "Consumer",
    "DeadLetter",
    "Distribution",
    "DrainBalancer",
    "DurableStats",
    "ErrorHandler",
    "Failure",
    "Handler",
    "ItemDroppedError",
    "PartitionStats",
    "PartlyAcceptedError",
    "Scheduler",
    "Selector",
    "UnhandledTypeError",
    "WorkerStats",
    "run",
    "AdaptivePolicy",
    "BatchPolicy",
    "BreakerPolicy",
    "BridgeStats",
    "ExportConfig",
    "ExportReport",
    "Exporter",
    "ExporterStats",
    "FailoverPolicy",
    "GivenUp",
    "QueueFullError",
    "RetryBudget",
    "RetryPolicy",
    "SplitPolicy",
    "PreparingSink",
    "RatePolicy",
    "FanOut",
    "Router",
    "SinkNeeds",
    "ThrottledError",
]

SIGNATURES = {
    # policies
    "WorkerPolicy.fixed": "(count)",
    "WorkerPolicy.cpu_cores": "(multiplier)",
    "WorkerPolicy.cpu_cores_with_base": "(base, multiplier)",
    "WorkerPolicy.io_bound": "()",
    "WorkerPolicy.resolve": "(cpu_count=None)",
    "PartitionPolicy.fixed": "(count)",
    "PartitionPolicy.worker_multiply": "(multiplier)",
    "PartitionPolicy.adaptive": "(multiplier=25)",
    "PartitionPolicy.resolve": "(workers, weight=0)",
    # selectors, balancer, adapters
    "type_hash": "()",
    "round_robin": "()",
    "by_key": "(key)",
    "throughput_weighted": "(skip_ratio=1.15)",
    "in_thread": "(function)",
    "in_process": "(function)",
    "SharedScheduler": "(name, policy)",
    "load_config": "(path=None, *, environ=None, prefix='BATCHQUEUE_', overrides=None)",
    # queue
    "BatchQueue.produce": "async (item)",
    "BatchQueue.produce_nowait": "(item)",
    "BatchQueue.produce_many": "async (items)",
    "BatchQueue.produce_many_nowait": "(items)",
    "BatchQueue.deliver": "async (items)",
    "BatchQueue.flush": "async (timeout=None)",
    "BatchQueue.add_handler": "(type, handler, weight=1.0, max_batch=None, linger=None, timeout=None)",
    "BatchQueue.remove_handler": "(type)",
    "BatchQueue.handler": "(type, weight=1.0, max_batch=None, linger=None, timeout=None)",
    "BatchQueue.stats": "()",
    "BatchQueue.shutdown": "async (timeout=None)",
    "BatchQueue.bridge": "()",
    "QueueStats.top": "(n)",
    # manager
    "default_manager": "()",
    "BatchQueueManager": "()",
    "BatchQueueManager.create": "(name, config=None)",
    "BatchQueueManager.get_or_create": "(name, config=None)",
    "BatchQueueManager.get": "(name)",
    "BatchQueueManager.names": "()",
    "BatchQueueManager.scheduler": "(name)",
    "BatchQueueManager.shutdown": "async (name, timeout=None)",
    "BatchQueueManager.shutdown_all": "async (timeout=None)",
    # bridge
    "SyncBridge.queue": "(name)",
    "SyncBridge.call": "(function, *arguments, timeout=None)",
    "SyncQueue.produce": "(item, timeout=None)",
    "SyncQueue.produce_many": "(items, timeout=None)",
    "SyncQueue.deliver": "(items, timeout=None)",
    "SyncQueue.flush": "(timeout=None)",
    "SyncQueue.shutdown": "(timeout=None)",
    "SyncQueue.produce_async": "async (item, timeout=None)",
    # durable queue
    "DurableQueue.put": "async (payload, durability=None)",
    "DurableQueue.put_many": "async (payloads, durability=None)",
    "DurableQueue.lease": "async (max_records=1000, max_bytes=16777216, wait=None)",
    "DurableQueue.stats": "()",
    "DurableQueue.close": "async ()",
    "Lease.ack": "async (seqs=None)",
    "Lease.nack": "async (delay=0, seqs=None, *, reason='nack', counted=True, more=0)",
    "Lease.dead_letter": "async (reason, seqs=None)",
    # export
    "Exporter.consume": "async (batch)",
    "Exporter.flush": "async (timeout=None)",
    "Exporter.stats": "()",
    "Exporter.shutdown": "async (timeout=None)",
    # errors
    "RetryableError": "(message='', *, retry_after=None, error_type=None, culprits=())",
    "DeliveryError": "(message, failures=())",
}

ERRORS = {
    "ConfigError": "BatchQueueError",
    "QueueExistsError": "BatchQueueError",
    "QueueClosedError": "BatchQueueError",
    "WrongLoopError": "BatchQueueError",
    "DeadlockError": "BatchQueueError",
    "DeliveryError": "BatchQueueError",
    "ForkedError": "BatchQueueError",
    "DurableQueueError": "BatchQueueError",
    "LockedError": "DurableQueueError",
    "CorruptionError": "DurableQueueError",
    "DiskFullError": "DurableQueueError",
    "RecordTooLargeError": "DurableQueueError",
    "SinkError": "BatchQueueError",
    "RetryableError": "SinkError",
    "PermanentError": "SinkError",
    "TooLargeError": "SinkError",
    "AuthError": "SinkError",
}

STATS = [
    "attempted",
    "accepted",
    "refused",
    "dropped",
    "handled",
    "failed",
    "unhandled",
    "capacity",
    "used",
    "used_ratio",
    "partitions",
    "top",
    "oldest_age",
    "batch_sizes",
    "queue_latency",
]


def find(path: str):
    found = bq
    for name in path.split("."):
        found = getattr(found, name)
    return found


def shape(function) -> str:
    """A signature without types and without self."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    ]
    text = str(inspect.Signature(parameters))
    return f"async {text}" if inspect.iscoroutinefunction(function) else text


def test_exactly_these_names_are_exported():
    assert sorted(NAMES) == sorted(set(NAMES))
    assert set(NAMES) - set(bq.__all__) == set(), "a name of the contract is gone"
    public = {name for name in bq.__all__ if hasattr(bq, name)}
    assert public == set(bq.__all__)
    assert bq.__all__ == sorted(bq.__all__, key=lambda name: (not name.isupper(), name))


def test_star_imports_exactly_these():
    names: dict[str, object] = {}
    exec("from batchqueue_async import *", names)
    assert set(names) - {"__builtins__"} == set(bq.__all__)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures_and_defaults(path):
    found = find(path)
    if inspect.isclass(found):
        found = found.__init__
        text = shape(found).replace("(self, ", "(").replace(" -> None", "")
    else:
        text = shape(found)
    assert text == SIGNATURES[path]


@pytest.mark.parametrize(("name", "base"), ERRORS.items())
def test_errors_stand_under_one_base(name, base):
    assert issubclass(getattr(bq, name), getattr(bq, base))
    assert issubclass(getattr(bq, name), bq.BatchQueueError)


def test_what_stats_and_reports_say():
    assert [name for name in STATS if not hasattr(bq.QueueStats, name)] == []
    for name in ("handled", "failed", "undelivered", "elapsed"):
        assert name in {field.name for field in dataclasses.fields(bq.ShutdownReport)}
    for frozen in (bq.QueueStats, bq.ShutdownReport, bq.QueueConfig, bq.SharedScheduler, bq.WorkerPolicy):
        assert frozen.__dataclass_params__.frozen
    assert [strategy.name for strategy in bq.BufferStrategy] == [
        "BLOCKING",
        "IF_POSSIBLE",
        "DROP_OLDEST",
        "DROP_NEWEST",
    ]
    for name in ("name", "config", "closed", "partition_count", "worker_count"):
        assert (
            name in dir(bq.BatchQueue) or name in bq.BatchQueue.__annotations__ or name in _annotations(bq.BatchQueue)
        )


def _annotations(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in vars(base).get("__annotations__", {})}


def classes_and_functions():
    # The aliases Handler and ErrorHandler are no objects with a docstring of their own.
    return [name for name in bq.__all__ if inspect.isclass(getattr(bq, name)) or inspect.isfunction(getattr(bq, name))]


@pytest.mark.parametrize("name", classes_and_functions())
def test_every_public_name_has_a_docstring_and_an_example(name):
    found = getattr(bq, name)
    own = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    assert own
    assert own.strip()
    if inspect.isclass(found) and issubclass(found, Exception):
        return  # its base class shows how errors read
    assert doctest.DocTestParser().get_examples(own), f"{name} has no example"


@pytest.mark.parametrize("name", [name for name in classes_and_functions() if inspect.isclass(getattr(bq, name))])
def test_every_public_method_has_a_docstring(name):
    found = getattr(bq, name)
    if not found.__module__.startswith("batchqueue_async"):
        return
    missing = []
    for base in found.__mro__:
        if not base.__module__.startswith("batchqueue_async"):
            continue
        for member, value in vars(base).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not member.startswith("_") and inspect.isfunction(function) and not function.__doc__:
                missing.append(f"{base.__name__}.{member}")
    assert missing == []


def test_nothing_optional_is_imported_with_the_package():
    """Extras stay optional; and a program that only imports the package starts no thread."""
    code = (
        "import sys, threading; import batchqueue_async; "
        "extras = {'batchqueue_async.durable', 'cramjam', 'isal', 'yaml', "
        " 'grpc', 'aiokafka', 'asyncpg', 'pyspark', 'pyarrow', 'prometheus_client', 'opentelemetry', "
        " 'click', 'uvicorn'}; "
        "print(sorted(extras & set(sys.modules)), threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] 1\n"


def test_names_that_are_imported_later_are_the_real_ones():
    from batchqueue_async import durable, export
    from batchqueue_async.sinks import base

    real = vars(base) | vars(durable) | vars(export)
    assert {name for name in bq._LATER if getattr(bq, name) is not real[name]} == set()
    assert set(bq._LATER) <= set(dir(bq))
    with pytest.raises(AttributeError, match="no attribute 'DurableQueu'"):
        _ = bq.DurableQueu


def test_each_sink_is_found_by_its_name_beside_its_module():
    from batchqueue_async import sinks

    found = {}
    for path in Path(sinks.__file__).parent.glob("[a-z]*"):
        module = importlib.import_module(f"batchqueue_async.sinks.{path.stem}")
        sent_to = [each for each in vars(module).values() if inspect.isclass(each) and hasattr(each, "send")]
        concrete = [each for each in sent_to if not (inspect.isabstract(each) or getattr(each, "_is_protocol", False))]
        found |= {each.__name__: each for each in concrete if each.__name__.endswith("Sink")}
    assert {name: getattr(sinks, name) for name in dir(sinks) if name.endswith("Sink")} == found
    with pytest.raises(ImportError, match="cannot import name 'KafkaSinc'"):
        from batchqueue_async.sinks import KafkaSinc  # noqa: F401 - it is not there


def test_the_package_says_its_version_and_that_it_is_typed():
    import importlib.metadata
    import importlib.resources

    assert importlib.metadata.version("batchqueue-async") == bq.__version__
    assert (importlib.resources.files(bq) / "py.typed").is_file()
